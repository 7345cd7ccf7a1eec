//! Several networks on one switch, with the same MACs on the same hosts: no frame leaves its network.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
};

use weft_crypto::PeerId;
use weft_path::{Mac, Vni};

use crate::switch::odp::{
    decide::{Decision, Verdict, decide},
    drops::OdpDrop,
    flow::{FlowKey, Frame, Output, Payload, Tag, TunnelKey},
    index::{Edit, Index},
    tables::{Change, MOVE_HOLD_MS, Place, PortKind, Tables, Via, is_group},
};

/// Who has what, by the test's own account and not by the tables.
pub(super) struct Books {
    ports: BTreeMap<u32, (String, PortKind)>,
    receivers: BTreeMap<Vni, Option<BTreeSet<PeerId>>>,
    vias: BTreeMap<PeerId, Via>,
}

impl Books {
    pub(super) fn new(first: Vni) -> Self {
        let receivers = [(first, None)].into();
        Self { ports: BTreeMap::new(), receivers, vias: BTreeMap::new() }
    }

    pub(super) fn add_network(&mut self, vni: Vni) {
        self.receivers.entry(vni).or_insert_with(|| Some(BTreeSet::new()));
    }

    pub(super) fn remove_network(&mut self, vni: Vni) {
        self.receivers.remove(&vni);
        self.ports.retain(|_, (_, kind)| kind.network() != Some(vni));
    }

    pub(super) fn broadcast(&mut self, vni: Vni, receivers: Option<BTreeSet<PeerId>>) {
        self.receivers.insert(vni, receivers);
    }

    pub(super) fn peer(&mut self, id: PeerId, via: Via) {
        self.vias.insert(id, via);
    }

    pub(super) fn add_port(&mut self, number: u32, name: &str, kind: PortKind) {
        self.ports.retain(|_, (other, _)| other != name);
        self.ports.insert(number, (name.to_owned(), kind));
    }

    pub(super) fn remove_port(&mut self, number: u32) {
        self.ports.remove(&number);
    }

    fn kind(&self, port: u32) -> Option<PortKind> {
        self.ports.get(&port).map(|(_, kind)| *kind)
    }

    /// The network of a frame by where it came from.
    fn network(&self, frame: &Frame) -> Option<Vni> {
        let vni = match self.kind(frame.port)? {
            PortKind::Local(vni) | PortKind::Tap(vni) => vni,
            PortKind::Tunnel => Vni(u32::try_from(frame.tunnel?.id).unwrap()),
            PortKind::Unclaimed => return None,
        };
        Some(vni).filter(|vni| self.receivers.contains_key(vni))
    }

    /// Panics if a copy of the frame leaves its network, or goes into it without reason.
    pub(super) fn check(&self, frame: &Frame, outputs: &[Output]) {
        for output in outputs {
            let Some(vni) = self.network(frame) else {
                panic!("{frame:?} is on no network and goes to {output:?}")
            };
            match output {
                Output::Meter(_) => {}
                Output::Port(port) => {
                    let to = self.kind(*port).and_then(PortKind::network);
                    assert_eq!(to, Some(vni), "{frame:?} goes to {output:?}");
                }
                Output::Tunnel { port, id, remote, .. } => {
                    assert_eq!(self.kind(*port), Some(PortKind::Tunnel));
                    assert_eq!(*id, u64::from(vni.0), "{frame:?} goes to {output:?}");
                    let told = self.receivers[&vni].as_ref();
                    let is_there = self.vias.iter().any(|(id, via)| {
                        let listed = told.is_none_or(|told| told.contains(id));
                        matches!(via, Via::Tunnel { remote: of, .. } if of == remote)
                            && (listed || !is_group(frame.destination))
                    });
                    assert!(is_there, "{frame:?} goes to {output:?}");
                }
            }
        }
    }
}

const SHOP: Vni = Vni(5);
const NETWORKS: [Vni; 2] = [Vni::WEFT, SHOP];
const HOSTS: u8 = 3;
const TUNNEL: u32 = 99;
const BROADCAST: Mac = Mac([0xff; 6]);
const MULTICAST: Mac = Mac([1, 0, 0x5e, 0, 9, 1]);
const NOBODY: Mac = Mac([2, 9, 9, 9, 9, 9]);

