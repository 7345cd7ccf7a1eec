//! The rows of the comparison: each is a pair of namespaces that reach each other in one way.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use weft_crypto::Cipher;

use crate::sandbox::{Container, Netns, Running, Sandbox, SandboxError, try_wait_until};

/// Limit of the wait until the peer's link is active.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// The VXLAN row's network identifier.
const VXLAN_ID: u32 = 4242;

/// All rows that there are, in the tables' order.
pub const ALL: [&str; 28] = [
    DIRECT,
    GRE,
    IPSEC,
    VXLAN,
    WEFT,
    WEFT_SHORTCUT,
    WEFT_PORTS,
    WEFT_CHACHA20,
    WEFT_OVPN,
    WEFT_KERNEL,
    WEFT_KERNEL_CHACHA20,
    WEFT_KERNEL_OVPN,
    OVPN_USERSPACE,
    OVPN_MP,
    OVPN_PEERS,
    OVPN_KERNEL,
    WIREGUARD_GO,
    WIREGUARD_GO_TAILSCALE,
    NEBULA,
    BORINGTUN,
    GOTATUN,
    OPENVPN,
    VPNCLOUD,
    FASTD,
    TINC,
    QUICKTUN,
    N2N,
    YGGDRASIL,
];
/// Those of other systems that take part only in full runs, or by name.
pub const FULL: [&str; 7] = [BORINGTUN, GOTATUN, FASTD, TINC, QUICKTUN, N2N, YGGDRASIL];
/// Those of the table of OpenVPN's paper on its data channel offload, and Weft's devices beside.
pub const DCO: [&str; 7] = [DIRECT, GRE, OVPN_USERSPACE, OVPN_MP, OVPN_PEERS, OVPN_KERNEL, OPENVPN];
/// Those of Weave Net's tables.
pub const WEAVE: [&str; 6] =
    [DIRECT, IPSEC, WEFT, WEFT_CHACHA20, WEFT_KERNEL, WEFT_KERNEL_CHACHA20];
/// Those that Weft's rows between containers are judged by.
pub const JUDGES: [&str; 6] =
    [VXLAN, WIREGUARD_GO, WIREGUARD_GO_TAILSCALE, NEBULA, OPENVPN, VPNCLOUD];
/// The underlay itself.
pub const DIRECT: &str = "direct";
/// The kernel's GRE, host to host, not encrypted.
pub const GRE: &str = "gre";
/// The kernel's IPsec in transport mode, host to host.
pub const IPSEC: &str = "ipsec";
/// Plain kernel VXLAN between two bridges, not encrypted.
pub const VXLAN: &str = "vxlan";
/// Weft, format `esp`, vector engine, AES-256-GCM, ports of the switch.
pub const WEFT: &str = "weft-esp-userspace";
/// The same with shortcuts past the bridge.
pub const WEFT_SHORTCUT: &str = "weft-esp-userspace-shortcut";
/// The same with direct ports.
pub const WEFT_PORTS: &str = "weft-esp-userspace-direct";
/// As [`WEFT`] with ChaCha20-Poly1305.
pub const WEFT_CHACHA20: &str = "weft-esp-userspace-chacha20";
/// As [`WEFT`], in format `ovpn`.
pub const WEFT_OVPN: &str = "weft-ovpn-network-userspace";
/// Weft, format `esp`, kernel engine, AES-256-GCM.
pub const WEFT_KERNEL: &str = "weft-esp-kernel";
/// As [`WEFT_KERNEL`] with ChaCha20-Poly1305.
pub const WEFT_KERNEL_CHACHA20: &str = "weft-esp-kernel-chacha20";
/// As [`WEFT_KERNEL`], in format `ovpn`.
pub const WEFT_KERNEL_OVPN: &str = "weft-ovpn-network-kernel";
/// Weft's data channel device in userspace, host to host, AES-256-GCM.
pub const OVPN_USERSPACE: &str = "weft-ovpn-userspace";
/// The same in mode mp, with one peer.
pub const OVPN_MP: &str = "weft-ovpn-userspace-mp";
/// The same in mode mp, with 4,095 peers beside the measured one.
pub const OVPN_PEERS: &str = "weft-ovpn-userspace-4096";
/// The kernel's device, with one peer.
pub const OVPN_KERNEL: &str = "weft-ovpn-kernel";
/// WireGuard in userspace, the newest release of the Go implementation.
pub const WIREGUARD_GO: &str = "wireguard-go";
/// Tailscale's fork of it, which is faster.
pub const WIREGUARD_GO_TAILSCALE: &str = "wireguard-go-tailscale";
/// nebula with its offloads.
pub const NEBULA: &str = "nebula";
/// WireGuard in userspace, Cloudflare's implementation in Rust.
pub const BORINGTUN: &str = "boringtun";
/// WireGuard in userspace, Mullvad's fork of boringtun.
pub const GOTATUN: &str = "gotatun";
/// OpenVPN without its kernel module.
pub const OPENVPN: &str = "openvpn";
/// vpncloud, which has the best request/response rate of the others.
pub const VPNCLOUD: &str = "vpncloud";
/// fastd, of the Freifunk networks.
pub const FASTD: &str = "fastd";
/// tinc.
pub const TINC: &str = "tinc";
/// quicktun: NaCl and little else.
pub const QUICKTUN: &str = "quicktun";
/// n2n.
pub const N2N: &str = "n2n";
/// Yggdrasil, which routes between keys.
pub const YGGDRASIL: &str = "yggdrasil";

