//! Two networks between two hosts, with the same addresses in both.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use weft_engine::{DropReason, EngineConfig, EngineError, NetworkConfig};
use weft_io::namespace::{Namespace, run_in};
use weft_io::tap::{Tap, TapOptions};
use weft_path::{Endpoint, EngineCommand, Mac, Vni};

use crate::common::{
    Host, PATIENCE, VNI, connect, flows, flows_between, fresh_namespace, ip, pattern,
    set_up_device, strangers, strangers_with,
};

const OTHER: Vni = Vni(8);
const PORT: u16 = 5_000;

fn other() -> NetworkConfig {
    NetworkConfig { vni: OTHER, tap_name: "weft1".to_owned() }
}

/// Moves a device of the host into a new namespace, where it is called `weft0`.
fn move_out(host: &Host, device: &str) -> Namespace {
    let namespace = fresh_namespace();
    let path = format!("/proc/{}/fd/{}", std::process::id(), namespace.as_fd().as_raw_fd());
    host.run(|| ip(&format!("link set {device} netns {path}")));
    run_in(&namespace, || {
        ip("link set lo up");
        ip(&format!("link set {device} name weft0"));
    })
    .unwrap();
    namespace
}

/// Makes the other network's device of the host with this number, in a namespace by itself, what the first one's is
/// in the host's.
fn inside(host: &Host, number: u8) -> Namespace {
    let namespace = move_out(host, "weft1");
    run_in(&namespace, || set_up_device(number)).unwrap();
    namespace
}

/// Tells `from` that all addresses of `to` are in the other network too.
fn join(from: &Host, to: &Host) {
    let add = vec![(to.endpoint(), to.id)];
    from.command(EngineCommand::SetEndpoints { vni: OTHER, add, remove: Vec::new() });
    from.command(EngineCommand::SetBroadcast { vni: OTHER, peers: vec![to.id] });
}

/// Two hosts in both networks, and the namespaces of the other one's devices.
fn two_hosts_in_two_networks(workers: usize) -> ((Host, Namespace), (Host, Namespace)) {
    let (a, b) = strangers_with(|config| {
        config.workers = workers;
        config.networks = vec![other()];
    });
    connect(&a, &b, 300);
    connect(&b, &a, 400);
    join(&a, &b);
    join(&b, &a);
    let (inside_a, inside_b) = (inside(&a, 1), inside(&b, 2));
    ((a, inside_a), (b, inside_b))
}

/// Answers each connection in the namespace by this name, until the end of the test's process.
fn answer(namespace: &Namespace, name: &'static str) {
    let listener = run_in(namespace, || TcpListener::bind(("::", PORT)).unwrap()).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(name.as_bytes());
        }
    });
}

/// The name of who answers at this address.
fn asked(namespace: &Namespace, address: IpAddr) -> String {
    let to = SocketAddr::new(address, PORT);
    let connect = || TcpStream::connect_timeout(&to, PATIENCE).unwrap();
    let mut stream = run_in(namespace, connect).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut name = String::new();
    stream.read_to_string(&mut name).unwrap();
    name
}

#[test]
fn networks_with_the_same_addresses_are_isolated_in_each_direction() {
    let ((a, inside_a), (b, inside_b)) = two_hosts_in_two_networks(2);
    assert_eq!(a.engine.networks(), [VNI, OTHER]);
    answer(&a.namespace, "a, first");
    answer(&inside_a, "a, other");
    answer(&b.namespace, "b, first");
    answer(&inside_b, "b, other");
    for _ in 0..3 {
        for (address_a, address_b) in [(a.v4.into(), b.v4.into()), (a.v6, b.v6)] {
            assert_eq!(asked(&a.namespace, address_b), "b, first");
            assert_eq!(asked(&inside_a, address_b), "b, other");
            assert_eq!(asked(&b.namespace, address_a), "a, first");
            assert_eq!(asked(&inside_b, address_a), "a, other");
        }
    }
    // Streams of both at once, whose addresses are the same and whose ports may be.
    let (one, two) = (pattern(3, 3_000_000), pattern(9, 3_000_000));
    thread::scope(|scope| {
        scope.spawn(|| flows(&a, &b, b.v4.into(), 3, &one));
        scope.spawn(|| flows_between(&inside_a, &inside_b, b.v4.into(), 3, &two));
    });
    for host in [&a, &b] {
        let strange = [DropReason::UnknownNetwork, DropReason::ForeignSource];
        assert!(strange.iter().all(|reason| host.dropped(*reason) == 0), "{:?}", host.drops());
    }
}

