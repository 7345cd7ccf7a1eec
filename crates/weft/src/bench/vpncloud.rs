//! The row of vpncloud, which is built by cargo where the machine does not have it.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::others::{Outside, cache_directory, write_secret};
use super::rows::{Row, VPNCLOUD};
use crate::sandbox::{
    Running, Sandbox, SandboxError, find_program, last_lines, output_of, progress, wait_until,
};

/// The release that is built.
const VERSION: &str = "2.3.0";
/// What building it may take, once.
const INSTALL_LIMIT: Duration = Duration::from_secs(300);
/// The link's MTU less that of its device: as much as wireguard-go takes, so that both send whole
/// packets.
const OVERHEAD_BYTES: u32 = 80;
const PORT: u16 = 3210;
/// The most lines of its log that a reason quotes.
const LOG_LINES_MAX: usize = 4;
const DEVICE: &str = "weftcloud";
/// It asks for the route to this address (and sends nothing there) to learn its own, and gives up
/// without one.
const ASKED_FOR: &str = "8.8.8.8";
/// What the two ends may take until they reach each other.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// vpncloud between the hosts, without containers.
///
/// # Errors
/// What a command of the sandbox said. A vpncloud that does not come up, as another version may not, is
/// [`Outside::Missing`].
pub fn vpncloud(sandbox: &Sandbox, link_mtu: u32) -> Result<Outside, SandboxError> {
    let binary = match program() {
        Ok(binary) => binary,
        Err(why) => return Ok(Outside::Missing(why)),
    };
    let mtu = link_mtu.saturating_sub(OVERHEAD_BYTES);
    let mut processes = Vec::new();
    for index in 0..2 {
        match start(sandbox, &binary, index, mtu)? {
            Ok(process) => processes.push(process),
            Err(why) => return Ok(Outside::Missing(why)),
        }
    }
    let target = address(1).to_string();
    let reached = wait_until("vpncloud's ends to reach each other", CONNECT_LIMIT, || {
        let ping = ["ping", "-n", "-c", "1", "-W", "1", &target];
        sandbox.host(0).netns().exec(&ping).is_ok_and(|output| output.status.success())
    });
    if let Err(error) = reached {
        return Ok(Outside::Missing(format!("{error}: {}", said(sandbox, 0))));
    }
    let row = Box::new(Row {
        name: VPNCLOUD,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: address(1).into(),
        mtu,
        daemons: processes.iter().map(Running::pid).collect(),
        setup: "vpncloud (`cargo install vpncloud`) on each host, host to host: type tun, AES-256"
            .to_owned(),
        _processes: processes,
    });
    let version = output_of(Command::new(&binary).arg("--version"), Duration::from_secs(5)).ok();
    let version = version.and_then(|output| Some(output.stdout.lines().next()?.trim().to_owned()));
    Ok(Outside::Row { row, version: version.unwrap_or_else(|| VERSION.to_owned()) })
}

/// Finds it, or builds it once; the error says why there is none.
fn program() -> Result<PathBuf, String> {
    if let Some(binary) = find_program("vpncloud") {
        return Ok(binary);
    }
    let cache = cache_directory().ok_or("there is no home directory for a cache")?;
    let binary = cache.join("vpncloud");
    if binary.is_file() {
        return Ok(binary);
    }
    let cargo = find_program("cargo").ok_or("there is no cargo to build it with")?;
    let root = cache.parent().ok_or("there is no directory for a cache")?;
    progress::note("building vpncloud with cargo, once");
    let mut command = Command::new(cargo);
    command.args(["install", "vpncloud", "--locked", "--version", VERSION, "--root"]).arg(root);
    let output = output_of(&mut command, INSTALL_LIMIT);
    let output = output.and_then(crate::sandbox::Output::success);
    output.map(|_| binary).map_err(|error| error.to_string())
}

/// Starts one end; the inner error says why it does not come up.
fn start(
    sandbox: &Sandbox,
    binary: &Path,
    index: usize,
    mtu: u32,
) -> Result<Result<Running, String>, SandboxError> {
    let host = sandbox.host(index);
    let config = sandbox.directory().join(format!("vpncloud{}.yaml", index + 1));
    let password = std::fs::read_to_string(sandbox.password_file())
        .map_err(SandboxError::io("read the password of this run"))?;
    let own = address(index);
    let text = format!(
        "device:\n  type: tun\n  name: {DEVICE}\nmode: router\nauto-claim: false\n\
         claims: [\"{own}/32\"]\ncrypto:\n  password: \"{}\"\n  algorithms: [AES256]\n\
         listen: \"{}:{PORT}\"\npeers: [\"{}:{PORT}\"]\nport-forwarding: false\n",
        password.trim(),
        host.ipv4(),
        sandbox.host(1 - index).ipv4(),
    );
    write_secret(&config, &text)?;
    host.netns().ip(&format!("route replace {ASKED_FOR} dev eth0"))?;
    let log_path = log_path(sandbox, index);
    let log = File::create(&log_path)
        .map_err(SandboxError::io(format!("make {}", log_path.display())))?;
    let words = [&binary.to_string_lossy(), "--config", &config.to_string_lossy()];
    let mut process = host.netns().spawn_logged(&words, &log)?;
    // Given to vpncloud itself, the address comes out as another on today's kernels.
    let up = wait_until("vpncloud's device", CONNECT_LIMIT, || {
        let address = host.netns().ip(&format!("address replace {own}/24 dev {DEVICE}"));
        address.is_ok() && host.netns().ip(&format!("link set {DEVICE} mtu {mtu} up")).is_ok()
    });
    if let Err(error) = up {
        process.kill();
        return Ok(Err(format!("{error}: {}", said(sandbox, index))));
    }
    Ok(Ok(process))
}

/// The end of what one end has logged.
fn said(sandbox: &Sandbox, index: usize) -> String {
    let log = std::fs::read_to_string(log_path(sandbox, index)).unwrap_or_default();
    last_lines(&log, LOG_LINES_MAX)
}

fn log_path(sandbox: &Sandbox, index: usize) -> PathBuf {
    sandbox.directory().join(format!("vpncloud{}.log", index + 1))
}

/// Benchmark addresses (RFC 2544's 198.18.0.0/15), inside the sandbox's namespaces only.
fn address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 4, if index == 0 { 1 } else { 2 })
}
