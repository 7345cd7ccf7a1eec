//! The kernel's paths against the same built by hand, between the same hosts, in the same run. Meanwhile the
//! daemon does nothing. Ratios only: the processor is emulated.

use std::time::{Duration, Instant};

use weft_bench::sandbox::{Container, Host, Netns};
use weft_lab::net::guest::host::Work;
use weft_lab::net::guest::stage::{is_active, wait_path};
use weft_lab::net::guest::{SETTLE_LIMIT, Stage, figure};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{counter, is_soak};

/// Rounds of each side; the figure is the median. Single rounds spread by a half around it.
const ROUNDS: usize = 25;
/// Seconds of each round.
const ROUND_S: &str = "3";
/// The allowed growth of the daemon's processor time under traffic, in ticks of 10 ms for each second. The
/// kernel charges the packets of an interrupt to the process that it interrupted. On a slow machine an idle
/// daemon has shown 16; a daemon that moves the packets takes eighty and more.
const TICKS_MORE_PER_S_MAX: u64 = 25;

#[test]
fn the_encrypted_path_is_within_15_per_cent_of_one_built_by_hand() -> anyhow::Result<()> {
    let kernel = ["--engine", "kernel"];
    let stage = Stage::pair(&kernel, &kernel)?;
    compared(&stage, "esp", 0.85)
}

#[test]
fn the_plain_path_is_within_10_per_cent_of_a_vxlan_built_by_hand() -> anyhow::Result<()> {
    let trusted = ["--engine", "kernel", "--trusted-subnets", "192.0.2.0/24"];
    let stage = Stage::pair(&trusted, &trusted)?;
    compared(&stage, "plain", 0.90)
}

