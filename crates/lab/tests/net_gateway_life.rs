//! Sessions of stock clients over time: new keys, lost packets, other addresses, ends. The referees are Debian's
//! `openvpn`, iperf3 and ping. No session here ends because a ping stays away.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Signal;
use serde_json::Value;
use weft_bench::sandbox::{Netns, require, try_wait_until};
use weft_lab::net::capture::{Capture, tshark};
use weft_lab::net::gateway::{Client, LIMIT, Machine, Stage, address_in, connected_again};
use weft_lab::net::probe::connection_arrives;
use weft_lab::net::{iperf, namespace, nft_packets, wait_ping};

/// Of a client that has agreed on a key.
const NEW_KEY: &str = "Control Channel: TLS";
/// Both directions of this are about as much as a call with pictures.
const BITRATE: &str = "4M";
/// Datagrams of 35 s at that rate, each way, at least.
const DATAGRAMS_MIN: u64 = 10_000;
/// Far less than the time after which a ping is missed.
const AT_ONCE: Duration = Duration::from_secs(10);

/// A host that waits for a client's ping for four minutes.
fn patient() -> anyhow::Result<Stage> {
    let stage = Stage::new()?;
    let words = ["openvpn", "serve", "--listen", "1194", "--listen", "tcp:1194"];
    let times = ["--ping", "20", "--ping-restart", "120"];
    let served = stage.host().weft_json(&[&words[..], &times].concat())?;
    ensure!(served["state"] == "serving", "{served}");
    Ok(stage)
}

/// The one client that is connected.
fn only_client(stage: &Stage) -> anyhow::Result<Value> {
    let clients = stage.clients()?;
    let [client] = &clients[..] else { anyhow::bail!("not one client: {clients:?}") };
    Ok(client.clone())
}

/// Traffic passes both ways between a client and a container of the other host.
fn carries(stage: &Stage, machine: &Machine, client: &Client) -> anyhow::Result<()> {
    machine.wait_ping(stage.two.ipv4()?.into())?;
    wait_ping(&stage.two, client.address.into(), LIMIT)?;
    Ok(())
}

fn pings(from: &Netns, to: &str, more: &[&str]) -> anyhow::Result<String> {
    let words = [&["ping", "-n", "-q", "-W", "2"], more, &[to]].concat();
    Ok(from.exec(&words)?.stdout)
}

#[test]
fn keys_are_renewed_every_ten_seconds_under_iperf3_without_a_lost_packet() -> anyhow::Result<()> {
    require("iperf3", "iperf3")?;
    let stage = patient()?;
    let machine = stage.machine(1)?;
    let profile = stage.profile(stage.host(), "alice")?;
    let mut alice = machine.connect_with(&profile, &["--reneg-sec", "10"])?;
    carries(&stage, &machine, &alice)?;
    let before = only_client(&stage)?;
    let _server = iperf::Server::start(&stage.two)?;
    let two = stage.two.ipv4()?.to_string();
    let words = ["iperf3", "--json", "--udp", "--bidir", "--time", "35", "--length", "1200"];
    let report = machine.netns.exec(&[&words[..], &["-b", BITRATE, "-c", &two]].concat())?;
    let report = report.success()?.json()?;
    for way in ["sum_received", "sum_received_bidir_reverse"] {
        let sum = &report["end"][way];
        ensure!(sum["lost_packets"] == 0, "{way}: {sum}");
        ensure!(sum["packets"].as_u64() > Some(DATAGRAMS_MIN), "{way}: {sum}");
    }
    // The first key, and one each ten seconds.
    for _ in 0..3 {
        alice.process.line_with(NEW_KEY, AT_ONCE)?;
    }
    let after = only_client(&stage)?;
    ensure!(after["since"] == before["since"], "the session is another: {before}, {after}");
    ensure!(after["last_handshake"] != before["last_handshake"], "{before}, {after}");
    carries(&stage, &machine, &alice)
}

/// A profile whose client has a port of its own.
fn with_port(profile: &Path) -> anyhow::Result<PathBuf> {
    let text = std::fs::read_to_string(profile)?;
    let lines = text.lines().filter(|line| *line != "nobind");
    let path = profile.with_extension("port.ovpn");
    std::fs::write(&path, lines.map(|line| format!("{line}\n")).collect::<String>())?;
    Ok(path)
}

