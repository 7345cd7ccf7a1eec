//! The switch's tables: ports, peers, and where each MAC is. Pure: time is an argument.
//!
//! Every change is recorded as a [`Change`], so that exactly the flows whose decision read the changed entry
//! are decided again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use weft_crypto::PeerId;
use weft_path::{Mac, Vni};

use super::limits::Limits;
use crate::{error::KernelError, switch::port_lock::PortLock};

/// The most networks of one switch.
pub const NETWORKS_MAX: usize = 256;
/// The most MACs learned from one local port. A container's own MAC is pinned, so these are bridged or made
/// up by it.
pub const LEARNED_PER_PORT_MAX: usize = 256;
/// The most MACs that are learned from all local ports.
pub const LEARNED_MAX: usize = 8192;
/// How long a learned MAC is kept without a flow from it, in milliseconds: as long as a Linux bridge
/// keeps one.
pub const LEARNED_AGE_MS: u64 = 300_000;
/// How long a learned MAC stays on a port before another port can take it, in milliseconds. Two ports that
/// use one MAC must not make the switch rewrite flows endlessly.
pub const MOVE_HOLD_MS: u64 = 1_000;
/// The most locks of ports, as many as a host can have endpoints.
pub const LOCKS_MAX: usize = 4_096;
/// The highest number that a port of a datapath can have (DP_MAX_PORTS - 1).
const PORT_NUMBER_MAX: u32 = 65_534;

/// How frames for a peer leave this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Via {
    /// Not at all: no path. Its frames are dropped and counted.
    #[default]
    None,
    /// By the vector engine's TAP.
    Tap,
    /// By the kernel's VXLAN tunnel.
    Tunnel {
        /// The peer's underlay address.
        remote: IpAddr,
        /// This host's underlay address; the routing table's choice if `None`.
        local: Option<IpAddr>,
    },
}

/// The kind of port that a frame arrived by, with the network that the port belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum PortKind {
    /// A container's, the host's own, or one added by another program.
    Local(Vni),
    /// The vector engine's for this network.
    Tap(Vni),
    /// The VXLAN tunnel's, which all networks share.
    Tunnel,
    /// One of ours that an earlier run left. Nothing passes it until somebody says what it is.
    Unclaimed,
}

impl PortKind {
    /// The network of all frames that arrive by such a port, if the port has one.
    pub(super) fn network(self) -> Option<Vni> {
        match self {
            Self::Local(vni) | Self::Tap(vni) => Some(vni),
            Self::Tunnel | Self::Unclaimed => None,
        }
    }
}

/// An entry that a decision has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Change {
    /// The port of this number: whether it is there and of what kind.
    Port(u32),
    /// Whether the switch carries this network.
    Network(Vni),
    /// The set of a network's local ports.
    LocalPorts(Vni),
    /// The number of the tunnel's port.
    Tunnel,
    /// The number of a network's TAP port.
    Tap(Vni),
    /// The place of a MAC in a network.
    Mac(Vni, Mac),
    /// How frames for a peer leave.
    Peer(PeerId),
    /// The receivers of a network's broadcasts.
    Broadcast(Vni),
    /// Whether tunnel packets from this address are accepted.
    Source(IpAddr),
    /// How many frames to groups this port may send to peers.
    Limit(u32),
    /// The lock of this port.
    Lock(u32),
}

/// The place of a MAC in a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Unknown,
    /// On this host by an attachment; `None` while its port is missing.
    Pinned(Option<u32>),
    /// On this host, learned from a frame's source.
    Learned(u32),
    Remote(PeerId),
}

#[derive(Debug, Clone, Default)]
struct Peer {
    via: Via,
    /// Underlay addresses that its tunnel packets may come from, besides that of `via`.
    sources: Vec<IpAddr>,
    /// The address of its last tunnel. Frames in flight from it are still accepted when the peer moves to
    /// another engine.
    last: Option<IpAddr>,
}

impl Peer {
    fn accepts(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.sources.iter().copied().chain(self.last)
    }
}

#[derive(Debug, Clone, Copy)]
struct Learned {
    port: u32,
    since_ms: u64,
    seen_ms: u64,
}

#[derive(Debug, Clone)]
struct Port {
    name: String,
    kind: PortKind,
}

#[derive(Debug, Clone, Default)]
struct Network {
    tap: Option<u32>,
    /// The peers on the tunnel that get its broadcasts; `None` for all.
    receivers: Option<BTreeSet<PeerId>>,
}

