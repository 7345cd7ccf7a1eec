//! Which lane each flow takes: that of its worker, or one that carries much less.
//!
//! A lane's packets wait in one queue at the peer and for one thread, first come first served, so a request
//! waits for what a stream has under way and for a thread that has used its share of a processor. A flow
//! that begins therefore goes where little goes; it keeps its lane until it has paused for so long that
//! nothing of it can still be under way (flowlets: Vanini and others, Let it Flow, 2017).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use weft_io::steer::SPREAD;

use crate::state::{Outbound, Path};

/// The unit of time here: a 64th of a second, in nanoseconds.
const TICK_NS: u32 = 1_000_000_000 / TICKS_PER_S;
const TICKS_PER_S: u32 = 64;
/// A flow that has paused for so many ticks may take another lane: 1 s. In the fullest queues a packet has
/// waited for 65 ms (docs/performance.md, "More than the path carries"); the rest is for a peer's thread that
/// got no processor. TCP's first repetition after such a stall, at 200 ms, must not overtake what it repeats.
pub(crate) const PAUSE_TICKS: i32 = TICKS_PER_S.cast_signed();
/// Flows are told apart by so many bits of a hash; those that are not take one lane together.
const SLOT_BITS: u32 = 12;
/// A lane is left for one that carries less than this part of what it does.
const MUCH_LESS: u64 = 2;
/// A lane that has carried less than so many bytes lately is not left for any: 33 Mbit/s.
pub(crate) const TRIFLE: u64 = 128 << 10;

/// Where the flows go that one worker and its helpers send.
#[derive(Debug)]
pub(crate) struct Flows {
    slots: Box<[AtomicU64]>,
    /// Ticks are counted from then on; the same for all workers of an engine.
    origin: Instant,
}

/// What a slot says: when a flow was last seen, by which lane, and how many lanes there were to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Placed {
    tick: u32,
    lane: u16,
    usable: u16,
}

impl Placed {
    /// `None`: no flow has been here. No flow has no lane to choose from.
    const fn from_bits(bits: u64) -> Option<Self> {
        let usable = bits as u16;
        let (tick, lane) = ((bits >> 32) as u32, (bits >> 16) as u16);
        if usable == 0 { None } else { Some(Self { tick, lane, usable }) }
    }

    const fn to_bits(self) -> u64 {
        (self.tick as u64) << 32 | (self.lane as u64) << 16 | self.usable as u64
    }
}

impl Flows {
    pub(crate) fn new(origin: Instant) -> Self {
        let slots = (0..1 << SLOT_BITS).map(|_| AtomicU64::new(0)).collect();
        Self { slots, origin }
    }

    /// The time in ticks.
    #[inline]
    pub(crate) fn tick(&self) -> u32 {
        let elapsed = self.origin.elapsed();
        let seconds = (elapsed.as_secs() as u32).wrapping_mul(TICKS_PER_S);
        seconds.wrapping_add(elapsed.subsec_nanos() / TICK_NS)
    }

    /// The lane of a path that has several, whose number is `number`, for a packet of the flow with this
    /// hash that this of `workers` workers sends at `tick`. Lanes that go from the worker's own socket are its choice, unless
    /// another carries much less; where the peer takes too few lanes for that, another worker's lane.
    pub(crate) fn lane(
        &self,
        (number, path): (u32, &Path),
        (worker, workers): (usize, usize),
        hash: u32,
        tick: u32,
    ) -> Option<usize> {
        let slot = hash.wrapping_add(number.wrapping_mul(SPREAD)).wrapping_mul(SPREAD);
        let slot = self.slots.get((slot >> (u32::BITS - SLOT_BITS)) as usize)?;
        let usable = usable(path).count() as u16;
        let is_own = |lane: usize| lane % workers.max(1) == worker;
        let before = Placed::from_bits(slot.load(Relaxed)).filter(|before| {
            let lane = usize::from(before.lane);
            // Another thread of the worker may be a tick ahead. Where lanes have come or gone since, those
            // that stood in for one of its own are left.
            (tick.wrapping_sub(before.tick).cast_signed() < PAUSE_TICKS)
                && is_usable(path, lane)
                && (before.usable == usable || is_own(lane))
        });
        let lane = match before {
            Some(before) => usize::from(before.lane),
            None => choose(path, worker, is_own, hash, tick)?,
        };
        let now = Placed { tick, lane: lane as u16, usable };
        if before != Some(now) {
            slot.store(now.to_bits(), Relaxed);
        }
        Some(lane)
    }
}

