//! Two hosts, and a device on each, the kernel's or one in userspace, that is asked alike.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use tokio::runtime::Runtime;
use weft_bench::sandbox::{Netns, Sandbox, SandboxOptions};
use weft_engine::DropReason;
use weft_engine::dco::{Device, DeviceConfig, Event};
use weft_io::namespace::{Namespace, run_in};
use weft_kernel::Kernel;
use weft_kernel::ovpn::{OvpnClient, OvpnDeviceSpec, OvpnError, OvpnWatch, Watched};
use weft_lab::net::slowness;
use weft_openvpn::device::{
    CipherAlgorithm, DeviceError, KEY_ID_MAX, KeyAttributes, KeyDirection, KeyState, MTU_DEFAULT,
    Mode, Notification, PeerAttributes, PeerState, Slot,
};

pub(crate) const DEVICE: &str = "dco0";
/// A host's second device, which is not up.
const OTHER_DEVICE: &str = "dco1";
/// The inner and the outer port that tests use.
pub(crate) const PORT: u16 = 1194;
/// How long anything may take on a fast machine.
const PATIENCE: Duration = Duration::from_secs(10);
/// The last byte of the address that a host moves to.
const MOVED_TO: u8 = 0x77;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
});

/// How long anything may take on this machine.
pub(crate) fn limit() -> Duration {
    PATIENCE * slowness()
}

/// The kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Kernel,
    Userspace,
}

/// The carrier of packets between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outer {
    Udp4,
    Udp6,
    Tcp4,
    Tcp6,
}

impl Outer {
    pub(crate) const fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp4 | Self::Tcp6)
    }

    const fn is_ipv6(self) -> bool {
        matches!(self, Self::Udp6 | Self::Tcp6)
    }
}

pub(crate) type Cipher = (CipherAlgorithm, usize);

pub(crate) const CIPHERS: [Cipher; 4] = [
    (CipherAlgorithm::AesGcm, 16),
    (CipherAlgorithm::AesGcm, 24),
    (CipherAlgorithm::AesGcm, 32),
    (CipherAlgorithm::ChaCha20Poly1305, 32),
];

/// A device's refusal. Two are equal if their numbers are: each kind of device has different texts.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) errno: Option<i32>,
    pub(crate) text: String,
}

impl PartialEq for Refused {
    fn eq(&self, other: &Self) -> bool {
        self.errno == other.errno
    }
}

impl From<OvpnError> for Refused {
    fn from(error: OvpnError) -> Self {
        Self { errno: error.errno(), text: error.to_string() }
    }
}

impl From<DeviceError> for Refused {
    fn from(error: DeviceError) -> Self {
        Self { errno: Some(error.errno()), text: error.to_string() }
    }
}

/// The kernel's answer.
fn wait<T>(answer: impl Future<Output = Result<T, OvpnError>>) -> Result<T, Refused> {
    RUNTIME.block_on(answer).map_err(Refused::from)
}

/// A device of either kind, which takes the same commands.
pub(crate) enum Either {
    Kernel { client: OvpnClient, watch: Mutex<OvpnWatch>, index: u32 },
    Userspace { device: Device, told: Mutex<Receiver<Notification>> },
}

impl Either {
    /// Makes one in the calling thread's namespace.
    fn open(kind: Kind, name: &str, mode: Mode) -> Self {
        match kind {
            Kind::Kernel => RUNTIME.block_on(async {
                let client = OvpnClient::open().await.expect("this test needs the module ovpn");
                let watch = OvpnWatch::open().await.unwrap();
                let spec = OvpnDeviceSpec { name: name.into(), mode, own: false };
                let device = Kernel::new().unwrap().create_ovpn_device(&spec).await.unwrap();
                Self::Kernel { client, watch: Mutex::new(watch), index: device.index }
            }),
            Kind::Userspace => {
                let (sender, told) = channel();
                let events = move |event| {
                    if let Event::Notification(notification) = event {
                        let _ = sender.send(notification);
                    }
                };
                let mtu = MTU_DEFAULT as u16;
                let config =
                    DeviceConfig { name: name.into(), mode, mtu, path_mtu: 1_280, offloads: true };
                let device = Device::open(&config, Arc::new(events)).unwrap();
                Self::Userspace { device, told: Mutex::new(told) }
            }
        }
    }

    pub(crate) fn new_peer(
        &self,
        socket: &OwnedFd,
        attributes: &PeerAttributes,
    ) -> Result<(), Refused> {
        match self {
            Self::Kernel { client, index, .. } => {
                wait(client.new_peer(*index, socket.as_fd(), attributes))
            }
            Self::Userspace { device, .. } => {
                let socket = socket.try_clone().unwrap();
                device.new_peer(socket, attributes).map_err(Refused::from)
            }
        }
    }

