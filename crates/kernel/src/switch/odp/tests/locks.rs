//! What a locked port may send, and the flows that say so.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use weft_path::{Mac, Vni};

use super::datapath::{Match, Read};
use crate::{
    error::KernelError,
    switch::{
        odp::{
            codec_flow::FlowEntry,
            decide::{Decision, Verdict, decide},
            drops::OdpDrop,
            flow::{
                Bits, FRAGMENT_FIRST, FRAGMENT_LATER, FRAGMENT_NONE, FlowKey, Frame, Output,
                Payload, Tag,
            },
            index::{Edit, FLOWS_PER_PORT_MAX, Index, TooMany},
            tables::{Change, LOCKS_MAX, MOVE_HOLD_MS, Place, PortKind, Tables},
        },
        port_lock::{LOCK_ADDRESSES_MAX, PortLock},
    },
};

const OWN: Mac = Mac([2, 0, 0, 0, 0, 1]);
const OTHER: Mac = Mac([2, 0, 0, 0, 0, 2]);
const BROADCAST: Mac = Mac([0xff; 6]);
const NONE: Ipv4Addr = Ipv4Addr::UNSPECIFIED;
const NONE6: Ipv6Addr = Ipv6Addr::UNSPECIFIED;
const FOREIGN: Ipv4Addr = Ipv4Addr::new(10, 32, 0, 3);
const FOREIGN6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 3);
const ICMP: u8 = 1;
const IGMP: u8 = 2;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const NO_NEXT: u8 = 59;

fn own() -> [Ipv4Addr; 2] {
    [[10, 32, 0, 1].into(), [192, 0, 2, 1].into()]
}

fn own6() -> [Ipv6Addr; 3] {
    ["fd00::1", "2001:db8::1", "fe80::ff:fe00:1"].map(|text| text.parse().unwrap())
}

/// The lock with the addresses above; the last makes itself.
fn lock() -> PortLock {
    let ipv4 = own().map(IpAddr::V4);
    let ipv6 = own6().map(IpAddr::V6);
    PortLock { mac: OWN.0, addresses: [&ipv4[..], &ipv6[..2]].concat() }
}

/// A locked port, 1, and one without a lock, 2, with one MAC each.
fn tables() -> Tables {
    let mut tables = Tables::new(Vni::WEFT);
    for (number, mac) in [(1, OWN), (2, OTHER)] {
        tables.add_port(number, &format!("port{number}"), PortKind::Local(Vni::WEFT));
        tables.pin(Vni::WEFT, mac, Some(&format!("port{number}")));
    }
    tables.set_lock("port1", lock()).unwrap();
    tables.take_changes();
    tables
}

fn arp(sender: Mac, ipv4: Ipv4Addr) -> Payload {
    Payload { ethertype: 0x0806, arp_sender: sender, ipv4, ..Payload::default() }
}

fn ip(source: impl Into<IpAddr>, protocol: u8) -> Payload {
    let bare = Payload { protocol, ..Payload::default() };
    match source.into() {
        IpAddr::V4(ipv4) => Payload { ethertype: 0x0800, ipv4, ..bare },
        IpAddr::V6(ipv6) => Payload { ethertype: 0x86dd, ipv6, ..bare },
    }
}

fn udp(source: impl Into<IpAddr>, port: u16) -> Payload {
    Payload { port, ..ip(source, UDP) }
}

fn icmpv6(source: Ipv6Addr, icmp_type: u8) -> Payload {
    Payload { icmp_type, ..ip(source, ICMPV6) }
}

fn nd(source: Ipv6Addr, icmp_type: u8, nd_target: Ipv6Addr) -> Payload {
    Payload { nd_target, ..icmpv6(source, icmp_type) }
}

fn other(ethertype: u16) -> Payload {
    Payload { ethertype, ..Payload::default() }
}

/// A frame from the locked port to the other.
fn frame(payload: Payload) -> Frame {
    Frame { port: 1, tunnel: None, source: OWN, destination: OTHER, tag: Tag::None, payload }
}

