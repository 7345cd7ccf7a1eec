//! The kernel engine's view of peers, paths and SAs. A command yields a list of actions on the kernel. Pure,
//! so that tests can check the order without a kernel.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use weft_crypto::{Format, PeerId};
use weft_packet::vxlan;
use weft_path::{
    Encapsulation, EngineCommand, EngineEvent, EngineKind, InboundSa, OutboundSa, PathId,
};

use super::action::{Action, Probe};
use super::channel::ChannelState;
use super::probe_mac;
use super::sa::Way;
use crate::firewall::senders::{NUMBERS as SENDER_NUMBERS, NUMBERS_MASK as SENDER_NUMBERS_MASK};
use crate::switch::overlay::Via;
use crate::xfrm::{
    Direction, LaneGroup, Limits, PolicyId, PolicySpec, StateId, StateSpec, Template, UdpPorts,
};

/// Everything that the kernel holds for path choice.
pub(super) struct State {
    /// The UDP port on which the kernel takes ESP.
    encapsulation_port: u16,
    /// Whether the kernel chooses among a path's lanes by CPU; else each path has one.
    per_cpu: bool,
    /// The group of lanes that was given out last.
    group: u16,
    /// The number that was given out last; `None`: peers have none.
    number: Option<u32>,
    numbers: BTreeMap<PeerId, u32>,
    peers: BTreeMap<PeerId, Peer>,
    paths: BTreeMap<PathId, Path>,
    inbound: BTreeMap<u32, Inbound>,
    /// The address that a peer dialled, and so the destination of its packets, if the routing table would
    /// send from another.
    dialled: BTreeMap<PeerId, IpAddr>,
    /// The paths of format `ovpn`, which are not among those above.
    pub(super) channel: ChannelState,
}

#[derive(Default)]
struct Peer {
    bound: Option<PathId>,
    /// The source of its packets of the other formats.
    source: Option<IpAddr>,
    /// The kernel's current policies for data and for probes of candidates.
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
    /// The group of all lanes that came with this one.
    group: Option<LaneGroup>,
    source: IpAddr,
    remote: SocketAddr,
    encapsulation: Encapsulation,
}

struct Inbound {
    path: PathId,
    /// Whether its packets come from the port that the path's answers go to.
    shows_where: bool,
    id: StateId,
}

impl State {
    pub(super) fn new(encapsulation_port: u16, data_channel_port: u16) -> Self {
        Self {
            encapsulation_port,
            per_cpu: false,
            group: 0,
            number: None,
            numbers: BTreeMap::new(),
            peers: BTreeMap::new(),
            paths: BTreeMap::new(),
            inbound: BTreeMap::new(),
            dialled: BTreeMap::new(),
            channel: ChannelState::new(data_channel_port),
        }
    }

    /// Whether SAs installed from now on may be one for each CPU (RFC 9611).
    pub(super) fn set_per_cpu(&mut self, per_cpu: bool) {
        self.per_cpu = per_cpu;
    }

    /// From now on each peer has a number, which marks the packets that its SAs open.
    pub(super) fn give_numbers(&mut self) {
        self.number.get_or_insert(SENDER_NUMBERS);
    }

    /// A peer's number, from its first way in on.
    pub(super) fn number_of(&self, peer: &PeerId) -> Option<u32> {
        self.numbers.get(peer).copied()
    }

