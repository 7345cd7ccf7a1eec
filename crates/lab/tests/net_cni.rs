//! The CNI plugin, run by a real containerd on two hosts, and by hand for what no runtime does.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use weft_bench::sandbox::{Host, try_wait_until};
use weft_lab::cni::Plugin;
use weft_lab::containerd::Containerd;
use weft_lab::net::Lab;

const LIMIT: Duration = Duration::from_secs(20);

/// Installs the plugin for a containerd.
fn set_up(containerd: &Containerd, host: &Host) -> anyhow::Result<Value> {
    let binary = host.binary().to_string_lossy().into_owned();
    let runtime = host.runtime_directory().to_string_lossy().into_owned();
    let weft = [binary.as_str(), "--runtime-dir", &runtime, "setup-cni", "--json"];
    Ok(serde_json::from_str(&containerd.exec(&weft)?)?)
}

fn attached(host: &Host) -> anyhow::Result<Vec<Value>> {
    Ok(host.weft_json(&["ps"])?.as_array().cloned().unwrap_or_default())
}

fn wait_detached(host: &Host) -> anyhow::Result<()> {
    try_wait_until("no attachment to be left", LIMIT, || {
        Ok(attached(host).is_ok_and(|attached| attached.is_empty()))
    })?;
    Ok(())
}

#[test]
fn containers_of_two_containerds_reach_each_other() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let mut one = Containerd::start(&lab.sandbox, lab.host(0))?;
    let two = Containerd::start(&lab.sandbox, lab.host(1))?;
    for (containerd, host) in [(&one, lab.host(0)), (&two, lab.host(1))] {
        let report = set_up(containerd, host)?;
        ensure!(report["changed"].as_array().is_some_and(|it| it.len() == 2), "{report}");
        let again = set_up(containerd, host)?;
        ensure!(again["changed"].as_array().is_some_and(Vec::is_empty), "{again}");
    }
    one.start_container("web", &["/bin/sleep", "600"])?;
    let listed = attached(lab.host(0))?;
    let web = listed.first().context("web is not attached")?;
    ensure!(web["made_by"] == "cni" && web["interface"] == "eth0", "{web}");
    let address = web["addresses"][0].as_str().and_then(|it| it.split('/').next());
    let address = address.context("no address")?.to_owned();
    try_wait_until("the containers to reach each other", LIMIT, || {
        Ok(two.run("ping", &["/bin/ping", "-c", "1", "-W", "1", &address]).is_ok())
    })?;
    // DEL has come.
    wait_detached(lab.host(1))?;
    let link = two.run("mtu", &["/bin/cat", "/sys/class/net/eth0/mtu"])?;
    ensure!(web["mtu"] == link.parse::<u64>()?, "{web} {link}");

    // The daemon restarts under a running container.
    lab.host(0).kill_daemon();
    let password = lab.password_file().display().to_string();
    lab.host(0).start_daemon(&["--password-file", &password])?;
    lab.wait_active()?;
    try_wait_until("the containers to reach each other again", LIMIT, || {
        Ok(two.run("ping", &["/bin/ping", "-c", "1", "-W", "1", &address]).is_ok())
    })?;

    // No DEL comes for a container that ctr has started, but its namespace ends.
    one.end_container("web")?;
    wait_detached(lab.host(0))?;
    for (containerd, host) in [(&one, lab.host(0)), (&two, lab.host(1))] {
        let binary = host.binary().to_string_lossy().into_owned();
        let text = containerd.exec(&[&binary, "setup-cni", "--remove"])?;
        ensure!(text.lines().count() == 2, "{text}");
        containerd.exec(&["sh", "-c", "! ls /etc/cni/net.d/*weft* /opt/cni/bin/weft-cni"])?;
    }
    Ok(())
}

