//! Containers of Docker's that are on networks of Weft's driver, and that `weft attach` attaches to others.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, try_wait_until};
use weft_lab::docker::{Engine, IMAGE, Release, launch, launched, start_open, wait_events};
use weft_lab::net::{Lab, wait_ping};

const LIMIT: Duration = Duration::from_secs(20);
/// The daemon tries again every 30 s at the least.
const RETRY_LIMIT: Duration = Duration::from_secs(45);
const CREATE: [&str; 6] = ["network", "create", "-d", "weft", "--ipam-driver", "weft"];
const SHOP: [&str; 5] = ["--ipam-opt", "network=shop", "-o", "network=shop", "shop"];

weft_lab::with_each_docker! {
    a_container_of_docker_is_attached_to_other_networks_alone,
    a_network_of_docker_comes_before_one_of_attach_when_a_container_starts,
    attach_and_docker_give_a_container_no_overlapping_ranges,
}

/// The container `web` of an engine, and containers of the other host on two networks.
struct Stage {
    engine: Engine,
    /// On network `weft`.
    near: Container,
    /// On network `shop`.
    far: Container,
    lab: Lab,
}

impl Stage {
    fn new(release: Release) -> anyhow::Result<Self> {
        let lab = launched()?;
        for host in lab.sandbox.hosts() {
            host.weft(&["network", "create", "shop"])?.success()?;
        }
        let engine = start_open(release, &lab.sandbox, lab.host(0))?;
        try_wait_until("the network weft in Docker", LIMIT, || Ok(engine.inspect("weft").is_ok()))?;
        wait_events(lab.host(0), true)?;
        let near = lab.host(1).add_container("near")?;
        let far = lab.host(1).add_container_with("far", &["--network", "shop"])?;
        Ok(Self { engine, near, far, lab })
    }

    fn host(&self) -> &Host {
        self.lab.host(0)
    }

    /// Runs the container on a network of Docker's.
    fn run(&self, network: &str) -> anyhow::Result<()> {
        let run = ["run", "-d", "--network", network, "--stop-signal", "KILL", "--name", "web"];
        self.engine.run(&[&run[..], &[IMAGE, "sleep", "1000"]].concat())?;
        Ok(())
    }

    /// `weft attach` of the container fails with this text.
    fn refused(&self, network: &str, text: &str) -> anyhow::Result<()> {
        let attach = self.host().weft(&["attach", "--network", network, "web"])?;
        let said = format!("{}{}", attach.stdout, attach.stderr);
        ensure!(!attach.status.success() && said.contains(text), "{said}");
        Ok(())
    }

    /// Waits until a container of the other host reaches the container by Docker's network.
    fn reached_by_docker(&self) -> anyhow::Result<()> {
        let address = self.engine.address("web", "weft")?;
        wait_ping(&self.near, address.parse()?, LIMIT).map(drop)
    }

    /// Waits until one reaches it by `weft attach`.
    fn reached_by_attach(&self) -> anyhow::Result<()> {
        let address: IpAddr = self.wait_attached("attached", LIMIT)?;
        wait_ping(&self.far, address, LIMIT).map(drop)
    }

    /// Waits for a state of what `weft attach` has attached, and returns its first address.
    fn wait_attached(&self, state: &str, limit: Duration) -> anyhow::Result<IpAddr> {
        let mut shown = Value::Null;
        let waited = try_wait_until(&format!("the state {state}"), limit, || {
            shown = self.attachment().unwrap_or_default();
            Ok(shown["state"] == state)
        });
        waited.with_context(|| shown.to_string())?;
        let address = shown["addresses"][0].as_str().and_then(|it| it.split('/').next());
        Ok(address.with_context(|| format!("no address: {shown}"))?.parse()?)
    }

    fn attachment(&self) -> anyhow::Result<Value> {
        let all = self.host().weft_json(&["ps"])?;
        let mut all = all.as_array().into_iter().flatten();
        let found = all.find(|it| it["made_by"] == "attach");
        Ok(found.cloned().unwrap_or_default())
    }

    fn end(&self, networks: &[&str]) -> anyhow::Result<()> {
        self.engine.run(&["rm", "-f", "web"])?;
        self.engine.run(&[&["network", "rm"], networks].concat())?;
        Ok(())
    }
}

