//! Datagrams with numbers, both ways at once, of which none may be lost and none may come twice.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use weft_lab::net::slowness;

use crate::lab::{End, limit};

/// Between two datagrams of one way.
const PAUSE: Duration = Duration::from_millis(2);
/// The most datagrams under way in one direction. Every queue on their way holds more, however late an emulated
/// machine wakes the reader.
const UNDER_WAY_MAX: u64 = 128;
/// Bytes of a datagram, which begins with its number.
const DATAGRAM_BYTES: usize = 200;
/// Room for more than [`UNDER_WAY_MAX`] of them.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;
/// How long nothing comes until a receiver looks whether that was all.
const QUIET: Duration = Duration::from_millis(100);
/// How long the last datagrams may be under way on a fast machine.
const LAST_LIMIT: Duration = Duration::from_secs(2);

/// From one host to the other.
struct Way {
    from: UdpSocket,
    to: UdpSocket,
    sent: AtomicU64,
    /// The highest number that has come, plus one.
    heard: AtomicU64,
    /// Nothing more is sent.
    is_over: AtomicBool,
}

impl Way {
    fn new(from: &End, to: &End) -> Self {
        let bound = |end: &End| {
            let address = Ipv4Addr::new(10, 8, 0, end.number);
            end.within(|| UdpSocket::bind((address, 0)).unwrap())
        };
        let (from, to) = (bound(from), bound(to));
        from.connect(to.local_addr().unwrap()).unwrap();
        to.connect(from.local_addr().unwrap()).unwrap();
        set_socket_recv_buffer_size_force(&to, RECEIVE_BUFFER_BYTES).unwrap();
        to.set_read_timeout(Some(QUIET)).unwrap();
        let [sent, heard] = [AtomicU64::new(0), AtomicU64::new(0)];
        Self { from, to, sent, heard, is_over: AtomicBool::new(false) }
    }

    fn send(&self, stop: &AtomicBool) {
        let mut number = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            if number - self.heard.load(Ordering::Relaxed) < UNDER_WAY_MAX {
                let mut datagram = [0_u8; DATAGRAM_BYTES];
                datagram[..8].copy_from_slice(&number.to_be_bytes());
                self.from.send(&datagram).unwrap();
                number += 1;
                self.sent.store(number, Ordering::Relaxed);
            }
            thread::sleep(PAUSE);
        }
        self.is_over.store(true, Ordering::Release);
    }

    /// How often each number has arrived, once all have arrived or no more come.
    fn receive(&self) -> Vec<u32> {
        let mut times: Vec<u32> = Vec::new();
        let (mut different, mut last) = (0_u64, Instant::now());
        let mut datagram = [0_u8; DATAGRAM_BYTES];
        loop {
            match weft_io::uninterrupted(|| self.to.recv(&mut datagram)) {
                Ok(_) => {
                    let number = u64::from_be_bytes(*datagram.first_chunk().unwrap());
                    let at = number as usize;
                    times.resize(times.len().max(at + 1), 0);
                    different += u64::from(times[at] == 0);
                    times[at] += 1;
                    self.heard.fetch_max(number + 1, Ordering::Relaxed);
                    last = Instant::now();
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                    let is_over = self.is_over.load(Ordering::Acquire);
                    let sent = self.sent.load(Ordering::Relaxed);
                    let is_late = last.elapsed() > LAST_LIMIT * slowness();
                    if is_over && (different == sent || is_late) {
                        times.resize(times.len().max(sent as usize), 0);
                        return times;
                    }
                }
            }
        }
    }
}

/// The datagrams that go while something is done to the devices.
pub(crate) struct Load {
    ways: [Way; 2],
    stop: AtomicBool,
}

impl Load {
    /// Waits until a datagram has come, each way, that was sent after this was called.
    pub(crate) fn pass(&self) {
        // One may be on its way out already and not be counted yet.
        let marks = self.ways.each_ref().map(|way| way.sent.load(Ordering::Relaxed) + 2);
        let heard = |way: &Way| way.heard.load(Ordering::Relaxed);
        let begun = Instant::now();
        while self.ways.iter().zip(marks).any(|(way, mark)| heard(way) < mark) {
            assert!(begun.elapsed() < limit(), "datagrams come no more: {marks:?}");
            thread::sleep(PAUSE);
        }
    }
}

/// Ends the load, also where a step panics: its threads would be waited for.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does something to the devices of two hosts while datagrams go between them, each of which must come
/// exactly once.
pub(crate) fn under_load(a: &End, b: &End, steps: impl FnOnce(&Load)) {
    let load = Load { ways: [Way::new(a, b), Way::new(b, a)], stop: AtomicBool::new(false) };
    let load = &load;
    let counted = thread::scope(|scope| {
        let receivers = load.ways.each_ref().map(|way| {
            scope.spawn(move || way.send(&load.stop));
            scope.spawn(move || way.receive())
        });
        let ending = Ending(&load.stop);
        steps(load);
        drop(ending);
        receivers.map(|receiver| receiver.join().unwrap())
    });
    for times in counted {
        println!("{} datagrams", times.len());
        let wrong: Vec<(usize, u32)> =
            times.into_iter().enumerate().filter(|(_, times)| *times != 1).collect();
        assert!(wrong.is_empty(), "numbers that came not once, and how often: {wrong:?}");
    }
}
