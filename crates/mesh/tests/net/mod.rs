//! An in-memory network of hosts for tests. Links keep order and have individual delays; the two ends see a cut
//! at different times. Hosts crash between any two outputs, then restart from the state that they last
//! persisted, with their containers still attached.
#![allow(clippy::unwrap_used, clippy::print_stderr, dead_code, unreachable_pub)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use weft_crypto::PeerId;
use weft_mesh::{
    AddressError, Change, Config, EndpointInfo, Founding, Hello, Mac, Mesh, Message,
    NetworkDefinition, NetworkError, NetworkStatus, Origin, Output, State, Target, Ticket, Vni,
};

pub const PORT: u16 = 6783;
pub const RANGE: &str = "10.9.0.0/26";

/// Runs a test with many seeds (`WEFT_SEEDS` more or fewer), and tells which one failed.
pub fn for_seeds(count: u64, run: impl Fn(u64)) {
    let count = std::env::var("WEFT_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(count);
    let first = std::env::var("WEFT_SEED").ok().and_then(|n| n.parse::<u64>().ok());
    let seeds = first.map_or(0..count, |seed| seed..seed + 1);
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed))) {
            eprintln!("failed with WEFT_SEED={seed}");
            resume_unwind(panic);
        }
    }
}

/// An item in flight on a link.
#[derive(Debug)]
pub enum Item {
    Hello(Hello),
    Message(Message),
}

/// One direction of a link: towards host `to`.
#[derive(Debug, Default)]
pub struct Way {
    items: VecDeque<Item>,
    /// The host at this end has had the other's hello and has not seen the cut.
    up: bool,
    /// The host at this end sees nothing more of the link.
    closed: bool,
    /// The list of the sender's networks has come.
    listed: bool,
}

#[derive(Debug, Default)]
pub struct Counters {
    pub allocated: usize,
    pub claimed: usize,
    pub taken: usize,
    pub failed: usize,
    pub crashes: usize,
    pub cuts: usize,
    pub joined: usize,
    pub received_more: usize,
    pub founded: usize,
    pub unsaved: usize,
}

pub struct Host {
    pub config: Config,
    pub mesh: Option<Mesh>,
    pub disk: Option<State>,
    /// The state that the disk is writing.
    saving: Option<State>,
    /// The origin of the state, for the next start; `None`: all is well.
    pub origin: Option<Origin>,
    /// Why the last request for an address failed.
    pub failed: String,
    /// Nothing can be written to the disk.
    pub full: bool,
    /// Containers and their addresses; they outlive the daemon.
    pub attached: BTreeMap<String, BTreeSet<IpAddr>>,
    tickets: BTreeMap<Ticket, String>,
    /// Containers that were detached before the answer to their request came.
    gone: BTreeSet<String>,
    pub targets: Vec<usize>,
    known_targets: BTreeSet<usize>,
    pub refusals: Vec<String>,
    pub conflicts: usize,
    /// Entries that the switch has.
    pub switch: BTreeMap<(Vni, Mac), (PeerId, EndpointInfo)>,
    /// The hosts that get the broadcasts of each network.
    pub broadcasts: BTreeMap<Vni, BTreeSet<PeerId>>,
    /// Containers on networks besides `weft`, by network and number; they outlive the daemon.
    pub boxes: BTreeSet<(String, u8)>,
    pub clashes: Vec<String>,
    next_dial: Instant,
    containers: usize,
}

pub struct Net {
    pub now: Instant,
    pub rng: ChaCha8Rng,
    pub hosts: Vec<Host>,
    /// Links by the two hosts, lower first; ways towards the lower and towards the higher.
    links: BTreeMap<(usize, usize), [Way; 2]>,
    pub blocked: BTreeSet<(usize, usize)>,
    /// A crash follows one in this many outputs; 0: none.
    pub crash_one_in: u64,
    /// Crash the host after this many further outputs.
    pub crash_after: Option<(usize, usize)>,
    pub counters: Counters,
    /// The pairs of hosts of which the first has sent the second a message about a network besides `weft`.
    pub spoken: BTreeSet<(usize, usize)>,
}

