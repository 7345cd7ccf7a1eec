//! The vector engine alone: what one core seals and opens where devices cost nothing.

use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_crypto::Cipher;
use weft_engine::alone::{self, Load};
use weft_engine::{EngineError, race};

/// What is measured, by its name in the table.
const LOADS: [(&str, Load); 3] = [
    ("TCP, link MTU 1500", Load::Tcp { link_mtu: 1500 }),
    ("TCP, link MTU 9000", Load::Tcp { link_mtu: 9000 }),
    ("UDP, 64 B", Load::Udp { payload: 64 }),
];

/// What one core does with one load under one AEAD.
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

fn hundredths(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_load_has_a_line_under_every_aead() {
        let rows = measure(Duration::from_millis(2)).unwrap();
        assert_eq!(rows.len(), 2 * LOADS.len());
        assert!(rows.iter().all(|row| row.sealed_mpps > 0.0 && row.opened_gbps > 0.0), "{rows:?}");
        let table = table(&rows);
        let widths: Vec<usize> = table.lines().map(|line| line.chars().count()).collect();
        assert_eq!(widths.len(), 2 + rows.len());
        assert!(widths.iter().all(|width| *width == widths[0]), "{table}");
    }
}
