//! The path that hosts end on, the reason why it is not a better one, and the cost of a move, in virtual time.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::time::Duration;

use weft_crypto::{Cipher, Format};
use weft_lab::sim::World;
use weft_lab::sim::expect::{both_engines, kernel_engine, seeds, without};
use weft_path::{
    CARRY_ON_MS, Config, Encapsulation, EngineKind, LINK_GRACE_MS, PathState, PathStatus, Reason,
    overhead,
};

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Long enough for the longest back-off and ten seconds of proof.
const SETTLED: Duration = s(90);
const NAT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

fn no_esp() -> Config {
    without(EngineKind::Kernel, Reason::KernelWithoutEsp)
}

fn kernel_only() -> Config {
    without(EngineKind::Userspace, Reason::Forced)
}

/// Hosts on a random but healthy network, all connected and on their best paths.
fn world(seed: u64, configs: Vec<Config>) -> World {
    let mut world = World::new(seed, configs);
    prepare(&mut world, 30);
    settled(&mut world);
    world
}

/// Two hosts, the second one behind a NAT.
fn world_with_nat(seed: u64, config: Config) -> World {
    let mut world = World::new(seed, vec![config.clone(), config]);
    world.hosts[1].nat = Some(NAT);
    prepare(&mut world, 40);
    settled(&mut world);
    world
}

