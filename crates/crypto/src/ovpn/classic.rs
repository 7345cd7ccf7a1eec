//! The classic layout: 32-bit packet ids, the tag in front of the ciphertext.

use std::fmt;
use std::ops::Range;

use zeroize::Zeroizing;

use super::opening::LimitedKey;
use super::sealing::{Ids, Spent, packet_of};
use super::{
    FIRST_WORD_BYTES, HEADER_BYTES, KeyLengthError, NONCE_TAIL_BYTES, OVERHEAD_BYTES, OpenError,
    SealError, TAG_BYTES, Usage, usage,
};
use crate::aead::{ExpandedKey, NONCE_LEN};
use crate::library::{Choice, preferred_for_data};
use crate::window::ReplayWindow;
use crate::{Cipher, DataCipher, SaKey};

/// Why an SA's key is one of its cipher's.
const SA_KEY_FITS: &str = "the ciphers of SAs take 32 bytes, the length of an SA's key";

/// A key that seals. Several threads may seal with it, each with packet ids that it has reserved
/// ([`SealingKey::reserve`]).
///
/// Its packet ids begin at 1 and never repeat; after the last of them it seals nothing more.
pub struct SealingKey {
    key: ExpandedKey,
    cipher: DataCipher,
    nonce_tail: NonceTail,
    spent: Spent,
}

impl SealingKey {
    /// A fresh key that seals with the preferred libraries. The same bytes must never be given to two.
    ///
    /// # Errors
    /// `cipher_key` is not as long as the cipher's.
    pub fn new(
        cipher: DataCipher,
        cipher_key: &[u8],
        nonce_tail: [u8; NONCE_TAIL_BYTES],
    ) -> Result<Self, KeyLengthError> {
        Self::with(preferred_for_data(cipher).0, cipher, cipher_key, nonce_tail)
    }

    /// The key of an SA of format `ovpn`.
    pub fn of_sa(cipher: Cipher, key: &SaKey) -> Self {
        Self::new(cipher.into(), key.cipher_key(), *key.nonce_tail()).expect(SA_KEY_FITS)
    }

    /// As [`Self::new`], with libraries of the caller's choice. AES-192-GCM is always AWS-LC's.
    ///
    /// # Errors
    /// As there.
    pub fn with(
        choice: Choice,
        cipher: DataCipher,
        cipher_key: &[u8],
        nonce_tail: [u8; NONCE_TAIL_BYTES],
    ) -> Result<Self, KeyLengthError> {
        Ok(Self {
            key: expanded(choice, cipher, cipher_key)?,
            cipher,
            nonce_tail: Zeroizing::new(nonce_tail),
            spent: Spent::new(cipher, usage::PACKET_ID_MAX),
        })
    }

    /// How many packet ids it has given away: an upper bound of the packets sealed.
    pub fn packets(&self) -> u64 {
        self.spent.last()
    }

    /// Blocks sealed ([`usage::blocks_of`]), but for those of [`Reserved`] still in use.
    pub fn blocks(&self) -> u64 {
        self.spent.blocks()
    }

    /// How far it is used up, by packet ids and by blocks.
    pub fn usage(&self) -> Usage {
        usage::of_packet_id(self.packets()).max(usage::of_blocks(self.cipher, self.blocks()))
    }

    /// Takes the next `packets` packet ids, for as many packets that begin with `first_word`. No other caller
    /// gets them. Ids that stay unused are skipped.
    ///
    /// # Errors
    /// [`SealError::Exhausted`]: fewer ids are left, or the blocks are used up.
    #[inline]
    pub fn reserve(
        &self,
        packets: u64,
        first_word: [u8; FIRST_WORD_BYTES],
    ) -> Result<Reserved<'_>, SealError> {
        Ok(Reserved { key: self, ids: self.spent.reserve(packets)?, first_word })
    }
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealingKey")
            .field("cipher", &self.cipher)
            .field("packets", &self.packets())
            .finish_non_exhaustive()
    }
}

