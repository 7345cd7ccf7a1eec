//! The switch under both engines: a Linux bridge with VXLAN devices, or an Open vSwitch datapath.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use netlink_packet_route::link::InfoVxlan;
use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::announcement::Announcement;
use weft_packet::vxlan;
use weft_path::{Endpoint, Mac};

use super::KernelEngineConfig;
use super::filters::Limiter;
use super::probes::{self, Received};
use crate::error::KernelError;
use crate::net::ipv6;
use crate::net::link::Link;
use crate::switch::announcements::{Announcements, TooMany};
use crate::switch::odp::{self, OdpEdit, OdpEvent, OdpInbox, OdpSpec, OdpSwitch};
use crate::{
    firewall::{forward::ForwardRule, guard::Guard, mss::MssClamp, senders::Senders},
    handle::Kernel,
    net::{
        bridge::{BridgeSpec, PortSpec},
        vxlan::{OuterFamily, VXLAN, VXLAN6, VxlanSpec},
    },
    switch::{
        groups::GroupLimit,
        overlay::{Overlay, OverlaySpec, Via},
    },
};

/// The devices that take the probes of active paths.
const PROBE: &str = "weft-probe";
const PROBE6: &str = "weft-probe6";
/// A probe may be as long as any path carries.
const PROBE_MTU_BYTES: u32 = 65_000;
/// How long packets are still cut outside after the last path that was too narrow.
const CUT_HOLD: Duration = Duration::from_secs(60);

/// The kernel switch that forwards frames between local ports and paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwitchKind {
    /// A Linux bridge.
    #[default]
    Bridge,
    /// The datapath of the kernel's openvswitch module.
    Odp,
}

impl SwitchKind {
    /// The value in the CLI and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::Odp => "odp",
        }
    }
}

/// The switch in use.
pub(super) enum Switch {
    Bridge(Box<Bridge>),
    Odp(Odp),
}

/// A report from a switch.
pub(super) enum SwitchEvent {
    /// A probe arrived that has no separate device.
    Probe(Received),
    /// A port came or went.
    Changed,
    /// Another host on the network announces an address.
    Announced(Announcement),
    /// The switch cannot continue; this is the reason.
    Failed(String),
}

impl Switch {
    /// Makes the local switch with the vector engine's port on it. If the kernel has no Open vSwitch
    /// datapath, the switch is a bridge, and the text gives the reason.
    pub(super) async fn start(
        kernel: &Kernel,
        config: &KernelEngineConfig,
    ) -> Result<(Self, Option<String>), KernelError> {
        let mut reason = None;
        if config.switch == SwitchKind::Odp {
            match Odp::start(kernel, config).await {
                Ok(odp) => return Ok((Self::Odp(odp), None)),
                Err(error) => {
                    tracing::warn!(%error, "no Open vSwitch datapath; a bridge takes its place");
                    reason = Some(match error {
                        KernelError::OdpMissing => "kernel without Open vSwitch".to_owned(),
                        error => error.to_string(),
                    });
                }
            }
        }
        // A datapath of an earlier run has the bridge's name.
        odp::remove_datapath(kernel, &config.device, VXLAN).await?;
        let mut bridge = Box::new(Bridge::new(kernel.clone(), config));
        bridge.ensure_local().await?;
        bridge.announcements =
            Some(Announcements::start(kernel, &config.device, &config.tap, config.mtu));
        Ok((Self::Bridge(bridge), reason))
    }

    pub(super) const fn kind(&self) -> SwitchKind {
        match self {
            Self::Bridge(_) => SwitchKind::Bridge,
            Self::Odp(_) => SwitchKind::Odp,
        }
    }

