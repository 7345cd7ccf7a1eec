//! The figures of the table `gateway`: medians, ratios and what was aimed at.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::super::stats;
use super::Samples;
use super::stand::System;

/// Digits that a figure keeps in the file, at least.
const DIGITS_KEPT: i32 = 4;

/// A median over the rounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The median.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The greatest.
    pub greatest: f64,
}

/// A figure of both systems.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GatewayRow {
    /// Its name.
    pub name: String,
    /// The label for readers.
    pub what: String,
    /// Its unit.
    pub unit: String,
    /// OpenVPN's; `None`: there is none.
    pub openvpn: Option<Figure>,
    /// Weft's.
    pub weft: Option<Figure>,
    /// Weft's divided by OpenVPN's, round by round.
    pub ratio: Option<Figure>,
    /// What was aimed at.
    pub aim: Option<String>,
    /// Whether Weft has reached that.
    pub is_reached: Option<bool>,
}

/// What is aimed at.
#[derive(Debug, Clone, Copy)]
enum Aim {
    /// At least so many times OpenVPN's.
    Times(f64),
    /// At most so much of OpenVPN's.
    Part(f64),
    /// At most this.
    Most(f64),
    /// At least this.
    Least(f64),
}

/// A figure that is measured.
pub(super) struct Metric {
    name: &'static str,
    what: &'static str,
    unit: &'static str,
    aim: Option<Aim>,
}

macro_rules! metrics {
    ($($constant:ident = $name:literal, $what:literal, $unit:literal, $aim:expr;)*) => {
        $(pub(super) const $constant: &str = $name;)*
        /// In the table's order.
        const METRICS: &[Metric] =
            &[$(Metric { name: $name, what: $what, unit: $unit, aim: $aim }),*];
    };
}

metrics! {
    HANDSHAKES = "handshakes", "full handshakes, server on one core", "1/s", Some(Aim::Times(3.0));
    HANDSHAKES_CORE = "handshakes_core", "the same by the server's processor time", "1/core-s", None;
    ONE_UP = "one_up", "one stock client, to the server", "Gbit/s", None;
    ONE_DOWN = "one_down", "one stock client, from the server", "Gbit/s", None;
    ONE_UP_CPU = "one_up_cpu", "the server's processor time, to it", "core-s/Gbit", Some(Aim::Part(0.2));
    ONE_DOWN_CPU = "one_down_cpu", "the server's processor time, from it", "core-s/Gbit", Some(Aim::Part(0.2));
    FOUR_UP = "four_up", "four stock clients at once, to the server", "Gbit/s", Some(Aim::Times(3.0));
    FOUR_DOWN = "four_down", "four stock clients at once, from the server", "Gbit/s", Some(Aim::Times(3.0));
    FOUR_UP_CPU = "four_up_cpu", "the server's processor time, to it", "core-s/Gbit", None;
    FOUR_DOWN_CPU = "four_down_cpu", "the server's processor time, from it", "core-s/Gbit", None;
    OWN_UP = "own_up", "the system's own client, to the server", "Gbit/s", Some(Aim::Times(7.0));
    OWN_DOWN = "own_down", "the system's own client, from the server", "Gbit/s", Some(Aim::Times(7.0));
    FLOOD_TCP = "flood_tcp", "one stock client in a flood: of its rate", "share", Some(Aim::Least(0.95));
    FLOOD_PING = "flood_ping", "its round trip in a flood: of that without", "share", Some(Aim::Most(1.05));
    FLOOD_CLIENTS = "flood_clients", "clients that a flood makes the server keep", "number", Some(Aim::Most(0.0));
    FLOOD_MEMORY = "flood_memory", "memory that a flood takes", "MiB", None;
    IDLE_CLIENTS = "idle_clients", "idle clients", "number", None;
    IDLE_CONNECT = "idle_connect", "handshakes until they were connected", "1/s", None;
    IDLE_MEMORY = "idle_memory", "the server's memory with them", "MiB", Some(Aim::Most(200.0));
    IDLE_CLIENT = "idle_client", "memory for each", "KiB", None;
    IDLE_LATE = "idle_late", "turns of the core's loop over 10 ms, with them", "number", Some(Aim::Most(0.0));
    IDLE_LATE_GATEWAY = "idle_late_gateway", "turns of the gateway's loop over 10 ms", "number", Some(Aim::Most(0.0));
    IDLE_CPU = "idle_cpu", "the server's processor time for them", "core-s/s", None;
    IDLE_ANSWER = "idle_answer", "the slowest answer of the API", "ms", None;
}

impl Figure {
    fn of(values: &[f64]) -> Option<Self> {
        let (least, greatest) = stats::spread(values)?;
        let [median, least, greatest] = [stats::median(values)?, least, greatest].map(round);
        Some(Self { median, least, greatest })
    }

    fn text(self) -> String {
        let Self { median, least, greatest } = self;
        if least.total_cmp(&greatest).is_eq() {
            return number(median);
        }
        format!("{} ({}–{})", number(median), number(least), number(greatest))
    }
}

