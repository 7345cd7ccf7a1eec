//! The queue to the kernel engine. Commands go in batches, one under way at a time, and the control loop never
//! waits for one. Messages and steps that rely on a batch are held until it has been carried out.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use weft_crypto::PeerId;
use weft_kernel::engine::KernelEngine;
use weft_path::{EngineCommand, PathId};

/// Commands that may wait for the batch under way; more mean that the kernel engine is stuck.
const COMMANDS_WAITING_MAX: usize = 16_384;
/// Probes and keepalives among them; a later one serves the same purpose.
const PROBES_WAITING_MAX: usize = 1_024;
/// Steps held back; further messages are dropped, as on a link that ends.
const STEPS_HELD_MAX: usize = 16_384;
/// Steps held back at which replies to barriers are dropped, so that they crowd nothing out.
const REPLIES_HELD_MAX: usize = 1_024;

/// Carries out a batch of commands, in order.
pub(crate) trait CarryOut: Clone + Send + Sync + 'static {
    /// Ends once all of them are carried out, or have failed and been reported.
    fn carry_out(&self, commands: Vec<EngineCommand>) -> impl Future<Output = ()> + Send;
}

impl CarryOut for KernelEngine {
    async fn carry_out(&self, commands: Vec<EngineCommand>) {
        self.apply(commands).await;
    }
}

/// A step that must wait until the peer's commands so far have been carried out.
#[derive(Debug, PartialEq)]
pub(crate) enum Held {
    /// A message to the peer, which may name an SA.
    Message(weft_path::Message),
    /// A reply to the peer's barrier: the engines take its containers' frames.
    Reply(weft_mesh::Message),
    /// The vector engine and the direct ports hand the peer over to the kernel engine.
    LeaveVector,
    /// The vector engine stops sending on this path.
    RemoveOutbound(PathId),
}

/// The outcome of queueing a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Queued {
    /// It goes with the next batch.
    Yes,
    /// A probe that found no room.
    ProbeRefused,
    /// Too many commands wait: the kernel engine is stuck.
    Stuck,
}

/// The queue of one kernel engine.
pub(crate) struct KernelQueue<E> {
    engine: E,
    waiting: Vec<EngineCommand>,
    probes_waiting: usize,
    /// The number of the batch that `waiting` becomes.
    next: u64,
    /// The batch under way, and since when.
    under_way: Option<(Instant, oneshot::Receiver<()>)>,
    /// The last batch with a command of each peer, until it has been carried out.
    last_of: BTreeMap<PeerId, u64>,
    /// The last batch that installs something for each peer, which messages may name.
    promised: BTreeMap<PeerId, u64>,
    held: VecDeque<(u64, PeerId, Held)>,
}

impl<E: CarryOut> KernelQueue<E> {
    pub(crate) const fn new(engine: E) -> Self {
        Self {
            engine,
            waiting: Vec::new(),
            probes_waiting: 0,
            next: 1,
            under_way: None,
            last_of: BTreeMap::new(),
            promised: BTreeMap::new(),
            held: VecDeque::new(),
        }
    }

    pub(crate) const fn engine(&self) -> &E {
        &self.engine
    }

    /// Adds a command, for this peer if it concerns one.
    pub(crate) fn push(&mut self, peer: Option<PeerId>, command: EngineCommand) -> Queued {
        if is_probe(&command) {
            if self.probes_waiting >= PROBES_WAITING_MAX {
                return Queued::ProbeRefused;
            }
            self.probes_waiting += 1;
            self.waiting.push(command);
            return Queued::Yes;
        }
        let stuck = self.waiting.len() >= COMMANDS_WAITING_MAX;
        if stuck && is_installation(&command) {
            return Queued::Stuck;
        }
        if let Some(peer) = peer {
            self.last_of.insert(peer, self.next);
            if is_installation(&command) {
                self.promised.insert(peer, self.next);
            }
        }
        self.waiting.push(command);
        Queued::Yes
    }