/// Why the frame is refused. The flow does the same, and matches the frame as the datapath reads it.
fn refused(tables: &Tables, frame: Frame) -> Option<OdpDrop> {
    let decision = decide(tables, &frame);
    if let Some(key) = decision.flow {
        assert!(Match::of(&key).takes(&Read::of(frame)), "{frame:?} does not match {key:?}");
    }
    match decision.verdict {
        Verdict::Drop(reason) => Some(reason),
        Verdict::Forward(outputs) => {
            assert_eq!(outputs, [Output::Port(2)]);
            None
        }
        other => panic!("{other:?}"),
    }
}

fn check(cases: &[(Payload, Option<OdpDrop>)]) {
    let tables = tables();
    for (payload, reason) in cases {
        assert_eq!(refused(&tables, frame(*payload)), *reason, "{payload:?}");
        // The same from a port without a lock.
        let free = Frame { port: 2, source: OTHER, destination: BROADCAST, ..frame(*payload) };
        let decision = decide(&tables, &free);
        assert_eq!(decision.verdict, Verdict::Forward(vec![Output::Port(1)]));
        let pair = FlowKey::Pair(Frame { payload: Payload::default(), ..free });
        assert_eq!(decision.flow, Some(pair), "whatever it carries");
    }
}

#[test]
fn a_frame_has_the_ports_own_mac() {
    let tables = tables();
    for source in [OTHER, Mac([2, 9, 9, 9, 9, 9]), Mac([2, 0, 0, 0, 0, 0]), BROADCAST] {
        let foreign = Frame { source, ..frame(ip(own()[0], TCP)) };
        assert_eq!(refused(&tables, foreign), Some(OdpDrop::LockedMac), "{source}");
    }
    assert_eq!(refused(&tables, frame(ip(own()[0], TCP))), None);
    // What is dropped from any port is dropped still.
    let own = Frame { destination: OWN, ..frame(ip(own()[0], TCP)) };
    assert_eq!(refused(&tables, own), Some(OdpDrop::SamePort));
    let group = Frame { destination: Mac([1, 0x80, 0xc2, 0, 0, 0]), ..frame(other(0)) };
    assert_eq!(refused(&tables, group), Some(OdpDrop::LinkLocal));
}

#[test]
fn a_tag_is_refused_whatever_its_number() {
    let tables = tables();
    for tag in [Tag::One(0x1000), Tag::One(0x1007), Tag::One(0xffff), Tag::Deep] {
        let tagged = Frame { tag, ..frame(Payload::default()) };
        assert_eq!(refused(&tables, tagged), Some(OdpDrop::LockedVlan), "{tag:?}");
        let free = Frame { port: 2, source: OTHER, destination: OWN, ..tagged };
        assert_eq!(decide(&tables, &free).verdict, Verdict::Forward(vec![Output::Port(1)]));
    }
}

#[test]
fn arp_speaks_of_own_addresses() {
    check(&[
        (arp(OWN, own()[0]), None),
        (arp(OWN, own()[1]), None),
        (arp(OWN, NONE), None),
        (arp(OWN, FOREIGN), Some(OdpDrop::LockedArp)),
        (arp(OTHER, own()[0]), Some(OdpDrop::LockedArp)),
        (arp(OTHER, NONE), Some(OdpDrop::LockedArp)),
        // Of another form: the datapath reads nothing of it.
        (arp(Mac([0; 6]), NONE), Some(OdpDrop::LockedArp)),
        // Reverse ARP, and whatever else.
        (other(0x8035), None),
        (other(0x88cc), None),
        (other(0), None),
    ]);
}

#[test]
fn ipv4_comes_from_own_addresses() {
    let udp_of = |fragment, port| Payload { fragment, ..udp(own()[0], port) };
    check(&[
        (ip(own()[0], TCP), None),
        (ip(own()[1], ICMP), None),
        (ip(FOREIGN, TCP), Some(OdpDrop::LockedIp)),
        (ip(FOREIGN, IGMP), Some(OdpDrop::LockedIp)),
        (ip(NONE, IGMP), None),
        (ip(NONE, TCP), Some(OdpDrop::LockedIp)),
        // A request for an address (DHCP), and a broken header.
        (udp(NONE, 68), Some(OdpDrop::LockedIp)),
        (ip(NONE, 0), Some(OdpDrop::LockedIp)),
        (udp(own()[0], 66), None),
        (udp(own()[0], 67), Some(OdpDrop::LockedDhcp)),
        (udp(own()[0], 68), None),
        (udp(own()[0], 547), None),
        (udp(own()[0], 0), None),
        (udp(FOREIGN, 67), Some(OdpDrop::LockedIp)),
        (udp_of(FRAGMENT_FIRST, 67), Some(OdpDrop::LockedDhcp)),
        (udp_of(FRAGMENT_FIRST, 53), None),
        (udp_of(FRAGMENT_FIRST, 0), Some(OdpDrop::LockedFragment)),
        (udp_of(FRAGMENT_LATER, 0), None),
        (Payload { fragment: FRAGMENT_LATER, ..ip(FOREIGN, UDP) }, Some(OdpDrop::LockedIp)),
        (Payload { fragment: FRAGMENT_FIRST, ..ip(own()[0], TCP) }, None),
        // Another protocol's field is none of UDP.
        (Payload { port: 67, ..ip(own()[0], TCP) }, None),
    ]);
}

