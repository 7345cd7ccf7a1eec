//! What may be asked for of an identity provider.

use hyper::Uri;
use weft_api::OidcSettings;

/// The claim that names the user, unless it is said otherwise.
const CLAIM: &str = "preferred_username";
/// The claim that has the user's groups, unless it is said otherwise.
const GROUPS_CLAIM: &str = "groups";
/// How long a login may take, in seconds, unless it is said otherwise: a password, a second factor, and a search for it.
const WAIT_S: u32 = 180;
/// The shortest and the longest, in seconds: a client waits half the time between two of its keys at most.
const WAIT_MIN_S: u32 = 10;
const WAIT_MAX_S: u32 = 1_200;
/// The longest URL to come back to, in bytes. OpenVPN shows its user 255 bytes, with the URL of a login behind
/// `>INFOMSG:WEB_AUTH::`: that is this one's folder, and the words of a login.
const REDIRECT_BYTES_MAX: usize = 160;
/// Groups, and scopes, at most; and their bytes.
const WORDS_MAX: usize = 64;
const WORD_BYTES_MAX: usize = 256;
/// The port of an `https` URL that names none.
const HTTPS_PORT: u16 = 443;

/// The last word of the path where a login begins.
pub(super) const LOGIN: &str = "login";

/// Where an `https` URL leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// A name, or an address without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// Host and port as the URL has them.
    pub(super) authority: String,
    /// The path, from its first slash on, and the query.
    pub(super) path: String,
}

impl Place {
    /// Reads an `https` URL; `None`: it is none, or has a user or a fragment.
    pub(super) fn of(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let authority = uri.authority()?;
        let is_plain = !authority.as_str().contains('@') && !url.contains('#');
        if uri.scheme_str() != Some("https") || !is_plain || authority.host().is_empty() {
            return None;
        }
        let port = match authority.port_u16() {
            Some(port) => port,
            None if authority.as_str() == authority.host() => HTTPS_PORT,
            // There is a colon, and no number of a port behind it.
            None => return None,
        };
        Some(Self {
            host: authority.host().trim_start_matches('[').trim_end_matches(']').to_owned(),
            port,
            authority: authority.as_str().to_owned(),
            path: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        })
    }

    /// The path up to its last slash.
    pub(super) fn folder(&self) -> &str {
        self.path.rfind('/').map_or("/", |last| &self.path[..=last])
    }
}

/// The claim that names the user.
pub(super) fn claim(settings: &OidcSettings) -> &str {
    settings.claim.as_deref().unwrap_or(CLAIM)
}

/// The claim that has the user's groups.
pub(super) fn groups_claim(settings: &OidcSettings) -> &str {
    settings.groups_claim.as_deref().unwrap_or(GROUPS_CLAIM)
}

/// How long a login may take, in seconds.
pub(super) fn wait_s(settings: &OidcSettings) -> u32 {
    settings.wait_s.unwrap_or(WAIT_S)
}

/// The port by which the provider is reached.
pub(crate) fn provider_port(issuer: &str) -> Option<u16> {
    Place::of(issuer).map(|place| place.port)
}

/// All that is asked of the provider about a user. A token that was made with other settings is no longer good.
pub(in super::super) fn word(settings: &OidcSettings) -> Vec<u8> {
    let asked = [&settings.issuer, &settings.client_id].map(String::as_str);
    let names = asked.into_iter().chain([claim(settings), groups_claim(settings)]);
    let words = names.chain(settings.groups.iter().map(String::as_str));
    words.flat_map(|word| [word.as_bytes(), &[0]].concat()).collect()
}

/// Why these settings cannot be, in words for the administrator.
pub(in super::super) fn fault(settings: &OidcSettings) -> Option<String> {
    if Place::of(&settings.issuer).is_none_or(|issuer| issuer.path.contains('?')) {
        return Some(format!("{:?} is no issuer: give an https URL", settings.issuer));
    }
    if let Some(fault) = redirect_fault(&settings.redirect) {
        return Some(fault);
    }
    if settings.certificate.is_none() && settings.listen.is_none_or(|at| !at.ip().is_loopback()) {
        return Some(
            "browsers need TLS: give --oidc-certificate and --oidc-key, or --oidc-listen with an address of the loopback for a program of this host that has TLS"
                .into(),
        );
    }
    if settings.certificate.is_some() != settings.key.is_some() {
        return Some("--oidc-certificate and --oidc-key go together".into());
    }
    let wait_s = wait_s(settings);
    if !(WAIT_MIN_S..=WAIT_MAX_S).contains(&wait_s) {
        return Some(format!(
            "a login may take {WAIT_MIN_S} to {WAIT_MAX_S} seconds, not {wait_s}"
        ));
    }
    let lists = [&settings.groups, &settings.scopes];
    if lists.iter().any(|words| words.len() > WORDS_MAX) {
        return Some(format!("at most {WORDS_MAX} groups, and as many scopes"));
    }
    let words = lists.into_iter().flatten().chain([&settings.client_id]);
    let words = words.chain(settings.claim.iter().chain(&settings.groups_claim));
    let is_word = |word: &str| {
        (1..=WORD_BYTES_MAX).contains(&word.len()) && !word.contains(|char: char| char.is_control())
    };
    if let Some(word) = words.into_iter().find(|word| !is_word(word)) {
        return Some(format!("{word:?} is no name, group, claim or scope"));
    }
    let scope = settings.scopes.iter().find(|scope| scope.contains(char::is_whitespace))?;
    Some(format!("{scope:?} is no scope: give each by an option of its own"))
}

