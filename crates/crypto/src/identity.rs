//! The identity of a host, and the names of ciphers and wire formats that both ends must spell alike.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use aws_lc_rs::digest::{Context, SHA256, digest};
use serde::{Deserialize, Serialize};

/// The prefix of all tunnel addresses: an IPv6 prefix ("weft" behind fd, RFC 4193) and its length in bits.
pub const TUNNEL_PREFIX: (Ipv6Addr, u8) =
    (Ipv6Addr::new(0xfd77, 0x6566, 0x7400, 0, 0, 0, 0, 0), 40);

/// In the sixth byte of a tunnel address: the host receives packets there, ...
const TUNNEL_TO: u8 = 0x80;
/// ... and the kernel engine moves it.
const TUNNEL_KERNEL: u8 = 0x01;

/// One of a host's tunnel addresses. Packets of format `ovpn` go from the sender's `From` to the receiver's `To`,
/// each of the engine that moves them there. They differ because the kernel's device tells its peers apart by
/// address: those that send from those that receive, and two paths to one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelEnd {
    /// Whether the host sends from there, or receives there.
    pub way: TunnelWay,
    /// The kernel engine moves the packets at this host; else the vector engine does.
    pub kernel: bool,
}

/// The use of a host's tunnel address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelWay {
    /// The source of the packets that it sends.
    From,
    /// The destination of the packets that it receives.
    To,
}

/// A host's identity: the SHA-256 of its raw 32-byte Ed25519 public key.
///
/// Shown as its first 8 bytes in hex; serialised as all 32 bytes in hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId([u8; 32]);

impl PeerId {
    /// The peer id of a raw Ed25519 public key.
    pub fn of_public_key(public_key: &[u8; 32]) -> Self {
        let hash = digest(&SHA256, public_key);
        let mut id = [0; 32];
        id.copy_from_slice(hash.as_ref());
        Self(id)
    }

    /// A peer id from its 32 bytes, as they travel in messages.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// All 32 bytes, as they enter the key schedule.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// An address by which hosts know each other inside packets of format `ovpn` (`docs/design/ovpn.md`). It is
    /// [`TUNNEL_PREFIX`], a byte for its purpose, then the first 10 bytes.
    pub fn tunnel_address(&self, end: TunnelEnd) -> Ipv6Addr {
        let way = match end.way {
            TunnelWay::From => 0,
            TunnelWay::To => TUNNEL_TO,
        };
        let mut octets = TUNNEL_PREFIX.0.octets();
        octets[5] = way | if end.kernel { TUNNEL_KERNEL } else { 0 };
        octets[6..].copy_from_slice(&self.0[..10]);
        octets.into()
    }

    /// All 32 bytes in lower-case hex.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// SHA-256 over the parts in turn: a stable short name for things that need one, such as an
/// Ethernet address. No key is made with it.
pub fn fingerprint(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    parts.iter().for_each(|part| context.update(part));
    let mut hash = [0; 32];
    hash.copy_from_slice(context.finish().as_ref());
    hash
}

/// A text is not a peer id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid peer id: expected 64 hexadecimal digits")]
pub struct ParsePeerIdError;

impl FromStr for PeerId {
    type Err = ParsePeerIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() != 64 || !text.is_ascii() {
            return Err(ParsePeerIdError);
        }
        let mut id = [0; 32];
        for (byte, digits) in id.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| ParsePeerIdError)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| ParsePeerIdError)?;
        }
        Ok(Self(id))
    }
}

impl Serialize for PeerId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_hex())
    }
}

impl<'de> Deserialize<'de> for PeerId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// An AEAD that an SA may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Cipher {
    /// AES-256-GCM as in RFC 4106: 4-byte salt, 8-byte explicit IV, 16-byte ICV. The default.
    #[serde(rename = "aes-256-gcm")]
    Aes256Gcm,
    /// ChaCha20-Poly1305 as in RFC 7634, with the same salt, IV and ICV lengths.
    #[serde(rename = "chacha20-poly1305")]
    ChaCha20Poly1305,
}

