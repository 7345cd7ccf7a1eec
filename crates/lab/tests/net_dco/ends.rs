//! How devices begin and end: in each way nothing is left over, and listeners are notified.

use std::collections::BTreeSet;
use std::fs;
use std::net::Ipv4Addr;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::json;
use weft::dco::DeviceCall;
use weft_api::Client;
use weft_bench::sandbox::{Host, Running, Sandbox, SandboxOptions, wait_until};

use crate::common::{
    DEVICE, LIMIT, NOWHERE, dco, engines, has_device, hear, line, listen, refused,
};

/// This many notices at once fit into the listener's queue of lines. The kernel's buffer for a slow reader
/// holds them too; `vm_ovpn` tests lost ones.
const CROWD: u32 = 3_500;
/// How long each of the crowd may be silent: long enough for all of them to be made.
const CROWD_TIMEOUT_S: u64 = 10;
/// Their addresses inside begin here.
const CROWD_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 0);

/// Starts the process that holds a device in mode mp, so that its process id is known.
fn hold(host: &Host, engine: &str) -> anyhow::Result<Running> {
    let mut holder = host.spawn_weft(&["dco", "hold", DEVICE, "--mode", "mp", engine])?;
    holder.line_with(r#"{"Ready":"#, LIMIT)?;
    Ok(holder)
}

#[test]
fn a_device_is_removed_whatever_it_is_called_by_now() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    let tuntap = |what| host.netns().exec(&["ip", "tuntap", what, "dev", DEVICE, "mode", "tun"]);
    for engine in engines(host)? {
        dco(host, &["new-iface", DEVICE, engine])?;
        host.netns().ip(&format!("link set {DEVICE} name renamed0"))?;
        // A foreign device, of the same kind as one in userspace.
        tuntap("add")?.success()?;
        dco(host, &["del-iface", DEVICE])?;
        anyhow::ensure!(!has_device(host, "renamed0")?, "{engine}: it is still there");
        anyhow::ensure!(has_device(host, DEVICE)?, "{engine}: somebody else's is removed");
        tuntap("del")?.success()?;
    }
    Ok(())
}

/// The descriptors of a process, once it opens no more of them.
fn descriptors(pid: Pid) -> anyhow::Result<BTreeSet<u64>> {
    let look = || -> anyhow::Result<BTreeSet<u64>> {
        let all = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()))?;
        Ok(all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
    };
    let mut last = look()?;
    loop {
        thread::sleep(Duration::from_millis(500));
        let now = look()?;
        if now == last {
            return Ok(now);
        }
        last = now;
    }
}

/// Leaves a process room for one descriptor more than it has. Returns its limit before.
fn leave_one_descriptor(pid: Pid) -> anyhow::Result<Rlimit> {
    let taken = descriptors(pid)?;
    let free = (0..).find(|number| !taken.contains(number)).unwrap_or_default();
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit { current: Some(free + 1), maximum };
    Ok(prlimit(Some(pid), Resource::Nofile, limit)?)
}

#[test]
fn a_device_in_userspace_has_the_fastest_libraries() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let words = ["dco", "hold", DEVICE, "--engine=userspace"];
    let mut holder = sandbox.host(0).spawn_weft(&words)?;
    for cipher in ["aes-256-gcm", "chacha20-poly1305"] {
        let line = holder.line_with("chose the fastest library", LIMIT)?;
        anyhow::ensure!(line.contains(cipher), "{line}");
    }
    Ok(())
}

#[test]
fn a_device_that_cannot_be_removed_is_held_on() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in engines(host)? {
        let mut holder = hold(host, engine)?;
        let pid = Pid::from_raw(holder.pid().cast_signed());
        let pid = pid.ok_or_else(|| anyhow::anyhow!("no process id"))?;
        // For the request, and none for a socket to remove the device by.
        let before = leave_one_descriptor(pid)?;
        let (code, said) = refused(host, &["del-iface", DEVICE])?;
        anyhow::ensure!(code == Some(1) && said.contains("cannot remove"), "{engine}: {said}");
        let shown = dco(host, &["get-iface", DEVICE])?;
        anyhow::ensure!(shown["name"] == DEVICE && has_device(host, DEVICE)?, "{engine}: {shown}");
        holder.signal(Signal::TERM);
        // Nor does it end by a signal.
        holder.line_with("cannot stop", LIMIT)?;
        let shown = dco(host, &["get-iface", DEVICE])?;
        anyhow::ensure!(has_device(host, DEVICE)?, "{engine}: {shown}");
        prlimit(Some(pid), Resource::Nofile, before)?;
        dco(host, &["del-iface", DEVICE])?;
        anyhow::ensure!(holder.wait(LIMIT)?.success(), "{engine}: it has not ended well");
        anyhow::ensure!(!has_device(host, DEVICE)?, "{engine}: the device is left over");
    }
    Ok(())
}

