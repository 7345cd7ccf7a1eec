//! Two hosts, joined by a veth pair. Each is a fresh network namespace with an engine, whose TAP device is the
//! host's own interface on the overlay.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use weft_crypto::{PeerId, SaKey};
use weft_engine::{Counters, DropReason, Engine, EngineConfig};
use weft_io::namespace::{Namespace, run_in, unshare_network};
use weft_path::{
    Endpoint, EngineCommand, EngineEvent, EngineKind, InboundSa, Mac, OutboundSa, PathId, Vni,
};

#[path = "../../src/sample_sas.rs"]
mod sample_sas;

use sample_sas::{inbound_sa, outbound_sa};

/// How long anything may take before a test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const VNI: Vni = Vni(7);
pub(crate) const MTU: u16 = 1388;
pub(crate) const PATH: PathId = PathId(1);

/// One host.
pub(crate) struct Host {
    pub(crate) namespace: Namespace,
    pub(crate) engine: Engine,
    pub(crate) events: Arc<Events>,
    /// Its address on the wire.
    pub(crate) wire: IpAddr,
    /// Its addresses on the overlay.
    pub(crate) v4: Ipv4Addr,
    pub(crate) v6: IpAddr,
    pub(crate) mac: Mac,
    /// The id by which the other host knows it.
    pub(crate) id: PeerId,
}

/// Events in order, for waiting.
#[derive(Default)]
pub(crate) struct Events {
    list: Mutex<Vec<EngineEvent>>,
    changed: Condvar,
}

impl Events {
    pub(crate) fn push(&self, event: EngineEvent) {
        self.list.lock().unwrap().push(event);
        self.changed.notify_all();
    }

    /// Waits for an event that `pick` takes.
    pub(crate) fn wait<T>(&self, mut pick: impl FnMut(&EngineEvent) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        let mut list = self.list.lock().unwrap();
        loop {
            if let Some(found) = list.iter().find_map(&mut pick) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no such event among {list:?}");
            list = self.changed.wait_timeout(list, left).unwrap().0;
        }
    }

    pub(crate) fn all(&self) -> Vec<EngineEvent> {
        self.list.lock().unwrap().clone()
    }
}

impl Host {
    /// Runs `f` in the host's namespace.
    pub(crate) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        run_in(&self.namespace, f).unwrap()
    }

    pub(crate) fn command(&self, command: EngineCommand) {
        self.engine.command(command).unwrap();
    }

    pub(crate) fn dropped(&self, reason: DropReason) -> u64 {
        self.engine.counters().dropped(reason)
    }

    /// All drops that there were.
    pub(crate) fn drops(&self) -> Vec<(DropReason, u64)> {
        self.engine.counters().drops.into_iter().filter(|(_, count)| *count > 0).collect()
    }

    /// Waits until the counters are as `done` wants them.
    pub(crate) fn wait_counters(&self, mut done: impl FnMut(&Counters) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(&self.engine.counters()) {
            assert!(Instant::now() < deadline, "counters stay at {:?}", self.engine.counters());
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The address at which the host's engine receives.
    pub(crate) fn data_address(&self) -> SocketAddr {
        SocketAddr::new(self.wire, self.engine.port())
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint { mac: self.mac, addresses: Vec::new() }
    }
}

/// Two hosts that send to each other on lane 0.
pub(crate) fn two_hosts() -> (Host, Host) {
    let hosts = strangers();
    connect(&hosts.0, &hosts.1, 300);
    connect(&hosts.1, &hosts.0, 400);
    hosts
}

/// Two hosts that know nothing of each other.
pub(crate) fn strangers() -> (Host, Host) {
    strangers_with(|_| {})
}

/// Likewise, with engines of another configuration.
pub(crate) fn strangers_with(change: impl Fn(&mut EngineConfig) + Sync) -> (Host, Host) {
    let (left, right) = (fresh_namespace(), fresh_namespace());
    let path =
        |ns: &Namespace| format!("/proc/{}/fd/{}", std::process::id(), ns.as_fd().as_raw_fd());
    let link = format!("link add eth0 type veth peer name eth0 netns {}", path(&right));
    run_in(&left, || ip(&link)).unwrap();
    (start(left, 1, &change), start(right, 2, &change))
}

/// Makes `from` send to `to` on a new SA with this SPI.
pub(crate) fn connect(from: &Host, to: &Host, spi: u32) {
    to.command(EngineCommand::InstallInbound {
        engine: EngineKind::Userspace,
        remote: std::net::Ipv4Addr::LOCALHOST.into(),
        peer: from.id,
        path: PATH,
        sa: inbound(spi),
    });
    from.command(EngineCommand::InstallOutbound {
        engine: EngineKind::Userspace,
        peer: to.id,
        path: PATH,
        sa: outbound(spi),
        remote: to.data_address(),
    });
    from.command(EngineCommand::BindPath { peer: to.id, path: Some(PATH) });
    let add = vec![(to.endpoint(), to.id)];
    from.command(EngineCommand::SetEndpoints { vni: VNI, add, remove: Vec::new() });
    from.command(EngineCommand::SetBroadcast { vni: VNI, peers: vec![to.id] });
}

pub(crate) fn key(spi: u32) -> SaKey {
    let mut key = [7; 36];
    key[..4].copy_from_slice(&spi.to_le_bytes());
    SaKey::from_bytes(key)
}

pub(crate) fn inbound(spi: u32) -> InboundSa {
    InboundSa { key: key(spi), ..inbound_sa(spi) }
}

pub(crate) fn outbound(spi: u32) -> OutboundSa {
    OutboundSa { key: key(spi), iv_salt: 0x1234_5678, ..outbound_sa(spi) }
}

fn start(namespace: Namespace, number: u8, change: &(impl Fn(&mut EngineConfig) + Sync)) -> Host {
    let events = Arc::new(Events::default());
    let mac = mac_of(number);
    let engine = run_in(&namespace, || {
        ip("link set lo up");
        ip(&format!("addr add 192.168.77.{number}/24 dev eth0"));
        ip("link set eth0 up");
        let sink = Arc::clone(&events);
        let mut config = EngineConfig::new("weft0", VNI, MTU);
        config.local = PeerId::from_bytes([number; 32]);
        change(&mut config);
        let engine = Engine::start(&config, move |event| sink.push(event)).unwrap();
        set_up_device(number);
        engine
    })
    .unwrap();
    Host {
        namespace,
        engine,
        events,
        wire: Ipv4Addr::new(192, 168, 77, number).into(),
        v4: Ipv4Addr::new(10, 99, 0, number),
        v6: format!("fd99::{number}").parse().unwrap(),
        mac,
        id: PeerId::from_bytes([number; 32]),
    }
}

const fn mac_of(number: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, number])
}

