//! The process that opens the network namespaces of containers, since Landlock forbids the daemon to do
//! so. It has two capabilities and no secret, and hands over only network namespaces.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, bail};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::thread::CapabilitySet;
use weft_io::handover::close_inherited;
use weft_io::namespace::opener;

use super::privileges;

/// This program, even if its file was replaced meanwhile.
const PROGRAM: &str = "/proc/self/exe";
/// The name of the process.
const NAME: &std::ffi::CStr = c"weft-opener";
/// Inspecting processes of any user and namespace, and reading any directory.
const NEEDED: CapabilitySet = CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_READ_SEARCH);

/// The process lives as long as the daemon.
static PROCESS: OnceLock<Child> = OnceLock::new();

/// Starts the process, which ends once the returned socket is closed. Call it before the daemon is under
/// Landlock, since later children are under it too.
pub(super) fn start() -> io::Result<OwnedFd> {
    let (here, there) = opener::pair()?;
    // The environment is cleared: it may contain a password.
    let child = Command::new(PROGRAM)
        .arg0("weft")
        .arg("open-namespaces")
        .env_clear()
        .stdin(there)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let process = child.id();
    tracing::debug!(process, "started the process that opens namespaces");
    let _ = PROCESS.set(child);
    Ok(here)
}

/// Opens network namespaces for the daemon until it has ended. The daemon starts it, with a socket as
/// standard input.
///
/// # Errors
/// Standard input is something else, or the kernel refuses to wait.
pub fn open_namespaces() -> anyhow::Result<()> {
    let stdin = io::stdin();
    let asked = sockopt::socket_type(&stdin) == Ok(SocketType::SEQPACKET)
        && sockopt::socket_domain(&stdin) == Ok(AddressFamily::UNIX);
    if !asked {
        bail!("only the daemon starts open-namespaces; do not run it by hand");
    }
    close_inherited().context("cannot list open descriptors; is /proc mounted?")?;
    // Signals from the daemon's terminal must not reach this process.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    let _ = rustix::thread::set_name(NAME);
    // If the kernel refuses, the process still does not use them.
    let _ = privileges::keep_capabilities(NEEDED);
    let _ = privileges::refuse_system_calls();
    opener::serve(&stdin).context("cannot open namespaces any longer")
}
