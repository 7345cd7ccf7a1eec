//! TUN devices: IP super-packets without a link header, each behind a virtio net header.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::IoError;
use crate::tap::{Tap, TapOffloads, TapOptions, VNET_LEN, ask_link, flags, number};

/// The longest super-packet, in bytes without its virtio net header.
pub const PACKET_LEN_MAX: usize = 65_535;

/// How long a change of the carrier waits for the system to take note, in milliseconds.
pub const CARRIER_WAIT_MS: u64 = 200;

/// One queue of a TUN device, non-blocking.
#[derive(Debug)]
pub struct Tun {
    queue: Tap,
}

impl Tun {
    /// Opens the device, in the calling thread's network namespace, and makes it if it is not there.
    /// It is neither given an address nor set up.
    ///
    /// # Errors
    /// As [`Tap::open`].
    pub fn open(options: &TapOptions) -> Result<Self, IoError> {
        Tap::open_layer(options, libc::IFF_TUN).map(|queue| Self { queue })
    }

    /// The name under which the device was opened.
    pub fn name(&self) -> &str {
        self.queue.name()
    }

    /// As [`Tap::offloads`].
    pub const fn offloads(&self) -> TapOffloads {
        self.queue.offloads()
    }

    /// Says whether the device has a carrier: without one it takes no packets of the system. It has one at first.
    /// Waits at most [`CARRIER_WAIT_MS`] until the system has taken note. It does not wait if the device is down,
    /// or not in the calling thread's network namespace under its name.
    ///
    /// # Errors
    /// The device is gone.
    pub fn set_carrier(&self, carrier: bool) -> io::Result<()> {
        self.queue.set_carrier(carrier)?;
        let until = Instant::now() + Duration::from_millis(CARRIER_WAIT_MS);
        while !self.follows_carrier(carrier) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn follows_carrier(&self, carrier: bool) -> bool {
        // The kernel updates the flags with a delay, or at once when asked.
        let _ = ask_link(self.name());
        let Ok(flags) = flags(self.name()) else { return true };
        flags & libc::IFF_UP == 0 || (flags & libc::IFF_RUNNING != 0) == carrier
    }

    /// Takes one super-packet: its virtio net header, and the packet, whose length is returned. A
    /// `packet` shorter than [`PACKET_LEN_MAX`] may cut it.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; anything else means that the device is gone.
    #[inline]
    pub fn recv(&self, vnet: &mut [u8; VNET_LEN], packet: &mut [u8]) -> io::Result<usize> {
        let mut parts = [IoSliceMut::new(vnet), IoSliceMut::new(packet)];
        let all = rustix::io::readv(self.queue.as_fd(), &mut parts)?;
        Ok(all.saturating_sub(VNET_LEN))
    }

    /// Gives the kernel one super-packet: virtio net header first, then the packet in any number of
    /// slices.
    ///
    /// # Errors
    /// As [`Tap::send`]; `InvalidInput` too for a packet that is neither IPv4 nor IPv6.
    #[inline]
    pub fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.queue.send(slices)
    }
}

