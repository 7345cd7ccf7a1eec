//! Keys of the map that the programs look up. The first eight bytes are a MAC address and an EtherType, as they
//! follow each other in a frame: of its sender. The rest is the sender's IP address, and zero behind it.

use std::net::IpAddr;

use weft_packet::ethernet::{TYPE_IPV4, TYPE_IPV6};

/// Bytes of a key.
pub(super) const KEY_LEN: usize = HEAD_LEN + IP_LEN_MAX;
const HEAD_LEN: usize = 8;
const IP_LEN_MAX: usize = 16;

pub(super) type Key = [u8; KEY_LEN];

/// Frames for this MAC address go to the engine. It has no EtherType, so it is no sender's key.
pub(super) fn destination(mac: [u8; 6]) -> Key {
    key(mac, 0, &[])
}

/// This MAC address may send from this IP address.
pub(super) fn source(mac: [u8; 6], address: IpAddr) -> Key {
    match address {
        IpAddr::V4(address) => key(mac, TYPE_IPV4, &address.octets()),
        IpAddr::V6(address) => key(mac, TYPE_IPV6, &address.octets()),
    }
}

/// The first bytes of a sender's key, as a number in the host's order.
pub(super) fn head(mac: [u8; 6], ethertype: u16) -> u64 {
    let [a, b, c, d, e, f] = mac;
    let [high, low] = ethertype.to_be_bytes();
    u64::from_ne_bytes([a, b, c, d, e, f, high, low])
}

fn key(mac: [u8; 6], ethertype: u16, address: &[u8]) -> Key {
    let mut key = [0; KEY_LEN];
    key[..HEAD_LEN].copy_from_slice(&head(mac, ethertype).to_ne_bytes());
    key[HEAD_LEN..][..address.len()].copy_from_slice(address);
    key
}
