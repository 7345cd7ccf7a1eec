//! Reasons why the daemon cannot start or go on.

use std::io;
use std::path::PathBuf;

use weft_api::{ApiError, ErrorKind};
use weft_kernel::KernelError;

use crate::upkeep::store::StoreError;

/// Why the daemon cannot start. Each text says what happened, to what, and what to do next.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another daemon runs on this host (configuration).
    #[error(
        "a weft daemon is already running here (it holds {0}); see weft status, or end it with weft stop, which also waits for one that is ending"
    )]
    AlreadyRunning(PathBuf),
    /// The API socket cannot be created, or belongs to another program (configuration or the
    /// machine).
    #[error(
        "cannot serve the API at {path}: {error}; stop the program or remove the file there, or choose another directory with --runtime-dir"
    )]
    Api {
        /// The socket.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// The vector engine cannot start (the kernel).
    #[error("the vector engine cannot start: {0}")]
    Engine(#[from] weft_engine::EngineError),
    /// The kernel refused (the kernel).
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Links cannot start: port in use, broken identity (configuration or the machine).
    #[error(transparent)]
    Link(#[from] weft_link::LinkError),
    /// The saved ranges do not fit the configuration (configuration).
    #[error(transparent)]
    Mesh(#[from] weft_mesh::MeshError),
    /// The host has no credential for joining (configuration).
    #[error(
        "to join, weft launch needs a password (--password-file FILE, WEFT_PASSWORD) or a token (--token-file FILE, WEFT_TOKEN); on a host of the network, weft token prints one"
    )]
    NoAdmission,
    /// There is no TUN/TAP device (the machine).
    #[error(
        "cannot open /dev/net/tun ({0}); load the module with: modprobe tun. In a container, pass --device /dev/net/tun"
    )]
    NoTun(io::Error),
    /// Not root (configuration).
    #[error("weft launch must run as root: it creates network devices")]
    NotRoot,
    /// A task of the daemon has panicked (a fault of Weft).
    #[error("the kernel engine did not start: {0}; this is a bug in weft, please report it")]
    Panicked(tokio::task::JoinError),
    /// A port is taken (configuration).
    #[error(
        "UDP port {port} ({what}) is in use by another program; stop it, or choose another port with {flag} on every host"
    )]
    PortInUse {
        /// The port.
        port: u16,
        /// The purpose of the port.
        what: &'static str,
        /// The flag that chooses another port.
        flag: &'static str,
    },
    /// The tokio runtime cannot start (the machine).
    #[error("cannot start the runtime: {0}")]
    Runtime(io::Error),
    /// The state directory cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl StartError {
    /// The error that the CLI prints and takes its exit code from.
    pub fn into_api_error(self) -> ApiError {
        let kind = match &self {
            Self::AlreadyRunning(_)
            | Self::PortInUse { .. }
            | Self::Kernel(KernelError::RangeOverlaps { .. } | KernelError::NameTaken { .. }) => {
                ErrorKind::Conflict
            }
            Self::NoAdmission => ErrorKind::BadRequest,
            _ => ErrorKind::Internal,
        };
        ApiError::new(kind, self)
    }
}
