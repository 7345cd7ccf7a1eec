//! A peer's two keys, each for one of the two layouts of packets (`docs/design/ovpn.md`).

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weft_crypto::ovpn::{
    EPOCH_HEADER_BYTES, EPOCH_OVERHEAD_BYTES, EpochReserved, EpochSealingKey, FIRST_WORD_BYTES,
    KeyLengthError, OVERHEAD_BYTES, OpenError, OpeningEpochs, OpeningKey, Reserved, SealError,
    SealingEpochs, SealingKey, Usage, usage,
};
use weft_crypto::{Choice, DataCipher, ReplayWindow, preferred_for_data};
use weft_openvpn::KeyId;
use weft_openvpn::device::rules::{self, NewKey};
use weft_openvpn::device::{CipherAlgorithm, DeviceError, EpochAttributes, KeyState, Mode, Slot};

/// Milliseconds without a newer packet after which older ones are refused, as in the kernel's device.
const REPLAY_QUIET_MS: u64 = 30_000;

/// A key in both directions.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) id: KeyId,
    cipher: CipherAlgorithm,
    layout: Layout,
    /// It was told that it is used up.
    told: AtomicBool,
    /// It no longer seals, and is to leave its slot.
    spent: AtomicBool,
}

#[derive(Debug)]
enum Layout {
    Classic {
        sealing: SealingKey,
        opening: OpeningKey,
        /// Held by a worker while it opens packets of this key, once for many.
        window: Mutex<Window>,
        /// The cipher of received packets.
        cipher: DataCipher,
        /// Blocks opened ([`usage::blocks_of`]).
        opened: AtomicU64,
    },
    Epochs(Box<Epochs>),
}

/// The receive state of a key.
#[derive(Debug, Default)]
pub(crate) struct Window {
    replay: ReplayWindow,
    /// When something was opened last, in ms of the device's clock.
    opened_ms: u64,
}

/// Keys that follow from one another; the peer's sender and this one move each other ahead.
#[derive(Debug)]
struct Epochs {
    /// Held for as long as it takes to find the current key.
    sealing: Mutex<SealingEpochs>,
    /// Held by a worker while it opens packets, once for many.
    opening: Mutex<OpeningEpochs>,
}

impl Key {
    /// A fresh key of a device in this mode.
    ///
    /// # Errors
    /// [`DeviceError::KeyLength`]
    pub(crate) fn new(new: &NewKey<'_>, mode: Mode) -> Result<Self, DeviceError> {
        let (encrypt, decrypt) = (new.encrypt, new.decrypt);
        let (seals, opens) = new.ciphers()?;
        let wrong = |error: KeyLengthError| DeviceError::KeyLength { bytes: error.have };
        let (by, _) = libraries(seals, mode);
        let sealing = SealingKey::with(by, seals, &encrypt.cipher_key, encrypt.nonce_tail);
        let (_, by) = libraries(opens, mode);
        let opening = OpeningKey::with(by, opens, &decrypt.cipher_key, decrypt.nonce_tail);
        let layout = Layout::Classic {
            sealing: sealing.map_err(wrong)?,
            opening: opening.map_err(wrong)?,
            window: Mutex::default(),
            cipher: opens,
            opened: AtomicU64::new(0),
        };
        Ok(Self::of(new.key_id, new.cipher, layout))
    }

    /// Fresh epochs of a device in this mode.
    ///
    /// # Errors
    /// The key id is too large.
    pub(crate) fn epochs(new: EpochAttributes, mode: Mode) -> Result<Self, DeviceError> {
        let EpochAttributes { key_id, cipher, encrypt, decrypt, .. } = new;
        let (seals, opens) = libraries(cipher, mode);
        let layout = Layout::Epochs(Box::new(Epochs {
            sealing: Mutex::new(SealingEpochs::with(seals, cipher, encrypt)),
            opening: Mutex::new(OpeningEpochs::with(opens, cipher, decrypt)),
        }));
        Ok(Self::of(rules::key_id(key_id)?, cipher.into(), layout))
    }

    const fn of(id: KeyId, cipher: CipherAlgorithm, layout: Layout) -> Self {
        let (told, spent) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { id, cipher, layout, told, spent }
    }

