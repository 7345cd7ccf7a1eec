//! Random calls, kills between any two steps, and an engine that lists what it has.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use proptest::prelude::*;

use super::super::model::{READY_V4, READY_V6, World, net};
use super::super::wire::{
    CreateEndpoint, CreateNetwork, EndpointRef, GENERIC, Interface, IpamData, NetworkRef,
    ReleaseAddress, ReleasePool, RequestAddress, RequestPool,
};
use super::*;

const SUBNETS: [&str; 4] = ["", READY_V4, "10.40.0.0/16", "10.41.0.0/29"];
const NAMES: [&str; 4] = ["", "weft", "shop", "blog"];

/// A daemon with its plugin, either of which can be killed.
struct Sim {
    world: World,
    state: State,
    now: Instant,
    /// After how many more steps the plugin is killed.
    fuse: Option<u8>,
}

impl Sim {
    fn new() -> Self {
        let world = World::new();
        Self { state: world.load(), world, now: Instant::now(), fuse: None }
    }

    /// Whether the plugin goes on after this point.
    fn lives(&mut self) -> bool {
        match &mut self.fuse {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        }
    }

    /// Runs a call as the plugin does. `None` if it was killed.
    fn call(&mut self, call: Call) -> Option<Result<Answer, PluginError>> {
        let answer = self.steps(call);
        let finished = answer.is_some() && self.undo_all().is_some();
        if !finished {
            self.restart();
        }
        self.assert_covered();
        answer.filter(|_| finished)
    }

    fn steps(&mut self, call: Call) -> Option<Result<Answer, PluginError>> {
        let mut step = self.state.handle_call(call, self.now);
        loop {
            self.lives().then_some(())?;
            self.world.save(&self.state).unwrap();
            self.lives().then_some(())?;
            let (action, pending) = match step {
                Step::Done(answer) => return Some(answer),
                Step::Act(action, pending) => (action, pending),
            };
            let outcome = self.world.act(action);
            self.assert_covered();
            self.lives().then_some(())?;
            step = self.state.handle_outcome(pending, outcome, self.now);
        }
    }

    fn undo_all(&mut self) -> Option<()> {
        while let Some(undo) = self.state.poll_undo() {
            if self.state.begin_undo(&undo) {
                let success = self.world.undo(undo.clone()).is_ok();
                self.lives().then_some(())?;
                self.state.handle_undone(&undo, success);
            }
        }
        self.world.save(&self.state).unwrap();
        Some(())
    }

    fn restart(&mut self) {
        self.fuse = None;
        self.state = self.world.load();
        self.reconcile(None);
    }

    fn reconcile(&mut self, networks: Option<BTreeMap<String, ListedNetwork>>) -> Reconciled {
        let listing = Listing { networks, ..self.world.listing() };
        let reconciled = self.state.handle_listing(&listing, self.now);
        self.world.save(&self.state).unwrap();
        self.undo_all().unwrap();
        self.assert_covered();
        reconciled
    }

    /// Everything that the daemon holds for Docker is in the state on the disk, as a promise or as
    /// something to be taken back; and the other way round.
    fn assert_covered(&self) {
        let disk = self.world.load();
        for link in self.world.links.keys() {
            let joined = disk.endpoints.get(link).is_some_and(|e| e.phase == Phase::Joined);
            let undo = Undo::RemoveLink { endpoint: link.clone() };
            assert!(joined || disk.undo.contains(&undo), "link {link} in {disk:?}");
        }
        for network in self.world.networks.keys().filter(|name| !name.is_ready()) {
            let undo = Undo::CloseNetwork { network: network.clone() };
            assert!(disk.is_used(network) || disk.undo.contains(&undo), "{network} in {disk:?}");
        }
        let mut owners = BTreeMap::new();
        for pool in disk.pools.values() {
            for (address, lease) in &pool.leases {
                if let Some(owner) = &lease.owner {
                    owners.insert(owner.clone(), *address);
                }
            }
        }
        for endpoint in disk.endpoints.values() {
            let first = endpoint.addresses.len() - endpoint.owners.len();
            let taken = endpoint.addresses.iter().skip(first).map(IpNet::addr);
            owners.extend(endpoint.owners.iter().cloned().zip(taken));
        }
        for ((allocator, owner), held) in &self.world.held {
            let undo = Undo::Release { allocator: allocator.clone(), owner: owner.clone() };
            let known = owners.get(owner) == Some(&held.address);
            assert!(known || disk.undo.contains(&undo), "{owner} in {disk:?}");
        }
        for owner in owners.keys() {
            assert!(self.world.held.keys().any(|(_, held)| held == owner), "{owner} in {disk:?}");
        }
        for (id, endpoint) in &disk.endpoints {
            assert!(endpoint.phase == Phase::Created || self.world.links.contains_key(id));
            assert!(disk.networks.contains_key(&endpoint.network));
        }
    }

