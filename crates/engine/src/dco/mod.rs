//! The data channel device in userspace. It does the work of the kernel's `ovpn` device, with the same rules,
//! refusals and notifications (`docs/design/ovpn.md`).
//!
//! A [`Device`] is a TUN device and a thread. It seals IP packets that the system routes to it, each for its
//! peer, and sends them by the peer's transport. It opens and checks packets from the transports and gives
//! them to the system. Control packets go through untouched, both ways.

#[cfg(any(test, feature = "alone"))]
pub mod alone;
mod framed;
mod keys;
mod peers;
mod receiver;
mod routes;
mod sizes;
#[cfg(test)]
mod tests;
mod transmitter;
mod transport;
mod worker;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use weft_io::offload::{self, Offloads};
use weft_io::poller::Waker;
use weft_io::tap::TapOptions;
use weft_io::tun::{self, Tun};
use weft_io::udp::{Adopted, IPV6_MTU_MIN, Remote};
use weft_openvpn::device::rules::{self, PeerChange};
use weft_openvpn::device::{
    DeletionReason, DeviceError, EpochAttributes, KeyAttributes, KeyState, Mode, Notification,
    PeerAttributes, PeerState, Slot,
};

use self::keys::Key;
pub use self::peers::DEVICE_PEERS_MAX;
use self::peers::{Peer, Peers};
use self::receiver::Moved;
use self::routes::Routes;
pub use self::routes::{ROUTES_MAX, Route};
pub use self::sizes::MTU_MAX;
pub use self::transport::{STREAM_QUEUE_BYTES, TRANSPORTS_MAX};
use self::transport::{Transport, Transports, Way, send_udp};
pub use self::worker::KEEPALIVE_LOOK_MS;
use self::worker::Worker;
use crate::error::EngineError;
use crate::stats::counters::{DropReason, Work, WorkerCounters};

/// How a device is set up.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// The TUN device, made if it is not there; `%d` is replaced by a free number.
    pub name: String,
    /// How many peers it has.
    pub mode: Mode,
    /// The initial limit of IP packets inside, in bytes, at most [`MTU_MAX`]. The TUN device's own MTU is set
    /// separately, and followed from then on.
    pub mtu: u16,
    /// The MTU in bytes that every IPv6 path to a peer carries, at least [`IPV6_MTU_MIN`]. TCP inside learns the
    /// size that fits; longer packets are sent all the same and counted. If ICMPv6 is filtered, nothing else
    /// reports the MTU.
    pub path_mtu: u16,
    /// Move super-packets where the kernel has them; else every packet and every datagram goes alone.
    pub offloads: bool,
}

/// An event that a device reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Something has happened to a peer.
    Notification(Notification),
    /// A packet of the control channel came in.
    Packet {
        /// The sender's address.
        source: SocketAddr,
        /// The address of ours that it came to, over UDP.
        local: Option<IpAddr>,
        /// By which transport, for the answer.
        transport: u16,
        /// The packet, on a connection without its length.
        packet: Vec<u8>,
    },
}

/// State that all threads of a device share.
#[derive(Debug)]
struct Shared {
    peers: Peers,
    transports: Transports,
    /// The TUN device's interface index, which stays when its name does not.
    index: u32,
    /// The largest IP packet inside, in bytes.
    mtu: AtomicU16,
    /// The longest packet to a peer over IPv6, in bytes.
    path_mtu: u16,
    /// The TUN device is gone, and nothing can be asked of this one any more.
    gone: bool,
}

/// The receiver of a device's events.
struct Telling {
    events: Arc<dyn Fn(Event) + Send + Sync>,
    /// A key that no longer seals is still in its slot.
    key_spent: AtomicBool,
    /// A peer has said that it leaves.
    has_left: AtomicBool,
    /// Those that have: id and number of each.
    left: Mutex<Vec<(u32, u64)>>,
}

/// A running device. It is gone with this value, and its peers with it.
pub struct Device {
    common: Arc<Common>,
    thread: Option<JoinHandle<()>>,
}

/// State that a device's handle and its thread share.
struct Common {
    tun: Tun,
    shared: RwLock<Shared>,
    /// Whether the TUN device has a carrier.
    carrier: Mutex<bool>,
    telling: Telling,
    counters: WorkerCounters,
    waker: Waker,
    stop: AtomicBool,
    /// When the device's clock began.
    epoch: Instant,
}

