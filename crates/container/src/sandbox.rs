//! Resolves a user's reference to a network namespace.

use std::{
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    docker::{self, Container, DockerFailure},
    error::ContainerError,
};

/// Returns device and inode of the file at a path.
pub type Identify = fn(&Path) -> io::Result<(u64, u64)>;

/// The places to search, and how to inspect a namespace.
#[derive(Debug, Clone)]
pub struct ResolveOptions {
    /// The Docker engine's unix socket.
    pub docker_socket: PathBuf,
    /// The directory where `ip netns add` puts names.
    pub netns_dir: PathBuf,
    /// The process file system.
    pub proc_dir: PathBuf,
    /// Inspects a namespace's file.
    pub identify: Identify,
}

impl Default for ResolveOptions {
    fn default() -> Self {
        Self {
            docker_socket: "/var/run/docker.sock".into(),
            netns_dir: "/run/netns".into(),
            proc_dir: "/proc".into(),
            identify,
        }
    }
}

/// The kind of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxKind {
    /// A Docker container.
    Docker,
    /// A namespace with a name (`ip netns add`).
    Netns,
    /// A process.
    Pid,
    /// A path that is none of the others.
    Path,
}

/// An attachable object: a network namespace and its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// The stable key: `docker:` and 64 hexadecimal digits, `netns:NAME`, `pid:NUMBER` or
    /// `path:PATH`. [`resolve`] accepts it.
    pub id: String,
    /// The name for people.
    pub name: String,
    /// The network namespace's file.
    pub namespace: PathBuf,
    /// Its kind.
    pub kind: SandboxKind,
    /// The process that owns the namespace, if it is a process's.
    pub pid: Option<u32>,
    /// When that process started, in clock ticks after boot. It distinguishes the process from a
    /// later one with the same number.
    pub pid_start: Option<u64>,
    /// Device of the namespace's file; together with `inode` it tells whether two paths lead to one
    /// namespace.
    pub device: u64,
    /// Inode of the namespace's file. The kernel may reuse it after the namespace has ended.
    pub inode: u64,
    /// The name that Docker's engine has for the namespace (`SandboxKey`). A network driver is told this alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_key: Option<String>,
}

/// Resolves `reference`. A prefix `docker:`, `netns:`, `pid:` or `path:` selects that kind only. A
/// reference with a slash is a path. Any other is a name in the directory of named namespaces, or
/// else a Docker container's name, id or unique id prefix.
///
/// # Errors
/// [`ContainerError`]; an unreachable Docker matters only if nothing else has the name.
pub async fn resolve(reference: &str, options: &ResolveOptions) -> Result<Sandbox, ContainerError> {
    let invalid = |why| ContainerError::Invalid {
        reference: reference.to_owned(),
        why,
        netns_dir: options.netns_dir.clone(),
    };
    let looking = Lookup { options };
    if let Some((prefix, rest)) = reference.split_once(':')
        && matches!(prefix, "docker" | "netns" | "pid" | "path")
    {
        if rest.is_empty() {
            return Err(invalid("nothing follows the colon"));
        }
        return match prefix {
            "docker" => looking
                .docker(rest)
                .await?
                .map_err(|docker| ContainerError::Docker { reference: rest.to_owned(), docker }),
            "netns" if is_file_name(rest) => looking.netns(rest)?.ok_or_else(|| {
                let netns_dir = options.netns_dir.clone();
                ContainerError::NoSuchNamespace { name: rest.to_owned(), netns_dir }
            }),
            "netns" => Err(invalid("a namespace's name has no slash")),
            "pid" => match rest.parse::<u32>() {
                Ok(pid) if pid > 0 => looking.pid(pid),
                _ => Err(invalid("a process id is a number")),
            },
            _ => looking.path(Path::new(rest)),
        };
    }
    if reference.is_empty() {
        return Err(invalid("it is empty"));
    }
    if reference.contains('/') {
        return looking.path(Path::new(reference));
    }
    if !is_file_name(reference) {
        return Err(invalid("it is not a name"));
    }
    if let Some(sandbox) = looking.netns(reference)? {
        return Ok(sandbox);
    }
    looking.docker(reference).await?.map_err(|docker| ContainerError::NotFound {
        reference: reference.to_owned(),
        netns_dir: options.netns_dir.clone(),
        docker,
    })
}

impl Sandbox {
    /// Whether both are one namespace, as the kernel or Docker's engine names it.
    #[must_use]
    pub fn is_same_namespace(&self, other: &Self) -> bool {
        let file = |it: &Self| (it.inode != 0).then_some((it.device, it.inode));
        let same = |one: Option<_>, other: Option<_>| one.is_some() && one == other;
        same(file(self), file(other))
            || (self.engine_key.is_some() && self.engine_key == other.engine_key)
    }
}

/// Device and inode of a file, as this process sees it.
///
/// # Errors
/// Of the file system.
pub fn identify(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Whether the namespace still exists under its path, and, for a process, whether it is still the
/// same process. A restarted container is not alive in this sense: resolve its id again. If the
/// namespace of a process cannot be inspected now, its start time decides.
#[must_use]
pub fn is_alive(sandbox: &Sandbox, identify: Identify) -> bool {
    let same_file = match identify(&sandbox.namespace) {
        Ok(found) => found == (sandbox.device, sandbox.inode),
        Err(error) => {
            !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        }
    };
    // The namespace's file of a process is PROC/PID/ns/net.
    let process = sandbox.pid.and(sandbox.namespace.ancestors().nth(2));
    let same_process = match (process, sandbox.pid_start) {
        (Some(directory), Some(start)) => start_of(directory) == Some(start),
        _ => true,
    };
    same_file && same_process
}

struct Lookup<'a> {
    options: &'a ResolveOptions,
}

