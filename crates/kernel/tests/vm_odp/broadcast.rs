//! Broadcasts and mixed engines. The test plays the vector engine: it reads each host's TAP and gives its
//! frames to the TAPs of the hosts that it serves.

use std::{
    collections::HashMap,
    io::{ErrorKind, IoSlice},
    net::UdpSocket,
    sync::{Arc, Mutex},
    thread::{JoinHandle, sleep, spawn},
    time::Duration,
};

use weft_io::{
    namespace::run_in,
    tap::{FRAME_LEN_MAX, Tap, TapOptions, VNET_LEN},
    uninterrupted,
};
use weft_kernel::odp::Via;

use crate::lab::{
    Container, Host, Outer, Space, Stop, TAP, Underlay, join, run, tunnel, until, wait,
};

/// Opens a host's TAP as the vector engine would.
pub(crate) fn open_tap(space: &Space, name: &str) -> Tap {
    run_in(&space.0, || {
        let tap = Tap::open(&TapOptions::new(name)).unwrap();
        run(&format!("ip link set {name} mtu 1388 addrgenmode none up"));
        tap
    })
    .unwrap()
}

/// The hosts that a host's vector engine serves, and the containers' MACs.
#[derive(Default)]
struct Plan {
    serves: HashMap<u8, Vec<u8>>,
    places: HashMap<[u8; 6], u8>,
}

/// The vector engines of all hosts.
struct Engines {
    plan: Arc<Mutex<Plan>>,
    stop: Stop,
    threads: Vec<JoinHandle<()>>,
}

impl Engines {
    fn start(hosts: &[&Host], containers: &[&Container]) -> Self {
        let mut plan = Plan::default();
        for container in containers {
            plan.places.insert(container.mac.0, container.host);
        }
        let plan = Arc::new(Mutex::new(plan));
        let stop = Stop::default();
        let taps: HashMap<u8, Tap> =
            hosts.iter().map(|host| (host.number, open_tap(&host.space, TAP))).collect();
        for host in hosts {
            until("the TAP is a port", || {
                host.space.run(&format!("ip link show {TAP}")).contains("master")
            });
        }
        let taps = Arc::new(taps);
        let threads = hosts
            .iter()
            .map(|host| {
                let (number, plan) = (host.number, Arc::clone(&plan));
                let (taps, stop) = (Arc::clone(&taps), Stop(Arc::clone(&stop.0)));
                spawn(move || relay(number, &taps, &plan, &stop))
            })
            .collect();
        Self { plan, stop, threads }
    }

    fn serve(&self, host: u8, others: &[u8]) {
        self.plan.lock().unwrap().serves.insert(host, others.to_vec());
    }