#[test]
fn a_client_that_starts_anew_takes_its_own_place_at_once() -> anyhow::Result<()> {
    let stage = patient()?;
    let machine = stage.machine(1)?;
    let profile = stage.profile(stage.host(), "alice")?;
    let has_one = |from: &str, address| -> anyhow::Result<()> {
        let client = only_client(&stage)?;
        let real = client["real_address"].as_str().context("no address")?;
        ensure!(real.starts_with(from), "{client}");
        ensure!(client["addresses"][0] == format!("{address}"), "another address: {client}");
        let sessions = || Ok(stage.host().weft_json(&["status"])?["gateway"]["sessions"] == 1);
        try_wait_until("the earlier session to be gone", AT_ONCE, sessions)?;
        Ok(())
    };
    // kill -USR1, twice.
    let mut alice = machine.connect(&profile)?;
    let address = alice.address;
    for _ in 0..2 {
        alice.process.signal(Signal::USR1);
        connected_again(&mut alice.process)?;
        carries(&stage, &machine, &alice)?;
        has_one("198.51.1.2:", address)?;
    }
    // From the same port again, after a kill that says nothing.
    alice.process.kill();
    let profile = with_port(&profile)?;
    for _ in 0..2 {
        let mut alice = machine.connect_with(&profile, &["--lport", "40000"])?;
        carries(&stage, &machine, &alice)?;
        has_one("198.51.1.2:40000", address)?;
        alice.process.kill();
    }
    // At once from another address.
    let wan =
        |word: &str, last: u8| machine.netns.ip(&format!("addr {word} 198.51.1.{last}/24 dev wan"));
    wan("del", 2)?;
    wan("add", 3)?;
    let mut alice = machine.connect_with(&profile, &["--lport", "40000"])?;
    carries(&stage, &machine, &alice)?;
    has_one("198.51.1.3:40000", address)?;
    // Its connection over TCP is another place, too.
    alice.process.kill();
    let over_tcp = Machine { is_tcp: true, ..machine };
    let alice = over_tcp.connect(&stage.profile(stage.host(), "alice")?)?;
    carries(&stage, &over_tcp, &alice)?;
    has_one("198.51.1.3:", address)
}

#[test]
fn a_running_client_moves_to_another_address_and_agrees_on_keys_there() -> anyhow::Result<()> {
    let stage = patient()?;
    let machine = stage.machine(1)?;
    let profile = stage.profile(stage.host(), "alice")?;
    let mut alice = machine.connect_with(&profile, &["--reneg-sec", "8"])?;
    carries(&stage, &machine, &alice)?;
    let before = only_client(&stage)?;
    for last in [3, 4] {
        machine.netns.ip(&format!("addr del 198.51.1.{}/24 dev wan", last - 1))?;
        machine.netns.ip(&format!("addr add 198.51.1.{last}/24 dev wan"))?;
        carries(&stage, &machine, &alice)?;
        let moved = || {
            let from = format!("198.51.1.{last}:");
            let client = only_client(&stage).unwrap_or_default();
            Ok(client["real_address"].as_str().is_some_and(|real| real.starts_with(&from)))
        };
        try_wait_until("the new address to be known", LIMIT, moved)?;
        // The first of these may have been under way.
        for _ in 0..2 {
            alice.process.line_with(NEW_KEY, LIMIT)?;
        }
        carries(&stage, &machine, &alice)?;
    }
    let after = only_client(&stage)?;
    ensure!(after["since"] == before["since"], "the session is another: {before}, {after}");
    Ok(())
}

/// The share of pings without an answer, in percent.
fn loss_percent(said: &str) -> anyhow::Result<f64> {
    let before = said.split("% packet loss").next().unwrap_or_default();
    let figure = before.rsplit(' ').next().unwrap_or_default();
    figure.parse().with_context(|| said.to_owned())
}

/// Drops a tenth of all datagrams to the gateway and from it, at random.
const LOSSES: [&str; 7] = [
    "add table inet lab",
    "add counter inet lab lost_in",
    "add counter inet lab lost_out",
    "add chain inet lab in { type filter hook input priority 0; }",
    "add chain inet lab out { type filter hook output priority 0; }",
    "add rule inet lab in udp dport 1194 numgen random mod 10 == 0 counter name lost_in drop",
    "add rule inet lab out udp sport 1194 numgen random mod 10 == 0 counter name lost_out drop",
];

