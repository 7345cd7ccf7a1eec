//! The two engines of a host. They keep SAs as real ones do but seal nothing: a packet carries its key, and opens
//! only under the same key.
//!
//! The kernel engine's SAs of format `esp` are bound to the addresses they were made for, and travel as protocol
//! 50 or in UDP. A candidate's probe goes by one policy for each peer. Those of format `ovpn` stand in the two
//! slots of a receiver. The tunnel address that it takes packets from identifies it. It follows its peer, and
//! tells a new address once. In neither does the kernel tell on which of a peer's SAs a probe came, or report
//! first use. The vector engine takes UDP alone, from anywhere, and can send elsewhere under the same SA.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use weft_crypto::{Format, PeerId};
use weft_path::{
    Encapsulation, EngineCommand, EngineEvent, EngineKind, EngineOffer, InboundSa, OutboundSa,
    PLAIN_PORT, PathId,
};

/// Keys that a receiver of the kernel's `ovpn` can have.
const SLOTS: usize = 2;

/// A packet on the simulated data network.
#[derive(Clone, Debug)]
pub struct Packet {
    /// The sender's path.
    pub path: PathId,
    /// Protocol 50 or UDP.
    pub encapsulation: Encapsulation,
    /// Its source, as the receiver sees it.
    pub source: SocketAddr,
    /// Its destination.
    pub destination: SocketAddr,
    /// `None`: plaintext.
    pub seal: Option<Seal>,
    /// Length of the inner IP packet in bytes.
    pub size: u16,
    /// The contents.
    pub payload: Payload,
}

/// The seal of a packet.
#[derive(Clone, Debug)]
pub struct Seal {
    /// The SA.
    pub spi: u32,
    /// Its key.
    pub key: [u8; 36],
    /// Its wire format.
    pub format: Format,
    /// The engines that the sender means at its end and at the other; in format `ovpn` the tunnel addresses
    /// name them.
    pub engines: (EngineKind, EngineKind),
    /// Sequence number, from 1.
    pub sequence: u64,
}

/// The contents of a simulated packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A container's packet.
    Data,
    /// A probe of the path.
    Probe {
        /// The sender's number.
        probe: u64,
        /// It is a candidate's.
        candidate: bool,
    },
}

/// The drops of the host's firewall among the packets that its kernel has opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Firewall {
    /// Nothing.
    #[default]
    Open,
    /// All of it.
    Closed,
    /// All but candidates' probes, which come to a separate port.
    OpenToCandidates,
}

struct Inbound {
    engine: EngineKind,
    remote_engine: EngineKind,
    format: Format,
    peer: PeerId,
    path: PathId,
    key: [u8; 36],
    encapsulation: Encapsulation,
    /// The address of this host that a kernel's SA may be bound to.
    local: IpAddr,
    /// The source that a kernel expects: it reports packets from elsewhere.
    expected: SocketAddr,
    seen: BTreeSet<u64>,
}

struct Outbound {
    engine: EngineKind,
    remote_engine: EngineKind,
    format: Format,
    peer: PeerId,
    spi: u32,
    key: [u8; 36],
    encapsulation: Encapsulation,
    local: IpAddr,
    remote: SocketAddr,
    sequence: u64,
    soft: u64,
    hard: u64,
    told_soft: bool,
    told_hard: bool,
}