impl Common {
    fn now_ms(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64
    }

    fn read(&self) -> RwLockReadGuard<'_, Shared> {
        self.shared.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Shared> {
        self.shared.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A peer is gone.
    fn peer_deleted(&self, id: u32, reason: DeletionReason) {
        self.settle_carrier();
        self.telling.peer_deleted(id, reason);
    }

    /// In mode p2p the TUN device has a carrier while there is a peer.
    fn settle_carrier(&self) {
        let mut carrier = self.carrier.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = self.read();
        let wanted = shared.peers.mode() == Mode::Mp || shared.peers.iter().next().is_some();
        drop(shared);
        // A deleted device needs no carrier.
        if *carrier != wanted && self.tun.set_carrier(wanted).is_ok() {
            *carrier = wanted;
        }
    }

    /// All peers are gone with the device.
    fn end(&self) {
        let mut shared = self.write();
        shared.gone = true;
        let ids: Vec<u32> = shared.peers.iter().map(|(_, peer)| peer.id).collect();
        drop(shared);
        for id in ids {
            let removed = self.write().remove_peer(id);
            if removed.is_ok() {
                self.telling.peer_deleted(id, DeletionReason::Teardown);
            }
        }
    }
}

impl Telling {
    fn tell(&self, event: Event) {
        (self.events)(event);
    }

    fn peer_deleted(&self, peer_id: u32, reason: DeletionReason) {
        self.tell(Event::Notification(Notification::PeerDeleted { peer_id, reason }));
    }

    /// The key has sealed all that it may: the device's thread takes it out of its slot.
    #[cold]
    fn spent(&self, peer_id: u32, key: &Key) {
        key.retire();
        self.key_spent.store(true, Ordering::Relaxed);
        self.used_up(peer_id, key);
    }

    /// A peer says that it leaves: the device's thread removes it.
    #[cold]
    fn leaves(&self, peer: &Peer) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let its = (peer.id, peer.number);
        if !left.contains(&its) {
            left.push(its);
        }
        self.has_left.store(true, Ordering::Relaxed);
    }

    /// The peers that have said so since the last call.
    fn take_left(&self) -> Vec<(u32, u64)> {
        if !self.has_left.load(Ordering::Relaxed) {
            return Vec::new();
        }
        self.has_left.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The key is used up one way or the other: told once.
    #[cold]
    fn used_up(&self, peer_id: u32, key: &Key) {
        if key.is_first_told() {
            let key_id = key.id.get().into();
            self.tell(Event::Notification(Notification::KeySwap { peer_id, key_id }));
        }
    }
}

impl Device {
    /// Opens the TUN device in the calling thread's network namespace and starts a thread. `events` is
    /// called by that thread and by those that give commands, and must not wait.
    ///
    /// # Errors
    /// The TUN device cannot be opened, or the kernel gives no thread or descriptor.
    pub fn open(
        config: &DeviceConfig,
        events: Arc<dyn Fn(Event) + Send + Sync>,
    ) -> Result<Self, EngineError> {
        let kernel = |what| move |source| EngineError::Kernel { what, source };
        let tun = Tun::open(&TapOptions::new(config.name.clone()))?;
        let waker = Waker::new().map_err(kernel("make an event descriptor"))?;
        let shared = Shared {
            peers: Peers::new(config.mode),
            transports: Transports::default(),
            index: tun::index(tun.name())?,
            mtu: AtomicU16::new(config.mtu.min(MTU_MAX)),
            path_mtu: config.path_mtu.max(IPV6_MTU_MIN),
            gone: false,
        };
        // Clients that reach each other by this host keep to that.
        if config.mode == Mode::Mp
            && let Err(error) = tun::send_no_redirects(tun.name())
        {
            tracing::warn!(device = tun.name(), %error, "cannot disable ICMP redirects");
        }
        let offloads = if config.offloads { offload::self_test()? } else { Offloads::NONE };
        let granted = tun.offloads();
        let common = Arc::new(Common {
            tun,
            shared: RwLock::new(shared),
            carrier: Mutex::new(true),
            telling: Telling {
                events,
                key_spent: AtomicBool::new(false),
                has_left: AtomicBool::new(false),
                left: Mutex::default(),
            },
            counters: WorkerCounters::default(),
            waker,
            stop: AtomicBool::new(false),
            epoch: Instant::now(),
        });
        common.settle_carrier();
        let worker = Worker {
            common: Arc::clone(&common),
            segments_max: match offloads.udp_segment.usable() {
                true => offloads.run_segments_max,
                false => 1,
            },
            merge: (
                granted.tso && offloads.tap_tso.usable(),
                granted.uso && offloads.tap_uso.usable(),
            ),
        };
        let name = format!("dco-{}", common.tun.name());
        let thread = thread::Builder::new().name(name).spawn(|| worker.run());
        Ok(Self { common, thread: Some(thread.map_err(kernel("start a thread"))?) })
    }

