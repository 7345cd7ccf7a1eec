//! Data channel devices in userspace, two and more, with real traffic between them.
// Seeds go to the log.
#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use weft_crypto::DataCipher;
use weft_engine::DropReason;
use weft_engine::dco::{Device, DeviceConfig, Event, Route};
use weft_io::namespace::{Namespace, run_in};
use weft_io::uninterrupted;
use weft_openvpn::device::{
    CipherAlgorithm, DeletionReason, DeviceError, EpochAttributes, KeyAttributes, KeyBlock,
    KeyDirection, Mode, Notification, PeerAttributes, Side, Slot,
};

use crate::common::{PATIENCE, flows_between, fresh_namespace, ip, pattern};

const MTU: u16 = 1_416;

/// A host with a device; the last byte of its addresses is its number.
struct Host {
    namespace: Namespace,
    device: Device,
    events: Arc<Events>,
    number: u8,
}

#[derive(Default)]
struct Events {
    list: Mutex<Vec<Event>>,
    changed: Condvar,
}

impl Events {
    /// Waits for an event that `pick` takes, and forgets all up to it.
    fn wait<T>(&self, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        let mut list = self.list.lock().unwrap();
        loop {
            if let Some(at) = list.iter().position(|event| pick(event).is_some()) {
                let found = pick(&list[at]).unwrap();
                list.drain(..=at);
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no such event among {list:?}");
            list = self.changed.wait_timeout(list, left).unwrap().0;
        }
    }

    fn deleted(&self, peer: u32) -> DeletionReason {
        self.wait(|event| match event {
            Event::Notification(Notification::PeerDeleted { peer_id, reason })
                if *peer_id == peer =>
            {
                Some(*reason)
            }
            _ => None,
        })
    }
}

impl Host {
    fn new(namespace: Namespace, number: u8, mode: Mode) -> Self {
        let events = Arc::new(Events::default());
        let sink = Arc::clone(&events);
        let device = run_in(&namespace, || {
            ip("link set lo up");
            ip(&format!("addr add 192.168.77.{number}/24 dev eth0"));
            ip(&format!("-6 addr add fd77::{number}/64 dev eth0 nodad"));
            ip("link set eth0 up");
            let config = DeviceConfig { name: "ovpn0".to_owned(), mode, mtu: MTU, offloads: true };
            let told = move |event| {
                sink.list.lock().unwrap().push(event);
                sink.changed.notify_all();
            };
            let device = Device::open(&config, Arc::new(told)).unwrap();
            // Nothing but what the tests send: no router is looked for.
            ip("link set ovpn0 addrgenmode none");
            ip(&format!("link set ovpn0 mtu {MTU} up"));
            ip(&format!("addr add 10.8.0.{number}/24 dev ovpn0"));
            ip(&format!("-6 addr add fd08::{number}/64 dev ovpn0 nodad"));
            device
        });
        Self { namespace, device: device.unwrap(), events, number }
    }

    fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        run_in(&self.namespace, f).unwrap()
    }

    fn outer(&self, ipv6: bool) -> IpAddr {
        match ipv6 {
            false => Ipv4Addr::new(192, 168, 77, self.number).into(),
            true => Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, self.number.into()).into(),
        }
    }

    fn inner_v4(&self) -> IpAddr {
        Ipv4Addr::new(10, 8, 0, self.number).into()
    }

    fn inner_v6(&self) -> IpAddr {
        Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, self.number.into()).into()
    }

    fn socket(&self, ipv6: bool) -> UdpSocket {
        self.run(|| UdpSocket::bind((self.outer(ipv6), 0)).unwrap())
    }

    /// Makes a peer under the number of `of`, with a key.
    fn meet(&self, of: &Self, socket: OwnedFd, remote: Option<SocketAddr>, cipher: Cipher) {
        let mut attributes = PeerAttributes {
            id: Some(of.number.into()),
            // Each host calls a peer by the peer's number.
            tx_id: Some(self.number.into()),
            remote_port: remote.map(|remote| remote.port()),
            ..PeerAttributes::default()
        };
        match remote.map(|remote| remote.ip()) {
            Some(IpAddr::V4(v4)) => attributes.remote_ipv4 = Some(v4),
            Some(IpAddr::V6(v6)) => attributes.remote_ipv6 = Some(v6),
            None => {}
        }
        if self.device.mode() == Mode::Mp {
            attributes.vpn_ipv4 = Some(Ipv4Addr::new(10, 8, 0, of.number));
            attributes.vpn_ipv6 = Some(Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, of.number.into()));
        }
        self.device.new_peer(socket, &attributes).unwrap();
        self.device.new_key(&self.key(of, Slot::Primary, 0, cipher)).unwrap();
    }

    /// The key between this host and another: each direction has its own.
    fn key(&self, of: &Self, slot: Slot, key_id: u32, cipher: Cipher) -> KeyAttributes {
        let direction = |from: u8, to: u8| {
            let byte = |at: usize| (at as u8) ^ from.wrapping_mul(31) ^ to ^ (key_id as u8) << 5;
            Some(KeyDirection {
                cipher_key: (0..cipher.1).map(byte).collect(),
                nonce_tail: [from, to, key_id as u8, 4, 5, 6, 7, 8],
            })
        };
        KeyAttributes {
            peer_id: Some(of.number.into()),
            slot: Some(slot),
            key_id: Some(key_id),
            cipher: Some(cipher.0),
            encrypt: direction(self.number, of.number),
            decrypt: direction(of.number, self.number),
        }
    }

    fn keepalive(&self, of: &Self, interval_s: u32, timeout_s: u32) {
        let attributes = PeerAttributes {
            id: Some(of.number.into()),
            keepalive_interval_s: Some(interval_s),
            keepalive_timeout_s: Some(timeout_s),
            ..PeerAttributes::default()
        };
        self.device.set_peer(&attributes).unwrap();
    }

    fn drops(&self) -> Vec<(DropReason, u64)> {
        let all = DropReason::ALL.iter().map(|reason| (*reason, self.device.dropped(*reason)));
        all.filter(|(_, count)| *count > 0).collect()
    }
}

