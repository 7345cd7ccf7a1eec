//! Peers that this host is or was linked with.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;

use weft_crypto::PeerId;

use crate::limits::KNOWN_PEERS_MAX;

/// Peers admitted since the start, and the last address of each.
#[derive(Default)]
pub(crate) struct Known {
    peers: HashMap<PeerId, SocketAddr>,
    /// The oldest first.
    order: VecDeque<PeerId>,
}

impl Known {
    pub(crate) fn contains(&self, peer: PeerId) -> bool {
        self.peers.contains_key(&peer)
    }

    /// The last address of each peer.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.peers.values().copied()
    }

    pub(crate) fn note(&mut self, peer: PeerId, remote: SocketAddr) {
        if self.peers.insert(peer, remote).is_none() {
            self.order.push_back(peer);
            if self.order.len() > KNOWN_PEERS_MAX {
                self.order.pop_front().map(|oldest| self.peers.remove(&oldest));
            }
        }
    }

    pub(crate) fn forget(&mut self, peer: PeerId) {
        self.peers.remove(&peer);
        self.order.retain(|known| *known != peer);
    }
}
