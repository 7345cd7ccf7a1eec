//! The data channel device, the kernel's or Weft's own, with its one peer.

use std::net::{SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyhow::{Context, bail};
use tokio::sync::mpsc;
use weft_daemon::config::OpenvpnEngine;
use weft_daemon::dco::{DataDevice, KernelDevice, KernelNews};
use weft_engine::dco::{Device, DeviceConfig, Event, MTU_MAX};
use weft_io::udp::IPV6_MTU_MIN;
use weft_kernel::Kernel;
use weft_kernel::ovpn::{OvpnDeviceSpec, OvpnWatch};
use weft_openvpn::device::{
    DeletionReason, Keepalive, MTU_DEFAULT, Mode, Notification, PeerAttributes, Slot,
};
use weft_openvpn::session::DataKeys;

use crate::dco::{Engine, OwnedTask};

/// Most events of the device that wait: control packets beyond it are lost, as on the way.
const EVENTS_MAX: usize = 1_024;
/// How often a name for the device is sought.
const NAMES_MAX: usize = 1_000;
/// How a device's name begins, unless the user gives a whole one.
const NAME_START: &str = "weft-vpn";

/// What happens at the device.
#[derive(Debug)]
pub(super) enum News {
    /// A packet of the control channel.
    Control(Vec<u8>),
    /// The peer is gone.
    Gone(DeletionReason),
    /// The sealing key is used up.
    KeyUsedUp,
    /// Packets of the server come from another address.
    Moved(SocketAddr),
}

/// The device. It goes with [`Tunnel::end`]; one in userspace goes with the process, too.
pub(super) struct Tunnel {
    pub(super) name: String,
    pub(super) index: u32,
    pub(super) engine: Engine,
    device: Arc<DataDevice>,
    events: mpsc::Receiver<Event>,
    /// Follows a kernel's device.
    _follower: Option<OwnedTask>,
    /// The server, as the device knows it.
    peer: Option<u32>,
}

impl Tunnel {
    /// Makes the device in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has none, or refuses; the name is taken.
    pub(super) async fn open(
        kernel: &Kernel,
        engine: OpenvpnEngine,
        name: Option<&str>,
    ) -> anyhow::Result<Self> {
        let name = match name {
            Some(name) if weft_io::tun::index(name).is_ok() => {
                bail!(
                    "device {name} already exists: give another --device, or remove it (ip link del {name})"
                )
            }
            Some(name) => name.to_owned(),
            None => free_name()?,
        };
        let engine = match engine {
            OpenvpnEngine::Kernel => Engine::Kernel,
            OpenvpnEngine::Auto if weft_kernel::ovpn::support().await.is_ok() => Engine::Kernel,
            OpenvpnEngine::Auto | OpenvpnEngine::Userspace => Engine::Userspace,
        };
        let (tell, events) = mpsc::channel(EVENTS_MAX);
        let (device, follower) = match engine {
            Engine::Kernel => open_kernel(kernel, &name, tell).await?,
            Engine::Userspace => (open_userspace(&name, tell)?, None),
        };
        let index = weft_io::tun::index(&name).context("the device is gone at once")?;
        Ok(Self { name, index, engine, device, events, _follower: follower, peer: None })
    }

    /// Whether the server is the device's peer, so that the device has its socket.
    pub(super) const fn has_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Makes the server the device's peer. `remote` is its address over UDP.
    pub(super) async fn new_peer(
        &mut self,
        socket: BorrowedFd<'_>,
        remote: Option<SocketAddr>,
        id: u32,
    ) -> anyhow::Result<()> {
        let mut attributes = PeerAttributes { id: Some(id), ..PeerAttributes::default() };
        if let Some(remote) = remote {
            attributes.remote_port = Some(remote.port());
            match remote {
                SocketAddr::V4(v4) => attributes.remote_ipv4 = Some(*v4.ip()),
                SocketAddr::V6(v6) => {
                    attributes.remote_ipv6 = Some(*v6.ip());
                    attributes.remote_ipv6_scope_id = scope_of(&v6);
                }
            }
        }
        self.device.new_peer(socket, &attributes).await?;
        self.peer = Some(id);
        Ok(())
    }

    /// Sets the signs of life.
    pub(super) async fn set_keepalive(&self, keepalive: Keepalive) -> anyhow::Result<()> {
        let Some(id) = self.peer else { return Ok(()) };
        let attributes = PeerAttributes {
            id: Some(id),
            keepalive_interval_s: Some(keepalive.interval_s),
            keepalive_timeout_s: Some(keepalive.timeout_s),
            ..PeerAttributes::default()
        };
        Ok(self.device.set_peer(&attributes).await?)
    }

    /// Puts a key into a slot.
    pub(super) async fn install(&self, slot: Slot, keys: &DataKeys) -> anyhow::Result<()> {
        let Some(id) = self.peer else { bail!("a key without a peer") };
        Ok(self.device.install(id, slot, keys).await?)
    }

    /// Exchanges the keys of the two slots.
    pub(super) async fn swap_keys(&self) -> anyhow::Result<()> {
        let Some(id) = self.peer else { return Ok(()) };
        Ok(self.device.swap_keys(id).await?)
    }

    /// Empties the secondary slot.
    pub(super) async fn remove_secondary(&self) -> anyhow::Result<()> {
        let Some(id) = self.peer else { return Ok(()) };
        Ok(self.device.delete_key(id, Slot::Secondary).await?)
    }

    /// Whether the device itself sends and receives control packets.
    pub(super) fn carries_control(&self) -> bool {
        self.peer.is_some() && !self.device.is_kernel()
    }

    /// Sends a control packet by the device.
    pub(super) fn send(&self, packet: &[u8]) -> anyhow::Result<()> {
        let (DataDevice::Userspace(device), Some(id)) = (&*self.device, self.peer) else {
            bail!("the device sends no control packets");
        };
        Ok(device.send_packet(id, packet)?)
    }

    /// The next event of the device's peer. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The device can be watched no longer.
    pub(super) async fn next(&mut self) -> anyhow::Result<News> {
        let Some(id) = self.peer else {
            return std::future::pending().await;
        };
        loop {
            let what = match self.events.recv().await {
                Some(Event::Packet { packet, .. }) => return Ok(News::Control(packet)),
                Some(Event::Notification(what)) => what,
                None => bail!("the device has ended"),
            };
            match what {
                Notification::PeerDeleted { peer_id, reason } if peer_id == id => {
                    return Ok(News::Gone(reason));
                }
                Notification::KeySwap { peer_id, .. } if peer_id == id => {
                    return Ok(News::KeyUsedUp);
                }
                Notification::PeerFloat { peer_id, remote } if peer_id == id => {
                    return Ok(News::Moved(remote));
                }
                _ => {}
            }
        }
    }

    /// The server is the device's peer no longer; the device stays, and drops what is routed to it.
    pub(super) async fn drop_peer(&mut self) {
        let Some(id) = self.peer.take() else { return };
        // It may have gone by itself.
        let _ = self.device.delete_peer(id).await;
        while self.events.try_recv().is_ok() {}
    }

    /// Removes the device.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) async fn end(mut self, kernel: &Kernel) -> anyhow::Result<()> {
        self.drop_peer().await;
        kernel.remove_ovpn_device_by_index(self.index).await?;
        Ok(())
    }
}

