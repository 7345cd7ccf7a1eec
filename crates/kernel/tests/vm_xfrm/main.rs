//! IPsec of a kernel that has ESP, judged by iproute2, by tcpdump and by real traffic through VXLAN
//! between two network namespaces.
//!
//! For the virtual machine alone: needs root, a kernel with ESP and VXLAN, modprobe, iproute2, ping,
//! iperf3, tcpdump and taskset. Run it with `--test-threads 1`, in a fresh guest, with `--nocapture`
//! for the figures.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod absent;
mod entry;
mod lab;
mod lanes;
mod life;
mod many;
mod traffic;
