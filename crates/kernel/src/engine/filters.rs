//! The engine's nftables tables: the guard, the clamp of segment sizes and the limit of broadcasts. They have
//! a separate task, because `nft` may take many seconds and nothing else may wait for it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;

use super::{PATIENCE_MAX_MS, patience};
use crate::error::KernelError;
use crate::{
    firewall::{
        guard::{Guard, GuardCounters},
        mss::MssClamp,
        nft_watch::NftWatch,
    },
    net::neighbours::MacAddress,
    switch::groups::{GroupCounts, GroupLimit},
};

/// Interval of checks of the tables without a notice of a change, in milliseconds.
const LOOK_MS: u64 = 30_000;
/// Interval of checks for broadcast loops, in milliseconds.
const GROUPS_LOOK_MS: u64 = 10_000;
/// Delay before a check after a failure, in milliseconds.
const RETRY_MS: u64 = 5_000;
/// How long a stop waits for the removal of the tables, in milliseconds.
const FINISH_MS: u64 = 60_000;
/// Capacity of the queue of events for the engine; the task waits while it is full.
const TOLD_QUEUED_MAX: usize = 16;

/// An endpoint's Ethernet address, and the MTU of the path to it in bytes.
pub(super) type Narrow = (MacAddress, u16);

/// The wanted state of the tables.
#[derive(Clone, Default, PartialEq)]
struct Wanted {
    guard: Want,
    trusted: BTreeSet<IpAddr>,
    narrow: Vec<Narrow>,
    /// How many times the clamp was lost with its device.
    clamps_lost: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Want {
    /// The guard stays as it is.
    #[default]
    AsIs,
    /// The guard stands. The number distinguishes successive requests.
    Stands(u64),
    /// The guard is removed. The number distinguishes successive requests.
    Gone(u64),
}

/// An event for the engine.
pub(super) enum Told {
    /// The guard stands as requested by this number.
    Stands(u64),
    /// Another program had changed the guard, and it was written again.
    Restored,
    /// The guard does not stand and cannot be restored.
    Broken(KernelError),
}

/// The last reading of the guard's counters.
#[derive(Clone, Copy, Default)]
struct Seen {
    counters: Option<(GuardCounters, Instant)>,
    /// How long the reading took.
    took: Duration,
}

/// Limits group frames (broadcast and multicast) to peers.
pub(super) struct Limiter {
    /// The limit on a bridge. Beside a datapath, an earlier run may have left a table.
    pub(super) table: GroupLimit,
    /// The counts of a datapath, which limits these frames itself.
    pub(super) datapath: Option<watch::Receiver<GroupCounts>>,
}

impl Limiter {
    async fn ensure(&mut self) -> Result<GroupCounts, KernelError> {
        match &self.datapath {
            Some(counts) => Ok(counts.borrow().clone()),
            None => self.table.ensure().await,
        }
    }
}

/// A handle to the task.
pub(super) struct Filters {
    wanted: watch::Sender<Wanted>,
    told: mpsc::Receiver<Told>,
    reader: GuardReader,
    task: JoinHandle<()>,
    wishes: u64,
    /// The guard stands as last requested, apart from the trusted addresses.
    stands: bool,
}

/// Reads the guard's counters, without waiting for `nft` longer than a moment.
#[derive(Clone)]
pub(super) struct GuardReader {
    seen: watch::Receiver<Seen>,
    groups: watch::Receiver<GroupCounts>,
    look: Arc<Notify>,
}

impl Filters {
    pub(super) fn start(guard: Guard, mss: MssClamp, limit: Limiter) -> Self {
        let (wanted, wishes) = watch::channel(Wanted::default());
        let (teller, told) = mpsc::channel(TOLD_QUEUED_MAX);
        let (shown, seen) = watch::channel(Seen::default());
        let (counted, groups) = watch::channel(GroupCounts::default());
        let look = Arc::new(Notify::new());
        let task = FilterTask {
            guard,
            mss,
            limit,
            counted,
            groups_next: Instant::now(),
            groups_told: None,
            watch: None,
            wanted: wishes,
            told: teller,
            seen: shown,
            look: Arc::clone(&look),
            ensured: None,
            clamps_lost: 0,
            next: Instant::now() + Duration::from_millis(LOOK_MS),
        };
        let reader = GuardReader { seen, groups, look };
        let task = tokio::spawn(task.run());
        Self { wanted, told, reader, task, wishes: 0, stands: false }
    }

    pub(super) fn reader(&self) -> GuardReader {
        self.reader.clone()
    }

    /// Whether the guard stands. If not, requests it, and [`Self::next`] reports the result.
    pub(super) fn guard_stands(&mut self, trusted: &BTreeSet<IpAddr>) -> bool {
        let asked = matches!(self.wanted.borrow().guard, Want::Stands(_));
        if !asked {
            self.wishes += 1;
            let guard = Want::Stands(self.wishes);
            self.wanted.send_modify(|it| (it.guard, it.trusted) = (guard, trusted.clone()));
        }
        self.stands
    }

