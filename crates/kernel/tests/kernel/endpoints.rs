//! Forwarding and neighbour entries of endpoints on other hosts, and the bridge's answers.

use std::{
    io::{BufRead, BufReader},
    net::IpAddr,
    process::{Child, Command, Stdio},
};

use serde_json::Value;
use weft_kernel::{DEVICE_GROUP, Kernel};

use crate::lab::{
    BRIDGE, Container, TAP, assert_same, attach_spec, host_with_bridge, json, make_device,
    make_tap, on_a_host, overlay_of, port_spec, run, snapshot, switch_on,
};

type Endpoint = ([u8; 6], Vec<IpAddr>, ());

fn endpoint(n: u8) -> Endpoint {
    let addresses =
        vec![format!("10.40.0.{n}").parse().unwrap(), format!("fd32::40:{n}").parse().unwrap()];
    ([0x02, 0, 0, 0, 9, n], addresses, ())
}

/// The static entries of the port, as iproute2 shows them.
fn forwarding() -> Vec<Value> {
    let all = json("bridge", &["-j", "-d", "fdb", "show"]);
    let ours = |entry: &&Value| entry["state"] == "static" && entry["ifname"] == TAP;
    let list = all.as_array().unwrap().iter().filter(ours);
    let mut list: Vec<Value> = list.cloned().collect();
    list.sort_by_key(|entry| entry["mac"].as_str().unwrap().to_owned());
    list
}

fn neighbours() -> Vec<(String, String)> {
    let mut list = Vec::new();
    for family in ["-4", "-6"] {
        let found = json("ip", &["-j", family, "neigh", "show", "dev", BRIDGE, "nud", "permanent"]);
        for entry in found.as_array().unwrap() {
            let text = |key: &str| entry[key].as_str().unwrap().to_owned();
            list.push((text("dst"), text("lladdr")));
        }
    }
    list.sort();
    list
}

async fn host_with_tap() -> Kernel {
    let kernel = host_with_bridge().await;
    make_tap();
    kernel.ensure_port(&port_spec()).await.unwrap();
    kernel
}

/// A host whose overlay port is a veth of ours; the test holds its other end, `wire`.
async fn host_with_wire() -> Kernel {
    let kernel = host_with_bridge().await;
    let group = DEVICE_GROUP.to_string();
    run("ip", &["link", "add", TAP, "group", &group, "type", "veth", "peer", "name", "wire"]);
    run("ip", &["link", "set", "wire", "addrgenmode", "none", "up"]);
    kernel.ensure_port(&port_spec()).await.unwrap();
    kernel
}

#[test]
fn entries_are_as_wanted() {
    on_a_host(|| async {
        let kernel = host_with_tap().await;
        let mut overlay = overlay_of(&kernel);
        overlay.replace_endpoints(&[endpoint(1), endpoint(2)]).await.unwrap();
        let entries = forwarding();
        assert_eq!(entries.len(), 2, "{entries:?}");
        for (entry, mac) in entries.iter().zip(["02:00:00:00:09:01", "02:00:00:00:09:02"]) {
            assert_eq!(entry["mac"], mac);
            assert_eq!(entry["master"], BRIDGE);
            let flags = entry["flags"].as_array().unwrap();
            assert!(flags.iter().any(|flag| flag == "sticky"), "{entry}");
            assert!(!flags.iter().any(|flag| flag == "extern_learn"), "{entry}");
        }
        let wanted = [
            ("10.40.0.1", "02:00:00:00:09:01"),
            ("10.40.0.2", "02:00:00:00:09:02"),
            ("fd32::40:1", "02:00:00:00:09:01"),
            ("fd32::40:2", "02:00:00:00:09:02"),
        ];
        assert_eq!(neighbours(), wanted.map(|(a, m)| (a.to_owned(), m.to_owned())));
    });
}

