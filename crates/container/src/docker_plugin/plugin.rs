//! Carries out calls: the state machine, the rest of the daemon, and limits of time between them.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex, OwnedMutexGuard, Semaphore, oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::backend::Backend;
use super::changes::{Change, Changes, Undos, drain, now};
use super::error::PluginError;
use super::requests::BackendError;
use super::state::{Action, Listing, Outcome, Reconciled, State, Step, Undo};
use super::wire::{Answer, Call};

/// Time limit for one answer, in milliseconds: Docker itself has none, and a silent plugin hangs it.
pub const ANSWER_LIMIT_MS: u64 = 9_500;
/// Time limit for one request to the daemon, in milliseconds. It may go on after the answer, so
/// that its result is taken back in order.
pub const ACTION_LIMIT_MS: u64 = 30_000;
/// Time limit for taking one thing back, in milliseconds. Removals of many containers wait for each other, and one that
/// ends at its limit is tried again with the next listing alone.
pub const UNDO_LIMIT_MS: u64 = 15_000;
/// The same before the engine hears why a call has failed, which is sooner than its answer is due.
const FAILED_UNDO_LIMIT_MS: u64 = 5_000;
/// Time limit for the facts of `docker network inspect`, in milliseconds.
pub const FACTS_LIMIT_MS: u64 = 2_000;
/// Waits end this long before the answer is due, in milliseconds, so that the answer names them.
const MARGIN_MS: u64 = 250;
/// The most calls under way.
pub const CALLS_MAX: usize = 128;
/// The most containers that the engine starts at the same time on Weft's networks, for each processor. An old engine has a
/// process for each that polls the kernel's RTNL lock without a pause. Dozens of them leave no processor time to the
/// holder of the lock, and each step of every container takes seconds.
pub const SETUPS_PER_PROCESSOR: usize = 1;
/// The most of them on any host.
const SETUPS_MAX: usize = 16;
/// After this time, in milliseconds, a container counts as started: it may have ended, or wait for something else.
pub const SETUP_LIMIT_MS: u64 = 3_000;

/// Docker's plugin: answers calls. Clones share one state.
pub struct Plugin<B>(Arc<Shared<B>>);

impl<B> Clone for Plugin<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

struct Shared<B> {
    backend: B,
    state: Mutex<State>,
    changes: Changes,
    /// Held by calls that open, bind or close networks.
    networks: Arc<Mutex<()>>,
    /// Held by calls about one endpoint.
    endpoints: Locks,
    calls: Arc<Semaphore>,
    /// Held for endpoints from the answer that they are created until the engine has set them up.
    setups: Arc<Semaphore>,
    /// How many calls the engine waits for.
    open: watch::Sender<usize>,
}

/// The most containers that the engine starts at the same time.
pub(super) fn setups_max() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (SETUPS_PER_PROCESSOR * processors).min(SETUPS_MAX)
}

/// A call that the engine waits for.
struct Open<'a>(&'a watch::Sender<usize>);

