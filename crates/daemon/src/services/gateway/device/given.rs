//! Connections of clients that the kernel's device has: it moves their data, and leaves the packets of the control
//! channel to a task for each.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};
use tokio::sync::mpsc;
use weft_engine::dco::Event;
use weft_openvpn::device::{DeletionReason, Notification};
use weft_openvpn::frame;

use super::Telling;
use crate::services::gateway::streams::PACKET_BYTES_MAX;

/// Packets that may wait for a connection; further ones are lost, and counted as `connection_takes_nothing`.
const PACKETS_MAX: usize = 64;
/// The pause before the next try to send, when the kernel had no room for a packet.
const AGAIN: Duration = Duration::from_millis(10);
/// Bytes of the length before a packet.
const LENGTH_BYTES: usize = 2;
/// What a connection's packets come by: no UDP socket has the number.
const TRANSPORT: u16 = u16::MAX;

/// The connections, by their peers. Each has a task, which ends with the connection.
#[derive(Default)]
pub(super) struct Given(Mutex<BTreeMap<u32, mpsc::Sender<Vec<u8>>>>);

impl Given {
    /// The kernel's device has taken a peer's connection.
    ///
    /// # Errors
    /// The system's refusal to watch it.
    pub(super) fn add(
        &self,
        id: u32,
        (connection, source): (&TcpStream, SocketAddr),
        telling: Telling,
    ) -> io::Result<()> {
        // A descriptor of its own, since what the kernel leaves on the connection is announced anew.
        let stream = connection.try_clone()?;
        stream.set_nonblocking(true)?;
        let stream = tokio::net::TcpStream::from_std(stream)?;
        let (sender, packets) = mpsc::channel(PACKETS_MAX);
        tokio::spawn(carry(stream, (id, source), packets, telling));
        self.all().insert(id, sender);
        Ok(())
    }

    /// Forgets a peer's connection. Its task sends the packets that it has got, and ends.
    pub(super) fn remove(&self, id: u32) {
        self.all().remove(&id);
    }

    /// Sends a packet of the control channel. Returns whether the connection takes it.
    pub(super) fn send(&self, id: u32, packet: &[u8]) -> bool {
        let mut framed = Vec::with_capacity(LENGTH_BYTES + packet.len());
        frame::write(packet, &mut framed).is_ok()
            && self.all().get(&id).is_some_and(|it| it.try_send(framed).is_ok())
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u32, mpsc::Sender<Vec<u8>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a connection's task waits for.
enum Turn {
    /// A packet to send; `None`: the peer goes.
    Send(Option<Vec<u8>>),
    /// The kernel is asked again.
    Again,
    /// The service has room for news.
    Room(Permit),
    Readable(io::Result<()>),
}

pub(super) type Permit = Result<mpsc::OwnedPermit<Event>, mpsc::error::SendError<()>>;

/// Carries packets of the control channel until the peer goes or the connection is over.
async fn carry(
    stream: tokio::net::TcpStream,
    (id, source): (u32, SocketAddr),
    mut packets: mpsc::Receiver<Vec<u8>>,
    telling: Telling,
) {
    let (mut waiting, mut told) = (None, None);
    loop {
        let turn = tokio::select! {
            biased;
            packet = packets.recv(), if waiting.is_none() => Turn::Send(packet),
            () = tokio::time::sleep(AGAIN), if waiting.is_some() => Turn::Again,
            permit = telling.room(), if told.is_some() => Turn::Room(permit),
            // One packet at a time: what comes too fast waits in the sender's system.
            readable = stream.readable(), if told.is_none() => Turn::Readable(readable),
        };
        match turn {
            Turn::Send(None) => return,
            Turn::Send(Some(packet)) => waiting = Some(packet),
            // The peer is removed: bytes from now on are not whole packets, and no answer is awaited.
            Turn::Again | Turn::Room(_) | Turn::Readable(_) if packets.is_closed() => return,
            Turn::Again => {}
            Turn::Room(permit) => match (permit, told.take()) {
                (Ok(permit), Some(event)) => drop(permit.send(event)),
                _ => return,
            },
            Turn::Readable(readable) => match readable.and_then(|()| read(&stream)) {
                Ok(packet) if telling.resets.drops(&packet) => {}
                Ok(packet) => {
                    let (local, transport) = (None, TRANSPORT);
                    told = Some(Event::Packet { source, local, transport, packet });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return end(id, &error, &telling).await,
            },
        }
        if let Some(packet) = waiting.take() {
            // The kernel takes a packet whole or not at all.
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&stream, &packet, flags) {
                Err(Errno::AGAIN) => waiting = Some(packet),
                Err(error) => return end(id, &error.into(), &telling).await,
                Ok(sent) if sent == packet.len() => {}
                // The device has let the connection go: nothing that is sent behind a part of a packet is understood.
                Ok(_) => {
                    let _ = rustix::net::shutdown(&stream, Shutdown::Both);
                    return;
                }
            }
        }
    }
}

/// Tells that a connection is over, which the kernel does not.
async fn end(id: u32, error: &io::Error, telling: &Telling) {
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            DeletionReason::TransportDisconnect
        }
        _ => DeletionReason::TransportError,
    };
    let ended = Event::Notification(Notification::PeerDeleted { peer_id: id, reason });
    // A service that has ended needs no news.
    let _ = telling.sender.send(ended).await;
}

/// Reads a packet that the device has left.
fn read(stream: &tokio::net::TcpStream) -> io::Result<Vec<u8>> {
    let mut buffer = [0; LENGTH_BYTES + PACKET_BYTES_MAX + 1];
    match stream.try_read(&mut buffer)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        length if length == buffer.len() => Err(io::Error::other("a packet that is too long")),
        length => Ok(buffer.get(LENGTH_BYTES..length).unwrap_or_default().to_vec()),
    }
}
