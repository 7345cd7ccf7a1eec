//! Peers that move and end, and commands that are refused.

use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use weft_crypto::DataCipher;
use weft_engine::DropReason;
use weft_engine::dco::Event;
use weft_openvpn::device::{
    CipherAlgorithm, DeletionReason, DeviceError, EpochAttributes, KeyBlock, Mode, Notification,
    PeerAttributes, Side, Slot,
};

use super::host::{
    AES_256, arrives, check_traffic, connect_tcp, connect_udp, datagrams, does_not_arrive,
    strangers,
};
use crate::common::{PATIENCE, ip};

#[test]
fn a_peer_that_floats_is_followed_and_told() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    // Bound to no address, so that the system chooses the only one.
    let (here, there) =
        (a.socket(false), b.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap()));
    let port = there.local_addr().unwrap().port();
    let old = SocketAddr::new(b.outer(false), port);
    let remote = here.local_addr().unwrap();
    a.meet(&b, here.into(), Some(old), AES_256);
    b.meet(&a, there.into(), Some(remote), AES_256);
    let pair = datagrams(&b, &a);
    arrives(&pair, b"before");
    assert_eq!(a.device.peer(2).unwrap().remote, Some(old));
    b.run(|| {
        ip("addr del 192.168.77.2/24 dev eth0");
        ip("addr add 192.168.77.3/24 dev eth0");
    });
    let new = SocketAddr::new("192.168.77.3".parse().unwrap(), port);
    arrives(&pair, b"from elsewhere");
    let told = a.events.wait(|event| match event {
        Event::Notification(Notification::PeerFloat { peer_id: 2, remote }) => Some(*remote),
        _ => None,
    });
    assert_eq!(told, new);
    assert_eq!(a.device.peer(2).unwrap().remote, Some(new));
    let back = (pair.1, pair.0);
    arrives(&back, b"and back");
}

#[test]
fn a_peer_gets_another_address_inside_and_the_one_before_is_free() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let (here, _there) = connect_udp(&a, &b, false, AES_256);
    let before = datagrams(&a, &b);
    arrives(&before, b"to the first address");
    b.run(|| ip("addr add 10.8.0.22/24 dev ovpn0"));
    let other = Ipv4Addr::new(10, 8, 0, 22);
    let changed =
        PeerAttributes { id: Some(2), vpn_ipv4: Some(other), ..PeerAttributes::default() };
    a.device.set_peer(&changed).unwrap();
    let here_too = a.run(|| UdpSocket::bind((a.inner_v4(), 0)).unwrap());
    let there_too = b.run(|| UdpSocket::bind((other, 0)).unwrap());
    for (from, to) in [(&here_too, &there_too), (&there_too, &here_too)] {
        from.connect(to.local_addr().unwrap()).unwrap();
        to.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let pair = (here_too, there_too);
    arrives(&pair, b"to the other address");
    arrives(&(pair.1, pair.0), b"and from it");
    does_not_arrive(&before, b"nobody has it");
    a.wait_dropped(DropReason::NoEndpoint, 1);
    does_not_arrive(&(before.1, before.0), b"it is not the peer's");
    a.wait_dropped(DropReason::ForeignSource, 1);
    let heir = PeerAttributes {
        id: Some(9),
        vpn_ipv4: Some(Ipv4Addr::new(10, 8, 0, 2)),
        remote_ipv4: Some(Ipv4Addr::new(192, 168, 77, 9)),
        remote_port: Some(1194),
        ..PeerAttributes::default()
    };
    a.device.new_peer(here.try_clone().unwrap().into(), &heir).unwrap();
}

