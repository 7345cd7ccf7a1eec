//! Hosts and containers as network namespaces on one machine: the stage of the demo, of the
//! benchmark and of the namespace lab.
//!
//! A host is a namespace with an underlay device `eth0` and a real daemon in it. A container is a further
//! namespace that `weft attach` attaches. Everything that is made carries a random tag and is removed when the
//! [`Sandbox`] is dropped, on an error and on Ctrl-C. Programs of the field (`ip`, `ethtool`, `ping`, `iperf3`) do
//! the work and are the referees; the product itself uses none of them.

mod cleanup;
pub mod docker;
mod error;
mod gate;
mod host;
mod netns;
mod overload;
pub mod programs;
pub mod progress;
pub mod secluded;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

pub use cleanup::{remove_kept, sweep};
pub use error::SandboxError;
pub use host::{Container, Host};
pub use netns::{Netns, Output, Running};
pub use overload::{FREE_MS, HELD_MS, Held, SocketQueues};
pub use programs::Programs;
pub use progress::{slowness, try_wait_until, wait_until};

pub(crate) use weft::doctor::find_program;

pub(crate) use gate::gate;
pub(crate) use netns::{last_lines, output_of, run};

/// The underlay's MTU where nothing else is asked for, in bytes.
pub const UNDERLAY_MTU_BYTES: u32 = 1500;
/// The most hosts of one sandbox: their addresses end in 1 to 250.
pub const HOSTS_MAX: usize = 250;

/// How packets cross the underlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Underlay {
    /// The veth pair as it is: super-packets cross it whole.
    Veth,
    /// Real datagrams of the MTU's size cross: segmentation offloads off, GRO on, at both ends.
    Wire,
}

impl Underlay {
    /// The name in tables and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Veth => "veth",
            Self::Wire => "wire",
        }
    }

    /// The features given to `ethtool -K`.
    pub(crate) const fn features(self) -> &'static str {
        match self {
            Self::Veth => "tso on tx-udp-segmentation on tx-gso-list on gro off",
            Self::Wire => "tso off tx-udp-segmentation off tx-gso-list off gro on",
        }
    }
}

/// The layout of a sandbox.
#[derive(Debug, Clone)]
pub struct SandboxOptions {
    /// How many hosts, 1 to [`HOSTS_MAX`]. Two are joined by a veth pair, more by a bridge.
    pub hosts: usize,
    /// Two hosts are joined by a bridge too, so that a namespace lies between them.
    pub bridged: bool,
    /// The underlay's MTU in bytes.
    pub mtu: u32,
    /// How packets cross the underlay at first.
    pub underlay: Underlay,
    /// The `weft` binary; by default `WEFT_BIN`, else the one beside the program that runs.
    pub binary: Option<PathBuf>,
}

impl Default for SandboxOptions {
    fn default() -> Self {
        Self {
            hosts: 2,
            bridged: false,
            mtu: UNDERLAY_MTU_BYTES,
            underlay: Underlay::Veth,
            binary: None,
        }
    }
}

/// Hosts joined by an underlay. Dropping it removes all that was made.
#[derive(Debug)]
pub struct Sandbox {
    tag: String,
    directory: PathBuf,
    hosts: Vec<Host>,
    middle: Option<Netns>,
    kept: bool,
}

impl Sandbox {
    /// Makes the hosts and the underlay between them. No daemon runs yet.
    ///
    /// Sandboxes that a killed run left behind are removed first.
    ///
    /// # Errors
    /// [`SandboxError::NotRoot`], [`SandboxError::MissingProgram`], or the error of a command.
    pub fn new(options: &SandboxOptions) -> Result<Self, SandboxError> {
        if !rustix::process::geteuid().is_root() {
            return Err(SandboxError::NotRoot);
        }
        require("ip", "iproute2")?;
        require("ethtool", "ethtool")?;
        let binary = match &options.binary {
            Some(binary) => binary.clone(),
            None => default_binary()?,
        };
        for tag in sweep() {
            progress::note(&format!("removed what the killed run {tag} had left behind"));
        }
        let (tag, directory) = cleanup::claim()?;
        let mut sandbox = Self { tag, directory, hosts: Vec::new(), middle: None, kept: false };
        sandbox.write_password()?;
        for index in 0..options.hosts.clamp(1, HOSTS_MAX) {
            let host = Host::create(&sandbox.tag, &sandbox.directory, index, binary.clone())?;
            sandbox.hosts.push(host);
        }
        sandbox.join_hosts(options.bridged, options.mtu)?;
        sandbox.set_underlay(options.underlay)?;
        Ok(sandbox)
    }

