//! Helpers: further threads on a worker's TAP queues and sockets, so that one flow uses several cores.
//!
//! Worker and helpers do the same: one takes a unit of some 64 KiB off the device, seals or opens it
//! beside the others, and sends or writes it when all units taken before it are gone. A unit stays
//! with its thread, in that thread's buffers, from the first copy to the last; so packets leave in
//! the order in which they came, sequence numbers too, and nothing is handed over or queued.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use weft_io::poller::{Poller, Waker};
use weft_io::tap::{FRAME_LEN_MAX, Tap};
use weft_io::udp::{Remote, UdpSocket};
use weft_packet::ethernet;
use weft_packet::vnet::{self, VnetHeader};
use weft_path::EngineEvent;

use crate::buckets::{BucketReader, Buckets, SOCKETS_MAX};
use crate::counters::{Work, WorkerCounters};
use crate::crew::supervise;
use crate::device::{Env, FrameSink, FrameSource, MessageSource, Origin, RunSink};
use crate::gate::{Front, Gate, Ticket};
use crate::load::WorkerLoad;
use crate::ports::{Outlet, PortReader, serves};
use crate::queues::{QueueReader, Queues};
use crate::receive::{Kind, Receiver};
use crate::state::State;
use crate::transmit::Transmitter;
use crate::worker::{Shared, TAP_READS_MAX, UNITS_MAX, note_moved_lane, nothing_now, read};

/// Bytes of small frames that are one unit.
const UNIT_BYTES_MAX: usize = 65_536;
/// The longest that a helper sleeps before it sees that it is no longer wanted.
const IDLE_MAX: Duration = Duration::from_millis(100);

const WAKER: u64 = 0;

/// A socket that is sent from in turn.
struct InTurn<'a, R> {
    inner: &'a R,
    ticket: &'a Ticket<'a>,
    front: Cell<Option<Front<'a>>>,
    /// Nothing more belongs to this unit once its sequence numbers are taken.
    is_whole: Cell<bool>,
}

impl<R: RunSink> RunSink for InTurn<'_, R> {
    #[inline]
    fn send_run(&self, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        self.ticket.wait();
        self.inner.send_run(run, segment, to)
    }

    #[inline]
    fn reserved(&self) {
        if self.is_whole.get() {
            self.front.take();
        }
    }

    #[inline]
    fn sockets(&self) -> usize {
        self.inner.sockets()
    }

    #[inline]
    fn send_from(&self, from: Origin, run: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        self.ticket.wait();
        self.inner.send_from(from, run, segment, to)
    }
}

/// From the TAP device to the wire, one unit: a super-packet, or small frames. A super-packet is
/// sealed beside the next units; of small frames only the sending is beside the next ones' sealing.
///
/// # Errors
/// That of the first read: nothing was taken.
pub(crate) fn seal_unit<T: FrameSource + FrameSink, R: RunSink>(
    gate: &Gate,
    state: &State,
    env: &Env<'_, T, R>,
    transmitter: &mut Transmitter,
    buffer: &mut [u8],
) -> io::Result<()> {
    let mut front = gate.enter();
    let mut len = env.tap.recv(buffer)?;
    let ticket = front.draw();
    transmitter.begin();
    let socket = InTurn {
        inner: env.socket,
        ticket: &ticket,
        front: Cell::new(Some(front)),
        is_whole: Cell::new(false),
    };
    let env = Env { tap: env.tap, socket: &socket, counters: env.counters, events: env.events };
    let mut bytes = 0;
    for reads in 1..=TAP_READS_MAX {
        let is_whole = is_super_packet(&buffer[..len]);
        socket.is_whole.set(is_whole);
        transmitter.handle_read(state, &env, &buffer[..len]);
        bytes += len;
        if is_whole || bytes >= UNIT_BYTES_MAX || reads == TAP_READS_MAX {
            break;
        }
        match env.tap.recv(buffer) {
            Ok(next) => len = next,
            // Whatever it is, the next unit meets it too.
            Err(_) => break,
        }
    }
    socket.front.take();
    transmitter.flush(state, &env);
    Ok(())
}

/// Whether a read is a super-packet to one place.
fn is_super_packet(read: &[u8]) -> bool {
    let destination = read.get(vnet::LEN..).and_then(<[u8]>::first_chunk);
    VnetHeader::parse(read).is_some_and(|vnet| vnet.gso_type != vnet::GSO_NONE)
        && destination.is_some_and(|destination| !ethernet::is_group(*destination))
}

