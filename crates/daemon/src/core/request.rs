//! Requests to the control loop, and its answers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::sync::oneshot;
use weft_api::{ApiError, Attachment, Workers};
use weft_crypto::PeerId;
use weft_mesh::AddressError;
use weft_path::{EngineKind, Mac, Vni};

use super::networks::NetworkRequest;
use super::ranges::Ranges;
use super::service_messages::ToPeer;

/// A request to the control loop from attachments or the API.
pub(crate) enum Request {
    /// Allocates addresses for a container: an explicit one, or the next free.
    Addresses {
        owner: String,
        vni: Vni,
        explicit: Option<IpNet>,
        reply: oneshot::Sender<Result<Vec<IpNet>, AddressError>>,
    },
    /// Asks for all addresses that this host has allocated.
    Allocations { reply: oneshot::Sender<Vec<weft_mesh::Allocation>> },
    /// Asks for the ranges of containers' addresses on a network; no answer if this host does not hold it.
    Ranges { vni: Vni, reply: oneshot::Sender<Ranges> },
    /// Returns all addresses of a container, on all networks.
    Release { owner: String },
    /// Returns these addresses of a container, but for those that it keeps.
    ReleaseSome { owner: String, vni: Vni, addresses: Vec<IpNet>, kept: Vec<IpNet> },
    /// A container is attached: announces it to the other hosts.
    Announce { attachment: Box<Attachment> },
    /// Replies once the engines of all linked hosts know the containers announced so far on a network.
    Barrier { vni: Vni, reply: oneshot::Sender<()> },
    /// An Ethernet address is behind a port of this host: announces it to the other hosts.
    AnnounceMac { vni: Vni, mac: Mac },
    /// Replies with the addresses that two hosts announce now.
    Conflicts { reply: oneshot::Sender<Vec<weft_mesh::Conflict>> },
    /// A container is gone: withdraws it from the other hosts.
    Withdraw { vni: Vni, mac: Mac },
    /// About networks besides `weft`.
    Network(NetworkRequest),
    /// The user named other targets.
    TargetsChanged,
    /// Forgets departed hosts of this name, address or key. Replies with their ids, and whether a linked host
    /// matches too.
    Forget { text: String, reply: oneshot::Sender<(Vec<PeerId>, bool)> },
    /// After a start: releases the addresses of all other owners.
    KeepOnly { owners: BTreeSet<String> },
    /// The MTU of the host's link has changed, in bytes.
    LinkMtu { link_mtu: u16 },
    /// Asks for the names of all hosts, for DNS.
    Names { reply: oneshot::Sender<NamesSnapshot> },
    /// Announces the names that this host's user gave, in place of those before.
    SetNames {
        names: Vec<weft_mesh::NameRecord>,
        reply: oneshot::Sender<Result<(), weft_mesh::MeshError>>,
    },
    /// Sets the number of workers of the vector engine; `None` only asks for it.
    Workers { wanted: Option<usize>, reply: oneshot::Sender<Result<Workers, ApiError>> },
    /// Sends a message of a service to the same service on another host.
    ToPeer(ToPeer),
    /// Asks whether a host is a member of the mesh, linked or not.
    IsMember { peer: PeerId, reply: oneshot::Sender<bool> },
    /// A snapshot of the whole state, for status.
    Snapshot { reply: oneshot::Sender<Snapshot> },
    /// Counters of the engines, for rates.
    Traffic { reply: oneshot::Sender<Readings> },
}

/// The names of the mesh, for DNS.
pub(crate) struct NamesSnapshot {
    /// Those of each network on this host, `weft` first.
    pub(crate) networks: Vec<NetworkNames>,
    pub(crate) revision: u64,
    /// Whether every host known has told its names.
    pub(crate) is_complete: bool,
}

/// The names of one network, for DNS.
pub(crate) struct NetworkNames {
    pub(crate) name: String,
    /// Its own ranges, or those of `weft`.
    pub(crate) ranges: Vec<IpNet>,
    /// Whether it has no way out.
    pub(crate) is_internal: bool,
    /// The hosts that share it. A name that a user gave says its own network.
    pub(crate) hosts: Vec<weft_mesh::HostNames>,
}

/// Counter values for computing rates.
pub(crate) struct Readings {
    pub(crate) counters: weft_engine::Counters,
    /// Workers of the vector engine now.
    pub(crate) workers: usize,
    pub(crate) kernel: Vec<(PeerId, weft_kernel::engine::PeerTraffic)>,
    /// The engine that carries each peer's frames.
    pub(crate) engines: BTreeMap<PeerId, EngineKind>,
}

/// The state that status is built from.
pub(crate) struct Snapshot {
    pub(crate) peers: Vec<weft_mesh::PeerStatus>,
    pub(crate) ipam: weft_mesh::IpamStatus,
    pub(crate) paths: Vec<weft_path::PathStatus>,
    /// Addresses that peers have dialled, where the routing table would send from another one.
    pub(crate) sources: BTreeMap<PeerId, IpAddr>,
    pub(crate) counters: weft_engine::Counters,
    /// Workers of the vector engine now.
    pub(crate) workers: usize,
    pub(crate) kernel: weft_kernel::engine::KernelCounters,
    pub(crate) support: weft_kernel::engine::Support,
    /// How long the kernel engine has been busy with its current commands.
    pub(crate) kernel_busy: Option<Duration>,
    pub(crate) lost: Vec<LostLink>,
}

/// A link that ended, and why.
#[derive(Clone)]
pub(crate) struct LostLink {
    pub(crate) peer: PeerId,
    pub(crate) nickname: String,
    pub(crate) remote: SocketAddr,
    pub(crate) reason: String,
    pub(crate) since: Instant,
}
