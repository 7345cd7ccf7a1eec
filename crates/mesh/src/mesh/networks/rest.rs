//! Letting go of networks: in use, idle, ended, at rest, and dropped with their ranges.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use weft_packet::vxlan::Vni;

use super::are_apart;
use crate::endpoint::EndpointTable;
use crate::ledger::Ledger;
use crate::limits::{NETWORK_IDLE_S, NETWORKS_MAX};
use crate::mesh::{Change, Mesh, Output};
use crate::network::NetworkDefinition;
use crate::state::SavedNetwork;

impl Mesh {
    /// Whether a container of this host is on a network, has an address of it, or waits for one.
    fn is_used(&self, vni: Vni) -> bool {
        self.table(vni).is_some_and(|table| table.local_count() > 0)
            || self.pending.values().any(|pending| pending.is_on(vni))
            || self.owners_on(vni).next().is_some()
    }

    /// Containers of this host that have addresses on a network; one may come twice.
    fn owners_on(&self, vni: Vni) -> impl Iterator<Item = &str> {
        let owners = self.state.networks.get(&vni).map(|saved| {
            let (ledger, on) = match &saved.ledger {
                Some(ledger) => (ledger, None),
                None => (&self.state.weft, Some(vni)),
            };
            saved.outside.values().map(String::as_str).chain(ledger.owners(on))
        });
        owners.into_iter().flatten()
    }

    /// How many containers of this host are on a network, have addresses of it, or wait for one.
    pub(super) fn use_of(&self, vni: Vni) -> usize {
        let endpoints = self.table(vni).map_or(0, EndpointTable::local_count);
        let owners = self.owners_on(vni).collect::<BTreeSet<&str>>().len();
        let waiting = self.pending.values().filter(|pending| pending.is_on(vni)).count();
        endpoints.max(owners).max(waiting)
    }

    /// Drops resting ledgers that stand in the way of a network: of its name or VNI, and one if there are too many.
    pub(super) fn make_room_for(&mut self, definition: &NetworkDefinition) {
        let unlike = |saved: &SavedNetwork| {
            let (name, vni) = (&saved.definition.name, saved.definition.vni);
            saved.definition != *definition && (*name == definition.name || vni == definition.vni)
        };
        let resting = self.state.networks.values().filter(|saved| saved.resting);
        let other = resting.clone().find(|saved| saved.definition != *definition);
        let mut over: Vec<Vni> =
            resting.filter(|saved| unlike(saved)).map(|saved| saved.definition.vni).collect();
        let is_there =
            self.state.networks.get(&definition.vni).is_some_and(|it| it.definition == *definition);
        if over.is_empty() && !is_there && self.state.networks.len() >= NETWORKS_MAX {
            over.extend(other.map(|saved| saved.definition.vni));
        }
        over.into_iter().for_each(|vni| self.drop_network(vni));
    }

    /// Lets go of joined networks that no container has used for a while.
    pub(super) fn end_idle_networks(&mut self, now: Instant) {
        let joined = self.state.networks.iter().filter(|(_, it)| !it.created && !it.resting);
        let joined: Vec<(Vni, bool)> = joined.map(|(vni, _)| (*vni, self.is_used(*vni))).collect();
        let limit = Duration::from_secs(NETWORK_IDLE_S);
        for (vni, used) in joined {
            let Some(held) = self.networks.held.get_mut(&vni) else { continue };
            if used {
                held.idle_since = None;
            } else if *held.idle_since.get_or_insert(now) + limit <= now {
                self.end_network(vni);
            }
        }
    }

    /// Lets go of a network. Ranges of it rest.
    pub(super) fn end_network(&mut self, vni: Vni) {
        let Some(mut held) = self.networks.held.remove(&vni) else { return };
        held.endpoints.drop_all();
        let changes = held.endpoints.changes();
        self.networks.revision += held.endpoints.revision() + 1;
        self.networks.shared.retain(|(_, of)| *of != vni);
        // Lists of claims go on: they are about the ranges, which may rest.
        for incoming in self.links.values_mut().filter_map(|link| link.incoming.get_mut(&vni)) {
            incoming.new_endpoints = None;
            incoming.endpoints_asked = false;
        }
        self.networks.changed = true;
        self.dirty = true;
        let Some(saved) = self.state.networks.get_mut(&vni) else { return };
        let name = saved.definition.name.clone();
        (saved.created, saved.resting) = (false, true);
        if saved.ledger.as_ref().is_none_or(Ledger::is_bare) {
            self.drop_network(vni);
        }
        self.emit_endpoints(vni, changes);
        if !held.peers.is_empty() {
            self.emit(Output::NetworkPeers { vni, peers: Vec::new() });
        }
        self.emit(Output::Changed(Change::NetworkEnded { name, vni }));
    }

    /// Forgets a network that this host does not hold, with its ranges.
    fn drop_network(&mut self, vni: Vni) {
        self.dirty |= self.state.networks.remove(&vni).is_some();
        self.networks.changed = true;
        self.spaces.remove(&vni);
        self.networks.shared.retain(|(_, of)| *of != vni);
        self.links.values_mut().for_each(|link| drop(link.incoming.remove(&vni)));
    }

    /// Says which networks of the saved state this release cannot hold.
    pub(crate) fn tell_unknown_networks(&mut self, unknown: Vec<NetworkDefinition>) {
        self.dirty |= !unknown.is_empty();
        for NetworkDefinition { name, vni, options, .. } in unknown {
            let option = options.unknown().unwrap_or_default().to_owned();
            self.emit(Output::Changed(Change::NetworkUnknown { name, vni, option }));
        }
    }

    /// Drops resting ledgers of networks that no host holds, or that others hold with another founding.
    pub(super) fn drop_resting(&mut self) {
        let all_known = self.all_have_told();
        let is_over = |vni: Vni| {
            let ours = self.state.ledger(vni).and_then(|ledger| ledger.network);
            let peers = self.networks.theirs.keys();
            let theirs = peers.filter_map(|peer| self.theirs_if_equal(*peer, vni));
            let mut held = theirs.filter(|theirs| !theirs.resting).peekable();
            match held.peek() {
                None => all_known,
                Some(_) => held.all(|theirs| !theirs.unsure && are_apart(ours, theirs.founding)),
            }
        };
        let resting = self.state.networks.iter().filter(|(_, saved)| saved.resting);
        let over: Vec<Vni> = resting.map(|(vni, _)| *vni).filter(|vni| is_over(*vni)).collect();
        over.into_iter().for_each(|vni| self.drop_network(vni));
    }
}
