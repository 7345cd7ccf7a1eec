//! What moves clients' packets: a data channel device, and the UDP sockets by which clients are reached.

mod given;
mod kernel;
mod reset_filter;
mod totals;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::sync::mpsc;
use weft_api::ServeEngine;
use weft_crypto::DataCipher;
use weft_engine::dco::{Device, DeviceConfig, Event, Route};
use weft_engine::{DropReason, EngineError};
use weft_io::udp::send_from;
use weft_kernel::ovpn::OvpnError;
use weft_kernel::{CLIENTS_DEVICE, Kernel, KernelError};
use weft_openvpn::device::{DeviceError, MTU_DEFAULT, Mode, PeerAttributes, PeerState, Slot};
use weft_openvpn::negotiation::DEFAULT_CIPHERS;
use weft_openvpn::session::DataKeys;

use self::given::{Given, Permit};
use self::kernel::Followers;
use self::reset_filter::ResetFilter;
use self::totals::Totals;
use super::Wanted;
use super::sockets::Transport;
use crate::dco::{DataDevice, DataDeviceError};

/// Events of the device that wait for the service; more are dropped and counted.
const EVENTS_MAX: usize = 8_192;
/// Places of these that packets leave free for news of peers: a packet is sent again, and news is told once.
const NEWS_PLACES: usize = 1_024;
/// The pause before it is looked again whether there is room for a packet.
const ROOM_PAUSE: Duration = Duration::from_millis(10);
/// The MTU of clients' packets, in bytes.
pub(super) const MTU: u16 = MTU_DEFAULT as u16;
/// How long a new peer waits until the device has let go of an earlier one with its address.
const ADDRESS_FREE_LIMIT: Duration = Duration::from_secs(10);
/// The pause between two tries.
const ADDRESS_FREE_PAUSE: Duration = Duration::from_millis(20);

/// The device and its sockets. All goes with this value, but for the kernel's device itself ([`remove_leftover`]).
pub(super) struct DataChannel {
    device: Arc<DataDevice>,
    /// By the number of the transport.
    sockets: Vec<(u16, UdpSocket)>,
    ciphers: Vec<DataCipher>,
    /// Why it is not the kernel's, where that was to be tried.
    reason: Option<String>,
    totals: Arc<Totals>,
    /// Beside a kernel's device.
    given: Given,
    /// Where events go.
    telling: Telling,
    /// The tasks beside a kernel's device.
    _followers: Option<Followers>,
}

/// A client's peer on the device.
#[derive(Clone, Debug)]
pub(super) struct NewPeer {
    pub(super) id: u32,
    pub(super) transport: Transport,
    /// Its connection, over TCP.
    pub(super) connection: Option<Arc<TcpStream>>,
    pub(super) remote: SocketAddr,
    /// The address of this host that it speaks to, over UDP.
    pub(super) local: Option<IpAddr>,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ping_s: u32,
    pub(super) timeout_s: u32,
}

/// A change of a peer's keys, as its session asks for it.
pub(super) enum KeyChange {
    Install(Slot, Box<DataKeys>),
    Swap,
    RemoveSecondary,
}

/// The gateway cannot begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    /// The engine's device cannot be made.
    #[error(transparent)]
    Device(#[from] EngineError),
    /// The device does not take a socket.
    #[error("the device does not take a socket: {0}")]
    Socket(#[from] DeviceError),
    /// The kernel has no such device, or cannot be asked.
    #[error(transparent)]
    Ovpn(#[from] OvpnError),
    /// The kernel's device cannot be made.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The kernel's device takes no key of a client.
    #[error(
        "the kernel's ovpn device takes none of the ciphers ({0}): load the kernel's modules for AES-GCM, or serve with --engine userspace"
    )]
    NoCipher(DataDeviceError),
    /// The kernel's device takes no peer.
    #[error("the kernel's ovpn device takes no peer: {0}")]
    Tried(DataDeviceError),
    /// A system call failed.
    #[error("cannot {doing}: {error}")]
    System {
        /// The step, in the infinitive.
        doing: &'static str,
        /// Why.
        error: io::Error,
    },
}

/// Where a device's events go.
#[derive(Clone)]
struct Telling {
    sender: mpsc::Sender<Event>,
    /// Events that nobody took in time.
    lost: Arc<AtomicU64>,
    resets: Arc<ResetFilter>,
}