    /// Docker has nothing any more, and does not say so.
    fn assert_nothing_is_left(mut self) {
        self.fuse = None;
        self.world.broken = None;
        self.reconcile(Some(BTreeMap::new()));
        self.now += Duration::from_secs(SUSPECT_S);
        self.reconcile(Some(BTreeMap::new()));
        assert!(self.state.is_empty(), "{:?}", self.state);
        assert!(self.world.is_clean(), "{:?}", self.world);
    }
}

/// A call with fields from small sets, so that calls meet.
#[derive(Clone, Debug)]
enum Op {
    RequestPool { name: usize, subnet: usize, range: bool, v6: bool },
    ReleasePool(usize),
    Address { pool: usize, host: u8, gateway: bool, name: bool },
    ReleaseAddress { pool: usize, host: u8 },
    CreateNetwork { id: u8, name: usize, subnet: usize, space: usize, v6: bool },
    DeleteNetwork(u8),
    CreateEndpoint { network: u8, id: u8, subnet: usize, host: u8 },
    Join(u8, u8),
    Leave(u8, u8),
    DeleteEndpoint(u8, u8),
    Spaces,
    Advance(u8),
    Break(bool),
}

fn op() -> impl Strategy<Value = Op> {
    let (id, host) = (0..3_u8, 0..4_u8);
    prop_oneof![
        4 => (0..4_usize, 0..4_usize, any::<bool>(), any::<bool>()).prop_map(
            |(name, subnet, range, v6)| Op::RequestPool { name, subnet, range, v6 }
        ),
        2 => (0..6_usize).prop_map(Op::ReleasePool),
        6 => (0..6_usize, host.clone(), any::<bool>(), any::<bool>()).prop_map(
            |(pool, host, gateway, name)| Op::Address { pool, host, gateway, name }
        ),
        3 => (0..6_usize, host.clone()).prop_map(|(pool, host)| Op::ReleaseAddress { pool, host }),
        5 => (id.clone(), 0..4_usize, 0..4_usize, 0..4_usize, any::<bool>()).prop_map(
            |(id, name, subnet, space, v6)| Op::CreateNetwork { id, name, subnet, space, v6 }
        ),
        1 => id.clone().prop_map(Op::DeleteNetwork),
        5 => (id.clone(), id.clone(), 0..4_usize, host).prop_map(
            |(network, id, subnet, host)| Op::CreateEndpoint { network, id, subnet, host }
        ),
        5 => (id.clone(), id.clone()).prop_map(|(network, id)| Op::Join(network, id)),
        2 => (id.clone(), id.clone()).prop_map(|(network, id)| Op::Leave(network, id)),
        2 => (id.clone(), id).prop_map(|(network, id)| Op::DeleteEndpoint(network, id)),
        1 => Just(Op::Spaces),
        1 => (0..70_u8).prop_map(Op::Advance),
        1 => any::<bool>().prop_map(Op::Break),
    ]
}

/// An address of a subnet; empty for host 0.
fn host(subnet: IpNet, host: u8) -> String {
    let address = match (subnet.network(), host) {
        (_, 0) => return String::new(),
        (IpAddr::V4(net), host) => IpAddr::V4((u32::from(net) + u32::from(host)).into()),
        (IpAddr::V6(net), host) => IpAddr::V6((u128::from(net) + u128::from(host)).into()),
    };
    address.to_string()
}

