//! The sockets and connections of peers: each stays for as long as a peer uses it, and no longer.

use std::thread;
use std::time::{Duration, Instant};

use weft_bench::sandbox::{Host, Running, Sandbox, SandboxOptions, wait_until};

use crate::common::{DEVICE, LIMIT, NOWHERE, dco, engines, hear, limit, line, listen, refused};

/// By now a notice that is late has come.
const LATE: Duration = Duration::from_millis(500);

/// An address that no host here has.
const NOBODYS: &str = "198.51.100.7:1194";

/// The address of a port of the host's own.
fn at(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

/// How many UDP sockets with this port a host has.
fn sockets(host: &Host, port: u16) -> anyhow::Result<usize> {
    let list = host.netns().exec(&["cat", "/proc/net/udp"])?.success()?.stdout;
    let end = format!(":{port:04X}");
    let locals = list.lines().filter_map(|line| line.split_whitespace().nth(1));
    Ok(locals.filter(|local| local.ends_with(&end)).count())
}

fn wait_closed(host: &Host, port: u16) -> anyhow::Result<()> {
    let is_closed = || sockets(host, port).is_ok_and(|count| count == 0);
    wait_until(&format!("the end of the socket of port {port}"), LIMIT, is_closed)?;
    Ok(())
}

/// Makes a peer of a device, over UDP.
fn make(host: &Host, peer: &str, port: u16, more: &[&str]) -> anyhow::Result<()> {
    let own = at(port);
    let words = ["new-peer", DEVICE, peer, "--udp", &own, "--remote", NOWHERE];
    dco(host, &[&words[..], more].concat())?;
    Ok(())
}

#[test]
fn a_socket_is_closed_with_the_last_peer_that_is_reached_by_it() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in engines(host)? {
        dco(host, &["new-iface", DEVICE, "--mode", "mp", engine])?;
        make(host, "1", 1_194, &["--vpn-ipv4", "10.8.0.1"])?;
        make(host, "2", 1_194, &["--vpn-ipv4", "10.8.0.2"])?;
        dco(host, &["del-peer", DEVICE, "1"])?;
        thread::sleep(LATE);
        anyhow::ensure!(sockets(host, 1_194)? == 1, "{engine}: the other peer's socket is closed");
        dco(host, &["del-peer", DEVICE, "2"])?;
        wait_closed(host, 1_194)?;
        // The next peer finds the address free at once.
        for _ in 0..5 {
            make(host, "3", 1_194, &["--vpn-ipv4", "10.8.0.3"])?;
            dco(host, &["del-peer", DEVICE, "3"])?;
        }
        let times = ["--keepalive-interval", "1", "--keepalive-timeout", "5"];
        make(host, "4", 1_195, &[&["--vpn-ipv4", "10.8.0.4"], &times[..]].concat())?;
        anyhow::ensure!(sockets(host, 1_195)? == 1, "{engine}: no socket of a new peer");
        wait_closed(host, 1_195)?;
        dco(host, &["del-iface", DEVICE])?;
    }
    Ok(())
}

#[test]
fn a_replaced_peers_socket_is_closed_and_its_heirs_stays() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in engines(host)? {
        dco(host, &["new-iface", DEVICE, engine])?;
        make(host, "1", 1_194, &[])?;
        make(host, "2", 1_195, &[])?;
        wait_closed(host, 1_194)?;
        // Replaces itself, at another address.
        make(host, "2", 1_196, &[])?;
        wait_closed(host, 1_195)?;
        thread::sleep(LATE);
        anyhow::ensure!(sockets(host, 1_196)? == 1, "{engine}: the last peer's socket is closed");
        let peers = dco(host, &["get-peer", DEVICE])?;
        anyhow::ensure!(peers[0]["id"] == 2 && peers[1].is_null(), "{engine}: {peers}");
        dco(host, &["del-iface", DEVICE])?;
    }
    Ok(())
}