impl Net {
    pub fn new(seed: u64) -> Self {
        Self {
            now: Instant::now(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            hosts: Vec::new(),
            links: BTreeMap::new(),
            blocked: BTreeSet::new(),
            crash_one_in: 0,
            crash_after: None,
            counters: Counters::default(),
            spoken: BTreeSet::new(),
        }
    }

    /// As many hosts that are linked with each other, of one mesh.
    pub fn linked_hosts(seed: u64, count: usize, range: &str) -> Self {
        let mut net = Self::new(seed);
        net.add(range, &[]);
        for _ in 1..count {
            net.add(range, &[0]);
        }
        net.start_all();
        net.settle(5);
        net
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.rng.next_u64() % n as u64) as usize
    }

    /// Adds a host that is launched naming the given ones.
    pub fn add(&mut self, range: &str, targets: &[usize]) -> usize {
        let index = self.hosts.len();
        let mut id = [0; 32];
        self.rng.fill_bytes(&mut id);
        let mut config = Config::new(PeerId::from_bytes(id), format!("h{index}"), PORT);
        config.range = range.parse().unwrap();
        config.founding = if targets.is_empty() { Founding::Found } else { Founding::Join };
        self.hosts.push(Host {
            config,
            mesh: None,
            disk: None,
            saving: None,
            origin: None,
            failed: String::new(),
            full: false,
            attached: BTreeMap::new(),
            tickets: BTreeMap::new(),
            gone: BTreeSet::new(),
            targets: targets.to_vec(),
            known_targets: BTreeSet::new(),
            refusals: Vec::new(),
            conflicts: 0,
            switch: BTreeMap::new(),
            broadcasts: BTreeMap::new(),
            boxes: BTreeSet::new(),
            clashes: Vec::new(),
            next_dial: self.now,
            containers: 0,
        });
        index
    }

    pub fn id(&self, host: usize) -> PeerId {
        self.hosts[host].config.local
    }

    fn index(&self, peer: PeerId) -> usize {
        self.hosts.iter().position(|host| host.config.local == peer).unwrap()
    }

