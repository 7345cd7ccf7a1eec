//! `NetworkDriver.CreateEndpoint`, `Join`, `Leave`, `DeleteEndpoint`, `EndpointOperInfo`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use ipnet::IpNet;

use super::super::error::PluginError;
use super::super::names::{self, NetworkName};
use super::super::options::{self, Chosen};
use super::super::requests::{AddressRequest, BackendError, Link, LinkRequest};
use super::super::wire::{
    Answer, CreateEndpoint, EndpointRef, Interface, InterfaceName, ON_LINK, StaticRoute,
};
use super::{
    Action, ENDPOINTS_MAX, Endpoint, Outcome, Phase, Plugged, Pool, State, Step, Stepped, Undo,
    Work,
};

/// The longest name of a link, in bytes (IFNAMSIZ less the final zero).
const INTERFACE_NAME_BYTES_MAX: usize = 15;
/// The longest key of a container, in bytes: engines' keys are paths of namespaces.
const SANDBOX_KEY_BYTES_MAX: usize = 1_024;
/// Containers' links are named eth0, eth1, and so on.
const DST_PREFIX: &str = "eth";
/// The most routes of an endpoint.
const ROUTES_MAX: usize = 64;

/// `CreateEndpoint` waits for addresses.
#[derive(Clone, Debug)]
pub(super) struct EndpointWork {
    id: String,
    /// The fields that the engine has chosen.
    asked: Interface,
    endpoint: Endpoint,
    allocator: NetworkName,
    /// Ranges from which addresses are still to be taken; the first is being waited for.
    fill: VecDeque<IpNet>,
    guards: Vec<Undo>,
}

/// `Join` waits for its link.
#[derive(Clone, Debug)]
pub(super) struct JoinWork {
    endpoint: String,
    sandbox: String,
    guard: Option<Undo>,
}

impl State {
    pub(super) fn create_endpoint(&mut self, request: &CreateEndpoint) -> Stepped {
        options::engine_id("NetworkID", &request.network_id)?;
        options::engine_id("EndpointID", &request.endpoint_id)?;
        let id = request.endpoint_id.clone();
        let chosen = Chosen::of(&request.interface)?;
        let wanted_mac = options::mac_of_endpoint(&request.options)?;
        let Some(network) = self.networks.get(&request.network_id) else {
            return Err(PluginError::UnknownNetwork { network: request.network_id.clone() });
        };
        let addresses: Vec<IpNet> = chosen.v4.into_iter().chain(chosen.v6).collect();
        let own = network.subnets.iter().chain(&network.fill);
        let is_own = |net: &IpNet| own.clone().any(|range| options::is_host(net.addr(), *range));
        if let Some(net) = addresses.iter().find(|net| !is_own(net)) {
            let subnet = network.subnets.iter().chain(&network.fill);
            let of_family = |range: &&IpNet| range.addr().is_ipv6() == net.addr().is_ipv6();
            return Err(match subnet.copied().find(|range| of_family(&range)) {
                Some(subnet) => PluginError::Outside { address: net.addr(), subnet },
                None => PluginError::NoRange {
                    network: network.name.clone(),
                    family: if net.addr().is_ipv6() { "IPv6" } else { "IPv4" },
                },
            });
        }
        let mac = chosen.mac.or(wanted_mac);
        if let Some(old) = self.endpoints.get(&id) {
            let same = old.network == request.network_id
                && addresses.iter().all(|address| old.addresses.contains(address))
                && mac.is_none_or(|mac| mac == old.mac);
            return if same {
                Ok(Step::answer(old.filled(&request.interface)))
            } else {
                Err(PluginError::Exists { kind: "endpoint", id })
            };
        }
        if self.endpoints.len() >= ENDPOINTS_MAX {
            return Err(PluginError::TooMany { what: "Docker endpoints", limit: ENDPOINTS_MAX });
        }
        let lacks = |range: &&IpNet| {
            !addresses.iter().any(|net| net.addr().is_ipv6() == range.addr().is_ipv6())
        };
        let fill: VecDeque<IpNet> = network.fill.iter().filter(lacks).copied().collect();
        let allocator = network.allocator.clone();
        let endpoint = Endpoint {
            network: request.network_id.clone(),
            mac: mac.unwrap_or_else(|| names::made_mac(&id)),
            addresses,
            owners: Vec::new(),
            phase: Phase::Created,
            sandbox: String::new(),
        };
        let asked = request.interface.clone();
        let work = EndpointWork { id, asked, endpoint, allocator, fill, guards: Vec::new() };
        Ok(self.fill_or_add(work))
    }

