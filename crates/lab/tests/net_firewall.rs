//! Hosts with firewall rules, and a slow `nft`: a rule that stops Weft is named with the rule to add, and
//! nothing waits for `nft`.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;
use weft_bench::sandbox::{Host, Sandbox, SandboxOptions, try_wait_until};
use weft_lab::net::{Lab, wait_ping};

/// Rules are read half a second after a change.
const LOOK: Duration = Duration::from_secs(20);

fn run(host: &Host, command: &str) -> anyhow::Result<()> {
    host.netns().exec(&command.split(' ').collect::<Vec<_>>())?.success()?;
    Ok(())
}

/// The rules in the way, as status tells them.
fn rules(host: &Host) -> Result<Vec<Value>, weft_bench::sandbox::SandboxError> {
    let status = host.weft_json(&["status"])?;
    Ok(status["firewall"].as_array().cloned().unwrap_or_default())
}

/// Waits until exactly this chain is named, and returns the suggested command to end it.
fn told(host: &Host, chain: &str) -> anyhow::Result<String> {
    let what = format!("a word of {chain}");
    let is_it = |rules: &[Value]| rules.len() == 1 && rules[0]["chain"] == chain;
    try_wait_until(&what, LOOK, || Ok(is_it(&rules(host)?)))?;
    let found = rules(host)?;
    let remedy = found[0]["remedy"].as_str().context("no remedy")?.to_owned();
    for words in [&["status"][..], &["doctor"]] {
        let text = host.weft(words)?.success()?.stdout;
        assert!(text.contains(chain) && text.contains(&remedy), "{words:?}: {text}");
    }
    Ok(remedy)
}

fn silent(host: &Host) -> anyhow::Result<()> {
    try_wait_until("no word of any rule", LOOK, || Ok(rules(host)?.is_empty()))?;
    Ok(())
}

#[test]
fn rules_that_stop_bridged_frames_are_named_and_the_rule_told_mends_it() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions { hosts: 1, ..SandboxOptions::default() })?;
    sandbox.launch_all(&["--port-mode", "bridge"])?;
    let host = sandbox.host(0);
    let (one, two) = (host.add_container("c1")?, host.add_container("c2")?);
    for switch in ["iptables", "ip6tables"] {
        // Fails where br_netfilter is not loaded.
        run(host, &format!("sysctl -qw net.bridge.bridge-nf-call-{switch}=1"))?;
    }
    silent(host)?;
    let limit = Duration::from_secs(20);
    for (family, hook, rule) in [
        (
            "inet",
            "filter hook forward priority 0 ; policy drop",
            "ct state established,related accept",
        ),
        ("ip", "nat hook postrouting priority 100", "masquerade"),
        (
            "inet",
            "filter hook prerouting priority -150",
            "meta nfproto ipv6 fib saddr . iif oif missing drop",
        ),
    ] {
        run(host, &format!("nft add table {family} labfw"))?;
        run(host, &format!("nft add chain {family} labfw judge {{ type {hook} ; }}"))?;
        run(host, &format!("nft add rule {family} labfw judge {rule}"))?;
        let remedy = told(host, &format!("{family} labfw judge"))?;
        host.netns().exec(&["sh", "-c", &remedy.replace('"', "\\\"")])?.success()?;
        silent(host)?;
        wait_ping(&one, two.ipv4()?.into(), limit)?;
        wait_ping(&one, two.ipv6()?.into(), limit)?;
        run(host, &format!("nft delete table {family} labfw"))?;
    }
    // Each network has its own bridge.
    host.weft(&["network", "create", "shop"])?.success()?;
    let hook = "{ type filter hook forward priority 0 ; policy drop ; }";
    run(host, "nft add table inet labfw")?;
    run(host, &format!("nft add chain inet labfw judge {hook}"))?;
    run(host, "nft add rule inet labfw judge iifname weft oifname weft accept")?;
    let remedy = told(host, "inet labfw judge")?;
    let shop = "iifname \"weft-br-8d9001\" oifname \"weft-br-8d9001\" accept";
    assert!(remedy.ends_with(shop), "{remedy}");
    host.netns().exec(&["sh", "-c", &remedy.replace('"', "\\\"")])?.success()?;
    silent(host)
}