    pub fn address(host: usize) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, host as u8 + 1], PORT))
    }

    pub fn start_all(&mut self) {
        (0..self.hosts.len()).for_each(|host| self.start(host));
    }

    /// Starts a host's daemon; its containers must have kept what they had.
    pub fn start(&mut self, index: usize) {
        if self.hosts[index].mesh.is_some() {
            return;
        }
        let mut seed = [0; 32];
        self.rng.fill_bytes(&mut seed);
        let host = &mut self.hosts[index];
        let mut config = host.config.clone();
        config.origin = host.origin.unwrap_or(Origin {
            // A host that was not tampered with knows where it was.
            last_generation: host.disk.as_ref().map(State::generation),
            copied: false,
        });
        let mut mesh = Mesh::new(self.now, config, host.disk.clone(), seed).unwrap();
        let mut kept: BTreeMap<String, BTreeSet<IpAddr>> = BTreeMap::new();
        for allocation in mesh.allocations() {
            let addresses = kept.entry(allocation.owner).or_default();
            if let (IpAddr::V4(address), true) = (allocation.address, allocation.automatic) {
                addresses.insert(mesh.ipv6_of(allocation.vni, address).unwrap().addr().into());
            }
            addresses.insert(allocation.address);
        }
        for (owner, addresses) in &host.attached {
            for address in addresses {
                let has = kept.get(owner).is_some_and(|kept| kept.contains(address));
                assert!(has, "h{index} forgot {address} of {owner}");
            }
        }
        for owner in kept.keys().filter(|owner| !host.attached.contains_key(*owner)) {
            mesh.release(self.now, owner);
        }
        for (network, number) in &host.boxes {
            let vni = mesh.join_network(self.now, network).expect("the host still holds it");
            mesh.set_local_endpoint(self.now, vni, network_box(index, *number)).unwrap();
        }
        host.mesh = Some(mesh);
        host.next_dial = self.now;
        host.known_targets.clear();
        self.retarget(index);
        self.act(index);
    }

    pub fn crash(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        if host.mesh.take().is_none() {
            return;
        }
        self.counters.crashes += 1;
        host.tickets.clear();
        host.gone.clear();
        host.switch.clear();
        host.broadcasts.clear();
        // An interrupted write is on disk in full, or not at all.
        let saving = host.saving.take();
        if saving.is_some() && self.below(2) == 0 {
            self.hosts[index].disk = saving;
        }
        let pairs: Vec<(usize, usize)> = self.links.keys().copied().collect();
        for pair in pairs.into_iter().filter(|pair| pair.0 == index || pair.1 == index) {
            self.close(pair, index);
        }
    }

    /// One end of a link is gone; the other sees what is still on its way, then the cut.
    fn close(&mut self, pair: (usize, usize), end: usize) {
        if let Some(ways) = self.links.get_mut(&pair) {
            let way = &mut ways[usize::from(end == pair.1)];
            way.items.clear();
            way.closed = true;
            way.up = false;
        }
    }

    pub fn cut_random(&mut self) {
        if self.links.is_empty() {
            return;
        }
        let index = self.below(self.links.len());
        let pair = *self.links.keys().nth(index).unwrap();
        let end = if self.below(2) == 0 { pair.0 } else { pair.1 };
        self.cut(pair, end);
    }

    /// Cuts a link; `end` sees it first.
    pub fn cut(&mut self, pair: (usize, usize), end: usize) {
        let Some(ways) = self.links.get(&pair) else { return };
        let up = ways[usize::from(end == pair.1)].up;
        self.counters.cuts += 1;
        self.close(pair, end);
        let other = self.id(if end == pair.0 { pair.1 } else { pair.0 });
        let now = self.now;
        if let Some(mesh) = self.hosts[end].mesh.as_mut().filter(|_| up) {
            mesh.handle_link_down(now, other);
            self.act(end);
        }
    }

    /// Cuts a host off from all others.
    pub fn part(&mut self, host: usize) {
        for other in (0..self.hosts.len()).filter(|other| *other != host) {
            let pair = (host.min(other), host.max(other));
            self.blocked.insert(pair);
            self.cut(pair, host);
        }
        self.settle(2);
    }

    /// Lets all hosts talk again, until each is linked with each.
    pub fn meet(&mut self) {
        self.blocked.clear();
        let count = self.hosts.len();
        let pairs: Vec<(usize, usize)> =
            (0..count).flat_map(|b| (0..b).map(move |a| (a, b))).collect();
        while !pairs.iter().all(|(a, b)| self.linked(*a, *b)) {
            self.settle(1);
        }
    }

    /// The networks besides `weft`, as a host sees them.
    pub fn statuses(&self, host: usize) -> Vec<NetworkStatus> {
        let all = self.hosts[host].mesh.as_ref().unwrap().networks();
        all.into_iter().filter(|it| it.definition.vni != Vni::WEFT).collect()
    }

    pub fn linked(&self, a: usize, b: usize) -> bool {
        let ways = self.links.get(&(a.min(b), a.max(b)));
        ways.is_some_and(|ways| ways.iter().all(|way| way.up))
    }

    fn dial(&mut self, from: usize, to: usize) {
        let pair = (from.min(to), from.max(to));
        let alive = self.hosts[from].mesh.is_some() && self.hosts[to].mesh.is_some();
        if from == to || !alive || self.blocked.contains(&pair) || self.links.contains_key(&pair) {
            return;
        }
        let hello = |host: usize| Item::Hello(self.hosts[host].mesh.as_ref().unwrap().hello());
        let towards = |host: usize| Way { items: [hello(host)].into(), ..Way::default() };
        let ways = [towards(pair.1), towards(pair.0)];
        self.links.insert(pair, ways);
    }

    /// Delivers one item, or the news of a cut, on a random way. `false`: there was nothing to deliver.
    pub fn deliver(&mut self) -> bool {
        self.links.retain(|_, ways| !ways.iter().all(|way| way.closed));
        let ready = |(pair, ways): (&(usize, usize), &[Way; 2])| {
            let pair = *pair;
            let one = |end: usize, ways: &[Way; 2]| {
                let due =
                    !ways[end].items.is_empty() || (ways[1 - end].closed && !ways[end].closed);
                due.then_some((pair, end))
            };
            [one(0, ways), one(1, ways)]
        };
        let ways: Vec<((usize, usize), usize)> =
            self.links.iter().flat_map(ready).flatten().collect();
        if ways.is_empty() {
            return self.save_one();
        }
        let (pair, end) = ways[self.below(ways.len())];
        self.deliver_on(pair, end);
        true
    }

    fn deliver_on(&mut self, pair: (usize, usize), end: usize) {
        let (to, from) = if end == 0 { pair } else { (pair.1, pair.0) };
        let now = self.now;
        let peer = self.id(from);
        let way = &mut self.links.get_mut(&pair).unwrap()[end];
        let item = way.items.pop_front();
        match &item {
            Some(Item::Message(Message::Networks { .. })) => way.listed = true,
            Some(Item::Message(Message::On { .. })) => assert!(way.listed, "{item:?} came first"),
            _ => {}
        }
        let up = way.up;
        if item.is_none() {
            way.closed = true;
            way.up = false;
        }
        let mesh = self.hosts[to].mesh.as_mut().unwrap();
        match item {
            None if up => mesh.handle_link_down(now, peer),
            None => {}
            Some(Item::Hello(hello)) => {
                way.up = true;
                if let Err(refusal) = mesh.handle_link_up(now, peer, hello, Self::address(from)) {
                    way.up = false;
                    self.hosts[to].refusals.push(refusal.to_string());
                    self.close(pair, to);
                    self.blocked.insert(pair);
                }
            }
            Some(Item::Message(message)) => mesh.handle_message(now, peer, message).unwrap(),
        }
        self.retarget(to);
        self.act(to);
    }

    /// Tells a host which of the hosts that it named have answered.
    fn retarget(&mut self, index: usize) {
        let linked: Vec<usize> =
            self.hosts[index].targets.iter().copied().filter(|t| self.up(index, *t)).collect();
        let ids: Vec<PeerId> = self.hosts.iter().map(|host| host.config.local).collect();
        let now = self.now;
        let host = &mut self.hosts[index];
        host.known_targets.extend(linked);
        let known = &host.known_targets;
        let peer = |target: usize| known.contains(&target).then(|| ids[target]);
        let targets = host.targets.iter().map(|t| Target { name: format!("h{t}"), peer: peer(*t) });
        let targets = targets.collect();
        if let Some(mesh) = &mut host.mesh {
            mesh.handle_targets(now, targets);
        }
    }

    /// Whether `host` sees its link with `other` as up.
    fn up(&self, host: usize, other: usize) -> bool {
        let ways = self.links.get(&(host.min(other), host.max(other)));
        ways.is_some_and(|ways| ways[usize::from(host > other)].up)
    }

    /// Carries out a host's outputs in order; it may crash behind any of them.
    pub fn act(&mut self, index: usize) {
        if self.hosts[index].saving.is_some() && self.below(2) > 0 {
            self.saved(index);
        }
        while let Some(output) = self.next_output(index) {
            self.carry_out(index, output);
            let mut crash = self.crash_one_in > 0 && self.below(self.crash_one_in as usize) == 0;
            if let Some((host, left)) = self.crash_after.filter(|(host, _)| *host == index) {
                crash |= left == 0;
                self.crash_after = left.checked_sub(1).map(|left| (host, left));
            }
            if crash {
                self.crash(index);
            }
        }
    }

    fn next_output(&mut self, index: usize) -> Option<Output> {
        let host = &mut self.hosts[index];
        let mesh = host.mesh.as_mut()?;
        if host.saving.is_some() { mesh.poll_output_while_saving() } else { mesh.poll_output() }
    }

    /// A host's disk has written what it was given.
    fn saved(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        host.disk = host.saving.take();
        host.mesh.as_mut().unwrap().handle_saved(self.now, Ok(()));
    }

    /// Lets a disk end that writes. `false`: none does.
    fn save_one(&mut self) -> bool {
        let Some(index) = self.hosts.iter().position(|host| host.saving.is_some()) else {
            return false;
        };
        self.saved(index);
        self.act(index);
        true
    }

    fn carry_out(&mut self, index: usize, output: Output) {
        match output {
            Output::Persist(state) => {
                let now = self.now;
                let host = &mut self.hosts[index];
                let result = match host.full {
                    true => Err("no space left".to_owned()),
                    // The disk takes its time, and the host goes on meanwhile.
                    false => {
                        host.saving = Some(*state);
                        if self.below(2) == 0 {
                            self.saved(index);
                        }
                        return;
                    }
                };
                self.counters.unsaved += usize::from(host.full);
                host.mesh.as_mut().unwrap().handle_saved(now, result);
            }
            Output::Send { peer, message } => {
                let to = self.index(peer);
                let pair = (index.min(to), index.max(to));
                let up = self.up(index, to);
                if matches!(message, Message::On { .. }) {
                    self.spoken.insert((index, to));
                }
                if let Some(ways) = self.links.get_mut(&pair).filter(|_| up) {
                    let way = &mut ways[usize::from(to == pair.1)];
                    if !way.closed {
                        way.items.push_back(Item::Message(message));
                    }
                }
            }
            Output::Dial { peer, addresses } => {
                let to = self.index(peer);
                if addresses.contains(&Self::address(to)) {
                    self.dial(index, to);
                }
            }
            Output::Endpoints { vni, add, remove } => {
                let switch = &mut self.hosts[index].switch;
                for (mac, peer) in remove {
                    assert_eq!(switch.remove(&(vni, mac)).map(|(from, _)| from), Some(peer));
                }
                for (info, peer) in add {
                    switch.insert((vni, info.mac), (peer, info));
                }
            }
            Output::NetworkPeers { vni, peers } => {
                self.hosts[index].broadcasts.insert(vni, peers.into_iter().collect());
            }
            Output::Refuse { peer, reason } => {
                self.hosts[index].refusals.push(reason.to_string());
                let other = self.index(peer);
                let pair = (index.min(other), index.max(other));
                self.close(pair, index);
                self.blocked.insert(pair);
            }
            Output::Answer { ticket, result, .. } => self.answered(index, ticket, result),
            Output::BarrierPassed { .. } => {}
            Output::Changed(change) => match change {
                Change::Joined { .. } => self.counters.joined += 1,
                Change::RangesReceived { .. } => self.counters.received_more += 1,
                Change::Founded { .. } => self.counters.founded += 1,
                Change::Conflict(_) => self.hosts[index].conflicts += 1,
                Change::NetworkClash(clash) => self.hosts[index].clashes.push(clash.to_string()),
                _ => {}
            },
        }
    }

    fn answered(&mut self, index: usize, ticket: Ticket, result: Result<Vec<IpNet>, AddressError>) {
        let host = &mut self.hosts[index];
        let owner = host.tickets.remove(&ticket).expect("an answer to a request");
        match result {
            Ok(_) if host.gone.contains(&owner) => panic!("an answer for {owner} after release"),
            Ok(nets) => {
                let claimed = owner.starts_with("claim");
                let count = &mut self.counters;
                *(if claimed { &mut count.claimed } else { &mut count.allocated }) += 1;
                let addresses = nets.iter().map(IpNet::addr);
                host.attached.entry(owner).or_default().extend(addresses);
            }
            Err(AddressError::Taken { .. }) => self.counters.taken += 1,
            Err(error) => {
                host.failed = error.to_string();
                self.counters.failed += 1;
            }
        }
    }

    pub fn attach(&mut self, index: usize, claim: Option<IpNet>) -> Option<String> {
        self.attach_on(index, "weft", claim)
    }

    /// Asks for an address on a network that the host holds or joins; the owner's name ends in the network's.
    pub fn attach_on(
        &mut self,
        index: usize,
        network: &str,
        claim: Option<IpNet>,
    ) -> Option<String> {
        let now = self.now;
        let host = &mut self.hosts[index];
        let mesh = host.mesh.as_mut()?;
        let vni = mesh.join_network(now, network).ok()?;
        host.containers += 1;
        let kind = if claim.is_some() { "claim" } else { "auto" };
        let owner = format!("{kind}-{index}-{}-{network}", host.containers);
        let ticket = match claim {
            Some(address) => mesh.claim(now, vni, &owner, address),
            None => mesh.allocate(now, vni, &owner),
        };
        host.tickets.insert(ticket, owner.clone());
        self.act(index);
        Some(owner)
    }

    /// Detaches a container: it is gone first, then its addresses are given back.
    pub fn detach(&mut self, index: usize, owner: &str) {
        let now = self.now;
        let host = &mut self.hosts[index];
        if let Some(mesh) = host.mesh.as_mut() {
            host.attached.remove(owner);
            host.gone.insert(owner.to_owned());
            mesh.release(now, owner);
            self.act(index);
        }
    }

    pub fn detach_random(&mut self, index: usize) {
        let count = self.hosts[index].attached.len();
        let waiting: Vec<String> = self.hosts[index].tickets.values().cloned().collect();
        if !waiting.is_empty() && self.below(4) == 0 {
            let owner = waiting[self.below(waiting.len())].clone();
            self.detach(index, &owner);
        } else if count > 0 {
            let nth = self.below(count);
            let owner = self.hosts[index].attached.keys().nth(nth).unwrap().clone();
            self.detach(index, &owner);
        }
    }

    pub fn create(&mut self, index: usize, network: NetworkDefinition) -> Result<(), NetworkError> {
        let now = self.now;
        let result = self.hosts[index].mesh.as_mut().unwrap().create_network(now, network);
        self.act(index);
        result
    }

    pub fn remove(&mut self, index: usize, network: &str) -> Result<(), NetworkError> {
        let now = self.now;
        let result = self.hosts[index].mesh.as_mut().unwrap().remove_network(now, network);
        self.act(index);
        result
    }

    /// Attaches a container to a network besides `weft`; a container counts as there once that is saved.
    pub fn attach_to(
        &mut self,
        index: usize,
        network: &str,
        number: u8,
    ) -> Result<Vni, NetworkError> {
        let now = self.now;
        let Some(mesh) = self.hosts[index].mesh.as_mut() else {
            return Err(NetworkError::Weft);
        };
        let vni = mesh.join_network(now, network)?;
        mesh.set_local_endpoint(now, vni, network_box(index, number)).unwrap();
        self.act(index);
        while self.hosts[index].mesh.is_some() && self.hosts[index].saving.is_some() {
            self.saved(index);
            self.act(index);
        }
        let host = &mut self.hosts[index];
        if host.mesh.as_ref().is_some_and(|mesh| mesh.save_failure().is_none()) {
            host.boxes.insert((network.to_owned(), number));
        } else if let Some(mesh) = host.mesh.as_mut()
            && !host.boxes.contains(&(network.to_owned(), number))
        {
            mesh.remove_local_endpoint(now, vni, network_box(index, number).mac);
            self.act(index);
        }
        Ok(vni)
    }

    pub fn detach_from(&mut self, index: usize, network: &str, number: u8) {
        let now = self.now;
        let host = &mut self.hosts[index];
        let Some(mesh) = host.mesh.as_mut() else { return };
        if host.boxes.remove(&(network.to_owned(), number)) {
            let vni = mesh.join_network(now, network).unwrap();
            mesh.remove_local_endpoint(now, vni, network_box(index, number).mac);
            self.act(index);
        }
    }

    /// Moves time on, and lets timers fire and targets be dialled.
    pub fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.now;
        for index in 0..self.hosts.len() {
            let host = &mut self.hosts[index];
            let Some(mesh) = host.mesh.as_mut() else { continue };
            let dial = host.next_dial <= now;
            if mesh.poll_timeout().is_some_and(|at| at <= now) {
                mesh.handle_timeout(now);
                let next = mesh.poll_timeout();
                assert!(next.is_none_or(|at| at > now), "h{index} wants the time again and again");
                self.act(index);
            }
            if dial {
                self.hosts[index].next_dial = now + Duration::from_secs(1);
                for target in self.hosts[index].targets.clone() {
                    self.dial(index, target);
                }
            }
        }
    }

    /// Runs without faults for a while.
    pub fn settle(&mut self, seconds: u64) {
        for _ in 0..seconds * 4 {
            self.pass(Duration::from_millis(250));
            while self.deliver() {}
        }
    }

    /// No address is on two containers, no range has two owners; in memory and on disk.
    pub fn check(&self) {
        let mut holders = BTreeMap::new();
        for (index, host) in self.hosts.iter().enumerate() {
            for (owner, addresses) in &host.attached {
                let network = owner.rsplit('-').next().unwrap();
                for address in addresses {
                    let before = holders.insert((network, *address), (index, owner));
                    assert_eq!(before, None, "{address} is on {owner} of h{index} too");
                }
            }
        }
        let on_disk = self.hosts.iter().map(|host| host.disk.clone());
        let on_disk = on_disk.collect::<Vec<_>>();
        let dead = self.hosts.iter().map(|host| host.disk.clone().filter(|_| host.mesh.is_none()));
        let dead = dead.collect::<Vec<_>>();
        for vni in [Vni::WEFT, lan().vni] {
            self.check_ranges(vni, &on_disk, false);
            self.check_ranges(vni, &dead, true);
        }
    }

    fn check_ranges(&self, vni: Vni, states: &[Option<State>], live: bool) {
        let mut all = Vec::new();
        for (index, (host, state)) in self.hosts.iter().zip(states).enumerate() {
            let restored = state.clone().map(|state| {
                Mesh::new(self.now, host.config.clone(), Some(state), [0; 32]).unwrap()
            });
            let mesh = restored.as_ref().or(host.mesh.as_ref().filter(|_| live));
            let Some(ipam) = mesh.and_then(|mesh| mesh.ipam_on(vni)) else { continue };
            let own = ipam.owners.into_iter().find(|owner| owner.peer == host.config.local);
            let own = own.filter(|_| ipam.network.is_some());
            all.extend(own.into_iter().flat_map(|own| own.ranges).map(|range| (range, index)));
        }
        all.sort();
        for pair in all.windows(2) {
            assert!(pair[0].0.last < pair[1].0.first, "ranges overlap: {pair:?}");
        }
    }
}

/// A container on a network besides `weft`. Its address says nothing of its host: networks may have the same ones.
pub fn network_box(host: usize, number: u8) -> EndpointInfo {
    EndpointInfo {
        container: format!("box{number}"),
        name: format!("box{number}"),
        aliases: Vec::new(),
        mac: Mac([2, 1, 0, 0, host as u8, number]),
        addresses: vec![IpNet::new([10, 77, host as u8, number].into(), 16).unwrap()],
    }
}

/// A network with its own range, which `weft` has too.
pub fn lan() -> NetworkDefinition {
    let range = Some("10.9.0.0/26".parse().unwrap());
    NetworkDefinition { range, ..NetworkDefinition::new("lan") }
}
