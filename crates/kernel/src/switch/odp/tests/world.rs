//! Decisions in whole small worlds: three hosts with two containers each. The kernel, the vector engine or
//! nothing joins each pair of hosts, independently in each direction.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
};

use weft_crypto::PeerId;
use weft_path::{Mac, Vni};

use crate::switch::odp::{
    decide::{Verdict, decide},
    drops::OdpDrop,
    flow::{FlowKey, Frame, Output, Payload, Tag, TunnelKey},
    tables::{
        Change, LEARNED_AGE_MS, LEARNED_MAX, LEARNED_PER_PORT_MAX, MOVE_HOLD_MS, Place, PortKind,
        Tables, Via,
    },
};

const HOSTS: u8 = 3;
const TAP: u32 = 10;
const TUNNEL: u32 = 11;
/// The host's own port and two containers'.
const LOCAL: [u32; 3] = [0, 1, 2];
const BROADCAST: Mac = Mac([0xff; 6]);

fn peer(host: u8) -> PeerId {
    PeerId::from_bytes([host; 32])
}

fn address(host: u8) -> IpAddr {
    [192, 0, 2, host].into()
}

fn mac(host: u8, port: u32) -> Mac {
    Mac([2, 0, 0, 0, host, u8::try_from(port).unwrap()])
}

fn via(host: u8) -> Via {
    Via::Tunnel { remote: address(host), local: None }
}

/// The tables of a host that reaches each other one by `vias`.
fn tables(host: u8, vias: &BTreeMap<u8, Via>) -> Tables {
    let mut tables = Tables::new(Vni::WEFT);
    for port in LOCAL {
        tables.add_port(port, &format!("port{port}"), PortKind::Local(Vni::WEFT));
        tables.pin(Vni::WEFT, mac(host, port), Some(&format!("port{port}")));
    }
    tables.add_port(TAP, "tap", PortKind::Tap(Vni::WEFT));
    tables.add_port(TUNNEL, "tunnel", PortKind::Tunnel);
    for (other, via) in vias {
        tables.set_sources(peer(*other), &[address(*other)]);
        tables.set_peer(peer(*other), *via);
        for port in LOCAL {
            tables.set_remote(Vni::WEFT, mac(*other, port), Some(peer(*other)));
        }
    }
    tables
}

fn frame(port: u32, source: Mac, destination: Mac) -> Frame {
    Frame { port, tunnel: None, source, destination, tag: Tag::None, payload: Payload::default() }
}

fn from_tunnel(remote: u8, local: u8, id: u64, source: Mac, destination: Mac) -> Frame {
    let tunnel = TunnelKey { id, remote: address(remote), local: address(local) };
    Frame { tunnel: Some(tunnel), ..frame(TUNNEL, source, destination) }
}

struct World {
    hosts: BTreeMap<u8, Tables>,
    vias: BTreeMap<u8, BTreeMap<u8, Via>>,
}

impl World {
    /// One of the 729 worlds.
    fn new(mut number: usize) -> Self {
        let mut vias: BTreeMap<u8, BTreeMap<u8, Via>> = BTreeMap::new();
        for host in 1..=HOSTS {
            for other in (1..=HOSTS).filter(|other| *other != host) {
                let via = [Via::None, Via::Tap, via(other)][number % 3];
                number /= 3;
                vias.entry(host).or_default().insert(other, via);
            }
        }
        let hosts = vias.iter().map(|(host, vias)| (*host, tables(*host, vias))).collect();
        Self { hosts, vias }
    }

    /// Sends a frame and returns how many copies each local port of each host gets. The vector engine takes a
    /// frame to all peers that it serves, or to the peer that has the MAC.
    fn send(&self, host: u8, port: u32, destination: Mac) -> BTreeMap<(u8, u32), u32> {
        let source = mac(host, port);
        let mut delivered = BTreeMap::new();
        let mut waiting = VecDeque::from([(host, frame(port, source, destination))]);
        let mut steps = 0;
        while let Some((at, frame)) = waiting.pop_front() {
            steps += 1;
            assert!(steps < 50, "a loop");
            let outputs = match decide(&self.hosts[&at], &frame).verdict {
                Verdict::Forward(outputs) | Verdict::Flood(outputs) => outputs,
                Verdict::Drop(_) => continue,
                Verdict::Keep(_) => unreachable!(),
                Verdict::Probe(_) => unreachable!(),
            };
            for output in outputs {
                match output {
                    Output::Port(TAP) => {
                        let served = self.vias[&at].iter().filter(|(_, via)| **via == Via::Tap);
                        for (to, _) in served {
                            let has = destination.0[4] == *to || destination.0[4] > HOSTS;
                            if has {
                                waiting.push_back((*to, self::frame(TAP, source, destination)));
                            }
                        }
                    }
                    Output::Meter(_) => {}
                    Output::Port(port) => *delivered.entry((at, port)).or_default() += 1,
                    Output::Tunnel { port, id, remote, .. } => {
                        assert_eq!(port, TUNNEL);
                        let to = (1..=HOSTS).find(|host| address(*host) == remote).unwrap();
                        waiting.push_back((to, from_tunnel(at, to, id, source, destination)));
                    }
                }
            }
        }
        delivered
    }

