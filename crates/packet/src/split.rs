//! Cutting a TAP device's reads into frames that a path carries.
//!
//! A [`Plan`] says how; [`Plan::write_header`] and [`Plan::payload`] then give each segment's bytes,
//! so that a segment is built straight in the send buffer. Packets that are too long and may be
//! fragmented take the slow path: [`finish_checksum`], then [`fragment_ipv4`].

use std::ops::Range;

use crate::bytes::{be16, be32, put16, put32};
use crate::checksum::{self, Sum};
use crate::layout::{self, Headers, Layout, Network, Transport};
use crate::vnet::{self, VnetHeader};
use crate::{ethernet, ipv4, tcp, udp, vxlan};

pub use crate::fragment::{FragmentError, fragment_ipv4};

/// The most segments of one super-packet: 64 KiB at the least segment size that Linux's TCP lets a peer ask for
/// (48 bytes).
pub const SEGMENTS_MAX: usize = 1366;

/// Whether a frame's transport checksum is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameChecksum {
    /// As it will be on a wire; right or wrong.
    Complete,
    /// The field holds the pseudo-header's sum only; the bytes from `start` on are not added yet.
    Partial {
        /// Offset in the frame at which the checksummed bytes begin.
        start: u16,
        /// Offset of the field from `start`.
        offset: u16,
    },
}

impl From<Option<vxlan::Rco>> for FrameChecksum {
    /// The checksum of a received frame, by the mark in its VXLAN header.
    fn from(rco: Option<vxlan::Rco>) -> Self {
        rco.map_or(Self::Complete, |rco| Self::Partial {
            start: u16::from(rco.start),
            offset: rco.offset(),
        })
    }
}

impl From<&VnetHeader> for FrameChecksum {
    /// The checksum of a frame as the kernel gives it.
    fn from(vnet: &VnetHeader) -> Self {
        match vnet.needs_checksum() {
            true => Self::Partial { start: vnet.csum_start, offset: vnet.csum_offset },
            false => Self::Complete,
        }
    }
}

/// The kind of frame that a [`Plan`] cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One frame, sent as it is.
    Whole,
    /// A TCP super-packet over IPv4.
    Tcp4,
    /// A TCP super-packet over IPv6.
    Tcp6,
    /// A UDP super-packet over IPv4.
    Udp4,
    /// A UDP super-packet over IPv6.
    Udp6,
}

/// Why a frame from a TAP device cannot be sent as it is. Except for [`Self::TooLong`] the fault lies with
/// the frame's maker (a container with a raw socket, or the kernel): drop and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    /// The packet does not fit the path and may not be cut into equal segments. Answer with ICMP
    /// ([`crate::toobig`]), or fragment it.
    #[error(
        "an IP packet (or segment) of {packet} bytes exceeds the path MTU {mtu}: answer with ICMP or fragment it"
    )]
    TooLong {
        /// Bytes of the IP packet, or of one segment's.
        packet: usize,
        /// The path's IP MTU for this frame, VLAN tags deducted.
        mtu: usize,
    },
    /// The frame is shorter than its headers, or they are not those of the super-packet's type.
    #[error("the headers of a super-packet do not match its type; drop it")]
    Malformed,
    /// A type of super-packet that Weft did not ask the kernel for.
    #[error("unknown super-packet type {0}; drop it")]
    UnknownType(u8),
    /// The segment size is 0 or more than the payload.
    #[error("invalid segment size {size} for a payload of {payload} bytes; drop the packet")]
    BadSegmentSize {
        /// Segment size as given.
        size: u16,
        /// Payload bytes.
        payload: usize,
    },
    /// More than [`SEGMENTS_MAX`] segments.
    #[error("{0} segments in one super-packet; drop it")]
    TooManySegments(usize),
    /// The mark of a partial checksum is missing, outside the frame, or not at the checksum of the
    /// super-packet's transport header.
    #[error("invalid position of a partial checksum, {start} + {offset}; drop the packet")]
    BadChecksumMark {
        /// Offset of the checksummed bytes as given.
        start: u16,
        /// Offset of the field from it as given.
        offset: u16,
    },
}

