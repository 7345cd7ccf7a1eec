//! The port demultiplexer: which port a frame from a peer goes to.

use std::io::{self, IoSlice};

use weft_io::tap::Tap;

use super::device::FrameSink;
use super::direct::Ports;
use super::port_reader::PortReader;
use super::tap_queues::TapQueueReader;

/// The outlet of frames from peers: the direct port of their destination, else the switch.
pub(crate) struct PortDemux<'a> {
    pub(crate) switch: &'a Tap,
    pub(crate) ports: &'a Ports,
    pub(crate) worker: usize,
    /// The readers to tell of each write.
    pub(crate) written: (&'a TapQueueReader, &'a PortReader),
}

impl FrameSink for PortDemux<'_> {
    #[inline]
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        // Behind the virtio net header; a frame without a patched header begins in a later slice.
        let frame = slices.iter().skip(1).find(|slice| !slice.is_empty());
        let destination = frame.and_then(|frame| frame.first_chunk::<6>());
        let Some(port) = destination.and_then(|mac| self.ports.of(*mac)) else {
            destination.inspect(|mac| self.written.0.note_written(**mac));
            return self.switch.send(slices);
        };
        self.written.1.note_written(port);
        port.queue_of(self.worker).send(slices)
    }
}