/// The kind of ports of [`WEFT_SHORTCUT`]; `weft ps` shows what it is beside the shortcut.
const SHORTCUT: &str = "shortcut";
/// One comes at once, or when the daemon looks again.
const SHORTCUT_LIMIT: Duration = Duration::from_secs(20);

/// Whether a row stands between two data channel devices.
#[must_use]
pub fn is_device(row: &str) -> bool {
    matches!(row, OVPN_USERSPACE | OVPN_MP | OVPN_PEERS | OVPN_KERNEL)
}

/// A pair of namespaces and the way between them.
#[derive(Debug)]
pub struct Row {
    /// Its name in the table.
    pub name: &'static str,
    /// The namespace of the clients.
    pub client: Netns,
    /// The namespace of the servers.
    pub server: Netns,
    /// The servers' address.
    pub server_address: IpAddr,
    /// The MTU between them, bytes.
    pub mtu: u32,
    /// The daemons whose memory counts: one per end.
    pub daemons: Vec<u32>,
    /// A description of the setup, for the report.
    pub setup: String,
    /// Processes that end with the row.
    pub(super) _processes: Vec<Running>,
}

/// Two hosts with running Weft daemons, and a container attached to each.
#[derive(Debug, Clone, Copy)]
pub struct WeftPair<'a> {
    /// The name of its row.
    pub row: &'static str,
    /// The settings of the daemons.
    pub way: Way,
    /// The two hosts.
    pub sandbox: &'a Sandbox,
    /// The container on the first.
    pub client: &'a Container,
    /// The container on the second.
    pub server: &'a Container,
}

/// The properties of Weft's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// The wire format, as `--format` names it.
    pub format: &'static str,
    /// The engine at both ends, as `--engine` names it.
    pub engine: &'static str,
    /// The AEAD.
    pub cipher: Cipher,
    /// How containers are attached, as `--port-mode` names it.
    pub ports: &'static str,
}

