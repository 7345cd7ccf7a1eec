//! Counters of the switch.

use std::collections::BTreeMap;

use super::drops::OdpDrop;

/// Counters of one switch since its start; where stated, the datapath's since its creation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OdpCounters {
    /// Frames that came up because no flow matched.
    pub upcalls: u64,
    /// Frames that should have come up and were lost, since the daemon was too slow. By the
    /// datapath's own count.
    pub upcalls_lost: u64,
    /// How often a socket for upcalls ran over.
    pub upcall_overruns: u64,
    /// Frames that flows carried (the datapath's count since it was made).
    pub hits: u64,
    /// Frames that no flow matched (the datapath's count since it was made).
    pub misses: u64,
    /// Flows in the kernel.
    pub flows: u64,
    /// Flows made.
    pub flows_put: u64,
    /// Flows whose actions were replaced because their inputs changed.
    pub flows_changed: u64,
    /// Flows deleted because their inputs changed.
    pub flows_deleted: u64,
    /// Flows deleted because nothing used them.
    pub flows_idle: u64,
    /// Flows that another program deleted.
    pub flows_vanished: u64,
    /// Flows not made because there were too many ([`super::FLOWS_MAX`],
    /// [`super::FLOWS_PER_PORT_MAX`]).
    pub flows_refused: u64,
    /// Changes to flows that the kernel refused.
    pub flow_errors: u64,
    /// Frames sent on by the daemon itself.
    pub executed: u64,
    /// Frames that the kernel refused to send on.
    pub execute_errors: u64,
    /// Frames to unknown destinations that were sent everywhere.
    pub floods: u64,
    /// Frames that were dropped since too many of their like had no flow
    /// ([`super::FLOODS_PER_S_MAX`], [`super::FLOWLESS_PER_S_MAX`]).
    pub limited: u64,
    /// Frames to groups that meters kept from peers.
    pub groups_limited: u64,
    /// Reports of the host's own that it listens to groups, which stay here. Those that flows keep are added at each
    /// sweep.
    pub reports_kept: u64,
    /// Probes sent.
    pub probes_sent: u64,
    /// Probes received and handed on.
    pub probes_received: u64,
    /// Probes received and dropped: there were too many at once, or no receiver took them.
    pub probes_dropped: u64,
    /// Events dropped because no receiver took them.
    pub events_dropped: u64,
    /// MACs learned from source addresses of frames.
    pub macs_learned: u64,
    /// Frames dropped, by reason. Those that flows drop are added at each sweep.
    pub drops: BTreeMap<OdpDrop, u64>,
}

/// The result of comparing the kernel's flows with the tables. All fields but `flows` are zero unless another
/// program changes the datapath.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OdpAudit {
    /// Flows in the kernel.
    pub flows: usize,
    /// Flows of ours in the kernel with actions other than recorded.
    pub differing: usize,
    /// Flows noted that are not in the kernel.
    pub missing: usize,
    /// Flows in the kernel that are not noted.
    pub unknown: usize,
    /// Flows that differ from the current decision of the tables.
    pub outdated: usize,
}
