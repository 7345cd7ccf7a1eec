//! `weft bench`: Weft and others side by side between two hosts on this machine.
//!
//! All rows stand ready at the same time; each round measures every row once, one after the other,
//! and the figures are medians over the rounds. So a slow minute of the machine meets all alike.

pub mod chart;
pub mod machine;
pub mod measure;
pub mod peer;
pub mod report;
pub mod rows;
pub mod stats;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use self::machine::Machine;
use self::measure::{Lengths, Sample, Servers};
use self::report::{Report, ReportRow};
use self::rows::{Row, WireguardGo};
use crate::sandbox::{self, Container, Sandbox, SandboxError, SandboxOptions, Underlay, progress};

/// Rounds that are measured where nothing else is asked for.
const ROUNDS: usize = 5;
/// Seconds of a TCP run where nothing else is asked for.
const TCP_SECONDS: u64 = 3;

/// Which underlays are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Underlays {
    /// The veth pair as it is: super-packets cross it whole
    Veth,
    /// Real datagrams cross: segmentation offloads off, GRO on
    Wire,
    /// Both, one after the other
    Both,
}

impl Underlays {
    fn list(self) -> &'static [Underlay] {
        match self {
            Self::Veth => &[Underlay::Veth],
            Self::Wire => &[Underlay::Wire],
            Self::Both => &[Underlay::Veth, Underlay::Wire],
        }
    }
}

/// What `weft bench` measures, and where the figures go.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchOptions {
    /// One round with short runs, veth only: a look, not a result
    #[arg(long, conflicts_with = "full")]
    pub quick: bool,
    /// Long runs: five rounds of ten seconds, both underlays
    #[arg(long)]
    pub full: bool,
    /// Rounds; the figures are medians over them
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// Seconds of each TCP run
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: Option<u64>,
    /// Write the figures as JSON to a file, or to standard output
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub json: Option<Option<PathBuf>>,
    /// Write the chart to a file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write table, ratios and machine as Markdown to a file
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Rows to measure, of: direct, vxlan, weft-esp-userspace, wireguard-go
    #[arg(long, value_delimiter = ',', value_parser = rows::ALL)]
    pub rows: Option<Vec<String>>,
    /// Underlays to measure
    #[arg(long)]
    pub underlay: Option<Underlays>,
}

/// The order of the work: rows, rounds and lengths.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) rows: Vec<&'static str>,
    pub(crate) underlays: &'static [Underlay],
    pub(crate) rounds: usize,
    pub(crate) lengths: Lengths,
}

impl BenchOptions {
    fn plan(&self) -> Plan {
        let (rounds, seconds, underlays) = match (self.quick, self.full) {
            (true, _) => (1, 2, Underlays::Veth),
            (_, true) => (ROUNDS, 10, Underlays::Both),
            _ => (ROUNDS, TCP_SECONDS, Underlays::Both),
        };
        let tcp_seconds = self.seconds.unwrap_or(seconds);
        let wanted = |name: &&str| match &self.rows {
            Some(rows) => rows.iter().any(|row| row == name),
            None => true,
        };
        Plan {
            rows: rows::ALL.into_iter().filter(wanted).collect(),
            underlays: self.underlay.unwrap_or(underlays).list(),
            rounds: self.rounds.map_or(rounds, |rounds| rounds as usize),
            lengths: Lengths {
                tcp_seconds,
                rr_seconds: (tcp_seconds as f64 / 2.0).clamp(1.0, 5.0),
                trial_seconds: if self.full { 1.0 } else { 0.5 },
                small_datagrams: true,
            },
        }
    }
}

/// Runs the benchmark and writes what was asked for. All that it made is removed at its end.
///
/// # Errors
/// The first step that did not work: then nothing is written.
pub fn run(options: &BenchOptions) -> anyhow::Result<()> {
    require_programs()?;
    let plan = options.plan();
    progress::step("making two hosts, joined by a veth pair");
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let binary = own_binary()?;
    let containers = match plan.rows.contains(&rows::WEFT) {
        true => Some(start_weft(&sandbox)?),
        false => None,
    };
    let pair = containers.as_ref().map(|[client, server]| (client, server));
    let report = compare(&sandbox, &binary, pair, &plan)?;
    drop(sandbox);
    write_files(&report, options.json.as_ref().and_then(Option::as_deref), options.svg.as_deref())?;
    if let Some(file) = &options.markdown {
        write_file(file, &report.markdown())?;
    }
    if options.json == Some(None) {
        progress::print(&format!("{}\n", to_json(&report)?));
    } else {
        progress::print(&format!(
            "{}\n{}{}",
            report.table(),
            report.ratios(),
            report.machine_text()
        ));
    }
    Ok(())
}

