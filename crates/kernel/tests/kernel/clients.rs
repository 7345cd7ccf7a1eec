//! Clients behind a routed device, as containers on the network see them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use weft_kernel::{
    ClientRules, ClientWays, ClientsChange, ClientsSpec, DEVICE_GROUP, Kernel, KernelError, LeftOut,
};

use crate::lab::{
    Container, assert_same, attach_spec, json, link, net, on_a_host, run, snapshot, wait_until,
};

const EXPOSED: &str = "weft-host";
const ROUTED: &str = "weft-vpn";

fn clients(addresses: &[&str]) -> ClientsSpec {
    let addresses: BTreeSet<IpAddr> = addresses.iter().map(|it| it.parse().unwrap()).collect();
    let networks = BTreeMap::new();
    let (device, exposed) = (ROUTED.into(), EXPOSED.into());
    ClientsSpec { device, mtu: 1_400, exposed, addresses, networks, source: None }
}

fn is_on(path: &str) -> bool {
    run("cat", &[&format!("/proc/sys/net/{path}")]).trim() == "1"
}

/// The host's interface with a container at its other end, and a device with a client at its other end.
fn host() -> (Container, Container) {
    let (container, client) = (Container::new(), Container::new());
    let group = DEVICE_GROUP.to_string();
    for (end, device, address, address6) in [
        (&container, EXPOSED, "10.32.0.9/12", "fd00::9/64"),
        (&client, ROUTED, "10.32.0.50/32", "fd00::50/128"),
    ] {
        end.plug(device, address);
        end.run("ip", &["address", "add", address6, "dev", "wan", "nodad"]);
        run("ip", &["link", "set", device, "group", &group]);
    }
    run("ip", &["address", "add", "10.32.0.1/12", "dev", EXPOSED]);
    run("ip", &["address", "add", "fd00::1/64", "dev", EXPOSED, "nodad"]);
    // A tunnel has no neighbours: the client's packets all go to the host.
    let mac = link(ROUTED)["address"].as_str().unwrap().to_owned();
    for (network, far) in [("10.32.0.0/12", "10.32.0.9"), ("fd00::/64", "fd00::9")] {
        client.run("ip", &["route", "add", network, "dev", "wan"]);
        client.run("ip", &["neigh", "add", far, "lladdr", &mac, "dev", "wan", "nud", "permanent"]);
    }
    run("sh", &["-c", "echo 1 > /proc/sys/net/ipv6/conf/all/forwarding"]);
    (container, client)
}

fn answered() -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for family in ["-4", "-6"] {
        let entries = json("ip", &["-j", family, "neigh", "show", "proxy"]);
        let entries = entries.as_array().unwrap().clone();
        found.extend(entries.iter().filter_map(|it| it["dst"].as_str().map(str::to_owned)));
    }
    found.sort();
    found
}

#[test]
fn containers_and_clients_reach_each_other_by_their_addresses() {
    on_a_host(|| async {
        let (container, client) = host();
        let kernel = Kernel::new().unwrap();
        assert!(!is_on("ipv4/ip_forward"), "only these devices pass packets on");
        assert!(!container.succeeds("ping", &["-c", "1", "-W", "1", "10.32.0.50"]));
        let spec = clients(&["10.32.0.50", "fd00::50"]);
        kernel.ensure_clients(&spec).await.unwrap();
        for address in ["10.32.0.50", "fd00::50"] {
            let ping = || container.succeeds("ping", &["-c", "1", "-W", "1", address]);
            assert!(wait_until(ping), "{address}");
        }
        for address in ["10.32.0.9", "fd00::9"] {
            assert!(client.succeeds("ping", &["-c", "1", "-W", "2", address]), "{address}");
        }
        let neighbours = container.json("ip", &["-j", "neigh", "show", "10.32.0.50"]);
        assert_eq!(neighbours[0]["lladdr"], link(EXPOSED)["address"], "the host answers for it");
        assert!(!is_on("ipv4/ip_forward"));
    });
}

