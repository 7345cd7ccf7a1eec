//! The networks that were created for Docker: they go with Docker's.

use std::collections::BTreeSet;

use tokio::sync::{Mutex, MutexGuard};
use weft_container::docker_plugin::{BackendError, NetworkName};

use crate::services::attach::saving::Saving;
use crate::upkeep::store::{Store, StoreError};

/// Their file.
const FILE: &str = "docker-networks.json";

/// The names of the networks that were created for Docker.
pub(super) struct Made {
    names: Mutex<BTreeSet<NetworkName>>,
    saving: Saving<BTreeSet<NetworkName>>,
}

/// The same, locked for one change.
pub(super) struct Locked<'a> {
    names: MutexGuard<'a, BTreeSet<NetworkName>>,
    saving: &'a Saving<BTreeSet<NetworkName>>,
}

impl Made {
    /// Those of earlier runs.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn load(store: &Store) -> Result<Self, StoreError> {
        let names = store.load(FILE)?.unwrap_or_default();
        Ok(Self { names: Mutex::new(names), saving: Saving::new(store.clone(), FILE) })
    }

    pub(super) async fn lock(&self) -> Locked<'_> {
        Locked { names: self.names.lock().await, saving: &self.saving }
    }
}

impl Locked<'_> {
    pub(super) fn contains(&self, name: &NetworkName) -> bool {
        self.names.contains(name)
    }

    /// Creates a network. It is noted before, since a network that nobody has noted stays for good. `create` says
    /// whether it is a new one. If that fails, `is_there` says whether there is one all the same.
    ///
    /// # Errors
    /// Those of `create`; or the note cannot be saved, and then nothing is created.
    pub(super) async fn create(
        &mut self,
        name: &NetworkName,
        create: impl Future<Output = Result<bool, BackendError>> + Send,
        is_there: impl Future<Output = bool> + Send,
    ) -> Result<(), BackendError> {
        self.names.insert(name.clone());
        if let Err(error) = self.save().await {
            self.names.remove(name);
            return Err(error);
        }
        let created = create.await;
        let stays = match &created {
            Ok(is_new) => *is_new,
            Err(_) => is_there.await,
        };
        if !stays && let Err(error) = self.remove(name).await {
            tracing::warn!(%error, network = %name, "a network that was not created is noted for Docker");
        }
        created.map(drop)
    }

    /// A network has gone, or is no longer Docker's.
    ///
    /// # Errors
    /// That cannot be saved.
    pub(super) async fn remove(&mut self, name: &NetworkName) -> Result<(), BackendError> {
        self.names.remove(name);
        self.save().await
    }

    async fn save(&self) -> Result<(), BackendError> {
        let saved = self.saving.save(self.names.clone()).await;
        saved.map_err(|error| BackendError::Failed {
            what: "save the networks of Docker".to_owned(),
            why: error.error,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn on_disk(store: &Store) -> usize {
        store.load::<BTreeSet<NetworkName>>(FILE).unwrap().unwrap_or_default().len()
    }

    #[tokio::test]
    async fn a_network_is_noted_before_it_is_created_and_stays_so_while_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let name: NetworkName = "shop".parse().unwrap();
        let failed = || Err(BackendError::GivenUp);
        for (created, is_there, noted) in [
            (Ok(true), true, 1),
            // A user has created it meanwhile.
            (Ok(false), true, 0),
            (failed(), false, 0),
            // Its devices are late.
            (failed(), true, 1),
        ] {
            let made = Made::load(&store).unwrap();
            let mut locked = made.lock().await;
            let create = async {
                assert_eq!(on_disk(&store), 1, "a kill may come now");
                created.clone()
            };
            let result = locked.create(&name, create, async { is_there }).await;
            assert_eq!(result, created.map(drop));
            assert_eq!((on_disk(&store), usize::from(locked.contains(&name))), (noted, noted));
            locked.remove(&name).await.unwrap();
            assert_eq!(on_disk(&store), 0);
        }
    }

    #[tokio::test]
    async fn a_network_that_cannot_be_noted_is_not_created() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        std::fs::create_dir_all(dir.path().join(format!("{FILE}.new/x"))).unwrap();
        let made = Made::load(&store).unwrap();
        let mut locked = made.lock().await;
        let name: NetworkName = "shop".parse().unwrap();
        let mut is_created = false;
        let create = async {
            is_created = true;
            Ok(true)
        };
        locked.create(&name, create, async { false }).await.unwrap_err();
        assert!(!is_created && !locked.contains(&name));
    }
}
