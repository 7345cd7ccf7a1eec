//! Lines of progress on standard error. A closed pipe never ends the program.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::SandboxError;

/// The pause between two looks of [`wait_until`].
const POLL_INTERVAL_MS: u64 = 20;
/// The pause takes at least this many times as long as a look, so that looks do not slow the awaited work.
const POLL_SHARE: u32 = 4;
/// The longest pause, so that one look that a busy machine held up does not use up the wait.
const POLL_PAUSE_MAX_MS: u64 = 1_000;
/// A wait says that it goes on after this time, and again after each such time.
const PROGRESS_INTERVAL_MS: u64 = 2_000;

/// Announces a step: one line, marked with an arrow.
pub fn step(text: &str) {
    let _ = writeln!(io::stderr(), "==> {text}");
}

/// Adds a detail to the step that runs: one or more indented lines.
pub fn note(text: &str) {
    for line in text.lines() {
        let _ = writeln!(io::stderr(), "    {line}");
    }
}

/// Writes text to standard output.
pub fn print(text: &str) {
    let mut out = io::stdout();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

/// The factor by which this machine is slower than real hardware: `WEFT_LAB_SLOWNESS`, or 1. The VM lab
/// sets it in its emulated guests. It multiplies every wait limit of a sandbox, so limits stay tight on
/// real machines. A value that is not a whole number of at least 1 counts as 1.
#[must_use]
pub fn slowness() -> u32 {
    static SLOWNESS: OnceLock<u32> = OnceLock::new();
    let read =
        || std::env::var("WEFT_LAB_SLOWNESS").ok()?.parse().ok().filter(|factor| *factor >= 1);
    *SLOWNESS.get_or_init(|| read().unwrap_or(1))
}

/// Waits until `check` holds and returns how long that took. `limit` is that of a real machine.
///
/// A wait longer than two seconds shows on standard error that it goes on.
///
/// # Errors
/// [`SandboxError::WaitTimedOut`] after `limit`.
pub fn wait_until(
    what: &str,
    limit: Duration,
    mut check: impl FnMut() -> bool,
) -> Result<Duration, SandboxError> {
    try_wait_until(what, limit, || Ok(check()))
}

/// As [`wait_until`]; an error of `check` ends the wait at once.
///
/// # Errors
/// [`SandboxError::WaitTimedOut`] after `limit`, or the error of `check`.
pub fn try_wait_until(
    what: &str,
    limit: Duration,
    mut check: impl FnMut() -> Result<bool, SandboxError>,
) -> Result<Duration, SandboxError> {
    let limit = limit * slowness();
    let start = Instant::now();
    let mut next_word = Duration::from_millis(PROGRESS_INTERVAL_MS);
    loop {
        let looked = Instant::now();
        if check()? {
            return Ok(start.elapsed());
        }
        let pause = (looked.elapsed() * POLL_SHARE).clamp(
            Duration::from_millis(POLL_INTERVAL_MS),
            Duration::from_millis(POLL_PAUSE_MAX_MS) * slowness(),
        );
        let waited = start.elapsed();
        if waited >= limit {
            return Err(SandboxError::WaitTimedOut { what: what.to_owned(), limit });
        }
        if waited >= next_word {
            next_word = waited + Duration::from_millis(PROGRESS_INTERVAL_MS);
            note(&format!("waiting for {what} ({} s of {} s)", waited.as_secs(), limit.as_secs()));
        }
        std::thread::sleep(pause);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_wait_ends_when_its_condition_holds() {
        let mut looks = 0;
        let check = || {
            looks += 1;
            looks == 3
        };
        wait_until("three looks", Duration::from_secs(60), check).unwrap();
        assert_eq!(looks, 3);
    }

    #[test]
    fn a_wait_in_vain_names_what_it_waited_for() {
        let error = wait_until("the moon", Duration::from_millis(1), || false).unwrap_err();
        assert!(error.to_string().contains("the moon"), "{error}");
    }
}
