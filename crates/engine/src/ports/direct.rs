//! Direct ports: TAP devices that are containers' own interfaces, served beside that of the switch.
//!
//! A container's frames to endpoints of other hosts come up here without passing the switch, and frames from
//! peers to the container are written here. A kernel program inside the container (`weft_io::redirect`) sends
//! all else through the switch. So groups, this host and unknown addresses are the switch's affair alone, and
//! nothing arrives twice.

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use weft_io::tap::Tap;
use weft_path::Mac;

use super::device::{FrameSink, FrameSource};
use super::ticket_gate::TicketGate;
use crate::error::EngineError;
use crate::stats::counters::Traffic;
use crate::tables::hash::{Slab, Table};
use crate::tables::state::key_of;

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

/// A direct port.
#[derive(Debug)]
pub(crate) struct Port {
    /// Never given again.
    id: u64,
    mac: Mac,
    queues: Vec<PortQueue>,
    /// Its device has gone with the container's namespace, or was deleted there.
    gone: AtomicBool,
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

    pub(crate) const fn mac(&self) -> Mac {
        self.mac
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

/// All direct ports, as the workers know them.
#[derive(Debug)]
pub(crate) struct Ports {
    list: Slab<Arc<Port>>,
    by_mac: Table<u32>,
    last_id: u64,
    generation: u64,
}

impl Ports {
    pub(crate) fn new() -> Self {
        Self { list: Slab::new(), by_mac: Table::new(), last_id: 0, generation: 0 }
    }

    /// The port of the container with this address.
    #[inline]
    pub(crate) fn of(&self, mac: [u8; 6]) -> Option<&Arc<Port>> {
        if self.by_mac.len() == 0 {
            return None;
        }
        self.list.get(self.by_mac.get(key_of(mac))?)
    }

    /// Serves the queues of a TAP device that is, or will be, the interface of the container with this
    /// address. A port that has the address already is let go.
    ///
    /// # Errors
    /// There are [`PORTS_MAX`] of them, or it has no queue.
    pub(crate) fn add(&mut self, mac: Mac, queues: Vec<Tap>) -> Result<(), EngineError> {
        self.remove(mac);
        if self.by_mac.len() >= PORTS_MAX || queues.is_empty() {
            return Err(EngineError::Configuration {
                what: "the number of direct ports",
                allowed: "at most 4096, each with a queue",
                given: self.by_mac.len().to_string(),
            });
        }
        let queue = |tap| PortQueue {
            tap,
            gate: TicketGate::default(),
            sent: Counter::default(),
            received: Counter::default(),
        };
        let queues = queues.into_iter().map(queue).collect();
        self.last_id += 1;
        let port = Port { id: self.last_id, mac, queues, gone: AtomicBool::new(false) };
        let number = self.list.insert(Arc::new(port));
        self.by_mac.insert(key_of(mac.0), number);
        self.generation += 1;
        Ok(())
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

    /// Lets a port go; false if there was none.
    pub(crate) fn remove(&mut self, mac: Mac) -> bool {
        let number = self.by_mac.remove(key_of(mac.0));
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

    const fn mac(number: usize) -> Mac {
        let [high, low] = (number as u16).to_be_bytes();
        Mac([2, 0, 0, 0, high, low])
    }

    /// A device with one queue.
    fn device() -> Vec<Tap> {
        vec![Tap::open(&TapOptions::new("weft%d")).unwrap()]
    }

    fn fill_and_ask_for_more() {
        let mut ports = Ports::new();
        ports.add(mac(0), device()).unwrap();
        // Most are there by their addresses alone: a device for each takes seconds.
        for number in 1..PORTS_MAX - 1 {
            ports.by_mac.insert(key_of(mac(number).0), u32::MAX);
        }
        ports.add(mac(PORTS_MAX - 1), device()).unwrap();
        let one_more = mac(PORTS_MAX);
        let refusal = ports.add(one_more, device()).unwrap_err();
        assert!(refusal.to_string().contains("at most 4096"), "{refusal}");
        assert!(ports.of(one_more.0).is_none());
        // One that comes again takes its own place.
        ports.add(mac(0), device()).unwrap();
        assert!(ports.remove(mac(0)));
        assert!(ports.add(one_more, Vec::new()).is_err(), "a port has a queue");
        ports.add(one_more, device()).unwrap();
        assert!(ports.of(one_more.0).is_some());
        assert!(ports.add(mac(0), device()).is_err());
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
