//! From the TAP device to the wire: find the peer, cut, seal into the GSO batch, send.

use std::net::Ipv6Addr;
use std::sync::Arc;

use weft_io::steer;
use weft_io::udp::Remote;
use weft_packet::layout::{self, Headers, Layout};
use weft_packet::split::{self, FragmentError, Plan, SplitError};
use weft_packet::vnet::{self, VnetHeader};
use weft_packet::vxlan::VxlanHeader;
use weft_packet::{ecn, esp, ethernet, ipv6, membership, mss, probe, vxlan};
use weft_path::{EngineEvent, Mac, PathId, Vni};

use super::gso_batch::{GsoBatch, GsoKey, GsoTarget, note_alone, send_alone};
use super::repeats::Repeats;
use super::too_long::TooLongAnswers;
use crate::error::CommandError;
use crate::ports::device::{Env, FrameSink, GsoSink};
use crate::stats::counters::{DropReason, Work};
use crate::stats::worker_load::WorkerLoad;
use crate::tables::flows::Flows;
use crate::tables::lane::Origin;
use crate::tables::networks::{Network, NetworkNumber};
use crate::tables::sa::{Builder, DUMMY_LEN_MAX, Inner, NotSealed, Sealing};
use crate::tables::state::{Outbound, Path, State};

/// The range of inner source ports (the dynamic ports of RFC 6335).
const SOURCE_PORT_FIRST: u16 = 0xc000;
/// All hosts on the link: whatever device the peer takes probes on.
const PROBE_IP: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const PROBE_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
/// The MTU of a frame that the kernel fragments afterwards.
const UNLIMITED: usize = u16::MAX as usize;

/// A frame or super-packet to send, and its headers, which are looked for once.
#[derive(Clone, Copy)]
struct Frame<'a> {
    vnet: VnetHeader,
    bytes: &'a [u8],
    headers: Headers,
}

impl<'a> Frame<'a> {
    #[inline]
    fn new(vnet: VnetHeader, bytes: &'a [u8]) -> Self {
        Self { vnet, bytes, headers: Layout::parse(bytes) }
    }

    /// One that is sent as it is.
    fn whole(bytes: &'a [u8]) -> Self {
        Self::new(VnetHeader::default(), bytes)
    }

    /// How to send it where an IP packet has at most `mtu` bytes.
    #[inline]
    fn plan(&self, mtu: usize) -> Result<Plan, SplitError> {
        Plan::with_headers(&self.vnet, self.bytes, &self.headers, mtu)
    }
}

/// The sending half of a worker.
#[derive(Debug)]
pub(crate) struct Transmitter {
    gso: GsoBatch,
    answers: TooLongAnswers,
    repeats: Repeats,
    /// The number of its worker.
    worker: usize,
    /// The lanes of the flows that its worker and the worker's helpers send.
    flows: Arc<Flows>,
    load: WorkerLoad,
    /// The time, in ticks.
    tick: u32,
    /// Bytes sealed in this batch.
    sealed: u64,
    /// Source of probes.
    mac: Mac,
    /// The DSCP of frames goes to the outer header too.
    copy_dscp: bool,
    /// A frame of the slow path.
    scratch: Vec<u8>,
}

impl Transmitter {
    /// Of the worker with this number, or of a helper of it.
    pub(crate) fn of_worker(
        worker: usize,
        flows: Arc<Flows>,
        load: WorkerLoad,
        segments_max: usize,
        mac: Mac,
    ) -> Self {
        Self { worker, flows, load, ..Self::new(segments_max, mac) }
    }

    pub(crate) fn new(segments_max: usize, mac: Mac) -> Self {
        Self {
            gso: GsoBatch::new(segments_max),
            answers: TooLongAnswers::new(),
            repeats: Repeats::new(),
            worker: 0,
            flows: Arc::default(),
            load: WorkerLoad::default(),
            tick: 0,
            sealed: 0,
            mac,
            copy_dscp: false,
            scratch: vec![0; ethernet::LEN + UNLIMITED + 64],
        }
    }

    /// Says whether the DSCP of frames goes to the outer header; not, to begin with.
    pub(crate) fn with_copy_dscp(self, copy_dscp: bool) -> Self {
        Self { copy_dscp, ..self }
    }

