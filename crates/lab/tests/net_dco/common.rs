//! Shared parts of the tests of devices.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal};
use serde_json::Value;
use weft_bench::sandbox::{Host, Output, Running, try_wait_until};
use weft_lab::net::{is_soak, slowness};

/// The device's name on every host.
pub(crate) const DEVICE: &str = "dco0";
/// For keys of a test that are given to devices again and again.
pub(crate) const REUSE: &str = "--allow-reused-key";
/// A UDP address at which there is no peer.
pub(crate) const NOWHERE: &str = "127.0.0.1:9";
/// Limit of an operation that takes no time. The sandbox's waits extend it on a slow machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);
/// How often an unrelated signal may end a verb.
const SIGNALS_MAX: u32 = 5;
/// After this long without a line, none is on its way.
const QUIET: Duration = Duration::from_millis(300);

/// Runs a verb. A device of the kernel may send on a connection that the other end has closed. The kernel then
/// signals the process that runs at that moment (SIGPIPE), even `ip` before it has become `weft`.
fn verb(host: &Host, words: &[&str]) -> anyhow::Result<Output> {
    let mut output = host.weft(words)?;
    for _ in 0..SIGNALS_MAX {
        if output.status.signal() != Some(Signal::PIPE.as_raw()) {
            break;
        }
        output = host.weft(words)?;
    }
    Ok(output)
}

/// A verb of a host, which must succeed.
pub(crate) fn dco(host: &Host, words: &[&str]) -> anyhow::Result<Value> {
    let words = [&["dco"], words, &["--json"]].concat();
    Ok(verb(host, &words)?.success()?.json()?)
}

/// A verb that must be refused: its exit code and its error text.
pub(crate) fn refused(host: &Host, words: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
    let output = verb(host, &[&["dco"], words].concat())?;
    Ok((output.status.code(), output.stderr))
}

/// Prints what happens to a host's peers, and the packets of the control channel.
pub(crate) fn listen(host: &Host) -> anyhow::Result<Running> {
    Ok(host.spawn_weft(&["dco", "listen", DEVICE, "--packets"])?)
}

/// Ids of peers by which it is found whether anybody listens begin here.
const HEARD: u32 = 900_000;

/// The next line of [`listen`].
pub(crate) fn line(running: &mut Running) -> anyhow::Result<Value> {
    Ok(serde_json::from_str(&running.line(LIMIT)?)?)
}

/// Waits until the listener to a device in mode mp is ready. Peers come and go until it reports one, and until
/// it has reported all.
pub(crate) fn hear(host: &Host, told: &mut Running) -> anyhow::Result<()> {
    hear_by(host, told, &["--vpn-ipv4", "10.8.99.99"])
}

/// As [`hear`], with peers that these words make of the device.
pub(crate) fn hear_by(host: &Host, told: &mut Running, words: &[&str]) -> anyhow::Result<()> {
    let carrier = ["--udp", "127.0.0.1:1999", "--remote", NOWHERE];
    let deadline = Instant::now() + limit();
    for id in HEARD.. {
        let id = id.to_string();
        dco(host, &[&["new-peer", DEVICE, &id][..], &carrier, words].concat())?;
        dco(host, &["del-peer", DEVICE, &id])?;
        let is_its = |line: &str| line.contains(&format!("\"id\":{id}}}"));
        let Ok(mut line) = told.line(QUIET) else {
            anyhow::ensure!(Instant::now() < deadline, "nobody listens to {DEVICE}");
            continue;
        };
        // The line may belong to an earlier peer.
        while !is_its(&line) {
            line = told.line(LIMIT)?;
        }
        break;
    }
    Ok(())
}

/// The option for each kind of device to test. If the kernel has devices, that is the kernel's alone, except in a
/// soak. A kernel without them tests those in userspace.
pub(crate) fn engines(host: &Host) -> anyhow::Result<Vec<&'static str>> {
    let (userspace, kernel) = ("--engine=userspace", "--engine=kernel");
    let (code, said) = refused(host, &["new-iface", "probe0", kernel])?;
    if code == Some(0) {
        dco(host, &["del-iface", "probe0"])?;
        return Ok(if is_soak() { vec![userspace, kernel] } else { vec![kernel] });
    }
    anyhow::ensure!(said.contains("not support data channel offload"), "{said}");
    Ok(vec![userspace])
}

