//! The path state machine among simulated hosts, over thousands of seeds in virtual time.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::time::{Duration, Instant};

use weft_crypto::{Cipher, Format};
use weft_lab::sim::World;
use weft_lab::sim::expect::{both_engines, seeds};
use weft_path::{
    Config, EngineKind, GENERATIONS_MAX, LINK_GRACE_MS, Message, PathState, Reason, RekeyRequest,
};

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn fast_rekey(lanes_max: u16) -> Config {
    let mut config = Config { rekey_after: s(2), ..Config::default() };
    config.engines[0].lanes_max = lanes_max;
    config
}

/// Two hosts on a random but healthy network, connected.
fn pair(seed: u64, config: &Config) -> World {
    let mut world = World::new(seed, vec![config.clone(), config.clone()]);
    world.link_latency = ms(1 + world.below(60));
    let latency = ms(1 + world.below(60));
    world.both(0, 1, |net| net.latency = latency);
    world.connect(0, 1);
    let end = world.now + s(3);
    assert!(world.run_until(end, |world| world.is_connected(0, 1)), "not active within 3 s");
    world
}

fn steady(world: &mut World, length: Duration) {
    world.traffic(0, 1, ms(1), None, length);
    world.traffic(1, 0, ms(1), None, length);
}

fn assert_no_loss(world: &World) {
    for (direction, tally) in &world.tallies {
        assert!(tally.sent > 0);
        assert_eq!(
            tally.lost, 0,
            "{direction:?}: {tally:?}, drops {:?} {:?}",
            world.hosts[0].engine.drops, world.hosts[1].engine.drops
        );
        assert_eq!(tally.sent, tally.delivered, "{direction:?}");
    }
}

fn failed_at(world: &World, host: usize, after: Instant) -> Option<Instant> {
    let changes = &world.hosts[host].changes;
    let mut failures = changes.iter().filter(|(at, it)| *at > after && it.to == PathState::Failed);
    failures.next().map(|(at, _)| *at)
}

fn reason(world: &World, host: usize) -> Option<Reason> {
    world.overall(host, 1 - host).and_then(|status| status.reason)
}

#[test]
fn both_sides_are_active_within_three_seconds() {
    seeds(0..1500, |seed| {
        let mut world = World::new(seed, vec![Config::default(), fast_rekey(4)]);
        world.link_latency = ms(1 + world.below(120));
        let (latency, jitter, loss) = (world.below(120), world.below(40), world.below(60));
        world.both(0, 1, |net| {
            net.latency = ms(1 + latency);
            net.jitter = ms(jitter);
            net.loss_per_mille = u32::try_from(loss).unwrap();
        });
        world.connect(0, 1);
        let end = world.now + s(3);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "not within 3 s");
    });
}

#[test]
fn not_one_packet_is_lost_by_rekeys_renewals_and_simultaneous_offers() {
    seeds(0..40, |seed| {
        let lanes = u16::try_from(1 + seed % 4).unwrap();
        let mut world = pair(seed, &fast_rekey(lanes));
        let jitter = ms(world.below(30));
        world.both(0, 1, |net| net.jitter = jitter);
        steady(&mut world, s(12));
        for _ in 0..6 {
            let pause = ms(world.below(2000));
            world.run(pause);
            if seed % 2 == 0 {
                world.connect(0, 1);
            }
            for host in &world.hosts {
                let live = host.engine.inbound_sas();
                assert!(live <= GENERATIONS_MAX * usize::from(lanes), "{live} SAs live");
            }
        }
        world.run(s(15));
        assert_no_loss(&world);
        for host in &world.hosts {
            assert!(host.paths.status(world.now)[0].rekeys >= 6);
        }
    });
}

