//! The data channel device: the requests that it takes, its reports, and its refusals.
//!
//! The kernel's `ovpn` device and the one in userspace take the same requests and answer alike
//! (`docs/design/ovpn.md`); the attributes are those of `linux/ovpn.h`. A request describes a peer or a key by a
//! set of attributes, any of which may be absent. The kernel checks them itself; [`rules`] checks them for
//! userspace.

mod error;
mod key_block;
mod notification;
pub mod rules;

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use weft_crypto::{DataCipher, EpochSecret};
use zeroize::{Zeroize, ZeroizeOnDrop};

pub use error::DeviceError;
pub use key_block::{KEY_BLOCK_BYTES, KeyBlock, KeyFileError, Side};
pub use notification::{DeletionReason, Notice, Notification};
pub use weft_crypto::ovpn::NONCE_TAIL_BYTES;

/// The largest id of a peer; on the wire it means that none was agreed on.
pub const PEER_ID_MAX: u32 = 0xff_ffff;
/// The largest id of a key.
pub const KEY_ID_MAX: u32 = 7;
/// The longest keepalive interval and timeout, in seconds: a day.
pub const KEEPALIVE_MAX_S: u32 = 86_400;
/// The longest cipher key that an attribute takes, in bytes.
pub const CIPHER_KEY_BYTES_MAX: usize = 256;
/// The longest packet of the control channel, in bytes: on a connection its length has 16 bits.
pub const CONTROL_PACKET_BYTES_MAX: usize = 0xffff;
/// Default MTU of a device, in bytes: a link of 1500 less 4 + 4 + 16 of the packet, 20 of TCP and 40 of IPv6.
pub const MTU_DEFAULT: u32 = 1_416;

/// How many peers a device has. It cannot be changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// One, which everything is sent to; a second replaces the first.
    #[default]
    P2p,
    /// Many, chosen by VPN address and route.
    Mp,
}

impl Mode {
    /// Its name in the CLI and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::P2p => "p2p",
            Self::Mp => "mp",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [Self::P2p, Self::Mp].into_iter().find(|mode| mode.name() == text);
        known.ok_or_else(|| format!("invalid mode {text:?}: give p2p or mp"))
    }
}

/// One of a peer's two keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Slot {
    /// Seals the packets to the peer; it opens, too.
    Primary,
    /// Opens packets with its key id.
    Secondary,
}

impl Slot {
    /// Both, the primary first.
    pub const ALL: [Self; 2] = [Self::Primary, Self::Secondary];

    /// Its name in the CLI and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Primary => "primary",
            Self::Secondary => "secondary",
        }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Slot {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|slot| slot.name() == text);
        known.ok_or_else(|| format!("invalid key slot {text:?}: give primary or secondary"))
    }
}

/// An AEAD as a device knows it; the length of AES's key says which AES.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CipherAlgorithm {
    /// No cipher, which every device refuses.
    None,
    /// AES-128-GCM, AES-192-GCM or AES-256-GCM.
    AesGcm,
    /// ChaCha20-Poly1305.
    #[serde(rename = "chacha20-poly1305")]
    ChaCha20Poly1305,
}

impl From<DataCipher> for CipherAlgorithm {
    fn from(cipher: DataCipher) -> Self {
        match cipher {
            DataCipher::Aes128Gcm | DataCipher::Aes192Gcm | DataCipher::Aes256Gcm => Self::AesGcm,
            DataCipher::ChaCha20Poly1305 => Self::ChaCha20Poly1305,
        }
    }
}

impl CipherAlgorithm {
    /// The cipher that takes a key of `bytes` bytes; `None` where there is none.
    pub const fn with_key_bytes(self, bytes: usize) -> Option<DataCipher> {
        match self {
            Self::None => None,
            Self::AesGcm => DataCipher::aes_gcm(bytes),
            Self::ChaCha20Poly1305 => {
                let cipher = DataCipher::ChaCha20Poly1305;
                if bytes == cipher.key_bytes() { Some(cipher) } else { None }
            }
        }
    }
}

/// Signs of life: a ping after so long without anything sent, the peer's end after so long without
/// anything received. Both 0: neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Keepalive {
    /// Seconds without anything sent.
    pub interval_s: u32,
    /// Seconds without anything received.
    pub timeout_s: u32,
}

