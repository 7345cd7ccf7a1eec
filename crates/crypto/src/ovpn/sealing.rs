//! The parts of sealing that both layouts share: packet ids, and room in the datagram.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{SealError, usage};
use crate::DataCipher;

/// The packet ids and blocks that one sealing key has used; several threads count on it.
#[derive(Debug)]
pub(super) struct Spent {
    /// The last packet id given away.
    last: AtomicU64,
    /// The last packet id that there is.
    max: u64,
    /// Blocks sealed, those of the packets included ([`usage::blocks_of`]).
    blocks: AtomicU64,
    /// Sealed blocks after which no more ids are given away.
    blocks_max: u64,
}

impl Spent {
    /// Nothing given away; the ids are 1 to `max`.
    pub(super) fn new(cipher: DataCipher, max: u64) -> Self {
        let blocks_max = usage::blocks_max(cipher).unwrap_or(u64::MAX);
        Self { last: AtomicU64::new(0), max, blocks: AtomicU64::new(0), blocks_max }
    }

    /// The last packet id given away; 0 before the first.
    pub(super) fn last(&self) -> u64 {
        // One number by itself, as the next one: nothing else is read in its light.
        self.last.load(Relaxed)
    }

    /// Blocks sealed by all whose [`Ids`] are dropped.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.load(Relaxed)
    }

    /// Takes the next `packets` ids.
    ///
    /// # Errors
    /// [`SealError::Exhausted`]: fewer ids are left, or the key has sealed all the blocks that
    /// its cipher is good for.
    #[inline]
    pub(super) fn reserve(&self, packets: u64) -> Result<Ids<'_>, SealError> {
        if self.blocks() >= self.blocks_max {
            return Err(SealError::Exhausted);
        }
        let next = |last: u64| last.checked_add(packets).filter(|last| *last <= self.max);
        // The number itself is all that is handed over, so no order with other memory is needed.
        let last = self.last.fetch_update(Relaxed, Relaxed, next);
        Ok(Ids {
            spent: self,
            last: last.map_err(|_| SealError::Exhausted)?,
            left: packets,
            blocks: 0,
        })
    }
}

#[cfg(test)]
impl Spent {
    /// As if all ids up to `last` had been given away, and `blocks` blocks sealed.
    pub(super) fn at(cipher: DataCipher, max: u64, last: u64, blocks: u64) -> Self {
        Self { last: last.into(), blocks: blocks.into(), ..Self::new(cipher, max) }
    }
}

/// Consecutive packet ids, each good for one packet.
#[derive(Debug)]
pub(super) struct Ids<'a> {
    spent: &'a Spent,
    /// The last one used, or the one before the first.
    last: u64,
    left: u64,
    /// Sealed with these ids.
    blocks: u64,
}

impl Ids<'_> {
    /// The next id, used up whatever comes of it, so that no failure can make a nonce repeat.
    ///
    /// # Errors
    /// [`SealError::Exhausted`]: all that were reserved are used.
    #[inline]
    pub(super) fn take(&mut self, plaintext_len: usize) -> Result<u64, SealError> {
        self.left = self.left.checked_sub(1).ok_or(SealError::Exhausted)?;
        self.last += 1;
        self.blocks += usage::blocks_of(plaintext_len);
        Ok(self.last)
    }
}

impl Drop for Ids<'_> {
    /// Counts once for all packets, since several threads may count.
    fn drop(&mut self) {
        if self.blocks > 0 {
            self.spent.blocks.fetch_add(self.blocks, Relaxed);
        }
    }
}

/// The packet with `plaintext_len` bytes of plaintext at the beginning of `datagram`.
#[inline]
pub(super) fn packet_of(
    overhead: usize,
    plaintext_len: usize,
    datagram: &mut [u8],
) -> Result<&mut [u8], SealError> {
    let total = overhead.checked_add(plaintext_len).ok_or(SealError::NoRoom)?;
    datagram.get_mut(..total).ok_or(SealError::NoRoom)
}