    fn reaches(&self, from: u8, to: u8) -> bool {
        from == to || self.vias[&from][&to] != Via::None
    }
}

/// Sends every possible frame of a container in every world. A broadcast, a multicast and a frame to an
/// unknown MAC reach every other port of every reachable host exactly once. A frame to a known MAC reaches
/// that alone.
#[test]
fn every_frame_arrives_exactly_once() {
    let unknown = Mac([2, 9, 9, 9, 9, 9]);
    let multicast = Mac([1, 0, 0x5e, 0, 9, 1]);
    for number in 0..3_usize.pow(6) {
        let world = World::new(number);
        for host in 1..=HOSTS {
            for port in LOCAL {
                for destination in [BROADCAST, multicast, unknown] {
                    let mut wanted = BTreeMap::new();
                    for to in (1..=HOSTS).filter(|to| world.reaches(host, *to)) {
                        wanted.extend(LOCAL.map(|port| ((to, port), 1)));
                    }
                    wanted.remove(&(host, port));
                    assert_eq!(world.send(host, port, destination), wanted, "world {number}");
                }
                for to in 1..=HOSTS {
                    for to_port in LOCAL.into_iter().filter(|at| (to, *at) != (host, port)) {
                        let arrives = world.reaches(host, to).then_some(((to, to_port), 1));
                        let wanted: BTreeMap<_, _> = arrives.into_iter().collect();
                        assert_eq!(world.send(host, port, mac(to, to_port)), wanted);
                    }
                }
            }
        }
    }
}

fn one() -> Tables {
    tables(1, &[(2, via(2)), (3, Via::Tap)].into())
}

fn verdict(tables: &Tables, frame: Frame) -> Verdict {
    decide(tables, &frame).verdict
}

fn dropped(tables: &Tables, frame: Frame) -> Option<OdpDrop> {
    match verdict(tables, frame) {
        Verdict::Drop(reason) => Some(reason),
        _ => None,
    }
}

#[test]
fn nothing_goes_from_the_overlay_back_into_it() {
    let tables = one();
    for destination in [mac(3, 1), mac(2, 1), BROADCAST, Mac([2, 9, 9, 9, 9, 9])] {
        for frame in
            [from_tunnel(2, 1, 1, mac(2, 1), destination), frame(TAP, mac(3, 1), destination)]
        {
            match verdict(&tables, frame) {
                Verdict::Drop(reason) => assert_eq!(reason, OdpDrop::NotHere),
                Verdict::Forward(outputs) | Verdict::Flood(outputs) => {
                    assert_eq!(outputs, LOCAL.map(Output::Port));
                }
                Verdict::Keep(_) | Verdict::Probe(_) => panic!("neither report nor probe"),
            }
        }
    }
}

#[test]
fn tunnel_packets_come_from_peers_on_the_network_alone() {
    let mut tables = one();
    let good = from_tunnel(2, 1, 1, mac(2, 1), mac(1, 1));
    assert_eq!(verdict(&tables, good), Verdict::Forward(vec![Output::Port(1)]));
    let stranger = from_tunnel(77, 1, 1, mac(2, 1), mac(1, 1));
    let decision = decide(&tables, &stranger);
    assert_eq!(decision.verdict, Verdict::Drop(OdpDrop::UnknownSource));
    let tunnel = stranger.tunnel.unwrap();
    let wide = FlowKey::Tunnel { port: TUNNEL, tunnel };
    assert_eq!(decision.flow, Some(wide), "one flow for all that a stranger sends");
    let other = from_tunnel(2, 1, 2, mac(2, 1), mac(1, 1));
    assert_eq!(dropped(&tables, other), Some(OdpDrop::UnknownNetwork));
    // A plain frame by the tunnel's port cannot be.
    let bare = frame(TUNNEL, mac(2, 1), mac(1, 1));
    assert_eq!(dropped(&tables, bare), Some(OdpDrop::UnknownSource));
    // A peer moves to the other engine: its frames in flight are accepted.
    tables.set_sources(peer(2), &[]);
    tables.set_peer(peer(2), Via::Tap);
    assert_eq!(verdict(&tables, good), Verdict::Forward(vec![Output::Port(1)]));
    tables.remove_peer(peer(2));
    assert_eq!(dropped(&tables, good), Some(OdpDrop::UnknownSource));
}