/// Sets the rows up, measures them in turns, and takes them down.
pub(crate) fn compare(
    sandbox: &Sandbox,
    binary: &str,
    containers: Option<(&Container, &Container)>,
    plan: &Plan,
) -> Result<Report, SandboxError> {
    let mut machine = Machine::here();
    let rows = set_up(sandbox, containers, plan, &mut machine)?;
    machine.commands.append(&mut commands(plan));
    for row in &rows {
        machine.commands.insert(format!("row {}", row.name), row.setup.clone());
    }
    let mut report = Report { machine, rows: Vec::new() };
    for underlay in plan.underlays {
        sandbox.set_underlay(*underlay)?;
        let samples = measure_underlay(&rows, *underlay, binary, plan)?;
        for (row, samples) in rows.iter().zip(&samples) {
            report.rows.push(ReportRow::of(row.name, underlay.name(), row.mtu, samples));
        }
    }
    sandbox.set_underlay(Underlay::Veth)?;
    if let Some(row) = rows.iter().find(|row| row.name == rows::VXLAN) {
        rows::remove_vxlan(sandbox, row)?;
    }
    Ok(report)
}

/// Fails early where a program that the measurements need is missing.
pub(crate) fn require_programs() -> Result<(), SandboxError> {
    sandbox::require("iperf3", "iperf3")?;
    sandbox::require("ping", "iputils-ping")
}

/// The running program, which is also the benchmark's other ends.
pub(crate) fn own_binary() -> Result<String, SandboxError> {
    let path = match std::env::var_os("WEFT_BIN") {
        Some(binary) => PathBuf::from(binary),
        None => std::env::current_exe().map_err(|source| SandboxError::Io {
            what: "find the running program".to_owned(),
            source,
        })?,
    };
    Ok(path.to_string_lossy().into_owned())
}

/// Writes JSON and chart where files were named.
pub(crate) fn write_files(
    report: &Report,
    json: Option<&Path>,
    svg: Option<&Path>,
) -> Result<(), SandboxError> {
    if let Some(file) = json {
        write_file(file, &format!("{}\n", to_json(report)?))?;
    }
    if let Some(file) = svg {
        write_file(file, &chart::svg(report))?;
    }
    Ok(())
}

fn start_weft(sandbox: &Sandbox) -> Result<[Container; 2], SandboxError> {
    progress::step("starting a daemon on each host and attaching a container to each");
    sandbox.launch_all(&[])?;
    Ok([sandbox.host(0).add_container("a")?, sandbox.host(1).add_container("b")?])
}

fn set_up(
    sandbox: &Sandbox,
    containers: Option<(&Container, &Container)>,
    plan: &Plan,
    machine: &mut Machine,
) -> Result<Vec<Row>, SandboxError> {
    let mut set = Vec::new();
    let weft = match containers.filter(|_| plan.rows.contains(&rows::WEFT)) {
        Some((client, server)) => Some(rows::weft(sandbox, client, server)?),
        None => None,
    };
    let overlay_mtu = weft.as_ref().map_or(OVERLAY_MTU_BYTES, |row| row.mtu);
    let mut weft = weft;
    for name in &plan.rows {
        match *name {
            rows::DIRECT => set.push(rows::direct(sandbox)),
            rows::VXLAN => set.push(rows::vxlan(sandbox, overlay_mtu)?),
            rows::WIREGUARD_GO => match rows::wireguard_go(sandbox)? {
                WireguardGo::Row { row, version } => {
                    machine.versions.insert(rows::WIREGUARD_GO.to_owned(), version);
                    set.push(*row);
                }
                WireguardGo::Missing(why) => {
                    progress::note(&format!("row {name} left out: {why}"));
                    machine.versions.insert((*name).to_owned(), format!("left out: {why}"));
                }
            },
            _ => set.extend(weft.take()),
        }
    }
    for row in &set {
        measure::reach(row, row.server_address)?;
    }
    Ok(set)
}

/// The container MTU of a Weft network over 1500 bytes (DESIGN section 4), where no Weft row says it.
const OVERLAY_MTU_BYTES: u32 = 1388;

