//! tls-crypt-v2: a tls-crypt key for each client, which it brings along under the server's key.
//!
//! The client's wrapped key (WKc): tag 32 | client key 256 and metadata, encrypted | length of it all 2. The length is
//! authenticated first.

use zeroize::Zeroizing;

use super::WrapError;
use super::crypt::{Half, TAG_BYTES};
use crate::PacketError;
use crate::control::{CLIENT_KEY_BYTES_MAX, CLIENT_KEY_BYTES_MIN};
use crate::device::{KEY_BLOCK_BYTES, KeyBlock};

/// Bytes of a server's key.
pub const SERVER_KEY_BYTES: usize = 128;
/// The longest metadata that a wrapped key holds, in bytes, its kind not counted.
pub const METADATA_BYTES_MAX: usize =
    CLIENT_KEY_BYTES_MAX - TAG_BYTES - KEY_BLOCK_BYTES - KIND_BYTES - LENGTH_BYTES;
const KIND_BYTES: usize = 1;
const LENGTH_BYTES: usize = 2;
const KIND_USER: u8 = 0;
const KIND_TIMESTAMP: u8 = 1;

/// What a server wrote into a client's key when it made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Metadata {
    /// Free bytes.
    User(Vec<u8>),
    /// When the key was made, Unix time in seconds.
    Timestamp(u64),
    /// A kind that OpenVPN does not know.
    Other(u8, Vec<u8>),
}

impl Metadata {
    fn parse(bytes: &[u8]) -> Self {
        match bytes.split_first() {
            None => Self::User(Vec::new()),
            Some((&KIND_USER, rest)) => Self::User(rest.to_vec()),
            Some((&KIND_TIMESTAMP, rest)) => match <[u8; 8]>::try_from(rest) {
                Ok(time) => Self::Timestamp(u64::from_be_bytes(time)),
                Err(_) => Self::Other(KIND_TIMESTAMP, rest.to_vec()),
            },
            Some((kind, rest)) => Self::Other(*kind, rest.to_vec()),
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::User(bytes) => [&[KIND_USER], &bytes[..]].concat(),
            Self::Timestamp(time) => [&[KIND_TIMESTAMP], &time.to_be_bytes()[..]].concat(),
            Self::Other(kind, bytes) => [&[*kind], &bytes[..]].concat(),
        }
    }
}

/// A server's key, under which it wraps the keys of its clients. [`crate::static_key`] reads its file, and a client's.
pub struct ServerKey(Half);

/// A client's key, unwrapped.
#[derive(Debug)]
pub struct UnwrappedClientKey {
    /// Its tls-crypt key.
    pub key: KeyBlock,
    /// What the key says about the client.
    pub metadata: Metadata,
}

impl ServerKey {
    /// A server's key.
    pub fn new(bytes: &[u8; SERVER_KEY_BYTES]) -> Self {
        Self(Half::new(bytes))
    }

    /// Wraps a client's key.
    ///
    /// # Errors
    /// [`WrapError::MetadataTooLong`].
    pub fn wrap(&self, key: &KeyBlock, metadata: &Metadata) -> Result<Vec<u8>, WrapError> {
        let metadata = metadata.to_bytes();
        let content = Zeroizing::new([&key.expose()[..], &metadata].concat());
        let whole = TAG_BYTES + content.len() + LENGTH_BYTES;
        let length = u16::try_from(whole).ok().filter(|_| whole <= CLIENT_KEY_BYTES_MAX);
        let length = length.ok_or(WrapError::MetadataTooLong(metadata.len() - KIND_BYTES))?;
        let mut wrapped = Vec::with_capacity(whole);
        self.0.seal(&[&length.to_be_bytes()], &content, &mut wrapped);
        wrapped.extend_from_slice(&length.to_be_bytes());
        Ok(wrapped)
    }

    /// Unwraps a client's key, which [`crate::control::split_client_key`] found behind a packet.
    ///
    /// # Errors
    /// It is none, or not under this key.
    pub fn unwrap(&self, wrapped: &[u8]) -> Result<UnwrappedClientKey, WrapError> {
        let (sealed, length) = split_length(wrapped)?;
        let mut content = Zeroizing::new(Vec::with_capacity(sealed.len()));
        let opened = self.0.open(&[&length], sealed, &mut content);
        opened.map_err(|_| WrapError::ForeignClientKey)?;
        let (key, metadata) = content
            .split_first_chunk::<KEY_BLOCK_BYTES>()
            .ok_or(PacketError::BadClientKey(wrapped.len()))?;
        Ok(UnwrappedClientKey { key: KeyBlock::new(*key), metadata: Metadata::parse(metadata) })
    }
}

/// Splits the length off, which must be that of it all.
fn split_length(wrapped: &[u8]) -> Result<(&[u8], [u8; LENGTH_BYTES]), WrapError> {
    let bad = PacketError::BadClientKey(wrapped.len());
    let (sealed, length) = wrapped.split_last_chunk::<LENGTH_BYTES>().ok_or(bad)?;
    let is_right = usize::from(u16::from_be_bytes(*length)) == wrapped.len()
        && (CLIENT_KEY_BYTES_MIN..=CLIENT_KEY_BYTES_MAX).contains(&wrapped.len());
    if is_right { Ok((sealed, *length)) } else { Err(bad.into()) }
}
