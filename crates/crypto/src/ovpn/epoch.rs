//! The epoch layout: keys that follow from one another, each with its own packet ids, the tag behind the
//! ciphertext (`docs/design/ovpn.md`, epochs).

mod derivation;
mod opening;
mod sealing;

pub use opening::{EpochPacketId, OpeningEpochs};
pub use sealing::{EpochReserved, EpochSealingKey, SealingEpochs};

use super::{FIRST_WORD_BYTES, TAG_BYTES};
use crate::aead::NONCE_LEN;

/// Bytes before the ciphertext of a packet: first word, epoch, counter. They are the associated data.
pub const EPOCH_HEADER_BYTES: usize = FIRST_WORD_BYTES + 8;
/// Bytes that a packet adds to its plaintext: its header in front, its tag behind.
pub const EPOCH_OVERHEAD_BYTES: usize = EPOCH_HEADER_BYTES + TAG_BYTES;
/// How many epochs ahead of the current one a receiver opens packets.
pub const EPOCH_FUTURE: u16 = 4;
/// The last epoch, since its receiver must be able to look [`EPOCH_FUTURE`] further. The first is 1.
pub const EPOCH_MAX: u16 = u16::MAX - EPOCH_FUTURE;

/// The last counter of an epoch; the first is 1.
const COUNTER_MAX: u64 = (1 << 48) - 1;

/// The implicit IV, its first 8 bytes XORed with epoch and counter as they are in the packet.
#[inline]
fn nonce(packet_id: [u8; 8], implicit_iv: &[u8; NONCE_LEN]) -> [u8; NONCE_LEN] {
    let mut nonce = *implicit_iv;
    nonce.iter_mut().zip(packet_id).for_each(|(byte, id)| *byte ^= id);
    nonce
}

#[cfg(test)]
mod tests;
