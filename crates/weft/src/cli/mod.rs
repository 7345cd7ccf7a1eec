//! The command line: arguments in, text or JSON out, an exit code that scripts can use.

mod answers;
mod args;
mod launch;
pub(crate) mod output;
mod requests;
mod run;
mod setup_cni;
mod top;

use std::process::ExitCode;

pub use args::{Cli, Command};

use weft_api::{ApiError, ClientError, ErrorKind};

use args::OpenvpnCommand;

/// Runs one command and gives its exit code.
///
/// | code | meaning |
/// | --- | --- |
/// | 0 | done |
/// | 1 | failed; the text states the cause and the remedy |
/// | 2 | the command line makes no sense |
/// | 3 | the daemon is not running, or this user has no access |
/// | 4 | the named object does not exist |
/// | 5 | it is taken: an address, a name, a second daemon |
/// | 6 | not possible now, may be later |
pub fn main(cli: Cli) -> ExitCode {
    match dispatch(cli) {
        Ok(code) => code,
        Err(error) => {
            output::error(&error);
            ExitCode::from(exit_code(&error))
        }
    }
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    let runtime_dir = cli.runtime_dir;
    match cli.command {
        Command::Launch(launch) => launch::launch(launch, cli.config.as_deref(), &runtime_dir),
        Command::Run(run) => run::run(run, &runtime_dir),
        Command::Doctor(options) => {
            let mut diagnosis = crate::doctor::examine();
            if let Some(status) = requests::status_now(&runtime_dir) {
                diagnosis.add_running(&status.passed_by, &status.warnings, &status.hardening);
            }
            output::print(options.json, &diagnosis, crate::doctor::text)?;
            Ok(if diagnosis.ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Command::HoldSockets => weft_daemon::hold_sockets(&runtime_dir).map(|()| ExitCode::SUCCESS),
        Command::OpenNamespaces => weft_daemon::open_namespaces().map(|()| ExitCode::SUCCESS),
        Command::SetupCni(args) => setup_cni::setup_cni(args, &runtime_dir),
        Command::Openvpn(OpenvpnCommand::Connect(args)) => crate::openvpn::connect::run(&args),
        Command::Dco(command) => crate::dco::run(command, &runtime_dir),
        Command::Completions { shell } => {
            output::completions(shell)?;
            Ok(ExitCode::SUCCESS)
        }
        command => requests::request(command, &runtime_dir),
    }
}

fn exit_code(error: &anyhow::Error) -> u8 {
    if let Some(error) = error.downcast_ref::<ClientError>() {
        return match error {
            ClientError::NotRunning(_) | ClientError::NotPermitted(_) => 3,
            ClientError::Refused(refusal) => refusal_code(refusal.kind),
            ClientError::Malformed { .. } | ClientError::Ended(_) | ClientError::TimedOut(_) => 1,
        };
    }
    error.downcast_ref::<ApiError>().map_or(1, |refusal| refusal_code(refusal.kind))
}

const fn refusal_code(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::BadRequest => 2,
        ErrorKind::NotFound => 4,
        ErrorKind::Conflict => 5,
        ErrorKind::Unavailable => 6,
        ErrorKind::Internal => 1,
    }
}
