//! What is measured side by side: each row is a pair of namespaces that reach each other in one way.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::sandbox::{
    Container, Netns, Running, Sandbox, SandboxError, UNDERLAY_MTU_BYTES, find_program, last_lines,
    output_of, progress, run, wait_until,
};

/// What the peer's link may take until it is active.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// wireguard-go's own default on an underlay of 1500 bytes.
const WIREGUARD_MTU_BYTES: u32 = 1420;
const WIREGUARD_PORT: u16 = 51820;
/// What building wireguard-go may take, once.
const GO_INSTALL_LIMIT: Duration = Duration::from_secs(300);
/// The VXLAN row's network identifier.
const VXLAN_ID: u32 = 4242;

/// The rows that are measured where nothing else is asked for, in the table's order.
pub const ALL: [&str; 4] = [DIRECT, VXLAN, WEFT, WIREGUARD_GO];
/// The underlay itself.
pub const DIRECT: &str = "direct";
/// Plain kernel VXLAN between two bridges, not encrypted.
pub const VXLAN: &str = "vxlan";
/// Weft, format `esp`, vector engine.
pub const WEFT: &str = "weft-esp-userspace";
/// WireGuard in userspace, the newest release of the Go implementation.
pub const WIREGUARD_GO: &str = "wireguard-go";

/// A pair of namespaces and the way between them.
#[derive(Debug)]
pub struct Row {
    /// Its name in the table.
    pub name: &'static str,
    /// Where clients run.
    pub client: Netns,
    /// Where servers run.
    pub server: Netns,
    /// The servers' address.
    pub server_address: IpAddr,
    /// The MTU between them, bytes.
    pub mtu: u32,
    /// The daemons whose memory counts: one per end.
    pub daemons: Vec<u32>,
    /// What was done to set it up, for the report.
    pub setup: String,
    /// Processes that end with the row.
    _processes: Vec<Running>,
}

/// The underlay itself, host to host.
#[must_use]
pub fn direct(sandbox: &Sandbox) -> Row {
    Row {
        name: DIRECT,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: sandbox.host(1).ipv4().into(),
        mtu: UNDERLAY_MTU_BYTES,
        daemons: Vec::new(),
        setup: "host to host over the veth pair".to_owned(),
        _processes: Vec::new(),
    }
}

/// Plain kernel VXLAN between a bridge on each host, a container behind each bridge.
///
/// # Errors
/// What `ip` said.
pub fn vxlan(sandbox: &Sandbox, mtu: u32) -> Result<Row, SandboxError> {
    let mut containers = Vec::new();
    for (index, host) in sandbox.hosts().iter().enumerate().take(2) {
        let remote = sandbox.host(1 - index).ipv4();
        let container = sandbox.add_netns(&format!("vxlan{}", index + 1))?;
        host.netns().ip("link add vxbr type bridge")?;
        host.netns().ip(&format!(
            "link add vxlan0 type vxlan id {VXLAN_ID} local {} remote {remote} dstport 4789 dev eth0",
            host.ipv4()
        ))?;
        crate::sandbox::veth_between((host.netns(), "vxport"), (&container, "eth0"))?;
        for port in ["vxlan0", "vxport"] {
            host.netns().ip(&format!("link set {port} mtu {mtu} master vxbr up"))?;
        }
        host.netns().ip("link set vxbr up")?;
        container.ip(&format!("link set eth0 mtu {mtu} up"))?;
        container.ip(&format!("addr add {}/24 dev eth0", vxlan_address(index)))?;
        containers.push(container);
    }
    let [client, server] = <[Netns; 2]>::try_from(containers).map_err(|_| two_hosts_needed())?;
    Ok(Row {
        name: VXLAN,
        client,
        server,
        server_address: vxlan_address(1).into(),
        mtu,
        daemons: Vec::new(),
        setup: "container, veth, bridge, `ip link add type vxlan dstport 4789`, underlay; not encrypted"
            .to_owned(),
        _processes: Vec::new(),
    })
}

/// Takes the VXLAN row's devices away again.
///
/// # Errors
/// What `ip` said.
pub fn remove_vxlan(sandbox: &Sandbox, row: &Row) -> Result<(), SandboxError> {
    for netns in [&row.client, &row.server] {
        sandbox.remove_netns(netns)?;
    }
    for host in sandbox.hosts() {
        host.netns().ip("link del vxlan0")?;
        host.netns().ip("link del vxbr")?;
    }
    Ok(())
}

/// Weft between two attached containers. The daemons run and the containers are attached; the
/// row is refused if the path is not the one that its name says.
///
/// # Errors
/// [`SandboxError::WaitTimedOut`] while no path is active; [`SandboxError::UnexpectedOutput`] if it is another one.
pub fn weft(
    sandbox: &Sandbox,
    client: &Container,
    server: &Container,
) -> Result<Row, SandboxError> {
    for host in sandbox.hosts() {
        host.wait_connected(sandbox.hosts().len() - 1, CONNECT_LIMIT)?;
        for connection in host.active_connections()? {
            check_path(&connection)?;
        }
    }
    Ok(Row {
        name: WEFT,
        client: client.netns().clone(),
        server: server.netns().clone(),
        server_address: server.ipv4()?.into(),
        mtu: client.mtu()?,
        daemons: sandbox.hosts().iter().filter_map(|host| host.daemon_pid()).collect(),
        setup: "`weft launch` on each host, `weft attach` of each container; AES-256-GCM"
            .to_owned(),
        _processes: Vec::new(),
    })
}

