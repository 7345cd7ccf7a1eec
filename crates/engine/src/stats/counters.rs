//! Counters: written by one worker with plain stores, read by anyone without stopping it.

use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use weft_crypto::PeerId;
use weft_path::{Mac, PathId};

use crate::tables::networks::NetworkNumber;

macro_rules! named {
    ($(#[$outer:meta])* $enum:ident { $($(#[$inner:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $enum {
            $($(#[$inner])* $variant,)*
        }

        impl $enum {
            /// All of them, in a fixed order.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The name in JSON, metrics and `weft status`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

named! {
    /// Why a packet was dropped. Counted in datagrams received, or in frames to be sent.
    DropReason {
        /// Received: not of the format, or too short for it.
        Malformed = "malformed",
        /// Received: longer than any datagram of ours.
        Truncated = "truncated",
        /// Received: for no SA, or for no peer and key, of this host.
        UnknownSpi = "unknown_spi",
        /// Received: its sequence number, or packet id, was accepted before.
        Replayed = "replayed",
        /// Received: its sequence number, or packet id, is behind the replay window.
        TooOld = "too_old",
        /// Received: not authentic.
        Forged = "forged",
        /// Received: authentic, but the contents do not follow the format.
        BadInner = "bad_inner",
        /// Received: for a network that this host is not in.
        UnknownNetwork = "unknown_network",
        /// Received: from an address inside that lives at another peer.
        ForeignSource = "foreign_source",
        /// Received: from an address inside that no peer has announced, this host's own among them.
        UnannouncedSource = "unannounced_source",
        /// Received: the network marked congestion (CE) on a packet whose sender does not understand
        /// such marks (RFC 6040 section 4.2).
        CeOverNotEct = "ce_over_not_ect",
        /// Received: a mark of a partial checksum where none can be.
        BadMark = "bad_mark",
        /// Received: the kernel did not take the frame from the TAP device.
        TapRefused = "tap_refused",
        /// Received: the TAP device is down or gone.
        TapDown = "tap_down",
        /// Received: the kernel had no memory for the frame.
        TapFull = "tap_full",
        /// To send: a frame to a group that came again and again: two ports reach each other outside of
        /// Weft.
        GoesRound = "goes_round",
        /// To send: no peer is known to have this address inside.
        NoEndpoint = "no_endpoint",
        /// To send: the peer has no path, or no key, now.
        NoPath = "no_path",
        /// To send: the SA or key is used up and there is no new one.
        SaExhausted = "sa_exhausted",
        /// To send: longer than the path carries, and no answer can tell the sender.
        TooLong = "too_long",
        /// To send: a super-packet that contradicts itself.
        BadSuperPacket = "bad_super_packet",
        /// To send: the kernel had no room in the socket or the device queue.
        SendFull = "send_full",
        /// To send: the kernel refused the datagram as longer than the route takes.
        MessageTooLong = "message_too_long",
        /// To send: the kernel refused it otherwise, such as for want of a route.
        SendFailed = "send_failed",
    }
}

named! {
    /// Kinds of a worker's work, apart from drops.
    Work {
        /// Super-packets and frames read from the TAP device.
        TapReads = "tap_reads",
        /// Reports of the switch itself that it listens to groups, which stay here.
        OwnReports = "own_reports",
        /// Super-packets and frames written to the TAP device.
        TapWrites = "tap_writes",
        /// Runs sent: calls to the kernel.
        RunsSent = "runs_sent",
        /// Datagrams sent.
        DatagramsSent = "datagrams_sent",
        /// Messages received: runs or single datagrams.
        MessagesReceived = "messages_received",
        /// Datagrams received.
        DatagramsReceived = "datagrams_received",
        /// NAT keepalives received.
        Keepalives = "keepalives",
        /// Dummy packets received (RFC 4303 section 2.6).
        Dummies = "dummies",
        /// Probes received.
        ProbesReceived = "probes_received",
        /// Over-long packets answered with ICMP.
        TooLongAnswered = "too_long_answered",
        /// Over-long packets not answered since too many were in the last second.
        TooLongUnanswered = "too_long_unanswered",
        /// Fragments made of over-long packets.
        FragmentsSent = "fragments_sent",
        /// Datagrams for the kernel to cut, since IPv6 inside has a right to more than the path carries.
        CutOutside = "cut_outside",
        /// Packets sent to peers of a data channel device over IPv6 that are longer than every way carries.
        LongOverIpv6 = "long_over_ipv6",
        /// TCP connections whose segment size was lowered to fit the path, at either's opening.
        SegmentSizesLowered = "segment_sizes_lowered",
        /// Runs that the kernel refused and that went as single datagrams.
        RunsRefused = "runs_refused",
        /// Datagrams that the kernel dropped since the socket's receive buffer was full.
        SocketOverflows = "socket_overflows",
        /// Units of some 64 KiB that helpers sealed or opened.
        UnitsHelped = "units_helped",
        /// Helpers turned on.
        HelpersOn = "helpers_on",
        /// Helpers turned off.
        HelpersOff = "helpers_off",
    }
}

/// The direction in which an SA carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From the peer.
    Inbound,
    /// To the peer.
    Outbound,
}

/// Packets and bytes: of a vector engine's SA those of its datagrams and of the Ethernet frames (or probes) in
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets.
    pub packets: u64,
    /// Bytes of the counted packets.
    pub bytes: u64,
}

impl Traffic {
    /// One packet more.
    #[inline]
    pub(crate) const fn count(&mut self, bytes: usize) {
        self.packets += 1;
        self.bytes += bytes as u64;
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

impl Sum for Traffic {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        let mut sum = Self::default();
        all.for_each(|traffic| sum += traffic);
        sum
    }
}

/// The traffic of one SA that is in use, that is of one lane in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaTraffic {
    /// The peer.
    pub peer: PeerId,
    /// The path.
    pub path: PathId,
    /// The lane.
    pub lane: u16,
    /// The direction.
    pub direction: Direction,
    /// The SPI.
    pub spi: u32,
    /// Packets and bytes.
    pub traffic: Traffic,
}

/// The traffic with one peer, over all its SAs, also those that are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTraffic {
    /// The peer.
    pub peer: PeerId,
    /// Datagrams of its SAs that were refused, and packets for it that were not sealed or not sent. They
    /// are among [`Counters::drops`].
    pub dropped: u64,
    /// By lane, in their order; those that are gone too.
    pub lanes: Vec<LaneTraffic>,
}

impl PeerTraffic {
    /// From the peer, over all lanes.
    pub fn received(&self) -> Traffic {
        self.lanes.iter().map(|lane| lane.received).sum()
    }

    /// To the peer, over all lanes.
    pub fn sent(&self) -> Traffic {
        self.lanes.iter().map(|lane| lane.sent).sum()
    }
}

/// The traffic over one lane with a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneTraffic {
    /// The lane's number.
    pub lane: u16,
    /// From the peer.
    pub received: Traffic,
    /// To the peer.
    pub sent: Traffic,
}

impl LaneTraffic {
    fn add(&mut self, direction: Direction, traffic: Traffic) {
        match direction {
            Direction::Inbound => self.received += traffic,
            Direction::Outbound => self.sent += traffic,
        }
    }
}

/// The totals of one worker: work and drops.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerTotals {
    /// Processor time that its thread has worked; zero if it is gone.
    pub busy: Duration,
    /// Processor time that its thread was awake for with nothing to do.
    pub awake: Duration,
    /// Processor time that its helpers' threads have used.
    pub helpers_busy: Duration,
    /// Drops, all reasons together, its helpers' included.
    pub dropped: u64,
    /// Other work, its helpers' included, in the order of [`Work::ALL`].
    pub work: Vec<(Work, u64)>,
}

