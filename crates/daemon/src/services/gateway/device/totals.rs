//! Traffic of all peers that there were, also of those that are gone.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use weft_openvpn::device::PeerState;

/// Ended peers that are remembered, so that an older list does not count them twice.
const ENDED_MAX: usize = 65_536;

/// Bytes received and sent outside.
type Bytes = (u64, u64);

/// Bytes of all peers on the wire since the device was made. A peer that the gateway ends is read once more before. A
/// peer that the device ends is counted as of the last look.
#[derive(Default)]
pub(super) struct Totals(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    gone: Bytes,
    /// As they were seen last.
    live: HashMap<u32, Bytes>,
    ended: HashSet<u32>,
}

impl Totals {
    /// The sum with these peers, which are all that there are.
    pub(super) fn look(&self, peers: &[PeerState]) -> Bytes {
        let mut inner = self.lock();
        let of = |peer: &PeerState| (peer.id, (peer.link.rx_bytes, peer.link.tx_bytes));
        let is_there = |(id, _): &(u32, Bytes)| !inner.ended.contains(id);
        let live: HashMap<u32, Bytes> = peers.iter().map(of).filter(is_there).collect();
        let before = std::mem::replace(&mut inner.live, live);
        let lost = before.into_iter().filter(|(id, _)| !inner.live.contains_key(id));
        inner.gone = lost.fold(inner.gone, |sum, (_, bytes)| add(sum, bytes));
        inner.live.values().fold(inner.gone, |sum, bytes| add(sum, *bytes))
    }

    /// A peer is being ended.
    pub(super) fn end(&self, peer: &PeerState) {
        let mut inner = self.lock();
        if inner.ended.len() >= ENDED_MAX {
            inner.ended.clear();
        }
        if inner.ended.insert(peer.id) {
            inner.live.remove(&peer.id);
            inner.gone = add(inner.gone, (peer.link.rx_bytes, peer.link.tx_bytes));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const fn add(one: Bytes, other: Bytes) -> Bytes {
    (one.0.saturating_add(other.0), one.1.saturating_add(other.1))
}

#[cfg(test)]
mod tests {
    use weft_openvpn::device::Traffic;

    use super::*;

    fn peer(id: u32, rx_bytes: u64, tx_bytes: u64) -> PeerState {
        let link = Traffic { rx_bytes, tx_bytes, ..Traffic::default() };
        PeerState { id, link, ..PeerState::default() }
    }

    #[test]
    fn peers_that_are_gone_count_once() {
        let totals = Totals::default();
        assert_eq!(totals.look(&[peer(1, 10, 1), peer(2, 20, 2)]), (30, 3));
        // The gateway ends one, whose last bytes count; a list from before knows it yet.
        totals.end(&peer(1, 15, 1));
        assert_eq!(totals.look(&[peer(1, 10, 1), peer(2, 20, 2)]), (35, 3));
        totals.end(&peer(1, 15, 1));
        // The device ends the other, which counts as it was seen last.
        assert_eq!(totals.look(&[peer(2, 25, 2)]), (40, 3));
        assert_eq!(totals.look(&[]), (40, 3));
        assert_eq!(totals.look(&[peer(3, 5, 5)]), (45, 8));
    }
}
