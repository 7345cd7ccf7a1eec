//! The verbs of `weft dco` between two hosts, from a device's making to its end.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use weft_bench::sandbox::{Host, Running, Sandbox, SandboxOptions};

use crate::common::{self, DEVICE, LIMIT, fragments, hear, line, ping_all, write_key_file};

/// A device's default MTU, and the largest echo payload that fits into it, in bytes.
const MTU: u32 = 1_416;
const ECHO_MAX: &str = "1388";

/// Two hosts with a device each, and one key file for both.
struct Pair {
    sandbox: Sandbox,
    key_file: PathBuf,
}

impl Pair {
    /// The first host's device is the kernel's where there is one.
    fn new(modes: [&str; 2]) -> anyhow::Result<Self> {
        let options = SandboxOptions { hosts: 2, ..SandboxOptions::default() };
        let sandbox = Sandbox::new(&options)?;
        let key_file = sandbox.directory().join("static.key");
        write_key_file(&key_file, 7)?;
        let pair = Self { sandbox, key_file };
        for (at, mode) in modes.into_iter().enumerate() {
            let mut words = vec!["new-iface", DEVICE, "--mode", mode];
            words.extend((at == 1).then_some("--engine=userspace"));
            let shown = pair.dco(at, &words)?;
            anyhow::ensure!(shown["name"] == DEVICE && shown["ifindex"].is_u64(), "{shown}");
            let netns = pair.host(at).netns();
            netns.ip(&format!("link set {DEVICE} up"))?;
            netns.ip(&format!("address add 10.8.0.{}/24 dev {DEVICE}", at + 1))?;
        }
        Ok(pair)
    }

    fn host(&self, at: usize) -> &Host {
        self.sandbox.host(at)
    }

    fn dco(&self, at: usize, words: &[&str]) -> anyhow::Result<Value> {
        common::dco(self.host(at), words)
    }

    fn refused(&self, at: usize, words: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
        common::refused(self.host(at), words)
    }

    /// Makes each the other's peer 5 over UDP and IPv6, with a key.
    fn connect(&self, modes: [&str; 2]) -> anyhow::Result<()> {
        for (at, mode) in modes.into_iter().enumerate() {
            let (own, other) = (self.host(at).ipv6(), self.host(1 - at).ipv6());
            let (udp, remote) = (format!("[{own}]:1194"), format!("[{other}]:1194"));
            let vpn = format!("10.8.0.{}", 2 - at);
            let mut words = vec!["new-peer", DEVICE, "5", "--udp", &udp, "--remote", &remote];
            words.extend((mode == "mp").then_some(["--vpn-ipv4", &vpn]).into_iter().flatten());
            self.dco(at, &words)?;
            self.key(at, "primary", "0", &self.key_file)?;
        }
        Ok(())
    }

    fn key(&self, at: usize, slot: &str, key_id: &str, file: &Path) -> anyhow::Result<Value> {
        let side = ["server", "client"][at];
        let file = file.to_string_lossy();
        self.dco(at, &["new-key", DEVICE, "5", slot, key_id, "--side", side, "--key-file", &file])
    }

    fn listen(&self, at: usize) -> anyhow::Result<Running> {
        common::listen(self.host(at))
    }

    fn pings(&self, count: u32) -> anyhow::Result<()> {
        let count = count.to_string();
        ping_all(self.host(0), &["-c", &count, "-i", "0.2", "-W", "20", "10.8.0.2"])
    }

    /// The longest packets pass, and the system does not fragment the packets that they are sealed in.
    fn carries_its_mtu_uncut(&self) -> anyhow::Result<()> {
        for (at, other) in [(0, "10.8.0.2"), (1, "10.8.0.1")] {
            let netns = self.host(at).netns();
            let shown = netns.exec(&["ip", "-j", "link", "show", DEVICE])?.success()?.json()?;
            anyhow::ensure!(shown[0]["mtu"] == MTU, "{shown}");
            let before = [fragments(self.host(0))?, fragments(self.host(1))?];
            let words = ["-c", "3", "-i", "0.2", "-W", "20", "-M", "do", "-s", ECHO_MAX, other];
            ping_all(self.host(at), &words)?;
            let after = [fragments(self.host(0))?, fragments(self.host(1))?];
            anyhow::ensure!(before == after, "fragments: {before:?}, {after:?}");
        }
        Ok(())
    }

    fn end(&self) -> anyhow::Result<()> {
        for at in 0..2 {
            self.dco(at, &["del-iface", DEVICE])?;
        }
        Ok(())
    }
}

