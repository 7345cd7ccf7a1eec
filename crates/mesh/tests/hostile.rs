//! Hostile messages of a linked peer: none makes a host panic, and none takes a range from its owner.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use common::{config, drain, founder, hold, id, link, link_with, on, sent};
use ipnet::{IpNet, Ipv4Net};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use weft_crypto::PeerId;
use weft_mesh::{
    AddressRange, ClaimResult, Config, EndpointInfo, Founding, Hello, Holding, Mac, MemberInfo,
    Mesh, MeshError, Message, NamePort, NameRecord, Naming, Network, NetworkDefinition, NetworkId,
    NetworkOptions, Output, RangeAnnouncement, Transport, Vni, limits,
};

const RANGE: &str = "10.9.0.0/24";

fn own(mesh: &Mesh) -> Vec<AddressRange> {
    mesh.ipam().owners[0].ranges.clone()
}

/// Messages out of small pools, so that they hit what exists.
struct Source(ChaCha8Rng);

impl Source {
    fn below(&mut self, n: u64) -> u64 {
        self.0.next_u64() % n
    }

    fn peer(&mut self) -> PeerId {
        id(self.below(12) as u8)
    }

    fn address(&mut self) -> Ipv4Addr {
        let any = self.below(8) == 0;
        let last = if any { self.0.next_u64() as u32 } else { 0x0a09_0000 + self.below(64) as u32 };
        last.into()
    }

    fn range(&mut self) -> AddressRange {
        AddressRange { first: self.address(), last: self.address() }
    }

    fn number(&mut self) -> u64 {
        match self.below(4) {
            0 => self.below(4),
            1 => u64::MAX - self.below(4),
            2 if self.below(2) == 0 => limits::RELAYED_VERSION_MAX - self.below(2),
            2 => limits::ANNOUNCEMENT_VERSION_MAX - self.below(2),
            _ => self.0.next_u64(),
        }
    }

    fn many<T>(&mut self, mut one: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let count = if self.below(50) == 0 { 1100 } else { self.below(4) };
        (0..count).map(|_| one(self)).collect()
    }

    fn endpoint(&mut self) -> EndpointInfo {
        let prefix = self.below(33) as u8;
        EndpointInfo {
            container: "c".repeat(self.below(300) as usize),
            name: "\u{7}n".repeat(self.below(2) as usize),
            aliases: self.many(|s| "a.".repeat(s.below(3) as usize)),
            mac: Mac([self.below(3) as u8, 0, 0, 0, 0, self.below(8) as u8]),
            addresses: self.many(|s| IpNet::new(s.address().into(), prefix).unwrap()),
        }
    }

    fn name(&mut self) -> NameRecord {
        NameRecord {
            name: "x".repeat(self.below(130) as usize),
            network: "weft".repeat(self.below(20) as usize),
            addresses: self.many(|s| s.address().into()),
            ports: self.many(|s| NamePort {
                service: "s".repeat(s.below(3) as usize),
                transport: Transport::Udp,
                port: s.below(3) as u16,
            }),
            is_client: false,
        }
    }

    fn holding(&mut self, network: Network) -> Holding {
        let definition = self.network();
        let founding = (self.below(3) > 0).then(|| {
            let range6 = definition.range6.unwrap_or(network.range6);
            Network { id: NetworkId([self.below(3) as u8; 16]), range6 }
        });
        let founding = founding.filter(|_| definition.range.is_some() || self.below(9) == 0);
        let (used, resting) = (self.below(2) == 0, self.below(4) == 0);
        Holding { definition, founding, used, resting, unsure: self.below(4) == 0 }
    }

    fn network(&mut self) -> NetworkDefinition {
        let name = ["shop", "web", "lan", "lan", "A"][self.below(5) as usize];
        let mut definition = NetworkDefinition::new(name);
        if name == "lan" {
            definition.range = Some("10.9.0.0/26".parse().unwrap());
        }
        match self.below(8) {
            0 => definition.vni = Vni(self.below(9) as u32),
            1 => definition.vni = Vni(self.0.next_u32()),
            2 => definition.range = Some(Ipv4Net::new(self.address(), 16).unwrap()),
            3 => definition.range6 = Some("fd00::1/70".parse().unwrap()),
            4 => {
                let mtu = Some(self.below(65_536) as u16);
                definition.options = NetworkOptions { mtu, ..NetworkOptions::default() };
            }
            _ => {}
        }
        definition
    }

