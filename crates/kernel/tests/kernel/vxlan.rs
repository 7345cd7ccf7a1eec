//! VXLAN devices: made as wanted, corrected, recreated, and never taken from another program.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde_json::Value;
use weft_kernel::{Kernel, KernelError, OuterFamily, VxlanSpec};

use crate::lab::{
    BRIDGE, MTU, assert_same, has_link, host_with_bridge, json, link, on_a_host, run, snapshot,
    vxlan_spec,
};

fn options(name: &str) -> Value {
    link(name)["linkinfo"]["info_data"].clone()
}

fn probe_spec() -> VxlanSpec {
    let mac = Some([0x02, 0, 0, 0, 0, 0x77]);
    let bridge = None;
    let name = "weft-probe".to_owned();
    VxlanSpec { name, vni: 0xff_ffff, mac, bridge, ..vxlan_spec(OuterFamily::V4) }
}

#[test]
fn the_devices_are_made_as_wanted() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        for family in [OuterFamily::V4, OuterFamily::V6] {
            let spec = vxlan_spec(family);
            assert!(kernel.ensure_vxlan(&spec).await.unwrap());
            let device = link(&spec.name);
            assert_eq!((&device["master"], &device["mtu"]), (&BRIDGE.into(), &MTU.into()));
            assert_eq!(device["inet6_addr_gen_mode"], "none");
            let up = device["flags"].as_array().unwrap().iter().any(|flag| flag == "UP");
            assert!(up, "{device}");
            let data = options(&spec.name);
            assert_eq!((&data["id"], &data["port"]), (&1.into(), &6787.into()));
            assert_eq!((&data["learning"], &data["udp_csum"]), (&false.into(), &false.into()));
            assert_eq!(data["udp_zero_csum6_tx"], true);
            assert_eq!(data["udp_zero_csum6_rx"], true);
            assert_eq!((&data["df"], &data["remcsum_rx"]), (&"set".into(), &true.into()));
            for absent in ["group", "group6", "remote", "local", "local6", "remcsum_tx", "gbp"] {
                assert!(data[absent].is_null(), "{absent}: {data}");
            }
            let port = &json("bridge", &["-j", "-d", "link", "show", "dev", &spec.name])[0];
            for (option, wanted) in [
                ("isolated", true),
                ("learning", false),
                ("neigh_suppress", true),
                ("flood", false),
                ("mcast_flood", true),
                ("bcast_flood", true),
            ] {
                assert_eq!(port[option], wanted, "{option}: {port}");
            }
            assert_eq!(port["mcast_router"], 2, "{port}");
        }
        // A socket for each family, on any address.
        let sockets = run("ss", &["-uanH"]);
        assert!(sockets.contains("0.0.0.0:6787") && sockets.contains("[::]:6787"), "{sockets}");
    });
}

#[test]
fn a_probe_device_shares_the_port_and_stands_outside_the_bridge() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        kernel.ensure_vxlan(&vxlan_spec(OuterFamily::V4)).await.unwrap();
        kernel.ensure_vxlan(&probe_spec()).await.unwrap();
        let device = link("weft-probe");
        assert!(device["master"].is_null(), "{device}");
        assert_eq!(device["address"], "02:00:00:00:00:77");
        let addresses = json("ip", &["-j", "address", "show", "dev", "weft-probe"]);
        assert_eq!(addresses[0]["addr_info"], serde_json::json!([]));
        let mac = [0x02, 0, 0, 0, 0, 5];
        let remote: IpAddr = "192.0.2.5".parse().unwrap();
        kernel.set_tunnel_entries("weft-probe", &[(mac, remote)]).await.unwrap();
        let changes = kernel.changes();
        kernel.set_tunnel_entries("weft-probe", &[(mac, remote)]).await.unwrap();
        assert_eq!(kernel.changes(), changes);
        let entries = json("bridge", &["-j", "fdb", "show", "dev", "weft-probe"]);
        assert_eq!(entries[0]["mac"], "02:00:00:00:00:05");
        assert_eq!(entries[0]["dst"], "192.0.2.5");
        let other: IpAddr = "192.0.2.6".parse().unwrap();
        kernel.change_tunnel_entries("weft-probe", &[(mac, other)], &[]).await.unwrap();
        run(
            "bridge",
            &["fdb", "append", "02:00:00:00:00:05", "dev", "weft-probe", "dst", "1.2.3.4"],
        );
        run(
            "bridge",
            &["fdb", "append", "00:00:00:00:00:00", "dev", "weft-probe", "dst", "1.2.3.4"],
        );
        kernel.set_tunnel_entries("weft-probe", &[(mac, other)]).await.unwrap();
        let entries = json("bridge", &["-j", "fdb", "show", "dev", "weft-probe"]);
        assert_eq!(entries.as_array().unwrap().len(), 1, "{entries}");
        assert_eq!(entries[0]["dst"], "192.0.2.6");
        kernel.change_tunnel_entries("weft-probe", &[], &[(mac, other)]).await.unwrap();
        let entries = json("bridge", &["-j", "fdb", "show", "dev", "weft-probe"]);
        assert_eq!(entries, serde_json::json!([]));
    });
}

