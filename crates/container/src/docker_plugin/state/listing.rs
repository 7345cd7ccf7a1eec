//! Reconciliation of the state with what Docker and the daemon list.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::super::names::NetworkName;
use super::{Holder, OWNER_PREFIX, Phase, Pool, State, Undo};

/// How long something must be missing in Docker's lists before it counts as gone, in seconds.
/// Longer than any call of the engine takes with all its tries, since a list may be older than a
/// container that is just being started.
pub const SUSPECT_S: u64 = 60;

/// The things that Docker and the daemon list. Take the lists before [`State::handle_listing`] is
/// called, and never during a request of Docker's.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// All networks of driver or IPAM driver weft, by Docker's id; `None` if Docker does not
    /// answer.
    pub networks: Option<BTreeMap<String, ListedNetwork>>,
    /// The endpoints that have links of the plugin's, by Docker's id.
    pub links: BTreeSet<String>,
    /// Owners of addresses that begin with `docker:`, with the network that has allocated them.
    pub owners: BTreeSet<(NetworkName, String)>,
}

/// A network as Docker lists it.
#[derive(Clone, Debug, Default)]
pub struct ListedNetwork {
    /// Its pools (`IPAM.Config`); empty if its IPAM driver is another.
    pub pools: Vec<ListedPool>,
    /// The network that `IPAM.Options` names.
    pub ipam_network: Option<NetworkName>,
    /// Whether its driver is weft.
    pub driver: bool,
    /// Its endpoints (`Containers.*.EndpointID`) with their addresses.
    pub endpoints: BTreeMap<String, Vec<IpAddr>>,
}

/// A pool as Docker lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPool {
    /// `Subnet`.
    pub subnet: IpNet,
    /// `IPRange`.
    pub range: Option<IpNet>,
}

/// Faults that a listing shows and that [`State::handle_listing`] cannot mend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Networks of driver weft that Docker has and Weft has no record of: they must be created
    /// again.
    pub unknown_networks: BTreeSet<String>,
    /// Endpoints that Docker has, and whose link is missing: their containers must be restarted.
    pub missing_links: BTreeSet<String>,
}

/// Something that Docker does not list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Suspect {
    Network(String),
    Endpoint(String),
    /// An address of a pool, with its owner: another owner is another suspect.
    Lease(String, IpAddr, Option<String>),
    /// A pool, by the number of requests that are not accounted for.
    Requests(String, u32),
}

impl State {
    /// Removes the remains of a kill or of a lost answer:
    ///
    /// - every undo that is not being performed, at once;
    /// - a link of an endpoint that neither Docker nor the state knows, and an owner of this state's
    ///   that it does not know, at once: the state is stored before either is made;
    /// - an owner of a state that was lost, once Docker lists no network that this state does not
    ///   know: until then its container may be running;
    /// - a network, an endpoint, a container's address and a request for a pool that Docker has not
    ///   listed for [`SUSPECT_S`].
    ///
    /// Without an answer of Docker's only undos and this state's owners go, and the time of all others
    /// starts again. Call it after a start and
    /// every half minute or so; [`poll_undo`](State::poll_undo) then says what to perform.
    pub fn handle_listing(&mut self, listing: &Listing, now: Instant) -> Reconciled {
        self.retry_undo();
        self.take_back_owners(listing);
        let Some(networks) = &listing.networks else {
            self.volatile.suspects.clear();
            return Reconciled::default();
        };
        let endpoints: BTreeSet<&String> =
            networks.values().flat_map(|network| network.endpoints.keys()).collect();
        for link in &listing.links {
            let known = self.endpoints.get(link).is_some_and(|e| e.phase == Phase::Joined);
            let undo = Undo::RemoveLink { endpoint: link.clone() };
            if !known && !endpoints.contains(link) && !self.undo.contains(&undo) {
                self.take_back(undo);
            }
        }
        let gone = self.confirm(self.suspects(networks, &endpoints), now);
        for suspect in gone {
            self.remove(suspect);
        }
        let driver = networks.iter().filter(|(_, network)| network.driver);
        let unknown = driver.map(|(id, _)| id).filter(|id| !self.networks.contains_key(*id));
        let without = |id: &&&String| {
            let joined = self.endpoints.get(**id).is_some_and(|e| e.phase == Phase::Joined);
            joined && !listing.links.contains(**id)
        };
        Reconciled {
            unknown_networks: unknown.cloned().collect(),
            missing_links: endpoints.iter().filter(without).map(|id| (*id).clone()).collect(),
        }
    }

