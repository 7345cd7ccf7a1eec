//! Helpers for the tests of several modules.
#![allow(clippy::unwrap_used)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::thread;

use crate::namespace::{Namespace, unshare_network};

/// A new namespace, made on a thread that ends; the open descriptor keeps it.
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

/// The number of a device in the calling thread's namespace.
pub(crate) fn index_of(device: &str) -> u32 {
    let output = Command::new("ip").args(["-o", "link", "show", device]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split(':').next().unwrap().parse().unwrap()
}

/// Sends frames out of a device, as they are.
pub(crate) struct FrameSender {
    socket: OwnedFd,
    device: libc::sockaddr_ll,
}

impl FrameSender {
    pub(crate) fn open(device: &str) -> Self {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: `socket` takes plain integers and returns a descriptor or -1.
        let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        assert!(raw >= 0, "{}", io::Error::last_os_error());
        // SAFETY: `raw` was just opened by this thread and nothing else knows it, so it has one owner.
        let socket = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: all-zero bytes are a valid `sockaddr_ll`, which holds integers only.
        let mut name: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        name.sll_family = libc::AF_PACKET as u16;
        name.sll_ifindex = index_of(device) as libc::c_int;
        Self { socket, device: name }
    }

    pub(crate) fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the kernel reads the frame's bytes, and a `sockaddr_ll` of the length given.
        let sent = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const self.device).cast(),
                std::mem::size_of_val(&self.device) as libc::socklen_t,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
