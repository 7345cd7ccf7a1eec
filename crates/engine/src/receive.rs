//! From the wire to the TAP device: open in place, check, merge, write.

use std::array;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use weft_crypto::ReplayWindow;
use weft_io::udp::{MESSAGES_MAX, Message, RecvBatch};
use weft_packet::coalesce::{Coalescer, FRAMES_MAX, Merged};
use weft_packet::split::FrameChecksum;
use weft_packet::{ecn, esp, ethernet, mss, probe, vxlan};
use weft_path::{EngineEvent, Vni};

use crate::ahead::Ahead;
use crate::counters::{DropReason, Work, WorkerCounters};
use crate::device::{Env, FrameSink};
use crate::limit::Recent;
use crate::run::{EVENT_INTERVAL_MS, errno};
use crate::state::{Inbound, State, key_of};

/// Messages taken in one call while they come as runs: what fits the processor's cache.
pub(crate) const RUN_MESSAGES_MAX: usize = 8;

/// As many of them are a unit that one thread opens beside others: small enough that all have work,
/// and what a super-packet that did not fit one run comes in.
pub(crate) const UNIT_MESSAGES_MAX: usize = 2;

/// The receiving half of a worker.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) batch: RecvBatch,
    pub(crate) merger: Merger,
    pub(crate) ahead: Option<Box<Ahead>>,
    moved: Recent,
    /// A lane whose packets come from elsewhere than before: path, lane, source.
    moved_lane: Option<(u32, u16, SocketAddr)>,
    pub(crate) kind: Kind,
}

/// How a socket's batches come, which says how the next one will.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    messages_max: usize,
}

impl Kind {
    /// Nothing has come yet.
    pub(crate) const UNKNOWN: Self = Self { messages_max: RUN_MESSAGES_MAX };
}

/// What a datagram turned out to be.
enum Opened {
    /// A frame for the TAP device.
    Frame(Range<usize>, FrameChecksum),
    /// Nothing more to do.
    Done,
}

impl Receiver {
    pub(crate) fn new() -> Self {
        Self {
            batch: RecvBatch::new(),
            merger: Merger { coalescer: Coalescer::new() },
            ahead: None,
            moved: Recent::new(Duration::from_millis(EVENT_INTERVAL_MS)),
            moved_lane: None,
            kind: Kind::UNKNOWN,
        }
    }

    /// Says which super-packets the TAP device takes.
    pub(crate) fn set_merging(&mut self, tcp: bool, udp: bool) {
        self.merger.coalescer.set_merging(tcp, udp);
    }

    /// A lane whose source the worker is to write down: path, lane, source.
    pub(crate) const fn take_moved_lane(&mut self) -> Option<(u32, u16, SocketAddr)> {
        self.moved_lane.take()
    }

    /// How many messages the next batch may have.
    pub(crate) const fn messages_max(&self) -> usize {
        self.kind.messages_max
    }

    /// How many messages the next unit may have that is opened beside others.
    pub(crate) const fn unit_messages_max(&self) -> usize {
        let max = self.messages_max();
        if max > RUN_MESSAGES_MAX { max } else { UNIT_MESSAGES_MAX }
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
        self.note_kind(messages as u64, datagrams);
    }

