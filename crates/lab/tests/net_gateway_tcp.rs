//! Stock OpenVPN clients over TCP, judged by Debian's `openvpn`, ping and iperf3.

use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::Signal;
use weft_bench::sandbox::{Running, require, try_wait_until};
use weft_lab::net::gateway::{CONNECTED, Client, LIMIT, Machine, Stage};
use weft_lab::net::iperf;

/// Silent connections: more than may wait for clients to show who they are.
const FLOOD: &str = "700";
/// Less than the time without a ping after which the host gives a client up.
const CLOSED_LIMIT: Duration = Duration::from_secs(4);

/// A host that serves over UDP and TCP.
fn stage() -> anyhow::Result<Stage> {
    let stage = Stage::new()?;
    let times = ["--ping", "5", "--ping-restart", "20"];
    let words = [&["openvpn", "serve", "--listen", "1194", "--listen", "tcp:1194"], &times[..]];
    let served = stage.host().weft_json(&words.concat())?;
    let listen = served["listen"].to_string();
    ensure!(listen.contains("udp:0.0.0.0:1194") && listen.contains("tcp:[::]:1194"), "{served}");
    Ok(stage)
}

fn over_tcp(stage: &Stage, number: u8, is_ipv4: bool) -> anyhow::Result<Machine> {
    Ok(Machine { is_ipv4, is_tcp: true, ..stage.machine(number)? })
}

fn wait_clients(stage: &Stage, count: usize, limit: Duration) -> anyhow::Result<()> {
    try_wait_until(&format!("{count} clients"), limit, || {
        Ok(stage.clients().is_ok_and(|clients| clients.len() == count))
    })?;
    Ok(())
}

#[test]
fn clients_over_tcp_reach_the_network_and_are_gone_with_their_connection() -> anyhow::Result<()> {
    let stage = stage()?;
    let host = stage.host();
    let four = over_tcp(&stage, 1, true)?;
    let profile = stage.profile(host, "alice")?;
    let text = std::fs::read_to_string(&profile)?;
    let remotes: Vec<&str> = text.lines().filter(|line| line.starts_with("remote ")).collect();
    let ends: Vec<bool> = remotes.iter().map(|line| line.ends_with(" 1194 tcp")).collect();
    ensure!(ends == [false, true], "UDP is not before TCP: {remotes:?}");
    let alice = four.connect(&profile)?;
    let six = over_tcp(&stage, 2, false)?;
    let bob = six.connect(&stage.profile(host, "bob")?)?;
    let udp = stage.machine(3)?;
    let carol = udp.connect(&stage.profile(host, "carol")?)?;
    for machine in [&four, &six, &udp] {
        machine.wait_ping(stage.two.ipv4()?.into())?;
        machine.wait_ping(alice.address.into())?;
        machine.wait_ping(bob.address.into())?;
        machine.wait_ping(carol.address.into())?;
    }
    let clients = stage.clients()?;
    let protocols: Vec<&str> = clients.iter().filter_map(|it| it["protocol"].as_str()).collect();
    ensure!(protocols == ["tcp", "tcp", "udp"], "{clients:?}");
    let shown = host.weft(&["status", "clients"])?.success()?.stdout;
    ensure!(shown.lines().filter(|line| line.contains(" tcp ")).count() == 2, "{shown}");
    // Killed, it says nothing; its kernel closes the connection.
    let Client { mut process, .. } = bob;
    process.kill();
    wait_clients(&stage, 2, CLOSED_LIMIT)?;
    // It connects anew, with a new connection.
    let Client { mut process, address, .. } = alice;
    process.signal(Signal::USR1);
    let pushed = process.line_with("PUSH_REPLY", LIMIT)?;
    ensure!(pushed.contains(&format!("ifconfig {address} ")), "another address: {pushed}");
    process.line_with(CONNECTED, LIMIT)?;
    four.wait_ping(stage.two.ipv4()?.into())?;
    // A revoked client hears why.
    host.weft_json(&["openvpn", "revoke", "alice"])?;
    process.line_with("certificate revoked", LIMIT)?;
    process.wait(LIMIT)?;
    let mut again = four.start(&profile)?;
    again.line_with("AUTH_FAILED,The certificate is revoked", LIMIT)?;
    wait_clients(&stage, 1, CLOSED_LIMIT)
}

