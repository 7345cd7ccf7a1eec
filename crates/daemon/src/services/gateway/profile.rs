//! The profile of a client: the places of the gateway, and the client's keys.

use weft_openvpn::config::{NewProfile, ProfileError, Wrapping};
use zeroize::Zeroizing;

use super::authority::{Credentials, SERVER_NAME};
use super::device::PORT;

/// The profile of a client that reaches the gateway at one of these places, each HOST or HOST:PORT.
///
/// # Errors
/// There is no place, or a place that is none.
pub(super) fn profile(
    name: &str,
    credentials: &Credentials,
    places: &[String],
) -> Result<Zeroizing<String>, ProfileError> {
    let remote = |place: &String| {
        let (host, port) = host_and_port(place);
        (host.to_owned(), port, false)
    };
    let remotes: Vec<_> = places.iter().map(remote).collect();
    NewProfile {
        comment: &format!("{name}, for Weft. It holds a private key: keep it secret."),
        remotes: &remotes,
        is_random: false,
        ca: &credentials.authority,
        cert: Some((&credentials.certificate, &credentials.key)),
        wrapping: Wrapping::TlsCryptV2(&credentials.client_key),
        server_name: Some(SERVER_NAME),
        asks_password: false,
        challenge: None,
    }
    .to_text()
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
        let text = profile("alice", &credentials, &places.map(str::to_owned)).unwrap();
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