    /// How a batch came, so many datagrams in so many messages, says how the next one will.
    pub(crate) const fn note_kind(&mut self, messages: u64, datagrams: u64) {
        // Senders without runs fill many small messages: take more of them at once.
        let single = datagrams <= messages;
        self.kind.messages_max = if single { MESSAGES_MAX } else { RUN_MESSAGES_MAX };
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
            match open(state, env, &mut buffer[range], (held, tos), &mut newest) {
                Ok(Opened::Frame(frame, checksum)) => {
                    let frame = (start + frame.start) as u32..(start + frame.end) as u32;
                    self.merger.push(self.batch.buffer(), frame, checksum, env);
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
                // The peer still opens it: what this host sends by its own way may come to nothing.
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

/// Opens one datagram in place. `tos` is that of the outer header; `newest` becomes the path and lane
/// of an SA that has moved on with it.
#[inline]
fn open<'a, F, R>(
    state: &'a State,
    env: &Env<'_, F, R>,
    datagram: &mut [u8],
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
    match inspect(state, inbound, datagram, tos)? {
        Inside::Frame(at, checksum) => {
            carried(state, inbound);
            Ok(Opened::Frame(at, checksum))
        }
        inside => noted(state, env, inbound, &inside).map(|()| Opened::Done),
    }
}

/// Counts a datagram that is dropped: of the peer whose SA `inbound` is too, unless it bears no SA's SPI.
#[cold]
pub(crate) fn note_refused<F, R>(
    state: &State,
    env: &Env<'_, F, R>,
    inbound: Option<&Inbound>,
    reason: DropReason,
) {
    env.counters.dropped(reason, 1);
    let is_its = !matches!(reason, DropReason::Malformed | DropReason::UnknownSpi);
    if let Some(inbound) = inbound.filter(|_| is_its) {
        state.note_dropped(inbound.peer, 1);
    }
}

/// What an authentic packet holds.
#[derive(Debug)]
pub(crate) enum Inside {
    /// A frame for the TAP device: where in the datagram it stands.
    Frame(Range<usize>, FrameChecksum),
    /// A probe: its number, its MTU in bytes, whether it is of a candidate.
    Probe(u64, u16, bool),
    /// Nothing: a dummy.
    Nothing,
}

/// A packet with `plain_len` bytes of plaintext is authentic and no repetition; the window is held.
#[inline]
pub(crate) fn accepted<F, R>(
    state: &State,
    env: &Env<'_, F, R>,
    inbound: &Inbound,
    plain_len: usize,
) {
    if let Some(lane) = state.lane(inbound.path, inbound.lane) {
        lane.hear();
    }
    inbound.counters.add(1, plain_len.saturating_sub(inbound.key.headers_len()) as u64);
    if inbound.is_first_use() {
        (env.events)(EngineEvent::InboundFirstUse { spi: inbound.spi });
    }
}

/// A frame came in on the SA's lane.
#[inline]
pub(crate) fn carried(state: &State, inbound: &Inbound) {
    if let Some(lane) = state.lane(inbound.path, inbound.lane) {
        lane.carry();
    }
}

/// Looks into a packet that has been opened in place, and brings the frame's congestion mark up to
/// the outer header's. Says nothing to anybody: the packet may yet turn out to be a repetition.
#[inline]
pub(crate) fn inspect(
    state: &State,
    inbound: &Inbound,
    datagram: &mut [u8],
    tos: u8,
) -> Result<Inside, DropReason> {
    let Some(inner) = inbound.key.parse(datagram)? else { return Ok(Inside::Nothing) };
    let frame = &datagram[inner.frame.clone()];
    if inner.vxlan.vni == Vni::PROBE.0 {
        return probe_inside(inner.dst_port, frame);
    }
    if inner.dst_port != vxlan::PORT {
        return Err(DropReason::BadInner);
    }
    if inner.vxlan.vni != state.vni.0 {
        return Err(DropReason::UnknownNetwork);
    }
    let source = frame.get(6..12).and_then(<[u8]>::first_chunk).ok_or(DropReason::BadInner)?;
    if frame.len() < ethernet::LEN {
        return Err(DropReason::BadInner);
    }
    let owner = state.peer_of(key_of(*source));
    if owner != Some(inbound.peer) {
        return Err(source_refused(owner));
    }
    let (frame, checksum) = (&mut datagram[inner.frame.clone()], inner.vxlan.rco.into());
    ecn::decapsulate(frame, tos).map_err(|_| DropReason::CeOverNotEct)?;
    if let Some(mtu) = state.narrow_mtu(inbound.peer) {
        // What is sent back is to fit, where answers to what is too long may not get through.
        mss::clamp(frame, mtu, checksum);
    }
    Ok(Inside::Frame(inner.frame, checksum))
}

/// Why a frame is refused whose sender does not live at the peer that sealed it. One that lives at no
/// peer may be this host's own container by its address, and nothing could be sent back to it.
#[cold]
const fn source_refused(owner: Option<u32>) -> DropReason {
    if owner.is_some() { DropReason::ForeignSource } else { DropReason::UnannouncedSource }
}

#[cold]
fn probe_inside(port: u16, frame: &[u8]) -> Result<Inside, DropReason> {
    let candidate = match port {
        vxlan::PORT => false,
        vxlan::PROBE_PORT => true,
        _ => return Err(DropReason::BadInner),
    };
    let (probe, mtu) = probe::parse(frame).ok_or(DropReason::BadInner)?;
    Ok(Inside::Probe(probe, mtu, candidate))
}

/// Counts and reports what holds no frame.
#[cold]
pub(crate) fn noted<F, R>(
    state: &State,
    env: &Env<'_, F, R>,
    inbound: &Inbound,
    inside: &Inside,
) -> Result<(), DropReason> {
    let &Inside::Probe(probe, mtu, candidate) = inside else {
        env.counters.did(Work::Dummies, 1);
        return Ok(());
    };
    let peer = state.peers.get(inbound.peer).ok_or(DropReason::UnknownSpi)?.id;
    let path = state.paths.get(inbound.path).ok_or(DropReason::UnknownSpi)?.id;
    env.counters.did(Work::ProbesReceived, 1);
    (env.events)(EngineEvent::ProbeReceived { peer, path, probe, mtu, candidate });
    Ok(())
}

/// Merges frames and writes them.
#[derive(Debug)]
pub(crate) struct Merger {
    coalescer: Coalescer,
}

impl Merger {
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
    let mut slices: [IoSlice<'_>; FRAMES_MAX + 2] = array::from_fn(|_| IoSlice::new(&[]));
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
pub(crate) fn count_refusal(counters: &WorkerCounters, error: &io::Error, frames: u32) {
    let reason = match error.raw_os_error() {
        Some(errno::EIO | errno::EBADFD) => DropReason::TapDown,
        Some(errno::EAGAIN | errno::ENOMEM | errno::ENOBUFS) => DropReason::TapFull,
        _ => DropReason::TapRefused,
    };
    counters.dropped(reason, frames.into());
}