    /// The TUN device's name.
    pub fn name(&self) -> &str {
        self.common.tun.name()
    }

    /// How many peers it has.
    pub fn mode(&self) -> Mode {
        self.common.read().peers.mode()
    }

    /// Returns how much of this work its thread did since the device was opened, drops excluded.
    pub fn done(&self, work: Work) -> u64 {
        self.common.counters.done(work)
    }

    /// Packets dropped since it was opened, by reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.common.counters.drops_of(reason)
    }

    /// Processor time that its thread was awake for with nothing to do, in case packets came.
    pub fn awake(&self) -> Duration {
        self.common.counters.awake()
    }

    /// Takes a UDP socket in before any peer is reached by it: the device reads from it from now on, and reports
    /// packets of the control channel. It stays until [`Self::let_go`]. Returns the transport's number, as
    /// [`Event::Packet`] has it. A peer of [`Self::new_peer`] with another descriptor of the socket uses it.
    ///
    /// # Errors
    /// It is no UDP socket, another device has it, or there are [`TRANSPORTS_MAX`].
    pub fn hold(&self, socket: OwnedFd) -> Result<u16, DeviceError> {
        let (adopted, cookie, kind) = adopt(socket)?;
        if kind == rules::Transport::Tcp {
            return Err(DeviceError::NotASocket);
        }
        let mut shared = self.shared_mut()?;
        let number = match shared.transports.with_cookie(cookie) {
            Some(number) => number,
            None => shared.transports.insert(adopted, kind, cookie)?,
        };
        if let Some(transport) = shared.transports.get(number) {
            transport.is_held.store(true, Ordering::Relaxed);
        }
        drop(shared);
        self.common.waker.wake();
        Ok(number)
    }

    /// Ends [`Self::hold`]: the socket goes with the last peer that is reached by it.
    pub fn let_go(&self, number: u16) {
        let mut shared = self.common.write();
        if let Some(transport) = shared.transports.get(number) {
            transport.is_held.store(false, Ordering::Relaxed);
        }
        shared.release(number);
        drop(shared);
        self.common.waker.wake();
    }

    /// Sends a packet of the control channel by a UDP socket that [`Self::hold`] took in. The receiver need not be a
    /// peer. It is sent from the local address that is given, if that is still ours.
    ///
    /// # Errors
    /// There is no such socket, or it does not take the packet.
    pub fn send_to(
        &self,
        number: u16,
        (local, remote): (Option<IpAddr>, SocketAddr),
        packet: &[u8],
    ) -> Result<(), DeviceError> {
        rules::control_packet(packet)?;
        let shared = self.shared()?;
        let transport = shared.transports.get(number).ok_or(DeviceError::NotASocket)?;
        let Way::Udp(socket) = &transport.way else { return Err(DeviceError::NotASocket) };
        let remote = socket.remote(remote).map_err(|_| DeviceError::WrongFamily)?;
        let local = local.filter(|local| local.is_ipv6() == remote.is_ipv6());
        let sent = send_udp(socket, packet, packet.len(), &remote.with_source(local));
        sent.map_err(|error| DeviceError::NotSent(error.kind()))
    }