    /// Looks at the clock, for later sends; at the beginning of each batch.
    #[inline]
    pub(crate) fn begin(&mut self) {
        self.tick = steer::tick();
    }

    /// Sends the datagrams that still wait; at the end of each batch.
    #[inline]
    pub(crate) fn flush<F, R: GsoSink>(&mut self, state: &State, env: &Env<'_, F, R>) {
        self.gso.flush(env);
        self.note_unsent(state);
        self.load.sent(std::mem::take(&mut self.sealed), self.tick);
    }

    /// One frame or super-packet as read from a TAP device of this network, virtio net header first.
    #[inline]
    pub(crate) fn handle_read<F: FrameSink, R: GsoSink>(
        &mut self,
        state: &State,
        env: &Env<'_, F, R>,
        network: &Network,
        read: &[u8],
    ) {
        env.counters.did(Work::TapReads, 1);
        let Some(vnet) = VnetHeader::parse(read) else {
            return env.counters.dropped(DropReason::BadSuperPacket, 1);
        };
        let frame = &read[vnet::LEN..];
        let Some(destination) = frame.first_chunk::<6>().copied() else {
            return env.counters.dropped(DropReason::BadSuperPacket, 1);
        };
        if ethernet::is_group(destination) {
            if self.stays_here(env, network.id.number, frame) {
                return;
            }
            let frame = Frame::new(vnet, frame);
            for peer in &network.broadcast {
                self.send_to_peer(state, env, (*peer, network.vni), &frame);
            }
            return;
        }
        match state.peer_of(network.id.number.key(destination)) {
            Some(peer) => {
                let frame = Frame::new(vnet, frame);
                self.send_to_peer(state, env, (peer, network.vni), &frame);
            }
            None => env.counters.dropped(DropReason::NoEndpoint, 1),
        }
    }

    /// Whether a frame to a group is for no peer, which is counted. Apart, so that the usual way stays short.
    #[inline(never)]
    fn stays_here<F, R>(
        &mut self,
        env: &Env<'_, F, R>,
        network: NetworkNumber,
        frame: &[u8],
    ) -> bool {
        if self.repeats.goes_round(network, frame, self.tick) {
            if let Some(source) = frame[6..].first_chunk() {
                env.counters.note_round(network.key(*source));
            }
            env.counters.dropped(DropReason::GoesRound, 1);
            return true;
        }
        let is_own = self.is_own_report(frame);
        if is_own {
            env.counters.did(Work::OwnReports, 1);
        }
        is_own
    }

    /// Whether a frame is the switch's own, which reports that it listens to groups. Each peer sends it all multicast
    /// anyway, and takes nothing from an address that no container has.
    fn is_own_report(&self, frame: &[u8]) -> bool {
        frame.get(6..12) == Some(&self.mac.0[..]) && membership::is_report(frame)
    }

    /// Sends one probe, at once.
    pub(crate) fn send_probe<F, R: GsoSink>(
        &mut self,
        state: &State,
        env: &Env<'_, F, R>,
        (id, number, mtu, candidate): (PathId, u64, u16, bool),
    ) -> Result<(), CommandError> {
        let path_number = state.path_number(id).ok_or(CommandError::UnknownPath { path: id })?;
        let Some(path) = state.paths.get(path_number) else { return Ok(()) };
        self.begin();
        let lane = path.lanes.iter().position(Option::is_some);
        let lane = lane.ok_or(CommandError::NoOutboundSa { path: id })?;
        let source = self.mac.link_local();
        let mut frame = std::mem::take(&mut self.scratch);
        let written =
            probe::write(&mut frame, self.mac.0, PROBE_MAC, source, PROBE_IP, number, mtu);
        let result = written.map_err(|_| CommandError::ProbeSize { mtu }).map(|len| {
            let inner = Inner {
                vxlan: VxlanHeader { vni: Vni::PROBE.0, rco: None },
                source_port: SOURCE_PORT_FIRST,
                port: if candidate { vxlan::PROBE_PORT } else { vxlan::PORT },
            };
            self.gso.flush(env);
            let frame = Frame::whole(&frame[..len]);
            if let Ok(plan) = frame.plan(UNLIMITED) {
                let dropped = self.seal(env, path_number, (path, lane), inner, &plan, &frame);
                if dropped > 0 {
                    state.note_dropped_on(path_number, dropped);
                }
            }
            self.gso.flush(env);
            self.note_unsent(state);
        });
        self.scratch = frame;
        result
    }

