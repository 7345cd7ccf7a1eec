//! What the kernel engine knows of peers, paths and SAs, and what follows from a command: a list of
//! actions on the kernel. Pure, so that its order can be tested without one.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use weft_crypto::PeerId;
use weft_packet::vxlan;
use weft_path::{Encapsulation, EngineCommand, EngineEvent, InboundSa, OutboundSa, PathId};

use super::probe_mac;
use crate::overlay::Via;
use crate::xfrm::{
    Direction, LaneGroup, Limits, PolicyId, PolicySpec, StateId, StateSpec, Template, UdpPorts,
};

/// What is to be done in the kernel, in order.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    /// Install an SA of a path.
    AddState(PathId, StateSpec),
    /// Remove an SA at once.
    RemoveState(StateId),
    /// Remove an SA once no packet can be on its way through it any more.
    RetireState(StateId),
    /// Install or replace a policy.
    SetPolicy(PolicySpec),
    /// Remove a policy.
    RemovePolicy(PolicyId),
    /// The guard lets plain packets to and from this peer pass.
    Trust(IpAddr),
    /// It does no longer.
    Distrust(IpAddr),
    /// Where frames for a peer go.
    SetVia(PeerId, Via),
    /// A peer's tunnel packets come from this address.
    AcceptFrom(PeerId, IpAddr),
    /// Send a probe of a path.
    Probe(Probe),
    /// Send a NAT keepalive.
    Keepalive(SocketAddr),
    /// Tell path choice.
    Tell(EngineEvent),
}

/// Which way an SA carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the peer.
    In,
    /// To the peer.
    Out,
}

/// A probe to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Probe {
    pub(super) path: PathId,
    pub(super) remote: IpAddr,
    /// Inner UDP port: the one whose policy names the path's SA.
    pub(super) port: u16,
    pub(super) number: u64,
    /// Length of the inner IP packet in bytes.
    pub(super) mtu: u16,
}

/// Everything that the kernel holds for path choice.
pub(super) struct State {
    /// Where the kernel takes ESP in UDP.
    encapsulation_port: u16,
    /// Whether the kernel chooses among a path's lanes by CPU; else each path has one.
    per_cpu: bool,
    /// The group of lanes that was given out last.
    group: u16,
    peers: BTreeMap<PeerId, Peer>,
    paths: BTreeMap<PathId, Path>,
    inbound: BTreeMap<u32, Inbound>,
}

#[derive(Default)]
struct Peer {
    bound: Option<PathId>,
    /// What the kernel's policies for data and for probes of candidates are.
    data: Option<PolicySpec>,
    candidate: Option<PolicySpec>,
    /// The path that the candidate's policy leads to.
    probed: Option<PathId>,
}

struct Path {
    peer: PeerId,
    /// By lane.
    outbound: BTreeMap<u16, Outbound>,
    plain: Option<IpAddr>,
    /// The inner MTU that probes have proven, in bytes.
    mtu: Option<u16>,
}

#[derive(Clone, Copy)]
struct Outbound {
    id: StateId,
    /// That of all lanes that came with this one.
    group: Option<LaneGroup>,
    source: IpAddr,
    remote: SocketAddr,
    encapsulation: Encapsulation,
}

struct Inbound {
    path: PathId,
    id: StateId,
}

impl State {
    pub(super) fn new(encapsulation_port: u16) -> Self {
        Self {
            encapsulation_port,
            per_cpu: false,
            group: 0,
            peers: BTreeMap::new(),
            paths: BTreeMap::new(),
            inbound: BTreeMap::new(),
        }
    }

    /// Whether SAs installed from now on may be one for each CPU (RFC 9611).
    pub(super) fn set_per_cpu(&mut self, per_cpu: bool) {
        self.per_cpu = per_cpu;
    }

