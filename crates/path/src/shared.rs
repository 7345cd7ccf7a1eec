//! What all peers of a host share: settings, the random source, the SPIs, and what goes out.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha20Rng;
use weft_crypto::{Format, PeerId};

use crate::config::{CHANGES_QUEUED_MAX, Config, MESSAGES_QUEUED_MAX};
use crate::message::Message;
use crate::seam::{EngineCommand, PathId};
use crate::status::{Counters, PathChange};

/// The opcode in the first word of a packet of format `ovpn`, and DATA_V2 there.
const OVPN_OPCODE_MASK: u32 = 0xf800_0000;
const OVPN_DATA_V2: u32 = 9 << 27;
/// The peer id that says that there is none.
const OVPN_NO_PEER: u32 = 0xff_ffff;

/// Whether packets of this format can bear it: RFC 4303 section 2.1 reserves SPIs below 256; in format
/// `ovpn` it is the first word, DATA_V2 with a key id and a peer id.
pub(crate) const fn is_spi(format: Format, spi: u32) -> bool {
    match format {
        Format::Ovpn => {
            spi & OVPN_OPCODE_MASK == OVPN_DATA_V2 && spi & OVPN_NO_PEER != OVPN_NO_PEER
        }
        Format::Esp | Format::Plain => spi >= 256,
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

    /// An SPI that no inbound SA of this host has. The last byte is the lane's, so that a receiver with
    /// several sockets finds the lane's without a table.
    pub(crate) fn new_spi(&mut self, peer: PeerId, format: Format, lane: u16) -> u32 {
        loop {
            let spi = self.rng.next_u32() & !0xff | u32::from(lane & 0xff);
            let spi = match format {
                Format::Ovpn => spi & !OVPN_OPCODE_MASK | OVPN_DATA_V2,
                _ => spi,
            };
            if is_spi(format, spi) && !self.spis.contains_key(&spi) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spis_are_what_their_format_can_bear_and_end_with_the_lane() {
        let peer = PeerId::from_bytes([7; 32]);
        let mut shared = Shared::new(peer, Config::default(), [3; 32]);
        for lane in (0..256).chain([0; 300]) {
            for format in [Format::Esp, Format::Ovpn] {
                let spi = shared.new_spi(peer, format, lane);
                assert!(is_spi(format, spi) && spi & 0xff == u32::from(lane), "{spi:08x}");
            }
        }
        let spis = shared.spis.len();
        assert_eq!(spis, 2 * 556, "each is new");
        assert!(is_spi(Format::Ovpn, 0x4f00_0001) && !is_spi(Format::Ovpn, 0x5000_0001));
        assert!(!is_spi(Format::Ovpn, 0x48ff_ffff) && !is_spi(Format::Esp, 255));
    }
}
