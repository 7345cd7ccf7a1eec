//! The entries of an overlay with peers on both engines, as iproute2 shows them.

use std::{net::IpAddr, time::Instant};

use serde_json::Value;
use weft_kernel::{Kernel, KernelError, OuterFamily, Overlay, Via};

use crate::lab::{
    BRIDGE, TAP, assert_same, host_with_bridge, json, make_tap, on_a_host, overlay_of, port_spec,
    run, snapshot, vxlan_spec,
};

const FAMILIES: [OuterFamily; 2] = [OuterFamily::V4, OuterFamily::V6];

async fn host() -> (Kernel, Overlay<u16>) {
    let kernel = host_with_bridge().await;
    make_tap();
    kernel.ensure_port(&port_spec()).await.unwrap();
    for family in FAMILIES {
        kernel.ensure_vxlan(&vxlan_spec(family)).await.unwrap();
    }
    let overlay = overlay_of(&kernel);
    (kernel, overlay)
}

fn via(remote: &str) -> Via {
    Via::Vxlan { remote: remote.parse().unwrap() }
}

fn endpoint(n: u8, peer: u16) -> ([u8; 6], Vec<IpAddr>, u16) {
    ([0x02, 0, 0, 0, 9, n], vec![IpAddr::from([10, 40, 0, n])], peer)
}

/// Every entry of ours, in short: device, MAC, destination.
fn entries() -> Vec<String> {
    let all = json("bridge", &["-j", "-d", "fdb", "show"]);
    let mut list = Vec::new();
    for entry in all.as_array().unwrap() {
        let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
        let own = entry["flags"].as_array().is_some_and(|flags| flags.contains(&"self".into()));
        if own && !entry["dst"].is_null() {
            list.push(format!("{} {} to {}", text("ifname"), text("mac"), text("dst")));
        } else if entry["state"] == "static" {
            list.push(format!("bridge {} to {}", text("mac"), text("ifname")));
        }
    }
    for entry in
        json("ip", &["-j", "neigh", "show", "dev", BRIDGE, "nud", "permanent"]).as_array().unwrap()
    {
        list.push(format!("neighbour {}", entry["dst"].as_str().unwrap()));
    }
    list.sort();
    list
}

const MAC: &str = "02:00:00:00:09:01";
const ZERO: &str = "00:00:00:00:00:00";

fn expected(lines: &[&str]) -> Vec<String> {
    let mut lines: Vec<String> =
        lines.iter().map(|line| line.replace("MAC", MAC).replace("ZERO", ZERO)).collect();
    lines.push("neighbour 10.40.0.1".into());
    lines.sort();
    lines
}

#[test]
fn a_peer_moves_with_its_entries() {
    on_a_host(|| async {
        let (kernel, mut overlay) = host().await;
        let on_tap = expected(&["bridge MAC to weft-tap"]);
        let on_four = expected(&[
            "bridge MAC to weft-vxlan",
            "weft-vxlan MAC to 192.0.2.1",
            "weft-vxlan ZERO to 192.0.2.1",
        ]);
        let elsewhere: Vec<String> =
            on_four.iter().map(|line| line.replace("192.0.2.1", "192.0.2.9")).collect();
        let on_six = expected(&[
            "bridge MAC to weft-vxlan6",
            "weft-vxlan6 MAC to fd00:2::1",
            "weft-vxlan6 ZERO to fd00:2::1",
        ]);
        overlay.set_endpoints(&[endpoint(1, 7)], &[]).await.unwrap();
        // Nothing carries the peer yet: the vector engine drops and counts.
        assert_eq!(entries(), on_tap);
        for (way, wanted) in [
            (Via::Tap, &on_tap),
            (via("192.0.2.1"), &on_four),
            (via("192.0.2.9"), &elsewhere),
            (via("fd00:2::1"), &on_six),
            (via("192.0.2.1"), &on_four),
            (Via::None, &on_tap),
            (via("fd00:2::1"), &on_six),
            (Via::Tap, &on_tap),
        ] {
            overlay.set_peer(7, way).await.unwrap();
            // The next call removes the entries that were kept for frames in flight.
            overlay.set_peers(&[]).await.unwrap();
            assert_eq!(&entries(), wanted, "{way:?}");
            assert_eq!(overlay.resync().await.unwrap(), 0);
            assert_eq!(overlay.via(7), way);
            let changes = kernel.changes();
            overlay.set_peer(7, way).await.unwrap();
            assert_eq!(kernel.changes(), changes);
        }
        overlay.set_peer(7, via("192.0.2.1")).await.unwrap();
        overlay.remove_peer(7).await.unwrap();
        assert!(entries().is_empty());
        overlay.remove_peer(7).await.unwrap();
    });
}

