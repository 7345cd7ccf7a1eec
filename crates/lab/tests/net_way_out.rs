//! The way out of the network through an exposed host: `weft expose --masquerade` and default routes.

use std::time::Duration;

use anyhow::{Context, ensure};
use weft_bench::sandbox::{Host, Netns, Output, try_wait_until};
use weft_lab::net::Lab;

const LIMIT: Duration = Duration::from_secs(10);
const OUTSIDE: [&str; 2] = ["203.0.113.2", "2001:db8:7::2"];
const TABLE: [&str; 5] = ["nft", "list", "table", "inet", "weft-masquerade"];

/// A host outside the network that has no route back to containers. The first host reaches it directly.
fn outside(lab: &Lab) -> anyhow::Result<Netns> {
    let host = lab.host(0).netns();
    let outside = lab.sandbox.add_netns("outside")?;
    host.ip(&format!("link add out0 type veth peer name in0 netns {}", outside.name()))?;
    for (netns, device, number) in [(host, "out0", 1), (&outside, "in0", 2)] {
        netns.ip(&format!("addr add 203.0.113.{number}/24 dev {device}"))?;
        netns.ip(&format!("addr add 2001:db8:7::{number}/64 dev {device} nodad"))?;
        netns.ip(&format!("link set {device} up"))?;
    }
    Ok(outside)
}

fn forward(host: &Host, families: &[&str]) -> anyhow::Result<()> {
    for family in families {
        host.netns().exec(&["sysctl", "-qw", &format!("net.{family}=1")])?.success()?;
    }
    Ok(())
}

const IPV4: &str = "ipv4.ip_forward";
const IPV6: &str = "ipv6.conf.all.forwarding";

fn ping(from: &Netns, to: &str) -> anyhow::Result<bool> {
    Ok(from.exec(&["ping", "-n", "-c", "1", "-W", "1", to])?.status.success())
}

fn wait_reached(from: &Netns, to: &str) -> anyhow::Result<()> {
    try_wait_until(&format!("an answer from {to}"), LIMIT, || {
        Ok(ping(from, to).is_ok_and(|answered| answered))
    })?;
    Ok(())
}

fn refused(output: &Output, text: &str) -> anyhow::Result<()> {
    ensure!(!output.status.success() && output.stderr.contains(text), "{output:?}");
    Ok(())
}

fn table(host: &Host) -> anyhow::Result<Option<String>> {
    let output = host.netns().exec(&TABLE)?;
    Ok(output.status.success().then_some(output.stdout))
}

/// A container whose default route leads to its host, and its IPv4 address.
fn attach_with_route(lab: &Lab, host: &Host, name: &str) -> anyhow::Result<(Netns, String)> {
    let netns = lab.sandbox.add_netns(name)?;
    let attached = host.weft_json(&["attach", "--default-route", &netns.path()])?;
    let text = attached["addresses"][0].as_str().and_then(|it| it.split('/').next());
    let address = text.context("no address")?.to_owned();
    Ok((netns, address))
}

