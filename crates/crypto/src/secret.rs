//! Secrets that pass between crates: zeroized when dropped, never shown.

use std::fmt;

use zeroize::{Zeroize, ZeroizeOnDrop};

/// 32 bytes that both ends of a link take from its TLS exporter (DESIGN section 6.2).
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct SessionKey([u8; 32]);

/// An SA's key material: 32 bytes of AEAD key, then 4 bytes of salt (`esp`).
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct SaKey([u8; 36]);

/// What the keys of one epoch of one direction of OpenVPN's data channel are derived from.
#[derive(Clone, PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
pub struct EpochSecret([u8; 32]);

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
opaque!(SaKey, 36);
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
