//! Changes of the state that go to the disk together: a slow disk holds up all calls once, not each of them in turn.

use std::collections::BTreeSet;
use std::sync::PoisonError;

use tokio::sync::{Mutex, oneshot};
use tokio::time::Instant;

use super::backend::Backend;
use super::error::PluginError;
use super::requests::BackendError;
use super::state::{Outcome, Pending, State, Step, Undo};
use super::wire::{Answer, Call};

/// A change that is stored before its caller goes on.
#[derive(Clone)]
pub(super) enum Change {
    /// A call begins.
    Call(Call),
    /// An action of a call has ended.
    Outcome(Pending, Result<Outcome, BackendError>),
    /// Things have been taken back.
    Undone,
}

/// Things to take back, in the order in which it is done.
pub(super) type Undos = BTreeSet<Undo>;

/// The next step of a call, and what is to be taken back besides.
type Made = (Step, Undos);

/// The changes that wait for the disk. The calls under way limit them.
#[derive(Default)]
pub(super) struct Changes(std::sync::Mutex<Vec<(Change, oneshot::Sender<Made>)>>);

impl Changes {
    /// Makes a change, and returns once it is stored. If it cannot be stored, nothing is promised: a call does nothing,
    /// unless it gives something back, and an outcome counts as a failure.
    pub(super) async fn make<B: Backend>(
        &self,
        change: Change,
        state: &Mutex<State>,
        backend: &B,
    ) -> Made {
        let (reply, mut made) = oneshot::channel();
        self.waiting().push((change, reply));
        let aborted =
            |_| (Step::Done(Err(PluginError::Internal("a change was aborted"))), Undos::new());
        // One whose change another has stored does not wait for the state.
        let mut state = tokio::select! {
            biased;
            made = &mut made => return made.unwrap_or_else(aborted),
            state = state.lock() => state,
        };
        // The first one here stores the changes of all that came while others were being stored.
        let waiting = std::mem::take(&mut *self.waiting());
        let (changes, replies): (Vec<_>, Vec<_>) = waiting.into_iter().unzip();
        if !changes.is_empty() {
            let all = store(changes, &mut state, backend).await;
            // A caller waits until it has its reply.
            replies.into_iter().zip(all).for_each(|(reply, made)| drop(reply.send(made)));
        }
        drop(state);
        made.await.unwrap_or_else(aborted)
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Vec<(Change, oneshot::Sender<Made>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes changes, in their order, and stores them by one write.
async fn store<B: Backend>(changes: Vec<Change>, state: &mut State, backend: &B) -> Vec<Made> {
    let mut next = state.clone();
    let made = changes.iter().map(|change| handle(change.clone(), &mut next)).collect();
    let has_undone = changes.iter().any(|change| matches!(change, Change::Undone));
    let saved = match next.promises_as(state) && !has_undone {
        true => Ok(()),
        false => backend.save(next.clone()).await,
    };
    match saved {
        Ok(()) => {
            *state = next;
            made
        }
        Err(error) => {
            tracing::warn!(%error, "the state of Docker's plugin is not stored");
            changes.into_iter().map(|change| handle_unstored(change, &error, state)).collect()
        }
    }
}

fn handle(change: Change, state: &mut State) -> Made {
    let step = match change {
        Change::Call(call) => state.handle_call(call, now()),
        Change::Outcome(pending, outcome) => state.handle_outcome(pending, outcome, now()),
        Change::Undone => Step::Done(Ok(Answer::Done {})),
    };
    (step, drain(state))
}

/// Handles a change that cannot be stored. A change that promises nothing still happens.
fn handle_unstored(change: Change, error: &BackendError, state: &mut State) -> Made {
    let gives_back = match &change {
        Change::Call(call) => call.is_release(),
        Change::Outcome(..) => false,
        Change::Undone => true,
    };
    let before = state.clone();
    let made = handle(change.clone(), state);
    if gives_back || state.promises_as(&before) {
        return made;
    }
    *state = before;
    let refused = || Step::Done(Err(PluginError::NotSaved(error.clone())));
    let Change::Outcome(pending, _) = change else { return (refused(), Undos::new()) };
    let (step, undos) = handle(Change::Outcome(pending, Err(error.clone())), state);
    let is_failure = matches!(step, Step::Done(Err(_)));
    (if is_failure { refused() } else { step }, undos)
}

pub(super) fn drain(state: &mut State) -> Undos {
    std::iter::from_fn(|| state.poll_undo()).collect()
}

/// The clock that the state machine sees; tests stop and advance it.
pub(super) fn now() -> std::time::Instant {
    Instant::now().into_std()
}
