//! The worker pool: how the workers of an engine start, come and go.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver as Queue, sync_channel};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use weft_io::offload::Offloads;
use weft_io::poller::Waker;
use weft_io::steer::{self, BUCKETS, FrameSteering};
use weft_io::tap::{Tap, TapOptions};
use weft_path::{EngineEvent, Mac};

use super::autoscaler::Autoscaler;
use super::busy_poll::BusyPoll;
use super::context::WorkerContext;
use super::helper::Helpers;
use super::shared::{Sending, Shared};
use super::thread::{pin_nth, supervise};
use super::worker::Worker;
use crate::config::EngineConfig;
use crate::error::EngineError;
use crate::limits::{BUSY_POLL_MAX, NETWORK_QUEUES_MIN};
use crate::ports::device::LaneSockets;
use crate::ports::socket_buckets::SocketBuckets;
use crate::ports::tap_queues::{TapQueues, open_queues, steering};
use crate::stats::counters::WorkerCounters;
use crate::stats::worker_load::WorkerLoad;
use crate::tables::flows::Flows;
use crate::tables::lane::LANE_LOOK_MS;
use crate::tx::transmitter::Transmitter;

/// Time that a removed worker goes on receiving, in milliseconds. By then peers know the new source of its lanes,
/// even if one dummy was lost.
const LINGER_MS: u64 = 2 * LANE_LOOK_MS + LANE_LOOK_MS / 2;

type Events = Arc<dyn Fn(EngineEvent) + Send + Sync>;

/// The workers, and the settings for further ones.
pub(crate) struct WorkerPool {
    running: Vec<Running>,
    /// As many are started where that failed.
    wanted: usize,
    /// Removed, and receiving for [`LINGER_MS`] yet, the one with the highest number first.
    leaving: Vec<Running>,
    /// By the worker's number, also of those that are gone.
    counters: Vec<Arc<WorkerCounters>>,
    /// Datagrams that sockets of workers that are gone did not take.
    past_overflows: u64,
    shared: Arc<RwLock<Shared>>,
    events: Events,
    tap: TapOptions,
    /// The worker to whose queue of the switch's TAP device a frame comes.
    steering: Option<Arc<FrameSteering>>,
    bind: Option<IpAddr>,
    port: u16,
    pin: bool,
    busy_poll: Option<Duration>,
    copy_dscp: bool,
    probe_mac: Mac,
    offloads: bool,
    segments_max: usize,
    /// The self-test's grants: TCP and UDP super-packets to the TAP device.
    merge: (bool, bool),
    /// Helpers of each worker; `None`: as the autoscaler decides.
    helpers: Option<usize>,
    autoscaler: Option<Autoscaler>,
}

/// A worker from outside.
struct Running {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    /// When it ends by itself.
    until: Arc<OnceLock<Instant>>,
    waker: Waker,
    share: SocketBuckets,
    lane_port: Option<SocketBuckets>,
    queues: TapQueues,
    flows: Arc<Flows>,
    helpers: Arc<Helpers>,
}

