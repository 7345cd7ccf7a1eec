//! A state directory that comes back from the past, or runs on two machines: nothing is given twice, and the
//! host reports why.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod net;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use net::Net;
use weft_mesh::{Origin, limits};

const RANGE: &str = "10.9.0.0/24";
const UNKNOWN: Origin = Origin { last_generation: None, copied: false };
const COPIED: Origin = Origin { last_generation: None, copied: true };

fn addresses(net: &Net) -> BTreeSet<IpAddr> {
    net.hosts.iter().flat_map(|host| host.attached.values().flatten().copied()).collect()
}

/// The reason why a host gives no address, if it gives none within the time that a request waits.
fn refusal(net: &mut Net, host: usize) -> Option<String> {
    net.hosts[host].failed.clear();
    let before = net.hosts[host].attached.len();
    net.attach(host, None);
    net.settle(limits::ALLOCATION_WAIT_S + 1);
    (net.hosts[host].attached.len() == before).then(|| net.hosts[host].failed.clone())
}

fn ranges_of(net: &Net, of: usize, at: usize) -> Vec<weft_mesh::AddressRange> {
    let owners = net.hosts[at].mesh.as_ref().unwrap().ipam().owners;
    owners.into_iter().find(|owner| owner.peer == net.id(of)).unwrap().ranges
}

/// Takes a host's disk back to an earlier state. Containers attached since run on, and the host does not know
/// of them.
fn restore(net: &mut Net, host: usize, disk: &weft_mesh::State, origin: Origin) {
    net.crash(host);
    net.hosts[host].attached.clear();
    net.hosts[host].disk = Some(disk.clone());
    net.hosts[host].origin = Some(origin);
    net.settle(1);
    net.start(host);
}

/// For any changes since the backup, and for each origin that the host may report.
#[test]
fn a_restored_state_gives_nothing_and_takes_no_range_back() {
    for seed in 0..60 {
        let mut net = Net::linked_hosts(seed, 3, RANGE);
        let victim = net.below(3);
        for _ in 0..net.below(5) {
            net.attach(victim, None);
        }
        net.settle(1);
        let backup = net.hosts[victim].disk.clone().unwrap();
        // One change at least, of one kind or the other.
        let joins = net.below(2) == 0;
        if joins {
            let new = net.add(RANGE, &[victim]);
            net.blocked.extend((0..3).filter(|host| *host != victim).map(|host| (host, new)));
            net.start(new);
            net.settle(5);
        }
        for _ in 0..net.below(4) + usize::from(!joins) {
            net.attach(victim, None);
        }
        net.settle(1);
        let others: Vec<usize> = (0..net.hosts.len()).filter(|host| *host != victim).collect();
        let owned: Vec<_> = others.iter().map(|at| ranges_of(&net, victim, *at)).collect();
        let alive = addresses(&net);
        let origin = if net.below(2) == 0 { UNKNOWN } else { COPIED };
        restore(&mut net, victim, &backup, origin);
        for _ in 0..3 {
            let why = refusal(&mut net, victim).unwrap_or_else(|| panic!("seed {seed}: it gave"));
            assert!(
                why.contains("older than the one known") && why.contains("weft reset"),
                "seed {seed}: {why}"
            );
        }
        let ipam = net.hosts[victim].mesh.as_ref().unwrap().ipam();
        assert!(!ipam.may_pass, "a request waits in vain");
        let waiting = ipam.waiting.unwrap();
        assert!(waiting.contains("older than the one known"), "status says it: {waiting}");
        for (at, before) in others.iter().zip(&owned) {
            assert_eq!(
                ranges_of(&net, victim, *at),
                *before,
                "seed {seed}: h{at} is told the past"
            );
        }
        // The others go on, and a restart changes nothing.
        assert_eq!(refusal(&mut net, others[0]), None, "seed {seed}");
        net.crash(victim);
        net.settle(1);
        net.start(victim);
        assert!(refusal(&mut net, victim).is_some(), "seed {seed}: it gave after a restart");
        let given: BTreeSet<IpAddr> =
            net.hosts[others[0]].attached.values().flatten().copied().collect();
        let doubled = given
            .intersection(&alive)
            .filter(|a| net.hosts[victim].attached.values().any(|s| s.contains(a)));
        assert_eq!(doubled.count(), 0, "seed {seed}");
    }
}

