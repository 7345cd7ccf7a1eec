//! The receiving half of a path: the SAs that this host has installed and offered.
//!
//! An offer makes a generation of SAs, one per lane. The sender moves only forward, since it takes
//! no offer older than the last it took; so once a generation is known to be in use (the peer
//! accepted it, or a packet came in on it), all earlier ones only drain.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rand::Rng;
use weft_crypto::{Cipher, PeerId, SessionKey, derive_sa_key};

use crate::config::{
    DRAIN_MS, DRAIN_SHORTEST_MS, EngineOffer, GENERATIONS_MAX, OFFER_INTERVAL_MS,
    OFFER_SENDINGS_MAX, RESEND_MS, ms,
};
use crate::message::{LaneOffer, Message, Offer};
use crate::seam::{Encapsulation, EngineCommand, EngineKind, InboundSa, PathId};
use crate::shared::Shared;

/// What an offer is made from.
pub(crate) struct Terms<'a> {
    pub(crate) session: &'a SessionKey,
    pub(crate) tag: u64,
    pub(crate) engine: &'a EngineOffer,
    pub(crate) sender_engine: EngineKind,
    pub(crate) encapsulation: Encapsulation,
    /// `None` for format `plain`, which has no SAs.
    pub(crate) cipher: Option<Cipher>,
    pub(crate) lanes: u16,
    /// This host's address, where it is known.
    pub(crate) local: Option<IpAddr>,
    /// The peer's address.
    pub(crate) remote: IpAddr,
}

pub(crate) struct Inbound {
    peer: PeerId,
    path: PathId,
    generations: VecDeque<Generation>,
    /// A new offer is to be made ...
    wanted: bool,
    /// ... but not before.
    not_before: Option<Instant>,
    rekeys: u64,
    /// First SPIs of the last [`GENERATIONS_MAX`] generations that were cleared: what the peer may
    /// still name.
    cleared: VecDeque<u32>,
}

/// The SAs of one offer.
pub(crate) struct Generation {
    session: u64,
    offer: Offer,
    /// This host's address and the peer's, which a kernel's SAs are bound to.
    addresses: (Option<IpAddr>, IpAddr),
    lanes: Vec<(u16, u32)>,
    installed: Instant,
    rekey_at: Instant,
    /// Since when the sender is known to use it.
    used: Option<Instant>,
    /// Since when a later generation is known to be used.
    superseded: Option<Instant>,
    /// When the offer is sent again.
    resend: Option<Instant>,
    sendings: u32,
}

impl Inbound {
    pub(crate) fn new(peer: PeerId, path: PathId) -> Self {
        Self {
            peer,
            path,
            generations: VecDeque::new(),
            wanted: true,
            not_before: None,
            rekeys: 0,
            cleared: VecDeque::new(),
        }
    }

    pub(crate) fn rekeys(&self) -> u64 {
        self.rekeys
    }

    /// This SA is one of them.
    fn has(&self, spi: u32) -> bool {
        self.generations.iter().any(|generation| generation.has(spi))
    }

    /// This SA is one of them, or was until they were cleared.
    pub(crate) fn knows(&self, spi: u32) -> bool {
        self.has(spi) || self.cleared.contains(&spi)
    }

    /// Asks for new SAs.
    pub(crate) fn want(&mut self) {
        self.wanted = true;
    }

    /// The link has a new session key: offers under the old one are not repeated, but the sender
    /// may have taken them, so their SAs stay until a later one is known to be used.
    pub(crate) fn new_session(&mut self) {
        self.generations.iter_mut().for_each(|generation| generation.resend = None);
        self.not_before = None;
        self.wanted = true;
    }

    /// The sender, or the engine that held the SAs, is gone.
    pub(crate) fn clear(&mut self, shared: &mut Shared) {
        while let Some(generation) = self.generations.pop_front() {
            self.cleared.extend(generation.lanes.first().map(|(_, spi)| *spi));
            generation.remove(shared);
        }
        self.cleared.drain(..self.cleared.len().saturating_sub(GENERATIONS_MAX));
        self.not_before = None;
        self.wanted = true;
    }

    /// Takes all SAs out; each still receives for a while.
    pub(crate) fn retire(&mut self, now: Instant) -> Vec<Generation> {
        for generation in &mut self.generations {
            generation.superseded.get_or_insert(now);
        }
        self.generations.drain(..).collect()
    }

