//! A Linux bridge for each network, its overlay ports and the endpoints behind them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use netlink_packet_route::link::InfoVxlan;
use weft_crypto::PeerId;
use weft_packet::announcement::Announcement;
use weft_packet::vxlan;
use weft_path::{Endpoint, Mac, Vni};

use super::{KernelEngineConfig, NetworkSpec};
use crate::error::KernelError;
use crate::firewall::senders::Senders;
use crate::handle::Kernel;
use crate::net::bridge::{BridgeSpec, PortSpec};
use crate::net::devices::NetworkDevices;
use crate::net::ipv6;
use crate::net::link::Link;
use crate::net::vxlan::{OuterFamily, VxlanSpec};
use crate::switch::announcements::{Announcements, TooMany};
use crate::switch::overlay::{Listing, Overlay, OverlaySpec, Via};

/// The devices that take the probes of active paths.
const PROBES: [(&str, OuterFamily); 2] =
    [("weft-probe", OuterFamily::V4), ("weft-probe6", OuterFamily::V6)];
/// A probe may be as long as any path carries.
const PROBE_MTU_BYTES: u32 = 65_000;
/// How long packets are still cut outside after the last path that was too narrow.
const CUT_HOLD: Duration = Duration::from_secs(60);
/// Networks that the kernel engine carries, `weft` among them.
pub(super) const NETWORKS_MAX: usize = 256;

/// The bridges of all networks.
pub(super) struct Bridge {
    kernel: Kernel,
    config: KernelEngineConfig,
    /// `weft` is always there.
    networks: BTreeMap<Vni, Network>,
    /// The addresses that each peer may send from by the VXLAN devices.
    senders: Senders,
    /// Whether the VXLAN devices should exist.
    open: bool,
    /// Whether the outer packet is fragmented where a path is narrower than IPv6's minimum MTU.
    cut: bool,
    /// When a path last required that.
    narrow_at: Option<Instant>,
    /// Carries announcements of addresses to other hosts, once the bridges exist.
    announcements: Announcements,
    /// How many times an announcement changed the addresses that a bridge answers for.
    moved: u64,
}

/// The bridge of one network.
struct Network {
    devices: NetworkDevices,
    mac: [u8; 6],
    mtu: u16,
    overlay: Overlay<PeerId>,
}

impl Bridge {
    pub(super) async fn start(
        kernel: &Kernel,
        config: &KernelEngineConfig,
    ) -> Result<Self, KernelError> {
        let devices = NetworkDevices::of_weft(&config.device, &config.tap);
        let overlay = Overlay::new(kernel.clone(), overlay_spec(&devices));
        let weft = Network { devices, mac: config.mac, mtu: config.mtu, overlay };
        let mut bridge = Self {
            kernel: kernel.clone(),
            config: config.clone(),
            networks: [(config.vni, weft)].into(),
            senders: Senders::new(kernel.clone()),
            open: false,
            cut: false,
            narrow_at: None,
            announcements: Announcements::new(),
            moved: 0,
        };
        bridge.ensure_local().await?;
        bridge.announce_from(config.vni);
        Ok(bridge)
    }

    pub(super) const fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    pub(super) fn senders(&self) -> Senders {
        self.senders.clone()
    }

    pub(super) fn too_many(&self) -> TooMany {
        self.announcements.too_many()
    }

