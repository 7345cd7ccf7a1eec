//! tokio: the daemon: one control loop over links, mesh, paths, engine and kernel; attachments; the API.
//!
//! Threads: the engine's workers, which run no tokio, and one tokio runtime for everything else.
//! Between them: the engine's bounded command queue downwards, a bounded event queue upwards.
#![forbid(unsafe_code)]

pub mod config;
mod core;
pub mod dco;
mod devices;
mod error;
mod holder;
mod http;
mod services;
mod start;
pub mod timestamp;
mod upkeep;

/// Targets of the fuzzer that take private parts of the daemon.
#[cfg(feature = "faults")]
pub mod fuzzed {
    pub use crate::services::gateway::{gateway_management, gateway_peers};
}

pub use devices::SWITCH;
pub use error::StartError;
pub use holder::hold_sockets;
pub use start::run;
pub use upkeep::host::{
    Reset, check_host, choose_libraries, is_ending, log_path, open_log, raise_descriptor_limit,
    reset, wait_until_stopped,
};
pub use upkeep::landlock::has_landlock;
pub use upkeep::log::{log_to_file, log_to_stderr};
pub use upkeep::mtu::narrow_link;
pub use upkeep::opener::open_namespaces;
pub use upkeep::store::{StoreError, has_secret, make_private_dir};