/// Two containers' ports in each network; the first network has the host's own too.
fn local(vni: Vni) -> &'static [u32] {
    if vni == SHOP { &[11, 12] } else { &[0, 1, 2] }
}

fn tap(vni: Vni) -> u32 {
    if vni == SHOP { 20 } else { 10 }
}

fn peer(host: u8) -> PeerId {
    PeerId::from_bytes([host; 32])
}

fn address(host: u8) -> IpAddr {
    [192, 0, 2, host].into()
}

fn via(host: u8) -> Via {
    Via::Tunnel { remote: address(host), local: None }
}

/// The MAC at a port: the same for the same place in either network.
fn mac(host: u8, port: u32) -> Mac {
    Mac([2, 0, 0, 0, host, u8::try_from(port % 10).unwrap()])
}

fn frame(port: u32, source: Mac, destination: Mac) -> Frame {
    Frame { port, tunnel: None, source, destination, tag: Tag::None, payload: Payload::default() }
}

fn from_tunnel(remote: u8, id: u64, source: Mac, destination: Mac) -> Frame {
    let tunnel = TunnelKey { id, remote: address(remote), local: address(9) };
    Frame { tunnel: Some(tunnel), ..frame(TUNNEL, source, destination) }
}

fn all() -> Option<BTreeSet<PeerId>> {
    Some((1..=HOSTS).map(peer).collect())
}

/// Carries the network at this host: its ports, its containers, and those of the other hosts.
fn carry(tables: &mut Tables, host: u8, vni: Vni) {
    tables.add_network(vni);
    for port in local(vni) {
        tables.add_port(*port, &format!("port{port}"), PortKind::Local(vni));
        // One of them is known by its frames alone.
        if port % 10 == 2 {
            assert!(tables.learn(mac(host, *port), *port, 0));
        } else {
            tables.pin(vni, mac(host, *port), Some(&format!("port{port}")));
        }
    }
    tables.add_port(tap(vni), &format!("tap{vni}"), PortKind::Tap(vni));
    for other in (1..=HOSTS).filter(|other| *other != host) {
        for port in local(vni) {
            tables.set_remote(vni, mac(other, *port), Some(peer(other)));
        }
    }
}

/// A host on both networks that reaches each other host by `vias`.
fn tables(host: u8, vias: &BTreeMap<u8, Via>) -> Tables {
    let mut tables = Tables::new(Vni::WEFT);
    tables.add_port(TUNNEL, "tunnel", PortKind::Tunnel);
    for (other, via) in vias {
        tables.set_sources(peer(*other), &[address(*other)]);
        tables.set_peer(peer(*other), *via);
    }
    for vni in NETWORKS {
        carry(&mut tables, host, vni);
        tables.set_receivers(vni, all());
    }
    tables.take_changes();
    tables
}

fn one() -> Tables {
    tables(1, &[(2, via(2)), (3, Via::Tap)].into())
}

fn outputs(tables: &Tables, frame: Frame) -> Vec<Output> {
    match decide(tables, &frame).verdict {
        Verdict::Forward(outputs) | Verdict::Flood(outputs) => outputs,
        Verdict::Drop(_) => Vec::new(),
        Verdict::Keep(_) | Verdict::Probe(_) => panic!("neither report nor probe"),
    }
}

fn dropped(tables: &Tables, frame: Frame) -> Option<OdpDrop> {
    match decide(tables, &frame).verdict {
        Verdict::Drop(reason) => Some(reason),
        _ => None,
    }
}

fn into_tunnel(vni: Vni, host: u8) -> Output {
    Output::Tunnel { port: TUNNEL, id: u64::from(vni.0), remote: address(host), local: None }
}

