//! dev: simulator, network-namespace lab, virtual-machine lab, benchmark harness.
#![forbid(unsafe_code)]

pub mod net;

pub mod sim;

pub mod vm;
