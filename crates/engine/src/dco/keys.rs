//! A peer's two keys (reference `openvpn`, section 1.6).

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use weft_crypto::ReplayWindow;
use weft_crypto::ovpn::{KeyLengthError, OpeningKey, SealingKey};
use weft_openvpn::KeyId;
use weft_openvpn::device::rules::NewKey;
use weft_openvpn::device::{CipherAlgorithm, DeviceError, KeyDirection, KeyState, Slot};

/// A key in both directions.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) id: KeyId,
    cipher: CipherAlgorithm,
    pub(crate) sealing: SealingKey,
    pub(crate) opening: OpeningKey,
    /// Held by a worker while it opens packets of this key, once for many.
    window: Mutex<ReplayWindow>,
    /// Its packet ids are used up, and that was told.
    retired: AtomicBool,
}

impl Key {
    /// A fresh key.
    ///
    /// # Errors
    /// [`DeviceError::KeyLength`], which the rules have refused before.
    pub(crate) fn new(new: &NewKey<'_>) -> Result<Self, DeviceError> {
        let cipher_of = |direction: &KeyDirection| {
            let bytes = direction.cipher_key.len();
            let cipher = new.cipher.with_key_bytes(bytes);
            cipher.ok_or(DeviceError::KeyLength { bytes })
        };
        let (encrypt, decrypt) = (new.encrypt, new.decrypt);
        let wrong = |error: KeyLengthError| DeviceError::KeyLength { bytes: error.have };
        let sealing = SealingKey::new(cipher_of(encrypt)?, &encrypt.cipher_key, encrypt.nonce_tail);
        let opening = OpeningKey::new(cipher_of(decrypt)?, &decrypt.cipher_key, decrypt.nonce_tail);
        Ok(Self {
            id: new.key_id,
            cipher: new.cipher,
            sealing: sealing.map_err(wrong)?,
            opening: opening.map_err(wrong)?,
            window: Mutex::new(ReplayWindow::new()),
            retired: AtomicBool::new(false),
        })
    }

    /// The window, for this thread alone.
    #[inline]
    pub(crate) fn hold(&self) -> MutexGuard<'_, ReplayWindow> {
        // Who panicked with it left it whole: it is told last.
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seals no more; true the first time.
    pub(crate) fn retire(&self) -> bool {
        !self.retired.swap(true, Relaxed)
    }
}

/// Both keys.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    primary: Option<Box<Key>>,
    secondary: Option<Box<Key>>,
}

impl Keys {
    /// The key goes to this slot; what was there is erased.
    pub(crate) fn install(&mut self, slot: Slot, key: Key) {
        *self.slot_mut(slot) = Some(Box::new(key));
    }

    /// Erases the key in this slot.
    pub(crate) fn delete(&mut self, slot: Slot) {
        *self.slot_mut(slot) = None;
    }

    /// The primary key becomes the secondary one, and the reverse.
    pub(crate) const fn swap(&mut self) {
        std::mem::swap(&mut self.primary, &mut self.secondary);
    }

    /// What is told of the key in this slot.
    pub(crate) fn state(&self, slot: Slot) -> Option<KeyState> {
        let key = match slot {
            Slot::Primary => self.primary.as_ref(),
            Slot::Secondary => self.secondary.as_ref(),
        };
        key.map(|key| KeyState { key_id: key.id.get().into(), cipher: key.cipher })
    }

    /// What seals.
    #[inline]
    pub(crate) fn sealing(&self) -> Option<&Key> {
        self.primary.as_deref()
    }

    /// What opens the packets that bear this id.
    #[inline]
    pub(crate) fn opening(&self, id: KeyId) -> Option<&Key> {
        let has_id = |key: &&Key| key.id == id;
        let primary = self.primary.as_deref().filter(has_id);
        primary.or_else(|| self.secondary.as_deref().filter(has_id))
    }

    fn slot_mut(&mut self, slot: Slot) -> &mut Option<Box<Key>> {
        match slot {
            Slot::Primary => &mut self.primary,
            Slot::Secondary => &mut self.secondary,
        }
    }
}
