//! Two hosts serve by one configuration: the clients of a stock server move between them with their old profiles.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use serde_json::Value;
use weft_bench::sandbox::{Host, Netns, Running, try_wait_until};
use weft_lab::net::gateway::{Client, LIMIT, address_in, connected, connected_again};

use crate::logins::{judge, profile as with_password};
use crate::pki::Keys;
use crate::stage::{SERVER, Stage, wait_ping};

const FIXED: &str = "10.8.0.50";
const REVOKED: &str = "AUTH_FAILED,The certificate is revoked";

/// Two hosts and two machines on a network outside. The first host has the files of an OpenVPN server.
struct Hosts {
    stage: Stage,
    machines: [Netns; 2],
    _outside: Netns,
}

/// The address of a host on the network outside.
fn place(host: usize) -> String {
    format!("198.51.100.{}", host + 1)
}

impl Hosts {
    fn new() -> anyhow::Result<Self> {
        let stage = Stage::with_hosts(Keys::Ecdsa, 2)?;
        let outside = stage.lab.sandbox.add_netns("outside")?;
        outside.ip("link add bridge type bridge")?.success()?;
        outside.ip("link set bridge up")?.success()?;
        let machines = [stage.lab.sandbox.add_netns("m0")?, stage.lab.sandbox.add_netns("m1")?];
        let plug_in = |netns: &Netns, name: &str, address: &str| -> anyhow::Result<()> {
            let inside = netns.name();
            let link = format!("link add {name} type veth peer name wan netns {inside}");
            outside.ip(&link)?.success()?;
            outside.ip(&format!("link set {name} up master bridge"))?.success()?;
            netns.ip(&format!("addr add {address}/24 dev wan"))?.success()?;
            netns.ip("link set wan up")?.success()?;
            Ok(())
        };
        for (index, machine) in machines.iter().enumerate() {
            plug_in(stage.lab.host(index).netns(), &format!("host{index}"), &place(index))?;
            let address = format!("198.51.100.{}", 101 + index);
            plug_in(machine, &format!("machine{index}"), &address)?;
        }
        Ok(Self { stage, machines, _outside: outside })
    }

    /// The host that takes the configuration over, and the other one.
    fn both(&self) -> (&Host, &Host) {
        (self.stage.host(), self.stage.lab.host(1))
    }

    /// Starts a client that tries these hosts in turn.
    fn start(&self, machine: usize, profile: &Path, hosts: &[usize]) -> anyhow::Result<Running> {
        let profile = profile.to_string_lossy();
        let places: Vec<String> = hosts.iter().map(|host| place(*host)).collect();
        let remotes = places.iter().flat_map(|place| ["--remote", place, "1194", "udp"]);
        let words = ["--config", &profile, "--dev", "tun0", "--connect-timeout", "3"];
        let words: Vec<&str> = std::iter::once("openvpn").chain(remotes).chain(words).collect();
        Ok(self.machines[machine].spawn(&words)?)
    }

    /// Waits until a client is refused by this host with this text.
    fn refused(
        &self,
        machine: usize,
        profile: &Path,
        host: usize,
        text: &str,
    ) -> anyhow::Result<()> {
        let mut process = self.start(machine, profile, &[host])?;
        process.line_with(text, LIMIT)?;
        process.terminate(LIMIT)?;
        Ok(())
    }

    /// Serves at the other host, which does so by the configuration of the first.
    fn serve_elsewhere(&self, more: &[&str]) -> anyhow::Result<()> {
        let (home, other) = self.both();
        let served = other.weft_json(&[&["openvpn", "serve"][..], more].concat())?;
        ensure!(served["state"] == "serving" && served["network"] == "openvpn", "{served}");
        let authority = gateway(other)?["authority"].clone();
        let names_home = authority["is_here"] == false && authority["name"] == home.nickname();
        ensure!(names_home, "{authority}");
        Ok(())
    }
}

/// The gateway of a host, as its status shows it.
fn gateway(host: &Host) -> anyhow::Result<Value> {
    Ok(host.weft_json(&["status"])?["gateway"].clone())
}

/// The configuration that a host keeps. Root alone may read it.
fn kept(host: &Host) -> anyhow::Result<Value> {
    let path = host.state_directory().join("openvpn-import.json");
    let mode = std::fs::metadata(&path)?.permissions().mode();
    ensure!(mode & 0o777 == 0o600, "{}: {mode:o}", path.display());
    Ok(serde_json::from_str(&std::fs::read_to_string(&path)?)?)
}

