//! Several networks over real hosts: their lives, and that nothing passes from one to another.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, require, try_wait_until};
use weft_lab::net::probe::{expect_datagram, udp_in};
use weft_lab::net::{Lab, namespace, wait_ping};

const LIMIT: Duration = Duration::from_secs(15);

/// A network as a host lists it.
fn network(host: &Host, name: &str) -> anyhow::Result<Value> {
    let all = host.weft_json(&["network", "ls"])?;
    let mut all = all.as_array().cloned().unwrap_or_default().into_iter();
    all.find(|it| it["name"] == name).with_context(|| format!("{name} is not listed"))
}

fn wait_state(host: &Host, name: &str, state: &str) -> anyhow::Result<()> {
    try_wait_until(&format!("network {name} {state} on {}", host.nickname()), LIMIT, || {
        Ok(network(host, name).is_ok_and(|it| it["state"] == state))
    })?;
    Ok(())
}

/// Attaches a container to a network at an address.
fn attach(host: &Host, name: &str, words: &[&str]) -> anyhow::Result<Container> {
    Ok(host.add_container_with(name, words)?)
}

fn is_answered(from: &Container, to: IpAddr) -> anyhow::Result<bool> {
    Ok(from.exec(&["ping", "-n", "-c", "1", "-W", "1", &to.to_string()])?.status.success())
}

/// A socket that gets broadcasts and datagrams of a container.
fn listener(container: &Container) -> anyhow::Result<UdpSocket> {
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 5_000);
    Ok(udp_in(&namespace(container), any)?)
}