    /// The random tag in the names of this run.
    #[must_use]
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The directory of this run: logs, state and sockets of every host.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A host, counted from 0.
    ///
    /// # Panics
    /// If there is no such host.
    #[must_use]
    pub fn host(&self, index: usize) -> &Host {
        &self.hosts[index]
    }

    /// All hosts.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The namespace with the bridge `br0` between the hosts. The first host's port is `port1`. `None` if a
    /// veth pair joins the hosts.
    #[must_use]
    pub fn middle(&self) -> Option<&Netns> {
        self.middle.as_ref()
    }

    /// A file with a random password, readable by root only: the admission of this run.
    #[must_use]
    pub fn password_file(&self) -> PathBuf {
        self.directory.join("password")
    }

    /// Starts a daemon on every host, all with the same password. Every host but the first is given the
    /// first one's address.
    ///
    /// # Errors
    /// [`SandboxError::DaemonEnded`] with the end of its log, or [`SandboxError::WaitTimedOut`].
    pub fn launch_all(&self, arguments: &[&str]) -> Result<(), SandboxError> {
        self.hosts.iter().try_for_each(|host| self.launch(host, arguments))
    }

    /// Starts the daemon of one host, as [`Sandbox::launch_all`] does.
    ///
    /// # Errors
    /// As [`Sandbox::launch_all`].
    pub fn launch(&self, host: &Host, arguments: &[&str]) -> Result<(), SandboxError> {
        let password_file = self.password_file();
        let password_file = password_file.to_string_lossy();
        let first = self.host(0).ipv4().to_string();
        let mut words = vec!["--password-file", &password_file];
        words.extend_from_slice(arguments);
        if host.index() > 0 {
            words.push(&first);
        }
        host.start_daemon(&words)
    }

    /// Makes a bare namespace that belongs to no host; `weft-TAG-NAME` for `ip netns`.
    ///
    /// # Errors
    /// Returns an error if `ip` fails.
    pub fn add_netns(&self, name: &str) -> Result<Netns, SandboxError> {
        Netns::create(format!("weft-{}-{name}", self.tag))
    }

    /// Removes a namespace of this sandbox, with the processes in it.
    ///
    /// # Errors
    /// Returns an error if `ip` fails.
    pub fn remove_netns(&self, netns: &Netns) -> Result<(), SandboxError> {
        let _gate = gate::gate();
        for pid in Netns::pids(netns.name()) {
            gate::signal(pid, rustix::process::Signal::KILL);
        }
        run(Command::new("ip").args(["netns", "del", netns.name()]))?;
        Ok(())
    }

    /// Changes how packets cross the underlay.
    ///
    /// # Errors
    /// Returns an error if `ethtool` fails.
    pub fn set_underlay(&self, underlay: Underlay) -> Result<(), SandboxError> {
        for host in &self.hosts {
            let words: Vec<&str> = underlay.features().split(' ').collect();
            run(host.netns().command("ethtool").args(["-K", "eth0"]).args(words))?;
        }
        Ok(())
    }

    /// Leaves everything running after this process has ended; `./dev demo --clean` removes it.
    ///
    /// # Errors
    /// [`SandboxError::Io`] if the mark cannot be written; the sandbox is removed then.
    pub fn keep(mut self) -> Result<(), SandboxError> {
        cleanup::keep(&self.tag)?;
        self.kept = true;
        for host in self.hosts.drain(..) {
            host.release();
        }
        Ok(())
    }

    fn write_password(&self) -> Result<(), SandboxError> {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.password_file();
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path);
        file.and_then(|mut file| {
            writeln!(file, "{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>())
        })
        .map_err(SandboxError::io(format!("write {}", path.display())))
    }

