//! State that a worker and its helpers share: the devices of one worker, and the way from one to another by
//! units.
//!
//! A unit is the amount that one thread takes off a device at once, and seals or opens beside other threads'
//! units. Each device's ticket gate keeps the units in order.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, RwLock};

use weft_io::poller::Poller;
use weft_io::tap::Tap;
use weft_io::udp::{Remote, UdpSocket};
use weft_packet::ethernet;
use weft_packet::vnet::{self, VnetHeader};
use weft_path::EngineEvent;

use super::shared::{Shared, note_moved_lane, read, serves};
use super::turn::{TAP_READS_MAX, UNITS_MAX};
use crate::ports::device::{Env, FrameSink, FrameSource, GsoSink, MessageSource};
use crate::ports::errno::nothing_now;
use crate::ports::port_demux::PortDemux;
use crate::ports::port_reader::PortReader;
use crate::ports::socket_buckets::{BatchSize, SOCKETS_MAX, SocketBuckets};
use crate::ports::tap_queues::{TapQueueReader, TapQueues};
use crate::ports::ticket_gate::{Front, Ticket, TicketGate};
use crate::rx::receiver::Receiver;
use crate::stats::counters::WorkerCounters;
use crate::stats::worker_load::WorkerLoad;
use crate::tables::lane::Origin;
use crate::tables::networks::Network;
use crate::tables::state::State;
use crate::tx::transmitter::Transmitter;

/// Bytes of small frames that are one unit.
const UNIT_BYTES_MAX: usize = 65_536;
/// A socket that is sent from in turn.
struct InTurn<'a, R> {
    inner: &'a R,
    ticket: &'a Ticket<'a>,
    front: Cell<Option<Front<'a>>>,
    /// Nothing more belongs to this unit once its sequence numbers are taken.
    is_whole: Cell<bool>,
}

impl<R: GsoSink> GsoSink for InTurn<'_, R> {
    #[inline]
    fn send_batch(&self, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        self.ticket.wait();
        self.inner.send_batch(batch, segment, to)
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
    fn send_from(&self, from: Origin, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        self.ticket.wait();
        self.inner.send_from(from, batch, segment, to)
    }
}

/// From a TAP device of this network to the wire, one unit: a super-packet, or small frames. A super-packet is
/// sealed beside the next units; of small frames only the sending is beside the next ones' sealing.
///
/// # Errors
/// That of the first read: nothing was taken.
pub(crate) fn seal_unit<T: FrameSource + FrameSink, R: GsoSink>(
    gate: &TicketGate,
    state: &State,
    env: &Env<'_, T, R>,
    (network, transmitter): (&Network, &mut Transmitter),
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
        transmitter.handle_read(state, &env, network, &buffer[..len]);
        bytes += len;
        if is_whole || bytes >= UNIT_BYTES_MAX || reads == TAP_READS_MAX {
            break;
        }
        match env.tap.recv(buffer) {
            Ok(next) => len = next,
            // The next unit meets any lasting error too.
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

/// From the wire to the TAP device, one unit: the messages of one receiving call.
///
/// # Errors
/// That of the call: nothing was taken.
pub(crate) fn open_unit<M: MessageSource, F: FrameSink, R>(
    gate: &TicketGate,
    source: &M,
    state: &State,
    env: &Env<'_, F, R>,
    receiver: &mut Receiver,
) -> io::Result<()> {
    let mut front = gate.enter();
    let max = receiver.batch_size.unit_messages_max();
    source.recv(&mut receiver.batch, max)?;
    let ticket = front.draw();
    drop(front);
    receiver.open_pipelined(state, env);
    ticket.wait();
    receiver.commit(state, env);
    Ok(())
}

/// Coordination between a worker and its helpers.
#[derive(Debug, Default)]
pub(crate) struct Help {
    /// The gate of worker and helpers at the TAP queues: one for all queues, since they send by the same SAs.
    queues: TicketGate,
    sockets: [TicketGate; SOCKETS_MAX],
    /// The number of helpers that should work: the first ones. Written by `Help::want` alone.
    wanted: AtomicUsize,
    /// The number that may: the worker passes the gates too. Written by the worker.
    let_in: AtomicUsize,
    /// The number that do.
    at_work: AtomicUsize,
}

impl Help {
    /// The gate of worker and helpers at the socket with this number.
    pub(crate) fn socket(&self, number: usize) -> &TicketGate {
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

    /// The number of helpers that should work.
    pub(crate) fn wanted(&self) -> usize {
        self.wanted.load(SeqCst)
    }

    /// Sets the number of helpers that should work from now on; returns the old one.
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

/// The handles of a worker's queues and sockets that each of their threads needs.
#[derive(Clone)]
pub(crate) struct WorkerContext {
    /// The worker's number.
    pub(crate) worker: usize,
    pub(crate) queues: TapQueues,
    pub(crate) share: SocketBuckets,
    pub(crate) lane_port: Option<SocketBuckets>,
    pub(crate) shared: Arc<RwLock<Shared>>,
    pub(crate) load: WorkerLoad,
    pub(crate) merge: (bool, bool),
    pub(crate) make_transmitter: Arc<dyn Fn() -> Transmitter + Send + Sync>,
    pub(crate) help: Arc<Help>,
    pub(crate) events: Arc<dyn Fn(EngineEvent) + Send + Sync>,
    /// The worker's.
    pub(crate) counters: Arc<WorkerCounters>,
}

impl WorkerContext {
    /// Some units from the wire to the TAP device; returns how many.
    pub(crate) fn open(
        &self,
        gate: &TicketGate,
        socket: &UdpSocket,
        counters: &WorkerCounters,
        (receiver, batch_size): (&mut Receiver, &mut BatchSize),
        written: (&TapQueueReader, &PortReader),
    ) -> io::Result<u64> {
        receiver.batch_size = *batch_size;
        for units in 0..UNITS_MAX {
            // Before the ticket is drawn: a waiting command blocks new readers, and the holder of a ticket
            // must not wait for it.
            let shared = read(&self.shared);
            let demux = PortDemux {
                switch: self.queues.writer(),
                ports: &shared.ports,
                worker: self.worker,
                written,
            };
            let env = Env { tap: &demux, socket: &shared.sockets, counters, events: &*self.events };
            let done = open_unit(gate, socket, &shared.state, &env, receiver);
            drop(shared);
            *batch_size = receiver.batch_size;
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
        self.seal_from(
            (&self.help.queues, tap),
            |shared| Some(shared.state.networks.first()),
            counters,
            transmitter,
            buffer,
        )
    }

    /// The same from the ports that have something.
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
        ports.drain(poller, |port, number| {
            let queue = &port.queues()[number];
            let from = (&queue.gate, queue);
            units += self.seal_from(
                from,
                |shared| serves(shared, self.worker, port, number),
                counters,
                transmitter,
                buffer,
            )?;
            Ok(())
        });
        units
    }

    fn seal_from<T: FrameSource + FrameSink>(
        &self,
        (gate, tap): (&TicketGate, &T),
        network: impl Fn(&Shared) -> Option<&Network>,
        counters: &WorkerCounters,
        transmitter: &mut Transmitter,
        buffer: &mut [u8],
    ) -> io::Result<u64> {
        for units in 0..UNITS_MAX {
            let shared = read(&self.shared);
            let Some(network) = network(&shared) else { return Ok(units) };
            let env = Env { tap, socket: &shared.sockets, counters, events: &*self.events };
            let sealing = (network, &mut *transmitter);
            let done = seal_unit(gate, &shared.state, &env, sealing, buffer);
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
