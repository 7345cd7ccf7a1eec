//! Our messages against a second encoder and decoder, `netlink-bindings`, which is generated from the
//! kernel's own YAML specification. It takes counters of 4 bytes only and key ids of 4 only; those of
//! other lengths are written here by hand.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, Ipv6Addr};

use netlink_bindings::ovpn as theirs;
use proptest::prelude::*;
use weft_openvpn::device::{
    CipherAlgorithm, DeletionReason, KeyAttributes, KeyDirection, KeyState, Notice, Notification,
    PeerAttributes, Slot,
};

use super::{Watched, codec, watch};
use crate::netlink::{reader::Message, writer::Writer};

const FAMILY: u16 = 0x21;
const DEVICE: u32 = 7;
const PEER: u32 = 0x0a_0b0c;

/// Command and generic header with attributes of a request, and that its headers are right.
fn parts(mut request: Writer) -> (u8, Vec<u8>) {
    let bytes = request.finish(99, 0).to_vec();
    let length = u32::from_ne_bytes(bytes[..4].try_into().unwrap());
    assert_eq!((length as usize, bytes.len() % 4), (bytes.len(), 0));
    assert_eq!(u16::from_ne_bytes([bytes[4], bytes[5]]), FAMILY);
    assert_eq!(bytes[17], 1, "the family's version");
    (bytes[16], bytes[16..].to_vec())
}

/// A message of the kernel's: header, command, and the attributes of `body` behind its generic header.
fn datagram(command: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = u32::try_from(16 + body.len().max(4)).unwrap().to_ne_bytes().to_vec();
    bytes.extend_from_slice(&FAMILY.to_ne_bytes());
    bytes.extend_from_slice(&[0; 10]);
    bytes.extend_from_slice(&[command, 1, 0, 0]);
    bytes.extend_from_slice(body.get(4..).unwrap_or_default());
    bytes
}

fn event(family: u16, bytes: &[u8]) -> Option<Watched> {
    watch::event(family, &Message::read(bytes)?)
}

/// One attribute by hand.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap();
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn attributes() -> PeerAttributes {
    PeerAttributes {
        id: Some(PEER),
        tx_id: Some(12),
        remote_ipv4: Some(Ipv4Addr::new(192, 0, 2, 1)),
        remote_ipv6: Some("2001:db8::1".parse().unwrap()),
        remote_ipv6_scope_id: Some(3),
        remote_port: Some(0x1234),
        local_ipv4: Some(Ipv4Addr::new(192, 0, 2, 9)),
        local_ipv6: Some("2001:db8::9".parse().unwrap()),
        vpn_ipv4: Some(Ipv4Addr::new(10, 8, 0, 2)),
        vpn_ipv6: Some("fd00::2".parse().unwrap()),
        keepalive_interval_s: Some(10),
        keepalive_timeout_s: Some(60),
    }
}

#[test]
fn a_new_peer_reads_back() {
    let (command, body) = parts(codec::new_peer(FAMILY, DEVICE, 5, &attributes()));
    assert_eq!(command, 1);
    let read = theirs::OpPeerNewDo::decode_request(&body);
    assert_eq!(read.get_ifindex().unwrap(), DEVICE);
    let peer = read.get_peer().unwrap();
    assert_eq!((peer.get_id().unwrap(), peer.get_socket().unwrap()), (PEER, 5));
    assert_eq!(peer.get_tx_id().unwrap(), 12);
    assert_eq!(peer.get_remote_ipv4().unwrap(), Ipv4Addr::new(192, 0, 2, 1));
    let ipv6 = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
    assert_eq!(peer.get_remote_ipv6().unwrap(), ipv6("2001:db8::1"));
    assert_eq!(peer.get_remote_ipv6_scope_id().unwrap(), 3);
    assert_eq!(peer.get_remote_port().unwrap(), 0x1234);
    assert_eq!(peer.get_local_ipv4().unwrap(), Ipv4Addr::new(192, 0, 2, 9));
    assert_eq!(peer.get_local_ipv6().unwrap(), ipv6("2001:db8::9"));
    assert_eq!(peer.get_vpn_ipv4().unwrap(), Ipv4Addr::new(10, 8, 0, 2));
    assert_eq!(peer.get_vpn_ipv6().unwrap(), ipv6("fd00::2"));
    assert_eq!(peer.get_keepalive_interval().unwrap(), 10);
    assert_eq!(peer.get_keepalive_timeout().unwrap(), 60);
    // The nest is marked as nested, after the interface's attribute.
    assert_eq!(body[14..16], (0x8000_u16 | 2).to_ne_bytes());
    // In network byte order on the wire.
    let wire = |bytes: &[u8]| body.windows(bytes.len()).any(|window| window == bytes);
    assert!(wire(&[192, 0, 2, 1]) && wire(&[0x12, 0x34]), "{body:?}");
}

