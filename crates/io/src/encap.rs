//! The UDP sockets behind which the kernel takes packets out of UDP: ESP (RFC 3948), or packets for an `ovpn`
//! device.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::IoError;

/// The NAT keepalive (RFC 3948 section 2.3).
const KEEPALIVE: [u8; 1] = [0xff];
/// Datagrams with the marker of IKE are left to the sockets, never read, and need no room. The kernel makes the
/// smallest buffer of this many bytes.
const RECEIVE_BUFFER_BYTES: usize = 1;
/// ESP behind a socket that also gets IKE (`linux/udp.h`); the `libc` crate has not the name.
const UDP_ENCAP_ESPINUDP: libc::c_int = 2;
/// How often a free port is looked for that is free for IPv4 and IPv6.
const PORT_ATTEMPTS_MAX: u32 = 16;

/// All addresses of the host, of each family.
const UNSPECIFIED: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// The part of the kernel that takes the packets of an [`EncapSocket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taker {
    /// The kernel's IPsec states, from the start. ESP leaves the host from the port that the state
    /// names, not through the sockets.
    Ipsec,
    /// An `ovpn` device of the kernel, from when it is given the sockets for its peers.
    DataChannel,
}

/// One UDP port, for IPv4 and IPv6, on which the kernel takes packets itself. It does so as long as the
/// sockets live, in whichever process.
#[derive(Debug)]
pub struct EncapSocket {
    v4: Option<UdpSocket>,
    v6: Option<UdpSocket>,
    port: u16,
}

impl EncapSocket {
    /// Binds `port` (0: any free one) on `address`, or on all addresses of the host, in the calling
    /// thread's network namespace. A kernel without IPv6 gives IPv4 alone. [`Taker::Ipsec`] needs no ESP
    /// in the kernel: packets are then dropped.
    ///
    /// # Errors
    /// [`IoError::PortInUse`], [`IoError::NoEspInUdp`], or the kernel's error.
    pub fn bind(taker: Taker, address: Option<IpAddr>, port: u16) -> Result<Self, IoError> {
        match address {
            Some(IpAddr::V4(v4)) => Self::of(Some(open(taker, v4.into(), port)?), None),
            Some(IpAddr::V6(v6)) => Self::of(None, Some(open(taker, v6.into(), port)?)),
            None => Self::bind_all(taker, port),
        }
    }

    /// Takes back sockets that [`Self::into_fds`] gave away.
    ///
    /// # Errors
    /// [`IoError::Kernel`] if they are no bound UDP sockets of one port, at most one for IPv4 and one
    /// for IPv6, or [`IoError::NoEspInUdp`].
    pub fn from_fds(taker: Taker, fds: Vec<OwnedFd>) -> Result<Self, IoError> {
        const WHAT: &str = "take over the sockets of a UDP port";
        let wrong = |reason| IoError::of(WHAT, io::Error::new(io::ErrorKind::InvalidInput, reason));
        let (mut v4, mut v6) = (None, None);
        for fd in fds {
            let kind =
                sockopt::socket_type(&fd).map_err(|error| IoError::of(WHAT, error.into()))?;
            if kind != SocketType::DGRAM {
                return Err(wrong("not a UDP socket"));
            }
            let socket = UdpSocket::from(fd);
            let local = socket.local_addr().map_err(|error| IoError::of(WHAT, error))?;
            let slot = if local.is_ipv4() { &mut v4 } else { &mut v6 };
            if local.port() == 0 || slot.is_some() {
                return Err(wrong("a socket has no port, or two have the same family"));
            }
            taker.prepare(&socket)?;
            *slot = Some(socket);
        }
        Self::of(v4, v6)
    }

