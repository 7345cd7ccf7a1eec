//! Firewalls on a host that drop what its kernel has opened, all of it or all but the probes of candidates,
//! in virtual time.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use weft_crypto::Format;
use weft_lab::sim::expect::{both_engines, seeds, with_formats, without};
use weft_lab::sim::{Firewall, World};
use weft_path::{
    Config, Encapsulation, EngineKind, PathState, PathStatus, RELAPSE_FIRST_MS, RETRY_MAX_MS,
    Reason,
};

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The reason shown for a path to the second host's kernel.
const FIREWALL: &str = "peer's host firewall drops UDP 6787 after IPsec; accept: \
                        udp dport { 6787, 6788 } meta ipsec exists";
/// The best path to the first host leads to its kernel, the best to the second host leads to its other engine.
const AROUND: [&str; 2] = ["ku udp", "kk raw"];
const BEST: [&str; 2] = ["kk raw", "kk raw"];

/// Two hosts, the second one with this firewall, on a network without faults.
fn world(seed: u64, config: Config, firewall: Firewall) -> World {
    let mut world = World::new(seed, vec![config.clone(), config]);
    world.hosts[1].engine.firewall = firewall;
    world.link_latency = ms(1 + world.below(30));
    let latency = ms(1 + world.below(30));
    world.both(0, 1, |net| net.latency = latency);
    world.connect(0, 1);
    world
}

fn steady(world: &mut World, length: Duration) {
    world.tallies.clear();
    for (from, to) in [(0, 1), (1, 0)] {
        world.traffic(from, to, ms(20), None, length);
    }
}

fn longest_gap(world: &World) -> Duration {
    world.tallies.values().map(|tally| tally.longest_gap).max().unwrap()
}

fn assert_no_loss(world: &World) {
    for (direction, tally) in &world.tallies {
        assert!(tally.delivered > 0 && tally.lost == 0, "{direction:?} {tally:?}");
    }
}

/// Engine here, engine there and encapsulation of the paths in use.
fn in_use(world: &World) -> [String; 2] {
    [(0, 1), (1, 0)].map(|(from, to)| {
        let Some(status) = world.active(from, to) else { return "none".to_owned() };
        let letter = |engine: Option<EngineKind>| engine.map_or("?", |engine| &engine.name()[..1]);
        let how = status.encapsulation.map_or("ovpn", Encapsulation::name);
        format!("{}{} {how}", letter(status.engine), letter(status.remote_engine))
    })
}

/// Why the first host does not use the best path to the second one.
fn why(world: &World) -> String {
    let why = world.active(0, 1).and_then(|status| status.why_not_best);
    why.map_or_else(String::new, |reason| reason.to_string())
}

/// The status of the first host's paths from kernel to kernel.
fn kernels(world: &World) -> Vec<PathStatus> {
    let both = |it: &PathStatus| {
        it.engine == Some(EngineKind::Kernel) && it.remote_engine == Some(EngineKind::Kernel)
    };
    world.status(0, 1).into_iter().filter(both).collect()
}

/// How often the first host's frames took another path so far.
fn moves(world: &World) -> usize {
    let changes = world.hosts[0].changes.iter();
    changes.filter(|(_, change)| change.to == PathState::Active).count()
}

#[test]
fn a_firewall_behind_the_kernel_is_named_and_gone_a_minute_after_it_was_opened() {
    seeds(0..20, |seed| {
        let from_the_start = seed % 2 == 0;
        let first = if from_the_start { Firewall::Closed } else { Firewall::Open };
        let mut world = world(seed, both_engines(), first);
        world.run(s(15));
        if !from_the_start {
            assert_eq!(in_use(&world), BEST);
        }
        steady(&mut world, s(150));
        world.run(s(1));
        world.hosts[1].engine.firewall = Firewall::Closed;
        world.run(s(5));
        assert_eq!(in_use(&world), AROUND);
        let moved = moves(&world);
        world.run(s(154));
        assert_eq!((in_use(&world), why(&world)), (AROUND.map(String::from), FIREWALL.to_owned()));
        assert_eq!(moves(&world), moved, "it moved to and fro");
        let gap = longest_gap(&world);
        assert!(gap <= if from_the_start { ms(100) } else { s(3) }, "{gap:?}");
        for path in kernels(&world) {
            assert_eq!(path.state, PathState::Failed, "{path:?}");
            assert_eq!(path.reason.unwrap().to_string(), FIREWALL);
        }
        world.hosts[1].engine.firewall = Firewall::Open;
        steady(&mut world, s(90));
        let end = world.now + ms(RETRY_MAX_MS) + s(15);
        assert!(world.run_until(end, |world| in_use(world) == BEST), "{:?}", in_use(&world));
        world.run(s(100));
        assert_no_loss(&world);
    });
}

