//! Packets that pass, with each cipher over each carrier, and the kernel's reports of peer and key.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use weft_kernel::ovpn::Refusal;
use weft_openvpn::device::{Keepalive, Notification, PeerAttributes, Slot};

use crate::lab::{CIPHERS, Outer, PEER, PORT, Pair, address, key, peer, told, wait};

#[test]
fn every_cipher_carries_packets_over_every_carrier() {
    for outer in [Outer::Udp4, Outer::Udp6, Outer::Tcp] {
        for cipher in CIPHERS {
            println!("{outer:?} {cipher:?}");
            let pair = Pair::new(outer, cipher);
            pair.a.pings(2);
            pair.b.pings(1);
            let client = &pair.a.client;
            let state = wait(client.peer(pair.device_a, PEER)).unwrap();
            println!("{state:?}");
            assert_eq!(state.id, PEER);
            assert!(state.vpn.rx_packets >= 16 && state.vpn.tx_packets >= 16, "{state:?}");
            assert!(state.vpn.tx_bytes >= 16 * 1000, "{state:?}");
            assert!(state.link.rx_bytes > state.vpn.rx_bytes, "{state:?}");
            assert!(state.link.tx_packets >= 16, "{state:?}");
            if outer != Outer::Tcp {
                assert_eq!(state.remote, Some(address(2, outer)));
                assert_eq!(state.local.map(|local| local.port()), Some(PORT));
            }
            let all = wait(client.peers(pair.device_a)).unwrap();
            assert_eq!(all.iter().map(|peer| peer.id).collect::<Vec<_>>(), [PEER]);
            let found = wait(client.key(pair.device_a, PEER, Slot::Primary)).unwrap();
            assert_eq!((found.key_id, found.cipher), (0, cipher.0));
        }
    }
}

#[test]
fn keys_are_swapped_without_loss() {
    let cipher = CIPHERS[2];
    let pair = Pair::new(Outer::Udp4, cipher);
    let ends = [(&pair.a, pair.device_a), (&pair.b, pair.device_b)];
    let of = |slot| ends.map(|(host, device)| wait(host.client.key(device, PEER, slot)));
    for error in of(Slot::Secondary).map(Result::unwrap_err) {
        assert_eq!((error.errno(), error.refusal()), (Some(2), Some(Refusal::Absent)), "{error}");
    }
    std::thread::scope(|scope| {
        let line = "ping -c 40 -i 0.1 -W 20 10.8.0.2";
        let pinging = scope.spawn(|| pair.a.space.run(line));
        for (host, device) in ends {
            let next = key(PEER, Slot::Secondary, 1, cipher, host.number == 2);
            wait(host.client.new_key(device, &next)).unwrap();
        }
        for (host, device) in ends {
            std::thread::sleep(Duration::from_millis(500));
            wait(host.client.swap_keys(device, PEER)).unwrap();
        }
        let told = pinging.join().unwrap();
        assert!(told.contains(" 40 received"), "{told}");
    });
    assert!(of(Slot::Primary).into_iter().all(|key| key.unwrap().key_id == 1));
    assert!(of(Slot::Secondary).into_iter().all(|key| key.unwrap().key_id == 0));
    for (host, device) in ends {
        wait(host.client.delete_key(device, PEER, Slot::Secondary)).unwrap();
    }
    assert!(of(Slot::Secondary).into_iter().all(|key| key.is_err()));
    pair.a.pings(2);
    // Without a key nothing passes.
    wait(pair.b.client.delete_key(pair.device_b, PEER, Slot::Primary)).unwrap();
    assert!(!pair.a.space.succeeds("ping -c 3 -i 0.1 -W 2 10.8.0.2"));
    let error = wait(pair.b.client.swap_keys(pair.device_b, PEER + 1)).unwrap_err();
    assert_eq!(error.refusal(), Some(Refusal::Absent), "{error}");
}

#[test]
fn a_change_is_read_back_and_pings_keep_a_peer() {
    let pair = Pair::new(Outer::Udp4, CIPHERS[3]);
    let mut watch = pair.a.watch();
    let with = |keepalive: Option<(u32, u32)>| PeerAttributes {
        id: Some(PEER),
        keepalive_interval_s: keepalive.map(|it| it.0),
        keepalive_timeout_s: keepalive.map(|it| it.1),
        ..PeerAttributes::default()
    };
    wait(pair.a.client.set_peer(pair.device_a, &with(Some((1, 12))))).unwrap();
    wait(pair.b.client.set_peer(pair.device_b, &with(Some((1, 40))))).unwrap();
    let state = || wait(pair.a.client.peer(pair.device_a, PEER)).unwrap();
    assert_eq!(state().keepalive, Keepalive { interval_s: 1, timeout_s: 12 });
    std::thread::sleep(Duration::from_secs(14));
    assert!(state().link.rx_packets > 3, "the other's pings");
    // Silence at the other end.
    let begun = Instant::now();
    wait(pair.b.client.set_peer(pair.device_b, &with(Some((0, 0))))).unwrap();
    let expired = Notification::PeerDeleted {
        peer_id: PEER,
        reason: weft_openvpn::device::DeletionReason::Expired,
    };
    assert_eq!(told(&mut watch, pair.device_a), expired);
    println!("expired after {:?}", begun.elapsed());
    let error = wait(pair.a.client.peer(pair.device_a, PEER)).unwrap_err();
    assert_eq!(error.errno(), Some(2), "{error}");
    assert_eq!(wait(pair.a.client.peers(pair.device_a)).unwrap(), []);
}

#[test]
fn a_float_is_told_and_followed() {
    for outer in [Outer::Udp4, Outer::Udp6] {
        let pair = Pair::new(outer, CIPHERS[2]);
        let mut watch = pair.a.watch();
        pair.a.pings(2);
        let mut moved = peer(PEER, Some(address(1, outer)));
        let mut remote = address(22, outer);
        remote.set_port(PORT);
        if outer == Outer::Udp4 {
            pair.b.space.run("ip address add 192.0.2.22/24 dev eth0");
            moved.local_ipv4 = Some(Ipv4Addr::new(192, 0, 2, 22));
        } else {
            pair.b.space.run("ip address add 2001:db8::22/64 dev eth0 nodad");
            moved.local_ipv6 = Some("2001:db8::22".parse().unwrap());
        }
        wait(pair.b.client.set_peer(pair.device_b, &moved)).unwrap();
        pair.b.space.run("ping -c 1 -W 20 10.8.0.1");
        let float = Notification::PeerFloat { peer_id: PEER, remote };
        assert_eq!(told(&mut watch, pair.device_a), float);
        let state = wait(pair.a.client.peer(pair.device_a, PEER)).unwrap();
        assert_eq!(state.remote, Some(remote));
        pair.a.pings(2);
    }
}