#[test]
fn the_wanted_clients_come_and_go_and_others_entries_stay() {
    on_a_host(|| async {
        let _ends = host();
        let kernel = Kernel::new().unwrap();
        run("ip", &["neigh", "add", "proxy", "10.32.9.9", "dev", EXPOSED]);
        run("ip", &["route", "add", "10.32.9.9/32", "dev", ROUTED]);
        kernel.ensure_clients(&clients(&[])).await.unwrap();
        let before = snapshot();
        let (both, one) = (clients(&["10.32.0.50", "fd00::50"]), clients(&["10.32.0.51"]));
        kernel.ensure_clients(&both).await.unwrap();
        assert_eq!(answered(), ["10.32.0.50", "10.32.9.9", "fd00::50"]);
        let changes = kernel.changes();
        kernel.ensure_clients(&both).await.unwrap();
        assert_eq!(kernel.changes(), changes, "a repeated call changes nothing");
        // What another program removed comes back, and what is not wanted any more goes.
        run("ip", &["route", "del", "10.32.0.50/32", "dev", ROUTED]);
        run("ip", &["neigh", "del", "proxy", "10.32.0.50", "dev", EXPOSED]);
        kernel.ensure_clients(&both).await.unwrap();
        assert_eq!(answered(), ["10.32.0.50", "10.32.9.9", "fd00::50"]);
        let changes = kernel.changes();
        let change = ClientsChange {
            device: ROUTED.into(),
            exposed: EXPOSED.into(),
            new: clients(&["10.32.0.52"]).addresses,
            gone: clients(&["10.32.0.50"]).addresses,
            source: None,
        };
        kernel.change_clients(&change).await.unwrap();
        assert_eq!(kernel.changes() - changes, 4, "a route and an entry, of each address");
        assert_eq!(answered(), ["10.32.0.52", "10.32.9.9", "fd00::50"]);
        kernel.ensure_clients(&one).await.unwrap();
        assert_eq!(answered(), ["10.32.0.51", "10.32.9.9"]);
        let routes = json("ip", &["-j", "route", "show", "dev", ROUTED, "proto", "87"]);
        assert_eq!(routes.as_array().unwrap().len(), 1, "{routes}");
        kernel.ensure_clients(&clients(&[])).await.unwrap();
        assert_same(&snapshot(), &before);
        // A later daemon has another handle.
        kernel.ensure_clients(&both).await.unwrap();
        let later = Kernel::new().unwrap();
        later.forget_clients(EXPOSED).await.unwrap();
        assert_eq!(answered(), ["10.32.9.9"]);
        assert!(!is_on("ipv4/conf/weft-host/forwarding"));
        later.forget_clients("weft-none").await.unwrap();
    });
}

#[test]
fn networks_behind_clients_are_routed_and_other_routes_to_them_stay() {
    on_a_host(|| async {
        let (_container, client) = host();
        client.run("ip", &["address", "add", "192.168.7.1/24", "dev", "lo"]);
        client.run("ip", &["route", "add", "10.32.0.1/32", "dev", "wan"]);
        let mac = link(ROUTED)["address"].as_str().unwrap().to_owned();
        let far = ["neigh", "add", "10.32.0.1", "lladdr", &mac, "dev", "wan", "nud", "permanent"];
        client.run("ip", &far);
        run("ip", &["link", "add", "lan0", "type", "bridge"]);
        run("ip", &["link", "set", "lan0", "up"]);
        run("ip", &["route", "add", "192.168.8.0/24", "dev", "lan0"]);
        let kernel = Kernel::new().unwrap();
        let mut spec = clients(&["10.32.0.50", "fd00::50"]);
        let mut behind = |network: &str, by: &str| {
            spec.networks.insert(network.parse().unwrap(), by.parse().unwrap());
        };
        behind("192.168.7.0/24", "10.32.0.50");
        behind("192.168.8.0/24", "10.32.0.50");
        behind("192.0.2.9/32", "10.32.0.50");
        behind("fd07::/64", "fd00::50");
        spec.source = Some("10.32.0.1".parse().unwrap());
        let left_out = kernel.ensure_clients(&spec).await.unwrap();
        assert_eq!(left_out.networks, [net("192.168.8.0/24")]);
        let ping = || {
            let mut ping = std::process::Command::new("ping");
            ping.args(["-c", "1", "-W", "1", "192.168.7.1"]).output().unwrap().status.success()
        };
        assert!(wait_until(ping), "the network behind the client is not reached");
        let route = json("ip", &["-j", "route", "show", "192.168.7.0/24"]);
        assert_eq!(route[0]["gateway"], "10.32.0.50", "{route}");
        for to in ["192.168.7.1", "10.32.0.50"] {
            let route = json("ip", &["-j", "route", "get", to]);
            assert_eq!(route[0]["prefsrc"], "10.32.0.1", "{route}");
        }
        let other = json("ip", &["-j", "route", "show", "192.168.8.0/24"]);
        assert_eq!(other[0]["dev"], "lan0", "{other}");
        let changes = kernel.changes();
        run("ip", &["route", "del", "192.168.7.0/24"]);
        kernel.ensure_clients(&spec).await.unwrap();
        assert!(kernel.changes() > changes, "a damage is not repaired");
        // The network moves to another client.
        spec.addresses.insert("10.32.0.51".parse().unwrap());
        spec.networks.insert("192.168.7.0/24".parse().unwrap(), "10.32.0.51".parse().unwrap());
        kernel.ensure_clients(&spec).await.unwrap();
        let route = json("ip", &["-j", "route", "show", "192.168.7.0/24"]);
        assert_eq!(route.as_array().map(Vec::len), Some(1), "{route}");
        assert_eq!(route[0]["gateway"], "10.32.0.51", "{route}");
        spec.networks.clear();
        kernel.ensure_clients(&spec).await.unwrap();
        let routes = json("ip", &["-j", "route", "show", "dev", ROUTED, "proto", "87"]);
        assert_eq!(routes.as_array().unwrap().len(), 2, "{routes}");
    });
}

