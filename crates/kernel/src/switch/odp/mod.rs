//! The ODP switch: the kernel's openvswitch module alone, driven by generic netlink, without an OVS
//! daemon (`docs/design/kernel-engine.md`).
//!
//! A datapath named like the bridge in bridge mode holds the containers' devices of all networks, and the vector
//! engine's TAP of each network. It also holds one VXLAN device that takes its peer and its network from each
//! packet. Networks are told apart by the port that a frame comes in by, and by the network identifier in
//! the tunnel; every flow matches on both. The first frame of a pair of MACs
//! comes up as an upcall. The daemon decides (`decide`), adds a flow for such frames, and forwards the frame.
//! Every later frame stays in the kernel. A flow of a locked port matches on more, which the lock has read
//! (`lock`). The index records with each flow which entries its decision has
//! read (`index`), so that a change touches exactly the flows that it concerns.

mod api;
mod codec;
mod codec_flow;
mod codec_meter;
mod codec_packet;
mod codec_payload;
mod codec_port;
mod counters;
mod decide;
mod device;
mod drops;
mod flow;
mod index;
mod limits;
mod lock;
mod meters;
mod networks;
mod ports;
mod socket;
mod state;
mod switch;
mod tables;
mod worker;

#[cfg(test)]
mod tests;

pub use self::{
    api::{OdpEdit, OdpEvent, OdpProbe, OdpSpec},
    counters::{OdpAudit, OdpCounters},
    drops::OdpDrop,
    index::{FLOWS_MAX, FLOWS_PER_PORT_MAX, PUT_AGAIN_AFTER_MS},
    meters::LIMIT_LOOK_MS,
    ports::remove_datapath,
    socket::{UPCALL_BUFFER_BYTES, UPCALL_SOCKETS},
    switch::{
        COMMANDS_QUEUED_MAX, EVENTS_QUEUED_MAX, OdpInbox, OdpSwitch, PROBES_QUEUED_MAX,
        SWEEP_INTERVAL_S,
    },
    tables::{
        LEARNED_AGE_MS, LEARNED_MAX, LEARNED_PER_PORT_MAX, LOCKS_MAX, MOVE_HOLD_MS, NETWORKS_MAX,
        Via,
    },
    worker::{FLOODS_PER_S_MAX, FLOWLESS_PER_S_MAX, PROBES_PER_S_MAX, REPAIR_INTERVAL_MS},
};

use self::socket::open_requests;
use crate::{error::KernelError, handle::Kernel};

impl Kernel {
    /// Whether this kernel can run the ODP switch: it has the openvswitch module, and can make a VXLAN device
    /// for it. The check makes the kernel load the module if it can.
    ///
    /// # Errors
    /// [`KernelError::OdpMissing`], [`KernelError::VxlanMissing`], [`KernelError::NotPermitted`].
    pub async fn odp_support(&self) -> Result<(), KernelError> {
        let mut requests = self.at_home(open_requests)?;
        requests.families().await?;
        device::try_tunnel(self).await
    }
}
