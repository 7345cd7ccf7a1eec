//! Requests as iproute2 6.1 makes them and answers as Linux 6.18 gives them (taken with strace on a
//! little-endian machine), and `netlink-packet-xfrm` as a second decoder.
#![cfg(target_endian = "little")]
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use netlink_packet_core::{NetlinkDeserializable, NetlinkHeader};
use netlink_packet_xfrm::{XfrmAttrs, XfrmMessage};

use super::*;
use crate::xfrm::{Limits, REQID};

/// ip xfrm state add src 10.0.0.1 dst 10.0.0.2 proto esp spi 0x11223344 reqid 0x57454654
/// mode transport replay-window 4096 flag esn aead "rfc4106(gcm(aes))" KEY 128
/// encap espinudp 6785 40000 0.0.0.0 sel proto udp dport 6784.
const NEW_STATE_IN: &str = "\
    00*32 1a80ffff 00*4 0200000011 00*11 0a000002 00*12 11223344320000000a000001 00*12 \
    ff*32 00*80 544645570200000080 00*7 70001200726663343130362867636d286165732929 00*47 \
    2001000080 00*4 \
    0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa0a1a2a31c00040002001a \
    819c40 00*18 1c00170080 00*20 100000";
/// ip xfrm state add src fd00::1 dst fd00::2 proto esp spi 0x11223344 reqid 0x57454654
/// mode transport replay-window 32 flag esn aead "rfc7539esp(chacha20,poly1305)" KEY 128
/// limit packet-soft 11 packet-hard 22 byte-soft 33 byte-hard 44 time-hard 3600.
const NEW_STATE_OUT: &str = "\
    00*56 fd 00*14 021122334432000000fd 00*14 0121 00*7 2c 00*7 0b 00*7 16 00*15 100e \
    00*70 544645570a00000080 00*7 \
    70001200726663373533396573702863686163686132302c706f6c793133303529 00*35 2001000080 \
    00*4 \
    0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa0a1a2a31c00170001 \
    00*19 20000000";
/// ip xfrm state delete src 10.0.0.1 dst 10.0.0.2 proto esp spi 0x11223344, without the
/// source that it adds.
const DELETE_STATE: &str = "\
    0a000002 00*12 1122334402003200";
/// ip xfrm policy update src 10.0.0.1/32 dst 10.0.0.2/32 proto udp dport 6787 dir out
/// priority 0 tmpl src 10.0.0.1 dst 10.0.0.2 proto esp spi 0x11223344 reqid 0x57454654
/// mode transport.
const SET_POLICY: &str = "\
    0a000002 00*12 0a000001 00*12 1a83ffff 00*4 0200202011 00*11 ff*32 00*72 01 00*7 \
    440005000a000002 00*12 1122334432000000020000000a000001 00*12 54464557 00*4 ff*12";
/// ip xfrm policy update src fd00::1/128 dst fd00::2/128 proto udp dport 6788 dir out
/// priority 0 tmpl src fd00::1 dst fd00::2 proto esp reqid 0x57450007 mode transport.
const SET_LANES: &str = "\
    fd 00*14 02fd 00*14 011a84ffff 00*4 0a00808011 00*11 ff*32 00*72 01 00*7 44000500fd \
    00*14 02 00*4 320000000a000000fd 00*14 0107004557 00*4 ff*12";
/// ip xfrm policy add src ::/0 dst ::/0 proto udp dport 6788 dir in priority 1
/// tmpl proto esp reqid 0x57454654 mode transport level required
/// tmpl proto esp reqid 0 mode tunnel level use.
const SET_ENTRY: &str = "\
    00*32 1a84ffff 00*4 0a00 00 00 11 00*11 ff*32 00*64 01000000 00*4 00*8 \
    84000500 00*20 32 00*3 0a00 00*18 54464557 00 00 00 00 ff*12 \
    00*20 32 00*3 0a00 00*18 00*4 01 00 01 00 ff*12";
