//! State shared by all peers of a host: settings, the random source, the SPIs, and the output queues.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha20Rng;
use weft_crypto::{Format, PeerId};

use crate::config::{CHANGES_QUEUED_MAX, Config, MESSAGES_QUEUED_MAX};
use crate::engine_api::{EngineCommand, PathId};
use crate::message::Message;
use crate::spi::{OVPN_DATA_V2, OVPN_KEY_ID_AT, OVPN_KEY_IDS, is_spi};
use crate::status::{Counters, PathChange};

/// The SPIs of one path and lane of format `ovpn`. The peer id lasts for the life of the path, and each SA gets
/// the next free key id. So an SPI recurs once its SA is gone and the other key ids have had their turn. Late
/// packets of the earlier SA are then not opened by another key.
pub(crate) struct LaneWord {
    /// The SPI with key id 0.
    first: u32,
    /// The key id to try next; values past the last one wrap to 0.
    next: u32,
}

impl LaneWord {
    fn spi(&self, key_id: u32) -> u32 {
        self.first | (key_id % OVPN_KEY_IDS) << OVPN_KEY_ID_AT
    }
}

pub(crate) struct Shared {
    pub(crate) local: PeerId,
    pub(crate) config: Arc<Config>,
    pub(crate) rng: ChaCha20Rng,
    /// See [`crate::Hello::instance`].
    pub(crate) instance: u64,
    /// Inbound SAs of all peers.
    pub(crate) spis: BTreeMap<u32, PeerId>,
    /// Peer ids of format `ovpn` that paths hold, with or without an SA. No two paths share one, since a
    /// kernel's device knows its peers by them.
    words: BTreeSet<u32>,
    pub(crate) paths: BTreeMap<PathId, PeerId>,
    pub(crate) commands: VecDeque<EngineCommand>,
    pub(crate) messages: VecDeque<(PeerId, Message)>,
    pub(crate) changes: VecDeque<PathChange>,
    pub(crate) counters: Counters,
    next_path: u32,
    next_offer: u64,
}

impl Shared {
    pub(crate) fn new(local: PeerId, config: Config, seed: [u8; 32]) -> Self {
        let mut rng = ChaCha20Rng::from_seed(seed);
        let instance = rng.next_u64();
        Self {
            local,
            config: Arc::new(config.clamped()),
            rng,
            instance,
            spis: BTreeMap::new(),
            words: BTreeSet::new(),
            paths: BTreeMap::new(),
            commands: VecDeque::new(),
            messages: VecDeque::new(),
            changes: VecDeque::new(),
            counters: Counters::default(),
            next_path: 1,
            next_offer: 1,
        }
    }

    pub(crate) fn command(&mut self, command: EngineCommand) {
        self.commands.push_back(command);
    }

    pub(crate) fn message(&mut self, peer: PeerId, message: Message) {
        if self.messages.len() >= MESSAGES_QUEUED_MAX {
            self.counters.messages_dropped += 1;
        } else {
            self.messages.push_back((peer, message));
        }
    }

    pub(crate) fn change(&mut self, change: PathChange) {
        if self.changes.len() < CHANGES_QUEUED_MAX {
            self.changes.push_back(change);
        }
    }

    pub(crate) fn new_path(&mut self, peer: PeerId) -> PathId {
        let path = PathId(self.next_path);
        self.next_path = self.next_path.wrapping_add(1);
        self.paths.insert(path, peer);
        path
    }

    pub(crate) fn new_offer(&mut self) -> u64 {
        let offer = self.next_offer;
        self.next_offer += 1;
        offer
    }

    /// Returns an SPI of format `esp` that no inbound SA of this host has. The last byte is the lane, so
    /// that a receiver with several sockets finds the lane's without a table.
    pub(crate) fn new_spi(&mut self, peer: PeerId, lane: u16) -> u32 {
        loop {
            let spi = self.rng.next_u32() & !0xff | u32::from(lane & 0xff);
            if is_spi(Format::Esp, spi) && !self.spis.contains_key(&spi) {
                self.spis.insert(spi, peer);
                return spi;
            }
        }
    }

    /// Returns a peer id of format `ovpn` that no path of this host has and whose SPIs are all free. The
    /// last byte is the lane. `None`: no peer id is free.
    pub(crate) fn new_word(&mut self, lane: u16) -> Option<LaneWord> {
        let (random, lane) = (self.rng.next_u32(), u32::from(lane & 0xff));
        let mut words = (0..=0xffff).map(|step| {
            let peer_id = (random.wrapping_add(step) & 0xffff) << 8 | lane;
            LaneWord { first: OVPN_DATA_V2 | peer_id, next: 0 }
        });
        let word = words.find(|word| {
            let free = |key_id| !self.spis.contains_key(&word.spi(key_id));
            is_spi(Format::Ovpn, word.first)
                && !self.words.contains(&word.first)
                && (0..OVPN_KEY_IDS).all(free)
        })?;
        self.words.insert(word.first);
        Some(word)
    }