    /// Makes a peer that is reached by `socket`, a UDP socket, which may serve other peers of this device, or a
    /// connected TCP socket. The device reads from it from now on. In mode p2p it replaces the device's only peer.
    /// The TUN device has a carrier from the first peer on. Called in the device's network namespace, this returns
    /// when the system gives it packets.
    ///
    /// # Errors
    /// [`DeviceError`]; the socket may have been made non-blocking then.
    pub fn new_peer(
        &self,
        socket: OwnedFd,
        attributes: &PeerAttributes,
    ) -> Result<(), DeviceError> {
        self.ensure_there()?;
        rules::in_ranges(attributes)?;
        let (adopted, cookie, kind) = adopt(socket)?;
        let mut shared = self.shared_mut()?;
        let new = rules::new_peer(shared.peers.mode(), kind, attributes)?;
        let remote = match (&adopted, new.remote) {
            (Adopted::Udp(socket), Some(remote)) => {
                let remote = socket.remote(remote).map_err(|_| DeviceError::WrongFamily)?;
                Some(remote.with_source(new.local))
            }
            (Adopted::Tcp(stream), _) => stream.peer_addr().ok().map(Remote::of),
            (Adopted::Udp(_), None) => None,
        };
        let number = match shared.transports.with_cookie(cookie) {
            Some(_) if kind == rules::Transport::Tcp => return Err(DeviceError::SocketTaken),
            Some(number) => number,
            None => shared.transports.insert(adopted, kind, cookie)?,
        };
        let peer = Peer::new(&new, number, remote, self.common.now_ms());
        let inserted = shared.peers.insert(peer);
        let replaced = match inserted {
            Ok(replaced) => replaced,
            Err(error) => {
                shared.release(number);
                return Err(error);
            }
        };
        if let Some(replaced) = &replaced {
            shared.release(replaced.transport);
        }
        drop(shared);
        self.common.settle_carrier();
        self.common.waker.wake();
        if let Some(replaced) = replaced {
            self.common.telling.peer_deleted(replaced.id, DeletionReason::Teardown);
        }
        Ok(())
    }

    /// Changes a peer.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is changed then.
    pub fn set_peer(&self, attributes: &PeerAttributes) -> Result<(), DeviceError> {
        let mut shared = self.shared_mut()?;
        let (id, change) = rules::peer_change(shared.peers.mode(), attributes)?;
        let remote = shared.remote_of(id, &change)?;
        shared.peers.change(id, &change, remote, self.common.now_ms())?;
        drop(shared);
        // There may be times to look at now.
        self.common.waker.wake();
        Ok(())
    }

    /// A peer.
    ///
    /// # Errors
    /// There is none with this id, or no device any more.
    pub fn peer(&self, id: u32) -> Result<PeerState, DeviceError> {
        let shared = self.shared_for(id)?;
        let peer = shared.peers.get(shared.peers.index_of(id)?);
        peer.map(|peer| shared.state_of(peer)).ok_or(DeviceError::NoPeer(id))
    }

    /// All peers, in no order.
    ///
    /// # Errors
    /// There is no device any more.
    pub fn peers(&self) -> Result<Vec<PeerState>, DeviceError> {
        let shared = self.shared()?;
        Ok(shared.peers.iter().map(|(_, peer)| shared.state_of(peer)).collect())
    }

    /// Removes a peer and its keys.
    ///
    /// # Errors
    /// There is none with this id, or no device any more.
    pub fn delete_peer(&self, id: u32) -> Result<(), DeviceError> {
        self.shared_mut_for(id)?.remove_peer(id)?;
        self.common.waker.wake();
        self.common.peer_deleted(id, DeletionReason::Userspace);
        Ok(())
    }

    /// Installs a key and erases the old key in its slot.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is changed then.
    pub fn new_key(&self, attributes: &KeyAttributes) -> Result<(), DeviceError> {
        self.ensure_there()?;
        let new = rules::new_key(attributes)?;
        let (id, slot) = (new.peer_id, new.slot);
        self.shared()?.peers.index_of(id)?;
        // Made before the workers are held up.
        let key = Key::new(&new, self.mode())?;
        self.change_keys(id, |peer| peer.keys.install(slot, key))
    }

    /// Installs epochs in the place of a key and erases the old content of their slot.
    ///
    /// # Errors
    /// There is no such peer, or the key's id is too large; nothing is changed then.
    pub fn new_epochs(&self, attributes: EpochAttributes) -> Result<(), DeviceError> {
        self.ensure_there()?;
        let (id, slot) = (attributes.peer_id, attributes.slot);
        let key = Key::epochs(attributes, self.mode())?;
        self.change_keys(id, |peer| peer.keys.install(slot, key))
    }

    /// Returns the state of a key.
    ///
    /// # Errors
    /// There is no such peer, or nothing in the slot.
    pub fn key(&self, id: u32, slot: Slot) -> Result<KeyState, DeviceError> {
        let shared = self.shared_for(id)?;
        let peer = shared.peers.get(shared.peers.index_of(id)?).ok_or(DeviceError::NoPeer(id))?;
        peer.keys.state(slot).ok_or(DeviceError::NoKey { peer_id: id, slot })
    }

