//! Paths of format `ovpn` that the kernel's device moves at one end or at both, in virtual time. The tests show
//! the hosts that end on them, and that keys in two slots, NATs and shared addresses cost nothing.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::time::Duration;

use weft_crypto::Format;
use weft_lab::sim::World;
use weft_lab::sim::expect::{seeds, with_formats};
use weft_path::{Config, EngineKind, LINK_GRACE_MS, PathState, Reason, overhead};

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Long enough for the longest back-off and ten seconds of proof.
const SETTLED: Duration = s(90);
const NAT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const ESP: &[Format] = &[Format::Esp];
const OVPN: &[Format] = &[Format::Ovpn];
const ALL: &[Format] = &[Format::Esp, Format::Ovpn];

/// Its containers' packets fit paths of either format: `weft launch --mtu 1356`.
fn fitting(config: Config) -> Config {
    Config { container_mtu: 1_356, ..config }
}

/// A host restricted to this format, on both engines.
fn ovpn_alone() -> Config {
    Config { missing: Vec::new(), ..with_formats(OVPN, OVPN) }
}

/// Hosts on a random but healthy network, all connected and on their best paths.
fn world(seed: u64, configs: Vec<Config>) -> World {
    let mut world = World::new(seed, configs);
    prepare(&mut world);
    settled(&mut world);
    world
}

fn prepare(world: &mut World) {
    world.link_latency = ms(1 + world.below(40));
    for host in 0..world.hosts.len() {
        for other in 0..host {
            let latency = ms(1 + world.below(40));
            world.both(host, other, |net| net.latency = latency);
            world.connect(host, other);
        }
    }
}

fn settled(world: &mut World) {
    if let Err(wrong) = world.settle(SETTLED) {
        panic!("seed {}: {wrong}", world.seed);
    }
}

fn steady(world: &mut World, every: Duration, length: Duration) {
    world.tallies.clear();
    for (from, to) in [(0, 1), (1, 0)] {
        world.traffic(from, to, every, None, length);
    }
}

fn lost(world: &World) -> u64 {
    world.tallies.values().map(|tally| tally.lost).sum()
}

fn assert_no_loss(world: &World) {
    for (direction, tally) in &world.tallies {
        assert!(tally.delivered > 0);
        assert_eq!(tally.lost, 0, "{direction:?} {tally:?}");
    }
}

/// Engine here, engine there and way of the path in use, and why it is not the best.
fn in_use(world: &World, from: usize, to: usize) -> String {
    let Some(status) = world.active(from, to) else { return "none".to_owned() };
    let letter = |engine: Option<EngineKind>| engine.map_or("?", |engine| &engine.name()[..1]);
    let way = status.encapsulation.map_or("ovpn", |how| how.name());
    let why = status.why_not_best.map_or_else(String::new, |reason| format!(": {reason}"));
    format!("{}{} {way}{why}", letter(status.engine), letter(status.remote_engine))
}

fn both_ways(world: &World) -> [String; 2] {
    [in_use(world, 0, 1), in_use(world, 1, 0)]
}

fn rekeys(world: &World) -> [u64; 2] {
    [(0, 1), (1, 0)].map(|(from, to)| world.active(from, to).map_or(0, |status| status.rekeys))
}

#[test]
fn every_pairing_ends_on_its_best_path_for_the_right_reason() {
    let configs = [
        with_formats(ALL, ALL),
        with_formats(OVPN, ALL),
        with_formats(OVPN, ESP),
        with_formats(ESP, ESP),
        with_formats(&[], OVPN),
        ovpn_alone(),
    ];
    let count = configs.len() as u64;
    seeds(0..count * count * 2, |seed| {
        let pick = |n: u64| configs[usize::try_from(n % count).unwrap()].clone();
        let hosts = vec![pick(seed), pick(seed / count)];
        let containers = [hosts[0].container_mtu, hosts[1].container_mtu];
        let mut world = World::new(seed, hosts);
        world.hosts[1].nat = (seed >= count * count).then_some(NAT);
        prepare(&mut world);
        if world.best(0, 1).is_none() {
            world.run(s(20));
            let status = world.overall(0, 1).unwrap();
            assert_eq!(status.state, PathState::Failed);
            assert_eq!(status.reason, Some(Reason::NoCommonFormat));
            return;
        }
        settled(&mut world);
        steady(&mut world, ms(2), s(2));
        world.run(s(40));
        assert_no_loss(&world);
        for (from, to) in [(0, 1), (1, 0)] {
            let status = world.active(from, to).unwrap();
            let how = status.encapsulation.unwrap_or_default();
            let overhead = overhead(status.format.unwrap(), how, false);
            let links = (1500 - overhead) & !3;
            let theirs = containers[to];
            let whole = if theirs < containers[from] { links.min(theirs) } else { links };
            assert_eq!(status.mtu, Some(whole), "not the whole MTU");
        }
    });
}

