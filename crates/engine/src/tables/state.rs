//! The tables that workers share: peers, paths, SAs, endpoints; and the commands that change them.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weft_crypto::{Format, PeerId, ReplayWindow};
use weft_io::keylog::KeyLog;
use weft_io::steer::Load;
use weft_io::udp::Remote;
use weft_path::{Endpoint, EngineCommand, EngineKind, InboundSa, Mac, OutboundSa, PathId, Vni};

use super::hash::{Slab, Table};
use super::lane::{Lane, Origin};
use super::networks::{NetworkNumber, Networks};
use super::sa::{Opening, Sealing};
use crate::error::{CommandError, EngineError};
use crate::stats::counters::{Count, Direction, Registry, SaCounters, SaName};

/// Lanes that one path may have.
pub const LANES_MAX: u16 = 256;
/// Inbound SAs of one host.
pub const INBOUND_SAS_MAX: usize = 65_536;
/// Endpoints of all networks.
pub const ENDPOINTS_MAX: usize = 1 << 20;
/// Peers that a host has paths or endpoints of.
pub const PEERS_MAX: usize = 4_096;

/// A peer, with the path to send to it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    /// The path in use.
    pub(crate) bound: Option<u32>,
    /// Dropped packets of the peer ([`Registry::dropped_of`]).
    pub(crate) dropped: Arc<Count>,
}

/// One path.
#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) id: PathId,
    pub(crate) peer: u32,
    /// The destination; known from the first outbound SA on.
    pub(crate) remote: Option<Remote>,
    /// The largest inner IP packet, in bytes.
    pub(crate) mtu: u16,
    /// By lane number.
    pub(crate) lanes: Vec<Option<Outbound>>,
    /// By lane number, those that had an SA in either direction.
    pub(crate) known: Vec<Lane>,
    /// This host answers on lanes beyond the first at the peer's lane port.
    pub(crate) responds: bool,
    inbound: usize,
}

impl Path {
    /// Whether frames may take the lane, if it has an SA.
    #[inline]
    pub(crate) fn is_open(&self, lane: usize) -> bool {
        // It may be heard of a moment before it is written down from where.
        let reaches = |known: &Lane| known.is_alive() && (!self.responds || known.source.is_some());
        lane == 0 || self.can_be_proven(lane) && self.known.get(lane).is_some_and(reaches)
    }

    /// Whether the peer answers dummies on a lane, so that it can be proven. The kernel engine does not, and may
    /// still send on it.
    #[inline]
    fn can_be_proven(&self, lane: usize) -> bool {
        let outbound = self.lanes.get(lane).and_then(Option::as_ref);
        outbound.is_some_and(|outbound| outbound.answers_dummies)
    }

    /// Whether the peer's lanes beyond the first have separate ports; the kernel engine sends all from one.
    #[inline]
    pub(crate) fn has_lane_ports(&self) -> bool {
        self.can_be_proven(0)
    }

    /// The source and destination of a lane's packets.
    #[inline]
    pub(crate) fn way(&self, lane: usize) -> Option<(Origin, &Remote)> {
        let data_port = self.responds || lane == 0;
        let from = Origin { lane: lane as u16, data_port, may_cut: false };
        let at_lane = self.responds && lane > 0;
        let to = if at_lane { &self.known.get(lane)?.source } else { &self.remote };
        Some((from, to.as_ref()?))
    }

    fn know(&mut self, lane: u16) {
        let lane = usize::from(lane);
        if self.known.len() <= lane {
            self.known.resize_with(lane + 1, Lane::default);
        }
    }
}

/// An outbound SA and its limits. Any worker may seal on it.
#[derive(Debug)]
pub(crate) struct Outbound {
    pub(crate) sa: Sealing,
    pub(crate) rco: bool,
    /// The peer's engine does.
    pub(crate) answers_dummies: bool,
    bytes: AtomicU64,
    /// The recent load of its lane, where the path has several.
    pub(crate) load: Load,
    pub(crate) packets_soft: u64,
    pub(crate) packets_hard: u64,
    pub(crate) bytes_soft: u64,
    pub(crate) bytes_hard: u64,
    near_reported: AtomicBool,
    exhausted_reported: AtomicBool,
    counters: Arc<SaCounters>,
}

