//! Two kernel engines that move format `ovpn` between their hosts, without IPsec: hosts are network
//! namespaces on one underlay. Referees: ping, iproute2 and nft.
//!
//! Needs root and a kernel with the modules ovpn (with transmit ids of peers), vxlan and nf_tables. Runs in the VM
//! lab, one test at a time (`--test-threads 1`).
// Engines' reports go to the log.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

#[path = "common/space.rs"]
mod space;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use weft_crypto::{Cipher, PeerId, SaKey};
use weft_io::namespace::run_in;
use weft_io::tap::{Tap, TapOptions};
use weft_kernel::Kernel;
use weft_kernel::engine::{
    DATA_CHANNEL_DEVICE, DATA_CHANNEL_PORT, ENCAPSULATION_PORT, KernelEngine, KernelEngineConfig,
    Support, SwitchKind, probe_mac,
};
use weft_kernel::ovpn::{OvpnClient, OvpnDeviceSpec};
use weft_openvpn::device::{Mode, PeerAttributes, Slot};
use weft_path::{
    Encapsulation, Endpoint, EngineCommand, EngineEvent, EngineKind, InboundSa, Mac, OutboundSa,
    PathId, Vni,
};

use crate::space::Space;

const PATH: PathId = PathId(1);
const VNI: Vni = Vni(1);
const SWITCH: &str = "weft";
const TAP: &str = "weft-tap";
const MTU: u16 = 1_356;
/// How long an event may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// The packets that an SA seals before more is asked for, and at most.
type Limits = (u64, u64);
const AMPLE: Limits = (1 << 30, 1 << 31);

/// A host with its engine, which works on only while something is asked of the host: its task has to run
/// in the host's namespace.
struct Host {
    number: u8,
    peer: PeerId,
    space: Space,
    runtime: Runtime,
    engine: KernelEngine,
    events: Mutex<Receiver<EngineEvent>>,
    _tap: Tap,
    _underlay: Arc<Space>,
}

/// Two hosts with the addresses 192.0.2.number, and 10.32.0.number on their switches.
fn hosts() -> [Host; 2] {
    let underlay = Arc::new(Space::new());
    underlay.run("ip link add u type bridge");
    underlay.run("ip link set u up addrgenmode none");
    [1, 2].map(|number| Host::new(number, &underlay))
}

impl Host {
    fn new(number: u8, underlay: &Arc<Space>) -> Self {
        let space = Space::new();
        let target = format!("/proc/{}/fd/{}", std::process::id(), space.0.as_fd().as_raw_fd());
        underlay.run(&format!("ip link add u{number} type veth peer name eth0 netns {target}"));
        underlay.run(&format!("ip link set u{number} master u up addrgenmode none"));
        space.run(&format!("ip address add 192.0.2.{number}/24 dev eth0"));
        space.run("ip link set eth0 up");
        let options = TapOptions::new(TAP);
        let tap = run_in(&space.0, || Tap::open(&options).unwrap()).unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let peer = PeerId::from_bytes([number; 32]);
        let (sender, events) = channel();
        let start = async {
            let report = move |event: EngineEvent| _ = sender.send(event);
            KernelEngine::start(Kernel::new().unwrap(), config(peer), report).await.unwrap()
        };
        let engine = run_in(&space.0, || runtime.block_on(start)).unwrap();
        space.run(&format!("ip address add 10.32.0.{number}/24 dev {SWITCH}"));
        let (events, _underlay) = (Mutex::new(events), Arc::clone(underlay));
        Self { number, peer, space, runtime, engine, events, _tap: tap, _underlay }
    }

    fn enter<T: Send>(&self, inside: impl Future<Output = T> + Send) -> T {
        run_in(&self.space.0, || self.runtime.block_on(inside)).unwrap()
    }

    fn apply(&self, commands: Vec<EngineCommand>) {
        self.enter(self.engine.apply(commands));
    }

    fn address(&self) -> IpAddr {
        IpAddr::from([192, 0, 2, self.number])
    }

    /// The SPI of its inbound SAs.
    fn spi(&self, generation: u8) -> u32 {
        0x4800_0000 | u32::from(generation % 8) << 24 | u32::from(self.number) << 8
    }

