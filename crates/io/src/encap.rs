//! The UDP sockets behind which the kernel takes ESP out of UDP (RFC 3948).

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::IoError;

/// The NAT keepalive (RFC 3948 section 2.3).
const KEEPALIVE: [u8; 1] = [0xff];
/// What is left to the sockets themselves (datagrams with the marker of IKE) is read by nobody and
/// need not be held: the kernel makes the smallest buffer of this many bytes.
const RECEIVE_BUFFER_BYTES: usize = 1;
/// ESP behind a socket that also gets IKE (`linux/udp.h`); the `libc` crate has not the name.
const UDP_ENCAP_ESPINUDP: libc::c_int = 2;
/// How often a free port is looked for that is free for IPv4 and IPv6.
const PORT_ATTEMPTS_MAX: u32 = 16;

/// All addresses of the host, of each family.
const UNSPECIFIED: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];

/// One UDP port, for IPv4 and IPv6, on which the kernel takes ESP packets and hands them to its
/// IPsec states. It does so as long as the sockets live, in whichever process; ESP leaves the host
/// from the port that the state names, not through the sockets.
#[derive(Debug)]
pub struct EncapSocket {
    v4: Option<UdpSocket>,
    v6: Option<UdpSocket>,
    port: u16,
}

impl EncapSocket {
    /// Binds `port` (0: any free one) on `address`, or on all addresses of the host, in the calling
    /// thread's network namespace. A kernel without IPv6 gives IPv4 alone. It needs no ESP in the
    /// kernel: packets are then dropped.
    ///
    /// # Errors
    /// [`IoError::PortInUse`], [`IoError::NoEspInUdp`], or what the kernel refused.
    pub fn bind(address: Option<IpAddr>, port: u16) -> Result<Self, IoError> {
        match address {
            Some(IpAddr::V4(v4)) => Self::of(Some(open(v4.into(), port)?), None),
            Some(IpAddr::V6(v6)) => Self::of(None, Some(open(v6.into(), port)?)),
            None => Self::bind_all(port),
        }
    }