#[test]
fn the_host_itself_knows_that_its_state_is_older() {
    let mut net = Net::linked_hosts(1, 3, RANGE);
    let backup = net.hosts[1].disk.clone().unwrap();
    net.attach(1, None);
    net.settle(1);
    let last_generation = net.hosts[1].disk.as_ref().map(weft_mesh::State::generation);
    net.blocked.extend([(0, 1), (1, 2)]);
    restore(&mut net, 1, &backup, Origin { last_generation, copied: false });
    let why = refusal(&mut net, 1).unwrap();
    assert!(why.contains("older than the one known to this host's previous run"), "{why}");
}

#[test]
fn the_newest_state_is_believed_after_a_reboot_with_others_or_alone() {
    for (origin, reached) in [(UNKNOWN, true), (COPIED, true), (UNKNOWN, false)] {
        let mut net = Net::linked_hosts(2, 3, RANGE);
        net.attach(1, None);
        net.settle(1);
        let attached = net.hosts[1].attached.clone();
        let disk = net.hosts[1].disk.clone().unwrap();
        if !reached {
            net.blocked.extend([(0, 1), (1, 2)]);
        }
        restore(&mut net, 1, &disk, origin);
        assert!(net.hosts[1].mesh.as_ref().unwrap().ipam().may_pass);
        let asked = net.now;
        net.attach(1, None);
        while net.hosts[1].attached.is_empty() {
            assert!(net.now < asked + Duration::from_secs(limits::ALLOCATION_WAIT_S), "{origin:?}");
            net.settle(1);
        }
        let given = addresses(&net);
        assert!(attached.values().flatten().all(|before| !given.contains(before)));
    }
}

/// Only other members can tell that a host is not a copy of a running one. It waits for their answer, or until the
/// user forgets them.
#[test]
fn a_copied_state_gives_nothing_while_it_reaches_nobody() {
    let mut net = Net::linked_hosts(3, 3, RANGE);
    let disk = net.hosts[1].disk.clone().unwrap();
    net.blocked.extend([(0, 1), (1, 2)]);
    restore(&mut net, 1, &disk, COPIED);
    for _ in 0..20 {
        let why = refusal(&mut net, 1).unwrap();
        assert!(why.contains("copied from a backup") && why.contains("weft reset"), "{why}");
    }
    let others = [net.id(0), net.id(2)];
    let mesh = net.hosts[1].mesh.as_mut().unwrap();
    others.iter().for_each(|peer| assert!(mesh.forget_member(*peer)));
    assert_eq!(refusal(&mut net, 1), None, "its user says that there is nobody");
}

#[test]
fn a_host_that_is_refused_as_a_copy_gives_nothing_until_it_is_taken_again() {
    let mut net = Net::linked_hosts(4, 3, RANGE);
    let why = "copy at 192.0.2.9 has the same identity as h1 at 192.0.2.2";
    let now = net.now;
    net.hosts[1].mesh.as_mut().unwrap().handle_same_identity(now, why);
    net.act(1);
    let said = refusal(&mut net, 1).unwrap();
    assert!(said.contains(why), "{said}");
    // Refusals go on, and it is linked with others meanwhile.
    for _ in 0..4 {
        net.settle(60);
        let now = net.now;
        net.hosts[1].mesh.as_mut().unwrap().handle_same_identity(now, why);
        net.act(1);
        assert!(refusal(&mut net, 1).is_some());
    }
    // The other one is gone.
    net.settle(limits::COPY_HOLD_S + limits::DOUBT_LINGER_S);
    assert_eq!(refusal(&mut net, 1), None);
}
