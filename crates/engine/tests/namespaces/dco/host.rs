//! Hosts with a device each, and the traffic between them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use weft_engine::DropReason;
use weft_engine::dco::{Device, DeviceConfig, Event};
use weft_io::namespace::{Namespace, run_in};
use weft_io::udp::IPV6_MTU_MIN;
use weft_io::uninterrupted;
use weft_openvpn::device::{
    CipherAlgorithm, DeletionReason, KeyAttributes, KeyDirection, Mode, Notification,
    PeerAttributes, PeerState, Slot,
};

use crate::common::{PATIENCE, flows_between, fresh_namespace, ip, pattern};

const MTU: u16 = 1_416;

/// A host with a device; the last byte of its addresses is its number.
pub(super) struct Host {
    pub(super) namespace: Namespace,
    pub(super) device: Device,
    pub(super) events: Arc<Events>,
    pub(super) number: u8,
}

#[derive(Default)]
pub(super) struct Events {
    list: Mutex<Vec<Event>>,
    changed: Condvar,
}

impl Events {
    /// Waits for an event that `pick` takes, and forgets all up to it.
    pub(super) fn wait<T>(&self, mut pick: impl FnMut(&Event) -> Option<T>) -> T {
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

    /// All that was told and not waited for.
    pub(super) fn all(&self) -> Vec<Event> {
        self.list.lock().unwrap().clone()
    }

    /// The next packet of the control channel, and where it came from.
    pub(super) fn packet(&self) -> (Vec<u8>, SocketAddr) {
        self.wait(|event| match event {
            Event::Packet { packet, source, .. } => Some((packet.clone(), *source)),
            Event::Notification(_) => None,
        })
    }

    pub(super) fn deleted(&self, peer: u32) -> DeletionReason {
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
    pub(super) fn new(namespace: Namespace, number: u8, mode: Mode) -> Self {
        Self::with_device(namespace, number, mode, ("ovpn0", MTU))
    }

    /// A host whose device has this name and MTU.
    pub(super) fn with_device(
        namespace: Namespace,
        number: u8,
        mode: Mode,
        (name, mtu): (&str, u16),
    ) -> Self {
        let events = Arc::new(Events::default());
        let sink = Arc::clone(&events);
        let device = run_in(&namespace, || {
            ip("link set lo up");
            ip(&format!("addr add 192.168.77.{number}/24 dev eth0"));
            ip(&format!("-6 addr add fd77::{number}/64 dev eth0 nodad"));
            ip("link set eth0 up");
            let config = DeviceConfig {
                name: name.to_owned(),
                mode,
                mtu,
                path_mtu: IPV6_MTU_MIN,
                offloads: true,
            };
            let told = move |event| {
                sink.list.lock().unwrap().push(event);
                sink.changed.notify_all();
            };
            let device = Device::open(&config, Arc::new(told)).unwrap();
            // Nothing but the tests' packets: no router is looked for.
            ip(&format!("link set {name} addrgenmode none"));
            ip(&format!("link set {name} mtu {mtu} up"));
            ip(&format!("addr add 10.8.0.{number}/24 dev {name}"));
            ip(&format!("-6 addr add fd08::{number}/64 dev {name} nodad"));
            device
        });
        Self { namespace, device: device.unwrap(), events, number }
    }

    pub(super) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        run_in(&self.namespace, f).unwrap()
    }

    pub(super) fn outer(&self, ipv6: bool) -> IpAddr {
        match ipv6 {
            false => Ipv4Addr::new(192, 168, 77, self.number).into(),
            true => Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, self.number.into()).into(),
        }
    }

    pub(super) fn inner_v4(&self) -> IpAddr {
        Ipv4Addr::new(10, 8, 0, self.number).into()
    }