#[test]
fn the_carrier_goes_with_the_only_peer_and_stays_in_mode_mp() {
    for mode in [Mode::P2p, Mode::Mp] {
        let (a, b) = strangers((mode, mode));
        let carrier = || {
            let shown = a.run(|| Command::new("ip").args(["link", "show", "ovpn0"]).output());
            !String::from_utf8(shown.unwrap().stdout).unwrap().contains("NO-CARRIER")
        };
        let always = mode == Mode::Mp;
        let meet = || {
            a.meet(&b, a.socket(false).into(), Some((b.outer(false), 9).into()), AES_256);
        };
        assert_eq!(carrier(), always);
        meet();
        assert!(carrier());
        if mode == Mode::P2p {
            // One that takes the place of another.
            meet();
            assert!(carrier());
        }
        a.device.delete_peer(2).unwrap();
        assert_eq!(carrier(), always);
    }
}

#[test]
fn a_peer_that_floats_is_answered_from_the_address_that_it_sends_to() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let bind = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let (here, there) = (a.run(bind), b.run(bind));
    let [at_a, at_b] = [&here, &there].map(|socket| socket.local_addr().unwrap().port());
    a.meet(&b, here.into(), Some((b.outer(false), at_b).into()), AES_256);
    b.meet(&a, there.into(), Some((a.outer(false), at_a).into()), AES_256);
    let pair = datagrams(&b, &a);
    arrives(&pair, b"before");
    a.run(|| ip("addr add 192.168.77.9/24 dev eth0"));
    b.run(|| {
        ip("addr del 192.168.77.2/24 dev eth0");
        ip("addr add 192.168.77.3/24 dev eth0");
    });
    let other = SocketAddr::from((Ipv4Addr::new(192, 168, 77, 9), at_a));
    let moved = PeerAttributes {
        id: Some(1),
        remote_ipv4: Some(Ipv4Addr::new(192, 168, 77, 9)),
        remote_port: Some(at_a),
        ..PeerAttributes::default()
    };
    b.device.set_peer(&moved).unwrap();
    arrives(&pair, b"from elsewhere to elsewhere");
    arrives(&(pair.1, pair.0), b"and back");
    assert_eq!(a.device.peer(2).unwrap().local, Some(other));
    assert_eq!(b.device.peer(1).unwrap().remote, Some(other), "or it would float in turn");
}

/// The address that a packet came to is learned without a float, and given up with the address.
#[test]
fn a_peer_is_answered_from_the_address_that_it_sends_to() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let bind = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let (here, there) = (a.run(bind), b.run(bind));
    let [at_a, at_b] = [&here, &there].map(|socket| socket.local_addr().unwrap().port());
    a.run(|| ip("addr add 192.168.77.9/24 dev eth0"));
    let second = SocketAddr::from((Ipv4Addr::new(192, 168, 77, 9), at_a));
    let first = SocketAddr::from((a.outer(false), at_a));
    a.meet(&b, here.into(), Some((b.outer(false), at_b).into()), AES_256);
    b.meet(&a, there.into(), Some(second), AES_256);
    let pair = datagrams(&b, &a);
    arrives(&pair, b"to the second address");
    let deadline = Instant::now() + PATIENCE;
    while a.device.peer(2).unwrap().local != Some(second) {
        assert!(Instant::now() < deadline, "{:?}", a.device.peer(2));
        thread::sleep(Duration::from_millis(5));
    }
    let back = (pair.1, pair.0);
    arrives(&back, b"and back from there");
    assert_eq!(b.device.peer(1).unwrap().remote, Some(second), "or it would have floated");
    assert!(a.events.all().is_empty() && b.events.all().is_empty(), "nobody has moved");
    // An address that the host has lost is not used as a source.
    a.run(|| ip("addr del 192.168.77.9/24 dev eth0"));
    arrives(&back, b"and back from the first");
    let told = b.events.wait(|event| match event {
        Event::Notification(Notification::PeerFloat { peer_id: 1, remote }) => Some(*remote),
        _ => None,
    });
    assert_eq!(told, first);
}

