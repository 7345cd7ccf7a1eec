//! tls-auth: a MAC over each control packet, which travels in the clear.
//!
//! opcode and key id 1 | own session id 8 | MAC | replay id 8 | the rest of the plain packet. The MAC covers the
//! replay id first, then opcode, session id and the rest.

use std::str::FromStr;

use ::hmac::{Hmac, KeyInit, Mac};
use aws_lc_rs::hmac;
use md5::Md5;

use super::replay::ReplayId;
use super::{HEAD_BYTES, WrapError};
use crate::device::KeyBlock;

/// Where the HMAC keys of the two halves of a static key begin.
const HMAC_STARTS: [usize; 2] = [64, 192];
const MD5_BYTES: usize = 16;

/// The hash function of tls-auth: a profile's `auth`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AuthDigest {
    /// MD5, of old profiles.
    Md5,
    /// SHA-1, the default of every profile.
    #[default]
    Sha1,
    /// SHA-224.
    Sha224,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

impl AuthDigest {
    /// All of them, with their names in a profile.
    const NAMES: [(&'static str, Self); 11] = [
        ("MD5", Self::Md5),
        ("SHA1", Self::Sha1),
        ("SHA-1", Self::Sha1),
        ("SHA224", Self::Sha224),
        ("SHA256", Self::Sha256),
        ("SHA384", Self::Sha384),
        ("SHA512", Self::Sha512),
        ("SHA2-224", Self::Sha224),
        ("SHA2-256", Self::Sha256),
        ("SHA2-384", Self::Sha384),
        ("SHA2-512", Self::Sha512),
    ];

    /// Bytes of the MAC, and of the part of the key that is used.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Md5 => MD5_BYTES,
            Self::Sha1 => 20,
            Self::Sha224 => 28,
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    /// `None` for MD5, which aws-lc-rs does not have.
    const fn algorithm(self) -> Option<hmac::Algorithm> {
        Some(match self {
            Self::Md5 => return None,
            Self::Sha1 => hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha224 => hmac::HMAC_SHA224,
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha384 => hmac::HMAC_SHA384,
            Self::Sha512 => hmac::HMAC_SHA512,
        })
    }
}

impl FromStr for AuthDigest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        known.map(|(_, digest)| *digest).ok_or_else(|| {
            format!(
                "unknown digest {text:?} for tls-auth: give SHA1, SHA224, SHA256, SHA384, SHA512 or MD5"
            )
        })
    }
}

/// Which half of the static key is whose: a profile's `key-direction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AuthDirection {
    /// Not given: both ends send with the first half.
    #[default]
    Both,
    /// 0, commonly the server's: sends with the first half, receives with the second.
    Zero,
    /// 1, commonly the client's: the reverse.
    One,
}

/// The keys of tls-auth at one end.
pub struct AuthKeys {
    digest: AuthDigest,
    original: KeyBlock,
    sends: MacKey,
    receives: MacKey,
}

impl AuthKeys {
    /// Cuts the keys from a static key.
    pub fn new(key: &KeyBlock, digest: AuthDigest, direction: AuthDirection) -> Self {
        let [first, second] = HMAC_STARTS
            .map(|start| MacKey::new(digest, &key.expose()[start..start + digest.bytes()]));
        let (sends, receives) = match direction {
            AuthDirection::Both => (first.clone(), first),
            AuthDirection::Zero => (first, second),
            AuthDirection::One => (second, first),
        };
        Self { digest, original: key.clone(), sends, receives }
    }

    pub(super) const fn original(&self) -> &KeyBlock {
        &self.original
    }

    pub(super) const fn overhead(&self) -> usize {
        self.digest.bytes() + ReplayId::BYTES
    }

    pub(super) fn wrap(&self, plain: &[u8], id: ReplayId, out: &mut Vec<u8>) {
        let (head, rest) = plain.split_at(HEAD_BYTES.min(plain.len()));
        let id = id.to_bytes();
        let tag = self.sends.tag([&id, head, rest]);
        out.reserve(plain.len() + self.overhead());
        out.extend_from_slice(head);
        out.extend_from_slice(tag.bytes());
        out.extend_from_slice(&id);
        out.extend_from_slice(rest);
    }

    pub(super) fn unwrap(&self, bytes: &[u8], out: &mut Vec<u8>) -> Result<ReplayId, WrapError> {
        let short = WrapError::Truncated { need: HEAD_BYTES + self.overhead(), have: bytes.len() };
        let (head, behind) = bytes.split_at_checked(HEAD_BYTES).ok_or(short)?;
        let (tag, behind) = behind.split_at_checked(self.digest.bytes()).ok_or(short)?;
        let (id, rest) = behind.split_first_chunk::<{ ReplayId::BYTES }>().ok_or(short)?;
        let expected = self.receives.tag([id, head, rest]);
        aws_lc_rs::constant_time::verify_slices_are_equal(expected.bytes(), tag)
            .map_err(|_| WrapError::BadMac)?;
        out.extend_from_slice(head);
        out.extend_from_slice(rest);
        Ok(ReplayId::from_bytes(*id))
    }
}

/// The key of one direction.
#[derive(Clone)]
#[expect(clippy::large_enum_variant, reason = "the small one is for old profiles alone")]
enum MacKey {
    Sha(hmac::Key),
    Md5(Hmac<Md5>),
}

enum Tag {
    Sha(hmac::Tag),
    Md5([u8; MD5_BYTES]),
}

impl MacKey {
    fn new(digest: AuthDigest, key: &[u8]) -> Self {
        match digest.algorithm() {
            Some(algorithm) => Self::Sha(hmac::Key::new(algorithm, key)),
            None => Self::Md5(Hmac::new_from_slice(key).expect("HMAC takes keys of any length")),
        }
    }

    fn tag(&self, parts: [&[u8]; 3]) -> Tag {
        match self {
            Self::Sha(key) => {
                let mut mac = hmac::Context::with_key(key);
                parts.into_iter().for_each(|part| mac.update(part));
                Tag::Sha(mac.sign())
            }
            Self::Md5(key) => {
                let mut mac = key.clone();
                parts.into_iter().for_each(|part| mac.update(part));
                Tag::Md5(mac.finalize().into_bytes().into())
            }
        }
    }
}

impl Tag {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Sha(tag) => tag.as_ref(),
            Self::Md5(tag) => tag,
        }
    }
}
