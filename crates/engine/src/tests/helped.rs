//! Several threads on one device's queue and socket: they send the output of a single thread, byte for byte
//! and in the same order.

use std::collections::VecDeque;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Instant;

use super::*;
use crate::ports::device::{FrameSource, MessageSource};
use crate::ports::ticket_gate::TicketGate;
use crate::workers::context::{Help, open_unit, seal_unit};
use weft_io::udp::RecvBatch;

const THREADS: usize = 4;

/// A small generator (xorshift64) for loads that differ from run to run.
struct Random(u64);

impl Random {
    /// A fresh seed, printed so that a failure can be run again.
    #[allow(clippy::print_stdout, reason = "shown where the test fails")]
    fn fresh(what: &str) -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let seed = std::env::var("WEFT_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or(now.as_nanos() as u64 | 1);
        println!("{what}: WEFT_TEST_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}

/// The messages of a receiving call, each with its bytes and the size of its datagrams.
type Batch = Vec<(Vec<u8>, usize)>;

/// A TAP device and a socket for several threads.
#[derive(Default)]
struct Shared {
    reads: Mutex<VecDeque<Vec<u8>>>,
    written: Mutex<Vec<Vec<u8>>>,
    arriving: Mutex<VecDeque<Batch>>,
    /// Runs, each as its datagrams.
    sent: Mutex<Vec<Vec<Vec<u8>>>>,
    /// The stated source of messages.
    source: Option<Remote>,
    /// So many more may be taken off it; `None`: all that there is.
    allowance: Mutex<Option<usize>>,
    /// Nothing is sent or written while this is set.
    stuck: AtomicBool,
    waiting: AtomicUsize,
}

impl Shared {
    fn pass(&self) {
        self.waiting.fetch_add(1, SeqCst);
        while self.stuck.load(SeqCst) {
            thread::yield_now();
        }
        self.waiting.fetch_sub(1, SeqCst);
    }

    fn datagrams(&self) -> Vec<Vec<u8>> {
        self.sent.lock().unwrap().concat()
    }

    fn take<T>(&self, from: &Mutex<VecDeque<T>>) -> io::Result<T> {
        let mut allowance = self.allowance.lock().unwrap();
        if let Some(left) = &mut *allowance {
            *left = left.checked_sub(1).ok_or(io::ErrorKind::WouldBlock)?;
        }
        Ok(from.lock().unwrap().pop_front().ok_or(io::ErrorKind::WouldBlock)?)
    }

    /// Lets the threads take `count` more, and waits until they have; they may still be at work on them.
    fn let_take(&self, count: usize) {
        *self.allowance.lock().unwrap() = Some(count);
        while *self.allowance.lock().unwrap() != Some(0) {
            thread::yield_now();
        }
    }

    /// Lets them take all.
    fn let_take_all(&self) {
        *self.allowance.lock().unwrap() = None;
    }

    fn is_over(&self) -> bool {
        self.reads.lock().unwrap().is_empty() && self.arriving.lock().unwrap().is_empty()
    }
}

impl FrameSource for Shared {
    fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.take(&self.reads)?;
        buffer[..read.len()].copy_from_slice(&read);
        Ok(read.len())
    }
}

impl FrameSink for Shared {
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.pass();
        let parts: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
        self.written.lock().unwrap().push(parts.concat());
        Ok(0)
    }
}

impl MessageSource for Shared {
    fn recv(&self, batch: &mut RecvBatch, _max: usize) -> io::Result<usize> {
        let messages = self.take(&self.arriving)?;
        batch.clear();
        for (bytes, segment) in &messages {
            assert!(batch.push(bytes, *segment, &self.source.unwrap()));
        }
        Ok(messages.len())
    }
}

impl GsoSink for Shared {
    fn send_batch(&self, batch: &[u8], segment: usize, _to: &Remote) -> io::Result<()> {
        self.pass();
        self.sent.lock().unwrap().push(batch.chunks(segment).map(<[u8]>::to_vec).collect());
        Ok(())
    }
}

/// The packet format of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    Esp,
    Ovpn,
}