#[test]
fn the_plugin_keeps_the_specifications_promises() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let plugin = Plugin::of(&lab.sandbox, host)?;
    let namespace = lab.sandbox.add_netns("cni")?;
    plugin.good("STATUS", "x", None)?;
    let added = plugin.good("ADD", "a", Some(&namespace))?;
    let eth0 = &added["interfaces"][1];
    ensure!(eth0["name"] == "eth0" && eth0["sandbox"] == namespace.path(), "{added}");
    ensure!(added["interfaces"][0]["name"].as_str().is_some_and(|it| it.starts_with("weftv")));
    ensure!(added["ips"][0]["interface"] == 1, "{added}");
    let previous = json!({ "prevResult": added });
    plugin.good_with("CHECK", "a", Some(&namespace), &previous)?;
    // An address that is gone, and an interface that is.
    let address = added["ips"][0]["address"].as_str().context("no address")?.to_owned();
    let del = format!("address del {address} dev eth0");
    namespace.ip(&del)?.success()?;
    try_wait_until("weft to restore the address", LIMIT, || {
        Ok(plugin.good_with("CHECK", "a", Some(&namespace), &previous).is_ok())
    })?;
    let (code, answer) = plugin.run("ADD", "b", Some(&namespace), &json!({}))?;
    ensure!(code != 0 && answer["code"] == 101, "a second eth0: {answer}");
    ensure!(attached(host)?.len() == 1, "the failed ADD left something");
    // DEL: twice, for an unknown container, and without a namespace.
    for (container, namespace) in [("a", Some(&namespace)), ("a", Some(&namespace)), ("z", None)] {
        plugin.good("DEL", container, namespace)?;
    }
    ensure!(attached(host)?.is_empty());
    ensure!(!namespace.exec(&["ip", "link", "show", "eth0"])?.status.success());

    // Fixed addresses.
    let wish = json!({ "runtimeConfig": {
        "ips": ["10.33.0.7"], "mac": "02:00:00:00:33:07", "aliases": ["shop", "not a name"],
    } });
    let added = plugin.good_with("ADD", "c", Some(&namespace), &wish)?;
    ensure!(added["ips"][0]["address"] == "10.33.0.7/12", "{added}");
    ensure!(added["interfaces"][1]["mac"] == "02:00:00:00:33:07", "{added}");
    try_wait_until("its alias in DNS", LIMIT, || {
        let named = host.weft_json(&["dns-lookup", "shop"]);
        Ok(named.is_ok_and(|named| named[0]["address"] == "10.33.0.7"))
    })?;
    // GC drops what the runtime does not list, and without a list nothing.
    plugin.good("GC", "x", None)?;
    ensure!(attached(host)?.len() == 1);
    let valid = json!({ "cni.dev/valid-attachments": [{ "containerID": "c", "ifname": "eth0" }] });
    plugin.good_with("GC", "x", None, &valid)?;
    ensure!(attached(host)?.len() == 1);
    plugin.good_with("GC", "x", None, &json!({ "cni.dev/valid-attachments": [] }))?;
    ensure!(attached(host)?.is_empty());
    Ok(())
}

