//! `NetworkDriver.CreateNetwork` and `DeleteNetwork`.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;

use super::super::error::PluginError;
use super::super::names::NetworkName;
use super::super::options::{self, NetworkOptions, bad};
use super::super::requests::{AddressRequest, BackendError, NetworkInfo, NetworkRequest};
use super::super::wire::{CreateNetwork, IpamData, NetworkRef};
use super::pools::{ADDRESS_SPACE, not_a_range};
use super::{
    Action, Binding, NETWORKS_MAX, Network, Outcome, Pool, State, Step, Stepped, Undo, Work,
};

/// The most pools of a network.
const POOLS_PER_NETWORK_MAX: usize = 64;
/// The address space of `--ipam-driver null`.
const NULL_SPACE: &str = "null";

/// `CreateNetwork` waits for its network, then for the addresses that no container is to have.
#[derive(Clone, Debug)]
pub(super) struct NetworkWork {
    id: String,
    plan: Plan,
    guard: Option<Undo>,
    opened: Option<Opened>,
}

/// The request, read.
#[derive(Clone, Debug)]
struct Plan {
    name: Option<NetworkName>,
    internal: bool,
    external: bool,
    subnets: Vec<IpNet>,
    /// Ids of the pools of these subnets.
    pools: Vec<String>,
    fill: Fill,
}

/// The families of which `CreateEndpoint` chooses addresses.
#[derive(Clone, Copy, Debug, Default)]
struct Fill {
    v4: bool,
    v6: bool,
}

/// The network is open, and pools are being bound to it.
#[derive(Clone, Debug)]
struct Opened {
    info: NetworkInfo,
    /// Reserved addresses of the pools to be bound, which are still to be allocated.
    wanted: VecDeque<(String, IpAddr)>,
    /// Those that are allocated, with owner and guard.
    taken: Vec<(String, IpAddr, String, Undo)>,
}

impl State {
    pub(super) fn create_network(&mut self, request: &CreateNetwork, now: Instant) -> Stepped {
        self.volatile.retry.clear();
        options::engine_id("NetworkID", &request.network_id)?;
        let id = request.network_id.clone();
        let plan = self.plan(request, now)?;
        if let Some(old) = self.networks.get(&id) {
            let same = plan.network_name() == old.name && plan.subnets == old.subnets;
            let exists = PluginError::Exists { kind: "network", id };
            return if same { Ok(Step::done()) } else { Err(exists) };
        }
        if self.networks.len() >= NETWORKS_MAX {
            return Err(PluginError::TooMany { what: "Docker networks", limit: NETWORKS_MAX });
        }
        let name = plan.network_name();
        let guard = self.guard_network(&name);
        // Of the ready network no range is demanded, so that another subnet is answered with the
        // option that is missing.
        let ranges = if plan.name.is_some() { plan.subnets.clone() } else { Vec::new() };
        let (external, internal) = (plan.external, Some(plan.internal));
        let action = Action::OpenNetwork(NetworkRequest { name, ranges, external, internal });
        let work = NetworkWork { id, plan, guard, opened: None };
        Ok(Step::act(action, Work::Network(Box::new(work))))
    }

    fn plan(&self, request: &CreateNetwork, now: Instant) -> Result<Plan, PluginError> {
        let NetworkOptions { name, external, internal, ipv6, ipv4 } =
            NetworkOptions::of(&request.options)?;
        let (subnets, pools, fill) = (Vec::new(), Vec::new(), Fill::default());
        let mut plan = Plan { name, internal, external, subnets, pools, fill };
        for (data, v6) in [(&request.ipv4_data, false), (&request.ipv6_data, true)] {
            if data.len() > POOLS_PER_NETWORK_MAX {
                let why = format!("a network has at most {POOLS_PER_NETWORK_MAX} pools");
                return Err(bad("IPv4Data or IPv6Data", &data.len().to_string(), &why));
            }
            for data in data {
                self.plan_pool(&mut plan, data, v6, now)?;
            }
        }
        // The null driver of older engines knows no IPv6.
        plan.fill.v6 |= plan.fill.v4 && ipv6 && request.ipv6_data.is_empty();
        plan.fill.v4 &= ipv4;
        Ok(plan)
    }

