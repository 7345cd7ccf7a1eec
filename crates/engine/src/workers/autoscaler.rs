//! The autoscaler: the thread that looks at the workers and turns their helpers on and off.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::helper::Helpers;
use super::scaling_policy::{HELP_LOOK_MS, HELP_QUIET_LOOK_MS, Look, ScalingPolicy};
use crate::stats::counters::{Work, WorkerCounters};

/// The thread from outside. Dropping it ends it; helpers stay as they are.
pub(crate) struct Autoscaler {
    watched: Arc<Mutex<Vec<Watched>>>,
    /// Ends it by being dropped.
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A worker that is looked at.
struct Watched {
    helpers: Arc<Helpers>,
    decider: ScalingPolicy,
    last: Seen,
}

/// Running totals of a worker.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    busy: Duration,
    helpers_busy: Duration,
    datagrams: u64,
}

impl Seen {
    fn now(counters: &WorkerCounters) -> Self {
        let (busy, helpers_busy) = counters.busy();
        let datagrams = counters.done(Work::DatagramsSent) + counters.done(Work::DatagramsReceived);
        Self { busy, helpers_busy, datagrams }
    }
}

/// The machine's processor time so far, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticks {
    idle: u64,
    all: u64,
    cores: u64,
}

impl Autoscaler {
    /// Starts it, if there is any processor that a helper could have.
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start() -> io::Result<Option<Self>> {
        if processors() < 2 {
            return Ok(None);
        }
        let watched = Arc::new(Mutex::new(Vec::new()));
        let (stop, stopped) = sync_channel::<()>(0);
        let looked_at = Arc::clone(&watched);
        let thread = thread::Builder::new().name("weft-helpers".to_owned()).spawn(move || {
            let (mut last, mut ticks) = (Instant::now(), None);
            let mut pause = HELP_LOOK_MS;
            let waited = |pause| stopped.recv_timeout(Duration::from_millis(pause));
            while waited(pause) == Err(RecvTimeoutError::Timeout) {
                let now = Instant::now();
                let are_quiet = look(&mut lock(&looked_at), now, now - last, &mut ticks);
                pause = if are_quiet { HELP_QUIET_LOOK_MS } else { HELP_LOOK_MS };
                last = now;
            }
        })?;
        Ok(Some(Self { watched, stop: Some(stop), thread: Some(thread) }))
    }

    /// Looks at one more worker.
    pub(crate) fn add(&self, helpers: Arc<Helpers>) {
        let decider = ScalingPolicy::new(processors() - 1);
        let last = Seen::now(helpers.counters());
        lock(&self.watched).push(Watched { helpers, decider, last });
    }

    /// How many workers it looks at, and how many of them it has seen at work.
    #[cfg(test)]
    pub(crate) fn watched(&self) -> (usize, usize) {
        let watched = lock(&self.watched);
        let seen = watched.iter().filter(|watched| !watched.last.busy.is_zero());
        (watched.len(), seen.count())
    }

    /// Stops looking at a worker.
    pub(crate) fn remove(&self, helpers: &Arc<Helpers>) {
        lock(&self.watched).retain(|watched| !Arc::ptr_eq(&watched.helpers, helpers));
    }
}

