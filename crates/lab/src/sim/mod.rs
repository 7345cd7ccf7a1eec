//! A simulator in virtual time: hosts with the production state machines, simulated engines, links
//! and a data network. A run is a function of its seed.

mod engine;
pub mod expect;
mod network;

pub use engine::{Firewall, Packet, Payload, Seal, SimEngine};
pub use network::Net;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha20Rng;
use weft_crypto::{PeerId, SessionKey};
use weft_path::{
    Config, EngineCommand, EngineEvent, EngineKind, EngineOffer, Message, PROBE_TURN_MS,
    PathChange, PathId, PathState, PathStatus, Paths, Reason, overall,
};

/// How long the vector engine asks for a lane before it says that nothing comes back.
const LANES_KNOWN_AFTER: Duration = Duration::from_secs(2);

/// Names a host of a [`World`].
pub type HostId = usize;

/// The counts of one direction of steady traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Packets that containers sent.
    pub sent: u64,
    /// Packets that arrived.
    pub delivered: u64,
    /// Sent packets that are neither delivered nor on their way.
    pub lost: u64,
    /// When the last one arrived.
    pub last: Option<Instant>,
    /// The longest time between one arrival and the next.
    pub longest_gap: Duration,
}

/// A simulated host.
pub struct Host {
    /// Its identity.
    pub id: PeerId,
    /// The state machine.
    pub paths: Paths,
    /// Its engines.
    pub engine: SimEngine,
    /// Changes of state, with their time.
    pub changes: Vec<(Instant, PathChange)>,
    /// MTU of its link: its kernel refuses longer datagrams.
    pub link_mtu: u16,
    /// The public address of the NAT in front of it.
    pub nat: Option<IpAddr>,
    /// It knows the address that it has on a link.
    pub knows_address: bool,
    /// It speaks as an old version with only the vector engine.
    pub old_version: bool,
    config: Config,
    /// The newest connection to each peer.
    connections: BTreeMap<HostId, u64>,
    /// Messages seen by this host, for an attacker to say again.
    pub heard: Vec<(HostId, Message)>,
    timer: Option<Instant>,
    /// The last path to send a probe of a candidate by the kernel's policy, by peer.
    turns: BTreeMap<PeerId, (PathId, Instant)>,
}

/// A new connection, as one end learns of it.
struct Connection {
    number: u64,
    key: SessionKey,
    seen: IpAddr,
    dialled: bool,
}

enum Event {
    Timer(HostId),
    LinkUp { host: HostId, peer: HostId, up: Connection },
    LinkDown { host: HostId, peer: HostId, connection: u64 },
    Moved { host: HostId, peer: HostId, connection: u64 },
    Message { from: HostId, to: HostId, connection: u64, text: String },
    Packet { from: HostId, to: HostId, packet: Packet },
    Lanes { host: HostId, peer: HostId },
    Traffic { from: HostId, to: HostId, every: Duration, size: Option<u16>, until: Instant },
}

/// Hosts, their links, the data network, and virtual time.
pub struct World {
    /// The seed of this run, to print when something fails.
    pub seed: u64,
    /// Virtual time.
    pub now: Instant,
    /// The hosts.
    pub hosts: Vec<Host>,
    /// Counts of the steady traffic, by direction.
    pub tallies: BTreeMap<(HostId, HostId), Tally>,
    /// How long a message is on its way over a link.
    pub link_latency: Duration,
    /// Packets that left a host without a seal.
    pub plaintext: u64,
    start: Instant,
    rng: ChaCha20Rng,
    nets: BTreeMap<(HostId, HostId), Net>,
    nats: BTreeMap<IpAddr, network::Nat>,
    queue: BTreeMap<(Instant, u64), Event>,
    events: u64,
    connection: u64,
    /// Connections that carry messages now, each with the time of its last arrival by direction.
    live: BTreeMap<u64, BTreeMap<(HostId, HostId), Instant>>,
    /// Keys that receivers have derived, by receiver and SPI.
    derived: BTreeMap<(PeerId, u32), BTreeSet<[u8; 36]>>,
}

