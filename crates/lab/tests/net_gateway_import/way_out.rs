//! A server that has its clients send everything through it: they go on to do so.

use anyhow::ensure;

use crate::pki::Keys;
use crate::stage::{SERVER, Stage};

#[test]
fn clients_go_on_to_reach_the_outside_through_the_host() -> anyhow::Result<()> {
    let stage = Stage::new(Keys::Ecdsa)?;
    let (host, outside) = (stage.host(), stage.lab.sandbox.add_netns("outside")?);
    // It has no route back to clients.
    stage.cable(&outside, "out0", "203.0.113")?;
    let config = format!("{SERVER}push \"redirect-gateway def1 bypass-dhcp\"\n");
    let set = |value: &str| host.netns().exec(&["sysctl", "-qw", value])?.success();
    set("net.ipv4.ip_forward=0")?;
    let refused = stage.import(&config, &[])?;
    ensure!(refused.status.code() == Some(5), "{refused:?}");
    ensure!(refused.stdout.contains("net.ipv4.ip_forward=1"), "{refused:?}");
    set("net.ipv4.ip_forward=1")?;
    stage.imported(&config, &[])?;
    let served = stage.serve(&[])?;
    ensure!(served["way_out"][0] == "ipv4", "{served}");
    let machine = stage.machine(1)?;
    machine.netns.ip("route add default via 198.51.1.1")?.success()?;
    let alice = machine.connect(&stage.profile("alice", "")?)?;
    ensure!(alice.pushed.contains("redirect-gateway def1 bypass-dhcp,"), "{}", alice.pushed);
    let way = machine.netns.ip("route get 203.0.113.2")?.success()?.stdout;
    ensure!(way.contains("dev tun0"), "{way}");
    let to: std::net::IpAddr = "203.0.113.2".parse()?;
    machine.wait_ping(to)?;
    Ok(())
}
