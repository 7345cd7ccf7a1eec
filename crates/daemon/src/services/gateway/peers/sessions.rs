//! One session a name over all gateways: the newest. Gateways tell each other whom they let in.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;

/// Sessions kept at most, those of other gateways included.
const SESSIONS_MAX: usize = 65_536;
/// Sessions in one message.
pub(super) const SESSIONS_PER_MESSAGE: usize = 1_000;

/// A client is let in by a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Session {
    pub(super) name: String,
    pub(super) gateway: PeerId,
    /// When, on the gateways' clock.
    pub(super) at: u64,
}

impl Session {
    /// Whether this one stays and the other ends.
    fn beats(&self, other: &Self) -> bool {
        (self.at, self.gateway) > (other.at, other.gateway)
    }
}

/// A clock that is never behind anything heard of, so that what follows is later: a hybrid logical clock. It counts
/// milliseconds since 1970 where all hosts' clocks are right.
#[derive(Default)]
pub(super) struct Clock(u64);

impl Clock {
    /// The next moment.
    pub(super) fn tick(&mut self, unix_ms: u64) -> u64 {
        self.0 = unix_ms.max(self.0.saturating_add(1));
        self.0
    }

    /// Another host has told this moment.
    pub(super) fn hear(&mut self, at: u64) {
        self.0 = self.0.max(at);
    }
}

/// The newest session of each name.
#[derive(Default)]
pub(super) struct Sessions(BTreeMap<String, Session>);

/// A session of another gateway has been heard of.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// It was known, or is over.
    Old,
    /// It is the newest of its name.
    New {
        /// This host's session of the name ends.
        ends: bool,
    },
}

impl Sessions {
    /// This gateway lets a client in.
    pub(super) fn let_in(&mut self, session: Session) {
        self.0.insert(session.name.clone(), session);
    }

    /// A session of this gateway is over.
    pub(super) fn end(&mut self, name: &str, local: PeerId) {
        if self.is_own(name, local) {
            self.0.remove(name);
        }
    }

    /// Whether the newest session of a name is this gateway's.
    pub(super) fn is_own(&self, name: &str, local: PeerId) -> bool {
        self.0.get(name).is_some_and(|session| session.gateway == local)
    }

    pub(super) fn hear(&mut self, session: Session, local: PeerId) -> Heard {
        let before = self.0.get(&session.name);
        let is_full = before.is_none() && self.0.len() >= SESSIONS_MAX;
        let is_over = before.is_some_and(|before| !session.beats(before));
        // What this host is told of itself is older than what it knows.
        if session.gateway == local || is_full || is_over {
            return Heard::Old;
        }
        let ends = before.is_some_and(|before| before.gateway == local);
        self.0.insert(session.name.clone(), session);
        Heard::New { ends }
    }

    /// All that are known.
    pub(super) fn all(&self) -> Vec<Session> {
        self.0.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(gateway: u8, at: u64) -> Session {
        Session { name: "alice".into(), gateway: PeerId::from_bytes([gateway; 32]), at }
    }

    #[test]
    fn the_newest_session_stays_and_of_two_at_once_one() {
        let [one, two] = [1, 2].map(|number| PeerId::from_bytes([number; 32]));
        let (mut here, mut there) = (Sessions::default(), Sessions::default());
        here.let_in(at(1, 5));
        there.let_in(at(2, 5));
        assert_eq!(here.hear(at(2, 5), one), Heard::New { ends: true });
        assert_eq!(there.hear(at(1, 5), two), Heard::Old);
        assert_eq!(here.hear(at(2, 5), one), Heard::Old, "told twice");
        assert!(here.all() == [at(2, 5)] && there.all() == [at(2, 5)]);
        here.let_in(at(1, 6));
        assert_eq!(there.hear(at(1, 6), two), Heard::New { ends: true });
        there.end("alice", two);
        assert_eq!(there.hear(at(1, 6), two), Heard::Old, "another's session is not forgotten");
    }

    #[test]
    fn a_clock_that_is_late_follows_what_it_hears() {
        let mut clock = Clock::default();
        assert_eq!(clock.tick(100), 100);
        assert_eq!(clock.tick(100), 101);
        clock.hear(5_000);
        assert_eq!(clock.tick(102), 5_001);
        clock.hear(u64::MAX);
        assert_eq!(clock.tick(1), u64::MAX);
    }
}