    /// A message about a network besides `weft`, or about the list of them.
    fn network_message(&mut self, network: Network) -> Message {
        if self.below(2) == 0 {
            let (first, more) = (self.below(2) == 0, self.below(3) == 0);
            let networks = self.many(|s| s.holding(network));
            let heard = self.many(|s| NetworkId([s.below(3) as u8; 16]));
            return Message::Networks { first, more, networks, heard };
        }
        let vni = self.network().vni;
        on(vni, self.message(network))
    }

    fn message(&mut self, network: Network) -> Message {
        let network = match self.below(20) {
            0 => Network { id: NetworkId([9; 16]), ..network },
            1 => Network { range6: "fd00::1/70".parse().unwrap(), ..network },
            _ => network,
        };
        match self.below(25) {
            0 if self.below(10) == 0 => Message::Network { network },
            0 | 1 => Message::Members {
                members: self.many(|s| MemberInfo {
                    peer: s.peer(),
                    nickname: "n".repeat(s.below(600) as usize),
                    addresses: s.many(|s| SocketAddr::from((s.address(), s.below(3) as u16))),
                    gone: s.many(|s| SocketAddr::from((s.address(), s.below(3) as u16))),
                    age_s: s.number(),
                }),
            },
            2 => Message::Connections {
                full: self.below(2) == 0,
                add: self.many(Self::peer),
                remove: self.many(Self::peer),
            },
            3 | 4 => Message::Ranges {
                announcement: RangeAnnouncement {
                    network: network.id,
                    owner: self.peer(),
                    version: self.number(),
                    ranges: self.many(Self::range),
                },
            },
            5 => Message::Usage { used: self.number() },
            6 => Message::RangeGrant {
                request: self.number(),
                network,
                ranges: self.many(Self::range),
            },
            7 => Message::RangeAccepted { request: self.number() },
            8 => Message::RangeRefused {
                request: self.number(),
                reason: "\u{1b}no".repeat(self.below(500) as usize),
                ask: Some(self.peer()),
            },
            15 if self.below(2) == 0 => Message::BarrierRequest { number: self.number() },
            16 if self.below(2) == 0 => Message::BarrierReply { number: self.number() },
            15 => Message::EndpointsRequest,
            17 => Message::Known { generation: self.number() },
            18 => Message::KnownAsked,
            19 => Message::Generation { generation: self.number() },
            20 => Message::Names {
                first: self.below(2) == 0,
                more: self.below(3) == 0,
                names: self.many(Self::name),
            },
            21..=24 => self.network_message(network),
            n => self.late_message(n),
        }
    }

    fn late_message(&mut self, n: u64) -> Message {
        match n {
            9 => Message::Claim {
                id: self.number(),
                address: self.address(),
                container: "x".repeat(self.below(300) as usize),
            },
            10 => Message::ClaimAnswer {
                id: self.number(),
                address: self.address(),
                result: ClaimResult::Given,
            },
            11 => Message::ClaimRelease { address: self.address() },
            12 => Message::ClaimsHeld {
                addresses: self.many(Self::address),
                more: self.below(3) == 0,
            },
            13 | 14 => Message::Endpoints {
                version: self.number(),
                full: self.below(2) == 0,
                more: self.below(3) == 0,
                add: self.many(Self::endpoint),
                remove: self.many(|s| s.endpoint().mac),
            },
            _ => Message::Naming {
                naming: Naming {
                    host: self.peer(),
                    version: self.number(),
                    complete: true,
                    names: self.many(Self::peer),
                },
            },
        }
    }
}

#[test]
fn members_that_are_gone_keep_no_host_out_that_has_a_link() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 1);
    let gone = |number: &usize| {
        let mut bytes = [0xee; 32];
        bytes[..8].copy_from_slice(&number.to_be_bytes());
        MemberInfo {
            peer: PeerId::from_bytes(bytes),
            nickname: format!("gone{number}"),
            addresses: Vec::new(),
            gone: Vec::new(),
            age_s: 10,
        }
    };
    let numbers: Vec<usize> = (0..limits::MEMBERS_MAX).collect();
    for some in numbers.chunks(limits::MEMBERS_PER_MESSAGE_MAX) {
        let members = some.iter().map(gone).collect();
        mesh.handle_message(now, id(1), Message::Members { members }).unwrap();
    }
    // This host is in the list as well.
    let known = |mesh: &Mesh| mesh.peers().len() - 1;
    assert_eq!(known(&mesh), limits::MEMBERS_MAX);
    link(&mut mesh, now, 2);
    assert_eq!(known(&mesh), limits::MEMBERS_MAX);
    for peer in [1, 2] {
        assert!(mesh.peers().iter().any(|it| it.peer == id(peer) && it.linked), "{peer}");
    }
}

