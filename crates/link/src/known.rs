//! Known peers: those that this host is or was linked with, or dials.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use weft_crypto::PeerId;

use crate::gate::Standing;
use crate::limits::KNOWN_PEERS_MAX;
use crate::shared::{Dial, State};

/// Peers admitted since the start, and the last address of each.
#[derive(Default)]
pub(crate) struct Known {
    peers: HashMap<PeerId, SocketAddr>,
    /// The oldest first.
    order: VecDeque<PeerId>,
}

impl Known {
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

impl State {
    /// Whether the owner of a key has been admitted, or is dialled.
    pub(crate) fn knows(&self, peer: PeerId) -> bool {
        !self.refused.contains_key(&peer)
            && (self.known.peers.contains_key(&peer)
                || self.links.contains_key(&peer)
                || self.dials.values().any(|dial| dial.is_for(peer)))
    }

    /// How well an address is known.
    pub(crate) fn standing(&self, remote: SocketAddr) -> Standing {
        let met = self.known.peers.values().copied();
        let linked = self.links.values().map(crate::session::Link::remote);
        let dialled = self.dials.values().flat_map(addresses_of);
        let mut standing = Standing::Stranger;
        for known in met.chain(linked).chain(dialled) {
            if known == remote {
                return Standing::Socket;
            }
            if known.ip() == remote.ip() {
                standing = Standing::Host;
            }
        }
        standing
    }
}

/// The addresses of a dial that need no lookup.
fn addresses_of(dial: &Dial) -> Vec<SocketAddr> {
    let named = dial.target.host.parse::<IpAddr>().ok();
    let named = named.map(|ip| SocketAddr::new(ip.to_canonical(), dial.target.port));
    dial.addresses.iter().copied().chain(named).collect()
}
