//! Security associations of format `esp`: one direction, one AEAD key, one sequence-number space.
//!
//! An ESP packet here is SPI 4, sequence low 4, IV 8, ciphertext, ICV 16 (`docs/design/esp.md`). The associated
//! data is SPI, sequence high, sequence low (RFC 4106 section 5 with extended sequence numbers; RFC 7634 section
//! 2.1 likewise). The nonce is the SA's salt, then the IV.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::aead::{AeadKey, ICV_LEN};
use crate::library::{Choice, preferred};
use crate::window::{Replay, ReplayWindow};
use crate::{Cipher, SaKey};

/// Bytes in front of the ciphertext: SPI, low half of the sequence number, IV.
pub const ESP_HEADER_LEN: usize = 16;

/// Bytes behind the ciphertext: the integrity check value.
pub const ESP_ICV_LEN: usize = ICV_LEN;

/// Why a packet was not sealed. Nothing was sealed and no sequence number was used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// Ours: the SA should have been replaced long before. Send nothing more on it.
    #[error("the SA has no sequence numbers left; install a new SA")]
    Exhausted,
    /// Ours: the datagram's buffer does not hold header, plaintext and ICV.
    #[error("no room in the datagram for the ESP header, the plaintext and the ICV")]
    NoRoom,
}

/// Why a packet was not opened. All are the network's or an attacker's doing; drop and count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Too short for an ESP header and an ICV.
    #[error("ESP packet is too short")]
    TooShort,
    /// As [`Replay::Duplicate`].
    #[error("a packet with this sequence number was accepted before")]
    Duplicate,
    /// Further behind the highest accepted sequence number than the window reaches.
    ///
    /// Only its low half travels, so such a number reads like one far ahead (RFC 4303 appendix A2) and fails to
    /// authenticate. A forged packet that bears it counts here too.
    #[error("the sequence number is too far behind")]
    TooOld,
    /// Not sealed by the holder of the SA's key, or changed on the way; or of another SA.
    #[error("packet authentication failed")]
    Forged,
}

impl From<Replay> for OpenError {
    fn from(replay: Replay) -> Self {
        match replay {
            Replay::Duplicate => Self::Duplicate,
            Replay::TooOld => Self::TooOld,
        }
    }
}

/// An outbound SA. Several threads may seal on it, each with sequence numbers that it has reserved
/// ([`SealingSa::reserve`]).
///
/// Its sequence number begins at 1 and never repeats; the IV is the sequence number XORed with a
/// salt, hence unique too.
pub struct SealingSa {
    key: AeadKey,
    spi: u32,
    /// The last sequence number given away.
    sequence: AtomicU64,
    iv_salt: u64,
}

impl SealingSa {
    /// A fresh SA that seals with the preferred libraries. A key must never be given to two of them.
    ///
    /// `spi` is the receiver's choice; `iv_salt` is any random value.
    pub fn new(cipher: Cipher, spi: u32, key: &SaKey, iv_salt: u64) -> Self {
        Self::with(preferred(cipher).0, cipher, spi, key, iv_salt)
    }

    /// As [`Self::new`], with libraries of the caller's choice.
    pub fn with(choice: Choice, cipher: Cipher, spi: u32, key: &SaKey, iv_salt: u64) -> Self {
        let key = AeadKey::new(cipher, key, choice);
        Self { key, spi, sequence: AtomicU64::new(0), iv_salt }
    }

    /// The SPI in its packets.
    pub const fn spi(&self) -> u32 {
        self.spi
    }

    /// How many sequence numbers it has given away: an upper bound of the packets sealed.
    pub fn packets(&self) -> u64 {
        // One number by itself: nothing else is read in its light.
        self.sequence.load(Relaxed)
    }

    /// Takes the next `packets` sequence numbers, for as many packets. No other caller gets them. Numbers
    /// that stay unused are skipped.
    ///
    /// # Errors
    /// [`SealError::Exhausted`]: fewer sequence numbers are left.
    #[inline]
    pub fn reserve(&self, packets: u64) -> Result<Reserved<'_>, SealError> {
        let last = self.sequence.fetch_update(Relaxed, Relaxed, |last| last.checked_add(packets));
        // The number itself is all that is handed over, so no order with other memory is needed.
        let last = last.map_err(|_| SealError::Exhausted)?;
        Ok(Reserved { sa: self, last, left: packets })
    }
}

