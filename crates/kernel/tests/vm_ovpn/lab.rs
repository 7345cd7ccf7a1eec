//! Hosts, sockets and keys.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::{Arc, LazyLock},
    time::Duration,
};

use tokio::runtime::Runtime;
use weft_io::namespace::run_in;
use weft_kernel::{
    Kernel,
    ovpn::{OvpnClient, OvpnDeviceSpec, OvpnWatch, Watched},
};
use weft_openvpn::device::{
    CipherAlgorithm, KeyAttributes, KeyDirection, Mode, Notice, Notification, PeerAttributes, Slot,
};

pub(crate) use crate::space::Space;

pub(crate) const PORT: u16 = 1194;
pub(crate) const DEVICE: &str = "tun0";
/// How long a notice may take.
const PATIENCE: Duration = Duration::from_secs(60);

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
});

pub(crate) fn wait<F: Future>(future: F) -> F::Output {
    RUNTIME.block_on(future)
}

impl Space {
    pub(crate) fn within<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        run_in(&self.0, body).unwrap()
    }

    /// Polls a future in this namespace.
    pub(crate) fn enter<T: Send>(&self, inside: impl Future<Output = T> + Send) -> T {
        run_in(&self.0, || RUNTIME.block_on(inside)).unwrap()
    }
}

/// A host on an underlay, with handles in its namespace.
pub(crate) struct Host {
    pub(crate) number: u8,
    pub(crate) space: Space,
    pub(crate) kernel: Kernel,
    pub(crate) client: OvpnClient,
    _underlay: Arc<Space>,
}

/// Some hosts on one bridge, with the addresses 192.0.2.number and 2001:db8::number.
pub(crate) fn hosts<const N: usize>() -> [Host; N] {
    let underlay = Arc::new(Space::new());
    underlay.run("ip link add u type bridge");
    underlay.run("ip link set u up addrgenmode none");
    let mut number = 0;
    [(); N].map(|()| {
        number += 1;
        let space = Space::new();
        let target = format!("/proc/{}/fd/{}", std::process::id(), space.0.as_fd().as_raw_fd());
        underlay.run(&format!("ip link add u{number} type veth peer name eth0 netns {target}"));
        underlay.run(&format!("ip link set u{number} master u up addrgenmode none"));
        space.run(&format!("ip address add 192.0.2.{number}/24 dev eth0"));
        space.run(&format!("ip address add 2001:db8::{number}/64 dev eth0 nodad"));
        space.run("ip link set eth0 up");
        let (kernel, client) = space.enter(async {
            let client = OvpnClient::open().await.expect("this test needs the module ovpn");
            (Kernel::new().unwrap(), client)
        });
        Host { number, space, kernel, client, _underlay: Arc::clone(&underlay) }
    })
}

impl Host {
    /// Makes the device, with the addresses 10.8.0.number and fd08::number, and returns its index.
    pub(crate) fn device(&self, mode: Mode) -> u32 {
        let spec = OvpnDeviceSpec { name: DEVICE.into(), mode, own: false };
        let device = wait(self.kernel.create_ovpn_device(&spec)).unwrap();
        let number = self.number;
        self.space.run(&format!("ip address add 10.8.0.{number}/24 dev {DEVICE}"));
        self.space.run(&format!("ip link set {DEVICE} up"));
        self.space.run(&format!("ip address add fd08::{number}/64 dev {DEVICE} nodad"));
        device.index
    }

    pub(crate) fn remove_device(&self) {
        assert!(wait(self.kernel.remove_ovpn_device(DEVICE)).unwrap());
    }

    pub(crate) fn udp(&self, address: &str) -> UdpSocket {
        self.space.within(|| UdpSocket::bind(address).unwrap())
    }

    pub(crate) fn watch(&self) -> OvpnWatch {
        self.space.enter(OvpnWatch::open()).unwrap()
    }

    /// All of some echoes must come.
    pub(crate) fn pings(&self, other: u8) {
        for address in [format!("10.8.0.{other}"), format!("fd08::{other}")] {
            let told = self.space.run(&format!("ping -c 4 -i 0.1 -s 1000 -W 20 {address}"));
            assert!(told.contains(" 4 received"), "{told}");
        }
    }
}

/// The next notice.
pub(crate) fn notice(watch: &mut OvpnWatch) -> Notice {
    let next = wait(async { tokio::time::timeout(PATIENCE, watch.next()).await });
    match next.expect("a notice must come").unwrap() {
        Watched::Notice(notice) => notice,
        Watched::Lost => panic!("no notice may be lost here"),
    }
}

/// The next notice, which must be of this device.
pub(crate) fn told(watch: &mut OvpnWatch, device: u32) -> Notification {
    let notice = notice(watch);
    assert_eq!(notice.device, device, "{notice:?}");
    notice.what
}

