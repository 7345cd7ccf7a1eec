//! The specification of a switch, and the messages between its handle and its task.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use tokio::sync::oneshot;
use weft_crypto::PeerId;
use weft_path::Mac;

use super::{
    counters::{OdpAudit, OdpCounters},
    tables::Via,
};
use crate::{error::KernelError, switch::port_lock::PortLock};

/// The ODP switch with its first network, which is there as long as the switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OdpSpec {
    /// Name of the datapath and of the host's own device on it, which is on the first network. 1 to 15 bytes.
    pub name: String,
    /// MAC address of that device, the same after each restart.
    pub mac: [u8; 6],
    /// MTU of that device in bytes, 1280 to 65535.
    pub mtu: u32,
    /// The vector engine's device of the first network; it becomes a port whenever it is there.
    pub tap: String,
    /// Name of the VXLAN device.
    pub tunnel: String,
    /// UDP port of tunnel packets, in both directions.
    pub tunnel_port: u16,
    /// The first network's VXLAN network identifier, 24 bits.
    pub vni: u32,
    /// How often flows that nothing has used since the last time are deleted.
    pub sweep_interval: Duration,
}

/// One change to the switch's tables. Networks are named by their VXLAN network identifier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OdpEdit {
    /// How frames for a peer leave, and which broadcasts it gets. Tunnel packets are accepted from the
    /// address of a [`Via::Tunnel`] until another is given or the peer is removed.
    Peer(PeerId, Via),
    /// Further underlay addresses that a peer's tunnel packets may come from.
    Sources(PeerId, Vec<IpAddr>),
    /// Removes a peer and the endpoints behind it.
    RemovePeer(PeerId),
    /// This MAC of a network is behind a peer. A local port of the network that sends under it is not
    /// believed.
    Endpoint(u32, Mac, PeerId),
    /// This MAC of a network is not behind a peer.
    RemoveEndpoint(u32, Mac),
    /// The peers on the kernel engine that get a network's frames to groups and to unknown MACs; `None` for
    /// all. It starts as `None` for the first network, and empty for each other. The list holds until the
    /// next one, whichever peers come and go.
    Broadcast(u32, Option<BTreeSet<PeerId>>),
    /// Fixes this MAC of a network to the network's local port of this name, regardless of other hosts'
    /// claims.
    Local(u32, Mac, String),
    /// This MAC of a network is no longer fixed to a local port.
    RemoveLocal(u32, Mac),
    /// From now on frames of the local port with this name are dropped unless they have addresses of this lock as
    /// their source. The port need not be there yet. The lock replaces an earlier one, and outlives the port.
    Lock(String, PortLock),
    /// The local port with this name has no lock any more.
    Unlock(String),
}

/// An event of the switch that no command caused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum OdpEvent {
    /// A port is there (again).
    PortAdded {
        /// The device.
        name: String,
    },
    /// A port is gone; it comes back when its device does.
    PortLost {
        /// The device.
        name: String,
    },
    /// The switch has ended: the datapath was deleted or the module unloaded. Start it again.
    Failed {
        /// The reason.
        reason: String,
    },
}

/// A probe that came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OdpProbe {
    /// The outer source address.
    pub remote: IpAddr,
    /// The Ethernet frame.
    pub frame: Vec<u8>,
}

pub(super) type Reply<T> = oneshot::Sender<Result<T, KernelError>>;

/// A request from the handle to the switch.
#[derive(Debug)]
pub(super) enum Command {
    Edit(Vec<OdpEdit>, Reply<()>),
    AddNetwork(u32, String, Reply<()>),
    RemoveNetwork(u32, Reply<bool>),
    AddPort(u32, String, Reply<()>),
    RemovePort(String, Reply<bool>),
    RetainPorts(Vec<String>, Reply<usize>),
    Reconcile(Reply<()>),
    Probe { remote: IpAddr, local: Option<IpAddr>, frame: Vec<u8>, reply: Reply<()> },
    Counters(Reply<OdpCounters>),
    Audit(Reply<OdpAudit>),
    Sweep(Reply<()>),
    Stop(Reply<()>),
    Remove(Reply<usize>),
}
