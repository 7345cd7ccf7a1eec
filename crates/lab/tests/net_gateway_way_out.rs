//! OpenVPN clients reach what is outside through the host that serves them, and with its address. The referees are
//! Debian's `openvpn` and a host outside.

use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use weft_bench::sandbox::{Host, Netns, Output, try_wait_until};
use weft_lab::net::gateway::{CONNECTED, LIMIT, Machine, Stage, serve};
use weft_lab::net::namespace;
use weft_lab::net::probe::connection_arrives;

/// The addresses of the host outside, and those of the gateway that it may see.
const OUTSIDE: [(&str, &str); 2] =
    [("203.0.113.2", "203.0.113.1"), ("2001:db8:7::2", "2001:db8:7::1")];
const SERVE: [&str; 7] =
    ["openvpn", "serve", "--ping", "1", "--ping-restart", "4", "--redirect-gateway"];
const FORWARDS: &str = "net.ipv4.ip_forward";
const FORWARDS_IPV6: &str = "net.ipv6.conf.all.forwarding";

fn set(host: &Host, switch: &str, value: u8) -> anyhow::Result<()> {
    host.netns().exec(&["sysctl", "-qw", &format!("{switch}={value}")])?.success()?;
    Ok(())
}

/// A host that reaches the gateway alone: it has no route to clients, nor to their machines.
fn outside(stage: &Stage) -> anyhow::Result<Netns> {
    let host = stage.host().netns();
    let outside = stage.lab.sandbox.add_netns("outside")?;
    host.ip(&format!("link add out0 type veth peer name in0 netns {}", outside.name()))?;
    for (netns, device, number) in [(host, "out0", 1), (&outside, "in0", 2)] {
        netns.ip(&format!("addr add 203.0.113.{number}/24 dev {device}"))?;
        netns.ip(&format!("addr add 2001:db8:7::{number}/64 dev {device} nodad"))?;
        netns.ip(&format!("link set {device} up"))?;
    }
    Ok(outside)
}

/// A machine whose own way to everything leads by the gateway's host, too, but not by the tunnel.
fn machine(stage: &Stage) -> anyhow::Result<Machine> {
    let machine = stage.machine(1)?;
    machine.netns.ip("route add default via 198.51.1.1")?.success()?;
    machine.netns.ip("route add default via 2001:db8:1::1")?.success()?;
    Ok(machine)
}

fn pings(from: &Netns, to: &str) -> anyhow::Result<bool> {
    Ok(from.exec(&["ping", "-n", "-c", "1", "-W", "1", to])?.status.success())
}

fn refused(output: &Output, text: &str) -> anyhow::Result<()> {
    ensure!(!output.status.success() && output.stderr.contains(text), "{output:?}");
    Ok(())
}

/// The host outside has connections from the machine, and they come from the gateway.
fn arrives(machine: &Machine, outside: &Netns) -> anyhow::Result<()> {
    let (from, at) = (PathBuf::from(machine.netns.path()), PathBuf::from(outside.path()));
    for (to, gateway) in OUTSIDE {
        let (to, gateway): (IpAddr, IpAddr) = (to.parse()?, gateway.parse()?);
        try_wait_until(&format!("an answer from {to}"), LIMIT, || {
            Ok(pings(&machine.netns, &to.to_string()).is_ok_and(|answers| answers))
        })?;
        connection_arrives((&from, gateway), (&at, to)).with_context(|| format!("to {to}"))?;
    }
    Ok(())
}

