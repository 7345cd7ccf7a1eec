//! A wire between two engines, on which a test can lose, repeat, reorder and regroup datagrams.
//! All that knows how an engine is made and driven is [`Rig`]; this only uses it.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use weft_io::udp::{RUN_BYTES_MAX, RUN_SEGMENTS_MIN};
use weft_path::{EngineCommand, OutboundSa};

use super::referee::{VNET, flow_of, frames_of, without_idle_id};
use super::source::Dice;
use super::{PATH, Rig};
use crate::stats::counters::{DropReason, Work};

/// Messages that are handed over between two turns of the receiver: they fit any socket's buffer.
const MESSAGES_PER_TURN: usize = 2;

/// A datagram under way, and the frame in it as the referee cut it.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) datagram: Vec<u8>,
    pub(super) frame: Vec<u8>,
}

/// The path's MTU to begin with, in bytes.
pub(super) const MTU_OF_WIRE: usize = 9_200;

/// The host that sends, and the host that receives.
pub(super) struct Wire {
    pub(super) near: Rig,
    pub(super) far: Rig,
    /// The least and the most datagrams that the kernel merges into one message, from roll to roll.
    pub(super) group: (usize, usize),
    /// Whether identifications count where they mean nothing ([`without_idle_id`]).
    pub(super) idle_ids: bool,
    dice: Dice,
    handed: u64,
}

impl Wire {
    pub(super) fn new(change: impl Fn(&mut OutboundSa)) -> Self {
        let (mut near, far) = (Rig::with(&change), Rig::with(&change));
        near.socket.kept = Some(std::cell::RefCell::default());
        let group = (1, RUN_SEGMENTS_MIN);
        let mut wire = Self { near, far, group, idle_ids: true, dice: Dice(1), handed: 0 };
        wire.set_mtu(MTU_OF_WIRE as u16);
        wire
    }

    pub(super) fn set_mtu(&mut self, mtu: u16) {
        self.near.command(EngineCommand::SetPathMtu { path: PATH, mtu });
    }

    /// The sender's datagrams for these reads, unchecked.
    pub(super) fn transmit(&mut self, reads: &[Vec<u8>]) -> Vec<Vec<u8>> {
        self.near.transmit(&mut reads.to_vec());
        let kept = self.near.socket.kept.as_ref().map(std::cell::RefCell::take);
        kept.unwrap_or_default()
    }

    /// Sends these reads, one datagram for each frame that the referee sees in them.
    pub(super) fn send(&mut self, reads: &[Vec<u8>]) -> Vec<Flight> {
        let datagrams = self.transmit(reads);
        let frames: Vec<Vec<u8>> = reads.iter().flat_map(|read| frames_of(read).unwrap()).collect();
        assert_eq!(datagrams.len(), frames.len(), "{:?}", self.near.drops());
        let pairs = datagrams.into_iter().zip(frames);
        pairs.map(|(datagram, frame)| Flight { datagram, frame }).collect()
    }

    /// Hands these datagrams to the receiver in this order, grouped as the kernel's UDP_GRO might; returns
    /// the receiver's writes to its TAP device.
    pub(super) fn carry(&mut self, datagrams: &[impl AsRef<[u8]>]) -> Vec<Vec<u8>> {
        let mut messages = 0;
        let mut group: Vec<&[u8]> = Vec::new();
        let mut most = 0;
        for datagram in datagrams.iter().map(AsRef::as_ref) {
            let bytes: usize = group.iter().map(|datagram| datagram.len()).sum();
            let fits = group.first().is_some_and(|first| {
                // Equal ones, of which the last may be shorter.
                datagram.len() <= first.len() && group[group.len() - 1].len() == first.len()
            });
            if !fits || group.len() >= most || bytes + datagram.len() > RUN_BYTES_MAX {
                messages += usize::from(self.hand_over(&group));
                group.clear();
                most = self.group.0 + self.dice.roll(self.group.1 + 1 - self.group.0);
                if messages >= MESSAGES_PER_TURN {
                    self.settle();
                    messages = 0;
                }
            }
            group.push(datagram);
        }
        self.hand_over(&group);
        self.settle();
        self.far.tap.frames.take()
    }

    fn hand_over(&mut self, group: &[&[u8]]) -> bool {
        let Some(first) = group.first() else { return false };
        let port = self.far.far_socket.port();
        let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        let socket = &self.near.socket.real;
        let to = socket.remote(to).unwrap();
        socket.send_run(&group.concat(), first.len().max(1), &to).unwrap();
        self.handed += group.len() as u64;
        true
    }

