//! Pods as Kubernetes has them: `crictl` asks a containerd of the lab by the Container Runtime Interface.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};
use weft::doctor::find_program;

use crate::containerd::{Containerd, IMAGE};

/// The side of a containerd that Kubernetes asks. Its pods end with it.
pub struct Cri<'a> {
    containerd: &'a Containerd,
    crictl: [String; 5],
    directory: PathBuf,
}

/// A pod with one container.
pub struct Pod {
    /// Its id.
    pub id: String,
    /// Its container's id.
    pub container: String,
}

impl<'a> Cri<'a> {
    /// Gives a containerd the image.
    ///
    /// # Errors
    /// There is no `crictl` in `PATH`, or the image cannot be made or imported.
    pub fn of(containerd: &'a Containerd) -> anyhow::Result<Self> {
        let program = find_program("crictl").context("crictl is not in PATH")?;
        let directory = containerd.directory().to_owned();
        let place = directory.to_string_lossy().into_owned();
        containerd.import("k8s.io")?;
        let socket = format!("unix://{place}/containerd.sock");
        let program = program.to_string_lossy().into_owned();
        let words = ["--config", "/dev/null", "--runtime-endpoint", &socket].map(str::to_owned);
        let [config, null, endpoint, socket] = words;
        let crictl = [program, config, null, endpoint, socket];
        Ok(Self { containerd, crictl, directory })
    }

    /// Runs `crictl` with these words.
    ///
    /// # Errors
    /// With its complaint.
    pub fn crictl(&self, words: &[&str]) -> anyhow::Result<String> {
        let crictl = self.crictl.each_ref().map(String::as_str);
        self.containerd.exec(&[&crictl, words].concat())
    }

    /// Runs a pod of a namespace, with a container. The pod asks `server` for names, and completes them as pods of
    /// Kubernetes do.
    ///
    /// # Errors
    /// With the complaint of `crictl`.
    pub fn start(
        &self,
        (namespace, name): (&str, &str),
        server: &str,
        words: &[&str],
    ) -> anyhow::Result<Pod> {
        let metadata = json!({ "name": name, "namespace": namespace, "uid": name });
        let dns =
            json!({ "servers": [server], "searches": ["weft.local"], "options": ["ndots:5"] });
        let pod = json!({
            "metadata": metadata, "hostname": name, "log_directory": self.directory,
            "dns_config": dns, "linux": { "cgroup_parent": self.containerd.control_group() },
        });
        let container = json!({
            "metadata": { "name": "c" }, "image": { "image": IMAGE }, "command": words,
            "log_path": format!("{name}.log"), "linux": {},
        });
        let pod = self.written(&format!("{name}.pod"), &pod)?;
        let container = self.written(&format!("{name}.container"), &container)?;
        let id = self.crictl(&["runp", &pod])?;
        let container = self.crictl(&["create", "--no-pull", &id, &container, &pod])?;
        self.crictl(&["start", &container])?;
        Ok(Pod { id, container })
    }

    /// A pod's address, as Kubernetes is told it.
    ///
    /// # Errors
    /// It has none.
    pub fn address(&self, pod: &Pod) -> anyhow::Result<String> {
        let shown: Value = serde_json::from_str(&self.crictl(&["inspectp", &pod.id])?)?;
        let address = shown["status"]["network"]["ip"].as_str().map(str::to_owned);
        address.with_context(|| format!("no address: {shown}"))
    }

    /// Runs a command in a pod's container.
    ///
    /// # Errors
    /// It fails.
    pub fn exec(&self, pod: &Pod, words: &[&str]) -> anyhow::Result<String> {
        self.crictl(&[&["exec", &pod.container], words].concat())
    }

    fn written(&self, name: &str, config: &Value) -> anyhow::Result<String> {
        let file: &Path = &self.directory.join(name);
        std::fs::write(file, config.to_string()).with_context(|| file.display().to_string())?;
        Ok(file.to_string_lossy().into_owned())
    }
}

impl Drop for Cri<'_> {
    fn drop(&mut self) {
        let _ = self.crictl(&["rmp", "--force", "--all"]);
    }
}
