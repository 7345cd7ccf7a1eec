//! Three gateways, links that come and go with what is under way, and clients that move: in the end all agree.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

use weft_crypto::PeerId;
use zeroize::Zeroizing;

use super::documents::{Content, Documents};
use super::exchange::{Exchange, Output};
use super::message::{Answered, Message};

const HOSTS: usize = 3;
const NAMES: [&str; 4] = ["alice", "bob", "carol", "dave"];
const ROUNDS: usize = 200;
const STEPS: usize = 120;

fn id(host: usize) -> PeerId {
    PeerId::from_bytes([u8::try_from(host).unwrap() + 1; 32])
}

fn key(name: &str) -> super::Key {
    ("weft".to_owned(), name.to_owned())
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let high = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(high).unwrap() % limit
    }
}

/// A host with what its exchange has it do.
struct Host {
    exchange: Exchange,
    /// Addresses that the mesh has given here, by name.
    given: BTreeMap<String, Vec<IpAddr>>,
    next: u8,
    /// Clients let in here, with their addresses.
    sessions: BTreeMap<String, Vec<IpAddr>>,
    /// Its clock is behind or ahead by that much.
    skew_ms: u64,
    /// How often each name was revoked, as the host knows.
    epochs: BTreeMap<String, u32>,
}

struct World {
    hosts: Vec<Host>,
    /// Messages under way on the links that are up, by sender and receiver.
    links: BTreeMap<(usize, usize), VecDeque<Message>>,
    now: u64,
}

impl World {
    fn new(random: &mut Random) -> Self {
        let host = |host| Host {
            exchange: Exchange::new(id(host), &["authority"], None, (Vec::new(), Vec::new())),
            given: BTreeMap::new(),
            next: 1,
            sessions: BTreeMap::new(),
            skew_ms: u64::try_from(random.below(3)).unwrap() * 3_600_000,
            epochs: BTreeMap::new(),
        };
        let mut world =
            Self { hosts: (0..HOSTS).map(host).collect(), links: BTreeMap::new(), now: 1 };
        world.publish();
        for host in 1..HOSTS {
            world.hosts[host].exchange.want_authority(None);
        }
        world.settle(0);
        world
    }

    fn time(&mut self, host: usize) -> u64 {
        self.now += 1;
        self.now + self.hosts[host].skew_ms
    }

    /// The home's document: the revocations.
    fn publish(&mut self) {
        let epochs = self.hosts[0].epochs.clone();
        let text = serde_json::to_string(&epochs).unwrap();
        let content = BTreeMap::from([("authority".to_owned(), Content(Zeroizing::new(text)))]);
        self.hosts[0].exchange.set_home(Some(Documents::new("f".into(), content)));
        self.hosts[0].exchange.set_revocations(epochs);
    }

    fn connect(&mut self, one: usize, two: usize) {
        for (from, to) in [(one, two), (two, one)] {
            if let Entry::Vacant(link) = self.links.entry((from, to)) {
                link.insert(VecDeque::new());
                self.hosts[from].exchange.handle_link_up(id(to), format!("host{to}"));
                self.settle(from);
            }
        }
    }

    fn cut(&mut self, one: usize, two: usize) {
        for (from, to) in [(one, two), (two, one)] {
            if self.links.remove(&(from, to)).is_some() {
                self.hosts[from].exchange.handle_link_down(id(to), 1);
                self.settle(from);
            }
        }
    }

    fn deliver(&mut self, link: (usize, usize)) {
        let message = self.links.get_mut(&link).and_then(VecDeque::pop_front);
        let Some(message) = message else { return };
        // As it goes over a link.
        let text = serde_json::to_string(&message).unwrap();
        let (from, to) = link;
        self.hosts[to].exchange.handle_message(id(from), serde_json::from_str(&text).unwrap());
        self.settle(to);
    }

    fn settle(&mut self, at: usize) {
        while let Some(output) = self.hosts[at].exchange.poll_output() {
            let now = self.time(at);
            let host = &mut self.hosts[at];
            match output {
                Output::Send { peer, message } => {
                    let to = (0..HOSTS).find(|to| id(*to) == peer).unwrap();
                    self.links.get_mut(&(at, to)).into_iter().for_each(|queue| {
                        queue.push_back(message.clone());
                    });
                }
                Output::End { name } => {
                    if !host.exchange.is_here(&name) {
                        host.sessions.remove(&name);
                    }
                }
                Output::Readdress { key } => {
                    let now = host.exchange.addresses(&key).map(|(_, addresses)| addresses);
                    if host.sessions.get(&key.1) != now.as_ref()
                        && host.sessions.remove(&key.1).is_some()
                    {
                        host.exchange.left(&key.1);
                    }
                }
                Output::Release { key, addresses } => {
                    if host.exchange.addresses(&key) != Some((id(at), addresses)) {
                        host.given.remove(&key.1);
                    }
                }
                Output::Take(taken) => {
                    host.epochs = serde_json::from_str(&taken.content.0).unwrap();
                    let epochs = host.epochs.clone();
                    host.exchange.set_revocations(epochs);
                    host.exchange.handle_taken(&taken, true, now);
                }
                Output::Save
                | Output::Codes(_)
                | Output::Handed { .. }
                | Output::Requested { .. }
                | Output::Answered { .. } => {}
            }
        }
    }

    fn let_in(&mut self, at: usize, name: &str) {
        let now = self.time(at);
        let host = &mut self.hosts[at];
        let known = host.exchange.addresses(&key(name));
        let addresses = match &known {
            Some((by, addresses)) if *by != id(at) => addresses.clone(),
            _ => {
                let next = &mut host.next;
                let new = || {
                    *next += 1;
                    vec![IpAddr::from([10, 32, u8::try_from(at).unwrap(), *next])]
                };
                let given = host.given.entry(name.to_owned()).or_insert_with(new).clone();
                assert!(host.exchange.give(key(name), given.clone(), known.as_ref(), now));
                given
            }
        };
        host.sessions.insert(name.to_owned(), addresses);
        host.exchange.let_in(name.to_owned(), now);
        self.settle(at);
    }