/// Whether a host has no device of any network but `weft`.
fn has_no_network_devices(host: &Host) -> anyhow::Result<bool> {
    let links = host.netns().exec(&["ip", "-j", "link", "show"])?.success()?.json()?;
    let names = links.as_array().into_iter().flatten().filter_map(|it| it["ifname"].as_str());
    let of_network = |name: &str| {
        ["weft-br-", "weft-tap-", "weft-ann-", "weft-vx4-", "weft-vx6-", "weft-hst-"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    Ok(!names.into_iter().any(of_network))
}

fn refusal(host: &Host, words: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
    let output = host.weft(words)?;
    Ok((output.status.code(), output.stderr))
}

#[test]
fn networks_with_the_same_addresses_are_apart() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = (lab.host(0), lab.host(1));
    for name in ["shop", "prod"] {
        one.weft_json(&["network", "create", "--subnet", "10.9.0.0/24", name])?;
        wait_state(two, name, "elsewhere")?;
    }
    let on = |host, container, network, address| {
        attach(host, container, &["--network", network, address])
    };
    let (near, far) = ("10.9.0.1/24", "10.9.0.200/24");
    let shop = [on(one, "s1", "shop", near)?, on(two, "s2", "shop", far)?];
    let prod = [on(one, "p1", "prod", near)?, on(two, "p2", "prod", far)?];
    let weft = [attach(one, "w1", &[])?, attach(two, "w2", &[])?];
    let there: IpAddr = "10.9.0.200".parse()?;
    for pair in [&shop, &prod] {
        wait_ping(&pair[0], there, LIMIT)?;
    }
    wait_ping(&weft[0], weft[1].ipv4()?.into(), LIMIT)?;
    // A datagram and a broadcast of each network arrive there and nowhere else.
    let sockets = [&shop[1], &prod[1], &weft[1], &prod[0], &shop[0], &weft[0]];
    let sockets = sockets.into_iter().map(listener).collect::<anyhow::Result<Vec<_>>>()?;
    for (from, to, text) in [
        (&shop[0], there, &b"to one of shop"[..]),
        (&shop[0], "10.9.0.255".parse()?, b"to all of shop"),
    ] {
        let sender = udp_in(&namespace(from), SocketAddr::new("10.9.0.1".parse()?, 0))?;
        sender.set_broadcast(true)?;
        sender.send_to(text, SocketAddr::new(to, 5_000))?;
        expect_datagram(&sockets[0], text)?;
    }
    for socket in &sockets[1..4] {
        socket.set_read_timeout(Some(Duration::from_millis(300)))?;
        ensure!(socket.recv(&mut [0; 64]).is_err(), "a frame of shop came to another network");
    }
    // Without its container on shop, nobody else answers there.
    shop[1].netns().ip("link set weft0 down")?.success()?;
    ensure!(!is_answered(&shop[0], there)?, "another network answers");
    ensure!(is_answered(&prod[0], there)?);
    // Routes by hand lead to nobody of another network either.
    let of_weft: IpAddr = weft[1].ipv4()?.into();
    prod[0].exec(&["ip", "route", "add", &of_weft.to_string(), "dev", "weft0"])?.success()?;
    ensure!(!is_answered(&prod[0], of_weft)?, "weft answers to prod");
    Ok(())
}

#[test]
fn a_network_lives_as_long_as_a_host_holds_it() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = (lab.host(0), lab.host(1));
    let made = one.weft_json(&["network", "create", "shop"])?;
    ensure!(made["created"] == true && made["here"] == true && made["state"] != "failed", "{made}");
    let again = one.weft_json(&["network", "create", "shop"])?;
    ensure!(again["vni"] == made["vni"] && again["subnet"] == made["subnet"], "{again}");
    wait_state(two, "shop", "elsewhere")?;
    let first = attach(one, "first", &["--network", "shop"])?;
    let second = attach(two, "second", &["--network", "shop"])?;
    wait_ping(&first, second.ipv4()?.into(), LIMIT)?;
    wait_ping(&second, first.ipv6()?.into(), LIMIT)?;
    let joined = network(two, "shop")?;
    ensure!(joined["state"] == "ready" && joined["created"] == false, "{joined}");
    ensure!(joined["hosts"][0]["nickname"] == one.nickname(), "{joined}");
    // In use it stays.
    let (code, text) = refusal(one, &["network", "rm", "shop"])?;
    ensure!(code == Some(5) && text.contains("1 containers"), "{code:?} {text}");
    // Daemons that are killed find their networks and containers again.
    for host in [one, two] {
        host.kill_daemon();
        host.start_daemon(&[])?;
    }
    lab.wait_active()?;
    wait_ping(&first, second.ipv4()?.into(), LIMIT)?;
    let listed = one.weft_json(&["ps"])?;
    ensure!(listed[0]["network"] == "shop" && listed[0]["state"] == "attached", "{listed}");
    // The creator lets go of it; the other host goes on.
    one.weft_json(&["detach", &namespace(&first).to_string_lossy()])?;
    one.weft_json(&["network", "rm", "shop"])?;
    ensure!(network(one, "shop")?["state"] == "elsewhere");
    try_wait_until(
        "the devices to go",
        LIMIT,
        || Ok(has_no_network_devices(one).unwrap_or(false)),
    )?;
    ensure!(!has_no_network_devices(two)?);
    let third = attach(one, "third", &["--network", "shop"])?;
    wait_ping(&third, second.ipv4()?.into(), LIMIT)?;
    let (code, text) = refusal(one, &["attach", "--network", "nowhere", "netns:x"])?;
    ensure!(code.is_some_and(|code| code != 0) && !text.is_empty());
    let (code, text) = refusal(two, &["network", "rm", "weft"])?;
    ensure!(code == Some(2) && text.contains("every host"), "{code:?} {text}");
    Ok(())
}