#[test]
fn keepalives_hold_a_peer_and_their_absence_ends_it() {
    for modes in [(Mode::P2p, Mode::P2p), (Mode::Mp, Mode::P2p)] {
        let (a, b) = strangers(modes);
        let _sockets = connect_udp(&a, &b, false, AES_256);
        a.keepalive(&b, 1, 10);
        b.keepalive(&a, 1, 60);
        thread::sleep(Duration::from_secs(5));
        assert!(a.device.peer(2).is_ok(), "pings kept it");
        let pinged = a.device.peer(2).unwrap();
        assert!(pinged.link.rx_packets > pinged.vpn.rx_packets, "{pinged:?}");
        b.keepalive(&a, 0, 0);
        a.keepalive(&b, 1, 3);
        assert_eq!(a.events.deleted(2), DeletionReason::Expired);
        assert_eq!(a.device.peer(2), Err(DeviceError::NoPeer(2)));
    }
}

#[test]
fn peers_end_with_their_reasons() {
    let (a, b) = strangers((Mode::P2p, Mode::Mp));
    let (here, there) = connect_udp(&a, &b, false, AES_256);
    let remote = Some(there.local_addr().unwrap());
    // A second peer of a p2p device replaces the first.
    a.meet(&b, here.try_clone().unwrap().into(), remote, AES_256);
    assert_eq!(a.events.deleted(2), DeletionReason::Teardown);
    assert_eq!(a.peers().len(), 1);
    a.device.delete_peer(2).unwrap();
    assert_eq!(a.events.deleted(2), DeletionReason::Userspace);
    assert_eq!(a.device.delete_peer(2), Err(DeviceError::NoPeer(2)));
    let key = a.key(&b, Slot::Primary, 0, AES_256);
    assert_eq!(a.device.new_key(&key), Err(DeviceError::NoPeer(2)));
    let events = Arc::clone(&b.events);
    drop(b);
    assert_eq!(events.deleted(1), DeletionReason::Teardown);
}

#[test]
fn a_device_that_somebody_removes_has_no_peers_and_refuses_all() {
    let (a, b) = strangers((Mode::P2p, Mode::Mp));
    let (here, there) = connect_udp(&a, &b, false, AES_256);
    a.run(|| ip("link del ovpn0"));
    assert_eq!(a.events.deleted(2), DeletionReason::Teardown);
    let gone = Err(DeviceError::NoDevice);
    let device = &a.device;
    // Other faults of a command are not looked at.
    let key = a.key(&b, Slot::Primary, 9, (CipherAlgorithm::AesGcm, 5));
    let block = KeyBlock::new([7; 256]);
    let (encrypt, decrypt) = block.epoch_secrets(Side::Client);
    let (peer_id, slot, key_id, cipher) = (2, Slot::Primary, 99, DataCipher::Aes256Gcm);
    let epochs = EpochAttributes { peer_id, slot, key_id, cipher, encrypt, decrypt };
    let none = PeerAttributes::default();
    let answers = [
        device.new_peer(here.into(), &none),
        device.set_peer(&none),
        device.peer(2).map(|_| ()),
        device.peers().map(|_| ()),
        device.delete_peer(2),
        device.new_key(&key),
        device.new_epochs(epochs),
        device.key(2, slot).map(|_| ()),
        device.swap_keys(2),
        device.delete_key(2, slot),
        device.send_packet(2, &[]),
    ];
    assert!(answers.iter().all(|answer| *answer == gone), "{answers:?}");
    drop(there);
}

