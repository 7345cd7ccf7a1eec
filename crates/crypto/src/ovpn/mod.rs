//! Data channel packets of format `ovpn`: OpenVPN's DATA_V2 with an AEAD, sealed and opened.
//!
//! There are two layouts (`docs/design/ovpn.md`). Numbers are big-endian.
//!
//! - Classic, [`SealingKey`] and [`OpeningKey`]: first word 4, packet id 4, tag 16, ciphertext. The
//!   associated data is the first 8 bytes; the nonce is the packet id, then the key's nonce tail.
//! - Epoch, [`SealingEpochs`] and [`OpeningEpochs`]: first word 4, epoch 2, counter 6, ciphertext, tag
//!   16. The associated data is the first 12 bytes; the nonce is the epoch's implicit IV, its first 8
//!   bytes XORed with epoch and counter.
//!
//! The first word is opcode and key id 1, peer id 3. It belongs to the caller, which finds peer and key by
//! it: here it is authenticated but not read.

mod classic;
mod epoch;
mod opening;
mod sealing;
pub mod usage;

use crate::DataCipher;
use crate::aead::{ICV_LEN, NONCE_LEN};
use crate::window::Replay;

pub use classic::{OpeningKey, Reserved, SealingKey};
pub use epoch::{
    EPOCH_FUTURE, EPOCH_HEADER_BYTES, EPOCH_MAX, EPOCH_OVERHEAD_BYTES, EpochPacketId,
    EpochReserved, EpochSealingKey, OpeningEpochs, SealingEpochs,
};
pub use usage::Usage;

/// Bytes of the first word: opcode and key id, peer id.
pub const FIRST_WORD_BYTES: usize = 4;
/// Bytes before the tag of a classic packet; they are the associated data.
pub const HEADER_BYTES: usize = FIRST_WORD_BYTES + 4;
/// Bytes of the tag.
pub const TAG_BYTES: usize = ICV_LEN;
/// Bytes that a classic packet adds to its plaintext, all of them in front.
pub const OVERHEAD_BYTES: usize = HEADER_BYTES + TAG_BYTES;
/// Bytes of a key's nonce tail.
pub const NONCE_TAIL_BYTES: usize = NONCE_LEN - 4;

/// A key was not made: ours, or the configuration's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid key length {have} for {cipher}, expected {}", cipher.key_bytes())]
pub struct KeyLengthError {
    /// The cipher that the key was for.
    pub cipher: DataCipher,
    /// Bytes of the key.
    pub have: usize,
}

/// Why a packet was not sealed. Nothing was sealed and no packet id was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// Ours: the key should have been replaced long before. Retire it, and say that a new one is needed.
    #[error("the key has reached its limit of packets or blocks; install a new key")]
    Exhausted,
    /// Ours: the datagram's buffer does not hold header, plaintext and tag.
    #[error("no room in the datagram for the header, the plaintext and the tag")]
    NoRoom,
}

/// Why a packet was not opened. All are the network's or an attacker's doing; drop and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Too short for a header and a tag.
    #[error("data channel packet is too short")]
    TooShort,
    /// Its packet id, or the counter in its epoch, is 0, which no sender uses.
    #[error("invalid packet id 0")]
    ZeroPacketId,
    /// As [`Replay::Duplicate`].
    #[error("a packet with this packet id was accepted before")]
    Duplicate,
    /// As [`Replay::TooOld`].
    #[error("the packet id is too far behind")]
    TooOld,
    /// Sealed in an epoch that is past, too far ahead, or none.
    #[error("the packet's epoch is past or too far ahead")]
    UnknownEpoch,
    /// Not sealed by the holder of the key, or changed on the way; or of another key.
    #[error("packet authentication failed")]
    Forged,
    /// So many packets were forged ([`usage::FAILURES_MAX`]) that the key no longer opens any.
    #[error("too many forged packets; install a new key")]
    TooManyFailures,
}

impl From<Replay> for OpenError {
    fn from(replay: Replay) -> Self {
        match replay {
            Replay::Duplicate => Self::Duplicate,
            Replay::TooOld => Self::TooOld,
        }
    }
}
