//! Wrappings, kinds of keys and versions of TLS pairwise; rules of an OpenVPN server for its clients.

use std::collections::BTreeSet;

use anyhow::{Context, ensure};

use crate::pki::{Keys, run};
use crate::stage::{CONNECTED, Client, LIMIT, Machine, SERVER, Stage, address_in};

/// A wrapping: the server's lines, the client's, and the file of its key.
const WRAPPINGS: [(&str, &str, &str); 5] = [
    ("", "", ""),
    ("tls-auth ta.key 0", "key-direction 1", "tls-auth"),
    ("tls-auth ta.key", "", "tls-auth"),
    ("tls-crypt ta.key", "", "tls-crypt"),
    ("tls-crypt-v2 v2.key", "", "tls-crypt-v2"),
];
/// Digest, lines of both about TLS and ciphers, the cipher that is agreed on.
const REST: [(&str, &str, &str, &str); 3] = [
    ("SHA256", "tls-version-min 1.2", "tls-version-max 1.2", "AES-256-GCM"),
    ("SHA512", "tls-version-min 1.3\ndata-ciphers AES-128-GCM", "", "AES-128-GCM"),
    ("SHA1", "data-ciphers CHACHA20-POLY1305", "", "CHACHA20-POLY1305"),
];

fn wrapped(stage: &Stage, (_, more, block): (&str, &str, &str)) -> anyhow::Result<String> {
    if block == "tls-crypt-v2" {
        let words =
            ["--tls-crypt-v2", "v2.key", "--genkey", "tls-crypt-v2-client", "client-v2.key"];
        run(&stage.folder, "openvpn", &words)?;
    }
    let file = if block == "tls-crypt-v2" { "client-v2.key" } else { "ta.key" };
    match block {
        "" => Ok(String::new()),
        block => Ok(format!("{more}\n<{block}>\n{}</{block}>\n", stage.pki.text(file)?)),
    }
}

#[test]
fn every_wrapping_goes_with_every_kind_of_key_and_version_of_tls() -> anyhow::Result<()> {
    for keys in [Keys::Rsa, Keys::Ecdsa] {
        let stage = Stage::new(keys)?;
        let machine = stage.machine(1)?;
        for (number, wrapping) in WRAPPINGS.into_iter().enumerate() {
            // Over the two kinds of keys each wrapping meets two of three.
            let at = (number + usize::from(keys == Keys::Ecdsa)) % REST.len();
            let (digest, lines, client, cipher) = REST[at];
            let server = SERVER.replace("auth SHA256", &format!("auth {digest}"));
            let server = server.replace("data-ciphers AES-256-GCM:AES-128-GCM\n", "");
            let config = format!("{server}{}\n{lines}\n", wrapping.0);
            let more = format!("{}\n{client}", wrapped(&stage, wrapping)?);
            let profile = stage.profile("alice", &more)?;
            let text = std::fs::read_to_string(&profile)?;
            std::fs::write(&profile, text.replace("auth SHA256", &format!("auth {digest}")))?;
            stage.imported(&config, &[])?;
            if number == 0 {
                stage.serve(&[])?;
            }
            let what = format!("{keys:?}, {:?}, {digest}, {cipher}", wrapping.0);
            let mut connected = machine.connect(&profile).with_context(|| what.clone())?;
            machine.wait_ping("10.8.0.1".parse::<std::net::IpAddr>()?)?;
            ensure!(stage.clients()?[0]["cipher"] == cipher, "{what}: {:?}", stage.clients()?);
            connected.process.terminate(LIMIT)?;
        }
    }
    Ok(())
}

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
    ensure!(address_in(&pushed)?.to_string() == "10.8.0.77", "{pushed}");
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
    ensure!(!one.pings(&second.address.to_string())?, "clients reach each other unasked");
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
