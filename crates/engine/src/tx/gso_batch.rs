//! A GSO batch: equal datagrams to one destination by the rules of UDP_SEGMENT. They are sealed one behind the
//! other in the buffer from which one call sends them.

use std::io;
use std::time::{Duration, Instant};

use weft_io::udp::{RUN_BYTES_MAX, Remote};
use weft_path::{EngineEvent, PathId};

use crate::ports::device::{Env, GsoSink};
use crate::ports::errno::{self, drop_reason, is_full};
use crate::rate_limit::{EVENT_INTERVAL_MS, Recent};
use crate::stats::counters::{DropReason, Work};
use crate::tables::lane::Origin;

/// How often a send is tried when the kernel has no room, before the newest batch is dropped.
pub const SEND_TRIES_MAX: u32 = 4;
/// How long datagrams go singly after the kernel refused a batch, in seconds.
pub const RUNS_RETRY_S: u64 = 60;

/// The batch in the making, and the known abilities of the socket.
#[derive(Debug)]
pub(crate) struct GsoBatch {
    buffer: Box<[u8]>,
    len: usize,
    /// Bytes of each datagram but the last.
    segment: usize,
    segments: usize,
    /// A shorter datagram was appended: it is the last.
    closed: bool,
    target: Option<GsoTarget>,
    segments_max: usize,
    refused_at: Option<Instant>,
    too_long: Recent,
    /// Datagrams that were not sent, by the number of their path: of one batch, and of the next one's path.
    unsent: [(u32, u64); 2],
}

/// The properties that all datagrams of a batch share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GsoKey {
    /// The path's number.
    pub(crate) number: u32,
    /// The socket that it leaves from.
    pub(crate) from: Origin,
    /// TOS or traffic class of the outer header.
    pub(crate) tos: u8,
}

/// The destination of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GsoTarget {
    pub(crate) key: GsoKey,
    pub(crate) path: PathId,
    /// The destination, with the key's TOS.
    pub(crate) remote: Remote,
    /// The inner IP packet of the largest datagram, in bytes.
    pub(crate) mtu: u16,
    /// A probe: each refusal is reported.
    pub(crate) probe: bool,
}

impl GsoBatch {
    /// `segments_max` is 1 where batches do not work.
    pub(crate) fn new(segments_max: usize) -> Self {
        Self {
            buffer: vec![0; RUN_BYTES_MAX].into_boxed_slice(),
            len: 0,
            segment: 0,
            segments: 0,
            closed: false,
            target: None,
            segments_max,
            refused_at: None,
            too_long: Recent::new(Duration::from_millis(EVENT_INTERVAL_MS)),
            unsent: [(0, 0); 2],
        }
    }

    /// The number of datagrams that were not sent since the last call, for at most two paths by their numbers.
    /// Call it before a third path's datagrams are sent.
    #[inline]
    pub(crate) fn take_unsent(&mut self) -> [(u32, u64); 2] {
        std::mem::take(&mut self.unsent)
    }

    /// Room for one more datagram of `len` bytes. `None`: it does not fit this batch, which must be sent
    /// first. An empty batch takes every datagram of at most [`RUN_BYTES_MAX`] bytes.
    #[inline]
    pub(crate) fn slot(&mut self, key: GsoKey, len: usize) -> Option<&mut [u8]> {
        if self.segments > 0 {
            let same = self.target.as_ref().is_some_and(|target| target.key == key);
            if !same || self.closed || len > self.segment || self.segments >= self.segments_max {
                return None;
            }
        }
        self.buffer.get_mut(self.len..self.len + len)
    }

    /// Appends the datagram written to the slot of `len` bytes. The first one says where the batch goes.
    #[inline]
    pub(crate) fn commit(&mut self, len: usize, target: impl FnOnce() -> GsoTarget) {
        if self.segments == 0 {
            self.segment = len;
            self.target = Some(target());
        }
        self.closed = len < self.segment;
        self.len += len;
        self.segments += 1;
    }

    /// Sends the batch, if there is one.
    #[inline]
    pub(crate) fn flush<F, R: GsoSink>(&mut self, env: &Env<'_, F, R>) {
        if self.segments > 0 {
            self.send(env);
            (self.len, self.segments, self.closed) = (0, 0, false);
        }
    }

