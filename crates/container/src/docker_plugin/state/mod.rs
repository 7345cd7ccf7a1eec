//! The plugin's promises to Docker: a state machine without sockets, clock or disk.
//!
//! A [`Call`] leads to a [`Step`]: an answer, or an [`Action`] whose [`Outcome`] leads to the next
//! step. The caller stores the state before it performs an action and before it gives an answer.
//!
//! The state stores an [`Undo`] before each action that takes something, and drops it when the result
//! is recorded. So a kill at any time leaves either a record or an undo. After a restart every undo
//! is performed.

mod endpoints;
mod listing;
mod networks;
mod pools;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use weft_packet::ethernet::Mac;

use self::endpoints::{EndpointWork, JoinWork};
use self::listing::Suspect;
pub use self::listing::{ListedNetwork, ListedPool, Listing, Reconciled, SUSPECT_S};
use self::networks::NetworkWork;
pub use self::pools::{ADDRESS_SPACE, CREATION_S, POOL_RETRY_S};
use self::pools::{AddressWork, PoolWork, RetryGuard};
use super::error::PluginError;
use super::names::NetworkName;
use super::requests::{
    AddressRequest, BackendError, Link, LinkRequest, NetworkInfo, NetworkRequest,
};
use super::wire::{Answer, Call};

/// The most networks of Docker's on a host.
pub const NETWORKS_MAX: usize = 1024;
/// The most endpoints of Docker's on a host.
pub const ENDPOINTS_MAX: usize = 16_384;
/// The most address pools.
pub const POOLS_MAX: usize = 4096;
/// The most addresses held in all pools.
pub const LEASES_MAX: usize = 65_536;
/// The most things that could not be taken back yet. With more, nothing new is given.
pub const UNDO_MAX: usize = 65_536;

/// The beginning of all owners of the plugin's.
const OWNER_PREFIX: &str = "docker:";

/// The plugin's promises to Docker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// Distinguishes owners of addresses from those of a lost state.
    instance: u64,
    next_owner: u64,
    networks: BTreeMap<String, Network>,
    endpoints: BTreeMap<String, Endpoint>,
    pools: BTreeMap<String, Pool>,
    undo: BTreeSet<Undo>,
    /// Links that are still to be removed, by endpoint.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    plugged: BTreeMap<String, Plugged>,
    #[serde(skip)]
    volatile: Volatile,
}

/// The part that a restart forgets.
#[derive(Clone, Debug, Default)]
struct Volatile {
    /// Undos of calls under way, or being performed.
    in_flight: BTreeSet<Undo>,
    /// Undos that [`State::poll_undo`] has not given yet.
    fresh: BTreeSet<Undo>,
    retry: RetryGuard,
    suspects: BTreeMap<Suspect, Instant>,
}

/// A network of Docker's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Network {
    name: NetworkName,
    allocator: NetworkName,
    /// Ranges that Docker knows.
    subnets: Vec<IpNet>,
    /// The ranges from which `CreateEndpoint` chooses addresses, since Docker chooses none.
    fill: Vec<IpNet>,
    external: bool,
    internal: bool,
}

/// An endpoint of Docker's: a container's place on a network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Endpoint {
    network: String,
    mac: Mac,
    addresses: Vec<IpNet>,
    /// Owners of those addresses that the endpoint itself has taken.
    owners: Vec<String>,
    phase: Phase,
    /// With a link, the engine's key of the container. Empty in records of earlier versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    sandbox: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Phase {
    /// Without a link.
    Created,
    /// With a link.
    Joined,
}

/// A link that is still to be removed. Until it is, nobody else may have its addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Plugged {
    network: NetworkName,
    /// Owners of its addresses.
    owners: BTreeSet<String>,
}

/// A range from which Docker asks for addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Pool {
    subnet: IpNet,
    /// `--ip-range`.
    range: Option<IpNet>,
    /// Whether `--ipam-opt` named the network.
    named: bool,
    /// That network, if there was none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    planned: Option<NetworkName>,
    binding: Option<Binding>,
    /// How often Docker has asked for it and not released it.
    requests: u32,
    leases: BTreeMap<IpAddr, Lease>,
    /// When it was asked for last; until its network is created, certain addresses asked for are
    /// those that no container is to have.
    #[serde(skip)]
    creation: Option<Instant>,
}

/// The network of Weft's that a pool belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Binding {
    network: NetworkName,
    allocator: NetworkName,
    gateway: Option<IpAddr>,
}

/// An address that Docker holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Lease {
    /// `None` while the pool belongs to no network, and for a network's own gateway.
    owner: Option<String>,
    holder: Holder,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Holder {
    /// A gateway or `--aux-address`, by the number of times that it was asked for.
    Reserved(u32),
    /// A container, by its name where the engine tells it.
    Container(Option<String>),
}

