//! dev: simulator, network-namespace lab, virtual-machine lab.
#![forbid(unsafe_code)]

pub mod cni;

pub mod compose;

pub mod containerd;

pub mod cri;

pub mod docker;

pub mod documents;

pub mod go;

pub mod inside;

pub mod nerdctl;

pub mod net;

mod packages;

pub mod pairs;

pub mod podman;

mod programs;

pub mod ring;

pub mod sim;

pub mod vm;
