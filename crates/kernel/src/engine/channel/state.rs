//! The engine's view of paths of format `ovpn`, and its reaction to commands, notices and readings. Pure, so
//! that tests need no kernel.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use weft_crypto::ovpn::usage::blocks_at_most;
use weft_crypto::{PeerId, TunnelEnd, TunnelWay};
use weft_openvpn::device::{PeerState, Slot};
use weft_path::{EngineEvent, EngineKind, InboundSa, OutboundSa, PathId};

use super::change::{Change, KeySpec, PeerSpec, key_id, peer_id};
use crate::engine::action::Action;
use crate::engine::sa::{SaOf, Way};
use crate::xfrm::{Limits, StateId};

/// The last byte of our senders' ids. A receiver's id ends with its lane's number, and no lane of ours has
/// this number.
const SENDER_LANE: u32 = 0xff;
/// The most senders: the number of ids with this last byte, except the id that means "none".
const SENDERS_MAX: u32 = 0xffff;
/// Bytes of a cipher's block.
const BLOCK_BYTES: u64 = 16;

/// Everything that the device holds for path choice.
pub(in crate::engine) struct ChannelState {
    /// The source port of a peer's packets until a packet shows another.
    port: u16,
    /// The number of the next sender.
    next: u32,
    paths: BTreeMap<PathId, Path>,
}

/// A path that has a receiver or a sender.
struct Path {
    peer: PeerId,
    receiver: Option<Receiver>,
    sender: Option<Sender>,
    /// The last source of authentic packets, once known.
    heard: Option<SocketAddr>,
    /// The inner MTU that probes have proven, in bytes.
    mtu: Option<u16>,
}

struct Receiver {
    id: u32,
    address: Ipv6Addr,
    /// SPIs with the slots of their keys, the oldest first.
    keys: VecDeque<(u32, Slot)>,
    /// Packets opened until the last reading.
    packets: u64,
}

struct Sender {
    id: u32,
    /// The peer id in its packets.
    tx_id: u32,
    address: Ipv6Addr,
    remote: SocketAddr,
    spi: u32,
    limits: Limits,
    /// Usage of the sender when the SA began.
    base: Sealed,
    /// Usage of the sender at the last reading.
    last: Sealed,
    told: Told,
}

/// Packets and bytes that a sender has sealed since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::engine) struct Sealed {
    packets: u64,
    /// At least the bytes of their plaintext.
    bytes: u64,
}

/// The last usage limit of an SA that was reported to path choice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Told {
    Nothing,
    NearLimit,
    Exhausted,
}

impl ChannelState {
    pub(in crate::engine) const fn new(port: u16) -> Self {
        Self { port, next: 0, paths: BTreeMap::new() }
    }

    /// Receives on an SA beside the one before it. A third takes the place of the oldest.
    pub(in crate::engine) fn install_inbound(
        &mut self,
        peer: PeerId,
        path: PathId,
        sa: &InboundSa,
        remote: IpAddr,
        actions: &mut Vec<Action>,
    ) {
        let (id, port) = (peer_id(sa.spi), self.port);
        let address = address(&peer, sa.remote_engine, TunnelWay::From);
        if id & SENDER_LANE == SENDER_LANE {
            return actions.push(failed(path, "the id of its inbound SA is a sender's"));
        }
        self.make_room(path, Some(id), address, actions);
        let it = self.path(peer, path);
        let another = |receiver: &mut Receiver| (receiver.id, receiver.address) != (id, address);
        let older = it.receiver.take_if(another);
        actions.extend(older.map(|older| delete(older.id, older.address)));
        let port = it.sender.as_ref().map_or(port, |sender| sender.remote.port());
        let receiver = it.receiver.get_or_insert_with(|| {
            let remote = bare(SocketAddr::new(remote, port));
            let spec = PeerSpec { id, tx_id: None, address, remote };
            actions.push(Action::Channel(Change::NewPeer(path, spec)));
            Receiver { id, address, keys: VecDeque::new(), packets: 0 }
        });
        let slot = receiver.slot(sa.spi);
        receiver.keys.push_back((sa.spi, slot));
        let (cipher, key) = (sa.cipher, sa.key.clone());
        let key = KeySpec { peer: id, slot, way: Way::In, spi: sa.spi, cipher, key };
        actions.push(Action::Channel(Change::NewKey(path, key)));
    }