#[test]
fn a_container_is_on_several_networks_that_do_not_overlap() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = (lab.host(0), lab.host(1));
    one.weft_json(&["network", "create", "shop"])?;
    one.weft_json(&["network", "create", "--share-range", "same"])?;
    wait_state(two, "shop", "elsewhere")?;
    let web = attach(one, "web", &[])?;
    let path = namespace(&web).to_string_lossy().into_owned();
    let on_shop = one.weft_json(&["attach", "--network", "shop", &path])?;
    ensure!(on_shop["interface"] == "weft1" && on_shop["network"] == "shop", "{on_shop}");
    let (code, text) = refusal(one, &["attach", "--network", "same", &path])?;
    ensure!(code == Some(5) && text.contains("--subnet"), "{code:?} {text}");
    let (weft, shop) = (attach(two, "w", &[])?, attach(two, "s", &["--network", "shop"])?);
    wait_ping(&web, weft.ipv4()?.into(), LIMIT)?;
    wait_ping(&web, shop.ipv4()?.into(), LIMIT)?;
    // One without the other.
    one.weft_json(&["detach", "--network", "shop", &path])?;
    ensure!(is_answered(&web, weft.ipv4()?.into())?);
    ensure!(!is_answered(&web, shop.ipv4()?.into())?);
    ensure!(web.exec(&["ip", "link", "show", "weft1"])?.status.code() != Some(0));
    one.weft_json(&["attach", "--network", "shop", &path])?;
    wait_ping(&web, shop.ipv4()?.into(), LIMIT)?;
    let listed = one.weft_json(&["ps"])?;
    ensure!(listed.as_array().is_some_and(|all| all.len() == 2), "{listed}");
    one.weft_json(&["detach", &path])?;
    let left = one.weft_json(&["ps"])?;
    ensure!(left.as_array().is_some_and(|all| all.len() == 1), "{left}");
    ensure!(left[0]["network"] == "shop", "that on weft goes first: {left}");
    Ok(())
}

#[test]
fn options_of_a_network_hold_on_every_host() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = (lab.host(0), lab.host(1));
    let create = ["network", "create", "--mtu", "1300", "--internal", "--isolated", "shop"];
    one.weft_json(&create)?;
    wait_state(two, "shop", "elsewhere")?;
    let first = attach(one, "first", &["--network", "shop"])?;
    let beside = attach(one, "beside", &["--network", "shop"])?;
    let far = attach(two, "far", &["--network", "shop"])?;
    for container in [&first, &far] {
        ensure!(container.mtu()? == 1_300);
    }
    let host: IpAddr = {
        let exposed = one.weft_json(&["expose", "--network", "shop"])?;
        let net = exposed["addresses"][0].as_str().unwrap_or_default().to_owned();
        net.split('/').next().unwrap_or_default().parse()?
    };
    wait_ping(&first, host, LIMIT)?;
    for other in [&beside, &far] {
        ensure!(!is_answered(&first, other.ipv4()?.into())?, "ports of this network are isolated");
    }
    for words in [
        &["expose", "--network", "shop", "--masquerade"][..],
        &["attach", "--network", "shop", "--default-route", &namespace(&first).to_string_lossy()],
    ] {
        let (code, text) = refusal(one, words)?;
        ensure!(code == Some(5) && text.contains("internal"), "{code:?} {text}");
    }
    one.weft_json(&["hide", "--network", "shop"])?;
    ensure!(!is_answered(&first, host)?);
    Ok(())
}

#[test]
fn devices_of_a_network_that_others_remove_come_back() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = (lab.host(0), lab.host(1));
    let made = one.weft_json(&["network", "create", "shop"])?;
    wait_state(two, "shop", "elsewhere")?;
    let first = attach(one, "first", &["--network", "shop"])?;
    let second = attach(two, "second", &["--network", "shop"])?;
    let there = second.ipv4()?.into();
    wait_ping(&first, there, LIMIT)?;
    let vni = made["vni"].as_u64().context("a VNI")?;
    for device in ["br", "tap", "ann"] {
        let name = format!("weft-{device}-{vni:06x}");
        try_wait_until(&format!("{name} to be there"), LIMIT, || {
            Ok(one.netns().exec(&["ip", "link", "show", &name])?.status.success())
        })?;
        one.netns().ip(&format!("link del {name}"))?.success()?;
        try_wait_until(&format!("{name} to come back"), LIMIT, || {
            let shown = one.netns().exec(&["ip", "link", "show", &name])?;
            Ok(shown.status.success() && is_answered(&first, there).unwrap_or(false))
        })?;
    }
    ensure!(network(one, "shop")?["state"] == "ready");
    Ok(())
}

