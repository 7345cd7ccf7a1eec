//! Lanes beyond the first: which of two hosts answers at the other's lane port, and whether a lane
//! gets through.
//!
//! Both directions of a lane use one 5-tuple: the initiator's lane port and the responder's data port. So it
//! passes NAT and stateful firewalls, which admit only answers (`docs/design/esp.md`, NAT and lanes). The host
//! with the lower peer id is the initiator, until path choice says otherwise. A lane carries frames only while
//! packets come back on it; dummy packets (RFC 4303 section 2.6) make sure that some do. Lane 0 is proven by path
//! choice, with its probes.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};

use weft_io::udp::Remote;

/// Time between a worker's looks at its lanes, in milliseconds.
pub const LANE_LOOK_MS: u64 = 1_000;
/// Looks for each proof of a lane that carries nothing.
pub const LANE_IDLE_LOOKS: u8 = 5;
/// Looks at which a dummy went out and nothing had come back before a lane carries nothing more.
pub const LANE_MISSES_MAX: u8 = 3;
/// Time between a worker's looks at lanes that have an SA and carry nothing yet, in milliseconds. Flows that
/// begin before the lanes carry stay together on the first lane.
pub const LANE_ASK_MS: u64 = 50;
/// So many looks come that soon after an SA; the later ones are looks at all lanes.
pub const LANE_ASKS_MAX: u8 = 40;

/// Values of `Lane::told`.
const TOLD_NOTHING: u8 = 0;
const TOLD_PROVEN: u8 = 1;
const TOLD_SILENT: u8 = 2;

/// The socket that a GSO batch leaves from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) lane: u16,
    /// The engine's port instead of the lane's own.
    pub(crate) data_port: bool,
    /// The kernel may cut its datagrams, which go one by one.
    pub(crate) may_cut: bool,
}

/// The state of a path's lane beyond its SAs, which come and go.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    /// The source of the peer's packets on this lane; the responder answers there.
    pub(crate) source: Option<Remote>,
    /// An authentic packet came in since the last look.
    heard: AtomicBool,
    /// One with a frame in it.
    carried: AtomicBool,
    alive: AtomicBool,
    /// Written by the lane's worker alone, like the fields below.
    misses: AtomicU8,
    idle: AtomicU8,
    asks_left: AtomicU8,
    /// The state that path choice was told last: none, proven or silent.
    told: AtomicU8,
    /// Packets sent at the last look.
    sent: AtomicU64,
}

