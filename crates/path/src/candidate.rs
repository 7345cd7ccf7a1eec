//! One path to one peer: the SAs it receives on, the SAs it sends on, and its state.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rand::Rng;
use weft_crypto::{Cipher, Format, PeerId, SessionKey, derive_sa_key};

use crate::config::{
    DRAIN_SHORTEST_MS, ENGINE_HOLD_FIRST_MS, ENGINE_SOUND_MS, KEEPALIVE_MS, PLAIN_PORT,
    PROBE_TURN_MS, RESEND_MS, UNHEARD_MS, ms,
};
use crate::engine_api::{EngineCommand, OutboundSa, PathId};
use crate::inbound::{Generation, Inbound, Terms};
use crate::lanes::Proofs;
use crate::message::{Accept, Message, Offer, ProbeAnswer, RekeyRequest};
use crate::pairing::Key;
use crate::prober::{PROBE_TIMEOUT_MAX_MS, Prober, Role, Verdict, retry_after};
use crate::room::Room;
use crate::shared::Shared;
use crate::status::{PathChange, PathState, PathStatus, Reason};

pub(crate) struct Candidate {
    pub(crate) peer: PeerId,
    pub(crate) path: PathId,
    pub(crate) key: Key,
    pub(crate) inbound: Inbound,
    outbound: Option<Outbound>,
    proofs: Proofs,
    prober: Prober,
    /// MTU of the peer's containers in bytes, if it says.
    containers: Option<u16>,
    /// The last offer taken under the present session key, and the answer to it.
    accepted: Option<Accept>,
    failure: Option<Reason>,
    /// The path has failed since the hosts met or met again.
    has_failed: bool,
    request: Option<Request>,
    /// The source of the peer's packets, if that is not the address that it offered (the first).
    learned: Option<Learned>,
    /// The engine has failed: the path is held back until then.
    hold: Option<Instant>,
    engine_failures: u32,
    /// Since when it carries packets.
    alive: Option<Instant>,
    /// The hosts no longer have the path: no frame may take it.
    leaving: bool,
    /// When the peer last said that it opens the packets and hears no probe.
    unheard: Option<Instant>,
    /// When the peer's last probe came in.
    heard: Option<Instant>,
    keepalive: Option<Instant>,
    state: PathState,
    reason: Option<Reason>,
    since: Instant,
}

struct Outbound {
    /// `None` on a path of format `plain`.
    cipher: Option<Cipher>,
    /// Lane and SPI; none on a path of format `plain`.
    lanes: BTreeMap<u16, u32>,
    /// The answer to the offer that it comes from; `None` on a path of format `plain`.
    accept: Option<Accept>,
    installed: Instant,
    offered: SocketAddr,
    remote: SocketAddr,
}

/// The peer's packets come from another address than it named, because of a NAT.
struct Learned {
    named: SocketAddr,
    remote: SocketAddr,
    /// Since when the path, which had failed, is tried there.
    tried: Option<Instant>,
}

/// A request for a new SA, repeated until one is offered.
struct Request {
    spi: u32,
    at: Instant,
}

/// The candidate of a peer that may send probes through the kernel engine. That engine has one policy for all
/// candidates that are bound to addresses ([`PROBE_TURN_MS`]).
#[derive(Default)]
pub(crate) struct Turn(Option<(PathId, Instant)>);

impl Turn {
    /// Takes the turn, or says when to ask again.
    fn take(&mut self, now: Instant, path: PathId, shared: &Shared) -> Result<(), Instant> {
        if let Some((holder, until)) = self.0
            && holder != path
            && now < until
        {
            return Err(until);
        }
        let length = ms(PROBE_TURN_MS).min(shared.config.probe_interval / 8);
        self.0 = Some((path, now + length));
        Ok(())
    }
}