#[test]
fn a_peer_sends_from_its_own_macs_alone() {
    let mut tables = one();
    let to = mac(1, 1);
    assert_eq!(
        verdict(&tables, from_tunnel(2, 1, 1, mac(2, 1), to)),
        Verdict::Forward(vec![Output::Port(1)])
    );
    for destination in [to, BROADCAST] {
        let spoofed = from_tunnel(2, 1, 1, mac(3, 1), destination);
        assert_eq!(dropped(&tables, spoofed), Some(OdpDrop::ForeignSource));
    }
    // A MAC that is unknown until its peer announces it.
    let new = Mac([2, 0, 0, 0, 77, 1]);
    let frame = from_tunnel(2, 1, 1, new, to);
    let decision = decide(&tables, &frame);
    assert_eq!(decision.verdict, Verdict::Drop(OdpDrop::UnannouncedSource));
    assert!(decision.flow.is_some() && decision.depends.contains(&Change::Mac(Vni::WEFT, new)));
    tables.set_remote(Vni::WEFT, new, Some(peer(2)));
    assert!(tables.take_changes().contains(&Change::Mac(Vni::WEFT, new)));
    assert_eq!(verdict(&tables, frame), Verdict::Forward(vec![Output::Port(1)]));
    assert_eq!(dropped(&tables, from_tunnel(3, 1, 1, new, to)), Some(OdpDrop::ForeignSource));
    // A MAC made up by a container here is not a peer's either.
    let made_up = Mac([2, 0, 0, 0, 78, 1]);
    assert!(tables.learn(made_up, 1, 0));
    assert_eq!(dropped(&tables, from_tunnel(2, 1, 1, made_up, to)), Some(OdpDrop::ForeignSource));
}

#[test]
fn probes_go_to_the_daemon_whoever_sends_them() {
    for remote in [2, 77] {
        let probe = from_tunnel(remote, 1, 0xff_ffff, Mac([0; 6]), Mac([0; 6]));
        let decision = decide(&one(), &probe);
        assert_eq!(decision.verdict, Verdict::Probe(address(remote)));
        assert_eq!(decision.flow, None);
    }
}

#[test]
fn frames_that_no_switch_passes_on() {
    let tables = one();
    for last in 0..=0x10 {
        let destination = Mac([1, 0x80, 0xc2, 0, 0, last]);
        for from in [frame(1, mac(1, 1), destination), frame(TAP, mac(3, 1), destination)] {
            let link_local = dropped(&tables, from) == Some(OdpDrop::LinkLocal);
            assert_eq!(link_local, last < 0x10, "{last}");
        }
    }
    let group = frame(1, BROADCAST, mac(1, 2));
    assert_eq!(dropped(&tables, group), Some(OdpDrop::ForeignSource));
    let own = frame(1, mac(1, 1), mac(1, 1));
    assert_eq!(dropped(&tables, own), Some(OdpDrop::SamePort));
    assert_eq!(dropped(&tables, frame(99, mac(1, 1), BROADCAST)), Some(OdpDrop::UnknownPort));
}

#[test]
fn a_mac_is_not_drawn_to_a_port_that_it_is_not_on() {
    let mut tables = one();
    for (source, what) in [(mac(2, 1), "another host's"), (mac(1, 2), "another container's")] {
        assert!(!tables.learn(source, 1, 0), "{what}");
        let spoofed = frame(1, source, mac(1, 2));
        assert_eq!(dropped(&tables, spoofed), Some(OdpDrop::ForeignSource), "{what}");
    }
    // From outside under a MAC that is attached here.
    let spoofed = from_tunnel(2, 1, 1, mac(1, 1), mac(1, 2));
    assert_eq!(dropped(&tables, spoofed), Some(OdpDrop::ForeignSource));
    assert_eq!(tables.place(Vni::WEFT, mac(2, 1)), Place::Remote(peer(2)));
    // An attachment takes precedence over another host's claim, until it ends.
    tables.pin(Vni::WEFT, mac(2, 1), Some("port1"));
    assert_eq!(tables.place(Vni::WEFT, mac(2, 1)), Place::Pinned(Some(1)));
    tables.unpin_port("port1");
    assert_eq!(tables.place(Vni::WEFT, mac(2, 1)), Place::Remote(peer(2)));
}