impl Drop for Autoscaler {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(watched: &Mutex<Vec<Watched>>) -> MutexGuard<'_, Vec<Watched>> {
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// One look at all workers; true if all are quiet. `ticks` are the machine's at the last look, if they
/// were asked for.
fn look(
    watched: &mut [Watched],
    now: Instant,
    passed: Duration,
    ticks: &mut Option<Ticks>,
) -> bool {
    let is_asked = watched.iter().any(|watched| watched.decider.needs_idle_cores());
    let before = std::mem::replace(ticks, if is_asked { read_ticks() } else { None });
    let mut idle_cores = idle_cores(before, *ticks).unwrap_or(0.0);
    let seconds = passed.as_secs_f64().max(1e-3);
    let mut are_quiet = true;
    for Watched { helpers, decider, last } in watched {
        let seen = Seen::now(helpers.counters());
        let of_time =
            |now: Duration, before: Duration| now.saturating_sub(before).as_secs_f64() / seconds;
        let look = Look {
            busy: of_time(seen.busy, last.busy),
            helpers_busy: of_time(seen.helpers_busy, last.helpers_busy),
            idle_cores,
            rate: seen.datagrams.saturating_sub(last.datagrams) as f64 / seconds,
        };
        *last = seen;
        are_quiet &= decider.is_quiet(&look);
        let Some(wanted) = decider.handle_look(now, &look) else { continue };
        // Two workers do not both get the one core that idles.
        idle_cores = 0.0;
        tracing::debug!(wanted, ?look, "helpers of a worker");
        if let Err(error) = helpers.set(wanted) {
            tracing::warn!(%error, "a helper of the engine could not be started");
        }
    }
    are_quiet
}

fn idle_cores(before: Option<Ticks>, now: Option<Ticks>) -> Option<f64> {
    let (before, now) = (before?, now?);
    let all = now.all.checked_sub(before.all).filter(|all| *all > 0)?;
    let idle = now.idle.saturating_sub(before.idle).min(all);
    Some(idle as f64 / all as f64 * now.cores as f64)
}

fn read_ticks() -> Option<Ticks> {
    parse_ticks(&std::fs::read_to_string("/proc/stat").ok()?)
}

/// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal (proc(5)). User and nice
/// already count the later fields. Then a line for each core.
fn parse_ticks(text: &str) -> Option<Ticks> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> =
        line.split_ascii_whitespace().take(8).map_while(|tick| tick.parse().ok()).collect();
    let idle = ticks.get(3)? + ticks.get(4)?;
    let cores = text.lines().skip(1).take_while(|line| line.starts_with("cpu")).count() as u64;
    Some(Ticks { idle, all: ticks.iter().sum(), cores })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::RwLock;

    use weft_io::keylog::KeyLog;
    use weft_io::namespace::unshare_network;
    use weft_io::tap::TapOptions;
    use weft_path::{Mac, Vni};

    use super::*;
    use crate::ports::device::LaneSockets;
    use crate::ports::direct::Ports;
    use crate::ports::socket_buckets::SocketBuckets;
    use crate::ports::tap_queues::TapQueues;
    use crate::tables::state::State;
    use crate::tx::transmitter::Transmitter;
    use crate::workers::context::WorkerContext;
    use crate::workers::shared::Shared;

    /// Processor time that a busy worker has had since the last look, and the time that the looks are
    /// told has passed since.
    const BETWEEN: Duration = Duration::from_millis(20);
    /// The most looks until an expected change.
    const LOOKS_MAX: usize = 40;
    /// How long the machine may take for a worker's processor time.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Workers, all of them this thread, and the time that looks at them are told.
    struct Scene {
        watched: Vec<Watched>,
        now: Instant,
    }

    impl Scene {
        /// Runs `play` on a separate thread with these workers, each of which may have one helper.
        fn play(workers: usize, play: impl FnOnce(&mut Self) + Send + 'static) {
            let thread = thread::spawn(move || {
                unshare_network().expect("this test needs root");
                let watched = (0..workers).map(worker).collect();
                play(&mut Self { watched, now: Instant::now() });
            });
            thread.join().unwrap();
        }

        /// A look after which each worker has moved `datagrams` datagrams. It was busy all the time or not at all;
        /// apart from that all cores were idle, or none.
        fn look(&mut self, is_busy: bool, datagrams: u64, do_cores_idle: bool) {
            let begun = Instant::now();
            for Watched { helpers, last, .. } in &self.watched {
                let until = last.busy + BETWEEN;
                while is_busy && helpers.counters().busy().0 < until {
                    assert!(begun.elapsed() < PATIENCE, "no processor time, or none is told");
                }
                helpers.counters().did(Work::DatagramsSent, datagrams);
            }
            self.now += Duration::from_millis(HELP_LOOK_MS);
            look(&mut self.watched, self.now, BETWEEN, &mut Some(earlier(do_cores_idle)));
        }

        /// Looks while all cores idle until helpers were turned on and off so often.
        fn look_until(&mut self, wanted: &[(u64, u64)], is_busy: bool, datagrams: u64) {
            let came = (0..LOOKS_MAX).any(|_| {
                self.look(is_busy, datagrams, true);
                self.changes() == wanted
            });
            assert!(came, "after {LOOKS_MAX} looks {:?}", self.changes());
        }

