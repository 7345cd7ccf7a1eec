//! The row of the kernel's IPsec, host to host: Weave Net's encrypted fast datapath was measured beside it.

use std::fmt::Write as _;
use std::net::Ipv4Addr;

use super::others::{Outside, write_secret};
use super::rows::{IPSEC, Row};
use crate::sandbox::{Sandbox, SandboxError};

/// ESP in transport mode with AES-GCM: header 8, IV 8, ICV 16, pad length and next header 2.
const OVERHEAD_BYTES: u32 = 34;
const REPLAY_WINDOW: u32 = 256;

/// ESP in transport mode between two addresses of the hosts, AES-256-GCM, extended sequence numbers.
///
/// # Errors
/// Returns an error if `ip` fails; a kernel without ESP is [`Outside::Missing`].
pub fn ipsec(sandbox: &Sandbox, link_mtu: u32) -> Result<Outside, SandboxError> {
    let keys = [random_key(), random_key()];
    for (index, host) in sandbox.hosts().iter().enumerate().take(2) {
        host.netns().ip(&format!("addr add {}/24 dev eth0", address(index)))?;
        let file = sandbox.directory().join(format!("ipsec{}.batch", index + 1));
        write_secret(&file, &batch(index, &keys))?;
        let made = host.netns().exec(&["ip", "-batch", &file.to_string_lossy()])?;
        if let Err(error) = made.success() {
            return Ok(Outside::Missing(format!("kernel does not support ESP: {error}")));
        }
    }
    let row = Box::new(Row {
        name: IPSEC,
        client: sandbox.host(0).netns().clone(),
        server: sandbox.host(1).netns().clone(),
        server_address: address(1).into(),
        mtu: link_mtu.saturating_sub(OVERHEAD_BYTES),
        daemons: Vec::new(),
        setup:
            "host to host, `ip xfrm`: ESP in transport mode, rfc4106(gcm(aes)) with 256 bits, ESN"
                .to_owned(),
        _processes: Vec::new(),
    });
    Ok(Outside::Row { row, version: "the kernel's".to_owned() })
}

/// States of both directions and the policies for them, as `ip -batch` reads them: a file, since keys have
/// no place on a command line.
fn batch(index: usize, keys: &[String; 2]) -> String {
    let mut text = String::new();
    for (from, key) in keys.iter().enumerate() {
        let (source, destination) = (address(from), address(1 - from));
        let spi = 0x1000 + from;
        let _ = writeln!(
            text,
            "xfrm state add src {source} dst {destination} proto esp spi {spi:#x} reqid {spi} mode \
             transport aead rfc4106(gcm(aes)) 0x{key} 128 replay-window {REPLAY_WINDOW} flag esn"
        );
        let direction = if from == index { "out" } else { "in" };
        let _ = writeln!(
            text,
            "xfrm policy add src {source}/32 dst {destination}/32 dir {direction} tmpl src {source} \
             dst {destination} proto esp reqid {spi} mode transport"
        );
    }
    text
}

/// 32 bytes of key and 4 of salt in hexadecimal digits.
fn random_key() -> String {
    let (key, salt) = ([rand::random::<u128>(), rand::random()], rand::random::<u32>());
    format!("{:032x}{:032x}{salt:08x}", key[0], key[1])
}

/// Benchmark addresses (RFC 2544's 198.18.0.0/15), inside the sandbox's namespaces only.
const fn address(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 8, if index == 0 { 1 } else { 2 })
}