    /// Stops receiving on an SA.
    pub(in crate::engine) fn remove_inbound(&mut self, spi: u32, actions: &mut Vec<Action>) {
        let found = self.paths.iter_mut().find(|(_, it)| it.has_inbound(spi));
        let Some((path, it)) = found.map(|(path, it)| (*path, it)) else { return };
        let Some(receiver) = &mut it.receiver else { return };
        let slot = receiver.keys.iter().find(|(of, _)| *of == spi).map(|(_, slot)| *slot);
        receiver.keys.retain(|(of, _)| *of != spi);
        if receiver.keys.is_empty() {
            let gone = it.receiver.take();
            actions.extend(gone.map(|gone| delete(gone.id, gone.address)));
            self.forget_if_empty(path);
        } else {
            let id = receiver.id;
            actions.extend(slot.map(|slot| Action::Channel(Change::DeleteKey { id, slot })));
        }
    }

    /// Sends on an SA. If its packets carry the same id as those of the previous one, the new key replaces
    /// the older one between two packets.
    pub(in crate::engine) fn install_outbound(
        &mut self,
        peer: PeerId,
        path: PathId,
        sa: &OutboundSa,
        remote: SocketAddr,
        actions: &mut Vec<Action>,
    ) {
        let (tx_id, remote) = (peer_id(sa.spi), bare(remote));
        let address = address(&peer, sa.remote_engine, TunnelWay::To);
        self.make_room(path, None, address, actions);
        let older = self.path(peer, path).sender.take();
        let fits = |older: &Sender| {
            (older.tx_id, older.address) == (tx_id, address)
                && older.remote.is_ipv4() == remote.is_ipv4()
        };
        let (id, last) = match older {
            Some(older) if fits(&older) => {
                if older.remote != remote {
                    let moved = Change::SetRemote(path, older.id, remote);
                    actions.push(Action::Channel(moved));
                }
                (older.id, older.last)
            }
            older => {
                actions.extend(older.map(|older| delete(older.id, older.address)));
                let Some(id) = self.new_id() else {
                    self.forget_if_empty(path);
                    return actions
                        .push(failed(path, "the data channel has its maximum number of peers"));
                };
                let spec = PeerSpec { id, tx_id: Some(tx_id), address, remote };
                actions.push(Action::Channel(Change::NewPeer(path, spec)));
                (id, Sealed::default())
            }
        };
        let (cipher, key) = (sa.cipher, sa.key.clone());
        let slot = Slot::Primary;
        let key = KeySpec { peer: id, slot, way: Way::Out, spi: sa.spi, cipher, key };
        actions.push(Action::Channel(Change::NewKey(path, key)));
        let limits = Limits {
            packets_soft: sa.packets_soft,
            packets_hard: sa.packets_hard,
            bytes_soft: sa.bytes_soft,
            bytes_hard: sa.bytes_hard,
        };
        let (spi, base, told) = (sa.spi, last, Told::Nothing);
        let it = self.path(peer, path);
        it.sender = Some(Sender { id, tx_id, address, remote, spi, limits, base, last, told });
        actions.extend(it.moved(path).map(Action::Tell));
    }

    /// Stops sending on a path.
    pub(in crate::engine) fn remove_outbound(&mut self, path: PathId, actions: &mut Vec<Action>) {
        let gone = self.paths.get_mut(&path).and_then(|it| it.sender.take());
        actions.extend(gone.map(|gone| delete(gone.id, gone.address)));
        self.forget_if_empty(path);
    }

