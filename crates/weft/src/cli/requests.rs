//! Commands that ask the running daemon.

mod gateway;

use std::io::{BufRead, IsTerminal};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use serde_json::json;
use weft_api::call;
use weft_api::{
    ApiError, AttachRequest, Attachment, Client, ClientError, ConnectRequest, Connection,
    DetachRequest, Detached, DnsAddRequest, DnsLookupRequest, DnsName, DnsRecord, DnsRemoveRequest,
    ErrorKind, ExposeRequest, ForgetRequest, Hidden, HideRequest, Invitation, Ipam, Network,
    NetworkCreateRequest, NetworkRemoveRequest, Peer, Report, Status, Target, VpnClient, Workers,
    WorkersRequest,
};
use weft_daemon as daemon;

use super::args::{
    AttachArgs, Command, DnsAddArgs, DnsLookupArgs, DnsRemoveArgs, ExposeArgs, NetworkCommand,
    NetworkCreateArgs, NetworkNames, ResetArgs, StatusPart, split_attach_words,
};
use super::output;

pub(super) fn request(command: Command, runtime_dir: &Path) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(ask(command, &Client::new(runtime_dir), runtime_dir))?;
    Ok(ExitCode::SUCCESS)
}

/// The status of the daemon that runs here, if one does.
pub(super) fn status_now(runtime_dir: &Path) -> Option<Status> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(Client::new(runtime_dir).ask::<call::Status>()).ok()
}

async fn ask(command: Command, daemon: &Client, runtime_dir: &Path) -> anyhow::Result<()> {
    match command {
        Command::Status(args) => status(args.part, args.json, daemon).await,
        Command::Stop(args) => stop(args.json, daemon, runtime_dir).await,
        Command::Connect(args) => {
            let request = ConnectRequest { targets: args.hosts, replace: args.replace };
            let targets: Vec<Target> = daemon.call::<call::Connect>(&request).await?;
            output::print(args.json, &targets, |list| output::targets(list))
        }
        Command::Forget(args) => {
            let request = ForgetRequest { targets: args.hosts };
            let targets: Vec<Target> = daemon.call::<call::Forget>(&request).await?;
            output::print(args.json, &targets, |list| output::targets(list))
        }
        Command::Attach(args) => attach(args, daemon).await,
        Command::Detach(args) => {
            let request =
                DetachRequest { container: absolute(&args.container), network: args.network };
            let detached: Detached = daemon.call::<call::Detach>(&request).await?;
            output::print(args.json, &detached, output::detached)
        }
        Command::Expose(args) => expose(args, daemon).await,
        Command::Hide(args) => {
            let request = HideRequest { addresses: args.addresses, network: args.network };
            let hidden: Hidden = daemon.call::<call::Hide>(&request).await?;
            output::print(args.json, &hidden, output::hidden)
        }
        Command::Ps(args) => {
            let attachments: Vec<Attachment> = daemon.ask::<call::Attachments>().await?;
            output::print(args.json, &attachments, |list| output::attachments(list))
        }
        Command::Network(command) => network(command, daemon).await,
        Command::Ca(command) => gateway::authority(command, daemon).await,
        Command::Openvpn(command) => gateway::openvpn(command, daemon).await,
        Command::DnsLookup(args) => dns_lookup(args, daemon).await,
        Command::DnsAdd(args) => dns_add(args, daemon).await,
        Command::DnsRemove(args) => dns_remove(args, daemon).await,
        Command::Token(args) => {
            let invitation: Invitation = daemon.ask::<call::Token>().await?;
            output::print(args.json, &invitation, output::invitation)
        }
        Command::Report(_) => {
            let report: Report = daemon.ask::<call::Report>().await?;
            output::print(true, &report, |_| String::new())
        }
        Command::Workers(args) => {
            let workers: Workers = match args.workers.map(usize::from) {
                Some(workers) => {
                    daemon.call::<call::SetWorkers>(&WorkersRequest { workers }).await?
                }
                None => daemon.ask::<call::Workers>().await?,
            };
            output::print(args.json, &workers, output::workers)
        }
        Command::Top(args) => super::top::top(args, daemon).await,
        Command::Reset(args) => reset(args, daemon, runtime_dir).await,
        Command::Launch(_)
        | Command::Run(_)
        | Command::Doctor(_)
        | Command::SetupCni(_)
        | Command::Dco(_)
        | Command::HoldSockets
        | Command::OpenNamespaces
        | Command::Completions { .. } => bail!("this command does not ask the daemon"),
    }
}