    fn plan_pool(
        &self,
        plan: &mut Plan,
        data: &IpamData,
        v6: bool,
        now: Instant,
    ) -> Result<(), PluginError> {
        let field = if v6 { "IPv6Data.Pool" } else { "IPv4Data.Pool" };
        match data.address_space.as_str() {
            NULL_SPACE if v6 => plan.fill.v6 = true,
            NULL_SPACE => plan.fill.v4 = true,
            ADDRESS_SPACE => {
                let subnet = options::subnet(field, &data.pool, v6)?;
                let pools = self.pools_of(plan.name.as_ref(), subnet, now);
                if pools.is_empty() {
                    return Err(PluginError::UnknownPool { pool: subnet.to_string() });
                }
                plan.pools.extend(pools);
                plan.subnets.push(subnet);
            }
            _ if plan.external => plan.subnets.push(options::subnet(field, &data.pool, v6)?),
            _ => {
                let pool = options::short(&data.pool);
                return Err(PluginError::ForeignIpam { pool });
            }
        }
        Ok(())
    }

    /// The pools that `RequestPool` gave for a network: Docker repeats the subnet only, not the id. They are among
    /// those that it has asked for last. Those without a network are meant first.
    ///
    /// Without such, as after a restart, pools of several networks are none: Docker would take addresses of one
    /// network for containers of another.
    fn pools_of(&self, name: Option<&NetworkName>, subnet: IpNet, now: Instant) -> Vec<String> {
        let rank = |binding: &Binding| match &binding.network {
            network if Some(network) == name => 0,
            network if network.is_ready() => 1,
            _ => 2,
        };
        let of_subnet = self.pools.iter().filter(|(_, pool)| pool.subnet == subnet);
        let asked = of_subnet.clone().any(|(_, pool)| pool.is_in_creation(now));
        let is_meant = |pool: &Pool| !asked || pool.is_in_creation(now);
        let of_subnet = of_subnet.filter(|(_, pool)| is_meant(pool));
        let open = of_subnet.clone().filter(|(_, pool)| {
            pool.binding.is_none()
                && (name.is_none() || pool.planned.as_ref().is_none_or(|it| Some(it) == name))
        });
        let open: Vec<String> = open.map(|(id, _)| id.clone()).collect();
        if !open.is_empty() {
            return open;
        }
        let network = |pool: &Pool| pool.binding.as_ref().map(|binding| binding.network.clone());
        let mut networks = of_subnet.clone().map(|(_, pool)| network(pool));
        let first = networks.next();
        if !asked && networks.any(|other| Some(other) != first) {
            return Vec::new();
        }
        let best = of_subnet.min_by_key(|(_, pool)| pool.binding.as_ref().map(rank));
        best.map(|(id, _)| id.clone()).into_iter().collect()
    }

    pub(super) fn network_stepped(
        &mut self,
        mut work: NetworkWork,
        outcome: Result<Outcome, BackendError>,
    ) -> Stepped {
        let done = self.network_step(&mut work, outcome);
        match done {
            Ok(Some(action)) => Ok(Step::act(action, Work::Network(Box::new(work)))),
            Ok(None) => {
                self.add_network(work);
                Ok(Step::done())
            }
            Err(error) => {
                let taken = work.opened.into_iter().flat_map(|opened| opened.taken);
                for undo in taken.map(|(.., undo)| undo).chain(work.guard) {
                    self.take_back(undo);
                }
                Err(error)
            }
        }
    }

    /// Takes an outcome in. Returns the next action; `None` when all is done.
    fn network_step(
        &mut self,
        work: &mut NetworkWork,
        outcome: Result<Outcome, BackendError>,
    ) -> Result<Option<Action>, PluginError> {
        match (outcome?, &work.opened) {
            (Outcome::Network(info), None) => {
                let wanted = self.bindable(&work.plan, &info)?;
                work.opened = Some(Opened { info, wanted, taken: Vec::new() });
            }
            (Outcome::Address(address), Some(opened)) => {
                let last = opened.taken.last();
                if last.is_none_or(|(_, wanted, ..)| *wanted != address) {
                    return Err(PluginError::Internal("another address was reserved"));
                }
            }
            _ => return Err(PluginError::Internal("a network was answered with something else")),
        }
        let Some(opened) = &mut work.opened else { return Ok(None) };
        let Some((pool, address)) = opened.wanted.pop_front() else { return Ok(None) };
        let Some(range) = self.pools.get(&pool).map(|pool| pool.subnet) else {
            return Err(PluginError::UnknownPool { pool });
        };
        let allocator = opened.info.allocator.clone();
        let (owner, guard) = self.new_owner(&allocator);
        opened.taken.push((pool, address, owner.clone(), guard));
        let address = Some(address);
        let request = AddressRequest { allocator, range, address, owner, shared: true };
        Ok(Some(Action::Allocate(request)))
    }