    /// Hands over the next batch unless one is under way.
    pub(crate) fn start(&mut self) {
        if self.under_way.is_some() || self.waiting.is_empty() {
            return;
        }
        let commands = std::mem::take(&mut self.waiting);
        self.probes_waiting = 0;
        self.next += 1;
        let (done, under_way) = oneshot::channel();
        let engine = self.engine.clone();
        tokio::spawn(async move {
            engine.carry_out(commands).await;
            let _ = done.send(());
        });
        self.under_way = Some((Instant::now(), under_way));
    }

    /// How long the batch under way has been running.
    pub(crate) fn busy(&self) -> Option<Duration> {
        self.under_way.as_ref().map(|(since, _)| since.elapsed())
    }

    /// Waits until the batch under way has been carried out; forever if there is none. Cancel safe.
    pub(crate) async fn batch_done(&mut self) {
        match &mut self.under_way {
            // If the engine is gone, it carries out nothing more; that was reported.
            Some((_, under_way)) => drop(under_way.await),
            None => std::future::pending().await,
        }
        self.under_way = None;
        let carried_out = self.next - 1;
        self.last_of.retain(|_, last| *last > carried_out);
        self.promised.retain(|_, last| *last > carried_out);
    }

    /// Holds a step back until the peer's commands so far are carried out. A message about SAs waits only for the
    /// peer's installations, and a reply for all commands. Returns the step if there is nothing to wait for.
    pub(crate) fn hold(&mut self, peer: PeerId, step: Held) -> Option<Held> {
        let last = match step {
            Held::Message(_) => self.promised.get(&peer).copied(),
            Held::Reply(_) => self.last(),
            Held::LeaveVector | Held::RemoveOutbound(_) => self.last_of.get(&peer).copied(),
        };
        let Some(last) = last else { return Some(step) };
        let max = match step {
            Held::Message(_) => STEPS_HELD_MAX,
            Held::Reply(_) => REPLIES_HELD_MAX,
            Held::LeaveVector | Held::RemoveOutbound(_) => usize::MAX,
        };
        if self.held.len() < max {
            self.held.push_back((last, peer, step));
        }
        None
    }

    /// The last batch with a command, unless all of it has been carried out.
    fn last(&self) -> Option<u64> {
        let under_way = self.under_way.is_some().then_some(self.next - 1);
        if self.waiting.is_empty() { under_way } else { Some(self.next) }
    }

    /// The next step that nothing holds back.
    pub(crate) fn release(&mut self) -> Option<(PeerId, Held)> {
        let carried_out = self.next - 1 - u64::from(self.under_way.is_some());
        let index = self.held.iter().position(|(last, ..)| *last <= carried_out)?;
        self.held.remove(index).map(|(_, peer, step)| (peer, step))
    }

    /// Drops the messages about SAs that are held for a peer: its link has ended, or another took its place.
    pub(crate) fn forget_messages(&mut self, peer: PeerId) {
        self.held.retain(|(_, of, step)| *of != peer || !matches!(step, Held::Message(_)));
    }

    /// The peer's frames stay with the vector engine or return to it. Drops the steps that were to follow their
    /// departure, and returns the paths that it was to remove.
    pub(crate) fn stay_with_vector(&mut self, peer: PeerId) -> Vec<PathId> {
        let mut removed = Vec::new();
        self.held.retain(|(_, of, step)| match step {
            _ if *of != peer => true,
            Held::Message(_) | Held::Reply(_) => true,
            Held::LeaveVector => false,
            Held::RemoveOutbound(path) => {
                removed.push(*path);
                false
            }
        });
        removed
    }

    /// Cancels the pending removal of a path from the vector engine; returns whether there was one.
    pub(crate) fn take_removal(&mut self, peer: PeerId, path: PathId) -> bool {
        let before = self.held.len();
        let removal = Held::RemoveOutbound(path);
        self.held.retain(|(_, of, step)| *of != peer || *step != removal);
        self.held.len() < before
    }

