//! Real Docker engines on hosts of the lab. Each has its own mount and process namespaces, so that two engines on
//! one machine have a plugin directory each, and end with all their containers.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Host, Running, Sandbox, try_wait_until};

use crate::packages::Unpacked;

/// The image of all containers: busybox alone.
pub const IMAGE: &str = "busybox:lab";
/// The engine with all that it runs.
const PACKAGES: [&str; 4] = ["docker.io", "containerd", "runc", "busybox-static"];
/// How long an engine may take to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Becomes the engine. Its arguments: the engine's directory, and its control group. `/run` is empty but for the
/// sandbox, and `/etc` a copy on write, since dockerd writes a key there.
const START: &str = r#"set -e
directory=$1
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs "$directory/scratch"
mkdir "$directory/scratch/upper" "$directory/scratch/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$directory/scratch/upper,workdir=$directory/scratch/work" etc /etc
sandbox=${directory%/*}
mount --rbind "$sandbox" /mnt
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p "$sandbox" /run/docker/plugins
mount --move /mnt "$sandbox"
mount --bind "$directory/plugins" /run/docker/plugins
exec dockerd --host "unix://$directory/docker.sock" --data-root "$directory/data" --pidfile /run/docker.pid \
  --storage-driver vfs --exec-opt native.cgroupdriver=cgroupfs --bridge none --iptables=false --ip6tables=false \
  --ip-forward=false --ip-masq=false --cgroup-parent "/$2"
"#;

/// Removes a control group of every hierarchy with all in it, once its processes have ended. Its argument: the group.
const REMOVE_GROUPS: &str = r#"for try in $(seq 50); do
  left=
  for group in "/sys/fs/cgroup/$1" /sys/fs/cgroup/*/"$1"; do
    [ -d "$group" ] || continue
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || left=1
  done
  [ "$left" ] || exit 0
  sleep 0.1
done"#;

/// Makes the root file system of the image, and packs it. Its arguments: a directory, the archive
/// and busybox.
const PACK: &str = r#"set -e
mkdir -p "$1/bin" "$1/etc" "$1/tmp" "$1/proc" "$1/sys" "$1/dev"
cp "$3" "$1/bin/busybox"
for name in $("$3" --list); do [ "$name" = busybox ] || ln -sf busybox "$1/bin/$name"; done
echo root:x:0:0::/:/bin/sh >"$1/etc/passwd"
tar -C "$1" -cf "$2" .
"#;

/// An engine on a host, with Weft's plugin.
pub struct Engine {
    directory: PathBuf,
    network_namespace: String,
    programs: Unpacked,
    running: Mutex<Option<Running>>,
}

impl Engine {
    /// The arguments of `weft launch` for a host with an engine. Makes the engine's directory.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn launch_arguments(sandbox: &Sandbox, host: &Host) -> anyhow::Result<Vec<String>> {
        let directory = directory_of(sandbox, host);
        for name in ["plugins", "scratch", "data"] {
            std::fs::create_dir_all(directory.join(name))?;
        }
        let file = |name: &str| directory.join(name).to_string_lossy().into_owned();
        let [plugin, socket] = ["plugins/weft.sock", "docker.sock"].map(file);
        Ok(["--docker-plugin", &plugin, "--docker-socket", &socket].map(str::to_owned).into())
    }

    /// Starts an engine on a host and waits until it answers.
    ///
    /// # Errors
    /// A program is missing, or the engine does not start.
    pub fn start(sandbox: &Sandbox, host: &Host) -> anyhow::Result<Self> {
        let programs = Unpacked::of(&PACKAGES)?;
        let (directory, network_namespace) = (directory_of(sandbox, host), host.netns().path());
        let running = Mutex::default();
        let engine = Self { directory, network_namespace, programs, running };
        engine.start_again(host)?;
        engine.import()?;
        Ok(engine)
    }

    /// Starts the engine after it has ended.
    ///
    /// # Errors
    /// As [`Engine::start`].
    pub fn start_again(&self, host: &Host) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(self.log())?;
        let net = format!("--net={}", self.network_namespace);
        let directory = self.directory.to_string_lossy().into_owned();
        let own = std::process::id().to_string();
        // `ip netns exec` hides the control groups: back into the mount namespace of this process.
        let words =
            ["nsenter", "--target", &own, "--mount", &net, "unshare", "--mount", "--pid", "--fork"];
        let group = self.group();
        let script = [
            "--kill-child",
            "--propagation",
            "private",
            "sh",
            "-c",
            START,
            "sh",
            &directory,
            &group,
        ];
        let environment = self.programs.environment();
        let environment: Vec<&str> = environment.iter().map(String::as_str).collect();
        let words = [&environment[..], &words[..], &script[..]].concat();
        *self.running() = Some(host.netns().spawn_logged(&words, &log)?);
        let answers = || Ok(self.docker(&["info"]).is_ok_and(|output| output.status.success()));
        try_wait_until("the Docker engine", START_LIMIT, answers).with_context(|| {
            let log = std::fs::read_to_string(self.log()).unwrap_or_default();
            let lines: Vec<&str> = log.lines().rev().take(5).collect();
            lines.join("\n")
        })?;
        Ok(())
    }

    /// Kills the engine with all its containers, as a crash of the host does.
    pub fn kill(&self) {
        if let Some(mut running) = self.running().take() {
            running.kill();
        }
    }

    /// Runs `docker` with these words.
    ///
    /// # Errors
    /// The program does not start.
    pub fn docker(&self, words: &[&str]) -> anyhow::Result<std::process::Output> {
        let socket = format!("unix://{}", self.directory.join("docker.sock").display());
        let output = Command::new(self.programs.program("docker")?)
            .args(["--host", &socket])
            .args(words)
            .output();
        output.with_context(|| format!("docker {words:?}"))
    }

    /// As [`Engine::docker`], and wants it to succeed; returns standard output without the last line break.
    ///
    /// # Errors
    /// With the program's complaint.
    pub fn run(&self, words: &[&str]) -> anyhow::Result<String> {
        let output = self.docker(words)?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "docker {words:?}: {}", complaint.trim());
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    /// As [`Engine::docker`], and wants it to fail; returns the complaint.
    ///
    /// # Errors
    /// It succeeded.
    pub fn refused(&self, words: &[&str]) -> anyhow::Result<String> {
        let output = self.docker(words)?;
        ensure!(!output.status.success(), "docker {words:?} succeeded");
        Ok(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }

    /// `docker inspect` of an object.
    ///
    /// # Errors
    /// There is no such object.
    pub fn inspect(&self, object: &str) -> anyhow::Result<Value> {
        let mut all: Vec<Value> = serde_json::from_str(&self.run(&["inspect", object])?)?;
        all.pop().with_context(|| format!("docker inspect {object} shows nothing"))
    }

    /// A container's address on a network.
    ///
    /// # Errors
    /// There is no such container, or it is not on the network.
    pub fn address(&self, container: &str, network: &str) -> anyhow::Result<String> {
        let found = self.inspect(container)?;
        let address = found["NetworkSettings"]["Networks"][network]["IPAddress"].as_str();
        let address = address.filter(|address| !address.is_empty()).map(str::to_owned);
        address.with_context(|| format!("{container} has no address on {network}: {found}"))
    }

    /// The end of the engine's log, for failures.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.directory.join("dockerd.log")
    }

    /// The control group of its containers.
    fn group(&self) -> String {
        let name = Path::new(&self.network_namespace).file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn import(&self) -> anyhow::Result<()> {
        if self.docker(&["image", "inspect", IMAGE])?.status.success() {
            return Ok(());
        }
        let archive = self.directory.join("image.tar");
        pack(&self.programs.program("busybox")?, &self.directory.join("root"), &archive)?;
        let archive = archive.to_string_lossy().into_owned();
        self.run(&["import", "--change", r#"CMD ["/bin/sh"]"#, &archive, IMAGE]).map(drop)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.kill();
        remove_control_groups(&self.group());
    }
}

/// Removes a control group with all in it.
pub(crate) fn remove_control_groups(group: &str) {
    let _ = Command::new("sh").args(["-c", REMOVE_GROUPS, "sh", group]).output();
}

/// Makes a root file system with busybox alone, and packs it.
pub(crate) fn pack(busybox: &Path, root: &Path, archive: &Path) -> anyhow::Result<()> {
    let words = [root, archive, busybox];
    let packed = Command::new("sh").args(["-c", PACK, "sh"]).args(words).output()?;
    let complaint = String::from_utf8_lossy(&packed.stderr);
    ensure!(packed.status.success(), "cannot pack busybox: {complaint}");
    Ok(())
}

fn directory_of(sandbox: &Sandbox, host: &Host) -> PathBuf {
    Path::new(sandbox.directory()).join(format!("docker-{}", host.index()))
}
