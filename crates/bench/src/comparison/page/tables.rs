//! The tables of the page, narrower than those of the terminal.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::super::chart::short_cpu;
use super::super::cpu::CpuShares;
use super::super::engine::CoresRow;
use super::super::figures::{Kept, Listing};
use super::super::ladder::LadderRow;
use super::super::machine::Machine;
use super::super::pressure::{self, PressureRow};
use super::super::report::{Report, ReportRow, cell};
use super::super::rows;
use super::super::weave::WeaveRow;

/// A table in Markdown; a column whose heading begins with `>` is right-aligned.
fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let names: Vec<&str> = head.iter().map(|name| name.trim_start_matches('>')).collect();
    let marks = head.iter().map(|name| if name.starts_with('>') { "---:" } else { "---" });
    let mut text =
        format!("| {} |\n| {} |\n", names.join(" | "), marks.collect::<Vec<_>>().join(" | "));
    for row in rows {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text
}

/// A median with its spread.
fn with_spread(median: Option<f64>, spread: Option<(f64, f64)>, digits: usize) -> String {
    match spread {
        Some((least, most)) => {
            format!("{} ({least:.digits$}–{most:.digits$})", cell(median, digits))
        }
        None => cell(median, digits),
    }
}

/// Every kept run: file, date, machine, and a note for the reader.
pub(super) fn runs(runs: &BTreeMap<String, Kept>) -> String {
    let line = |(name, kept): (&String, &Kept)| {
        let Machine { date, kernel, .. } = &kept.report.machine;
        vec![
            format!("[{name}](figures/{name}.json)"),
            date.split('T').next().unwrap_or_default().to_owned(),
            format!("{}, Linux {kernel}", machine(&kept.report.machine)),
            kept.note.clone().unwrap_or_default(),
        ]
    };
    table(&["run", "date", "machine", "note"], runs.iter().map(line))
}

fn machine(machine: &Machine) -> String {
    match machine.cores {
        0 => machine.cpu.clone(),
        cores => format!("{cores} cores of {}", short_cpu(&machine.cpu)),
    }
}

/// Systems side by side on one underlay.
pub(super) fn systems(rows: &[&ReportRow]) -> String {
    let head = [
        "system",
        ">TCP 1, Gbit/s",
        ">TCP 4",
        ">TCP 8",
        ">core-s/Gbit",
        ">UDP",
        ">64 B",
        ">RR",
        ">p99 µs",
        ">RR beside",
        ">p99 µs",
        ">MiB",
    ];
    let line = |row: &&ReportRow| {
        vec![
            row.name.clone(),
            with_spread(row.tcp1_gbps, row.spread.get("tcp1_gbps").copied(), 2),
            cell(row.tcp4_gbps, 2),
            cell(row.tcp8_gbps, 2),
            cell(row.core_s_per_gbit, 3),
            cell(row.udp_gbps, 2),
            cell(row.pps64.map(|pps| pps / 1e3), 0),
            cell(row.rr_tps, 0),
            cell(row.rr_p99_us, 0),
            cell(row.load_tps, 0),
            cell(row.load_p99_us, 0),
            cell(row.rss_mib, 0),
        ]
    };
    table(&head, rows.iter().map(line))
}

/// Weft with ports of the bridge as multiples of each other system, on both underlays.
pub(super) fn others(reports: &[&Report]) -> String {
    let head = ["machine", "veth / wire, times", ">TCP 1", ">UDP", ">64 B", ">RR", ">RR beside"];
    let columns: [fn(&ReportRow) -> Option<f64>; 5] = [
        |row| row.tcp1_gbps,
        |row| row.udp_gbps,
        |row| row.pps64,
        |row| row.rr_tps,
        |row| row.load_tps,
    ];
    let mut lines = Vec::new();
    for report in reports {
        let find = |underlay: &str, name: &str| {
            report.rows.iter().find(|row| row.underlay == underlay && row.name == name)
        };
        let is_there = |name: &&str| report.rows.iter().any(|row| row.name == *name);
        for other in rows::JUDGES.into_iter().filter(is_there) {
            let times = |pick: fn(&ReportRow) -> Option<f64>, underlay| {
                let (ours, theirs) = (find(underlay, rows::WEFT)?, find(underlay, other)?);
                Some(pick(ours)? / pick(theirs)?)
            };
            let cells = columns
                .map(|pick| ["veth", "wire"].map(|on| multiple(times(pick, on))).join(" / "));
            let names = [short_cpu(&report.machine.cpu), other.to_owned()];
            lines.push(names.into_iter().chain(cells).collect());
        }
    }
    table(&head, lines)
}

/// A multiple, bold where Weft loses.
fn multiple(times: Option<f64>) -> String {
    match times {
        Some(times) if times < 1.0 => format!("**{times:.2}**"),
        times => cell(times, 2),
    }
}

/// Senders side by side.
pub(super) fn fair(reports: &[&Report]) -> String {
    let head = ["scene", "sender", "load", ">alone", ">all at once", "unit"];
    let scenes = reports.iter().flat_map(|report| &report.fair);
    let lines = scenes.flat_map(|scene| {
        scene.shares.iter().map(|share| {
            vec![
                scene.scene.clone(),
                share.sender.clone(),
                share.load.clone(),
                cell(share.alone, 1),
                with_spread(share.together, share.together_spread, 2),
                share.unit.clone(),
            ]
        })
    });
    table(&head, lines)
}