/// Waits until the session of a client is over for good.
fn wait_revoked(client: &mut Client) -> anyhow::Result<()> {
    client.process.line_with("certificate revoked", LIMIT)?;
    client.process.wait(LIMIT)?;
    Ok(())
}

/// The server's key is on both hosts, and that of the authority on the first alone.
fn check_keys(hosts: &Hosts) -> anyhow::Result<()> {
    let (home, other) = hosts.both();
    let (own, taken) = (kept(home)?, kept(other)?);
    let [of_ca, of_server] = [hosts.stage.pki.text("ca.key")?, hosts.stage.pki.text("server.key")?];
    let has = |kept: &Value, key: &str| {
        let files = kept["files"].as_object().into_iter().flat_map(|files| files.values());
        files.chain([&kept["ca_key"], &kept["config"]]).any(|text| text == key)
    };
    ensure!(has(&own, &of_ca) && has(&own, &of_server), "the home lacks a key");
    ensure!(has(&taken, &of_server) && !has(&taken, &of_ca), "the other host has other keys");
    ensure!(taken["ca_key"].is_null(), "the other host has a key of an authority");
    for host in [home, other] {
        ensure!(!host.log().contains("PRIVATE KEY"), "{} logs a key", host.nickname());
    }
    Ok(())
}

#[test]
fn a_host_of_two_dies_and_clients_of_a_stock_server_keep_their_addresses() -> anyhow::Result<()> {
    let hosts = Hosts::new()?;
    let (stage, (home, other)) = (&hosts.stage, hosts.both());
    stage.write("ccd/alice", &format!("ifconfig-push {FIXED} 255.255.255.0\n"))?;
    let config = format!(
        "{SERVER}tls-crypt ta.key\ncrl-verify crl.pem\npush \"dhcp-option DNS 10.8.0.1\"\n"
    );
    let tls_crypt = format!("<tls-crypt>\n{}</tls-crypt>", stage.pki.text("ta.key")?);
    let profiles: [PathBuf; 2] =
        [stage.profile("alice", &tls_crypt)?, stage.profile("bob", &tls_crypt)?];
    let mut server = stage.stock(&config)?;
    let mut clients = Vec::new();
    for (machine, profile) in profiles.iter().enumerate() {
        clients.push(connected(hosts.start(machine, profile, &[0, 1])?)?);
    }
    ensure!(clients[0].address.to_string() == FIXED, "{}", clients[0].pushed);
    server.terminate(LIMIT)?;

    stage.imported(&config, &["--ca-key", &stage.path("ca.key")])?;
    stage.serve(&["--remote", &place(0)])?;
    // The processes of the clients come back by themselves, while there is one host.
    for client in &mut clients {
        let pushed = connected_again(&mut client.process)?;
        ensure!(address_in(&pushed, "ifconfig ")? == client.address, "{pushed}");
    }
    hosts.serve_elsewhere(&["--remote", &place(1)])?;
    check_keys(&hosts)?;
    let path = stage.path("server.conf");
    for words in [vec!["openvpn", "import", &path], vec!["openvpn", "import", "--crl", &path]] {
        let refused = other.weft(&words)?;
        let said = format!("{}{}", refused.stdout, refused.stderr);
        ensure!(refused.status.code() == Some(5), "{refused:?}");
        ensure!(said.contains(&format!("host {} has taken over", home.nickname())), "{refused:?}");
    }

    home.kill_daemon();
    for Client { process, address, .. } in &mut clients {
        let pushed = connected_again(process)?;
        ensure!(address_in(&pushed, "ifconfig ")? == *address, "{pushed}");
        // The other host is the server by its own address.
        let (gateway, dns) =
            (address_in(&pushed, "route-gateway ")?, address_in(&pushed, "dhcp-option DNS ")?);
        ensure!(gateway == dns && gateway.to_string() != "10.8.0.1", "{pushed}");
    }
    let container = other.add_container_with("c1", &["--network", "openvpn"])?;
    for (machine, client) in hosts.machines.iter().zip(&clients) {
        wait_ping(machine, &container.ipv4()?.to_string())?;
        wait_ping(container.netns(), &client.address.to_string())?;
    }

    home.start_daemon(&[])?;
    try_wait_until("both gateways to know each other", LIMIT, || {
        let knows =
            |host: &Host| gateway(host).is_ok_and(|it| it["gateways"][0]["state"] == "serving");
        let is_linked = gateway(other).is_ok_and(|it| it["authority"]["is_linked"] == true);
        Ok(is_linked && knows(home) && knows(other))
    })?;
    let [alice, bob] = &mut clients[..] else { anyhow::bail!("not two clients") };
    check_revocations(&hosts, (alice, bob), &profiles)?;
    check_change_while_off(&hosts, &config, &profiles)
}

