//! Checks, records and cleanup on the host around the daemon.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::log::LOG;
use super::store::{IDENTITY_FILE, Lock, MESH_FILE, Store, StoreError, make_private_dir};
use crate::StartError;
use crate::config::Settings;

/// Checks the host before any change, so that a mistake is reported at once and by name. A lock that a killed
/// daemon left is waited for; `progress` hears of a long wait.
///
/// # Errors
/// Not root, no TUN device, a second daemon, a port in use.
pub fn check_host(settings: &Settings, progress: impl Fn(&str)) -> Result<(), StartError> {
    if !rustix::process::geteuid().is_root() {
        return Err(StartError::NotRoot);
    }
    OpenOptions::new().read(true).write(true).open("/dev/net/tun").map_err(StartError::NoTun)?;
    for dir in [&settings.runtime_dir, &settings.state_dir] {
        if Lock::take_soon(dir, &progress)?.is_none() {
            return Err(StartError::AlreadyRunning(dir.clone()));
        }
    }
    for (port, what, flag) in
        [(settings.port, "links", "--port"), (settings.data_port, "data", "--data-port")]
    {
        if is_port_in_use(settings, port) {
            return Err(StartError::PortInUse { port, what, flag });
        }
    }
    Ok(())
}

fn is_port_in_use(settings: &Settings, port: u16) -> bool {
    let addresses = match settings.host {
        Some(address) => vec![address],
        None => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
    };
    addresses.into_iter().any(|address| {
        UdpSocket::bind(SocketAddr::new(address, port))
            .is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
    })
}

/// Raises the descriptor limit to the maximum. Each worker takes dozens; each direct port and each connection
/// of a data channel device takes a few. A shell's default is 1,024.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!(%error, limit = limit.current, "cannot raise the limit of open descriptors");
    }
}

/// Chooses the fastest cipher libraries for the vector engine, or a device in userspace, by a race. Takes
/// [`RACE_MS`](weft_engine::race::RACE_MS) of the calling thread.
pub fn choose_libraries() {
    for winners in weft_engine::race::prefer_fastest() {
        let names = |choice: weft_crypto::Choice| {
            weft_crypto::SizeClass::ALL.map(|class| choice.of(class).name()).join(" ")
        };
        tracing::info!(
            cipher = %winners.cipher,
            sealing = names(winners.sealing),
            opening = names(winners.opening),
            "chose the fastest library for small, full and large packets"
        );
    }
}

/// The log of a detached daemon, whose standard error it is.
pub fn log_path(state_dir: &Path, runtime_dir: &Path) -> PathBuf {
    let other = runtime_dir.join(LOG);
    match std::fs::read_link("/proc/self/fd/2") {
        Ok(open) if open == other => other,
        _ => state_dir.join(LOG),
    }
}

/// Opens the log of a detached daemon, and keeps the previous run's log beside it. If the state directory is
/// not writable, the log goes to the runtime directory, and `progress` gets the reason. Returns the file and
/// its path.
///
/// # Errors
/// Neither can be written.
pub fn open_log(
    state_dir: &Path,
    runtime_dir: &Path,
    progress: impl Fn(&str),
) -> anyhow::Result<(File, PathBuf)> {
    open_log_in(state_dir).or_else(|error| {
        let (file, path) = open_log_in(runtime_dir)?;
        progress(&format!("weft: {error:#}; the log goes to {}", path.display()));
        Ok((file, path))
    })
}

/// The first line shows whether there is space.
fn open_log_in(dir: &Path) -> anyhow::Result<(File, PathBuf)> {
    make_private_dir(dir)?;
    let path = dir.join(LOG);
    let _ = std::fs::rename(&path, super::log::old(&path));
    let open = || {
        let mut file = super::log::append(&path)?;
        writeln!(file, "weft {}", env!("CARGO_PKG_VERSION"))?;
        Ok(file)
    };
    match open() {
        Ok(file) => Ok((file, path)),
        Err(error) => Err(StoreError::Io { action: "write", path, error }.into()),
    }
}

/// Whether a daemon of this runtime directory answers no requests any more and still has to end.
#[must_use]
pub fn is_ending(runtime_dir: &Path) -> bool {
    runtime_dir.exists() && Lock::take(runtime_dir).is_ok_and(|lock| lock.is_none())
}

