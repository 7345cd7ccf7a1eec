//! What all peers of a host share: settings, the random source, the SPIs, and what goes out.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha20Rng;
use weft_crypto::PeerId;

use crate::config::{CHANGES_QUEUED_MAX, Config, MESSAGES_QUEUED_MAX};
use crate::message::Message;
use crate::seam::{EngineCommand, PathId};
use crate::status::{Counters, PathChange};

pub(crate) struct Shared {
    pub(crate) local: PeerId,
    pub(crate) config: Arc<Config>,
    pub(crate) rng: ChaCha20Rng,
    /// See [`crate::Hello::instance`].
    pub(crate) instance: u64,
    /// Inbound SAs of all peers.
    pub(crate) spis: BTreeMap<u32, PeerId>,
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

    /// An SPI that no inbound SA of this host has (RFC 4303 section 2.1 reserves those below 256).
    /// The last byte is the lane's, so that a receiver with several sockets finds the lane's without
    /// a table.
    pub(crate) fn new_spi(&mut self, peer: PeerId, lane: u16) -> u32 {
        loop {
            let spi = self.rng.next_u32() & !0xff | u32::from(lane & 0xff);
            if spi >= 256 && !self.spis.contains_key(&spi) {
                self.spis.insert(spi, peer);
                return spi;
            }
        }
    }

    pub(crate) fn nonce(&mut self) -> [u8; 32] {
        let mut nonce = [0; 32];
        self.rng.fill_bytes(&mut nonce);
        nonce
    }
}
