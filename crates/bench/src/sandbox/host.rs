//! A host of the sandbox, its daemon, and its containers.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::netns::{Netns, Output, Running, last_lines, run};
use super::progress::{try_wait_until, wait_until};
use super::{SandboxError, global_addresses, underlay_addresses};

/// How long a daemon may take until it answers.
const LAUNCH_LIMIT: Duration = Duration::from_secs(20);
/// How long a daemon may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// The most lines of a daemon's log that an error quotes.
const LOG_LINES_MAX: usize = 20;

/// A host: a namespace with the underlay device `eth0`, a state directory and a runtime directory.
#[derive(Debug)]
pub struct Host {
    index: usize,
    netns: Netns,
    directory: PathBuf,
    binary: PathBuf,
    daemon: Mutex<Option<Running>>,
}

impl Host {
    pub(super) fn create(
        tag: &str,
        parent: &Path,
        index: usize,
        binary: PathBuf,
    ) -> Result<Self, SandboxError> {
        let nickname = format!("host{}", index + 1);
        let directory = parent.join(&nickname);
        for part in ["run", "state"] {
            let path = directory.join(part);
            std::fs::create_dir_all(&path)
                .map_err(SandboxError::io(format!("make {}", path.display())))?;
        }
        let netns = Netns::create(format!("weft-{tag}-{nickname}"))?;
        Ok(Self { index, netns, directory, binary, daemon: Mutex::new(None) })
    }

    /// The `weft` program that runs on it.
    #[must_use]
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// The place in the sandbox, from 0.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The name that the daemon goes by: `host1`, `host2`, …
    #[must_use]
    pub fn nickname(&self) -> String {
        format!("host{}", self.index + 1)
    }

    /// The host's namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// The IPv4 address on the underlay.
    #[must_use]
    pub fn ipv4(&self) -> Ipv4Addr {
        underlay_addresses(self.index).0
    }

    /// The IPv6 address on the underlay.
    #[must_use]
    pub fn ipv6(&self) -> Ipv6Addr {
        underlay_addresses(self.index).1
    }

    /// The daemon's runtime directory, where its socket stands.
    #[must_use]
    pub fn runtime_directory(&self) -> PathBuf {
        self.directory.join("run")
    }

