//! The bridge, its overlay port and its addresses.

use rustix::thread::CapabilitySet;
use weft_kernel::{BridgeSpec, DEVICE_ALIAS, Kernel, KernelError};

use crate::lab::{
    BRIDGE, Container, MTU, TAP, assert_same, attach_spec, bridge_spec, has_link, host_with_bridge,
    json, link, make_device, make_tap, net, on_a_host, port_spec, run, snapshot,
};

#[test]
fn the_bridge_is_made_as_wanted() {
    on_a_host(|| async {
        host_with_bridge().await;
        let bridge = link(BRIDGE);
        assert_eq!(bridge["address"], "02:00:00:00:00:01");
        assert_eq!(bridge["mtu"], MTU);
        assert_eq!(bridge["ifalias"], DEVICE_ALIAS);
        assert_eq!(bridge["inet6_addr_gen_mode"], "none");
        let flags = bridge["flags"].as_array().unwrap();
        assert!(flags.iter().any(|flag| flag == "UP"), "{flags:?}");
        let data = &bridge["linkinfo"]["info_data"];
        assert_eq!((&data["forward_delay"], &data["stp_state"]), (&0.into(), &0.into()));
        assert_eq!(data["mcast_snooping"], 1);
        let sysctl = "/proc/sys/net/ipv6/conf/weft/accept_ra";
        assert_eq!(std::fs::read_to_string(sysctl).unwrap().trim(), "0");
        let addresses = json("ip", &["-j", "address", "show", "dev", BRIDGE]);
        assert_eq!(addresses[0]["addr_info"], serde_json::json!([]));
    });
}

#[test]
fn applying_it_again_changes_nothing() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        make_tap();
        kernel.ensure_port(&port_spec()).await.unwrap();
        let (before, changes) = (snapshot(), kernel.changes());
        kernel.ensure_bridge(&bridge_spec()).await.unwrap();
        kernel.ensure_port(&port_spec()).await.unwrap();
        assert_eq!(kernel.changes(), changes);
        let restarted = Kernel::new().unwrap();
        restarted.ensure_bridge(&bridge_spec()).await.unwrap();
        restarted.ensure_port(&port_spec()).await.unwrap();
        assert_eq!(restarted.changes(), 0);
        assert_same(&snapshot(), &before);
    });
}

#[test]
fn the_mtu_stays_whatever_the_ports_have() {
    for mtu in [1280, MTU, 1500, 8888] {
        on_a_host(move || async move {
            let kernel = Kernel::new().unwrap();
            kernel.ensure_bridge(&BridgeSpec { mtu, ..bridge_spec() }).await.unwrap();
            make_device("small");
            run("ip", &["link", "set", "small", "mtu", "1280"]);
            run("ip", &["link", "set", "small", "master", BRIDGE]);
            assert_eq!(link(BRIDGE)["mtu"], mtu);
            run("ip", &["link", "set", "small", "mtu", "1300"]);
            assert_eq!(link(BRIDGE)["mtu"], mtu);
        });
    }
}

#[test]
fn changes_by_others_are_put_right() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        make_tap();
        kernel.ensure_port(&port_spec()).await.unwrap();
        let before = snapshot();
        run("ip", &["link", "set", BRIDGE, "down", "mtu", "1300", "address", "02:00:00:00:00:99"]);
        run("ip", &["link", "set", BRIDGE, "type", "bridge", "forward_delay", "1500"]);
        run("ip", &["link", "set", TAP, "nomaster", "mtu", "1300", "down"]);
        kernel.ensure_bridge(&bridge_spec()).await.unwrap();
        kernel.ensure_port(&port_spec()).await.unwrap();
        assert_same(&snapshot(), &before);
    });
}

#[test]
fn the_port_has_the_wanted_options() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        make_tap();
        kernel.ensure_port(&port_spec()).await.unwrap();
        let tap = link(TAP);
        assert_eq!(tap["master"], BRIDGE);
        assert_eq!(tap["mtu"], MTU);
        assert_eq!((&tap["gso_max_size"], &tap["gso_max_segs"]), (&60_000.into(), &40.into()));
        assert_eq!(tap["inet6_addr_gen_mode"], "none");
        let port = &json("bridge", &["-j", "-d", "link", "show", "dev", TAP])[0];
        assert_eq!(port["isolated"], true, "{port}");
        assert_eq!(port["learning"], false, "{port}");
        assert_eq!(port["neigh_suppress"], true, "{port}");
        assert_eq!(port["flood"], true, "{port}");
    });
}

#[test]
fn a_port_that_is_not_there_or_not_ours_is_an_error() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let error = kernel.ensure_port(&port_spec()).await.unwrap_err();
        assert!(matches!(error, KernelError::LinkMissing { .. }), "{error}");
        run("ip", &["link", "add", TAP, "type", "bridge"]);
        let error = kernel.ensure_port(&port_spec()).await.unwrap_err();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
        run("ip", &["link", "delete", TAP]);
        make_tap();
        run("ip", &["link", "add", "br-other", "type", "bridge"]);
        run("ip", &["link", "set", TAP, "master", "br-other"]);
        let error = kernel.ensure_port(&port_spec()).await.unwrap_err();
        assert!(error.to_string().contains("br-other"), "{error}");
        assert_eq!(link(TAP)["master"], "br-other");
    });
}

#[test]
fn somebody_elses_device_is_left_alone() {
    for kind in ["bridge", "veth"] {
        on_a_host(move || async move {
            run("ip", &["link", "add", BRIDGE, "type", kind]);
            let before = snapshot();
            let kernel = Kernel::new().unwrap();
            let error = kernel.ensure_bridge(&bridge_spec()).await.unwrap_err();
            assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("weft") && text.contains(kind), "{text}");
            let error = kernel.remove_all(BRIDGE).await.unwrap_err();
            assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
            assert_same(&snapshot(), &before);
            assert_eq!(kernel.changes(), 0);
        });
    }
}

