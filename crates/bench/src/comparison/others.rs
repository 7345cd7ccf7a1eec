//! The rows of other systems, where they can be had.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::install::{LeftOut, debian_program};
use super::rows::{GRE, OPENVPN, Row};
use crate::sandbox::{
    Running, Sandbox, SandboxError, last_lines, output_of, progress, run, wait_until,
};

/// IPv4 and GRE header.
const GRE_OVERHEAD_BYTES: u32 = 24;
/// The link's MTU less that of OpenVPN's device: as much as wireguard-go takes, so that both send
/// whole packets.
const OPENVPN_OVERHEAD_BYTES: u32 = 80;
const OPENVPN_PORT: u16 = 1195;
/// Limit of OpenVPN's handshake.
const OPENVPN_LIMIT: Duration = Duration::from_secs(30);
/// Limit of a short command.
const COMMAND_LIMIT: Duration = Duration::from_secs(10);

/// The row of another system, or the reason why there is none.
#[derive(Debug)]
pub enum Outside {
    /// It runs.
    Row {
        /// The way between the hosts.
        row: Box<Row>,
        /// Its version.
        version: String,
    },
    /// It cannot be had on this machine; the text says why.
    Missing(String),
}

impl From<LeftOut> for Outside {
    fn from(LeftOut(why): LeftOut) -> Self {
        Self::Missing(why)
    }
}

/// The kernel's GRE host to host, not encrypted: the least that a tunnel takes.
///
/// # Errors
/// Returns an error if `ip` fails; a kernel without GRE is [`Outside::Missing`].
pub fn gre(sandbox: &Sandbox, link_mtu: u32) -> Result<Outside, SandboxError> {
    let mtu = link_mtu.saturating_sub(GRE_OVERHEAD_BYTES);
    for (index, host) in sandbox.hosts().iter().enumerate().take(2) {
        let remote = sandbox.host(1 - index).ipv4();
        let local = host.ipv4();
        let made =
            host.netns().ip(&format!("link add wgre type gre local {local} remote {remote}"));
        if let Err(error) = made {
            return Ok(Outside::Missing(format!("kernel does not support GRE: {error}")));
        }
        host.netns().ip(&format!("link set wgre mtu {mtu} up"))?;
        host.netns().ip(&format!("addr add {}/24 dev wgre", gre_address(index)))?;
    }
    let row = Box::new(Row {
        name: GRE,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: gre_address(1).into(),
        mtu,
        daemons: Vec::new(),
        setup: "host to host, `ip link add type gre`; not encrypted".to_owned(),
        _processes: Vec::new(),
    });
    Ok(Outside::Row { row, version: "the kernel's".to_owned() })
}

/// Writes a file that only its owner reads.
pub(super) fn write_secret(path: &Path, text: &str) -> Result<(), SandboxError> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    let opened = options.create(true).write(true).truncate(true).mode(0o600).open(path);
    opened
        .and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()))
        .map_err(|source| SandboxError::Io { what: format!("write {}", path.display()), source })
}