/// How one read from a TAP device is cut.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Bytes from the Ethernet to the transport header, rewritten for each segment. For a whole frame the
    /// bytes up to its partial checksum, or 0.
    pub header_len: usize,
    /// Payload bytes of each segment but the last, which may have fewer.
    pub segment_len: usize,
    /// Segments: 1 to [`SEGMENTS_MAX`].
    pub segments: usize,
    /// Bytes of the frame that are sent: without Ethernet padding, if it is a super-packet.
    pub frame_len: usize,
    /// The state of the checksum in headers that [`Self::write_header`] writes without finishing it.
    pub checksum: FrameChecksum,
    /// The kind of the frame.
    pub kind: Kind,
    rco: Option<vxlan::Rco>,
    l3: usize,
    l4: usize,
    /// The pseudo-header without its length.
    pseudo: Sum,
    /// The IPv4 header without total length, identification and checksum.
    ip_sum: Sum,
}

impl Plan {
    /// As [`Self::with_headers`], for a frame whose headers are not known yet.
    ///
    /// # Errors
    /// [`SplitError`]
    pub fn new(vnet: &VnetHeader, frame: &[u8], mtu: usize) -> Result<Self, SplitError> {
        Self::with_headers(vnet, frame, &Layout::parse(frame), mtu)
    }

    /// Plans how to send `frame`, read together with `vnet` and with these headers, over a path. The path's frames
    /// hold inner IP packets of at most `mtu` bytes; a VLAN tag takes its 4 bytes from them.
    ///
    /// TCP super-packets are cut smaller than the kernel asked if need be; the boundaries of UDP
    /// datagrams stay. All lengths come from the packet itself, none from `vnet.hdr_len`.
    ///
    /// # Errors
    /// [`SplitError`]
    pub fn with_headers(
        vnet: &VnetHeader,
        frame: &[u8],
        headers: &Headers,
        mtu: usize,
    ) -> Result<Self, SplitError> {
        let limit = mtu.saturating_add(ethernet::LEN);
        let (network, transport) = match vnet.gso_type & !vnet::GSO_ECN {
            vnet::GSO_NONE => return Self::whole(vnet, frame, headers, limit),
            vnet::GSO_TCPV4 => (Some(Network::V4), Transport::Tcp),
            vnet::GSO_TCPV6 => (Some(Network::V6), Transport::Tcp),
            vnet::GSO_UDP_L4 => (None, Transport::Udp),
            other => return Err(SplitError::UnknownType(other)),
        };
        let routed;
        let layout = match headers {
            Ok(layout) => layout,
            Err(opaque) => {
                routed = Layout::behind_routing(frame, *opaque).ok_or(SplitError::Malformed)?;
                &routed
            }
        };
        if layout.transport != transport || network.is_some_and(|network| network != layout.network)
        {
            return Err(SplitError::Malformed);
        }
        let mut plan = Self::super_packet(vnet, frame, layout, limit)?;
        if headers.is_err() || !holds_pseudo(frame, layout) {
            plan.rco = None;
        }
        Ok(plan)
    }

    /// Writes the headers of segment `index` to the start of `out` and returns [`Self::header_len`].
    ///
    /// Lengths, IPv4 identification and header checksum, TCP sequence number and flags, UDP length
    /// are the segment's own. The transport checksum is the pseudo-header's sum, as a partial
    /// checksum is marked, or with `finish_checksum` the checksum over the segment.
    ///
    /// # Panics
    /// If `frame` is not the frame that the plan was made for, `index` is not under
    /// [`Self::segments`], or `out` is shorter than [`Self::header_len`].
    pub fn write_header(
        &self,
        frame: &[u8],
        index: usize,
        finish_checksum: bool,
        out: &mut [u8],
    ) -> usize {
        let out = &mut out[..self.header_len];
        out.copy_from_slice(&frame[..self.header_len]);
        match self.kind {
            Kind::Whole => {
                if let (true, FrameChecksum::Partial { start, offset }) =
                    (finish_checksum, self.checksum)
                {
                    let value = finished(frame, start, offset);
                    put16(out, usize::from(start + offset), value);
                }
            }
            Kind::Tcp4 | Kind::Tcp6 | Kind::Udp4 | Kind::Udp6 => {
                self.patch(frame, index, finish_checksum, out);
            }
        }
        self.header_len
    }

    /// The range of segment `index`'s payload in the frame; empty from [`Self::segments`] on.
    #[must_use]
    #[inline]
    pub fn payload(&self, index: usize) -> Range<usize> {
        let start = index.saturating_mul(self.segment_len).saturating_add(self.header_len);
        let start = start.min(self.frame_len);
        start..start.saturating_add(self.segment_len).min(self.frame_len)
    }

