//! All paths to one peer, and which of them carries its frames.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use weft_crypto::{Format, PeerId, SessionKey, derive_sa_key};

use crate::candidate::{Candidate, Turn};
use crate::config::{
    CARRY_ON_MS, Config, LINK_GRACE_MS, RESEND_MS, RETIRED_MAX, SESSION_SPIS_MAX, ms,
};
use crate::engine_api::{EngineCommand, EngineEvent, PathId};
use crate::inbound::{Generation, Terms};
use crate::lanes::Lanes;
use crate::message::{Hello, Message, MessageError, Offer, ProbeAnswer, Unheard, Withdraw};
use crate::pairing::{Key, Negotiation, abilities, taken};
use crate::prober::Role;
use crate::room::Room;
use crate::shared::Shared;
use crate::status::{PathChange, PathState, Reason};

pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) lanes: Lanes,
    /// `None` while the link is down.
    pub(crate) session: Option<Session>,
    pub(crate) link_down: Option<Instant>,
    /// This host's address on the link, if known.
    local: Option<IpAddr>,
    remote: IpAddr,
    /// Another peer owns this address in the kernel engine.
    address_shared: bool,
    pub(crate) hello: Option<Hello>,
    /// The start of the peer's daemon that the candidates belong to.
    instance: Option<u64>,
    hello_again: Option<Instant>,
    /// In boxes, since a node of the map has room for eleven.
    pub(crate) candidates: BTreeMap<Key, Box<Candidate>>,
    turn: Turn,
    /// SAs of paths that the hosts no longer have, on which the peer may still send.
    retired: VecDeque<Generation>,
    /// The active path.
    pub(crate) bound: Option<Key>,
    /// The active path, while it stands in for one that the hosts can have by now.
    outstays: Option<Key>,
    /// The path that carries frames: the active one, or the last one while there is none.
    pub(crate) carrier: Option<Key>,
    /// When the last path stops carrying frames while none is active.
    pub(crate) carries_until: Option<Instant>,
    /// Until then, a better path is taken as soon as it is proven.
    pub(crate) settles: Option<Instant>,
    /// Since when the path in use is in doubt.
    pub(crate) doubted: Option<Instant>,
    /// State and reason for status while there is no path.
    pub(crate) none: NoPath,
    /// SAs that the peer has offered in this session: SPI and nonce, which together determine the key.
    offered: BTreeSet<(u32, [u8; 32])>,
}

pub(crate) struct Session {
    key: SessionKey,
    tag: u64,
}

pub(crate) struct NoPath {
    pub(crate) state: PathState,
    pub(crate) reason: Reason,
    pub(crate) since: Instant,
}

impl Peer {
    pub(crate) fn new(now: Instant, local: PeerId, id: PeerId, remote: IpAddr) -> Self {
        Self {
            id,
            lanes: Lanes::new(local, id),
            session: None,
            link_down: None,
            local: None,
            remote: remote.to_canonical(),
            address_shared: false,
            hello: None,
            instance: None,
            hello_again: None,
            candidates: BTreeMap::new(),
            turn: Turn::default(),
            retired: VecDeque::new(),
            bound: None,
            outstays: None,
            carrier: None,
            carries_until: None,
            settles: None,
            doubted: None,
            none: NoPath { state: PathState::Probing, reason: Reason::AwaitingOffer, since: now },
            offered: BTreeSet::new(),
        }
    }

    pub(crate) fn handle_link_up(
        &mut self,
        now: Instant,
        key: SessionKey,
        addresses: (Option<IpAddr>, IpAddr),
        address_shared: bool,
        shared: &mut Shared,
    ) {
        let tag = session_tag(&key);
        self.link_down = None;
        // Probes are answered again: from now on silence is the path's.
        let carry_on = now + ms(CARRY_ON_MS);
        self.carries_until = self.carries_until.map(|until| until.min(carry_on));
        if self.session.as_ref().is_none_or(|session| session.tag != tag) {
            self.offered.clear();
            self.candidates.values_mut().for_each(|it| it.handle_session(now, shared));
        }
        self.session = Some(Session { key, tag });
        self.set_addresses(now, addresses, address_shared, shared);
        if self.has_greeted() {
            self.hello_again = None;
            self.send_hello(false, shared);
            self.sync(now, shared);
        } else {
            self.hello_again = Some(now);
        }
        self.none_changed(now, PathState::Probing, Reason::AwaitingOffer, shared);
        self.handle_timeout(now, shared);
    }