    /// Sends to another address. The sender's socket cannot send to an address of the other family, although
    /// the device accepts it. That takes another sender, which needs another key.
    pub(in crate::engine) fn set_remote(
        &mut self,
        path: PathId,
        remote: SocketAddr,
        actions: &mut Vec<Action>,
    ) {
        let remote = bare(remote);
        let Some(it) = self.paths.get_mut(&path) else { return };
        // A packet from another address after this is news.
        it.heard = it.heard.filter(|heard| *heard == remote);
        let Some(sender) = it.sender.as_mut().filter(|sender| sender.remote != remote) else {
            return;
        };
        if sender.remote.is_ipv4() == remote.is_ipv4() {
            sender.remote = remote;
            return actions.push(Action::Channel(Change::SetRemote(path, sender.id, remote)));
        }
        let spi = sender.spi;
        actions.push(delete(sender.id, sender.address));
        actions.push(Action::Tell(EngineEvent::OutboundExhausted { path, spi }));
        it.sender = None;
        self.forget_if_empty(path);
    }

    pub(in crate::engine) fn set_mtu(&mut self, path: PathId, mtu: u16) {
        if let Some(it) = self.paths.get_mut(&path) {
            it.mtu = Some(mtu);
        }
    }

    /// Forgets a peer.
    pub(in crate::engine) fn remove_peer(&mut self, peer: PeerId, actions: &mut Vec<Action>) {
        for it in self.paths.values_mut().filter(|it| it.peer == peer) {
            it.clear(actions);
        }
        self.paths.retain(|_, it| it.peer != peer);
    }

    /// Forgets all paths after the device is gone, so that nothing of it is deleted again. Returns the paths
    /// that it had.
    pub(in crate::engine) fn lost(&mut self) -> Vec<PathId> {
        std::mem::take(&mut self.paths).into_keys().collect()
    }
}

impl ChannelState {
    pub(in crate::engine) fn has(&self, path: PathId) -> bool {
        self.paths.contains_key(&path)
    }

    pub(in crate::engine) fn has_inbound(&self, spi: u32) -> bool {
        self.paths.values().any(|it| it.has_inbound(spi))
    }

    /// Whether there is anything of a peer.
    pub(in crate::engine) fn knows(&self, peer: &PeerId) -> bool {
        self.paths.values().any(|it| it.peer == *peer)
    }

    /// Whether this is the id of a receiver or of a sender.
    pub(in crate::engine) fn has_id(&self, id: u32) -> bool {
        self.paths.values().any(|it| it.ids().any(|of| of == id))
    }

    pub(in crate::engine) fn has_senders(&self) -> bool {
        self.paths.values().any(|it| it.sender.is_some())
    }

    /// The destination of a path's frames and probes: a tunnel address.
    pub(in crate::engine) fn remote(&self, path: PathId) -> Option<IpAddr> {
        self.sender(path).map(|sender| sender.address.into())
    }

    /// The destination of a path's packets.
    pub(in crate::engine) fn outer_remote(&self, path: PathId) -> Option<SocketAddr> {
        self.sender(path).map(|sender| sender.remote)
    }

    pub(in crate::engine) fn mtu(&self, path: PathId) -> Option<u16> {
        self.paths.get(&path)?.mtu
    }

    /// The tunnel addresses that a peer's packets come from.
    pub(in crate::engine) fn sources(&self, peer: PeerId) -> BTreeSet<IpAddr> {
        let its = self.paths.values().filter(|it| it.peer == peer);
        its.filter_map(|it| it.receiver.as_ref()).map(|receiver| receiver.address.into()).collect()
    }

    /// Every path with its peer, those first that receive.
    pub(in crate::engine) fn paths(&self) -> impl Iterator<Item = (PeerId, PathId)> {
        let receives = |it: &Path| it.receiver.is_some();
        let first = self.paths.iter().filter(move |(_, it)| receives(it));
        let rest = self.paths.iter().filter(move |(_, it)| !receives(it));
        first.chain(rest).map(|(path, it)| (it.peer, *path))
    }

