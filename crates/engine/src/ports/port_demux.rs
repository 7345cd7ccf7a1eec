//! The port demultiplexer: which port of its network a frame from a peer goes to.

use std::io::{self, IoSlice};

use weft_io::tap::Tap;

use super::device::FrameSink;
use super::direct::{Port, Ports};
use super::errno;
use super::port_reader::PortReader;
use super::tap_queues::TapQueueReader;
use crate::tables::networks::NetworkNumber;

/// The outlet of frames from peers: the direct port of their destination, else the switch of their network.
pub(crate) struct PortDemux<'a> {
    /// The first network's.
    pub(crate) switch: &'a Tap,
    pub(crate) ports: &'a Ports,
    pub(crate) worker: usize,
    /// The readers to tell of each write.
    pub(crate) written: (&'a TapQueueReader, &'a PortReader),
}

impl PortDemux<'_> {
    #[inline]
    fn send_to(&self, port: &Port, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.written.1.note_written(port);
        port.queue_of(self.worker).send(slices)
    }
}

impl FrameSink for PortDemux<'_> {
    #[inline]
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send_in(NetworkNumber::FIRST, slices)
    }

    #[inline]
    fn send_in(&self, network: NetworkNumber, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        // Behind the virtio net header; a frame without a patched header begins in a later slice.
        let frame = slices.iter().skip(1).find(|slice| !slice.is_empty());
        let destination = frame.and_then(|frame| frame.first_chunk::<6>());
        if let Some(port) = destination.and_then(|mac| self.ports.of(network, *mac)) {
            return self.send_to(port, slices);
        }
        if network == NetworkNumber::FIRST {
            destination.inspect(|mac| self.written.0.note_written(**mac));
            return self.switch.send(slices);
        }
        match self.ports.of_switch(network) {
            Some(port) => self.send_to(port, slices),
            None => Err(io::Error::from_raw_os_error(errno::EBADFD)),
        }
    }
}