/// Sets the MTU of the device of this name, in the calling thread's network namespace.
///
/// # Errors
/// There is no such device, or it takes no such MTU.
pub fn set_mtu(name: &str, bytes: u32) -> Result<(), IoError> {
    const WHAT: &str = "set the MTU of a device";
    let bytes = i32::try_from(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    bytes
        .and_then(|bytes| number(name, libc::SIOCSIFMTU as libc::Ioctl, bytes))
        .map(|_| ())
        .map_err(|error| IoError::of(WHAT, error))
}

/// Has the system send no ICMP redirects for IPv4 to senders behind this device, in the calling thread's
/// network namespace. The system asks the setting of all devices too, so that is switched off as well.
///
/// # Errors
/// There is no such device, or `/proc/sys` is read-only.
pub fn send_no_redirects(name: &str) -> io::Result<()> {
    ["all", name].iter().try_for_each(|of| {
        std::fs::write(format!("/proc/sys/net/ipv4/conf/{of}/send_redirects"), "0")
    })
}

/// The MTU of the device with this interface index, in the calling thread's network namespace, in bytes.
///
/// # Errors
/// There is no such device.
pub fn mtu(index: u32) -> Result<u32, IoError> {
    const WHAT: &str = "find the MTU of a device";
    let family = rustix::net::AddressFamily::INET;
    let socket = rustix::net::socket(family, rustix::net::SocketType::DGRAM, None);
    let name = socket.and_then(|socket| rustix::net::netdevice::index_to_name(socket, index));
    let mtu = name
        .map_err(io::Error::from)
        .and_then(|name| number(&name, libc::SIOCGIFMTU as libc::Ioctl, 0));
    Ok(u32::try_from(mtu.map_err(|error| IoError::of(WHAT, error))?).unwrap_or_default())
}

/// The interface index of the device of this name, in the calling thread's network namespace.
///
/// # Errors
/// There is no such device.
pub fn index(name: &str) -> Result<u32, IoError> {
    const WHAT: &str = "find a device";
    let family = rustix::net::AddressFamily::INET;
    let socket = rustix::net::socket(family, rustix::net::SocketType::DGRAM, None);
    socket
        .and_then(|socket| rustix::net::netdevice::name_to_index(socket, name))
        .map_err(|error| IoError::of(WHAT, error.into()))
}

impl AsFd for Tun {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::namespace::run_in;
    use crate::testing::{fresh_namespace, ip};

    #[test]
    fn packets_pass_both_ways_without_a_link_header() {
        run_in(fresh_namespace(), || {
            let tun = Tun::open(&TapOptions::new("weft%d")).unwrap();
            assert_eq!((tun.name(), tun.offloads().tso), ("weft0", true));
            set_mtu("weft0", 1_300).unwrap();
            assert!(set_mtu("weft0", 10).is_err());
            send_no_redirects("weft0").unwrap();
            for of in ["all", "weft0"] {
                let redirects = format!("/proc/sys/net/ipv4/conf/{of}/send_redirects");
                assert_eq!(std::fs::read_to_string(redirects).unwrap(), "0\n");
            }
            assert!(send_no_redirects("weft1").is_err());
            let number = index("weft0").unwrap();
            assert_eq!(mtu(number).unwrap(), 1_300);
            assert!(mtu(number + 9).is_err());
            assert!(index("weft0").unwrap() > 1);
            assert!(index("weft1").is_err());
            ip("address add 10.9.0.1/24 dev weft0");
            ip("link set weft0 up");
            let socket = std::net::UdpSocket::bind("10.9.0.1:5000").unwrap();
            socket.send_to(b"out", "10.9.0.2:6000").unwrap();
            let (mut vnet, mut packet) = ([0; VNET_LEN], vec![0; PACKET_LEN_MAX]);
            let ours = loop {
                let len = tun.recv(&mut vnet, &mut packet).unwrap();
                // The kernel says hello over IPv6.
                if packet[0] >> 4 == 4 {
                    break &packet[..len];
                }
            };
            assert_eq!((ours.len(), &ours[28..]), (31, &b"out"[..]));
            let mut answer = ours.to_vec();
            answer[12..20].rotate_left(4);
            answer[20..24].rotate_left(2);
            answer[28..].copy_from_slice(b"in!");
            // Without a checksum, which UDP over IPv4 may leave out.
            answer[26..28].fill(0);
            let (head, payload) = answer.split_at(28);
            let slices = [IoSlice::new(&[0; VNET_LEN]), IoSlice::new(head), IoSlice::new(payload)];
            assert_eq!(tun.send(&slices).unwrap(), VNET_LEN + 31);
            let mut got = [0; 8];
            assert_eq!(socket.recv_from(&mut got).unwrap(), (3, "10.9.0.2:6000".parse().unwrap()));
            assert_eq!(&got[..3], b"in!");
            let nonsense = [IoSlice::new(&[0; VNET_LEN]), IoSlice::new(&[0xff; 40])];
            assert_eq!(tun.send(&nonsense).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        })
        .unwrap();
    }

    #[test]
    fn without_a_carrier_it_takes_nothing_of_the_system_and_with_one_all() {
        run_in(fresh_namespace(), || {
            let tun = Tun::open(&TapOptions::new("weft0")).unwrap();
            ip("link set weft0 addrgenmode none up");
            ip("address add 10.9.0.1/24 dev weft0");
            let socket = std::net::UdpSocket::bind("10.9.0.1:5000").unwrap();
            let (mut vnet, mut packet) = ([0; VNET_LEN], vec![0; PACKET_LEN_MAX]);
            // A packet that was sent just before a change does not arrive after it.
            for round in 0..20 {
                tun.set_carrier(false).unwrap();
                assert_eq!(flags("weft0").unwrap() & libc::IFF_RUNNING, 0);
                while tun.recv(&mut vnet, &mut packet).is_ok() {}
                socket.send_to(b"to nobody", "10.9.0.2:6000").unwrap();
                let nothing = tun.recv(&mut vnet, &mut packet).unwrap_err();
                assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
                tun.set_carrier(true).unwrap();
                assert_eq!(flags("weft0").unwrap() & libc::IFF_RUNNING, libc::IFF_RUNNING);
                socket.send_to(b"out", "10.9.0.2:6000").unwrap();
                assert_eq!(tun.recv(&mut vnet, &mut packet).unwrap(), 31, "round {round}");
            }
            ip("link set weft0 down");
            ip("link set weft0 name weft1");
            tun.set_carrier(false).unwrap();
            assert!(ask_link("weft0").is_err() && flags("weft0").is_err());
        })
        .unwrap();
    }

    #[test]
    fn a_device_of_frames_is_no_device_of_packets() {
        run_in(fresh_namespace(), || {
            let options = TapOptions::new("weft0");
            let _tap = Tap::open(&options).unwrap();
            assert!(matches!(Tun::open(&options).unwrap_err(), IoError::DeviceBusy { .. }));
        })
        .unwrap();
    }
}
