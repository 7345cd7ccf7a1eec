//! Transports of peers: UDP sockets, which peers share, and one TCP connection for each peer.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use weft_api::{ApiError, ErrorKind};
use weft_openvpn::Opcode;
use weft_openvpn::device::CONTROL_PACKET_BYTES_MAX;

use super::args::Carrier;
use super::json;
use super::lines::Lines;
use super::task::{OwnedTask, lock};

/// How long the other end of a connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// How often binding to a busy address is tried: the reader of a closed socket releases it a moment
/// later. A count and not a time, since this process may be suspended for a while.
const ADDRESS_FREE_TRIES: u32 = 200;
/// Pause between two tries.
const ADDRESS_FREE_PAUSE: Duration = Duration::from_millis(5);
/// Pause after a read that failed.
const READ_PAUSE: Duration = Duration::from_millis(100);
/// Bytes of the length in front of a packet on a connection.
const LENGTH_BYTES: usize = 2;

/// Reports packets that the kernel's device leaves on its peers' sockets: those of the control channel.
#[derive(Clone)]
pub(super) struct Reading {
    pub(super) lines: Arc<Lines>,
    /// The device.
    pub(super) index: u32,
}

impl Reading {
    fn udp(&self, socket: UdpSocket) -> io::Result<OwnedTask> {
        socket.set_nonblocking(true)?;
        let socket = tokio::net::UdpSocket::from_std(socket)?;
        let reading = self.clone();
        Ok(OwnedTask::spawn(async move {
            let mut buffer = vec![0; CONTROL_PACKET_BYTES_MAX];
            loop {
                match socket.recv_from(&mut buffer).await {
                    Ok((len, source)) => reading.tell(Some(source), &buffer[..len]),
                    Err(error) => {
                        tracing::warn!(%error, "cannot read a packet of the control channel");
                        tokio::time::sleep(READ_PAUSE).await;
                    }
                }
            }
        }))
    }