    /// Whether the network fits the pools that Docker has; then the addresses to be reserved.
    fn bindable(
        &self,
        plan: &Plan,
        info: &NetworkInfo,
    ) -> Result<VecDeque<(String, IpAddr)>, PluginError> {
        let network = plan.network_name();
        let strange = plan.subnets.iter().find(|subnet| !info.ranges.contains(subnet));
        if let Some(subnet) = strange.copied() {
            return Err(match plan.name {
                Some(_) => not_a_range(subnet, network, &info.ranges),
                None => PluginError::NameNeeded { subnet },
            });
        }
        let mut wanted = VecDeque::new();
        for id in &plan.pools {
            let Some(pool) = self.pools.get(id) else {
                return Err(PluginError::UnknownPool { pool: id.clone() });
            };
            let subnet = pool.subnet;
            // Without the option the hosts would not agree on the network.
            if plan.name.is_none() && pool.network().is_some_and(|of| !of.is_ready()) {
                return Err(PluginError::NameNeeded { subnet });
            }
            let other = match &pool.binding {
                Some(of) => Some(&of.network).filter(|_| of.allocator != info.allocator),
                None => pool.planned.as_ref().filter(|planned| **planned != network),
            };
            if let Some(of) = other.cloned() {
                return Err(PluginError::OtherNetwork { subnet, of, network });
            }
            match &pool.binding {
                Some(_) => {}
                None => {
                    let open = pool.leases.keys().filter(|it| !info.gateways.contains(it));
                    wanted.extend(open.map(|address| (id.clone(), *address)));
                }
            }
        }
        Ok(wanted)
    }

    fn add_network(&mut self, work: NetworkWork) {
        let NetworkWork { id, plan, guard, opened } = work;
        let Some(Opened { info, taken, .. }) = opened else { return };
        let name = plan.network_name();
        for id in &plan.pools {
            if let Some(pool) = self.pools.get_mut(id) {
                pool.creation = None;
                pool.planned = None;
                let subnet = pool.subnet;
                pool.binding.get_or_insert_with(|| Binding::new(name.clone(), &info, subnet));
            }
        }
        for (pool, address, owner, guard) in taken {
            let lease = self.pools.get_mut(&pool).and_then(|pool| pool.leases.get_mut(&address));
            match lease {
                Some(lease) => {
                    lease.owner = Some(owner);
                    self.keep(&guard);
                }
                None => self.take_back(guard),
            }
        }
        if let Some(guard) = guard {
            self.keep(&guard);
        }
        let fill = plan.fill.ranges(&info.ranges);
        let NetworkInfo { allocator, .. } = info;
        let Plan { subnets, external, internal, .. } = plan;
        self.networks.insert(id, Network { name, allocator, subnets, fill, external, internal });
    }

    pub(super) fn delete_network(&mut self, request: &NetworkRef) -> Step {
        self.forget_network(&request.network_id);
        Step::done()
    }

    /// Forgets a network with all its endpoints.
    pub(super) fn forget_network(&mut self, id: &str) {
        let Some(network) = self.networks.get(id).cloned() else { return };
        let of_network = self.endpoints.iter().filter(|(_, endpoint)| endpoint.network == id);
        let endpoints: Vec<String> = of_network.map(|(id, _)| id.clone()).collect();
        for endpoint in endpoints {
            self.forget_endpoint(&endpoint, &network.allocator);
        }
        self.networks.remove(id);
        self.close_unused(&network.name);
    }
}

impl Plan {
    fn network_name(&self) -> NetworkName {
        self.name.clone().unwrap_or_else(NetworkName::ready)
    }
}

impl Fill {
    /// The first range of each family.
    fn ranges(self, ranges: &[IpNet]) -> Vec<IpNet> {
        let first = |v6| ranges.iter().find(|range| range.addr().is_ipv6() == v6).copied();
        let v4 = self.v4.then(|| first(false)).flatten();
        v4.into_iter().chain(self.v6.then(|| first(true)).flatten()).collect()
    }
}
