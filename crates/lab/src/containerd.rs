//! Real containerds on hosts of the lab, which run containers on networks of CNI by `ctr`.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use weft_bench::sandbox::secluded::{Secluded, make_directories, pack};
use weft_bench::sandbox::{Host, Programs, Running, Sandbox};

use crate::packages::unpacked;

/// containerd with all that it runs.
const PACKAGES: [&str; 3] = ["containerd", "runc", "busybox-static"];
/// How long it may take to start.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Becomes containerd.
const START: &str = r#"exec containerd --address "$directory/containerd.sock" --root "$directory/data" \
  --state /run/containerd
"#;

/// A containerd on a host.
pub struct Containerd {
    directory: PathBuf,
    programs: Programs,
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
        let programs = unpacked(&PACKAGES)?;
        let directory = sandbox.directory().join(format!("containerd-{}", host.index()));
        make_directories(&directory, &["data"])?;
        pack(&programs, &directory.join("root"), &directory.join("root.tar"))?;
        let secluded = Secluded {
            what: "containerd",
            directory: &directory,
            programs: &programs,
            script: START,
            has_own_processes: false,
            limit: START_LIMIT,
        };
        let ctr = programs.program("ctr")?;
        let answers = || {
            let mut command = Command::new(&ctr);
            command.arg("--address").arg(directory.join("containerd.sock")).arg("version");
            command.output().is_ok_and(|output| output.status.success())
        };
        let running = secluded.start(host, answers)?;
        let (containers, group) = (Vec::new(), host.netns().name().to_owned());
        Ok(Self { directory, programs, running, containers, group })
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
    }
}
