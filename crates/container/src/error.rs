//! Reasons why a reference does not lead to a container.

use std::{io, path::PathBuf};

use crate::docker::DockerFailure;

/// Why a reference leads to no container or namespace. Each text says what happened, to what, and
/// what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// Fault of the caller.
    #[error(
        "{reference:?} is not a container or namespace: {why}; give a Docker container's name or id, a name from {netns_dir}, pid:NUMBER or the path of a network namespace"
    )]
    Invalid {
        /// The reference as given.
        reference: String,
        /// The problem with it.
        why: &'static str,
        /// The directory of named namespaces.
        netns_dir: PathBuf,
    },
    /// Fault of the caller, or the container ended.
    #[error(
        "no container or network namespace named {reference}: there is no {netns_dir}/{reference}, and {docker}"
    )]
    NotFound {
        /// The reference as given.
        reference: String,
        /// The directory of named namespaces.
        netns_dir: PathBuf,
        /// Docker's answer.
        docker: DockerFailure,
    },
    /// Fault of the caller: an explicit `netns:` name that does not exist.
    #[error(
        "no network namespace named {name} in {netns_dir}: `ip netns list` shows the existing ones, `ip netns add {name}` creates one"
    )]
    NoSuchNamespace {
        /// The name.
        name: String,
        /// The directory of named namespaces.
        netns_dir: PathBuf,
    },
    /// An explicit `docker:` reference that Docker cannot answer.
    #[error("cannot find Docker container {reference}: {docker}")]
    Docker {
        /// The reference as given.
        reference: String,
        /// Docker's answer.
        docker: DockerFailure,
    },
    /// State of the container.
    #[error(
        "container {name} is {status}, not running: start it (docker start {name}), then attach it"
    )]
    NotRunning {
        /// The container's name.
        name: String,
        /// Docker's word for its state.
        status: String,
    },
    /// Configuration of the container, or the host's own namespace named by path or process.
    #[error(
        "{name} uses the host's network and cannot be attached: run the container without --network host, or give the host itself an address: weft expose"
    )]
    HostNetwork {
        /// The reference as given.
        name: String,
    },
    /// Fault of the caller, or the process ended.
    #[error("process {pid} does not exist or has ended: give the number of a running process")]
    NoProcess {
        /// The process id.
        pid: u32,
    },
    /// Fault of the caller: a file that is not a namespace.
    #[error(
        "{path} is not a network namespace: give a file from /run/netns or /proc/PID/ns/net (`ip netns delete` removes a leftover file in /run/netns)"
    )]
    NotANamespace {
        /// The path.
        path: PathBuf,
    },
    /// The file cannot be inspected.
    #[error("cannot use {path} as a network namespace: {source}")]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}