    /// Returns the sealing key in use, after an epoch change that is due.
    #[inline]
    pub(crate) fn sealing(&self) -> Sealing<'_> {
        match &self.layout {
            Layout::Classic { sealing, .. } => Sealing::Classic(sealing),
            Layout::Epochs(epochs) => {
                let mut sealing = lock(&epochs.sealing);
                sealing.advance_if_due();
                Sealing::Epoch(Arc::clone(sealing.current()))
            }
        }
    }

    /// Locks the opening keys for the calling thread. `now_ms` is the device's clock.
    #[inline]
    pub(crate) fn hold(&self, now_ms: u64) -> Opening<'_> {
        match &self.layout {
            Layout::Classic { opening, window, opened, .. } => {
                let mut window = lock(window);
                if now_ms.saturating_sub(window.opened_ms) >= REPLAY_QUIET_MS {
                    window.replay.close_gaps();
                }
                Opening::Classic { key: opening, window, now_ms, blocks: 0, opened }
            }
            Layout::Epochs(epochs) => Opening::Epochs(lock(&epochs.opening), &epochs.sealing),
        }
    }

    /// Whether it has opened all that its cipher is good for. It goes on opening: the sender is at fault.
    pub(crate) fn is_opened_out(&self) -> bool {
        match &self.layout {
            Layout::Classic { cipher, opened, .. } => {
                usage::of_blocks(*cipher, opened.load(Relaxed)) == Usage::UsedUp
            }
            // Each epoch ends before.
            Layout::Epochs(_) => false,
        }
    }

    /// It is told that it is used up; true the first time.
    pub(crate) fn is_first_told(&self) -> bool {
        !self.told.swap(true, Relaxed)
    }

    /// It no longer seals.
    pub(crate) fn retire(&self) {
        self.spent.store(true, Relaxed);
    }

    fn state(&self) -> KeyState {
        let epoch = match &self.layout {
            Layout::Classic { .. } => None,
            Layout::Epochs(epochs) => Some(lock(&epochs.sealing).current().epoch()),
        };
        KeyState { key_id: self.id.get().into(), cipher: self.cipher, epoch }
    }
}

/// The libraries that seal, and those that open, with a key of a device in this mode. With possibly thousands of
/// peers, one library serves all sizes: the key's form for each library takes half a KiB or more.
fn libraries(cipher: DataCipher, mode: Mode) -> (Choice, Choice) {
    let (sealing, opening) = preferred_for_data(cipher);
    match mode {
        Mode::P2p => (sealing, opening),
        Mode::Mp => (sealing.of_full_packets(), opening.of_full_packets()),
    }
}

/// A thread that panicked left the value whole: windows are updated last, and keys are swapped whole.
#[inline]
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sealing half of a key.
pub(crate) enum Sealing<'a> {
    Classic(&'a SealingKey),
    Epoch(Arc<EpochSealingKey>),
}

impl Sealing<'_> {
    /// Bytes in front of the plaintext.
    #[inline]
    pub(crate) const fn front_len(&self) -> usize {
        match self {
            Self::Classic(_) => OVERHEAD_BYTES,
            Self::Epoch(_) => EPOCH_HEADER_BYTES,
        }
    }

    /// Bytes that a packet adds to its plaintext.
    #[inline]
    pub(crate) const fn overhead_len(&self) -> usize {
        match self {
            Self::Classic(_) => OVERHEAD_BYTES,
            Self::Epoch(_) => EPOCH_OVERHEAD_BYTES,
        }
    }

    /// Takes ids for this number of packets.
    ///
    /// # Errors
    /// [`SealError::Exhausted`]
    #[inline]
    pub(crate) fn reserve(
        &self,
        packets: u64,
        first_word: [u8; FIRST_WORD_BYTES],
    ) -> Result<Sealer<'_>, SealError> {
        Ok(match self {
            Self::Classic(key) => Sealer::Classic(key.reserve(packets, first_word)?),
            Self::Epoch(key) => Sealer::Epoch(key.reserve(packets, first_word)?),
        })
    }
}

