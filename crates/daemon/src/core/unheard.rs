//! Peers whose packets this host's kernel opens, and whose probes do not come through: a firewall of this
//! host drops them. A peer that is not linked sends no probes, though its kernel may go on with frames.

use std::collections::BTreeSet;

use weft_crypto::PeerId;
use weft_path::EngineEvent;

/// The peers of which the log says so.
#[derive(Default)]
pub(crate) struct Unheard(BTreeSet<PeerId>);

impl Unheard {
    /// The peer to tell the log of, if that is news.
    pub(crate) fn handle(
        &mut self,
        event: &EngineEvent,
        is_linked: impl Fn(&PeerId) -> bool,
    ) -> Option<PeerId> {
        match event {
            EngineEvent::Unheard { peer, .. } if is_linked(peer) => {
                self.0.insert(*peer).then_some(*peer)
            }
            EngineEvent::ProbeReceived { peer, .. } => {
                self.0.remove(peer);
                None
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use weft_path::PathId;

    use super::*;

    #[test]
    fn a_linked_peer_is_told_of_once_until_it_is_heard() {
        let (peer, path) = (PeerId::from_bytes([7; 32]), PathId(1));
        let silent = EngineEvent::Unheard { peer, path };
        let probe =
            EngineEvent::ProbeReceived { peer, path, probe: 1, mtu: 1_388, candidate: true };
        let mut unheard = Unheard::default();
        assert_eq!(unheard.handle(&silent, |_| false), None, "its daemon has ended");
        for _ in 0..2 {
            assert_eq!(unheard.handle(&silent, |_| true), Some(peer));
            assert_eq!(unheard.handle(&silent, |_| true), None);
            assert_eq!(unheard.handle(&probe, |_| true), None);
        }
    }
}