    /// Peers with these addresses may send and get overlay packets in plain, as soon as it is written.
    pub(super) fn trust(&self, trusted: &BTreeSet<IpAddr>) {
        self.wanted.send_if_modified(|it| {
            let changed = it.trusted != *trusted;
            it.trusted.clone_from(trusted);
            changed
        });
    }

    /// Takes the guard away.
    pub(super) fn remove_guard(&mut self) {
        self.wishes += 1;
        self.stands = false;
        let guard = Want::Gone(self.wishes);
        self.wanted.send_modify(|it| (it.guard, it.trusted) = (guard, BTreeSet::new()));
    }

    /// These endpoints' connections get smaller segments, as soon as it is written.
    pub(super) fn clamp(&self, narrow: Vec<Narrow>) {
        self.wanted.send_if_modified(|it| {
            let changed = it.narrow != narrow;
            it.narrow = narrow;
            changed
        });
    }

    /// The clamp went with its device.
    pub(super) fn clamps_lost(&self) {
        self.wanted.send_modify(|it| it.clamps_lost += 1);
    }

    /// Looks at the tables soon.
    pub(super) fn look(&self) {
        self.reader.look.notify_one();
    }

    /// Waits for news. Cancel safe.
    pub(super) async fn next(&mut self) -> Told {
        loop {
            let Some(told) = self.told.recv().await else { return std::future::pending().await };
            match told {
                Told::Stands(wish) if self.wanted.borrow().guard == Want::Stands(wish) => {
                    self.stands = true;
                }
                // For an earlier request.
                Told::Stands(_) => continue,
                Told::Restored => {}
                Told::Broken(_) => {
                    self.stands = false;
                    self.wanted.send_modify(|it| it.guard = Want::AsIs);
                }
            }
            return told;
        }
    }

    /// Ends the task after it has written the last wanted state.
    pub(super) async fn finish(self) {
        let Self { wanted, mut told, task, .. } = self;
        drop(wanted);
        told.close();
        let limit = Duration::from_millis(FINISH_MS);
        if tokio::time::timeout(limit, task).await.is_err() {
            tracing::warn!("nft is too slow: tables named weft-... may be left");
        }
    }
}

impl GuardReader {
    /// The counters, and how old they are; `None` while there is no guard.
    pub(super) fn last(&self) -> Option<(GuardCounters, Duration)> {
        let seen = *self.seen.borrow();
        seen.counters.map(|(counters, at)| (counters, at.elapsed()))
    }

    /// Of frames to groups, by the last look.
    pub(super) fn groups(&self) -> GroupCounts {
        self.groups.borrow().clone()
    }

    /// Waits a moment for counters of now; then the last that were read have to do. If `nft` was slow the last
    /// time, it does not wait.
    pub(super) async fn refresh(&mut self) {
        let Seen { counters, took } = *self.seen.borrow_and_update();
        self.look.notify_one();
        if counters.is_some() && took < Duration::from_millis(PATIENCE_MAX_MS) {
            let _ = tokio::time::timeout(patience(took), self.seen.changed()).await;
        }
    }
}

struct FilterTask {
    guard: Guard,
    mss: MssClamp,
    limit: Limiter,
    counted: watch::Sender<GroupCounts>,
    groups_next: Instant,
    /// The last reported reason that broadcasts are not limited.
    groups_told: Option<String>,
    watch: Option<NftWatch>,
    wanted: watch::Receiver<Wanted>,
    told: mpsc::Sender<Told>,
    seen: watch::Sender<Seen>,
    look: Arc<Notify>,
    /// The part of the guard that was applied last.
    ensured: Option<(Want, BTreeSet<IpAddr>)>,
    clamps_lost: u64,
    next: Instant,
}

impl FilterTask {
    async fn run(mut self) {
        let mut ends = false;
        while !ends {
            tokio::select! {
                changed = self.wanted.changed() => ends = changed.is_err(),
                result = changed(self.watch.as_mut()) => {
                    if let Err(error) = result {
                        tracing::warn!(%error, "cannot watch nftables; opening the watch again");
                        self.watch = None;
                    }
                }
                () = self.look.notified() => {}
                () = tokio::time::sleep_until(self.next.into()) => {}
                () = tokio::time::sleep_until(self.groups_next.into()), if self.is_guarded() => {
                    self.keep_groups().await;
                    continue;
                }
            }
            self.next = Instant::now() + Duration::from_millis(LOOK_MS);
            let wanted = self.wanted.borrow_and_update().clone();
            self.keep_guard(&wanted).await;
            if ends || matches!(wanted.guard, Want::Stands(_)) {
                self.keep_clamp(&wanted).await;
            }
        }
    }