impl World {
    /// Hosts with these settings, without links.
    pub fn new(seed: u64, configs: Vec<Config>) -> Self {
        let start = Instant::now();
        let mut rng = ChaCha20Rng::seed_from_u64(seed);
        let hosts = configs.into_iter().enumerate();
        let hosts = hosts.map(|(index, config)| Host::new(index, config, &mut rng)).collect();
        Self {
            seed,
            now: start,
            hosts,
            tallies: BTreeMap::new(),
            link_latency: Duration::from_millis(5),
            plaintext: 0,
            start,
            rng,
            nets: BTreeMap::new(),
            nats: BTreeMap::new(),
            queue: BTreeMap::new(),
            events: 0,
            connection: 0,
            live: BTreeMap::new(),
            derived: BTreeMap::new(),
        }
    }

    /// Virtual time since the start.
    pub fn elapsed(&self) -> Duration {
        self.now - self.start
    }

    /// A random number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.rng.next_u64() % end.max(1)
    }

    /// The data network from one host to another.
    pub fn net(&mut self, from: HostId, to: HostId) -> &mut Net {
        self.nets.entry((from, to)).or_default()
    }

    /// Changes both directions of the data network between two hosts.
    pub fn both(&mut self, a: HostId, b: HostId, change: impl Fn(&mut Net)) {
        change(self.net(a, b));
        change(self.net(b, a));
    }

    /// A new connection that the first host has dialled; each host learns of it at a different moment.
    pub fn connect(&mut self, a: HostId, b: HostId) {
        self.connection += 1;
        let connection = self.connection;
        self.live.insert(connection, BTreeMap::new());
        let mut key = [0; 32];
        self.rng.fill_bytes(&mut key);
        for (host, peer) in [(a, b), (b, a)] {
            let at = self.now + Duration::from_micros(self.below(20_000));
            let key = SessionKey::from_bytes(key);
            let seen = self.address_seen(peer, host);
            let up = Connection { number: connection, key, seen, dialled: host == a };
            self.push(at, Event::LinkUp { host, peer, up });
        }
    }

    /// Cuts every connection between two hosts; each notices within `noticed`.
    pub fn disconnect(&mut self, a: HostId, b: HostId, noticed: Duration) {
        for (host, peer) in [(a, b), (b, a)] {
            if let Some(connection) = self.hosts[host].connections.get(&peer).copied() {
                self.live.remove(&connection);
                let micros = u64::try_from(noticed.as_micros()).unwrap_or(u64::MAX);
                let at = self.now + Duration::from_micros(self.below(micros));
                self.push(at, Event::LinkDown { host, peer, connection });
            }
        }
    }

    /// Kills a host's daemon and starts it again, without links.
    pub fn restart(&mut self, host: HostId) {
        let peers: Vec<HostId> = self.hosts[host].connections.keys().copied().collect();
        for peer in peers {
            self.disconnect(host, peer, Duration::from_millis(100));
        }
        let mut fresh = Host::new(host, self.hosts[host].config.clone(), &mut self.rng);
        let before = &self.hosts[host];
        fresh.link_mtu = before.link_mtu;
        fresh.nat = before.nat;
        fresh.knows_address = before.knows_address;
        fresh.old_version = before.old_version;
        fresh.engine.address = before.engine.address;
        fresh.engine.firewall = before.engine.firewall;
        fresh.engine.kernel_tells_length = before.engine.kernel_tells_length;
        self.hosts[host] = fresh;
    }

    /// One host forgets another, and the link between them goes.
    pub fn forget(&mut self, host: HostId, peer: HostId) {
        let id = self.hosts[peer].id;
        self.disconnect(host, peer, Duration::from_millis(100));
        self.hosts[host].connections.remove(&peer);
        self.hosts[host].turns.remove(&id);
        self.hosts[host].paths.handle_peer_gone(self.now, id);
        self.drain(host);
    }

    /// A host has another address; all its links break, which each end notices within `noticed`.
    pub fn set_address(&mut self, host: HostId, address: IpAddr, noticed: Duration) {
        self.hosts[host].engine.address = address;
        let peers: Vec<HostId> = self.hosts[host].connections.keys().copied().collect();
        for peer in peers {
            self.disconnect(host, peer, noticed);
        }
    }

    /// A host has another address, and its links go on from there, which each end notices within
    /// `noticed`.
    pub fn migrate(&mut self, host: HostId, address: IpAddr, noticed: Duration) {
        self.hosts[host].engine.address = address;
        self.links_go_on(host, noticed);
    }

    /// The NAT before a host has another address: its links go on from there, which each end notices
    /// within `noticed`.
    pub fn migrate_nat(&mut self, host: HostId, public: IpAddr, noticed: Duration) {
        self.hosts[host].nat = Some(public);
        self.links_go_on(host, noticed);
    }

    fn links_go_on(&mut self, host: HostId, noticed: Duration) {
        let connections = self.hosts[host].connections.clone();
        let micros = u64::try_from(noticed.as_micros()).unwrap_or(u64::MAX);
        for (other, connection) in connections {
            for (host, peer) in [(host, other), (other, host)] {
                let at = self.now + Duration::from_micros(self.below(micros));
                self.push(at, Event::Moved { host, peer, connection });
            }
        }
    }

    /// A NAT gives each flow another port from now on.
    pub fn rebind(&mut self, public: IpAddr) {
        self.nats.entry(public).or_default().rebind();
    }

    /// A host offers other engines from now on, also after a restart.
    pub fn set_engines(
        &mut self,
        host: HostId,
        engines: Vec<EngineOffer>,
        missing: Vec<(EngineKind, Reason)>,
    ) {
        let it = &mut self.hosts[host];
        it.engine.set_ports(&engines);
        it.config.engines.clone_from(&engines);
        it.config.missing.clone_from(&missing);
        it.paths.handle_engines(self.now, engines, missing);
        self.drain(host);
    }

    /// Steady traffic from one host to another: a packet every so often, of `size` bytes or of
    /// the path's MTU.
    pub fn traffic(
        &mut self,
        from: HostId,
        to: HostId,
        every: Duration,
        size: Option<u16>,
        length: Duration,
    ) {
        let until = self.now + length;
        self.push(self.now, Event::Traffic { from, to, every, size, until });
    }

    /// Hands a message to a host as if its peer had sent it.
    pub fn inject(&mut self, from: HostId, to: HostId, message: Message) {
        let peer = self.hosts[from].id;
        // Refused or not: both must leave the host sound.
        let _ = self.hosts[to].paths.handle_message(self.now, peer, message);
        self.drain(to);
    }

    /// Hands an engine's event to a host.
    pub fn event(&mut self, host: HostId, event: EngineEvent) {
        self.hosts[host].paths.handle_event(self.now, event);
        self.drain(host);
    }

    /// An engine of a host loses its SAs, which it reports.
    pub fn fail_engine(&mut self, host: HostId, engine: EngineKind) {
        let mut events = Vec::new();
        self.hosts[host].engine.fail(engine, &mut events);
        events.into_iter().for_each(|event| self.event(host, event));
    }

    /// An engine of a host loses the SAs of the path in use to a peer, which it reports.
    pub fn fail_path(&mut self, host: HostId, peer: HostId) {
        let mut events = Vec::new();
        let id = self.hosts[peer].id;
        if let Some(path) = self.hosts[host].engine.bound(id) {
            self.hosts[host].engine.fail_path(path, &mut events);
        }
        events.into_iter().for_each(|event| self.event(host, event));
    }

    /// Lets a host's link have another MTU.
    pub fn set_link_mtu(&mut self, host: HostId, mtu: u16) {
        self.hosts[host].link_mtu = mtu;
        self.hosts[host].paths.handle_link_mtu(self.now, mtu);
        self.drain(host);
    }

    /// The status of every path from one host to another.
    pub fn status(&self, from: HostId, to: HostId) -> Vec<PathStatus> {
        let peer = self.hosts[to].id;
        let mut entries = self.hosts[from].paths.status(self.now);
        entries.retain(|entry| entry.peer == peer);
        entries
    }

    /// One line of it; `None`: they have not met.
    pub fn overall(&self, from: HostId, to: HostId) -> Option<PathStatus> {
        overall(&self.status(from, to))
    }

    /// The state of the best path from one host to another, `None` without any.
    pub fn state(&self, from: HostId, to: HostId) -> Option<PathState> {
        self.overall(from, to).map(|status| status.state)
    }

    /// The path in use from one host to another.
    pub fn active(&self, from: HostId, to: HostId) -> Option<PathStatus> {
        self.overall(from, to).filter(|status| status.state == PathState::Active)
    }

    /// The proven MTU of the active path from one host to another.
    pub fn mtu(&self, from: HostId, to: HostId) -> Option<u16> {
        self.active(from, to).and_then(|status| status.mtu)
    }

    /// Both directions between two hosts carry frames.
    pub fn is_connected(&self, a: HostId, b: HostId) -> bool {
        [(a, b), (b, a)].iter().all(|&(a, b)| self.state(a, b) == Some(PathState::Active))
    }

    /// Lets time pass.
    pub fn run(&mut self, length: Duration) {
        let end = self.now + length;
        self.run_until(end, |_| false);
    }

    /// Lets time pass until `end` or until something holds; `true` if it does.
    pub fn run_until(&mut self, end: Instant, done: impl Fn(&Self) -> bool) -> bool {
        loop {
            if done(self) {
                return true;
            }
            match self.queue.first_entry() {
                Some(entry) if entry.key().0 <= end => {
                    let ((at, _), event) = entry.remove_entry();
                    self.now = self.now.max(at);
                    self.handle(event);
                }
                _ => {
                    self.now = end;
                    return done(self);
                }
            }
        }
    }

    fn push(&mut self, at: Instant, event: Event) {
        self.events += 1;
        self.queue.insert((at, self.events), event);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Timer(host) => {
                if self.hosts[host].timer.is_some_and(|at| at <= self.now) {
                    self.hosts[host].timer = None;
                    self.hosts[host].paths.handle_timeout(self.now);
                    self.drain(host);
                }
            }
            Event::LinkUp { host, peer, up } => {
                let known = self.hosts[host].connections.get(&peer).copied();
                // Of two connections that overlap, both hosts keep the newer.
                if self.live.contains_key(&up.number) && known < Some(up.number) {
                    let (id, it) = (self.hosts[peer].id, &mut self.hosts[host]);
                    let local = it.knows_address.then_some(it.engine.address);
                    it.connections.insert(peer, up.number);
                    it.paths.handle_link_up(self.now, id, up.key, local, up.seen, up.dialled);
                    self.drain(host);
                }
            }
            Event::LinkDown { host, peer, connection } => {
                if self.hosts[host].connections.get(&peer) == Some(&connection) {
                    self.hosts[host].connections.remove(&peer);
                    let id = self.hosts[peer].id;
                    self.hosts[host].paths.handle_link_down(self.now, id);
                    self.drain(host);
                }
            }
            Event::Moved { host, peer, connection } => {
                if self.hosts[host].connections.get(&peer) == Some(&connection) {
                    let remote = self.address_seen(peer, host);
                    let (id, it) = (self.hosts[peer].id, &mut self.hosts[host]);
                    let local = it.knows_address.then_some(it.engine.address);
                    it.paths.handle_addresses(self.now, id, local, remote);
                    self.drain(host);
                }
            }
            Event::Message { from, to, connection, text } => {
                self.deliver_message(from, to, connection, text);
            }
            Event::Lanes { host, peer } => {
                let (id, proven) = (self.hosts[peer].id, self.lanes_pass(host, peer));
                let lanes = self.hosts[host].engine.proven_lanes(id).into_iter();
                let event = |(path, lane)| EngineEvent::LaneProven { path, lane, proven };
                self.report(host, lanes.map(event).collect());
            }
            Event::Packet { from, to, packet } => self.deliver_packet(from, to, &packet),
            Event::Traffic { from, to, every, size, until } => {
                let peer = self.hosts[to].id;
                let mut events = Vec::new();
                let tally = self.tallies.entry((from, to)).or_default();
                tally.sent += 1;
                match self.hosts[from].engine.send(peer, size, &mut events) {
                    Some(packet) => self.transmit(from, packet),
                    None => tally.lost += 1,
                }
                self.report(from, events);
                if self.now + every < until {
                    self.push(self.now + every, Event::Traffic { from, to, every, size, until });
                }
            }
        }
    }

    fn deliver_message(&mut self, from: HostId, to: HostId, connection: u64, text: String) {
        if !self.live.contains_key(&connection) {
            return;
        }
        if self.hosts[to].connections.get(&from).is_none_or(|newest| *newest < connection) {
            // It has not yet learned of the connection: the message waits in it.
            let at = self.now + Duration::from_millis(1);
            self.push(at, Event::Message { from, to, connection, text });
            return;
        }
        let peer = self.hosts[from].id;
        let message: Message = serde_json::from_str(&text).unwrap_or(Message::Unknown);
        self.hosts[to].heard.push((from, message.clone()));
        let result = self.hosts[to].paths.handle_message(self.now, peer, message);
        assert!(result.is_ok(), "seed {}: an honest message was refused: {result:?}", self.seed);
        self.drain(to);
    }

    fn deliver_packet(&mut self, from: HostId, to: HostId, packet: &Packet) {
        let mut events = Vec::new();
        let delivered = self.hosts[to].engine.receive(packet, &mut events);
        if packet.payload == Payload::Data {
            let tally = self.tallies.entry((from, to)).or_default();
            tally.delivered += u64::from(delivered);
            tally.lost += u64::from(!delivered);
            if delivered {
                let gap = tally.last.map_or(Duration::ZERO, |last| self.now - last);
                tally.longest_gap = tally.longest_gap.max(gap);
                tally.last = Some(self.now);
            }
        }
        self.report(to, events);
    }

    fn report(&mut self, host: HostId, events: Vec<EngineEvent>) {
        if !events.is_empty() {
            for event in events {
                self.hosts[host].paths.handle_event(self.now, event);
            }
            self.drain(host);
        }
    }

    /// Carries out what a host's state machine wants: commands first, then messages.
    fn drain(&mut self, host: HostId) {
        loop {
            let mut events = Vec::new();
            while let Some(command) = self.hosts[host].paths.poll_command() {
                self.check(host, &command);
                self.look_at_lanes(host, &command);
                if let Some(packet) = self.hosts[host].engine.apply(command, &mut events) {
                    self.transmit_probe(host, packet, &mut events);
                }
            }
            if events.is_empty() {
                break;
            }
            for event in events {
                self.hosts[host].paths.handle_event(self.now, event);
            }
        }
        while let Some((peer, message)) = self.hosts[host].paths.poll_message() {
            self.post(host, peer, &message);
        }
        while let Some(change) = self.hosts[host].paths.poll_change() {
            self.hosts[host].changes.push((self.now, change));
        }
        let next = self.hosts[host].paths.poll_timeout();
        if let Some(next) = next
            && self.hosts[host].timer.is_none_or(|timer| next < timer)
        {
            // A deadline that has passed already must still let time go on.
            let next = next.max(self.now + Duration::from_micros(1));
            self.hosts[host].timer = Some(next);
            self.push(next, Event::Timer(host));
        }
    }

    /// After such a command it becomes known of a peer's lanes whether they get through.
    fn look_at_lanes(&mut self, host: HostId, command: &EngineCommand) {
        let id = match command {
            EngineCommand::OpenLanes { peer, .. } => peer,
            EngineCommand::InstallOutbound { peer, sa, .. } if sa.lane == 1 => peer,
            _ => return,
        };
        if let Some(peer) = self.hosts.iter().position(|host| host.id == *id) {
            self.push(self.now + LANES_KNOWN_AFTER, Event::Lanes { host, peer });
        }
    }

    /// No host ever sends under a key that its peer did not derive.
    fn check(&mut self, host: HostId, command: &EngineCommand) {
        match command {
            EngineCommand::InstallInbound { sa, .. } => {
                let receiver = (self.hosts[host].id, sa.spi);
                self.derived.entry(receiver).or_default().insert(*sa.key.expose());
            }
            EngineCommand::InstallOutbound { peer, sa, .. } => {
                let keys = self.derived.get(&(*peer, sa.spi));
                let known = keys.is_some_and(|keys| keys.contains(sa.key.expose()));
                assert!(known, "seed {}: a key that the peer did not derive", self.seed);
            }
            EngineCommand::InstallPlain { peer, .. } => self.check_plain(host, *peer),
            EngineCommand::SendProbe { path, candidate: true, .. } => self.check_turn(host, *path),
            _ => {}
        }
    }

    /// Plaintext needs the word of both.
    fn check_plain(&self, host: HostId, peer: PeerId) {
        let Some(to) = self.hosts.iter().position(|host| host.id == peer) else { return };
        for (truster, trusted) in [(host, to), (to, host)] {
            let address = self.address_seen(trusted, truster);
            let subnets = &self.hosts[truster].config.trusted_subnets;
            let trusts = subnets.iter().any(|subnet| subnet.contains(&address));
            assert!(trusts, "seed {}: plaintext towards a host that is not trusted", self.seed);
        }
    }

    /// The kernel sends the probes of one candidate at a time to a peer, where they go by its policy.
    fn check_turn(&mut self, host: HostId, path: PathId) {
        let it = &mut self.hosts[host];
        let Some(peer) = it.engine.policy_peer_of(path) else { return };
        if let Some((other, at)) = it.turns.insert(peer, (path, self.now)) {
            let apart = self.now - at >= Duration::from_millis(PROBE_TURN_MS);
            assert!(other == path || apart, "seed {}: two candidates probed at once", self.seed);
        }
    }

    fn post(&mut self, from: HostId, peer: PeerId, message: &Message) {
        let Some(to) = self.hosts.iter().position(|host| host.id == peer) else { return };
        let Some(connection) = self.hosts[from].connections.get(&to).copied() else { return };
        let Some(arrivals) = self.live.get_mut(&connection) else { return };
        let last = arrivals.entry((from, to)).or_insert(self.now);
        *last = (self.now + self.link_latency).max(*last);
        let at = *last;
        let mut value = serde_json::to_value(message).unwrap_or_default();
        if self.hosts[from].old_version || self.hosts[to].old_version {
            strip(&mut value);
        }
        self.push(at, Event::Message { from, to, connection, text: value.to_string() });
    }
}

