//! Ports: TAP devices that are served beside that of the first network's switch.
//!
//! Most are direct ports: containers' own interfaces.
//! A container's frames to endpoints of other hosts come up here without passing the switch, and frames from
//! peers to the container are written here. A kernel program inside the container (`weft_io::redirect`) sends
//! all else through the switch. So groups, this host and unknown addresses are the switch's affair alone, and
//! nothing arrives twice.
//!
//! The others are those of the switches of further networks. They are served alike, and take all frames from peers
//! that no direct port of their network takes.

use std::fmt;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use weft_io::tap::Tap;
use weft_path::{Mac, Vni};

use super::device::{FrameSink, FrameSource};
use super::ticket_gate::TicketGate;
use crate::error::EngineError;
use crate::stats::counters::Traffic;
use crate::tables::hash::{Slab, Table};
use crate::tables::networks::{Network, NetworkId, NetworkNumber};

/// Direct ports of one host.
pub const PORTS_MAX: usize = 4_096;

/// The traffic of a direct port. A super-packet is one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortTraffic {
    /// By the container.
    pub sent: Traffic,
    /// To the container.
    pub received: Traffic,
}

/// A port.
#[derive(Debug)]
pub(crate) struct Port {
    /// Never given again.
    id: u64,
    network: NetworkId,
    name: PortName,
    queues: Vec<PortQueue>,
    /// Its device has gone with the container's namespace, or was deleted there.
    gone: AtomicBool,
}

/// The network of a port, and the address of the container; `None`: it is the port of the network's switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortName {
    pub(crate) vni: Vni,
    pub(crate) mac: Option<Mac>,
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mac {
            Some(mac) => write!(f, "direct port {mac} of network {}", self.vni),
            None => write!(f, "switch of network {}", self.vni),
        }
    }
}

/// One queue of its TAP device, read by one worker with its helpers and written by those that share it.
#[derive(Debug)]
pub(crate) struct PortQueue {
    tap: Tap,
    /// The gate that the worker and its helpers pass.
    pub(crate) gate: TicketGate,
    sent: Counter,
    received: Counter,
}

#[derive(Debug, Default)]
struct Counter {
    packets: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    #[inline]
    fn add(&self, bytes: usize) {
        self.packets.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes.saturating_sub(weft_io::tap::VNET_LEN) as u64, Relaxed);
    }

    fn read(&self) -> Traffic {
        Traffic { packets: self.packets.load(Relaxed), bytes: self.bytes.load(Relaxed) }
    }
}

impl PortQueue {
    /// The device that the poller waits for.
    pub(crate) const fn tap(&self) -> &Tap {
        &self.tap
    }
}

impl Port {
    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    /// The network that it is a port of, as long as that is there.
    pub(crate) const fn network(&self) -> NetworkId {
        self.network
    }

    pub(crate) const fn name(&self) -> PortName {
        self.name
    }

    pub(crate) fn queues(&self) -> &[PortQueue] {
        &self.queues
    }

    /// The queue that a worker writes to.
    #[inline]
    pub(crate) fn queue_of(&self, worker: usize) -> &PortQueue {
        &self.queues[worker % self.queues.len()]
    }

    /// Whether its device is gone, as far as is known.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }

    /// Its device is gone; true the first time.
    pub(crate) fn note_gone(&self) -> bool {
        !self.gone.swap(true, Relaxed)
    }

    /// Its traffic since it was added.
    pub(crate) fn traffic(&self) -> PortTraffic {
        let mut traffic = PortTraffic::default();
        for queue in &self.queues {
            traffic.sent += queue.sent.read();
            traffic.received += queue.received.read();
        }
        traffic
    }
}

impl FrameSource for PortQueue {
    #[inline]
    fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.tap.recv(buffer)?;
        self.sent.add(len);
        Ok(len)
    }
}

impl FrameSink for PortQueue {
    #[inline]
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let len = self.tap.send(slices)?;
        self.received.add(len);
        Ok(len)
    }
}

