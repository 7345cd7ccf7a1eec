//! One path to one peer: the SAs it receives on, the SAs it sends on, and what is known of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use rand::Rng;
use weft_crypto::{Cipher, Format, PeerId, SessionKey, derive_sa_key};

use crate::config::{DRAIN_SHORTEST_MS, KEEPALIVE_MS, RESEND_MS, ms, overhead};
use crate::inbound::{Inbound, Terms};
use crate::message::{Accept, Message, Offer, ProbeAnswer, RekeyRequest};
use crate::prober::{Prober, Role, Sizes, Verdict, retry_after};
use crate::seam::{Encapsulation, EngineCommand, EngineKind, OutboundSa, PathId};
use crate::shared::Shared;
use crate::status::{PathChange, PathState, PathStatus, Reason};

/// Names a candidate among those of one peer, the preferred first: kernel before userspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) engine: EngineKind,
    pub(crate) remote_engine: EngineKind,
    pub(crate) format: Format,
}

pub(crate) struct Candidate {
    pub(crate) peer: PeerId,
    pub(crate) path: PathId,
    pub(crate) key: Key,
    pub(crate) inbound: Inbound,
    outbound: Option<Outbound>,
    prober: Prober,
    /// The last offer taken under the present session key, and the answer to it.
    accepted: Option<Accept>,
    failure: Option<Reason>,
    request: Option<Request>,
    /// Not to be used before: the engine has failed.
    hold: Option<Instant>,
    engine_failures: u32,
    /// When the peer's last probe came in.
    heard: Option<Instant>,
    keepalive: Option<Instant>,
    state: PathState,
    reason: Option<Reason>,
    since: Instant,
}

struct Outbound {
    cipher: Cipher,
    /// Lane and SPI.
    lanes: BTreeMap<u16, u32>,
    installed: Instant,
    offered: SocketAddr,
    remote: SocketAddr,
}

/// A wish for a new SA, repeated until one is offered.
struct Request {
    spi: u32,
    at: Instant,
}

impl Candidate {
    pub(crate) fn new(now: Instant, peer: PeerId, key: Key, ceiling: u16, sh: &mut Shared) -> Self {
        let path = sh.new_path(peer);
        let sizes = Sizes::new(sh.config.container_mtu, ceiling);
        Self {
            peer,
            path,
            key,
            inbound: Inbound::new(peer, path),
            outbound: None,
            prober: Prober::new(path, sizes, sh),
            accepted: None,
            failure: None,
            request: None,
            hold: None,
            engine_failures: 0,
            heard: None,
            keepalive: None,
            state: PathState::Probing,
            reason: Some(Reason::AwaitingOffer),
            since: now,
        }
    }

    /// Frames can take this path.
    pub(crate) fn is_usable(&self) -> bool {
        self.outbound.is_some() && self.prober.is_alive()
    }

    /// It may take traffic from a path that is less preferred.
    pub(crate) fn is_clean(&self, now: Instant) -> bool {
        self.is_usable() && self.prober.is_clean(now)
    }

    pub(crate) fn role_changed(&mut self, now: Instant, role: Role) {
        self.prober.role_changed(now, role);
        self.keepalive = (role == Role::Active).then(|| now + ms(KEEPALIVE_MS));
    }

    pub(crate) fn handle_session(&mut self, now: Instant) {
        self.accepted = None;
        self.inbound.new_session();
        self.prober.resume(now);
        if self.failure == Some(Reason::LinkLost) {
            self.failure = None;
        }
    }

    pub(crate) fn handle_link_down(&mut self) {
        self.prober.pause();
    }

    pub(crate) fn handle_link_lost(&mut self, shared: &mut Shared) {
        self.drop_outbound(shared);
        self.request = None;
        self.hold = None;
        self.failure = Some(Reason::LinkLost);
    }

