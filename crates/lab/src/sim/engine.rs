//! An engine that keeps SAs as a real one does, but seals nothing: a packet carries the key it
//! would have been sealed with, and opens only under the same key.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use weft_crypto::PeerId;
use weft_path::{EngineCommand, EngineEvent, EngineKind, PathId};

/// A packet on the simulated data network.
#[derive(Clone, Debug)]
pub struct Packet {
    /// The sender's path.
    pub path: PathId,
    /// Where it comes from, as the receiver sees it.
    pub source: SocketAddr,
    /// Where it goes.
    pub destination: SocketAddr,
    /// The SA.
    pub spi: u32,
    /// What it is sealed with.
    pub key: [u8; 36],
    /// Sequence number, from 1.
    pub sequence: u64,
    /// Length of the inner IP packet in bytes.
    pub size: u16,
    /// What is inside.
    pub payload: Payload,
}

/// What a simulated packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// A container's packet.
    Data,
    /// A probe of the path.
    Probe {
        /// The sender's number.
        probe: u64,
        /// Of a candidate.
        candidate: bool,
    },
}

struct Inbound {
    peer: PeerId,
    path: PathId,
    key: [u8; 36],
    seen: BTreeSet<u64>,
}

struct Outbound {
    spi: u32,
    key: [u8; 36],
    remote: SocketAddr,
    sequence: u64,
    soft: u64,
    hard: u64,
    told_soft: bool,
    told_hard: bool,
}

/// The simulated engine of one host.
#[derive(Default)]
pub struct SimEngine {
    inbound: BTreeMap<u32, Inbound>,
    /// By path and lane.
    outbound: BTreeMap<(PathId, u16), Outbound>,
    bound: BTreeMap<PeerId, PathId>,
    mtu: BTreeMap<PathId, u16>,
    /// Packets dropped, by reason.
    pub drops: BTreeMap<&'static str, u64>,
    /// Every key that was ever sent with: none may come twice.
    sent_with: BTreeSet<[u8; 36]>,
    /// NAT keepalives sent.
    pub keepalives: u64,
    /// Refuses everything and reports a failure on the next installation.
    pub broken: bool,
    lane: u16,
}

impl SimEngine {
    /// Inbound SAs that live now.
    pub fn inbound_sas(&self) -> usize {
        self.inbound.len()
    }

    /// The path that frames for a peer take.
    pub fn bound(&self, peer: PeerId) -> Option<PathId> {
        self.bound.get(&peer).copied()
    }

    /// Carries out a command. Probes come back as packets; `None`: nothing to send.
    ///
    /// # Panics
    /// If a key is installed for sending twice, since its sequence numbers would repeat.
    pub fn apply(
        &mut self,
        command: EngineCommand,
        events: &mut Vec<EngineEvent>,
    ) -> Option<Packet> {
        match command {
            EngineCommand::InstallInbound { .. } | EngineCommand::InstallOutbound { .. }
                if self.broken =>
            {
                self.fail(events);
            }
            EngineCommand::InstallInbound { peer, path, sa, .. } => {
                let (key, seen) = (*sa.key.expose(), BTreeSet::new());
                let older = self.inbound.insert(sa.spi, Inbound { peer, path, key, seen });
                assert!(older.is_none(), "an SPI was installed twice");
            }
            EngineCommand::RemoveInbound { spi } => {
                self.inbound.remove(&spi);
            }
            EngineCommand::InstallOutbound { path, sa, remote, .. } => {
                let key = *sa.key.expose();
                assert!(self.sent_with.insert(key), "a key was installed for sending twice");
                let outbound = Outbound {
                    spi: sa.spi,
                    key,
                    remote,
                    sequence: 0,
                    soft: sa.packets_soft,
                    hard: sa.packets_hard,
                    told_soft: false,
                    told_hard: false,
                };
                self.outbound.insert((path, sa.lane), outbound);
            }
            EngineCommand::RemoveOutbound { path } => {
                self.outbound.retain(|(other, _), _| *other != path);
            }
            EngineCommand::BindPath { peer, path: Some(path) } => {
                assert!(self.outbound.keys().any(|(p, _)| *p == path), "bound without an SA");
                self.bound.insert(peer, path);
            }
            EngineCommand::BindPath { peer, path: None } => {
                self.bound.remove(&peer);
            }
            EngineCommand::SetPathMtu { path, mtu } => {
                self.mtu.insert(path, mtu);
            }
            EngineCommand::SetRemote { path, remote } => {
                let lanes = self.outbound.iter_mut().filter(|((other, _), _)| *other == path);
                lanes.for_each(|(_, outbound)| outbound.remote = remote);
            }
            EngineCommand::SendProbe { path, probe, mtu, candidate } => {
                return self.seal(path, mtu, Payload::Probe { probe, candidate }, events);
            }
            EngineCommand::SendKeepalive { .. } => self.keepalives += 1,
            EngineCommand::RemovePeer { peer } => {
                self.bound.remove(&peer);
                self.inbound.retain(|_, sa| sa.peer != peer);
            }
            EngineCommand::SetEndpoints { .. }
            | EngineCommand::SetBroadcast { .. }
            | EngineCommand::InstallPlain { .. } => {}
        }
        None
    }

