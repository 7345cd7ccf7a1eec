//! The part of opening that both layouts share: a key stops opening once too many packets were forged.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{OpenError, TAG_BYTES, Usage, usage};
use crate::aead::{ExpandedKey, NONCE_LEN};

/// A key, and how often it failed to open.
pub(super) struct LimitedKey {
    key: ExpandedKey,
    failures: AtomicU64,
}

impl LimitedKey {
    /// A key that has not failed yet.
    pub(super) const fn new(key: ExpandedKey) -> Self {
        Self { key, failures: AtomicU64::new(0) }
    }

    /// By the packets that failed to open.
    pub(super) fn usage(&self) -> Usage {
        usage::of_failures(self.failures.load(Relaxed))
    }

    /// Decrypts `in_out` in place if `tag` is right.
    ///
    /// # Errors
    /// [`OpenError::Forged`], after which `in_out` holds nothing of use, or
    /// [`OpenError::TooManyFailures`].
    #[inline]
    pub(super) fn open(
        &self,
        nonce: [u8; NONCE_LEN],
        aad: &[u8],
        in_out: &mut [u8],
        tag: &[u8; TAG_BYTES],
    ) -> Result<(), OpenError> {
        if self.failures.load(Relaxed) >= usage::FAILURES_MAX {
            return Err(OpenError::TooManyFailures);
        }
        self.key.open(nonce, aad, in_out, tag).map_err(|_| self.failed())
    }

    #[cold]
    fn failed(&self) -> OpenError {
        self.failures.fetch_add(1, Relaxed);
        OpenError::Forged
    }
}

#[cfg(test)]
impl LimitedKey {
    /// As if this number of packets had failed to open.
    pub(super) fn set_failures(&self, failures: u64) {
        self.failures.store(failures, Relaxed);
    }

    pub(super) fn is_rings(&self, plaintext_len: usize) -> bool {
        self.key.is_rings(plaintext_len)
    }

    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }
}
