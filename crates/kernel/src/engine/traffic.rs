//! Reads the traffic of SAs into the ledger.

use std::collections::BTreeMap;

use weft_crypto::PeerId;

use super::channel;
use super::ledger::{Ledger, PeerTraffic};
use super::sa::SaOf;
use super::worker::{Ipsec, Worker};
use crate::xfrm::StateId;

impl Worker {
    /// Reads the traffic of every SA, including SAs replaced since the last reading.
    pub(super) async fn traffic(&mut self) -> Vec<(PeerId, PeerTraffic)> {
        let Some(ipsec) = &self.ipsec else { return Vec::new() };
        let seen = self.ledger.seen().filter(|(id, _)| !channel::is_channels(id));
        let mut sas: BTreeMap<StateId, SaOf> = seen.collect();
        sas.extend(self.state.sas());
        Self::read(ipsec, &mut self.ledger, sas).await;
        self.note_channel_traffic().await;
        self.ledger.sums(|peer| self.state.knows(peer))
    }

    /// Reads the traffic of SAs that are about to go, for peers whose traffic was ever requested.
    pub(super) async fn read_last(&mut self, states: &[StateId]) {
        let Some(ipsec) = &self.ipsec else { return };
        let of = |id: &StateId| Some((*id, self.ledger.of(id)?));
        let sas: BTreeMap<StateId, SaOf> = states.iter().filter_map(of).collect();
        if !sas.is_empty() {
            Self::read(ipsec, &mut self.ledger, sas).await;
        }
    }

    async fn read(ipsec: &Ipsec, ledger: &mut Ledger, sas: BTreeMap<StateId, SaOf>) {
        let ids: Vec<StateId> = sas.keys().copied().collect();
        let readings = ipsec.xfrm.usage(&ids).await;
        for ((id, of), reading) in sas.into_iter().zip(readings) {
            match reading {
                Ok(usage) => ledger.note(id, of, usage),
                Err(error) => tracing::debug!(%error, spi = id.spi, "cannot read an SA's counters"),
            }
        }
    }
}
