//! Stock OpenVPN clients join the network by a host that serves them, judged by Debian's `openvpn` and by dig.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, Netns, Running, require, try_wait_until};
use weft_lab::net::probe::connection_arrives;
use weft_lab::net::{Lab, namespace, wait_ping};

const LIMIT: Duration = Duration::from_secs(20);
/// Less than a client needs for a handshake, and more than it waits for an answer.
const REFUSED_LIMIT: Duration = Duration::from_secs(15);
const CONNECTED: &str = "Initialization Sequence Completed";
const DEVICE: &str = "weft-vpn";

/// Two hosts, of which the first serves, and a container of each.
struct Stage {
    lab: Lab,
    one: Container,
    two: Container,
}

/// A machine outside of the network that reaches the first host.
struct Machine {
    netns: Netns,
    number: u8,
    /// It connects over IPv4, else over IPv6.
    is_ipv4: bool,
}

/// A running client.
struct Client {
    process: Running,
    address: Ipv4Addr,
    /// The DNS server that it was told of.
    dns: Ipv4Addr,
}

impl Stage {
    fn new() -> anyhow::Result<Self> {
        require("openvpn", "openvpn")?;
        require("dig", "bind9-dnsutils")?;
        let lab = Lab::pair(&[])?;
        let (one, two) = lab.containers()?;
        let host = lab.host(0);
        let refused = host.weft(&["openvpn", "serve"])?;
        ensure!(refused.stderr.contains("weft ca init"), "{refused:?}");
        host.weft(&["ca", "init"])?.success()?;
        let served = serve(host)?;
        ensure!(served["state"] == "serving", "{served}");
        Ok(Self { lab, one, two })
    }

    fn host(&self) -> &Host {
        self.lab.host(0)
    }

    fn machine(&self, number: u8) -> anyhow::Result<Machine> {
        let (netns, host) = (self.lab.sandbox.add_netns(&format!("m{number}"))?, self.host());
        let (outer, name) = (format!("m{number}"), netns.name().to_owned());
        host.netns().ip(&format!("link add {outer} type veth peer name wan netns {name}"))?;
        for (netns, device, last) in [(host.netns(), outer.as_str(), 1), (&netns, "wan", 2)] {
            netns.ip(&format!("addr add 198.51.{number}.{last}/24 dev {device}"))?;
            netns.ip(&format!("addr add 2001:db8:{number}::{last}/64 dev {device} nodad"))?;
            netns.ip(&format!("link set {device} up"))?;
        }
        Ok(Machine { netns, number, is_ipv4: true })
    }

    /// A new profile, in a file.
    fn profile(&self, host: &Host, name: &str) -> anyhow::Result<PathBuf> {
        let text = host.weft(&["openvpn", "client", name])?.success()?.stdout;
        let path = self.lab.sandbox.directory().join(format!("{}-{name}.ovpn", host.index()));
        std::fs::write(&path, text)?;
        Ok(path)
    }

    fn clients(&self) -> anyhow::Result<Vec<Value>> {
        let list = self.host().weft_json(&["status", "clients"])?;
        list.as_array().cloned().context("no list")
    }
}

/// Clients notice within seconds that a host was away.
fn serve(host: &Host) -> anyhow::Result<Value> {
    Ok(host.weft_json(&["openvpn", "serve", "--ping", "1", "--ping-restart", "4"])?)
}

impl Machine {
    /// Starts a client.
    fn start(&self, profile: &Path) -> anyhow::Result<Running> {
        let (remote, proto) = match self.is_ipv4 {
            true => (format!("198.51.{}.1", self.number), "udp"),
            false => (format!("2001:db8:{}::1", self.number), "udp6"),
        };
        let profile = profile.to_string_lossy();
        // The profile's own remote is the host's address on the underlay.
        let place = ["openvpn", "--remote", &remote, "1194", proto, "--verb", "3"];
        let words = [&place[..], &["--config", &profile, "--dev", "tun0"]].concat();
        Ok(self.netns.spawn(&words)?)
    }

    fn connect(&self, profile: &Path) -> anyhow::Result<Client> {
        let mut process = self.start(profile)?;
        let pushed = process.line_with("PUSH_REPLY", LIMIT)?;
        process.line_with(CONNECTED, LIMIT)?;
        let value = |name: &str| {
            let found = pushed.split([',', '\'']).find_map(|option| option.strip_prefix(name));
            let word = found.and_then(|rest| rest.split_whitespace().next());
            word.and_then(|word| word.parse().ok()).with_context(|| format!("{name}: {pushed}"))
        };
        Ok(Client { address: value("ifconfig ")?, dns: value("dhcp-option DNS ")?, process })
    }