/// A device of the kernel's, whose notices are told as Weft's own tells them.
async fn open_kernel(
    kernel: &Kernel,
    name: &str,
    tell: mpsc::Sender<Event>,
) -> anyhow::Result<(Arc<DataDevice>, Option<OwnedTask>)> {
    let mut watch = OvpnWatch::open().await?;
    let spec = OvpnDeviceSpec { name: name.to_owned(), mode: Mode::P2p, own: false };
    let made = kernel.create_ovpn_device(&spec).await?;
    let device = Arc::new(DataDevice::Kernel(KernelDevice::new(&made).await?));
    let followed = Arc::clone(&device);
    let follower = OwnedTask::spawn(async move {
        let DataDevice::Kernel(followed) = &*followed else { return };
        let told = |news| {
            let what = match news {
                KernelNews::Told(what) => what,
                KernelNews::Lost => return,
                KernelNews::Gone { peer_id } => {
                    Notification::PeerDeleted { peer_id, reason: DeletionReason::Teardown }
                }
            };
            let _ = tell.try_send(Event::Notification(what));
        };
        followed.follow(&mut watch, &told).await;
    });
    Ok((device, Some(follower)))
}

fn open_userspace(name: &str, tell: mpsc::Sender<Event>) -> anyhow::Result<Arc<DataDevice>> {
    let config = DeviceConfig {
        name: name.to_owned(),
        mode: Mode::P2p,
        mtu: u16::try_from(MTU_DEFAULT).unwrap_or(MTU_MAX),
        path_mtu: IPV6_MTU_MIN,
        offloads: true,
    };
    weft_daemon::choose_libraries();
    let told = move |event| drop(tell.try_send(event));
    let device = Device::open(&config, Arc::new(told))?;
    Ok(Arc::new(DataDevice::Userspace(device)))
}

fn free_name() -> anyhow::Result<String> {
    let mut names = (0..NAMES_MAX).map(|number| format!("{NAME_START}{number}"));
    let free = names.find(|name| weft_io::tun::index(name).is_err());
    free.with_context(|| format!("all of {NAMES_MAX} device names are taken: give a --device"))
}

fn scope_of(address: &SocketAddrV6) -> Option<u32> {
    (address.scope_id() != 0).then(|| address.scope_id())
}