    /// Makes the devices that the kernel engine sends by; returns the indices of those that take
    /// probes.
    pub(super) async fn open_overlay(&mut self) -> Result<Vec<u32>, KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.open_overlay().await,
            // The datapath has its tunnel from the start, and takes probes itself.
            Self::Odp(odp) => odp.switch.reconcile().await.map(|()| Vec::new()),
        }
    }

    /// Removes them; false if they stay, since the switch cannot be without them.
    pub(super) async fn close_overlay(&mut self) -> Result<bool, KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.close_overlay().await.map(|()| true),
            Self::Odp(_) => Ok(false),
        }
    }

    /// Removes the overlay and keeps the local switch, which stays while no daemon runs.
    pub(super) async fn stop(&mut self) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.close_overlay().await,
            Self::Odp(odp) => {
                odp.switch.stop().await?;
                odp.kernel.remove_device(VXLAN).await.map(|_| ())
            }
        }
    }

    /// The guard for packets that leave by this switch. A datapath's flows set the priority of its tunnel's
    /// packets.
    pub(super) fn guard(&self, kernel: &Kernel) -> Guard {
        match self {
            Self::Bridge(bridge) => {
                let senders = bridge.senders.clone();
                Guard::with_senders(kernel.clone(), &[VXLAN, VXLAN6], senders)
            }
            Self::Odp(_) => Guard::new(kernel.clone(), &[]),
        }
    }

    /// The limit on group frames to peers of the kernel engine.
    pub(super) fn limiter(&self) -> Result<Limiter, KernelError> {
        let (kernel, ports, datapath) = match self {
            Self::Bridge(bridge) => (&bridge.kernel, &[VXLAN, VXLAN6][..], None),
            Self::Odp(odp) => (&odp.kernel, &[][..], Some(odp.switch.groups())),
        };
        Ok(Limiter { table: GroupLimit::new(kernel.clone(), ports)?, datapath })
    }

    /// Reads how many announcements did not go to other hosts; a datapath sends them as all frames to groups.
    pub(super) fn announcements(&self) -> Option<TooMany> {
        match self {
            Self::Bridge(bridge) => bridge.announcements.as_ref().map(Announcements::too_many),
            Self::Odp(_) => None,
        }
    }

    /// The clamp of segment sizes at the overlay ports.
    pub(super) fn mss_clamp(&self) -> Result<MssClamp, KernelError> {
        match self {
            Self::Bridge(bridge) => MssClamp::at_bridge(bridge.kernel.clone(), &[VXLAN, VXLAN6]),
            Self::Odp(odp) => MssClamp::at_device(odp.kernel.clone(), VXLAN),
        }
    }

    /// Sets whether a path over IPv4 carries less than IPv6's minimum MTU, so that the outer packet must be
    /// fragmented. A datapath cannot do so.
    pub(super) async fn cut_outside(&mut self, cut: bool) -> Result<(), KernelError> {
        let Self::Bridge(bridge) = self else { return Ok(()) };
        let now = Instant::now();
        if cut {
            bridge.narrow_at = Some(now);
        }
        // The change recreates the device, and path MTU discovery makes a path narrow for a moment.
        let is_over = bridge.narrow_at.is_none_or(|at| now - at > CUT_HOLD);
        if cut == bridge.cut || !bridge.open || !(cut || is_over) {
            return Ok(());
        }
        bridge.cut = cut;
        if bridge.kernel.ensure_vxlan(&bridge.vxlan(VXLAN, OuterFamily::V4)).await? {
            bridge.overlay.resync().await?;
        }
        Ok(())
    }

    /// Plugs a container's device in.
    pub(super) async fn add_port(&mut self, name: &str) -> Result<(), KernelError> {
        match self {
            // `Kernel::attach` has put it into the bridge.
            Self::Bridge(_) => Ok(()),
            Self::Odp(odp) => odp.switch.add_port(name).await,
        }
    }

    /// Takes a container's device out.
    pub(super) async fn remove_port(&mut self, name: &str) {
        if let Self::Odp(odp) = self
            && let Err(error) = odp.switch.remove_port(name).await
        {
            tracing::debug!(%error, name, "no port to remove");
        }
    }

    pub(super) async fn set_peers(&mut self, vias: &[(PeerId, Via)]) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.overlay.set_peers(vias).await,
            Self::Odp(odp) => {
                let edit = |(peer, via): &(PeerId, Via)| OdpEdit::Peer(*peer, odp.via(*via));
                odp.apply(vias.iter().map(edit).collect()).await
            }
        }
    }

    /// Peers whose tunnel packets may come from these addresses.
    pub(super) async fn accept_from(
        &mut self,
        sources: Vec<(PeerId, Vec<IpAddr>)>,
    ) -> Result<(), KernelError> {
        match self {
            // The guard checks that: see `Self::number_sender`.
            Self::Bridge(_) => Ok(()),
            Self::Odp(odp) => {
                let edit = |(peer, addresses)| OdpEdit::Sources(peer, addresses);
                odp.apply(sources.into_iter().map(edit).collect()).await
            }
        }
    }

    /// Attributes packets that carry this number, or come from these addresses, to the peer. For the guard of
    /// a bridge.
    pub(super) async fn number_sender(
        &self,
        peer: PeerId,
        number: u32,
        addresses: Vec<IpAddr>,
    ) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.senders.set_peer(peer, number, addresses).await,
            Self::Odp(_) => Ok(()),
        }
    }

    /// Nothing comes from this peer any more.
    pub(super) async fn refuse_from(&self, peer: PeerId) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.senders.remove_peer(peer).await,
            Self::Odp(_) => Ok(()),
        }
    }

    /// Sets which peer's frames may come from which address. Call it before frames go there: answers may come
    /// at once.
    pub(super) async fn set_senders(
        &self,
        add: &[(Endpoint, PeerId)],
        remove: &[Mac],
    ) -> Result<(), KernelError> {
        let Self::Bridge(bridge) = self else { return Ok(()) };
        let add: Vec<_> = add.iter().map(|(endpoint, peer)| (endpoint.mac.0, *peer)).collect();
        let remove: Vec<_> = remove.iter().map(|mac| mac.0).collect();
        bridge.senders.set_macs(&add, &remove).await
    }

    pub(super) async fn set_endpoints(
        &mut self,
        add: &[(Endpoint, PeerId)],
        remove: &[Mac],
    ) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => {
                let entry = |(endpoint, peer): &(Endpoint, PeerId)| {
                    (endpoint.mac.0, endpoint.addresses.clone(), *peer)
                };
                let add: Vec<_> = add.iter().map(entry).collect();
                let remove: Vec<_> = remove.iter().map(|mac| mac.0).collect();
                bridge.overlay.set_endpoints(&add, &remove).await
            }
            Self::Odp(odp) => {
                let add = add.iter().map(|(endpoint, peer)| OdpEdit::Endpoint(endpoint.mac, *peer));
                let remove = remove.iter().map(|mac| OdpEdit::RemoveEndpoint(*mac));
                odp.apply(remove.chain(add).collect()).await
            }
        }
    }

    /// Handles an announcement of an address by a host on the network: the bridge stops answering for it with
    /// another MAC.
    pub(super) async fn handle_announcement(
        &mut self,
        heard: &Announcement,
    ) -> Result<(), KernelError> {
        // A datapath does not answer ARP or neighbour discovery.
        let Self::Bridge(bridge) = self else { return Ok(()) };
        let changed = bridge.overlay.handle_announcement(heard.address, heard.mac).await?;
        bridge.moved += u64::from(changed);
        Ok(())
    }

    /// Repairs changes that other programs made.
    pub(super) async fn resync(&mut self) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.overlay.resync().await.map(|_| ()),
            Self::Odp(odp) => odp.switch.reconcile().await,
        }
    }

    /// The switch itself, with the vector engine's port on it.
    pub(super) async fn ensure_local(&self) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.ensure_local().await,
            Self::Odp(odp) => odp.kernel.ensure_device(&odp.tap).await,
        }
    }

    /// Whether the switch is broken without this device.
    pub(super) fn needs(&self, device: &str) -> bool {
        match self {
            Self::Bridge(bridge) => {
                device == bridge.config.device
                    || (bridge.open && [VXLAN, VXLAN6, PROBE, PROBE6].contains(&device))
            }
            // It watches its ports itself.
            Self::Odp(_) => false,
        }
    }

    /// Whether this is one of the switch's devices, which should keep their settings.
    pub(super) fn has(&self, device: &str) -> bool {
        match self {
            Self::Bridge(bridge) => device == bridge.config.tap || self.needs(device),
            Self::Odp(odp) => device == odp.tap.bridge || device == odp.tap.name || device == VXLAN,
        }
    }

    /// Waits for the next report of the switch. Cancel safe.
    pub(super) async fn next(&mut self) -> SwitchEvent {
        match self {
            Self::Bridge(bridge) => match &mut bridge.announcements {
                Some(announcements) => SwitchEvent::Announced(announcements.next().await),
                None => std::future::pending().await,
            },
            Self::Odp(odp) => odp.next().await,
        }
    }

    pub(super) async fn counters(&self) -> Vec<(&'static str, u64)> {
        match self {
            Self::Bridge(bridge) => bridge.counters(),
            Self::Odp(odp) => odp.counters().await,
        }
    }
}