#[test]
fn containers_leave_the_network_with_the_hosts_address_while_it_masquerades() -> anyhow::Result<()>
{
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let outside = outside(&lab)?;
    let bare = lab.sandbox.add_netns("bare")?;
    let asked = host.weft(&["attach", "--default-route", &bare.path()])?;
    refused(&asked, "weft expose --masquerade")?;
    host.netns().exec(&["sysctl", "-qw", "net.ipv4.ip_forward=0"])?.success()?;
    refused(&host.weft(&["expose", "--masquerade"])?, "net.ipv4.ip_forward=1")?;
    ensure!(host.weft_json(&["ps"])?.as_array().is_some_and(Vec::is_empty), "something is left");

    forward(host, &[IPV4])?;
    let exposed = host.weft(&["expose", "--masquerade"])?.success()?;
    ensure!(exposed.stderr.contains("net.ipv6.conf.all.forwarding=1"), "{exposed:?}");
    forward(host, &[IPV6])?;
    let (web, address) = attach_with_route(&lab, host, "web")?;
    for to in OUTSIDE {
        wait_reached(&web, to)?;
    }
    // Others have no way to containers but by what the host publishes.
    outside.ip("route add 10.32.0.0/12 via 203.0.113.1")?;
    ensure!(!ping(&outside, &address)?, "a stranger reaches a container");
    let shown = table(host)?.context("no table")?;
    ensure!(shown.contains("counter refused") && !shown.contains("packets 0 bytes 0\n"), "{shown}");
    host.netns().exec(&["nft", "add table ip published"])?.success()?;
    let chain = "add chain ip published pre { type nat hook prerouting priority -100; }";
    host.netns().exec(&["nft", chain])?.success()?;
    let rule = format!("add rule ip published pre icmp type echo-request dnat to {address}");
    host.netns().exec(&["nft", &rule])?.success()?;
    ensure!(ping(&outside, "203.0.113.1")?, "what is published is not reached");
    host.netns().exec(&["nft", "delete table ip published"])?.success()?;

    // The container's route stands on the address.
    refused(&host.weft(&["hide"])?, "the default route of")?;
    host.weft(&["expose", "--no-masquerade"])?.success()?;
    try_wait_until("the translation to go", LIMIT, || {
        let shown = table(host).ok().flatten();
        Ok(shown.is_some_and(|it| it.contains("notrack") && !it.contains("nat hook")))
    })?;
    outside.ip("route del 10.32.0.0/12")?;
    for to in OUTSIDE {
        ensure!(!ping(&web, to)?, "{to} answers a foreign address");
    }
    host.weft(&["expose", "--masquerade"])?.success()?;
    wait_reached(&web, OUTSIDE[0])?;
    host.weft(&["detach", &web.path()])?.success()?;
    host.weft(&["hide"])?.success()?;
    try_wait_until("the rules to go", LIMIT, || Ok(table(host).is_ok_and(|it| it.is_none())))?;
    Ok(())
}

#[test]
fn the_way_out_survives_other_firewalls_restarts_and_ends_with_reset() -> anyhow::Result<()> {
    let lab = Lab::launched(1, &[])?;
    let host = lab.host(0);
    let _outside = outside(&lab)?;
    forward(host, &[IPV4, IPV6])?;
    host.weft(&["expose", "--masquerade"])?.success()?;
    let (web, _) = attach_with_route(&lab, host, "web")?;
    wait_reached(&web, OUTSIDE[0])?;
    // As Docker sets it.
    for iptables in ["iptables-nft", "ip6tables-nft"] {
        host.netns().exec(&[iptables, "-P", "FORWARD", "DROP"])?.success()?;
        host.netns().exec(&[iptables, "-N", "DOCKER-USER"])?.success()?;
        host.netns().exec(&[iptables, "-I", "FORWARD", "-j", "DOCKER-USER"])?.success()?;
    }
    for to in OUTSIDE {
        wait_reached(&web, to)?;
    }
    for damage in
        [&["nft", "flush", "ruleset"][..], &["nft", "delete", "table", "inet", "weft-masquerade"]]
    {
        host.netns().exec(damage)?.success()?;
        wait_reached(&web, OUTSIDE[0])?;
        try_wait_until("the rules to come back", LIMIT, || {
            Ok(table(host).is_ok_and(|it| it.is_some_and(|it| it.contains("masquerade"))))
        })?;
    }
    host.kill_daemon();
    wait_reached(&web, OUTSIDE[0])?;
    host.start_daemon(&[])?;
    web.ip("link del weft0")?;
    // The interface comes back with its route.
    for to in OUTSIDE {
        wait_reached(&web, to)?;
    }
    let routes = web.exec(&["ip", "route", "show", "default"])?.success()?.stdout;
    ensure!(routes.lines().count() == 1 && routes.contains("via 10.32"), "{routes}");

    let other = lab.sandbox.add_netns("other")?;
    other.ip("link add br0 type bridge")?;
    other.ip("addr add 198.51.100.2/24 dev br0")?;
    other.ip("link set br0 up")?;
    other.ip("route add default via 198.51.100.1")?;
    let asked = host.weft(&["attach", "--default-route", &other.path()])?;
    refused(&asked, "another IPv4 default route")?;
    ensure!(!other.exec(&["ip", "link", "show", "weft0"])?.status.success(), "half attached");

    host.weft(&["reset", "--force"])?.success()?;
    ensure!(table(host)?.is_none(), "reset leaves the table");
    let left = host.netns().exec(&["nft", "list", "ruleset"])?.success()?.stdout;
    ensure!(!left.contains("weft"), "reset leaves rules: {left}");
    Ok(())
}

