//! One port of a worker: sockets among which the kernel shares datagrams out by where they come from.
//!
//! Stochastic fairness queueing (McKenney 1990) with the kernel's queues: what a peer sends beyond what
//! is taken fills the socket of its bucket and is dropped there, and a worker takes from each socket in
//! turn. Peers whose addresses fall into one bucket share its queue.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use weft_io::poller::Poller;
use weft_io::steer::{self, BUCKETS};
use weft_io::udp::UdpSocket;

use crate::EngineError;
use crate::device::Senders;
use crate::queues::TOKENS_END;
use crate::receive::Kind;
use crate::turns::Turns;

/// Bytes taken from one socket in a turn while others have something, each message counted as
/// [`MESSAGE_BYTES`] more: eight full runs. A turn of small messages ends earlier, with its batches.
pub(crate) const TURN_BYTES: usize = 8 * 65_536;
/// What a message costs beside its bytes, as bytes that cost as much.
const MESSAGE_BYTES: usize = 1_024;
/// Sockets of a worker: of its share of the engine's port, and of its lanes' port.
pub(crate) const SOCKETS_MAX: usize = 2 * BUCKETS;
/// The one that also sends what the kernel may cut.
const CUTTING: usize = BUCKETS - 1;
/// Their tokens begin here.
const FIRST_TOKEN: u64 = TOKENS_END;

/// The sockets of one port, one for each bucket.
#[derive(Clone, Debug)]
pub(crate) struct Buckets {
    sockets: Arc<[Arc<UdpSocket>]>,
}

impl Buckets {
    /// Binds a port (0: any free one) that nobody has: sharing is with one another, not with another
    /// program that shares as well.
    ///
    /// # Errors
    /// The port is somebody's, or what the kernel refused.
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
        cuts.map_err(|source| EngineError::Kernel { what: "let UDP datagrams be cut", source })?;
        if !merging {
            let stopped = sockets.iter_mut().try_for_each(UdpSocket::stop_merging);
            stopped.map_err(|source| EngineError::Kernel { what: "turn UDP_GRO off", source })?;
        }
        Ok(Self { sockets: sockets.into_iter().map(Arc::new).collect() })
    }

    /// The one that is sent from.
    pub(crate) fn sender(&self) -> &Arc<UdpSocket> {
        &self.sockets[0]
    }

    /// What is sent from.
    pub(crate) fn senders(&self) -> Senders {
        let [whole, cutting] = [0, CUTTING].map(|at| Arc::clone(&self.sockets[at]));
        Senders { whole, cutting }
    }

    /// Has the kernel share datagrams out to these and to those of further workers that were bound to
    /// the same port after them: to so many workers by lane, and to each one's by where they come from.
    pub(crate) fn steer(&self, workers: usize) {
        if let Err(error) = steer::by_lane_and_source(&self.sockets[0], workers) {
            tracing::warn!(
                %error,
                "the kernel does not steer by lane and peer: workers share SAs, and peers queues"
            );
        }
    }

    /// Datagrams that the kernel dropped since a socket was full.
    pub(crate) fn overflows(&self) -> u64 {
        self.sockets.iter().map(|socket| u64::from(socket.overflows())).sum()
    }
}

/// How much of a socket is taken in one go.
#[derive(Debug)]
pub(crate) struct Turn {
    /// `None`: no other has anything.
    left: Option<usize>,
}

impl Turn {
    /// Counts what was taken; whether more may be.
    #[inline]
    pub(crate) fn goes_on(&mut self, messages: usize, bytes: impl FnOnce() -> usize) -> bool {
        let Some(left) = &mut self.left else { return true };
        *left = left.saturating_sub(bytes() + messages * MESSAGE_BYTES);
        *left > 0
    }
}

/// One thread's reading of the one or two ports of a worker.
#[derive(Debug)]
pub(crate) struct BucketReader {
    /// The share of the engine's port first, then the lanes' port.
    sockets: Vec<Arc<UdpSocket>>,
    turns: Turns<SOCKETS_MAX>,
    kinds: [Kind; SOCKETS_MAX],
}

impl BucketReader {
    pub(crate) fn new(share: &Buckets, lane_port: Option<&Buckets>) -> Self {
        let all = [Some(share), lane_port].into_iter().flatten();
        let sockets: Vec<_> = all.flat_map(|buckets| buckets.sockets.iter().cloned()).collect();
        let turns = Turns::new(sockets.len(), FIRST_TOKEN);
        Self { sockets, turns, kinds: [Kind::UNKNOWN; SOCKETS_MAX] }
    }