#[test]
fn fields_that_a_peer_lacks_are_not_written() {
    let bare = PeerAttributes { id: Some(PEER), ..PeerAttributes::default() };
    let (command, body) = parts(codec::set_peer(FAMILY, DEVICE, &bare));
    let peer = theirs::OpPeerSetDo::decode_request(&body).get_peer().unwrap();
    assert_eq!((command, peer.get_id().unwrap()), (2, PEER));
    // Generic header, interface, nest and the id alone.
    assert_eq!(body.len(), 4 + 8 + 4 + 8);
    let (_, body) = parts(codec::set_peer(FAMILY, DEVICE, &PeerAttributes::default()));
    assert!(theirs::OpPeerSetDo::decode_request(&body).get_peer().unwrap().get_id().is_err());
}

#[test]
fn the_other_requests_for_peers_read_back() {
    let (command, body) = parts(codec::get_peer(FAMILY, DEVICE, PEER));
    let read = theirs::OpPeerGetDo::decode_request(&body);
    assert_eq!((command, read.get_ifindex().unwrap()), (3, DEVICE));
    assert_eq!(read.get_peer().unwrap().get_id().unwrap(), PEER);
    let mut dump = codec::dump_peers(FAMILY, DEVICE);
    assert_eq!(dump.finish(1, 0)[6..8], 0x301_u16.to_ne_bytes());
    let (command, body) = parts(dump);
    assert_eq!(command, 3);
    assert_eq!(theirs::OpPeerGetDump::decode_request(&body).get_ifindex().unwrap(), DEVICE);
    let (command, body) = parts(codec::delete_peer(FAMILY, DEVICE, PEER));
    let read = theirs::OpPeerDelDo::decode_request(&body);
    assert_eq!((command, read.get_ifindex().unwrap()), (4, DEVICE));
    assert_eq!(read.get_peer().unwrap().get_id().unwrap(), PEER);
}

fn key() -> KeyAttributes {
    let direction = |byte| Some(KeyDirection { cipher_key: vec![byte; 32], nonce_tail: [byte; 8] });
    KeyAttributes {
        peer_id: Some(PEER),
        slot: Some(Slot::Secondary),
        key_id: Some(6),
        cipher: Some(CipherAlgorithm::ChaCha20Poly1305),
        encrypt: direction(0xe1),
        decrypt: direction(0xd1),
    }
}