/// All ports, as the workers know them.
#[derive(Debug)]
pub(crate) struct Ports {
    list: Slab<Arc<Port>>,
    /// The direct ports, by [`NetworkNumber::key`].
    by_mac: Table<u32>,
    /// The ports of switches, by the network's number.
    switches: Table<u32>,
    last_id: u64,
    generation: u64,
}

impl Ports {
    pub(crate) fn new() -> Self {
        Self {
            list: Slab::new(),
            by_mac: Table::new(),
            switches: Table::new(),
            last_id: 0,
            generation: 0,
        }
    }

    /// The direct port of the container with this address in this network.
    #[inline]
    pub(crate) fn of(&self, network: NetworkNumber, mac: [u8; 6]) -> Option<&Arc<Port>> {
        if self.by_mac.len() == 0 {
            return None;
        }
        self.list.get(self.by_mac.get(network.key(mac))?)
    }

    /// The port of this network's switch. The first network's is none.
    #[inline]
    pub(crate) fn of_switch(&self, network: NetworkNumber) -> Option<&Arc<Port>> {
        self.list.get(self.switches.get(network.get().into())?)
    }

    /// Serves the queues of a TAP device that is, or will be, the interface of the container with this
    /// address in this network. A port that has the address already is let go.
    ///
    /// # Errors
    /// There are [`PORTS_MAX`] of them, or it has no queue.
    pub(crate) fn add(
        &mut self,
        network: &Network,
        mac: Mac,
        queues: Vec<Tap>,
    ) -> Result<(), EngineError> {
        self.remove(network.id.number, mac);
        if self.by_mac.len() >= PORTS_MAX || queues.is_empty() {
            return Err(EngineError::Configuration {
                what: "the number of direct ports",
                allowed: "at most 4096, each with a queue",
                given: self.by_mac.len().to_string(),
            });
        }
        let number = self.insert(network, Some(mac), queues);
        self.by_mac.insert(network.id.number.key(mac.0), number);
        Ok(())
    }

    /// Serves the queues, at least one, of a TAP device that is the port of this network's switch, in place of the
    /// one before, which is returned.
    pub(crate) fn set_switch(&mut self, network: &Network, queues: Vec<Tap>) -> Option<Arc<Port>> {
        let number = self.insert(network, None, queues);
        let before = self.switches.insert(network.id.number.get().into(), number);
        before.and_then(|before| self.list.remove(before))
    }

    fn insert(&mut self, network: &Network, mac: Option<Mac>, queues: Vec<Tap>) -> u32 {
        let queue = |tap| PortQueue {
            tap,
            gate: TicketGate::default(),
            sent: Counter::default(),
            received: Counter::default(),
        };
        self.last_id += 1;
        self.generation += 1;
        self.list.insert(Arc::new(Port {
            id: self.last_id,
            network: network.id,
            name: PortName { vni: network.vni, mac },
            queues: queues.into_iter().map(queue).collect(),
            gone: AtomicBool::new(false),
        }))
    }

    /// The number of workers has changed: those that are woken share the queues out again.
    pub(crate) fn share_anew(&mut self) {
        self.generation += 1;
    }

    /// Another one whenever a worker may have to serve other queues than before.
    pub(crate) const fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Port>> {
        self.list.iter().map(|(_, port)| port)
    }

    /// Lets all ports of a network go, and returns them.
    pub(crate) fn remove_network(&mut self, network: NetworkNumber) -> Vec<Arc<Port>> {
        let mut gone = Vec::new();
        self.by_mac.retain(|key, number| {
            let stays = NetworkNumber::of_key(key).0 != network;
            if !stays {
                gone.push(number);
            }
            stays
        });
        gone.extend(self.switches.remove(network.get().into()));
        self.generation += 1;
        gone.into_iter().filter_map(|number| self.list.remove(number)).collect()
    }