#[test]
fn learning_is_bounded_and_does_not_flap() {
    let mut tables = one();
    let unknown = Mac([2, 9, 9, 9, 9, 9]);
    // Until it is known where it is, no flow is made, or it could never be learned.
    let from = frame(1, unknown, mac(1, 2));
    assert_eq!(decide(&tables, &from).flow, None);
    assert!(tables.learn(unknown, 1, 0));
    assert_eq!(decide(&tables, &from).flow, Some(FlowKey::Pair(from)));
    assert!(!tables.learn(unknown, 2, MOVE_HOLD_MS - 1), "it moved a moment ago");
    assert_eq!(decide(&tables, &frame(2, unknown, mac(1, 1))).flow, None);
    assert!(tables.learn(unknown, 2, MOVE_HOLD_MS));
    assert_eq!(tables.place(Vni::WEFT, unknown), Place::Learned(2));
    // A learned MAC is forgotten here when a peer announces it.
    tables.set_remote(Vni::WEFT, unknown, Some(peer(3)));
    assert_eq!(tables.place(Vni::WEFT, unknown), Place::Remote(peer(3)));
    assert_eq!(tables.learned_len(), 0);
    assert!(!tables.learn(BROADCAST, 1, 0));

    let nth = |number: usize| {
        let [_, _, a, b] = u32::try_from(number).unwrap().to_be_bytes();
        Mac([6, 0, 0, 0, a, b])
    };
    let learned = (0..1_000).filter(|number| tables.learn(nth(*number), 1, 0)).count();
    assert_eq!(learned, LEARNED_PER_PORT_MAX);
    for port in 100..200 {
        tables.add_port(port, &format!("port{port}"), PortKind::Local(Vni::WEFT));
        for number in 0..LEARNED_PER_PORT_MAX {
            tables.learn(nth(port as usize * 300 + number), port, 0);
        }
    }
    assert_eq!(tables.learned_len(), LEARNED_MAX);
    tables.remove_port(1);
    assert_eq!(tables.learned_len(), LEARNED_MAX - LEARNED_PER_PORT_MAX);
    let busy = nth(100 * 300);
    tables.age(LEARNED_AGE_MS - 1, |_, _| false);
    assert_eq!(tables.learned_len(), LEARNED_MAX - LEARNED_PER_PORT_MAX);
    tables.age(LEARNED_AGE_MS, |_, mac| mac == busy);
    assert_eq!(tables.learned_len(), 1);
}

#[test]
fn a_missing_port_is_no_reason_to_flood() {
    let mut tables = one();
    tables.remove_port(2);
    assert_eq!(dropped(&tables, frame(1, mac(1, 1), mac(1, 2))), Some(OdpDrop::NoPath));
    tables.remove_port(TAP);
    assert_eq!(dropped(&tables, frame(1, mac(1, 1), mac(3, 1))), Some(OdpDrop::NoPath));
    tables.remove_port(TUNNEL);
    assert_eq!(dropped(&tables, frame(1, mac(1, 1), mac(2, 1))), Some(OdpDrop::NoPath));
    tables.remove_port(0);
    assert_eq!(dropped(&tables, frame(1, mac(1, 1), BROADCAST)), Some(OdpDrop::NoReceiver));
}

#[test]
fn a_broadcast_to_too_many_peers_has_no_flow() {
    let mut tables = one();
    let broadcast = frame(1, mac(1, 1), BROADCAST);
    let mut most = 0;
    for number in 0..1_000_u32 {
        let [_, _, a, b] = number.to_be_bytes();
        let mut id = [9; 32];
        id[..4].copy_from_slice(&number.to_be_bytes());
        let remote = [10, 0, a, b].into();
        tables.set_peer(PeerId::from_bytes(id), Via::Tunnel { remote, local: None });
        let decision = decide(&tables, &broadcast);
        if decision.flow.is_some() {
            most = number;
        }
        let Verdict::Forward(outputs) = decision.verdict else { panic!("a broadcast") };
        assert_eq!(outputs.len(), 2 + 1 + 1 + 1 + number as usize);
    }
    assert!((600..700).contains(&most), "{most}");
}

#[test]
fn tagged_frames_have_flows_of_their_own() {
    let tables = one();
    let tagged = Frame { tag: Tag::One(0x1007), ..frame(1, mac(1, 1), mac(2, 1)) };
    assert_eq!(decide(&tables, &tagged).flow, Some(FlowKey::Pair(tagged)));
    let deep = Frame { tag: Tag::Deep, ..tagged };
    assert_eq!(decide(&tables, &deep).flow, None);
}

/// The kernel gives the lowest free number, which flows may still name.
#[test]
fn a_number_that_has_become_free_is_not_the_next() {
    let mut tables = one();
    let taken: BTreeSet<u32> = tables.ports().map(|(number, _)| number).collect();
    let first = tables.next_number();
    assert!(!taken.contains(&first));
    tables.add_port(first, "new", PortKind::Local(Vni::WEFT));
    tables.remove_port(first);
    let mut given = BTreeSet::from([first]);
    for _ in 0..60_000 {
        let number = tables.next_number();
        assert!(!taken.contains(&number) && (1..65_535).contains(&number));
        assert!(given.insert(number), "{number} comes twice");
    }
    // In the end they begin again.
    assert!((0..10_000).any(|_| tables.next_number() == first));
}
