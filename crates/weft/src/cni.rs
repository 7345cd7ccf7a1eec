//! The CNI plugin: this program under the name `weft-cni`. A container runtime runs it for each command.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use weft_container::cni::{
    ApiDaemon, BOOT_ID_FILE, CniError, Code, Command, Environment, Host, Outcome, PLUGIN_NAME,
    Request, Tombstones, Version, boot_id, execute, now_ns, read_config,
};
use weft_daemon::config::DEFAULT_RUNTIME_DIR;
use weft_kernel::Kernel;

/// The plugin's own network namespace.
const OWN_NAMESPACE: &str = "/proc/self/ns/net";

/// Whether this program was called as the plugin.
#[must_use]
pub fn is_called() -> bool {
    let name = std::env::args_os().next();
    name.is_some_and(|name| Path::new(&name).file_name() == Some(OsStr::new(PLUGIN_NAME)))
}

/// Obeys the runtime's command.
#[must_use]
pub fn main() -> ExitCode {
    // The order of plugin processes decides between an ADD and a DEL.
    let started_ns = now_ns();
    let outcome = outcome(started_ns);
    for note in &outcome.notes {
        let _ = writeln!(io::stderr().lock(), "{PLUGIN_NAME}: {note}");
    }
    match io::stdout().lock().write_all(outcome.stdout.as_bytes()) {
        Ok(()) => ExitCode::from(outcome.exit_code),
        Err(_) => ExitCode::FAILURE,
    }
}

fn outcome(started_ns: u64) -> Outcome {
    let environment = Environment::of(std::env::vars_os());
    let config = match read_config(io::stdin().lock()) {
        Ok(config) => config,
        // Nothing but a missing name keeps a container from ending.
        Err(_) if environment.command().is_ok_and(|command| command == Command::Del) => Vec::new(),
        Err(error) => return Outcome::failure(Version::LATEST, &error),
    };
    let request = match Request::parse(&environment, &config) {
        Ok(request) => request,
        Err(rejected) => return rejected.into(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime {
        Ok(runtime) => runtime.block_on(obey(request, started_ns)),
        Err(error) => {
            let error = CniError::new(Code::Io, "cannot start the plugin", error.to_string());
            Outcome::failure(request.version, &error)
        }
    }
}

async fn obey(request: Request, started_ns: u64) -> Outcome {
    let runtime_dir: PathBuf =
        request.runtime_dir().unwrap_or_else(|| DEFAULT_RUNTIME_DIR.as_ref()).to_owned();
    let host = Host {
        daemon: &ApiDaemon::of(&runtime_dir),
        unlink: async |namespace: &Path, interface: &str| {
            let kernel = Kernel::new().map_err(io::Error::other)?;
            let removed = kernel.remove_container_end(namespace, interface).await;
            removed.map(drop).map_err(io::Error::other)
        },
        tombstones: Tombstones::of(&runtime_dir),
        own_namespace: OWN_NAMESPACE.into(),
        identify: weft_container::identify,
        started_ns,
        // Without it the daemon takes a tombstone for outdated, and finds the end of the container itself.
        boot: boot_id(BOOT_ID_FILE.as_ref()).unwrap_or_default(),
    };
    execute(request, &host).await
}
