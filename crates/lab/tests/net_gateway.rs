//! Stock OpenVPN clients join the network by a host that serves them, judged by Debian's `openvpn` and by dig.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Container, try_wait_until};
use weft_lab::net::gateway::{CONNECTED, Client, DEVICE, LIMIT, Machine, Stage, serve};
use weft_lab::net::probe::connection_arrives;
use weft_lab::net::{namespace, wait_ping};

/// Less than a client needs for a handshake, and more than it waits for an answer.
const REFUSED_LIMIT: Duration = Duration::from_secs(15);

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
    let server = format!("@{}", alice.dns()?);
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

/// The short answer of dig to this, asked of a container's own host.
fn dig(from: &Container, server: &str, words: &[&str]) -> anyhow::Result<String> {
    let fixed = ["dig", "+short", "+time=2", "+tries=2", server];
    Ok(from.exec(&[&fixed, words].concat())?.success()?.stdout.trim().to_owned())
}

#[test]
fn a_connected_client_has_a_name_on_all_hosts_until_it_is_gone() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let (host, other, asker) = (stage.host(), stage.lab.host(1), &stage.two);
    host.netns().exec(&["sysctl", "-qw", "net.ipv6.conf.all.forwarding=1"])?.success()?;
    serve(host)?;
    let exposed = other.weft_json(&["expose"])?;
    let own = exposed["addresses"][0].as_str().and_then(|net| net.split('/').next());
    let server = format!("@{}", own.context("no address")?);
    let name = "alice.clients.weft.local";
    let wait_answer = |words: &[&str], wanted: &str| -> anyhow::Result<Duration> {
        let begun = Instant::now();
        try_wait_until(&format!("{words:?} to be {wanted:?}"), LIMIT, || {
            Ok(dig(asker, &server, words).is_ok_and(|answer| answer == wanted))
        })?;
        Ok(begun.elapsed())
    };
    try_wait_until("DNS of the other host", LIMIT, || {
        Ok(dig(asker, &server, &["weft.local", "SOA"]).is_ok_and(|answer| !answer.is_empty()))
    })?;
    let machine = stage.machine(1)?;
    let profile = stage.profile(host, "alice")?;
    let mut alice = machine.connect(&profile)?;
    let v4 = alice.address.to_string();
    let clients = stage.clients()?;
    ensure!(clients[0]["dns_name"] == "alice.clients", "{clients:?}");
    let v6 = clients[0]["addresses"][1].as_str().context("no IPv6 address")?;
    let known = wait_answer(&[name, "A"], &v4)?;
    note(&format!("a client's name was known on the other host after {known:?}"));
    wait_answer(&[name, "AAAA"], v6)?;
    for address in [&v4, v6] {
        wait_answer(&["-x", address], &format!("{name}."))?;
    }
    wait_answer(&["+search", "+domain=weft.local", "+ndots=2", "alice.clients", "A"], &v4)?;
    // Other clients find it, too.
    let own = machine.netns.exec(&["dig", "+short", &format!("@{}", alice.dns()?), name])?;
    ensure!(own.success()?.stdout.trim() == v4);
    for host in [host, other] {
        let found = host.weft_json(&["dns-lookup", "alice.clients"])?;
        ensure!(found[0]["source"] == "client" && found[0]["address"] == v4, "{found}");
    }
    let refused = host.weft(&["dns-remove", "alice.clients"])?;
    ensure!(refused.stderr.contains("not given by hand"), "{refused:?}");

    // It is killed: its ping stays away.
    alice.process.kill();
    let gone = wait_answer(&[name, "A"], "")?;
    note(&format!("after kill -9 its name was gone after {gone:?}"));
    wait_answer(&["-x", &v4], "")?;
    // It leaves.
    let mut alice = machine.connect(&profile)?;
    wait_answer(&[name, "A"], &v4)?;
    alice.process.terminate(LIMIT)?;
    let gone = wait_answer(&[name, "A"], "")?;
    note(&format!("after its farewell its name was gone after {gone:?}"));
    // Nobody is served any more.
    let mut alice = machine.connect(&profile)?;
    wait_answer(&[name, "A"], &v4)?;
    host.weft_json(&["openvpn", "stop"])?;
    wait_answer(&[name, "A"], "")?;
    alice.process.terminate(LIMIT)?;
    serve(host)?;
    // Its certificate is revoked.
    let mut alice = machine.connect(&profile)?;
    wait_answer(&[name, "A"], &v4)?;
    host.weft_json(&["openvpn", "revoke", "alice"])?;
    let gone = wait_answer(&[name, "A"], "")?;
    note(&format!("after its revocation its name was gone after {gone:?}"));
    alice.process.wait(LIMIT)?;
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
