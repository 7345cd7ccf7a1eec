//! The data channel device in userspace beside the kernel's: each with the other as its peer, and both
//! put through the same scenes, which they must tell alike.
//!
//! Needs root and a kernel with the module ovpn (Linux 6.16); run in the VM lab.
// Figures go to the log.
#![allow(clippy::print_stdout)]
#![allow(clippy::unwrap_used)]

mod carry;
mod lab;
mod scenes;