#[test]
fn traffic_over_tcp_outlives_new_keys_and_streams_are_carried() -> anyhow::Result<()> {
    require("iperf3", "iperf3")?;
    let stage = stage()?;
    let machine = over_tcp(&stage, 1, true)?;
    let profile = stage.profile(stage.host(), "alice")?;
    let mut alice = machine.connect_with(&profile, &["--reneg-sec", "5"])?;
    let two = stage.two.ipv4()?.to_string();
    machine.wait_ping(two.parse()?)?;
    let _server = iperf::Server::start(&stage.two)?;
    let words = ["iperf3", "--json", "--time", "16", "--bitrate", "10M", "--client", &two];
    let ping = ["ping", "-n", "-i", "0.2", "-c", "80", "-W", "5", &two];
    let mut beside = machine.netns.spawn(&ping)?;
    let report = machine.netns.exec(&words)?.success()?.stdout;
    let report: serde_json::Value = serde_json::from_str(&report)?;
    let received = report["end"]["sum_received"]["bits_per_second"].as_f64();
    ensure!(received.is_some_and(|bps| bps > 5e6), "{received:?}");
    let lost = beside.line_with("packet loss", LIMIT)?;
    ensure!(lost.contains(" 0% packet loss"), "{lost}");
    for _ in 0..2 {
        alice.process.line_with("VERIFY OK: depth=0", LIMIT)?;
    }
    let back = ["iperf3", "--json", "--reverse", "--time", "2", "--client", &two];
    machine.netns.exec(&back)?.success()?;
    ensure!(stage.clients()?.len() == 1, "the session is another");
    Ok(())
}

/// Opens connections from a machine that say nothing, and says how many there are.
fn silent(machine: &Machine, count: &str) -> anyhow::Result<Running> {
    let to = format!("/dev/tcp/{}/1194", machine.gateway());
    let script = format!(
        "ulimit -n 4096; for n in $(seq {count}); do exec {{fd}}<>{to} || exit 1; done; echo opened; sleep 600"
    );
    let mut running = machine.netns.spawn(&["bash", "-c", &script])?;
    running.line_with("opened", LIMIT)?;
    Ok(running)
}

#[test]
fn garbage_and_floods_of_connections_leave_clients_alone() -> anyhow::Result<()> {
    let stage = stage()?;
    let host = stage.host();
    let good = over_tcp(&stage, 1, true)?;
    let alice = good.connect(&stage.profile(host, "alice")?)?;
    let bad = over_tcp(&stage, 2, true)?;
    let to = format!("/dev/tcp/{}/1194", bad.gateway());
    for bytes in
        ["GET / HTTP/1.1\\r\\n\\r\\n", "\\0\\0", "\\0\\001\\070", "\\0\\016\\0701234567890123"]
    {
        // The host closes: cat ends.
        let script = format!("exec 3<>{to}; printf '{bytes}' >&3; timeout 5 cat <&3");
        let status = bad.netns.exec(&["bash", "-c", &script])?.status;
        ensure!(status.code() != Some(124), "{bytes:?} leaves the connection open");
    }
    // A part of a frame, and no more: the host gives it up in time.
    let script = format!("exec 3<>{to}; printf '\\0' >&3; timeout 20 cat <&3");
    let status = bad.netns.exec(&["bash", "-c", &script])?.status;
    ensure!(status.code() != Some(124), "a slow client holds its connection for ever");
    let mut flood = silent(&bad, FLOOD)?;
    let other = over_tcp(&stage, 3, false)?;
    let bob = other.connect(&stage.profile(host, "bob")?)?;
    other.wait_ping(alice.address.into())?;
    good.wait_ping(bob.address.into())?;
    let status = host.weft_json(&["status"])?;
    let drops = status["gateway"]["drops"].as_object().context("no drops")?;
    for reason in ["connection_evicted", "first_packet_refused", "connection_without_client"] {
        ensure!(
            drops.get(reason).and_then(serde_json::Value::as_u64) > Some(0),
            "{reason}: {drops:?}"
        );
    }
    ensure!(stage.clients()?.len() == 2, "a client was lost");
    flood.terminate(LIMIT)?;
    Ok(())
}
