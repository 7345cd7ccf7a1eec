//! The state of a running switch, which its task, its ports and its meters share.

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use super::{
    api::{Command, OdpEvent, OdpProbe, OdpSpec},
    counters::OdpCounters,
    index::Index,
    limits::Bucket,
    socket::Families,
    tables::{PortKind, Tables},
};
use crate::{
    handle::Kernel,
    netlink::{error::RequestError, generic::Requests},
    switch::groups::GroupCounts,
};

/// The switch's ends of its queues.
pub(super) struct Queues {
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) events: mpsc::Sender<OdpEvent>,
    pub(super) probes: mpsc::Sender<OdpProbe>,
    pub(super) groups: watch::Sender<GroupCounts>,
}

/// The state of a switch and its access to the kernel.
pub(super) struct Core {
    pub(super) kernel: Kernel,
    pub(super) spec: OdpSpec,
    pub(super) requests: Requests,
    pub(super) families: Families,
    /// The datapath's number.
    pub(super) datapath: u32,
    pub(super) tables: Tables,
    pub(super) counters: OdpCounters,
    /// The ports that should be there, whether they are or not.
    pub(super) wanted: BTreeMap<String, PortKind>,
    /// The wanted ports that are missing, and why.
    pub(super) missing: BTreeMap<String, String>,
    pub(super) index: Index,
    /// Ports of which a meter may have counted frames since the last look, besides those with flows.
    pub(super) metered: BTreeSet<u32>,
    pub(super) next_limit_look_ms: u64,
    /// The last reported reason that group frames are not limited.
    pub(super) unlimited: Option<String>,
    pub(super) groups: watch::Sender<GroupCounts>,
    pub(super) events: mpsc::Sender<OdpEvent>,
    pub(super) probes: mpsc::Sender<OdpProbe>,
    /// The datapath may be gone.
    pub(super) suspect: bool,
    pub(super) lost_before: u64,
    pub(super) started: Instant,
    pub(super) floods: Bucket,
    pub(super) flowless: Bucket,
    pub(super) probe_bucket: Bucket,
}

impl Core {
    pub(super) fn event(&mut self, event: OdpEvent) {
        if self.events.try_send(event).is_err() {
            self.counters.events_dropped += 1;
        }
    }

    /// Notes that the datapath may be gone.
    pub(super) fn watch_for_end<T>(&mut self, result: &Result<T, RequestError>) {
        if let Err(error) = result {
            self.suspect |= error.is(Errno::NODEV);
        }
    }

    pub(super) fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