#[test]
fn a_connection_that_closes_or_carries_nonsense_ends_its_peer() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    connect_tcp(&a, &b, false, AES_256);
    check_traffic(&a, &b, 1 << 16);
    b.device.delete_peer(1).unwrap();
    assert_eq!(a.events.deleted(2), DeletionReason::TransportDisconnect);
    let listener = a.run(|| TcpListener::bind((a.outer(false), 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let mut client = b.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    a.meet(&b, listener.accept().unwrap().0.into(), None, AES_256);
    client.write_all(&[0, 0]).unwrap();
    assert_eq!(a.events.deleted(2), DeletionReason::TransportError);
    let mut client = b.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    a.meet(&b, listener.accept().unwrap().0.into(), None, AES_256);
    // Of the control channel, and then data of the first version, which has no peer ids.
    client.write_all(&[0, 5, 0x20, 1, 2, 3, 4]).unwrap();
    assert_eq!(a.events.packet().0, [0x20, 1, 2, 3, 4]);
    client.write_all(&[0, 5, 0x30, 0, 0, 0, 1]).unwrap();
    assert_eq!(a.events.deleted(2), DeletionReason::TransportError);
}

#[test]
fn impossible_requests_are_refused_with_the_kernels_errno() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let (here, there) = connect_udp(&a, &b, false, AES_256);
    let whole = PeerAttributes {
        id: Some(9),
        remote_ipv4: Some(Ipv4Addr::new(192, 168, 77, 9)),
        remote_port: Some(1194),
        vpn_ipv4: Some(Ipv4Addr::new(10, 8, 0, 9)),
        ..PeerAttributes::default()
    };
    let refused = |socket: OwnedFd, change: &dyn Fn(&mut PeerAttributes)| {
        let mut attributes = whole.clone();
        change(&mut attributes);
        a.device.new_peer(socket, &attributes).unwrap_err().errno()
    };
    let udp = || OwnedFd::from(here.try_clone().unwrap());
    assert_eq!(refused(udp(), &|peer| peer.id = Some(2)), 17);
    assert_eq!(refused(udp(), &|peer| peer.vpn_ipv4 = Some(Ipv4Addr::new(10, 8, 0, 2))), 98);
    assert_eq!(refused(udp(), &|peer| peer.vpn_ipv4 = None), 22);
    assert_eq!(refused(udp(), &|peer| peer.local_ipv6 = Some(Ipv6Addr::LOCALHOST)), 22);
    let ipv6 = |peer: &mut PeerAttributes| {
        (peer.remote_ipv4, peer.remote_ipv6) = (None, Some(Ipv6Addr::LOCALHOST));
    };
    assert_eq!(refused(udp(), &ipv6), 22, "an IPv4 socket");
    let listener = a.run(|| TcpListener::bind((a.outer(false), 0)).unwrap());
    assert_eq!(refused(listener.into(), &|_| ()), 88);
    let unknown = PeerAttributes { id: Some(9), ..PeerAttributes::default() };
    assert_eq!(a.device.set_peer(&unknown).unwrap_err().errno(), 2);
    // The peer is looked up before the key's length is checked.
    let mut short = a.key(&b, Slot::Primary, 0, (CipherAlgorithm::AesGcm, 5));
    assert_eq!(a.device.new_key(&short), Err(DeviceError::KeyLength { bytes: 5 }));
    short.peer_id = Some(9);
    assert_eq!(a.device.new_key(&short), Err(DeviceError::NoPeer(9)));
    assert_eq!(a.device.key(2, Slot::Secondary).unwrap_err().errno(), 2);
    assert_eq!(a.device.delete_key(9, Slot::Secondary).unwrap_err().errno(), 2);
    // As in the kernel, deleting a missing key succeeds.
    assert_eq!(a.device.delete_key(2, Slot::Secondary), Ok(()));
    assert_eq!(a.device.send_packet(2, &[0; 65_536]).unwrap_err().errno(), 34);
    let elsewhere = PeerAttributes { vpn_ipv4: None, ..whole.clone() };
    let taken = b.device.new_peer(udp(), &elsewhere);
    assert_eq!(taken, Err(DeviceError::SocketTaken), "two devices would read from it");
    // None of it left anything behind.
    assert_eq!(a.peers().len(), 1);
    arrives(&datagrams(&a, &b), b"as before");
    // A socket that a device has let go of is free for another.
    a.device.delete_peer(2).unwrap();
    b.device.new_peer(udp(), &elsewhere).unwrap();
    drop(there);
}
