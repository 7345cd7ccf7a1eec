//! Commands that ask the running daemon.

use std::io::{BufRead, IsTerminal};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use super::args::{Command, ResetArgs, StatusPart, split_attach_words};
use super::output;
use crate::api::{
    ApiError, AttachRequest, Attachment, Client, ClientError, ConnectRequest, Connection,
    DetachRequest, Detached, ErrorKind, ForgetRequest, Invitation, Ipam, Peer, Report, Status,
    Target, Workers, WorkersRequest,
};
use crate::daemon;

pub(super) fn request(command: Command, runtime_dir: &Path) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(ask(command, &Client::new(runtime_dir), runtime_dir))?;
    Ok(ExitCode::SUCCESS)
}

/// What the daemon that runs here, if one does, has found others to have set up that direct ports pass by, and
/// what it warns of.
pub(super) fn told(runtime_dir: &Path) -> (Vec<String>, Vec<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let daemon = Client::new(runtime_dir);
    let status = runtime.map(|runtime| runtime.block_on(daemon.get::<Status>("/v1/status")));
    let status = status.ok().and_then(Result::ok);
    status.map(|status| (status.passed_by, status.warnings)).unwrap_or_default()
}

async fn ask(command: Command, daemon: &Client, runtime_dir: &Path) -> anyhow::Result<()> {
    match command {
        Command::Status(args) => status(args.part, args.json, daemon).await,
        Command::Stop(args) => stop(args.json, daemon, runtime_dir).await,
        Command::Connect(args) => {
            let request = ConnectRequest { targets: args.hosts, replace: args.replace };
            let targets: Vec<Target> = daemon.post("/v1/connect", &request).await?;
            output::print(args.json, &targets, |list| output::targets(list))
        }
        Command::Forget(args) => {
            let request = ForgetRequest { targets: args.hosts };
            let targets: Vec<Target> = daemon.post("/v1/forget", &request).await?;
            output::print(args.json, &targets, |list| output::targets(list))
        }
        Command::Attach(args) => {
            let (addresses, container) = split_attach_words(&args.words)
                .map_err(|text| ApiError::new(ErrorKind::BadRequest, text))?;
            let request = AttachRequest {
                container: absolute(container),
                addresses,
                name: None,
                no_multicast_route: args.no_multicast_route,
                ipv6: args.ipv6,
            };
            let attachment: Attachment = daemon.post("/v1/attach", &request).await?;
            output::notes(&attachment);
            output::print(args.json, &attachment, output::attached)
        }
        Command::Detach(args) => {
            let request = DetachRequest { container: absolute(&args.container) };
            let detached: Detached = daemon.post("/v1/detach", &request).await?;
            output::print(args.json, &detached, output::detached)
        }
        Command::Ps(args) => {
            let attachments: Vec<Attachment> = daemon.get("/v1/attachments").await?;
            output::print(args.json, &attachments, |list| output::attachments(list))
        }
        Command::Token(args) => {
            let invitation: Invitation = daemon.post("/v1/token", &json!({})).await?;
            output::print(args.json, &invitation, output::invitation)
        }
        Command::Report(_) => {
            let report: Report = daemon.get("/v1/report").await?;
            output::print(true, &report, |_| String::new())
        }
        Command::Workers(args) => {
            let workers: Workers = match args.workers.map(usize::from) {
                Some(workers) => daemon.post("/v1/workers", &WorkersRequest { workers }).await?,
                None => daemon.get("/v1/workers").await?,
            };
            output::print(args.json, &workers, output::workers)
        }
        Command::Top(args) => super::top::top(args, daemon).await,
        Command::Reset(args) => reset(args, daemon, runtime_dir).await,
        Command::Launch(_)
        | Command::Run(_)
        | Command::Doctor(_)
        | Command::Dco(_)
        | Command::HoldSockets
        | Command::Completions { .. } => bail!("this command does not ask the daemon"),
    }
}

async fn status(part: Option<StatusPart>, json: bool, daemon: &Client) -> anyhow::Result<()> {
    match part {
        None => {
            let status: Status = daemon.get("/v1/status").await?;
            output::print(json, &status, output::status)
        }
        Some(StatusPart::Connections) => {
            let connections: Vec<Connection> = daemon.get("/v1/connections").await?;
            output::print(json, &connections, |list| output::connections(list))
        }
        Some(StatusPart::Paths) => {
            let paths: Vec<crate::api::Path> = daemon.get("/v1/paths").await?;
            output::print(json, &paths, |list| output::paths(list))
        }
        Some(StatusPart::Peers) => {
            let peers: Vec<Peer> = daemon.get("/v1/peers").await?;
            output::print(json, &peers, |list| output::peers(list))
        }
        Some(StatusPart::Targets) => {
            let targets: Vec<Target> = daemon.get("/v1/targets").await?;
            output::print(json, &targets, |list| output::targets(list))
        }
        Some(StatusPart::Ipam) => {
            let ipam: Ipam = daemon.get("/v1/ipam").await?;
            output::print(json, &ipam, output::ipam)
        }
    }
}

async fn stop(json: bool, daemon: &Client, runtime_dir: &Path) -> anyhow::Result<()> {
    let _: Value = daemon.post("/v1/stop", &json!({})).await?;
    daemon::wait_until_stopped(runtime_dir, output::progress).await?;
    output::print(json, &json!({ "stopped": true }), |_| "weft stopped".into())
}

async fn reset(args: ResetArgs, daemon: &Client, runtime_dir: &Path) -> anyhow::Result<()> {
    if !args.force && !confirmed(&args.state_dir)? {
        bail!("nothing was changed; use --force to reset without being asked");
    }
    match daemon.post::<_, Value>("/v1/stop", &json!({})).await {
        Ok(_) => daemon::wait_until_stopped(runtime_dir, output::progress).await?,
        Err(ClientError::NotRunning(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let done = daemon::reset(&args.state_dir, runtime_dir).await.context("reset is incomplete")?;
    output::print(false, &(), |()| output::reset(&done, &args.state_dir))
}

fn confirmed(state_dir: &Path) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    output::ask(&format!(
        "This stops weft, detaches every container and deletes {}. Other hosts will know this one \
         no more. Type yes to go on: ",
        state_dir.display()
    ))?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(answer.trim() == "yes")
}

/// The daemon may have another working directory: a relative path is made absolute here.
fn absolute(container: &str) -> String {
    if !container.contains('/') || container.starts_with('/') {
        return container.into();
    }
    std::path::absolute(container)
        .map_or_else(|_| container.into(), |path| path.to_string_lossy().into_owned())
}