    pub(super) fn inner_v6(&self) -> IpAddr {
        Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, self.number.into()).into()
    }

    pub(super) fn socket(&self, ipv6: bool) -> UdpSocket {
        self.run(|| UdpSocket::bind((self.outer(ipv6), 0)).unwrap())
    }

    /// Makes a peer under the number of `of`, with a key.
    pub(super) fn meet(
        &self,
        of: &Self,
        socket: OwnedFd,
        remote: Option<SocketAddr>,
        cipher: Cipher,
    ) {
        let mut attributes = PeerAttributes {
            id: Some(of.number.into()),
            // Each host calls a peer by the peer's number.
            tx_id: Some(self.number.into()),
            remote_port: remote.map(|remote| remote.port()),
            ..PeerAttributes::default()
        };
        match remote {
            Some(SocketAddr::V4(v4)) => attributes.remote_ipv4 = Some(*v4.ip()),
            Some(SocketAddr::V6(v6)) => {
                attributes.remote_ipv6 = Some(*v6.ip());
                attributes.remote_ipv6_scope_id = Some(v6.scope_id()).filter(|scope| *scope > 0);
            }
            None => {}
        }
        if self.device.mode() == Mode::Mp {
            attributes.vpn_ipv4 = Some(Ipv4Addr::new(10, 8, 0, of.number));
            attributes.vpn_ipv6 = Some(Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, of.number.into()));
        }
        self.run(|| self.device.new_peer(socket, &attributes)).unwrap();
        self.device.new_key(&self.key(of, Slot::Primary, 0, cipher)).unwrap();
    }

    /// The key between this host and another: each direction has its own.
    pub(super) fn key(&self, of: &Self, slot: Slot, key_id: u32, cipher: Cipher) -> KeyAttributes {
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

    pub(super) fn keepalive(&self, of: &Self, interval_s: u32, timeout_s: u32) {
        let attributes = PeerAttributes {
            id: Some(of.number.into()),
            keepalive_interval_s: Some(interval_s),
            keepalive_timeout_s: Some(timeout_s),
            ..PeerAttributes::default()
        };
        self.device.set_peer(&attributes).unwrap();
    }

    /// Its peers.
    pub(super) fn peers(&self) -> Vec<PeerState> {
        self.device.peers().unwrap()
    }

    /// Waits until it has dropped `wanted` packets for this reason.
    pub(super) fn wait_dropped(&self, reason: DropReason, wanted: u64) {
        let deadline = Instant::now() + PATIENCE;
        while self.device.dropped(reason) < wanted {
            assert!(Instant::now() < deadline, "{reason:?}: {:?}", self.drops());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(super) fn drops(&self) -> Vec<(DropReason, u64)> {
        let all = DropReason::ALL.iter().map(|reason| (*reason, self.device.dropped(*reason)));
        all.filter(|(_, count)| *count > 0).collect()
    }
}

/// Random numbers that are the same for a seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32 % limit
    }
}

pub(super) type Cipher = (CipherAlgorithm, usize);

pub(super) const AES_256: Cipher = (CipherAlgorithm::AesGcm, 32);
pub(super) const CIPHERS: [Cipher; 4] = [
    (CipherAlgorithm::AesGcm, 16),
    (CipherAlgorithm::AesGcm, 24),
    AES_256,
    (CipherAlgorithm::ChaCha20Poly1305, 32),
];

/// Two namespaces joined by a veth pair.
pub(super) fn joined() -> (Namespace, Namespace) {
    let (left, right) = (fresh_namespace(), fresh_namespace());
    let path = format!("/proc/{}/fd/{}", std::process::id(), right.as_fd().as_raw_fd());
    run_in(&left, || ip(&format!("link add eth0 type veth peer name eth0 netns {path}"))).unwrap();
    (left, right)
}

pub(super) fn strangers(modes: (Mode, Mode)) -> (Host, Host) {
    let (left, right) = joined();
    (Host::new(left, 1, modes.0), Host::new(right, 2, modes.1))
}

pub(super) fn connect_udp(
    a: &Host,
    b: &Host,
    ipv6: bool,
    cipher: Cipher,
) -> (UdpSocket, UdpSocket) {
    let (here, there) = (a.socket(ipv6), b.socket(ipv6));
    let remote = |socket: &UdpSocket| Some(socket.local_addr().unwrap());
    a.meet(b, here.try_clone().unwrap().into(), remote(&there), cipher);
    b.meet(a, there.try_clone().unwrap().into(), remote(&here), cipher);
    (here, there)
}

pub(super) fn connect_tcp(a: &Host, b: &Host, ipv6: bool, cipher: Cipher) {
    let listener = b.run(|| TcpListener::bind((b.outer(ipv6), 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let here = a.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    let there = listener.accept().unwrap().0;
    a.meet(b, here.into(), None, cipher);
    b.meet(a, there.into(), None, cipher);
}

/// Traffic of both families, both ways.
pub(super) fn check_traffic(a: &Host, b: &Host, bytes: usize) {
    let bytes = pattern(3, bytes);
    flows_between(&a.namespace, &b.namespace, b.inner_v4(), 1, &bytes);
    flows_between(&b.namespace, &a.namespace, a.inner_v6(), 1, &bytes);
}

/// A socket in each host and the datagrams between them.
pub(super) fn datagrams(a: &Host, b: &Host) -> (UdpSocket, UdpSocket) {
    let here = a.run(|| UdpSocket::bind((a.inner_v4(), 0)).unwrap());
    let there = b.run(|| UdpSocket::bind((b.inner_v4(), 0)).unwrap());
    here.connect(there.local_addr().unwrap()).unwrap();
    there.connect(here.local_addr().unwrap()).unwrap();
    here.set_read_timeout(Some(PATIENCE)).unwrap();
    there.set_read_timeout(Some(PATIENCE)).unwrap();
    (here, there)
}

pub(super) fn arrives((from, to): &(UdpSocket, UdpSocket), text: &[u8]) {
    from.send(text).unwrap();
    let mut got = [0; 2_000];
    let len = uninterrupted(|| to.recv(&mut got)).unwrap();
    assert_eq!(&got[..len], text);
}

/// Nothing comes for as long as everything here takes many times over.
pub(super) fn does_not_arrive((from, to): &(UdpSocket, UdpSocket), text: &[u8]) {
    from.send(text).unwrap();
    to.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(uninterrupted(|| to.recv(&mut [0; 2_000])).is_err());
    to.set_read_timeout(Some(PATIENCE)).unwrap();
}
