//! Every pairing of engines carries everything, over either switch, AEAD and outer family.
//!
//! Unless `WEFT_SOAK` is set, the rows of an orthogonal array: every value of each factor meets every
//! value of each other one. With it, the full product.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use weft_bench::sandbox::{Container, Host, Running};
use weft_lab::net::guest::stage::{is_on, wait_path};
use weft_lab::net::guest::{Outer, SETTLE_LIMIT, Stage, figure, host};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{address_pairs, counter, is_soak, namespace, probe};

const ENGINES: [&str; 2] = ["userspace", "kernel"];
const SWITCHES: [&str; 2] = ["bridge", "odp"];
const CIPHERS: [&str; 2] = ["aes-256-gcm", "chacha20-poly1305"];
const OUTERS: [Outer; 2] = [Outer::V4, Outer::V6];
/// How many segments' checksums are looked at.
const CHECKSUMS_JUDGED: usize = 20;
/// Bytes that iperf3 sends in one direction.
const IPERF_BYTES: &str = "3M";

#[derive(Clone, Copy, Debug)]
struct Row {
    engines: [usize; 2],
    switches: [usize; 2],
    cipher: usize,
    outer: usize,
}

/// The rows for a pairing: those of the array L8 (4^1 2^4), whose columns are sums of three bits; or all rows.
fn rows(engines: [usize; 2]) -> Vec<Row> {
    let [a, b] = engines;
    if !is_soak() {
        let row = |c: usize| Row { engines, switches: [c, a ^ c], cipher: b ^ c, outer: a ^ b ^ c };
        return (0..2).map(row).collect();
    }
    let row = |bits: usize| Row {
        engines,
        switches: [bits & 1, bits >> 3 & 1],
        cipher: bits >> 1 & 1,
        outer: bits >> 2 & 1,
    };
    (0..16).map(row).collect()
}

#[test]
fn two_rows_of_each_pairing_cover_every_pair_of_values() {
    let all: Vec<Row> = (0..4)
        .flat_map(|pairing| {
            let [a, b] = [pairing >> 1, pairing & 1];
            (0..2).map(move |c| Row {
                engines: [a, b],
                switches: [c, a ^ c],
                cipher: b ^ c,
                outer: a ^ b ^ c,
            })
        })
        .collect();
    let factors = |row: &Row| {
        let pairing = row.engines[0] * 2 + row.engines[1];
        [pairing, row.switches[0], row.switches[1], row.cipher, row.outer]
    };
    for one in 0..5 {
        for other in 0..one {
            let seen: std::collections::BTreeSet<_> =
                all.iter().map(|row| (factors(row)[one], factors(row)[other])).collect();
            let wanted = if other == 0 { 8 } else { 4 };
            assert_eq!(seen.len(), wanted, "factors {one} and {other}: {seen:?}");
        }
    }
}

#[test]
fn kernel_to_kernel() -> anyhow::Result<()> {
    pairing([1, 1])
}

#[test]
fn kernel_to_userspace() -> anyhow::Result<()> {
    pairing([1, 0])
}

#[test]
fn userspace_to_kernel() -> anyhow::Result<()> {
    pairing([0, 1])
}

#[test]
fn userspace_to_userspace() -> anyhow::Result<()> {
    pairing([0, 0])
}

/// Runs every row of a pairing, and reports all that failed.
fn pairing(engines: [usize; 2]) -> anyhow::Result<()> {
    let mut failures = Vec::new();
    for row in rows(engines) {
        let name = row.name();
        weft_bench::sandbox::progress::step(&name);
        let start = Instant::now();
        match row.run() {
            Ok(()) => figure(&name, format!("{:.1} s", start.elapsed().as_secs_f64())),
            Err(error) => {
                weft_bench::sandbox::progress::note(&format!("failed: {error:?}"));
                failures.push(format!("{name}: {error:?}"));
            }
        }
    }
    anyhow::ensure!(failures.is_empty(), "{}", failures.join("\n\n"));
    Ok(())
}

