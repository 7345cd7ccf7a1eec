//! `./dev demo`: a real run on one machine. Two hosts as namespaces, a daemon on each, containers
//! that reach each other encrypted, Docker's among them, the status of both, and the figures side by side.

pub mod docker;

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::comparison::measure::{Lengths, tcp};
use crate::comparison::rows::{self, CONNECT_LIMIT, WeftPair};
use crate::comparison::{self, Plan};
use crate::sandbox::{
    self, Container, Output, Sandbox, SandboxError, SandboxOptions, UNDERLAY_MTU_BYTES, Underlay,
    progress, try_wait_until,
};

/// Rounds of the table's measurements.
const ROUNDS: usize = 3;
/// Seconds of each TCP run of the table.
const TCP_SECONDS: u64 = 3;

/// Options of `./dev demo`.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoOptions {
    /// Leave the hosts running and print how to enter and remove them
    #[arg(long)]
    pub keep: bool,
    /// Only remove the leftovers of `--keep` or of a killed run
    #[arg(long, conflicts_with_all = ["keep", "json", "svg", "seconds"])]
    pub clean: bool,
    /// Write the figures as JSON to FILE
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the chart to FILE
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Seconds per TCP run, 1 to 600
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: Option<u64>,
}

/// Runs the demo. Unless told to keep it, all that it made is removed at its end, on an error and
/// on Ctrl-C.
///
/// # Errors
/// The first step that did not work.
pub fn run(options: &DemoOptions) -> anyhow::Result<()> {
    if options.clean {
        return Ok(clean()?);
    }
    comparison::require_programs()?;
    progress::step("making two hosts: network namespaces joined by a veth pair, MTU 1500");
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    for host in sandbox.hosts() {
        let (name, netns) = (host.nickname(), host.netns().name());
        progress::note(&format!("{name}: {} and {} in {netns}", host.ipv4(), host.ipv6()));
    }
    progress::step("starting a daemon on each: weft launch --password-file F [HOST]");
    let docker = docker::programs();
    docker::launch_all(&sandbox, docker.is_ok())?;
    let containers = attach(&sandbox)?;
    progress::step("waiting until each host has an encrypted path to the other");
    for host in sandbox.hosts() {
        let took = host.wait_connected(1, CONNECT_LIMIT)?;
        progress::note(&format!("{}: active after {:.1} s", host.nickname(), took.as_secs_f32()));
    }
    reach(&containers)?;
    docker::show(&sandbox, docker)?;
    show_status(&sandbox)?;
    figures(&sandbox, &containers, options)?;
    if options.keep {
        print_how_to_enter(&sandbox, &containers);
        return Ok(sandbox.keep()?);
    }
    progress::step("removing all that was made");
    Ok(())
}

fn clean() -> Result<(), SandboxError> {
    if !rustix::process::geteuid().is_root() {
        return Err(SandboxError::NotRoot);
    }
    let removed = sandbox::remove_kept();
    match removed.len() {
        0 => progress::step("nothing to remove"),
        _ => progress::step(&format!("removed: {}", removed.join(", "))),
    }
    Ok(())
}

/// Two containers on each host, in the order host1, host1, host2, host2.
fn attach(sandbox: &Sandbox) -> Result<Vec<Container>, SandboxError> {
    progress::step("attaching two containers to each host: weft attach NETNS");
    let mut containers = Vec::new();
    for host in sandbox.hosts() {
        for letter in ["a", "b"] {
            let container = host.add_container(&format!("{letter}{}", host.index() + 1))?;
            let addresses: Vec<String> =
                container.addresses()?.iter().map(ToString::to_string).collect();
            progress::note(&format!("{}: {}", container.netns().name(), addresses.join(", ")));
            containers.push(container);
        }
    }
    Ok(containers)
}

/// Every container pings every other, and a stream crosses between the hosts both ways.
fn reach(containers: &[Container]) -> Result<(), SandboxError> {
    progress::step("ping from every container to every other");
    for from in containers {
        for to in containers.iter().filter(|to| to.name() != from.name()) {
            for address in to.addresses()? {
                let output = from.ping(address)?;
                progress::note(&format!(
                    "{} to {} {address}: {}",
                    from.name(),
                    to.name(),
                    round_trip(&output)
                ));
            }
        }
    }
    progress::step("iperf3 between the hosts, both ways");
    let (Some(first), Some(last)) = (containers.first(), containers.last()) else { return Ok(()) };
    for (from, to) in [(first, last), (last, first)] {
        let gbps = stream(from, to)?;
        progress::note(&format!(
            "{} to {}: {gbps:.2} Gbit/s, one TCP stream",
            from.name(),
            to.name()
        ));
    }
    Ok(())
}