#[test]
fn only_differences_are_sent() {
    on_a_host(|| async {
        let kernel = host_with_tap().await;
        let mut overlay = overlay_of(&kernel);
        let first = [endpoint(1), endpoint(2)];
        overlay.replace_endpoints(&first).await.unwrap();
        let (before, changes) = (snapshot(), kernel.changes());
        overlay.replace_endpoints(&first).await.unwrap();
        assert_eq!(kernel.changes(), changes);
        assert_same(&snapshot(), &before);
        let restarted = Kernel::new().unwrap();
        overlay_of::<()>(&restarted).replace_endpoints(&first).await.unwrap();
        assert_eq!(restarted.changes(), 0);
        // Endpoint 2 goes, 3 comes: three entries each.
        overlay.replace_endpoints(&[endpoint(1), endpoint(3)]).await.unwrap();
        assert_eq!(kernel.changes(), changes + 6);
        // An address moves to another MAC: that one entry is replaced.
        let mut moved = [endpoint(1), endpoint(3)];
        moved[1].1.push("10.40.0.1".parse().unwrap());
        moved[0].1.remove(0);
        overlay.replace_endpoints(&moved).await.unwrap();
        assert_eq!(kernel.changes(), changes + 7);
        assert!(neighbours().contains(&("10.40.0.1".into(), "02:00:00:00:09:03".into())));
        overlay.replace_endpoints(&[]).await.unwrap();
        assert!(forwarding().is_empty() && neighbours().is_empty());
    });
}

#[test]
fn foreign_entries_stay_and_lost_ones_come_back() {
    on_a_host(|| async {
        let kernel = host_with_tap().await;
        let mut overlay = overlay_of(&kernel);
        make_device("other");
        run("ip", &["link", "set", "other", "master", BRIDGE]);
        let foreign = "02:00:00:00:0f:0f";
        run("bridge", &["fdb", "add", foreign, "dev", "other", "master", "static"]);
        run("ip", &["neigh", "add", "10.40.0.77", "lladdr", foreign, "dev", BRIDGE]);
        overlay.replace_endpoints(&[endpoint(1)]).await.unwrap();
        run("bridge", &["fdb", "del", "02:00:00:00:09:01", "dev", TAP, "master"]);
        run("ip", &["neigh", "del", "10.40.0.1", "dev", BRIDGE]);
        assert_eq!(overlay.resync().await.unwrap(), 2);
        assert_eq!(forwarding().len(), 1);
        overlay.replace_endpoints(&[]).await.unwrap();
        assert_eq!(neighbours(), [("10.40.0.77".to_owned(), foreign.to_owned())]);
        let fdb = run("bridge", &["fdb", "show", "brport", "other"]);
        assert!(fdb.contains(foreign), "{fdb}");
    });
}

#[test]
fn the_addresses_behind_a_port_are_those_that_the_bridge_learned_there() {
    on_a_host(|| async {
        let kernel = host_with_tap().await;
        for port in ["other", "third"] {
            make_device(port);
            run("ip", &["link", "set", port, "master", BRIDGE]);
            switch_on(port);
        }
        let learned = ["02:00:00:00:0e:01", "02:00:00:00:0e:02"];
        for mac in learned {
            run("bridge", &["fdb", "add", mac, "dev", "other", "master", "dynamic"]);
        }
        let (fixed, elsewhere) = ("02:00:00:00:0e:03", "02:00:00:00:0e:04");
        run("bridge", &["fdb", "add", fixed, "dev", "other", "master", "static"]);
        run("bridge", &["fdb", "add", elsewhere, "dev", "third", "master", "dynamic"]);
        let port = json("ip", &["-j", "link", "show", "other"])[0]["ifindex"].as_u64().unwrap();
        let mut found = kernel.learned_behind(port as u32).await.unwrap();
        found.sort_unstable();
        assert_eq!(found, [[2, 0, 0, 0, 0xe, 1], [2, 0, 0, 0, 0xe, 2]]);
    });
}

#[test]
fn thousands_of_endpoints_fit() {
    on_a_host(|| async {
        let kernel = host_with_tap().await;
        let mut overlay = overlay_of(&kernel);
        let many: Vec<Endpoint> = (0..2000u16)
            .map(|n| {
                let [high, low] = n.to_be_bytes();
                let address = IpAddr::from([10, 40, high, low]);
                ([0x02, 0, 0, 1, high, low], vec![address], ())
            })
            .collect();
        overlay.replace_endpoints(&many).await.unwrap();
        assert_eq!((forwarding().len(), neighbours().len()), (2000, 2000));
        let changes = kernel.changes();
        overlay.replace_endpoints(&many).await.unwrap();
        assert_eq!(kernel.changes(), changes);
        overlay.replace_endpoints(&many[..1]).await.unwrap();
        assert_eq!((forwarding().len(), neighbours().len()), (1, 1));
    });
}

