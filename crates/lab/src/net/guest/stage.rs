//! Hosts joined by a bridge in a separate namespace, each launched with individual options.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use weft_bench::sandbox::{
    Container, Host, Netns, Sandbox, SandboxOptions, Underlay, try_wait_until,
};

use super::SETTLE_LIMIT;

/// The command that starts a daemon of [`Stage::wrapped`], such as `setpriv` with its options.
pub const WRAP: &str = "WEFT_LAB_WRAP";

/// The address family of the packets between hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outer {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Outer {
    /// A host's address of this family.
    #[must_use]
    pub fn of(self, host: &Host) -> IpAddr {
        match self {
            Self::V4 => host.ipv4().into(),
            Self::V6 => host.ipv6().into(),
        }
    }

    /// The host as `weft launch` and `weft connect` take it.
    #[must_use]
    pub fn target(self, host: &Host) -> String {
        match self {
            Self::V4 => host.ipv4().to_string(),
            Self::V6 => format!("[{}]:6783", host.ipv6()),
        }
    }
}

/// Hosts without daemons at first.
pub struct Stage {
    sandbox: Sandbox,
    outer: Outer,
}

impl Stage {
    /// So many hosts on an underlay of 1,500 bytes that carries real datagrams.
    ///
    /// # Errors
    /// As [`Sandbox::new`].
    pub fn new(hosts: usize) -> anyhow::Result<Self> {
        Self::with(hosts, Outer::V4, weft_bench::sandbox::UNDERLAY_MTU_BYTES)
    }

    /// As [`Stage::new`], with the family by which hosts find each other and the underlay's MTU.
    ///
    /// # Errors
    /// As [`Sandbox::new`].
    pub fn with(hosts: usize, outer: Outer, mtu: u32) -> anyhow::Result<Self> {
        Self::on(Underlay::Wire, hosts, outer, mtu)
    }

    /// As [`Stage::new`], where super-packets cross the underlay whole. An emulated processor needs a fraction
    /// of the time for the same bytes in datagrams.
    ///
    /// # Errors
    /// As [`Sandbox::new`].
    pub fn of_super_packets(hosts: usize) -> anyhow::Result<Self> {
        Self::on(Underlay::Veth, hosts, Outer::V4, weft_bench::sandbox::UNDERLAY_MTU_BYTES)
    }

    fn on(underlay: Underlay, hosts: usize, outer: Outer, mtu: u32) -> anyhow::Result<Self> {
        let options =
            SandboxOptions { hosts, bridged: true, mtu, underlay, ..SandboxOptions::default() };
        Ok(Self { sandbox: Sandbox::new(&options)?, outer })
    }

    /// As [`Stage::new`], where each daemon is started by the words in the variable [`WRAP`].
    ///
    /// # Errors
    /// As [`Sandbox::new`], or `WEFT_BIN` is not set.
    pub fn wrapped(hosts: usize) -> anyhow::Result<Self> {
        use std::os::unix::fs::PermissionsExt;
        let binary = std::env::var("WEFT_BIN")?;
        let file = std::env::temp_dir().join(format!("weft-wrapped-{:08x}", rand::random::<u32>()));
        std::fs::write(&file, format!("#!/bin/bash\nexec ${WRAP} {binary} \"$@\"\n"))?;
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755))?;
        let options = SandboxOptions {
            hosts,
            bridged: true,
            binary: Some(file),
            ..SandboxOptions::default()
        };
        Ok(Self { sandbox: Sandbox::new(&options)?, outer: Outer::V4 })
    }

    /// Two hosts with daemons launched with these options, each with an active path to the other.
    ///
    /// # Errors
    /// Returns an error that the test can show.
    pub fn pair(one: &[&str], two: &[&str]) -> anyhow::Result<Self> {
        Self::new(2)?.launched(&[one, two])
    }

    /// Launches each host with its options and waits until all have active paths to all.
    ///
    /// # Errors
    /// Returns an error that the test can show.
    pub fn launched(self, arguments: &[&[&str]]) -> anyhow::Result<Self> {
        for (index, words) in arguments.iter().enumerate() {
            self.launch(index, words)?;
        }
        self.wait_all_active(arguments.len())?;
        Ok(self)
    }

    /// Launches one host's daemon; all but the first are given the first one's address.
    ///
    /// # Errors
    /// As [`Host::start_daemon`].
    pub fn launch(&self, index: usize, arguments: &[&str]) -> anyhow::Result<()> {
        self.launch_with(index, arguments, &[])
    }

    /// As [`Stage::launch`], with further environment variables.
    ///
    /// # Errors
    /// As [`Host::start_daemon`].
    pub fn launch_with(
        &self,
        index: usize,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> anyhow::Result<()> {
        let password = self.sandbox.password_file();
        let password = password.to_string_lossy();
        let first = self.outer.target(self.host(0));
        let mut words = vec!["--password-file", &*password];
        words.extend_from_slice(arguments);
        if index > 0 {
            words.push(&first);
        }
        Ok(self.host(index).start_daemon_with(&words, environment)?)
    }

    /// Waits until the first `count` hosts have active paths to each other.
    ///
    /// # Errors
    /// They have not in time; the error shows each host's connections.
    pub fn wait_all_active(&self, count: usize) -> anyhow::Result<()> {
        for one in &self.sandbox.hosts()[..count] {
            for other in &self.sandbox.hosts()[..count] {
                if one.index() != other.index() {
                    wait_path(one, other, "an active path", SETTLE_LIMIT, is_active)?;
                }
            }
        }
        Ok(())
    }

    /// The sandbox that holds the hosts.
    #[must_use]
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// The family by which hosts find each other.
    #[must_use]
    pub fn outer(&self) -> Outer {
        self.outer
    }

    /// A host.
    #[must_use]
    pub fn host(&self, index: usize) -> &Host {
        self.sandbox.host(index)
    }

    /// The namespace between the hosts, with the bridge `br0` and its ports `port1`, `port2`, ….
    ///
    /// # Errors
    /// There is nothing between them.
    pub fn middle(&self) -> anyhow::Result<&Netns> {
        self.sandbox.middle().ok_or_else(|| anyhow::anyhow!("there is nothing between the hosts"))
    }

    /// The directory of the run's files.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.sandbox.directory()
    }

    /// Waits until one container's pings are answered by another.
    ///
    /// # Errors
    /// No answer came in time; the error shows the hosts' state.
    pub fn reach(&self, from: &Container, to: &Container) -> anyhow::Result<Duration> {
        let waited = crate::net::wait_ping(from, to.ipv4()?.into(), SETTLE_LIMIT);
        waited.map_err(|error| error.context(self.diagnosis()))
    }

    /// Reports of daemons and kernels, for the error of a test.
    #[must_use]
    pub fn diagnosis(&self) -> String {
        self.sandbox.hosts().iter().map(diagnosis_of).collect()
    }

    /// One container on each of the first two hosts.
    ///
    /// # Errors
    /// Returns an error if `weft attach` fails.
    pub fn containers(&self) -> anyhow::Result<(Container, Container)> {
        Ok((self.host(0).add_container("c1")?, self.host(1).add_container("c2")?))
    }
}

