//! The kernel's `ovpn` device: hosts are network namespaces on one underlay. Referees: the kernel
//! itself, ping, iproute2; and of the rules of userspace's device, the kernel's refusals.
//!
//! Needs root and a kernel with the module ovpn (Linux 6.16); run in the VM lab, one test at a time
//! (`--test-threads 1`).
// Figures and differences go to the log.
#![allow(clippy::print_stdout)]
#![allow(clippy::unwrap_used)]

mod carry;
mod devices;
mod ends;
mod lab;
mod many;
mod referee;
#[path = "../common/space.rs"]
mod space;