#[test]
fn no_message_makes_a_host_panic_or_lose_what_is_its_own() {
    for seed in 0..400 {
        let mut source = Source(ChaCha8Rng::seed_from_u64(seed));
        let mut now = Instant::now();
        let mut mesh = founder(now, RANGE);
        for n in 0..20 {
            mesh.allocate(now, Vni::WEFT, &format!("box{n}"));
        }
        mesh.create_network(now, NetworkDefinition::new("shop")).unwrap();
        let range = Some("10.9.0.0/26".parse().unwrap());
        let lan = NetworkDefinition { range, ..NetworkDefinition::new("lan") };
        mesh.create_network(now, lan.clone()).unwrap();
        now += Duration::from_millis(limits::RANGE_FOUND_SETTLE_MS);
        mesh.handle_timeout(now);
        for n in 0..20 {
            mesh.allocate(now, lan.vni, &format!("lan{n}"));
        }
        link(&mut mesh, now, 1);
        let claim = "10.9.0.50".parse().unwrap();
        let message = Message::Claim { id: 1, address: claim, container: "theirs".to_owned() };
        mesh.handle_message(now, id(1), message).unwrap();
        let (ranges, allocations) = (own(&mesh), mesh.allocations());
        let lans = |mesh: &Mesh| mesh.ipam_on(lan.vni).unwrap().owners[0].clone();
        let lan_ranges = lans(&mesh);
        assert_eq!(lan_ranges.used, Some(20));
        let held = |mesh: &Mesh| mesh.networks().into_iter().filter(|it| it.here).count();
        let network = mesh.network().unwrap();
        for _ in 0..300 {
            now += Duration::from_millis(source.below(300));
            if source.below(40) == 0 {
                link(&mut mesh, now, 2);
            }
            let message = source.message(network);
            let known = mesh.peers().iter().any(|peer| peer.peer == id(2) && peer.linked);
            let result = mesh.handle_message(now, id(2), message.clone());
            assert_eq!(!known, result == Err(MeshError::NotLinked(id(2))));
            if source.below(20) == 0 {
                mesh.handle_timeout(now);
            }
            for output in drain(&mut mesh) {
                if let Output::Send { message, .. } = output {
                    let bytes = serde_json::to_vec(&message).unwrap();
                    assert!(bytes.len() <= limits::MESSAGE_BYTES_MAX, "WEFT_SEED={seed}");
                }
            }
            assert_eq!(own(&mesh), ranges, "seed {seed}: {message:?}");
            assert_eq!(lans(&mesh), lan_ranges, "seed {seed}: {message:?}");
            assert_eq!(mesh.allocations(), allocations, "seed {seed}: {message:?}");
            assert_eq!(held(&mesh), 3, "seed {seed}: {message:?}");
        }
        let message = Message::Claim { id: 9, address: claim, container: "mine".to_owned() };
        link(&mut mesh, now, 2);
        drain(&mut mesh);
        mesh.handle_message(now, id(2), message).unwrap();
        let taken = drain(&mut mesh).into_iter().any(|output| {
            let Output::Send { message: Message::ClaimAnswer { result, .. }, .. } = output else {
                return false;
            };
            result == ClaimResult::Taken { container: "theirs".to_owned(), host: id(1) }
        });
        assert!(taken, "seed {seed}: the claim of the other peer is gone");
    }
}