#[test]
fn a_container_leaves_the_network_through_its_host() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let plugin = Plugin::of(&lab.sandbox, host)?;
    let namespace = lab.sandbox.add_netns("cni")?;
    host.netns().exec(&["sysctl", "-qw", "net.ipv4.ip_forward=0"])?.success()?;
    let wish = json!({ "isDefaultGateway": true, "ipMasq": true });
    let (code, answer) = plugin.run("ADD", "a", Some(&namespace), &wish)?;
    let text = answer.to_string();
    ensure!(code != 0 && text.contains("net.ipv4.ip_forward=1"), "{text}");
    ensure!(attached(host)?.is_empty(), "the failed ADD left something");
    host.netns().exec(&["sysctl", "-qw", "net.ipv4.ip_forward=1"])?.success()?;
    let added = plugin.good_with("ADD", "a", Some(&namespace), &wish)?;
    let exposed = attached(host)?.into_iter().find(|it| it["made_by"] == "expose");
    let exposed = exposed.context("the host is not exposed")?;
    let gateway = exposed["addresses"][0].as_str().and_then(|it| it.split('/').next());
    ensure!(added["ips"][0]["gateway"].as_str() == gateway, "{added} {exposed}");
    let route = json!({ "dst": "0.0.0.0/0", "gw": gateway });
    ensure!(added["routes"] == json!([route]), "{added}");
    ensure!(exposed["masquerade"] == true, "{exposed}");
    let dns = &added["dns"];
    ensure!(dns["nameservers"][0].as_str() == gateway && dns["domain"] == "weft.local", "{added}");
    // The other host's own address has no way back to containers.
    let other = lab.host(1).ipv4().to_string();
    try_wait_until("the container to reach the underlay", LIMIT, || {
        let ping = ["ping", "-n", "-c", "1", "-W", "1", &other];
        Ok(namespace.exec(&ping).is_ok_and(|it| it.status.success()))
    })?;
    plugin.good_with("CHECK", "a", Some(&namespace), &json!({ "prevResult": added }))?;
    plugin.good("DEL", "a", Some(&namespace))?;
    host.weft(&["hide"])?.success()?;
    wait_detached(host)
}

#[test]
fn a_del_succeeds_while_the_daemon_is_down_and_is_made_up_for() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let plugin = Plugin::of(&lab.sandbox, host)?;
    let namespace = lab.sandbox.add_netns("cni")?;
    plugin.good("ADD", "a", Some(&namespace))?;
    host.stop_daemon()?;
    let (code, answer) = plugin.run("ADD", "b", Some(&namespace), &json!({}))?;
    ensure!(code != 0 && answer["code"] == 11, "{answer}");
    plugin.good("DEL", "a", Some(&namespace))?;
    ensure!(!namespace.exec(&["ip", "link", "show", "eth0"])?.status.success(), "eth0 is left");
    let (code, answer) = plugin.run("STATUS", "x", None, &json!({}))?;
    ensure!(code != 0 && answer["code"] == 50, "{answer}");
    let password = lab.password_file().display().to_string();
    host.start_daemon(&["--password-file", &password])?;
    wait_detached(host)?;
    let left = std::fs::read_dir(host.runtime_directory().join("cni-deleted"))?.count();
    ensure!(left == 0, "{left} tombstones are left");
    plugin.good("ADD", "a", Some(&namespace))?;
    plugin.good("DEL", "a", Some(&namespace))?;
    Ok(())
}

#[test]
fn a_configuration_names_its_network() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let plugin = Plugin::of(&lab.sandbox, host)?;
    let namespace = lab.sandbox.add_netns("cni")?;
    let shop = json!({ "network": "shop" });
    let (code, answer) = plugin.run("ADD", "a", Some(&namespace), &shop)?;
    ensure!(code != 0 && answer.to_string().contains("weft network create shop"), "{answer}");
    let made = lab.host(1).weft_json(&["network", "create", "shop"])?;
    try_wait_until("the network to be known", LIMIT, || {
        Ok(plugin.run("STATUS", "x", None, &shop).is_ok_and(|(code, _)| code == 0))
    })?;
    let added = plugin.good_with("ADD", "a", Some(&namespace), &shop)?;
    let range = made["subnet"].as_str().context("a range")?;
    let prefix = range.split('/').next().context("a range")?.trim_end_matches("0.0");
    let address = added["ips"][0]["address"].as_str().context("no address")?.to_owned();
    ensure!(address.starts_with(prefix), "{address} is not in {range}");
    let far = lab.host(1).add_container_with("far", &["--network", "shop"])?;
    let to = address.split('/').next().context("an address")?.parse()?;
    weft_lab::net::wait_ping(&far, to, LIMIT)?;
    plugin.good_with("DEL", "a", Some(&namespace), &shop)?;
    wait_detached(host)
}
