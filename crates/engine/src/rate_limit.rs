//! Rate limits for rare events and answers.

use std::time::{Duration, Instant};

/// Milliseconds between equal events of one path, at least.
pub const EVENT_INTERVAL_MS: u64 = 500;

/// Slots of [`Recent`].
const SLOTS: usize = 64;

/// Lets one thing by an id through per interval. Ids that share a slot may come through more often.
#[derive(Debug)]
pub(crate) struct Recent {
    slots: [Option<(u32, Instant)>; SLOTS],
    interval: Duration,
}

impl Recent {
    pub(crate) const fn new(interval: Duration) -> Self {
        Self { slots: [None; SLOTS], interval }
    }

    pub(crate) fn allow(&mut self, id: u32, now: Instant) -> bool {
        let slot = &mut self.slots[id as usize % SLOTS];
        if let Some((last, at)) = *slot
            && last == id
            && now.saturating_duration_since(at) < self.interval
        {
            return false;
        }
        *slot = Some((id, now));
        true
    }
}

/// Lets this many things through in each second.
#[derive(Debug)]
pub(crate) struct PerSecond {
    left: u32,
    limit: u32,
    since: Option<Instant>,
}

impl PerSecond {
    pub(crate) const fn new(limit: u32) -> Self {
        Self { left: 0, limit, since: None }
    }

    pub(crate) fn allow(&mut self, now: Instant) -> bool {
        let over = |at: Instant| now.saturating_duration_since(at) >= Duration::from_secs(1);
        if self.since.is_none_or(over) {
            self.since = Some(now);
            self.left = self.limit;
        }
        let granted = self.left > 0;
        self.left = self.left.saturating_sub(1);
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_per_interval_and_id() {
        let start = Instant::now();
        let mut recent = Recent::new(Duration::from_secs(1));
        assert!(recent.allow(1, start) && recent.allow(2, start) && !recent.allow(1, start));
        assert!(recent.allow(1, start + Duration::from_secs(1)));
    }

    #[test]
    fn so_many_per_second() {
        let start = Instant::now();
        let mut limit = PerSecond::new(2);
        let granted = |limit: &mut PerSecond, at| (0..5).filter(|_| limit.allow(at)).count();
        assert_eq!(granted(&mut limit, start), 2);
        assert_eq!(granted(&mut limit, start + Duration::from_millis(999)), 0);
        assert_eq!(granted(&mut limit, start + Duration::from_secs(1)), 2);
    }
}
