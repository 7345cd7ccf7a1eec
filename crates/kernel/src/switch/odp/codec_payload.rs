//! What a frame carries, in keys and masks of flows (`linux/openvswitch.h`).
//!
//! A key has the attribute of each protocol that its fields name, or the datapath refuses the flow; zeros in it are
//! not matched unless the mask says so. Attributes of a mask that are all zero count as missing.

use weft_packet::ethernet::{TYPE_ARP, TYPE_IPV4, TYPE_IPV6};
use weft_path::Mac;

use super::flow::{FRAGMENT_LATER, Payload};
use crate::netlink::{
    reader::{array_at, attributes},
    writer::Writer,
};

pub(super) const KEY_ATTR_ETHERTYPE: u16 = 6;
const KEY_ATTR_IPV4: u16 = 7;
const KEY_ATTR_IPV6: u16 = 8;
const KEY_ATTR_TCP: u16 = 9;
const KEY_ATTR_UDP: u16 = 10;
const KEY_ATTR_ICMP: u16 = 11;
const KEY_ATTR_ICMPV6: u16 = 12;
const KEY_ATTR_ARP: u16 = 13;
const KEY_ATTR_ND: u16 = 14;
const KEY_ATTR_SCTP: u16 = 17;
const KEY_ATTR_TCP_FLAGS: u16 = 18;

/// Length of `struct ovs_key_ipv4`.
const IPV4_LEN: usize = 12;
/// Length of `struct ovs_key_ipv6`.
const IPV6_LEN: usize = 40;
/// Length of `struct ovs_key_arp`, with its padding.
const ARP_LEN: usize = 24;
/// Length of `struct ovs_key_nd`.
const ND_LEN: usize = 28;

const TYPE_RARP: u16 = 0x8035;
/// MPLS and the network service header (RFC 8300): the datapath wants fields of theirs that Weft does not write.
const TYPES_WITH_MORE: [u16; 3] = [0x8847, 0x8848, 0x894f];

const PROTOCOL_ICMP: u8 = 1;
const PROTOCOL_TCP: u8 = 6;
/// UDP.
pub(super) const PROTOCOL_UDP: u8 = 17;
/// ICMPv6.
pub(super) const PROTOCOL_ICMPV6: u8 = 58;
const PROTOCOL_SCTP: u8 = 132;
/// Neighbour solicitation (RFC 4861).
pub(super) const ICMPV6_SOLICITATION: u8 = 135;
/// Neighbour advertisement (RFC 4861).
pub(super) const ICMPV6_ADVERTISEMENT: u8 = 136;

/// Whether a flow can match on this Ethernet type.
pub(super) fn is_matchable(ethertype: u16) -> bool {
    !TYPES_WITH_MORE.contains(&ethertype)
}

/// Writes the attributes that a key with the fields `of` has, with these values: its own, or those of its mask.
pub(super) fn write_payload(list: &mut Writer, of: &Payload, values: &Payload) {
    // The datapath takes a key without a type for IEEE 802.2. Its mask has one.
    if values.ethertype != 0 {
        list.bytes(KEY_ATTR_ETHERTYPE, &values.ethertype.to_be_bytes());
    }
    match of.ethertype {
        TYPE_IPV4 => {
            let mut bytes = [0; IPV4_LEN];
            bytes[..4].copy_from_slice(&values.ipv4.octets());
            (bytes[8], bytes[11]) = (values.protocol, values.fragment);
            list.bytes(KEY_ATTR_IPV4, &bytes);
            write_upper(list, of, values);
        }
        TYPE_IPV6 => {
            let mut bytes = [0; IPV6_LEN];
            bytes[..16].copy_from_slice(&values.ipv6.octets());
            (bytes[36], bytes[39]) = (values.protocol, values.fragment);
            list.bytes(KEY_ATTR_IPV6, &bytes);
            write_upper(list, of, values);
        }
        TYPE_ARP | TYPE_RARP => {
            let mut bytes = [0; ARP_LEN];
            bytes[..4].copy_from_slice(&values.ipv4.octets());
            bytes[10..16].copy_from_slice(&values.arp_sender.0);
            list.bytes(KEY_ATTR_ARP, &bytes);
        }
        _ => {}
    }
}

/// What is above IP. The datapath looks for nothing in fragments after the first.
fn write_upper(list: &mut Writer, of: &Payload, values: &Payload) {
    if of.fragment == FRAGMENT_LATER {
        return;
    }
    match of.protocol {
        PROTOCOL_TCP => {
            list.bytes(KEY_ATTR_TCP, &[0; 4]);
            list.bytes(KEY_ATTR_TCP_FLAGS, &[0; 2]);
        }
        PROTOCOL_UDP => {
            let [high, low] = values.port.to_be_bytes();
            list.bytes(KEY_ATTR_UDP, &[high, low, 0, 0]);
        }
        PROTOCOL_SCTP => list.bytes(KEY_ATTR_SCTP, &[0; 4]),
        PROTOCOL_ICMP if of.ethertype == TYPE_IPV4 => list.bytes(KEY_ATTR_ICMP, &[0; 2]),
        PROTOCOL_ICMPV6 if of.ethertype == TYPE_IPV6 => {
            list.bytes(KEY_ATTR_ICMPV6, &[values.icmp_type, values.icmp_code]);
            if matches!(of.icmp_type, ICMPV6_SOLICITATION | ICMPV6_ADVERTISEMENT) {
                let mut bytes = [0; ND_LEN];
                bytes[..16].copy_from_slice(&values.nd_target.octets());
                list.bytes(KEY_ATTR_ND, &bytes);
            }
        }
        _ => {}
    }
}

/// Reads what a frame without a tag carries from the key of an upcall.
pub(super) fn read_payload(list: &[u8]) -> Payload {
    let mut read = Payload::default();
    let byte = |value: &[u8], at: usize| value.get(at).copied().unwrap_or_default();
    let be16 = |value: &[u8]| array_at(value, 0).map(u16::from_be_bytes).unwrap_or_default();
    let ipv4 = |value: &[u8]| array_at::<4>(value, 0).unwrap_or_default().into();
    let ipv6 = |value: &[u8]| array_at::<16>(value, 0).unwrap_or_default().into();
    for (kind, value) in attributes(list) {
        match kind {
            KEY_ATTR_ETHERTYPE => read.ethertype = be16(value),
            KEY_ATTR_IPV4 => {
                read.ipv4 = ipv4(value);
                (read.protocol, read.fragment) = (byte(value, 8), byte(value, 11));
            }
            KEY_ATTR_IPV6 => {
                read.ipv6 = ipv6(value);
                (read.protocol, read.fragment) = (byte(value, 36), byte(value, 39));
            }
            KEY_ATTR_ARP => {
                read.ipv4 = ipv4(value);
                read.arp_sender = Mac(array_at(value, 10).unwrap_or_default());
            }
            KEY_ATTR_UDP => read.port = be16(value),
            KEY_ATTR_ICMPV6 => {
                (read.icmp_type, read.icmp_code) = (byte(value, 0), byte(value, 1));
            }
            KEY_ATTR_ND => read.nd_target = ipv6(value),
            _ => {}
        }
    }
    read
}