    pub(crate) fn set_peer(&self, attributes: &PeerAttributes) -> Result<(), Refused> {
        match self {
            Self::Kernel { client, index, .. } => wait(client.set_peer(*index, attributes)),
            Self::Userspace { device, .. } => device.set_peer(attributes).map_err(Refused::from),
        }
    }

    pub(crate) fn peer(&self, id: u32) -> Result<PeerState, Refused> {
        match self {
            Self::Kernel { client, index, .. } => wait(client.peer(*index, id)),
            Self::Userspace { device, .. } => device.peer(id).map_err(Refused::from),
        }
    }

    pub(crate) fn delete_peer(&self, id: u32) -> Result<(), Refused> {
        match self {
            Self::Kernel { client, index, .. } => wait(client.delete_peer(*index, id)),
            Self::Userspace { device, .. } => device.delete_peer(id).map_err(Refused::from),
        }
    }

    pub(crate) fn new_key(&self, attributes: &KeyAttributes) -> Result<(), Refused> {
        match self {
            Self::Kernel { client, index, .. } => wait(client.new_key(*index, attributes)),
            Self::Userspace { device, .. } => device.new_key(attributes).map_err(Refused::from),
        }
    }

    pub(crate) fn key(&self, id: u32, slot: Slot) -> Result<KeyState, Refused> {
        match self {
            Self::Kernel { client, index, .. } => wait(client.key(*index, id, slot)),
            Self::Userspace { device, .. } => device.key(id, slot).map_err(Refused::from),
        }
    }

    pub(crate) fn swap_keys(&self, id: u32) -> Result<(), Refused> {
        match self {
            Self::Kernel { client, index, .. } => wait(client.swap_keys(*index, id)),
            Self::Userspace { device, .. } => device.swap_keys(id).map_err(Refused::from),
        }
    }

    pub(crate) fn delete_key(&self, id: u32, slot: Slot) -> Result<(), Refused> {
        match self {
            Self::Kernel { client, index, .. } => wait(client.delete_key(*index, id, slot)),
            Self::Userspace { device, .. } => device.delete_key(id, slot).map_err(Refused::from),
        }
    }

    /// Its next notification.
    fn told(&self) -> Notification {
        match self {
            Self::Kernel { watch, index, .. } => {
                let mut watch = watch.lock().unwrap();
                let next =
                    RUNTIME.block_on(async { tokio::time::timeout(limit(), watch.next()).await });
                match next.expect("a notice must come").unwrap() {
                    Watched::Notice(notice) => {
                        assert_eq!(notice.device, *index, "{notice:?}");
                        notice.what
                    }
                    Watched::Lost => panic!("no notice may be lost here"),
                }
            }
            Self::Userspace { told, .. } => {
                told.lock().unwrap().recv_timeout(limit()).expect("a notification must come")
            }
        }
    }
}

/// A host with a device. Its number is the last byte of its addresses, and its peer's id.
pub(crate) struct End {
    pub(crate) netns: Netns,
    pub(crate) number: u8,
    pub(crate) device: Either,
    outer: [IpAddr; 2],
    kind: Kind,
    mode: Mode,
}

/// Two hosts; the devices go before the namespaces.
pub(crate) struct Two {
    pub(crate) a: End,
    pub(crate) b: End,
    /// Sockets that the kernel's device uses, which ends its peers when they are closed.
    pub(crate) sockets: Vec<OwnedFd>,
    _sandbox: Sandbox,
}

impl Two {
    pub(crate) fn new(kinds: [Kind; 2], modes: [Mode; 2]) -> Self {
        let options = SandboxOptions { hosts: 2, ..SandboxOptions::default() };
        let sandbox = Sandbox::new(&options).unwrap();
        let end = |at: usize| {
            let host = sandbox.host(at);
            let outer = [host.ipv4().into(), host.ipv6().into()];
            End::new(host.netns().clone(), at as u8 + 1, outer, kinds[at], modes[at])
        };
        Self { a: end(0), b: end(1), sockets: Vec::new(), _sandbox: sandbox }
    }

    /// Makes each the other's peer, with a primary key whose id is 0.
    pub(crate) fn connect(&mut self, outer: Outer, cipher: Cipher) {
        let [here, there] = if outer.is_tcp() {
            self.connection(outer)
        } else {
            [&self.a, &self.b].map(|end| OwnedFd::from(end.udp(outer)))
        };
        self.a.meet(&self.b, &here, outer);
        self.b.meet(&self.a, &there, outer);
        self.a.new_key(&self.b, Slot::Primary, 0, cipher);
        self.b.new_key(&self.a, Slot::Primary, 0, cipher);
        self.sockets.extend([here, there]);
    }

