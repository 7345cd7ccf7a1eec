//! Opening in epochs.

use std::fmt;
use std::ops::Range;
use std::sync::OnceLock;

use zeroize::Zeroizing;

use super::derivation::{EpochKey, next};
use super::{EPOCH_FUTURE, EPOCH_HEADER_BYTES, EPOCH_MAX, nonce};
use crate::aead::NONCE_LEN;
use crate::library::{Choice, preferred_for_data};
use crate::ovpn::opening::LimitedKey;
use crate::ovpn::{OpenError, TAG_BYTES, Usage, usage};
use crate::window::ReplayWindow;
use crate::{DataCipher, EpochSecret};

/// How many epochs are to come.
const AHEAD: usize = EPOCH_FUTURE as usize;

/// The opening direction: the keys of the current epoch, of the one before and of the
/// [`EPOCH_FUTURE`] next, each with its replay window.
///
/// The first authentic packet of a future epoch makes that epoch the current one. The key that was current
/// opens late packets until the epoch changes again; epochs that were skipped are gone. Of a future epoch
/// there is only the secret, until a packet bears its number. Its opening key, most of an epoch's memory, is
/// made then and kept, so forged packets make each only once.
pub struct OpeningEpochs {
    cipher: DataCipher,
    choice: Choice,
    retiring: Option<Box<OpeningEpoch>>,
    current: OpeningEpoch,
    /// The epochs that follow on the current one, in turn.
    future: [FutureEpoch; AHEAD],
}

impl OpeningEpochs {
    /// Epoch 1, of which this is the secret, opened with the preferred libraries; nothing received yet.
    ///
    /// The secret is the first 32 bytes of the direction's cipher half of the key block.
    pub fn new(cipher: DataCipher, first: EpochSecret) -> Self {
        Self::with(preferred_for_data(cipher).1, cipher, first)
    }

    /// As [`Self::new`], with libraries of the caller's choice. AES-192-GCM is always AWS-LC's.
    pub fn with(choice: Choice, cipher: DataCipher, first: EpochSecret) -> Self {
        Self::from_epoch(choice, cipher, 1, first)
    }

    fn from_epoch(choice: Choice, cipher: DataCipher, epoch: u16, secret: EpochSecret) -> Self {
        let current = OpeningEpoch::new(cipher, choice, epoch, &secret);
        let mut secret = secret;
        let future = std::array::from_fn(|_| FutureEpoch::after(&mut secret));
        Self { cipher, choice, retiring: None, current, future }
    }

    /// The highest epoch of which a packet was opened, 1 to [`EPOCH_MAX`]. To be followed when sealing.
    pub const fn epoch(&self) -> u16 {
        self.current.epoch
    }

    /// The use of the current key, by packets that failed to open, and of the epochs, which a new secret renews.
    pub fn usage(&self) -> Usage {
        let epochs = if self.current.epoch < usage::EPOCH_RENEWAL {
            Usage::Ample
        } else {
            Usage::RenewalDue
        };
        self.current.key.usage().max(epochs)
    }

    /// Opens a packet, from the first word to the end of the tag, in place, and takes its epoch if it
    /// is ahead ([`Self::epoch`]).
    ///
    /// Returns where in `packet` the plaintext stands. The epoch's window is asked before the packet is
    /// opened and told only afterwards, so a forged packet moves nothing.
    ///
    /// # Errors
    /// [`OpenError`]; after [`OpenError::Forged`] the packet's bytes are of no use.
    #[inline]
    pub fn open(&mut self, packet: &mut [u8]) -> Result<Range<usize>, OpenError> {
        let (packet_id, plain) = self.open_pipelined(packet)?;
        self.accept(packet_id)?;
        Ok(plain)
    }

    /// As [`Self::open`], but changes nothing: several threads may open at a time. The packet counts as
    /// received only once [`Self::accept`] has taken the packet id that is returned with its
    /// plaintext's place.
    ///
    /// # Errors
    /// [`OpenError`]; after [`OpenError::Forged`] the packet's bytes are of no use.
    pub fn open_pipelined(
        &self,
        packet: &mut [u8],
    ) -> Result<(EpochPacketId, Range<usize>), OpenError> {
        let end = packet.len().checked_sub(TAG_BYTES).ok_or(OpenError::TooShort)?;
        let (header, rest) =
            packet.split_first_chunk_mut::<EPOCH_HEADER_BYTES>().ok_or(OpenError::TooShort)?;
        let (ciphertext, tag) =
            rest.split_last_chunk_mut::<TAG_BYTES>().ok_or(OpenError::TooShort)?;
        let [_, _, _, _, packet_id @ ..] = *header;
        let number = u64::from_be_bytes(packet_id);
        let id = EpochPacketId { epoch: (number >> 48) as u16, counter: number & (u64::MAX >> 16) };
        let epoch = self.find(id.epoch).ok_or(OpenError::UnknownEpoch)?;
        if id.counter == 0 {
            return Err(OpenError::ZeroPacketId);
        }
        epoch.window.check(id.counter)?;
        epoch.key.open(nonce(packet_id, &epoch.implicit_iv), header, ciphertext, tag)?;
        Ok((id, EPOCH_HEADER_BYTES..end))
    }