    /// Exchanges primary and secondary key.
    ///
    /// # Errors
    /// There is no such peer.
    pub fn swap_keys(&self, id: u32) -> Result<(), DeviceError> {
        self.change_keys(id, |peer| peer.keys.swap())
    }

    /// Erases the key in a slot, if there is one.
    ///
    /// # Errors
    /// There is no such peer.
    pub fn delete_key(&self, id: u32, slot: Slot) -> Result<(), DeviceError> {
        self.change_keys(id, |peer| peer.keys.delete(slot))
    }

    /// The system's routes over this device are these now. Returns how many are beyond
    /// [`ROUTES_MAX`] and left out.
    pub fn set_routes(&self, routes: &[Route]) -> usize {
        let left_out = routes.len().saturating_sub(ROUTES_MAX);
        let routes = Routes::of(routes);
        self.common.write().peers.routes = routes;
        left_out
    }

    /// Sends a packet of the control channel beside the data. On a connection its length goes in front.
    ///
    /// # Errors
    /// There is no such peer, or its transport does not take the packet, or no transport would.
    pub fn send_packet(&self, id: u32, packet: &[u8]) -> Result<(), DeviceError> {
        self.ensure_there()?;
        let length = rules::control_packet(packet)?;
        let shared = self.shared()?;
        let peer = shared.peers.get(shared.peers.index_of(id)?).ok_or(DeviceError::NoPeer(id))?;
        let transport = shared.transports.get(peer.transport).ok_or(DeviceError::NoPeer(id))?;
        let sent = match (&transport.way, peer.remote) {
            (Way::Udp(socket), Some(remote)) => send_udp(socket, packet, packet.len(), &remote),
            (Way::Udp(_), None) => return Err(DeviceError::NoRemote),
            (Way::Tcp(connection), _) => {
                let sent = connection.write(&[&length.to_be_bytes(), packet].concat());
                // The device's thread sends the bytes that the connection did not take now.
                self.common.waker.wake();
                sent
            }
        };
        sent.map_err(|error| DeviceError::NotSent(error.kind()))
    }

    /// # Errors
    /// The TUN device is gone. It comes before whatever else is wrong with a command.
    fn ensure_there(&self) -> Result<(), DeviceError> {
        self.shared().map(|_| ())
    }

    /// # Errors
    /// As [`Self::ensure_there`].
    fn shared(&self) -> Result<RwLockReadGuard<'_, Shared>, DeviceError> {
        let shared = self.common.read();
        if shared.gone { Err(DeviceError::NoDevice) } else { Ok(shared) }
    }

    /// # Errors
    /// As [`Self::ensure_there`].
    fn shared_mut(&self) -> Result<RwLockWriteGuard<'_, Shared>, DeviceError> {
        let shared = self.common.write();
        if shared.gone { Err(DeviceError::NoDevice) } else { Ok(shared) }
    }

    /// For a command about a peer.
    ///
    /// # Errors
    /// As [`Self::ensure_there`], or no peer can have this id.
    fn shared_for(&self, id: u32) -> Result<RwLockReadGuard<'_, Shared>, DeviceError> {
        let shared = self.shared()?;
        rules::peer_id(Some(id)).map(|_| shared)
    }

    /// # Errors
    /// As [`Self::shared_for`].
    fn shared_mut_for(&self, id: u32) -> Result<RwLockWriteGuard<'_, Shared>, DeviceError> {
        let shared = self.shared_mut()?;
        rules::peer_id(Some(id)).map(|_| shared)
    }

    fn change_keys(&self, id: u32, change: impl FnOnce(&mut Peer)) -> Result<(), DeviceError> {
        let mut shared = self.shared_mut_for(id)?;
        let index = shared.peers.index_of(id)?;
        change(shared.peers.get_mut(index).ok_or(DeviceError::NoPeer(id))?);
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.common.stop.store(true, Ordering::Relaxed);
        self.common.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.common.end();
    }
}

