//! The gateway for OpenVPN's clients beside Debian's OpenVPN server without offload: the same certificates, the same
//! clients, in turns.

mod credentials;
mod crowd;
mod flood;
mod rows;
mod scenes;
mod stand;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

pub use rows::{Figure, GatewayRow, table};
pub(crate) use scenes::{Lengths, commands, measure};

/// Parts of the generator, each in a process of its own.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum CrowdCommand {
    /// Connects OpenVPN clients one after the other and counts them
    VpnHandshakes {
        /// Who connects, and where to
        #[command(flatten)]
        to: CrowdOptions,
        /// Duration in seconds
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
    },
    /// Connects OpenVPN clients that stay and do nothing but ping
    VpnStay {
        /// Who connects, and where to
        #[command(flatten)]
        to: CrowdOptions,
        /// Duration in seconds, once all are connected
        #[arg(long, default_value_t = 10.0)]
        seconds: f64,
    },
    /// Sends forged first packets of OpenVPN clients
    VpnForge {
        /// Who connects, and where to
        #[command(flatten)]
        to: CrowdOptions,
        /// Duration in seconds
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
        /// Packets a second
        #[arg(long)]
        rate: u64,
    },
}

/// Who connects, and where to.
#[derive(Debug, Clone, clap::Args)]
pub struct CrowdOptions {
    /// The directory of certificates and keys
    #[arg(long)]
    files: PathBuf,
    /// The server's address and port
    #[arg(long)]
    connect: SocketAddr,
    /// Names that the clients have in turn
    #[arg(long, default_value_t = 1)]
    clients: usize,
    /// Handshakes under way at once
    #[arg(long, default_value_t = 32)]
    in_flight: usize,
}

/// Runs a part of the generator.
///
/// # Errors
/// The operating system's error, or a server that answers nobody.
pub(super) fn run(command: &CrowdCommand) -> anyhow::Result<()> {
    let time = |seconds: f64| Duration::from_secs_f64(seconds.max(0.01));
    match command {
        CrowdCommand::VpnHandshakes { to, seconds } => {
            let many = (to.clients, to.in_flight);
            emit(&crowd::handshakes(&to.files, to.connect, many, time(*seconds))?)?;
        }
        CrowdCommand::VpnStay { to, seconds } => {
            let many = (to.clients, to.in_flight);
            crowd::stay(&to.files, to.connect, many, time(*seconds), emit)?;
        }
        CrowdCommand::VpnForge { to, seconds, rate } => {
            emit(&flood::forge(&to.files, to.connect, *rate, time(*seconds))?)?;
        }
    }
    Ok(())
}

fn emit(value: &impl Serialize) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(value)?)?;
    out.flush()
}

/// What was measured of each system, by figure.
type Samples = BTreeMap<&'static str, [Vec<f64>; 2]>;
