//! A path that fails whenever it carries frames, and comes back on candidates' probes each time.
//!
//! Those probes go to another inner port than frames. A firewall on the peer's host, for example, can
//! tell the two apart. Such a path looks sound while it is not in use.

use std::time::Instant;

use crate::config::{RELAPSE_FIRST_MS, RELAPSE_MAX_MS, RELAPSE_WITHIN_MS, ms};

/// A path's failures while it was in use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Relapses {
    /// A probe of the active path was answered since the path came into use.
    proven: bool,
    /// When it failed in use without such an answer; cleared when it comes back.
    lapsed: Option<Instant>,
    /// How often in a row it came back at once after such a failure.
    count: u32,
    /// It carries no frames until then while another path can.
    barred: Option<Instant>,
}

impl Relapses {
    pub(crate) fn came_into_use(&mut self) {
        self.proven = false;
    }

    /// A probe of the active path was answered: the path is as good as any.
    pub(crate) fn was_answered_in_use(&mut self) {
        *self = Self { proven: true, ..Self::default() };
    }

    pub(crate) fn failed_in_use(&mut self, now: Instant) {
        if !std::mem::take(&mut self.proven) {
            self.lapsed = Some(now);
        }
    }

    /// A candidate's probe was answered on a failed path. After a while the network may have healed. An
    /// answer at once says nothing about frames.
    pub(crate) fn came_back(&mut self, now: Instant) {
        let Some(lapsed) = self.lapsed.take() else { return };
        if now >= lapsed + ms(RELAPSE_WITHIN_MS) {
            *self = Self::default();
            return;
        }
        if self.barred.is_some_and(|until| now < until) {
            // It was used because no other path worked; that does not count against it.
            return;
        }
        let wait = RELAPSE_FIRST_MS.saturating_mul(1 << self.count.min(16)).min(RELAPSE_MAX_MS);
        self.count = self.count.saturating_add(1);
        self.barred = Some(now + ms(wait));
    }

    /// It failed in use, and nothing has shown since that it carries frames.
    pub(crate) fn is_suspect(&self) -> bool {
        self.count > 0
    }

    /// Until when it must not be used while another path works.
    pub(crate) fn barred(&self) -> Option<Instant> {
        self.barred
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails in use at `at` and comes back `after` milliseconds later; returns how long the path is
    /// barred then.
    fn relapse(it: &mut Relapses, at: Instant, after: u64) -> Option<u128> {
        it.came_into_use();
        it.failed_in_use(at);
        it.came_back(at + ms(after));
        it.barred().map(|until| (until - at - ms(after)).as_millis())
    }

    #[test]
    fn a_path_that_is_used_for_want_of_another_is_not_barred_for_longer() {
        let (mut it, now) = (Relapses::default(), Instant::now());
        assert_eq!(relapse(&mut it, now, 1_000), Some(60_000));
        for at in [3_000, 6_000, 59_000] {
            assert_eq!(relapse(&mut it, now + ms(at), 1_000), Some(u128::from(60_000 - at)));
        }
        assert_eq!(relapse(&mut it, now + ms(60_000), 1_000), Some(120_000));
    }

    #[test]
    fn each_relapse_bars_twice_as_long_and_an_answer_in_use_ends_it() {
        let (mut it, mut now) = (Relapses::default(), Instant::now());
        let waits = [60_000, 120_000, 240_000, 480_000, 960_000, 1_920_000, 3_600_000, 3_600_000];
        for wait in waits {
            assert_eq!(relapse(&mut it, now, 1_000), Some(wait));
            assert!(it.is_suspect());
            now += ms(RELAPSE_MAX_MS + 1_000);
        }
        it.was_answered_in_use();
        assert!(!it.is_suspect() && it.barred().is_none());
        // It worked while it was in use, so this failure is not a relapse.
        it.failed_in_use(now);
        it.came_back(now + ms(1_000));
        assert!(!it.is_suspect() && it.barred().is_none());
        assert_eq!(relapse(&mut it, now, 1_000), Some(60_000), "from the first again");
    }

    #[test]
    fn a_network_that_was_down_for_longer_is_no_relapse() {
        let (mut it, now) = (Relapses::default(), Instant::now());
        assert_eq!(relapse(&mut it, now, RELAPSE_WITHIN_MS), None);
        assert_eq!(relapse(&mut it, now, RELAPSE_WITHIN_MS - 1), Some(60_000));
        assert_eq!(relapse(&mut it, now, RELAPSE_WITHIN_MS), None, "all is forgotten");
        assert!(!it.is_suspect());
    }
}