#[test]
fn a_network_behind_a_client_takes_no_route_of_the_host_whatever_its_metric() {
    on_a_host(|| async {
        let _ends = host();
        run("ip", &["link", "add", "lan0", "type", "bridge"]);
        run("ip", &["link", "set", "lan0", "up"]);
        for to in ["192.168.8.0/24", "default"] {
            run("ip", &["route", "add", to, "dev", "lan0", "metric", "100"]);
        }
        run("ip", &["-6", "route", "add", "fd08::/64", "dev", "lan0", "metric", "2000"]);
        let kernel = Kernel::new().unwrap();
        let mut spec = clients(&["10.32.0.50", "fd00::50"]);
        kernel.ensure_clients(&spec).await.unwrap();
        // An earlier daemon took the way to all addresses.
        let by_client = ["via", "10.32.0.50", "dev", ROUTED, "proto", "87"];
        run("ip", &[&["route", "add", "default"][..], &by_client].concat());
        for (network, by) in [
            ("0.0.0.0/0", "10.32.0.50"),
            ("192.168.7.0/24", "10.32.0.50"),
            ("192.168.8.0/24", "10.32.0.50"),
            ("::/0", "fd00::50"),
            ("fd08::/64", "fd00::50"),
        ] {
            spec.networks.insert(network.parse().unwrap(), by.parse().unwrap());
        }
        let left_out = kernel.ensure_clients(&spec).await.unwrap();
        let left_out: Vec<String> = left_out.networks.iter().map(ToString::to_string).collect();
        assert_eq!(left_out, ["0.0.0.0/0", "192.168.8.0/24", "::/0", "fd08::/64"]);
        for (to, device) in [
            ("192.168.7.9", ROUTED),
            ("192.168.8.9", "lan0"),
            ("203.0.113.9", "lan0"),
            ("fd08::9", "lan0"),
        ] {
            let route = json("ip", &["-j", "route", "get", to]);
            assert_eq!(route[0]["dev"], device, "{route}");
        }
        // Another program's route to a network that a client has already.
        run("ip", &["route", "add", "192.168.7.0/24", "dev", "lan0", "metric", "100"]);
        let left_out = kernel.ensure_clients(&spec).await.unwrap();
        assert!(left_out.networks.contains(&net("192.168.7.0/24")), "{left_out:?}");
        let route = json("ip", &["-j", "route", "get", "192.168.7.9"]);
        assert_eq!(route[0]["dev"], "lan0", "{route}");
        spec.networks.clear();
        assert_eq!(kernel.ensure_clients(&spec).await.unwrap(), LeftOut::default());
        for (family, client) in [("-4", "10.32.0.50"), ("-6", "fd00::50")] {
            let routes = json("ip", &["-j", family, "route", "show", "proto", "87"]);
            assert_eq!(routes.as_array().unwrap().len(), 1, "{routes}");
            assert_eq!(routes[0]["dst"], client, "{routes}");
        }
    });
}