    /// The peer sends on these lanes of an offer. `None`: an old offer.
    pub(crate) fn handle_accept(
        &mut self,
        now: Instant,
        session: u64,
        offer: u64,
        lanes: &[u16],
        shared: &mut Shared,
    ) -> Option<()> {
        let index = self.generations.iter().position(|generation| {
            generation.session == session && generation.offer.offer == offer
        })?;
        let generation = self.generations.get_mut(index)?;
        if !generation.lanes.iter().any(|(lane, _)| lanes.contains(lane)) {
            return None;
        }
        generation.resend = None;
        generation.lanes.retain(|&(lane, spi)| {
            let kept = lanes.contains(&lane);
            if !kept {
                shared.spis.remove(&spi);
                shared.commands.push_back(EngineCommand::RemoveInbound { spi });
            }
            kept
        });
        self.mark_used(now, index);
        Some(())
    }

    /// A packet came in on this SA.
    pub(crate) fn handle_first_use(&mut self, now: Instant, spi: u32) -> bool {
        let index = self.generations.iter().position(|generation| generation.has(spi));
        if let Some(index) = index {
            self.mark_used(now, index);
        }
        index.is_some()
    }

    /// The sender needs a successor of this SA, or of one that is no longer here.
    pub(crate) fn handle_rekey_request(&mut self, now: Instant, spi: u32) {
        let known = self.has(spi);
        match self.generations.back_mut() {
            Some(newest) if newest.used.is_none() && newest.resend.is_some() => {
                // The successor is already offered: say it once more.
                newest.resend = newest.resend.map(|at| at.min(now + ms(OFFER_INTERVAL_MS)));
            }
            Some(newest) => self.wanted |= !known || newest.has(spi),
            None => self.wanted = true,
        }
    }

    /// Removes what has drained or died, repeats and renews offers. `terms` is `None` while no
    /// offer can be made.
    pub(crate) fn handle_timeout(
        &mut self,
        now: Instant,
        terms: Option<&Terms<'_>>,
        shared: &mut Shared,
    ) {
        self.prune(now, shared);
        let Some(terms) = terms else { return };
        if let Some(newest) = self.generations.back_mut() {
            if (newest.used.is_some() && now >= newest.rekey_at) || newest.is_outdated(terms) {
                self.wanted = true;
            }
            if newest.resend.is_some_and(|at| now >= at) {
                if newest.sendings >= OFFER_SENDINGS_MAX {
                    newest.resend = None;
                    self.wanted = true;
                } else {
                    newest.resend = Some(now + ms(RESEND_MS << newest.sendings));
                    newest.sendings += 1;
                    shared.message(self.peer, Message::Offer(newest.offer.clone()));
                }
            }
        } else {
            self.wanted = true;
        }
        if self.wanted
            && self.not_before.is_none_or(|at| now >= at)
            && let Some(cipher) = terms.cipher
        {
            self.not_before = Some(now + ms(OFFER_INTERVAL_MS));
            if self.make_room(now, shared) {
                self.wanted = false;
                self.offer(now, terms, cipher, shared);
            }
        }
    }