impl Op {
    /// The call, and what else happens.
    fn call(self, sim: &mut Sim) -> Option<Call> {
        let pools: Vec<(String, IpNet)> =
            sim.state.pools.iter().map(|(id, pool)| (id.clone(), pool.subnet)).collect();
        let pool = |index: usize| {
            pools.get(index).cloned().unwrap_or_else(|| ("unknown".to_owned(), net(READY_V4)))
        };
        let reference = |network: u8, id: u8| EndpointRef {
            network_id: format!("net{network}"),
            endpoint_id: format!("endpoint{id}"),
            // Few containers, so that some are on several networks.
            sandbox_key: format!("sandbox{}", id % 2),
        };
        Some(match self {
            Self::RequestPool { name, subnet, range, v6 } => {
                let pool = if v6 && subnet > 0 { READY_V6 } else { SUBNETS[subnet] };
                Call::RequestPool(RequestPool {
                    pool: pool.to_owned(),
                    sub_pool: if range { "10.40.1.0/30".to_owned() } else { String::new() },
                    options: option(NAMES[name]),
                    v6,
                    ..RequestPool::default()
                })
            }
            Self::ReleasePool(index) => Call::ReleasePool(ReleasePool { pool_id: pool(index).0 }),
            Self::Address { pool: index, host: number, gateway, name } => {
                let (pool_id, subnet) = pool(index);
                let mut options = BTreeMap::new();
                let (kind, value) = ("RequestAddressType", "com.docker.network.gateway");
                gateway.then(|| options.insert(kind.to_owned(), value.to_owned()));
                let key = "com.docker.network.endpoint.name".to_owned();
                name.then(|| options.insert(key, format!("c{number}")));
                let address = host(subnet, number);
                Call::RequestAddress(RequestAddress { pool_id, address, options })
            }
            Self::ReleaseAddress { pool: index, host: number } => {
                let (pool_id, subnet) = pool(index);
                let address = host(subnet, number + 1);
                Call::ReleaseAddress(ReleaseAddress { pool_id, address })
            }
            Self::CreateNetwork { id, name, subnet, space, v6 } => {
                let mut user = option(NAMES[name]);
                (space == 3).then(|| user.insert("weft.ipam".to_owned(), "external".to_owned()));
                let address_space = ["weft", "weft", "null", "LocalDefault"][space].to_owned();
                let pool = SUBNETS[subnet.max(1)].to_owned();
                let v6_pool = v6.then(|| IpamData {
                    address_space: address_space.clone(),
                    pool: READY_V6.to_owned(),
                });
                Call::CreateNetwork(CreateNetwork {
                    network_id: format!("net{id}"),
                    options: [(GENERIC.to_owned(), serde_json::to_value(user).unwrap())].into(),
                    ipv4_data: vec![IpamData { address_space, pool }],
                    ipv6_data: v6_pool.into_iter().collect(),
                })
            }
            Self::DeleteNetwork(id) => {
                Call::DeleteNetwork(NetworkRef { network_id: format!("net{id}") })
            }
            Self::CreateEndpoint { network, id, subnet, host: number } => {
                let subnet = net(SUBNETS[subnet.max(1)]);
                let address = match host(subnet, number) {
                    address if address.is_empty() => address,
                    address => format!("{address}/{}", subnet.prefix_len()),
                };
                let EndpointRef { network_id, endpoint_id, .. } = reference(network, id);
                let interface = Interface { address, ..Interface::default() };
                let options = BTreeMap::new();
                Call::CreateEndpoint(CreateEndpoint { network_id, endpoint_id, interface, options })
            }
            Self::Join(network, id) => Call::Join(reference(network, id)),
            Self::Leave(network, id) => Call::Leave(reference(network, id)),
            Self::DeleteEndpoint(network, id) => Call::DeleteEndpoint(reference(network, id)),
            Self::Spaces => Call::DefaultAddressSpaces,
            Self::Advance(seconds) => {
                sim.now += Duration::from_secs(seconds.into());
                return None;
            }
            Self::Break(on) => {
                let (what, why) = ("reach the kernel".to_owned(), "test".to_owned());
                sim.world.broken = on.then_some(BackendError::Failed { what, why });
                return None;
            }
        })
    }
}