type Cipher = (CipherAlgorithm, usize);

const AES_256: Cipher = (CipherAlgorithm::AesGcm, 32);
const CIPHERS: [Cipher; 4] = [
    (CipherAlgorithm::AesGcm, 16),
    (CipherAlgorithm::AesGcm, 24),
    AES_256,
    (CipherAlgorithm::ChaCha20Poly1305, 32),
];

/// Two namespaces joined by a veth pair.
fn joined() -> (Namespace, Namespace) {
    let (left, right) = (fresh_namespace(), fresh_namespace());
    let path = format!("/proc/{}/fd/{}", std::process::id(), right.as_fd().as_raw_fd());
    run_in(&left, || ip(&format!("link add eth0 type veth peer name eth0 netns {path}"))).unwrap();
    (left, right)
}

fn strangers(modes: (Mode, Mode)) -> (Host, Host) {
    let (left, right) = joined();
    (Host::new(left, 1, modes.0), Host::new(right, 2, modes.1))
}

fn connect_udp(a: &Host, b: &Host, ipv6: bool, cipher: Cipher) -> (UdpSocket, UdpSocket) {
    let (here, there) = (a.socket(ipv6), b.socket(ipv6));
    let remote = |socket: &UdpSocket| Some(socket.local_addr().unwrap());
    a.meet(b, here.try_clone().unwrap().into(), remote(&there), cipher);
    b.meet(a, there.try_clone().unwrap().into(), remote(&here), cipher);
    (here, there)
}

fn connect_tcp(a: &Host, b: &Host, ipv6: bool, cipher: Cipher) {
    let listener = b.run(|| TcpListener::bind((b.outer(ipv6), 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let here = a.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    let there = listener.accept().unwrap().0;
    a.meet(b, here.into(), None, cipher);
    b.meet(a, there.into(), None, cipher);
}

/// Traffic of both families, both ways.
fn check_traffic(a: &Host, b: &Host, bytes: usize) {
    let bytes = pattern(3, bytes);
    flows_between(&a.namespace, &b.namespace, b.inner_v4(), 1, &bytes);
    flows_between(&b.namespace, &a.namespace, a.inner_v6(), 1, &bytes);
}

/// A socket in each host and the datagrams between them.
fn datagrams(a: &Host, b: &Host) -> (UdpSocket, UdpSocket) {
    let here = a.run(|| UdpSocket::bind((a.inner_v4(), 0)).unwrap());
    let there = b.run(|| UdpSocket::bind((b.inner_v4(), 0)).unwrap());
    here.connect(there.local_addr().unwrap()).unwrap();
    there.connect(here.local_addr().unwrap()).unwrap();
    here.set_read_timeout(Some(PATIENCE)).unwrap();
    there.set_read_timeout(Some(PATIENCE)).unwrap();
    (here, there)
}

fn arrives((from, to): &(UdpSocket, UdpSocket), text: &[u8]) {
    from.send(text).unwrap();
    let mut got = [0; 2_000];
    let len = uninterrupted(|| to.recv(&mut got)).unwrap();
    assert_eq!(&got[..len], text);
}

/// Nothing comes for as long as everything here takes many times over.
fn does_not_arrive((from, to): &(UdpSocket, UdpSocket), text: &[u8]) {
    from.send(text).unwrap();
    to.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(uninterrupted(|| to.recv(&mut [0; 2_000])).is_err());
    to.set_read_timeout(Some(PATIENCE)).unwrap();
}

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
                let of = host.device.peers();
                assert!(of[0].vpn.rx_bytes > 1 << 20 && of[0].vpn.tx_bytes > 1 << 20, "{of:?}");
                assert!(of[0].link.tx_bytes > of[0].vpn.tx_bytes, "{of:?}");
                assert_eq!(forged, 0, "{modes:?} {cipher:?}: {:?}", host.drops());
            }
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
            a.keepalive(&b, 1, 3);
            b.keepalive(&a, 1, 3);
            thread::sleep(Duration::from_secs(4));
        }
        let left = [&a, &b].map(|host| (host.device.peers().len(), host.drops()));
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
            // What the last key sealed is there by then: its slot is the next one's.
            arrives(&pair, &swaps.to_be_bytes());
            arrives(&back, &swaps.to_be_bytes());
            assert_eq!(a.device.key(2, Slot::Primary).unwrap().key_id, next);
            swaps += 1;
        }
    });
    assert_eq!([a.drops(), b.drops()], before);
}

