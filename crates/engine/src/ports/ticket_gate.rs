//! A ticket gate keeps threads that share a device in order. One at a time takes a unit off the device and draws a
//! ticket. They work on their units side by side, and each then waits for its ticket's turn.
//!
//! A thread holds at most one ticket and there is no queue: a thread that is stuck holds up those behind it,
//! and nothing grows. A lock and a turn for each unit of some 64 KiB, none for a packet.

use std::cell::Cell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

/// How often a thread that waits looks again before it lets others have the CPU.
const SPINS: u32 = 64;
/// How often it lets others have the CPU before it sleeps.
const YIELDS: u32 = 64;

/// One direction of a device.
#[derive(Debug, Default)]
pub(crate) struct TicketGate {
    /// The next ticket.
    front: Mutex<u64>,
    /// The ticket whose turn it is.
    turn: AtomicU64,
    sleepers: AtomicU32,
    asleep: Mutex<()>,
    moved: Condvar,
}

/// The right to take units off the device, until it is dropped.
#[derive(Debug)]
pub(crate) struct Front<'a> {
    gate: &'a TicketGate,
    next: MutexGuard<'a, u64>,
}

/// A place in the order. Dropping it, which waits for its turn, lets the next one have its turn.
#[derive(Debug)]
pub(crate) struct Ticket<'a> {
    gate: &'a TicketGate,
    number: u64,
    is_turn: Cell<bool>,
}

impl TicketGate {
    /// Waits until no other thread takes units off the device.
    pub(crate) fn enter(&self) -> Front<'_> {
        let next = self.free_front().unwrap_or_else(|| {
            // A thread that panicked has drawn its ticket or has not.
            self.front.lock().unwrap_or_else(PoisonError::into_inner)
        });
        Front { gate: self, next }
    }

    fn free_front(&self) -> Option<MutexGuard<'_, u64>> {
        let mut free = None;
        let _ = soon(|| {
            free = match self.front.try_lock() {
                Ok(front) => Some(front),
                Err(TryLockError::Poisoned(front)) => Some(front.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            free.is_some()
        });
        free
    }

    fn is_turn(&self, number: u64) -> bool {
        self.turn.load(SeqCst) == number
    }

    fn wait(&self, number: u64) {
        if soon(|| self.is_turn(number)) {
            return;
        }
        self.sleepers.fetch_add(1, SeqCst);
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_turn(number) {
            asleep = self.moved.wait(asleep).unwrap_or_else(PoisonError::into_inner);
        }
        drop(asleep);
        self.sleepers.fetch_sub(1, SeqCst);
    }

    fn pass(&self, number: u64) {
        self.turn.store(number + 1, SeqCst);
        // A sleeper that counted itself before this look is woken; a later one sees the new turn.
        if self.sleepers.load(SeqCst) > 0 {
            drop(self.asleep.lock().unwrap_or_else(PoisonError::into_inner));
            self.moved.notify_all();
        }
    }
}

/// Waits awake for a moment; whether `is_so` by then.
fn soon(mut is_so: impl FnMut() -> bool) -> bool {
    for _ in 0..SPINS {
        if is_so() {
            return true;
        }
        spin_loop();
    }
    for _ in 0..YIELDS {
        std::thread::yield_now();
        if is_so() {
            return true;
        }
    }
    false
}

impl<'a> Front<'a> {
    /// A ticket for the unit that was taken.
    pub(crate) fn draw(&mut self) -> Ticket<'a> {
        let number = *self.next;
        *self.next += 1;
        Ticket { gate: self.gate, number, is_turn: Cell::new(false) }
    }
}

impl Ticket<'_> {
    /// Waits until all tickets before it are gone.
    #[inline]
    pub(crate) fn wait(&self) {
        if !self.is_turn.replace(true) {
            self.gate.wait(self.number);
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.wait();
        self.gate.pass(self.number);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;

    #[test]
    fn tickets_have_their_turns_in_the_order_in_which_they_were_drawn() {
        const UNITS: u64 = 2_000;
        let gate = TicketGate::default();
        let (left, done) = (Mutex::new(0..UNITS), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (gate, left, done) = (&gate, &left, &done);
                scope.spawn(move || {
                    loop {
                        let mut front = gate.enter();
                        let Some(unit) = left.lock().unwrap().next() else { return };
                        let ticket = front.draw();
                        drop(front);
                        if (unit + thread) % 97 == 0 {
                            // Long enough for the others to fall asleep.
                            std::thread::sleep(Duration::from_millis(2));
                        }
                        // Some say nothing and just go.
                        if unit % 5 > 0 {
                            ticket.wait();
                            done.lock().unwrap().push(unit);
                        }
                    }
                });
            }
        });
        let all: Vec<u64> = (0..UNITS).filter(|unit| unit % 5 > 0).collect();
        assert_eq!(done.into_inner().unwrap(), all);
    }

    #[test]
    fn a_panic_passes_the_turn_on() {
        let gate = TicketGate::default();
        std::thread::scope(|scope| {
            let panicking = scope.spawn(|| {
                let _front = gate.enter().draw();
                panic!("as a test");
            });
            assert!(panicking.join().is_err());
        });
        let ticket = gate.enter().draw();
        ticket.wait();
        assert_eq!(ticket.number, 1);
    }

    #[test]
    fn a_stuck_holder_delays_the_others_and_nothing_grows() {
        let gate = TicketGate::default();
        let (stuck, is_free) = (gate.enter().draw(), AtomicBool::new(false));
        let taken = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !is_free.load(SeqCst) {
                        let ticket = gate.enter().draw();
                        taken.fetch_add(1, SeqCst);
                        ticket.wait();
                    }
                });
            }
            while taken.load(SeqCst) < 3 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(taken.load(SeqCst), 3, "one unit each");
            is_free.store(true, SeqCst);
            drop(stuck);
        });
    }
}
