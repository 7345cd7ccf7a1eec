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
