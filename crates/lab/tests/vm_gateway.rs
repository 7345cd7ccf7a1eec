//! Clients join the network by the kernel's `ovpn` device: Debian's `openvpn` without offload, OpenVPN 2.7 and our own
//! client on their own kernel's devices.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Signal;
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, Netns, require, try_wait_until};
use weft_lab::net::gateway::{
    Client, DEVICE, LIMIT, Machine, address_in, connected, connected_again,
};
use weft_lab::net::probe::connection_arrives;
use weft_lab::net::{Lab, wait_ping};

/// A revoked client loses its traffic within this time.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Debian's client moves packets itself, also where its kernel has a device for them.
const WITHOUT_OFFLOAD: &str = "--disable-dco";
/// Seconds of silence after which a client connects again; the host waits twice as long.
const RESTART_S: &str = "4";

/// A host that serves, with a container.
struct Stage {
    lab: Lab,
    container: Container,
}

impl Stage {
    fn new() -> anyhow::Result<Self> {
        require("openvpn", "openvpn")?;
        let lab = Lab::launched(1, &[])?;
        let container = lab.host(0).add_container("c1")?;
        let stage = Self { lab, container };
        stage.host().weft(&["ca", "init"])?.success()?;
        stage.serve("kernel")?;
        Ok(stage)
    }

    fn host(&self) -> &Host {
        self.lab.host(0)
    }

    fn serve(&self, engine: &str) -> anyhow::Result<()> {
        self.serve_with(engine, &[])
    }

    fn serve_with(&self, engine: &str, more: &[&str]) -> anyhow::Result<()> {
        let words = ["openvpn", "serve", "--ping", "1", "--ping-restart", RESTART_S, "--engine"];
        let served = self.host().weft_json(&[&words[..], &[engine], more].concat())?;
        let is_it = engine == "auto" || served["engine"] == engine;
        ensure!(served["state"] == "serving" && is_it, "{served}");
        Ok(())
    }

    fn machine(&self, number: u8) -> anyhow::Result<Machine> {
        Machine::new(&self.lab, number)
    }

    fn profile(&self, name: &str) -> anyhow::Result<PathBuf> {
        let text = self.host().weft(&["openvpn", "client", name])?.success()?.stdout;
        let path = self.lab.sandbox.directory().join(format!("{name}.ovpn"));
        std::fs::write(&path, text)?;
        Ok(path)
    }

    fn clients(&self) -> anyhow::Result<Vec<Value>> {
        let list = self.host().weft_json(&["status", "clients"])?;
        list.as_array().cloned().context("no list")
    }

    fn wait_clients(&self, count: usize) -> anyhow::Result<()> {
        try_wait_until(&format!("{count} clients"), LIMIT, || {
            Ok(self.clients().is_ok_and(|clients| clients.len() == count))
        })?;
        Ok(())
    }

    /// Whether a client's packets and the container's reach the other.
    fn carries(&self, machine: &Machine, client: Ipv4Addr) -> anyhow::Result<()> {
        machine.wait_ping(self.container.ipv4()?.into())?;
        wait_ping(&self.container, client.into(), LIMIT)?;
        Ok(())
    }

    /// Nothing of the gateway is left on the host.
    fn is_clean(&self) -> anyhow::Result<()> {
        let netns = self.host().netns();
        let devices = netns.exec(&["ip", "-o", "link"])?.success()?.stdout;
        ensure!(!devices.contains(DEVICE), "{devices}");
        for words in ["neigh show proxy", "route show proto 87"] {
            let left = netns.ip(words)?.success()?.stdout;
            ensure!(left.trim().is_empty(), "{words}: {left}");
        }
        Ok(())
    }
}

/// Whether a ping with these words is answered.
fn ping(from: &Machine, words: &[&str], to: IpAddr) -> anyhow::Result<bool> {
    let to = to.to_string();
    let words = [&["ping", "-n", "-c", "1", "-W", "1"][..], words, &[&to]].concat();
    Ok(from.netns.exec(&words)?.status.success())
}

