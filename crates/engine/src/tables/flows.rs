//! The choice of a lane for each flow: that of its worker, or one that carries much less.
//!
//! A lane's packets wait in one queue at the peer and for one thread, first come first served. So a request waits
//! for a stream's packets under way, and for a thread that has used its share of a processor. So a new flow takes
//! a lane with little traffic. It keeps the lane until it has paused for so long that nothing of it can still be
//! under way (flowlets: Vanini and others, Let it Flow, 2017).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use weft_io::steer::{FLOW_PAUSE_NS, Load, SPREAD, TICK_NS};

use super::state::{Outbound, Path};

/// Ticks of a pause after which a flow may take another lane: [`FLOW_PAUSE_NS`].
pub(crate) const PAUSE_TICKS: i32 = FLOW_PAUSE_NS / TICK_NS.cast_signed();
/// Bits of the hash that tells flows apart; flows with the same hash share a lane.
const SLOT_BITS: u32 = 12;

/// The lanes of the flows that one worker and its helpers send.
#[derive(Debug)]
pub(crate) struct Flows {
    slots: Box<[AtomicU64]>,
}

/// The contents of a slot: when a flow was last seen, by which lane, and how many lanes there were to choose
/// from.
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

    /// Whether something of it may be under way yet. Another thread may be a tick ahead.
    const fn goes_on(self, tick: u32) -> bool {
        tick.wrapping_sub(self.tick).cast_signed() < PAUSE_TICKS
    }
}

impl Flows {
    /// The lane for a packet on a path with several lanes. `number` is the path's number; the flow has this hash,
    /// and this one of `workers` workers sends it at `tick`. It chooses a lane of the worker's own socket, unless
    /// another carries much less. If the peer takes too few lanes for that, it chooses another worker's lane.
    pub(crate) fn lane(
        &self,
        (number, path): (u32, &Path),
        (worker, workers): (usize, usize),
        hash: u32,
        tick: u32,
    ) -> Option<usize> {
        let slot = self.slot(number, hash)?;
        let usable = usable(path).count() as u16;
        let is_own = |lane: usize| lane % workers.max(1) == worker;
        let before = Placed::from_bits(slot.load(Relaxed)).filter(|before| {
            let lane = usize::from(before.lane);
            // If lanes have come or gone since, a flow leaves a lane that stood in for its worker's.
            before.goes_on(tick)
                && is_usable(path, lane)
                && (before.usable == usable || is_own(lane))
        });
        let lane = match before {
            Some(before) => usize::from(before.lane),
            None => {
                let lane = choose(path, worker, is_own, hash, tick)?;
                load(path, lane)?.begin(tick);
                lane
            }
        };
        let now = Placed { tick, lane: lane as u16, usable };
        if before != Some(now) {
            slot.store(now.to_bits(), Relaxed);
        }
        Some(lane)
    }

    /// Notes a packet on the only lane, the first, of the path with this number. When other lanes come, the flow
    /// is known to go on there, if the lane is its worker's own.
    #[inline]
    pub(crate) fn keep(&self, number: u32, hash: u32, tick: u32) {
        let now = Placed { tick, lane: 0, usable: 1 }.to_bits();
        if let Some(slot) = self.slot(number, hash)
            && slot.load(Relaxed) != now
        {
            // Once in a tick and flow. One that has several lanes and the same slot would be moved.
            let before = Placed::from_bits(slot.load(Relaxed));
            if !before.is_some_and(|before| before.usable > 1 && before.goes_on(tick)) {
                slot.store(now, Relaxed);
            }
        }
    }

    /// Takes over where another worker's flows are at `tick`, since they may come here; its own stay.
    pub(crate) fn inherit(&self, other: &Self, tick: u32) {
        let going_on = |slot: &AtomicU64| {
            Placed::from_bits(slot.load(Relaxed)).filter(|placed| placed.goes_on(tick))
        };
        for (own, other) in self.slots.iter().zip(&other.slots) {
            if let (None, Some(other)) = (going_on(own), going_on(other)) {
                own.store(other.to_bits(), Relaxed);
            }
        }
    }

    #[inline]
    fn slot(&self, number: u32, hash: u32) -> Option<&AtomicU64> {
        let slot = hash.wrapping_add(number.wrapping_mul(SPREAD)).wrapping_mul(SPREAD);
        self.slots.get((slot >> (u32::BITS - SLOT_BITS)) as usize)
    }
}

impl Default for Flows {
    fn default() -> Self {
        Self { slots: (0..1 << SLOT_BITS).map(|_| AtomicU64::new(0)).collect() }
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
    let own = || usable(path).filter(|lane| is_own(*lane));
    let Some(own) = own().nth(hash as usize % own().count().max(1)) else {
        return usable(path).nth(worker % usable(path).count().max(1));
    };
    let least = usable(path).min_by_key(|lane| load(path, *lane).map(|load| load.at(tick)))?;
    Some(if load(path, own)?.is_spared_for(load(path, least)?, tick) { least } else { own })
}

fn load(path: &Path, lane: usize) -> Option<&Load> {
    path.lanes.get(lane)?.as_ref().map(|Outbound { load, .. }| load)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_reads_back_as_written() {
        for placed in [
            Placed { tick: 0, lane: 0, usable: 1 },
            Placed { tick: u32::MAX, lane: 255, usable: u16::MAX },
        ] {
            assert_eq!(Placed::from_bits(placed.to_bits()), Some(placed));
        }
        assert_eq!(Placed::from_bits(0), None);
    }
}