    /// Whether these are the sockets that [`Self::bind`] would give: of this address and port, and of
    /// the calling thread's network namespace.
    pub fn serves(&self, address: Option<IpAddr>, port: u16) -> bool {
        let local = |socket: &Option<UdpSocket>| Some(socket.as_ref()?.local_addr().ok()?.ip());
        let (v4, v6) = (local(&self.v4), local(&self.v6));
        let fits = match address {
            Some(IpAddr::V4(_)) => (v4, v6) == (address, None),
            Some(IpAddr::V6(_)) => (v4, v6) == (None, address),
            None => v4 == Some(UNSPECIFIED[0]) && v6 == ipv6_is_there().then_some(UNSPECIFIED[1]),
        };
        // In another namespace the port would be free in this one.
        let taker = Taker::DataChannel;
        let is_here = |ip| matches!(open(taker, ip, self.port), Err(IoError::PortInUse { .. }));
        fits && (port == 0 || port == self.port) && v4.into_iter().chain(v6).all(is_here)
    }

    /// The sockets, for a process that holds them while this one is restarted.
    pub fn into_fds(self) -> Vec<OwnedFd> {
        self.v4.into_iter().chain(self.v6).map(OwnedFd::from).collect()
    }

    /// The sockets.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.v4.iter().chain(&self.v6).map(AsFd::as_fd)
    }

    /// The socket that packets to and from this address go by; `None` without one of its family.
    pub fn fd_for(&self, remote: IpAddr) -> Option<BorrowedFd<'_>> {
        self.socket_for(remote).map(AsFd::as_fd)
    }

    /// The port.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Whether it takes packets over IPv6.
    pub const fn ipv6(&self) -> bool {
        self.v6.is_some()
    }

    /// Sends the one byte that keeps a NAT's mapping for this port alive.
    ///
    /// # Errors
    /// `AddrNotAvailable`: no socket of this family; `WouldBlock` or ENOBUFS: no room now; or the
    /// network's answer to an earlier one.
    pub fn send_keepalive(&self, to: SocketAddr) -> io::Result<()> {
        let to = SocketAddr::new(to.ip().to_canonical(), to.port());
        let socket = self.socket_for(to.ip()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        socket.send_to(&KEEPALIVE, to).map(|_| ())
    }

    fn socket_for(&self, remote: IpAddr) -> Option<&UdpSocket> {
        if remote.to_canonical().is_ipv4() { self.v4.as_ref() } else { self.v6.as_ref() }
    }

    fn bind_all(taker: Taker, port: u16) -> Result<Self, IoError> {
        let mut last = IoError::PortInUse { port };
        for _ in 0..PORT_ATTEMPTS_MAX {
            let v4 = open(taker, UNSPECIFIED[0], port)?;
            let chosen = port_of(&v4)?;
            match open(taker, UNSPECIFIED[1], chosen) {
                Ok(v6) => return Self::of(Some(v4), Some(v6)),
                Err(error @ IoError::PortInUse { .. }) if port == 0 => last = error,
                Err(IoError::Kernel { source, .. }) if without_ipv6(&source) => {
                    return Self::of(Some(v4), None);
                }
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    fn of(v4: Option<UdpSocket>, v6: Option<UdpSocket>) -> Result<Self, IoError> {
        const WHAT: &str = "use the sockets of a UDP port";
        let mut ports = Vec::new();
        for socket in v4.iter().chain(&v6) {
            ports.push(port_of(socket)?);
        }
        match ports.as_slice() {
            [port] => Ok(Self { port: *port, v4, v6 }),
            [port, other] if port == other => Ok(Self { port: *port, v4, v6 }),
            _ => Err(IoError::of(WHAT, io::ErrorKind::InvalidInput.into())),
        }
    }
}

impl Taker {
    /// Switches a socket over to it, where that is not left to the taker.
    fn prepare(self, socket: &UdpSocket) -> Result<(), IoError> {
        match self {
            Self::Ipsec => take_esp(socket),
            Self::DataChannel => Ok(()),
        }
    }
}

fn open(taker: Taker, address: IpAddr, port: u16) -> Result<UdpSocket, IoError> {
    const WHAT: &str = "open a UDP socket for the kernel's own use";
    let failed = |error: Errno| IoError::of(WHAT, error.into());
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, flags, None).map_err(failed)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, true).map_err(failed)?;
    }
    sockopt::set_socket_recv_buffer_size(&fd, RECEIVE_BUFFER_BYTES).map_err(failed)?;
    let socket = UdpSocket::from(fd);
    // Before it has a port, so that no ESP packet ever goes to its queue.
    taker.prepare(&socket)?;
    rustix::net::bind(&socket, &SocketAddr::new(address, port)).map_err(|error| match error {
        Errno::ADDRINUSE => IoError::PortInUse { port },
        error => IoError::of("bind a UDP socket for the kernel's own use", error.into()),
    })?;
    Ok(socket)
}