    pub(crate) fn next_timeout(&self, ready: bool, lifetime: Duration) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let mut at = |instant: Instant| next = Some(next.map_or(instant, |n| n.min(instant)));
        for generation in &self.generations {
            at(generation.dies_at(lifetime));
        }
        if ready {
            if let Some(newest) = self.generations.back() {
                if newest.used.is_some() && !self.wanted {
                    at(newest.rekey_at);
                }
                newest.resend.into_iter().for_each(&mut at);
            }
            if self.wanted {
                // Without `not_before` the offer was made when it was asked for.
                self.not_before.into_iter().for_each(at);
            }
        }
        next
    }

    fn mark_used(&mut self, now: Instant, index: usize) {
        let Some(generation) = self.generations.get_mut(index) else { return };
        if generation.superseded.is_some() || generation.used.is_some() {
            return;
        }
        generation.used = Some(now);
        generation.resend = None;
        let mut replaced = false;
        for earlier in self.generations.iter_mut().take(index) {
            replaced |= earlier.used.is_some();
            earlier.superseded.get_or_insert(now);
        }
        self.rekeys += u64::from(replaced);
    }

    fn prune(&mut self, now: Instant, shared: &mut Shared) {
        let lifetime = shared.config.sa_lifetime;
        let mut index = 0;
        while let Some(generation) = self.generations.get(index) {
            if now >= generation.dies_at(lifetime) {
                self.remove(index, shared);
            } else {
                index += 1;
            }
        }
    }

    /// Finds room for one more generation. What the sender may still use is never removed for it.
    fn make_room(&mut self, now: Instant, shared: &mut Shared) -> bool {
        if self.generations.len() < GENERATIONS_MAX {
            return true;
        }
        let spare = self.generations.iter().position(|generation| match generation.superseded {
            Some(since) => now >= since + ms(DRAIN_SHORTEST_MS),
            // Probes would have shown its use long ago.
            None => generation.used.is_none() && now >= generation.installed + ms(DRAIN_MS),
        });
        spare.map(|index| self.remove(index, shared)).is_some()
    }

    fn remove(&mut self, index: usize, shared: &mut Shared) {
        if let Some(generation) = self.generations.remove(index) {
            generation.remove(shared);
        }
    }

    fn offer(&mut self, now: Instant, terms: &Terms<'_>, cipher: Cipher, shared: &mut Shared) {
        if let Some(newest) = self.generations.back_mut() {
            newest.resend = None;
        }
        let mut lanes = Vec::with_capacity(usize::from(terms.lanes));
        for lane in 0..terms.lanes {
            let (format, local) = (terms.engine.format, shared.local);
            let (spi, nonce) = (shared.new_spi(self.peer, format, lane), shared.nonce());
            let key = derive_sa_key(terms.session, &nonce, &local, format, spi, lane);
            let sa = InboundSa {
                spi,
                lane,
                cipher,
                key,
                encapsulation: terms.encapsulation,
                lifetime: shared.config.sa_lifetime,
            };
            let (peer, path) = (self.peer, self.path);
            let (engine, remote) = (terms.engine.kind, terms.remote);
            shared.command(EngineCommand::InstallInbound { engine, peer, path, sa, remote });
            lanes.push(LaneOffer { lane, spi, nonce });
        }
        let generation = Generation {
            session: terms.tag,
            addresses: (terms.local, terms.remote),
            lanes: lanes.iter().map(|lane| (lane.lane, lane.spi)).collect(),
            offer: Offer {
                session: terms.tag,
                offer: shared.new_offer(),
                format: terms.engine.format,
                engine: terms.engine.kind,
                sender_engine: terms.sender_engine,
                encapsulation: terms.encapsulation,
                address: None,
                port: terms.engine.port,
                cipher,
                rco: terms.engine.rco,
                mtu: shared.config.link_mtu,
                lanes,
            },
            installed: now,
            rekey_at: now + rekey_after(shared),
            used: None,
            superseded: None,
            resend: Some(now + ms(RESEND_MS)),
            sendings: 1,
        };
        shared.message(self.peer, Message::Offer(generation.offer.clone()));
        self.generations.push_back(generation);
    }
}

impl Generation {
    fn has(&self, spi: u32) -> bool {
        self.lanes.iter().any(|&(_, other)| other == spi)
    }

    /// It was offered on other terms: the engine has changed, or the addresses that a kernel's SAs
    /// are bound to.
    fn is_outdated(&self, terms: &Terms<'_>) -> bool {
        let moved = terms.engine.kind == EngineKind::Kernel
            && self.addresses != (terms.local, terms.remote);
        let offer = &self.offer;
        moved
            || offer.port != terms.engine.port
            || offer.rco != terms.engine.rco
            || terms.cipher != Some(offer.cipher)
            || offer.lanes.len() != usize::from(terms.lanes)
    }

    pub(crate) fn dies_at(&self, lifetime: Duration) -> Instant {
        let end = self.installed + lifetime;
        self.superseded.map_or(end, |since| end.min(since + ms(DRAIN_MS)))
    }

    pub(crate) fn remove(self, shared: &mut Shared) {
        for (_, spi) in self.lanes {
            shared.spis.remove(&spi);
            shared.command(EngineCommand::RemoveInbound { spi });
        }
    }
}

/// A tenth less at random, so that a fleet that started at once does not rekey at once.
fn rekey_after(shared: &mut Shared) -> Duration {
    let most = shared.config.rekey_after;
    let tenth = u64::try_from(most.as_millis() / 10).unwrap_or(u64::MAX).saturating_add(1);
    most.saturating_sub(ms(shared.rng.next_u64() % tenth))
}