    /// Lets the receiver work until it has had all. The kernel delivers within the send call, but on
    /// a busy machine a little later.
    fn settle(&mut self) {
        let patience = Instant::now() + Duration::from_secs(30);
        loop {
            self.far.receive();
            let had = self.far.counters().done(Work::DatagramsReceived);
            if had >= self.handed {
                return;
            }
            assert!(Instant::now() < patience, "{had} of {} datagrams came", self.handed);
            std::thread::yield_now();
        }
    }

    /// Carries all of it, and checks that the frames arrive byte for byte, and in each flow in this order.
    /// Returns the writes.
    pub(super) fn arrives(&mut self, flights: &[Flight]) -> Vec<Vec<u8>> {
        let datagrams: Vec<&[u8]> = flights.iter().map(|flight| &flight.datagram[..]).collect();
        let written = self.carry(&datagrams);
        let sent: Vec<&[u8]> = flights.iter().map(|flight| &flight.frame[..]).collect();
        self.same(&sent, &judged(&written));
        written
    }

    /// Fails unless both hold the same frames, each flow's in the same order.
    pub(super) fn same(&self, sent: &[impl AsRef<[u8]>], arrived: &[Vec<u8>]) {
        let see = if self.idle_ids { <[u8]>::to_vec } else { without_idle_id };
        same(sent, arrived, see);
    }

    /// Sends and carries all of it, nothing being counted as dropped.
    pub(super) fn crosses(&mut self, reads: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let flights = self.send(reads);
        let written = self.arrives(&flights);
        assert_eq!((self.near.drops(), self.far.drops()), (vec![], vec![]));
        written
    }

    /// Carries all of it, whatever it is. Returns how many frames the kernel gets, drops are counted, and
    /// dummies and probes are seen, together.
    pub(super) fn accounted(&mut self, datagrams: &[Vec<u8>]) -> u64 {
        let written = self.carry(datagrams);
        let dropped: u64 = self.far_drops().iter().map(|(_, count)| count).sum();
        let counters = self.far.counters();
        let other = counters.done(Work::Dummies) + counters.done(Work::ProbesReceived);
        judged(&written).len() as u64 + dropped + other
    }

    /// Reasons and counts of the receiver's drops.
    pub(super) fn far_drops(&self) -> Vec<(DropReason, u64)> {
        self.far.drops()
    }
}

/// A datagram with each of its bits altered, one at a time.
pub(super) fn altered(good: &[u8]) -> Vec<Vec<u8>> {
    let alter = |bit: usize| {
        let mut bad = good.to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        bad
    };
    (0..good.len() * 8).map(alter).collect()
}

/// The frames that the referee finds in these writes.
pub(super) fn judged(written: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let frames = |read: &Vec<u8>| {
        let found = frames_of(read);
        let head = &read[..read.len().min(VNET + 80)];
        let found = found.unwrap_or_else(|why| panic!("not to be taken: {why}: {head:02x?}"));
        // Kernels before 6.9 cut no UDP super-packet into more.
        assert!(found.len() <= 64 || read[1] != 5, "{} datagrams in one", found.len());
        found
    };
    written.iter().flat_map(frames).collect()
}

/// Fails at the first frame of a flow that is another.
fn same(sent: &[impl AsRef<[u8]>], arrived: &[Vec<u8>], see: impl Fn(&[u8]) -> Vec<u8>) {
    let mut flows: BTreeMap<Vec<u8>, [Vec<Vec<u8>>; 2]> = BTreeMap::new();
    for frame in sent.iter().map(AsRef::as_ref) {
        flows.entry(flow_of(frame)).or_default()[0].push(see(frame));
    }
    for frame in arrived {
        flows.entry(flow_of(frame)).or_default()[1].push(see(frame));
    }
    for (flow, [sent, arrived]) in flows {
        if let Some(index) = sent.iter().zip(&arrived).position(|(sent, arrived)| sent != arrived) {
            let (sent, arrived) = (&sent[index], &arrived[index]);
            let at = sent.iter().zip(arrived).take_while(|(a, b)| a == b).count();
            let part = |frame: &[u8]| {
                let end = frame.len().min(at + 8);
                frame[at.saturating_sub(8).min(end)..end].to_vec()
            };
            panic!(
                "frame {index} of flow {flow:02x?}: {} bytes sent, {} arrived, other from byte {at} on: \
                 {:02x?} and {:02x?}",
                sent.len(),
                arrived.len(),
                part(sent),
                part(arrived),
            );
        }
        assert_eq!(sent.len(), arrived.len(), "frames of flow {flow:02x?}");
    }
}
