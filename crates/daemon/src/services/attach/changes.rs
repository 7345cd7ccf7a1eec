//! One change at a time, and none once the daemon stops.

use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, watch};

/// State that changes take turns at.
pub(super) struct Changes<T> {
    state: Mutex<T>,
    closed: watch::Sender<bool>,
}

impl<T> Changes<T> {
    pub(super) fn new(state: T) -> Self {
        Self { state: Mutex::new(state), closed: watch::Sender::new(false) }
    }

    /// Waits for its turn to change the state; `None` once the changes are closed.
    pub(super) async fn begin(&self) -> Option<MutexGuard<'_, T>> {
        let state = self.state.lock().await;
        (!self.is_closed()).then_some(state)
    }

    /// Waits until no change is under way.
    pub(super) async fn settled(&self) {
        drop(self.state.lock().await);
    }

    /// Lets no change begin any more, and waits for the one under way. False if that took longer than the limit.
    pub(super) async fn close(&self, limit: Duration) -> bool {
        self.closed.send_replace(true);
        tokio::time::timeout(limit, self.settled()).await.is_ok()
    }

    /// Whether the changes are closed, so that a long one must come to its end.
    pub(super) fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Waits until the changes are closed.
    pub(super) async fn closed(&self) {
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Arc;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[tokio::test(start_paused = true)]
    async fn a_close_waits_for_the_change_under_way_and_lets_no_other_begin() {
        let changes = Arc::new(Changes::new(0));
        let mut under_way = changes.begin().await.unwrap();
        let begin = |by: i32| {
            let changes = Arc::clone(&changes);
            tokio::spawn(async move {
                let begun = changes.begin().await;
                begun.is_some_and(|mut state| {
                    *state += by;
                    true
                })
            })
        };
        let waiting = begin(10);
        tokio::task::yield_now().await;
        let closing = tokio::spawn({
            let changes = Arc::clone(&changes);
            async move { changes.close(LIMIT).await }
        });
        tokio::time::sleep(LIMIT / 2).await;
        assert!(!closing.is_finished());
        *under_way += 1;
        drop(under_way);
        assert_eq!(closing.await.ok(), Some(true));
        changes.closed().await;
        assert_eq!((waiting.await.ok(), begin(100).await.ok()), (Some(false), Some(false)));
        assert_eq!(*changes.state.lock().await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_close_gives_up_after_its_limit() {
        let changes = Changes::new(());
        let _under_way = changes.begin().await;
        assert!(!changes.close(LIMIT).await);
    }
}
