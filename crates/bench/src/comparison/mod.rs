//! `./dev bench`: Weft and others side by side between two hosts on this machine.
//!
//! All rows stand ready at the same time. Each round measures every row once, one after the other; the figures are
//! medians over the rounds. So a slow minute of the machine meets all alike.

pub mod attach;
pub mod chart;
pub mod cpu;
pub mod dco;
mod debian;
mod ends;
pub mod engine;
pub mod fair;
mod figures;
pub mod gateway;
pub mod install;
pub mod ipsec;
pub mod ladder;
pub mod machine;
pub mod measure;
mod nebula;
pub mod others;
mod page;
pub mod peer;
pub mod pressure;
pub mod report;
pub mod rows;
pub mod stats;
pub mod tunnels;
mod vpncloud;
pub mod weave;
mod wireguard;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use weft_packet::esp;

use self::figures::Kept;
use self::machine::Machine;
use self::measure::{Lengths, Servers};
use self::others::Outside;
use self::report::{Report, Rounds};
use self::rows::{Row, Way, WeftPair};
use self::weave::WeaveRow;
use crate::sandbox::{
    self, Container, Sandbox, SandboxError, SandboxOptions, UNDERLAY_MTU_BYTES, Underlay, progress,
};

/// Rounds that are measured where nothing else is asked for.
const ROUNDS: usize = 6;
/// Seconds each way with each load when the engine is measured alone.
const ENGINE_SECONDS: u64 = 3;
/// Seconds of a TCP run where nothing else is asked for.
const TCP_SECONDS: u64 = 3;

/// The other link that a full run measures.
const JUMBO_MTU_BYTES: u32 = 9_000;

/// The underlays to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Underlays {
    /// The veth pair as it is; super-packets cross it whole
    Veth,
    /// Real datagrams: segmentation offloads off, GRO on
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

/// The tables that `./dev bench` can measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Table {
    /// Systems side by side between two hosts
    Systems,
    /// The vector engine alone: sealing and opening on one core, without the cost of devices
    Engine,
    /// The vector engine step by step: single packets, super-packets, more workers and their queues
    Vpp,
    /// One worker to eight, as far as this machine has cores
    Scale,
    /// Three hosts that send to a fourth at once, and the share of each
    Fair,
    /// More load than the path carries: queues, retransmissions, and drops with their place
    Pressure,
    /// qperf's bandwidth, latency and processor time, as Weave Net showed its fast datapath
    Weave,
    /// Data channel devices and OpenVPN without one, as OpenVPN's paper showed its offload
    Dco,
    /// Attach and detach of the 1st, the 101st and the 1,001st container of a host
    Attach,
    /// The gateway for OpenVPN clients beside OpenVPN's server: handshakes, traffic, a flood, idle clients
    Gateway,
}

/// The measurements of `./dev bench`, and the destination of the figures.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchOptions {
    /// Table to measure
    #[arg(long, value_enum, default_value_t = Table::Systems)]
    pub table: Table,
    /// One round of short runs over veth, about five minutes; too short for a result
    #[arg(long, conflicts_with = "full")]
    pub quick: bool,
    /// Six rounds of ten seconds over both underlays, with MTU 1500 and 9000; adds boringtun, gotatun,
    /// fastd, tinc, quicktun, n2n and yggdrasil
    #[arg(long)]
    pub full: bool,
    /// Number of rounds, 1 to 100; figures are medians over them
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// Seconds per TCP run, 1 to 600
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: Option<u64>,
    /// Write the figures as JSON to FILE (without FILE: to standard output)
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub json: Option<Option<PathBuf>>,
    /// Write the chart to FILE
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write table, ratios and machine as Markdown to FILE
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Keep the run as docs/figures/TABLE-NAME.json and make docs/performance.md anew; NAME stands for the
    /// machine, such as epyc-2
    #[arg(long, value_name = "NAME", conflicts_with = "quick", value_parser = figures::parse_name)]
    pub keep: Option<String>,
    /// Make docs/performance.md and its chart from docs/figures and the page's template; measures nothing
    #[arg(long, exclusive = true)]
    pub page: bool,
    /// Rows to measure (default: all available here, except those that only --full adds)
    #[arg(long, value_delimiter = ',', value_parser = rows::ALL)]
    pub rows: Option<Vec<String>>,
    /// Underlays to measure
    #[arg(long)]
    pub underlay: Option<Underlays>,
    /// MTUs of the link between the hosts in bytes, 1400 to 9200
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1400..=9200))]
    pub mtu: Option<Vec<u32>>,
}