async fn attach(args: AttachArgs, daemon: &Client) -> anyhow::Result<()> {
    let (addresses, container) = split_attach_words(&args.words)
        .map_err(|text| ApiError::new(ErrorKind::BadRequest, text))?;
    let request = AttachRequest {
        container: absolute(container),
        addresses,
        name: None,
        no_multicast_route: args.no_multicast_route,
        ipv6: args.ipv6,
        default_route: args.default_route,
        allow_macs: args.allow_macs,
        network: args.network,
    };
    let attachment: Attachment = daemon.call::<call::Attach>(&request).await?;
    output::notes(&attachment);
    output::print(args.json, &attachment, output::attached)
}

async fn expose(args: ExposeArgs, daemon: &Client) -> anyhow::Result<()> {
    let ExposeArgs { addresses, name, ipv6, masquerade, no_masquerade, network, json } = args;
    let masquerade = (masquerade || no_masquerade).then_some(masquerade);
    let request = ExposeRequest { addresses, name, ipv6, masquerade, network };
    let attachment: Attachment = daemon.call::<call::Expose>(&request).await?;
    output::notes(&attachment);
    output::print(json, &attachment, output::attached)
}

async fn network(command: NetworkCommand, daemon: &Client) -> anyhow::Result<()> {
    match command {
        NetworkCommand::Create(args) => network_create(args, daemon).await,
        NetworkCommand::Ls(args) => {
            let networks: Vec<Network> = daemon.ask::<call::Networks>().await?;
            output::print(args.json, &networks, |list| output::networks(list))
        }
        NetworkCommand::Rm(args) => network_rm(args, daemon).await,
        NetworkCommand::Inspect(args) => {
            let known: Vec<Network> = daemon.ask::<call::Networks>().await?;
            let networks = chosen(&known, &args.names)?;
            output::print(args.json, &networks, |list| output::networks_in_full(list))
        }
    }
}

async fn network_create(args: NetworkCreateArgs, daemon: &Client) -> anyhow::Result<()> {
    let NetworkCreateArgs { name, subnet, subnet6, share_range, vni, .. } = args;
    let NetworkCreateArgs { internal, isolated, mtu, json, .. } = args;
    let request =
        NetworkCreateRequest { name, subnet, subnet6, share_range, vni, internal, mtu, isolated };
    let network: Network = daemon.call::<call::NetworkCreate>(&request).await?;
    output::print(json, &network, output::network_created)
}

/// Removes one after the other up to the first that is refused, and prints those removed in any case.
async fn network_rm(args: NetworkNames, daemon: &Client) -> anyhow::Result<()> {
    let mut removed: Vec<Network> = Vec::new();
    let mut refusal = None;
    for name in args.names {
        match daemon.call::<call::NetworkRemove>(&NetworkRemoveRequest { name }).await {
            Ok(network) => removed.push(network),
            Err(error) => {
                refusal = Some(error);
                break;
            }
        }
    }
    if refusal.is_none() || !removed.is_empty() {
        output::print(args.json, &removed, |list| output::networks_removed(list))?;
    }
    refusal.map_or(Ok(()), |error| Err(error.into()))
}

/// The networks of these names, in their order.
///
/// # Errors
/// A name is of no known network.
fn chosen(known: &[Network], names: &[String]) -> Result<Vec<Network>, ApiError> {
    let find = |name: &String| {
        known.iter().find(|network| network.name == *name).cloned().ok_or_else(|| {
            let text =
                format!("there is no network {name}; weft network ls shows those known here");
            ApiError::new(ErrorKind::NotFound, text)
        })
    };
    names.iter().map(find).collect()
}

async fn dns_lookup(args: DnsLookupArgs, daemon: &Client) -> anyhow::Result<()> {
    let request = DnsLookupRequest { name: args.name, network: args.network };
    let records: Vec<DnsRecord> = daemon.call::<call::DnsLookup>(&request).await?;
    output::print(args.json, &records, |list| output::dns_records(list))
}

