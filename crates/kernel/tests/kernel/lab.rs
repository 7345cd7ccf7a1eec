//! Network namespaces for tests, and iproute2 to inspect them.

use std::{
    os::fd::{AsFd, AsRawFd},
    path::PathBuf,
    process::{Command, Stdio},
};

use ipnet::IpNet;
use serde_json::Value;
use weft_io::namespace::{Namespace, run_in, unshare_network};
use weft_kernel::{
    AttachSpec, BridgeSpec, Kernel, OuterFamily, Overlay, OverlaySpec, PortSpec, VxlanSpec,
};

pub(crate) const BRIDGE: &str = "weft";
pub(crate) const TAP: &str = "weft-tap";
pub(crate) const MTU: u32 = 1388;
pub(crate) const BRIDGE_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 1];

/// Runs a test body in a new network namespace that stands for the host.
pub(crate) fn on_a_host<F: Future<Output = ()>>(body: impl FnOnce() -> F + Send + 'static) {
    let outcome = std::thread::spawn(|| {
        unshare_network().expect("this test makes network namespaces and must run as root");
        run("ip", &["link", "set", "lo", "up"]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(body());
    })
    .join();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// A namespace that stands for a container. It ends with this value.
pub(crate) struct Container(Namespace);

impl Container {
    pub(crate) fn new() -> Self {
        let namespace = std::thread::spawn(|| {
            unshare_network().unwrap();
            run("ip", &["link", "set", "lo", "up"]);
            Namespace::current().unwrap()
        });
        Self(namespace.join().unwrap())
    }

    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_fd().as_raw_fd()).into()
    }

    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> String {
        run_in(&self.0, || run(program, arguments)).unwrap()
    }

    pub(crate) fn succeeds(&self, program: &str, arguments: &[&str]) -> bool {
        run_in(&self.0, || {
            let mut command = Command::new(program);
            command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().unwrap().success()
        })
        .unwrap()
    }

    /// Makes something (a socket) inside.
    pub(crate) fn inside<T: Send>(&self, make: impl FnOnce() -> T + Send) -> T {
        run_in(&self.0, make).unwrap()
    }

    /// Makes a veth pair: `outer` in the calling thread's namespace, `wan` inside.
    fn plug_into(&self, outer: &str) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.0.as_fd().as_raw_fd());
        let peer = ["type", "veth", "peer", "name", "wan", "netns", &path];
        run("ip", &[&["link", "add", outer][..], &peer].concat());
        run("ip", &["link", "set", outer, "up"]);
    }

    /// The same, with an address inside, switched on.
    pub(crate) fn plug(&self, outer: &str, address: &str) {
        self.plug_into(outer);
        self.run("ip", &["address", "add", address, "dev", "wan"]);
        self.run("ip", &["link", "set", "wan", "up"]);
    }

    pub(crate) fn json(&self, program: &str, arguments: &[&str]) -> Value {
        run_in(&self.0, || json(program, arguments)).unwrap()
    }
}

/// A further host on the underlay `wan` with the usual switch: a bridge, a TAP whose other end is not read, and
/// VXLAN devices for both families.
pub(crate) struct Host {
    pub(crate) namespace: Container,
    pub(crate) kernel: Kernel,
    pub(crate) overlay: Overlay<u8>,
}

