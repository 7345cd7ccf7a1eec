//! The thread of a data channel device.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_io::poller::Poller;
use weft_openvpn::device::{DeletionReason, Notification};

use super::framed::{self, ROOM};
use super::receiver::{Arrival, Receiver};
use super::transmitter::{DeviceEnv, Transmitter, send_ping};
use super::transport::{Connection, Transport, Way};
use super::{Common, Event, Shared};
use crate::ports::device::Env;
use crate::ports::errno::nothing_now;
use crate::workers::busy_poll::BusyPoll;
use crate::workers::event_loop::{EventLoop, Turns, WAKER, Wake};
use crate::workers::thread::failure;
use crate::workers::turn::{UDP_BATCHES_MAX, take_turn};

/// How often it is looked whether peers have expired or want a ping, in milliseconds.
pub const KEEPALIVE_LOOK_MS: u64 = 1_000;
/// Bytes that are read from a connection at once, with the rest of the last read: more than one packet has.
const STREAM_READ_BYTES: usize = 256 * 1024;
/// Bytes of room that a connection's rest keeps while it is empty.
const STREAM_REST_KEPT_BYTES: usize = 1 << 10;

const TUN: u64 = WAKER + 1;
/// The first transport's.
const TRANSPORT: u64 = TUN + 1;

/// The state that the device's thread owns.
pub(super) struct Worker {
    pub(super) common: Arc<Common>,
    pub(super) segments_max: usize,
    pub(super) merge: (bool, bool),
}

/// A device's thread in its loop, with all that it alone has.
struct DeviceTurns<'a> {
    worker: &'a Worker,
    transmitter: Transmitter,
    receiver: Receiver,
    buffer: Box<[u8; ROOM]>,
    /// The read buffer of all connections; allocated with the first one.
    stream: Vec<u8>,
    watched: HashMap<u16, Watched>,
    /// Transports that have something.
    ready: Vec<u16>,
    /// The TUN device has something.
    tun: bool,
    /// The next look after peers.
    look_at: Instant,
}

/// A transport that is waited for.
struct Watched {
    transport: Arc<Transport>,
    /// Bytes of a connection that are not a whole packet yet.
    rest: Vec<u8>,
    /// It is waited for that a connection takes more.
    writable: bool,
}

impl Worker {
    /// Works until it is stopped, or until the device is removed; its peers are gone then.
    pub(super) fn run(self) {
        if let Some(failure) = failure(|| self.work()) {
            let device = self.common.tun.name();
            tracing::warn!(device, failure, "a data channel device has stopped");
            self.common.end();
        }
    }

    fn work(&self) -> io::Result<()> {
        let Common { counters, waker, stop, .. } = &*self.common;
        let busy_poll = BusyPoll::gathering();
        EventLoop { counters, waker, stop, busy_poll }.run(&mut DeviceTurns::new(self))
    }

    /// How long there may be nothing to do; `None`: no limit.
    fn time_until(&self, look_at: Instant) -> Option<Duration> {
        let timed = self.common.read().peers.has_keepalive();
        timed.then(|| look_at.saturating_duration_since(Instant::now()))
    }

    /// Waits for the transports that there are now, and for no others.
    fn watch(&self, poller: &Poller, watched: &mut HashMap<u16, Watched>) {
        let shared = self.common.read();
        let mut lost = Vec::new();
        let is_there = |number: u16, watched: &Watched| {
            let now = shared.transports.get(number);
            now.is_some_and(|now| Arc::ptr_eq(now, &watched.transport))
        };
        watched.retain(|number, watched| {
            let stays = is_there(*number, watched);
            if !stays {
                // Another process may hold the socket, so that the poller would report it without end.
                let _ = poller.remove(&*watched.transport);
            }
            stays
        });
        for (number, transport) in shared.transports.iter() {
            if watched.contains_key(&number) {
                continue;
            }
            if poller.add(&**transport, TRANSPORT + u64::from(number)).is_err() {
                lost.push((number, Arc::clone(transport)));
                continue;
            }
            let transport = Arc::clone(transport);
            watched.insert(number, Watched { transport, rest: Vec::new(), writable: false });
        }
        drop(shared);
        for (number, transport) in lost {
            self.lose_transport(number, &transport, DeletionReason::TransportError);
        }
    }