    fn revoke(&mut self, name: &str) {
        *self.hosts[0].epochs.entry(name.to_owned()).or_default() += 1;
        self.publish();
        self.settle(0);
    }

    /// Links come up, and everything arrives. The home is linked with all; others are perhaps not with each other.
    fn heal(&mut self, all: bool) {
        self.connect(0, 1);
        self.connect(0, 2);
        match all {
            true => self.connect(1, 2),
            false => self.cut(1, 2),
        }
        while let Some(link) =
            self.links.iter().find(|(_, queue)| !queue.is_empty()).map(|(link, _)| *link)
        {
            self.deliver(link);
        }
    }

    fn check(&self) {
        let first = &self.hosts[0];
        for host in &self.hosts {
            assert_eq!(host.epochs, first.epochs, "a revocation is not known everywhere");
            let all = |host: &Host| host.exchange.mappings().cloned().collect::<Vec<_>>();
            assert_eq!(all(host), all(first), "hosts know different addresses");
        }
        for name in NAMES {
            let at: Vec<usize> =
                (0..HOSTS).filter(|host| self.hosts[*host].sessions.contains_key(name)).collect();
            assert!(at.len() <= 1, "{name} has sessions at {at:?}");
            let known = first.exchange.addresses(&key(name));
            for (number, host) in self.hosts.iter().enumerate() {
                if let Some(addresses) = host.sessions.get(name) {
                    let known = known.as_ref().map(|(_, known)| known);
                    assert_eq!(known, Some(addresses), "{name} has an address of its own");
                }
                let holds = known.as_ref().filter(|(by, _)| *by == id(number));
                let given = host.given.get(name);
                assert_eq!(given, holds.map(|(_, known)| known), "{name} at host {number}");
            }
        }
    }
}

fn run(seed: u64) {
    let mut random = Random(seed);
    let mut world = World::new(&mut random);
    for _ in 0..STEPS {
        let (one, two) = (random.below(HOSTS), random.below(HOSTS));
        let name = NAMES[random.below(NAMES.len())];
        match random.below(12) {
            0 if one != two => world.connect(one, two),
            1 if one != two => world.cut(one, two),
            2 | 3 => world.let_in(one, name),
            4 if random.below(3) == 0 => world.revoke(name),
            5 => {
                world.hosts[one].sessions.remove(name);
                world.hosts[one].exchange.left(name);
            }
            _ => {
                let up: Vec<(usize, usize)> = world.links.keys().copied().collect();
                if !up.is_empty() {
                    world.deliver(up[random.below(up.len())]);
                }
            }
        }
    }
    world.heal(random.below(2) == 0);
    world.check();
}

#[test]
fn gateways_agree_whatever_links_lose_and_whenever_they_come_up() {
    let first: u64 = rand::random::<u64>() | 1;
    for seed in (0..ROUNDS).map(|round| first.wrapping_add(2 * u64::try_from(round).unwrap())) {
        println!("seed {seed}");
        run(seed);
    }
}

#[test]
fn a_replica_gets_a_long_document_in_parts_and_a_newer_one_at_once() {
    let mut world = World::new(&mut Random(7));
    world.connect(0, 1);
    world.heal(true);
    for number in 0..20_000 {
        world.hosts[0].epochs.insert(format!("client-{number}"), 1);
    }
    world.publish();
    world.settle(0);
    world.heal(true);
    world.check();
    let replica = world.hosts[1].exchange.replica().unwrap();
    assert_eq!((replica.nickname.as_str(), replica.fingerprint.as_str()), ("host0", "f"));
    world.revoke("alice");
    world.heal(true);
    assert_eq!(world.hosts[2].epochs["alice"], 1);
}

#[test]
fn a_host_with_an_authority_of_its_own_takes_no_other() {
    let mut world = World::new(&mut Random(7));
    world.heal(true);
    let host = &mut world.hosts[2].exchange;
    host.set_home(Some(Documents::new("other".into(), BTreeMap::new())));
    let mut is_taken = |fingerprint: &str| {
        let (version, fingerprint) = (String::new(), fingerprint.to_owned());
        host.handle_message(id(0), Message::Hand { id: 7, version, total: 1, fingerprint });
        std::iter::from_fn(|| host.poll_output()).find_map(|output| match output {
            Output::Send { message: Message::Answer { answer, .. }, .. } => {
                Some(matches!(answer, Answered::Done(_)))
            }
            _ => None,
        })
    };
    assert_eq!(is_taken("f"), Some(false));
    assert_eq!(is_taken("other"), Some(true), "its answer was lost");
}

#[test]
fn another_home_is_named_on_both_and_takes_nobodys_replica() {
    let mut world = World::new(&mut Random(7));
    world.heal(true);
    let content = BTreeMap::from([("authority".to_owned(), Content(Zeroizing::new("{}".into())))]);
    world.hosts[2].exchange.set_home(Some(Documents::new("other".into(), content)));
    world.settle(2);
    world.heal(true);
    let conflicts = |host: usize| world.hosts[host].exchange.conflicts();
    assert!(conflicts(0)[0].contains("host host2 has another certificate authority"));
    assert!(conflicts(2)[0].contains("host host0 has another certificate authority"));
    assert!(conflicts(1)[0].contains("host host2 has another certificate authority"));
    assert_eq!(world.hosts[1].exchange.replica().unwrap().fingerprint, "f");
}