/// Sends a frame through all hosts and returns how many copies each local port gets. The vector engine takes a
/// frame of a network's TAP to that network's TAPs of the peers that it serves.
fn send(
    hosts: &BTreeMap<u8, Tables>,
    vias: &BTreeMap<u8, BTreeMap<u8, Via>>,
    (host, port): (u8, u32),
    destination: Mac,
) -> BTreeMap<(u8, u32), u32> {
    let source = mac(host, port);
    let mut delivered = BTreeMap::new();
    let mut waiting = VecDeque::from([(host, frame(port, source, destination))]);
    while let Some((at, frame)) = waiting.pop_front() {
        for output in outputs(&hosts[&at], frame) {
            match output {
                Output::Port(port) if NETWORKS.map(tap).contains(&port) => {
                    let served = vias[&at].iter().filter(|(_, via)| **via == Via::Tap);
                    for (to, _) in served {
                        if destination.0[4] == *to || destination.0[4] > HOSTS {
                            waiting.push_back((*to, self::frame(port, source, destination)));
                        }
                    }
                }
                Output::Meter(_) => {}
                Output::Port(port) => *delivered.entry((at, port)).or_default() += 1,
                Output::Tunnel { id, remote, .. } => {
                    let to = (1..=HOSTS).find(|host| address(*host) == remote).unwrap();
                    waiting.push_back((to, from_tunnel(at, id, source, destination)));
                }
            }
        }
    }
    delivered
}

/// Sends every possible frame of a container on either network, with every way between the hosts. It reaches the
/// ports of its network as if the other were not there.
#[test]
fn every_frame_stays_in_its_network() {
    let pairs: Vec<(u8, u8)> = (1..=HOSTS)
        .flat_map(|host| (1..=HOSTS).map(move |other| (host, other)))
        .filter(|(host, other)| host != other)
        .collect();
    for number in 0..3_u32.pow(6) {
        let mut vias: BTreeMap<u8, BTreeMap<u8, Via>> = BTreeMap::new();
        for (digit, (host, other)) in (0..).zip(&pairs) {
            let via = [Via::None, Via::Tap, via(*other)][(number / 3_u32.pow(digit) % 3) as usize];
            vias.entry(*host).or_default().insert(*other, via);
        }
        let hosts = vias.iter().map(|(host, vias)| (*host, tables(*host, vias))).collect();
        let reaches = |from: u8, to: u8| from == to || vias[&from][&to] != Via::None;
        for (vni, host) in NETWORKS.iter().flat_map(|vni| (1..=HOSTS).map(|host| (*vni, host))) {
            for port in local(vni) {
                let from = (host, *port);
                let others = |to: u8| local(vni).iter().map(move |port| (to, *port));
                let others = (1..=HOSTS).flat_map(others).filter(|at| *at != from);
                let there: BTreeMap<(u8, u32), u32> =
                    others.filter(|(to, _)| reaches(host, *to)).map(|at| (at, 1)).collect();
                for destination in [BROADCAST, MULTICAST, NOBODY] {
                    let reached = send(&hosts, &vias, from, destination);
                    assert_eq!(reached, there, "{vni} {from:?} {destination} in world {number}");
                }
                for (at, count) in &there {
                    let reached = send(&hosts, &vias, from, mac(at.0, at.1));
                    assert_eq!(reached, [(*at, *count)].into(), "{vni} {from:?} to {at:?}");
                }
            }
        }
    }
}

#[test]
fn a_tunnel_packet_belongs_to_the_network_that_it_names() {
    let mut tables = one();
    for vni in NETWORKS {
        let id = u64::from(vni.0);
        for (destination, wanted) in [
            (mac(1, 1), vec![Output::Port(local(vni)[usize::from(vni == Vni::WEFT)])]),
            (BROADCAST, local(vni).iter().copied().map(Output::Port).collect()),
            (NOBODY, local(vni).iter().copied().map(Output::Port).collect()),
        ] {
            assert_eq!(outputs(&tables, from_tunnel(2, id, mac(2, 1), destination)), wanted);
        }
    }
    // Endpoints of a peer on one network count on that network alone.
    let new = Mac([2, 0, 0, 0, 2, 7]);
    tables.set_remote(Vni::WEFT, new, Some(peer(2)));
    let announced = |vni: Vni| from_tunnel(2, vni.0.into(), new, mac(1, 1));
    assert_eq!(dropped(&tables, announced(Vni::WEFT)), None);
    assert_eq!(dropped(&tables, announced(SHOP)), Some(OdpDrop::UnannouncedSource));
}

