//! The row of nebula.

use std::path::Path;
use std::process::Command;

use super::ends::{End, Ends, Ready};
use super::install::{LeftOut, go_program};
use super::machine::go_module_version;
use super::others::write_secret;
use crate::sandbox::{SandboxError, run};

/// The first release that moves super-packets.
const VERSION: &str = "v1.12.0";
const PORT: u16 = 4_243;

/// nebula with its offloads and two routines, built by Go. Both ends know each other's address and have
/// no lighthouse.
pub(super) fn prepare(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let program =
        |name: &str| go_program(name, &format!("github.com/slackhq/nebula/cmd/{name}@{VERSION}"));
    let (binary, cert) = (program("nebula")?, program("nebula-cert")?);
    let mut ready = Ready {
        version: go_module_version(&binary),
        own_address: Some(ends.end(0).inner[1].into()),
        ..Ready::default()
    };
    authority(ends, &cert)?;
    for index in 0..2 {
        let end = ends.end(index);
        sign(ends, &cert, index, &end)?;
        let config = ends.file(index, "yaml");
        write_secret(&config, &config_of(ends, index, &end))?;
        let words = [&binary.to_string_lossy(), "-config", &config.to_string_lossy()];
        ready.commands[index] = words.map(str::to_owned).to_vec();
    }
    Ok(ready)
}

/// Makes the run's certificate authority; its files are beside those of the first end.
fn authority(ends: &Ends<'_>, cert: &Path) -> Result<(), SandboxError> {
    let mut command = Command::new(cert);
    command.args(["ca", "-name", "weft-bench", "-duration", "48h", "-out-crt"]);
    command.arg(ends.file(0, "ca.crt")).arg("-out-key").arg(ends.file(0, "ca.key"));
    run(&mut command).map(drop)
}

/// An end's key, and its address in a certificate.
fn sign(ends: &Ends<'_>, cert: &Path, index: usize, end: &End) -> Result<(), SandboxError> {
    let ([own, _], [number, _]) = (end.inner, end.numbers);
    let (name, network) = (format!("host{number}"), format!("{own}/24"));
    let mut command = Command::new(cert);
    command.args(["sign", "-name", &name, "-networks", &network, "-ca-crt"]);
    command.arg(ends.file(0, "ca.crt")).arg("-ca-key").arg(ends.file(0, "ca.key"));
    command.arg("-out-crt").arg(ends.file(index, "crt"));
    run(command.arg("-out-key").arg(ends.file(index, "key"))).map(drop)
}

fn config_of(ends: &Ends<'_>, index: usize, end: &End) -> String {
    let file = |index, kind| ends.file(index, kind).to_string_lossy().into_owned();
    text_of(end, [&file(0, "ca.crt"), &file(index, "crt"), &file(index, "key")])
}

/// With the files of the authority's certificate, the end's own, and its key.
fn text_of(end: &End, [authority, certificate, key]: [&str; 3]) -> String {
    let (device, mtu, [outer, peer_outer]) = (end.device, end.mtu, end.outer);
    let peer_inner = end.inner[1];
    format!(
        "pki:\n  ca: {authority}\n  cert: {certificate}\n  key: {key}\n\
         static_host_map:\n  \"{peer_inner}\": [\"{peer_outer}:{PORT}\"]\n\
         lighthouse:\n  am_lighthouse: false\n  hosts: []\n\
         listen:\n  host: {outer}\n  port: {PORT}\n  udp_offloads: true\n\
         punchy:\n  punch: false\ncipher: aes\nroutines: 2\n\
         tun:\n  dev: {device}\n  mtu: {mtu}\n  use_offloads: true\n\
         firewall:\n  outbound:\n    - {{port: any, proto: any, host: any}}\n  \
         inbound:\n    - {{port: any, proto: any, host: any}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::super::ends::tests::END;
    use super::*;

    #[test]
    fn an_end_knows_its_certificate_and_the_other() {
        let text = text_of(&END, ["a.crt", "b.crt", "b.key"]);
        for line in [
            "  cert: b.crt",
            "  \"198.18.12.2\": [\"192.0.2.2:4243\"]",
            "  host: 192.0.2.1",
            "  mtu: 1420",
            "  udp_offloads: true",
            "  use_offloads: true",
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in {text}");
        }
    }
}
