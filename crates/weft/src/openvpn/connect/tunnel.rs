//! The data channel device, the kernel's or Weft's own, with its one peer.

use std::net::{SocketAddr, SocketAddrV6};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyhow::{Context, bail};
use tokio::sync::mpsc;
use weft_engine::dco::{Device, DeviceConfig, Event, MTU_MAX};
use weft_io::udp::IPV6_MTU_MIN;
use weft_kernel::Kernel;
use weft_kernel::ovpn::{OvpnClient, OvpnDeviceSpec, OvpnWatch, Watched};
use weft_openvpn::device::{
    DeletionReason, Keepalive, MTU_DEFAULT, Mode, Notification, PeerAttributes, Slot, Traffic,
};
use weft_openvpn::session::DataKeys;

use crate::dco::{Engine, Key};

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
    inner: Inner,
    peer: Option<Peer>,
}

enum Inner {
    Kernel { client: OvpnClient, watch: OvpnWatch },
    Userspace { device: Device, events: mpsc::Receiver<Event> },
}

/// The server, as the device knows it.
struct Peer {
    id: u32,
    /// The keys of the primary and the secondary slot, in the kernel's device: it does not count their use.
    keys: [Option<Key>; 2],
}

impl Tunnel {
    /// Makes the device in the calling thread's network namespace.
    ///
    /// # Errors
    /// The kernel has none, or refuses; the name is taken.
    pub(super) async fn open(
        kernel: &Kernel,
        engine: Option<Engine>,
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
            Some(engine) => engine,
            None if weft_kernel::ovpn::support().await.is_ok() => Engine::Kernel,
            None => Engine::Userspace,
        };
        let inner = match engine {
            Engine::Kernel => {
                let client = OvpnClient::open().await?;
                let watch = OvpnWatch::open().await?;
                let spec = OvpnDeviceSpec { name: name.clone(), mode: Mode::P2p, own: false };
                kernel.create_ovpn_device(&spec).await?;
                Inner::Kernel { client, watch }
            }
            Engine::Userspace => open_userspace(&name)?,
        };
        let index = weft_io::tun::index(&name).context("the device is gone at once")?;
        Ok(Self { name, index, engine, inner, peer: None })
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
        match &self.inner {
            Inner::Kernel { client, .. } => {
                client.new_peer(self.index, socket, &attributes).await?;
            }
            Inner::Userspace { device, .. } => {
                let own: OwnedFd = socket.try_clone_to_owned()?;
                device.new_peer(own, &attributes)?;
            }
        }
        self.peer = Some(Peer { id, keys: [None; 2] });
        Ok(())
    }

    /// Sets the signs of life.
    pub(super) async fn set_keepalive(&self, keepalive: Keepalive) -> anyhow::Result<()> {
        let Some(peer) = &self.peer else { return Ok(()) };
        let attributes = PeerAttributes {
            id: Some(peer.id),
            keepalive_interval_s: Some(keepalive.interval_s),
            keepalive_timeout_s: Some(keepalive.timeout_s),
            ..PeerAttributes::default()
        };
        match &self.inner {
            Inner::Kernel { client, .. } => client.set_peer(self.index, &attributes).await?,
            Inner::Userspace { device, .. } => device.set_peer(&attributes)?,
        }
        Ok(())
    }

    /// Puts a key into a slot.
    pub(super) async fn install(&mut self, slot: Slot, keys: &DataKeys) -> anyhow::Result<()> {
        let Some(peer) = &mut self.peer else { bail!("a key without a peer") };
        let attributes = keys.attributes(peer.id, slot);
        match &self.inner {
            Inner::Kernel { client, .. } => {
                let state = client.peer(self.index, peer.id).await;
                let before: Traffic = state.map(|state| state.link).unwrap_or_default();
                client.new_key(self.index, &attributes).await?;
                let key = Key::new(keys.key_id.get().into(), keys.cipher, before);
                peer.keys[place(slot)] = Some(key);
            }
            Inner::Userspace { device, .. } if keys.has_epochs => {
                device.new_epochs(keys.epoch_attributes(peer.id, slot))?;
            }
            Inner::Userspace { device, .. } => device.new_key(&attributes)?,
        }
        Ok(())
    }

    /// Exchanges the keys of the two slots.
    pub(super) async fn swap_keys(&mut self) -> anyhow::Result<()> {
        let Some(peer) = &mut self.peer else { return Ok(()) };
        match &self.inner {
            Inner::Kernel { client, .. } => client.swap_keys(self.index, peer.id).await?,
            Inner::Userspace { device, .. } => device.swap_keys(peer.id)?,
        }
        peer.keys.swap(0, 1);
        Ok(())
    }

    /// Empties the secondary slot.
    pub(super) async fn remove_secondary(&mut self) -> anyhow::Result<()> {
        let Some(peer) = &mut self.peer else { return Ok(()) };
        let slot = Slot::Secondary;
        match &self.inner {
            Inner::Kernel { client, .. } => client.delete_key(self.index, peer.id, slot).await?,
            Inner::Userspace { device, .. } => device.delete_key(peer.id, slot)?,
        }
        peer.keys[place(slot)] = None;
        Ok(())
    }

    /// Whether the device itself sends and receives control packets.
    pub(super) const fn carries_control(&self) -> bool {
        self.peer.is_some() && matches!(self.inner, Inner::Userspace { .. })
    }

    /// Sends a control packet by the device.
    pub(super) fn send(&self, packet: &[u8]) -> anyhow::Result<()> {
        let (Inner::Userspace { device, .. }, Some(peer)) = (&self.inner, &self.peer) else {
            bail!("the device sends no control packets");
        };
        Ok(device.send_packet(peer.id, packet)?)
    }

    /// The next event of the device's peer. Dropping the future loses nothing.
    ///
    /// # Errors
    /// The device can be watched no longer.
    pub(super) async fn next(&mut self) -> anyhow::Result<News> {
        let Some(id) = self.peer.as_ref().map(|peer| peer.id) else {
            return std::future::pending().await;
        };
        loop {
            let what = match &mut self.inner {
                Inner::Kernel { client, watch } => match watch.next().await? {
                    Watched::Notice(notice) if notice.device == self.index => notice.what,
                    Watched::Notice(_) => continue,
                    // Whatever it was: without its peer the tunnel begins anew.
                    Watched::Lost if client.peer(self.index, id).await.is_ok() => continue,
                    Watched::Lost => return Ok(News::Gone(DeletionReason::Teardown)),
                },
                Inner::Userspace { events, .. } => match events.recv().await {
                    Some(Event::Packet { packet, .. }) => return Ok(News::Control(packet)),
                    Some(Event::Notification(what)) => what,
                    None => bail!("the device has ended"),
                },
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

    /// Whether a key of the kernel's device has sealed or opened all that it may. It is removed then.
    pub(super) async fn end_used_up(&mut self) -> bool {
        let (Inner::Kernel { client, .. }, Some(peer)) = (&self.inner, &mut self.peer) else {
            return false;
        };
        if !peer.keys.iter().flatten().any(Key::is_limited) {
            return false;
        }
        let Ok(state) = client.peer(self.index, peer.id).await else { return false };
        let mut found = false;
        for slot in Slot::ALL {
            let key = &mut peer.keys[place(slot)];
            if key.is_some_and(|key| key.is_used_up(&state.link)) {
                let _ = client.delete_key(self.index, peer.id, slot).await;
                *key = None;
                found = true;
            }
        }
        found
    }

    /// The server is the device's peer no longer; the device stays, and drops what is routed to it.
    pub(super) async fn drop_peer(&mut self) {
        let Some(peer) = self.peer.take() else { return };
        // It may have gone by itself.
        match &mut self.inner {
            Inner::Kernel { client, .. } => {
                let _ = client.delete_peer(self.index, peer.id).await;
            }
            Inner::Userspace { device, events } => {
                let _ = device.delete_peer(peer.id);
                while events.try_recv().is_ok() {}
            }
        }
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

fn open_userspace(name: &str) -> anyhow::Result<Inner> {
    let config = DeviceConfig {
        name: name.to_owned(),
        mode: Mode::P2p,
        mtu: u16::try_from(MTU_DEFAULT).unwrap_or(MTU_MAX),
        path_mtu: IPV6_MTU_MIN,
        offloads: true,
    };
    let (tell, events) = mpsc::channel(EVENTS_MAX);
    weft_daemon::choose_libraries();
    let told = move |event| drop(tell.try_send(event));
    let device = Device::open(&config, Arc::new(told))?;
    Ok(Inner::Userspace { device, events })
}

fn free_name() -> anyhow::Result<String> {
    let mut names = (0..NAMES_MAX).map(|number| format!("{NAME_START}{number}"));
    let free = names.find(|name| weft_io::tun::index(name).is_err());
    free.with_context(|| format!("all of {NAMES_MAX} device names are taken: give a --device"))
}

fn scope_of(address: &SocketAddrV6) -> Option<u32> {
    (address.scope_id() != 0).then(|| address.scope_id())
}

const fn place(slot: Slot) -> usize {
    match slot {
        Slot::Primary => 0,
        Slot::Secondary => 1,
    }
}
