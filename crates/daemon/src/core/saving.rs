//! Writing the mesh's state to disk beside the control loop.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;
use weft_mesh::State;

use crate::upkeep::origin::Notes;
use crate::upkeep::store::{MESH_FILE, Store};

/// The one state that is being written now, if any.
pub(crate) struct Saving {
    /// Record the state's place and generation for the next start.
    notes: Arc<Mutex<Notes>>,
    under_way: Option<oneshot::Receiver<Result<(), String>>>,
}

impl Saving {
    pub(crate) fn new(notes: Notes) -> Self {
        Self { notes: Arc::new(Mutex::new(notes)), under_way: None }
    }

    /// Begins to write a state, and notes so where the host is `sure` of it. One is written at a time.
    pub(crate) fn begin(&mut self, store: &Store, state: State, sure: bool) {
        let (store, notes) = (store.clone(), Arc::clone(&self.notes));
        let (done, under_way) = oneshot::channel();
        tokio::task::spawn_blocking(move || {
            let saved = store.save(MESH_FILE, &state).map_err(|error| error.to_string());
            if saved.is_ok() {
                let mut notes = notes.lock().unwrap_or_else(PoisonError::into_inner);
                notes.saved(sure.then(|| state.generation()));
            }
            let _ = done.send(saved);
        });
        self.under_way = Some(under_way);
    }

    pub(crate) const fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Waits until it is written; for ever if none is. Cancel safe.
    pub(crate) async fn done(&mut self) -> Result<(), String> {
        let Some(under_way) = &mut self.under_way else { return std::future::pending().await };
        let saved = under_way.await.unwrap_or_else(|_| Err("the write failed".into()));
        self.under_way = None;
        saved
    }
}
