//! Packets between containers on two hosts.

use std::{thread::sleep, time::Duration};

use weft_io::uninterrupted;
use weft_kernel::odp::OdpDrop;

use crate::lab::{Host, MTU, Outer, PORT, Underlay, capture, join, until, wait};

fn two_hosts(
    outer: Outer,
    inside: impl FnOnce(&Underlay, [&Host; 2], [&crate::lab::Container; 3]),
) {
    let underlay = Underlay::new();
    let (one, two) = (Host::new(1, &underlay), Host::new(2, &underlay));
    let (a, b, c) = (one.container(1), one.container(2), two.container(3));
    join(&[&one, &two], &[&a, &b, &c], outer);
    inside(&underlay, [&one, &two], [&a, &b, &c]);
    one.audit();
    two.audit();
}

#[test]
fn the_kernel_says_what_it_can() {
    let space = crate::lab::Space::new();
    space.enter(async {
        let kernel = weft_kernel::Kernel::new().unwrap();
        kernel.odp_support().await.unwrap();
    });
    assert!(!space.run("ip link show").contains("weft"));
}

#[test]
fn containers_reach_each_other_over_ipv4() {
    reach_each_other(Outer::Ipv4);
}

#[test]
fn containers_reach_each_other_over_ipv6() {
    reach_each_other(Outer::Ipv6);
}

fn reach_each_other(outer: Outer) {
    two_hosts(outer, |underlay, hosts, [a, b, c]| {
        let seen = capture(&underlay.0, "u1", &format!("udp port {PORT}"));
        a.pings(b);
        a.pings(c);
        c.pings(b);
        // The largest packet of the containers' MTU, and a datagram of many fragments.
        a.space.run(&format!("ping -c 2 -M do -s {} -W 20 {}", MTU - 28, c.ipv4()));
        let (from, to) = (a.space.socket("0.0.0.0:0"), c.space.socket("0.0.0.0:7000"));
        let sent: Vec<u8> = (0..60_000_u32).map(|n| n.to_be_bytes()[3]).collect();
        from.send_to(&sent, format!("{}:7000", c.ipv4())).unwrap();
        let mut received = vec![0; 65_536];
        let length = uninterrupted(|| to.recv(&mut received)).unwrap();
        assert_eq!(received[..length], sent);
        let seen = seen.end();
        check_outer(&seen, outer);
        for host in hosts {
            let counters = host.counters();
            assert_eq!((counters.flow_errors, counters.execute_errors), (0, 0), "{counters:?}");
        }
    });
}

/// Time to live 64, do not fragment, no UDP checksum: read by tcpdump.
fn check_outer(seen: &str, outer: Outer) {
    let (header, wanted): (_, &[_]) = match outer {
        Outer::Ipv4 => ("proto UDP (17)", &["ttl 64,", "flags [DF]"]),
        Outer::Ipv6 => ("next-header UDP (17)", &["hlim 64,"]),
    };
    let headers: Vec<&str> = seen.lines().filter(|line| line.contains(header)).collect();
    assert!(headers.len() > 20, "{seen}");
    for line in headers {
        assert!(wanted.iter().all(|part| line.contains(part)), "{line}");
    }
    let to_port = format!(".{PORT}: ");
    let datagrams: Vec<&str> = seen.lines().filter(|line| line.contains(&to_port)).collect();
    assert!(datagrams.len() > 20, "{seen}");
    for line in datagrams {
        // tcpdump prints nothing for a zero checksum over IPv4, and an error over IPv6.
        let zero = match outer {
            Outer::Ipv4 => !line.contains("udp sum") && !line.contains("bad udp"),
            Outer::Ipv6 => line.contains("[bad udp cksum 0x0000 "),
        };
        assert!(zero, "{line}");
    }
}

#[test]
fn the_host_itself_is_on_the_network() {
    two_hosts(Outer::Ipv4, |_, [one, two], [a, _, c]| {
        wait(one.kernel.set_bridge_addresses("weft", &["10.32.9.1/12".parse().unwrap()])).unwrap();
        wait(two.switch.set_endpoints(
            1,
            &[(weft_path::Mac([0x02, 0, 0, 1, 1, 0xff]), crate::lab::peer(1))],
            &[],
        ))
        .unwrap();
        one.space.run(&format!("ping -c 2 -W 20 {}", a.ipv4()));
        one.space.run(&format!("ping -c 2 -W 20 {}", c.ipv4()));
        c.space.run("ping -c 2 -W 20 10.32.9.1");
        assert_eq!(wait(one.kernel.attachments("weft")).unwrap().len(), 2);
    });
}

