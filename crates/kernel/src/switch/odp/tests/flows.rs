//! The index of flows against a model of the kernel's table.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use proptest::prelude::*;
use weft_crypto::PeerId;
use weft_path::{Mac, Vni};

use super::{
    datapath::{IPV4_ADDRESSES, IPV6_ADDRESSES, Match, Read, payload},
    networks::Books,
};
use crate::switch::{
    odp::{
        codec_flow::{FlowEntry, FlowId},
        decide::{Verdict, decide},
        drops::OdpDrop,
        flow::{FlowKey, Frame, Output, Payload, Tag, TunnelKey},
        index::{Edit, FLOWS_PER_PORT_MAX, Index, PUT_AGAIN_AFTER_MS, TooMany},
        tables::{PortKind, Tables, Via},
    },
    port_lock::PortLock,
};

fn peer(number: u8) -> PeerId {
    PeerId::from_bytes([number; 32])
}

fn mac(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

fn address(number: u8) -> IpAddr {
    [192, 0, 2, number].into()
}

/// The kernel's table.
#[derive(Default)]
struct Model(HashMap<FlowId, (FlowKey, Vec<Output>)>, HashMap<FlowId, Match>);

impl Model {
    fn apply(&mut self, edit: &Edit) {
        match edit {
            Edit::Put { id, key, outputs, replaces } => {
                let before = self.0.insert(*id, (*key, outputs.clone()));
                self.1.entry(*id).or_insert_with(|| Match::of(key));
                match before {
                    Some((was, _)) => assert!(*replaces && was == *key),
                    None => assert!(!replaces),
                }
            }
            Edit::Delete { id } => {
                assert!(self.0.remove(id).is_some());
                self.1.remove(id);
            }
        }
    }

    /// A frame matches one flow at most, and its fate there is what the tables say of it.
    fn check(&self, tables: &Tables, read: &Read) {
        let frame = &read.frame;
        let matched = self.1.iter().filter(|(_, matched)| matched.takes(read));
        let matched: Vec<FlowId> = matched.map(|(id, _)| *id).collect();
        let [id] = matched[..] else {
            return assert!(matched.is_empty(), "{frame:?} matches {matched:?}");
        };
        let (key, outputs) = &self.0[&id];
        match decide(tables, frame).verdict {
            Verdict::Forward(decided) | Verdict::Keep(decided) => {
                assert_eq!(*outputs, decided, "{frame:?} matches {key:?}");
            }
            Verdict::Drop(reason) => {
                assert!(outputs.is_empty(), "{frame:?} ({reason:?}) matches {key:?}");
            }
            Verdict::Flood(_) | Verdict::Probe(_) => panic!("{frame:?} matches {key:?}"),
        }
    }

    /// Frames that differ in one field from one that a locked port has sent. Those that match its flow have its fate.
    fn check_spoofed(&self, tables: &Tables, frame: &Frame) {
        let decision = decide(tables, frame);
        let Some(key @ FlowKey::Locked { .. }) = decision.flow else { return };
        let id = self.0.iter().find(|(_, (of, _))| *of == key).map(|(id, _)| *id);
        let matched = &self.1[&id.unwrap()];
        assert!(matched.takes(&Read::of(*frame)), "{frame:?} does not match {key:?}");
        for spoofed in spoofed(frame) {
            if matched.takes(&Read::of(spoofed)) {
                assert_eq!(
                    decide(tables, &spoofed),
                    decision,
                    "{spoofed:?} is taken for {frame:?}"
                );
            }
        }
    }

    /// No frame may match two flows.
    fn check_apart(&self) {
        let keys: Vec<FlowKey> = self.0.values().map(|(key, _)| *key).collect();
        assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
        for key in &keys {
            if let FlowKey::Tunnel { port, tunnel } = key {
                let under = |other: &&FlowKey| {
                    matches!(other, FlowKey::Pair(frame)
                        if frame.port == *port && frame.tunnel == Some(*tunnel))
                };
                assert_eq!(keys.iter().find(under), None);
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Frame(Frame),
    Peer(u8, u8),
    Sources(u8, Vec<u8>),
    RemovePeer(u8),
    AddNetwork(Vni),
    RemoveNetwork(Vni),
    Broadcast(Vni, Option<BTreeSet<u8>>),
    Endpoint(Vni, u8, Option<u8>),
    Pin(Vni, u8, Option<u8>),
    /// A port of this number and name. The name says what it is, and of containers' ports the network.
    AddPort(u32, u8, Vni),
    RemovePort(u32),
    Limit(u32, u8),
    /// A lock for the port of this name: to its own MAC mostly, with some addresses.
    Lock(u8, PortLock),
    Unlock(u8),
    Age,
}

/// Frames, half of them from the MAC with their port's number.
fn frames() -> impl Strategy<Value = Frame> {
    let number = || 0..5_u8;
    let tunnel = (number(), 1..5_u64).prop_map(|(remote, id)| TunnelKey {
        id,
        remote: address(remote),
        local: address(9),
    });
    let tunnel = prop_oneof![2 => Just(None), 1 => tunnel.prop_map(Some)];
    let destination = prop_oneof![number().prop_map(mac), Just(Mac([0xff; 6]))];
    let tag = prop_oneof![12 => Just(Tag::None), 1 => Just(Tag::One(0x1001)), 1 => Just(Tag::Deep)];
    let fields = (0..9_u32, tunnel, prop::option::of(number()), destination, tag, payload());
    fields.prop_map(|(port, tunnel, source, destination, tag, payload)| {
        let source = mac(source.unwrap_or(u8::try_from(port).unwrap()));
        let payload = if tag == Tag::None { payload } else { Payload::default() };
        Frame { port, tunnel, source, destination, tag, payload }
    })
}

/// Frames from the port that is locked from the start.
fn locked_frames() -> impl Strategy<Value = Frame> {
    let destination = prop_oneof![(2..4_u8).prop_map(mac), Just(Mac([0xff; 6]))];
    (destination, payload())
        .prop_map(|(destination, payload)| Frame { payload, ..frame(destination) })
}

/// The frame with another value in one field.
fn spoofed(frame: &Frame) -> Vec<Frame> {
    let payload = frame.payload;
    let macs = (0..5).map(mac).chain([Mac([0xff; 6]), Mac([4; 6])]);
    let mut frames: Vec<Frame> = macs
        .flat_map(|mac| {
            let sender = Payload { arp_sender: mac, ..payload };
            [
                Frame { source: mac, ..*frame },
                Frame { destination: mac, ..*frame },
                Frame { payload: sender, ..*frame },
            ]
        })
        .collect();
    let ipv4 = IPV4_ADDRESSES.into_iter().map(|ipv4| Payload { ipv4, ..payload });
    let ipv6 = IPV6_ADDRESSES.into_iter().flat_map(|address| {
        [Payload { ipv6: address, ..payload }, Payload { nd_target: address, ..payload }]
    });
    let bytes = [0, 1, 2, 6, 17, 58, 59, 131, 134, 135, 136, 137].into_iter().flat_map(|byte| {
        [
            Payload { protocol: byte, ..payload },
            Payload { fragment: byte % 3, ..payload },
            Payload { icmp_type: byte, ..payload },
            Payload { icmp_code: byte, ..payload },
        ]
    });
    let ports = [0, 1, 66, 67, 68, 546, 547, 548, 40_000].map(|port| Payload { port, ..payload });
    let types =
        [0, 0x0800, 0x0806, 0x86dd, 0x88cc].map(|ethertype| Payload { ethertype, ..payload });
    let payloads = ipv4.chain(ipv6).chain(bytes).chain(ports).chain(types);
    frames.extend(payloads.map(|payload| Frame { payload, ..*frame }));
    frames.push(Frame { tag: Tag::One(0x1000), payload: Payload::default(), ..*frame });
    frames
}

fn lock() -> impl Strategy<Value = Step> {
    let ipv4 = prop::collection::vec(prop::sample::select(&IPV4_ADDRESSES[1..]), 0..3);
    let ipv6 = prop::collection::vec(prop::sample::select(&IPV6_ADDRESSES[1..]), 0..3);
    (0..5_u8, prop::bool::weighted(0.1), ipv4, ipv6).prop_map(|(name, other, ipv4, ipv6)| {
        let addresses = ipv4.into_iter().map(IpAddr::V4).chain(ipv6.into_iter().map(IpAddr::V6));
        let lock = PortLock { mac: mac(name + u8::from(other)).0, addresses: addresses.collect() };
        Step::Lock(name, lock)
    })
}

fn step() -> impl Strategy<Value = Step> {
    let number = || 0..5_u8;
    let network = || (1..4_u32).prop_map(Vni);
    let other = || (2..4_u32).prop_map(Vni);
    let receivers = prop::option::of(prop::collection::btree_set(number(), 0..4));
    prop_oneof![
        8 => frames().prop_map(Step::Frame),
        12 => locked_frames().prop_map(Step::Frame),
        2 => lock(),
        1 => number().prop_map(Step::Unlock),
        1 => (number(), number()).prop_map(|(peer, via)| Step::Peer(peer, via)),
        1 => (number(), prop::collection::vec(number(), 0..3))
            .prop_map(|(peer, sources)| Step::Sources(peer, sources)),
        1 => number().prop_map(Step::RemovePeer),
        1 => other().prop_map(Step::AddNetwork),
        1 => other().prop_map(Step::RemoveNetwork),
        1 => (network(), receivers).prop_map(|(network, peers)| Step::Broadcast(network, peers)),
        2 => (network(), number(), prop::option::of(number()))
            .prop_map(|(network, mac, peer)| Step::Endpoint(network, mac, peer)),
        1 => (network(), number(), prop::option::of(number()))
            .prop_map(|(network, mac, port)| Step::Pin(network, mac, port)),
        2 => (0..9_u32, 0..9_u8, network())
            .prop_map(|(number, name, network)| Step::AddPort(number, name, network)),
        1 => (0..9_u32).prop_map(Step::RemovePort),
        1 => (0..9_u32, 0..4_u8).prop_map(|(port, what)| Step::Limit(port, what)),
        1 => Just(Step::Age),
    ]
}

/// The role of the port with this name.
fn kind(name: u8, network: Vni) -> PortKind {
    match name {
        4 => PortKind::Tap(Vni(1)),
        5 => PortKind::Tunnel,
        6 | 7 => PortKind::Tap(Vni(u32::from(name) - 4)),
        8 => PortKind::Unclaimed,
        _ => PortKind::Local(network),
    }
}

/// Whether the network of this step exists; the switch takes no other.
fn is_possible(step: &Step, tables: &Tables) -> bool {
    match step {
        Step::Broadcast(vni, _) | Step::Endpoint(vni, ..) | Step::Pin(vni, ..) => {
            tables.has_network(*vni)
        }
        Step::AddPort(_, name, vni) => {
            kind(*name, *vni).network().is_none_or(|vni| tables.has_network(vni))
        }
        _ => true,
    }
}

fn take(step: &Step, tables: &mut Tables, index: &mut Index, model: &mut Model, now_ms: u64) {
    match step {
        Step::Frame(frame) => {
            if matches!(tables.port_kind(frame.port), Some(PortKind::Local(_))) {
                tables.learn(frame.source, frame.port, now_ms);
                refresh(tables, index, model);
            }
            let decision = decide(tables, frame);
            if let Ok(Some(edit)) = index.admit(frame, &decision, false, now_ms) {
                model.apply(&edit);
            }
        }
        Step::Peer(id, number) => tables.set_peer(peer(*id), via(*number)),
        Step::AddNetwork(vni) => tables.add_network(*vni),
        Step::RemoveNetwork(vni) => tables.remove_network(*vni),
        Step::Broadcast(vni, peers) => tables.set_receivers(*vni, receivers(peers.as_ref())),
        Step::Sources(id, sources) => {
            let sources: Vec<IpAddr> = sources.iter().map(|number| address(*number)).collect();
            tables.set_sources(peer(*id), &sources);
        }
        Step::RemovePeer(id) => tables.remove_peer(peer(*id)),
        Step::Endpoint(vni, number, id) => tables.set_remote(*vni, mac(*number), id.map(peer)),
        Step::Pin(vni, number, port) => {
            tables.pin(*vni, mac(*number), port.map(|port| format!("port{port}")).as_deref());
        }
        Step::AddPort(number, name, vni) => {
            tables.add_port(*number, &format!("port{name}"), kind(*name, *vni));
        }
        Step::RemovePort(number) => tables.remove_port(*number),
        Step::Limit(port, what) => limit(tables, *port, *what, now_ms),
        Step::Lock(name, lock) => tables.set_lock(&format!("port{name}"), lock.clone()).unwrap(),
        Step::Unlock(name) => tables.remove_lock(&format!("port{name}")),
        Step::Age => tables.age(now_ms, |_, _| false),
    }
}

/// Writes the step into the books.
fn note(step: &Step, books: &mut Books) {
    match step {
        Step::Peer(id, number) => books.peer(peer(*id), via(*number)),
        Step::RemovePeer(id) => books.peer(peer(*id), Via::None),
        Step::AddNetwork(vni) => books.add_network(*vni),
        Step::RemoveNetwork(vni) => books.remove_network(*vni),
        Step::Broadcast(vni, peers) => books.broadcast(*vni, receivers(peers.as_ref())),
        Step::AddPort(number, name, vni) => {
            books.add_port(*number, &format!("port{name}"), kind(*name, *vni));
        }
        Step::RemovePort(number) => books.remove_port(*number),
        _ => {}
    }
}

fn via(number: u8) -> Via {
    let remote = address(number);
    [Via::None, Via::Tap, Via::Tunnel { remote, local: None }][usize::from(number % 3)]
}

fn receivers(peers: Option<&BTreeSet<u8>>) -> Option<BTreeSet<PeerId>> {
    peers.map(|peers| peers.iter().map(|id| peer(*id)).collect())
}

fn limit(tables: &mut Tables, port: u32, what: u8, now_ms: u64) {
    tables.edit_limits(|limits| match what {
        0 => {
            limits.made(port);
            vec![port]
        }
        1 => limits.lost(port).then_some(port).into_iter().collect(),
        2 => {
            let id = limits.meters(port).first().copied().unwrap_or_default();
            limits.note(port, id, now_ms, now_ms).then_some(port).into_iter().collect()
        }
        _ => limits.resume(now_ms),
    });
}

fn refresh(tables: &mut Tables, index: &mut Index, model: &mut Model) {
    let changes = tables.take_changes();
    for edit in index.refresh(tables, &changes) {
        // Nothing is sent to the kernel that it has already.
        if let Edit::Put { id, outputs, .. } = &edit {
            assert_ne!(&model.0[id].1, outputs);
        }
        model.apply(&edit);
    }
}

/// Two networks with the same MACs behind the same peers, so that most frames are taken.
fn start() -> Vec<Step> {
    let ports = [(0, 0, 1), (1, 1, 1), (2, 2, 2), (3, 3, 2), (4, 4, 1), (5, 5, 1), (6, 6, 2)];
    let ports = ports.map(|(number, name, vni)| Step::AddPort(number, name, Vni(vni)));
    let behind =
        [2, 3].map(|number| [1, 2].map(|vni| Step::Endpoint(Vni(vni), number, Some(number))));
    let peers = [Step::Peer(2, 2), Step::Peer(3, 5), Step::Sources(3, vec![3]), Step::Peer(4, 4)];
    let told = Step::Broadcast(Vni(2), Some([2, 4].into()));
    let network = Step::AddNetwork(Vni(2));
    let addresses = vec![IPV4_ADDRESSES[1].into(), IPV6_ADDRESSES[1].into()];
    let lock = Step::Lock(1, PortLock { mac: mac(1).0, addresses });
    [network, lock]
        .into_iter()
        .chain(ports)
        .chain(behind.into_iter().flatten())
        .chain(peers)
        .chain([told])
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// After any change at any time, each flow is the current decision for its frame, and the kernel has
    /// exactly these flows. No flow and no decision lets a frame out of its network. Every frame that a flow matches
    /// has the fate that is decided for it, also if a locked port spoofs it. A failure names the steps and the seed.
    #[test]
    fn no_flow_is_ever_outdated(
        steps in prop::collection::vec(step(), 1..120),
        frames in prop::collection::vec(prop_oneof![frames(), locked_frames()], 24),
    ) {
        let (mut tables, mut books) = (Tables::new(Vni(1)), Books::new(Vni(1)));
        let (mut index, mut model) = (Index::default(), Model::default());
        let frames: Vec<Read> = frames.into_iter().map(Read::of).collect();
        for step in start() {
            take(&step, &mut tables, &mut index, &mut model, 0);
            note(&step, &mut books);
        }
        for (number, step) in steps.iter().enumerate() {
            if !is_possible(step, &tables) {
                continue;
            }
            let now_ms = number as u64 * 20_000;
            take(step, &mut tables, &mut index, &mut model, now_ms);
            note(step, &mut books);
            refresh(&mut tables, &mut index, &mut model);
            if let Step::Frame(frame) = step {
                match decide(&tables, frame).verdict {
                    Verdict::Forward(outputs) | Verdict::Flood(outputs) | Verdict::Keep(outputs) => {
                        books.check(frame, &outputs);
                    }
                    Verdict::Drop(_) | Verdict::Probe(_) => {}
                }
                model.check_spoofed(&tables, frame);
            }
            for (key, outputs) in model.0.values() {
                match key {
                    FlowKey::Pair(frame) | FlowKey::Locked { frame, .. } => {
                        books.check(frame, outputs);
                    }
                    FlowKey::Tunnel { .. } => prop_assert_eq!(outputs, &[]),
                }
            }
            prop_assert_eq!(index.outdated(&tables), 0);
            let outputs = model.0.iter().map(|(id, (_, outputs))| (*id, outputs.clone()));
            prop_assert_eq!(index.expected(), outputs.collect::<HashMap<_, _>>());
            model.check_apart();
            frames.iter().for_each(|frame| model.check(&tables, frame));
        }
    }
}

/// A host with two containers and two peers.
fn small() -> Tables {
    let mut tables = Tables::new(Vni::WEFT);
    for (number, name) in [(0, 0), (1, 1), (4, 4), (5, 5)] {
        tables.add_port(number, &format!("port{name}"), kind(name, Vni::WEFT));
    }
    tables.pin(Vni::WEFT, mac(1), Some("port1"));
    tables.pin(Vni::WEFT, mac(10), Some("port0"));
    for number in [2, 3] {
        tables.set_peer(peer(number), Via::Tunnel { remote: address(number), local: None });
        tables.set_remote(Vni::WEFT, mac(number), Some(peer(number)));
    }
    tables.take_changes();
    tables
}

fn frame(destination: Mac) -> Frame {
    Frame {
        port: 1,
        tunnel: None,
        source: mac(1),
        destination,
        tag: Tag::None,
        payload: Payload::default(),
    }
}

fn put(tables: &Tables, index: &mut Index, frame: Frame, now_ms: u64) -> Option<Edit> {
    index.admit(&frame, &decide(tables, &frame), true, now_ms).unwrap()
}

fn put_id(edit: Option<Edit>) -> FlowId {
    match edit {
        Some(Edit::Put { id, .. }) => id,
        other => panic!("{other:?}"),
    }
}

#[test]
fn moving_a_peer_edits_its_flows_and_the_broadcasts() {
    let (mut tables, mut index) = (small(), Index::default());
    let to_two = put_id(put(&tables, &mut index, frame(mac(2)), 0));
    let to_three = put_id(put(&tables, &mut index, frame(mac(3)), 0));
    let to_host = put_id(put(&tables, &mut index, frame(mac(10)), 0));
    let to_all = put_id(put(&tables, &mut index, frame(Mac([0xff; 6])), 0));
    let edited = |tables: &mut Tables, index: &mut Index| -> BTreeSet<FlowId> {
        let changes = tables.take_changes();
        let id = |edit| match edit {
            Edit::Put { id, .. } | Edit::Delete { id } => id,
        };
        index.refresh(tables, &changes).into_iter().map(id).collect()
    };
    tables.set_peer(peer(3), Via::Tap);
    assert_eq!(edited(&mut tables, &mut index), [to_three, to_all].into());
    tables.set_peer(peer(3), Via::Tap);
    assert_eq!(edited(&mut tables, &mut index), [].into());
    tables.set_remote(Vni::WEFT, mac(2), None);
    assert_eq!(edited(&mut tables, &mut index), [to_two].into());
    tables.add_port(7, "port7", PortKind::Local(Vni::WEFT));
    assert_eq!(edited(&mut tables, &mut index), [to_all].into());
    tables.remove_port(1);
    assert_eq!(edited(&mut tables, &mut index), [to_three, to_host, to_all].into());
    assert!(index.expected().is_empty());
}

#[test]
fn a_flow_is_put_again_when_the_kernel_asks_again() {
    let (tables, mut index) = (small(), Index::default());
    let id = put_id(put(&tables, &mut index, frame(mac(2)), 0));
    // Frames that were on their way up when it was put.
    assert_eq!(put(&tables, &mut index, frame(mac(2)), PUT_AGAIN_AFTER_MS - 1), None);
    let again = put(&tables, &mut index, frame(mac(2)), PUT_AGAIN_AFTER_MS);
    assert!(matches!(again, Some(Edit::Put { id: same, replaces: true, .. }) if same == id));
}

#[test]
fn one_port_cannot_use_up_the_flows() {
    let (tables, mut index) = (small(), Index::default());
    let group = |number: usize| {
        let [_, _, a, b] = u32::try_from(number).unwrap().to_be_bytes();
        Mac([3, 0, 0, 0, a, b])
    };
    for number in 0..FLOWS_PER_PORT_MAX {
        assert!(put(&tables, &mut index, frame(group(number)), 0).is_some());
    }
    let more = frame(mac(2));
    assert_eq!(index.admit(&more, &decide(&tables, &more), true, 0), Err(TooMany));
    let other = Frame { port: 0, source: mac(10), ..more };
    assert!(put(&tables, &mut index, other, 0).is_some());
}

#[test]
fn a_sweep_takes_what_is_idle_or_gone() {
    let (mut tables, mut index) = (small(), Index::default());
    tables.set_peer(peer(3), Via::None);
    let changes = tables.take_changes();
    index.refresh(&tables, &changes);
    let busy = put_id(put(&tables, &mut index, frame(mac(2)), 0));
    let idle = put_id(put(&tables, &mut index, frame(mac(10)), 0));
    let gone = put_id(put(&tables, &mut index, frame(Mac([0xff; 6])), 0));
    let dropping = put_id(put(&tables, &mut index, frame(mac(3)), 0));
    let entry = |id, packets| FlowEntry { id: Some(id), packets, outputs: None };
    index.begin_sweep();
    // A flow added after the listing began is not in it, and stays.
    let young =
        put_id(put(&tables, &mut index, Frame { port: 0, source: mac(10), ..frame(mac(2)) }, 0));
    let stray = FlowId(999);
    let foreign = FlowEntry { id: None, packets: 0, outputs: None };
    let listed =
        [entry(busy, 5), entry(idle, 7), entry(dropping, 3), entry(stray, 1), foreign.clone()];
    let swept = index.sweep(&listed);
    assert_eq!(swept.edits, [Edit::Delete { id: stray }], "a foreign flow stays");
    assert_eq!((swept.idle, swept.vanished), (0, 1));
    assert_eq!((swept.dropped, swept.kept), (vec![(OdpDrop::NoPath, 3)], 0));
    assert!(!index.expected().contains_key(&gone));
    index.begin_sweep();
    let swept = index.sweep(&[
        entry(busy, 6),
        entry(idle, 7),
        entry(dropping, 5),
        entry(young, 0),
        foreign,
    ]);
    assert_eq!(swept.edits, [Edit::Delete { id: idle }]);
    assert_eq!((swept.idle, swept.vanished), (1, 0));
    assert_eq!(swept.dropped, [(OdpDrop::NoPath, 2)]);
    let left: BTreeSet<FlowId> = index.expected().into_keys().collect();
    assert_eq!(left, [busy, dropping, young].into());
}

#[test]
fn reports_that_stay_here_are_counted() {
    let (tables, mut index) = (small(), Index::default());
    let report = Frame { port: 0, source: mac(10), ..frame(Mac([0x33, 0x33, 0, 0, 0, 0x16])) };
    let id = put_id(put(&tables, &mut index, report, 0));
    assert_eq!(index.expected()[&id], [Output::Port(1)]);
    for (packets, kept) in [(4, 4), (9, 5)] {
        index.begin_sweep();
        let swept = index.sweep(&[FlowEntry { id: Some(id), packets, outputs: None }]);
        assert_eq!((swept.kept, swept.dropped), (kept, vec![]));
    }
}
