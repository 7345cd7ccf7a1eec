//! What a worker needs of a TAP device and of a UDP socket: the real ones, or a test's.

use std::io::{self, IoSlice};

use weft_io::tap::Tap;
use weft_io::udp::{Remote, UdpSocket};

use weft_path::EngineEvent;

use crate::counters::WorkerCounters;

/// Takes frames behind their virtio net header.
pub(crate) trait FrameSink {
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize>;
}

/// Takes runs of equal datagrams.
pub(crate) trait RunSink {
    fn send_run(&self, run: &[u8], segment: usize, to: &Remote) -> io::Result<()>;
}

impl FrameSink for Tap {
    #[inline]
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Self::send(self, slices)
    }
}

impl RunSink for UdpSocket {
    #[inline]
    fn send_run(&self, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        Self::send_run(self, run, segment, to)
    }
}

/// What both directions of a worker use.
pub(crate) struct Env<'a, F, R> {
    pub(crate) tap: &'a F,
    pub(crate) socket: &'a R,
    pub(crate) counters: &'a WorkerCounters,
    pub(crate) events: &'a (dyn Fn(EngineEvent) + Send + Sync),
}
