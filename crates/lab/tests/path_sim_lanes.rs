//! The host that opens the lanes beyond the first, among simulated hosts with a stateful firewall at one or both.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use weft_lab::sim::World;
use weft_lab::sim::expect::{both_engines, seeds};
use weft_path::{Config, EngineKind, LANES_TURN_FIRST_MS, LANES_TURN_MAX_MS, Reason};

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Two hosts with this many lanes, not connected; a firewall at the hosts in `behind` lets in answers only.
fn pair(seed: u64, lanes: u16, behind: &[usize]) -> World {
    let mut config = Config::default();
    config.engines[0].lanes_max = lanes;
    let mut world = World::new(seed, vec![config.clone(), config]);
    for &host in behind {
        world.net(1 - host, host).answers_alone = true;
    }
    world
}

fn are_proven(world: &World) -> bool {
    let active = [(0, 1), (1, 0)].map(|(from, to)| world.active(from, to));
    active.iter().flatten().filter(|path| path.lanes_blocked.is_none()).count() == 2
}

fn opener(world: &World) -> Option<usize> {
    let opens = [(0, 1), (1, 0)].map(|(at, to)| {
        let (at, to) = (&world.hosts[at], world.hosts[to].id);
        at.engine.opens(to).unwrap_or(at.id < to)
    });
    opens.iter().position(|opens| *opens).filter(|_| opens[0] != opens[1])
}

fn blocked(world: &World) -> [Option<String>; 2] {
    [(0, 1), (1, 0)]
        .map(|(from, to)| world.active(from, to)?.lanes_blocked.map(|reason| reason.to_string()))
}

#[test]
fn the_host_behind_a_firewall_opens_lanes_whatever_the_ids_and_whoever_dials() {
    for (behind, dials) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        seeds(0..50, |seed| {
            let mut world = pair(seed, 3, &[behind]);
            world.connect(dials, 1 - dials);
            // If the other host dials, its turn comes first, and fails.
            world.run(s(if behind == dials { 4 } else { 8 }));
            assert!(are_proven(&world), "{behind} {dials}: {:?}", blocked(&world));
            assert_eq!(opener(&world), Some(behind));
            // It stays so when the other one dials, and when either restarts.
            world.disconnect(0, 1, s(1));
            world.run(s(2));
            world.connect(1 - dials, dials);
            world.run(s(4));
            assert_eq!((opener(&world), are_proven(&world)), (Some(behind), true));
            for restarted in [0, 1] {
                world.restart(restarted);
                world.run(s(1));
                world.connect(behind, 1 - behind);
                world.run(s(12));
                assert_eq!((opener(&world), are_proven(&world)), (Some(behind), true));
            }
        });
    }
}

/// Hosts report the state of a path's lanes while another path carries frames.
#[test]
fn lanes_of_a_path_that_is_used_later_are_opened_by_the_host_behind_a_firewall_too() {
    for behind in [0, 1] {
        seeds(0..20, |seed| {
            let mut config = both_engines();
            config.engines[0].lanes_max = 3;
            let mut world = World::new(seed, vec![config.clone(), config]);
            world.net(1 - behind, behind).answers_alone = true;
            world.connect(1 - behind, behind);
            world.run(s(20));
            for (from, to) in [(0, 1), (1, 0)] {
                assert_eq!(world.active(from, to).unwrap().engine, Some(EngineKind::Kernel));
            }
            // Neither kernel is there any more: the vector engines take over.
            for host in [0, 1] {
                let mut left = world.hosts[host].config().engines.clone();
                left.retain(|engine| engine.kind == EngineKind::Userspace);
                world.set_engines(host, left, vec![(EngineKind::Kernel, Reason::Forced)]);
            }
            world.run(s(12));
            assert!(are_proven(&world), "{behind}: {:?}", blocked(&world));
            assert_eq!(opener(&world), Some(behind));
        });
    }
}

#[test]
fn lanes_that_neither_host_can_open_are_named_and_tried_again() {
    seeds(0..20, |seed| {
        let mut world = pair(seed, 3, &[0, 1]);
        world.connect(0, 1);
        world.run(s(8));
        let named =
            [Some("lanes blocked: 2 of 3".to_owned()), Some("lanes blocked: 2 of 3".to_owned())];
        assert_eq!(blocked(&world), named);
        let begun = world.hosts[0].heard.len();
        world.run(s(3_600));
        assert_eq!(blocked(&world), named, "frames go by the first");
        let hellos = |heard: &[(usize, weft_path::Message)]| {
            heard.iter().filter(|(_, it)| matches!(it, weft_path::Message::Hello(_))).count()
        };
        let said = hellos(&world.hosts[0].heard[begun..]) + hellos(&world.hosts[1].heard);
        let turns = 3_600_000 / LANES_TURN_MAX_MS
            + u64::from((LANES_TURN_MAX_MS / LANES_TURN_FIRST_MS).ilog2());
        assert!(said < 40 + 2 * usize::try_from(turns).unwrap(), "{said} hellos");
        // The firewall of one opens, and its lanes come back with the next turn.
        world.net(0, 1).answers_alone = false;
        world.run(Duration::from_millis(2 * LANES_TURN_MAX_MS) + s(5));
        assert_eq!((opener(&world), are_proven(&world)), (Some(0), true));
    });
}

#[test]
fn with_a_host_of_an_earlier_version_the_lower_id_opens() {
    for (old, dials) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let mut world = pair(old as u64, 3, &[]);
        world.hosts[old].old_version = true;
        world.connect(dials, 1 - dials);
        world.run(s(8));
        let lower = usize::from(world.hosts[1].id < world.hosts[0].id);
        assert_eq!((opener(&world), are_proven(&world)), (Some(lower), true));
        // It stays so where that comes to nothing: the other would not take it.
        world.net(lower, 1 - lower).answers_alone = true;
        world.restart(1 - lower);
        world.run(s(1));
        world.connect(dials, 1 - dials);
        world.run(s(60));
        assert_eq!(opener(&world), Some(lower));
        assert!(blocked(&world).iter().any(Option::is_some));
    }
}