    /// What a command asks of the kernel. `local` tells from which address this host reaches a peer.
    pub(super) fn apply(
        &mut self,
        command: EngineCommand,
        local: impl Fn(IpAddr) -> Option<IpAddr>,
    ) -> Vec<Action> {
        let mut actions = Vec::new();
        match command {
            EngineCommand::InstallInbound { peer, path, sa, remote, .. } => match local(remote) {
                Some(local) => self.install_inbound(peer, path, &sa, (remote, local), &mut actions),
                None => actions.push(unreachable(path, remote)),
            },
            EngineCommand::RemoveInbound { spi } => {
                let removed = self.inbound.remove(&spi);
                actions.extend(removed.map(|inbound| Action::RemoveState(inbound.id)));
            }
            EngineCommand::InstallOutbound { peer, path, sa, remote, .. } => {
                match local(remote.ip()) {
                    Some(local) => {
                        self.install_outbound(peer, path, &sa, (local, remote), &mut actions);
                    }
                    None => actions.push(unreachable(path, remote.ip())),
                }
            }
            EngineCommand::InstallPlain { peer, path, remote } => {
                self.path(peer, path).plain = Some(remote);
                actions.push(Action::Trust(remote));
                actions.push(Action::AcceptFrom(peer, remote));
                self.refresh(peer, &mut actions);
            }
            EngineCommand::RemoveOutbound { path } => self.remove_outbound(path, &mut actions),
            EngineCommand::BindPath { peer, path } => self.bind(peer, path, &mut actions),
            EngineCommand::SendProbe { path, probe, mtu, candidate } => {
                self.probe(path, (probe, mtu, candidate), &mut actions);
            }
            EngineCommand::SendKeepalive { path } => {
                let outbound = self.paths.get(&path).and_then(Path::main);
                let encapsulated =
                    outbound.filter(|outbound| outbound.encapsulation == Encapsulation::Udp);
                actions.extend(encapsulated.map(|outbound| Action::Keepalive(outbound.remote)));
            }
            EngineCommand::RemovePeer { peer } => self.remove_peer(peer, &mut actions),
            EngineCommand::SetPathMtu { path, mtu } => {
                if let Some(it) = self.paths.get_mut(&path) {
                    it.mtu = Some(mtu);
                }
            }
            // A kernel's SA is not moved; endpoints and broadcast are the switch's.
            EngineCommand::SetRemote { .. }
            | EngineCommand::SetEndpoints { .. }
            | EngineCommand::SetBroadcast { .. } => {}
        }
        actions
    }

    /// A probe came in: which peer sent it, by the Ethernet address that it comes from, and on
    /// which path. The kernel does not tell the SA, so any of the peer's paths stands for it.
    pub(super) fn probed_by(&self, mac: [u8; 6]) -> Option<(PeerId, PathId)> {
        let mut paths = self.inbound.values().map(|inbound| inbound.path);
        let of = |path: PathId| self.paths.get(&path).map(|it| (it.peer, path));
        let ours = paths.find_map(|path| of(path).filter(|(peer, _)| probe_mac(peer) == mac));
        let mut all = self.paths.iter().map(|(path, it)| (it.peer, *path));
        ours.or_else(|| all.find(|(peer, _)| probe_mac(peer) == mac))
    }

    /// The path of an inbound or outbound SA; the flag says outbound.
    pub(super) fn path_of(&self, spi: u32) -> Option<(PathId, bool)> {
        if let Some(inbound) = self.inbound.get(&spi) {
            return Some((inbound.path, false));
        }
        let has = |path: &Path| path.outbound.values().any(|outbound| outbound.id.spi == spi);
        self.paths.iter().find(|(_, path)| has(path)).map(|(path, _)| (*path, true))
    }

    /// A path that sends to this address.
    pub(super) fn path_to(&self, remote: IpAddr) -> Option<PathId> {
        let sends =
            |path: &Path| path.main().is_some_and(|outbound| outbound.remote.ip() == remote);
        self.paths.iter().find(|(_, path)| sends(path)).map(|(path, _)| *path)
    }

    /// Packets of an inbound SA come from `remote`; the path to tell if that is news.
    pub(super) fn moved(&self, spi: u32, remote: SocketAddr) -> Option<PathId> {
        let path = self.inbound.get(&spi)?.path;
        let outbound = self.paths.get(&path).and_then(Path::main)?;
        (outbound.remote != remote).then_some(path)
    }

    /// Peers whose frames take a path that carries less than `mtu` bytes, and how much it carries.
    pub(super) fn narrow(&self, mtu: u16) -> BTreeMap<PeerId, u16> {
        let bound = self.peers.iter().filter_map(|(peer, it)| Some((*peer, it.bound?)));
        bound
            .filter_map(|(peer, path)| Some((peer, self.paths.get(&path)?.mtu?)))
            .filter(|(_, carried)| *carried < mtu)
            .collect()
    }