/// The order of the work: rows, rounds and lengths.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) rows: Vec<&'static str>,
    pub(crate) underlays: &'static [Underlay],
    /// The MTU of the link between the hosts, bytes.
    pub(crate) link_mtu: u32,
    pub(crate) rounds: usize,
    pub(crate) lengths: Lengths,
    /// Rows of Weft's that this machine does not have, and why.
    pub(crate) left_out: Vec<(&'static str, String)>,
}

impl BenchOptions {
    /// The table as `--table` names it.
    fn table_name(&self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self.table);
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The links of the main table.
    fn link_mtus(&self) -> &[u32] {
        let usual: &[u32] =
            if self.full { &[UNDERLAY_MTU_BYTES, JUMBO_MTU_BYTES] } else { &[UNDERLAY_MTU_BYTES] };
        self.mtu.as_deref().unwrap_or(usual)
    }

    fn plan(&self, link_mtu: u32) -> Plan {
        let (rounds, seconds, underlays) = match (self.quick, self.full) {
            (true, _) => (1, 2, Underlays::Veth),
            (_, true) => (ROUNDS, 10, Underlays::Both),
            _ => (ROUNDS, TCP_SECONDS, Underlays::Both),
        };
        let tcp_seconds = self.seconds.unwrap_or(seconds);
        let wanted = |name: &&str| match &self.rows {
            Some(rows) => rows.iter().any(|row| row == name),
            None if self.table == Table::Dco => rows::DCO.contains(name),
            None => {
                let everywhere = !rows::is_device(name) && *name != rows::IPSEC;
                everywhere && (self.full || !rows::FULL.contains(name))
            }
        };
        Plan {
            rows: rows::ALL.into_iter().filter(wanted).collect(),
            underlays: self.underlay.unwrap_or(underlays).list(),
            link_mtu,
            rounds: self.rounds.map_or(rounds, |rounds| rounds as usize),
            lengths: Lengths {
                tcp_seconds,
                rr_seconds: (tcp_seconds as f64 / 2.0).clamp(1.0, 5.0),
                trial_seconds: if self.full { 1.0 } else { 0.5 },
                small_datagrams: true,
                more: true,
            },
            left_out: Vec::new(),
        }
    }
}

/// Runs the benchmark and writes what was asked for. All that it made is removed at its end.
///
/// # Errors
/// The first step that did not work: then nothing is written.
pub fn run(options: &BenchOptions) -> anyhow::Result<()> {
    if options.page {
        return page::write(Path::new(page::DOCS));
    }
    if options.keep.is_some() {
        figures::require(Path::new(page::DOCS))?;
    }
    match options.table {
        Table::Engine => return engine_alone(options),
        Table::Weave => return weave_table(options),
        Table::Vpp | Table::Scale => return ladder_table(options),
        Table::Fair => return fair_table(options),
        Table::Pressure => return pressure_table(options),
        Table::Attach => return attach_table(options),
        Table::Gateway => return gateway_table(options),
        Table::Systems | Table::Dco => {}
    }
    require_programs()?;
    let binary = own_binary()?;
    let mut report = Report::default();
    for link_mtu in options.link_mtus() {
        let plan = options.plan(*link_mtu);
        let part = on_link(plan, |sandbox, pairs, plan| compare(sandbox, &binary, pairs, plan))?;
        report.rows.extend(part.rows);
        report.machine = part.machine.with_earlier(report.machine);
    }
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
    keep(options, &report)
}

/// Measures the engine alone and writes what was asked for.
fn engine_alone(options: &BenchOptions) -> anyhow::Result<()> {
    let seconds = options.seconds.unwrap_or(if options.quick { 1 } else { ENGINE_SECONDS });
    progress::step(&format!("the vector engine alone, {seconds} s each way with each load"));
    let engine = engine::measure(Duration::from_secs(seconds))?;
    let cores = engine::measure_cores(Duration::from_secs(seconds))?;
    let report = Report { machine: Machine::here(), engine, cores, ..Report::default() };
    let text = format!(
        "{}\n{}\n{}",
        engine::table(&report.engine),
        engine::cores_table(&report.cores),
        report.machine_text()
    );
    write_table(options, &report, text)
}

