//! `weft top` beside iperf3's figures, and its report of frames that go nowhere.

use std::net::IpAddr;
use std::time::Duration;

use serde_json::Value;
use weft_bench::sandbox::{Container, Host};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, slowness};

/// The counters belong to the vector engine, which counts drops by reason.
const VECTOR: [&str; 2] = ["--engine", "userspace"];
/// An Ethernet address that no endpoint has, and an unused address of the network.
const NOBODY: (&str, &str) = ("02:00:00:00:de:ad", "10.47.255.200");

/// The lines of `weft top --json`.
fn top(host: &Host, count: &str) -> anyhow::Result<Vec<Value>> {
    let output = host.weft(&["top", "--json", "--count", count])?.success()?;
    Ok(output.stdout.lines().map(serde_json::from_str).collect::<Result<_, _>>()?)
}

/// Whether two rates are within a factor of two.
fn is_near(one: &Value, other: f64) -> bool {
    one.as_f64().is_some_and(|one| one > other / 2.0 && one < other * 2.0)
}

#[test]
fn the_rates_of_peer_and_container_are_those_of_iperf3() -> anyhow::Result<()> {
    let lab = Lab::pair(&VECTOR)?;
    let (one, two) = lab.containers()?;
    let to: IpAddr = two.ipv4()?.into();
    let _server = Server::start(&two)?;
    let rate = format!("{}M", 40 / slowness());
    let flow = std::thread::spawn(move || iperf::run(&one, to, &["-b", &rate, "-t", "8"]));
    std::thread::sleep(Duration::from_secs(2));
    let lines = top(lab.host(0), "2")?;
    let far = top(lab.host(1), "2")?;
    let report = flow.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    assert_eq!((lines.len(), far.len()), (2, 2));
    let wanted = iperf::received_bps(&report);
    for (line, direction) in [(&lines[1], "sent_bps"), (&far[1], "received_bps")] {
        let (peer, container) = (&line["peers"][0], &line["containers"][0]);
        assert!(is_near(&peer[direction], wanted), "iperf3 says {wanted}, the peer's: {line}");
        assert!(is_near(&container[direction], wanted), "iperf3 says {wanted}, its own: {line}");
        assert_eq!(peer["engine"], "userspace", "{line}");
        let moved = ["datagrams_sent_pps", "datagrams_received_pps"];
        let moved = moved.iter().filter_map(|name| line["workers"][0][*name].as_f64());
        assert!(moved.fold(0.0, f64::max) > 0.0, "no worker moved anything: {line}");
        let busy = line["workers"][0]["busy_percent"].as_f64().unwrap_or_default();
        assert!(busy > 0.0 && busy <= 101.0, "a worker at {busy} %: {line}");
        assert!(line["interval_ms"].as_u64().is_some_and(|ms| ms >= 900), "{line}");
    }
    assert_eq!(lines[1]["peers"][0]["nickname"], lab.host(1).nickname());
    // For people the same, without a terminal's control characters where there is no terminal.
    let text = lab.host(0).weft(&["top", "--count", "1", "--interval", "0.2"])?.success()?.stdout;
    assert!(text.contains(&lab.host(1).nickname()) && text.contains("CONTAINER"), "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
    Ok(())
}

#[test]
fn frames_that_go_nowhere_are_shown_by_reason() -> anyhow::Result<()> {
    let lab = Lab::pair(&VECTOR)?;
    let (one, _two) = lab.containers()?;
    assert!(top(lab.host(0), "1")?[0]["drops"]["no_endpoint"].is_null());
    let _pings = lost_pings(lab.host(0), &one)?;
    let line = top(lab.host(0), "2")?.pop().unwrap_or_default();
    let dropped = &line["drops"]["no_endpoint"];
    assert!(dropped["pps"].as_f64().is_some_and(|pps| pps > 0.0), "{line}");
    assert!(dropped["total"].as_u64().is_some_and(|total| total > 0), "{line}");
    assert!(line["workers"][0]["dropped_pps"].as_f64().is_some_and(|pps| pps > 0.0), "{line}");
    Ok(())
}

/// Pings to an address that the switch expects beyond the vector engine, and that no host has.
fn lost_pings(host: &Host, from: &Container) -> anyhow::Result<weft_bench::sandbox::Running> {
    let (mac, address) = NOBODY;
    let entry = ["bridge", "fdb", "add", mac, "dev", "weft-tap", "master", "static"];
    host.netns().exec(&entry)?.success()?;
    from.netns().ip(&format!("neigh add {address} lladdr {mac} dev weft0"))?;
    Ok(from.spawn(&["ping", "-n", "-i", "0.1", "-W", "1", "-c", "200", address])?)
}

#[test]
fn a_reading_without_a_daemon_says_so() -> anyhow::Result<()> {
    let lab = Lab::launched(1, &VECTOR)?;
    lab.host(0).stop_daemon()?;
    let output = lab.host(0).weft(&["top", "--json", "--count", "1"])?;
    assert_eq!(output.status.code(), Some(3), "{}", output.stderr);
    Ok(())
}
