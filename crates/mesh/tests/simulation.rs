//! Many hosts with random events and faults: invariants that hold at every step, and goals that hold at the
//! end.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod net;

use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use net::{Counters, Net, RANGE, for_seeds};
use weft_mesh::Vni;

fn random_address(net: &mut Net) -> IpNet {
    let address = u32::from(Ipv4Addr::new(10, 9, 0, 0)) + 1 + net.below(62) as u32;
    Ipv4Net::new(address.into(), 26).unwrap().into()
}

fn random_event(net: &mut Net, faults: bool) {
    let host = net.below(net.hosts.len());
    match net.below(if faults { 48 } else { 38 }) {
        0..=19 => drop(net.deliver()),
        20..=25 => drop(net.attach(host, None)),
        26..=29 => {
            let address = random_address(net);
            net.attach(host, Some(address));
            let other = net.below(net.hosts.len());
            net.attach(other, Some(address));
        }
        30..=34 => net.detach_random(host),
        35..=37 => {
            let ms = net.below(700) as u64;
            net.pass(Duration::from_millis(ms));
        }
        38..=40 => net.cut_random(),
        41 => net.crash(host),
        42..=43 => net.hosts[host].full ^= true,
        _ => net.start(host),
    }
}

fn assert_full_mesh(net: &Net) {
    let all = net.hosts.len();
    for (index, host) in net.hosts.iter().enumerate() {
        let mesh = host.mesh.as_ref().unwrap();
        let peers = mesh.peers();
        assert_eq!(peers.iter().filter(|peer| peer.linked).count(), all, "h{index}: {peers:?}");
        let told = |peer: &weft_mesh::PeerStatus| peer.connections.len() == all - 1;
        assert!(peers.iter().all(told), "h{index}: {peers:?}");
        let ipam = mesh.ipam();
        assert_eq!(ipam.waiting, None, "h{index}");
        assert_eq!(ipam.owners.len(), all, "h{index} knows all owners");
        for owner in &ipam.owners {
            let own = net.hosts.iter().find(|host| host.config.local == owner.peer).unwrap();
            let own = own.mesh.as_ref().unwrap().ipam();
            assert_eq!(own.owners[0].ranges, owner.ranges, "h{index} knows the ranges");
        }
    }
}

/// All containers gone, no host has an address in use: nothing leaked.
fn assert_nothing_leaks(net: &mut Net) {
    for index in 0..net.hosts.len() {
        let owners: Vec<String> = net.hosts[index].attached.keys().cloned().collect();
        owners.iter().for_each(|owner| net.detach(index, owner));
    }
    net.settle(3);
    for (index, host) in net.hosts.iter().enumerate() {
        let mesh = host.mesh.as_ref().unwrap();
        assert_eq!(mesh.ipam().owners[0].used, Some(0), "h{index} has addresses in use");
        assert_eq!(mesh.ipam().tickets, 0, "h{index} has requests waiting");
    }
}

fn total(net: &Net) -> u64 {
    let size = |host: &net::Host| host.mesh.as_ref().unwrap().ipam().owners[0].addresses;
    net.hosts.iter().map(size).sum()
}

fn random_run(seed: u64, faults: bool) -> Counters {
    let mut net = Net::new(seed);
    let hosts = 2 + net.below(4);
    net.add(RANGE, &[]);
    for host in 1..hosts {
        let target = net.below(host);
        net.add(RANGE, &[target]);
    }
    net.start_all();
    if net.below(2) == 0 {
        net.settle(5);
    }
    net.crash_one_in = if faults { 150 } else { 0 };
    for _ in 0..300 {
        random_event(&mut net, faults);
        net.check();
    }
    net.crash_one_in = 0;
    net.hosts.iter_mut().for_each(|host| host.full = false);
    net.start_all();
    net.settle(100);
    net.check();
    assert_full_mesh(&net);
    assert_nothing_leaks(&mut net);
    assert_eq!(total(&net), 64, "no range is lost");
    net.counters
}

fn add_up(sum: &mut Counters, run: &Counters) {
    sum.allocated += run.allocated;
    sum.claimed += run.claimed;
    sum.taken += run.taken;
    sum.crashes += run.crashes;
    sum.cuts += run.cuts;
    sum.joined += run.joined;
    sum.received_more += run.received_more;
    sum.unsaved += run.unsaved;
}