/// Whether a host has a network device of this name.
pub(crate) fn has_device(host: &Host, name: &str) -> anyhow::Result<bool> {
    Ok(host.netns().exec(&["ip", "link", "show", name])?.status.success())
}

/// The process that holds the host's device.
pub(crate) fn holder(host: &Host) -> anyhow::Result<Pid> {
    let name = host.netns().name();
    let listed = host.netns().exec(&["ip", "netns", "pids", name])?.success()?.stdout;
    let holds = |pid: &&str| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0);
        words.any(|word| word == b"hold") && words.any(|word| word == DEVICE.as_bytes())
    };
    let found = listed.split_whitespace().find(holds).and_then(|pid| pid.parse().ok());
    let found = found.and_then(Pid::from_raw);
    found.ok_or_else(|| anyhow::anyhow!("no process holds {DEVICE} of {name}: {listed}"))
}

/// How many fragments a host's system has made, of IPv4 packets and of IPv6 ones.
pub(crate) fn fragments(host: &Host) -> anyhow::Result<[u64; 2]> {
    const NAME: &str = "Ip6FragCreates";
    let text = host.netns().exec(&["cat", "/proc/net/snmp6"])?.success()?.stdout;
    let count = text.lines().find_map(|line| line.strip_prefix(NAME)?.trim().parse().ok());
    let ipv6 = count.ok_or_else(|| anyhow::anyhow!("no {NAME} in {text}"))?;
    Ok([counted(host, "Ip", "FragCreates")?, ipv6])
}

/// The value of a host's counter by this name, for a protocol of IPv4.
pub(crate) fn counted(host: &Host, protocol: &str, name: &str) -> anyhow::Result<u64> {
    let text = host.netns().exec(&["cat", "/proc/net/snmp"])?.success()?.stdout;
    // A line of names above one of values.
    let of_it = |line: &&str| line.split_once(':').is_some_and(|(begin, _)| begin == protocol);
    let mut lines = text.lines().filter(of_it);
    let mut words = || lines.next().into_iter().flat_map(str::split_whitespace);
    let (names, values): (Vec<&str>, Vec<&str>) = (words().collect(), words().collect());
    let value = names.iter().position(|it| *it == name).and_then(|at| values.get(at)?.parse().ok());
    value.ok_or_else(|| anyhow::anyhow!("no {name} of {protocol} in {text}"))
}

/// Pings, and wants every answer. Once ping has one, it waits for the others for two round trips only. So the kernel
/// counts those that come later.
pub(crate) fn ping_all(host: &Host, words: &[&str]) -> anyhow::Result<()> {
    let before = counted(host, "Icmp", "InEchoReps")?;
    let told = host.netns().exec_within(LIMIT * 6, &[&["ping", "-n"], words].concat())?.stdout;
    if told.contains(" 0% packet loss") {
        return Ok(());
    }
    anyhow::ensure!(!told.contains(" 100% packet loss"), "{words:?}: {told}");
    let sent = told.lines().find_map(|line| line.split_once(" packets transmitted"));
    let sent: u64 = sent.and_then(|(sent, _)| sent.parse().ok()).context("ping has no count")?;
    let have_come =
        || Ok(counted(host, "Icmp", "InEchoReps").is_ok_and(|answers| answers - before >= sent));
    try_wait_until(&format!("the last answers to {words:?}"), LIMIT, have_come)?;
    Ok(())
}

/// A key file as OpenVPN writes it.
pub(crate) fn write_key_file(file: &Path, seed: u8) -> anyhow::Result<()> {
    let line = |line: u8| (0..16).map(|at| format!("{:02x}", seed ^ (line * 16 + at))).collect();
    let lines: Vec<String> = (0..16).map(line).collect();
    let name = "OpenVPN Static key V1-----";
    let text = format!("-----BEGIN {name}\n{}\n-----END {name}\n", lines.join("\n"));
    Ok(fs::write(file, text)?)
}

/// As [`LIMIT`], for waits that do not know how slow the machine is.
pub(crate) fn limit() -> Duration {
    LIMIT * slowness()
}
