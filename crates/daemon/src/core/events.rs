//! The queue by which both engines report to the control loop.
//!
//! A peer can make an engine report at will only by its probes. So only a few probes of each peer may
//! wait, and all peers' probes together leave room for other events.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use weft_crypto::PeerId;
use weft_path::EngineEvent;

/// Events that may wait.
const EVENTS_QUEUED_MAX: usize = 16_384;
/// Probes of one peer that may wait.
const PROBES_OF_PEER_MAX: u16 = 64;
/// Queue slots that probes leave to other events.
const PLACES_FOR_OTHERS: usize = 4_096;

/// The sending end, for the engines.
#[derive(Clone)]
pub(crate) struct Reporter {
    sender: mpsc::Sender<EngineEvent>,
    waiting: Arc<Waiting>,
}

/// The receiving end, for the control loop.
pub(crate) struct Events {
    receiver: mpsc::Receiver<EngineEvent>,
    waiting: Arc<Waiting>,
}

/// Counters of events that found no room.
#[derive(Clone)]
pub(crate) struct Lost(Arc<Waiting>);

#[derive(Default)]
struct Waiting {
    /// Probes of each peer that has some waiting.
    probes: Mutex<HashMap<PeerId, u16>>,
    lost: AtomicU64,
    probes_refused: AtomicU64,
}

pub(crate) fn queue() -> (Reporter, Events, Lost) {
    queue_of(EVENTS_QUEUED_MAX)
}

fn queue_of(places: usize) -> (Reporter, Events, Lost) {
    let (sender, receiver) = mpsc::channel(places);
    let waiting = Arc::<Waiting>::default();
    let reporter = Reporter { sender, waiting: Arc::clone(&waiting) };
    (reporter, Events { receiver, waiting: Arc::clone(&waiting) }, Lost(waiting))
}

impl Reporter {
    /// Queues an event, or counts it as lost if there is no room.
    pub(crate) fn report(&self, event: EngineEvent) {
        let prober = prober(&event);
        if let Some(peer) = prober {
            let has_room = self.sender.capacity() > PLACES_FOR_OTHERS;
            if !has_room || !self.waiting.admit(peer) {
                self.waiting.probes_refused.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        if self.sender.try_send(event).is_err() {
            self.waiting.lost.fetch_add(1, Ordering::Relaxed);
            if let Some(peer) = prober {
                self.waiting.release(peer);
            }
        }
    }
}

impl Events {
    /// The next event; `None` once all reporters are gone. Cancel safe.
    pub(crate) async fn recv(&mut self) -> Option<EngineEvent> {
        let event = self.receiver.recv().await?;
        if let Some(peer) = prober(&event) {
            self.waiting.release(peer);
        }
        Some(event)
    }
}

impl Lost {
    /// Events that found the queue full.
    pub(crate) fn events(&self) -> u64 {
        self.0.lost.load(Ordering::Relaxed)
    }

    /// Probes refused because too many of their peer's were waiting.
    pub(crate) fn probes(&self) -> u64 {
        self.0.probes_refused.load(Ordering::Relaxed)
    }
}

impl Waiting {
    fn admit(&self, peer: PeerId) -> bool {
        let mut probes = self.probes();
        let waiting = probes.entry(peer).or_default();
        let has_room = *waiting < PROBES_OF_PEER_MAX;
        *waiting += u16::from(has_room);
        has_room
    }

    fn release(&self, peer: PeerId) {
        let mut probes = self.probes();
        if let Some(waiting) = probes.get_mut(&peer) {
            *waiting = waiting.saturating_sub(1);
            if *waiting == 0 {
                probes.remove(&peer);
            }
        }
    }

    fn probes(&self) -> MutexGuard<'_, HashMap<PeerId, u16>> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The peer whose probe came in.
const fn prober(event: &EngineEvent) -> Option<PeerId> {
    match event {
        EngineEvent::ProbeReceived { peer, .. } => Some(*peer),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_path::{EngineKind, PathId};

    use super::*;

    fn probe(peer: u16, probe: u64) -> EngineEvent {
        let mut id = [7; 32];
        id[..2].copy_from_slice(&peer.to_be_bytes());
        let (peer, path) = (PeerId::from_bytes(id), PathId(peer.into()));
        EngineEvent::ProbeReceived { peer, path, probe, mtu: 1_388, candidate: false }
    }

    fn failure() -> EngineEvent {
        EngineEvent::EngineFailed { engine: EngineKind::Kernel, reason: "gone".into() }
    }

    #[tokio::test]
    async fn a_peer_that_probes_without_end_keeps_nobody_else_out() {
        let (reporter, mut events, lost) = queue();
        (0..100_000).for_each(|number| reporter.report(probe(1, number)));
        reporter.report(probe(2, 0));
        reporter.report(failure());
        let limit = u64::from(PROBES_OF_PEER_MAX);
        assert_eq!((lost.probes(), lost.events()), (100_000 - limit, 0));
        for number in 0..limit {
            assert_eq!(events.recv().await, Some(probe(1, number)));
            // Each event taken makes room for another.
            reporter.report(probe(1, 1_000_000 + number));
            reporter.report(probe(1, u64::MAX));
        }
        assert_eq!(lost.probes(), 100_000);
        assert_eq!(events.recv().await, Some(probe(2, 0)));
        assert_eq!(events.recv().await, Some(failure()));
        for number in 0..limit {
            assert_eq!(events.recv().await, Some(probe(1, 1_000_000 + number)));
        }
        assert!(events.waiting.probes().is_empty());
    }

    #[tokio::test]
    async fn probes_of_many_peers_leave_room_for_what_is_no_probe() {
        let (reporter, mut events, lost) = queue();
        for peer in 0..1_000 {
            (0..64).for_each(|number| reporter.report(probe(peer, number)));
        }
        let taken = (EVENTS_QUEUED_MAX - PLACES_FOR_OTHERS) as u64;
        assert_eq!((lost.probes(), lost.events()), (64_000 - taken, 0));
        (0..PLACES_FOR_OTHERS).for_each(|_| reporter.report(failure()));
        assert_eq!(lost.events(), 0);
        reporter.report(failure());
        assert_eq!(lost.events(), 1);
        for _ in 0..EVENTS_QUEUED_MAX {
            events.recv().await.unwrap();
        }
        assert!(events.waiting.probes().is_empty());
    }

    #[tokio::test]
    async fn a_queue_that_ends_refuses_and_counts() {
        let (reporter, events, lost) = queue_of(PLACES_FOR_OTHERS + 2);
        drop(events);
        reporter.report(failure());
        reporter.report(probe(1, 1));
        assert_eq!(lost.events(), 2);
        assert!(reporter.waiting.probes().is_empty());
    }
}
