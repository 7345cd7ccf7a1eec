//! ICMP for IPv4 (RFC 792) and IPv6 (RFC 4443): the parts that answers to over-long packets need.

use std::net::Ipv6Addr;

use crate::ParseError;
use crate::bytes::{be16, be32, need, put16, put32};
use crate::checksum::{self, Sum};
use crate::ipv6;

/// Bytes of the header, the 4 bytes whose meaning depends on the type included.
pub const LEN: usize = 8;
/// ICMPv4 type: echo reply.
pub const V4_ECHO_REPLY: u8 = 0;
/// ICMPv4 type: destination unreachable.
pub const V4_UNREACHABLE: u8 = 3;
/// ICMPv4 code of [`V4_UNREACHABLE`]: fragmentation needed and don't-fragment set (RFC 1191).
pub const V4_FRAGMENTATION_NEEDED: u8 = 4;
/// ICMPv4 type: echo request.
pub const V4_ECHO_REQUEST: u8 = 8;
/// ICMPv6 type: packet too big.
pub const V6_PACKET_TOO_BIG: u8 = 2;
/// The first ICMPv6 type that is not an error.
pub const V6_INFORMATIONAL: u8 = 128;

/// An ICMP message's header; type and code have the meaning of its IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Type.
    pub kind: u8,
    /// Code.
    pub code: u8,
    /// Checksum.
    pub checksum: u16,
    /// The 4 bytes whose meaning depends on the type: an MTU, or identifier and sequence number.
    pub rest: u32,
}

impl Header {
    /// Reads the header at the start of a message.
    ///
    /// # Errors
    /// [`ParseError::Truncated`] if there are fewer than [`LEN`] bytes.
    pub fn parse(message: &[u8]) -> Result<Self, ParseError> {
        need("ICMP", message, LEN)?;
        Ok(Self {
            kind: message[0],
            code: message[1],
            checksum: be16(message, 2),
            rest: be32(message, 4),
        })
    }
}

/// Whether an ICMPv4 type is an error message, to which no error may answer (RFC 1122 section
/// 3.2.2). Types that are not known count as errors.
#[must_use]
pub const fn v4_is_error(kind: u8) -> bool {
    !matches!(kind, V4_ECHO_REPLY | V4_ECHO_REQUEST | 9 | 10 | 13..=18 | 42 | 43)
}

/// Whether an ICMPv6 type is an error message (RFC 4443 section 2.1), or a redirect.
#[must_use]
pub const fn v6_is_error(kind: u8) -> bool {
    kind < V6_INFORMATIONAL || kind == 137
}

/// Writes type, code, `rest` and the ICMPv4 checksum over `message`, whose bytes from 8 on are the
/// body.
///
/// # Panics
/// If `message` is shorter than [`LEN`].
pub fn finish_v4(message: &mut [u8], kind: u8, code: u8, rest: u32) {
    head(message, kind, code, rest);
    let checksum = Sum::default().bytes(message).checksum();
    put16(message, 2, checksum);
}

/// Writes type, code, `rest` and the ICMPv6 checksum over `message`, whose bytes from 8 on are the
/// body, as sent from `source` to `destination`.
///
/// # Panics
/// If `message` is shorter than [`LEN`].
pub fn finish_v6(
    message: &mut [u8],
    kind: u8,
    code: u8,
    rest: u32,
    source: Ipv6Addr,
    destination: Ipv6Addr,
) {
    head(message, kind, code, rest);
    let pseudo = checksum::pseudo_v6(source, destination, ipv6::NEXT_ICMPV6, message.len() as u32);
    let checksum = pseudo.bytes(message).checksum();
    put16(message, 2, checksum);
}

fn head(message: &mut [u8], kind: u8, code: u8, rest: u32) {
    message[0] = kind;
    message[1] = code;
    put16(message, 2, 0);
    put32(message, 4, rest);
}
