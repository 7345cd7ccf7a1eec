//! The life of flows: idle expiry, limits, loss.

use std::{
    io::IoSlice,
    thread::sleep,
    time::{Duration, Instant},
};

use weft_io::tap::VNET_LEN;
use weft_kernel::odp::{FLOWS_PER_PORT_MAX, LEARNED_PER_PORT_MAX, Via};

use crate::{
    broadcast::open_tap,
    lab::{Host, Outer, Underlay, join, tunnel, until, wait},
};

#[test]
fn flows_that_nothing_uses_go() {
    let underlay = Underlay::new();
    let sweeping =
        |number| Host::with(number, &underlay, |spec| spec.sweep_interval = Duration::from_secs(2));
    let (one, two) = (sweeping(1), sweeping(2));
    let (a, c) = (one.container(1), two.container(3));
    join(&[&one, &two], &[&a, &c], Outer::Ipv4);
    let busy = a.space.spawn(&format!("ping -i 0.2 {}", c.ipv4()));
    until("there are flows", || one.counters().flows >= 2);
    // A flow in use stays over several sweeps, and its frames cause no upcalls.
    sleep(Duration::from_secs(5));
    let before = one.counters().upcalls;
    sleep(Duration::from_secs(6));
    let asked = one.counters().upcalls - before;
    assert!(asked <= 8, "{asked} upcalls of running traffic");
    assert!(one.counters().flows >= 2);
    drop(busy);
    for space in [&a.space, &c.space] {
        space.run("ip link set weft0 down");
    }
    until("no flow is left", || one.counters().flows == 0 && two.counters().flows == 0);
    assert!(one.counters().flows_idle >= 2);
    for space in [&a.space, &c.space] {
        space.run("ip link set weft0 up");
    }
    a.space.run(&format!("ping -c 2 -W 20 {}", c.ipv4()));
    one.audit();
}

#[test]
fn a_flood_of_new_macs_is_bounded_and_counted() {
    let underlay = Underlay::new();
    let (one, two) = (Host::new(1, &underlay), Host::new(2, &underlay));
    let (a, b, c) = (one.container(1), one.container(2), two.container(3));
    join(&[&one, &two], &[&a, &b, &c], Outer::Ipv4);
    a.pings(&b);
    a.pings(&c);
    let noisy = open_tap(&one.space, "noisy");
    wait(one.switch.add_port(1, "noisy")).unwrap();
    let before = one.counters();
    let mut frame = [0_u8; VNET_LEN + 60];
    frame[VNET_LEN + 12..VNET_LEN + 14].copy_from_slice(&[0x88, 0xb5]);
    let (mut sent, start) = (0_u32, Instant::now());
    while start.elapsed() < Duration::from_secs(4) {
        for _ in 0..500 {
            sent += 1;
            let number = sent.to_be_bytes();
            // A new source each time; to a container, to all, or to an unknown address.
            frame[VNET_LEN + 6..VNET_LEN + 8].copy_from_slice(&[0x06, 0]);
            frame[VNET_LEN + 8..VNET_LEN + 12].copy_from_slice(&number);
            let to = match sent % 3 {
                0 => a.mac.0,
                1 => [0x03, 0, number[0], number[1], number[2], number[3]],
                _ => [0x06, 1, number[0], number[1], number[2], number[3]],
            };
            frame[VNET_LEN..VNET_LEN + 6].copy_from_slice(&to);
            noisy.send(&[IoSlice::new(&frame)]).unwrap();
        }
    }
    // Established traffic is not disturbed: its frames do not come up.
    a.space.run(&format!("ping -c 5 -i 0.2 -W 20 {}", b.ipv4()));
    let mut last = 0;
    until("the queue is worked off", || {
        sleep(Duration::from_millis(300));
        let upcalls = one.counters().upcalls;
        std::mem::replace(&mut last, upcalls) == upcalls
    });
    let after = one.counters();
    println!("{sent} frames sent, {after:?}");
    let (seen, lost) = (after.upcalls - before.upcalls, after.upcalls_lost - before.upcalls_lost);
    assert!(lost > 0, "the flood was meant to be too much");
    assert!(after.upcall_overruns > 0);
    let misses = after.misses - before.misses;
    assert!(seen + lost >= misses && seen + lost <= misses + 5, "{seen} + {lost} of {misses}");
    let limit = (LEARNED_PER_PORT_MAX as u64, FLOWS_PER_PORT_MAX as u64 + 100);
    assert!(after.macs_learned <= limit.0 + 10, "{after:?}");
    assert!(after.flows <= limit.1, "{after:?}");
    assert_eq!(after.flow_errors, 0);
    one.audit();
    // The port goes, and all that was for it.
    wait(one.switch.remove_port("noisy")).unwrap();
    assert!(one.counters().flows < 30, "{:?}", one.counters());
    a.pings(&c);
}

#[test]
fn no_flow_is_stale_after_changes_at_any_moment() {
    let underlay = Underlay::new();
    let (one, two) = (Host::new(1, &underlay), Host::new(2, &underlay));
    let (a, b, c) = (one.container(1), one.container(2), two.container(3));
    join(&[&one, &two], &[&a, &b, &c], Outer::Ipv4);
    let _traffic = [
        a.space.spawn(&format!("ping -i 0.01 {}", c.ipv4())),
        b.space.spawn(&format!("ping -i 0.01 {}", c.ipv4())),
        c.space.spawn("ping -b -i 0.01 10.47.255.255"),
    ];
    for round in 0..60_u32 {
        let via = match round % 4 {
            0 => Via::None,
            1 => tunnel(2, Outer::Ipv6),
            2 => Via::Tap,
            _ => tunnel(2, Outer::Ipv4),
        };
        one.reaches(2, via);
        match round % 3 {
            0 => wait(one.switch.set_endpoints(1, &[], &[c.mac])).unwrap(),
            1 => one.knows(&c),
            _ => {
                wait(one.switch.apply(vec![weft_kernel::odp::OdpEdit::RemoveLocal(1, b.mac)]))
                    .unwrap();
            }
        }
        if round % 5 == 0 {
            wait(one.switch.remove_port(&b.port)).unwrap();
        } else {
            wait(one.switch.add_port(1, &b.port)).unwrap();
        }
        one.audit();
    }
    wait(one.switch.add_port(1, &b.port)).unwrap();
    wait(one.switch.set_local(1, b.mac, &b.port)).unwrap();
    one.reaches(2, tunnel(2, Outer::Ipv4));
    one.knows(&c);
    a.pings(&c);
    b.pings(&c);
    one.audit();
}
