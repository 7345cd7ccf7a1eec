//! Selection of the path that carries a peer's frames, and the reasons shown for the others.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Instant;

use crate::candidate::Candidate;
use crate::config::{CARRY_ON_MS, Config, SETTLE_MS, ms};
use crate::engine_api::{EngineCommand, EngineKind};
use crate::pairing::Key;
use crate::peer::Peer;
use crate::prober::Role;
use crate::shared::Shared;
use crate::status::{PathState, PathStatus, Reason};

impl Peer {
    /// Selects the path for the peer's frames, and reports every change of a path's state.
    pub(crate) fn select(&mut self, now: Instant, shared: &mut Shared) {
        self.watch_bound(now);
        let chosen = self.choose(now);
        let before = (self.bound, self.carrier);
        if chosen != self.bound {
            if self.bound.is_none() {
                // The event that brought this path back may also have brought back the others.
                self.settles = Some(now + ms(SETTLE_MS));
                self.candidates.values_mut().for_each(|candidate| candidate.hint(now));
            }
            self.bound = chosen;
            self.doubted = None;
            self.carries_until = chosen.is_none().then(|| now + ms(CARRY_ON_MS));
        }
        let carrier = chosen.or_else(|| self.carrier.filter(|key| self.carries_on(now, key)));
        if carrier != self.carrier {
            self.carrier = carrier;
            let path = carrier.and_then(|key| self.candidates.get(&key)).map(|it| it.path);
            shared.command(EngineCommand::BindPath { peer: self.id, path });
        }
        if (self.bound, self.carrier) != before {
            // The engine reported the blocked lanes while the path carried nothing, and does not
            // report them again.
            if self.are_lanes_blocked() {
                self.lanes.handle_blocked(now);
            }
            let roles: Vec<Role> = self.candidates.keys().map(|key| self.role(now, key)).collect();
            for (candidate, role) in self.candidates.values_mut().zip(roles) {
                candidate.role_changed(now, role);
            }
        }
        let standings = self.standings(now);
        for (candidate, (state, reason)) in self.candidates.values_mut().zip(standings) {
            if !candidate.is_leaving() {
                candidate.report(now, state, reason, shared);
            }
        }
    }

    /// See [`CARRY_ON_MS`]; if the link ends meanwhile, see [`crate::LINK_GRACE_MS`].
    fn carries_on(&self, now: Instant, key: &Key) -> bool {
        let candidate = self.candidates.get(key);
        self.carries_until.is_some_and(|until| now < until)
            && candidate.is_some_and(|it| it.has_outbound() && !it.is_leaving())
    }

    /// Once the path in use is in doubt, the others are probed as often. Paths that failed together
    /// with it are thus known before the verdict, and so are failed ones that work again.
    fn watch_bound(&mut self, now: Instant) {
        let bound = self.bound.and_then(|key| self.candidates.get(&key));
        if !bound.is_some_and(|it| it.is_in_doubt()) {
            self.doubted = None;
        } else if self.doubted.is_none() {
            self.doubted = Some(now);
            for (key, candidate) in &mut self.candidates {
                if self.bound != Some(*key) {
                    candidate.hasten(now);
                    candidate.hint(now);
                }
            }
        }
    }

    /// The present path while it works, unless a better one has proven itself. Otherwise the best path
    /// known to work, then the best that worked before.
    fn choose(&self, now: Instant) -> Option<Key> {
        let fits = |key: &Key| {
            let candidate = self.candidates.get(key);
            candidate.is_some_and(|it| it.is_usable() && !self.is_refused(key, it))
        };
        let other_is_sound = || {
            let mut all = self.candidates.iter();
            all.any(|(key, it)| fits(key) && !it.is_suspect() && !it.is_in_doubt())
        };
        let gives_way = |key: &Key| self.is_barred(now, key) && other_is_sound();
        let Some(present) = self.bound.filter(|key| fits(key) && !gives_way(key)) else {
            let usable = self.candidates.iter().filter(|(key, _)| fits(key));
            let best =
                usable.min_by_key(|(key, it)| (it.is_suspect(), it.doubt(self.doubted), **key));
            return best.map(|(key, _)| *key);
        };
        let settling = self.settles.is_some_and(|until| now < until);
        let mut better =
            self.candidates.range(..present).filter(|(key, it)| fits(key) && !it.is_barred(now));
        let better = better.find(|(_, it)| it.is_clean(now) || (settling && it.is_unblemished()));
        Some(better.map_or(present, |(key, _)| *key))
    }

    /// A kernel engine cannot cut packets to a smaller MTU, so it yields to a working userspace path.
    /// Without one it is used as it is.
    fn is_refused(&self, key: &Key, candidate: &Candidate) -> bool {
        let userspace =
            || self.candidates.iter().any(|(key, it)| !key.is_kernel() && it.is_usable());
        key.is_kernel() && candidate.is_narrow() && userspace()
    }

    fn is_barred(&self, now: Instant, key: &Key) -> bool {
        self.candidates.get(key).is_some_and(|it| it.is_barred(now))
    }

    pub(crate) fn role(&self, now: Instant, key: &Key) -> Role {
        let refused = || self.candidates.get(key).is_some_and(|it| self.is_refused(key, it));
        match self.bound {
            _ if self.carrier == Some(*key) => Role::Active,
            Some(_) if self.doubted.is_some() => Role::Contender,
            Some(bound) if bound < *key || refused() || self.is_barred(now, key) => Role::Standby,
            _ => Role::Contender,
        }
    }