    /// Lets a direct port go; false if there was none.
    pub(crate) fn remove(&mut self, network: NetworkNumber, mac: Mac) -> bool {
        let number = self.by_mac.remove(network.key(mac.0));
        let removed = number.and_then(|number| self.list.remove(number));
        self.generation += 1;
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::thread;

    use weft_io::namespace::unshare_network;
    use weft_io::tap::TapOptions;

    use super::*;
    use crate::tables::networks::Networks;

    const fn mac(number: usize) -> Mac {
        let [high, low] = (number as u16).to_be_bytes();
        Mac([2, 0, 0, 0, high, low])
    }

    /// A device with one queue.
    fn device() -> Vec<Tap> {
        vec![Tap::open(&TapOptions::new("weft%d")).unwrap()]
    }

    fn fill_and_ask_for_more() {
        let (mut ports, networks) = (Ports::new(), Networks::new(Vni(7)));
        let network = networks.first();
        let of = |ports: &Ports, mac: Mac| ports.of(NetworkNumber::FIRST, mac.0).is_some();
        ports.add(network, mac(0), device()).unwrap();
        // Most are there by their addresses alone: a device for each takes seconds.
        for number in 1..PORTS_MAX - 1 {
            ports.by_mac.insert(NetworkNumber::FIRST.key(mac(number).0), u32::MAX);
        }
        ports.add(network, mac(PORTS_MAX - 1), device()).unwrap();
        let one_more = mac(PORTS_MAX);
        let refusal = ports.add(network, one_more, device()).unwrap_err();
        assert!(refusal.to_string().contains("at most 4096"), "{refusal}");
        assert!(!of(&ports, one_more));
        // One that comes again takes its own place.
        ports.add(network, mac(0), device()).unwrap();
        assert!(ports.remove(NetworkNumber::FIRST, mac(0)));
        assert!(ports.add(network, one_more, Vec::new()).is_err(), "a port has a queue");
        ports.add(network, one_more, device()).unwrap();
        assert!(of(&ports, one_more));
        assert!(ports.add(network, mac(0), device()).is_err());
    }

    fn come_and_go_in_two_networks() {
        let (mut ports, mut networks) = (Ports::new(), Networks::new(Vni(7)));
        networks.add(Vni(8)).unwrap();
        let [one, two] = [7, 8].map(|vni| networks.by_vni(Vni(vni)).unwrap());
        let [first, second] = [one.id.number, two.id.number];
        let id = |port: Option<&Arc<Port>>| port.map(|port| port.id());
        ports.add(one, mac(1), device()).unwrap();
        ports.add(two, mac(1), device()).unwrap();
        assert!(ports.set_switch(two, device()).is_none());
        assert_eq!(id(ports.of(first, mac(1).0)), Some(1));
        assert_eq!(id(ports.of(second, mac(1).0)), Some(2));
        assert_eq!((id(ports.of_switch(first)), id(ports.of_switch(second))), (None, Some(3)));
        let of = |name: PortName| (name.vni.0, name.mac);
        let names: Vec<_> = ports.iter().map(|port| of(port.name())).collect();
        assert_eq!(names, [(7, Some(mac(1))), (8, Some(mac(1))), (8, None)]);
        // Another device in place of the one before.
        let generation = ports.generation();
        assert_eq!(id(ports.set_switch(two, device()).as_ref()), Some(3));
        assert_eq!((id(ports.of_switch(second)), ports.iter().count()), (Some(4), 3));
        assert_ne!(ports.generation(), generation);

        let removed: Vec<_> = ports.remove_network(second).iter().map(|port| port.id()).collect();
        assert_eq!(removed, [2, 4]);
        assert!(ports.of(second, mac(1).0).is_none() && ports.of_switch(second).is_none());
        assert!(!ports.remove(second, mac(1)));
        assert_eq!((id(ports.of(first, mac(1).0)), ports.iter().count()), (Some(1), 1));
    }

    #[test]
    fn two_networks_may_hold_the_same_address() {
        let thread = thread::spawn(|| {
            unshare_network().expect("this test needs root");
            come_and_go_in_two_networks();
        });
        thread.join().unwrap();
    }

    #[test]
    fn direct_ports_are_taken_up_to_their_number() {
        let thread = thread::spawn(|| {
            unshare_network().expect("this test needs root");
            fill_and_ask_for_more();
        });
        thread.join().unwrap();
    }
}
