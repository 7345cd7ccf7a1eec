//! The socket to the server, before and after the device has it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::net::SendFlags;
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use weft_openvpn::Opcode;
use weft_openvpn::device::CONTROL_PACKET_BYTES_MAX;
use weft_openvpn::frame;

/// Bytes of the length before a packet on a connection.
const LENGTH_BYTES: usize = 2;
/// How often binding to a port is tried that a socket of before still has, and the pause between.
const BIND_TRIES: usize = 100;
const BIND_PAUSE: Duration = Duration::from_millis(20);
/// The pause before the next try to send, when a connection had no room for a packet.
const ROOM_PAUSE: Duration = Duration::from_millis(10);

/// A socket.
pub(super) enum Wire {
    Udp {
        socket: UdpSocket,
        remote: SocketAddr,
        buffer: Vec<u8>,
    },
    Tcp {
        stream: TcpStream,
        /// The part of a frame that has come. Never more, since the device reads on at the end of a frame.
        held: Vec<u8>,
        /// The kernel's device has the connection, and hands over one frame a call.
        is_given: bool,
    },
}

impl Wire {
    /// A socket for this server.
    ///
    /// # Errors
    /// The system's refusal, or the server's.
    pub(super) async fn open(
        remote: SocketAddr,
        is_tcp: bool,
        local: Option<IpAddr>,
        port: u16,
    ) -> io::Result<Self> {
        let any: IpAddr = match remote {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let local = SocketAddr::new(local.unwrap_or(any), port);
        if !is_tcp {
            let socket = bind(local).await?;
            return Ok(Self::Udp { socket, remote, buffer: vec![0; CONTROL_PACKET_BYTES_MAX] });
        }
        let socket = if remote.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        if local.port() != 0 || !local.ip().is_unspecified() {
            socket.set_reuseaddr(true)?;
            socket.bind(local)?;
        }
        let stream = socket.connect(remote).await?;
        stream.set_nodelay(true)?;
        Ok(Self::Tcp { stream, held: Vec::new(), is_given: false })
    }

    /// The next control packet. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The connection is over.
    pub(super) async fn receive(&mut self) -> io::Result<Vec<u8>> {
        match self {
            Self::Udp { socket, remote, buffer } => loop {
                let (length, from) = socket.recv_from(buffer).await?;
                let is_server =
                    from.ip().to_canonical() == remote.ip() && from.port() == remote.port();
                if is_server && !is_data(&buffer[..length]) {
                    return Ok(buffer[..length].to_vec());
                }
            },
            Self::Tcp { stream, held, is_given } => loop {
                stream.readable().await?;
                let read = if *is_given { read_given(stream) } else { read_frame(stream, held) };
                match read {
                    Ok(Some(packet)) if !is_data(&packet) => return Ok(packet),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            },
        }
    }

    /// Sends a control packet.
    ///
    /// # Errors
    /// The system's refusal.
    pub(super) async fn send(&mut self, to: SocketAddr, packet: &[u8]) -> io::Result<()> {
        match self {
            Self::Udp { socket, .. } => socket.send_to(packet, to).await.map(|_| ()),
            Self::Tcp { stream, is_given, .. } => {
                let mut framed = Vec::with_capacity(LENGTH_BYTES + packet.len());
                frame::write(packet, &mut framed).map_err(io::Error::other)?;
                let mut rest = framed.as_slice();
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                while !rest.is_empty() {
                    let sent = if *is_given {
                        rustix::net::send(&*stream, rest, flags).map_err(io::Error::from)
                    } else {
                        stream.writable().await?;
                        stream.try_write(rest)
                    };
                    match sent {
                        Ok(written) => rest = &rest[written..],
                        // The kernel's device has room again without telling.
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            tokio::time::sleep(ROOM_PAUSE).await;
                        }
                        Err(error) => return Err(error),
                    }
                }
                Ok(())
            }
        }
    }

    /// The server's packets come from another address from now on.
    pub(super) const fn moved(&mut self, to: SocketAddr) {
        if let Self::Udp { remote, .. } = self {
            *remote = to;
        }
    }

    /// The address that a device is to send to.
    pub(super) const fn remote(&self) -> Option<SocketAddr> {
        match self {
            Self::Udp { remote, .. } => Some(*remote),
            Self::Tcp { .. } => None,
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Udp { socket, .. } => socket.as_fd(),
            Self::Tcp { stream, .. } => stream.as_fd(),
        }
    }

    /// The kernel's device has taken the socket. What it leaves on a connection is announced anew.
    ///
    /// # Errors
    /// The system's refusal.
    pub(super) fn give(&mut self) -> io::Result<()> {
        if let Self::Tcp { stream, is_given, .. } = self {
            let again = std::net::TcpStream::from(stream.as_fd().try_clone_to_owned()?);
            *stream = TcpStream::from_std(again)?;
            *is_given = true;
        }
        Ok(())
    }
}

async fn bind(local: SocketAddr) -> io::Result<UdpSocket> {
    for _ in 1..BIND_TRIES {
        match UdpSocket::bind(local).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound,
        }
        tokio::time::sleep(BIND_PAUSE).await;
    }
    UdpSocket::bind(local).await
}

