//! The walk over a received batch.

use std::ops::Range;

use weft_io::udp::{Message, RecvBatch};

use crate::stats::counters::{DropReason, WorkerCounters};

/// Gives `each` the messages of a batch, with their numbers, but for those that are cut or empty, which are
/// counted as dropped. Returns how many messages and how many datagrams there are.
#[inline]
pub(crate) fn each_message(
    batch: &mut RecvBatch,
    counters: &WorkerCounters,
    mut each: impl FnMut(&mut RecvBatch, usize, &Message),
) -> (u64, u64) {
    let (messages, mut datagrams) = (batch.len(), 0);
    for index in 0..messages {
        let Some(message) = batch.message(index) else { break };
        if message.truncated {
            counters.dropped(DropReason::Truncated, 1);
            continue;
        }
        if message.range.is_empty() {
            datagrams += 1;
            counters.dropped(DropReason::Malformed, 1);
            continue;
        }
        datagrams += message.range.len().div_ceil(message.segment) as u64;
        each(batch, index, &message);
    }
    (messages as u64, datagrams)
}

/// The ranges of a message's datagrams, which have equal lengths, but for the last.
#[inline]
pub(crate) fn datagrams(message: &Message) -> impl Iterator<Item = Range<usize>> + use<> {
    let (segment, end) = (message.segment, message.range.end);
    message.range.clone().step_by(segment).map(move |start| start..(start + segment).min(end))
}