/// That of a row of Weft's; `None` for the others.
#[must_use]
pub fn way_of(row: &str) -> Option<Way> {
    let (aes, chacha20) = (Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305);
    let (format, engine, cipher, ports) = match row {
        WEFT => ("esp", "userspace", aes, "bridge"),
        WEFT_SHORTCUT => ("esp", "userspace", aes, SHORTCUT),
        WEFT_PORTS => ("esp", "userspace", aes, "direct"),
        WEFT_CHACHA20 => ("esp", "userspace", chacha20, "bridge"),
        WEFT_OVPN => ("ovpn", "userspace", aes, "bridge"),
        WEFT_KERNEL => ("esp", "kernel", aes, "bridge"),
        WEFT_KERNEL_CHACHA20 => ("esp", "kernel", chacha20, "bridge"),
        WEFT_KERNEL_OVPN => ("ovpn", "kernel", aes, "bridge"),
        _ => return None,
    };
    Some(Way { format, engine, cipher, ports })
}

impl Way {
    /// The options with which a daemon takes it and no other.
    #[must_use]
    pub fn options(&self) -> [&'static str; 8] {
        let Self { format, engine, cipher, ports } = *self;
        let cipher = cipher.name();
        ["--format", format, "--engine", engine, "--cipher", cipher, "--port-mode", ports]
    }
}

/// The row of an active connection, as `weft status connections --json` shows it, and a kind of ports;
/// `None` if there is none.
#[must_use]
pub fn row_of_way(connection: &serde_json::Value, ports: &str) -> Option<&'static str> {
    let is_it = |way: Way| way.ports == ports && check_path(connection, &way).is_ok();
    ALL.into_iter().find(|row| way_of(row).is_some_and(is_it))
}

/// The underlay itself, host to host.
#[must_use]
pub fn direct(sandbox: &Sandbox, link_mtu: u32) -> Row {
    Row {
        name: DIRECT,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: sandbox.host(1).ipv4().into(),
        mtu: link_mtu,
        daemons: Vec::new(),
        setup: "host to host over the veth pair".to_owned(),
        _processes: Vec::new(),
    }
}

/// Plain kernel VXLAN between a bridge on each host, a container behind each bridge.
///
/// # Errors
/// Returns an error if `ip` fails.
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
/// Returns an error if `ip` fails.
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

/// Weft between two attached containers, or the reason why there is no row: the hosts' engines lack the
/// cipher.
///
/// # Errors
/// [`SandboxError::WaitTimedOut`] while no path is active; [`SandboxError::UnexpectedOutput`] if the path
/// or a port differs from the row's name.
pub fn weft(pair: WeftPair<'_>) -> Result<Result<Row, String>, SandboxError> {
    let WeftPair { row, way, sandbox, client, server } = pair;
    for host in sandbox.hosts() {
        host.wait_connected(sandbox.hosts().len() - 1, CONNECT_LIMIT)?;
        for connection in host.active_connections()? {
            let cipher = connection["cipher"].as_str().unwrap_or_default();
            if cipher != way.cipher.name() {
                return Ok(Err(format!("the hosts' engines agree on {cipher}")));
            }
        }
    }
    check(&pair)?;
    Ok(Ok(Row {
        name: row,
        client: client.netns().clone(),
        server: server.netns().clone(),
        server_address: server.ipv4()?.into(),
        mtu: client.mtu()?,
        daemons: sandbox.hosts().iter().filter_map(|host| host.daemon_pid()).collect(),
        setup: format!(
            "`weft launch {}` on each host, `weft attach` of each container",
            way.options().join(" ")
        ),
        _processes: Vec::new(),
    }))
}

/// Whether every path and every port is of the kind that the row's name says.
///
/// # Errors
/// [`SandboxError::UnexpectedOutput`] if one is not.
pub fn check(pair: &WeftPair<'_>) -> Result<(), SandboxError> {
    for host in pair.sandbox.hosts() {
        for connection in host.active_connections()? {
            check_path(&connection, &pair.way)?;
        }
        check_ports(&host.weft_json(&["ps"])?, pair.way.ports)?;
        if pair.way.ports == SHORTCUT {
            try_wait_until("a shortcut past the bridge", SHORTCUT_LIMIT, || {
                Ok(host.weft_json(&["status"])?["shortcuts"] == 1)
            })?;
        }
    }
    Ok(())
}