/// Consecutive packet ids of a key, each good for one packet.
#[derive(Debug)]
pub struct Reserved<'a> {
    key: &'a SealingKey,
    ids: Ids<'a>,
    first_word: [u8; FIRST_WORD_BYTES],
}

impl Reserved<'_> {
    /// Seals a datagram whose whole plaintext already stands behind the room for header and tag.
    ///
    /// On entry `datagram` is [`OVERHEAD_BYTES`] bytes of room, `plaintext_len` bytes of plaintext,
    /// anything. Returns the packet's length.
    ///
    /// # Errors
    /// [`SealError`]; then the plaintext is as it was.
    #[inline]
    pub fn seal_in_place(
        &mut self,
        datagram: &mut [u8],
        plaintext_len: usize,
    ) -> Result<usize, SealError> {
        let packet = packet_of(OVERHEAD_BYTES, plaintext_len, datagram)?;
        let total = packet.len();
        let (header, rest) =
            packet.split_first_chunk_mut::<HEADER_BYTES>().ok_or(SealError::NoRoom)?;
        let (tag, plaintext) =
            rest.split_first_chunk_mut::<TAG_BYTES>().ok_or(SealError::NoRoom)?;
        // The ids end at the largest of 32 bits.
        let packet_id = (self.ids.take(plaintext.len())? as u32).to_be_bytes();
        header[..FIRST_WORD_BYTES].copy_from_slice(&self.first_word);
        header[FIRST_WORD_BYTES..].copy_from_slice(&packet_id);
        let nonce = nonce(packet_id, &self.key.nonce_tail);
        self.key.key.seal(nonce, header, plaintext, tag).map_err(|_| SealError::NoRoom)?;
        Ok(total)
    }
}

/// A key that opens, without its replay window. Several threads may open packets with it, if one alone
/// tells the window at a time.
pub struct OpeningKey {
    key: LimitedKey,
    cipher: DataCipher,
    nonce_tail: NonceTail,
}

impl OpeningKey {
    /// A key that opens with the preferred libraries.
    ///
    /// # Errors
    /// `cipher_key` is not as long as the cipher's.
    pub fn new(
        cipher: DataCipher,
        cipher_key: &[u8],
        nonce_tail: [u8; NONCE_TAIL_BYTES],
    ) -> Result<Self, KeyLengthError> {
        Self::with(preferred_for_data(cipher).1, cipher, cipher_key, nonce_tail)
    }

    /// The key of an SA of format `ovpn`.
    pub fn of_sa(cipher: Cipher, key: &SaKey) -> Self {
        Self::new(cipher.into(), key.cipher_key(), *key.nonce_tail()).expect(SA_KEY_FITS)
    }

    /// As [`Self::new`], with libraries of the caller's choice. AES-192-GCM is always AWS-LC's.
    ///
    /// # Errors
    /// As there.
    pub fn with(
        choice: Choice,
        cipher: DataCipher,
        cipher_key: &[u8],
        nonce_tail: [u8; NONCE_TAIL_BYTES],
    ) -> Result<Self, KeyLengthError> {
        let key = LimitedKey::new(expanded(choice, cipher, cipher_key)?);
        Ok(Self { key, cipher, nonce_tail: Zeroizing::new(nonce_tail) })
    }

    /// How far it is used up, by the packets that failed to open. The caller counts the opened blocks
    /// ([`usage::of_blocks`]), since it counts packets anyway.
    pub fn usage(&self) -> Usage {
        self.key.usage()
    }

    /// Opens a packet, from the first word to the end of the ciphertext, in place.
    ///
    /// Returns where in `packet` the plaintext stands. Each key needs its own window. It is asked before the
    /// packet is opened and told only afterwards, so a forged packet moves nothing.
    ///
    /// # Errors
    /// [`OpenError`]; after [`OpenError::Forged`] the packet's bytes are of no use.
    #[inline]
    pub fn open(
        &self,
        window: &mut ReplayWindow,
        packet: &mut [u8],
    ) -> Result<Range<usize>, OpenError> {
        let (packet_id, plain) = self.open_pipelined(window, packet)?;
        window.mark(packet_id);
        Ok(plain)
    }