impl Outbound {
    /// Bytes of frames sealed so far.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Counts a sealed frame.
    #[inline]
    pub(crate) fn sealed(&self, packets: u64, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
        self.counters.add_shared(packets, bytes);
    }

    /// True the first time.
    pub(crate) fn is_first_near(&self) -> bool {
        !self.near_reported.swap(true, Relaxed)
    }

    /// True the first time.
    pub(crate) fn is_first_exhausted(&self) -> bool {
        !self.exhausted_reported.swap(true, Relaxed)
    }
}

/// An inbound SA.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) spi: u32,
    pub(crate) key: Opening,
    /// Held by a worker while it opens packets of this SA, once for many. Normally only the lane's worker
    /// wants it. Others want it where helpers run, when workers come and go, and where the kernel does not
    /// steer by lane.
    pub(crate) window: Mutex<ReplayWindow>,
    pub(crate) peer: u32,
    pub(crate) path: u32,
    pub(crate) lane: u16,
    used: AtomicBool,
    /// Written by the holder of the window.
    pub(crate) counters: Arc<SaCounters>,
}

impl Inbound {
    /// The window, for this thread alone.
    #[inline]
    pub(crate) fn hold(&self) -> MutexGuard<'_, ReplayWindow> {
        // A thread that panicked left the window whole: it is updated last.
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True the first time.
    #[inline]
    pub(crate) fn is_first_use(&self) -> bool {
        !self.used.load(Relaxed) && !self.used.swap(true, Relaxed)
    }
}

/// All of it, for all workers.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) networks: Networks,
    pub(crate) peers: Slab<Peer>,
    pub(crate) paths: Slab<Path>,
    pub(crate) inbound: Slab<Inbound>,
    spis: Table<u32>,
    /// The peers of addresses, by [`NetworkNumber::key`].
    endpoints: Table<u32>,
    peer_numbers: HashMap<PeerId, u32>,
    /// The address that a peer dialled, where the routing table would take another.
    sources: HashMap<PeerId, IpAddr>,
    /// Whether this host opens a peer's lanes, where path choice has said so.
    opens: HashMap<PeerId, bool>,
    path_numbers: HashMap<PathId, u32>,
    lanes_begun: u64,
    /// Paths that carry less than the containers' MTU.
    narrow: usize,
    local: PeerId,
    default_mtu: u16,
    registry: Arc<Registry>,
    keylog: KeyLog,
}

impl State {
    /// Of a host that no peer id is greater than: it begins on every lane.
    #[cfg(any(test, feature = "alone"))]
    pub(crate) fn new(vni: Vni, default_mtu: u16, registry: Arc<Registry>, keylog: KeyLog) -> Self {
        Self::of_host(PeerId::from_bytes([0; 32]), vni, default_mtu, registry, keylog)
    }

    /// With this host's own peer id, and the network that it has from the beginning.
    pub(crate) fn of_host(
        local: PeerId,
        vni: Vni,
        default_mtu: u16,
        registry: Arc<Registry>,
        keylog: KeyLog,
    ) -> Self {
        Self {
            networks: Networks::new(vni),
            peers: Slab::new(),
            paths: Slab::new(),
            inbound: Slab::new(),
            spis: Table::new(),
            endpoints: Table::new(),
            peer_numbers: HashMap::new(),
            sources: HashMap::new(),
            opens: HashMap::new(),
            path_numbers: HashMap::new(),
            lanes_begun: 0,
            narrow: 0,
            local,
            default_mtu,
            registry,
            keylog,
        }
    }

    /// How many SAs have come for lanes that their workers are to prove.
    #[inline]
    pub(crate) const fn lanes_begun(&self) -> u64 {
        self.lanes_begun
    }

    /// Whether a path carries less than the containers' MTU.
    #[inline]
    pub(crate) const fn is_narrow(&self, path: &Path) -> bool {
        path.mtu < self.default_mtu
    }

    /// How many paths do.
    #[cfg(test)]
    pub(crate) const fn narrow_paths(&self) -> usize {
        self.narrow
    }

