//! The ODP switch on a kernel that has openvswitch. Hosts are network namespaces, each with a separate
//! datapath, on one underlay. Referees: iproute2, ping, iperf3, tcpdump, sockets in the containers, and the
//! messages of a second encoder (`netlink-bindings`).
//!
//! Needs root and a kernel with the modules openvswitch, vxlan, esp4 and esp6; run in the VM lab,
//! one test at a time (`--test-threads 1`).
// Figures go to the log.
#![allow(clippy::print_stdout)]
#![allow(clippy::unwrap_used)]

mod broadcast;
mod carry;
mod flows;
mod foreign;
mod lab;
mod networks;
mod restart;
mod secure;
#[path = "../common/space.rs"]
mod space;
mod theirs;
