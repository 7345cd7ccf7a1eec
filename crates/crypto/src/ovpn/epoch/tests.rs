#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use proptest::prelude::*;

use super::derivation::next;
use super::*;
use crate::library::{Choice, Library};
use crate::ovpn::{OpenError, SealError, Usage, usage};
use crate::testing::{OPENVPN_PLAINTEXT, hex, openvpn_key_block};
use crate::{DataCipher, EpochSecret};

const FIRST_WORD: [u8; 4] = [0x4b, 0, 0, 0x17];
const CIPHER: DataCipher = DataCipher::Aes256Gcm;

fn secret() -> EpochSecret {
    EpochSecret::from_bytes([0x5e; 32])
}

fn pair(cipher: DataCipher) -> (SealingEpochs, OpeningEpochs) {
    (SealingEpochs::new(cipher, secret()), OpeningEpochs::new(cipher, secret()))
}

fn seal(key: &EpochSealingKey, plaintext: &[u8]) -> Vec<u8> {
    let mut datagram = vec![0; EPOCH_OVERHEAD_BYTES + plaintext.len()];
    datagram[EPOCH_HEADER_BYTES..][..plaintext.len()].copy_from_slice(plaintext);
    let sealed = key.reserve(1, FIRST_WORD).unwrap().seal_in_place(&mut datagram, plaintext.len());
    assert_eq!(sealed, Ok(datagram.len()));
    datagram
}

fn packet(sealing: &SealingEpochs) -> Vec<u8> {
    seal(sealing.current(), b"packet")
}

/// A packet of each of these epochs, in turn.
fn packets<const N: usize>(epochs: [u16; N]) -> [Vec<u8>; N] {
    epochs.map(|epoch| {
        let mut sealing = pair(CIPHER).0;
        assert_eq!(sealing.follow(epoch), epoch > 1);
        packet(&sealing)
    })
}

fn open(opening: &mut OpeningEpochs, packet: &[u8]) -> Result<Vec<u8>, OpenError> {
    let mut packet = packet.to_vec();
    let range = opening.open(&mut packet)?;
    Ok(packet[range].to_vec())
}

