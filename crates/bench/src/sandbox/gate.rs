//! The gate between making and removing, and signals to processes of a sandbox.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal};

/// Held while something is made. The signal thread takes it and keeps it until the process ends.
static GATE: Mutex<()> = Mutex::new(());

/// Waits out a removal that a signal has started; hold the guard while something is made.
pub(crate) fn gate() -> MutexGuard<'static, ()> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends a signal to a process of the sandbox; a process that has ended is not an error.
pub(crate) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}
