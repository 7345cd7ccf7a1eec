//! The bridge of a network, and its overlay port.

use ipnet::IpNet;
use netlink_packet_route::link::{
    BridgeMulticastRouterType, BridgeStpState, InfoBridge, InfoBridgePort, InfoData, InfoKind,
    LinkAttribute, LinkInfo, LinkMessage,
};

use rustix::io::Errno;
use weft_path::Vni;

use super::{
    addresses::Addresses,
    devices::{NetworkDevices, is_known_tap},
    ipv6::{ignore_routers, this_host},
    link::{
        Change, DEVICE_ALIAS, DEVICE_GROUP, Link, MTU_MIN, check_mtu, check_name, is_datapath, mark,
    },
};
use crate::{error::KernelError, handle::Kernel};

/// Ports that a Linux bridge takes (BR_MAX_PORTS less the number 0).
pub(crate) const BRIDGE_PORTS_MAX: usize = 1_023;
/// The difference between the MTU at creation and the wanted one, in bytes. A bridge follows its smallest
/// port's MTU until its MTU is *changed*, so it is made with another one first.
const MTU_PIN_STEP: u32 = 4;

/// The bridge of one network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BridgeSpec {
    /// Device name, 1 to 15 bytes.
    pub name: String,
    /// Its MAC address, the same after each restart.
    pub mac: [u8; 6],
    /// MTU in bytes, 1280 to 65535. It does not depend on the MTUs of the ports.
    pub mtu: u32,
}

/// A port of the bridge that the engine opened: the TAP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortSpec {
    /// Device name; the device exists already.
    pub name: String,
    /// The bridge, made by [`Kernel::ensure_bridge`].
    pub bridge: String,
    /// Nothing passes between two isolated ports (split horizon).
    pub isolated: bool,
    /// Whether the bridge learns source MACs from this port.
    pub learning: bool,
    /// Whether the bridge answers ARP and neighbour discovery for known endpoints itself, instead
    /// of sending the question out of this port.
    pub neigh_suppress: bool,
    /// Whether frames to unknown addresses leave by this port.
    pub flood: bool,
    /// MTU in bytes.
    pub mtu: u32,
    /// Largest super-packet in bytes that the kernel may send into the port.
    pub gso_max_size: Option<u32>,
    /// Most segments of a super-packet that the kernel may send into the port.
    pub gso_max_segs: Option<u32>,
}

impl Kernel {
    /// Makes the bridge, or brings it into the wanted shape: up, MTU pinned, spanning tree off, no forward
    /// delay, no IPv6 autoconfiguration. It accepts no router advertisements: a container must not be able to
    /// give the host a route. Multicast snooping and ageing stay the kernel's defaults.
    ///
    /// # Errors
    /// [`KernelError::NameTaken`] if another program's device has the name,
    /// [`KernelError::Routers`] if it would take router advertisements,
    /// [`KernelError::InvalidName`], [`KernelError::InvalidMtu`], [`KernelError::NotPermitted`].
    pub async fn ensure_bridge(&self, spec: &BridgeSpec) -> Result<(), KernelError> {
        check_name(&spec.name)?;
        check_mtu(spec.mtu)?;
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let is_renamed = |link: &Link| link.kind == Some(InfoKind::Bridge) && link.mac == spec.mac;
        socket.restore_name(&spec.name, is_renamed).await?;
        let link = match socket.link(&spec.name).await? {
            Some(link) if link.is_own() && link.kind == Some(InfoKind::Bridge) => link,
            Some(link) => return Err(link.name_taken("on this host")),
            None => {
                socket.create_link(new_bridge(spec), &spec.name).await?;
                socket.need_link(&spec.name).await?
            }
        };
        socket.disable_autoconfiguration(&link).await?;
        ignore_routers(&self.inner.home, &spec.name, this_host())?;
        let mut differing = bridge_options()
            .into_iter()
            .filter(|option| !link.bridge.contains(option))
            .collect::<Vec<_>>();
        // A kernel that does not know VLANs on bridges shows no such option.
        let is_vlan = |option: &&InfoBridge| matches!(option, InfoBridge::VlanDefaultPvid(_));
        if link.bridge.iter().find(is_vlan).is_some_and(|option| *option != NO_VLAN) {
            differing.push(NO_VLAN);
        }
        if !differing.is_empty() {
            socket.set_bridge_options(&link, differing).await?;
        }
        mark(&link)
            .when(link.mac != spec.mac, LinkAttribute::Address(spec.mac.to_vec()))
            .when(link.mtu != spec.mtu, LinkAttribute::Mtu(spec.mtu))
            .send(socket, &spec.name)
            .await?;
        Change::of(&link).up(&link).send(socket, &spec.name).await
    }

