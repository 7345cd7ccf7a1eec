//! The vector engine step by step: without super-packets, with them, with more workers and their queues. VPP was
//! brought to speed under Calico by this ladder. Also the curve over workers and cores.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::cpu::CpuTime;
use super::measure;
use super::rows::CONNECT_LIMIT;
use super::{Plan, engine, stats};
use crate::sandbox::{Container, Sandbox, SandboxError, SandboxOptions, Underlay, progress};

/// A step of the ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rung {
    /// Its name in the table.
    pub name: &'static str,
    /// Workers of each daemon.
    pub workers: usize,
    /// Super-packets from and to TAP device and socket.
    pub offloads: bool,
    /// Streams of the last column.
    pub streams: u32,
}

/// The article's steps.
pub const LADDER: [Rung; 4] = [
    Rung { name: "TAP, single packets", workers: 1, offloads: false, streams: 8 },
    Rung { name: "GSO and GRO", workers: 1, offloads: true, streams: 8 },
    Rung { name: "two workers", workers: 2, offloads: true, streams: 8 },
    Rung { name: "four workers", workers: 4, offloads: true, streams: 8 },
];
/// The most workers of the curve.
const WORKERS_MAX: usize = 8;
/// Streams for each worker of the curve: enough that no worker is without one for long.
const STREAMS_PER_WORKER: usize = 4;

/// The rates of one step on one underlay: medians over the rounds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LadderRow {
    /// The step.
    pub step: String,
    /// `veth` or `wire`.
    pub underlay: String,
    /// Workers of each daemon.
    pub workers: usize,
    /// Cores that the workers of both ends would need for themselves; the machine may have fewer.
    pub cores_wanted: usize,
    /// TCP, one stream, Gbit/s.
    pub tcp1_gbps: Option<f64>,
    /// Least and greatest value of that over the rounds.
    #[serde(default)]
    pub tcp1_spread: Option<(f64, f64)>,
    /// Streams of the next figure.
    pub streams: u32,
    /// TCP with that many streams, Gbit/s of all together.
    pub tcp_many_gbps: Option<f64>,
    /// Least and greatest value of that over the rounds.
    pub tcp_many_spread: Option<(f64, f64)>,
    /// Busy core-seconds of the whole machine per gigabit with one stream.
    pub core_s_per_gbit: Option<f64>,
    /// Least and greatest value of that over the rounds.
    #[serde(default)]
    pub core_s_spread: Option<(f64, f64)>,
    /// How many rounds the medians are of.
    pub rounds: usize,
}

/// One round: Gbit/s with one stream and with many, core-seconds per gigabit with one.
type Sample = (f64, f64, f64);

/// A core for each worker, at both ends: they share this machine.
const fn cores_wanted(workers: usize) -> usize {
    2 * workers
}

/// The curve's steps on this number of cores, and a note on steps left out because cores are too few.
#[must_use]
pub fn curve(cores: usize) -> (Vec<Rung>, Option<String>) {
    let has = |workers: usize| cores_wanted(workers) <= cores;
    let rung = |workers: usize| Rung {
        name: "workers",
        workers,
        offloads: true,
        streams: (STREAMS_PER_WORKER * workers) as u32,
    };
    // One worker is the curve's foot, however few the cores are.
    let rungs: Vec<Rung> = (1..=WORKERS_MAX).filter(|n| *n == 1 || has(*n)).map(rung).collect();
    let most = rungs.len();
    let left_out = (most < WORKERS_MAX).then(|| {
        format!(
            "{} to {WORKERS_MAX} workers are left out: both ends share this machine's {cores} cores, and each \
             worker wants one at each end; {WORKERS_MAX} workers want {}",
            most + 1,
            cores_wanted(WORKERS_MAX)
        )
    });
    (rungs, left_out)
}

/// Two hosts of one step with running daemons, and a container on each.
struct Pair {
    rung: Rung,
    sandbox: Sandbox,
    client: Container,
    server: Container,
}

