//! The receiving half of a path: the SAs that this host has installed and offered.
//!
//! An offer makes a generation of SAs, one per lane. The sender moves only forward: it takes no offer
//! older than the last it took. A generation is in use once the peer accepted it or a packet came in on
//! it. From then on, all earlier ones only drain.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rand::Rng;
use weft_crypto::{Cipher, Format, PeerId, SessionKey, derive_sa_key};

use crate::config::{
    DRAIN_MS, DRAIN_SHORTEST_MS, EngineOffer, GENERATIONS_MAX, OFFER_INTERVAL_MS,
    OFFER_SENDINGS_MAX, RESEND_MS, ms,
};
use crate::engine_api::{EngineCommand, InboundSa, PathId};
use crate::message::{LaneOffer, Message, Offer};
use crate::pairing::Key;
use crate::shared::{LaneWord, Shared};
use crate::spi::OVPN_KEY_IDS;

/// Generations of a path of format `ovpn` that live at once: one fewer than the key ids. So one id is free for the
/// next.
const OVPN_GENERATIONS_MAX: usize = OVPN_KEY_IDS as usize - 1;
/// The same where the kernel's device receives: it has two key slots, and a third key overwrites the older
/// one.
const SLOTS: usize = 2;

/// The terms of an offer.
pub(crate) struct Terms<'a> {
    pub(crate) session: &'a SessionKey,
    pub(crate) tag: u64,
    pub(crate) engine: &'a EngineOffer,
    pub(crate) key: Key,
    /// `None` for format `plain`, which has no SAs.
    pub(crate) cipher: Option<Cipher>,
    pub(crate) lanes: u16,
    /// This host's address, if known.
    pub(crate) local: Option<IpAddr>,
    /// The peer's address.
    pub(crate) remote: IpAddr,
}

pub(crate) struct Inbound {
    peer: PeerId,
    path: PathId,
    generations: VecDeque<Generation>,
    /// The source of each lane's SPIs in format `ovpn`, for the life of the path.
    words: BTreeMap<u16, LaneWord>,
    /// A new offer is due ...
    wanted: bool,
    /// ... but not before.
    not_before: Option<Instant>,
    rekeys: u64,
    /// First SPIs of the last [`GENERATIONS_MAX`] cleared generations, which the peer may still name.
    cleared: VecDeque<u32>,
}

/// The SAs of one offer.
pub(crate) struct Generation {
    session: u64,
    offer: Offer,
    /// This host's address and the peer's, which its SAs may be bound to.
    addresses: (Option<IpAddr>, IpAddr),
    lanes: Vec<(u16, u32)>,
    installed: Instant,
    rekey_at: Instant,
    /// Since when the sender is known to use this generation.
    used: Option<Instant>,
    /// Since when a later generation is known to be in use.
    superseded: Option<Instant>,
    /// When the offer is sent again.
    resend: Option<Instant>,
    sendings: u32,
    /// The time of the last prompt to the sender to confirm the offer: the offer itself, or a new link, on which
    /// it confirms again.
    asked: Instant,
}

impl Inbound {
    pub(crate) fn new(peer: PeerId, path: PathId) -> Self {
        Self {
            peer,
            path,
            generations: VecDeque::new(),
            words: BTreeMap::new(),
            wanted: true,
            not_before: None,
            rekeys: 0,
            cleared: VecDeque::new(),
        }
    }

    pub(crate) fn rekeys(&self) -> u64 {
        self.rekeys
    }

    /// Whether a generation holds this SA.
    fn has(&self, spi: u32) -> bool {
        self.generations.iter().any(|generation| generation.has(spi))
    }

    /// Whether a generation holds this SA, or held it until it was cleared.
    pub(crate) fn knows(&self, spi: u32) -> bool {
        self.has(spi) || self.cleared.contains(&spi)
    }

    /// Asks for new SAs.
    pub(crate) fn want(&mut self) {
        self.wanted = true;
    }