    fn key(&self, generation: u8) -> SaKey {
        SaKey::for_ovpn([16 * self.number + generation; 40])
    }

    fn receive_from(&self, other: &Self, generation: u8) {
        let sa = InboundSa {
            spi: self.spi(generation),
            lane: 0,
            cipher: cipher(generation),
            key: self.key(generation),
            encapsulation: Encapsulation::Udp,
            remote_engine: EngineKind::Kernel,
            lifetime: Duration::from_secs(3_600),
        };
        let (engine, peer, remote) = (EngineKind::Kernel, other.peer, other.address());
        self.apply(vec![EngineCommand::InstallInbound { engine, peer, path: PATH, sa, remote }]);
    }

    fn send_to(&self, other: &Self, generation: u8, limits: Limits) {
        self.send_at(other, other.address(), generation, limits);
    }

    fn send_at(&self, other: &Self, address: IpAddr, generation: u8, limits: Limits) {
        let sa = OutboundSa {
            spi: other.spi(generation),
            lane: 0,
            cipher: cipher(generation),
            key: other.key(generation),
            rco: true,
            iv_salt: 0,
            packets_soft: limits.0,
            packets_hard: limits.1,
            bytes_soft: u64::MAX,
            bytes_hard: u64::MAX,
            encapsulation: Encapsulation::Udp,
            remote_engine: EngineKind::Kernel,
            lifetime: Duration::from_secs(3_600),
        };
        let remote = SocketAddr::new(address, DATA_CHANNEL_PORT);
        let (engine, peer, path) = (EngineKind::Kernel, other.peer, PATH);
        self.apply(vec![EngineCommand::InstallOutbound { engine, peer, path, sa, remote }]);
    }

    /// Removes the path's outbound SA and these generations of inbound ones.
    fn clear(&self, generations: &[u8]) {
        let inbound = generations.iter();
        let inbound = inbound.map(|it| EngineCommand::RemoveInbound { spi: self.spi(*it) });
        self.apply(inbound.chain([EngineCommand::RemoveOutbound { path: PATH }]).collect());
    }

    /// Packets sent to its peer and received from it since the first reading.
    fn carried(&self) -> [u64; 2] {
        let traffic = self.enter(self.engine.traffic());
        traffic.first().map_or([0; 2], |(_, it)| [it.sent.packets, it.received.packets])
    }

    /// Frames for the other host's switch take the path.
    fn lead_to(&self, other: &Self) {
        let addresses = vec![IpAddr::from([10, 32, 0, other.number])];
        let endpoint = Endpoint { mac: Mac(probe_mac(&other.peer)), addresses };
        let add = vec![(endpoint, other.peer)];
        self.apply(vec![
            EngineCommand::SetEndpoints { vni: VNI, add, remove: Vec::new() },
            EngineCommand::BindPath { peer: other.peer, path: Some(PATH) },
        ]);
    }

