//! Networks with ranges of their own: founded once, split by their owners, at rest and dropped.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;
mod net;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use common::{allocate, claim, drain, founder, hold, id, link, restored, saved, shop};
use ipnet::{IpNet, Ipv4Net};
use net::{Counters, Net, RANGE, for_seeds, lan};
use weft_crypto::PeerId;
use weft_mesh::{
    AddressError, Change, Founding, Mesh, Message, NetworkClash, NetworkDefinition, NetworkError,
    NetworkId, Origin, Output, Ticket, Vni, limits,
};

fn other_lan() -> NetworkDefinition {
    let range6 = Some("fd00:1::/64".parse().unwrap());
    NetworkDefinition { range: lan().range, range6, ..NetworkDefinition::new("lan2") }
}

#[test]
fn networks_with_one_range_give_the_same_addresses_each_for_itself() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    mesh.create_network(now, lan()).unwrap();
    mesh.create_network(now, other_lan()).unwrap();
    let ticket = mesh.allocate(now, lan().vni, "a");
    assert!(!drain(&mut mesh).iter().any(|it| matches!(it, Output::Answer { .. })));
    now += Duration::from_millis(limits::RANGE_FOUND_SETTLE_MS);
    assert!(mesh.poll_timeout().unwrap() <= now);
    mesh.handle_timeout(now);
    let outputs = drain(&mut mesh);
    let place = |wanted: &dyn Fn(&Output) -> bool| outputs.iter().position(wanted).unwrap();
    let given = place(&|it| matches!(it, Output::Answer { ticket: t, .. } if *t == ticket));
    let founded = place(&|it| matches!(it, Output::Changed(Change::RangesFounded { .. })));
    assert!(founded < given, "{outputs:?}");
    // What is saved before the answer has the founded ranges and the address.
    let state = |it: &Output| match it {
        Output::Persist(state) => Some(format!("{state:?}")),
        _ => None,
    };
    let saved = outputs[..given].iter().rev().find_map(state).unwrap();
    assert!(saved.contains("10.9.0.1: Local { owner: \"a\""), "{saved}");

    let of = |mesh: &mut Mesh, vni, owner: &str| allocate(mesh, now, vni, owner).unwrap();
    let first = of(&mut mesh, lan().vni, "a");
    assert_eq!(first[0], "10.9.0.1/26");
    assert!(first[1].starts_with("fd") && first[1].ends_with("::a09:1/64"), "{first:?}");
    let second = of(&mut mesh, other_lan().vni, "a");
    assert_eq!(second, ["10.9.0.1/26", "fd00:1::a09:1/64"]);
    assert_eq!(of(&mut mesh, Vni::WEFT, "b")[0], "10.9.0.1/26");
    let used = mesh.remove_network(now, "lan").unwrap_err();
    assert_eq!(used, NetworkError::InUse { name: "lan".into(), containers: 1 });

    // The addresses of both families are given back together.
    let first: Vec<IpNet> = first.iter().map(|net| net.parse().unwrap()).collect();
    for (given, kept) in [(&first[..1], &first[1..]), (&first[1..], &first[..1])] {
        mesh.release_some(now, lan().vni, "a", given, kept);
        assert!(mesh.allocated(lan().vni, "a").is_some(), "{given:?}");
    }
    mesh.release_some(now, lan().vni, "a", &first[..1], &[]);
    assert_eq!(mesh.allocated(lan().vni, "a"), None);
    assert!(mesh.allocated(other_lan().vni, "a").is_some());
    let owners: Vec<(Vni, String)> =
        mesh.allocations().into_iter().map(|it| (it.vni, it.owner)).collect();
    let wanted = [(Vni::WEFT, "b".to_owned()), (other_lan().vni, "a".to_owned())];
    assert_eq!(owners, wanted);
    assert_eq!(mesh.release(now, "a").len(), 1);
    assert_eq!(mesh.allocations().len(), 1);
}

