//! What a worker needs of a TAP device and of a UDP socket: the real ones, or a test's.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;

use weft_io::tap::Tap;
use weft_io::udp::{RecvBatch, Remote, UdpSocket};

use weft_path::EngineEvent;

use crate::counters::WorkerCounters;

/// Takes frames behind their virtio net header.
pub(crate) trait FrameSink {
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize>;
}

/// Gives frames behind their virtio net header, one a call.
pub(crate) trait FrameSource {
    fn recv(&self, buffer: &mut [u8]) -> io::Result<usize>;
}

/// Gives messages, at most `max` a call.
pub(crate) trait MessageSource {
    fn recv(&self, batch: &mut RecvBatch, max: usize) -> io::Result<usize>;
}

/// Takes runs of equal datagrams.
pub(crate) trait RunSink {
    fn send_run(&self, run: &[u8], segment: usize, to: &Remote) -> io::Result<()>;

    /// The sequence numbers of what is being sealed are taken: who is behind may take the next ones.
    #[inline]
    fn reserved(&self) {}

    /// How many sockets the lanes are shared out to.
    #[inline]
    fn sockets(&self) -> usize {
        1
    }

    /// Sends from a lane's socket.
    #[inline]
    fn send_from(&self, from: Origin, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        let _ = from;
        self.send_run(run, segment, to)
    }
}

/// Which socket a run leaves from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) lane: u16,
    /// The engine's port instead of the lane's own.
    pub(crate) data_port: bool,
    /// The kernel may cut its datagrams, which go one by one.
    pub(crate) may_cut: bool,
}

/// The sockets of one port that are sent from.
#[derive(Debug)]
pub(crate) struct Senders {
    pub(crate) whole: Arc<UdpSocket>,
    /// For what the kernel may cut.
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

impl RunSink for UdpSocket {
    #[inline]
    fn send_run(&self, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        Self::send_run(self, run, segment, to)
    }
}

/// The sockets that lanes are sent from, by worker. The first worker's has the engine's port. The
/// others have ports of their own, so that the network and the peer's kernel tell the lanes apart.
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

impl RunSink for LaneSockets {
    #[inline]
    fn send_run(&self, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        let from = Origin { lane: 0, data_port: true, may_cut: false };
        self.send_from(from, run, segment, to)
    }

    #[inline]
    fn sockets(&self) -> usize {
        self.own.len()
    }

    #[inline]
    fn send_from(&self, from: Origin, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        let sockets = if from.data_port { &self.shares } else { &self.own };
        let senders = sockets.get(usize::from(from.lane) % sockets.len().max(1));
        let senders = senders.ok_or(io::ErrorKind::NotConnected)?;
        let socket = if from.may_cut { &senders.cutting } else { &senders.whole };
        socket.send_run(run, segment, to)
    }
}

/// What both directions of a worker use.
pub(crate) struct Env<'a, F, R> {
    pub(crate) tap: &'a F,
    pub(crate) socket: &'a R,
    pub(crate) counters: &'a WorkerCounters,
    pub(crate) events: &'a (dyn Fn(EngineEvent) + Send + Sync),
}
