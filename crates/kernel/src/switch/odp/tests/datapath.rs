//! The datapath's side of a flow: what it takes, and which frames match, by the bytes of our request.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
};

use proptest::prelude::*;
use weft_path::Mac;

use crate::{
    netlink::reader::{attribute, attributes},
    switch::odp::{
        codec_flow::{FlowId, Put, put_flow},
        flow::{FlowKey, Frame, Payload, Tag, TunnelKey},
    },
};

const IN_PORT: u16 = 3;
const ETHERNET: u16 = 4;
const VLAN: u16 = 5;
const ETHERTYPE: u16 = 6;
const IPV4: u16 = 7;
const IPV6: u16 = 8;
const TCP: u16 = 9;
const UDP: u16 = 10;
const ICMP: u16 = 11;
const ICMPV6: u16 = 12;
const ARP: u16 = 13;
const ND: u16 = 14;
const TUNNEL: u16 = 16;
const SCTP: u16 = 17;
const TCP_FLAGS: u16 = 18;
/// The lengths of these attributes.
const LENGTHS: [(u16, usize); 14] = [
    (IN_PORT, 4),
    (ETHERNET, 12),
    (VLAN, 2),
    (ETHERTYPE, 2),
    (IPV4, 12),
    (IPV6, 40),
    (TCP, 4),
    (UDP, 4),
    (ICMP, 2),
    (ICMPV6, 2),
    (ARP, 24),
    (ND, 28),
    (SCTP, 4),
    (TCP_FLAGS, 2),
];
/// ETH_P_802_2: the type of frames that have none.
const NO_TYPE: [u8; 2] = [0, 4];

type Fields = BTreeMap<u16, Vec<u8>>;

/// A frame as the datapath reads it.
#[derive(Debug, Clone)]
pub(super) struct Read {
    pub(super) frame: Frame,
    fields: Fields,
}

impl Read {
    pub(super) fn of(frame: Frame) -> Self {
        Self { frame, fields: fields(&frame) }
    }
}

/// What a flow matches.
#[derive(Debug, Clone)]
pub(super) struct Match {
    tunnel: Option<TunnelKey>,
    key: Fields,
    mask: Fields,
}

impl Match {
    /// Reads it from a request. Panics if the datapath would not take the flow.
    pub(super) fn of(key: &FlowKey) -> Self {
        let mut request = put_flow(0x21, 7, Put::New, FlowId(1), key, &[]);
        let list = &request.finish(1, 0)[24..];
        let fields = |kind| -> Fields {
            let list = attributes(attribute(list, kind).unwrap());
            list.map(|(kind, value)| (kind, value.to_vec())).collect()
        };
        let mut key_fields = fields(1);
        // An all-zero attribute of a mask counts as missing.
        let mask = fields(7).into_iter().filter(|(_, value)| value.iter().any(|byte| *byte != 0));
        let mask: Fields = mask.collect();
        validate(&key_fields, &mask);
        key_fields.entry(ETHERTYPE).or_insert(NO_TYPE.to_vec());
        let tunnel = match key {
            FlowKey::Pair(frame) | FlowKey::Locked { frame, .. } => frame.tunnel,
            FlowKey::Tunnel { tunnel, .. } => Some(*tunnel),
        };
        Self { tunnel, key: key_fields, mask }
    }

    /// Whether a frame matches.
    pub(super) fn takes(&self, read: &Read) -> bool {
        let (fields, none) = (&read.fields, Vec::new());
        let agrees = |(kind, mask): (&u16, &Vec<u8>)| {
            let (key, field) =
                (self.key.get(kind).unwrap_or(&none), fields.get(kind).unwrap_or(&none));
            let at = |of: &Vec<u8>, at: usize| of.get(at).copied().unwrap_or_default();
            mask.iter().enumerate().all(|(n, bits)| (at(key, n) ^ at(field, n)) & bits == 0)
        };
        // The control word of a tag is matched in any case.
        self.tunnel == read.frame.tunnel
            && self.key.get(&VLAN) == fields.get(&VLAN)
            && self.mask.iter().filter(|(kind, _)| **kind != TUNNEL).all(agrees)
    }
}

/// Whether the datapath takes key and mask (`match_validate` in the kernel's `flow_netlink.c`).
fn validate(key: &Fields, mask: &Fields) {
    for (kind, length) in LENGTHS {
        for list in [key, mask] {
            assert!(list.get(&kind).is_none_or(|value| value.len() == length), "{kind}");
        }
    }
    if key.contains_key(&VLAN) {
        assert!(!mask.contains_key(&ETHERTYPE), "another form is needed");
        return;
    }
    let byte = |list: &Fields, kind, at: usize| list.get(&kind).map_or(0, |value| value[at]);
    let typed = mask.get(&ETHERTYPE).is_some_and(|mask| mask[..] == [0xff, 0xff]);
    let (mut expected, mut allowed) = (vec![ETHERNET], vec![ETHERNET, IN_PORT, TUNNEL, ETHERTYPE]);
    let mut needs = |kind, if_matched: bool| {
        expected.push(kind);
        if if_matched {
            allowed.push(kind);
        }
    };
    let ip = match key.get(&ETHERTYPE).map_or(NO_TYPE, |value| value[..].try_into().unwrap()) {
        [0x08, 0x06] | [0x80, 0x35] => {
            needs(ARP, typed);
            None
        }
        [0x08, 0x00] => Some((IPV4, 8, 11)),
        [0x86, 0xdd] => Some((IPV6, 36, 39)),
        [0x88, 0x47 | 0x48] | [0x89, 0x4f] => panic!("MPLS and NSH need more"),
        [0, 0] => panic!("a key without a type has no attribute"),
        _ => None,
    };
    if let Some((kind, protocol, fragment)) = ip {
        needs(kind, typed);
        let whole = byte(mask, kind, protocol) == 0xff;
        match byte(key, kind, protocol) {
            _ if byte(key, kind, fragment) == 2 => {}
            6 => {
                needs(TCP, whole);
                needs(TCP_FLAGS, whole);
            }
            17 => needs(UDP, whole),
            132 => needs(SCTP, whole),
            1 if kind == IPV4 => needs(ICMP, whole),
            58 if kind == IPV6 => {
                needs(ICMPV6, whole);
                if matches!(byte(key, ICMPV6, 0), 135 | 136) {
                    needs(ND, byte(mask, ICMPV6, 0) == 0xff);
                }
            }
            _ => {}
        }
    }
    assert!(expected.iter().all(|kind| key.contains_key(kind)), "{expected:?} in {key:?}");
    assert!(mask.keys().all(|kind| allowed.contains(kind)), "{mask:?} of {key:?}");
}

