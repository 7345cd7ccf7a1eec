//! `IpamDriver.*`: pools and addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::super::error::PluginError;
use super::super::names::NetworkName;
use super::super::options::{self, bad, short};
use super::super::requests::{AddressRequest, BackendError, NetworkInfo, NetworkRequest};
use super::super::wire::{Answer, ReleaseAddress, ReleasePool, RequestAddress, RequestPool};
use super::{
    Action, Binding, Holder, LEASES_MAX, Lease, Outcome, POOLS_MAX, Pool, State, Step, Stepped,
    Undo, Work,
};

/// The name of both default address spaces. Since they are the same, engines from version 27 on do
/// not compare Weft's ranges with the host's routes.
pub const ADDRESS_SPACE: &str = "weft";
/// A request without a subnet that comes again within this time, in seconds, shows that the engine
/// has refused the range and would ask for ever.
pub const POOL_RETRY_S: u64 = 2;
/// The time between `RequestPool` and `CreateNetwork`, at most, in seconds.
pub const CREATION_S: u64 = 30;

/// The most calls of `GetDefaultAddressSpaces` that are remembered.
const CREDITS_MAX: u32 = 64;
const REQUEST_TYPE: &str = "RequestAddressType";
const GATEWAY: &str = "com.docker.network.gateway";
const ENDPOINT_NAME: &str = "com.docker.network.endpoint.name";
/// The longest name of a container that is kept, in bytes.
const CONTAINER_NAME_BYTES_MAX: usize = 255;

/// Notices an engine that refuses a range and asks again without limit. Engines before version 27
/// do so; later ones ask `GetDefaultAddressSpaces` before each request.
#[derive(Clone, Debug, Default)]
pub(super) struct RetryGuard {
    credits: u32,
    /// The last request without a subnet, its range, and when it was answered.
    last: Option<(Option<NetworkName>, IpNet, Instant)>,
}

impl RetryGuard {
    /// The engine has gone on, so it has not refused the range.
    pub(super) fn clear(&mut self) {
        self.last = None;
    }
}

/// `RequestPool` waits for its network.
#[derive(Clone, Debug)]
pub(super) struct PoolWork {
    named: Option<NetworkName>,
    subnet: Option<IpNet>,
    range: Option<IpNet>,
    v6: bool,
    guard: Option<Undo>,
    /// Whether the same request again would be a refusal.
    watched: bool,
}

/// `RequestAddress` waits for its address.
#[derive(Clone, Debug)]
pub(super) struct AddressWork {
    pool: String,
    holder: Holder,
    owner: String,
    guard: Undo,
}

impl State {
    pub(super) fn default_address_spaces(&mut self) -> Step {
        let credits = &mut self.volatile.retry.credits;
        *credits = (*credits + 1).min(CREDITS_MAX);
        Step::answer(Answer::AddressSpaces {
            local_default_address_space: ADDRESS_SPACE,
            global_default_address_space: ADDRESS_SPACE,
        })
    }

    pub(super) fn request_pool(&mut self, request: &RequestPool, now: Instant) -> Stepped {
        let watched = !self.take_credit();
        if !matches!(request.address_space.as_str(), "" | ADDRESS_SPACE) {
            let why = format!("Weft's address space is {ADDRESS_SPACE}");
            return Err(bad("AddressSpace", &request.address_space, &why));
        }
        let v6 = request.v6;
        let named = options::network_of_pool(&request.options)?;
        let subnet = match request.pool.as_str() {
            "" => None,
            text => Some(options::subnet("Pool", text, v6)?),
        };
        let range = match (request.sub_pool.as_str(), subnet) {
            ("", _) => None,
            (text, Some(subnet)) => Some(sub_range(text, subnet)?),
            (text, None) => return Err(bad("SubPool", text, "--ip-range needs --subnet")),
        };
        if let Some(subnet) = subnet {
            let wanted = |pool: &Pool| {
                pool.subnet == subnet
                    && pool.range == range
                    && pool.named == named.is_some()
                    && (named.is_none() || named.as_ref() == pool.network())
            };
            if let Some((id, pool)) = self.pools.iter_mut().find(|(_, pool)| wanted(pool)) {
                return pool.ask(id, now).map(Step::answer);
            }
        } else if watched
            && let Some((network, range, at)) = &self.volatile.retry.last
            && *network == named
            && range.addr().is_ipv6() == v6
            && now.saturating_duration_since(*at) < Duration::from_secs(POOL_RETRY_S)
        {
            return Err(PluginError::Refused { range: *range });
        }
        if self.pools.len() >= POOLS_MAX {
            return Err(PluginError::TooMany { what: "address pools", limit: POOLS_MAX });
        }
        let name = named.clone().unwrap_or_else(NetworkName::ready);
        // Without a name the subnet may be of a network that `CreateNetwork` will name.
        let ranges = subnet.filter(|_| named.is_some()).into_iter().collect();
        let guard = self.guard_network(&name);
        let action = NetworkRequest { name, ranges, external: false, internal: None };
        let work = PoolWork { named, subnet, range, v6, guard, watched };
        Ok(Step::act(Action::OpenNetwork(action), Work::Pool(work)))
    }