fn option(name: &str) -> BTreeMap<String, String> {
    let option = (!name.is_empty()).then(|| ("network".to_owned(), name.to_owned()));
    option.into_iter().collect()
}

#[test]
fn where_a_network_has_no_gateway_docker_keeps_any_free_address_for_its_own() {
    let mut sim = Sim::new();
    sim.world.networks.get_mut(&NetworkName::ready()).unwrap().gateways.clear();
    let pool = sim.call(Call::RequestPool(RequestPool::default())).unwrap().unwrap();
    let Answer::Pool { pool_id, data, .. } = pool else { panic!("{pool:?}") };
    assert!(data.is_empty(), "{data:?}");
    let ask = |options: &[(&str, &str)]| {
        let text = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let (pool_id, options) = (pool_id.clone(), options.iter().map(text).collect());
        Call::RequestAddress(RequestAddress { pool_id, address: String::new(), options })
    };
    let gateway = [("RequestAddressType", "com.docker.network.gateway")];
    // A container has the first address.
    let container = sim.call(ask(&[])).unwrap().unwrap();
    let kept = sim.call(ask(&gateway)).unwrap().unwrap();
    assert_ne!(container, kept);
    assert_eq!(sim.world.held.len(), 2);
}

/// Docker asks for a pool by its subnet alone, and takes its addresses from the pool that it got.
#[test]
fn a_network_is_not_created_over_the_pool_of_another() {
    let mut engine = Engine { sim: Sim::new(), networks: BTreeMap::new(), next: 0 };
    let subnet = SUBNETS[2];
    assert!(engine.create_network("shop", false, subnet).is_some());
    assert!(engine.create_network("blog", true, subnet).is_some());
    // This request gets the pool of shop.
    assert!(engine.create_network("blog", false, subnet).is_none());
    let network = |id: &str| {
        engine
            .sim
            .state
            .pools
            .values()
            .filter(move |pool| {
                pool.requests > 0
                    && pool.binding.as_ref().is_some_and(|it| it.network.as_str() == id)
            })
            .count()
    };
    assert_eq!((network("shop"), network("blog"), engine.networks.len()), (1, 1, 2));
    engine.sim.now += Duration::from_secs(CREATION_S);
    assert!(engine.create_network("shop", false, subnet).is_some());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn random_calls_and_kills_leak_nothing(
        script in prop::collection::vec((op(), prop::option::weighted(0.3, 0..9_u8)), 1..60),
    ) {
        let mut sim = Sim::new();
        for (op, fuse) in script {
            if let Some(call) = op.call(&mut sim) {
                sim.fuse = fuse;
                let is_release = call.is_release();
                let answer = sim.call(call);
                sim.fuse = None;
                prop_assert!(!is_release || answer.is_none_or(|answer| answer.is_ok()));
            }
        }
        sim.assert_nothing_is_left();
    }

    #[test]
    fn reconciliation_keeps_exactly_the_things_that_docker_lists(
        script in prop::collection::vec((task(), prop::option::weighted(0.2, 0..20_u8)), 1..40),
    ) {
        let mut engine = Engine { sim: Sim::new(), networks: BTreeMap::new(), next: 0 };
        for (task, fuse) in script {
            engine.sim.fuse = fuse;
            engine.perform(&task);
            engine.sim.fuse = None;
            engine.sim.now += Duration::from_secs(SUSPECT_S / 3);
            let listed = engine.list();
            let reconciled = engine.sim.reconcile(Some(listed));
            prop_assert_eq!(reconciled, Reconciled::default());
            engine.assert_kept();
        }
        engine.assert_exact();
        engine.sim.assert_nothing_is_left();
    }
}

/// An engine that goes through the steps of Docker's.
struct Engine {
    sim: Sim,
    networks: BTreeMap<String, EngineNetwork>,
    next: u32,
}

struct EngineNetwork {
    ipam_network: Option<NetworkName>,
    pool_id: String,
    subnet: IpNet,
    endpoints: BTreeMap<String, IpAddr>,
}