/// The attributes of a peer that is made or changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerAttributes {
    /// The peer id in the packets that it sends to us, 24 bits.
    pub id: Option<u32>,
    /// The peer id in the packets that we send to it; else the same.
    pub tx_id: Option<u32>,
    /// Its IPv4 address, over UDP.
    pub remote_ipv4: Option<Ipv4Addr>,
    /// Its IPv6 address, over UDP.
    pub remote_ipv6: Option<Ipv6Addr>,
    /// The device by which a link-local address is reached.
    pub remote_ipv6_scope_id: Option<u32>,
    /// Its UDP port.
    pub remote_port: Option<u16>,
    /// The address of ours to send from.
    pub local_ipv4: Option<Ipv4Addr>,
    /// The address of ours to send from.
    pub local_ipv6: Option<Ipv6Addr>,
    /// Its address inside the VPN.
    pub vpn_ipv4: Option<Ipv4Addr>,
    /// Its address inside the VPN.
    pub vpn_ipv6: Option<Ipv6Addr>,
    /// As [`Keepalive::interval_s`].
    pub keepalive_interval_s: Option<u32>,
    /// As [`Keepalive::timeout_s`].
    pub keepalive_timeout_s: Option<u32>,
}

/// The state of a peer, as a device reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerState {
    /// The peer id in packets from it.
    pub id: u32,
    /// The peer id in packets to it, where the device tells.
    pub tx_id: Option<u32>,
    /// Its address now.
    pub remote: Option<SocketAddr>,
    /// The source of packets to it; the address is unspecified as long as any will do.
    pub local: Option<SocketAddr>,
    /// The network namespace of the socket to it, by the asker's number. `None`: the asker's own, or the device
    /// does not tell.
    pub socket_netns: Option<i32>,
    /// Its address inside the VPN.
    pub vpn_ipv4: Option<Ipv4Addr>,
    /// Its address inside the VPN.
    pub vpn_ipv6: Option<Ipv6Addr>,
    /// Its signs of life.
    pub keepalive: Keepalive,
    /// Inside: IP packets.
    pub vpn: Traffic,
    /// Outside: datagrams or frames, sealed.
    pub link: Traffic,
}

/// Traffic to and from a peer since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Traffic {
    /// Bytes received.
    pub rx_bytes: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Packets received.
    pub rx_packets: u64,
    /// Packets sent.
    pub tx_packets: u64,
}

/// The attributes of a key that is installed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyAttributes {
    /// Whose it is.
    pub peer_id: Option<u32>,
    /// The slot that it goes to.
    pub slot: Option<Slot>,
    /// The key id in the packets sealed with it, 0 to 7.
    pub key_id: Option<u32>,
    /// The AEAD.
    pub cipher: Option<CipherAlgorithm>,
    /// The direction that seals.
    pub encrypt: Option<KeyDirection>,
    /// The direction that opens.
    pub decrypt: Option<KeyDirection>,
}

/// The attributes of epochs that are installed in the place of a key. Their packets have OpenVPN 2.7's layout
/// (`docs/design/ovpn.md`). The kernel's device has none.
#[derive(Debug)]
pub struct EpochAttributes {
    /// Whose they are.
    pub peer_id: u32,
    /// The slot that they go to.
    pub slot: Slot,
    /// The key id in the packets, 0 to 7.
    pub key_id: u32,
    /// The AEAD.
    pub cipher: DataCipher,
    /// The first epoch's secret to seal with.
    pub encrypt: EpochSecret,
    /// The first epoch's secret to open with.
    pub decrypt: EpochSecret,
}

/// One direction of a key.
#[derive(Clone, Default, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct KeyDirection {
    /// 16, 24 or 32 bytes for AES-GCM, 32 for ChaCha20-Poly1305.
    pub cipher_key: Vec<u8>,
    /// The last 8 of a nonce's 12 bytes.
    pub nonce_tail: [u8; NONCE_TAIL_BYTES],
}

impl fmt::Debug for KeyDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyDirection")
            .field("cipher_key_bytes", &self.cipher_key.len())
            .finish_non_exhaustive()
    }
}

/// The state of a key, as a device reports it: never the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct KeyState {
    /// The key id in the packets sealed with it.
    pub key_id: u32,
    /// The AEAD.
    pub cipher: CipherAlgorithm,
    /// The epoch that is sealed in, where there are epochs.
    pub epoch: Option<u16>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn names_come_back_and_others_are_refused() {
        for mode in [Mode::P2p, Mode::Mp] {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        for slot in Slot::ALL {
            assert_eq!(slot.name().parse(), Ok(slot));
        }
        assert!("ptp".parse::<Mode>().unwrap_err().contains("give p2p or mp"));
        assert!("third".parse::<Slot>().unwrap_err().contains("primary or secondary"));
    }

    #[test]
    fn a_key_does_not_show_in_debug_output() {
        let direction = KeyDirection { cipher_key: vec![0xab; 32], nonce_tail: [0xcd; 8] };
        let text = format!("{direction:?}");
        assert!(text.contains("32") && !text.contains("171") && !text.contains("205"), "{text}");
    }
}