    /// Puts the engine's device into the bridge with the wanted options, and switches it on.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the engine has not opened the device or the bridge is not
    /// there, [`KernelError::PortTaken`] if the device is in another bridge,
    /// [`KernelError::NameTaken`] if it is not a TAP device.
    pub async fn ensure_port(&self, spec: &PortSpec) -> Result<(), KernelError> {
        check_name(&spec.name)?;
        check_mtu(spec.mtu)?;
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let bridge = self.own_bridge(&spec.bridge).await?;
        let link = socket.need_link(&spec.name).await?;
        if link.kind != Some(InfoKind::Tun) && !link.is_own() {
            return Err(link.name_taken("on this host"));
        }
        self.join(&link, &bridge).await?;
        self.set_up_device(&link, spec).await?;
        let link = socket.need_link(&spec.name).await?;
        let wanted = vec![
            InfoBridgePort::Isolated(spec.isolated),
            InfoBridgePort::Learning(spec.learning),
            InfoBridgePort::NeighSupress(spec.neigh_suppress),
            InfoBridgePort::UnicastFlood(spec.flood),
            // Flood all multicast to this port: the bridge does not query the hosts behind it for their
            // groups.
            InfoBridgePort::MulticastRouter(BridgeMulticastRouterType::Permanent),
        ];
        self.set_port(&link, wanted).await?;
        Change::of(&link).up(&link).send(socket, &spec.name).await
    }

