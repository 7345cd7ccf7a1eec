//! The whole way: a stock server with its clients, its end, and Weft in its place.

use anyhow::ensure;
use serde_json::Value;
use weft_bench::sandbox::try_wait_until;
use weft_lab::net::gateway::{LIMIT, address_in, connected_again};

use crate::pki::Keys;
use crate::stage::{SERVER, Stage, pings, wait_ping};

const FIXED: &str = "10.8.0.50";
/// A host behind the server, in a network that clients are pushed a route to.
const OFFICE: &str = "192.168.50.2";
/// A host behind a client.
const BRANCH: &str = "192.168.7.1";

fn config() -> String {
    let more = "tls-crypt ta.key\ncrl-verify crl.pem\nremote-cert-tls client\nclient-to-client\n\
                push \"route 192.168.50.0 255.255.255.0\"\npush \"dhcp-option DNS 10.8.0.1\"\n\
                route 192.168.7.0 255.255.255.0\nmax-clients 10\nverify-client-cert require\n";
    format!("{SERVER}{more}")
}

fn line<'a>(report: &'a Value, text: &str) -> &'a Value {
    let lines = report["lines"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = lines.iter().find(|line| line["text"].as_str() == Some(text));
    found.unwrap_or(&Value::Null)
}

#[test]
fn clients_of_a_stock_server_go_on_with_their_profiles_and_addresses() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Rsa)?;
    let (host, office) = (stage.host(), stage.lab.sandbox.add_netns("office")?);
    stage.cable(&office, "lan", "192.168.50")?;
    office.ip("route add 10.8.0.0/24 via 192.168.50.1")?.success()?;
    host.netns().exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"])?.success()?;
    stage.write("ccd/alice", &format!("ifconfig-push {FIXED} 255.255.255.0\niroute 192.168.7.0 255.255.255.0\npush \"route-metric 77\"\n"))?;
    let tls_crypt = format!("<tls-crypt>\n{}</tls-crypt>", stage.pki.text("ta.key")?);
    let alice = stage.profile("alice", &tls_crypt)?;
    let bob = stage.profile("bob", &tls_crypt)?;
    let mallory = stage.profile("mallory", &tls_crypt)?;
    stage.pki.revoke("mallory")?;
    stage.pki.crl(30)?;
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);
    one.netns.ip(&format!("addr add {BRANCH}/24 dev lo"))?.success()?;

    let mut server = stage.stock(&config())?;
    let mut before = one.connect(&alice)?;
    ensure!(before.address.to_string() == FIXED, "{}", before.pushed);
    let other = two.connect(&bob)?;
    one.wait_ping(other.address.into())?;
    one.wait_ping("10.8.0.1".parse()?)?;
    wait_ping(&one.netns, OFFICE)?;
    // A report changes nothing, and says what becomes of each line.
    let report = stage.import(&config(), &["--dry-run", "--json"])?.success()?.json()?;
    ensure!(report["is_possible"] == true && report["imported"] == false, "{report:#}");
    ensure!(report["network"] == "openvpn" && report["range"] == "10.8.0.0/24", "{report:#}");
    for (text, verdict) in [
        ("server 10.8.0.0 255.255.255.0", "taken"),
        ("status openvpn-status.log", "taken"),
        ("tls-crypt ta.key", "taken"),
        ("crl-verify crl.pem", "taken"),
    ] {
        ensure!(line(&report, text)["verdict"] == verdict, "{text}: {report:#}");
    }
    // While the stock server runs, it has the range and the port.
    let early = stage.import(&config(), &[])?;
    ensure!(early.status.code() == Some(5), "{early:?}");
    ensure!(early.stderr.contains("stop the OpenVPN server first"), "{early:?}");
    server.terminate(LIMIT)?;

    let report = stage.imported(&config(), &[])?;
    ensure!(report["revoked"] == 1 && report["kept_addresses"] == 2, "{report:#}");
    let served = stage.serve(&[])?;
    ensure!(served["network"] == "openvpn" && served["addresses"][0] == "10.8.0.1/24", "{served}");
    // The same processes of the clients come back by themselves.
    let pushed = connected_again(&mut before.process)?;
    ensure!(address_in(&pushed, "ifconfig ")?.to_string() == FIXED, "{pushed}");
    for option in
        ["route-metric 77", "route 192.168.50.0", "dhcp-option DNS 10.8.0.1", "ping-restart 6"]
    {
        ensure!(pushed.contains(option), "{option}: {pushed}");
    }
    drop(other);
    let bob = two.connect(&bob)?;
    ensure!(bob.pushed.contains("route 192.168.50.0"), "{}", bob.pushed);
    let listed = stage.clients()?;
    let names: Vec<&str> = listed.iter().filter_map(|it| it["name"].as_str()).collect();
    ensure!(names == ["alice", "bob"], "{listed:?}");
    one.wait_ping(bob.address.into())?;
    wait_ping(&one.netns, OFFICE)?;
    wait_ping(&office, FIXED)?;
    // The network behind a client, from the host and from a container that has a route there.
    wait_ping(host.netns(), FIXED)?;
    wait_ping(host.netns(), BRANCH)?;
    let container = host.add_container_with("c1", &["--network", "openvpn"])?;
    wait_ping(container.netns(), FIXED)?;
    one.wait_ping(container.ipv4()?.into())?;
    ensure!(!pings(container.netns(), BRANCH)?, "a container has a route by itself");
    container.netns().ip("route add 192.168.7.0/24 via 10.8.0.1")?.success()?;
    wait_ping(container.netns(), BRANCH)?;
    let three = stage.machine(3)?;
    three.refused(&mallory, "AUTH_FAILED,The certificate is revoked")?;
    // A restart of the daemon keeps all.
    host.stop_daemon()?;
    host.start_daemon(&[])?;
    let pushed = connected_again(&mut before.process)?;
    ensure!(address_in(&pushed, "ifconfig ")?.to_string() == FIXED, "{pushed}");
    wait_ping(host.netns(), BRANCH)?;
    // A client that leaves takes its routes along.
    before.process.terminate(LIMIT)?;
    try_wait_until("the route behind a client to go", LIMIT, || {
        let routes = host.netns().ip("route show 192.168.7.0/24")?.success()?.stdout;
        Ok(routes.trim().is_empty())
    })?;
    // Its address is kept for it meanwhile.
    let taken = host.add_container_with("c2", &["--network", "openvpn", "10.8.0.50/24"]);
    let taken = taken.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(taken.contains("10.8.0.50 is taken"), "{taken:?}");
    Ok(())
}