fn measure_underlay(
    rows: &[Row],
    underlay: Underlay,
    binary: &str,
    plan: &Plan,
) -> Result<Vec<Vec<Sample>>, SandboxError> {
    let mut samples: Vec<Vec<Sample>> = rows.iter().map(|_| Vec::new()).collect();
    for round in 1..=plan.rounds {
        for (row, samples) in rows.iter().zip(&mut samples) {
            progress::step(&format!(
                "{}: round {round} of {}, {}",
                underlay.name(),
                plan.rounds,
                row.name
            ));
            let mut servers = Servers::start(row, binary)?;
            let sample = measure::measure(row, &mut servers, binary, plan.lengths)?;
            progress::note(&format!(
                "TCP {:.2} and {:.2} Gbit/s, {:.3} core-s/Gbit, UDP {:.2} Gbit/s, RR {:.0} per s",
                sample.tcp1_gbps,
                sample.tcp4_gbps,
                sample.core_s_per_gbit,
                sample.udp_gbps,
                sample.rr_tps
            ));
            samples.push(sample);
        }
    }
    Ok(samples)
}

fn commands(plan: &Plan) -> BTreeMap<String, String> {
    let Lengths { tcp_seconds, rr_seconds, trial_seconds, small_datagrams } = plan.lengths;
    let flood = |size: usize| {
        format!(
            "weft bench-peer udp-flood --connect SERVER:7002 --size {size} --seconds {trial_seconds} --rate R \
             (R searched: the greatest with at most {} % lost)",
            measure::LOSS_MAX * 100.0
        )
    };
    let tcp =
        |streams| format!("iperf3 -J -c SERVER -p 5201 -C cubic -P {streams} -t {tcp_seconds}");
    let rr = format!("weft bench-peer rr-client --connect SERVER:7001 --seconds {rr_seconds}");
    let mut commands = BTreeMap::from([
        ("tcp1_gbps".to_owned(), tcp(1)),
        ("tcp4_gbps".to_owned(), tcp(4)),
        ("udp_gbps".to_owned(), flood(measure::UDP_PAYLOAD_BYTES)),
        ("rr_tps".to_owned(), rr),
        (
            "core_s_per_gbit".to_owned(),
            "busy time of the whole machine (/proc/stat) over the tcp1 run / gigabits carried"
                .to_owned(),
        ),
    ]);
    if small_datagrams {
        commands.insert("pps64".to_owned(), flood(measure::SMALL_PAYLOAD_BYTES));
    }
    if plan.underlays.contains(&Underlay::Wire) {
        let command = format!("ethtool -K eth0 {} (both ends)", Underlay::Wire.features());
        commands.insert("underlay wire".to_owned(), command);
    }
    commands
}

fn to_json(report: &Report) -> Result<String, SandboxError> {
    serde_json::to_string_pretty(report).map_err(|error| SandboxError::UnexpectedOutput {
        command: "weft bench".to_owned(),
        why: error.to_string(),
    })
}

fn write_file(file: &Path, text: &str) -> Result<(), SandboxError> {
    std::fs::write(file, text)
        .map_err(|source| SandboxError::Io { what: format!("write {}", file.display()), source })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchOptions,
    }

    fn options(words: &[&str]) -> Result<BenchOptions, clap::Error> {
        Line::try_parse_from([&["bench"], words].concat()).map(|line| line.bench)
    }

    #[test]
    fn five_rounds_of_all_rows_on_both_underlays_unless_told_otherwise() {
        let plan = options(&[]).unwrap().plan();
        assert_eq!((plan.rounds, plan.rows.as_slice()), (5, &rows::ALL[..]));
        assert_eq!(plan.underlays, [Underlay::Veth, Underlay::Wire]);
    }

    #[test]
    fn full_is_long_and_quick_is_short() {
        assert_eq!(options(&["--full"]).unwrap().plan().lengths.tcp_seconds, 10);
        let quick = options(&["--quick"]).unwrap().plan();
        assert_eq!((quick.rounds, quick.underlays), (1, &[Underlay::Veth][..]));
        assert!(options(&["--quick", "--full"]).is_err());
    }

    #[test]
    fn rows_keep_the_tables_order_and_unknown_ones_are_refused() {
        let plan = options(&["--rows", "wireguard-go,direct"]).unwrap().plan();
        assert_eq!(plan.rows, [rows::DIRECT, rows::WIREGUARD_GO]);
        assert!(options(&["--rows", "carrier-pigeon"]).is_err());
    }

    #[test]
    fn json_goes_to_standard_output_or_to_a_file() {
        assert_eq!(options(&[]).unwrap().json, None);
        assert_eq!(options(&["--json"]).unwrap().json, Some(None));
        assert_eq!(options(&["--json", "f"]).unwrap().json, Some(Some("f".into())));
    }
}