fn compared(stage: &Stage, format: &str, wanted: f64) -> anyhow::Result<()> {
    let of_format =
        |c: &serde_json::Value| is_active(c) && c["engine"] == "kernel" && c["format"] == format;
    for (host, peer) in [(0, 1), (1, 0)] {
        let (host, peer) = (stage.host(host), stage.host(peer));
        wait_path(host, peer, "the kernel's path", SETTLE_LIMIT, of_format)?;
    }
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let hand = by_hand(stage, one.mtu()?, format == "esp")?;
    let ours = (one, two);
    let mut rates = [Vec::new(), Vec::new()];
    let _server = Server::start(&ours.1)?;
    let mut hand_server = hand[1].spawn(&["iperf3", "-s", "--forceflush"])?;
    hand_server.line_with("Server listening", Duration::from_secs(20))?;
    for round in 0..=ROUNDS {
        let report = iperf::run(&ours.0, ours.1.ipv4()?.into(), &["-t", ROUND_S])?;
        let mine = iperf::received_bps(&report);
        let words = ["iperf3", "-J", "-c", "10.99.0.2", "-t", ROUND_S];
        let report = hand[0].exec(&words)?.success()?.json()?;
        let theirs = iperf::received_bps(&report);
        // The first round warms caches and TCP's memory of the path up.
        if round > 0 {
            rates[0].push(mine);
            rates[1].push(theirs);
        }
    }
    let [mine, theirs] = rates.map(median);
    let ratio = mine / theirs;
    figure(
        &format!("{format}, Weft against by hand"),
        format!("{:.1} and {:.1} Mbit/s, ratio {ratio:.3}", mine / 1e6, theirs / 1e6),
    );
    assert!(ratio >= wanted, "{ratio:.3} of what is built by hand, {wanted} wanted");
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The same without Weft. Each host's namespace has a bridge with a VXLAN device and a veth to a namespace behind
/// it; SAs and policies are made by `ip`.
fn by_hand(stage: &Stage, mtu: u32, encrypted: bool) -> anyhow::Result<[Netns; 2]> {
    let inner = [stage.sandbox().add_netns("hand1")?, stage.sandbox().add_netns("hand2")?];
    let key = |byte: u8| format!("0x{}", format!("{byte:02x}").repeat(36));
    for (index, address) in ["10.99.0.1", "10.99.0.2"].into_iter().enumerate() {
        let (host, full) = (stage.host(index), inner[index].name());
        let (local, remote) = (host.ipv4(), stage.host(1 - index).ipv4());
        let mut lines = vec![
            "set -e".to_owned(),
            "ip link add hand type bridge; ip link set hand up".to_owned(),
            format!(
                "ip link add hand-vx type vxlan id 9 dstport 4790 local {local} noudpcsum \
                 nolearning df set"
            ),
            format!("ip link set hand-vx mtu {mtu} master hand up"),
            format!("bridge fdb append 00:00:00:00:00:00 dev hand-vx dst {remote}"),
            format!(
                "ip link add hand-ve mtu {mtu} type veth peer name eth1 mtu {mtu} netns {full}"
            ),
            "ip link set hand-ve master hand up".to_owned(),
        ];
        if encrypted {
            for (from, to, spi, byte) in [
                (local, remote, 0x9001 + index, 1 + index),
                (remote, local, 0x9002 - index, 2 - index),
            ] {
                lines.push(format!(
                    "ip xfrm state add src {from} dst {to} proto esp spi {spi:#x} reqid 9 \
                     mode transport replay-window 2048 flag esn \
                     aead 'rfc4106(gcm(aes))' {} 128",
                    key(u8::try_from(byte)?)
                ));
            }
            lines.push(format!(
                "ip xfrm policy add src {local}/32 dst {remote}/32 proto udp dport 4790 dir out \
                 tmpl src {local} dst {remote} proto esp spi {:#x} reqid 9 mode transport",
                0x9001 + index
            ));
        }
        host.netns().exec(&["bash", "-c", &lines.join("\n")])?.success()?;
        inner[index].ip(&format!("addr add {address}/24 dev eth1"))?;
        inner[index].ip("link set eth1 up")?;
    }
    let ping = ["ping", "-n", "-c", "1", "-W", "2", "10.99.0.2"];
    weft_bench::sandbox::wait_until("the path built by hand", Duration::from_secs(20), || {
        inner[0].exec(&ping).is_ok_and(|output| output.status.success())
    })?;
    Ok(inner)
}

#[test]
fn the_daemon_does_nothing_while_gigabytes_pass() -> anyhow::Result<()> {
    let trusted = ["--engine", "kernel", "--trusted-subnets", "192.0.2.0/24"];
    let stage = Stage::of_super_packets(2)?.launched(&[&trusted, &trusted])?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let gigabytes = if is_soak() { "10G" } else { "2G" };
    idle_under(&stage, &one, &two, &["-n", gigabytes])
}

#[test]
fn the_daemon_does_nothing_while_encrypted_traffic_passes() -> anyhow::Result<()> {
    let kernel = ["--engine", "kernel"];
    let stage = Stage::pair(&kernel, &kernel)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    idle_under(&stage, &one, &two, &["-t", if is_soak() { "120" } else { "20" }])
}

fn idle_under(
    stage: &Stage,
    one: &Container,
    two: &Container,
    arguments: &[&str],
) -> anyhow::Result<()> {
    const IDLE_S: u64 = 10;
    let _server = Server::start(two)?;
    let works =
        || -> anyhow::Result<Vec<Work>> { stage.sandbox().hosts().iter().map(Work::of).collect() };
    let reads = || -> anyhow::Result<Vec<u64>> {
        stage.sandbox().hosts().iter().map(|host| counter(host, "tap_reads")).collect()
    };
    let reads_before = reads()?;
    let before = works()?;
    std::thread::sleep(Duration::from_secs(IDLE_S));
    let idle: Vec<Work> =
        works()?.iter().zip(&before).map(|(now, then)| now.since(*then)).collect();
    let packets_before = underlay_packets(stage.host(0))?;
    let start = Instant::now();
    let before = works()?;
    let report = iperf::run(one, two.ipv4()?.into(), arguments)?;
    let seconds = start.elapsed().as_secs_f64();
    let busy: Vec<Work> =
        works()?.iter().zip(&before).map(|(now, then)| now.since(*then)).collect();
    let bytes = report["end"]["sum_received"]["bytes"].as_f64().unwrap_or_default();
    let packets = underlay_packets(stage.host(0))? - packets_before;
    for (index, (idle, busy)) in idle.iter().zip(&busy).enumerate() {
        let per_second = |work: &Work, seconds: f64| {
            format!(
                "{:.1} ticks and {:.1} waits",
                work.ticks as f64 / seconds,
                work.waits as f64 / seconds
            )
        };
        figure(
            &format!("host{} daemon a second", index + 1),
            format!(
                "idle {}, under {:.2} GB ({packets} packets) in {seconds:.0} s {}",
                per_second(idle, IDLE_S as f64),
                bytes / 1e9,
                per_second(busy, seconds)
            ),
        );
        let idle_ticks = idle.ticks as f64 / IDLE_S as f64;
        let busy_ticks = busy.ticks as f64 / seconds;
        assert!(busy_ticks <= idle_ticks * 2.0 + TICKS_MORE_PER_S_MAX as f64, "{idle:?} {busy:?}");
        // A daemon that handled packets would have waited for them, one by one or in batches of 64.
        let waits = busy.waits as f64 - idle.waits as f64 * seconds / IDLE_S as f64;
        let allowed = packets as f64 / 64.0 + 50.0 * seconds;
        assert!(waits < allowed, "{waits} waits for {packets} packets in {seconds:.0} s");
    }
    for (now, then) in reads()?.iter().zip(reads_before) {
        assert!(now - then < 200, "{} super-packets passed the vector engine", now - then);
    }
    Ok(())
}

/// Packets that crossed a host's underlay device, in both directions; a super-packet counts as one.
fn underlay_packets(host: &Host) -> anyhow::Result<u64> {
    let words = ["ip", "-j", "-s", "link", "show", "dev", "eth0"];
    let links = host.netns().exec(&words)?.success()?.json()?;
    let count = |direction: &str| links[0]["stats64"][direction]["packets"].as_u64();
    let both = count("rx").zip(count("tx")).map(|(rx, tx)| rx + tx);
    both.ok_or_else(|| anyhow::anyhow!("no counters in {links}"))
}