    /// The next free SPI of this word. `None`: an SA uses each of them.
    pub(crate) fn next_spi(&mut self, peer: PeerId, word: &mut LaneWord) -> Option<u32> {
        let mut key_ids = word.next..word.next + OVPN_KEY_IDS;
        let key_id = key_ids.find(|key_id| !self.spis.contains_key(&word.spi(*key_id)))?;
        word.next = (key_id + 1) % OVPN_KEY_IDS;
        let spi = word.spi(key_id);
        self.spis.insert(spi, peer);
        Some(spi)
    }

    /// Frees the peer id of a removed path. SAs that still drain keep their SPIs.
    pub(crate) fn free_word(&mut self, word: &LaneWord) {
        self.words.remove(&word.first);
    }

    pub(crate) fn nonce(&mut self) -> [u8; 32] {
        let mut nonce = [0; 32];
        self.rng.fill_bytes(&mut nonce);
        nonce
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn spis_are_what_their_format_can_bear_and_end_with_the_lane() {
        let peer = PeerId::from_bytes([7; 32]);
        let mut shared = Shared::new(peer, Config::default(), [3; 32]);
        for lane in (0..256).chain([0; 300]) {
            let mut word = shared.new_word(lane).unwrap();
            let spi = shared.next_spi(peer, &mut word).unwrap();
            for (format, spi) in [(Format::Esp, shared.new_spi(peer, lane)), (Format::Ovpn, spi)] {
                assert!(is_spi(format, spi) && spi & 0xff == u32::from(lane), "{spi:08x}");
            }
        }
        let spis = shared.spis.len();
        assert_eq!(spis, 2 * 556, "each is new");
        assert!(is_spi(Format::Ovpn, 0x4f00_0001) && !is_spi(Format::Ovpn, 0x5000_0001));
        assert!(!is_spi(Format::Ovpn, 0x48ff_ffff) && !is_spi(Format::Esp, 255));
    }

    #[test]
    fn a_lane_keeps_its_peer_id_and_takes_the_free_key_ids_in_turn() {
        let peer = PeerId::from_bytes([7; 32]);
        let mut shared = Shared::new(peer, Config::default(), [3; 32]);
        let mut word = shared.new_word(5).unwrap();
        let mut next = |shared: &mut Shared| shared.next_spi(peer, &mut word);
        let spis: Vec<u32> = (0..OVPN_KEY_IDS).map(|_| next(&mut shared).unwrap()).collect();
        for (key_id, spi) in (0..).zip(&spis) {
            assert_eq!((spi >> 24, spi & 0xff_ffff), (0x48 | key_id, spis[0] & 0xff_ffff));
        }
        assert_eq!(next(&mut shared), None, "each is in use");
        for freed in [3, 1] {
            shared.spis.remove(&spis[freed]);
        }
        assert_eq!(next(&mut shared), Some(spis[1]), "the count goes on from 0");
        assert_eq!(next(&mut shared), Some(spis[3]));
        shared.spis.remove(&spis[0]);
        shared.spis.remove(&spis[4]);
        assert_eq!(next(&mut shared), Some(spis[4]), "the count goes on");
    }

    /// Takes all peer ids that are left when only these are free.
    fn words_of(shared: &mut Shared, free: &[u32], lane: u16) -> BTreeSet<u32> {
        let all = (0..=0xffff_u32).map(|id| OVPN_DATA_V2 | id << 8 | u32::from(lane));
        shared.words = all.filter(|word| !free.contains(word)).collect();
        let words = std::iter::from_fn(|| shared.new_word(lane));
        words.map(|word| word.first).collect()
    }

    #[test]
    fn no_two_paths_have_one_peer_id_and_one_that_is_freed_comes_again() {
        let peer = PeerId::from_bytes([7; 32]);
        let mut shared = Shared::new(peer, Config::default(), [3; 32]);
        let free = [0x4800_1200, 0x4812_3400, 0x48ff_ff00];
        assert_eq!(words_of(&mut shared, &free, 0), BTreeSet::from(free));
        shared.free_word(&LaneWord { first: free[1], next: 0 });
        assert_eq!(shared.new_word(0).map(|word| word.first), Some(free[1]));
        // An SA of the other format has one of its SPIs.
        shared.spis.insert(0x4900_1200, peer);
        assert_eq!(words_of(&mut shared, &free, 0), BTreeSet::from([free[1], free[2]]));
        // This one says that there is none.
        let free = [0x48ff_ffff, 0x4800_12ff];
        assert_eq!(words_of(&mut shared, &free, 255), BTreeSet::from([free[1]]));
    }
}