/// ip xfrm policy add src 10.0.0.2/32 dst 0.0.0.0/0 proto udp dport 6787 dir in priority 0
/// tmpl proto esp reqid 0x57454654 mode transport level use.
const SET_PLAIN_ENTRY: &str = "\
    00*16 0a000002 00*12 1a83ffff 00*4 0200 00 20 11 00*11 ff*32 00*64 00*4 00*4 00*8 \
    44000500 00*20 32 00*3 0200 00*18 54464557 00 00 01 00 ff*12";
/// ip xfrm policy get src 10.0.0.1/32 dst 10.0.0.2/32 proto udp dport 6787 dir out.
const GET_POLICY: &str = "\
    0a000002 00*12 0a000001 00*12 1a83ffff 00*4 0200202011 00*15 01000000";
/// Its answer.
const POLICY: &str = "\
    0a000002 00*12 0a000001 00*12 1a83ffff 00*4 0200202011 00*11 ff*32 00*48 8d8d016b \
    00*16 0100000001 00*7 440005000a000002 00*12 1122334432000000020000000a000001 00*12 \
    54464557 00*4 ff*12 0a0010 00*9";
/// ip xfrm policy delete index 1 dir out.
const DELETE_POLICY: &str = "\
    00*40 02 00*15 0100000001000000";

fn hex(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in text.split_whitespace() {
        let (digits, times) = word.split_once('*').unwrap_or((word, "1"));
        for _ in 0..times.parse().unwrap() {
            for at in (0..digits.len()).step_by(2) {
                bytes.push(u8::from_str_radix(&digits[at..at + 2], 16).unwrap());
            }
        }
    }
    bytes
}

fn inbound() -> StateSpec {
    let mut key: Vec<u8> = (0..32).collect();
    key.extend(0xa0..0xa4);
    StateSpec {
        direction: Direction::In,
        source: "10.0.0.1".parse().unwrap(),
        destination: "10.0.0.2".parse().unwrap(),
        spi: 0x1122_3344,
        cipher: Cipher::Aes256Gcm,
        key: SaKey::from_bytes(key.try_into().unwrap()),
        encapsulation: Some(UdpPorts { source: 6785, destination: 40000 }),
        limits: Limits::NONE,
        lifetime: Duration::ZERO,
        group: None,
        cpu: None,
        mark: None,
    }
}

fn outbound() -> StateSpec {
    StateSpec {
        direction: Direction::Out,
        source: "fd00::1".parse().unwrap(),
        destination: "fd00::2".parse().unwrap(),
        cipher: Cipher::ChaCha20Poly1305,
        encapsulation: None,
        limits: Limits { packets_soft: 11, packets_hard: 22, bytes_soft: 33, bytes_hard: 44 },
        lifetime: Duration::from_millis(3_599_001),
        ..inbound()
    }
}

fn to_v4() -> PolicySpec {
    let id = PolicyId {
        source: "10.0.0.1".parse().unwrap(),
        destination: "10.0.0.2".parse().unwrap(),
        port: 6787,
    };
    PolicySpec { id, template: Template::State { spi: 0x1122_3344 } }
}

fn to_v6() -> PolicySpec {
    let id = PolicyId {
        source: "fd00::1".parse().unwrap(),
        destination: "fd00::2".parse().unwrap(),
        port: 6788,
    };
    PolicySpec { id, template: Template::Lanes(LaneGroup::new(7).unwrap()) }
}

#[test]
fn states_are_written_as_iproute2_writes_them() {
    let old = Abilities::default();
    let mut expected = hex(NEW_STATE_IN);
    // iproute2 has no word for the mask of a port.
    expected[34..36].copy_from_slice(&[0xff, 0xf8]);
    expected.extend(hex("0800 2000 05000000"));
    assert_eq!(new_state(&inbound(), old).bytes(), expected);
    assert_eq!(new_state(&outbound(), old).bytes(), hex(NEW_STATE_OUT));
    assert_eq!(state_id(inbound().id()).bytes(), hex(DELETE_STATE));
}

