//! Wire format `ovpn` between hosts, moved by the kernel's data channel device at one end or at both.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, UNDERLAY_MTU_BYTES, wait_until};
use weft_lab::net::capture::{Capture, contains, tshark};
use weft_lab::net::guest::flow::MARKER;
use weft_lab::net::guest::host::{
    HiddenModules, guard_dropped, guard_dropped_all, has_module, load,
};
use weft_lab::net::guest::stage::{is_on, wait_candidate, wait_path};
use weft_lab::net::guest::{
    BACK_LIMIT_S, FAIL_OVER_LIMIT, Flow, KernelMemory, LeakWatch, Nat, Outer, PacketIds,
    SETTLE_LIMIT, Stage, by_clock, figure,
};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{counter, namespace, probe};

const KERNEL: [&str; 4] = ["--format", "ovpn", "--engine", "kernel"];
const VECTOR: [&str; 4] = ["--format", "ovpn", "--engine", "userspace"];
const DEVICE: &str = "weft-ovpn";
/// Between two datagrams of a stream.
const EVERY: Duration = Duration::from_millis(10);
/// Unloaded in this order: later ones are used by earlier ones.
const ESP: [&str; 4] = ["esp4_offload", "esp6_offload", "esp4", "esp6"];

fn on<'a>(engine: &'a str, remote_engine: &'a str) -> impl Fn(&Value) -> bool + 'a {
    move |path| is_on(engine, remote_engine)(path) && path["format"] == "ovpn"
}

fn ready(stage: &Stage) -> anyhow::Result<(Container, Container)> {
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    Ok((one, two))
}

/// TCP and UDP, small and large, both ways.
fn carry(one: &Container, two: &Container) -> anyhow::Result<()> {
    for (from, to) in [(one, two), (two, one)] {
        from.ping(to.ipv4()?.into())?;
        from.ping(to.ipv6()?.into())?;
        let _server = Server::start(to)?;
        let report = iperf::run(from, to.ipv4()?.into(), &["-n", "2M"])?;
        anyhow::ensure!(iperf::received_bps(&report) > 0.0, "{report}");
        let full = usize::try_from(from.mtu()?)? - 28;
        let receiver = probe::udp_in(&namespace(to), (to.ipv4()?, 0).into())?;
        let sender = probe::udp_in(&namespace(from), (from.ipv4()?, 0).into())?;
        for length in [1, 64, full] {
            let bytes = vec![0x5a; length];
            sender.send_to(&bytes, receiver.local_addr()?)?;
            probe::expect_datagram(&receiver, &bytes)?;
        }
    }
    Ok(())
}

#[test]
fn two_kernels_carry_the_network_and_an_observer_sees_openvpn() -> anyhow::Result<()> {
    let stage = Stage::pair(&KERNEL, &KERNEL)?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let path = wait_path(here, there, "the kernels", SETTLE_LIMIT, on("kernel", "kernel"))?;
    assert_eq!((&path["encrypted"], one.mtu()?), (&true.into(), 1_356), "{path}");
    let reads = counter(here, "tap_reads")?;
    let watch = LeakWatch::start(&stage)?;
    carry(&one, &two)?;

    let file = stage.directory().join("wire.pcap");
    let capture = Capture::start(here.netns(), "eth0", &file, "udp port 6786")?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    for _ in 0..10 {
        sender.send_to(MARKER, receiver.local_addr()?)?;
        probe::expect_datagram(&receiver, MARKER)?;
    }
    let bytes = capture.finish()?;
    assert!(!contains(&bytes, &MARKER[..24]), "a part of the traffic is readable");
    let fields = ["-d", "udp.port==6786,openvpn", "-Y", "udp.length > 9", "-T", "fields"];
    let opcodes = tshark(&file, &[&fields[..], &["-e", "openvpn.opcode"]].concat())?;
    assert!(opcodes.lines().count() >= 10, "the traffic is not in the capture");
    let are_data = opcodes.lines().all(|opcode| matches!(opcode.trim(), "9" | "0x09" | "0x9"));
    assert!(are_data, "tshark sees data packets of OpenVPN, version 2: {opcodes:?}");

    assert!(counter(here, "tap_reads")? - reads < 200, "the vector engine has carried frames");
    for host in [here, there] {
        assert_eq!(guard_dropped_all(host)?, 0, "{}", stage.diagnosis());
    }
    // Its end sends a packet in the clear on purpose, which the guard drops.
    let seen = watch.finish()?;
    assert_eq!(seen.readable, 0, "{seen:?}");
    Ok(())
}