    /// Translates a command to actions. `local` returns the source address by which this host reaches a peer.
    pub(super) fn apply(
        &mut self,
        command: EngineCommand,
        local: impl Fn(IpAddr) -> Option<IpAddr>,
    ) -> Vec<Action> {
        let mut actions = Vec::new();
        let Some(command) = self.apply_to_channel(command, &mut actions) else { return actions };
        match command {
            EngineCommand::InstallInbound { peer, path, sa, remote, .. } => match self
                .dialled
                .get(&peer)
                .copied()
                .filter(|dialled| dialled.is_ipv4() == remote.is_ipv4())
                .or_else(|| local(remote))
            {
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
                actions.push(self.accept(peer, Some(remote)));
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
            EngineCommand::SetSource { peer, source: Some(source) } => {
                self.dialled.insert(peer, source);
            }
            EngineCommand::SetSource { peer, source: None } => {
                self.dialled.remove(&peer);
            }
            // A kernel's state is not moved, and proves no lanes; endpoints and broadcast are the switch's.
            EngineCommand::SetRemote { .. }
            | EngineCommand::OpenLanes { .. }
            | EngineCommand::SetEndpoints { .. }
            | EngineCommand::SetBroadcast { .. } => {}
        }
        actions
    }

    /// Identifies a received probe: the peer, by the source Ethernet address, and a path. The kernel does not
    /// report the SA, so any of the peer's paths stands for it.
    pub(super) fn probed_by(&self, mac: [u8; 6]) -> Option<(PeerId, PathId)> {
        let paths = self.inbound.values().map(|inbound| inbound.path);
        let of = |path: PathId| self.paths.get(&path).map(|it| (it.peer, path));
        let all = self.paths.iter().map(|(path, it)| (it.peer, *path));
        let mut those = paths.filter_map(of).chain(self.channel.paths()).chain(all);
        those.find(|(peer, _)| probe_mac(peer) == mac)
    }

    /// The path of an inbound or outbound SA of IPsec; the flag says outbound.
    pub(super) fn path_of(&self, spi: u32) -> Option<(PathId, bool)> {
        if let Some(inbound) = self.inbound.get(&spi) {
            return Some((inbound.path, false));
        }
        let has = |path: &Path| path.outbound.values().any(|outbound| outbound.id.spi == spi);
        self.paths.iter().find(|(_, path)| has(path)).map(|(path, _)| (*path, true))
    }

    /// A path of IPsec that sends to this address.
    pub(super) fn path_to(&self, remote: IpAddr) -> Option<PathId> {
        let sends =
            |path: &Path| path.main().is_some_and(|outbound| outbound.remote.ip() == remote);
        self.paths.iter().find(|(_, path)| sends(path)).map(|(path, _)| *path)
    }

    /// Notes that packets of an inbound SA come from `remote`. Returns the path if the address is new.
    pub(super) fn moved(&self, spi: u32, remote: SocketAddr) -> Option<PathId> {
        let &Inbound { path, shows_where, .. } = self.inbound.get(&spi)?;
        if !shows_where {
            return None;
        }
        let outbound = self.paths.get(&path).and_then(Path::main)?;
        (outbound.remote != remote).then_some(path)
    }

    /// Peers whose frames take a path that carries less than `mtu` bytes, and how much it carries.
    pub(super) fn narrow(&self, mtu: u16) -> BTreeMap<PeerId, u16> {
        let bound = self.peers.iter().filter_map(|(peer, it)| Some((*peer, it.bound?)));
        let carries = |path: PathId| match self.paths.get(&path) {
            Some(it) => it.mtu,
            None => self.channel.mtu(path),
        };
        bound
            .filter_map(|(peer, path)| Some((peer, carries(path)?)))
            .filter(|(_, carried)| *carried < mtu)
            .collect()
    }

    /// Every policy that must be in the kernel.
    pub(super) fn policies(&self) -> impl Iterator<Item = &PolicySpec> {
        self.peers.values().flat_map(|peer| peer.data.iter().chain(&peer.candidate))
    }

    /// Every SA that must be among the kernel's states, with its path.
    pub(super) fn states(&self) -> impl Iterator<Item = (StateId, PathId)> {
        let inbound = self.inbound.values().map(|inbound| (inbound.id, inbound.path));
        let outbound = self
            .paths
            .iter()
            .flat_map(|(path, it)| it.outbound.values().map(move |outbound| (outbound.id, *path)));
        inbound.chain(outbound)
    }

    /// Every inbound one with its peer and its path.
    pub(super) fn inbound(&self) -> impl Iterator<Item = (PeerId, PathId, StateId)> {
        self.inbound.values().filter_map(|inbound| {
            let peer = self.paths.get(&inbound.path)?.peer;
            Some((peer, inbound.path, inbound.id))
        })
    }

    /// Every SA with its peer and direction.
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
        self.peers.contains_key(peer)
            || self.paths.values().any(|path| path.peer == *peer)
            || self.channel.knows(peer)
    }