impl WorkerPool {
    /// No worker yet.
    pub(crate) fn new(
        config: &EngineConfig,
        offloads: &Offloads,
        shared: Arc<RwLock<Shared>>,
        events: Events,
    ) -> Self {
        Self {
            running: Vec::new(),
            wanted: 0,
            leaving: Vec::new(),
            counters: Vec::new(),
            past_overflows: 0,
            shared,
            events,
            tap: TapOptions { persist: config.tap_persist, ..TapOptions::new(&config.tap_name) },
            steering: steering(),
            bind: config.bind,
            port: config.port,
            pin: config.pin,
            busy_poll: config.busy_poll.map(|time| time.min(BUSY_POLL_MAX)),
            copy_dscp: config.copy_dscp,
            probe_mac: config.probe_mac,
            offloads: config.offloads,
            segments_max: if offloads.udp_segment.usable() { offloads.run_segments_max } else { 1 },
            merge: (offloads.tap_tso.usable(), offloads.tap_uso.usable()),
            helpers: config.helpers,
            autoscaler: None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.running.len()
    }

    /// The first worker's waker, the port, and the device's name.
    ///
    /// # Errors
    /// There is no worker.
    pub(crate) fn first(&self) -> Result<(Waker, u16, String), EngineError> {
        let first = self.running.first().ok_or(EngineError::Stopped)?;
        Ok((first.waker.clone(), first.share.sender().port(), first.queues.name().to_owned()))
    }

    /// The counters of all workers that there ever were.
    pub(crate) fn counters(&self) -> Vec<Arc<WorkerCounters>> {
        self.counters.clone()
    }

    /// Datagrams that the kernel dropped since a socket was full.
    pub(crate) fn overflows(&self) -> u64 {
        let all = self.running.iter().chain(&self.leaving);
        self.past_overflows + all.map(Running::overflows).sum::<u64>()
    }

    /// Wakes all of them, also those that are leaving.
    pub(crate) fn wake(&self) {
        self.running.iter().chain(&self.leaving).for_each(|worker| worker.waker.wake());
    }

    /// Adds or removes workers at the end.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub(crate) fn resize(&mut self, workers: usize) -> Result<(), EngineError> {
        self.reap();
        while self.running.len() > workers.max(1) {
            self.remove_last();
        }
        if self.running.len() < workers {
            // A new one takes its predecessor's number and its place among the shares of the port.
            self.leaving.iter_mut().for_each(Running::end);
            self.reap();
        }
        while self.running.len() < workers {
            // Only the first worker sends by command.
            let (_, nothing) = sync_channel(0);
            self.add(nothing)?;
        }
        Ok(())
    }

    /// Ends all workers and starts as many, with new queues and sockets. The first one gets `sendings`.
    ///
    /// # Errors
    /// As [`Self::add`]; there are fewer workers then, and next time as many as there were are started.
    pub(crate) fn renew(&mut self, sendings: Queue<Sending>) -> Result<(), EngineError> {
        self.wanted = self.wanted.max(self.running.len());
        let ended: Vec<Running> = self.running.drain(..).chain(self.leaving.drain(..)).collect();
        for mut worker in ended {
            if let Some(autoscaler) = &self.autoscaler {
                autoscaler.remove(&worker.helpers);
            }
            worker.end();
            self.past_overflows += worker.overflows();
        }
        self.change_sockets(|sockets| {
            sockets.own.clear();
            sockets.shares.clear();
        });
        self.add(sendings)?;
        self.resize(self.wanted)?;
        self.wanted = 0;
        Ok(())
    }

    /// Opens the device of a further network, with queues for the workers that there are and some that may come.
    ///
    /// # Errors
    /// It could not be opened.
    pub(crate) fn open_network(&self, tap_name: &str) -> Result<Vec<Tap>, EngineError> {
        let options = TapOptions { persist: self.tap.persist, ..TapOptions::new(tap_name) };
        open_queues(&options, self.running.len().max(NETWORK_QUEUES_MIN), self.offloads)
    }