    /// The daemon's state directory.
    #[must_use]
    pub fn state_directory(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// The file that the daemon logs to; it goes on over restarts.
    #[must_use]
    pub fn log_file(&self) -> PathBuf {
        self.directory.join("daemon.log")
    }

    /// The daemon's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// Starts `weft launch --foreground` with further arguments and waits until it answers.
    ///
    /// # Errors
    /// [`SandboxError::DaemonEnded`] or [`SandboxError::DaemonSilent`], with the end of its log.
    pub fn start_daemon(&self, arguments: &[&str]) -> Result<(), SandboxError> {
        self.start_daemon_with(arguments, &[])
    }

    /// As [`Host::start_daemon`], with further environment variables.
    ///
    /// # Errors
    /// As [`Host::start_daemon`].
    pub fn start_daemon_with(
        &self,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<(), SandboxError> {
        self.spawn_daemon(arguments, environment)?;
        self.wait_answer()
    }

    /// As [`Host::start_daemon`], in the mount namespace of a process. A runtime with its own `/run` names its
    /// containers' namespaces by paths that lead nowhere else.
    ///
    /// # Errors
    /// As [`Host::start_daemon`].
    pub fn start_daemon_beside(
        &self,
        process: u32,
        arguments: &[&str],
    ) -> Result<(), SandboxError> {
        let mut command = self.netns.command("nsenter");
        command.args(["--target", &process.to_string(), "--mount"]).arg(&self.binary);
        self.spawn(command, arguments, &[])?;
        self.wait_answer()
    }

    /// Starts the daemon and does not wait: for tests of launches that must fail.
    ///
    /// # Errors
    /// [`SandboxError::Io`] if the program does not start.
    pub fn spawn_daemon(
        &self,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<(), SandboxError> {
        self.spawn(self.netns.command(&self.binary.to_string_lossy()), arguments, environment)
    }

    /// Waits for the daemon's end and returns its exit code (`None` if a signal ended it).
    ///
    /// # Errors
    /// [`SandboxError::CommandTimedOut`] after `limit`; the daemon is killed then.
    pub fn wait_daemon(&self, limit: Duration) -> Result<Option<i32>, SandboxError> {
        match self.daemon().take() {
            Some(mut daemon) => Ok(daemon.wait(limit)?.code()),
            None => Ok(None),
        }
    }

    /// Stops the daemon by `weft stop` and waits for its end.
    ///
    /// # Errors
    /// Returns an error if `weft stop` fails, or [`SandboxError::CommandTimedOut`].
    pub fn stop_daemon(&self) -> Result<(), SandboxError> {
        self.weft(&["stop"])?.success()?;
        self.wait_daemon(STOP_LIMIT)?;
        Ok(())
    }

    /// Kills the daemon as `kill -9` does.
    pub fn kill_daemon(&self) {
        if let Some(mut daemon) = self.daemon().take() {
            daemon.kill();
        }
    }

    /// The daemon's process id, while one runs.
    #[must_use]
    pub fn daemon_pid(&self) -> Option<u32> {
        self.daemon().as_ref().map(Running::pid)
    }

    /// Starts `weft` on this host and lets it run, as [`Netns::spawn`] does.
    ///
    /// # Errors
    /// [`SandboxError::Io`] if it does not start.
    pub fn spawn_weft(&self, arguments: &[&str]) -> Result<Running, SandboxError> {
        self.spawn_weft_with(arguments, &[])
    }

    /// As [`Host::spawn_weft`], with further environment variables.
    ///
    /// # Errors
    /// As [`Host::spawn_weft`].
    pub fn spawn_weft_with(
        &self,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Running, SandboxError> {
        let mut command = self.netns.command(&self.binary.to_string_lossy());
        command.arg("--runtime-dir").arg(self.runtime_directory()).args(arguments);
        command.envs(environment.iter().copied());
        Running::start(super::netns::piped(&mut command))
    }

    /// Runs a `weft` command on this host, as a user would.
    ///
    /// # Errors
    /// As [`Netns::exec`].
    pub fn weft(&self, arguments: &[&str]) -> Result<Output, SandboxError> {
        let mut command = self.netns.command(&self.binary.to_string_lossy());
        command.args(arguments);
        self.set_environment(&mut command);
        super::output_of(&mut command, super::host::LAUNCH_LIMIT * 3)
    }

    /// As [`Host::weft`], with a text on standard input.
    ///
    /// # Errors
    /// As [`Host::weft`].
    pub fn weft_with_input(&self, arguments: &[&str], input: &str) -> Result<Output, SandboxError> {
        const SCRIPT: &str = "printf %s \"$WEFT_LAB_INPUT\" | exec \"$0\" \"$@\"";
        let mut command = self.netns.command("sh");
        command.args(["-c", SCRIPT]).arg(&self.binary).args(arguments);
        command.env("WEFT_LAB_INPUT", input);
        self.set_environment(&mut command);
        super::output_of(&mut command, super::host::LAUNCH_LIMIT * 3)
    }

    /// Runs a `weft` command with `--json` and reads its answer.
    ///
    /// # Errors
    /// Returns an error if the command fails, or [`SandboxError::UnexpectedOutput`].
    pub fn weft_json(&self, arguments: &[&str]) -> Result<Value, SandboxError> {
        let mut words = arguments.to_vec();
        words.push("--json");
        self.weft(&words)?.success()?.json()
    }

    /// The connections that are active, as `weft status connections --json` lists them.
    ///
    /// # Errors
    /// As [`Host::weft_json`].
    pub fn active_connections(&self) -> Result<Vec<Value>, SandboxError> {
        let connections = self.weft_json(&["status", "connections"])?;
        let all = connections.as_array().cloned().unwrap_or_default();
        Ok(all.into_iter().filter(is_active).collect())
    }

    /// Waits until this host has this many active connections.
    ///
    /// # Errors
    /// [`SandboxError::WaitTimedOut`], or [`SandboxError::DaemonEnded`].
    pub fn wait_connected(&self, peers: usize, limit: Duration) -> Result<Duration, SandboxError> {
        let what = format!("{peers} active connection(s) on {}", self.nickname());
        try_wait_until(&what, limit, || {
            self.fail_if_ended()?;
            Ok(self.active_connections().is_ok_and(|active| active.len() >= peers))
        })
    }

    /// Makes a container on this host: a namespace, attached with an address of the daemon's choice.
    ///
    /// # Errors
    /// Returns an error if `weft attach` fails.
    pub fn add_container(&self, name: &str) -> Result<Container, SandboxError> {
        self.add_container_with(name, &[])
    }

    /// As [`Host::add_container`], with further arguments of `weft attach`, such as addresses (`ADDR/LEN`).
    ///
    /// # Errors
    /// Returns an error if `weft attach` fails.
    pub fn add_container_with(
        &self,
        name: &str,
        arguments: &[&str],
    ) -> Result<Container, SandboxError> {
        let netns = Netns::create(format!("{}-{name}", self.netns.name()))?;
        let path = netns.path();
        let mut words = vec!["attach"];
        words.extend_from_slice(arguments);
        words.push(&path);
        if let Err(error) = self.weft(&words)?.success() {
            run(Command::new("ip").args(["netns", "del", netns.name()]))?;
            return Err(error);
        }
        let container = Container { name: name.to_owned(), netns };
        wait_until(&format!("an address in container {name}"), STOP_LIMIT, || {
            container.ipv4().is_ok()
        })?;
        Ok(container)
    }

    /// Ends the daemon, killing it if it does not end by itself.
    pub(super) fn end_daemon(&self) {
        if let Some(mut daemon) = self.daemon().take() {
            let _ = daemon.terminate(STOP_LIMIT);
        }
    }

    /// Lets the daemon run on.
    pub(super) fn release(self) {
        if let Some(daemon) = self.daemon().take() {
            daemon.release();
        }
    }

    fn daemon(&self) -> MutexGuard<'_, Option<Running>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(
        &self,
        mut command: Command,
        arguments: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<(), SandboxError> {
        let path = self.log_file();
        let log = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(SandboxError::io(format!("open {}", path.display())))?;
        command.args(["launch", "--foreground", "--nickname", &self.nickname()]).args(arguments);
        self.set_environment(&mut command);
        command.envs(environment.iter().copied());
        let daemon = Running::start(super::netns::logged(&mut command, &log)?)?;
        *self.daemon() = Some(daemon);
        Ok(())
    }

    fn wait_answer(&self) -> Result<(), SandboxError> {
        let what = format!("the daemon of {}", self.nickname());
        let waited = try_wait_until(&what, LAUNCH_LIMIT, || {
            self.fail_if_ended()?;
            Ok(self.weft(&["status"])?.status.success())
        });
        match waited {
            Err(SandboxError::WaitTimedOut { limit, .. }) => Err(SandboxError::DaemonSilent {
                host: self.nickname(),
                limit,
                log: last_lines(&self.log(), LOG_LINES_MAX),
            }),
            waited => waited.map(drop),
        }
    }

    fn fail_if_ended(&self) -> Result<(), SandboxError> {
        let Some(status) = (match self.daemon().as_mut() {
            Some(daemon) => daemon.ended()?,
            None => None,
        }) else {
            return Ok(());
        };
        Err(SandboxError::DaemonEnded {
            host: self.nickname(),
            status: status.to_string(),
            log: last_lines(&self.log(), LOG_LINES_MAX),
        })
    }

    fn set_environment(&self, command: &mut std::process::Command) {
        command.env("WEFT_RUNTIME_DIR", self.runtime_directory());
        command.env("WEFT_STATE_DIR", self.state_directory());
        // All hosts of the sandbox share the place where Docker looks.
        command.env("WEFT_DOCKER_PLUGIN", "off");
    }
}

/// A container: a namespace attached to a host. It goes with its sandbox.
#[derive(Debug, Clone)]
pub struct Container {
    name: String,
    netns: Netns,
}

impl Container {
    /// The name that the caller gave it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Its global addresses, as the kernel has them.
    ///
    /// # Errors
    /// Returns an error if `ip` fails.
    pub fn addresses(&self) -> Result<Vec<IpAddr>, SandboxError> {
        let output = super::run(std::process::Command::new("ip").args([
            "-j",
            "-n",
            self.netns.name(),
            "addr",
            "show",
        ]))?;
        Ok(global_addresses(&output.json()?))
    }

    /// Its first IPv4 address.
    ///
    /// # Errors
    /// [`SandboxError::UnexpectedOutput`] where it has none.
    pub fn ipv4(&self) -> Result<Ipv4Addr, SandboxError> {
        let found = self.addresses()?.into_iter().find_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        found.ok_or_else(|| self.without("IPv4"))
    }

    /// Its first global IPv6 address.
    ///
    /// # Errors
    /// [`SandboxError::UnexpectedOutput`] where it has none.
    pub fn ipv6(&self) -> Result<Ipv6Addr, SandboxError> {
        let found = self.addresses()?.into_iter().find_map(|address| match address {
            IpAddr::V6(address) => Some(address),
            IpAddr::V4(_) => None,
        });
        found.ok_or_else(|| self.without("IPv6"))
    }

    /// The MTU of the device that has the address, in bytes.
    ///
    /// # Errors
    /// [`SandboxError::UnexpectedOutput`] where there is none.
    pub fn mtu(&self) -> Result<u32, SandboxError> {
        let output = super::run(std::process::Command::new("ip").args([
            "-j",
            "-n",
            self.netns.name(),
            "addr",
            "show",
        ]))?;
        let json = output.json()?;
        let links = json.as_array().map(Vec::as_slice).unwrap_or_default();
        let link = links
            .iter()
            .find(|link| !global_addresses(&Value::Array(vec![(*link).clone()])).is_empty());
        let mtu = link.and_then(|link| link.get("mtu")?.as_u64()).and_then(|m| m.try_into().ok());
        mtu.ok_or_else(|| self.without("IPv4"))
    }

    /// Runs a command in the container to its end.
    ///
    /// # Errors
    /// As [`Netns::exec`].
    pub fn exec(&self, words: &[&str]) -> Result<Output, SandboxError> {
        self.netns.exec(words)
    }

    /// Starts a command in the container; it is killed when the value is dropped.
    ///
    /// # Errors
    /// As [`Netns::spawn`].
    pub fn spawn(&self, words: &[&str]) -> Result<Running, SandboxError> {
        self.netns.spawn(words)
    }

    /// Sends three pings and wants all of them answered.
    ///
    /// # Errors
    /// Returns an error if `ping` fails.
    pub fn ping(&self, address: IpAddr) -> Result<Output, SandboxError> {
        let address = address.to_string();
        self.exec(&["ping", "-n", "-c", "3", "-i", "0.2", "-W", "2", &address])?.success()
    }

    fn without(&self, family: &str) -> SandboxError {
        SandboxError::UnexpectedOutput {
            command: format!("ip -n {} addr", self.netns.name()),
            why: format!("container {} has no {family} address", self.name),
        }
    }
}

fn is_active(connection: &Value) -> bool {
    connection.get("state").and_then(Value::as_str) == Some("active")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_state_active_counts_as_connected() {
        assert!(is_active(&serde_json::json!({"state": "active"})));
        assert!(!is_active(&serde_json::json!({"state": "failed"})));
        assert!(!is_active(&serde_json::json!({})));
    }
}