#[test]
fn direct_ports_of_two_networks_may_have_the_same_address() {
    let ((a, inside_a), (b, _inside_b)) = two_hosts_in_two_networks(1);
    let mac = Mac([2, 0, 0, 0, 0, 9]);
    let address = IpAddr::from([10, 99, 0, 9]);
    let mut ports = Vec::new();
    for (vni, device, name, asker) in
        [(VNI, "direct7", "first", &a.namespace), (OTHER, "direct8", "other", &inside_a)]
    {
        let open = || (0..2).map(|_| Tap::open(&TapOptions::new(device)).unwrap()).collect();
        let queues = b.run(open);
        let port = move_out(&b, device);
        run_in(&port, || {
            ip(&format!("link set weft0 address {mac} up"));
            ip("addr add 10.99.0.9/24 dev weft0");
            ip(&format!("neigh add {} lladdr {} dev weft0", a.v4, a.mac));
        })
        .unwrap();
        answer(&port, name);
        b.engine.add_port(vni, mac, queues).unwrap();
        assert!(b.engine.has_port(vni, mac));
        let add = vec![(Endpoint { mac, addresses: Vec::new() }, b.id)];
        a.command(EngineCommand::SetEndpoints { vni, add, remove: Vec::new() });
        // Nobody answers for it on the switch.
        run_in(asker, || ip(&format!("neigh add {address} lladdr {mac} dev weft0"))).unwrap();
        ports.push(port);
    }
    for _ in 0..2 {
        assert_eq!(asked(&a.namespace, address), "first");
        assert_eq!(asked(&inside_a, address), "other");
    }
    let mut traffic = b.engine.port_traffic();
    traffic.sort_by_key(|(vni, ..)| *vni);
    let names: Vec<_> = traffic.iter().map(|(vni, mac, _)| (*vni, *mac)).collect();
    assert_eq!(names, [(VNI, mac), (OTHER, mac)]);
    assert!(traffic.iter().all(|(_, _, it)| it.sent.packets > 0 && it.received.packets > 0));
    // One goes with its network. The other one stays.
    b.engine.remove_network(OTHER).unwrap();
    assert!(b.engine.has_port(VNI, mac) && !b.engine.has_port(OTHER, mac));
    assert!(!b.engine.remove_port(OTHER, mac));
    assert_eq!(asked(&a.namespace, address), "first");
}