    /// Every policy that must be in the kernel.
    pub(super) fn policies(&self) -> impl Iterator<Item = &PolicySpec> {
        self.peers.values().flat_map(|peer| peer.data.iter().chain(&peer.candidate))
    }

    /// Every SA that must be in the kernel, with its path.
    pub(super) fn states(&self) -> impl Iterator<Item = (StateId, PathId)> {
        let inbound = self.inbound.values().map(|inbound| (inbound.id, inbound.path));
        let outbound = self
            .paths
            .iter()
            .flat_map(|(path, it)| it.outbound.values().map(move |outbound| (outbound.id, *path)));
        inbound.chain(outbound)
    }

    /// Every SA with its peer and its way.
    pub(super) fn sas(&self) -> impl Iterator<Item = (StateId, (PeerId, Way))> {
        let inbound = self.inbound.values().filter_map(|inbound| {
            Some((inbound.id, (self.paths.get(&inbound.path)?.peer, Way::In)))
        });
        let outbound = self.paths.values().flat_map(|path| {
            path.outbound.values().map(|outbound| (outbound.id, (path.peer, Way::Out)))
        });
        inbound.chain(outbound)
    }

    /// Whether there is anything of a peer.
    pub(super) fn knows(&self, peer: &PeerId) -> bool {
        self.peers.contains_key(peer) || self.paths.values().any(|path| path.peer == *peer)
    }

    /// All SAs are gone: nothing of them is to be removed again.
    pub(super) fn states_lost(&mut self) {
        self.inbound.clear();
        for path in self.paths.values_mut() {
            path.outbound.clear();
        }
    }
}

impl State {
    fn install_inbound(
        &mut self,
        peer: PeerId,
        path: PathId,
        sa: &InboundSa,
        (remote, local): (IpAddr, IpAddr),
        actions: &mut Vec<Action>,
    ) {
        let known = self.path(peer, path).main();
        let port = known.map_or(self.encapsulation_port, |outbound| outbound.remote.port());
        let ports = UdpPorts { source: port, destination: self.encapsulation_port };
        let id = StateId { destination: local, spi: sa.spi };
        actions.push(Action::AddState(
            path,
            StateSpec {
                direction: Direction::In,
                source: remote,
                destination: local,
                spi: sa.spi,
                cipher: sa.cipher,
                key: sa.key.clone(),
                encapsulation: (sa.encapsulation == Encapsulation::Udp).then_some(ports),
                limits: Limits::NONE,
                lifetime: sa.lifetime,
                group: None,
                cpu: None,
            },
        ));
        self.inbound.insert(sa.spi, Inbound { path, id });
        actions.push(Action::AcceptFrom(peer, remote));
    }

    fn install_outbound(
        &mut self,
        peer: PeerId,
        path: PathId,
        sa: &OutboundSa,
        (local, remote): (IpAddr, SocketAddr),
        actions: &mut Vec<Action>,
    ) {
        let ports = UdpPorts { source: self.encapsulation_port, destination: remote.port() };
        let id = StateId { destination: remote.ip(), spi: sa.spi };
        let group = self.group_of(path, sa.lane, remote.ip());
        actions.push(Action::AddState(
            path,
            StateSpec {
                direction: Direction::Out,
                source: local,
                destination: remote.ip(),
                spi: sa.spi,
                cipher: sa.cipher,
                key: sa.key.clone(),
                encapsulation: (sa.encapsulation == Encapsulation::Udp).then_some(ports),
                limits: Limits {
                    packets_soft: sa.packets_soft,
                    packets_hard: sa.packets_hard,
                    bytes_soft: sa.bytes_soft,
                    bytes_hard: sa.bytes_hard,
                },
                lifetime: sa.lifetime,
                group,
                // Lane 0 takes what comes from a CPU without a lane of its own.
                cpu: group.and_then(|_| u32::from(sa.lane).checked_sub(1)),
            },
        ));
        let encapsulation = sa.encapsulation;
        let outbound = Outbound { id, group, source: local, remote, encapsulation };
        let older = self.path(peer, path).outbound.insert(sa.lane, outbound);
        // The policy leads to the new SA before the old one goes.
        self.refresh(peer, actions);
        if let Some(older) = older
            && older.remote.ip() != remote.ip()
            && self.bound(peer) == Some(path)
        {
            actions.push(Action::SetVia(peer, Via::Vxlan { remote: remote.ip() }));
        }
        actions.extend(older.map(|older| Action::RetireState(older.id)));
    }

