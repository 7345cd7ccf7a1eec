//! Rules of an OpenVPN server for its clients.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use anyhow::ensure;
use weft_bench::sandbox::try_wait_until;
use weft_lab::net::gateway::{CONNECTED, Client, LIMIT, Machine, address_in};

use crate::pki::Keys;
use crate::stage::{SERVER, Stage};

/// Connects, and disconnects again.
fn once(machine: &Machine, profile: &std::path::Path) -> anyhow::Result<String> {
    let Client { mut process, pushed, .. } = machine.connect(profile)?;
    process.terminate(LIMIT)?;
    Ok(pushed)
}

#[test]
fn the_servers_rules_for_its_clients_hold() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);
    stage.write("ccd/alice", "push-reset\npush \"route 172.16.9.0 255.255.255.0\"\n")?;
    stage.write("ccd/bob", "disable\n")?;
    stage.write("ccd/Carla Smith", "ifconfig-push 10.8.0.77 255.255.255.0\n")?;
    stage.pki.issue("carla", "Carla Smith", "client", 825)?;
    stage.pki.issue("odd", "odd", "server", 825)?;
    let profiles = ["alice", "bob", "carla", "dora", "odd"].map(|name| stage.profile(name, ""));
    let [alice, bob, carla, dora, odd] = profiles;
    let (alice, bob, carla, dora, odd) = (alice?, bob?, carla?, dora?, odd?);
    let host = stage.host();
    host.netns().exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"])?.success()?;
    let push = "push \"route 172.16.8.0 255.255.255.0\"\n";
    stage.imported(&format!("{SERVER}{push}ccd-exclusive\nremote-cert-tls client\n"), &[])?;
    stage.serve(&[])?;
    let pushed = once(&one, &alice)?;
    ensure!(pushed.contains("172.16.9.0") && !pushed.contains("172.16.8.0"), "{pushed}");
    ensure!(pushed.contains("topology subnet") && pushed.contains("ping 1"), "{pushed}");
    one.refused(&bob, "AUTH_FAILED,This client is disabled")?;
    let pushed = once(&one, &carla)?;
    ensure!(address_in(&pushed, "ifconfig ")?.to_string() == "10.8.0.77", "{pushed}");
    ensure!(pushed.contains("172.16.8.0"), "{pushed}");
    // The IPv6 address that ends in the fixed one goes with it.
    ensure!(pushed.contains("ifconfig-ipv6 ") && pushed.contains(":a08:4d/64"), "{pushed}");
    one.refused(&dora, "AUTH_FAILED,This client has no file on the server")?;
    // TLS itself refuses a server's certificate.
    one.refused(&odd, "fatal SSL alert")?;

    // A container has the address that a file gives: nothing changes.
    host.add_container_with("c1", &["--network", "openvpn", "10.8.0.88/24"])?;
    stage.write("ccd/dora", "ifconfig-push 10.8.0.88 255.255.255.0\n")?;
    let refused = stage.import(SERVER, &[])?;
    let text = "the address of client dora cannot be kept: 10.8.0.88 is taken by container";
    ensure!(refused.status.code() == Some(5) && refused.stderr.contains(text), "{refused:?}");
    one.refused(&dora, "AUTH_FAILED,This client has no file on the server")?;
    std::fs::remove_file(stage.folder.join("ccd/dora"))?;

    // Several sessions of a name, and the most of all.
    stage.imported(
        &format!("{SERVER}duplicate-cn\nmax-clients 2\nverify-x509-name d name-prefix\n"),
        &[],
    )?;
    let first = one.connect(&dora)?;
    let second = two.connect(&dora)?;
    ensure!(first.address != second.address, "{}", first.address);
    ensure!(!one.pings(second.address.into())?, "clients reach each other unasked");
    stage.machine(3)?.refused(&dora, "AUTH_FAILED,The server has as many clients as it takes")?;
    drop((first, second));
    one.refused(&alice, "AUTH_FAILED,The certificate has another name")?;

    // The newest list counts at once, and ends sessions.
    stage.imported(
        &format!("{SERVER}crl-verify crl.pem\nkeepalive 10 60\n"),
        &["--ca-key", &stage.path("ca.key")],
    )?;
    let mut session = one.connect(&dora)?;
    stage.pki.revoke("dora")?;
    stage.pki.crl(30)?;
    let said = stage.host().weft(&["openvpn", "import", "--crl", &stage.path("crl.pem")])?;
    ensure!(said.success()?.stdout.contains("1 certificates are revoked"), "the new list");
    session.process.wait(LIMIT)?;
    one.refused(&dora, "AUTH_FAILED,The certificate is revoked")?;
    stage.pki.old_crl()?;
    let old = stage.host().weft(&["openvpn", "import", "--crl", &stage.path("old.pem")])?;
    ensure!(old.stderr.contains("ended on 2021-01-01"), "{old:?}");
    one.refused(&dora, "AUTH_FAILED,The certificate is revoked")?;

    // With the authority's key new clients are made here, and revoked by name.
    let made = stage.host().weft(&["openvpn", "client", "erna"])?.success()?.stdout;
    let erna = stage.folder.join("erna.ovpn");
    std::fs::write(&erna, made)?;
    let mut session = one.connect(&erna)?;
    let revoked = stage.host().weft_json(&["openvpn", "revoke", "erna"])?;
    ensure!(revoked["was_connected"] == true, "{revoked}");
    session.process.wait(LIMIT)?;
    one.refused(&erna, "AUTH_FAILED,The certificate is revoked")?;
    stage.host().weft_json(&["openvpn", "revoke", "alice"])?;
    one.refused(&alice, "AUTH_FAILED,The certificate is revoked")?;
    Ok(())
}