/// Waits until the device of a removed network is gone. The call does so for the most part.
fn wait_for_its_end(namespace: &Namespace) {
    let begun = Instant::now();
    let shows = || {
        let mut show = Command::new("ip");
        show.args(["link", "show", "weft0"]).stdout(Stdio::null()).stderr(Stdio::null());
        show.status().unwrap().success()
    };
    while run_in(namespace, shows).unwrap() {
        assert!(begun.elapsed() < PATIENCE, "the device of a removed network stays");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Sends in the other network without an end, while `meanwhile` runs. The stream may break at any time.
fn under_traffic(from: &Namespace, to: &Namespace, address: IpAddr, meanwhile: impl FnOnce()) {
    let listener = run_in(to, || TcpListener::bind((address, 0)).unwrap()).unwrap();
    let target = listener.local_addr().unwrap();
    let connect = || TcpStream::connect_timeout(&target, PATIENCE).unwrap();
    let mut client = run_in(from, connect).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    client.set_nonblocking(true).unwrap();
    server.set_nonblocking(true).unwrap();
    let (done, bytes) = (AtomicBool::new(false), vec![7; 100_000]);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = vec![0; 100_000];
            while !done.load(Ordering::Relaxed) {
                let (sent, got) = (client.write(&bytes), server.read(&mut buffer));
                let waits = |result: &std::io::Result<usize>| {
                    result.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
                };
                if waits(&sent) && waits(&got) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        // Also if that fails.
        let _ended = End(&done);
        meanwhile();
    });
}

/// Ends a stream when it is dropped.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_network_comes_and_goes_under_traffic() {
    let ((a, mut inside_a), (b, mut inside_b)) = two_hosts_in_two_networks(2);
    let bytes = pattern(5, 500_000);
    for removes_receiver in [true, false, true] {
        under_traffic(&inside_a, &inside_b, b.v4.into(), || {
            flows(&a, &b, b.v4.into(), 2, &bytes);
            let (one, unknown) = if removes_receiver {
                (&b, b.dropped(DropReason::UnknownNetwork))
            } else {
                (&a, 0)
            };
            one.engine.remove_network(OTHER).unwrap();
            // The first network goes on.
            flows(&a, &b, b.v4.into(), 2, &bytes);
            flows(&b, &a, a.v6, 2, &bytes);
            wait_for_its_end(if removes_receiver { &inside_b } else { &inside_a });
            if removes_receiver {
                b.wait_counters(|now| now.dropped(DropReason::UnknownNetwork) > unknown);
            }
            let refusal = one.engine.remove_network(OTHER).unwrap_err();
            assert!(matches!(refusal, EngineError::UnknownNetwork { .. }), "{refusal}");
            assert_eq!(one.engine.networks(), [VNI]);
        });
        // It comes back, knows nobody, and works once it is told.
        if removes_receiver {
            assert_eq!(b.run(|| b.engine.add_network(&other())).unwrap(), "weft1");
            inside_b = inside(&b, 2);
            join(&b, &a);
        } else {
            a.run(|| a.engine.add_network(&other())).unwrap();
            inside_a = inside(&a, 1);
            join(&a, &b);
        }
        flows_between(&inside_a, &inside_b, b.v4.into(), 2, &bytes);
        flows_between(&inside_b, &inside_a, a.v6, 2, &bytes);
    }
    // Another device in place of the one before, and other workers.
    a.run(|| a.engine.set_workers(3)).unwrap();
    a.run(|| a.engine.add_network(&other())).unwrap();
    wait_for_its_end(&inside_a);
    inside_a = inside(&a, 1);
    flows_between(&inside_a, &inside_b, b.v4.into(), 2, &bytes);
    a.run(|| a.engine.renew_tap()).unwrap();
    flows_between(&inside_b, &inside_a, a.v4.into(), 2, &bytes);
}

#[test]
fn networks_that_cannot_be_are_refused() {
    let (a, _b) = strangers();
    a.run(|| {
        let refused = |vni| {
            let network = NetworkConfig { vni, tap_name: "weft1".to_owned() };
            a.engine.add_network(&network).unwrap_err()
        };
        assert!(matches!(refused(VNI), EngineError::FirstNetwork { vni: VNI }));
        assert!(matches!(refused(Vni::PROBE), EngineError::Configuration { .. }));
        let refusal = a.engine.remove_network(VNI).unwrap_err();
        assert!(matches!(refusal, EngineError::FirstNetwork { .. }), "{refusal}");
        let refusal = a.engine.add_port(OTHER, Mac([2; 6]), Vec::new()).unwrap_err();
        assert!(refusal.to_string().contains("no network with VNI 8"), "{refusal}");
        let config = |networks: &[Vni]| {
            let of = |vni: &Vni| NetworkConfig { vni: *vni, tap_name: "weft%d".to_owned() };
            let networks = networks.iter().map(of).collect();
            EngineConfig { port: 0, networks, ..EngineConfig::new("weft%d", VNI, 1_388) }
        };
        for networks in [&[VNI][..], &[OTHER, OTHER], &[Vni::PROBE]] {
            let refusal = weft_engine::Engine::start(&config(networks), |_| {}).unwrap_err();
            assert!(matches!(refusal, EngineError::Configuration { .. }), "{refusal}");
        }
    });
    assert_eq!(a.engine.networks(), [VNI]);
}
