//! Two engines in separate network namespaces. Needs root, `ip` and /dev/net/tun.
#![allow(clippy::unwrap_used)]

mod common;
mod dco;
mod helpers;
mod hostile;
mod networks;
mod traffic;
mod workers;