#[test]
fn newer_kernels_hear_direction_and_cpu() {
    let all = Abilities { direction: true, per_cpu: true };
    let spec = StateSpec { group: LaneGroup::new(7), cpu: Some(3), ..outbound() };
    let mut expected = hex(NEW_STATE_OUT);
    expected[208..212].copy_from_slice(&0x5745_0007_u32.to_ne_bytes());
    // A state that only sends has no window.
    let window = expected.len() - 24;
    expected[window..].fill(0);
    expected.extend(hex("0500 2100 02 000000 0800 2300 03000000"));
    assert_eq!(new_state(&spec, all).bytes(), expected);
    let state = read_state(&expected).unwrap();
    assert_eq!(state.own.group, LaneGroup::new(7));
    assert_eq!(state.own.direction, Some(Direction::Out));
    assert_eq!(state.own.cpu, Some(3));
    assert_eq!(state.told, all);
    assert!(state.is_own() && state.keyed);
}

#[test]
fn packets_that_a_state_opens_are_marked() {
    let old = Abilities::default();
    let spec = StateSpec { mark: Some(0x5800_0001), encapsulation: None, ..inbound() };
    let plain = StateSpec { mark: None, ..spec.clone() };
    let mut expected = new_state(&plain, old).bytes().to_vec();
    // ip xfrm state add … output-mark 0x58000001, without a mask: all bits.
    expected.extend(hex("0800 1d00 01000058"));
    assert_eq!(new_state(&spec, old).bytes(), expected);
}

#[test]
fn policies_are_written_as_iproute2_writes_them() {
    assert_eq!(policy(&to_v4()).bytes(), hex(SET_POLICY));
    assert_eq!(policy(&to_v6()).bytes(), hex(SET_LANES));
    assert_eq!(policy_by_selector(&to_v4().id).bytes(), hex(GET_POLICY));
    let mut expected = hex(DELETE_POLICY);
    // The kernel ignores the family where an index is given.
    expected[40] = 0;
    let found = read_policy(&hex(POLICY)).unwrap();
    assert_eq!(policy_by_index(&found).bytes(), expected);
}

#[test]
fn inbound_policies_are_written_as_iproute2_writes_them() {
    let any = EntryPolicy { source: "::".parse().unwrap(), prefix: 0, port: 6788, plain: false };
    assert_eq!(entry_policy(&any).bytes(), hex(SET_ENTRY));
    let peer = "10.0.0.2".parse().unwrap();
    let plain = EntryPolicy { source: peer, prefix: 32, port: 6787, plain: true };
    assert_eq!(entry_policy(&plain).bytes(), hex(SET_PLAIN_ENTRY));
    for (bytes, entry) in [(SET_ENTRY, any), (SET_PLAIN_ENTRY, plain)] {
        let read = read_policy(&hex(bytes)).unwrap();
        assert!(read.is_own() && read.is_inbound() && !read.is_outbound());
        assert_eq!((read.entry, read.own, read.id), (Some(entry), None, None));
    }
}

#[test]
fn an_inbound_policy_that_somebody_changed_reads_as_none() {
    let whole = hex(SET_ENTRY);
    // Ignored fields: counters, the index and the lengths.
    let counted = (120..152).chain(156..160).chain(164..172);
    let counted: Vec<usize> = counted.collect();
    for at in (0..whole.len()).filter(|at| !counted.contains(at)) {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        let entry = read_policy(&changed).and_then(|policy| policy.entry);
        // A change of network or prefix alone makes a different policy of ours.
        let other = (16..36).contains(&at) || at == 43;
        assert!(entry.is_none() || other, "byte {at}: {entry:?}");
        assert_ne!(entry, read_policy(&whole).unwrap().entry, "byte {at}");
    }
}

#[test]
fn answers_are_read() {
    let state = read_state(&hex(NEW_STATE_IN)).unwrap();
    assert_eq!(state.own.id, inbound().id());
    assert_eq!(state.own.source, inbound().source);
    assert_eq!(state.own.encapsulation, inbound().encapsulation);
    assert_eq!((state.reqid, state.keyed, state.own.group), (REQID, true, None));

    let read = read_policy(&hex(POLICY)).unwrap();
    assert_eq!(read.own, Some(to_v4()));
    assert_eq!((read.index, read.reqid, read.is_outbound()), (1, REQID, true));
    let read = read_policy(&hex(SET_LANES)).unwrap();
    assert_eq!(read.own, Some(to_v6()));
}