#[test]
fn an_input_chain_that_drops_what_other_hosts_send_is_named() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions { hosts: 1, ..SandboxOptions::default() })?;
    sandbox.launch_all(&["--engine", "userspace"])?;
    let host = sandbox.host(0);
    run(host, "nft add table inet labfw")?;
    run(host, "nft add chain inet labfw in { type filter hook input priority 0 ; policy drop ; }")?;
    run(host, "nft add rule inet labfw in ct state established,related accept")?;
    let remedy = told(host, "inet labfw in")?;
    assert_eq!(remedy, "nft insert rule inet labfw in udp dport 6783-6786 accept");
    run(host, &remedy)?;
    silent(host)
}

/// An `nft` that does not end while a file is there.
struct Held {
    directory: PathBuf,
    path: String,
}

impl Held {
    fn new(sandbox: &Sandbox) -> anyhow::Result<Self> {
        let directory = sandbox.directory().join("held");
        std::fs::create_dir_all(&directory)?;
        let path = std::env::var("PATH")?;
        let program = directory.join("nft");
        let hold = directory.join("hold");
        let script = format!(
            "#!/bin/sh\nwhile [ -e {} ]; do sleep 0.05; done\nPATH={path}\nexec nft \"$@\"\n",
            hold.display()
        );
        std::fs::write(&program, script)?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
        let path = format!("{}:{path}", directory.display());
        Ok(Self { directory, path })
    }

    fn hold(&self, held: bool) -> anyhow::Result<()> {
        let file = self.directory.join("hold");
        if held {
            std::fs::write(file, "")?;
        } else {
            std::fs::remove_file(file)?;
        }
        Ok(())
    }
}

/// The engine of the only path in use.
fn engine(host: &Host) -> Result<String, weft_bench::sandbox::SandboxError> {
    let active = host.active_connections()?;
    let engine = active.first().and_then(|it| it["engine"].as_str());
    Ok(engine.unwrap_or_default().to_owned())
}

/// The kernel engine moves plain packets of hosts that trust each other, behind the guard, on every kernel with
/// VXLAN.
#[test]
fn nothing_waits_for_an_nft_that_hangs() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions { hosts: 2, ..SandboxOptions::default() })?;
    let (one, two) = (sandbox.host(0), sandbox.host(1));
    let held = Held::new(&sandbox)?;
    let password = sandbox.password_file();
    let password = password.to_string_lossy();
    let trusted = format!("{}/32,{}/32", one.ipv4(), two.ipv4());
    let common = ["--password-file", &password, "--trusted-subnets", &trusted];
    let first = one.ipv4().to_string();
    let environment = [("PATH", held.path.as_str())];
    // At the start the kernel engine waits for its guard, and says so; the rest does not.
    held.hold(true)?;
    one.start_daemon_with(&common, &environment)?;
    two.start_daemon(&[&common[..], &[&first]].concat())?;
    let lab = Lab { sandbox };
    lab.wait_active()?;
    let (one, two) = (lab.host(0), lab.host(1));
    let missing = one.weft_json(&["status"])?["engines_missing"]["kernel"].clone();
    assert_eq!(missing, "waiting for nft to set the guard");
    assert_eq!(engine(one)?, "userspace");
    held.hold(false)?;
    let on = |host: &Host, wanted: &str| {
        try_wait_until(&format!("a path of {wanted}"), Duration::from_secs(60), || {
            Ok(engine(host)? == wanted)
        })
    };
    on(one, "kernel")?;
    let (near, far) = lab.containers()?;
    wait_ping(&near, far.ipv4()?.into(), Duration::from_secs(20))?;
    // With the path in use blocked while nft hangs, the hosts take the other engine.
    held.hold(true)?;
    run(one, "nft add element inet weft-guard trusted4 { 192.0.2.77 }")?;
    one.weft_json(&["status"])?;
    run(two, "nft add table inet block")?;
    run(two, "nft add chain inet block in { type filter hook input priority -400 ; }")?;
    run(two, "nft add rule inet block in udp dport 6787 drop")?;
    on(one, "userspace")?;
    wait_ping(&near, far.ipv4()?.into(), Duration::from_secs(20))?;
    let report = one.weft_json(&["report"])?;
    let age = &report["kernel_counters"]["guard_age_ms"];
    assert!(age.as_u64().is_some_and(|age| age > 1_000), "counts of some time ago: {age}");
    assert_eq!(report["kernel_counters"]["guard_restored"], 0, "not known is not changed");
    held.hold(false)?;
    try_wait_until("the guard as it was", Duration::from_secs(60), || {
        Ok(one.weft_json(&["report"])?["kernel_counters"]["guard_restored"] == 1)
    })?;
    Ok(())
}
