//! What protects control packets outside of TLS: nothing, tls-auth, tls-crypt, or tls-crypt-v2.
//!
//! The wrapped layouts differ from the plain one ([`crate::control`]) behind the session id. tls-auth puts a MAC and
//! a replay id there; tls-crypt does so too and encrypts the rest. tls-crypt-v2 is tls-crypt with a key of each
//! client's own, which the client brings along, sealed under the server's key.
//!
//! [`WrapKeys`] has no state, so a server can check and answer a first packet without keeping any. [`Wrap`] adds the
//! replay ids of one session.

mod auth;
mod crypt;
mod crypt_v2;
mod replay;

use std::fmt;
use std::sync::Arc;

use crate::PacketError;
use crate::device::{KeyBlock, Side};

pub use auth::{AuthDigest, AuthDirection, AuthKeys};
pub use crypt::CryptKeys;
pub use crypt_v2::{METADATA_BYTES_MAX, Metadata, SERVER_KEY_BYTES, ServerKey, UnwrappedClientKey};
pub use replay::{REPLAY_WINDOW_PACKETS, ReplayId, ReplayWindow};

/// Opcode, key id and session id: what every layout begins with.
pub(crate) const HEAD_BYTES: usize = 1 + 8;

/// Why a wrapped packet is refused, or a key cannot be wrapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrapError {
    /// Peer: too short for the layout; it may send without tls-auth or tls-crypt.
    #[error("packet of {have} bytes, a wrapped one has at least {need}: drop it")]
    Truncated {
        /// Bytes needed.
        need: usize,
        /// Bytes there.
        have: usize,
    },
    /// Peer or configuration: the MAC does not fit.
    #[error(
        "the MAC is wrong: drop the packet; if a client's every packet fails, its tls-auth or \
         tls-crypt key, its digest or its direction is not the server's"
    )]
    BadMac,
    /// Network or attacker: the packet came before.
    #[error("packet with replay id {0} was received before, or is too old: drop it")]
    Replay(ReplayId),
    /// Peer or configuration: the wrapped client key is not under this server's key.
    #[error(
        "the tls-crypt-v2 client key was not made with this server's key: drop the packet; make \
         the client a new key"
    )]
    ForeignClientKey,
    /// Caller: too much metadata for a client key.
    #[error("{0} bytes of metadata, a client key holds at most {METADATA_BYTES_MAX}: shorten it")]
    MetadataTooLong(usize),
    /// Peer: what is inside, or behind, is no packet.
    #[error(transparent)]
    Packet(#[from] PacketError),
}

/// The keys of a wrapping, without state. Cheap to clone.
#[derive(Clone, Default)]
pub enum WrapKeys {
    /// Packets travel as they are.
    #[default]
    None,
    /// tls-auth: a MAC.
    Auth(Arc<AuthKeys>),
    /// tls-crypt, also under a client's own key.
    Crypt(Arc<CryptKeys>),
}

impl WrapKeys {
    /// tls-auth.
    pub fn tls_auth(key: &KeyBlock, digest: AuthDigest, direction: AuthDirection) -> Self {
        Self::Auth(Arc::new(AuthKeys::new(key, digest, direction)))
    }

    /// tls-crypt, for one end.
    pub fn tls_crypt(key: &KeyBlock, side: Side) -> Self {
        Self::Crypt(Arc::new(CryptKeys::new(key, side)))
    }

    /// Dynamic tls-crypt: the keys of renegotiations. `exported` is what the first TLS session exports with
    /// [`crate::key_derivation::DYNAMIC_TLS_CRYPT_LABEL`].
    pub fn dynamic(&self, exported: &KeyBlock, side: Side) -> Self {
        let original = match self {
            Self::None => None,
            Self::Auth(keys) => Some(keys.original()),
            Self::Crypt(keys) => Some(keys.original()),
        };
        let mut mixed = zeroize::Zeroizing::new(*exported.expose());
        for (byte, more) in mixed.iter_mut().zip(original.iter().flat_map(|key| key.expose())) {
            *byte ^= more;
        }
        Self::tls_crypt(&KeyBlock::new(*mixed), side)
    }

    /// How many bytes longer than a plain packet a wrapped one is.
    pub fn overhead(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Auth(keys) => keys.overhead(),
            Self::Crypt(_) => crypt::OVERHEAD_BYTES,
        }
    }

    /// Appends the wrapped form of a plain control packet to a buffer.
    pub fn wrap(&self, plain: &[u8], id: ReplayId, out: &mut Vec<u8>) {
        match self {
            Self::None => out.extend_from_slice(plain),
            Self::Auth(keys) => keys.wrap(plain, id, out),
            Self::Crypt(keys) => keys.wrap(plain, id, out),
        }
    }

    /// Appends the plain form of a wrapped packet to a buffer, and returns the packet's replay id, which is not
    /// judged. On an error nothing is appended.
    ///
    /// # Errors
    /// The packet is not under these keys.
    pub fn unwrap(&self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Option<ReplayId>, WrapError> {
        match self {
            Self::None => {
                out.extend_from_slice(bytes);
                Ok(None)
            }
            Self::Auth(keys) => keys.unwrap(bytes, out).map(Some),
            Self::Crypt(keys) => keys.unwrap(bytes, out).map(Some),
        }
    }
}

impl fmt::Debug for WrapKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Auth(_) => "Auth(..)",
            Self::Crypt(_) => "Crypt(..)",
        })
    }
}

/// The wrapping of one session: keys, the replay ids that it has sent, and those that it has received.
#[derive(Debug)]
pub struct Wrap {
    keys: WrapKeys,
    next: ReplayId,
    window: ReplayWindow,
}

impl Wrap {
    /// A wrapping whose first packet has the replay id `first`.
    pub fn new(keys: WrapKeys, first: ReplayId) -> Self {
        Self { keys, next: first, window: ReplayWindow::default() }
    }

    /// The keys.
    pub const fn keys(&self) -> &WrapKeys {
        &self.keys
    }

    /// Notes the replay id of a packet that was unwrapped elsewhere.
    pub(crate) fn note(&mut self, id: Option<ReplayId>) {
        if let Some(id) = id {
            self.window.accept(id);
        }
    }

    /// Appends the wrapped form of a plain control packet to a buffer, under a replay id never used before.
    pub fn wrap(&mut self, plain: &[u8], out: &mut Vec<u8>) {
        self.keys.wrap(plain, self.next, out);
        self.next = self.next.next();
    }

    /// Appends the plain form of a wrapped packet to a buffer. On an error nothing is appended.
    ///
    /// # Errors
    /// The packet is not under these keys, or came before.
    pub fn unwrap(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<(), WrapError> {
        let start = out.len();
        let Some(id) = self.keys.unwrap(bytes, out)? else { return Ok(()) };
        if self.window.accept(id) {
            return Ok(());
        }
        out.truncate(start);
        Err(WrapError::Replay(id))
    }
}

#[cfg(test)]
mod tests;