impl Candidate {
    pub(crate) fn new(now: Instant, peer: PeerId, key: Key, room: Room, sh: &mut Shared) -> Self {
        let path = sh.new_path(peer);
        let sizes = room.sizes(&key, sh.config.container_mtu);
        Self {
            peer,
            path,
            key,
            inbound: Inbound::new(peer, path),
            outbound: None,
            proofs: Proofs::default(),
            prober: Prober::new(path, sizes, sh),
            containers: room.containers,
            accepted: None,
            failure: None,
            has_failed: false,
            request: None,
            learned: None,
            hold: None,
            engine_failures: 0,
            alive: None,
            leaving: false,
            unheard: None,
            heard: None,
            keepalive: None,
            state: PathState::Probing,
            reason: Some(Reason::AwaitingOffer),
            since: now,
        }
    }

    /// Frames can take this path.
    pub(crate) fn is_usable(&self) -> bool {
        self.outbound.is_some() && self.prober.is_alive() && !self.leaving
    }

    /// It was proven without a failure since the hosts met.
    pub(crate) fn is_unblemished(&self) -> bool {
        self.is_usable() && !self.has_failed && !self.prober.is_in_doubt()
    }

    /// It failed in use and came back on candidates' probes alone: it carries no frames while another path
    /// can.
    pub(crate) fn is_barred(&self, now: Instant) -> bool {
        self.prober.relapses().barred().is_some_and(|until| now < until)
    }

    /// It relapsed, and no answer since has shown that it carries frames.
    pub(crate) fn is_suspect(&self) -> bool {
        self.prober.relapses().is_suspect()
    }

    /// A firewall on the peer's host drops packets that its kernel has opened. Either the peer says so, or the
    /// probes of candidates pass. Only something that sees inside the packets can tell those from frames.
    pub(crate) fn is_stopped_behind_the_seal(&self, now: Instant) -> bool {
        let told = self.unheard.is_some_and(|at| now < at + ms(UNHEARD_MS));
        self.key.is_judged_again() && (told || self.is_suspect())
    }

    pub(crate) fn handle_unheard(&mut self, now: Instant) {
        self.unheard = Some(now);
    }

    /// See [`Prober::is_narrow`].
    pub(crate) fn is_narrow(&self) -> bool {
        self.prober.is_narrow()
    }

