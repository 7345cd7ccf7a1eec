//! Two hosts with a cable between them.

use std::{
    net::{IpAddr, UdpSocket},
    os::fd::{AsFd, AsRawFd},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use weft_crypto::{Cipher, SaKey};
use weft_io::{
    encap::{EncapSocket, Taker},
    namespace::{Namespace, run_in, unshare_network},
};
use weft_kernel::xfrm::{
    Direction, Limits, PolicyId, PolicySpec, StateId, StateSpec, Template, UdpPorts, Xfrm,
    XfrmEvent, XfrmWatch,
};

pub(crate) const VXLAN_PORT: u16 = 6787;
pub(crate) const ENCAP_PORT: u16 = 6785;
pub(crate) const PORTS: UdpPorts = UdpPorts { source: ENCAP_PORT, destination: ENCAP_PORT };
/// How long an event may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How long nothing must come to count as nothing.
const QUIET: Duration = Duration::from_millis(300);

/// Runs a test body on a new runtime.
pub(crate) fn block_on<F: Future<Output = ()>>(body: F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(body);
}

/// One host. Its namespace ends with it.
pub(crate) struct Host {
    pub(crate) namespace: Namespace,
    pub(crate) xfrm: Xfrm,
    /// Its address on the cable.
    pub(crate) outer: IpAddr,
    /// Its address inside the overlay.
    pub(crate) inner: IpAddr,
    _encap: EncapSocket,
}

impl Host {
    pub(crate) fn new(number: u8, ipv6: bool) -> Self {
        let namespace = std::thread::spawn(|| {
            unshare_network().expect("this test makes network namespaces and must run as root");
            Namespace::current().unwrap()
        });
        let namespace = namespace.join().unwrap();
        let runtime = tokio::runtime::Handle::current();
        let (xfrm, encap) = run_in(&namespace, || {
            let _guard = runtime.enter();
            run("ip", &["link", "set", "lo", "up"]);
            (Xfrm::open().unwrap(), EncapSocket::bind(Taker::Ipsec, None, ENCAP_PORT).unwrap())
        })
        .unwrap();
        let outer = if ipv6 { format!("fd01::{number}") } else { format!("10.1.0.{number}") };
        let inner = format!("10.99.0.{number}");
        let (outer, inner) = (outer.parse().unwrap(), inner.parse().unwrap());
        Self { namespace, xfrm, outer, inner, _encap: encap }
    }

    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_fd().as_raw_fd())
    }

    pub(crate) fn within<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        run_in(&self.namespace, body).unwrap()
    }

    pub(crate) fn run(&self, line: &str) -> String {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.within(|| run(words[0], &words[1..]))
    }

    pub(crate) fn succeeds(&self, line: &str) -> bool {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.within(|| {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().unwrap().success()
        })
    }

    pub(crate) fn start(&self, line: &str) -> Running {
        let words: Vec<&str> = line.split_whitespace().collect();
        Running(self.within(|| {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().unwrap_or_else(|error| panic!("this test needs {}: {error}", words[0]))
        }))
    }

    /// Writes packets on the cable to a file.
    pub(crate) fn capture(&self, file: &str, filter: &str) -> Running {
        let _ = std::fs::remove_file(file);
        let line = format!("tcpdump -Z root --immediate-mode -i u0 -U -w {file} {filter}");
        let running = self.start(&line);
        let deadline = Instant::now() + PATIENCE;
        while std::fs::metadata(file).map_or(0, |file| file.len()) == 0 {
            assert!(Instant::now() < deadline, "tcpdump does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
        running
    }

    pub(crate) fn udp(&self, address: IpAddr, port: u16) -> UdpSocket {
        let socket = self.within(|| UdpSocket::bind((address, port)).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        socket
    }

    pub(crate) fn watch(&self) -> XfrmWatch {
        let runtime = tokio::runtime::Handle::current();
        self.within(|| {
            let _guard = runtime.enter();
            self.xfrm.watch().unwrap()
        })
    }

    /// A counter of the kernel's IPsec for the whole namespace.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        let text =
            self.within(|| std::fs::read_to_string("/proc/thread-self/net/xfrm_stat").unwrap());
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse().unwrap()
    }

    pub(crate) async fn add(&self, specs: &[StateSpec]) {
        for result in self.xfrm.add_states(specs).await {
            result.unwrap();
        }
    }

    pub(crate) async fn set(&self, specs: &[PolicySpec]) {
        for result in self.xfrm.set_policies(specs).await {
            result.unwrap();
        }
    }

    pub(crate) async fn packets(&self, id: StateId) -> u64 {
        let usage = self.xfrm.usage(&[id]).await.pop().unwrap().unwrap();
        usage.unwrap_or_else(|| panic!("{id:?} is not there")).packets
    }
}

/// A program that ends with this value.
pub(crate) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two hosts with a cable and a VXLAN device each.
pub(crate) struct Pair {
    pub(crate) a: Host,
    pub(crate) b: Host,
}

impl Pair {
    pub(crate) fn new(ipv6: bool) -> Self {
        let (a, b) = (Host::new(1, ipv6), Host::new(2, ipv6));
        a.run(&format!("ip link add u0 type veth peer name u0 netns {}", b.path()));
        for (host, other) in [(&a, &b), (&b, &a)] {
            let number = if std::ptr::eq(host, &raw const a) { 1 } else { 2 };
            let prefix = if ipv6 { "64 nodad" } else { "24" };
            host.run(&format!("ip address add {}/{prefix} dev u0", host.outer));
            host.run("ip link set u0 mtu 1500 up");
            host.run(&format!(
                "ip link add vx type vxlan id 1 dstport {VXLAN_PORT} local {} remote {} dev u0 \
                 noudpcsum udp6zerocsumtx udp6zerocsumrx nolearning {}",
                host.outer,
                other.outer,
                if ipv6 { "" } else { "df set" }
            ));
            // Nor does a router solicitation.
            host.run("ip link set vx addrgenmode none");
            host.run(&format!("ip link set vx address 02:00:00:00:00:0{number} mtu 1388 up"));
            host.run(&format!("ip address add {}/24 dev vx", host.inner));
        }
        // No question for an address disturbs the counts.
        a.run(&format!("ip neigh add {} lladdr 02:00:00:00:00:02 dev vx", b.inner));
        b.run(&format!("ip neigh add {} lladdr 02:00:00:00:00:01 dev vx", a.inner));
        let deadline = Instant::now() + PATIENCE;
        while !a.succeeds(&format!("ping -c 1 -W 1 {}", b.outer)) {
            assert!(Instant::now() < deadline, "the cable does not carry");
        }
        Self { a, b }
    }

    /// A path both ways with these SPIs: states, then policies.
    pub(crate) async fn connect(&self, cipher: Cipher, encapsulation: Option<UdpPorts>, spi: u32) {
        for (from, to, spi) in [(&self.a, &self.b, spi), (&self.b, &self.a, spi + 1)] {
            let spec = state(from, to, spi);
            let spec = StateSpec { cipher, encapsulation, ..spec };
            to.add(&[StateSpec { direction: Direction::In, ..spec.clone() }]).await;
            from.add(&[spec]).await;
            from.set(&[policy(from, to, spi)]).await;
        }
    }

    /// Whether ten pings from A to B through the overlay are all answered.
    pub(crate) fn pings(&self) -> bool {
        self.a.run(&format!("ping -q -c 10 -i 0.01 -W 2 {}", self.b.inner)).contains(" 0% packet")
    }

    pub(crate) fn ping_succeeds(&self) -> bool {
        self.a.succeeds(&format!("ping -q -c 2 -i 0.05 -W 1 {}", self.b.inner))
    }
}

/// An outbound state without limits. Every SPI has a different key.
pub(crate) fn state(from: &Host, to: &Host, spi: u32) -> StateSpec {
    let mut key = [0x42; 36];
    key[..4].copy_from_slice(&spi.to_be_bytes());
    StateSpec {
        direction: Direction::Out,
        source: from.outer,
        destination: to.outer,
        spi,
        cipher: Cipher::Aes256Gcm,
        key: SaKey::from_bytes(key),
        encapsulation: None,
        limits: Limits::NONE,
        lifetime: Duration::from_secs(3600),
        group: None,
        cpu: None,
        mark: None,
    }
}

pub(crate) fn policy_id(from: &Host, to: &Host) -> PolicyId {
    PolicyId { source: from.outer, destination: to.outer, port: VXLAN_PORT }
}

pub(crate) fn policy(from: &Host, to: &Host, spi: u32) -> PolicySpec {
    PolicySpec { id: policy_id(from, to), template: Template::State { spi } }
}

pub(crate) async fn next(watch: &mut XfrmWatch) -> XfrmEvent {
    let event = tokio::time::timeout(PATIENCE, watch.next()).await;
    event.expect("an event is missing").unwrap()
}

/// All events until none comes for a while.
pub(crate) async fn rest(watch: &mut XfrmWatch) -> Vec<XfrmEvent> {
    let mut events = Vec::new();
    while let Ok(event) = tokio::time::timeout(QUIET, watch.next()).await {
        events.push(event.unwrap());
    }
    events
}

/// Runs a program that must succeed.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("this test needs the program {program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {text} {error}");
    text
}

/// The running kernel's version.
pub(crate) fn kernel() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split(['.', '-']).map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}