#[test]
fn tagged_frames_pass() {
    two_hosts(Outer::Ipv4, |_, [one, _], [a, _, c]| {
        for (container, address) in [(a, "10.99.0.1/24"), (c, "10.99.0.2/24")] {
            container.space.run("ip link add link weft0 name tag type vlan id 7");
            container.space.run(&format!("ip address add {address} dev tag"));
            container.space.run("ip link set tag up mtu 1380");
        }
        a.space.run("ping -c 3 -i 0.2 -W 20 10.99.0.2");
        sleep(Duration::from_millis(200));
        let before = one.counters().upcalls;
        a.space.run("ping -c 20 -i 0.05 -W 20 10.99.0.2");
        let more = one.counters().upcalls - before;
        // Without flows, each request and each answer would come up. The remaining upcalls are the new
        // interfaces' own multicast.
        assert!(more < 20, "tagged frames have flows of their own, yet {more} came up");
    });
}

#[test]
fn bulk_traffic_stays_in_the_kernel() {
    two_hosts(Outer::Ipv4, |_, hosts, [a, _, c]| {
        a.pings(c);
        // A new server for each run: one that has not seen the end of a test refuses the next.
        let stream = |seconds: u32| {
            let _server = c.space.spawn("iperf3 -s");
            until("iperf3 listens", || c.space.run("ss -ltn").contains(":5201"));
            a.space.run(&format!("iperf3 -c {} -t {seconds}", c.ipv4()))
        };
        stream(1);
        let before: Vec<_> = hosts.iter().map(|host| host.counters()).collect();
        let ticks = cpu_ticks();
        let printed = stream(5);
        let spent = cpu_ticks() - ticks;
        for (host, before) in hosts.iter().zip(&before) {
            let after = host.counters();
            let (upcalls, hits) = (after.upcalls - before.upcalls, after.hits - before.hits);
            println!("host {}: {hits} frames by flows, {upcalls} upcalls", host.number);
            assert!(hits > 1_000, "{printed}");
            assert!(upcalls < 20, "{upcalls} upcalls for {hits} frames");
        }
        println!("{printed}");
        println!("processor ticks (10 ms) of the switches' process meanwhile: {spent}");
        assert!(spent < 50, "the daemon worked {spent} ticks while the kernel carried all");
    });
}

/// User and system time of this process in ticks.
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn probes_pass_beside_the_data() {
    for outer in [Outer::Ipv4, Outer::Ipv6] {
        let underlay = Underlay::new();
        let (one, mut two) = (Host::new(1, &underlay), Host::new(2, &underlay));
        let mut frame = vec![0xab; 1402];
        frame[..14].fill(0);
        let before = two.counters().flows;
        let remote = crate::lab::underlay_address(2, outer);
        for _ in 0..10 {
            wait(one.switch.send_probe(remote, None, &frame)).unwrap();
            let probe = wait(async {
                let limit = Duration::from_secs(5);
                tokio::time::timeout(limit, two.inbox.probes.recv()).await.unwrap().unwrap()
            });
            assert_eq!(probe.remote, crate::lab::underlay_address(1, outer));
            assert_eq!(probe.frame, frame);
        }
        assert_eq!(two.counters().flows, before, "a probe needs no flow");
        assert_eq!((one.counters().probes_sent, two.counters().probes_received), (10, 10));
        assert!(wait(one.switch.send_probe(remote, None, &frame[..13])).is_err());
    }
}

#[test]
fn a_stranger_is_dropped_and_counted() {
    two_hosts(Outer::Ipv4, |underlay, [one, two], [a, _, c]| {
        a.pings(c);
        // A host that is not a peer, with the right network and MACs.
        let third = Host::new(3, underlay);
        let box3 = third.container(9);
        third.reaches(1, crate::lab::tunnel(1, Outer::Ipv4));
        third.knows(a);
        let neighbour = format!("ip neigh replace {} lladdr {} dev weft0", a.ipv4(), a.mac);
        box3.space.run(&neighbour);
        assert!(!box3.space.succeeds(&format!("ping -c 20 -i 0.05 -W 1 {}", a.ipv4())));
        wait(one.switch.sweep()).unwrap();
        let counted = || one.counters().drops.get(&OdpDrop::UnknownSource).copied();
        until("all are counted", || counted() >= Some(20));
        let upcalls = one.counters().upcalls;
        assert!(!box3.space.succeeds(&format!("ping -c 20 -i 0.05 -W 1 {}", a.ipv4())));
        assert!(one.counters().upcalls - upcalls < 3, "a flow drops them");
        // It becomes a peer: let in at once.
        one.reaches(3, crate::lab::tunnel(3, Outer::Ipv4));
        one.knows(&box3);
        box3.pings(a);
        one.audit();
        two.audit();
    });
}

#[test]
fn nobody_draws_a_remote_containers_traffic_here() {
    two_hosts(Outer::Ipv4, |_, [one, _], [a, b, c]| {
        a.pings(c);
        // Container b sends under c's MAC.
        b.space.run(&format!("ip link set weft0 address {}", c.mac));
        b.space.run("ip neigh flush dev weft0");
        assert!(!b.space.succeeds(&format!("ping -c 3 -i 0.2 -W 1 {}", a.ipv4())));
        a.pings(c);
        let drops = one.counters().drops;
        assert!(drops.get(&OdpDrop::ForeignSource) > Some(&0), "{drops:?}");
    });
}