#[test]
fn stock_clients_are_carried_by_the_kernel_and_end_with_their_certificate() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let (one, two) = (stage.machine(1)?, Machine { is_ipv4: false, ..stage.machine(2)? });
    let alice = one.connect_with(&stage.profile("alice")?, &[WITHOUT_OFFLOAD])?;
    let bob = two.connect_with(&stage.profile("bob")?, &[WITHOUT_OFFLOAD])?;
    stage.carries(&one, alice.address)?;
    stage.carries(&two, bob.address)?;
    one.wait_ping(bob.address.into())?;
    let shown = stage.clients()?;
    for (client, name) in shown.iter().zip(["alice", "bob"]) {
        ensure!(client["name"] == name && client["engine"] == "kernel", "{client}");
        ensure!(client["bytes_in"].as_u64() > Some(100), "{client}");
    }
    ensure!(stage.host().netns().ip(&format!("-d link show {DEVICE}"))?.stdout.contains("ovpn"));
    // A client sends from its own address alone.
    let container = stage.container.ipv4()?.into();
    let foreign = Ipv4Addr::from(u32::from(alice.address) ^ 0x40);
    for own in [foreign, bob.address] {
        one.netns.ip(&format!("addr add {own}/32 dev tun0"))?.success()?;
        let own = own.to_string();
        ensure!(!ping(&one, &["-I", &own], container)?, "{own} is let through");
    }
    ensure!(ping(&one, &["-I", &alice.address.to_string()], container)?, "nothing passes any more");

    let revoked = stage.host().weft_json(&["openvpn", "revoke", "alice"])?;
    ensure!(revoked["was_connected"] == true, "{revoked}");
    let is_cut_off = || Ok(ping(&one, &[], container).is_ok_and(|answered| !answered));
    try_wait_until("alice to be cut off", AT_ONCE, is_cut_off)?;
    stage.wait_clients(1)?;
    // It does not try again.
    let Client { mut process, .. } = alice;
    process.wait(LIMIT)?;
    stage.host().weft_json(&["openvpn", "stop"])?;
    stage.is_clean()
}

#[test]
fn a_key_is_renewed_without_a_lost_packet_and_a_client_moves() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let machine = stage.machine(1)?;
    let profile = stage.profile("alice")?;
    let mut alice = machine.connect_with(&profile, &[WITHOUT_OFFLOAD, "--reneg-sec", "5"])?;
    stage.carries(&machine, alice.address)?;
    let to = stage.container.ipv4()?.to_string();
    // One renewal. The next ones come before the key of this one seals, which costs a moment's packets each.
    let words = ["ping", "-n", "-q", "-i", "0.05", "-c", "100", &to];
    let pings = machine.netns.exec(&words)?.success()?;
    ensure!(pings.stdout.contains(" 0% packet loss"), "{}", pings.stdout);
    for _ in 0..2 {
        alice.process.line_with("Control Channel: TLS", LIMIT)?;
    }
    // All packets have another address from now on.
    machine.netns.ip("addr del 198.51.1.2/24 dev wan")?.success()?;
    machine.netns.ip("addr add 198.51.1.3/24 dev wan")?.success()?;
    stage.carries(&machine, alice.address)?;
    let moved = || -> anyhow::Result<bool> {
        let clients = stage.clients()?;
        let real = clients.first().and_then(|client| client["real_address"].as_str());
        Ok(real.is_some_and(|real| real.starts_with("198.51.1.3:")))
    };
    try_wait_until("the new address to be known", LIMIT, || Ok(moved().unwrap_or_default()))?;
    // The control channel follows, with its next keys.
    for _ in 0..2 {
        alice.process.line_with("Control Channel: TLS", LIMIT)?;
    }
    stage.carries(&machine, alice.address)
}

#[test]
fn clients_and_daemons_that_are_killed_leave_nothing_behind() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let (host, machine) = (stage.host(), stage.machine(1)?);
    let profile = stage.profile("alice")?;
    let alice = machine.connect_with(&profile, &[WITHOUT_OFFLOAD])?;
    stage.carries(&machine, alice.address)?;
    alice.process.signal(Signal::KILL);
    stage.wait_clients(0)?;
    let routes = host.netns().ip("route show proto 87")?.success()?.stdout;
    ensure!(!routes.contains(&alice.address.to_string()), "{routes}");

    // A daemon that is killed leaves the device without peers; the next one serves by one of its own.
    let mut alice = machine.connect_with(&profile, &[WITHOUT_OFFLOAD])?;
    host.kill_daemon();
    host.start_daemon(&[])?;
    let back = address_in(&connected_again(&mut alice.process)?, "ifconfig ")?;
    ensure!(back == alice.address, "another address: {back}");
    stage.carries(&machine, back)?;
    // The other engine in its place, and back.
    for engine in ["userspace", "kernel"] {
        stage.serve(engine)?;
        connected_again(&mut alice.process)?;
        stage.carries(&machine, back)?;
        ensure!(stage.clients()?[0]["engine"] == engine, "{:?}", stage.clients()?);
    }
    host.stop_daemon()?;
    stage.is_clean()
}

/// A host outside, and the gateway's address there.
const OUTSIDE: &str = "203.0.113.2";
const OUTSIDE_GATEWAY: &str = "203.0.113.1";
/// Of this many packets at once with this many bytes, a limit of 64 kbit/s lets about a third through.
const BURST: [&str; 4] = ["-c", "300", "-s", "1300"];