#[test]
fn a_device_is_driven_by_hand_from_its_making_to_its_end() -> anyhow::Result<()> {
    let modes = ["p2p", "mp"];
    let pair = Pair::new(modes)?;
    let mut told = pair.listen(0)?;
    let mut told_other = pair.listen(1)?;
    hear(pair.host(1), &mut told_other)?;
    pair.connect(modes)?;
    pair.pings(3)?;
    pair.carries_its_mtu_uncut()?;
    for at in 0..2 {
        let peers = pair.dco(at, &["get-peer", DEVICE])?;
        anyhow::ensure!(peers[0]["id"] == 5 && peers[0]["remote-port"] == 1194, "{peers}");
        anyhow::ensure!(peers[0]["vpn-rx-packets"].as_u64() >= Some(3), "{peers}");
    }
    // A new key for both, then both send with it.
    let next = pair.key_file.with_extension("next");
    write_key_file(&next, 99)?;
    for at in 0..2 {
        pair.key(at, "secondary", "1", &next)?;
    }
    for at in 0..2 {
        pair.dco(at, &["swap-keys", DEVICE, "5"])?;
        let key = pair.dco(at, &["get-key", DEVICE, "5", "primary"])?;
        anyhow::ensure!(key["key-id"] == 1 && key["cipher-alg"] == "aes-gcm", "{key}");
        pair.dco(at, &["del-key", DEVICE, "5", "secondary"])?;
    }
    pair.pings(3)?;
    // Beside the data a packet of the control channel, each way.
    for (from, told) in [(1, &mut told), (0, &mut told_other)] {
        let bytes = format!("380102030{from}");
        pair.dco(from, &["packet", DEVICE, "5", &bytes])?;
        let packet = line(told)?;
        anyhow::ensure!(packet["msg"]["bytes"] == bytes.as_str(), "{packet}");
    }
    pair.dco(0, &["del-peer", DEVICE, "5"])?;
    let deleted = line(&mut told)?;
    anyhow::ensure!(deleted["name"] == "peer-del-ntf", "{deleted}");
    anyhow::ensure!(
        deleted["msg"]["peer"] == json!({"del-reason": "userspace", "id": 5}),
        "{deleted}"
    );
    pair.end()?;
    // The listener is told that it is over.
    let (ended, more) = (told.wait(LIMIT)?, told.line(LIMIT).ok());
    anyhow::ensure!(ended.success() && more.is_none(), "{ended:?}: {more:?}");
    for at in 0..2 {
        let links = pair.host(at).netns().exec(&["ip", "link", "show", DEVICE])?;
        anyhow::ensure!(!links.status.success(), "the device is still there: {}", links.stdout);
    }
    Ok(())
}

#[test]
fn epochs_take_a_keys_place_where_both_ends_are_wefts_own() -> anyhow::Result<()> {
    let modes = ["p2p", "p2p"];
    let pair = Pair::new(modes)?;
    pair.connect(modes)?;
    let key_file = pair.key_file.with_extension("epochs");
    write_key_file(&key_file, 99)?;
    let key_file = key_file.to_string_lossy();
    let words = |side| {
        let key = ["new-key", DEVICE, "5", "primary", "2", "--epoch", "--cipher", "aes-128-gcm"];
        [&key[..], &["--side", side, "--key-file", &key_file]].concat()
    };
    pair.dco(1, &words("client"))?;
    let key = pair.dco(1, &["get-key", DEVICE, "5", "primary"])?;
    anyhow::ensure!(key["epoch"] == 1 && key["cipher-alg"] == "aes-gcm", "{key}");
    if pair.dco(0, &words("server")).is_err() {
        let kernels = pair.refused(0, &words("server"))?;
        anyhow::ensure!(kernels.0 == Some(2) && kernels.1.contains("no epochs"), "{kernels:?}");
        return pair.end();
    }
    pair.pings(3)?;
    pair.end()
}

/// Packet ids begin at 1 with each key that a device is given, so a key that comes again repeats nonces.
#[test]
fn a_host_seals_with_a_static_key_once() -> anyhow::Result<()> {
    let modes = ["p2p", "p2p"];
    let pair = Pair::new(modes)?;
    pair.connect(modes)?;
    let file = pair.key_file.to_string_lossy();
    let again = |slot, key_id| {
        ["new-key", DEVICE, "5", slot, key_id, "--side", "server", "--key-file", &file]
    };
    let is_refused = |words: &[&str]| -> anyhow::Result<()> {
        let refused = pair.refused(0, words)?;
        anyhow::ensure!(refused.0 == Some(5) && refused.1.contains("nonces"), "{refused:?}");
        Ok(())
    };
    is_refused(&again("primary", "0"))?;
    is_refused(&again("secondary", "1"))?;
    // Another device, another process: the host remembers.
    pair.dco(0, &["del-iface", DEVICE])?;
    pair.dco(0, &["new-iface", DEVICE])?;
    let (udp, remote) =
        (format!("{}:1194", pair.host(0).ipv4()), format!("{}:1194", pair.host(1).ipv4()));
    pair.dco(0, &["new-peer", DEVICE, "5", "--udp", &udp, "--remote", &remote])?;
    is_refused(&again("primary", "0"))?;
    // A key that the device refused is not used up, and the other half is another key.
    let next = pair.key_file.with_extension("next");
    write_key_file(&next, 99)?;
    let file = next.to_string_lossy();
    let key =
        |peer| ["new-key", DEVICE, peer, "primary", "0", "--side", "server", "--key-file", &file];
    let nobody = pair.refused(0, &key("77"))?;
    anyhow::ensure!(nobody.0 == Some(4), "{nobody:?}");
    pair.dco(0, &key("5"))?;
    pair.end()
}

