//! Rates as tables.

use std::fmt::Write as _;

use super::rates::{PeerRates, Rates, VolumeRates};
use crate::cli::output::{named, table};

/// All tables, one below the other; empty ones are omitted, except the peers'.
pub(super) fn text(rates: &Rates) -> String {
    let seconds = rates.interval_ms as f64 / 1_000.0;
    let mut text = format!("Rates over {seconds:.1} s\n\n");
    let headings = ["PEER", "ENGINE", "RECEIVED", "SENT", "PKT/S IN", "PKT/S OUT", "DROPPED/S"];
    let mut peers = table(&headings);
    for peer in &rates.peers {
        let name = named(Some(&peer.peer), peer.nickname.as_deref());
        let engine = peer.engine.clone().unwrap_or_else(|| "-".into());
        let dropped = count(peer.dropped_pps);
        peers.add_row([vec![name, engine], cells(&peer.rates), vec![dropped]].concat());
    }
    let _ = match rates.peers.is_empty() {
        true => writeln!(text, "no peers; weft status connections says why"),
        false => writeln!(text, "{peers}"),
    };
    // A single lane repeats its peer's line; the kernel has no lanes of ours.
    let has_lanes =
        |peer: &&PeerRates| peer.lanes.len() > 1 && peer.engine.as_deref() != Some("kernel");
    let several: Vec<_> = rates.peers.iter().filter(has_lanes).collect();
    if !several.is_empty() {
        let mut lanes = table(&["PEER", "LANE", "RECEIVED", "SENT", "PKT/S IN", "PKT/S OUT"]);
        for peer in several {
            let name = named(Some(&peer.peer), peer.nickname.as_deref());
            for lane in &peer.lanes {
                let heading = vec![name.clone(), lane.lane.to_string()];
                lanes.add_row([heading, cells(&lane.rates)].concat());
            }
        }
        let _ = writeln!(text, "\n{lanes}");
    }
    if !rates.containers.is_empty() {
        let headings = ["CONTAINER", "RECEIVED", "SENT", "PKT/S IN", "PKT/S OUT", "DROPPED/S"];
        let mut containers = table(&headings);
        for container in &rates.containers {
            let (name, dropped) = (container.name.clone(), count(container.dropped_pps));
            containers.add_row([vec![name], cells(&container.rates), vec![dropped]].concat());
        }
        let _ = writeln!(text, "\n{containers}");
    }
    if !rates.workers.is_empty() {
        let _ = writeln!(text, "\n{}", workers(rates));
    }
    if !rates.drops.is_empty() {
        let mut drops = table(&["DROPPED", "PKT/S", "SINCE START"]);
        for (reason, dropped) in &rates.drops {
            drops.add_row([reason.clone(), count(dropped.pps), dropped.total.to_string()]);
        }
        let _ = writeln!(text, "\n{drops}");
    }
    text
}

/// The work of each worker of the vector engine.
fn workers(rates: &Rates) -> String {
    let headings = [
        "WORKER",
        "BUSY",
        "HELPERS",
        "DATAGRAMS/S IN",
        "DATAGRAMS/S OUT",
        "READS/S",
        "WRITES/S",
        "DROPPED/S",
    ];
    let mut lines = table(&headings);
    for worker in &rates.workers {
        lines.add_row([
            worker.worker.to_string(),
            format!("{:.0} %", worker.busy_percent),
            format!("{:.0} %", worker.helpers_busy_percent),
            count(worker.datagrams_received_pps),
            count(worker.datagrams_sent_pps),
            count(worker.tap_reads_pps),
            count(worker.tap_writes_pps),
            count(worker.dropped_pps),
        ]);
    }
    lines.to_string()
}

/// The output for a terminal of this size. It overwrites the previous text and cuts long
/// lines, since a wrapped line would push the others down.
pub(super) fn frame(text: &str, (rows, columns): (usize, usize), drawn: bool) -> String {
    const CLEAR: &str = "\x1b[2J";
    const HOME: &str = "\x1b[H";
    const CLEAR_TO_END_OF_LINE: &str = "\x1b[K";
    const CLEAR_BELOW: &str = "\x1b[J";
    let mut frame = if drawn { HOME.to_owned() } else { format!("{CLEAR}{HOME}") };
    let lines: Vec<&str> = text.trim_end().lines().collect();
    // The last row is for the cursor.
    let room = rows.saturating_sub(1).max(1);
    let shown = if lines.len() <= room { lines.len() } else { room - 1 };
    for line in &lines[..shown] {
        let line = line.char_indices().nth(columns).map_or(*line, |(end, _)| &line[..end]);
        let _ = write!(frame, "{line}{CLEAR_TO_END_OF_LINE}\r\n");
    }
    if shown < lines.len() {
        let more = lines.len() - shown;
        let _ = write!(frame, "... and {more} more lines{CLEAR_TO_END_OF_LINE}\r\n");
    }
    frame + CLEAR_BELOW
}

fn cells(rates: &VolumeRates) -> Vec<String> {
    vec![
        bits(rates.received_bps),
        bits(rates.sent_bps),
        count(rates.received_pps),
        count(rates.sent_pps),
    ]
}