    /// Waits for an event; others are left aside.
    fn told(&self, wanted: impl Fn(&EngineEvent) -> bool + Send + Sync) -> EngineEvent {
        self.enter(async {
            let end = Instant::now() + PATIENCE;
            while Instant::now() < end {
                let event = self.events.lock().unwrap().try_recv();
                match event {
                    Ok(event) if wanted(&event) => return event,
                    Ok(event) => eprintln!("{}: {event:?}", self.number),
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
            panic!("host {} must be told of something", self.number)
        })
    }

    fn pings(&self, other: &Self) {
        let told = self.space.run(&format!("ping -c 5 -i 0.2 -W 20 10.32.0.{}", other.number));
        assert!(told.contains(" 5 received"), "{told}");
    }

    /// Acts as another program on the host. The engine does nothing meanwhile.
    fn beside<T: Send>(&self, inside: impl Future<Output = T> + Send) -> T {
        let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
        run_in(&self.space.0, || runtime().block_on(inside)).unwrap()
    }

    /// The peers that its device has at this moment.
    fn device_peers(&self) -> usize {
        self.device_peer_ids().len()
    }

    fn device_peer_ids(&self) -> Vec<u32> {
        self.beside(async {
            let client = OvpnClient::open().await.unwrap();
            let peers = client.peers(channel_device().await).await.unwrap();
            let mut ids: Vec<u32> = peers.into_iter().map(|peer| peer.id).collect();
            ids.sort_unstable();
            ids
        })
    }

    /// Waits until the leaving peers are gone and this many are left.
    fn wait_for_peers(&self, left: usize) {
        let end = Instant::now() + 5 * PATIENCE;
        while self.device_peers() != left {
            assert!(Instant::now() < end, "{} peers are there still", self.device_peers());
            self.enter(async { tokio::time::sleep(Duration::from_millis(500)).await });
        }
    }

    fn has_device(&self) -> bool {
        self.space.succeeds(&format!("ip link show {DATA_CHANNEL_DEVICE}"))
    }
}

/// The index of the engine's device in this namespace.
async fn channel_device() -> u32 {
    Kernel::new().unwrap().ovpn_device(DATA_CHANNEL_DEVICE).await.unwrap().unwrap().index
}

fn config(local: PeerId) -> KernelEngineConfig {
    KernelEngineConfig {
        local,
        vni: VNI,
        device: SWITCH.into(),
        tap: TAP.into(),
        mac: probe_mac(&local),
        mtu: MTU,
        host: None,
        encapsulation_port: ENCAPSULATION_PORT,
        data_channel_port: DATA_CHANNEL_PORT,
        keeper: None,
        switch: SwitchKind::Bridge,
        keylog: None,
        moves: true,
        esp: false,
        ovpn: true,
        plain: false,
        copy_dscp: false,
    }
}

/// Both, in turn.
fn cipher(generation: u8) -> Cipher {
    if generation.is_multiple_of(2) { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 }
}

/// Both ends receive before either sends.
fn join(a: &Host, b: &Host, generation: u8, limits: Limits) {
    a.receive_from(b, generation);
    b.receive_from(a, generation);
    a.send_to(b, generation, limits);
    b.send_to(a, generation, AMPLE);
}

fn joined() -> [Host; 2] {
    let [a, b] = hosts();
    join(&a, &b, 0, AMPLE);
    a.lead_to(&b);
    b.lead_to(&a);
    [a, b]
}

#[test]
fn frames_and_probes_cross_and_nothing_is_left_behind() {
    let [a, b] = hosts();
    let support = a.engine.support().borrow().clone();
    let Support::Ready { esp: Err(_), ovpn: Ok(ciphers), lanes_max: 1 } = support else {
        panic!("{support:?}");
    };
    assert_eq!(ciphers, [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305]);
    assert!(!a.has_device(), "no path needs it yet");
    join(&a, &b, 0, AMPLE);
    assert!(a.has_device() && b.has_device());
    for (candidate, probe) in [(true, 7), (false, 8)] {
        let mtu = 1_300;
        a.apply(vec![EngineCommand::SendProbe { path: PATH, probe, mtu, candidate }]);
        let (peer, path) = (a.peer, PATH);
        let expected = EngineEvent::ProbeReceived { peer, path, probe, mtu, candidate };
        b.told(|event| *event == expected);
    }
    a.lead_to(&b);
    b.lead_to(&a);
    a.pings(&b);
    b.pings(&a);
    let traffic = a.enter(a.engine.traffic());
    let [(peer, carried)] = traffic[..] else { panic!("{traffic:?}") };
    assert_eq!(peer, b.peer);
    assert!(carried.sent.packets >= 10 && carried.received.packets >= 10, "{carried:?}");
    // Nothing else takes the device, and nothing of the overlay another.
    let target = "fd77:6566:7481:202:202:202:202:202";
    assert!(!a.space.succeeds(&format!("ping -6 -c 1 -W 2 {target}")));
    // A reader of the counters does not wait for a slow `nft`, and gets the previous counts.
    let counted = (0..300).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        a.enter(a.engine.counters()).guard.is_some_and(|guard| guard.channel.packets >= 1)
    });
    assert!(counted, "{:?}", a.enter(a.engine.counters()));
    a.enter(a.engine.stop());
    assert!(!a.has_device());
    assert!(!a.space.succeeds("nft list table inet weft-guard"));
    assert!(a.space.run("ip -6 route show").lines().all(|line| !line.contains("fd77:")));
}

