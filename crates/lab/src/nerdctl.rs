//! nerdctl on hosts of the lab, each with a containerd of today.

use anyhow::Context;
use serde_json::Value;
use weft_bench::sandbox::{Host, Programs, Sandbox};

use crate::containerd::{Containerd, IMAGE};
use crate::inside::Inside;

/// containerd's name space of all containers.
const NAME_SPACE: &str = "default";

/// nerdctl on a host.
pub struct Nerdctl {
    words: Vec<String>,
    containerd: Containerd,
}

impl Nerdctl {
    /// Starts a containerd of these programs on a host, and gives it the image.
    ///
    /// # Errors
    /// A program is missing, or containerd does not start.
    pub fn start(programs: &Programs, sandbox: &Sandbox, host: &Host) -> anyhow::Result<Self> {
        let containerd = Containerd::start_with(programs.clone(), sandbox, host)?;
        containerd.import(NAME_SPACE)?;
        let program = programs.program("nerdctl")?.to_string_lossy().into_owned();
        let socket = containerd.socket();
        let places = ["--cni-path", "/opt/cni/bin", "--cni-netconfpath", "/etc/cni/net.d"];
        let words = [&[&program, "--address", &socket, "--namespace", NAME_SPACE], &places[..]];
        let words = words.concat().into_iter().chain(["--cgroup-manager", "cgroupfs"]);
        Ok(Self { words: words.map(str::to_owned).collect(), containerd })
    }

    /// Where nerdctl's files are.
    #[must_use]
    pub fn inside(&self) -> Inside {
        self.containerd.inside()
    }

    /// Runs `nerdctl` with these words.
    ///
    /// # Errors
    /// With its complaint.
    pub fn nerdctl(&self, words: &[&str]) -> anyhow::Result<String> {
        let own: Vec<&str> = self.words.iter().map(String::as_str).collect();
        self.inside().exec(&[&own, words].concat())
    }

    /// Runs a container of the image, with options of `nerdctl run`. Its runc may lack a filter of system calls.
    ///
    /// # Errors
    /// With the complaint of `nerdctl`.
    pub fn run(&self, name: &str, options: &[&str], words: &[&str]) -> anyhow::Result<String> {
        let group = self.containerd.control_group();
        let run = ["run", "--name", name, "--pull", "never", "--cgroup-parent", &group];
        let open = ["--security-opt", "seccomp=unconfined"];
        self.nerdctl(&[&run[..], &open, options, &[IMAGE], words].concat())
    }

    /// A container's first address, as nerdctl shows it.
    ///
    /// # Errors
    /// It has none.
    pub fn address(&self, container: &str) -> anyhow::Result<String> {
        let found: Value = serde_json::from_str(&self.nerdctl(&["inspect", container])?)?;
        let address = found[0]["NetworkSettings"]["IPAddress"].as_str().map(str::to_owned);
        let address = address.filter(|address| !address.is_empty());
        address.with_context(|| format!("{container} has no address: {found}"))
    }
}

impl Drop for Nerdctl {
    fn drop(&mut self) {
        let all = self.nerdctl(&["ps", "--all", "--quiet"]).unwrap_or_default();
        let all: Vec<&str> = all.lines().collect();
        if !all.is_empty() {
            let _ = self.nerdctl(&[&["rm", "--force"], &all[..]].concat());
        }
    }
}