/// The packet of OpenVPN's own `test_ssl.c`, of which parts are known.
#[test]
fn the_packet_that_openvpn_makes() {
    let (block, plaintext) = (openvpn_key_block(), hex(OPENVPN_PLAINTEXT));
    let first = EpochSecret::from_bytes(block[..32].try_into().unwrap());
    for library in Library::ALL {
        let mut sealing = SealingEpochs::with(Choice::all(library), CIPHER, first.clone());
        assert!(sealing.advance() && sealing.advance() && sealing.advance());
        let mut packet = vec![0; EPOCH_OVERHEAD_BYTES + plaintext.len()];
        packet[EPOCH_HEADER_BYTES..][..plaintext.len()].copy_from_slice(&plaintext);
        let mut reserved = sealing.current().reserve(1, [7, 0, 0, 0x17]).unwrap();
        assert_eq!(reserved.seal_in_place(&mut packet, plaintext.len()), Ok(packet.len()));
        assert_eq!(packet[..12], hex("07000017 0004000000000001"));
        assert_eq!(packet[12 + 6..12 + 12], hex("36aab4d49ce6"));
        assert_eq!(packet[12 + 56..], hex("0ffff5913d39d75b18573b5748589a7d"));
        let mut opening = OpeningEpochs::new(CIPHER, first.clone());
        assert_eq!(open(&mut opening, &packet), Ok(plaintext.clone()));
        assert_eq!(opening.epoch(), 4);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// The packet is the same from either library; nothing behind it is touched.
    #[test]
    fn opens_what_was_sealed(
        plaintext in prop::collection::vec(any::<u8>(), 0..=9000),
        slack in 0_usize..40,
        ahead in 1..=1 + EPOCH_FUTURE,
    ) {
        let ring = Choice::all(Library::Ring);
        for cipher in DataCipher::ALL {
            let (mut sealing, mut opening) = pair(cipher);
            let mut other = SealingEpochs::with(ring, cipher, secret());
            prop_assert_eq!(sealing.follow(ahead), other.follow(ahead));
            let whole = seal(other.current(), &plaintext);
            let total = EPOCH_OVERHEAD_BYTES + plaintext.len();
            let mut datagram = vec![0xee; total + slack];
            datagram[EPOCH_HEADER_BYTES..][..plaintext.len()].copy_from_slice(&plaintext);
            let mut reserved = sealing.current().reserve(1, FIRST_WORD).unwrap();
            let sealed = reserved.seal_in_place(&mut datagram, plaintext.len());
            prop_assert_eq!(sealed, Ok(total));
            prop_assert_eq!(&datagram[..total], &whole[..]);
            prop_assert!(datagram[total..].iter().all(|byte| *byte == 0xee));
            prop_assert_eq!(open(&mut opening, &datagram[..total]), Ok(plaintext.clone()));
            let mut opening = OpeningEpochs::with(ring, cipher, secret());
            prop_assert_eq!(open(&mut opening, &datagram[..total]), Ok(plaintext.clone()));
            prop_assert_eq!(opening.epoch(), ahead);
        }
    }

    #[test]
    fn never_panics_on_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), epoch: u16) {
        let mut bytes = bytes;
        let mut opening = OpeningEpochs::at(CIPHER, epoch.clamp(1, EPOCH_MAX), secret());
        prop_assert!(opening.open(&mut bytes).is_err());
        for near in epoch.saturating_sub(2)..=epoch.saturating_add(6) {
            if let Some(bytes) = bytes.get_mut(4..6) {
                bytes.copy_from_slice(&near.to_be_bytes());
            }
            prop_assert!(opening.open(&mut bytes).is_err());
        }
    }
}

#[test]
fn refuses_a_packet_with_any_bit_changed_or_any_byte_missing() {
    for cipher in DataCipher::ALL {
        let (sealing, mut opening) = pair(cipher);
        let good = seal(sealing.current(), &[0x33; 48]);
        assert_eq!(good[..12], hex("4b000017 0001 000000000001"));
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let expected = match bit {
                // Epoch 1 becomes 0 or far, except 3 and 5, which are tried.
                32..=40 | 43..48 => OpenError::UnknownEpoch,
                88 => OpenError::ZeroPacketId,
                _ => OpenError::Forged,
            };
            assert_eq!(open(&mut opening, &bad), Err(expected), "bit {bit}");
        }
        for len in 0..good.len() {
            let short = len < EPOCH_OVERHEAD_BYTES;
            let expected = if short { OpenError::TooShort } else { OpenError::Forged };
            assert_eq!(open(&mut opening, &good[..len]), Err(expected), "length {len}");
        }
        assert_eq!(opening.known(), [1, 2, 3, 4, 5], "nothing forged moves the epoch");
        assert_eq!(open(&mut opening, &good), Ok(vec![0x33; 48]));
    }
}

