//! The vector engine alone: the rates at which one core, and several, seal and open where devices cost
//! nothing.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_crypto::Cipher;
use weft_engine::alone::{self, Load, Rates};
use weft_engine::{EngineError, race};

/// Measured loads, by name in the table.
const LOADS: [(&str, Load); 3] = [
    ("TCP, link MTU 1500", Load::Tcp { link_mtu: 1500 }),
    ("TCP, link MTU 9000", Load::Tcp { link_mtu: 9000 }),
    ("UDP, 64 B", Load::Udp { payload: 64 }),
];

/// The most cores on the curve.
const CORES_MAX: usize = 8;

/// Rates of one core with one load under one AEAD.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EngineRow {
    /// The load.
    pub load: String,
    /// The AEAD.
    pub cipher: Cipher,
    /// Gbit/s of payload from the TAP device to the wire.
    pub sealed_gbps: f64,
    /// Gbit/s of payload from the wire to the TAP device.
    pub opened_gbps: f64,
    /// Millions of datagrams a second to the wire.
    pub sealed_mpps: f64,
    /// Millions of datagrams a second from the wire.
    pub opened_mpps: f64,
}

/// Measures every load under every AEAD, each way for this time.
///
/// # Errors
/// As [`alone::measure`].
pub fn measure(time: Duration) -> Result<Vec<EngineRow>, EngineError> {
    // As the daemon does.
    race::prefer_fastest();
    let mut rows = Vec::new();
    for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
        for (name, load) in LOADS {
            let rates = alone::measure(cipher, load, time)?;
            rows.push(EngineRow {
                load: name.to_owned(),
                cipher,
                sealed_gbps: tenths(rates.sealed.gbps),
                opened_gbps: tenths(rates.opened.gbps),
                sealed_mpps: hundredths(rates.sealed.packets_per_s / 1e6),
                opened_mpps: hundredths(rates.opened.packets_per_s / 1e6),
            });
        }
    }
    Ok(rows)
}

/// Rates of several cores together, with super-packets on a link of MTU 1500 under AES-256-GCM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CoresRow {
    /// How the work is shared: one flow with helpers, or lanes.
    pub shared_by: String,
    /// The threads, each of which can use a core.
    pub threads: usize,
    /// Gbit/s of payload from the TAP device to the wire, all together.
    pub sealed_gbps: f64,
    /// Gbit/s of payload from the wire to the TAP device, all together.
    pub opened_gbps: f64,
    /// Multiple of the rate that one thread seals alone.
    pub sealed_times: f64,
    /// Multiple of the rate that one thread opens alone.
    pub opened_times: f64,
    /// Least and greatest value of a figure, where a row is the median of several runs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spread: BTreeMap<String, (f64, f64)>,
}

/// Measures one flow with helpers and several lanes, as far as this machine has the cores, at most
/// [`CORES_MAX`]; each way for this time.
///
/// # Errors
/// As [`alone::measure_helped`].
pub fn measure_cores(time: Duration) -> Result<Vec<CoresRow>, EngineError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MAX);
    measure_on(cores, time)
}

/// The name of a number of threads, and their rates.
type NameOf = fn(usize) -> String;
type RatesOf<'a> = &'a dyn Fn(usize) -> Result<Rates, EngineError>;

