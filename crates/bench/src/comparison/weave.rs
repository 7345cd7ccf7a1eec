//! The table in which Weave Net showed its fast datapath: qperf's TCP bandwidth, UDP latency and processor time.
//! It measures host to host and between containers, at the usual MTU and at a large one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::cpu::{CpuShares, CpuTime};
use super::rows::Row;
use super::stats;
use crate::sandbox::{SandboxError, output_of};

/// The MTUs of the link: Weave's table has container MTUs of 1410 and 8950.
pub const LINK_MTUS: [u32; 2] = [1500, 9000];
/// The port that qperf's two ends agree over.
const PORT: u16 = 19_765;
/// Limit of a client beyond its two tests.
const GRACE: Duration = Duration::from_secs(20);
/// Limit of the server until it answers.
const SERVER_LIMIT: Duration = Duration::from_secs(10);

/// qperf's results between two ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WeaveRow {
    /// The way between them.
    pub name: String,
    /// The link's MTU, bytes.
    pub link_mtu: u32,
    /// The MTU between the two ends, bytes.
    pub mtu: u32,
    /// TCP bandwidth, MB/s.
    pub bandwidth_mb_s: Option<f64>,
    /// UDP latency one way, microseconds.
    pub latency_us: Option<f64>,
    /// Least and greatest value of each of these over the rounds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spread: BTreeMap<String, (f64, f64)>,
    /// The use of processor time while the bandwidth was measured, over the whole machine.
    pub cpu: CpuShares,
    /// How many rounds the medians are of.
    pub rounds: usize,
}

/// One round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Bytes a second over TCP.
    bandwidth: f64,
    /// Seconds one way over UDP.
    latency: f64,
    /// The use of processor time meanwhile.
    cpu: CpuShares,
}

/// Measures one row once.
///
/// # Errors
/// Returns an error if qperf fails.
pub fn measure(row: &Row, seconds: u64) -> Result<Sample, SandboxError> {
    let port = PORT.to_string();
    let _server = row.server.spawn(&["qperf", "--listen_port", &port])?;
    wait_for_server(row)?;
    let before = CpuTime::now()?;
    let bandwidth = ask(row, seconds, "tcp_bw", "bw")?;
    let cpu = CpuTime::now()?.shares_since(before);
    Ok(Sample { bandwidth, latency: ask(row, seconds, "udp_lat", "latency")?, cpu })
}

/// Runs one of qperf's tests and reads its figure of this name.
fn ask(row: &Row, seconds: u64, test: &str, figure: &str) -> Result<f64, SandboxError> {
    let (address, time) = (row.server_address.to_string(), seconds.to_string());
    let words = ["qperf", "--listen_port", &PORT.to_string(), "--time", &time, &address, test];
    let limit = Duration::from_secs(seconds) + GRACE;
    let output = row.client.exec_within(limit, &words)?.success()?;
    parse(&output.stdout, figure).ok_or_else(|| SandboxError::UnexpectedOutput {
        command: output.command,
        why: format!("no {figure}: {}", output.stdout),
    })
}

/// The commands behind a row's figures, for the report.
#[must_use]
pub fn command(seconds: u64) -> String {
    format!(
        "qperf --listen_port {PORT} --time {seconds} SERVER tcp_bw, then udp_lat; processor time of the \
         whole machine by /proc/stat over tcp_bw"
    )
}

/// qperf's server says nothing when it listens.
fn wait_for_server(row: &Row) -> Result<(), SandboxError> {
    let filter = format!("sport = :{PORT}");
    crate::sandbox::wait_until("qperf's server", SERVER_LIMIT, || {
        let mut command = row.server.command("ss");
        let output = output_of(command.args(["-Hlnt", &filter]), SERVER_LIMIT);
        output.is_ok_and(|output| !output.stdout.trim().is_empty())
    })
    .map(|_| ())
}