    /// Every path that receives, with its peer and the packets opened until the last reading.
    pub(in crate::engine) fn received(&self) -> impl Iterator<Item = (PeerId, PathId, u64)> {
        self.paths
            .iter()
            .filter_map(|(path, it)| Some((it.peer, *path, it.receiver.as_ref()?.packets)))
    }

    /// Every receiver and every sender under a name that no IPsec state has, with its peer and its way.
    pub(in crate::engine) fn sas(&self) -> impl Iterator<Item = (StateId, SaOf)> {
        let name = |id, address: Ipv6Addr| StateId { destination: address.into(), spi: id };
        self.paths.values().flat_map(move |it| {
            let receiver = it.receiver.as_ref().map(|of| (name(of.id, of.address), Way::In));
            let sender = it.sender.as_ref().map(|of| (name(of.id, of.address), Way::Out));
            receiver.into_iter().chain(sender).map(move |(id, way)| (id, (it.peer, way)))
        })
    }

    /// The senders' ids, each with the id of its key.
    pub(in crate::engine) fn sender_keys(&self) -> impl Iterator<Item = (u32, u32)> {
        let senders = self.paths.values().filter_map(|it| it.sender.as_ref());
        let sending = senders.filter(|sender| sender.told < Told::Exhausted);
        sending.map(|sender| (sender.id, key_id(sender.spi)))
    }
}

/// Reactions to events of the device.
impl ChannelState {
    /// Notes the start of an SA, and how much its sender had sealed before.
    pub(in crate::engine) fn key_began(&mut self, path: PathId, spi: u32, before: Sealed) {
        let sender = self.paths.get_mut(&path).and_then(|it| it.sender.as_mut());
        if let Some(sender) = sender.filter(|sender| sender.spi == spi) {
            (sender.base, sender.last) = (before, before);
        }
    }

    /// Notes a receiver's new source address. Returns an event if the path sends to another address.
    pub(in crate::engine) fn floated(
        &mut self,
        id: u32,
        remote: SocketAddr,
    ) -> Option<EngineEvent> {
        let is_its = |it: &Path| it.receiver.as_ref().is_some_and(|receiver| receiver.id == id);
        let (path, it) = self.paths.iter_mut().find(|(_, it)| is_its(it))?;
        it.heard = Some(bare(remote));
        it.moved(*path)
    }

    /// Reports that a sender's key is gone because its packet ids are used up.
    pub(in crate::engine) fn key_gone(&mut self, id: u32, key: u32) -> Option<EngineEvent> {
        let is_its = |sender: &Sender| sender.id == id && key_id(sender.spi) == key;
        let found = |(path, it): (&PathId, &mut Path)| {
            let sender = it.sender.as_mut().filter(|sender| is_its(sender))?;
            let before = std::mem::replace(&mut sender.told, Told::Exhausted);
            Some((before, EngineEvent::OutboundExhausted { path: *path, spi: sender.spi }))
        };
        let (before, event) = self.paths.iter_mut().find_map(found)?;
        (before < Told::Exhausted).then_some(event)
    }

    /// Forgets a receiver or sender that is gone. Returns the path that it belonged to, if any.
    pub(in crate::engine) fn peer_gone(&mut self, id: u32) -> Option<PathId> {
        let path = self.paths.iter_mut().find_map(|(path, it)| it.take(id).then_some(*path))?;
        self.forget_if_empty(path);
        Some(path)
    }

    /// All peers that the device has, with their counters.
    pub(in crate::engine) fn read(&mut self, found: &[PeerState]) -> Vec<Action> {
        let found: BTreeMap<u32, &PeerState> = found.iter().map(|peer| (peer.id, peer)).collect();
        let mut actions = Vec::new();
        for (path, it) in &mut self.paths {
            it.read(*path, &found, &mut actions);
        }
        self.paths.retain(|_, it| !it.is_empty());
        actions
    }