    fn wait_ping(&self, to: IpAddr) -> anyhow::Result<()> {
        let to = to.to_string();
        try_wait_until(&format!("an answer from {to} to a client"), LIMIT, || {
            Ok(self.netns.exec(&["ping", "-n", "-c", "1", "-W", "1", &to])?.status.success())
        })?;
        Ok(())
    }
}

#[test]
fn a_stock_client_reaches_containers_of_all_hosts_by_address_and_by_name() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let machine = stage.machine(1)?;
    let alice = machine.connect(&stage.profile(stage.host(), "alice")?)?;
    for container in [&stage.one, &stage.two] {
        let address = container.ipv4()?.into();
        machine.wait_ping(address)?;
        wait_ping(container, alice.address.into(), LIMIT)?;
        let from = PathBuf::from(machine.netns.path());
        let inside = namespace(container);
        let own = (from.as_path(), alice.address.into());
        connection_arrives(own, (&inside, address))?;
        connection_arrives((&inside, address), own)?;
    }
    let name = format!("{}.weft.local", stage.two.netns().name());
    let server = format!("@{}", alice.dns);
    let answer = machine.netns.exec(&["dig", "+short", "+time=2", &server, &name])?.success()?;
    ensure!(answer.stdout.trim() == stage.two.ipv4()?.to_string(), "{answer:?}");
    // Clients reach each other, too; this one comes over IPv6.
    let other = Machine { is_ipv4: false, ..stage.machine(2)? };
    let bob = other.connect(&stage.profile(stage.host(), "bob")?)?;
    ensure!(bob.address != alice.address, "two clients have one address");
    other.wait_ping(alice.address.into())?;
    machine.wait_ping(bob.address.into())?;
    let clients = stage.clients()?;
    let names: Vec<&str> = clients.iter().filter_map(|it| it["name"].as_str()).collect();
    ensure!(names == ["alice", "bob"], "{clients:?}");
    let shown = &clients[1];
    ensure!(shown["real_address"].as_str().is_some_and(|it| it.starts_with("[2001:db8:2::2]:")));
    let shown = &clients[0];
    ensure!(shown["addresses"][0] == alice.address.to_string(), "{shown}");
    ensure!(shown["cipher"] == "AES-256-GCM" && shown["platform"] == "linux", "{shown}");
    ensure!(shown["bytes_in"].as_u64() > Some(1_000), "{shown}");
    ensure!(shown["real_address"].as_str().is_some_and(|it| it.starts_with("198.51.1.2:")));
    let text = stage.host().weft(&["status"])?.success()?.stdout;
    ensure!(text.contains("OpenVPN: serving") && text.contains("2 clients"), "{text}");
    // A client that leaves says so, and its address is no longer answered for.
    let Client { mut process, .. } = bob;
    process.terminate(LIMIT)?;
    try_wait_until("bob to be gone", LIMIT, || {
        Ok(stage.clients().is_ok_and(|clients| clients.len() == 1))
    })?;
    Ok(())
}

/// A block of a profile, with its tags.
fn block<'a>(profile: &'a str, name: &str) -> anyhow::Result<&'a str> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    let start = profile.find(&open).context("no block")?;
    let end = profile.find(&close).context("no end")? + close.len();
    profile.get(start..end).context("a broken block")
}

