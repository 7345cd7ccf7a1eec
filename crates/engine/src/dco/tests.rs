//! A device in a namespace, and its events.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::sync::mpsc;

use weft_crypto::ovpn::{OpenError, usage};
use weft_io::namespace::unshare_network;
use weft_openvpn::KeyId;
use weft_openvpn::data::{self, PeerNumber};
use weft_openvpn::device::{CipherAlgorithm, KeyDirection};

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// Attributes of a peer over UDP at this port of loopback.
fn peer(id: u32, port: u16) -> PeerAttributes {
    PeerAttributes {
        id: Some(id),
        remote_ipv4: Some(Ipv4Addr::LOCALHOST),
        remote_port: Some(port),
        ..PeerAttributes::default()
    }
}

fn key(id: u32) -> KeyAttributes {
    let direction = Some(KeyDirection { cipher_key: vec![7; 32], nonce_tail: [9; 8] });
    KeyAttributes {
        peer_id: Some(id),
        slot: Some(Slot::Primary),
        key_id: Some(5),
        cipher: Some(CipherAlgorithm::AesGcm),
        encrypt: direction.clone(),
        decrypt: direction,
    }
}

/// Runs `f` with a device of one peer in a fresh network namespace.
fn with_device(f: impl FnOnce(&Device, mpsc::Receiver<Event>) + Send + 'static) {
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let events = move |event| {
        let _ = tell.lock().unwrap().send(event);
    };
    with_device_of(Mode::P2p, events, |device| f(device, told));
}

/// Runs `f` with a device of this mode in a fresh network namespace.
fn with_device_of(
    mode: Mode,
    events: impl Fn(Event) + Send + Sync + 'static,
    f: impl FnOnce(&Device) + Send + 'static,
) {
    let thread = thread::spawn(move || {
        unshare_network().expect("this test needs root");
        let name = "ovpn0".to_owned();
        let (mtu, path_mtu) = (1_400, IPV6_MTU_MIN);
        let config = DeviceConfig { name, mode, mtu, path_mtu, offloads: false };
        let device = Device::open(&config, Arc::new(events)).unwrap();
        for line in [
            "link set lo up",
            "link set ovpn0 addrgenmode none",
            "link set ovpn0 mtu 1400 up",
            "address add 10.8.0.1/24 dev ovpn0",
        ] {
            assert!(Command::new("ip").args(line.split(' ')).status().unwrap().success());
        }
        f(&device);
    });
    thread.join().unwrap();
}

/// A packet with these bytes inside, as the peer with this id seals it.
fn sealed(device: &Device, id: u32, inside: &[u8]) -> Vec<u8> {
    let shared = device.common.read();
    let peer = shared.peers.get(shared.peers.index_of(id).unwrap()).unwrap();
    let sealing = peer.keys.sealing().unwrap().sealing();
    let mut packet = vec![0; sealing.overhead_len() + inside.len()];
    packet[sealing.front_len()..][..inside.len()].copy_from_slice(inside);
    let word = data::first_word(KeyId::new(5).unwrap(), PeerNumber::new(id));
    let mut sealer = sealing.reserve(1, word).unwrap();
    sealer.seal(&mut packet, inside.len()).unwrap();
    packet
}

/// A UDP datagram from 10.8.0.2 to this port of 10.8.0.1, without a checksum of its own.
fn datagram_inside(port: u16) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0, 10, 8, 0, 2, 10, 8, 0, 1];
    let words = packet.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend([[0, 9], port.to_be_bytes(), [0, 12], [0, 0], [1, 2], [3, 4]].concat());
    packet
}

/// The event that reports the key of peer 3 as used up.
const USED_UP: Event = Event::Notification(Notification::KeySwap { peer_id: 3, key_id: 5 });

/// The key of peer 3, as the device has it.
fn with_key(device: &Device, f: impl FnOnce(&Key)) {
    let shared = device.common.read();
    let of = shared.peers.get(shared.peers.index_of(3).unwrap()).unwrap();
    f(of.keys.sealing().unwrap());
}