#[test]
fn packets_of_unknown_networks_are_dropped_until_there_is_one() {
    let (mut tables, mut index) = (one(), Index::default());
    let frame = from_tunnel(2, 7, mac(2, 1), mac(1, 1));
    let decision = decide(&tables, &frame);
    assert_eq!(decision.verdict, Verdict::Drop(OdpDrop::UnknownNetwork));
    let tunnel = frame.tunnel.unwrap();
    let key = FlowKey::Tunnel { port: TUNNEL, tunnel };
    assert_eq!(decision.flow, Some(key), "one flow for the whole network");
    index.admit(&frame, &decision, false, 0).unwrap();
    tables.add_network(Vni(7));
    let edits = index.refresh(&tables, &tables.clone().take_changes());
    assert!(matches!(edits[..], [Edit::Delete { .. }]), "{edits:?}");
    assert_eq!(dropped(&tables, frame), Some(OdpDrop::UnannouncedSource));
    // More than 24 or 32 bits are no network's.
    for id in [0, 1 << 24, (1 << 32) + 1, u64::MAX] {
        let frame = from_tunnel(2, id, mac(2, 1), mac(1, 1));
        assert_eq!(dropped(&tables, frame), Some(OdpDrop::UnknownNetwork), "{id}");
    }
    // Strangers hear of no network.
    let stranger = from_tunnel(77, 8, mac(2, 1), mac(1, 1));
    assert_eq!(dropped(&tables, stranger), Some(OdpDrop::UnknownSource));
}

#[test]
fn only_listed_peers_get_group_frames() {
    let vias = (2..=4).map(|host| (host, via(host))).collect();
    let mut tables = tables(1, &vias);
    let tunnels = |tables: &Tables, vni: Vni, destination: Mac| -> Vec<Output> {
        let source = local(vni)[0];
        let sent = outputs(tables, frame(source, mac(1, source), destination));
        sent.into_iter().filter(|output| matches!(output, Output::Tunnel { .. })).collect()
    };
    for destination in [BROADCAST, MULTICAST, NOBODY] {
        tables.set_receivers(SHOP, Some([peer(3), peer(77)].into()));
        tables.set_receivers(Vni::WEFT, Some([peer(2)].into()));
        assert_eq!(tunnels(&tables, SHOP, destination), [into_tunnel(SHOP, 3)]);
        assert_eq!(tunnels(&tables, Vni::WEFT, destination), [into_tunnel(Vni::WEFT, 2)]);
        tables.set_receivers(SHOP, None);
        assert_eq!(tunnels(&tables, SHOP, destination), [2, 3, 4].map(|to| into_tunnel(SHOP, to)));
        tables.set_receivers(SHOP, Some([].into()));
        assert_eq!(tunnels(&tables, SHOP, destination), []);
    }
    // A frame for one host needs no list.
    assert_eq!(tunnels(&tables, SHOP, mac(3, 11)), [into_tunnel(SHOP, 3)]);
    // The vector engine has its own list, so its peers are behind the TAP in any case.
    tables.set_peer(peer(4), Via::Tap);
    let source = local(SHOP)[0];
    let sent = outputs(&tables, frame(source, mac(1, source), BROADCAST));
    assert_eq!(sent, [Output::Port(local(SHOP)[1]), Output::Port(tap(SHOP))]);
}

#[test]
fn the_first_network_starts_with_all_peers_and_another_with_none() {
    let mut tables = Tables::new(Vni::WEFT);
    tables.add_network(SHOP);
    tables.set_peer(peer(2), via(2));
    let heard = |tables: &Tables, vni| tables.vias(vni).count();
    assert_eq!(NETWORKS.map(|vni| heard(&tables, vni)), [1, 0]);
    tables.set_receivers(SHOP, all());
    // A list outlives the peers on it.
    tables.remove_peer(peer(2));
    assert_eq!(heard(&tables, SHOP), 0);
    tables.set_peer(peer(2), via(2));
    assert_eq!(heard(&tables, SHOP), 1);
    assert_eq!(heard(&tables, Vni(7)), 0, "no such network");
}