#[test]
fn a_tenth_of_all_packets_may_be_lost_both_ways() -> anyhow::Result<()> {
    let stage = patient()?;
    let (host, machine) = (stage.host().netns(), stage.machine(1)?);
    let profile = stage.profile(stage.host(), "alice")?;
    for line in LOSSES {
        host.exec(&["nft", line])?.success()?;
    }
    let mut alice = machine.connect_with(&profile, &["--reneg-sec", "5"])?;
    let before = only_client(&stage)?;
    let two = stage.two.ipv4()?.to_string();
    let said = pings(&machine.netns, &two, &["-i", "0.05", "-c", "300"])?;
    let lost = loss_percent(&said)?;
    // Two tenths of the ways there and back; keys are renewed meanwhile.
    ensure!((5.0..40.0).contains(&lost), "{said}");
    for _ in 0..3 {
        alice.process.line_with(NEW_KEY, LIMIT)?;
    }
    for counter in ["lost_in", "lost_out"] {
        ensure!(nft_packets(host, counter)? > 10, "{counter}: nothing was dropped");
    }
    host.exec(&["nft", "delete", "table", "inet", "lab"])?.success()?;
    let after = only_client(&stage)?;
    ensure!(after["since"] == before["since"], "the session is another: {before}, {after}");
    carries(&stage, &machine, &alice)?;
    let said = pings(&machine.netns, &two, &["-i", "0.05", "-c", "100"])?;
    ensure!(said.contains(" 0% packet loss"), "{said}");
    Ok(())
}

#[test]
fn a_client_that_leaves_says_so_and_is_gone_at_once() -> anyhow::Result<()> {
    let stage = patient()?;
    let mut machine = stage.machine(1)?;
    let profile = stage.profile(stage.host(), "alice")?;
    for is_tcp in [false, true] {
        machine.is_tcp = is_tcp;
        let mut alice = machine.connect(&profile)?;
        carries(&stage, &machine, &alice)?;
        alice.process.signal(Signal::TERM);
        let is_gone = || {
            let answer = stage.host().weft_json(&["status"])?;
            Ok(answer["gateway"]["clients"] == 0)
        };
        try_wait_until("the client to be gone", AT_ONCE, is_gone)?;
        alice.process.wait(LIMIT)?;
        let routes = stage.host().netns().ip("route show proto 87")?.success()?.stdout;
        ensure!(!routes.contains(&alice.address.to_string()), "{routes}");
    }
    Ok(())
}

/// Packets of IPv4 that a namespace has sent in pieces.
fn fragments(netns: &Netns) -> anyhow::Result<u64> {
    let text = netns.exec(&["cat", "/proc/net/snmp"])?.success()?.stdout;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, values) = (lines.next().context("no names")?, lines.next().context("no values")?);
    let mut all = names.split(' ').zip(values.split(' '));
    let (_, count) = all.find(|(name, _)| *name == "FragCreates").context("no FragCreates")?;
    Ok(count.parse()?)
}

/// The way to the host may be narrower than a full packet; and a client may keep a wider MTU of its own.
fn other_widths(
    stage: &Stage,
    machine: &Machine,
    profile: &Path,
    pushed: u32,
) -> anyhow::Result<()> {
    /// Headers of IPv4 and TCP.
    const TCP_HEADERS: u32 = 40;
    for (narrow, options) in
        [(1_300, &[][..]), (1_500, &["--pull-filter", "ignore", "tun-mtu", "--tun-mtu", "1500"])]
    {
        machine.netns.ip(&format!("link set wan mtu {narrow}"))?;
        stage.host().netns().ip(&format!("link set m1 mtu {narrow}"))?;
        let mut alice = machine.connect_with(profile, options)?;
        carries(stage, machine, &alice)?;
        let from = PathBuf::from(machine.netns.path());
        let inside = namespace(&stage.two);
        let to: IpAddr = stage.two.ipv4()?.into();
        let own = (from.as_path(), alice.address.into());
        let file = stage.lab.sandbox.directory().join(format!("{narrow}.pcap"));
        let capture = Capture::start(stage.two.netns(), "weft0", &file, "tcp")?;
        connection_arrives(own, (&inside, to))?;
        capture.finish()?;
        // Containers are told of no longer segments than the device carries, whatever the client takes.
        let opened = format!("tcp.flags.syn == 1 && ip.src == {}", alice.address);
        let told = tshark(&file, &["-Y", &opened, "-T", "fields", "-e", "tcp.options.mss_val"])?;
        let sizes: Vec<u32> = told.lines().map(str::parse).collect::<Result<_, _>>()?;
        let fits = |size: &u32| *size > 0 && size + TCP_HEADERS <= pushed;
        ensure!(!sizes.is_empty() && sizes.iter().all(fits), "{narrow}: {sizes:?} of {pushed}");
        connection_arrives((&inside, to), own)?;
        let said =
            pings(&machine.netns, &to.to_string(), &["-M", "dont", "-c", "3", "-s", "1300"])?;
        ensure!(said.contains(" 0% packet loss"), "{narrow}: {said}");
        alice.process.terminate(LIMIT)?;
    }
    Ok(())
}