    fn take_back_owners(&mut self, listing: &Listing) {
        let leases = self.pools.values().flat_map(|pool| pool.leases.values());
        let of_endpoints = self.endpoints.values().flat_map(|endpoint| &endpoint.owners);
        let held: BTreeSet<&String> =
            leases.filter_map(|lease| lease.owner.as_ref()).chain(of_endpoints).collect();
        let is_whole = listing.networks.as_ref().is_some_and(|networks| self.knows_all(networks));
        let prefix = if is_whole { OWNER_PREFIX.to_owned() } else { self.owner_prefix() };
        let unknown: Vec<Undo> = listing
            .owners
            .iter()
            .filter(|(_, owner)| owner.starts_with(&prefix) && !held.contains(owner))
            .map(|(allocator, owner)| Undo::Release {
                allocator: allocator.clone(),
                owner: owner.clone(),
            })
            .filter(|undo| !self.undo.contains(undo))
            .collect();
        unknown.into_iter().for_each(|undo| self.take_back(undo));
    }

    /// Whether there is a record of each network and each pool.
    fn knows_all(&self, networks: &BTreeMap<String, ListedNetwork>) -> bool {
        networks.iter().all(|(id, network)| {
            let has_pool = || self.pools.values().any(|pool| network.uses(pool));
            (!network.driver || self.networks.contains_key(id))
                && (network.pools.is_empty() || has_pool())
        })
    }

    /// Everything that Docker does not list.
    fn suspects(
        &self,
        networks: &BTreeMap<String, ListedNetwork>,
        endpoints: &BTreeSet<&String>,
    ) -> BTreeSet<Suspect> {
        let mut found = BTreeSet::new();
        let gone = self.networks.keys().filter(|id| !networks.contains_key(*id));
        found.extend(gone.cloned().map(Suspect::Network));
        let gone = self.endpoints.keys().filter(|id| !endpoints.contains(id));
        found.extend(gone.cloned().map(Suspect::Endpoint));
        for (id, pool) in &self.pools {
            let users: Vec<&ListedNetwork> =
                networks.values().filter(|network| network.uses(pool)).collect();
            let used = u32::try_from(users.len()).unwrap_or(u32::MAX);
            if let Some(extra) = pool.requests.checked_sub(used).filter(|extra| *extra > 0) {
                found.insert(Suspect::Requests(id.clone(), extra));
            }
            let addresses: BTreeSet<&IpAddr> =
                users.iter().flat_map(|network| network.endpoints.values().flatten()).collect();
            for (address, lease) in &pool.leases {
                if matches!(lease.holder, Holder::Container(_)) && !addresses.contains(address) {
                    found.insert(Suspect::Lease(id.clone(), *address, lease.owner.clone()));
                }
            }
        }
        found
    }

    /// Those that have been suspect for long enough; remembers the others.
    fn confirm(&mut self, found: BTreeSet<Suspect>, now: Instant) -> Vec<Suspect> {
        let suspects = &mut self.volatile.suspects;
        suspects.retain(|suspect, _| found.contains(suspect));
        let mut gone = Vec::new();
        for suspect in found {
            let since = *suspects.entry(suspect.clone()).or_insert(now);
            if now.saturating_duration_since(since) >= Duration::from_secs(SUSPECT_S) {
                suspects.remove(&suspect);
                gone.push(suspect);
            }
        }
        gone
    }

    fn remove(&mut self, suspect: Suspect) {
        match suspect {
            Suspect::Network(id) => self.forget_network(&id),
            Suspect::Endpoint(id) => {
                let network = self.endpoints.get(&id).map(|endpoint| &endpoint.network);
                let network = network.and_then(|network| self.networks.get(network));
                if let Some(allocator) = network.map(|network| network.allocator.clone()) {
                    self.forget_endpoint(&id, &allocator);
                }
            }
            Suspect::Lease(pool, address, _) => self.forget_lease(&pool, address),
            Suspect::Requests(id, extra) => {
                let Some(pool) = self.pools.get_mut(&id) else { return };
                pool.requests = pool.requests.saturating_sub(extra);
                if pool.requests == 0 {
                    self.forget_pool(&id);
                }
            }
        }
    }
}

impl ListedNetwork {
    fn uses(&self, pool: &Pool) -> bool {
        let listed = ListedPool { subnet: pool.subnet, range: pool.range };
        let of = pool.network();
        let same = match &self.ipam_network {
            Some(network) => pool.named && of == Some(network),
            None => !pool.named || of.is_some_and(NetworkName::is_ready),
        };
        same && self.pools.contains(&listed)
    }
}
