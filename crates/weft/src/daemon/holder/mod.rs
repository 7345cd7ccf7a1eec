//! Keeps the sockets for ESP in UDP open while no daemon runs, so that what the kernel moves by the
//! states of a killed daemon goes on until the next one takes over: in the service manager's store
//! where the daemon is a unit of systemd, else in a small process of its own.

mod client;
mod process;
mod rights;
mod systemd;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use weft_kernel::engine::SocketKeeper;

use self::client::Holder;
use self::systemd::FdStore;

pub use self::process::hold_sockets;

/// How long the process holds sockets after the daemon's end, in seconds, if none comes back.
const HOLD_MAX_S: u64 = 600;
/// How long an answer of the process, or of systemd, is waited for, in milliseconds.
const ANSWER_LIMIT_MS: u64 = 2_000;
/// Sockets that are kept at most: one for IPv4 and one for IPv6, of each of the two ports.
const SOCKETS_MAX: usize = 4;
/// The socket on which the process listens, in the runtime directory.
const SOCKET: &str = "holder.sock";

const ANSWER_LIMIT: Duration = Duration::from_millis(ANSWER_LIMIT_MS);

/// Chooses who keeps the sockets. Call it once, by the daemon that has the runtime directory's lock.
pub(super) fn keeper(runtime_dir: &Path) -> Arc<dyn SocketKeeper> {
    match FdStore::from_environment() {
        Some(store) => {
            // What a daemon outside of systemd has left here is not what this one will take back.
            release(runtime_dir);
            Arc::new(store)
        }
        None => Arc::new(Holder::new(runtime_dir)),
    }
}

/// Ends the process that holds sockets for this runtime directory, if there is one.
pub(super) fn release(runtime_dir: &Path) {
    Holder::new(runtime_dir).release();
}

fn socket_path(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join(SOCKET)
}