#[test]
fn a_start_that_fails_leaves_no_device() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    let directory = host.runtime_directory().join("dco").join(DEVICE);
    for engine in engines(host)? {
        // A file is in the place of its directory.
        fs::write(&directory, "")?;
        let (code, said) = refused(host, &["new-iface", DEVICE, engine])?;
        anyhow::ensure!(code == Some(1) && said.contains(DEVICE), "{engine}: {said}");
        anyhow::ensure!(!has_device(host, DEVICE)?, "{engine}: the device is left over");
        fs::remove_file(&directory)?;
        // A directory is in the place of its socket.
        fs::create_dir_all(directory.join("weft.sock"))?;
        let (code, said) = refused(host, &["new-iface", DEVICE, engine])?;
        anyhow::ensure!(code == Some(1) && said.contains("cannot listen"), "{engine}: {said}");
        anyhow::ensure!(!has_device(host, DEVICE)?, "{engine}: the device is left over");
        fs::remove_dir_all(&directory)?;
    }
    Ok(())
}

#[test]
fn an_end_is_told_of_every_peer_and_leaves_nothing() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in engines(host)? {
        for signal in [None, Some(Signal::TERM), Some(Signal::INT)] {
            let mut holder = hold(host, engine)?;
            let mut told = listen(host)?;
            hear(host, &mut told)?;
            for peer in ["1", "2", "3"] {
                let vpn = format!("10.8.0.{peer}");
                let words = ["new-peer", DEVICE, peer, "--vpn-ipv4", &vpn];
                let carrier = ["--udp", "127.0.0.1:1194", "--remote", NOWHERE];
                dco(host, &[&words[..], &carrier].concat())?;
            }
            match signal {
                Some(signal) => holder.signal(signal),
                None => drop(dco(host, &["del-iface", DEVICE])?),
            }
            let ended = holder.wait(LIMIT)?;
            anyhow::ensure!(ended.success(), "{engine}, {signal:?}: {ended}");
            let mut gone = BTreeSet::new();
            for _ in 0..3 {
                let line = line(&mut told)?;
                let peer = &line["msg"]["peer"];
                anyhow::ensure!(peer["del-reason"] == "teardown", "{engine}, {signal:?}: {line}");
                gone.insert(peer["id"].as_u64());
            }
            let all = BTreeSet::from([1, 2, 3].map(Some));
            anyhow::ensure!(gone == all, "{engine}, {signal:?}: {gone:?}");
            let (ended, more) = (told.wait(LIMIT)?, told.line(LIMIT).ok());
            anyhow::ensure!(ended.success() && more.is_none(), "{engine}, {signal:?}: {more:?}");
            anyhow::ensure!(!has_device(host, DEVICE)?, "{engine}, {signal:?}: it is left over");
            let directory = host.runtime_directory().join("dco").join(DEVICE);
            anyhow::ensure!(!directory.exists(), "{engine}, {signal:?}: its directory is left");
        }
    }
    Ok(())
}

#[test]
fn a_name_is_free_as_soon_as_its_device_is_removed() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in engines(host)? {
        for _ in 0..5 {
            dco(host, &["new-iface", DEVICE, engine])?;
            let carrier = ["--udp", "127.0.0.1:1194", "--remote", NOWHERE];
            dco(host, &[&["new-peer", DEVICE, "1"], &carrier[..]].concat())?;
            dco(host, &["del-iface", DEVICE])?;
        }
    }
    Ok(())
}

/// Peers that nothing is ever heard of.
fn make_crowd(host: &Host) -> anyhow::Result<()> {
    let client = Client::new(&host.runtime_directory().join("dco").join(DEVICE));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        for id in 1..=CROWD {
            let peer = json!({
                "peer": id,
                "remote": NOWHERE,
                "vpn_ipv4": Ipv4Addr::from(CROWD_ADDRESS.to_bits() + id),
                "keepalive_interval": CROWD_TIMEOUT_S,
                "keepalive_timeout": CROWD_TIMEOUT_S,
            });
            let carrier = json!({"udp": "127.0.0.1:1194"});
            let request = json!({"verb": "new-peer", "peer": peer, "carrier": carrier});
            client.call::<DeviceCall>(&serde_json::from_value(request)?).await?;
        }
        Ok(())
    })
}