    pub(super) fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut counters = self.announcements.counters();
        counters.push(("addresses_moved", self.moved));
        counters
    }

    /// Carries one more network, whose TAP device exists, or restores its devices.
    pub(super) async fn add_network(&mut self, wanted: NetworkSpec) -> Result<(), KernelError> {
        let NetworkSpec { vni, mtu, .. } = wanted;
        let is_new = !self.networks.contains_key(&vni);
        if is_new && self.networks.len() >= NETWORKS_MAX {
            return Err(KernelError::TableFull { table: "networks".into(), limit: NETWORKS_MAX });
        }
        let network = self.new_network(vni, mtu);
        self.networks.entry(vni).or_insert(network).mtu = mtu;
        let result = self.ensure_network(vni, is_new).await;
        if result.is_ok() {
            self.announce_from(vni);
        } else if is_new {
            self.remove_network(vni).await;
        }
        result
    }

    /// Removes a network's bridge with all devices of ours in it.
    pub(super) async fn remove_network(&mut self, vni: Vni) {
        if vni == self.config.vni {
            return;
        }
        self.announcements.remove(vni);
        if let Err(error) = self.senders.remove_network(vni).await {
            tracing::debug!(%error, "the next look at the guard removes a network's senders");
        }
        // A bridge of an earlier run is not known.
        let network = self.networks.remove(&vni);
        let devices = network.map_or_else(|| NetworkDevices::of(vni), |network| network.devices);
        for device in &devices.overlay {
            if let Err(error) = self.kernel.remove_device(device).await {
                tracing::warn!(%error, device, "cannot remove a network's device");
            }
        }
        if let Err(error) = self.kernel.remove_bridge(&devices.bridge).await {
            tracing::warn!(%error, bridge = devices.bridge, "cannot remove a network's bridge");
        }
    }

    /// The bridges, and the vector engine's TAP devices as their ports. Frames from such a port never return to
    /// the overlay.
    pub(super) async fn ensure_local(&self) -> Result<(), KernelError> {
        let mut result = Ok(());
        for network in self.networks.values() {
            result = result.and(self.ensure_bridge(network).await);
        }
        result
    }

    /// Makes the VXLAN devices. Returns the indices of those that take probes.
    pub(super) async fn open_overlay(&mut self) -> Result<Vec<u32>, KernelError> {
        self.open = true;
        self.remove_renamed().await?;
        let mut made = Vec::new();
        for (vni, network) in &self.networks {
            if self.ensure_overlay(*vni, network).await? {
                made.push(*vni);
            }
        }
        let mut probes = Vec::new();
        for (name, family) in PROBES.into_iter().filter(|(_, family)| is_there(*family)) {
            match self.kernel.ensure_vxlan(&self.probe_device(name, family)).await {
                Ok(_) => probes.push(self.kernel.socket().need_link(name).await?.index),
                // A host without IPv6 has no peers over IPv6.
                Err(error) if family == OuterFamily::V6 => {
                    tracing::debug!(%error, "no VXLAN over IPv6");
                }
                Err(error) => return Err(error),
            }
        }
        for vni in made {
            if let Some(network) = self.networks.get_mut(&vni) {
                network.overlay.resync().await?;
            }
        }
        Ok(probes)
    }

    pub(super) async fn close_overlay(&mut self) -> Result<(), KernelError> {
        self.open = false;
        let overlay = self.networks.values().flat_map(|network| &network.devices.overlay);
        let probes = PROBES.iter().map(|(name, _)| *name);
        for device in overlay.map(String::as_str).chain(probes) {
            self.kernel.remove_device(device).await?;
        }
        Ok(())
    }

    /// See [`super::switch::Switch::cut_outside`].
    pub(super) async fn cut_outside(&mut self, cut: bool) -> Result<(), KernelError> {
        let now = Instant::now();
        if cut {
            self.narrow_at = Some(now);
        }
        // The change recreates the devices, and path MTU discovery makes a path narrow for a moment.
        let is_over = self.narrow_at.is_none_or(|at| now - at > CUT_HOLD);
        if cut == self.cut || !self.open || !(cut || is_over) {
            return Ok(());
        }
        self.cut = cut;
        let mut result = Ok(());
        let vnis: Vec<Vni> = self.networks.keys().copied().collect();
        for vni in vnis {
            let Some(network) = self.networks.get(&vni) else { continue };
            let spec = self.overlay_device(vni, network, OuterFamily::V4);
            let made = self.kernel.ensure_vxlan(&spec).await;
            if let (Ok(true), Some(network)) = (&made, self.networks.get_mut(&vni)) {
                result = result.and(network.overlay.resync().await.map(|_| ()));
            }
            result = result.and(made.map(|_| ()));
        }
        result
    }

    pub(super) async fn set_peers(&mut self, vias: &[(PeerId, Via)]) -> Result<(), KernelError> {
        let mut result = Ok(());
        for network in self.networks.values_mut() {
            result = result.and(network.overlay.set_peers(vias).await);
        }
        result
    }

    pub(super) async fn set_senders(
        &self,
        vni: Vni,
        add: &[(Endpoint, PeerId)],
        remove: &[Mac],
    ) -> Result<(), KernelError> {
        if !self.networks.contains_key(&vni) {
            return Err(KernelError::NoNetwork { vni: vni.0 });
        }
        let add: Vec<_> = add.iter().map(|(endpoint, peer)| (endpoint.mac.0, *peer)).collect();
        let remove: Vec<_> = remove.iter().map(|mac| mac.0).collect();
        self.senders.set_macs(vni, &add, &remove).await
    }

    pub(super) async fn set_endpoints(
        &mut self,
        vni: Vni,
        add: &[(Endpoint, PeerId)],
        remove: &[Mac],
    ) -> Result<(), KernelError> {
        let entry = |(endpoint, peer): &(Endpoint, PeerId)| {
            (endpoint.mac.0, endpoint.addresses.clone(), *peer)
        };
        let add: Vec<_> = add.iter().map(entry).collect();
        let remove: Vec<_> = remove.iter().map(|mac| mac.0).collect();
        self.network(vni)?.overlay.set_endpoints(&add, &remove).await
    }

    pub(super) async fn set_broadcast(
        &mut self,
        vni: Vni,
        peers: &[PeerId],
    ) -> Result<(), KernelError> {
        self.network(vni)?.overlay.set_broadcast(peers).await
    }

    pub(super) async fn handle_announcement(
        &mut self,
        vni: Vni,
        heard: &Announcement,
    ) -> Result<(), KernelError> {
        let Some(network) = self.networks.get_mut(&vni) else { return Ok(()) };
        let changed = network.overlay.handle_announcement(heard.address, heard.mac).await?;
        self.moved += u64::from(changed);
        Ok(())
    }

    pub(super) async fn resync(&mut self) -> Result<(), KernelError> {
        // Each network would list the devices and entries of all.
        let listing = Listing::read(&self.kernel).await?;
        let mut result = Ok(());
        for network in self.networks.values_mut() {
            result = result.and(network.overlay.resync_with(&listing).await.map(|_| ()));
        }
        result
    }

    /// Whether a network is broken without this device.
    pub(super) fn needs(&self, device: &str) -> bool {
        let is_probe = || PROBES.iter().any(|(name, _)| *name == device);
        let mut networks = self.networks.values().map(|network| &network.devices);
        networks.any(|it| {
            it.bridge == device || (self.open && it.overlay.iter().any(|name| name == device))
        }) || (self.open && is_probe())
    }

    /// Whether this is the vector engine's port of a network.
    pub(super) fn has_tap(&self, device: &str) -> bool {
        self.networks.values().any(|network| network.devices.tap == device)
    }

    /// Waits for the next announcement of another host. Cancel safe.
    pub(super) async fn next(&mut self) -> (Vni, Announcement) {
        self.announcements.next().await
    }
}