impl fmt::Debug for SealingSa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealingSa")
            .field("spi", &self.spi)
            .field("packets", &self.packets())
            .finish_non_exhaustive()
    }
}

/// Consecutive sequence numbers of an SA, each good for one packet.
#[derive(Debug)]
pub struct Reserved<'a> {
    sa: &'a SealingSa,
    /// The last one used, or the one before the first.
    last: u64,
    left: u64,
}

impl Reserved<'_> {
    /// Seals a datagram whose whole plaintext already stands behind the room for the ESP header.
    ///
    /// On entry `datagram` is [`ESP_HEADER_LEN`] bytes of room, `plaintext_len` bytes of plaintext
    /// (ESP trailer included), [`ESP_ICV_LEN`] bytes of room, anything. Returns the packet's length.
    ///
    /// # Errors
    /// [`SealError`]; then the plaintext is as it was.
    #[inline]
    pub fn seal_in_place(
        &mut self,
        datagram: &mut [u8],
        plaintext_len: usize,
    ) -> Result<usize, SealError> {
        let total = plaintext_len
            .checked_add(ESP_HEADER_LEN + ESP_ICV_LEN)
            .filter(|total| *total <= datagram.len())
            .ok_or(SealError::NoRoom)?;
        self.left = self.left.checked_sub(1).ok_or(SealError::Exhausted)?;
        // Used up whatever comes of it, so that no failure can make a nonce repeat.
        self.last += 1;
        let (sa, sequence) = (self.sa, self.last);
        let iv = (sequence ^ sa.iv_salt).to_be_bytes();
        let (header, sealed) = datagram[..total].split_at_mut(ESP_HEADER_LEN);
        header[..4].copy_from_slice(&sa.spi.to_be_bytes());
        header[4..8].copy_from_slice(&(sequence as u32).to_be_bytes());
        header[8..].copy_from_slice(&iv);
        sa.key
            .seal(iv, &associated_data(sa.spi, sequence), sealed)
            .map_err(|_| SealError::NoRoom)?;
        Ok(total)
    }
}

/// The key of an inbound SA, without its replay window. Several threads may open packets with it, if
/// one alone tells the window at a time.
pub struct OpeningKey {
    key: AeadKey,
    spi: u32,
}

impl OpeningKey {
    /// A key that opens with the preferred libraries. `spi` is this host's choice.
    pub fn new(cipher: Cipher, spi: u32, key: &SaKey) -> Self {
        Self::with(preferred(cipher).1, cipher, spi, key)
    }

    /// As [`Self::new`], with libraries of the caller's choice.
    pub fn with(choice: Choice, cipher: Cipher, spi: u32, key: &SaKey) -> Self {
        Self { key: AeadKey::new(cipher, key, choice), spi }
    }

    /// The SPI of the packets it opens.
    pub const fn spi(&self) -> u32 {
        self.spi
    }

    /// Opens an ESP packet, from the SPI to the end of the ICV, in place.
    ///
    /// Returns where in `packet` the plaintext stands, ESP trailer included. The window is asked
    /// before the packet is opened and told only afterwards, so a forged packet moves nothing.
    ///
    /// # Errors
    /// [`OpenError`]; after [`OpenError::Forged`] the packet's bytes are of no use.
    #[inline]
    pub fn open(
        &self,
        window: &mut ReplayWindow,
        packet: &mut [u8],
    ) -> Result<Range<usize>, OpenError> {
        let (sequence, plain) = self.open_pipelined(window, packet)?;
        window.mark(sequence);
        Ok(plain)
    }