    /// Starts one more worker.
    ///
    /// # Errors
    /// A device or socket could not be opened, or a thread not be started.
    pub(crate) fn add(&mut self, sendings: Queue<Sending>) -> Result<(), EngineError> {
        let kernel = |what| move |source| EngineError::Kernel { what, source };
        let number = self.running.len();
        let flows = Arc::<Flows>::default();
        // Queues of direct ports that others have served become its own.
        self.running.iter().for_each(|other| flows.inherit(&other.flows, steer::tick()));
        let context = self.context(number, &flows)?;
        let waker = Waker::new().map_err(kernel("make an event descriptor"))?;
        let (stop, until) = (Arc::new(AtomicBool::new(false)), Arc::new(OnceLock::new()));
        let worker = Worker {
            transmitter: (context.make_transmitter)(),
            context: context.clone(),
            sendings,
            waker: waker.clone(),
            stop: Arc::clone(&stop),
            until: Arc::clone(&until),
        };
        let (pin, busy_poll) = (self.pin, BusyPoll::new(self.busy_poll));
        let thread = thread::Builder::new()
            .name(format!("weft-engine{number}"))
            .spawn(move || run(worker, busy_poll, number, pin))
            .map_err(kernel("start a thread"))?;
        let WorkerContext { queues, share, lane_port, .. } = context.clone();
        let own = lane_port.as_ref().unwrap_or(&share).senders();
        let of_share = share.senders();
        let helpers = Arc::new(Helpers::new(context));
        self.running.push(Running {
            thread: Some(thread),
            stop,
            until,
            waker,
            share,
            lane_port,
            queues,
            flows,
            helpers: Arc::clone(&helpers),
        });
        self.change_sockets(|sockets| {
            sockets.own.push(own);
            sockets.shares.push(of_share);
        });
        self.steer(self.running.len());
        self.give_helpers(helpers)
    }

    /// Opens the devices that the worker with this number shares with its helpers.
    fn context(&mut self, number: usize, flows: &Arc<Flows>) -> Result<WorkerContext, EngineError> {
        let tap_queues = if self.steering.is_some() { BUCKETS } else { 1 };
        let queues = TapQueues::open(&self.tap, tap_queues, self.offloads)?;
        let (share, lane_port) = self.sockets(number)?;
        if self.counters.len() <= number {
            self.counters.push(Arc::default());
        }
        // The next one opens queues of the same device, also where the name was a pattern.
        queues.name().clone_into(&mut self.tap.name);
        let granted = queues.offloads();
        let merge = (granted.tso && self.merge.0, granted.uso && self.merge.1);
        let (segments_max, mac, copy_dscp) = (self.segments_max, self.probe_mac, self.copy_dscp);
        let load = WorkerLoad::new(number, self.steering.clone());
        let (flows, sent) = (Arc::clone(flows), load.clone());
        let make_transmitter = move || {
            Transmitter::of_worker(number, Arc::clone(&flows), sent.clone(), segments_max, mac)
                .with_copy_dscp(copy_dscp)
        };
        Ok(WorkerContext {
            worker: number,
            queues,
            share,
            lane_port,
            shared: Arc::clone(&self.shared),
            load,
            merge,
            make_transmitter: Arc::new(make_transmitter),
            help: Arc::default(),
            events: Arc::clone(&self.events),
            counters: Arc::clone(&self.counters[number]),
        })
    }

    /// So many as are set, or as will turn out to help.
    fn give_helpers(&mut self, helpers: Arc<Helpers>) -> Result<(), EngineError> {
        let started = match self.helpers {
            Some(number) => helpers.set(number),
            None if self.autoscaler.is_some() => Ok(()),
            None => Autoscaler::start().map(|autoscaler| self.autoscaler = autoscaler),
        };
        started.map_err(|source| EngineError::Kernel { what: "start a thread", source })?;
        if let Some(autoscaler) = &self.autoscaler {
            autoscaler.add(helpers);
        }
        Ok(())
    }

    /// The share of the engine's port that the worker with this number has, and the sockets of its lanes if
    /// those are others.
    fn sockets(
        &mut self,
        number: usize,
    ) -> Result<(SocketBuckets, Option<SocketBuckets>), EngineError> {
        if number > 0 {
            let share = SocketBuckets::bind_beside(self.bind, self.port, self.offloads)?;
            let lane_port = SocketBuckets::bind(self.bind, 0, self.offloads)?;
            lane_port.steer(1);
            return Ok((share, Some(lane_port)));
        }
        let share = SocketBuckets::bind(self.bind, self.port, self.offloads)?;
        self.port = share.sender().port();
        Ok((share, None))
    }