/// The simulated engines of one host.
pub struct SimEngine {
    /// This host's own address; packets with another source do not leave it.
    pub address: IpAddr,
    /// The firewall behind the kernel engine.
    pub firewall: Firewall,
    /// Packets dropped, by reason.
    pub drops: BTreeMap<&'static str, u64>,
    /// NAT keepalives sent.
    pub keepalives: u64,
    /// Engines that lose all and say so at the next installation.
    pub broken: BTreeSet<EngineKind>,
    /// The kernel refuses SAs that travel like this.
    pub refused: BTreeSet<Encapsulation>,
    /// The kernel engine says which datagrams were too long for the link.
    pub kernel_tells_length: bool,
    /// SAs that packets are sealed by, so far.
    pub outbound_installed: u64,
    /// Paths that were told to send elsewhere, so far.
    pub moves: u64,
    ports: BTreeMap<(EngineKind, Format), u16>,
    inbound: BTreeMap<u32, Inbound>,
    /// The sources that receivers of the kernel's `ovpn` accept, by path: they follow their peers.
    receivers: BTreeMap<PathId, SocketAddr>,
    /// The addresses that they have followed their peers to.
    heard: BTreeMap<PathId, SocketAddr>,
    /// By path and lane.
    outbound: BTreeMap<(PathId, u16), Outbound>,
    plain: BTreeMap<PathId, (PeerId, IpAddr)>,
    bound: BTreeMap<PeerId, PathId>,
    /// Whether this host opens a peer's lanes, where that was said.
    opens: BTreeMap<PeerId, bool>,
    mtu: BTreeMap<PathId, u16>,
    /// Every key that was ever sent with: none may come twice.
    sent_with: BTreeSet<[u8; 36]>,
    lane: u16,
    probes: usize,
}

