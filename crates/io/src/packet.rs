//! Packet sockets: whole Ethernet frames of one device, past the host's protocols.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{IoError, announcements, tap};

/// Receives whole frames of one device, or sends them. It never blocks.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    /// Opens a socket that hands out the IPv6 frames which a device of the calling thread's network namespace
    /// receives, whatever their Ethernet destination.
    ///
    /// # Errors
    /// The kernel refused: no such device, or no CAP_NET_RAW.
    pub fn open(device_index: u32) -> Result<Self, IoError> {
        Self::open_for(device_index, libc::ETH_P_IPV6 as u16)
    }

    /// As [`Self::open`], for frames of another type (EtherType).
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_for(device_index: u32, ethertype: u16) -> Result<Self, IoError> {
        let socket = Self::sender()?;
        socket.bind(device_index, ethertype.into())?;
        Ok(socket)
    }

    /// As [`Self::open_for`], without frames that leave by the device.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn incoming(device_index: u32, ethertype: u16) -> Result<Self, IoError> {
        let socket = Self::sender()?;
        socket.ignore_outgoing()?;
        socket.bind(device_index, ethertype.into())?;
        Ok(socket)
    }

    /// Opens a socket for the untagged frames by which hosts behind a device announce addresses, or check that one
    /// is free. Announcements are gratuitous ARP and unsolicited neighbour advertisements.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn announcements(device_index: u32) -> Result<Self, IoError> {
        let socket = Self::sender()?;
        announcements::attach_to_socket(socket.as_fd())
            .map_err(|error| IoError::of("attach a filter to a packet socket", error))?;
        socket.ignore_outgoing()?;
        socket.bind(device_index, libc::ETH_P_ALL)?;
        Ok(socket)
    }

    /// Opens a socket in the calling thread's network namespace that sends alone.
    ///
    /// # Errors
    /// No CAP_NET_RAW.
    pub fn sender() -> Result<Self, IoError> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: `socket` takes plain integers and returns a descriptor or -1. Protocol 0: nothing
        // is received until the socket is bound to a device.
        let raw = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if raw < 0 {
            return Err(IoError::last(WHAT));
        }
        // SAFETY: `raw` was just opened by this thread and nothing else knows it, so it has one owner.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(raw) } })
    }

    fn bind(&self, device_index: u32, protocol: libc::c_int) -> Result<(), IoError> {
        let name = device(device_index, protocol);
        let len = mem::size_of_val(&name) as libc::socklen_t;
        // SAFETY: `name` is a `sockaddr_ll` of the length given.
        let rc = unsafe { libc::bind(self.fd.as_raw_fd(), (&raw const name).cast(), len) };
        if rc < 0 { Err(IoError::last(WHAT)) } else { Ok(()) }
    }

    fn ignore_outgoing(&self) -> Result<(), IoError> {
        let yes: libc::c_int = 1;
        // SAFETY: the option is an int, which `yes` is, of the length given.
        let rc = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_IGNORE_OUTGOING,
                (&raw const yes).cast(),
                mem::size_of_val(&yes) as libc::socklen_t,
            )
        };
        if rc < 0 { Err(IoError::last(WHAT)) } else { Ok(()) }
    }

    /// Sets the priority of later sends inside the host (SO_PRIORITY). A priority above 6 takes
    /// CAP_NET_ADMIN.
    ///
    /// # Errors
    /// The kernel refused the priority.
    pub fn set_priority(&self, priority: i32) -> io::Result<()> {
        // SAFETY: the option is an int, which `priority` is, of the length given.
        let rc = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PRIORITY,
                (&raw const priority).cast(),
                mem::size_of_val(&priority) as libc::socklen_t,
            )
        };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The index of a device of this socket's network namespace, by its name.
    ///
    /// # Errors
    /// There is no such device.
    pub fn index_of(&self, device: &str) -> io::Result<u32> {
        tap::index_of(self.fd.as_fd(), device)
    }

    /// Sends a whole frame out of a device, by index, as if its host had sent it.
    ///
    /// # Errors
    /// The device is gone or down, or has no room now.
    pub fn send(&self, frame: &[u8], device_index: u32) -> io::Result<()> {
        let to = device(device_index, 0);
        // SAFETY: the kernel reads the frame's bytes, and a `sockaddr_ll` of the length given.
        let sent = unsafe {
            libc::sendto(
                self.fd.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                libc::MSG_DONTWAIT,
                (&raw const to).cast(),
                mem::size_of_val(&to) as libc::socklen_t,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives one frame and returns its length; a frame longer than `buffer` is cut off.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; `NetworkDown` once the device is down or gone.
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        rustix::io::read(&self.fd, buffer).map_err(io::Error::from)
    }
}

const WHAT: &str = "open a packet socket";

/// A device by index, and the protocol of the frames taken from it.
fn device(index: u32, protocol: libc::c_int) -> libc::sockaddr_ll {
    // SAFETY: all-zero bytes are a valid `sockaddr_ll`, which holds integers only.
    let mut name: libc::sockaddr_ll = unsafe { mem::zeroed() };
    name.sll_family = libc::AF_PACKET as u16;
    name.sll_protocol = (protocol as u16).to_be();
    name.sll_ifindex = i32::try_from(index).unwrap_or(i32::MAX);
    name
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

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn ip_frame(next: u8, source: [u8; 16], message: &[u8]) -> Vec<u8> {
        let head = [&[0x33, 0x33, 0, 0, 0, 1][..], &MAC, &[0x86, 0xdd, 0x60, 0, 0, 0]].concat();
        let len = (message.len() as u16).to_be_bytes();
        [&head[..], &len, &[next, 255], &source, &[0xff; 16], message].concat()
    }

    fn arp(to: [u8; 6], operation: u8, sender: u8, target: u8) -> Vec<u8> {
        let address = |last: u8| if last == 0 { [0; 4] } else { [10, 0, 0, last] };
        let head = [&to[..], &MAC, &[8, 6, 0, 1, 8, 0, 6, 4, 0, operation]].concat();
        [&head[..], &MAC, &address(sender), &[0; 6], &address(target)].concat()
    }

    /// Frames that a bridge keeps from ports with `neigh_suppress`, and frames that look like them.
    fn frames() -> Vec<(Vec<u8>, bool)> {
        const ALL: [u8; 6] = [0xff; 6];
        let advertisement = |kind: u8, code: u8, flags: u8| {
            ip_frame(58, [7; 16], &[&[kind, code, 0, 0, flags, 0, 0, 0][..], &[7; 16]].concat())
        };
        let solicitation = |source: [u8; 16]| {
            ip_frame(58, source, &[&[135, 0, 0, 0, 0, 0, 0, 0][..], &[7; 16]].concat())
        };
        let but_one = |at: usize| {
            let mut source = [0; 16];
            source[at] = 1;
            source
        };
        let mut frames = vec![
            (arp(ALL, 1, 5, 5), true),
            (arp(ALL, 2, 5, 5), true),
            (arp(ALL, 1, 0, 5), true),
            (arp(ALL, 1, 4, 5), false),
            (arp(ALL, 3, 5, 5), false),
            (arp(MAC, 1, 5, 5), false),
            (advertisement(136, 0, 0x20), true),
            (advertisement(136, 0, 0x60), false),
            (advertisement(136, 1, 0x20), false),
            (advertisement(134, 0, 0), false),
            (solicitation([0; 16]), true),
            (ip_frame(17, [0; 16], &[135, 0, 0, 0, 0, 0, 0, 0, 7, 7]), false),
            ([&ALL[..], &MAC, &[0x88, 0xb5], &[5; 46]].concat(), false),
        ];
        frames.extend((0..16).map(|at| (solicitation(but_one(at)), false)));
        frames
    }

    #[test]
    fn announcements_and_probes_are_taken_from_a_device_and_nothing_else() {
        use crate::tap::{Tap, TapOptions, VNET_LEN};
        use crate::testing::{fresh_namespace, index_of, ip};
        crate::namespace::run_in(fresh_namespace(), || {
            ip("link add here type veth peer name there");
            for name in ["here", "there"] {
                std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1")
                    .unwrap();
                ip(&format!("link set {name} arp off up"));
            }
            let tap = Tap::open(&TapOptions::new("tap0")).unwrap();
            std::fs::write("/proc/sys/net/ipv6/conf/tap0/disable_ipv6", "1").unwrap();
            ip("link set tap0 arp off up");
            tap.take_announcements().unwrap();
            let socket = PacketSocket::announcements(index_of("there")).unwrap();
            let sender = PacketSocket::sender().unwrap();
            let [here, there, up] =
                ["here", "there", "tap0"].map(|name| sender.index_of(name).unwrap());
            assert!(sender.index_of("nobody").is_err());
            let mut buffer = [0; 512];
            for (number, (frame, wanted)) in frames().into_iter().enumerate() {
                sender.send(&frame, here).unwrap();
                let received = socket.recv(&mut buffer).map(|len| buffer[..len].to_vec()).ok();
                assert_eq!(received, wanted.then(|| frame.clone()), "frame {number}");
                sender.send(&frame, up).unwrap();
                let len = tap.recv(&mut buffer).unwrap_or(0);
                let received = (len > 0).then(|| buffer[VNET_LEN..len].to_vec());
                assert_eq!(received, wanted.then(|| frame.clone()), "frame {number}");
                // Frames that the device itself sends are not heard.
                sender.send(&frame, there).unwrap();
                assert!(socket.recv(&mut buffer).is_err());
            }
            assert!(sender.send(&[0; 60], 4_000).is_err());
        })
        .unwrap();
    }
}
