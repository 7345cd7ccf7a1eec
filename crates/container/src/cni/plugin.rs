//! Obeys a request: asks the daemon, within limits of time, and does without it where that is possible.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;
use tokio::time::{Instant, timeout, timeout_at};

use super::{
    daemon::{Attach, Checked, Daemon, DaemonError, Detach, NamespaceFile, Readiness, Refusal},
    environment::NETNS,
    error::{CniError, Code},
    merge::merge,
    request::{Action, Add, Check, Del, Gc, Rejected, Request},
    result::CniResult,
    tombstone::{Tombstone, Tombstones},
    version::Version,
};
use crate::sandbox::Identify;

/// Limit for the daemon's part of ADD, in milliseconds. A runtime waits for an ADD under a lock that its
/// health check takes too (containerd #4666), so all of ADD takes at most ten seconds.
pub const ATTACH_TIMEOUT_MS: u64 = 8_000;
/// Limit for undoing an ADD that failed, in milliseconds.
pub const UNDO_TIMEOUT_MS: u64 = 1_000;
/// Limit for the daemon's part of DEL, in milliseconds.
pub const DETACH_TIMEOUT_MS: u64 = 5_000;
/// Limit for removing an interface without the daemon, in milliseconds.
pub const UNLINK_TIMEOUT_MS: u64 = 900;
/// Limit for CHECK, in milliseconds.
pub const CHECK_TIMEOUT_MS: u64 = 5_000;
/// Limit for STATUS, in milliseconds.
pub const STATUS_TIMEOUT_MS: u64 = 2_000;
/// Limit for all of GC, in milliseconds.
pub const GC_TIMEOUT_MS: u64 = 30_000;
/// Most failures of a GC that its error lists.
const GC_FAILURES_LISTED: usize = 10;

/// The plugin's surroundings.
pub struct Host<'a, D, U> {
    /// The daemon.
    pub daemon: &'a D,
    /// Removes Weft's interface from a namespace, without the daemon. It must leave an interface that is
    /// not Weft's, and succeed where there is none.
    pub unlink: U,
    /// DELs for a daemon that is down.
    pub tombstones: Tombstones,
    /// The plugin's own network namespace, such as `/proc/self/ns/net`.
    pub own_namespace: PathBuf,
    /// Inspects a namespace's file.
    pub identify: Identify,
    /// When this process started, by [`now_ns`].
    pub started_ns: u64,
    /// The machine's boot id.
    pub boot: String,
}

/// The plugin's output and exit code.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// For standard output; empty for none.
    pub stdout: String,
    /// For standard error, a line each.
    pub notes: Vec<String>,
    /// The exit code.
    pub exit_code: u8,
}

impl Outcome {
    fn success(stdout: String) -> Self {
        Self { stdout, ..Self::default() }
    }

    /// An error, as the specification wants it.
    #[must_use]
    pub fn failure(version: Version, error: &CniError) -> Self {
        Self { stdout: error.to_json(version), notes: vec![error.to_string()], exit_code: 1 }
    }
}

impl From<Rejected> for Outcome {
    fn from(rejected: Rejected) -> Self {
        Self::failure(rejected.version, &rejected.error)
    }
}

/// Nanoseconds since the machine's start, the same for each of its processes. Call it first thing.
#[must_use]
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (seconds, nanoseconds) = (now.tv_sec.max(0), now.tv_nsec.max(0));
    seconds.unsigned_abs().saturating_mul(1_000_000_000).saturating_add(nanoseconds.unsigned_abs())
}

