//! The mount and network namespaces of a runtime's daemon, where each directory is at its usual place.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::secluded::{Secluded, make_directories};
use weft_bench::sandbox::{Host, Programs, Running, Sandbox, SandboxOptions};

use crate::cni::reference_plugins;
use crate::net::Lab;

/// How long a place without a daemon may take.
const START_LIMIT: Duration = Duration::from_secs(10);
/// The switches of a host that forwards packets.
const FORWARDING: [&str; 2] = ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"];

/// Makes a place on a host where no daemon runs. It ends with the value.
///
/// # Errors
/// A program fails.
pub fn place(sandbox: &Sandbox, host: &Host) -> anyhow::Result<Running> {
    let directory = sandbox.directory().join(format!("place-{}", host.index()));
    make_directories(&directory, &[])?;
    let secluded = Secluded {
        what: "a place for runtimes",
        directory: &directory,
        programs: &Programs::installed(),
        script: "touch \"$directory/made\"\nexec sleep infinity\n",
        has_own_processes: false,
        limit: START_LIMIT,
    };
    let made = directory.join("made");
    Ok(secluded.start(host, || made.exists())?)
}

/// Two hosts that forward packets. Each has a runtime, Weft's daemon beside it, and a network of CNI that leads out.
///
/// # Errors
/// A part does not start.
pub fn two_hosts<R>(
    start: impl Fn(&Sandbox, &Host) -> anyhow::Result<R>,
    inside: impl Fn(&R) -> Inside,
) -> anyhow::Result<(Lab, [R; 2])> {
    let lab = Lab { sandbox: Sandbox::new(&SandboxOptions::default())? };
    let started = |index| {
        let (sandbox, host) = (&lab.sandbox, lab.host(index));
        let runtime = start(sandbox, host)?;
        inside(&runtime).launch(sandbox, host, &[])?;
        anyhow::Ok(runtime)
    };
    let runtimes = [started(0)?, started(1)?];
    lab.wait_active()?;
    for (runtime, host) in runtimes.iter().zip(lab.sandbox.hosts()) {
        for switch in FORWARDING {
            host.netns().exec(&["sysctl", "-qw", switch])?.success()?;
        }
        inside(runtime).set_up_cni(host, &["--masquerade"])?;
    }
    Ok((lab, runtimes))
}

/// Programs that run in the namespaces of a daemon.
#[derive(Debug, Clone, Copy)]
pub struct Inside {
    pid: u32,
}

impl Inside {
    /// The namespaces of this daemon, while it runs.
    #[must_use]
    pub fn of(running: &Running) -> Self {
        Self { pid: running.pid() }
    }

    /// Starts Weft's daemon of a host there, with further arguments. A runtime names the namespaces of its
    /// containers by paths in its own `/run`.
    ///
    /// # Errors
    /// As [`Host::start_daemon`].
    pub fn launch(self, sandbox: &Sandbox, host: &Host, more: &[&str]) -> anyhow::Result<()> {
        let password = sandbox.password_file().to_string_lossy().into_owned();
        let first = sandbox.host(0).ipv4().to_string();
        let peers = if host.index() > 0 { &[first.as_str()][..] } else { &[] };
        let words = [&["--password-file", &password], more, peers].concat();
        Ok(host.start_daemon_beside(self.pid, &words)?)
    }

    /// A command that will run there.
    #[must_use]
    pub fn command(self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        let target = self.pid.to_string();
        command.args(["--target", &target, "--mount", "--net"]).args(words);
        command
    }

    /// Runs a command there to its end, and returns its output.
    ///
    /// # Errors
    /// With the command's complaint.
    pub fn exec(self, words: &[&str]) -> anyhow::Result<String> {
        let output = self.command(words).output().with_context(|| format!("{words:?}"))?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{words:?}: {}", complaint.trim());
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    /// Installs the reference plugins and runs `weft setup-cni`, with further words. Returns its report.
    ///
    /// # Errors
    /// With the complaint of `weft`.
    pub fn set_up_cni(self, host: &Host, words: &[&str]) -> anyhow::Result<Value> {
        let plugins = reference_plugins()?.to_string_lossy().into_owned();
        const LINK: &str = "mkdir -p /opt/cni/bin; ln -sf \"$1\"/* /opt/cni/bin";
        self.exec(&["sh", "-ec", LINK, "sh", &plugins])?;
        let binary = host.binary().to_string_lossy().into_owned();
        let runtime = host.runtime_directory().to_string_lossy().into_owned();
        let weft = [&binary, "--runtime-dir", &runtime, "setup-cni", "--json"];
        Ok(serde_json::from_str(&self.exec(&[&weft, words].concat())?)?)
    }
}
