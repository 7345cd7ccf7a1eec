//! Sockets that somebody else has opened, such as those that come over a unix socket.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketType, ipproto, sockopt};

use super::{SOCKET_BUFFER_BYTES, UdpSocket, option};

/// Of the states of a connection (`linux/tcp_states.h`); the `libc` crate has not the name.
const TCP_ESTABLISHED: u8 = 1;

/// A socket that carries datagrams or a stream of them.
#[derive(Debug)]
pub enum Adopted {
    /// UDP. The kernel fragments datagrams longer than the route takes, as the program that opened it would
    /// expect.
    Udp(UdpSocket),
    /// A connection, non-blocking.
    Tcp(TcpStream),
}

impl Adopted {
    /// Makes a socket of ours of an open UDP socket or a connected TCP socket: non-blocking, with runs where
    /// the kernel has them. Holders of other descriptors of it see that.
    ///
    /// # Errors
    /// `InvalidInput`: it is neither. `AddrInUse`: the kernel takes another protocol out of the datagrams
    /// that come by it. Else the kernel's error.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        let neither = || io::Error::from(io::ErrorKind::InvalidInput);
        let kind = sockopt::socket_type(&fd).map_err(|_| neither())?;
        let protocol = sockopt::socket_protocol(&fd)?;
        rustix::io::ioctl_fionbio(&fd, true)?;
        match (kind, protocol) {
            (SocketType::DGRAM, Some(ipproto::UDP)) => {
                if option(fd.as_fd(), libc::SOL_UDP, libc::UDP_ENCAP)? != 0 {
                    return Err(io::ErrorKind::AddrInUse.into());
                }
                UdpSocket::adopt(fd).map(Self::Udp)
            }
            (SocketType::STREAM, Some(ipproto::TCP)) => {
                // The state is the first byte of the kernel's answer (tcp(7)).
                let state = option(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO)?;
                if state.to_ne_bytes()[0] != TCP_ESTABLISHED {
                    return Err(neither());
                }
                let stream = TcpStream::from(fd);
                stream.set_nodelay(true)?;
                Ok(Self::Tcp(stream))
            }
            _ => Err(neither()),
        }
    }

    /// A number by which two descriptors of one socket are known (SO_COOKIE).
    ///
    /// # Errors
    /// The kernel refused the option.
    pub fn cookie(&self) -> io::Result<u64> {
        let cookie = match self {
            Self::Udp(socket) => sockopt::socket_cookie(socket),
            Self::Tcp(stream) => sockopt::socket_cookie(stream),
        };
        Ok(cookie?)
    }
}

