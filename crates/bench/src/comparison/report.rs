//! The figures as JSON, as a table and as ratios.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::attach::AttachRow;
use super::engine::{CoresRow, EngineRow};
use super::fair::FairScene;
use super::gateway::GatewayRow;
use super::ladder::LadderRow;
use super::machine::Machine;
use super::measure::Sample;
use super::pressure::PressureRow;
use super::rows;
use super::stats;
use super::weave::WeaveRow;

/// All that a run found: the shape of `./dev bench --json` and `./dev demo --json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The machine that it ran on.
    pub machine: Machine,
    /// The measured rows.
    pub rows: Vec<ReportRow>,
    /// The vector engine alone, where that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engine: Vec<EngineRow>,
    /// Several of its threads together, likewise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cores: Vec<CoresRow>,
    /// Weave Net's table, where that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weave: Vec<WeaveRow>,
    /// The vector engine step by step, where that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<LadderRow>,
    /// Senders side by side, where that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fair: Vec<FairScene>,
    /// Behaviour under more load than the path carries, where that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pressure: Vec<PressureRow>,
    /// Attach and detach on hosts with few containers and with many, where that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attach: Vec<AttachRow>,
    /// The gateway for OpenVPN's clients beside OpenVPN's server, where that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateway: Vec<GatewayRow>,
}

/// The medians of one row on one underlay. A figure that was not measured is `null`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ReportRow {
    /// The row's name.
    pub name: String,
    /// `veth` or `wire`.
    pub underlay: String,
    /// The MTU between the two ends, bytes.
    pub mtu: u32,
    /// TCP, one stream, Gbit/s.
    pub tcp1_gbps: Option<f64>,
    /// TCP, four streams, Gbit/s.
    pub tcp4_gbps: Option<f64>,
    /// TCP, eight streams, Gbit/s.
    pub tcp8_gbps: Option<f64>,
    /// TCP, one stream each way at once, Gbit/s of both together.
    pub tcp_both_gbps: Option<f64>,
    /// 1,350-byte datagrams, Gbit/s, at the greatest rate carried.
    pub udp_gbps: Option<f64>,
    /// Share of them lost at that rate.
    pub udp_loss: Option<f64>,
    /// 64-byte datagrams per second, at the greatest rate carried.
    pub pps64: Option<f64>,
    /// One byte there and back, per second.
    pub rr_tps: Option<f64>,
    /// Its median, microseconds.
    pub rr_p50_us: Option<f64>,
    /// Its 99th percentile, microseconds.
    pub rr_p99_us: Option<f64>,
    /// One byte there and back, per second, while one TCP stream runs beside.
    pub load_tps: Option<f64>,
    /// The median while one TCP stream runs beside, microseconds.
    pub load_p50_us: Option<f64>,
    /// The 99th percentile while one TCP stream runs beside, microseconds.
    pub load_p99_us: Option<f64>,
    /// Busy core-seconds of the whole machine per gigabit.
    pub core_s_per_gbit: Option<f64>,
    /// Resident memory of one end's daemon, MiB.
    pub rss_mib: Option<f64>,
    /// How many rounds the medians are of.
    pub rounds: usize,
    /// Least and greatest value of each figure over the rounds.
    pub spread: BTreeMap<String, (f64, f64)>,
}

