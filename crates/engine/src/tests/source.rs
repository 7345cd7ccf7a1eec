//! Packets as a container's kernel hands them to a TAP device, built byte by byte.

use super::referee::{VNET, finish_ipv4, finished, folded, put, sum};
use super::{FAR, LOCAL};

pub(super) const PSH: u8 = 8;
pub(super) const ACK: u8 = 16;

/// One TCP or UDP packet, or super-packet.
#[derive(Clone, Debug)]
pub(super) struct Packet {
    /// VLAN tags, each with its type.
    pub(super) tags: Vec<[u8; 4]>,
    pub(super) v6: bool,
    pub(super) udp: bool,
    /// The last byte of the source address.
    pub(super) host: u8,
    /// IPv4: may routers not fragment it?
    pub(super) df: bool,
    pub(super) id: u16,
    /// IPv4 options, a multiple of 4 bytes.
    pub(super) options: Vec<u8>,
    /// IPv6 extension headers: the type, and all bytes; the first becomes the next type.
    pub(super) extensions: Vec<(u8, Vec<u8>)>,
    pub(super) tcp_options: Vec<u8>,
    pub(super) sequence: u32,
    pub(super) flags: u8,
    pub(super) payload: Vec<u8>,
}

impl Packet {
    /// A plain one without payload: TCP or UDP over IPv4 or IPv6.
    pub(super) fn new(udp: bool, v6: bool) -> Self {
        Self {
            tags: Vec::new(),
            v6,
            udp,
            host: 1,
            df: true,
            id: 65_500,
            options: Vec::new(),
            extensions: Vec::new(),
            tcp_options: vec![1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8],
            sequence: u32::MAX - 70_000,
            flags: ACK,
            payload: Vec::new(),
        }
    }

    /// The four of them.
    pub(super) fn each() -> [Self; 4] {
        [(false, false), (false, true), (true, false), (true, true)]
            .map(|(udp, v6)| Self::new(udp, v6))
    }

    pub(super) fn with(&self, payload: &[u8]) -> Self {
        Self { payload: payload.to_vec(), ..self.clone() }
    }

    /// Offset of the IP header in the frame.
    pub(super) fn l3(&self) -> usize {
        14 + self.tags.len() * 4
    }

    /// Offset of the TCP or UDP header in the frame.
    pub(super) fn l4(&self) -> usize {
        let extensions: usize = self.extensions.iter().map(|(_, bytes)| bytes.len()).sum();
        self.l3() + if self.v6 { 40 + extensions } else { 20 + self.options.len() }
    }

    /// Bytes of all headers.
    pub(super) fn header_len(&self) -> usize {
        self.l4() + if self.udp { 8 } else { 20 + self.tcp_options.len() }
    }

    /// The longest payload that the IP length can say.
    pub(super) fn payload_max(&self) -> usize {
        65_535 - (self.header_len() - self.l3() - if self.v6 { 40 } else { 0 })
    }

    fn field(&self) -> usize {
        if self.udp { 6 } else { 16 }
    }

    /// Its checksum complete: a container without checksum offload.
    pub(super) fn complete(&self) -> Vec<u8> {
        let (mut read, l4) = (self.bytes(), VNET + self.l4());
        let value = finished(sum(&read[l4..]), self.field());
        put(&mut read, l4 + self.field(), value);
        read
    }

    /// Its checksum partial, as with checksum offload.
    pub(super) fn partial(&self) -> Vec<u8> {
        let mut read = self.bytes();
        read[0] = 1;
        read[6..8].copy_from_slice(&(self.l4() as u16).to_le_bytes());
        read[8..10].copy_from_slice(&(self.field() as u16).to_le_bytes());
        read
    }

    /// With segmentation offload: a super-packet for segments of `size` bytes, if it is longer.
    pub(super) fn offloaded(&self, size: u16) -> Vec<u8> {
        if self.payload.len() > usize::from(size) { self.cut_to(size) } else { self.partial() }
    }

    /// As [`Self::offloaded`], whatever the length.
    pub(super) fn cut_to(&self, size: u16) -> Vec<u8> {
        let mut read = self.partial();
        read[1] = match (self.udp, self.v6) {
            (true, _) => 5,
            (false, false) => 1,
            (false, true) => 4,
        };
        read[2..4].copy_from_slice(&(self.header_len() as u16).to_le_bytes());
        read[4..6].copy_from_slice(&size.to_le_bytes());
        read
    }