    fn join_hosts(&mut self, bridged: bool, mtu: u32) -> Result<(), SandboxError> {
        if let ([first, second], false) = (self.hosts.as_slice(), bridged) {
            veth_between((first.netns(), "eth0"), (second.netns(), "eth0"))?;
        } else {
            let middle = self.add_netns("net")?;
            middle.ip("link add br0 type bridge")?;
            middle.ip(&format!("link set br0 mtu {mtu} up"))?;
            for host in &self.hosts {
                let port = format!("port{}", host.index() + 1);
                veth_between((host.netns(), "eth0"), (&middle, &port))?;
                middle.ip(&format!("link set {port} mtu {mtu} master br0 up"))?;
            }
            self.middle = Some(middle);
        }
        for host in &self.hosts {
            host.netns().ip(&format!("link set eth0 mtu {mtu} up"))?;
            host.netns().ip(&format!("addr add {}/24 dev eth0", host.ipv4()))?;
            if Path::new("/proc/sys/net/ipv6").exists() {
                host.netns().ip(&format!("addr add {}/64 dev eth0 nodad", host.ipv6()))?;
            }
        }
        Ok(())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        for host in &self.hosts {
            host.end_daemon();
        }
        cleanup::remove(&self.tag);
    }
}

/// Fails where a program that the laboratory needs is not installed.
///
/// # Errors
/// [`SandboxError::MissingProgram`], which names the Debian package.
pub fn require(program: &'static str, package: &'static str) -> Result<(), SandboxError> {
    match find_program(program) {
        Some(_) => Ok(()),
        None => Err(SandboxError::MissingProgram { program, package }),
    }
}

/// Makes a veth pair with its ends in two namespaces.
pub(crate) fn veth_between(one: (&Netns, &str), other: (&Netns, &str)) -> Result<(), SandboxError> {
    let _gate = gate::gate();
    let (one, one_name) = one;
    let (other, other_name) = other;
    run(Command::new("ip")
        .args(["link", "add", one_name, "netns", one.name(), "type", "veth"])
        .args(["peer", "name", other_name, "netns", other.name()]))?;
    Ok(())
}

/// The underlay address of a host: documentation ranges (RFC 5737, RFC 3849), and only ever inside
/// the sandbox's namespaces.
fn underlay_addresses(index: usize) -> (Ipv4Addr, Ipv6Addr) {
    let number = u8::try_from(index + 1).unwrap_or(u8::MAX);
    (
        Ipv4Addr::new(192, 0, 2, number),
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(number)),
    )
}

fn default_binary() -> Result<PathBuf, SandboxError> {
    if let Some(binary) = std::env::var_os("WEFT_BIN") {
        return Ok(PathBuf::from(binary));
    }
    let program = std::env::current_exe().map_err(SandboxError::io("find the running program"))?;
    Ok(program.with_file_name("weft"))
}

/// Reads the addresses of a device from the output of `ip -j addr`.
pub(crate) fn global_addresses(json: &serde_json::Value) -> Vec<IpAddr> {
    let links = json.as_array().map(Vec::as_slice).unwrap_or_default();
    let infos = links.iter().filter_map(|link| link.get("addr_info")?.as_array()).flatten();
    infos
        .filter(|info| info.get("scope").and_then(serde_json::Value::as_str) == Some("global"))
        .filter_map(|info| info.get("local")?.as_str()?.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_global_addresses_of_a_namespace_count() {
        let json = serde_json::json!([
            {"ifname": "lo", "addr_info": [{"scope": "host", "local": "127.0.0.1"}]},
            {},
            {"ifname": "ethwe", "addr_info": [
                {"scope": "global", "local": "10.32.0.1"},
                {"scope": "global", "local": "fd00::1"},
                {"scope": "link", "local": "fe80::1"}]}
        ]);
        let wanted: Vec<IpAddr> = vec!["10.32.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(global_addresses(&json), wanted);
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        require("sh", "dash").unwrap();
        let error = require("no-such-program", "some-package").unwrap_err().to_string();
        assert!(error.contains("no-such-program") && error.contains("some-package"), "{error}");
    }
}
