//! Decides which host founds the ranges of a network besides `weft`, and which one yields if two did.
//!
//! The founder owns the whole range under a random id. A founder that has given nothing is the only owner of its
//! id, so it may take the founding back without asking anybody.
//!
//! Before it gives anything, each linked host says that it has heard of the founding. That host founds no other from
//! then on. If it had founded another before, it has said so by then, and one of the two yields.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::{Change, Mesh, Output};
use crate::limits::{RANGE_FOUND_ALONE_MS, RANGE_FOUND_SETTLE_MS, RANGE_HEARD_MS};

/// The progress of founding.
#[derive(Debug, Default)]
pub(crate) struct RangeFounding {
    /// Since when this host wants ranges and knows of no founding.
    wanted_at: Option<Instant>,
    due_at: Option<Instant>,
    /// When this host founded, if in this run.
    founded_at: Option<Instant>,
    /// Until when this host waits for members without a link, if the founding may be of its last run.
    alone_until: Option<Instant>,
    /// Until when requests wait for hosts that have not said that they have heard of the founding.
    unheard_until: Option<Instant>,
    /// Requests for ranges that wait for that, one of each host.
    asked: BTreeMap<PeerId, (u64, Ipv4Net)>,
}

impl RangeFounding {
    /// That of the last run, if there was one.
    pub(crate) fn restore(now: Instant) -> Self {
        let alone_until = Some(now + Duration::from_millis(RANGE_FOUND_ALONE_MS));
        Self { alone_until, ..Self::default() }
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        [self.due_at, self.unheard_until].into_iter().flatten().min()
    }

    pub(crate) fn peer_gone(&mut self, peer: PeerId) {
        self.asked.remove(&peer);
    }

    /// Keeps a request until something of the founding may be given.
    pub(crate) fn answer_later(&mut self, peer: PeerId, request: u64, within: Ipv4Net) {
        self.asked.insert(peer, (request, within));
    }
}

impl Mesh {
    /// Founds the ranges of a network besides `weft`, or answers those that waited for the founding to be heard of.
    pub(crate) fn drive_range_founding(&mut self, now: Instant, vni: Vni) {
        let Some(ledger) = self.state.ledger(vni).filter(|_| vni != Vni::WEFT) else { return };
        match ledger.network {
            None => self.drive_open_founding(now, vni),
            Some(_) => self.drive_unheard(now, vni),
        }
    }

    /// Answers requests for ranges once linked hosts have heard of this host's founding.
    fn drive_unheard(&mut self, now: Instant, vni: Vni) {
        let founding = &mut self.space(vni).founding;
        founding.unheard_until = None;
        let asked = !founding.asked.is_empty();
        if !asked && !self.pending.values().any(|pending| pending.is_of(vni)) {
            return;
        }
        let until = self.unheard_until(now, vni);
        let founding = &mut self.space(vni).founding;
        founding.unheard_until = until;
        if until.is_none() {
            for (peer, (request, within)) in std::mem::take(&mut founding.asked) {
                self.handle_range_request(now, (peer, vni), request, within);
            }
        }
    }

    /// Until when nothing is given of a founding that is untouched so far: a linked host has not said that it has heard
    /// of it. `None`: it may be given.
    pub(crate) fn unheard_until(&self, now: Instant, vni: Vni) -> Option<Instant> {
        let ledger = self.state.ledger(vni).filter(|_| vni != Vni::WEFT)?;
        let id = ledger.network_id().filter(|_| !ledger.is_touched())?;
        let founding = self.spaces.get(&vni).map(|space| &space.founding);
        let (founded_at, alone_until) =
            founding.map_or((None, None), |it| (it.founded_at, it.alone_until));
        let limit = Duration::from_millis(RANGE_HEARD_MS);
        let until = |peer: PeerId| match self.links.get(&peer) {
            None => alone_until,
            Some(link) if link.networks.has_heard(id) => None,
            Some(link) => Some(founded_at.map_or(link.since, |at| at.max(link.since)) + limit),
        };
        let last = self.members.iter().filter_map(|(peer, _)| until(peer)).max();
        last.filter(|at| *at > now)
    }

    /// Founds the ranges of a network if no linked host has any.
    fn drive_open_founding(&mut self, now: Instant, vni: Vni) {
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
            *founding = RangeFounding { founded_at: Some(now), ..RangeFounding::default() };
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
        self.space(vni).announced.retain_founding(id);
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
                let theirs = self.theirs_if_equal(*peer, vni);
                let theirs = theirs.filter(|theirs| !theirs.resting && !theirs.unsure);
                let Some(theirs) = theirs else { return false };
                let apart = theirs.founding.filter(|theirs| theirs.id != ours.id);
                apart.is_some_and(|it| theirs.used || it.id < ours.id)
            });
            if stronger && let Some(ledger) = self.state.ledger_mut(vni) {
                ledger.dissolve();
                self.dirty = true;
                self.space(vni).founding = RangeFounding::default();
            }
        }
    }
}