#[test]
fn ipv6_comes_from_own_addresses() {
    let first = |payload| Payload { fragment: FRAGMENT_FIRST, ..payload };
    check(&[
        (ip(own6()[0], TCP), None),
        (ip(own6()[1], UDP), None),
        (ip(own6()[2], TCP), None),
        (ip(FOREIGN6, TCP), Some(OdpDrop::LockedIp)),
        (ip(NONE6, TCP), Some(OdpDrop::LockedIp)),
        (ip(NONE6, 0), Some(OdpDrop::LockedIp)),
        (udp(own6()[0], 67), None),
        (udp(own6()[0], 546), None),
        (udp(own6()[0], 547), Some(OdpDrop::LockedDhcp)),
        (udp(own6()[2], 547), Some(OdpDrop::LockedDhcp)),
        (first(udp(own6()[0], 547)), Some(OdpDrop::LockedDhcp)),
        (first(udp(own6()[0], 53)), None),
        (first(udp(own6()[0], 0)), Some(OdpDrop::LockedFragment)),
        (first(ip(own6()[0], NO_NEXT)), Some(OdpDrop::LockedFragment)),
        (ip(own6()[0], NO_NEXT), None),
        (Payload { fragment: FRAGMENT_LATER, ..ip(own6()[0], 44) }, None),
        (Payload { fragment: FRAGMENT_LATER, ..ip(NONE6, 44) }, Some(OdpDrop::LockedIp)),
        (Payload { fragment: FRAGMENT_LATER, ..ip(FOREIGN6, 44) }, Some(OdpDrop::LockedIp)),
    ]);
}

#[test]
fn a_container_is_no_router_and_claims_its_own_addresses() {
    let coded = |payload| Payload { icmp_code: 1, ..payload };
    let (own, local) = (own6()[0], own6()[2]);
    check(&[
        (icmpv6(own, 128), None),
        (icmpv6(local, 133), None),
        (icmpv6(local, 134), Some(OdpDrop::LockedRouter)),
        (icmpv6(own, 137), Some(OdpDrop::LockedRouter)),
        (icmpv6(own, 143), None),
        (icmpv6(own, 0), Some(OdpDrop::LockedFragment)),
        (nd(own, 136, own), None),
        (nd(own, 136, local), None),
        (nd(own, 136, FOREIGN6), Some(OdpDrop::LockedNd)),
        (nd(own, 136, NONE6), Some(OdpDrop::LockedNd)),
        (coded(nd(own, 136, NONE6)), Some(OdpDrop::LockedNd)),
        (coded(nd(own, 136, own)), Some(OdpDrop::LockedNd)),
        // A question is for anybody's address, but from `::` it claims one.
        (nd(own, 135, FOREIGN6), None),
        (nd(NONE6, 135, own), None),
        (nd(NONE6, 135, local), None),
        (nd(NONE6, 135, FOREIGN6), Some(OdpDrop::LockedNd)),
        (coded(nd(NONE6, 135, own)), Some(OdpDrop::LockedNd)),
        (nd(NONE6, 136, own), Some(OdpDrop::LockedIp)),
        (nd(FOREIGN6, 136, own), Some(OdpDrop::LockedIp)),
        (icmpv6(NONE6, 131), None),
        (icmpv6(NONE6, 132), None),
        (icmpv6(NONE6, 143), None),
        (icmpv6(NONE6, 133), Some(OdpDrop::LockedIp)),
        (icmpv6(NONE6, 0), Some(OdpDrop::LockedIp)),
        (icmpv6(FOREIGN6, 134), Some(OdpDrop::LockedIp)),
        // ICMPv6 in IPv4 is nothing.
        (Payload { icmp_type: 134, ..ip(self::own()[0], ICMPV6) }, None),
    ]);
}