    fn set_addresses(
        &mut self,
        now: Instant,
        (local, remote): (Option<IpAddr>, IpAddr),
        address_shared: bool,
        shared: &mut Shared,
    ) {
        let known =
            |address: IpAddr| Some(address.to_canonical()).filter(|it| !it.is_unspecified());
        let (local, remote) = (local.and_then(known), remote.to_canonical());
        if (self.local, self.remote) != (local, remote) {
            (self.local, self.remote) = (local, remote);
            // Trust is bound to an address: both hosts must state again that they trust the new one.
            self.retire(now, Key::is_plain, shared);
            for candidate in self.candidates.values_mut() {
                candidate.handle_addresses(now, remote, shared);
            }
        }
        self.address_shared = address_shared;
        if address_shared {
            self.retire(now, Key::is_bound_to_addresses, shared);
        }
    }

    /// The link continues between other addresses.
    pub(crate) fn handle_addresses(
        &mut self,
        now: Instant,
        addresses: (Option<IpAddr>, IpAddr),
        address_shared: bool,
        shared: &mut Shared,
    ) {
        self.set_addresses(now, addresses, address_shared, shared);
        self.handle_local_change(now, shared);
    }

    /// This host's address towards the peer, and the peer's; `None` while the link is down.
    pub(crate) fn addresses(&self) -> Option<(Option<IpAddr>, IpAddr)> {
        self.session.as_ref().map(|_| (self.local, self.remote))
    }

    /// The peer that owned this one's address in the kernel engine has given it up.
    pub(crate) fn handle_address_free(&mut self, now: Instant, shared: &mut Shared) {
        self.address_shared = false;
        self.handle_local_change(now, shared);
    }

    /// It keeps its address from other peers' kernel paths: the link is up, or may come back in time.
    pub(crate) fn holds_address(&self) -> bool {
        self.session.is_some() || self.none.reason != Reason::LinkLost
    }

    pub(crate) fn handle_link_down(&mut self, now: Instant, shared: &mut Shared) {
        self.session = None;
        self.hello = None;
        self.hello_again = None;
        let since = *self.link_down.get_or_insert(now);
        if self.bound.is_none() && self.carrier.is_some() {
            // Answers to probes come over the link, so its silent end looks like the path's.
            self.carries_until = Some(since + ms(LINK_GRACE_MS));
        }
        self.candidates.values_mut().for_each(|it| it.handle_link_down());
        // The peer may come back from an address that is not trusted.
        self.retire(now, Key::is_plain, shared);
        self.handle_timeout(now, shared);
    }

    pub(crate) fn close(&mut self, shared: &mut Shared) {
        self.candidates.values_mut().for_each(|candidate| candidate.close(shared));
        self.candidates.clear();
        self.retired.drain(..).for_each(|generation| generation.remove(shared));
        shared.command(EngineCommand::RemovePeer { peer: self.id });
    }

    /// This host's link has another MTU, or its engines have changed.
    pub(crate) fn handle_local_change(&mut self, now: Instant, shared: &mut Shared) {
        if self.session.is_some() {
            self.send_hello(!self.has_greeted(), shared);
        }
        if self.has_greeted() {
            self.sync(now, shared);
        }
        self.set_sizes(now, shared);
        self.handle_timeout(now, shared);
    }

    pub(crate) fn handle_message(
        &mut self,
        now: Instant,
        message: Message,
        shared: &mut Shared,
    ) -> Result<(), MessageError> {
        match message {
            Message::Hello(hello) => self.handle_hello(now, hello, shared)?,
            Message::Offer(offer) => self.handle_offer(now, &offer, shared)?,
            Message::Accept(accept) => {
                let taken = self.candidates.values_mut().find_map(|candidate| {
                    let inbound = &mut candidate.inbound;
                    inbound.handle_accept(now, accept.session, accept.offer, &accept.lanes, shared)
                });
                shared.counters.messages_stale += u64::from(taken.is_none());
            }
            Message::ProbeAnswer(answer) => {
                let mut candidates = self.candidates.values_mut();
                let known = candidates.any(|it| it.handle_answer(now, answer, shared));
                shared.counters.messages_stale += u64::from(!known);
            }
            Message::RekeyRequest(request) => {
                // A request that names no SA of ours wants all paths rekeyed, since its path is no
                // longer known.
                let known = shared.spis.get(&request.spi) == Some(&self.id)
                    || self.candidates.values().any(|it| it.inbound.knows(request.spi));
                for candidate in self.candidates.values_mut() {
                    if !known || candidate.inbound.knows(request.spi) {
                        candidate.inbound.handle_rekey_request(now, request.spi);
                    }
                }
            }
            Message::Withdraw(withdraw) => self.handle_withdraw(&withdraw, shared),
            Message::Unheard(unheard) => self.handle_unheard(now, &unheard, shared),
            Message::Unknown => shared.counters.messages_unknown += 1,
        }
        self.handle_timeout(now, shared);
        Ok(())
    }