impl ReportRow {
    /// Makes the medians and spreads of a row's rounds.
    #[must_use]
    pub fn of(name: &str, underlay: &str, mtu: u32, samples: &[Sample]) -> Self {
        let mut spread = BTreeMap::new();
        let mut column = |name: &str, digits: i32, pick: fn(&Sample) -> Option<f64>| {
            let values: Vec<f64> = samples.iter().filter_map(pick).collect();
            if let Some((least, greatest)) = stats::spread(&values) {
                spread.insert(name.to_owned(), (round(least, digits), round(greatest, digits)));
            }
            stats::median(&values).map(|median| round(median, digits))
        };
        let mut row = Self {
            name: name.to_owned(),
            underlay: underlay.to_owned(),
            mtu,
            tcp1_gbps: column("tcp1_gbps", 3, |sample| Some(sample.tcp1_gbps)),
            tcp4_gbps: column("tcp4_gbps", 3, |sample| Some(sample.tcp4_gbps)),
            tcp8_gbps: column("tcp8_gbps", 3, |sample| sample.tcp8_gbps),
            tcp_both_gbps: column("tcp_both_gbps", 3, |sample| sample.tcp_both_gbps),
            udp_gbps: column("udp_gbps", 3, |sample| Some(sample.udp_gbps)),
            udp_loss: column("udp_loss", 5, |sample| Some(sample.udp_loss)),
            pps64: column("pps64", 0, |sample| sample.pps64),
            rr_tps: column("rr_tps", 0, |sample| Some(sample.rr_tps)),
            rr_p50_us: column("rr_p50_us", 1, |sample| Some(sample.rr_p50_us)),
            rr_p99_us: column("rr_p99_us", 1, |sample| Some(sample.rr_p99_us)),
            load_tps: column("load_tps", 0, |sample| sample.load_tps),
            load_p50_us: column("load_p50_us", 1, |sample| sample.load_p50_us),
            load_p99_us: column("load_p99_us", 1, |sample| sample.load_p99_us),
            core_s_per_gbit: column("core_s_per_gbit", 4, |sample| Some(sample.core_s_per_gbit)),
            rss_mib: column("rss_mib", 1, |sample| sample.rss_mib),
            rounds: samples.len(),
            spread: BTreeMap::new(),
        };
        row.spread = spread;
        row
    }
}

/// The results of one row on one underlay.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rounds {
    /// The figures of those that succeeded.
    pub samples: Vec<Sample>,
    /// Why the others failed, in order.
    pub errors: Vec<String>,
}

impl Rounds {
    /// The row if a round succeeded, and a note if one failed.
    #[must_use]
    pub fn row(&self, name: &str, underlay: &str, mtu: u32) -> (Option<ReportRow>, Option<String>) {
        let succeeded = self.samples.len();
        let row = (succeeded > 0).then(|| ReportRow::of(name, underlay, mtu, &self.samples));
        let note = self.errors.last().map(|error| match succeeded {
            0 => format!("left out: each round failed: {error}"),
            _ => {
                let all = succeeded + self.errors.len();
                format!("median of {succeeded} of {all} rounds: {error}")
            }
        });
        (row, note)
    }
}

impl Report {
    /// The table in Markdown, its columns aligned so that it reads well in a terminal too.
    #[must_use]
    pub fn table(&self) -> String {
        let head = [
            "system",
            "underlay",
            "MTU",
            "TCP 1 Gbit/s (min to max)",
            "TCP 4",
            "TCP 8",
            "both ways",
            "core-s/Gbit",
            "UDP Gbit/s",
            "lost %",
            "64 B kpps",
            "RR per s",
            "p50 / p99 µs",
            "under load",
            "p50 / p99 µs",
            "RSS MiB",
        ];
        let mut lines = vec![head.map(str::to_owned)];
        lines.extend(self.rows.iter().map(table_line));
        align(&lines)
    }

    /// The machine in a few lines.
    #[must_use]
    pub fn machine_text(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "{} cores of {}, Linux {}, {}\n",
            machine.cores, machine.cpu, machine.kernel, machine.date
        );
        let versions: Vec<String> =
            machine.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        let _ = writeln!(text, "{}", versions.join("; "));
        if let Some(commit) = &machine.commit {
            let _ = writeln!(text, "commit {commit}");
        }
        for (name, why) in &machine.left_out {
            // An error may be the end of a log.
            let _ = writeln!(text, "{name}: {}", why.replace('\n', " "));
        }
        for (name, command) in &machine.commands {
            let _ = writeln!(text, "{name}: {command}");
        }
        text
    }

    /// Weft against the rows that it is judged by, one line each; empty where there is none.
    #[must_use]
    pub fn ratios(&self) -> String {
        let mut text = String::new();
        for ours in self.rows.iter().filter(|row| row.name.starts_with("weft-")) {
            let others: &[&str] = match rows::is_device(&ours.name) {
                true => &[rows::DIRECT, rows::GRE, rows::OPENVPN],
                false => &rows::JUDGES,
            };
            for other in others {
                let same = |row: &&ReportRow| row.name == *other && row.underlay == ours.underlay;
                let Some(theirs) = self.rows.iter().find(same) else { continue };
                let ratios = ratios_of(ours, theirs);
                if !ratios.is_empty() {
                    let (name, underlay) = (&ours.name, &ours.underlay);
                    let _ = writeln!(text, "{name} / {other} ({underlay}): {}", ratios.join(", "));
                }
            }
        }
        text
    }

    /// The whole report in Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = format!("{}\n{}\n", self.table(), self.ratio_list());
        text.push_str("Machine and commands:\n\n```text\n");
        text.push_str(&self.machine_text());
        text.push_str("```\n");
        text
    }

    fn ratio_list(&self) -> String {
        self.ratios().lines().fold(String::new(), |mut text, line| {
            let _ = writeln!(text, "- {line}");
            text
        })
    }
}

