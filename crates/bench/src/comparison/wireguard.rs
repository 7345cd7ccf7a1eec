//! The rows of WireGuard in userspace: programs that `wg` configures over a socket.

use std::path::Path;
use std::process::Command;

use super::ends::{End, Ends, Ready};
use super::install::{LeftOut, cargo_program, debian_program, go_program, version_of};
use super::machine::go_module_version;
use super::others::write_secret;
use crate::sandbox::{SandboxError, run};

/// The version that Tailscale 1.104.5 is built with: the `latest` of the fork is a tag of 2020.
const TAILSCALE: &str = "github.com/tailscale/wireguard-go@v0.0.0-20260928213032-417aef361226";
const BORINGTUN_VERSION: &str = "0.7.1";
const GOTATUN_VERSION: &str = "0.10.2";
/// Runs a command with a separate directory where `wg` and the programs look for sockets. That path is one
/// for the whole machine, and not every program removes its socket. The mount ends with the namespace that
/// `ip netns exec` makes.
const WITH_SOCKETS: &str = "mkdir -p /var/run/wireguard && mount --bind \"$0\" /var/run/wireguard && \
                            exec \"$@\"";

/// The newest release of wireguard-go.
pub(super) fn wireguard_go(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = go_program("wireguard", "golang.zx2c4.com/wireguard@latest")?;
    let version = go_module_version(&binary);
    prepare(ends, &binary, &["-f"], 51_820, version)
}

/// Tailscale's fork of it.
pub(super) fn tailscale(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = go_program("wireguard-go", TAILSCALE)?;
    let version = go_module_version(&binary);
    prepare(ends, &binary, &["-f"], 51_821, version)
}

/// Cloudflare's implementation.
pub(super) fn boringtun(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = cargo_program("boringtun-cli", "boringtun-cli", BORINGTUN_VERSION)?;
    let version = version_of(&binary);
    // To drop privileges it needs the name of a logged-in user.
    prepare(ends, &binary, &["-f", "--disable-drop-privileges"], 51_822, version)
}

/// Mullvad's fork of boringtun.
pub(super) fn gotatun(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = cargo_program("gotatun", "gotatun-cli", GOTATUN_VERSION)?;
    let version = version_of(&binary);
    prepare(ends, &binary, &["-f", "--disable-drop-privileges"], 51_823, version)
}

fn prepare(
    ends: &Ends<'_>,
    binary: &Path,
    options: &[&str],
    port: u16,
    version: Option<String>,
) -> Result<Ready, LeftOut> {
    let wg = debian_program("wg", "wireguard-tools")?;
    let mut ready = Ready { version, ..Ready::default() };
    let keys = [private_key(&wg)?, private_key(&wg)?];
    let mut publics = Vec::new();
    for (index, key) in keys.iter().enumerate() {
        let file = ends.file(index, "key");
        write_secret(&file, key)?;
        publics.push(public_key(&wg, &file)?);
    }
    for index in 0..2 {
        let end = ends.end(index);
        let sockets = ends.directory(index, "sockets")?;
        let with_sockets =
            ["sh", "-c", WITH_SOCKETS, &sockets.to_string_lossy()].map(str::to_owned);
        let words = |words: &[&str]| {
            let words = words.iter().copied().map(str::to_owned);
            with_sockets.iter().cloned().chain(words).collect::<Vec<_>>()
        };
        let program = binary.to_string_lossy();
        ready.commands[index] = words(&[&[&*program][..], options, &[end.device]].concat());
        let config = ends.file(index, "conf");
        write_secret(&config, &config_of(&end, port, &keys[index], &publics[1 - index]))?;
        let (wg, config) = (wg.to_string_lossy(), config.to_string_lossy());
        ready.configure[index] = words(&[&wg, "setconf", end.device, &config]);
    }
    Ok(ready)
}

/// As `wg setconf` reads it.
fn config_of(end: &End, port: u16, private: &str, peer: &str) -> String {
    let ([_, peer_outer], [_, peer_inner]) = (end.outer, end.inner);
    format!(
        "[Interface]\nPrivateKey = {private}\nListenPort = {port}\n\n\
         [Peer]\nPublicKey = {peer}\nAllowedIPs = {peer_inner}/32\nEndpoint = {peer_outer}:{port}\n"
    )
}

fn private_key(wg: &Path) -> Result<String, SandboxError> {
    Ok(run(Command::new(wg).arg("genkey"))?.stdout.trim().to_owned())
}

/// The public key of the private key in a file.
fn public_key(wg: &Path, file: &Path) -> Result<String, SandboxError> {
    let words = ["-c", "exec \"$0\" pubkey < \"$1\""];
    let output = run(Command::new("sh").args(words).arg(wg).arg(file))?;
    Ok(output.stdout.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::ends::tests::END;
    use super::*;

    #[test]
    fn an_end_has_its_own_key_and_the_others_address() {
        let text = config_of(&END, 51_820, "mine", "theirs");
        let expected = "[Interface]\nPrivateKey = mine\nListenPort = 51820\n\n[Peer]\nPublicKey = theirs\n\
                        AllowedIPs = 198.18.12.2/32\nEndpoint = 192.0.2.2:51820\n";
        assert_eq!(text, expected);
    }
}