/// Removes the switch of either kind, with all devices of ours.
pub(super) async fn remove(kernel: &Kernel, device: &str) -> Result<(), KernelError> {
    for overlay in [VXLAN, VXLAN6, PROBE, PROBE6] {
        kernel.remove_device(overlay).await?;
    }
    odp::remove_datapath(kernel, device, VXLAN).await?;
    for result in [
        ForwardRule::new(kernel.clone(), device)?.remove().await,
        MssClamp::at_bridge(kernel.clone(), &[VXLAN, VXLAN6])?.remove().await,
        MssClamp::at_device(kernel.clone(), VXLAN)?.remove().await,
    ] {
        match result {
            // Without the program there never was a rule.
            Err(KernelError::NftMissing { .. }) => {}
            result => _ = result?,
        }
    }
    kernel.remove_all(device).await.map(|_| ())
}

/// The datapath of the openvswitch module.
pub(super) struct Odp {
    kernel: Kernel,
    tap: PortSpec,
    switch: OdpSwitch,
    inbox: OdpInbox,
    host: Option<IpAddr>,
}

impl Odp {
    async fn start(kernel: &Kernel, config: &KernelEngineConfig) -> Result<Self, KernelError> {
        let spec = OdpSpec {
            name: config.device.clone(),
            mac: config.mac,
            mtu: u32::from(config.mtu),
            tap: config.tap.clone(),
            tunnel: VXLAN.into(),
            tunnel_port: vxlan::PORT,
            vni: config.vni.0,
            sweep_interval: Duration::from_secs(odp::SWEEP_INTERVAL_S),
        };
        // The bridge's own devices may be left from a run with the other switch.
        for device in [VXLAN6, PROBE, PROBE6] {
            kernel.remove_device(device).await?;
        }
        let tap = tap(config);
        kernel.ensure_device(&tap).await?;
        let (switch, inbox) = OdpSwitch::start(kernel, spec).await?;
        Ok(Self { kernel: kernel.clone(), tap, switch, inbox, host: config.host })
    }