    /// The MTU of a peer's path in use, where it carries less than the containers' MTU.
    #[inline]
    pub(crate) fn narrow_mtu(&self, peer: u32) -> Option<u16> {
        if self.narrow == 0 {
            return None;
        }
        let path = self.paths.get(self.peers.get(peer)?.bound?)?;
        self.is_narrow(path).then_some(path.mtu)
    }

    /// A lane beyond the first.
    #[inline]
    pub(crate) fn lane(&self, path: u32, lane: u16) -> Option<&Lane> {
        if lane == 0 {
            return None;
        }
        self.paths.get(path)?.known.get(usize::from(lane))
    }

    /// The current source of the peer's packets on a lane.
    pub(crate) fn set_lane_source(&mut self, path: u32, lane: u16, source: Remote) {
        let path = self.paths.get_mut(path);
        let Some(path) = path else { return };
        let from = path.remote.and_then(|remote| of_family(remote.source(), &source));
        if let Some(lane) = path.known.get_mut(usize::from(lane)) {
            lane.source = Some(source.with_source(from));
        }
    }

    /// The number of the inbound SA with this SPI.
    #[inline]
    pub(crate) fn inbound_of(&self, spi: u32) -> Option<u32> {
        self.spis.get(spi.into())
    }

    /// The number of the peer at which an endpoint lives, by [`NetworkNumber::key`].
    #[inline]
    pub(crate) fn peer_of(&self, endpoint: u64) -> Option<u32> {
        self.endpoints.get(endpoint)
    }

    /// Forgets a network with its endpoints; returns its number.
    ///
    /// # Errors
    /// There is no such network, or it is the first.
    pub(crate) fn remove_network(&mut self, vni: Vni) -> Result<NetworkNumber, EngineError> {
        let number = self.networks.remove(vni)?;
        self.endpoints.retain(|key, _| NetworkNumber::of_key(key).0 != number);
        Ok(number)
    }

    /// The number of a path.
    pub(crate) fn path_number(&self, path: PathId) -> Option<u32> {
        self.path_numbers.get(&path).copied()
    }

    /// Carries out all commands that change the tables; the two that send are a worker's.
    ///
    /// `resolve` turns an address into the socket's form.
    ///
    /// # Errors
    /// [`CommandError`]; then nothing has changed, but for endpoints added before a table was full.
    pub(crate) fn apply(
        &mut self,
        command: EngineCommand,
        resolve: impl Fn(SocketAddr) -> std::io::Result<Remote>,
    ) -> Result<(), CommandError> {
        match command {
            EngineCommand::InstallInbound { peer, path, sa, .. } => {
                self.install_inbound(peer, path, &sa)
            }
            EngineCommand::RemoveInbound { spi } => {
                self.remove_inbound(spi);
                Ok(())
            }
            EngineCommand::InstallOutbound { peer, path, sa, remote, .. } => {
                let remote = resolve(remote).map_err(|_| CommandError::Unreachable { remote })?;
                let remote = self.with_source_of(remote, peer);
                self.install_outbound(peer, path, &sa, remote)
            }
            EngineCommand::RemoveOutbound { path } => self.remove_outbound(path),
            EngineCommand::BindPath { peer, path } => self.bind(peer, path),
            EngineCommand::SetPathMtu { path, mtu } => {
                let path = self.path_mut(path)?;
                let before = std::mem::replace(&mut path.mtu, mtu);
                self.narrow += usize::from(mtu < self.default_mtu);
                self.narrow -= usize::from(before < self.default_mtu);
                Ok(())
            }
            EngineCommand::SetRemote { path, remote } => {
                let remote = resolve(remote).map_err(|_| CommandError::Unreachable { remote })?;
                let path = self.path_mut(path)?;
                let source = path.remote.and_then(|before| of_family(before.source(), &remote));
                path.remote = Some(remote.with_source(source));
                Ok(())
            }
            EngineCommand::SetSource { peer, source } => {
                self.set_source(peer, source);
                Ok(())
            }
            EngineCommand::OpenLanes { peer, opens } => {
                self.open_lanes(peer, opens);
                Ok(())
            }
            EngineCommand::SetEndpoints { vni, add, remove } => {
                self.set_endpoints(vni, &add, &remove)
            }
            EngineCommand::SetBroadcast { vni, peers } => self.set_broadcast(vni, &peers),
            EngineCommand::RemovePeer { peer } => {
                self.remove_peer(peer);
                Ok(())
            }
            // A plain path is the kernel engine's, and is not sent here.
            EngineCommand::SendProbe { .. }
            | EngineCommand::SendKeepalive { .. }
            | EngineCommand::InstallPlain { .. } => Ok(()),
        }
    }