impl Cipher {
    /// The name in the CLI, in JSON and in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes256Gcm => "aes-256-gcm",
            Self::ChaCha20Poly1305 => "chacha20-poly1305",
        }
    }
}

impl fmt::Display for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An AEAD of OpenVPN's data channel (format `ovpn`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DataCipher {
    /// AES-GCM with a 128-bit key.
    Aes128Gcm,
    /// AES-GCM with a 192-bit key.
    Aes192Gcm,
    /// AES-GCM with a 256-bit key.
    Aes256Gcm,
    /// ChaCha20-Poly1305, with a 256-bit key.
    ChaCha20Poly1305,
}

impl DataCipher {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::Aes128Gcm, Self::Aes192Gcm, Self::Aes256Gcm, Self::ChaCha20Poly1305];

    /// AES-GCM with a key of `key_bytes` bytes; `None` unless it is 16, 24 or 32.
    pub const fn aes_gcm(key_bytes: usize) -> Option<Self> {
        match key_bytes {
            16 => Some(Self::Aes128Gcm),
            24 => Some(Self::Aes192Gcm),
            32 => Some(Self::Aes256Gcm),
            _ => None,
        }
    }

    /// Bytes of its key.
    pub const fn key_bytes(self) -> usize {
        match self {
            Self::Aes128Gcm => 16,
            Self::Aes192Gcm => 24,
            Self::Aes256Gcm | Self::ChaCha20Poly1305 => 32,
        }
    }

    /// The name in OpenVPN's messages and configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes128Gcm => "AES-128-GCM",
            Self::Aes192Gcm => "AES-192-GCM",
            Self::Aes256Gcm => "AES-256-GCM",
            Self::ChaCha20Poly1305 => "CHACHA20-POLY1305",
        }
    }
}

impl From<Cipher> for DataCipher {
    fn from(cipher: Cipher) -> Self {
        match cipher {
            Cipher::Aes256Gcm => Self::Aes256Gcm,
            Cipher::ChaCha20Poly1305 => Self::ChaCha20Poly1305,
        }
    }
}

impl fmt::Display for DataCipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Ethernet in VXLAN in ESP.
    Esp,
    /// OpenVPN DATA_V2 AEAD packets.
    Ovpn,
    /// Ethernet in VXLAN without encryption, between hosts that name each other trusted.
    Plain,
}

impl Format {
    /// The name in the CLI, in JSON, in messages and in the key schedule.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Esp => "esp",
            Self::Ovpn => "ovpn",
            Self::Plain => "plain",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_id_survives_its_text_and_shows_eight_bytes() {
        let id = PeerId::of_public_key(&[7; 32]);
        assert_eq!(id.to_hex().parse(), Ok(id));
        assert_eq!(id.to_string(), id.to_hex()[..16]);
        assert_eq!("zz".parse::<PeerId>(), Err(ParsePeerIdError));
    }

    #[test]
    fn a_host_has_four_tunnel_addresses() {
        let id = PeerId::from_bytes([0xa5; 32]);
        let address = |way, kernel| id.tunnel_address(TunnelEnd { way, kernel }).to_string();
        let rest = "a5a5:a5a5:a5a5:a5a5:a5a5";
        assert_eq!(address(TunnelWay::From, false), format!("fd77:6566:7400:{rest}"));
        assert_eq!(address(TunnelWay::From, true), format!("fd77:6566:7401:{rest}"));
        assert_eq!(address(TunnelWay::To, false), format!("fd77:6566:7480:{rest}"));
        assert_eq!(address(TunnelWay::To, true), format!("fd77:6566:7481:{rest}"));
    }

    #[test]
    fn a_length_of_key_names_one_aes() {
        for cipher in DataCipher::ALL {
            let named = DataCipher::aes_gcm(cipher.key_bytes());
            let expected = match cipher {
                DataCipher::ChaCha20Poly1305 => DataCipher::Aes256Gcm,
                aes => aes,
            };
            assert_eq!(named, Some(expected));
            assert!(expected.name().contains(&(8 * expected.key_bytes()).to_string()));
        }
        assert_eq!([0, 15, 17, 31, 33].map(DataCipher::aes_gcm), [None; 5]);
    }
}