#[test]
fn wrong_and_revoked_certificates_are_refused_and_a_session_ends_with_its_certificate()
-> anyhow::Result<()> {
    let stage = Stage::new()?;
    let machine = stage.machine(1)?;
    let good = stage.profile(stage.host(), "alice")?;
    // Another authority's certificate, behind the right tls-crypt-v2 key.
    stage.lab.host(1).weft(&["ca", "init"])?.success()?;
    let foreign = std::fs::read_to_string(stage.profile(stage.lab.host(1), "alice")?)?;
    let mut mixed = std::fs::read_to_string(&good)?;
    for name in ["cert", "key"] {
        let (ours, theirs) = (block(&mixed, name)?.to_owned(), block(&foreign, name)?);
        mixed = mixed.replace(&ours, theirs);
    }
    let path = stage.lab.sandbox.directory().join("mixed.ovpn");
    std::fs::write(&path, &mixed)?;
    let mut refused = machine.start(&path)?;
    refused.line_with("fatal SSL alert", REFUSED_LIMIT)?;
    ensure!(stage.clients()?.is_empty(), "a foreign certificate is let in");
    refused.terminate(LIMIT)?;
    // Another key of tls-crypt-v2 gets no answer at all.
    let theirs = block(&foreign, "tls-crypt-v2")?;
    let text = std::fs::read_to_string(&good)?;
    let locked = text.replace(block(&text, "tls-crypt-v2")?, theirs);
    let path = stage.lab.sandbox.directory().join("locked.ovpn");
    std::fs::write(&path, locked)?;
    let mut silent = machine.start(&path)?;
    let answered = silent.line_with("TLS: Initial packet", Duration::from_secs(3));
    ensure!(answered.is_err(), "a foreign key is answered: {answered:?}");
    silent.terminate(LIMIT)?;

    let alice = machine.connect(&good)?;
    machine.wait_ping(stage.two.ipv4()?.into())?;
    let revoked = stage.host().weft_json(&["openvpn", "revoke", "alice"])?;
    ensure!(revoked["was_connected"] == true, "{revoked}");
    let two = stage.two.ipv4()?.to_string();
    let ping = machine.netns.exec(&["ping", "-n", "-c", "1", "-W", "1", &two])?;
    ensure!(!ping.status.success(), "a revoked client still reaches the network");
    ensure!(stage.clients()?.is_empty(), "a revoked client is listed");
    // It does not try again.
    let Client { mut process, .. } = alice;
    process.wait(LIMIT)?;
    let mut again = machine.start(&good)?;
    again.line_with("AUTH_FAILED,The certificate is revoked", LIMIT)?;
    let unknown = stage.host().weft(&["openvpn", "revoke", "alice"])?;
    ensure!(unknown.status.code() == Some(4), "{unknown:?}");
    // A new certificate is good.
    machine.connect(&stage.profile(stage.host(), "alice")?)?;
    Ok(())
}

#[test]
fn clients_come_back_after_a_crash_with_their_address_and_stop_leaves_nothing() -> anyhow::Result<()>
{
    let stage = Stage::new()?;
    let (host, machine) = (stage.host(), stage.machine(1)?);
    let mut alice = machine.connect(&stage.profile(host, "alice")?)?;
    machine.wait_ping(stage.two.ipv4()?.into())?;
    host.kill_daemon();
    host.start_daemon(&[])?;
    let pushed = alice.process.line_with("PUSH_REPLY", LIMIT)?;
    ensure!(pushed.contains(&format!("ifconfig {} ", alice.address)), "another address: {pushed}");
    alice.process.line_with(CONNECTED, LIMIT)?;
    machine.wait_ping(stage.two.ipv4()?.into())?;
    wait_ping(&stage.two, alice.address.into(), LIMIT)?;

    // A damage by others is repaired with the next client at the latest.
    host.netns().ip(&format!("route del {} dev {DEVICE}", alice.address))?;
    let other = stage.machine(2)?;
    let _bob = other.connect(&stage.profile(host, "bob")?)?;
    machine.wait_ping(stage.two.ipv4()?.into())?;

    let stopped = host.weft_json(&["openvpn", "stop"])?;
    ensure!(stopped["state"] == "off", "{stopped}");
    alice.process.line_with("SIGUSR1", LIMIT)?;
    let devices = host.netns().exec(&["ip", "-o", "link"])?.success()?.stdout;
    ensure!(!devices.contains(DEVICE), "{devices}");
    let answered = host.netns().exec(&["ip", "neigh", "show", "proxy"])?.success()?.stdout;
    ensure!(answered.trim().is_empty(), "{answered}");
    let routes = host.netns().exec(&["ip", "route", "show", "proto", "87"])?.success()?.stdout;
    ensure!(routes.trim().is_empty(), "{routes}");
    ensure!(host.weft_json(&["status"])?["gateway"].is_null(), "a gateway that is off is shown");
    // It stays so over a restart, and serving again gives the same address.
    host.stop_daemon()?;
    host.start_daemon(&[])?;
    ensure!(host.weft_json(&["status"])?["gateway"].is_null(), "it serves again by itself");
    serve(host)?;
    let pushed = alice.process.line_with("PUSH_REPLY", LIMIT * 2)?;
    ensure!(pushed.contains(&format!("ifconfig {} ", alice.address)), "another address: {pushed}");
    Ok(())
}