#[test]
fn rekeys_lose_nothing() {
    let [a, b] = joined();
    std::thread::scope(|scope| {
        let line = "ping -c 200 -i 0.1 -W 20 10.32.0.2";
        let pinging = scope.spawn(|| a.space.run(line));
        for generation in 1..10 {
            std::thread::sleep(Duration::from_secs(1));
            // Packets in flight on the last SA but one have arrived.
            for host in [&a, &b].into_iter().filter(|_| generation > 1) {
                let spi = host.spi(generation - 2);
                host.apply(vec![EngineCommand::RemoveInbound { spi }]);
            }
            join(&a, &b, generation, AMPLE);
        }
        let told = pinging.join().unwrap();
        assert!(told.contains(" 200 received"), "{told}");
    });
}

#[test]
fn limits_are_told_and_kept() {
    let [a, b] = joined();
    join(&a, &b, 1, (20, 150));
    let spi = b.spi(1);
    let ping = |count: u32| a.space.succeeds(&format!("ping -q -c {count} -i 0.05 -W 2 10.32.0.2"));
    assert!(ping(30));
    let near = EngineEvent::OutboundNearLimit { path: PATH, spi };
    a.told(|event| *event == near);
    ping(150);
    let exhausted = EngineEvent::OutboundExhausted { path: PATH, spi };
    a.told(|event| *event == exhausted);
    assert!(!ping(3), "nothing more is sealed");
    join(&a, &b, 2, AMPLE);
    a.pings(&b);
}

#[test]
fn a_host_that_moves_is_heard_and_followed() {
    let [a, b] = joined();
    a.pings(&b);
    a.space.run("ip address add 192.0.2.101/24 dev eth0");
    a.space.run("ip address del 192.0.2.1/24 dev eth0");
    a.space.succeeds("ip address add 192.0.2.101/24 dev eth0");
    // The answers go to where the host was.
    assert!(!a.space.succeeds("ping -c 3 -i 0.2 -W 2 10.32.0.2"));
    let remote = SocketAddr::new(IpAddr::from([192, 0, 2, 101]), DATA_CHANNEL_PORT);
    let moved = EngineEvent::RemoteMoved { path: PATH, remote };
    b.told(|event| *event == moved);
    b.apply(vec![EngineCommand::SetRemote { path: PATH, remote }]);
    a.pings(&b);
}

#[test]
fn traffic_counters_outlive_keys_and_peers() {
    let [a, b] = joined();
    let mut before = a.carried();
    let mut grown = |a: &Host| {
        let now = a.carried();
        assert!((0..2).all(|way| now[way] >= before[way] + 5), "{before:?}, {now:?}");
        before = now;
    };
    a.pings(&b);
    grown(&a);
    a.pings(&b);
    join(&a, &b, 1, AMPLE);
    grown(&a);
    // The peers go, with counts that have not been read yet.
    a.pings(&b);
    a.clear(&[0, 1]);
    b.clear(&[0, 1]);
    join(&a, &b, 2, AMPLE);
    grown(&a);
    a.pings(&b);
    grown(&a);
}

/// The SPI of a host's inbound SA from one of many.
fn spi(number: u8) -> u32 {
    0x4800_0000 | u32::from(number) << 8
}

/// Makes a host receive from one of many.
fn receive(number: u8) -> EngineCommand {
    EngineCommand::InstallInbound {
        engine: EngineKind::Kernel,
        remote: IpAddr::from([192, 0, 2, number]),
        peer: PeerId::from_bytes([number; 32]),
        path: PathId(number.into()),
        sa: InboundSa {
            spi: spi(number),
            lane: 0,
            cipher: Cipher::Aes256Gcm,
            key: SaKey::for_ovpn([number; 40]),
            encapsulation: Encapsulation::Udp,
            remote_engine: EngineKind::Kernel,
            lifetime: Duration::from_secs(3_600),
        },
    }
}