#[test]
fn a_network_without_a_range_takes_addresses_of_weft() {
    let now = Instant::now();
    let mut mesh = founder(now, RANGE);
    let unheld = allocate(&mut mesh, now, shop().vni, "a").unwrap_err();
    assert_eq!(unheld, AddressError::NoNetwork { vni: shop().vni });
    mesh.create_network(now, shop()).unwrap();
    assert_eq!(allocate(&mut mesh, now, shop().vni, "a/shop").unwrap()[0], "10.9.0.1/26");
    assert_eq!(allocate(&mut mesh, now, Vni::WEFT, "a").unwrap()[0], "10.9.0.2/26");
    // Outside the ranges each network has its own addresses.
    for (vni, owner) in [(shop().vni, "a/shop"), (Vni::WEFT, "a")] {
        let given = claim(&mut mesh, now, vni, owner, "192.0.2.1/24").unwrap();
        assert_eq!(given, ["192.0.2.1/24"]);
    }
    let taken = claim(&mut mesh, now, shop().vni, "b/shop", "192.0.2.1/24");
    assert!(matches!(taken, Err(AddressError::Taken { .. })));
    assert_eq!(mesh.release(now, "a/shop").len(), 2);
    mesh.remove_network(now, "shop").unwrap();
}

#[test]
fn an_address_of_weft_keeps_the_network_that_it_is_on() {
    let now = Instant::now();
    for claimed in [false, true] {
        let mut mesh = founder(now, RANGE);
        mesh.create_network(now, shop()).unwrap();
        let ask = |mesh: &mut Mesh| match claimed {
            true => mesh.claim(now, shop().vni, "a/shop", "10.9.0.7/26".parse().unwrap()),
            false => mesh.allocate(now, shop().vni, "a/shop"),
        };
        ask(&mut mesh);
        let in_use = Err(NetworkError::InUse { name: "shop".into(), containers: 1 });
        assert_eq!(mesh.remove_network(now, "shop"), in_use);
        let mut mesh = restored(now, RANGE, &saved(&mut mesh));
        assert_eq!(mesh.remove_network(now, "shop"), in_use);

        // A state of an earlier release does not say which network: the next request does.
        let on = format!(r#","on":{}"#, shop().vni);
        ask(&mut mesh);
        mesh.claim(now, Vni::WEFT, "b", "10.9.0.8/26".parse().unwrap());
        let saved = saved(&mut mesh);
        assert_eq!(saved.matches(&on).count(), 1, "{saved}");
        let mut mesh = restored(now, RANGE, &saved.replace(&on, ""));
        ask(&mut mesh);
        assert_eq!(mesh.remove_network(now, "shop"), in_use);
        assert_eq!(mesh.release(now, "a/shop").len(), 1);
        mesh.remove_network(now, "shop").unwrap();
    }
}

#[test]
fn a_joined_network_stays_while_a_container_has_an_address_of_weft_on_it() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    hold(&mut mesh, now, 7, &[shop()]);
    let vni = mesh.join_network(now, "shop").unwrap();
    allocate(&mut mesh, now, vni, "a/shop").unwrap();
    let here = |mesh: &Mesh| mesh.networks().iter().any(|it| it.definition.vni == vni && it.here);
    now += Duration::from_secs(2 * limits::NETWORK_IDLE_S);
    mesh.handle_timeout(now);
    assert!(here(&mesh));
    mesh.release(now, "a/shop");
    now += Duration::from_secs(limits::NETWORK_IDLE_S);
    mesh.handle_timeout(now);
    assert!(!here(&mesh));
}

/// How many addresses of the network each host owns.
fn owned(net: &Net) -> Vec<u64> {
    let ipam = |host: &net::Host| host.mesh.as_ref().unwrap().ipam_on(lan().vni);
    let own = |host: &net::Host| {
        let owners = ipam(host)?.owners.into_iter();
        owners.filter(|owner| owner.peer == host.config.local).map(|owner| owner.addresses).next()
    };
    net.hosts.iter().map(|host| own(host).unwrap_or(0)).collect()
}

fn foundings(net: &Net) -> BTreeSet<String> {
    let network = |host: &net::Host| host.mesh.as_ref()?.ipam_on(lan().vni)?.network;
    net.hosts.iter().filter_map(network).map(|network| network.id.to_string()).collect()
}

fn clashes(net: &Net, host: usize) -> Vec<NetworkClash> {
    let networks = net.hosts[host].mesh.as_ref().unwrap().networks();
    networks.into_iter().flat_map(|network| network.clashes).collect()
}

fn given(net: &Net) -> usize {
    let on_lan = |owner: &&String| owner.ends_with("-lan");
    net.hosts.iter().map(|host| host.attached.keys().filter(on_lan).count()).sum()
}