#[test]
fn kernels_alone_behind_a_firewall_fail_with_its_name() {
    seeds(0..10, |seed| {
        let config = without(EngineKind::Userspace, Reason::Forced);
        let mut world = world(seed, config, Firewall::Closed);
        world.run(s(20));
        let status = world.overall(0, 1).unwrap();
        assert_eq!(status.state, PathState::Failed);
        assert_eq!(status.reason.unwrap().to_string(), FIREWALL);
        // Blocked on its way it is not the host's firewall, despite earlier reports of the peer.
        world.hosts[1].engine.firewall = Firewall::Open;
        world.both(0, 1, |net| {
            net.raw_blocked = true;
            net.blocked_ports.extend([6785]);
        });
        world.run(s(240));
        let reason = world.overall(0, 1).unwrap().reason.unwrap().to_string();
        assert_eq!(reason, "data ports blocked; protocol 50 blocked");
    });
}

#[test]
fn behind_the_data_channel_the_rule_is_another() {
    let ovpn = with_formats(&[Format::Ovpn], &[Format::Ovpn]);
    let mut world = world(1, Config { missing: Vec::new(), ..ovpn }, Firewall::Closed);
    world.run(s(60));
    assert_eq!(in_use(&world)[0], "ku ovpn");
    let reason = why(&world);
    assert!(reason.ends_with("accept: iifname \"weft-ovpn\" udp dport { 6787, 6788 }"), "{reason}");
}

#[test]
fn kernel_paths_that_pass_candidates_alone_do_not_take_turns() {
    seeds(0..4, |seed| {
        let mut world = world(seed, both_engines(), Firewall::OpenToCandidates);
        world.run(s(20));
        assert_eq!((in_use(&world), why(&world)), (AROUND.map(String::from), FIREWALL.to_owned()));
        let moved = moves(&world);
        steady(&mut world, s(3_600));
        world.run(s(30));
        assert_eq!(moves(&world), moved, "it takes turns");
        assert_no_loss(&world);
        // Each kernel path is tried once more after its time, for two seconds.
        world.run(s(3_580));
        let tries = moves(&world) - moved;
        assert!((4..=24).contains(&tries), "{tries} moves in an hour");
        assert!(longest_gap(&world) <= s(6), "{:?}", longest_gap(&world));
    });
}

#[test]
fn kernels_alone_that_pass_candidates_alone_say_why_nothing_passes() {
    let mut world =
        world(1, without(EngineKind::Userspace, Reason::Forced), Firewall::OpenToCandidates);
    world.run(s(20));
    for _ in 0..40 {
        world.run(ms(700));
        let status = world.overall(0, 1).unwrap();
        let reason = status.reason.or(status.why_not_best).map(|reason| reason.to_string());
        assert_eq!(reason.as_deref(), Some(FIREWALL), "{:?}", status.state);
    }
    world.hosts[1].engine.firewall = Firewall::Open;
    world.run(s(10));
    assert!(world.is_connected(0, 1) && moves(&world) > 0);
    assert!(kernels(&world).iter().any(|it| it.state == PathState::Active));
}

#[test]
fn a_path_that_was_barred_comes_back_after_its_time_and_is_as_good_as_any() {
    seeds(0..20, |seed| {
        let mut world = world(seed, both_engines(), Firewall::OpenToCandidates);
        world.run(s(20));
        let barred = kernels(&world).remove(0);
        let next = barred.next_try.unwrap();
        assert_eq!(
            (barred.state, barred.encapsulation),
            (PathState::Failed, Some(Encapsulation::Raw))
        );
        assert!(next > world.now && next <= world.now + ms(RELAPSE_FIRST_MS), "{barred:?}");
        world.hosts[1].engine.firewall = Firewall::Open;
        steady(&mut world, s(90));
        let is_best = |world: &World| in_use(world)[0] == BEST[0];
        assert!(!world.run_until(next - ms(1), is_best), "too early");
        assert!(world.run_until(next + s(15), is_best), "{:?}", in_use(&world));
        world.run(s(100));
        assert_no_loss(&world);
        // Cut off for a moment it is back after ten seconds without loss, as any path.
        world.both(0, 1, |net| net.raw_blocked = true);
        world.run(s(5));
        world.both(0, 1, |net| net.raw_blocked = false);
        let end = world.now + s(30);
        assert!(world.run_until(end, is_best), "{:?}", in_use(&world));
    });
}