#[test]
fn peers_that_leave_hold_up_nobody_and_make_way() {
    const MANY: usize = 100;
    const BACK: usize = 10;
    let [a, b] = joined();
    let numbers = 100..100 + MANY as u8;
    a.apply(numbers.clone().map(receive).collect());
    assert_eq!(a.device_peers(), 2 + MANY);
    a.apply(numbers.clone().map(|it| EngineCommand::RemoveInbound { spi: spi(it) }).collect());
    // The kernel takes tens of milliseconds for each, and nothing waits for them.
    let leaving = a.device_peers();
    assert!(leaving > 2 + MANY / 2, "{leaving} peers are there still");
    a.apply(vec![EngineCommand::SendProbe { path: PATH, probe: 7, mtu: MTU, candidate: false }]);
    b.told(|event| matches!(event, EngineEvent::ProbeReceived { probe: 7, .. }));
    let leaving = a.device_peers();
    assert!(leaving > 2 + BACK, "{leaving} peers are there still");
    a.pings(&b);
    // Some come back under the ids of peers that have not left yet.
    a.apply(numbers.rev().take(BACK).map(receive).collect());
    a.wait_for_peers(2 + BACK);
    a.enter(a.engine.repair());
    assert_eq!(a.device_peers(), 2 + BACK);
    a.pings(&b);
}

/// Asks the host's engine for nothing, for so long, without a pause.
fn press(host: &Host, how_long: Duration) {
    host.enter(async {
        let end = Instant::now() + how_long;
        while Instant::now() < end {
            host.engine.apply(Vec::new()).await;
        }
    });
}

#[test]
fn peers_leave_while_orders_come_without_end() {
    const MANY: u8 = 40;
    let [a, b] = joined();
    let numbers = 100..100 + MANY;
    a.apply(numbers.clone().map(receive).collect());
    a.apply(numbers.map(|it| EngineCommand::RemoveInbound { spi: spi(it) }).collect());
    let mut left = a.device_peers();
    assert!(left > 2 + usize::from(MANY) / 2, "{left} peers are there still");
    // If orders put a deletion off, there is at most one each time, at the beginning.
    for _ in 0..12 {
        press(&a, Duration::from_secs(3));
        left = a.device_peers();
        if left == 2 {
            break;
        }
    }
    assert_eq!(left, 2, "orders hold up what is to be deleted");
    a.pings(&b);
}

#[test]
fn a_path_moves_to_the_other_address_family_with_other_keys() {
    let hosts = joined();
    let six = |host: &Host| -> IpAddr { format!("2001:db8::{}", host.number).parse().unwrap() };
    for host in &hosts {
        host.space.run(&format!("ip address add {}/64 dev eth0 nodad", six(host)));
    }
    let [a, b] = &hosts;
    for (from, to) in [(a, b), (b, a)] {
        let remote = SocketAddr::new(six(to), DATA_CHANNEL_PORT);
        from.apply(vec![EngineCommand::SetRemote { path: PATH, remote }]);
        let spi = to.spi(0);
        from.told(|event| *event == EngineEvent::OutboundExhausted { path: PATH, spi });
    }
    // Nothing is sent until there is a key for it.
    assert!(!a.space.succeeds("ping -c 3 -i 0.2 -W 2 10.32.0.2"));
    for (from, to) in [(a, b), (b, a)] {
        to.receive_from(from, 1);
        from.send_at(to, six(to), 1, AMPLE);
    }
    a.pings(b);
    a.space.run("ip address del 192.0.2.1/24 dev eth0");
    a.pings(b);
}

#[test]
fn a_lost_device_or_peer_is_told_and_made_again() {
    let [a, b] = joined();
    let failed = |event: &EngineEvent| matches!(event, EngineEvent::PathFailed { path: PATH, .. });
    a.space.run(&format!("ip link del {DATA_CHANNEL_DEVICE}"));
    a.told(failed);
    a.clear(&[0]);
    b.clear(&[0]);
    join(&a, &b, 1, AMPLE);
    a.pings(&b);
    // Another program deletes both its peers.
    a.beside(async {
        let client = OvpnClient::open().await.unwrap();
        let index = channel_device().await;
        let peers = client.peers(index).await.unwrap();
        assert_eq!(peers.len(), 2);
        for peer in peers {
            client.delete_peer(index, peer.id).await.unwrap();
        }
    });
    a.told(failed);
    a.clear(&[1]);
    b.clear(&[1]);
    join(&a, &b, 2, AMPLE);
    a.pings(&b);
    a.space.run(&format!("ip -6 address flush dev {DATA_CHANNEL_DEVICE}"));
    a.enter(a.engine.repair());
    a.pings(&b);
}

