//! Clashes of this host's networks with those of its peers: found, listed, and told.

use std::collections::BTreeSet;

use weft_crypto::PeerId;

use super::are_apart;
use crate::mesh::{Change, Mesh, Output};
use crate::message::Holding;
use crate::network::{NetworkClash, NetworkDefinition};

impl Mesh {
    pub(super) fn clashes_of<'a>(
        &'a self,
        definition: &'a NetworkDefinition,
    ) -> impl Iterator<Item = &'a NetworkClash> {
        self.networks.clashes.iter().filter(move |clash| match clash {
            NetworkClash::Definition { ours, .. } => ours.name == definition.name,
            NetworkClash::Founding { network, .. } => *network == definition.name,
            NetworkClash::Vni { ours, .. } => *ours == definition.name,
        })
    }

    /// The clashes that a network has, or would have, with those of other hosts.
    pub(super) fn clashes_with<'a>(
        &'a self,
        ours: &'a NetworkDefinition,
    ) -> impl Iterator<Item = NetworkClash> + 'a {
        let theirs = self.networks.theirs.iter();
        let all = theirs.flat_map(|(peer, it)| it.networks.values().map(move |it| (*peer, it)));
        let held = all.filter(|(_, theirs)| !theirs.resting);
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

    pub(super) fn find_clashes(&mut self) {
        let own = self.state.networks.values().filter(|saved| !saved.resting);
        let clashes: BTreeSet<NetworkClash> =
            own.flat_map(|saved| self.clashes_with(&saved.definition)).collect();
        let before = std::mem::replace(&mut self.networks.clashes, clashes.clone());
        for clash in clashes.difference(&before) {
            self.emit(Output::Changed(Change::NetworkClash(clash.clone())));
        }
    }
}