fn measure_on(cores: usize, time: Duration) -> Result<Vec<CoresRow>, EngineError> {
    let (cipher, (_, load)) = (Cipher::Aes256Gcm, LOADS[0]);
    let flow = |threads| alone::measure_helped(cipher, load, threads - 1, time);
    let lanes = |threads| alone::measure_lanes(cipher, load, threads, time);
    let named: [(NameOf, RatesOf<'_>); 2] = [
        (
            |threads| match threads {
                1 => "one flow, no helper".to_owned(),
                2 => "one flow, 1 helper".to_owned(),
                _ => format!("one flow, {} helpers", threads - 1),
            },
            &flow,
        ),
        (|lanes| if lanes == 1 { "1 lane".to_owned() } else { format!("{lanes} lanes") }, &lanes),
    ];
    let mut rows = Vec::new();
    for (name, rates) in named {
        let mut by_itself = None;
        for threads in 1..=cores {
            let rates = rates(threads)?;
            let one = *by_itself.get_or_insert(rates);
            rows.push(CoresRow {
                shared_by: name(threads),
                threads,
                sealed_gbps: tenths(rates.sealed.gbps),
                opened_gbps: tenths(rates.opened.gbps),
                sealed_times: hundredths(rates.sealed.gbps / one.sealed.gbps),
                opened_times: hundredths(rates.opened.gbps / one.opened.gbps),
                spread: BTreeMap::new(),
            });
        }
    }
    Ok(rows)
}

/// The table of several cores in Markdown.
#[must_use]
pub fn cores_table(rows: &[CoresRow]) -> String {
    let mut text = String::from(
        "| TCP, link MTU 1500  | threads | sealed Gbit/s | opened Gbit/s | sealed times one | opened times one |\n\
         | ------------------- | ------: | ------------: | ------------: | ---------------: | ---------------: |\n",
    );
    for row in rows {
        let CoresRow { shared_by, threads, sealed_gbps, opened_gbps, .. } = row;
        let CoresRow { sealed_times, opened_times, .. } = row;
        let _ = writeln!(
            text,
            "| {shared_by:<19} | {threads:>7} | {sealed_gbps:>13.1} | {opened_gbps:>13.1} \
             | {sealed_times:>16.2} | {opened_times:>16.2} |"
        );
    }
    text
}

/// The table in Markdown.
#[must_use]
pub fn table(rows: &[EngineRow]) -> String {
    let mut text = String::from(
        "| load               | AEAD              | sealed Gbit/s | opened Gbit/s | sealed Mpps | opened Mpps |\n\
         | ------------------ | ----------------- | ------------: | ------------: | ----------: | ----------: |\n",
    );
    for row in rows {
        let EngineRow { load, cipher, sealed_gbps, opened_gbps, sealed_mpps, opened_mpps } = row;
        let _ = writeln!(
            text,
            "| {load:<18} | {cipher:<17} | {sealed_gbps:>13.1} | {opened_gbps:>13.1} \
             | {sealed_mpps:>11.2} | {opened_mpps:>11.2} |"
        );
    }
    text
}

pub(crate) fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

pub(crate) fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_load_has_a_line_under_every_aead() {
        let rows = measure(Duration::from_millis(20)).unwrap();
        assert_eq!(rows.len(), 2 * LOADS.len());
        assert!(rows.iter().all(|row| row.sealed_mpps > 0.0 && row.opened_gbps > 0.0), "{rows:?}");
        let table = table(&rows);
        let widths: Vec<usize> = table.lines().map(|line| line.chars().count()).collect();
        assert_eq!(widths.len(), 2 + rows.len());
        assert!(widths.iter().all(|width| *width == widths[0]), "{table}");
    }

    #[test]
    fn the_curve_has_a_line_for_each_number_of_cores() {
        let rows = measure_on(3, Duration::from_millis(50)).unwrap();
        let threads: Vec<_> = rows.iter().map(|row| row.threads).collect();
        assert_eq!(threads, [1, 2, 3, 1, 2, 3]);
        let mut one = rows.iter().filter(|row| row.threads == 1);
        assert!(one.all(|row| (row.sealed_times - 1.0).abs() < 1e-9), "{rows:?}");
        assert!(rows.iter().all(|row| row.opened_times > 0.0), "{rows:?}");
        let table = cores_table(&rows);
        let widths: Vec<usize> = table.lines().map(|line| line.chars().count()).collect();
        assert_eq!(widths.len(), 2 + rows.len());
        assert!(widths.iter().all(|width| *width == widths[0]), "{table}");
    }
}
