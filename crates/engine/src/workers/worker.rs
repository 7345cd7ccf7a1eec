//! A worker: one thread that runs each batch to completion.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver as Queue;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weft_io::poller::{Poller, Waker};
use weft_io::tap::{FRAME_LEN_MAX, Tap};
use weft_io::udp::UdpSocket;

use super::busy_poll::BusyPoll;
use super::context::WorkerContext;
use super::shared::{Sending, note_moved_lane, read, serves, sync_ports};
use super::turn::{SENDINGS_MAX, UDP_BATCHES_MAX, take_turn};
use crate::error::CommandError;
use crate::ports::device::{Env, FrameSink, FrameSource, GsoSink, LaneSockets};
use crate::ports::errno::nothing_now;
use crate::ports::port_demux::PortDemux;
use crate::ports::port_reader::PortReader;
use crate::ports::socket_buckets::{BatchSize, Quota, SocketReader};
use crate::ports::tap_queues::TapQueueReader;
use crate::rx::receiver::Receiver;
use crate::tables::lane::{LANE_ASK_MS, LANE_LOOK_MS};
use crate::tables::state::State;
use crate::tx::transmitter::Transmitter;

const WAKER: u64 = 0;

/// The state that a worker owns.
pub(crate) struct Worker {
    /// The state that it shares with its helpers.
    pub(crate) context: WorkerContext,
    pub(crate) transmitter: Transmitter,
    pub(crate) busy_poll: BusyPoll,
    pub(crate) sendings: Queue<Sending>,
    pub(crate) waker: Waker,
    pub(crate) stop: Arc<AtomicBool>,
    /// When it is to end, once that is known.
    pub(crate) until: Arc<OnceLock<Instant>>,
}

/// A worker's looks at its lanes.
struct Looks {
    /// At all of them.
    next: Instant,
    /// At those that are asked for.
    ask: Instant,
    /// The last one of either kind.
    last: Instant,
    /// [`State::lanes_begun`] at the last one.
    lanes: u64,
    /// How many workers there were at the last one.
    sockets: usize,
}

impl Worker {
    /// Works until it is stopped.
    ///
    /// # Errors
    /// The TAP device, a socket or the poller is broken.
    pub(crate) fn run(mut self) -> io::Result<()> {
        self.context.counters.begin();
        self.busy_poll.begin(self.context.counters.own_datagrams());
        let mut poller = Poller::new()?;
        poller.add(&self.waker, WAKER)?;
        let mut queues = TapQueueReader::new(&self.context.queues);
        queues.watch(&poller)?;
        let mut sockets = SocketReader::new(&self.context.share, self.context.lane_port.as_ref());
        sockets.watch(&poller)?;
        // Of this thread alone, hence made here.
        let mut receiver = Receiver::new();
        receiver.set_merging(self.context.merge.0, self.context.merge.1);
        let mut buffer = vec![0; FRAME_LEN_MAX];
        let now = Instant::now();
        let mut looks = Looks { next: now, ask: now, last: now, lanes: 0, sockets: 0 };
        let mut ports = PortReader::of_worker(self.context.worker);
        sync_ports(&mut ports, &poller, &self.context.shared);
        loop {
            let mut woken = false;
            let wait = self.look_after_lanes(&mut looks);
            let left =
                self.until.get().map(|until| until.saturating_duration_since(Instant::now()));
            let wait = wait.into_iter().chain(left).min();
            self.busy_poll.wait(
                &mut poller,
                &self.context.counters,
                wait,
                |token| match token {
                    WAKER => woken = true,
                    token if queues.round_robin().note_token(token) => {}
                    token if sockets.round_robin().note_token(token) => {}
                    token => ports.note_ready(token),
                },
            )?;
            if woken {
                self.waker.clear();
                sync_ports(&mut ports, &poller, &self.context.shared);
                self.carry_out();
            }
            // Nothing more comes to a worker that must stop: this turn is its last.
            let stop = self.stop.load(Ordering::Relaxed) || left.is_some_and(|left| left.is_zero());
            let helped = self.context.help.is_on();
            if stop {
                sockets.round_robin().note_all_ready();
            }
            let written = (&queues, &ports);
            self.receive(&mut sockets, &mut receiver, written, helped)?;
            while stop && sockets.round_robin().is_ready() {
                self.receive(&mut sockets, &mut receiver, written, helped)?;
            }
            if stop {
                queues.round_robin().note_all_ready();
            }
            self.send_on(&mut queues, helped, &mut buffer)?;
            while stop && queues.round_robin().is_ready() {
                self.send_on(&mut queues, helped, &mut buffer)?;
            }
            if helped {
                let Self { context, transmitter, .. } = &mut self;
                context.seal_ports(
                    &poller,
                    &mut ports,
                    &context.counters,
                    transmitter,
                    &mut buffer,
                );
            } else {
                self.drain_ports(&poller, &mut ports, &mut buffer);
            }
            if stop {
                return Ok(());
            }
        }
    }