fn stream(from: &Container, to: &Container) -> Result<f64, SandboxError> {
    let mut server = to.spawn(&["iperf3", "-s", "-1", "--forceflush"])?;
    server.line_with("listening", Duration::from_secs(10))?;
    Ok(tcp(from.netns(), IpAddr::V4(to.ipv4()?), 1, 1)?.gbps)
}

/// The last line of ping's summary: least, mean, greatest and deviation.
fn round_trip(output: &Output) -> String {
    let line = output.stdout.lines().find_map(|line| line.strip_prefix("rtt "));
    line.unwrap_or("answered").to_owned()
}

fn show_status(sandbox: &Sandbox) -> Result<(), SandboxError> {
    for host in sandbox.hosts() {
        for words in [&["status"][..], &["status", "connections"], &["status", "peers"]] {
            progress::step(&format!("{}: weft {}", host.nickname(), words.join(" ")));
            progress::print(&host.weft(words)?.success()?.stdout);
        }
    }
    Ok(())
}

fn figures(
    sandbox: &Sandbox,
    containers: &[Container],
    options: &DemoOptions,
) -> Result<(), SandboxError> {
    let (Some(client), Some(server)) = (containers.first(), containers.last()) else {
        return Ok(());
    };
    let row = row(sandbox)?;
    let plan = Plan {
        rows: vec![rows::DIRECT, rows::VXLAN, row],
        underlays: &[Underlay::Veth],
        link_mtu: UNDERLAY_MTU_BYTES,
        rounds: ROUNDS,
        lengths: Lengths {
            tcp_seconds: options.seconds.unwrap_or(TCP_SECONDS),
            rr_seconds: 1.0,
            trial_seconds: 0.4,
            small_datagrams: true,
            more: false,
        },
        left_out: Vec::new(),
    };
    progress::step("measuring side by side: the direct link, plain kernel VXLAN, Weft encrypted");
    let binary = comparison::own_binary()?;
    let pair = rows::way_of(row).map(|way| WeftPair { row, way, sandbox, client, server });
    let report = comparison::compare(sandbox, &binary, pair.as_slice(), &plan)?;
    if let Some(Err(error)) = pair.as_ref().map(rows::check) {
        progress::note(&format!("some figures of {row} are of another path: {error}"));
    }
    comparison::write_files(&report, options.json.as_deref(), options.svg.as_deref())?;
    progress::print(&format!("\n{}\n{}\n", report.table(), report.ratios()));
    for file in [&options.json, &options.svg].into_iter().flatten() {
        progress::note(&format!("wrote {}", file.display()));
    }
    Ok(())
}

/// The row that the hosts make by default, as here. If there is a kernel path, which is preferred, it has been
/// proven by then.
fn row(sandbox: &Sandbox) -> Result<&'static str, SandboxError> {
    let status = sandbox.host(0).weft_json(&["status"])?;
    let has_kernel =
        status["engines"].as_array().is_some_and(|all| all.iter().any(|it| it == "kernel"));
    let engine = if has_kernel { "kernel" } else { "userspace" };
    for host in sandbox.hosts() {
        let what = format!("the path of the {engine} engine on {}", host.nickname());
        try_wait_until(&what, CONNECT_LIMIT, || {
            let active = host.active_connections()?;
            Ok(!active.is_empty() && active.iter().all(|one| one["engine"] == engine))
        })?;
    }
    let connection = sandbox.host(0).active_connections()?.first().cloned().unwrap_or_default();
    let ports = status["ports"].as_str().unwrap_or_default();
    rows::row_of_way(&connection, ports).ok_or_else(|| SandboxError::UnexpectedOutput {
        command: "weft status connections --json".to_owned(),
        why: format!("no row for ports of the kind {ports} and {connection}"),
    })
}

fn print_how_to_enter(sandbox: &Sandbox, containers: &[Container]) {
    // In a clone it is not on the search path.
    let weft =
        sandbox.hosts().first().map_or("weft".into(), |host| host.binary().display().to_string());
    let mut text = String::from("\nIt keeps running. To enter a container:\n");
    for container in containers {
        text.push_str(&format!("  ip netns exec {} bash\n", container.netns().name()));
    }
    text.push_str("To ask a host:\n");
    for host in sandbox.hosts() {
        text.push_str(&format!(
            "  {weft} status connections --runtime-dir {}\n",
            host.runtime_directory().display()
        ));
    }
    text.push_str("To remove it all:\n  ./dev demo --clean\n");
    progress::print(&text);
}
