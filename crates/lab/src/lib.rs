//! dev: simulator, network-namespace lab, virtual-machine lab.
#![forbid(unsafe_code)]

pub mod net;

mod programs;

pub mod ring;

pub mod sim;

pub mod vm;
