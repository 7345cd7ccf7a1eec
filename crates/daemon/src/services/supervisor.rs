//! Services run in separate tasks, beside the core. The supervisor restarts a service that panics or hangs,
//! and `weft status` names it. Neither the core nor the data path waits for a service.

use std::any::Any;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinHandle};
use weft_api::ServiceStatus;
use weft_io::faults;

use crate::timestamp;

/// The longest time a service may work without waiting for its next input, in seconds. Restoring a thousand
/// containers takes one second.
const HANG_LIMIT_S: u64 = 120;
/// The interval between checks of services, in milliseconds.
const LOOK_MS: u64 = 1_000;
/// The time that a hung service has to end, in milliseconds.
const ABORT_LIMIT_MS: u64 = 1_000;
/// First pause before a service is restarted, in milliseconds; doubles each time.
const RESTART_FIRST_MS: u64 = 1_000;
/// Longest such pause, in milliseconds. A service that ran longer than this starts with the first pause again.
const RESTART_MAX_MS: u64 = 60_000;

/// The service runs; also the state after a restart.
pub(crate) const RUNNING: &str = "running";
/// The service has failed and restarts soon.
pub(crate) const RESTARTING: &str = "restarting";
/// The service hangs and cannot be ended.
pub(crate) const HANGS: &str = "hangs";

/// Starts services and restarts them.
pub(crate) struct Supervisor {
    health: Health,
    /// The runtime for services: a kernel call that blocks one of its threads does not block the core.
    runtime: Handle,
    tasks: Vec<JoinHandle<()>>,
}

impl Supervisor {
    pub(crate) const fn new(runtime: Handle, health: Health) -> Self {
        Self { health, runtime, tasks: Vec::new() }
    }

    /// Runs a service until it ends by itself.
    pub(crate) fn start<F>(
        &mut self,
        name: &'static str,
        service: impl Fn(Pulse) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let health = self.health.clone();
        // Not on the services' runtime, whose threads a service may block.
        let runtime = self.runtime.clone();
        self.tasks.push(tokio::spawn(keep(name, service, health, runtime)));
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// The health of all services.
#[derive(Clone, Default)]
pub(crate) struct Health(Arc<Mutex<BTreeMap<&'static str, Fared>>>);

#[derive(Clone)]
struct Fared {
    state: &'static str,
    reason: Option<String>,
    since: SystemTime,
    restarts: u64,
}

impl Health {
    /// All services, by name.
    pub(crate) fn list(&self) -> Vec<ServiceStatus> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let line = |(name, fared): (&&str, &Fared)| ServiceStatus {
            name: (*name).to_owned(),
            state: fared.state.to_owned(),
            reason: fared.reason.clone(),
            since: timestamp::format(fared.since),
            restarts: fared.restarts,
        };
        all.iter().map(line).collect()
    }

    fn set(&self, name: &'static str, state: &'static str, reason: Option<String>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = SystemTime::now();
        let fresh = Fared { state, reason: None, since, restarts: 0 };
        let fared = all.entry(name).or_insert(fresh);
        fared.restarts += u64::from(fared.state == RESTARTING && state == RUNNING);
        (fared.state, fared.since) = (state, since);
        // The last reason stays for later queries.
        if reason.is_some() {
            fared.reason = reason;
        }
    }
}

/// A service's proof of progress.
#[derive(Clone)]
pub(crate) struct Pulse {
    name: &'static str,
    again: bool,
    begun: Instant,
    /// Milliseconds after `begun` at which it started to work; [`WAITING`] while it waits.
    busy_since: Arc<AtomicU64>,
}

const WAITING: u64 = u64::MAX;

impl Pulse {
    fn new(name: &'static str, again: bool) -> Self {
        Self { name, again, begun: Instant::now(), busy_since: Arc::default() }
    }

    /// Whether the service was restarted: it may have missed events.
    pub(crate) const fn is_again(&self) -> bool {
        self.again
    }

    fn beat(&self) {
        let now = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(WAITING - 1);
        self.busy_since.store(now, Ordering::Relaxed);
    }

    /// Waits for the service's next input without a limit. Everything else that a service does has a limit.
    pub(crate) async fn wait<T>(&self, input: impl Future<Output = T>) -> T {
        let waits = Waits(self);
        self.busy_since.store(WAITING, Ordering::Relaxed);
        let got = input.await;
        drop(waits);
        self.fail_if_asked().await;
        got
    }

    fn busy_for(&self) -> Duration {
        match self.busy_since.load(Ordering::Relaxed) {
            WAITING => Duration::ZERO,
            since => self.begun.elapsed().saturating_sub(Duration::from_millis(since)),
        }
    }

    /// Fails as a test asks, in builds for tests only.
    async fn fail_if_asked(&self) {
        let is_asked = |fault| faults::asked(fault).is_some_and(|name| name == self.name);
        assert!(!is_asked("panic"), "a test asked for it");
        if is_asked("hang") {
            std::future::pending::<()>().await;
        }
        while is_asked("block") {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

tokio::task_local! {
    /// The pulse of the service that this task runs.
    static PULSE: Pulse;
}

/// Waits for another part of the daemon. In a service, the wait does not count as work.
pub(crate) async fn wait<T>(other: impl Future<Output = T>) -> T {
    match PULSE.try_with(Clone::clone) {
        Ok(pulse) => {
            let _waits = Waits(&pulse);
            pulse.busy_since.store(WAITING, Ordering::Relaxed);
            other.await
        }
        Err(_) => other.await,
    }
}

/// Restarts the time limit of the service that calls this, before each of its tasks.
pub(crate) fn beat() {
    let _ = PULSE.try_with(Pulse::beat);
}

/// Marks the end of a wait, also when the wait is cancelled.
struct Waits<'a>(&'a Pulse);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.beat();
    }
}

/// How one run of a service ended.
enum Ending {
    Done,
    Failed(String),
    Hangs(String),
}

async fn keep<F>(name: &'static str, service: impl Fn(Pulse) -> F, health: Health, runtime: Handle)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut pause_ms = RESTART_FIRST_MS;
    for run in 0_u64.. {
        let begun = Instant::now();
        health.set(name, RUNNING, None);
        let pulse = Pulse::new(name, run > 0);
        let service = PULSE.scope(pulse.clone(), service(pulse.clone()));
        let mut task = Aborted(runtime.spawn(service));
        let reason = match watch(&mut task, &pulse).await {
            Ending::Done => return,
            Ending::Failed(reason) => reason,
            Ending::Hangs(reason) => {
                health.set(name, HANGS, Some(reason.clone()));
                tracing::error!(service = name, reason, "a service hangs and cannot be stopped");
                // The call that blocks its thread may return later.
                let _ = task.await;
                reason
            }
        };
        if begun.elapsed() > Duration::from_millis(RESTART_MAX_MS) {
            pause_ms = RESTART_FIRST_MS;
        }
        tracing::error!(service = name, reason, pause_ms, "a service failed; restarting it");
        health.set(name, RESTARTING, Some(reason));
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        pause_ms = (pause_ms * 2).min(RESTART_MAX_MS);
    }
}

/// A task that is aborted when its handle is dropped.
pub(crate) struct Aborted<T>(JoinHandle<T>);

impl<T> Aborted<T> {
    pub(crate) const fn new(task: JoinHandle<T>) -> Self {
        Self(task)
    }
}

impl<T> Future for Aborted<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context)
    }
}