    /// Bytes of the whole frame of segment `index`: headers and payload.
    #[must_use]
    #[inline]
    pub fn segment_frame_len(&self, index: usize) -> usize {
        self.header_len + self.payload(index).len()
    }

    /// The mark that says where the partial checksum is. `None`: the checksum is complete, or no mark can say
    /// it, so that it must be finished. Only the checksum of the outermost TCP or UDP header is ever marked,
    /// since a receiver takes no other. Its field must hold the sum of the visible pseudo-header: a receiver
    /// that merges computes that sum again, and must not correct a wrong one.
    #[must_use]
    pub const fn rco(&self) -> Option<vxlan::Rco> {
        self.rco
    }

    fn whole(
        vnet: &VnetHeader,
        frame: &[u8],
        headers: &Headers,
        limit: usize,
    ) -> Result<Self, SplitError> {
        let (l2, _) = layout::network(headers).ok_or(SplitError::Malformed)?;
        if frame.len() > limit {
            return Err(too_long(frame.len(), l2, limit));
        }
        let mut plan = Self {
            header_len: 0,
            segment_len: frame.len(),
            segments: 1,
            frame_len: frame.len(),
            checksum: FrameChecksum::Complete,
            kind: Kind::Whole,
            rco: None,
            l3: 0,
            l4: 0,
            pseudo: Sum::default(),
            ip_sum: Sum::default(),
        };
        if vnet.needs_checksum() {
            let (start, offset) = (vnet.csum_start, vnet.csum_offset);
            plan.header_len = mark_end(frame.len(), start, offset)?;
            plan.segment_len = frame.len() - plan.header_len;
            plan.checksum = FrameChecksum::Partial { start, offset };
            plan.rco = headers
                .as_ref()
                .ok()
                .filter(|layout| marks(layout, start, offset) && holds_pseudo(frame, layout))
                .and_then(|_| vxlan::Rco::new(start, offset));
        }
        Ok(plan)
    }

    fn super_packet(
        vnet: &VnetHeader,
        frame: &[u8],
        layout: &Layout,
        limit: usize,
    ) -> Result<Self, SplitError> {
        let (start, offset) = (vnet.csum_start, vnet.csum_offset);
        if !vnet.needs_checksum() || !marks(layout, start, offset) {
            return Err(SplitError::BadChecksumMark { start, offset });
        }
        let header_len = layout.payload;
        let payload = layout.end - header_len;
        let size = usize::from(vnet.gso_size);
        if size == 0 || size > payload {
            return Err(SplitError::BadSegmentSize { size: vnet.gso_size, payload });
        }
        let room = limit.saturating_sub(header_len);
        if room == 0 || (layout.transport == Transport::Udp && size > room) {
            return Err(too_long(header_len + size, layout.l3, limit));
        }
        let segment_len = size.min(room);
        let segments = payload.div_ceil(segment_len);
        if segments > SEGMENTS_MAX {
            return Err(SplitError::TooManySegments(segments));
        }
        let kind = match (layout.transport, layout.network) {
            (Transport::Tcp, Network::V4) => Kind::Tcp4,
            (Transport::Tcp, Network::V6) => Kind::Tcp6,
            (Transport::Udp, Network::V4) => Kind::Udp4,
            (Transport::Udp, Network::V6) => Kind::Udp6,
        };
        Ok(Self {
            header_len,
            segment_len,
            segments,
            frame_len: layout.end,
            checksum: FrameChecksum::Partial { start, offset },
            kind,
            rco: vxlan::Rco::new(start, offset),
            l3: layout.l3,
            l4: layout.l4,
            // As the field has it, less the length, as Linux's own cutting does.
            pseudo: Sum::default()
                .word(be16(frame, layout.checksum_field()))
                .word(!((layout.end - layout.l4) as u16)),
            ip_sum: ip_sum(frame, layout),
        })
    }