/// Obeys a request.
pub async fn execute<D, U>(request: Request, host: &Host<'_, D, U>) -> Outcome
where
    D: Daemon,
    U: AsyncFn(&Path, &str) -> io::Result<()>,
{
    let version = request.version;
    let mut notes = Vec::new();
    let done = match request.action {
        Action::Add(add) => {
            host.add(version, *add, &mut notes).await.map(|result| result.to_json())
        }
        Action::Del(del) => {
            host.release(&del, DETACH_TIMEOUT_MS, &mut notes).await;
            Ok(String::new())
        }
        Action::Check(check) => host.check(&check).await.map(|()| String::new()),
        Action::Gc(gc) => host.gc(gc).await.map(|()| String::new()),
        Action::Status(network) => host.status(&network).await.map(|()| String::new()),
        Action::Version => Ok(versions(version)),
    };
    let mut outcome = match done {
        Ok(stdout) => Outcome::success(stdout),
        Err(error) => Outcome::failure(version, &error),
    };
    outcome.notes.extend(notes);
    outcome
}

impl<D, U> Host<'_, D, U>
where
    D: Daemon,
    U: AsyncFn(&Path, &str) -> io::Result<()>,
{
    async fn add(
        &self,
        version: Version,
        add: Add,
        notes: &mut Vec<String>,
    ) -> Result<CniResult, CniError> {
        let Add { key, namespace, wishes, dns, previous } = add;
        let file = self.namespace(&namespace)?;
        let attach = Attach { key, started_ns: self.started_ns, namespace: file, wishes };
        match limited(ATTACH_TIMEOUT_MS, self.daemon.attach(&attach)).await {
            Ok(attached) => {
                let place = (namespace.as_path(), attach.key.interface.as_str());
                Ok(merge(version, previous, &attached, dns.as_ref(), place))
            }
            Err(error) => {
                // A daemon that refuses has changed nothing.
                if matches!(error, DaemonError::Interrupted(_)) {
                    let del = Del { target: attach.key.into(), namespace: Some(namespace) };
                    self.release(&del, UNDO_TIMEOUT_MS, notes).await;
                }
                Err(error_of("cannot attach the container", error))
            }
        }
    }

    /// The container's namespace, which must not be the host's.
    fn namespace(&self, path: &Path) -> Result<NamespaceFile, CniError> {
        let shown = path.display();
        let (device, inode) = (self.identify)(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                let why = format!("there is no namespace {shown}: the container has ended");
                CniError::new(Code::UnknownContainer, "no such container", why)
            }
            _ => {
                CniError::new(Code::Io, "cannot inspect the namespace", format!("{shown}: {error}"))
            }
        })?;
        if self.is_own((device, inode)) {
            let why = format!("{NETNS} {shown} is the host's own network namespace");
            return Err(CniError::new(Code::InvalidEnvironment, format!("invalid {NETNS}"), why));
        }
        Ok(NamespaceFile { path: path.to_owned(), device, inode })
    }

    fn is_own(&self, identity: (u64, u64)) -> bool {
        (self.identify)(&self.own_namespace).is_ok_and(|own| own == identity)
    }

    /// Ends attachments; without the daemon as far as that is possible. A node could not be drained if
    /// this failed, so its troubles are notes.
    async fn release(&self, del: &Del, timeout_ms: u64, notes: &mut Vec<String>) {
        let detach = Detach { target: del.target.clone(), started_ns: self.started_ns };
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let Err(error) = limited(timeout_ms, self.daemon.detach(&detach)).await else { return };
        notes.push(format!("{error}; going on without the daemon"));
        // Before anything that takes time, since the runtime may end this process.
        let tombstone = Tombstone {
            target: detach.target.clone(),
            started_ns: self.started_ns,
            boot: self.boot.clone(),
        };
        let file = self.tombstones.leave(&tombstone);
        if let Err(error) = &file {
            notes.push(format!(
                "cannot note the DEL for the daemon: {error}; it finds out itself once the namespace is gone"
            ));
        }
        if let Err(why) = self.unlink_alone(del).await {
            notes.push(format!("cannot remove {} of the container: {why}", del.target.interface));
        }
        // A daemon that started meanwhile may have read the tombstones before.
        let deadline = deadline.min(Instant::now() + Duration::from_millis(UNDO_TIMEOUT_MS));
        if matches!(error, DaemonError::Unreachable(_))
            && matches!(timeout_at(deadline, self.daemon.detach(&detach)).await, Ok(Ok(())))
            && let Ok(file) = &file
            && let Err(error) = self.tombstones.remove(file)
        {
            notes.push(format!("cannot remove {}: {error}", file.display()));
        }
    }

    /// Removes the interface, unless the namespace is gone or the host's own.
    async fn unlink_alone(&self, del: &Del) -> Result<(), String> {
        let Some(namespace) = &del.namespace else { return Ok(()) };
        match (self.identify)(namespace) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(format!("{}: {error}", namespace.display())),
            Ok(identity) if self.is_own(identity) => return Ok(()),
            Ok(_) => {}
        }
        let unlinked = (self.unlink)(namespace, &del.target.interface);
        match timeout(Duration::from_millis(UNLINK_TIMEOUT_MS), unlinked).await {
            Ok(done) => done.map_err(|error| error.to_string()),
            Err(_) => Err(format!("not done within {UNLINK_TIMEOUT_MS} ms")),
        }
    }

    async fn check(&self, check: &Check) -> Result<(), CniError> {
        self.namespace(&check.namespace)?;
        let answer = limited(CHECK_TIMEOUT_MS, self.daemon.check(&check.key)).await;
        let checked = answer.map_err(|error| error_of("cannot check the attachment", error))?;
        let missing = missing(check, &checked);
        if missing.is_empty() {
            return Ok(());
        }
        let msg = format!("the attachment is not whole: {}", check.key);
        Err(CniError::new(Code::CheckFailed, msg, missing.join("; ")))
    }

    async fn gc(&self, gc: Gc) -> Result<(), CniError> {
        let Some(valid) = gc.valid else { return Ok(()) };
        let valid: BTreeSet<(String, String)> =
            valid.into_iter().map(|entry| (entry.container, entry.interface)).collect();
        let deadline = Instant::now() + Duration::from_millis(GC_TIMEOUT_MS);
        let failed = |error| error_of("cannot collect garbage", error);
        let listed = limited_at(deadline, self.daemon.attachments()).await.map_err(failed)?;
        let stale = listed.into_iter().filter(|listed| {
            // The runtime could not list what an ADD has made since it counted.
            listed.key.network == gc.network
                && listed.started_ns < self.started_ns
                && !valid.contains(&(listed.key.container.clone(), listed.key.interface.clone()))
        });
        let mut failures = Vec::new();
        for listed in stale {
            let name = listed.key.to_string();
            let detach = Detach { target: listed.key.into(), started_ns: self.started_ns };
            if let Err(error) = limited_at(deadline, self.daemon.detach(&detach)).await {
                failures.push(format!("{name}: {error}"));
            }
        }
        if failures.is_empty() {
            return Ok(());
        }
        let msg = format!("{} attachments not removed", failures.len());
        failures.truncate(GC_FAILURES_LISTED);
        Err(CniError::new(Code::GcIncomplete, msg, failures.join("; ")))
    }

    async fn status(&self, network: &str) -> Result<(), CniError> {
        let unavailable = |code, why: String| Err(CniError::new(code, "Weft is not ready", why));
        match limited(STATUS_TIMEOUT_MS, self.daemon.status(network)).await {
            Ok(Readiness::Ready) => Ok(()),
            Ok(Readiness::Unready(why)) => unavailable(Code::Unavailable, why),
            Ok(Readiness::CutOff(why)) => unavailable(Code::CutOff, why),
            Err(error) => unavailable(Code::Unavailable, error.to_string()),
        }
    }
}