    /// A container's packet for `peer`, of `size` bytes or else of the path's MTU.
    pub fn send(
        &mut self,
        peer: PeerId,
        size: Option<u16>,
        events: &mut Vec<EngineEvent>,
    ) -> Option<Packet> {
        let Some(path) = self.bound(peer) else {
            self.drop("no path");
            return None;
        };
        let mtu = self.mtu.get(&path).copied().unwrap_or(0);
        self.seal(path, size.unwrap_or(mtu).min(mtu), Payload::Data, events)
    }

    /// A packet came in. `true`: it was a container's packet, and was delivered.
    pub fn receive(&mut self, packet: &Packet, events: &mut Vec<EngineEvent>) -> bool {
        let Some(sa) = self.inbound.get_mut(&packet.spi) else {
            self.drop("unknown SPI");
            return false;
        };
        if sa.key != packet.key {
            self.drop("wrong key");
            return false;
        }
        if !sa.seen.insert(packet.sequence) {
            self.drop("replayed");
            return false;
        }
        if sa.seen.len() == 1 {
            events.push(EngineEvent::InboundFirstUse { spi: packet.spi });
        }
        let (peer, path) = (sa.peer, sa.path);
        let outbound = self.outbound.range((path, 0)..=(path, u16::MAX)).next();
        if outbound.is_some_and(|(_, outbound)| outbound.remote != packet.source) {
            events.push(EngineEvent::RemoteMoved { path, remote: packet.source });
        }
        match packet.payload {
            Payload::Data => true,
            Payload::Probe { probe, candidate } => {
                let mtu = packet.size;
                events.push(EngineEvent::ProbeReceived { peer, path, probe, mtu, candidate });
                false
            }
        }
    }

    /// The engine breaks down: it loses its SAs.
    pub fn fail(&mut self, events: &mut Vec<EngineEvent>) {
        self.inbound.clear();
        self.outbound.clear();
        self.bound.clear();
        events.push(EngineEvent::EngineFailed {
            engine: EngineKind::Userspace,
            reason: "simulated".to_owned(),
        });
    }

    fn seal(
        &mut self,
        path: PathId,
        size: u16,
        payload: Payload,
        events: &mut Vec<EngineEvent>,
    ) -> Option<Packet> {
        let lanes = self.outbound.range((path, 0)..=(path, u16::MAX)).count();
        self.lane = self.lane.wrapping_add(1);
        let nth = usize::from(self.lane).checked_rem(lanes).unwrap_or(0);
        let mut range = self.outbound.range_mut((path, 0)..=(path, u16::MAX));
        let Some((_, sa)) = range.nth(nth) else {
            self.drop("no SA");
            return None;
        };
        if sa.sequence >= sa.hard {
            if !std::mem::replace(&mut sa.told_hard, true) {
                events.push(EngineEvent::OutboundExhausted { path, spi: sa.spi });
            }
            self.drop("exhausted");
            return None;
        }
        sa.sequence += 1;
        if sa.sequence >= sa.soft && !std::mem::replace(&mut sa.told_soft, true) {
            events.push(EngineEvent::OutboundNearLimit { path, spi: sa.spi });
        }
        Some(Packet {
            path,
            source: sa.remote,
            destination: sa.remote,
            spi: sa.spi,
            key: sa.key,
            sequence: sa.sequence,
            size,
            payload,
        })
    }

    fn drop(&mut self, reason: &'static str) {
        *self.drops.entry(reason).or_default() += 1;
    }
}