impl<'a> Open<'a> {
    fn begin(open: &'a watch::Sender<usize>) -> Self {
        open.send_modify(|open| *open += 1);
        Self(open)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

/// Calls with the same key run one after the other.
#[derive(Debug, PartialEq, Eq)]
enum Key {
    None,
    Networks,
    Endpoint(String),
}

impl<B: Backend> Plugin<B> {
    /// The plugin, with the state that was stored last. Call [`reconcile`](Self::reconcile) soon
    /// after: it removes the remains of a kill. Make it once in a process: each plugin stores all of its
    /// state, and would overwrite that of another.
    pub fn new(backend: B, state: State) -> Self {
        Self(Arc::new(Shared {
            backend,
            state: Mutex::new(state),
            changes: Changes::default(),
            networks: Arc::default(),
            endpoints: Locks::default(),
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
            setups: Arc::new(Semaphore::new(setups_max())),
            open: watch::Sender::new(0),
        }))
    }

    /// Waits until the engine waits for no answer. While it does, it holds locks, and may answer nobody.
    pub async fn quiet(&self) {
        // The sender lives as long as the plugin.
        let _ = self.0.open.subscribe().wait_for(|open| *open == 0).await;
    }

    /// Answers a call before `deadline`. The call goes on when the future is dropped, and then
    /// takes back what it has taken.
    ///
    /// # Errors
    /// Docker shows it to its user.
    pub async fn call(&self, call: Call, deadline: Instant) -> Result<Answer, PluginError> {
        let _open = Open::begin(&self.0.open);
        let is_release = call.is_release();
        let late = || {
            // Reconciliation finds addresses that are given back late, or not at all.
            let error = PluginError::TimedOut { limit_ms: ANSWER_LIMIT_MS };
            if is_release { Ok(Answer::Done {}) } else { Err(error) }
        };
        let permit = timeout_at(deadline, Arc::clone(&self.0.calls).acquire_owned());
        let Ok(Ok(permit)) = permit.await else { return late() };
        let (sender, receiver) = oneshot::channel();
        let shared = Arc::clone(&self.0);
        let inner = deadline.checked_sub(Duration::from_millis(MARGIN_MS)).unwrap_or(deadline);
        tokio::spawn(async move {
            shared.answer(call, inner, sender).await;
            drop(permit);
        });
        match timeout_at(deadline, receiver).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(PluginError::Internal("a call was aborted")),
            Err(_) => late(),
        }
    }

    /// Removes the remains of a kill or of a lost answer, as [`State::handle_listing`] says. It goes on
    /// when the future is dropped: it takes up to [`UNDO_LIMIT_MS`] for each thing to take back.
    pub async fn reconcile(&self, listing: &Listing) -> Reconciled {
        let (shared, listing) = (Arc::clone(&self.0), listing.clone());
        let reconciled = tokio::spawn(async move {
            let mut state = shared.state.lock().await;
            let reconciled = state.handle_listing(&listing, now());
            let undos = drain(&mut state);
            if let Err(error) = shared.backend.save(state.clone()).await {
                tracing::warn!(%error, "the state of Docker's plugin is not stored");
            }
            drop(state);
            shared.undo_all(undos, UNDO_LIMIT_MS).await;
            reconciled
        });
        // It fails only at the end of the runtime.
        reconciled.await.unwrap_or_default()
    }

    #[cfg(test)]
    pub(super) async fn replace(&self, state: State) {
        *self.0.state.lock().await = state;
    }

    /// A copy of the state, for status.
    pub async fn state(&self) -> State {
        self.0.state.lock().await.clone()
    }
}

impl<B: Backend> Shared<B> {
    async fn answer(
        self: Arc<Self>,
        call: Call,
        deadline: Instant,
        reply: oneshot::Sender<Result<Answer, PluginError>>,
    ) {
        let mut undos = Undos::new();
        let endpoint = match &call {
            Call::CreateEndpoint(request) => Some(request.endpoint_id.clone()),
            _ => None,
        };
        let answer = match self.prepare(&call, deadline).await {
            Ok(held) => {
                let answer = self.run(call, &reply, &mut undos).await;
                drop(held);
                answer
            }
            Err(error) => Err(error),
        };
        if let (Ok(_), Some(endpoint)) = (&answer, endpoint) {
            self.await_setups(endpoint, deadline).await;
        }
        if let Err(error) = &answer {
            tracing::warn!(%error, "a request of Docker's is refused");
        }
        let limit_ms = if answer.is_ok() { UNDO_LIMIT_MS } else { FAILED_UNDO_LIMIT_MS };
        self.undo_all(undos, limit_ms).await;
        // If the engine has gone, the next listing shows what it does not know.
        let _ = reply.send(answer);
    }