#[test]
fn a_packet_of_a_future_epoch_moves_the_receiver() {
    let mut opening = pair(CIPHER).1;
    let early = {
        let sealing = pair(CIPHER).0;
        [packet(&sealing), packet(&sealing), packet(&sealing)]
    };
    let [second, third, sixth, seventh, eighth, twelfth] = packets([2, 3, 6, 7, 8, 12]);
    assert_eq!(opening.known(), [1, 2, 3, 4, 5]);
    assert_eq!(open(&mut opening, &sixth), Err(OpenError::UnknownEpoch));
    assert!(open(&mut opening, &early[0]).is_ok());
    assert!(open(&mut opening, &third).is_ok());
    assert_eq!(opening.known(), [1, 3, 4, 5, 6, 7]);
    assert!(open(&mut opening, &early[1]).is_ok(), "late, of the retiring key");
    assert_eq!(open(&mut opening, &early[0]), Err(OpenError::Duplicate));
    assert_eq!(open(&mut opening, &third), Err(OpenError::Duplicate));
    assert_eq!(open(&mut opening, &second), Err(OpenError::UnknownEpoch), "skipped");
    assert_eq!(open(&mut opening, &eighth), Err(OpenError::UnknownEpoch), "too far ahead");
    assert!(open(&mut opening, &seventh).is_ok(), "the last that is known");
    assert_eq!(opening.known(), [3, 7, 8, 9, 10, 11]);
    assert_eq!(open(&mut opening, &early[2]), Err(OpenError::UnknownEpoch), "retired");
    assert_eq!(open(&mut opening, &twelfth), Err(OpenError::UnknownEpoch));
    assert!(open(&mut opening, &eighth).is_ok());
    assert_eq!((opening.epoch(), opening.known()), (8, vec![7, 8, 9, 10, 11, 12]));
}

#[test]
fn epochs_end_where_none_can_follow() {
    let before_last = EPOCH_MAX - 1;
    let mut sealing = SealingEpochs::at(CIPHER, before_last, secret());
    let mut opening = OpeningEpochs::at(CIPHER, before_last, secret());
    let beyond = SealingEpochs::at(CIPHER, EPOCH_MAX + 1, next(&next(&secret())));
    assert!(open(&mut opening, &packet(&sealing)).is_ok());
    assert!(opening.known().contains(&(EPOCH_MAX + 1)));
    assert_eq!(open(&mut opening, &packet(&beyond)), Err(OpenError::UnknownEpoch));
    assert!(sealing.advance());
    assert!(open(&mut opening, &packet(&sealing)).is_ok());
    assert_eq!(opening.known().last(), Some(&u16::MAX));
    assert_eq!(open(&mut opening, &packet(&beyond)), Err(OpenError::UnknownEpoch));
    let last = Arc::clone(sealing.current());
    assert!(!sealing.advance() && !sealing.follow(u16::MAX));
    assert!(Arc::ptr_eq(&last, sealing.current()));
    assert_eq!((sealing.usage(), opening.usage()), (Usage::RenewalDue, Usage::RenewalDue));
    sealing.spend(COUNTER_MAX, 0);
    assert!(!sealing.advance_if_due());
    assert_eq!(sealing.usage(), Usage::UsedUp);
}

#[test]
fn a_new_secret_is_wanted_from_the_reference_s_epoch_on() {
    for (epoch, expected) in [(0xefff, Usage::Ample), (0xf000, Usage::RenewalDue)] {
        assert_eq!(SealingEpochs::at(CIPHER, epoch, secret()).usage(), expected);
        assert_eq!(OpeningEpochs::at(CIPHER, epoch, secret()).usage(), expected);
    }
}

#[test]
fn the_sender_advances_near_the_limits_of_its_key() {
    for cipher in DataCipher::ALL {
        let (mut sealing, mut opening) = pair(cipher);
        let limited = cipher != DataCipher::ChaCha20Poly1305;
        let blocks = usage::AES_GCM_BLOCKS_MAX / 8 * 7;
        assert!(!sealing.advance_if_due());
        sealing.spend(1, blocks);
        assert!(!sealing.advance_if_due());
        seal(sealing.current(), &[0; 160]);
        assert_eq!(sealing.advance_if_due(), limited, "{cipher}");
        assert_eq!(sealing.current().epoch(), 1 + u16::from(limited));
        assert!(!sealing.advance_if_due(), "the new key is fresh, or has no limit");
        assert!(open(&mut opening, &packet(&sealing)).is_ok());
        sealing.spend(7 << 45, 0);
        assert!(sealing.advance_if_due(), "the counter is near its end");
        assert!(open(&mut opening, &packet(&sealing)).is_ok());
        assert_eq!(opening.epoch(), 2 + u16::from(limited));
    }
}