    /// Takes back sockets that [`Self::into_fds`] gave away.
    ///
    /// # Errors
    /// [`IoError::Kernel`] if they are no bound UDP sockets of one port, at most one for IPv4 and one
    /// for IPv6, or [`IoError::NoEspInUdp`].
    pub fn from_fds(fds: Vec<OwnedFd>) -> Result<Self, IoError> {
        const WHAT: &str = "take over the sockets for ESP in UDP";
        let wrong = |reason| IoError::of(WHAT, io::Error::new(io::ErrorKind::InvalidInput, reason));
        let (mut v4, mut v6) = (None, None);
        for fd in fds {
            let kind =
                sockopt::socket_type(&fd).map_err(|error| IoError::of(WHAT, error.into()))?;
            if kind != SocketType::DGRAM {
                return Err(wrong("a socket that is not of UDP"));
            }
            let socket = UdpSocket::from(fd);
            let local = socket.local_addr().map_err(|error| IoError::of(WHAT, error))?;
            let slot = if local.is_ipv4() { &mut v4 } else { &mut v6 };
            if local.port() == 0 || slot.is_some() {
                return Err(wrong("a socket without a port, or two of one family"));
            }
            take_esp(&socket)?;
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
        let is_here = |ip| matches!(open(ip, self.port), Err(IoError::PortInUse { .. }));
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
        let socket = if to.is_ipv4() { &self.v4 } else { &self.v6 };
        let socket = socket.as_ref().ok_or(io::ErrorKind::AddrNotAvailable)?;
        socket.send_to(&KEEPALIVE, to).map(|_| ())
    }

    fn bind_all(port: u16) -> Result<Self, IoError> {
        let mut last = IoError::PortInUse { port };
        for _ in 0..PORT_ATTEMPTS_MAX {
            let v4 = open(UNSPECIFIED[0], port)?;
            let chosen = port_of(&v4)?;
            match open(UNSPECIFIED[1], chosen) {
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
        const WHAT: &str = "use the sockets for ESP in UDP";
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

fn open(address: IpAddr, port: u16) -> Result<UdpSocket, IoError> {
    const WHAT: &str = "open a UDP socket for ESP";
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
    take_esp(&socket)?;
    rustix::net::bind(&socket, &SocketAddr::new(address, port)).map_err(|error| match error {
        Errno::ADDRINUSE => IoError::PortInUse { port },
        error => IoError::of("bind a UDP socket for ESP", error.into()),
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
        _ => IoError::of("switch ESP in UDP on", source),
    }
}

fn port_of(socket: &UdpSocket) -> Result<u16, IoError> {
    let local = socket.local_addr();
    local.map(|local| local.port()).map_err(|error| IoError::of("read a socket's port", error))
}

fn ipv6_is_there() -> bool {
    open(UNSPECIFIED[1], 0).is_ok()
}

/// What a kernel without IPv6, or with it switched off, answers.
fn without_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;

    const LOOPBACK: [IpAddr; 2] =
        [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

    fn receiver(address: IpAddr) -> UdpSocket {
        let socket = UdpSocket::bind((address, 0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket
    }

    #[test]
    fn a_keepalive_is_one_byte_from_the_port() {
        let encap = EncapSocket::bind(None, 0).unwrap();
        for address in LOOPBACK {
            let socket = receiver(address);
            encap.send_keepalive(socket.local_addr().unwrap()).unwrap();
            let mut bytes = [0; 16];
            let (length, from) = socket.recv_from(&mut bytes).unwrap();
            assert_eq!((&bytes[..length], from.port()), (&[0xff][..], encap.port()));
        }
    }

    #[test]
    fn the_kernel_takes_esp_and_leaves_the_rest() {
        for address in LOOPBACK {
            let encap = EncapSocket::bind(Some(address), 0).unwrap();
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
            let length = socket.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..length], &[0, 0, 0, 0, 9, 9, 9, 9, 9], "{address}");
        }
    }

    #[test]
    fn sockets_given_away_come_back() {
        let encap = EncapSocket::bind(None, 0).unwrap();
        let port = encap.port();
        assert_eq!((encap.fds().count(), encap.ipv6()), (2, true));
        let back = EncapSocket::from_fds(encap.into_fds()).unwrap();
        assert_eq!((back.port(), back.ipv6()), (port, true));
        assert!(EncapSocket::from_fds(Vec::new()).is_err());
        let tcp = std::net::TcpListener::bind((LOOPBACK[0], 0)).unwrap();
        assert!(EncapSocket::from_fds(vec![tcp.into()]).is_err());
        let two = [receiver(LOOPBACK[0]), receiver(LOOPBACK[0])].map(OwnedFd::from);
        assert!(EncapSocket::from_fds(two.into()).is_err());
    }

    #[test]
    fn sockets_serve_the_address_port_and_namespace_that_they_were_made_for() {
        let all = EncapSocket::bind(None, 0).unwrap();
        assert!(all.serves(None, all.port()) && all.serves(None, 0));
        assert!(!all.serves(None, all.port() ^ 1));
        for address in LOOPBACK {
            assert!(!all.serves(Some(address), all.port()));
            let one = EncapSocket::bind(Some(address), 0).unwrap();
            assert!(one.serves(Some(address), one.port()));
            assert!(!one.serves(None, one.port()));
            assert!(!one.serves(Some(LOOPBACK[usize::from(address.is_ipv4())]), one.port()));
        }
        let only_v4 = EncapSocket::bind(Some(UNSPECIFIED[0]), 0).unwrap();
        assert!(!only_v4.serves(None, only_v4.port()), "IPv6 would be without");
        let elsewhere = std::thread::spawn(move || {
            crate::namespace::unshare_network().unwrap();
            all.serves(None, all.port())
        });
        assert!(!elsewhere.join().unwrap(), "of another namespace");
    }

    #[test]
    fn a_taken_port_and_a_refusal_are_named() {
        let first = EncapSocket::bind(None, 0).unwrap();
        let port = first.port();
        let error = EncapSocket::bind(None, port).unwrap_err();
        assert!(matches!(error, IoError::PortInUse { port: taken } if taken == port), "{error}");
        let only_v4 = EncapSocket::bind(Some(LOOPBACK[0]), 0).unwrap();
        let error = only_v4.send_keepalive((LOOPBACK[1], 9).into()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        let error = refused(io::Error::from_raw_os_error(libc::ENOPROTOOPT));
        assert!(error.to_string().contains("ESP in UDP"), "{error}");
    }
}
