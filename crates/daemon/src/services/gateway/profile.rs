//! The profile of a client: the places of the gateway, and the client's keys.

use weft_openvpn::config::{NewProfile, ProfileError, Wrapping};
use zeroize::Zeroizing;

use super::authority::{Credentials, SERVER_NAME, Shared};
use super::device::PORT;
use super::login::CODE_TEXT;

/// What a client asks its user for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Asks {
    pub(super) password: bool,
    /// A one-time code, with the password.
    pub(super) code: bool,
}

impl Asks {
    /// The question, and that its answer may be shown.
    fn challenge(self) -> Option<(&'static str, bool)> {
        (self.password && self.code).then_some((CODE_TEXT, true))
    }
}

/// The profile of a client that reaches the gateway at one of these places, each HOST or HOST:PORT.
///
/// # Errors
/// There is no place, or a place that is none.
pub(super) fn profile(
    name: &str,
    credentials: &Credentials,
    places: &[String],
    asks: Asks,
) -> Result<Zeroizing<String>, ProfileError> {
    let remotes = remotes(places);
    NewProfile {
        comment: &format!("{name}, for Weft. It holds a private key: keep it secret."),
        remotes: &remotes,
        is_random: false,
        ca: &credentials.authority,
        cert: Some((&credentials.certificate, &credentials.key)),
        wrapping: Wrapping::TlsCryptV2(&credentials.client_key),
        server_name: Some(SERVER_NAME),
        asks_password: asks.password,
        challenge: asks.challenge(),
    }
    .to_text()
}

/// The profile of all users, who show no certificate. `asks_code`: they are asked for a one-time code, too.
///
/// # Errors
/// There is no place, or a place that is none.
pub(super) fn shared(
    shared: &Shared,
    places: &[String],
    asks_code: bool,
) -> Result<Zeroizing<String>, ProfileError> {
    let asks = Asks { password: true, code: asks_code };
    NewProfile {
        comment: "All users, for Weft. Each logs in with a name and a password.",
        remotes: &remotes(places),
        is_random: false,
        ca: &shared.authority,
        cert: None,
        wrapping: Wrapping::TlsCryptV2(&shared.client_key),
        server_name: Some(SERVER_NAME),
        asks_password: true,
        challenge: asks.challenge(),
    }
    .to_text()
}

fn remotes(places: &[String]) -> Vec<(String, u16, bool)> {
    let remote = |place: &String| {
        let (host, port) = host_and_port(place);
        (host.to_owned(), port, false)
    };
    places.iter().map(remote).collect()
}

/// The host and the port of a place. An IPv6 address with a port is in brackets.
fn host_and_port(remote: &str) -> (&str, u16) {
    if let Some((host, port)) = remote.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        let port = port.strip_prefix(':').and_then(|port| port.parse().ok());
        return (host, port.unwrap_or(PORT));
    }
    let split = remote.rsplit_once(':').filter(|(host, _)| !host.contains(':'));
    match split.and_then(|(host, port)| Some((host, port.parse().ok()?))) {
        Some(found) => found,
        None => (remote, PORT),
    }
}

/// Whether a profile can name this place.
pub(super) fn is_place(remote: &str) -> bool {
    let (host, port) = host_and_port(remote);
    let is_fit = |char: char| char.is_ascii_alphanumeric() || ".-_:%".contains(char);
    port > 0 && !host.is_empty() && host.len() <= 255 && host.chars().all(is_fit)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::authority::Authority;
    use super::*;

    #[test]
    fn a_profile_names_all_places_and_holds_all_keys() {
        let credentials = Authority::new("host").unwrap().issue("alice").unwrap();
        let places = ["vpn.example", "192.0.2.1:443", "2001:db8::1", "[2001:db8::2]:1195"];
        let text =
            profile("alice", &credentials, &places.map(str::to_owned), Asks::default()).unwrap();
        let remotes: Vec<&str> = text.lines().filter(|line| line.starts_with("remote ")).collect();
        let expected = [
            "remote vpn.example 1194 udp",
            "remote 192.0.2.1 443 udp",
            "remote 2001:db8::1 1194 udp",
            "remote 2001:db8::2 1195 udp",
        ];
        assert_eq!(remotes, expected);
        for block in ["ca", "cert", "key", "tls-crypt-v2"] {
            assert!(text.contains(&format!("\n<{block}>\n-----BEGIN ")), "{block}");
            assert!(text.contains(&format!("-----\n</{block}>\n")), "{block}");
        }
    }

    #[test]
    fn a_place_that_would_break_the_profile_is_none() {
        for place in ["vpn.example", "10.0.0.1:1194", "[fd00::1]:5", "fe80::1%eth0"] {
            assert!(is_place(place), "{place}");
        }
        for place in ["", "a b", "a\nscript-security 2", ":1194", "host:0", "\"x\""] {
            assert!(!is_place(place), "{place}");
        }
    }
}
