//! A bus of the test's own, on which a stand-in of systemd-resolved notes what it is told.
#![allow(clippy::unwrap_used)]

use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt;
use weft_kernel::DeviceAddresses;
use zbus::{Connection, Message, MessageStream};

use super::bus::RESOLVED;
use super::*;
use crate::services::supervisor::{Health, Supervisor};

const LIMIT: Duration = Duration::from_secs(60);
const SERVER: &str = "10.47.255.1";

/// A message bus in a separate directory.
struct PrivateBus {
    daemon: Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Drop for PrivateBus {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn private_bus() -> PrivateBus {
    let dir = tempfile::tempdir().unwrap();
    let (config, socket) = (dir.path().join("bus.conf"), dir.path().join("bus"));
    let address = format!("unix:path={}", socket.display());
    let text = format!(
        "<busconfig><type>system</type><listen>{address}</listen><auth>EXTERNAL</auth>\
         <policy context='default'><allow user='*'/><allow own='*'/>\
         <allow send_destination='*' eavesdrop='true'/><allow eavesdrop='true'/></policy></busconfig>"
    );
    std::fs::write(&config, text).unwrap();
    let daemon = Command::new("dbus-daemon")
        .args(["--nofork", "--nopidfile"])
        .arg(format!("--config-file={}", config.display()))
        .stderr(Stdio::null())
        .spawn()
        .expect("dbus-daemon (package dbus-daemon)");
    let bus = PrivateBus { daemon, address, _dir: dir };
    let begun = Instant::now();
    while !is_socket(&socket) {
        assert!(begun.elapsed() < LIMIT, "dbus-daemon does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    bus
}

fn is_socket(path: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(path).is_ok()
}

type Calls = Arc<Mutex<Vec<String>>>;

/// Plays systemd-resolved until it is dropped: notes each call, and refuses those named.
struct Stub {
    connection: Option<Connection>,
    task: tokio::task::JoinHandle<()>,
    calls: Calls,
}

async fn stub(bus: &PrivateBus, refused: &'static [(&'static str, &'static str)]) -> Stub {
    let builder = zbus::connection::Builder::address(bus.address.as_str());
    let connection = builder.build().await.unwrap();
    let (calls, mut messages) = (Calls::default(), MessageStream::from(&connection));
    let (noted, own) = (Arc::clone(&calls), connection.clone());
    let task = tokio::spawn(async move {
        while let Some(Ok(message)) = messages.next().await {
            if message.message_type() == zbus::message::Type::MethodCall {
                answer(&own, &message, &noted, refused).await;
            }
        }
    });
    connection.request_name(RESOLVED).await.unwrap();
    Stub { connection: Some(connection), task, calls }
}

async fn answer(own: &Connection, message: &Message, noted: &Calls, refused: &[(&str, &str)]) {
    let (header, body) = (message.header(), message.body());
    let method = header.member().unwrap().to_string();
    let words = match method.as_str() {
        "SetLinkDNS" => format!("{:?}", body.deserialize::<(i32, Vec<(i32, Vec<u8>)>)>().unwrap()),
        "SetLinkDomains" => {
            format!("{:?}", body.deserialize::<(i32, Vec<(String, bool)>)>().unwrap())
        }
        "SetLinkDefaultRoute" => format!("{:?}", body.deserialize::<(i32, bool)>().unwrap()),
        "RevertLink" => body.deserialize::<i32>().unwrap().to_string(),
        _ => format!("{:?}", body.deserialize::<(i32, String)>().unwrap()),
    };
    noted.lock().unwrap().push(format!("{method} {words}"));
    match refused.iter().find(|(name, _)| *name == method) {
        Some((_, error)) => own.reply_error(&header, *error, &"not today").await.unwrap(),
        None => own.reply(&header, &()).await.unwrap(),
    }
}

impl Stub {
    fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    async fn wait(&self, last: &str) -> Vec<String> {
        until(|| self.calls().last().is_some_and(|call| call == last), last).await;
        self.calls()
    }

    /// Ends it, as when systemd-resolved is stopped.
    async fn stop(mut self) {
        self.task.abort();
        if let Some(connection) = self.connection.take() {
            connection.close().await.unwrap();
        }
    }
}

async fn until(holds: impl Fn() -> bool, what: &str) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The service, with interfaces on `weft` and `shop` that the test changes.
struct Running {
    resolved: Arc<Resolved>,
    device: watch::Sender<Option<DeviceAddresses>>,
    on_shop: watch::Sender<Option<DeviceAddresses>>,
    served: watch::Sender<BTreeSet<SocketAddr>>,
    supervisor: Supervisor,
}

fn device(index: u32, addresses: &[&str]) -> Option<DeviceAddresses> {
    let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
    Some(DeviceAddresses { index, is_up: true, addresses })
}

fn run(address: Option<String>) -> Running {
    let server: IpAddr = SERVER.parse().unwrap();
    let served = watch::Sender::new(BTreeSet::from([SocketAddr::new(server, 53)]));
    let domain = "weft.local".to_owned();
    let resolved = Resolved::with_bus(domain, address, served.subscribe(), Warnings::default());
    let resolved = Arc::new(resolved);
    let (device, on_shop) = (watch::Sender::new(device(7, &[SERVER])), watch::Sender::new(None));
    let mut supervisor = Supervisor::new(tokio::runtime::Handle::current(), Health::default());
    let (own, seen, shop) = (Arc::clone(&resolved), device.subscribe(), on_shop.subscribe());
    supervisor.start("host dns", move |pulse| {
        let networks = [(None, seen.clone()), (Some("shop".to_owned()), shop.clone())];
        let look = move || {
            let of =
                |(network, seen): &(Option<String>, watch::Receiver<Option<DeviceAddresses>>)| {
                    let devices = seen.borrow().iter().cloned().collect();
                    Interfaces { network: network.clone(), devices }
                };
            std::future::ready(networks.iter().map(of).collect())
        };
        keep(Arc::clone(&own), look, pulse)
    });
    Running { resolved, device, on_shop, served, supervisor }
}

/// Calls that set an interface up.
const CALLS: usize = 7;

/// These calls, in their order.
fn set_up(index: u32) -> [String; CALLS] {
    set_up_for("weft.local", index, [10, 47, 255, 1])
}

fn set_up_for(domain: &str, index: u32, server: [u8; 4]) -> [String; CALLS] {
    [
        format!("SetLinkDomains ({index}, [(\"{domain}\", true)])"),
        format!("SetLinkDefaultRoute ({index}, false)"),
        format!("SetLinkDNSOverTLS ({index}, \"no\")"),
        format!("SetLinkDNSSEC ({index}, \"no\")"),
        format!("SetLinkLLMNR ({index}, \"no\")"),
        format!("SetLinkMulticastDNS ({index}, \"no\")"),
        format!("SetLinkDNS ({index}, [(2, {server:?})])"),
    ]
}

#[tokio::test]
async fn the_interface_and_systemd_resolved_are_followed_and_the_end_takes_all_back() {
    let bus = private_bus();
    let running = run(Some(bus.address.clone()));
    let state = || running.resolved.state().unwrap_or_default();
    until(|| state().contains("does not run"), "the state").await;

    // It starts later than weft.
    let first = stub(&bus, &[]).await;
    assert_eq!(first.wait(&set_up(7)[CALLS - 1]).await, set_up(7));
    until(|| state() == "systemd-resolved asks 10.47.255.1 for weft.local", "the state").await;

    // The switch is removed and made again.
    running.device.send_replace(device(9, &[SERVER]));
    let calls = first.wait(&set_up(9)[CALLS - 1]).await;
    assert_eq!(calls[CALLS..], [&["RevertLink 7".to_owned()][..], &set_up(9)].concat());
    first.stop().await;
    until(|| state().contains("does not run"), "the state").await;

    // Restarted, it has forgotten everything.
    let second = stub(&bus, &[]).await;
    assert_eq!(second.wait(&set_up(9)[CALLS - 1]).await, set_up(9));
    running.device.send_replace(device(9, &["fe80::1"]));
    second.wait("RevertLink 9").await;
    until(|| state().contains("no address"), "the state").await;
    running.device.send_replace(device(9, &[SERVER]));
    second.wait(&set_up(9)[CALLS - 1]).await;

    let Running { resolved, supervisor, .. } = running;
    drop(supervisor);
    resolved.end().await;
    assert_eq!(second.calls().last().unwrap(), "RevertLink 9");
    resolved.end().await;
    assert_eq!(second.calls().iter().filter(|call| call.starts_with("RevertLink")).count(), 2);
}

#[tokio::test]
async fn each_network_of_the_host_has_its_domain_at_its_own_interface() {
    const ON_SHOP: &str = "10.134.0.1";
    let bus = private_bus();
    let stub = stub(&bus, &[]).await;
    let running = run(Some(bus.address.clone()));
    let state = || running.resolved.state().unwrap_or_default();
    stub.wait(&set_up(7)[CALLS - 1]).await;
    let server: IpAddr = ON_SHOP.parse().unwrap();
    running.served.send_modify(|served| _ = served.insert(SocketAddr::new(server, 53)));
    running.on_shop.send_replace(device(8, &[ON_SHOP]));
    let of_shop = set_up_for("shop.weft.local", 8, [10, 134, 0, 1]);
    let calls = stub.wait(&of_shop[CALLS - 1]).await;
    assert_eq!(calls, [set_up(7), of_shop].concat(), "weft is told once");
    let both = "systemd-resolved asks 10.47.255.1 for weft.local, 10.134.0.1 for shop.weft.local";
    until(|| state() == both, "the state").await;

    // The host leaves the one, and later the other.
    running.device.send_replace(None);
    let calls = stub.wait("RevertLink 7").await;
    assert!(!calls.contains(&"RevertLink 8".to_owned()), "{calls:?}");
    let asks = "systemd-resolved asks 10.134.0.1 for shop.weft.local; does not resolve weft.local:";
    until(|| state().starts_with(asks), "the state").await;
    running.on_shop.send_replace(None);
    stub.wait("RevertLink 8").await;
    until(|| state().starts_with("does not resolve weft.local"), "the state").await;
}

#[tokio::test]
async fn a_refusal_leaves_nothing_half_set_and_is_told() {
    let bus = private_bus();
    let stub = stub(&bus, &[("SetLinkDNS", "org.freedesktop.resolve1.LinkBusy")]).await;
    let running = run(Some(bus.address.clone()));
    let calls = stub.wait("RevertLink 7").await;
    assert_eq!(calls, [&set_up(7)[..], &["RevertLink 7".to_owned()]].concat());
    until(|| !running.resolved.warnings.list().is_empty(), "a warning").await;
    let warning = running.resolved.warnings.list().concat();
    assert!(warning.contains("SetLinkDNS") && warning.contains("systemd-networkd"), "{warning}");
    assert!(running.resolved.state().unwrap().contains("not today"));
}

#[tokio::test]
async fn an_older_systemd_resolved_lacks_two_methods_and_is_told_the_rest() {
    const UNKNOWN: &str = "org.freedesktop.DBus.Error.UnknownMethod";
    const LACKS: &[(&str, &str)] =
        &[("SetLinkDefaultRoute", UNKNOWN), ("SetLinkDNSOverTLS", UNKNOWN)];
    let bus = private_bus();
    let stub = stub(&bus, LACKS).await;
    let running = run(Some(bus.address.clone()));
    stub.wait(&set_up(7)[CALLS - 1]).await;
    let told = || running.resolved.state().is_some_and(|state| state.contains("asks"));
    until(told, "the state").await;
}

#[tokio::test]
async fn without_a_bus_or_dns_nothing_happens_and_the_state_says_why() {
    let nowhere = tempfile::tempdir().unwrap();
    let absent = format!("unix:path={}", nowhere.path().join("bus").display());
    for (address, why) in [(None, "separate network namespace"), (Some(absent), "does not run")] {
        let running = run(address);
        let state = || running.resolved.state().unwrap_or_default();
        until(|| state().contains(why), why).await;
        assert!(running.resolved.warnings.list().is_empty());
    }
    let bus = private_bus();
    let stub = stub(&bus, &[]).await;
    let running = run(Some(bus.address.clone()));
    stub.wait(&set_up(7)[CALLS - 1]).await;
    running.served.send_replace(BTreeSet::new());
    stub.wait("RevertLink 7").await;
    let state = || running.resolved.state().unwrap_or_default();
    until(|| state().contains("--dns-listen"), "the state").await;
}

#[tokio::test]
async fn a_bus_that_ends_is_looked_for_again() {
    let bus = private_bus();
    let first = stub(&bus, &[]).await;
    let running = run(Some(bus.address.clone()));
    first.wait(&set_up(7)[CALLS - 1]).await;
    drop(bus);
    let state = || running.resolved.state().unwrap_or_default();
    until(|| state().contains("does not run"), "the state").await;
    drop(running.supervisor);
    running.resolved.end().await;
}