    /// The ends of a new TCP connection, the first host's first.
    pub(crate) fn connection(&self, outer: Outer) -> [OwnedFd; 2] {
        let at = SocketAddr::new(self.b.address(outer).ip(), 0);
        let listener = self.b.within(|| TcpListener::bind(at).unwrap());
        let to = listener.local_addr().unwrap();
        let here = self.a.within(|| TcpStream::connect_timeout(&to, limit()).unwrap());
        let (there, _) = listener.accept().unwrap();
        [OwnedFd::from(here), OwnedFd::from(there)]
    }
}

impl End {
    fn new(netns: Netns, number: u8, outer: [IpAddr; 2], kind: Kind, mode: Mode) -> Self {
        let space = Namespace::open(std::path::Path::new(&netns.path())).unwrap();
        let device = run_in(&space, || Either::open(kind, DEVICE, mode)).unwrap();
        // Only the tests send: no router is solicited.
        netns.ip(&format!("link set {DEVICE} addrgenmode none")).unwrap();
        netns.ip(&format!("link set {DEVICE} mtu {MTU_DEFAULT} up")).unwrap();
        netns.ip(&format!("address add 10.8.0.{number}/24 dev {DEVICE}")).unwrap();
        netns.ip(&format!("-6 address add fd08::{number}/64 dev {DEVICE} nodad")).unwrap();
        Self { netns, number, device, outer, kind, mode }
    }

    /// A second device of the same kind, in mode p2p.
    pub(crate) fn another_device(&self) -> Either {
        let kind = self.kind;
        self.within(|| Either::open(kind, OTHER_DEVICE, Mode::P2p))
    }

    /// Whether its device has a carrier.
    pub(crate) fn has_carrier(&self) -> bool {
        let shown = self.netns.ip(&format!("link show dev {DEVICE}")).unwrap().stdout;
        !shown.contains("NO-CARRIER")
    }