#[test]
fn a_kernel_and_a_vector_engine_carry_it_each_from_its_own_port() -> anyhow::Result<()> {
    for round in 0..2 {
        let engines = [["kernel", "userspace"], ["userspace", "kernel"]][round];
        let options = [[&KERNEL, &VECTOR], [&VECTOR, &KERNEL]][round];
        let stage = Stage::pair(options[0], options[1])?;
        let (one, two) = ready(&stage)?;
        let on = on(engines[0], engines[1]);
        wait_path(stage.host(0), stage.host(1), "both engines", SETTLE_LIMIT, on)?;
        carry(&one, &two)?;
    }
    Ok(())
}

#[test]
fn rekeys_every_two_seconds_lose_nothing_whichever_engines_take_part() -> anyhow::Result<()> {
    for (one, two) in [(&KERNEL, &KERNEL), (&KERNEL, &VECTOR)] {
        let fast = |options: &[&'static str]| [options, &["--rekey-seconds", "2"]].concat();
        let stage = Stage::pair(&fast(one), &fast(two))?;
        let (one, two) = ready(&stage)?;
        let rekeys = || -> anyhow::Result<[u64; 2]> {
            Ok([counter(stage.host(0), "rekeys")?, counter(stage.host(1), "rekeys")?])
        };
        let before = rekeys()?;
        let flows = [Flow::start(&one, &two, EVERY)?, Flow::start(&two, &one, EVERY)?];
        // More than there are key ids.
        let enough = || rekeys().is_ok_and(|now| (0..2).all(|host| now[host] >= before[host] + 10));
        wait_until("ten rekeys each way", by_clock(120), enough)?;
        for flow in flows {
            let report = flow.stop()?;
            report.ensure_no_loss().map_err(|error| error.context(stage.diagnosis()))?;
            anyhow::ensure!(report.doubled().is_empty(), "doubled: {:?}", report.doubled());
        }
    }
    Ok(())
}

/// The nonce tail of the key that a host has begun to send with last, by its key log. It is the rest of the line
/// after 32 bytes of cipher key.
fn last_nonce_tail(keys: &Path) -> anyhow::Result<Vec<u8>> {
    let text = std::fs::read_to_string(keys)?;
    let line =
        text.lines().rfind(|line| line.starts_with("out ")).context("no key to send with")?;
    let (_, digits) = line.rsplit_once(" 0x").context("no key in its line")?;
    let tail = digits.as_bytes().get(64..).context("too short")?;
    let byte = |digits: &[u8]| Ok(u8::from_str_radix(std::str::from_utf8(digits)?, 16)?);
    tail.chunks(2).map(byte).collect()
}

#[test]
fn a_key_that_the_kernel_has_taken_away_is_replaced_at_once() -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    let keys = stage.directory().join("keys");
    stage.launch_with(0, &KERNEL, &[("WEFT_SA_KEYLOG", &keys.to_string_lossy())])?;
    stage.launch(1, &VECTOR)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "both engines", SETTLE_LIMIT, on("kernel", "userspace"))?;
    let (one, two) = ready(&stage)?;
    let memory = KernelMemory::open()?;
    let flow = Flow::start(&one, &two, EVERY)?;
    flow.wait_more(20, SETTLE_LIMIT)?;
    let ids = PacketIds::find(&memory, &last_nonce_tail(&keys)?, 20, || {
        flow.wait_more(20, SETTLE_LIMIT).map(drop)
    })?;
    let rekeys = counter(there, "rekeys")?;
    let at = Instant::now();
    // Enough for a second: it shows that the kernel goes on with the written count.
    ids.leave(100)?;
    flow.wait_more(200, SETTLE_LIMIT)?;
    let gap = flow.stop()?.longest_gap(at);
    figure("a key without packet ids", format!("{} ms without a packet", gap.as_millis()));
    assert!(gap < FAIL_OVER_LIMIT, "{gap:?}: {}", stage.diagnosis());
    assert_eq!(counter(there, "rekeys")?, rekeys + 1, "who receives counts another key");
    wait_path(here, there, "both engines", SETTLE_LIMIT, on("kernel", "userspace"))?;
    stage.reach(&two, &one)?;
    Ok(())
}