    /// Looks after its lanes if it is time to; returns how long it is until then, if it ever is.
    fn look_after_lanes(&self, looks: &mut Looks) -> Option<Duration> {
        let shared = read(&self.context.shared);
        let lanes = shared.state.lanes_begun();
        if lanes == 0 {
            return None;
        }
        let WorkerContext { queues, counters, events, .. } = &self.context;
        let env =
            Env { tap: queues.writer(), socket: &shared.sockets, counters, events: &**events };
        let sockets = shared.sockets.sockets();
        let (lanes_before, sockets_before) = (looks.lanes, looks.sockets);
        (looks.lanes, looks.sockets) = (lanes, sockets);
        // Lanes leave from other sockets now: peers are to hear from where.
        if sockets_before > sockets {
            self.transmitter.tell_of_lanes(&shared.state, &env, sockets);
        }
        let pause = Duration::from_millis(LANE_ASK_MS);
        if (lanes_before, sockets_before) != (lanes, sockets) {
            looks.ask = looks.ask.min(looks.last + pause);
        }
        let now = Instant::now();
        let all = now >= looks.next;
        if all || now >= looks.ask {
            let asking = self.transmitter.look_after_lanes(&shared.state, &env, sockets, all);
            looks.last = now;
            if all {
                looks.next = now + Duration::from_millis(LANE_LOOK_MS);
            }
            looks.ask = if asking { looks.next.min(now + pause) } else { looks.next };
        }
        Some(looks.next.min(looks.ask).saturating_duration_since(now))
    }

    fn carry_out(&mut self) {
        for _ in 0..SENDINGS_MAX {
            let Ok(sending) = self.sendings.try_recv() else { return };
            self.send(sending);
        }
        // More may wait.
        self.waker.wake();
    }

    fn send(&mut self, sending: Sending) {
        let Self { context, transmitter, .. } = self;
        let WorkerContext { queues, shared, counters, events, .. } = context;
        let shared = read(shared);
        let env =
            Env { tap: queues.writer(), socket: &shared.sockets, counters, events: &**events };
        let result = match sending {
            Sending::Probe { path, probe, mtu, candidate } => {
                transmitter.send_probe(&shared.state, &env, (path, probe, mtu, candidate))
            }
            Sending::Keepalive { path } => Transmitter::send_keepalive(&shared.state, &env, path),
        };
        match result {
            Ok(()) => {}
            // Commands overtake probes on their way here, so a path may have gone meanwhile.
            Err(error @ (CommandError::UnknownPath { .. } | CommandError::NoOutboundSa { .. })) => {
                tracing::debug!(?sending, %error, "not sent");
            }
            Err(error) => {
                tracing::warn!(?sending, %error, "the engine could not send a requested packet");
            }
        }
    }

    /// Gives queues that have something their turns.
    #[inline]
    fn send_on(
        &mut self,
        queues: &mut TapQueueReader,
        helped: bool,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        queues.take_turns(|_, tap| {
            if !helped {
                return self.drain_queue(tap, buffer);
            }
            let Self { context, transmitter, .. } = &mut *self;
            context.seal(tap, &context.counters, transmitter, buffer).map(drop)
        })
    }