#[test]
fn a_peer_that_floats_is_followed_and_told() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    // Bound to no address, so that the system chooses the one that there is.
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
fn keepalives_hold_a_peer_and_their_absence_ends_it() {
    for modes in [(Mode::P2p, Mode::P2p), (Mode::Mp, Mode::P2p)] {
        let (a, b) = strangers(modes);
        let _sockets = connect_udp(&a, &b, false, AES_256);
        a.keepalive(&b, 1, 3);
        b.keepalive(&a, 1, 60);
        thread::sleep(Duration::from_secs(5));
        assert!(a.device.peer(2).is_ok(), "pings kept it");
        let pinged = a.device.peer(2).unwrap();
        assert!(pinged.link.rx_packets > pinged.vpn.rx_packets, "{pinged:?}");
        b.keepalive(&a, 0, 0);
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
    assert_eq!(a.device.peers().len(), 1);
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
fn a_device_that_somebody_removes_has_no_peers_any_more() {
    let (a, b) = strangers((Mode::P2p, Mode::Mp));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    a.run(|| ip("link del ovpn0"));
    assert_eq!(a.events.deleted(2), DeletionReason::Teardown);
    assert_eq!(a.device.peers(), []);
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
}

#[test]
fn control_packets_go_through_untouched_beside_the_data() {
    let (a, b) = strangers((Mode::P2p, Mode::Mp));
    let _sockets = connect_udp(&a, &b, true, AES_256);
    let packet = [&[0x38][..], &[7; 60]].concat();
    a.device.send_packet(2, &packet).unwrap();
    let got = b.events.wait(|event| match event {
        Event::Packet { packet, source, .. } => Some((packet.clone(), *source)),
        Event::Notification(_) => None,
    });
    assert_eq!(got, (packet, a.device.peer(2).unwrap().local.unwrap()));
    check_traffic(&a, &b, 1 << 16);
    let (a, b) = strangers((Mode::P2p, Mode::Mp));
    connect_tcp(&a, &b, true, AES_256);
    b.device.send_packet(1, &[0x20; 1_000]).unwrap();
    let got = a.events.wait(|event| match event {
        Event::Packet { packet, .. } => Some(packet.clone()),
        Event::Notification(_) => None,
    });
    assert_eq!(got, [0x20; 1_000]);
}

#[test]
fn networks_behind_peers_are_reached_by_routes_and_foreign_sources_are_not() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    let behind: IpAddr = "172.20.0.1".parse().unwrap();
    b.run(|| ip("addr add 172.20.0.1/32 dev lo"));
    a.run(|| ip("route add 172.20.0.0/16 via 10.8.0.2 dev ovpn0"));
    let here = a.run(|| UdpSocket::bind((a.inner_v4(), 0)).unwrap());
    let there = b.run(|| UdpSocket::bind((behind, 0)).unwrap());
    here.connect(there.local_addr().unwrap()).unwrap();
    there.connect(here.local_addr().unwrap()).unwrap();
    for socket in [&here, &there] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let pair = (here, there);
    does_not_arrive(&pair, b"no route yet");
    assert!(a.device.dropped(DropReason::NoEndpoint) > 0);
    let back = (pair.1, pair.0);
    does_not_arrive(&back, b"from where nobody lives");
    assert_eq!(a.device.dropped(DropReason::ForeignSource), 1);
    let route = Route {
        destination: ("172.20.0.0".parse().unwrap(), 16),
        gateway: Some(b.inner_v4()),
        metric: 0,
    };
    a.device.set_routes(&[route]);
    arrives(&back, b"back");
    arrives(&(back.1, back.0), b"there");
}

#[test]
fn packets_of_nobody_are_dropped_and_counted() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let (_here, there) = connect_udp(&a, &b, false, AES_256);
    let target = a.device.peer(2).unwrap().local.unwrap();
    let count = |reason, wanted: u64| {
        let deadline = Instant::now() + PATIENCE;
        while a.device.dropped(reason) < wanted {
            assert!(Instant::now() < deadline, "{reason:?}: {:?}", a.drops());
            thread::sleep(Duration::from_millis(5));
        }
    };
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
    for malformed in [&[0x48, 0, 0, 2, 0, 0, 0, 9][..], &[0x30; 50], &[0xff; 50]] {
        send(malformed);
    }
    count(DropReason::Malformed, 3);
    let pair = datagrams(&b, &a);
    arrives(&pair, b"all the same");
}