#[test]
fn used_up_counters_end_the_key_of_an_epoch() {
    let (mut sealing, mut opening) = pair(CIPHER);
    sealing.spend(COUNTER_MAX - 1, 0);
    let last = packet(&sealing);
    assert_eq!(last[4..12], hex("0001 ffffffffffff"), "the epoch is not carried into");
    assert!(open(&mut opening, &last).is_ok());
    let refused = sealing.current().reserve(1, FIRST_WORD).err();
    assert_eq!(refused, Some(SealError::Exhausted));
    assert!(sealing.advance_if_due());
    assert_eq!(packet(&sealing)[4..12], hex("0002 000000000001"));
}

#[test]
fn the_sender_follows_what_the_receiver_saw() {
    let (mut ours, mut opening) = pair(CIPHER);
    let old = Arc::clone(ours.current());
    let [third] = packets([3]);
    assert!(open(&mut opening, &third).is_ok());
    assert!(ours.follow(opening.epoch()));
    assert_eq!(ours.current().epoch(), 3);
    assert!(!ours.follow(opening.epoch()) && !ours.follow(1), "never back");
    assert_eq!(packet(&ours), third, "the same key as if each epoch had been taken by itself");
    // A thread that still holds the old key seals with it, and the peer opens that.
    let mut peers = OpeningEpochs::new(CIPHER, secret());
    assert!(open(&mut peers, &packet(&ours)).is_ok());
    assert_eq!(open(&mut peers, &seal(&old, b"late")).unwrap(), b"late");
}

#[test]
fn packets_opened_ahead_count_once_they_are_accepted() {
    let mut opening = pair(CIPHER).1;
    let [first, second, third] = packets([1, 2, 3]);
    let ahead = |opening: &OpeningEpochs, packet: &[u8]| {
        opening.open_pipelined(&mut packet.to_vec()).map(|(packet_id, _)| packet_id)
    };
    let ids = [&first, &second, &third].map(|packet| ahead(&opening, packet).unwrap());
    assert_eq!(ids.map(|id| (id.epoch(), id.counter())), [(1, 1), (2, 1), (3, 1)]);
    assert_eq!(opening.known(), [1, 2, 3, 4, 5], "nothing has changed");
    assert_eq!(opening.accept(ids[0]), Ok(false));
    assert_eq!(opening.accept(ids[0]), Err(OpenError::Duplicate));
    assert_eq!(ahead(&opening, &first), Err(OpenError::Duplicate));
    assert_eq!(opening.accept(ids[2]), Ok(true));
    assert_eq!(opening.accept(ids[1]), Err(OpenError::UnknownEpoch), "left behind meanwhile");
    assert_eq!(opening.accept(ids[0]), Err(OpenError::Duplicate));
}

#[test]
fn the_key_of_an_epoch_to_come_is_made_with_its_first_packet_and_once() {
    let mut opening = pair(CIPHER).1;
    assert_eq!(opening.made(), []);
    let packets = packets([1, 2, 3, 4, 5, 6, 7]);
    let mut forged = packets.clone();
    forged.iter_mut().for_each(|packet| packet[20] ^= 1);
    for round in 1..=3 {
        assert_eq!(open(&mut opening, &forged[5]), Err(OpenError::UnknownEpoch));
        assert_eq!(open(&mut opening, &forged[4]), Err(OpenError::Forged));
        assert_eq!(open(&mut opening, &forged[2]), Err(OpenError::Forged));
        assert_eq!(opening.made(), [(3, round), (5, round)], "the same ones count on");
    }
    assert!(open(&mut opening, &packets[2]).is_ok(), "a forged packet has spoilt nothing");
    assert_eq!(opening.made(), [(5, 3)], "kept while the epoch is to come");
    assert!(open(&mut opening, &packets[3]).is_ok(), "one that no packet was forged for");
    assert!(open(&mut opening, &packets[6]).is_ok());
    assert_eq!(opening.made(), []);
    assert_eq!(opening.known(), [4, 7, 8, 9, 10, 11]);
}