#[test]
fn applying_it_again_changes_nothing_and_what_somebody_changed_is_put_right() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let specs = [vxlan_spec(OuterFamily::V4), vxlan_spec(OuterFamily::V6), probe_spec()];
        for spec in &specs {
            kernel.ensure_vxlan(spec).await.unwrap();
        }
        let before = snapshot();
        let restarted = Kernel::new().unwrap();
        for spec in &specs {
            assert!(!restarted.ensure_vxlan(spec).await.unwrap());
        }
        assert_eq!(restarted.changes(), 0);
        assert_same(&snapshot(), &before);
        run("ip", &["link", "set", "weft-probe", "master", BRIDGE]);
        run("ip", &["link", "set", "weft-vxlan", "nomaster", "mtu", "1300", "down"]);
        run("ip", &["link", "set", "weft-vxlan6", "type", "bridge_slave", "isolated", "off"]);
        for spec in &specs {
            assert!(!kernel.ensure_vxlan(spec).await.unwrap());
        }
        // Devices and ports; a device that was down has its multicast routes in another order.
        let devices = |shown: Vec<Value>| [shown[0].clone(), shown[5].clone()];
        assert_same(&devices(snapshot()), &devices(before));
    });
}

#[test]
fn a_device_with_other_options_is_made_anew() {
    let whole =
        "id 1;dstport 6787;nolearning;df set;noudpcsum;udp6zerocsumtx;udp6zerocsumrx;remcsumrx";
    for (option, other) in [
        ("id 1", "id 9"),
        ("dstport 6787", "dstport 6789"),
        ("nolearning", "learning"),
        ("noudpcsum", "udpcsum"),
        ("remcsumrx", "noremcsumrx"),
        ("id 1", "id 1 gbp"),
        ("id 1", "id 1 remote 192.0.2.1"),
        ("id 1", "id 1 local 127.0.0.1"),
        ("id 1", "id 1 ttl 5"),
        ("id 1", "id 1 tos inherit"),
    ] {
        on_a_host(move || async move {
            let kernel = host_with_bridge().await;
            kernel.ensure_vxlan(&vxlan_spec(OuterFamily::V4)).await.unwrap();
            let wanted = options("weft-vxlan");
            run("ip", &["link", "delete", "weft-vxlan"]);
            let group = weft_kernel::DEVICE_GROUP.to_string();
            let options_then = whole.replace(option, other).replace(';', " ");
            let mut arguments = vec!["link", "add", "weft-vxlan", "group", &group, "type", "vxlan"];
            arguments.extend(options_then.split(' '));
            run("ip", &arguments);
            assert!(kernel.ensure_vxlan(&vxlan_spec(OuterFamily::V4)).await.unwrap(), "{other}");
            assert_eq!(options("weft-vxlan"), wanted, "{other}");
        });
    }
}