#[test]
fn foreign_states_and_policies_are_told_apart() {
    for reqid in [0, 1, 0x5744_ffff, 0x5746_0000, u32::MAX] {
        let mut foreign = hex(NEW_STATE_IN);
        foreign[208..212].copy_from_slice(&reqid.to_ne_bytes());
        assert!(!read_state(&foreign).unwrap().is_own());
        let mut foreign = hex(SET_POLICY);
        foreign[216..220].copy_from_slice(&reqid.to_ne_bytes());
        let foreign = read_policy(&foreign).unwrap();
        assert!(!foreign.is_own() && foreign.own.is_none());
        assert_eq!(foreign.id, Some(to_v4().id));
    }
    let mut inward = hex(SET_POLICY);
    inward[160] = 0;
    let inward = read_policy(&inward).unwrap();
    assert!(inward.own.is_none() && inward.id.is_none() && !inward.is_outbound());
    let mut ah = hex(NEW_STATE_IN);
    ah[76] = 51;
    assert_eq!(read_state(&ah), None);
    assert_eq!(LaneGroup::new(0x4654), None);
}

#[test]
fn senseless_bytes_are_refused_or_skipped_never_a_panic() {
    let whole = [hex(NEW_STATE_IN), hex(POLICY)];
    for bytes in &whole {
        for length in 0..bytes.len() {
            for broken in [bytes[..length].to_vec(), vec![0xff; length], vec![0; length]] {
                let _ = read_state(&broken);
                let _ = read_deleted_state(&broken);
                let _ = read_expired(&broken);
                let _ = read_mapping(&broken);
                let _ = read_policy(&broken);
                let _ = read_deleted_policy(&broken);
                let _ = read_flush(&broken);
            }
        }
    }
    assert_eq!(read_state(&whole[0][..STATE_LEN - 1]), None);
    assert!(!read_state(&whole[0][..STATE_LEN]).unwrap().keyed);
    assert_eq!(read_mapping(&[0; 63]), None);
}

fn second_opinion(kind: u16, body: &[u8]) -> XfrmMessage {
    let mut header = NetlinkHeader::default();
    header.message_type = kind;
    XfrmMessage::deserialize(&header, body).unwrap()
}

#[test]
fn another_decoder_reads_our_requests_alike() {
    let body = new_state(&outbound(), Abilities::default());
    let XfrmMessage::AddSa(state) = second_opinion(NEWSA, body.bytes()) else { panic!() };
    let info = &state.user_sa_info;
    assert_eq!((info.id.spi, info.reqid, info.mode), (0x1122_3344, REQID, MODE_TRANSPORT));
    assert_eq!((info.flags, info.family), (STATE_ESN, AF_INET6));
    assert_eq!((info.lifetime_cfg.soft_packet_limit, info.lifetime_cfg.hard_byte_limit), (11, 44));
    assert_eq!(info.lifetime_cfg.hard_add_expires_seconds, 3600);
    let aead = state.nlas.iter().find_map(|nla| match nla {
        XfrmAttrs::EncryptionAlgAead(aead) => Some(aead),
        _ => None,
    });
    assert_eq!((aead.unwrap().alg_key_len, aead.unwrap().alg_icv_len), (288, 128));

    let body = policy(&to_v4());
    let XfrmMessage::UpdatePolicy(update) = second_opinion(UPDPOLICY, body.bytes()) else {
        panic!()
    };
    assert_eq!(update.user_policy_info.selector.dport, 6787);
    let [XfrmAttrs::Template(templates)] = update.nlas.as_slice() else { panic!() };
    assert_eq!((templates[0].id.spi, templates[0].reqid), (0x1122_3344, REQID));
    assert_eq!((templates[0].optional, templates[0].share), (0, 0));
}

#[test]
fn a_move_is_read_with_its_new_address() {
    let mut body = hex("0a000002 00*12 11223344 0200 32 00");
    body.extend(REQID.to_ne_bytes());
    body.extend(hex("0a000001 00*12 c0000209 00*12 1a81 9c40"));
    let moved = (inbound().id(), "192.0.2.9:40000".parse().unwrap());
    assert_eq!(read_mapping(&body), Some(moved));
    body[24] = 0;
    body[27] = 0;
    assert_eq!(read_mapping(&body), None);
}
