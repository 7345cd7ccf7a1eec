//! The addresses to which frames leave by direct ports and shortcuts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use weft_crypto::PeerId;
use weft_io::redirect::MacSet;
use weft_path::{Endpoint, Mac};

/// Maintains the set of addresses to which frames leave by direct ports and shortcuts: endpoints at peers that
/// the vector engine carries. All others go through the switch. The attachments add the senders.
pub(crate) struct RemoteMacs {
    macs: Option<Arc<MacSet>>,
    peers: BTreeMap<PeerId, BTreeSet<Mac>>,
    at: BTreeMap<Mac, PeerId>,
    /// Peers whose frames the vector engine carries.
    carried: BTreeSet<PeerId>,
}

impl RemoteMacs {
    pub(crate) fn new(macs: Option<Arc<MacSet>>) -> Self {
        let (peers, at, carried) = Default::default();
        Self { macs, peers, at, carried }
    }

    /// Removes endpoints; call it before the engines forget them.
    pub(crate) fn remove(&mut self, macs: &[Mac]) {
        for mac in macs {
            if let Some(peer) = self.at.remove(mac) {
                self.peers.entry(peer).or_default().remove(mac);
                self.set(*mac, false);
            }
        }
    }

    /// Adds endpoints and their peers; call it once the engines know them.
    pub(crate) fn add(&mut self, endpoints: &[(Endpoint, PeerId)]) {
        for (Endpoint { mac, .. }, peer) in endpoints {
            if let Some(before) = self.at.insert(*mac, *peer) {
                self.peers.entry(before).or_default().remove(mac);
            }
            self.peers.entry(*peer).or_default().insert(*mac);
            self.set(*mac, self.carried.contains(peer));
        }
    }

    /// Records whether the vector engine carries a peer's frames now.
    pub(crate) fn carry(&mut self, peer: PeerId, carried: bool) {
        let changed = if carried { self.carried.insert(peer) } else { self.carried.remove(&peer) };
        if changed {
            for mac in self.peers.get(&peer).into_iter().flatten() {
                self.set(*mac, carried);
            }
        }
    }

    /// Forgets a peer and its endpoints.
    pub(crate) fn forget(&mut self, peer: PeerId) {
        self.carry(peer, false);
        for mac in self.peers.remove(&peer).unwrap_or_default() {
            self.at.remove(&mac);
        }
    }

    /// Frames for addresses outside the set take the switch, so a failed insert costs only speed. A failed
    /// removal can lose frames.
    fn set(&self, mac: Mac, wanted: bool) {
        let Some(macs) = &self.macs else { return };
        let result = if wanted { macs.insert(mac.0).map(|_| ()) } else { macs.remove(mac.0) };
        if let Err(error) = result {
            tracing::warn!(%error, %mac, wanted, "cannot update the addresses of direct ports and shortcuts");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const NONE: [u8; 0] = [];

    fn endpoint(number: u8) -> Endpoint {
        Endpoint { mac: Mac([2, 0, 0, 0, 0, number]), addresses: Vec::new() }
    }

    #[test]
    fn the_set_holds_endpoints_of_peers_that_the_vector_engine_carries() {
        let set =
            MacSet::new().map(Arc::new).expect("this test makes an eBPF map and must run as root");
        let mut remote = RemoteMacs::new(Some(Arc::clone(&set)));
        let [near, far] = [1, 2].map(|byte| PeerId::from_bytes([byte; 32]));
        let held = || -> Vec<u8> {
            (1..=4).filter(|n| set.contains(endpoint(*n).mac.0).unwrap()).collect()
        };
        remote.add(&[(endpoint(1), near), (endpoint(2), far)]);
        assert_eq!(held(), NONE);
        remote.carry(near, true);
        assert_eq!(held(), [1]);
        remote.add(&[(endpoint(3), near), (endpoint(4), far)]);
        assert_eq!(held(), [1, 3]);
        // A container moves to a peer that the kernel engine carries, and to one of the vector engine.
        remote.add(&[(endpoint(3), far), (endpoint(4), near)]);
        assert_eq!(held(), [1, 4]);
        remote.carry(far, true);
        assert_eq!(held(), [1, 2, 3, 4]);
        remote.carry(near, false);
        assert_eq!(held(), [2, 3]);
        remote.remove(&[endpoint(2).mac, endpoint(2).mac]);
        assert_eq!(held(), [3]);
        remote.forget(far);
        assert_eq!(held(), NONE);
        remote.carry(far, true);
        assert_eq!(held(), NONE);
    }
}