    /// The peer has lost all its SAs.
    pub(crate) fn handle_peer_restart(&mut self, shared: &mut Shared) {
        self.inbound.clear(shared);
        self.drop_outbound(shared);
        self.request = None;
        self.accepted = None;
        if !matches!(self.failure, Some(Reason::EngineError(_))) {
            self.failure = None;
        }
    }

    pub(crate) fn handle_engine_failure(&mut self, now: Instant, text: String, sh: &mut Shared) {
        let spi = self.outbound.as_ref().and_then(Outbound::first_spi);
        let spi = spi.or(self.request.as_ref().map(|request| request.spi));
        self.inbound.clear(sh);
        self.drop_outbound(sh);
        let at = now + retry_after(self.engine_failures, sh);
        self.engine_failures = self.engine_failures.saturating_add(1);
        self.request = spi.map(|spi| Request { spi, at });
        self.hold = Some(at);
        self.failure = Some(Reason::EngineError(text));
    }

    /// Everything of this path leaves the engine.
    pub(crate) fn close(&mut self, shared: &mut Shared) {
        self.inbound.clear(shared);
        self.drop_outbound(shared);
        shared.paths.remove(&self.path);
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.failure == Some(Reason::LinkLost)
    }

    pub(crate) fn is_held(&self) -> bool {
        self.hold.is_some()
    }

    /// The last offer that was taken in this session.
    pub(crate) fn accepted(&self) -> Option<&Accept> {
        self.accepted.as_ref()
    }

    /// Sends on the offered SAs from now on.
    pub(crate) fn handle_offer(
        &mut self,
        now: Instant,
        offer: &Offer,
        session: &SessionKey,
        offered: SocketAddr,
        shared: &mut Shared,
    ) {
        // An address learned from the peer's packets holds until the peer names another.
        let remote = match &self.outbound {
            Some(outbound) if outbound.offered == offered => outbound.remote,
            _ => offered,
        };
        let engine = shared.config.engine(self.key.engine, self.key.format);
        let lanes_max = engine.map_or(1, |engine| engine.lanes_max);
        let taken: Vec<_> = offer.lanes.iter().filter(|lane| lane.lane < lanes_max).collect();
        let lanes: BTreeMap<u16, u32> = taken.iter().map(|lane| (lane.lane, lane.spi)).collect();
        let kept = |outbound: &Outbound| outbound.lanes.keys().all(|lane| lanes.contains_key(lane));
        if self.outbound.as_ref().is_some_and(|outbound| !kept(outbound)) {
            // A lane that is no longer offered must not go on with its old SA.
            shared.command(EngineCommand::RemoveOutbound { path: self.path });
        }
        for lane in taken {
            let (peer, path) = (self.peer, self.path);
            let key = derive_sa_key(session, &lane.nonce, &peer, offer.format, lane.spi, lane.lane);
            let sa = OutboundSa {
                spi: lane.spi,
                lane: lane.lane,
                cipher: offer.cipher,
                key,
                rco: offer.rco,
                iv_salt: shared.rng.next_u64(),
                packets_soft: shared.config.packets_soft,
                packets_hard: shared.config.packets_hard,
                bytes_soft: shared.config.bytes_soft,
                bytes_hard: shared.config.bytes_hard,
                encapsulation: Encapsulation::Udp,
                lifetime: shared.config.sa_lifetime,
            };
            let engine = self.key.engine;
            shared.command(EngineCommand::InstallOutbound { engine, peer, path, sa, remote });
        }
        self.accepted = Some(Accept {
            session: offer.session,
            offer: offer.offer,
            lanes: lanes.keys().copied().collect(),
        });
        let cipher = offer.cipher;
        self.outbound = Some(Outbound { cipher, lanes, installed: now, offered, remote });
        self.request = None;
        match self.failure {
            _ if self.prober.is_alive() => self.failure = None,
            Some(Reason::ProbeUnanswered | Reason::MtuNotCarried) => self.prober.hint(now),
            _ => {
                self.failure = None;
                self.prober.start(now);
            }
        }
    }

