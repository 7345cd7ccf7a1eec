//! The switch's tables: ports, peers, and where each MAC is. Pure: time is an argument.
//!
//! Every change is recorded as a [`Change`], so that exactly the flows whose decision read the changed entry
//! are decided again.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
};

use weft_crypto::PeerId;
use weft_path::Mac;

use super::limits::Limits;

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

/// The kind of port that a frame arrived by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum PortKind {
    /// A container's, the host's own, or one added by another program.
    Local,
    /// The vector engine's.
    Tap,
    /// The VXLAN tunnel's.
    Tunnel,
}

/// An entry that a decision has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Change {
    /// The port of this number: whether it is there and of what kind.
    Port(u32),
    /// The set of local ports.
    LocalPorts,
    /// The number of the tunnel's or the TAP's port.
    Overlay,
    /// The place of a MAC.
    Mac(Mac),
    /// How frames for a peer leave.
    Peer(PeerId),
    /// The receivers of broadcasts.
    Broadcast,
    /// Whether tunnel packets from this address are accepted.
    Source(IpAddr),
    /// How many frames to groups this port may send to peers.
    Limit(u32),
}

/// The place of a MAC.
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

/// The tables of one switch.
#[derive(Debug, Clone)]
pub(super) struct Tables {
    /// The network's VXLAN network identifier.
    pub(super) vni: u64,
    ports: BTreeMap<u32, Port>,
    numbers: HashMap<String, u32>,
    /// The number that was last given to a new port.
    last_number: u32,
    tap: Option<u32>,
    tunnel: Option<u32>,
    pinned: HashMap<Mac, String>,
    learned: HashMap<Mac, Learned>,
    learned_of: HashMap<u32, usize>,
    remote: HashMap<Mac, PeerId>,
    peers: BTreeMap<PeerId, Peer>,
    sources: HashMap<IpAddr, usize>,
    limits: Limits,
    changes: BTreeSet<Change>,
}

