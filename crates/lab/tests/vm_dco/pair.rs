//! Two hosts, each with a device whose only peer is the other, and `weft dco` for both.

use std::path::PathBuf;

use serde_json::json;
use weft_bench::sandbox::{Host, Running, Sandbox, SandboxOptions};

use crate::common::{DEVICE, REUSE, dco, line, refused, write_key_file};

/// The peer's id at both.
pub(crate) const PEER: &str = "5";
const KEY_SEED: u8 = 7;

pub(crate) struct Pair {
    sandbox: Sandbox,
}

impl Pair {
    /// The hosts, without devices.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let options = SandboxOptions { hosts: 2, ..SandboxOptions::default() };
        Ok(Self { sandbox: Sandbox::new(&options)? })
    }

    pub(crate) fn host(&self, at: usize) -> &Host {
        self.sandbox.host(at)
    }

    /// The second gets a device in userspace, and each is the other's peer; the first has a device in mode mp.
    pub(crate) fn meet(&self) -> anyhow::Result<()> {
        dco(self.host(1), &["new-iface", DEVICE, "--engine=userspace"])?;
        for at in 0..2 {
            let (host, other) = (self.host(at), self.host(1 - at));
            host.netns().ip(&format!("link set {DEVICE} addrgenmode none"))?;
            host.netns().ip(&format!("link set {DEVICE} up"))?;
            host.netns().ip(&format!("address add 10.8.0.{}/24 dev {DEVICE}", at + 1))?;
            let (udp, remote) = (format!("{}:1194", host.ipv4()), format!("{}:1194", other.ipv4()));
            let mut words = vec!["new-peer", DEVICE, PEER, "--udp", &udp, "--remote", &remote];
            words.extend(["--vpn-ipv4", "10.8.0.2"].iter().filter(|_| at == 0));
            dco(host, &words)?;
        }
        Ok(())
    }

    /// The same at both ends.
    pub(crate) fn both(&self, words: &[&str]) -> anyhow::Result<()> {
        for at in 0..2 {
            dco(self.host(at), words)?;
        }
        Ok(())
    }

    /// A key at both ends. Its id is 0 in the primary slot and 1 in the other.
    pub(crate) fn key(&self, slot: &str, cipher: &str) -> anyhow::Result<()> {
        let key_id = if slot == "primary" { "0" } else { "1" };
        write_key_file(&self.key_file(), KEY_SEED)?;
        let file = self.key_file();
        let file = file.to_string_lossy();
        for (at, side) in ["server", "client"].into_iter().enumerate() {
            let words = ["new-key", DEVICE, PEER, slot, key_id, "--side", side];
            let rest = ["--cipher", cipher, REUSE, "--key-file", &file];
            dco(self.host(at), &[&words[..], &rest].concat())?;
        }
        Ok(())
    }

    /// The source of all keys; the first host is the server.
    pub(crate) fn key_file(&self) -> PathBuf {
        self.sandbox.directory().join("static.key")
    }

    /// Whether all pings are answered.
    pub(crate) fn pings(&self, words: &[&str]) -> anyhow::Result<bool> {
        let words = [&["ping", "-q", "-n"], words, &["10.8.0.2"]].concat();
        let told = self.host(0).netns().exec(&words)?.stdout;
        Ok(told.contains(" 0% packet loss"))
    }

    /// The first host next learns that its primary key is used up; its slot is empty, the other host still has
    /// the key.
    pub(crate) fn primary_is_told_and_gone(&self, told: &mut Running) -> anyhow::Result<()> {
        let (host, used_up) = (self.host(0), line(told)?);
        let shown = dco(host, &["get-iface", DEVICE])?;
        let keyconf = json!({"peer-id": 5, "key-id": 0});
        let msg = json!({"ifindex": shown["ifindex"], "keyconf": keyconf});
        anyhow::ensure!(used_up == json!({"name": "key-swap-ntf", "msg": msg}), "{used_up}");
        let gone = refused(host, &["get-key", DEVICE, PEER, "primary"])?;
        anyhow::ensure!(gone.0 == Some(4), "the key is there still: {gone:?}");
        let other = dco(host, &["get-key", DEVICE, PEER, "secondary"])?;
        anyhow::ensure!(other["key-id"] == 1, "{other}");
        Ok(())
    }
}