impl Host {
    /// Host number `n` (192.0.2.n, fd00:2::n), whose underlay link `wan` is the other end of a veth
    /// in the bridge `underlay` of the calling thread's namespace.
    pub(crate) async fn new(n: u8) -> Self {
        let namespace = Container::new();
        let handle = tokio::runtime::Handle::current();
        let kernel = run_in(&namespace.0, || {
            let _guard = handle.enter();
            Kernel::new().unwrap()
        })
        .unwrap();
        if !has_link("underlay") {
            run("ip", &["link", "add", "underlay", "type", "bridge", "mcast_snooping", "0"]);
            run("ip", &["link", "set", "underlay", "up"]);
        }
        let outer = format!("u{n}");
        namespace.plug_into(&outer);
        run("ip", &["link", "set", &outer, "master", "underlay", "up"]);
        namespace.run("ip", &["address", "add", &format!("192.0.2.{n}/24"), "dev", "wan"]);
        let six = format!("fd00:2::{n}/64");
        namespace.run("ip", &["address", "add", &six, "dev", "wan", "nodad"]);
        namespace.run("ip", &["link", "set", "wan", "up"]);
        kernel.ensure_bridge(&bridge_spec()).await.unwrap();
        namespace.run("ip", &["tuntap", "add", "dev", TAP, "mode", "tap"]);
        kernel.ensure_port(&port_spec()).await.unwrap();
        for family in [OuterFamily::V4, OuterFamily::V6] {
            kernel.ensure_vxlan(&vxlan_spec(family)).await.unwrap();
        }
        let overlay = overlay_of(&kernel);
        Self { namespace, kernel, overlay }
    }

    /// A container of this host: see [`attach_spec`].
    pub(crate) async fn container(&self, n: u8) -> Container {
        let container = Container::new();
        self.kernel.attach(&attach_spec(n, &container)).await.unwrap();
        container
    }
}

/// Runs a program that must succeed, in the calling thread's namespace.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("this test needs the program {program}: {error}"));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// The JSON that a program prints; nothing at all counts as an empty list.
pub(crate) fn json(program: &str, arguments: &[&str]) -> Value {
    let text = run(program, arguments);
    if text.trim().is_empty() {
        return Value::Array(Vec::new());
    }
    serde_json::from_str(&text).unwrap()
}

/// `ip -j -d link show` of one device.
pub(crate) fn link(name: &str) -> Value {
    json("ip", &["-j", "-d", "link", "show", "dev", name])[0].clone()
}

/// Everything that iproute2 shows of the host's namespace, for before and after.
pub(crate) fn snapshot() -> Vec<Value> {
    let mut shown = vec![
        json("ip", &["-j", "-d", "link", "show"]),
        json("ip", &["-j", "address", "show"]),
        json("ip", &["-j", "neigh", "show"]),
        json("ip", &["-j", "-6", "neigh", "show"]),
        json("ip", &["-j", "route", "show", "table", "all"]),
        json("bridge", &["-j", "-d", "link", "show"]),
        json("bridge", &["-j", "fdb", "show"]),
    ];
    shown.iter_mut().for_each(forget_changing);
    shown
}

