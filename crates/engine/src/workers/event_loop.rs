//! The loop of every thread that moves packets, be it a worker's, a helper's or a data channel device's. It waits
//! for the thread's devices, awake while that pays, and has the thread take a turn with those that have something.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use weft_io::poller::{Poller, Waker};

use super::busy_poll::BusyPoll;
use crate::stats::counters::WorkerCounters;

/// The token of the loop's own waker; those of devices are above it.
pub(crate) const WAKER: u64 = 0;

/// The part of a thread in its loop.
pub(crate) trait Turns {
    /// Has the poller report the thread's devices; once, before the first wait.
    ///
    /// # Errors
    /// The poller does not take them.
    fn watch(&mut self, poller: &Poller) -> io::Result<()>;

    /// How long the next wait may take; `None`: no limit.
    fn time_left(&mut self, poller: &Poller) -> Option<Duration>;

    /// The device with this token is ready.
    fn note_ready(&mut self, token: u64);

    /// Takes a turn with the devices that are ready. It breaks where it was the last one.
    ///
    /// # Errors
    /// A device is broken; the loop ends.
    fn take(&mut self, poller: &Poller, wake: Wake) -> io::Result<ControlFlow<()>>;
}

/// The reasons of a turn that have no device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wake {
    /// Another thread has woken this one.
    pub(crate) woken: bool,
    /// The thread must stop.
    pub(crate) stop: bool,
}

/// The state that a loop shares with other threads, and how long it stays awake.
pub(crate) struct EventLoop<'a> {
    /// The calling thread's.
    pub(crate) counters: &'a WorkerCounters,
    pub(crate) waker: &'a Waker,
    /// Set before the thread is woken to stop.
    pub(crate) stop: &'a AtomicBool,
    pub(crate) busy_poll: BusyPoll,
}

impl EventLoop<'_> {
    /// Runs in the calling thread until a turn was the last one.
    ///
    /// # Errors
    /// A device or the poller is broken.
    pub(crate) fn run(mut self, turns: &mut impl Turns) -> io::Result<()> {
        self.counters.begin();
        self.busy_poll.begin(self.counters.own_datagrams());
        let mut poller = Poller::new()?;
        poller.add(self.waker, WAKER)?;
        turns.watch(&poller)?;
        loop {
            let mut woken = false;
            let limit = turns.time_left(&poller);
            self.busy_poll.wait(&mut poller, self.counters, limit, |token| match token {
                WAKER => woken = true,
                token => turns.note_ready(token),
            })?;
            let take_wakes = || {
                if woken {
                    self.waker.clear();
                }
            };
            let stop = is_to_stop(take_wakes, self.stop);
            if turns.take(&poller, Wake { woken, stop })?.is_break() {
                return Ok(());
            }
        }
    }
}

/// Whether the thread must stop. It looks after it has taken its wakes: the stop's wake may be taken together
/// with earlier ones, and no further one comes.
fn is_to_stop(take_wakes: impl FnOnce(), stop: &AtomicBool) -> bool {
    take_wakes();
    stop.load(SeqCst)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_told_to_stop_while_its_wakes_are_taken_stops() {
        let stop = AtomicBool::new(false);
        assert!(!is_to_stop(|| {}, &stop));
        assert!(is_to_stop(|| stop.store(true, SeqCst), &stop));
    }
}