/// Makes peers of another program with these ids on the engine's device. They go with their socket.
async fn squat(ids: &[u32]) -> UdpSocket {
    let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
    let (client, index) = (OvpnClient::open().await.unwrap(), channel_device().await);
    for (id, at) in ids.iter().zip(1..) {
        let peer = PeerAttributes {
            id: Some(*id),
            vpn_ipv4: Some(Ipv4Addr::new(10, 9, 0, at)),
            remote_ipv4: Some(Ipv4Addr::new(192, 0, 2, 9)),
            remote_port: Some(9),
            ..PeerAttributes::default()
        };
        client.new_peer(index, socket.as_fd(), &peer).await.unwrap();
    }
    socket
}

/// The kernel refuses the engine's peer with EEXIST. The device is the engine's, so the peer in its way is
/// removed.
#[test]
fn where_somebodys_peers_have_its_ids_a_path_fails_and_the_next_is_good() {
    let [a, b] = joined();
    let ids = a.device_peer_ids();
    assert_eq!(ids.len(), 2, "one for each way");
    a.clear(&[0]);
    b.clear(&[0]);
    a.wait_for_peers(0);
    let _theirs = a.beside(squat(&ids));
    join(&a, &b, 1, AMPLE);
    let failed = |event: &EngineEvent| matches!(event, EngineEvent::PathFailed { path: PATH, .. });
    let event = a.told(failed);
    assert!(format!("{event:?}").contains("it already exists"), "{event:?}");
    a.clear(&[1]);
    b.clear(&[1]);
    join(&a, &b, 2, AMPLE);
    a.pings(&b);
}

/// Makes the kernel send notices about this many replaced peers of a device of the test.
async fn crowd_with_notices(notices: u32) {
    let kernel = Kernel::new().unwrap();
    let spec = OvpnDeviceSpec { name: "crowd".into(), mode: Mode::P2p, own: false };
    let index = kernel.create_ovpn_device(&spec).await.unwrap().index;
    let socket = UdpSocket::bind("192.0.2.1:0").unwrap();
    let client = OvpnClient::open().await.unwrap();
    for id in 0..=notices {
        let peer = PeerAttributes {
            id: Some(id),
            remote_ipv4: Some(Ipv4Addr::new(192, 0, 2, 9)),
            remote_port: Some(9),
            ..PeerAttributes::default()
        };
        client.new_peer(index, socket.as_fd(), &peer).await.unwrap();
    }
    kernel.remove_ovpn_device_by_index(index).await.unwrap();
}

#[test]
fn changes_behind_lost_notices_are_found() {
    /// More notices than fit in the watch's socket while it is not read.
    const NOTICES: u32 = 4_000;
    let [a, b] = joined();
    a.pings(&b);
    // The kernel retires a key by a notice. Of this key no notice comes, as if it had been lost.
    a.beside(async {
        let client = OvpnClient::open().await.unwrap();
        let index = channel_device().await;
        for peer in client.peers(index).await.unwrap() {
            // The receiver's key in this slot is deleted too; the test does not need it.
            client.delete_key(index, peer.id, Slot::Primary).await.unwrap();
        }
    });
    let lost = || {
        let counters = a.enter(a.engine.counters());
        counters.named.into_iter().find(|(name, _)| *name == "channel_notices_lost").unwrap().1
    };
    assert_eq!(lost(), 0);
    a.beside(crowd_with_notices(NOTICES));
    let spi = b.spi(0);
    a.told(|event| *event == EngineEvent::OutboundExhausted { path: PATH, spi });
    assert!(lost() > 0);
    a.clear(&[0]);
    b.clear(&[0]);
    join(&a, &b, 1, AMPLE);
    a.pings(&b);
}