impl Bridge {
    fn network(&mut self, vni: Vni) -> Result<&mut Network, KernelError> {
        self.networks.get_mut(&vni).ok_or(KernelError::NoNetwork { vni: vni.0 })
    }

    /// A network without endpoints, whose group frames go to no peer yet.
    fn new_network(&self, vni: Vni, mtu: u16) -> Network {
        let devices = NetworkDevices::of(vni);
        let overlay = Overlay::without_broadcast(self.kernel.clone(), overlay_spec(&devices));
        Network { devices, mac: mac_on(self.config.mac, vni), mtu, overlay }
    }

    async fn ensure_network(&mut self, vni: Vni, is_new: bool) -> Result<(), KernelError> {
        let Some(network) = self.networks.get(&vni) else { return Ok(()) };
        self.ensure_bridge(network).await?;
        if self.open {
            self.ensure_overlay(vni, network).await?;
        }
        let weft = self.networks.get(&self.config.vni);
        let vias = weft.map(|weft| weft.overlay.vias()).unwrap_or_default();
        let overlay = &mut self.network(vni)?.overlay;
        if is_new {
            overlay.set_peers(&vias).await?;
        }
        // The devices may be those of an earlier run.
        overlay.resync().await.map(|_| ())
    }

    async fn ensure_bridge(&self, network: &Network) -> Result<(), KernelError> {
        let Network { devices, mac, mtu, .. } = network;
        let bridge = BridgeSpec { name: devices.bridge.clone(), mac: *mac, mtu: u32::from(*mtu) };
        self.kernel.ensure_bridge(&bridge).await?;
        self.kernel.ensure_port(&tap_port(devices, *mtu)).await
    }

