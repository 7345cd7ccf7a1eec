//! dev: simulator, network-namespace lab, virtual-machine lab.
#![forbid(unsafe_code)]

pub mod net;

pub mod sim;

pub mod vm;