#[test]
fn a_client_whose_address_is_routed_elsewhere_holds_up_no_other() {
    on_a_host(|| async {
        let _ends = host();
        run("ip", &["link", "add", "lan0", "type", "bridge"]);
        run("ip", &["link", "set", "lan0", "up"]);
        run("ip", &["route", "add", "10.32.0.51", "dev", "lan0"]);
        run("ip", &["-6", "route", "add", "fd00::51", "dev", "lan0"]);
        let kernel = Kernel::new().unwrap();
        let mut spec = clients(&["10.32.0.50", "10.32.0.51", "fd00::50", "fd00::51"]);
        for (network, by) in [("192.168.7.0/24", "10.32.0.50"), ("192.168.8.0/24", "10.32.0.51")] {
            spec.networks.insert(network.parse().unwrap(), by.parse().unwrap());
        }
        let taken = clients(&["10.32.0.51", "fd00::51"]).addresses;
        let left_out = LeftOut { addresses: taken, networks: Vec::new() };
        assert_eq!(kernel.ensure_clients(&spec).await.unwrap(), left_out);
        assert_eq!(answered(), ["10.32.0.50", "fd00::50"], "only for what it passes on");
        let leads = |to: &str, device: &str| {
            let route = json("ip", &["-j", "route", "get", to]);
            assert_eq!(route[0]["dev"], device, "{route}");
        };
        for address in ["10.32.0.50", "192.168.7.9", "fd00::50"] {
            leads(address, ROUTED);
        }
        leads("10.32.0.51", "lan0");
        let change = |new: &[&str], gone: &[&str]| ClientsChange {
            device: ROUTED.into(),
            exposed: EXPOSED.into(),
            new: clients(new).addresses,
            gone: clients(gone).addresses,
            source: None,
        };
        // They are refused and go, and one comes again beside a third.
        let gone = kernel.change_clients(&change(&[], &["10.32.0.51", "fd00::51"])).await.unwrap();
        assert_eq!(gone, LeftOut::default());
        let new = change(&["10.32.0.51", "10.32.0.52"], &[]);
        let left_out = kernel.change_clients(&new).await.unwrap();
        assert_eq!(left_out.addresses, clients(&["10.32.0.51"]).addresses);
        assert_eq!(answered(), ["10.32.0.50", "10.32.0.52", "fd00::50"]);
        leads("10.32.0.51", "lan0");
        leads("10.32.0.52", ROUTED);
        // The other program's route goes.
        run("ip", &["route", "del", "10.32.0.51", "dev", "lan0"]);
        spec.addresses = clients(&["10.32.0.50", "10.32.0.51", "fd00::50"]).addresses;
        assert_eq!(kernel.ensure_clients(&spec).await.unwrap(), LeftOut::default());
        leads("192.168.8.9", ROUTED);
    });
}

#[test]
fn clients_reach_their_network_and_nothing_else() {
    on_a_host(|| async {
        let (_container, client) = host();
        let outside = Container::new();
        outside.plug("out0", "203.0.113.2/24");
        run("ip", &["address", "add", "203.0.113.1/24", "dev", "out0"]);
        outside.run("ip", &["route", "add", "10.32.0.0/12", "via", "203.0.113.1"]);
        run("sysctl", &["-q", "-w", "net.ipv4.ip_forward=1"]);
        let mac = link(ROUTED)["address"].as_str().unwrap().to_owned();
        let far = ["neigh", "add", "203.0.113.2", "lladdr", &mac, "dev", "wan", "nud", "permanent"];
        client.run("ip", &["route", "add", "203.0.113.0/24", "dev", "wan"]);
        client.run("ip", &far);
        let kernel = Kernel::new().unwrap();
        kernel.ensure_clients(&clients(&["10.32.0.50"])).await.unwrap();
        let ping = |from: &Container, to: &str| from.succeeds("ping", &["-c", "1", "-W", "1", to]);
        assert!(wait_until(|| ping(&client, "203.0.113.2")), "the host is a router by itself");
        let mut rules = ClientRules::new(kernel.clone());
        let mut ways = ClientWays::default();
        assert!(rules.set(ROUTED, EXPOSED, &ways).await.unwrap());
        assert!(
            !rules.set(ROUTED, EXPOSED, &ways).await.unwrap(),
            "a repeated call changes nothing"
        );
        assert!(rules.set(ROUTED, "out0", &ways).await.unwrap(), "another network is no change");
        assert!(!ping(&client, "10.32.0.9"), "a client reaches another network");
        assert!(rules.set(ROUTED, EXPOSED, &ways).await.unwrap());
        assert!(!ping(&client, "203.0.113.2"), "a client leaves its network");
        assert!(!ping(&outside, "10.32.0.50"), "a stranger reaches a client");
        assert!(ping(&client, "10.32.0.9") && ping(&client, "10.32.0.1"));
        ways.networks = vec!["203.0.113.0/24".parse().unwrap()];
        assert!(rules.set(ROUTED, EXPOSED, &ways).await.unwrap());
        assert!(ping(&client, "203.0.113.2"), "a network that is named is not reached");
        assert!(ping(&outside, "10.32.0.50"), "a network that is named does not reach clients");
        ways.networks.clear();
        // Nobody outside has a route to clients.
        outside.run("ip", &["route", "del", "10.32.0.0/12"]);
        ways.way_out = vec!["10.32.0.0/12".parse().unwrap()];
        assert!(rules.set(ROUTED, EXPOSED, &ways).await.unwrap());
        assert!(ping(&client, "203.0.113.2"), "a client is not let out");
        outside.run("ip", &["route", "add", "10.32.0.0/12", "via", "203.0.113.1"]);
        assert!(!ping(&outside, "10.32.0.50"), "more than answers come back");
        ways.way_out.clear();
        run("nft", &["flush chain inet weft-clients forward"]);
        assert!(rules.set(ROUTED, EXPOSED, &ways).await.unwrap());
        assert!(!ping(&client, "203.0.113.2"), "a damage is not repaired");
        assert!(ClientRules::new(kernel).remove().await.unwrap());
        assert!(ping(&client, "203.0.113.2"), "rules are left");
    });
}

