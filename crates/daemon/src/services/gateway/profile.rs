//! The profile of a client: the places of the gateway, and the client's keys.

use weft_openvpn::config::{NewProfile, ProfileError, Wrapping};
use zeroize::Zeroizing;

use super::authority::{Credentials, SERVER_NAME, Shared};
use super::login::CODE_TEXT;
use super::places::Remote;

/// What a client asks its user for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Asks {
    pub(super) password: bool,
    /// A one-time code, with the password.
    pub(super) code: bool,
}

impl Asks {
    /// The question, and that its answer may be shown.
    pub(super) fn challenge(self) -> Option<(&'static str, bool)> {
        (self.password && self.code).then_some((CODE_TEXT, true))
    }
}

/// The profile of a client that reaches the gateway at one of these places.
///
/// # Errors
/// There is no place, or one with a host that is none.
pub(super) fn profile(
    name: &str,
    credentials: &Credentials,
    places: &[Remote],
    asks: Asks,
) -> Result<Zeroizing<String>, ProfileError> {
    NewProfile {
        comment: &format!("{name}, for Weft. It holds a private key: keep it secret."),
        remotes: places,
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
/// There is no place, or one with a host that is none.
pub(super) fn shared(
    shared: &Shared,
    places: &[Remote],
    asks_code: bool,
) -> Result<Zeroizing<String>, ProfileError> {
    let asks = Asks { password: true, code: asks_code };
    NewProfile {
        comment: "All users, for Weft. Each logs in with a name and a password.",
        remotes: places,
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::authority::Authority;
    use super::*;

    #[test]
    fn a_profile_names_all_places_and_holds_all_keys() {
        let credentials = Authority::new("host").unwrap().issue("alice").unwrap();
        let place = |host: &str, port, is_tcp| (host.to_owned(), port, is_tcp);
        let places = [place("vpn.example", 1194, false), place("2001:db8::2", 443, true)];
        let text = profile("alice", &credentials, &places, Asks::default()).unwrap();
        let remotes: Vec<&str> = text.lines().filter(|line| line.starts_with("remote ")).collect();
        assert_eq!(remotes, ["remote vpn.example 1194 udp", "remote 2001:db8::2 443 tcp"]);
        for block in ["ca", "cert", "key", "tls-crypt-v2"] {
            assert!(text.contains(&format!("\n<{block}>\n-----BEGIN ")), "{block}");
            assert!(text.contains(&format!("-----\n</{block}>\n")), "{block}");
        }
    }
}