    /// From where all that goes to a peer is sent.
    fn set_source(&mut self, peer: PeerId, source: Option<IpAddr>) {
        match source {
            Some(source) => drop(self.sources.insert(peer, source)),
            None => drop(self.sources.remove(&peer)),
        }
        let Some(&number) = self.peer_numbers.get(&peer) else { return };
        for (_, path) in self.paths.iter_mut().filter(|(_, path)| path.peer == number) {
            let lanes = path.known.iter_mut().filter_map(|lane| lane.source.as_mut());
            for remote in path.remote.iter_mut().chain(lanes) {
                *remote = remote.with_source(of_family(source, remote));
            }
        }
    }

    /// This host, or the peer, opens the peer's lanes from now on: none is proven.
    fn open_lanes(&mut self, peer: PeerId, opens: bool) {
        self.opens.insert(peer, opens);
        let Some(&number) = self.peer_numbers.get(&peer) else { return };
        for (_, path) in self.paths.iter_mut().filter(|(_, path)| path.peer == number) {
            path.responds = !opens;
            path.known.fill_with(Lane::default);
            for (known, outbound) in path.known.iter().zip(&path.lanes).skip(1) {
                if outbound.as_ref().is_some_and(|outbound| outbound.answers_dummies) {
                    known.ask();
                    self.lanes_begun += 1;
                }
            }
        }
    }

    fn with_source_of(&self, remote: Remote, peer: PeerId) -> Remote {
        remote.with_source(of_family(self.sources.get(&peer).copied(), &remote))
    }

    fn install_inbound(
        &mut self,
        peer: PeerId,
        path: PathId,
        sa: &InboundSa,
    ) -> Result<(), CommandError> {
        if self.spis.get(sa.spi.into()).is_some() {
            return Err(CommandError::SpiInUse { spi: sa.spi });
        }
        check_lane(sa.lane)?;
        if self.spis.len() >= INBOUND_SAS_MAX {
            return Err(CommandError::TableFull { table: "inbound SAs" });
        }
        let (peer_number, path_number) = self.path_of(peer, path)?;
        if sa.key.format() == Format::Esp {
            self.keylog.note("in", sa.spi, sa.cipher, &sa.key);
        }
        let counters = self.registry.add(SaName {
            peer,
            path,
            lane: sa.lane,
            direction: Direction::Inbound,
            spi: sa.spi,
        });
        let number = self.inbound.insert(Inbound {
            spi: sa.spi,
            key: Opening::new(sa, &self.local, &peer),
            window: Mutex::new(ReplayWindow::new()),
            peer: peer_number,
            path: path_number,
            lane: sa.lane,
            used: AtomicBool::new(false),
            counters,
        });
        self.spis.insert(sa.spi.into(), number);
        if let Some(path) = self.paths.get_mut(path_number) {
            path.inbound += 1;
            path.know(sa.lane);
        }
        Ok(())
    }

