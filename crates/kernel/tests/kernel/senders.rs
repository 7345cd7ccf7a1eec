//! The Ethernet addresses that each peer may send from, over plain VXLAN: there the outer address identifies the
//! peer. Another test, in a guest whose kernel has ESP, shows that IPsec's states identify it at any outer
//! address.

use std::{net::IpAddr, net::UdpSocket, time::Duration};

use weft_crypto::PeerId;
use weft_io::uninterrupted;
use weft_kernel::{Guard, OuterFamily, Senders};
use weft_path::Vni;

use crate::{
    lab::{Container, endpoint_of, on_a_host, run, wait_until},
    switch::{hosts, ping},
};

/// The overlay ports of all networks.
const PORTS: [&str; 1] = ["weft-vx*"];
/// How long to wait for frames that must arrive, and for frames that must not.
const ARRIVAL: Duration = Duration::from_secs(5);
const SILENCE: Duration = Duration::from_millis(500);

fn peer(n: u8) -> PeerId {
    PeerId::from_bytes([n; 32])
}

fn mac(n: u8) -> [u8; 6] {
    endpoint_of(n, n).0
}

fn number(n: u8) -> u32 {
    0x5800_0000 | u32::from(n)
}

fn outer(n: u8) -> [IpAddr; 2] {
    [format!("192.0.2.{n}"), format!("fd00:2::{n}")].map(|text| text.parse().unwrap())
}

/// The container sends from this Ethernet address from now on.
fn take(container: &Container, n: u8) {
    let mac = mac(n).map(|byte| format!("{byte:02x}")).join(":");
    container.run("ip", &["link", "set", "weft0", "address", &mac]);
    // A fixed neighbour entry, so that it sends no query: its own bridge might drop the answer.
    let to = mac1();
    container.run("ip", &["neighbour", "replace", "10.32.0.1", "lladdr", &to, "dev", "weft0"]);
}

fn mac1() -> String {
    mac(1).map(|byte| format!("{byte:02x}")).join(":")
}