    pub(crate) fn handle_answer(
        &mut self,
        now: Instant,
        answer: ProbeAnswer,
        shared: &mut Shared,
    ) -> bool {
        let verdict = self.prober.handle_answer(now, answer.probe, answer.mtu, shared);
        let known = verdict.is_some();
        self.apply(verdict.unwrap_or(Verdict::Nothing), shared);
        known
    }

    pub(crate) fn handle_probe(&mut self, now: Instant) {
        let silent = |heard: Instant| now >= heard + ms(DRAIN_SHORTEST_MS);
        if self.heard.is_none_or(silent) {
            // The peer's first probe after a silence: the network may have healed both ways.
            self.prober.hint(now);
        }
        self.heard = Some(now);
    }

    pub(crate) fn handle_near_limit(&mut self, now: Instant, spi: u32) -> bool {
        let known = self.outbound.as_ref().is_some_and(|outbound| outbound.has(spi));
        if known && self.request.is_none() {
            self.request = Some(Request { spi, at: now });
        }
        known
    }

    pub(crate) fn handle_exhausted(&mut self, now: Instant, spi: u32, sh: &mut Shared) -> bool {
        let known = self.outbound.as_ref().is_some_and(|outbound| outbound.has(spi));
        if known {
            self.end_outbound(now, Reason::SaExhausted, sh);
        }
        known
    }

    pub(crate) fn handle_moved(&mut self, now: Instant, remote: SocketAddr, shared: &mut Shared) {
        let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        if let Some(outbound) = self.outbound.as_mut().filter(|outbound| outbound.remote != remote)
        {
            outbound.remote = remote;
            shared.command(EngineCommand::SetRemote { path: self.path, remote });
            self.prober.hint(now);
        }
    }

    pub(crate) fn handle_too_long(&mut self, now: Instant, mtu: u16, shared: &mut Shared) {
        let verdict = self.prober.handle_too_long(now, mtu, shared);
        self.apply(verdict, shared);
    }

    /// Sets the largest inner MTU to be sought, from the outer MTU of both links.
    pub(crate) fn set_link_mtu(&mut self, now: Instant, outer: u16, ipv6: bool, sh: &mut Shared) {
        let ipv6 = self.outbound.as_ref().map_or(ipv6, |outbound| outbound.remote.is_ipv6());
        let ceiling = outer.saturating_sub(overhead(self.key.format, Encapsulation::Udp, ipv6));
        let verdict = self.prober.set_sizes(now, Sizes::new(sh.config.container_mtu, ceiling));
        self.apply(verdict, sh);
    }

    pub(crate) fn handle_timeout(
        &mut self,
        now: Instant,
        role: Role,
        terms: Option<&Terms<'_>>,
        shared: &mut Shared,
    ) {
        if self.hold.is_some_and(|at| now >= at) {
            self.hold = None;
            self.inbound.want();
        }
        let held = self.hold.is_some();
        self.inbound.handle_timeout(now, terms.filter(|_| !held), shared);
        let lifetime = shared.config.sa_lifetime;
        if self.outbound.as_ref().is_some_and(|outbound| now >= outbound.installed + lifetime) {
            self.end_outbound(now, Reason::SaExpired, shared);
        }
        if let Some(request) = self.request.as_mut().filter(|request| now >= request.at)
            && terms.is_some()
        {
            request.at = now + ms(RESEND_MS);
            let message = RekeyRequest { spi: request.spi };
            shared.message(self.peer, Message::RekeyRequest(message));
        }
        if self.keepalive.is_some_and(|at| now >= at) {
            self.keepalive = Some(now + ms(KEEPALIVE_MS));
            if self.outbound.is_some() {
                shared.command(EngineCommand::SendKeepalive { path: self.path });
            }
        }
        if self.outbound.is_some() {
            let verdict = self.prober.handle_timeout(now, role, shared);
            self.apply(verdict, shared);
        }
    }