    pub(super) fn pool_opened(
        &mut self,
        work: PoolWork,
        outcome: Result<Outcome, BackendError>,
        now: Instant,
    ) -> Stepped {
        let guard = work.guard.clone();
        let result = match outcome {
            Ok(Outcome::Network(info)) => self.add_pool(work, &info, now),
            Ok(_) => Err(PluginError::Internal("the network was answered with something else")),
            Err(error) => Err(error.into()),
        };
        match (guard, &result) {
            (Some(guard), Ok(_)) => self.keep(&guard),
            (Some(guard), Err(_)) => self.take_back(guard),
            (None, _) => {}
        }
        result.map(Step::answer)
    }

    fn add_pool(
        &mut self,
        work: PoolWork,
        info: &NetworkInfo,
        now: Instant,
    ) -> Result<Answer, PluginError> {
        let PoolWork { named, subnet, range, v6, watched, .. } = work;
        let network = named.clone().unwrap_or_else(NetworkName::ready);
        let (subnet, bound) = match subnet {
            Some(subnet) => (subnet, info.ranges.contains(&subnet)),
            None => {
                let family = if v6 { "IPv6" } else { "IPv4" };
                let of_family = |range: &&IpNet| range.addr().is_ipv6() == v6;
                let found = info.ranges.iter().find(of_family);
                let network = network.clone();
                (*found.ok_or(PluginError::NoRange { network, family })?, true)
            }
        };
        if named.is_some() && !bound {
            return Err(not_a_range(subnet, network, &info.ranges));
        }
        if work.subnet.is_none() && watched {
            self.volatile.retry.last = Some((named.clone(), subnet, now));
        }
        let is_named = named.is_some();
        // `CreateNetwork` binds the pool to a network that there is not yet.
        let planned = named.filter(|_| !info.exists);
        let binding = (bound && info.exists).then(|| Binding::new(network, info, subnet));
        let of = binding.as_ref().map(|binding| &binding.network).or(planned.as_ref());
        let of = of.map_or("", NetworkName::as_str);
        let id = match range {
            Some(range) => format!("{ADDRESS_SPACE},{of},{subnet},{range}"),
            None => format!("{ADDRESS_SPACE},{of},{subnet}"),
        };
        let leases = BTreeMap::new();
        let (named, requests, creation) = (is_named, 0, None);
        let new = Pool { subnet, range, named, planned, binding, requests, leases, creation };
        let pool = self.pools.entry(id.clone()).or_insert(new);
        pool.named |= named;
        pool.ask(&id, now)
    }

    pub(super) fn release_pool(&mut self, request: &ReleasePool) -> Step {
        self.volatile.retry.clear();
        if let Some(pool) = self.pools.get_mut(&request.pool_id) {
            pool.requests = pool.requests.saturating_sub(1);
            pool.creation = None;
            if pool.requests == 0 {
                self.forget_pool(&request.pool_id);
            }
        }
        Step::done()
    }

    /// Forgets a pool, and with it all addresses that Docker still holds in it.
    pub(super) fn forget_pool(&mut self, id: &str) {
        let Some(pool) = self.pools.remove(id) else { return };
        let Some(binding) = pool.binding else { return };
        for owner in pool.leases.into_values().filter_map(|lease| lease.owner) {
            self.take_back(Undo::Release { allocator: binding.allocator.clone(), owner });
        }
        self.close_unused(&binding.network);
    }