fn prepare(world: &mut World, latency_most: u64) {
    world.link_latency = ms(1 + world.below(latency_most));
    for host in 0..world.hosts.len() {
        world.hosts[host].engine.kernel_tells_length = world.below(2) == 0;
        for other in 0..host {
            let latency = ms(1 + world.below(latency_most));
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

fn steady(world: &mut World, length: Duration) {
    world.tallies.clear();
    for (from, to) in [(0, 1), (1, 0)] {
        world.traffic(from, to, ms(1), None, length);
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

fn longest_gap(world: &World) -> Duration {
    world.tallies.values().map(|tally| tally.longest_gap).max().unwrap()
}

/// Engine here, engine there and encapsulation of the path in use, and why it is not the best.
fn in_use(world: &World, from: usize, to: usize) -> String {
    let Some(status) = world.active(from, to) else { return "none".to_owned() };
    let letter = |engine: Option<EngineKind>| engine.map_or("?", |engine| &engine.name()[..1]);
    let way = match (status.format, status.encapsulation) {
        (Some(Format::Esp), Some(how)) => how.name(),
        (format, _) => format.map_or("?", Format::name),
    };
    let why = status.why_not_best.map_or_else(String::new, |reason| format!(": {reason}"));
    format!("{}{} {way}{why}", letter(status.engine), letter(status.remote_engine))
}

fn both_ways(world: &World) -> [String; 2] {
    [in_use(world, 0, 1), in_use(world, 1, 0)]
}

fn reason_of(world: &World, which: impl Fn(&PathStatus) -> bool) -> Option<String> {
    let entry = world.status(0, 1).into_iter().find(|entry| which(entry))?;
    entry.reason.map(|reason| reason.to_string())
}

fn block(world: &mut World, raw: bool, ports: &[u16]) {
    world.both(0, 1, |net| {
        net.raw_blocked = raw;
        net.blocked_ports = ports.iter().copied().collect();
    });
}

#[test]
fn every_pairing_ends_on_its_best_path_for_the_right_reason() {
    let mut aes = both_engines();
    aes.engines[1].ciphers = vec![Cipher::Aes256Gcm];
    let mut chacha = both_engines();
    chacha.engines[1].ciphers = vec![Cipher::ChaCha20Poly1305];
    let mut chacha_wanted = both_engines();
    chacha_wanted.ciphers = vec![Cipher::ChaCha20Poly1305];
    chacha_wanted.engines[1].ciphers = vec![Cipher::Aes256Gcm];
    let configs = [
        both_engines(),
        no_esp(),
        kernel_only(),
        without(EngineKind::Kernel, Reason::Forced),
        without(EngineKind::Kernel, Reason::KernelWithoutVxlan),
        aes,
        chacha,
        chacha_wanted,
    ];
    let places = [None, Some(NAT)];
    let count = configs.len() as u64;
    seeds(0..count * count * 4, |seed| {
        let pick = |n: u64| configs[usize::try_from(n % count).unwrap()].clone();
        let mut world = World::new(seed, vec![pick(seed), pick(seed / count)]);
        let kind = usize::try_from(seed / count / count).unwrap();
        world.hosts[1].nat = places[kind & 1];
        if kind & 2 != 0 {
            world.set_address(0, "fd00::1".parse().unwrap(), ms(1));
            world.set_address(1, "fd00::2".parse().unwrap(), ms(1));
            world.hosts[1].nat = world.hosts[1].nat.map(|_| "2001:db8::1".parse().unwrap());
        }
        prepare(&mut world, 40);
        if world.best(0, 1).is_none() {
            world.run(s(20));
            let both = "cipher missing; peer: ";
            let status = world.overall(0, 1).unwrap();
            assert_eq!(status.state, PathState::Failed);
            let reason = status.reason.unwrap().to_string();
            assert!(reason.contains("cipher") || reason.starts_with(both), "{reason}");
            return;
        }
        settled(&mut world);
        steady(&mut world, s(2));
        world.run(s(40));
        assert_no_loss(&world);
        for (from, to) in [(0, 1), (1, 0)] {
            let status = world.active(from, to).unwrap();
            let ipv6 = kind & 2 != 0;
            let overhead = overhead(Format::Esp, status.encapsulation.unwrap(), ipv6);
            assert_eq!(status.mtu, Some((1500 - overhead) & !3), "not the whole MTU");
        }
    });
}

#[test]
fn the_best_path_is_in_use_within_three_seconds_of_the_first_link() {
    seeds(0..200, |seed| {
        let mut world = World::new(seed, vec![both_engines(), both_engines()]);
        prepare(&mut world, 100);
        // The first path to be proven is a matter of chance.
        world.both(0, 1, |net| net.jitter = ms(150));
        world.run(s(3));
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
    });
}

#[test]
fn blocked_protocol_50_falls_back_to_udp_and_comes_back() {
    seeds(0..20, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        steady(&mut world, s(30));
        let before = ms(1000 + world.below(1000));
        world.run(before);
        block(&mut world, true, &[]);
        world.run(s(20));
        let fallen = "kk udp: protocol 50 blocked";
        assert_eq!(both_ways(&world), [fallen, fallen]);
        assert!(longest_gap(&world) <= s(3), "{:?}", longest_gap(&world));
        world.run(s(100));
        steady(&mut world, s(90));
        block(&mut world, false, &[]);
        settled(&mut world);
        world.run(s(11));
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        assert_eq!(lost(&world), 0, "moving back lost packets");
    });
}

#[test]
fn blocked_ports_leave_protocol_50_alone_and_are_named() {
    seeds(0..20, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        steady(&mut world, s(20));
        block(&mut world, false, &[6784, 6785]);
        world.run(s(30));
        assert_no_loss(&world);
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        let udp = |entry: &PathStatus| entry.encapsulation == Some(Encapsulation::Udp);
        assert_eq!(reason_of(&world, udp).unwrap(), "data ports blocked");
        block(&mut world, false, &[]);
        world.run(s(70));
        assert_eq!(reason_of(&world, udp).unwrap(), "better path active");
    });
}

#[test]
fn a_failed_path_that_works_again_is_found_when_the_one_in_use_fails() {
    seeds(0..20, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        block(&mut world, false, &[6784, 6785]);
        // Failed paths are tried once a minute now.
        let outage = s(600 + world.below(60));
        world.run(outage);
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        steady(&mut world, s(20));
        let before = ms(1000 + world.below(1000));
        world.run(before);
        block(&mut world, true, &[]);
        world.run(s(20));
        let fallen = "kk udp: protocol 50 blocked";
        assert_eq!(both_ways(&world), [fallen, fallen]);
        assert!(longest_gap(&world) <= s(3), "{:?}", longest_gap(&world));
    });
}

#[test]
fn one_blocked_port_is_left_for_the_other_engine_in_one_step() {
    seeds(0..40, |seed| {
        let mut world = world_with_nat(seed, both_engines());
        assert_eq!(both_ways(&world), ["kk udp: NAT", "kk udp: NAT"]);
        steady(&mut world, s(15));
        world.run(s(1));
        // All traffic of the kernels; traffic of the vector engines' port goes on.
        let blocked = world.now;
        block(&mut world, false, &[6785]);
        world.run(s(10));
        for host in &world.hosts {
            let moves =
                host.changes.iter().filter(|(at, it)| *at > blocked && it.to == PathState::Active);
            assert_eq!(moves.count(), 1, "by way of a path that went down with it");
        }
        assert_eq!(both_ways(&world), ["uu udp: NAT", "uu udp: NAT"]);
        assert!(longest_gap(&world) <= s(3), "{:?}", longest_gap(&world));
    });
}

#[test]
fn with_both_blocked_the_state_is_failed_and_both_reasons_are_named() {
    seeds(0..40, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        steady(&mut world, s(60));
        block(&mut world, true, &[6784, 6785]);
        world.run(s(20));
        for (from, to) in [(0, 1), (1, 0)] {
            let status = world.overall(from, to).unwrap();
            assert_eq!(status.state, PathState::Failed);
            let reason = status.reason.unwrap().to_string();
            assert_eq!(reason, "data ports blocked; protocol 50 blocked");
            assert!(status.next_try.is_some_and(|at| at <= world.now + s(60)));
            assert!(world.hosts[from].engine.drops["no path"] > 1000, "dropped and counted");
        }
        let outage = s(world.below(300));
        world.run(outage);
        block(&mut world, false, &[]);
        let end = world.now + s(62);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "never healed");
        settled(&mut world);
        assert_eq!(world.plaintext, 0);
    });
}