    async fn keep_guard(&mut self, wanted: &Wanted) {
        match wanted.guard {
            Want::AsIs => self.ensured = None,
            Want::Gone(_) if self.is_done(wanted) => {}
            Want::Gone(_) => {
                if let Err(error) = self.guard.remove().await {
                    tracing::debug!(%error, "no guard to remove");
                }
                if let Err(error) = self.limit.table.remove().await {
                    tracing::debug!(%error, "no limit of broadcasts to remove");
                }
                self.forget_looping();
                self.watch = None;
                self.seen.send_replace(Seen::default());
                self.done(wanted);
            }
            Want::Stands(wish) => {
                if self.watch.is_none() {
                    match self.guard.watch() {
                        Ok(watch) => self.watch = Some(watch),
                        Err(error) => return self.broken(error).await,
                    }
                }
                if self.is_done(wanted) {
                    self.look_at_guard(wanted).await;
                } else {
                    self.ensure_guard(wanted, wish).await;
                }
            }
        }
    }

    /// Checks the guard for changes by other programs. If `nft` times out, the state is unknown and counts as
    /// unchanged.
    async fn look_at_guard(&mut self, wanted: &Wanted) {
        let began = Instant::now();
        match self.guard.look().await {
            Ok((true, counters)) => self.show(counters, began),
            Err(error) if error.is_timeout() => {
                tracing::warn!(%error, "cannot check the guard; assuming that it did not change");
                self.retry();
            }
            Ok((false, _)) | Err(_) => {
                tracing::warn!("another program changed the guard; setting it again");
                self.ensured = None;
                match self.guard.ensure(&list(&wanted.trusted)).await {
                    Ok(_) => {
                        self.done(wanted);
                        let _ = self.told.send(Told::Restored).await;
                        self.look.notify_one();
                    }
                    Err(error) => self.broken(error).await,
                }
            }
        }
    }

    async fn ensure_guard(&mut self, wanted: &Wanted, wish: u64) {
        let stood = matches!(self.ensured, Some((Want::Stands(_), _)));
        match self.guard.ensure(&list(&wanted.trusted)).await {
            Ok(_) => {
                self.done(wanted);
                let _ = self.told.send(Told::Stands(wish)).await;
                self.look.notify_one();
            }
            // It stands; only the exceptions are outdated.
            Err(error) if stood && error.is_timeout() => {
                tracing::warn!(%error, "cannot update the guard's exceptions");
                self.retry();
            }
            Err(error) => self.broken(error).await,
        }
    }

    fn is_guarded(&self) -> bool {
        matches!(self.ensured, Some((Want::Stands(_), _)))
    }

    /// Limits broadcasts where the kernel can; otherwise logs once that they are not limited.
    async fn keep_groups(&mut self) {
        match self.limit.ensure().await {
            Ok(counts) => {
                self.groups_told = None;
                self.counted.send_replace(counts);
            }
            Err(error) => {
                let text = error.to_string();
                if self.groups_told.as_ref() != Some(&text) {
                    tracing::warn!(
                        error = text,
                        "cannot limit broadcasts to peers of the kernel engine"
                    );
                    self.groups_told = Some(text);
                }
                self.forget_looping();
            }
        }
        self.groups_next = Instant::now() + Duration::from_millis(GROUPS_LOOK_MS);
    }

    /// Clears the list of ports that send too many frames, after a failure to read it.
    fn forget_looping(&self) {
        self.counted.send_modify(|counts| counts.ports.clear());
    }

    async fn keep_clamp(&mut self, wanted: &Wanted) {
        if wanted.clamps_lost != self.clamps_lost {
            self.clamps_lost = wanted.clamps_lost;
            self.mss.forget();
        }
        if let Err(error) = self.mss.set(&wanted.narrow).await {
            tracing::warn!(%error, "cannot clamp segment sizes");
        }
    }

    async fn broken(&mut self, error: KernelError) {
        self.ensured = None;
        self.seen.send_replace(Seen::default());
        let _ = self.told.send(Told::Broken(error)).await;
    }

    fn show(&self, counters: GuardCounters, began: Instant) {
        let now = Instant::now();
        self.seen.send_replace(Seen { counters: Some((counters, now)), took: now - began });
    }

    fn retry(&mut self) {
        self.next = Instant::now() + Duration::from_millis(RETRY_MS);
    }

    fn is_done(&self, wanted: &Wanted) -> bool {
        let is = |(guard, trusted): &(Want, BTreeSet<IpAddr>)| {
            (*guard, trusted) == (wanted.guard, &wanted.trusted)
        };
        self.ensured.as_ref().is_some_and(is)
    }

    fn done(&mut self, wanted: &Wanted) {
        self.ensured = Some((wanted.guard, wanted.trusted.clone()));
    }
}

async fn changed(watch: Option<&mut NftWatch>) -> Result<(), KernelError> {
    match watch {
        Some(watch) => watch.changed().await,
        None => std::future::pending().await,
    }
}

fn list(trusted: &BTreeSet<IpAddr>) -> Vec<IpAddr> {
    trusted.iter().copied().collect()
}

#[cfg(test)]
impl GuardReader {
    /// That of a task which reads nothing.
    pub(super) fn idle() -> Self {
        let (_, seen) = watch::channel(Seen::default());
        let (_, groups) = watch::channel(GroupCounts::default());
        Self { seen, groups, look: Arc::default() }
    }
}
