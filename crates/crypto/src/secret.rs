//! Secrets that pass between crates: zeroized when dropped, never shown.

use std::fmt;

use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::Format;

/// 32 bytes that both ends of a link take from its TLS exporter (`docs/design/keys.md`).
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct SessionKey([u8; 32]);

/// An SA's key material: 32 bytes of AEAD key, then a salt of 4 bytes (format `esp`) or 8 (`ovpn`, which calls it
/// nonce tail).
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct SaKey {
    /// The last four are zero in format `esp`.
    bytes: [u8; 40],
    #[zeroize(skip)]
    format: Format,
}

/// The secret that the keys of one epoch, in one direction of OpenVPN's data channel, are derived from.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct EpochSecret([u8; 32]);

impl SaKey {
    /// Takes the secret of an SA of format `esp` over; the caller erases its own copy.
    pub fn from_bytes(bytes: [u8; 36]) -> Self {
        let mut key = Self { bytes: [0; 40], format: Format::Esp };
        key.bytes[..36].copy_from_slice(&bytes);
        key
    }

    /// Takes the secret of an SA of format `ovpn` over; the caller erases its own copy.
    pub const fn for_ovpn(bytes: [u8; 40]) -> Self {
        Self { bytes, format: Format::Ovpn }
    }

    /// The wire format of its SA: `esp` or `ovpn`.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// AEAD key and 4 bytes of salt, for a cipher or the kernel. Never log it.
    pub fn expose(&self) -> &[u8; 36] {
        self.bytes.first_chunk().expect("36 of 40 bytes")
    }

    /// The AEAD key. Never log it.
    pub fn cipher_key(&self) -> &[u8; 32] {
        self.bytes.first_chunk().expect("32 of 40 bytes")
    }

    /// The 8 bytes that end each nonce of format `ovpn`. Never log it.
    pub fn nonce_tail(&self) -> &[u8; 8] {
        self.bytes.last_chunk().expect("8 of 40 bytes")
    }
}

impl fmt::Debug for SaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SaKey(secret)")
    }
}

macro_rules! opaque {
    ($name:ident, $length:literal) => {
        impl $name {
            /// Takes the secret over; the caller erases its own copy.
            pub const fn from_bytes(bytes: [u8; $length]) -> Self {
                Self(bytes)
            }

            /// The secret itself, for a cipher or the kernel. Never log it.
            pub const fn expose(&self) -> &[u8; $length] {
                &self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(secret)"))
            }
        }
    };
}

opaque!(SessionKey, 32);
opaque!(EpochSecret, 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_holds_no_secret() {
        assert_eq!(format!("{:?}", SessionKey::from_bytes([0x41; 32])), "SessionKey(secret)");
        assert_eq!(format!("{:?}", SaKey::from_bytes([0x41; 36])), "SaKey(secret)");
        assert_eq!(format!("{:?}", EpochSecret::from_bytes([0x41; 32])), "EpochSecret(secret)");
    }
}
