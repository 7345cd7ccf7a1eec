//! binary: the daemon, the CLI, the HTTP API: where everything meets.
#![forbid(unsafe_code)]

pub mod api;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod dco;
pub mod doctor;
mod task;
pub mod timestamp;