/// Ids that are taken.
pub(crate) enum Sealer<'a> {
    Classic(Reserved<'a>),
    Epoch(EpochReserved<'a>),
}

impl Sealer<'_> {
    /// Seals a datagram whose plaintext stands behind the room in front; behind it is room for the rest of
    /// the overhead.
    ///
    /// # Errors
    /// [`SealError`]
    #[inline]
    pub(crate) fn seal(
        &mut self,
        datagram: &mut [u8],
        plaintext_len: usize,
    ) -> Result<usize, SealError> {
        match self {
            Self::Classic(sealer) => sealer.seal_in_place(datagram, plaintext_len),
            Self::Epoch(sealer) => sealer.seal_in_place(datagram, plaintext_len),
        }
    }
}

/// The opening half of a key, with its window.
pub(crate) enum Opening<'a> {
    Classic {
        key: &'a OpeningKey,
        window: MutexGuard<'a, Window>,
        now_ms: u64,
        /// Opened since it is held.
        blocks: u64,
        opened: &'a AtomicU64,
    },
    Epochs(MutexGuard<'a, OpeningEpochs>, &'a Mutex<SealingEpochs>),
}

impl Opening<'_> {
    /// Opens a packet in place. Returns where the plaintext stands.
    ///
    /// # Errors
    /// [`OpenError`]
    #[inline]
    pub(crate) fn open(&mut self, packet: &mut [u8]) -> Result<Range<usize>, OpenError> {
        match self {
            Self::Classic { key, window, blocks, .. } => {
                let plain = key.open(&mut window.replay, packet)?;
                *blocks += usage::blocks_of(plain.len());
                Ok(plain)
            }
            Self::Epochs(opening, sealing) => {
                let before = opening.epoch();
                let plain = opening.open(packet)?;
                if opening.epoch() != before {
                    lock(sealing).follow(opening.epoch());
                }
                Ok(plain)
            }
        }
    }
}

impl Drop for Opening<'_> {
    /// Counts once for all packets.
    fn drop(&mut self) {
        if let Self::Classic { window, now_ms, blocks, opened, .. } = self
            && *blocks > 0
        {
            window.opened_ms = *now_ms;
            opened.fetch_add(*blocks, Relaxed);
        }
    }
}

/// Both keys.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    primary: Option<Box<Key>>,
    secondary: Option<Box<Key>>,
}

impl Keys {
    /// Installs the key in this slot and erases the old one.
    pub(crate) fn install(&mut self, slot: Slot, key: Key) {
        *self.slot_mut(slot) = Some(Box::new(key));
    }

    /// Erases the key in this slot.
    pub(crate) fn delete(&mut self, slot: Slot) {
        *self.slot_mut(slot) = None;
    }

    /// Erases the keys that no longer seal.
    pub(crate) fn remove_spent(&mut self) {
        for slot in [&mut self.primary, &mut self.secondary] {
            slot.take_if(|key| key.spent.load(Relaxed));
        }
    }

    /// The primary key becomes the secondary one, and the reverse.
    pub(crate) const fn swap(&mut self) {
        std::mem::swap(&mut self.primary, &mut self.secondary);
    }

    /// Returns the state of the key in this slot.
    pub(crate) fn state(&self, slot: Slot) -> Option<KeyState> {
        let key = match slot {
            Slot::Primary => self.primary.as_ref(),
            Slot::Secondary => self.secondary.as_ref(),
        };
        key.map(|key| key.state())
    }

    /// Returns the key that seals.
    #[inline]
    pub(crate) fn sealing(&self) -> Option<&Key> {
        self.primary.as_deref()
    }

    /// Returns the key that opens packets with this key id.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_crypto::EpochSecret;
    use weft_openvpn::device::KeyDirection;

    use super::*;

    fn key(cipher: CipherAlgorithm) -> Key {
        let direction = KeyDirection { cipher_key: vec![7; 32], nonce_tail: [9; 8] };
        let (peer_id, slot, key_id) = (1, Slot::Primary, KeyId::new(0).unwrap());
        let (encrypt, decrypt) = (&direction, &direction);
        let new = NewKey { peer_id, slot, key_id, cipher, encrypt, decrypt };
        Key::new(&new, Mode::P2p).unwrap()
    }

    impl Key {
        /// As if it had opened `more` further blocks.
        pub(crate) fn count_opened(&self, more: u64) {
            match self.hold(0) {
                Opening::Classic { ref mut blocks, .. } => *blocks += more,
                Opening::Epochs(..) => panic!("a key of the classic layout"),
            }
        }
    }

