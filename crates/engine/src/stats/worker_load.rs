//! A worker's load, by which the kernel hands flows out.

use std::sync::Arc;

use weft_io::steer::{FrameSteering, tick};

/// Tells the kernel what one worker and its helpers carry, where it hands frames out by that.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorkerLoad {
    /// The worker's number, and the program that counts its load. `None`: loads are not counted.
    told: Option<(usize, Arc<FrameSteering>)>,
}

impl WorkerLoad {
    /// Of the worker with this number.
    pub(crate) fn new(worker: usize, steering: Option<Arc<FrameSteering>>) -> Self {
        Self { told: steering.map(|steering| (worker, steering)) }
    }

    /// Notes the bytes sent at `tick`, if any.
    #[inline]
    pub(crate) fn sent(&self, bytes: u64, tick: u32) {
        if let Some((worker, steering)) = &self.told
            && bytes > 0
        {
            steering.carried(*worker, bytes, tick);
        }
    }

    /// Notes the bytes received.
    #[inline]
    pub(crate) fn received(&self, bytes: usize) {
        if self.told.is_some() {
            self.sent(bytes as u64, tick());
        }
    }
}