    /// The packet that goes on where this one, cut to `size`, ends.
    pub(super) fn next(&self, size: u16) -> Self {
        let segments = self.payload.len().div_ceil(usize::from(size)).max(1);
        Self {
            id: self.id.wrapping_add(segments as u16),
            sequence: self.sequence.wrapping_add(self.payload.len() as u32),
            ..self.clone()
        }
    }

    /// An empty virtio net header and the frame; the checksum field holds the pseudo-header's sum.
    fn bytes(&self) -> Vec<u8> {
        let l4_len = self.header_len() - self.l4() + self.payload.len();
        let mut out = vec![0; VNET];
        out.extend(FAR.0);
        out.extend(LOCAL.0);
        out.extend(self.tags.iter().flatten());
        let protocol = if self.udp { 17 } else { 6 };
        if self.v6 {
            self.ipv6(&mut out, protocol);
        } else {
            self.ipv4(&mut out, protocol);
        }
        let addresses = VNET + self.l3() + if self.v6 { 8 } else { 12 };
        let addresses = addresses..addresses + if self.v6 { 32 } else { 8 };
        let mut pseudo = sum(&out[addresses]) + u64::from(protocol) + l4_len as u64;
        // The destination is the final one (RFC 8200 section 8.1).
        if let Some((_, routing)) = self.extensions.iter().find(|(kind, _)| *kind == 43) {
            let at = VNET + self.l3() + 24;
            pseudo += sum(&routing[8..24]) + u64::from(!folded(sum(&out[at..at + 16])));
        }
        out.extend([0x9c, 0x40, 0x14, 0x51]);
        if self.udp {
            out.extend((l4_len as u16).to_be_bytes());
        } else {
            out.extend(self.sequence.to_be_bytes());
            out.extend([9, 8, 7, 6, (5 + self.tcp_options.len() as u8 / 4) << 4, self.flags]);
            out.extend([1, 0xf5]);
        }
        out.extend(folded(pseudo).to_be_bytes());
        if !self.udp {
            out.extend([0, 0]);
            out.extend(&self.tcp_options);
        }
        out.extend(&self.payload);
        out
    }

    fn ipv4(&self, out: &mut Vec<u8>, protocol: u8) {
        out.extend([8, 0]);
        let (at, header) = (out.len(), 20 + self.options.len());
        let total = header + self.header_len() - self.l4() + self.payload.len();
        out.extend([0x40 | (header / 4) as u8, 0x02]);
        out.extend((total as u16).to_be_bytes());
        out.extend(self.id.to_be_bytes());
        out.extend([if self.df { 0x40 } else { 0 }, 0, 63, protocol, 0, 0]);
        out.extend([10, 99, 0, self.host, 10, 99, 1, 2]);
        out.extend(&self.options);
        finish_ipv4(out, at);
    }

    fn ipv6(&self, out: &mut Vec<u8>, protocol: u8) {
        out.extend([0x86, 0xdd]);
        let length = self.header_len() - self.l3() - 40 + self.payload.len();
        let kinds = self.extensions.iter().map(|(kind, _)| *kind).chain([protocol]);
        let kinds: Vec<u8> = kinds.collect();
        out.extend([0x60, 0x23, 0x45, 0x67]);
        out.extend((length as u16).to_be_bytes());
        out.extend([kinds[0], 63]);
        out.extend([0xfd, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, self.host]);
        out.extend([0xfd, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 1, 2]);
        for ((_, bytes), next) in self.extensions.iter().zip(&kinds[1..]) {
            out.push(*next);
            out.extend(&bytes[1..]);
        }
    }
}

/// Bytes that tell their place, from `from` on.
pub(super) fn pattern(from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|at| (at * 31 + at / 251) as u8).collect()
}

/// Numbers that look random and are the same for the same seed.
#[derive(Clone, Debug)]
pub(super) struct Dice(pub(super) u64);

impl Dice {
    /// A number under `sides`.
    pub(super) fn roll(&mut self, sides: usize) -> usize {
        // Knuth's MMIX generator; its high bits are the good ones.
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % sides.max(1)
    }

    pub(super) fn shuffle<T>(&mut self, things: &mut [T]) {
        for last in (1..things.len()).rev() {
            let other = self.roll(last + 1);
            things.swap(last, other);
        }
    }
}