impl Pair {
    fn start(rung: Rung, plan: &Plan) -> Result<Self, SandboxError> {
        progress::step(&format!("starting two hosts: {}, {} worker(s)", rung.name, rung.workers));
        let options = SandboxOptions { mtu: plan.link_mtu, ..SandboxOptions::default() };
        let sandbox = Sandbox::new(&options)?;
        let workers = rung.workers.to_string();
        let mut words = vec!["--engine", "userspace", "--workers", &workers];
        if !rung.offloads {
            words.push("--no-offloads");
        }
        sandbox.launch_all(&words)?;
        for host in sandbox.hosts() {
            host.wait_connected(1, CONNECT_LIMIT)?;
        }
        let client = sandbox.host(0).add_container("a")?;
        let server = sandbox.host(1).add_container("b")?;
        client.ping(server.ipv4()?.into())?;
        Ok(Self { rung, sandbox, client, server })
    }

    fn measure(&self, seconds: u64) -> Result<Sample, SandboxError> {
        let (client, to) = (self.client.netns(), self.server.ipv4()?.into());
        let mut server = self.server.spawn(&["iperf3", "-s", "--forceflush"])?;
        server.line_with("listening", Duration::from_secs(10))?;
        // Lanes beyond the first are taken once they are proven.
        measure::tcp(client, to, self.rung.streams, 1)?;
        let before = CpuTime::now()?;
        let one = measure::tcp(client, to, 1, seconds)?;
        let busy = CpuTime::now()?.busy_since(before);
        let many = measure::tcp(client, to, self.rung.streams, seconds)?;
        Ok((one.gbps, many.gbps, busy / one.gigabits.max(f64::MIN_POSITIVE)))
    }
}

/// Measures the steps in turns, all of them once in each round.
///
/// # Errors
/// Returns an error if a daemon or iperf3 fails.
pub(crate) fn measure(rungs: &[Rung], plan: &Plan) -> Result<Vec<LadderRow>, SandboxError> {
    let pairs = rungs.iter().map(|rung| Pair::start(*rung, plan)).collect::<Result<Vec<_>, _>>()?;
    let mut rows = Vec::new();
    for underlay in plan.underlays {
        pairs.iter().try_for_each(|pair| pair.sandbox.set_underlay(*underlay))?;
        let mut samples: Vec<Vec<Sample>> = pairs.iter().map(|_| Vec::new()).collect();
        for round in 1..=plan.rounds {
            for (pair, samples) in pairs.iter().zip(&mut samples) {
                let Rung { name, workers, .. } = pair.rung;
                progress::step(&format!(
                    "{}: round {round} of {}, {name}, {workers} worker(s)",
                    underlay.name(),
                    plan.rounds
                ));
                samples.push(pair.measure(plan.lengths.tcp_seconds)?);
            }
        }
        let of = pairs.iter().zip(&samples);
        rows.extend(of.map(|(pair, samples)| row_of(pair.rung, *underlay, samples)));
    }
    Ok(rows)
}

fn row_of(rung: Rung, underlay: Underlay, samples: &[Sample]) -> LadderRow {
    let values = |pick: fn(&Sample) -> f64| samples.iter().map(pick).collect::<Vec<f64>>();
    let (one, many) = (values(|sample| sample.0), values(|sample| sample.1));
    let cost = values(|sample| sample.2);
    let spread = |values: &[f64], round: fn(f64) -> f64| {
        stats::spread(values).map(|(least, most)| (round(least), round(most)))
    };
    LadderRow {
        step: rung.name.to_owned(),
        underlay: underlay.name().to_owned(),
        workers: rung.workers,
        cores_wanted: cores_wanted(rung.workers),
        tcp1_gbps: stats::median(&one).map(engine::hundredths),
        tcp1_spread: spread(&one, engine::hundredths),
        streams: rung.streams,
        tcp_many_gbps: stats::median(&many).map(engine::hundredths),
        tcp_many_spread: spread(&many, engine::hundredths),
        core_s_per_gbit: stats::median(&cost).map(thousandths),
        core_s_spread: spread(&cost, thousandths),
        rounds: samples.len(),
    }
}