#[test]
fn a_new_key_reads_back() {
    let (command, body) = parts(codec::new_key(FAMILY, DEVICE, &key()));
    let read = theirs::OpKeyNewDo::decode_request(&body);
    assert_eq!((command, read.get_ifindex().unwrap()), (6, DEVICE));
    let key = read.get_keyconf().unwrap();
    assert_eq!((key.get_peer_id().unwrap(), key.get_slot().unwrap()), (PEER, 1));
    assert_eq!((key.get_key_id().unwrap(), key.get_cipher_alg().unwrap()), (6, 2));
    for (direction, byte) in
        [(key.get_encrypt_dir().unwrap(), 0xe1), (key.get_decrypt_dir().unwrap(), 0xd1)]
    {
        assert_eq!(direction.get_cipher_key().unwrap(), [byte; 32]);
        assert_eq!(direction.get_nonce_tail().unwrap(), [byte; 8]);
    }
    for nest in [3_u16, 5, 6] {
        let kind = (0x8000 | nest).to_ne_bytes();
        assert!(body.windows(2).any(|window| window == kind), "nest {nest}");
    }
}

#[test]
fn a_key_is_written_in_place_and_leaves_no_copy() {
    let mut largest = key();
    let direction = Some(KeyDirection { cipher_key: vec![1; 4096], nonce_tail: [2; 8] });
    (largest.encrypt, largest.decrypt) = (direction.clone(), direction);
    for key in [KeyAttributes::default(), key(), largest] {
        let request = codec::new_key(FAMILY, DEVICE, &key);
        assert!(request.is_erased());
    }
    assert!(!codec::dump_peers(FAMILY, DEVICE).is_erased());
}

#[test]
fn the_other_requests_for_keys_read_back() {
    let (command, body) = parts(codec::get_key(FAMILY, DEVICE, PEER, Slot::Secondary));
    let read = theirs::OpKeyGetDo::decode_request(&body);
    assert_eq!((command, read.get_ifindex().unwrap()), (7, DEVICE));
    let key = read.get_keyconf().unwrap();
    assert_eq!((key.get_peer_id().unwrap(), key.get_slot().unwrap()), (PEER, 1));
    let (command, body) = parts(codec::swap_keys(FAMILY, DEVICE, PEER));
    let key = theirs::OpKeySwapDo::decode_request(&body).get_keyconf().unwrap();
    assert_eq!((command, key.get_peer_id().unwrap()), (8, PEER));
    let (command, body) = parts(codec::delete_key(FAMILY, DEVICE, PEER, Slot::Primary));
    let key = theirs::OpKeyDelDo::decode_request(&body).get_keyconf().unwrap();
    assert_eq!((command, key.get_peer_id().unwrap(), key.get_slot().unwrap()), (10, PEER, 0));
}

#[test]
fn a_peer_is_read() {
    let mut body = Vec::new();
    theirs::OpPeerGetDo::encode_request(&mut body)
        .nested_peer()
        .push_id(PEER)
        .push_tx_id(12)
        .push_remote_ipv4(Ipv4Addr::new(192, 0, 2, 1))
        .push_remote_port(0x1234)
        .push_local_ipv4(Ipv4Addr::new(192, 0, 2, 9))
        .push_local_port(1194)
        .push_socket_netnsid(4)
        .push_vpn_ipv4(Ipv4Addr::new(10, 8, 0, 2))
        .push_vpn_ipv6(&"fd00::2".parse::<Ipv6Addr>().unwrap().octets())
        .push_keepalive_interval(10)
        .push_keepalive_timeout(60)
        .push_vpn_rx_bytes(1)
        .push_vpn_tx_bytes(2)
        .push_vpn_rx_packets(3)
        .push_vpn_tx_packets(4)
        .push_link_rx_bytes(5)
        .push_link_tx_bytes(6)
        .push_link_rx_packets(7)
        .push_link_tx_packets(8)
        .end_nested()
        .end_nested();
    let peer = codec::peer(&body[4..]).unwrap();
    assert_eq!((peer.id, peer.tx_id, peer.socket_netns), (PEER, Some(12), Some(4)));
    assert_eq!(peer.remote, Some("192.0.2.1:4660".parse().unwrap()));
    assert_eq!(peer.local, Some("192.0.2.9:1194".parse().unwrap()));
    assert_eq!(peer.vpn_ipv4, Some(Ipv4Addr::new(10, 8, 0, 2)));
    assert_eq!(peer.vpn_ipv6, Some("fd00::2".parse().unwrap()));
    assert_eq!((peer.keepalive.interval_s, peer.keepalive.timeout_s), (10, 60));
    let (vpn, link) = (peer.vpn, peer.link);
    assert_eq!((vpn.rx_bytes, vpn.tx_bytes, vpn.rx_packets, vpn.tx_packets), (1, 2, 3, 4));
    assert_eq!((link.rx_bytes, link.tx_bytes, link.rx_packets, link.tx_packets), (5, 6, 7, 8));
}