    /// As [`Self::open`], but tells no window: `window` may be an earlier state of the key's. The packet
    /// counts as received only once [`ReplayWindow::accept`] has taken the packet id that is returned
    /// with its plaintext's place.
    ///
    /// # Errors
    /// [`OpenError`]; after [`OpenError::Forged`] the packet's bytes are of no use.
    #[inline]
    pub fn open_pipelined(
        &self,
        window: &ReplayWindow,
        packet: &mut [u8],
    ) -> Result<(u64, Range<usize>), OpenError> {
        let end = packet.len();
        let (header, rest) =
            packet.split_first_chunk_mut::<HEADER_BYTES>().ok_or(OpenError::TooShort)?;
        let (tag, ciphertext) =
            rest.split_first_chunk_mut::<TAG_BYTES>().ok_or(OpenError::TooShort)?;
        let [_, _, _, _, packet_id @ ..] = *header;
        let number = u64::from(u32::from_be_bytes(packet_id));
        if number == 0 {
            return Err(OpenError::ZeroPacketId);
        }
        window.check(number)?;
        self.key.open(nonce(packet_id, &self.nonce_tail), header, ciphertext, tag)?;
        Ok((number, OVERHEAD_BYTES..end))
    }
}

impl fmt::Debug for OpeningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpeningKey").field("cipher", &self.cipher).finish_non_exhaustive()
    }
}

type NonceTail = Zeroizing<[u8; NONCE_TAIL_BYTES]>;

fn expanded(
    choice: Choice,
    cipher: DataCipher,
    cipher_key: &[u8],
) -> Result<ExpandedKey, KeyLengthError> {
    let wrong = KeyLengthError { cipher, have: cipher_key.len() };
    ExpandedKey::new(cipher, cipher_key, choice).map_err(|_| wrong)
}