#[derive(Clone, Debug)]
enum Task {
    CreateNetwork {
        name: usize,
        ipam_name: bool,
        subnet: usize,
    },
    RemoveNetwork(usize),
    Start(usize),
    Stop(usize),
    /// The engine is killed, and forgets a container without Leave and DeleteEndpoint.
    Forget(usize),
}

fn task() -> impl Strategy<Value = Task> {
    prop_oneof![
        3 => (0..4_usize, any::<bool>(), 0..4_usize).prop_map(
            |(name, ipam_name, subnet)| Task::CreateNetwork { name, ipam_name, subnet }
        ),
        1 => (0..4_usize).prop_map(Task::RemoveNetwork),
        5 => (0..4_usize).prop_map(Task::Start),
        2 => (0..4_usize).prop_map(Task::Stop),
        1 => (0..4_usize).prop_map(Task::Forget),
    ]
}

impl Engine {
    /// The answer, if it arrives; a kill is an error to the engine.
    fn ask(&mut self, call: Call) -> Option<Answer> {
        self.sim.call(call)?.ok()
    }

    fn perform(&mut self, task: &Task) {
        let id = |index: usize| self.networks.keys().nth(index).cloned();
        match *task {
            Task::CreateNetwork { name, ipam_name, subnet } => {
                let _ = self.create_network(NAMES[name], ipam_name, SUBNETS[subnet]);
            }
            Task::RemoveNetwork(index) => {
                let Some(id) = id(index) else { return };
                if !self.networks[&id].endpoints.is_empty() {
                    return;
                }
                let network = self.networks.remove(&id).unwrap();
                let address = super::super::options::first_host(network.subnet).to_string();
                let pool_id = network.pool_id;
                let request = ReleaseAddress { pool_id: pool_id.clone(), address };
                self.ask(Call::ReleaseAddress(request));
                self.ask(Call::ReleasePool(ReleasePool { pool_id }));
                self.ask(Call::DeleteNetwork(NetworkRef { network_id: id }));
            }
            Task::Start(index) => {
                if let Some(id) = id(index) {
                    let _ = self.start(&id);
                }
            }
            Task::Stop(index) | Task::Forget(index) => {
                let Some(id) = id(index) else { return };
                let network = self.networks.get_mut(&id).unwrap();
                let Some((endpoint_id, address)) = network.endpoints.pop_first() else { return };
                let pool_id = network.pool_id.clone();
                let request = EndpointRef { network_id: id, endpoint_id, ..EndpointRef::default() };
                if matches!(task, Task::Stop(_)) {
                    self.ask(Call::Leave(request.clone()));
                    self.ask(Call::DeleteEndpoint(request));
                }
                let address = address.to_string();
                self.ask(Call::ReleaseAddress(ReleaseAddress { pool_id, address }));
            }
        }
    }

    fn create_network(&mut self, name: &str, ipam_name: bool, subnet: &str) -> Option<()> {
        let options = if ipam_name { option(name) } else { BTreeMap::new() };
        let ipam_network = options.get("network").map(|name| name.parse().unwrap());
        let pool = subnet.to_owned();
        self.ask(Call::DefaultAddressSpaces);
        let request = RequestPool { pool, options, ..RequestPool::default() };
        let Answer::Pool { pool_id, pool, data } = self.ask(Call::RequestPool(request))? else {
            unreachable!()
        };
        if data.is_empty() {
            let kind = ("RequestAddressType".to_owned(), "com.docker.network.gateway".to_owned());
            let (id, address) = (pool_id.clone(), String::new());
            let request = RequestAddress { pool_id: id, address, options: [kind].into() };
            if self.ask(Call::RequestAddress(request)).is_none() {
                self.ask(Call::ReleasePool(ReleasePool { pool_id }));
                return None;
            }
        }
        self.next += 1;
        let network_id = format!("net{}", self.next);
        let user = serde_json::to_value(option(name)).unwrap();
        let request = CreateNetwork {
            network_id: network_id.clone(),
            options: [(GENERIC.to_owned(), user)].into(),
            ipv4_data: vec![IpamData { address_space: "weft".to_owned(), pool: pool.clone() }],
            ipv6_data: Vec::new(),
        };
        if self.ask(Call::CreateNetwork(request)).is_none() {
            self.ask(Call::ReleasePool(ReleasePool { pool_id }));
            return None;
        }
        let (subnet, endpoints) = (net(&pool), BTreeMap::new());
        let network = EngineNetwork { ipam_network, pool_id, subnet, endpoints };
        self.networks.insert(network_id, network);
        Some(())
    }