/// Measures what Weave Net's table shows and writes what was asked for.
fn weave_table(options: &BenchOptions) -> anyhow::Result<()> {
    sandbox::require("qperf", "qperf")?;
    let mut report = Report { machine: Machine::here(), ..Report::default() };
    for link_mtu in options.mtu.as_deref().unwrap_or(&weave::LINK_MTUS) {
        let mut plan = options.plan(*link_mtu);
        if options.rows.is_none() {
            plan.rows = rows::WEAVE.to_vec();
        }
        let Report { machine, weave, .. } = &mut report;
        let command = weave::command(plan.lengths.tcp_seconds);
        weave.extend(on_link(plan, |sandbox, pairs, plan| {
            let rows = set_up(sandbox, pairs, plan, machine)?;
            machine.commands.extend(setups(&rows));
            weave_rows(&rows, plan)
        })?);
        machine.commands.insert("qperf".to_owned(), command);
    }
    let (table, machine) = (weave::table(&report.weave), report.machine_text());
    let text = format!("{table}{}\n{machine}", weave::POST);
    write_table(options, &report, text)
}

/// Measures the vector engine step by step and writes what was asked for.
fn ladder_table(options: &BenchOptions) -> anyhow::Result<()> {
    require_programs()?;
    let machine = Machine::here();
    let cores = machine.cores;
    let (rungs, left_out, note) = match options.table {
        Table::Scale => {
            let (rungs, left_out) = ladder::curve(cores);
            (rungs, left_out, "")
        }
        _ => (ladder::LADDER.to_vec(), None, ladder::ARTICLE),
    };
    let plan = options.plan(options.mtu.as_deref().map_or(UNDERLAY_MTU_BYTES, |mtus| mtus[0]));
    let mut report =
        Report { machine, ladder: ladder::measure(&rungs, &plan)?, ..Report::default() };
    let commands = &mut report.machine.commands;
    let seconds = plan.lengths.tcp_seconds;
    let tcp = format!("iperf3 -J -c SERVER -p 5201 -C cubic -P STREAMS -t {seconds}");
    commands.insert("tcp".to_owned(), tcp);
    let launch = "weft launch --engine userspace --workers N (single packets: --no-offloads)";
    commands.insert("step".to_owned(), launch.to_owned());
    commands.extend(left_out.clone().map(|text| ("left out".to_owned(), text)));
    let left_out = left_out.map_or_else(String::new, |text| format!("\n{text}.\n"));
    let table = ladder::table(&report.ladder, cores);
    let text = format!("{table}{left_out}{note}\n{}", report.machine_text());
    write_table(options, &report, text)
}

/// Measures what each of several senders gets and writes what was asked for.
fn fair_table(options: &BenchOptions) -> anyhow::Result<()> {
    require_programs()?;
    let binary = own_binary()?;
    let plan = options.plan(options.mtu.as_deref().map_or(UNDERLAY_MTU_BYTES, |mtus| mtus[0]));
    let fair = fair::measure(&plan, &binary)?;
    let mut report = Report { machine: Machine::here(), fair, ..Report::default() };
    report.machine.commands.extend(fair::commands(&plan));
    let text = format!("{}\n{}", fair::table(&report.fair), report.machine_text());
    write_table(options, &report, text)
}

/// Measures what happens when more is sent than the path carries and writes what was asked for.
fn pressure_table(options: &BenchOptions) -> anyhow::Result<()> {
    require_programs()?;
    let binary = own_binary()?;
    let mut plan = options.plan(options.mtu.as_deref().map_or(UNDERLAY_MTU_BYTES, |mtus| mtus[0]));
    if options.rows.is_none() {
        plan.rows = pressure::ROWS.to_vec();
    }
    if options.underlay.is_none() {
        plan.underlays = Underlays::Veth.list();
    }
    let mut machine = Machine::here();
    machine.commands.extend(pressure::commands(&plan));
    let pressure = on_link(plan, |sandbox, pairs, plan| {
        let rows = set_up(sandbox, pairs, plan, &mut machine)?;
        machine.commands.extend(setups(&rows));
        pressure::measure(&rows, pairs, sandbox, &binary, plan)
    })?;
    let report = Report { machine, pressure, ..Report::default() };
    let text = format!("{}\n{}", pressure::table(&report.pressure), report.machine_text());
    write_table(options, &report, text)
}