#[test]
fn a_host_that_joins_gets_a_range_and_claims_are_asked_of_the_owner() {
    let mut net = Net::linked_hosts(1, 3, RANGE);
    net.create(0, lan()).unwrap();
    net.settle(1);
    for host in 0..3 {
        net.attach_on(host, "lan", None).unwrap();
        net.settle(3);
    }
    assert_eq!(given(&net), 3);
    assert_eq!((foundings(&net).len(), owned(&net).iter().sum::<u64>()), (1, 64));
    let address: IpNet = "10.9.0.2/26".parse().unwrap();
    net.attach_on(1, "lan", Some(address)).unwrap();
    net.settle(1);
    net.attach_on(2, "lan", Some(address)).unwrap();
    net.settle(1);
    assert_eq!((net.counters.claimed, net.counters.taken), (1, 1));
    net.check();
}

#[test]
fn hosts_that_create_a_network_at_once_agree_on_one_founding() {
    for_seeds(100, |seed| {
        let mut net = Net::linked_hosts(seed, 4, RANGE);
        let linked = seed % 2 == 0;
        if !linked {
            net.part(1);
        }
        for host in 0..4 {
            net.create(host, lan()).unwrap();
            if linked {
                // Addresses are asked for before anybody has founded, and messages take their time.
                net.attach_on(host, "lan", None).unwrap();
                let ms = net.below(400) as u64;
                net.pass(Duration::from_millis(ms));
            }
            for _ in 0..net.below(8) {
                net.deliver();
            }
        }
        if linked {
            net.settle(limits::ALLOCATION_WAIT_S);
        } else {
            net.settle(10);
            assert_eq!(foundings(&net).len(), 2);
            net.blocked.clear();
            net.settle(130);
            (0..4).for_each(|host| drop(net.attach_on(host, "lan", None).unwrap()));
            net.settle(10);
        }
        assert_eq!((foundings(&net).len(), given(&net)), (1, 4), "linked: {linked}");
        assert_eq!(owned(&net).iter().sum::<u64>(), 64);
        (0..4).for_each(|host| assert_eq!(clashes(&net, host), [], "h{host}"));
        net.check();
    });
}

/// Messages take longer than hosts wait before they found.
#[test]
fn of_two_foundings_that_have_not_heard_of_each_other_one_gives_nothing() {
    for_seeds(20, |seed| {
        let mut net = Net::linked_hosts(seed, 2, RANGE);
        (0..2).for_each(|host| net.create(host, lan()).unwrap());
        net.pass(Duration::from_millis(limits::RANGE_FOUND_SETTLE_MS));
        assert_eq!(foundings(&net).len(), 2);
        (0..2).for_each(|host| drop(net.attach_on(host, "lan", None).unwrap()));
        assert_eq!(given(&net), 0);
        net.settle(5);
        assert_eq!((foundings(&net).len(), given(&net)), (1, 2));
        (0..2).for_each(|host| assert_eq!(clashes(&net, host), [], "h{host}"));
        net.check();
    });
}

/// Hosts that founded apart are asked for addresses at the moment when their link comes up.
#[test]
fn foundings_that_meet_before_anything_is_given_become_one() {
    for_seeds(100, |seed| {
        let mut net = Net::linked_hosts(seed, 3, RANGE);
        net.part(1);
        (0..2).for_each(|host| net.create(host, lan()).unwrap());
        net.settle(10);
        assert_eq!(foundings(&net).len(), 2);
        if seed % 3 == 0 {
            // Both have forgotten when they founded.
            (0..3).for_each(|host| net.crash(host));
            net.start_all();
        }
        net.blocked.clear();
        while !net.linked(0, 1) {
            net.pass(Duration::from_millis(100));
            for _ in 0..net.below(4) {
                net.deliver();
            }
        }
        (0..2).for_each(|host| drop(net.attach_on(host, "lan", None).unwrap()));
        net.settle(5);
        net.attach_on(2, "lan", None).unwrap();
        net.settle(5);
        assert_eq!((foundings(&net).len(), given(&net)), (1, 3));
        (0..3).for_each(|host| assert_eq!(clashes(&net, host), [], "h{host}"));
        net.check();
    });
}