    /// The lanes of an offer come together, lane 0 first: it begins a group that no other lanes to
    /// this host are in.
    fn group_of(&mut self, path: PathId, lane: u16, remote: IpAddr) -> Option<LaneGroup> {
        if !self.per_cpu {
            return None;
        }
        if lane > 0 {
            return self.paths.get(&path)?.main()?.group;
        }
        let there = self.paths.values().filter_map(Path::main);
        let there = there.filter(|outbound| outbound.remote.ip() == remote);
        let taken: Vec<LaneGroup> = there.filter_map(|outbound| outbound.group).collect();
        let mut number = self.group;
        let group = std::iter::repeat_with(|| {
            number = number.wrapping_add(1);
            LaneGroup::new(number)
        })
        .flatten()
        .find(|group| !taken.contains(group));
        self.group = number;
        group
    }

    fn remove_outbound(&mut self, path: PathId, actions: &mut Vec<Action>) {
        let Some(it) = self.paths.get_mut(&path) else { return };
        let peer = it.peer;
        let outbound = std::mem::take(&mut it.outbound);
        let plain = it.plain.take();
        self.refresh(peer, actions);
        actions.extend(outbound.into_values().map(|outbound| Action::RemoveState(outbound.id)));
        actions.extend(plain.map(Action::Distrust));
    }

    fn bind(&mut self, peer: PeerId, path: Option<PathId>, actions: &mut Vec<Action>) {
        self.peers.entry(peer).or_default().bound = path;
        self.refresh(peer, actions);
        let via = match path {
            None => Via::None,
            Some(path) => match self.paths.get(&path).and_then(Path::remote) {
                Some(remote) => Via::Vxlan { remote },
                // A path of the vector engine.
                None => Via::Tap,
            },
        };
        actions.push(Action::SetVia(peer, via));
    }

    fn probe(
        &mut self,
        path: PathId,
        (number, mtu, candidate): (u64, u16, bool),
        actions: &mut Vec<Action>,
    ) {
        let Some(it) = self.paths.get(&path) else { return };
        let (Some(remote), peer) = (it.remote(), it.peer) else { return };
        let port = if candidate { vxlan::PROBE_PORT } else { vxlan::PORT };
        if candidate {
            self.peers.entry(peer).or_default().probed = Some(path);
            self.refresh(peer, actions);
        }
        actions.push(Action::Probe(Probe { path, remote, port, number, mtu }));
    }

    fn remove_peer(&mut self, peer: PeerId, actions: &mut Vec<Action>) {
        let paths: Vec<PathId> =
            self.paths.iter().filter(|(_, it)| it.peer == peer).map(|(path, _)| *path).collect();
        for path in paths {
            self.remove_outbound(path, actions);
            self.inbound.retain(|_, inbound| {
                let kept = inbound.path != path;
                if !kept {
                    actions.push(Action::RemoveState(inbound.id));
                }
                kept
            });
            self.paths.remove(&path);
        }
        self.peers.remove(&peer);
        actions.push(Action::SetVia(peer, Via::None));
    }

    /// Brings a peer's policies in line with its paths.
    fn refresh(&mut self, id: PeerId, actions: &mut Vec<Action>) {
        let peer = self.peers.entry(id).or_default();
        let paths = &self.paths;
        let policy = |path: Option<PathId>, present: Option<&PolicySpec>, port: u16| {
            match path.and_then(|path| paths.get(&path)) {
                Some(path) => path.policy(port),
                // Bound to the other engine: what is still on its way goes on being sealed.
                None => present.copied().filter(|policy| {
                    let has = |outbound: &Outbound| outbound.template() == policy.template;
                    paths.values().any(|path| path.outbound.values().any(has))
                }),
            }
        };
        let data = policy(peer.bound, peer.data.as_ref(), vxlan::PORT);
        let candidate = policy(peer.probed, peer.candidate.as_ref(), vxlan::PROBE_PORT);
        replace(&mut peer.data, data, actions);
        replace(&mut peer.candidate, candidate, actions);
    }

    fn path(&mut self, peer: PeerId, path: PathId) -> &mut Path {
        let new = || Path { peer, outbound: BTreeMap::new(), plain: None, mtu: None };
        self.paths.entry(path).or_insert_with(new)
    }