/// Gives away all its packet ids but the last `left`.
fn leave_packet_ids(device: &Device, left: u64) {
    with_key(device, |key| {
        key.sealing().reserve(u64::from(u32::MAX) - left, [0; 4]).unwrap();
    });
}

#[test]
fn a_ping_without_a_packet_id_tells_that_the_key_is_used_up() {
    with_device(|device, told| {
        let keepalive = PeerAttributes {
            keepalive_interval_s: Some(1),
            keepalive_timeout_s: Some(3_600),
            ..peer(3, 9)
        };
        let here = UdpSocket::bind("127.0.0.1:0").unwrap();
        device.new_peer(here.into(), &keepalive).unwrap();
        device.new_key(&key(3)).unwrap();
        leave_packet_ids(device, 0);
        assert_eq!(told.recv_timeout(PATIENCE), Ok(USED_UP));
        assert_eq!(device.dropped(DropReason::SaExhausted), 1);
    });
}

#[test]
fn a_key_that_has_opened_all_it_may_is_told_and_stays() {
    with_device(|device, told| {
        let [here, there] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let to = here.local_addr().unwrap();
        device.new_peer(here.into(), &peer(3, there.local_addr().unwrap().port())).unwrap();
        device.new_key(&key(3)).unwrap();
        with_key(device, |key| key.count_opened(usage::AES_GCM_BLOCKS_MAX));
        let word = data::first_word(KeyId::new(5).unwrap(), PeerNumber::new(3));
        let begun = Instant::now();
        for number in 1..=2 {
            there.send_to(&[&word[..], &[0xff; 60]].concat(), to).unwrap();
            while device.dropped(DropReason::Forged) < number {
                assert!(begun.elapsed() < PATIENCE);
            }
        }
        assert_eq!(told.recv_timeout(PATIENCE), Ok(USED_UP));
        assert!(told.try_recv().is_err(), "it is told once");
        assert!(device.key(3, Slot::Primary).is_ok());
    });
}

#[test]
fn a_key_that_was_tried_with_too_many_forgeries_is_told_once() {
    with_device(|device, told| {
        let here = UdpSocket::bind("127.0.0.1:0").unwrap();
        device.new_peer(here.into(), &peer(3, 9)).unwrap();
        device.new_key(&key(3)).unwrap();
        let shared = device.common.read();
        let of = shared.peers.get(shared.peers.index_of(3).unwrap()).unwrap();
        let key = of.keys.sealing().unwrap();
        let refused = |error| receiver::refused(&device.common.telling, of, key, error);
        assert_eq!(refused(OpenError::Forged), DropReason::Forged);
        assert!(told.try_recv().is_err(), "one forgery is nothing to tell of");
        for _ in 0..2 {
            assert_eq!(refused(OpenError::TooManyFailures), DropReason::Forged);
        }
        assert_eq!(told.try_recv(), Ok(USED_UP));
        assert!(told.try_recv().is_err(), "it is told once");
    });
}

#[test]
fn a_key_that_has_sealed_all_it_may_is_told_and_leaves_its_slot() {
    with_device(|device, told| {
        let there = UdpSocket::bind("127.0.0.1:0").unwrap();
        there.set_read_timeout(Some(PATIENCE)).unwrap();
        let here = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = there.local_addr().unwrap().port();
        device.new_peer(here.into(), &peer(3, port)).unwrap();
        device.new_key(&key(3)).unwrap();
        leave_packet_ids(device, 1);
        let inside = UdpSocket::bind("10.8.0.1:0").unwrap();
        inside.send_to(b"the last", "10.8.0.2:9").unwrap();
        assert!(weft_io::uninterrupted(|| there.recv(&mut [0; 2_000])).is_ok());
        assert!(device.key(3, Slot::Primary).is_ok());
        inside.send_to(b"one too many", "10.8.0.2:9").unwrap();
        assert_eq!(told.recv_timeout(PATIENCE), Ok(USED_UP));
        let empty = Err(DeviceError::NoKey { peer_id: 3, slot: Slot::Primary });
        let begun = Instant::now();
        while device.key(3, Slot::Primary) != empty {
            assert!(begun.elapsed() < PATIENCE);
        }
        inside.send_to(b"without a key", "10.8.0.2:9").unwrap();
        while device.dropped(DropReason::NoPath) == 0 {
            assert!(begun.elapsed() < PATIENCE);
        }
        assert_eq!(device.dropped(DropReason::SaExhausted), 1);
        assert!(told.try_recv().is_err(), "it is told once");
    });
}

