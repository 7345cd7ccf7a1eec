//! iperf3 between two containers.

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use weft_bench::comparison::measure::is_not_ready;
use weft_bench::sandbox::{Container, Running};

/// How long a server may take until it listens again, and the pause between two tries.
const LISTEN_LIMIT: Duration = Duration::from_secs(5);
const LISTEN_PAUSE: Duration = Duration::from_millis(50);

/// A server that takes one test after another; killed when dropped.
pub struct Server(Running);

impl Server {
    /// Starts a server in a container and waits until it listens.
    ///
    /// # Errors
    /// iperf3 is missing or does not start.
    pub fn start(container: &Container) -> anyhow::Result<Self> {
        let mut server = container.spawn(&["iperf3", "-s", "--forceflush"])?;
        server.line_with("Server listening", Duration::from_secs(5))?;
        Ok(Self(server))
    }

    /// The server's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }
}

/// Runs a client with further arguments and gives its report; an error in the report is an error.
///
/// # Errors
/// iperf3 failed.
pub fn run(client: &Container, server: IpAddr, arguments: &[&str]) -> anyhow::Result<Value> {
    let server = server.to_string();
    let mut words = vec!["iperf3", "-J", "-c", &server];
    words.extend_from_slice(arguments);
    let deadline = Instant::now() + LISTEN_LIMIT;
    loop {
        let report = client.exec(&words)?.json()?;
        match report["error"].as_str() {
            Some(error) if is_not_ready(error) && Instant::now() < deadline => {
                thread::sleep(LISTEN_PAUSE);
            }
            Some(error) => anyhow::bail!("iperf3 {}: {error}", words.join(" ")),
            None => return Ok(report),
        }
    }
}

/// Bits per second that the receiver got.
#[must_use]
pub fn received_bps(report: &Value) -> f64 {
    let end = &report["end"];
    end["sum_received"]["bits_per_second"]
        .as_f64()
        .or_else(|| end["sum"]["bits_per_second"].as_f64())
        .unwrap_or(0.0)
}

/// TCP retransmissions of the sender.
#[must_use]
pub fn retransmits(report: &Value) -> Option<u64> {
    report["end"]["sum_sent"]["retransmits"].as_u64()
}