#[test]
fn announcements_correct_neighbours_and_share_one_socket() {
    on_a_host(|| async {
        let (container, _client) = host();
        let kernel = Kernel::new().unwrap();
        let address = "10.32.0.50";
        let neighbour = || {
            let shown = container.json("ip", &["-j", "neigh", "show", address]);
            shown[0]["lladdr"].as_str().unwrap_or_default().to_owned()
        };
        let wrong = "02:00:00:00:00:99";
        for _ in 0..2 {
            let known = [&["neigh", "replace", address, "lladdr", wrong][..], &["dev", "wan"]];
            container.run("ip", &[&known.concat()[..], &["nud", "stale"]].concat());
            assert_eq!(neighbour(), wrong);
            kernel.announce_clients(EXPOSED, &[address.parse().unwrap()]).await.unwrap();
            let own = link(EXPOSED)["address"].as_str().unwrap().to_owned();
            assert!(wait_until(|| neighbour() == own), "{}", neighbour());
            // The kernel takes 20 ms to close one.
            let sockets = run("cat", &["/proc/net/packet"]);
            assert_eq!(sockets.lines().count(), 1 + 1, "a heading and a socket: {sockets}");
        }
        let missing = kernel.announce_clients("weft-none", &[]).await.unwrap_err();
        assert!(matches!(missing, KernelError::LinkMissing { .. }), "{missing}");
    });
}

#[test]
fn the_device_and_its_routes_are_taken_for_nothing_else() {
    on_a_host(|| async {
        let _ends = host();
        run("ip", &["link", "del", ROUTED]);
        run("ip", &["tuntap", "add", "dev", ROUTED, "mode", "tun"]);
        let kernel = Kernel::new().unwrap();
        kernel.ensure_clients(&clients(&["10.32.0.50"])).await.unwrap();
        assert_eq!(link(ROUTED)["mtu"], 1_400);
        assert!(!kernel.restore_device_name("weft-tap").await.unwrap(), "it is another's");
        let mut spec = attach_spec(1, &Container::new());
        spec.name = EXPOSED.into();
        spec.addresses = vec![net("10.32.0.1/12")];
        assert_eq!(kernel.host_overlaps(&spec).await.unwrap(), []);
    });
}

#[test]
fn devices_of_others_are_left_alone() {
    on_a_host(|| async {
        let _ends = host();
        run("ip", &["link", "set", ROUTED, "group", "0"]);
        let kernel = Kernel::new().unwrap();
        let refused = kernel.ensure_clients(&clients(&["10.32.0.50"])).await.unwrap_err();
        assert!(matches!(refused, KernelError::NameTaken { .. }), "{refused}");
        assert_eq!(answered(), Vec::<String>::new());
        run("ip", &["link", "del", ROUTED]);
        let refused = kernel.ensure_clients(&clients(&[])).await.unwrap_err();
        assert!(matches!(refused, KernelError::LinkMissing { .. }), "{refused}");
    });
}
