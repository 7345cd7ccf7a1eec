//! The sockets by which clients come in, as `--listen` asks for them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};
use weft_api::{Listen, Protocol};

/// The port of OpenVPN.
pub(super) const PORT: u16 = 1_194;
/// Connections that the system keeps for a listener until they are taken.
const BACKLOG: i32 = 1_024;

/// What carries a client's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Transport {
    /// A UDP socket of the data channel, by its number.
    Udp(u16),
    /// A connection of its own.
    Tcp,
}

impl Transport {
    /// In the words of the API.
    pub(super) const fn protocol(self) -> Protocol {
        match self {
            Self::Udp(_) => Protocol::Udp,
            Self::Tcp => Protocol::Tcp,
        }
    }
}

/// Bound sockets.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    pub(super) udp: Vec<UdpSocket>,
    /// They do not block.
    pub(super) listeners: Vec<TcpListener>,
}

/// A socket cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot listen on {wanted}: {error}; another program may use the port: weft openvpn serve --listen {protocol}:ADDRESS:PORT",
    protocol = .wanted.protocol
)]
pub(super) struct ListenFailed {
    /// Where.
    wanted: Listen,
    /// Why.
    error: io::Error,
}

/// Where to listen if nobody says it.
pub(super) const fn default_listen() -> Listen {
    Listen { protocol: Protocol::Udp, address: None, port: PORT }
}

/// Binds the sockets that were asked for, or those of the default. A host without IPv6 has those of IPv4 alone where all
/// addresses are asked for.
///
/// # Errors
/// [`ListenFailed`]; none is bound then.
pub(super) fn bind_all(wanted: &[Listen]) -> Result<Sockets, ListenFailed> {
    let default = [default_listen()];
    let wanted = if wanted.is_empty() { &default[..] } else { wanted };
    let mut sockets = Sockets::default();
    for listen in wanted {
        let failed = |error| ListenFailed { wanted: *listen, error };
        let Some(address) = listen.address else {
            sockets.add(*listen, Ipv4Addr::UNSPECIFIED.into()).map_err(failed)?;
            match sockets.add(*listen, Ipv6Addr::UNSPECIFIED.into()) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    return Err(failed(error));
                }
                Err(error) => tracing::info!(%error, %listen, "the gateway listens on IPv4 alone"),
                Ok(()) => {}
            }
            continue;
        };
        sockets.add(*listen, address).map_err(failed)?;
    }
    Ok(sockets)
}

impl Sockets {
    fn add(&mut self, wanted: Listen, address: IpAddr) -> io::Result<()> {
        let address = SocketAddr::new(address, wanted.port);
        match wanted.protocol {
            Protocol::Udp => {
                let socket = socket(address, SocketType::DGRAM)?;
                bind(&socket, &address)?;
                self.udp.push(socket.into());
            }
            Protocol::Tcp => {
                let socket = socket(address, SocketType::STREAM)?;
                // Connections of an earlier gateway may linger.
                sockopt::set_socket_reuseaddr(&socket, true)?;
                bind(&socket, &address)?;
                listen(&socket, BACKLOG)?;
                rustix::io::ioctl_fionbio(&socket, true)?;
                self.listeners.push(socket.into());
            }
        }
        Ok(())
    }
}

/// A socket of one family alone.
fn socket(address: SocketAddr, kind: SocketType) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn each_place_has_its_socket_and_one_that_is_taken_is_named() {
        let wanted = ["udp:127.0.0.94:0", "tcp:127.0.0.94:0"].map(|text| text.parse().unwrap());
        let sockets = bind_all(&wanted).unwrap();
        assert_eq!((sockets.udp.len(), sockets.listeners.len()), (1, 1));
        let taken = sockets.listeners[0].local_addr().unwrap();
        let again = [format!("tcp:{taken}").parse().unwrap()];
        let error = bind_all(&again).unwrap_err().to_string();
        assert!(error.contains(&format!("cannot listen on tcp:{taken}")), "{error}");
        assert!(error.contains("--listen tcp:ADDRESS:PORT"), "{error}");
        // The same port of the other protocol is another's. No other test has the address, which might hold it.
        bind_all(&[format!("udp:{taken}").parse().unwrap()]).unwrap();
        // All addresses are those of both families, where there are both.
        let all = bind_all(&["tcp:0".parse().unwrap()]).unwrap();
        assert!((1..=2).contains(&all.listeners.len()));
    }
}
