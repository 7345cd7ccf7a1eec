//! The options string: what both ends must have alike, for people to read. A difference is a warning, no more.

use std::fmt;

use weft_crypto::DataCipher;

use crate::device::Side;

/// Most warnings of one comparison.
const WARNINGS_MAX: usize = 32;
/// The digest of a cipher that needs none.
const NULL_DIGEST: &str = "[null-digest]";
/// Items of OpenVPN's string that say nothing about the other end's.
const IGNORED: [&str; 6] = ["key-method", "keydir", "proto", "tls-auth", "tun-ipv6", "cipher"];

/// The parts of an end's options string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// The tunnel's MTU, in bytes.
    pub tun_mtu: u16,
    /// Over TCP rather than UDP.
    pub is_tcp: bool,
    /// A cipher that is used without negotiation (`cipher`).
    pub cipher: Option<DataCipher>,
    /// The digest of `auth`, SHA1 unless it is set. It is named where no cipher is.
    pub auth_digest: String,
    /// The control channel has tls-auth.
    pub has_tls_auth: bool,
    /// The digit of the key direction, where tls-auth has one.
    pub key_direction: Option<u8>,
}

impl Default for LinkOptions {
    /// As OpenVPN has it without a word in the profile, over UDP.
    fn default() -> Self {
        Self {
            tun_mtu: 1_500,
            is_tcp: false,
            cipher: None,
            auth_digest: "SHA1".to_owned(),
            has_tls_auth: false,
            key_direction: None,
        }
    }
}

impl LinkOptions {
    /// The string that an end sends. Without a cipher OpenVPN counts the sizes of the one that was once its default.
    pub fn to_text(&self, side: Side) -> String {
        let (overhead, auth, key_bits) = match self.cipher {
            Some(cipher @ DataCipher::ChaCha20Poly1305) => {
                (34, NULL_DIGEST, cipher.key_bytes() * 8)
            }
            Some(cipher) => (49, NULL_DIGEST, cipher.key_bytes() * 8),
            None => (21 + digest_bytes(&self.auth_digest), self.auth_digest.as_str(), 128),
        };
        let link_mtu = u32::from(self.tun_mtu) + overhead + if self.is_tcp { 2 } else { 0 };
        let (role, proto) = match (side, self.is_tcp) {
            (Side::Client, false) => ("tls-client", "UDPv4"),
            (Side::Server, false) => ("tls-server", "UDPv4"),
            (Side::Client, true) => ("tls-client", "TCPv4_CLIENT"),
            (Side::Server, true) => ("tls-server", "TCPv4_SERVER"),
        };
        let mut items = vec![
            "V4".to_owned(),
            "dev-type tun".to_owned(),
            format!("link-mtu {link_mtu}"),
            format!("tun-mtu {}", self.tun_mtu),
            format!("proto {proto}"),
        ];
        items.extend(self.key_direction.map(|digit| format!("keydir {digit}")));
        items.extend(self.cipher.map(|cipher| format!("cipher {cipher}")));
        items.push(format!("auth {auth}"));
        items.push(format!("keysize {key_bits}"));
        items.extend(self.has_tls_auth.then(|| "tls-auth".to_owned()));
        items.extend(["key-method 2".to_owned(), role.to_owned()]);
        items.join(",")
    }

    /// The string that an end expects of the other.
    pub fn expected_of_peer(&self, side: Side) -> String {
        let other = match side {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        };
        let key_direction = self.key_direction.map(|digit| 1 - digit.min(1));
        Self { key_direction, ..self.clone() }.to_text(other)
    }
}

/// Bytes of a digest's output.
fn digest_bytes(name: &str) -> u32 {
    match name {
        "MD5" => 16,
        "SHA224" => 28,
        "SHA256" => 32,
        "SHA384" => 48,
        "SHA512" => 64,
        _ => 20,
    }
}

/// The value of an item in an options string; empty for an item without one.
pub fn option_of<'a>(options: &'a str, name: &str) -> Option<&'a str> {
    options.split(',').find_map(|item| {
        let (key, value) = item.split_once(' ').unwrap_or((item, ""));
        (key == name).then_some(value)
    })
}

/// Where the strings of two ends differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionsWarning {
    /// Both have the item, with different values.
    Inconsistent {
        /// As it should be.
        expected: String,
        /// As it is at the peer.
        actual: String,
    },
    /// We have it, the peer has not.
    MissingAtPeer(String),
    /// The peer has it, we have not.
    MissingHere(String),
}

impl fmt::Display for OptionsWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inconsistent { expected, actual } => {
                write!(f, "the peer has {actual:?}, this end {expected:?}: make them equal")
            }
            Self::MissingAtPeer(item) => {
                write!(f, "{item:?} is set here but not at the peer: set it at both or neither")
            }
            Self::MissingHere(item) => {
                write!(f, "{item:?} is set at the peer but not here: set it at both or neither")
            }
        }
    }
}