#[test]
fn broadcast_peers_are_set_apart_from_unicast_peers() {
    on_a_host(|| async {
        let (_kernel, mut overlay) = host().await;
        // Two peers at one address (two hosts behind one NAT would be): one copy.
        let peers = [(1, via("192.0.2.1")), (2, via("192.0.2.1")), (3, via("fd00:2::3"))];
        overlay.set_peers(&peers).await.unwrap();
        overlay.set_peer(4, Via::Tap).await.unwrap();
        let copy = |device: &str, remote: &str| format!("{device} {ZERO} to {remote}");
        let (one, three) = (copy("weft-vxlan", "192.0.2.1"), copy("weft-vxlan6", "fd00:2::3"));
        assert_eq!(entries(), [one.clone(), three.clone()]);
        overlay.set_broadcast(&[2, 4]).await.unwrap();
        assert_eq!(entries(), [one]);
        overlay.set_peer(2, Via::Tap).await.unwrap();
        assert!(entries().is_empty());
        overlay.set_broadcast(&[3]).await.unwrap();
        assert_eq!(entries(), [three]);
    });
}

#[test]
fn deletions_by_hand_are_restored() {
    on_a_host(|| async {
        let (kernel, mut overlay) = host().await;
        overlay.set_peer(1, via("192.0.2.1")).await.unwrap();
        overlay.set_endpoints(&[endpoint(1, 1)], &[]).await.unwrap();
        let (before, whole) = (snapshot(), entries());
        assert_eq!(overlay.resync().await.unwrap(), 0);
        run("bridge", &["fdb", "del", MAC, "dev", "weft-vxlan", "self"]);
        run("bridge", &["fdb", "del", MAC, "dev", "weft-vxlan", "master"]);
        run("bridge", &["fdb", "del", ZERO, "dev", "weft-vxlan", "self"]);
        run("ip", &["neigh", "del", "10.40.0.1", "dev", BRIDGE]);
        assert_eq!(overlay.resync().await.unwrap(), 4);
        assert_eq!(entries(), whole);
        // Unwanted entries.
        run("bridge", &["fdb", "add", "02:00:00:00:09:77", "dev", "weft-vxlan", "dst", "1.2.3.4"]);
        run("bridge", &["fdb", "append", MAC, "dev", "weft-vxlan", "dst", "1.2.3.4"]);
        run("bridge", &["fdb", "append", ZERO, "dev", "weft-vxlan", "dst", "1.2.3.4"]);
        overlay.resync().await.unwrap();
        assert_same(&snapshot(), &before);
        // The device is deleted and recreated; a call fails or the caller resyncs.
        run("ip", &["link", "delete", "weft-vxlan"]);
        assert!(kernel.ensure_vxlan(&vxlan_spec(OuterFamily::V4)).await.unwrap());
        overlay.resync().await.unwrap();
        assert_eq!(entries(), whole);
        run("ip", &["link", "delete", "weft-vxlan"]);
        let error = overlay.set_endpoints(&[endpoint(2, 1)], &[]).await.unwrap_err();
        assert!(matches!(error, KernelError::LinkMissing { .. }), "{error}");
        assert!(error.to_string().contains("weft-vxlan"), "{error}");
        assert!(kernel.ensure_vxlan(&vxlan_spec(OuterFamily::V4)).await.unwrap());
        overlay.set_endpoints(&[], &[endpoint(2, 1).0]).await.unwrap();
        assert_eq!(entries(), whole);
    });
}

