//! The words of `weft openvpn connect`.

use std::path::PathBuf;

use clap::Args;
use weft_daemon::config::OpenvpnEngine;

/// `weft openvpn connect`.
#[derive(Debug, Args)]
pub struct OpenvpnConnectArgs {
    /// The client's profile (an .ovpn file); files that it names are sought in its directory
    pub profile: PathBuf,
    /// Where the data channel runs
    #[arg(long, value_enum, value_name = "ENGINE", default_value = "auto")]
    pub engine: OpenvpnEngine,
    /// Name of the tunnel's device (default: weft-vpn with the first free number)
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Print each event as a line of JSON
    #[arg(long)]
    pub json: bool,
}
