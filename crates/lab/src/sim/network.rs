//! The simulated data network: delay, loss, MTU, firewalls and NATs between hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use weft_path::{Encapsulation, EngineEvent, EngineKind, overhead};

use super::{Event, HostId, Packet, Payload, World};

/// One direction of the data network between two hosts.
#[derive(Clone, Debug)]
pub struct Net {
    /// How long a packet is on its way, ...
    pub latency: Duration,
    /// ... and how much longer at most, at random.
    pub jitter: Duration,
    /// Packets lost of a thousand.
    pub loss_per_mille: u32,
    /// Outer IP packets above this are lost without a word.
    pub mtu: u16,
    /// Nothing arrives.
    pub cut: bool,
    /// Nothing arrives that comes from or goes to these UDP ports.
    pub blocked_ports: BTreeSet<u16>,
    /// Nothing arrives of IP protocol 50.
    pub raw_blocked: bool,
    /// A stateful firewall: of lanes beyond the first, only those come in that the receiver has opened.
    pub answers_alone: bool,
    /// Probes are lost, other packets are not.
    pub probes_lost: bool,
}

impl Default for Net {
    fn default() -> Self {
        Self {
            latency: Duration::from_millis(5),
            jitter: Duration::ZERO,
            loss_per_mille: 0,
            mtu: u16::MAX,
            cut: false,
            blocked_ports: BTreeSet::new(),
            raw_blocked: false,
            answers_alone: false,
            probes_lost: false,
        }
    }
}

/// A NAT with one public address. Each inner address and port maps to a separate outer port, which accepts
/// packets from anywhere. Protocol 50 does not pass.
#[derive(Debug, Default)]
pub(super) struct Nat {
    ports: BTreeMap<(HostId, u16), u16>,
    next: u16,
}

impl Nat {
    fn port(&mut self, host: HostId, inner: u16) -> u16 {
        let next = &mut self.next;
        *self.ports.entry((host, inner)).or_insert_with(|| {
            *next += 1;
            40_000 + *next
        })
    }

    fn inner(&self, outer: u16) -> Option<(HostId, u16)> {
        self.ports.iter().find(|(_, port)| **port == outer).map(|(inner, _)| *inner)
    }

    /// Forgets every port: the next packet of each flow gets another one.
    pub(super) fn rebind(&mut self) {
        self.ports.clear();
    }
}

impl World {
    /// Sends a probe from a host. The host's kernel refuses a probe that is too long for the link, and reports
    /// it if the engine can hear of it.
    pub(super) fn transmit_probe(
        &mut self,
        from: HostId,
        packet: Packet,
        events: &mut Vec<EngineEvent>,
    ) {
        let host = &self.hosts[from];
        let kernel = host.engine.engine_of(packet.path) == Some(EngineKind::Kernel);
        if outer_length(&packet) <= host.link_mtu {
            self.transmit(from, packet);
        } else if !kernel || host.engine.kernel_tells_length {
            events.push(EngineEvent::MessageTooLong { path: packet.path, mtu: packet.size });
        }
    }

    pub(super) fn transmit(&mut self, from: HostId, packet: Packet) {
        let data = packet.payload == Payload::Data;
        if packet.seal.is_none() {
            self.plaintext += 1;
        }
        let towards = self.receiver(from, packet.destination);
        match self.route(from, packet) {
            Some((to, at, packet)) => self.push(at, Event::Packet { from, to, packet }),
            None => {
                if let Some(to) = towards.filter(|_| data) {
                    self.tallies.entry((from, to)).or_default().lost += 1;
                }
            }
        }
    }

    /// The host that a destination means, reachable or not.
    fn receiver(&self, from: HostId, destination: SocketAddr) -> Option<HostId> {
        let direct = self.hosts.iter().position(|host| host.address() == destination.ip());
        let through = || {
            let nat = self.nats.get(&destination.ip())?;
            nat.inner(destination.port()).map(|(host, _)| host)
        };
        let behind = || {
            let mut hosts = (0..self.hosts.len()).filter(|host| *host != from);
            hosts.find(|host| self.hosts[*host].nat == Some(destination.ip()))
        };
        direct.or_else(through).or_else(behind)
    }

    /// The place and time of a packet's arrival, with its addresses there; `None`: lost.
    fn route(
        &mut self,
        from: HostId,
        mut packet: Packet,
    ) -> Option<(HostId, std::time::Instant, Packet)> {
        let dice = self.below(1000);
        let raw = packet.encapsulation == Encapsulation::Raw;
        let (sender, outer) = (&self.hosts[from], outer_length(&packet));
        if packet.source.ip() != sender.address() || outer > sender.link_mtu {
            return None;
        }
        let ports = [packet.source.port(), packet.destination.port()];
        let own_nat = sender.nat;
        let direct = self.hosts.iter().position(|host| host.address() == packet.destination.ip());
        let to = match direct {
            Some(to) => {
                // A private address is reached from behind the same NAT alone.
                let nat = self.hosts[to].nat;
                (nat.is_none() || nat == own_nat).then_some(to)?
            }
            None if raw => return None,
            None => {
                let nat = self.nats.get(&packet.destination.ip())?;
                let (to, port) = nat.inner(packet.destination.port())?;
                packet.destination = SocketAddr::new(self.hosts[to].address(), port);
                to
            }
        };
        if let Some(public) = own_nat.filter(|_| self.hosts[to].nat != own_nat) {
            if raw {
                return None;
            }
            let port = self.nats.entry(public).or_default().port(from, packet.source.port());
            packet.source = SocketAddr::new(public, port);
        }
        let net = self.net(from, to).clone();
        let blocked = if raw {
            net.raw_blocked
        } else {
            let inner = packet.destination.port();
            ports.into_iter().chain([inner]).any(|port| net.blocked_ports.contains(&port))
        };
        let blocked = blocked || (net.probes_lost && packet.payload != Payload::Data);
        let lost = net.cut || blocked || outer > net.mtu || dice < u64::from(net.loss_per_mille);
        let jitter = u64::try_from(net.jitter.as_micros()).unwrap_or(0);
        let delay = net.latency + Duration::from_micros(self.below(jitter + 1));
        (!lost).then(|| (to, self.now + delay, packet))
    }

    /// Whether a lane between these hosts passes, which depends on the host that opens it.
    pub(super) fn lanes_pass(&mut self, a: HostId, b: HostId) -> bool {
        let opens = |at: HostId, to: HostId| {
            let (at, to) = (&self.hosts[at], self.hosts[to].id);
            at.engine.opens(to).unwrap_or(at.id < to)
        };
        let (from, to) = match (opens(a, b), opens(b, a)) {
            (true, false) => (a, b),
            (false, true) => (b, a),
            _ => return false,
        };
        !self.net(from, to).answers_alone
    }

    /// The address at which a host sees another one.
    pub fn address_seen(&self, host: HostId, by: HostId) -> IpAddr {
        let (nat, seer) = (self.hosts[host].nat, self.hosts[by].nat);
        nat.filter(|_| nat != seer).unwrap_or_else(|| self.hosts[host].address())
    }
}

fn outer_length(packet: &Packet) -> u16 {
    let ipv6 = packet.destination.is_ipv6();
    packet.size.saturating_add(overhead(packet.format(), packet.encapsulation, ipv6))
}