#[test]
fn clients_go_out_with_the_gateways_address_and_only_answers_come_back() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let (host, outside, machine) = (stage.host(), outside(&stage)?, machine(&stage)?);
    set(host, FORWARDS, 1)?;
    set(host, FORWARDS_IPV6, 1)?;
    // As Docker sets it.
    for iptables in ["iptables-nft", "ip6tables-nft"] {
        host.netns().exec(&[iptables, "-P", "FORWARD", "DROP"])?.success()?;
    }
    // Without the option nobody is let out, though the host forwards and the client has a route.
    let own = host.ipv4().to_string();
    let on_own = format!("{own}:1194");
    let places = [
        ["--remote", &own, "--listen", &on_own],
        ["--remote", "198.51.1.1", "--listen", "198.51.1.1:1194"],
    ]
    .concat();
    host.weft(&[&SERVE[..6], &places].concat())?.success()?;
    let profile = stage.profile(host, "alice")?;
    let mut alice = machine.connect(&profile)?;
    machine.netns.ip("route add 203.0.113.0/24 dev tun0")?.success()?;
    machine.netns.ip("route add 2001:db8:7::/64 dev tun0")?.success()?;
    for (to, _) in OUTSIDE {
        ensure!(!pings(&machine.netns, to)?, "{to} is reached without redirect-gateway");
    }
    alice.process.terminate(LIMIT)?;

    let served = host.weft_json(&[&SERVE[..], &places].concat())?;
    ensure!(served["way_out"] == serde_json::json!(["ipv4", "ipv6"]), "{served}");
    let mut alice = machine.connect(&profile)?;
    arrives(&machine, &outside)?;
    // On its network a client keeps its own address.
    let inside = (PathBuf::from(machine.netns.path()), namespace(&stage.one));
    let to = stage.one.ipv4()?.into();
    connection_arrives((&inside.0, alice.address.into()), (&inside.1, to))?;
    // A stranger with a route to a client does not reach it.
    let clients = stage.clients()?;
    let given = |at: usize| clients[0]["addresses"][at].as_str().context("no address");
    for (at, (_, gateway)) in OUTSIDE.into_iter().enumerate() {
        outside.ip(&format!("route add {} via {gateway}", given(at)?))?.success()?;
        ensure!(!pings(&outside, given(at)?)?, "a stranger reaches a client");
    }
    // Nor does a client reach another network of Weft that this host is on.
    host.weft(&["network", "create", "other"])?.success()?;
    host.weft(&["expose", "--network", "other"])?.success()?;
    let other = host.add_container_with("other", &["--network", "other"])?;
    ensure!(pings(host.netns(), &other.ipv4()?.to_string())?, "the host is not on that network");
    ensure!(!pings(&machine.netns, &other.ipv4()?.to_string())?, "a client changes its network");
    let shown =
        host.netns().exec(&["nft", "list", "counter", "inet", "weft-clients", "refused"])?;
    ensure!(!shown.success()?.stdout.contains("packets 0 "), "nothing was refused");

    // It is remembered. The client comes back by its next place, to which the tunnel's routes lead no more.
    let cut = "add table ip cut; add chain ip cut in { type filter hook input priority 0; }; \
               add rule ip cut in ip daddr 198.51.1.1 udp dport 1194 drop";
    host.netns().exec(&["nft", cut])?.success()?;
    host.stop_daemon()?;
    host.start_daemon(&[])?;
    let next = format!("Peer Connection Initiated with [AF_INET]{own}:");
    alice.process.line_with(&next, 2 * LIMIT)?;
    host.netns().exec(&["nft", "delete table ip cut"])?.success()?;
    alice.process.line_with(CONNECTED, LIMIT)?;
    arrives(&machine, &outside)?;
    // It ends with the option.
    let served = serve(host)?;
    ensure!(served["way_out"] == serde_json::json!([]), "{served}");
    alice.process.line_with(CONNECTED, LIMIT)?;
    machine.netns.ip("route replace 203.0.113.0/24 dev tun0")?.success()?;
    ensure!(!pings(&machine.netns, OUTSIDE[0].0)?, "the way out is still open");
    machine.wait_ping(stage.two.ipv4()?.into())?;
    Ok(())
}

