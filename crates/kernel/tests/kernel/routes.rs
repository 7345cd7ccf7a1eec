//! The host's routing as Weft reads it.

use std::net::IpAddr;
use std::time::Duration;

use weft_kernel::{DEVICE_GROUP, DeviceRoute, Kernel, KernelError, TunnelSpec};

use crate::lab::{BRIDGE, host_with_bridge, link, make_device, net, on_a_host, run, switch_on};

/// Longer than any notice takes; a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// Two links, one of them with the default route.
fn make_links() {
    for (name, mtu, address) in
        [("up0", "1500", "192.0.2.1/24"), ("up1", "9000", "198.51.100.1/24")]
    {
        make_device(name);
        run("ip", &["link", "set", name, "mtu", mtu]);
        run("ip", &["link", "set", &format!("{name}-x"), "mtu", mtu]);
        switch_on(name);
        run("ip", &["address", "add", address, "dev", name]);
    }
    run("ip", &["address", "add", "2001:db8::1/64", "dev", "up0", "nodad"]);
    make_device("off0");
    run("ip", &["link", "set", "off0", "mtu", "1300"]);
}

#[test]
fn the_mtu_towards_a_peer_is_its_links_or_its_routes() {
    on_a_host(|| async {
        make_links();
        run("ip", &["route", "add", "203.0.113.0/24", "via", "192.0.2.9", "mtu", "1400"]);
        let kernel = Kernel::new().unwrap();
        let expected = [
            ("192.0.2.7", 1500, "up0"),
            ("198.51.100.7", 9000, "up1"),
            ("203.0.113.5", 1400, "up0"),
            ("2001:db8::7", 1500, "up0"),
            ("127.0.0.1", 65_536, "lo"),
        ];
        for (remote, mtu, interface) in expected {
            let found = kernel.route_mtu(remote.parse().unwrap()).await.unwrap();
            assert_eq!((found.mtu, found.interface.as_str()), (mtu, interface), "{remote}");
        }
        for remote in ["10.99.0.1", "2001:db8:1::1"] {
            let error = kernel.route_mtu(remote.parse().unwrap()).await.unwrap_err();
            assert!(matches!(error, KernelError::NoRoute { .. }), "{error}");
        }
        run("ip", &["route", "add", "unreachable", "10.98.0.0/16"]);
        run("ip", &["route", "add", "prohibit", "10.97.0.0/16"]);
        run("ip", &["route", "add", "blackhole", "10.96.0.0/16"]);
        for remote in ["10.98.0.1", "10.97.0.1", "10.96.0.1"] {
            let error = kernel.route_mtu(remote.parse().unwrap()).await.unwrap_err();
            assert!(matches!(error, KernelError::NoRoute { .. }), "{remote}: {error}");
        }
    });
}

#[test]
fn the_default_mtu_is_that_of_the_default_route_else_the_smallest() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        assert_eq!(kernel.default_link_mtu().await.unwrap(), None);
        make_links();
        assert_eq!(kernel.default_link_mtu().await.unwrap(), Some(1500));
        run("ip", &["route", "add", "default", "via", "198.51.100.9"]);
        assert_eq!(kernel.default_link_mtu().await.unwrap(), Some(9000));
        run("ip", &["-6", "route", "add", "default", "via", "2001:db8::9"]);
        assert_eq!(kernel.default_link_mtu().await.unwrap(), Some(1500));
    });
}

#[test]
fn a_range_is_refused_only_for_a_route_in_it_that_is_taken() {
    on_a_host(|| async {
        make_links();
        let kernel = host_with_bridge().await;
        kernel
            .set_bridge_addresses(BRIDGE, &[net("10.32.0.1/12"), net("fd32::1/64")])
            .await
            .unwrap();
        run("ip", &["route", "add", "default", "via", "192.0.2.9"]);
        run("ip", &["route", "add", "10.200.0.0/16", "via", "192.0.2.9"]);
        run("ip", &["route", "add", "172.20.0.0/16", "table", "77", "dev", "up1"]);
        let routes = kernel.host_routes().await.unwrap();
        let mut found: Vec<_> =
            routes.iter().map(|r| (r.destination.to_string(), r.interface.as_str())).collect();
        found.sort();
        let expected = [
            ("10.200.0.0/16", "up0"),
            ("172.20.0.0/16", "up1"),
            ("192.0.2.0/24", "up0"),
            ("198.51.100.0/24", "up1"),
            ("2001:db8::/64", "up0"),
        ];
        assert_eq!(found, expected.map(|(net, dev)| (net.to_owned(), dev)));
        // The network's own range is not in its own way.
        kernel.check_range(net("10.32.0.0/12")).await.unwrap();
        for range in ["10.0.0.0/8", "10.200.0.0/16", "2001:db8::/32"] {
            let error = kernel.check_range(net(range)).await.unwrap_err();
            assert!(matches!(error, KernelError::RangeOverlaps { .. }), "{range}: {error}");
        }
        let text = kernel.check_range(net("10.192.0.0/12")).await.unwrap_err().to_string();
        assert!(text.contains("10.200.0.0/16 via up0"), "{text}");
        // A less specific route hides nothing, nor does one of a table that is not consulted.
        for range in ["10.200.5.0/24", "172.16.0.0/12"] {
            kernel.check_range(net(range)).await.unwrap();
            let routes = kernel.range_routes(net(range)).await.unwrap();
            assert_eq!(routes.len(), 1, "{range}: {routes:?}");
        }
        // A VPN's halves of all addresses are a default route.
        run("ip", &["route", "add", "0.0.0.0/1", "dev", "up1"]);
        assert_eq!(kernel.range_routes(net("10.32.0.0/12")).await.unwrap(), []);
        // A route that is in the way only while its device is up.
        run("ip", &["route", "add", "10.32.5.0/24", "dev", "up1"]);
        kernel.check_range(net("10.32.0.0/12")).await.unwrap_err();
        run("ip", &["link", "set", "up1", "down"]);
        kernel.check_range(net("10.32.0.0/12")).await.unwrap();
    });
}