#[test]
fn where_esp_is_not_to_be_had_the_kernels_take_it_and_move_once_there_is_esp() -> anyhow::Result<()>
{
    let there: Vec<&str> = ESP.into_iter().filter(|name| has_module(name)).collect();
    let hidden = HiddenModules::hide(&there)?;
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the data channel", SETTLE_LIMIT, on("kernel", "kernel"))?;
    assert_eq!(one.mtu()?, 1_356, "what the data channel carries");
    let flow = Flow::start(&one, &two, EVERY)?;
    flow.wait_more(20, SETTLE_LIMIT)?;
    drop(hidden);
    load("esp4")?;
    load("esp6")?;
    let esp = |c: &Value| is_on("kernel", "kernel")(c) && c["format"] == "esp";
    for (host, peer) in [(here, there), (there, here)] {
        wait_path(host, peer, "ESP", by_clock(BACK_LIMIT_S), esp)?;
    }
    flow.wait_more(50, SETTLE_LIMIT)?;
    flow.stop()?.ensure_no_loss().map_err(|error| error.context(stage.diagnosis()))
}

#[test]
fn behind_a_nat_it_follows_the_mapping() -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    let mut nat = Nat::before(&stage, 1, "192.0.2.102")?;
    let stage = stage.launched(&[&KERNEL, &KERNEL])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    for (number, address) in ["192.0.2.102", "192.0.2.103"].into_iter().enumerate() {
        let flow = Flow::start(&one, &two, EVERY)?;
        let at = Instant::now();
        if number > 0 {
            nat.set_address(address)?;
        }
        let mapped = |path: &Value| {
            let remote = path["remote"].as_str().unwrap_or_default();
            on("kernel", "kernel")(path) && remote.starts_with(&format!("{address}:2"))
                || on("kernel", "kernel")(path) && remote.starts_with(&format!("{address}:3"))
        };
        wait_candidate(here, there, "the NAT's port", by_clock(BACK_LIMIT_S), mapped)?;
        flow.wait_more(50, by_clock(BACK_LIMIT_S))?;
        let gap = flow.stop()?.longest_gap(at);
        figure(&format!("NAT at {address}"), format!("{} ms without a packet", gap.as_millis()));
        stage.reach(&two, &one)?;
    }
    Ok(())
}

#[test]
fn on_odp_too() -> anyhow::Result<()> {
    let odp = [&KERNEL[..], &["--switch", "odp"]].concat();
    let stage = Stage::pair(&odp, &KERNEL)?;
    let (one, two) = ready(&stage)?;
    let path = wait_path(
        stage.host(0),
        stage.host(1),
        "the kernels",
        SETTLE_LIMIT,
        on("kernel", "kernel"),
    )?;
    assert_eq!(path["switch"], "odp", "{path}");
    let watch = LeakWatch::start(&stage)?;
    carry(&one, &two)?;
    for host in [stage.host(0), stage.host(1)] {
        assert_eq!(guard_dropped_all(host)?, 0, "{}", stage.diagnosis());
    }
    let seen = watch.finish()?;
    assert_eq!(seen.readable, 0, "{seen:?}");
    Ok(())
}

