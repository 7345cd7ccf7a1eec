//! The transports of a device: UDP sockets, which peers share, and TCP connections of one peer each
//! (`docs/design/ovpn.md`, sockets).

use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use weft_io::udp::{Adopted, Remote, UdpSocket, is_unroutable};
use weft_openvpn::device::{DeviceError, rules};

use crate::ports::device::GsoSink;
use crate::tables::lane::Origin;

/// Bytes of the length in front of each packet on a connection.
pub(crate) const FRAME_PREFIX_LEN: usize = 2;
/// Bytes that wait at most for a connection to take them; more are dropped.
pub const STREAM_QUEUE_BYTES: usize = 1 << 20;
/// Bytes of room that a connection's queue keeps once it is empty.
const STREAM_QUEUE_KEPT_BYTES: usize = 1 << 10;
/// Transports that a device has at most: one UDP socket, or one connection of each peer.
pub const TRANSPORTS_MAX: usize = 16_384;

/// Cookies of the sockets that devices of this process have: two devices would take each other's packets.
static TAKEN: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// A transport, and how the rules for peers see it.
#[derive(Debug)]
pub(crate) struct Transport {
    pub(crate) way: Way,
    pub(crate) kind: rules::Transport,
    /// It stays without peers, until its owner lets it go.
    pub(crate) is_held: AtomicBool,
}

/// A socket that is this device's. `0` is the kernel's number of it, the same for all its descriptors.
#[derive(Debug)]
struct Claim(u64);

#[derive(Debug)]
pub(crate) enum Way {
    Udp(UdpSocket),
    Tcp(Connection),
}

impl Transport {
    /// A transport without users yet.
    fn new(adopted: Adopted, kind: rules::Transport, queues_changed: &Arc<AtomicBool>) -> Self {
        let way = match adopted {
            Adopted::Udp(socket) => Way::Udp(socket),
            Adopted::Tcp(stream) => Way::Tcp(Connection {
                stream,
                queue: Mutex::default(),
                queues_changed: Arc::clone(queues_changed),
            }),
        };
        Self { way, kind, is_held: AtomicBool::new(false) }
    }

    /// Its local address.
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
}

/// A socket as the rules for peers see it.
///
/// # Errors
/// The kernel did not report the socket's address families.
pub(crate) fn kind(adopted: &Adopted) -> io::Result<rules::Transport> {
    Ok(match adopted {
        Adopted::Udp(socket) => {
            let (ipv4, ipv6) = socket.families()?;
            rules::Transport::Udp { ipv4, ipv6 }
        }
        Adopted::Tcp(_) => rules::Transport::Tcp,
    })
}

impl Claim {
    /// `None`: somebody has it.
    fn new(cookie: u64) -> Option<Self> {
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        taken.insert(cookie).then(|| Self(cookie))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        TAKEN.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
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

/// A TCP connection, and the bytes that it has not taken yet.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    queue: Mutex<VecDeque<u8>>,
    /// Of the device: a queue was filled or emptied.
    queues_changed: Arc<AtomicBool>,
}

impl Connection {
    /// The other end.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        self.stream.peer_addr().ok()
    }

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
            self.queues_changed.store(true, Relaxed);
        }
        queue.extend(rest);
        Ok(())
    }

    /// Whether something waits for the connection to take it.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.queue.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Sends more of the waiting bytes.
    ///
    /// # Errors
    /// The connection has failed.
    pub(crate) fn flush(&self) -> io::Result<()> {
        self.push(&mut self.queue.lock().unwrap_or_else(PoisonError::into_inner))
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
            queue.shrink_to(STREAM_QUEUE_KEPT_BYTES);
            self.queues_changed.store(true, Relaxed);
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

/// All transports of a device by their numbers, which a GSO batch's origin names.
#[derive(Debug, Default)]
pub(crate) struct Transports {
    slots: Vec<Option<(Arc<Transport>, Claim)>>,
    /// A connection's queue was filled or emptied.
    queues_changed: Arc<AtomicBool>,
}

impl Transports {
    #[inline]
    pub(crate) fn get(&self, number: u16) -> Option<&Arc<Transport>> {
        self.slots.get(usize::from(number))?.as_ref().map(|(transport, _)| transport)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, &Arc<Transport>)> {
        let slots = (0_u16..).zip(&self.slots);
        slots.filter_map(|(number, slot)| Some((number, &slot.as_ref()?.0)))
    }

    /// Whether a connection's queue was filled or emptied since this was asked last.
    pub(crate) fn take_queues_changed(&self) -> bool {
        self.queues_changed.load(Relaxed) && self.queues_changed.swap(false, Relaxed)
    }

    /// The number of the transport with this cookie.
    pub(crate) fn with_cookie(&self, cookie: u64) -> Option<u16> {
        let has_it = |slot: &Option<(_, Claim)>| slot.as_ref().is_some_and(|(_, c)| c.0 == cookie);
        self.slots.iter().position(has_it).and_then(|number| u16::try_from(number).ok())
    }

    /// Takes a socket of this kind in, which has this cookie. Returns its number.
    ///
    /// # Errors
    /// There are [`TRANSPORTS_MAX`], or a device of this process has the socket.
    pub(crate) fn insert(
        &mut self,
        adopted: Adopted,
        kind: rules::Transport,
        cookie: u64,
    ) -> Result<u16, DeviceError> {
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        let number = u16::try_from(free).ok().filter(|_| free < TRANSPORTS_MAX);
        let number = number.ok_or(DeviceError::TooManyPeers(TRANSPORTS_MAX))?;
        let claim = Claim::new(cookie).ok_or(DeviceError::SocketTaken)?;
        let new = Some((Arc::new(Transport::new(adopted, kind, &self.queues_changed)), claim));
        match self.slots.get_mut(free) {
            Some(slot) => *slot = new,
            None => self.slots.push(new),
        }
        Ok(number)
    }

    /// Lets a transport go.
    pub(crate) fn remove(&mut self, number: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(number)) {
            *slot = None;
        }
    }
}

impl GsoSink for Transports {
    #[inline]
    fn send_batch(&self, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        self.send_from(Origin { lane: 0, data_port: false, may_cut: false }, batch, segment, to)
    }

    /// The origin's lane is the transport's number; `to` says nothing on a connection.
    #[inline]
    fn send_from(&self, from: Origin, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        match &self.get(from.lane).ok_or(io::ErrorKind::NotConnected)?.way {
            Way::Udp(socket) => send_udp(socket, batch, segment, to),
            Way::Tcp(connection) => connection.write(batch),
        }
    }
}

/// Sends a GSO batch from the address of ours at which the peer was last heard. If that is no longer ours, the
/// system chooses, as in the kernel's device.
///
/// # Errors
/// The kernel refused to send.
#[inline]
pub(crate) fn send_udp(
    socket: &UdpSocket,
    batch: &[u8],
    segment: usize,
    to: &Remote,
) -> io::Result<()> {
    match socket.send_run(batch, segment, to) {
        Err(error) if to.source().is_some() && is_unroutable(&error) => {
            socket.send_run(batch, segment, &to.with_source(None))
        }
        sent => sent,
    }
}