    pub(crate) fn within<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let space = Namespace::open(std::path::Path::new(&self.netns.path())).unwrap();
        run_in(&space, f).unwrap()
    }

    /// Its address on the wire, unless it has moved.
    pub(crate) fn address(&self, outer: Outer) -> SocketAddr {
        SocketAddr::new(self.outer[usize::from(outer.is_ipv6())], PORT)
    }

    /// Moves it to another address on the wire, which is returned.
    pub(crate) fn moves(&self, outer: Outer) -> SocketAddr {
        let old = self.address(outer).ip();
        let (new, bits, now) = match old {
            IpAddr::V4(ip) => {
                let [x, y, z, _] = ip.octets();
                (IpAddr::from([x, y, z, MOVED_TO]), 24, "")
            }
            IpAddr::V6(ip) => {
                let mut octets = ip.octets();
                octets[15] = MOVED_TO;
                (IpAddr::from(octets), 64, "nodad")
            }
        };
        self.netns.ip(&format!("address del {old}/{bits} dev eth0")).unwrap();
        self.netns.ip(&format!("address add {new}/{bits} dev eth0 {now}")).unwrap();
        SocketAddr::new(new, PORT)
    }

    /// A socket bound to no address: the system chooses the only one.
    fn udp(&self, outer: Outer) -> UdpSocket {
        let any: IpAddr = match outer.is_ipv6() {
            true => Ipv6Addr::UNSPECIFIED.into(),
            false => Ipv4Addr::UNSPECIFIED.into(),
        };
        self.within(|| UdpSocket::bind((any, PORT)).unwrap())
    }

    /// The id under which it knows another.
    pub(crate) fn id_of(&self, other: &Self) -> u32 {
        0x0a_0b00 + u32::from(other.number) * 16 + u32::from(self.number)
    }

    /// The other becomes its peer, without a key.
    pub(crate) fn meet(&self, other: &Self, socket: &OwnedFd, outer: Outer) {
        let mut attributes = PeerAttributes {
            id: Some(self.id_of(other)),
            tx_id: Some(other.id_of(self)),
            ..PeerAttributes::default()
        };
        if !outer.is_tcp() {
            attributes.remote_port = Some(PORT);
            match other.address(outer).ip() {
                IpAddr::V4(ipv4) => attributes.remote_ipv4 = Some(ipv4),
                IpAddr::V6(ipv6) => attributes.remote_ipv6 = Some(ipv6),
            }
        }
        if self.mode == Mode::Mp {
            attributes.vpn_ipv4 = Some(Ipv4Addr::new(10, 8, 0, other.number));
            attributes.vpn_ipv6 = Some(format!("fd08::{}", other.number).parse().unwrap());
        }
        self.within(|| self.device.new_peer(socket, &attributes)).unwrap();
    }

    /// Installs a key that no other number gives. Its id is the number's last three bits.
    pub(crate) fn new_key(&self, of: &Self, slot: Slot, number: u32, cipher: Cipher) {
        let direction = |from: u8, to: u8| {
            let mixed = from.wrapping_mul(31) ^ to ^ (number as u8).wrapping_mul(37);
            Some(KeyDirection {
                cipher_key: (0..cipher.1).map(|at| (at as u8) ^ mixed).collect(),
                nonce_tail: [from, to, number as u8, 4, 5, 6, 7, 8],
            })
        };
        let key = KeyAttributes {
            peer_id: Some(self.id_of(of)),
            slot: Some(slot),
            key_id: Some(number & KEY_ID_MAX),
            cipher: Some(cipher.0),
            encrypt: direction(self.number, of.number),
            decrypt: direction(of.number, self.number),
        };
        self.device.new_key(&key).unwrap();
    }

    pub(crate) fn key(&self, of: &Self, slot: Slot) -> Result<KeyState, Refused> {
        self.device.key(self.id_of(of), slot)
    }

    pub(crate) fn swap_keys(&self, of: &Self) {
        self.device.swap_keys(self.id_of(of)).unwrap();
    }

    pub(crate) fn delete_key(&self, of: &Self, slot: Slot) -> Result<(), Refused> {
        self.device.delete_key(self.id_of(of), slot)
    }

    pub(crate) fn keepalive(&self, of: &Self, interval_s: u32, timeout_s: u32) {
        let attributes = PeerAttributes {
            id: Some(self.id_of(of)),
            keepalive_interval_s: Some(interval_s),
            keepalive_timeout_s: Some(timeout_s),
            ..PeerAttributes::default()
        };
        self.device.set_peer(&attributes).unwrap();
    }

    /// Packets to the other device bear this id from now on.
    pub(crate) fn set_tx_id(&self, to: &Self, tx_id: u32) {
        let attributes = PeerAttributes {
            id: Some(self.id_of(to)),
            tx_id: Some(tx_id),
            ..PeerAttributes::default()
        };
        self.device.set_peer(&attributes).unwrap();
    }

    pub(crate) fn peer(&self, of: &Self) -> Result<PeerState, Refused> {
        self.device.peer(self.id_of(of))
    }

    pub(crate) fn delete_peer(&self, of: &Self) -> Result<(), Refused> {
        self.device.delete_peer(self.id_of(of))
    }

    /// The device's next notification.
    pub(crate) fn told(&self) -> Notification {
        self.device.told()
    }

    /// Drops of a device in userspace, by reason.
    pub(crate) fn drops(&self) -> Vec<(DropReason, u64)> {
        let Either::Userspace { device, .. } = &self.device else { return Vec::new() };
        let all = DropReason::ALL.iter().map(|reason| (*reason, device.dropped(*reason)));
        all.filter(|(_, count)| *count > 0).collect()
    }

    /// Packets and bytes that have left by the device, as the system counts them for its link.
    pub(crate) fn sent_by_link(&self) -> (u64, u64) {
        let shown = self.netns.ip(&format!("-s -j link show dev {DEVICE}")).unwrap();
        let links = shown.json().unwrap();
        let count = |what: &str| links[0]["stats64"]["tx"][what].as_u64().unwrap();
        (count("packets"), count("bytes"))
    }

    /// Pings another, small and nearly full, over both families; all must be answered.
    pub(crate) fn pings(&self, other: &Self) {
        for (to, size) in [
            (format!("10.8.0.{}", other.number), "56"),
            (format!("fd08::{}", other.number), "1300"),
        ] {
            let words = ["ping", "-c", "3", "-i", "0.1", "-W", "20", "-s", size, &to];
            let told = self.netns.exec(&words).unwrap().stdout;
            assert!(told.contains(" 3 received"), "{told}");
        }
    }

    /// Pings another once, which must go unanswered.
    pub(crate) fn pings_in_vain(&self, other: &Self) {
        let to = format!("10.8.0.{}", other.number);
        let told = self.netns.exec(&["ping", "-c", "1", "-W", "1", &to]).unwrap().stdout;
        assert!(told.contains(" 0 received"), "{told}");
    }

    /// Sends bytes to another over TCP; super-packets at the end in userspace.
    pub(crate) fn streams(&self, to: &Self, bytes: &[u8]) {
        let address = Ipv4Addr::new(10, 8, 0, to.number);
        let listener = to.within(|| TcpListener::bind((address, 0)).unwrap());
        let target = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_read_timeout(Some(limit())).unwrap();
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                got
            });
            let mut stream = self.within(|| TcpStream::connect_timeout(&target, limit()).unwrap());
            stream.write_all(bytes).unwrap();
            drop(stream);
            assert!(receiver.join().unwrap() == bytes, "a stream arrived changed");
        });
    }
}