impl UdpSocket {
    fn adopt(fd: OwnedFd) -> io::Result<Self> {
        let ipv6 = sockopt::socket_domain(&fd)? == AddressFamily::INET6;
        let mut socket = Self { fd, ipv6, gro: false, port: 0 };
        socket.port = socket.local_port()?;
        socket.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)?;
        if ipv6 {
            socket.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DONT)?;
        }
        for (force, plain) in
            [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
        {
            if socket.set(libc::SOL_SOCKET, force, SOCKET_BUFFER_BYTES).is_err() {
                socket.set(libc::SOL_SOCKET, plain, SOCKET_BUFFER_BYTES)?;
            }
        }
        // IPv4 datagrams on a socket of IPv6 are told of by its option, too.
        match ipv6 {
            true => socket.set(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?,
            false => socket.set(libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?,
        }
        socket.gro = socket.set(libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        Ok(socket)
    }

    /// Whether it sends to IPv4 addresses, and whether to IPv6 addresses.
    ///
    /// # Errors
    /// The kernel refused the option.
    pub fn families(&self) -> io::Result<(bool, bool)> {
        if !self.ipv6 {
            return Ok((true, false));
        }
        Ok((!sockopt::ipv6_v6only(self)?, true))
    }

    /// The address that it is bound to.
    ///
    /// # Errors
    /// The kernel did not give the address.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        let address = rustix::net::getsockname(self.as_fd())?;
        SocketAddr::try_from(address).map_err(|_| io::ErrorKind::InvalidInput.into())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net;

    use super::*;
    use crate::udp::RecvBatch;

    #[test]
    fn a_udp_socket_of_somebody_else_carries_runs() {
        let ours = net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let other = ours.try_clone().unwrap();
        let address = ours.local_addr().unwrap();
        let adopted = Adopted::adopt(ours.into()).unwrap();
        let again = Adopted::adopt(other.into()).unwrap();
        assert_eq!(adopted.cookie().unwrap(), again.cookie().unwrap());
        let Adopted::Udp(socket) = adopted else { panic!("a UDP socket is one") };
        assert_eq!(socket.local_address().unwrap(), address);
        assert_eq!((socket.port(), socket.families().unwrap()), (address.port(), (true, false)));
        let mut batch = RecvBatch::new();
        let none = socket.recv(&mut batch, 4).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::WouldBlock);
        socket.send_run(&[7; 300], 100, &socket.remote(address).unwrap()).unwrap();
        let messages = socket.recv(&mut batch, 4).unwrap();
        let bytes: usize = (0..messages).map(|at| batch.message(at).unwrap().range.len()).sum();
        assert_eq!(bytes, 300);
    }

    #[test]
    fn families_are_those_that_the_socket_sends_to() {
        let Adopted::Udp(both) =
            Adopted::adopt(net::UdpSocket::bind("[::]:0").unwrap().into()).unwrap()
        else {
            panic!("a UDP socket is one")
        };
        assert_eq!(both.families().unwrap(), (true, true));
    }

    #[test]
    fn the_address_that_a_datagram_came_to_is_told() {
        let pairs = [("0.0.0.0:0", "127.0.0.7"), ("[::]:0", "127.0.0.7"), ("[::]:0", "::1")];
        for (bound, to) in pairs {
            let adopted = Adopted::adopt(net::UdpSocket::bind(bound).unwrap().into()).unwrap();
            let Adopted::Udp(socket) = adopted else { panic!("a UDP socket is one") };
            let to: net::IpAddr = to.parse().unwrap();
            let from = UdpSocket::bind(None, 0).unwrap();
            let there = from.remote(SocketAddr::new(to, socket.port())).unwrap().with_tos(2);
            // A run, so that every kind of control message is there.
            from.send_run(&[7; 300], 100, &there).unwrap();
            let mut batch = RecvBatch::new();
            while socket.recv(&mut batch, 4).is_err() {
                std::thread::yield_now();
            }
            assert_eq!(batch.destination(0), Some(to), "{bound}");
            let message = batch.message(0).unwrap();
            assert_eq!((message.segment, message.source.port()), (100, from.port()));
        }
    }

    #[test]
    fn a_connection_is_adopted_and_what_is_none_is_refused() {
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(matches!(Adopted::adopt(stream.into()).unwrap(), Adopted::Tcp(_)));
        let refused = |fd: OwnedFd| Adopted::adopt(fd).unwrap_err().kind();
        let (half, other) =
            (TcpStream::connect(listener.local_addr().unwrap()).unwrap(), &listener);
        drop((other.accept().unwrap(), other.accept().unwrap()));
        // The other end has closed it, which takes a moment.
        while !matches!(half.peek(&mut [0; 1]), Ok(0)) {}
        assert_eq!(refused(half.into()), io::ErrorKind::InvalidInput);
        assert_eq!(refused(listener.into()), io::ErrorKind::InvalidInput);
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(refused(file.into()), io::ErrorKind::InvalidInput);
        let encapsulated = crate::encap::EncapSocket::bind(
            crate::encap::Taker::Ipsec,
            Some("127.0.0.1".parse().unwrap()),
            0,
        );
        let encapsulated = encapsulated.map(|socket| socket.into_fds().remove(0));
        // A kernel without ESP has no such sockets.
        if let Ok(encapsulated) = encapsulated {
            assert_eq!(refused(encapsulated), io::ErrorKind::AddrInUse);
        }
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(refused(unix.into()), io::ErrorKind::InvalidInput);
    }
}