    /// Whether the peer's frames are still moving to the kernel engine.
    pub(crate) fn is_leaving_vector(&self, peer: PeerId) -> bool {
        self.held.iter().any(|(_, of, step)| *of == peer && *step == Held::LeaveVector)
    }
}

const fn is_probe(command: &EngineCommand) -> bool {
    matches!(command, EngineCommand::SendProbe { .. } | EngineCommand::SendKeepalive { .. })
}

const fn is_installation(command: &EngineCommand) -> bool {
    use EngineCommand::{InstallInbound, InstallOutbound, InstallPlain};
    matches!(command, InstallInbound { .. } | InstallOutbound { .. } | InstallPlain { .. })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::{Arc, Mutex};
    use tokio::sync::Semaphore;

    use super::*;

    /// Carries a batch out once the test lets it.
    #[derive(Clone)]
    struct Slow {
        begun: Arc<Mutex<Vec<Vec<EngineCommand>>>>,
        allowed: Arc<Semaphore>,
    }

    impl CarryOut for Slow {
        async fn carry_out(&self, commands: Vec<EngineCommand>) {
            self.begun.lock().unwrap().push(commands);
            self.allowed.acquire().await.unwrap().forget();
        }
    }

    fn slow() -> (KernelQueue<Slow>, Slow) {
        let engine = Slow { begun: Arc::default(), allowed: Arc::new(Semaphore::new(0)) };
        (KernelQueue::new(engine.clone()), engine)
    }

    fn peer(number: u8) -> PeerId {
        PeerId::from_bytes([number; 32])
    }

    fn bind(number: u8) -> (Option<PeerId>, EngineCommand) {
        let path = Some(PathId(number.into()));
        (Some(peer(number)), EngineCommand::BindPath { peer: peer(number), path })
    }

    fn keepalive() -> EngineCommand {
        EngineCommand::SendKeepalive { path: PathId(1) }
    }

    async fn is_done(queue: &mut KernelQueue<Slow>) -> bool {
        tokio::time::timeout(Duration::from_millis(50), queue.batch_done()).await.is_ok()
    }

    fn leaves(queue: &mut KernelQueue<Slow>) -> Vec<PeerId> {
        std::iter::from_fn(|| queue.release().map(|(peer, _)| peer)).collect()
    }

    #[tokio::test]
    async fn messages_that_rely_on_a_batch_wait_for_it_and_other_peers_do_not() {
        let (mut queue, engine) = slow();
        let (of, command) = bind(1);
        assert_eq!(queue.push(of, command), Queued::Yes);
        queue.start();
        assert!(!is_done(&mut queue).await);
        assert_eq!(queue.hold(peer(1), Held::LeaveVector), None);
        assert_eq!(queue.hold(peer(2), Held::LeaveVector), Some(Held::LeaveVector));
        // A command of the next batch.
        let (of, command) = bind(2);
        queue.push(of, command);
        assert_eq!(queue.hold(peer(2), Held::LeaveVector), None);
        queue.start();
        assert_eq!(engine.begun.lock().unwrap().len(), 1, "one batch at a time");
        assert_eq!(queue.release(), None);
        engine.allowed.add_permits(1);
        assert!(is_done(&mut queue).await);
        assert_eq!(leaves(&mut queue), [peer(1)]);
        queue.start();
        assert!(!is_done(&mut queue).await);
        assert_eq!(leaves(&mut queue), []);
        engine.allowed.add_permits(1);
        assert!(is_done(&mut queue).await);
        assert_eq!(leaves(&mut queue), [peer(2)]);
        assert_eq!(queue.hold(peer(2), Held::LeaveVector), Some(Held::LeaveVector));
    }

    #[tokio::test]
    async fn messages_wait_for_installations_alone_and_keep_their_order_until_their_link_ends() {
        let (mut queue, engine) = slow();
        let message = |session: u64| {
            let rekey = serde_json::json!({ "type": "rekey_request", "spi": session });
            Held::Message(serde_json::from_value(rekey).unwrap())
        };
        let install = |number: u8| EngineCommand::InstallPlain {
            peer: peer(number),
            path: PathId(number.into()),
            remote: "192.0.2.1".parse().unwrap(),
        };
        // A message promises nothing about the path that frames take.
        let (of, command) = bind(1);
        queue.push(of, command);
        assert!(queue.hold(peer(1), message(300)).is_some());
        for number in [1, 2] {
            queue.push(Some(peer(number)), install(number));
            for session in [301, 302] {
                assert_eq!(queue.hold(peer(number), message(session)), None);
            }
        }
        queue.start();
        assert_eq!(queue.release(), None);
        queue.forget_messages(peer(2));
        engine.allowed.add_permits(1);
        assert!(is_done(&mut queue).await);
        let released: Vec<_> = std::iter::from_fn(|| queue.release()).collect();
        assert_eq!(released, [(peer(1), message(301)), (peer(1), message(302))]);
    }

    #[tokio::test]
    async fn a_reply_to_a_barrier_waits_for_all_commands() {
        let (mut queue, engine) = slow();
        let reply = |number| Held::Reply(weft_mesh::Message::BarrierReply { number });
        assert_eq!(queue.hold(peer(1), reply(1)), Some(reply(1)), "there is nothing to wait for");
        let (of, command) = bind(2);
        queue.push(of, command);
        assert_eq!(queue.hold(peer(1), reply(2)), None);
        queue.start();
        assert_eq!(queue.hold(peer(1), reply(3)), None);
        assert_eq!(queue.release(), None);
        // The link goes on with another key.
        queue.forget_messages(peer(1));
        engine.allowed.add_permits(1);
        assert!(is_done(&mut queue).await);
        let released: Vec<_> = std::iter::from_fn(|| queue.release()).collect();
        assert_eq!(released, [(peer(1), reply(2)), (peer(1), reply(3))]);
        assert_eq!(queue.hold(peer(1), reply(4)), Some(reply(4)));
    }

    #[tokio::test]
    async fn a_peer_that_comes_back_to_the_vector_engine_is_not_left() {
        let (mut queue, engine) = slow();
        let (of, command) = bind(1);
        queue.push(of, command);
        queue.hold(peer(1), Held::LeaveVector);
        queue.hold(peer(1), Held::RemoveOutbound(PathId(7)));
        assert!(queue.is_leaving_vector(peer(1)));
        assert_eq!(queue.stay_with_vector(peer(1)), [PathId(7)]);
        assert!(!queue.is_leaving_vector(peer(1)));
        queue.start();
        engine.allowed.add_permits(1);
        assert!(is_done(&mut queue).await);
        assert_eq!(queue.release(), None);
    }

    #[tokio::test]
    async fn an_engine_that_does_not_get_on_is_found_and_is_told_to_remove_all_the_same() {
        let (mut queue, engine) = slow();
        for _ in 0..PROBES_WAITING_MAX {
            assert_eq!(queue.push(None, keepalive()), Queued::Yes);
        }
        assert_eq!(queue.push(None, keepalive()), Queued::ProbeRefused);
        let install = EngineCommand::InstallPlain {
            peer: peer(1),
            path: PathId(1),
            remote: "192.0.2.1".parse().unwrap(),
        };
        for _ in PROBES_WAITING_MAX..COMMANDS_WAITING_MAX {
            assert_eq!(queue.push(Some(peer(1)), install.clone()), Queued::Yes);
        }
        assert_eq!(queue.push(Some(peer(1)), install), Queued::Stuck);
        let remove = EngineCommand::RemoveOutbound { path: PathId(1) };
        assert_eq!(queue.push(Some(peer(1)), remove.clone()), Queued::Yes);
        queue.start();
        engine.allowed.add_permits(1);
        assert!(is_done(&mut queue).await);
        assert_eq!(engine.begun.lock().unwrap()[0].last(), Some(&remove));
        assert_eq!(queue.push(None, keepalive()), Queued::Yes);
    }
}