#[test]
fn kernels_without_esp_meet_in_ovpn_and_the_others_where_they_can() {
    let ends = |here: Config, there: Config| both_ways(&world(1, vec![here, there]));
    let kernels = with_formats(OVPN, ESP);
    let why = "kk ovpn: kernel without ESP";
    assert_eq!(ends(kernels.clone(), kernels.clone()), [why, why]);
    let auto = with_formats(ALL, ALL);
    assert_eq!(ends(auto.clone(), auto.clone()), ["kk raw", "kk raw"]);
    // Longer packets of containers than the kernel's `ovpn` carries are the vector engine's.
    let theirs = "ku udp: peer: kernel without ESP";
    assert_eq!(ends(auto.clone(), kernels.clone()), [theirs, why]);
    let theirs = "kk ovpn: peer: kernel without ESP";
    assert_eq!(ends(fitting(auto), kernels.clone()), [theirs, why]);
    let esp = with_formats(ESP, ESP);
    let expected = ["ku udp: peer: kernel without ESP", "uk udp: kernel without ESP"];
    assert_eq!(ends(esp, kernels), expected);
    assert_eq!(ends(ovpn_alone(), ovpn_alone()), ["kk ovpn", "kk ovpn"]);
    let vector = with_formats(&[], OVPN);
    let expected = ["ku ovpn: peer: kernel without ESP", "uk ovpn: kernel without ESP"];
    assert_eq!(ends(ovpn_alone(), vector), expected);
}

#[test]
fn twenty_keys_in_two_slots_lose_nothing() {
    seeds(0..24, |seed| {
        let kernels = Config { rekey_after: s(2), ..with_formats(OVPN, ESP) };
        // Against the other kernel, and against a vector engine.
        let other = if seed % 3 == 0 { with_formats(&[], OVPN) } else { kernels.clone() };
        let other = Config { rekey_after: s(2), ..other };
        let mut world = world(seed, vec![kernels, other]);
        let engines = if seed % 3 == 0 { "ku" } else { "kk" };
        assert_eq!(in_use(&world, 0, 1), format!("{engines} ovpn: kernel without ESP"));
        let before = rekeys(&world);
        steady(&mut world, ms(5), s(58));
        world.run(s(60));
        assert_no_loss(&world);
        for (after, before) in rekeys(&world).into_iter().zip(before) {
            assert!(after - before >= 20, "{after} after {before}");
        }
    });
}

#[test]
fn renewals_in_the_middle_of_a_rekey_lose_nothing() {
    seeds(0..40, |seed| {
        let kernels = Config { rekey_after: s(2), ..with_formats(OVPN, &[]) };
        let mut world = world(seed, vec![kernels.clone(), kernels]);
        let before = rekeys(&world);
        steady(&mut world, ms(5), s(40));
        for _ in 0..8 {
            let pause = ms(world.below(3_000));
            world.run(pause);
            world.connect(0, 1);
            if seed % 2 == 0 {
                // Another one at once: the offers of the first are never answered.
                let pause = ms(world.below(60));
                world.run(pause);
                world.connect(0, 1);
            }
        }
        world.run(s(41));
        assert_no_loss(&world);
        for (after, before) in rekeys(&world).into_iter().zip(before) {
            assert!(after - before >= 6, "{after} after {before}");
        }
    });
}

#[test]
fn a_link_that_breaks_in_the_middle_of_a_rekey_loses_nothing() {
    seeds(0..40, |seed| {
        let kernels = Config { rekey_after: s(2), ..with_formats(OVPN, &[]) };
        let mut world = world(seed, vec![kernels.clone(), kernels]);
        steady(&mut world, ms(5), s(30));
        for _ in 0..4 {
            let pause = ms(3_000 + world.below(2_000));
            world.run(pause);
            world.disconnect(0, 1, ms(300));
            let gap = ms(400 + world.below(2_000));
            world.run(gap);
            world.connect(0, 1);
        }
        world.run(s(31));
        assert_no_loss(&world);
        assert!(world.is_connected(0, 1));
    });
}