impl Telling {
    fn tell(&self, event: Event) {
        if matches!(&event, Event::Packet { packet, .. } if self.resets.drops(packet)) {
            return;
        }
        let has_room = !matches!(event, Event::Packet { .. }) || self.has_room();
        if !has_room || self.sender.try_send(event).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether there is room for a packet.
    fn has_room(&self) -> bool {
        self.sender.capacity() > NEWS_PLACES
    }

    /// Waits until there is room for a packet.
    async fn room(&self) -> Permit {
        while !self.has_room() && !self.sender.is_closed() {
            tokio::time::sleep(ROOM_PAUSE).await;
        }
        self.sender.clone().reserve_owned().await
    }
}

impl DataChannel {
    /// Opens the device with these UDP sockets. The kernel's device is taken where it can be, unless another is asked
    /// for.
    pub(super) async fn open(
        wanted: &Wanted,
        sockets: Vec<UdpSocket>,
        kernel: &Kernel,
    ) -> Result<(Self, mpsc::Receiver<Event>), OpenError> {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let resets = Arc::new(ResetFilter::new(Instant::now()));
        let telling = Telling { sender, lost: Arc::default(), resets };
        let reason = match wanted.request.engine {
            ServeEngine::Userspace => None,
            engine => match kernel::open(kernel, &sockets, &telling).await {
                Ok(channel) => return Ok((channel, events)),
                Err(error) if engine == ServeEngine::Kernel => return Err(error),
                Err(error) => Some(error.to_string()),
            },
        };
        // The engine tests the kernel's offloads.
        let opened = tokio::task::spawn_blocking(move || open_userspace(sockets, telling)).await;
        let opened = opened.map_err(|error| OpenError::System {
            doing: "open the device",
            error: io::Error::other(error),
        })?;
        Ok((Self { reason, ..opened? }, events))
    }

    /// What moves clients' packets, in the words of the API.
    pub(super) fn engine(&self) -> &'static str {
        if self.device.is_kernel() { "kernel" } else { "userspace" }
    }

    /// Why the kernel does not move them, where it was to be tried.
    pub(super) const fn reason(&self) -> Option<&String> {
        self.reason.as_ref()
    }

    /// The ciphers that the device takes, the best first.
    pub(super) fn ciphers(&self) -> Vec<DataCipher> {
        self.ciphers.clone()
    }

    /// The addresses that are listened on.
    pub(super) fn listens(&self) -> Vec<SocketAddr> {
        self.sockets.iter().filter_map(|(_, socket)| socket.local_addr().ok()).collect()
    }

    /// Sends a packet of the control channel, from the address of this host that the receiver has spoken to.
    pub(super) fn send(
        &self,
        transport: u16,
        (local, to): (Option<IpAddr>, SocketAddr),
        packet: &[u8],
    ) {
        let sent = match (&*self.device, self.socket(transport)) {
            (DataDevice::Userspace(device), _) => {
                device.send_to(transport, (local, to), packet).map_err(|error| error.to_string())
            }
            (DataDevice::Kernel(_), Some(socket)) => {
                send_from(socket, packet, to, local).map_err(|error| error.to_string())
            }
            (DataDevice::Kernel(_), None) => Err("no such transport".to_owned()),
        };
        if let Err(error) = sent {
            tracing::debug!(error, %to, "cannot send a packet of the control channel");
        }
    }

    /// Sends a packet of the control channel by the connection of a peer. Returns whether it takes the packet.
    pub(super) fn send_to_peer(&self, id: u32, packet: &[u8]) -> bool {
        match &*self.device {
            DataDevice::Userspace(device) => device.send_packet(id, packet).is_ok(),
            DataDevice::Kernel(_) => self.given.send(id, packet),
        }
    }

    /// Drops first packets before the service until then.
    pub(super) fn drop_resets(&self, until: Instant) {
        self.telling.resets.drop_until(until);
    }

    /// Takes first packets again.
    pub(super) fn take_resets(&self) {
        self.telling.resets.pass_all();
    }

    /// What a packet came by, by the device's number.
    pub(super) fn transport(&self, number: u16) -> Transport {
        self.socket(number).map_or(Transport::Tcp, |_| Transport::Udp(number))
    }

