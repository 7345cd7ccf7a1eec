//! Scenes that both devices are put through, with the other kind as their peer: what each tells must be
//! the same.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::time::Duration;

use weft_openvpn::device::{DeletionReason, Mode, Notification, PeerAttributes, Slot};

use crate::lab::{CIPHERS, Kind, Outer, Two};

const AES_256: crate::lab::Cipher = CIPHERS[2];

/// Plays a scene with each kind of device in the first place, and compares what comes of it.
fn both<T: PartialEq + Debug>(modes: [Mode; 2], outer: Outer, scene: impl Fn(&mut Two) -> T) {
    let [kernels, userspaces] = [[Kind::Kernel, Kind::Userspace], [Kind::Userspace, Kind::Kernel]]
        .map(|kinds| {
            let mut two = Two::new(kinds, modes);
            two.connect(outer, AES_256);
            let came = scene(&mut two);
            println!("{:?}: {came:?}", kinds[0]);
            came
        });
    assert_eq!(kernels, userspaces, "the kernel's device first, then the one in userspace");
}

fn deleted(peer_id: u32, reason: DeletionReason) -> Notification {
    Notification::PeerDeleted { peer_id, reason }
}

#[test]
fn keys_are_swapped_under_traffic_without_loss() {
    both([Mode::P2p, Mode::Mp], Outer::Udp4, |two| {
        let (a, b) = (&two.a, &two.b);
        std::thread::scope(|scope| {
            let words = ["ping", "-c", "60", "-i", "0.05", "-W", "20", "10.8.0.2"];
            let pinging = scope.spawn(move || a.netns.exec(&words).unwrap().stdout);
            for key_id in 1..4 {
                a.new_key(b, Slot::Secondary, key_id, AES_256);
                b.new_key(a, Slot::Secondary, key_id, AES_256);
                std::thread::sleep(Duration::from_millis(300));
                a.swap_keys(b);
                std::thread::sleep(Duration::from_millis(300));
                b.swap_keys(a);
                std::thread::sleep(Duration::from_millis(300));
            }
            let told = pinging.join().unwrap();
            assert!(told.contains(" 60 received"), "{told}");
        });
        let keys = Slot::ALL.map(|slot| a.key(b, slot).map(|key| key.key_id));
        assert_eq!(a.delete_key(b, Slot::Secondary), Ok(()));
        let gone = (a.delete_key(b, Slot::Secondary), a.key(b, Slot::Secondary));
        (keys, gone)
    });
}

#[test]
fn a_peer_that_is_replaced_or_deleted_is_told_alike() {
    both([Mode::P2p, Mode::Mp], Outer::Udp4, |two| {
        let (a, b) = (&two.a, &two.b);
        let id = a.id_of(b);
        let SocketAddr::V4(remote) = b.address(Outer::Udp4) else { panic!("over IPv4") };
        let attributes = PeerAttributes {
            id: Some(id),
            remote_ipv4: Some(*remote.ip()),
            remote_port: Some(remote.port()),
            ..PeerAttributes::default()
        };
        a.new_peer(&two.sockets[0], &attributes).unwrap();
        let replaced = a.told();
        assert_eq!(replaced, deleted(id, DeletionReason::Teardown));
        assert_eq!(a.delete_peer(b), Ok(()));
        let ended = a.told();
        assert_eq!(ended, deleted(id, DeletionReason::Userspace));
        let again = (a.delete_peer(b), a.peer(b), a.key(b, Slot::Primary));
        let refused = a.new_peer(&two.sockets[0], &PeerAttributes::default());
        (replaced, ended, again, refused)
    });
}

#[test]
fn pings_keep_a_peer_and_silence_ends_it() {
    for modes in [[Mode::P2p, Mode::Mp], [Mode::Mp, Mode::P2p]] {
        both(modes, Outer::Udp6, |two| {
            let (a, b) = (&two.a, &two.b);
            a.keepalive(b, 1, 6);
            b.keepalive(a, 1, 120);
            std::thread::sleep(Duration::from_secs(10));
            let state = a.peer(b).expect("the other's pings keep it");
            assert!(state.link.rx_packets > state.vpn.rx_packets, "{state:?}");
            b.keepalive(a, 0, 0);
            let told = a.told();
            assert_eq!(told, deleted(a.id_of(b), DeletionReason::Expired));
            (told, a.peer(b))
        });
    }
}

#[test]
fn a_peer_that_floats_is_told_alike_and_followed() {
    both([Mode::Mp, Mode::P2p], Outer::Udp4, |two| {
        let (a, b) = (&two.a, &two.b);
        a.pings(b);
        let old = b.address(Outer::Udp4);
        let SocketAddr::V4(at) = old else { panic!("over IPv4") };
        let [x, y, z, _] = at.ip().octets();
        b.netns.ip(&format!("address flush dev eth0 to {}", at.ip())).unwrap();
        b.netns.ip(&format!("address add {x}.{y}.{z}.77/24 dev eth0")).unwrap();
        let words = ["ping", "-c", "3", "-i", "0.2", "-W", "20", "10.8.0.1"];
        let told = b.netns.exec(&words).unwrap().stdout;
        assert!(told.contains(" 3 received"), "{told}");
        let new: SocketAddr = format!("{x}.{y}.{z}.77:{}", old.port()).parse().unwrap();
        let float = a.told();
        assert_eq!(float, Notification::PeerFloat { peer_id: a.id_of(b), remote: new });
        assert_eq!(a.peer(b).unwrap().remote, Some(new));
        a.pings(b);
        float
    });
}