    /// Restores the name of the engine's device if it was renamed; false if the device is not there.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn restore_device_name(&self, name: &str) -> Result<bool, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let is_it = |link: &Link| {
            link.kind == Some(InfoKind::Tun)
                && link.alias.as_deref() == Some(DEVICE_ALIAS)
                && !is_known_tap(&link.name)
        };
        self.socket().restore_name(name, is_it).await
    }

    /// Switches the engine's device on with the wanted MTU and limits, for a switch other than a bridge.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the engine has not opened it, [`KernelError::NameTaken`] if
    /// it is not a TAP device.
    pub async fn ensure_device(&self, spec: &PortSpec) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let link = self.socket().need_link(&spec.name).await?;
        if link.kind != Some(InfoKind::Tun) && !link.is_own() {
            return Err(link.name_taken("on this host"));
        }
        self.set_up_device(&link, spec).await?;
        Change::of(&link).up(&link).send(self.socket(), &spec.name).await
    }

    async fn set_up_device(&self, link: &Link, spec: &PortSpec) -> Result<(), KernelError> {
        let socket = self.socket();
        socket.disable_autoconfiguration(link).await?;
        ignore_routers(&self.inner.home, &spec.name, this_host())?;
        let limit = |wanted: Option<u32>, present: Option<u32>| {
            (wanted.is_some() && wanted != present, wanted.unwrap_or_default())
        };
        let (size_differs, size) = limit(spec.gso_max_size, link.gso_max_size);
        let (segs_differ, segs) = limit(spec.gso_max_segs, link.gso_max_segs);
        mark(link)
            .when(link.mtu != spec.mtu, LinkAttribute::Mtu(spec.mtu))
            .when(size_differs, LinkAttribute::GsoMaxSize(size))
            .when(segs_differ, LinkAttribute::GsoMaxSegs(segs))
            .send(socket, &spec.name)
            .await
    }

    /// Gives the host exactly these addresses on the network, on the bridge's or datapath's device. Those that
    /// the kernel made (link-local) are left alone.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the bridge is not there, or the kernel's refusal.
    pub async fn set_bridge_addresses(
        &self,
        bridge: &str,
        wanted: &[IpNet],
    ) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let link = self.own_switch(bridge).await?;
        let socket = self.socket();
        let present = Addresses::read(socket).await?;
        let surplus: Vec<IpNet> = present
            .of(link.index)
            .filter(|address| !wanted.contains(address) && !is_link_local(address))
            .collect();
        for address in surplus {
            socket.remove_address(link.index, address).await?;
        }
        let present = Addresses::read(socket).await?;
        for address in wanted {
            if !present.has(link.index, address) {
                socket.add_address(&link, *address).await?;
            }
        }
        Ok(())
    }

    /// Deletes the bridge, every device of ours that is or was in it, and those that belong to it without
    /// being ports (probe devices). Each container end goes with its host end. Returns how many devices it
    /// deleted. Devices of others in the bridge are not deleted.
    ///
    /// # Errors
    /// [`KernelError::NameTaken`] if the bridge is not ours (nothing is deleted then), or the kernel's refusal.
    pub async fn remove_all(&self, bridge: &str) -> Result<usize, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let link = socket.link(bridge).await?;
        if let Some(link) = link.as_ref().filter(|link| !link.is_own()) {
            return Err(link.name_taken("on this host"));
        }
        let loose = |port: &Link| {
            let kinds = [Some(InfoKind::Veth), Some(InfoKind::Vxlan), Some(InfoKind::Tun)];
            port.master.is_none() && kinds.contains(&port.kind)
        };
        let index = link.as_ref().map(|link| link.index);
        let inside = |port: &Link| port.master.is_some() && port.master == index;
        let ours = |port: &Link| port.is_own() && (inside(port) || loose(port));
        let mut deleted = 0;
        for port in socket.links().await?.iter().filter(|port| ours(port)).chain(&link) {
            socket.delete_link(port).await?;
            deleted += 1;
        }
        Ok(deleted)
    }

    /// Deletes the bridge with every device of ours in it; the end of each in a container goes with it. Devices of
    /// others stay. False if there is no such bridge.
    ///
    /// # Errors
    /// [`KernelError::NameTaken`] if the bridge is not ours (nothing is deleted then), or the kernel's refusal.
    pub async fn remove_bridge(&self, bridge: &str) -> Result<bool, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let Some(link) = socket.link(bridge).await? else { return Ok(false) };
        if !link.is_own() {
            return Err(link.name_taken("on this host"));
        }
        let inside = |port: &&Link| port.is_own() && port.master == Some(link.index);
        for port in socket.links().await?.iter().filter(inside) {
            socket.delete_link(port).await?;
        }
        socket.delete_link(&link).await.map(|()| true)
    }

    /// The networks besides `weft` that have a bridge of ours on this host.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn network_bridges(&self) -> Result<Vec<Vni>, KernelError> {
        let links = self.socket().links().await?;
        let bridge = |link: &&Link| link.is_own() && link.kind == Some(InfoKind::Bridge);
        Ok(links
            .iter()
            .filter(bridge)
            .filter_map(|link| NetworkDevices::network_of(&link.name))
            .collect())
    }

    /// Deletes the bridges of all networks besides `weft`, as [`Self::remove_bridge`] does.
    ///
    /// # Errors
    /// See [`Self::remove_bridge`].
    pub async fn remove_network_bridges(&self) -> Result<(), KernelError> {
        for vni in self.network_bridges().await? {
            self.remove_bridge(&NetworkDevices::of(vni).bridge).await?;
        }
        Ok(())
    }

    /// The bridge by name, if it is there and ours.
    pub(crate) async fn own_bridge(&self, name: &str) -> Result<Link, KernelError> {
        let link = self.socket().need_link(name).await?;
        if link.is_own() && link.kind == Some(InfoKind::Bridge) {
            Ok(link)
        } else {
            Err(link.name_taken("on this host"))
        }
    }

    /// Sets the options of a port that differ.
    pub(crate) async fn set_port(
        &self,
        link: &Link,
        wanted: Vec<InfoBridgePort>,
    ) -> Result<(), KernelError> {
        let differing =
            wanted.into_iter().filter(|option| !link.port.contains(option)).collect::<Vec<_>>();
        if differing.is_empty() {
            return Ok(());
        }
        self.socket().set_port_options(link, differing).await
    }

    /// The bridge or the datapath's device by name, if it is there and ours.
    pub(crate) async fn own_switch(&self, name: &str) -> Result<Link, KernelError> {
        let link = self.socket().need_link(name).await?;
        if link.is_own() && is_datapath(&link) { Ok(link) } else { self.own_bridge(name).await }
    }

    /// Makes `link` a port of `bridge`, unless another bridge has it.
    pub(crate) async fn join(&self, link: &Link, bridge: &Link) -> Result<(), KernelError> {
        let socket = self.socket();
        match link.master {
            Some(index) if index == bridge.index => Ok(()),
            Some(index) => {
                let other = socket.link_by_index(index).await?;
                let other = other.map_or_else(|| format!("number {index}"), |other| other.name);
                Err(KernelError::PortTaken { port: link.name.clone(), bridge: other })
            }
            None => {
                let joined = Change::of(link)
                    .when(true, LinkAttribute::Controller(bridge.index))
                    .send(socket, &link.name)
                    .await;
                match joined {
                    Err(KernelError::Refused { source, .. })
                        if source.raw_os_error() == Some(Errno::XFULL.raw_os_error()) =>
                    {
                        Err(KernelError::BridgeFull {
                            bridge: bridge.name.clone(),
                            ports: BRIDGE_PORTS_MAX,
                        })
                    }
                    other => other,
                }
            }
        }
    }
}

/// Takes ports out of the default VLAN, in which each forwarding entry would appear twice.
const NO_VLAN: InfoBridge = InfoBridge::VlanDefaultPvid(0);

fn bridge_options() -> [InfoBridge; 2] {
    [InfoBridge::StpState(BridgeStpState::Disabled), InfoBridge::ForwardDelay(0)]
}

fn new_bridge(spec: &BridgeSpec) -> LinkMessage {
    let other_mtu =
        if spec.mtu > MTU_MIN { spec.mtu - MTU_PIN_STEP } else { spec.mtu + MTU_PIN_STEP };
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(spec.name.clone()),
        LinkAttribute::Address(spec.mac.to_vec()),
        LinkAttribute::Mtu(other_mtu),
        LinkAttribute::Group(DEVICE_GROUP),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Bridge),
            LinkInfo::Data(InfoData::Bridge([&bridge_options()[..], &[NO_VLAN]].concat())),
        ]),
    ];
    message
}

fn is_link_local(address: &IpNet) -> bool {
    match address {
        IpNet::V4(_) => false,
        IpNet::V6(net) => net.addr().is_unicast_link_local(),
    }
}