    /// Sends a NAT keepalive.
    pub(crate) fn send_keepalive<F, R: GsoSink>(
        state: &State,
        env: &Env<'_, F, R>,
        id: PathId,
    ) -> Result<(), CommandError> {
        let path = state.path_number(id).and_then(|number| state.paths.get(number));
        let path = path.ok_or(CommandError::UnknownPath { path: id })?;
        let remote = path.remote.ok_or(CommandError::NoOutboundSa { path: id })?;
        send_alone(env, &[esp::KEEPALIVE], &remote);
        Ok(())
    }

    /// Sends a dummy on each lane of its worker, one of `workers`, that is in use beyond the first.
    pub(crate) fn tell_of_lanes<F, R: GsoSink>(
        &self,
        state: &State,
        env: &Env<'_, F, R>,
        workers: usize,
    ) {
        for (_, path) in state.paths.iter() {
            for (number, outbound) in path.lanes.iter().enumerate().skip(1) {
                if number % workers.max(1) == self.worker
                    && let Some(outbound) = outbound
                    && outbound.answers_dummies
                    && let Some((from, to)) = path.way(number)
                {
                    send_dummy(env, outbound, from, to);
                }
            }
        }
    }

    /// Looks at the lanes of its worker, one of `workers`, or at those alone that are asked for, and sends the
    /// dummies that are due. Returns whether some still are asked for.
    pub(crate) fn look_after_lanes<F, R: GsoSink>(
        &self,
        state: &State,
        env: &Env<'_, F, R>,
        workers: usize,
        all: bool,
    ) -> bool {
        let workers = workers.max(1);
        let mut asking = false;
        for (_, path) in state.paths.iter() {
            for (number, outbound) in path.lanes.iter().enumerate().skip(1) {
                let (Some(outbound), Some(lane)) = (outbound, path.known.get(number)) else {
                    continue;
                };
                if number % workers != self.worker
                    || !outbound.answers_dummies
                    || !(all || lane.is_asked_for())
                {
                    continue;
                }
                match path.way(number) {
                    Some((from, to)) => {
                        if lane.look(outbound.sa.packets()) {
                            send_dummy(env, outbound, from, to);
                        }
                    }
                    None => lane.wait(),
                }
                if let Some(proven) = lane.news() {
                    let (path, lane) = (path.id, number as u16);
                    (env.events)(EngineEvent::LaneProven { path, lane, proven });
                }
                asking |= lane.is_asked_for();
            }
        }
        asking
    }

    #[inline]
    fn send_to_peer<F: FrameSink, R: GsoSink>(
        &mut self,
        state: &State,
        env: &Env<'_, F, R>,
        (peer, vni): (u32, Vni),
        frame: &Frame<'_>,
    ) {
        let dropped = self.send_by_path(state, env, (peer, vni), frame);
        if dropped > 0 {
            state.note_dropped(peer, dropped);
        }
        self.note_unsent(state);
    }

    /// Counts unsent datagrams for the peers of their paths.
    #[inline]
    fn note_unsent(&mut self, state: &State) {
        for (path, packets) in self.gso.take_unsent() {
            if packets > 0 {
                state.note_dropped_on(path, packets);
            }
        }
    }

    /// Returns how many packets of it were dropped.
    #[inline]
    fn send_by_path<F: FrameSink, R: GsoSink>(
        &mut self,
        state: &State,
        env: &Env<'_, F, R>,
        (peer, vni): (u32, Vni),
        frame: &Frame<'_>,
    ) -> u64 {
        let bound = state.peers.get(peer).and_then(|peer| peer.bound);
        let Some(number) = bound else {
            return dropped(env, DropReason::NoPath, 1);
        };
        let Some(path) = state.paths.get(number) else {
            return dropped(env, DropReason::NoPath, 1);
        };
        if state.is_narrow(path) {
            return self.send_narrow(env, (number, path, vni), frame);
        }
        self.send_sized(env, (number, path, vni), frame)
    }