/// The addresses of one family allow none of the other, but the link-local one.
#[test]
fn a_lock_without_addresses_leaves_the_link_local_one() {
    let mut tables = tables();
    tables.set_lock("port1", PortLock { mac: OWN.0, addresses: Vec::new() }).unwrap();
    for (payload, reason) in [
        (ip(own()[0], TCP), Some(OdpDrop::LockedIp)),
        (arp(OWN, own()[0]), Some(OdpDrop::LockedArp)),
        (arp(OWN, NONE), None),
        (ip(own6()[0], TCP), Some(OdpDrop::LockedIp)),
        (ip(own6()[2], TCP), None),
        (other(0x88cc), None),
    ] {
        assert_eq!(refused(&tables, frame(payload)), reason, "{payload:?}");
    }
}

/// The keys of all flows that these frames make, each with its verdict; there is no key with two.
fn keys(tables: &Tables, frames: impl Iterator<Item = Frame>) -> BTreeMap<FlowKey, Verdict> {
    let mut keys = BTreeMap::new();
    for frame in frames {
        let Decision { verdict, flow, .. } = decide(tables, &frame);
        let before = keys.insert(flow.unwrap(), verdict.clone());
        assert!(before.is_none_or(|before| before == verdict), "{frame:?}");
    }
    keys
}

#[test]
fn a_client_that_uses_every_udp_port_has_few_flows() {
    let tables = tables();
    for (source, server) in [(IpAddr::V4(own()[0]), 67), (IpAddr::V6(own6()[0]), 547)] {
        for (fragment, most, dropped) in
            [(FRAGMENT_NONE, 17, vec![server]), (FRAGMENT_FIRST, 32, vec![0, server])]
        {
            let of = |port| frame(Payload { fragment, ..udp(source, port) });
            let keys = keys(&tables, (0..=u16::MAX).map(of));
            assert!(keys.len() <= most, "{} flows", keys.len());
            let drops = keys.iter().filter(|(_, verdict)| matches!(verdict, Verdict::Drop(_)));
            let drops = drops.map(|(key, _)| match key {
                FlowKey::Locked { frame, bits: Bits { port: 16, .. } } => frame.payload.port,
                key => panic!("{key:?}"),
            });
            assert_eq!(drops.collect::<Vec<_>>(), dropped);
        }
        // Those of usual clients.
        let of = |port| frame(udp(source, port));
        assert_eq!(keys(&tables, (32_768..=60_999).map(of)).len(), 1);
    }
    let later = frame(Payload { fragment: FRAGMENT_LATER, ..udp(own()[0], 0) });
    assert_eq!(keys(&tables, [later].into_iter()).len(), 1);
}

