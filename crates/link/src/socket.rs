//! The single UDP socket of all links: an IPv6 wildcard that takes IPv4 too, or IPv4 if there is no
//! IPv6.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use crate::error::LinkError;

/// Room for a burst of datagrams, so that a flood does not displace those of running links at once.
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;

/// Binds to one address, or to all of them.
pub(crate) fn open(host: Option<IpAddr>, port: u16) -> Result<UdpSocket, LinkError> {
    let address = SocketAddr::new(host.unwrap_or(Ipv6Addr::UNSPECIFIED.into()), port);
    let fail = |source| LinkError::Bind { address, source };
    match open_at(address) {
        Err(error) if host.is_none() && no_ipv6(&error) => {
            let address = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
            open_at(address).map_err(|source| LinkError::Bind { address, source })
        }
        other => other.map_err(fail),
    }
}

/// The address of a v4-mapped peer as IPv4.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn open_at(address: SocketAddr) -> io::Result<UdpSocket> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    if sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER_BYTES).is_err() {
        // Without CAP_NET_ADMIN the kernel caps the size, which is good enough.
        let _ = sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER_BYTES);
    }
    bind(&socket, &address)?;
    Ok(UdpSocket::from(socket))
}

fn no_ipv6(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    [rustix::io::Errno::AFNOSUPPORT, rustix::io::Errno::ADDRNOTAVAIL]
        .iter()
        .any(|errno| code == Some(errno.raw_os_error()))
}