    /// On a path that carries less than containers may send. Apart, so that the usual one stays short.
    #[inline(never)]
    fn send_narrow<F: FrameSink, R: GsoSink>(
        &mut self,
        env: &Env<'_, F, R>,
        way: Way<'_>,
        frame: &Frame<'_>,
    ) -> u64 {
        if frame.vnet.gso_type == vnet::GSO_NONE && mss::opens(frame.bytes, &frame.headers) {
            return self.send_opening(env, way, frame);
        }
        self.send_sized(env, way, frame)
    }

    #[inline]
    fn send_sized<F: FrameSink, R: GsoSink>(
        &mut self,
        env: &Env<'_, F, R>,
        way: Way<'_>,
        frame: &Frame<'_>,
    ) -> u64 {
        match frame.plan(way.1.mtu.into()) {
            Ok(plan) => self.send_plan(env, way, &plan, frame),
            Err(SplitError::TooLong { mtu, .. }) => self.too_long(env, way, frame, mtu),
            Err(_) => dropped(env, DropReason::BadSuperPacket, 1),
        }
    }

    /// A TCP segment that says how large those may be that come back: it says no more than fits.
    #[cold]
    fn send_opening<F: FrameSink, R: GsoSink>(
        &mut self,
        env: &Env<'_, F, R>,
        way: Way<'_>,
        frame: &Frame<'_>,
    ) -> u64 {
        let mut lowered = std::mem::take(&mut self.scratch);
        let lost = match lowered.get_mut(..frame.bytes.len()) {
            Some(opening) => {
                opening.copy_from_slice(frame.bytes);
                let checksum = (&frame.vnet).into();
                let changed = mss::clamp(opening, &frame.headers, way.1.mtu, checksum);
                env.counters.did(Work::SegmentSizesLowered, changed.into());
                self.send_sized(env, way, &Frame { bytes: opening, ..*frame })
            }
            None => dropped(env, DropReason::BadSuperPacket, 1),
        };
        self.scratch = lowered;
        lost
    }

    /// Returns how many packets of it were dropped, as those do that it calls.
    #[inline]
    fn send_plan<F, R: GsoSink>(
        &mut self,
        env: &Env<'_, F, R>,
        (number, path, vni): Way<'_>,
        plan: &Plan,
        frame: &Frame<'_>,
    ) -> u64 {
        let hash = layout::flow_hash(frame.bytes, &frame.headers);
        let lane = match path.lanes[..] {
            [Some(_)] => {
                self.flows.keep(number, hash, self.tick);
                Some(0)
            }
            _ => {
                let worker = (self.worker, env.socket.sockets());
                self.flows.lane((number, path), worker, hash, self.tick)
            }
        };
        let Some(lane) = lane else {
            return dropped(env, DropReason::NoPath, 1);
        };
        let source_port = SOURCE_PORT_FIRST | (hash >> 16) as u16;
        let vxlan = VxlanHeader { vni: vni.0, rco: None };
        let inner = Inner { vxlan, source_port, port: vxlan::PORT };
        self.seal(env, number, (path, lane), inner, plan, frame)
    }

