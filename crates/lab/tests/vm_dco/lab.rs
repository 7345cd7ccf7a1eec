//! Two hosts, and a device on each, the kernel's or one in userspace, that is asked alike.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use tokio::runtime::Runtime;
use weft::sandbox::{Netns, Sandbox, SandboxOptions};
use weft_engine::DropReason;
use weft_engine::dco::{Device, DeviceConfig, Event};
use weft_io::namespace::{Namespace, run_in};
use weft_kernel::Kernel;
use weft_kernel::ovpn::{OvpnClient, OvpnDeviceSpec, OvpnWatch, Watched};
use weft_lab::net::slowness;
use weft_openvpn::device::{
    CipherAlgorithm, KeyAttributes, KeyDirection, KeyState, MTU_DEFAULT, Mode, Notification,
    PeerAttributes, PeerState, Slot,
};

pub(crate) const DEVICE: &str = "dco0";
/// The inner and the outer port that tests use.
pub(crate) const PORT: u16 = 1194;
/// How long anything may take on a fast machine.
const PATIENCE: Duration = Duration::from_secs(10);

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
});

/// Which of the two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Kernel,
    Userspace,
}

/// What carries the packets between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outer {
    Udp4,
    Udp6,
    Tcp,
}

pub(crate) type Cipher = (CipherAlgorithm, usize);

pub(crate) const CIPHERS: [Cipher; 4] = [
    (CipherAlgorithm::AesGcm, 16),
    (CipherAlgorithm::AesGcm, 24),
    (CipherAlgorithm::AesGcm, 32),
    (CipherAlgorithm::ChaCha20Poly1305, 32),
];

/// A host with a device. Its number is the last byte of its addresses, and its peer's id.
pub(crate) struct End {
    pub(crate) netns: Netns,
    pub(crate) number: u8,
    outer: [IpAddr; 2],
    device: Either,
    mode: Mode,
}

enum Either {
    Kernel { client: OvpnClient, watch: Mutex<OvpnWatch>, index: u32 },
    Userspace { device: Device, told: Mutex<Receiver<Notification>> },
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

    /// Each becomes the other's peer, with a primary key whose id is 0.
    pub(crate) fn connect(&mut self, outer: Outer, cipher: Cipher) {
        let (here, there): (OwnedFd, OwnedFd) = match outer {
            Outer::Udp4 | Outer::Udp6 => (self.a.udp(outer).into(), self.b.udp(outer).into()),
            Outer::Tcp => {
                let listener =
                    self.b.within(|| TcpListener::bind((self.b.outer[0], PORT)).unwrap());
                let to = listener.local_addr().unwrap();
                let limit = PATIENCE * slowness();
                let here = self.a.within(|| TcpStream::connect_timeout(&to, limit).unwrap());
                (here.into(), listener.accept().unwrap().0.into())
            }
        };
        self.a.meet(&self.b, &here, outer);
        self.b.meet(&self.a, &there, outer);
        self.a.new_key(&self.b, Slot::Primary, 0, cipher);
        self.b.new_key(&self.a, Slot::Primary, 0, cipher);
        self.sockets.extend([here, there]);
    }
}

impl End {
    fn new(netns: Netns, number: u8, outer: [IpAddr; 2], kind: Kind, mode: Mode) -> Self {
        let space = Namespace::open(std::path::Path::new(&netns.path())).unwrap();
        let device = run_in(&space, || match kind {
            Kind::Kernel => RUNTIME.block_on(async {
                let client = OvpnClient::open().await.expect("this test needs the module ovpn");
                let watch = OvpnWatch::open().await.unwrap();
                let spec = OvpnDeviceSpec { name: DEVICE.into(), mode, own: false };
                let device = Kernel::new().unwrap().create_ovpn_device(&spec).await.unwrap();
                Either::Kernel { client, watch: Mutex::new(watch), index: device.index }
            }),
            Kind::Userspace => {
                let (sender, told) = channel();
                let events = move |event| {
                    if let Event::Notification(notification) = event {
                        let _ = sender.send(notification);
                    }
                };
                let mtu = MTU_DEFAULT as u16;
                let config = DeviceConfig { name: DEVICE.into(), mode, mtu, offloads: true };
                let device = Device::open(&config, Arc::new(events)).unwrap();
                Either::Userspace { device, told: Mutex::new(told) }
            }
        })
        .unwrap();
        // Nothing but what the tests send: no router is looked for.
        netns.ip(&format!("link set {DEVICE} addrgenmode none")).unwrap();
        netns.ip(&format!("link set {DEVICE} mtu {MTU_DEFAULT} up")).unwrap();
        netns.ip(&format!("address add 10.8.0.{number}/24 dev {DEVICE}")).unwrap();
        netns.ip(&format!("-6 address add fd08::{number}/64 dev {DEVICE} nodad")).unwrap();
        Self { netns, number, outer, device, mode }
    }