    /// Makes a client's peer. Waits while an earlier peer with its address is being deleted.
    pub(super) async fn new_peer(&self, new: &NewPeer) -> Result<(), DataDeviceError> {
        let socket = self.socket_of(new).ok_or(DeviceError::NotASocket)?;
        let attributes = attributes(new);
        let limit = Instant::now() + ADDRESS_FREE_LIMIT;
        loop {
            match self.device.new_peer(socket, &attributes).await {
                Err(error) if error.is_address_taken() && Instant::now() < limit => {
                    tokio::time::sleep(ADDRESS_FREE_PAUSE).await;
                }
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        if let (DataDevice::Kernel(_), Some(connection)) = (&*self.device, &new.connection) {
            let given = self.given.add(new.id, (connection, new.remote), self.telling.clone());
            given.map_err(DataDeviceError::Socket)?;
        }
        Ok(())
    }

    /// Sends packets to these networks by the peers with these addresses. The kernel's device asks the host's routes.
    pub(super) fn set_routes(&self, networks: &BTreeMap<IpNet, IpAddr>) {
        let DataDevice::Userspace(device) = &*self.device else { return };
        let route = |(network, peer): (&IpNet, &IpAddr)| Route {
            destination: (network.addr(), network.prefix_len()),
            gateway: Some(*peer),
            metric: 0,
        };
        let routes: Vec<Route> = networks.iter().map(route).collect();
        let left_out = device.set_routes(&routes);
        if left_out > 0 {
            tracing::warn!(left_out, "more networks behind clients than the device takes");
        }
    }

    /// Removes a peer, if it is still there.
    pub(super) fn remove_peer(&self, id: u32) {
        match &*self.device {
            DataDevice::Userspace(device) => {
                device.peer(id).iter().for_each(|peer| self.totals.end(peer));
                let _ = device.delete_peer(id);
            }
            DataDevice::Kernel(_) => {
                self.given.remove(id);
                let (device, totals) = (Arc::clone(&self.device), Arc::clone(&self.totals));
                tokio::spawn(async move {
                    device.peer(id).await.iter().for_each(|peer| totals.end(peer));
                    match device.delete_peer(id).await {
                        Err(error) if !error.is_gone() => {
                            tracing::warn!(%error, "the kernel's device keeps a client that has left");
                        }
                        _ => {}
                    }
                });
            }
        }
    }

    /// Changes a peer's keys, one after the other.
    pub(super) async fn change_keys(
        &self,
        id: u32,
        changes: &[KeyChange],
    ) -> Result<(), DataDeviceError> {
        for change in changes {
            match change {
                KeyChange::Install(slot, keys) => self.device.install(id, *slot, keys).await?,
                KeyChange::Swap => self.device.swap_keys(id).await?,
                KeyChange::RemoveSecondary => self.device.delete_key(id, Slot::Secondary).await?,
            }
        }
        Ok(())
    }

    /// All peers with their counters; none if the device cannot be asked.
    pub(super) async fn peers(&self) -> Vec<PeerState> {
        self.device.peers().await.unwrap_or_default()
    }

    /// All peers with their counters, and the bytes outside of all that there were; none if the device cannot be asked.
    pub(super) async fn peers_and_total(&self) -> (Vec<PeerState>, (u64, u64)) {
        let peers = self.device.peers().await;
        let total = peers.as_ref().map(|peers| self.totals.look(peers)).unwrap_or_default();
        (peers.unwrap_or_default(), total)
    }

    /// Whether the kernel moves clients' packets.
    pub(super) fn is_kernel(&self) -> bool {
        self.device.is_kernel()
    }

    /// Packets that Weft's own device has dropped, by reason; the kernel's does not tell. Then events that nobody took
    /// in time, and first packets that were kept away from the service.
    pub(super) fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let of_device = match &*self.device {
            DataDevice::Userspace(device) => Some(device),
            DataDevice::Kernel(_) => None,
        };
        let drops = of_device.into_iter().flat_map(|device| {
            DropReason::ALL.iter().map(|reason| (reason.name(), device.dropped(*reason)))
        });
        let lost = self.telling.lost.load(Ordering::Relaxed);
        drops.chain([
            ("events_lost", lost),
            ("first_packets_over_rate", self.telling.resets.dropped()),
        ])
    }

    fn socket_of<'a>(&'a self, new: &'a NewPeer) -> Option<BorrowedFd<'a>> {
        match new.transport {
            Transport::Udp(number) => self.socket(number).map(AsFd::as_fd),
            Transport::Tcp => new.connection.as_ref().map(AsFd::as_fd),
        }
    }

    fn socket(&self, transport: u16) -> Option<&UdpSocket> {
        let found = self.sockets.iter().find(|(number, _)| *number == transport);
        found.map(|(_, socket)| socket)
    }
}

/// Removes the kernel's device of a gateway that has ended, or of a daemon that was killed.
pub(super) async fn remove_leftover(kernel: &Kernel) {
    if let Err(error) = kernel.remove_device(CLIENTS_DEVICE).await {
        tracing::warn!(%error, "cannot remove the device of OpenVPN clients");
    }
}

fn open_userspace(sockets: Vec<UdpSocket>, telling: Telling) -> Result<DataChannel, OpenError> {
    let config = DeviceConfig {
        name: CLIENTS_DEVICE.into(),
        mode: Mode::Mp,
        mtu: MTU,
        path_mtu: weft_io::udp::IPV6_MTU_MIN,
        offloads: true,
    };
    let told = telling.clone();
    let device = Device::open(&config, Arc::new(move |event| told.tell(event)))?;
    let mut held = Vec::new();
    for socket in sockets {
        let own = socket.try_clone().map_err(|_| DeviceError::NotASocket)?;
        held.push((device.hold(own.into())?, socket));
    }
    Ok(DataChannel {
        device: Arc::new(DataDevice::Userspace(device)),
        sockets: held,
        ciphers: DEFAULT_CIPHERS.to_vec(),
        reason: None,
        totals: Arc::default(),
        given: Given::default(),
        telling,
        _followers: None,
    })
}

fn attributes(new: &NewPeer) -> PeerAttributes {
    let mut attributes = PeerAttributes {
        id: Some(new.id),
        keepalive_interval_s: Some(new.ping_s),
        keepalive_timeout_s: Some(new.timeout_s),
        ..PeerAttributes::default()
    };
    // A connection has its other end.
    let remote = matches!(new.transport, Transport::Udp(_)).then_some(new.remote);
    attributes.remote_port = remote.map(|remote| remote.port());
    match remote {
        None => {}
        Some(SocketAddr::V4(remote)) => attributes.remote_ipv4 = Some(*remote.ip()),
        Some(SocketAddr::V6(remote)) => {
            attributes.remote_ipv6 = Some(*remote.ip());
            attributes.remote_ipv6_scope_id = Some(remote.scope_id()).filter(|id| *id != 0);
        }
    }
    match (remote, new.local) {
        (Some(SocketAddr::V4(_)), Some(IpAddr::V4(local))) => attributes.local_ipv4 = Some(local),
        (Some(SocketAddr::V6(_)), Some(IpAddr::V6(local))) => attributes.local_ipv6 = Some(local),
        _ => {}
    }
    for address in &new.addresses {
        match address {
            IpAddr::V4(address) => attributes.vpn_ipv4 = Some(*address),
            IpAddr::V6(address) => attributes.vpn_ipv6 = Some(*address),
        }
    }
    attributes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::time::timeout;
    use weft_openvpn::device::{DeletionReason, Notification};

    use super::*;

    #[tokio::test]
    async fn a_flood_of_packets_leaves_room_for_news_of_peers() {
        let (sender, mut events) = mpsc::channel(EVENTS_MAX);
        let resets = Arc::new(ResetFilter::new(Instant::now()));
        let telling = Telling { sender, lost: Arc::default(), resets };
        let source: SocketAddr = "192.0.2.1:1194".parse().unwrap();
        for _ in 0..EVENTS_MAX {
            let packet = vec![0];
            telling.tell(Event::Packet { source, local: None, transport: 0, packet });
        }
        let lost = || telling.lost.load(Ordering::Relaxed);
        assert_eq!(lost(), NEWS_PLACES as u64);
        // The task of a connection waits as long.
        assert!(timeout(Duration::ZERO, telling.room()).await.is_err());
        for peer_id in 0..NEWS_PLACES as u32 {
            let reason = DeletionReason::Expired;
            telling.tell(Event::Notification(Notification::PeerDeleted { peer_id, reason }));
        }
        assert_eq!(lost(), NEWS_PLACES as u64, "no news");
        let (mut packets, mut news) = (0, 0);
        while let Ok(event) = events.try_recv() {
            match event {
                Event::Packet { .. } => packets += 1,
                Event::Notification(_) => news += 1,
            }
        }
        assert_eq!((packets, news), (EVENTS_MAX - NEWS_PLACES, NEWS_PLACES));
        assert!(timeout(Duration::from_secs(10), telling.room()).await.unwrap().is_ok());
        drop(events);
        assert!(telling.room().await.is_err(), "the service has ended");
    }
}