    pub(crate) fn next_timeout(&self, ready: bool, shared: &Shared) -> Option<Instant> {
        let lifetime = shared.config.sa_lifetime;
        let offers = ready && self.hold.is_none();
        [
            self.inbound.next_timeout(offers, lifetime),
            self.outbound.as_ref().map(|outbound| outbound.installed + lifetime),
            self.request.as_ref().filter(|_| ready).map(|request| request.at),
            self.hold,
            self.keepalive,
            self.outbound.as_ref().and_then(|_| self.prober.next()),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Tells a change of state, once.
    pub(crate) fn report(&mut self, now: Instant, role: Role, bound: bool, shared: &mut Shared) {
        let (state, reason) = if bound {
            (PathState::Active, None)
        } else if self.is_usable() {
            let contends = role == Role::Contender;
            let reason = if contends { Reason::ProvingClean } else { Reason::BetterPathActive };
            (PathState::Standby, Some(reason))
        } else if let Some(reason) = &self.failure {
            (PathState::Failed, Some(reason.clone()))
        } else if self.outbound.is_some() {
            (PathState::Probing, Some(Reason::Probing))
        } else {
            (PathState::Probing, Some(Reason::AwaitingOffer))
        };
        if (state, &reason) == (self.state, &self.reason) {
            return;
        }
        if state != self.state {
            self.since = now;
        }
        shared.change(PathChange {
            peer: self.peer,
            path: Some(self.path),
            format: Some(self.key.format),
            engine: Some(self.key.engine),
            remote_engine: Some(self.key.remote_engine),
            encapsulation: None,
            from: self.state,
            to: state,
            reason: reason.clone(),
        });
        self.state = state;
        self.reason = reason;
    }

    pub(crate) fn status(&self, link_down: bool) -> PathStatus {
        let outbound = self.outbound.as_ref();
        let failed = self.state == PathState::Failed;
        PathStatus {
            peer: self.peer,
            path: Some(self.path),
            format: Some(self.key.format),
            engine: Some(self.key.engine),
            remote_engine: Some(self.key.remote_engine),
            encapsulation: None,
            state: self.state,
            reason: self.reason.clone(),
            why_not_best: None,
            since: self.since,
            next_try: self.hold.or(self.prober.next()).filter(|_| failed),
            cipher: outbound.map(|outbound| outbound.cipher),
            encrypted: outbound.is_some(),
            mtu: self.prober.mtu(),
            rtt: self.prober.rtt(),
            remote: outbound.map(|outbound| outbound.remote),
            rekeys: self.inbound.rekeys(),
            link_down,
        }
    }

    fn apply(&mut self, verdict: Verdict, shared: &mut Shared) {
        match verdict {
            Verdict::Nothing => return,
            Verdict::Dead { mtu_not_carried: true } => self.failure = Some(Reason::MtuNotCarried),
            Verdict::Dead { .. } => self.failure = Some(Reason::ProbeUnanswered),
            Verdict::Alive => {
                self.failure = None;
                self.engine_failures = 0;
            }
            Verdict::MtuChanged => {}
        }
        if let Some(mtu) = self.prober.mtu() {
            shared.command(EngineCommand::SetPathMtu { path: self.path, mtu });
        }
    }

    /// The outbound SA can no longer be used: asks for another until it comes.
    fn end_outbound(&mut self, now: Instant, reason: Reason, shared: &mut Shared) {
        let spi = self.outbound.as_ref().and_then(Outbound::first_spi);
        self.drop_outbound(shared);
        self.request = spi.map(|spi| Request { spi, at: now });
        self.failure = Some(reason);
    }

    fn drop_outbound(&mut self, shared: &mut Shared) {
        if self.outbound.take().is_some() {
            shared.command(EngineCommand::RemoveOutbound { path: self.path });
        }
        self.prober.stop();
    }
}

impl Outbound {
    fn has(&self, spi: u32) -> bool {
        self.lanes.values().any(|&other| other == spi)
    }

    fn first_spi(&self) -> Option<u32> {
        self.lanes.values().next().copied()
    }
}