impl Lookup<'_> {
    /// The outer result is about the container found, the inner one about finding it.
    async fn docker(
        &self,
        reference: &str,
    ) -> Result<Result<Sandbox, DockerFailure>, ContainerError> {
        match docker::inspect(&self.options.docker_socket, reference).await {
            Ok(container) => self.container(&container).map(Ok),
            Err(failure) => Ok(Err(failure)),
        }
    }

    fn container(&self, container: &Container) -> Result<Sandbox, ContainerError> {
        let name = if container.name.is_empty() { &container.id } else { &container.name };
        let not_running = || ContainerError::NotRunning {
            name: name.clone(),
            status: container.status().to_owned(),
        };
        if container.uses_host_network() {
            return Err(ContainerError::HostNetwork { name: name.clone() });
        }
        let pid = container.pid().ok_or_else(not_running)?;
        let sandbox = match self.pid(pid) {
            // It ended between Docker's answer and this check.
            Err(ContainerError::NoProcess { .. }) => return Err(not_running()),
            Err(ContainerError::HostNetwork { .. }) => {
                return Err(ContainerError::HostNetwork { name: name.clone() });
            }
            other => other?,
        };
        Ok(Sandbox {
            id: format!("docker:{}", container.id),
            name: name.clone(),
            kind: SandboxKind::Docker,
            engine_key: container.engine_key().map(str::to_owned),
            ..sandbox
        })
    }

    fn pid(&self, pid: u32) -> Result<Sandbox, ContainerError> {
        let directory = self.options.proc_dir.join(pid.to_string());
        let namespace = directory.join("ns/net");
        let Some(pid_start) = start_of(&directory) else {
            return Err(ContainerError::NoProcess { pid });
        };
        let id = format!("pid:{pid}");
        let found = self.inspect(&namespace, &id);
        let (device, inode) = match found {
            Err(ContainerError::Unreadable { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                return Err(ContainerError::NoProcess { pid });
            }
            other => other?,
        };
        Ok(Sandbox {
            name: id.clone(),
            id,
            namespace,
            kind: SandboxKind::Pid,
            pid: Some(pid),
            pid_start: Some(pid_start),
            device,
            inode,
            engine_key: None,
        })
    }

    /// A named namespace, if the name exists.
    fn netns(&self, name: &str) -> Result<Option<Sandbox>, ContainerError> {
        let namespace = self.options.netns_dir.join(name);
        let (device, inode) = match self.inspect(&namespace, name) {
            Err(ContainerError::Unreadable { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                return Ok(None);
            }
            other => other?,
        };
        Ok(Some(Sandbox {
            id: format!("netns:{name}"),
            name: name.to_owned(),
            namespace,
            kind: SandboxKind::Netns,
            pid: None,
            pid_start: None,
            device,
            inode,
            engine_key: None,
        }))
    }

    fn path(&self, path: &Path) -> Result<Sandbox, ContainerError> {
        let unreadable = |source| ContainerError::Unreadable { path: path.to_owned(), source };
        let namespace = std::path::absolute(path).map_err(unreadable)?;
        if let Some(name) = self.name_of(&namespace)
            && let Some(sandbox) = self.netns(&name)?
        {
            return Ok(sandbox);
        }
        let text = namespace.display().to_string();
        let (device, inode) = self.inspect(&namespace, &text)?;
        Ok(Sandbox {
            id: format!("path:{text}"),
            name: text,
            namespace,
            kind: SandboxKind::Path,
            pid: None,
            pid_start: None,
            device,
            inode,
            engine_key: None,
        })
    }

    /// The name of a path in the directory of named namespaces (also through `/var/run`), so that
    /// path and name give one key.
    fn name_of(&self, path: &Path) -> Option<String> {
        let directory = path.parent()?.canonicalize().ok()?;
        let named = self.options.netns_dir.canonicalize().ok()?;
        let name = path.file_name()?.to_str()?;
        (directory == named).then(|| name.to_owned())
    }

    /// Device and inode of a namespace, unless it is the host's own.
    fn inspect(&self, path: &Path, name: &str) -> Result<(u64, u64), ContainerError> {
        let unreadable =
            |path: &Path, source| ContainerError::Unreadable { path: path.to_owned(), source };
        let own = self.options.proc_dir.join("self/ns/net");
        let host = std::fs::metadata(&own).map_err(|source| unreadable(&own, source))?;
        let (device, inode) =
            (self.options.identify)(path).map_err(|source| unreadable(path, source))?;
        // All namespaces, and nothing else, live on one internal file system.
        if device != host.dev() {
            return Err(ContainerError::NotANamespace { path: path.to_owned() });
        }
        if inode == host.ino() {
            return Err(ContainerError::HostNetwork { name: name.to_owned() });
        }
        Ok((device, inode))
    }
}

/// When the process in this directory of the process file system started (field 22 of `stat`). `None`
/// if there is no such process, or it is a zombie.
fn start_of(process: &Path) -> Option<u64> {
    let stat = std::fs::read_to_string(process.join("stat")).ok()?;
    // The second field is the program's name in brackets and may contain anything.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn is_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0'])
}