    /// Counts a packet that [`Self::open_pipelined`] has opened as received, and takes its epoch if it is
    /// ahead. Returns whether it was.
    ///
    /// # Errors
    /// A packet with the same id was accepted in between, or others have left it or its epoch behind.
    pub fn accept(&mut self, packet_id: EpochPacketId) -> Result<bool, OpenError> {
        let EpochPacketId { epoch, counter } = packet_id;
        let ahead = epoch.saturating_sub(self.current.epoch);
        if ahead > 0 {
            self.find(epoch).ok_or(OpenError::UnknownEpoch)?;
            self.move_ahead(ahead);
        }
        let found = if epoch == self.current.epoch {
            Some(&mut self.current)
        } else {
            self.retiring.as_deref_mut().filter(|retiring| retiring.epoch == epoch)
        };
        found.ok_or(OpenError::UnknownEpoch)?.window.accept(counter)?;
        Ok(ahead > 0)
    }

    /// The epoch of this number, if its packets are opened now.
    #[inline]
    fn find(&self, epoch: u16) -> Option<&OpeningEpoch> {
        if epoch == self.current.epoch {
            return Some(&self.current);
        }
        if epoch > EPOCH_MAX {
            return None;
        }
        match epoch.checked_sub(self.current.epoch) {
            Some(ahead) => {
                let future = self.future.get(usize::from(ahead) - 1)?;
                Some(future.opening(self.cipher, self.choice, epoch))
            }
            None => self.retiring.as_deref().filter(|retiring| retiring.epoch == epoch),
        }
    }

    /// Makes the future epoch that is `ahead` of the current one, 1 to [`EPOCH_FUTURE`], the current.
    #[cold]
    fn move_ahead(&mut self, ahead: u16) {
        let epoch = self.current.epoch + ahead;
        let reached = usize::from(ahead) - 1;
        let current = self.future[reached].take(self.cipher, self.choice, epoch);
        self.retiring = Some(Box::new(std::mem::replace(&mut self.current, current)));
        let mut secret = self.future[AHEAD - 1].secret.clone();
        self.future.rotate_left(reached + 1);
        for future in &mut self.future[AHEAD - 1 - reached..] {
            *future = FutureEpoch::after(&mut secret);
        }
    }
}

impl fmt::Debug for OpeningEpochs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpeningEpochs")
            .field("cipher", &self.cipher)
            .field("epoch", &self.epoch())
            .field("highest", &self.current.window.highest())
            .finish_non_exhaustive()
    }
}

/// The packet id of a packet that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochPacketId {
    epoch: u16,
    counter: u64,
}

impl EpochPacketId {
    /// The epoch that it was sealed in.
    pub const fn epoch(self) -> u16 {
        self.epoch
    }

    /// Its place in the epoch, 1 to 2^48 - 1.
    pub const fn counter(self) -> u64 {
        self.counter
    }
}

struct OpeningEpoch {
    epoch: u16,
    key: LimitedKey,
    implicit_iv: Zeroizing<[u8; NONCE_LEN]>,
    window: ReplayWindow,
}

impl OpeningEpoch {
    fn new(cipher: DataCipher, choice: Choice, epoch: u16, secret: &EpochSecret) -> Self {
        let EpochKey { key, implicit_iv } = EpochKey::new(cipher, secret, choice);
        Self { epoch, key: LimitedKey::new(key), implicit_iv, window: ReplayWindow::new() }
    }
}

/// An epoch to come.
struct FutureEpoch {
    secret: EpochSecret,
    /// Made with the first packet that bears its number.
    opening: OnceLock<Box<OpeningEpoch>>,
}

impl FutureEpoch {
    /// The one after the epoch of this secret, in whose place its own is put.
    fn after(secret: &mut EpochSecret) -> Self {
        *secret = next(secret);
        Self { secret: secret.clone(), opening: OnceLock::new() }
    }

    /// Returns the opening key of this epoch; `epoch` is its number.
    fn opening(&self, cipher: DataCipher, choice: Choice, epoch: u16) -> &OpeningEpoch {
        let make = || Box::new(OpeningEpoch::new(cipher, choice, epoch, &self.secret));
        self.opening.get_or_init(make)
    }

    /// As [`Self::opening`], out of it.
    fn take(&mut self, cipher: DataCipher, choice: Choice, epoch: u16) -> OpeningEpoch {
        let made = self.opening.take().map(|opening| *opening);
        made.unwrap_or_else(|| OpeningEpoch::new(cipher, choice, epoch, &self.secret))
    }
}

#[cfg(test)]
impl OpeningEpochs {
    /// As if packets had been opened up to this epoch, whose secret it is.
    pub(super) fn at(cipher: DataCipher, epoch: u16, secret: EpochSecret) -> Self {
        Self::from_epoch(Choice::default(), cipher, epoch, secret)
    }

    /// As if this number of packets had failed to open with the current key.
    pub(super) fn set_failures(&self, failures: u64) {
        self.current.key.set_failures(failures);
    }

    /// The epochs whose packets are opened now.
    pub(super) fn known(&self) -> Vec<u16> {
        let epochs =
            self.retiring.as_deref().into_iter().chain([&self.current]).map(|epoch| epoch.epoch);
        epochs.chain((1..=EPOCH_FUTURE).map(|ahead| self.current.epoch + ahead)).collect()
    }

    /// Of which epochs to come there is more than the secret, and how many packets failed with each.
    pub(super) fn made(&self) -> Vec<(u16, u64)> {
        let made = self.future.iter().filter_map(|future| future.opening.get());
        made.map(|opening| (opening.epoch, opening.key.failures())).collect()
    }
}