impl WorkerTotals {
    /// How much of `work` was done.
    pub fn done(&self, work: Work) -> u64 {
        self.work.iter().find(|(found, _)| *found == work).map_or(0, |(_, count)| *count)
    }
}

/// One reading of all counters. All but `peers` and `sas` count from the start of the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Drops by reason, all reasons in the order of [`DropReason::ALL`].
    pub drops: Vec<(DropReason, u64)>,
    /// Other work, in the order of [`Work::ALL`].
    pub work: Vec<(Work, u64)>,
    /// By worker, in their order.
    pub workers: Vec<WorkerTotals>,
    /// By peer; a peer that is removed is forgotten.
    pub peers: Vec<PeerTraffic>,
    /// By SA in use.
    pub sas: Vec<SaTraffic>,
}

impl Counters {
    /// Packets dropped for `reason`.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops.iter().find(|(found, _)| *found == reason).map_or(0, |(_, count)| *count)
    }

    /// How much of `work` was done.
    pub fn done(&self, work: Work) -> u64 {
        self.work.iter().find(|(found, _)| *found == work).map_or(0, |(_, count)| *count)
    }
}

/// One number, written by one thread at a time but for [`Self::add_shared`].
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Adds without a locked instruction: there is one writer.
    #[inline]
    pub(crate) fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }

    /// Adds while others may do the same.
    #[inline]
    pub(crate) fn add_shared(&self, more: u64) {
        self.0.fetch_add(more, Relaxed);
    }

    fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// The counters of one worker.
