//! ARP for IPv4 over Ethernet (RFC 826).

use std::net::Ipv4Addr;

use crate::ParseError;
use crate::bytes::{array, be16, need, put16};
use crate::ethernet;

/// Bytes of the packet behind the Ethernet header.
pub const LEN: usize = 28;
/// Operation: who has the target address?
pub const REQUEST: u16 = 1;
/// Operation: the sender has it.
pub const REPLY: u16 = 2;

/// One ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// [`REQUEST`], [`REPLY`] or another.
    pub operation: u16,
    /// The sender's Ethernet address.
    pub sender_mac: [u8; 6],
    /// The sender's IPv4 address.
    pub sender_ip: Ipv4Addr,
    /// The target's Ethernet address: zero in a request.
    pub target_mac: [u8; 6],
    /// The target's IPv4 address.
    pub target_ip: Ipv4Addr,
}

impl Arp {
    /// Reads a packet behind the Ethernet header; padding may follow it.
    ///
    /// # Errors
    /// [`ParseError`] if it is short or is not for IPv4 over Ethernet.
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        need("ARP", bytes, LEN)?;
        if be16(bytes, 0) != 1 || be16(bytes, 2) != ethernet::TYPE_IPV4 || bytes[4..6] != [6, 4] {
            return Err(ParseError::Invalid { header: "ARP", field: "address type" });
        }
        Ok(Self {
            operation: be16(bytes, 6),
            sender_mac: array(bytes, 8),
            sender_ip: array::<4>(bytes, 14).into(),
            target_mac: array(bytes, 18),
            target_ip: array::<4>(bytes, 24).into(),
        })
    }

    /// Writes the packet to the first [`LEN`] bytes of `out`.
    ///
    /// # Panics
    /// If `out` is shorter than [`LEN`].
    pub fn write(&self, out: &mut [u8]) {
        put16(out, 0, 1);
        put16(out, 2, ethernet::TYPE_IPV4);
        out[4..6].copy_from_slice(&[6, 4]);
        put16(out, 6, self.operation);
        out[8..14].copy_from_slice(&self.sender_mac);
        out[14..18].copy_from_slice(&self.sender_ip.octets());
        out[18..24].copy_from_slice(&self.target_mac);
        out[24..LEN].copy_from_slice(&self.target_ip.octets());
    }
}