/// Bits per second with three digits and a prefix.
fn bits(bps: f64) -> String {
    let (number, prefix) = scaled(bps);
    format!("{number} {prefix}bit/s")
}

fn count(per_second: f64) -> String {
    let (number, prefix) = scaled(per_second);
    format!("{number}{prefix}")
}

/// Three digits, and the prefix (SI) that goes with them.
fn scaled(value: f64) -> (String, &'static str) {
    let (mut value, mut prefix) = (value, "");
    for next in ["k", "M", "G", "T"] {
        // A value that would round to four digits takes the next prefix.
        if value < 999.5 {
            break;
        }
        (value, prefix) = (value / 1_000.0, next);
    }
    let number = match value {
        0.0 => "0".to_owned(),
        value if value < 9.995 => format!("{value:.2}"),
        value if value < 99.95 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    };
    (number, prefix)
}

#[cfg(test)]
mod tests {
    use super::super::rates::{ContainerRates, Drops, LaneRates, WorkerRates};
    use super::*;

    fn rates() -> Rates {
        let rates = VolumeRates {
            received_bps: 1.234e9,
            sent_bps: 56_700.0,
            received_pps: 110_000.0,
            sent_pps: 0.0,
        };
        Rates {
            interval_ms: 1_000,
            peers: vec![PeerRates {
                peer: "00112233445566778899aabbccddeeff".into(),
                nickname: Some("beta".into()),
                engine: Some("userspace".into()),
                rates,
                dropped_pps: 1.0,
                lanes: (0..2).map(|lane| LaneRates { lane, rates }).collect(),
            }],
            containers: vec![ContainerRates {
                id: "netns:web".into(),
                name: "web".into(),
                rates,
                dropped_pps: 2.0,
            }],
            workers: vec![WorkerRates {
                worker: 7,
                busy_percent: 62.4,
                awake_percent: 0.0,
                helpers_busy_percent: 131.0,
                datagrams_received_pps: 1.0,
                datagrams_sent_pps: 22.0,
                tap_reads_pps: 333.0,
                tap_writes_pps: 4_444.0,
                dropped_pps: 55_555.0,
            }],
            drops: [("no_endpoint".into(), Drops { pps: 3.0, total: 12_345 })].into(),
        }
    }

    #[test]
    fn every_table_shows_its_rates() {
        let text = text(&rates());
        for line in [
            "0011223344556677 (beta)  userspace  1.23 Gbit/s  56.7 kbit/s  110k      0          1.00",
            "0011223344556677 (beta)  1     1.23 Gbit/s  56.7 kbit/s  110k      0",
            "web        1.23 Gbit/s  56.7 kbit/s  110k      0          2.00",
            "7       62 %  131 %    1.00            22.0             333      4.44k     55.6k",
            "no_endpoint  3.00   12345",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn empty_tables_are_left_out() {
        let empty = Rates {
            peers: Vec::new(),
            containers: Vec::new(),
            workers: Vec::new(),
            drops: std::collections::BTreeMap::new(),
            ..rates()
        };
        let text = text(&empty);
        assert!(text.contains("no peers"), "{text}");
        assert!(!["CONTAINER", "WORKER", "DROPPED"].iter().any(|it| text.contains(it)), "{text}");
        let mut of_one_lane = rates();
        of_one_lane.peers[0].lanes.truncate(1);
        assert!(!super::text(&of_one_lane).contains("LANE"), "its peer's line says it");
        let mut of_the_kernel = rates();
        of_the_kernel.peers[0].engine = Some("kernel".into());
        assert!(!super::text(&of_the_kernel).contains("LANE"), "they carry nothing now");
    }

    #[test]
    fn numbers_have_three_digits() {
        for (value, wanted) in [
            (0.0, "0"),
            (0.5, "0.50"),
            (9.996, "10.0"),
            (999.4, "999"),
            (999.6, "1.00k"),
            (999_600.0, "1.00M"),
            (5e15, "5000T"),
        ] {
            assert_eq!(count(value), wanted);
        }
        assert_eq!(bits(2.5e9), "2.50 Gbit/s");
    }

    #[test]
    fn a_terminal_gets_no_more_lines_than_it_has_rows() {
        let text = "one\ntwo\nthree\nfour\n";
        let first = frame(text, (24, 80), false);
        assert!(first.starts_with("\x1b[2J\x1b[H") && first.contains("four"), "{first:?}");
        assert!(!first.contains("more"));
        let next = frame(text, (4, 80), true);
        assert!(next.starts_with("\x1b[Hone\x1b[K\r\n"), "{next:?}");
        assert!(next.contains("... and 2 more lines") && !next.contains("three"), "{next:?}");
        assert_eq!(next.matches('\n').count(), 3);
        assert!(next.ends_with("\x1b[J"));
        assert_eq!(frame(text, (0, 80), true).matches('\n').count(), 1);
        let narrow = frame("größer\n", (24, 3), true);
        assert_eq!(narrow, "\x1b[Hgrö\x1b[K\r\n\x1b[J");
    }
}
