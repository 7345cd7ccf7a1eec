//! binary: the daemon, the CLI, the HTTP API: where everything meets.
#![forbid(unsafe_code)]

pub mod api;
pub mod bench;
pub mod cli;
pub mod config;
pub mod daemon;
pub mod dco;
pub mod demo;
pub mod doctor;
pub mod sandbox;
mod task;
mod timestamp;