/// The ratios of one row's figures to another's.
fn ratios_of(ours: &ReportRow, theirs: &ReportRow) -> Vec<String> {
    let columns = [
        ("TCP 1 stream", ours.tcp1_gbps, theirs.tcp1_gbps),
        ("UDP", ours.udp_gbps, theirs.udp_gbps),
        ("64 B", ours.pps64, theirs.pps64),
        ("RR", ours.rr_tps, theirs.rr_tps),
        ("RR under load", ours.load_tps, theirs.load_tps),
    ];
    let ratio = |(name, a, b): (&str, Option<f64>, Option<f64>)| {
        let (a, b) = a.zip(b).filter(|(_, b)| *b > 0.0)?;
        Some(format!("{name} {:.3}", a / b))
    };
    columns.into_iter().filter_map(ratio).collect()
}

fn table_line(row: &ReportRow) -> [String; 16] {
    let range = row.spread.get("tcp1_gbps");
    let tcp1 = match (row.tcp1_gbps, range) {
        (Some(median), Some((least, most))) => format!("{median:.2} ({least:.2} to {most:.2})"),
        (median, _) => cell(median, 2),
    };
    [
        row.name.clone(),
        row.underlay.clone(),
        row.mtu.to_string(),
        tcp1,
        cell(row.tcp4_gbps, 2),
        cell(row.tcp8_gbps, 2),
        cell(row.tcp_both_gbps, 2),
        cell(row.core_s_per_gbit, 3),
        cell(row.udp_gbps, 2),
        cell(row.udp_loss.map(|loss| loss * 100.0), 2),
        cell(row.pps64.map(|pps| pps / 1_000.0), 0),
        cell(row.rr_tps, 0),
        format!("{} / {}", cell(row.rr_p50_us, 0), cell(row.rr_p99_us, 0)),
        cell(row.load_tps, 0),
        format!("{} / {}", cell(row.load_p50_us, 0), cell(row.load_p99_us, 0)),
        cell(row.rss_mib, 0),
    ]
}

pub(super) fn cell(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
}

