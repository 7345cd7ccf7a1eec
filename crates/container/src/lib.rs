//! tokio: outside requests -> attach / detach.
//!
//! Resolves CONTAINER-OR-NETNS. [`resolve`] finds the network namespace of a Docker container's name or id, a name
//! made by `ip netns add`, a process or a path. [`cni`] is the plugin for runtimes that speak CNI.
#![forbid(unsafe_code)]

pub mod cni;
mod docker;
mod error;
mod sandbox;

pub use self::{
    docker::{DOCKER_ANSWER_BYTES_MAX, DOCKER_TIMEOUT_MS, DockerFailure},
    error::ContainerError,
    sandbox::{Identify, ResolveOptions, Sandbox, SandboxKind, identify, is_alive, resolve},
};
