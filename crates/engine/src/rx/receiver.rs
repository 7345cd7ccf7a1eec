//! From the wire to the TAP device: open in place, check, merge, write.

mod pipelined_open;

use std::net::SocketAddr;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use weft_crypto::ReplayWindow;
use weft_io::udp::{Message, RecvBatch};
use weft_packet::esp;
use weft_path::EngineEvent;

use self::pipelined_open::OpenedBatch;
use super::inspect::{Inside, accepted, carried, inspect, note_refused, noted};
use super::merger::{Merger, OpenedFrame};
use crate::ports::device::{Env, FrameSink};
use crate::ports::socket_buckets::BatchSize;
use crate::rate_limit::{EVENT_INTERVAL_MS, Recent};
use crate::stats::counters::{DropReason, Work};
use crate::tables::state::{Inbound, State};

/// The receiving half of a worker.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) batch: RecvBatch,
    pub(crate) merger: Merger,
    opened_batch: Option<Box<OpenedBatch>>,
    moved: Recent,
    /// A lane whose packets come from elsewhere than before: path, lane, source.
    moved_lane: Option<(u32, u16, SocketAddr)>,
    pub(crate) batch_size: BatchSize,
}

/// The result of opening a datagram.
enum Opened {
    /// A frame for the TAP device.
    Frame(OpenedFrame),
    /// Nothing more to do.
    Done,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self {
            batch: RecvBatch::new(),
            merger: Merger::new(),
            opened_batch: None,
            moved: Recent::new(Duration::from_millis(EVENT_INTERVAL_MS)),
            moved_lane: None,
            batch_size: BatchSize::UNKNOWN,
        }
    }

    /// Says which super-packets the TAP device takes.
    pub(crate) fn set_merging(&mut self, tcp: bool, udp: bool) {
        self.merger.set_merging(tcp, udp);
    }

    /// A lane whose source the worker is to write down: path, lane, source.
    pub(crate) const fn take_moved_lane(&mut self) -> Option<(u32, u16, SocketAddr)> {
        self.moved_lane.take()
    }

    /// Works through [`Self::batch`] and writes all of it to the TAP device.
    pub(crate) fn handle_batch<F: FrameSink, R>(&mut self, state: &State, env: &Env<'_, F, R>) {
        let (messages, mut datagrams) = (self.batch.len(), 0);
        let mut held = None;
        for index in 0..messages {
            let Some(message) = self.batch.message(index) else { break };
            if message.truncated {
                env.counters.dropped(DropReason::Truncated, 1);
                continue;
            }
            datagrams += self.handle_message(state, env, &message, &mut held);
        }
        env.counters.did(Work::MessagesReceived, messages as u64);
        env.counters.did(Work::DatagramsReceived, datagrams);
        self.merger.flush(self.batch.buffer(), env);
        self.batch_size.note(messages as u64, datagrams);
    }

    /// One message: equal datagrams from one source. Returns how many.
    fn handle_message<'a, F: FrameSink, R>(
        &mut self,
        state: &'a State,
        env: &Env<'_, F, R>,
        message: &Message,
        held: &mut Option<Held<'a>>,
    ) -> u64 {
        let Message { range: ref all, segment, source, tos, .. } = *message;
        if all.is_empty() {
            env.counters.dropped(DropReason::Malformed, 1);
            return 1;
        }
        let mut newest = None;
        let mut count = 0;
        for start in all.clone().step_by(segment) {
            let range = start..(start + segment).min(all.end);
            let buffer = self.batch.buffer_mut();
            count += 1;
            match open(state, env, (&mut buffer[range], start), (held, tos), &mut newest) {
                Ok(Opened::Frame(frame)) => {
                    self.merger.push(self.batch.buffer_mut(), &frame, env);
                }
                Ok(Opened::Done) => {}
                Err(reason) => {
                    let inbound = held.as_ref().map(|held| held.inbound);
                    note_refused(state, env, inbound, reason);
                }
            }
        }
        if let Some((path, lane)) = newest {
            self.check_source(state, env, (path, lane), source);
        }
        count
    }

    /// Reports a peer whose packets come from elsewhere than packets to it go; on lanes beyond the
    /// first notes where to answer.
    #[inline]
    pub(crate) fn check_source<F, R>(
        &mut self,
        state: &State,
        env: &Env<'_, F, R>,
        (number, lane): (u32, u16),
        source: SocketAddr,
    ) {
        let Some(path) = state.paths.get(number) else { return };
        if lane > 0 && path.has_lane_ports() {
            let Some(known) = path.known.get(usize::from(lane)) else { return };
            let is_at = |place: weft_io::udp::Remote| same_place(place.address(), source);
            if path.responds {
                if !known.source.is_some_and(is_at) {
                    self.moved_lane = Some((number, lane, source));
                }
            } else if !known.is_alive() && !path.remote.is_some_and(is_at) {
                // The peer still opens it: packets that this host sends by its own way may be lost.
                known.unhear();
            }
            return;
        }
        let Some(remote) = path.remote else { return };
        if !same_place(remote.address(), source) && self.moved.allow(path.id.0, Instant::now()) {
            (env.events)(EngineEvent::RemoteMoved { path: path.id, remote: source });
        }
    }
}

/// Scopes of link-local addresses are the receiver's affair.
#[inline]
fn same_place(a: SocketAddr, b: SocketAddr) -> bool {
    a.port() == b.port() && a.ip() == b.ip()
}

/// The inbound SA of the last datagram: most come many on one.
struct Held<'a> {
    inbound: &'a Inbound,
    window: MutexGuard<'a, ReplayWindow>,
}

/// The SA with this SPI, its window for this thread alone.
#[inline]
fn hold<'h, 'a>(
    state: &'a State,
    held: &'h mut Option<Held<'a>>,
    spi: u32,
) -> Option<&'h mut Held<'a>> {
    if held.as_ref().is_none_or(|held| held.inbound.spi != spi) {
        // Never two at once: another worker may want them the other way round.
        *held = None;
        let inbound = state.inbound.get(state.inbound_of(spi)?)?;
        *held = Some(Held { inbound, window: inbound.hold() });
    }
    held.as_mut()
}

/// Opens one datagram in place, from `start` of the batch's buffer on. `tos` is that of the outer header; `newest` becomes the path and lane
/// of an SA that has moved on with it.
#[inline]
fn open<'a, F, R>(
    state: &'a State,
    env: &Env<'_, F, R>,
    (datagram, start): (&mut [u8], usize),
    (held, tos): (&mut Option<Held<'a>>, u8),
    newest: &mut Option<(u32, u16)>,
) -> Result<Opened, DropReason> {
    if *datagram == [esp::KEEPALIVE] {
        env.counters.did(Work::Keepalives, 1);
        return Ok(Opened::Done);
    }
    let header = esp::Header::parse(datagram).map_err(|_| DropReason::Malformed)?;
    let Held { inbound, window } = hold(state, held, header.spi).ok_or(DropReason::UnknownSpi)?;
    let before = window.highest();
    let plain_len = inbound.key.open(window, datagram)?;
    if window.highest() > before {
        *newest = Some((inbound.path, inbound.lane));
    }
    let inbound = *inbound;
    accepted(state, env, inbound, plain_len);
    match inspect(state, inbound, (datagram, start), tos)? {
        Inside::Frame(frame) => {
            carried(state, inbound);
            Ok(Opened::Frame(frame))
        }
        inside => noted(state, env, inbound, &inside).map(|()| Opened::Done),
    }
}