#[test]
fn an_ipv6_router_in_a_container_gives_the_host_no_route() {
    // A host bridge that accepted router advertisements would take its default route from any container. The
    // setting is restored after another program switches it on.
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        run("sysctl", &["-q", "-w", "net.ipv6.conf.weft.accept_ra=1"]);
        kernel.ensure_bridge(&bridge_spec()).await.unwrap();
        let text = run("sysctl", &["-n", "net.ipv6.conf.weft.accept_ra"]);
        assert_eq!(text.trim(), "0");
    });
}

#[test]
fn the_host_gets_exactly_the_wanted_addresses() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let first = [net("10.32.0.1/12"), net("fd32::1/64")];
        kernel.set_bridge_addresses(BRIDGE, &first).await.unwrap();
        let changes = kernel.changes();
        kernel.set_bridge_addresses(BRIDGE, &first).await.unwrap();
        assert_eq!(kernel.changes(), changes);
        assert_eq!(addresses(BRIDGE), ["10.32.0.1/12", "fd32::1/64"]);
        kernel.set_bridge_addresses(BRIDGE, &[net("10.32.0.2/12")]).await.unwrap();
        assert_eq!(addresses(BRIDGE), ["10.32.0.2/12"]);
        kernel.set_bridge_addresses(BRIDGE, &[]).await.unwrap();
        assert!(addresses(BRIDGE).is_empty());
    });
}

#[test]
fn removing_all_takes_ours_and_nothing_else() {
    on_a_host(|| async {
        make_device("other");
        // Its alias starts like those of Weft's devices.
        run("ip", &["link", "add", "friend", "type", "veth", "peer", "name", "friend1"]);
        run("ip", &["link", "set", "friend", "alias", "weft backup line"]);
        run("ip", &["link", "add", "br-other", "type", "bridge"]);
        let before = snapshot();
        let kernel = host_with_bridge().await;
        run("ip", &["link", "set", "other", "master", BRIDGE]);
        let (one, two) = (Container::new(), Container::new());
        kernel.attach(&attach_spec(1, &one)).await.unwrap();
        kernel.attach(&attach_spec(2, &two)).await.unwrap();
        run("ip", &["link", "set", "weft-box2", "nomaster"]);
        assert_eq!(kernel.remove_all(BRIDGE).await.unwrap(), 3);
        assert!(!has_link(BRIDGE) && has_link("other") && has_link("friend"));
        for container in [one, two] {
            let left = container.json("ip", &["-j", "link", "show"]);
            assert_eq!(left.as_array().unwrap().len(), 1, "{left}");
        }
        run("ip", &["link", "set", "other", "down"]);
        assert_same(&snapshot(), &before);
        assert_eq!(kernel.remove_all(BRIDGE).await.unwrap(), 0);
    });
}

#[test]
fn impossible_names_and_mtus_are_refused() {
    on_a_host(|| async {
        let kernel = Kernel::new().unwrap();
        for name in ["", ".", "..", "a/b", "a b", "sixteen-letters-", "a:1"] {
            let spec = BridgeSpec { name: name.into(), ..bridge_spec() };
            let error = kernel.ensure_bridge(&spec).await.unwrap_err();
            assert!(matches!(error, KernelError::InvalidName { .. }), "{name}: {error}");
        }
        for mtu in [0, 1279, 65_536] {
            let error =
                kernel.ensure_bridge(&BridgeSpec { mtu, ..bridge_spec() }).await.unwrap_err();
            assert!(matches!(error, KernelError::InvalidMtu { .. }), "{mtu}: {error}");
        }
        assert_eq!(kernel.changes(), 0);
    });
}

#[test]
fn without_the_capability_it_says_what_is_missing() {
    on_a_host(|| async {
        let kernel = Kernel::new().unwrap();
        let mut sets = rustix::thread::capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN);
        rustix::thread::set_capabilities(None, sets).unwrap();
        let error = kernel.ensure_bridge(&bridge_spec()).await.unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, KernelError::NotPermitted { .. }), "{text}");
        assert!(text.contains("create device weft") && text.contains("CAP_NET_ADMIN"), "{text}");
    });
}

fn addresses(device: &str) -> Vec<String> {
    let found = json("ip", &["-j", "address", "show", "dev", device]);
    let list = found[0]["addr_info"].as_array().unwrap().iter();
    list.map(|a| format!("{}/{}", a["local"].as_str().unwrap(), a["prefixlen"])).collect()
}

#[test]
fn a_bridge_with_all_its_ports_says_so() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        // 512 pairs, and all but one end of theirs a port.
        let pair = |n: u32| {
            let other = if n == 0 { "" } else { &format!("link set q{n} master {BRIDGE}\n") };
            format!("link add p{n} master {BRIDGE} type veth peer name q{n}\n{other}")
        };
        let devices = (0..512).map(pair);
        let file = std::env::temp_dir().join(format!("weft-ports-{}", std::process::id()));
        std::fs::write(&file, devices.collect::<String>()).unwrap();
        run("ip", &["-batch", &file.to_string_lossy()]);
        std::fs::remove_file(&file).unwrap();
        let container = Container::new();
        let error = kernel.attach(&attach_spec(1, &container)).await.unwrap_err();
        assert!(matches!(error, KernelError::BridgeFull { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("1023 ports") && text.contains("detach"), "{text}");
    });
}