    /// `event` is about `path` of this peer, or about an inbound SA of it.
    pub(crate) fn handle_event(&mut self, now: Instant, event: EngineEvent, shared: &mut Shared) {
        let known = match event {
            EngineEvent::ProbeReceived { path, probe, mtu, .. } => {
                self.handle_probe(now, path);
                if self.session.is_some() {
                    let answer = ProbeAnswer { probe, mtu };
                    shared.message(self.id, Message::ProbeAnswer(answer));
                }
                true
            }
            EngineEvent::Unheard { path, .. } => self.tell_unheard(path, shared),
            EngineEvent::InboundFirstUse { spi } => {
                let mut candidates = self.candidates.values_mut();
                candidates.any(|candidate| candidate.inbound.handle_first_use(now, spi))
            }
            EngineEvent::OutboundNearLimit { path, spi } => {
                self.at(path).is_some_and(|it| it.handle_near_limit(now, spi))
            }
            EngineEvent::OutboundExhausted { path, spi } => {
                self.at(path).is_some_and(|it| it.handle_exhausted(now, spi, shared))
            }
            EngineEvent::RemoteMoved { path, remote } => {
                let known = self.at(path).map(|it| it.handle_moved(now, remote, shared));
                self.set_sizes(now, shared);
                known.is_some()
            }
            EngineEvent::LaneProven { path, lane, proven } => {
                let known = self.at(path).map(|it| it.handle_lane(lane, proven));
                if self.are_lanes_blocked() {
                    self.lanes.handle_blocked(now);
                }
                known.is_some()
            }
            EngineEvent::MessageTooLong { path, mtu } => {
                self.at(path).map(|it| it.handle_too_long(now, mtu, shared)).is_some()
            }
            EngineEvent::PathFailed { path, reason } => {
                self.fail_paths(now, |candidate| candidate.path == path, &reason, shared)
            }
            EngineEvent::EngineFailed { engine, reason } => {
                // A peer need not have a path on every engine.
                self.fail_paths(now, |candidate| candidate.key.engine == engine, &reason, shared);
                true
            }
        };
        shared.counters.events_stale += u64::from(!known);
        self.handle_timeout(now, shared);
    }

    /// Runs what is due, then selects a path.
    pub(crate) fn handle_timeout(&mut self, now: Instant, shared: &mut Shared) {
        if self.link_down.is_some_and(|since| now >= since + ms(LINK_GRACE_MS)) {
            for candidate in self.candidates.values_mut() {
                if !candidate.is_lost() {
                    candidate.handle_link_lost(shared);
                }
            }
            self.none_changed(now, PathState::Failed, Reason::LinkLost, shared);
        }
        if self.session.is_some() && self.hello_again.is_some_and(|at| now >= at) {
            self.hello_again = Some(now + ms(RESEND_MS));
            self.send_hello(true, shared);
        }
        self.prune_retired(now, shared);
        if self.lanes.handle_timeout(now, self.are_lanes_blocked()) {
            self.greet_with_lanes(shared);
        }
        self.run_candidates(now, shared);
        self.select(now, shared);
        if self.outstays.is_some_and(|key| self.bound != Some(key)) {
            self.sync(now, shared);
        }
    }

    /// No lane beyond the first of the path that carries frames gets through.
    pub(crate) fn are_lanes_blocked(&self) -> bool {
        let carrier = self.carrier.and_then(|key| self.candidates.get(&key));
        carrier.is_some_and(|candidate| candidate.are_lanes_blocked())
    }