/// A linked host that never says what it has heard.
#[test]
fn a_founder_gives_after_a_while_though_a_host_is_silent() {
    let mut now = Instant::now();
    let mut mesh = founder(now, RANGE);
    link(&mut mesh, now, 7);
    let silent = |heard: Vec<NetworkId>| {
        let networks = Vec::new();
        Message::Networks { first: true, more: false, networks, heard }
    };
    mesh.handle_message(now, id(7), silent(Vec::new())).unwrap();
    for network in [lan(), other_lan()] {
        mesh.create_network(now, network).unwrap();
    }
    now += Duration::from_millis(limits::RANGE_FOUND_SETTLE_MS);
    mesh.handle_timeout(now);
    let founding = mesh.ipam_on(lan().vni).unwrap().network.unwrap().id;
    let wanted = [lan(), other_lan()].map(|network| mesh.allocate(now, network.vni, "a"));
    let answered = |mesh: &mut Mesh| -> Vec<Ticket> {
        let answers = drain(mesh).into_iter().filter_map(|output| match output {
            Output::Answer { ticket, result: Ok(_), .. } => Some(ticket),
            _ => None,
        });
        answers.collect()
    };
    assert_eq!(answered(&mut mesh), []);
    mesh.handle_message(now, id(7), silent(vec![founding])).unwrap();
    assert_eq!(answered(&mut mesh), wanted[..1]);
    now += Duration::from_millis(limits::RANGE_HEARD_MS);
    assert!(mesh.poll_timeout().unwrap() <= now);
    mesh.handle_timeout(now);
    assert_eq!(answered(&mut mesh), wanted[1..]);
}

#[test]
fn a_founding_of_which_nothing_is_given_yields_to_one_that_is_used() {
    for used in [0, 1] {
        let mut net = Net::linked_hosts(2, 2, RANGE);
        net.part(1);
        (0..2).for_each(|host| net.create(host, lan()).unwrap());
        net.attach_on(used, "lan", None).unwrap();
        net.settle(10);
        let before = net.hosts[used].attached.clone();
        assert_eq!(foundings(&net).len(), 2);
        net.blocked.clear();
        net.settle(130);
        assert_eq!(foundings(&net).len(), 1);
        net.attach_on(1 - used, "lan", None).unwrap();
        net.settle(5);
        assert_eq!((given(&net), &net.hosts[used].attached), (2, &before));
        net.check();
    }
}

#[test]
fn two_foundings_that_are_used_clash_until_one_side_gives_way() {
    let mut net = Net::linked_hosts(3, 3, RANGE);
    net.part(1);
    (0..2).for_each(|host| net.create(host, lan()).unwrap());
    for host in 0..2 {
        net.attach_on(host, "lan", None).unwrap();
    }
    net.settle(10);
    net.attach_on(2, "lan", None).unwrap();
    net.settle(5);
    net.blocked.clear();
    net.settle(130);
    assert_eq!(given(&net), 3);
    for (host, others) in [(0, vec![1]), (1, vec![0, 2]), (2, vec![1])] {
        let named: Vec<PeerId> = clashes(&net, host)
            .into_iter()
            .map(|clash| match clash {
                NetworkClash::Founding { peer, .. } => peer,
                other => panic!("{other}"),
            })
            .collect();
        let mut wanted: Vec<PeerId> = others.iter().map(|other| net.id(*other)).collect();
        wanted.sort();
        assert_eq!(named, wanted, "h{host}");
        let text = clashes(&net, host)[0].to_string();
        assert!(text.contains("founded apart") && text.contains("remove the network"), "{text}");
    }
    let owner = net.hosts[1].attached.keys().next().unwrap().clone();
    net.detach(1, &owner);
    net.remove(1, "lan").unwrap();
    net.settle(2);
    net.attach_on(1, "lan", None).unwrap();
    net.settle(5);
    assert_eq!((foundings(&net).len(), given(&net)), (1, 3));
    (0..3).for_each(|host| assert_eq!(clashes(&net, host), [], "h{host}"));
    net.check();
}