#[test]
fn a_float_moves_the_path_without_another_sa() {
    seeds(0..40, |seed| {
        let kernels = with_formats(OVPN, &[]);
        // At the other end of a NAT the vector engine may send as well.
        let other = if seed % 3 == 0 { with_formats(&[], OVPN) } else { kernels.clone() };
        let mut world = World::new(seed, vec![kernels, other]);
        world.hosts[1].nat = Some(NAT);
        world.hosts[1].knows_address = seed % 2 == 0;
        prepare(&mut world);
        settled(&mut world);
        let remote = |world: &World| world.active(0, 1).unwrap().remote.unwrap();
        assert_eq!(remote(&world).ip(), NAT);
        world.run(s(5));
        let keys = |world: &World| world.hosts[0].engine.outbound_installed;
        for _ in 0..3 {
            steady(&mut world, ms(4), s(8));
            let before = ms(500 + world.below(1_000));
            world.run(before);
            let (port, installed, moves) =
                (remote(&world).port(), keys(&world), world.hosts[0].engine.moves);
            world.rebind(NAT);
            let end = world.now + s(1);
            let moved = |world: &World| remote(world).port() != port;
            assert!(world.run_until(end, moved), "not followed");
            world.run(s(9));
            assert_eq!(keys(&world), installed, "another SA");
            assert_eq!(world.hosts[0].engine.moves, moves + 1);
            let gap = world.tallies.values().map(|tally| tally.longest_gap).max().unwrap();
            assert!(gap <= ms(500), "{gap:?}");
            // The learned address outlives rekeys.
            let lost_by_rebinding = lost(&world);
            world.connect(0, 1);
            steady(&mut world, ms(4), s(3));
            world.run(s(5));
            assert_no_loss(&world);
            assert!(lost_by_rebinding <= 100, "{lost_by_rebinding}");
        }
    });
}

#[test]
fn hosts_that_move_take_their_paths_along() {
    seeds(0..40, |seed| {
        let mut world = world(seed, vec![with_formats(OVPN, &[]), ovpn_alone()]);
        for round in 0..3 {
            let (host, address) = (usize::from(round % 2), IpAddr::from([10, 0, 1 + round, 7]));
            if seed % 2 == 0 {
                world.migrate(host, address, s(2));
            } else {
                world.set_address(host, address, ms(500));
                let gap = ms(world.below(20_000));
                world.run(gap);
                world.connect(0, 1);
            }
            let end = world.now + s(5);
            let moved = |world: &World| {
                let to = world.active(1 - host, host).and_then(|status| status.remote);
                to.is_some_and(|remote| remote.ip() == address) && world.is_connected(0, 1)
            };
            assert!(world.run_until(end, moved), "not within 5 s");
            world.run(s(5));
            steady(&mut world, ms(2), s(2));
            world.run(s(30));
            assert_no_loss(&world);
            settled(&mut world);
        }
    });
}

#[test]
fn two_peers_at_one_address_both_have_the_kernel() {
    seeds(0..30, |seed| {
        let kernels = with_formats(OVPN, ESP);
        let mut world = World::new(seed, vec![kernels.clone(), kernels.clone(), kernels]);
        world.hosts[1].nat = Some(NAT);
        world.hosts[2].nat = Some(NAT);
        prepare(&mut world);
        settled(&mut world);
        let why = "kk ovpn: kernel without ESP";
        for (a, b) in [(0, 1), (0, 2), (1, 2)] {
            assert_eq!([in_use(&world, a, b), in_use(&world, b, a)], [why, why]);
        }
        steady(&mut world, ms(2), s(5));
        world.traffic(0, 2, ms(2), None, s(5));
        world.traffic(2, 0, ms(2), None, s(5));
        world.run(s(6));
        assert_no_loss(&world);
    });
}

#[test]
fn of_two_peers_at_one_address_the_second_has_the_kernels_ovpn() {
    seeds(0..30, |seed| {
        let auto = fitting(with_formats(ALL, ALL));
        let mut world = World::new(seed, vec![auto.clone(), auto.clone(), auto]);
        world.hosts[1].nat = Some(NAT);
        world.hosts[2].nat = Some(NAT);
        world.connect(1, 2);
        let (first, second) = if seed % 2 == 0 { (1, 2) } else { (2, 1) };
        world.connect(0, first);
        world.run(ms(100));
        world.connect(0, second);
        settled(&mut world);
        let expect = |world: &World, first: usize, second: usize| {
            assert_eq!(in_use(world, 0, first), "kk udp: NAT");
            assert_eq!(in_use(world, 0, second), "kk ovpn: address shared");
            assert_eq!(in_use(world, second, 0), "kk ovpn: peer: address shared");
            assert_eq!(in_use(world, 1, 2), "kk raw");
            let paths = world.status(0, second);
            assert!(paths.iter().all(|entry| entry.path.is_some()), "an engine counts as absent");
        };
        expect(&world, first, second);
        if seed % 4 < 2 {
            world.forget(0, first);
        } else {
            world.disconnect(0, first, ms(100));
            world.run(ms(LINK_GRACE_MS) + s(1));
        }
        world.run(s(80));
        assert_eq!(in_use(&world, 0, second), "kk udp: NAT");
        world.connect(0, first);
        settled(&mut world);
        expect(&world, second, first);
    });
}

