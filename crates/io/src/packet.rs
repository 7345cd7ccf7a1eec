//! Packet sockets: whole Ethernet frames of one device, past the host's protocols.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::IoError;

/// A non-blocking socket that hands out the IPv6 frames which one device receives, whatever their
/// Ethernet destination.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    /// Opens a socket on a device of the calling thread's network namespace.
    ///
    /// # Errors
    /// What the kernel refused: no such device, or no CAP_NET_RAW.
    pub fn open(device_index: u32) -> Result<Self, IoError> {
        const WHAT: &str = "open a packet socket";
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: `socket` takes plain integers and returns a descriptor or -1. Protocol 0: nothing
        // is received until the socket is bound to a device.
        let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if raw < 0 {
            return Err(IoError::last(WHAT));
        }
        // SAFETY: `raw` was just opened by this thread and nothing else knows it, so it has one owner.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: all-zero bytes are a valid `sockaddr_ll`, which holds integers only.
        let mut name: libc::sockaddr_ll = unsafe { mem::zeroed() };
        name.sll_family = libc::AF_PACKET as u16;
        name.sll_protocol = (libc::ETH_P_IPV6 as u16).to_be();
        name.sll_ifindex = i32::try_from(device_index).unwrap_or(i32::MAX);
        let len = mem::size_of_val(&name) as libc::socklen_t;
        // SAFETY: `name` is a `sockaddr_ll` of the length given.
        if unsafe { libc::bind(fd.as_raw_fd(), (&raw const name).cast(), len) } < 0 {
            return Err(IoError::last(WHAT));
        }
        Ok(Self { fd })
    }

    /// Receives one frame and returns its length; what is longer than `buffer` is cut off.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; `NetworkDown` once the device is down or gone.
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        rustix::io::read(&self.fd, buffer).map_err(io::Error::from)
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::UdpSocket;

    use super::*;
    use crate::namespace::unshare_network;

    #[test]
    fn frames_of_one_device_come_and_no_others() {
        std::thread::spawn(|| {
            unshare_network().unwrap();
            let ip = |words: &str| {
                let status = std::process::Command::new("ip").args(words.split(' ')).status();
                assert!(status.unwrap().success(), "ip {words}");
            };
            ip("link set lo up");
            ip("link add other type bridge");
            ip("link set other up");
            let index = |name: &str| {
                let out = std::process::Command::new("ip")
                    .args(["-o", "link", "show", name])
                    .output()
                    .unwrap();
                let text = String::from_utf8(out.stdout).unwrap();
                text.split(':').next().unwrap().trim().parse::<u32>().unwrap()
            };
            let lo = PacketSocket::open(index("lo")).unwrap();
            let other = PacketSocket::open(index("other")).unwrap();
            let sender = UdpSocket::bind("[::1]:0").unwrap();
            sender.send_to(b"to be seen", "[::1]:9").unwrap();
            let mut buffer = [0; 2048];
            // Other frames may come first, such as the kernel's own; the end is an error.
            while let len = lo.recv(&mut buffer).unwrap()
                && !buffer[..len].windows(10).any(|bytes| bytes == b"to be seen")
            {}
            while let Ok(len) = other.recv(&mut buffer) {
                assert!(!buffer[..len].windows(10).any(|bytes| bytes == b"to be seen"));
            }
            assert!(PacketSocket::open(4_000_000).is_err());
        })
        .join()
        .unwrap();
    }
}
