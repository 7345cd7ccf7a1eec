//! The state machine over all peers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use weft_crypto::{PeerId, SessionKey};

use crate::config::{Config, EngineOffer, LINK_MTU_MIN, clamped_engines};
use crate::engine_api::{EngineCommand, EngineEvent, EngineKind};
use crate::message::{Message, MessageError};
use crate::peer::Peer;
use crate::shared::Shared;
use crate::status::{Counters, PathChange, PathStatus, Reason};

/// Paths to all peers of this host.
///
/// After every `handle_*` call the caller polls in this order: first all commands, which are carried
/// out in order. Then it sends all messages, in order, over the peer's newest link. Then it takes the
/// changes. A message tells the peer to rely on the commands before it, so this order keeps a rekey
/// lossless.
pub struct Paths {
    shared: Shared,
    peers: BTreeMap<PeerId, Entry>,
    deadlines: BTreeSet<(Instant, PeerId)>,
    /// The peer that owns an address in this host's kernel engine. Kernel policies cannot tell two
    /// peers at one address apart (the `ovpn` device can). The first peer owns it until its link is
    /// lost for good or moves to another address. The next owner is the remaining peer with the
    /// lowest id. The peers need not agree: a hello tells each of them.
    owners: BTreeMap<IpAddr, PeerId>,
}

struct Entry {
    peer: Peer,
    deadline: Option<Instant>,
    /// The address of its link, while the link is up or may come back in time.
    claim: Option<IpAddr>,
}

impl Paths {
    /// No peers yet. `seed` makes SPIs and nonces: it must be random and secret. Never use one seed
    /// for two starts of a daemon.
    pub fn new(local: PeerId, config: Config, seed: [u8; 32]) -> Self {
        let shared = Shared::new(local, config, seed);
        let (peers, deadlines) = (BTreeMap::new(), BTreeSet::new());
        Self { shared, peers, deadlines, owners: BTreeMap::new() }
    }

    /// A connection to a peer is up. Call this for each new connection, also while the older one
    /// still works: the session key is new, and every SA is rekeyed without loss. `local` is this
    /// host's own address on the connection, if known; without it, a NAT in front of this host goes
    /// undetected. `remote` is the other end's address. Messages for the peer use this connection
    /// from now on. `dialled`: this host dialled the link.
    pub fn handle_link_up(
        &mut self,
        now: Instant,
        peer: PeerId,
        session: SessionKey,
        local: Option<IpAddr>,
        remote: IpAddr,
        dialled: bool,
    ) {
        let id = self.shared.local;
        self.peers.entry(peer).or_insert_with(|| Entry {
            peer: Peer::new(now, id, peer, remote),
            deadline: None,
            claim: None,
        });
        let address_shared = self.claim(now, peer, remote.to_canonical()) != peer;
        self.with(now, peer, |peer, shared| {
            peer.lanes.handle_link_up(dialled);
            peer.handle_link_up(now, session, (local, remote), address_shared, shared);
        });
    }

    /// A peer's link continues between these addresses, which may be new: one of the hosts may have
    /// moved. Paths bound to addresses are set up again; the others continue.
    pub fn handle_addresses(
        &mut self,
        now: Instant,
        peer: PeerId,
        local: Option<IpAddr>,
        remote: IpAddr,
    ) {
        let (local, remote) = (local.map(|it| it.to_canonical()), remote.to_canonical());
        let known = self.peers.get(&peer).and_then(|entry| entry.peer.addresses());
        if known.is_none_or(|known| known == (local, remote)) {
            return;
        }
        let address_shared = self.claim(now, peer, remote) != peer;
        self.with(now, peer, |peer, shared| {
            peer.handle_addresses(now, (local, remote), address_shared, shared);
        });
    }

    /// The last connection to a peer is gone. Data goes on for [`crate::LINK_GRACE_MS`] while the
    /// link reconnects; then its paths fail with [`crate::Reason::LinkLost`].
    pub fn handle_link_down(&mut self, now: Instant, peer: PeerId) {
        self.with(now, peer, |peer, shared| peer.handle_link_down(now, shared));
    }

    /// Forgets the peer and removes its paths from the engines.
    pub fn handle_peer_gone(&mut self, now: Instant, peer: PeerId) {
        self.release(now, peer);
        if let Some(mut entry) = self.peers.remove(&peer) {
            entry.peer.close(&mut self.shared);
            if let Some(deadline) = entry.deadline {
                self.deadlines.remove(&(deadline, peer));
            }
        }
    }

    /// A control message came in over a peer's link.
    ///
    /// # Errors
    /// [`MessageError`]: the message is ignored; the link and every path stay as they are.
    pub fn handle_message(
        &mut self,
        now: Instant,
        peer: PeerId,
        message: Message,
    ) -> Result<(), MessageError> {
        let result = self.with(now, peer, |peer, shared| peer.handle_message(now, message, shared));
        let result = result.unwrap_or(Err(MessageError::UnknownPeer));
        self.shared.counters.messages_refused += u64::from(result.is_err());
        result
    }