    /// Waits until the engine has set up enough of the containers that it starts, before it goes on with another.
    async fn await_setups(self: &Arc<Self>, endpoint: String, deadline: Instant) {
        let permit = timeout_at(deadline, Arc::clone(&self.setups).acquire_owned());
        let Ok(Ok(permit)) = permit.await else { return };
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            let limit = Duration::from_millis(SETUP_LIMIT_MS);
            let _ = timeout(limit, shared.backend.wait_set_up(endpoint)).await;
            drop(permit);
        });
    }

    /// Waits for the daemon, if the call needs it, and for its turn.
    async fn prepare(&self, call: &Call, deadline: Instant) -> Result<Held, PluginError> {
        if call.needs_backend() {
            let late = |_| BackendError::NotReady { why: "it has not finished starting".into() };
            timeout_at(deadline, self.backend.wait_ready()).await.map_err(late)??;
        }
        let held = self.hold(Key::of(call));
        if call.is_release() {
            return Ok(held.await);
        }
        let limit_ms = ANSWER_LIMIT_MS;
        timeout_at(deadline, held).await.map_err(|_| PluginError::TimedOut { limit_ms })
    }

    async fn run(
        &self,
        call: Call,
        reply: &oneshot::Sender<Result<Answer, PluginError>>,
        undos: &mut Undos,
    ) -> Result<Answer, PluginError> {
        let mut change = Change::Call(call);
        loop {
            let (step, fresh) = self.change(change).await;
            undos.extend(fresh);
            change = match step {
                Step::Done(answer) => return answer,
                Step::Act(action, pending) => {
                    Change::Outcome(pending, self.act(action, reply).await)
                }
            };
        }
    }

    /// Makes a change of the state, and stores it.
    async fn change(&self, change: Change) -> (Step, Undos) {
        self.changes.make(change, &self.state, &self.backend).await
    }

    /// Performs an action. Fails if nobody waits for the answer any more.
    async fn act(
        &self,
        action: Action,
        reply: &oneshot::Sender<Result<Answer, PluginError>>,
    ) -> Result<Outcome, BackendError> {
        let (what, limit_ms) = match &action {
            Action::OpenNetwork(request) => (format!("open network {}", request.name), None),
            Action::Allocate(request) => (format!("allocate from {}", request.range), None),
            Action::PrepareLink(request) => (format!("make link of {}", request.endpoint), None),
            Action::LinkFacts { .. } => ("read a link".to_owned(), Some(FACTS_LIMIT_MS)),
        };
        let backend = &self.backend;
        let outcome = async {
            Ok(match action {
                Action::OpenNetwork(r) => Outcome::Network(backend.open_network(r).await?),
                Action::Allocate(r) => Outcome::Address(backend.allocate(r).await?),
                Action::PrepareLink(r) => Outcome::Link(backend.prepare_link(r).await?),
                Action::LinkFacts { endpoint } => {
                    Outcome::Facts(backend.link_facts(endpoint).await?)
                }
            })
        };
        let limit_ms = limit_ms.unwrap_or(ACTION_LIMIT_MS);
        let outcome = timeout(Duration::from_millis(limit_ms), outcome).await;
        let outcome = outcome.unwrap_or_else(|_| {
            Err(BackendError::Failed { what, why: format!("no result within {limit_ms} ms") })
        });
        if reply.is_closed() { Err(BackendError::GivenUp) } else { outcome }
    }

    /// Takes things back, each within a limit of time, and those that have waited for them.
    async fn undo_all(&self, mut undos: Undos, limit_ms: u64) {
        if undos.is_empty() {
            return;
        }
        while let Some(undo) = undos.pop_first() {
            let _held = self.hold(Key::of_undo(&undo)).await;
            if !self.state.lock().await.begin_undo(&undo) {
                continue;
            }
            let limit = Duration::from_millis(limit_ms);
            let error = match timeout(limit, self.perform(&undo)).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no result within {limit_ms} ms")),
            };
            if let Some(error) = &error {
                tracing::warn!(%error, ?undo, "something of Docker's is not taken back yet");
            }
            let mut state = self.state.lock().await;
            state.handle_undone(&undo, error.is_none());
            undos.extend(drain(&mut state));
        }
        self.change(Change::Undone).await;
    }

    async fn perform(&self, undo: &Undo) -> Result<(), BackendError> {
        match undo.clone() {
            Undo::RemoveLink { endpoint } => self.backend.remove_link(endpoint).await,
            Undo::Release { allocator, owner } => self.backend.release(allocator, owner).await,
            Undo::CloseNetwork { network } => self.backend.close_network(network).await,
        }
    }

    async fn hold(&self, key: Key) -> Held {
        match key {
            Key::None => Held::Nothing,
            Key::Networks => Held::Networks(Arc::clone(&self.networks).lock_owned().await),
            Key::Endpoint(id) => Held::Endpoint(self.endpoints.lock(id).await),
        }
    }
}

impl Key {
    fn of(call: &Call) -> Self {
        match call {
            Call::RequestPool(_)
            | Call::ReleasePool(_)
            | Call::CreateNetwork(_)
            | Call::DeleteNetwork(_) => Self::Networks,
            Call::CreateEndpoint(request) => Self::Endpoint(request.endpoint_id.clone()),
            Call::Join(request) | Call::Leave(request) | Call::DeleteEndpoint(request) => {
                Self::Endpoint(request.endpoint_id.clone())
            }
            Call::DefaultAddressSpaces
            | Call::RequestAddress(_)
            | Call::ReleaseAddress(_)
            | Call::EndpointInfo(_) => Self::None,
        }
    }

    fn of_undo(undo: &Undo) -> Self {
        match undo {
            Undo::RemoveLink { endpoint } => Self::Endpoint(endpoint.clone()),
            // Owners are not used twice.
            Undo::Release { .. } => Self::None,
            Undo::CloseNetwork { .. } => Self::Networks,
        }
    }
}

/// A key that is held until this is dropped.
enum Held {
    Nothing,
    Networks(#[expect(dead_code, reason = "held")] OwnedMutexGuard<()>),
    Endpoint(#[expect(dead_code, reason = "held")] OwnedMutexGuard<()>),
}

/// A lock for each endpoint that a call is about.
#[derive(Default)]
struct Locks(std::sync::Mutex<HashMap<String, Arc<Mutex<()>>>>);

impl Locks {
    async fn lock(&self, id: String) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // The map itself has one reference.
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(locks.entry(id).or_default())
        };
        lock.lock_owned().await
    }
}
