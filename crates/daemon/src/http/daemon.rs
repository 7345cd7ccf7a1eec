//! The daemon as its API sees it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, watch};
use weft_crypto::PeerId;
use weft_kernel::Kernel;
use weft_link::Links;

use crate::config::Settings;
use crate::core::control::Request;
use crate::core::events::Lost;
use crate::core::targets::Targets;
use crate::core::turns::Turns;
use crate::services::attach::Attachments;
use crate::services::cni::Cni;
use crate::services::docker::Docker;
use crate::services::gateway::Gateway;
use crate::services::names::Names;
use crate::services::networks::Networks;
use crate::services::resolved::Resolved;
use crate::services::supervisor::Health;
use crate::upkeep::firewall::Firewall;
use crate::upkeep::store::Store;
use crate::upkeep::warnings::Warnings;

/// Changes that requests may have under way or waiting for their turn.
pub(crate) const CHANGES_MAX: usize = 1_024;

/// The parts of the daemon that the API can reach.
pub(crate) struct Daemon {
    pub(crate) settings: Settings,
    pub(crate) local: PeerId,
    pub(crate) mtu: u16,
    /// The MTU of the host's link at the start, in bytes.
    pub(crate) link_mtu: u16,
    /// Offloads by name, and whether the self-test found them working.
    pub(crate) offloads: BTreeMap<String, bool>,
    /// Events of the engines that the control loop could not take in time.
    pub(crate) events_lost: Lost,
    pub(crate) kernel: Kernel,
    pub(crate) since: SystemTime,
    pub(crate) links: Links,
    pub(crate) targets: Arc<Targets>,
    pub(crate) store: Store,
    pub(crate) control: mpsc::Sender<Request>,
    pub(crate) attachments: Arc<Attachments>,
    pub(crate) networks: Arc<Networks>,
    /// Requests of the CNI plugin.
    pub(crate) cni: Arc<Cni>,
    /// Docker's plugin.
    pub(crate) docker: Arc<Docker>,
    /// OpenVPN clients.
    pub(crate) gateway: Arc<Gateway>,
    /// Rules of this host's own firewall that are in the way.
    pub(crate) firewall: Firewall,
    pub(crate) stop: Arc<watch::Sender<bool>>,
    /// Problems on this host.
    pub(crate) warnings: Warnings,
    /// DNS.
    pub(crate) names: Arc<Names>,
    /// The host's own resolver.
    pub(crate) resolved: Arc<Resolved>,
    /// The health of the services.
    pub(crate) health: Health,
    /// The turns of the core's loop.
    pub(crate) turns: Turns,
    /// The runtime for services, and for requests that the kernel may delay.
    pub(crate) services: Handle,
    /// Places for changes that requests ask for.
    pub(crate) changes: Arc<Semaphore>,
}
