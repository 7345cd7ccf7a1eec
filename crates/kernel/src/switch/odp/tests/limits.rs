//! How many frames to groups go into tunnels.

use weft_crypto::PeerId;
use weft_path::{Mac, Vni};

use crate::switch::odp::{
    decide::{Verdict, decide},
    flow::{Frame, Output, Payload, Tag},
    limits::{Bucket, Class, Limits},
    tables::{Change, PortKind, Tables, Via},
};

const BROADCAST: Mac = Mac([0xff; 6]);
const STREAM: Mac = Mac([1, 0, 0x5e, 1, 2, 3]);
const IGMP_REPORT: Mac = Mac([1, 0, 0x5e, 0, 0, 0x16]);
const MLD_REPORT: Mac = Mac([0x33, 0x33, 0, 0, 0, 0x16]);

#[test]
fn a_bucket_lets_its_rate_pass() {
    let mut bucket = Bucket::new(10, 30);
    let passed = |bucket: &mut Bucket, now_ms| (0..100).filter(|_| bucket.take(now_ms)).count();
    assert_eq!(passed(&mut bucket, 0), 30);
    assert_eq!(passed(&mut bucket, 500), 5);
    assert_eq!(passed(&mut bucket, 60_000), 30);
}

/// The same limits as the table on a bridge.
#[test]
fn discovery_and_control_have_the_low_limit() {
    let broadcasts = [
        BROADCAST,
        IGMP_REPORT,
        MLD_REPORT,
        Mac([0x33, 0x33, 0xff, 1, 2, 3]),
        Mac([0x33, 0x33, 0, 0, 0, 1]),
        Mac([1, 0, 0x5e, 0, 0, 251]),
    ];
    for group in broadcasts {
        assert_eq!(Class::of(group), Class::Broadcast, "{group}");
    }
    for group in [STREAM, Mac([1, 0, 0x5e, 0, 1, 0]), Mac([0x33, 0x33, 0, 0, 1, 0]), Mac([3; 6])] {
        assert_eq!(Class::of(group), Class::Stream, "{group}");
    }
}

fn made(ports: std::ops::Range<u32>) -> Limits {
    let mut limits = Limits::default();
    for port in ports {
        limits.add(port);
        limits.made(port);
    }
    limits
}

#[test]
fn meters_have_the_lowest_free_numbers() {
    let mut limits = made(0..3);
    assert_eq!(limits.meters(2), [4, 5]);
    limits.remove(1);
    limits.add(9);
    assert_eq!(limits.unmade(), [(9, [(2, Class::Broadcast), (3, Class::Stream)])]);
    assert_eq!(limits.meter(9, Class::Stream), None, "the datapath has it not");
    limits.made(9);
    assert_eq!(limits.meter(9, Class::Stream), Some(3));
    assert!(limits.lost(9) && !limits.lost(9));
    limits.add(10);
    assert_eq!(limits.unmade().len(), 2);
}

#[test]
fn a_port_with_too_many_pauses_and_is_known_for_a_while() {
    let mut limits = made(0..2);
    let [low, high] = limits.meters(1)[..] else { panic!("two meters") };
    assert!(!limits.note(1, low, 0, 1_000) && !limits.is_paused(1));
    assert!(limits.note(1, low, 7, 1_000) && limits.is_paused(1) && !limits.is_paused(0));
    // It pauses already; frames of the same look.
    assert!(!limits.note(1, high, 3, 1_000));
    assert_eq!((limits.limited(), limits.known(1_000)), (10, vec![1]));
    assert!(limits.resume(5_999).is_empty());
    assert_eq!((limits.resume(6_000), limits.is_paused(1)), (vec![1], false));
    assert!(!limits.note(1, low, 7, 11_000), "no more since");
    assert!(limits.note(1, low, 8, 12_000));
    assert_eq!((limits.known(71_999), limits.known(72_000)), (vec![1], vec![]));
    // A recreated meter counts from 0.
    limits.made(1);
    assert!(!limits.note(1, low, 0, 90_000));
    assert!(limits.note(0, limits.meters(0)[0], 1, 90_000));
    assert_eq!(limits.limited(), 12);
}