/// A user of the container may lead its routes to the host, which forwards packets.
#[test]
fn an_exposed_host_passes_nothing_out_of_an_internal_network() -> anyhow::Result<()> {
    let lab = Lab::launched(1, &[])?;
    let host = lab.host(0);
    let outside = outside(&lab)?;
    forward(host, &[IPV4])?;
    host.weft(&["network", "create", "open"])?.success()?;
    host.weft(&["network", "create", "--internal", "shut"])?.success()?;
    let mut containers = Vec::new();
    for network in ["open", "shut"] {
        let address = |shown: &serde_json::Value| -> anyhow::Result<String> {
            let net = shown["addresses"][0].as_str().context("no address")?;
            Ok(net.split('/').next().unwrap_or(net).to_owned())
        };
        let gateway = address(&host.weft_json(&["expose", "--network", network])?)?;
        let netns = lab.sandbox.add_netns(network)?;
        let words = ["attach", "--network", network, &netns.path()];
        let own = address(&host.weft_json(&words)?)?;
        netns.ip(&format!("route add default via {gateway}"))?;
        outside.ip(&format!("route add {own}/32 via 203.0.113.1"))?;
        wait_reached(&netns, &gateway)?;
        containers.push((netns, own));
    }
    let [(open, of_open), (shut, of_shut)] = containers.as_slice() else { unreachable!() };
    // The host's own routes lead out of the one, and into it.
    wait_reached(open, OUTSIDE[0])?;
    wait_reached(&outside, of_open)?;
    try_wait_until("the rules of the other", LIMIT, || {
        Ok(table(host).is_ok_and(|it| it.is_some_and(|it| it.contains("chain forward"))))
    })?;
    for (from, to) in [(shut, OUTSIDE[0]), (&outside, of_shut), (shut, of_open), (open, of_shut)] {
        ensure!(!ping(from, to)?, "{to} is reached from or in an internal network");
    }
    ensure!(ping(open, OUTSIDE[0])?, "the other network has its way out no more");
    Ok(())
}

#[test]
fn each_network_has_its_own_way_out_and_none_leads_to_another() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let _outside = outside(&lab)?;
    forward(host, &[IPV4])?;
    host.weft_json(&["network", "create", "shop"])?;
    for network in ["weft", "shop"] {
        host.weft_json(&["expose", "--network", network, "--masquerade"])?;
    }
    let (web, of_web) = attach_with_route(&lab, host, "web")?;
    let shop = lab.sandbox.add_netns("shop")?;
    let words = ["attach", "--network", "shop", "--default-route", &shop.path()];
    let attached = host.weft_json(&words)?;
    let of_shop = attached["addresses"][0].as_str().and_then(|it| it.split('/').next());
    let of_shop = of_shop.context("no address")?.to_owned();
    for container in [&web, &shop] {
        wait_reached(container, OUTSIDE[0])?;
    }
    for (from, to) in [(&web, &of_shop), (&shop, &of_web)] {
        ensure!(!ping(from, to)?, "the host leads from one network to {to} on another");
    }
    let counted = table(host)?.context("no table")?;
    ensure!(!counted.contains("packets 0 bytes 0"), "nothing is counted: {counted}");
    // One goes without the other.
    host.weft_json(&["detach", "--network", "shop", &shop.path()])?;
    host.weft_json(&["hide", "--network", "shop"])?;
    ensure!(ping(&web, OUTSIDE[0])?);
    try_wait_until("the rules of shop to go", LIMIT, || {
        Ok(table(host).is_ok_and(|left| left.is_some_and(|it| !it.contains("weft-hst-"))))
    })?;
    Ok(())
}