    /// Seals all segments of a plan into GSO batches. The kernel cuts datagrams that are longer than the path
    /// carries, but for probes.
    fn seal<F, R: GsoSink>(
        &mut self,
        env: &Env<'_, F, R>,
        number: u32,
        (path, lane): (&Path, usize),
        inner: Inner,
        plan: &Plan,
        frame: &Frame<'_>,
    ) -> u64 {
        let (id, mtu) = (path.id, (plan.segment_frame_len(0) - ethernet::LEN) as u16);
        let (Some((from, remote)), Some(Some(outbound))) = (path.way(lane), path.lanes.get(lane))
        else {
            return dropped(env, DropReason::NoPath, 1);
        };
        if !within_limits(env, id, outbound, plan) {
            return dropped(env, DropReason::SaExhausted, plan.segments as u64);
        }
        let tos = ecn::outer_tos(ecn::tos(frame.bytes, &frame.headers), self.copy_dscp);
        let probe = inner.vxlan.vni == Vni::PROBE.0;
        let may_cut = mtu > path.mtu && !probe;
        let key = GsoKey { number, from: Origin { may_cut, ..from }, tos };
        let target = || GsoTarget { key, path: id, remote: remote.with_tos(tos), mtu, probe };
        // Only a whole checksum goes out, or a checksum that a mark can name to a peer that takes marks.
        let rco = if outbound.rco { plan.rco() } else { None };
        let inner = Inner { vxlan: VxlanHeader { rco, ..inner.vxlan }, ..inner };
        let segments = plan.segments as u64;
        let sealed = match &outbound.sa {
            Sealing::Esp(sa) => sa
                .reserve(segments)
                .map_err(|_| NotSealed)
                .map(|builder| self.fill(env, builder, (key, target), inner, (plan, frame.bytes))),
            Sealing::Ovpn(sa) => sa
                .reserve(segments)
                .map(|builder| self.fill(env, builder, (key, target), inner, (plan, frame.bytes))),
        };
        match sealed {
            Ok((bytes, dropped)) => {
                outbound.sealed(segments, bytes);
                self.sealed += bytes;
                if path.lanes.len() > 1 {
                    outbound.load.add(bytes, self.tick);
                }
                dropped
            }
            Err(NotSealed) => exhausted(env, id, outbound, segments),
        }
    }

    /// Puts all segments of a plan into GSO batches, sealed. Returns the bytes of their frames, and how many
    /// were dropped.
    #[inline]
    fn fill<F, R: GsoSink, B: Builder>(
        &mut self,
        env: &Env<'_, F, R>,
        mut builder: B,
        (key, target): (GsoKey, impl Fn() -> GsoTarget),
        inner: Inner,
        (plan, frame): (&Plan, &[u8]),
    ) -> (u64, u64) {
        env.socket.reserved();
        let finish_checksum = inner.vxlan.rco.is_none();
        let (mut bytes, mut lost) = (0, 0);
        for index in 0..plan.segments {
            let frame_len = plan.segment_frame_len(index);
            let len = B::packet_len(frame_len);
            if self.gso.slot(key, len).is_none() {
                self.gso.flush(env);
            }
            let Some(slot) = self.gso.slot(key, len) else {
                lost += dropped(env, DropReason::TooLong, 1);
                continue;
            };
            let out = &mut slot[B::FRAME_AT..B::FRAME_AT + frame_len];
            let header_len = plan.write_header(frame, index, finish_checksum, out);
            out[header_len..].copy_from_slice(&frame[plan.payload(index)]);
            if builder.finish(slot, inner, frame_len).is_err() {
                lost += dropped(env, DropReason::SaExhausted, 1);
                continue;
            }
            self.gso.commit(len, &target);
            bytes += frame_len as u64;
        }
        (bytes, lost)
    }

    /// A packet that the path does not carry: fragmented, or answered, or counted.
    #[cold]
    fn too_long<F: FrameSink, R: GsoSink>(
        &mut self,
        env: &Env<'_, F, R>,
        way: Way<'_>,
        frame: &Frame<'_>,
        mtu: usize,
    ) -> u64 {
        let mtu = match ipv6_limit(&frame.headers) {
            // No answer makes a sender's packets shorter than that.
            Some(limit) => match frame.plan(limit) {
                Ok(plan) => {
                    env.counters.did(Work::CutOutside, plan.segments as u64);
                    return self.send_plan(env, way, &plan, frame);
                }
                Err(_) => mtu.max(ipv6::MTU_MIN),
            },
            None => mtu,
        };
        match self.answers.answer(env, frame.bytes, mtu) {
            Ok(()) => dropped(env, DropReason::TooLong, 1),
            // For groups too: a sender that may not be answered can still be served.
            Err(_) => self.fragment(env, way, frame),
        }
    }