#[test]
fn ranges_rest_are_granted_and_used_again_and_go_with_the_network() {
    let mut net = Net::linked_hosts(4, 2, RANGE);
    net.create(0, lan()).unwrap();
    net.settle(1);
    let owner = net.attach_on(1, "lan", None).unwrap();
    net.settle(3);
    let split = owned(&net);
    assert!(split.iter().all(|size| *size > 0), "{split:?}");
    net.detach(1, &owner);
    net.settle(limits::NETWORK_IDLE_S + 1);
    let here = |net: &Net, host: usize| {
        let networks = net.hosts[host].mesh.as_ref().unwrap().networks();
        networks.iter().any(|it| it.here && it.definition == lan())
    };
    assert!(!here(&net, 1) && owned(&net) == split, "it rests");
    // A restart changes nothing of that.
    net.crash(1);
    net.start(1);
    net.settle(5);
    assert!(!here(&net, 1) && owned(&net) == split);
    for _ in 0..62 {
        net.attach_on(0, "lan", None).unwrap();
        net.settle(1);
    }
    assert!(given(&net) > 55, "{} addresses of both ranges", given(&net));
    net.attach_on(1, "lan", Some("10.9.0.1/26".parse().unwrap())).unwrap();
    net.settle(1);
    assert!(here(&net, 1));
    assert_eq!(net.counters.taken, 1, "asked of the other host, which has given it");
    let owners: Vec<String> = net.hosts[0].attached.keys().cloned().collect();
    owners.iter().for_each(|owner| net.detach(0, owner));
    net.remove(0, "lan").unwrap();
    net.settle(1);
    assert_eq!(owned(&net).iter().sum::<u64>(), 64, "the other host may still want it");
    net.settle(limits::NETWORK_IDLE_S + 1);
    assert_eq!(owned(&net), [0, 0], "no host holds it any more");
}

/// A host that was away, with ranges and no container: others have created the network again meanwhile.
#[test]
fn a_resting_range_gives_way_to_a_new_founding() {
    let mut net = Net::linked_hosts(5, 3, RANGE);
    net.create(0, lan()).unwrap();
    net.settle(1);
    let owner = net.attach_on(1, "lan", None).unwrap();
    net.settle(3);
    let before = foundings(&net);
    net.detach(1, &owner);
    net.settle(limits::NETWORK_IDLE_S + 1);
    let rested = owned(&net)[1];
    net.part(1);
    // The other host that has ranges of the first founding loses them.
    net.crash(0);
    net.hosts[0].disk = None;
    net.hosts[0].config.founding = Founding::Join;
    net.hosts[0].targets = vec![2];
    net.start(0);
    net.settle(10);
    assert_eq!((owned(&net), rested > 0), (vec![0, rested, 0], true));
    net.create(0, lan()).unwrap();
    net.settle(10);
    net.attach_on(0, "lan", None).unwrap();
    net.settle(5);
    assert_eq!((owned(&net), foundings(&net).len()), (vec![64, rested, 0], 2));
    net.blocked.clear();
    while !net.linked(0, 1) {
        net.settle(1);
    }
    assert_eq!((owned(&net), foundings(&net).len()), (vec![64, 0, 0], 1));
    net.attach_on(1, "lan", None).unwrap();
    net.settle(5);
    assert_eq!((foundings(&net).len(), given(&net)), (1, 2));
    assert!(before.is_disjoint(&foundings(&net)));
    (0..2).for_each(|host| assert_eq!(clashes(&net, host), [], "h{host}"));
    net.check();
}

#[test]
fn a_restored_state_gives_nothing_of_any_network() {
    for found_since in [false, true] {
        let mut net = Net::linked_hosts(6, 3, RANGE);
        if !found_since {
            net.create(1, lan()).unwrap();
            net.settle(2);
        }
        let backup = net.hosts[1].disk.clone().unwrap();
        if found_since {
            net.create(1, lan()).unwrap();
            net.settle(2);
        }
        net.attach_on(1, "lan", None).unwrap();
        net.settle(2);
        assert_eq!(given(&net), 1);
        net.crash(1);
        net.hosts[1].attached.clear();
        net.hosts[1].disk = Some(backup);
        net.hosts[1].origin = Some(Origin { last_generation: None, copied: true });
        net.settle(1);
        net.start(1);
        if found_since {
            net.create(1, lan()).unwrap();
        }
        net.attach_on(1, "lan", None).unwrap();
        net.settle(limits::ALLOCATION_WAIT_S + 1);
        assert_eq!(given(&net), 0);
        assert!(
            net.hosts[1].failed.contains("older than the one known"),
            "{}",
            net.hosts[1].failed
        );
    }
}

