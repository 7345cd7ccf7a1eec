//! `weft openvpn connect`: a client of an OpenVPN server, whose data channel a device moves: the kernel's `ovpn` or
//! Weft's own.
//!
//! What is decided stands in files that see no socket: which server is next (`remotes`), what pushed options mean
//! (`plan`). `client` goes from one attempt to the next, `link` drives one session of `weft_openvpn`, `tunnel` is the
//! device, `host` the addresses, routes and DNS.

mod args;
mod client;
mod holdings;
mod host;
mod link;
mod login;
mod plan;
mod profile;
mod remotes;
mod report;
mod signals;
pub mod tls;
mod tunnel;
mod wire;

use std::process::ExitCode;

use serde_json::json;

pub use args::OpenvpnConnectArgs;

pub(crate) use login::ask;

use client::Client;
use report::Report;
use signals::Signals;

/// Connects, until a signal or the server ends it. Everything that was set up is taken back then.
///
/// # Errors
/// The profile is refused, the login fails, or the server cannot be reached in the attempts that the profile allows.
pub(crate) fn run(args: &OpenvpnConnectArgs) -> anyhow::Result<ExitCode> {
    weft_daemon::log_to_stderr();
    let report = Report::new(args.json);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(connect(args, report));
    match &ended {
        Ok(()) => report.tell("ended", "ended", json!({ "code": 0 })),
        Err(error) => report.event("ended", json!({ "code": 1, "reason": format!("{error:#}") })),
    }
    ended.map(|()| ExitCode::SUCCESS)
}

async fn connect(args: &OpenvpnConnectArgs, report: Report) -> anyhow::Result<()> {
    let signals = Signals::new()?;
    let profile = profile::read(&args.profile, report)?;
    let mut client = Client::new(args, profile, report, signals).await?;
    let ran = client.run().await;
    let closed = client.close().await;
    ran.and(closed)
}