    fn end(self) {
        self.stop.set();
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

fn relay(host: u8, taps: &HashMap<u8, Tap>, plan: &Mutex<Plan>, stop: &Stop) {
    let mut buffer = vec![0; FRAME_LEN_MAX];
    while !stop.is_set() {
        match taps[&host].recv(&mut buffer) {
            Ok(length) => {
                let frame = &buffer[..length];
                let destination: [u8; 6] = frame[VNET_LEN..VNET_LEN + 6].try_into().unwrap();
                let plan = plan.lock().unwrap();
                let served = plan.serves.get(&host).cloned().unwrap_or_default();
                let place = plan.places.get(&destination);
                send_to_each(
                    served.iter().filter(|to| place.is_none_or(|place| place == *to)),
                    |to| taps[to].send(&[IoSlice::new(frame)]),
                );
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => sleep(Duration::from_millis(1)),
            Err(error) => panic!("TAP: {error}"),
        }
    }
}

fn send_to_each<'a>(
    hosts: impl Iterator<Item = &'a u8>,
    send: impl Fn(&u8) -> std::io::Result<usize>,
) {
    for host in hosts {
        let _ = send(host);
    }
}

struct Three {
    _underlay: Underlay,
    hosts: [Host; 3],
    boxes: Vec<Container>,
}

impl Three {
    /// Three hosts with two containers each.
    fn new() -> Self {
        let underlay = Underlay::new();
        let hosts = [1, 2, 3].map(|number| Host::new(number, &underlay));
        let boxes: Vec<Container> =
            hosts.iter().flat_map(|host| [1, 2].map(|number| host.container(number))).collect();
        let three = Self { _underlay: underlay, hosts, boxes };
        join(&three.hosts(), &three.boxes(), Outer::Ipv4);
        three
    }

    fn hosts(&self) -> Vec<&Host> {
        self.hosts.iter().collect()
    }

    fn boxes(&self) -> Vec<&Container> {
        self.boxes.iter().collect()
    }

    /// Every container sends a broadcast and a multicast; every other one must get each exactly
    /// once.
    fn each_is_heard_once(&self, what: &str) {
        let sockets: Vec<UdpSocket> = self
            .boxes
            .iter()
            .map(|container| {
                let socket = container.space.socket("0.0.0.0:7000");
                let own = container.ipv4().parse().unwrap();
                socket.join_multicast_v4(&"239.1.2.3".parse().unwrap(), &own).unwrap();
                socket.set_multicast_loop_v4(false).unwrap();
                socket.set_read_timeout(Some(Duration::from_millis(1_500))).unwrap();
                socket
            })
            .collect();
        for round in 0..3_u8 {
            for (number, socket) in sockets.iter().enumerate() {
                let text = [round, u8::try_from(number).unwrap()];
                socket.send_to(&[&text[..], b"broadcast"].concat(), "10.47.255.255:7000").unwrap();
                socket.send_to(&[&text[..], b"multicast"].concat(), "239.1.2.3:7000").unwrap();
            }
        }
        for (number, socket) in sockets.iter().enumerate() {
            let mut heard: HashMap<Vec<u8>, u32> = HashMap::new();
            let mut buffer = [0; 100];
            while let Ok(length) = uninterrupted(|| socket.recv(&mut buffer)) {
                // A sender hears its own broadcast on its own stack.
                if usize::from(buffer[1]) != number {
                    *heard.entry(buffer[..length].to_vec()).or_default() += 1;
                }
            }
            let twice: Vec<_> = heard.iter().filter(|(_, times)| **times != 1).collect();
            assert!(twice.is_empty(), "{what}: container {number} heard {twice:?}");
            let wanted = 3 * 2 * (self.boxes.len() - 1);
            assert_eq!(heard.len(), wanted, "{what}: container {number} heard {:?}", heard.keys());
        }
    }
}

#[test]
fn a_broadcast_arrives_once_over_tunnels() {
    let three = Three::new();
    three.each_is_heard_once("tunnels");
    three.each_is_heard_once("tunnels, by flows");
    for host in three.hosts() {
        host.audit();
    }
}

#[test]
fn a_broadcast_arrives_once_with_mixed_engines() {
    let three = Three::new();
    let engines = Engines::start(&three.hosts(), &three.boxes());
    // 1 and 2 by the kernel both ways; 1 and 3 by the vector engine both ways; between 2 and 3 each
    // direction by another.
    let plans: [(u8, &[(u8, Via)]); 3] = [
        (1, &[(2, tunnel(2, Outer::Ipv4)), (3, Via::Tap)]),
        (2, &[(1, tunnel(1, Outer::Ipv4)), (3, Via::Tap)]),
        (3, &[(1, Via::Tap), (2, tunnel(2, Outer::Ipv6))]),
    ];
    // Packets from host 3 to host 2 come from its IPv6 address.
    let sources = vec![crate::lab::underlay_address(3, Outer::Ipv6)];
    let edit = weft_kernel::odp::OdpEdit::Sources(crate::lab::peer(3), sources);
    wait(three.hosts[1].switch.apply(vec![edit])).unwrap();
    for (host, vias) in plans {
        for (other, via) in vias {
            three.hosts[usize::from(host) - 1].reaches(*other, *via);
        }
        let served = vias.iter().filter(|(_, via)| *via == Via::Tap);
        engines.serve(host, &served.map(|(other, _)| *other).collect::<Vec<_>>());
    }
    three.each_is_heard_once("mixed");
    for one in &three.boxes {
        for other in three.boxes.iter().filter(|other| other.host != one.host) {
            one.space.run(&format!("ping -c 1 -W 20 {}", other.ipv4()));
        }
    }
    three.each_is_heard_once("mixed, by flows");
    for host in three.hosts() {
        host.audit();
    }
    engines.end();
}

#[test]
fn moving_a_peer_touches_only_its_flows() {
    let three = Three::new();
    let engines = Engines::start(&three.hosts(), &three.boxes());
    let one = &three.hosts[0];
    let (a, to_two, to_three) = (&three.boxes[0], &three.boxes[2], &three.boxes[4]);
    a.pings(to_two);
    a.pings(to_three);
    let neighbours = [to_two, to_three];
    for _ in 0..2 {
        for (number, via) in [(3, Via::Tap), (3, tunnel(3, Outer::Ipv4))] {
            // Only known frames from here on: no ARP in between, which would make flows.
            for other in neighbours {
                let entry =
                    format!("{} lladdr {} dev weft0 nud permanent", other.ipv4(), other.mac);
                a.space.run(&format!("ip neigh replace {entry}"));
                let entry = format!("{} lladdr {} dev weft0 nud permanent", a.ipv4(), a.mac);
                other.space.run(&format!("ip neigh replace {entry}"));
                a.space.run(&format!("ping -c 2 -i 0.2 -W 20 {}", other.ipv4()));
            }
            let before = one.counters();
            engines.serve(1, if via == Via::Tap { &[3] } else { &[] });
            engines.serve(3, if via == Via::Tap { &[1] } else { &[] });
            one.reaches(number, via);
            three.hosts[2].reaches(1, if via == Via::Tap { via } else { tunnel(1, Outer::Ipv4) });
            let after = one.counters();
            assert_eq!(after.flows, before.flows, "no flow goes, none comes");
            assert_eq!(after.flows_deleted, before.flows_deleted);
            let changed = after.flows_changed - before.flows_changed;
            let broadcasts = broadcast_flows(one);
            println!("{changed} of {} flows changed, {broadcasts} of them broadcasts", after.flows);
            assert!(changed > broadcasts && changed <= broadcasts + 2, "{changed}, {broadcasts}");
            // The other peer's flows carry on without a question.
            a.space.run(&format!("ping -c 5 -i 0.1 -W 20 {}", to_two.ipv4()));
            a.space.run(&format!("ping -c 5 -i 0.1 -W 20 {}", to_three.ipv4()));
            let later = one.counters();
            let asked = later.upcalls - after.upcalls;
            // Frames from the other host arrive by another port: a flow each.
            assert!(asked <= 4, "{asked} upcalls after the move");
            one.audit();
        }
    }
    engines.end();
}

/// How many of a host's flows are for broadcasts: by moving a peer that has no endpoints.
fn broadcast_flows(host: &Host) -> u64 {
    let before = host.counters().flows_changed;
    host.reaches(77, tunnel(77, Outer::Ipv4));
    let changed = host.counters().flows_changed - before;
    wait(host.switch.remove_peer(crate::lab::peer(77))).unwrap();
    changed
}