impl Row {
    fn name(&self) -> String {
        format!(
            "{}/{} on {}/{}, {}, outer {:?}",
            ENGINES[self.engines[0]],
            ENGINES[self.engines[1]],
            SWITCHES[self.switches[0]],
            SWITCHES[self.switches[1]],
            CIPHERS[self.cipher],
            OUTERS[self.outer]
        )
    }

    fn run(&self) -> anyhow::Result<()> {
        let mtu = weft_bench::sandbox::UNDERLAY_MTU_BYTES;
        let stage = Stage::with(2, OUTERS[self.outer], mtu)?;
        for index in 0..2 {
            let [engine, switch] = [ENGINES[self.engines[index]], SWITCHES[self.switches[index]]];
            let words = ["--engine", engine, "--switch", switch, "--cipher", CIPHERS[self.cipher]];
            stage.launch(index, &words)?;
        }
        self.check_paths(&stage)?;
        let (one, two) = stage.containers()?;
        stage.reach(&one, &two)?;
        let before = [tap_reads(stage.host(0))?, tap_reads(stage.host(1))?];
        for (index, (from, to)) in [(1, (&one, &two)), (0, (&two, &one))] {
            let watch = self.watch_checksums(&stage, index)?;
            carry(from, to).map_err(|error| error.context(format!("to host{}", index + 1)))?;
            watch.map_or(Ok(()), ChecksumWatch::finish)?;
        }
        for index in 0..2 {
            let host = stage.host(index);
            let through_daemon = tap_reads(host)? - before[index];
            // The vector engine reads only frames that the bridge floods to all its ports.
            let in_kernel = ENGINES[self.engines[index]] == "kernel";
            anyhow::ensure!(
                in_kernel == (through_daemon < 200),
                "{through_daemon} reads of the daemon on {}",
                host.nickname()
            );
            if in_kernel {
                anyhow::ensure!(host::guard_dropped_all(host)? == 0, "packets left without IPsec");
            }
        }
        self.check_paths(&stage)
    }

    /// Watches a host's kernel at the point where it takes a vector engine's packets.
    fn watch_checksums(
        &self,
        stage: &Stage,
        index: usize,
    ) -> anyhow::Result<Option<ChecksumWatch>> {
        if [self.engines[index], self.engines[1 - index]].map(|it| ENGINES[it])
            != ["kernel", "userspace"]
        {
            return Ok(None);
        }
        let of_bridge = SWITCHES[self.switches[index]] == "bridge";
        let device = match OUTERS[self.outer] {
            Outer::V6 if of_bridge => "weft-vxlan6",
            _ => "weft-vxlan",
        };
        ChecksumWatch::start(stage.host(index), device).map(Some)
    }

    fn check_paths(&self, stage: &Stage) -> anyhow::Result<()> {
        for (index, other) in [(0, 1), (1, 0)] {
            let [engine, remote] = [index, other].map(|index| ENGINES[self.engines[index]]);
            let (host, peer) = (stage.host(index), stage.host(other));
            let path = wait_path(host, peer, "the pairing", SETTLE_LIMIT, is_on(engine, remote))?;
            let raw = engine == "kernel" && remote == "kernel";
            let wanted = [
                ("format", "esp"),
                ("encapsulation", if raw { "raw" } else { "udp" }),
                ("switch", SWITCHES[self.switches[index]]),
                ("cipher", CIPHERS[self.cipher]),
            ];
            for (field, value) in wanted {
                anyhow::ensure!(path[field] == value, "{field} is not {value}: {path}");
            }
            anyhow::ensure!(path["encrypted"] == true, "{path}");
            let address = path["address"].as_str().unwrap_or_default();
            let is_v6 = address.contains("2001:db8");
            anyhow::ensure!(is_v6 == (stage.outer() == Outer::V6), "outer family: {path}");
        }
        Ok(())
    }
}