        /// How often helpers of each worker were turned on, and off.
        fn changes(&self) -> Vec<(u64, u64)> {
            let of = |watched: &Watched| {
                let counters = watched.helpers.counters();
                (counters.done(Work::HelpersOn), counters.done(Work::HelpersOff))
            };
            self.watched.iter().map(of).collect()
        }
    }

    impl Drop for Scene {
        fn drop(&mut self) {
            self.watched.iter().for_each(|watched| watched.helpers.end());
        }
    }

    /// A worker whose thread is the calling one.
    fn worker(number: usize) -> Watched {
        let options = TapOptions::new(format!("weft{number}"));
        let state = State::new(Vni(7), 1_388, Arc::default(), KeyLog::default());
        let (sockets, ports) = (LaneSockets::default(), Ports::new());
        let helpers = Arc::new(Helpers::new(WorkerContext {
            worker: number,
            queues: TapQueues::open(&options, 1, true).unwrap(),
            share: SocketBuckets::bind(None, 0, true).unwrap(),
            lane_port: None,
            shared: Arc::new(RwLock::new(Shared { state, sockets, ports })),
            load: Default::default(),
            merge: (true, true),
            make_transmitter: Arc::new(|| Transmitter::new(64, Mac([2, 0, 0, 0, 0, 1]))),
            help: Arc::default(),
            events: Arc::new(|_| {}),
            counters: Arc::default(),
        }));
        helpers.counters().begin();
        let last = Seen::now(helpers.counters());
        Watched { helpers, decider: ScalingPolicy::new(1), last }
    }

    /// Ticks of the look before: all cores have idled since then, or none has.
    fn earlier(do_cores_idle: bool) -> Ticks {
        let now = read_ticks().unwrap();
        // As if the machine had begun to idle, or to work, when it was started.
        let (idle, all) = if do_cores_idle { (0, now.all - now.idle) } else { (now.idle, 0) };
        Ticks { idle, all, cores: now.cores }
    }

    #[test]
    fn a_saturated_worker_gets_a_helper_while_cores_idle_until_it_rests() {
        Scene::play(1, |scene| {
            (0..5).for_each(|_| scene.look(true, 1_000, false));
            assert_eq!(scene.changes(), [(0, 0)], "there is no core for it");
            scene.look_until(&[(1, 0)], true, 1_000);
            // Twice as much gets through.
            (0..10).for_each(|_| scene.look(true, 2_000, true));
            assert_eq!(scene.changes(), [(1, 0)]);
            (0..5).for_each(|_| scene.look(false, 0, true));
            assert_eq!(scene.changes(), [(1, 0)], "not at once");
            scene.look_until(&[(1, 1)], false, 0);
        });
    }

    #[test]
    fn a_helper_with_which_no_more_gets_through_is_turned_off_again() {
        Scene::play(1, |scene| {
            scene.look_until(&[(1, 0)], true, 1_000);
            scene.look_until(&[(1, 1)], true, 1_000);
        });
    }

    #[test]
    fn two_workers_do_not_both_get_the_core_that_idles() {
        Scene::play(2, |scene| {
            scene.look_until(&[(1, 0), (0, 0)], true, 1_000);
            scene.look_until(&[(1, 0), (1, 0)], true, 2_000);
        });
    }

    #[test]
    fn idle_cores_are_told_by_the_ticks() {
        let text = "cpu  100 5 50 800 45 3 7 10 90 1\ncpu0 1 2 3 4\ncpu1 1 2 3 4\nintr 5\n";
        let ticks = parse_ticks(text).unwrap();
        assert_eq!(ticks, Ticks { idle: 845, all: 1_020, cores: 2 });
        let later = Ticks { idle: 845 + 25, all: 1_020 + 100, cores: 2 };
        assert_eq!(idle_cores(Some(ticks), Some(later)), Some(0.5));
        assert_eq!(idle_cores(Some(ticks), Some(ticks)), None, "no time has passed");
        assert_eq!(idle_cores(None, Some(ticks)), None);
        assert_eq!(parse_ticks("intr 1 2 3"), None);
        assert!(read_ticks().unwrap().all > 0);
    }
}
