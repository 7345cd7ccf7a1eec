//! Keeps descriptors open while no daemon runs: in the service manager's store where the daemon is a unit of systemd,
//! else in a small process of its own. These are the sockets for ESP in UDP, so that what the kernel moves by the states
//! of a killed daemon goes on until the next one takes over; and the queues of direct ports with the table that their
//! programs read, so that containers keep their devices.

mod client;
mod process;
mod rights;
mod systemd;

use std::os::fd::OwnedFd;
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
/// Descriptors of direct ports that are kept at most: a container has a queue for each worker, four at least. Ports
/// beyond get new devices when the daemon is started again.
const PORTS_MAX: usize = 16_384;
/// The socket on which the process listens, in the runtime directory.
const SOCKET: &str = "holder.sock";

const ANSWER_LIMIT: Duration = Duration::from_millis(ANSWER_LIMIT_MS);

/// Keeps what direct ports have open: queues of their devices, and the table that their programs read.
pub(crate) trait PortKeeper: Send + Sync {
    /// What an earlier run has left; what is of no use is to be closed.
    fn take_ports(&self) -> Vec<OwnedFd>;

    /// Keeps these, beside those before, until their device is gone. Failing is not fatal: the next run makes new
    /// devices.
    fn keep_ports(&self, fds: Vec<OwnedFd>);
}

/// Who keeps what, both the same one.
pub(crate) struct Keepers {
    pub(super) sockets: Arc<dyn SocketKeeper>,
    pub(super) ports: Arc<dyn PortKeeper>,
}

impl Keepers {
    fn of<K: SocketKeeper + PortKeeper + 'static>(keeper: K) -> Self {
        let keeper = Arc::new(keeper);
        Self { sockets: Arc::clone(&keeper) as Arc<dyn SocketKeeper>, ports: keeper }
    }
}

/// Chooses who keeps descriptors. Call it once, by the daemon that has the runtime directory's lock.
pub(crate) fn keepers(runtime_dir: &Path) -> Keepers {
    match FdStore::from_environment() {
        Some(store) => {
            // What a daemon outside of systemd has left here is not what this one will take back.
            release(runtime_dir);
            Keepers::of(store)
        }
        None => Keepers::of(Holder::new(runtime_dir)),
    }
}

/// Ends the process that holds sockets for this runtime directory, if there is one.
pub(crate) fn release(runtime_dir: &Path) {
    Holder::new(runtime_dir).release();
}

fn socket_path(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join(SOCKET)
}
