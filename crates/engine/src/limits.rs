//! The limits of one engine.

use std::time::Duration;

/// Probes and keepalives that wait to be sent at most.
pub const COMMANDS_QUEUED_MAX: usize = 4_096;
/// Workers that an engine can have. Each takes eight TAP queues, sixteen sockets and some 4 MiB. While it stands
/// still, packets wait in the kernel. Each socket holds at most 16 MiB from peers, each queue at most 128 MiB from
/// containers.
pub const WORKERS_MAX: usize = weft_io::steer::TAP_WORKERS_MAX;

/// The longest that a worker stays awake with nothing to do.
pub const BUSY_POLL_MAX: Duration = Duration::from_millis(10);

/// Workers that there are by default at most.
pub const DEFAULT_WORKERS_MAX: usize = 8;
/// Queues that the TAP device of a further network has at least, so that workers that come later find some.
pub(crate) const NETWORK_QUEUES_MIN: usize = DEFAULT_WORKERS_MAX;
/// How long at most a call waits until the workers have let the devices of a removed network go, in milliseconds, and
/// the pause between two looks. A helper that idles looks at its ports every 100 ms.
pub(crate) const PORTS_CLOSE_MS: u64 = 2_000;
pub(crate) const PORTS_CLOSE_LOOK_MS: u64 = 2;
/// Workers by default at least, where there are as many processors.
pub const DEFAULT_WORKERS_MIN: usize = 2;