    /// As [`Self::open`], but tells no window: `window` may be an earlier state of the SA's. The
    /// packet counts as received only once [`ReplayWindow::accept`] has taken the sequence number
    /// that is returned with its plaintext's place. That number is the packet's own, since the ICV
    /// covers its high half too, however old the window is from which it was inferred.
    ///
    /// # Errors
    /// [`OpenError`]; after [`OpenError::Forged`] the packet's bytes are of no use.
    #[inline]
    pub fn open_pipelined(
        &self,
        window: &ReplayWindow,
        packet: &mut [u8],
    ) -> Result<(u64, Range<usize>), OpenError> {
        let end = packet.len().checked_sub(ESP_ICV_LEN).ok_or(OpenError::TooShort)?;
        let (header, sealed) =
            packet.split_first_chunk_mut::<ESP_HEADER_LEN>().ok_or(OpenError::TooShort)?;
        let (ciphertext, icv) =
            sealed.split_last_chunk_mut::<ESP_ICV_LEN>().ok_or(OpenError::TooShort)?;
        let [s0, s1, s2, s3, n0, n1, n2, n3, iv @ ..] = *header;
        if u32::from_be_bytes([s0, s1, s2, s3]) != self.spi {
            return Err(OpenError::Forged);
        }
        let sequence = window.infer(u32::from_be_bytes([n0, n1, n2, n3]));
        window.check(sequence)?;
        self.key
            .open(iv, &associated_data(self.spi, sequence), ciphertext, icv)
            .map_err(|_| late_or_forged(window.highest(), sequence))?;
        Ok((sequence, ESP_HEADER_LEN..end))
    }
}

impl fmt::Debug for OpeningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpeningKey").field("spi", &self.spi).finish_non_exhaustive()
    }
}

/// An inbound SA: a key with its replay window.
pub struct OpeningSa {
    key: OpeningKey,
    window: ReplayWindow,
}

impl OpeningSa {
    /// A fresh SA that opens with the preferred libraries, nothing received yet. `spi` is this host's
    /// choice.
    pub fn new(cipher: Cipher, spi: u32, key: &SaKey) -> Self {
        Self { key: OpeningKey::new(cipher, spi, key), window: ReplayWindow::new() }
    }

    /// As [`Self::new`], with libraries of the caller's choice.
    pub fn with(choice: Choice, cipher: Cipher, spi: u32, key: &SaKey) -> Self {
        Self { key: OpeningKey::with(choice, cipher, spi, key), window: ReplayWindow::new() }
    }

    /// The SPI of the packets it opens.
    pub const fn spi(&self) -> u32 {
        self.key.spi
    }

    /// The highest sequence number opened; 0 before the first.
    pub const fn highest(&self) -> u64 {
        self.window.highest()
    }

    /// As [`OpeningKey::open`], with its window.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn open(&mut self, packet: &mut [u8]) -> Result<Range<usize>, OpenError> {
        self.key.open(&mut self.window, packet)
    }
}

impl fmt::Debug for OpeningSa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpeningSa")
            .field("spi", &self.spi())
            .field("highest", &self.highest())
            .finish_non_exhaustive()
    }
}

/// Names a packet that did not authenticate. It is late if its low half fits a number that the peer has used and
/// that is nearer than the inferred one.
#[cold]
const fn late_or_forged(highest: u64, inferred: u64) -> OpenError {
    const SPAN: u64 = 1 << 32;
    let ahead = inferred.saturating_sub(highest);
    if inferred > SPAN && ahead > SPAN / 2 { OpenError::TooOld } else { OpenError::Forged }
}

