//! How a thread of the engine ends, and where it runs.

use std::panic::{AssertUnwindSafe, catch_unwind};

use weft_path::{EngineEvent, EngineKind};

/// Runs a thread of the engine and turns its end by error or panic into an event.
pub(crate) fn supervise(
    events: &(dyn Fn(EngineEvent) + Send + Sync),
    who: &str,
    work: impl FnOnce() -> std::io::Result<()>,
) {
    let Some(failure) = failure(work) else { return };
    let reason = format!("the engine's {who} {failure}");
    tracing::error!(reason, "the engine has failed");
    events(EngineEvent::EngineFailed { engine: EngineKind::Userspace, reason });
}

/// Runs a thread's work; how it failed, if it ended by an error or a panic.
pub(crate) fn failure(work: impl FnOnce() -> std::io::Result<()>) -> Option<String> {
    // Nothing that the work has changed alone is used after a panic.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(format!("failed: {error}")),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            Some(format!("panicked: {}", text.unwrap_or_default()))
        }
    }
}

/// Pins the calling thread to the CPU with this number among those that it may use.
pub(crate) fn pin_nth(number: usize) -> std::io::Result<()> {
    let cpus = weft_io::cpu::allowed()?;
    match cpus.get(number % cpus.len().max(1)) {
        Some(cpu) => weft_io::cpu::pin_to(*cpu),
        None => Ok(()),
    }
}
