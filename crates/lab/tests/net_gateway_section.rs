//! A section of the configuration file has a host serve OpenVPN clients. The referee is Debian's `openvpn`.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Host, require, try_wait_until};
use weft_lab::net::Lab;
use weft_lab::net::gateway::{LIMIT, Machine, address_in, connected_again};

const SECTION: &str = "[openvpn]\nlisten = [\"udp:1194\"]\nremote = [\"vpn.example.net\"]\nping = 1\nping-restart = 4\n";

struct Configured {
    lab: Lab,
    file: PathBuf,
}

impl Configured {
    fn new() -> anyhow::Result<Self> {
        require("openvpn", "openvpn")?;
        let lab = Lab::pair(&[])?;
        let file = lab.sandbox.directory().join("weft.toml");
        Ok(Self { lab, file })
    }

    fn host(&self) -> &Host {
        self.lab.host(0)
    }

    /// Starts the daemon anew by a file with this text.
    fn start(&self, text: &str) -> anyhow::Result<()> {
        std::fs::write(&self.file, text)?;
        if self.host().daemon_pid().is_some() {
            self.host().stop_daemon()?;
        }
        Ok(self.host().start_daemon(&["--config", &self.file.to_string_lossy()])?)
    }

    fn gateway(&self) -> anyhow::Result<Value> {
        Ok(self.host().weft_json(&["status"])?["gateway"].clone())
    }

    fn wait(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
        let waited = try_wait_until(what, LIMIT, || Ok(self.gateway().is_ok_and(|it| is_so(&it))));
        waited.map(drop).with_context(|| format!("the gateway: {:?}", self.gateway()))
    }
}

/// It serves on this port, of all addresses.
fn serves(gateway: &Value, port: u16) -> bool {
    let places = [format!("udp:0.0.0.0:{port}"), format!("udp:[::]:{port}")];
    gateway["state"] == "serving" && gateway["listen"] == serde_json::json!(places)
}

/// How often a gateway has begun, by its word on the kernel of this lab.
fn begins(host: &Host) -> usize {
    host.log().matches("the kernel does not move packets of OpenVPN clients").count()
}

#[test]
fn a_section_of_the_configuration_file_has_a_host_serve() -> anyhow::Result<()> {
    let configured = Configured::new()?;
    let host = configured.host();
    configured.start(SECTION)?;
    configured.wait("the reason why it does not serve", |gateway| {
        let reason = gateway["reason"].as_str().unwrap_or_default();
        let is_named = reason.contains("[openvpn]") && reason.contains("weft ca init");
        gateway["state"] == "waiting" && is_named
    })?;
    let text = host.weft(&["status"])?.success()?.stdout;
    ensure!(text.contains("weft ca init"), "{text}");
    host.weft(&["ca", "init"])?.success()?;
    configured.wait("the gateway to serve", |it| serves(it, 1194) && it["reason"].is_null())?;

    let profile = host.weft(&["openvpn", "client", "alice"])?.success()?.stdout;
    ensure!(profile.contains("\nremote vpn.example.net 1194 udp"), "{profile}");
    let path = configured.lab.sandbox.directory().join("alice.ovpn");
    std::fs::write(&path, profile)?;
    let machine = Machine::new(&configured.lab, 1)?;
    let mut alice = machine.connect(&path)?;

    // The same file again: the gateway begins once, and the client comes back by itself.
    let begun = begins(host);
    configured.start(SECTION)?;
    let pushed = connected_again(&mut alice.process)?;
    ensure!(address_in(&pushed, "ifconfig ")? == alice.address, "{pushed}");
    ensure!(begins(host) == begun + 1, "{}", host.log());
    Ok(())
}

#[test]
fn the_file_is_followed_at_each_start_and_a_user_in_between() -> anyhow::Result<()> {
    let configured = Configured::new()?;
    let host = configured.host();
    host.weft(&["ca", "init"])?.success()?;
    configured.start(SECTION)?;
    configured.wait("the gateway to serve", |it| serves(it, 1194))?;
    configured.start(&SECTION.replace("1194", "1195"))?;
    configured.wait("the gateway to serve at the other port", |it| serves(it, 1195))?;

    host.weft(&["openvpn", "stop"])?.success()?;
    ensure!(configured.gateway()?.is_null(), "{}", configured.gateway()?);
    configured.start(SECTION)?;
    configured.wait("the gateway to serve again", |it| serves(it, 1194))?;
    host.weft(&["openvpn", "serve", "--listen", "1196"])?.success()?;
    ensure!(serves(&configured.gateway()?, 1196), "{}", configured.gateway()?);
    configured.start(SECTION)?;
    configured.wait("the gateway to serve as the file says", |it| serves(it, 1194))?;

    // What the section asked for ends with it, and what a user asked for stays.
    configured.start("")?;
    ensure!(configured.gateway()?.is_null(), "{}", configured.gateway()?);
    host.weft(&["openvpn", "serve", "--listen", "1196"])?.success()?;
    configured.start("")?;
    configured.wait("the gateway to serve as the user said", |it| serves(it, 1196))?;
    Ok(())
}

#[test]
fn a_wrong_section_is_named_before_anything_starts() -> anyhow::Result<()> {
    let configured = Configured::new()?;
    let host = configured.host();
    host.stop_daemon()?;
    for (text, word) in [
        ("[openvpn]\nlistne = [\"1194\"]\n", "listne"),
        ("[openvpn]\nlisten = [\"nowhere\"]\n", "nowhere"),
        ("[openvpn]\noidc-issuer = \"https://id.example.com\"\n", "oidc-client-id"),
    ] {
        std::fs::write(&configured.file, text)?;
        let file = configured.file.to_string_lossy();
        let refused = host.weft(&["launch", "--config", &file])?;
        ensure!(!refused.status.success() && refused.stderr.contains(word), "{text}: {refused:?}");
    }
    // What only the daemon can find out stands in its status.
    configured.start("[openvpn]\nlisten = [\"192.0.2.77:1194\"]\n")?;
    host.weft(&["ca", "init"])?.success()?;
    configured.wait("the reason", |it| {
        it["state"] == "waiting"
            && it["reason"].as_str().is_some_and(|it| it.contains("192.0.2.77"))
    })
}