/// The threads of a receiver ask for the same new epoch at one time.
#[test]
fn threads_that_open_ahead_share_the_key_of_an_epoch_to_come() {
    const THREADS: usize = 4;
    let mut opening = pair(CIPHER).1;
    let [good] = packets([3]);
    let mut forged = good.clone();
    forged[20] ^= 1;
    let start = std::sync::Barrier::new(THREADS);
    let open_both = || {
        start.wait();
        assert_eq!(opening.open_pipelined(&mut forged.clone()).err(), Some(OpenError::Forged));
        opening.open_pipelined(&mut good.clone()).unwrap().0
    };
    let ids: Vec<EpochPacketId> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(open_both)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(opening.made(), [(3, THREADS as u64)]);
    let accepted: Vec<_> = ids.iter().map(|id| opening.accept(*id)).collect();
    assert_eq!(accepted[0], Ok(true));
    assert!(accepted[1..].iter().all(|again| *again == Err(OpenError::Duplicate)));
}

#[test]
fn too_many_failures_end_the_key_of_an_epoch() {
    let (sealing, mut opening) = pair(CIPHER);
    let good = packet(&sealing);
    opening.set_failures(usage::FAILURES_MAX - 1);
    assert_eq!(opening.usage(), Usage::RenewalDue);
    let mut forged = good.clone();
    forged[20] ^= 1;
    assert_eq!(open(&mut opening, &forged), Err(OpenError::Forged));
    assert_eq!(open(&mut opening, &good), Err(OpenError::TooManyFailures));
    assert_eq!(opening.usage(), Usage::UsedUp);
    let [second] = packets([2]);
    assert!(open(&mut opening, &second).is_ok(), "the next has its own count");
    assert_eq!(opening.usage(), Usage::Ample);
}

#[test]
fn a_datagram_without_room_uses_no_counter() {
    let sealing = pair(CIPHER).0;
    let mut reserved = sealing.current().reserve(1, FIRST_WORD).unwrap();
    let fitting = EPOCH_OVERHEAD_BYTES + 100 + 50;
    for len in [0, 11, 12, 28, 112, fitting - 16, fitting - 1] {
        let mut datagram = vec![5; len];
        assert_eq!(reserved.seal_in_place(&mut datagram, 150), Err(SealError::NoRoom), "{len}");
        assert!(datagram.iter().all(|byte| *byte == 5));
    }
    for head_len in [usize::MAX, usize::MAX - EPOCH_HEADER_BYTES, 65 - EPOCH_OVERHEAD_BYTES] {
        assert_eq!(reserved.seal_in_place(&mut [0; 64], head_len), Err(SealError::NoRoom));
    }
    let mut datagram = vec![0; fitting];
    assert_eq!(reserved.seal_in_place(&mut datagram, 150), Ok(fitting));
    assert_eq!(datagram[6..12], [0, 0, 0, 0, 0, 1]);
    assert_eq!(reserved.seal_in_place(&mut datagram, 150), Err(SealError::Exhausted));
}

#[test]
fn debug_output_holds_no_key() {
    let (sealing, opening) = pair(CIPHER);
    assert_eq!(
        format!("{sealing:?}"),
        "SealingEpochs { current: EpochSealingKey { cipher: Aes256Gcm, epoch: 1, packets: 0, .. }, .. }"
    );
    assert_eq!(
        format!("{opening:?}"),
        "OpeningEpochs { cipher: Aes256Gcm, epoch: 1, highest: 0, .. }"
    );
    let reserved = format!("{:?}", sealing.current().reserve(1, FIRST_WORD).unwrap());
    assert!(!reserved.contains("94, 94"), "{reserved}");
}