#[test]
fn a_dead_network_is_noticed_within_three_seconds_and_healed_from() {
    seeds(0..300, |seed| {
        let mut world = pair(seed, &Config::default());
        steady(&mut world, s(20));
        let before = ms(3000 + world.below(2000));
        world.run(before);
        let cut = world.now;
        world.both(0, 1, |net| net.cut = true);
        world.run(s(5));
        for (from, to) in [(0, 1), (1, 0)] {
            let last = world.tallies[&(from, to)].last.unwrap();
            let failed = failed_at(&world, from, cut).expect("never failed");
            assert!(failed - last <= s(3), "failed {:?} after the last packet", failed - last);
            assert_eq!(reason(&world, from), Some(Reason::DataPortsBlocked));
        }
        let outage = s(world.below(300));
        world.run(outage);
        world.both(0, 1, |net| net.cut = false);
        let end = world.now + s(62);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "never healed");
    });
}

#[test]
fn one_dead_direction_leaves_the_other_alone() {
    seeds(0..100, |seed| {
        let mut world = pair(seed, &Config::default());
        steady(&mut world, s(8));
        world.net(0, 1).cut = true;
        world.run(s(4));
        assert_eq!(world.state(0, 1), Some(PathState::Failed));
        assert_eq!(world.state(1, 0), Some(PathState::Active));
        world.run(s(10));
        assert_eq!(world.tallies[&(1, 0)].lost, 0);
        world.net(0, 1).cut = false;
        let end = world.now + s(62);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "never healed");
    });
}

#[test]
fn a_black_hole_for_large_packets_lowers_the_mtu_and_its_end_raises_it() {
    seeds(0..60, |seed| {
        let mut world = pair(seed, &Config::default());
        world.run(s(5));
        assert_eq!((world.mtu(0, 1), world.mtu(1, 0)), (Some(1408), Some(1408)));
        let hole = u16::try_from(1300 + world.below(190)).unwrap();
        let fits = (hole - 92) & !3;
        let before = world.now;
        world.net(0, 1).mtu = hole;
        world.run(s(3));
        assert!(world.mtu(0, 1).unwrap() <= fits, "large packets are still lost");
        world.run(s(40));
        assert_eq!(world.mtu(0, 1), Some(fits));
        assert_eq!(world.mtu(1, 0), Some(1408));
        assert_eq!(failed_at(&world, 0, before), None, "a black hole is not a dead path");
        world.net(0, 1).mtu = 9000;
        world.run(s(615));
        assert_eq!(world.mtu(0, 1), Some(1408));
    });
}

#[test]
fn packets_lost_by_chance_are_not_taken_for_a_smaller_mtu() {
    seeds(0..100, |seed| {
        let mut world = pair(seed, &Config::default());
        world.run(s(5));
        world.both(0, 1, |net| net.loss_per_mille = 30);
        for _ in 0..600 {
            world.run(s(1));
            assert_eq!((world.mtu(0, 1), world.mtu(1, 0)), (Some(1408), Some(1408)));
        }
    });
}

#[test]
fn a_path_too_narrow_for_the_containers_becomes_active_with_what_it_carries() {
    seeds(0..200, |seed| {
        let mut world = World::new(seed, vec![Config::default(), Config::default()]);
        let hole = u16::try_from(1292 + world.below(180)).unwrap();
        world.both(0, 1, |net| net.mtu = hole);
        world.connect(0, 1);
        let end = world.now + s(3);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "not within 3 s");
        world.run(s(40));
        let fits = Some((hole - 92) & !3);
        assert_eq!((world.mtu(0, 1), world.mtu(1, 0)), (fits, fits));
    });
}

#[test]
fn a_path_below_the_floor_fails() {
    let mut world = World::new(7, vec![Config::default(), Config::default()]);
    world.both(0, 1, |net| net.mtu = 1200);
    world.connect(0, 1);
    world.run(s(10));
    assert_eq!(world.state(0, 1), Some(PathState::Failed));
    assert_eq!(reason(&world, 0), Some(Reason::DataPortsBlocked));
}

