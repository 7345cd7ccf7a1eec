//! The row of vpncloud.

use super::ends::{End, Ends, Ready};
use super::install::{LeftOut, cargo_program, version_of};
use super::others::write_secret;

/// The release that is built.
const VERSION: &str = "2.3.0";
const PORT: u16 = 3210;
/// It asks for the route to this address (and sends nothing there) to learn its own, and gives up
/// without one.
const ASKED_FOR: &str = "8.8.8.8";

/// vpncloud, built by cargo where the machine does not have it.
pub(super) fn prepare(ends: &Ends<'_>) -> Result<Ready, LeftOut> {
    let binary = cargo_program("vpncloud", "vpncloud", VERSION)?;
    let mut ready = Ready { version: version_of(&binary), ..Ready::default() };
    let password = ends.password()?;
    for index in 0..2 {
        let config = ends.file(index, "yaml");
        write_secret(&config, &config_of(&ends.end(index), &password))?;
        ends.netns(index).ip(&format!("route replace {ASKED_FOR} dev eth0"))?;
        let words = [&binary.to_string_lossy(), "--config", &config.to_string_lossy()];
        ready.commands[index] = words.map(str::to_owned).to_vec();
    }
    Ok(ready)
}

/// The device gets its address from `ip`: given to vpncloud, it comes out as another on today's kernels.
fn config_of(end: &End, password: &str) -> String {
    let (device, [own, _], [outer, peer]) = (end.device, end.inner, end.outer);
    format!(
        "device:\n  type: tun\n  name: {device}\nmode: router\nauto-claim: false\n\
         claims: [\"{own}/32\"]\ncrypto:\n  password: \"{password}\"\n  algorithms: [AES256]\n\
         listen: \"{outer}:{PORT}\"\npeers: [\"{peer}:{PORT}\"]\nport-forwarding: false\n"
    )
}

#[cfg(test)]
mod tests {
    use super::super::ends::tests::END;
    use super::*;

    #[test]
    fn an_end_claims_its_address_and_knows_the_other() {
        let text = config_of(&END, "secret");
        for line in [
            "claims: [\"198.18.12.1/32\"]",
            "  password: \"secret\"",
            "listen: \"192.0.2.1:3210\"",
            "peers: [\"192.0.2.2:3210\"]",
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in {text}");
        }
    }
}
