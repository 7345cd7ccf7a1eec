//! Merges opened frames into super-packets and writes them to a TAP device.

use std::array;
use std::io::{self, IoSlice};
use std::ops::Range;

use weft_packet::coalesce::{Coalescer, FRAMES_MAX, Merged};
use weft_packet::layout::{Headers, Layout, Opaque};
use weft_packet::mss;
use weft_packet::split::FrameChecksum;

use crate::ports::device::{Env, FrameSink};
use crate::ports::errno;
use crate::stats::counters::{DropReason, Work, WorkerCounters};
use crate::tables::networks::NetworkNumber;

/// Parts of one write: the virtio net header, a rewritten header, and the frames.
pub(crate) const SLICES_MAX: usize = FRAMES_MAX + 2;

/// A frame out of an opened packet.
#[derive(Clone, Debug)]
pub(crate) struct OpenedFrame {
    /// Its range in the arena.
    pub(crate) at: Range<u32>,
    pub(crate) network: NetworkNumber,
    pub(crate) checksum: FrameChecksum,
    /// The longest IP packet that is carried the other way, in bytes, if the sender must learn it: a frame that
    /// opens a TCP connection then allows no larger segments than fit. Reports of packets that are too long
    /// may not get through.
    pub(crate) told_mtu: Option<u16>,
}

impl OpenedFrame {
    /// A look at its headers; the size of segments is lowered by it.
    #[inline(always)]
    fn look(&self, arena: &mut [u8]) -> Headers {
        let range = self.at.start as usize..self.at.end as usize;
        let Some(frame) = arena.get_mut(range) else { return Err(Opaque::Short) };
        let headers = Layout::parse(frame);
        if let Some(mtu) = self.told_mtu {
            mss::clamp(frame, &headers, mtu, self.checksum);
        }
        headers
    }
}

/// Merges frames and writes them.
#[derive(Debug)]
pub(crate) struct Merger {
    coalescer: Coalescer,
}

impl Merger {
    pub(crate) fn new() -> Self {
        Self { coalescer: Coalescer::new() }
    }

    /// Says which super-packets the TAP device takes.
    pub(crate) fn set_merging(&mut self, tcp: bool, udp: bool) {
        self.coalescer.set_merging(tcp, udp);
    }

    /// Files a frame and writes nothing; false if there is no room.
    #[inline(always)]
    pub(crate) fn file(&mut self, arena: &mut [u8], frame: &OpenedFrame) -> bool {
        let headers = frame.look(arena);
        let network = frame.network.get();
        self.coalescer.push_of(network, arena, frame.at.clone(), &headers, frame.checksum).is_ok()
    }

    /// Forgets all that is filed.
    #[cold]
    pub(crate) fn forget(&mut self) {
        self.coalescer.flush(&[], |_| {});
        let _ = self.coalescer.take_rejected();
    }

    #[inline(always)]
    pub(crate) fn push<F: FrameSink, R>(
        &mut self,
        arena: &mut [u8],
        frame: &OpenedFrame,
        env: &Env<'_, F, R>,
    ) {
        if !self.file(arena, frame) {
            self.flush_for(arena, frame, env);
        }
    }

    /// Writes what is filed, and files a frame for which there was no room: an empty coalescer takes every frame.
    #[cold]
    pub(crate) fn flush_for<F: FrameSink, R>(
        &mut self,
        arena: &mut [u8],
        frame: &OpenedFrame,
        env: &Env<'_, F, R>,
    ) {
        self.flush(arena, env);
        self.file(arena, frame);
    }

    pub(crate) fn flush<F: FrameSink, R>(&mut self, arena: &[u8], env: &Env<'_, F, R>) {
        self.coalescer.flush(arena, |merged| write(arena, &merged, env));
        let rejected = self.coalescer.take_rejected();
        env.counters.dropped(DropReason::BadMark, rejected.bad_mark);
    }
}

/// Writes one frame or super-packet with one call.
fn write<F: FrameSink, R>(arena: &[u8], merged: &Merged<'_>, env: &Env<'_, F, R>) {
    let mut slices: [IoSlice<'_>; SLICES_MAX] = array::from_fn(|_| IoSlice::new(&[]));
    slices[0] = IoSlice::new(&merged.vnet);
    slices[1] = IoSlice::new(merged.header);
    let mut used = 2;
    for (slice, range) in slices[2..].iter_mut().zip(merged.slices) {
        let Some(bytes) = arena.get(range.start as usize..range.end as usize) else { return };
        *slice = IoSlice::new(bytes);
        used += 1;
    }
    match env.tap.send_in(NetworkNumber::new(merged.network), &slices[..used]) {
        Ok(_) => env.counters.did(Work::TapWrites, 1),
        Err(error) => count_refusal(env.counters, &error, merged.frames),
    }
}

#[cold]
fn count_refusal(counters: &WorkerCounters, error: &io::Error, frames: u32) {
    let reason = match error.raw_os_error() {
        Some(errno::EIO | errno::EBADFD) => DropReason::TapDown,
        Some(errno::EAGAIN | errno::ENOMEM | errno::ENOBUFS) => DropReason::TapFull,
        _ => DropReason::TapRefused,
    };
    counters.dropped(reason, frames.into());
}