    #[test]
    fn opened_blocks_use_up_a_key_of_aes() {
        let [aes, chacha] = [CipherAlgorithm::AesGcm, CipherAlgorithm::ChaCha20Poly1305].map(key);
        for key in [&aes, &chacha] {
            key.count_opened(usage::AES_GCM_BLOCKS_MAX - 1);
            assert!(!key.is_opened_out());
            key.count_opened(1);
        }
        assert!(aes.is_opened_out() && !chacha.is_opened_out());
        assert!(aes.is_first_told() && !aes.is_first_told());
    }

    #[test]
    fn a_spent_key_leaves_its_slot_and_the_other_stays() {
        let [one, other] = [(); 2].map(|()| key(CipherAlgorithm::AesGcm));
        let mut keys = Keys::default();
        keys.install(Slot::Primary, one);
        keys.install(Slot::Secondary, other);
        keys.remove_spent();
        keys.sealing().unwrap().retire();
        keys.remove_spent();
        assert!(keys.state(Slot::Primary).is_none() && keys.state(Slot::Secondary).is_some());
    }

    #[test]
    fn after_long_silence_nothing_older_is_taken() {
        let key = key(CipherAlgorithm::ChaCha20Poly1305);
        let sealing = key.sealing();
        let mut packets: Vec<Vec<u8>> = (0..4).map(|_| vec![5; OVERHEAD_BYTES + 40]).collect();
        for packet in &mut packets {
            sealing.reserve(1, [0x48, 0, 0, 1]).unwrap().seal(packet, 40).unwrap();
        }
        // Of the first four packets the third comes first, and so on.
        let open = |nth: usize, now_ms| {
            let mut packet = packets[nth].clone();
            key.hold(now_ms).open(&mut packet).map(|_| ())
        };
        assert_eq!(open(2, 1_000), Ok(()));
        assert_eq!(open(0, 1_000 + REPLAY_QUIET_MS - 1), Ok(()));
        let later = 1_000 + 2 * REPLAY_QUIET_MS;
        assert_eq!(open(1, later), Err(OpenError::Duplicate));
        assert_eq!(open(3, later), Ok(()));
    }

    fn epochs(encrypt: u8, decrypt: u8) -> Key {
        let secret = |byte| EpochSecret::from_bytes([byte; 32]);
        let (peer_id, slot, key_id, cipher) = (1, Slot::Primary, 3, DataCipher::Aes256Gcm);
        let (encrypt, decrypt) = (secret(encrypt), secret(decrypt));
        let new = EpochAttributes { peer_id, slot, key_id, cipher, encrypt, decrypt };
        Key::epochs(new, Mode::P2p).unwrap()
    }

    fn carry(from: &Key, to: &Key) {
        let sealing = from.sealing();
        let mut packet = vec![5; sealing.overhead_len() + 100];
        let sealed = sealing.reserve(1, [0x4b, 0, 0, 1]).unwrap().seal(&mut packet, 100);
        assert_eq!(sealed, Ok(packet.len()));
        let plain = to.hold(0).open(&mut packet).unwrap();
        assert_eq!(packet[plain], [5; 100]);
    }

    #[test]
    fn an_epoch_near_its_limit_makes_way_for_the_next() {
        let (here, there) = (epochs(1, 2), epochs(2, 1));
        carry(&here, &there);
        // Counters that are given away and never used, of the 2^48 that there are.
        here.sealing().reserve(15 << 44, [0x4b, 0, 0, 1]).unwrap();
        carry(&here, &there);
        assert_eq!((here.state().epoch, there.state().epoch), (Some(2), Some(2)));
        carry(&there, &here);
    }

    #[test]
    fn a_receiver_of_a_new_epoch_seals_in_it() {
        let (here, there) = (epochs(1, 2), epochs(2, 1));
        carry(&here, &there);
        let Layout::Epochs(of_here) = &here.layout else { panic!("it has epochs") };
        assert!(lock(&of_here.sealing).advance());
        assert_eq!((here.state().epoch, there.state().epoch), (Some(2), Some(1)));
        carry(&here, &there);
        assert_eq!(there.state().epoch, Some(2), "it follows");
        carry(&there, &here);
    }
}
