//! Requests of the CNI plugin, and the DELs and ended containers that no request tells of.
//!
//! A DEL succeeds with the daemon down: the plugin leaves a tombstone. The API listens first, then the
//! tombstones are read, then the first ADD is served. So each DEL arrives in one way or the other.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use weft_api::call::Nothing;
use weft_api::{ApiError, ErrorKind};
use weft_container::cni::{
    Answer, Attach, Attached, BOOT_ID_FILE, Checked, Deletions, Detach, Key, Listed, Readiness,
    Reaper, Refusal, Tombstones, boot_id, now_ns,
};

use super::attach::Attachments;
use super::supervisor::Pulse;
use crate::config::Settings;

/// The interval between two looks at tombstones and namespaces, in seconds.
const LOOK_EVERY_S: u64 = 30;

/// The state of the CNI face, which outlives restarts of its service.
pub(crate) struct Cni {
    attachments: Arc<Attachments>,
    deletions: Mutex<Deletions>,
    runtime_dir: PathBuf,
    /// Whether the tombstones of the time without a daemon have been read.
    caught_up: watch::Sender<bool>,
}

impl Cni {
    pub(crate) fn new(settings: &Settings, attachments: Arc<Attachments>) -> Self {
        Self {
            attachments,
            deletions: Mutex::default(),
            runtime_dir: settings.runtime_dir.clone(),
            caught_up: watch::Sender::new(false),
        }
    }

    /// Serves ADD.
    pub(crate) async fn attach(&self, attach: Attach) -> Answer<Attached> {
        let _ = self.caught_up.subscribe().wait_for(|caught_up| *caught_up).await;
        let network = match self.attachments.network(Some(&attach.wishes.network)).await {
            Ok(network) => network,
            Err(error) => return refused(&error),
        };
        let Some(ranges) = self.attachments.ranges(network.vni).await else { return stopping() };
        let (key, started_ns) = (attach.key.clone(), attach.started_ns);
        let may = || self.with_deletions(|deletions| deletions.allows(&key, started_ns, now_ns()));
        answer(self.attachments.attach_cni(attach, (network, &ranges), may).await)
    }

    /// Serves DEL.
    pub(crate) async fn detach(&self, detach: Detach) -> Answer<Nothing> {
        // Noted first, so that an ADD that waits for its turn does not come after it.
        self.with_deletions(|deletions| {
            deletions.note(detach.target.clone(), detach.started_ns, now_ns());
        });
        answer(self.attachments.detach_cni(&detach).await.map(|()| Nothing {}))
    }

    /// Serves CHECK.
    pub(crate) async fn check(&self, key: Key) -> Answer<Checked> {
        answer(self.attachments.check_cni(&key).await)
    }

    /// Serves GC's question.
    pub(crate) async fn list(&self) -> Vec<Listed> {
        self.attachments.list_cni().await
    }

    /// Serves STATUS.
    pub(crate) async fn status(&self, network: &str) -> Readiness {
        if !self.attachments.is_restored() {
            let text = "the containers of the last run are being attached again";
            return Readiness::Unready(text.to_owned());
        }
        let network = match self.attachments.network(Some(network)).await {
            Ok(network) => network,
            Err(error) => return Readiness::Unready(error.error),
        };
        match self.attachments.ranges(network.vni).await {
            Some(ranges) => ranges.waiting.map_or(Readiness::Ready, Readiness::Unready),
            None => Readiness::Unready("weft is stopping".to_owned()),
        }
    }

    fn with_deletions<T>(&self, act: impl FnOnce(&mut Deletions) -> T) -> T {
        act(&mut self.deletions.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Carries out the DELs that the plugin has left as files.
    async fn read_tombstones(&self) {
        let boot = match boot_id(BOOT_ID_FILE.as_ref()) {
            Ok(boot) => boot,
            Err(error) => {
                tracing::warn!(%error, "cannot tell which DELs of CNI runtimes are outdated");
                return;
            }
        };
        let tombstones = Tombstones::of(&self.runtime_dir);
        let found = match tombstones.read(&boot) {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(%error, "cannot read the DELs that CNI runtimes sent without a daemon");
                return;
            }
        };
        for note in found.notes {
            tracing::warn!(note, "a DEL of a CNI runtime");
        }
        for (file, tombstone) in found.tombstones {
            let (target, started_ns) = (tombstone.target, tombstone.started_ns);
            if let Answer::Refused(_, why) = self.detach(Detach { target, started_ns }).await {
                tracing::warn!(why, "a DEL of a CNI runtime is not carried out yet");
                continue;
            }
            if let Err(error) = tombstones.remove(&file) {
                tracing::warn!(%error, file = %file.display(), "cannot remove a tombstone");
            }
        }
    }

    /// Ends attachments whose namespace has been gone for long enough: a DEL may never come.
    async fn reap(&self, reaper: &mut Reaper<(Key, u64)>) {
        let seen = self.attachments.look_at_cni().await;
        for (key, started_ns) in reaper.look(Instant::now(), seen) {
            tracing::info!(%key, "its namespace is gone and no DEL came: its addresses are free");
            let detach = Detach { target: key.into(), started_ns };
            if let Answer::Refused(_, why) = self.detach(detach).await {
                tracing::warn!(why, "an attachment whose container has ended remains");
            }
        }
    }
}

/// Follows tombstones and ended containers, for as long as it is polled.
pub(crate) async fn serve(cni: Arc<Cni>, pulse: Pulse) {
    let mut reaper = Reaper::default();
    loop {
        cni.read_tombstones().await;
        cni.caught_up.send_replace(true);
        cni.reap(&mut reaper).await;
        pulse.wait(tokio::time::sleep(Duration::from_secs(LOOK_EVERY_S))).await;
    }
}

fn answer<T>(result: Result<T, (Refusal, String)>) -> Answer<T> {
    match result {
        Ok(done) => Answer::Done(done),
        Err((refusal, why)) => Answer::Refused(refusal, why),
    }
}

fn refused<T>(error: &ApiError) -> Answer<T> {
    let refusal = match error.kind {
        ErrorKind::BadRequest | ErrorKind::NotFound | ErrorKind::Conflict => Refusal::Invalid,
        ErrorKind::Unavailable | ErrorKind::Internal => Refusal::Busy,
    };
    Answer::Refused(refusal, error.error.clone())
}

fn stopping<T>() -> Answer<T> {
    Answer::Refused(Refusal::Busy, "weft is stopping; launch it again".to_owned())
}