impl Format {
    /// An SA as the rig has it to begin with.
    fn change(self, sa: &mut OutboundSa) {
        if self == Self::Ovpn {
            ovpn::in_ovpn(sa);
        }
    }

    /// Gives the SA the identity of another one, by number.
    fn number(self, sa: &mut OutboundSa, number: u32) {
        (sa.spi, sa.key) = match self {
            Self::Esp => (number, SaKey::from_bytes([number as u8; 36])),
            // DATA_V2 with a peer id of lane 0.
            Self::Ovpn => (0x4800_0000 | number << 8, SaKey::for_ovpn([number as u8; 40])),
        };
    }
}

/// A state that seals and opens, the counters of its threads, and their events.
struct Helped {
    format: Format,
    state: RwLock<State>,
    remote: Remote,
    counters: Vec<Arc<WorkerCounters>>,
    events: Mutex<Vec<EngineEvent>>,
}

impl Helped {
    fn new() -> Self {
        Self::of(Format::Esp)
    }

    fn of(format: Format) -> Self {
        let Rig { state, socket, far_socket, .. } = Rig::with(|sa| format.change(sa));
        let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), far_socket.port());
        Self {
            format,
            state: RwLock::new(state),
            remote: socket.real.remote(at).unwrap(),
            counters: (0..THREADS).map(|_| Arc::default()).collect(),
            events: Mutex::default(),
        }
    }

    fn command(&self, command: EngineCommand) {
        self.state.write().unwrap().apply(command, |_| Ok(self.remote)).unwrap();
    }

    /// Runs `unit` on several threads until nothing is left. While something is held back they ask again.
    fn run<T>(
        &self,
        threads: usize,
        wire: &Shared,
        make: impl Fn() -> T + Sync,
        unit: impl Fn(&State, &WorkerCounters, &mut T) -> io::Result<()> + Sync,
    ) {
        thread::scope(|scope| {
            for counters in &self.counters[..threads] {
                let (make, unit) = (&make, &unit);
                scope.spawn(move || {
                    let mut mine = make();
                    loop {
                        let done = unit(&self.state.read().unwrap(), counters, &mut mine);
                        match done {
                            Ok(()) => {}
                            Err(_) if wire.is_over() => return,
                            Err(_) => thread::yield_now(),
                        }
                    }
                });
            }
        });
    }

    fn seal(&self, threads: usize, gate: &TicketGate, wire: &Shared) {
        let events = |event| self.events.lock().unwrap().push(event);
        let make = || (Transmitter::new(64, LOCAL), vec![0; 70_000]);
        self.run(threads, wire, make, |state, counters, (transmitter, buffer)| {
            let env = Env { tap: wire, socket: wire, counters, events: &events };
            seal_unit(gate, state, &env, (state.networks.first(), transmitter), buffer)
        });
    }

    fn open(&self, threads: usize, gate: &TicketGate, wire: &Shared) {
        let events = |event| self.events.lock().unwrap().push(event);
        self.run(threads, wire, Receiver::new, |state, counters, receiver| {
            let env = Env { tap: wire, socket: wire, counters, events: &events };
            open_unit(gate, wire, state, &env, receiver)
        });
    }

    /// As one worker opens them.
    fn open_inline(&self, batches: &[Batch]) -> Vec<Vec<u8>> {
        let events = |event| self.events.lock().unwrap().push(event);
        let (tap, wire) =
            (FakeTap::default(), Shared { source: Some(self.remote), ..Shared::default() });
        wire.arriving.lock().unwrap().extend(batches.iter().cloned());
        let mut receiver = Receiver::new();
        let env = Env { tap: &tap, socket: &wire, counters: &self.counters[0], events: &events };
        while MessageSource::recv(&wire, &mut receiver.batch, 0).is_ok() {
            receiver.handle_batch(&self.state.read().unwrap(), &env);
        }
        tap.frames.into_inner()
    }

    /// As one worker seals them.
    fn seal_inline(&self, reads: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let events = |event| self.events.lock().unwrap().push(event);
        let (tap, wire) = (FakeTap::default(), Shared::default());
        let env = Env { tap: &tap, socket: &wire, counters: &self.counters[0], events: &events };
        let mut transmitter = Transmitter::new(64, LOCAL);
        for read in reads {
            let state = self.state.read().unwrap();
            transmitter.handle_read(&state, &env, state.networks.first(), read);
        }
        transmitter.flush(&self.state.read().unwrap(), &env);
        wire.datagrams()
    }

    fn drops(&self) -> Vec<(DropReason, u64)> {
        let drops = Registry::default().read(&self.counters).drops;
        drops.into_iter().filter(|(_, count)| *count > 0).collect()
    }

    fn traffic(&self) -> Vec<(Work, u64)> {
        let counted = [Work::DatagramsSent, Work::DatagramsReceived, Work::MessagesReceived];
        let counters = Registry::default().read(&self.counters);
        counted.map(|work| (work, counters.done(work))).to_vec()
    }
}