/// Measures attach and detach, and writes what was asked for.
fn attach_table(options: &BenchOptions) -> anyhow::Result<()> {
    let usual = if options.quick { attach::QUICK_ROUNDS } else { attach::ROUNDS };
    let rounds = options.rounds.map_or(usual, |rounds| rounds as usize);
    let held = if options.quick { &attach::HELD[..2] } else { &attach::HELD[..] };
    let mut machine = Machine::here();
    machine.commands.extend(attach::commands());
    let report = Report { machine, attach: attach::measure(held, rounds)?, ..Report::default() };
    let text = format!("{}\n{}", attach::table(&report.attach), report.machine_text());
    write_table(options, &report, text)
}

/// Measures the gateway for OpenVPN clients beside OpenVPN's server, and writes what was asked for.
fn gateway_table(options: &BenchOptions) -> anyhow::Result<()> {
    let lengths = gateway::Lengths::of(options.quick, options.rounds, options.seconds);
    let mut machine = Machine::here();
    machine.commands.extend(gateway::commands(&lengths));
    machine.versions.extend(others::openvpn_version().map(|it| ("openvpn".to_owned(), it)));
    let gateway = gateway::measure(&lengths, &own_binary()?)?;
    let report = Report { machine, gateway, ..Report::default() };
    let text = format!("{}\n{}", gateway::table(&report.gateway), report.machine_text());
    write_table(options, &report, text)
}

fn weave_rows(rows: &[Row], plan: &Plan) -> Result<Vec<WeaveRow>, SandboxError> {
    let mut samples: Vec<Vec<weave::Sample>> = rows.iter().map(|_| Vec::new()).collect();
    for round in 1..=plan.rounds {
        for (row, samples) in rows.iter().zip(&mut samples) {
            progress::step(&format!("qperf: round {round} of {}, {}", plan.rounds, row.name));
            samples.push(weave::measure(row, plan.lengths.tcp_seconds)?);
        }
    }
    let rows = rows.iter().zip(&samples);
    Ok(rows.map(|(row, samples)| weave::row_of(row, plan.link_mtu, samples)).collect())
}

fn write_table(options: &BenchOptions, report: &Report, text: String) -> anyhow::Result<()> {
    if let Some(Some(file)) = &options.json {
        write_file(file, &format!("{}\n", to_json(report)?))?;
    }
    if let Some(file) = &options.markdown {
        write_file(file, &text)?;
    }
    let json = if options.json == Some(None) { Some(to_json(report)?) } else { None };
    progress::print(&json.map_or(text, |json| format!("{json}\n")));
    keep(options, report)
}

/// Keeps the run where that was asked for, and makes the page with it.
fn keep(options: &BenchOptions, report: &Report) -> anyhow::Result<()> {
    let Some(name) = &options.keep else { return Ok(()) };
    let docs = Path::new(page::DOCS);
    let kept = Kept::of(&options.table_name(), std::env::args().skip(1), report.clone());
    let file = kept.write(docs, name)?;
    page::write(docs)?;
    progress::note(&format!("kept as {}; docs/performance.md is made anew", file.display()));
    Ok(())
}