#[test]
fn events_that_nobody_read_are_told_once_afterwards() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in engines(host)? {
        let mut holder = hold(host, engine)?;
        let mut told = listen(host)?;
        hear(host, &mut told)?;
        make_crowd(host)?;
        holder.signal(Signal::STOP);
        thread::sleep(Duration::from_secs(CROWD_TIMEOUT_S + 3));
        holder.signal(Signal::CONT);
        let mut gone = BTreeSet::new();
        while gone.len() < CROWD as usize {
            let line = line(&mut told)?;
            if line["name"] == "lost" {
                continue;
            }
            let peer = &line["msg"]["peer"];
            let reason = peer["del-reason"].as_str().unwrap_or_default();
            let is_expected = ["expired", "unknown"].contains(&reason);
            anyhow::ensure!(is_expected && gone.insert(peer["id"].as_u64()), "{engine}: {line}");
        }
        let peers = dco(host, &["get-peer", DEVICE])?;
        anyhow::ensure!(peers == json!([]), "{engine}: {peers}");
        // All of them were reached by one socket.
        let list = || host.netns().exec(&["cat", "/proc/net/udp"]).map(|list| list.stdout);
        let is_closed = || list().is_ok_and(|list| !list.contains("0100007F:04AA"));
        wait_until("the end of the crowd's socket", LIMIT, is_closed)?;
        dco(host, &["del-iface", DEVICE])?;
        anyhow::ensure!(holder.wait(LIMIT)?.success(), "{engine}: it has not ended well");
    }
    Ok(())
}

#[test]
fn an_mtu_that_leaves_no_room_is_refused_with_the_largest() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in ["--engine=userspace", "--engine=kernel"] {
        for mtu in ["65478", "65536", "4294967295"] {
            let (code, said) = refused(host, &["new-iface", DEVICE, "--mtu", mtu, engine])?;
            let is_told = said.contains(mtu) && said.contains("at most 65477");
            anyhow::ensure!(code == Some(2) && is_told, "{engine}: {said}");
            anyhow::ensure!(!has_device(host, DEVICE)?, "{engine}: the device is left over");
        }
    }
    dco(host, &["new-iface", DEVICE, "--mtu", "65477", "--engine=userspace"])?;
    let shown = host.netns().exec(&["ip", "-j", "link", "show", DEVICE])?.success()?.json()?;
    anyhow::ensure!(shown[0]["mtu"] == 65_477, "{shown}");
    dco(host, &["del-iface", DEVICE])?;
    Ok(())
}

#[test]
fn drops_of_a_userspace_device_are_shown_by_reason() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in engines(host)? {
        let made = dco(host, &["new-iface", DEVICE, "--mode", "mp", engine])?;
        let shown = dco(host, &["get-iface", DEVICE])?;
        anyhow::ensure!(shown["ifindex"] == made["ifindex"] && shown["name"] == DEVICE, "{shown}");
        if shown["engine"] == "kernel" {
            anyhow::ensure!(shown["drops"].is_null(), "{shown}");
            dco(host, &["del-iface", DEVICE])?;
            continue;
        }
        anyhow::ensure!(shown["drops"].is_object(), "{shown}");
        host.netns().ip(&format!("link set {DEVICE} up"))?;
        host.netns().ip(&format!("address add 10.8.0.1/24 dev {DEVICE}"))?;
        host.netns().exec(&["ping", "-q", "-c", "1", "-W", "1", "10.8.0.2"])?;
        let shown = dco(host, &["get-iface", DEVICE])?;
        anyhow::ensure!(shown["drops"]["no_endpoint"].as_u64() > Some(0), "{shown}");
        anyhow::ensure!(shown["drops"]["forged"].is_null(), "{shown}");
        let text = host.weft(&["dco", "get-iface", DEVICE])?.success()?.stdout;
        anyhow::ensure!(text.contains("drops: ") && text.contains("no_endpoint "), "{text}");
        dco(host, &["del-iface", DEVICE])?;
    }
    let nobody = refused(host, &["get-iface", "dco9"])?;
    anyhow::ensure!(nobody.0 == Some(4), "{nobody:?}");
    Ok(())
}