/// Has the kernel take ESP packets from the socket.
fn take_esp(socket: &UdpSocket) -> Result<(), IoError> {
    let value: libc::c_int = UDP_ENCAP_ESPINUDP;
    // SAFETY: the option's value is read from `value`, an int of the length given.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_UDP,
            libc::UDP_ENCAP,
            (&raw const value).cast(),
            mem::size_of_val(&value) as libc::socklen_t,
        )
    };
    if rc < 0 { Err(refused(io::Error::last_os_error())) } else { Ok(()) }
}

fn refused(source: io::Error) -> IoError {
    match source.raw_os_error() {
        Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP) => IoError::NoEspInUdp { source },
        _ => IoError::of("enable ESP in UDP", source),
    }
}

fn port_of(socket: &UdpSocket) -> Result<u16, IoError> {
    let local = socket.local_addr();
    local.map(|local| local.port()).map_err(|error| IoError::of("read a socket's port", error))
}

fn ipv6_is_there() -> bool {
    open(Taker::DataChannel, UNSPECIFIED[1], 0).is_ok()
}

/// Whether a kernel without IPv6, or with it switched off, answers so.
fn without_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;
    use crate::uninterrupted;

    const LOOPBACK: [IpAddr; 2] =
        [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

    fn receiver(address: IpAddr) -> UdpSocket {
        let socket = UdpSocket::bind((address, 0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket
    }

    #[test]
    fn a_keepalive_is_one_byte_from_the_port() {
        let encap = EncapSocket::bind(Taker::Ipsec, None, 0).unwrap();
        for address in LOOPBACK {
            let socket = receiver(address);
            encap.send_keepalive(socket.local_addr().unwrap()).unwrap();
            let mut bytes = [0; 16];
            let (length, from) = uninterrupted(|| socket.recv_from(&mut bytes)).unwrap();
            assert_eq!((&bytes[..length], from.port()), (&[0xff][..], encap.port()));
        }
    }

    #[test]
    fn a_port_for_a_data_channel_leaves_packets_to_the_device() {
        let encap = EncapSocket::bind(Taker::DataChannel, None, 0).unwrap();
        let fds = LOOPBACK.map(|address| encap.fd_for(address).unwrap().as_raw_fd());
        assert_ne!(fds[0], fds[1]);
        let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped().into();
        assert_eq!(encap.fd_for(mapped).unwrap().as_raw_fd(), fds[0]);
        let only_v4 = EncapSocket::bind(Taker::DataChannel, Some(LOOPBACK[0]), 0).unwrap();
        assert!(only_v4.fd_for(LOOPBACK[1]).is_none());
        let port = only_v4.port();
        let [fd] = <[OwnedFd; 1]>::try_from(only_v4.into_fds()).unwrap();
        let socket = UdpSocket::from(fd);
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        // As ESP the kernel would take it.
        receiver(LOOPBACK[0]).send_to(&[7; 64], (LOOPBACK[0], port)).unwrap();
        let mut bytes = [0; 128];
        assert_eq!(uninterrupted(|| socket.recv(&mut bytes)).unwrap(), 64);
    }

    #[test]
    fn the_kernel_takes_esp_and_leaves_the_rest() {
        for address in LOOPBACK {
            let encap = EncapSocket::bind(Taker::Ipsec, Some(address), 0).unwrap();
            let port = encap.port();
            let sockets = encap.into_fds();
            let [fd] = <[OwnedFd; 1]>::try_from(sockets).unwrap();
            let socket = UdpSocket::from(fd);
            socket.set_nonblocking(false).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let sender = receiver(address);
            sender.send_to(&[0xff], (address, port)).unwrap();
            sender.send_to(&[7; 64], (address, port)).unwrap();
            sender.send_to(&[0, 0, 0, 0, 9, 9, 9, 9, 9], (address, port)).unwrap();
            let mut bytes = [1; 128];
            let length = uninterrupted(|| socket.recv(&mut bytes)).unwrap();
            assert_eq!(&bytes[..length], &[0, 0, 0, 0, 9, 9, 9, 9, 9], "{address}");
        }
    }

    #[test]
    fn sockets_given_away_come_back() {
        let encap = EncapSocket::bind(Taker::Ipsec, None, 0).unwrap();
        let port = encap.port();
        assert_eq!((encap.fds().count(), encap.ipv6()), (2, true));
        let back = EncapSocket::from_fds(Taker::Ipsec, encap.into_fds()).unwrap();
        assert_eq!((back.port(), back.ipv6()), (port, true));
        assert!(EncapSocket::from_fds(Taker::Ipsec, Vec::new()).is_err());
        let tcp = std::net::TcpListener::bind((LOOPBACK[0], 0)).unwrap();
        assert!(EncapSocket::from_fds(Taker::Ipsec, vec![tcp.into()]).is_err());
        let two = [receiver(LOOPBACK[0]), receiver(LOOPBACK[0])].map(OwnedFd::from);
        assert!(EncapSocket::from_fds(Taker::Ipsec, two.into()).is_err());
    }

    #[test]
    fn sockets_serve_the_address_port_and_namespace_that_they_were_made_for() {
        let all = EncapSocket::bind(Taker::Ipsec, None, 0).unwrap();
        assert!(all.serves(None, all.port()) && all.serves(None, 0));
        assert!(!all.serves(None, all.port() ^ 1));
        for address in LOOPBACK {
            assert!(!all.serves(Some(address), all.port()));
            let one = EncapSocket::bind(Taker::Ipsec, Some(address), 0).unwrap();
            assert!(one.serves(Some(address), one.port()));
            assert!(!one.serves(None, one.port()));
            assert!(!one.serves(Some(LOOPBACK[usize::from(address.is_ipv4())]), one.port()));
        }
        let only_v4 = EncapSocket::bind(Taker::Ipsec, Some(UNSPECIFIED[0]), 0).unwrap();
        assert!(!only_v4.serves(None, only_v4.port()), "IPv6 would be without");
        let elsewhere = std::thread::spawn(move || {
            crate::namespace::unshare_network().unwrap();
            all.serves(None, all.port())
        });
        assert!(!elsewhere.join().unwrap(), "of another namespace");
    }

    #[test]
    fn a_taken_port_and_a_refusal_are_named() {
        let first = EncapSocket::bind(Taker::Ipsec, None, 0).unwrap();
        let port = first.port();
        let error = EncapSocket::bind(Taker::Ipsec, None, port).unwrap_err();
        assert!(matches!(error, IoError::PortInUse { port: taken } if taken == port), "{error}");
        let only_v4 = EncapSocket::bind(Taker::Ipsec, Some(LOOPBACK[0]), 0).unwrap();
        let error = only_v4.send_keepalive((LOOPBACK[1], 9).into()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        let error = refused(io::Error::from_raw_os_error(libc::ENOPROTOOPT));
        assert!(error.to_string().contains("ESP in UDP"), "{error}");
    }
}