#[test]
fn a_host_or_a_network_that_lets_nobody_out_is_named() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let host = stage.host();
    set(host, FORWARDS, 0)?;
    let machine = machine(&stage)?;
    let _alice = machine.connect(&stage.profile(host, "alice")?)?;
    refused(&host.weft(&SERVE)?, "net.ipv4.ip_forward=1")?;
    ensure!(stage.clients()?.len() == 1, "a refused request has ended a session");
    let push = host.weft(&["openvpn", "serve", "--push", "redirect-gateway def1"])?;
    refused(&push, "--redirect-gateway")?;
    set(host, FORWARDS, 1)?;
    host.weft(&["network", "create", "shut", "--internal"])?.success()?;
    let shut = host.weft(&[&SERVE[..], &["--network", "shut"]].concat())?;
    refused(&shut, "network shut is internal")?;

    // Where the host forwards IPv4 alone, that alone is let out.
    let served = host.weft_json(&SERVE)?;
    ensure!(served["way_out"] == serde_json::json!(["ipv4"]), "{served}");
    let status = || -> anyhow::Result<String> { Ok(host.weft(&["status"])?.success()?.stdout) };
    ensure!(status()?.contains("a way out by IPv4 alone"), "{}", status()?);
    // Weft never sets that switch.
    set(host, FORWARDS, 0)?;
    ensure!(status()?.contains("net.ipv4.ip_forward=1"), "{}", status()?);
    host.stop_daemon()?;
    host.start_daemon(&[])?;
    try_wait_until("the gateway to say what it waits for", LIMIT, || {
        let now = host.weft_json(&["status"])?;
        let reason = now["gateway"]["reason"].as_str().unwrap_or_default().to_owned();
        Ok(now["gateway"]["state"] == "waiting" && reason.contains("net.ipv4.ip_forward=1"))
    })?;
    set(host, FORWARDS, 1)?;
    try_wait_until("the gateway to serve", LIMIT, || {
        Ok(host.weft_json(&["status"])?["gateway"]["state"] == "serving")
    })?;
    Ok(())
}

/// Of this many packets at once with this many bytes, a limit of 64 kbit/s lets about a third through.
const BURST: (&str, &str) = ("300", "1300");

/// How many answers a burst of pings gets.
fn answers(from: &Netns, to: &str) -> anyhow::Result<u32> {
    let (count, bytes) = BURST;
    let words = ["ping", "-n", "-q", "-c", count, "-i", "0.001", "-W", "2", "-s", bytes, to];
    let said = from.exec(&words)?.stdout;
    let found = said.split(", ").find_map(|part| part.strip_suffix(" received"));
    found.and_then(|count| count.parse().ok()).with_context(|| format!("no count: {said}"))
}

#[test]
fn each_client_has_a_limit_of_its_own_each_way() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let host = stage.host();
    let wrong = host.weft(&["openvpn", "serve", "--client-up", "20X"])?;
    refused(&wrong, "such as 20M")?;
    let (one, two) = (stage.machine(1)?, stage.machine(2)?);
    let profiles = (stage.profile(host, "alice")?, stage.profile(host, "bob")?);
    let to = stage.one.ipv4()?.to_string();
    for (flag, other) in [("--client-up", "client_down"), ("--client-down", "client_up")] {
        let served = host.weft_json(&[&SERVE[..6], &[flag, "64K"]].concat())?;
        ensure!(served[other].is_null(), "{served}");
        let (mut alice, mut bob) = (one.connect(&profiles.0)?, two.connect(&profiles.1)?);
        let got = answers(&one.netns, &to)?;
        // The burst is free: 128 KiB. A busy machine takes seconds for it, in which 6 packets a second are free, too.
        ensure!((80..240).contains(&got), "{flag}: {got} answers");
        let got = answers(&two.netns, &to)?;
        ensure!(
            (80..240).contains(&got),
            "{flag}: a client has used up the limit of another: {got}"
        );
        alice.process.terminate(LIMIT)?;
        bob.process.terminate(LIMIT)?;
    }
    let text = host.weft(&["status"])?.success()?.stdout;
    ensure!(text.contains("at most 64K bit/s to a client"), "{text}");
    serve(host)?;
    let _alice = one.connect(&profiles.0)?;
    let got = answers(&one.netns, &to)?;
    ensure!(got > 280, "without a limit {got} answers");
    Ok(())
}
