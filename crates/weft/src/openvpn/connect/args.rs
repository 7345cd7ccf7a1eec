//! The words of `weft openvpn connect`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::dco::Engine;

/// `weft openvpn connect`.
#[derive(Debug, Args)]
pub struct OpenvpnConnectArgs {
    /// The client's profile (an .ovpn file); files that it names are sought in its directory
    pub profile: PathBuf,
    /// Where the data channel runs
    #[arg(long, value_enum, value_name = "ENGINE", default_value = "auto")]
    pub engine: TunnelEngine,
    /// Name of the tunnel's device (default: weft-vpn with the first free number)
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Print each event as a line of JSON
    #[arg(long)]
    pub json: bool,
}

/// Where the data channel of a tunnel runs.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum TunnelEngine {
    /// In the kernel if it has ovpn devices, else in userspace
    Auto,
    /// In the kernel's ovpn device (Linux 6.16)
    Kernel,
    /// In Weft's device in userspace
    Userspace,
}

impl TunnelEngine {
    /// The engine, unless it is to be chosen.
    pub const fn wanted(self) -> Option<Engine> {
        match self {
            Self::Auto => None,
            Self::Kernel => Some(Engine::Kernel),
            Self::Userspace => Some(Engine::Userspace),
        }
    }
}
