//! Socket buckets: the sockets of one port of a worker. The kernel shares datagrams out among them by source.
//!
//! Stochastic fairness queueing (McKenney 1990) with the kernel's queues. A peer that sends too much fills
//! the socket of its bucket, where its datagrams are dropped; a worker takes from each socket in turn. Peers
//! whose addresses fall into one bucket share its queue.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use weft_io::poller::Poller;
use weft_io::steer::{self, BUCKETS};
use weft_io::udp::{MESSAGES_MAX, UdpSocket};

use super::device::Senders;
use super::round_robin::RoundRobin;
use super::tap_queues::TOKENS_END;
use crate::error::EngineError;

/// Bytes taken from one socket in a turn while others have something, each message counted as
/// [`MESSAGE_BYTES`] more: eight full GSO batches. A turn of small messages ends earlier, with its batches.
pub(crate) const TURN_BYTES: usize = 8 * 65_536;
/// The cost of a message beside its bytes, as a number of bytes that cost as much.
const MESSAGE_BYTES: usize = 1_024;
/// Sockets of a worker: of its share of the engine's port, and of its lanes' port.
pub(crate) const SOCKETS_MAX: usize = 2 * BUCKETS;
/// The socket that also sends datagrams that the kernel may cut.
const CUTTING: usize = BUCKETS - 1;
/// Their tokens begin here.
const FIRST_TOKEN: u64 = TOKENS_END;

/// Messages taken in one call while they come merged by GRO; they fit the processor's cache.
pub(crate) const RUN_MESSAGES_MAX: usize = 8;

/// As many of them are a unit that one thread opens beside others. They are few enough that all threads have
/// work, and hold a super-packet that did not fit one GSO batch.
pub(crate) const UNIT_MESSAGES_MAX: usize = 2;

/// How a socket's messages come, which says how many the next batch may have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchSize {
    messages_max: usize,
}

impl BatchSize {
    /// Nothing has come yet.
    pub(crate) const UNKNOWN: Self = Self { messages_max: RUN_MESSAGES_MAX };

    /// How many messages the next batch may have.
    pub(crate) const fn messages_max(self) -> usize {
        self.messages_max
    }

    /// How many messages the next unit may have that is opened beside others.
    pub(crate) const fn unit_messages_max(self) -> usize {
        if self.messages_max > RUN_MESSAGES_MAX { self.messages_max } else { UNIT_MESSAGES_MAX }
    }

    /// Notes how a batch came, since the next one will come alike.
    pub(crate) const fn note(&mut self, messages: u64, datagrams: u64) {
        // Senders without GSO fill many small messages: take more of them at once.
        let single = datagrams <= messages;
        self.messages_max = if single { MESSAGES_MAX } else { RUN_MESSAGES_MAX };
    }
}

/// The sockets of one port, one for each bucket.
#[derive(Clone, Debug)]
pub(crate) struct SocketBuckets {
    sockets: Arc<[Arc<UdpSocket>]>,
}

impl SocketBuckets {
    /// Binds a free port (0: any). The sockets share it with one another, not with another program that
    /// shares as well.
    ///
    /// # Errors
    /// The port is taken, or the kernel refused an option.
    pub(crate) fn bind(
        address: Option<IpAddr>,
        port: u16,
        merging: bool,
    ) -> Result<Self, EngineError> {
        // It is kept: a port that was given back is still had for a moment where another thread of this
        // process is starting a program.
        let first = UdpSocket::bind(address, port)?;
        first.share()?;
        Self::with(first, address, merging)
    }

    /// Binds a port that others have that were bound by [`Self::bind`].
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub(crate) fn bind_beside(
        address: Option<IpAddr>,
        port: u16,
        merging: bool,
    ) -> Result<Self, EngineError> {
        Self::with(UdpSocket::bind_shared(address, port)?, address, merging)
    }

    /// Binds the others to the port of the first.
    fn with(first: UdpSocket, address: Option<IpAddr>, merging: bool) -> Result<Self, EngineError> {
        let port = first.port();
        let mut sockets = vec![first];
        for _ in 1..BUCKETS {
            sockets.push(UdpSocket::bind_shared(address, port)?);
        }
        let cuts = sockets[CUTTING].allow_fragments();
        cuts.map_err(|source| EngineError::Kernel {
            what: "allow fragments of UDP datagrams",
            source,
        })?;
        if !merging {
            let stopped = sockets.iter_mut().try_for_each(UdpSocket::stop_merging);
            stopped.map_err(|source| EngineError::Kernel { what: "disable UDP_GRO", source })?;
        }
        Ok(Self { sockets: sockets.into_iter().map(Arc::new).collect() })
    }

