//! Writing states to disk beside the services: a slow disk holds up the change that must be written, and
//! nothing else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use tokio::sync::OwnedMutexGuard;
use weft_api::{ApiError, ErrorKind};

use crate::upkeep::records::Records;
use crate::upkeep::store::{Store, StoreError};

/// Where the states of a [`Saving`] are written.
pub(crate) trait Disk<T>: Send + Sync + 'static {
    /// Writes a state whole.
    ///
    /// # Errors
    /// It cannot be written; the disk keeps the state before.
    fn save(&self, state: &T) -> Result<(), StoreError>;

    /// Writes the state of a change that has already happened. A write that fails is repeated.
    fn save_or_later(&self, state: &T);
}

/// One file for a whole state.
struct OneFile {
    store: Store,
    file: &'static str,
}

impl<T: Serialize> Disk<T> for OneFile {
    fn save(&self, state: &T) -> Result<(), StoreError> {
        self.store.save(self.file, state)
    }

    fn save_or_later(&self, state: &T) {
        self.store.save_or_later(self.file, state);
    }
}

impl<T: Serialize> Disk<BTreeMap<String, T>> for Records {
    fn save(&self, state: &BTreeMap<String, T>) -> Result<(), StoreError> {
        Self::save(self, state)
    }

    fn save_or_later(&self, state: &BTreeMap<String, T>) {
        Self::save_or_later(self, state);
    }
}

/// Writes the states of one kind, in their order and one at a time.
pub(crate) struct Saving<T> {
    disk: Arc<dyn Disk<T>>,
    /// The newest state that is written some time.
    waiting: Arc<Mutex<Option<T>>>,
    /// Held by the write under way.
    turn: Arc<tokio::sync::Mutex<()>>,
}

// Not derived, since that would ask for a `T` that can be cloned.
impl<T> Clone for Saving<T> {
    fn clone(&self) -> Self {
        let Self { disk, waiting, turn } = self;
        Self { disk: Arc::clone(disk), waiting: Arc::clone(waiting), turn: Arc::clone(turn) }
    }
}

impl<T: Serialize + Send + 'static> Saving<T> {
    /// Of a state that is one file.
    pub(crate) fn new(store: Store, file: &'static str) -> Self {
        Self::on(OneFile { store, file })
    }

    /// Of a state on this disk.
    pub(crate) fn on(disk: impl Disk<T>) -> Self {
        Self { disk: Arc::new(disk), waiting: Arc::default(), turn: Arc::default() }
    }

    /// Writes a state that an answer promises, and returns once it is on the disk. The caller makes no other state
    /// meanwhile.
    ///
    /// # Errors
    /// It cannot be written; the disk keeps the state before.
    pub(crate) async fn save(&self, state: T) -> Result<(), ApiError> {
        let (turn, all) = (self.take_turn().await, self.clone());
        // Taken before anything else can wait there, since the thread may begin later.
        let before = self.waiting().take();
        let written = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let written = all.disk.save(&state);
            if let (Err(_), Some(before)) = (&written, before) {
                all.disk.save_or_later(&before);
            }
            written
        });
        let written = written.await.map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
        written.map_err(|error| ApiError::new(ErrorKind::Unavailable, error))
    }

    /// Writes the state of a change that has already happened, some time. A newer state may take its place.
    pub(super) fn save_or_later(&self, state: T) {
        let before = self.waiting().replace(state);
        if before.is_none() {
            let all = self.clone();
            tokio::spawn(async move { all.settle().await });
        }
    }

    /// Returns once everything so far has been written, or is left to the store to repeat.
    pub(super) async fn settle(&self) {
        let (turn, all) = (self.take_turn().await, self.clone());
        let written = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            all.write_waiting();
        });
        if let Err(error) = written.await {
            tracing::error!(%error, "cannot write the state");
        }
    }

    async fn take_turn(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.turn).lock_owned().await
    }

    fn write_waiting(&self) {
        let waiting = self.waiting().take();
        if let Some(state) = waiting {
            self.disk.save_or_later(&state);
        }
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Option<T>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::await_holding_lock)]

    use std::time::Duration;

    use super::*;

    const FILE: &str = "numbers.json";

    fn start() -> (tempfile::TempDir, Store, Saving<u32>) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        (dir, store.clone(), Saving::new(store, FILE))
    }

    // The runtime of these tests has one thread: one that waited for the disk would stop them.

    #[tokio::test]
    async fn an_answer_comes_once_it_is_written_and_a_slow_disk_stops_nothing_else() {
        let (_dir, store, saving) = start();
        let slow = store.stall();
        saving.save_or_later(1);
        saving.save_or_later(2);
        let save = tokio::spawn({
            let saving = saving.clone();
            async move { saving.save(3).await }
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!save.is_finished());
        assert_eq!(store.load::<u32>(FILE).unwrap(), None);
        drop(slow);
        save.await.unwrap().unwrap();
        assert_eq!(store.load(FILE).unwrap(), Some(3));
        // The states before it do not follow it.
        saving.settle().await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(store.load(FILE).unwrap(), Some(3));
    }

    #[tokio::test]
    async fn a_caller_that_leaves_keeps_the_order() {
        let (_dir, store, saving) = start();
        let slow = store.stall();
        let left = tokio::time::timeout(Duration::from_millis(30), saving.save(1)).await;
        assert!(left.is_err());
        saving.save_or_later(2);
        drop(slow);
        saving.settle().await;
        assert_eq!(store.load(FILE).unwrap(), Some(2));
    }

    #[tokio::test]
    async fn a_change_that_cannot_be_written_is_refused_and_what_was_before_it_is_written_later() {
        let (dir, store, saving) = start();
        let in_the_way = dir.path().join(format!("{FILE}.new/x"));
        std::fs::create_dir_all(&in_the_way).unwrap();
        saving.save_or_later(1);
        let refused = saving.save(2).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable);
        std::fs::remove_dir_all(in_the_way.parent().unwrap()).unwrap();
        assert!(store.try_all());
        assert_eq!(store.load(FILE).unwrap(), Some(1));
    }
}
