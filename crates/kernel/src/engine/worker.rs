//! The state of the kernel engine's task.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Instant;

use tokio::sync::watch;
use weft_crypto::PeerId;
use weft_io::encap::EncapSocket;
use weft_io::keylog::KeyLog;
use weft_path::{EngineEvent, Vni};

use super::channel::{Channel, ChannelCounters};
use super::filters::Filters;
use super::ledger::Ledger;
use super::probes::Probes;
use super::state::State;
use super::switch::Switch;
use super::unheard::Unheard;
use super::{KernelEngineConfig, Support};
use crate::handle::Kernel;
use crate::net::link_watch::LinkWatch;
use crate::xfrm::{StateId, Xfrm, XfrmWatch};

/// How long a replaced outbound SA stays for packets that looked it up before, in milliseconds.
pub(super) const RETIRE_MS: u64 = 1_000;
/// Interval of full reconciliation with the kernel, in milliseconds.
pub(super) const RECONCILE_MS: u64 = 30_000;
/// How often a kernel that lacks something is asked again, in milliseconds.
pub(super) const SUPPORT_MS: u64 = 5_000;

pub(super) type Events = Box<dyn Fn(EngineEvent) + Send + Sync>;

pub(super) struct Worker {
    pub(super) kernel: Kernel,
    pub(super) config: KernelEngineConfig,
    pub(super) events: Events,
    pub(super) support: watch::Sender<Support>,
    pub(super) state: State,
    pub(super) switch: Switch,
    /// The kernel engine's IPsec, probes and sockets, which `ovpn` and plain paths need too. `None` where the
    /// engine cannot or must not move packets.
    pub(super) ipsec: Option<Ipsec>,
    /// Moves format `ovpn`. Only in use with `ipsec`, which includes the guard and the probes.
    pub(super) channel: Channel,
    pub(super) links: LinkWatch,
    /// Peers whose plain packets pass the guard.
    pub(super) trusted: BTreeSet<IpAddr>,
    /// The peer of each remote endpoint of each network.
    pub(super) holders: BTreeMap<(Vni, [u8; 6]), PeerId>,
    /// The guard and the segment sizes.
    pub(super) filters: Filters,
    pub(super) retired: VecDeque<(Instant, StateId)>,
    /// Nothing of the overlay is in the kernel.
    pub(super) closed: bool,
    /// Why the switch is not the one asked for.
    pub(super) switch_reason: Option<String>,
    pub(super) next_support: Instant,
    pub(super) next_reconcile: Instant,
    /// When to repair changed devices, and the earliest time of the next repair.
    pub(super) mend: (Option<Instant>, Instant),
    /// The data channel's counters are not read before this time.
    pub(super) next_reading: Instant,
    pub(super) counters: Counters,
    pub(super) ledger: Ledger,
    /// Detects packets opened by the kernel that do not get here.
    pub(super) unheard: Unheard,
    pub(super) keylog: KeyLog,
}

/// IPsec in the kernel and the probes, ready for use behind the guard.
pub(super) struct Ipsec {
    pub(super) xfrm: Xfrm,
    pub(super) watch: XfrmWatch,
    pub(super) encapsulation: EncapSocket,
    pub(super) probes: Probes,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) states_added: u64,
    pub(super) states_refused: u64,
    pub(super) policies_set: u64,
    pub(super) policies_restored: u64,
    pub(super) probes_sent: u64,
    pub(super) probes_refused: u64,
    pub(super) probes_too_long: u64,
    pub(super) probes_received: u64,
    pub(super) probes_unknown: u64,
    pub(super) paths_unheard: u64,
    pub(super) devices_restored: u64,
    pub(super) guard_restored: u64,
    pub(super) channel: ChannelCounters,
}
