//! Packets that devices carry, and packets that they do not.

use std::io::Read;
use std::net::UdpSocket;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use weft_crypto::DataCipher;
use weft_engine::DropReason;
use weft_io::tun;
use weft_openvpn::device::{
    EpochAttributes, KeyAttributes, KeyBlock, Mode, PeerAttributes, Side, Slot,
};

use super::host::{
    AES_256, CIPHERS, Host, arrives, check_traffic, connect_tcp, connect_udp, datagrams, joined,
    strangers,
};
use crate::common::{PATIENCE, flows_between, ip, pattern};

#[test]
fn every_mode_cipher_transport_and_family_carries_packets() {
    let modes = [(Mode::P2p, Mode::P2p), (Mode::Mp, Mode::P2p), (Mode::Mp, Mode::Mp)];
    for (nth, modes) in modes.into_iter().enumerate() {
        for (turn, cipher) in CIPHERS.into_iter().enumerate() {
            let (a, b) = strangers(modes);
            let ipv6 = (nth + turn) % 2 == 1;
            let sockets = (turn % 4 < 2).then(|| connect_udp(&a, &b, ipv6, cipher));
            if sockets.is_none() {
                connect_tcp(&a, &b, ipv6, cipher);
            }
            check_traffic(&a, &b, 1 << 20);
            for host in [&a, &b] {
                let forged = host.device.dropped(DropReason::Forged);
                let of = host.peers();
                assert!(of[0].vpn.rx_bytes > 1 << 20 && of[0].vpn.tx_bytes > 1 << 20, "{of:?}");
                assert!(of[0].link.tx_bytes > of[0].vpn.tx_bytes, "{of:?}");
                assert_eq!(forged, 0, "{modes:?} {cipher:?}: {:?}", host.drops());
            }
        }
    }
}

/// The largest id that packets can bear, and the id of packets that bear none: then a peer is found by its
/// packets' source.
#[test]
fn peers_of_the_largest_ids_carry_packets() {
    for id in [0xff_fffe, 0xff_ffff] {
        for modes in [(Mode::Mp, Mode::P2p), (Mode::Mp, Mode::Mp)] {
            let (a, b) = strangers(modes);
            let (here, there) = (a.socket(false), b.socket(false));
            for (host, of, own, other) in [(&a, &b, &here, &there), (&b, &a, &there, &here)] {
                let remote = other.local_addr().unwrap();
                let peer = PeerAttributes {
                    id: Some(id),
                    tx_id: Some(id),
                    remote_ipv4: Some(Ipv4Addr::new(192, 168, 77, of.number)),
                    remote_port: Some(remote.port()),
                    vpn_ipv4: Some(Ipv4Addr::new(10, 8, 0, of.number)),
                    vpn_ipv6: Some(Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, of.number.into())),
                    ..PeerAttributes::default()
                };
                let peer = match host.device.mode() {
                    Mode::Mp => peer,
                    Mode::P2p => PeerAttributes { vpn_ipv4: None, vpn_ipv6: None, ..peer },
                };
                let own = own.try_clone().unwrap().into();
                host.run(|| host.device.new_peer(own, &peer)).unwrap();
                let key = host.key(of, Slot::Primary, 0, AES_256);
                let key = KeyAttributes { peer_id: Some(id), ..key };
                host.device.new_key(&key).unwrap();
            }
            check_traffic(&a, &b, 1 << 18);
            assert_eq!([a.drops(), b.drops()], [[], []], "{id:x}");
        }
    }
}

#[test]
fn epochs_take_the_place_of_keys_over_every_transport_and_cipher() {
    let block = KeyBlock::new(std::array::from_fn(|at| at as u8 ^ 0x5a));
    for (round, cipher) in (0..).zip(DataCipher::ALL) {
        let (a, b) = strangers((Mode::Mp, Mode::P2p));
        let sockets = (round % 2 == 0).then(|| connect_udp(&a, &b, round == 2, AES_256));
        if sockets.is_none() {
            connect_tcp(&a, &b, round == 3, AES_256);
        }
        for (host, other, side) in [(&a, &b, Side::Client), (&b, &a, Side::Server)] {
            let (encrypt, decrypt) = block.epoch_secrets(side);
            let (peer_id, slot, key_id) = (other.number.into(), Slot::Primary, 3);
            let new = EpochAttributes { peer_id, slot, key_id, cipher, encrypt, decrypt };
            host.device.new_epochs(new).unwrap();
            let state = host.device.key(peer_id, slot).unwrap();
            assert_eq!((state.key_id, state.epoch), (3, Some(1)));
        }
        check_traffic(&a, &b, 400_000);
        if round < 2 {
            // Keepalives are sealed as everything else.
            let before = a.device.peer(2).unwrap().link.rx_packets;
            a.keepalive(&b, 1, 10);
            b.keepalive(&a, 1, 10);
            thread::sleep(Duration::from_secs(4));
            assert!(a.device.peer(2).unwrap().link.rx_packets > before, "no keepalive");
        }
        let left = [&a, &b].map(|host| (host.peers().len(), host.drops()));
        assert_eq!(left, [(1, vec![]), (1, vec![])], "{cipher}");
    }
}

