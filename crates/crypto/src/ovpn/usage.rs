//! How much a key may do before it must be replaced (`docs/design/ovpn.md`, limits).
//!
//! AES-GCM is good for [`AES_GCM_BLOCKS_MAX`] blocks in each direction: one for every packet and one for
//! every 16 bytes begun. ChaCha20-Poly1305 has no such limit. Renewal is due at 7/8 of a limit. The functions
//! here take counters, so that they also watch a key in the kernel, which counts packets and bytes but sets
//! no limit.

use crate::DataCipher;

/// Blocks that AES-GCM may seal, or open, with one key.
pub const AES_GCM_BLOCKS_MAX: u64 = (1 << 36) - 1;
/// Packets that may fail to open with one key, of any cipher.
pub const FAILURES_MAX: u64 = 1 << 36;
/// The last packet id of a key of the classic layout.
pub const PACKET_ID_MAX: u64 = u32::MAX as u64;
/// From this packet id on a key of the classic layout should be renewed.
pub const PACKET_ID_RENEWAL: u64 = 0xff00_0000;
/// From this epoch on the secret from which all epochs come should be renewed.
pub const EPOCH_RENEWAL: u16 = 0xf000;

/// How far a key is used up. The larger is the worse: [`Ord::max`] joins several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Usage {
    /// The key needs no renewal yet.
    #[default]
    Ample,
    /// A new key should be negotiated; this one does until then.
    RenewalDue,
    /// A limit is reached. Nothing more should be done with the key.
    UsedUp,
}

/// Blocks that a packet with `bytes` bytes of plaintext costs.
#[inline]
pub const fn blocks_of(bytes: usize) -> u64 {
    1 + bytes.div_ceil(16) as u64
}

/// The most blocks that `packets` packets, with `bytes` bytes of plaintext together, can cost.
///
/// Counters do not tell how the bytes are spread: the last block of each packet may have one byte.
pub const fn blocks_at_most(packets: u64, bytes: u64) -> u64 {
    let begun = (bytes as u128 + 15 * packets as u128) / 16;
    let blocks = packets as u128 + begun;
    if blocks > u64::MAX as u128 { u64::MAX } else { blocks as u64 }
}

/// Blocks that may be sealed, or opened, with one key; `None` where it does not matter.
pub const fn blocks_max(cipher: DataCipher) -> Option<u64> {
    match cipher {
        DataCipher::Aes128Gcm | DataCipher::Aes192Gcm | DataCipher::Aes256Gcm => {
            Some(AES_GCM_BLOCKS_MAX)
        }
        DataCipher::ChaCha20Poly1305 => None,
    }
}

/// By the blocks sealed, or by those opened.
pub const fn of_blocks(cipher: DataCipher, blocks: u64) -> Usage {
    match blocks_max(cipher) {
        Some(max) => against(blocks, max),
        None => Usage::Ample,
    }
}

/// By the last packet id that a key of the classic layout has used.
pub const fn of_packet_id(last: u64) -> Usage {
    match last {
        0..PACKET_ID_RENEWAL => Usage::Ample,
        PACKET_ID_RENEWAL..PACKET_ID_MAX => Usage::RenewalDue,
        _ => Usage::UsedUp,
    }
}

/// By the packets that failed to open.
pub const fn of_failures(failures: u64) -> Usage {
    against(failures, FAILURES_MAX)
}

/// By a limit: from 7/8 of it on renewal is due.
pub(super) const fn against(used: u64, limit: u64) -> Usage {
    if used >= limit {
        Usage::UsedUp
    } else if used >= limit - limit / 8 {
        Usage::RenewalDue
    } else {
        Usage::Ample
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The limits of OpenVPN's own `test_crypto.c`. Its number for packets of 9000 bytes leaves the block
    /// of the last eight bytes out; here it is counted.
    #[test]
    fn as_many_packets_as_openvpn_allows() {
        let packets = |bytes| AES_GCM_BLOCKS_MAX / blocks_of(bytes);
        assert_eq!(packets(1600), 680_390_858);
        assert_eq!(packets(8992), 122_059_461);
        assert_eq!(packets(9000), 121_843_043);
        assert_eq!((blocks_of(0), blocks_of(1), blocks_of(16), blocks_of(17)), (1, 2, 2, 3));
    }

    #[test]
    fn renewal_is_due_before_the_limit() {
        for cipher in DataCipher::ALL {
            let limited = cipher != DataCipher::ChaCha20Poly1305;
            let [soft, hard] =
                if limited { [Usage::RenewalDue, Usage::UsedUp] } else { [Usage::Ample; 2] };
            // 7/8 of 2^36 - 1.
            let due = 7_u64 << 33;
            assert_eq!(of_blocks(cipher, due - 1), Usage::Ample, "{cipher}");
            assert_eq!(of_blocks(cipher, due), soft, "{cipher}");
            assert_eq!(of_blocks(cipher, AES_GCM_BLOCKS_MAX - 1), soft, "{cipher}");
            assert_eq!(of_blocks(cipher, AES_GCM_BLOCKS_MAX), hard, "{cipher}");
            assert_eq!(of_blocks(cipher, u64::MAX), hard, "{cipher}");
        }
        let ids = [0, 0xfeff_ffff, 0xff00_0000, 0xffff_fffe, 0xffff_ffff, u64::MAX];
        let usage = ids.map(of_packet_id);
        let [ample, due, up] = [Usage::Ample, Usage::RenewalDue, Usage::UsedUp];
        assert_eq!(usage, [ample, ample, due, due, up, up]);
        assert_eq!([0, 7 << 33, 1 << 36].map(of_failures), [ample, due, up]);
        assert_eq!(of_failures((7 << 33) - 1), ample);
        assert_eq!(due.max(ample).max(up), up);
    }

    #[test]
    fn counters_of_any_size_are_taken() {
        assert_eq!(blocks_at_most(0, 0), 0);
        assert_eq!(blocks_at_most(u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(blocks_at_most(1 << 40, 0), (1 << 40) + 15 * (1 << 36));
    }

    proptest! {
        /// Never fewer than there were, and no more than one for each packet too many.
        #[test]
        fn counters_tell_an_upper_bound(sizes in prop::collection::vec(0_usize..9_100, 1..50)) {
            let exact: u64 = sizes.iter().map(|bytes| blocks_of(*bytes)).sum();
            let (packets, bytes) = (sizes.len() as u64, sizes.iter().sum::<usize>() as u64);
            let bound = blocks_at_most(packets, bytes);
            prop_assert!(exact <= bound && bound <= exact + packets, "{} {}", exact, bound);
        }
    }
}