/// From the wire to the TAP device, one unit: what one receiving call takes.
///
/// # Errors
/// That of the call: nothing was taken.
pub(crate) fn open_unit<M: MessageSource, F: FrameSink, R>(
    gate: &Gate,
    source: &M,
    state: &State,
    env: &Env<'_, F, R>,
    receiver: &mut Receiver,
) -> io::Result<()> {
    let mut front = gate.enter();
    let max = receiver.unit_messages_max();
    source.recv(&mut receiver.batch, max)?;
    let ticket = front.draw();
    drop(front);
    receiver.open_ahead(state, env);
    ticket.wait();
    receiver.commit(state, env);
    Ok(())
}

/// What a worker and its helpers agree on.
#[derive(Debug, Default)]
pub(crate) struct Help {
    /// Where worker and helpers pass at the TAP queues: one for all, which send by the same SAs.
    queues: Gate,
    sockets: [Gate; SOCKETS_MAX],
    /// So many helpers are to work: the first ones. Written by who decides.
    wanted: AtomicUsize,
    /// So many may: the worker passes the gates too. Written by the worker.
    let_in: AtomicUsize,
    /// So many do.
    at_work: AtomicUsize,
}

impl Help {
    /// Where worker and helpers pass at the socket with this number.
    pub(crate) fn socket(&self, number: usize) -> &Gate {
        &self.sockets[number]
    }

    /// Between two batches of the worker: whether it has to pass the gates.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        let wanted = self.wanted.load(SeqCst);
        if self.let_in.load(SeqCst) != wanted {
            self.let_in.store(wanted, SeqCst);
        }
        // A helper counts itself before it looks whether it may work.
        wanted > 0 || self.at_work.load(SeqCst) > 0
    }

    /// So many helpers are to work from now on; returns how many were.
    pub(crate) fn want(&self, helpers: usize) -> usize {
        self.wanted.swap(helpers, SeqCst)
    }

    /// Lets a helper work, if it may.
    pub(crate) fn begin(&self, number: usize) -> Option<AtWork<'_>> {
        self.at_work.fetch_add(1, SeqCst);
        let at_work = AtWork(&self.at_work);
        (number < self.let_in.load(SeqCst)).then_some(at_work)
    }
}

/// A helper at work, until it is dropped.
pub(crate) struct AtWork<'a>(&'a AtomicUsize);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// What each thread of a worker's queues and sockets needs of them.
#[derive(Clone)]
pub(crate) struct Seed {
    /// The worker's number.
    pub(crate) worker: usize,
    pub(crate) queues: Queues,
    pub(crate) share: Buckets,
    pub(crate) lane_port: Option<Buckets>,
    pub(crate) shared: Arc<RwLock<Shared>>,
    pub(crate) load: WorkerLoad,
    pub(crate) merge: (bool, bool),
    pub(crate) make_transmitter: Arc<dyn Fn() -> Transmitter + Send + Sync>,
    pub(crate) help: Arc<Help>,
    pub(crate) events: Arc<dyn Fn(EngineEvent) + Send + Sync>,
    /// The worker's.
    pub(crate) counters: Arc<WorkerCounters>,
}

/// The helpers of one worker.
pub(crate) struct Helpers {
    seed: Seed,
    threads: Mutex<Vec<Running>>,
}

struct Running {
    thread: Option<JoinHandle<()>>,
    waker: Waker,
    stop: Arc<AtomicBool>,
}

impl Helpers {
    /// None yet.
    pub(crate) const fn new(seed: Seed) -> Self {
        Self { seed, threads: Mutex::new(Vec::new()) }
    }

    /// The worker's counters.
    pub(crate) fn counters(&self) -> &WorkerCounters {
        &self.seed.counters
    }

    /// Has so many helpers work; threads are made when they are first wanted, and stay.
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
        let before = self.seed.help.want(wanted);
        let counters = &self.seed.counters;
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
            seed: self.seed.clone(),
            counters: self.seed.counters.of_helper(number),
            waker: waker.clone(),
            stop: Arc::clone(&stop),
        };
        let worker = self.seed.worker;
        let events = Arc::clone(&self.seed.events);
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
    seed: Seed,
    counters: Arc<WorkerCounters>,
    waker: Waker,
    stop: Arc<AtomicBool>,
}