/// Reads of all kinds: super-packets, small ones, to a group, to an unknown address, nonsense.
fn load(random: &mut Random, reads: usize) -> Vec<Vec<u8>> {
    (0..reads)
        .map(|number| {
            let mut read = match random.below(10) {
                0..=4 => tcp_read(&pattern(1_349 + random.below(45 * 1_348)), 1_348, tcp::ACK),
                5 => tcp_read(&pattern(2_000 + random.below(20_000)), 88, tcp::ACK | tcp::PSH),
                6 => udp_read(&pattern(random.below(1_300)), true),
                7 => udp_read(&pattern(1_500 + random.below(4_000)), false),
                8 => tcp_read(&[], 0, tcp::ACK),
                _ => {
                    let mut read = tcp_read(&pattern(random.below(1_000)), 0, tcp::ACK);
                    let to: [u8; 6] = [[0xff; 6], [2, 9, 9, 9, 9, 9]][random.below(2)];
                    read[vnet::LEN..vnet::LEN + 6].copy_from_slice(&to);
                    read
                }
            };
            // Each is told from all others by its TCP sequence number or UDP ports, as far as it goes.
            let at = vnet::LEN + ethernet::LEN + ipv4::LEN;
            read[at..at + 2].copy_from_slice(&(number as u16).to_be_bytes());
            read
        })
        .collect()
}

fn install(helped: &Helped, spi: u32, outbound: bool) {
    let mut sa = outbound_sa(SPI);
    helped.format.number(&mut sa, spi);
    let (engine, remote) = (EngineKind::Userspace, helped.remote.address());
    helped.command(if outbound {
        EngineCommand::InstallOutbound { engine, peer: PEER, path: PATH, sa, remote }
    } else {
        let sa = InboundSa { cipher: sa.cipher, key: sa.key, ..inbound_sa(sa.spi) };
        EngineCommand::InstallInbound { engine, remote: remote.ip(), peer: PEER, path: PATH, sa }
    });
}

#[test]
fn several_threads_seal_what_one_seals() {
    let mut random = Random::fresh("several_threads_seal_what_one_seals");
    for round in 0..8 {
        let format = [Format::Esp, Format::Ovpn][round % 2];
        let reads = load(&mut random, 300);
        let (one, several) = (Helped::of(format), Helped::of(format));
        let mut wanted = one.seal_inline(&reads[..200]);
        install(&one, 301, true);
        wanted.extend(one.seal_inline(&reads[200..]));
        let (gate, wire) = (TicketGate::default(), Shared::default());
        wire.reads.lock().unwrap().extend(reads[..200].iter().cloned());
        several.seal(THREADS, &gate, &wire);
        install(&several, 301, true);
        wire.reads.lock().unwrap().extend(reads[200..].iter().cloned());
        several.seal(THREADS, &gate, &wire);
        // The same sequence numbers in the same order, hence the same bytes.
        assert!(wire.datagrams() == wanted, "round {round}, {format:?}");
        assert_eq!(several.drops(), one.drops());
        assert_eq!(several.traffic(), one.traffic());
    }
}