#[derive(Debug, Default)]
pub(crate) struct WorkerCounters {
    drops: [Count; DropReason::ALL.len()],
    work: [Count; Work::ALL.len()],
    /// Processor time of the thread while it was awake with nothing to do, in nanoseconds.
    awake_ns: Count,
    /// The thread's number; 0 before it has one.
    thread: AtomicI32,
    /// The source of the last looping frame, as [`NetworkNumber::key`]; 0: none.
    round: Count,
    /// Of the worker's helpers, by their number: each has one writer too.
    helpers: RwLock<Vec<Arc<Self>>>,
}

impl WorkerCounters {
    /// Makes the calling thread the worker, perhaps in place of a thread that is gone.
    pub(crate) fn begin(&self) {
        self.awake_ns.set(0);
        self.thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Relaxed);
    }

    /// Those of a helper of this worker.
    pub(crate) fn of_helper(&self, number: usize) -> Arc<Self> {
        let mut helpers = self.helpers.write().unwrap_or_else(PoisonError::into_inner);
        if helpers.len() <= number {
            helpers.resize_with(number + 1, Arc::default);
        }
        Arc::clone(&helpers[number])
    }

    /// Processor time that the worker's thread has worked, and that of its helpers' threads.
    pub(crate) fn busy(&self) -> (Duration, Duration) {
        let helpers = self.helpers.read().unwrap_or_else(PoisonError::into_inner);
        let of_helpers = helpers.iter().map(|helper| busy(helper.thread.load(Relaxed)));
        let of_worker = busy(self.thread.load(Relaxed)).saturating_sub(self.awake());
        (of_worker, of_helpers.sum())
    }

    /// How long the worker has been awake with nothing to do.
    pub(crate) fn awake(&self) -> Duration {
        Duration::from_nanos(self.awake_ns.get())
    }

    /// Notes the time that the worker has been awake with nothing to do.
    #[inline]
    pub(crate) fn was_awake(&self, time: Duration) {
        if !time.is_zero() {
            self.awake_ns.add(time.as_nanos() as u64);
        }
    }

    /// Returns the worker's own count of this work, without its helpers'.
    #[inline]
    pub(crate) fn own(&self, work: Work) -> u64 {
        self.work[work as usize].get()
    }

    /// Datagrams that the worker itself has moved, and those before it that had its number.
    #[inline]
    pub(crate) fn own_datagrams(&self) -> u64 {
        self.own(Work::DatagramsSent) + self.own(Work::DatagramsReceived)
    }

    /// Returns the count of this work by the worker and its helpers.
    pub(crate) fn done(&self, work: Work) -> u64 {
        self.sum(&|counters| counters.work[work as usize].get())
    }

    /// Packets that the worker and its helpers have dropped for `reason`.
    pub(crate) fn drops_of(&self, reason: DropReason) -> u64 {
        self.sum(&|counters| counters.drops[reason as usize].get())
    }

    /// A frame goes round, from this address in its network ([`NetworkNumber::key`]).
    pub(crate) fn note_round(&self, from: u64) {
        self.round.set(from);
    }

    /// The source of the last frame that the worker, or a helper of it, dropped for going round, and its network.
    pub(crate) fn went_round(&self) -> Option<(NetworkNumber, Mac)> {
        let helpers = self.helpers.read().unwrap_or_else(PoisonError::into_inner);
        let own = helpers.iter().map(|helper| helper.round.get());
        let found = own.chain([self.round.get()]).find(|it| *it > 0)?;
        let (network, mac) = NetworkNumber::of_key(found);
        Some((network, Mac(mac)))
    }

    fn sum(&self, pick: &dyn Fn(&Self) -> u64) -> u64 {
        let helpers = self.helpers.read().unwrap_or_else(PoisonError::into_inner);
        pick(self) + helpers.iter().map(|helper| pick(helper)).sum::<u64>()
    }

    fn read(&self) -> WorkerTotals {
        let (busy, helpers_busy) = self.busy();
        WorkerTotals {
            busy,
            awake: self.awake(),
            helpers_busy,
            dropped: self.sum(&|counters| counters.drops.iter().map(Count::get).sum()),
            work: Work::ALL.iter().map(|k| (*k, self.done(*k))).collect(),
        }
    }

    #[inline]
    pub(crate) fn dropped(&self, reason: DropReason, packets: u64) {
        self.drops[reason as usize].add(packets);
    }

    #[inline]
    pub(crate) fn did(&self, work: Work, times: u64) {
        self.work[work as usize].add(times);
    }
}