/// The transport between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outer {
    Udp4,
    Udp6,
    Tcp,
}

/// A socket for peers.
pub(crate) enum Carrier {
    Udp(UdpSocket),
    Tcp(TcpStream),
}

impl Carrier {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Udp(socket) => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
        }
    }
}

pub(crate) fn address(number: u8, outer: Outer) -> SocketAddr {
    let address: IpAddr = match outer {
        Outer::Udp6 => format!("2001:db8::{number}").parse().unwrap(),
        _ => format!("192.0.2.{number}").parse().unwrap(),
    };
    (address, PORT).into()
}

pub(crate) fn carriers(a: &Host, b: &Host, outer: Outer) -> [Carrier; 2] {
    match outer {
        Outer::Udp4 => [a, b].map(|host| Carrier::Udp(host.udp("0.0.0.0:1194"))),
        Outer::Udp6 => [a, b].map(|host| Carrier::Udp(host.udp("[::]:1194"))),
        Outer::Tcp => {
            let [x, y] = connection(a, b);
            [Carrier::Tcp(x), Carrier::Tcp(y)]
        }
    }
}

pub(crate) fn connection(a: &Host, b: &Host) -> [TcpStream; 2] {
    let listener = a.space.within(|| TcpListener::bind("0.0.0.0:0").unwrap());
    let port = listener.local_addr().unwrap().port();
    let to = SocketAddr::new(address(a.number, Outer::Tcp).ip(), port);
    let there = b.space.within(|| TcpStream::connect(to).unwrap());
    [listener.accept().unwrap().0, there]
}

/// A peer with this id at a host.
pub(crate) fn peer(id: u32, remote: Option<SocketAddr>) -> PeerAttributes {
    let mut peer = PeerAttributes { id: Some(id), ..PeerAttributes::default() };
    if let Some(remote) = remote {
        peer.remote_port = Some(remote.port());
        match remote.ip() {
            IpAddr::V4(ipv4) => peer.remote_ipv4 = Some(ipv4),
            IpAddr::V6(ipv6) => peer.remote_ipv6 = Some(ipv6),
        }
    }
    peer
}

pub(crate) const CIPHERS: [(CipherAlgorithm, usize); 4] = [
    (CipherAlgorithm::AesGcm, 16),
    (CipherAlgorithm::AesGcm, 24),
    (CipherAlgorithm::AesGcm, 32),
    (CipherAlgorithm::ChaCha20Poly1305, 32),
];

/// A key of the peer `peer_id`. The two ends have it the other way round.
pub(crate) fn key(
    peer_id: u32,
    slot: Slot,
    key_id: u32,
    (cipher, bytes): (CipherAlgorithm, usize),
    other_end: bool,
) -> KeyAttributes {
    let byte = |direction: u8| 0x10 * (u8::try_from(key_id).unwrap() + 1) + direction;
    let direction = |direction: u8| {
        let nonce_tail = [byte(direction) + 2; 8];
        Some(KeyDirection { cipher_key: vec![byte(direction); bytes], nonce_tail })
    };
    let (encrypt, decrypt) = (direction(u8::from(other_end)), direction(u8::from(!other_end)));
    KeyAttributes {
        peer_id: Some(peer_id),
        slot: Some(slot),
        key_id: Some(key_id),
        cipher: Some(cipher),
        encrypt,
        decrypt,
    }
}

/// Two hosts with a device in mode `p2p` each, one peer, and its primary key, whose id is 0.
pub(crate) struct Pair {
    pub(crate) a: Host,
    pub(crate) b: Host,
    pub(crate) device_a: u32,
    pub(crate) device_b: u32,
    pub(crate) carrier_a: Carrier,
    pub(crate) carrier_b: Carrier,
}

/// The id of the peer of a [`Pair`] at both ends.
pub(crate) const PEER: u32 = 0x0a_0b0c;

impl Pair {
    pub(crate) fn new(outer: Outer, cipher: (CipherAlgorithm, usize)) -> Self {
        let [a, b] = hosts();
        let [device_a, device_b] = [&a, &b].map(|host| host.device(Mode::P2p));
        let [carrier_a, carrier_b] = carriers(&a, &b, outer);
        let pair = Self { a, b, device_a, device_b, carrier_a, carrier_b };
        let ends = [
            (&pair.a, &pair.b, device_a, &pair.carrier_a),
            (&pair.b, &pair.a, device_b, &pair.carrier_b),
        ];
        for (host, other, device, carrier) in ends {
            let remote = (outer != Outer::Tcp).then(|| address(other.number, outer));
            let attributes = peer(PEER, remote);
            wait(host.client.new_peer(device, carrier.fd(), &attributes)).unwrap();
            let key = key(PEER, Slot::Primary, 0, cipher, host.number == 2);
            wait(host.client.new_key(device, &key)).unwrap();
        }
        pair
    }
}