    pub(crate) fn within<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let space = Namespace::open(std::path::Path::new(&self.netns.path())).unwrap();
        run_in(&space, f).unwrap()
    }

    /// Where it is on the wire.
    pub(crate) fn address(&self, outer: Outer) -> SocketAddr {
        SocketAddr::new(self.outer[usize::from(outer == Outer::Udp6)], PORT)
    }

    /// A socket bound to no address, so that the system chooses the one that there is.
    fn udp(&self, outer: Outer) -> UdpSocket {
        let any: IpAddr = match outer {
            Outer::Udp6 => Ipv6Addr::UNSPECIFIED.into(),
            _ => Ipv4Addr::UNSPECIFIED.into(),
        };
        self.within(|| UdpSocket::bind((any, PORT)).unwrap())
    }

    /// The id under which it knows another.
    pub(crate) fn id_of(&self, other: &Self) -> u32 {
        0x0a_0b00 + u32::from(other.number) * 16 + u32::from(self.number)
    }

    fn meet(&self, other: &Self, socket: &OwnedFd, outer: Outer) {
        let mut attributes = PeerAttributes {
            id: Some(self.id_of(other)),
            tx_id: Some(other.id_of(self)),
            ..PeerAttributes::default()
        };
        if outer != Outer::Tcp {
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
        self.new_peer(socket, &attributes).unwrap();
    }

    /// The error number, if it is refused.
    pub(crate) fn new_peer(
        &self,
        socket: &OwnedFd,
        attributes: &PeerAttributes,
    ) -> Result<(), Option<i32>> {
        match &self.device {
            Either::Kernel { client, index, .. } => {
                use std::os::fd::AsFd;
                let made = client.new_peer(*index, socket.as_fd(), attributes);
                RUNTIME.block_on(made).map_err(|error| error.errno())
            }
            Either::Userspace { device, .. } => {
                let socket = socket.try_clone().unwrap();
                device.new_peer(socket, attributes).map_err(|error| Some(error.errno()))
            }
        }
    }

    pub(crate) fn new_key(&self, of: &Self, slot: Slot, key_id: u32, cipher: Cipher) {
        let direction = |from: u8, to: u8| {
            let byte = |at: usize| (at as u8) ^ from.wrapping_mul(31) ^ to ^ (key_id as u8) << 5;
            Some(KeyDirection {
                cipher_key: (0..cipher.1).map(byte).collect(),
                nonce_tail: [from, to, key_id as u8, 4, 5, 6, 7, 8],
            })
        };
        let key = KeyAttributes {
            peer_id: Some(self.id_of(of)),
            slot: Some(slot),
            key_id: Some(key_id),
            cipher: Some(cipher.0),
            encrypt: direction(self.number, of.number),
            decrypt: direction(of.number, self.number),
        };
        match &self.device {
            Either::Kernel { client, index, .. } => {
                RUNTIME.block_on(client.new_key(*index, &key)).unwrap();
            }
            Either::Userspace { device, .. } => device.new_key(&key).unwrap(),
        }
    }

    pub(crate) fn key(&self, of: &Self, slot: Slot) -> Result<KeyState, Option<i32>> {
        let id = self.id_of(of);
        match &self.device {
            Either::Kernel { client, index, .. } => {
                RUNTIME.block_on(client.key(*index, id, slot)).map_err(|error| error.errno())
            }
            Either::Userspace { device, .. } => {
                device.key(id, slot).map_err(|error| Some(error.errno()))
            }
        }
    }

    pub(crate) fn swap_keys(&self, of: &Self) {
        let id = self.id_of(of);
        match &self.device {
            Either::Kernel { client, index, .. } => {
                RUNTIME.block_on(client.swap_keys(*index, id)).unwrap();
            }
            Either::Userspace { device, .. } => device.swap_keys(id).unwrap(),
        }
    }

    pub(crate) fn delete_key(&self, of: &Self, slot: Slot) -> Result<(), Option<i32>> {
        let id = self.id_of(of);
        match &self.device {
            Either::Kernel { client, index, .. } => {
                RUNTIME.block_on(client.delete_key(*index, id, slot)).map_err(|error| error.errno())
            }
            Either::Userspace { device, .. } => {
                device.delete_key(id, slot).map_err(|error| Some(error.errno()))
            }
        }
    }

    pub(crate) fn keepalive(&self, of: &Self, interval_s: u32, timeout_s: u32) {
        let attributes = PeerAttributes {
            id: Some(self.id_of(of)),
            keepalive_interval_s: Some(interval_s),
            keepalive_timeout_s: Some(timeout_s),
            ..PeerAttributes::default()
        };
        match &self.device {
            Either::Kernel { client, index, .. } => {
                RUNTIME.block_on(client.set_peer(*index, &attributes)).unwrap();
            }
            Either::Userspace { device, .. } => device.set_peer(&attributes).unwrap(),
        }
    }

    pub(crate) fn peer(&self, of: &Self) -> Result<PeerState, Option<i32>> {
        let id = self.id_of(of);
        match &self.device {
            Either::Kernel { client, index, .. } => {
                RUNTIME.block_on(client.peer(*index, id)).map_err(|error| error.errno())
            }
            Either::Userspace { device, .. } => {
                device.peer(id).map_err(|error| Some(error.errno()))
            }
        }
    }

    pub(crate) fn delete_peer(&self, of: &Self) -> Result<(), Option<i32>> {
        let id = self.id_of(of);
        match &self.device {
            Either::Kernel { client, index, .. } => {
                RUNTIME.block_on(client.delete_peer(*index, id)).map_err(|error| error.errno())
            }
            Either::Userspace { device, .. } => {
                device.delete_peer(id).map_err(|error| Some(error.errno()))
            }
        }
    }

    /// What the device tells next.
    pub(crate) fn told(&self) -> Notification {
        let limit = PATIENCE * slowness();
        match &self.device {
            Either::Kernel { watch, index, .. } => {
                let mut watch = watch.lock().unwrap();
                let next =
                    RUNTIME.block_on(async { tokio::time::timeout(limit, watch.next()).await });
                match next.expect("a notice must come").unwrap() {
                    Watched::Notice(notice) => {
                        assert_eq!(notice.device, *index, "{notice:?}");
                        notice.what
                    }
                    Watched::Lost => panic!("no notice may be lost here"),
                }
            }
            Either::Userspace { told, .. } => {
                told.lock().unwrap().recv_timeout(limit).expect("a notification must come")
            }
        }
    }

    /// What a device in userspace has dropped, by reason.
    pub(crate) fn drops(&self) -> Vec<(DropReason, u64)> {
        let Either::Userspace { device, .. } = &self.device else { return Vec::new() };
        let all = DropReason::ALL.iter().map(|reason| (*reason, device.dropped(*reason)));
        all.filter(|(_, count)| *count > 0).collect()
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

    /// Sends bytes to another over TCP; super-packets at the end in userspace.
    pub(crate) fn streams(&self, to: &Self, bytes: &[u8]) {
        let address = Ipv4Addr::new(10, 8, 0, to.number);
        let listener = to.within(|| TcpListener::bind((address, 0)).unwrap());
        let target = listener.local_addr().unwrap();
        let limit = PATIENCE * slowness();
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.set_read_timeout(Some(limit)).unwrap();
                let mut got = Vec::new();
                stream.read_to_end(&mut got).unwrap();
                got
            });
            let mut stream = self.within(|| TcpStream::connect_timeout(&target, limit).unwrap());
            stream.write_all(bytes).unwrap();
            drop(stream);
            assert!(receiver.join().unwrap() == bytes, "a stream arrived changed");
        });
    }
}
