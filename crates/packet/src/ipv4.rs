//! IPv4 headers (RFC 791).

use std::net::Ipv4Addr;

use crate::ParseError;
use crate::bytes::{array, be16, need, put16};
use crate::checksum::Sum;

/// Bytes of a header without options.
pub const LEN: usize = 20;
/// Bytes of the longest header.
pub const LEN_MAX: usize = 60;
/// Protocol number of ICMP.
pub const PROTOCOL_ICMP: u8 = 1;
/// Protocol number of TCP.
pub const PROTOCOL_TCP: u8 = 6;
/// Protocol number of UDP.
pub const PROTOCOL_UDP: u8 = 17;
/// Flag in the word at offset 6: do not fragment.
pub const DONT_FRAGMENT: u16 = 0x4000;
/// Flag in the word at offset 6: more fragments follow.
pub const MORE_FRAGMENTS: u16 = 0x2000;
/// The bits of the word at offset 6 that give the fragment's offset in units of 8 bytes.
pub const OFFSET_MASK: u16 = 0x1fff;

/// A header whose lengths are right; its checksum is not verified.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    bytes: &'a [u8],
}

impl<'a> Header<'a> {
    /// Reads the header at the start of a packet, behind which padding may follow.
    ///
    /// # Errors
    /// [`ParseError`] if the version is not 4, or the header or the total length do not fit the
    /// bytes.
    pub fn parse(packet: &'a [u8]) -> Result<Self, ParseError> {
        need("IPv4", packet, LEN)?;
        if packet[0] >> 4 != 4 {
            return Err(ParseError::Invalid { header: "IPv4", field: "version" });
        }
        let len = usize::from(packet[0] & 15) * 4;
        if len < LEN {
            return Err(ParseError::Invalid { header: "IPv4", field: "header length" });
        }
        let total = usize::from(be16(packet, 2));
        if total < len {
            return Err(ParseError::Invalid { header: "IPv4", field: "total length" });
        }
        need("IPv4", packet, total)?;
        Ok(Self { bytes: &packet[..len] })
    }

    /// Bytes of the header with its options: 20 to 60.
    #[must_use]
    pub const fn header_len(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes of header and payload.
    #[must_use]
    pub fn total_len(&self) -> usize {
        usize::from(be16(self.bytes, 2))
    }

    /// Type of service: DSCP and ECN.
    #[must_use]
    pub const fn tos(&self) -> u8 {
        self.bytes[1]
    }

    /// Identification.
    #[must_use]
    pub fn id(&self) -> u16 {
        be16(self.bytes, 4)
    }

    /// Whether routers must not fragment the packet.
    #[must_use]
    pub fn dont_fragment(&self) -> bool {
        be16(self.bytes, 6) & DONT_FRAGMENT != 0
    }

    /// Whether fragments follow this one.
    #[must_use]
    pub fn more_fragments(&self) -> bool {
        be16(self.bytes, 6) & MORE_FRAGMENTS != 0
    }

    /// Offset of the payload in the unfragmented one, in bytes.
    #[must_use]
    pub fn fragment_offset(&self) -> usize {
        usize::from(be16(self.bytes, 6) & OFFSET_MASK) * 8
    }

    /// Whether this is a fragment, be it the first.
    #[must_use]
    pub fn is_fragment(&self) -> bool {
        be16(self.bytes, 6) & (MORE_FRAGMENTS | OFFSET_MASK) != 0
    }

    /// Time to live, in hops.
    #[must_use]
    pub const fn ttl(&self) -> u8 {
        self.bytes[8]
    }

    /// Protocol of the payload.
    #[must_use]
    pub const fn protocol(&self) -> u8 {
        self.bytes[9]
    }

    /// Source address.
    #[must_use]
    pub fn source(&self) -> Ipv4Addr {
        array::<4>(self.bytes, 12).into()
    }

    /// Destination address.
    #[must_use]
    pub fn destination(&self) -> Ipv4Addr {
        array::<4>(self.bytes, 16).into()
    }

    /// The options' bytes: 0 to 40.
    #[must_use]
    pub fn options(&self) -> &'a [u8] {
        &self.bytes[LEN..]
    }

    /// Whether the header's checksum is right.
    #[must_use]
    pub fn checksum_ok(&self) -> bool {
        Sum::default().bytes(self.bytes).checksum() == 0
    }
}

/// The fields of a header to write, without options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Builder {
    /// Type of service.
    pub tos: u8,
    /// Bytes of header and payload.
    pub total_len: u16,
    /// Identification.
    pub id: u16,
    /// Whether routers must not fragment the packet.
    pub dont_fragment: bool,
    /// Time to live, in hops.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Source address.
    pub source: Ipv4Addr,
    /// Destination address.
    pub destination: Ipv4Addr,
}

impl Builder {
    /// Writes the header with its checksum to the first [`LEN`] bytes of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`].
    pub fn write(&self, out: &mut [u8]) {
        out[0] = 0x45;
        out[1] = self.tos;
        put16(out, 2, self.total_len);
        put16(out, 4, self.id);
        put16(out, 6, if self.dont_fragment { DONT_FRAGMENT } else { 0 });
        out[8] = self.ttl;
        out[9] = self.protocol;
        out[12..16].copy_from_slice(&self.source.octets());
        out[16..20].copy_from_slice(&self.destination.octets());
        set_checksum(&mut out[..LEN]);
    }
}

/// Computes the checksum of a header of exactly `header` bytes and puts it in its place.
pub(crate) fn set_checksum(header: &mut [u8]) {
    put16(header, 10, 0);
    let checksum = Sum::default().bytes(header).checksum();
    put16(header, 10, checksum);
}