    /// See [`Prober::is_in_doubt`].
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.prober.is_in_doubt()
    }

    /// How uncertain a usable path is, while another one is in doubt since `since`: smaller is better.
    pub(crate) fn doubt(&self, since: Option<Instant>) -> u8 {
        if self.prober.is_in_doubt() {
            2
        } else {
            u8::from(since.is_some_and(|since| !self.prober.is_answered_since(since)))
        }
    }

    /// The address its packets go to.
    pub(crate) fn remote(&self) -> Option<SocketAddr> {
        self.outbound.as_ref().map(|outbound| outbound.remote)
    }

    pub(crate) fn has_outbound(&self) -> bool {
        self.outbound.is_some()
    }

    pub(crate) fn failure(&self) -> Option<&Reason> {
        self.failure.as_ref()
    }

    /// State and reason as last told.
    pub(crate) fn told(&self) -> (PathState, Option<&Reason>) {
        (self.state, self.reason.as_ref())
    }

    /// It may take traffic from a path that is less preferred.
    pub(crate) fn is_clean(&self, now: Instant) -> bool {
        self.is_usable() && self.prober.is_clean(now)
    }

    pub(crate) fn role_changed(&mut self, now: Instant, role: Role) {
        self.prober.role_changed(now, role);
        self.keepalive = (role == Role::Active).then(|| now + ms(KEEPALIVE_MS));
    }

    /// The link has a new session key. The peer is told again which of its offers was taken. If that answer
    /// was lost with the old link, the peer would give up SAs that are in use.
    pub(crate) fn handle_session(&mut self, now: Instant, shared: &mut Shared) {
        self.accepted = None;
        let accept = self.outbound.as_ref().and_then(|outbound| outbound.accept.clone());
        if let Some(accept) = accept {
            shared.message(self.peer, Message::Accept(accept));
        }
        self.inbound.new_session(now);
        self.prober.resume(now);
        if self.failure == Some(Reason::LinkLost) {
            self.failure = None;
        }
    }

    /// The link has another pair of addresses, with the peer at `remote`. The path sends there from now on. An
    /// SA bound to both addresses cannot move, so this host requests another. The peer may not see the need:
    /// its last offer may predate the move. A learned port stays, since the kernel reports only packets from a
    /// port other than the one it expects.
    pub(crate) fn handle_addresses(&mut self, now: Instant, remote: IpAddr, shared: &mut Shared) {
        let there = |address: SocketAddr| SocketAddr::new(remote, address.port());
        if let Some(learned) = &mut self.learned {
            (learned.named, learned.remote) = (there(learned.named), there(learned.remote));
        }
        if let Some(outbound) = self.outbound.as_mut() {
            outbound.offered = there(outbound.offered);
            if self.key.is_bound_to_addresses() {
                self.request = outbound.first_spi().map(|spi| Request { spi, at: now });
            } else if outbound.remote.ip() != remote {
                outbound.remote.set_ip(remote);
                let (path, remote) = (self.path, outbound.remote);
                shared.command(EngineCommand::SetRemote { path, remote });
            }
        }
        self.prober.hint(now);
        self.prober.hasten(now);
    }

    pub(crate) fn handle_link_down(&mut self) {
        self.prober.pause();
    }

    pub(crate) fn handle_link_lost(&mut self, shared: &mut Shared) {
        self.drop_outbound(shared);
        self.request = None;
        self.hold = None;
        self.failure = Some(Reason::LinkLost);
        self.has_failed = false;
    }

    /// The peer has lost all its SAs.
    pub(crate) fn handle_peer_restart(&mut self, shared: &mut Shared) {
        self.inbound.clear(shared);
        self.drop_outbound(shared);
        self.request = None;
        self.accepted = None;
        self.learned = None;
        self.has_failed = false;
        if !matches!(self.failure, Some(Reason::EngineError(_))) {
            self.failure = None;
        }
    }

    /// This host's engine has lost the path. `true`: the path was in the engine, so the peer's packets on it
    /// are lost.
    pub(crate) fn handle_engine_failure(
        &mut self,
        now: Instant,
        text: String,
        sh: &mut Shared,
    ) -> bool {
        if self.hold.is_some() {
            // Another report of the same event.
            return false;
        }
        let spi = self.outbound.as_ref().and_then(Outbound::first_spi);
        let spi = spi.or(self.request.as_ref().map(|request| request.spi));
        self.inbound.clear(sh);
        if self.alive.is_some_and(|since| now >= since + ms(ENGINE_SOUND_MS)) {
            self.engine_failures = 0;
        }
        self.drop_outbound(sh);
        let at = now + engine_hold(self.engine_failures, sh);
        self.engine_failures = self.engine_failures.saturating_add(1);
        self.request = spi.map(|spi| Request { spi, at });
        self.hold = Some(at);
        self.fail(Reason::EngineError(text));
        true
    }

    /// The peer's engine has lost the path; its next offer brings it back.
    pub(crate) fn handle_withdraw(&mut self, reason: Reason, shared: &mut Shared) {
        if self.outbound.is_some() {
            self.drop_outbound(shared);
            self.request = None;
            self.fail(reason);
        }
    }

    /// Removes the path from the engine.
    pub(crate) fn close(&mut self, shared: &mut Shared) {
        self.inbound.close(shared);
        self.drop_outbound(shared);
        shared.paths.remove(&self.path);
    }

    /// No frame takes this path from now on.
    pub(crate) fn leave(&mut self) {
        self.leaving = true;
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Stops sending on it; the SAs that the peer may still send on keep draining.
    pub(crate) fn retire(mut self, now: Instant, shared: &mut Shared) -> Vec<Generation> {
        self.drop_outbound(shared);
        shared.paths.remove(&self.path);
        self.inbound.retire(now, shared)
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.failure == Some(Reason::LinkLost)
    }

    pub(crate) fn is_held(&self) -> bool {
        self.hold.is_some()
    }

    /// An offer came while the path is held back. It is requested again afterwards, since the peer repeats it
    /// less and less often.
    pub(crate) fn ask_later(&mut self, offer: &Offer) {
        let spi = offer.lanes.first().map(|lane| lane.spi);
        self.request = spi.zip(self.hold).map(|(spi, at)| Request { spi, at });
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
        self.learned.take_if(|learned| learned.named != offered);
        let remote = self.learned.as_ref().map_or(offered, |learned| learned.remote);
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
                packets_soft: (packets_max(offer.format) / 4 * 3).min(shared.config.packets_soft),
                packets_hard: packets_max(offer.format).min(shared.config.packets_hard),
                bytes_soft: shared.config.bytes_soft,
                bytes_hard: shared.config.bytes_hard,
                encapsulation: offer.encapsulation,
                remote_engine: offer.engine,
                lifetime: shared.config.sa_lifetime,
            };
            let engine = self.key.engine;
            shared.command(EngineCommand::InstallOutbound { engine, peer, path, sa, remote });
        }
        let accept = Some(Accept {
            session: offer.session,
            offer: offer.offer,
            lanes: lanes.keys().copied().collect(),
        });
        self.accepted.clone_from(&accept);
        self.proofs.keep(|lane| lanes.contains_key(&lane));
        let goes_back = self.key.is_bound_to_addresses() && self.learned.is_none();
        if goes_back && self.remote().is_some_and(|before| before != remote) {
            // The kernel expects the peer's packets on an SA from where it sent to at that SA's installation,
            // and reports only others. An SA that expects the old address would never show that it still holds.
            self.inbound.want();
        }
        let cipher = Some(offer.cipher);
        self.outbound = Some(Outbound { cipher, lanes, accept, installed: now, offered, remote });
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
        self.apply(now, verdict.unwrap_or(Verdict::Nothing), shared);
        known
    }

    /// The engine reports whether packets come back on a lane beyond the first.
    pub(crate) fn handle_lane(&mut self, lane: u16, proven: bool) {
        let has = |outbound: &Outbound| outbound.lanes.contains_key(&lane);
        if lane > 0 && self.outbound.as_ref().is_some_and(has) {
            self.proofs.note(lane, proven);
        }
    }

    /// It sends on lanes beyond the first, and nothing comes back on any of them.
    pub(crate) fn are_lanes_blocked(&self) -> bool {
        let beyond =
            self.outbound.as_ref().map_or(0, |outbound| outbound.lanes.len().saturating_sub(1));
        beyond > 0 && self.proofs.blocked() == beyond
    }

    fn lanes_blocked(&self) -> Option<Reason> {
        let count = |lanes: usize| u16::try_from(lanes).unwrap_or(u16::MAX);
        let of = self.outbound.as_ref().map_or(0, |outbound| outbound.lanes.len());
        let blocked = count(self.proofs.blocked());
        (blocked > 0).then(|| Reason::LanesBlocked(blocked, count(of)))
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

    /// The peer's packets come from another address than the one sent to. The path sends there from now on. An
    /// SA bound to its addresses cannot move, so this host requests another one there.
    pub(crate) fn handle_moved(&mut self, now: Instant, remote: SocketAddr, shared: &mut Shared) {
        let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        let Some(outbound) = self.outbound.as_mut() else { return };
        if self.key.is_plain() || outbound.remote == remote {
            return;
        }
        if self.key.is_bound_to_addresses() && outbound.offered.ip() != remote.ip() {
            // A NAT changes the port. Only the link may change the address, since the link proves it.
            // Otherwise a peer's packets could claim the policy of another host.
            return;
        }
        let learned = Learned { named: outbound.offered, remote, tried: None };
        let known = self.learned.replace(learned);
        if !self.key.is_bound_to_addresses() {
            outbound.remote = remote;
            shared.command(EngineCommand::SetRemote { path: self.path, remote });
            self.prober.hint(now);
        } else if known.is_none_or(|known| known.remote != remote) || self.request.is_none() {
            let spi = outbound.first_spi();
            self.request = spi.map(|spi| Request { spi, at: now });
        }
    }

    /// Tries a failed path at the learned address, then at the address the peer named, until its packets
    /// come from elsewhere again. The NAT may be gone, and two hosts that send to stale addresses would never
    /// hear of each other. An SA bound to its addresses cannot move, so this host requests another one there.
    fn doubt_learned(&mut self, now: Instant, shared: &mut Shared) {
        let (Some(learned), Some(outbound)) = (&mut self.learned, &mut self.outbound) else {
            return;
        };
        if !self.prober.is_dead() {
            learned.tried = None;
            return;
        }
        // Several events can ask for a probe at once. Each is answered before there is a verdict.
        if now < *learned.tried.get_or_insert(now) + ms(PROBE_TIMEOUT_MAX_MS) {
            return;
        }
        self.learned = None;
        if self.key.is_bound_to_addresses() {
            self.request = outbound.first_spi().map(|spi| Request { spi, at: now });
            return;
        }
        outbound.remote = outbound.offered;
        let (path, remote) = (self.path, outbound.remote);
        shared.command(EngineCommand::SetRemote { path, remote });
    }

    pub(crate) fn handle_too_long(&mut self, now: Instant, mtu: u16, shared: &mut Shared) {
        let verdict = self.prober.handle_too_long(now, mtu, shared);
        self.apply(now, verdict, shared);
    }

    /// Sets the largest inner MTU to search for.
    pub(crate) fn set_room(&mut self, now: Instant, room: Room, sh: &mut Shared) {
        let outbound = self.outbound.as_ref();
        let ipv6 = outbound.map_or(room.ipv6, |outbound| outbound.remote.is_ipv6());
        self.containers = room.containers;
        let sizes = Room { ipv6, ..room }.sizes(&self.key, sh.config.container_mtu);
        let verdict = self.prober.set_sizes(now, sizes);
        self.apply(now, verdict, sh);
    }

    pub(crate) fn handle_timeout(
        &mut self,
        now: Instant,
        role: Role,
        terms: Option<&Terms<'_>>,
        turn: &mut Turn,
        shared: &mut Shared,
    ) {
        if self.hold.is_some_and(|at| now >= at) {
            self.hold = None;
            self.inbound.want();
        }
        let held = self.hold.is_some();
        if self.key.is_plain() {
            if let Some(terms) = terms.filter(|_| !held) {
                self.install_plain(now, terms.remote, shared);
            }
        } else {
            self.inbound.handle_timeout(now, terms.filter(|_| !held), shared);
            if self.expires(shared).is_some_and(|at| now >= at) {
                self.end_outbound(now, Reason::SaExpired, shared);
            }
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
            if self.outbound.is_some() && !self.key.is_raw() && !self.key.is_plain() {
                shared.command(EngineCommand::SendKeepalive { path: self.path });
            }
        }
        if self.outbound.is_some() && self.prober.is_due(now) {
            let waits = self.key.is_bound_to_addresses() && role != Role::Active;
            let turn = if waits { turn.take(now, self.path, shared) } else { Ok(()) };
            match turn {
                Ok(()) => {
                    self.doubt_learned(now, shared);
                    let verdict = self.prober.handle_timeout(now, role, shared);
                    self.apply(now, verdict, shared);
                }
                Err(at) => self.prober.delay(at),
            }
        }
    }

    /// Something makes it urgent to learn whether the path works.
    pub(crate) fn hasten(&mut self, now: Instant) {
        self.prober.hasten(now);
    }

    /// The network may have healed.
    pub(crate) fn hint(&mut self, now: Instant) {
        self.prober.hint(now);
    }

    pub(crate) fn next_timeout(&self, ready: bool, shared: &Shared) -> Option<Instant> {
        let lifetime = shared.config.sa_lifetime;
        let offers = ready && self.hold.is_none();
        [
            self.inbound.next_timeout(offers, lifetime),
            self.expires(shared),
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
    pub(crate) fn report(
        &mut self,
        now: Instant,
        state: PathState,
        reason: Option<Reason>,
        shared: &mut Shared,
    ) {
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
            encapsulation: self.key.shown_encapsulation(),
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
            encapsulation: self.key.shown_encapsulation(),
            state: self.state,
            reason: self.reason.clone(),
            why_not_best: None,
            lanes_blocked: self.lanes_blocked(),
            since: self.since,
            next_try: self.hold.or_else(|| self.next_try()).filter(|_| failed),
            cipher: outbound.and_then(|outbound| outbound.cipher),
            encrypted: !self.key.is_plain(),
            mtu: self.prober.mtu(),
            container_mtu: self.containers,
            rtt: self.prober.rtt(),
            remote: outbound.map(|outbound| outbound.remote),
            rekeys: self.inbound.rekeys(),
            link_down,
        }
    }

    /// When a failed path is retried, or a relapsed one may carry frames again.
    fn next_try(&self) -> Option<Instant> {
        let barred = self.prober.relapses().barred().filter(|_| self.prober.is_alive());
        barred.or(self.prober.next())
    }

    fn apply(&mut self, now: Instant, verdict: Verdict, shared: &mut Shared) {
        match verdict {
            Verdict::Nothing => return,
            Verdict::Dead { mtu_not_carried: true } => self.fail(Reason::MtuNotCarried),
            Verdict::Dead { .. } => self.fail(Reason::ProbeUnanswered),
            Verdict::Alive => {
                self.failure = None;
                self.unheard = None;
                self.alive = Some(now);
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
        self.fail(reason);
    }

    fn fail(&mut self, reason: Reason) {
        self.failure = Some(reason);
        self.has_failed = true;
    }

    /// Both hosts trust each other: this path needs no SAs, only the guard's exception.
    fn install_plain(&mut self, now: Instant, remote: IpAddr, shared: &mut Shared) {
        if self.outbound.is_some() {
            return;
        }
        let (peer, path) = (self.peer, self.path);
        shared.command(EngineCommand::InstallPlain { peer, path, remote });
        let remote = SocketAddr::new(remote, PLAIN_PORT);
        self.outbound = Some(Outbound {
            cipher: None,
            lanes: BTreeMap::new(),
            accept: None,
            installed: now,
            offered: remote,
            remote,
        });
        self.failure = None;
        self.prober.start(now);
    }

    /// When its outbound SAs come to the end of their life.
    fn expires(&self, shared: &Shared) -> Option<Instant> {
        let outbound = self.outbound.as_ref().filter(|_| !self.key.is_plain())?;
        Some(outbound.installed + shared.config.sa_lifetime)
    }

    fn drop_outbound(&mut self, shared: &mut Shared) {
        self.proofs.keep(|_| false);
        if self.outbound.take().is_some() {
            shared.command(EngineCommand::RemoveOutbound { path: self.path });
        }
        self.prober.stop();
        self.alive = None;
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

/// Packets that one SA of this format can number: packet ids of `ovpn` have 32 bits and begin at 1.
const fn packets_max(format: Format) -> u64 {
    match format {
        Format::Ovpn => u32::MAX as u64,
        Format::Esp | Format::Plain => u64::MAX,
    }
}

/// How long a path waits after the engine has reported `failures` failures of it.
fn engine_hold(failures: u32, shared: &mut Shared) -> Duration {
    match failures.checked_sub(1) {
        Some(tries) => retry_after(tries, shared),
        None => ms(ENGINE_HOLD_FIRST_MS),
    }
}