fn a_container_of_docker_is_attached_to_other_networks_alone(
    release: Release,
) -> anyhow::Result<()> {
    let stage = Stage::new(release)?;
    let Stage { engine, .. } = &stage;
    stage.run("weft")?;
    stage.refused("weft", "attached by docker: docker network disconnect first")?;
    stage.reached_by_docker()?;
    stage.host().weft(&["attach", "--network", "shop", "web"])?.success()?;
    stage.reached_by_docker()?;
    stage.reached_by_attach()?;
    let before = stage.attachment()?;

    // Each comes back after a restart; the attachment with its addresses.
    engine.run(&["restart", "-t", "0", "web"])?;
    stage.reached_by_docker()?;
    stage.reached_by_attach()?;
    ensure!(stage.attachment()?["addresses"] == before["addresses"], "{before}");

    // Docker is not to join the network that the container is attached to.
    engine.run(&[&CREATE[..], &SHOP].concat())?;
    let text = engine.refused(&["network", "connect", "shop", "web"])?;
    ensure!(text.contains("is on network shop already, attached by attach: weft detach"), "{text}");
    let twice = [&CREATE[..], &SHOP[..4], &["again"]].concat();
    engine.run(&twice)?;
    stage.reached_by_docker()?;
    stage.reached_by_attach()?;

    // Each goes without the other.
    engine.run(&["network", "disconnect", "weft", "web"])?;
    stage.reached_by_attach()?;
    engine.run(&["network", "connect", "weft", "web"])?;
    stage.host().weft(&["detach", "web"])?.success()?;
    stage.reached_by_docker()?;

    // Then Docker may join it, once.
    engine.run(&["network", "connect", "shop", "web"])?;
    stage.refused("shop", "attached by docker: docker network disconnect first")?;
    let text = engine.refused(&["network", "connect", "again", "web"])?;
    ensure!(text.contains("shop of Weft's already, by another network of Docker's"), "{text}");
    wait_ping(&stage.far, engine.address("web", "shop")?.parse()?, LIMIT)?;
    stage.end(&["shop", "again", "weft"])
}

fn a_network_of_docker_comes_before_one_of_attach_when_a_container_starts(
    release: Release,
) -> anyhow::Result<()> {
    let stage = Stage::new(release)?;
    let Stage { engine, .. } = &stage;
    stage.run("weft")?;
    stage.host().weft(&["attach", "--network", "shop", "web"])?.success()?;
    stage.reached_by_attach()?;
    let before = stage.attachment()?;
    engine.run(&[&CREATE[..], &SHOP].concat())?;
    // While the container is stopped, Docker asks no driver.
    engine.run(&["stop", "-t", "0", "web"])?;
    stage.wait_attached("gone", LIMIT)?;
    engine.run(&["network", "connect", "shop", "web"])?;
    engine.run(&["start", "web"])?;
    stage.wait_attached("failed", LIMIT)?;
    let reason = stage.attachment()?["reason"].as_str().unwrap_or_default().to_owned();
    ensure!(reason.contains("is on network shop already, attached by docker"), "{reason}");
    stage.reached_by_docker()?;
    wait_ping(&stage.far, engine.address("web", "shop")?.parse()?, LIMIT)?;

    // The next daemon does not attach it either.
    let host = stage.host();
    host.stop_daemon()?;
    launch(&stage.lab.sandbox, host)?;
    host.wait_connected(1, LIMIT)?;
    stage.wait_attached("failed", LIMIT)?;
    stage.reached_by_docker()?;

    // Once Docker has left it, the attachment is there again.
    engine.run(&["network", "disconnect", "shop", "web"])?;
    stage.wait_attached("attached", RETRY_LIMIT)?;
    stage.reached_by_attach()?;
    ensure!(stage.attachment()?["addresses"] == before["addresses"], "{before}");
    stage.host().weft(&["detach", "web"])?.success()?;
    stage.end(&["shop", "weft"])
}

fn attach_and_docker_give_a_container_no_overlapping_ranges(
    release: Release,
) -> anyhow::Result<()> {
    let stage = Stage::new(release)?;
    let Stage { engine, .. } = &stage;
    let whole = ["network", "create", "--subnet", "10.9.0.0/16", "whole"];
    stage.host().weft(&whole)?.success()?;
    let part = ["--subnet", "10.9.7.0/24", "--ipam-opt", "network=part", "-o", "network=part"];
    engine.run(&[&CREATE[..], &part, &["part"]].concat())?;
    stage.run("part")?;
    let said = "is on network part already, whose addresses overlap with those of network whole";
    stage.refused("whole", said)?;
    engine.run(&["network", "disconnect", "part", "web"])?;
    stage.host().weft(&["attach", "--network", "whole", "web"])?.success()?;
    let text = engine.refused(&["network", "connect", "part", "web"])?;
    let said = "is on network whole already, whose addresses overlap with those of network part";
    ensure!(text.contains(said), "{text}");
    stage.wait_attached("attached", LIMIT)?;
    stage.host().weft(&["detach", "web"])?.success()?;
    engine.run(&["network", "connect", "part", "web"])?;
    stage.end(&["part", "weft"])
}