/// A row named after a format and an engine must be that, and encrypted.
fn check_path(connection: &serde_json::Value, way: &Way) -> Result<(), SandboxError> {
    let Way { format, engine, cipher, .. } = way;
    let field = |name: &str| connection.get(name).cloned().unwrap_or_default();
    let right = field("format") == *format
        && field("engine") == *engine
        && field("cipher") == cipher.name()
        && field("encrypted") == serde_json::Value::Bool(true);
    if right {
        return Ok(());
    }
    Err(SandboxError::UnexpectedOutput {
        command: "weft status connections --json".to_owned(),
        why: format!(
            "the row needs format {format}, engine {engine}, {cipher}, encrypted; it is {connection}"
        ),
    })
}

/// A row named after a kind of port must have it.
fn check_ports(attachments: &serde_json::Value, ports: &str) -> Result<(), SandboxError> {
    let kind = if ports == SHORTCUT { "bridge" } else { ports };
    let is_right = |one: &serde_json::Value| one["port"] == kind;
    if attachments.as_array().is_some_and(|all| all.iter().all(is_right)) {
        return Ok(());
    }
    Err(SandboxError::UnexpectedOutput {
        command: "weft ps --json".to_owned(),
        why: format!("the row needs ports of the kind {ports}; there is {attachments}"),
    })
}

/// Benchmark addresses (RFC 2544's 198.18.0.0/15), inside the sandbox's namespaces only.
fn vxlan_address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 0, if index == 0 { 1 } else { 2 })
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
        let good = serde_json::json!({
            "format": "esp", "engine": "userspace", "cipher": "aes-256-gcm", "encrypted": true
        });
        let way = way_of(WEFT).unwrap();
        let check_path = |connection: &_| check_path(connection, &way);
        check_path(&good).unwrap();
        for (field, value) in [
            ("cipher", serde_json::json!("chacha20-poly1305")),
            ("format", serde_json::json!("plain")),
            ("engine", serde_json::json!("kernel")),
            ("encrypted", serde_json::json!(false)),
        ] {
            let mut bad = good.clone();
            bad[field] = value;
            assert!(check_path(&bad).is_err(), "{bad}");
        }
        assert!(check_path(&serde_json::json!({})).is_err());
        let ports = serde_json::json!([{ "port": "direct" }]);
        assert!(check_ports(&ports, "direct").is_ok() && check_ports(&ports, "bridge").is_err());
        assert!(check_ports(&ports, SHORTCUT).is_err());
        let ports = serde_json::json!([{ "port": "bridge" }]);
        assert!(check_ports(&ports, SHORTCUT).is_ok());
    }

    #[test]
    fn a_row_is_found_by_its_way_and_weaves_ways_differ() {
        let of = |format, engine, cipher, ports| {
            let connection = serde_json::json!({
                "format": format, "engine": engine, "cipher": cipher, "encrypted": true
            });
            row_of_way(&connection, ports)
        };
        let (aes, chacha20) = ("aes-256-gcm", "chacha20-poly1305");
        assert_eq!(of("esp", "userspace", aes, "direct"), Some(WEFT_PORTS));
        assert_eq!(of("esp", "userspace", aes, SHORTCUT), Some(WEFT_SHORTCUT));
        assert_eq!(of("esp", "userspace", chacha20, "bridge"), Some(WEFT_CHACHA20));
        assert_eq!(of("ovpn", "kernel", aes, "bridge"), Some(WEFT_KERNEL_OVPN));
        assert_eq!(of("ovpn", "kernel", chacha20, "bridge"), None);
        assert_eq!(of("plain", "kernel", aes, "bridge"), None);
        let mut ways: Vec<_> =
            ALL.into_iter().filter_map(way_of).map(|way| way.options()).collect();
        ways.sort_unstable();
        ways.dedup();
        assert_eq!(ways.len(), 8);
    }
}