    fn install_outbound(
        &mut self,
        peer: PeerId,
        path: PathId,
        sa: &OutboundSa,
        remote: Remote,
    ) -> Result<(), CommandError> {
        check_lane(sa.lane)?;
        let (_, path_number) = self.path_of(peer, path)?;
        if sa.key.format() == Format::Esp {
            self.keylog.note("out", sa.spi, sa.cipher, &sa.key);
        }
        let name = |spi| SaName { peer, path, lane: sa.lane, direction: Direction::Outbound, spi };
        let outbound = Outbound {
            sa: Sealing::new(sa, &self.local, &peer),
            rco: sa.rco,
            answers_dummies: sa.remote_engine == EngineKind::Userspace,
            bytes: AtomicU64::new(0),
            load: Load::default(),
            packets_soft: sa.packets_soft,
            packets_hard: sa.packets_hard,
            bytes_soft: sa.bytes_soft,
            bytes_hard: sa.bytes_hard,
            near_reported: AtomicBool::new(false),
            exhausted_reported: AtomicBool::new(false),
            counters: self.registry.add(name(sa.spi)),
        };
        let Some(entry) = self.paths.get_mut(path_number) else { return Ok(()) };
        entry.remote = Some(remote);
        entry.know(sa.lane);
        let lane = usize::from(sa.lane);
        if entry.lanes.len() <= lane {
            entry.lanes.resize_with(lane + 1, || None);
        }
        if let Some(known) = entry.known.get(lane)
            && lane > 0
            && outbound.answers_dummies
            && !known.is_alive()
        {
            known.ask();
            self.lanes_begun += 1;
        }
        if let Some(old) = entry.lanes[lane].replace(outbound)
            && old.sa.spi() != sa.spi
        {
            self.registry.remove(name(old.sa.spi()));
        }
        Ok(())
    }

    fn remove_inbound(&mut self, spi: u32) {
        let Some(number) = self.spis.remove(spi.into()) else { return };
        let Some(inbound) = self.inbound.remove(number) else { return };
        let Some(path) = self.paths.get_mut(inbound.path) else { return };
        path.inbound = path.inbound.saturating_sub(1);
        let (path, lane) = (path.id, inbound.lane);
        if let Some(peer) = self.peers.get(inbound.peer).map(|peer| peer.id) {
            self.registry.remove(SaName { peer, path, lane, direction: Direction::Inbound, spi });
        }
        self.forget_unused(inbound.path);
    }

    fn remove_outbound(&mut self, path: PathId) -> Result<(), CommandError> {
        let number = self.path_number(path).ok_or(CommandError::UnknownPath { path })?;
        let Some(entry) = self.paths.get_mut(number) else { return Ok(()) };
        let lanes = std::mem::take(&mut entry.lanes);
        entry.known.iter().for_each(Lane::forget_told);
        if let Some(peer) = self.peers.get(entry.peer).map(|peer| peer.id) {
            for (lane, old) in lanes.iter().enumerate() {
                let Some(old) = old else { continue };
                self.registry.remove(SaName {
                    peer,
                    path,
                    lane: lane as u16,
                    direction: Direction::Outbound,
                    spi: old.sa.spi(),
                });
            }
        }
        self.forget_unused(number);
        Ok(())
    }

    fn bind(&mut self, peer: PeerId, path: Option<PathId>) -> Result<(), CommandError> {
        let bound = match path {
            None => None,
            Some(path) => {
                let number = self.path_number(path).ok_or(CommandError::UnknownPath { path })?;
                let entry = self.paths.get(number).ok_or(CommandError::UnknownPath { path })?;
                if entry.lanes.iter().all(Option::is_none) {
                    return Err(CommandError::NoOutboundSa { path });
                }
                Some(number)
            }
        };
        let number = self.peer_number(peer)?;
        let Some(entry) = self.peers.get_mut(number) else { return Ok(()) };
        let before = std::mem::replace(&mut entry.bound, bound);
        if let Some(before) = before {
            self.forget_unused(before);
        }
        Ok(())
    }

    fn set_endpoints(
        &mut self,
        vni: Vni,
        add: &[(Endpoint, PeerId)],
        remove: &[Mac],
    ) -> Result<(), CommandError> {
        let network = self.networks.by_vni(vni)?.id.number;
        for mac in remove {
            self.endpoints.remove(network.key(mac.0));
        }
        for (endpoint, peer) in add {
            let key = network.key(endpoint.mac.0);
            // One that moves to another peer takes no more room.
            if self.endpoints.len() >= ENDPOINTS_MAX && self.endpoints.get(key).is_none() {
                return Err(CommandError::TableFull { table: "endpoints" });
            }
            let number = self.peer_number(*peer)?;
            self.endpoints.insert(key, number);
        }
        Ok(())
    }

    fn set_broadcast(&mut self, vni: Vni, peers: &[PeerId]) -> Result<(), CommandError> {
        self.networks.by_vni(vni)?;
        let numbers: Result<Vec<u32>, _> =
            peers.iter().map(|peer| self.peer_number(*peer)).collect();
        self.networks.set_broadcast(vni, numbers?)
    }