    /// Takes the packets that have come over one transport.
    fn drain(
        &self,
        receiver: &mut Receiver,
        number: u16,
        watched: &mut HashMap<u16, Watched>,
        stream: &mut Vec<u8>,
    ) {
        let Some(entry) = watched.get_mut(&number) else { return };
        let transport = Arc::clone(&entry.transport);
        let now = self.common.read().transports.get(number).map(Arc::as_ptr);
        if now != Some(Arc::as_ptr(&transport)) {
            // Later packets belong to the socket's new owner.
            return;
        }
        let broken = match &transport.way {
            Way::Udp(socket) => {
                for _ in 0..UDP_BATCHES_MAX {
                    let max = Receiver::messages_max();
                    // A socket error does not concern the next datagram: the next turn reads on.
                    let Ok(got) = socket.recv(&mut receiver.batch, max) else { break };
                    let mut shared = self.common.read();
                    let at = (number, self.common.now_ms());
                    receiver.handle_batch(&shared, &self.env(&shared), &self.common.telling, at);
                    if receiver.has_moves() {
                        // Whoever gets a packet may answer at once.
                        drop(shared);
                        self.note_moves(receiver);
                        shared = self.common.read();
                    }
                    receiver.write(&self.env(&shared));
                    drop(shared);
                    if got < max {
                        break;
                    }
                }
                None
            }
            Way::Tcp(connection) => match connection.flush() {
                Ok(()) => {
                    stream.resize(STREAM_READ_BYTES, 0);
                    self.drain_stream(
                        receiver,
                        number,
                        connection,
                        (&mut entry.rest, &mut stream[..]),
                    )
                }
                Err(_) => Some(DeletionReason::TransportDisconnect),
            },
        };
        if let Some(reason) = broken {
            self.lose_transport(number, &transport, reason);
        }
    }

    /// Reads from a connection behind the rest of the last read, and keeps a packet that is not whole yet.
    /// Returns the reason why the connection is useless now. `stream` has [`STREAM_READ_BYTES`].
    fn drain_stream(
        &self,
        receiver: &mut Receiver,
        number: u16,
        connection: &Connection,
        (rest, stream): (&mut Vec<u8>, &mut [u8]),
    ) -> Option<DeletionReason> {
        let (before, room) = stream.split_at_mut(rest.len());
        let more = match connection.read(room) {
            Ok(0) => return Some(DeletionReason::TransportDisconnect),
            Ok(more) => more,
            Err(error) if nothing_now(&error) => return None,
            Err(_) => return Some(DeletionReason::TransportDisconnect),
        };
        before.copy_from_slice(rest);
        let bytes = &mut stream[..rest.len() + more];
        let shared = self.common.read();
        let nowhere = SocketAddr::from((IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0));
        let arrival = Arrival {
            source: connection.peer_address().unwrap_or(nowhere),
            local: None,
            transport: number,
            connected: true,
            now_ms: self.common.now_ms(),
        };
        let (env, telling) = (self.env(&shared), &self.common.telling);
        let Some(taken) = receiver.handle_stream(&shared, &env, telling, arrival, bytes) else {
            return Some(DeletionReason::TransportError);
        };
        rest.clear();
        rest.extend_from_slice(&bytes[taken..]);
        if rest.is_empty() {
            rest.shrink_to(STREAM_REST_KEPT_BYTES);
        }
        None
    }

    /// Sends the TUN device's packets, up to a turn's share.
    fn drain_tun(&self, transmitter: &mut Transmitter, buffer: &mut [u8; ROOM]) -> io::Result<()> {
        let shared = self.common.read();
        let env = self.env(&shared);
        let now_ms = self.common.now_ms();
        let result = take_turn(|| {
            let len = framed::read(&self.common.tun, buffer)?;
            let read = &mut buffer[..len];
            transmitter.handle_read(&shared, &env, &self.common.telling, read, now_ms);
            Ok(len)
        });
        transmitter.flush(&env);
        result
    }

    /// Takes the keys that no longer seal out of their slots.
    fn remove_spent_keys(&self) {
        if self.common.telling.key_spent.load(Ordering::Relaxed) {
            self.common.telling.key_spent.store(false, Ordering::Relaxed);
            self.common.write().peers.remove_spent_keys();
        }
    }

    /// Removes the peers that have said that they leave.
    fn remove_left(&self) {
        for (id, number) in self.common.telling.take_left() {
            if self.common.write().remove_numbered(id, number) {
                self.common.waker.wake();
                self.common.peer_deleted(id, DeletionReason::TransportDisconnect);
            }
        }
    }

