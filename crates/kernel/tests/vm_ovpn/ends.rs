//! The ends of peers, each reported with its reason.

use std::{
    collections::HashSet,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpStream},
    os::fd::AsFd,
    sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    time::{Duration, Instant},
};

use weft_kernel::ovpn::{
    KnownPeer, Missed, OvpnClient, OvpnDeviceSpec, OvpnWatch, Refusal, Watched,
};
use weft_openvpn::device::{DeletionReason, Mode, Notification, PeerAttributes, Slot};

use crate::lab::{
    CIPHERS, Carrier, DEVICE, Host, Outer, PEER, Pair, address, connection, hosts, key, notice,
    peer, told, wait,
};

fn deleted(peer_id: u32, reason: DeletionReason) -> Notification {
    Notification::PeerDeleted { peer_id, reason }
}

#[test]
fn a_peer_that_is_deleted_or_replaced_is_told() {
    let pair = Pair::new(Outer::Udp4, CIPHERS[2]);
    let mut watch = pair.a.watch();
    let (client, device) = (&pair.a.client, pair.device_a);
    let new = |id| peer(id, Some(address(2, Outer::Udp4)));
    wait(client.new_peer(device, pair.carrier_a.fd(), &new(7))).unwrap();
    assert_eq!(told(&mut watch, device), deleted(PEER, DeletionReason::Teardown));
    wait(client.delete_peer(device, 7)).unwrap();
    assert_eq!(told(&mut watch, device), deleted(7, DeletionReason::Userspace));
    let error = wait(client.delete_peer(device, 7)).unwrap_err();
    assert_eq!((error.errno(), error.refusal()), (Some(2), Some(Refusal::Absent)), "{error}");
    wait(client.new_peer(device, pair.carrier_a.fd(), &new(8))).unwrap();
    pair.a.remove_device();
    assert_eq!(told(&mut watch, device), deleted(8, DeletionReason::Teardown));
    let error = wait(client.peers(device)).unwrap_err();
    assert_eq!((error.errno(), error.refusal()), (Some(19), Some(Refusal::NoDevice)), "{error}");
}

#[test]
fn a_closed_udp_socket_ends_its_peers() {
    let Pair { a, device_a, carrier_a, .. } = Pair::new(Outer::Udp4, CIPHERS[2]);
    let mut watch = a.watch();
    drop(carrier_a);
    assert_eq!(told(&mut watch, device_a), deleted(PEER, DeletionReason::TransportDisconnect));
}

/// The kernel may start the work that looks after keepalives before it files the new peer. Each peer is alone on its
/// device here, so that no other peer's work finds it.
#[test]
fn every_new_peer_expires_of_which_nothing_is_heard() {
    const DEVICES: u16 = 64;
    let [a] = hosts();
    let mut watch = a.watch();
    let mut made = Vec::new();
    for number in 0..DEVICES {
        let spec = OvpnDeviceSpec { name: format!("tun{number}"), mode: Mode::P2p, own: false };
        let device = wait(a.kernel.create_ovpn_device(&spec)).unwrap().index;
        a.space.run(&format!("ip link set tun{number} up addrgenmode none"));
        made.push((device, a.udp(&format!("0.0.0.0:{}", 2_000 + number))));
    }
    for (device, socket) in &made {
        let new = PeerAttributes {
            keepalive_interval_s: Some(1),
            keepalive_timeout_s: Some(2),
            ..peer(PEER, Some(address(2, Outer::Udp4)))
        };
        wait(a.client.new_peer(*device, socket.as_fd(), &new)).unwrap();
    }
    let mut left: HashSet<u32> = made.iter().map(|(device, _)| *device).collect();
    while !left.is_empty() {
        let notice = notice(&mut watch);
        assert_eq!(notice.what, deleted(PEER, DeletionReason::Expired));
        assert!(left.remove(&notice.device), "{notice:?}");
    }
}

