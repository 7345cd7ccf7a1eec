//! Writing the mesh's state to disk beside the control loop.

use tokio::sync::oneshot;
use weft_mesh::State;

use crate::upkeep::store::Store;

/// Ranges, members and allocated addresses, as the mesh stores them.
pub(crate) const MESH_FILE: &str = "mesh.json";

/// The generation of the written state, and the outcome.
pub(crate) type Saved = (u64, Result<(), String>);

/// The state being written now, if any.
#[derive(Default)]
pub(crate) struct Saving {
    under_way: Option<(u64, oneshot::Receiver<Result<(), String>>)>,
}

impl Saving {
    /// Starts to write a state. Only one write runs at a time.
    pub(crate) fn begin(&mut self, store: &Store, state: State) {
        let (generation, store) = (state.generation(), store.clone());
        let (done, under_way) = oneshot::channel();
        tokio::task::spawn_blocking(move || {
            let _ = done.send(store.save(MESH_FILE, &state).map_err(|error| error.to_string()));
        });
        self.under_way = Some((generation, under_way));
    }

    pub(crate) const fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Waits until the state is written; forever if there is none. Cancel safe.
    pub(crate) async fn done(&mut self) -> Saved {
        let Some((generation, under_way)) = &mut self.under_way else {
            return std::future::pending().await;
        };
        let ended = under_way.await;
        let saved = (*generation, ended.unwrap_or_else(|_| Err("writing it has failed".into())));
        self.under_way = None;
        saved
    }

    /// Waits briefly for the write under way, because the daemon is ending.
    pub(crate) async fn finish(&mut self) {
        if self.is_under_way() {
            let _ = tokio::time::timeout(FINISH_LIMIT, self.done()).await;
        }
    }
}

/// How long the daemon waits for the disk when it ends.
const FINISH_LIMIT: std::time::Duration = std::time::Duration::from_secs(2);