impl SimEngine {
    /// Engines without SAs.
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            firewall: Firewall::Open,
            drops: BTreeMap::new(),
            keepalives: 0,
            broken: BTreeSet::new(),
            refused: BTreeSet::new(),
            kernel_tells_length: true,
            outbound_installed: 0,
            moves: 0,
            ports: BTreeMap::new(),
            inbound: BTreeMap::new(),
            receivers: BTreeMap::new(),
            heard: BTreeMap::new(),
            outbound: BTreeMap::new(),
            plain: BTreeMap::new(),
            bound: BTreeMap::new(),
            opens: BTreeMap::new(),
            mtu: BTreeMap::new(),
            sent_with: BTreeSet::new(),
            lane: 0,
            probes: 0,
        }
    }

    /// The engines' data ports are others from now on.
    pub fn set_ports(&mut self, engines: &[EngineOffer]) {
        let port = |engine: &EngineOffer| ((engine.kind, engine.format), engine.port);
        self.ports.extend(engines.iter().map(port));
    }

    /// Inbound SAs that live now.
    pub fn inbound_sas(&self) -> usize {
        self.inbound.len()
    }

    /// The same, by path.
    pub fn inbound_by_path(&self) -> BTreeMap<PathId, usize> {
        let mut counts = BTreeMap::new();
        for sa in self.inbound.values() {
            *counts.entry(sa.path).or_default() += 1;
        }
        counts
    }

    /// Outbound SAs that live now.
    pub fn outbound_sas(&self) -> usize {
        self.outbound.len()
    }

    /// Trusted peers to whom plaintext may go now.
    pub fn plain_paths(&self) -> usize {
        self.plain.len()
    }

    /// The path that frames for a peer take.
    pub fn bound(&self, peer: PeerId) -> Option<PathId> {
        self.bound.get(&peer).copied()
    }

    /// Whether this host opens a peer's lanes; `None`: path choice has not said.
    pub fn opens(&self, peer: PeerId) -> Option<bool> {
        self.opens.get(&peer).copied()
    }

    /// Lanes beyond the first that this host's vector engine proves with that of a peer.
    pub fn proven_lanes(&self, peer: PeerId) -> Vec<(PathId, u16)> {
        let vector = EngineKind::Userspace;
        let beyond = |(at, sa): (&(PathId, u16), &Outbound)| {
            let are_vector = (sa.engine, sa.remote_engine) == (vector, vector);
            (at.1 > 0 && are_vector && sa.peer == peer).then_some(*at)
        };
        self.outbound.iter().filter_map(beyond).collect()
    }

    /// The engine that a path with SAs is on.
    pub fn engine_of(&self, path: PathId) -> Option<EngineKind> {
        self.sender(path).map(|(engine, _, _)| engine)
    }

    /// The peer of a path whose packets the kernel knows by address. One policy for the peer then leads a
    /// candidate's probes.
    pub fn policy_peer_of(&self, path: PathId) -> Option<PeerId> {
        let (engine, format, peer) = self.sender(path)?;
        is_bound(engine, format).then_some(peer)
    }

    fn sender(&self, path: PathId) -> Option<(EngineKind, Format, PeerId)> {
        let plain = self.plain.get(&path);
        let plain = plain.map(|(peer, _)| (EngineKind::Kernel, Format::Plain, *peer));
        let outbound = self.outbound_of(path);
        outbound.map(|outbound| (outbound.engine, outbound.format, outbound.peer)).or(plain)
    }

    /// The SA of the first lane.
    fn outbound_of(&self, path: PathId) -> Option<&Outbound> {
        self.outbound.range((path, 0)..=(path, u16::MAX)).next().map(|(_, outbound)| outbound)
    }

    /// Carries out a command. Probes come back as packets; `None`: nothing to send.
    ///
    /// # Panics
    /// If a command breaks a promise of path choice: a key is installed for sending twice (its sequence numbers
    /// would repeat); a path is bound without an SA; an SA that is bound to addresses is told to send
    /// elsewhere; a kernel's probe leaves by the port of another role; or a key for the kernel's `ovpn` finds
    /// no free slot.
    pub fn apply(
        &mut self,
        command: EngineCommand,
        events: &mut Vec<EngineEvent>,
    ) -> Option<Packet> {
        match command {
            EngineCommand::InstallInbound { engine, peer, path, sa, remote } => {
                self.install_inbound((engine, peer, path), &sa, remote, events);
            }
            EngineCommand::RemoveInbound { spi } => {
                self.inbound.remove(&spi);
                self.forget_unused();
            }
            EngineCommand::InstallOutbound { engine, peer, path, sa, remote } => {
                self.install_outbound((engine, peer, path), &sa, remote, events);
            }
            EngineCommand::InstallPlain { peer, path, remote } => {
                if self.broken.contains(&EngineKind::Kernel) {
                    self.fail(EngineKind::Kernel, events);
                } else {
                    self.plain.insert(path, (peer, remote));
                }
            }
            EngineCommand::RemoveOutbound { path } => {
                self.outbound.retain(|(other, _), _| *other != path);
                self.plain.remove(&path);
                self.forget_unused();
            }
            EngineCommand::BindPath { peer, path: Some(path) } => {
                assert!(self.engine_of(path).is_some(), "bound without an SA");
                self.bound.insert(peer, path);
            }
            EngineCommand::BindPath { peer, path: None } => {
                self.bound.remove(&peer);
            }
            EngineCommand::SetPathMtu { path, mtu } => {
                self.mtu.insert(path, mtu);
            }
            EngineCommand::SetRemote { path, remote } => self.set_remote(path, remote),
            EngineCommand::SendProbe { path, probe, mtu, candidate } => {
                if self.engine_of(path) == Some(EngineKind::Kernel) {
                    let bound = self.bound.values().any(|bound| *bound == path);
                    assert_eq!(candidate, !bound, "a probe on the port of another role");
                }
                return self.emit(path, mtu, Payload::Probe { probe, candidate }, events);
            }
            EngineCommand::SendKeepalive { .. } => self.keepalives += 1,
            EngineCommand::RemovePeer { peer } => {
                self.bound.remove(&peer);
                self.opens.remove(&peer);
                let left = self.inbound.values().any(|sa| sa.peer == peer)
                    || self.outbound.values().any(|sa| sa.peer == peer)
                    || self.plain.values().any(|(other, _)| *other == peer);
                assert!(!left, "a forgotten peer left an SA behind");
            }
            EngineCommand::OpenLanes { peer, opens } => {
                self.opens.insert(peer, opens);
            }
            EngineCommand::SetEndpoints { .. }
            | EngineCommand::SetBroadcast { .. }
            | EngineCommand::SetSource { .. } => {}
        }
        None
    }

    fn set_remote(&mut self, path: PathId, remote: SocketAddr) {
        let lanes = self.outbound.iter_mut().filter(|((other, _), _)| *other == path);
        for (_, outbound) in lanes {
            let bound = is_bound(outbound.engine, outbound.format);
            assert!(!bound, "a kernel's SA cannot move");
            outbound.remote = remote;
        }
        // The kernel's `ovpn` tells by its next reading where packets still come from.
        self.receivers.remove(&path);
        self.moves += 1;
    }

    fn install_inbound(
        &mut self,
        (engine, peer, path): (EngineKind, PeerId, PathId),
        sa: &InboundSa,
        remote: IpAddr,
        events: &mut Vec<EngineEvent>,
    ) {
        if self.accepts(engine, path, sa.encapsulation, events) {
            let format = sa.key.format();
            let default = self.ports.get(&(engine, format)).copied().unwrap_or_default();
            let port = self.outbound_of(path).map_or(default, |outbound| outbound.remote.port());
            let inbound = Inbound {
                engine,
                remote_engine: sa.remote_engine,
                format,
                peer,
                path,
                key: *sa.key.expose(),
                encapsulation: sa.encapsulation,
                local: self.address,
                expected: SocketAddr::new(remote, port),
                seen: BTreeSet::new(),
            };
            if inbound.has_slot() {
                self.check_slots(&inbound, sa.spi);
                self.receivers.entry(path).or_insert(inbound.expected);
            }
            assert!(self.inbound.insert(sa.spi, inbound).is_none(), "an SPI was installed twice");
        }
    }

    /// A receiver of the kernel's `ovpn` has two slots, a unique peer id and a unique tunnel address.
    fn check_slots(&self, fresh: &Inbound, spi: u32) {
        let peer_id = |spi: u32| spi & 0xff_ffff;
        let (mut taken, whose) = (0, |sa: &Inbound| (sa.peer, sa.remote_engine));
        for (other, sa) in self.inbound.iter().filter(|(_, sa)| sa.has_slot()) {
            let same = sa.path == fresh.path;
            assert_eq!(peer_id(*other) == peer_id(spi), same, "whose peer id is {spi:08x}");
            assert_eq!(whose(sa) == whose(fresh), same, "whose is the tunnel address");
            taken += usize::from(same);
        }
        assert!(taken < SLOTS, "a key is in each slot");
    }

    /// Removes a receiver with its last SA, and what was heard on a path with both its directions.
    fn forget_unused(&mut self) {
        let (inbound, outbound) = (&self.inbound, &self.outbound);
        let receives = |path: &PathId| inbound.values().any(|sa| sa.path == *path);
        self.receivers.retain(|path, _| receives(path));
        let sends = |path: &PathId| outbound.keys().any(|(of, _)| of == path);
        self.heard.retain(|path, _| receives(path) || sends(path));
    }

    fn install_outbound(
        &mut self,
        (engine, peer, path): (EngineKind, PeerId, PathId),
        sa: &OutboundSa,
        remote: SocketAddr,
        events: &mut Vec<EngineEvent>,
    ) {
        let key = *sa.key.expose();
        assert!(self.sent_with.insert(key), "a key was installed for sending twice");
        if self.accepts(engine, path, sa.encapsulation, events) {
            let outbound = Outbound {
                engine,
                remote_engine: sa.remote_engine,
                format: sa.key.format(),
                peer,
                spi: sa.spi,
                key,
                encapsulation: sa.encapsulation,
                local: self.address,
                remote,
                sequence: 0,
                soft: sa.packets_soft,
                hard: sa.packets_hard,
                told_soft: false,
                told_hard: false,
            };
            self.outbound.insert((path, sa.lane), outbound);
            self.outbound_installed += 1;
            let heard = self.heard.get(&path).filter(|heard| **heard != remote);
            events.extend(heard.map(|heard| EngineEvent::RemoteMoved { path, remote: *heard }));
        }
    }

    fn accepts(
        &mut self,
        engine: EngineKind,
        path: PathId,
        encapsulation: Encapsulation,
        events: &mut Vec<EngineEvent>,
    ) -> bool {
        assert!(
            engine == EngineKind::Kernel || encapsulation == Encapsulation::Udp,
            "the vector engine takes UDP alone"
        );
        if self.broken.contains(&engine) {
            self.fail(engine, events);
            return false;
        }
        if engine == EngineKind::Kernel && self.refused.contains(&encapsulation) {
            events.push(EngineEvent::PathFailed { path, reason: "refused".to_owned() });
            return false;
        }
        true
    }

    /// A container's packet for `peer`, of `size` bytes or else of the path's MTU.
    pub fn send(
        &mut self,
        peer: PeerId,
        size: Option<u16>,
        events: &mut Vec<EngineEvent>,
    ) -> Option<Packet> {
        let Some(path) = self.bound(peer) else {
            self.drop("no path");
            return None;
        };
        let mtu = self.mtu.get(&path).copied().unwrap_or(0);
        self.emit(path, size.unwrap_or(mtu).min(mtu), Payload::Data, events)
    }

    /// A packet came in. `true`: it was a container's packet, and was delivered.
    pub fn receive(&mut self, packet: &Packet, events: &mut Vec<EngineEvent>) -> bool {
        match self.open(packet, events) {
            Ok((peer, path)) => match packet.payload {
                Payload::Data => true,
                Payload::Probe { probe, candidate } => {
                    let mtu = packet.size;
                    events.push(EngineEvent::ProbeReceived { peer, path, probe, mtu, candidate });
                    false
                }
            },
            Err(reason) => {
                self.drop(reason);
                false
            }
        }
    }

    fn open(
        &mut self,
        packet: &Packet,
        events: &mut Vec<EngineEvent>,
    ) -> Result<(PeerId, PathId), &'static str> {
        let Some(seal) = &packet.seal else {
            let trusted = self.plain.iter().find(|(_, (_, ip))| *ip == packet.source.ip());
            return trusted.map(|(path, (peer, _))| (*peer, *path)).ok_or("guard");
        };
        let sa = self.inbound.get_mut(&seal.spi).ok_or("unknown SPI")?;
        let port = self.ports.get(&(sa.engine, sa.format)).copied();
        let raw = packet.encapsulation == Encapsulation::Raw;
        let there = raw || port == Some(packet.destination.port());
        if !there || sa.encapsulation != packet.encapsulation {
            return Err("wrong engine");
        }
        if is_bound(sa.engine, sa.format) && sa.local != packet.destination.ip() {
            return Err("wrong address");
        }
        if sa.key != seal.key {
            return Err("wrong key");
        }
        if seal.engines != (sa.remote_engine, sa.engine) {
            return Err("wrong tunnel address");
        }
        if !sa.seen.insert(seal.sequence) {
            return Err("replayed");
        }
        if sa.seen.len() == 1 && sa.engine == EngineKind::Userspace {
            events.push(EngineEvent::InboundFirstUse { spi: seal.spi });
        }
        let (engine, peer, path) = (sa.engine, sa.peer, sa.path);
        if engine == EngineKind::Kernel && self.firewall.stops(packet.payload) {
            // It hears candidates' probes only, so it cannot tell the fate of the rest.
            let deaf = self.firewall == Firewall::Closed && packet.payload != Payload::Data;
            events.extend(deaf.then_some(EngineEvent::Unheard { peer, path }));
            return Err("host firewall");
        }
        let reported = if sa.has_slot() {
            // It follows its peer, and tells when it does.
            let followed = self.receivers.insert(path, packet.source) != Some(packet.source);
            if followed {
                self.heard.insert(path, packet.source);
            }
            followed
        } else {
            engine == EngineKind::Userspace || sa.expected != packet.source
        };
        let moved = self.outbound_of(path).is_some_and(|outbound| outbound.remote != packet.source);
        if moved && reported && !raw {
            events.push(EngineEvent::RemoteMoved { path, remote: packet.source });
        }
        Ok((peer, if engine == EngineKind::Kernel { self.any_kernel_path(peer) } else { path }))
    }

    /// The kernel knows the peer of a probe, but not the SA.
    fn any_kernel_path(&mut self, peer: PeerId) -> PathId {
        self.probes += 1;
        let kernel = |sa: &&Inbound| sa.engine == EngineKind::Kernel && sa.peer == peer;
        let count = self.inbound.values().filter(kernel).count();
        let nth = self.probes % count.max(1);
        self.inbound.values().filter(kernel).nth(nth).map_or(PathId(u32::MAX), |sa| sa.path)
    }

    /// An engine breaks down or is flushed: it loses its SAs.
    pub fn fail(&mut self, engine: EngineKind, events: &mut Vec<EngineEvent>) {
        self.inbound.retain(|_, sa| sa.engine != engine);
        self.outbound.retain(|_, sa| sa.engine != engine);
        if engine == EngineKind::Kernel {
            self.plain.clear();
        }
        self.forget_unused();
        events.push(EngineEvent::EngineFailed { engine, reason: "simulated".to_owned() });
    }

    /// The kernel loses the SAs of one path, which it reports.
    pub fn fail_path(&mut self, path: PathId, events: &mut Vec<EngineEvent>) {
        self.inbound.retain(|_, sa| sa.path != path);
        self.outbound.retain(|(other, _), _| *other != path);
        self.forget_unused();
        events.push(EngineEvent::PathFailed { path, reason: "state deleted".to_owned() });
    }

    /// Sends by a path: sealed by its SA, or plain where both hosts want it so.
    fn emit(
        &mut self,
        path: PathId,
        size: u16,
        payload: Payload,
        events: &mut Vec<EngineEvent>,
    ) -> Option<Packet> {
        if let Some((_, remote)) = self.plain.get(&path) {
            return Some(Packet {
                path,
                encapsulation: Encapsulation::Udp,
                source: SocketAddr::new(self.address, PLAIN_PORT),
                destination: SocketAddr::new(*remote, PLAIN_PORT),
                seal: None,
                size,
                payload,
            });
        }
        let lanes = self.outbound.range((path, 0)..=(path, u16::MAX)).count();
        self.lane = self.lane.wrapping_add(1);
        let nth = usize::from(self.lane).checked_rem(lanes).unwrap_or(0);
        let mut range = self.outbound.range_mut((path, 0)..=(path, u16::MAX));
        let Some((_, sa)) = range.nth(nth) else {
            self.drop("no SA");
            return None;
        };
        if sa.sequence >= sa.hard {
            if !std::mem::replace(&mut sa.told_hard, true) {
                events.push(EngineEvent::OutboundExhausted { path, spi: sa.spi });
            }
            self.drop("exhausted");
            return None;
        }
        sa.sequence += 1;
        if sa.sequence >= sa.soft && !std::mem::replace(&mut sa.told_soft, true) {
            events.push(EngineEvent::OutboundNearLimit { path, spi: sa.spi });
        }
        let local = if is_bound(sa.engine, sa.format) { sa.local } else { self.address };
        let port = self.ports.get(&(sa.engine, sa.format)).copied().unwrap_or(0);
        Some(Packet {
            path,
            encapsulation: sa.encapsulation,
            // Both directions of a lane use one 5-tuple: packets come from the port that is offered.
            source: SocketAddr::new(local, port),
            destination: sa.remote,
            seal: Some(Seal {
                spi: sa.spi,
                key: sa.key,
                format: sa.format,
                engines: (sa.engine, sa.remote_engine),
                sequence: sa.sequence,
            }),
            size,
            payload,
        })
    }

    fn drop(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }
}

impl Firewall {
    const fn stops(self, payload: Payload) -> bool {
        match self {
            Self::Open => false,
            Self::Closed => true,
            Self::OpenToCandidates => !matches!(payload, Payload::Probe { candidate: true, .. }),
        }
    }
}

impl Packet {
    /// Its wire format.
    pub fn format(&self) -> Format {
        self.seal.as_ref().map_or(Format::Plain, |seal| seal.format)
    }
}

impl Inbound {
    /// It is a key in a slot of the kernel's `ovpn`.
    fn has_slot(&self) -> bool {
        (self.engine, self.format) == (EngineKind::Kernel, Format::Ovpn)
    }
}

/// Whether packets are known by the addresses of both hosts alone.
fn is_bound(engine: EngineKind, format: Format) -> bool {
    engine == EngineKind::Kernel && format != Format::Ovpn
}