/// The tables of one switch. Networks may have the same MACs, so each MAC stands with its network.
#[derive(Debug, Clone)]
pub(super) struct Tables {
    networks: BTreeMap<Vni, Network>,
    ports: BTreeMap<u32, Port>,
    numbers: HashMap<String, u32>,
    /// The number that was last given to a new port.
    last_number: u32,
    tunnel: Option<u32>,
    pinned: HashMap<(Vni, Mac), String>,
    /// By the name of the port, which may be missing.
    locks: HashMap<String, PortLock>,
    learned: HashMap<(Vni, Mac), Learned>,
    learned_of: HashMap<u32, usize>,
    remote: HashMap<(Vni, Mac), PeerId>,
    peers: BTreeMap<PeerId, Peer>,
    sources: HashMap<IpAddr, usize>,
    limits: Limits,
    changes: BTreeSet<Change>,
}

impl Tables {
    /// The tables of a switch with this network. All peers get its broadcasts.
    pub(super) fn new(first: Vni) -> Self {
        Self {
            networks: [(first, Network::default())].into(),
            ports: BTreeMap::new(),
            numbers: HashMap::new(),
            last_number: 0,
            tunnel: None,
            pinned: HashMap::new(),
            locks: HashMap::new(),
            learned: HashMap::new(),
            learned_of: HashMap::new(),
            remote: HashMap::new(),
            peers: BTreeMap::new(),
            sources: HashMap::new(),
            limits: Limits::default(),
            changes: BTreeSet::new(),
        }
    }

    /// Returns the changes since the last call.
    pub(super) fn take_changes(&mut self) -> BTreeSet<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The switch carries this network from now on. No peer gets its broadcasts yet.
    pub(super) fn add_network(&mut self, vni: Vni) {
        if self.has_network(vni) {
            return;
        }
        let new = Network { tap: None, receivers: Some(BTreeSet::new()) };
        self.networks.insert(vni, new);
        self.changes.insert(Change::Network(vni));
    }

    /// Forgets a network with its ports and all that is known about its MACs.
    pub(super) fn remove_network(&mut self, vni: Vni) {
        if self.networks.remove(&vni).is_none() {
            return;
        }
        self.changes.insert(Change::Network(vni));
        // Learned addresses go with the ports.
        for (number, _) in self.ports_of(vni) {
            self.remove_port(number);
        }
        for mac in macs_of(self.pinned.keys(), vni) {
            self.pin(vni, mac, None);
        }
        for mac in macs_of(self.remote.keys(), vni) {
            self.set_remote(vni, mac, None);
        }
    }

    /// The peers on the tunnel that get a network's broadcasts; `None` for all.
    pub(super) fn set_receivers(&mut self, vni: Vni, receivers: Option<BTreeSet<PeerId>>) {
        if let Some(network) = self.networks.get_mut(&vni)
            && network.receivers != receivers
        {
            network.receivers = receivers;
            self.changes.insert(Change::Broadcast(vni));
        }
    }

    /// A number for a new port. Numbers are given in turn: flows may still name one that has just become
    /// free, and would send frames of another network to the new port.
    pub(super) fn next_number(&mut self) -> u32 {
        for _ in 0..PORT_NUMBER_MAX {
            self.last_number = self.last_number % PORT_NUMBER_MAX + 1;
            if !self.ports.contains_key(&self.last_number) {
                break;
            }
        }
        self.last_number
    }

    /// A port is there under this number.
    pub(super) fn add_port(&mut self, number: u32, name: &str, kind: PortKind) {
        if self.ports.get(&number).is_some_and(|port| port.name == name && port.kind == kind) {
            return;
        }
        self.remove_port(number);
        if let Some(before) = self.numbers.get(name).copied() {
            self.remove_port(before);
        }
        self.numbers.insert(name.to_owned(), number);
        self.ports.insert(number, Port { name: name.to_owned(), kind });
        match kind {
            PortKind::Tap(vni) => self.set_tap(vni, |_| Some(number)),
            PortKind::Tunnel => self.tunnel = Some(number),
            PortKind::Local(_) => self.limits.add(number),
            PortKind::Unclaimed => {}
        }
        self.port_changed(number, name, kind);
    }

