//! The switch under both engines: a Linux bridge with VXLAN devices, or an Open vSwitch datapath.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::announcement::Announcement;
use weft_packet::vxlan;
use weft_path::{Endpoint, Mac, Vni};

use super::bridge::{Bridge, probe_devices, tap_port};
use super::filters::Limiter;
use super::probes::{self, Received};
use super::{KernelEngineConfig, NetworkSpec};
use crate::error::KernelError;
use crate::switch::announcements::TooMany;
use crate::switch::odp::{self, OdpDrop, OdpEdit, OdpEvent, OdpInbox, OdpSpec, OdpSwitch};
use crate::{
    firewall::{forward::ForwardRule, guard::Guard, mss::MssClamp, port_locks::LockCounts},
    handle::Kernel,
    net::{
        bridge::PortSpec,
        devices::{NetworkDevices, OVERLAY_PORTS},
        vxlan::{VXLAN, VXLAN6},
    },
    switch::{groups::GroupLimit, overlay::Via, port_lock::PortLock},
};

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
    /// Another host on a network announces an address.
    Announced(Vni, Announcement),
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
        let bridge = Bridge::start(kernel, config).await?;
        Ok((Self::Bridge(Box::new(bridge)), reason))
    }

    pub(super) const fn kind(&self) -> SwitchKind {
        match self {
            Self::Bridge(_) => SwitchKind::Bridge,
            Self::Odp(_) => SwitchKind::Odp,
        }
    }

    /// Carries one more network, whose TAP device exists, or restores its devices.
    pub(super) async fn add_network(&mut self, network: NetworkSpec) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.add_network(network).await,
            Self::Odp(odp) => odp.add_network(network).await,
        }
    }

    /// Carries a network no longer. Its devices go, also those that an earlier run has left.
    pub(super) async fn remove_network(&mut self, vni: Vni) {
        match self {
            Self::Bridge(bridge) => bridge.remove_network(vni).await,
            Self::Odp(odp) => odp.remove_network(vni).await,
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
                Guard::with_senders(kernel.clone(), &[OVERLAY_PORTS], bridge.senders())
            }
            Self::Odp(_) => Guard::new(kernel.clone(), &[]),
        }
    }

    /// The limit on group frames to peers of the kernel engine.
    pub(super) fn limiter(&self) -> Result<Limiter, KernelError> {
        let (kernel, ports, datapath) = match self {
            Self::Bridge(bridge) => (bridge.kernel(), &[OVERLAY_PORTS][..], None),
            Self::Odp(odp) => (&odp.kernel, &[][..], Some(odp.switch.groups())),
        };
        Ok(Limiter { table: GroupLimit::new(kernel.clone(), ports)?, datapath })
    }

    /// Reads how many announcements did not go to other hosts; a datapath sends them as all frames to groups.
    pub(super) fn announcements(&self) -> Option<TooMany> {
        match self {
            Self::Bridge(bridge) => Some(bridge.too_many()),
            Self::Odp(_) => None,
        }
    }

    /// The clamp of segment sizes at the overlay ports.
    pub(super) fn mss_clamp(&self) -> Result<MssClamp, KernelError> {
        match self {
            Self::Bridge(bridge) => MssClamp::at_bridge(bridge.kernel().clone(), &[OVERLAY_PORTS]),
            Self::Odp(odp) => MssClamp::at_device(odp.kernel.clone(), VXLAN),
        }
    }

    /// Sets whether a path over IPv4 carries less than IPv6's minimum MTU, so that the outer packet must be
    /// fragmented. A datapath cannot do so.
    pub(super) async fn cut_outside(&mut self, cut: bool) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.cut_outside(cut).await,
            Self::Odp(_) => Ok(()),
        }
    }

    /// Plugs a container's device in.
    pub(super) async fn add_port(&mut self, vni: Vni, name: &str) -> Result<(), KernelError> {
        match self {
            // `Kernel::attach` has put it into the bridge.
            Self::Bridge(_) => Ok(()),
            Self::Odp(odp) => odp.switch.add_port(vni.0, name).await,
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

    /// Sets what a port may send from. On a bridge, [`crate::PortLocks`] do this.
    pub(super) async fn lock_port(
        &mut self,
        name: &str,
        lock: Option<PortLock>,
    ) -> Result<(), KernelError> {
        match self {
            Self::Bridge(_) => Ok(()),
            Self::Odp(odp) => match lock {
                Some(lock) => odp.switch.lock_port(name, lock).await,
                None => odp.switch.unlock_port(name).await,
            },
        }
    }

    /// Frames that locks have dropped.
    pub(super) async fn lock_counts(&self) -> LockCounts {
        match self {
            Self::Bridge(_) => LockCounts::default(),
            Self::Odp(odp) => odp.lock_counts().await,
        }
    }

    pub(super) async fn set_peers(&mut self, vias: &[(PeerId, Via)]) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.set_peers(vias).await,
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
            Self::Bridge(bridge) => bridge.senders().set_peer(peer, number, addresses).await,
            Self::Odp(_) => Ok(()),
        }
    }

    /// Nothing comes from this peer any more.
    pub(super) async fn refuse_from(&self, peer: PeerId) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.senders().remove_peer(peer).await,
            Self::Odp(_) => Ok(()),
        }
    }

    /// Sets which peer's frames may come from which address. Call it before frames go there: answers may come
    /// at once.
    pub(super) async fn set_senders(
        &self,
        vni: Vni,
        add: &[(Endpoint, PeerId)],
        remove: &[Mac],
    ) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.set_senders(vni, add, remove).await,
            Self::Odp(_) => Ok(()),
        }
    }

    pub(super) async fn set_endpoints(
        &mut self,
        vni: Vni,
        add: &[(Endpoint, PeerId)],
        remove: &[Mac],
    ) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.set_endpoints(vni, add, remove).await,
            Self::Odp(odp) => {
                let add = add
                    .iter()
                    .map(|(endpoint, peer)| OdpEdit::Endpoint(vni.0, endpoint.mac, *peer));
                let remove = remove.iter().map(|mac| OdpEdit::RemoveEndpoint(vni.0, *mac));
                odp.apply(remove.chain(add).collect()).await
            }
        }
    }

    /// Sets the peers of the kernel engine that get the group frames of a network.
    pub(super) async fn set_broadcast(
        &mut self,
        vni: Vni,
        peers: &[PeerId],
    ) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.set_broadcast(vni, peers).await,
            Self::Odp(odp) => {
                let peers = peers.iter().copied().collect();
                odp.apply(vec![OdpEdit::Broadcast(vni.0, Some(peers))]).await
            }
        }
    }

    /// Handles an announcement of an address by a host on a network: its bridge stops answering for it with
    /// another MAC.
    pub(super) async fn handle_announcement(
        &mut self,
        vni: Vni,
        heard: &Announcement,
    ) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.handle_announcement(vni, heard).await,
            // A datapath does not answer ARP or neighbour discovery.
            Self::Odp(_) => Ok(()),
        }
    }

    /// Repairs changes that other programs made.
    pub(super) async fn resync(&mut self) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.resync().await,
            Self::Odp(odp) => odp.switch.reconcile().await,
        }
    }

    /// The switch itself, with the vector engine's port on it.
    pub(super) async fn ensure_local(&self) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.ensure_local().await,
            Self::Odp(odp) => odp.ensure_taps().await,
        }
    }

    /// Whether the switch is broken without this device.
    pub(super) fn needs(&self, device: &str) -> bool {
        match self {
            Self::Bridge(bridge) => bridge.needs(device),
            // It watches its ports itself.
            Self::Odp(_) => false,
        }
    }

    /// Whether this is one of the switch's devices, which should keep their settings.
    pub(super) fn has(&self, device: &str) -> bool {
        match self {
            Self::Bridge(bridge) => bridge.has_tap(device) || bridge.needs(device),
            Self::Odp(odp) => odp.has(device),
        }
    }

    /// Waits for the next report of the switch. Cancel safe.
    pub(super) async fn next(&mut self) -> SwitchEvent {
        match self {
            Self::Bridge(bridge) => {
                let (vni, heard) = bridge.next().await;
                SwitchEvent::Announced(vni, heard)
            }
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
    for overlay in [VXLAN, VXLAN6].into_iter().chain(probe_devices()) {
        kernel.remove_device(overlay).await?;
    }
    odp::remove_datapath(kernel, device, VXLAN).await?;
    for result in [
        ForwardRule::new(kernel.clone(), device)?.remove().await,
        MssClamp::at_bridge(kernel.clone(), &[OVERLAY_PORTS])?.remove().await,
        MssClamp::at_device(kernel.clone(), VXLAN)?.remove().await,
    ] {
        match result {
            // Without the program there never was a rule.
            Err(KernelError::NftMissing { .. }) => {}
            result => _ = result?,
        }
    }
    kernel.remove_network_bridges().await?;
    kernel.remove_all(device).await.map(|_| ())
}

/// The datapath of the openvswitch module.
pub(super) struct Odp {
    kernel: Kernel,
    /// The datapath's own device.
    device: String,
    /// The vector engine's device of each network.
    taps: BTreeMap<Vni, PortSpec>,
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
        for device in [VXLAN6].into_iter().chain(probe_devices()) {
            kernel.remove_device(device).await?;
        }
        let devices = NetworkDevices::of_weft(&config.device, &config.tap);
        let tap = tap_port(&devices, config.mtu);
        kernel.ensure_device(&tap).await?;
        let (switch, inbox) = OdpSwitch::start(kernel, spec).await?;
        Ok(Self {
            kernel: kernel.clone(),
            device: config.device.clone(),
            taps: [(config.vni, tap)].into(),
            switch,
            inbox,
            host: config.host,
        })
    }

    fn has(&self, device: &str) -> bool {
        let tap = self.taps.values().any(|tap| tap.name == device);
        tap || device == self.device || device == VXLAN
    }

    /// Brings the vector engine's devices into shape.
    async fn ensure_taps(&self) -> Result<(), KernelError> {
        for tap in self.taps.values() {
            self.kernel.ensure_device(tap).await?;
        }
        Ok(())
    }

    async fn add_network(&mut self, network: NetworkSpec) -> Result<(), KernelError> {
        let NetworkSpec { vni, mtu, isolated } = network;
        if isolated {
            return Err(KernelError::NoIsolation { vni: vni.0 });
        }
        let devices = NetworkDevices::of(vni);
        let tap = tap_port(&devices, mtu);
        self.kernel.ensure_device(&tap).await?;
        let is_new = self.taps.insert(vni, tap).is_none();
        let added = self.switch.add_network(vni.0, devices.tap).await;
        if added.is_err() && is_new {
            self.remove_network(vni).await;
        }
        added
    }

    async fn remove_network(&mut self, vni: Vni) {
        self.taps.remove(&vni);
        if let Err(error) = self.switch.remove_network(vni.0).await {
            tracing::warn!(%error, %vni, "cannot take a network out of the datapath");
        }
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

    /// Frames that locks dropped. The datapath does not tell by which ports they came.
    async fn lock_counts(&self) -> LockCounts {
        let Ok(counters) = self.switch.counters().await else { return LockCounts::default() };
        let counted = |reason: &OdpDrop| {
            let name = reason.name().strip_prefix("locked: ")?.to_lowercase();
            Some((name, counters.drops.get(reason).copied().unwrap_or_default()))
        };
        LockCounts { dropped: OdpDrop::ALL.iter().filter_map(counted).collect(), ports: Vec::new() }
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