/// Takes back something that an [`Action`] takes. In the order in which they are performed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Undo {
    /// [`remove_link`](super::Backend::remove_link).
    RemoveLink {
        /// The endpoint.
        endpoint: String,
    },
    /// [`release`](super::Backend::release).
    Release {
        /// The network that has allocated the address.
        allocator: NetworkName,
        /// The address's owner.
        owner: String,
    },
    /// [`close_network`](super::Backend::close_network).
    CloseNetwork {
        /// The network.
        network: NetworkName,
    },
}

/// A request to the rest of the daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// [`open_network`](super::Backend::open_network).
    OpenNetwork(NetworkRequest),
    /// [`allocate`](super::Backend::allocate).
    Allocate(AddressRequest),
    /// [`prepare_link`](super::Backend::prepare_link).
    PrepareLink(LinkRequest),
    /// [`link_facts`](super::Backend::link_facts).
    LinkFacts {
        /// The endpoint.
        endpoint: String,
    },
}

/// The result of an [`Action`].
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// Of [`Action::OpenNetwork`].
    Network(NetworkInfo),
    /// Of [`Action::Allocate`].
    Address(IpAddr),
    /// Of [`Action::PrepareLink`].
    Link(Link),
    /// Of [`Action::LinkFacts`].
    Facts(BTreeMap<String, String>),
}

/// The next step of a call.
#[derive(Debug)]
pub enum Step {
    /// The state is to be stored, the action performed, and its outcome handled.
    Act(Action, Pending),
    /// The state is to be stored, and the answer given.
    Done(Result<Answer, PluginError>),
}

/// A call that waits for the outcome of an action.
#[derive(Clone, Debug)]
pub struct Pending(Work);

#[derive(Clone, Debug)]
enum Work {
    Pool(PoolWork),
    Address(AddressWork),
    Network(Box<NetworkWork>),
    Endpoint(Box<EndpointWork>),
    Join(JoinWork),
    Facts,
}

type Stepped = Result<Step, PluginError>;

impl Plugged {
    /// Whether something is to be taken back after the link.
    fn holds(&self, undo: &Undo) -> bool {
        match undo {
            Undo::RemoveLink { .. } => false,
            Undo::Release { owner, .. } => self.owners.contains(owner),
            Undo::CloseNetwork { network } => *network == self.network,
        }
    }
}

impl Step {
    fn act(action: Action, work: Work) -> Self {
        Self::Act(action, Pending(work))
    }

    fn answer(answer: Answer) -> Self {
        Self::Done(Ok(answer))
    }

    const fn done() -> Self {
        Self::Done(Ok(Answer::Done {}))
    }
}

impl From<Stepped> for Step {
    fn from(stepped: Stepped) -> Self {
        stepped.unwrap_or_else(|error| Self::Done(Err(error)))
    }
}

impl State {
    /// A state without promises. `instance` is a random number.
    pub fn new(instance: u64) -> Self {
        Self { instance, ..Self::default() }
    }

    /// Begins a call.
    pub fn handle_call(&mut self, call: Call, now: Instant) -> Step {
        if call.needs_backend() && self.undo.len() >= UNDO_MAX {
            let what = "things of Docker's that could not be removed";
            return Step::Done(Err(PluginError::TooMany { what, limit: UNDO_MAX }));
        }
        let stepped = match call {
            Call::DefaultAddressSpaces => Ok(self.default_address_spaces()),
            Call::RequestPool(request) => self.request_pool(&request, now),
            Call::ReleasePool(request) => Ok(self.release_pool(&request)),
            Call::RequestAddress(request) => self.request_address(&request, now),
            Call::ReleaseAddress(request) => Ok(self.release_address(&request)),
            Call::CreateNetwork(request) => self.create_network(&request, now),
            Call::DeleteNetwork(request) => Ok(self.delete_network(&request)),
            Call::CreateEndpoint(request) => self.create_endpoint(&request),
            Call::EndpointInfo(request) => self.endpoint_info(&request),
            Call::Join(request) => self.join(&request),
            Call::Leave(request) => Ok(self.leave(&request)),
            Call::DeleteEndpoint(request) => Ok(self.delete_endpoint(&request)),
        };
        stepped.into()
    }

    /// Goes on with a call whose action has an outcome.
    pub fn handle_outcome(
        &mut self,
        pending: Pending,
        outcome: Result<Outcome, BackendError>,
        now: Instant,
    ) -> Step {
        let stepped = match (pending.0, outcome) {
            (Work::Pool(work), outcome) => self.pool_opened(work, outcome, now),
            (Work::Address(work), outcome) => self.address_allocated(work, outcome),
            (Work::Network(work), outcome) => self.network_stepped(*work, outcome),
            (Work::Endpoint(work), outcome) => self.endpoint_stepped(*work, outcome),
            (Work::Join(work), outcome) => self.joined(work, outcome),
            (Work::Facts, Ok(Outcome::Facts(value))) => Ok(Step::answer(Answer::Info { value })),
            // `docker network inspect` works without them.
            (Work::Facts, _) => Ok(Step::answer(Answer::Info { value: BTreeMap::new() })),
        };
        stepped.into()
    }