/// Datagrams as a network may deliver them, put together into messages and calls.
fn arrivals(random: &mut Random, datagrams: &[Vec<u8>]) -> Vec<Batch> {
    let mut left: VecDeque<Vec<u8>> = VecDeque::new();
    for datagram in datagrams {
        let mut datagram = datagram.clone();
        match random.below(200) {
            0 => continue,
            1 => {
                let at = random.below(datagram.len() - 20) + 20;
                datagram[at] ^= 1;
            }
            2 => left.push_back(datagram.clone()),
            3 => {
                let at = left.len() - random.below(left.len().min(60) + 1);
                left.insert(at, datagram);
                continue;
            }
            4 => left.push_back(vec![0xff]),
            5 => left.push_back(pattern(random.below(90))),
            6 => {
                let earlier = random.below(datagrams.len());
                left.push_back(datagrams[earlier].clone());
            }
            _ => {}
        }
        left.push_back(datagram);
    }
    let mut batches = Vec::new();
    while !left.is_empty() {
        let mut batch = Batch::new();
        for _ in 0..=random.below(3) {
            let Some(first) = left.pop_front() else { break };
            let (segment, mut bytes) = (first.len(), first);
            for _ in 0..random.below(64) {
                let is_full = bytes.len() + segment > RUN_BYTES_MAX;
                if left.front().is_none_or(|next| next.len() != segment) || is_full {
                    break;
                }
                bytes.extend(left.pop_front().unwrap());
            }
            batch.push((bytes, segment));
        }
        batches.push(batch);
    }
    batches
}

#[test]
fn several_threads_open_what_one_opens() {
    let mut random = Random::fresh("several_threads_open_what_one_opens");
    for round in 0..8 {
        let format = [Format::Esp, Format::Ovpn][round % 2];
        let sealer = Helped::of(format);
        install(&sealer, 301, false);
        let mut datagrams = sealer.seal_inline(&load(&mut random, 250));
        install(&sealer, 301, true);
        datagrams.extend(sealer.seal_inline(&load(&mut random, 250)));
        let batches = arrivals(&mut random, &datagrams);
        let (one, several) = (Helped::of(format), Helped::of(format));
        install(&one, 301, false);
        install(&several, 301, false);
        let wanted = one.open_inline(&batches);
        let wire = Shared { source: Some(several.remote), ..Shared::default() };
        wire.arriving.lock().unwrap().extend(batches);
        several.open(THREADS, &TicketGate::default(), &wire);
        assert!(*wire.written.lock().unwrap() == wanted, "round {round}, {format:?}");
        // A forged repetition is the one or the other, by which packet comes first.
        let without = |drops: Vec<(DropReason, u64)>| {
            let both = [DropReason::Forged, DropReason::Replayed, DropReason::TooOld];
            let sum = drops.iter().filter(|drop| both.contains(&drop.0)).map(|drop| drop.1).sum();
            let others = drops.into_iter().filter(|drop| !both.contains(&drop.0));
            (others.collect::<Vec<_>>(), sum)
        };
        let (drops, both): (_, u64) = without(several.drops());
        assert_eq!((drops, both), without(one.drops()));
        assert!(both > 0);
        assert_eq!(several.traffic(), one.traffic());
        let firsts = |helped: &Helped| {
            let events = helped.events.lock().unwrap();
            let is_first =
                |event: &&EngineEvent| matches!(event, EngineEvent::InboundFirstUse { .. });
            events.iter().filter(is_first).count()
        };
        assert_eq!((firsts(&one), firsts(&several)), (2, 2));
    }
}

/// A separate batch for each datagram.
fn one_by_one(datagrams: &[Vec<u8>]) -> Vec<Batch> {
    datagrams.iter().map(|datagram| vec![(datagram.clone(), datagram.len())]).collect()
}