#[test]
fn jumbo_links_are_used_to_the_full_and_a_refused_size_is_left_at_once() {
    let config = Config { link_mtu: 9000, ..Config::default() };
    let mut world = pair(3, &config);
    world.run(s(30));
    assert_eq!(world.mtu(0, 1), Some((9000 - 92) & !3));
    // The kernel refuses what the state machine has not been told of.
    world.hosts[0].link_mtu = 1500;
    world.run(ms(600));
    assert!(world.mtu(0, 1).unwrap() <= 1408);
    world.run(s(60));
    assert_eq!(world.mtu(0, 1), Some(1408));
    assert_eq!(world.mtu(1, 0), Some((9000 - 92) & !3));
    // Told, both directions follow, for the peer's packets do not fit either.
    world.set_link_mtu(0, 1400);
    world.run(ms(200));
    assert_eq!((world.mtu(0, 1), world.mtu(1, 0)), (Some(1308), Some(1308)));
}

#[test]
fn a_short_loss_of_the_link_loses_no_data_and_a_long_one_fails_the_path() {
    seeds(0..40, |seed| {
        let mut world = pair(seed, &fast_rekey(1));
        steady(&mut world, s(20));
        let before = ms(2000 + world.below(3000));
        world.run(before);
        world.disconnect(0, 1, ms(300));
        let gap = ms(400 + world.below(10_000));
        world.run(gap);
        assert!(world.is_connected(0, 1));
        world.connect(0, 1);
        world.run(s(25));
        assert_no_loss(&world);
        world.disconnect(0, 1, ms(300));
        world.run(ms(LINK_GRACE_MS) + s(1));
        for host in 0..2 {
            assert_eq!(reason(&world, host), Some(Reason::LinkLost));
        }
        world.connect(0, 1);
        let end = world.now + s(3);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "not again within 3 s");
    });
}

#[test]
fn a_restarted_peer_is_found_again() {
    seeds(0..300, |seed| {
        let mut world = pair(seed, &fast_rekey(2));
        steady(&mut world, s(30));
        let before = ms(world.below(6000));
        world.run(before);
        world.restart(1);
        let dead = ms(200 + world.below(90_000));
        world.run(dead);
        world.connect(0, 1);
        let back = world.now;
        let end = back + s(3);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "not within 3 s");
        world.tallies.clear();
        steady(&mut world, s(5));
        world.run(s(6));
        assert_eq!(world.tallies[&(0, 1)].lost + world.tallies[&(1, 0)].lost, 0);
    });
}

#[test]
fn an_sa_near_its_limit_is_replaced_before_it_ends() {
    seeds(0..40, |seed| {
        let config = Config { packets_soft: 600, packets_hard: 900, ..Config::default() };
        let mut world = pair(seed, &config);
        steady(&mut world, s(10));
        world.run(s(11));
        assert_no_loss(&world);
        for host in &world.hosts {
            assert!(host.paths.status(world.now)[0].rekeys >= 10);
        }
    });
}

#[test]
fn an_exhausted_sa_stops_and_a_new_one_takes_over() {
    let config = Config { packets_soft: 300, packets_hard: 310, ..Config::default() };
    let mut world = pair(1, &config);
    world.link_latency = ms(400);
    world.traffic(0, 1, ms(1), None, s(1));
    world.run(ms(700));
    assert_eq!(reason(&world, 0), Some(Reason::SaExhausted));
    assert_eq!(world.state(0, 1), Some(PathState::Failed));
    let end = world.now + s(4);
    assert!(world.run_until(end, |world| world.is_connected(0, 1)), "no successor");
}

#[test]
fn without_a_successor_an_sa_ends_with_its_life() {
    let config = Config { rekey_after: s(600), sa_lifetime: s(610), ..Config::default() };
    let mut world = World::new(5, vec![config.clone(), Config { rekey_after: s(4000), ..config }]);
    world.connect(0, 1);
    world.run(s(3));
    // Host 1 never makes a successor in time, so host 0 has to stop, ask, and go on.
    world.run(s(607));
    assert!(world.is_connected(0, 1));
    world.run(s(10));
    assert!(world.is_connected(0, 1));
    assert!(world.hosts[1].engine.inbound_sas() <= 2);
}