fn diagnosis_of(host: &Host) -> String {
    const COMMANDS: [&str; 6] = [
        "ip -o link | cut -c1-120",
        "bridge fdb | grep -E 'weft|vx' | grep -v 33:33",
        "ip xfrm state | grep -E '^src|spi|encap'",
        "ip xfrm policy | grep -E '^src|spi'",
        "nft list table inet weft-guard | grep -E 'packets|elements'",
        "cat /proc/net/xfrm_stat | grep -v '0$'",
    ];
    let mut text = format!("\n===== {}\n", host.nickname());
    for part in [&["status", "connections"][..], &["status", "paths"]] {
        let output = host.weft(part).map(|it| it.stdout + &it.stderr);
        text.push_str(&output.unwrap_or_else(|error| error.to_string()));
    }
    let report = host.weft_json(&["report"]).unwrap_or_default();
    for part in ["kernel_counters", "counters"] {
        let counters = report[part].as_object().cloned().unwrap_or_default();
        let counted = counters.into_iter().filter(|(_, count)| count != 0);
        let words: Vec<String> = counted.map(|(name, count)| format!("{name} {count}")).collect();
        text.push_str(&format!("{part}: {}\n", words.join(", ")));
    }
    for command in COMMANDS {
        let output = host.netns().exec(&["bash", "-c", command]).map(|it| it.stdout + &it.stderr);
        let output = output.unwrap_or_else(|error| error.to_string());
        text.push_str(&format!("# {command}\n{output}"));
    }
    text + "# log\n" + &tail(host) + "\n"
}

/// Whether a connection or path is active.
#[must_use]
pub fn is_active(path: &Value) -> bool {
    path["state"] == "active"
}

/// Whether it is active on these engines, this host's first (`kernel`, `userspace`).
pub fn is_on<'a>(engine: &'a str, remote_engine: &'a str) -> impl Fn(&Value) -> bool + 'a {
    move |path| {
        is_active(path) && path["engine"] == engine && path["remote_engine"] == remote_engine
    }
}

/// Whether its reason names all of these.
#[must_use]
pub fn says(path: &Value, words: &[&str]) -> bool {
    path["reason"].as_str().is_some_and(|reason| words.iter().all(|word| reason.contains(word)))
}

/// Waits until a host's connection to `peer` satisfies `wanted`; the error shows what was seen last.
///
/// # Errors
/// It did not in time.
pub fn wait_path(
    host: &Host,
    peer: &Host,
    what: &str,
    limit: Duration,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<Value> {
    wait_in(host, "connections", what, limit, |one| of_peer(one, peer) && wanted(one))
}

/// Waits until one of a host's paths to `peer`, in use or not, satisfies `wanted`.
///
/// # Errors
/// None did in time; the error shows what was seen last.
pub fn wait_candidate(
    host: &Host,
    peer: &Host,
    what: &str,
    limit: Duration,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<Value> {
    wait_in(host, "paths", what, limit, |one| of_peer(one, peer) && wanted(one))
}

/// A host's connection to a peer.
///
/// # Errors
/// It has none.
pub fn path(host: &Host, peer: &Host) -> anyhow::Result<Value> {
    wait_path(host, peer, "a connection", Duration::ZERO, |_| true)
}

fn of_peer(one: &Value, peer: &Host) -> bool {
    one["nickname"] == peer.nickname()
}

fn wait_in(
    host: &Host,
    part: &str,
    what: &str,
    limit: Duration,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<Value> {
    let mut seen = Value::Null;
    let what = format!("{what} in the {part} of {}", host.nickname());
    let result = try_wait_until(&what, limit, || {
        seen = host.weft_json(&["status", part])?;
        Ok(seen.as_array().is_some_and(|list| list.iter().any(&wanted)))
    });
    let found = seen.as_array().and_then(|list| list.iter().find(|one| wanted(one)));
    match (result, found) {
        (Ok(_), Some(one)) => Ok(one.clone()),
        (Ok(_), None) => anyhow::bail!("{what}: none in {seen}"),
        (Err(error), _) => anyhow::bail!("{error}; seen last: {seen:#}\nits log: {}", tail(host)),
    }
}

/// The end of a daemon's log, for an error.
fn tail(host: &Host) -> String {
    const LINES_SHOWN: usize = 25;
    let log = host.log();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n")
}