    /// Tells the peer and the engines which host opens lanes from now on.
    fn greet_with_lanes(&mut self, shared: &mut Shared) {
        if let Some(hello) = self.hello.as_ref().filter(|_| self.has_greeted()) {
            self.lanes.tell(self.id, hello, shared);
            self.send_hello(false, shared);
        }
    }

    fn run_candidates(&mut self, now: Instant, shared: &mut Shared) {
        let config = Arc::clone(&shared.config);
        let roles: Vec<Role> = self.candidates.keys().map(|key| self.role(now, key)).collect();
        let mut candidates = std::mem::take(&mut self.candidates);
        let mut turn = std::mem::take(&mut self.turn);
        let negotiation = self.negotiation(&config).zip(self.session.as_ref());
        for ((key, candidate), role) in candidates.iter_mut().zip(roles) {
            let agreed = negotiation.as_ref().and_then(|(negotiation, session)| {
                negotiation.agree(key).ok().map(|agreed| (agreed, session))
            });
            let terms = agreed.map(|(agreed, session)| Terms {
                session: &session.key,
                tag: session.tag,
                engine: agreed.engine,
                key: *key,
                cipher: agreed.cipher,
                lanes: agreed.lanes,
                local: self.local,
                remote: self.remote,
            });
            candidate.handle_timeout(now, role, terms.as_ref(), &mut turn, shared);
        }
        self.candidates = candidates;
        self.turn = turn;
    }

    /// The inputs that determine the possible paths, once the hosts have greeted.
    pub(crate) fn negotiation<'a>(&'a self, config: &'a Config) -> Option<Negotiation<'a>> {
        let hello = self.hello.as_ref().filter(|_| self.has_greeted())?;
        let known = |address: Option<IpAddr>| {
            address.map(|it| it.to_canonical()).filter(|address| !address.is_unspecified())
        };
        let theirs = known(hello.address).is_some_and(|address| address != self.remote);
        let ours =
            known(hello.peer_address).zip(self.local).is_some_and(|(seen, local)| seen != local);
        Some(Negotiation {
            config,
            hello,
            nat: theirs || ours,
            address_shared: self.address_shared,
            trusted: config.trusts(self.remote),
        })
    }

    fn prune_retired(&mut self, now: Instant, shared: &mut Shared) {
        let lifetime = shared.config.sa_lifetime;
        self.remove_retired(|generation| now >= generation.dies_at(lifetime), shared);
    }

    fn remove_retired(&mut self, which: impl Fn(&Generation) -> bool, shared: &mut Shared) {
        let retired = std::mem::take(&mut self.retired).into_iter();
        let (gone, kept) = retired.partition::<VecDeque<_>, _>(which);
        gone.into_iter().for_each(|generation| generation.remove(shared));
        self.retired = kept;
    }

    /// Removes these paths. Frames move to another one first. Packets that the peer still sends on them
    /// are received for a while.
    fn retire(&mut self, now: Instant, which: impl Fn(&Key) -> bool, shared: &mut Shared) {
        let leaving: Vec<Key> = self.candidates.keys().copied().filter(|key| which(key)).collect();
        if leaving.is_empty() {
            return;
        }
        for key in &leaving {
            self.candidates.get_mut(key).into_iter().for_each(|it| it.leave());
        }
        self.select(now, shared);
        for key in &leaving {
            if let Some(candidate) = self.candidates.remove(key) {
                self.retired.extend(candidate.retire(now, shared));
            }
        }
        while self.retired.len() > RETIRED_MAX {
            self.retired.pop_front().into_iter().for_each(|oldest| oldest.remove(shared));
        }
    }

    pub(crate) fn next_timeout(&self, shared: &Shared) -> Option<Instant> {
        let ready = self.session.is_some() && self.has_greeted();
        let lost = self.none.state == PathState::Failed && self.none.reason == Reason::LinkLost;
        let grace = self.link_down.filter(|_| !lost).map(|since| since + ms(LINK_GRACE_MS));
        let lifetime = shared.config.sa_lifetime;
        let candidates = self.candidates.values();
        candidates
            .filter_map(|candidate| candidate.next_timeout(ready, shared))
            .chain(self.retired.iter().map(|generation| generation.dies_at(lifetime)))
            .chain(self.hello_again)
            .chain(self.carries_until.filter(|_| self.carrier.is_some()))
            .chain(grace)
            .chain(self.lanes.next_timeout())
            .min()
    }

