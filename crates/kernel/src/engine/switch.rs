//! The switch under both engines: a Linux bridge with VXLAN devices, or an Open vSwitch datapath.

use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::vxlan;
use weft_path::{Endpoint, Mac};

use super::KernelEngineConfig;
use super::probes::Received;
use crate::error::KernelError;
use crate::{BridgeSpec, Kernel, OuterFamily, Overlay, OverlaySpec, PortSpec, Via, VxlanSpec};

/// The VXLAN devices of the network, one for each family of outer addresses.
const VXLAN: &str = "weft-vxlan";
const VXLAN6: &str = "weft-vxlan6";
/// Those that take the probes of active paths.
const PROBE: &str = "weft-probe";
const PROBE6: &str = "weft-probe6";
/// In super-packets: enough for every flow's burst.
const TAP_QUEUE_PACKETS: u32 = 5_000;
/// A probe may be as long as any path carries.
const PROBE_MTU_BYTES: u32 = 65_000;

/// What a VXLAN device does with marks of remote checksum offload.
const RCO: bool = false;

/// What moves frames between local ports and paths.
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
    Bridge(Bridge),
}

impl Switch {
    /// Makes the local switch with the vector engine's port on it.
    pub(super) async fn start(
        kernel: &Kernel,
        config: &KernelEngineConfig,
    ) -> Result<Self, KernelError> {
        let bridge = Bridge::new(kernel.clone(), config);
        bridge.ensure_local().await?;
        Ok(Self::Bridge(bridge))
    }

    pub(super) const fn kind(&self) -> SwitchKind {
        match self {
            Self::Bridge(_) => SwitchKind::Bridge,
        }
    }

    /// Makes the devices that the kernel engine sends by; returns the indices of those that take
    /// probes.
    pub(super) async fn open_overlay(&mut self) -> Result<Vec<u32>, KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.open_overlay().await,
        }
    }

    /// Removes them.
    pub(super) async fn close_overlay(&mut self) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.close_overlay().await,
        }
    }

    /// Plugs a container's device in.
    pub(super) async fn add_port(&mut self, name: &str) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.add_port(name).await,
        }
    }

    pub(super) async fn set_peers(&mut self, vias: &[(PeerId, Via)]) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => bridge.overlay.set_peers(vias).await,
        }
    }

    pub(super) async fn set_endpoints(
        &mut self,
        add: &[(Endpoint, PeerId)],
        remove: &[Mac],
    ) -> Result<(), KernelError> {
        let remove: Vec<_> = remove.iter().map(|mac| mac.0).collect();
        match self {
            Self::Bridge(bridge) => {
                let entry = |(endpoint, peer): &(Endpoint, PeerId)| {
                    (endpoint.mac.0, endpoint.addresses.clone(), *peer)
                };
                let add: Vec<_> = add.iter().map(entry).collect();
                bridge.overlay.set_endpoints(&add, &remove).await
            }
        }
    }

    /// Mends what somebody changed by hand.
    pub(super) async fn resync(&mut self) -> Result<(), KernelError> {
        match self {
            Self::Bridge(bridge) => {
                bridge.ensure_local().await?;
                bridge.overlay.resync().await.map(|_| ())
            }
        }
    }

    /// Whether the switch is broken without this device.
    pub(super) fn needs(&self, device: &str) -> bool {
        match self {
            Self::Bridge(bridge) => {
                device == bridge.config.device
                    || (bridge.open && [VXLAN, VXLAN6, PROBE, PROBE6].contains(&device))
            }
        }
    }

    /// Probes that the switch itself takes, where they have no device.
    pub(super) async fn receive(&mut self) -> Vec<Received> {
        match self {
            Self::Bridge(_) => std::future::pending().await,
        }
    }

    /// Whether it takes frames whose inner checksum is only partial (remote checksum offload).
    pub(super) const fn takes_rco(&self) -> bool {
        match self {
            Self::Bridge(_) => RCO,
        }
    }

    pub(super) fn counters(&self) -> Vec<(&'static str, u64)> {
        match self {
            Self::Bridge(_) => Vec::new(),
        }
    }
}

/// A Linux bridge, its overlay ports and what is behind them.
pub(super) struct Bridge {
    kernel: Kernel,
    config: KernelEngineConfig,
    overlay: Overlay<PeerId>,
    /// The VXLAN devices are to be there.
    open: bool,
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
        Self { kernel, config: config.clone(), overlay, open: false }
    }

    /// The bridge, and the vector engine's TAP device as a port of it from which nothing goes back
    /// into the overlay.
    async fn ensure_local(&self) -> Result<(), KernelError> {
        let config = &self.config;
        let mtu = u32::from(config.mtu);
        let bridge = BridgeSpec { name: config.device.clone(), mac: config.mac, mtu };
        self.kernel.ensure_bridge(&bridge).await?;
        let port = PortSpec {
            name: config.tap.clone(),
            bridge: config.device.clone(),
            isolated: true,
            learning: false,
            neigh_suppress: true,
            mtu,
            txqueuelen: Some(TAP_QUEUE_PACKETS),
            gso_max_size: None,
            gso_max_segs: None,
        };
        self.kernel.ensure_port(&port).await
    }

    async fn open_overlay(&mut self) -> Result<Vec<u32>, KernelError> {
        self.open = true;
        let mut probes = Vec::new();
        let mut made = false;
        let devices = [(VXLAN, PROBE, OuterFamily::V4), (VXLAN6, PROBE6, OuterFamily::V6)];
        for (data, probe, family) in devices {
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

    async fn close_overlay(&mut self) -> Result<(), KernelError> {
        self.open = false;
        for device in [VXLAN, VXLAN6, PROBE, PROBE6] {
            self.kernel.remove_device(device).await?;
        }
        Ok(())
    }

    async fn add_port(&self, name: &str) -> Result<(), KernelError> {
        // `Kernel::attach` has put it into the bridge.
        self.kernel.socket().need_link(name).await.map(|_| ())
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
        }
    }
}
