//! Merges opened frames into super-packets and writes them to a TAP device.

use std::array;
use std::io::{self, IoSlice};
use std::ops::Range;

use weft_packet::coalesce::{Coalescer, FRAMES_MAX, Merged};
use weft_packet::split::FrameChecksum;

use crate::ports::device::{Env, FrameSink};
use crate::ports::errno;
use crate::stats::counters::{DropReason, Work, WorkerCounters};

/// Parts of one write: the virtio net header, a rewritten header, and the frames.
pub(crate) const SLICES_MAX: usize = FRAMES_MAX + 2;

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
    #[inline]
    pub(crate) fn file(&mut self, arena: &[u8], at: Range<u32>, checksum: FrameChecksum) -> bool {
        self.coalescer.push(arena, at, checksum).is_ok()
    }

    /// Forgets all that is filed.
    #[cold]
    pub(crate) fn forget(&mut self) {
        self.coalescer.flush(&[], |_| {});
        let _ = self.coalescer.take_rejected();
    }

    #[inline]
    pub(crate) fn push<F: FrameSink, R>(
        &mut self,
        arena: &[u8],
        frame: Range<u32>,
        checksum: FrameChecksum,
        env: &Env<'_, F, R>,
    ) {
        if self.coalescer.push(arena, frame.clone(), checksum).is_err() {
            self.flush(arena, env);
            // An empty one takes every frame.
            let _ = self.coalescer.push(arena, frame, checksum);
        }
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
    match env.tap.send(&slices[..used]) {
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
