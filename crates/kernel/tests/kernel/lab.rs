//! Namespaces to work in, and iproute2 to look at them.

use std::{
    os::fd::{AsFd, AsRawFd},
    path::PathBuf,
    process::{Command, Stdio},
};

use ipnet::IpNet;
use serde_json::Value;
use weft_io::namespace::{Namespace, run_in, unshare_network};
use weft_kernel::{AttachSpec, BridgeSpec, Kernel, Overlay, OverlaySpec, PortSpec};

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

    pub(crate) fn json(&self, program: &str, arguments: &[&str]) -> Value {
        run_in(&self.0, || json(program, arguments)).unwrap()
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

/// Waits until a device has its carrier; the kernel tells that a moment later.
pub(crate) fn wait_until_up(name: &str) {
    for _ in 0..2000 {
        if link(name)["operstate"] == "UP" {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{name} does not come up: {}", link(name));
}

/// Compares what was shown at two moments, and shows only what differs.
pub(crate) fn assert_same(now: &[Value], before: &[Value]) {
    for (now, before) in now.iter().zip(before) {
        assert_eq!(now, before);
    }
    assert_eq!(now.len(), before.len());
}

/// Takes out what moves by itself: a bridge's timers and what it learned.
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
        mtu: MTU,
        txqueuelen: Some(2000),
        gso_max_size: Some(60_000),
        gso_max_segs: Some(40),
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

/// Attachment number `n`, with the address 10.32.0.n.
pub(crate) fn attach_spec(n: u8, container: &Container) -> AttachSpec {
    AttachSpec {
        id: format!("netns:box{n}"),
        namespace: container.path(),
        host_name: format!("weft-box{n}"),
        name: "weft0".into(),
        mac: [0x02, 0, 0, 0, 1, n],
        addresses: vec![net(&format!("10.32.0.{n}/12")), net(&format!("fd32::{n}/64"))],
        mtu: MTU,
        gso_max_segs: Some(42),
        multicast_route: true,
        bridge: BRIDGE.into(),
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
