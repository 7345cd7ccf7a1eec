//! Sealing in epochs.

use std::fmt;
use std::sync::Arc;

use super::derivation::{EpochKey, next};
use super::{COUNTER_MAX, EPOCH_HEADER_BYTES, EPOCH_MAX, EPOCH_OVERHEAD_BYTES, nonce};
use crate::library::{Choice, preferred_for_data};
use crate::ovpn::sealing::{Ids, Spent, packet_of};
use crate::ovpn::{FIRST_WORD_BYTES, SealError, TAG_BYTES, Usage, usage};
use crate::{DataCipher, EpochSecret};

/// The sealing direction: the key of the current epoch, and the way to the next.
pub struct SealingEpochs {
    cipher: DataCipher,
    choice: Choice,
    /// Of the current epoch.
    secret: EpochSecret,
    current: Arc<EpochSealingKey>,
}

impl SealingEpochs {
    /// Epoch 1, of which this is the secret, sealed with the preferred libraries. The same secret must
    /// never be given to two.
    ///
    /// The secret is the first 32 bytes of the direction's cipher half of the key block.
    pub fn new(cipher: DataCipher, first: EpochSecret) -> Self {
        Self::with(preferred_for_data(cipher).0, cipher, first)
    }

    /// As [`Self::new`], with libraries of the caller's choice. AES-192-GCM is always AWS-LC's.
    pub fn with(choice: Choice, cipher: DataCipher, first: EpochSecret) -> Self {
        Self::from_epoch(choice, cipher, 1, first)
    }

    fn from_epoch(choice: Choice, cipher: DataCipher, epoch: u16, secret: EpochSecret) -> Self {
        let current = Arc::new(EpochSealingKey::new(cipher, choice, epoch, &secret));
        Self { cipher, choice, secret, current }
    }

    /// The key that seals now. Threads that share it take the new one when the epoch advances; packets sealed
    /// with the old one until then are opened all the same.
    pub const fn current(&self) -> &Arc<EpochSealingKey> {
        &self.current
    }

    /// How far the epochs are used up: tells when to negotiate a new secret.
    pub fn usage(&self) -> Usage {
        match self.current.epoch {
            0..usage::EPOCH_RENEWAL => Usage::Ample,
            EPOCH_MAX.. if self.current.usage() == Usage::UsedUp => Usage::UsedUp,
            _ => Usage::RenewalDue,
        }
    }

    /// Takes the next epoch if the current key is near one of its limits. To be asked now and then.
    /// Returns whether there is a new key.
    pub fn advance_if_due(&mut self) -> bool {
        self.current.usage() != Usage::Ample && self.advance()
    }

    /// Takes the next epoch. Returns false, and stays, in the last.
    pub fn advance(&mut self) -> bool {
        self.advance_to(self.current.epoch.saturating_add(1))
    }

    /// Takes the epoch in which the peer has sealed a packet that was opened, if it is ahead: so the
    /// peer asks for it. Returns whether there is a new key.
    pub fn follow(&mut self, peers: u16) -> bool {
        peers > self.current.epoch && self.advance_to(peers)
    }

    /// Takes an epoch ahead of the current one.
    fn advance_to(&mut self, epoch: u16) -> bool {
        if epoch > EPOCH_MAX {
            return false;
        }
        for _ in self.current.epoch..epoch {
            self.secret = next(&self.secret);
        }
        let key = EpochSealingKey::new(self.cipher, self.choice, epoch, &self.secret);
        self.current = Arc::new(key);
        true
    }
}

impl fmt::Debug for SealingEpochs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealingEpochs").field("current", &self.current).finish_non_exhaustive()
    }
}

/// The key of one epoch. Several threads may seal with it, each with counters that it has reserved
/// ([`EpochSealingKey::reserve`]).
pub struct EpochSealingKey {
    key: EpochKey,
    cipher: DataCipher,
    epoch: u16,
    spent: Spent,
}

impl EpochSealingKey {
    fn new(cipher: DataCipher, choice: Choice, epoch: u16, secret: &EpochSecret) -> Self {
        let key = EpochKey::new(cipher, secret, choice);
        Self { key, cipher, epoch, spent: Spent::new(cipher, COUNTER_MAX) }
    }

