//! Congestion marks and DSCP where the kernel engine moves packets at one end or at both.

use weft_bench::sandbox::{Container, Host, Netns};
use weft_lab::net::guest::Stage;
use weft_lab::net::nft_packets;

const KERNEL: [&str; 2] = ["--engine", "kernel"];
const VECTOR: [&str; 2] = ["--engine", "userspace"];
/// ESP, raw and in UDP to either engine.
const DATA: [&str; 2] = ["ip protocol esp", "udp dport { 6784, 6785 }"];
/// DSCP "expedited forwarding" and ECT(0), as ping takes them.
const EF_ECT0: &str = "0xba";
/// Pings at a time.
const PINGS: u64 = 3;

/// Counts packets of a chain by a few matches, each under a separate name.
struct Rules<'a>(&'a Netns);

impl<'a> Rules<'a> {
    /// Counts the packets that `packets` matches in `hook`; `mark` comes after the counting.
    fn load(
        stage: &Stage,
        netns: &'a Netns,
        hook: &str,
        packets: &[&str],
        mark: &str,
    ) -> anyhow::Result<Self> {
        const COUNTED: [(&str, &str); 4] = [
            ("ect0", "ip ecn ect0"),
            ("ce", "ip ecn ce"),
            ("ef", "ip dscp ef"),
            ("ef_ect0", "ip dscp ef ip ecn ect0"),
        ];
        let counters: String =
            COUNTED.iter().map(|(name, _)| format!("counter {name} {{ }}\n")).collect();
        let counts: String = COUNTED
            .iter()
            .map(|(name, packets)| format!("{packets} counter name {name}\n"))
            .collect();
        let jumps: String =
            packets.iter().map(|packets| format!("{packets} jump seen\n")).collect();
        let text = format!(
            "add table inet lab\ndelete table inet lab\ntable inet lab {{\n{counters}\
             chain seen {{\n{counts}{mark}\n}}\n\
             chain hooked {{\ntype filter hook {hook} priority 0\n{jumps}}}\n}}\n"
        );
        let file = stage.directory().join(format!("{}.nft", netns.name()));
        std::fs::write(&file, text)?;
        netns.exec(&["nft", "-f", &file.to_string_lossy()])?.success()?;
        Ok(Self(netns))
    }

    fn count(&self, name: &str) -> anyhow::Result<u64> {
        nft_packets(self.0, name)
    }
}

/// Pings with a TOS and gives the number that answered.
fn ping(from: &Container, to: &Container, tos: &str) -> anyhow::Result<u64> {
    let (count, to) = (PINGS.to_string(), to.ipv4()?.to_string());
    let words = ["ping", "-n", "-c", &count, "-i", "0.3", "-W", "8", "-Q", tos, &to];
    Ok(from.exec(&words)?.stdout.matches("bytes from").count() as u64)
}

/// From `one` on `host` to `two`: the outer marks, and what a mark set outside becomes.
fn one_way(
    stage: &Stage,
    host: &Host,
    (one, two): (&Container, &Container),
    engine: &str,
    copied: bool,
) -> anyhow::Result<()> {
    let pings = ["icmp type echo-request"];
    let outside = |mark| Rules::load(stage, host.netns(), "output", &DATA, mark);
    let inside = || Rules::load(stage, two.netns(), "input", &pings, "");
    let (out, arrived) = (outside("")?, inside()?);
    assert_eq!(ping(one, two, EF_ECT0)?, PINGS);
    assert_eq!(out.count("ef")?, if copied { PINGS } else { 0 }, "{engine}");
    assert!(out.count("ect0")? >= PINGS, "{engine}: ECN goes outside");
    assert_eq!(arrived.count("ef_ect0")?, PINGS, "{engine}: as it was sent");
    // A packet that has its mark already arrives with it, though kernel VXLAN says ECT(0) outside.
    let (out, arrived) = (outside("")?, inside()?);
    assert_eq!(ping(one, two, "0x03")?, PINGS);
    let said = if engine == "kernel" { "ect0" } else { "ce" };
    assert!(out.count(said)? >= PINGS, "{engine}: {said} around CE");
    assert_eq!(arrived.count("ce")?, PINGS, "{engine}: CE inside");
    // A full queue on the way.
    let (_out, arrived) = (outside("ip ecn set ce")?, inside()?);
    assert_eq!(ping(one, two, "0x02")?, PINGS);
    assert_eq!(arrived.count("ce")?, PINGS, "{engine}: ECT(0), marked");
    assert_eq!(ping(one, two, "0x00")?, 0, "{engine}: Not-ECT, marked");
    host.netns().exec(&["nft", "delete", "table", "inet", "lab"])?.success()?;
    Ok(())
}

fn both_ways(here: &[&str], there: &[&str], copied: bool) -> anyhow::Result<()> {
    let stage = Stage::pair(here, there)?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    one_way(&stage, stage.host(0), (&one, &two), here[1], copied)?;
    one_way(&stage, stage.host(1), (&two, &one), there[1], copied)
}

#[test]
fn between_kernel_engines() -> anyhow::Result<()> {
    both_ways(&KERNEL, &KERNEL, false)
}

#[test]
fn between_kernel_and_vector_engine() -> anyhow::Result<()> {
    both_ways(&KERNEL, &VECTOR, false)
}

#[test]
fn with_the_dscp_copied() -> anyhow::Result<()> {
    let with = |engine: [&'static str; 2]| [&engine[..], &["--copy-dscp"]].concat();
    both_ways(&with(KERNEL), &with(VECTOR), true)
}

/// An ODP tunnel copies ECN, and has one DSCP for all.
#[test]
fn on_odp() -> anyhow::Result<()> {
    let odp = ["--engine", "kernel", "--switch", "odp", "--copy-dscp"];
    both_ways(&odp, &odp, false)
}
