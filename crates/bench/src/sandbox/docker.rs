//! Real Docker engines on hosts. Each ends with all its containers; most have their own process namespaces for that.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::netns::{Output, Running, output_of};
use super::programs::Programs;
use super::progress;
use super::secluded::{Secluded, make_directories, pack};
use super::{Host, Sandbox, SandboxError};

/// The image of all containers: busybox alone.
pub const IMAGE: &str = "busybox:lab";
/// Packages with the engine and all that it runs.
pub const PACKAGES: [&str; 4] = ["docker.io", "containerd", "runc", "busybox-static"];
/// Limit of a command of `docker`.
const COMMAND_LIMIT: Duration = Duration::from_secs(120);

/// How long an engine that is asked to end may take to end its containers.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Becomes the engine. Its default filter of system calls needs a runc that was built with libseccomp.
const START: &str = r#"mount -t proc proc /proc
mkdir -p /run/docker/plugins
mount --bind "$directory/plugins" /run/docker/plugins
set --
runc --version | grep -q libseccomp || set -- --seccomp-profile unconfined
exec dockerd --host "unix://$directory/docker.sock" --data-root "$directory/data" --pidfile /run/docker.pid \
  --storage-driver vfs --exec-opt native.cgroupdriver=cgroupfs --bridge none --iptables=false --ip6tables=false \
  --ip-forward=false --ip-masq=false --cgroup-parent "/$group" "$@"
"#;

/// An engine on a host, with Weft's plugin.
#[derive(Debug)]
pub struct Engine {
    directory: PathBuf,
    programs: Programs,
    limit: Duration,
    /// Its containers are in its own process namespace.
    has_own_processes: bool,
    running: Mutex<Option<Running>>,
}

impl Engine {
    /// The arguments of `weft launch` for a host with an engine. Makes the engine's directory.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn launch_arguments(sandbox: &Sandbox, host: &Host) -> Result<Vec<String>, SandboxError> {
        let directory = directory_of(sandbox, host);
        make_directories(&directory, &["plugins", "data"])?;
        let file = |name: &str| directory.join(name).to_string_lossy().into_owned();
        let [plugin, socket] = ["plugins/weft.sock", "docker.sock"].map(file);
        Ok(["--docker-plugin", &plugin, "--docker-socket", &socket].map(str::to_owned).into())
    }

    /// Starts an engine on a host and waits until it answers, and has the image. `limit` is for each start of it.
    ///
    /// # Errors
    /// A program is missing, or the engine does not start.
    pub fn start(
        sandbox: &Sandbox,
        host: &Host,
        programs: Programs,
        limit: Duration,
    ) -> Result<Self, SandboxError> {
        Self::start_with((sandbox, host), programs, limit, true)
    }

    /// As [`Engine::start`], and Weft finds the namespaces of its containers, as `weft attach` has to: they are
    /// processes of this machine. Such an engine is stopped, not killed.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_open(
        sandbox: &Sandbox,
        host: &Host,
        programs: Programs,
        limit: Duration,
    ) -> Result<Self, SandboxError> {
        Self::start_with((sandbox, host), programs, limit, false)
    }

    fn start_with(
        (sandbox, host): (&Sandbox, &Host),
        programs: Programs,
        limit: Duration,
        has_own_processes: bool,
    ) -> Result<Self, SandboxError> {
        let (directory, running) = (directory_of(sandbox, host), Mutex::default());
        let engine = Self { directory, programs, limit, has_own_processes, running };
        engine.start_again(host)?;
        engine.import()?;
        Ok(engine)
    }

    /// Starts the engine after it has ended.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_again(&self, host: &Host) -> Result<(), SandboxError> {
        let secluded = Secluded {
            what: "the Docker engine",
            directory: &self.directory,
            programs: &self.programs,
            script: START,
            has_own_processes: self.has_own_processes,
            limit: self.limit,
        };
        let answers = || self.run(&["info"]).is_ok();
        *self.running() = Some(secluded.start(host, answers)?);
        Ok(())
    }

    /// Kills the engine with all its containers, as a crash of the host does.
    pub fn kill(&self) {
        if let Some(mut running) = self.running().take() {
            running.kill();
        }
    }

    /// Asks the engine to end, as a restart of its service does. It ends its containers before.
    ///
    /// # Errors
    /// It does not end in time.
    pub fn stop(&self) -> Result<(), SandboxError> {
        self.running().take().map_or(Ok(()), |mut it| it.terminate(STOP_LIMIT).map(drop))
    }

    /// The engine's socket, as the address in `DOCKER_HOST`.
    #[must_use]
    pub fn address_of_socket(&self) -> String {
        format!("unix://{}", self.directory.join("docker.sock").display())
    }

    /// Runs `docker` with these words; the caller judges the status.
    ///
    /// # Errors
    /// The program does not start, or does not end in time.
    pub fn docker(&self, words: &[&str]) -> Result<Output, SandboxError> {
        let socket = self.address_of_socket();
        let mut command = Command::new(self.programs.program("docker")?);
        output_of(command.args(["--host", &socket]).args(words), COMMAND_LIMIT)
    }

    /// As [`Engine::docker`], and wants it to succeed; returns standard output without the last line break.
    ///
    /// # Errors
    /// With the program's complaint.
    pub fn run(&self, words: &[&str]) -> Result<String, SandboxError> {
        Ok(self.docker(words)?.success()?.stdout.trim_end().to_owned())
    }

    /// As [`Engine::docker`], and wants it to fail; returns the complaint.
    ///
    /// # Errors
    /// It succeeded.
    pub fn refused(&self, words: &[&str]) -> Result<String, SandboxError> {
        let output = self.docker(words)?;
        if output.status.success() {
            let why = "it succeeded".to_owned();
            return Err(SandboxError::UnexpectedOutput { command: output.command, why });
        }
        Ok(output.stderr.trim().to_owned())
    }

    /// `docker inspect` of an object.
    ///
    /// # Errors
    /// There is no such object.
    pub fn inspect(&self, object: &str) -> Result<Value, SandboxError> {
        Ok(self.docker(&["inspect", object])?.success()?.json()?[0].take())
    }

    /// A container's address on a network.
    ///
    /// # Errors
    /// There is no such container, or it is not on the network.
    pub fn address(&self, container: &str, network: &str) -> Result<String, SandboxError> {
        let found = self.inspect(container)?;
        let address = found["NetworkSettings"]["Networks"][network]["IPAddress"].as_str();
        let address = address.filter(|address| !address.is_empty()).map(str::to_owned);
        address.ok_or_else(|| SandboxError::UnexpectedOutput {
            command: format!("docker inspect {container}"),
            why: format!("no address on {network}: {found}"),
        })
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn import(&self) -> Result<(), SandboxError> {
        if self.docker(&["image", "inspect", IMAGE])?.status.success() {
            return Ok(());
        }
        let archive = self.directory.join("image.tar");
        pack(&self.programs, &self.directory.join("root"), &archive)?;
        let archive = archive.to_string_lossy();
        self.run(&["import", "--change", r#"CMD ["/bin/sh"]"#, &archive, IMAGE]).map(drop)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.has_own_processes {
            self.kill();
        } else if let Err(error) = self.stop() {
            progress::note(&format!("left behind: {error}"));
        }
    }
}

fn directory_of(sandbox: &Sandbox, host: &Host) -> PathBuf {
    Path::new(sandbox.directory()).join(format!("docker-{}", host.index()))
}