#[test]
fn a_restarted_daemon_finds_what_it_left_and_removes_what_is_no_more() {
    on_a_host(|| async {
        let (_kernel, mut overlay) = host().await;
        overlay.set_peers(&[(1, via("192.0.2.1")), (2, Via::Tap)]).await.unwrap();
        overlay.set_endpoints(&[endpoint(1, 1), endpoint(2, 2)], &[]).await.unwrap();
        let whole = entries();
        let restarted = Kernel::new().unwrap();
        let mut again = overlay_of(&restarted);
        again.set_peers(&[]).await.unwrap();
        assert!(entries().is_empty());
        drop(overlay);
        again.set_endpoints(&[endpoint(1, 1), endpoint(2, 2)], &[]).await.unwrap();
        again.set_peers(&[(1, via("192.0.2.1")), (2, Via::Tap)]).await.unwrap();
        assert_eq!(entries(), whole);
    });
}

#[test]
fn senseless_endpoints_are_left_out() {
    on_a_host(|| async {
        let (_kernel, mut overlay) = host().await;
        overlay.set_peer(1, via("192.0.2.1")).await.unwrap();
        let before = entries();
        let odd: Vec<_> = [[0; 6], [0xff; 6], [0x01, 0, 0x5e, 0, 0, 1]]
            .map(|mac| (mac, vec![IpAddr::from([10, 40, 0, 1])], 1))
            .to_vec();
        overlay.set_endpoints(&odd, &[]).await.unwrap();
        assert_eq!(entries(), before);
        let addresses = ["0.0.0.0", "224.0.0.1", "::", "ff02::1"].map(|text| text.parse().unwrap());
        overlay.set_endpoints(&[([2, 0, 0, 0, 9, 1], addresses.to_vec(), 1)], &[]).await.unwrap();
        assert!(!entries().iter().any(|line| line.starts_with("neighbour")), "{:?}", entries());
    });
}

#[test]
fn the_bridge_does_not_answer_for_an_address_that_somebody_else_announces() {
    on_a_host(|| async {
        let (_kernel, mut overlay) = host().await;
        let (mac, addresses, peer) = endpoint(1, 1);
        let (address, other) = (addresses[0], [0x02, 0, 0, 0, 9, 77]);
        let answers = || entries().iter().any(|entry| entry == "neighbour 10.40.0.1");
        overlay.set_peer(1, via("192.0.2.1")).await.unwrap();
        overlay.set_endpoints(&[(mac, addresses.clone(), peer)], &[]).await.unwrap();
        let whole = entries();
        // An announcement by the holder, and one of an unknown address.
        assert!(!overlay.handle_announcement(address, mac).await.unwrap());
        assert!(!overlay.handle_announcement([10, 40, 0, 99].into(), other).await.unwrap());
        assert_eq!(entries(), whole);
        assert!(overlay.handle_announcement(address, other).await.unwrap());
        assert!(!overlay.handle_announcement(address, other).await.unwrap());
        assert!(!answers());
        // Neither a resync nor the same endpoint set again makes it answer, and the way to the endpoint
        // stays.
        assert_eq!(overlay.resync().await.unwrap(), 0);
        overlay.set_endpoints(&[(mac, addresses.clone(), peer)], &[]).await.unwrap();
        assert_eq!(entries().len(), whole.len() - 1);
        assert!(!answers());
        // The endpoint announces the address.
        assert!(overlay.handle_announcement(address, mac).await.unwrap());
        assert_eq!(entries(), whole);
        // Another endpoint has it now.
        assert!(overlay.handle_announcement(address, other).await.unwrap());
        overlay.set_endpoints(&[(endpoint(2, 1).0, addresses.clone(), 1)], &[mac]).await.unwrap();
        assert!(answers());
        overlay.set_endpoints(&[(mac, addresses, peer)], &[endpoint(2, 1).0]).await.unwrap();
        assert_eq!(entries(), whole, "what was said is forgotten");
    });
}