#[test]
fn a_bridge_of_containers_alone_leads_to_no_other_host() {
    on_a_host(|| async {
        make_links();
        for bridge in ["docker0", "br0"] {
            run("ip", &["link", "add", bridge, "type", "bridge"]);
            run("ip", &["link", "set", bridge, "up"]);
        }
        run("ip", &["address", "add", "172.17.0.1/16", "dev", "docker0"]);
        run("ip", &["address", "add", "203.0.113.1/24", "dev", "br0"]);
        run("ip", &["link", "add", "c0", "type", "veth", "peer", "name", "c1"]);
        run("ip", &["link", "set", "c0", "master", "docker0"]);
        run("ip", &["link", "add", "vx7", "type", "vxlan", "id", "7", "dstport", "4789"]);
        run("ip", &["link", "set", "vx7", "master", "br0"]);
        let routes = host_with_bridge().await.host_routes().await.unwrap();
        let staying = routes.iter().filter(|route| route.stays_on_host);
        let staying: Vec<_> = staying.map(|route| route.interface.as_str()).collect();
        assert_eq!(staying, ["docker0"], "{routes:?}");
    });
}

#[test]
fn routes_over_a_device_are_told_as_they_come_and_go() {
    on_a_host(|| async {
        make_device("d0");
        make_device("other");
        for device in ["d0", "other"] {
            // No IPv6, so that only this test's changes are reported.
            let setting = format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6");
            std::fs::write(setting, "1").unwrap();
            switch_on(device);
        }
        run("ip", &["address", "add", "10.8.0.1/24", "dev", "d0"]);
        let index = u32::try_from(link("d0")["ifindex"].as_u64().unwrap()).unwrap();
        let mut watch = Kernel::new().unwrap().watch_routes(index).unwrap();
        let ipv4 = |routes: Vec<DeviceRoute>| -> Vec<(String, String, u32)> {
            let ipv4 = routes.into_iter().filter(|route| route.destination.addr().is_ipv4());
            let text = |hop: Option<IpAddr>| hop.map(|hop| hop.to_string()).unwrap_or_default();
            ipv4.map(|r| (r.destination.to_string(), text(r.gateway), r.metric)).collect()
        };
        let mut next = async || {
            let next = tokio::time::timeout(PATIENCE, watch.next()).await;
            ipv4(next.expect("routes must be told").unwrap())
        };
        let of = |destination: &str, gateway: &str, metric| {
            (destination.to_owned(), gateway.to_owned(), metric)
        };
        let own = of("10.8.0.0/24", "", 0);
        assert_eq!(next().await, std::slice::from_ref(&own));
        // Another table, a metric, a way among several.
        run(
            "ip",
            &["route", "add", "172.20.0.0/16", "via", "10.8.0.2", "table", "77", "metric", "5"],
        );
        assert_eq!(next().await, [own.clone(), of("172.20.0.0/16", "10.8.0.2", 5)]);
        run(
            "ip",
            &["route", "add", "default", "nexthop", "via", "10.8.0.3", "nexthop", "dev", "other"],
        );
        let both =
            [of("0.0.0.0/0", "10.8.0.3", 0), own.clone(), of("172.20.0.0/16", "10.8.0.2", 5)];
        assert_eq!(next().await, both);
        // A route that leads elsewhere is not reported: the next change is.
        run("ip", &["route", "add", "172.30.0.0/16", "dev", "other"]);
        run("ip", &["route", "del", "172.20.0.0/16", "table", "77"]);
        assert_eq!(next().await, both[..2]);
        run("ip", &["route", "del", "default"]);
        assert_eq!(next().await, std::slice::from_ref(&own));
        // When a device goes down, its routes vanish without a notice. Its own route returns when it is up
        // again.
        run("ip", &["route", "add", "172.21.0.0/16", "via", "10.8.0.2"]);
        assert_eq!(next().await, [own.clone(), of("172.21.0.0/16", "10.8.0.2", 0)]);
        run("ip", &["link", "set", "d0", "down"]);
        assert_eq!(next().await, []);
        switch_on("d0");
        assert_eq!(next().await, std::slice::from_ref(&own));
        run("ip", &["address", "flush", "dev", "d0"]);
        assert_eq!(next().await, []);
    });
}

