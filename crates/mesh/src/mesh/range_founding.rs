//! Decides which host founds the ranges of a network besides `weft`, and which one yields if two did.
//!
//! The founder owns the whole range under a random id. A founder that has given nothing is the only owner of its
//! id, so it may take the founding back without asking anybody.

use std::time::{Duration, Instant};

use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::{Change, Mesh, Output};
use crate::limits::{RANGE_FOUND_ALONE_MS, RANGE_FOUND_SETTLE_MS};

/// The progress of founding.
#[derive(Debug, Default)]
pub(crate) struct RangeFounding {
    /// Since when this host wants ranges and knows of no founding.
    wanted_at: Option<Instant>,
    due_at: Option<Instant>,
}

impl RangeFounding {
    pub(crate) fn next(&self) -> Option<Instant> {
        self.due_at
    }
}

impl Mesh {
    /// Founds the ranges of a network if no linked host has any.
    pub(crate) fn drive_range_founding(&mut self, now: Instant, vni: Vni) {
        let open = self.state.ledger(vni).is_some_and(|ledger| ledger.network.is_none());
        if !open || vni == Vni::WEFT {
            return;
        }
        let may = self.wants_ranges(vni)
            && self.state.networks.get(&vni).is_some_and(|saved| saved.created)
            && self.standing.is_sure()
            && self.storage.failure().is_none()
            && !self.knows_founding(vni);
        if !may {
            self.space(vni).founding = RangeFounding::default();
            return;
        }
        let told = if self.all_have_told() { RANGE_FOUND_SETTLE_MS } else { RANGE_FOUND_ALONE_MS };
        let turn = if self.waits_for_founder(vni) { RANGE_FOUND_ALONE_MS } else { 0 };
        let wait = told + turn;
        let founding = &mut self.space(vni).founding;
        let due_at = *founding.wanted_at.get_or_insert(now) + Duration::from_millis(wait);
        founding.due_at = Some(due_at);
        if due_at <= now {
            *founding = RangeFounding::default();
            self.found_ranges(vni);
        }
    }

    /// A linked host with a lower id has the network too, and no ranges yet: it founds them.
    fn waits_for_founder(&self, vni: Vni) -> bool {
        let lower = self.links.keys().copied().filter(|peer| *peer < self.config.local);
        let holds = |peer: PeerId| self.theirs(peer, vni).is_some_and(|theirs| !theirs.resting);
        lower.into_iter().any(|peer| self.shares(peer, vni) && holds(peer))
    }

    fn found_ranges(&mut self, vni: Vni) {
        let Some(saved) = self.state.networks.get(&vni) else { return };
        let range6 = saved.definition.range6;
        let network = self.new_network_with(range6);
        let Some(ledger) = self.state.ledger_mut(vni) else { return };
        ledger.found(network);
        self.dirty = true;
        self.emit(Output::Changed(Change::RangesFounded { vni, network }));
        self.on_founding(vni);
    }

    /// This host's ranges of a network have got a founding.
    pub(crate) fn on_founding(&mut self, vni: Vni) {
        let Some(id) = self.state.ledger(vni).and_then(|ledger| ledger.network_id()) else {
            return;
        };
        self.space(vni).announced.retain(|_, (announcement, _)| announcement.network == id);
        self.networks.changed = true;
        for peer in self.sharers(vni) {
            self.send_ranges(peer, vni);
        }
    }

    /// Takes foundings back of which nothing is given, where another host has one of which something is, or one
    /// with a lower id.
    pub(crate) fn yield_foundings(&mut self) {
        if !self.standing.is_sure() {
            return;
        }
        for vni in self.allocators().into_iter().filter(|vni| *vni != Vni::WEFT) {
            let Some(ledger) = self.state.ledger(vni) else { continue };
            let Some(ours) = ledger.network.filter(|_| !ledger.is_touched()) else { continue };
            let stronger = self.links.keys().any(|peer| {
                let theirs = self.theirs_if_equal(*peer, vni).filter(|theirs| !theirs.resting);
                let Some(theirs) = theirs else { return false };
                let apart = theirs.founding.filter(|theirs| theirs.id != ours.id);
                apart.is_some_and(|it| theirs.used || it.id < ours.id)
            });
            if stronger && let Some(ledger) = self.state.ledger_mut(vni) {
                ledger.dissolve();
                self.dirty = true;
            }
        }
    }
}
