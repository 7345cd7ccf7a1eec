//! Helpers: further threads on a worker's TAP queues and sockets, so that one flow uses several cores.
//!
//! Worker and helpers do the same. Each takes a unit of some 64 KiB off the device, seals or opens it beside the
//! others, and sends or writes it after all earlier units. A unit stays with its thread, in that thread's buffers,
//! from the first copy to the last. So packets and sequence numbers keep their order, and nothing is handed over
//! or queued.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use weft_io::poller::{Poller, Waker};
use weft_io::tap::FRAME_LEN_MAX;

use super::busy_poll::BusyPoll;
use super::context::WorkerContext;
use super::event_loop::{EventLoop, Turns, Wake};
use super::shared::sync_ports;
use super::thread::supervise;
use crate::ports::port_reader::PortReader;
use crate::ports::socket_buckets::SocketReader;
use crate::ports::tap_queues::TapQueueReader;
use crate::rx::receiver::Receiver;
use crate::stats::counters::{Work, WorkerCounters};
use crate::tx::transmitter::Transmitter;

/// The longest that a helper sleeps before it sees that it is no longer wanted.
const IDLE_MAX: Duration = Duration::from_millis(100);

/// The helpers of one worker.
pub(crate) struct Helpers {
    context: WorkerContext,
    threads: Mutex<Vec<Running>>,
}

struct Running {
    thread: Option<JoinHandle<()>>,
    waker: Waker,
    stop: Arc<AtomicBool>,
}

impl Helpers {
    /// None yet.
    pub(crate) const fn new(context: WorkerContext) -> Self {
        Self { context, threads: Mutex::new(Vec::new()) }
    }

    /// The worker's counters.
    pub(crate) fn counters(&self) -> &WorkerCounters {
        &self.context.counters
    }

    /// Sets the number of helpers at work. Threads are made when they are first wanted, and stay.
    ///
    /// # Errors
    /// A thread could not be started; those before it work.
    pub(crate) fn set(&self, wanted: usize) -> io::Result<()> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let mut result = Ok(());
        while threads.len() < wanted && result.is_ok() {
            result = self.start(threads.len()).map(|running| threads.push(running));
        }
        let wanted = wanted.min(threads.len());
        let before = self.context.help.want(wanted);
        let counters = &self.context.counters;
        counters.did(Work::HelpersOn, wanted.saturating_sub(before) as u64);
        counters.did(Work::HelpersOff, before.saturating_sub(wanted) as u64);
        threads.iter().filter_map(|running| running.thread.as_ref()).for_each(|thread| {
            thread.thread().unpark();
        });
        result
    }

    fn start(&self, number: usize) -> io::Result<Running> {
        let (waker, stop) = (Waker::new()?, Arc::new(AtomicBool::new(false)));
        let helper = Helper {
            number,
            context: self.context.clone(),
            counters: self.context.counters.of_helper(number),
            waker: waker.clone(),
            stop: Arc::clone(&stop),
        };
        let worker = self.context.worker;
        let events = Arc::clone(&self.context.events);
        let thread = thread::Builder::new().name(format!("weft-help{worker}.{number}")).spawn(
            move || supervise(&*events, &format!("helper {worker}.{number}"), || helper.run()),
        )?;
        Ok(Running { thread: Some(thread), waker, stop })
    }

    /// Stops them and waits for their end.
    pub(crate) fn end(&self) {
        let _ = self.set(0);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for running in &*threads {
            running.stop.store(true, SeqCst);
            running.waker.wake();
            if let Some(thread) = &running.thread {
                thread.thread().unpark();
            }
        }
        for mut running in threads.drain(..) {
            if let Some(thread) = running.thread.take() {
                // A panic was caught and reported by the thread itself.
                let _ = thread.join();
            }
        }
    }
}

/// One helper.
struct Helper {
    number: usize,
    context: WorkerContext,
    counters: Arc<WorkerCounters>,
    waker: Waker,
    stop: Arc<AtomicBool>,
}

impl Helper {
    fn run(self) -> io::Result<()> {
        let mut turns = HelperTurns::new(&self);
        let Self { counters, waker, stop, .. } = &self;
        // It sleeps at once where it has nothing to do: its worker is the one that stays awake.
        let busy_poll = BusyPoll::new(Some(Duration::ZERO));
        EventLoop { counters, waker, stop, busy_poll }.run(&mut turns)
    }
}

/// A helper in its loop, with all that its thread alone has.
struct HelperTurns<'a> {
    helper: &'a Helper,
    queues: TapQueueReader,
    sockets: SocketReader,
    ports: PortReader,
    receiver: Receiver,
    transmitter: Transmitter,
    buffer: Vec<u8>,
}

impl<'a> HelperTurns<'a> {
    fn new(helper: &'a Helper) -> Self {
        let context = &helper.context;
        let mut receiver = Receiver::new();
        receiver.set_merging(context.merge.0, context.merge.1);
        Self {
            helper,
            queues: TapQueueReader::new(&context.queues),
            sockets: SocketReader::new(&context.share, context.lane_port.as_ref()),
            ports: PortReader::of_worker(context.worker),
            receiver,
            transmitter: (context.make_transmitter)(),
            buffer: vec![0; FRAME_LEN_MAX],
        }
    }

    fn is_wanted(&self) -> bool {
        self.helper.number < self.helper.context.help.wanted()
    }
}

impl Turns for HelperTurns<'_> {
    fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        self.queues.watch(poller)?;
        self.sockets.watch(poller)
    }

    fn time_left(&mut self, poller: &Poller) -> Option<Duration> {
        while !self.is_wanted() && !self.helper.stop.load(SeqCst) {
            // A helper that is not at work must not keep the devices of removed ports.
            self.ports.let_go(poller);
            thread::park();
        }
        Some(IDLE_MAX)
    }

    fn note_ready(&mut self, token: u64) {
        match token {
            token if self.queues.round_robin().note_token(token) => {}
            token if self.sockets.round_robin().note_token(token) => {}
            token => self.ports.note_ready(token),
        }
    }

    fn take(&mut self, poller: &Poller, wake: Wake) -> io::Result<ControlFlow<()>> {
        if wake.stop {
            return Ok(ControlFlow::Break(()));
        }
        let Self { helper, queues, sockets, ports, receiver, transmitter, buffer } = self;
        let Helper { number, context, counters, .. } = helper;
        let help = &context.help;
        sync_ports(ports, poller, &context.shared);
        let Some(_at_work) = help.begin(*number) else {
            ports.forget_ready();
            sockets.round_robin().forget_ready();
            queues.round_robin().forget_ready();
            // The worker has not seen yet that it is wanted, or no longer.
            thread::yield_now();
            return Ok(ControlFlow::Continue(()));
        };
        let mut units = 0;
        sockets.take_turns(|number, socket, batch_size, _| {
            let (gate, receiver) = (help.socket(number), (&mut *receiver, batch_size));
            units += context.open(gate, socket, counters, receiver, (&*queues, &*ports))?;
            Ok(())
        })?;
        queues.take_turns(|_, tap| {
            units += context.seal(tap, counters, transmitter, buffer)?;
            Ok(())
        })?;
        units += context.seal_ports(poller, ports, counters, transmitter, buffer);
        counters.did(Work::UnitsHelped, units);
        Ok(ControlFlow::Continue(()))
    }
}
