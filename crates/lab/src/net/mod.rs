//! The namespace lab: real daemons, real traffic, judged by programs that are not ours.

pub mod capture;
pub mod devices;
pub mod figures;
pub mod gateway;
pub mod guest;
pub mod iperf;
pub mod losses;
pub mod memory;
pub mod probe;
pub mod spoof;
mod stopped;
pub mod suite;
pub mod workers;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
pub use stopped::Stopped;
pub use weft_bench::sandbox::slowness;
use weft_bench::sandbox::{Container, Host, Netns, Sandbox, SandboxOptions, try_wait_until};

/// How long hosts may take until their paths are active.
pub const ACTIVE_TIMEOUT_S: u64 = 20;

/// The least rate of TCP in its first second on an emulated machine, in bits per second.
const EMULATED_FLOW_BPS: f64 = 1e5;

/// Hosts with daemons that have found each other.
pub struct Lab {
    /// The hosts.
    pub sandbox: Sandbox,
}

impl Lab {
    /// Two hosts with active paths, launched with further arguments.
    ///
    /// # Errors
    /// Returns an error that the test can show.
    pub fn pair(arguments: &[&str]) -> anyhow::Result<Self> {
        Self::launched(2, arguments)
    }

    /// The number of hosts; all but the first name only the first.
    ///
    /// # Errors
    /// As [`Lab::pair`].
    pub fn launched(hosts: usize, arguments: &[&str]) -> anyhow::Result<Self> {
        let sandbox = Sandbox::new(&SandboxOptions { hosts, ..SandboxOptions::default() })?;
        sandbox.launch_all(arguments)?;
        let lab = Self { sandbox };
        lab.wait_active()?;
        Ok(lab)
    }

    /// Waits until every host has an active path to every other.
    ///
    /// # Errors
    /// A path is not active in time.
    pub fn wait_active(&self) -> anyhow::Result<()> {
        let others = self.sandbox.hosts().len() - 1;
        for host in self.sandbox.hosts() {
            host.wait_connected(others, Duration::from_secs(ACTIVE_TIMEOUT_S))?;
        }
        Ok(())
    }

    /// A host.
    #[must_use]
    pub fn host(&self, index: usize) -> &Host {
        self.sandbox.host(index)
    }

    /// One container on each of the first two hosts.
    ///
    /// # Errors
    /// Returns an error if `weft attach` fails.
    pub fn containers(&self) -> anyhow::Result<(Container, Container)> {
        Ok((self.host(0).add_container("c1")?, self.host(1).add_container("c2")?))
    }

    /// A file with the password that all hosts share.
    #[must_use]
    pub fn password_file(&self) -> PathBuf {
        self.sandbox.password_file()
    }
}

/// Joins two containers outside of Weft too, by a cable between bridges with their interfaces: a loop, where Weft
/// carries broadcasts between them. Deleting `cable` in the first ends it.
///
/// # Errors
/// The kernel's refusal.
pub fn close_loop(one: &Container, two: &Container) -> anyhow::Result<()> {
    let veth = format!("link add cable type veth peer name cable netns {}", two.netns().name());
    one.netns().ip(&veth)?.success()?;
    for container in [one, two] {
        let script = "ip link add outer type bridge; ip link set outer up; \
                      ip link set cable up master outer; ip link set weft0 master outer";
        container.exec(&["sh", "-ec", script])?.success()?;
    }
    Ok(())
}

/// Has the kernel pass on in order what devices of these namespaces receive, for tests that count what Weft brings
/// out of order. A veth pair leaves a packet with the CPU on which its sender runs. A sender that moves to another
/// CPU meanwhile overtakes itself before Weft reads its packets. With receive packet steering one CPU takes all
/// packets.
///
/// # Errors
/// The kernel has no such steering.
pub fn keep_order<'a>(namespaces: impl IntoIterator<Item = &'a Netns>) -> anyhow::Result<()> {
    const STEER: &str =
        "for file in /sys/class/net/*/queues/rx-*/rps_cpus; do echo 1 > $file; done";
    for namespace in namespaces {
        namespace.exec(&["sh", "-e", "-c", STEER])?.success()?;
    }
    Ok(())
}

