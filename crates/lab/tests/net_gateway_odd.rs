//! Clients with profiles or clocks that do not fit the gateway's: each works, or shows why not. None is connected and
//! silent. The referee is Debian's `openvpn`.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use weft_bench::sandbox::{Running, try_wait_until};
use weft_lab::net::gateway::{CONNECTED, LIMIT, Machine, Stage, connected};
use weft_lab::net::probe::connection_arrives;
use weft_lab::net::{namespace, wait_ping};

/// An hour and a bit: what summer time, or a clock without a battery, makes of a clock.
const OFFSETS: [&str; 2] = ["-61m", "+61m"];
const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

/// How a client fared.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Connected,
    /// The server refused it, with this text.
    Refused(String),
    /// It has ended by itself, with this last complaint.
    Ended(String),
}

/// Follows a client until it is connected, refused or at its end.
fn fate(client: &mut Running) -> anyhow::Result<Fate> {
    let mut last = String::new();
    loop {
        match client.line(LIMIT) {
            Ok(line) if line.contains(CONNECTED) => return Ok(Fate::Connected),
            Ok(line) => match line.split_once("AUTH_FAILED,") {
                Some((_, text)) => {
                    return Ok(Fate::Refused(text.trim_end_matches('\'').to_owned()));
                }
                None if line.contains("rror") => last = line,
                None => {}
            },
            Err(_) if client.ended()?.is_some() => return Ok(Fate::Ended(last)),
            Err(error) => return Err(error).context("it says nothing"),
        }
    }
}

/// Connections carry both ways between the one client and a container of the other host.
fn carries(stage: &Stage, machine: &Machine) -> anyhow::Result<()> {
    let clients = stage.clients()?;
    let address = clients.first().and_then(|client| client["addresses"][0].as_str());
    let address = address.context("no client")?.parse()?;
    let to = stage.two.ipv4()?.into();
    machine.wait_ping(to)?;
    wait_ping(&stage.two, address, LIMIT)?;
    let (from, inside) = (PathBuf::from(machine.netns.path()), namespace(&stage.two));
    connection_arrives((&from, address), (&inside, to))?;
    connection_arrives((&inside, to), (&from, address))?;
    Ok(())
}

fn wait_nobody(stage: &Stage) -> anyhow::Result<()> {
    try_wait_until("the client to be gone", LIMIT, || {
        Ok(stage.clients().is_ok_and(|clients| clients.is_empty()))
    })?;
    Ok(())
}

/// Options of a client, and what it is to show; nothing: it is connected, and traffic passes.
const ODD: [(&[&str], &str); 9] = [
    (
        &["--data-ciphers", "AES-256-CBC", "--cipher", "AES-256-CBC"],
        "Data channel cipher negotiation failed (no shared cipher)",
    ),
    (
        &["--data-ciphers", "BF-CBC:AES-128-CBC", "--providers", "legacy", "default"],
        "Data channel cipher negotiation failed (no shared cipher)",
    ),
    // What a profile says that was written for OpenVPN 2.3; the client itself knows better.
    (&["--cipher", "AES-256-CBC"], ""),
    // Compression: the client is told to frame its packets in another way, or compresses nothing by itself.
    (&["--comp-lzo", "--allow-compression", "yes"], ""),
    (&["--comp-lzo", "no"], ""),
    (&["--compress", "lz4-v2", "--allow-compression", "asym"], ""),
    (&["--compress", "stub-v2"], ""),
    (&["--compress"], ""),
    (&["--fragment", "1300"], "This server does not reassemble: remove fragment from the profile"),
];

#[test]
fn odd_profiles_work_or_are_refused_with_a_reason() -> anyhow::Result<()> {
    let stage = Stage::new()?;
    let machine = stage.machine(1)?;
    let profile = stage.profile(stage.host(), "alice")?;
    for (options, expected) in ODD {
        let mut client = machine.start_with(&profile, options)?;
        let fate = fate(&mut client).with_context(|| format!("{options:?}"))?;
        if expected.is_empty() {
            ensure!(fate == Fate::Connected, "{options:?}: {fate:?}");
            carries(&stage, &machine).with_context(|| format!("{options:?}"))?;
            client.terminate(LIMIT)?;
        } else {
            ensure!(fate == Fate::Refused(expected.to_owned()), "{options:?}: {fate:?}");
            ensure!(stage.clients()?.is_empty(), "{options:?}: it is listed");
            client.wait(LIMIT)?;
        }
        wait_nobody(&stage)?;
    }
    Ok(())
}

#[test]
fn a_clock_an_hour_off_at_either_end_keeps_nobody_out() -> anyhow::Result<()> {
    ensure!(Path::new(LIBRARY).exists(), "libfaketime is missing: apt-get install faketime");
    let stage = Stage::new()?;
    let (host, machine) = (stage.host(), stage.machine(1)?);
    // Certificates that are a moment old.
    for (number, offset) in OFFSETS.into_iter().enumerate() {
        let profile = stage.profile(host, &format!("client{number}"))?;
        let (remote, profile) = (machine.gateway().to_string(), profile.to_string_lossy());
        let fakes = [format!("LD_PRELOAD={LIBRARY}"), format!("FAKETIME={offset}")];
        let faked = ["env", &fakes[0], &fakes[1], "openvpn", "--config", &profile, "--dev", "tun0"];
        let place = ["--remote", &remote, "1194", "udp", "--verb", "3", "--reneg-sec", "5"];
        let mut client = connected(machine.netns.spawn(&[&faked[..], &place].concat())?)?;
        carries(&stage, &machine).with_context(|| offset.to_owned())?;
        client.process.line_with("Control Channel: TLS", LIMIT)?;
        carries(&stage, &machine).with_context(|| offset.to_owned())?;
        client.process.terminate(LIMIT)?;
        wait_nobody(&stage)?;
    }
    // The host's clock; the client goes on meanwhile, with what it has.
    let profile = stage.profile(host, "alice")?;
    let mut alice = machine.connect(&profile)?;
    let address = alice.address;
    let since = || -> anyhow::Result<String> {
        Ok(stage.clients()?[0]["since"].as_str().unwrap_or_default().to_owned())
    };
    let before = since()?;
    for offset in OFFSETS {
        host.stop_daemon()?;
        host.start_daemon_with(&[], &[("LD_PRELOAD", LIBRARY), ("FAKETIME", offset)])?;
        alice = connected(alice.process).with_context(|| offset.to_owned())?;
        ensure!(alice.address == address, "{offset}: another address: {}", alice.address);
        carries(&stage, &machine).with_context(|| offset.to_owned())?;
        ensure!(since()?.get(..13) != before.get(..13), "the clock was not changed");
        // Certificates of this clock, for a client with the right one.
        let late = stage.profile(host, "late")?;
        let other = stage.machine(if offset == OFFSETS[0] { 2 } else { 3 })?;
        let mut client = other.connect(&late).with_context(|| offset.to_owned())?;
        other.wait_ping(stage.two.ipv4()?.into())?;
        client.process.terminate(LIMIT)?;
    }
    Ok(())
}