    /// Asks for the next address that is missing, or records the endpoint.
    fn fill_or_add(&mut self, mut work: EndpointWork) -> Step {
        if let Some(range) = work.fill.front().copied() {
            let (owner, guard) = self.new_owner(&work.allocator);
            work.guards.push(guard);
            work.endpoint.owners.push(owner.clone());
            let allocator = work.allocator.clone();
            let (address, shared) = (None, false);
            let request = AddressRequest { allocator, range, address, owner, shared };
            return Step::act(Action::Allocate(request), Work::Endpoint(Box::new(work)));
        }
        let EndpointWork { id, asked, endpoint, allocator, guards, .. } = work;
        if !self.networks.contains_key(&endpoint.network) {
            guards.into_iter().for_each(|guard| self.take_back(guard));
            return Step::Done(Err(PluginError::UnknownNetwork { network: endpoint.network }));
        }
        // Docker gives an address of a network twice only after it has forgotten the first owner,
        // as an engine that was killed does.
        let stale = |other: &Endpoint| {
            other.network == endpoint.network
                && other.addresses.iter().any(|net| endpoint.addresses.contains(net))
        };
        let stale: Vec<String> =
            self.endpoints.iter().filter(|(_, e)| stale(e)).map(|(id, _)| id.clone()).collect();
        stale.iter().for_each(|id| self.forget_endpoint(id, &allocator));
        guards.iter().for_each(|guard| self.keep(guard));
        let answer = endpoint.filled(&asked);
        self.endpoints.insert(id, endpoint);
        Step::answer(answer)
    }

    pub(super) fn endpoint_stepped(
        &mut self,
        mut work: EndpointWork,
        outcome: Result<Outcome, BackendError>,
    ) -> Stepped {
        let error = match (outcome, work.fill.pop_front()) {
            (Ok(Outcome::Address(address)), Some(range)) if options::is_host(address, range) => {
                match IpNet::new(address, range.prefix_len()) {
                    Ok(net) => {
                        work.endpoint.addresses.push(net);
                        return Ok(self.fill_or_add(work));
                    }
                    Err(_) => PluginError::Internal("a range of the other family was filled"),
                }
            }
            (Ok(Outcome::Address(address)), Some(subnet)) => {
                PluginError::Outside { address, subnet }
            }
            (Ok(_), _) => PluginError::Internal("an endpoint was answered with something else"),
            (Err(error), _) => error.into(),
        };
        work.guards.into_iter().for_each(|guard| self.take_back(guard));
        Err(error)
    }

    pub(super) fn join(&mut self, request: &EndpointRef) -> Stepped {
        let id = endpoint_id(request)?;
        let (endpoint, network) = self.find(request)?;
        let sandbox = sandbox_key(request)?;
        self.check_apart((&id, endpoint), &network, &sandbox)?;
        let link = LinkRequest {
            endpoint: id.clone(),
            network,
            mac: endpoint.mac,
            addresses: endpoint.addresses.clone(),
            sandbox: sandbox.clone(),
        };
        // A second Join must not remove the link of the first when it fails.
        let fresh = endpoint.phase == Phase::Created;
        let guard = fresh.then(|| self.guard(Undo::RemoveLink { endpoint: id.clone() }));
        let work = JoinWork { endpoint: id, sandbox, guard };
        Ok(Step::act(Action::PrepareLink(link), Work::Join(work)))
    }