impl Helper {
    fn run(self) -> io::Result<()> {
        self.counters.begin();
        let help = &self.seed.help;
        let mut poller = Poller::new()?;
        poller.add(&self.waker, WAKER)?;
        let mut queues = QueueReader::new(&self.seed.queues);
        queues.watch(&poller)?;
        let mut sockets = BucketReader::new(&self.seed.share, self.seed.lane_port.as_ref());
        sockets.watch(&poller)?;
        let mut receiver = Receiver::new();
        receiver.set_merging(self.seed.merge.0, self.seed.merge.1);
        let mut transmitter = (self.seed.make_transmitter)();
        let mut buffer = vec![0; FRAME_LEN_MAX];
        let mut ports = PortReader::of_worker(self.seed.worker);
        while !self.stop.load(SeqCst) {
            if self.number >= help.wanted.load(SeqCst) {
                // Who is not at work must not keep the devices of ports that go.
                ports.let_go(&poller);
                thread::park();
                continue;
            }
            for token in poller.wait(Some(IDLE_MAX))? {
                match token {
                    WAKER => {}
                    token if queues.turns().note_token(token) => {}
                    token if sockets.turns().note_token(token) => {}
                    token => ports.note_ready(token),
                }
            }
            ports.sync(&poller, &self.seed.shared);
            let Some(_at_work) = help.begin(self.number) else {
                ports.forget_ready();
                sockets.turns().forget_ready();
                queues.turns().forget_ready();
                // The worker has not seen yet that it is wanted, or no longer.
                thread::yield_now();
                continue;
            };
            let mut units = 0;
            let (seed, counters) = (&self.seed, &self.counters);
            sockets.take_turns(|number, socket, kind, _| {
                let (gate, receiver) = (help.socket(number), (&mut receiver, kind));
                units += seed.open(gate, socket, counters, receiver, (&queues, &ports))?;
                Ok(())
            })?;
            queues.take_turns(|_, tap| {
                units += seed.seal(tap, counters, &mut transmitter, &mut buffer)?;
                Ok(())
            })?;
            units += seed.seal_ports(&poller, &mut ports, counters, &mut transmitter, &mut buffer);
            self.counters.did(Work::UnitsHelped, units);
        }
        Ok(())
    }
}

impl Seed {
    /// Some units from the wire to the TAP device; returns how many.
    pub(crate) fn open(
        &self,
        gate: &Gate,
        socket: &UdpSocket,
        counters: &WorkerCounters,
        (receiver, kind): (&mut Receiver, &mut Kind),
        written: (&QueueReader, &PortReader),
    ) -> io::Result<u64> {
        receiver.kind = *kind;
        for units in 0..UNITS_MAX {
            // Before the ticket is drawn: a command that waits lets nobody read any more, and who
            // holds a ticket must not wait for it.
            let shared = read(&self.shared);
            let outlet = Outlet {
                switch: self.queues.writer(),
                ports: &shared.ports,
                worker: self.worker,
                written,
            };
            let env =
                Env { tap: &outlet, socket: &shared.sockets, counters, events: &*self.events };
            let done = open_unit(gate, socket, &shared.state, &env, receiver);
            drop(shared);
            *kind = receiver.kind;
            if !there_was(done)? {
                return Ok(units);
            }
            self.load.received(receiver.batch.bytes());
            note_moved_lane(&self.shared, receiver);
        }
        Ok(UNITS_MAX)
    }

    /// Some units from a queue of the switch's TAP device to the wire; returns how many.
    pub(crate) fn seal(
        &self,
        tap: &Tap,
        counters: &WorkerCounters,
        transmitter: &mut Transmitter,
        buffer: &mut [u8],
    ) -> io::Result<u64> {
        self.seal_from((&self.help.queues, tap), |_| true, counters, transmitter, buffer)
    }

    /// The same from the direct ports that have something.
    pub(crate) fn seal_ports(
        &self,
        poller: &Poller,
        ports: &mut PortReader,
        counters: &WorkerCounters,
        transmitter: &mut Transmitter,
        buffer: &mut [u8],
    ) -> u64 {
        let mut units = 0;
        ports.note_answers();
        ports.drain(poller, |queue, of_port| {
            let is_own = |shared: &Shared| serves(shared, self.worker, of_port);
            let from = (&queue.gate, queue);
            units += self.seal_from(from, is_own, counters, transmitter, buffer)?;
            Ok(())
        });
        units
    }

    fn seal_from<T: FrameSource + FrameSink>(
        &self,
        (gate, tap): (&Gate, &T),
        is_own: impl Fn(&Shared) -> bool,
        counters: &WorkerCounters,
        transmitter: &mut Transmitter,
        buffer: &mut [u8],
    ) -> io::Result<u64> {
        for units in 0..UNITS_MAX {
            let shared = read(&self.shared);
            if !is_own(&shared) {
                return Ok(units);
            }
            let env = Env { tap, socket: &shared.sockets, counters, events: &*self.events };
            let done = seal_unit(gate, &shared.state, &env, transmitter, buffer);
            if !there_was(done)? {
                return Ok(units);
            }
        }
        Ok(UNITS_MAX)
    }
}

/// Whether there was a unit.
fn there_was(done: io::Result<()>) -> io::Result<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(error) if nothing_now(&error) => Ok(false),
        Err(error) => Err(error),
    }
}