    fn at(&mut self, path: PathId) -> Option<&mut Candidate> {
        let mut candidates = self.candidates.values_mut().map(Box::as_mut);
        candidates.find(|candidate| candidate.path == path)
    }

    /// A probe came in. A kernel engine does not know on which of its paths.
    fn handle_probe(&mut self, now: Instant, path: PathId) {
        let Some(key) = self.at(path).map(|candidate| candidate.key) else { return };
        for candidate in self.candidates.values_mut() {
            if candidate.path == path || (key.is_kernel() && candidate.key.is_kernel()) {
                candidate.handle_probe(now);
            }
        }
    }

    /// An engine has lost these paths. The peer is told at once and need not find out by probes.
    fn fail_paths(
        &mut self,
        now: Instant,
        which: impl Fn(&Candidate) -> bool,
        reason: &str,
        shared: &mut Shared,
    ) -> bool {
        let mut known = false;
        for (key, candidate) in &mut self.candidates {
            if !which(candidate) {
                continue;
            }
            known = true;
            let lost = candidate.handle_engine_failure(now, reason.to_owned(), shared);
            if let Some(session) = self.session.as_ref().filter(|_| lost) {
                let withdraw = Withdraw {
                    session: session.tag,
                    format: key.format,
                    engine: key.engine,
                    sender_engine: key.remote_engine,
                    encapsulation: key.encapsulation,
                    reason: Reason::EngineError(reason.to_owned()).to_string(),
                };
                shared.message(self.id, Message::Withdraw(withdraw));
            }
        }
        known
    }

    fn handle_withdraw(&mut self, withdraw: &Withdraw, shared: &mut Shared) {
        let key = Key {
            engine: withdraw.sender_engine,
            remote_engine: withdraw.engine,
            encapsulation: withdraw.encapsulation,
            format: withdraw.format,
        };
        let present = self.session.as_ref().is_some_and(|it| it.tag == withdraw.session);
        match self.candidates.get_mut(&key).filter(|_| present) {
            Some(candidate) => {
                candidate.handle_withdraw(Reason::of_peer(&withdraw.reason), shared);
            }
            None => shared.counters.messages_stale += 1,
        }
    }

    /// Tells the peer why its probes of this path are unanswered.
    fn tell_unheard(&mut self, path: PathId, shared: &mut Shared) -> bool {
        let Some(key) = self.at(path).map(|candidate| candidate.key) else { return false };
        if let Some(session) = &self.session {
            let unheard = Unheard {
                session: session.tag,
                format: key.format,
                engine: key.engine,
                sender_engine: key.remote_engine,
                encapsulation: key.encapsulation,
            };
            shared.message(self.id, Message::Unheard(unheard));
        }
        true
    }

    fn handle_unheard(&mut self, now: Instant, unheard: &Unheard, shared: &mut Shared) {
        let key = Key {
            engine: unheard.sender_engine,
            remote_engine: unheard.engine,
            encapsulation: unheard.encapsulation,
            format: unheard.format,
        };
        let present = self.session.as_ref().is_some_and(|it| it.tag == unheard.session);
        match self.candidates.get_mut(&key).filter(|_| present) {
            Some(candidate) => candidate.handle_unheard(now),
            None => shared.counters.messages_stale += 1,
        }
    }

    /// The peer's hello belongs to the session key that this host has.
    fn has_greeted(&self) -> bool {
        match (&self.session, &self.hello) {
            (Some(session), Some(hello)) => session.tag == hello.session,
            _ => false,
        }
    }

    fn send_hello(&self, reply_wanted: bool, shared: &mut Shared) {
        let Some(session) = &self.session else { return };
        let (engines, missing) = abilities(&shared.config, self.address_shared);
        let hello = Hello {
            session: session.tag,
            instance: shared.instance,
            ciphers: shared.config.ciphers.clone(),
            engines,
            missing,
            address: self.local,
            peer_address: Some(self.remote),
            trusted: shared.config.trusts(self.remote),
            mtu: shared.config.link_mtu,
            container_mtu: Some(shared.config.container_mtu),
            opens_lanes: self.lanes.said(),
            reply_wanted,
        };
        shared.message(self.id, Message::Hello(hello));
    }