    /// The next thing to take back. It may be out of date: ask [`begin_undo`](Self::begin_undo).
    pub fn poll_undo(&mut self) -> Option<Undo> {
        self.volatile.fresh.pop_first()
    }

    /// Makes [`poll_undo`](Self::poll_undo) give everything that is still to be taken back: after a
    /// start, and from time to time.
    pub fn retry_undo(&mut self) {
        let Volatile { fresh, in_flight, .. } = &mut self.volatile;
        *fresh = self.undo.difference(in_flight).cloned().collect();
    }

    /// Whether the undo is to be performed now; its end is then to be reported to
    /// [`handle_undone`](Self::handle_undone).
    pub fn begin_undo(&mut self, undo: &Undo) -> bool {
        if self.volatile.in_flight.contains(undo) {
            return false;
        }
        // Reconciliation has forgotten a network's last user while a call was about to become the next.
        let is_wanted = matches!(undo, Undo::CloseNetwork { network } if self.is_used(network));
        if is_wanted {
            self.undo.remove(undo);
        }
        let is_early = self.plugged.values().any(|link| link.holds(undo));
        let is_due = self.undo.contains(undo) && !is_early;
        is_due && self.volatile.in_flight.insert(undo.clone())
    }

    /// The undo has been performed, or has failed and is to be tried again later. Once a link is gone,
    /// [`poll_undo`](Self::poll_undo) gives what has waited for that.
    pub fn handle_undone(&mut self, undo: &Undo, success: bool) {
        self.volatile.in_flight.remove(undo);
        if !success {
            return;
        }
        self.undo.remove(undo);
        if let Undo::RemoveLink { endpoint } = undo
            && let Some(gone) = self.plugged.remove(endpoint)
        {
            let freed = self.undo.iter().filter(|undo| gone.holds(undo)).cloned();
            self.volatile.fresh.extend(freed);
        }
    }

    /// Whether nothing is held and nothing is left to take back.
    pub fn is_empty(&self) -> bool {
        self.networks.is_empty()
            && self.endpoints.is_empty()
            && self.pools.is_empty()
            && self.undo.is_empty()
    }

    /// Whether a restart would not tell this state from the other.
    pub fn promises_as(&self, other: &Self) -> bool {
        self.holds_as(other) && self.next_owner == other.next_owner
    }

    /// Whether both states hold the same things.
    pub(super) fn holds_as(&self, other: &Self) -> bool {
        self.networks == other.networks
            && self.endpoints == other.endpoints
            && self.pools == other.pools
            && self.undo == other.undo
            && self.plugged == other.plugged
    }

    /// Stores that an action is about to take something.
    fn guard(&mut self, undo: Undo) -> Undo {
        self.volatile.in_flight.insert(undo.clone());
        self.undo.insert(undo.clone());
        undo
    }

    /// The result of the guarded action is recorded.
    fn keep(&mut self, guard: &Undo) {
        self.handle_undone(guard, true);
    }

    /// The result of the guarded action, or something held before, is not wanted any more.
    fn take_back(&mut self, undo: Undo) {
        self.volatile.in_flight.remove(&undo);
        self.undo.insert(undo.clone());
        self.volatile.fresh.insert(undo);
    }

    /// A new owner, and its guard.
    fn new_owner(&mut self, allocator: &NetworkName) -> (String, Undo) {
        let owner = format!("{}{}", self.owner_prefix(), self.next_owner);
        self.next_owner += 1;
        let undo = Undo::Release { allocator: allocator.clone(), owner: owner.clone() };
        (owner, self.guard(undo))
    }

    /// The beginning of this state's owners.
    fn owner_prefix(&self) -> String {
        format!("{OWNER_PREFIX}{:016x}:", self.instance)
    }

    /// Whether Docker uses a network of Weft's.
    fn is_used(&self, name: &NetworkName) -> bool {
        let bound = |pool: &Pool| pool.binding.as_ref().is_some_and(|b| b.network == *name);
        self.networks.values().any(|network| network.name == *name)
            || self.pools.values().any(bound)
    }

    /// The guard of opening a network, unless Docker uses it already.
    fn guard_network(&mut self, name: &NetworkName) -> Option<Undo> {
        let fresh = !name.is_ready() && !self.is_used(name);
        fresh.then(|| self.guard(Undo::CloseNetwork { network: name.clone() }))
    }

    /// A network of Weft's may have lost its last user.
    fn close_unused(&mut self, name: &NetworkName) {
        if !name.is_ready() && !self.is_used(name) {
            self.take_back(Undo::CloseNetwork { network: name.clone() });
        }
    }
}
