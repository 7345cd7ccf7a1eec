//! How long a loop holds its thread: what comes meanwhile waits.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use weft_api::LoopStatus;

/// A turn that takes longer is late, in milliseconds: a stream's next packets, a probe or an answer waited for it.
const LATE_MS: u64 = 10;

/// The turns of one loop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    late: AtomicU64,
    longest_us: AtomicU64,
}

impl Turns {
    /// Runs a loop, and notes each time how long it works before it waits.
    pub(crate) async fn watch<F: Future>(&self, runs: F) -> F::Output {
        let mut runs = pin!(runs);
        poll_fn(|context| {
            let begun = Instant::now();
            let polled = runs.as_mut().poll(context);
            self.note(begun.elapsed());
            polled
        })
        .await
    }

    /// Notes how long a turn took, or by how much it began too late.
    pub(crate) fn note(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.0.longest_us.fetch_max(us, Relaxed);
        self.0.late.fetch_add(u64::from(us > LATE_MS * 1_000), Relaxed);
    }

    pub(crate) fn status(&self) -> LoopStatus {
        LoopStatus { late: self.0.late.load(Relaxed), longest_us: self.0.longest_us.load(Relaxed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_loop_that_holds_its_thread_is_late_and_one_that_waits_is_not() {
        let turns = Turns::default();
        let long = Duration::from_millis(LATE_MS + 5);
        turns.watch(tokio::time::sleep(long)).await;
        let waited = turns.status();
        turns.watch(async { std::thread::sleep(long) }).await;
        let held = turns.status();
        assert_eq!(held.late, waited.late + 1);
        assert!(held.longest_us >= 1_000 * (LATE_MS + 5), "{held:?}");
    }
}