#[test]
fn silence_costs_no_frame_until_it_has_lasted() {
    seeds(0..40, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        steady(&mut world, s(40));
        world.both(0, 1, |net| net.probes_lost = true);
        // Two seconds to the verdict, and then as long as the path carries on.
        world.run(ms(CARRY_ON_MS));
        for (from, to) in [(0, 1), (1, 0)] {
            assert_eq!(world.overall(from, to).unwrap().state, PathState::Failed);
        }
        assert_no_loss(&world);
        world.run(s(5));
        for host in &world.hosts {
            assert!(host.engine.drops["no path"] > 1000, "dropped and counted");
        }
        world.both(0, 1, |net| net.probes_lost = false);
        settled(&mut world);
        assert_eq!(world.plaintext, 0);
    });
}

#[test]
fn a_short_silence_costs_no_frame() {
    seeds(0..40, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        steady(&mut world, s(60));
        world.both(0, 1, |net| net.probes_lost = true);
        // A failed path is tried again after one, three and seven seconds.
        let silence = ms(2_600 + world.below(4_000));
        world.run(silence);
        assert_eq!(world.overall(0, 1).unwrap().state, PathState::Failed);
        world.both(0, 1, |net| net.probes_lost = false);
        world.run(s(20));
        assert_no_loss(&world);
        settled(&mut world);
    });
}

#[test]
fn a_link_that_ends_in_silence_costs_no_frame_while_it_reconnects() {
    seeds(0..40, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        steady(&mut world, s(60));
        // Answers to probes no longer come, so that paths fail before the hosts notice.
        world.disconnect(0, 1, s(8));
        world.run(s(40));
        assert_no_loss(&world);
        world.connect(0, 1);
        world.run(s(25));
        assert_no_loss(&world);
        settled(&mut world);
    });
}

