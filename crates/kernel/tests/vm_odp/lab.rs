//! Hosts, containers and an underlay made of network namespaces.

use std::{
    net::{IpAddr, UdpSocket},
    os::fd::{AsFd, AsRawFd},
    path::PathBuf,
    process::{Child, Stdio},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use tokio::runtime::Runtime;
use weft_crypto::PeerId;
use weft_io::namespace::run_in;
use weft_kernel::{
    AttachSpec, Kernel,
    odp::{OdpAudit, OdpCounters, OdpInbox, OdpSpec, OdpSwitch, Via},
};
use weft_path::Mac;

use crate::space;
pub(crate) use crate::space::{Space, run};

pub(crate) const SWITCH: &str = "weft";
pub(crate) const TAP: &str = "weft-tap";
pub(crate) const TUNNEL: &str = "weft-vxlan";
pub(crate) const MTU: u32 = 1388;
pub(crate) const PORT: u16 = 6787;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
});

/// Waits for a future of the switch.
pub(crate) fn wait<F: Future>(future: F) -> F::Output {
    RUNTIME.block_on(future)
}

impl Space {
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_fd().as_raw_fd()).into()
    }

    /// Starts a program that runs on; it is killed with the value.
    pub(crate) fn spawn(&self, command: &str) -> Running {
        run_in(&self.0, || {
            let mut command = space::command(command);
            Running(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
        })
        .unwrap()
    }

    pub(crate) fn socket(&self, address: &str) -> UdpSocket {
        let socket = run_in(&self.0, || UdpSocket::bind(address).unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        socket.set_broadcast(true).unwrap();
        socket
    }

    /// Calls `inside` in this namespace, within the runtime.
    pub(crate) fn enter<T: Send>(&self, inside: impl Future<Output = T> + Send) -> T {
        run_in(&self.0, || RUNTIME.block_on(inside)).unwrap()
    }
}

/// A program in the background.
pub(crate) struct Running(Child);

impl Running {
    /// Ends it (SIGTERM) and returns its output.
    pub(crate) fn end(mut self) -> String {
        run(&format!("kill {}", self.0.id()));
        let mut text = String::new();
        std::io::Read::read_to_string(&mut self.0.stdout.take().unwrap(), &mut text).unwrap();
        self.0.wait().unwrap();
        text
    }

    pub(crate) fn kill_9(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The underlay: one bridge, a leg for each host.
pub(crate) struct Underlay(pub(crate) Space);

impl Underlay {
    pub(crate) fn new() -> Self {
        let space = Space::new();
        space.run("ip link add u type bridge");
        space.run("ip link set u up addrgenmode none");
        Self(space)
    }

    pub(crate) fn connect(&self, number: u8, host: &Space) {
        let path = host.path();
        let leg = format!("u{number}");
        self.0.run(&format!("ip link add {leg} type veth peer name eth0"));
        let file = std::fs::File::open(path).unwrap();
        let target = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        self.0.run(&format!("ip link set eth0 netns {target}"));
        self.0.run(&format!("ip link set {leg} master u up addrgenmode none"));
        host.run(&format!("ip address add 192.0.2.{number}/24 dev eth0"));
        host.run(&format!("ip address add 2001:db8::{number}/64 dev eth0 nodad"));
        host.run("ip link set eth0 up");
    }
}

/// The outer protocol between two hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outer {
    Ipv4,
    Ipv6,
}

/// A host with the ODP switch.
pub(crate) struct Host {
    pub(crate) number: u8,
    pub(crate) space: Space,
    pub(crate) kernel: Kernel,
    pub(crate) switch: OdpSwitch,
    pub(crate) inbox: OdpInbox,
}

impl Host {
    pub(crate) fn new(number: u8, underlay: &Underlay) -> Self {
        Self::with(number, underlay, |_| {})
    }

    pub(crate) fn with(number: u8, underlay: &Underlay, edit: impl FnOnce(&mut OdpSpec)) -> Self {
        let space = Space::new();
        underlay.connect(number, &space);
        let mut spec = spec(number);
        edit(&mut spec);
        let (kernel, switch, inbox) = start(&space, spec);
        Self { number, space, kernel, switch, inbox }
    }

    /// Attaches a container with the addresses 10.32.host.number and fd32::host:number.
    pub(crate) fn container(&self, number: u8) -> Container {
        let space = Space::new();
        let name = format!("weft-box{number}");
        let mac = [0x02, 0, 0, 1, self.number, number];
        wait(self.kernel.attach(&attach_spec(self.number, number, &space))).unwrap();
        wait(self.switch.add_port(1, &name)).unwrap();
        wait(self.switch.set_local(1, Mac(mac), &name)).unwrap();
        Container { host: self.number, number, space, port: name, mac: Mac(mac) }
    }

    pub(crate) fn counters(&self) -> OdpCounters {
        wait(self.switch.counters()).unwrap()
    }

    /// Compares the kernel's flows with the tables; nothing may differ.
    pub(crate) fn audit(&self) -> OdpAudit {
        let audit = wait(self.switch.audit()).unwrap();
        let differing = audit.differing + audit.missing + audit.unknown + audit.outdated;
        assert_eq!(differing, 0, "host {}: {audit:?}", self.number);
        audit
    }

    /// Tells this host about a container on another host.
    pub(crate) fn knows(&self, container: &Container) {
        let entry = [(container.mac, peer(container.host))];
        wait(self.switch.set_endpoints(1, &entry, &[])).unwrap();
    }

    pub(crate) fn reaches(&self, other: u8, via: Via) {
        wait(self.switch.set_peer(peer(other), via)).unwrap();
    }
}

/// A container on a host.
pub(crate) struct Container {
    pub(crate) host: u8,
    pub(crate) number: u8,
    pub(crate) space: Space,
    pub(crate) port: String,
    pub(crate) mac: Mac,
}

impl Container {
    pub(crate) fn ipv4(&self) -> String {
        format!("10.32.{}.{}", self.host, self.number)
    }

    pub(crate) fn ipv6(&self) -> String {
        format!("fd32::{}:{}", self.host, self.number)
    }

    /// Asks another container for some echoes; all must come.
    pub(crate) fn pings(&self, other: &Self) {
        for address in [other.ipv4(), other.ipv6()] {
            self.space.run(&format!("ping -c 3 -i 0.2 -W 20 {address}"));
        }
    }
}

pub(crate) fn start(space: &Space, spec: OdpSpec) -> (Kernel, OdpSwitch, OdpInbox) {
    space.enter(async {
        let kernel = Kernel::new().unwrap();
        let (switch, inbox) = OdpSwitch::start(&kernel, spec).await.unwrap();
        (kernel, switch, inbox)
    })
}

pub(crate) fn spec(number: u8) -> OdpSpec {
    OdpSpec {
        name: SWITCH.into(),
        mac: [0x02, 0, 0, 1, number, 0xff],
        mtu: MTU,
        tap: TAP.into(),
        tunnel: TUNNEL.into(),
        tunnel_port: PORT,
        vni: 1,
        sweep_interval: Duration::from_secs(3600),
    }
}

pub(crate) fn attach_spec(host: u8, number: u8, space: &Space) -> AttachSpec {
    AttachSpec {
        id: format!("netns:box{number}"),
        namespace: space.path(),
        identity: None,
        host_name: format!("weft-box{number}"),
        name: "weft0".into(),
        mac: [0x02, 0, 0, 1, host, number],
        addresses: vec![
            format!("10.32.{host}.{number}/12").parse().unwrap(),
            format!("fd32::{host}:{number}/64").parse().unwrap(),
        ],
        mtu: MTU,
        gso_max_segs: None,
        enable_ipv6: false,
        gateways: Vec::new(),
        multicast_route: true,
        isolated: false,
        bridge: None,
    }
}

pub(crate) fn peer(number: u8) -> PeerId {
    PeerId::from_bytes([number; 32])
}

pub(crate) fn underlay_address(number: u8, outer: Outer) -> IpAddr {
    match outer {
        Outer::Ipv4 => format!("192.0.2.{number}"),
        Outer::Ipv6 => format!("2001:db8::{number}"),
    }
    .parse()
    .unwrap()
}

pub(crate) fn tunnel(number: u8, outer: Outer) -> Via {
    Via::Tunnel { remote: underlay_address(number, outer), local: None }
}

/// Joins hosts pairwise by tunnels, and tells each about the others' containers.
pub(crate) fn join(hosts: &[&Host], containers: &[&Container], outer: Outer) {
    for host in hosts {
        for other in hosts.iter().filter(|other| other.number != host.number) {
            host.reaches(other.number, tunnel(other.number, outer));
        }
        for container in containers.iter().filter(|container| container.host != host.number) {
            host.knows(container);
        }
    }
}

/// Waits until something holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        sleep(Duration::from_millis(50));
    }
}

/// All packets that pass an interface, as tcpdump prints them.
pub(crate) fn capture(space: &Space, interface: &str, filter: &str) -> Capture {
    // Without timestamps, whose digits may match a port.
    let line = format!("tcpdump -Z root -i {interface} -nn -t -v -l --immediate-mode {filter}");
    let sockets = || space.run("cat /proc/net/packet").lines().count();
    let before = sockets();
    let running = space.spawn(&line);
    until("tcpdump listens", || sockets() > before);
    sleep(Duration::from_millis(500));
    Capture(running)
}

/// A running tcpdump.
pub(crate) struct Capture(Running);

impl Capture {
    pub(crate) fn end(self) -> String {
        sleep(Duration::from_millis(500));
        self.0.end()
    }
}

/// Stops threads of a test when it ends.
#[derive(Clone, Default)]
pub(crate) struct Stop(pub(crate) Arc<AtomicU32>);

impl Stop {
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn set(&self) {
        self.0.store(1, Ordering::Relaxed);
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        // The threads' clones do not count: two are left when only the test's own goes.
        if Arc::strong_count(&self.0) <= 2 {
            self.set();
        }
    }
}