    /// The same for a connection, where each packet follows its length.
    fn tcp(&self, stream: &TcpStream) -> io::Result<OwnedTask> {
        stream.set_nonblocking(true)?;
        let remote = stream.peer_addr().ok();
        let stream = tokio::net::TcpStream::from_std(stream.try_clone()?)?;
        let reading = self.clone();
        Ok(OwnedTask::spawn(async move {
            let mut buffer = vec![0; LENGTH_BYTES + CONTROL_PACKET_BYTES_MAX];
            loop {
                if stream.readable().await.is_err() {
                    return;
                }
                match stream.try_read(&mut buffer) {
                    Ok(len) if len > LENGTH_BYTES => {
                        reading.tell(remote, &buffer[LENGTH_BYTES..len]);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // The connection is closed, or no longer its peer's.
                    Ok(_) | Err(_) => return,
                }
            }
        }))
    }

    fn tell(&self, source: Option<SocketAddr>, packet: &[u8]) {
        // The kernel also leaves data once its peer is gone.
        if !is_data(packet) {
            self.lines.packet(|| json::packet(self.index, source, packet));
        }
    }
}

/// Whether a packet is one of the data channel.
fn is_data(packet: &[u8]) -> bool {
    let opcode = packet.first().map(|first| Opcode::parse(*first));
    matches!(opcode, Some(Ok((Opcode::DataV1 | Opcode::DataV2, _))))
}

/// A UDP socket, closed once no peer uses it.
pub(super) struct Socket {
    socket: UdpSocket,
    /// `None` if the device reads by itself.
    _reader: Option<OwnedTask>,
}

impl Socket {
    /// Sends a packet of the control channel.
    pub(super) fn send_to(&self, packet: &[u8], remote: SocketAddr) -> io::Result<usize> {
        self.socket.send_to(packet, remote)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The UDP sockets of peers, by the requested address. The peers own the sockets; this map only finds
/// them.
#[derive(Default)]
pub(super) struct Sockets(Mutex<BTreeMap<SocketAddr, Weak<Socket>>>);

impl Sockets {
    /// Returns the socket with this address, or opens it.
    pub(super) async fn open(
        &self,
        local: SocketAddr,
        reading: Option<&Reading>,
    ) -> Result<Arc<Socket>, ApiError> {
        let mut opened = self.try_open(local, reading);
        for _ in 1..ADDRESS_FREE_TRIES {
            let is_taken = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
            if !opened.as_ref().is_err_and(is_taken) {
                break;
            }
            tokio::time::sleep(ADDRESS_FREE_PAUSE).await;
            opened = self.try_open(local, reading);
        }
        opened.map_err(|error| {
            let text = format!(
                "cannot open a UDP socket on {local}: {error}; give an address of this host and a free port"
            );
            ApiError::new(ErrorKind::Conflict, text)
        })
    }

    fn try_open(&self, local: SocketAddr, reading: Option<&Reading>) -> io::Result<Arc<Socket>> {
        let mut sockets = lock(&self.0);
        if let Some(socket) = sockets.get(&local).and_then(Weak::upgrade) {
            return Ok(socket);
        }
        let socket = UdpSocket::bind(local)?;
        let reader = match reading {
            Some(reading) => Some(reading.udp(socket.try_clone()?)?),
            None => None,
        };
        let socket = Arc::new(Socket { socket, _reader: reader });
        sockets.retain(|_, other| other.strong_count() > 0);
        sockets.insert(local, Arc::downgrade(&socket));
        Ok(socket)
    }
}

/// A connection that the kernel's device has taken. It stays open while its peer lives.
pub(super) struct Connection {
    stream: TcpStream,
    reader: Option<OwnedTask>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, reading: &Reading) -> io::Result<Self> {
        let reader = Some(reading.tcp(&stream)?);
        Ok(Self { stream, reader })
    }

    /// Stops reading.
    pub(super) fn stop_reading(&mut self) {
        self.reader = None;
    }

    /// Resumes reading after [`Self::stop_reading`].
    pub(super) fn read_again(&mut self, reading: &Reading) -> io::Result<()> {
        if self.reader.is_none() {
            self.reader = Some(reading.tcp(&self.stream)?);
        }
        Ok(())
    }

    /// Another descriptor of it.
    pub(super) fn try_clone(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }
}

/// Connects to a peer, actively or passively.
///
/// # Errors
/// It is refused, or the other end takes longer than [`CONNECT_LIMIT`].
pub(super) async fn connect(carrier: &Carrier) -> io::Result<TcpStream> {
    let connecting = async {
        match (carrier.tcp_connect, carrier.tcp_listen) {
            (Some(remote), _) => tokio::net::TcpStream::connect(remote).await,
            (None, Some(local)) => {
                let listener = tokio::net::TcpListener::bind(local).await?;
                listener.accept().await.map(|(stream, _)| stream)
            }
            (None, None) => Err(io::ErrorKind::InvalidInput.into()),
        }
    };
    let stream = tokio::time::timeout(CONNECT_LIMIT, connecting).await??.into_std()?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Marks all packets of a socket, if there is a mark.
pub(super) fn set_mark(socket: impl AsFd, mark: Option<u32>) -> Result<(), ApiError> {
    let Some(mark) = mark else { return Ok(()) };
    weft_io::udp::set_mark(socket, mark).map_err(|error| {
        let text = format!("cannot set the socket's mark: {error}; marks need CAP_NET_ADMIN");
        ApiError::new(ErrorKind::Conflict, text)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Instant;

    use super::*;

    /// An address that is free, and stays so: other tests take ports of another address.
    fn free() -> SocketAddr {
        UdpSocket::bind("127.0.0.95:0").unwrap().local_addr().unwrap()
    }

    #[tokio::test]
    async fn a_socket_is_shared_and_closed_with_the_last_who_has_it() {
        let (sockets, local) = (Sockets::default(), free());
        let reading = Reading { lines: Arc::new(Lines::new()), index: 7 };
        let first = sockets.open(local, Some(&reading)).await.unwrap();
        let second = sockets.open(local, None).await.unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        drop(first);
        assert_eq!(UdpSocket::bind(local).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(second);
        // The reader may release it a moment later, which the next one waits for.
        let third = sockets.open(local, None).await.unwrap();
        drop(third);
        assert!(UdpSocket::bind(local).is_ok());
    }

    #[tokio::test]
    async fn an_address_that_somebody_else_has_is_refused_after_a_while() {
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        let local = other.local_addr().unwrap();
        let begun = Instant::now();
        let refused = Sockets::default().open(local, None).await.map(|_| ()).unwrap_err();
        assert!(begun.elapsed() >= ADDRESS_FREE_PAUSE * (ADDRESS_FREE_TRIES - 1));
        assert!(refused.error.contains("a free port"), "{}", refused.error);
    }

    #[tokio::test]
    async fn control_packets_are_told_and_data_is_not() {
        let (sockets, local) = (Sockets::default(), free());
        let lines = Arc::new(Lines::new());
        let reading = Reading { lines: Arc::clone(&lines), index: 7 };
        let mut told = Box::pin(lines.listen(true));
        let _socket = sockets.open(local, Some(&reading)).await.unwrap();
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        for packet in [&[0x48, 0, 0, 5][..], &[0x30, 1], &[0x38, 2]] {
            from.send_to(packet, local).unwrap();
        }
        let line = futures_util::StreamExt::next(&mut told).await.unwrap().unwrap();
        let line = String::from_utf8(line.to_vec()).unwrap();
        assert!(line.contains(r#""bytes":"3802""#), "{line}");
    }
}