/// A backup from the time when a host had given of a founding that is over by now.
#[test]
fn nobody_yields_to_a_restored_state() {
    let mut net = Net::linked_hosts(7, 2, RANGE);
    net.create(1, lan()).unwrap();
    let owner = net.attach_on(1, "lan", None).unwrap();
    net.settle(2);
    let backup = net.hosts[1].disk.clone().unwrap();
    let attached = net.hosts[1].attached.clone();
    net.detach(1, &owner);
    net.remove(1, "lan").unwrap();
    net.settle(2);
    net.create(0, lan()).unwrap();
    net.settle(2);
    let before = foundings(&net);
    assert_eq!((before.len(), owned(&net)), (1, vec![64, 0]));
    net.crash(1);
    net.hosts[1].disk = Some(backup);
    net.hosts[1].origin = Some(Origin { last_generation: None, copied: true });
    // The restored container has its address still: the founding counts as used.
    net.hosts[1].attached = attached;
    net.settle(1);
    net.start(1);
    net.settle(10);
    assert!(net.hosts[1].mesh.as_ref().unwrap().unsure().is_some());
    net.attach_on(0, "lan", None).unwrap();
    net.settle(5);
    assert!(before.is_subset(&foundings(&net)));
    assert_eq!(net.hosts[0].attached.len(), 1, "{}", net.hosts[0].failed);
}

fn random_event(net: &mut Net) {
    let host = net.below(net.hosts.len());
    match net.below(46) {
        0..=19 => drop(net.deliver()),
        20..=25 => drop(net.attach_on(host, "lan", None)),
        26..=28 => {
            let address = u32::from(Ipv4Addr::new(10, 9, 0, 0)) + 1 + net.below(62) as u32;
            let address: IpNet = Ipv4Net::new(address.into(), 26).unwrap().into();
            net.attach_on(host, "lan", Some(address));
            let other = net.below(net.hosts.len());
            net.attach_on(other, "lan", Some(address));
        }
        29 => drop(net.attach(host, None)),
        30..=35 => net.detach_random(host),
        36..=38 => {
            let ms = net.below(700) as u64;
            net.pass(Duration::from_millis(ms));
        }
        39 => net.pass(Duration::from_secs(limits::NETWORK_IDLE_S)),
        40..=41 => net.cut_random(),
        42 => net.crash(host),
        43 => net.hosts[host].full ^= true,
        _ => net.start(host),
    }
}

fn random_run(seed: u64) -> Counters {
    let count = 2 + (seed % 3) as usize;
    let mut net = Net::linked_hosts(seed, count, RANGE);
    net.create(0, lan()).unwrap();
    net.settle(1);
    net.crash_one_in = 150;
    for _ in 0..300 {
        random_event(&mut net);
        net.check();
    }
    net.crash_one_in = 0;
    net.hosts.iter_mut().for_each(|host| host.full = false);
    net.start_all();
    net.settle(130);
    net.check();
    assert_eq!(foundings(&net).len(), 1);
    assert_eq!(owned(&net).iter().sum::<u64>(), 64, "no range is lost: {:?}", owned(&net));
    for host in 0..count {
        let owners: Vec<String> = net.hosts[host].attached.keys().cloned().collect();
        owners.iter().for_each(|owner| net.detach(host, owner));
    }
    net.settle(3);
    for host in &net.hosts {
        let mesh = host.mesh.as_ref().unwrap();
        let ipam = mesh.ipam_on(lan().vni);
        let own = |owner: &weft_mesh::OwnerStatus| owner.peer == host.config.local;
        let used = ipam.and_then(|ipam| ipam.owners.into_iter().find(own)?.used);
        assert_eq!(used.unwrap_or(0), 0, "an address leaks");
    }
    net.counters
}

#[test]
fn no_address_of_a_network_is_given_twice_and_no_range_is_lost_or_has_two_owners() {
    let sum = std::cell::Cell::new((0, 0, 0, 0));
    for_seeds(600, |seed| {
        let run = random_run(seed);
        let (allocated, claimed, taken, more) = sum.get();
        sum.set((
            allocated + run.allocated,
            claimed + run.claimed,
            taken + run.taken,
            more + run.received_more,
        ));
    });
    let (allocated, claimed, taken, more) = sum.get();
    eprintln!("allocated {allocated}, claimed {claimed}, taken {taken}, ranges {more}");
    assert!(allocated.min(claimed).min(taken).min(more) > 0);
}