#[test]
fn kernels_that_get_esp_move_to_it_and_lose_nothing() {
    seeds(0..20, |seed| {
        // Without a vector engine there is nothing between the two paths.
        let mut world = world(seed, vec![with_formats(OVPN, &[]), with_formats(OVPN, &[])]);
        steady(&mut world, ms(2), s(60));
        world.run(s(1));
        for host in [0, 1] {
            let both = with_formats(ALL, &[]);
            world.set_engines(host, both.engines, both.missing);
            let pause = ms(world.below(3_000));
            world.run(pause);
        }
        settled(&mut world);
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        world.run(s(60));
        assert_no_loss(&world);
        let left =
            |of: usize| world.status(of, 1 - of).iter().any(|it| it.format == Some(Format::Ovpn));
        assert!(!left(0) && !left(1), "what stood in is still there");
    });
}

#[test]
fn a_blocked_port_is_left_for_the_vector_engine_and_taken_again() {
    seeds(0..20, |seed| {
        let mut world = world(seed, vec![ovpn_alone(), ovpn_alone()]);
        assert_eq!(both_ways(&world), ["kk ovpn", "kk ovpn"]);
        steady(&mut world, ms(4), s(15));
        world.run(s(1));
        world.both(0, 1, |net| net.blocked_ports = [6786].into());
        world.run(s(10));
        let fallen = "uu ovpn: data ports blocked";
        assert_eq!(both_ways(&world), [fallen, fallen]);
        let gap = world.tallies.values().map(|tally| tally.longest_gap).max().unwrap();
        assert!(gap <= s(3), "{gap:?}");
        world.run(s(10));
        steady(&mut world, ms(10), s(90));
        world.both(0, 1, |net| net.blocked_ports.clear());
        settled(&mut world);
        assert_eq!(both_ways(&world), ["kk ovpn", "kk ovpn"]);
        assert_eq!(lost(&world), 0, "moving back lost packets");
    });
}

#[test]
fn a_device_that_fails_comes_back_with_other_keys() {
    seeds(0..30, |seed| {
        let mut world = world(seed, vec![with_formats(OVPN, &[]), ovpn_alone()]);
        for round in 0..12 {
            steady(&mut world, ms(5), s(5));
            let before = ms(500 + world.below(2_000));
            world.run(before);
            if round % 2 == 0 {
                world.fail_engine(0, EngineKind::Kernel);
            } else {
                world.fail_path(0, 1);
            }
            world.run(s(6));
            let gap = world.tallies.values().map(|tally| tally.longest_gap).max().unwrap();
            assert!(gap <= s(3), "{gap:?}");
            assert!(world.is_connected(0, 1));
        }
        settled(&mut world);
        for host in &world.hosts {
            assert_eq!(host.engine.drops.get("wrong key"), None);
            assert_eq!(host.engine.drops.get("wrong tunnel address"), None);
        }
    });
}

#[test]
fn an_engine_that_comes_or_goes_and_comes_again_costs_next_to_nothing() {
    seeds(0..20, |seed| {
        let mut world = world(seed, vec![ovpn_alone(), ovpn_alone()]);
        let vector = with_formats(&[], OVPN);
        for _ in 0..4 {
            steady(&mut world, ms(5), s(20));
            world.set_engines(1, vector.engines.clone(), vector.missing.clone());
            let pause = ms(world.below(12_000));
            world.run(pause);
            // The previous path still drains, which delays the next one.
            world.set_engines(1, ovpn_alone().engines, Vec::new());
            world.run(s(25));
            let gap = world.tallies.values().map(|tally| tally.longest_gap).max().unwrap();
            assert!(gap <= s(3), "{gap:?}");
            settled(&mut world);
        }
        assert_eq!(both_ways(&world), ["kk ovpn", "kk ovpn"]);
        for host in &world.hosts {
            assert!(host.engine.inbound_sas() <= 8, "SAs of paths that are gone are left");
        }
    });
}