/// Makes the engine's TAP device the interface of the host with this number.
pub(crate) fn set_up_device(number: u8) {
    ip(&format!("link set weft0 address {} mtu {MTU} gso_max_segs 45", mac_of(number)));
    ip("link set weft0 addrgenmode none");
    ip(&format!("addr add 10.99.0.{number}/24 broadcast 10.99.0.255 dev weft0"));
    ip(&format!("-6 addr add fd99::{number}/64 dev weft0 nodad"));
    ip("link set weft0 up");
}

pub(crate) fn fresh_namespace() -> Namespace {
    thread::spawn(|| {
        unshare_network().expect("this test makes network namespaces and must run as root");
        Namespace::current().unwrap()
    })
    .join()
    .unwrap()
}

pub(crate) fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// Bytes that look random and are the same each time.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Sends `bytes` over each of `flows` connections at once, and checks what arrives.
pub(crate) fn flows(from: &Host, to: &Host, address: IpAddr, flows: usize, bytes: &[u8]) {
    flows_between(&from.namespace, &to.namespace, address, flows, bytes);
}

/// As [`flows`], between any two namespaces.
pub(crate) fn flows_between(
    from: &Namespace,
    to: &Namespace,
    address: IpAddr,
    flows: usize,
    bytes: &[u8],
) {
    let listener = run_in(to, || TcpListener::bind((address, 0)).unwrap()).unwrap();
    let target = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let server = scope.spawn(move || {
            thread::scope(|scope| {
                for _ in 0..flows {
                    let (mut stream, _) = listener.accept().unwrap();
                    scope.spawn(move || {
                        stream.set_read_timeout(Some(PATIENCE)).unwrap();
                        let mut got = Vec::new();
                        stream.read_to_end(&mut got).unwrap();
                        assert!(got == bytes, "a stream arrived changed");
                    });
                }
            });
        });
        for _ in 0..flows {
            scope.spawn(move || {
                let connect = || TcpStream::connect_timeout(&target, PATIENCE).unwrap();
                let mut client = run_in(from, connect).unwrap();
                client.set_write_timeout(Some(PATIENCE)).unwrap();
                client.write_all(bytes).unwrap();
            });
        }
        server.join().unwrap();
    });
}
