//! How a thread of the engine ends, and where it runs.

use std::panic::{AssertUnwindSafe, catch_unwind};

use weft_path::{EngineEvent, EngineKind};

/// Runs a thread of the engine and turns its end by error or panic into an event.
pub(crate) fn supervise(
    events: &(dyn Fn(EngineEvent) + Send + Sync),
    who: &str,
    work: impl FnOnce() -> std::io::Result<()>,
) {
    // Nothing of the thread is used after a panic.
    let reason = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return,
        Ok(Err(error)) => format!("the engine's {who} failed: {error}"),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            format!("the engine's {who} panicked: {}", text.unwrap_or_default())
        }
    };
    tracing::error!(reason, "the engine has failed");
    events(EngineEvent::EngineFailed { engine: EngineKind::Userspace, reason });
}

/// Pins the calling thread to the CPU with this number among those that it may use.
pub(crate) fn pin_nth(number: usize) -> std::io::Result<()> {
    let cpus = weft_io::cpu::allowed()?;
    match cpus.get(number % cpus.len().max(1)) {
        Some(cpu) => weft_io::cpu::pin_to(*cpu),
        None => Ok(()),
    }
}