#[test]
fn a_mac_that_moves_in_one_network_stays_in_the_other() {
    let mut tables = one();
    let places = |tables: &Tables, mac| NETWORKS.map(|vni| tables.place(vni, mac));
    // Learned in both at once, then moved in one.
    assert!(tables.learn(NOBODY, 1, 0) && tables.learn(NOBODY, 11, 0));
    assert_eq!(places(&tables, NOBODY), [Place::Learned(1), Place::Learned(11)]);
    assert!(tables.learn(NOBODY, 12, MOVE_HOLD_MS));
    assert_eq!(places(&tables, NOBODY), [Place::Learned(1), Place::Learned(12)]);
    tables.set_remote(Vni::WEFT, NOBODY, Some(peer(2)));
    assert_eq!(places(&tables, NOBODY), [Place::Remote(peer(2)), Place::Learned(12)]);
    let to = |port: u32, vni: Vni| {
        outputs(&tables, frame(port, mac(1, port), NOBODY))
            == [if vni == SHOP { Output::Port(12) } else { into_tunnel(vni, 2) }]
    };
    assert!(to(1, Vni::WEFT) && to(11, SHOP));
    tables.pin(Vni::WEFT, NOBODY, Some("port2"));
    assert_eq!(places(&tables, NOBODY), [Place::Pinned(Some(2)), Place::Learned(12)]);
    tables.age(u64::MAX, |vni, mac| (vni, mac) == (Vni::WEFT, NOBODY));
    assert_eq!(places(&tables, NOBODY), [Place::Pinned(Some(2)), Place::Unknown]);
    // What other hosts have on one network, a container on another may use.
    tables.set_remote(SHOP, mac(2, 1), None);
    assert!(!tables.learn(mac(2, 1), 2, MOVE_HOLD_MS) && tables.learn(mac(2, 1), 12, MOVE_HOLD_MS));
}

/// A port that is on another network, by mistake or since it moved, is none.
#[test]
fn a_mac_cannot_be_fixed_to_a_port_of_another_network() {
    let mut tables = one();
    tables.pin(SHOP, NOBODY, Some("port1"));
    assert_eq!(tables.place(SHOP, NOBODY), Place::Pinned(None));
    assert_eq!(dropped(&tables, frame(11, mac(1, 11), NOBODY)), Some(OdpDrop::NoPath));
    assert!(!tables.learn(NOBODY, 12, 0), "it is fixed");
    tables.take_changes();
    tables.add_port(1, "port1", PortKind::Local(SHOP));
    assert!(tables.take_changes().contains(&Change::Mac(SHOP, NOBODY)));
    assert_eq!(outputs(&tables, frame(11, mac(1, 11), NOBODY)), [Output::Port(1)]);
    assert_eq!(tables.place(Vni::WEFT, mac(1, 1)), Place::Pinned(None));
}

/// The frames between the containers of a host, and from and to its peers, by network.
fn traffic(vni: Vni) -> Vec<Frame> {
    let known = (1..=HOSTS).flat_map(|host| local(vni).iter().map(move |port| mac(host, *port)));
    let known: Vec<Mac> = known.chain([BROADCAST, MULTICAST]).collect();
    let from_here = local(vni).iter().map(|port| frame(*port, mac(1, *port), BROADCAST));
    let from_tap = frame(tap(vni), mac(3, 1), BROADCAST);
    let from_two = from_tunnel(2, vni.0.into(), mac(2, 1), BROADCAST);
    let from = from_here.chain([from_tap, from_two]);
    from.flat_map(|frame| known.iter().map(move |to| Frame { destination: *to, ..frame })).collect()
}

fn admit(tables: &Tables, index: &mut Index, frame: &Frame) -> Decision {
    let decision = decide(tables, frame);
    index.admit(frame, &decision, false, 0).unwrap();
    decision
}