    /// Waits for all of them.
    ///
    /// # Errors
    /// The poller's.
    pub(crate) fn watch(&self, poller: &Poller) -> io::Result<()> {
        let add = |(socket, token)| poller.add(socket, token);
        self.sockets.iter().zip(FIRST_TOKEN..).try_for_each(add)
    }

    /// Which have something.
    #[inline]
    pub(crate) const fn turns(&mut self) -> &mut Turns<SOCKETS_MAX> {
        &mut self.turns
    }

    /// Takes turns, as [`Turns::take`]. `take` is told a socket's number, how its batches come, and how
    /// much it may take.
    ///
    /// # Errors
    /// The first that is met.
    #[inline]
    pub(crate) fn take_turns(
        &mut self,
        mut take: impl FnMut(usize, &UdpSocket, &mut Kind, Turn) -> io::Result<()>,
    ) -> io::Result<()> {
        let Self { sockets, turns, kinds } = self;
        turns.take(|number, is_alone| {
            let turn = Turn { left: (!is_alone).then_some(TURN_BYTES) };
            take(number, &sockets[number], &mut kinds[number], turn)
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
    use weft_io::udp::{MESSAGES_MAX, RecvBatch};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);
    /// The most runs that are sent until a socket is full: many times what one holds.
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

    /// A sender with this address, and what reaches the port from there.
    fn sender(host: u8, port: u16) -> (UdpSocket, weft_io::udp::Remote) {
        let socket = UdpSocket::bind(Some(Ipv4Addr::new(127, 0, 2, host).into()), 0).unwrap();
        let to = socket.remote(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).unwrap();
        (socket, to)
    }

    #[test]
    fn who_fills_a_queue_takes_no_room_and_no_turn_from_another() {
        alone(|| {
            let buckets = Buckets::bind(None, 0, true).unwrap();
            buckets.steer(1);
            let mut readers = BucketReader::new(&buckets, None);
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
            assert!(tokens.iter().all(|token| readers.turns().note_token(*token)), "{tokens:?}");
            let mut taken = [0; 3];
            let mut batch = RecvBatch::new();
            let take = |_, socket: &UdpSocket, _: &mut Kind, mut turn: Turn| {
                loop {
                    let Ok(got) = socket.recv(&mut batch, MESSAGES_MAX) else { return Ok(()) };
                    for index in 0..got {
                        let range = batch.message(index).unwrap().range;
                        taken[usize::from(batch.buffer()[range.start])] += range.len();
                    }
                    if !turn.goes_on(got, || batch.bytes()) {
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
    fn who_is_alone_is_held_up_by_nobody() {
        alone(|| {
            let lane_port = Buckets::bind(None, 0, true).unwrap();
            lane_port.steer(1);
            let share = Buckets::bind(None, 0, true).unwrap();
            let mut readers = BucketReader::new(&share, Some(&lane_port));
            let mut poller = Poller::new().unwrap();
            readers.watch(&poller).unwrap();
            let (socket, to) = sender(3, lane_port.sender().port());
            socket.send_run(&[7; 20], 20, &to).unwrap();
            let tokens: Vec<u64> = poller.wait(Some(PATIENCE)).unwrap().collect();
            assert!(tokens.len() == 1 && readers.turns().note_token(tokens[0]), "{tokens:?}");
            let mut turns = 0;
            let take = |number, _: &UdpSocket, _: &mut Kind, mut turn: Turn| {
                turns += 1;
                assert!((BUCKETS..SOCKETS_MAX).contains(&number), "the lanes' port: {number}");
                assert!((0..1_000).all(|_| turn.goes_on(MESSAGES_MAX, || TURN_BYTES)));
                Ok(())
            };
            readers.take_turns(take).unwrap();
            assert!(turns == 1 && !readers.turns().is_ready(), "{turns}");
        });
    }

    #[test]
    fn a_port_that_somebody_has_is_refused_and_shared_only_when_asked() {
        alone(|| {
            let first = Buckets::bind(None, 0, true).unwrap();
            let port = first.sender().port();
            assert!(Buckets::bind(None, port, true).is_err());
            assert!(Buckets::bind_beside(None, port, true).is_ok());
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
                // Each once: the programs have copies of what was bound before.
                let refused: Vec<_> = (20_000..21_000)
                    .map(|port| Buckets::bind(None, port, true).map(drop))
                    .filter(Result::is_err)
                    .collect();
                done.store(true, Relaxed);
                assert!(refused.is_empty(), "{refused:?}");
            });
        });
    }
}