    fn start(&mut self, network_id: &str) -> Option<()> {
        let pool_id = self.networks[network_id].pool_id.clone();
        let request = RequestAddress { pool_id: pool_id.clone(), ..RequestAddress::default() };
        let Answer::Address { address } = self.ask(Call::RequestAddress(request))? else {
            unreachable!()
        };
        self.next += 1;
        let (network_id, endpoint_id) = (network_id.to_owned(), format!("endpoint{}", self.next));
        let reference = EndpointRef {
            network_id: network_id.clone(),
            endpoint_id: endpoint_id.clone(),
            sandbox_key: endpoint_id.clone(),
        };
        let ip = net(&address).addr();
        let request = CreateEndpoint {
            network_id: network_id.clone(),
            endpoint_id: endpoint_id.clone(),
            interface: Interface { address, ..Interface::default() },
            options: BTreeMap::new(),
        };
        let created = self.ask(Call::CreateEndpoint(request));
        let joined = created.and_then(|_| self.ask(Call::Join(reference.clone())));
        if joined.is_none() {
            self.ask(Call::Leave(reference.clone()));
            self.ask(Call::DeleteEndpoint(reference));
            let address = ip.to_string();
            self.ask(Call::ReleaseAddress(ReleaseAddress { pool_id, address }));
            return None;
        }
        let network = self.networks.get_mut(&network_id).unwrap();
        let twice = network.endpoints.values().any(|other| *other == ip);
        assert!(!twice, "{ip} was given twice");
        network.endpoints.insert(endpoint_id, ip);
        Some(())
    }

    fn list(&self) -> BTreeMap<String, ListedNetwork> {
        let listed = |network: &EngineNetwork| ListedNetwork {
            pools: vec![ListedPool { subnet: network.subnet, range: None }],
            ipam_network: network.ipam_network.clone(),
            driver: true,
            endpoints: network
                .endpoints
                .iter()
                .map(|(id, address)| (id.clone(), vec![*address]))
                .collect(),
        };
        self.networks.iter().map(|(id, network)| (id.clone(), listed(network))).collect()
    }

    fn assert_kept(&self) {
        let state = self.sim.world.load();
        for (id, network) in &self.networks {
            assert!(state.networks.contains_key(id), "{id} in {state:?}");
            let pool = &state.pools[&network.pool_id];
            for (id, address) in &network.endpoints {
                assert_eq!(state.endpoints[id].phase, Phase::Joined);
                assert!(self.sim.world.links.contains_key(id));
                assert!(pool.leases.contains_key(address), "{address} in {state:?}");
            }
        }
    }

    /// After a while nothing is left that Docker does not list.
    fn assert_exact(&mut self) {
        let listed = self.list();
        self.sim.reconcile(Some(listed.clone()));
        self.sim.now += Duration::from_secs(SUSPECT_S);
        self.sim.reconcile(Some(listed));
        self.assert_kept();
        let state = &self.sim.state;
        let endpoints: usize = self.networks.values().map(|it| it.endpoints.len()).sum();
        let containers = state.pools.values().flat_map(|pool| pool.leases.values());
        let containers = containers.filter(|lease| matches!(lease.holder, Holder::Container(_)));
        assert_eq!(containers.count(), endpoints, "{state:?}");
        assert_eq!(state.endpoints.len(), endpoints, "{state:?}");
        assert_eq!(self.sim.world.links.len(), endpoints);
        assert_eq!(state.networks.len(), self.networks.len());
        let requests: u32 = state.pools.values().map(|pool| pool.requests).sum();
        assert_eq!(requests as usize, self.networks.len(), "{state:?}");
        assert!(state.undo.is_empty(), "{state:?}");
    }
}
