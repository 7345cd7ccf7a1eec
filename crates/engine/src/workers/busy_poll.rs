//! Busy polling: how long a worker stays awake when there is nothing to do. A packet that comes meanwhile
//! need not wake a thread. A wake-up takes longer than to open a packet, and many times longer on a virtual
//! machine.
//!
//! By default a worker stays awake while requests and answers come one after the other. It tries where waits
//! are short and a turn has little to do. It goes on while packets come within the time that it is awake.
//! Other threads that want the processor get it.
//!
//! A thread of one peer may gather instead. A sender that sends each packet by itself keeps the thread awake for one
//! packet at a time, and each costs calls of its own. Where such packets come fast, the thread sleeps for a moment and
//! then takes all that have come; what is then merged costs a call together.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use weft_io::poller::Poller;

use crate::stats::counters::WorkerCounters;

/// The longest busy poll, in microseconds: longer than an answer takes in one data centre.
pub const BUSY_POLL_US: u64 = 150;
/// It is tried where waits take no longer than this, in microseconds: a sleeping wait takes some wake-ups
/// longer than a busy one.
const BUSY_POLL_TRY_US: u64 = 500;
/// The number of the last 32 waits that must be short. If a third are longer, the time is mostly wasted.
const BUSY_POLL_SHORT_MIN: u32 = 22;
/// Datagrams in a turn, in the mean: where there are more, time awake is better given to others.
const BUSY_POLL_DATAGRAMS_MAX: u64 = 4;
/// The fewest waits between a failed try and the next one, ...
const BUSY_POLL_PAUSE_MIN: u32 = 64;
/// ... after the next twice as many, and so on up to this.
const BUSY_POLL_PAUSE_MAX: u32 = 1 << 16;

/// The mean is kept in these parts of a datagram, ...
const PARTS: u64 = 256;
/// ... and a turn moves it by this part.
const WEIGHT: u64 = 16;
/// Waits after which a try was a success.
const LASTED: u32 = 1_024;

/// The pause in which a thread gathers datagrams, in microseconds. The kernel makes some 100 of it.
const GATHER_US: u64 = 50;
/// Datagrams in a millisecond, both ways, from which a thread gathers: requests and answers that come one after the
/// other are fewer, and would each wait for the pause.
const GATHER_FROM_PER_MS: u64 = 60;
/// Datagrams in a millisecond below which it no longer does.
const GATHER_UNTIL_PER_MS: u64 = 30;
/// How long they are counted, in milliseconds.
const GATHER_COUNTED_MS: u64 = 4;

/// A worker's last waits and turns.
#[derive(Debug)]
pub(crate) struct BusyPoll {
    /// Said by the configuration.
    fixed: Option<Duration>,
    /// It stays awake now.
    on: bool,
    /// A bit for each of the last waits, set where it was short.
    short: u32,
    /// Waits since it was turned on or off.
    since: u32,
    /// Waits before it is tried again, and after the next failed try.
    pause: u32,
    next_pause: u32,
    /// Datagrams in a turn, in [`PARTS`].
    mean: u64,
    /// Datagrams that had been moved by the end of the last turn.
    moved: u64,
    gather: Option<Gather>,
}

/// Whether datagrams come fast enough to be gathered.
#[derive(Debug)]
struct Gather {
    on: bool,
    /// When their count began, and how many had been moved by then.
    since: Instant,
    moved: u64,
}

impl BusyPoll {
    /// The fixed time; `None`: while it pays.
    pub(crate) const fn new(fixed: Option<Duration>) -> Self {
        let (pause, next_pause) = (0, BUSY_POLL_PAUSE_MIN);
        let gather = None;
        Self { fixed, on: false, short: 0, since: 0, pause, next_pause, mean: 0, moved: 0, gather }
    }

    /// The same for a thread whose datagrams may wait for [`GATHER_US`] where they come fast and one by one.
    pub(crate) fn gathering() -> Self {
        let gather = Gather { on: false, since: Instant::now(), moved: 0 };
        Self { gather: Some(gather), ..Self::new(None) }
    }

    /// How long to stay awake now.
    #[inline]
    const fn spin(&self) -> Duration {
        match self.fixed {
            Some(fixed) => fixed,
            None if self.on => Duration::from_micros(BUSY_POLL_US),
            None => Duration::ZERO,
        }
    }

    /// The first turn begins; `moved` counts the datagrams of others before.
    pub(crate) const fn begin(&mut self, moved: u64) {
        self.moved = moved;
    }