#[test]
fn a_missing_vxlan_device_does_not_stop_the_rest() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        make_tap();
        kernel.ensure_port(&port_spec()).await.unwrap();
        let mut overlay = overlay_of(&kernel);
        let peers = [(1, via("192.0.2.1")), (2, Via::Tap)];
        let error = overlay.set_peers(&peers).await.unwrap_err();
        assert!(matches!(error, KernelError::LinkMissing { .. }), "{error}");
        overlay.set_endpoints(&[endpoint(1, 2), endpoint(2, 1)], &[]).await.unwrap_err();
        assert!(entries().contains(&format!("bridge {MAC} to {TAP}")), "{:?}", entries());
        kernel.ensure_vxlan(&vxlan_spec(OuterFamily::V4)).await.unwrap();
        overlay.resync().await.unwrap();
        assert!(entries().contains(&"weft-vxlan 02:00:00:00:09:02 to 192.0.2.1".to_owned()));
    });
}

#[test]
fn a_thousand_peers_are_installed_moved_and_removed_in_time() {
    on_a_host(|| async {
        let (_kernel, mut overlay) = host().await;
        thousand_peers(&mut overlay).await;
        let left = json("bridge", &["-j", "fdb", "show", "dev", "weft-vxlan"]);
        assert!(!left.as_array().unwrap().iter().any(|e: &Value| !e["dst"].is_null()), "{left}");
    });
}

/// Installs, moves and removes 1,000 peers with an endpoint each, in under 5 s each.
pub(crate) async fn thousand_peers(overlay: &mut Overlay<u16>) {
    const PEERS: u16 = 1000;
    const LIMIT_S: f64 = 5.0;
    let of = |n: u16| n.to_be_bytes();
    let endpoints: Vec<_> = (0..PEERS)
        .map(|n| {
            let [high, low] = of(n);
            ([2, 0, 0, 2, high, low], vec![IpAddr::from([10, 41, high, low])], n)
        })
        .collect();
    let on = |net: u8| -> Vec<(u16, Via)> {
        (0..PEERS)
            .map(|n| {
                let [high, low] = of(n);
                (n, Via::Vxlan { remote: IpAddr::from([10, net, high, low]) })
            })
            .collect()
    };
    let timed = |what: &str, start: Instant| {
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("1,000 peers {what} in {seconds:.3} s");
        assert!(seconds < LIMIT_S, "{what}: {seconds} s");
    };
    let start = Instant::now();
    overlay.set_peers(&on(51)).await.unwrap();
    overlay.set_endpoints(&endpoints, &[]).await.unwrap();
    timed("installed", start);
    let start = Instant::now();
    overlay.set_peers(&on(52)).await.unwrap();
    timed("moved to other addresses", start);
    let start = Instant::now();
    let taps: Vec<_> = (0..PEERS).map(|n| (n, Via::Tap)).collect();
    overlay.set_peers(&taps).await.unwrap();
    timed("moved to the vector engine", start);
    let start = Instant::now();
    for (n, way) in on(51) {
        overlay.set_peer(n, way).await.unwrap();
    }
    timed("moved back one by one", start);
    let start = Instant::now();
    assert_eq!(overlay.resync().await.unwrap(), 0);
    timed("compared", start);
    let start = Instant::now();
    for n in 0..PEERS {
        overlay.remove_peer(n).await.unwrap();
    }
    timed("removed one by one", start);
}