    /// Sends the pings that are due and removes the peers that have expired.
    fn look_after_peers(&self) {
        let now_ms = self.common.now_ms();
        let shared = self.common.read();
        shared.follow_mtu();
        let env = self.env(&shared);
        let mut expired = Vec::new();
        for (_, peer) in shared.peers.iter() {
            if peer.is_expired(now_ms) {
                expired.push(peer.id);
            } else if peer.is_ping_due(now_ms) {
                send_ping(&env, &self.common.telling, peer, now_ms);
            }
        }
        drop(shared);
        for id in expired {
            if self.common.write().remove_expired(id, now_ms) {
                self.common.waker.wake();
                self.common.peer_deleted(id, DeletionReason::Expired);
            }
        }
    }

    /// Peers have moved: rare enough to hold up all others for.
    #[cold]
    fn note_moves(&self, receiver: &mut Receiver) {
        while let Some(moved) = receiver.take_moved() {
            let floated = self.common.write().move_peer(moved);
            if let Some(peer_id) = floated {
                let floated = Notification::PeerFloat { peer_id, remote: moved.source };
                self.common.telling.tell(Event::Notification(floated));
            }
        }
    }

    /// A transport is useless now, and so are its peers.
    fn lose_transport(&self, number: u16, transport: &Arc<Transport>, reason: DeletionReason) {
        let lost = self.common.write().remove_transport(number, transport);
        self.common.waker.wake();
        for id in lost {
            self.common.peer_deleted(id, reason);
        }
    }

    fn env<'a>(&'a self, shared: &'a Shared) -> DeviceEnv<'a> {
        Env {
            tap: &self.common.tun,
            socket: &shared.transports,
            counters: &self.common.counters,
            // A datagram longer than the route takes is fragmented; no event reports it.
            events: &|_| (),
        }
    }
}

impl<'a> DeviceTurns<'a> {
    fn new(worker: &'a Worker) -> Self {
        Self {
            transmitter: Transmitter::new(worker.segments_max),
            receiver: Receiver::new(worker.merge.0, worker.merge.1),
            buffer: Box::new([0; ROOM]),
            stream: Vec::new(),
            watched: HashMap::new(),
            ready: Vec::new(),
            tun: false,
            look_at: Instant::now(),
            worker,
        }
    }
}

impl Turns for DeviceTurns<'_> {
    fn watch(&mut self, poller: &Poller) -> io::Result<()> {
        poller.add(&self.worker.common.tun, TUN)
    }

    fn time_left(&mut self, _: &Poller) -> Option<Duration> {
        self.worker.time_until(self.look_at)
    }

    fn note_ready(&mut self, token: u64) {
        match token {
            TUN => self.tun = true,
            token => self.ready.extend(u16::try_from(token - TRANSPORT)),
        }
    }

    fn take(&mut self, poller: &Poller, wake: Wake) -> io::Result<ControlFlow<()>> {
        if wake.stop {
            return Ok(ControlFlow::Break(()));
        }
        let Self { worker, watched, receiver, stream, .. } = self;
        if wake.woken {
            worker.watch(poller, watched);
        }
        // A write may be answered within the call, as TCP does.
        let tun = std::mem::take(&mut self.tun) || !self.ready.is_empty();
        for number in self.ready.drain(..) {
            worker.drain(receiver, number, watched, stream);
        }
        if tun {
            worker.drain_tun(&mut self.transmitter, &mut self.buffer)?;
        }
        if Instant::now() >= self.look_at {
            self.look_at = Instant::now() + Duration::from_millis(KEEPALIVE_LOOK_MS);
            worker.look_after_peers();
        }
        // A connection that is new may have something waiting already.
        if worker.common.read().transports.take_queues_changed() || wake.woken {
            wait_for_streams(poller, watched);
        }
        worker.remove_spent_keys();
        worker.remove_left();
        Ok(ControlFlow::Continue(()))
    }
}

/// Waits for the connections that did not take all to take more, and for no others.
fn wait_for_streams(poller: &Poller, watched: &mut HashMap<u16, Watched>) {
    for (number, entry) in watched {
        let Way::Tcp(connection) = &entry.transport.way else { continue };
        let waits = connection.is_waiting();
        if waits != entry.writable {
            let token = TRANSPORT + u64::from(*number);
            // It fails for a connection that is broken, which is reported as such.
            let _ = poller.watch_writable(&*entry.transport, token, waits);
            entry.writable = waits;
        }
    }
}