/// Compares the string that a peer sent with the one expected. Strings of different versions are not compared.
pub fn compare_options(expected: &str, actual: &str) -> Vec<OptionsWarning> {
    if expected.get(..2) != actual.get(..2) {
        return Vec::new();
    }
    let items = |text| -> Vec<String> {
        let items = str::split(text, ',').skip(1).filter(|item| !is_ignored(item));
        items.map(printable).collect()
    };
    let (expected, actual) = (items(expected), items(actual));
    let mut warnings = Vec::new();
    for item in &expected {
        if actual.contains(item) {
            continue;
        }
        warnings.push(match actual.iter().find(|other| name(other) == name(item)) {
            Some(other) => {
                OptionsWarning::Inconsistent { expected: item.clone(), actual: other.clone() }
            }
            None => OptionsWarning::MissingAtPeer(item.clone()),
        });
    }
    let unknown = actual.iter().filter(|item| !expected.iter().any(|own| name(own) == name(item)));
    warnings.extend(unknown.map(|item| OptionsWarning::MissingHere(item.clone())));
    warnings.truncate(WARNINGS_MAX);
    warnings
}

fn name(item: &str) -> &str {
    item.split_once(' ').map_or(item, |(name, _)| name)
}

fn is_ignored(item: &str) -> bool {
    item.is_empty() || IGNORED.contains(&name(item))
}

/// An item as it may be logged.
fn printable(item: &str) -> String {
    item.chars().map(|char| if char.is_control() { '_' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What OpenVPN 2.6.14 says of itself with --verb 7.
    #[test]
    fn strings_are_those_of_openvpn() {
        assert_eq!(
            LinkOptions::default().to_text(Side::Server),
            "V4,dev-type tun,link-mtu 1541,tun-mtu 1500,proto UDPv4,auth SHA1,keysize 128,\
             key-method 2,tls-server"
        );
        let digest = LinkOptions {
            is_tcp: true,
            auth_digest: "SHA512".to_owned(),
            ..LinkOptions::default()
        };
        assert_eq!(
            digest.to_text(Side::Client),
            "V4,dev-type tun,link-mtu 1587,tun-mtu 1500,proto TCPv4_CLIENT,auth SHA512,keysize 128,\
             key-method 2,tls-client"
        );
        let wrapped = LinkOptions {
            is_tcp: true,
            cipher: Some(DataCipher::Aes128Gcm),
            has_tls_auth: true,
            key_direction: Some(1),
            ..LinkOptions::default()
        };
        assert_eq!(
            wrapped.expected_of_peer(Side::Client),
            "V4,dev-type tun,link-mtu 1551,tun-mtu 1500,proto TCPv4_SERVER,keydir 0,\
             cipher AES-128-GCM,auth [null-digest],keysize 128,tls-auth,key-method 2,tls-server"
        );
        let chacha =
            LinkOptions { cipher: Some(DataCipher::ChaCha20Poly1305), ..LinkOptions::default() };
        assert_eq!(
            chacha.to_text(Side::Client),
            "V4,dev-type tun,link-mtu 1534,tun-mtu 1500,proto UDPv4,cipher CHACHA20-POLY1305,\
             auth [null-digest],keysize 256,key-method 2,tls-client"
        );
    }

    #[test]
    fn each_difference_is_named() {
        let expected = LinkOptions::default().expected_of_peer(Side::Server);
        assert_eq!(compare_options(&expected, &expected), []);
        let actual = expected
            .replace("tun-mtu 1500", "tun-mtu 1400")
            .replace("dev-type tun,", "dev-type tap,comp-lzo,cipher BF-CBC,")
            .replace(",keysize 128", "");
        let warnings = compare_options(&expected, &actual);
        let inconsistent = |expected: &str, actual: &str| OptionsWarning::Inconsistent {
            expected: expected.to_owned(),
            actual: actual.to_owned(),
        };
        assert_eq!(
            warnings,
            [
                inconsistent("dev-type tun", "dev-type tap"),
                inconsistent("tun-mtu 1500", "tun-mtu 1400"),
                OptionsWarning::MissingAtPeer("keysize 128".to_owned()),
                OptionsWarning::MissingHere("comp-lzo".to_owned()),
            ]
        );
        assert!(warnings[3].to_string().contains("\"comp-lzo\" is set at the peer but not here"));
        assert_eq!(compare_options(&expected, "V3,dev-type tap"), []);
        assert_eq!(option_of(&actual, "cipher"), Some("BF-CBC"));
        assert_eq!(option_of(&actual, "comp-lzo"), Some(""));
        assert_eq!(option_of(&actual, "comp"), None);
    }
}