#[test]
fn a_refused_peer_leaves_no_socket() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let host = sandbox.host(0);
    for engine in engines(host)? {
        dco(host, &["new-iface", DEVICE, "--mode", "mp", engine])?;
        // Without an address inside, which a peer of such a device needs.
        let own = at(1_194);
        let words = ["new-peer", DEVICE, "1", "--udp", &own, "--remote", NOWHERE, "--mark", "7"];
        let homeless = refused(host, &words)?;
        anyhow::ensure!(homeless.0 == Some(2), "{engine}: {homeless:?}");
        wait_closed(host, 1_194)?;
        let elsewhere = ["new-peer", DEVICE, "1", "--udp", NOBODYS, "--remote", NOWHERE];
        let elsewhere = refused(host, &elsewhere)?;
        anyhow::ensure!(elsewhere.1.contains("an address of this host"), "{engine}: {elsewhere:?}");
        dco(host, &["del-iface", DEVICE])?;
    }
    Ok(())
}

/// Connects two hosts' devices; the peers have these ids there.
fn connect(sandbox: &Sandbox, peers: [&str; 2], port: u16) -> anyhow::Result<()> {
    let (opens, listens) = (sandbox.host(0), sandbox.host(1));
    let address = format!("{}:{port}", listens.ipv4());
    let vpn = format!("10.8.0.{}", peers[1]);
    thread::scope(|scope| -> anyhow::Result<()> {
        let words = ["new-peer", DEVICE, peers[1], "--vpn-ipv4", &vpn, "--tcp-listen", &address];
        let listening = scope.spawn(move || dco(listens, &words));
        let deadline = Instant::now() + limit();
        let words = ["new-peer", DEVICE, peers[0], "--tcp-connect", &address];
        // At first the other host does not listen yet.
        while let Err(error) = dco(opens, &words) {
            anyhow::ensure!(Instant::now() < deadline, "{error}");
        }
        listening.join().map_err(|_| anyhow::anyhow!("the listening side panicked"))??;
        Ok(())
    })
}

/// Wants it told that a peer's connection was closed by the other end.
fn disconnected(told: &mut Running, peer: u32) -> anyhow::Result<()> {
    let told = line(told)?;
    let gone = &told["msg"]["peer"];
    let reason = gone["del-reason"].as_str().unwrap_or_default();
    // A connection that is closed before all was read from it is reset.
    let is_closed = ["transport-disconnect", "transport-error"].contains(&reason);
    anyhow::ensure!(told["name"] == "peer-del-ntf" && gone["id"] == peer && is_closed, "{told}");
    Ok(())
}

#[test]
fn a_replaced_peers_connection_is_closed_and_its_heirs_stays() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let (one, other) = (sandbox.host(0), sandbox.host(1));
    for engine in engines(one)? {
        dco(one, &["new-iface", DEVICE, engine])?;
        dco(other, &["new-iface", DEVICE, "--mode", "mp", "--engine=userspace"])?;
        let mut told = listen(other)?;
        hear(other, &mut told)?;
        connect(&sandbox, ["5", "1"], 1_194)?;
        connect(&sandbox, ["6", "2"], 1_195)?;
        disconnected(&mut told, 1)?;
        // Replaces itself, over another connection.
        connect(&sandbox, ["6", "3"], 1_196)?;
        disconnected(&mut told, 2)?;
        thread::sleep(LATE);
        dco(one, &["packet", DEVICE, "6", "3801020304"])?;
        let packet = line(&mut told)?;
        anyhow::ensure!(packet["msg"]["bytes"] == "3801020304", "{engine}: {packet}");
        let mut told = listen(one)?;
        let deadline = Instant::now() + limit();
        let packet = loop {
            dco(other, &["packet", DEVICE, "3", "3803040506"])?;
            match told.line(LATE) {
                Ok(packet) => break packet,
                Err(error) => {
                    // The listener may not have begun.
                    anyhow::ensure!(Instant::now() < deadline, "{engine}: {error}");
                }
            }
        };
        anyhow::ensure!(packet.contains("3803040506"), "{engine}: {packet}");
        for host in sandbox.hosts() {
            dco(host, &["del-iface", DEVICE])?;
        }
    }
    Ok(())
}
