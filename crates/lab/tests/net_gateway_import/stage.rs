//! A host that is an OpenVPN server at first, then one of Weft.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Host, Netns, Output, Running, require, try_wait_until};
use weft_lab::net::Lab;
use weft_lab::net::gateway::{CONNECTED, LIMIT, Machine};

use crate::pki::{Keys, Pki, run};

/// A server's file as many look: `server.conf` of OpenVPN's samples, with what its users add.
pub(crate) const SERVER: &str = "port 1194
proto udp
dev tun
ca ca.crt
cert server.crt
key server.key  # secret
dh none
topology subnet
server 10.8.0.0 255.255.255.0
ifconfig-pool-persist ipp.txt 1
client-config-dir ccd
keepalive 1 6
data-ciphers AES-256-GCM:AES-128-GCM
auth SHA256
persist-key
persist-tun
status openvpn-status.log
verb 3
explicit-exit-notify 1
";

/// What is in all profiles.
const PROFILE: &str = "client
dev tun
nobind
persist-key
remote-cert-tls server
verify-x509-name server name
auth SHA256
connect-retry 1 2
verb 3
";

/// A host with the files of an OpenVPN server.
pub(crate) struct Stage {
    pub(crate) lab: Lab,
    pub(crate) pki: Pki,
    pub(crate) folder: PathBuf,
}

impl Stage {
    pub(crate) fn new(keys: Keys) -> anyhow::Result<Self> {
        Self::with_hosts(keys, 1)
    }

    /// Several hosts, the first with the files of an OpenVPN server.
    pub(crate) fn with_hosts(keys: Keys, count: usize) -> anyhow::Result<Self> {
        require("openvpn", "openvpn")?;
        require("openssl", "openssl")?;
        let lab = Lab::launched(count, &[])?;
        let folder = lab.sandbox.directory().join("openvpn");
        let pki = Pki::new(&folder, keys)?;
        std::fs::create_dir(folder.join("ccd"))?;
        for words in
            [&["--genkey", "secret", "ta.key"][..], &["--genkey", "tls-crypt-v2-server", "v2.key"]]
        {
            run(&folder, "openvpn", words)?;
        }
        Ok(Self { lab, pki, folder })
    }

    pub(crate) fn host(&self) -> &Host {
        self.lab.host(0)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> anyhow::Result<String> {
        let path = self.folder.join(name);
        std::fs::write(&path, text)?;
        Ok(path.to_string_lossy().into_owned())
    }

    /// The path of a file, as text.
    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }

    pub(crate) fn machine(&self, number: u8) -> anyhow::Result<Machine> {
        Machine::new(&self.lab, number)
    }

    /// Joins a namespace to the host by a network PREFIX.0/24, in which the host is 1 and the namespace 2.
    pub(crate) fn cable(&self, netns: &Netns, outer: &str, prefix: &str) -> anyhow::Result<()> {
        let (host, name) = (self.host().netns(), netns.name());
        host.ip(&format!("link add {outer} type veth peer name wan netns {name}"))?.success()?;
        for (netns, device, last) in [(host, outer, 1), (netns, "wan", 2)] {
            netns.ip(&format!("addr add {prefix}.{last}/24 dev {device}"))?.success()?;
            netns.ip(&format!("link set {device} up"))?.success()?;
        }
        netns.ip("link set lo up")?.success()?;
        Ok(())
    }

    /// Starts the stock server.
    pub(crate) fn stock(&self, config: &str) -> anyhow::Result<Running> {
        self.write("server.conf", config)?;
        let folder = self.folder.to_string_lossy().into_owned();
        let words = ["openvpn", "--cd", &folder, "--config", "server.conf", "--disable-dco"];
        let mut server = self.host().netns().spawn(&words)?;
        server.line_with(CONNECTED, LIMIT)?;
        Ok(server)
    }

    /// Issues a certificate to a client, and writes its profile.
    pub(crate) fn profile(&self, name: &str, more: &str) -> anyhow::Result<PathBuf> {
        if !self.folder.join(format!("{name}.crt")).exists() {
            self.pki.issue(name, name, "client", 825)?;
        }
        let mut text = format!("{PROFILE}{more}\n");
        for (block, file) in [
            ("ca", "ca.crt".to_owned()),
            ("cert", format!("{name}.crt")),
            ("key", format!("{name}.key")),
        ] {
            text += &format!("<{block}>\n{}</{block}>\n", self.pki.text(&file)?);
        }
        self.write(&format!("{name}.ovpn"), &text)?;
        Ok(self.folder.join(format!("{name}.ovpn")))
    }

    /// Runs `weft openvpn import` on a configuration.
    pub(crate) fn import(&self, config: &str, more: &[&str]) -> anyhow::Result<Output> {
        let path = self.write("server.conf", config)?;
        Ok(self.host().weft(&[&["openvpn", "import", &path], more].concat())?)
    }

    /// The same, with the report.
    pub(crate) fn imported(&self, config: &str, more: &[&str]) -> anyhow::Result<Value> {
        let report = self.import(config, &[&["--json"], more].concat())?.success()?.json()?;
        ensure!(report["imported"] == true, "{report:#}");
        Ok(report)
    }

    pub(crate) fn serve(&self, more: &[&str]) -> anyhow::Result<Value> {
        let served = self.host().weft_json(&[&["openvpn", "serve"], more].concat())?;
        ensure!(served["state"] == "serving", "{served}");
        Ok(served)
    }

    pub(crate) fn clients(&self) -> anyhow::Result<Vec<Value>> {
        let list = self.host().weft_json(&["status", "clients"])?;
        list.as_array().cloned().context("no list")
    }
}

pub(crate) fn pings(from: &Netns, to: &str) -> anyhow::Result<bool> {
    Ok(from.exec(&["ping", "-n", "-c", "1", "-W", "1", to])?.status.success())
}

pub(crate) fn wait_ping(from: &Netns, to: &str) -> anyhow::Result<()> {
    try_wait_until(&format!("an answer from {to}"), LIMIT, || {
        Ok(from.exec(&["ping", "-n", "-c", "1", "-W", "1", to])?.status.success())
    })?;
    Ok(())
}
