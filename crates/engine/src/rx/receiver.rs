//! From the wire to the TAP device: open in place, check, merge, write.

mod pipelined_open;

use std::net::SocketAddr;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use weft_crypto::ReplayWindow;
use weft_io::udp::{Message, RecvBatch};
use weft_path::EngineEvent;

use self::pipelined_open::OpenedBatch;
use super::batch::{datagrams, each_message};
use super::inspect::{Inside, note_refused};
use super::merger::Merger;
use super::open::{Opened, Windows, open, settle};
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
    pub(crate) sources: Sources,
    pub(crate) batch_size: BatchSize,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self {
            batch: RecvBatch::new(),
            merger: Merger::new(),
            opened_batch: None,
            sources: Sources {
                moved: Recent::new(Duration::from_millis(EVENT_INTERVAL_MS)),
                moved_lane: None,
            },
            batch_size: BatchSize::UNKNOWN,
        }
    }

    /// Says which super-packets the TAP device takes.
    pub(crate) fn set_merging(&mut self, tcp: bool, udp: bool) {
        self.merger.set_merging(tcp, udp);
    }

    /// A lane whose source the worker is to write down: path, lane, source.
    pub(crate) const fn take_moved_lane(&mut self) -> Option<(u32, u16, SocketAddr)> {
        self.sources.moved_lane.take()
    }

    /// Works through [`Self::batch`] and writes all of it to the TAP device.
    pub(crate) fn handle_batch<F: FrameSink, R>(&mut self, state: &State, env: &Env<'_, F, R>) {
        let Self { batch, merger, sources, .. } = self;
        let mut held = Held(None);
        let (messages, datagrams) = each_message(batch, env.counters, |batch, _, message| {
            handle_message(state, env, (batch, message), &mut held, merger, sources);
        });
        env.counters.did(Work::MessagesReceived, messages);
        env.counters.did(Work::DatagramsReceived, datagrams);
        self.merger.flush(self.batch.buffer(), env);
        self.batch_size.note(messages, datagrams);
    }
}

/// One message: equal datagrams from one source.
#[inline]
fn handle_message<'a, F: FrameSink, R>(
    state: &'a State,
    env: &Env<'_, F, R>,
    (batch, message): (&mut RecvBatch, &Message),
    held: &mut Held<'a>,
    merger: &mut Merger,
    sources: &mut Sources,
) {
    let mut newest = None;
    for range in datagrams(message) {
        let start = range.start;
        let datagram = (&mut batch.buffer_mut()[range], start);
        let result = match open(state, env, datagram, message.tos, held) {
            Ok(None) => continue,
            Ok(Some(opened)) => held.settle(state, env, &opened, &mut newest).map(|()| opened),
            Err(reason) => Err(reason),
        };
        match result {
            Ok(Opened { inside: Ok(Inside::Frame(frame)), .. }) => {
                merger.push(batch.buffer_mut(), &frame, env);
            }
            Ok(_) => {}
            Err(reason) => note_refused(state, env, held.inbound(), reason),
        }
    }
    if let Some(lane) = newest {
        sources.check(state, env, lane, message.source);
    }
}

/// The inbound SA of the last datagram, its window for this thread alone.
struct Held<'a>(Option<(&'a Inbound, MutexGuard<'a, ReplayWindow>)>);

impl<'a> Windows<'a> for Held<'a> {
    #[inline]
    fn find(&mut self, state: &'a State, spi: u32) -> Option<(&'a Inbound, &ReplayWindow)> {
        if self.0.as_ref().is_none_or(|(inbound, _)| inbound.spi != spi) {
            // Never two at once: another worker may want them the other way round.
            self.0 = None;
            let inbound = state.inbound.get(state.inbound_of(spi)?)?;
            self.0 = Some((inbound, inbound.hold()));
        }
        self.0.as_ref().map(|(inbound, window)| (*inbound, &**window))
    }
}

impl<'a> Held<'a> {
    fn inbound(&self) -> Option<&'a Inbound> {
        self.0.as_ref().map(|(inbound, _)| *inbound)
    }

    /// Tells the window of a packet that was opened by it. `newest` becomes the path and lane of an SA that
    /// has moved on with it.
    #[inline]
    fn settle<F, R>(
        &mut self,
        state: &State,
        env: &Env<'_, F, R>,
        opened: &Opened,
        newest: &mut Option<(u32, u16)>,
    ) -> Result<(), DropReason> {
        let Some((inbound, window)) = &mut self.0 else { return Err(DropReason::UnknownSpi) };
        let before = window.highest();
        window.mark(opened.sequence);
        if window.highest() > before {
            *newest = Some((inbound.path, inbound.lane));
        }
        settle(state, env, inbound, opened)
    }
}

/// The addresses that packets come from.
#[derive(Debug)]
pub(crate) struct Sources {
    moved: Recent,
    /// A lane whose packets come from elsewhere than before: path, lane, source.
    moved_lane: Option<(u32, u16, SocketAddr)>,
}

impl Sources {
    /// Reports a peer whose packets come from elsewhere than packets to it go; on lanes beyond the
    /// first notes where to answer.
    #[inline]
    pub(crate) fn check<F, R>(
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