/// The SPIs of datagrams as they follow each other.
fn spis(datagrams: &[Vec<u8>]) -> Vec<u32> {
    let mut spis: Vec<u32> = datagrams
        .iter()
        .map(|datagram| u32::from_be_bytes(*datagram.first_chunk().unwrap()))
        .collect();
    spis.dedup();
    spis
}

#[test]
fn sas_come_and_go_while_several_threads_work() {
    const SPIS: std::ops::Range<u32> = 301..310;
    let mut random = Random::fresh("sas_come_and_go_while_several_threads_work");
    let reads: Vec<_> = load(&mut random, 600)
        .into_iter()
        .filter(|read| read[vnet::LEN..vnet::LEN + 6] == FAR.0)
        .collect();
    let parts: Vec<_> = reads.chunks(reads.len().div_ceil(SPIS.len() + 1)).collect();
    let plain = Helped::new();
    let sealed = plain.seal_inline(&reads);
    let wanted = plain.open_inline(&one_by_one(&sealed));

    // One that comes is used from the next read on, by whichever thread takes that.
    let (one, several) = (Helped::new(), Helped::new());
    let mut datagrams = one.seal_inline(parts[0]);
    for (part, spi) in parts[1..].iter().zip(SPIS) {
        install(&one, spi, true);
        datagrams.extend(one.seal_inline(part));
    }
    let wire = Shared { allowance: Mutex::new(Some(0)), ..Shared::default() };
    wire.reads.lock().unwrap().extend(reads.iter().cloned());
    thread::scope(|scope| {
        scope.spawn(|| several.seal(THREADS, &TicketGate::default(), &wire));
        for (part, spi) in parts.iter().zip(SPIS) {
            wire.let_take(part.len());
            install(&several, spi, true);
        }
        wire.let_take_all();
    });
    let all: Vec<u32> = std::iter::once(SPI).chain(SPIS).collect();
    assert_eq!(spis(&wire.datagrams()), all, "one SA after the other");
    assert!(wire.datagrams() == datagrams, "what one thread seals");
    SPIS.for_each(|spi| install(&several, spi, false));
    let opened = several.open_inline(&one_by_one(&datagrams));
    assert!(opened == wanted, "the same frames in the same order");
    assert_eq!(several.drops(), []);

    // A removed SA: later packets are missing and nothing else.
    let removed = Helped::new();
    let wire = Shared {
        source: Some(removed.remote),
        allowance: Mutex::new(Some(0)),
        ..Shared::default()
    };
    wire.arriving.lock().unwrap().extend(one_by_one(&sealed));
    let before = sealed.len() / 3;
    thread::scope(|scope| {
        scope.spawn(|| removed.open(THREADS, &TicketGate::default(), &wire));
        wire.let_take(before);
        removed.command(EngineCommand::RemoveInbound { spi: SPI });
        wire.let_take_all();
    });
    assert!(wire.written.into_inner().unwrap() == wanted[..before]);
    let missing = (sealed.len() - before) as u64;
    assert_eq!(removed.drops(), [(DropReason::UnknownSpi, missing)]);
}