/// Asks again and again for some seconds until something is so.
pub(crate) fn wait_until(mut is_so: impl FnMut() -> bool) -> bool {
    for _ in 0..100 {
        if is_so() {
            return true;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    false
}

/// Waits until a device has its carrier; the kernel reports it a moment later.
pub(crate) fn wait_until_up(name: &str) {
    for _ in 0..2000 {
        if link(name)["operstate"] == "UP" {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{name} does not come up: {}", link(name));
}

/// Compares two snapshots and shows only the differences.
pub(crate) fn assert_same(now: &[Value], before: &[Value]) {
    let mut found = Vec::new();
    differences(&now.into(), &before.into(), "", &mut found);
    assert!(found.is_empty(), "differs (now, before): {found:#?}");
}

fn differences(now: &Value, before: &Value, path: &str, found: &mut Vec<String>) {
    match (now, before) {
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            for (index, (left, right)) in left.iter().zip(right).enumerate() {
                differences(left, right, &format!("{path}/{index}"), found);
            }
        }
        (Value::Object(left), Value::Object(right)) => {
            let keys: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
            for key in keys {
                differences(&now[key], &before[key], &format!("{path}/{key}"), found);
            }
        }
        _ if now == before => {}
        _ => found.push(format!("{path}: {now}, {before}")),
    }
}

/// Removes values that change by themselves: a bridge's timers and learned entries.
fn forget_changing(value: &mut Value) {
    match value {
        Value::Array(list) => {
            list.retain(|entry| entry["mac"].is_null() || entry["state"] != "");
            list.iter_mut().for_each(forget_changing);
        }
        Value::Object(fields) => {
            fields.retain(|key, _| !key.ends_with("_timer"));
            fields.values_mut().for_each(forget_changing);
        }
        _ => {}
    }
}

pub(crate) fn has_link(name: &str) -> bool {
    json("ip", &["-j", "link", "show"])
        .as_array()
        .unwrap()
        .iter()
        .any(|link| link["ifname"] == name)
}

pub(crate) fn bridge_spec() -> BridgeSpec {
    BridgeSpec { name: BRIDGE.into(), mac: BRIDGE_MAC, mtu: MTU }
}

pub(crate) fn port_spec() -> PortSpec {
    PortSpec {
        name: TAP.into(),
        bridge: BRIDGE.into(),
        isolated: true,
        learning: false,
        neigh_suppress: true,
        flood: true,
        mtu: MTU,
        gso_max_size: Some(60_000),
        gso_max_segs: Some(40),
    }
}

/// The overlay port for peers of one address family.
pub(crate) fn vxlan_spec(family: OuterFamily) -> VxlanSpec {
    let name = match family {
        OuterFamily::V4 => "weft-vxlan",
        OuterFamily::V6 => "weft-vxlan6",
    };
    VxlanSpec {
        name: name.into(),
        vni: 1,
        port: 6787,
        family,
        mac: None,
        mtu: MTU,
        bridge: Some(BRIDGE.into()),
        copy_dscp: false,
        cut: false,
    }
}

/// An overlay on the usual devices.
pub(crate) fn overlay_of<P: Copy + Eq + std::hash::Hash>(kernel: &Kernel) -> Overlay<P> {
    let spec = OverlaySpec {
        bridge: BRIDGE.into(),
        tap: TAP.into(),
        vxlan: "weft-vxlan".into(),
        vxlan6: "weft-vxlan6".into(),
    };
    Overlay::new(kernel.clone(), spec)
}

/// The endpoint of [`attach_spec`] as other hosts know it, held by peer `peer`.
pub(crate) fn endpoint_of(n: u8, peer: u8) -> ([u8; 6], Vec<std::net::IpAddr>, u8) {
    let addresses = [format!("10.32.0.{n}"), format!("fd32::{n}")];
    ([0x02, 0, 0, 0, 1, n], addresses.map(|text| text.parse().unwrap()).to_vec(), peer)
}

/// Attachment number `n`, with the address 10.32.0.n.
pub(crate) fn attach_spec(n: u8, container: &Container) -> AttachSpec {
    AttachSpec {
        id: format!("netns:box{n}"),
        namespace: container.path(),
        identity: None,
        host_name: format!("weft-box{n}"),
        name: "weft0".into(),
        mac: [0x02, 0, 0, 0, 1, n],
        addresses: vec![net(&format!("10.32.0.{n}/12")), net(&format!("fd32::{n}/64"))],
        mtu: MTU,
        gso_max_segs: Some(42),
        enable_ipv6: false,
        gateways: Vec::new(),
        multicast_route: true,
        isolated: false,
        bridge: Some(BRIDGE.into()),
    }
}

pub(crate) fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// A host with the bridge.
pub(crate) async fn host_with_bridge() -> Kernel {
    let kernel = Kernel::new().unwrap();
    kernel.ensure_bridge(&bridge_spec()).await.unwrap();
    kernel
}

/// A TAP device as the engine would open it, but persistent.
pub(crate) fn make_tap() {
    run("ip", &["tuntap", "add", "dev", TAP, "mode", "tap"]);
}

/// A device that is not ours: one end of a veth pair, down. It is called a veth by the kernel.
pub(crate) fn make_device(name: &str) {
    let peer = format!("{name}-x");
    run("ip", &["link", "add", name, "type", "veth", "peer", "name", &peer]);
}

/// Switches a device of [`make_device`] on, both ends, so that it has a carrier.
pub(crate) fn switch_on(name: &str) {
    let peer = format!("{name}-x");
    run("ip", &["link", "set", &peer, "addrgenmode", "none", "up"]);
    run("ip", &["link", "set", name, "addrgenmode", "none", "up"]);
}