/// A socket of the caller's, with the kernel's number of it and how the rules for peers see it.
fn adopt(socket: OwnedFd) -> Result<(Adopted, u64, rules::Transport), DeviceError> {
    let adopted = Adopted::adopt(socket).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => DeviceError::SocketTaken,
        _ => DeviceError::NotASocket,
    })?;
    let cookie = adopted.cookie().map_err(|_| DeviceError::NotASocket)?;
    let kind = transport::kind(&adopted).map_err(|_| DeviceError::NotASocket)?;
    Ok((adopted, cookie, kind))
}

impl Shared {
    fn state_of(&self, peer: &Peer) -> PeerState {
        let transport = self.transports.get(peer.transport);
        let local = transport.and_then(|transport| transport.local());
        let source = peer.remote.and_then(|remote| remote.source());
        let from = |local: SocketAddr| SocketAddr::new(source.unwrap_or(local.ip()), local.port());
        peer.state(local.map(from))
    }

    /// The address of a changed peer, in the form that its transport sends to.
    fn remote_of(&self, id: u32, change: &PeerChange) -> Result<Option<Remote>, DeviceError> {
        let Some(remote) = change.remote else { return Ok(None) };
        let peer = self.peers.get(self.peers.index_of(id)?).ok_or(DeviceError::NoPeer(id))?;
        let transport = self.transports.get(peer.transport).ok_or(DeviceError::NoPeer(id))?;
        rules::change_fits(transport.kind, change)?;
        match &transport.way {
            Way::Udp(socket) => {
                let remote = socket.remote(remote).map_err(|_| DeviceError::WrongFamily)?;
                Ok(Some(remote.with_source(change.local)))
            }
            Way::Tcp(_) => Ok(None),
        }
    }

    fn remove_peer(&mut self, id: u32) -> Result<(), DeviceError> {
        let peer = self.peers.remove(id)?;
        self.release(peer.transport);
        Ok(())
    }

    /// Removes a peer if nothing was heard of it for too long, up to now; false if it stays.
    fn remove_expired(&mut self, id: u32, now_ms: u64) -> bool {
        let index = self.peers.with_id(id);
        let peer = index.and_then(|index| self.peers.get(index));
        peer.is_some_and(|peer| peer.is_expired(now_ms)) && self.remove_peer(id).is_ok()
    }

    /// Removes the peer with this number; false if its id is another's by now, or nobody's.
    fn remove_numbered(&mut self, id: u32, number: u64) -> bool {
        let index = self.peers.with_id(id);
        let peer = index.and_then(|index| self.peers.get(index));
        peer.is_some_and(|peer| peer.number == number) && self.remove_peer(id).is_ok()
    }

    /// Lets a transport go unless peers are reached by it, or it is held.
    fn release(&mut self, transport: u16) {
        let is_held = |it: &Arc<Transport>| it.is_held.load(Ordering::Relaxed);
        if self.transports.get(transport).is_some_and(is_held) {
            return;
        }
        if self.peers.iter().all(|(_, peer)| peer.transport != transport) {
            self.transports.remove(transport);
        }
    }

    /// Removes a transport and its peers; returns their ids. None, if its number is another's by now.
    fn remove_transport(&mut self, number: u16, transport: &Arc<Transport>) -> Vec<u32> {
        if !self.transports.get(number).is_some_and(|there| Arc::ptr_eq(there, transport)) {
            return Vec::new();
        }
        let its = self.peers.iter().filter(|(_, peer)| peer.transport == number);
        let ids: Vec<u32> = its.map(|(_, peer)| peer.id).collect();
        for id in &ids {
            let _ = self.peers.remove(*id);
        }
        self.transports.remove(number);
        ids
    }

    /// Notes that a peer has moved, or was heard at another address of ours. Returns its id if the peer still
    /// exists and was not there before.
    fn move_peer(&mut self, moved: Moved) -> Option<u32> {
        let Moved { index, number, source, local } = moved;
        let peer = self.peers.get(index).filter(|peer| peer.number == number)?;
        let Way::Udp(socket) = &self.transports.get(peer.transport)?.way else { return None };
        let remote = socket.remote(source).ok()?;
        let (id, before) = (peer.id, peer.remote);
        let of_its_family = |ip: &IpAddr| ip.is_ipv4() == source.is_ipv4();
        let local = local.or(before.and_then(|before| before.source())).filter(of_its_family);
        self.peers.set_remote(index, remote.with_source(local));
        let before = before.map(|before| before.address());
        (before != Some(source)).then_some(id)
    }
}