    /// Waits for work, or for `timeout`, and gives the tokens of what is ready: one turn of a thread is over,
    /// and the next begins.
    ///
    /// # Errors
    /// The poller's.
    #[inline]
    pub(crate) fn wait(
        &mut self,
        poller: &mut Poller,
        counters: &WorkerCounters,
        timeout: Option<Duration>,
        note: impl FnMut(u64),
    ) -> io::Result<()> {
        let mut begun = self.begin_wait(counters.own_datagrams());
        if begun.is_some_and(|now| self.gathers(now)) {
            begun = None;
            thread::sleep(Duration::from_micros(GATHER_US));
        }
        poller.wait_awake(self.spin(), timeout)?.for_each(note);
        if let Some(begun) = begun {
            self.waited(begun.elapsed());
        }
        counters.was_awake(poller.was_awake());
        Ok(())
    }

    /// A turn is over; `moved` counts all datagrams until now.
    #[inline]
    fn begin_wait(&mut self, moved: u64) -> Option<Instant> {
        if !self.learns() {
            return None;
        }
        let before = std::mem::replace(&mut self.moved, moved);
        self.turned(moved.saturating_sub(before));
        Some(Instant::now())
    }

    /// Whether it is of use to tell of waits and turns.
    const fn learns(&self) -> bool {
        self.fixed.is_none()
    }

    /// Whether the next datagrams are gathered.
    #[inline]
    fn gathers(&mut self, now: Instant) -> bool {
        let Some(gather) = &mut self.gather else { return false };
        let counted = now.saturating_duration_since(gather.since);
        if counted >= Duration::from_millis(GATHER_COUNTED_MS) {
            let in_us = counted.as_micros() as u64;
            let per_ms = self.moved.saturating_sub(gather.moved).saturating_mul(1_000) / in_us;
            let come_alone = self.mean <= BUSY_POLL_DATAGRAMS_MAX * PARTS;
            let before = gather.on;
            gather.on = match before {
                true => per_ms >= GATHER_UNTIL_PER_MS,
                false => per_ms >= GATHER_FROM_PER_MS && come_alone,
            };
            (gather.since, gather.moved) = (now, self.moved);
            if gather.on != before {
                self.turn(false, 0);
            }
        }
        self.gather.as_ref().is_some_and(|gather| gather.on)
    }

    /// Notes the length of a wait.
    #[inline]
    fn waited(&mut self, wait: Duration) {
        let limit = Duration::from_micros(if self.on { BUSY_POLL_US } else { BUSY_POLL_TRY_US });
        self.short = self.short << 1 | u32::from(wait <= limit);
        self.since = self.since.saturating_add(1);
        let is_close = self.short.count_ones() >= BUSY_POLL_SHORT_MIN;
        let is_little = self.mean <= BUSY_POLL_DATAGRAMS_MAX * PARTS;
        if self.on && !(is_close && is_little) {
            if self.since >= LASTED {
                self.next_pause = BUSY_POLL_PAUSE_MIN;
            }
            self.pause = 0;
            if !is_close {
                self.pause = self.next_pause;
                self.next_pause = (self.next_pause * 2).min(BUSY_POLL_PAUSE_MAX);
            }
            self.turn(false, 0);
        } else if !self.on && is_close && is_little && self.since >= self.pause {
            // Counts as a full row of short ones, so that as many long ones end it.
            self.turn(true, u32::MAX);
        }
    }

    /// Notes the datagrams of a turn, both ways.
    #[inline]
    const fn turned(&mut self, datagrams: u64) {
        let parts = datagrams.saturating_mul(PARTS);
        self.mean = self.mean - self.mean / WEIGHT + parts / WEIGHT;
    }