#[test]
fn a_joining_host_survives_any_message_too() {
    for seed in 0..400 {
        let mut source = Source(ChaCha8Rng::seed_from_u64(seed));
        let mut now = Instant::now();
        let network = founder(now, RANGE).network().unwrap();
        let joining = || Config { founding: Founding::Join, ..config(RANGE) };
        let mut mesh = Mesh::new(now, joining(), None, [1; 32]).unwrap();
        for _ in 0..300 {
            now += Duration::from_millis(source.below(300));
            if source.below(20) == 0 {
                let hello = Hello { nickname: "other".into(), network: None, ..mesh.hello() };
                let remote = "[2001:db8::1]:6783".parse().unwrap();
                let _ = mesh.handle_link_up(now, id(2), hello, remote);
                mesh.allocate(now, Vni::WEFT, "box");
            }
            let mut message = source.message(network);
            for output in drain(&mut mesh) {
                if let Output::Send {
                    message: Message::RangeRequest { request: asked, .. }, ..
                } = output
                {
                    let ranges = source.many(Source::range);
                    message = Message::RangeGrant { request: asked, network, ranges };
                }
            }
            let _ = mesh.handle_message(now, id(2), message);
            mesh.handle_timeout(now);
            let mut saved = None;
            for output in drain(&mut mesh) {
                if let Output::Persist(state) = output {
                    saved = Some(*state);
                }
            }
            if let Some(state) = saved {
                Mesh::new(now, joining(), Some(state), [2; 32]).unwrap();
            }
        }
    }
}

#[test]
fn a_peer_cannot_announce_what_this_host_owns() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 1);
    let network = mesh.network().unwrap().id;
    let whole = AddressRange::of_net("10.9.0.0/24".parse().unwrap());
    for owner in [id(1), id(5)] {
        let (version, ranges) = (40, if owner == id(5) { vec![] } else { vec![whole] });
        let announcement = RangeAnnouncement { network, owner, version, ranges };
        mesh.handle_message(now, id(1), Message::Ranges { announcement }).unwrap();
    }
    assert_eq!(own(&mesh), [whole]);
    drain(&mut mesh);
    let net = Ipv4Net::new(Ipv4Addr::new(10, 9, 0, 77), 24).unwrap();
    let ticket = mesh.claim(now, Vni::WEFT, "box", net.into());
    let answer = Output::Answer { ticket, vni: Vni::WEFT, result: Ok(vec![net.into()]) };
    assert!(drain(&mut mesh).contains(&answer), "claimed here, nobody asked");
}

#[test]
fn a_lie_about_this_hosts_ranges_is_answered_with_the_truth_and_a_higher_version() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 1);
    drain(&mut mesh);
    let network = mesh.network().unwrap().id;
    let announcement = RangeAnnouncement { network, owner: id(5), version: 40, ranges: vec![] };
    mesh.handle_message(now, id(1), Message::Ranges { announcement }).unwrap();
    let outputs = drain(&mut mesh);
    assert!(matches!(outputs[0], Output::Persist(_)), "the version is durable before it is told");
    let Output::Send { message: Message::Ranges { announcement }, .. } = &outputs[1] else {
        panic!("no announcement: {outputs:?}");
    };
    assert_eq!((announcement.version, announcement.ranges.len()), (41, 1));
}

#[test]
fn a_peer_cannot_use_up_the_versions_of_another_hosts_ranges() {
    let max = limits::ANNOUNCEMENT_VERSION_MAX;
    for (version, to_victim) in [(max, true), (max, false), (max / 2, true), (max / 2, false)] {
        let now = Instant::now();
        let mut victim = founder(now, RANGE);
        let network = victim.network().unwrap();
        let mut third = joiner(now);
        let lie = || {
            let (network, owner, ranges) = (network.id, id(5), Vec::new());
            Message::Ranges { announcement: RangeAnnouncement { network, owner, version, ranges } }
        };
        link(&mut victim, now, 1);
        link_with(&mut third, now, 1, |hello| hello.network = Some(network));
        if to_victim {
            let _ = victim.handle_message(now, id(1), lie());
        }
        let _ = third.handle_message(now, id(1), lie());
        link_with(&mut victim, now, 6, |hello| hello.network = None);
        link_with(&mut third, now, 5, |hello| hello.network = Some(network));
        for _ in 0..8 {
            for message in sent(&drain(&mut victim), 6) {
                let _ = third.handle_message(now, id(5), message);
            }
            for message in sent(&drain(&mut third), 5) {
                let _ = victim.handle_message(now, id(6), message);
            }
        }
        let known = third.ipam().owners.into_iter().find(|owner| owner.peer == id(5)).unwrap();
        assert_eq!(known.ranges, own(&victim), "version {version}, to the victim: {to_victim}");
        assert!(!known.ranges.is_empty());
    }
}

