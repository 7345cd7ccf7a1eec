//! Single datagrams of a socket that somebody else has set up, with the address of this host that they came to or
//! leave from.

use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};

use super::control::{Control, send_header};
use super::{Remote, address_of, set_option, zeroed_storage};

/// Has the kernel tell the address that each datagram came to, for [`recv_told`]. IPv4 datagrams on a socket of IPv6
/// are told of, too.
///
/// # Errors
/// It is no UDP socket.
pub fn tell_destinations(socket: impl AsFd) -> io::Result<()> {
    let socket = socket.as_fd();
    match sockopt::socket_domain(socket)? {
        AddressFamily::INET6 => set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1),
        _ => set_option(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 1),
    }
}

/// Receives one datagram. Returns its length, its source, and the address of this host that it came to, if the kernel
/// tells. A datagram longer than `buffer` is cut off.
///
/// # Errors
/// `WouldBlock` if there is none on a socket that does not block; an error of an earlier send.
pub fn recv_told(
    socket: impl AsFd,
    buffer: &mut [u8],
) -> io::Result<(usize, SocketAddr, Option<IpAddr>)> {
    let (mut name, mut control) = (zeroed_storage(), Control::EMPTY);
    let mut iovec = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: a `msghdr` is a C struct of integers and pointers, for which zero is valid.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_name = (&raw mut name).cast();
    header.msg_namelen = mem::size_of_val(&name) as libc::socklen_t;
    header.msg_iov = &raw mut iovec;
    header.msg_iovlen = 1;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = mem::size_of_val(&control.0) as _;
    // SAFETY: `header` points to `name`, `iovec` and `control`, and `iovec` to `buffer`, all with their lengths. They
    // outlive the call, and nothing else uses them during it.
    let got = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut header, 0) };
    let len = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
    Ok((len, address_of(&name), control.destination(header.msg_controllen as _)))
}

/// Sends one datagram from an address of this host. If none is given, or it is no longer this host's, the system
/// chooses.
///
/// # Errors
/// The kernel refused to send.
pub fn send_from(
    socket: impl AsFd,
    datagram: &[u8],
    to: SocketAddr,
    from: Option<IpAddr>,
) -> io::Result<()> {
    let socket = socket.as_fd();
    let from = from.filter(|from| from.is_ipv4() == to.is_ipv4());
    let to = Remote::of(to);
    match send(socket, datagram, &to.with_source(from)) {
        Err(error) if from.is_some() && is_unroutable(&error) => send(socket, datagram, &to),
        sent => sent,
    }
}

/// Whether this is an error of the kernel's for a source address that is not the host's. It has other causes, too.
#[cold]
pub fn is_unroutable(error: &io::Error) -> bool {
    let errors = [Errno::INVAL, Errno::NETUNREACH, Errno::ADDRNOTAVAIL];
    Errno::from_io_error(error).is_some_and(|error| errors.contains(&error))
}

fn send(socket: BorrowedFd<'_>, datagram: &[u8], to: &Remote) -> io::Result<()> {
    let iovec =
        libc::iovec { iov_base: datagram.as_ptr().cast_mut().cast(), iov_len: datagram.len() };
    let mut control = Control::EMPTY;
    let header = send_header(&iovec, to, None, &mut control)?;
    // SAFETY: `header` points to `to`, `iovec` and `control`, which outlive the call, with their lengths; `iovec`
    // points to `datagram`, which the call only reads.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, 0) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::UdpSocket;
    use std::time::Duration;

    use super::*;
    use crate::uninterrupted;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A socket on all addresses of a family, and its port.
    fn bound(all: &str) -> (UdpSocket, u16) {
        let socket = UdpSocket::bind((all.parse::<IpAddr>().unwrap(), 0)).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let port = socket.local_addr().unwrap().port();
        (socket, port)
    }

    #[test]
    fn an_answer_leaves_from_the_address_that_was_spoken_to() {
        for (all, client, server) in [
            ("0.0.0.0", "127.0.0.1", "127.0.0.7"),
            ("::", "127.0.0.1", "127.0.0.7"),
            ("::", "::1", "::1"),
        ] {
            let (socket, port) = bound(all);
            tell_destinations(&socket).unwrap();
            let (other, _) = bound(client);
            let at = SocketAddr::new(server.parse().unwrap(), port);
            other.send_to(b"first", at).unwrap();
            let mut buffer = [0; 16];
            let (len, source, local) = recv_told(&socket, &mut buffer).unwrap();
            assert_eq!((&buffer[..len], source), (&b"first"[..], other.local_addr().unwrap()));
            assert_eq!(local, Some(at.ip()));
            send_from(&socket, b"answer", source, local).unwrap();
            assert_eq!(uninterrupted(|| other.recv_from(&mut buffer)).unwrap(), (6, at));
        }
    }

    #[test]
    fn an_address_that_is_gone_leaves_the_choice_to_the_system() {
        let (socket, port) = bound("0.0.0.0");
        let (other, _) = bound("127.0.0.1");
        let to = other.local_addr().unwrap();
        for gone in ["192.0.2.77", "2001:db8::77"] {
            send_from(&socket, b"x", to, Some(gone.parse().unwrap())).unwrap();
            let at = SocketAddr::new(to.ip(), port);
            let received = uninterrupted(|| other.recv_from(&mut [0; 4]));
            assert_eq!(received.unwrap(), (1, at), "{gone}");
        }
    }
}