/// OpenVPN between the hosts, without its kernel module and without containers.
///
/// # Errors
/// Returns an error if a command fails; a missing program is [`Outside::Missing`].
pub fn openvpn(sandbox: &Sandbox, link_mtu: u32) -> Result<Outside, SandboxError> {
    for (program, package) in [("openvpn", "openvpn"), ("openssl", "openssl")] {
        if let Err(why) = debian_program(program, package) {
            return Ok(why.into());
        }
    }
    let mtu = link_mtu.saturating_sub(OPENVPN_OVERHEAD_BYTES);
    let prints = [openvpn_identity(sandbox, 0)?, openvpn_identity(sandbox, 1)?];
    let mut processes = Vec::new();
    for index in 0..2 {
        processes.push(start_openvpn(sandbox, index, &prints[1 - index], mtu)?);
    }
    for index in 0..2 {
        let log = sandbox.directory().join(format!("openvpn{}.log", index + 1));
        let text = || std::fs::read_to_string(&log).unwrap_or_default();
        let up = wait_until("OpenVPN's handshake", OPENVPN_LIMIT, || {
            text().contains("Initialization Sequence Completed")
        });
        if let Err(error) = up {
            progress::note(&last_lines(&text(), 6));
            return Err(error);
        }
    }
    let row = Box::new(Row {
        name: OPENVPN,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: openvpn_address(1).into(),
        mtu,
        daemons: processes.iter().map(Running::pid).collect(),
        setup: "openvpn from the distribution on each host, host to host: --disable-dco --fast-io \
                --data-ciphers AES-256-GCM --mssfix 0 --sndbuf and --rcvbuf 4 MiB --txqueuelen 2000"
            .to_owned(),
        _processes: processes,
    });
    let version = openvpn_version().unwrap_or_else(|| "unknown".to_owned());
    Ok(Outside::Row { row, version })
}

/// OpenVPN's version.
pub(super) fn openvpn_version() -> Option<String> {
    let output = output_of(Command::new("openvpn").arg("--version"), COMMAND_LIMIT).ok()?;
    output.stdout.split_whitespace().nth(1).map(str::to_owned)
}

/// Makes a key and a certificate for one end; returns the fingerprint.
fn openvpn_identity(sandbox: &Sandbox, index: usize) -> Result<String, SandboxError> {
    let file = |kind: &str| {
        sandbox
            .directory()
            .join(format!("openvpn{}.{kind}", index + 1))
            .to_string_lossy()
            .into_owned()
    };
    let (key, certificate) = (file("key"), file("crt"));
    run(Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"])
        .args([
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=weft-bench",
            "-keyout",
            &key,
            "-out",
            &certificate,
        ]))?;
    let output = run(Command::new("openssl").args([
        "x509",
        "-noout",
        "-fingerprint",
        "-sha256",
        "-in",
        &certificate,
    ]))?;
    Ok(output.stdout.trim().rsplit('=').next().unwrap_or_default().to_owned())
}

fn start_openvpn(
    sandbox: &Sandbox,
    index: usize,
    peer_fingerprint: &str,
    mtu: u32,
) -> Result<Running, SandboxError> {
    let host = sandbox.host(index);
    let path = |kind: &str| sandbox.directory().join(format!("openvpn{}.{kind}", index + 1));
    let (config, log_path) = (path("conf"), path("log"));
    let (role, dh) = if index == 0 { ("tls-client", "") } else { ("tls-server", "dh none\n") };
    let text = format!(
        "dev weftovpn\ndev-type tun\nproto udp\n{role}\n{dh}\
         local {}\nremote {} {OPENVPN_PORT}\nport {OPENVPN_PORT}\nifconfig {} {}\n\
         key {}\ncert {}\npeer-fingerprint {peer_fingerprint}\n\
         data-ciphers AES-256-GCM\ndisable-dco\nfast-io\ntun-mtu {mtu}\nmssfix 0\n\
         sndbuf 4194304\nrcvbuf 4194304\ntxqueuelen 2000\n",
        host.ipv4(),
        sandbox.host(1 - index).ipv4(),
        openvpn_address(index),
        openvpn_address(1 - index),
        path("key").display(),
        path("crt").display(),
    );
    write_secret(&config, &text)?;
    let log = File::create(&log_path).map_err(|source| SandboxError::Io {
        what: format!("make {}", log_path.display()),
        source,
    })?;
    host.netns().spawn_logged(&["openvpn", "--config", &config.to_string_lossy()], &log)
}

/// Benchmark addresses (RFC 2544's 198.18.0.0/15), inside the sandbox's namespaces only.
fn openvpn_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 2, if index == 0 { 1 } else { 2 })
}

fn gre_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 3, if index == 0 { 1 } else { 2 })
}