fn thousandths(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// The table in Markdown; a row that has fewer cores than its workers want is marked.
#[must_use]
pub fn table(rows: &[LadderRow], cores: usize) -> String {
    let mut text = String::from(
        "| step                | underlay | workers | TCP 1 Gbit/s | streams | TCP Gbit/s (min to max) | core-s/Gbit |\n\
         | ------------------- | -------- | ------: | -----------: | ------: | ----------------------: | ----------: |\n",
    );
    let cell = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
    };
    for row in rows {
        let short = if row.cores_wanted > cores { "*" } else { "" };
        let spread = row.tcp_many_spread;
        let spread = spread.map_or_else(String::new, |(a, b)| format!(" ({a:.2} to {b:.2})"));
        let many = format!("{}{spread}", cell(row.tcp_many_gbps, 2));
        let _ = writeln!(
            text,
            "| {:<19} | {:<8} | {:>7} | {:>12} | {:>7} | {many:>23} | {:>11} |",
            format!("{}{short}", row.step),
            row.underlay,
            row.workers,
            cell(row.tcp1_gbps, 2),
            row.streams,
            cell(row.core_s_per_gbit, 3),
        );
    }
    let short = rows.iter().filter(|row| row.cores_wanted > cores);
    if let Some(most) = short.map(|row| row.cores_wanted).max() {
        let _ = writeln!(
            text,
            "\n* fewer cores than workers: both ends share this machine's {cores}, the last row wants {most}. Such \
             a row\nshows what further workers cost, not what they bring."
        );
    }
    text
}

/// The article's own figures, to stand beneath the ladder.
pub const ARTICLE: &str = "
Calico with VPP in 2020, two hosts with Xeon Gold 6146 and 40 Gbit/s, MTU 1500: TAP 6 Gbit/s, with GSO and GRO 30, with
more queues 50, none of it encrypted; with IPsec and one worker 12, two workers 16, four workers, queues and tunnels 36.
Every row above is encrypted, and both hosts share one machine.
";

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: &str, workers: usize) -> LadderRow {
        let rung = Rung { name: "", workers, offloads: true, streams: 8 };
        let samples = [(7.0, 8.0, 0.2), (9.0, 6.0, 0.4), (8.0, 7.0, 0.3)];
        LadderRow { step: step.to_owned(), ..row_of(rung, Underlay::Wire, &samples) }
    }

    #[test]
    fn a_row_is_the_median_of_its_rounds() {
        let row = row("x", 1);
        assert_eq!((row.tcp1_gbps, row.tcp_many_gbps), (Some(8.0), Some(7.0)));
        assert_eq!((row.tcp_many_spread, row.core_s_per_gbit), (Some((6.0, 8.0)), Some(0.3)));
        assert_eq!((row.tcp1_spread, row.core_s_spread), (Some((7.0, 9.0)), Some((0.2, 0.4))));
    }

    #[test]
    fn rows_without_cores_enough_are_marked_and_explained() {
        let rows = [row("GSO and GRO", 1), row("four workers", 4)];
        let text = table(&rows, 4);
        let lines: Vec<&str> = text.lines().collect();
        assert!(!lines[2].contains('*') && lines[3].contains("four workers*"), "{text}");
        assert!(text.contains("this machine's 4") && text.contains("wants 8"), "{text}");
        let widths: Vec<usize> = lines[..4].iter().map(|line| line.chars().count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
        assert!(!table(&rows, 8).contains('*'));
    }

    #[test]
    fn the_curve_says_what_a_machine_cannot_show() {
        let (rungs, left_out) = curve(2);
        assert_eq!(rungs.iter().map(|rung| rung.workers).collect::<Vec<_>>(), [1]);
        assert!(
            left_out.is_some_and(|text| text.starts_with("2 to 8") && text.contains("2 cores"))
        );
        assert_eq!(curve(6).0.len(), 3);
        let (rungs, left_out) = curve(16);
        assert_eq!((rungs.len(), left_out), (8, None));
    }
}
