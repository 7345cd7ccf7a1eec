//! The data channel device in userspace beside the kernel's. Each is the other's peer. Both play the same scenes
//! and get the same requests, which they must answer and refuse alike.
//!
//! Needs root and a kernel with the module ovpn (Linux 6.16); run in the VM lab.
// Figures go to the log.
#![allow(clippy::print_stdout)]
#![allow(clippy::unwrap_used)]

mod carry;
#[allow(dead_code, reason = "shared with net_dco, which uses all of it")]
#[path = "../net_dco/common.rs"]
mod common;
mod lab;
mod limits;
mod load;
mod packet_ids;
mod pair;
mod referee;
mod scenes;
mod told;