    pub(super) fn request_address(&mut self, request: &RequestAddress, now: Instant) -> Stepped {
        self.volatile.retry.clear();
        let Some(pool) = self.pools.get_mut(&request.pool_id) else {
            return Err(PluginError::UnknownPool { pool: short(&request.pool_id) });
        };
        let asked = pool.read(request, now)?;
        if let Some(address) = asked.address
            && let Some(lease) = pool.leases.get_mut(&address)
        {
            return match (&mut lease.holder, &asked.holder) {
                (Holder::Reserved(times), Holder::Reserved(_)) => {
                    *times = times.saturating_add(1);
                    Ok(Step::answer(pool.answer(address)))
                }
                // The engine's record of the name was lost in between.
                (Holder::Container(Some(old)), Holder::Container(Some(new))) if old == new => {
                    Ok(Step::answer(pool.answer(address)))
                }
                _ => Err(PluginError::InUse { address }),
            };
        }
        let Asked { address, holder } = asked;
        let shared = matches!(holder, Holder::Reserved(_));
        let local = match (&pool.binding, shared) {
            (None, true) => true,
            (Some(binding), true) => binding.gateway == address,
            (None, false) => return Err(PluginError::Unbound { subnet: pool.subnet }),
            (Some(_), false) => false,
        };
        if let Some(address) = address.filter(|_| local) {
            pool.leases.insert(address, Lease { owner: None, holder });
            return Ok(Step::answer(pool.answer(address)));
        }
        let Some(allocator) = pool.binding.as_ref().map(|binding| binding.allocator.clone()) else {
            return Err(PluginError::Unbound { subnet: pool.subnet });
        };
        let range = pool.range.filter(|_| address.is_none()).unwrap_or(pool.subnet);
        if self.pools.values().map(|pool| pool.leases.len()).sum::<usize>() >= LEASES_MAX {
            return Err(PluginError::TooMany { what: "addresses for Docker", limit: LEASES_MAX });
        }
        let (owner, guard) = self.new_owner(&allocator);
        let pool = request.pool_id.clone();
        let work = AddressWork { pool, holder, owner: owner.clone(), guard };
        let request = AddressRequest { allocator, range, address, owner, shared };
        Ok(Step::act(Action::Allocate(request), Work::Address(work)))
    }

    pub(super) fn address_allocated(
        &mut self,
        work: AddressWork,
        outcome: Result<Outcome, BackendError>,
    ) -> Stepped {
        let AddressWork { pool: id, holder, owner, guard } = work;
        let result = match (outcome, self.pools.get_mut(&id)) {
            (Ok(Outcome::Address(address)), Some(pool)) => pool.lease(address, holder, owner),
            (Ok(_), None) => Err(PluginError::UnknownPool { pool: short(&id) }),
            (Ok(_), _) => Err(PluginError::Internal("an address was answered with something else")),
            (Err(error), _) => Err(error.into()),
        };
        match &result {
            Ok(_) => self.keep(&guard),
            Err(_) => self.take_back(guard),
        }
        result.map(Step::answer)
    }

    pub(super) fn release_address(&mut self, request: &ReleaseAddress) -> Step {
        // A text that is no address is held by nobody.
        let Ok(address) = request.address.parse::<IpAddr>() else { return Step::done() };
        let Some(pool) = self.pools.get_mut(&request.pool_id) else { return Step::done() };
        match pool.leases.get_mut(&address).map(|lease| &mut lease.holder) {
            Some(Holder::Reserved(times)) if *times > 1 => *times -= 1,
            Some(Holder::Reserved(_)) => self.forget_lease(&request.pool_id, address),
            Some(Holder::Container(_)) => {
                // An engine that was killed sends no Leave and no DeleteEndpoint. The endpoint goes
                // before its address, which any host may give to another at once.
                if let Some(of) = pool.binding.as_ref().map(|binding| binding.allocator.clone()) {
                    self.forget_holder(&of, address);
                }
                self.forget_lease(&request.pool_id, address);
            }
            None => {}
        }
        Step::done()
    }

    pub(super) fn forget_lease(&mut self, pool: &str, address: IpAddr) {
        let Some(pool) = self.pools.get_mut(pool) else { return };
        let owner = pool.leases.remove(&address).and_then(|lease| lease.owner);
        if let (Some(owner), Some(binding)) = (owner, &pool.binding) {
            let allocator = binding.allocator.clone();
            self.take_back(Undo::Release { allocator, owner });
        }
    }