#[test]
fn a_peer_that_says_that_it_leaves_is_gone_at_once() {
    with_device(|device, told| {
        let [here, there] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let to = here.local_addr().unwrap();
        device.new_peer(here.into(), &peer(3, there.local_addr().unwrap().port())).unwrap();
        device.new_key(&key(3)).unwrap();
        // Other words of that kind mean nothing to a device.
        for kind in [0, data::OCC_EXIT] {
            let inside = [&data::OCC_MAGIC[..], &[kind]].concat();
            there.send_to(&sealed(device, 3, &inside), to).unwrap();
        }
        let reason = DeletionReason::TransportDisconnect;
        let gone = Notification::PeerDeleted { peer_id: 3, reason };
        assert_eq!(told.recv_timeout(PATIENCE), Ok(Event::Notification(gone)));
        assert_eq!(device.dropped(DropReason::BadInner), 1);
        assert_eq!(device.peer(3).unwrap_err(), DeviceError::NoPeer(3));
        assert!(told.try_recv().is_err(), "it is told once");
    });
}

#[test]
fn a_socket_that_is_held_is_read_before_and_after_its_peers() {
    with_device(|device, told| {
        let [here, there] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        there.set_read_timeout(Some(PATIENCE)).unwrap();
        let (to, from) = (here.local_addr().unwrap(), there.local_addr().unwrap());
        let number = device.hold(here.try_clone().unwrap().into()).unwrap();
        let expect = |bytes: &[u8]| {
            there.send_to(bytes, to).unwrap();
            let event = loop {
                match told.recv_timeout(PATIENCE).unwrap() {
                    Event::Notification(_) => {}
                    packet @ Event::Packet { .. } => break packet,
                }
            };
            let packet = bytes.to_vec();
            let (source, local) = (from, Some(to.ip()));
            assert_eq!(event, Event::Packet { source, local, transport: number, packet });
        };
        expect(&[0x38, 0, 0, 0, 1]);
        device.send_to(number, (Some(to.ip()), from), &[0x40, 2]).unwrap();
        let mut answer = [0; 8];
        let (len, source) = weft_io::uninterrupted(|| there.recv_from(&mut answer)).unwrap();
        assert_eq!((&answer[..len], source), (&[0x40, 2][..], to));
        device.new_peer(here.try_clone().unwrap().into(), &peer(3, from.port())).unwrap();
        expect(&[0x38, 0, 0, 0, 3]);
        device.delete_peer(3).unwrap();
        expect(&[0x38, 0, 0, 0, 4]);
        device.let_go(number);
        let refused = device.send_to(number, (None, from), &[0x40, 5]);
        assert_eq!(refused, Err(DeviceError::NotASocket));
        assert_eq!(device.hold(there.into()).map(|_| ()), Ok(()), "another may have its place");
    });
}