/// New clients and revocations are asked for at the other host, and lists come at the home. The clients are on the other
/// host.
fn check_revocations(
    hosts: &Hosts,
    (alice, bob): (&mut Client, &mut Client),
    profiles: &[PathBuf],
) -> anyhow::Result<()> {
    let (stage, (home, other)) = (&hosts.stage, hosts.both());
    let made = other.weft(&["openvpn", "client", "carol"])?.success()?.stdout;
    for host in [0, 1] {
        let remote = format!("\nremote {} 1194 udp\n", place(host));
        ensure!(made.contains(&remote), "no {remote}: {made}");
    }
    other.weft(&["openvpn", "revoke", "bob"])?.success()?;
    wait_revoked(bob)?;
    stage.pki.revoke("alice")?;
    stage.pki.crl(30)?;
    home.weft(&["openvpn", "import", "--crl", &stage.path("crl.pem")])?.success()?;
    wait_revoked(alice)?;
    for host in [0, 1] {
        for (machine, profile) in profiles.iter().enumerate() {
            hosts.refused(machine, profile, host, REVOKED)?;
        }
    }
    Ok(())
}

/// The other host is killed, and learns later what has changed meanwhile.
fn check_change_while_off(hosts: &Hosts, config: &str, profiles: &[PathBuf]) -> anyhow::Result<()> {
    let (stage, (_, other)) = (&hosts.stage, hosts.both());
    other.kill_daemon();
    let later = format!("{config}push \"dhcp-option DOMAIN later.example\"\n");
    stage.imported(&later, &[])?;
    other.start_daemon(&[])?;
    let tls_crypt = format!("<tls-crypt>\n{}</tls-crypt>", stage.pki.text("ta.key")?);
    let dora = stage.profile("dora", &tls_crypt)?;
    let mut process = hosts.start(0, &dora, &[1])?;
    // Until it is linked, it serves by what it knows; then clients connect anew.
    process.line_with("dhcp-option DOMAIN later.example", LIMIT)?;
    for (machine, profile) in profiles.iter().enumerate() {
        hosts.refused(machine, profile, 1, REVOKED)?;
    }
    ensure!(kept(other)?["ca_key"].is_null(), "the other host has the authority's key");
    process.terminate(LIMIT)?;
    Ok(())
}

#[test]
fn a_program_of_another_hosts_configuration_judges_only_where_it_is_named() -> anyhow::Result<()> {
    let hosts = Hosts::new()?;
    let (stage, (home, other)) = (&hosts.stage, hosts.both());
    let program = judge(stage)?;
    let config = format!(
        "{SERVER}script-security 2\nauth-user-pass-verify {program} via-file\nauth-gen-token\n"
    );
    stage.imported(&config, &[])?;
    stage.serve(&[])?;
    let refused = other.weft(&["openvpn", "serve"])?;
    let named = format!("host {} has {program} judge passwords", home.nickname());
    ensure!(refused.status.code() == Some(5) && refused.stderr.contains(&named), "{refused:?}");
    hosts.serve_elsewhere(&["--auth-program", &program])?;
    let anna = with_password(stage, "anna", "anna", "right")?;
    let mut client = connected(hosts.start(0, &anna, &[1])?)?;
    let berta = with_password(stage, "berta", "berta", "wrong")?;
    hosts.refused(1, &berta, 1, "AUTH_FAILED,Wrong user name or password")?;

    // The home names another one: nobody is judged by that here.
    let evil = stage.write("evil", "#!/bin/sh\n: > \"${1%/*}/ran\"\n")?;
    std::fs::set_permissions(&evil, PermissionsExt::from_mode(0o755))?;
    stage.imported(&config.replace(&program, &evil), &[])?;
    let named = format!("host {} has {evil} judge passwords", home.nickname());
    try_wait_until("the other host to wait for a word of its administrator", LIMIT, || {
        let reason = gateway(other).map(|it| it["reason"].to_string());
        Ok(reason.is_ok_and(|reason| reason.contains(&named)))
    })?;
    client.process.terminate(LIMIT)?;
    let ran = |host: &Host| host.runtime_directory().join("ran").exists();
    ensure!(!ran(other), "the other host has run it");
    let served = other.weft_json(&["openvpn", "serve", "--auth-program", &program])?;
    ensure!(served["state"] == "serving", "{served}");
    let mut client = connected(hosts.start(0, &anna, &[1])?)?;
    client.process.terminate(LIMIT)?;
    Ok(())
}
