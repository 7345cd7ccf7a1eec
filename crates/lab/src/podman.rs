//! Podman of Debian's package on hosts of the lab, with networks of CNI.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use weft_bench::sandbox::secluded::{Secluded, make_directories, pack};
use weft_bench::sandbox::{Host, Programs, Running, Sandbox};

use crate::inside::Inside;
use crate::packages::unpacked;

/// The image of all containers: busybox alone.
pub const IMAGE: &str = "localhost/busybox:lab";
/// Podman with all that it runs.
const PACKAGES: [&str; 4] = ["podman", "conmon", "runc", "busybox-static"];
/// How long its service may take to start.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Becomes podman's service. When a container has ended, conmon runs podman without the variable for libraries, so the
/// linker's own list has them. Root of a lab may be unable to raise its limits.
const START: &str = r#"mkdir -p /etc/containers /etc/cni/net.d
rm -f /etc/cni/net.d/*
echo "${LD_LIBRARY_PATH:-}" >/etc/ld.so.conf.d/lab.conf
ldconfig -X
echo '{"default":[{"type":"insecureAcceptAnything"}]}' >/etc/containers/policy.json
cat >/etc/containers/storage.conf <<END
[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "$directory/data"
END
cat >/etc/containers/containers.conf <<END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=8192:8192"]
[network]
network_backend = "cni"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
conmon_path = ["$(command -v conmon)"]
[engine.runtimes]
runc = ["$(command -v runc)"]
END
mkdir -p /run/podman
ln -s "$directory/podman.sock" /run/podman/podman.sock
exec podman system service --time 0 "unix://$directory/podman.sock"
"#;

/// Podman on a host.
pub struct Podman {
    program: String,
    inside: Inside,
    /// The control group of its containers.
    group: String,
    _service: Running,
}

impl Podman {
    /// Starts podman's service on a host, and gives podman the image.
    ///
    /// # Errors
    /// A program is missing, or the service does not start.
    pub fn start(sandbox: &Sandbox, host: &Host) -> anyhow::Result<Self> {
        let programs = unpacked(&PACKAGES)?;
        let directory = sandbox.directory().join(format!("podman-{}", host.index()));
        make_directories(&directory, &["data"])?;
        let secluded = Secluded {
            what: "podman's service",
            directory: &directory,
            programs: &programs,
            script: START,
            has_own_processes: false,
            limit: START_LIMIT,
        };
        let socket = directory.join("podman.sock");
        let service = secluded.start(host, || socket.exists())?;
        let program = programs.program("podman")?.to_string_lossy().into_owned();
        let (inside, group) = (Inside::of(&service), format!("/{}", host.netns().name()));
        let podman = Self { program, inside, group, _service: service };
        podman.import(&programs, &directory)?;
        Ok(podman)
    }

    /// Where podman's files are.
    #[must_use]
    pub fn inside(&self) -> Inside {
        self.inside
    }

    /// Runs `podman` with these words.
    ///
    /// # Errors
    /// With its complaint.
    pub fn podman(&self, words: &[&str]) -> anyhow::Result<String> {
        self.inside.exec(&[&[self.program.as_str()], words].concat())
    }

    /// Runs a container of the image, with options of `podman run`.
    ///
    /// # Errors
    /// With the complaint of `podman`.
    pub fn run(&self, name: &str, options: &[&str], words: &[&str]) -> anyhow::Result<String> {
        let run = ["run", "--name", name, "--cgroup-parent", &self.group];
        self.podman(&[&run, options, &[IMAGE], words].concat())
    }

    /// A part of `podman inspect`.
    ///
    /// # Errors
    /// There is no such container, or it has no such part.
    pub fn inspect(&self, container: &str, pointer: &str) -> anyhow::Result<Value> {
        let found: Value = serde_json::from_str(&self.podman(&["inspect", container])?)?;
        let part = found[0].pointer(pointer).cloned();
        part.with_context(|| format!("{container} has no {pointer}: {found}"))
    }

    fn import(&self, programs: &Programs, directory: &Path) -> anyhow::Result<()> {
        let archive = directory.join("image.tar");
        pack(programs, &directory.join("root"), &archive)?;
        let archive = archive.to_string_lossy();
        self.podman(&["import", "--change", "CMD /bin/sh", &archive, IMAGE]).map(drop)
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.podman(&["rm", "--all", "--force", "--time", "0"]);
    }
}