#[test]
fn a_thread_that_is_stuck_holds_up_the_others_with_one_unit_each() {
    let helped = Helped::new();
    let wire = Shared { source: Some(helped.remote), ..Shared::default() };
    let read = tcp_read(&pattern(45 * 1348), 1348, tcp::ACK);
    let reads = vec![read; 50];
    let until = |done: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(20), "it takes for ever");
            thread::yield_now();
        }
        // Time for a thread that takes more than it may.
        thread::sleep(Duration::from_millis(30));
    };
    let whole = |datagrams: &Vec<Vec<u8>>| vec![(datagrams.concat(), datagrams[0].len())];
    wire.reads.lock().unwrap().extend(reads.iter().cloned());
    wire.stuck.store(true, SeqCst);
    thread::scope(|scope| {
        scope.spawn(|| helped.seal(THREADS, &TicketGate::default(), &wire));
        let left = || wire.reads.lock().unwrap().len();
        until(&|| left() <= 50 - THREADS && wire.waiting.load(SeqCst) == 1);
        assert_eq!((left(), wire.waiting.load(SeqCst)), (50 - THREADS, 1));
        wire.stuck.store(false, SeqCst);
    });
    let runs = wire.sent.lock().unwrap().clone();
    assert_eq!(runs.len(), 50);
    wire.arriving.lock().unwrap().extend(runs.iter().map(whole));
    wire.stuck.store(true, SeqCst);
    thread::scope(|scope| {
        scope.spawn(|| helped.open(THREADS, &TicketGate::default(), &wire));
        let left = || wire.arriving.lock().unwrap().len();
        until(&|| left() <= 50 - THREADS && wire.waiting.load(SeqCst) == 1);
        assert_eq!((left(), wire.waiting.load(SeqCst)), (50 - THREADS, 1));
        wire.stuck.store(false, SeqCst);
    });
    assert!(*wire.written.lock().unwrap() == reads);
    assert_eq!(helped.drops(), []);
}

#[test]
fn a_worker_and_a_helper_never_work_without_the_gates_at_once() {
    let help = Help::default();
    let (by_itself, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let (mut alone, mut helped) = (0, 0);
    let units = AtomicUsize::new(0);
    thread::scope(|scope| {
        for number in 0..2 {
            let (help, by_itself, stop, units) = (&help, &by_itself, &stop, &units);
            scope.spawn(move || {
                while !stop.load(SeqCst) {
                    if let Some(_at_work) = help.begin(number) {
                        for _ in 0..20 {
                            assert!(!by_itself.load(SeqCst), "the worker minds no gate");
                        }
                        units.fetch_add(1, SeqCst);
                    }
                }
            });
        }
        while alone < 2_000 || helped < 2_000 || units.load(SeqCst) < 2_000 {
            help.want((alone + helped) / 50 % 3);
            if help.is_on() {
                helped += 1;
                thread::yield_now();
                continue;
            }
            alone += 1;
            by_itself.store(true, SeqCst);
            thread::yield_now();
            by_itself.store(false, SeqCst);
        }
        stop.store(true, SeqCst);
    });
}

#[test]
fn no_allocation_per_unit() {
    let helped = Helped::new();
    let read = tcp_read(&pattern(45 * 1348), 1348, tcp::ACK);
    let tap = FakeTap::default();
    tap.forget.set(true);
    let sealed = Shared::default();
    sealed.reads.lock().unwrap().extend(vec![read; 260]);
    helped.seal(1, &TicketGate::default(), &sealed);
    let wire = Shared { source: Some(helped.remote), ..Shared::default() };
    let runs = sealed.sent.into_inner().unwrap();
    let batches = runs.iter().map(|run| vec![(run.concat(), run[0].len())]);
    wire.arriving.lock().unwrap().extend(batches);
    let (gate, mut receiver) = (TicketGate::default(), Receiver::new());
    let state = helped.state.read().unwrap();
    let nothing = |_| {};
    let env = Env { tap: &tap, socket: &wire, counters: &helped.counters[0], events: &nothing };
    let mut turn = || {
        let batch = wire.arriving.lock().unwrap().pop_front().unwrap();
        let info = allocation_counter::measure(|| {
            let mut front = gate.enter();
            receiver.batch.clear();
            assert!(receiver.batch.push(&batch[0].0, batch[0].1, &helped.remote));
            let ticket = front.draw();
            drop(front);
            receiver.open_pipelined(&state, &env);
            ticket.wait();
            receiver.commit(&state, &env);
        });
        info.count_total
    };
    // The replay window has its full size then.
    (0..200).for_each(|_| {
        turn();
    });
    assert_eq!((0..50).map(|_| turn()).sum::<u64>(), 0);
    assert_eq!(tap.written.get(), 250);
}