    const fn via(&self, via: Via) -> odp::Via {
        match via {
            Via::None => odp::Via::None,
            Via::Tap => odp::Via::Tap,
            Via::Vxlan { remote } => {
                let local = match self.host {
                    Some(host) if host.is_ipv4() == remote.is_ipv4() => Some(host),
                    _ => None,
                };
                odp::Via::Tunnel { remote, local }
            }
        }
    }

    async fn apply(&self, edits: Vec<OdpEdit>) -> Result<(), KernelError> {
        if edits.is_empty() { Ok(()) } else { self.switch.apply(edits).await }
    }

    async fn next(&mut self) -> SwitchEvent {
        loop {
            tokio::select! {
                Some(probe) = self.inbox.probes.recv() => {
                    if let Some(received) = probes::parse(&probe.frame, false) {
                        return SwitchEvent::Probe(received);
                    }
                }
                Some(event) = self.inbox.events.recv() => match event {
                    OdpEvent::Failed { reason } => return SwitchEvent::Failed(reason),
                    event => {
                        tracing::info!(?event, "switch");
                        return SwitchEvent::Changed;
                    }
                },
                else => std::future::pending().await,
            }
        }
    }

    async fn counters(&self) -> Vec<(&'static str, u64)> {
        let Ok(counters) = self.switch.counters().await else { return Vec::new() };
        vec![
            ("odp_upcalls", counters.upcalls),
            ("odp_upcalls_lost", counters.upcalls_lost + counters.upcall_overruns),
            ("odp_hits", counters.hits),
            ("odp_misses", counters.misses),
            ("odp_flows", counters.flows),
            ("odp_flows_refused", counters.flows_refused),
            ("odp_flow_errors", counters.flow_errors),
            ("odp_floods", counters.floods),
            ("odp_limited", counters.limited),
            ("odp_macs_learned", counters.macs_learned),
            ("odp_drops", counters.drops.values().sum()),
        ]
    }
}

/// The vector engine's device as a port.
fn tap(config: &KernelEngineConfig) -> PortSpec {
    PortSpec {
        name: config.tap.clone(),
        bridge: config.device.clone(),
        isolated: true,
        learning: false,
        neigh_suppress: true,
        flood: true,
        mtu: u32::from(config.mtu),
        gso_max_size: None,
        gso_max_segs: None,
    }
}