/// Packet id, then tail.
#[inline]
fn nonce(packet_id: [u8; 4], tail: &NonceTail) -> [u8; NONCE_LEN] {
    let mut nonce = [0; NONCE_LEN];
    nonce[..4].copy_from_slice(&packet_id);
    nonce[4..].copy_from_slice(&tail[..]);
    nonce
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::WINDOW_PACKETS;
    use crate::library::{Library, SizeClass};
    use crate::testing::{OPENVPN_PLAINTEXT, hex, openvpn_key_block};

    const FIRST_WORD: [u8; 4] = [0x4b, 0, 0, 0x17];
    const TAIL: [u8; 8] = *b"nonce618";

    /// A key with its window.
    struct Opening(OpeningKey, ReplayWindow);

    impl Opening {
        fn open(&mut self, packet: &[u8]) -> Result<Vec<u8>, OpenError> {
            let mut packet = packet.to_vec();
            let range = self.0.open(&mut self.1, &mut packet)?;
            Ok(packet[range].to_vec())
        }
    }

    fn cipher_key(cipher: DataCipher) -> Vec<u8> {
        (0..cipher.key_bytes()).map(|at| at as u8 * 5 + 1).collect()
    }

    fn pair_with(choice: Choice, cipher: DataCipher) -> (SealingKey, Opening) {
        let key = cipher_key(cipher);
        let opening = OpeningKey::with(choice, cipher, &key, TAIL).unwrap();
        let sealing = SealingKey::with(choice, cipher, &key, TAIL).unwrap();
        (sealing, Opening(opening, ReplayWindow::new()))
    }

    fn pair(cipher: DataCipher) -> (SealingKey, Opening) {
        pair_with(Choice::default(), cipher)
    }

    fn packet(key: &SealingKey, plaintext: &[u8]) -> Vec<u8> {
        let mut datagram = vec![0; OVERHEAD_BYTES + plaintext.len()];
        datagram[OVERHEAD_BYTES..].copy_from_slice(plaintext);
        let sealed =
            key.reserve(1, FIRST_WORD).unwrap().seal_in_place(&mut datagram, plaintext.len());
        assert_eq!(sealed, Ok(datagram.len()));
        datagram
    }

    fn set_last(key: &mut SealingKey, last: u64) {
        key.spent = Spent::at(key.cipher, usage::PACKET_ID_MAX, last, 0);
    }

    /// The packet of OpenVPN's own `test_ssl.c`, of which parts are known.
    #[test]
    fn the_packet_that_openvpn_makes() {
        let (block, plaintext) = (openvpn_key_block(), hex(OPENVPN_PLAINTEXT));
        let tail = block[64..72].try_into().unwrap();
        for library in Library::ALL {
            let key = |cipher| {
                SealingKey::with(Choice::all(library), cipher, &block[..32], tail).unwrap()
            };
            let sealing = key(DataCipher::Aes256Gcm);
            let first_word = [7, 0, 0, 0x17];
            let mut packet = [&[0; OVERHEAD_BYTES][..], &plaintext].concat();
            let total =
                sealing.reserve(1, first_word).unwrap().seal_in_place(&mut packet, plaintext.len());
            assert_eq!(total, Ok(packet.len()));
            assert_eq!(packet[..8], [7, 0, 0, 0x17, 0, 0, 0, 1]);
            assert_eq!(packet[8..24], hex("1fdd908f0e9dc25e79d832020d58e73f"));
            assert_eq!(packet[24 + 10..24 + 16], hex("a82e6b1706d9"));
            let opening = OpeningKey::new(DataCipher::Aes256Gcm, &block[..32], tail).unwrap();
            assert_eq!(Opening(opening, ReplayWindow::new()).open(&packet), Ok(plaintext.clone()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Nothing behind the packet is touched.
        #[test]
        fn opens_what_was_sealed(
            plaintext in prop::collection::vec(any::<u8>(), 0..=9000),
            slack in 0_usize..40,
        ) {
            for cipher in DataCipher::ALL {
                let (sealing, mut opening) = pair(cipher);
                let whole = packet(&pair(cipher).0, &plaintext);
                let total = OVERHEAD_BYTES + plaintext.len();
                let mut datagram = vec![0xee; total + slack];
                datagram[OVERHEAD_BYTES..][..plaintext.len()].copy_from_slice(&plaintext);
                let mut reserved = sealing.reserve(1, FIRST_WORD).unwrap();
                let sealed = reserved.seal_in_place(&mut datagram, plaintext.len());
                prop_assert_eq!(sealed, Ok(total));
                prop_assert_eq!(&datagram[..total], &whole[..]);
                prop_assert!(datagram[total..].iter().all(|byte| *byte == 0xee));
                prop_assert_eq!(opening.open(&datagram[..total]), Ok(plaintext.clone()));
                drop(reserved);
                prop_assert_eq!(sealing.blocks(), usage::blocks_of(plaintext.len()));
            }
        }

        #[test]
        fn never_panics_on_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for cipher in DataCipher::ALL {
                prop_assert!(pair(cipher).1.open(&bytes).is_err());
            }
        }
    }

    #[test]
    fn refuses_a_packet_with_any_bit_changed_or_any_byte_missing() {
        for cipher in DataCipher::ALL {
            let (sealing, mut opening) = pair(cipher);
            let good = packet(&sealing, &[0x33; 48]);
            let mut forged = 0;
            for bit in 0..good.len() * 8 {
                let mut bad = good.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                // Packet id one becomes zero by the change of bit 56.
                let zero = bit == 56;
                let expected = if zero { OpenError::ZeroPacketId } else { OpenError::Forged };
                assert_eq!(opening.open(&bad), Err(expected), "bit {bit}");
                forged += u64::from(!zero);
            }
            for len in 0..good.len() {
                let short = len < OVERHEAD_BYTES;
                let expected = if short { OpenError::TooShort } else { OpenError::Forged };
                assert_eq!(opening.open(&good[..len]), Err(expected), "length {len}");
                forged += u64::from(!short);
            }
            assert_eq!((opening.1.highest(), opening.0.key.failures()), (0, forged));
            assert_eq!(opening.open(&good), Ok(vec![0x33; 48]));
        }
    }

    #[test]
    fn repeated_late_and_zero_packets_are_told_apart_before_they_are_opened() {
        let (sealing, mut opening) = pair(DataCipher::Aes128Gcm);
        let count = WINDOW_PACKETS as usize + 2;
        const { assert!(WINDOW_PACKETS >= 2048, "the kernel's window") };
        let packets: Vec<_> = (0..count).map(|_| packet(&sealing, b"packet")).collect();
        assert_eq!(packets[0][4..8], [0, 0, 0, 1]);
        assert!(opening.open(&packets[count - 1]).is_ok());
        for (index, expected) in [(count - 1, OpenError::Duplicate), (1, OpenError::TooOld)] {
            let mut repeated = packets[index].clone();
            repeated[28] ^= 1;
            let before = repeated.clone();
            let result = opening.0.open(&mut opening.1, &mut repeated);
            assert_eq!(result, Err(expected));
            assert_eq!(repeated, before, "the bytes are untouched");
        }
        assert!(opening.open(&packets[2]).is_ok());
        let mut zero = packets[3].clone();
        zero[4..8].fill(0);
        assert_eq!(opening.open(&zero), Err(OpenError::ZeroPacketId));
        assert_eq!(opening.1.highest(), count as u64);
    }

    #[test]
    fn a_packet_opened_ahead_counts_once_it_is_accepted() {
        let (sealing, mut opening) = pair(DataCipher::ChaCha20Poly1305);
        let good = packet(&sealing, b"packet");
        for _ in 0..2 {
            let (packet_id, plain) =
                opening.0.open_pipelined(&opening.1, &mut good.clone()).unwrap();
            assert_eq!((packet_id, plain), (1, OVERHEAD_BYTES..good.len()));
        }
        assert_eq!(opening.1.accept(1), Ok(()));
        assert_eq!(opening.open(&good), Err(OpenError::Duplicate));
    }

    #[test]
    fn used_up_packet_ids_end_the_key() {
        let (mut sealing, mut opening) = pair(DataCipher::Aes192Gcm);
        set_last(&mut sealing, 0xfeff_ffff);
        assert_eq!(sealing.usage(), Usage::Ample);
        packet(&sealing, b"packet");
        assert_eq!(sealing.usage(), Usage::RenewalDue);
        set_last(&mut sealing, u64::from(u32::MAX) - 2);
        for too_many in [3, 1 << 32, u64::MAX] {
            assert_eq!(sealing.reserve(too_many, FIRST_WORD).err(), Some(SealError::Exhausted));
        }
        for last_byte in [0xfe, 0xff] {
            let packet = packet(&sealing, b"last");
            assert_eq!(packet[4..8], [0xff, 0xff, 0xff, last_byte]);
            assert!(opening.open(&packet).is_ok());
        }
        for _ in 0..2 {
            assert_eq!(sealing.reserve(1, FIRST_WORD).err(), Some(SealError::Exhausted));
        }
        assert_eq!((sealing.packets(), sealing.usage()), (u32::MAX.into(), Usage::UsedUp));
    }

    #[test]
    fn blocks_are_counted_against_the_limit_of_aes() {
        for cipher in DataCipher::ALL {
            let (mut sealing, _) = pair(cipher);
            // Short of 7/8 of the limit by one packet of 17 bytes, which costs three blocks.
            sealing.spent = Spent::at(cipher, usage::PACKET_ID_MAX, 1000, (7 << 33) - 3);
            assert_eq!(sealing.usage(), Usage::Ample);
            packet(&sealing, &[1; 17]);
            let due = match cipher {
                DataCipher::ChaCha20Poly1305 => Usage::Ample,
                _ => Usage::RenewalDue,
            };
            assert_eq!((sealing.blocks(), sealing.usage()), (7 << 33, due), "{cipher}");
            // The last block that there is; the packet may need more than it.
            sealing.spent =
                Spent::at(cipher, usage::PACKET_ID_MAX, 1000, usage::AES_GCM_BLOCKS_MAX - 1);
            packet(&sealing, &[1; 17]);
            let refused = sealing.reserve(1, FIRST_WORD).err();
            let expected = (due != Usage::Ample).then_some(SealError::Exhausted);
            assert_eq!(refused, expected, "{cipher}");
        }
    }

    #[test]
    fn too_many_failures_end_the_key() {
        let (sealing, mut opening) = pair(DataCipher::Aes256Gcm);
        let good = packet(&sealing, b"packet");
        let mut forged = good.clone();
        forged[9] ^= 1;
        opening.0.key.set_failures((7 << 33) - 1);
        assert_eq!(opening.0.usage(), Usage::Ample);
        assert_eq!(opening.open(&forged), Err(OpenError::Forged));
        assert_eq!(opening.0.usage(), Usage::RenewalDue);
        opening.0.key.set_failures(usage::FAILURES_MAX - 1);
        assert_eq!(opening.open(&forged), Err(OpenError::Forged));
        assert_eq!(opening.open(&good), Err(OpenError::TooManyFailures));
        assert_eq!(opening.0.usage(), Usage::UsedUp);
    }

    #[test]
    fn a_datagram_without_room_uses_no_packet_id() {
        const PLAINTEXT: usize = 3_100;
        let (sealing, _) = pair(DataCipher::Aes256Gcm);
        let mut reserved = sealing.reserve(1, FIRST_WORD).unwrap();
        let fitting = OVERHEAD_BYTES + PLAINTEXT;
        for len in [0, 7, 8, 23, 24, 124, fitting - 1] {
            let mut datagram = vec![5; len];
            assert_eq!(
                reserved.seal_in_place(&mut datagram, PLAINTEXT),
                Err(SealError::NoRoom),
                "{len}"
            );
            assert!(datagram.iter().all(|byte| *byte == 5));
        }
        for head_len in [usize::MAX, usize::MAX - OVERHEAD_BYTES, 65 - OVERHEAD_BYTES] {
            assert_eq!(reserved.seal_in_place(&mut [0; 64], head_len), Err(SealError::NoRoom));
        }
        let mut datagram = vec![0; fitting];
        assert_eq!(reserved.seal_in_place(&mut datagram, PLAINTEXT), Ok(fitting));
        assert_eq!(datagram[4..8], [0, 0, 0, 1]);
        // One was reserved, one is used.
        assert_eq!(reserved.seal_in_place(&mut datagram, PLAINTEXT), Err(SealError::Exhausted));
    }

    #[test]
    fn threads_that_seal_with_one_key_never_share_a_packet_id() {
        const THREADS: u64 = 4;
        let (sealing, mut opening) = pair(DataCipher::Aes128Gcm);
        let seal = || {
            let mut packets = Vec::new();
            for block in 1..200 {
                let mut reserved = sealing.reserve(block % 7, FIRST_WORD).unwrap();
                for _ in 0..block % 7 {
                    let mut datagram = [0; OVERHEAD_BYTES + 4];
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
        assert_eq!(2 * sealing.packets(), sealing.blocks());
        for packet in &all {
            assert!(opening.open(packet).is_ok(), "a packet id was used twice");
        }
        assert_eq!(opening.1.highest(), all.len() as u64);
    }

    /// Each library seals the same packets and opens those of the other, whatever the size.
    #[test]
    fn libraries_are_of_one_opinion() {
        let mixed = Choice::default().with(SizeClass::Medium, Library::Ring);
        let choices = [Choice::all(Library::AwsLc), Choice::all(Library::Ring), mixed];
        for cipher in DataCipher::ALL {
            let pairs = choices.map(|choice| pair_with(choice, cipher));
            let (sealing, mut opening): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            let has_ring = sealing[1].key.is_rings(100);
            assert_eq!(has_ring, cipher != DataCipher::Aes192Gcm);
            for (len, is_medium) in [(511, false), (512, true), (4_095, true), (4_096, false)] {
                let is_rings = [sealing[2].key.is_rings(len), opening[2].0.key.is_rings(len)];
                assert_eq!(is_rings, [is_medium && has_ring; 2], "{cipher:?}, {len}");
            }
            for len in [0, 1, 64, 511, 512, 1_420, 2_100, 4_095, 4_096, 8_920] {
                let plaintext: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
                let packets: Vec<_> = sealing.iter().map(|key| packet(key, &plaintext)).collect();
                assert!(packets.iter().all(|packet| *packet == packets[0]), "{cipher}, {len}");
                let mut forged = packets[0].clone();
                forged[OVERHEAD_BYTES - 1] ^= 1;
                for key in &mut opening {
                    assert_eq!(key.open(&forged), Err(OpenError::Forged), "{cipher}, {len}");
                    assert_eq!(key.open(&packets[0]).as_ref(), Ok(&plaintext), "{cipher}, {len}");
                }
            }
        }
    }

    #[test]
    fn another_key_tail_or_cipher_opens_nothing() {
        let cipher = DataCipher::Aes256Gcm;
        let good = packet(&pair(cipher).0, b"packet");
        let mut other_key = cipher_key(cipher);
        other_key[31] ^= 1;
        let mut other_tail = TAIL;
        other_tail[7] ^= 1;
        for (cipher, key, tail) in [
            (cipher, other_key, TAIL),
            (cipher, cipher_key(cipher), other_tail),
            (DataCipher::ChaCha20Poly1305, cipher_key(cipher), TAIL),
        ] {
            let key = OpeningKey::new(cipher, &key, tail).unwrap();
            let mut opening = Opening(key, ReplayWindow::new());
            assert_eq!(opening.open(&good), Err(OpenError::Forged));
        }
    }

    #[test]
    fn a_key_has_the_length_of_its_cipher() {
        for cipher in DataCipher::ALL {
            for choice in Library::ALL.map(Choice::all) {
                for have in [0, 15, 16, 24, 31, 32, 33] {
                    let fits = have == cipher.key_bytes();
                    let expected = (!fits).then_some(KeyLengthError { cipher, have });
                    let sealing = SealingKey::with(choice, cipher, &vec![1; have], TAIL);
                    assert_eq!(sealing.err(), expected);
                    let opening = OpeningKey::with(choice, cipher, &vec![1; have], TAIL);
                    assert_eq!(opening.err(), expected);
                }
            }
        }
        let error = KeyLengthError { cipher: DataCipher::Aes128Gcm, have: 15 };
        assert_eq!(error.to_string(), "invalid key length 15 for AES-128-GCM, expected 16");
    }

    #[test]
    fn debug_output_holds_no_key() {
        let (sealing, opening) = pair(DataCipher::Aes128Gcm);
        let text = format!("{sealing:?}");
        assert_eq!(text, "SealingKey { cipher: Aes128Gcm, packets: 0, .. }");
        assert_eq!(format!("{:?}", opening.0), "OpeningKey { cipher: Aes128Gcm, .. }");
        let reserved = format!("{:?}", sealing.reserve(1, FIRST_WORD).unwrap());
        let tail = format!("{TAIL:?}");
        assert!(!reserved.contains(tail.trim_matches(['[', ']'])), "{reserved}");
    }
}