    fn bound(&self, peer: PeerId) -> Option<PathId> {
        self.peers.get(&peer)?.bound
    }
}

impl Path {
    /// The SA that packets leave on, if there is one.
    fn main(&self) -> Option<Outbound> {
        self.outbound.values().next().copied()
    }

    fn remote(&self) -> Option<IpAddr> {
        self.main().map(|outbound| outbound.remote.ip()).or(self.plain)
    }

    fn policy(&self, port: u16) -> Option<PolicySpec> {
        let outbound = self.main()?;
        let id = PolicyId { source: outbound.source, destination: outbound.remote.ip(), port };
        Some(PolicySpec { id, template: outbound.template() })
    }
}

impl Outbound {
    fn template(&self) -> Template {
        match self.group {
            Some(group) => Template::Lanes(group),
            None => Template::State { spi: self.id.spi },
        }
    }
}

/// Replaces a policy in place where it is for the same packets, so that none finds no policy.
fn replace(
    present: &mut Option<PolicySpec>,
    wanted: Option<PolicySpec>,
    actions: &mut Vec<Action>,
) {
    if *present == wanted {
        return;
    }
    actions.extend(wanted.map(Action::SetPolicy));
    if let Some(older) = present.map(|policy| policy.id)
        && wanted.is_none_or(|wanted| wanted.id != older)
    {
        actions.push(Action::RemovePolicy(older));
    }
    *present = wanted;
}