/// wireguard-go between the hosts, without containers (which spares it a bridge).
///
/// # Errors
/// [`WireguardGo::Missing`] is not an error; what a command said is.
pub fn wireguard_go(sandbox: &Sandbox) -> Result<WireguardGo, SandboxError> {
    let binary = match wireguard_binary()? {
        Ok(binary) => binary,
        Err(why) => return Ok(WireguardGo::Missing(why)),
    };
    let keys = [wireguard_keys()?, wireguard_keys()?];
    let mut processes = Vec::new();
    for index in 0..2 {
        processes.push(start_wireguard(sandbox, &binary, index, &keys)?);
    }
    let daemons = processes.iter().map(Running::pid).collect();
    let row = Box::new(Row {
        name: WIREGUARD_GO,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: wireguard_address(1).into(),
        mtu: WIREGUARD_MTU_BYTES,
        daemons,
        setup: "wireguard-go (newest by `go install`) on each host, host to host, its default MTU"
            .to_owned(),
        _processes: processes,
    });
    let version = super::machine::go_module_version(&binary);
    Ok(WireguardGo::Row { row, version: version.unwrap_or_else(|| "unknown".to_owned()) })
}

/// The wireguard-go row, or why there is none.
#[derive(Debug)]
pub enum WireguardGo {
    /// It runs.
    Row {
        /// The way between the hosts.
        row: Box<Row>,
        /// The version of the Go module.
        version: String,
    },
    /// It cannot be had on this machine; the text says why.
    Missing(String),
}

fn start_wireguard(
    sandbox: &Sandbox,
    binary: &Path,
    index: usize,
    keys: &[(String, String); 2],
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
    host.netns().ip(&format!("link set {device} mtu {WIREGUARD_MTU_BYTES} up"))?;
    Ok(process)
}

/// Finds wireguard-go, or builds the newest once with Go; the inner error says why there is none.
fn wireguard_binary() -> Result<Result<PathBuf, String>, SandboxError> {
    if find_program("wg").is_none() {
        return Ok(Err("`wg` is missing (apt-get install wireguard-tools)".to_owned()));
    }
    let Some(cache) = cache_directory() else {
        return Ok(Err("there is no home directory for a cache".to_owned()));
    };
    let binary = cache.join("wireguard");
    if binary.is_file() {
        return Ok(Ok(binary));
    }
    let Some(go) = find_program("go")
        .or_else(|| Some(PathBuf::from("/usr/local/go/bin/go")).filter(|path| path.is_file()))
    else {
        return Ok(Err("there is no Go toolchain to build it with".to_owned()));
    };
    progress::note("building wireguard-go with Go, once");
    let mut command = Command::new(go);
    command.args(["install", "golang.zx2c4.com/wireguard@latest"]).env("GOBIN", &cache);
    match output_of(&mut command, GO_INSTALL_LIMIT).and_then(crate::sandbox::Output::success) {
        Ok(_) => Ok(Ok(binary)),
        Err(error) => Ok(Err(error.to_string())),
    }
}

fn cache_directory() -> Option<PathBuf> {
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

fn write_secret(path: &Path, text: &str) -> Result<(), SandboxError> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    let opened = options.create(true).write(true).truncate(true).mode(0o600).open(path);
    opened
        .and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()))
        .map_err(|source| SandboxError::Io { what: format!("write {}", path.display()), source })
}

/// A row named after format `esp` and the vector engine must be that, and encrypted.
fn check_path(connection: &serde_json::Value) -> Result<(), SandboxError> {
    let field = |name: &str| connection.get(name).cloned().unwrap_or_default();
    let right = field("format") == "esp"
        && field("engine") == "userspace"
        && field("encrypted") == serde_json::Value::Bool(true);
    if right {
        return Ok(());
    }
    Err(SandboxError::UnexpectedOutput {
        command: "weft status connections --json".to_owned(),
        why: format!(
            "the row {WEFT} needs format esp, engine userspace, encrypted; it is {connection}"
        ),
    })
}

/// Benchmark addresses (RFC 2544's 198.18.0.0/15), inside the sandbox's namespaces only.
fn vxlan_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, if index == 0 { 1 } else { 2 })
}

fn wireguard_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 1, if index == 0 { 1 } else { 2 })
}

fn two_hosts_needed() -> SandboxError {
    SandboxError::UnexpectedOutput {
        command: "sandbox".to_owned(),
        why: "a row needs two hosts".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_row_is_refused_if_its_path_is_another_one() {
        let good = serde_json::json!({"format": "esp", "engine": "userspace", "encrypted": true});
        check_path(&good).unwrap();
        for (field, value) in [
            ("format", serde_json::json!("plain")),
            ("engine", serde_json::json!("kernel")),
            ("encrypted", serde_json::json!(false)),
        ] {
            let mut bad = good.clone();
            bad[field] = value;
            assert!(check_path(&bad).is_err(), "{bad}");
        }
        assert!(check_path(&serde_json::json!({})).is_err());
    }
}
