//! What the tests of several modules need.
#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::thread;

use crate::namespace::{Namespace, unshare_network};

/// A namespace of its own, made on a thread that ends; the open descriptor keeps it.
pub(crate) fn fresh_namespace() -> Namespace {
    thread::spawn(|| {
        unshare_network().expect("this test makes network namespaces and must run as root");
        Namespace::current().unwrap()
    })
    .join()
    .unwrap()
}

/// Runs `ip` with these words in the calling thread's namespace.
pub(crate) fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}
