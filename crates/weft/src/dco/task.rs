//! Tasks with an owner, and locks that outlive a task that panicked.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::task::JoinHandle;

/// A task that is aborted when this value is dropped.
#[derive(Debug)]
pub(crate) struct OwnedTask(JoinHandle<()>);

impl OwnedTask {
    /// Starts it.
    pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(task))
    }
}

impl Drop for OwnedTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Locks a mutex, also one whose last holder has panicked.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