    /// Refuses a container whose other network of Docker's is the same one of Weft's, or leads to the same addresses:
    /// it would reach them on one of the two.
    fn check_apart(
        &self,
        (id, new): (&str, &Endpoint),
        network: &NetworkName,
        sandbox: &str,
    ) -> Result<(), PluginError> {
        let overlap =
            |it: &IpNet, net: &IpNet| it.contains(&net.network()) || net.contains(&it.network());
        let overlaps = |other: &Endpoint| {
            other.addresses.iter().any(|it| new.addresses.iter().any(|net| overlap(it, net)))
        };
        let is_beside = |(other_id, other): &(&String, &Endpoint)| {
            other.phase == Phase::Joined
                && !sandbox.is_empty()
                && other.sandbox == sandbox
                && *other_id != id
        };
        for (_, other) in self.endpoints.iter().filter(is_beside) {
            let Some(first) = self.networks.get(&other.network).map(|it| &it.name) else {
                continue;
            };
            if first == network {
                return Err(PluginError::SameNetwork { network: network.clone() });
            }
            if overlaps(other) {
                let (first, second) = (first.clone(), network.clone());
                return Err(PluginError::Overlap { first, second });
            }
        }
        Ok(())
    }

    pub(super) fn joined(
        &mut self,
        work: JoinWork,
        outcome: Result<Outcome, BackendError>,
    ) -> Stepped {
        let JoinWork { endpoint: id, sandbox, guard } = work;
        let result = match (outcome, self.endpoints.get_mut(&id)) {
            (Ok(Outcome::Link(link)), Some(endpoint)) => endpoint.join(link, sandbox),
            (Ok(_), None) => Err(PluginError::UnknownEndpoint { endpoint: id.clone() }),
            (Ok(_), _) => Err(PluginError::Internal("a link was answered with something else")),
            (Err(error), _) => Err(error.into()),
        };
        match (guard, &result) {
            (Some(guard), Ok(_)) => self.keep(&guard),
            (Some(_), Err(_)) => self.unplug(&id),
            (None, _) => {}
        }
        result.map(Step::answer)
    }

    pub(super) fn leave(&mut self, request: &EndpointRef) -> Step {
        let id = &request.endpoint_id;
        if let Some(endpoint) = self.endpoints.get_mut(id)
            && endpoint.network == request.network_id
            && endpoint.phase == Phase::Joined
        {
            endpoint.phase = Phase::Created;
            endpoint.sandbox.clear();
            self.unplug(id);
        }
        Step::done()
    }

    pub(super) fn delete_endpoint(&mut self, request: &EndpointRef) -> Step {
        let id = &request.endpoint_id;
        let of = self.endpoints.get(id).map(|endpoint| endpoint.network.as_str());
        if of == Some(&request.network_id)
            && let Some(network) = self.networks.get(&request.network_id)
        {
            let allocator = network.allocator.clone();
            self.forget_endpoint(id, &allocator);
        }
        Step::done()
    }

    pub(super) fn endpoint_info(&mut self, request: &EndpointRef) -> Stepped {
        let endpoint = endpoint_id(request)?;
        if self.find(request).is_err() {
            return Ok(Step::answer(Answer::Info { value: BTreeMap::new() }));
        }
        Ok(Step::act(Action::LinkFacts { endpoint }, Work::Facts))
    }

    /// Forgets an endpoint; removes its link and releases the addresses that it has taken itself. Its network is
    /// still known.
    pub(super) fn forget_endpoint(&mut self, id: &str, allocator: &NetworkName) {
        let Some(phase) = self.endpoints.get(id).map(|endpoint| endpoint.phase) else { return };
        match phase {
            Phase::Joined => self.unplug(id),
            // A Join may be under way, or the removal of the link has failed.
            Phase::Created => {
                if self.undo.contains(&Undo::RemoveLink { endpoint: id.to_owned() }) {
                    self.note_plugged(id);
                }
            }
        }
        let owners = self.endpoints.remove(id).map(|endpoint| endpoint.owners);
        for owner in owners.into_iter().flatten() {
            self.take_back(Undo::Release { allocator: allocator.clone(), owner });
        }
    }

    /// Removes an endpoint's link.
    fn unplug(&mut self, id: &str) {
        self.note_plugged(id);
        self.take_back(Undo::RemoveLink { endpoint: id.to_owned() });
    }

