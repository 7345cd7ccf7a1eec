//! The recent load of workers and lanes.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The unit of time here, in nanoseconds: a 64th of a second.
pub const TICK_NS: u32 = 1_000_000_000 / 64;
/// The load in bytes below which nothing is spared: 33 Mbit/s.
const TRIFLE: u64 = 128 << 10;
/// A worker or lane is spared where its load is greater than another's by this factor.
pub(super) const MUCH_LESS: u64 = 2;
/// The presumed load of a new flow until its packets are seen, in bytes. It is more than a trifle, so that flows
/// that begin at once spread.
const PRESUMED: u64 = TRIFLE;
/// The load in bytes, as of a few new flows, below which one more flow is much.
const FEW: u64 = 4 * PRESUMED;

/// A load's unit, in bytes: a packet of any size counts.
const UNIT: u64 = 64;
pub(super) const TRIFLE_UNITS: i32 = (TRIFLE / UNIT) as i32;
pub(super) const PRESUMED_UNITS: i32 = (PRESUMED / UNIT) as i32;
pub(super) const FEW_UNITS: i32 = (FEW / UNIT) as i32;
/// Bits of the load in one tick: up to 64 MiB, or 32 Gbit/s.
pub(super) const TICK_LOAD_BITS: u32 = 20;
pub(super) const TICK_LOAD_MAX: u64 = (1 << TICK_LOAD_BITS) - 1;
pub(super) const LOAD_TICK_MAX: u32 = (1 << (u64::BITS - 2 * TICK_LOAD_BITS)) - 1;

/// The time in ticks since the machine was started, without those of its sleep; it wraps.
#[inline]
pub fn tick() -> u32 {
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the kernel writes a `timespec`, for which there is room; a clock that every Linux has.
    let time = unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, time.as_mut_ptr());
        time.assume_init()
    };
    let ns = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
    (ns / u64::from(TICK_NS)) as u32
}

/// The load of this tick and of the one before. If two threads write at once, one addition may be lost.
///
/// The upper 24 bits name the tick. The low 20 bits are the load in it, the 20 between the load in the tick
/// before, both in units of 64 bytes.
#[derive(Debug, Default)]
pub struct Load(AtomicU64);

impl Load {
    /// Notes the bytes carried at `tick`.
    #[inline]
    pub fn add(&self, bytes: u64, tick: u32) {
        add(&self.0, bytes, tick);
    }

    /// A flow begins at `tick`.
    pub fn begin(&self, tick: u32) {
        self.add(PRESUMED, tick);
    }

    /// The load at `tick` and at the one before, in units of 64 bytes.
    pub fn at(&self, tick: u32) -> u64 {
        let (before, now) = ticks(&self.0, tick);
        before + now
    }

    /// Whether this is more than a trifle, and much more than another; where both are little, a flow more.
    pub fn is_spared_for(&self, other: &Self, tick: u32) -> bool {
        let (own, other) = (self.at(tick), other.at(tick));
        let has_much_less = other * MUCH_LESS < own;
        let has_one_less = own < FEW / UNIT && other + PRESUMED / UNIT <= own;
        own >= TRIFLE / UNIT && (has_much_less || has_one_less)
    }
}

/// As [`Load::add`], in memory that somebody else reads too.
#[inline]
pub(super) fn add(load: &AtomicU64, bytes: u64, tick: u32) {
    let (before, now) = ticks(load, tick);
    let now = (now + bytes / UNIT + 1).min(TICK_LOAD_MAX);
    let tick = u64::from(tick & LOAD_TICK_MAX);
    load.store(tick << (2 * TICK_LOAD_BITS) | before << TICK_LOAD_BITS | now, Relaxed);
}

#[inline]
fn ticks(load: &AtomicU64, tick: u32) -> (u64, u64) {
    let bits = load.load(Relaxed);
    let (before, now) = (bits >> TICK_LOAD_BITS & TICK_LOAD_MAX, bits & TICK_LOAD_MAX);
    let since = tick.wrapping_sub((bits >> (2 * TICK_LOAD_BITS)) as u32) & LOAD_TICK_MAX;
    match since {
        0 => (before, now),
        1 => (now, 0),
        // Another thread is a tick ahead.
        LOAD_TICK_MAX => (before, now),
        _ => (0, 0),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_load_is_of_this_tick_and_the_last() {
        let load = Load::default();
        assert_eq!(load.at(9), 0);
        load.add(640, 9);
        assert_eq!(load.at(9), 11);
        load.add(1, 9);
        assert_eq!(load.at(10), 12);
        load.add(64, 10);
        assert_eq!([load.at(10), load.at(11), load.at(12)], [14, 2, 0]);
        // Somebody whose clock is a tick behind takes nothing away.
        assert_eq!(load.at(9), 14);
    }

    #[test]
    fn a_load_has_a_most_and_survives_the_end_of_its_clock() {
        let load = Load::default();
        for tick in [LOAD_TICK_MAX, LOAD_TICK_MAX.wrapping_add(1)] {
            (0..3).for_each(|_| load.add(1 << 26, tick));
        }
        assert_eq!(load.at(LOAD_TICK_MAX + 1), 2 * TICK_LOAD_MAX);
        assert_eq!(load.at(LOAD_TICK_MAX + 2), TICK_LOAD_MAX);
        let load = Load::default();
        load.add(0, u32::MAX);
        assert_eq!([load.at(u32::MAX), load.at(0), load.at(1)], [1, 1, 0]);
    }

    #[test]
    fn much_is_spared_where_another_has_much_less() {
        let of = |bytes: u64| {
            let load = Load::default();
            load.add(bytes, 5);
            load
        };
        for (own, other, expected) in [
            (TRIFLE, 0, true),
            (TRIFLE - 2 * UNIT, 0, false),
            (4 * TRIFLE, 2 * TRIFLE - UNIT, true),
            (4 * TRIFLE, 2 * TRIFLE, false),
            (2 * TRIFLE, TRIFLE, true),
            (2 * TRIFLE, TRIFLE + 2 * UNIT, false),
        ] {
            let (own_load, other_load) = (of(own), of(other));
            assert_eq!(own_load.is_spared_for(&other_load, 5), expected, "{own} and {other}");
            assert!(!own_load.is_spared_for(&other_load, 7), "long ago");
        }
    }

    #[test]
    fn flows_that_begin_at_once_are_shared_out() {
        for chosen_first in [[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1]] {
            let loads: [Load; 2] = Default::default();
            let mut begun = [0_usize; 2];
            for first in chosen_first {
                let other = 1 - first;
                let lane = if loads[first].is_spared_for(&loads[other], 5) { other } else { first };
                loads[lane].begin(5);
                begun[lane] += 1;
                assert!(begun[0].abs_diff(begun[1]) <= 1, "{begun:?}");
            }
        }
    }

    #[test]
    fn ticks_go_on_with_the_time() {
        let (begun, first) = (Instant::now(), tick());
        std::thread::sleep(Duration::from_millis(40));
        let passed = tick().wrapping_sub(first);
        let most = begun.elapsed().as_nanos() / u128::from(TICK_NS) + 1;
        assert!((2..=most).contains(&u128::from(passed)), "{passed} of {most}");
    }
}