/// Several threads of the engine alone: one, two, four and eight.
pub(super) fn threads(reports: &[&Report]) -> String {
    let head = ["machine", "shared by", ">sealed Gbit/s", ">opened Gbit/s", ">sealed", ">opened"];
    let lines = reports.iter().flat_map(|report| {
        report.cores.iter().filter(|row| row.threads.is_power_of_two()).map(|row| {
            let CoresRow { sealed_gbps, opened_gbps, sealed_times, opened_times, .. } = row;
            let spread = |name: &str| row.spread.get(name).copied();
            vec![
                machine(&report.machine),
                row.shared_by.clone(),
                with_spread(Some(*sealed_gbps), spread("sealed_gbps"), 1),
                with_spread(Some(*opened_gbps), spread("opened_gbps"), 1),
                format!("{sealed_times:.2}"),
                format!("{opened_times:.2}"),
            ]
        })
    });
    table(&head, lines)
}

/// One, two, four and eight workers.
pub(super) fn workers(rows: &[LadderRow]) -> String {
    let head =
        [">workers", ">TCP 1, Gbit/s", ">streams", ">TCP, Gbit/s", ">core-s/Gbit, one stream"];
    let line = |row: &LadderRow| {
        vec![
            row.workers.to_string(),
            with_spread(row.tcp1_gbps, row.tcp1_spread, 1),
            row.streams.to_string(),
            with_spread(row.tcp_many_gbps, row.tcp_many_spread, 1),
            with_spread(row.core_s_per_gbit, row.core_s_spread, 3),
        ]
    };
    table(&head, rows.iter().filter(|row| row.workers.is_power_of_two()).map(line))
}

/// Weave Net's tests, and where processor time went.
pub(super) fn weave(rows: &[WeaveRow]) -> String {
    let head = [
        "way",
        ">link MTU",
        ">MTU",
        ">TCP MB/s",
        ">UDP µs",
        ">usr %",
        ">sys %",
        ">irq %",
        ">soft %",
        ">steal %",
        ">idle %",
    ];
    let line = |row: &WeaveRow| {
        let CpuShares { usr, sys, irq, soft, steal, idle } = row.cpu;
        let mut line = vec![row.name.clone(), row.link_mtu.to_string(), row.mtu.to_string()];
        line.extend([row.bandwidth_mb_s, row.latency_us].map(|value| cell(value, 1)));
        line.extend([usr, sys, irq, soft, steal, idle].map(|share| format!("{share:.1}")));
        line
    };
    table(&head, rows.iter().map(line))
}

/// More than the path carries.
pub(super) fn pressure(rows: &[PressureRow]) -> String {
    let head = [
        "system",
        "scene",
        ">Gbit/s",
        ">rest µs",
        ">load µs",
        ">most µs",
        ">again ppm",
        ">queue KiB",
        "dropped by Weft",
    ];
    let line = |row: &PressureRow| {
        vec![
            row.name.clone(),
            row.scene.clone(),
            with_spread(row.gbps, row.gbps_spread, 2),
            cell(row.rest_us, 0),
            cell(row.load_us, 0),
            cell(row.load_max_us, 0),
            cell(row.resent_ppm, 0),
            cell(row.queue_max_kib, 0),
            pressure::dropped_by_weft(row),
        ]
    };
    table(&head, rows.iter().map(line))
}

/// Figures of another command.
pub(super) fn listing(listing: &Listing) -> String {
    let head: Vec<&str> = listing.head.iter().map(String::as_str).collect();
    table(&head, listing.rows.iter().cloned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::super::report::tests::report;
    use super::*;

    #[test]
    fn a_row_has_a_cell_for_each_column_and_its_spread() {
        let report = report();
        let text = systems(&report.rows.iter().collect::<Vec<_>>());
        let columns = |line: &str| line.matches(" |").count();
        assert!(text.lines().all(|line| columns(line) == 12), "{text}");
        assert!(text.contains("| weft-esp-userspace | 11.00 (10.00–12.00) | 9.00 |"), "{text}");
        assert!(text.starts_with("| system | TCP 1, Gbit/s |") && text.contains("| ---: |"));
    }

    #[test]
    fn a_row_in_which_weft_loses_is_bold() {
        let mut report = report();
        let text = others(&[&report]);
        assert!(text.contains("| vxlan | **0.25** / – | 1.00 / – |"), "{text}");
        report.rows.retain(|row| row.name != rows::VXLAN);
        assert!(!others(&[&report]).contains("**"));
    }

    #[test]
    fn a_machine_whose_cores_are_unknown_is_named_alone() {
        let guest = Machine { cpu: "emulated".to_owned(), ..Machine::default() };
        assert_eq!(machine(&guest), "emulated");
        let machine = machine(&Machine { cores: 16, cpu: "Intel(R) Xeon(R)".into(), ..guest });
        assert_eq!(machine, "16 cores of Intel Xeon");
    }
}
