//! Traffic of the kernel's SAs by peer. The kernel counts by SA, and an SA lives an hour.

use std::collections::BTreeMap;

use weft_crypto::PeerId;

use super::sa::{SaOf, Way};
use crate::xfrm::{StateId, StateUsage};

/// Traffic of SAs of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Packets sealed, or opened and found authentic and new.
    pub packets: u64,
    /// Their bytes, as the kernel counts them against an SA's lifetime or for a peer of the data channel.
    /// They include VXLAN, UDP and perhaps IP headers.
    pub bytes: u64,
}

/// The traffic with one peer over the kernel engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerTraffic {
    /// From the peer.
    pub received: Carried,
    /// To the peer.
    pub sent: Carried,
    /// Packets from the peer that were seen before or are behind the window.
    pub replayed: u64,
    /// Packets from the peer that were not authentic.
    pub forged: u64,
}

/// Adds up readings, so that no peer's sum shrinks when an SA is replaced. An SA that lived and was replaced
/// between two readings is not counted. Traffic before the first reading is counted.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// SAs by the last reading.
    seen: BTreeMap<StateId, (SaOf, StateUsage)>,
    /// Traffic of SAs that are gone.
    past: BTreeMap<PeerId, PeerTraffic>,
}

impl Ledger {
    /// SAs that were there at the last reading.
    pub(super) fn seen(&self) -> impl Iterator<Item = (StateId, SaOf)> {
        self.seen.iter().map(|(id, (of, _))| (*id, *of))
    }

    /// The peer and direction of this SA at the last reading.
    pub(super) fn of(&self, id: &StateId) -> Option<SaOf> {
        self.seen.get(id).map(|(of, _)| *of)
    }

    /// Takes a reading; `None` for an SA that the kernel does not have.
    pub(super) fn note(&mut self, id: StateId, of: SaOf, usage: Option<StateUsage>) {
        let began_anew = |before: &StateUsage| usage.is_none_or(|now| now.packets < before.packets);
        if let Some((of, before)) = self.seen.get(&id).copied()
            && began_anew(&before)
        {
            add(self.past.entry(of.0).or_default(), of.1, &before);
            self.seen.remove(&id);
        }
        if let Some(usage) = usage {
            self.seen.insert(id, (of, usage));
        }
    }

    /// The sums by peer; peers that `is_known` denies are forgotten.
    pub(super) fn sums(
        &mut self,
        is_known: impl Fn(&PeerId) -> bool,
    ) -> Vec<(PeerId, PeerTraffic)> {
        self.past.retain(|peer, _| is_known(peer));
        self.seen.retain(|_, ((peer, _), _)| is_known(peer));
        let mut sums = self.past.clone();
        for ((peer, way), usage) in self.seen.values() {
            add(sums.entry(*peer).or_default(), *way, usage);
        }
        sums.into_iter().collect()
    }
}

fn add(sum: &mut PeerTraffic, way: Way, usage: &StateUsage) {
    let carried = match way {
        Way::In => &mut sum.received,
        Way::Out => &mut sum.sent,
    };
    carried.packets += usage.packets;
    carried.bytes += usage.bytes;
    sum.replayed += usage.replays;
    sum.forged += usage.integrity_failures;
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerId = PeerId::from_bytes([9; 32]);
    const OTHER: PeerId = PeerId::from_bytes([8; 32]);

    fn id(spi: u32) -> StateId {
        StateId { destination: std::net::Ipv4Addr::LOCALHOST.into(), spi }
    }

    fn usage(packets: u64, bytes: u64) -> Option<StateUsage> {
        Some(StateUsage { packets, bytes, ..StateUsage::default() })
    }

    #[test]
    fn a_peers_sum_never_shrinks_while_it_is_known() {
        let mut ledger = Ledger::default();
        let sum = |ledger: &mut Ledger| {
            let sums = ledger.sums(|_| true);
            sums.iter().find(|(peer, _)| *peer == PEER).map(|(_, sum)| *sum).unwrap_or_default()
        };
        ledger.note(id(1), (PEER, Way::Out), usage(5, 500));
        ledger.note(id(2), (PEER, Way::In), usage(7, 700));
        ledger.note(id(3), (OTHER, Way::In), usage(100, 100));
        let before = sum(&mut ledger);
        assert_eq!(before.sent, Carried { packets: 5, bytes: 500 });
        assert_eq!(before.received, Carried { packets: 7, bytes: 700 });
        // A rekey: the old SA is read once more, then it is gone.
        ledger.note(id(4), (PEER, Way::Out), usage(1, 100));
        ledger.note(id(1), (PEER, Way::Out), usage(6, 600));
        assert_eq!(sum(&mut ledger).sent, Carried { packets: 7, bytes: 700 });
        ledger.note(id(1), (PEER, Way::Out), None);
        assert_eq!(sum(&mut ledger).sent, Carried { packets: 7, bytes: 700 });
        ledger.note(id(1), (PEER, Way::Out), None);
        // A new SA under the id of a removed SA.
        ledger.note(id(4), (PEER, Way::Out), usage(0, 0));
        assert_eq!(sum(&mut ledger).sent, Carried { packets: 7, bytes: 700 });
        assert_eq!(ledger.seen().count(), 3);
        assert_eq!(ledger.sums(|peer| *peer == OTHER).len(), 1);
        assert_eq!(ledger.seen().count(), 1);
    }

    #[test]
    fn refusals_of_the_kernel_are_counted_for_the_peer() {
        let mut ledger = Ledger::default();
        let reading = StateUsage { replays: 2, integrity_failures: 3, ..StateUsage::default() };
        ledger.note(id(1), (PEER, Way::In), Some(reading));
        let sums = ledger.sums(|_| true);
        assert_eq!((sums[0].1.replayed, sums[0].1.forged), (2, 3));
    }
}