    fn send<F, R: GsoSink>(&mut self, env: &Env<'_, F, R>) {
        let Some(target) = self.target else { return };
        let is_batch = self.segments > 1;
        let singly = is_batch && (target.key.from.may_cut || self.refused());
        let result = if singly {
            self.send_singly(env, &target)
        } else {
            self.send_once(env, &self.buffer[..self.len], &target, self.segments)
        };
        let Err(error) = result else { return };
        let went_whole = is_batch && !singly;
        match error.raw_os_error() {
            // EINVAL and EIO: no batches over this route. EMSGSIZE: perhaps only for batches.
            Some(errno::EINVAL | errno::EIO | errno::EMSGSIZE) if went_whole => {
                env.counters.did(Work::RunsRefused, 1);
                if error.raw_os_error() != Some(errno::EMSGSIZE) {
                    self.refused_at = Some(Instant::now());
                }
                if let Err(error) = self.send_singly(env, &target) {
                    // Not for being a batch, then: older kernels say EINVAL for a datagram too long.
                    if error.raw_os_error() == Some(errno::EMSGSIZE) {
                        self.refused_at = None;
                    }
                    self.failed(env, &target, &error, 0);
                }
            }
            // Those that went singly are counted.
            _ if singly => self.failed(env, &target, &error, 0),
            _ => self.failed(env, &target, &error, self.segments as u64),
        }
    }

    /// Whether batches are off for now.
    fn refused(&mut self) -> bool {
        let Some(at) = self.refused_at else { return false };
        if at.elapsed() < Duration::from_secs(RUNS_RETRY_S) {
            return true;
        }
        self.refused_at = None;
        false
    }

    /// Sends each datagram by itself; a failed send does not keep back the others. Returns the last error.
    #[cold]
    fn send_singly<F, R: GsoSink>(
        &mut self,
        env: &Env<'_, F, R>,
        target: &GsoTarget,
    ) -> io::Result<()> {
        let (mut result, mut lost) = (Ok(()), 0);
        for datagram in self.buffer[..self.len].chunks(self.segment) {
            if let Err(error) = self.send_once(env, datagram, target, 1) {
                env.counters.dropped(drop_reason(&error), 1);
                lost += 1;
                result = Err(error);
            }
        }
        self.note_unsent(target, lost);
        result
    }

    fn note_unsent(&mut self, target: &GsoTarget, datagrams: u64) {
        let number = target.key.number;
        let [first, second] = &mut self.unsent;
        let of = if first.1 == 0 || first.0 == number { first } else { second };
        *of = (number, of.1 + datagrams);
    }

    #[inline]
    fn send_once<F, R: GsoSink>(
        &self,
        env: &Env<'_, F, R>,
        bytes: &[u8],
        target: &GsoTarget,
        segments: usize,
    ) -> io::Result<()> {
        let mut tries = 0;
        loop {
            tries += 1;
            match env.socket.send_from(target.key.from, bytes, self.segment, &target.remote) {
                Ok(()) => {
                    env.counters.did(Work::RunsSent, 1);
                    env.counters.did(Work::DatagramsSent, segments as u64);
                    return Ok(());
                }
                Err(error) if is_full(&error) && tries < SEND_TRIES_MAX => {
                    std::thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Counts unsent datagrams, and reports a datagram that is longer than the route takes.
    #[cold]
    fn failed<F, R>(
        &mut self,
        env: &Env<'_, F, R>,
        target: &GsoTarget,
        error: &io::Error,
        lost: u64,
    ) {
        let reason = drop_reason(error);
        env.counters.dropped(reason, lost);
        self.note_unsent(target, lost);
        // A datagram that may be cut says nothing about those that go whole.
        if reason == DropReason::MessageTooLong
            && !target.key.from.may_cut
            && (self.too_long.allow(target.path.0, Instant::now()) || target.probe)
        {
            (env.events)(EngineEvent::MessageTooLong { path: target.path, mtu: target.mtu });
        }
    }
}

/// Sends one datagram that is of no batch, such as a keepalive.
pub(crate) fn send_alone<F, R: GsoSink>(env: &Env<'_, F, R>, datagram: &[u8], to: &Remote) {
    note_alone(env, env.socket.send_batch(datagram, datagram.len(), to));
}

/// Counts the result of a batch of one datagram.
pub(crate) fn note_alone<F, R>(env: &Env<'_, F, R>, sent: io::Result<()>) {
    match sent {
        Ok(()) => {
            env.counters.did(Work::RunsSent, 1);
            env.counters.did(Work::DatagramsSent, 1);
        }
        Err(error) => env.counters.dropped(drop_reason(&error), 1),
    }
}
