//! binary: the command line, the CNI plugin, an OpenVPN client, and data channel devices driven by hand.
#![forbid(unsafe_code)]

pub mod cli;
pub mod cni;
pub mod dco;
pub mod doctor;
pub mod openvpn;