/// How many answers a burst of pings gets.
fn answers(from: &Netns, to: &str) -> anyhow::Result<u32> {
    let words = [&["ping", "-n", "-q", "-i", "0.001", "-W", "2"], &BURST[..], &[to]].concat();
    let said = from.exec(&words)?.stdout;
    let found = said.split(", ").find_map(|part| part.strip_suffix(" received"));
    found.and_then(|count| count.parse().ok()).with_context(|| format!("no count: {said}"))
}

#[test]
fn limits_and_the_way_out_hold_on_the_kernels_device() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let (host, machine) = (stage.host(), stage.machine(1)?);
    let outside = stage.lab.sandbox.add_netns("outside")?;
    host.netns().ip(&format!("link add out0 type veth peer name in0 netns {}", outside.name()))?;
    for (netns, device, own) in
        [(host.netns(), "out0", OUTSIDE_GATEWAY), (&outside, "in0", OUTSIDE)]
    {
        netns.ip(&format!("addr add {own}/24 dev {device}"))?;
        netns.ip(&format!("link set {device} up"))?;
    }
    host.netns().exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"])?.success()?;
    let profile = stage.profile("alice")?;
    let to = stage.container.ipv4()?.to_string();
    for (limit, counter) in [("--client-up", "up"), ("--client-down", "down")] {
        stage.serve_with("kernel", &[limit, "64K"])?;
        let mut alice = machine.connect_with(&profile, &[WITHOUT_OFFLOAD])?;
        stage.carries(&machine, alice.address)?;
        let got = answers(&machine.netns, &to)?;
        ensure!((50..250).contains(&got), "{limit}: {got} answers");
        ensure!(stage.clients()?[0]["engine"] == "kernel", "{:?}", stage.clients()?);
        let list = ["nft", "list", "counter", "inet", "weft-clients", counter];
        let shown = host.netns().exec(&list)?.success()?.stdout;
        ensure!(!shown.contains("packets 0 "), "{limit}: nothing was dropped by it: {shown}");
        alice.process.terminate(LIMIT)?;
        stage.wait_clients(0)?;
    }

    // The way to everything leads by the host, too, where the tunnel is not the way.
    machine.netns.ip("route add default via 198.51.1.1")?.success()?;
    stage.serve_with("kernel", &["--redirect-gateway"])?;
    let alice = machine.connect_with(&profile, &[WITHOUT_OFFLOAD])?;
    stage.carries(&machine, alice.address)?;
    ensure!(answers(&machine.netns, &to)? > 280, "a limit holds that is gone");
    machine.wait_ping(OUTSIDE.parse()?)?;
    let (from, at) = (PathBuf::from(machine.netns.path()), PathBuf::from(outside.path()));
    connection_arrives((&from, OUTSIDE_GATEWAY.parse()?), (&at, OUTSIDE.parse()?))?;
    ensure!(stage.clients()?[0]["engine"] == "kernel", "{:?}", stage.clients()?);
    // A stranger with a route to the client does not reach it.
    outside.ip(&format!("route add {} via {OUTSIDE_GATEWAY}", alice.address))?.success()?;
    let own = alice.address.to_string();
    let stranger = outside.exec(&["ping", "-n", "-c", "1", "-W", "1", &own])?;
    ensure!(!stranger.status.success(), "a stranger reaches a client");
    Ok(())
}

#[test]
fn clients_over_tcp_are_carried_by_the_kernel_beside_one_over_udp() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    // Pings would find out that a client has gone, too, but later.
    let rare = ["--ping", "30", "--ping-restart", "90", "--engine", "kernel"];
    let places = ["openvpn", "serve", "--listen", "1194", "--listen", "tcp:1194"];
    let served = stage.host().weft_json(&[&places[..], &rare].concat())?;
    ensure!(served["state"] == "serving" && served["engine"] == "kernel", "{served}");
    let one = stage.machine(1)?;
    let two = Machine { is_tcp: true, ..stage.machine(2)? };
    let three = Machine { is_tcp: true, is_ipv4: false, ..stage.machine(3)? };
    let alice = one.connect_with(&stage.profile("alice")?, &[WITHOUT_OFFLOAD])?;
    let profile = stage.profile("bob")?;
    let mut bob = two.connect_with(&profile, &[WITHOUT_OFFLOAD, "--reneg-sec", "5"])?;
    let carol = three.connect_with(&stage.profile("carol")?, &[WITHOUT_OFFLOAD])?;
    for (machine, client) in [(&one, &alice), (&two, &bob), (&three, &carol)] {
        stage.carries(machine, client.address)?;
        machine.wait_ping(bob.address.into())?;
    }
    for (client, protocol) in stage.clients()?.iter().zip(["udp", "tcp", "tcp"]) {
        ensure!(client["protocol"] == protocol && client["engine"] == "kernel", "{client}");
        ensure!(client["bytes_in"].as_u64() > Some(100), "{client}");
    }
    // New keys come by the connection that the kernel has. The first ones ended the handshake.
    let to = stage.container.ipv4()?.to_string();
    let words = ["ping", "-n", "-q", "-i", "0.05", "-c", "300", &to];
    let pings = two.netns.exec(&words)?.success()?;
    ensure!(pings.stdout.contains(" 0% packet loss"), "{}", pings.stdout);
    for _ in 0..3 {
        bob.process.line_with("Control Channel: TLS", LIMIT)?;
    }

    // A client that is killed says nothing; its kernel closes the connection.
    let Client { mut process, .. } = carol;
    process.kill();
    stage.wait_clients(2)?;
    // One that is revoked hears why, by a connection that the device has let go.
    stage.host().weft_json(&["openvpn", "revoke", "bob"])?;
    bob.process.line_with("certificate revoked", LIMIT)?;
    bob.process.wait(LIMIT)?;
    stage.wait_clients(1)?;
    let mut again = two.start(&profile)?;
    again.line_with("AUTH_FAILED,The certificate is revoked", LIMIT)?;
    // The kernel is taken without being asked for.
    stage.serve_with("auto", &["--listen", "tcp:1194"])?;
    let served = stage.host().weft_json(&["status"])?;
    ensure!(served["gateway"]["engine"] == "kernel", "{served}");
    stage.host().weft_json(&["openvpn", "stop"])?;
    stage.is_clean()
}