    fn remove_last(&mut self) {
        let Some(last) = self.running.pop() else { return };
        // First it gets nothing more on the engine's port, then nothing is sent from its port. It still takes
        // packets that peers send there until they know better: the workers that stay tell them at once.
        if let Some(autoscaler) = &self.autoscaler {
            autoscaler.remove(&last.helpers);
        }
        // Little is left to receive. Fewer threads need no start, so nothing can fail.
        let _ = last.helpers.set(0);
        // Its flows come to those that stay, and keep their lanes.
        self.running.iter().for_each(|other| other.flows.inherit(&last.flows, steer::tick()));
        self.steer(self.running.len());
        let _ = last.until.set(Instant::now() + Duration::from_millis(LINGER_MS));
        self.leaving.push(last);
        self.change_sockets(|sockets| {
            sockets.own.pop();
            sockets.shares.pop();
        });
    }

    /// Forgets those that have ended, in the order in which they left. The kernel fills a closed socket's place
    /// with the last socket.
    pub(crate) fn reap(&mut self) {
        while self.leaving.first().is_some_and(Running::has_ended) {
            let mut ended = self.leaving.remove(0);
            ended.end();
            self.past_overflows += ended.overflows();
        }
    }

    /// There is one worker more or less. Queues of direct ports have other readers from that moment on.
    fn change_sockets(&self, change: impl FnOnce(&mut LaneSockets)) {
        let mut shared = self.shared.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut shared.sockets);
        shared.ports.share_anew();
        drop(shared);
        self.wake();
    }

    fn steer(&self, workers: usize) {
        if let Some(first) = self.running.first() {
            first.share.steer(workers);
            if let Some(steering) = &self.steering {
                first.queues.steer(steering, workers);
            }
        }
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.autoscaler = None;
        for worker in self.running.iter().chain(&self.leaving) {
            worker.stop.store(true, Ordering::Relaxed);
            worker.waker.wake();
        }
        self.running.iter_mut().chain(&mut self.leaving).for_each(Running::end);
    }
}

impl Running {
    /// Stops it and waits for its end.
    fn end(&mut self) {
        self.helpers.end();
        self.stop.store(true, Ordering::Relaxed);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A panic was caught and reported by the thread itself.
            let _ = thread.join();
        }
    }

    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn overflows(&self) -> u64 {
        self.share.overflows() + self.lane_port.as_ref().map_or(0, SocketBuckets::overflows)
    }
}

fn run(worker: Worker, busy_poll: BusyPoll, number: usize, pin: bool) {
    if pin && let Err(error) = pin_nth(number) {
        tracing::warn!(%error, number, "a worker of the engine could not be pinned to a CPU");
    }
    let events = Arc::clone(&worker.context.events);
    supervise(&*events, &format!("worker {number}"), || worker.run(busy_poll));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_io::namespace::unshare_network;
    use weft_path::Vni;

    use super::*;
    use crate::Engine;

    /// Needs two processors: with one there is nothing to give.
    #[test]
    fn workers_are_looked_at_from_the_first_to_the_last() {
        let thread = thread::spawn(|| {
            unshare_network().expect("this test needs root");
            let mut config = EngineConfig::new("tap0", Vni(7), 1_400);
            config.port = 0;
            config.workers = 2;
            let engine = Engine::start(&config, |_| {}).unwrap();
            let watched = || engine.lock().autoscaler.as_ref().map(Autoscaler::watched);
            let begun = Instant::now();
            for workers in [2, 3, 1] {
                engine.set_workers(workers).unwrap();
                assert_eq!(watched().map(|(all, _)| all), Some(workers));
                // The thread that looks does so.
                while watched() != Some((workers, workers)) {
                    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", watched());
                    thread::sleep(Duration::from_millis(10));
                }
            }
            drop(engine);
            config.helpers = Some(0);
            let engine = Engine::start(&config, |_| {}).unwrap();
            assert!(engine.lock().autoscaler.is_none(), "the number is fixed");
        });
        thread.join().unwrap();
    }
}
