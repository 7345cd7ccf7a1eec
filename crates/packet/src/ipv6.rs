//! IPv6 headers (RFC 8200).

use std::net::Ipv6Addr;

use crate::ParseError;
use crate::bytes::{array, be16, be32, need, put16, put32};

/// Bytes of the header without extension headers.
pub const LEN: usize = 40;
/// The least MTU of a link (RFC 8200 section 5).
pub const MTU_MIN: usize = 1280;
/// Next header: hop-by-hop options.
pub const NEXT_HOP_BY_HOP: u8 = 0;
/// Next header: TCP.
pub const NEXT_TCP: u8 = 6;
/// Next header: UDP.
pub const NEXT_UDP: u8 = 17;
/// Next header: routing.
pub const NEXT_ROUTING: u8 = 43;
/// Next header: fragment.
pub const NEXT_FRAGMENT: u8 = 44;
/// Next header: ICMPv6.
pub const NEXT_ICMPV6: u8 = 58;
/// Next header: destination options.
pub const NEXT_DESTINATION: u8 = 60;
/// Extension headers that are walked before a packet counts as opaque.
pub const EXTENSIONS_MAX: usize = 8;

/// A header whose length is right.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    bytes: &'a [u8],
}

impl<'a> Header<'a> {
    /// Reads the header at the start of a packet, behind which padding may follow.
    ///
    /// # Errors
    /// [`ParseError`] if the version is not 6 or the payload is longer than the bytes.
    pub fn parse(packet: &'a [u8]) -> Result<Self, ParseError> {
        need("IPv6", packet, LEN)?;
        if packet[0] >> 4 != 6 {
            return Err(ParseError::Invalid { header: "IPv6", field: "version" });
        }
        need("IPv6", packet, LEN + usize::from(be16(packet, 4)))?;
        Ok(Self { bytes: &packet[..LEN] })
    }

    /// Bytes of header and payload.
    #[must_use]
    pub fn total_len(&self) -> usize {
        LEN + usize::from(be16(self.bytes, 4))
    }

    /// Traffic class: DSCP and ECN.
    #[must_use]
    pub fn traffic_class(&self) -> u8 {
        (be32(self.bytes, 0) >> 20) as u8
    }

    /// Flow label: 20 bits.
    #[must_use]
    pub fn flow_label(&self) -> u32 {
        be32(self.bytes, 0) & 0xf_ffff
    }

    /// The protocol of the bytes behind the header.
    #[must_use]
    pub const fn next_header(&self) -> u8 {
        self.bytes[6]
    }

    /// Hop limit.
    #[must_use]
    pub const fn hop_limit(&self) -> u8 {
        self.bytes[7]
    }

    /// Source address.
    #[must_use]
    pub fn source(&self) -> Ipv6Addr {
        array::<16>(self.bytes, 8).into()
    }

    /// Destination address.
    #[must_use]
    pub fn destination(&self) -> Ipv6Addr {
        array::<16>(self.bytes, 24).into()
    }
}

/// The end of a chain of extension headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Upper {
    /// The protocol, or the extension header at which the walk had to stop.
    pub next_header: u8,
    /// Its offset in the packet.
    pub offset: usize,
    /// Whether the packet is a fragment other than the first: there is no upper header in it.
    pub later_fragment: bool,
    /// Whether the packet is a fragment, be it the first.
    pub fragment: bool,
    /// Whether a routing header stands before it.
    pub routed: bool,
}

/// Walks the extension headers of a packet that [`Header::parse`] accepted, over options, routing
/// and fragment headers.
///
/// # Errors
/// [`ParseError`] if the chain leaves the packet or is longer than [`EXTENSIONS_MAX`].
pub fn upper(packet: &[u8]) -> Result<Upper, ParseError> {
    let end = Header::parse(packet)?.total_len();
    let packet = &packet[..end];
    let mut upper = Upper {
        next_header: packet[6],
        offset: LEN,
        later_fragment: false,
        fragment: false,
        routed: false,
    };
    for _ in 0..EXTENSIONS_MAX {
        let len = match upper.next_header {
            NEXT_HOP_BY_HOP | NEXT_DESTINATION | NEXT_ROUTING | NEXT_FRAGMENT => {
                need("IPv6 extension", packet, upper.offset + 8)?;
                let units = usize::from(packet[upper.offset + 1]);
                if upper.next_header == NEXT_FRAGMENT { 8 } else { (units + 1) * 8 }
            }
            _ => return Ok(upper),
        };
        need("IPv6 extension", packet, upper.offset + len)?;
        match upper.next_header {
            NEXT_ROUTING => upper.routed = true,
            NEXT_FRAGMENT => {
                let word = be16(packet, upper.offset + 2);
                upper.fragment |= word & 0xfff9 != 0;
                upper.later_fragment |= word & 0xfff8 != 0;
            }
            _ => {}
        }
        upper.next_header = packet[upper.offset];
        upper.offset += len;
        if upper.later_fragment {
            return Ok(upper);
        }
    }
    Err(ParseError::Invalid { header: "IPv6", field: "chain of extension headers" })
}

/// The fields of a header to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Builder {
    /// Traffic class.
    pub traffic_class: u8,
    /// Flow label: 20 bits.
    pub flow_label: u32,
    /// Bytes behind the header.
    pub payload_len: u16,
    /// The protocol of the bytes behind the header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub source: Ipv6Addr,
    /// Destination address.
    pub destination: Ipv6Addr,
}

impl Builder {
    /// Writes the header to the first [`LEN`] bytes of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`].
    pub fn write(&self, out: &mut [u8]) {
        let label = self.flow_label & 0xf_ffff;
        put32(out, 0, 6 << 28 | u32::from(self.traffic_class) << 20 | label);
        put16(out, 4, self.payload_len);
        out[6] = self.next_header;
        out[7] = self.hop_limit;
        out[8..24].copy_from_slice(&self.source.octets());
        out[24..LEN].copy_from_slice(&self.destination.octets());
    }
}