#[test]
fn silence_ends_a_peer_and_is_told() -> anyhow::Result<()> {
    let modes = ["mp", "p2p"];
    let pair = Pair::new(modes)?;
    let mut told = pair.listen(0)?;
    pair.connect(modes)?;
    let times = ["--keepalive-interval", "1", "--keepalive-timeout", "3"];
    pair.dco(0, &[&["set-peer", DEVICE, "5"], &times[..]].concat())?;
    let expired = line(&mut told)?;
    anyhow::ensure!(expired["msg"]["peer"]["del-reason"] == "expired", "{expired}");
    pair.end()
}

#[test]
fn a_peer_is_sent_to_from_the_address_that_is_asked_for() -> anyhow::Result<()> {
    for sender in 0..2 {
        let pair = Pair::new(["p2p", "p2p"])?;
        let receiver = 1 - sender;
        let [first, other] = [sender, receiver].map(|at| pair.host(at).ipv4());
        let second = Ipv4Addr::from_bits(first.to_bits() ^ 0x40);
        pair.host(sender).netns().ip(&format!("address add {second}/24 dev eth0"))?;
        let to = |address: Ipv4Addr| format!("{address}:1194");
        let any = ["new-peer", DEVICE, "5", "--udp", "0.0.0.0:1194", "--remote"];
        let local = second.to_string();
        pair.dco(sender, &[&any[..], &[&to(other), "--local", &local]].concat())?;
        pair.dco(receiver, &[&any[..], &[&to(first)]].concat())?;
        for at in 0..2 {
            pair.key(at, "primary", "0", &pair.key_file)?;
        }
        let inside = format!("10.8.0.{}", receiver + 1);
        let netns = pair.host(sender).netns();
        netns.exec(&["ping", "-c", "3", "-i", "0.2", "-W", "20", &inside])?.success()?;
        let peers = pair.dco(receiver, &["get-peer", DEVICE, "5"])?;
        anyhow::ensure!(peers[0]["remote-ipv4"] == json!(second), "{sender}: {peers}");
        let peers = pair.dco(sender, &["get-peer", DEVICE, "5"])?;
        anyhow::ensure!(peers[0]["local-ipv4"] == json!(second), "{sender}: {peers}");
        pair.end()?;
    }
    Ok(())
}

#[test]
fn impossible_requests_are_refused_with_a_remedy() -> anyhow::Result<()> {
    let pair = Pair::new(["p2p", "p2p"])?;
    for at in 0..2 {
        let get = pair.refused(at, &["get-peer", DEVICE, "9"])?;
        anyhow::ensure!(get.0 == Some(4), "{get:?}");
        let remote = ["new-peer", DEVICE, "5", "--udp", "0.0.0.0:1194"];
        let nowhere = pair.refused(at, &remote)?;
        anyhow::ensure!(nowhere.0 == Some(2), "{nowhere:?}");
        let half =
            [&remote[..], &["--remote", "192.0.2.1:9", "--keepalive-interval", "3"]].concat();
        let half = pair.refused(at, &half)?;
        anyhow::ensure!(half.0 == Some(2) && half.1.contains("keepalive"), "{half:?}");
        let foreign = [&remote[..], &["--remote", "192.0.2.1:9", "--local", "fd00::1"]].concat();
        let foreign = pair.refused(at, &foreign)?;
        anyhow::ensure!(foreign.0 == Some(2) && foreign.1.contains("local"), "{foreign:?}");
        let again = pair.refused(at, &["new-iface", DEVICE])?;
        anyhow::ensure!(again.0 == Some(5) && again.1.contains("already"), "{again:?}");
    }
    let nobody = pair.refused(0, &["get-peer", "dco9"])?;
    anyhow::ensure!(nobody.0 == Some(4) && nobody.1.contains("new-iface dco9"), "{nobody:?}");
    let taken = pair.refused(0, &["new-iface", "eth0", "--engine", "userspace"])?;
    anyhow::ensure!(taken.0 == Some(5) && taken.1.contains("eth0"), "{taken:?}");
    // A device that cannot be as asked is not left behind.
    for engine in ["--engine=userspace", "--engine=kernel"] {
        let mtu = pair.refused(0, &["new-iface", "dco1", "--mtu", "20", engine])?;
        let lacking =
            engine.ends_with("kernel") && mtu.1.contains("not support data channel offload");
        anyhow::ensure!(lacking || (mtu.0 == Some(2) && mtu.1.contains("MTU of 20")), "{mtu:?}");
        let links = pair.host(0).netns().exec(&["ip", "link", "show", "dco1"])?;
        anyhow::ensure!(!links.status.success(), "the device is still there: {}", links.stdout);
    }
    let hex = pair.refused(0, &["packet", DEVICE, "5", "123"])?;
    anyhow::ensure!(hex.0 == Some(2) && hex.1.contains("hexadecimal"), "{hex:?}");
    pair.end()
}