/// Random numbers that are the same for a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32 % limit
    }
}

/// Ten minutes where there is time (`WEFT_SOAK`), else thirty seconds.
#[test]
fn thousands_of_peers_come_and_go_under_traffic_and_nothing_else_does() {
    const FIRST: u32 = 1_000;
    const PEERS: u32 = 4_096;
    let seconds = if std::env::var_os("WEFT_SOAK").is_some() { 600 } else { 30 };
    let seed = std::env::var("WEFT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("WEFT_SEED={seed}");
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let (here, _there) = connect_udp(&a, &b, false, AES_256);
    let before = [a.drops(), b.drops()];
    let end = Instant::now() + Duration::from_secs(seconds);
    let bytes = pattern(5, 8 << 20);
    let peer = |id: u32| PeerAttributes {
        id: Some(id),
        remote_ipv4: Some(Ipv4Addr::from_bits(0xc612_0000 + id)),
        remote_port: Some(1194),
        vpn_ipv4: Some(Ipv4Addr::from_bits(0x0a09_0000 + id)),
        ..PeerAttributes::default()
    };
    let key = |id: u32| KeyAttributes {
        peer_id: Some(id),
        ..a.key(&b, Slot::ALL[id as usize % 2], 0, CIPHERS[id as usize % 4])
    };
    let mut there = BTreeSet::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            while Instant::now() < end {
                flows_between(&a.namespace, &b.namespace, b.inner_v4(), 2, &bytes);
            }
        });
        // Keys for peers that may be deleted at this very moment.
        scope.spawn(|| {
            let mut random = Random(seed ^ 0xffff);
            while Instant::now() < end {
                let id = FIRST + random.below(PEERS);
                let given = a.device.new_key(&key(id));
                assert!(matches!(given, Ok(()) | Err(DeviceError::NoPeer(_))), "{given:?}");
            }
        });
        let mut random = Random(seed);
        while Instant::now() < end {
            let id = FIRST + random.below(PEERS);
            if there.remove(&id) {
                a.device.delete_peer(id).unwrap();
                assert_eq!(a.device.delete_peer(id), Err(DeviceError::NoPeer(id)));
            } else {
                a.device.new_peer(here.try_clone().unwrap().into(), &peer(id)).unwrap();
                there.insert(id);
            }
        }
    });
    let left: BTreeSet<u32> = a.device.peers().iter().map(|peer| peer.id).collect();
    there.insert(b.number.into());
    assert_eq!(left, there, "seed {seed}");
    assert!(left.len() as u32 > PEERS / 4, "{} peers, seed {seed}", left.len());
    // Neither a stream nor a datagram met anything but its peer.
    arrives(&datagrams(&a, &b), b"at the end");
    assert_eq!([a.drops(), b.drops()], before, "seed {seed}");
}

#[test]
fn what_cannot_be_is_refused_with_the_kernels_numbers() {
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
    assert_eq!(a.device.key(2, Slot::Secondary).unwrap_err().errno(), 2);
    assert_eq!(a.device.delete_key(9, Slot::Secondary).unwrap_err().errno(), 2);
    // As the kernel has it: what is not there is gone.
    assert_eq!(a.device.delete_key(2, Slot::Secondary), Ok(()));
    assert_eq!(a.device.send_packet(2, &[0; 65_536]).unwrap_err().errno(), 34);
    let elsewhere = PeerAttributes { vpn_ipv4: None, ..whole.clone() };
    let taken = b.device.new_peer(udp(), &elsewhere);
    assert_eq!(taken, Err(DeviceError::SocketTaken), "two devices would read from it");
    // None of it left anything behind.
    assert_eq!(a.device.peers().len(), 1);
    arrives(&datagrams(&a, &b), b"as before");
    // What a device has let go of is anybody's.
    a.device.delete_peer(2).unwrap();
    b.device.new_peer(udp(), &elsewhere).unwrap();
    drop(there);
}