async fn dns_add(args: DnsAddArgs, daemon: &Client) -> anyhow::Result<()> {
    let DnsAddArgs { name, addresses, network, ports, json } = args;
    let request = DnsAddRequest { name, network, addresses, ports };
    let names: Vec<DnsName> = daemon.call::<call::DnsAdd>(&request).await?;
    output::print(json, &names, |list| output::dns_names(list))
}

async fn dns_remove(args: DnsRemoveArgs, daemon: &Client) -> anyhow::Result<()> {
    let DnsRemoveArgs { name, addresses, network, json } = args;
    let request = DnsRemoveRequest { name, network, addresses };
    let names: Vec<DnsName> = daemon.call::<call::DnsRemove>(&request).await?;
    output::print(json, &names, |list| output::dns_names(list))
}

async fn status(part: Option<StatusPart>, json: bool, daemon: &Client) -> anyhow::Result<()> {
    match part {
        None => {
            let status: Status = daemon.ask::<call::Status>().await?;
            output::print(json, &status, output::status)
        }
        Some(StatusPart::Connections) => {
            let connections: Vec<Connection> = daemon.ask::<call::Connections>().await?;
            output::print(json, &connections, |list| output::connections(list))
        }
        Some(StatusPart::Paths) => {
            let paths: Vec<weft_api::Path> = daemon.ask::<call::Paths>().await?;
            output::print(json, &paths, |list| output::paths(list))
        }
        Some(StatusPart::Peers) => {
            let peers: Vec<Peer> = daemon.ask::<call::Peers>().await?;
            output::print(json, &peers, |list| output::peers(list))
        }
        Some(StatusPart::Targets) => {
            let targets: Vec<Target> = daemon.ask::<call::Targets>().await?;
            output::print(json, &targets, |list| output::targets(list))
        }
        Some(StatusPart::Ipam) => {
            let ipam: Ipam = daemon.ask::<call::Ipam>().await?;
            output::print(json, &ipam, output::ipam)
        }
        Some(StatusPart::Clients) => {
            let clients: Vec<VpnClient> = daemon.ask::<call::Clients>().await?;
            output::print(json, &clients, |list| output::clients(list))
        }
    }
}

async fn stop(json: bool, daemon: &Client, runtime_dir: &Path) -> anyhow::Result<()> {
    match daemon.ask::<call::Stop>().await {
        Ok(_) => {}
        Err(ClientError::NotRunning(_)) if daemon::is_ending(runtime_dir) => {}
        Err(error) => return Err(error.into()),
    }
    daemon::wait_until_stopped(runtime_dir, output::progress).await?;
    output::print(json, &json!({ "stopped": true }), |_| "weft stopped".into())
}

async fn reset(args: ResetArgs, daemon: &Client, runtime_dir: &Path) -> anyhow::Result<()> {
    if !args.force && !confirmed(&args.state_dir)? {
        bail!("nothing was changed; use --force to reset without confirmation");
    }
    match daemon.ask::<call::Stop>().await {
        Ok(_) => daemon::wait_until_stopped(runtime_dir, output::progress).await?,
        Err(ClientError::NotRunning(_)) if daemon::is_ending(runtime_dir) => {
            daemon::wait_until_stopped(runtime_dir, output::progress).await?;
        }
        Err(ClientError::NotRunning(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let done = daemon::reset(&args.state_dir, runtime_dir, output::progress)
        .await
        .context("reset is incomplete")?;
    output::print(false, &(), |()| output::reset(&done, &args.state_dir))
}

fn confirmed(state_dir: &Path) -> anyhow::Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    output::ask(&format!(
        "This stops weft, detaches every container and deletes {}. Other hosts will no longer know this host. Type yes to continue: ",
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn networks_are_found_in_the_order_of_their_names_and_an_unknown_one_is_refused() {
        let network = |name: &str| Network { name: name.into(), ..Network::default() };
        let known = [network("shop"), network("weft")];
        let found = chosen(&known, &["weft".into(), "shop".into()]).unwrap();
        let found: Vec<&str> = found.iter().map(|network| network.name.as_str()).collect();
        assert_eq!(found, ["weft", "shop"]);
        let refusal = chosen(&known, &["shop".into(), "sho".into()]).unwrap_err();
        assert_eq!(refusal.kind, ErrorKind::NotFound);
        assert!(refusal.error.contains("sho;"), "{refusal}");
        assert!(refusal.error.contains("weft network ls"), "{refusal}");
    }
}
