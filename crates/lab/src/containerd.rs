//! Real containerds on hosts of the lab, which run containers on networks of CNI by `ctr`. Each has its own mount
//! namespace, and so its own directories of plugins and configurations.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use weft_bench::sandbox::{Host, Running, Sandbox, try_wait_until};

use crate::docker::{pack, remove_control_groups};
use crate::packages::Unpacked;

/// containerd with all that it runs.
const PACKAGES: [&str; 3] = ["containerd", "runc", "busybox-static"];
/// How long it may take to start.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Becomes containerd. Its argument: a directory.
const START: &str = r#"set -e
mount -t tmpfs -o mode=755 tmpfs "$1/scratch"
mkdir "$1/scratch/upper" "$1/scratch/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$1/scratch/upper,workdir=$1/scratch/work" etc /etc
sandbox=${1%/*}
mount --rbind "$sandbox" /mnt
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p "$sandbox"
mount --move /mnt "$sandbox"
mount -t tmpfs -o mode=755 tmpfs /opt
exec containerd --address "$1/containerd.sock" --root "$1/data" --state /run/containerd
"#;

/// A containerd on a host.
pub struct Containerd {
    directory: PathBuf,
    programs: Unpacked,
    running: Running,
    containers: Vec<String>,
    /// containerd's name space of the containers, and so their control group.
    group: String,
}

impl Containerd {
    /// Starts one and waits until it answers.
    ///
    /// # Errors
    /// A program is missing, or it does not start.
    pub fn start(sandbox: &Sandbox, host: &Host) -> anyhow::Result<Self> {
        let programs = Unpacked::of(&PACKAGES)?;
        let directory = sandbox.directory().join(format!("containerd-{}", host.index()));
        for name in ["scratch", "data"] {
            std::fs::create_dir_all(directory.join(name))?;
        }
        let busybox = programs.program("busybox")?;
        pack(&busybox, &directory.join("root"), &directory.join("root.tar"))?;
        let log = File::options().create(true).append(true).open(directory.join("log"))?;
        let net = format!("--net={}", host.netns().path());
        let text = directory.to_string_lossy().into_owned();
        let own = std::process::id().to_string();
        // `ip netns exec` hides the control groups: back into the mount namespace of this process.
        let words = ["nsenter", "--target", &own, "--mount", &net, "unshare", "--mount"];
        let script = ["--propagation", "private", "sh", "-c", START, "sh", &text];
        let environment = programs.environment();
        let environment: Vec<&str> = environment.iter().map(String::as_str).collect();
        let words = [&environment[..], &words[..], &script[..]].concat();
        let running = host.netns().spawn_logged(&words, &log)?;
        let (containers, group) = (Vec::new(), host.netns().name().to_owned());
        let containerd = Self { directory, programs, running, containers, group };
        let answers = || Ok(containerd.ctr(&["version"]).is_ok());
        try_wait_until("containerd", START_LIMIT, answers)?;
        Ok(containerd)
    }

    /// Runs a program in the mount and network namespaces of this containerd.
    ///
    /// # Errors
    /// With the program's complaint.
    pub fn exec(&self, words: &[&str]) -> anyhow::Result<String> {
        let output = self.inside(words).output().with_context(|| format!("{words:?}"))?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{words:?}: {}", complaint.trim());
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    /// Runs `ctr` with these words.
    ///
    /// # Errors
    /// With its complaint.
    pub fn ctr(&self, words: &[&str]) -> anyhow::Result<String> {
        let ctr = self.ctr_words()?;
        let ctr = ctr.each_ref().map(String::as_str);
        self.exec(&[&ctr, words].concat())
    }

    fn ctr_words(&self) -> anyhow::Result<[String; 5]> {
        let socket = self.directory.join("containerd.sock").to_string_lossy().into_owned();
        let ctr = self.programs.program("ctr")?.to_string_lossy().into_owned();
        Ok([ctr, "--address".into(), socket, "--namespace".into(), self.group.clone()])
    }

    /// A command in the mount and network namespaces of this containerd.
    fn inside(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        let target = self.running.pid().to_string();
        command.args(["--target", &target, "--mount", "--net"]).args(words);
        command
    }

    /// Runs a container on CNI's network to its end, and returns its output.
    ///
    /// # Errors
    /// With the complaint of `ctr`.
    pub fn run(&self, name: &str, words: &[&str]) -> anyhow::Result<String> {
        let root = self.root();
        self.ctr(&[&["run", "--rm", "--cni", "--rootfs", &root, name], words].concat())
    }

    /// Starts a container on CNI's network. `ctr` never sends DEL for it.
    ///
    /// # Errors
    /// With the complaint of `ctr`.
    pub fn start_container(&mut self, name: &str, words: &[&str]) -> anyhow::Result<()> {
        self.containers.push(name.to_owned());
        let root = self.root();
        self.ctr(&[&["run", "--detach", "--cni", "--rootfs", &root, name], words].concat())?;
        Ok(())
    }

    /// Ends a container that was started, without a word to CNI.
    ///
    /// # Errors
    /// With the complaint of `ctr`.
    pub fn end_container(&mut self, name: &str) -> anyhow::Result<()> {
        self.containers.retain(|other| other != name);
        self.ctr(&["task", "rm", "--force", name])?;
        self.ctr(&["container", "rm", name]).map(drop)
    }

    /// As [`Containerd::run`], and does not wait: `ctr` sends DEL once the container has ended.
    ///
    /// # Errors
    /// `ctr` does not start.
    pub fn spawn(&self, name: &str, words: &[&str]) -> anyhow::Result<Child> {
        let (ctr, root) = (self.ctr_words()?, self.root());
        let ctr = ctr.each_ref().map(String::as_str);
        let run = ["run", "--rm", "--cni", "--rootfs", &root, name];
        let mut command = self.inside(&[&ctr, &run[..], words].concat());
        Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?)
    }

    /// Kills a container's process.
    ///
    /// # Errors
    /// With the complaint of `ctr`.
    pub fn kill(&self, name: &str) -> anyhow::Result<()> {
        self.ctr(&["task", "kill", "--signal", "SIGKILL", name]).map(drop)
    }

    fn root(&self) -> String {
        self.directory.join("root").to_string_lossy().into_owned()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        for name in std::mem::take(&mut self.containers) {
            let _ = self.end_container(&name);
        }
        remove_control_groups(&self.group);
    }
}