    /// An engine reports. After [`EngineEvent::EngineFailed`] all paths on that engine fail at once
    /// and are tried again with back-off.
    pub fn handle_event(&mut self, now: Instant, event: EngineEvent) {
        let peer = match &event {
            EngineEvent::ProbeReceived { peer, .. } => Some(peer),
            EngineEvent::OutboundNearLimit { path, .. }
            | EngineEvent::OutboundExhausted { path, .. }
            | EngineEvent::RemoteMoved { path, .. }
            | EngineEvent::LaneProven { path, .. }
            | EngineEvent::MessageTooLong { path, .. }
            | EngineEvent::Unheard { path, .. }
            | EngineEvent::PathFailed { path, .. } => self.shared.paths.get(path),
            EngineEvent::InboundFirstUse { spi } => self.shared.spis.get(spi),
            EngineEvent::EngineFailed { .. } => {
                for peer in self.ids() {
                    let event = event.clone();
                    self.with(now, peer, |peer, shared| peer.handle_event(now, event, shared));
                }
                return;
            }
        };
        let known = peer.copied().and_then(|peer| {
            self.with(now, peer, |peer, shared| peer.handle_event(now, event, shared))
        });
        self.shared.counters.events_stale += u64::from(known.is_none());
    }

    /// The outer IP MTU of this host's link has changed, in bytes; peers are told.
    pub fn handle_link_mtu(&mut self, now: Instant, link_mtu: u16) {
        let link_mtu = link_mtu.max(LINK_MTU_MIN);
        let config = Arc::make_mut(&mut self.shared.config);
        if std::mem::replace(&mut config.link_mtu, link_mtu) != link_mtu {
            for peer in self.ids() {
                self.with(now, peer, |peer, shared| peer.handle_local_change(now, shared));
            }
        }
    }

    /// This host offers these engines from now on; `missing` holds the reasons for the others. For
    /// example, a module was loaded, or an engine is broken for good. Peers are told. Added or
    /// removed paths cause no loss while another one works.
    pub fn handle_engines(
        &mut self,
        now: Instant,
        engines: Vec<EngineOffer>,
        missing: Vec<(EngineKind, Reason)>,
    ) {
        let engines = clamped_engines(engines);
        let config = Arc::make_mut(&mut self.shared.config);
        if config.engines == engines && config.missing == missing {
            return;
        }
        config.engines = engines;
        config.missing = missing;
        for peer in self.ids() {
            self.with(now, peer, |peer, shared| peer.handle_local_change(now, shared));
        }
    }

    /// Runs every timer due at `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(deadline, peer)) = self.deadlines.first()
            && deadline <= now
        {
            self.with(now, peer, |peer, shared| peer.handle_timeout(now, shared));
            if self.deadlines.contains(&(deadline, peer)) {
                // It is due again at once: let the others run first, and do not loop endlessly in
                // this call.
                break;
            }
        }
    }

    /// When to call [`Self::handle_timeout`] next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// The next command for an engine.
    pub fn poll_command(&mut self) -> Option<EngineCommand> {
        self.shared.commands.pop_front()
    }

    /// The next message to send over a peer's link.
    pub fn poll_message(&mut self) -> Option<(PeerId, Message)> {
        self.shared.messages.pop_front()
    }

    /// The next change of a path's state, for one line in the log.
    pub fn poll_change(&mut self) -> Option<PathChange> {
        self.shared.changes.pop_front()
    }

    /// By peer: every path, the preferred first, or one entry that says why there is none. Then one entry, with
    /// the reason, for each engine at either end that has no path. [`crate::overall`] makes one line of a peer's
    /// entries.
    pub fn status(&self, _now: Instant) -> Vec<PathStatus> {
        let config = &self.shared.config;
        self.peers.values().flat_map(|entry| entry.peer.status(config)).collect()
    }

    /// Counters of ignored messages and events.
    pub fn counters(&self) -> Counters {
        self.shared.counters
    }

    /// Records the address a peer's link comes from, and returns the peer that owns that address.
    fn claim(&mut self, now: Instant, id: PeerId, address: IpAddr) -> PeerId {
        if self.peers.get(&id).and_then(|entry| entry.claim) != Some(address) {
            self.release(now, id);
            if let Some(entry) = self.peers.get_mut(&id) {
                entry.claim = Some(address);
            }
        }
        *self.owners.entry(address).or_insert(id)
    }

    /// The peer no longer has its address; the next peer there takes ownership.
    fn release(&mut self, now: Instant, id: PeerId) {
        let claim = self.peers.get_mut(&id).and_then(|entry| entry.claim.take());
        let Some(address) = claim.filter(|address| self.owners.get(address) == Some(&id)) else {
            return;
        };
        let there = |(_, entry): &(&PeerId, &Entry)| entry.claim == Some(address);
        match self.peers.iter().find(there).map(|(heir, _)| *heir) {
            Some(heir) => {
                self.owners.insert(address, heir);
                self.with(now, heir, |peer, all| peer.handle_address_free(now, all));
            }
            None => {
                self.owners.remove(&address);
            }
        }
    }

    fn ids(&self) -> Vec<PeerId> {
        self.peers.keys().copied().collect()
    }

    /// Runs `act` on a peer, and updates the peer's next deadline.
    fn with<T>(
        &mut self,
        now: Instant,
        id: PeerId,
        act: impl FnOnce(&mut Peer, &mut Shared) -> T,
    ) -> Option<T> {
        let entry = self.peers.get_mut(&id)?;
        let result = act(&mut entry.peer, &mut self.shared);
        let next = entry.peer.next_timeout(&self.shared);
        if next != entry.deadline {
            if let Some(deadline) = entry.deadline {
                self.deadlines.remove(&(deadline, id));
            }
            self.deadlines.extend(next.map(|next| (next, id)));
            entry.deadline = next;
        }
        if entry.claim.is_some() && !entry.peer.holds_address() {
            self.release(now, id);
        }
        Some(result)
    }
}
