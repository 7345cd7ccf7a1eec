//! The host's own address on the network: `weft expose` and `weft hide`.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::ensure;
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, SandboxError, try_wait_until};
use weft_lab::net::{Lab, wait_ping};

const LIMIT: Duration = Duration::from_secs(10);
const DEVICE: &str = "weft-host";

/// Exposes a host, and returns its addresses.
fn expose(host: &Host, words: &[&str]) -> anyhow::Result<Vec<IpAddr>> {
    let exposed = host.weft_json(&[&["expose"], words].concat())?;
    let list = exposed["addresses"].as_array().cloned().unwrap_or_default();
    let addresses = list.iter().filter_map(Value::as_str).filter_map(|net| net.split('/').next());
    Ok(addresses.map(str::parse).collect::<Result<_, _>>()?)
}

/// Waits until a host has an answer to a ping.
fn wait_host_ping(host: &Host, to: IpAddr) -> anyhow::Result<()> {
    let to = to.to_string();
    try_wait_until(&format!("an answer from {to} to the host"), LIMIT, || {
        Ok(host.netns().exec(&["ping", "-n", "-c", "1", "-W", "1", &to])?.status.success())
    })?;
    Ok(())
}

fn is_answered(from: &Container, to: IpAddr) -> anyhow::Result<bool> {
    Ok(from.exec(&["ping", "-n", "-c", "1", "-W", "1", &to.to_string()])?.status.success())
}

/// The addresses of the host's interface in the kernel, without those of the link; none if there is no interface.
fn in_kernel(host: &Host) -> anyhow::Result<Vec<String>> {
    let output = host.netns().exec(&["ip", "-j", "address", "show", "dev", DEVICE])?;
    if !output.status.success() {
        return Ok(Vec::new());
    }
    let infos = output.json()?[0]["addr_info"].as_array().cloned().unwrap_or_default();
    let global = infos.iter().filter(|info| info["scope"] != "link");
    let mut found: Vec<String> =
        global.filter_map(|info| info["local"].as_str()).map(str::to_owned).collect();
    found.sort();
    Ok(found)
}

fn has_device(host: &Host, name: &str) -> Result<bool, SandboxError> {
    Ok(host.netns().exec(&["ip", "link", "show", "dev", name])?.status.success())
}

fn sorted(addresses: &[IpAddr]) -> Vec<String> {
    let mut texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    texts.sort();
    texts
}

fn made_by_expose(host: &Host) -> anyhow::Result<Vec<Value>> {
    let list = host.weft_json(&["ps"])?.as_array().cloned().unwrap_or_default();
    Ok(list.into_iter().filter(|it| it["made_by"] == "expose").collect())
}

#[test]
fn exposed_hosts_and_all_containers_reach_each_other() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let first = expose(lab.host(0), &[])?;
    ensure!(first.len() == 2, "an address of each family: {first:?}");
    ensure!(expose(lab.host(0), &[])? == first, "exposing again changes nothing");
    let second = expose(lab.host(1), &[])?;
    for container in [&one, &two] {
        for address in first.iter().chain(&second) {
            wait_ping(container, *address, LIMIT)?;
        }
        for address in [container.ipv4()?.into(), container.ipv6()?.into()] {
            wait_host_ping(lab.host(0), address)?;
            wait_host_ping(lab.host(1), address)?;
        }
    }
    for address in second {
        wait_host_ping(lab.host(0), address)?;
    }
    let shown = made_by_expose(lab.host(0))?;
    ensure!(shown.len() == 1 && shown[0]["interface"] == DEVICE, "{shown:?}");
    // A router among the containers changes nothing on the host.
    let settings = "cat /proc/sys/net/ipv6/conf/weft-host/accept_ra";
    let taken = lab.host(0).netns().exec(&["sh", "-c", settings])?.success()?.stdout;
    ensure!(taken.trim() == "0", "the host takes router advertisements: {taken}");
    Ok(())
}

#[test]
fn hide_takes_back_some_addresses_or_all() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let host = lab.host(0);
    let addresses = expose(host, &["10.47.255.1/12", "10.47.255.9/12", "fd00:5eed::1/64"])?;
    ensure!(in_kernel(host)? == sorted(&addresses), "{:?}", in_kernel(host)?);
    wait_ping(&two, addresses[0], LIMIT)?;
    wait_ping(&two, addresses[1], LIMIT)?;

    let refused = host.weft(&["hide", "10.47.255.1", "10.47.0.7"])?;
    ensure!(!refused.status.success() && refused.stderr.contains("10.47.0.7"), "{refused:?}");
    ensure!(in_kernel(host)?.len() == 3, "a refusal changes nothing");
    // The first address of a prefix takes the others with it in the kernel.
    host.weft(&["hide", "10.47.255.1"])?.success()?;
    ensure!(in_kernel(host)? == sorted(&addresses[1..]), "{:?}", in_kernel(host)?);
    ensure!(!is_answered(&one, addresses[0])?, "a hidden address answers");
    wait_ping(&two, addresses[1], LIMIT)?;
    // It is free for a container.
    lab.host(1).weft(&["attach", "10.47.255.1/12", &two.netns().path()])?.success()?;

    let detached = host.weft(&["detach", "host:expose"])?;
    ensure!(!detached.status.success() && detached.stderr.contains("weft hide"), "{detached:?}");
    host.weft(&["hide"])?.success()?;
    ensure!(in_kernel(host)?.is_empty() && made_by_expose(host)?.is_empty());
    ensure!(!has_device(host, DEVICE)?, "the interface is left");
    ensure!(!is_answered(&two, addresses[1])?, "a hidden host answers");
    let again = host.weft(&["hide"])?.success()?;
    ensure!(again.stdout.contains("no address"), "{again:?}");
    Ok(())
}