#[test]
fn a_link_that_comes_back_over_a_silent_path_saves_no_frame_for_long() {
    seeds(0..20, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        world.both(0, 1, |net| net.probes_lost = true);
        world.run(s(5));
        steady(&mut world, s(60));
        world.disconnect(0, 1, s(2));
        world.run(s(15));
        assert_no_loss(&world);
        world.connect(0, 1);
        world.run(ms(CARRY_ON_MS) + s(5));
        for host in &world.hosts {
            assert!(host.engine.drops["no path"] > 1000, "dropped and counted");
        }
        world.both(0, 1, |net| net.probes_lost = false);
        settled(&mut world);
        assert_eq!(world.plaintext, 0);
    });
}

#[test]
fn userspace_alone_names_the_ports() {
    let mut world = world(1, vec![no_esp(), both_engines()]);
    block(&mut world, false, &[6784, 6785]);
    world.run(s(20));
    let reason = |from: usize| world.overall(from, 1 - from).unwrap().reason.unwrap();
    assert_eq!(reason(0), Reason::DataPortsBlocked);
    assert_eq!(reason(1), Reason::DataPortsBlocked);
}

#[test]
fn an_engine_that_reports_its_failure_is_left_at_once_by_both() {
    seeds(0..90, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        steady(&mut world, s(20));
        let before = ms(1000 + world.below(3000));
        world.run(before);
        match seed % 3 {
            0 => world.fail_engine(0, EngineKind::Kernel),
            1 => world.fail_path(0, 1),
            _ => {
                world.hosts[0].engine.broken.insert(EngineKind::Kernel);
                world.fail_engine(0, EngineKind::Kernel);
            }
        }
        world.run(s(9));
        assert!(longest_gap(&world) < ms(100), "{:?}", longest_gap(&world));
        let lost_by_failure = lost(&world);
        assert_ne!(in_use(&world, 0, 1), "kk raw");
        world.hosts[0].engine.broken.clear();
        settled(&mut world);
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        assert_eq!(lost(&world), lost_by_failure, "moving back lost packets");
    });
}

#[test]
fn a_kernel_engine_alone_heals_from_a_flush_within_three_seconds() {
    seeds(0..50, |seed| {
        let mut world = world(seed, vec![kernel_only(), both_engines()]);
        for _ in 0..4 {
            steady(&mut world, s(9));
            let before = ms(500 + world.below(4000));
            world.run(before);
            world.fail_engine(0, EngineKind::Kernel);
            world.run(s(10));
            assert!(longest_gap(&world) <= s(3), "{:?}", longest_gap(&world));
            assert!(world.is_connected(0, 1));
        }
        settled(&mut world);
    });
}

#[test]
fn an_engine_that_comes_or_goes_costs_no_packet() {
    seeds(0..30, |seed| {
        let mut world = world(seed, vec![both_engines(), no_esp()]);
        assert_eq!(
            both_ways(&world),
            ["ku udp: peer: kernel without ESP", "uk udp: kernel without ESP"]
        );
        steady(&mut world, s(60));
        world.run(s(1));
        world.set_engines(1, both_engines().engines, Vec::new());
        world.run(s(20));
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        let gone = without(EngineKind::Kernel, Reason::EngineError("broken for good".into()));
        world.set_engines(0, gone.engines, gone.missing);
        world.run(s(20));
        let (mine, theirs) = ("uk udp: engine error: broken for good", "ku udp: peer: ");
        assert_eq!(in_use(&world, 0, 1), mine);
        assert_eq!(in_use(&world, 1, 0), format!("{theirs}engine error: broken for good"));
        let mut fewer = both_engines();
        fewer.engines[1].ciphers = vec![Cipher::ChaCha20Poly1305];
        world.set_engines(1, fewer.engines, Vec::new());
        world.run(s(30));
        assert_no_loss(&world);
        assert_eq!(world.active(0, 1).unwrap().cipher, Some(Cipher::ChaCha20Poly1305));
        for host in &world.hosts {
            assert!(host.engine.inbound_sas() <= 4, "SAs of paths that are gone are left");
        }
    });
}

