//! What a device's packets travel by: UDP sockets, which peers share, and TCP connections of one peer
//! each (reference `openvpn`, section 1.8).

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use weft_io::udp::{Adopted, Remote, UdpSocket};
use weft_openvpn::device::rules;

use crate::device::{Origin, RunSink};

/// Bytes of the length in front of each packet on a connection.
pub(crate) const FRAME_PREFIX_LEN: usize = 2;
/// Bytes that wait at most for a connection to take them; what comes beyond is dropped.
pub const STREAM_QUEUE_BYTES: usize = 1 << 20;
/// Transports that a device has at most: one UDP socket, or one connection of each peer.
pub const TRANSPORTS_MAX: usize = 16_384;

/// A transport and how it is known.
#[derive(Debug)]
pub(crate) struct Transport {
    pub(crate) way: Way,
    /// The kernel's number of the socket, the same for all its descriptors.
    pub(crate) cookie: u64,
}

#[derive(Debug)]
pub(crate) enum Way {
    Udp(UdpSocket),
    Tcp(Connection),
}

impl Transport {
    /// A transport that nobody uses yet. `waiting` counts the device's connections that did not take
    /// all.
    ///
    /// # Errors
    /// What the kernel refused to tell.
    pub(crate) fn new(adopted: Adopted, waiting: &Arc<AtomicUsize>) -> io::Result<Self> {
        let cookie = adopted.cookie()?;
        let way = match adopted {
            Adopted::Udp(socket) => Way::Udp(socket),
            Adopted::Tcp(stream) => Way::Tcp(Connection {
                stream,
                queue: Mutex::default(),
                waiting: Arc::clone(waiting),
            }),
        };
        Ok(Self { way, cookie })
    }

    /// As the rules for peers see it.
    ///
    /// # Errors
    /// What the kernel refused to tell.
    pub(crate) fn kind(&self) -> io::Result<rules::Transport> {
        Ok(match &self.way {
            Way::Udp(socket) => {
                let (ipv4, ipv6) = socket.families()?;
                rules::Transport::Udp { ipv4, ipv6 }
            }
            Way::Tcp(_) => rules::Transport::Tcp,
        })
    }

    /// Where it sends from.
    pub(crate) fn local(&self) -> Option<SocketAddr> {
        match &self.way {
            Way::Udp(socket) => socket.local_address().ok(),
            Way::Tcp(connection) => connection.stream.local_addr().ok(),
        }
    }

    /// Bytes in front of each packet.
    #[inline]
    pub(crate) const fn prefix_len(&self) -> usize {
        match self.way {
            Way::Udp(_) => 0,
            Way::Tcp(_) => FRAME_PREFIX_LEN,
        }
    }

    /// The other end of a connection.
    pub(crate) fn connected_to(&self) -> Option<SocketAddr> {
        match &self.way {
            Way::Udp(_) => None,
            Way::Tcp(connection) => connection.stream.peer_addr().ok(),
        }
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.way {
            Way::Udp(socket) => socket.as_fd(),
            Way::Tcp(connection) => connection.stream.as_fd(),
        }
    }
}

/// A TCP connection, and what it has not taken yet.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    queue: Mutex<VecDeque<u8>>,
    /// How many connections of the device have something in their queue.
    waiting: Arc<AtomicUsize>,
}

impl Connection {
    /// Reads what there is.
    ///
    /// # Errors
    /// `WouldBlock`, or that the connection has failed. 0 bytes: the other end has closed it.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.stream).read(buffer)
    }

    /// Sends whole frames: now, or as soon as the connection takes them.
    ///
    /// # Errors
    /// `WouldBlock`: [`STREAM_QUEUE_BYTES`] wait already; nothing of `frames` is sent. Else the
    /// connection has failed.
    pub(crate) fn write(&self, frames: &[u8]) -> io::Result<()> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.len() + frames.len() > STREAM_QUEUE_BYTES {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.push(&mut queue)?;
        let mut taken = 0;
        if queue.is_empty() {
            taken = self.offer(frames)?;
        }
        let rest = &frames[taken..];
        if queue.is_empty() && !rest.is_empty() {
            self.waiting.fetch_add(1, Relaxed);
        }
        queue.extend(rest);
        Ok(())
    }

    /// Whether something waits for the connection to take it.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.queue.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Sends more of what waits; true if something still does.
    ///
    /// # Errors
    /// The connection has failed.
    pub(crate) fn flush(&self) -> io::Result<bool> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.push(&mut queue)?;
        Ok(!queue.is_empty())
    }

    fn push(&self, queue: &mut VecDeque<u8>) -> io::Result<()> {
        let waited = !queue.is_empty();
        while !queue.is_empty() {
            let taken = self.offer(queue.as_slices().0)?;
            if taken == 0 {
                break;
            }
            queue.drain(..taken);
        }
        if waited && queue.is_empty() {
            self.waiting.fetch_sub(1, Relaxed);
        }
        Ok(())
    }

    /// Gives the connection bytes; returns how many it takes, 0 for none now.
    fn offer(&self, bytes: &[u8]) -> io::Result<usize> {
        match (&self.stream).write(bytes) {
            Ok(taken) => Ok(taken),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
                _ => Err(error),
            },
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.is_waiting() {
            self.waiting.fetch_sub(1, Relaxed);
        }
    }
}

/// All transports of a device by their numbers, which a run's origin names.
#[derive(Debug, Default)]
pub(crate) struct Transports {
    slots: Vec<Option<Arc<Transport>>>,
    /// Connections that did not take all.
    pub(crate) waiting: Arc<AtomicUsize>,
}

impl Transports {
    #[inline]
    pub(crate) fn get(&self, number: u16) -> Option<&Arc<Transport>> {
        self.slots.get(usize::from(number))?.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &Arc<Transport>)> {
        let slots = (0_u16..).zip(&self.slots);
        slots.filter_map(|(number, slot)| Some((number, slot.as_ref()?)))
    }

    /// Whether a connection has not taken all.
    pub(crate) fn is_any_waiting(&self) -> bool {
        self.waiting.load(Relaxed) > 0
    }

    /// The number of the transport with this cookie.
    pub(crate) fn with_cookie(&self, cookie: u64) -> Option<u16> {
        self.iter().find(|(_, transport)| transport.cookie == cookie).map(|(number, _)| number)
    }

    /// Takes a transport in; `None` if there are [`TRANSPORTS_MAX`].
    pub(crate) fn insert(&mut self, transport: Arc<Transport>) -> Option<u16> {
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        let number = u16::try_from(free).ok().filter(|_| free < TRANSPORTS_MAX)?;
        if free == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[free] = Some(transport);
        Some(number)
    }

    /// Lets a transport go.
    pub(crate) fn remove(&mut self, number: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(number)) {
            *slot = None;
        }
    }
}

impl RunSink for Transports {
    #[inline]
    fn send_run(&self, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        self.send_from(Origin { lane: 0, data_port: false }, run, segment, to)
    }

    /// The origin's lane is the transport's number; `to` says nothing on a connection.
    #[inline]
    fn send_from(&self, from: Origin, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        match &self.get(from.lane).ok_or(io::ErrorKind::NotConnected)?.way {
            Way::Udp(socket) => socket.send_run(run, segment, to),
            Way::Tcp(connection) => connection.write(run),
        }
    }
}