/// The processor time of a thread of this process; zero if there is none.
fn busy(thread: i32) -> Duration {
    let read = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat"));
    let ns = read.ok().and_then(|text| text.split(' ').next()?.parse().ok());
    Duration::from_nanos(ns.unwrap_or(0))
}

/// The counters of one SA.
#[derive(Debug, Default)]
pub(crate) struct SaCounters {
    packets: Count,
    bytes: Count,
}

impl SaCounters {
    #[inline]
    pub(crate) fn add(&self, packets: u64, bytes: u64) {
        self.packets.add(packets);
        self.bytes.add(bytes);
    }

    /// Adds while others may do the same.
    #[inline]
    pub(crate) fn add_shared(&self, packets: u64, bytes: u64) {
        self.packets.add_shared(packets);
        self.bytes.add_shared(bytes);
    }

    fn read(&self) -> Traffic {
        Traffic { packets: self.packets.get(), bytes: self.bytes.get() }
    }
}

/// Names one SA: SPIs of outbound SAs are the peers' choice and may be equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SaName {
    pub(crate) peer: PeerId,
    pub(crate) path: PathId,
    pub(crate) lane: u16,
    pub(crate) direction: Direction,
    pub(crate) spi: u32,
}

/// The SAs that exist, for readers. Locked when SAs come and go and when counters are read.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    sas: BTreeMap<SaName, Arc<SaCounters>>,
    /// Traffic of SAs that are gone, by the lanes that a peer ever had.
    past: BTreeMap<PeerId, Vec<LaneTraffic>>,
    /// Dropped packets of each peer.
    dropped: BTreeMap<PeerId, Arc<Count>>,
}

impl Registry {
    pub(crate) fn add(&self, name: SaName) -> Arc<SaCounters> {
        let counters = Arc::new(SaCounters::default());
        let mut inner = self.lock();
        lane_of(&mut inner.past, name);
        if let Some(old) = inner.sas.insert(name, Arc::clone(&counters)) {
            inner.reap(name, &old);
        }
        counters
    }

    pub(crate) fn remove(&self, name: SaName) {
        let mut inner = self.lock();
        if let Some(old) = inner.sas.remove(&name) {
            inner.reap(name, &old);
        }
    }

    /// The count of a peer's dropped packets, to which the code that drops adds.
    pub(crate) fn dropped_of(&self, peer: PeerId) -> Arc<Count> {
        Arc::clone(self.lock().dropped.entry(peer).or_default())
    }

    pub(crate) fn forget(&self, peer: PeerId) {
        let mut inner = self.lock();
        inner.dropped.remove(&peer);
        inner.sas.retain(|name, _| name.peer != peer);
        inner.past.remove(&peer);
    }

