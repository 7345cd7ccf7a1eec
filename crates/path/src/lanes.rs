//! Decides which of two hosts opens the lanes beyond the first, and finds lanes without answers.
//!
//! The host that opens a lane sends its packets from a separate port. A stateful firewall at the other host
//! drops them as unsolicited, so it matters which host opens. The host with the lower peer id decides and
//! says so in its hello. It first picks the host that dialled the link, since a host behind a firewall can
//! dial but not be dialled. While no lane gets through, the hosts take turns. A host of an earlier version
//! says nothing: there the lower peer id opens.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use weft_crypto::PeerId;

use crate::config::{LANES_TURN_FIRST_MS, LANES_TURN_MAX_MS, ms};
use crate::engine_api::EngineCommand;
use crate::message::Hello;
use crate::shared::Shared;

pub(crate) struct Lanes {
    /// This host decides.
    decides: bool,
    /// Whether this host opens, as it has decided; `None` until the hosts have met.
    decided: Option<bool>,
    /// Whether this host opens, as last told to the engines.
    told: bool,
    /// When to hand over to the other host.
    turn: Option<Instant>,
    last_turn: Option<Instant>,
    pause: Duration,
}

impl Lanes {
    pub(crate) fn new(local: PeerId, peer: PeerId) -> Self {
        let decides = local < peer;
        let pause = ms(LANES_TURN_FIRST_MS);
        Self { decides, decided: None, told: decides, turn: None, last_turn: None, pause }
    }

    /// The hosts meet. A choice made earlier stands, whichever host dials later.
    pub(crate) fn handle_link_up(&mut self, dialled: bool) {
        self.decided.get_or_insert(dialled);
    }

    /// The value for this host's hello.
    pub(crate) fn said(&self) -> Option<bool> {
        Some(if self.decides { self.decided.unwrap_or(true) } else { self.told })
    }

    /// Tells the engines whether this host opens, based on both hellos.
    pub(crate) fn tell(&mut self, peer: PeerId, hello: &Hello, shared: &mut Shared) {
        let opens = match (self.decides, hello.opens_lanes) {
            (true, Some(_)) => self.decided.unwrap_or(true),
            (false, Some(theirs)) => !theirs,
            (decides, None) => decides,
        };
        if std::mem::replace(&mut self.told, opens) != opens {
            shared.command(EngineCommand::OpenLanes { peer, opens });
        }
    }

    /// Nothing comes back on any lane beyond the first.
    pub(crate) fn handle_blocked(&mut self, now: Instant) {
        if self.decides {
            let earliest = self.last_turn.map_or(now, |last| last + self.pause);
            self.turn.get_or_insert(earliest.max(now));
        }
    }

    /// Hands over when the turn is due and lanes are still blocked. Returns whether the decision changed.
    pub(crate) fn handle_timeout(&mut self, now: Instant, blocked: bool) -> bool {
        if self.turn.is_none_or(|turn| now < turn) {
            return false;
        }
        self.turn = None;
        if !blocked {
            return false;
        }
        let longest = ms(LANES_TURN_MAX_MS);
        let recent = |last: Instant| now < last + 2 * longest;
        self.pause = match self.last_turn.is_some_and(recent) {
            true => (2 * self.pause).min(longest),
            false => ms(LANES_TURN_FIRST_MS),
        };
        self.last_turn = Some(now);
        self.decided = self.decided.map(|opens| !opens);
        true
    }

    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.turn
    }
}

/// The lanes of one path on which nothing comes back, as the engine reports them.
#[derive(Default)]
pub(crate) struct Proofs {
    silent: BTreeSet<u16>,
}

impl Proofs {
    /// Records whether something comes back on a lane.
    pub(crate) fn note(&mut self, lane: u16, proven: bool) {
        if proven {
            self.silent.remove(&lane);
        } else {
            self.silent.insert(lane);
        }
    }

    /// Forgets the lanes that are no longer sent on.
    pub(crate) fn keep(&mut self, is_sent_on: impl Fn(u16) -> bool) {
        self.silent.retain(|lane| is_sent_on(*lane));
    }

    /// Number of blocked lanes.
    pub(crate) fn blocked(&self) -> usize {
        self.silent.len()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ids() -> (PeerId, PeerId) {
        (PeerId::from_bytes([1; 32]), PeerId::from_bytes([2; 32]))
    }

    #[test]
    fn the_end_that_dialled_opens_first_then_both_alternate_ever_less_often() {
        let (low, high) = ids();
        let mut now = Instant::now();
        for dialled in [true, false] {
            let mut lanes = Lanes::new(low, high);
            lanes.handle_link_up(dialled);
            assert_eq!(lanes.said(), Some(dialled));
            // A later dial changes nothing.
            lanes.handle_link_up(!dialled);
            assert_eq!(lanes.said(), Some(dialled));
            let (mut opens, mut pauses) = (dialled, Vec::new());
            for _ in 0..12 {
                let before = now;
                lanes.handle_blocked(now);
                now = now.max(lanes.next_timeout().unwrap());
                assert!(lanes.handle_timeout(now, true));
                opens = !opens;
                assert_eq!((lanes.said(), lanes.next_timeout()), (Some(opens), None));
                pauses.push(now - before);
            }
            assert_eq!(pauses[..2], [Duration::ZERO, ms(LANES_TURN_FIRST_MS)]);
            assert!(pauses.is_sorted() && pauses[11] == ms(LANES_TURN_MAX_MS), "{pauses:?}");
            // They are proven before the turn comes.
            lanes.handle_blocked(now);
            now = lanes.next_timeout().unwrap();
            assert!(!lanes.handle_timeout(now, false));
            assert_eq!((lanes.said(), lanes.next_timeout()), (Some(opens), None));
        }
    }

    #[test]
    fn the_higher_id_does_not_decide() {
        let (low, high) = ids();
        let mut lanes = Lanes::new(high, low);
        lanes.handle_link_up(true);
        lanes.handle_blocked(Instant::now());
        assert_eq!((lanes.said(), lanes.next_timeout()), (Some(false), None));
    }
}