    /// The ids of the device's peers that belong to no path.
    pub(in crate::engine) fn surplus(&self, found: &[PeerState]) -> Vec<u32> {
        let known: BTreeSet<u32> = self.paths.values().flat_map(Path::ids).collect();
        found.iter().map(|peer| peer.id).filter(|id| !known.contains(id)).collect()
    }
}

impl ChannelState {
    fn path(&mut self, peer: PeerId, path: PathId) -> &mut Path {
        let new = || Path { peer, receiver: None, sender: None, heard: None, mtu: None };
        self.paths.entry(path).or_insert_with(new)
    }

    fn sender(&self, path: PathId) -> Option<&Sender> {
        self.paths.get(&path)?.sender.as_ref()
    }

    /// Deletes other paths' peers that have the same id or tunnel address, which no two peers of the device
    /// may share. Such peers remain from a path that this one replaces.
    fn make_room(
        &mut self,
        path: PathId,
        id: Option<u32>,
        address: Ipv6Addr,
        actions: &mut Vec<Action>,
    ) {
        for (_, it) in self.paths.iter_mut().filter(|(other, _)| **other != path) {
            let in_the_way = |of: &mut Receiver| Some(of.id) == id || of.address == address;
            let receiver = it.receiver.take_if(in_the_way).map(|of| (of.id, of.address));
            let sender = it.sender.take_if(|of| of.address == address);
            let sender = sender.map(|of| (of.id, of.address));
            actions.extend(receiver.into_iter().chain(sender).map(|(id, of)| delete(id, of)));
        }
        self.paths.retain(|other, it| *other == path || !it.is_empty());
    }

    /// An id that no sender has, and was given to none for as long as possible: a late notice must not be
    /// taken for another's.
    fn new_id(&mut self) -> Option<u32> {
        let id = |number: u32| number << 8 | SENDER_LANE;
        let senders = self.paths.values().filter_map(|it| it.sender.as_ref());
        let taken: BTreeSet<u32> = senders.map(|sender| sender.id).collect();
        let mut numbers = (0..SENDERS_MAX).map(|more| (self.next + more) % SENDERS_MAX);
        let number = numbers.find(|number| !taken.contains(&id(*number)))?;
        self.next = (number + 1) % SENDERS_MAX;
        Some(id(number))
    }

    fn forget_if_empty(&mut self, path: PathId) {
        if self.paths.get(&path).is_some_and(Path::is_empty) {
            self.paths.remove(&path);
        }
    }
}

impl Path {
    fn is_empty(&self) -> bool {
        self.receiver.is_none() && self.sender.is_none()
    }

    fn has_inbound(&self, spi: u32) -> bool {
        let has = |receiver: &Receiver| receiver.keys.iter().any(|(of, _)| *of == spi);
        self.receiver.as_ref().is_some_and(has)
    }

    fn ids(&self) -> impl Iterator<Item = u32> {
        let receiver = self.receiver.as_ref().map(|receiver| receiver.id);
        receiver.into_iter().chain(self.sender.as_ref().map(|sender| sender.id))
    }

    fn clear(&mut self, actions: &mut Vec<Action>) {
        actions.extend(self.sender.take().map(|gone| delete(gone.id, gone.address)));
        actions.extend(self.receiver.take().map(|gone| delete(gone.id, gone.address)));
    }

    /// Takes the peer of this id out; false if it has none.
    fn take(&mut self, id: u32) -> bool {
        let receiver = self.receiver.take_if(|receiver| receiver.id == id);
        let sender = self.sender.take_if(|sender| sender.id == id);
        receiver.is_some() || sender.is_some()
    }

    /// Returns an event if the other end's packets come from another address than the path sends to.
    fn moved(&self, path: PathId) -> Option<EngineEvent> {
        let sent_to = self.sender.as_ref()?.remote;
        let remote = self.heard.filter(|heard| *heard != sent_to)?;
        Some(EngineEvent::RemoteMoved { path, remote })
    }

