//! The rows of other systems, where they can be had.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::rows::{GRE, OPENVPN, Row, WIREGUARD_GO};
use crate::sandbox::{
    Running, Sandbox, SandboxError, find_program, last_lines, output_of, progress, run, wait_until,
};

/// IPv4 and GRE header.
const GRE_OVERHEAD_BYTES: u32 = 24;
/// The link's MTU less wireguard-go's own default on it: 1420 on 1500.
const WIREGUARD_OVERHEAD_BYTES: u32 = 80;
const WIREGUARD_PORT: u16 = 51820;
/// What building a program with Go may take, once.
const GO_INSTALL_LIMIT: Duration = Duration::from_secs(300);
/// The link's MTU less that of OpenVPN's device: as much as wireguard-go takes, so that both send
/// whole packets.
const OPENVPN_OVERHEAD_BYTES: u32 = 80;
const OPENVPN_PORT: u16 = 1195;
/// What OpenVPN's handshake may take.
const OPENVPN_LIMIT: Duration = Duration::from_secs(30);
/// What a short command may take.
const COMMAND_LIMIT: Duration = Duration::from_secs(10);

/// The row of a system that is not Weft's, or why there is none.
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

/// The kernel's GRE host to host, not encrypted: the least that a tunnel takes.
///
/// # Errors
/// What `ip` said, once there is GRE.
pub fn gre(sandbox: &Sandbox, link_mtu: u32) -> Result<Outside, SandboxError> {
    let mtu = link_mtu.saturating_sub(GRE_OVERHEAD_BYTES);
    for (index, host) in sandbox.hosts().iter().enumerate().take(2) {
        let remote = sandbox.host(1 - index).ipv4();
        let local = host.ipv4();
        let made =
            host.netns().ip(&format!("link add wgre type gre local {local} remote {remote}"));
        if let Err(error) = made {
            return Ok(Outside::Missing(format!("this kernel has no GRE: {error}")));
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

/// wireguard-go between the hosts, without containers (which spares it a bridge).
///
/// # Errors
/// [`Outside::Missing`] is not an error; what a command said is.
pub fn wireguard_go(sandbox: &Sandbox, link_mtu: u32) -> Result<Outside, SandboxError> {
    let binary = match wireguard_binary()? {
        Ok(binary) => binary,
        Err(why) => return Ok(Outside::Missing(why)),
    };
    let keys = [wireguard_keys()?, wireguard_keys()?];
    let mtu = link_mtu.saturating_sub(WIREGUARD_OVERHEAD_BYTES);
    let mut processes = Vec::new();
    for index in 0..2 {
        processes.push(start_wireguard(sandbox, &binary, index, &keys, mtu)?);
    }
    let daemons = processes.iter().map(Running::pid).collect();
    let row = Box::new(Row {
        name: WIREGUARD_GO,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: wireguard_address(1).into(),
        mtu,
        daemons,
        setup: "wireguard-go (newest by `go install`) on each host, host to host, its default MTU"
            .to_owned(),
        _processes: processes,
    });
    let version = super::machine::go_module_version(&binary);
    Ok(Outside::Row { row, version: version.unwrap_or_else(|| "unknown".to_owned()) })
}

fn start_wireguard(
    sandbox: &Sandbox,
    binary: &Path,
    index: usize,
    keys: &[(String, String); 2],
    mtu: u32,
) -> Result<Running, SandboxError> {
    let host = sandbox.host(index);
    // Its control socket is named after the device and lies outside the namespace.
    let device = format!("wg{}{}", sandbox.tag(), index + 1);
    let log_path = sandbox.directory().join(format!("{device}.log"));
    let log = File::create(&log_path).map_err(|source| SandboxError::Io {
        what: format!("make {}", log_path.display()),
        source,
    })?;
    let program = binary.to_string_lossy();
    let mut process = host.netns().spawn_logged(&[&program, "-f", &device], &log)?;
    let up = wait_until("wireguard-go's device", Duration::from_secs(10), || {
        host.netns().exec(&["wg", "show", &device]).is_ok_and(|output| output.status.success())
    });
    if let Err(error) = up {
        let log = std::fs::read_to_string(&log_path).unwrap_or_default();
        progress::note(&last_lines(&log, 6));
        process.kill();
        return Err(error);
    }
    let key_path = sandbox.directory().join(format!("{device}.key"));
    write_secret(&key_path, &keys[index].0)?;
    let peer = sandbox.host(1 - index).ipv4();
    let (key_file, port) = (key_path.to_string_lossy(), WIREGUARD_PORT.to_string());
    let (endpoint, allowed) =
        (format!("{peer}:{WIREGUARD_PORT}"), format!("{}/32", wireguard_address(1 - index)));
    let set = [
        "wg",
        "set",
        &device,
        "listen-port",
        &port,
        "private-key",
        &key_file,
        "peer",
        &keys[1 - index].1,
    ];
    let rest = ["allowed-ips", &allowed, "endpoint", &endpoint];
    host.netns().exec(&[&set[..], &rest[..]].concat())?.success()?;
    host.netns().ip(&format!("addr add {}/24 dev {device}", wireguard_address(index)))?;
    host.netns().ip(&format!("link set {device} mtu {mtu} up"))?;
    Ok(process)
}

/// wireguard-go's newest release; the inner error says why there is none.
fn wireguard_binary() -> Result<Result<PathBuf, String>, SandboxError> {
    if find_program("wg").is_none() {
        return Ok(Err("`wg` is missing (apt-get install wireguard-tools)".to_owned()));
    }
    go_program("wireguard", "golang.zx2c4.com/wireguard@latest")
}

/// Finds a program that was built with Go, or builds it once; the inner error says why there is none.
fn go_program(name: &str, package: &str) -> Result<Result<PathBuf, String>, SandboxError> {
    let Some(cache) = cache_directory() else {
        return Ok(Err("there is no home directory for a cache".to_owned()));
    };
    let binary = cache.join(name);
    if binary.is_file() {
        return Ok(Ok(binary));
    }
    let Some(go) = find_program("go")
        .or_else(|| Some(PathBuf::from("/usr/local/go/bin/go")).filter(|path| path.is_file()))
    else {
        return Ok(Err("there is no Go toolchain to build it with".to_owned()));
    };
    progress::note(&format!("building {name} with Go, once"));
    let mut command = Command::new(go);
    command.args(["install", package]).env("GOBIN", &cache);
    match output_of(&mut command, GO_INSTALL_LIMIT).and_then(crate::sandbox::Output::success) {
        Ok(_) => Ok(Ok(binary)),
        Err(error) => Ok(Err(error.to_string())),
    }
}

pub(super) fn cache_directory() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    base.map(|base| base.join("weft/bin"))
}

/// A fresh private key and its public key.
fn wireguard_keys() -> Result<(String, String), SandboxError> {
    let private = run(Command::new("wg").arg("genkey"))?.stdout.trim().to_owned();
    let text = "`wg pubkey`";
    let mut child = Command::new("wg")
        .arg("pubkey")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .map_err(|source| SandboxError::Io { what: format!("start {text}"), source })?;
    if let Some(mut stdin) = child.stdin.take() {
        std::io::Write::write_all(&mut stdin, private.as_bytes())
            .map_err(|source| SandboxError::Io { what: format!("write to {text}"), source })?;
    }
    let output = child
        .wait_with_output()
        .map_err(|source| SandboxError::Io { what: format!("wait for {text}"), source })?;
    Ok((private, String::from_utf8_lossy(&output.stdout).trim().to_owned()))
}

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
/// What a command said; a missing program is [`Outside::Missing`].
pub fn openvpn(sandbox: &Sandbox, link_mtu: u32) -> Result<Outside, SandboxError> {
    for (program, package) in [("openvpn", "openvpn"), ("openssl", "openssl")] {
        if find_program(program).is_none() {
            return Ok(Outside::Missing(format!(
                "`{program}` is missing (apt-get install {package})"
            )));
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
    let version = output_of(Command::new("openvpn").arg("--version"), COMMAND_LIMIT).ok();
    let version =
        version.and_then(|output| output.stdout.split_whitespace().nth(1).map(str::to_owned));
    Ok(Outside::Row { row, version: version.unwrap_or_else(|| "unknown".to_owned()) })
}

/// Makes a key and a certificate of its own for one end; returns the fingerprint.
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
fn wireguard_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 1, if index == 0 { 1 } else { 2 })
}

fn openvpn_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 2, if index == 0 { 1 } else { 2 })
}

fn gre_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 3, if index == 0 { 1 } else { 2 })
}