/// Reads on in a frame, and no further; `None`: it is not whole yet.
fn read_frame(stream: &TcpStream, held: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    let wanted = match held[..] {
        [high, low, ..] => LENGTH_BYTES + usize::from(u16::from_be_bytes([high, low])),
        _ => LENGTH_BYTES,
    };
    let at = held.len();
    held.resize(wanted, 0);
    let read = stream.try_read(&mut held[at..]);
    held.truncate(at + read.as_ref().map_or(0, |read| *read));
    if read? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match held[..] {
        [0, 0] => Err(io::Error::other("a frame without content")),
        [_, _, ref packet @ ..] if !packet.is_empty() && held.len() == wanted => {
            let packet = packet.to_vec();
            held.clear();
            Ok(Some(packet))
        }
        _ => Ok(None),
    }
}

/// Reads a frame that the kernel's device has left.
fn read_given(stream: &TcpStream) -> io::Result<Option<Vec<u8>>> {
    let mut buffer = vec![0; LENGTH_BYTES + CONTROL_PACKET_BYTES_MAX];
    match stream.try_read(&mut buffer)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        length => Ok(buffer.get(LENGTH_BYTES..length).map(<[u8]>::to_vec)),
    }
}

fn is_data(packet: &[u8]) -> bool {
    let opcode = packet.first().map(|first| Opcode::parse(*first));
    matches!(opcode, Some(Ok((Opcode::DataV1 | Opcode::DataV2, _))))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::Write;

    use super::*;

    #[tokio::test]
    async fn a_connection_is_read_to_the_end_of_a_frame_and_no_further() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let mut wire = Wire::open(to, true, None, 0).await.unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let (mut first, mut second) = (Vec::new(), Vec::new());
        frame::write(&[0x20, 1, 2, 3], &mut first).unwrap();
        frame::write(&[0x48, 9, 9], &mut second).unwrap();
        other.write_all(&[&first[..], &second[..3]].concat()).unwrap();
        assert_eq!(wire.receive().await.unwrap(), [0x20, 1, 2, 3]);
        let Wire::Tcp { stream, held, .. } = &mut wire else { panic!("no connection") };
        assert!(held.is_empty());
        let mut rest = [0; 8];
        stream.readable().await.unwrap();
        assert_eq!(stream.try_read(&mut rest).unwrap(), 3, "the next frame's bytes are left");
        drop(other);
        assert!(wire.receive().await.is_err());
    }

    #[tokio::test]
    async fn packets_of_others_and_data_are_left_out() {
        let server = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let stranger = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = server.local_addr().unwrap();
        let mut wire = Wire::open(to, false, Some("127.0.0.1".parse().unwrap()), 0).await.unwrap();
        let Wire::Udp { socket, .. } = &wire else { panic!("no datagrams") };
        let own = socket.local_addr().unwrap();
        stranger.send_to(&[0x20, 1], own).unwrap();
        server.send_to(&[0x48, 2], own).unwrap();
        server.send_to(&[0x20, 3], own).unwrap();
        assert_eq!(wire.receive().await.unwrap(), [0x20, 3]);
    }
}
