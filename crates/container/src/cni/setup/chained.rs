//! Plugins behind Weft's in the list, and the versions that they speak.

use std::{io, path::Path, process::Stdio, time::Duration};

use serde::Deserialize;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, Command},
};

use super::super::Version;

/// Limit for a plugin's answer to VERSION, in milliseconds.
pub const VERSION_TIMEOUT_MS: u64 = 5_000;
/// The longest answer to VERSION, in bytes.
pub const VERSION_ANSWER_BYTES_MAX: usize = 65_536;
/// Pause before a busy plugin is started again, in milliseconds.
const BUSY_PAUSE_MS: u64 = 100;

/// A plugin that Weft's list has if it is installed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chained {
    /// Its type, and the name of its binary.
    pub(super) name: &'static str,
    /// Its effect, for messages.
    pub(super) purpose: &'static str,
    /// The capability by which runtimes hand it its parameters.
    pub(super) capability: &'static str,
    /// Whether its entry has `snat`.
    pub(super) snat: bool,
}

/// The plugin that publishes ports.
pub(super) const PORTMAP: &str = "portmap";

/// In the order of the list.
pub(super) const CHAINED: [Chained; 2] = [
    Chained {
        name: PORTMAP,
        purpose: "publishes ports on the host",
        capability: "portMappings",
        snat: true,
    },
    Chained {
        name: "bandwidth",
        purpose: "limits a container's rate",
        capability: "bandwidth",
        snat: false,
    },
];

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    supported_versions: Vec<String>,
}

/// The versions that a plugin and Weft both speak, oldest first. One plugin that does not speak the
/// list's version fails every ADD.
pub(super) async fn versions(binary: &Path) -> Result<Vec<Version>, String> {
    let limit = Duration::from_millis(VERSION_TIMEOUT_MS);
    let answer = tokio::time::timeout(limit, ask(binary)).await;
    let answer =
        answer.map_err(|_| format!("no answer to VERSION within {VERSION_TIMEOUT_MS} ms"))?;
    let answer = answer.map_err(|error| format!("VERSION failed: {error}"))?;
    if answer.len() > VERSION_ANSWER_BYTES_MAX {
        return Err(format!(
            "its answer to VERSION has more than {VERSION_ANSWER_BYTES_MAX} bytes"
        ));
    }
    let answer: Answer = serde_json::from_slice(&answer)
        .map_err(|error| format!("its answer to VERSION is malformed: {error}"))?;
    let speaks =
        |version: &Version| answer.supported_versions.iter().any(|text| text == version.as_str());
    Ok(Version::ALL.into_iter().filter(speaks).collect())
}

async fn ask(binary: &Path) -> io::Result<Vec<u8>> {
    let mut child = loop {
        match start(binary) {
            // A package manager is just replacing it.
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {
                tokio::time::sleep(Duration::from_millis(BUSY_PAUSE_MS)).await;
            }
            other => break other?,
        }
    };
    if let Some(mut stdin) = child.stdin.take() {
        let config = serde_json::json!({ "cniVersion": Version::V1_0_0.as_str() }).to_string();
        // A plugin that does not read has the right to close it.
        let _ = stdin.write_all(config.as_bytes()).await;
    }
    let mut answer = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let limit = u64::try_from(VERSION_ANSWER_BYTES_MAX).unwrap_or(u64::MAX).saturating_add(1);
        stdout.take(limit).read_to_end(&mut answer).await?;
    }
    if answer.len() > VERSION_ANSWER_BYTES_MAX {
        child.kill().await?;
        return Ok(answer);
    }
    let status = child.wait().await?;
    match status.success() {
        true => Ok(answer),
        false => Err(io::Error::other(status.to_string())),
    }
}

fn start(binary: &Path) -> io::Result<Child> {
    // Plugins of old libraries want all variables for every command.
    let unused = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"];
    Command::new(binary)
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .envs(unused.map(|name| (name, "dummy")))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
}