/// A Linux bridge, its overlay ports and the endpoints behind them.
pub(super) struct Bridge {
    kernel: Kernel,
    config: KernelEngineConfig,
    overlay: Overlay<PeerId>,
    /// The addresses that each peer may send from by the VXLAN devices.
    senders: Senders,
    /// Whether the VXLAN devices should exist.
    open: bool,
    /// Whether the outer packet is fragmented where a path is narrower than IPv6's minimum MTU.
    cut: bool,
    /// When a path last required that.
    narrow_at: Option<Instant>,
    /// Carries announcements of addresses to other hosts, once the bridge exists.
    announcements: Option<Announcements>,
    /// How many times an announcement changed the addresses that the bridge answers for.
    moved: u64,
}

impl Bridge {
    fn new(kernel: Kernel, config: &KernelEngineConfig) -> Self {
        let spec = OverlaySpec {
            bridge: config.device.clone(),
            tap: config.tap.clone(),
            vxlan: VXLAN.into(),
            vxlan6: VXLAN6.into(),
        };
        let overlay = Overlay::new(kernel.clone(), spec);
        let (config, senders) = (config.clone(), Senders::new(kernel.clone()));
        Self {
            kernel,
            config,
            overlay,
            senders,
            open: false,
            cut: false,
            narrow_at: None,
            announcements: None,
            moved: 0,
        }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let announcements = self.announcements.as_ref().map(Announcements::counters);
        let moved = ("addresses_moved", self.moved);
        announcements.into_iter().flatten().chain([moved]).collect()
    }

    /// The bridge, and the vector engine's TAP device as a port of it. Frames from that port never return to
    /// the overlay.
    async fn ensure_local(&self) -> Result<(), KernelError> {
        let config = &self.config;
        let mtu = u32::from(config.mtu);
        let bridge = BridgeSpec { name: config.device.clone(), mac: config.mac, mtu };
        self.kernel.ensure_bridge(&bridge).await?;
        self.kernel.ensure_port(&tap(config)).await
    }

    async fn open_overlay(&mut self) -> Result<Vec<u32>, KernelError> {
        self.open = true;
        self.remove_renamed().await?;
        let mut probes = Vec::new();
        let mut made = false;
        let devices = [(VXLAN, PROBE, OuterFamily::V4), (VXLAN6, PROBE6, OuterFamily::V6)];
        // Each look would make and lose them, which would look like other programs' doing.
        let can = |family| family == OuterFamily::V4 || ipv6::is_there();
        for (data, probe, family) in devices.into_iter().filter(|(_, _, it)| can(*it)) {
            let spec = self.vxlan(data, family);
            match self.kernel.ensure_vxlan(&spec).await {
                Ok(new) => made |= new,
                // A host without IPv6 has no peers over IPv6.
                Err(error) if family == OuterFamily::V6 => {
                    tracing::debug!(%error, "no VXLAN over IPv6");
                    continue;
                }
                Err(error) => return Err(error),
            }
            let spec = VxlanSpec {
                name: probe.into(),
                vni: vxlan::VNI_MAX,
                mtu: PROBE_MTU_BYTES,
                bridge: None,
                cut: false,
                ..spec
            };
            self.kernel.ensure_vxlan(&spec).await?;
            probes.push(self.kernel.socket().need_link(probe).await?.index);
        }
        if made {
            self.overlay.resync().await?;
        }
        Ok(probes)
    }

    /// Removes devices of ours that were renamed: they hold resources that the devices with the right names
    /// need.
    async fn remove_renamed(&self) -> Result<(), KernelError> {
        let socket = self.kernel.socket();
        let is_renamed = |link: &&Link| {
            let known = [VXLAN, VXLAN6, PROBE, PROBE6].contains(&link.name.as_str());
            link.is_own() && !known && link.vxlan.contains(&InfoVxlan::Port(vxlan::PORT))
        };
        for link in socket.links().await?.iter().filter(is_renamed) {
            tracing::warn!(name = link.name, "a device of ours has another name; creating it anew");
            socket.delete_link(link).await?;
        }
        Ok(())
    }

    async fn close_overlay(&mut self) -> Result<(), KernelError> {
        self.open = false;
        for device in [VXLAN, VXLAN6, PROBE, PROBE6] {
            self.kernel.remove_device(device).await?;
        }
        Ok(())
    }

    fn vxlan(&self, name: &str, family: OuterFamily) -> VxlanSpec {
        VxlanSpec {
            name: name.into(),
            vni: self.config.vni.0,
            port: vxlan::PORT,
            family,
            mac: None,
            mtu: u32::from(self.config.mtu),
            bridge: Some(self.config.device.clone()),
            copy_dscp: self.config.copy_dscp,
            cut: self.cut && name == VXLAN,
        }
    }
}