#[test]
fn packets_up_to_the_mtu_pass_and_longer_ones_are_told() -> anyhow::Result<()> {
    /// Headers of IPv4 and ICMP.
    const HEADERS: u32 = 28;
    for (program, package) in [("tshark", "tshark"), ("tcpdump", "tcpdump")] {
        require(program, package)?;
    }
    let stage = patient()?;
    let machine = stage.machine(1)?;
    let profile = stage.profile(stage.host(), "alice")?;
    let two = stage.two.ipv4()?.to_string();
    let longest = |from: &Netns, to: &str, mtu: u32| -> anyhow::Result<String> {
        let size = (mtu - HEADERS).to_string();
        pings(from, to, &["-M", "do", "-c", "1", "-s", &size])
    };
    let alice = machine.connect(&profile)?;
    carries(&stage, &machine, &alice)?;
    let (host, gateway) = (stage.host().netns(), address_in(&alice.pushed, "route-gateway ")?);
    let link = machine.netns.exec(&["ip", "-j", "link", "show", "tun0"])?.success()?.json()?;
    let mtu = link[0]["mtu"].as_u64().and_then(|mtu| u32::try_from(mtu).ok()).context("no MTU")?;
    ensure!(alice.pushed.contains(&format!("tun-mtu {mtu}")), "{mtu}: {}", alice.pushed);
    // A packet of the pushed MTU fits into one outer packet of the path's MTU.
    let before = [fragments(&machine.netns)?, fragments(host)?];
    let said = longest(&machine.netns, &gateway.to_string(), mtu)?;
    ensure!(said.contains(" 0% packet loss"), "{mtu} bytes to the gateway: {said}");
    let after = [fragments(&machine.netns)?, fragments(host)?];
    ensure!(after == before, "{mtu} bytes are sent in pieces: {before:?}, {after:?}");
    let pushed = mtu;
    // The host's interface on the network may take less.
    let link = host.exec(&["ip", "-j", "link", "show", "weft-host"])?;
    let inside = link.success()?.json()?[0]["mtu"].as_u64().and_then(|mtu| u32::try_from(mtu).ok());
    let mtu = mtu.min(inside.context("no MTU")?);
    let (own, address) = (&machine.netns, alice.address.to_string());
    let one = stage.one.ipv4()?.to_string();
    for (from, to) in [(own, &one), (stage.one.netns(), &address)] {
        let said = longest(from, to, mtu)?;
        ensure!(said.contains(" 0% packet loss"), "{mtu} bytes to {to}: {said}");
        let said = longest(from, to, mtu + 1)?;
        ensure!(said.contains("100% packet loss"), "{} bytes to {to}: {said}", mtu + 1);
    }
    // It is told so, and sends no more than that.
    let said = longest(own, &two, mtu + 1)?;
    ensure!(said.contains("100% packet loss"), "{} bytes to {two}: {said}", mtu + 1);
    let route = own.ip(&format!("route get {two}"))?.stdout;
    ensure!(route.contains(&format!(" mtu {mtu}")), "{route}");
    let said = longest(own, &two, mtu)?;
    ensure!(said.contains(" 0% packet loss"), "{mtu} bytes to {two}: {said}");
    // In pieces all passes.
    for (from, to) in [(own, &two), (stage.two.netns(), &address)] {
        let said = pings(from, to, &["-M", "dont", "-c", "1", "-s", "4000"])?;
        ensure!(said.contains(" 0% packet loss"), "4000 bytes to {to}: {said}");
    }
    drop(alice);
    other_widths(&stage, &machine, &profile, pushed)
}