#[inline]
fn associated_data(spi: u32, sequence: u64) -> [u8; 12] {
    let mut aad = [0; 12];
    aad[..4].copy_from_slice(&spi.to_be_bytes());
    aad[4..].copy_from_slice(&sequence.to_be_bytes());
    aad
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::DataCipher;
    use crate::library::{Library, SizeClass, preferred_for_data};
    use crate::testing::{hex, hex_array};

    const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
    const SPI: u32 = 0x1000_0001;

    fn key(byte: u8) -> SaKey {
        SaKey::from_bytes([byte; 36])
    }

    fn pair(cipher: Cipher) -> (SealingSa, OpeningSa) {
        (SealingSa::new(cipher, SPI, &key(7), 0x5a17), OpeningSa::new(cipher, SPI, &key(7)))
    }

    /// A pair that has used all sequence numbers up to `sequence`.
    fn pair_after(cipher: Cipher, sequence: u64) -> (SealingSa, OpeningSa) {
        let (mut sealing, mut opening) = pair(cipher);
        sealing.sequence = sequence.into();
        opening.window = ReplayWindow::at(sequence);
        (sealing, opening)
    }

    fn packet(sa: &SealingSa, plaintext: &[u8]) -> Vec<u8> {
        let mut datagram = vec![0; ESP_HEADER_LEN + plaintext.len() + ESP_ICV_LEN];
        datagram[ESP_HEADER_LEN..][..plaintext.len()].copy_from_slice(plaintext);
        let sealed = sa.reserve(1).unwrap().seal_in_place(&mut datagram, plaintext.len());
        assert_eq!(sealed, Ok(datagram.len()));
        datagram
    }

    fn open(sa: &mut OpeningSa, packet: &[u8]) -> Result<Vec<u8>, OpenError> {
        let mut packet = packet.to_vec();
        let range = sa.open(&mut packet)?;
        Ok(packet[range].to_vec())
    }

    /// draft-mcgrew-gcm-test-01 section 4: all cases of RFC 4106 with a 256-bit key and extended
    /// sequence numbers. Key and salt, sequence number, plaintext, whole packet.
    const ESN_CASES: [(&str, u64, &str, &str); 3] = [
        (
            "abbccddef00112233445566778899aababbccddef00112233445566778899aab 73616c74",
            0x156f_3126_dd0d_b99b,
            "45080028732c00004006e9f90a0106120a01038f06b88023dd6bafbecb712602
             50101f646d540001",
            "17405e67dd0db99b616e640169766563
             f2d69ecdbd5a0d5b8d5ef38bad4da58d1f278fde98ef67549d524a3018d9a57f
             f4d3a31ce673119e451626c2415771e3b7eebca614c89b35",
        ),
        (
            "abbccddef00112233445566778899aababbccddef00112233445566778899aab 73616c74",
            0x156f_3126_dd0d_b99b,
            "636973636f0172756c657301746865016e6574776501646566696e6501746865
             746563686e6f6c6f67696573017468617477696c6c01646566696e65746f6d6f
             72726f7701020201",
            "17405e67dd0db99b616e640169766563
             d4b7ed86a1777f2ea13d6973d324c69e7b43f826fb56831226508bebd2dceb18
             d0a6df10e5487df074113e14c641024e3e6773d91a62ee429b043a10e3efe6b0
             12a49363412364f8c0cac587f249e56b11e24f30e44ccc76",
        ),
        (
            "6c6567616c697a656d6172696a75616e61616e64646f69746265666f72656961 7475726e",
            u64::MAX,
            "45000030da3a00008001df3bc0a80005c0a800010800c6cd0200070061626364
             65666768696a6b6c6d6e6f707172737401020201",
            "796b6963ffffffff333021696765746d
             f97ab2aa356d8edce17644ac8c78e25dd24dedbb29ebf1b64a274b39b49c3a86
             4cd3d78ca4ae68a32b42458fb57dbe821dcc63b9d0937ba2945f669368661a32
             9fb4c053",
        ),
    ];

    #[test]
    fn rfc_4106_packets_with_extended_sequence_numbers() {
        for (sa_key, sequence, plaintext, expected) in ESN_CASES {
            let (sa_key, expected) = (SaKey::from_bytes(hex_array(sa_key)), hex(expected));
            let plaintext = hex(plaintext);
            let spi = u32::from_be_bytes(expected[..4].try_into().unwrap());
            let iv = u64::from_be_bytes(expected[8..16].try_into().unwrap());
            let mut sealing = SealingSa::new(Cipher::Aes256Gcm, spi, &sa_key, iv ^ sequence);
            sealing.sequence = (sequence - 1).into();
            assert_eq!(packet(&sealing, &plaintext), expected);
            let mut opening = OpeningSa::new(Cipher::Aes256Gcm, spi, &sa_key);
            opening.window = ReplayWindow::at(sequence - 1);
            assert_eq!(open(&mut opening, &expected), Ok(plaintext));
            assert_eq!(opening.highest(), sequence);
        }
    }

    #[test]
    fn the_first_packet_has_sequence_number_one_and_a_salted_iv() {
        for cipher in CIPHERS {
            let (sealing, mut opening) = pair(cipher);
            assert_eq!((sealing.packets(), opening.highest()), (0, 0));
            let first = packet(&sealing, b"frame");
            assert_eq!(first[..4], SPI.to_be_bytes());
            assert_eq!(first[4..8], 1_u32.to_be_bytes());
            assert_eq!(first[8..16], (1_u64 ^ 0x5a17).to_be_bytes());
            assert_eq!(open(&mut opening, &first).unwrap(), b"frame");
            assert_eq!((sealing.packets(), opening.highest()), (1, 1));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Nothing behind the packet is touched.
        #[test]
        fn opens_what_was_sealed(
            plaintext in prop::collection::vec(any::<u8>(), 0..6000),
            slack in 0_usize..40,
        ) {
            for cipher in CIPHERS {
                let (sealing, mut opening) = pair(cipher);
                let whole = packet(&pair(cipher).0, &plaintext);
                let total = ESP_HEADER_LEN + plaintext.len() + ESP_ICV_LEN;
                let mut datagram = vec![0xee; total + slack];
                datagram[ESP_HEADER_LEN..][..plaintext.len()].copy_from_slice(&plaintext);
                let mut reserved = sealing.reserve(1).unwrap();
                let sealed = reserved.seal_in_place(&mut datagram, plaintext.len());
                prop_assert_eq!(sealed, Ok(total));
                prop_assert_eq!(&datagram[..total], &whole[..]);
                prop_assert!(datagram[total..].iter().all(|byte| *byte == 0xee));
                prop_assert_eq!(open(&mut opening, &datagram[..total]), Ok(plaintext.clone()));
            }
        }

        #[test]
        fn never_panics_on_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = bytes;
            for cipher in CIPHERS {
                let (_, mut opening) = pair(cipher);
                prop_assert!(opening.open(&mut bytes).is_err());
                if let Some(spi) = bytes.first_chunk_mut() {
                    *spi = SPI.to_be_bytes();
                }
                prop_assert!(opening.open(&mut bytes).is_err());
            }
        }
    }

    #[test]
    fn refuses_a_packet_with_any_bit_changed_or_any_byte_missing() {
        for cipher in CIPHERS {
            let (sealing, mut opening) = pair(cipher);
            let good = packet(&sealing, &[0x33; 48]);
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                // Number one becomes zero, which is never accepted, by the change of bit 56.
                let expected = if bit == 56 { OpenError::Duplicate } else { OpenError::Forged };
                assert_eq!(open(&mut opening, &bad), Err(expected), "bit {bit}");
            }
            for len in 0..good.len() {
                let short = len < ESP_HEADER_LEN + ESP_ICV_LEN;
                let expected = if short { OpenError::TooShort } else { OpenError::Forged };
                assert_eq!(open(&mut opening, &good[..len]), Err(expected), "length {len}");
            }
            assert_eq!(opening.highest(), 0);
            assert!(open(&mut opening, &good).is_ok());
        }
    }

    #[test]
    fn a_forged_packet_far_ahead_does_not_move_the_window() {
        let (sealing, mut opening) = pair(Cipher::Aes256Gcm);
        let packets: Vec<_> = (0..3).map(|_| packet(&sealing, b"frame")).collect();
        assert!(open(&mut opening, &packets[1]).is_ok());
        let mut forged = packets[2].clone();
        forged[4..8].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(open(&mut opening, &forged), Err(OpenError::Forged));
        assert_eq!(opening.highest(), 2);
        assert!(open(&mut opening, &packets[0]).is_ok(), "still in the window");
        assert!(open(&mut opening, &packets[2]).is_ok(), "its number was not used up");
    }

    #[test]
    fn the_window_is_asked_before_anything_is_opened() {
        let (sealing, mut opening) = pair(Cipher::Aes256Gcm);
        let first = packet(&sealing, b"frame");
        assert!(open(&mut opening, &first).is_ok());
        // Not even authentic, and yet the verdict is the window's, and the bytes are untouched.
        let mut repeated = first.clone();
        repeated[20] ^= 1;
        let before = repeated.clone();
        assert_eq!(opening.open(&mut repeated), Err(OpenError::Duplicate));
        assert_eq!(repeated, before);
    }

    #[test]
    fn repeated_and_late_packets_are_told_apart() {
        for cipher in CIPHERS {
            let (sealing, mut opening) = pair(cipher);
            let count = crate::WINDOW_PACKETS as usize + 2;
            let packets: Vec<_> = (0..count).map(|_| packet(&sealing, b"frame")).collect();
            assert!(open(&mut opening, &packets[count - 1]).is_ok());
            assert_eq!(open(&mut opening, &packets[count - 1]), Err(OpenError::Duplicate));
            assert_eq!(open(&mut opening, &packets[1]), Err(OpenError::TooOld));
            assert!(open(&mut opening, &packets[2]).is_ok());
            assert_eq!(opening.highest(), count as u64);
        }
    }

    #[test]
    fn late_packets_are_told_from_forged_ones_in_any_span() {
        for highest in [100_000, (1 << 32) - 1, (1 << 32) + 5, (5 << 32) + 100_000] {
            let (mut sealing, mut opening) = pair_after(Cipher::Aes256Gcm, highest);
            sealing.sequence = (highest - 20_000).into();
            let late = packet(&sealing, b"frame");
            assert_eq!(open(&mut opening, &late), Err(OpenError::TooOld), "{highest}");
            for distance in [1, 20_000] {
                sealing.sequence = (highest + distance).into();
                let mut forged = packet(&sealing, b"frame");
                forged[16] ^= 1;
                assert_eq!(open(&mut opening, &forged), Err(OpenError::Forged), "{highest}");
            }
            assert_eq!(opening.highest(), highest);
        }
    }

    #[test]
    fn sequence_numbers_pass_two_to_the_32_unnoticed() {
        for cipher in CIPHERS {
            let (sealing, mut opening) = pair_after(cipher, (1 << 32) - 3);
            let packets: Vec<_> = (0..6).map(|_| packet(&sealing, b"frame")).collect();
            for index in [0, 3, 1, 5, 4, 2] {
                assert!(open(&mut opening, &packets[index]).is_ok(), "packet {index}");
            }
            assert_eq!(opening.highest(), (1 << 32) + 3);
            assert_eq!(open(&mut opening, &packets[0]), Err(OpenError::Duplicate));
        }
    }

    #[test]
    fn used_up_sequence_numbers_end_the_sa() {
        let (sealing, mut opening) = pair_after(Cipher::Aes256Gcm, u64::MAX - 1);
        assert!(open(&mut opening, &packet(&sealing, b"last")).is_ok());
        for _ in 0..2 {
            assert_eq!(sealing.reserve(1).err(), Some(SealError::Exhausted));
        }
        assert_eq!(sealing.packets(), u64::MAX);
    }

    #[test]
    fn a_datagram_without_room_uses_no_sequence_number() {
        for cipher in CIPHERS {
            let (sealing, mut opening) = pair(cipher);
            let mut reserved = sealing.reserve(1).unwrap();
            let fitting = ESP_HEADER_LEN + 3_100 + ESP_ICV_LEN;
            for len in [0, 15, 16, 100, 132, fitting - 17, fitting - 1] {
                let result = reserved.seal_in_place(&mut vec![0; len], 3_100);
                assert_eq!(result, Err(SealError::NoRoom), "{len}");
            }
            for plaintext_len in [usize::MAX, usize::MAX - ESP_HEADER_LEN, 33] {
                let result = reserved.seal_in_place(&mut [0; 64], plaintext_len);
                assert_eq!(result, Err(SealError::NoRoom), "{plaintext_len}");
            }
            let mut datagram = vec![0; fitting];
            assert_eq!(reserved.seal_in_place(&mut datagram, 3_100), Ok(fitting));
            assert!(open(&mut opening, &datagram).is_ok());
            assert_eq!(opening.highest(), 1);
            // One was reserved, one is used.
            let more = reserved.seal_in_place(&mut datagram, 3_100);
            assert_eq!(more, Err(SealError::Exhausted));
        }
    }

    #[test]
    fn threads_that_seal_on_one_sa_never_share_a_sequence_number() {
        const THREADS: u64 = 4;
        const PACKETS: u64 = 2_000;
        let (sealing, mut opening) = pair(Cipher::Aes256Gcm);
        let seal = || {
            let mut packets = Vec::new();
            for block in 1..PACKETS / 10 {
                let mut reserved = sealing.reserve(block % 7).unwrap();
                for _ in 0..block % 7 {
                    let mut datagram = [0; ESP_HEADER_LEN + 4 + ESP_ICV_LEN];
                    reserved.seal_in_place(&mut datagram, 4).unwrap();
                    packets.push(datagram);
                }
            }
            packets
        };
        let mut all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(seal)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        all.sort_by_key(|packet| packet[4..8].to_vec());
        assert_eq!(all.len() as u64, sealing.packets());
        for packet in &mut all {
            assert!(opening.open(packet).is_ok(), "a sequence number was used twice");
        }
        assert_eq!(opening.highest(), all.len() as u64);
    }

    #[test]
    fn another_key_salt_cipher_or_spi_opens_nothing() {
        let (sealing, _) = pair(Cipher::Aes256Gcm);
        let good = packet(&sealing, b"frame");
        let mut salt = *key(7).expose();
        salt[35] ^= 1;
        for mut wrong in [
            OpeningSa::new(Cipher::Aes256Gcm, SPI, &key(8)),
            OpeningSa::new(Cipher::Aes256Gcm, SPI, &SaKey::from_bytes(salt)),
            OpeningSa::new(Cipher::ChaCha20Poly1305, SPI, &key(7)),
            OpeningSa::new(Cipher::Aes256Gcm, SPI + 1, &key(7)),
        ] {
            assert_eq!(open(&mut wrong, &good), Err(OpenError::Forged));
        }
        // Nor does it help to write the receiver's SPI into the packet: it is authenticated.
        let mut renamed = good;
        renamed[..4].copy_from_slice(&(SPI + 1).to_be_bytes());
        let mut opening = OpeningSa::new(Cipher::Aes256Gcm, SPI + 1, &key(7));
        assert_eq!(open(&mut opening, &renamed), Err(OpenError::Forged));
    }

    /// Each library seals the same packets and opens those of the other, whatever the size, and a
    /// mixed choice changes library from packet to packet.
    #[test]
    fn libraries_are_of_one_opinion() {
        let mixed = Choice::default().with(SizeClass::Medium, Library::Ring);
        let choices = [Choice::all(Library::AwsLc), Choice::all(Library::Ring), mixed];
        for cipher in CIPHERS {
            let sealing =
                choices.map(|choice| SealingSa::with(choice, cipher, SPI, &key(7), 0x5a17));
            let mut opening = choices.map(|choice| OpeningSa::with(choice, cipher, SPI, &key(7)));
            for len in [0, 1, 64, 511, 512, 1_420, 2_100, 4_095, 4_096, 8_920] {
                let plaintext: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
                let packets = sealing.each_ref().map(|sa| packet(sa, &plaintext));
                assert!(packets.iter().all(|packet| *packet == packets[0]), "{cipher}, {len}");
                let mut forged = packets[0].clone();
                forged[len + 17] ^= 1;
                for sa in &mut opening {
                    assert_eq!(open(sa, &forged), Err(OpenError::Forged), "{cipher}, {len}");
                    assert_eq!(open(sa, &packets[0]).as_ref(), Ok(&plaintext), "{cipher}, {len}");
                }
            }
        }
    }

    #[test]
    fn preferred_libraries_are_those_of_new_sas() {
        let choice = Choice::all(Library::Ring);
        let before = preferred(Cipher::ChaCha20Poly1305);
        crate::prefer(Cipher::ChaCha20Poly1305, choice, Choice::default());
        assert_eq!(preferred(Cipher::ChaCha20Poly1305), (choice, Choice::default()));
        let (sealing, mut opening) = pair(Cipher::ChaCha20Poly1305);
        assert!(sealing.key.is_rings(100) && !opening.key.key.is_rings(100));
        assert!(open(&mut opening, &packet(&sealing, b"frame")).is_ok());
        assert_eq!(preferred(Cipher::Aes256Gcm), (Choice::default(), Choice::default()));
        crate::prefer(Cipher::ChaCha20Poly1305, before.0, before.1);
        crate::prefer(Cipher::Aes256Gcm, Choice::default(), choice);
        let [aes_128, aes_192, aes_256, chacha] = DataCipher::ALL.map(preferred_for_data);
        assert_eq!((aes_128, aes_256), (aes_256, (Choice::default(), choice)));
        assert_eq!((aes_192, chacha), (Default::default(), before));
        crate::prefer(Cipher::Aes256Gcm, Choice::default(), Choice::default());
    }

    #[test]
    fn debug_output_holds_no_key() {
        let (sealing, opening) = pair(Cipher::Aes256Gcm);
        assert_eq!(format!("{sealing:?}"), "SealingSa { spi: 268435457, packets: 0, .. }");
        assert_eq!(format!("{opening:?}"), "OpeningSa { spi: 268435457, highest: 0, .. }");
    }
}
