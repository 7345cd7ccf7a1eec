//! A host to dial, by name or address, and the key that it must present.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use weft_crypto::PeerId;

use crate::error::LinkError;
use crate::limits::DEFAULT_PORT;

/// A host to dial, written `HOST`, `HOST:PORT` or `[V6]:PORT`, optionally followed by `#KEYHASH`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// A name, resolved at each attempt, or an IP address.
    pub host: String,
    /// The UDP port.
    pub port: u16,
    /// The key that the host must present; `None`: any key.
    pub key_hash: Option<KeyHash>,
}

impl Target {
    /// A target with the default port and any key.
    pub fn new(host: impl Into<String>) -> Self {
        Self { host: host.into(), port: DEFAULT_PORT, key_hash: None }
    }

    /// A known peer at an address.
    pub fn of_peer(peer: PeerId, address: SocketAddr) -> Self {
        let address = crate::socket::canonical(address);
        Self {
            host: address.ip().to_string(),
            port: address.port(),
            key_hash: Some(KeyHash::of(peer)),
        }
    }

    /// `HOST:PORT`, without the key hash, as `status` shows it.
    pub fn address(&self) -> String {
        if self.host.parse::<Ipv6Addr>().is_ok() {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address())?;
        self.key_hash.as_ref().map_or(Ok(()), |key_hash| write!(f, "#{key_hash}"))
    }
}

impl From<SocketAddr> for Target {
    fn from(address: SocketAddr) -> Self {
        let address = crate::socket::canonical(address);
        Self { host: address.ip().to_string(), port: address.port(), key_hash: None }
    }
}

impl FromStr for Target {
    type Err = LinkError;

    fn from_str(text: &str) -> Result<Self, LinkError> {
        let wrong = || LinkError::TargetFormat(text.to_owned());
        let (address, key_hash) = match text.split_once('#') {
            Some((address, hash)) => (address, Some(hash.parse()?)),
            None => (text, None),
        };
        let (host, port) = if let Ok(ip) = address.parse::<IpAddr>() {
            (ip.to_string(), DEFAULT_PORT)
        } else if let Ok(socket) = address.parse::<SocketAddr>() {
            (socket.ip().to_string(), socket.port())
        } else if let Some(v6) = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            (v6.parse::<Ipv6Addr>().map_err(|_| wrong())?.to_string(), DEFAULT_PORT)
        } else {
            match address.split_once(':') {
                Some((host, port)) => (host.to_owned(), port.parse().map_err(|_| wrong())?),
                None => (address.to_owned(), DEFAULT_PORT),
            }
        };
        let is_host = host.parse::<IpAddr>().is_ok() || is_name(&host);
        if !is_host || port == 0 {
            return Err(wrong());
        }
        Ok(Self { host, port, key_hash })
    }
}

/// Whether a text can be a host name (RFC 1123, plus `_`, which some names have): labels between single dots.
/// The last label is not a number, since that is a mistyped address.
fn is_name(host: &str) -> bool {
    let is_label = |label: &str| {
        let bytes = label.as_bytes();
        (1..=63).contains(&bytes.len())
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(byte))
            && !label.starts_with('-')
    };
    let name = host.strip_suffix('.').unwrap_or(host);
    let last = name.rsplit('.').next().unwrap_or_default();
    name.len() <= 253
        && name.split('.').all(is_label)
        && (!name.contains('.') || !last.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The first 16 to 32 bytes of a peer id, which a joining host pins.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyHash(Vec<u8>);

impl KeyHash {
    /// All 32 bytes of a peer's id.
    pub fn of(peer: PeerId) -> Self {
        Self(peer.as_bytes().to_vec())
    }

    /// The first 16 bytes of a peer's id, for the join command.
    pub fn short(peer: PeerId) -> Self {
        Self(peer.as_bytes()[..16].to_vec())
    }

    /// Whether a peer has this key.
    pub fn matches(&self, peer: PeerId) -> bool {
        peer.as_bytes().starts_with(&self.0)
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for KeyHash {
    type Err = LinkError;

    fn from_str(text: &str) -> Result<Self, LinkError> {
        let digits = text.as_bytes();
        let fits = (32..=64).contains(&digits.len()) && digits.len().is_multiple_of(2);
        if !fits || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(LinkError::KeyHashFormat);
        }
        let value = |digit: &u8| (*digit as char).to_digit(16).unwrap_or(0) as u8;
        Ok(Self(digits.chunks_exact(2).map(|two| value(&two[0]) << 4 | value(&two[1])).collect()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn targets_are_read_in_every_form_and_written_back() {
        let peer = PeerId::of_public_key(&[7; 32]);
        let hash = KeyHash::short(peer);
        for (text, host, port) in [
            ("10.0.0.1", "10.0.0.1", 6783),
            ("10.0.0.1:99", "10.0.0.1", 99),
            ("fd00::1", "fd00::1", 6783),
            ("[fd00::1]", "fd00::1", 6783),
            ("[fd00::1]:99", "fd00::1", 99),
            ("a-host.example", "a-host.example", 6783),
            ("a-host:99", "a-host", 99),
            ("host_2.example.", "host_2.example.", 6783),
            ("7", "7", 6783),
        ] {
            let target: Target = text.parse().unwrap();
            assert_eq!((target.host.as_str(), target.port), (host, port), "{text}");
            assert_eq!(target.to_string().parse::<Target>().unwrap(), target);
            let pinned: Target = format!("{text}#{hash}").parse().unwrap();
            assert!(pinned.key_hash.as_ref().unwrap().matches(peer));
            assert_eq!(pinned.to_string().parse::<Target>().unwrap(), pinned);
        }
        let long = "a".repeat(64);
        for text in [
            "",
            ":1",
            "a b",
            "host:",
            "host:x",
            "host:0",
            "host#12",
            "[x]",
            "a#",
            "ho\nst",
            "a..",
            ".a",
            "a..b",
            "10.0.0.300",
            "10.0.0",
            "1.2.3.4.5",
            "-a",
            &long,
            ".",
        ] {
            assert!(text.parse::<Target>().is_err(), "{text:?}");
        }
    }
}