#[test]
fn ipv6_routes_over_a_device_are_told_as_they_come_and_go() {
    on_a_host(|| async {
        make_device("d0");
        run("ip", &["link", "set", "d0", "addrgenmode", "none"]);
        switch_on("d0");
        run("ip", &["address", "add", "fd08::1/64", "dev", "d0", "nodad"]);
        let index = u32::try_from(link("d0")["ifindex"].as_u64().unwrap()).unwrap();
        let mut watch = Kernel::new().unwrap().watch_routes(index).unwrap();
        let behind = DeviceRoute {
            destination: "fd99::/64".parse().unwrap(),
            gateway: Some("fd08::2".parse().unwrap()),
            metric: 9,
        };
        // The system adds routes there by itself, which may be reported meanwhile.
        let mut until = async |is_there: bool| loop {
            let next = tokio::time::timeout(PATIENCE, watch.next()).await;
            let routes = next.expect("routes must be told").unwrap();
            if routes.contains(&behind) == is_there {
                break;
            }
        };
        until(false).await;
        let route = ["fd99::/64", "via", "fd08::2", "table", "77", "metric", "9"];
        run("ip", &[&["-6", "route", "add"], &route[..]].concat());
        until(true).await;
        run("ip", &[&["-6", "route", "del"], &route[..]].concat());
        until(false).await;
    });
}

#[test]
fn routes_whose_notices_were_lost_are_told_all_the_same() {
    on_a_host(|| async {
        make_device("d0");
        run("ip", &["link", "set", "d0", "addrgenmode", "none"]);
        switch_on("d0");
        let index = u32::try_from(link("d0")["ifindex"].as_u64().unwrap()).unwrap();
        let mut watch = Kernel::new().unwrap().watch_routes(index).unwrap();
        assert_eq!(watch.next().await.unwrap(), []);
        // Many times the capacity of the socket, none of it read.
        let flood = std::env::temp_dir().join(format!("weft-routes-{}", std::process::id()));
        let change = |metric| format!("route add 172.20.0.0/16 dev d0 metric {metric}\n");
        std::fs::write(&flood, (1..=12_000).map(change).collect::<String>()).unwrap();
        run("ip", &["-batch", flood.to_str().unwrap()]);
        std::fs::remove_file(&flood).unwrap();
        run("ip", &["route", "flush", "dev", "d0"]);
        run("ip", &["route", "add", "172.21.0.0/16", "dev", "d0", "metric", "7"]);
        let next = tokio::time::timeout(PATIENCE, watch.next()).await;
        let last =
            DeviceRoute { destination: "172.21.0.0/16".parse().unwrap(), gateway: None, metric: 7 };
        assert_eq!(next.expect("routes must be told").unwrap(), [last]);
    });
}

#[test]
fn a_tunnels_device_has_its_addresses_and_its_prefix() {
    on_a_host(|| async {
        make_device("tunnel");
        run("ip", &["link", "set", "tunnel-x", "addrgenmode", "none", "up"]);
        let kernel = Kernel::new().unwrap();
        let spec = TunnelSpec {
            device: "tunnel".into(),
            mtu: 9_000,
            source: "fd77:6566:7401::1".parse().unwrap(),
            local: "fd77:6566:7481::1".parse().unwrap(),
            destination: ("fd77:6566:7400::".parse().unwrap(), 40),
        };
        let error = kernel.ensure_tunnel(&spec).await.unwrap_err();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
        run("ip", &["link", "set", "tunnel", "group", &DEVICE_GROUP.to_string()]);
        let is_whole = || {
            let route = run("ip", &["-6", "route", "get", "fd77:6566:7480::2"]);
            assert!(route.contains("dev tunnel"), "{route}");
            assert!(route.contains("src fd77:6566:7401::1"), "{route}");
            let addresses = run("ip", &["-6", "address", "show", "dev", "tunnel"]);
            for address in ["fd77:6566:7401::1/128", "fd77:6566:7481::1/128"] {
                assert!(addresses.contains(address), "{addresses}");
            }
            assert!(!addresses.contains("fe80"), "{addresses}");
            assert_eq!(link("tunnel")["mtu"], 9_000);
        };
        kernel.ensure_tunnel(&spec).await.unwrap();
        is_whole();
        let changes = kernel.changes();
        kernel.ensure_tunnel(&spec).await.unwrap();
        assert_eq!(kernel.changes(), changes);
        for damage in [
            &["-6", "address", "flush", "dev", "tunnel"][..],
            &["-6", "route", "del", "fd77:6566:7400::/40", "dev", "tunnel"],
            &["link", "set", "tunnel", "mtu", "1500"],
            &["link", "set", "tunnel", "down"],
        ] {
            run("ip", damage);
            kernel.ensure_tunnel(&spec).await.unwrap();
            is_whole();
        }
    });
}