#[test]
fn all_peers_that_move_in_one_batch_are_followed_at_once() {
    const COUNT: u32 = receiver::MOVES_MAX as u32;
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let events = move |event| {
        let _ = tell.lock().unwrap().send(event);
    };
    with_device_of(Mode::Mp, events, move |device| {
        let here = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = here.local_addr().unwrap();
        let packets: Vec<(UdpSocket, Vec<u8>)> = (1..=COUNT)
            .map(|id| {
                let vpn_ipv4 = Some(Ipv4Addr::from_bits(0x0a08_0001 + id));
                let new = PeerAttributes { vpn_ipv4, ..peer(id, 1_000) };
                device.new_peer(here.try_clone().unwrap().into(), &new).unwrap();
                device.new_key(&key(id)).unwrap();
                let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
                (socket, sealed(device, id, &data::PING))
            })
            .collect();
        // The device's thread waits for the lock, so that it finds all of them at once.
        let shared = device.common.write();
        for (socket, packet) in &packets {
            socket.send_to(packet, to).unwrap();
        }
        drop(shared);
        let mut moved = Vec::new();
        while moved.len() < packets.len() {
            match told.recv_timeout(PATIENCE).unwrap() {
                Event::Notification(Notification::PeerFloat { peer_id, remote }) => {
                    assert_eq!(device.peer(peer_id).unwrap().remote, Some(remote));
                    moved.push((peer_id, remote));
                }
                other => panic!("{other:?}"),
            }
        }
        moved.sort_unstable();
        let sources = packets.iter().map(|(socket, _)| socket.local_addr().unwrap());
        assert_eq!(moved, (1..=COUNT).zip(sources).collect::<Vec<_>>());
    });
}

#[test]
fn a_move_is_known_before_the_packet_that_tells_it_is_delivered() {
    let inside: Arc<Mutex<Option<UdpSocket>>> = Arc::default();
    let (seen, (tell, told)) = (Arc::clone(&inside), mpsc::channel());
    let tell = Mutex::new(tell);
    let events = move |event| {
        if let Event::Notification(Notification::PeerFloat { .. }) = event {
            let inside = seen.lock().unwrap();
            let is_there = inside.as_ref().is_some_and(|inside| inside.recv(&mut [0; 64]).is_ok());
            let _ = tell.lock().unwrap().send(is_there);
        }
    };
    with_device_of(Mode::P2p, events, move |device| {
        let socket = UdpSocket::bind("10.8.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let port = socket.local_addr().unwrap().port();
        *inside.lock().unwrap() = Some(socket);
        let here = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = here.local_addr().unwrap();
        device.new_peer(here.into(), &peer(3, 1_000)).unwrap();
        device.new_key(&key(3)).unwrap();
        let there = UdpSocket::bind("127.0.0.1:0").unwrap();
        there.send_to(&sealed(device, 3, &datagram_inside(port)), to).unwrap();
        assert_eq!(told.recv_timeout(PATIENCE), Ok(false), "it was delivered before");
        let (begun, inside) = (Instant::now(), inside.lock().unwrap());
        while inside.as_ref().unwrap().recv(&mut [0; 64]).is_err() {
            assert!(begun.elapsed() < PATIENCE);
        }
    });
}

/// Between a look and its consequence another peer may have come to the same place.
#[test]
fn news_of_a_peer_does_not_affect_its_successor() {
    with_device(|device, _told| {
        let socket = || UdpSocket::bind("127.0.0.1:0").unwrap().into();
        device.new_peer(socket(), &peer(3, 1_000)).unwrap();
        let shared = device.common.read();
        let index = shared.peers.index_of(3).unwrap();
        let before = shared.peers.get(index).unwrap();
        let (number, place) = (before.number, before.transport);
        let transport = Arc::clone(shared.transports.get(place).unwrap());
        drop(shared);
        // The transport of the second is beside the first's, that of the third in its place.
        device.new_peer(socket(), &peer(3, 1_500)).unwrap();
        device.new_peer(socket(), &peer(3, 2_000)).unwrap();
        let mut shared = device.common.write();
        let after = shared.peers.get(index).unwrap();
        assert_eq!((after.id, after.transport), (3, place));
        let source = "127.0.0.1:3000".parse().unwrap();
        assert_eq!(shared.move_peer(Moved { index, number, source, local: None }), None);
        assert_eq!(shared.remove_transport(place, &transport), []);
        let after = shared.peers.get(index).unwrap();
        let remote = after.remote.unwrap().address();
        assert_eq!(remote, "127.0.0.1:2000".parse().unwrap());
        let (number, place) = (after.number, after.transport);
        assert_eq!(shared.move_peer(Moved { index, number, source, local: None }), Some(3));
        let transport = Arc::clone(shared.transports.get(place).unwrap());
        assert_eq!(shared.remove_transport(place, &transport), [3]);
    });
}