    /// An endpoint's link is to be removed, and its addresses and network are to go after it.
    fn note_plugged(&mut self, id: &str) {
        let Some(endpoint) = self.endpoints.get(id) else { return };
        let Some(network) = self.networks.get(&endpoint.network) else { return };
        let has = |address: IpAddr| endpoint.addresses.iter().any(|net| net.addr() == address);
        let is_its = |pool: &&Pool| {
            pool.binding.as_ref().is_some_and(|binding| binding.allocator == network.allocator)
        };
        let leases = self.pools.values().filter(is_its).flat_map(|pool| pool.leases.iter());
        let leases = leases.filter(|(address, _)| has(**address));
        let leased = leases.filter_map(|(_, lease)| lease.owner.as_ref());
        let owners: Vec<String> = endpoint.owners.iter().chain(leased).cloned().collect();
        let network = network.name.clone();
        let new = || Plugged { network, owners: BTreeSet::new() };
        self.plugged.entry(id.to_owned()).or_insert_with(new).owners.extend(owners);
    }

    /// Forgets the endpoint that has an address of this allocator.
    pub(super) fn forget_holder(&mut self, allocator: &NetworkName, address: IpAddr) {
        let is_of = |endpoint: &Endpoint| {
            let network = self.networks.get(&endpoint.network);
            network.is_some_and(|network| network.allocator == *allocator && !network.external)
                && endpoint.addresses.iter().any(|net| net.addr() == address)
        };
        let holder = self.endpoints.iter().find(|(_, endpoint)| is_of(endpoint));
        if let Some(id) = holder.map(|(id, _)| id.clone()) {
            self.forget_endpoint(&id, allocator);
        }
    }

    fn find(&self, request: &EndpointRef) -> Result<(&Endpoint, NetworkName), PluginError> {
        let network = self.networks.get(&request.network_id);
        let Some(network) = network else {
            return Err(PluginError::UnknownNetwork { network: request.network_id.clone() });
        };
        let endpoint = self.endpoints.get(&request.endpoint_id);
        let endpoint = endpoint.filter(|endpoint| endpoint.network == request.network_id);
        endpoint
            .map(|endpoint| (endpoint, network.name.clone()))
            .ok_or_else(|| PluginError::UnknownEndpoint { endpoint: request.endpoint_id.clone() })
    }
}

impl Endpoint {
    fn address(&self, v6: bool) -> Option<IpNet> {
        self.addresses.iter().find(|net| net.addr().is_ipv6() == v6).copied()
    }

    /// The answer to a request: the fields that it left empty.
    fn filled(&self, request: &Interface) -> Answer {
        let text = |given: &str, v6| {
            let own = self.address(v6).filter(|_| given.is_empty());
            own.map(|net| net.to_string()).unwrap_or_default()
        };
        let mac = if request.mac_address.is_empty() { self.mac.to_string() } else { String::new() };
        let interface = Interface {
            address: text(&request.address, false),
            address_ipv6: text(&request.address_ipv6, true),
            mac_address: mac,
        };
        Answer::Endpoint { interface }
    }

    /// The link is ready for a container.
    fn join(&mut self, link: Link, sandbox: String) -> Result<Answer, PluginError> {
        let Link { interface, ranges } = link;
        if interface.is_empty() || interface.len() > INTERFACE_NAME_BYTES_MAX {
            return Err(PluginError::Internal("a link's name has not 1 to 15 bytes"));
        }
        self.phase = Phase::Joined;
        self.sandbox = sandbox;
        let beyond = |range: &&IpNet| {
            let own = self.address(range.addr().is_ipv6());
            own.is_some_and(|own| own.trunc() != **range)
        };
        let route = |range: &IpNet| StaticRoute {
            destination: range.to_string(),
            route_type: ON_LINK,
            next_hop: "",
        };
        let static_routes = ranges.iter().filter(beyond).take(ROUTES_MAX).map(route).collect();
        let interface_name = InterfaceName { src_name: interface, dst_prefix: DST_PREFIX };
        Ok(Answer::Joined { interface_name, static_routes })
    }
}

fn endpoint_id(request: &EndpointRef) -> Result<String, PluginError> {
    options::engine_id("NetworkID", &request.network_id)?;
    options::engine_id("EndpointID", &request.endpoint_id)?;
    Ok(request.endpoint_id.clone())
}

/// The engine's key of a container; empty if it gives none.
fn sandbox_key(request: &EndpointRef) -> Result<String, PluginError> {
    let key = &request.sandbox_key;
    if key.len() > SANDBOX_KEY_BYTES_MAX {
        let why = format!("it is longer than {SANDBOX_KEY_BYTES_MAX} bytes");
        return Err(options::bad("SandboxKey", key, &why));
    }
    Ok(key.clone())
}