    /// Removes the port of this number and the MACs learned from it.
    pub(super) fn remove_port(&mut self, number: u32) {
        let Some(port) = self.ports.remove(&number) else { return };
        if self.numbers.get(&port.name) == Some(&number) {
            self.numbers.remove(&port.name);
        }
        self.limits.remove(number);
        if let PortKind::Tap(vni) = port.kind {
            self.set_tap(vni, |tap| tap.filter(|tap| *tap != number));
        }
        self.tunnel = self.tunnel.filter(|tunnel| *tunnel != number);
        let gone = self.learned.iter().filter(|(_, learned)| learned.port == number);
        for (vni, mac) in gone.map(|(at, _)| *at).collect::<Vec<_>>() {
            self.unlearn(vni, mac);
        }
        self.port_changed(number, &port.name, port.kind);
    }

    fn set_tap(&mut self, vni: Vni, set: impl FnOnce(Option<u32>) -> Option<u32>) {
        if let Some(network) = self.networks.get_mut(&vni) {
            network.tap = set(network.tap);
        }
    }

    fn port_changed(&mut self, number: u32, name: &str, kind: PortKind) {
        self.changes.insert(Change::Port(number));
        self.changes.extend(match kind {
            PortKind::Local(vni) => Some(Change::LocalPorts(vni)),
            PortKind::Tap(vni) => Some(Change::Tap(vni)),
            PortKind::Tunnel => Some(Change::Tunnel),
            PortKind::Unclaimed => None,
        });
        let pinned = self.pinned.iter().filter(|(_, port)| *port == name);
        self.changes.extend(pinned.map(|((vni, mac), _)| Change::Mac(*vni, *mac)));
    }

    /// This MAC of a network is on the port of this name and nowhere else, or no longer (`None`). A port of
    /// another network counts as missing.
    pub(super) fn pin(&mut self, vni: Vni, mac: Mac, port: Option<&str>) {
        let before = match port {
            Some(port) => self.pinned.insert((vni, mac), port.to_owned()),
            None => self.pinned.remove(&(vni, mac)),
        };
        if before.as_deref() != port {
            self.unlearn(vni, mac);
            self.changes.insert(Change::Mac(vni, mac));
        }
    }

    /// Forgets the MACs pinned to a port.
    pub(super) fn unpin_port(&mut self, name: &str) {
        let pinned = self.pinned.iter().filter(|(_, port)| *port == name);
        for (vni, mac) in pinned.map(|(at, _)| *at).collect::<Vec<_>>() {
            self.pin(vni, mac, None);
        }
    }

    /// Locks the port of this name, whether it is there or not. The lock stays when the port goes.
    ///
    /// # Errors
    /// [`KernelError::LockTooLong`], and [`KernelError::TableFull`] beyond [`LOCKS_MAX`] locks. An earlier lock of the
    /// port stays then.
    pub(super) fn set_lock(&mut self, name: &str, lock: PortLock) -> Result<(), KernelError> {
        lock.check(name)?;
        if !self.locks.contains_key(name) && self.locks.len() >= LOCKS_MAX {
            return Err(KernelError::TableFull {
                table: "locks of ports".into(),
                limit: LOCKS_MAX,
            });
        }
        let mac = Mac(lock.mac);
        if self.locks.get(name) == Some(&lock) {
            return Ok(());
        }
        self.locks.insert(name.to_owned(), lock);
        if let Some(number) = self.port_number(name) {
            self.changes.insert(Change::Lock(number));
            // Frames to what the port has made up would go to it for a while.
            let of_it = self.learned.iter().filter(|(_, learned)| learned.port == number);
            let made_up = of_it.map(|(at, _)| *at).filter(|(_, learned)| *learned != mac);
            for (vni, mac) in made_up.collect::<Vec<_>>() {
                self.unlearn(vni, mac);
            }
        }
        Ok(())
    }

    /// The port of this name may send what it likes from now on.
    pub(super) fn remove_lock(&mut self, name: &str) {
        if self.locks.remove(name).is_some()
            && let Some(number) = self.port_number(name)
        {
            self.changes.insert(Change::Lock(number));
        }
    }

    /// This MAC of a network is behind a peer, or no longer.
    pub(super) fn set_remote(&mut self, vni: Vni, mac: Mac, peer: Option<PeerId>) {
        let before = match peer {
            Some(peer) => self.remote.insert((vni, mac), peer),
            None => self.remote.remove(&(vni, mac)),
        };
        if before != peer {
            self.unlearn(vni, mac);
            self.changes.insert(Change::Mac(vni, mac));
        }
    }

    /// How frames for a peer leave. An address given here is accepted as its source until another
    /// is given or the peer is removed.
    pub(super) fn set_peer(&mut self, id: PeerId, via: Via) {
        self.edit_peer(id, |peer| {
            peer.via = via;
            if let Via::Tunnel { remote, .. } = via {
                peer.last = Some(remote);
            }
        });
    }