    /// Makes the VXLAN devices of a network; true if one is new.
    async fn ensure_overlay(&self, vni: Vni, network: &Network) -> Result<bool, KernelError> {
        let mut made = false;
        for family in [OuterFamily::V4, OuterFamily::V6].into_iter().filter(|it| is_there(*it)) {
            match self.kernel.ensure_vxlan(&self.overlay_device(vni, network, family)).await {
                Ok(new) => made |= new,
                // A host without IPv6 has no peers over IPv6.
                Err(error) if family == OuterFamily::V6 => {
                    tracing::debug!(%error, "no VXLAN over IPv6");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(made)
    }

    fn announce_from(&mut self, vni: Vni) {
        if let Some(Network { devices, mtu, .. }) = self.networks.get(&vni) {
            self.announcements.add(&self.kernel, vni, devices, *mtu);
        }
    }

    /// Removes devices of ours that were renamed, or are of a network that is carried no longer: they hold resources
    /// that the devices with the right names need.
    async fn remove_renamed(&self) -> Result<(), KernelError> {
        let socket = self.kernel.socket();
        let mut known: Vec<&str> = PROBES.iter().map(|(name, _)| *name).collect();
        let overlay = self.networks.values().flat_map(|network| &network.devices.overlay);
        known.extend(overlay.map(String::as_str));
        let is_renamed = |link: &&Link| {
            let is_known = known.contains(&link.name.as_str());
            link.is_own() && !is_known && link.vxlan.contains(&InfoVxlan::Port(vxlan::PORT))
        };
        for link in socket.links().await?.iter().filter(is_renamed) {
            tracing::warn!(name = link.name, "a device of ours has another name; creating it anew");
            socket.delete_link(link).await?;
        }
        Ok(())
    }

    fn overlay_device(&self, vni: Vni, network: &Network, family: OuterFamily) -> VxlanSpec {
        let [v4, v6] = &network.devices.overlay;
        let name = if family == OuterFamily::V4 { v4 } else { v6 };
        VxlanSpec {
            name: name.clone(),
            vni: vni.0,
            port: vxlan::PORT,
            family,
            mac: None,
            mtu: u32::from(network.mtu),
            bridge: Some(network.devices.bridge.clone()),
            copy_dscp: self.config.copy_dscp,
            cut: self.cut && family == OuterFamily::V4,
        }
    }

    fn probe_device(&self, name: &str, family: OuterFamily) -> VxlanSpec {
        VxlanSpec {
            name: name.to_owned(),
            vni: vxlan::VNI_MAX,
            port: vxlan::PORT,
            family,
            mac: None,
            mtu: PROBE_MTU_BYTES,
            bridge: None,
            copy_dscp: self.config.copy_dscp,
            cut: false,
        }
    }
}

/// The names of the devices that take probes.
pub(super) fn probe_devices() -> [&'static str; 2] {
    PROBES.map(|(name, _)| name)
}

/// The vector engine's device as a port of its network's switch.
pub(super) fn tap_port(devices: &NetworkDevices, mtu: u16) -> PortSpec {
    PortSpec {
        name: devices.tap.clone(),
        bridge: devices.bridge.clone(),
        isolated: true,
        learning: false,
        neigh_suppress: true,
        flood: true,
        mtu: u32::from(mtu),
        gso_max_size: None,
        gso_max_segs: None,
    }
}

fn overlay_spec(devices: &NetworkDevices) -> OverlaySpec {
    let [vxlan, vxlan6] = devices.overlay.clone();
    OverlaySpec { bridge: devices.bridge.clone(), tap: devices.tap.clone(), vxlan, vxlan6 }
}

/// The address of a network's bridge: that of network `weft` with the VNI in it, and another first byte. So no two
/// bridges of this host have the same.
fn mac_on(weft: [u8; 6], vni: Vni) -> [u8; 6] {
    let ([_, a, b, c, d, e], [_, x, y, z]) = (weft, vni.0.to_be_bytes());
    // Locally administered, unicast (IEEE 802).
    [0x06, a, b, c ^ x, d ^ y, e ^ z]
}

/// Each look would make and lose devices for a missing family, which would look like other programs' doing.
fn is_there(family: OuterFamily) -> bool {
    family == OuterFamily::V4 || ipv6::is_there()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bridges_of_one_host_and_of_one_network_differ() {
        let hosts = [[2, 1, 2, 3, 4, 5], [2, 1, 2, 3, 4, 6]];
        let mut all = Vec::from(hosts);
        for host in hosts {
            all.extend([Vni(2), Vni(0x0a_1b2c), Vni(0xff_fffe)].map(|vni| mac_on(host, vni)));
        }
        assert!(all.iter().all(|mac| mac[0] & 3 == 2), "{all:?}");
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