/// Makes hosts whose link has one MTU, and separate hosts for each of Weft's rows, then measures them.
/// Leaves out rows of an engine that this kernel lacks.
fn on_link<T>(
    mut plan: Plan,
    work: impl FnOnce(&Sandbox, &[WeftPair<'_>], &Plan) -> Result<T, SandboxError>,
) -> Result<T, SandboxError> {
    progress::step(&format!("making two hosts, joined by a veth pair of MTU {}", plan.link_mtu));
    let options = SandboxOptions { mtu: plan.link_mtu, ..SandboxOptions::default() };
    let sandbox = Sandbox::new(&options)?;
    let mut ours = Vec::new();
    for (row, way) in plan.rows.iter().filter_map(|row| Some((*row, rows::way_of(row)?))) {
        let sandbox = Sandbox::new(&options)?;
        match start_weft(&sandbox, way)? {
            Ok(containers) => ours.push((row, way, sandbox, containers)),
            Err(why) => plan.left_out.push((row, why)),
        }
    }
    let pairs: Vec<WeftPair<'_>> = ours
        .iter()
        .map(|(row, way, sandbox, [client, server])| WeftPair {
            row,
            way: *way,
            sandbox,
            client,
            server,
        })
        .collect();
    work(&sandbox, &pairs, &plan)
}

/// Sets the rows up, measures them in turns, and takes them down.
pub(crate) fn compare(
    sandbox: &Sandbox,
    binary: &str,
    pairs: &[WeftPair<'_>],
    plan: &Plan,
) -> Result<Report, SandboxError> {
    let mut machine = Machine::here();
    let offloads = weft_io::offload::self_test();
    let offloads = offloads.map_or_else(|error| error.to_string(), |found| found.to_string());
    machine.versions.insert("offloads".to_owned(), offloads);
    let rows = set_up(sandbox, pairs, plan, &mut machine)?;
    machine.commands.append(&mut commands(plan));
    machine.commands.extend(setups(&rows));
    let mut report = Report { machine, ..Report::default() };
    for underlay in plan.underlays {
        set_underlay(sandbox, pairs, *underlay)?;
        let measured = measure_underlay(&rows, *underlay, binary, plan)?;
        let name = match plan.link_mtu {
            UNDERLAY_MTU_BYTES => underlay.name().to_owned(),
            other => format!("{} {other}", underlay.name()),
        };
        for (row, rounds) in rows.iter().zip(&measured) {
            let (medians, note) = rounds.row(row.name, &name, row.mtu);
            report.rows.extend(medians);
            if let Some(note) = note {
                leave_out(&mut report.machine, row.name, &name, &note);
            }
        }
    }
    set_underlay(sandbox, pairs, Underlay::Veth)?;
    if let Some(row) = rows.iter().find(|row| row.name == rows::VXLAN) {
        rows::remove_vxlan(sandbox, row)?;
    }
    Ok(report)
}

/// Has packets cross all underlays in one way.
fn set_underlay(
    sandbox: &Sandbox,
    pairs: &[WeftPair<'_>],
    underlay: Underlay,
) -> Result<(), SandboxError> {
    let mut sandboxes = pairs.iter().map(|pair| pair.sandbox).chain([sandbox]);
    sandboxes.try_for_each(|sandbox| sandbox.set_underlay(underlay))
}

/// Fails early where a program that the measurements need is missing.
pub(crate) fn require_programs() -> Result<(), SandboxError> {
    sandbox::require("iperf3", "iperf3")?;
    sandbox::require("ping", "iputils-ping")
}

/// The program of the benchmark's other ends: `weft-bench`, beside the `weft` that is measured.
pub(crate) fn own_binary() -> Result<String, SandboxError> {
    let path = match std::env::var_os("WEFT_BIN") {
        Some(weft) => PathBuf::from(weft).with_file_name("weft-bench"),
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

/// Two daemons and a container of each, or the reason why this machine lacks the engine.
fn start_weft(sandbox: &Sandbox, way: Way) -> Result<Result<[Container; 2], String>, SandboxError> {
    let options = way.options();
    progress::step(&format!(
        "starting a daemon on each host and attaching a container to each: {}",
        options.join(" ")
    ));
    sandbox.launch_all(&options)?;
    let missing = &sandbox.host(0).weft_json(&["status"])?["engines_missing"][way.engine];
    if let Some(why) = missing.as_str() {
        return Ok(Err(why.to_owned()));
    }
    Ok(Ok([sandbox.host(0).add_container("a")?, sandbox.host(1).add_container("b")?]))
}

fn set_up(
    sandbox: &Sandbox,
    pairs: &[WeftPair<'_>],
    plan: &Plan,
    machine: &mut Machine,
) -> Result<Vec<Row>, SandboxError> {
    let mut set = Vec::new();
    let link_mtu = plan.link_mtu;
    let overlay_mtu = esp::inner_mtu(link_mtu as usize, esp::OVERHEAD_V6_UDP) as u32;
    let link = format!("a link of {link_mtu}");
    for name in &plan.rows {
        let outside = match *name {
            rows::DIRECT => {
                set.push(rows::direct(sandbox, link_mtu));
                continue;
            }
            rows::VXLAN => {
                set.push(rows::vxlan(sandbox, overlay_mtu)?);
                continue;
            }
            rows::GRE => others::gre(sandbox, link_mtu)?,
            rows::IPSEC => ipsec::ipsec(sandbox, link_mtu)?,
            rows::OPENVPN => others::openvpn(sandbox, link_mtu)?,
            device if rows::is_device(device) => dco::device(sandbox, device, link_mtu)?,
            tunnel if tunnels::is_tunnel(tunnel) => tunnels::tunnel(sandbox, tunnel, link_mtu),
            ours => {
                if let Some(pair) = pairs.iter().find(|pair| pair.row == ours) {
                    match rows::weft(*pair)? {
                        Ok(row) => {
                            set.push(row);
                            continue;
                        }
                        Err(why) => Outside::Missing(why),
                    }
                } else {
                    let why = plan.left_out.iter().find(|(row, _)| *row == ours);
                    Outside::Missing(why.map_or("not started", |(_, why)| why).to_owned())
                }
            }
        };
        match outside {
            Outside::Row { row, version } => {
                machine.versions.insert((*name).to_owned(), version);
                set.push(*row);
            }
            Outside::Missing(why) => leave_out(machine, name, &link, &format!("left out: {why}")),
        }
    }
    let mut ready = Vec::new();
    for row in set {
        match measure::reach(&row, row.server_address) {
            Ok(_) => ready.push(row),
            // A run of hours does not end with one of these.
            Err(error) if rows::FULL.contains(&row.name) => {
                leave_out(machine, row.name, &link, &format!("left out: {error}"));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(ready)
}

/// Says what of a row is not in the report and why, on which underlay or link.
fn leave_out(machine: &mut Machine, row: &str, on: &str, what: &str) {
    progress::note(&format!("row {row} on {on}: {what}"));
    machine.left_out.insert(format!("{row} on {on}"), what.to_owned());
}

fn measure_underlay(
    rows: &[Row],
    underlay: Underlay,
    binary: &str,
    plan: &Plan,
) -> Result<Vec<Rounds>, SandboxError> {
    let mut measured: Vec<Rounds> = rows.iter().map(|_| Rounds::default()).collect();
    for round in 1..=plan.rounds {
        for (row, rounds) in rows.iter().zip(&mut measured) {
            progress::step(&format!(
                "{}: round {round} of {}, {}",
                underlay.name(),
                plan.rounds,
                row.name
            ));
            let outcome = Servers::start(row, binary)
                .and_then(|mut servers| measure::measure(row, &mut servers, binary, plan.lengths));
            let sample = match outcome {
                Ok(sample) => sample,
                // A run of hours does not end with one of these.
                Err(error) if rows::FULL.contains(&row.name) => {
                    progress::note(&format!("{} left out of this round: {error}", row.name));
                    rounds.errors.push(error.to_string());
                    continue;
                }
                Err(error) => return Err(error),
            };
            progress::note(&format!(
                "TCP {:.2} and {:.2} Gbit/s, {:.3} core-s/Gbit, UDP {:.2} Gbit/s, RR {:.0} per s",
                sample.tcp1_gbps,
                sample.tcp4_gbps,
                sample.core_s_per_gbit,
                sample.udp_gbps,
                sample.rr_tps
            ));
            rounds.samples.push(sample);
        }
    }
    Ok(measured)
}

/// The setup of each row, for the report.
fn setups(rows: &[Row]) -> impl Iterator<Item = (String, String)> {
    rows.iter().map(|row| (format!("row {}", row.name), row.setup.clone()))
}

fn commands(plan: &Plan) -> BTreeMap<String, String> {
    let Lengths { tcp_seconds, rr_seconds, trial_seconds, small_datagrams, more } = plan.lengths;
    let flood = |size: usize| {
        format!(
            "weft-bench peer udp-flood --connect SERVER:7002 --size {size} --seconds {trial_seconds} --rate R \
             (R searched: the greatest with at most {} % lost)",
            measure::LOSS_MAX * 100.0
        )
    };
    let tcp =
        |streams| format!("iperf3 -J -c SERVER -p 5201 -C cubic -P {streams} -t {tcp_seconds}");
    let rr = format!("weft-bench peer rr-client --connect SERVER:7001 --seconds {rr_seconds}");
    let mut commands = BTreeMap::from([
        ("tcp1_gbps".to_owned(), tcp(1)),
        ("tcp4_gbps".to_owned(), tcp(4)),
        ("udp_gbps".to_owned(), flood(measure::UDP_PAYLOAD_BYTES)),
        (
            "core_s_per_gbit".to_owned(),
            "busy time of the whole machine (/proc/stat) over the tcp1 run / gigabits carried"
                .to_owned(),
        ),
    ]);
    if more {
        commands.insert("tcp8_gbps".to_owned(), tcp(8));
        let both =
            format!("iperf3 -J -c SERVER -p 5201 -C cubic --bidir -t {tcp_seconds}; the sum");
        commands.insert("tcp_both_gbps".to_owned(), both);
        commands.insert("load_tps".to_owned(), format!("{rr}, beside one TCP stream"));
    }
    commands.insert("rr_tps".to_owned(), rr);
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
        command: "./dev bench".to_owned(),
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

    /// Rows that the first table never measures, in the order of `rows::ALL`.
    const OF_OTHER_TABLES: [&str; 5] =
        [rows::IPSEC, rows::OVPN_USERSPACE, rows::OVPN_MP, rows::OVPN_PEERS, rows::OVPN_KERNEL];

    fn left_out(plan: &Plan) -> Vec<&'static str> {
        rows::ALL.into_iter().filter(|row| !plan.rows.contains(row)).collect()
    }

    #[test]
    fn six_rounds_of_all_rows_on_both_underlays_unless_told_otherwise() {
        let plan = options(&[]).unwrap().plan(1500);
        assert_eq!(plan.rounds, 6);
        assert_eq!(left_out(&plan), [&OF_OTHER_TABLES[..], &rows::FULL].concat());
        assert_eq!(plan.underlays, [Underlay::Veth, Underlay::Wire]);
        assert_eq!(options(&["--table", "dco"]).unwrap().plan(1500).rows, rows::DCO);
    }

    #[test]
    fn full_is_long_and_quick_is_short() {
        let full = options(&["--full"]).unwrap();
        assert_eq!(
            (full.plan(1500).lengths.tcp_seconds, full.link_mtus()),
            (10, &[1500, 9000][..])
        );
        assert_eq!(left_out(&full.plan(1500)), OF_OTHER_TABLES);
        assert_eq!(options(&[]).unwrap().link_mtus(), [1500]);
        let quick = options(&["--quick"]).unwrap().plan(1500);
        assert_eq!((quick.rounds, quick.underlays), (1, &[Underlay::Veth][..]));
        assert!(options(&["--quick", "--full"]).is_err());
    }

    #[test]
    fn rows_keep_the_tables_order_and_unknown_ones_are_refused() {
        let plan = options(&["--rows", "wireguard-go,direct"]).unwrap().plan(1500);
        assert_eq!(plan.rows, [rows::DIRECT, rows::WIREGUARD_GO]);
        assert_eq!(options(&["--rows", "tinc"]).unwrap().plan(1500).rows, [rows::TINC]);
        assert!(options(&["--rows", "carrier-pigeon"]).is_err());
    }

    #[test]
    fn a_look_is_not_kept_and_a_page_measures_nothing() {
        let kept = options(&["--table", "fair", "--keep", "epyc-2"]).unwrap();
        assert_eq!((kept.keep.as_deref(), kept.table_name().as_str()), (Some("epyc-2"), "fair"));
        assert!(options(&["--quick", "--keep", "epyc"]).is_err());
        assert!(options(&["--keep", "../x"]).is_err());
        assert!(options(&["--page"]).unwrap().page);
        assert!(options(&["--page", "--full"]).is_err());
    }

    #[test]
    fn json_goes_to_standard_output_or_to_a_file() {
        assert_eq!(options(&[]).unwrap().json, None);
        assert_eq!(options(&["--json"]).unwrap().json, Some(None));
        assert_eq!(options(&["--json", "f"]).unwrap().json, Some(Some("f".into())));
    }
}