    /// Further addresses that a peer's tunnel packets may come from.
    pub(super) fn set_sources(&mut self, id: PeerId, sources: &[IpAddr]) {
        self.edit_peer(id, |peer| peer.sources = sources.to_vec());
    }

    /// Forgets a peer and the MACs behind it.
    pub(super) fn remove_peer(&mut self, id: PeerId) {
        self.edit_peer(id, |peer| *peer = Peer::default());
        self.peers.remove(&id);
        let behind = self.remote.iter().filter(|(_, peer)| **peer == id);
        for (vni, mac) in behind.map(|(at, _)| *at).collect::<Vec<_>>() {
            self.set_remote(vni, mac, None);
        }
    }

    fn edit_peer(&mut self, id: PeerId, edit: impl FnOnce(&mut Peer)) {
        let peer = self.peers.entry(id).or_default();
        let before = peer.clone();
        edit(peer);
        let after = peer.clone();
        if before.via != after.via {
            self.changes.insert(Change::Peer(id));
            let by_tap = [before.via, after.via].contains(&Via::Tap);
            let concerned = |(_, network): &(&Vni, &Network)| by_tap || network.tells(id);
            let concerned = self.networks.iter().filter(concerned);
            self.changes.extend(concerned.map(|(vni, _)| Change::Broadcast(*vni)));
        }
        for address in after.accepts() {
            *self.sources.entry(address).or_default() += 1;
            self.changes.insert(Change::Source(address));
        }
        for address in before.accepts() {
            let Some(count) = self.sources.get_mut(&address) else { continue };
            *count -= 1;
            if *count == 0 {
                self.sources.remove(&address);
            }
            self.changes.insert(Change::Source(address));
        }
    }

    /// Learns that a frame from `mac` arrived by a local port, whose network it is in. False if the MAC is not
    /// learned there: it belongs elsewhere, moved a moment ago, the port is locked to another, or there are too many.
    pub(super) fn learn(&mut self, mac: Mac, port: u32, now_ms: u64) -> bool {
        let Some(PortKind::Local(vni)) = self.port_kind(port) else { return false };
        if self.lock_of(port).is_some_and(|lock| lock.mac != mac.0) {
            return false;
        }
        match self.place(vni, mac) {
            Place::Pinned(at) => return at == Some(port),
            Place::Remote(_) => return false,
            Place::Learned(at) if at == port => {
                if let Some(learned) = self.learned.get_mut(&(vni, mac)) {
                    learned.seen_ms = now_ms;
                }
                return true;
            }
            Place::Learned(_) | Place::Unknown => {}
        }
        let held = |learned: &Learned| now_ms < learned.since_ms.saturating_add(MOVE_HOLD_MS);
        let here = self.learned_of.get(&port).copied().unwrap_or_default();
        let full = here >= LEARNED_PER_PORT_MAX || self.learned.len() >= LEARNED_MAX;
        if is_group(mac) || full || self.learned.get(&(vni, mac)).is_some_and(held) {
            return false;
        }
        self.unlearn(vni, mac);
        self.learned.insert((vni, mac), Learned { port, since_ms: now_ms, seen_ms: now_ms });
        *self.learned_of.entry(port).or_default() += 1;
        self.changes.insert(Change::Mac(vni, mac));
        true
    }

    /// Forgets learned MACs that have been silent too long; `busy` returns which still have flows.
    pub(super) fn age(&mut self, now_ms: u64, busy: impl Fn(Vni, Mac) -> bool) {
        let mut silent = Vec::new();
        for ((vni, mac), learned) in &mut self.learned {
            if busy(*vni, *mac) {
                learned.seen_ms = now_ms;
            } else if now_ms >= learned.seen_ms.saturating_add(LEARNED_AGE_MS) {
                silent.push((*vni, *mac));
            }
        }
        for (vni, mac) in silent {
            self.unlearn(vni, mac);
        }
    }

    fn unlearn(&mut self, vni: Vni, mac: Mac) {
        let Some(learned) = self.learned.remove(&(vni, mac)) else { return };
        if let Some(count) = self.learned_of.get_mut(&learned.port) {
            *count -= 1;
            if *count == 0 {
                self.learned_of.remove(&learned.port);
            }
        }
        self.changes.insert(Change::Mac(vni, mac));
    }