/// Segments from a vector engine that arrive at a kernel engine: tcpdump judges their checksums.
struct ChecksumWatch(Running);

impl ChecksumWatch {
    fn start(host: &Host, device: &str) -> anyhow::Result<Self> {
        let count = CHECKSUMS_JUDGED.to_string();
        let words = ["tcpdump", "-i", device, "-Q", "in", "-nn", "-vv", "-Z", "root", "-c", &count];
        // Segments with payload alone.
        let words = [&words[..], &["--immediate-mode", "tcp and greater 500"]].concat();
        let mut tcpdump = host.netns().spawn(&words)?;
        tcpdump.line_with("listening on", SETTLE_LIMIT)?;
        Ok(Self(tcpdump))
    }

    /// The sender left the checksums to this host, whose kernel leaves them to its devices.
    fn finish(mut self) -> anyhow::Result<()> {
        self.0.wait(SETTLE_LIMIT)?;
        let mut lines = Vec::new();
        while let Ok(line) = self.0.line(Duration::from_millis(200)) {
            lines.push(line);
        }
        let left = lines.iter().filter(|line| line.contains("(incorrect -> 0x")).count();
        anyhow::ensure!(left == CHECKSUMS_JUDGED, "{left} checksums were left partial: {lines:?}");
        Ok(())
    }
}

fn tap_reads(host: &Host) -> anyhow::Result<u64> {
    counter(host, "tap_reads")
}

/// Ping, iperf3, 60,000 bytes in one datagram, broadcast and multicast.
fn carry(from: &Container, to: &Container) -> anyhow::Result<()> {
    let addresses = address_pairs(from, to)?;
    let (here, there) = (namespace(from), namespace(to));
    for (mine, theirs) in addresses {
        from.ping(theirs)?;
        for length in [1, 1_300, 60_000] {
            probe::datagram_arrives((&here, mine), (&there, theirs), length)
                .map_err(|error| anyhow::anyhow!("{length} bytes to {theirs}: {error}"))?;
        }
    }
    let server = Server::start(to)?;
    for (_, theirs) in addresses {
        let start = Instant::now();
        let report = iperf::run(from, theirs, &["-n", IPERF_BYTES])?;
        anyhow::ensure!(iperf::received_bps(&report) > 0.0, "{report}");
        anyhow::ensure!(start.elapsed() < Duration::from_secs(60), "slow: {report}");
    }
    drop(server);
    groups(from, to)
}

fn groups(from: &Container, to: &Container) -> anyhow::Result<()> {
    let (here, there) = (namespace(from), namespace(to));
    let receiver = probe::udp_in(&there, (Ipv4Addr::UNSPECIFIED, 5001).into())?;
    let sender = probe::udp_in(&here, (from.ipv4()?, 0).into())?;
    sender.set_broadcast(true)?;
    sender.send_to(b"to all", (Ipv4Addr::new(10, 47, 255, 255), 5001))?;
    probe::expect_datagram(&receiver, b"to all")
        .map_err(|error| anyhow::anyhow!("broadcast: {error}"))?;

    let group = Ipv4Addr::new(239, 1, 2, 3);
    let receiver = probe::multicast_receiver(&there, to.ipv4()?, group, 5002)?;
    sender.send_to(b"to a group", (group, 5002))?;
    probe::expect_datagram(&receiver, b"to a group")
        .map_err(|error| anyhow::anyhow!("multicast: {error}"))?;

    let group: Ipv6Addr = "ff05::1:3".parse()?;
    let receiver = probe::multicast_receiver6(&there, probe::interface_index(to)?, group, 5003)?;
    let sender = probe::udp_in(&here, (from.ipv6()?, 0).into())?;
    sender.send_to(b"to a group of IPv6", (group, 5003))?;
    probe::expect_datagram(&receiver, b"to a group of IPv6")
        .map_err(|error| anyhow::anyhow!("multicast over IPv6: {error}"))?;
    Ok(())
}
