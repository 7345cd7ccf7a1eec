//! Peers whose packets this host's kernel opens but whose probes do not arrive: a firewall of this host
//! drops them. An unlinked peer sends no probes, although its kernel may still send frames.

use std::collections::BTreeSet;

use weft_crypto::PeerId;
use weft_path::EngineEvent;

/// The peers already reported in the log.
#[derive(Default)]
pub(crate) struct Unheard(BTreeSet<PeerId>);

impl Unheard {
    /// The peer to report in the log, if it was not reported yet.
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