impl Tables {
    pub(super) fn new(vni: u64) -> Self {
        Self {
            vni,
            ports: BTreeMap::new(),
            numbers: HashMap::new(),
            last_number: 0,
            tap: None,
            tunnel: None,
            pinned: HashMap::new(),
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

    /// A number for a new port. Numbers are given in turn: flows may still name one that has just become
    /// free, and would send frames to the new port.
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
            PortKind::Tap => self.tap = Some(number),
            PortKind::Tunnel => self.tunnel = Some(number),
            PortKind::Local => self.limits.add(number),
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
        self.tap = self.tap.filter(|tap| *tap != number);
        self.tunnel = self.tunnel.filter(|tunnel| *tunnel != number);
        let gone = self.learned.iter().filter(|(_, learned)| learned.port == number);
        for mac in gone.map(|(mac, _)| *mac).collect::<Vec<_>>() {
            self.unlearn(mac);
        }
        self.port_changed(number, &port.name, port.kind);
    }

    fn port_changed(&mut self, number: u32, name: &str, kind: PortKind) {
        self.changes.insert(Change::Port(number));
        self.changes.insert(match kind {
            PortKind::Local => Change::LocalPorts,
            PortKind::Tap | PortKind::Tunnel => Change::Overlay,
        });
        let pinned = self.pinned.iter().filter(|(_, port)| *port == name);
        self.changes.extend(pinned.map(|(mac, _)| Change::Mac(*mac)));
    }

    /// This MAC is on the port of this name and nowhere else, or no longer (`None`).
    pub(super) fn pin(&mut self, mac: Mac, port: Option<&str>) {
        let before = match port {
            Some(port) => self.pinned.insert(mac, port.to_owned()),
            None => self.pinned.remove(&mac),
        };
        if before.as_deref() != port {
            self.unlearn(mac);
            self.changes.insert(Change::Mac(mac));
        }
    }

    /// Forgets the MACs pinned to a port.
    pub(super) fn unpin_port(&mut self, name: &str) {
        let pinned = self.pinned.iter().filter(|(_, port)| *port == name);
        for mac in pinned.map(|(mac, _)| *mac).collect::<Vec<_>>() {
            self.pin(mac, None);
        }
    }

    /// This MAC is behind a peer, or no longer.
    pub(super) fn set_remote(&mut self, mac: Mac, peer: Option<PeerId>) {
        let before = match peer {
            Some(peer) => self.remote.insert(mac, peer),
            None => self.remote.remove(&mac),
        };
        if before != peer {
            self.unlearn(mac);
            self.changes.insert(Change::Mac(mac));
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
        for mac in behind.map(|(mac, _)| *mac).collect::<Vec<_>>() {
            self.set_remote(mac, None);
        }
    }

    fn edit_peer(&mut self, id: PeerId, edit: impl FnOnce(&mut Peer)) {
        let peer = self.peers.entry(id).or_default();
        let before = peer.clone();
        edit(peer);
        let after = peer.clone();
        if before.via != after.via {
            self.changes.insert(Change::Peer(id));
            self.changes.insert(Change::Broadcast);
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

    /// Learns that a frame from `mac` arrived by a local port. False if the MAC is not learned there: it
    /// belongs elsewhere, moved a moment ago, or there are too many.
    pub(super) fn learn(&mut self, mac: Mac, port: u32, now_ms: u64) -> bool {
        match self.place(mac) {
            Place::Pinned(at) => return at == Some(port),
            Place::Remote(_) => return false,
            Place::Learned(at) if at == port => {
                if let Some(learned) = self.learned.get_mut(&mac) {
                    learned.seen_ms = now_ms;
                }
                return true;
            }
            Place::Learned(_) | Place::Unknown => {}
        }
        let held = |learned: &Learned| now_ms < learned.since_ms.saturating_add(MOVE_HOLD_MS);
        let here = self.learned_of.get(&port).copied().unwrap_or_default();
        let full = here >= LEARNED_PER_PORT_MAX || self.learned.len() >= LEARNED_MAX;
        if is_group(mac) || full || self.learned.get(&mac).is_some_and(held) {
            return false;
        }
        self.unlearn(mac);
        self.learned.insert(mac, Learned { port, since_ms: now_ms, seen_ms: now_ms });
        *self.learned_of.entry(port).or_default() += 1;
        self.changes.insert(Change::Mac(mac));
        true
    }

    /// Forgets learned MACs that have been silent too long; `busy` returns which still have flows.
    pub(super) fn age(&mut self, now_ms: u64, busy: impl Fn(Mac) -> bool) {
        let mut silent = Vec::new();
        for (mac, learned) in &mut self.learned {
            if busy(*mac) {
                learned.seen_ms = now_ms;
            } else if now_ms >= learned.seen_ms.saturating_add(LEARNED_AGE_MS) {
                silent.push(*mac);
            }
        }
        for mac in silent {
            self.unlearn(mac);
        }
    }

    fn unlearn(&mut self, mac: Mac) {
        let Some(learned) = self.learned.remove(&mac) else { return };
        if let Some(count) = self.learned_of.get_mut(&learned.port) {
            *count -= 1;
            if *count == 0 {
                self.learned_of.remove(&learned.port);
            }
        }
        self.changes.insert(Change::Mac(mac));
    }

    /// The place of a MAC. A MAC attached here is here, regardless of other hosts' claims. A frame never moves
    /// another host's MAC to this host.
    pub(super) fn place(&self, mac: Mac) -> Place {
        if let Some(name) = self.pinned.get(&mac) {
            return Place::Pinned(self.numbers.get(name).copied());
        }
        if let Some(peer) = self.remote.get(&mac) {
            return Place::Remote(*peer);
        }
        self.learned.get(&mac).map_or(Place::Unknown, |learned| Place::Learned(learned.port))
    }

    pub(super) fn port_kind(&self, number: u32) -> Option<PortKind> {
        self.ports.get(&number).map(|port| port.kind)
    }

    pub(super) fn port_number(&self, name: &str) -> Option<u32> {
        self.numbers.get(name).copied()
    }

    pub(super) fn ports(&self) -> impl Iterator<Item = (u32, &str)> {
        self.ports.iter().map(|(number, port)| (*number, port.name.as_str()))
    }

    /// The local ports by number.
    pub(super) fn local_ports(&self) -> impl Iterator<Item = u32> + '_ {
        let local = |(_, port): &(&u32, &Port)| port.kind == PortKind::Local;
        self.ports.iter().filter(local).map(|(number, _)| *number)
    }

    pub(super) fn tap(&self) -> Option<u32> {
        self.tap
    }

    pub(super) fn tunnel(&self) -> Option<u32> {
        self.tunnel
    }

    pub(super) fn via(&self, peer: PeerId) -> Via {
        self.peers.get(&peer).map(|peer| peer.via).unwrap_or_default()
    }

    /// How each peer's frames leave.
    pub(super) fn vias(&self) -> impl Iterator<Item = Via> + '_ {
        self.peers.values().map(|peer| peer.via)
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

/// Whether this address names a group of hosts.
pub(super) fn is_group(mac: Mac) -> bool {
    mac.0[0] & 1 != 0
}