    /// State and reason of each candidate, in their order.
    fn standings(&self, now: Instant) -> Vec<(PathState, Option<Reason>)> {
        let working: BTreeSet<SocketAddr> = self
            .candidates
            .iter()
            .filter(|(key, it)| !key.is_raw() && it.is_usable() && !it.is_in_doubt())
            .filter_map(|(_, it)| it.remote())
            .collect();
        let standing = |key: &Key, candidate: &Candidate| {
            if self.bound == Some(*key) {
                (PathState::Active, None)
            } else if candidate.is_usable() {
                if self.is_refused(key, candidate) {
                    return (PathState::Failed, Some(Reason::MtuNotCarried));
                }
                if candidate.is_barred(now) {
                    let failure = Reason::ProbeUnanswered;
                    let reason = self.name_failure(now, (key, candidate), &failure, &working);
                    return (PathState::Failed, Some(reason));
                }
                let better = self.bound.is_none_or(|bound| *key < bound);
                let reason = if better { Reason::ProvingClean } else { Reason::BetterPathActive };
                (PathState::Standby, Some(reason))
            } else if let Some(failure) = candidate.failure() {
                let reason = self.name_failure(now, (key, candidate), failure, &working);
                (PathState::Failed, Some(reason))
            } else if candidate.has_outbound() {
                (PathState::Probing, Some(Reason::Probing))
            } else {
                (PathState::Probing, Some(Reason::AwaitingOffer))
            }
        };
        self.candidates.iter().map(|(key, candidate)| standing(key, candidate)).collect()
    }

    /// Unanswered probes while the link works mean that the network between the hosts drops them. For
    /// a raw path it blocks protocol 50. For a path in UDP it blocks the ports, unless another path to
    /// the same address and port works (`working`). If the peer's kernel opened the packets, its host
    /// drops them.
    fn name_failure(
        &self,
        now: Instant,
        (key, candidate): (&Key, &Candidate),
        failure: &Reason,
        working: &BTreeSet<SocketAddr>,
    ) -> Reason {
        let linked = self.session.is_some();
        match failure {
            Reason::ProbeUnanswered if candidate.is_stopped_behind_the_seal(now) => {
                Reason::HostFirewall(key.format)
            }
            Reason::ProbeUnanswered if linked && key.is_raw() => Reason::Protocol50Blocked,
            Reason::ProbeUnanswered
                if linked
                    && !key.is_plain()
                    && !candidate.remote().is_some_and(|remote| working.contains(&remote)) =>
            {
                Reason::DataPortsBlocked
            }
            other => other.clone(),
        }
    }
}

impl Peer {
    /// Status of every candidate, then of the paths that the hosts cannot have, with the reasons.
    pub(crate) fn status(&self, config: &Config) -> Vec<PathStatus> {
        let link_down = self.link_down.is_some();
        let mut entries: Vec<PathStatus> =
            self.candidates.values().map(|it| it.status(link_down)).collect();
        for entry in entries.iter_mut().filter(|entry| entry.state == PathState::Active) {
            entry.why_not_best = self.why_not_best(config);
        }
        for entry in entries.iter_mut().filter(|entry| entry.state != PathState::Active) {
            entry.lanes_blocked = None;
        }
        if entries.is_empty() {
            let entry = self.absent(self.none.state, self.none.reason.clone(), None, None);
            entries.push(entry);
        }
        let absent =
            self.negotiation(config).map(|negotiation| negotiation.absent()).unwrap_or_default();
        entries.extend(absent.into_iter().map(|absence| PathStatus {
            encapsulation: absence.encapsulation,
            ..self.absent(PathState::Failed, absence.reason, absence.engine, absence.remote_engine)
        }));
        entries
    }

    /// Why the best path that two such hosts could have is not in use, if it is better than the one in
    /// use. For a relapsed path that is in use again: its host firewall.
    fn why_not_best(&self, config: &Config) -> Option<Reason> {
        let bound = self.bound?;
        let relapsed = self.candidates.get(&bound).filter(|it| it.is_suspect());
        if relapsed.is_some() && bound.is_judged_again() {
            return Some(Reason::HostFirewall(bound.format));
        }
        let tried = |key: &Key| {
            let told = self.candidates.get(key).map(|it| it.told());
            told.map(|(_, reason)| reason.cloned().unwrap_or(Reason::Probing))
        };
        match self.negotiation(config) {
            Some(negotiation) => {
                let best = negotiation.keys().into_iter().find(|key| *key < bound)?;
                tried(&best).or_else(|| negotiation.agree(&best).err())
            }
            None => {
                let best = self.candidates.keys().find(|key| **key < bound)?;
                tried(best)
            }
        }
    }

    fn absent(
        &self,
        state: PathState,
        reason: Reason,
        engine: Option<EngineKind>,
        remote_engine: Option<EngineKind>,
    ) -> PathStatus {
        PathStatus {
            peer: self.id,
            path: None,
            format: None,
            engine,
            remote_engine,
            encapsulation: None,
            state,
            reason: Some(reason),
            why_not_best: None,
            lanes_blocked: None,
            since: self.none.since,
            next_try: None,
            cipher: None,
            encrypted: false,
            mtu: None,
            container_mtu: None,
            rtt: None,
            remote: None,
            rekeys: 0,
            link_down: self.link_down.is_some(),
        }
    }
}