#[test]
fn rekeys_and_renewals_on_the_kernel_path_lose_nothing() {
    seeds(0..40, |seed| {
        let config = Config { rekey_after: s(2), ..both_engines() };
        let mut world = world(seed, vec![config.clone(), config]);
        steady(&mut world, s(12));
        for _ in 0..6 {
            let pause = ms(world.below(2000));
            world.run(pause);
            if seed % 2 == 0 {
                world.connect(0, 1);
            }
        }
        world.run(s(15));
        assert_no_loss(&world);
        assert!(world.active(0, 1).unwrap().rekeys >= 6);
    });
}

#[test]
fn a_kernel_peer_behind_nat_is_found_where_its_packets_come_from() {
    seeds(0..60, |seed| {
        let mut world = World::new(seed, vec![kernel_only(), kernel_only()]);
        world.hosts[1].nat = Some(NAT);
        world.hosts[1].knows_address = seed % 4 != 0;
        prepare(&mut world, 40);
        if seed % 4 == 0 {
            // No host can know of the NAT; protocol 50 does not pass, which shows in time.
            world.run(s(20));
            let blocked = "kk udp: protocol 50 blocked";
            assert_eq!(both_ways(&world), [blocked, blocked]);
            return;
        }
        settled(&mut world);
        assert_eq!(both_ways(&world), ["kk udp: NAT", "kk udp: NAT"]);
        steady(&mut world, s(20));
        world.run(s(2));
        world.rebind(NAT);
        world.run(s(10));
        assert!(longest_gap(&world) <= s(3), "{:?}", longest_gap(&world));
        settled(&mut world);
        let lost_by_rebinding = lost(&world);
        world.connect(0, 1);
        world.run(s(15));
        assert_eq!(lost(&world), lost_by_rebinding, "a learned address outlives a new session");
    });
}

#[test]
fn a_nat_that_gets_another_address_is_followed_by_the_kernels() {
    seeds(0..300, |seed| {
        let mut world = world_with_nat(seed, kernel_only());
        for number in 1..4 {
            let public = IpAddr::from([198, 51, 100, number]);
            world.migrate_nat(1, public, s(2));
            let end = world.now + s(10);
            let moved = |world: &World| {
                let to = world.active(0, 1).and_then(|status| status.remote);
                to.is_some_and(|remote| remote.ip() == public) && world.is_connected(0, 1)
            };
            assert!(world.run_until(end, moved), "not followed: {:?}", world.status(0, 1));
            world.run(s(5));
            steady(&mut world, s(2));
            world.run(s(20));
            assert_no_loss(&world);
            assert_eq!(both_ways(&world), ["kk udp: NAT", "kk udp: NAT"]);
        }
    });
}

#[test]
fn kernels_find_each_other_after_both_change_sides_of_a_nat() {
    seeds(0..60, |seed| {
        let mut world = world_with_nat(seed, kernel_only());
        // Each host has learned where the other was, and neither is there any more.
        world.hosts[1].nat = None;
        world.hosts[0].nat = Some(NAT);
        world.set_address(1, IpAddr::from([10, 1, 1, 1]), s(2));
        world.set_address(0, IpAddr::from([10, 1, 0, 1]), s(2));
        world.run(s(3));
        world.connect(0, 1);
        world.run(s(20));
        settled(&mut world);
        assert_eq!(both_ways(&world), ["kk udp: NAT", "kk udp: NAT"]);
        steady(&mut world, s(10));
        world.run(s(11));
        assert_no_loss(&world);
    });
}