    fn take_credit(&mut self) -> bool {
        let credits = &mut self.volatile.retry.credits;
        let had = *credits > 0;
        *credits = credits.saturating_sub(1);
        had
    }
}

impl Binding {
    pub(super) fn new(network: NetworkName, info: &NetworkInfo, subnet: IpNet) -> Self {
        let gateway = info.gateways.iter().find(|gateway| subnet.contains(*gateway)).copied();
        Self { network, allocator: info.allocator.clone(), gateway }
    }
}

/// A `RequestAddress`, read.
struct Asked {
    address: Option<IpAddr>,
    holder: Holder,
}

impl Pool {
    /// The network that it belongs to, or is to belong to.
    pub(super) fn network(&self) -> Option<&NetworkName> {
        self.binding.as_ref().map(|binding| &binding.network).or(self.planned.as_ref())
    }

    /// Docker asks for the pool once more.
    fn ask(&mut self, id: &str, now: Instant) -> Result<Answer, PluginError> {
        self.requests = self.requests.checked_add(1).ok_or(PluginError::TooMany {
            what: "requests for one pool",
            limit: u32::MAX as usize,
        })?;
        self.creation = Some(now);
        let mut data = BTreeMap::new();
        if let Some(gateway) = self.binding.as_ref().and_then(|binding| binding.gateway) {
            data.insert(GATEWAY, self.with_prefix(gateway));
        }
        Ok(Answer::Pool { pool_id: id.to_owned(), pool: self.subnet.to_string(), data })
    }

    /// Whether Docker has asked for it a moment ago, and has not created its network yet.
    pub(super) fn is_in_creation(&self, now: Instant) -> bool {
        let limit = Duration::from_secs(CREATION_S);
        self.creation.is_some_and(|at| now.saturating_duration_since(at) < limit)
    }

    fn read(&self, request: &RequestAddress, now: Instant) -> Result<Asked, PluginError> {
        let subnet = self.subnet;
        let mut address = match request.address.as_str() {
            "" => None,
            text => Some(options::address("Address", text)?),
        };
        if let Some(address) = address
            && !options::is_host(address, subnet)
        {
            return Err(PluginError::Outside { address, subnet });
        }
        let name = request.options.get(ENDPOINT_NAME).filter(|name| !name.is_empty());
        if let Some(name) = name
            && name.len() > CONTAINER_NAME_BYTES_MAX
        {
            return Err(bad("Options", name, "the container's name is too long"));
        }
        let is_gateway = request.options.get(REQUEST_TYPE).is_some_and(|of| of == GATEWAY);
        let is_auxiliary =
            address.is_some() && self.is_in_creation(now) && request.options.is_empty();
        let holder = if is_gateway || is_auxiliary {
            Holder::Reserved(1)
        } else {
            Holder::Container(name.cloned())
        };
        if is_gateway && address.is_none() {
            // A network without a gateway gives any free address: containers are never told of it.
            address = match &self.binding {
                Some(binding) => binding.gateway,
                None => Some(options::first_host(subnet)),
            };
        }
        Ok(Asked { address, holder })
    }

    /// Records an address that the daemon has allocated.
    fn lease(
        &mut self,
        address: IpAddr,
        holder: Holder,
        owner: String,
    ) -> Result<Answer, PluginError> {
        if !options::is_host(address, self.subnet) {
            return Err(PluginError::Outside { address, subnet: self.subnet });
        }
        if self.leases.contains_key(&address) {
            return Err(PluginError::InUse { address });
        }
        self.leases.insert(address, Lease { owner: Some(owner), holder });
        Ok(self.answer(address))
    }

    fn answer(&self, address: IpAddr) -> Answer {
        Answer::Address { address: self.with_prefix(address) }
    }

    fn with_prefix(&self, address: IpAddr) -> String {
        format!("{address}/{}", self.subnet.prefix_len())
    }
}

fn sub_range(text: &str, subnet: IpNet) -> Result<IpNet, PluginError> {
    let range = options::range("SubPool", text, subnet.addr().is_ipv6())?;
    if subnet.contains(&range) {
        return Ok(range);
    }
    Err(bad("SubPool", text, &format!("--ip-range must lie in --subnet {subnet}")))
}

pub(super) fn not_a_range(subnet: IpNet, network: NetworkName, ranges: &[IpNet]) -> PluginError {
    let ranges: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    PluginError::NotARange { subnet, network, ranges: ranges.join(", ") }
}