    fn patch(&self, frame: &[u8], index: usize, finish_checksum: bool, out: &mut [u8]) {
        assert!(index < self.segments, "segment {index} of {}", self.segments);
        let payload = self.payload(index);
        let end = self.header_len + payload.len();
        self.patch_ip(index, end, out);
        let transport = match self.kind {
            Kind::Udp4 | Kind::Udp6 => {
                put16(out, self.l4 + 4, (end - self.l4) as u16);
                Transport::Udp
            }
            _ => {
                self.patch_tcp(index, out);
                Transport::Tcp
            }
        };
        let field = self.l4 + usize::from(transport.checksum_offset());
        let pseudo = self.pseudo.long((end - self.l4) as u32);
        let value = if finish_checksum {
            put16(out, field, 0);
            let sum = pseudo.bytes(&out[self.l4..]).bytes(&frame[payload]);
            nonzero(transport.checksum_offset(), sum.checksum())
        } else {
            pseudo.partial()
        };
        put16(out, field, value);
    }

    fn patch_ip(&self, index: usize, end: usize, out: &mut [u8]) {
        match self.kind {
            Kind::Tcp4 | Kind::Udp4 => {
                let length = (end - self.l3) as u16;
                let id = be16(out, self.l3 + 4).wrapping_add(index as u16);
                put16(out, self.l3 + 2, length);
                put16(out, self.l3 + 4, id);
                put16(out, self.l3 + 10, self.ip_sum.word(length).word(id).checksum());
            }
            _ => put16(out, self.l3 + 4, (end - self.l3 - crate::ipv6::LEN) as u16),
        }
    }

    fn patch_tcp(&self, index: usize, out: &mut [u8]) {
        let sequence = be32(out, self.l4 + 4);
        let advance = (index * self.segment_len) as u32;
        put32(out, self.l4 + 4, sequence.wrapping_add(advance));
        let flags = &mut out[self.l4 + 13];
        if index + 1 < self.segments {
            *flags &= !(tcp::FIN | tcp::PSH);
        }
        if index > 0 {
            *flags &= !tcp::CWR;
        }
    }
}

/// Finishes the partial checksum of a frame in place, if `vnet` marks one.
///
/// # Errors
/// [`SplitError::BadChecksumMark`] if the mark is outside the frame.
pub fn finish_checksum(vnet: &VnetHeader, frame: &mut [u8]) -> Result<(), SplitError> {
    if vnet.needs_checksum() {
        let end = mark_end(frame.len(), vnet.csum_start, vnet.csum_offset)?;
        let value = finished(frame, vnet.csum_start, vnet.csum_offset);
        put16(frame, end - 2, value);
    }
    Ok(())
}

/// The checksum over a frame from `start` on, the partial sum in the field included.
fn finished(frame: &[u8], start: u16, offset: u16) -> u16 {
    nonzero(offset, Sum::default().bytes(&frame[usize::from(start)..]).checksum())
}

fn nonzero(offset: u16, checksum: u16) -> u16 {
    if offset == udp::CHECKSUM_OFFSET { checksum::udp_nonzero(checksum) } else { checksum }
}

/// The end of the marked field, if it lies behind the Ethernet addresses and within the frame.
fn mark_end(frame_len: usize, start: u16, offset: u16) -> Result<usize, SplitError> {
    let bad = SplitError::BadChecksumMark { start, offset };
    let field = start.checked_add(offset).ok_or(bad)?;
    let end = usize::from(field) + 2;
    if usize::from(start) < ethernet::LEN || end > frame_len {
        return Err(bad);
    }
    Ok(end)
}

/// Whether a mark names the transport checksum of this packet.
pub(crate) fn marks(layout: &Layout, start: u16, offset: u16) -> bool {
    usize::from(start) == layout.l4 && offset == layout.transport.checksum_offset()
}

/// Whether the checksum field holds the sum of the pseudo-header, as a partial checksum should.
fn holds_pseudo(frame: &[u8], layout: &Layout) -> bool {
    let length = (layout.end - layout.l4) as u32;
    layout.pseudo(frame, length).partial() == be16(frame, layout.checksum_field())
}

fn ip_sum(frame: &[u8], layout: &Layout) -> Sum {
    match layout.network {
        Network::V6 => Sum::default(),
        Network::V4 => {
            let header = &frame[layout.l3..layout.l4];
            let sum = Sum::default().bytes(&header[..2]).bytes(&header[6..10]);
            sum.bytes(&header[12..ipv4::LEN]).bytes(&header[ipv4::LEN..])
        }
    }
}

fn too_long(frame_len: usize, l2: usize, limit: usize) -> SplitError {
    SplitError::TooLong { packet: frame_len - l2, mtu: limit.saturating_sub(l2) }
}