    pub(crate) fn read(&self, workers: &[Arc<WorkerCounters>]) -> Counters {
        let sum = |pick: &dyn Fn(&WorkerCounters) -> u64| workers.iter().map(|w| w.sum(pick)).sum();
        let drops = DropReason::ALL.iter();
        let work = Work::ALL.iter();
        let (peers, sas) = self.lock().read();
        Counters {
            drops: drops.map(|r| (*r, sum(&|w| w.drops[*r as usize].get()))).collect(),
            work: work.map(|k| (*k, sum(&|w| w.work[*k as usize].get()))).collect(),
            peers,
            sas,
            workers: workers.iter().map(|worker| worker.read()).collect(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn reap(&mut self, name: SaName, counters: &SaCounters) {
        lane_of(&mut self.past, name).add(name.direction, counters.read());
    }

    fn read(&self) -> (Vec<PeerTraffic>, Vec<SaTraffic>) {
        let mut peers = self.past.clone();
        let mut sas = Vec::with_capacity(self.sas.len());
        for (name, counters) in &self.sas {
            let SaName { peer, path, lane, direction, spi } = *name;
            let traffic = counters.read();
            sas.push(SaTraffic { peer, path, lane, direction, spi, traffic });
            lane_of(&mut peers, *name).add(direction, traffic);
        }
        // A peer with neither traffic nor drops is left out.
        for (peer, _) in self.dropped.iter().filter(|(_, dropped)| dropped.get() > 0) {
            peers.entry(*peer).or_default();
        }
        let dropped = |peer: &PeerId| self.dropped.get(peer).map_or(0, |dropped| dropped.get());
        let traffic = |(peer, lanes)| PeerTraffic { dropped: dropped(&peer), peer, lanes };
        (peers.into_iter().map(traffic).collect(), sas)
    }
}

/// The sum of an SA's lane, made if there is none.
fn lane_of(peers: &mut BTreeMap<PeerId, Vec<LaneTraffic>>, name: SaName) -> &mut LaneTraffic {
    let lanes = peers.entry(name.peer).or_default();
    let at = lanes.binary_search_by_key(&name.lane, |lane| lane.lane).unwrap_or_else(|at| {
        // Room for this one alone: there are as many of these as peers.
        lanes.reserve_exact(1);
        lanes.insert(at, LaneTraffic { lane: name.lane, ..LaneTraffic::default() });
        at
    });
    &mut lanes[at]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_peer_keeps_the_traffic_of_replaced_sas_until_it_is_removed() {
        let registry = Registry::default();
        let peer = PeerId::from_bytes([1; 32]);
        let on = |lane, spi, direction| SaName { peer, path: PathId(1), lane, direction, spi };
        let name = |spi, direction| on(0, spi, direction);
        registry.add(on(2, 400, Direction::Outbound)).add(10, 1_000);
        registry.add(name(300, Direction::Outbound)).add(2, 200);
        registry.add(name(301, Direction::Outbound)).add(1, 50);
        registry.add(name(300, Direction::Inbound)).add(7, 70);
        registry.remove(name(300, Direction::Outbound));
        let read = registry.read(&[]);
        assert_eq!(read.sas.len(), 3);
        let lanes = vec![
            LaneTraffic {
                lane: 0,
                received: Traffic { packets: 7, bytes: 70 },
                sent: Traffic { packets: 3, bytes: 250 },
            },
            LaneTraffic {
                lane: 2,
                received: Traffic::default(),
                sent: Traffic { packets: 10, bytes: 1_000 },
            },
        ];
        assert_eq!(read.peers, [PeerTraffic { peer, dropped: 0, lanes }]);
        assert_eq!(read.peers[0].sent(), Traffic { packets: 13, bytes: 1_250 });
        assert_eq!(read.peers[0].received(), Traffic { packets: 7, bytes: 70 });
        registry.dropped_of(peer).add_shared(2);
        registry.dropped_of(peer).add_shared(1);
        assert_eq!(registry.read(&[]).peers[0].dropped, 3);
        registry.forget(peer);
        assert_eq!(registry.read(&[]).peers, []);
    }

    #[test]
    fn a_peer_of_whom_all_was_dropped_is_told_of() {
        let registry = Registry::default();
        let [quiet, dropped] = [1, 2].map(|byte| PeerId::from_bytes([byte; 32]));
        registry.dropped_of(quiet);
        registry.dropped_of(dropped).add_shared(5);
        let told = PeerTraffic { peer: dropped, dropped: 5, lanes: Vec::new() };
        assert_eq!(registry.read(&[]).peers, [told]);
    }

    #[test]
    fn names_are_unique_and_workers_add_up() {
        let workers = [Arc::new(WorkerCounters::default()), Arc::new(WorkerCounters::default())];
        workers[0].dropped(DropReason::Forged, 2);
        workers[1].dropped(DropReason::Forged, 3);
        workers[1].did(Work::TapReads, 1);
        let read = Registry::default().read(&workers);
        assert_eq!(read.dropped(DropReason::Forged), 5);
        assert_eq!(read.dropped(DropReason::SendFailed), 0);
        assert_eq!(read.done(Work::TapReads), 1);
        let by_worker = read.workers.iter().map(|w| (w.dropped, w.done(Work::TapReads)));
        assert_eq!(by_worker.collect::<Vec<_>>(), [(2, 0), (3, 1)]);
        let names: std::collections::BTreeSet<_> = DropReason::ALL
            .iter()
            .map(|r| r.name())
            .chain(Work::ALL.iter().map(|w| w.name()))
            .collect();
        assert_eq!(names.len(), DropReason::ALL.len() + Work::ALL.len());
    }
}