    fn drain_queue(&mut self, tap: &Tap, buffer: &mut [u8]) -> io::Result<()> {
        let Self { context, transmitter, .. } = self;
        let WorkerContext { shared, counters, events, .. } = context;
        let shared = read(shared);
        let env = Env { tap, socket: &shared.sockets, counters, events: &**events };
        drain(&shared.state, transmitter, &env, |buffer| tap.recv(buffer), buffer)
    }

    /// Reads the direct ports that have something.
    fn drain_ports(&mut self, poller: &Poller, ports: &mut PortReader, buffer: &mut [u8]) {
        ports.note_answers();
        let Self { context, transmitter, .. } = self;
        let WorkerContext { worker, shared, counters, events, .. } = context;
        ports.drain(poller, |queue, of_port| {
            let shared = read(shared);
            if !serves(&shared, *worker, of_port) {
                return Ok(());
            }
            let env = Env { tap: queue, socket: &shared.sockets, counters, events: &**events };
            drain(&shared.state, transmitter, &env, |buffer| queue.recv(buffer), buffer)
        });
    }

    /// Gives sockets that have something their turns.
    #[inline]
    fn receive(
        &self,
        sockets: &mut SocketReader,
        receiver: &mut Receiver,
        written: (&TapQueueReader, &PortReader),
        helped: bool,
    ) -> io::Result<()> {
        sockets.take_turns(|number, socket, batch_size, quota| {
            if !helped {
                return self.drain_socket(socket, (&mut *receiver, batch_size), quota, written);
            }
            let (gate, receiver) = (self.context.help.socket(number), (&mut *receiver, batch_size));
            self.context.open(gate, socket, &self.context.counters, receiver, written).map(drop)
        })
    }

    /// Takes a socket's messages, up to its turn's share.
    fn drain_socket(
        &self,
        socket: &UdpSocket,
        (receiver, batch_size): (&mut Receiver, &mut BatchSize),
        mut quota: Quota,
        written: (&TapQueueReader, &PortReader),
    ) -> io::Result<()> {
        receiver.batch_size = *batch_size;
        for _ in 0..UDP_BATCHES_MAX {
            let max = receiver.batch_size.messages_max();
            match socket.recv(&mut receiver.batch, max) {
                Ok(got) => {
                    let WorkerContext { worker, queues, shared, counters, events, .. } =
                        &self.context;
                    // After the packets came: an SA that was installed before the peer heard of it is
                    // known by now.
                    let shared = read(shared);
                    let demux = PortDemux {
                        switch: queues.writer(),
                        ports: &shared.ports,
                        worker: *worker,
                        written,
                    };
                    let env =
                        Env { tap: &demux, socket: &shared.sockets, counters, events: &**events };
                    receiver.handle_batch(&shared.state, &env);
                    drop(shared);
                    self.context.load.received(receiver.batch.bytes());
                    note_moved_lane(&self.context.shared, receiver);
                    if got < max || !quota.goes_on(got, || receiver.batch.bytes()) {
                        break;
                    }
                }
                Err(error) if nothing_now(&error) => break,
                Err(error) => return Err(error),
            }
        }
        *batch_size = receiver.batch_size;
        Ok(())
    }
}

/// Sends a device's frames, up to a turn's share. Answers go back to where frames come from.
#[inline]
fn drain<F: FrameSink>(
    state: &State,
    transmitter: &mut Transmitter,
    env: &Env<'_, F, LaneSockets>,
    recv: impl Fn(&mut [u8]) -> io::Result<usize>,
    buffer: &mut [u8],
) -> io::Result<()> {
    transmitter.begin();
    let result = take_turn(|| {
        let len = recv(buffer)?;
        transmitter.handle_read(state, env, &buffer[..len]);
        Ok(len)
    });
    transmitter.flush(state, env);
    result
}