#[test]
fn an_exposed_host_stays_so_over_restarts_crashes_and_damage() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (_one, two) = lab.containers()?;
    let host = lab.host(0);
    let addresses = expose(host, &[])?;
    for is_crash in [false, true] {
        match is_crash {
            true => host.kill_daemon(),
            false => host.stop_daemon()?,
        }
        // The next daemon makes it again.
        host.netns().ip("link del weft-host")?;
        host.start_daemon(&[])?;
        let shown = made_by_expose(host)?;
        ensure!(shown.len() == 1 && shown[0]["state"] == "attached", "{shown:?}");
        ensure!(in_kernel(host)? == sorted(&addresses), "{:?}", in_kernel(host)?);
        wait_ping(&two, addresses[0], LIMIT)?;
    }
    let links =
        host.netns().exec(&["ip", "-j", "link", "show", "type", "veth"])?.success()?.json()?;
    let peer = links.as_array().into_iter().flatten().find(|link| link["ifname"] == DEVICE);
    let peer = peer.and_then(|link| link["link"].as_str()).unwrap_or_default().to_owned();
    for damage in [
        "link del weft-host".to_owned(),
        "link set weft-host down".to_owned(),
        format!("link set {peer} name one"),
        "link set weft-host name other".to_owned(),
    ] {
        host.netns().ip(&damage)?;
        try_wait_until(&format!("both devices after: {damage}"), LIMIT, || {
            Ok(has_device(host, &peer)? && has_device(host, DEVICE)?)
        })?;
        wait_ping(&two, addresses[0], LIMIT)?;
        try_wait_until(&format!("the addresses after: {damage}"), LIMIT, || {
            Ok(in_kernel(host).is_ok_and(|found| found == sorted(&addresses)))
        })?;
    }
    host.netns().ip(&format!("address del {}/12 dev weft-host", addresses[0]))?;
    try_wait_until("the deleted address", LIMIT, || {
        Ok(in_kernel(host).is_ok_and(|found| found == sorted(&addresses)))
    })?;
    // An interface that no record knows, as after a kill in the middle of hide, is removed.
    host.stop_daemon()?;
    std::fs::remove_dir_all(host.state_directory().join("attachments"))?;
    host.start_daemon(&[])?;
    try_wait_until("the interface to go", LIMIT, || Ok(!has_device(host, DEVICE)?))?;
    Ok(())
}

#[test]
fn an_address_stays_taken_while_the_host_has_its_partner() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, _two) = lab.containers()?;
    let host = lab.host(0);
    let addresses = expose(host, &[])?;
    host.weft(&["hide", &addresses[1].to_string()])?.success()?;
    ensure!(in_kernel(host)? == sorted(&addresses[..1]), "{:?}", in_kernel(host)?);
    let asked = format!("{}/12", addresses[0]);
    for other in [host, lab.host(1)] {
        let free = lab.sandbox.add_netns(&format!("free{}", other.index()))?;
        let refused = other.weft(&["attach", &asked, &free.path()])?;
        ensure!(!refused.status.success(), "{asked} was given twice: {}", refused.stdout);
    }
    wait_ping(&one, addresses[0], LIMIT).map(drop)
}

#[test]
fn addresses_that_the_host_reaches_otherwise_are_refused() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    for line in
        ["link add lan type bridge", "link set lan up", "address add 192.168.7.1/24 dev lan"]
    {
        host.netns().ip(line)?;
    }
    let refused = |address: &str, word: &str| -> anyhow::Result<()> {
        let output = host.weft(&["expose", address])?;
        ensure!(!output.status.success() && output.stderr.contains(word), "{address}: {output:?}");
        Ok(())
    };
    refused("192.168.7.9/24", "192.168.7.0/24 by a route via lan")?;
    refused("192.168.7.9/16", "via lan")?;
    refused("10.47.0.9/8", "10.47.0.9/12")?;
    // One that the host has already.
    refused("192.168.7.1/32", "lan")?;
    ensure!(in_kernel(host)?.is_empty() && made_by_expose(host)?.is_empty());
    let addresses = expose(host, &[])?;
    refused("192.168.7.1/32", "lan")?;
    ensure!(in_kernel(host)? == sorted(&addresses), "a refusal changes nothing");
    host.weft(&["hide"])?.success()?;
    // An address by hand on the switch would take the answers.
    host.netns().ip("address add 10.47.255.1/12 dev weft")?;
    refused("10.47.0.9/12", "via weft")?;
    host.netns().ip("address del 10.47.255.1/12 dev weft")?;
    expose(host, &[])?;
    Ok(())
}

#[test]
fn an_address_that_a_container_has_is_refused_and_nothing_stays() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (_one, two) = lab.containers()?;
    let host = lab.host(0);
    let taken = format!("{}/12", two.ipv4()?);
    let refused = host.weft(&["expose", &taken])?;
    ensure!(!refused.status.success() && refused.stderr.contains(two.name()), "{refused:?}");
    ensure!(in_kernel(host)?.is_empty() && made_by_expose(host)?.is_empty());
    let addresses = expose(host, &[])?;
    let refused = host.weft(&["expose", &taken])?;
    ensure!(!refused.status.success(), "{refused:?}");
    ensure!(in_kernel(host)? == sorted(&addresses), "a refusal changes nothing");
    // Another program's device of that name is left alone.
    host.weft(&["hide"])?.success()?;
    host.netns().ip("link add weft-host type bridge")?;
    let refused = host.weft(&["expose"])?;
    ensure!(!refused.status.success() && refused.stderr.contains(DEVICE), "{refused:?}");
    ensure!(made_by_expose(host)?.is_empty(), "a refusal leaves a record");
    ensure!(has_device(host, DEVICE)?, "another program's device is gone");
    Ok(())
}
