//! tokio: outside requests -> attach / detach.
//!
//! Resolves CONTAINER-OR-NETNS. [`resolve`] finds the network namespace of a Docker container's name or id, a name
//! made by `ip netns add`, a process or a path. [`DockerEvents`] tells of changes to containers. [`cni`] is the plugin for runtimes that speak CNI,
//! [`docker_plugin`] Docker's network and IPAM driver.
#![forbid(unsafe_code)]

pub mod cni;
mod docker;
mod docker_events;
pub mod docker_plugin;
mod error;
mod sandbox;

pub use self::{
    docker::{DOCKER_ANSWER_BYTES_MAX, DOCKER_TIMEOUT_MS, DockerFailure},
    docker_events::{DockerChange, DockerEvent, DockerEvents, EVENT_BYTES_MAX},
    error::ContainerError,
    sandbox::{Identify, ResolveOptions, Sandbox, SandboxKind, identify, is_alive, resolve},
};