#[test]
fn frames_in_parts_are_counted_by_the_daemon() {
    let mut limits = made(0..2);
    let passed = (0..10_000).filter(|_| limits.admits(1, Class::Broadcast, 5)).count();
    assert_eq!(passed, 2_000);
    assert!(limits.is_paused(1) && limits.admits(1, Class::Stream, 5));
    assert_eq!((limits.limited(), limits.known(5)), (8_000, vec![1]));
}

/// A host with its own port and a container's, and a peer by each engine.
fn host() -> Tables {
    let mut tables = Tables::new(Vni::WEFT);
    for (number, kind) in [
        (0, PortKind::Local(Vni::WEFT)),
        (1, PortKind::Local(Vni::WEFT)),
        (4, PortKind::Tap(Vni::WEFT)),
        (5, PortKind::Tunnel),
    ] {
        tables.add_port(number, &format!("port{number}"), kind);
    }
    for number in [0, 1] {
        tables.pin(Vni::WEFT, source(number), Some(&format!("port{number}")));
        tables.edit_limits(|limits| {
            limits.made(number);
            [number]
        });
    }
    let tunnel = Via::Tunnel { remote: [192, 0, 2, 2].into(), local: None };
    for (number, via) in [(2, tunnel), (3, Via::Tap)] {
        tables.set_peer(PeerId::from_bytes([number; 32]), via);
    }
    tables.take_changes();
    tables
}

fn source(port: u32) -> Mac {
    Mac([2, 0, 0, 0, 0, u8::try_from(port).unwrap()])
}

fn verdict(tables: &Tables, port: u32, destination: Mac) -> Verdict {
    let frame = Frame {
        port,
        tunnel: None,
        source: source(port),
        destination,
        tag: Tag::None,
        payload: Payload::default(),
    };
    decide(tables, &frame).verdict
}

#[test]
fn a_meter_stands_before_tunnels_alone_and_a_pause_closes_them() {
    let mut tables = host();
    let tunnel = Output::Tunnel { port: 5, id: 1, remote: [192, 0, 2, 2].into(), local: None };
    for (group, meter) in [(BROADCAST, 2), (STREAM, 3)] {
        let copies = vec![Output::Port(0), Output::Port(4), Output::Meter(meter), tunnel];
        assert_eq!(verdict(&tables, 1, group), Verdict::Forward(copies));
    }
    // No host has this address. The frame is flooded, and the daemon sends each such frame itself.
    let unknown = Verdict::Flood(vec![Output::Port(0), Output::Port(4), tunnel]);
    assert_eq!(verdict(&tables, 1, Mac([2; 6])), unknown);
    tables.edit_limits(|limits| limits.note(1, 2, 1, 0).then_some(1));
    assert_eq!(tables.take_changes(), [Change::Limit(1)].into());
    let here = vec![Output::Port(0), Output::Port(4)];
    assert_eq!(verdict(&tables, 1, STREAM), Verdict::Forward(here));
    let others = vec![Output::Port(1), Output::Port(4), Output::Meter(0), tunnel];
    assert_eq!(verdict(&tables, 0, BROADCAST), Verdict::Forward(others));
    tables.edit_limits(|limits| limits.resume(5_000));
    assert_eq!(tables.take_changes(), [Change::Limit(1)].into());
}

#[test]
fn multicast_groups_of_the_host_are_told_to_no_peer() {
    let tables = host();
    for group in [IGMP_REPORT, MLD_REPORT] {
        assert_eq!(verdict(&tables, 0, group), Verdict::Keep(vec![Output::Port(1)]));
        let of_container = verdict(&tables, 1, group);
        assert!(matches!(of_container, Verdict::Forward(copies) if copies.len() == 4));
    }
    assert!(
        matches!(verdict(&tables, 0, BROADCAST), Verdict::Forward(copies) if copies.len() == 4)
    );
}
