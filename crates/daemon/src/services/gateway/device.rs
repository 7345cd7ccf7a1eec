//! What moves clients' packets: the data channel device, and the UDP sockets that it reads.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use tokio::sync::mpsc;
use weft_engine::dco::{Device, DeviceConfig, Event};
use weft_engine::{DropReason, EngineError};
use weft_kernel::CLIENTS_DEVICE;
use weft_openvpn::device::{DeviceError, MTU_DEFAULT, Mode, PeerAttributes, PeerState, Slot};
use weft_openvpn::session::DataKeys;

use super::Wanted;

/// Events of the device that wait for the service; more are dropped and counted.
const EVENTS_MAX: usize = 8_192;
/// The MTU of clients' packets, in bytes.
pub(super) const MTU: u16 = MTU_DEFAULT as u16;
/// The port of OpenVPN.
pub(super) const PORT: u16 = 1_194;

/// The device and its sockets. All goes with this value.
pub(super) struct DataChannel {
    device: Device,
    /// By the number of the transport.
    sockets: Vec<(u16, UdpSocket)>,
    lost: Arc<AtomicU64>,
}

/// A client's peer on the device.
#[derive(Clone, Debug)]
pub(super) struct NewPeer {
    pub(super) id: u32,
    pub(super) transport: u16,
    pub(super) remote: SocketAddr,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) ping_s: u32,
    pub(super) timeout_s: u32,
}

/// The gateway cannot begin.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    /// A socket cannot be bound.
    #[error(
        "cannot listen on UDP {address}: {error}; another program may use the port: weft openvpn serve --listen ADDRESS:PORT"
    )]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// The engine's device cannot be made.
    #[error(transparent)]
    Device(#[from] EngineError),
    /// The device does not take a socket.
    #[error("the device does not take a socket: {0}")]
    Socket(#[from] DeviceError),
}

impl DataChannel {
    /// Opens the device and binds the sockets.
    pub(super) fn open(wanted: &Wanted) -> Result<(Self, mpsc::Receiver<Event>), OpenError> {
        let sockets = bind_all(wanted)?;
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&lost);
        let tell = move |event| {
            if sender.try_send(event).is_err() {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        };
        let config = DeviceConfig {
            name: CLIENTS_DEVICE.into(),
            mode: Mode::Mp,
            mtu: MTU,
            path_mtu: weft_io::udp::IPV6_MTU_MIN,
            offloads: true,
        };
        let device = Device::open(&config, Arc::new(tell))?;
        let mut channel = Self { device, sockets: Vec::new(), lost };
        for socket in sockets {
            let held = socket.try_clone().map_err(|_| DeviceError::NotASocket)?;
            let number = channel.device.hold(held.into())?;
            channel.sockets.push((number, socket));
        }
        Ok((channel, events))
    }

    /// The addresses that are listened on.
    pub(super) fn listens(&self) -> Vec<SocketAddr> {
        self.sockets.iter().filter_map(|(_, socket)| socket.local_addr().ok()).collect()
    }

    /// Sends a packet of the control channel.
    pub(super) fn send(&self, transport: u16, to: SocketAddr, packet: &[u8]) {
        if let Err(error) = self.device.send_to(transport, to, packet) {
            tracing::debug!(%error, %to, "cannot send a packet of the control channel");
        }
    }

    /// Makes a client's peer.
    pub(super) fn new_peer(&self, new: &NewPeer) -> Result<(), DeviceError> {
        let socket = self.sockets.iter().find(|(number, _)| *number == new.transport);
        let (_, socket) = socket.ok_or(DeviceError::NotASocket)?;
        let socket = socket.try_clone().map_err(|_| DeviceError::NotASocket)?;
        let mut attributes = PeerAttributes {
            id: Some(new.id),
            remote_port: Some(new.remote.port()),
            keepalive_interval_s: Some(new.ping_s),
            keepalive_timeout_s: Some(new.timeout_s),
            ..PeerAttributes::default()
        };
        match new.remote {
            SocketAddr::V4(remote) => attributes.remote_ipv4 = Some(*remote.ip()),
            SocketAddr::V6(remote) => {
                attributes.remote_ipv6 = Some(*remote.ip());
                attributes.remote_ipv6_scope_id = Some(remote.scope_id()).filter(|id| *id != 0);
            }
        }
        for address in &new.addresses {
            match address {
                IpAddr::V4(address) => attributes.vpn_ipv4 = Some(*address),
                IpAddr::V6(address) => attributes.vpn_ipv6 = Some(*address),
            }
        }
        self.device.new_peer(socket.into(), &attributes)
    }

    /// Removes a peer, if it is still there.
    pub(super) fn remove_peer(&self, id: u32) {
        let _ = self.device.delete_peer(id);
    }

    /// Installs a key.
    pub(super) fn install(&self, id: u32, slot: Slot, keys: &DataKeys) -> Result<(), DeviceError> {
        match keys.has_epochs {
            true => self.device.new_epochs(keys.epoch_attributes(id, slot)),
            false => self.device.new_key(&keys.attributes(id, slot)),
        }
    }

    pub(super) fn swap_keys(&self, id: u32) -> Result<(), DeviceError> {
        self.device.swap_keys(id)
    }

    pub(super) fn remove_secondary(&self, id: u32) -> Result<(), DeviceError> {
        self.device.delete_key(id, Slot::Secondary)
    }

    /// A peer with its counters.
    pub(super) fn peer(&self, id: u32) -> Option<PeerState> {
        self.device.peer(id).ok()
    }

    /// Packets that the device has dropped, by reason, and events that nobody took in time.
    pub(super) fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let reasons = DropReason::ALL.iter();
        let drops = reasons.map(|reason| (reason.name(), self.device.dropped(*reason)));
        drops.chain([("events_lost", self.lost.load(Ordering::Relaxed))])
    }
}

/// The sockets that were asked for, or those of all addresses. A host without IPv6 has those of IPv4 then.
fn bind_all(wanted: &Wanted) -> Result<Vec<UdpSocket>, OpenError> {
    let failed = |address| move |error| OpenError::Listen { address, error };
    if !wanted.listen.is_empty() {
        let bound = wanted.listen.iter().map(|it| bind_udp(*it).map_err(failed(*it)));
        return bound.collect();
    }
    let all = SocketAddr::from(([0, 0, 0, 0], PORT));
    let mut sockets = vec![bind_udp(all).map_err(failed(all))?];
    let all = SocketAddr::from(([0_u16; 8], PORT));
    match bind_udp(all) {
        Ok(socket) => sockets.push(socket),
        Err(error) => match error.kind() {
            io::ErrorKind::AddrInUse => return Err(failed(all)(error)),
            _ => tracing::info!(%error, "the gateway listens on IPv4 alone"),
        },
    }
    Ok(sockets)
}

/// A socket of one family alone.
fn bind_udp(address: SocketAddr) -> io::Result<UdpSocket> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    bind(&socket, &address)?;
    Ok(socket.into())
}
