//! The command-line side of the verbs.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use rustix::process::setsid;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use weft_api::{ApiError, Client, ClientError, ErrorKind};

use super::args::{DcoCommand, Engine, Listen, NewIface, NewPeer};
use super::holder::{DEVICES, directory, hold};
use super::requests::{DeviceCall, Request};
use crate::cli::output;

/// The one line that a holding process writes to standard output.
#[derive(Serialize, Deserialize)]
enum Readiness {
    Ready(Value),
    Failed(ApiError),
}

/// Runs one verb.
pub(crate) fn run(command: DcoCommand, runtime_dir: &Path) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match command {
        DcoCommand::Hold(words) => return Ok(runtime.block_on(held(&words, runtime_dir))),
        DcoCommand::NewIface(words) => new_iface(&words, runtime_dir, &runtime)?,
        DcoCommand::Listen(words) => runtime.block_on(listen(&words, runtime_dir))?,
        command => {
            let (device, json, request) = request(command)?;
            let answer = runtime.block_on(ask(&device, runtime_dir, &request))?;
            // A verb without an answer prints nothing.
            let is_empty = answer.as_object().is_some_and(serde_json::Map::is_empty);
            if json || !is_empty {
                output::print(json, &answer, text)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Sends requests to a device's holder in sequence, without starting a program for each. Ignores the
/// answers.
///
/// # Errors
/// The first refusal, or that there is no holder.
pub fn ask_all(
    device: &str,
    runtime_dir: &Path,
    mut requests: impl Iterator<Item = Request>,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    requests
        .try_for_each(|request| runtime.block_on(ask(device, runtime_dir, &request)).map(|_| ()))
}

/// The device, the output format, and the request to its holder.
fn request(command: DcoCommand) -> anyhow::Result<(String, bool, Request)> {
    Ok(match command {
        DcoCommand::GetIface(of) => (of.device, of.json, Request::Show),
        DcoCommand::DelIface(of) => (of.device, of.json, Request::End),
        DcoCommand::NewPeer(new) => {
            let NewPeer { words: peer, carrier, mark, .. } = new;
            let request = Request::NewPeer { peer, carrier, mark };
            (new.device, new.json, request)
        }
        DcoCommand::SetPeer(set) => (set.device, set.json, Request::SetPeer { peer: set.words }),
        DcoCommand::GetPeer(get) => (get.device, get.json, Request::GetPeer { id: get.peer }),
        DcoCommand::DelPeer(of) => (of.device, of.json, Request::DelPeer { id: of.peer }),
        DcoCommand::NewKey(mut new) => {
            // The holder has another working directory.
            new.words.key_file = std::path::absolute(&new.words.key_file)?;
            new.words.state_dir = std::path::absolute(&new.words.state_dir)?;
            (new.device, new.json, Request::NewKey { key: new.words })
        }
        DcoCommand::GetKey(of) => {
            (of.device, of.json, Request::GetKey { peer: of.peer, slot: of.slot })
        }
        DcoCommand::SwapKeys(of) => (of.device, of.json, Request::SwapKeys { peer: of.peer }),
        DcoCommand::DelKey(of) => {
            (of.device, of.json, Request::DelKey { peer: of.peer, slot: of.slot })
        }
        DcoCommand::Packet(packet) => {
            let bytes = bytes_of(&packet.bytes).ok_or_else(|| {
                let text =
                    "invalid packet: give an even number of hexadecimal digits, at least two";
                ApiError::new(ErrorKind::BadRequest, text)
            })?;
            (packet.device, packet.json, Request::Packet { peer: packet.peer, bytes })
        }
        DcoCommand::NewIface(_) | DcoCommand::Hold(_) | DcoCommand::Listen(_) => {
            bail!("not a request to a device")
        }
    })
}

async fn ask(device: &str, runtime_dir: &Path, request: &Request) -> anyhow::Result<Value> {
    let client = Client::new(&directory(runtime_dir, device));
    client.call::<DeviceCall>(request).await.map_err(|error| nobody(device, error))
}

/// The missing process is the device's holder, not the daemon.
fn nobody(device: &str, error: ClientError) -> anyhow::Error {
    match error {
        ClientError::NotRunning(_) => ApiError::new(
            ErrorKind::NotFound,
            format!(
                "no process holds a device {device}: create one with weft dco new-iface {device}"
            ),
        )
        .into(),
        other => other.into(),
    }
}

/// Starts this program again to hold the device, and waits until it answers or has failed.
fn new_iface(
    words: &NewIface,
    runtime_dir: &Path,
    runtime: &tokio::runtime::Runtime,
) -> anyhow::Result<()> {
    if runtime.block_on(ask(&words.device, runtime_dir, &Request::Show)).is_ok() {
        let text = format!("a process already holds device {}", words.device);
        return Err(ApiError::new(ErrorKind::Conflict, text).into());
    }
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    let (mode, mtu) = (words.mode.name(), words.mtu.to_string());
    command.arg("--runtime-dir").arg(std::path::absolute(runtime_dir)?);
    command.args(["dco", "hold", &words.device, "--mode", mode, "--mtu", &mtu]);
    if let Some(path_mtu) = words.path_mtu {
        command.args(["--path-mtu", &path_mtu.to_string()]);
    }
    match words.engine {
        Some(Engine::Kernel) => drop(command.args(["--engine", "kernel"])),
        Some(Engine::Userspace) => drop(command.args(["--engine", "userspace"])),
        None => {}
    }
    let log = open_log(&words.device, runtime_dir)?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().context("cannot start the process that holds the device")?;
    let stdout = child.stdout.take().context("the process has no standard output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    match serde_json::from_str(&line) {
        Ok(Readiness::Ready(shown)) => output::print(words.json, &shown, text),
        Ok(Readiness::Failed(error)) => {
            let _ = child.wait();
            Err(error.into())
        }
        Err(_) => bail!("the process that should hold the device exited without an error message"),
    }
}

/// Opens the log of the process that holds a device, for errors that it cannot report otherwise. The
/// log stays when the device is gone.
fn open_log(device: &str, runtime_dir: &Path) -> anyhow::Result<File> {
    if device.contains('/') || device.is_empty() {
        let text = format!("invalid device name {device:?}: use 1 to 15 bytes without slash");
        return Err(ApiError::new(ErrorKind::BadRequest, text).into());
    }
    let devices = runtime_dir.join(DEVICES);
    weft_daemon::make_private_dir(&devices)?;
    let path = log_path(device, runtime_dir);
    let mut options = OpenOptions::new();
    let log = options.append(true).create(true).mode(0o600).open(&path);
    log.with_context(|| format!("cannot write {}", path.display()))
}

fn log_path(device: &str, runtime_dir: &Path) -> PathBuf {
    runtime_dir.join(DEVICES).join(format!("{device}.log"))
}

/// The holding process's side of [`new_iface`].
async fn held(words: &NewIface, runtime_dir: &Path) -> ExitCode {
    // The process outlives its terminal and keeps no directory busy.
    let _ = setsid();
    let _ = std::env::set_current_dir("/");
    weft_daemon::log_to_file(log_path(&words.device, runtime_dir));
    let announce = |readiness: &Readiness| {
        if let Ok(line) = serde_json::to_string(readiness) {
            let _ = writeln!(io::stdout().lock(), "{line}");
        }
    };
    let ready = |shown: &Value| announce(&Readiness::Ready(shown.clone()));
    match hold(words, runtime_dir, ready).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error = error.downcast::<ApiError>();
            let error = error
                .unwrap_or_else(|other| ApiError::new(ErrorKind::Internal, format!("{other:#}")));
            announce(&Readiness::Failed(error));
            ExitCode::FAILURE
        }
    }
}

/// Prints lines as they arrive.
async fn listen(words: &Listen, runtime_dir: &Path) -> anyhow::Result<()> {
    let client = Client::new(&directory(runtime_dir, &words.device));
    let path = if words.packets { "/v1/packets" } else { "/v1/notices" };
    let mut left = words.count.unwrap_or(u64::MAX);
    let print = |line: &str| {
        left = left.saturating_sub(1);
        let printed = writeln!(io::stdout().lock(), "{line}");
        // A closed pipe ends the output quietly.
        printed.is_ok() && left > 0
    };
    client.lines(path, print).await.map_err(|error| nobody(&words.device, error))
}

/// For people: one `name value` a line, a blank line between peers, counts in one line.
fn text(answer: &Value) -> String {
    let shown = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Object(counts) if counts.is_empty() => "none".to_owned(),
        Value::Object(counts) => {
            let counts = counts.iter().map(|(name, count)| format!("{name} {count}"));
            counts.collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    };
    let object = |object: &Value| {
        let fields = object.as_object().into_iter().flatten();
        fields.map(|(name, value)| format!("{name:>18}: {}\n", shown(value))).collect::<String>()
    };
    match answer {
        Value::Array(list) => list.iter().map(object).collect::<Vec<_>>().join("\n"),
        other => object(other),
    }
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    let digits: Vec<u32> = hex.chars().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
    let pairs = digits.chunks_exact(2);
    let whole = pairs.remainder().is_empty() && !digits.is_empty();
    whole.then(|| pairs.map(|pair| (pair[0] << 4 | pair[1]) as u8).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn counts_are_shown_behind_one_another() {
        let shown = |drops: Value| text(&json!({"name": "tun0", "drops": drops}));
        let some = shown(json!({"no_path": 3, "forged": 1}));
        assert!(some.contains("drops: forged 1, no_path 3\n"), "{some}");
        let none = shown(json!({}));
        assert!(none.contains("name: tun0\n") && none.contains("drops: none\n"), "{none}");
    }
}