/// Leaves of a message what a version knew that had the vector engine alone.
fn strip(message: &mut serde_json::Value) {
    if message["type"] == "withdraw" || message["type"] == "unheard" {
        *message = serde_json::json!({"type": "unknown"});
    }
    if let Some(fields) = message.as_object_mut() {
        for new in ["missing", "address", "peer_address", "trusted", "encapsulation", "opens_lanes"]
        {
            fields.remove(new);
        }
    }
    for engine in message["engines"].as_array_mut().into_iter().flatten() {
        engine.as_object_mut().and_then(|engine| engine.remove("ciphers"));
    }
}

impl Host {
    fn new(index: HostId, config: Config, rng: &mut ChaCha20Rng) -> Self {
        let octet = u8::try_from(index + 1).unwrap_or(u8::MAX);
        let id = PeerId::of_public_key(&[octet; 32]);
        let mut seed = [0; 32];
        rng.fill_bytes(&mut seed);
        let mut engine = SimEngine::new(IpAddr::from([10, 0, 0, octet]));
        engine.set_ports(&config.engines);
        Self {
            id,
            paths: Paths::new(id, config.clone(), seed),
            engine,
            changes: Vec::new(),
            link_mtu: config.link_mtu,
            nat: None,
            knows_address: true,
            old_version: false,
            config,
            connections: BTreeMap::new(),
            heard: Vec::new(),
            timer: None,
            turns: BTreeMap::new(),
        }
    }

    /// Its own address.
    pub fn address(&self) -> IpAddr {
        self.engine.address
    }

    /// Its settings.
    pub fn config(&self) -> &Config {
        &self.config
    }
}