impl<T> Drop for Aborted<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn watch(task: &mut Aborted<()>, pulse: &Pulse) -> Ending {
    let look = Duration::from_millis(LOOK_MS);
    let busy = loop {
        match tokio::time::timeout(look, &mut *task).await {
            Ok(Ok(())) => return Ending::Done,
            Ok(Err(error)) => return Ending::Failed(told(error)),
            Err(_) if pulse.busy_for() >= hang_limit() => break pulse.busy_for(),
            Err(_) => {}
        }
    };
    let reason = format!("made no progress for {} s", busy.as_secs());
    task.0.abort();
    match tokio::time::timeout(Duration::from_millis(ABORT_LIMIT_MS), &mut *task).await {
        Ok(_) => Ending::Failed(reason),
        Err(_) => Ending::Hangs(reason),
    }
}

fn hang_limit() -> Duration {
    let asked = faults::asked("hang-limit-ms").and_then(|ms| ms.parse().ok());
    asked.map_or(Duration::from_secs(HANG_LIMIT_S), Duration::from_millis)
}

fn told(error: JoinError) -> String {
    let text = |panic: &(dyn Any + Send)| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned())
    };
    match error.try_into_panic() {
        Ok(panic) => format!("panicked: {}", text(&*panic).unwrap_or_default()),
        Err(_) => "was ended".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// The status of a service once that holds.
    async fn fares(health: &Health, wanted: impl Fn(&ServiceStatus) -> bool) -> ServiceStatus {
        for _ in 0..500 {
            if let Some(found) = health.list().into_iter().find(&wanted) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{:?}", health.list());
    }

    #[tokio::test]
    async fn a_service_that_panics_is_named_and_runs_again() {
        let health = Health::default();
        let mut supervisor = Supervisor::new(Handle::current(), health.clone());
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        supervisor.start("fragile", move |pulse| {
            let run = counted.fetch_add(1, Ordering::Relaxed);
            async move {
                pulse.wait(tokio::task::yield_now()).await;
                assert!(run > 0, "the {run}th run");
                pulse.wait(std::future::pending::<()>()).await;
            }
        });
        let failed = fares(&health, |it| it.state == RESTARTING).await;
        assert_eq!(failed.reason.as_deref(), Some("panicked: the 0th run"));
        let again = fares(&health, |it| it.state == RUNNING).await;
        assert_eq!((again.restarts, again.reason), (1, failed.reason));
        drop(supervisor);
    }

    #[tokio::test]
    async fn a_service_that_waits_is_healthy_and_one_that_never_pauses_hangs() {
        let idle = Pulse::new("idle", false);
        let waits = tokio::spawn({
            let idle = idle.clone();
            async move { idle.wait(std::future::pending::<()>()).await }
        });
        tokio::time::sleep(Duration::from_millis(30)).await;
        assert_eq!(idle.busy_for(), Duration::ZERO);
        let begun = Instant::now();
        waits.abort();
        assert!(waits.await.is_err());
        tokio::time::sleep(Duration::from_millis(10)).await;
        let busy = idle.busy_for();
        // Its wait of 30 ms is not among it.
        let most = begun.elapsed() + Duration::from_millis(1);
        assert!(busy >= Duration::from_millis(10) && busy <= most, "{busy:?} of {most:?}");
    }
}