#[test]
fn over_ipv6_too() -> anyhow::Result<()> {
    let stage = Stage::with(2, Outer::V6, UNDERLAY_MTU_BYTES)?.launched(&[&KERNEL, &VECTOR])?;
    let (one, two) = ready(&stage)?;
    let on = on("kernel", "userspace");
    let path = wait_path(stage.host(0), stage.host(1), "both engines", SETTLE_LIMIT, on)?;
    let address = path["address"].as_str().unwrap_or_default();
    assert!(address.contains("2001:db8"), "{path}");
    let watch = LeakWatch::start(&stage)?;
    carry(&one, &two)?;
    assert_eq!(guard_dropped_all(stage.host(0))?, 0, "{}", stage.diagnosis());
    let seen = watch.finish()?;
    assert_eq!(seen.readable, 0, "{seen:?}");
    Ok(())
}

/// The device's index, if it is there.
fn device(host: &Host) -> anyhow::Result<Option<u64>> {
    let links = host.netns().exec(&["ip", "-j", "link"])?.success()?.json()?;
    let mut links = links.as_array().into_iter().flatten();
    let found = links.find(|link| link["ifname"] == DEVICE);
    Ok(found.and_then(|link| link["ifindex"].as_u64()))
}

#[test]
fn a_removed_device_comes_back_without_a_leak_and_a_stop_leaves_none() -> anyhow::Result<()> {
    let stage = Stage::pair(&KERNEL, &KERNEL)?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let watch = LeakWatch::start(&stage)?;
    let flow = Flow::start(&one, &two, EVERY)?;
    flow.wait_more(20, SETTLE_LIMIT)?;
    let at = Instant::now();
    here.netns().ip(&format!("link del {DEVICE}"))?;
    std::thread::sleep(FAIL_OVER_LIMIT);
    flow.wait_more(50, by_clock(BACK_LIMIT_S))?;
    let gap = flow.stop()?.longest_gap(at);
    figure("the device removed by hand", format!("{} ms without a packet", gap.as_millis()));
    stage.reach(&two, &one)?;
    // A daemon that was killed leaves the device; the next one begins with another.
    here.kill_daemon();
    let left = device(here)?;
    assert!(left.is_some(), "the device goes with the daemon");
    stage.launch(0, &KERNEL)?;
    wait_path(there, here, "the next daemon", SETTLE_LIMIT, on("kernel", "kernel"))?;
    stage.reach(&one, &two)?;
    let next = device(here)?;
    assert!(next.is_some() && next != left, "{left:?} and then {next:?}");
    let seen = watch.finish()?;
    assert_eq!(seen.readable, 0, "{seen:?}");
    here.weft(&["stop"])?.success()?;
    assert_eq!(device(here)?, None, "a stopped daemon leaves its device");
    let left = here.netns().ip("-6 route show fd77:6566:7400::/40")?.stdout;
    assert_eq!(left.trim(), "");
    there.kill_daemon();
    there.weft(&["reset", "--force"])?.success()?;
    assert_eq!(device(there)?, None, "a reset leaves the device");
    Ok(())
}

#[test]
fn nothing_but_the_overlay_passes_the_device() -> anyhow::Result<()> {
    let stage = Stage::pair(&KERNEL, &KERNEL)?;
    ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let addresses = there.netns().exec(&["ip", "-j", "-6", "addr", "show", "dev", DEVICE])?;
    let addresses = addresses.success()?.json()?;
    let of = addresses[0]["addr_info"].as_array().cloned().unwrap_or_default();
    assert_eq!(of.len(), 2, "{addresses}");
    let before = guard_dropped(here, "channel")?;
    for info in &of {
        let address = info["local"].as_str().unwrap_or_default();
        let ping = here.netns().exec(&["ping", "-6", "-c", "1", "-W", "1", address])?;
        assert!(!ping.status.success(), "{address} answers through the device");
    }
    assert!(guard_dropped(here, "channel")? > before, "{}", stage.diagnosis());
    Ok(())
}
