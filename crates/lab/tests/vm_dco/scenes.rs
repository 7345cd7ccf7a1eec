//! Scenes for both devices, each with the other kind as its peer: both must report the same.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::time::Duration;

use weft_openvpn::device::{DeletionReason, Mode, Notification, PeerAttributes, Slot};

use crate::lab::{CIPHERS, Kind, Outer, Two};
use crate::load::under_load;

const AES_256: crate::lab::Cipher = CIPHERS[2];
/// How often keys are swapped under load.
const SWAPS: u32 = 10;
/// How long datagrams flow between one end's swap and the other's.
const SWAP_PAUSE: Duration = Duration::from_millis(200);

/// The device's setting, and that of all devices, which the system asks too.
const SEND_REDIRECTS: [&str; 2] =
    ["/proc/sys/net/ipv4/conf/dco0/send_redirects", "/proc/sys/net/ipv4/conf/all/send_redirects"];

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
    keys_are_swapped_over(Outer::Udp4);
}

#[test]
fn keys_are_swapped_under_traffic_over_tcp_without_loss() {
    keys_are_swapped_over(Outer::Tcp4);
}

fn keys_are_swapped_over(outer: Outer) {
    both([Mode::P2p, Mode::Mp], outer, |two| {
        let (a, b) = (&two.a, &two.b);
        let ends = [(a, b), (b, a)];
        // The hosts find each other on the wire before anything is counted.
        a.pings(b);
        under_load(a, b, |load| {
            for number in 1..=SWAPS {
                for (here, there) in ends {
                    here.new_key(there, Slot::Secondary, number, AES_256);
                }
                for (here, there) in ends {
                    load.pass();
                    here.swap_keys(there);
                    std::thread::sleep(SWAP_PAUSE);
                }
                // The next key replaces one that no packet under way can still need.
                load.pass();
            }
        });
        assert_eq!([a.drops(), b.drops()], [Vec::new(), Vec::new()]);
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
        a.device.new_peer(&two.sockets[0], &attributes).unwrap();
        let replaced = a.told();
        assert_eq!(replaced, deleted(id, DeletionReason::Teardown));
        assert_eq!(a.delete_peer(b), Ok(()));
        let ended = a.told();
        assert_eq!(ended, deleted(id, DeletionReason::Userspace));
        let again = (a.delete_peer(b), a.peer(b), a.key(b, Slot::Primary));
        let refused = a.device.new_peer(&two.sockets[0], &PeerAttributes::default());
        (replaced, ended, again, refused)
    });
}

#[test]
fn the_carrier_goes_with_the_only_peer_and_stays_in_mode_mp() {
    for mode in [Mode::P2p, Mode::Mp] {
        both([mode; 2], Outer::Udp4, |two| {
            let (a, b) = (&two.a, &two.b);
            let with_peer = a.has_carrier();
            assert_eq!(a.delete_peer(b), Ok(()));
            let without = a.has_carrier();
            a.meet(b, &two.sockets[0], Outer::Udp4);
            let again = a.has_carrier();
            assert_eq!([with_peer, without, again], [true, mode == Mode::Mp, true]);
            let redirects = SEND_REDIRECTS.map(|path| {
                a.netns.exec(&["cat", path]).unwrap().success().unwrap().stdout.trim().to_owned()
            });
            assert_eq!(redirects, if mode == Mode::Mp { ["0"; 2] } else { ["1"; 2] });
            (with_peer, without, again, redirects)
        });
    }
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
fn over_tcp_pings_keep_both_ends_and_silence_ends_both() {
    let kinds = [[Kind::Kernel, Kind::Userspace], [Kind::Userspace, Kind::Kernel]];
    for (kinds, outer) in kinds.into_iter().zip([Outer::Tcp4, Outer::Tcp6]) {
        let mut two = Two::new(kinds, [Mode::P2p; 2]);
        two.connect(outer, AES_256);
        let ends = [(&two.a, &two.b), (&two.b, &two.a)];
        for (here, there) in ends {
            here.keepalive(there, 1, 5);
        }
        std::thread::sleep(Duration::from_secs(7));
        for (here, there) in ends {
            let state = here.peer(there).expect("the other's pings keep it");
            assert!(state.link.rx_packets > state.vpn.rx_packets, "{outer:?}: {state:?}");
        }
        for (here, there) in ends {
            here.keepalive(there, 3_600, 2);
        }
        let came = ends.map(|(here, there)| {
            let ended = deleted(here.id_of(there), DeletionReason::Expired);
            (here.told() == ended, here.peer(there), here.key(there, Slot::Primary))
        });
        println!("{kinds:?}, {outer:?}: {came:?}");
        assert!(came.iter().all(|(has_expired, ..)| *has_expired), "{kinds:?}");
        assert_eq!(came[0], came[1], "{kinds:?}");
    }
}

#[test]
fn a_peer_that_floats_is_told_alike_and_followed() {
    for outer in [Outer::Udp4, Outer::Udp6] {
        both([Mode::Mp, Mode::P2p], outer, |two| {
            let (a, b) = (&two.a, &two.b);
            a.pings(b);
            let new = b.moves(outer);
            let words = ["ping", "-c", "3", "-i", "0.2", "-W", "20", "10.8.0.1"];
            let told = b.netns.exec(&words).unwrap().stdout;
            assert!(told.contains(" 3 received"), "{told}");
            let float = a.told();
            assert_eq!(float, Notification::PeerFloat { peer_id: a.id_of(b), remote: new });
            assert_eq!(a.peer(b).unwrap().remote, Some(new));
            a.pings(b);
            float
        });
    }
}

#[test]
fn a_peer_sends_with_one_id_and_receives_with_another() {
    both([Mode::Mp, Mode::P2p], Outer::Udp4, |two| {
        let (a, b) = (&two.a, &two.b);
        let ids = || a.peer(b).map(|state| (state.id, state.tx_id));
        let (id, tx_id) = (a.id_of(b), b.id_of(a));
        assert_ne!(id, tx_id);
        assert_eq!(ids(), Ok((id, Some(tx_id))));
        a.pings(b);
        // Nothing that bears an id unknown to its receiver gets in.
        a.set_tx_id(b, tx_id + 1);
        a.pings_in_vain(b);
        let wrong = ids();
        // Incoming packets are still found by their id, from any address.
        let new = b.moves(Outer::Udp4);
        b.pings_in_vain(a);
        let float = a.told();
        assert_eq!(float, Notification::PeerFloat { peer_id: id, remote: new });
        a.set_tx_id(b, tx_id);
        a.pings(b);
        b.pings(a);
        (wrong, float, ids())
    });
}