#[test]
fn messages_said_again_in_any_order_change_nothing() {
    seeds(0..40, |seed| {
        let mut world = pair(seed, &fast_rekey(2));
        steady(&mut world, s(10));
        let mut old: Vec<(usize, usize, Message)> = Vec::new();
        for round in 0..300 {
            world.run(ms(30));
            if round % 60 == 30 {
                world.connect(0, 1);
            }
            for host in 0..2 {
                let heard = std::mem::take(&mut world.hosts[host].heard);
                old.extend(heard.into_iter().map(|(from, message)| (from, host, message)));
            }
            for _ in 0..4 {
                let pick = world.below(old.len() as u64);
                let (from, to, mut message) = old[usize::try_from(pick).unwrap()].clone();
                let wrong = world.below(1000);
                match (&mut message, world.below(3)) {
                    (Message::Offer(offer), 0) => offer.offer = wrong,
                    (Message::Accept(accept), 0) => accept.offer = wrong + 1_000_000,
                    (Message::Accept(accept), 1) => accept.lanes = vec![900, 901],
                    (Message::ProbeAnswer(answer), 0) => answer.probe = wrong,
                    (Message::ProbeAnswer(answer), 1) => answer.mtu = 9000,
                    _ => {}
                }
                world.inject(from, to, message);
            }
        }
        world.run(s(5));
        assert_no_loss(&world);
    });
}

#[test]
fn a_flood_of_wishes_for_new_sas_is_bounded() {
    let mut world = pair(2, &Config::default());
    steady(&mut world, s(10));
    for spi in 0..3000 {
        world.inject(1, 0, Message::RekeyRequest(RekeyRequest { spi }));
        world.run(ms(3));
        assert!(world.hosts[0].engine.inbound_sas() <= GENERATIONS_MAX);
    }
    world.run(s(5));
    assert_no_loss(&world);
}

#[test]
fn a_failed_engine_fails_its_paths_at_once_and_comes_back() {
    seeds(0..100, |seed| {
        let mut world = pair(seed, &Config::default());
        world.run(s(2));
        world.fail_engine(0, EngineKind::Userspace);
        assert_eq!(reason(&world, 0), Some(Reason::EngineError("simulated".into())));
        assert_eq!(world.state(0, 1), Some(PathState::Failed));
        if seed % 2 == 0 {
            world.hosts[0].engine.broken.insert(EngineKind::Userspace);
        }
        world.run(s(5));
        world.hosts[0].engine.broken.clear();
        let end = world.now + s(62);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "never came back");
    });
}

#[test]
fn a_peer_behind_nat_is_followed_when_its_address_changes() {
    seeds(0..100, |seed| {
        let public = IpAddr::from([192, 0, 2, 1]);
        let mut world = World::new(seed, vec![fast_rekey(1), fast_rekey(2)]);
        world.hosts[1].nat = Some(public);
        world.connect(0, 1);
        let end = world.now + s(4);
        assert!(world.run_until(end, |world| world.is_connected(0, 1)), "not through NAT");
        let remote = |world: &World| world.active(0, 1).and_then(|status| status.remote).unwrap();
        assert_eq!(remote(&world).ip(), public);
        let before = ms(world.below(3000));
        world.run(before);
        let old = remote(&world);
        world.rebind(public);
        let end = world.now + s(1);
        assert!(world.run_until(end, |world| remote(world) != old), "not followed");
        // An address that was learned outlives rekeys.
        world.traffic(0, 1, ms(1), None, s(8));
        world.run(s(30));
        assert_no_loss(&world);
        assert!(world.is_connected(0, 1));
        assert_eq!(failed_at(&world, 0, end), None);
        assert!(world.hosts[1].engine.keepalives >= 1);
    });
}

