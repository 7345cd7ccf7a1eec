//! The load of each worker of a host's vector engine.

use std::time::{Duration, Instant};

use serde_json::Value;
use weft_bench::sandbox::Host;

use super::slowness;

/// Time until each worker carries something. The lane of a flow is chance, and lanes beyond the first carry once
/// each end has heard of the other on them.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// More datagrams than a lane sends or receives by itself in a test.
pub const FLOW_DATAGRAMS: u64 = 500;

/// Datagrams that a worker has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Datagrams {
    /// To peers.
    pub sent: u64,
    /// From peers.
    pub received: u64,
}

/// Datagrams carried by each worker of a host since its daemon began.
///
/// # Errors
/// The daemon does not answer.
pub fn datagrams(host: &Host) -> anyhow::Result<Vec<Datagrams>> {
    let report = host.weft_json(&["report"])?;
    let all = report["worker_counters"].as_array().cloned().unwrap_or_default();
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let of = |worker: &Value| Datagrams {
        sent: number(&worker["datagrams_sent"]),
        received: number(&worker["datagrams_received"]),
    };
    Ok(all.iter().map(of).collect())
}

/// Puts a load on a host again and again until each of its `number` workers has carried some of it both ways.
///
/// # Errors
/// Returns an error if the load fails, or if some worker carries nothing in time.
pub fn use_all<T>(
    host: &Host,
    number: usize,
    load: impl Fn() -> anyhow::Result<T>,
) -> anyhow::Result<()> {
    let (until, before) = (Instant::now() + TIMEOUT * slowness(), datagrams(host)?);
    loop {
        load()?;
        let now = datagrams(host)?;
        let carried = |(nth, now): (usize, &Datagrams)| {
            let before = before.get(nth).copied().unwrap_or_default();
            (now.sent - before.sent).min(now.received - before.received)
        };
        if now.len() == number && now.iter().enumerate().map(carried).all(|it| it > FLOW_DATAGRAMS)
        {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < until,
            "of {number} workers some idle: {before:?}, then {now:?}"
        );
    }
}