/// OpenVPN 2.7 with the libraries of a newer Debian.
const NEWER: [&str; 4] = [
    "/newer/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    "--library-path",
    "/newer/usr/lib/x86_64-linux-gnu",
    "/newer/usr/sbin/openvpn",
];

#[test]
fn openvpn_2_7_reaches_both_engines_by_its_own_kernels_device() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let machine = stage.machine(1)?;
    let profile = stage.profile("alice")?.to_string_lossy().into_owned();
    for engine in ["kernel", "userspace"] {
        stage.serve(engine)?;
        let words = ["--remote", "198.51.1.1", "1194", "udp", "--verb", "4", "--reneg-sec", "5"];
        let own = ["--config", &profile, "--dev", "tun0"];
        let newer = machine.netns.spawn(&[&NEWER[..], &words, &own].concat())?;
        let Client { mut process, address, .. } = connected(newer)?;
        let link = machine.netns.ip("-d link show tun0")?.success()?.stdout;
        ensure!(link.contains("ovpn"), "its device is not the kernel's: {link}");
        stage.carries(&machine, address)?;
        let to = stage.container.ipv4()?.to_string();
        let words = ["ping", "-n", "-q", "-i", "0.05", "-c", "100", &to];
        let pings = machine.netns.exec(&words)?.success()?;
        ensure!(pings.stdout.contains(" 0% packet loss"), "{engine}: {}", pings.stdout);
        process.line_with("Control Channel: TLS", LIMIT)?;
        ensure!(stage.clients()?[0]["engine"] == engine, "{:?}", stage.clients()?);
        process.terminate(LIMIT)?;
        stage.wait_clients(0)?;
    }
    Ok(())
}

#[test]
fn our_client_and_our_server_meet_on_two_kernels_devices() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let machine = stage.machine(1)?;
    let profile = stage.profile("alice")?;
    let text = std::fs::read_to_string(&profile)?;
    let is_place = |line: &&str| !line.starts_with("remote ");
    let text: Vec<&str> = text.lines().filter(is_place).collect();
    std::fs::write(&profile, text.join("\n") + "\nremote 198.51.1.1 1194 udp\nreneg-sec 5\n")?;
    let (weft, profile) =
        (stage.host().binary().display().to_string(), profile.display().to_string());
    let words = [&weft, "openvpn", "connect", &profile, "--engine", "kernel", "--json"];
    let mut process = machine.netns.spawn(&words)?;
    let line = process.line_with(r#""event":"connected""#, LIMIT)?;
    let shown: Value = serde_json::from_str(&line)?;
    ensure!(shown["engine"] == "kernel", "{shown}");
    let own = shown["addresses"][0].as_str().and_then(|net| net.split('/').next());
    let own: Ipv4Addr = own.context("no address")?.parse()?;
    stage.carries(&machine, own)?;
    let to = stage.container.ipv4()?.to_string();
    let words = ["ping", "-n", "-q", "-i", "0.05", "-c", "300", &to];
    let pings = machine.netns.exec(&words)?.success()?;
    ensure!(pings.stdout.contains(" 0% packet loss"), "{}", pings.stdout);
    process.line_with(r#""event":"renewed""#, LIMIT)?;
    ensure!(process.terminate(LIMIT)?.success(), "a signal is no failure");
    stage.wait_clients(0)?;
    let devices = machine.netns.exec(&["ip", "-o", "link"])?.success()?.stdout;
    ensure!(!devices.contains("weft-vpn"), "{devices}");
    Ok(())
}