#[test]
fn addresses_are_read_in_each_of_their_forms() {
    let read = |parts: &[Vec<u8>]| {
        let mut list = attribute(1, &PEER.to_ne_bytes());
        list.extend(parts.concat());
        codec::peer(&attribute(2, &list)).unwrap()
    };
    let ipv6 = |kind, text: &str| attribute(kind, &text.parse::<Ipv6Addr>().unwrap().octets());
    let port = attribute(5, &1194_u16.to_be_bytes());
    let local_port = attribute(12, &1195_u16.to_be_bytes());
    let scope = attribute(4, &3_u32.to_ne_bytes());
    let scoped = read(&[ipv6(3, "fe80::1"), scope, port.clone(), local_port.clone()]);
    assert_eq!(scoped.remote, Some("[fe80::1%3]:1194".parse().unwrap()));
    assert_eq!(scoped.local, Some("[::]:1195".parse().unwrap()));
    let mapped = read(&[ipv6(3, "::ffff:192.0.2.1"), port.clone()]);
    assert_eq!((mapped.remote, mapped.local), (Some("192.0.2.1:1194".parse().unwrap()), None));
    let over_tcp = read(std::slice::from_ref(&local_port));
    assert_eq!((over_tcp.remote, over_tcp.local), (None, Some("0.0.0.0:1195".parse().unwrap())));
    // Addresses and ports that are cut short, or longer than they can be.
    let short = read(&[attribute(2, &[192, 0, 2]), attribute(3, &[0; 17]), port]);
    assert_eq!(short.remote, None);
    assert_eq!(read(&[attribute(12, &[4]), local_port]).local, None);
}

#[test]
fn counters_are_read_by_their_length() {
    let of = |value: &[u8]| {
        let list = [attribute(1, &PEER.to_ne_bytes()), attribute(16, value)].concat();
        codec::peer(&attribute(2, &list)).unwrap().vpn.rx_bytes
    };
    assert_eq!(of(&77_u32.to_ne_bytes()), 77);
    assert_eq!(of(&(1_u64 << 40).to_ne_bytes()), 1 << 40);
    assert_eq!(of(&[1, 2, 3]), 0);
    assert_eq!(of(&[]), 0);
}

#[test]
fn a_key_is_read() {
    let of = |cipher: u32| {
        let mut body = Vec::new();
        theirs::OpKeyGetDo::encode_request(&mut body)
            .nested_keyconf()
            .push_peer_id(PEER)
            .push_slot(1)
            .push_key_id(6)
            .push_cipher_alg(cipher)
            .end_nested()
            .end_nested();
        codec::key(&body[4..])
    };
    let state = |cipher| Some(KeyState { key_id: 6, cipher, epoch: None });
    assert_eq!(of(1), state(CipherAlgorithm::AesGcm));
    assert_eq!(of(2), state(CipherAlgorithm::ChaCha20Poly1305));
    assert_eq!(of(3), None);
}

fn told(what: Notification) -> Option<Watched> {
    Some(Watched::Notice(Notice { device: DEVICE, what }))
}

fn deletion(reason: u32) -> Vec<u8> {
    let mut body = Vec::new();
    theirs::OpPeerGetDo::encode_request(&mut body)
        .push_ifindex(DEVICE)
        .nested_peer()
        .push_id(PEER)
        .push_del_reason(reason)
        .end_nested()
        .end_nested();
    body
}