    fn read(&mut self, path: PathId, found: &BTreeMap<u32, &PeerState>, actions: &mut Vec<Action>) {
        let gone: Vec<u32> = self.ids().filter(|id| !found.contains_key(id)).collect();
        if !gone.is_empty() {
            gone.into_iter().for_each(|id| _ = self.take(id));
            actions.push(failed(path, "one of its peers in the data channel is gone"));
        }
        // The kernel sends no notice if packets keep coming from the same address, although the path may send
        // to another one by now.
        if let Some(receiver) = &mut self.receiver
            && let Some(state) = found.get(&receiver.id)
            && std::mem::replace(&mut receiver.packets, state.vpn.rx_packets) < state.vpn.rx_packets
        {
            self.heard = state.remote.map(bare).or(self.heard);
            actions.extend(self.moved(path).map(Action::Tell));
        }
        if let Some(sender) = &mut self.sender
            && let Some(state) = found.get(&sender.id)
        {
            sender.read(path, Sealed::of(state), actions);
        }
    }
}

impl Receiver {
    /// The slot for another SA's key. Two keys of one id are indistinguishable.
    fn slot(&mut self, spi: u32) -> Slot {
        let alike = self.keys.iter().position(|(of, _)| key_id(*of) == key_id(spi));
        let replaced = alike.or((self.keys.len() >= Slot::ALL.len()).then_some(0));
        if let Some((_, slot)) = replaced.and_then(|index| self.keys.remove(index)) {
            return slot;
        }
        let is_free = |slot: &Slot| self.keys.iter().all(|(_, taken)| taken != slot);
        Slot::ALL.into_iter().find(is_free).unwrap_or(Slot::Primary)
    }
}

impl Sender {
    /// Checks the usage of the present key against its SA's limits.
    fn read(&mut self, path: PathId, now: Sealed, actions: &mut Vec<Action>) {
        self.last = now;
        let packets = now.packets.saturating_sub(self.base.packets);
        let bytes = now.bytes.saturating_sub(self.base.bytes);
        let sealed = blocks_at_most(packets, bytes).saturating_mul(BLOCK_BYTES);
        let (spi, limits) = (self.spi, self.limits);
        let reached = if packets >= limits.packets_hard || sealed >= limits.bytes_hard {
            Told::Exhausted
        } else if packets >= limits.packets_soft || sealed >= limits.bytes_soft {
            Told::NearLimit
        } else {
            Told::Nothing
        };
        if reached <= self.told {
            return;
        }
        self.told = reached;
        if reached == Told::Exhausted {
            let (id, slot) = (self.id, Slot::Primary);
            actions.push(Action::Channel(Change::DeleteKey { id, slot }));
            actions.push(Action::Tell(EngineEvent::OutboundExhausted { path, spi }));
        } else {
            actions.push(Action::Tell(EngineEvent::OutboundNearLimit { path, spi }));
        }
    }
}

impl Sealed {
    /// Usage as the device counts it.
    pub(in crate::engine) const fn of(state: &PeerState) -> Self {
        Self { packets: state.link.tx_packets, bytes: state.link.tx_bytes }
    }
}

/// The address that a peer's engine sends from, or receives at.
fn address(peer: &PeerId, engine: EngineKind, way: TunnelWay) -> Ipv6Addr {
    peer.tunnel_address(TunnelEnd { way, kernel: engine == EngineKind::Kernel })
}

/// As path choice names it.
fn bare(remote: SocketAddr) -> SocketAddr {
    SocketAddr::new(remote.ip().to_canonical(), remote.port())
}

fn delete(id: u32, address: Ipv6Addr) -> Action {
    Action::Channel(Change::DeletePeer { id, address })
}

fn failed(path: PathId, reason: &str) -> Action {
    Action::Tell(EngineEvent::PathFailed { path, reason: reason.to_owned() })
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