/// A capture on the wire side of the overlay port.
struct Capture(Child);

impl Capture {
    fn start(filter: &str) -> Self {
        let mut child = Command::new("tcpdump")
            .args(["-Z", "root", "-l", "-n", "-i", "wire", "--immediate-mode", filter])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this test needs tcpdump");
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("listening on")));
        // Keep reading, so that tcpdump's last words find a listener.
        std::thread::spawn(move || lines.count());
        Self(child)
    }

    /// All lines up to the first that contains `last`.
    fn lines_until(&mut self, last: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for line in BufReader::new(self.0.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            let found = line.contains(last);
            lines.push(line);
            if found {
                return lines;
            }
        }
        panic!("the capture ended without {last}: {lines:?}");
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Pings of an endpoint that a busy machine may need until the bridge has answered for it.
const PINGS_MAX: usize = 10;

/// The MAC that the bridge answers for an endpoint. No host answers the ping itself.
fn looked_up(container: &Container, address: &str) -> Value {
    for _ in 0..PINGS_MAX {
        container.succeeds("ping", &["-c", "1", "-W", "1", address]);
        let found = resolved(container, address);
        if !found.is_null() {
            return found;
        }
    }
    Value::Null
}

/// The MAC of an address in the container's neighbour table.
fn resolved(container: &Container, address: &str) -> Value {
    let found = container.json("ip", &["-j", "neigh", "show", "dev", "weft0", address]);
    found[0]["lladdr"].clone()
}

#[test]
fn the_bridge_answers_arp_for_known_endpoints_and_asks_the_wire_for_others() {
    on_a_host(|| async {
        let kernel = host_with_wire().await;
        let mut overlay = overlay_of(&kernel);
        let container = Container::new();
        kernel.attach(&attach_spec(5, &container)).await.unwrap();
        overlay.replace_endpoints(&[endpoint(1)]).await.unwrap();
        let mut capture = Capture::start("arp");
        assert_eq!(looked_up(&container, "10.40.0.1"), "02:00:00:00:09:01");
        container.succeeds("ping", &["-c", "1", "-W", "1", "10.40.0.2"]);
        assert_eq!(resolved(&container, "10.40.0.2"), Value::Null);
        let lines = capture.lines_until("who-has 10.40.0.2 ");
        assert!(!lines.iter().any(|line| line.contains("10.40.0.1 ")), "{lines:?}");
    });
}

#[test]
fn the_bridge_answers_neighbour_discovery_for_known_endpoints() {
    on_a_host(|| async {
        let kernel = host_with_wire().await;
        let mut overlay = overlay_of(&kernel);
        let container = Container::new();
        kernel.attach(&attach_spec(5, &container)).await.unwrap();
        overlay.replace_endpoints(&[endpoint(1)]).await.unwrap();
        let mut capture = Capture::start("icmp6");
        assert_eq!(looked_up(&container, "fd32::40:1"), "02:00:00:00:09:01");
        container.succeeds("ping", &["-c", "1", "-W", "1", "fd32::40:2"]);
        let lines = capture.lines_until("who has fd32::40:2");
        assert!(!lines.iter().any(|line| line.contains("who has fd32::40:1")), "{lines:?}");
        // The ping itself went out, to the endpoint's MAC by way of the static entry.
        assert!(lines.iter().any(|line| line.contains("> fd32::40:1: ICMP6, echo request")));
    });
}

#[test]
fn a_container_cannot_draw_a_remote_endpoints_traffic_to_itself() {
    on_a_host(|| async {
        let kernel = host_with_wire().await;
        let mut overlay = overlay_of(&kernel);
        let (victim, thief) = (Container::new(), Container::new());
        kernel.attach(&attach_spec(5, &victim)).await.unwrap();
        kernel.attach(&attach_spec(6, &thief)).await.unwrap();
        overlay.replace_endpoints(&[endpoint(1)]).await.unwrap();
        thief.run("ip", &["link", "set", "weft0", "address", "02:00:00:00:09:01"]);
        thief.succeeds("ping", &["-c", "1", "-W", "1", "10.32.0.5"]);
        let entries = forwarding();
        assert_eq!(entries.len(), 1, "{entries:?}");
        assert_eq!(entries[0]["mac"], "02:00:00:00:09:01");
    });
}