#[test]
fn of_two_peers_at_one_address_the_first_has_the_kernel() {
    seeds(0..60, |seed| {
        let mut world = World::new(seed, vec![both_engines(), both_engines(), both_engines()]);
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
            assert_eq!(in_use(world, 0, second), "uk udp: address shared");
            assert_eq!(in_use(world, second, 0), "ku udp: peer: address shared");
            assert_eq!(in_use(world, 1, 2), "kk raw");
        };
        expect(&world, first, second);
        // A link that comes back in time changes nothing.
        world.disconnect(0, first, ms(100));
        world.run(ms(LINK_GRACE_MS) / 2);
        world.connect(0, first);
        settled(&mut world);
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
fn plaintext_needs_the_word_of_both() {
    let trusting =
        |subnet: &str| Config { trusted_subnets: vec![subnet.parse().unwrap()], ..both_engines() };
    seeds(0..40, |seed| {
        let (ours, theirs) = [
            ("10.0.0.0/24", "10.0.0.0/24"),
            ("10.0.0.0/24", "192.0.2.0/24"),
            ("10.0.0.2/32", "10.0.0.0/8"),
            ("10.0.0.1/32", "10.0.0.0/8"),
        ][usize::try_from(seed % 4).unwrap()];
        let mut world = world(seed, vec![trusting(ours), trusting(theirs)]);
        steady(&mut world, s(5));
        world.run(s(6));
        assert_no_loss(&world);
        if seed % 2 == 1 {
            assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
            assert_eq!(world.plaintext, 0, "plaintext though one host wants none");
            return;
        }
        assert_eq!(both_ways(&world), ["kk plain", "kk plain"]);
        assert!(!world.active(0, 1).unwrap().encrypted);
        assert_eq!(world.mtu(0, 1), Some(1448));
        // Blocked, it is encrypted again: on the best path that works.
        block(&mut world, false, &[6787]);
        world.run(s(5));
        let fallen = "kk raw: probe unanswered";
        assert_eq!(both_ways(&world), [fallen, fallen]);
        block(&mut world, false, &[]);
        settled(&mut world);
        // Trust is in an address.
        world.set_address(1, "172.16.0.9".parse().unwrap(), Duration::from_nanos(1));
        world.run(ms(1));
        let before = world.plaintext;
        steady(&mut world, s(10));
        world.run(s(2));
        world.connect(0, 1);
        settled(&mut world);
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        assert_eq!(world.plaintext, before, "plaintext towards an address that is not trusted");
        assert_eq!(world.hosts[0].engine.plain_paths(), 0);
    });
}

#[test]
fn a_kernel_without_esp_can_still_serve_trusted_peers() {
    let subnet = vec!["10.0.0.0/8".parse().unwrap()];
    let mut plain_only = no_esp();
    plain_only.engines.push(weft_path::EngineOffer { format: Format::Plain, ..kernel_engine() });
    plain_only.trusted_subnets.clone_from(&subnet);
    let trusting = Config { trusted_subnets: subnet, ..both_engines() };
    let mut world = World::new(3, vec![plain_only, trusting]);
    prepare(&mut world, 30);
    world.run(s(20));
    assert_eq!(both_ways(&world), ["kk plain", "kk plain"]);
}

#[test]
fn a_host_that_moves_takes_its_kernel_paths_along() {
    moves(s(3), |world, host, address| {
        world.set_address(host, address, ms(500));
        let gap = ms(world.below(20_000));
        world.run(gap);
        world.connect(0, 1);
    });
}

#[test]
fn a_link_that_goes_on_between_other_addresses_takes_its_kernel_paths_along() {
    moves(s(5), |world, host, address| world.migrate(host, address, s(2)));
}

/// Each host in turn moves to another address; its paths must be there within `limit`.
fn moves(limit: Duration, start: impl Fn(&mut World, usize, IpAddr)) {
    seeds(0..60, |seed| {
        let mut world = world(seed, vec![both_engines(), kernel_only()]);
        for round in 0..3 {
            let address = IpAddr::from([10, 0, 1 + round, 7]);
            let host = usize::from(round % 2);
            start(&mut world, host, address);
            let end = world.now + limit;
            let moved = |world: &World| {
                let to = world.active(1 - host, host).and_then(|status| status.remote);
                to.is_some_and(|remote| remote.ip() == address) && world.is_connected(0, 1)
            };
            assert!(world.run_until(end, moved), "not within {limit:?}");
            let left = |world: &World| {
                let remotes = world.status(1 - host, host).into_iter().filter_map(|it| it.remote);
                remotes.map(|remote| remote.ip()).filter(|it| *it != address).count()
            };
            assert!(
                world.run_until(end, |world| left(world) == 0),
                "SAs of the old address stay: {:#?}",
                world.status(1 - host, host)
            );
            world.run(s(3));
            steady(&mut world, s(2));
            world.run(s(60));
            assert_no_loss(&world);
            settled(&mut world);
        }
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
    });
}

#[test]
fn a_kernel_path_that_is_too_narrow_yields_to_userspace_and_comes_back() {
    seeds(0..20, |seed| {
        let mut world = world(seed, vec![both_engines(), both_engines()]);
        steady(&mut world, s(150));
        let hole = u16::try_from(1300 + world.below(150)).unwrap();
        world.both(0, 1, |net| net.mtu = hole);
        world.run(s(30));
        let narrow = ["uk udp: MTU not carried", "uk udp: MTU not carried"];
        assert_eq!(both_ways(&world), narrow);
        let fits = Some((hole - 92) & !3);
        assert_eq!((world.mtu(0, 1), world.mtu(1, 0)), (fits, fits));
        let lost_before = lost(&world);
        world.both(0, 1, |net| net.mtu = 1500);
        settled(&mut world);
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        assert_eq!(lost(&world), lost_before);
    });
}

#[test]
fn kernel_paths_use_jumbo_links_to_the_full() {
    seeds(0..20, |seed| {
        let jumbo = Config { link_mtu: 9000, ..both_engines() };
        let mut world = world(seed, vec![jumbo.clone(), jumbo]);
        world.run(s(20));
        assert_eq!(world.mtu(0, 1), Some((9000 - 84) & !3));
        world.both(0, 1, |net| net.mtu = 4000);
        world.run(s(60));
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"], "the containers' MTU is carried");
        assert_eq!(world.mtu(0, 1), Some((4000 - 84) & !3));
    });
}

#[test]
fn without_userspace_a_narrow_kernel_path_is_used_as_it_is() {
    seeds(0..30, |seed| {
        let mut world = World::new(seed, vec![kernel_only(), kernel_only()]);
        let hole = u16::try_from(1300 + world.below(150)).unwrap();
        world.both(0, 1, |net| net.mtu = hole);
        prepare(&mut world, 40);
        world.run(s(40));
        assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
        let fits = Some((hole - 84) & !3);
        assert_eq!((world.mtu(0, 1), world.mtu(1, 0)), (fits, fits));
    });
}

#[test]
fn an_earlier_version_is_met_on_the_vector_engine() {
    seeds(0..40, |seed| {
        let trusting = Config {
            trusted_subnets: vec!["0.0.0.0/0".parse().unwrap()],
            ..if seed % 2 == 0 { both_engines() } else { no_esp() }
        };
        let mut world = World::new(seed, vec![trusting, Config::default()]);
        world.hosts[1].old_version = true;
        prepare(&mut world, 40);
        settled(&mut world);
        let expected =
            if seed % 2 == 0 { "ku udp: peer: not offered" } else { "uu udp: kernel without ESP" };
        assert_eq!(in_use(&world, 0, 1), expected);
        steady(&mut world, s(5));
        world.run(s(6));
        assert_no_loss(&world);
        world.fail_engine(0, EngineKind::Userspace);
        world.restart(1);
        world.run(s(2));
        world.connect(0, 1);
        settled(&mut world);
    });
}

#[test]
fn an_algorithm_that_the_kernel_refuses_leaves_the_others() {
    let mut world = World::new(5, vec![both_engines(), both_engines()]);
    world.hosts[0].engine.refused.insert(Encapsulation::Raw);
    prepare(&mut world, 30);
    world.run(s(30));
    let mine = "kk udp: engine error: refused";
    assert_eq!(in_use(&world, 0, 1), mine);
    world.hosts[0].engine.refused.clear();
    settled(&mut world);
    assert_eq!(both_ways(&world), ["kk raw", "kk raw"]);
}