/// Whether a datagram from this container reaches container 1. The first ones may be lost.
fn arrives(from: &Container, listener: &UdpSocket, limit: Duration) -> bool {
    let sender = from.inside(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    let tries = limit.as_millis() / 100;
    listener.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    (0..tries).any(|_| {
        sender.send_to(b"frame", "10.32.0.1:5000").unwrap();
        uninterrupted(|| listener.recv(&mut [0; 64])).is_ok()
    })
}

#[test]
fn a_peer_sends_from_its_own_addresses_alone() {
    for family in [OuterFamily::V4, OuterFamily::V6] {
        on_a_host(move || async move {
            let (hosts, containers) = hosts(family, 3).await;
            let remotes: Vec<IpAddr> = (1..=3).flat_map(outer).collect();
            let senders = Senders::new(hosts[0].kernel.clone());
            let mut guard = Guard::with_senders(hosts[0].kernel.clone(), &PORTS, senders.clone());
            let mut others = [1, 2].map(|n: usize| Guard::new(hosts[n].kernel.clone(), &PORTS));
            for other in &mut others {
                other.ensure(&remotes).await.unwrap();
            }
            // Members set before the guard stands are written with it, and later changes at once.
            senders.set_macs(Vni::WEFT, &[(mac(2), peer(2))], &[]).await.unwrap();
            senders.set_peer(peer(2), number(2), outer(2)).await.unwrap();
            assert!(guard.ensure(&remotes).await.unwrap());
            senders.set_peer(peer(3), number(3), outer(3)).await.unwrap();
            // Its address counts on another network alone.
            senders.set_macs(Vni(5), &[(mac(3), peer(3))], &[]).await.unwrap();
            assert!(!ping(&containers[2], "10.32.0.1"));
            assert!(guard.counters().await.unwrap().foreign_source.packets > 0);
            senders.set_macs(Vni::WEFT, &[(mac(3), peer(3))], &[]).await.unwrap();
            assert!(guard.is_whole().await.unwrap());
            let counted = guard.counters().await.unwrap();
            for container in &containers[1..] {
                assert!(ping(container, "10.32.0.1"));
            }
            assert_eq!(guard.counters().await.unwrap(), counted);
            // Host 2 sends as the container of host 3.
            let listener = containers[0].inside(|| UdpSocket::bind("0.0.0.0:5000").unwrap());
            let entries = || hosts[0].namespace.run("bridge", &["fdb", "show"]);
            let before = entries();
            take(&containers[1], 3);
            assert!(!arrives(&containers[1], &listener, SILENCE));
            assert!(
                guard.counters().await.unwrap().foreign_source.packets
                    > counted.foreign_source.packets
            );
            assert_eq!(entries(), before);
            assert!(arrives(&containers[2], &listener, ARRIVAL));
            // The container moves from host 3 to host 2.
            senders.set_macs(Vni::WEFT, &[(mac(3), peer(2))], &[]).await.unwrap();
            assert!(arrives(&containers[1], &listener, ARRIVAL));
            assert!(!arrives(&containers[2], &listener, SILENCE));
            // Another peer takes the address over, and one goes.
            senders.set_peer(peer(3), number(3), outer(2)).await.unwrap();
            assert!(!arrives(&containers[1], &listener, SILENCE));
            senders.remove_peer(peer(3)).await.unwrap();
            assert!(arrives(&containers[1], &listener, ARRIVAL));
            assert!(guard.is_whole().await.unwrap());
        });
    }
}

fn list(family: &str, what: &str, name: &str) -> String {
    run("nft", &["list", what, family, "weft-guard", name])
}

#[test]
fn changes_by_others_are_mended_and_wefts_own_are_no_news() {
    on_a_host(|| async {
        let kernel = weft_kernel::Kernel::new().unwrap();
        let senders = Senders::new(kernel.clone());
        let mut guard = Guard::with_senders(kernel.clone(), &PORTS, senders.clone());
        let mut watch = guard.watch().unwrap();
        guard.ensure(&[]).await.unwrap();
        senders.set_peer(peer(7), number(7), outer(7)).await.unwrap();
        senders.set_macs(Vni::WEFT, &[(mac(7), peer(7)), (mac(8), peer(7))], &[]).await.unwrap();
        let pair = |n: u8| format!("5800:7 . \"weft-vxlan\" . 02:00:00:00:01:{n:02}");
        let macs = list("bridge", "set", "senders");
        assert!(macs.contains(&pair(7)) && macs.contains(&pair(8)), "{macs}");
        assert!(list("inet", "map", "marks").contains("0x58000007 : 5800:7"));
        assert!(list("inet", "map", "senders4").contains("192.0.2.7 : 5800:7"));
        assert!(list("inet", "map", "senders6").contains("fd00:2::7 : 5800:7"));
        assert!(guard.is_whole().await.unwrap());
        assert!(!guard.ensure(&[]).await.unwrap());
        // Thousands, and away again.
        let many: Vec<_> = (0..5_000_u16)
            .map(|n| {
                let [a, b] = n.to_be_bytes();
                ([2, 9, 9, 9, a, b], peer(9))
            })
            .collect();
        senders.set_macs(Vni::WEFT, &many, &[]).await.unwrap();
        senders.set_peer(peer(9), number(9), []).await.unwrap();
        assert!(guard.is_whole().await.unwrap());
        let gone: Vec<_> = many.iter().map(|(mac, _)| *mac).collect();
        senders.set_macs(Vni::WEFT, &[], &gone).await.unwrap();
        assert!(guard.is_whole().await.unwrap());
        while tokio::time::timeout(SILENCE, watch.changed()).await.is_ok() {}
        senders.set_macs(Vni::WEFT, &[(mac(9), peer(7))], &[mac(8)]).await.unwrap();
        assert!(tokio::time::timeout(SILENCE, watch.changed()).await.is_err());
        for damage in [
            "flush set bridge weft-guard senders",
            "add element bridge weft-guard senders { 5800:7 . weft-vxlan . 02:00:00:00:00:ff }",
            "delete element inet weft-guard marks { 0x58000007 }",
            "delete table bridge weft-guard",
            "flush chain inet weft-guard prerouting",
        ] {
            run("nft", &[damage]);
            tokio::time::timeout(ARRIVAL, watch.changed()).await.expect(damage).unwrap();
            assert!(!guard.is_whole().await.unwrap(), "{damage}");
            assert!(guard.ensure(&[]).await.unwrap(), "{damage}");
            assert!(guard.is_whole().await.unwrap(), "{damage}");
            let macs = list("bridge", "set", "senders");
            assert!(macs.contains(&pair(7)) && macs.contains(&pair(9)), "{damage}: {macs}");
            assert!(!macs.contains(&pair(8)) && !macs.contains(":ff"), "{damage}: {macs}");
            while tokio::time::timeout(SILENCE, watch.changed()).await.is_ok() {}
        }
        // A daemon that was killed leaves members, and the next one's numbers are others'.
        let mut again = Guard::with_senders(kernel.clone(), &PORTS, Senders::new(kernel.clone()));
        again.ensure(&[]).await.unwrap();
        assert!(!list("bridge", "set", "senders").contains("elements"));
        assert!(again.remove().await.unwrap());
        assert!(wait_until(|| run("nft", &["list", "ruleset"]).trim().is_empty()));
    });
}
