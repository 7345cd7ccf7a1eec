//! Keeps descriptors open while no daemon runs. Under systemd they go to the service manager's descriptor
//! store, otherwise to a small separate process. They include the sockets for ESP in UDP, so that traffic on a
//! killed daemon's kernel states continues until the next daemon takes over. They also include the queues of
//! direct ports and the table that their programs read, so that containers keep their devices.

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

/// How long the process holds sockets after the daemon's end without a successor, in seconds.
const HOLD_MAX_S: u64 = 600;
/// How long to wait for an answer of the process, or of systemd, in milliseconds.
const ANSWER_LIMIT_MS: u64 = 2_000;
/// Sockets kept at most: one for IPv4 and one for IPv6, of each of the two ports.
const SOCKETS_MAX: usize = 4;
/// Descriptors of direct ports kept at most: a container has a queue for each worker, at least four. Ports
/// beyond the limit get new devices when the daemon restarts.
const PORTS_MAX: usize = 16_384;
/// The socket on which the process listens, in the runtime directory.
const SOCKET: &str = "holder.sock";

const ANSWER_LIMIT: Duration = Duration::from_millis(ANSWER_LIMIT_MS);

/// Keeps the descriptors of direct ports: queues of their devices, and the table that their programs read.
pub(crate) trait PortKeeper: Send + Sync {
    /// Takes the descriptors that an earlier run has left; the caller closes the unusable ones.
    fn take_ports(&self) -> Vec<OwnedFd>;

    /// Keeps these in addition to earlier ones, until their device is gone. Failure is not fatal: the next run
    /// creates new devices.
    fn keep_ports(&self, fds: Vec<OwnedFd>);
}

/// The keepers of sockets and ports; both are the same object.
pub(crate) struct Keepers {
    pub(super) sockets: Arc<dyn SocketKeeper>,
    pub(super) ports: Arc<dyn PortKeeper>,
    /// The listening socket of Docker's plugin, if systemd has passed it.
    pub(super) docker_socket: Option<OwnedFd>,
}

impl Keepers {
    fn of<K: SocketKeeper + PortKeeper + 'static>(keeper: K) -> Self {
        let keeper = Arc::new(keeper);
        let sockets = Arc::clone(&keeper) as Arc<dyn SocketKeeper>;
        Self { sockets, ports: keeper, docker_socket: None }
    }
}

/// Chooses the keeper of descriptors. Call it once, in the daemon that holds the runtime directory's lock.
pub(crate) fn keepers(runtime_dir: &Path) -> Keepers {
    match FdStore::from_environment() {
        Some(store) => {
            // This daemon will not take back the descriptors that a daemon outside of systemd left here.
            release(runtime_dir);
            let docker_socket = store.take_docker_socket();
            Keepers { docker_socket, ..Keepers::of(store) }
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