#[test]
fn what_a_peer_says_of_others_leaves_them_numbers_above() {
    let now = Instant::now();
    let mut mesh = joiner(now);
    link_with(&mut mesh, now, 1, |hello| hello.network = None);
    let max = limits::ANNOUNCEMENT_VERSION_MAX;
    let naming = |host, version| {
        let naming = Naming { host, version, complete: true, names: Vec::new() };
        Message::Naming { naming }
    };
    let mut is_refused = |message| {
        let result = mesh.handle_message(now, id(1), message);
        matches!(result, Err(MeshError::Malformed { .. }))
    };
    for host in [id(6), id(7)] {
        assert!(is_refused(naming(host, max)));
        assert!(!is_refused(naming(host, max / 2)));
    }
    assert!(!is_refused(naming(id(1), max)), "of itself");
    assert!(is_refused(Message::Known { generation: max }));
    assert!(!is_refused(Message::Known { generation: max / 2 }));
}

/// Host 6, which is in no mesh yet.
fn joiner(now: Instant) -> Mesh {
    let config = Config { local: id(6), founding: Founding::Join, ..config(RANGE) };
    Mesh::new(now, config, None, [2; 32]).unwrap()
}

#[test]
fn a_host_without_a_mesh_claims_nothing() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link_with(&mut mesh, now, 1, |hello| hello.network = None);
    drain(&mut mesh);
    let address = "10.9.0.50".parse().unwrap();
    let message = Message::Claim { id: 1, address, container: "box".to_owned() };
    mesh.handle_message(now, id(1), message).unwrap();
    let message = Message::ClaimAnswer { id: 1, address, result: ClaimResult::NotMine };
    assert_eq!(drain(&mut mesh), [Output::Send { peer: id(1), message }]);
}

#[test]
fn ranges_that_a_peer_announces_have_one_limit_over_all_networks() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 1);
    let range = Some("10.0.0.0/8".parse().unwrap());
    let lan = |n: usize| NetworkDefinition { range, ..NetworkDefinition::new(format!("lan{n}")) };
    let lans: Vec<NetworkDefinition> = (0..4).map(lan).collect();
    lans.iter().for_each(|lan| mesh.create_network(now, lan.clone()).unwrap());
    hold(&mut mesh, now, 1, &lans);
    let mut announce = |owner: usize, version: u64, count: usize| {
        let mut bytes = [9; 32];
        bytes[..8].copy_from_slice(&(owner as u64).to_be_bytes());
        let single = |n: usize| Ipv4Addr::from(0x0a00_0000 + 2 * n as u32);
        let one = |n: usize| AddressRange { first: single(n), last: single(n) };
        let ranges = (0..count).map(one).collect();
        let (network, owner_id) = (NetworkId([3; 16]), PeerId::from_bytes(bytes));
        let announcement = RangeAnnouncement { network, owner: owner_id, version, ranges };
        let vni = lans[owner % lans.len()].vni;
        mesh.handle_message(now, id(1), on(vni, Message::Ranges { announcement }))
    };
    // An announcement counts as one more than its ranges.
    let (max, each) = (limits::ANNOUNCED_RANGES_MAX, limits::RANGES_PER_PEER_MAX);
    let (fit, left) = (max / (each + 1), max % (each + 1));
    (0..fit).for_each(|owner| announce(owner, 1, each).unwrap());
    let too_many = |result| matches!(result, Err(MeshError::TooMany { .. }));
    (fit..fit + 4).for_each(|owner| assert!(too_many(announce(owner, 1, each))));
    announce(fit, 1, left - 1).unwrap();
    assert!(too_many(announce(fit + 1, 1, 0)), "nothing is left");
    announce(0, 2, each).unwrap();
    announce(0, 3, 10).unwrap();
    announce(fit + 1, 1, each - 11).unwrap();
    assert!(too_many(announce(fit + 2, 1, 0)));
    mesh.remove_network(now, "lan0").unwrap();
    let owners = |mesh: &Mesh, vni: Vni| mesh.ipam_on(vni).map(|ipam| ipam.owners.len());
    assert_eq!(owners(&mesh, lans[0].vni), None, "ranges go with the network");
    assert_eq!(owners(&mesh, lans[1].vni), Some(fit.div_ceil(4)));
}