#[test]
fn a_removed_network_leaves_nothing_and_touches_nothing() {
    let (mut tables, mut index) = (one(), Index::default());
    let weft = traffic(Vni::WEFT);
    let before = weft.iter().map(|frame| admit(&tables, &mut index, frame));
    let before: Vec<Decision> = before.collect();
    let kept = index.expected();
    traffic(SHOP).iter().for_each(|frame| _ = admit(&tables, &mut index, frame));
    let both = index.expected().len();
    assert!(both > kept.len() + 20, "{both}");
    tables.remove_network(SHOP);
    let changes = tables.take_changes();
    let edits = index.refresh(&tables, &changes);
    assert_eq!(edits.len(), both - kept.len());
    assert!(edits.iter().all(|edit| matches!(edit, Edit::Delete { .. })));
    assert_eq!(index.expected(), kept);
    let after: Vec<Decision> = weft.iter().map(|frame| decide(&tables, frame)).collect();
    assert_eq!(after, before);
    for frame in traffic(SHOP) {
        assert!(dropped(&tables, frame).is_some(), "{frame:?}");
    }
    assert_eq!(tables.learned_len(), 1, "the one of the first network");
    // It comes back empty.
    tables.add_network(SHOP);
    for frame in traffic(SHOP) {
        assert!(dropped(&tables, frame).is_some(), "{frame:?}");
        assert_eq!(tables.place(SHOP, frame.source), Place::Unknown);
    }
    assert_eq!((tables.tap(SHOP), tables.ports_of(SHOP)), (None, vec![]));
    assert_eq!(tables.vias(SHOP).filter(|via| *via != Via::Tap).count(), 0);
}

#[test]
fn a_change_in_one_network_concerns_no_flow_of_another() {
    let (mut tables, mut index) = (one(), Index::default());
    for vni in NETWORKS {
        traffic(vni).iter().for_each(|frame| _ = admit(&tables, &mut index, frame));
    }
    let of_first: BTreeSet<_> = {
        let mut alone = Index::default();
        traffic(Vni::WEFT).iter().for_each(|frame| _ = admit(&tables, &mut alone, frame));
        alone.expected().into_keys().collect()
    };
    // The same frames came first, so they have the same names.
    let changes: [fn(&mut Tables); 6] = [
        |tables| tables.set_remote(SHOP, mac(2, 1), Some(peer(3))),
        |tables| tables.add_port(13, "port13", PortKind::Local(SHOP)),
        |tables| tables.remove_port(tap(SHOP)),
        |tables| tables.set_receivers(SHOP, Some([].into())),
        |tables| tables.pin(SHOP, mac(2, 2), Some("port13")),
        |tables| tables.remove_port(11),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        change(&mut tables);
        let changes = tables.take_changes();
        let edits = index.refresh(&tables, &changes);
        assert!(!edits.is_empty(), "change {number}");
        for edit in edits {
            let (Edit::Put { id, .. } | Edit::Delete { id }) = edit;
            assert!(!of_first.contains(&id), "change {number}");
        }
    }
}

#[test]
fn nothing_passes_a_port_that_nobody_has_claimed() {
    let mut tables = one();
    tables.add_port(30, "left", PortKind::Unclaimed);
    let from = frame(30, NOBODY, mac(1, 1));
    assert!(!tables.learn(NOBODY, 30, 0));
    let decision = decide(&tables, &from);
    assert_eq!(decision.verdict, Verdict::Drop(OdpDrop::UnknownPort));
    assert_eq!(decision.flow, None);
    for vni in NETWORKS {
        let sent = outputs(&tables, frame(local(vni)[0], mac(1, local(vni)[0]), BROADCAST));
        assert!(!sent.contains(&Output::Port(30)));
    }
    tables.pin(SHOP, NOBODY, Some("left"));
    assert_eq!(tables.place(SHOP, NOBODY), Place::Pinned(None));
    tables.add_port(30, "left", PortKind::Local(SHOP));
    assert_eq!(outputs(&tables, Frame { destination: mac(1, 11), ..from }), [Output::Port(11)]);
    assert!(outputs(&tables, from_tunnel(2, 5, mac(2, 1), BROADCAST)).contains(&Output::Port(30)));
}
