//! Inspects the namespaces of containers, through another process where this one lacks the rights.

use std::io;
use std::path::{Path, PathBuf};

use weft_container::{ResolveOptions, Sandbox};
use weft_io::namespace::identity_at;

pub(crate) fn options(docker_socket: PathBuf) -> ResolveOptions {
    ResolveOptions { docker_socket, identify: identity_at, ..ResolveOptions::default() }
}

pub(crate) fn is_alive(sandbox: &Sandbox) -> bool {
    weft_container::is_alive(sandbox, identity_at)
}

/// Device and inode of a namespace's file.
pub(super) fn identify(path: &Path) -> io::Result<(u64, u64)> {
    identity_at(path)
}

/// Whether an attachment is in another's namespace. Docker asks for an endpoint before the namespace has a file, so the
/// endpoint may have the engine's name for it alone. The file of that name is then looked up now.
pub(super) fn is_in(attached: &Sandbox, other: &Sandbox) -> bool {
    let named = attached.engine_key.as_deref().map(Path::new);
    match named.filter(|_| attached.inode == 0 && other.engine_key.is_none()).map(identify) {
        Some(Ok(file)) => file == (other.device, other.inode),
        _ => attached.is_same_namespace(other),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_container::SandboxKind;

    use super::*;

    fn sandbox(engine_key: Option<&str>, (device, inode): (u64, u64)) -> Sandbox {
        Sandbox {
            id: String::new(),
            name: String::new(),
            namespace: PathBuf::new(),
            kind: SandboxKind::Path,
            pid: None,
            pid_start: None,
            device,
            inode,
            engine_key: engine_key.map(str::to_owned),
        }
    }

    #[test]
    fn a_namespace_that_docker_named_is_known_by_its_file_too() {
        let file = "/proc/self/ns/net";
        let found = identify(Path::new(file)).unwrap();
        let of_docker = sandbox(Some(file), (0, 0));
        assert!(is_in(&of_docker, &sandbox(None, found)));
        assert!(!is_in(&of_docker, &sandbox(None, (found.0, found.1 + 1))));
        assert!(is_in(&of_docker, &sandbox(Some(file), (0, 0))));
        // The engine's file is not there for this process.
        assert!(!is_in(&sandbox(Some("/nonexistent"), (0, 0)), &sandbox(None, found)));
    }
}