    /// Peers whose frames take a path of the kernel, each with [`Via::None`].
    pub(super) fn led_to_kernel(&self) -> Vec<(PeerId, Via)> {
        let is_led = |it: &Peer| {
            let of_kernel = |path| self.paths.contains_key(&path) || self.channel.has(path);
            it.bound.is_some_and(of_kernel)
        };
        let led = self.peers.iter().filter(|(_, it)| is_led(it));
        led.map(|(peer, _)| (*peer, Via::None)).collect()
    }

    /// Forgets all states after the kernel has lost them, so that none is removed again.
    pub(super) fn states_lost(&mut self) {
        self.inbound.clear();
        for path in self.paths.values_mut() {
            path.outbound.clear();
        }
    }
}

impl State {
    /// Handles commands for paths of format `ovpn`; returns any other command.
    fn apply_to_channel(
        &mut self,
        command: EngineCommand,
        actions: &mut Vec<Action>,
    ) -> Option<EngineCommand> {
        let channel = &mut self.channel;
        match command {
            EngineCommand::InstallInbound { peer, path, ref sa, remote, .. }
                if sa.key.format() == Format::Ovpn =>
            {
                channel.install_inbound(peer, path, sa, remote, actions);
                actions.push(self.accept(peer, None));
            }
            EngineCommand::RemoveInbound { spi } if channel.has_inbound(spi) => {
                channel.remove_inbound(spi, actions);
            }
            EngineCommand::InstallOutbound { peer, path, ref sa, remote, .. }
                if sa.key.format() == Format::Ovpn =>
            {
                let before = channel.remote(path);
                channel.install_outbound(peer, path, sa, remote, actions);
                let after = channel.remote(path).filter(|after| Some(*after) != before);
                if self.bound(peer) == Some(path) {
                    let via = after.map(|remote| Action::SetVia(peer, Via::Vxlan { remote }));
                    actions.extend(via);
                }
            }
            EngineCommand::RemoveOutbound { path } if channel.has(path) => {
                channel.remove_outbound(path, actions);
            }
            EngineCommand::SendProbe { path, probe: number, mtu, candidate }
                if channel.has(path) =>
            {
                let port = probe_port(candidate);
                let probe = |remote| Probe { path, remote, port, number, mtu };
                actions.extend(channel.remote(path).map(probe).map(Action::Probe));
            }
            EngineCommand::SendKeepalive { path } if channel.has(path) => {
                actions.extend(channel.outer_remote(path).map(Action::ChannelKeepalive));
            }
            EngineCommand::SetPathMtu { path, mtu } if channel.has(path) => {
                channel.set_mtu(path, mtu);
            }
            EngineCommand::SetRemote { path, remote } if channel.has(path) => {
                channel.set_remote(path, remote, actions);
            }
            command => return Some(command),
        }
        None
    }

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
                mark: self.number(peer),
            },
        ));
        // The vector engine's lanes beyond the first use separate ports. The kernel engine's lanes share one
        // port. If each of its CPUs has a lane, none of its packets take the first.
        let shows_where = sa.lane == 0 || sa.remote_engine == EngineKind::Kernel;
        self.inbound.insert(sa.spi, Inbound { path, shows_where, id });
        actions.push(self.accept(peer, Some(remote)));
    }

    /// Another number than all others', of which 0 is none.
    fn number(&mut self, peer: PeerId) -> Option<u32> {
        let mut last = self.number?;
        if let Some(number) = self.numbers.get(&peer) {
            return Some(*number);
        }
        let taken = |number: &u32| self.numbers.values().any(|it| it == number);
        loop {
            last = SENDER_NUMBERS | (last.wrapping_add(1) & !SENDER_NUMBERS_MASK);
            if last != SENDER_NUMBERS && !taken(&last) {
                break;
            }
        }
        self.number = Some(last);
        self.numbers.insert(peer, last);
        Some(last)
    }

    /// Accepts a peer's packets from each source of its paths, since it may send by several at a time.
    /// `source` is the new source for formats other than `ovpn`, if it changed.
    fn accept(&mut self, peer: PeerId, source: Option<IpAddr>) -> Action {
        self.number(peer);
        let it = self.peers.entry(peer).or_default();
        it.source = source.or(it.source);
        let sources = it.source.into_iter().chain(self.channel.sources(peer));
        Action::AcceptFrom(peer, sources.collect())
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
                // Lane 0 serves CPUs without a dedicated lane.
                cpu: group.and_then(|_| u32::from(sa.lane).checked_sub(1)),
                mark: None,
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
                None => match self.channel.remote(path) {
                    Some(remote) => Via::Vxlan { remote },
                    // A path of the vector engine.
                    None => Via::Tap,
                },
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
        let port = probe_port(candidate);
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
        self.channel.remove_peer(peer, actions);
        self.dialled.remove(&peer);
        self.peers.remove(&peer);
        actions.push(Action::SetVia(peer, Via::None));
        actions.extend(self.numbers.remove(&peer).map(|_| Action::RefuseFrom(peer)));
    }

    /// Brings a peer's policies in line with its paths.
    fn refresh(&mut self, id: PeerId, actions: &mut Vec<Action>) {
        let peer = self.peers.entry(id).or_default();
        let paths = &self.paths;
        let policy = |path: Option<PathId>, present: Option<&PolicySpec>, port: u16| {
            match path.and_then(|path| paths.get(&path)) {
                Some(path) => path.policy(port),
                // Bound to the other engine: packets in flight are still sealed.
                None => present.copied().filter(|policy| {
                    let has = |outbound: &Outbound| outbound.template() == policy.template;
                    paths.values().any(|path| path.outbound.values().any(has))
                }),
            }
        };
        let data = policy(peer.bound, peer.data.as_ref(), vxlan::PORT);
        let candidate = policy(peer.probed, peer.candidate.as_ref(), vxlan::PROBE_PORT);
        let (bound, probed) = (peer.bound, peer.probed);
        let data = self.unless_anothers(id, data, bound, actions);
        let candidate = self.unless_anothers(id, candidate, probed, actions);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        replace(&mut peer.data, data, actions);
        replace(&mut peer.candidate, candidate, actions);
    }

    /// Returns `None` if another peer holds this policy. There is one policy for each pair of addresses, even
    /// if a second peer claims the same address.
    fn unless_anothers(
        &self,
        id: PeerId,
        wanted: Option<PolicySpec>,
        path: Option<PathId>,
        actions: &mut Vec<Action>,
    ) -> Option<PolicySpec> {
        let wanted = wanted?;
        let has =
            |peer: &Peer| [peer.data, peer.candidate].iter().flatten().any(|it| it.id == wanted.id);
        if !self.peers.iter().any(|(other, peer)| *other != id && has(peer)) {
            return Some(wanted);
        }
        let reason = format!("another peer has {} to itself", wanted.id.destination);
        actions.extend(path.map(|path| Action::Tell(EngineEvent::PathFailed { path, reason })));
        None
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

const fn probe_port(candidate: bool) -> u16 {
    if candidate { vxlan::PROBE_PORT } else { vxlan::PORT }
}

fn unreachable(path: PathId, remote: IpAddr) -> Action {
    Action::Tell(EngineEvent::PathFailed { path, reason: format!("no route to {remote}") })
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