    /// The link has a new session key. Offers under the old one are not repeated, but the sender may have
    /// taken them. Their SAs stay until a later one is known to be used.
    pub(crate) fn new_session(&mut self, now: Instant) {
        for generation in &mut self.generations {
            (generation.resend, generation.asked) = (None, now);
        }
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

    /// The path is removed: returns its generations, which still receive for a while.
    pub(crate) fn retire(mut self, now: Instant, shared: &mut Shared) -> Vec<Generation> {
        self.free_words(shared);
        for generation in &mut self.generations {
            generation.superseded.get_or_insert(now);
        }
        self.generations.into()
    }

    /// The path and all its SAs are removed.
    pub(crate) fn close(&mut self, shared: &mut Shared) {
        self.clear(shared);
        self.free_words(shared);
    }

    fn free_words(&mut self, shared: &mut Shared) {
        std::mem::take(&mut self.words).values().for_each(|word| shared.free_word(word));
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

    /// The sender needs a successor of this SA, or of an SA that is no longer here.
    pub(crate) fn handle_rekey_request(&mut self, now: Instant, spi: u32) {
        let known = self.has(spi);
        match self.generations.back_mut() {
            Some(newest) if newest.used.is_none() && newest.resend.is_some() => {
                // The successor is already offered: repeat the offer soon.
                newest.resend = newest.resend.map(|at| at.min(now + ms(OFFER_INTERVAL_MS)));
            }
            Some(newest) => self.wanted |= !known || newest.has(spi),
            None => self.wanted = true,
        }
    }

    /// Removes generations that have drained or expired; repeats and renews offers. `terms` is `None`
    /// while no offer can be made.
    pub(crate) fn handle_timeout(
        &mut self,
        now: Instant,
        terms: Option<&Terms<'_>>,
        shared: &mut Shared,
    ) {
        self.prune(now, shared);
        let Some(terms) = terms else { return };
        if let Some(newest) = self.generations.back_mut() {
            if newest.is_outdated(terms) {
                // Stop repeating it, so that there is room for the next one soon.
                newest.resend = None;
                self.wanted = true;
            } else if newest.used.is_some() && now >= newest.rekey_at {
                self.wanted = true;
            }
            if newest.resend.is_some_and(|at| now >= at) {
                if newest.sendings >= OFFER_SENDINGS_MAX {
                    newest.resend = None;
                    self.wanted = true;
                } else {
                    newest.resend = Some(now + ms(RESEND_MS << newest.sendings));
                    newest.sendings += 1;
                    newest.asked = now;
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
            if self.make_room(now, &terms.key, shared)
                && let Some(lanes) = self.new_lanes(terms, shared)
            {
                self.wanted = false;
                self.offer(now, terms, cipher, lanes, shared);
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
                // Without `not_before`, the offer was made when it was requested.
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

    /// Makes room for one more generation. It never removes an SA that the sender may still use:
    ///
    /// - A superseded generation is no longer sent on, since the sender moves only forward. Packets on
    ///   their way have arrived after the shortest drain.
    /// - A generation whose offer has no answer was not taken. If engines report first use, probes would
    ///   have shown it long ago. The kernel's device does not report it, so there the answer counts. A
    ///   sender takes an offer when it arrives and confirms at once. On each new link it repeats its
    ///   last confirmation. So an offer that is no longer repeated is unused once a message has had
    ///   ample time.
    ///
    /// Of two generations in two slots only one can be in use. There is room for a third once the other
    /// has drained or its offer is given up. Until then the path waits with a new offer and carries on.
    fn make_room(&mut self, now: Instant, key: &Key, shared: &mut Shared) -> bool {
        let most = match key.format {
            _ if key.has_two_slots() => SLOTS,
            Format::Ovpn => OVPN_GENERATIONS_MAX,
            Format::Esp | Format::Plain => GENERATIONS_MAX,
        };
        if self.generations.len() < most {
            return true;
        }
        let spare = self.generations.iter().position(|generation| match generation.superseded {
            Some(since) => now >= since + ms(DRAIN_SHORTEST_MS),
            None if generation.used.is_some() => false,
            None if key.has_two_slots() => {
                generation.resend.is_none() && now >= generation.asked + ms(DRAIN_SHORTEST_MS)
            }
            None => now >= generation.installed + ms(DRAIN_MS),
        });
        spare.map(|index| self.remove(index, shared)).is_some()
    }

    fn remove(&mut self, index: usize, shared: &mut Shared) {
        if let Some(generation) = self.generations.remove(index) {
            generation.remove(shared);
        }
    }

    /// Returns an SPI and a nonce for each lane of a new generation. `None`: no SPI is free.
    fn new_lanes(&mut self, terms: &Terms<'_>, shared: &mut Shared) -> Option<Vec<LaneOffer>> {
        let mut lanes = Vec::with_capacity(usize::from(terms.lanes));
        for lane in 0..terms.lanes {
            let Some(spi) = self.new_spi(terms.key.format, lane, shared) else {
                for LaneOffer { spi, .. } in &lanes {
                    shared.spis.remove(spi);
                }
                return None;
            };
            lanes.push(LaneOffer { lane, spi, nonce: shared.nonce() });
        }
        Some(lanes)
    }

    fn new_spi(&mut self, format: Format, lane: u16, shared: &mut Shared) -> Option<u32> {
        if format != Format::Ovpn {
            return Some(shared.new_spi(self.peer, lane));
        }
        let word = match self.words.entry(lane) {
            Entry::Occupied(word) => word.into_mut(),
            Entry::Vacant(place) => place.insert(shared.new_word(lane)?),
        };
        shared.next_spi(self.peer, word)
    }

    fn offer(
        &mut self,
        now: Instant,
        terms: &Terms<'_>,
        cipher: Cipher,
        lanes: Vec<LaneOffer>,
        shared: &mut Shared,
    ) {
        if let Some(newest) = self.generations.back_mut() {
            newest.resend = None;
        }
        let (engine, format) = (terms.engine.kind, terms.engine.format);
        for LaneOffer { lane, spi, nonce } in &lanes {
            let (lane, spi) = (*lane, *spi);
            let sa = InboundSa {
                spi,
                lane,
                cipher,
                key: derive_sa_key(terms.session, nonce, &shared.local, format, spi, lane),
                encapsulation: terms.key.encapsulation,
                remote_engine: terms.key.remote_engine,
                lifetime: shared.config.sa_lifetime,
            };
            let (peer, path, remote) = (self.peer, self.path, terms.remote);
            shared.command(EngineCommand::InstallInbound { engine, peer, path, sa, remote });
        }
        let generation = Generation {
            session: terms.tag,
            addresses: (terms.local, terms.remote),
            lanes: lanes.iter().map(|lane| (lane.lane, lane.spi)).collect(),
            offer: Offer {
                session: terms.tag,
                offer: shared.new_offer(),
                format,
                engine,
                sender_engine: terms.key.remote_engine,
                encapsulation: terms.key.encapsulation,
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
            asked: now,
        };
        shared.message(self.peer, Message::Offer(generation.offer.clone()));
        self.generations.push_back(generation);
    }
}

impl Generation {
    fn has(&self, spi: u32) -> bool {
        self.lanes.iter().any(|&(_, other)| other == spi)
    }

    /// It was offered on other terms: the engine or the addresses that its SAs are bound to have changed.
    fn is_outdated(&self, terms: &Terms<'_>) -> bool {
        let moved =
            terms.key.is_bound_to_addresses() && self.addresses != (terms.local, terms.remote);
        let offer = &self.offer;
        moved
            || offer.port != terms.engine.port
            || offer.rco != terms.engine.rco
            || terms.cipher != Some(offer.cipher)
            || offer.lanes.len() != usize::from(terms.lanes)
    }

    /// It belongs to the path `key`.
    pub(crate) fn is_of(&self, key: &Key) -> bool {
        let Offer { format, engine, sender_engine, encapsulation, .. } = self.offer;
        *key == Key { engine, remote_engine: sender_engine, encapsulation, format }
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

/// Subtracts up to a tenth at random, so that a fleet started at once does not rekey at once.
fn rekey_after(shared: &mut Shared) -> Duration {
    let most = shared.config.rekey_after;
    let tenth = u64::try_from(most.as_millis() / 10).unwrap_or(u64::MAX).saturating_add(1);
    most.saturating_sub(ms(shared.rng.next_u64() % tenth))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::Config;
    use crate::engine_api::{Encapsulation, EngineKind};

    /// A path of format `ovpn`, and the SPIs its engine holds.
    struct Rig {
        inbound: Inbound,
        shared: Shared,
        engine: EngineOffer,
        session: SessionKey,
        tag: u64,
        now: Instant,
        held: BTreeSet<u32>,
    }

    impl Rig {
        fn new(kind: EngineKind) -> Self {
            let peer = PeerId::from_bytes([2; 32]);
            let engine =
                EngineOffer { kind, format: Format::Ovpn, ..Config::default().engines.remove(0) };
            Self {
                inbound: Inbound::new(peer, PathId(1)),
                shared: Shared::new(PeerId::from_bytes([1; 32]), Config::default(), [3; 32]),
                engine,
                session: SessionKey::from_bytes([4; 32]),
                tag: 1,
                now: Instant::now(),
                held: BTreeSet::new(),
            }
        }

        /// Advances time, and runs what is due then.
        fn pass(&mut self, milliseconds: u64) {
            self.now += ms(milliseconds);
            let key = Key {
                engine: self.engine.kind,
                remote_engine: EngineKind::Kernel,
                encapsulation: Encapsulation::Udp,
                format: Format::Ovpn,
            };
            let terms = Terms {
                session: &self.session,
                tag: self.tag,
                engine: &self.engine,
                key,
                cipher: Some(Cipher::Aes256Gcm),
                lanes: 1,
                local: None,
                remote: [10, 0, 0, 2].into(),
            };
            self.inbound.handle_timeout(self.now, Some(&terms), &mut self.shared);
            self.carry_out();
        }

        fn carry_out(&mut self) {
            let most = match self.engine.kind {
                EngineKind::Kernel => SLOTS,
                EngineKind::Userspace => OVPN_GENERATIONS_MAX,
            };
            for command in self.shared.commands.drain(..) {
                match command {
                    EngineCommand::InstallInbound { sa, .. } => {
                        assert!(self.held.insert(sa.spi), "twice at once");
                        assert_eq!(sa.remote_engine, EngineKind::Kernel);
                    }
                    EngineCommand::RemoveInbound { spi } => assert!(self.held.remove(&spi)),
                    other => panic!("{other:?}"),
                }
                assert!(self.held.len() <= most, "more than there is room for");
            }
        }

        /// Key ids that the engine holds, the lowest first.
        fn held(&self) -> Vec<u32> {
            self.held.iter().map(|spi| spi >> 24 & 7).collect()
        }

        /// The sender takes the offer of this key id.
        fn accept(&mut self, key_id: u32) {
            let named = |generation: &&Generation| generation.lanes[0].1 >> 24 & 7 == key_id;
            let generation = self.inbound.generations.iter().find(named).unwrap();
            let (session, offer) = (generation.session, generation.offer.offer);
            let inbound = &mut self.inbound;
            inbound.handle_accept(self.now, session, offer, &[0], &mut self.shared).unwrap();
        }

        fn renew_session(&mut self) {
            self.tag += 1;
            self.inbound.new_session(self.now);
        }

        /// The sender is on key id 0, and 1 has been offered.
        fn with_an_offer(kind: EngineKind) -> Self {
            let mut rig = Self::new(kind);
            rig.pass(0);
            rig.accept(0);
            rig.inbound.want();
            rig.pass(100);
            assert_eq!(rig.held(), [0, 1]);
            rig
        }
    }

    #[test]
    fn a_third_key_waits_until_the_older_of_two_has_drained() {
        let mut rig = Rig::with_an_offer(EngineKind::Kernel);
        rig.accept(1);
        rig.inbound.want();
        rig.pass(1_900);
        assert_eq!(rig.held(), [0, 1]);
        rig.pass(200);
        assert_eq!(rig.held(), [1, 2]);
        assert_eq!(rig.inbound.rekeys(), 1);
        // Key ids come in turn, from 0 again after the last.
        for key_id in 2..19 {
            rig.accept(key_id & 7);
            rig.inbound.want();
            rig.pass(2_100);
            assert!(rig.held().contains(&((key_id + 1) & 7)), "{key_id}");
        }
        rig.inbound.clear(&mut rig.shared);
        rig.pass(0);
        assert_eq!(rig.held(), [20 & 7], "the count goes on");
    }

    #[test]
    fn of_two_keys_the_one_that_may_be_in_use_is_never_given_up() {
        // The offer was lost with the old link.
        let mut rig = Rig::with_an_offer(EngineKind::Kernel);
        rig.renew_session();
        rig.pass(1_900);
        assert_eq!(rig.held(), [0, 1]);
        rig.pass(200);
        assert_eq!(rig.held(), [0, 2]);
        // Its answer was lost, and is said again.
        let mut rig = Rig::with_an_offer(EngineKind::Kernel);
        rig.renew_session();
        rig.pass(1_000);
        rig.accept(1);
        rig.pass(1_900);
        assert_eq!(rig.held(), [0, 1]);
        rig.pass(200);
        assert_eq!(rig.held(), [1, 2]);
        // It is never answered.
        let mut rig = Rig::with_an_offer(EngineKind::Kernel);
        for _ in 0..60 {
            rig.pass(1_000);
        }
        assert_eq!(rig.held(), [0, 1]);
        for _ in 0..6 {
            rig.pass(1_000);
        }
        assert_eq!(rig.held(), [0, 2]);
        // It is on terms that no longer hold.
        let mut rig = Rig::with_an_offer(EngineKind::Kernel);
        rig.engine.port += 1;
        rig.pass(1_900);
        assert_eq!(rig.held(), [0, 1]);
        rig.pass(200);
        assert_eq!(rig.held(), [0, 2]);
    }

    #[test]
    fn one_key_id_is_always_free() {
        let mut rig = Rig::with_an_offer(EngineKind::Userspace);
        for _ in 0..20 {
            rig.renew_session();
            rig.pass(100);
            assert!(rig.held().contains(&0), "in use");
        }
        assert_eq!(rig.held(), [0, 1, 2, 3, 4, 5, 6]);
        rig.pass(10_000);
        assert_eq!(rig.held(), [0, 2, 3, 4, 5, 6, 7]);
    }
}