    /// The place of a MAC in a network. A MAC attached here is here, regardless of other hosts' claims. A frame
    /// never moves another host's MAC to this host.
    pub(super) fn place(&self, vni: Vni, mac: Mac) -> Place {
        if let Some(name) = self.pinned.get(&(vni, mac)) {
            let of_network = |port: &u32| self.port_kind(*port) == Some(PortKind::Local(vni));
            return Place::Pinned(self.port_number(name).filter(of_network));
        }
        if let Some(peer) = self.remote.get(&(vni, mac)) {
            return Place::Remote(*peer);
        }
        self.learned.get(&(vni, mac)).map_or(Place::Unknown, |learned| Place::Learned(learned.port))
    }

    pub(super) fn port_kind(&self, number: u32) -> Option<PortKind> {
        self.ports.get(&number).map(|port| port.kind)
    }

    pub(super) fn port_number(&self, name: &str) -> Option<u32> {
        self.numbers.get(name).copied()
    }

    /// The lock of the port with this number.
    pub(super) fn lock_of(&self, number: u32) -> Option<&PortLock> {
        self.locks.get(&self.ports.get(&number)?.name)
    }

    pub(super) fn ports(&self) -> impl Iterator<Item = (u32, &str)> {
        self.ports.iter().map(|(number, port)| (*number, port.name.as_str()))
    }

    /// The ports of a network, without the tunnel's.
    pub(super) fn ports_of(&self, vni: Vni) -> Vec<(u32, String)> {
        let of = |(_, port): &(&u32, &Port)| port.kind.network() == Some(vni);
        let of = self.ports.iter().filter(of);
        of.map(|(number, port)| (*number, port.name.clone())).collect()
    }

    /// A network's local ports by number.
    pub(super) fn local_ports(&self, vni: Vni) -> impl Iterator<Item = u32> + '_ {
        let local = move |(_, port): &(&u32, &Port)| port.kind == PortKind::Local(vni);
        self.ports.iter().filter(local).map(|(number, _)| *number)
    }

    pub(super) fn has_network(&self, vni: Vni) -> bool {
        self.networks.contains_key(&vni)
    }

    pub(super) fn networks_len(&self) -> usize {
        self.networks.len()
    }

    pub(super) fn tap(&self, vni: Vni) -> Option<u32> {
        self.networks.get(&vni)?.tap
    }

    pub(super) fn tunnel(&self) -> Option<u32> {
        self.tunnel
    }

    pub(super) fn via(&self, peer: PeerId) -> Via {
        self.peers.get(&peer).map(|peer| peer.via).unwrap_or_default()
    }

    /// How broadcasts of a network leave for each of their receivers. The vector engine knows which of its peers
    /// get them, so each of these counts.
    pub(super) fn vias(&self, vni: Vni) -> impl Iterator<Item = Via> + '_ {
        let network = self.networks.get(&vni);
        let told = move |(id, peer): &(&PeerId, &Peer)| {
            network.is_some_and(|network| peer.via == Via::Tap || network.tells(**id))
        };
        self.peers.iter().filter(told).map(|(_, peer)| peer.via)
    }

    /// Whether tunnel packets from this address belong to a peer.
    pub(super) fn is_source(&self, address: IpAddr) -> bool {
        self.sources.contains_key(&address)
    }

    /// Whether this peer's tunnel packets come from this address.
    pub(super) fn sends_from(&self, peer: PeerId, address: IpAddr) -> bool {
        self.peers.get(&peer).is_some_and(|peer| peer.accepts().any(|of| of == address))
    }

    /// How many frames to groups local ports may send to peers.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Edits the limits, and records a change for each port that `edit` returns: flows depend on its pause.
    pub(super) fn edit_limits<T>(&mut self, edit: impl FnOnce(&mut Limits) -> T)
    where
        T: IntoIterator<Item = u32>,
    {
        let changed = edit(&mut self.limits);
        self.changes.extend(changed.into_iter().map(Change::Limit));
    }

    /// How many MACs are learned.
    pub(super) fn learned_len(&self) -> usize {
        self.learned.len()
    }
}

impl Network {
    /// Whether a peer on the tunnel gets its broadcasts.
    fn tells(&self, peer: PeerId) -> bool {
        self.receivers.as_ref().is_none_or(|receivers| receivers.contains(&peer))
    }
}

fn macs_of<'a>(keys: impl Iterator<Item = &'a (Vni, Mac)>, vni: Vni) -> Vec<Mac> {
    keys.filter(|(of, _)| *of == vni).map(|(_, mac)| *mac).collect()
}

/// Whether this address names a group of hosts.
pub(super) fn is_group(mac: Mac) -> bool {
    mac.0[0] & 1 != 0
}
