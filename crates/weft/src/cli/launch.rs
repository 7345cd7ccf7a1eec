//! `weft launch`: starts the daemon and returns once it answers.

use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use serde::{Deserialize, Serialize};
use weft_api::{ApiError, ErrorKind, Invitation};
use weft_daemon::config::Settings;
use weft_daemon::{self as daemon, StartError};
use zeroize::Zeroizing;

use super::args::LaunchArgs;
use super::{answers, output};

/// The secrets for the detached daemon, passed on standard input, so that its arguments and
/// environment contain none.
#[derive(Serialize, Deserialize)]
struct Secrets {
    password: Option<Zeroizing<String>>,
    token: Option<Zeroizing<String>>,
}

/// The one line that the detached daemon writes to standard output.
#[derive(Serialize, Deserialize)]
enum Readiness {
    Ready(Invitation),
    Failed(ApiError),
}

pub(super) fn launch(
    args: LaunchArgs,
    config: Option<&Path>,
    runtime_dir: &Path,
) -> anyhow::Result<ExitCode> {
    let (foreground, detached, json) = (args.foreground, args.detached, args.json);
    let mut settings = args
        .options
        .settings(config, runtime_dir)
        .map_err(|error| ApiError::new(ErrorKind::BadRequest, error))?;
    if detached {
        let secrets: Secrets = serde_json::from_reader(std::io::stdin().lock())
            .context("only weft launch starts a detached daemon; leave out --detached")?;
        settings.password = secrets.password;
        settings.token = secrets.token;
        return Ok(run_detached(settings));
    }
    ask_for_token(&mut settings)?;
    if foreground {
        daemon::log_to_stderr();
        daemon::run(settings, |invitation| {
            let _ = output::print(json, invitation, output::invitation);
        })
        .map_err(refusal)?;
        return Ok(ExitCode::SUCCESS);
    }
    start_detached(&settings, json)
}

/// Starts this program again as the daemon and waits until it answers or has failed.
fn start_detached(settings: &Settings, json: bool) -> anyhow::Result<ExitCode> {
    daemon::check_host(settings, output::progress).map_err(refusal)?;
    let (log, log_path) =
        daemon::open_log(&settings.state_dir, &settings.runtime_dir, output::progress)?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command
        .args(std::env::args_os().skip(1))
        .arg("--detached")
        .env_remove("WEFT_PASSWORD")
        .env_remove("WEFT_TOKEN")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log);
    let mut child = command.spawn().context("cannot start the daemon")?;
    hand_over_secrets(&mut child, settings)?;
    match wait_for_readiness(&mut child, &log_path)? {
        Readiness::Ready(invitation) => {
            output::print(json, &invitation, |invitation| {
                format!(
                    "weft is running (process {})\n{}",
                    child.id(),
                    output::invitation(invitation)
                )
            })?;
            answers::wait(&settings.runtime_dir)
        }
        Readiness::Failed(error) => {
            let _ = child.wait();
            Err(error.into())
        }
    }
}

fn hand_over_secrets(child: &mut Child, settings: &Settings) -> anyhow::Result<()> {
    let secrets = Secrets { password: settings.password.clone(), token: settings.token.clone() };
    let secrets = Zeroizing::new(serde_json::to_vec(&secrets)?);
    let mut stdin = child.stdin.take().context("the daemon has no standard input")?;
    stdin.write_all(&secrets).context("the daemon exited before it was ready")
}

fn wait_for_readiness(child: &mut Child, log: &Path) -> anyhow::Result<Readiness> {
    let log = log.display();
    let stdout = child.stdout.take().context("the daemon has no standard output")?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let limited = stdout.take(READINESS_BYTES_MAX);
        let _ = BufReader::new(limited).read_line(&mut line);
        let _ = sender.send(line);
    });
    for waited in 0..START_TIMEOUT_S {
        match receiver.recv_timeout(Duration::from_secs(1)) {
            Ok(line) => {
                return serde_json::from_str(&line).map_err(|_| {
                    anyhow::anyhow!("the daemon exited during start-up; {log} says why")
                });
            }
            Err(_) if waited >= 2 => output::progress("waiting for the daemon to answer ..."),
            Err(_) => {}
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    bail!("the daemon did not answer within {START_TIMEOUT_S} s and was stopped; {log} says why")
}

/// The daemon's own side of [`start_detached`].
fn run_detached(settings: Settings) -> ExitCode {
    // A daemon outlives its terminal and keeps no directory busy.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    daemon::log_to_file(daemon::log_path(&settings.state_dir, &settings.runtime_dir));
    let result = daemon::run(settings, |invitation| {
        announce(&Readiness::Ready(invitation.clone()));
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "weft cannot run");
            announce(&Readiness::Failed(error.into_api_error()));
            ExitCode::FAILURE
        }
    }
}

fn announce(readiness: &Readiness) {
    if let Ok(line) = serde_json::to_string(readiness) {
        let _ = writeln!(std::io::stdout().lock(), "{line}");
    }
}

fn refusal(error: StartError) -> anyhow::Error {
    error.into_api_error().into()
}

/// A join line without a token at hand: prompts for it if there is a terminal.
fn ask_for_token(settings: &mut Settings) -> anyhow::Result<()> {
    let by_key = settings.hosts.iter().any(|host| host.contains('#'));
    let stdin = std::io::stdin();
    if !by_key
        || settings.token.is_some()
        || settings.password.is_some()
        || daemon::has_secret(&settings.state_dir)
        || !stdin.is_terminal()
    {
        return Ok(());
    }
    output::ask("Token: ")?;
    let shown = tcgetattr(&stdin)?;
    let mut hidden = shown.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    tcsetattr(&stdin, OptionalActions::Flush, &hidden)?;
    let mut line = Zeroizing::new(String::new());
    let read = stdin.lock().read_line(&mut line);
    tcsetattr(&stdin, OptionalActions::Flush, &shown)?;
    output::progress("");
    read?;
    settings.token = Some(Zeroizing::new(line.trim().to_owned()));
    Ok(())
}

/// Longest wait for the daemon's first answer.
const START_TIMEOUT_S: u64 = 30;
/// Longest line of readiness read.
const READINESS_BYTES_MAX: u64 = 64 << 10;
