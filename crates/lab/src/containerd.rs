//! Real containerds on hosts of the lab, which run containers on networks of CNI by `ctr`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use weft_bench::sandbox::secluded::{Secluded, make_directories, pack};
use weft_bench::sandbox::{Host, Programs, Running, Sandbox};

use crate::inside::Inside;
use crate::packages::unpacked;
use crate::vm::run;

/// containerd with all that it runs.
const PACKAGES: [&str; 3] = ["containerd", "runc", "busybox-static"];
/// How long it may take to start.
const START_LIMIT: Duration = Duration::from_secs(30);

/// The image of all containers, and of a pod's own sleeper: busybox alone.
pub const IMAGE: &str = "docker.io/library/busybox:lab";

/// Makes an image's archive out of its one layer. Its arguments: the directory of `root.tar`, and the image's name.
const MAKE: &str = r#"cd "$1"
layer=$(sha256sum root.tar | cut -d ' ' -f 1)
cat >config.json <<END
{"architecture":"$(dpkg --print-architecture)","os":"linux","config":{"Cmd":["/bin/sleep","infinity"]},
 "rootfs":{"type":"layers","diff_ids":["sha256:$layer"]}}
END
echo "[{\"Config\":\"config.json\",\"RepoTags\":[\"$2\"],\"Layers\":[\"root.tar\"]}]" >manifest.json
tar -cf image.tar manifest.json config.json root.tar
"#;

/// Becomes containerd. Root of a lab may be unable to lower `oom_score_adj`.
const START: &str = r#"mkdir -p /etc/containerd
cat >/etc/containerd/config.toml <<END
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/library/busybox:lab"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/opt/cni/bin"
END
exec containerd --config /etc/containerd/config.toml --address "$directory/containerd.sock" --root "$directory/data" \
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
        Self::start_with(unpacked(&PACKAGES)?, sandbox, host)
    }

    /// Starts another containerd than Debian's.
    ///
    /// # Errors
    /// As [`Containerd::start`].
    pub fn start_with(programs: Programs, sandbox: &Sandbox, host: &Host) -> anyhow::Result<Self> {
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

    /// Where containerd's files are.
    #[must_use]
    pub fn inside(&self) -> Inside {
        Inside::of(&self.running)
    }

    /// Runs a program in the mount and network namespaces of this containerd.
    ///
    /// # Errors
    /// With the program's complaint.
    pub fn exec(&self, words: &[&str]) -> anyhow::Result<String> {
        self.inside().exec(words)
    }

    /// Gives one of containerd's name spaces the image of all containers.
    ///
    /// # Errors
    /// It cannot be made or imported.
    pub fn import(&self, name_space: &str) -> anyhow::Result<()> {
        let place = self.directory.to_string_lossy();
        run(Command::new("sh").args(["-ec", MAKE, "sh", &place, IMAGE]))?;
        let archive = self.directory.join("image.tar").to_string_lossy().into_owned();
        self.ctr_of(name_space, &["images", "import", &archive]).map(drop)
    }

    /// Runs `ctr` with these words.
    ///
    /// # Errors
    /// With its complaint.
    pub fn ctr(&self, words: &[&str]) -> anyhow::Result<String> {
        self.ctr_of(&self.group, words)
    }

    /// As [`Containerd::ctr`], in another of containerd's name spaces.
    ///
    /// # Errors
    /// With its complaint.
    pub fn ctr_of(&self, name_space: &str, words: &[&str]) -> anyhow::Result<String> {
        let ctr = self.ctr_words(name_space)?;
        let ctr = ctr.each_ref().map(String::as_str);
        self.exec(&[&ctr, words].concat())
    }

    /// Where its socket stands, and `root.tar` with the files of busybox.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The socket of this containerd.
    #[must_use]
    pub fn socket(&self) -> String {
        self.directory.join("containerd.sock").to_string_lossy().into_owned()
    }

    /// The control group that goes with the sandbox.
    #[must_use]
    pub fn control_group(&self) -> String {
        format!("/{}", self.group)
    }

    fn ctr_words(&self, name_space: &str) -> anyhow::Result<[String; 5]> {
        let socket = self.directory.join("containerd.sock").to_string_lossy().into_owned();
        let ctr = self.programs.program("ctr")?.to_string_lossy().into_owned();
        Ok([ctr, "--address".into(), socket, "--namespace".into(), name_space.into()])
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
        let (ctr, root) = (self.ctr_words(&self.group)?, self.root());
        let ctr = ctr.each_ref().map(String::as_str);
        let run = ["run", "--rm", "--cni", "--rootfs", &root, name];
        let mut command = self.inside().command(&[&ctr, &run[..], words].concat());
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