/// Why browsers cannot come back there.
fn redirect_fault(redirect: &str) -> Option<String> {
    let Some(place) = Place::of(redirect) else {
        return Some(format!("{redirect:?} is no https URL to come back to"));
    };
    if redirect.len() > REDIRECT_BYTES_MAX {
        return Some(format!(
            "the URL to come back to has {} bytes; OpenVPN clients show {REDIRECT_BYTES_MAX} at most",
            redirect.len()
        ));
    }
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let last = place.path.rsplit('/').next().unwrap_or_default();
    if !place.path.bytes().all(is_plain) || last.is_empty() || last == LOGIN {
        return Some(format!(
            "{redirect:?} is no URL to come back to: its path has letters, digits and -._~, and ends with a word other than {LOGIN:?}"
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn good() -> OidcSettings {
        OidcSettings {
            issuer: "https://id.example.com".into(),
            client_id: "weft".into(),
            redirect: "https://vpn.example.com:9443/callback".into(),
            certificate: Some("/c".into()),
            key: Some("/k".into()),
            ..OidcSettings::default()
        }
    }

    #[test]
    fn a_url_leads_to_a_host_a_port_and_a_path() {
        let place = Place::of("https://id.example.com/realms/a?b=c").unwrap();
        assert_eq!((place.host.as_str(), place.port), ("id.example.com", 443));
        assert_eq!((place.path.as_str(), place.folder()), ("/realms/a?b=c", "/realms/"));
        let place = Place::of("https://[2001:db8::1]:8443").unwrap();
        assert_eq!((place.host.as_str(), place.port), ("2001:db8::1", 8443));
        assert_eq!((place.path.as_str(), place.authority.as_str()), ("/", "[2001:db8::1]:8443"));
        for url in [
            "http://id.example.com",
            "https://",
            "id.example.com",
            "https://a@b/",
            "https://a/#b",
            "https://a:99999/",
            "https://a:/",
            "",
        ] {
            assert_eq!(Place::of(url), None, "{url}");
        }
    }

    #[test]
    fn settings_that_cannot_be_are_named() {
        assert_eq!(fault(&good()), None);
        let loopback = OidcSettings {
            listen: Some("127.0.0.1:9080".parse().unwrap()),
            certificate: None,
            key: None,
            ..good()
        };
        assert_eq!(fault(&loopback), None);
        let open = Some("192.0.2.1:9080".parse().unwrap());
        let back = |redirect: &str| OidcSettings { redirect: redirect.into(), ..good() };
        let cases = [
            (OidcSettings { issuer: "http://id.example.com".into(), ..good() }, "no issuer"),
            (OidcSettings { issuer: "https://id.example.com/?a".into(), ..good() }, "no issuer"),
            (OidcSettings { listen: open, ..loopback.clone() }, "browsers need TLS"),
            (OidcSettings { listen: None, ..loopback }, "browsers need TLS"),
            (OidcSettings { key: None, ..good() }, "go together"),
            (OidcSettings { wait_s: Some(9), ..good() }, "not 9"),
            (OidcSettings { client_id: String::new(), ..good() }, "no name"),
            (OidcSettings { groups: vec!["a".into(); 65], ..good() }, "at most 64"),
            (OidcSettings { scopes: vec!["a b".into()], ..good() }, "an option of its own"),
            (back("http://vpn.example.com/callback"), "no https URL"),
            (back("https://vpn.example.com/"), "ends with a word"),
            (back("https://vpn.example.com/login"), "ends with a word"),
            (back("https://vpn.example.com/a?b=c"), "ends with a word"),
            (back(&format!("https://vpn.example.com/{}", "a".repeat(160))), "160 at most"),
        ];
        for (settings, expected) in cases {
            let text = fault(&settings).unwrap_or_default();
            assert!(text.contains(expected), "{expected}: {text}");
        }
    }
}
