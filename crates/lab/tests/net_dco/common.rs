//! What the tests of devices have together.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use weft::sandbox::{Host, Running};
use weft_lab::net::slowness;

/// The device's name on every host.
pub(crate) const DEVICE: &str = "dco0";

/// A verb of a host, which must succeed.
pub(crate) fn dco(host: &Host, words: &[&str]) -> anyhow::Result<Value> {
    let words = [&["dco"], words, &["--json"]].concat();
    Ok(host.weft(&words)?.success()?.json()?)
}

/// A verb that must be refused: its exit code and what it says.
pub(crate) fn refused(host: &Host, words: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
    let output = host.weft(&[&["dco"], words].concat())?;
    Ok((output.status.code(), output.stderr))
}

/// Prints what happens to a host's peers, and the packets of the control channel.
pub(crate) fn listen(host: &Host) -> anyhow::Result<Running> {
    Ok(host.spawn_weft(&["dco", "listen", DEVICE, "--packets"])?)
}

/// The next line of [`listen`].
pub(crate) fn line(running: &mut Running) -> anyhow::Result<Value> {
    Ok(serde_json::from_str(&running.line(limit())?)?)
}

/// A key file as OpenVPN writes it.
pub(crate) fn write_key_file(file: &Path, seed: u8) -> anyhow::Result<()> {
    let line = |line: u8| (0..16).map(|at| format!("{:02x}", seed ^ (line * 16 + at))).collect();
    let lines: Vec<String> = (0..16).map(line).collect();
    let name = "OpenVPN Static key V1-----";
    let text = format!("-----BEGIN {name}\n{}\n-----END {name}\n", lines.join("\n"));
    Ok(std::fs::write(file, text)?)
}

/// How long a thing may take that takes no time.
pub(crate) fn limit() -> Duration {
    Duration::from_secs(10) * slowness()
}
