//! Time stamps as people and scripts read them: RFC 3339, UTC, whole seconds.

use std::time::{Instant, SystemTime};

/// A time as RFC 3339.
pub fn format(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Parses the output of [`format`].
pub fn parse(text: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339(text).ok()
}

/// Milliseconds on the host's monotonic clock, the same for every process on it.
pub(crate) fn monotonic_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanoseconds) = (now.tv_sec.max(0), now.tv_nsec.max(0));
    seconds.unsigned_abs() * 1_000 + nanoseconds.unsigned_abs() / 1_000_000
}

/// The wall-clock time of a moment on the monotonic clock, for display only.
pub(crate) fn of_instant(moment: Instant) -> SystemTime {
    let (now, wall) = (Instant::now(), SystemTime::now());
    wall.checked_sub(now.saturating_duration_since(moment)).unwrap_or(SystemTime::UNIX_EPOCH)
}