/// After a change of options, a device treats remote checksum flags as reserved bits, on Linux 6.14 and
/// later.
#[test]
fn a_device_that_begins_or_ends_to_cut_is_made_anew() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let with = |cut| VxlanSpec { cut, ..vxlan_spec(OuterFamily::V4) };
        for (cut, made, df) in [(false, true, "set"), (true, true, "unset"), (true, false, "unset")]
        {
            assert_eq!(kernel.ensure_vxlan(&with(cut)).await.unwrap(), made, "{df}");
            assert_eq!(options("weft-vxlan")["df"], df);
        }
        // Another program changes it.
        run("ip", &["link", "set", "weft-vxlan", "type", "vxlan", "id", "1", "df", "set"]);
        assert!(kernel.ensure_vxlan(&with(true)).await.unwrap());
        assert_eq!(options("weft-vxlan")["df"], "unset");
    });
}

#[test]
fn a_device_copies_the_dscp_where_it_is_told_to() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let with = |copy_dscp| VxlanSpec { copy_dscp, ..vxlan_spec(OuterFamily::V4) };
        for (copy_dscp, made) in [(true, true), (true, false), (false, true), (false, false)] {
            assert_eq!(kernel.ensure_vxlan(&with(copy_dscp)).await.unwrap(), made, "{copy_dscp}");
            let tos = run("ip", &["-d", "link", "show", "weft-vxlan"]);
            assert_eq!(tos.contains("tos inherit"), copy_dscp, "{tos}");
        }
    });
}

#[test]
fn somebody_elses_device_number_or_port_is_left_alone_and_named() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let spec = vxlan_spec(OuterFamily::V4);
        run("ip", &["link", "add", "weft-vxlan", "type", "vxlan", "id", "1", "dstport", "6787"]);
        let error = kernel.ensure_vxlan(&spec).await.unwrap_err();
        assert!(matches!(error, KernelError::NameTaken { .. }), "{error}");
        assert!(!kernel.remove_device("weft-vxlan").await.unwrap());
        run("ip", &["link", "set", "weft-vxlan", "name", "theirs"]);
        // The kernel compares the options of a socket too; with the same ones it is the same number.
        run("ip", &["link", "delete", "theirs"]);
        let options = ["udp6zerocsumtx", "udp6zerocsumrx", "remcsumrx", "noudpcsum"];
        let mut arguments = vec!["link", "add", "theirs", "type", "vxlan", "id", "1"];
        arguments.extend(["dstport", "6787"].iter().chain(&options));
        run("ip", &arguments);
        let error = kernel.ensure_vxlan(&spec).await.unwrap_err();
        assert!(matches!(error, KernelError::VniTaken { vni: 1, port: 6787 }), "{error}");
        run("ip", &["link", "delete", "theirs"]);
        let _taken = std::net::UdpSocket::bind("0.0.0.0:6787").unwrap();
        let error = kernel.ensure_vxlan(&spec).await.unwrap_err();
        assert!(matches!(error, KernelError::UdpPortTaken { port: 6787, .. }), "{error}");
        drop(_taken);
        // A program that another test starts has a copy of the socket until it runs.
        let end = Instant::now() + Duration::from_secs(5);
        while let Err(error) = kernel.ensure_vxlan(&spec).await {
            let taken = matches!(error, KernelError::UdpPortTaken { .. });
            assert!(taken && Instant::now() < end, "{error}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(kernel.remove_device("weft-vxlan").await.unwrap());
        assert!(!kernel.remove_device("weft-vxlan").await.unwrap());
    });
}

#[test]
fn stop_leaves_nothing_of_ours_and_all_of_theirs() {
    on_a_host(|| async {
        run("ip", &["link", "add", "theirs", "type", "vxlan", "id", "7", "dstport", "4789"]);
        let before = snapshot();
        let kernel = host_with_bridge().await;
        kernel.ensure_vxlan(&vxlan_spec(OuterFamily::V4)).await.unwrap();
        kernel.ensure_vxlan(&vxlan_spec(OuterFamily::V6)).await.unwrap();
        kernel.ensure_vxlan(&probe_spec()).await.unwrap();
        assert_eq!(kernel.remove_all(BRIDGE).await.unwrap(), 4);
        assert_same(&snapshot(), &before);
        // The bridge is deleted by hand: the other devices of ours are still removed.
        kernel.ensure_vxlan(&probe_spec()).await.unwrap();
        assert_eq!(kernel.remove_all(BRIDGE).await.unwrap(), 1);
        assert!(!has_link("weft-probe") && has_link("theirs"));
    });
}