/// Waits until the network behind a client is routed to this session of it.
fn wait_behind(stage: &Stage, address: Ipv4Addr) -> anyhow::Result<()> {
    let way = format!("via {address} ");
    try_wait_until(&format!("192.168.7.0/24 {way}"), LIMIT, || {
        let routes = stage.host().netns().ip("route show 192.168.7.0/24")?.success()?.stdout;
        Ok(routes.contains(&way))
    })?;
    Ok(())
}

#[test]
fn a_client_that_begins_anew_has_what_its_name_has_where_names_may_be_there_twice()
-> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);
    let fixed = Ipv4Addr::new(10, 8, 0, 50);
    let file = format!("ifconfig-push {fixed} 255.255.255.0\niroute 192.168.7.0 255.255.255.0\n");
    stage.write("ccd/dora", &file)?;
    let dora = stage.profile("dora", "")?;
    // The next process of a machine sends from the same port.
    let text = std::fs::read_to_string(&dora)?;
    std::fs::write(&dora, text.replace("\nnobind\n", "\nlport 4711\n"))?;
    // No session ends by its silence meanwhile.
    let server = SERVER.replace("keepalive 1 6", "keepalive 10 120");
    stage.imported(&format!("{server}duplicate-cn\nroute 192.168.7.0 255.255.255.0\n"), &[])?;
    stage.serve(&[])?;
    let mut first = one.connect(&dora)?;
    ensure!(first.address == fixed, "{}", first.pushed);
    wait_behind(&stage, fixed)?;
    first.process.kill();
    let _again = one.connect(&dora)?;
    let clients = stage.clients()?;
    ensure!(clients.len() == 1 && clients[0]["addresses"][0] == "10.8.0.50", "{clients:?}");
    wait_behind(&stage, fixed)?;
    // The network follows the newest session, and goes back when that ends.
    let mut other = two.connect(&dora)?;
    ensure!(other.address != fixed, "{}", other.pushed);
    wait_behind(&stage, other.address)?;
    other.process.terminate(LIMIT)?;
    wait_behind(&stage, fixed)?;
    Ok(())
}

#[test]
fn a_killed_daemon_leaves_no_answers_for_clients_on_any_network() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let (host, machine) = (stage.host(), stage.machine(1)?);
    stage.imported(SERVER, &[])?;
    stage.serve(&[])?;
    let alice = machine.connect(&stage.profile("alice", "")?)?;
    let address = alice.address.to_string();
    let is_answered = || {
        let shown = host.netns().ip("neigh show proxy")?.success()?.stdout;
        Ok(shown.split_whitespace().any(|word| word == address))
    };
    try_wait_until("the host to answer for the client", LIMIT, is_answered)?;
    host.kill_daemon();
    // The next one serves nobody.
    std::fs::remove_file(host.state_directory().join("openvpn.json"))?;
    host.start_daemon(&[])?;
    try_wait_until("nobody to answer for the client", LIMIT, || Ok(!is_answered()?))?;
    Ok(())
}

#[test]
fn two_hundred_pushed_routes_arrive_and_the_pool_ends_with_a_reason() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);
    let small = SERVER.replace("server 10.8.0.0 255.255.255.0", "server 10.8.0.0 255.255.255.248");
    let routes = (0..200).map(|n| format!("push \"route 10.100.{n}.0 255.255.255.0\"\n"));
    stage.imported(&format!("{small}{}", routes.collect::<String>()), &[])?;
    stage.serve(&["--push", "route 10.101.0.0 255.255.0.0", "--push", "block-outside-dns"])?;
    let (alice, bob) = (stage.profile("alice", "")?, stage.profile("bob", "")?);
    let mut process = one.start(&alice)?;
    process.line_with(CONNECTED, LIMIT)?;
    let routes = one.netns.ip("route show dev tun0")?.success()?.stdout;
    let pushed: BTreeSet<&str> = routes.lines().filter(|line| line.starts_with("10.10")).collect();
    ensure!(pushed.len() == 201, "{}: {routes}", pushed.len());
    let refused = stage.host().weft(&["openvpn", "serve", "--push", "topology net30"])?;
    ensure!(refused.stderr.contains("the gateway's own to push"), "{refused:?}");
    // The range has six addresses, of which the host has one and containers the rest.
    for n in 1..5 {
        stage.host().add_container_with(&format!("c{n}"), &["--network", "openvpn"])?;
    }
    two.refused(&bob, "AUTH_FAILED,The gateway has no address for this client now")?;
    ensure!(stage.clients()?.len() == 1, "{:?}", stage.clients()?);
    Ok(())
}