#[test]
fn no_address_is_given_twice_and_no_range_has_two_owners() {
    let sum = std::cell::RefCell::new(Counters::default());
    for_seeds(800, |seed| add_up(&mut sum.borrow_mut(), &random_run(seed, false)));
    let sum = sum.into_inner();
    eprintln!("{sum:?}");
    assert!(sum.allocated.min(sum.claimed).min(sum.taken) > 0, "{sum:?}");
}

#[test]
fn nor_with_links_cut_disks_full_and_hosts_crashing_between_any_two_outputs() {
    let sum = std::cell::RefCell::new(Counters::default());
    for_seeds(1200, |seed| add_up(&mut sum.borrow_mut(), &random_run(seed, true)));
    let sum = sum.into_inner();
    eprintln!("{sum:?}");
    assert!(sum.allocated.min(sum.claimed).min(sum.taken) > 0, "{sum:?}");
    assert!(sum.crashes.min(sum.cuts).min(sum.received_more).min(sum.unsaved) > 0, "{sum:?}");
}

/// Every point of joining and of a claim at which each of two hosts can crash.
#[test]
fn a_crash_at_any_step_of_joining_loses_and_doubles_nothing() {
    for victim in 0..2 {
        for step in 0..400 {
            let mut net = Net::new(7);
            net.add(RANGE, &[]);
            net.add(RANGE, &[0]);
            net.crash_after = Some((victim, step));
            net.start_all();
            for _ in 0..24 {
                net.attach(0, None);
                net.attach(1, None);
                let address: IpNet = "10.9.0.50/26".parse().unwrap();
                net.attach(0, Some(address));
                net.attach(1, Some(address));
                for _ in 0..40 {
                    net.deliver();
                    net.check();
                }
                net.pass(Duration::from_millis(250));
                net.check();
                net.start_all();
            }
            if net.counters.crashes == 0 {
                assert!(step > 80, "h{victim} has only {step} outputs to crash behind");
                break;
            }
            net.settle(30);
            net.check();
            assert_full_mesh(&net);
            assert_nothing_leaks(&mut net);
            assert_eq!(total(&net), 64, "no range is lost (victim {victim}, step {step})");
        }
    }
}

#[test]
fn every_host_reaches_all_others_from_one_name() {
    for_seeds(20, |seed| {
        let mut net = Net::new(seed);
        net.add("10.32.0.0/12", &[]);
        for host in 1..12 {
            let target = if seed % 2 == 0 { 0 } else { net.below(host) };
            net.add("10.32.0.0/12", &[target]);
        }
        net.start_all();
        net.settle(30);
        net.check();
        assert_full_mesh(&net);
        assert_eq!(total(&net), 1 << 20);
        assert_eq!(net.counters.founded, 1);
    });
}

#[test]
fn hosts_launched_naming_each_other_found_one_mesh() {
    for_seeds(300, |seed| {
        let mut net = Net::new(seed);
        let hosts = 2 + net.below(3);
        let shape = net.below(3);
        for host in 0..hosts {
            let others: Vec<usize> = match shape {
                0 => (0..hosts).filter(|other| *other != host).collect(),
                1 => vec![(host + 1) % hosts],
                _ => vec![usize::from(host == 0)],
            };
            net.add(RANGE, &others);
        }
        net.start_all();
        for _ in 0..200 {
            if net.below(5) == 0 {
                net.pass(Duration::from_millis(100));
            }
            net.deliver();
        }
        net.settle(40);
        let refusals: Vec<&String> = net.hosts.iter().flat_map(|host| &host.refusals).collect();
        assert!(refusals.is_empty(), "shape {shape}: {refusals:?}");
        assert_eq!(net.counters.founded, 1, "shape {shape}");
        assert_full_mesh(&net);
    });
}

#[test]
fn hosts_that_name_each_other_wait_for_a_founder_that_one_of_them_named_too() {
    for_seeds(40, |seed| {
        let mut net = Net::new(seed);
        net.add(RANGE, &[]);
        net.add(RANGE, &[0, 2]);
        net.add(RANGE, &[1]);
        net.blocked.extend([(0, 1), (0, 2)]);
        net.start_all();
        net.settle(10);
        assert_eq!(net.counters.founded, 1, "only the founder");
        net.blocked.clear();
        net.settle(90);
        assert_full_mesh(&net);
    });
}

