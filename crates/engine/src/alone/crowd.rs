//! Several threads between devices that cost nothing: one flow with helpers, or a lane each.

use std::io;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use weft_crypto::Cipher;
use weft_io::cpu;
use weft_io::udp::{RUN_SEGMENTS_MIN, RecvBatch};

use super::{Lane, Load, PARTS, Rate, Rates, Void, Wire, ignore, mac, measure_lane, median};
use crate::error::EngineError;
use crate::ports::device::{Env, FrameSink, FrameSource, MessageSource};
use crate::ports::socket_buckets::RUN_MESSAGES_MAX;
use crate::ports::ticket_gate::TicketGate;
use crate::rx::receiver::Receiver;
use crate::stats::counters::WorkerCounters;
use crate::tables::state::State;
use crate::tx::transmitter::Transmitter;
use crate::workers::context::{open_unit, seal_unit};

/// Runs that are sealed beforehand and that all threads then open together.
const RUNS: usize = 96;

/// Measures one flow through one worker and its helpers, each way for about `time`. Without helpers the
/// worker passes no gate, as in an engine without helpers. `load` is of super-packets.
///
/// # Errors
/// [`EngineError::Io`]: there is no UDP socket to be had.
pub fn measure_helped(
    cipher: Cipher,
    load: Load,
    helpers: usize,
    time: Duration,
) -> Result<Rates, EngineError> {
    let mut lane = Lane::new(cipher, load, 1)?;
    let batch = (lane.packets() as f64, lane.payload_bytes() as f64);
    let of_runs = |runs_per_s: f64| Rate {
        gbps: runs_per_s * batch.1 * 8.0 / 1e9,
        packets_per_s: runs_per_s * batch.0,
    };
    let threads = helpers + 1;
    let sealed = of_runs(seal(&lane.state, &lane.read, threads, time));
    let opened = of_runs(open(&mut lane, threads, time));
    Ok(Rates { sealed, opened })
}

/// Measures several lanes at once, each on a thread. Each thread is pinned to a separate CPU while there are
/// enough. Returns the sum of all threads.
///
/// # Errors
/// [`EngineError::Io`]: there is no UDP socket to be had.
pub fn measure_lanes(
    cipher: Cipher,
    load: Load,
    lanes: usize,
    time: Duration,
) -> Result<Rates, EngineError> {
    let cpus = cpu::allowed().unwrap_or_default();
    let made: Result<Vec<Lane>, EngineError> =
        (0..lanes).map(|_| Lane::new(cipher, load, RUN_MESSAGES_MAX)).collect();
    let (barrier, all) = (Barrier::new(lanes), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for (number, mut lane) in made?.into_iter().enumerate() {
            let (cpus, barrier, all) = (&cpus, &barrier, &all);
            scope.spawn(move || {
                if let Some(cpu) = cpus.get(number % cpus.len().max(1)) {
                    // Not pinned it is slower at worst.
                    let _ = cpu::pin_to(*cpu);
                }
                let rates = measure_lane(&mut lane, time, || {
                    barrier.wait();
                });
                lock(all).push(rates);
            });
        }
        Ok::<_, EngineError>(())
    })?;
    let sum = |pick: &dyn Fn(&Rates) -> Rate| {
        let add = |a: Rate, b: Rate| Rate {
            gbps: a.gbps + b.gbps,
            packets_per_s: a.packets_per_s + b.packets_per_s,
        };
        let none = Rate { gbps: 0.0, packets_per_s: 0.0 };
        lock(&all).iter().map(pick).fold(none, add)
    };
    Ok(Rates { sealed: sum(&|rates| rates.sealed), opened: sum(&|rates| rates.opened) })
}

/// A TAP device that hands out what stands in the buffer already, until it is told to stop.
struct Full {
    len: usize,
    taken: AtomicU64,
    stop: AtomicBool,
}

impl FrameSource for Full {
    #[inline]
    fn recv(&self, _buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.taken.fetch_add(1, Ordering::Relaxed);
        Ok(self.len)
    }
}

impl FrameSink for Full {
    fn send(&self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        Void.send(slices)
    }
}

/// Runs a second that `threads` threads seal.
fn seal(state: &State, read: &[u8], threads: usize, time: Duration) -> f64 {
    let tap = Full { len: read.len(), taken: AtomicU64::new(0), stop: AtomicBool::new(false) };
    let (gate, network) = (TicketGate::default(), state.networks.first());
    let work = || {
        let counters = WorkerCounters::default();
        let env = Env { tap: &tap, socket: &Void, counters: &counters, events: &ignore };
        let mut transmitter = Transmitter::new(RUN_SEGMENTS_MIN, mac(0));
        let mut buffer = read.to_vec();
        if threads > 1 {
            while seal_unit(&gate, state, &env, (network, &mut transmitter), &mut buffer).is_ok() {}
            return;
        }
        while let Ok(len) = tap.recv(&mut buffer) {
            transmitter.handle_read(state, &env, network, &buffer[..len]);
            transmitter.flush(state, &env);
        }
    };
    thread::scope(|scope| {
        (0..threads).for_each(|_| {
            scope.spawn(work);
        });
        let part = || {
            let (begin, before) = (Instant::now(), tap.taken.load(Ordering::Relaxed));
            thread::sleep(time / PARTS);
            (tap.taken.load(Ordering::Relaxed) - before) as f64 / begin.elapsed().as_secs_f64()
        };
        let rates = (0..=PARTS).map(|_| part()).skip(1).collect();
        tap.stop.store(true, Ordering::Relaxed);
        median(rates)
    })
}