impl Default for Flows {
    fn default() -> Self {
        Self::new(Instant::now())
    }
}

#[inline]
fn is_usable(path: &Path, lane: usize) -> bool {
    path.lanes.get(lane).is_some_and(Option::is_some) && path.is_open(lane)
}

#[inline]
fn usable(path: &Path) -> impl Iterator<Item = usize> {
    (0..path.lanes.len()).filter(|lane| is_usable(path, *lane))
}

/// The lane for a flow that begins, or that has paused.
fn choose(
    path: &Path,
    worker: usize,
    is_own: impl Fn(usize) -> bool,
    hash: u32,
    tick: u32,
) -> Option<usize> {
    let load = |lane: usize| match path.lanes.get(lane) {
        Some(Some(Outbound { load, .. })) => load.at(tick),
        _ => 0,
    };
    let own = || usable(path).filter(|lane| is_own(*lane));
    let Some(own) = own().nth(hash as usize % own().count().max(1)) else {
        return usable(path).nth(worker % usable(path).count().max(1));
    };
    let least = usable(path).min_by_key(|lane| load(*lane))?;
    let is_much_less = load(own) >= TRIFLE / LOAD_UNIT && load(least) * MUCH_LESS < load(own);
    Some(if is_much_less { least } else { own })
}

/// What has gone by a lane lately. Written by each worker that sends there, and read by those that choose;
/// what one of two that write at once has added may be lost.
#[derive(Debug, Default)]
pub(crate) struct Load(AtomicU64);

/// A load's unit, in bytes: a packet of any size counts.
const LOAD_UNIT: u64 = 64;
/// Bits of what went in one tick: up to 64 MiB, or 32 Gbit/s.
const LOAD_BITS: u32 = 20;
const LOAD_MAX: u64 = (1 << LOAD_BITS) - 1;
const LOAD_TICK_MAX: u32 = (1 << (u64::BITS - 2 * LOAD_BITS)) - 1;

impl Load {
    /// So many bytes have gone at `tick`.
    #[inline]
    pub(crate) fn add(&self, bytes: u64, tick: u32) {
        let (before, now) = self.ticks(tick);
        let now = (now + bytes / LOAD_UNIT + 1).min(LOAD_MAX);
        let tick = u64::from(tick & LOAD_TICK_MAX);
        self.0.store(tick << (2 * LOAD_BITS) | before << LOAD_BITS | now, Relaxed);
    }

    /// What has gone at `tick` and at the one before, in a unit of its own.
    fn at(&self, tick: u32) -> u64 {
        let (before, now) = self.ticks(tick);
        before + now
    }

    #[inline]
    fn ticks(&self, tick: u32) -> (u64, u64) {
        let bits = self.0.load(Relaxed);
        let (before, now) = (bits >> LOAD_BITS & LOAD_MAX, bits & LOAD_MAX);
        let since = tick.wrapping_sub((bits >> (2 * LOAD_BITS)) as u32) & LOAD_TICK_MAX;
        match since {
            0 => (before, now),
            1 => (now, 0),
            // Another worker is a tick ahead.
            LOAD_TICK_MAX => (before, now),
            _ => (0, 0),
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(load.at(LOAD_TICK_MAX + 1), 2 * LOAD_MAX);
        assert_eq!(load.at(LOAD_TICK_MAX + 2), LOAD_MAX);
        let load = Load::default();
        load.add(0, u32::MAX);
        assert_eq!([load.at(u32::MAX), load.at(0), load.at(1)], [1, 1, 0]);
    }

    #[test]
    fn what_a_slot_says_is_read_back() {
        for placed in [
            Placed { tick: 0, lane: 0, usable: 1 },
            Placed { tick: u32::MAX, lane: 255, usable: u16::MAX },
        ] {
            assert_eq!(Placed::from_bits(placed.to_bits()), Some(placed));
        }
        assert_eq!(Placed::from_bits(0), None);
    }
}
