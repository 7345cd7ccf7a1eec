//! A worker: one thread that runs each batch to completion.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Receiver as Queue;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use weft_io::poller::{Poller, Waker};
use weft_io::tap::{FRAME_LEN_MAX, Tap};
use weft_io::udp::UdpSocket;

use super::busy_poll::BusyPoll;
use super::context::WorkerContext;
use super::event_loop::{EventLoop, Turns, Wake};
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
use crate::tables::networks::Network;
use crate::tables::state::State;
use crate::tx::transmitter::Transmitter;

/// The state that a worker owns.
pub(crate) struct Worker {
    /// The state that it shares with its helpers.
    pub(crate) context: WorkerContext,
    pub(crate) transmitter: Transmitter,
    pub(crate) sendings: Queue<Sending>,
    pub(crate) waker: Waker,
    pub(crate) stop: Arc<AtomicBool>,
    /// When it is to end, once that is known.
    pub(crate) until: Arc<OnceLock<Instant>>,
}

/// A worker in its loop, with all that its thread alone has.
struct WorkerTurns {
    worker: Worker,
    queues: TapQueueReader,
    sockets: SocketReader,
    ports: PortReader,
    receiver: Receiver,
    buffer: Vec<u8>,
    looks: Looks,
    /// How long it is until it ends, where that is known.
    left: Option<Duration>,
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
    pub(crate) fn run(self, busy_poll: BusyPoll) -> io::Result<()> {
        let counters = Arc::clone(&self.context.counters);
        let (waker, stop) = (self.waker.clone(), Arc::clone(&self.stop));
        let mut turns = WorkerTurns::new(self);
        let (counters, waker, stop) = (&*counters, &waker, &*stop);
        EventLoop { counters, waker, stop, busy_poll }.run(&mut turns)
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
        let network = shared.state.networks.first();
        drain(&shared.state, (network, transmitter), &env, |buffer| tap.recv(buffer), buffer)
    }

    /// Reads the ports that have something.
    fn drain_ports(&mut self, poller: &Poller, ports: &mut PortReader, buffer: &mut [u8]) {
        ports.note_answers();
        let Self { context, transmitter, .. } = self;
        let WorkerContext { worker, shared, counters, events, .. } = context;
        ports.drain(poller, |port, number| {
            let shared = read(shared);
            let Some(network) = serves(&shared, *worker, port, number) else { return Ok(()) };
            let queue = &port.queues()[number];
            let env = Env { tap: queue, socket: &shared.sockets, counters, events: &**events };
            let sealing = (network, &mut *transmitter);
            drain(&shared.state, sealing, &env, |buffer| queue.recv(buffer), buffer)
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

impl WorkerTurns {
    fn new(worker: Worker) -> Self {
        let WorkerContext { worker: number, queues, share, lane_port, merge, .. } = &worker.context;
        let mut receiver = Receiver::new();
        receiver.set_merging(merge.0, merge.1);
        let now = Instant::now();
        Self {
            queues: TapQueueReader::new(queues),
            sockets: SocketReader::new(share, lane_port.as_ref()),
            ports: PortReader::of_worker(*number),
            receiver,
            buffer: vec![0; FRAME_LEN_MAX],
            looks: Looks { next: now, ask: now, last: now, lanes: 0, sockets: 0 },
            left: None,
            worker,
        }
    }

    /// Gives the sockets that have something their turns; all that have anything, if it is the last.
    #[inline]
    fn receive(&mut self, helped: bool, last: bool) -> io::Result<()> {
        let Self { worker, queues, sockets, ports, receiver, .. } = self;
        if last {
            sockets.round_robin().note_all_ready();
        }
        let written = (&*queues, &*ports);
        worker.receive(sockets, receiver, written, helped)?;
        while last && sockets.round_robin().is_ready() {
            worker.receive(sockets, receiver, written, helped)?;
        }
        Ok(())
    }

    /// Likewise the queues of the switch's TAP device.
    #[inline]
    fn send_on(&mut self, helped: bool, last: bool) -> io::Result<()> {
        let Self { worker, queues, buffer, .. } = self;
        if last {
            queues.round_robin().note_all_ready();
        }
        worker.send_on(queues, helped, buffer)?;
        while last && queues.round_robin().is_ready() {
            worker.send_on(queues, helped, buffer)?;
        }
        Ok(())
    }
}

impl Turns for WorkerTurns {
    fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        self.queues.watch(poller)?;
        self.sockets.watch(poller)?;
        sync_ports(&mut self.ports, poller, &self.worker.context.shared);
        Ok(())
    }

    #[inline]
    fn time_left(&mut self, _: &Poller) -> Option<Duration> {
        let wait = self.worker.look_after_lanes(&mut self.looks);
        let until = self.worker.until.get();
        self.left = until.map(|until| until.saturating_duration_since(Instant::now()));
        wait.into_iter().chain(self.left).min()
    }

    #[inline]
    fn note_ready(&mut self, token: u64) {
        match token {
            token if self.queues.round_robin().note_token(token) => {}
            token if self.sockets.round_robin().note_token(token) => {}
            token => self.ports.note_ready(token),
        }
    }

    #[inline]
    fn take(&mut self, poller: &Poller, wake: Wake) -> io::Result<ControlFlow<()>> {
        if wake.woken {
            sync_ports(&mut self.ports, poller, &self.worker.context.shared);
            self.worker.carry_out();
        }
        // Nothing more comes to a worker that must stop: this turn is its last.
        let last = wake.stop || self.left.is_some_and(|left| left.is_zero());
        let helped = self.worker.context.help.is_on();
        self.receive(helped, last)?;
        self.send_on(helped, last)?;
        let Self { worker, ports, buffer, .. } = self;
        if helped {
            let Worker { context, transmitter, .. } = worker;
            context.seal_ports(poller, ports, &context.counters, transmitter, buffer);
        } else {
            worker.drain_ports(poller, ports, buffer);
        }
        Ok(if last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

/// Sends the frames of a network's device, up to a turn's share. Answers go back to where frames come from.
#[inline]
fn drain<F: FrameSink>(
    state: &State,
    (network, transmitter): (&Network, &mut Transmitter),
    env: &Env<'_, F, LaneSockets>,
    recv: impl Fn(&mut [u8]) -> io::Result<usize>,
    buffer: &mut [u8],
) -> io::Result<()> {
    transmitter.begin();
    let result = take_turn(|| {
        let len = recv(buffer)?;
        transmitter.handle_read(state, env, network, &buffer[..len]);
        Ok(len)
    });
    transmitter.flush(state, env);
    result
}
