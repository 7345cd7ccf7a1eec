//! Keys of peers, and how much of each is used.

use weft_crypto::DataCipher;
use weft_crypto::ovpn::{Usage, usage};
use weft_openvpn::device::Traffic;

/// A key in a slot of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// The key id in its packets.
    pub(super) id: u32,
    pub(super) cipher: DataCipher,
    /// Sealed traffic to and from the peer when the key was installed.
    pub(super) before: Traffic,
    /// Blocks counted as used by then.
    pub(super) done: u64,
}

impl Key {
    /// A key that is installed now.
    pub(super) fn new(id: u32, cipher: DataCipher, before: Traffic) -> Self {
        Self { id, cipher, before, done: done_before() }
    }

    /// Whether the cipher has a usage limit.
    pub(super) const fn is_limited(&self) -> bool {
        usage::blocks_max(self.cipher).is_some()
    }

    /// Whether it has reached its limit, as far as counters tell. They do not tell which of a peer's keys a
    /// packet used, so each key counts all.
    pub(super) fn is_used_up(&self, now: &Traffic) -> bool {
        let used_up = |packets: [u64; 2], bytes: [u64; 2]| {
            let since = |[before, now]: [u64; 2]| now.saturating_sub(before);
            let blocks = usage::blocks_at_most(since(packets), since(bytes));
            usage::of_blocks(self.cipher, blocks.saturating_add(self.done)) == Usage::UsedUp
        };
        let before = &self.before;
        used_up([before.tx_packets, now.tx_packets], [before.tx_bytes, now.tx_bytes])
            || used_up([before.rx_packets, now.rx_packets], [before.rx_bytes, now.rx_bytes])
    }
}

/// Above zero only in builds for tests, which cannot wait until a key has reached its limit.
fn done_before() -> u64 {
    let told = cfg!(feature = "aged-keys").then(|| std::env::var("WEFT_DCO_KEY_BLOCKS").ok());
    told.flatten().and_then(|blocks| blocks.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = usage::AES_GCM_BLOCKS_MAX;

    fn key(cipher: DataCipher) -> Key {
        let before = Traffic { rx_bytes: 7, tx_bytes: 9, rx_packets: 1, tx_packets: 1 };
        Key { id: 3, cipher, before, done: 0 }
    }

    #[test]
    fn a_key_is_used_up_by_what_went_either_way_since_it_was_there() {
        let key = key(DataCipher::Aes128Gcm);
        // A packet of 17 bytes costs three blocks.
        let packets = MAX / 3;
        let sealed = |packets: u64| Traffic {
            tx_packets: 1 + packets,
            tx_bytes: 9 + 17 * packets,
            ..key.before
        };
        let opened = |packets: u64| Traffic {
            rx_packets: 1 + packets,
            rx_bytes: 7 + 17 * packets,
            ..key.before
        };
        assert!(!key.is_used_up(&key.before));
        for traffic in [&sealed as &dyn Fn(u64) -> Traffic, &opened] {
            assert!(!key.is_used_up(&traffic(packets - 1)));
            assert!(key.is_used_up(&traffic(packets)));
        }
        // Counters of another peer that now has the id.
        assert!(!key.is_used_up(&Traffic::default()));
    }

    #[test]
    fn chacha20_has_no_limit() {
        let key = key(DataCipher::ChaCha20Poly1305);
        let all = Traffic {
            rx_bytes: u64::MAX,
            tx_bytes: u64::MAX,
            rx_packets: u64::MAX,
            tx_packets: u64::MAX,
        };
        assert!(!key.is_limited() && !key.is_used_up(&all));
    }
}
