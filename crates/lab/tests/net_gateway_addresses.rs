//! A host with several addresses answers each client from the one that the client speaks to. The referee is Debian's
//! `openvpn`, which takes packets from no other.

use std::path::Path;

use anyhow::ensure;
use serde_json::Value;
use weft_bench::sandbox::try_wait_until;
use weft_lab::net::gateway::{Client, LIMIT, Machine, Stage, connected};

/// The host's addresses: two of its link to the client, and one of no link.
const IPV4: [&str; 3] = ["198.51.1.1", "198.51.1.9", "203.0.113.1"];
const IPV6: [&str; 3] = ["2001:db8:1::1", "2001:db8:1::9", "2001:db8:77::1"];
/// An address that the client gets later.
const MOVED: &str = "198.51.1.3";

/// Connects to one address of the host.
fn connect(
    machine: &Machine,
    profile: &Path,
    to: &str,
    options: &[&str],
) -> anyhow::Result<Client> {
    let proto = if to.contains(':') { "udp6" } else { "udp4" };
    let profile = profile.to_string_lossy();
    let place = ["openvpn", "--remote", to, "1194", proto, "--verb", "3"];
    let words = [&place[..], &["--config", &profile, "--dev", "tun0"], options].concat();
    connected(machine.netns.spawn(&words)?)
}

#[test]
fn each_client_is_answered_from_the_address_that_it_speaks_to() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let (host, machine) = (stage.host(), stage.machine(1)?);
    for address in [
        "198.51.1.9/24 dev m1",
        "203.0.113.1/32 dev lo",
        "2001:db8:1::9/64 dev m1 nodad",
        "2001:db8:77::1/128 dev lo nodad",
    ] {
        host.netns().ip(&format!("addr add {address}"))?.success()?;
    }
    for route in ["203.0.113.1 via 198.51.1.1", "2001:db8:77::1 via 2001:db8:1::1"] {
        machine.netns.ip(&format!("route add {route}"))?.success()?;
    }
    let profile = stage.profile(host, "alice")?;
    for to in IPV6.into_iter().chain(IPV4) {
        let Client { mut process, .. } = connect(&machine, &profile, to, &[])?;
        machine.wait_ping(stage.two.ipv4()?.into())?;
        process.terminate(LIMIT)?;
    }

    // A client that moves is answered at its new place, and from the same address still. So are its later keys.
    let mut alice = connect(&machine, &profile, IPV4[2], &["--reneg-sec", "10"])?;
    machine.netns.ip(&format!("addr add {MOVED}/24 dev wan"))?.success()?;
    let route = format!("route replace {} via {} src {MOVED}", IPV4[2], IPV4[0]);
    machine.netns.ip(&route)?.success()?;
    machine.wait_ping(stage.two.ipv4()?.into())?;
    try_wait_until("the host to know the client's new address", LIMIT, || {
        let is_there = |client: &Value| {
            client["real_address"].as_str().is_some_and(|it| it.starts_with(&format!("{MOVED}:")))
        };
        Ok(stage.clients().is_ok_and(|clients| clients.iter().any(is_there)))
    })?;
    for _ in 0..2 {
        alice.process.line_with("VERIFY OK: depth=0", LIMIT)?;
        alice.process.line_with("Control Channel: TLSv1.3", LIMIT)?;
    }
    machine.wait_ping(stage.two.ipv4()?.into())?;
    ensure!(stage.clients()?.len() == 1, "the session is another");
    Ok(())
}