impl Lane {
    /// Whether frames may take it.
    #[inline]
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Relaxed)
    }

    /// An authentic packet came in.
    #[inline]
    pub(crate) fn hear(&self) {
        // Written only where it changes something: other workers read the same line.
        if !self.heard.load(Relaxed) {
            self.heard.store(true, Relaxed);
        }
    }

    /// It held a frame.
    #[inline]
    pub(crate) fn carry(&self) {
        if !self.carried.load(Relaxed) {
            self.carried.store(true, Relaxed);
        }
    }

    /// The lane has an SA: asks for proof of it, unless it is proven.
    pub(crate) fn ask(&self) {
        self.asks_left.store(LANE_ASKS_MAX, Relaxed);
    }

    /// Whether it carries nothing, and soon may.
    pub(crate) fn is_asked_for(&self) -> bool {
        !self.is_alive() && self.asks_left.load(Relaxed) > 0
    }

    /// The worker's check of an unproven lane while the destination of a dummy is unknown. The peer would not hear
    /// that its packets have come.
    pub(crate) fn wait(&self) {
        self.asks_left.store(self.asks_left.load(Relaxed).saturating_sub(1), Relaxed);
        self.misses.store(self.misses.load(Relaxed).saturating_add(1), Relaxed);
    }

    /// Takes back that the lane was heard: the packet came by the peer's own lane, since the peer has yet to learn who
    /// opens it.
    pub(crate) fn unhear(&self) {
        self.heard.store(false, Relaxed);
    }

    /// Whether it is proven, where that is known and was not told before.
    pub(crate) fn news(&self) -> Option<bool> {
        let is_silent =
            self.asks_left.load(Relaxed) == 0 && self.misses.load(Relaxed) >= LANE_MISSES_MAX;
        let (news, told) = match (self.is_alive(), is_silent) {
            (true, _) => (true, TOLD_PROVEN),
            (false, true) => (false, TOLD_SILENT),
            (false, false) => return None,
        };
        (self.told.swap(told, Relaxed) != told).then_some(news)
    }

    /// Path choice knows nothing of it any more.
    pub(crate) fn forget_told(&self) {
        self.told.store(TOLD_NOTHING, Relaxed);
    }

    /// The worker's look, at most one each [`LANE_LOOK_MS`], or [`LANE_ASK_MS`] while it is asked for. `sent`
    /// is how many packets have gone out on its SA. Returns whether to send a dummy.
    pub(crate) fn look(&self, sent: u64) -> bool {
        let heard = self.heard.swap(false, Relaxed);
        let is_proven_now = heard && !self.is_alive();
        if heard {
            self.misses.store(0, Relaxed);
            self.alive.store(true, Relaxed);
        }
        // Asking does not restart when the lane dies: all lanes of a host may die at once.
        let left = if self.is_alive() { 0 } else { self.asks_left.load(Relaxed).saturating_sub(1) };
        self.asks_left.store(left, Relaxed);
        let carried = self.carried.swap(false, Relaxed) || sent != self.sent.load(Relaxed);
        let looks = self.idle.load(Relaxed).saturating_add(1);
        // The peer waits for a sign that its packets have come.
        let is_due = carried || is_proven_now || !self.is_alive() || looks >= LANE_IDLE_LOOKS;
        let idle = match (is_proven_now, is_due) {
            // At the next look it is said again, for once may be lost.
            (true, _) => LANE_IDLE_LOOKS - 1,
            (false, true) => 0,
            (false, false) => looks,
        };
        self.idle.store(idle, Relaxed);
        if is_due {
            // The dummy counts as sent: alone it does not mean that the lane carries traffic.
            self.sent.store(sent + 1, Relaxed);
            if !heard {
                let misses = self.misses.load(Relaxed).saturating_add(1);
                self.misses.store(misses, Relaxed);
                if misses >= LANE_MISSES_MAX {
                    self.alive.store(false, Relaxed);
                }
            }
        }
        is_due
    }

    /// As if it had been proven, for tests of later states.
    #[cfg(test)]
    pub(crate) fn prove(&self) {
        self.alive.store(true, Relaxed);
    }

    /// As if nothing had come back for long, for the same.
    #[cfg(test)]
    pub(crate) fn disprove(&self) {
        self.alive.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_lives_while_something_comes_back() {
        let lane = Lane::default();
        assert!(!lane.is_alive());
        let mut sent = 0;
        let mut look = |lane: &Lane| {
            let due = lane.look(sent);
            sent += u64::from(due);
            due
        };
        assert!(look(&lane) && look(&lane) && !lane.is_alive(), "nothing came back");
        lane.hear();
        assert!(look(&lane), "the peer hears that it came");
        assert!(lane.is_alive());
        lane.hear();
        assert!(look(&lane), "and once more");
        assert!(!look(&lane), "proven, and nothing to carry");
        // At rest each fifth look sends a dummy, and three without an answer end it.
        let mut dummies = 0;
        let mut looks = 0;
        while lane.is_alive() {
            dummies += u32::from(look(&lane));
            looks += 1;
        }
        assert_eq!((dummies, looks), (3, u32::from(LANE_IDLE_LOOKS) * 3 - 1));
        // Then it is asked for at each look until it answers.
        assert!(look(&lane) && look(&lane));
        lane.hear();
        look(&lane);
        assert!(lane.is_alive());
    }

    #[test]
    fn a_lane_that_becomes_silent_or_proven_is_told_of_once() {
        let lane = Lane::default();
        lane.ask();
        for _ in 1..LANE_ASKS_MAX {
            lane.look(0);
            assert_eq!(lane.news(), None, "it is being asked for");
        }
        lane.look(0);
        assert_eq!((lane.news(), lane.news()), (Some(false), None));
        lane.hear();
        lane.look(0);
        assert_eq!((lane.news(), lane.news()), (Some(true), None));
        while lane.is_alive() {
            assert_eq!(lane.news(), None);
            lane.look(0);
        }
        assert_eq!((lane.news(), lane.news()), (Some(false), None));
        lane.forget_told();
        assert_eq!(lane.news(), Some(false));
        // A packet that came by another way proves nothing.
        lane.hear();
        lane.unhear();
        lane.look(0);
        assert_eq!((lane.is_alive(), lane.news()), (false, None));
        // One that cannot be answered is silent, too.
        let unanswered = Lane::default();
        (0..LANE_MISSES_MAX).for_each(|_| unanswered.wait());
        assert_eq!(unanswered.news(), Some(false));
    }

    #[test]
    fn a_lane_is_asked_for_a_number_of_times_after_each_sa_until_it_is_proven() {
        let lane = Lane::default();
        assert!(!lane.is_asked_for());
        for _ in 0..2 {
            lane.ask();
            for _ in 0..LANE_ASKS_MAX {
                assert!(lane.is_asked_for());
                assert!(lane.look(0));
            }
            assert!(!lane.is_asked_for());
            assert!(lane.look(0), "with all others it is");
        }
        lane.ask();
        lane.hear();
        lane.look(0);
        assert!(!lane.is_asked_for());
        while lane.is_alive() {
            lane.look(0);
        }
        assert!(!lane.is_asked_for(), "as long as no SA comes");
    }

    #[test]
    fn a_lane_that_carries_is_proven_at_each_look() {
        let lane = Lane::default();
        lane.hear();
        let _ = lane.look(0);
        for round in 1..10 {
            lane.hear();
            assert!(lane.look(round * 100), "it sent frames");
        }
        for _ in 0..LANE_MISSES_MAX {
            assert!(lane.is_alive());
            lane.carry();
            assert!(lane.look(901), "frames came in, so the peer waits for a sign");
        }
        assert!(!lane.is_alive());
    }
}