#[test]
fn a_key_swap_under_load_loses_no_packet() {
    let (a, b) = strangers((Mode::P2p, Mode::P2p));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    let done = AtomicBool::new(false);
    let pair = datagrams(&a, &b);
    let back = (pair.1.try_clone().unwrap(), pair.0.try_clone().unwrap());
    let before = [a.drops(), b.drops()];
    let bytes = pattern(9, 8 << 20);
    thread::scope(|scope| {
        scope.spawn(|| {
            flows_between(&a.namespace, &b.namespace, b.inner_v4(), 2, &bytes);
            done.store(true, Ordering::Relaxed);
        });
        let mut swaps = 0_u32;
        while !done.load(Ordering::Relaxed) || swaps < 20 {
            // Both can receive with the new key before either sends with it.
            let next = (swaps + 1) % 8;
            for (host, of) in [(&a, &b), (&b, &a)] {
                host.device.new_key(&host.key(of, Slot::Secondary, next, AES_256)).unwrap();
            }
            for (host, of) in [(&a, &b), (&b, &a)] {
                host.device.swap_keys(of.number.into()).unwrap();
            }
            // Packets that the last key sealed have arrived by then: its slot is the next one's.
            arrives(&pair, &swaps.to_be_bytes());
            arrives(&back, &swaps.to_be_bytes());
            assert_eq!(a.device.key(2, Slot::Primary).unwrap().key_id, next);
            swaps += 1;
        }
    });
    assert_eq!([a.drops(), b.drops()], before);
}

#[test]
fn the_address_to_send_from_is_the_one_that_was_asked_for() {
    let (a, b) = strangers((Mode::P2p, Mode::P2p));
    a.run(|| ip("addr add 192.168.77.9/24 dev eth0"));
    let here = a.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap());
    let there = b.socket(false);
    let at = SocketAddr::new("192.168.77.9".parse().unwrap(), here.local_addr().unwrap().port());
    let remote = there.local_addr().unwrap();
    a.meet(&b, here.into(), Some(remote), AES_256);
    b.meet(&a, there.into(), Some(at), AES_256);
    let local = PeerAttributes {
        id: Some(2),
        remote_ipv4: Some(Ipv4Addr::new(192, 168, 77, 2)),
        remote_port: Some(remote.port()),
        local_ipv4: Some(Ipv4Addr::new(192, 168, 77, 9)),
        ..PeerAttributes::default()
    };
    a.device.set_peer(&local).unwrap();
    check_traffic(&a, &b, 1 << 20);
    // From another address the peer would have floated there.
    assert_eq!(b.device.peer(1).unwrap().remote, Some(at));
    assert_eq!(a.device.peer(2).unwrap().local, Some(at));
}

#[test]
fn control_packets_go_through_untouched_beside_the_data() {
    let (a, b) = strangers((Mode::P2p, Mode::Mp));
    let _sockets = connect_udp(&a, &b, true, AES_256);
    // With a known opcode, and with an opcode that has no meaning yet.
    for first in [0x38, 0xff] {
        let packet = [&[first][..], &[7; 60]].concat();
        a.device.send_packet(2, &packet).unwrap();
        assert_eq!(b.events.packet(), (packet, a.device.peer(2).unwrap().local.unwrap()));
    }
    check_traffic(&a, &b, 1 << 16);
    let (a, b) = strangers((Mode::P2p, Mode::Mp));
    connect_tcp(&a, &b, true, AES_256);
    b.device.send_packet(1, &[0x20; 1_000]).unwrap();
    assert_eq!(a.events.packet().0, [0x20; 1_000]);
}

#[test]
fn packets_of_nobody_are_dropped_and_counted() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let (_here, there) = connect_udp(&a, &b, false, AES_256);
    let target = a.device.peer(2).unwrap().local.unwrap();
    let count = |reason, wanted| a.wait_dropped(reason, wanted);
    let send = |bytes: &[u8]| there.send_to(bytes, target).map(|_| ()).unwrap();
    let forged = [&[0x48, 0, 0, 2, 0, 0, 0, 9][..], &[0; 60]].concat();
    send(&forged);
    count(DropReason::Forged, 1);
    let of_another = [&[0x48, 0, 0, 77, 0, 0, 0, 9][..], &[0; 60]].concat();
    send(&of_another);
    count(DropReason::UnknownSpi, 1);
    let unknown_key = [&[0x4f, 0, 0, 2, 0, 0, 0, 9][..], &[0; 60]].concat();
    send(&unknown_key);
    count(DropReason::UnknownSpi, 2);
    for malformed in [&[0x48, 0, 0, 2, 0, 0, 0, 9][..], &[0x30; 50], &[0xff; 3]] {
        send(malformed);
    }
    count(DropReason::Malformed, 3);
    let pair = datagrams(&b, &a);
    arrives(&pair, b"all the same");
}