/// A peer over TCP at `a`, whose other end is a plain socket.
fn over_tcp(a: &Host, b: &Host) -> (u32, OvpnWatch, Carrier, TcpStream) {
    let device = a.device(Mode::P2p);
    let [here, there] = connection(a, b);
    let watch = a.watch();
    let here = Carrier::Tcp(here);
    wait(a.client.new_peer(device, here.fd(), &peer(PEER, None))).unwrap();
    (device, watch, here, there)
}

#[test]
fn a_closed_connection_ends_its_peer() {
    let [a, b] = hosts();
    let (device, mut watch, here, _there) = over_tcp(&a, &b);
    drop(here);
    assert_eq!(told(&mut watch, device), deleted(PEER, DeletionReason::TransportDisconnect));
}

#[test]
fn the_other_ends_close_is_found_by_what_is_sent_next() {
    let [a, b] = hosts();
    let (device, mut watch, here, there) = over_tcp(&a, &b);
    // Packets that the device sends by itself would find the close before the test does.
    a.space.run(&format!("sysctl -q net.ipv6.conf.{DEVICE}.disable_ipv6=1"));
    wait(a.client.new_key(device, &key(PEER, Slot::Primary, 0, CIPHERS[2], false))).unwrap();
    drop(there);
    // The kernel sends no notice of a close in good order.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(wait(a.client.peers(device)).unwrap().len(), 1);
    // A read does: it finds the end, and the error once something was sent that came back.
    let Carrier::Tcp(socket) = &here else { panic!("over TCP") };
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert_eq!((&*socket).read(&mut [0; 64]).unwrap(), 0);
    assert!(!a.space.succeeds("ping -c 1 -W 1 10.8.0.2"));
    assert_eq!((&*socket).read(&mut [0; 64]).unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert!(!a.space.succeeds("ping -c 4 -i 0.5 -W 1 10.8.0.2"));
    assert_eq!(told(&mut watch, device), deleted(PEER, DeletionReason::TransportError));
}

#[test]
fn a_packet_that_cannot_be_ends_the_peer() {
    let [a, b] = hosts();
    let (device, mut watch, _here, mut there) = over_tcp(&a, &b);
    // A frame with a packet of the kind DATA_V1, opcode 6.
    let mut frame = vec![0, 40, 6 << 3];
    frame.resize(42, 0);
    there.write_all(&frame).unwrap();
    assert_eq!(told(&mut watch, device), deleted(PEER, DeletionReason::TransportError));
}

#[test]
fn after_lost_notices_the_difference_is_found() {
    const MANY: u32 = 4_000;
    let Pair { a, b, device_a, carrier_a, .. } = Pair::new(Outer::Udp4, CIPHERS[2]);
    let mut watch = a.watch();
    let remote = address(2, Outer::Udp4);
    let known = |id, key| KnownPeer { id, remote: Some(remote), primary_key_id: key };
    let client = &a.client;
    assert_eq!(wait(client.resynchronise(device_a, &[known(PEER, Some(0))])).unwrap(), []);
    for number in 0..MANY {
        let new = peer(number, Some(remote));
        wait(client.new_peer(device_a, carrier_a.fd(), &new)).unwrap();
    }
    let mut notices = 0;
    while let Watched::Notice(_) = wait(watch.next()).unwrap() {
        notices += 1;
    }
    println!("{notices} notices before the loss of {MANY}");
    let all = [known(PEER, Some(0)), known(MANY - 1, None)];
    let gone = Missed::PeerGone { peer_id: PEER };
    assert_eq!(wait(client.resynchronise(device_a, &all)).unwrap(), [gone]);
    let moved = KnownPeer { remote: Some(address(9, Outer::Udp4)), ..known(MANY - 1, Some(3)) };
    let there = [
        Missed::PeerMoved { peer_id: MANY - 1, remote },
        Missed::KeyGone { peer_id: MANY - 1, key_id: 3 },
    ];
    assert_eq!(wait(client.resynchronise(device_a, &[moved])).unwrap(), there);
    let new = key(MANY - 1, Slot::Primary, 3, CIPHERS[2], false);
    wait(client.new_key(device_a, &new)).unwrap();
    let all = [known(MANY - 1, Some(3))];
    assert_eq!(wait(client.resynchronise(device_a, &all)).unwrap(), []);
    a.remove_device();
    let error = wait(client.resynchronise(device_a, &all)).unwrap_err();
    assert_eq!(error.refusal(), Some(Refusal::NoDevice), "{error}");
    assert!(b.space.succeeds(&format!("ip link show {DEVICE}")));
}

/// Changes keys until `over`, and counts successes and requests for absent peers.
fn ask_for_keys(client: &OvpnClient, device: u32, peers: u32, seen: &Seen, over: &AtomicBool) {
    let mut turn = 0;
    while !over.load(SeqCst) {
        let (id, slot) = (1 + turn % peers, Slot::ALL[turn as usize / 2 % 2]);
        let asked = match turn / peers % 4 {
            0 | 1 => wait(client.new_key(device, &key(id, slot, turn % 8, CIPHERS[2], false))),
            2 => wait(client.swap_keys(device, id)),
            _ => wait(client.delete_key(device, id, slot)),
        };
        match asked {
            Ok(()) => _ = seen.done.fetch_add(1, SeqCst),
            Err(error) if error.refusal() == Some(Refusal::Absent) => {
                seen.absent.fetch_add(1, SeqCst);
            }
            Err(error) => panic!("peer {id}: {error}"),
        }
        turn += 1;
    }
}

/// Results of requests for keys.
#[derive(Debug, Default)]
struct Seen {
    done: AtomicU32,
    absent: AtomicU32,
}

/// Sets the flag on drop, also by a panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn peers_come_and_go_while_keys_are_installed() {
    const PEERS: u32 = 4;
    const STAYS: u32 = 99;
    let [a] = hosts();
    let device = a.device(Mode::Mp);
    let carrier = Carrier::Udp(a.udp("0.0.0.0:1194"));
    let make = |id| {
        let vpn_ipv4 = Some(Ipv4Addr::from_bits(0x0a09_0000 + id));
        let new = PeerAttributes { vpn_ipv4, ..peer(id, Some(address(2, Outer::Udp4))) };
        wait(a.client.new_peer(device, carrier.fd(), &new)).unwrap();
    };
    make(STAYS);
    // On a separate socket, so that neither waits for the other.
    let other = a.space.enter(OvpnClient::open()).unwrap();
    let (begin, seen, over) = (Instant::now(), Seen::default(), AtomicBool::new(false));
    let is_enough = || seen.done.load(SeqCst) > 0 && seen.absent.load(SeqCst) > 0;
    let rounds = std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask_for_keys(&other, device, PEERS, &seen, &over));
        let ends = Ends(&over);
        let mut rounds = 0;
        while begin.elapsed() < Duration::from_secs(3)
            || (rounds < 2 || !is_enough()) && begin.elapsed() < Duration::from_secs(60)
        {
            (1..=PEERS).for_each(make);
            for id in 1..=PEERS {
                wait(a.client.delete_peer(device, id)).unwrap();
            }
            rounds += 1;
        }
        drop(ends);
        asking.join().unwrap();
        rounds
    });
    println!("{rounds} times {PEERS} peers; keys that were asked for: {seen:?}");
    assert!(rounds > 1 && is_enough(), "{rounds}, {seen:?}");
    let left = wait(a.client.peers(device)).unwrap();
    assert_eq!(left.iter().map(|peer| peer.id).collect::<Vec<_>>(), [STAYS]);
    let last = key(STAYS, Slot::Primary, 0, CIPHERS[2], false);
    wait(other.new_key(device, &last)).unwrap();
    assert_eq!(wait(a.client.key(device, STAYS, Slot::Primary)).unwrap().key_id, 0);
}
