//! Traits for a worker's TAP device and UDP socket, which tests replace.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;

use weft_io::tap::Tap;
use weft_io::udp::{RecvBatch, Remote, UdpSocket};

use weft_path::EngineEvent;

use crate::stats::counters::WorkerCounters;
use crate::tables::lane::Origin;
use crate::tables::networks::NetworkNumber;

/// Takes frames behind their virtio net header.
pub(crate) trait FrameSink {
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize>;

    /// A frame of this network. A device has one network, and is given no other's frames.
    #[inline]
    fn send_in(&self, network: NetworkNumber, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let _ = network;
        self.send(slices)
    }
}

/// Gives frames behind their virtio net header, one a call.
pub(crate) trait FrameSource {
    fn recv(&self, buffer: &mut [u8]) -> io::Result<usize>;
}

/// Gives messages, at most `max` a call.
pub(crate) trait MessageSource {
    fn recv(&self, batch: &mut RecvBatch, max: usize) -> io::Result<usize>;
}

/// Takes GSO batches: equal datagrams behind one another.
pub(crate) trait GsoSink {
    fn send_batch(&self, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()>;

    /// The datagrams that a thread seals have their sequence numbers: the next thread may take its own.
    #[inline]
    fn reserved(&self) {}

    /// How many sockets the lanes are shared out to.
    #[inline]
    fn sockets(&self) -> usize {
        1
    }

    /// Sends from a lane's socket.
    #[inline]
    fn send_from(&self, from: Origin, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        let _ = from;
        self.send_batch(batch, segment, to)
    }
}

/// The sockets of one port that are sent from.
#[derive(Debug)]
pub(crate) struct Senders {
    pub(crate) whole: Arc<UdpSocket>,
    /// For datagrams that the kernel may cut.
    pub(crate) cutting: Arc<UdpSocket>,
}

impl FrameSink for Tap {
    #[inline]
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Self::send(self, slices)
    }
}

impl FrameSource for Tap {
    #[inline]
    fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Self::recv(self, buffer)
    }
}

impl MessageSource for UdpSocket {
    #[inline]
    fn recv(&self, batch: &mut RecvBatch, max: usize) -> io::Result<usize> {
        Self::recv(self, batch, max)
    }
}

impl GsoSink for UdpSocket {
    #[inline]
    fn send_batch(&self, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        Self::send_run(self, batch, segment, to)
    }
}

/// The sockets that lanes are sent from, by worker. The first worker's has the engine's port. The others have
/// separate ports, so that the network and the peer's kernel tell the lanes apart.
#[derive(Debug, Default)]
pub(crate) struct LaneSockets {
    pub(crate) own: Vec<Senders>,
    /// Each worker's share of the engine's port.
    pub(crate) shares: Vec<Senders>,
}

impl LaneSockets {
    /// A destination for all of them.
    pub(crate) fn remote(&self, address: SocketAddr) -> io::Result<Remote> {
        self.shares.first().ok_or(io::ErrorKind::NotConnected)?.whole.remote(address)
    }
}

impl GsoSink for LaneSockets {
    #[inline]
    fn send_batch(&self, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        let from = Origin { lane: 0, data_port: true, may_cut: false };
        self.send_from(from, batch, segment, to)
    }

    #[inline]
    fn sockets(&self) -> usize {
        self.own.len()
    }

    #[inline]
    fn send_from(&self, from: Origin, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        let sockets = if from.data_port { &self.shares } else { &self.own };
        let senders = sockets.get(usize::from(from.lane) % sockets.len().max(1));
        let senders = senders.ok_or(io::ErrorKind::NotConnected)?;
        let socket = if from.may_cut { &senders.cutting } else { &senders.whole };
        socket.send_run(batch, segment, to)
    }
}

/// The environment that both directions of a worker use.
pub(crate) struct Env<'a, F, R> {
    pub(crate) tap: &'a F,
    pub(crate) socket: &'a R,
    pub(crate) counters: &'a WorkerCounters,
    pub(crate) events: &'a (dyn Fn(EngineEvent) + Send + Sync),
}