    /// The socket to send from.
    pub(crate) fn sender(&self) -> &Arc<UdpSocket> {
        &self.sockets[0]
    }

    /// The sockets to send from.
    pub(crate) fn senders(&self) -> Senders {
        let [whole, cutting] = [0, CUTTING].map(|at| Arc::clone(&self.sockets[at]));
        Senders { whole, cutting }
    }

    /// Makes the kernel distribute datagrams to these sockets and to those that further workers bound to the same
    /// port afterwards. It chooses among `workers` workers by lane, and among a worker's sockets by source address.
    pub(crate) fn steer(&self, workers: usize) {
        if let Err(error) = steer::by_lane_and_source(&self.sockets[0], workers) {
            tracing::warn!(
                %error,
                "the kernel does not steer by lane and peer: workers share SAs, and peers share queues"
            );
        }
    }

    /// Datagrams that the kernel dropped since a socket was full.
    pub(crate) fn overflows(&self) -> u64 {
        self.sockets.iter().map(|socket| u64::from(socket.overflows())).sum()
    }
}

/// How much of a socket may be taken in one turn.
#[derive(Debug)]
pub(crate) struct Quota {
    /// `None`: no other has anything.
    left: Option<usize>,
}

impl Quota {
    /// Counts a message; returns whether more may be taken.
    #[inline]
    pub(crate) fn goes_on(&mut self, messages: usize, bytes: impl FnOnce() -> usize) -> bool {
        let Some(left) = &mut self.left else { return true };
        *left = left.saturating_sub(bytes() + messages * MESSAGE_BYTES);
        *left > 0
    }
}

/// One thread's reading of the one or two ports of a worker.
#[derive(Debug)]
pub(crate) struct SocketReader {
    /// The share of the engine's port first, then the lanes' port.
    sockets: Vec<Arc<UdpSocket>>,
    round_robin: RoundRobin<SOCKETS_MAX>,
    batch_sizes: [BatchSize; SOCKETS_MAX],
}