fn unreachable(path: PathId, remote: IpAddr) -> Action {
    Action::Tell(EngineEvent::PathFailed { path, reason: format!("no route to {remote}") })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use weft_crypto::{Cipher, SaKey};
    use weft_path::{EngineKind, Vni};

    use super::*;

    const PEER: PeerId = PeerId::from_bytes([7; 32]);
    const REMOTE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));
    const LOCAL: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const RAW: PathId = PathId(1);
    const UDP: PathId = PathId(2);
    const VECTOR: PathId = PathId(3);

    fn apply(state: &mut State, command: EngineCommand) -> Vec<Action> {
        state.apply(command, |_| Some(LOCAL))
    }

    fn outbound(path: PathId, spi: u32, encapsulation: Encapsulation) -> EngineCommand {
        let sa = OutboundSa {
            spi,
            lane: 0,
            cipher: Cipher::Aes256Gcm,
            key: SaKey::from_bytes([1; 36]),
            rco: false,
            iv_salt: 0,
            packets_soft: 3,
            packets_hard: 4,
            bytes_soft: 5,
            bytes_hard: 6,
            encapsulation,
            lifetime: Duration::from_secs(60),
        };
        let remote = SocketAddr::new(REMOTE, 6784);
        EngineCommand::InstallOutbound { engine: EngineKind::Kernel, peer: PEER, path, sa, remote }
    }

    fn inbound(path: PathId, spi: u32, encapsulation: Encapsulation) -> EngineCommand {
        let sa = InboundSa {
            spi,
            lane: 0,
            cipher: Cipher::Aes256Gcm,
            key: SaKey::from_bytes([2; 36]),
            encapsulation,
            lifetime: Duration::from_secs(60),
        };
        let (engine, peer, remote) = (EngineKind::Kernel, PEER, REMOTE);
        EngineCommand::InstallInbound { engine, peer, path, sa, remote }
    }

    fn policy(port: u16, spi: u32) -> PolicySpec {
        let id = PolicyId { source: LOCAL, destination: REMOTE, port };
        PolicySpec { id, template: Template::State { spi } }
    }

    fn added(actions: &[Action]) -> &StateSpec {
        match &actions[0] {
            Action::AddState(_, spec) => spec,
            other => panic!("not an SA: {other:?}"),
        }
    }

    #[test]
    fn a_path_carries_frames_only_once_it_is_bound() {
        let mut state = State::new(6785);
        let actions = apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
        let spec = added(&actions);
        assert_eq!((spec.source, spec.destination, spec.encapsulation), (LOCAL, REMOTE, None));
        assert_eq!(spec.limits.packets_soft, 3);
        assert_eq!(actions.len(), 1, "no policy leads to it yet: {actions:?}");
        let bind = EngineCommand::BindPath { peer: PEER, path: Some(RAW) };
        assert_eq!(
            apply(&mut state, bind),
            [
                Action::SetPolicy(policy(6787, 300)),
                Action::SetVia(PEER, Via::Vxlan { remote: REMOTE }),
            ],
            "the policy stands before frames are led to it"
        );
    }

    #[test]
    fn a_rekey_installs_leads_over_and_only_then_retires() {
        let mut state = State::new(6785);
        apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
        apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(RAW) });
        let actions = apply(&mut state, outbound(RAW, 301, Encapsulation::Raw));
        assert_eq!(added(&actions).spi, 301);
        let old = StateId { destination: REMOTE, spi: 300 };
        assert_eq!(actions[1..], [Action::SetPolicy(policy(6787, 301)), Action::RetireState(old)]);
    }

    #[test]
    fn lanes_are_one_for_each_cpu_and_a_rekey_moves_them_together() {
        let mut state = State::new(6785);
        state.set_per_cpu(true);
        let install = |state: &mut State, spi: u32| -> Vec<Action> {
            let lanes = (0..3).flat_map(|lane: u16| {
                let mut command = outbound(RAW, spi + u32::from(lane), Encapsulation::Raw);
                if let EngineCommand::InstallOutbound { sa, .. } = &mut command {
                    sa.lane = lane;
                }
                apply(state, command)
            });
            lanes.collect()
        };
        let added = |actions: &[Action]| -> Vec<_> {
            let of = |action: &Action| match action {
                Action::AddState(_, spec) => Some((spec.spi, spec.group.unwrap(), spec.cpu)),
                _ => None,
            };
            actions.iter().filter_map(of).collect()
        };
        let first = added(&install(&mut state, 300));
        let group = first[0].1;
        assert_eq!(first, [(300, group, None), (301, group, Some(0)), (302, group, Some(1))]);
        let bind = EngineCommand::BindPath { peer: PEER, path: Some(RAW) };
        let led = |group| PolicySpec { template: Template::Lanes(group), ..policy(6787, 0) };
        assert_eq!(apply(&mut state, bind)[0], Action::SetPolicy(led(group)));

        let actions = install(&mut state, 400);
        let second = added(&actions);
        let next = second[0].1;
        assert_ne!(next, group, "two sets of keys must not share a group");
        assert_eq!(second, [(400, next, None), (401, next, Some(0)), (402, next, Some(1))]);
        let of = |action: &Action| match action {
            Action::SetPolicy(policy) => Some(*policy),
            _ => None,
        };
        assert_eq!(actions.iter().filter_map(of).collect::<Vec<_>>(), [led(next)]);
        for spi in 300..303 {
            let old = StateId { destination: REMOTE, spi };
            assert!(actions.contains(&Action::RetireState(old)), "{spi}: {actions:?}");
        }
        // Another path to the same host has a group of its own, however often the numbers wrap.
        state.group = 1;
        let other = apply(&mut state, outbound(UDP, 500, Encapsulation::Udp));
        assert_ne!(self::added(&other).group, Some(next));
        state.group = state.group.wrapping_sub(1);
        let again = apply(&mut state, outbound(VECTOR, 600, Encapsulation::Udp));
        assert_ne!(self::added(&again).group, self::added(&other).group);
    }

    #[test]
    fn each_candidate_is_probed_on_its_own_sa_and_the_active_path_on_its_own() {
        let mut state = State::new(6785);
        apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
        apply(&mut state, outbound(UDP, 400, Encapsulation::Udp));
        apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(UDP) });
        let probe =
            |path, candidate| EngineCommand::SendProbe { path, probe: 9, mtu: 1400, candidate };
        let sent =
            |path, port| Action::Probe(Probe { path, remote: REMOTE, port, number: 9, mtu: 1400 });
        assert_eq!(
            apply(&mut state, probe(RAW, true)),
            [Action::SetPolicy(policy(6788, 300)), sent(RAW, 6788)]
        );
        assert_eq!(apply(&mut state, probe(RAW, true)), [sent(RAW, 6788)]);
        assert_eq!(apply(&mut state, probe(UDP, false)), [sent(UDP, 6787)]);
        assert_eq!(
            apply(&mut state, probe(UDP, true)),
            [Action::SetPolicy(policy(6788, 400)), sent(UDP, 6788)]
        );
    }

    #[test]
    fn moving_to_the_other_engine_leaves_the_sa_for_what_is_on_its_way() {
        let mut state = State::new(6785);
        apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
        apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(RAW) });
        let bind = EngineCommand::BindPath { peer: PEER, path: Some(VECTOR) };
        assert_eq!(apply(&mut state, bind), [Action::SetVia(PEER, Via::Tap)]);
        assert_eq!(
            apply(&mut state, EngineCommand::RemoveOutbound { path: RAW }),
            [
                Action::RemovePolicy(PolicyId { source: LOCAL, destination: REMOTE, port: 6787 }),
                Action::RemoveState(StateId { destination: REMOTE, spi: 300 }),
            ]
        );
    }

    #[test]
    fn a_plain_path_has_an_exception_and_no_policy() {
        let mut state = State::new(6785);
        apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
        apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(RAW) });
        let plain = EngineCommand::InstallPlain { peer: PEER, path: UDP, remote: REMOTE };
        assert_eq!(
            apply(&mut state, plain),
            [Action::Trust(REMOTE), Action::AcceptFrom(PEER, REMOTE)]
        );
        let bind = EngineCommand::BindPath { peer: PEER, path: Some(UDP) };
        assert_eq!(
            apply(&mut state, bind),
            [
                Action::RemovePolicy(PolicyId { source: LOCAL, destination: REMOTE, port: 6787 }),
                Action::SetVia(PEER, Via::Vxlan { remote: REMOTE }),
            ]
        );
        assert_eq!(
            apply(&mut state, EngineCommand::RemoveOutbound { path: UDP }),
            [Action::Distrust(REMOTE)]
        );
    }

    #[test]
    fn inbound_sas_take_udp_where_the_kernel_listens_and_know_their_path() {
        let mut state = State::new(6785);
        apply(&mut state, outbound(UDP, 400, Encapsulation::Udp));
        let actions = apply(&mut state, inbound(UDP, 500, Encapsulation::Udp));
        let spec = added(&actions);
        let ports = UdpPorts { source: 6784, destination: 6785 };
        assert_eq!(
            (spec.source, spec.destination, spec.encapsulation),
            (REMOTE, LOCAL, Some(ports))
        );
        assert_eq!(state.path_of(500), Some((UDP, false)));
        assert_eq!(state.path_of(400), Some((UDP, true)));
        assert_eq!(state.probed_by(probe_mac(&PEER)), Some((PEER, UDP)));
        assert_eq!(state.moved(500, SocketAddr::new(REMOTE, 6784)), None);
        assert_eq!(state.moved(500, SocketAddr::new(REMOTE, 9)), Some(UDP));
        let id = StateId { destination: LOCAL, spi: 500 };
        let remove = EngineCommand::RemoveInbound { spi: 500 };
        assert_eq!(apply(&mut state, remove), [Action::RemoveState(id)]);
        assert_eq!(apply(&mut state, EngineCommand::RemoveInbound { spi: 500 }), []);
    }

    #[test]
    fn a_forgotten_peer_leaves_nothing() {
        let mut state = State::new(6785);
        apply(&mut state, outbound(RAW, 300, Encapsulation::Raw));
        apply(&mut state, inbound(RAW, 500, Encapsulation::Raw));
        apply(&mut state, EngineCommand::BindPath { peer: PEER, path: Some(RAW) });
        let actions = apply(&mut state, EngineCommand::RemovePeer { peer: PEER });
        for spi in [300, 500] {
            let removed =
                |action: &Action| matches!(action, Action::RemoveState(id) if id.spi == spi);
            assert!(actions.iter().any(removed), "{spi} stays: {actions:?}");
        }
        assert!(actions.contains(&Action::SetVia(PEER, Via::None)));
        assert_eq!((state.policies().count(), state.states().count()), (0, 0));
        let endpoints =
            EngineCommand::SetEndpoints { vni: Vni(1), add: Vec::new(), remove: Vec::new() };
        assert_eq!(apply(&mut state, endpoints), []);
    }

    #[test]
    fn a_peer_without_a_route_is_a_failed_path() {
        let mut state = State::new(6785);
        let actions = state.apply(outbound(RAW, 300, Encapsulation::Raw), |_| None);
        let failed = |action: &Action| {
            matches!(action, Action::Tell(EngineEvent::PathFailed { path: RAW, reason })
                if reason == "no route to 192.0.2.2")
        };
        assert!(actions.iter().all(failed) && actions.len() == 1, "{actions:?}");
    }
}