/// Resources of the attachment that ADD's result still lists, and that are gone. A later plugin of the
/// list may have taken an address out of the result, and changed MAC or MTU.
fn missing(check: &Check, checked: &Checked) -> Vec<String> {
    let mut missing = Vec::new();
    if !checked.interface_is_whole {
        missing.push(format!("the interface {} is missing or not plugged in", check.key.interface));
    }
    let listed = check.previous.addresses_of(&check.key.interface);
    for (address, present) in &checked.addresses {
        if !present && listed.contains(address) {
            missing.push(format!("the address {address} is missing"));
        }
    }
    let has_any_of_ours = checked.addresses.iter().any(|(address, _)| listed.contains(address));
    if !has_any_of_ours && !listed.is_empty() && !checked.addresses.is_empty() {
        let listed = listed.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        missing.push(format!("Weft has given none of the addresses in prevResult ({listed})"));
    }
    missing
}

async fn limited<T>(
    limit_ms: u64,
    answer: impl Future<Output = Result<T, DaemonError>>,
) -> Result<T, DaemonError> {
    let limit = Duration::from_millis(limit_ms);
    let late = |_| DaemonError::Interrupted(format!("it did not answer within {limit_ms} ms"));
    timeout(limit, answer).await.map_err(late)?
}

async fn limited_at<T>(
    deadline: Instant,
    answer: impl Future<Output = Result<T, DaemonError>>,
) -> Result<T, DaemonError> {
    let late = |_| DaemonError::Interrupted(format!("GC took longer than {GC_TIMEOUT_MS} ms"));
    timeout_at(deadline, answer).await.map_err(late)?
}

/// The error of a command that the daemon did not obey.
fn error_of(msg: &str, error: DaemonError) -> CniError {
    let (refusal, why) = match error {
        DaemonError::Unreachable(_) | DaemonError::Interrupted(_) => {
            return CniError::new(Code::TryAgainLater, msg, error.to_string());
        }
        DaemonError::Refused(refusal, why) => (refusal, why),
    };
    let code = match refusal {
        Refusal::Busy => Code::TryAgainLater,
        Refusal::Invalid => Code::InvalidConfig,
        Refusal::Unsupported { field, value } => {
            let msg = format!("unsupported field {field}: {value}");
            return CniError::new(Code::UnsupportedField, msg, why);
        }
        Refusal::Unknown => Code::UnknownContainer,
        Refusal::InterfaceExists => Code::InterfaceExists,
        Refusal::NoAddress => Code::NoAddress,
        Refusal::Deleted => Code::Deleted,
        Refusal::Internal => Code::Internal,
    };
    CniError::new(code, msg, why)
}

fn versions(version: Version) -> String {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Versions {
        cni_version: &'static str,
        supported_versions: [&'static str; 5],
    }
    let versions = Versions {
        cni_version: version.as_str(),
        supported_versions: Version::ALL.map(Version::as_str),
    };
    // Texts always serialize.
    serde_json::to_string(&versions).unwrap_or_default()
}