#[test]
fn traffic_moves_to_the_other_engine_and_back() {
    seeds(0..60, |seed| {
        let mut world = pair(seed, &both_engines());
        world.run(s(25));
        let engine = |world: &World| world.active(0, 1).unwrap().engine;
        assert_eq!(engine(&world), Some(EngineKind::Kernel));
        steady(&mut world, s(60));
        world.run(s(1));
        let blocked = world.now;
        // Blocks all traffic of the kernel engines.
        world.both(0, 1, |net| {
            net.blocked_ports.insert(6785);
            net.raw_blocked = true;
        });
        world.run(ms(3100));
        assert!(world.is_connected(0, 1));
        let lost = world.tallies[&(0, 1)].lost;
        assert!(lost <= 3000, "{lost} packets lost at one per millisecond");
        world.run(s(10));
        assert_eq!(world.tallies[&(0, 1)].lost, lost);
        world.both(0, 1, |net| {
            net.blocked_ports.clear();
            net.raw_blocked = false;
        });
        let healed = world.now;
        world.run(s(85));
        assert_eq!(engine(&world), Some(EngineKind::Kernel));
        assert_eq!(world.tallies[&(0, 1)].lost, lost, "moving back lost packets");
        let back = world.hosts[0].changes.iter().rev();
        let mut back = back.filter(|(at, it)| *at > blocked && it.to == PathState::Active);
        assert!(back.next().unwrap().0 - healed >= s(10), "moved back without proof");
    });
}

#[test]
fn hosts_without_a_common_cipher_or_format_say_so() {
    let only = |cipher| Config { ciphers: vec![cipher], ..Config::default() };
    let mut world = World::new(1, vec![only(Cipher::Aes256Gcm), only(Cipher::ChaCha20Poly1305)]);
    world.connect(0, 1);
    world.run(s(3));
    assert_eq!(reason(&world, 0), Some(Reason::NoCommonCipher));
    assert_eq!(world.state(1, 0), Some(PathState::Failed));

    let mut other = Config::default();
    other.engines[0].format = Format::Ovpn;
    let mut world = World::new(1, vec![Config::default(), other]);
    world.connect(0, 1);
    world.run(s(3));
    assert_eq!(reason(&world, 1), Some(Reason::NoCommonFormat));
}

#[test]
fn each_receiver_chooses_its_own_cipher() {
    let mut chacha = Config::default();
    chacha.ciphers.reverse();
    let mut world = World::new(1, vec![Config::default(), chacha]);
    world.connect(0, 1);
    world.run(s(3));
    let cipher = |host: usize| world.hosts[host].paths.status(world.now)[0].cipher;
    assert_eq!(cipher(0), Some(Cipher::ChaCha20Poly1305));
    assert_eq!(cipher(1), Some(Cipher::Aes256Gcm));
}

#[test]
fn after_any_sequence_of_troubles_every_pair_is_connected() {
    seeds(0..150, |seed| {
        let config = if seed % 2 == 0 { fast_rekey(2) } else { both_engines() };
        let mut world = World::new(seed, vec![config.clone(), config.clone(), config]);
        let pairs = [(0, 1), (0, 2), (1, 2)];
        for (a, b) in pairs {
            world.connect(a, b);
        }
        for (a, b) in pairs {
            world.traffic(a, b, ms(10), None, s(40));
        }
        for _ in 0..25 {
            let pick = usize::try_from(world.below(3)).unwrap();
            let (a, b) = pairs[pick];
            match world.below(9) {
                0 => world.connect(a, b),
                1 => world.disconnect(a, b, s(2)),
                2 => world.restart(a),
                3 => world.net(a, b).cut = true,
                4 => world.both(a, b, |net| net.cut = false),
                5 => world.fail_engine(b, EngineKind::Userspace),
                6 => world.net(b, a).mtu = 1350,
                7 => world.both(a, b, |net| net.loss_per_mille = 100),
                _ => world.fail_engine(a, EngineKind::Kernel),
            }
            let pause = ms(world.below(4000));
            world.run(pause);
        }
        for (a, b) in pairs {
            world.both(a, b, |net| {
                net.cut = false;
                net.loss_per_mille = 0;
            });
            world.connect(a, b);
        }
        let end = world.now + s(130);
        let all = |world: &World| pairs.iter().all(|&(a, b)| world.is_connected(a, b));
        assert!(world.run_until(end, all), "not all connected");
        for host in &world.hosts {
            assert_eq!(host.engine.drops.get("wrong key"), None);
            assert_eq!(host.engine.drops.get("replayed"), None);
        }
    });
}