/// Waits until the daemon of a runtime directory has ended; reports a long wait to `progress`.
///
/// # Errors
/// It has not ended in time.
pub async fn wait_until_stopped(runtime_dir: &Path, progress: impl Fn(&str)) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut next_word = Duration::from_millis(STOP_PROGRESS_MS);
    while Lock::take(runtime_dir)?.is_none() {
        let waited = start.elapsed();
        if waited >= Duration::from_millis(STOP_TIMEOUT_MS) {
            bail!(
                "the daemon still runs {} s after it was told to stop; {LOG} in its state directory says why. If you kill it, the next weft launch or weft reset removes its interfaces and IPsec states",
                STOP_TIMEOUT_MS / 1000
            );
        }
        if waited >= next_word {
            next_word = waited + Duration::from_millis(STOP_PROGRESS_MS);
            progress(&format!("waiting for the daemon to stop ({} s) ...", waited.as_secs()));
        }
        tokio::time::sleep(Duration::from_millis(STOP_POLL_MS)).await;
    }
    Ok(())
}

/// The outcome of a reset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reset {
    /// The deleted directory with identity, ranges, attachments and secret; `None`: it held none.
    pub state: Option<PathBuf>,
    /// The state directory that the last daemon here used, if it is another one.
    pub left: Option<PathBuf>,
}

/// Records where a daemon keeps its state, for a reset without that option.
pub(crate) fn note_state_dir(settings: &Settings) {
    let text = settings.state_dir.to_string_lossy();
    if let Err(error) = std::fs::write(settings.runtime_dir.join(STATE_NOTE), text.as_bytes()) {
        tracing::debug!(%error, "cannot record the state directory");
    }
}

/// Removes everything that Weft created on this host: interfaces, and the state directory with identity,
/// ranges, attachments and secret. A directory without an identity is left alone. `progress` hears of a long wait
/// for what a killed daemon left.
///
/// # Errors
/// The daemon still runs, or something cannot be removed.
pub async fn reset(
    state_dir: &Path,
    runtime_dir: &Path,
    progress: impl Fn(&str),
) -> anyhow::Result<Reset> {
    let Some(_lock) = Lock::take_soon(runtime_dir, progress)? else {
        bail!("the daemon still runs; stop it with: weft stop");
    };
    crate::holder::release(runtime_dir);
    let kernel = weft_kernel::Kernel::new()?;
    remove_direct_ports(state_dir, &kernel).await;
    weft_kernel::engine::remove_all(&kernel, crate::devices::SWITCH).await?;
    let (out, clients) = (
        weft_kernel::Masquerade::new(kernel.clone()).remove().await,
        weft_kernel::ClientRules::new(kernel).remove().await,
    );
    for removed in [out, clients] {
        match removed {
            // Without the program there never was a rule.
            Err(weft_kernel::KernelError::NftMissing { .. }) => {}
            result => _ = result?,
        }
    }
    let note = runtime_dir.join(STATE_NOTE);
    let noted = std::fs::read_to_string(&note).ok().map(PathBuf::from);
    let left = noted.filter(|noted| !is_same(noted, state_dir) && holds_state(noted));
    if left.is_none() {
        let _ = std::fs::remove_file(note);
    }
    if !holds_state(state_dir) {
        return Ok(Reset { state: None, left });
    }
    std::fs::remove_dir_all(state_dir)
        .with_context(|| format!("cannot delete {}", state_dir.display()))?;
    Ok(Reset { state: Some(state_dir.into()), left })
}

fn is_same(one: &Path, other: &Path) -> bool {
    one == other || one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|o| o == one))
}

/// Whether a daemon keeps its state in this directory.
fn holds_state(dir: &Path) -> bool {
    [IDENTITY_FILE, MESH_FILE].iter().any(|file| dir.join(file).exists())
}

/// Removes direct ports' devices from attached containers. Without a readable list of attachments they cannot
/// be found; they are removed with their containers.
async fn remove_direct_ports(state_dir: &Path, kernel: &weft_kernel::Kernel) {
    if state_dir.exists()
        && let Ok(store) = Store::open(state_dir)
    {
        let _ = crate::services::attach::remove_direct_ports(&store, kernel).await;
    }
}

/// A file in the runtime directory that holds the path of the state directory.
const STATE_NOTE: &str = "state-directory";
/// Longest wait for a stopping daemon, in milliseconds. A busy host is slow to remove a thousand peers' states
/// from its kernel.
const STOP_TIMEOUT_MS: u64 = 60_000;
const STOP_PROGRESS_MS: u64 = 3_000;
const STOP_POLL_MS: u64 = 50;