    fn handle_hello(
        &mut self,
        now: Instant,
        hello: Hello,
        shared: &mut Shared,
    ) -> Result<(), MessageError> {
        hello.check()?;
        let Some(session) = &self.session else {
            shared.counters.messages_stale += 1;
            return Ok(());
        };
        let present = session.tag == hello.session;
        if !present && self.has_greeted() {
            // The hello belongs to an older session, or to one that this host learns of in a moment. It
            // is kept only if it can be the latter; the peer repeats it when asked.
            shared.counters.messages_stale += 1;
            return Ok(());
        }
        let reply_wanted = hello.reply_wanted;
        self.hello = Some(hello);
        if present {
            self.hello_again = None;
            if reply_wanted {
                self.send_hello(false, shared);
            }
            self.sync(now, shared);
        }
        Ok(())
    }

    fn handle_offer(
        &mut self,
        now: Instant,
        offer: &Offer,
        shared: &mut Shared,
    ) -> Result<(), MessageError> {
        let session = self.session.as_ref().filter(|session| session.tag == offer.session);
        let Some(session) = session else {
            shared.counters.messages_stale += 1;
            return Ok(());
        };
        offer.check()?;
        let key = Key {
            engine: offer.sender_engine,
            remote_engine: offer.engine,
            encapsulation: offer.encapsulation,
            format: offer.format,
        };
        if key.is_impossible() {
            return Err(MessageError::NoSuchPath);
        }
        let Some(candidate) = self.candidates.get_mut(&key) else {
            // The offer and a hello that takes the path away have crossed.
            shared.counters.messages_stale += 1;
            return Ok(());
        };
        match candidate.accepted() {
            // The answer was lost. The SA is in use: a second install would restart its sequence
            // numbers under the same key.
            Some(accepted) if accepted.offer == offer.offer => {
                let again = Message::Accept(accepted.clone());
                shared.message(self.id, again);
                return Ok(());
            }
            Some(accepted) if accepted.offer > offer.offer => {
                shared.counters.messages_stale += 1;
                return Ok(());
            }
            _ if candidate.is_held() => {
                candidate.ask_later(offer);
                return Ok(());
            }
            _ => {}
        }
        check_lanes(offer, &self.offered, &shared.config)?;
        let engine = shared.config.engine(key.engine, key.format);
        if !engine.is_some_and(|it| taken(&shared.config, it).any(|own| own == offer.cipher)) {
            // The offer has crossed a hello of an engine that takes fewer ciphers.
            shared.counters.messages_stale += 1;
            return Ok(());
        }
        let address = offer.address.unwrap_or(self.remote).to_canonical();
        if key.is_bound_to_addresses() && address != self.remote {
            return Err(MessageError::ForeignAddress);
        }
        self.offered.extend(offer.lanes.iter().map(|lane| (lane.spi, lane.nonce)));
        let offered = SocketAddr::new(address, offer.port);
        candidate.handle_offer(now, offer, &session.key, offered, shared);
        if let Some(accepted) = candidate.accepted() {
            shared.message(self.id, Message::Accept(accepted.clone()));
        }
        if let Some(hello) = &mut self.hello {
            hello.mtu = offer.mtu;
        }
        self.set_sizes(now, shared);
        Ok(())
    }

    /// Brings the candidates in line with what both hosts can do.
    fn sync(&mut self, now: Instant, shared: &mut Shared) {
        let Some(hello) = &self.hello else { return };
        if self.instance.replace(hello.instance).is_some_and(|before| before != hello.instance) {
            self.candidates.values_mut().for_each(|it| it.handle_peer_restart(shared));
            self.retired.drain(..).for_each(|generation| generation.remove(shared));
        }
        self.lanes.tell(self.id, hello, shared);
        let config = Arc::clone(&shared.config);
        let Some(negotiation) = self.negotiation(&config) else { return };
        let mut keys = negotiation.keys();
        keys.retain(|key| negotiation.agree(key).is_ok());
        let none = keys.is_empty().then(|| negotiation.why_none());
        // A path that stood in for `esp` carries frames until another path is proven.
        let stood_in = |key: &Key| key.format == Format::Ovpn && !keys.contains(key);
        let outstays = self.bound.filter(|key| stood_in(key) && negotiation.agree(key).is_ok());
        keys.extend(outstays);
        let room = Room::between(hello, &config, self.remote);
        for key in &keys {
            if key.has_two_slots() && !self.candidates.contains_key(key) {
                // The kernel's device has one slot for packets from this engine of the peer. An earlier
                // path that still drains there gives it up.
                self.remove_retired(|generation| generation.is_of(key), shared);
            }
            self.candidates
                .entry(*key)
                .or_insert_with(|| Box::new(Candidate::new(now, self.id, *key, room, shared)));
        }
        self.outstays = outstays;
        self.retire(now, |key| !keys.contains(key), shared);
        self.set_sizes(now, shared);
        let (state, reason) = match none {
            Some(reason) => (PathState::Failed, reason),
            None => (PathState::Probing, Reason::AwaitingOffer),
        };
        self.none_changed(now, state, reason, shared);
    }

