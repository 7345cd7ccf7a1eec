//! What the daemon learns from the events of real Docker engines: names, and containers of `weft attach` that start.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, try_wait_until};
use weft_lab::docker::{self, Docked, Engine, IMAGE, Release, launched, ping, wait_events};
use weft_lab::net::wait_ping;

const LIMIT: Duration = Duration::from_secs(20);
/// From a change in Docker until Weft shows it. The daemon also looks every 30 s, but not three times within three of
/// these limits.
const SEEN_LIMIT: Duration = Duration::from_secs(8);
/// A container stays away so long that the daemon looks for it only every 16 s.
const AWAY: Duration = Duration::from_secs(16);

weft_lab::with_each_docker! {
    a_container_that_is_renamed_is_known_by_its_new_name_alone,
    an_attached_container_has_its_addresses_after_each_kind_of_restart,
}

/// Renames a container of the first host, three times in all, and waits until a container of the second host knows it
/// by its new name alone.
fn rename(docked: &Docked, resolver: &str, names: [&str; 4]) -> anyhow::Result<()> {
    let [one, two] = &docked.engines;
    for pair in names.windows(2) {
        let (old, new) = (pair[0], pair[1]);
        one.run(&["rename", old, new])?;
        let address = one.address(new, "weft")?;
        let mut answers = [String::new(), String::new()];
        let waited = try_wait_until(&format!("{new} instead of {old}"), SEEN_LIMIT, || {
            for (answer, name) in answers.iter_mut().zip([new, old]) {
                let output = two.docker(&["exec", "client", "nslookup", name, resolver])?;
                *answer = output.stdout;
            }
            Ok(answers[0].contains(&address) && !answers[1].contains(&address))
        });
        waited.with_context(|| answers.join("\n"))?;
        let shown = docked.lab.host(0).weft_json(&["ps"])?;
        ensure!(shown[0]["name"] == new, "{shown}");
    }
    Ok(())
}

/// An address of a host on the network.
fn expose(host: &Host) -> anyhow::Result<String> {
    let exposed = host.weft_json(&["expose"])?;
    let first = exposed["addresses"][0].as_str().and_then(|net| net.split('/').next());
    Ok(first.with_context(|| format!("no address: {exposed}"))?.to_owned())
}

fn a_container_that_is_renamed_is_known_by_its_new_name_alone(
    release: Release,
) -> anyhow::Result<()> {
    let docked = Docked::start(release)?;
    docked.wait_ready_network()?;
    let host = docked.lab.host(0);
    let run = ["run", "-d", "--network", "weft", "--restart", "always", "--name"];
    docked.engines[0].run(&[&run[..], &["web", IMAGE, "sleep", "1000"]].concat())?;
    docked.engines[1].run(&[&run[..], &["client", IMAGE, "sleep", "1000"]].concat())?;
    let resolver = expose(docked.lab.host(1))?;
    wait_events(host, true)?;
    rename(&docked, &resolver, ["web", "shop", "store", "web"])?;

    // The engine restarts: the status says so, and events are followed again.
    docked.engines[0].kill();
    wait_events(host, false)?;
    let status = host.weft_json(&["status"])?["docker"].clone();
    let reason = status["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains("docker.sock") && status["since"].is_string(), "{status}");
    let text = host.weft(&["status"])?.success()?.stdout;
    ensure!(text.contains("events not followed since"), "{text}");
    docked.engines[0].start_again(host)?;
    wait_events(host, true)?;
    try_wait_until("the container to run again", LIMIT, || {
        Ok(docked.engines[0].address("web", "weft").is_ok())
    })?;
    ping(&docked.engines[1], "client", &docked.engines[0].address("web", "weft")?)?;
    rename(&docked, &resolver, ["web", "shop", "store", "web"])
}

/// The only attachment of a host.
fn attachment(host: &Host) -> anyhow::Result<Value> {
    Ok(host.weft_json(&["ps"])?[0].clone())
}

/// Waits for a state of the only attachment.
fn wait_state(host: &Host, state: &str, limit: Duration) -> anyhow::Result<()> {
    let mut shown = Value::Null;
    let waited = try_wait_until(&format!("the state {state}"), limit, || {
        shown = attachment(host).unwrap_or_default();
        Ok(shown["state"] == state)
    });
    waited.map(drop).with_context(|| format!("{shown}"))
}

/// A container of Docker's that `weft attach` has attached, seen from a container of another host.
struct Attached<'a> {
    engine: &'a Engine,
    host: &'a Host,
    other: &'a Container,
    before: Value,
}

