//! A key of the kernel's device that has done what its cipher is good for. The device knows no such limit: `weft
//! dco` reads its counters, deletes the key and tells of it.

use std::thread;
use std::time::Duration;

use serde_json::json;
use weft::sandbox::{Host, Sandbox, SandboxOptions};
use weft_crypto::ovpn::usage::AES_GCM_BLOCKS_MAX;

use crate::common::{DEVICE, dco, hear, line, listen, refused, write_key_file};

/// Blocks that a key may still do: more than a few pings cost, fewer than [`FLOOD`] does.
const LEFT_BLOCKS: u64 = 4_000;
const FLOOD: [&str; 7] = ["-f", "-c", "100", "-s", "1000", "-W", "20"];
/// The counters are read more than once meanwhile.
const READINGS: Duration = Duration::from_secs(5);
/// A device is made within this time.
const SOON: Duration = Duration::from_secs(10);
const PEER: &str = "5";

struct Pair {
    sandbox: Sandbox,
}

impl Pair {
    fn host(&self, at: usize) -> &Host {
        self.sandbox.host(at)
    }

    /// The same at both ends.
    fn both(&self, words: &[&str]) -> anyhow::Result<()> {
        for at in 0..2 {
            dco(self.host(at), words)?;
        }
        Ok(())
    }

    /// A key at both ends. Its id is 0 in the primary slot and 1 in the other.
    fn key(&self, slot: &str, cipher: &str) -> anyhow::Result<()> {
        let key_id = if slot == "primary" { "0" } else { "1" };
        let file = self.sandbox.directory().join("static.key");
        write_key_file(&file, 7)?;
        let file = file.to_string_lossy();
        for (at, side) in ["server", "client"].into_iter().enumerate() {
            let words = ["new-key", DEVICE, PEER, slot, key_id, "--side", side];
            let rest = ["--cipher", cipher, "--key-file", &file];
            dco(self.host(at), &[&words[..], &rest].concat())?;
        }
        Ok(())
    }

    /// Whether all of so many pings are answered.
    fn pings(&self, words: &[&str]) -> anyhow::Result<bool> {
        let words = [&["ping", "-q", "-n"], words, &["10.8.0.2"]].concat();
        let told = self.host(0).netns().exec(&words)?.stdout;
        Ok(told.contains(" 0% packet loss"))
    }
}

/// A device of the kernel, whose keys have done all but [`LEFT_BLOCKS`] when they are given to it, and one in
/// userspace.
fn pair() -> anyhow::Result<(Pair, weft::sandbox::Running)> {
    let sandbox = Sandbox::new(&SandboxOptions { hosts: 2, ..SandboxOptions::default() })?;
    let done = (AES_GCM_BLOCKS_MAX - LEFT_BLOCKS).to_string();
    let words = ["dco", "hold", DEVICE, "--mode", "mp", "--engine=kernel"];
    let mut holder = sandbox.host(0).spawn_weft_with(&words, &[("WEFT_DCO_KEY_BLOCKS", &done)])?;
    holder.line_with(r#"{"Ready":"#, SOON)?;
    dco(sandbox.host(1), &["new-iface", DEVICE, "--engine=userspace"])?;
    for at in 0..2 {
        let (host, other) = (sandbox.host(at), sandbox.host(1 - at));
        host.netns().ip(&format!("link set {DEVICE} addrgenmode none"))?;
        host.netns().ip(&format!("link set {DEVICE} up"))?;
        host.netns().ip(&format!("address add 10.8.0.{}/24 dev {DEVICE}", at + 1))?;
        let (udp, remote) = (format!("{}:1194", host.ipv4()), format!("{}:1194", other.ipv4()));
        let mut words = vec!["new-peer", DEVICE, PEER, "--udp", &udp, "--remote", &remote];
        words.extend(["--vpn-ipv4", "10.8.0.2"].iter().filter(|_| at == 0));
        dco(host, &words)?;
    }
    Ok((Pair { sandbox }, holder))
}

#[test]
fn a_used_up_key_of_the_kernels_device_is_deleted_and_told() -> anyhow::Result<()> {
    let (pair, _holder) = pair()?;
    let host = pair.host(0);
    let mut told = listen(host)?;
    hear(host, &mut told)?;
    pair.key("primary", "aes-256-gcm")?;
    // Of this one there is no limit.
    pair.key("secondary", "chacha20-poly1305")?;
    anyhow::ensure!(pair.pings(&["-c", "3", "-i", "0.2", "-W", "20"])?, "nothing is answered");
    thread::sleep(READINGS);
    let key = dco(host, &["get-key", DEVICE, PEER, "primary"])?;
    anyhow::ensure!(key["key-id"] == 0, "it is not used up yet: {key}");
    pair.pings(&FLOOD)?;
    let used_up = line(&mut told)?;
    let shown = dco(host, &["get-iface", DEVICE])?;
    let keyconf = json!({"peer-id": 5, "key-id": 0});
    let msg = json!({"ifindex": shown["ifindex"], "keyconf": keyconf});
    anyhow::ensure!(used_up == json!({"name": "key-swap-ntf", "msg": msg}), "{used_up}");
    let gone = refused(host, &["get-key", DEVICE, PEER, "primary"])?;
    anyhow::ensure!(gone.0 == Some(4), "the key is there still: {gone:?}");
    let other = dco(host, &["get-key", DEVICE, PEER, "secondary"])?;
    anyhow::ensure!(other["key-id"] == 1, "{other}");
    anyhow::ensure!(!pair.pings(&["-c", "1", "-W", "1"])?, "something is sealed still");
    // The other one takes its place, and has no end.
    pair.both(&["swap-keys", DEVICE, PEER])?;
    pair.pings(&FLOOD)?;
    thread::sleep(READINGS);
    anyhow::ensure!(pair.pings(&["-c", "3", "-i", "0.2", "-W", "20"])?, "nothing is answered");
    pair.both(&["del-iface", DEVICE])?;
    let more = line(&mut told)?;
    anyhow::ensure!(more["name"] == "peer-del-ntf", "one key was told of once: {more}");
    Ok(())
}