/// Addresses that mean a host by the interface alone.
#[test]
fn peers_with_addresses_of_one_link_stay_where_they_are() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let address = |number: u8| Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x77, number.into());
    let bind = |host: &Host| {
        host.run(|| {
            let address = address(host.number);
            ip(&format!("-6 addr add {address}/64 dev eth0 nodad"));
            let scope = tun::index("eth0").unwrap();
            let socket = UdpSocket::bind(SocketAddrV6::new(address, 0, 0, scope)).unwrap();
            (socket, scope)
        })
    };
    let ((here, scope_here), (there, scope_there)) = (bind(&a), bind(&b));
    let at = |host: &Host, socket: &UdpSocket, scope| {
        let port = socket.local_addr().unwrap().port();
        SocketAddr::from(SocketAddrV6::new(address(host.number), port, 0, scope))
    };
    let (remote_b, remote_a) = (at(&b, &there, scope_here), at(&a, &here, scope_there));
    a.meet(&b, here.into(), Some(remote_b), AES_256);
    b.meet(&a, there.into(), Some(remote_a), AES_256);
    check_traffic(&a, &b, 1 << 18);
    assert_eq!(a.device.peer(2).unwrap().remote, Some(remote_b));
    assert_eq!([a.events.all(), b.events.all()], [[], []], "nobody has moved");
    assert_eq!([a.drops(), b.drops()], [[], []]);
}

/// How often the thread with this name has waited.
fn waits_of(thread: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut dirs = tasks.map(|task| task.unwrap().path());
    let is_it = |text: String| text.trim() == thread;
    let dir = dirs.find(|dir| std::fs::read_to_string(dir.join("comm")).is_ok_and(is_it)).unwrap();
    let status = std::fs::read_to_string(dir.join("status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn a_connection_that_stalls_costs_nothing_and_goes_on_whole() {
    const LEN: usize = 1_200;
    const LAST: usize = 77;
    let (left, right) = joined();
    let a = Host::with_device(left, 1, Mode::P2p, ("stalls", 1_400));
    let b = Host::new(right, 2, Mode::P2p);
    let listener = a.run(|| TcpListener::bind((a.outer(false), 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let reader = b.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    a.meet(&b, listener.accept().unwrap().0.into(), None, AES_256);
    let from = a.run(|| UdpSocket::bind((a.inner_v4(), 0)).unwrap());
    // Until the buffers of both ends and the device's own queue are full.
    let deadline = Instant::now() + PATIENCE;
    while a.device.dropped(DropReason::SendFull) == 0 {
        assert!(Instant::now() < deadline, "{:?}", a.drops());
        from.send_to(&[7; LEN], (b.inner_v4(), 9)).unwrap();
    }
    thread::sleep(Duration::from_millis(200));
    let before = waits_of("dco-stalls");
    thread::sleep(Duration::from_secs(1));
    let waits = waits_of("dco-stalls") - before;
    assert!(waits < 50, "it woke up {waits} times in a second with nothing to do");
    reader.set_read_timeout(Some(PATIENCE)).unwrap();
    let frame_len = |mut reader: &TcpStream| {
        let mut length = [0; 2];
        reader.read_exact(&mut length).unwrap();
        let mut frame = vec![0; u16::from_be_bytes(length).into()];
        reader.read_exact(&mut frame).unwrap();
        assert_eq!(frame[0], 0x48, "data with the first key");
        frame.len()
    };
    let whole = frame_len(&reader);
    assert!(whole > LEN);
    for _ in 0..300 {
        assert_eq!(frame_len(&reader), whole);
    }
    let mut frames = 0;
    loop {
        // Until there is room for it; the rest is of the size that was sent before.
        from.send_to(&[7; LAST], (b.inner_v4(), 9)).unwrap();
        let len = frame_len(&reader);
        frames += 1;
        if len == whole - LEN + LAST {
            break;
        }
        assert_eq!(len, whole);
    }
    assert!(frames > 100, "{frames} frames waited");
}

/// It stays awake for answers, and sleeps once there are none.
#[test]
fn requests_and_answers_keep_a_device_awake_and_rest_does_not() {
    let (a, b) = strangers((Mode::P2p, Mode::P2p));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    check_traffic(&a, &b, 16 << 20);
    let requests = datagrams(&a, &b);
    let answers = datagrams(&b, &a);
    let (after_bulk, begun) = (a.device.awake(), Instant::now());
    // A host that is slow for a while only makes it take longer.
    while a.device.awake() == after_bulk {
        assert!(begun.elapsed() < PATIENCE, "{:?}", a.drops());
        arrives(&requests, b"request");
        arrives(&answers, b"answer");
    }
    let rest = || {
        let before = a.device.awake();
        thread::sleep(Duration::from_millis(400));
        a.device.awake() - before
    };
    assert!((0..10).any(|_| rest() < Duration::from_millis(5)), "it does not rest");
}