impl Attached<'_> {
    /// It runs, and has the addresses that it had, in the kernel too.
    fn is_as_before(&self, name: &str) -> anyhow::Result<()> {
        wait_state(self.host, "attached", SEEN_LIMIT)?;
        let now = attachment(self.host)?;
        for field in ["id", "addresses", "mac", "interface"] {
            ensure!(now[field] == self.before[field], "{field}: {now}, before: {}", self.before);
        }
        ensure!(now["name"] == name, "{now}");
        let addresses = now["addresses"].as_array().cloned().unwrap_or_default();
        ensure!(!addresses.is_empty(), "{now}");
        let interface = now["interface"].as_str().unwrap_or_default();
        let kernel = self.engine.run(&["exec", name, "ip", "address", "show", interface])?;
        for net in addresses.iter().filter_map(Value::as_str) {
            ensure!(kernel.contains(net), "{net}: {kernel}");
            let address: IpAddr = net.split('/').next().unwrap_or_default().parse()?;
            wait_ping(self.other, address, LIMIT)?;
        }
        Ok(())
    }
}

fn an_attached_container_has_its_addresses_after_each_kind_of_restart(
    release: Release,
) -> anyhow::Result<()> {
    let lab = launched()?;
    let host = lab.host(0);
    let engine = docker::start_open(release, &lab.sandbox, host)?;
    let other = lab.host(1).add_container("c1")?;
    let run = ["run", "-d", "--network", "none", "--restart", "always", "--stop-signal", "KILL"];
    engine.run(&[&run[..], &["--name", "web", IMAGE, "sleep", "1000"]].concat())?;
    host.weft(&["attach", "web"])?.success()?;
    let before = attachment(host)?;
    let attached = Attached { engine: &engine, host, other: &other, before };
    attached.is_as_before("web")?;
    wait_events(host, true)?;

    engine.run(&["restart", "web"])?;
    attached.is_as_before("web")?;

    engine.run(&["stop", "web"])?;
    wait_state(host, "gone", LIMIT)?;
    std::thread::sleep(AWAY);
    // Its addresses are nobody else's meanwhile.
    ensure!(attachment(host)?["addresses"] == attached.before["addresses"]);
    engine.run(&["start", "web"])?;
    attached.is_as_before("web")?;

    engine.run(&["rename", "web", "shop"])?;
    try_wait_until("the name shop on the other host", SEEN_LIMIT, || {
        let knows = |name| lab.host(1).weft(&["dns-lookup", name]).map(|it| it.status.success());
        Ok(knows("shop")? && !knows("web")?)
    })?;
    attached.is_as_before("shop")?;

    // A restart of the engine ends the container, and starts it again.
    engine.stop()?;
    wait_state(host, "gone", LIMIT)?;
    engine.start_again(host)?;
    wait_events(host, true)?;
    attached.is_as_before("shop")?;

    // The daemon restarts while the container does, under another name.
    host.stop_daemon()?;
    engine.run(&["restart", "shop"])?;
    engine.run(&["rename", "shop", "web"])?;
    docker::launch(&lab.sandbox, host)?;
    attached.is_as_before("web")?;
    host.weft(&["detach", "web"])?.success()?;
    engine.run(&["rm", "-f", "web"])?;
    Ok(())
}