fn round(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

fn align<const N: usize>(lines: &[[String; N]]) -> String {
    let widths: Vec<usize> = (0..N)
        .map(|column| {
            lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0).max(3)
        })
        .collect();
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(text, "| {cell:width$} ");
        }
        text.push_str("|\n");
        if number == 0 {
            for width in &widths {
                let _ = write!(text, "| {} ", "-".repeat(*width));
            }
            text.push_str("|\n");
        }
    }
    text
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sample(tcp1_gbps: f64) -> Sample {
        Sample {
            tcp1_gbps,
            tcp4_gbps: 9.0,
            tcp8_gbps: Some(8.0),
            tcp_both_gbps: None,
            udp_gbps: 2.5,
            udp_loss: 0.001,
            pps64: Some(300_000.0),
            rr_tps: 20_000.0,
            rr_p50_us: 45.2,
            rr_p99_us: 80.0,
            load_tps: Some(1_100.4),
            load_p50_us: Some(900.4),
            load_p99_us: Some(2_000.0),
            core_s_per_gbit: 0.2,
            rss_mib: None,
        }
    }

    pub(crate) fn report() -> Report {
        let machine = Machine {
            kernel: "6.1.0".to_owned(),
            cpu: "A <CPU> & co".to_owned(),
            cores: 2,
            date: "2026-11-21T08:00:00Z".to_owned(),
            ..Machine::default()
        };
        let row = |name, tcp1: &[f64]| {
            let samples: Vec<Sample> = tcp1.iter().copied().map(sample).collect();
            ReportRow::of(name, "veth", 1388, &samples)
        };
        let rows = vec![
            row(rows::DIRECT, &[46.0]),
            row(rows::VXLAN, &[44.0]),
            row(rows::WEFT, &[10.0, 12.0, 11.0]),
            row(rows::WIREGUARD_GO, &[4.0]),
        ];
        Report { machine, rows, ..Report::default() }
    }

    #[test]
    fn a_row_is_the_median_and_the_spread_of_its_rounds() {
        let row = &report().rows[2];
        assert_eq!(row.tcp1_gbps, Some(11.0));
        assert_eq!(row.spread.get("tcp1_gbps"), Some(&(10.0, 12.0)));
        assert_eq!((row.rounds, row.rss_mib), (3, None));
    }

    #[test]
    fn a_row_needs_a_round_that_succeeded_and_failed_ones_are_noted() {
        let row_and_note = |samples: usize, errors: &[&str]| {
            let errors = errors.iter().map(|error| (*error).to_owned()).collect();
            let rounds = Rounds { samples: vec![sample(10.0); samples], errors };
            let (row, note) = rounds.row(rows::TINC, "wire", 1400);
            (row.map(|row| row.rounds), note)
        };
        let left_out = "left out: each round failed: refused".to_owned();
        assert_eq!(row_and_note(0, &["reset", "refused"]), (None, Some(left_out)));
        let note = "median of 2 of 4 rounds: refused".to_owned();
        assert_eq!(row_and_note(2, &["reset", "refused"]), (Some(2), Some(note)));
        assert_eq!(row_and_note(3, &[]), (Some(3), None));
    }

    #[test]
    fn each_omitted_row_has_a_line_beside_the_machine() {
        let mut report = report();
        report.machine.versions.insert("os".to_owned(), "Some Linux".to_owned());
        let why = "left out: its log says:\nno such device".to_owned();
        report.machine.left_out.insert("tinc on veth".to_owned(), why);
        let text = report.machine_text();
        let lines: Vec<&str> = text.lines().skip(1).collect();
        let left_out = "tinc on veth: left out: its log says: no such device";
        assert_eq!(lines, ["os Some Linux", left_out]);
    }

    #[test]
    fn the_json_has_the_names_that_scripts_rely_on() {
        let json = serde_json::to_value(report()).unwrap();
        for key in ["kernel", "cpu", "cores", "versions", "commands", "left_out"] {
            assert!(json["machine"].get(key).is_some(), "machine.{key}");
        }
        for key in [
            "name",
            "underlay",
            "mtu",
            "tcp1_gbps",
            "tcp4_gbps",
            "tcp8_gbps",
            "tcp_both_gbps",
            "udp_gbps",
            "udp_loss",
            "pps64",
            "rr_tps",
            "rr_p50_us",
            "rr_p99_us",
            "load_tps",
            "load_p50_us",
            "load_p99_us",
            "core_s_per_gbit",
            "rss_mib",
        ] {
            assert!(json["rows"][0].get(key).is_some(), "rows[0].{key}");
        }
    }

    #[test]
    fn the_table_has_a_line_for_each_row_and_equal_widths() {
        let table = report().table();
        let widths: Vec<usize> = table.lines().map(|line| line.chars().count()).collect();
        assert_eq!(widths.len(), 6);
        assert!(widths.iter().all(|width| *width == widths[0]), "{table}");
        for cell in ["11.00 (10.00 to 12.00)", "| 0.10 ", "| 1100 ", "| 900 / 2000 "] {
            assert!(table.contains(cell), "{cell} is missing in {table}");
        }
    }

    #[test]
    fn weft_is_compared_with_vxlan_and_wireguard() {
        let ratios = report().ratios();
        assert!(
            ratios.contains("weft-esp-userspace / vxlan (veth): TCP 1 stream 0.250, UDP 1.000"),
            "{ratios}"
        );
        assert!(ratios.contains("weft-esp-userspace / wireguard-go (veth): TCP 1 stream 2.750"));
    }
}