    fn remove_peer(&mut self, peer: PeerId) {
        self.sources.remove(&peer);
        self.opens.remove(&peer);
        let Some(number) = self.peer_numbers.remove(&peer) else { return };
        self.endpoints.retain(|_, at| at != number);
        self.networks.forget_peer(number);
        let sas: Vec<u32> =
            self.inbound.iter().filter(|(_, sa)| sa.peer == number).map(|(i, _)| i).collect();
        for sa in sas {
            if let Some(gone) = self.inbound.remove(sa) {
                self.spis.remove(gone.spi.into());
            }
        }
        let paths: Vec<u32> =
            self.paths.iter().filter(|(_, path)| path.peer == number).map(|(i, _)| i).collect();
        for path in paths {
            self.remove_path(path);
        }
        self.peers.remove(number);
        self.registry.forget(peer);
    }

    fn path_mut(&mut self, path: PathId) -> Result<&mut Path, CommandError> {
        let unknown = CommandError::UnknownPath { path };
        let number = self.path_number(path).ok_or(unknown.clone())?;
        self.paths.get_mut(number).ok_or(unknown)
    }

    /// The numbers of a peer and of its path, which are made if they are new.
    fn path_of(&mut self, peer: PeerId, path: PathId) -> Result<(u32, u32), CommandError> {
        let peer_number = self.peer_number(peer)?;
        if let Some(number) = self.path_number(path) {
            let of = self.paths.get(number).map(|path| path.peer);
            if of != Some(peer_number) {
                return Err(CommandError::PathOfAnotherPeer { path });
            }
            return Ok((peer_number, number));
        }
        let number = self.paths.insert(Path {
            id: path,
            peer: peer_number,
            remote: None,
            mtu: self.default_mtu,
            lanes: Vec::new(),
            known: Vec::new(),
            responds: self.opens.get(&peer).map_or(self.local > peer, |opens| !opens),
            inbound: 0,
        });
        self.path_numbers.insert(path, number);
        Ok((peer_number, number))
    }

    /// Counts a peer's dropped packets, beside the reason's counter.
    #[cold]
    pub(crate) fn note_dropped(&self, peer: u32, packets: u64) {
        if let Some(peer) = self.peers.get(peer) {
            peer.dropped.add_shared(packets);
        }
    }

    /// Likewise of a path's.
    #[cold]
    pub(crate) fn note_dropped_on(&self, path: u32, packets: u64) {
        if let Some(path) = self.paths.get(path) {
            self.note_dropped(path.peer, packets);
        }
    }

    fn peer_number(&mut self, id: PeerId) -> Result<u32, CommandError> {
        if let Some(number) = self.peer_numbers.get(&id) {
            return Ok(*number);
        }
        if self.peer_numbers.len() >= PEERS_MAX {
            return Err(CommandError::TableFull { table: "peers" });
        }
        let dropped = self.registry.dropped_of(id);
        let number = self.peers.insert(Peer { id, bound: None, dropped });
        self.peer_numbers.insert(id, number);
        Ok(number)
    }

    /// Forgets a path that has no SA and carries nothing.
    fn forget_unused(&mut self, number: u32) {
        let Some(path) = self.paths.get(number) else { return };
        let bound = self.peers.get(path.peer).is_some_and(|peer| peer.bound == Some(number));
        if path.inbound == 0 && path.lanes.iter().all(Option::is_none) && !bound {
            self.remove_path(number);
        }
    }

    fn remove_path(&mut self, number: u32) {
        let Some(gone) = self.paths.remove(number) else { return };
        self.path_numbers.remove(&gone.id);
        self.narrow -= usize::from(self.is_narrow(&gone));
    }
}

const fn check_lane(lane: u16) -> Result<(), CommandError> {
    if lane < LANES_MAX {
        Ok(())
    } else {
        Err(CommandError::TableFull { table: "lanes of a path" })
    }
}

/// A source that a datagram to this place can have.
fn of_family(source: Option<IpAddr>, to: &Remote) -> Option<IpAddr> {
    source.filter(|source| source.is_ipv4() == to.address().is_ipv4())
}

#[cfg(test)]
mod tests;
