//! The kernel's state after calls of this crate, read back by iproute2 as an independent referee. Every test
//! runs on a separate thread in new network namespaces, so it does not touch the machine. Needs root,
//! iproute2, iputils-ping and tcpdump.
#![allow(clippy::unwrap_used)]
// Figures go to the log.
#![allow(clippy::print_stderr)]

mod attach;
mod bridge;
mod clients;
mod endpoints;
mod forward;
mod groups;
mod guard;
mod lab;
mod mss;
mod overlay;
mod port_locks;
mod routes;
mod senders;
mod switch;
mod vxlan;
mod watch;
mod xfrm;