    /// Cuts an IPv4 packet without DF into fragments, each datagram of a super-packet by itself.
    fn fragment<F, R: GsoSink>(
        &mut self,
        env: &Env<'_, F, R>,
        way: Way<'_>,
        frame: &Frame<'_>,
    ) -> u64 {
        let Ok(plan) = frame.plan(UNLIMITED) else {
            return dropped(env, DropReason::TooLong, 1);
        };
        let mut lost = 0;
        let mut whole = std::mem::take(&mut self.scratch);
        for index in 0..plan.segments {
            let len = plan.segment_frame_len(index);
            let Some(datagram) = whole.get_mut(..len) else {
                lost += dropped(env, DropReason::TooLong, 1);
                continue;
            };
            let header_len = plan.write_header(frame.bytes, index, true, datagram);
            datagram[header_len..].copy_from_slice(&frame.bytes[plan.payload(index)]);
            let mtu = way.1.mtu.into();
            let cut = split::fragment_ipv4(datagram, mtu, |fragment| {
                let fragment = Frame::whole(fragment);
                if let Ok(plan) = fragment.plan(mtu) {
                    lost += self.send_plan(env, way, &plan, &fragment);
                }
            });
            match cut {
                Ok(fragments) => env.counters.did(Work::FragmentsSent, fragments as u64),
                Err(
                    FragmentError::DontFragment
                    | FragmentError::NotIpv4
                    | FragmentError::MtuTooSmall(_),
                ) => lost += dropped(env, DropReason::TooLong, 1),
            }
        }
        self.scratch = whole;
        lost
    }
}

/// The path that a frame takes, with its number, and the network it is of.
type Way<'a> = (u32, &'a Path, Vni);

/// The length that every path carries of a frame with IPv6: IPv6's minimum MTU, and the frame's VLAN tags.
fn ipv6_limit(headers: &Headers) -> Option<usize> {
    let (l3, network) = layout::network(headers)?;
    (network == Some(layout::Network::V6)).then_some(ipv6::MTU_MIN + l3 - ethernet::LEN)
}

/// One packet that the peer drops, and that says that the lane gets through.
fn send_dummy<F, R: GsoSink>(env: &Env<'_, F, R>, outbound: &Outbound, from: Origin, to: &Remote) {
    let mut datagram = [0; DUMMY_LEN_MAX];
    let is_allowed = outbound.sa.packets() < outbound.packets_hard;
    let sealed = is_allowed.then(|| outbound.sa.seal_dummy(&mut datagram));
    let Some(Ok(len)) = sealed else {
        return env.counters.dropped(DropReason::SaExhausted, 1);
    };
    note_alone(env, env.socket.send_from(from, &datagram[..len], len, to));
}

/// The SA has come to an end that no limit foresaw, such as that of its cipher's blocks.
#[cold]
fn exhausted<F, R>(env: &Env<'_, F, R>, path: PathId, outbound: &Outbound, segments: u64) -> u64 {
    if outbound.is_first_exhausted() {
        (env.events)(EngineEvent::OutboundExhausted { path, spi: outbound.sa.spi() });
    }
    dropped(env, DropReason::SaExhausted, segments)
}

/// Counts dropped packets, and returns their number for the peer's counter.
#[cold]
fn dropped<F, R>(env: &Env<'_, F, R>, reason: DropReason, packets: u64) -> u64 {
    env.counters.dropped(reason, packets);
    packets
}

/// Whether the SA may seal this plan; reports each limit once.
#[inline]
fn within_limits<F, R>(
    env: &Env<'_, F, R>,
    path: PathId,
    outbound: &Outbound,
    plan: &Plan,
) -> bool {
    let packets = outbound.sa.packets() + plan.segments as u64;
    if packets >= outbound.packets_soft || outbound.bytes() >= outbound.bytes_soft {
        let spi = outbound.sa.spi();
        if outbound.is_first_near() {
            (env.events)(EngineEvent::OutboundNearLimit { path, spi });
        }
        let sealed = outbound.bytes() + plan.frame_len as u64;
        if packets > outbound.packets_hard || sealed > outbound.bytes_hard {
            if outbound.is_first_exhausted() {
                (env.events)(EngineEvent::OutboundExhausted { path, spi });
            }
            return false;
        }
    }
    true
}