/// A socket whose messages are there already: the last one first.
#[derive(Default)]
struct Arrived {
    waiting: Mutex<Vec<RecvBatch>>,
    done: Mutex<Vec<RecvBatch>>,
}

impl MessageSource for Arrived {
    fn recv(&self, batch: &mut RecvBatch, _max: usize) -> io::Result<usize> {
        let mut next = lock(&self.waiting).pop().ok_or(io::ErrorKind::WouldBlock)?;
        mem::swap(&mut next, batch);
        lock(&self.done).push(next);
        Ok(batch.len())
    }
}

/// Runs a second that `threads` threads open, [`RUNS`] at a time.
fn open(lane: &mut Lane, threads: usize, time: Duration) -> f64 {
    let Lane { state, transmitter, remote, read, .. } = lane;
    let (state, gate, socket) = (&*state, TicketGate::default(), Arrived::default());
    lock(&socket.done).extend((0..RUNS).map(|_| RecvBatch::new()));
    let counters = WorkerCounters::default();
    let mut fill = || {
        let done = mem::take(&mut *lock(&socket.done));
        let filled = done.into_iter().map(|mut batch| {
            batch.clear();
            let wire = Wire { batch: (&mut batch).into(), source: *remote };
            let env = Env { tap: &Void, socket: &wire, counters: &counters, events: &ignore };
            transmitter.handle_read(state, &env, state.networks.first(), read);
            transmitter.flush(state, &env);
            batch
        });
        let mut filled: Vec<RecvBatch> = filled.collect();
        filled.reverse();
        *lock(&socket.waiting) = filled;
    };
    // Rounds that are ready, and a meeting at the end of each.
    let (ready, end, stop) =
        (AtomicUsize::new(0), Barrier::new(threads + 1), AtomicBool::new(false));
    let spans = Mutex::new(Vec::new());
    let work = || {
        let counters = WorkerCounters::default();
        let env = Env { tap: &Void, socket: &Void, counters: &counters, events: &ignore };
        let mut receiver = Receiver::new();
        receiver.set_merging(true, true);
        for round in 1.. {
            // Awake: to be woken up takes some virtual machines as long as to open ten runs.
            while ready.load(Ordering::Acquire) < round {
                thread::yield_now();
            }
            if stop.load(Ordering::Relaxed) {
                return;
            }
            let begin = Instant::now();
            if threads > 1 {
                while open_unit(&gate, &socket, state, &env, &mut receiver).is_ok() {}
            } else {
                while socket.recv(&mut receiver.batch, 1).is_ok() {
                    receiver.handle_batch(state, &env);
                }
            }
            lock(&spans).push((begin, Instant::now()));
            end.wait();
        }
    };
    thread::scope(|scope| {
        (0..threads).for_each(|_| {
            scope.spawn(work);
        });
        let (mut rates, mut spent) = (Vec::new(), Duration::ZERO);
        while spent < time || rates.len() < 3 {
            fill();
            ready.fetch_add(1, Ordering::Release);
            end.wait();
            let spans = mem::take(&mut *lock(&spans));
            let begin = spans.iter().map(|span| span.0).min();
            let last = spans.iter().map(|span| span.1).max();
            let took = begin.zip(last).map_or(Duration::ZERO, |(begin, last)| last - begin);
            spent += took.max(Duration::from_micros(1));
            rates.push(RUNS as f64 / took.as_secs_f64());
        }
        stop.store(true, Ordering::Relaxed);
        ready.fetch_add(1, Ordering::Release);
        // The first one meets cold memory.
        median(rates.split_off(1))
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn figures_of_several_threads_are_of_whole_runs() {
        let (load, time) = (Load::Tcp { link_mtu: 1500 }, Duration::from_millis(200));
        let helped = |helpers| measure_helped(Cipher::Aes256Gcm, load, helpers, time).unwrap();
        let lanes = measure_lanes(Cipher::Aes256Gcm, load, 2, time).unwrap();
        for rates in [helped(0), helped(1), lanes] {
            for rate in [rates.sealed, rates.opened] {
                let payload = rate.gbps * 1e9 / 8.0 / rate.packets_per_s;
                assert!((payload - 1336.0).abs() < 0.1, "{rate:?}");
            }
        }
    }
}