#[test]
fn the_end_of_a_peer_is_told_with_its_reason() {
    let command = theirs::OpPeerDelNotif::CMD;
    for (number, reason) in (0..).zip(DeletionReason::ALL) {
        let bytes = datagram(command, &deletion(number));
        let deleted = Notification::PeerDeleted { peer_id: PEER, reason };
        assert_eq!(event(FAMILY, &bytes), told(deleted));
        assert_eq!(event(FAMILY + 1, &bytes), None, "of another family");
    }
    // A reason that is not known is not made up.
    assert_eq!(event(FAMILY, &datagram(command, &deletion(5))), Some(Watched::Lost));
    assert_eq!(event(FAMILY, &datagram(command, &deletion(0)[..12])), Some(Watched::Lost));
    // Answers and commands of a later kernel are no notices.
    for command in [0, 3, 12, 255] {
        assert_eq!(event(FAMILY, &datagram(command, &deletion(0))), None);
    }
}

#[test]
fn a_used_up_key_is_told_whatever_the_length_of_its_id() {
    let ids = [5_u16.to_ne_bytes().to_vec(), 5_u32.to_ne_bytes().to_vec()];
    for id in ids {
        let list = [attribute(1, &PEER.to_ne_bytes()), attribute(3, &id)].concat();
        let mut body = vec![0; 4];
        body.extend(attribute(1, &DEVICE.to_ne_bytes()));
        body.extend(attribute(0x8000 | 3, &list));
        let bytes = datagram(theirs::OpKeySwapNotif::CMD, &body);
        let swap = Notification::KeySwap { peer_id: PEER, key_id: 5 };
        assert_eq!(event(FAMILY, &bytes), told(swap));
    }
}

#[test]
fn a_float_is_told_with_the_new_address() {
    let of = |ipv6: Option<&str>| {
        let mut body = Vec::new();
        let list = theirs::OpPeerGetDo::encode_request(&mut body)
            .push_ifindex(DEVICE)
            .nested_peer()
            .push_id(PEER)
            .push_remote_port(1194);
        match ipv6 {
            Some(text) => list
                .push_remote_ipv6(&text.parse::<Ipv6Addr>().unwrap().octets())
                .push_remote_ipv6_scope_id(9),
            None => list.push_remote_ipv4(Ipv4Addr::new(192, 0, 2, 1)),
        }
        .end_nested()
        .end_nested();
        event(FAMILY, &datagram(theirs::OpPeerFloatNotif::CMD, &body))
    };
    let float = |remote: &str| {
        told(Notification::PeerFloat { peer_id: PEER, remote: remote.parse().unwrap() })
    };
    assert_eq!(of(None), float("192.0.2.1:1194"));
    assert_eq!(of(Some("fe80::2")), float("[fe80::2%9]:1194"));
    assert_eq!(of(Some("::ffff:192.0.2.1")), float("192.0.2.1:1194"));
}

proptest! {
    #[test]
    fn any_input_is_read_without_panic(
        command in any::<u8>(),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let _ = event(FAMILY, &bytes);
        let _ = event(FAMILY, &datagram(command, &bytes));
        for nest in [2, 3] {
            let body = [attribute(1, &[1; 4]), attribute(nest, &bytes)].concat();
            let _ = codec::peer(&body);
            let _ = codec::key(&body);
            for command in [5, 9, 11] {
                let _ = codec::notice(command, &body);
            }
        }
    }

    #[test]
    fn small_numbers_for_lengths_and_types_are_read_without_panic(
        bytes in prop::collection::vec(0_u8..25, 0..200),
    ) {
        let body = [attribute(1, &[1; 4]), attribute(2, &bytes), attribute(3, &bytes)].concat();
        let _ = codec::peer(&body);
        let _ = codec::key(&body);
        for command in 0..13 {
            let _ = codec::notice(command, &body);
        }
    }
}