/// The rows of all figures that were measured.
pub(super) fn of(samples: &Samples) -> Vec<GatewayRow> {
    let row = |metric: &Metric| {
        let [openvpn, weft] = samples.get(metric.name)?;
        let ratios = openvpn.iter().zip(weft).filter(|(theirs, _)| **theirs > 0.0);
        let ratios: Vec<f64> = ratios.map(|(theirs, ours)| ours / theirs).collect();
        let (ratio, figure) = (Figure::of(&ratios), Figure::of(weft));
        Some(GatewayRow {
            name: metric.name.to_owned(),
            what: metric.what.to_owned(),
            unit: metric.unit.to_owned(),
            openvpn: Figure::of(openvpn),
            weft: figure,
            ratio,
            aim: metric.aim.map(Aim::text),
            is_reached: metric.aim.and_then(|aim| aim.is_reached(figure, ratio)),
        })
    };
    METRICS.iter().filter_map(row).collect()
}

/// Adds a figure of one round.
pub(super) fn add(samples: &mut Samples, metric: &'static str, system: System, value: f64) {
    let [openvpn, weft] = samples.entry(metric).or_default();
    match system {
        System::OpenVpn => openvpn.push(value),
        System::Weft => weft.push(value),
    }
}

impl Aim {
    fn text(self) -> String {
        match self {
            Self::Times(times) => format!("{times} times"),
            Self::Part(part) => format!("at most {part} of it"),
            Self::Most(most) => format!("at most {most}"),
            Self::Least(least) => format!("at least {least}"),
        }
    }

    fn is_reached(self, weft: Option<Figure>, ratio: Option<Figure>) -> Option<bool> {
        Some(match self {
            Self::Times(times) => ratio?.median >= times,
            Self::Part(part) => ratio?.median <= part,
            Self::Most(most) => weft?.median <= most,
            Self::Least(least) => weft?.median >= least,
        })
    }
}

/// The table in Markdown. Missed bars are bold.
#[must_use]
pub fn table(rows: &[GatewayRow]) -> String {
    let mut text = "| figure | unit | OpenVPN | Weft | Weft / OpenVPN | aim |\n\
                    | --- | --- | ---: | ---: | ---: | --- |\n"
        .to_owned();
    for row in rows {
        let cell = |figure: Option<Figure>| figure.map_or_else(|| "–".to_owned(), Figure::text);
        let aim = match (&row.aim, row.is_reached) {
            (Some(aim), Some(false)) => format!("{aim}: **missed**"),
            (Some(aim), _) => aim.clone(),
            (None, _) => String::new(),
        };
        let cells = [row.openvpn, row.weft, row.ratio].map(cell).join(" | ");
        let _ = writeln!(text, "| {} | {} | {cells} | {aim} |", row.what, row.unit);
    }
    text
}

fn round(value: f64) -> f64 {
    let places = (DIGITS_KEPT - value.abs().max(1e-9).log10().ceil() as i32).clamp(0, 6);
    let scale = 10_f64.powi(places);
    (value * scale).round() / scale
}

/// Three digits that count, or all before the point.
fn number(value: f64) -> String {
    let places = match value.abs() {
        0.0 => 0,
        below if below < 0.1 => 4,
        below if below < 1.0 => 3,
        below if below < 10.0 => 2,
        below if below < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.places$}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn samples() -> Samples {
        let mut samples = Samples::new();
        for (theirs, ours) in [(100.0, 350.0), (200.0, 500.0), (100.0, 400.0)] {
            add(&mut samples, HANDSHAKES, System::OpenVpn, theirs);
            add(&mut samples, HANDSHAKES, System::Weft, ours);
        }
        add(&mut samples, ONE_UP_CPU, System::OpenVpn, 1.0);
        add(&mut samples, ONE_UP_CPU, System::Weft, 0.3);
        add(&mut samples, IDLE_MEMORY, System::Weft, 150.25);
        samples
    }

    #[test]
    fn ratios_are_of_each_round_and_say_whether_the_aim_is_reached() {
        let rows = of(&samples());
        let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, [HANDSHAKES, ONE_UP_CPU, IDLE_MEMORY], "the table's order");
        let ratio = rows[0].ratio.unwrap();
        assert_eq!((ratio.median, ratio.least, ratio.greatest), (3.5, 2.5, 4.0));
        let reached: Vec<_> = rows.iter().map(|row| row.is_reached).collect();
        assert_eq!(reached, [Some(true), Some(false), Some(true)]);
        assert_eq!((rows[2].openvpn, rows[2].ratio), (None, None));
    }

    #[test]
    fn the_table_has_the_spread_and_what_was_missed() {
        let table = table(&of(&samples()));
        assert!(
            table.contains("| 100 (100–200) | 400 (350–500) | 3.50 (2.50–4.00) | 3 times |"),
            "{table}"
        );
        assert!(
            table.contains("| 1.00 | 0.300 | 0.300 | at most 0.2 of it: **missed** |"),
            "{table}"
        );
        assert!(table.contains("| MiB | – | 150 | – | at most 200 |"), "{table}");
    }

    #[test]
    fn figures_keep_the_digits_that_count() {
        assert_eq!(
            [0.0, 0.01234, 0.5, 5.125, 12.34, 1_234.5].map(number),
            ["0", "0.0123", "0.500", "5.12", "12.3", "1234"]
        );
        assert_eq!((round(0.123_456), round(123_456.7)), (0.1235, 123_457.0));
    }
}
