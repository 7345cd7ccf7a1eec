//! A daemon that stands still.

use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use weft_bench::sandbox::{Host, wait_until};

/// How long its threads may take to come to a stand.
const STAND_LIMIT: Duration = Duration::from_secs(15);

/// A daemon with all its threads stopped, until this is dropped.
pub struct Stopped(Pid);

impl Stopped {
    /// Stops a host's daemon, and waits until all its threads stand still.
    ///
    /// # Errors
    /// No daemon runs there, or a thread goes on.
    pub fn daemon_of(host: &Host) -> anyhow::Result<Self> {
        let process = host.daemon_pid().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let process = process.ok_or_else(|| anyhow::anyhow!("no daemon"))?;
        kill_process(process, Signal::STOP)?;
        let stopped = Self(process);
        let tasks = format!("/proc/{}/task", process.as_raw_nonzero());
        wait_until("the daemon to stand still", STAND_LIMIT, || {
            let Ok(tasks) = std::fs::read_dir(&tasks) else { return false };
            tasks.flatten().all(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat"));
                stat.is_ok_and(|stat| stat.contains(") T "))
            })
        })?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}
