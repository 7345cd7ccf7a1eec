//! Docker's events. An event says only that something has changed; another service then asks Docker. So an event that
//! is lost, or comes twice, does no harm, and what is kept of events has a limit.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;
use weft_api::DockerStatus;
use weft_container::{DockerChange, DockerEvent, DockerEvents, DockerFailure};

use crate::services::supervisor::Pulse;
use crate::timestamp;

/// The first pause before an engine is asked again, in milliseconds; doubles each time.
const RETRY_FIRST_MS: u64 = 250;
/// The longest such pause, in milliseconds. An engine that answered for longer than this is asked again after the
/// first pause.
const RETRY_MAX_MS: u64 = 5_000;
/// Changed containers that are remembered; of more it is known only that there were some.
const CONTAINERS_MAX: usize = 1_024;

/// What Docker's events have told, and whether they are followed.
#[derive(Default)]
pub(super) struct Events {
    changes: Mutex<Changes>,
    bell: Notify,
    state: Mutex<Option<State>>,
}

/// What has changed in Docker since it was looked at last.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// Containers of `weft attach`, by their ids.
    pub(super) containers: BTreeSet<String>,
    /// Any of them may have changed.
    pub(super) all: bool,
}

struct State {
    /// Why they are not followed.
    reason: Option<String>,
    since: SystemTime,
}

impl Events {
    /// For `weft status`; `None` where Docker is of no concern.
    pub(super) fn status(&self) -> Option<DockerStatus> {
        let state = self.state();
        state.as_ref().map(|State { reason, since }| DockerStatus {
            events: if reason.is_none() { FOLLOWED } else { NOT_FOLLOWED }.into(),
            reason: reason.clone(),
            since: timestamp::format(*since),
        })
    }

    /// Waits until something has changed; networks, or names of containers on them, are in no list of changes.
    pub(super) async fn changed(&self) {
        self.bell.notified().await;
    }

    /// The containers that have changed; they count as looked at.
    pub(super) fn take(&self) -> Changes {
        std::mem::take(&mut *self.changes())
    }

    /// A container could not be looked at: it stays among those that have changed.
    pub(super) fn keep(&self, container: &str) {
        self.changes().add(container);
    }

    /// Follows an engine's events, for as long as it is polled. `driver` is the name of Weft's driver there, and
    /// `is_attached` says whether `weft attach` has attached a container.
    pub(super) async fn follow(
        &self,
        engine: &Path,
        driver: &str,
        is_attached: impl Fn(&str) -> bool,
        pulse: &Pulse,
    ) {
        let mut pause_ms = RETRY_FIRST_MS;
        loop {
            let begun = Instant::now();
            let failure = match DockerEvents::open(engine).await {
                Ok(mut events) => {
                    self.set_state(None);
                    // Whatever happened before is told by none of them.
                    self.changes().all = true;
                    self.bell.notify_one();
                    loop {
                        match pulse.wait(events.next()).await {
                            Ok(event) => self.take_in(event, driver, &is_attached),
                            Err(failure) => break failure,
                        }
                    }
                }
                Err(failure) => failure,
            };
            self.set_state(Some(&failure));
            if begun.elapsed() > Duration::from_millis(RETRY_MAX_MS) {
                pause_ms = RETRY_FIRST_MS;
            }
            pulse.wait(tokio::time::sleep(Duration::from_millis(pause_ms))).await;
            pause_ms = (pause_ms * 2).min(RETRY_MAX_MS);
        }
    }

    fn take_in(&self, event: DockerEvent, driver: &str, is_attached: impl Fn(&str) -> bool) {
        let DockerEvent { container, change } = event;
        let is_attached = is_attached(&container);
        if is_attached {
            self.changes().add(&container);
        }
        let is_on_network = match &change {
            DockerChange::Started => false,
            DockerChange::Renamed => true,
            DockerChange::Connected { driver: of } => of == driver,
        };
        if is_attached || is_on_network {
            self.bell.notify_one();
        }
    }

    fn changes(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whether events are followed. The time stays that of the first such moment.
    fn set_state(&self, failure: Option<&DockerFailure>) {
        let reason = failure.map(ToString::to_string);
        let mut state = self.state();
        match &mut *state {
            Some(known) if known.reason.is_some() == reason.is_some() => known.reason = reason,
            known => {
                match &reason {
                    None => tracing::info!("Docker's events are followed"),
                    Some(reason) => tracing::info!(reason, "Docker's events are not followed"),
                }
                *known = Some(State { reason, since: SystemTime::now() });
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Changes {
    fn add(&mut self, container: &str) {
        if self.all || self.containers.len() >= CONTAINERS_MAX {
            *self = Self { all: true, ..Self::default() };
            return;
        }
        self.containers.insert(container.to_owned());
    }
}

/// The values of [`DockerStatus::events`].
const FOLLOWED: &str = "followed";
const NOT_FOLLOWED: &str = "not followed";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn tell(events: &Events, container: &str, change: DockerChange) {
        let event = DockerEvent { container: container.to_owned(), change };
        events.take_in(event, "weft", |id| id.starts_with("ours"));
    }

    /// Whether the bell has rung, and what has changed.
    async fn taken(events: &Events) -> (bool, Changes) {
        let rung = tokio::time::timeout(Duration::from_millis(1), events.changed()).await;
        (rung.is_ok(), events.take())
    }

    #[tokio::test(start_paused = true)]
    async fn events_of_others_change_nothing() {
        let events = Events::default();
        tell(&events, "other", DockerChange::Started);
        tell(&events, "other", DockerChange::Connected { driver: "bridge".into() });
        assert_eq!(taken(&events).await, (false, Changes::default()));
        for change in [DockerChange::Renamed, DockerChange::Connected { driver: "weft".into() }] {
            tell(&events, "other", change);
            assert_eq!(taken(&events).await, (true, Changes::default()));
        }
        tell(&events, "ours", DockerChange::Started);
        let containers = BTreeSet::from(["ours".to_owned()]);
        assert_eq!(taken(&events).await, (true, Changes { containers, all: false }));
        assert_eq!(taken(&events).await, (false, Changes::default()));
    }

    #[test]
    fn a_flood_of_events_takes_no_more_room() {
        let events = Events::default();
        for number in 0..CONTAINERS_MAX {
            tell(&events, &format!("ours{number}"), DockerChange::Started);
        }
        assert_eq!(events.changes().containers.len(), CONTAINERS_MAX);
        for _ in 0..2 {
            tell(&events, "ours", DockerChange::Started);
            assert_eq!(*events.changes(), Changes { all: true, ..Changes::default() });
        }
    }

    #[test]
    fn the_state_says_since_when_and_the_latest_reason() {
        let events = Events::default();
        assert_eq!(events.status(), None);
        let gone = DockerFailure::Ended { socket: "/run/docker.sock".into() };
        events.set_state(Some(&gone));
        let first = events.state().as_ref().unwrap().since;
        events.set_state(Some(&DockerFailure::NoSuchContainer));
        assert_eq!(events.state().as_ref().unwrap().since, first);
        let status = events.status().unwrap();
        assert_eq!(status.events, NOT_FOLLOWED);
        assert_eq!(status.reason, Some(DockerFailure::NoSuchContainer.to_string()));
        events.set_state(None);
        let status = events.status().unwrap();
        assert_eq!((status.events.as_str(), status.reason), (FOLLOWED, None));
        assert!(events.state().as_ref().unwrap().since > first);
    }
}