#[test]
fn networks_that_clash_are_named_on_both_hosts_and_carry_nothing() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = (lab.host(0), lab.host(1));
    // Each creates it while it cannot know of the other's.
    two.netns().ip("link set eth0 down")?.success()?;
    one.weft_json(&["network", "create", "--subnet", "10.9.0.0/24", "shop"])?;
    two.weft_json(&["network", "create", "--subnet", "10.8.0.0/24", "shop"])?;
    two.netns().ip("link set eth0 up")?.success()?;
    for (host, other) in [(one, two), (two, one)] {
        try_wait_until("the clash to be named", LIMIT, || {
            let clashes = network(host, "shop").map(|it| it["clashes"].to_string());
            let named = |text: String| {
                ["10.9.0.0/24", "10.8.0.0/24", &other.nickname()].iter().all(|it| text.contains(it))
            };
            Ok(clashes.is_ok_and(named))
        })?;
    }
    let first = attach(one, "first", &["--network", "shop", "10.9.0.1/24"])?;
    let second = attach(two, "second", &["--network", "shop", "10.8.0.1/24"])?;
    second.exec(&["ip", "address", "add", "10.9.0.2/24", "dev", "weft0"])?.success()?;
    ensure!(!is_answered(&first, "10.9.0.2".parse()?)?, "a network that clashes is carried");
    // The remedy that the text names.
    two.weft_json(&["detach", &namespace(&second).to_string_lossy()])?;
    two.weft_json(&["network", "rm", "shop"])?;
    let second = attach(two, "third", &["--network", "shop"])?;
    wait_ping(&first, second.ipv4()?.into(), LIMIT).map(drop)
}

#[test]
fn names_are_known_on_their_network_alone() -> anyhow::Result<()> {
    require("dig", "bind9-dnsutils")?;
    let lab = Lab::pair(&[])?;
    let (one, two) = (lab.host(0), lab.host(1));
    one.weft_json(&["network", "create", "shop"])?;
    wait_state(two, "shop", "elsewhere")?;
    let far = attach(two, "far", &["--network", "shop"])?;
    let near = attach(one, "near", &["--network", "shop"])?;
    let other = attach(two, "other", &[])?;
    let exposed = |network: &str| -> anyhow::Result<String> {
        let exposed = one.weft_json(&["expose", "--network", network])?;
        let net = exposed["addresses"][0].as_str().unwrap_or_default().to_owned();
        Ok(net.split('/').next().unwrap_or_default().to_owned())
    };
    let (shop, weft) = (exposed("shop")?, exposed("weft")?);
    let asker = attach(one, "asker", &[])?;
    let short = |from: &Container, server: &str, words: &[&str]| -> anyhow::Result<String> {
        let server = format!("@{server}");
        let fixed = ["dig", "+short", "+time=2", "+tries=2", &server];
        Ok(from.exec(&[&fixed[..], words].concat())?.success()?.stdout.trim().to_owned())
    };
    let (name, of_far) = (far.netns().name().to_owned(), far.ipv4()?.to_string());
    for text in [name.clone(), format!("{name}.weft.local"), format!("{name}.shop.weft.local")] {
        try_wait_until(&format!("{text} on shop"), LIMIT, || {
            Ok(short(&near, &shop, &[&text]).is_ok_and(|it| it == of_far))
        })?;
    }
    let reverse = short(&near, &shop, &["-x", &of_far])?;
    ensure!(reverse == format!("{name}.shop.weft.local."), "{reverse}");
    let (elsewhere, of_other) = (other.netns().name().to_owned(), other.ipv4()?.to_string());
    try_wait_until("the name on weft", LIMIT, || {
        Ok(short(&asker, &weft, &[&elsewhere]).is_ok_and(|it| it == of_other))
    })?;
    for (from, server, text) in [
        (&near, &shop, &elsewhere),
        (&near, &shop, &format!("{elsewhere}.weft.local")),
        (&asker, &weft, &name),
        (&asker, &weft, &format!("{name}.shop.weft.local")),
    ] {
        let answer = short(from, server, &[text])?;
        ensure!(answer.is_empty(), "{text} is known on the other network: {answer}");
    }
    // The host itself sees all.
    let found = one.weft_json(&["dns-lookup", "--network", "shop", &name])?;
    ensure!(found[0]["address"] == of_far, "{found}");
    Ok(())
}