/// The fields that the datapath reads from a frame.
fn fields(frame: &Frame) -> Fields {
    let mut fields = Fields::from([
        (IN_PORT, frame.port.to_ne_bytes().to_vec()),
        (ETHERNET, [frame.source.0, frame.destination.0].concat()),
    ]);
    match frame.tag {
        Tag::None => {}
        Tag::One(control) => {
            fields.insert(VLAN, control.to_be_bytes().to_vec());
            return fields;
        }
        Tag::Deep => {
            fields.insert(VLAN, b"more than a word".to_vec());
            return fields;
        }
    }
    let payload = &frame.payload;
    let ethertype = if payload.ethertype == 0 { NO_TYPE } else { payload.ethertype.to_be_bytes() };
    fields.insert(ETHERTYPE, ethertype.to_vec());
    let last = [payload.protocol, 0, 0, payload.fragment];
    match payload.ethertype {
        0x0800 => _ = fields.insert(IPV4, [payload.ipv4.octets(), [0; 4], last].concat()),
        0x86dd => {
            let words = [&payload.ipv6.octets()[..], &[0; 20], &last];
            fields.insert(IPV6, words.concat());
        }
        0x0806 | 0x8035 => {
            let words = [&payload.ipv4.octets()[..], &[0; 6], &payload.arp_sender.0, &[0; 8]];
            fields.insert(ARP, words.concat());
        }
        _ => {}
    }
    fields.insert(UDP, [payload.port.to_be_bytes(), [0; 2]].concat());
    fields.insert(ICMPV6, vec![payload.icmp_type, payload.icmp_code]);
    fields.insert(ND, [&payload.nd_target.octets()[..], &[0; 12]].concat());
    fields
}

/// IPv4 addresses, of which locks have some.
pub(super) const IPV4_ADDRESSES: [Ipv4Addr; 5] = [
    Ipv4Addr::UNSPECIFIED,
    Ipv4Addr::new(10, 0, 0, 1),
    Ipv4Addr::new(10, 0, 0, 2),
    Ipv4Addr::new(10, 1, 0, 1),
    Ipv4Addr::new(11, 0, 0, 1),
];
/// IPv6 addresses, of which locks have some; the last two are those that the MACs 02:00:00:00:00:01 and :02 make.
pub(super) const IPV6_ADDRESSES: [Ipv6Addr; 6] = [
    Ipv6Addr::UNSPECIFIED,
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2),
    Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 1),
    Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 2),
];

/// What frames of small worlds carry: each field is zero where the datapath reads none.
pub(super) fn payload() -> impl Strategy<Value = Payload> {
    let ipv4 = || prop::sample::select(&IPV4_ADDRESSES[..]);
    let ipv6 = || prop::sample::select(&IPV6_ADDRESSES[..]);
    let port = prop_oneof![
        4 => prop::sample::select(&[0, 1, 64, 66, 67, 68, 546, 547, 548, 1024, 40_000][..]),
        1 => any::<u16>(),
    ];
    let arp = (0..5_u8, ipv4()).prop_map(|(sender, ipv4)| Payload {
        ethertype: 0x0806,
        arp_sender: Mac([2, 0, 0, 0, 0, sender]),
        ipv4,
        ..Payload::default()
    });
    let icmp = (prop::sample::select(&[0, 128, 131, 133, 134, 135, 136, 137, 143][..]), 0..2_u8);
    let upper = (
        prop::sample::select(&[0, 1, 2, 6, 17, 17, 17, 44, 58, 58, 58, 59, 132][..]),
        0..3_u8,
        port,
        icmp,
        ipv6(),
    );
    let upper = upper.prop_map(|(protocol, fragment, port, (icmp_type, icmp_code), target)| {
        let bare = Payload { protocol, fragment, ..Payload::default() };
        match protocol {
            _ if fragment == 2 => bare,
            17 => Payload { port, ..bare },
            58 if icmp_code == 0 && matches!(icmp_type, 135 | 136) => {
                Payload { icmp_type, nd_target: target, ..bare }
            }
            58 => Payload { icmp_type, icmp_code, ..bare },
            _ => bare,
        }
    });
    let ip =
        (any::<bool>(), ipv4(), ipv6(), upper).prop_map(|(six, ipv4, ipv6, upper)| match six {
            true => Payload { ethertype: 0x86dd, ipv6, ..upper },
            false if upper.protocol == 58 => {
                Payload { ethertype: 0x0800, ipv4, ..Payload::default() }
            }
            false => Payload { ethertype: 0x0800, ipv4, ..upper },
        });
    let other = prop::sample::select(&[0, 0x8035, 0x8847, 0x88cc][..]);
    let other = other.prop_map(|ethertype| Payload { ethertype, ..Payload::default() });
    prop_oneof![6 => ip, 2 => arp, 1 => other]
}