    /// Its epoch, 1 to [`EPOCH_MAX`].
    pub const fn epoch(&self) -> u16 {
        self.epoch
    }

    /// How many counters it has given away: an upper bound of the packets sealed.
    pub fn packets(&self) -> u64 {
        self.spent.last()
    }

    /// Blocks sealed ([`usage::blocks_of`]), but for those of [`EpochReserved`] still in use.
    pub fn blocks(&self) -> u64 {
        self.spent.blocks()
    }

    /// How far it is used up, by counters and by blocks.
    pub fn usage(&self) -> Usage {
        let counters = usage::against(self.packets(), COUNTER_MAX);
        counters.max(usage::of_blocks(self.cipher, self.blocks()))
    }

    /// Takes the next `packets` counters, for as many packets that begin with `first_word`. No other caller
    /// gets them. Counters that stay unused are skipped.
    ///
    /// # Errors
    /// [`SealError::Exhausted`]: fewer ids are left, or the blocks are used up.
    #[inline]
    pub fn reserve(
        &self,
        packets: u64,
        first_word: [u8; FIRST_WORD_BYTES],
    ) -> Result<EpochReserved<'_>, SealError> {
        Ok(EpochReserved { key: self, ids: self.spent.reserve(packets)?, first_word })
    }
}

impl fmt::Debug for EpochSealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EpochSealingKey")
            .field("cipher", &self.cipher)
            .field("epoch", &self.epoch)
            .field("packets", &self.packets())
            .finish_non_exhaustive()
    }
}

/// Consecutive counters of an epoch, each good for one packet.
#[derive(Debug)]
pub struct EpochReserved<'a> {
    key: &'a EpochSealingKey,
    ids: Ids<'a>,
    first_word: [u8; FIRST_WORD_BYTES],
}

impl EpochReserved<'_> {
    /// Seals a datagram whose whole plaintext already stands behind the room for the header.
    ///
    /// On entry `datagram` is [`EPOCH_HEADER_BYTES`] bytes of room, `plaintext_len` bytes of plaintext,
    /// [`TAG_BYTES`] bytes of room, anything. Returns the packet's length.
    ///
    /// # Errors
    /// [`SealError`]; then the plaintext is as it was.
    #[inline]
    pub fn seal_in_place(
        &mut self,
        datagram: &mut [u8],
        plaintext_len: usize,
    ) -> Result<usize, SealError> {
        let packet = packet_of(EPOCH_OVERHEAD_BYTES, plaintext_len, datagram)?;
        let total = packet.len();
        let (header, rest) =
            packet.split_first_chunk_mut::<EPOCH_HEADER_BYTES>().ok_or(SealError::NoRoom)?;
        let (plaintext, tag) = rest.split_last_chunk_mut::<TAG_BYTES>().ok_or(SealError::NoRoom)?;
        let EpochSealingKey { key, epoch, .. } = self.key;
        let counter = self.ids.take(plaintext.len())?;
        let packet_id = (u64::from(*epoch) << 48 | counter).to_be_bytes();
        header[..FIRST_WORD_BYTES].copy_from_slice(&self.first_word);
        header[FIRST_WORD_BYTES..].copy_from_slice(&packet_id);
        let nonce = nonce(packet_id, &key.implicit_iv);
        key.key.seal(nonce, header, plaintext, tag).map_err(|_| SealError::NoRoom)?;
        Ok(total)
    }
}

#[cfg(test)]
impl SealingEpochs {
    /// As if it had advanced to this epoch, whose secret it is.
    pub(super) fn at(cipher: DataCipher, epoch: u16, secret: EpochSecret) -> Self {
        Self::from_epoch(Choice::default(), cipher, epoch, secret)
    }

    /// As if the current key had given away all counters up to `last`, and sealed `blocks` blocks.
    pub(super) fn spend(&mut self, last: u64, blocks: u64) {
        let epoch = self.current.epoch;
        let mut key = EpochSealingKey::new(self.cipher, self.choice, epoch, &self.secret);
        key.spent = Spent::at(key.cipher, COUNTER_MAX, last, blocks);
        self.current = Arc::new(key);
    }
}