    const fn turn(&mut self, on: bool, short: u32) {
        (self.on, self.short, self.since) = (on, short, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IN_TIME: Duration = Duration::from_micros(BUSY_POLL_US);
    const CLOSE: Duration = Duration::from_micros(BUSY_POLL_TRY_US);
    const LONG: Duration = Duration::from_micros(BUSY_POLL_TRY_US + 1);

    /// Turns of `datagrams` datagrams after waits of `wait`, until it is on, or off; at most 100,000.
    fn turns_until(
        busy_poll: &mut BusyPoll,
        on: bool,
        wait: Duration,
        datagrams: u64,
    ) -> Option<u32> {
        (1..=100_000).find(|_| {
            busy_poll.waited(wait);
            busy_poll.turned(datagrams);
            busy_poll.spin() == if on { IN_TIME } else { Duration::ZERO }
        })
    }

    #[test]
    fn requests_and_answers_keep_it_awake_and_rest_lets_it_sleep() {
        let mut busy_poll = BusyPoll::new(None);
        assert_eq!(busy_poll.spin(), Duration::ZERO);
        assert_eq!(turns_until(&mut busy_poll, true, CLOSE, 1), Some(BUSY_POLL_SHORT_MIN));
        for turn in 0..2 * LASTED {
            // A pause now and then changes nothing.
            busy_poll.waited(if turn % 8 == 7 { LONG } else { IN_TIME });
            assert_eq!(busy_poll.spin(), IN_TIME, "turn {turn}");
        }
        (0..32).for_each(|_| busy_poll.waited(IN_TIME));
        // Rest does.
        assert_eq!(turns_until(&mut busy_poll, false, LONG, 1), Some(32 - BUSY_POLL_SHORT_MIN + 1));
        assert_eq!(turns_until(&mut busy_poll, true, LONG, 1), None);
    }

    #[test]
    fn polls_that_come_too_late_become_less_frequent() {
        let mut busy_poll = BusyPoll::new(None);
        let (mut tries, mut turns) = (0, 0);
        while let Some(more) = turns_until(&mut busy_poll, true, CLOSE, 1) {
            (tries, turns) = (tries + 1, turns + more);
            assert_eq!(
                turns_until(&mut busy_poll, false, CLOSE, 1),
                Some(32 - BUSY_POLL_SHORT_MIN + 1)
            );
            if tries == 20 {
                break;
            }
        }
        assert_eq!(tries, 20);
        assert!(turns > 8 * BUSY_POLL_PAUSE_MAX, "{turns} turns for 20 tries");
    }

    #[test]
    fn bulk_does_not_keep_it_awake() {
        let mut busy_poll = BusyPoll::new(None);
        assert_eq!(turns_until(&mut busy_poll, true, IN_TIME, 45), None);
        assert!(turns_until(&mut busy_poll, true, IN_TIME, 1).is_some_and(|turns| turns < 100));
        assert!(turns_until(&mut busy_poll, false, IN_TIME, 45).is_some_and(|turns| turns <= 3));
        // It was a success.
        assert!(turns_until(&mut busy_poll, true, IN_TIME, 1).is_some_and(|turns| turns < 100));
    }

    /// Turns of `datagrams` datagrams, one every `pause`, for 20 ms. Returns how many were gathered.
    fn gathered(busy_poll: &mut BusyPoll, from: &mut Instant, datagrams: u64, pause: u64) -> u64 {
        let turns = 20_000 / pause;
        let is_gathered = |_: &u64| {
            *from += Duration::from_micros(pause);
            let moved = busy_poll.moved + datagrams;
            busy_poll.begin_wait(moved);
            busy_poll.gathers(*from)
        };
        (0..turns).filter(is_gathered).count() as u64
    }

    #[test]
    fn datagrams_that_come_fast_and_alone_are_gathered_until_they_come_slowly() {
        let mut busy_poll = BusyPoll::gathering();
        let mut now = Instant::now();
        // 20,000 requests and their answers a second.
        assert_eq!(gathered(&mut busy_poll, &mut now, 2, 50), 0);
        // 100,000 datagrams a second, alone.
        assert!(gathered(&mut busy_poll, &mut now, 1, 10) > 1_000);
        // As many, gathered.
        assert_eq!(gathered(&mut busy_poll, &mut now, 10, 100), 200);
        assert_eq!(busy_poll.spin(), Duration::ZERO);
        assert!(gathered(&mut busy_poll, &mut now, 1, 50) < 200);
        assert_eq!(gathered(&mut busy_poll, &mut now, 1, 50), 0);
        // Many that come together anyway.
        assert_eq!(gathered(&mut busy_poll, &mut now, 45, 200), 0);
        // Another thread never gathers.
        let mut other = BusyPoll::new(None);
        assert_eq!(gathered(&mut other, &mut now, 1, 10), 0);
    }

    #[test]
    fn configured_polling_holds() {
        for fixed in [Duration::ZERO, Duration::from_millis(2)] {
            let mut busy_poll = BusyPoll::new(Some(fixed));
            assert!(!busy_poll.learns());
            (0..100).for_each(|_| busy_poll.waited(LONG));
            assert_eq!(busy_poll.spin(), fixed);
        }
    }
}