#[test]
fn a_host_waits_for_those_it_named_and_says_so() {
    let mut net = Net::new(1);
    net.add(RANGE, &[1, 2]);
    net.add(RANGE, &[0]);
    net.add(RANGE, &[0]);
    net.start(0);
    net.settle(1);
    let waiting = |net: &Net, host: usize| net.hosts[host].mesh.as_ref().unwrap().ipam().waiting;
    assert_eq!(waiting(&net, 0).unwrap(), "waiting for a link with h1, h2");
    net.start(1);
    net.settle(5);
    if net.id(0) < net.id(1) {
        assert_eq!(waiting(&net, 0).unwrap(), "waiting for a link with h2");
    }
    net.start(2);
    net.settle(10);
    assert_eq!(waiting(&net, 0), None);
    assert_full_mesh(&net);
}

#[test]
fn hosts_founded_apart_refuse_each_other_with_advice() {
    let mut net = Net::new(2);
    net.add(RANGE, &[]);
    net.add(RANGE, &[]);
    net.start_all();
    net.hosts[1].targets = vec![0];
    net.settle(5);
    for host in &net.hosts {
        let refusal = host.refusals.first().unwrap();
        assert!(refusal.contains("founded apart") && refusal.contains("weft reset"), "{refusal}");
    }
    assert!(!net.linked(0, 1));
}

#[test]
fn another_range_is_refused() {
    let mut net = Net::new(3);
    net.add(RANGE, &[]);
    net.add("10.8.0.0/24", &[0]);
    net.start_all();
    net.settle(5);
    for host in &net.hosts {
        assert!(host.refusals.iter().any(|text| text.contains("--ipalloc-range")));
    }
}

/// Two hosts claim the same free address inside a third host's range at the same moment.
#[test]
fn of_two_claims_at_once_exactly_one_wins() {
    for_seeds(200, |seed| {
        let mut net = Net::linked_hosts(seed, 3, RANGE);
        let address: IpNet = "10.9.0.7/26".parse().unwrap();
        let order = if net.below(2) == 0 { [1, 2] } else { [2, 1] };
        let owners = order.map(|host| (host, net.attach(host, Some(address)).unwrap()));
        net.settle(1);
        let (won, lost) = (net.counters.claimed, net.counters.taken);
        assert_eq!((won, lost), (1, 1));
        for (host, owner) in owners {
            net.detach(host, &owner);
        }
        net.settle(1);
        net.attach(0, Some(address));
        net.settle(1);
        assert_eq!(net.counters.claimed, 2, "a released claim is free again");
    });
}

#[test]
fn a_claim_in_the_range_of_a_host_that_is_down_names_that_host() {
    let mut net = Net::linked_hosts(4, 2, RANGE);
    net.crash(0);
    net.settle(1);
    let now = net.now;
    let mesh = net.hosts[1].mesh.as_mut().unwrap();
    mesh.claim(now, Vni::WEFT, "box", "10.9.0.7/26".parse().unwrap());
    let error = loop {
        if let weft_mesh::Output::Answer { result, .. } = mesh.poll_output().unwrap() {
            break result.unwrap_err().to_string();
        }
    };
    assert!(error.contains("h0") && error.contains("not reachable"), "{error}");
}

/// Disk lost, identity kept: the host gets another range, and nothing of its former range is given out.
#[test]
fn a_host_that_lost_its_state_gets_another_range() {
    let mut net = Net::new(5);
    net.add(RANGE, &[]);
    net.add(RANGE, &[0]);
    net.add(RANGE, &[1]);
    net.start_all();
    net.settle(5);
    let owned = |net: &Net, host: usize| {
        net.hosts[host].mesh.as_ref().unwrap().ipam().owners[0].ranges.clone()
    };
    let before = owned(&net, 1);
    net.crash(1);
    net.hosts[1].disk = None;
    net.start(1);
    net.settle(90);
    let after = owned(&net, 1);
    assert!(!after.is_empty());
    for old in &before {
        assert!(after.iter().all(|new| new.intersection(old).is_none()), "{before:?} {after:?}");
    }
    net.check();
    assert_full_mesh(&net);
}
