//! The data channel device in userspace: what the kernel's `ovpn` device does, with the same rules,
//! refusals and notifications (DESIGN section 5; reference `openvpn`, sections 1.2 to 1.10).
//!
//! A [`Device`] is a TUN device and a thread. IP packets that the system routes to it are sealed for the
//! peer that they are for and sent by the peer's transport; what comes by the transports is opened,
//! checked and given to the system. Control packets go through untouched, both ways.

mod framed;
mod keys;
mod peers;
mod receive;
mod routes;
mod transmit;
mod transport;
mod worker;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use weft_io::offload::{self, Offloads};
use weft_io::poller::Waker;
use weft_io::tap::TapOptions;
use weft_io::tun::Tun;
use weft_io::udp::{Adopted, Remote};
use weft_openvpn::device::rules::{self, PeerChange};
use weft_openvpn::device::{
    DeletionReason, DeviceError, EpochAttributes, KeyAttributes, KeyState, Mode, Notification,
    PeerAttributes, PeerState, Slot,
};

use self::keys::Key;
pub use self::peers::DEVICE_PEERS_MAX;
use self::peers::{Peer, Peers};
use self::routes::Routes;
pub use self::routes::{ROUTES_MAX, Route};
pub use self::transport::{STREAM_QUEUE_BYTES, TRANSPORTS_MAX};
use self::transport::{Transports, Way};
pub use self::worker::KEEPALIVE_LOOK_MS;
use self::worker::Worker;
use crate::EngineError;
use crate::counters::{DropReason, WorkerCounters};

/// How a device is set up.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// The TUN device, made if it is not there; `%d` is replaced by a free number.
    pub name: String,
    /// How many peers it has.
    pub mode: Mode,
    /// The largest IP packet inside, in bytes; the TUN device's own MTU is set by who sets it up.
    pub mtu: u16,
    /// Move super-packets where the kernel has them; else every packet and every datagram goes alone.
    pub offloads: bool,
}

/// What a device tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Something has happened to a peer.
    Notification(Notification),
    /// A packet of the control channel came in.
    Packet {
        /// Where from.
        source: SocketAddr,
        /// By which transport, for the answer.
        transport: u16,
        /// The packet, on a connection without its length.
        packet: Vec<u8>,
    },
}

/// What all threads of a device know.
#[derive(Debug)]
struct Shared {
    peers: Peers,
    transports: Transports,
    /// The largest IP packet inside, in bytes.
    mtu: u16,
}

/// A running device. It is gone with this value, and its peers with it.
pub struct Device {
    common: Arc<Common>,
    thread: Option<JoinHandle<()>>,
}

/// What a device's handle and its thread have together.
struct Common {
    tun: Tun,
    shared: RwLock<Shared>,
    events: Arc<dyn Fn(Event) + Send + Sync>,
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

    /// Tells that a peer is gone.
    fn told(&self, peer_id: u32, reason: DeletionReason) {
        (self.events)(Event::Notification(Notification::PeerDeleted { peer_id, reason }));
    }

