//! The status file and the management interface of a gateway as a user sets them, by socat.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Host, require, try_wait_until};
use weft_io::uninterrupted;
use weft_lab::net::gateway::{LIMIT, Stage};

const PORT: &str = "127.0.0.1:7505";
/// As many connections as the interface takes at once.
const CONNECTIONS_MAX: usize = 8;
/// Long enough for an answer, where none is to come.
const SILENCE: Duration = Duration::from_millis(500);

fn serve(host: &Host, more: &[&str]) -> anyhow::Result<Value> {
    let fixed = ["openvpn", "serve", "--ping", "1", "--ping-restart", "4"];
    Ok(host.weft_json(&[&fixed[..], more].concat())?)
}

fn path(served: &Value, name: &str) -> PathBuf {
    served[name].as_str().unwrap_or_default().into()
}

/// Says lines to the interface, and returns what it answers until it or socat ends the connection.
fn say(host: &Host, place: &str, lines: &str) -> anyhow::Result<String> {
    let command = format!("printf '{lines}' | socat -t 20 - {place}");
    Ok(host.netns().exec(&["sh", "-c", &command])?.success()?.stdout)
}

/// The time in a status file.
fn time(file: &Path) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("TIME\t").map(str::to_owned));
    line.and_then(|line| line.split('\t').nth(1)?.parse().ok()).unwrap_or_default()
}

#[test]
fn watching_is_set_by_options_and_lasts_over_a_crash() -> anyhow::Result<()> {
    require("socat", "socat")?;
    let stage = Stage::new()?;
    let host = stage.host();
    let secret = stage.lab.sandbox.directory().join("secret");
    let set_secret = |mode: u32| -> anyhow::Result<()> {
        std::fs::write(&secret, "sesame\n")?;
        Ok(std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(mode))?)
    };
    let file = secret.to_string_lossy().into_owned();
    set_secret(0o644)?;
    for (options, text) in [
        (&["--status", "/var/log/openvpn-status.log"][..], "ln -s "),
        (&["--status", "../api.sock"], "ln -s "),
        (&["--status", "a", "--status-version", "4"], "1, 2 or 3"),
        (&["--status", "a", "--status-interval", "0"], "1 to 86400"),
        (&["--status", "a", "--management", "a"], "one name"),
        (&["--management", PORT], "--management-password"),
        (&["--management", "0.0.0.0:7505", "--management-password", &file], "127.0.0.1"),
        (&["--management", PORT, "--management-password", &file], "chmod 600"),
    ] {
        let refused = host.weft(&[&["openvpn", "serve"], options].concat())?;
        ensure!(!refused.status.success() && refused.stderr.contains(text), "{refused:?}");
    }
    // The gateway serves as before, with neither.
    try_wait_until("the gateway to serve as before", LIMIT, || {
        let gateway = &host.weft_json(&["status"])?["gateway"];
        Ok(gateway["state"] == "serving" && gateway["management"].is_null())
    })?;

    set_secret(0o600)?;
    let third = ["--status", "status.log", "--status-interval", "1", "--status-version", "3"];
    let tcp = ["--management", PORT, "--management-password", &file];
    let served = serve(host, &[&third[..], &tcp].concat())?;
    ensure!(served["management"] == PORT, "{served}");
    let log = path(&served, "status_file");
    try_wait_until("the status file", LIMIT, || Ok(time(&log) > 0))?;
    let place = format!("TCP:{PORT}");
    let said = say(host, &place, "sesame\\nstatus\\nload-stats\\nquit\\n")?;
    ensure!(said.starts_with("ENTER PASSWORD:SUCCESS: password is correct\r\n>INFO:"), "{said}");
    ensure!(said.contains("\r\nHEADER\tCLIENT_LIST\tCommon Name\t"), "{said}");
    ensure!(said.ends_with("\r\nSUCCESS: nclients=0,bytesin=0,bytesout=0\r\n"), "{said}");
    let said = say(host, &place, "a\\nb\\nc\\npid\\n")?;
    ensure!(said == "ENTER PASSWORD:".repeat(3), "{said}");

    let served = serve(host, &[&third[..], &["--management", "management.sock"]].concat())?;
    let socket = path(&served, "management");
    try_wait_until("the status file", LIMIT, || Ok(time(&log) > 0))?;
    host.kill_daemon();
    let before = time(&log);
    ensure!(before > 0 && socket.exists(), "a crash takes files along");
    host.start_daemon(&[])?;
    try_wait_until("the status file to be written again", LIMIT, || Ok(time(&log) > before))?;
    let unix = format!("UNIX-CONNECT:{}", socket.display());
    ensure!(say(host, &unix, "pid\\nquit\\n")?.contains("\r\nSUCCESS: pid="));
    crowd(&socket)?;
    let stopped = host.weft(&["openvpn", "stop"])?.success()?;
    ensure!(!log.exists() && !socket.exists(), "{stopped:?}");
    Ok(())
}

/// One connection more than the interface takes waits until another ends.
fn crowd(socket: &Path) -> anyhow::Result<()> {
    let greeted = |stream: &mut UnixStream, limit: Duration| -> anyhow::Result<bool> {
        stream.set_read_timeout(Some(limit))?;
        Ok(matches!(uninterrupted(|| std::io::Read::read(stream, &mut [0; 512])), Ok(1..)))
    };
    let mut streams = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        let mut stream = UnixStream::connect(socket)?;
        ensure!(greeted(&mut stream, LIMIT)?, "no greeting");
        streams.push(stream);
    }
    let mut late = UnixStream::connect(socket)?;
    ensure!(!greeted(&mut late, SILENCE)?, "one too many is greeted");
    streams.pop().context("no connection")?;
    ensure!(greeted(&mut late, LIMIT)?, "the next one is not greeted");
    Ok(())
}
