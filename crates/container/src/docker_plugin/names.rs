//! Names and ids: of Weft's networks, of the engine's objects, and Ethernet addresses.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use weft_packet::ethernet::Mac;

/// The longest name of a network, in bytes: a label of the domain name system.
pub const NETWORK_NAME_BYTES_MAX: usize = 63;
/// The longest id of the engine's, in bytes. Docker's have 64.
pub const ENGINE_ID_BYTES_MAX: usize = 128;

/// The name of one of Weft's networks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct NetworkName(String);

impl NetworkName {
    /// The ready network, which exists on every host.
    pub fn ready() -> Self {
        Self("weft".to_owned())
    }

    /// Whether this is the ready network.
    pub fn is_ready(&self) -> bool {
        self.0 == "weft"
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NetworkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A text cannot name a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a network's name has 1 to {NETWORK_NAME_BYTES_MAX} lower-case letters, digits, - and _, and starts with a letter or digit"
)]
pub struct NetworkNameError;

impl FromStr for NetworkName {
    type Err = NetworkNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let valid = text.len() <= NETWORK_NAME_BYTES_MAX
            && text.starts_with(plain)
            && text.chars().all(|c| plain(c) || matches!(c, '-' | '_'));
        valid.then(|| Self(text.to_owned())).ok_or(NetworkNameError)
    }
}

impl From<NetworkName> for String {
    fn from(name: NetworkName) -> Self {
        name.0
    }
}

impl TryFrom<String> for NetworkName {
    type Error = NetworkNameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// Whether a text can be an id of the engine's networks and endpoints.
pub(super) fn is_engine_id(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    !text.is_empty() && text.len() <= ENGINE_ID_BYTES_MAX && text.chars().all(inner)
}

/// An address for an endpoint that has none: locally administered, unicast, and not made from the
/// IP address, so that a reused IP address does not meet stale neighbour entries.
pub(super) fn made_mac(endpoint: &str) -> Mac {
    // FNV-1a, 64 bits: ids are random already, and the result must not change with the compiler.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in endpoint.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    let [a, b, c, d, e, f, ..] = hash.to_be_bytes();
    Mac([(a & 0xfc) | 0x02, b, c, d, e, f])
}

/// Reads the six bytes that the engine encodes as base64.
pub(super) fn mac_of_base64(text: &str) -> Option<Mac> {
    BASE64_STANDARD.decode(text).ok()?.try_into().ok().map(Mac)
}

/// Whether an interface may have this address: unicast and not zero.
pub(super) fn is_usable(mac: Mac) -> bool {
    mac.0[0] & 1 == 0 && mac.0 != [0; 6]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_names_are_labels_in_lower_case() {
        for good in ["weft", "shop", "a", "9-lives", "a_b", &"x".repeat(63)] {
            assert!(good.parse::<NetworkName>().is_ok(), "{good}");
        }
        for bad in ["", "Shop", "-a", "_a", "a.b", "a b", "ä", "a/b", "a,b", &"x".repeat(64)] {
            assert_eq!(bad.parse::<NetworkName>(), Err(NetworkNameError), "{bad}");
        }
    }

    #[test]
    fn a_made_address_is_usable_stable_and_differs_between_endpoints() {
        let one = made_mac(&"1".repeat(64));
        assert_eq!(one, made_mac(&"1".repeat(64)));
        assert_ne!(one, made_mac(&"2".repeat(64)));
        assert!(is_usable(one));
        assert_eq!(one.0[0] & 0x02, 0x02);
    }

    #[test]
    fn base64_is_read_only_if_it_is_six_bytes() {
        assert_eq!(mac_of_base64("AkKsEQAC"), Some(Mac([0x02, 0x42, 0xac, 0x11, 0x00, 0x02])));
        for bad in ["", "AkKsEQ==", "AkKsEQACAA==", "not base64!", "AkKsEQA"] {
            assert_eq!(mac_of_base64(bad), None, "{bad}");
        }
        assert!(!is_usable(Mac([0; 6])) && !is_usable(Mac([1, 0, 0, 0, 0, 1])));
    }
}