    /// All peers are gone with the device.
    fn end(&self) {
        let ids: Vec<u32> = self.read().peers.iter().map(|(_, peer)| peer.id).collect();
        for id in ids {
            let removed = self.write().remove_peer(id);
            if removed.is_ok() {
                self.told(id, DeletionReason::Teardown);
            }
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
        let tun = Tun::open(&TapOptions { name: config.name.clone(), persist: false })?;
        let waker = Waker::new().map_err(kernel("make an event descriptor"))?;
        let shared = Shared {
            peers: Peers::new(config.mode),
            transports: Transports::default(),
            mtu: config.mtu,
        };
        let offloads = if config.offloads { offload::self_test()? } else { Offloads::NONE };
        let granted = tun.offloads();
        let common = Arc::new(Common {
            tun,
            shared: RwLock::new(shared),
            events,
            counters: WorkerCounters::default(),
            waker,
            stop: AtomicBool::new(false),
            epoch: Instant::now(),
        });
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
        let thread = thread::Builder::new().name("weft-dco".to_owned()).spawn(|| worker.run());
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

    /// Packets dropped since it was opened, by reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.common.counters.drops_of(reason)
    }

    /// Makes a peer that is reached by `socket`, a UDP socket, which may serve other peers of this
    /// device, or a connected TCP socket. The device reads from it from now on. The only peer of a
    /// device in mode p2p makes room.
    ///
    /// # Errors
    /// [`DeviceError`]; the socket may have been made non-blocking then.
    pub fn new_peer(
        &self,
        socket: OwnedFd,
        attributes: &PeerAttributes,
    ) -> Result<(), DeviceError> {
        let adopted = Adopted::adopt(socket).map_err(|_| DeviceError::NotASocket)?;
        let cookie = adopted.cookie().map_err(|_| DeviceError::NotASocket)?;
        let kind = transport::kind(&adopted).map_err(|_| DeviceError::NotASocket)?;
        let mut shared = self.common.write();
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
        self.common.waker.wake();
        if let Some(replaced) = replaced {
            self.common.told(replaced.id, DeletionReason::Teardown);
        }
        Ok(())
    }

    /// Changes a peer.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is changed then.
    pub fn set_peer(&self, attributes: &PeerAttributes) -> Result<(), DeviceError> {
        let mut shared = self.common.write();
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
    /// There is none with this id.
    pub fn peer(&self, id: u32) -> Result<PeerState, DeviceError> {
        let shared = self.common.read();
        let peer = shared.peers.get(shared.peers.index_of(id)?);
        peer.map(|peer| shared.state_of(peer)).ok_or(DeviceError::NoPeer(id))
    }

    /// All peers, in no order.
    pub fn peers(&self) -> Vec<PeerState> {
        let shared = self.common.read();
        shared.peers.iter().map(|(_, peer)| shared.state_of(peer)).collect()
    }

    /// Removes a peer and its keys.
    ///
    /// # Errors
    /// There is none with this id.
    pub fn delete_peer(&self, id: u32) -> Result<(), DeviceError> {
        self.common.write().remove_peer(id)?;
        self.common.waker.wake();
        self.common.told(id, DeletionReason::Userspace);
        Ok(())
    }

    /// Installs a key; what was in its slot is erased.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is changed then.
    pub fn new_key(&self, attributes: &KeyAttributes) -> Result<(), DeviceError> {
        let new = rules::new_key(attributes)?;
        let (id, slot) = (new.peer_id, new.slot);
        // Made before the workers are held up.
        let key = Key::new(&new)?;
        self.change_keys(id, |peer| peer.keys.install(slot, key))
    }

    /// Installs epochs in the place of a key; what was in their slot is erased.
    ///
    /// # Errors
    /// There is no such peer, or the key's id is too large; nothing is changed then.
    pub fn new_epochs(&self, attributes: EpochAttributes) -> Result<(), DeviceError> {
        let (id, slot) = (attributes.peer_id, attributes.slot);
        let key = Key::epochs(attributes)?;
        self.change_keys(id, |peer| peer.keys.install(slot, key))
    }

    /// What is told of a key.
    ///
    /// # Errors
    /// There is no such peer, or nothing in the slot.
    pub fn key(&self, id: u32, slot: Slot) -> Result<KeyState, DeviceError> {
        let shared = self.common.read();
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

    /// The system's routes over this device are these now.
    pub fn set_routes(&self, routes: &[Route]) {
        let routes = Routes::of(routes);
        self.common.write().peers.routes = routes;
    }

    /// Sends a packet of the control channel beside the data. On a connection its length goes in front.
    ///
    /// # Errors
    /// There is no such peer, or its transport does not take the packet, or no transport would.
    pub fn send_packet(&self, id: u32, packet: &[u8]) -> Result<(), DeviceError> {
        let length = rules::control_packet(packet)?;
        let shared = self.common.read();
        let peer = shared.peers.get(shared.peers.index_of(id)?).ok_or(DeviceError::NoPeer(id))?;
        let transport = shared.transports.get(peer.transport).ok_or(DeviceError::NoPeer(id))?;
        let sent = match (&transport.way, peer.remote) {
            (Way::Udp(socket), Some(remote)) => socket.send_run(packet, packet.len(), &remote),
            (Way::Udp(_), None) => return Err(DeviceError::NoRemote),
            (Way::Tcp(connection), _) => {
                connection.write(&[&length.to_be_bytes(), packet].concat())
            }
        };
        sent.map_err(|error| DeviceError::NotSent(error.kind()))
    }

    fn change_keys(&self, id: u32, change: impl FnOnce(&mut Peer)) -> Result<(), DeviceError> {
        let mut shared = self.common.write();
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

impl Shared {
    fn state_of(&self, peer: &Peer) -> PeerState {
        let transport = self.transports.get(peer.transport);
        let local = transport.and_then(|transport| transport.local());
        let source = peer.remote.and_then(|remote| remote.source());
        let from = |local: SocketAddr| SocketAddr::new(source.unwrap_or(local.ip()), local.port());
        peer.state(local.map(from))
    }

    /// Where a changed peer is, as its transport sends there.
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

    /// Lets a transport go unless peers are reached by it.
    fn release(&mut self, transport: u16) {
        if self.peers.iter().all(|(_, peer)| peer.transport != transport) {
            self.transports.remove(transport);
        }
    }

    /// Removes a transport and its peers; returns their ids.
    fn remove_transport(&mut self, transport: u16) -> Vec<u32> {
        let its = self.peers.iter().filter(|(_, peer)| peer.transport == transport);
        let ids: Vec<u32> = its.map(|(_, peer)| peer.id).collect();
        for id in &ids {
            let _ = self.peers.remove(*id);
        }
        self.transports.remove(transport);
        ids
    }

    /// A peer is elsewhere; returns its id, if it is still there and was not there before.
    fn move_peer(&mut self, index: u32, source: SocketAddr) -> Option<u32> {
        let peer = self.peers.get(index)?;
        let Way::Udp(socket) = &self.transports.get(peer.transport)?.way else { return None };
        let remote = socket.remote(source).ok()?;
        let (id, before) = (peer.id, peer.remote);
        let of_its_family = |ip: &IpAddr| ip.is_ipv4() == source.is_ipv4();
        let local = before.and_then(|before| before.source()).filter(of_its_family);
        self.peers.set_remote(index, remote.with_source(local));
        let before = before.map(|before| before.address());
        (before != Some(source)).then_some(id)
    }
}
