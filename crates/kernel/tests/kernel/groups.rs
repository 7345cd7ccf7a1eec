//! Frames to groups that are kept from peers of the kernel engine.

use std::net::{Ipv4Addr, UdpSocket};
use std::time::Duration;

use weft_kernel::{GroupCounts, GroupLimit, KernelError, OuterFamily};

use crate::{
    lab::{BRIDGE, Container, Host, on_a_host, run},
    switch::{hosts, ping},
};

const OVERLAY: [&str; 2] = ["weft-vxlan", "weft-vxlan6"];

fn limit(host: &Host) -> GroupLimit {
    GroupLimit::new(host.kernel.clone(), &OVERLAY).unwrap()
}

/// Frames that a container's interface has taken.
fn taken(container: &Container) -> u64 {
    let shown = container.json("ip", &["-j", "-s", "link", "show", "dev", "weft0"]);
    shown[0]["stats64"]["rx"]["packets"].as_u64().unwrap()
}

/// Joins two containers outside of the overlay too.
fn close_loop(one: &Container, two: &Container) {
    let pid = std::process::id().to_string();
    let path = two.path().to_str().unwrap().replace("self", &pid);
    one.run(
        "ip",
        &["link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", &path],
    );
    for container in [one, two] {
        container.run("ip", &["link", "add", "outer", "type", "bridge"]);
        container.run("ip", &["link", "set", "outer", "up"]);
        for port in ["cable", "weft0"] {
            container.run("ip", &["link", "set", port, "up", "master", "outer"]);
        }
    }
}

#[test]
fn a_loop_between_two_hosts_ends_and_its_ports_are_known() {
    on_a_host(|| async {
        let (hosts, containers) = hosts(OuterFamily::V4, 2).await;
        let third = hosts[0].container(3).await;
        let mut limits = [limit(&hosts[0]), limit(&hosts[1])];
        for limit in &mut limits {
            assert_eq!(limit.ensure().await.unwrap(), GroupCounts::default());
        }
        close_loop(&containers[0], &containers[1]);
        assert!(!ping(&third, "10.32.255.1"), "nobody has it, and the question goes round");
        let mut found = [GroupCounts::default(), GroupCounts::default()];
        for _ in 0..100 {
            for (found, limit) in found.iter_mut().zip(&mut limits) {
                *found = limit.ensure().await.unwrap();
            }
            if found.iter().all(|counts| counts.limited > 0) {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        for counts in &found {
            assert!(counts.limited > 0 && counts.ports.len() == 1, "{found:?}");
        }
        assert_eq!(
            found.map(|counts| counts.ports),
            [["weft-box1".to_owned()], ["weft-box2".to_owned()]]
        );
        let before = taken(&containers[0]);
        std::thread::sleep(Duration::from_secs(1));
        assert!(taken(&containers[0]) - before < 50, "{}", taken(&containers[0]) - before);
        // Other ports are as ever all the while, and this one after a pause.
        assert!(ping(&third, "10.32.0.3"));
        containers[0].run("ip", &["link", "delete", "cable"]);
        // A stream to a group may have any rate.
        let sender = third.inside(|| UdpSocket::bind("10.32.0.3:0").unwrap());
        let before = taken(&containers[1]);
        for _ in 0..5_000 {
            sender.send_to(b"frame", "239.1.2.3:5000").unwrap();
        }
        std::thread::sleep(Duration::from_millis(500));
        assert!(taken(&containers[1]) - before >= 4_500);
        for (limit, host) in limits.iter_mut().zip(&hosts) {
            assert!(limit.remove().await.unwrap() && !limit.remove().await.unwrap());
            assert_eq!(host.namespace.run("nft", &["list", "ruleset"]).trim(), "");
        }
    });
}

#[test]
fn a_bridges_own_reports_stay_and_a_containers_go() {
    on_a_host(|| async {
        let (hosts, containers) = hosts(OuterFamily::V4, 2).await;
        let mut limit = limit(&hosts[0]);
        limit.ensure().await.unwrap();
        let rules = "table ip t { counter host { }; counter container { }; chain in { \
                     type filter hook prerouting priority 0; \
                     ip protocol igmp ip saddr 10.32.0.9 counter name host; \
                     ip protocol igmp ip saddr 10.32.0.1 counter name container; }; }";
        containers[1].run("nft", &[rules]);
        let heard = |of: &str| {
            let shown = containers[1].run("nft", &["list", "counter", "ip", "t", of]);
            let packets = shown.split("packets ").nth(1).unwrap().split(' ').next().unwrap();
            packets.parse::<u64>().unwrap()
        };
        let join = |of: &Container, address: Ipv4Addr| {
            let socket = of.inside(|| UdpSocket::bind("0.0.0.0:0").unwrap());
            socket.join_multicast_v4(&Ipv4Addr::new(239, 7, 7, 7), &address).unwrap();
            std::thread::sleep(Duration::from_secs(1));
            socket
        };
        hosts[0]
            .kernel
            .set_bridge_addresses(BRIDGE, &["10.32.0.9/12".parse().unwrap()])
            .await
            .unwrap();
        let reports = limit.ensure().await.unwrap().reports;
        let _listens = join(&hosts[0].namespace, Ipv4Addr::new(10, 32, 0, 9));
        assert!(limit.ensure().await.unwrap().reports > reports);
        assert_eq!(heard("host"), 0);
        let _listens = join(&containers[0], Ipv4Addr::new(10, 32, 0, 1));
        assert!(heard("container") > 0);
    });
}

#[test]
fn a_table_of_that_name_that_is_not_ours_is_left_alone_and_ours_is_written_again() {
    on_a_host(|| async {
        let kernel = weft_kernel::Kernel::new().unwrap();
        let mut limit = GroupLimit::new(kernel, &OVERLAY).unwrap();
        run("nft", &["add table bridge weft-groups"]);
        let error = limit.ensure().await.unwrap_err();
        assert!(matches!(error, KernelError::TableTaken { .. }), "{error}");
        run("nft", &["delete table bridge weft-groups"]);
        limit.ensure().await.unwrap();
        let list = || run("nft", &["list", "table", "bridge", "weft-groups"]);
        let whole = list();
        limit.ensure().await.unwrap();
        assert_eq!(list(), whole);
        for damage in ["flush chain bridge weft-groups limits", "delete table bridge weft-groups"] {
            run("nft", &[damage]);
            limit.ensure().await.unwrap();
            assert_eq!(list(), whole, "{damage}");
        }
    });
}