impl SocketReader {
    pub(crate) fn new(share: &SocketBuckets, lane_port: Option<&SocketBuckets>) -> Self {
        let all = [Some(share), lane_port].into_iter().flatten();
        let sockets: Vec<_> = all.flat_map(|buckets| buckets.sockets.iter().cloned()).collect();
        let round_robin = RoundRobin::new(sockets.len(), FIRST_TOKEN);
        Self { sockets, round_robin, batch_sizes: [BatchSize::UNKNOWN; SOCKETS_MAX] }
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// The poller's.
    pub(crate) fn watch(&self, poller: &Poller) -> io::Result<()> {
        let add = |(socket, token)| poller.add(socket, token);
        self.sockets.iter().zip(FIRST_TOKEN..).try_for_each(add)
    }

    /// The sockets with input.
    #[inline]
    pub(crate) const fn round_robin(&mut self) -> &mut RoundRobin<SOCKETS_MAX> {
        &mut self.round_robin
    }

    /// Takes turns, as [`RoundRobin::take`]. `take` is told a socket's number, how its batches come, and how
    /// much it may take.
    ///
    /// # Errors
    /// The first that is met.
    #[inline]
    pub(crate) fn take_turns(
        &mut self,
        mut take: impl FnMut(usize, &UdpSocket, &mut BatchSize, Quota) -> io::Result<()>,
    ) -> io::Result<()> {
        let Self { sockets, round_robin, batch_sizes } = self;
        round_robin.take(|number, is_alone| {
            let quota = Quota { left: (!is_alone).then_some(TURN_BYTES) };
            take(number, &sockets[number], &mut batch_sizes[number], quota)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{Ipv4Addr, SocketAddr};
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::time::Duration;

    use weft_io::namespace::unshare_network;
    use weft_io::udp::RecvBatch;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);
    /// The most runs that are sent until a socket is full: many times as many as one holds.
    const RUNS_MAX: u32 = 100_000;

    /// Runs `f` in a fresh network namespace where loopback is up.
    fn alone(f: impl FnOnce() + Send + 'static) {
        let thread = std::thread::spawn(|| {
            unshare_network().expect("this test needs root");
            let mut up = std::process::Command::new("ip");
            assert!(up.args(["link", "set", "lo", "up"]).status().unwrap().success());
            f();
        });
        thread.join().unwrap();
    }

    /// A sender with this address, and the port's address as it sees it.
    fn sender(host: u8, port: u16) -> (UdpSocket, weft_io::udp::Remote) {
        let socket = UdpSocket::bind(Some(Ipv4Addr::new(127, 0, 2, host).into()), 0).unwrap();
        let to = socket.remote(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap();
        (socket, to)
    }

    #[test]
    fn a_sender_that_fills_a_queue_takes_no_room_and_no_turn_from_another() {
        alone(|| {
            let buckets = SocketBuckets::bind(None, 0, true).unwrap();
            buckets.steer(1);
            let mut readers = SocketReader::new(&buckets, None);
            let mut poller = Poller::new().unwrap();
            readers.watch(&poller).unwrap();
            let port = buckets.sender().port();
            let (flood, to) = sender(1, port);
            let mut runs = 0;
            while buckets.overflows() == 0 {
                assert!(runs < RUNS_MAX, "the queue has no end");
                let _ = flood.send_run(&[1; 64 * 1_000], 1_000, &to);
                runs += 1;
            }
            let lost = buckets.overflows();
            let (other, to) = sender(2, port);
            (0..100).for_each(|_| other.send_run(&[2; 100], 100, &to).unwrap());
            assert_eq!(buckets.overflows(), lost, "it found no room");

            // Within one turn of each, however much the first one has.
            let tokens: Vec<u64> = poller.wait(Some(PATIENCE)).unwrap().collect();
            assert!(
                tokens.iter().all(|token| readers.round_robin().note_token(*token)),
                "{tokens:?}"
            );
            let mut taken = [0; 3];
            let mut batch = RecvBatch::new();
            let take = |_, socket: &UdpSocket, _: &mut BatchSize, mut quota: Quota| {
                loop {
                    let Ok(got) = socket.recv(&mut batch, MESSAGES_MAX) else { return Ok(()) };
                    for index in 0..got {
                        let range = batch.message(index).unwrap().range;
                        taken[usize::from(batch.buffer()[range.start])] += range.len();
                    }
                    if !quota.goes_on(got, || batch.bytes()) {
                        return Ok(());
                    }
                }
            };
            readers.take_turns(take).unwrap();
            assert_eq!(taken[2], 100 * 100);
            let most = TURN_BYTES + MESSAGES_MAX * weft_io::udp::MESSAGE_ROOM;
            assert!((TURN_BYTES / 2..most).contains(&taken[1]), "{taken:?}");
        });
    }

    #[test]
    fn a_single_sender_is_not_delayed() {
        alone(|| {
            let lane_port = SocketBuckets::bind(None, 0, true).unwrap();
            lane_port.steer(1);
            let share = SocketBuckets::bind(None, 0, true).unwrap();
            let mut readers = SocketReader::new(&share, Some(&lane_port));
            let mut poller = Poller::new().unwrap();
            readers.watch(&poller).unwrap();
            let (socket, to) = sender(3, lane_port.sender().port());
            socket.send_run(&[7; 20], 20, &to).unwrap();
            let tokens: Vec<u64> = poller.wait(Some(PATIENCE)).unwrap().collect();
            assert!(tokens.len() == 1 && readers.round_robin().note_token(tokens[0]), "{tokens:?}");
            let mut turns = 0;
            let take = |number, _: &UdpSocket, _: &mut BatchSize, mut quota: Quota| {
                turns += 1;
                assert!((BUCKETS..SOCKETS_MAX).contains(&number), "the lanes' port: {number}");
                assert!((0..1_000).all(|_| quota.goes_on(MESSAGES_MAX, || TURN_BYTES)));
                Ok(())
            };
            readers.take_turns(take).unwrap();
            assert!(turns == 1 && !readers.round_robin().is_ready(), "{turns}");
        });
    }

    #[test]
    fn a_port_that_somebody_has_is_refused_and_shared_only_when_asked() {
        alone(|| {
            let first = SocketBuckets::bind(None, 0, true).unwrap();
            let port = first.sender().port();
            assert!(SocketBuckets::bind(None, port, true).is_err());
            assert!(SocketBuckets::bind_beside(None, port, true).is_ok());
        });
    }

    #[test]
    fn a_port_is_bound_while_other_threads_start_programs() {
        alone(|| {
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Relaxed) {
                        assert!(Command::new("true").status().unwrap().success());
                    }
                });
                // Each once: the programs have copies of the earlier sockets.
                let refused: Vec<_> = (20_000..21_000)
                    .map(|port| SocketBuckets::bind(None, port, true).map(drop))
                    .filter(Result::is_err)
                    .collect();
                done.store(true, Relaxed);
                assert!(refused.is_empty(), "{refused:?}");
            });
        });
    }
}