/// The medians of a row's rounds.
#[must_use]
pub fn row_of(row: &Row, link_mtu: u32, samples: &[Sample]) -> WeaveRow {
    let tenths = |value: f64| (value * 10.0).round() / 10.0;
    let mut spread = BTreeMap::new();
    let mut median = |name: &str, pick: fn(&Sample) -> f64| {
        let values: Vec<f64> = samples.iter().map(pick).collect();
        if let Some((least, most)) = stats::spread(&values) {
            spread.insert(name.to_owned(), (tenths(least), tenths(most)));
        }
        stats::median(&values).map(tenths)
    };
    let bandwidth_mb_s = median("bandwidth_mb_s", |sample| sample.bandwidth / 1e6);
    let latency_us = median("latency_us", |sample| sample.latency * 1e6);
    let cpu: Vec<CpuShares> = samples.iter().map(|sample| sample.cpu).collect();
    WeaveRow {
        name: row.name.to_owned(),
        link_mtu,
        mtu: row.mtu,
        bandwidth_mb_s,
        latency_us,
        spread,
        cpu: CpuShares::medians(&cpu),
        rounds: samples.len(),
    }
}

fn parse(text: &str, name: &str) -> Option<f64> {
    let value = text.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == name).then_some(value)
    })?;
    let mut words = value.split_whitespace();
    Some(words.next()?.parse::<f64>().ok()? * unit(words.next()?)?)
}

/// qperf's units, in bytes a second and in seconds. Its thousands are 1,000.
fn unit(name: &str) -> Option<f64> {
    Some(match name {
        "bytes/sec" | "sec" => 1.0,
        "KB/sec" => 1e3,
        "MB/sec" => 1e6,
        "GB/sec" => 1e9,
        "ms" => 1e-3,
        "us" => 1e-6,
        "ns" => 1e-9,
        _ => return None,
    })
}

/// Weave's own figures, to stand beneath the table.
pub const POST: &str = "
Weave Net's post, two c3.8xlarge with 10 Gbit/s: host to host 1200 MB/s, 48.1 µs; fast datapath,
not encrypted, MTU 1410: 316 MB/s, 61.4 µs; MTU 8950: 1090 MB/s, 61.9 µs.
";

/// The table in Markdown.
#[must_use]
pub fn table(rows: &[WeaveRow]) -> String {
    let mut text = String::from(
        "| way                         | link MTU | MTU  | TCP MB/s | UDP latency µs | usr % | sys % | irq % | soft % | steal % | idle % |\n\
         | --------------------------- | -------: | ---: | -------: | -------------: | ----: | ----: | ----: | -----: | ------: | -----: |\n",
    );
    let cell = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |v| format!("{v:.1}"));
    for row in rows {
        let WeaveRow { name, link_mtu, mtu, .. } = row;
        let (bandwidth, latency) = (cell(row.bandwidth_mb_s), cell(row.latency_us));
        let CpuShares { usr, sys, irq, soft, steal, idle } = row.cpu;
        let _ = writeln!(
            text,
            "| {name:<27} | {link_mtu:>8} | {mtu:>4} | {bandwidth:>8} | {latency:>14} | {usr:>5.1} \
             | {sys:>5.1} | {irq:>5.1} | {soft:>6.1} | {steal:>7.1} | {idle:>6.1} |"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qperfs_figures_are_read_in_any_unit() {
        let bandwidth = |text: &str| parse(&format!("tcp_bw:\n    bw  =  {text}\n"), "bw");
        assert_eq!(bandwidth("1.5 GB/sec"), Some(1.5e9));
        assert_eq!(bandwidth("316 MB/sec"), Some(316.0 * 1e6));
        assert_eq!(bandwidth("316 furlongs"), None);
        let latency = |text: &str| parse(&format!("udp_lat:\n    latency  =  {text}\n"), "latency");
        assert_eq!(latency("12 us"), Some(12.0 * 1e-6));
        assert_eq!(latency("900 ns"), Some(900.0 * 1e-9));
        assert_eq!(parse("failed to connect", "bw"), None);
    }

    #[test]
    fn the_table_has_a_line_for_each_row() {
        let row = |name: &str, bandwidth_mb_s| WeaveRow {
            name: name.to_owned(),
            link_mtu: 1500,
            mtu: 1388,
            bandwidth_mb_s,
            latency_us: Some(33.25),
            spread: BTreeMap::new(),
            cpu: CpuShares { usr: 1.0, idle: 99.0, ..CpuShares::default() },
            rounds: 6,
        };
        let table = table(&[row("direct", Some(1_200.0)), row("weft-esp-userspace", None)]);
        let lines: Vec<&str> = table.lines().take(4).collect();
        let widths: Vec<usize> = lines.iter().map(|line| line.chars().count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{table}");
        assert!(lines[2].contains("1200.0") && lines[3].contains("–"), "{table}");
    }
}
