//! The rows of data channel devices, host to host. It is the table of OpenVPN's paper on its data channel offload,
//! with the device in userspace and the kernel's.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use weft_openvpn::device::{Mode, Slot};

use super::others::{Outside, write_secret};
use super::rows::{OVPN_KERNEL, OVPN_MP, OVPN_PEERS, OVPN_USERSPACE, Row};
use crate::sandbox::{Running, Sandbox, SandboxError};
use weft::dco::{Carrier, CipherWord, KeyWords, PeerWords, Request, SideWord, ask_all};

/// The link's MTU less that of the devices: as much as OpenVPN's own row takes, so that both send equal
/// packets.
const OVERHEAD_BYTES: u32 = 80;
/// Limit of a device's process until it answers.
const READY_LIMIT: Duration = Duration::from_secs(10);
/// The id that each end calls the other by.
const PEER: u32 = 1;
/// The supposed address of the other peers: one for documentation (RFC 5737).
const NOWHERE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// The first of their addresses inside: benchmark addresses as well.
const CROWD: Ipv4Addr = Ipv4Addr::new(198, 18, 16, 0);
/// Bytes of OpenVPN's static keys.
const KEY_FILE_BYTES: usize = 256;

/// The properties of a row.
struct Way {
    row: &'static str,
    engine: &'static str,
    device: &'static str,
    mode: Mode,
    /// Peers of each end, ids 1 and up; the first is the other end.
    peers: u32,
    port: u16,
    /// Third byte of the benchmark addresses inside.
    subnet: u8,
}

const WAYS: [Way; 4] = [
    Way {
        row: OVPN_USERSPACE,
        engine: "userspace",
        device: "wovpnu",
        mode: Mode::P2p,
        peers: 1,
        port: 1_196,
        subnet: 5,
    },
    Way {
        row: OVPN_KERNEL,
        engine: "kernel",
        device: "wovpnk",
        mode: Mode::P2p,
        peers: 1,
        port: 1_197,
        subnet: 6,
    },
    Way {
        row: OVPN_PEERS,
        engine: "userspace",
        device: "wovpnm",
        mode: Mode::Mp,
        peers: 4_096,
        port: 1_198,
        subnet: 7,
    },
    Way {
        row: OVPN_MP,
        engine: "userspace",
        device: "wovpn1",
        mode: Mode::Mp,
        peers: 1,
        port: 1_199,
        subnet: 40,
    },
];

/// A data channel device on each host, driven by `weft dco`, without containers.
///
/// # Errors
/// Returns an error if a command fails. A device that this machine cannot make is [`Outside::Missing`].
pub fn device(sandbox: &Sandbox, row: &str, link_mtu: u32) -> Result<Outside, SandboxError> {
    let Some(way) = WAYS.iter().find(|way| way.row == row) else {
        return Ok(Outside::Missing(format!("{row} is not a row of a device")));
    };
    let mtu = link_mtu.saturating_sub(OVERHEAD_BYTES);
    let mut processes = Vec::new();
    for index in 0..2 {
        match hold(sandbox, index, way, mtu) {
            Ok(process) => processes.push(process),
            Err(error) => return Ok(Outside::Missing(error.to_string())),
        }
    }
    let key_file = sandbox.directory().join(format!("{}.key", way.device));
    write_secret(&key_file, &random_key_file())?;
    for index in 0..2 {
        let host = sandbox.host(index);
        let all = (PEER..=way.peers).flat_map(|id| requests(sandbox, index, way, &key_file, id));
        let runtime = host.runtime_directory();
        ask_all(way.device, &runtime, all).map_err(|error| SandboxError::UnexpectedOutput {
            command: format!("weft dco new-peer and new-key {}", way.device),
            why: format!("{error:#}"),
        })?;
        host.netns().ip(&format!("link set {} up", way.device))?;
        host.netns().ip(&format!("addr add {}/24 dev {}", address(way, index), way.device))?;
    }
    let row = Box::new(Row {
        name: way.row,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: address(way, 1).into(),
        mtu,
        daemons: processes.iter().map(Running::pid).collect(),
        setup: format!(
            "`weft dco new-iface --engine {} --mode {} --mtu {mtu}`, {} times new-peer --udp and \
             new-key (AES-256-GCM), on each host, host to host",
            way.engine, way.mode, way.peers
        ),
        _processes: processes,
    });
    Ok(Outside::Row { row, version: env!("CARGO_PKG_VERSION").to_owned() })
}

/// Starts the process that holds the device of one end.
fn hold(sandbox: &Sandbox, index: usize, way: &Way, mtu: u32) -> Result<Running, SandboxError> {
    let mtu = mtu.to_string();
    let words = ["dco", "hold", way.device, "--engine", way.engine, "--mode", way.mode.name()];
    let words = [&words[..], &["--mtu", &mtu]].concat();
    let mut process = sandbox.host(index).spawn_weft(&words)?;
    process.line_with(r#"{"Ready":"#, READY_LIMIT)?;
    Ok(process)
}

/// Requests that make a peer and its key. Only the first peer exists; nothing is sent to the others.
fn requests(sandbox: &Sandbox, index: usize, way: &Way, key_file: &Path, id: u32) -> [Request; 2] {
    let own = SocketAddr::from((sandbox.host(index).ipv4(), way.port));
    let (remote, inside) = match id {
        PEER => ((sandbox.host(1 - index).ipv4(), way.port).into(), address(way, 1 - index)),
        _ => (SocketAddr::from((NOWHERE, id as u16)), Ipv4Addr::from(CROWD.to_bits() + id)),
    };
    let peer = PeerWords {
        peer: id,
        remote: Some(remote),
        vpn_ipv4: (way.mode == Mode::Mp).then_some(inside),
        ..PeerWords::default()
    };
    let key = KeyWords {
        peer: id,
        slot: Slot::Primary,
        key_id: 0,
        cipher: CipherWord::Aes256Gcm,
        side: if index == 0 { SideWord::Client } else { SideWord::Server },
        epoch: false,
        key_file: key_file.to_owned(),
        state_dir: sandbox.host(index).state_directory(),
        // All peers but one are nowhere: nothing is sealed for them.
        allow_reused_key: true,
    };
    let carrier = Carrier { udp: Some(own), tcp_connect: None, tcp_listen: None };
    [Request::NewPeer { peer, carrier, mark: None }, Request::NewKey { key }]
}

/// As `openvpn --genkey secret` writes it.
fn random_key_file() -> String {
    const NAME: &str = "OpenVPN Static key V1";
    let mut text = format!("-----BEGIN {NAME}-----\n");
    for _ in 0..KEY_FILE_BYTES / 16 {
        let _ = writeln!(text, "{:032x}", rand::random::<u128>());
    }
    let _ = writeln!(text, "-----END {NAME}-----");
    text
}

/// Benchmark addresses (RFC 2544's 198.18.0.0/15), inside the sandbox's namespaces only.
const fn address(way: &Way, index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, way.subnet, if index == 0 { 1 } else { 2 })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_openvpn::device::KeyBlock;

    use super::*;

    #[test]
    fn key_files_are_read_and_never_the_same() {
        let (one, other) = (random_key_file(), random_key_file());
        assert!(KeyBlock::parse(&one).is_ok() && KeyBlock::parse(&other).is_ok());
        assert_ne!(one, other);
    }
}
