//! Clashes of this host's networks with those of its peers: found, listed, and told.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::are_apart;
use crate::limits::{CLASHES_TOLD_PER_PEER_MAX, CLASHES_TOLD_PERIOD_S};
use crate::mesh::{Change, Mesh, Output};
use crate::message::Holding;
use crate::network::{NetworkClash, NetworkDefinition};

/// The clashes that last, and how many were told.
#[derive(Debug, Default)]
pub(super) struct Clashes {
    /// By the VNI of this host's network.
    all: BTreeMap<Vni, BTreeSet<NetworkClash>>,
    told: BTreeMap<PeerId, Told>,
}

/// The clashes with one peer that were told since a moment.
#[derive(Debug)]
struct Told {
    since: Instant,
    count: usize,
}

impl Clashes {
    /// Takes the clashes of now, and returns the new ones that are worth telling.
    fn replace(
        &mut self,
        now: Instant,
        all: BTreeMap<Vni, BTreeSet<NetworkClash>>,
    ) -> Vec<NetworkClash> {
        let before = std::mem::replace(&mut self.all, all);
        let is_new = |vni: &Vni, clash: &NetworkClash| {
            before.get(vni).is_none_or(|before| !before.contains(clash))
        };
        let now_all = self.all.iter().flat_map(|(vni, all)| all.iter().map(move |it| (vni, it)));
        let new = now_all.filter(|(vni, clash)| is_new(vni, clash)).map(|(_, clash)| clash);
        let period = Duration::from_secs(CLASHES_TOLD_PERIOD_S);
        self.told.retain(|_, told| now.saturating_duration_since(told.since) < period);
        let told = &mut self.told;
        let mut may_tell = |peer: PeerId| {
            let told = told.entry(peer).or_insert(Told { since: now, count: 0 });
            told.count += 1;
            told.count <= CLASHES_TOLD_PER_PEER_MAX
        };
        new.filter(|clash| may_tell(clash.peer())).cloned().collect()
    }
}

impl Mesh {
    /// The clashes of the network that this host holds under a VNI.
    pub(super) fn clashes_of(&self, vni: Vni) -> impl Iterator<Item = &NetworkClash> {
        self.networks.clashes.all.get(&vni).into_iter().flatten()
    }

    /// The clashes that a network has, or would have, with those of other hosts.
    pub(super) fn clashes_with<'a>(
        &'a self,
        ours: &'a NetworkDefinition,
    ) -> impl Iterator<Item = NetworkClash> + 'a {
        let theirs = self.networks.theirs.iter();
        let like = theirs.flat_map(move |(peer, it)| it.like(ours).map(move |it| (*peer, it)));
        let held = like.filter(|(_, theirs)| !theirs.resting);
        held.filter_map(move |(peer, theirs)| self.clash_between(ours, peer, theirs))
    }

    fn clash_between(
        &self,
        ours: &NetworkDefinition,
        peer: PeerId,
        theirs: &Holding,
    ) -> Option<NetworkClash> {
        let host = || self.name_of(peer);
        if *ours != theirs.definition {
            return NetworkClash::between(ours, &theirs.definition, peer, host);
        }
        let founding = self.state.ledger(self.held_as(ours)?)?.network;
        let apart = are_apart(founding, theirs.founding);
        let network = ours.name.clone();
        apart.then(|| NetworkClash::Founding { peer, host: host(), network })
    }

    pub(super) fn find_clashes(&mut self, now: Instant) {
        let own = self.state.networks.iter().filter(|(_, saved)| !saved.resting);
        let all = own.map(|(vni, saved)| (*vni, self.clashes_with(&saved.definition).collect()));
        let all = all.filter(|(_, clashes): &(Vni, BTreeSet<_>)| !clashes.is_empty()).collect();
        for clash in self.networks.clashes.replace(now, all) {
            self.emit(Output::Changed(Change::NetworkClash(clash)));
        }
    }
}
