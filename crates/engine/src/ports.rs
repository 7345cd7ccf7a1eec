//! Direct ports: TAP devices that are containers' own interfaces, served beside that of the switch.
//!
//! What a container sends to endpoints of other hosts comes up here without passing the switch, and
//! what peers send to it is written here; a kernel program inside the container (`weft_io::redirect`)
//! leads all else by the switch. So groups, this host and unknown addresses are the switch's affair
//! alone, and nothing arrives twice.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

use weft_io::poller::Poller;
use weft_io::tap::Tap;
use weft_path::Mac;

use crate::device::{FrameSink, FrameSource, RunSink};
use crate::error::EngineError;
use crate::gate::Gate;
use crate::queues::QueueReader;
use crate::state::key_of;
use crate::table::{Slab, Table};
use crate::worker::{Shared, read};
use crate::{Engine, Traffic};

/// Direct ports of one host.
pub const PORTS_MAX: usize = 4_096;

/// What a direct port has carried. A super-packet is one packet.
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
    /// Where worker and helpers pass.
    pub(crate) gate: Gate,
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
    /// Another one whenever a worker may have to serve other queues than before.
    generation: u64,
}

impl Ports {
    pub(crate) fn new() -> Self {
        Self { list: Slab::new(), by_mac: Table::new(), last_id: 0, generation: 0 }
    }

    /// The port of the container with this address.
    #[inline]
    fn of(&self, mac: [u8; 6]) -> Option<&Arc<Port>> {
        if self.by_mac.len() == 0 {
            return None;
        }
        self.list.get(self.by_mac.get(key_of(mac))?)
    }

    fn add(&mut self, mac: Mac, queues: Vec<Tap>) -> Result<(), EngineError> {
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
            gate: Gate::default(),
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

    /// There are other workers than before: those that are woken share the queues out anew.
    pub(crate) fn share_anew(&mut self) {
        self.generation += 1;
    }

    fn remove(&mut self, mac: Mac) -> bool {
        let number = self.by_mac.remove(key_of(mac.0));
        let removed = number.and_then(|number| self.list.remove(number));
        self.generation += 1;
        removed.is_some()
    }
}

impl Engine {
    /// Serves a direct port from now on: the queues of a TAP device that is, or will be, the interface
    /// of the container with this address. A port that has the address already is let go.
    ///
    /// # Errors
    /// There are [`PORTS_MAX`] of them, or it has no queue.
    pub fn add_port(&self, mac: Mac, queues: Vec<Tap>) -> Result<(), EngineError> {
        self.change_ports(|ports| ports.add(mac, queues))
    }

    /// Lets a direct port go: its device stays if it is persistent. False if there was none.
    pub fn remove_port(&self, mac: Mac) -> bool {
        self.change_ports(|ports| ports.remove(mac))
    }

    /// Whether there is a direct port for this address whose device is there, as far as is known.
    pub fn has_port(&self, mac: Mac) -> bool {
        let shared = read(&self.shared);
        shared.ports.of(mac.0).is_some_and(|port| !port.gone.load(Relaxed))
    }

    /// What each direct port has carried since it was added.
    pub fn port_traffic(&self) -> Vec<(Mac, PortTraffic)> {
        let shared = read(&self.shared);
        let of = |port: &Port| {
            let mut traffic = PortTraffic::default();
            for queue in &port.queues {
                traffic.sent += queue.sent.read();
                traffic.received += queue.received.read();
            }
            (port.mac, traffic)
        };
        shared.ports.list.iter().map(|(_, port)| of(port)).collect()
    }

    fn change_ports<T>(&self, change: impl FnOnce(&mut Ports) -> T) -> T {
        let result = {
            let mut shared = self.shared.write().unwrap_or_else(PoisonError::into_inner);
            change(&mut shared.ports)
        };
        self.lock().wake();
        result
    }
}

/// Where frames from peers go: to the direct port of their destination, else to the switch.
pub(crate) struct Outlet<'a> {
    pub(crate) switch: &'a Tap,
    pub(crate) ports: &'a Ports,
    pub(crate) worker: usize,
    /// Who is told what was written to.
    pub(crate) written: (&'a QueueReader, &'a PortReader),
}

impl FrameSink for Outlet<'_> {
    #[inline]
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        // Behind the virtio net header; a frame without a patched header begins in a later slice.
        let frame = slices.iter().skip(1).find(|slice| !slice.is_empty());
        let destination = frame.and_then(|frame| frame.first_chunk::<6>());
        let Some(port) = destination.and_then(|mac| self.ports.of(*mac)) else {
            destination.inspect(|mac| self.written.0.note_written(**mac));
            return self.switch.send(slices);
        };
        self.written.1.written.set(Some(port.id));
        port.queues[self.worker % port.queues.len()].send(slices)
    }
}

