//! Tasks with an owner.

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
