//! The daemon: one control loop over links, mesh, paths, engine and kernel; attachments; the API.
//!
//! Threads: the engine's workers, which run no tokio, and one tokio runtime for everything else.
//! Between them: the engine's bounded command queue downwards, a bounded event queue upwards.

mod attachments;
mod bypass;
mod condition;
mod control;
mod engines;
mod error;
mod events;
mod firewall;
mod holder;
mod host;
mod kept;
mod kept_ports;
mod log;
mod mend;
pub(crate) mod mtu;
mod origin;
mod ports;
mod privileges;
mod requests;
mod shortcuts;
mod start;
mod store;
mod unheard;
mod views;
mod warnings;

pub use error::StartError;
pub use holder::hold_sockets;
pub use host::{Reset, check_host, log_path, open_log, reset, wait_until_stopped};
pub(crate) use host::{choose_libraries, raise_descriptor_limit};
pub(crate) use log::log_to_file;
pub use log::log_to_stderr;
pub(crate) use start::SWITCH;
pub use start::run;
pub(crate) use store::make_private_dir;
pub use store::{StoreError, has_secret};