/// The queues of direct ports that one thread reads, a worker or a helper of it: of each port, those whose number modulo the number
/// of workers is its own.
#[derive(Debug)]
pub(crate) struct PortReader {
    worker: usize,
    seen: Option<u64>,
    /// Sorted by port and queue.
    queues: Vec<(Arc<Port>, usize)>,
    /// Tokens of those that have something.
    ready: Vec<u64>,
    /// The port that was written to last.
    written: Cell<Option<u64>>,
}

/// Tokens of queues of direct ports are at least this.
pub(crate) const PORT_TOKENS: u64 = 1 << 16;
/// Queues that a token leaves room for in one port.
const QUEUES_MAX: u64 = 256;
const _: () = assert!(crate::WORKERS_MAX as u64 <= QUEUES_MAX);

impl PortReader {
    pub(crate) fn of_worker(worker: usize) -> Self {
        let (queues, ready) = (Vec::new(), Vec::new());
        Self { worker, seen: None, queues, ready, written: Cell::new(None) }
    }

    /// Waits for the queues that are this worker's now, and no longer for the others.
    pub(crate) fn sync(&mut self, poller: &Poller, shared: &RwLock<Shared>) {
        let shared = read(shared);
        if self.seen == Some(shared.ports.generation) {
            return;
        }
        self.seen = Some(shared.ports.generation);
        let mut wanted: Vec<(Arc<Port>, usize)> = Vec::new();
        for (_, port) in shared.ports.list.iter() {
            if !port.gone.load(Relaxed) {
                let own =
                    (0..port.queues.len()).filter(|queue| serves(&shared, self.worker, *queue));
                wanted.extend(own.map(|queue| (Arc::clone(port), queue)));
            }
        }
        drop(shared);
        wanted.sort_by_key(token);
        let has = |list: &[(Arc<Port>, usize)], one| list.binary_search_by_key(&one, token).is_ok();
        for old in self.queues.iter().filter(|old| !has(&wanted, token(old))) {
            stop_waiting(poller, old);
        }
        wanted.retain(|new| {
            has(&self.queues, token(new))
                || poller.add(&new.0.queues[new.1].tap, token(new)).is_ok()
        });
        self.queues = wanted;
    }

    /// One of its queues has something, or is gone.
    #[inline]
    pub(crate) fn note_ready(&mut self, token: u64) {
        self.ready.push(token);
    }

    /// Waits for no queue any more, until it is synchronised again.
    pub(crate) fn let_go(&mut self, poller: &Poller) {
        self.queues.iter().for_each(|queue| stop_waiting(poller, queue));
        self.queues.clear();
        self.ready.clear();
        self.seen = None;
    }

    /// Nobody looks at what has something now: it will be told again.
    pub(crate) fn forget_ready(&mut self) {
        self.ready.clear();
    }

    /// What was just written may have been answered within the call, as TCP does.
    #[inline]
    pub(crate) fn note_answers(&mut self) {
        let Some(port) = self.written.take() else { return };
        let (first, last) = (port_token(port, 0), port_token(port + 1, 0));
        let from = self.queues.partition_point(|one| token(one) < first);
        for one in self.queues[from..].iter().take_while(|one| token(one) < last) {
            if !self.ready.contains(&token(one)) {
                self.ready.push(token(one));
            }
        }
    }

    /// Reads what is ready with `drain`, which is told the queue's number, too; a queue for which that fails is
    /// not waited for any more.
    pub(crate) fn drain(
        &mut self,
        poller: &Poller,
        mut drain: impl FnMut(&PortQueue, usize) -> io::Result<()>,
    ) {
        for index in 0..self.ready.len() {
            let wanted = self.ready[index];
            let Ok(at) = self.queues.binary_search_by_key(&wanted, token) else { continue };
            let (port, queue) = &self.queues[at];
            if let Err(error) = drain(&port.queues[*queue], *queue) {
                if !port.gone.swap(true, Relaxed) {
                    tracing::info!(mac = %port.mac, %error, "the device of a direct port is gone");
                }
                stop_waiting(poller, &self.queues[at]);
                self.queues.remove(at);
            }
        }
        self.ready.clear();
    }
}

/// Whether queues of direct ports with this number are this worker's now, or its helpers'. Who reads one asks while it holds
/// what is shared: where workers come or go, no two of them read it, and what the one before has read is on its way.
#[inline]
pub(crate) fn serves(shared: &Shared, worker: usize, queue: usize) -> bool {
    queue % shared.sockets.sockets().max(1) == worker
}

fn token((port, queue): &(Arc<Port>, usize)) -> u64 {
    port_token(port.id, *queue)
}

const fn port_token(id: u64, queue: usize) -> u64 {
    PORT_TOKENS + id * QUEUES_MAX + queue as u64
}

fn stop_waiting(poller: &Poller, (port, queue): &(Arc<Port>, usize)) {
    if let Err(error) = poller.remove(&port.queues[*queue].tap) {
        tracing::debug!(%error, mac = %port.mac, "a queue was not waited for");
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
