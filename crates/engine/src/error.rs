//! Why the engine does not carry out a request.

use std::net::SocketAddr;

use weft_io::IoError;
use weft_path::{PathId, Vni};

/// Why the engine did not start, or did not take a command.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The configuration asks for a value that is not allowed.
    #[error("{what} must be {allowed}, not {given}: correct the configuration")]
    Configuration {
        /// The setting.
        what: &'static str,
        /// The allowed values.
        allowed: &'static str,
        /// The given value.
        given: String,
    },
    /// A device or socket could not be set up; the text says whose fault it is.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The kernel gave no thread, descriptor or file.
    #[error("the kernel refused to {what}: {source}")]
    Kernel {
        /// The operation that was tried.
        what: &'static str,
        /// Its answer.
        source: std::io::Error,
    },
    /// More commands wait than the queue holds: ours. Give it again later.
    #[error(
        "more than {} commands wait for the engine: retry this one later",
        crate::limits::COMMANDS_QUEUED_MAX
    )]
    Busy,
    /// The peer's offer for one path does not fit this host. All other paths go on.
    #[error("{reason}")]
    Path {
        /// The path.
        path: PathId,
        /// Why the engine refuses the path.
        reason: String,
    },
    /// The engine is not in this network.
    #[error("the vector engine has no network with VNI {vni}: add the network first")]
    UnknownNetwork {
        /// Its VNI.
        vni: Vni,
    },
    /// The engine's own network cannot be changed while it runs.
    #[error(
        "the vector engine was started with the network of VNI {vni}, which it keeps: stop the engine, or choose another network"
    )]
    FirstNetwork {
        /// Its VNI.
        vni: Vni,
    },
    /// The worker is gone; an [`EngineFailed`](weft_path::EngineEvent::EngineFailed) said why.
    #[error("the engine has stopped: start a new one")]
    Stopped,
}

/// Why a command changed nothing: path choice and engine disagree, which is our fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CommandError {
    #[error("no path {path:?}")]
    UnknownPath { path: PathId },
    #[error("path {path:?} is another peer's")]
    PathOfAnotherPeer { path: PathId },
    #[error("path {path:?} has no outbound SA")]
    NoOutboundSa { path: PathId },
    #[error("SPI {spi:#x} is in use")]
    SpiInUse { spi: u32 },
    #[error("network {vni} is unknown to this engine")]
    UnknownNetwork { vni: Vni },
    #[error("the table of {table} is full")]
    TableFull { table: &'static str },
    #[error("{remote} is not reachable from a socket of this address family")]
    Unreachable { remote: SocketAddr },
    #[error("cannot build a probe of {mtu} bytes")]
    ProbeSize { mtu: u16 },
}
