//! A worker's part of the switch's TAP device: queues among which the kernel shares frames out by the
//! container that they come from.
//!
//! As the sockets of a port (`socket_buckets.rs`). A container that sends too much fills the queue of its bucket,
//! where its frames are dropped; a worker takes from each queue in turn. Containers whose MAC addresses fall into
//! one bucket share its queue. If the kernel takes no program that distributes frames, a worker has one queue for
//! all.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use weft_io::poller::Poller;
use weft_io::steer::{self, BUCKETS, FrameSteering};
use weft_io::tap::{Tap, TapOffloads, TapOptions};
use weft_packet::ethernet;

use super::round_robin::RoundRobin;
use crate::error::EngineError;

/// Super-packets that each of several holds: a container's burst of some milliseconds.
const BUCKET_PACKETS: u32 = 2_048;

/// Their tokens begin here; those below are a thread's own.
const FIRST_TOKEN: u64 = 1;
/// The first token that is none of theirs.
pub(crate) const TOKENS_END: u64 = FIRST_TOKEN + BUCKETS as u64;

/// The queues of one worker, one for each bucket.
#[derive(Clone, Debug)]
pub(crate) struct TapQueues {
    taps: Arc<[Tap]>,
}

impl TapQueues {
    /// Opens queues behind those of the workers before.
    ///
    /// # Errors
    /// As [`Tap::open`], or the kernel's error.
    pub(crate) fn open(
        options: &TapOptions,
        count: usize,
        offloads: bool,
    ) -> Result<Self, EngineError> {
        Ok(Self { taps: open_queues(options, count, offloads)?.into() })
    }

    /// The queue to write to.
    pub(crate) fn writer(&self) -> &Tap {
        &self.taps[0]
    }

    /// The device's name.
    pub(crate) fn name(&self) -> &str {
        self.writer().name()
    }

    /// The offloads that the kernel granted to the device.
    pub(crate) fn offloads(&self) -> TapOffloads {
        self.writer().offloads()
    }

    /// Makes the kernel distribute frames to these queues and to those that further workers opened afterwards. It
    /// chooses among `workers` workers by flow, and among a worker's queues by sender.
    pub(crate) fn steer(&self, steering: &FrameSteering, workers: usize) {
        if let Err(error) = steering.steer(self.writer(), workers) {
            tracing::warn!(%error, workers, "the kernel still distributes frames to the old number of workers");
        }
    }
}

/// Opens further queues of a device, behind the present ones. Several share the super-packets that one would
/// hold.
///
/// # Errors
/// As [`Tap::open`], or the kernel's error.
pub(crate) fn open_queues(
    options: &TapOptions,
    count: usize,
    offloads: bool,
) -> Result<Vec<Tap>, EngineError> {
    let mut options = options.clone();
    if count > 1 {
        options.queue_packets = BUCKET_PACKETS;
    }
    let first = Tap::open(&options)?;
    // The next ones are of the same device, also where the name is a pattern.
    first.name().clone_into(&mut options.name);
    let mut taps = vec![first];
    while taps.len() < count {
        taps.push(Tap::open(&options)?);
    }
    if !offloads && let Some(tap) = taps.first_mut() {
        let stopped = tap.stop_offloads();
        let what = "disable a TAP device's offloads";
        stopped.map_err(|source| EngineError::Kernel { what, source })?;
    }
    Ok(taps)
}

/// The program that shares frames out, if the kernel takes it. With it a worker has a queue for each bucket,
/// else one queue for all.
pub(crate) fn steering() -> Option<Arc<FrameSteering>> {
    match FrameSteering::new() {
        Ok(steering) => Some(Arc::new(steering)),
        Err(error) => {
            tracing::warn!(
                %error,
                "the kernel does not distribute frames by container (eBPF, CAP_BPF): a container that sends too much fills the queues of others"
            );
            None
        }
    }
}

/// One thread's reading of a worker's queues.
#[derive(Debug)]
pub(crate) struct TapQueueReader {
    queues: TapQueues,
    round_robin: RoundRobin<BUCKETS>,
    /// The buckets of the containers that were written to, a bit for each.
    written: Cell<u8>,
}

const _: () = assert!(BUCKETS <= u8::BITS as usize);

impl TapQueueReader {
    pub(crate) fn new(queues: &TapQueues) -> Self {
        let round_robin = RoundRobin::new(queues.taps.len(), FIRST_TOKEN);
        Self { queues: queues.clone(), round_robin, written: Cell::new(0) }
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// The poller's.
    pub(crate) fn watch(&self, poller: &Poller) -> io::Result<()> {
        let add = |(tap, token)| poller.add(tap, token);
        self.queues.taps.iter().zip(FIRST_TOKEN..).try_for_each(add)
    }

    /// The queues with input.
    #[inline]
    pub(crate) const fn round_robin(&mut self) -> &mut RoundRobin<BUCKETS> {
        &mut self.round_robin
    }

    /// Notes that a frame is written for the container with this address.
    #[inline]
    pub(crate) fn note_written(&self, to: [u8; 6]) {
        if !ethernet::is_group(to) {
            self.written.set(self.written.get() | 1 << steer::bucket_of_mac(to));
        }
    }

    /// Takes turns, as [`RoundRobin::take`]. A write just made may have been answered within the call, as TCP
    /// does.
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
            self.round_robin.note_ready(written.trailing_zeros() as usize % self.queues.taps.len());
            written &= written - 1;
        }
        let Self { queues, round_robin, .. } = self;
        round_robin.take(|number, _| take(number, &queues.taps[number]))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_io::namespace::unshare_network;

    use super::*;

    #[test]
    fn the_queue_of_who_was_written_to_is_looked_at_again() {
        let thread = std::thread::spawn(|| {
            unshare_network().expect("this test needs root");
            let queues = TapQueues::open(&TapOptions::new("weft%d"), BUCKETS, true).unwrap();
            assert_eq!((queues.name(), queues.taps.len()), ("weft0", BUCKETS));
            queues.steer(&steering().unwrap(), 1);
            let mut reader = TapQueueReader::new(&queues);
            let taken = |reader: &mut TapQueueReader| {
                let mut taken = Vec::new();
                let take = |number, _: &Tap| {
                    taken.push(number);
                    Ok(())
                };
                reader.take_turns(take).unwrap();
                taken
            };
            assert!(taken(&mut reader).is_empty());
            let (one, two) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
            let mut expected = [one, two].map(steer::bucket_of_mac);
            expected.sort_unstable();
            // Twice, and groups, which answer when they like.
            for to in [one, two, one, [0xff; 6], [0x33, 0x33, 0, 0, 0, 1]] {
                reader.note_written(to);
            }
            assert_eq!(taken(&mut reader), expected);
            assert!(taken(&mut reader).is_empty(), "once");
            // The poller's token of a queue, and two other tokens.
            assert!(reader.round_robin().note_token(FIRST_TOKEN + 3));
            assert!(
                !reader.round_robin().note_token(TOKENS_END) && !reader.round_robin().note_token(0)
            );
            assert_eq!(taken(&mut reader), [3]);

            // With one queue for all.
            let queues = TapQueues::open(&TapOptions::new("weft%d"), 1, true).unwrap();
            let mut reader = TapQueueReader::new(&queues);
            reader.note_written(one);
            reader.note_written(two);
            assert_eq!(taken(&mut reader), [0]);
        });
        thread.join().unwrap();
    }
}