    fn set_sizes(&mut self, now: Instant, shared: &mut Shared) {
        let Some(hello) = &self.hello else { return };
        let room = Room::between(hello, &shared.config, self.remote);
        for candidate in self.candidates.values_mut() {
            candidate.set_room(now, room, shared);
        }
    }

    fn none_changed(&mut self, now: Instant, to: PathState, reason: Reason, shared: &mut Shared) {
        if self.none.state == to && self.none.reason == reason {
            return;
        }
        let from = self.none.state;
        if self.candidates.is_empty() {
            let (peer, reason) = (self.id, Some(reason.clone()));
            let change = PathChange {
                peer,
                path: None,
                format: None,
                engine: None,
                remote_engine: None,
                encapsulation: None,
                from,
                to,
                reason,
            };
            shared.change(change);
        }
        self.none = NoPath { state: to, reason, since: now };
    }
}

/// Whether an offer's SAs can be sent on, in view of those that the peer has offered before. An SPI may
/// come again with another nonce, hence another key.
fn check_lanes(
    offer: &Offer,
    offered: &BTreeSet<(u32, [u8; 32])>,
    config: &Config,
) -> Result<(), MessageError> {
    if !config.ciphers.contains(&offer.cipher) {
        return Err(MessageError::WrongCipher);
    }
    if !offer.lanes.iter().any(|lane| lane.lane == 0) {
        return Err(MessageError::WrongLanes);
    }
    if offer.lanes.iter().any(|lane| offered.contains(&(lane.spi, lane.nonce))) {
        return Err(MessageError::WrongSpi);
    }
    if offered.len() + offer.lanes.len() > SESSION_SPIS_MAX {
        return Err(MessageError::TooManySas);
    }
    Ok(())
}

/// Tells two session keys apart without telling them: the key schedule's output for an SPI that no
/// SA can have.
fn session_tag(key: &SessionKey) -> u64 {
    let nobody = PeerId::from_bytes([0; 32]);
    let derived = derive_sa_key(key, &[0; 32], &nobody, Format::Esp, 0, 0);
    derived.expose().iter().take(8).fold(0, |tag, &byte| tag << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use weft_crypto::Cipher;

    use super::*;
    use crate::engine_api::{Encapsulation, EngineKind};
    use crate::message::LaneOffer;

    #[test]
    fn an_spi_may_come_again_but_not_with_its_nonce() {
        let lane = |lane, spi, nonce| LaneOffer { lane, spi, nonce: [nonce; 32] };
        let offer = |lanes: Vec<LaneOffer>| Offer {
            session: 1,
            offer: 2,
            format: Format::Ovpn,
            engine: EngineKind::Kernel,
            sender_engine: EngineKind::Kernel,
            encapsulation: Encapsulation::Udp,
            address: None,
            port: 6786,
            cipher: Cipher::Aes256Gcm,
            rco: false,
            mtu: 1500,
            lanes,
        };
        let config = Config::default();
        let offered = BTreeSet::from([(0x4800_1200, [1; 32])]);
        let check = |lanes| check_lanes(&offer(lanes), &offered, &config);
        assert_eq!(check(vec![lane(0, 0x4800_1200, 2)]), Ok(()));
        assert_eq!(check(vec![lane(0, 0x4900_1200, 1)]), Ok(()));
        let again = vec![lane(0, 0x4900_1200, 3), lane(1, 0x4800_1200, 1)];
        assert_eq!(check(again), Err(MessageError::WrongSpi));
        let full: BTreeSet<_> = (0..).map(|spi| (spi, [0; 32])).take(SESSION_SPIS_MAX).collect();
        let offer = offer(vec![lane(0, 0x4800_1200, 1)]);
        assert_eq!(check_lanes(&offer, &full, &config), Err(MessageError::TooManySas));
    }
}
