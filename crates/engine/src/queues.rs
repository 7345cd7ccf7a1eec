//! A worker's part of the switch's TAP device: queues among which the kernel shares frames out by the
//! container that they come from.
//!
//! As the sockets of a port (`buckets.rs`): what a container sends beyond what is taken fills the queue
//! of its bucket and is dropped there, and a worker takes from each queue in turn. Containers whose MAC
//! addresses fall into one bucket share its queue.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use weft_io::poller::Poller;
use weft_io::steer::{self, BUCKETS};
use weft_io::tap::{Tap, TapOffloads, TapOptions};
use weft_packet::ethernet;

use crate::EngineError;
use crate::turns::Turns;

/// Super-packets that each holds: a container's burst of some milliseconds.
pub(crate) const QUEUE_PACKETS: u32 = 1_024;

/// Their tokens begin here; those below are a thread's own.
const FIRST_TOKEN: u64 = 1;
/// The first token that is none of theirs.
pub(crate) const TOKENS_END: u64 = FIRST_TOKEN + BUCKETS as u64;

/// The queues of one worker, one for each bucket.
#[derive(Clone, Debug)]
pub(crate) struct Queues {
    taps: Arc<[Tap]>,
}

impl Queues {
    /// Opens them, behind those of the workers before.
    ///
    /// # Errors
    /// As [`Tap::open`], or what the kernel refused.
    pub(crate) fn open(options: &TapOptions, offloads: bool) -> Result<Self, EngineError> {
        let first = Tap::open(options)?;
        // The next ones are of the same device, also where the name is a pattern.
        let options = TapOptions { name: first.name().to_owned(), ..options.clone() };
        let mut taps = vec![first];
        while taps.len() < BUCKETS {
            taps.push(Tap::open(&options)?);
        }
        if !offloads && let Some(tap) = taps.first_mut() {
            let stopped = tap.stop_offloads();
            let what = "turn a TAP device's offloads off";
            stopped.map_err(|source| EngineError::Kernel { what, source })?;
        }
        Ok(Self { taps: taps.into() })
    }

    /// The one that is written to.
    pub(crate) fn writer(&self) -> &Tap {
        &self.taps[0]
    }

    /// The device's name.
    pub(crate) fn name(&self) -> &str {
        self.writer().name()
    }

    /// What the kernel granted to the device.
    pub(crate) fn offloads(&self) -> TapOffloads {
        self.writer().offloads()
    }

    /// Has the kernel share frames out to these and to those that further workers opened after them: to so
    /// many workers by flow, and to each one's by sender.
    pub(crate) fn steer(&self, workers: usize) {
        if let Err(error) = steer::by_flow_and_sender(self.writer(), workers) {
            tracing::warn!(
                %error,
                "the kernel does not steer frames by container (Linux 4.16, CAP_BPF): one that sends \
                 too much can take the queue of others"
            );
        }
    }
}

/// One thread's reading of a worker's queues.
#[derive(Debug)]
pub(crate) struct QueueReader {
    queues: Queues,
    turns: Turns<BUCKETS>,
    /// The buckets of the containers that were written to, a bit for each.
    written: Cell<u8>,
}

impl QueueReader {
    pub(crate) fn new(queues: &Queues) -> Self {
        let turns = Turns::new(queues.taps.len(), FIRST_TOKEN);
        Self { queues: queues.clone(), turns, written: Cell::new(0) }
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// The poller's.
    pub(crate) fn watch(&self, poller: &Poller) -> io::Result<()> {
        let add = |(tap, token)| poller.add(tap, token);
        self.queues.taps.iter().zip(FIRST_TOKEN..).try_for_each(add)
    }

    /// Which have something.
    #[inline]
    pub(crate) const fn turns(&mut self) -> &mut Turns<BUCKETS> {
        &mut self.turns
    }

    /// Notes that a frame is written for the container with this address.
    #[inline]
    pub(crate) fn note_written(&self, to: [u8; 6]) {
        if !ethernet::is_group(to) {
            self.written.set(self.written.get() | 1 << steer::bucket_of_mac(to));
        }
    }

    /// Takes turns, as [`Turns::take`]. What was just written may have been answered within the call, as
    /// TCP does.
    ///
    /// # Errors
    /// The first that is met.
    #[inline]
    pub(crate) fn take_turns(
        &mut self,
        mut take: impl FnMut(usize, &Tap) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut written = self.written.take();
        while written != 0 {
            self.turns.note_ready(written.trailing_zeros() as usize);
            written &= written - 1;
        }
        let Self { queues, turns, .. } = self;
        turns.take(|number, _| take(number, &queues.taps[number]))
    }
}