/// Numbers that look random, and the same in each run.
fn made_up(number: u64) -> [u8; 16] {
    let low = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let high = (low ^ (low >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (u128::from(high) << 64 | u128::from(low ^ (high >> 31))).to_be_bytes()
}

#[test]
fn made_up_addresses_make_few_flows_whatever_their_destination() {
    let tables = tables();
    let short = |bytes: [u8; 16]| <[u8; 4]>::try_from(&bytes[..4]).unwrap();
    let mac = |bytes: [u8; 16]| Mac(bytes[..6].try_into().unwrap());
    let kinds: [&dyn Fn([u8; 16]) -> Frame; 6] = [
        &|bytes| Frame { source: mac(bytes), ..frame(ip(own()[0], TCP)) },
        &|bytes| frame(arp(mac(bytes), own()[0])),
        &|bytes| frame(arp(OWN, short(bytes).into())),
        &|bytes| frame(ip(Ipv4Addr::from(short(bytes)), bytes[9])),
        &|bytes| frame(ip(Ipv6Addr::from(bytes), bytes[3])),
        &|bytes| frame(nd(own6()[0], 136, bytes.into())),
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let frames = (0..20_000).map(|number| {
            let bytes = made_up(number);
            Frame { destination: mac(made_up(number + 77_777)), ..kind(bytes) }
        });
        let keys = keys(&tables, frames);
        assert!(keys.values().all(|verdict| matches!(verdict, Verdict::Drop(_))));
        assert!((2..1_500).contains(&keys.len()), "{} flows of kind {number}", keys.len());
    }
}

/// One flow for what is allowed of a protocol, and no more than that.
#[test]
fn an_allowed_flow_matches_what_was_read() {
    let tables = tables();
    let bits = |payload| match decide(&tables, &frame(payload)).flow {
        Some(FlowKey::Locked { bits, .. }) => bits,
        other => panic!("{other:?}"),
    };
    let macs = Bits { source: 48, destination: 48, ethertype: 16, ..Bits::default() };
    assert_eq!(bits(other(0x88cc)), macs);
    assert_eq!(bits(arp(OWN, own()[0])), Bits { arp_sender: 48, ipv4: 32, ..macs });
    assert_eq!(bits(ip(own()[0], TCP)), Bits { ipv4: 32, protocol: 8, ..macs });
    let udp_bits = Bits { protocol: 8, fragment: 8, port: 1, ..macs };
    assert_eq!(bits(udp(own()[0], 40_000)), Bits { ipv4: 32, ..udp_bits });
    assert_eq!(bits(udp(own6()[0], 40_000)), Bits { ipv6: 128, ..udp_bits });
    let later = Payload { fragment: FRAGMENT_LATER, ..ip(own()[0], UDP) };
    assert_eq!(bits(later), Bits { ipv4: 32, port: 0, ..udp_bits });
    let no_next = Bits { ipv6: 128, port: 0, ..udp_bits };
    assert_eq!(bits(ip(own6()[0], NO_NEXT)), no_next);
    let icmpv6_bits = Bits { ipv6: 128, protocol: 8, icmp_type: 8, ..macs };
    assert_eq!(bits(icmpv6(own6()[0], 128)), icmpv6_bits);
    let advertised = Bits { icmp_code: 8, nd_target: 128, ..icmpv6_bits };
    assert_eq!(bits(nd(own6()[0], 136, own6()[0])), advertised);
    let refused = Bits { source: 48, ethertype: 16, ipv4: 32, ..Bits::default() };
    assert_eq!(bits(ip(FOREIGN, TCP)), refused, "no destination");
    assert_eq!(bits(ip(Ipv4Addr::new(203, 0, 0, 1), TCP)), Bits { ipv4: 8, ..refused });
}

/// The datapath wants more in their keys than Weft writes. They pass one by one.
#[test]
fn frames_that_no_flow_can_match_pass_by_the_daemon() {
    let tables = tables();
    for ethertype in [0x8847, 0x8848, 0x894f] {
        assert_eq!(decide(&tables, &frame(other(ethertype))).flow, None);
        assert_eq!(refused(&tables, frame(other(ethertype))), None);
        let foreign = Frame { source: OTHER, ..frame(other(ethertype)) };
        assert!(decide(&tables, &foreign).flow.is_some(), "the type is not read");
    }
    let deep = Frame { tag: Tag::Deep, ..frame(Payload::default()) };
    assert_eq!(decide(&tables, &deep).flow, None);
}

fn admit(
    tables: &Tables,
    index: &mut Index,
    frame: &Frame,
) -> (Verdict, Result<Option<Edit>, TooMany>) {
    let decision = decide(tables, frame);
    let admitted = index.admit(frame, &decision, true, 0);
    (decision.verdict, admitted)
}

#[test]
fn a_port_with_too_many_flows_is_still_locked() {
    let (tables, mut index) = (tables(), Index::default());
    let tagged = |control| Frame { tag: Tag::One(control), ..frame(Payload::default()) };
    for control in 0..FLOWS_PER_PORT_MAX {
        let tagged =
            tagged(0x1000 | u16::try_from(control % 4_096 + control / 4_096 * 0x2000).unwrap());
        assert!(matches!(admit(&tables, &mut index, &tagged).1, Ok(Some(_))));
    }
    for (frame, reason) in [
        (tagged(0xf000), OdpDrop::LockedVlan),
        (frame(ip(FOREIGN, TCP)), OdpDrop::LockedIp),
        (Frame { source: OTHER, ..frame(ip(own()[0], TCP)) }, OdpDrop::LockedMac),
    ] {
        assert_eq!(admit(&tables, &mut index, &frame), (Verdict::Drop(reason), Err(TooMany)));
    }
}

#[test]
fn frames_that_flows_refuse_are_counted_by_reason() {
    let (tables, mut index) = (tables(), Index::default());
    let foreign = Frame { source: OTHER, ..frame(ip(own()[0], TCP)) };
    let tagged = Frame { tag: Tag::One(0x1000), ..frame(Payload::default()) };
    let cases = [
        (foreign, OdpDrop::LockedMac, "locked: MAC"),
        (tagged, OdpDrop::LockedVlan, "locked: VLAN"),
        (frame(arp(OTHER, own()[0])), OdpDrop::LockedArp, "locked: ARP"),
        (frame(ip(FOREIGN, TCP)), OdpDrop::LockedIp, "locked: IP"),
        (frame(udp(own()[0], 67)), OdpDrop::LockedDhcp, "locked: DHCP"),
        (frame(icmpv6(own6()[0], 134)), OdpDrop::LockedRouter, "locked: router"),
        (frame(nd(own6()[0], 136, FOREIGN6)), OdpDrop::LockedNd, "locked: ND"),
        (frame(icmpv6(own6()[0], 0)), OdpDrop::LockedFragment, "locked: fragment"),
    ];
    let mut entries = Vec::new();
    for (packets, (frame, reason, name)) in (1..).zip(cases) {
        assert_eq!((reason.name(), OdpDrop::ALL.contains(&reason)), (name, true));
        let (verdict, edit) = admit(&tables, &mut index, &frame);
        assert_eq!(verdict, Verdict::Drop(reason));
        let Ok(Some(Edit::Put { id, outputs, .. })) = edit else { panic!("{edit:?}") };
        assert_eq!(outputs, []);
        entries.push(FlowEntry { id: Some(id), packets, outputs: None });
    }
    let names: BTreeSet<&str> = OdpDrop::ALL.map(OdpDrop::name).into();
    assert_eq!(names.len(), OdpDrop::ALL.len());
    index.begin_sweep();
    let counted: BTreeMap<OdpDrop, u64> = index.sweep(&entries).dropped.into_iter().collect();
    let wanted = (1..).zip(cases).map(|(packets, (_, reason, _))| (reason, packets));
    assert_eq!(counted, wanted.collect());
}

/// The flows that a change deletes and changes.
fn edits(tables: &mut Tables, index: &mut Index) -> (usize, usize) {
    let changes = tables.take_changes();
    let edits = index.refresh(tables, &changes);
    let deleted = edits.iter().filter(|edit| matches!(edit, Edit::Delete { .. })).count();
    assert_eq!(index.outdated(tables), 0);
    (deleted, edits.len() - deleted)
}

#[test]
fn a_changed_lock_decides_again_what_it_concerns() {
    let (mut tables, mut index) = (tables(), Index::default());
    let back = Frame { port: 2, source: OTHER, destination: OWN, ..frame(ip(own()[0], TCP)) };
    let admit_all = |tables: &Tables, index: &mut Index, payloads: &[Payload]| {
        for payload in payloads {
            admit(tables, index, &frame(*payload)).1.unwrap();
        }
        admit(tables, index, &back).1.unwrap();
    };
    let sent = [ip(own()[0], TCP), ip(own()[1], TCP), ip(FOREIGN, TCP), other(0x88cc)];
    admit_all(&tables, &mut index, &sent);
    assert_eq!(index.expected().len(), 5);
    tables.set_lock("port1", lock()).unwrap();
    assert_eq!(tables.take_changes(), [].into(), "it is the same");
    // An address goes and another comes: the flow for one becomes a drop, that for the other goes through.
    let addresses = vec![own()[0].into(), FOREIGN.into()];
    tables.set_lock("port1", PortLock { mac: OWN.0, addresses }).unwrap();
    assert_eq!(tables.take_changes(), [Change::Lock(1)].into());
    tables.set_lock("port1", lock()).unwrap();
    assert_eq!(edits(&mut tables, &mut index), (0, 0), "and back at once");
    let addresses = vec![own()[0].into(), FOREIGN.into()];
    tables.set_lock("port1", PortLock { mac: OWN.0, addresses }).unwrap();
    assert_eq!(edits(&mut tables, &mut index), (2, 0));
    assert_eq!(refused(&tables, frame(sent[1])), Some(OdpDrop::LockedIp));
    assert_eq!(refused(&tables, frame(sent[2])), None);
    admit_all(&tables, &mut index, &sent);
    // Without a lock there is one flow for all. The other port's stays all the time.
    tables.remove_lock("port1");
    assert_eq!(edits(&mut tables, &mut index), (4, 0));
    admit_all(&tables, &mut index, &sent);
    assert_eq!(index.expected().len(), 2);
    tables.remove_lock("port1");
    assert_eq!(tables.take_changes(), [].into());
    tables.set_lock("port1", lock()).unwrap();
    assert_eq!(edits(&mut tables, &mut index), (1, 0));
}

#[test]
fn a_lock_waits_for_its_port_and_outlives_it() {
    let mut tables = tables();
    let source = Mac([2, 0, 0, 0, 0, 3]);
    tables.set_lock("port3", PortLock { mac: source.0, addresses: Vec::new() }).unwrap();
    assert_eq!(tables.take_changes(), [].into());
    let from = Frame { port: 3, source, ..frame(ip(own()[0], TCP)) };
    for number in [3, 7] {
        tables.add_port(number, "port3", PortKind::Local(Vni::WEFT));
        let from = Frame { port: number, ..from };
        assert_eq!(refused(&tables, from), Some(OdpDrop::LockedIp), "{number}");
        assert!(decide(&tables, &from).depends.contains(&Change::Lock(number)));
        tables.remove_port(number);
    }
    // Another port under the number has nothing of it.
    tables.add_port(3, "port4", PortKind::Local(Vni::WEFT));
    assert!(tables.learn(source, 3, 0));
    assert_eq!(refused(&tables, from), None);
    tables.remove_lock("port3");
    tables.add_port(3, "port3", PortKind::Local(Vni::WEFT));
    assert!(tables.learn(source, 3, 0));
    assert_eq!(refused(&tables, from), None);
}

#[test]
fn no_mac_is_learned_where_another_is_locked() {
    let mut tables = tables();
    let made_up = Mac([2, 9, 9, 9, 9, 9]);
    assert!(!tables.learn(made_up, 1, 0) && tables.learn(OWN, 1, 0));
    assert_eq!(tables.place(Vni::WEFT, made_up), Place::Unknown);
    // It is forgotten where a lock comes, and its flows are decided again.
    tables.remove_lock("port1");
    assert!(tables.learn(made_up, 1, MOVE_HOLD_MS));
    tables.take_changes();
    tables.set_lock("port1", lock()).unwrap();
    assert_eq!(tables.place(Vni::WEFT, made_up), Place::Unknown);
    assert_eq!(tables.place(Vni::WEFT, OWN), Place::Pinned(Some(1)));
    let changes = [Change::Lock(1), Change::Mac(Vni::WEFT, made_up)];
    assert_eq!(tables.take_changes(), changes.into());
    // One that is its own stays.
    tables.pin(Vni::WEFT, OWN, None);
    tables.learn(OWN, 1, 0);
    tables.set_lock("port1", PortLock { mac: OWN.0, addresses: Vec::new() }).unwrap();
    assert_eq!(tables.place(Vni::WEFT, OWN), Place::Learned(1));
}

#[test]
fn locks_are_limited() {
    let mut tables = tables();
    let of = |count: usize| PortLock { mac: OWN.0, addresses: vec![FOREIGN.into(); count] };
    let error = tables.set_lock("port1", of(LOCK_ADDRESSES_MAX + 1)).unwrap_err();
    assert!(matches!(error, KernelError::LockTooLong { count, .. } if count == 65), "{error}");
    assert_eq!(refused(&tables, frame(ip(FOREIGN, TCP))), Some(OdpDrop::LockedIp), "as before");
    tables.set_lock("port1", of(LOCK_ADDRESSES_MAX)).unwrap();
    assert_eq!(refused(&tables, frame(ip(FOREIGN, TCP))), None);
    for number in 1..LOCKS_MAX {
        tables.set_lock(&format!("further{number}"), of(0)).unwrap();
    }
    let error = tables.set_lock("one more", of(0)).unwrap_err();
    assert!(matches!(error, KernelError::TableFull { limit: LOCKS_MAX, .. }), "{error}");
    tables.set_lock("further1", of(1)).unwrap();
    tables.remove_lock("further1");
    tables.set_lock("one more", of(0)).unwrap();
}