/// Has a container's TCP send again only what its peer's selective acknowledgements show to be missing, for tests
/// that count retransmissions. Tail loss probes and the usual timeout of 200 ms react to the scheduling of a busy
/// machine. Here a segment times out after 3 s.
///
/// # Errors
/// The kernel's refusal, or the container has no IPv4 route.
pub fn resend_on_loss_alone(container: &Container) -> anyhow::Result<()> {
    const SCRIPT: &str = "sysctl -qw net.ipv4.tcp_early_retrans=0
        routes=$(ip -4 route show) && [ \"$routes\" ]
        echo \"$routes\" | while read -r route; do ip route change $route rto_min 3s; done";
    container.exec(&["sh", "-ec", SCRIPT])?.success()?;
    Ok(())
}

/// Packets that a named counter of the nftables table `inet lab` has counted in a namespace.
///
/// # Errors
/// There is no such table or counter.
pub fn nft_packets(namespace: &Netns, counter: &str) -> anyhow::Result<u64> {
    let listed = namespace.exec(&["nft", "-j", "list", "counter", "inet", "lab", counter])?;
    let listed = listed.success()?.json()?;
    let objects = listed["nftables"].as_array().cloned().unwrap_or_default();
    let found = objects.iter().find_map(|object| object["counter"]["packets"].as_u64());
    found.ok_or_else(|| anyhow::anyhow!("no counter {counter} in {listed}"))
}

/// One counter of a container's kernel by the name that `nstat` gives it, such as `TcpRetransSegs`.
///
/// # Errors
/// There is no such counter.
pub fn tcp_counter(container: &Container, name: &str) -> anyhow::Result<u64> {
    let text = container.exec(&["nstat", "-asz", name])?.success()?.stdout;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let count = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    count.ok_or_else(|| anyhow::anyhow!("no counter {name} in {text}"))
}

/// The addresses of two containers, IPv4 and IPv6.
///
/// # Errors
/// One has none.
pub fn address_pairs(from: &Container, to: &Container) -> anyhow::Result<[(IpAddr, IpAddr); 2]> {
    Ok([(from.ipv4()?.into(), to.ipv4()?.into()), (from.ipv6()?.into(), to.ipv6()?.into())])
}

/// A container's namespace file.
#[must_use]
pub fn namespace(container: &Container) -> PathBuf {
    PathBuf::from(container.netns().path())
}

/// One counter of a host's vector engine.
///
/// # Errors
/// The report has no such counter: a renamed counter must not make a test pass.
pub fn counter(host: &Host, name: &str) -> anyhow::Result<u64> {
    let report = host.weft_json(&["report"])?;
    report["counters"][name]
        .as_u64()
        .ok_or_else(|| anyhow::anyhow!("no counter {name} in {}", report["counters"]))
}

/// Waits until a host's first connection satisfies `wanted`; the error shows the last one seen.
///
/// # Errors
/// It did not in time.
pub fn wait_connection(
    host: &Host,
    what: &str,
    limit: Duration,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<Value> {
    let mut found = Value::Null;
    let result = try_wait_until(what, limit, || {
        let connections = host.weft_json(&["status", "connections"])?;
        let list = connections.as_array().cloned().unwrap_or_default();
        match list.iter().find(|connection| wanted(connection)) {
            Some(connection) => found = connection.clone(),
            None => found = connections,
        }
        Ok(list.iter().any(&wanted))
    });
    match result {
        Ok(_) => Ok(found),
        Err(error) => Err(anyhow::anyhow!("{error}; connections are {found}")),
    }
}

/// Pings with further arguments until the first answer, for paths that have to be learnt first.
///
/// # Errors
/// No answer in time.
pub fn wait_ping(from: &Container, to: IpAddr, limit: Duration) -> anyhow::Result<Duration> {
    let to = to.to_string();
    let what = format!("an answer from {to} to a ping");
    Ok(try_wait_until(&what, limit, || {
        Ok(from.exec(&["ping", "-n", "-c", "1", "-W", "1", &to])?.status.success())
    })?)
}

/// A file's text, for assertions on it.
///
/// # Errors
/// It cannot be read.
pub fn read(path: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(path).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))
}

/// A rate that a real machine must reach, in bits per second. On an emulated one the flow only has to move:
/// ciphers are disproportionately slow there, and a short flow finds its rate late.
#[must_use]
pub fn attainable_bps(bps: f64) -> f64 {
    if slowness() == 1 { bps } else { EMULATED_FLOW_BPS }
}

/// Soak tests run their full length where this is set (`./dev soak`).
#[must_use]
pub fn is_soak() -> bool {
    std::env::var_os("WEFT_SOAK").is_some()
}
