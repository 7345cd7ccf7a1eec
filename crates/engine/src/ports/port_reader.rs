//! One thread's reading of ports.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use weft_io::poller::Poller;

use super::direct::{Port, Ports};
use crate::limits::WORKERS_MAX;

/// A port, and the number of one of its queues.
type OneQueue = (Arc<Port>, usize);

/// The queues of ports that one thread reads, a worker or its helper. Of each port they are those whose
/// number modulo the number of workers is the worker's own.
#[derive(Debug)]
pub(crate) struct PortReader {
    worker: usize,
    seen: Option<u64>,
    /// Sorted by port and queue.
    queues: Vec<OneQueue>,
    /// Tokens of those that have something.
    ready: Vec<u64>,
    /// The port that was written to last.
    written: Cell<Option<u64>>,
}

/// Tokens of queues of ports are at least this.
pub(crate) const PORT_TOKENS: u64 = 1 << 16;
/// Queues that a token leaves room for in one port.
const QUEUES_MAX: u64 = 256;
const _: () = assert!(WORKERS_MAX as u64 <= QUEUES_MAX);

impl PortReader {
    pub(crate) fn of_worker(worker: usize) -> Self {
        let (queues, ready) = (Vec::new(), Vec::new());
        Self { worker, seen: None, queues, ready, written: Cell::new(None) }
    }

    /// The queues that are its worker's now, one of `workers`, if they may be others than before.
    pub(crate) fn wanted(&mut self, ports: &Ports, workers: usize) -> Option<Vec<OneQueue>> {
        if self.seen == Some(ports.generation()) {
            return None;
        }
        self.seen = Some(ports.generation());
        let mut wanted = Vec::new();
        for port in ports.iter().filter(|port| !port.is_gone()) {
            let own = (0..port.queues().len()).filter(|queue| is_own(self.worker, workers, *queue));
            wanted.extend(own.map(|queue| (Arc::clone(port), queue)));
        }
        wanted.sort_by_key(token);
        Some(wanted)
    }

    /// Waits for these, as [`Self::wanted`] gave them, and no longer for others.
    pub(crate) fn wait_for(&mut self, poller: &Poller, mut wanted: Vec<OneQueue>) {
        let has = |list: &[OneQueue], one| list.binary_search_by_key(&one, token).is_ok();
        for old in self.queues.iter().filter(|old| !has(&wanted, token(old))) {
            stop_waiting(poller, old);
        }
        wanted.retain(|new| {
            has(&self.queues, token(new))
                || poller.add(new.0.queues()[new.1].tap(), token(new)).is_ok()
        });
        self.queues = wanted;
    }

    /// Notes that a port was written to.
    #[inline]
    pub(crate) fn note_written(&self, port: &Port) {
        self.written.set(Some(port.id()));
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

    /// Forgets which queues are ready: the poller reports them again.
    pub(crate) fn forget_ready(&mut self) {
        self.ready.clear();
    }

    /// Marks the queues of the port just written to as ready: a write may be answered within the call, as TCP
    /// does.
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

    /// Reads the ready queues with `drain`, which is told the port and the queue's number; a queue for which that
    /// fails is not waited for any more.
    pub(crate) fn drain(
        &mut self,
        poller: &Poller,
        mut drain: impl FnMut(&Port, usize) -> io::Result<()>,
    ) {
        for index in 0..self.ready.len() {
            let wanted = self.ready[index];
            let Ok(at) = self.queues.binary_search_by_key(&wanted, token) else { continue };
            let (port, queue) = &self.queues[at];
            if let Err(error) = drain(port, *queue) {
                if port.note_gone() {
                    tracing::info!(port = %port.name(), %error, "the device of a port is gone");
                }
                stop_waiting(poller, &self.queues[at]);
                self.queues.remove(at);
            }
        }
        self.ready.clear();
    }
}

/// Whether queues of ports with this number are read by this of `workers` workers.
#[inline]
pub(crate) fn is_own(worker: usize, workers: usize, queue: usize) -> bool {
    queue % workers.max(1) == worker
}

fn token((port, queue): &OneQueue) -> u64 {
    port_token(port.id(), *queue)
}

const fn port_token(id: u64, queue: usize) -> u64 {
    PORT_TOKENS + id * QUEUES_MAX + queue as u64
}

fn stop_waiting(poller: &Poller, (port, queue): &OneQueue) {
    if let Err(error) = poller.remove(port.queues()[*queue].tap()) {
        tracing::debug!(%error, port = %port.name(), "cannot wait for a queue");
    }
}
