//! Networks besides `weft`: those that this host holds, those of its peers, and what they have in common.
//!
//! A host says which networks it holds, and nothing of others (`docs/design/networks.md`). So a network exists as
//! long as a host holds it, and no host brings back a network that it does not hold itself.

mod clashes;
mod rest;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use self::clashes::Clashes;
use super::{Mesh, Output};
use crate::endpoint::{EndpointTable, HostNames};
use crate::error::{MeshError, NetworkError};
use crate::ledger::Ledger;
use crate::limits::{ENDPOINT_GRACE_S, NETWORK_IDLE_S, NETWORKS_MAX, NETWORKS_PER_MESSAGE_MAX};
use crate::message::{FEATURE_NETWORKS, Hello, Holding, Message, Network, NetworkId};
use crate::names::NameRecord;
use crate::network::{NetworkClash, NetworkDefinition, NetworkOptions, WEFT};
use crate::state::SavedNetwork;

/// A network, as this host and its peers have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkStatus {
    /// The network.
    pub definition: NetworkDefinition,
    /// This host holds it.
    pub here: bool,
    /// It was created on this host, so it stays without containers.
    pub created: bool,
    /// Containers of this host on it.
    pub containers: usize,
    /// Other hosts that hold the same, as far as known.
    pub hosts: Vec<PeerId>,
    /// Hosts with which nothing of it is exchanged, and why.
    pub clashes: Vec<NetworkClash>,
}

/// Networks besides `weft`, in memory.
#[derive(Debug, Default)]
pub(crate) struct Networks {
    /// Those that this host holds; the saved state has these, and those that rest.
    held: BTreeMap<Vni, Held>,
    /// Those that other hosts hold.
    theirs: BTreeMap<PeerId, Theirs>,
    /// The peers that have been greeted about a network.
    shared: BTreeSet<(PeerId, Vni)>,
    clashes: Clashes,
    /// The networks that peers were told last.
    told: Vec<Holding>,
    /// Something has changed since the last look.
    pub(crate) changed: bool,
    /// The revisions of tables that are gone.
    revision: u64,
}

/// A network that this host holds.
#[derive(Debug)]
struct Held {
    endpoints: EndpointTable,
    /// Since when no container of this host is on it or has an address of it.
    idle_since: Option<Instant>,
    /// The hosts that were last said to have it.
    peers: Vec<PeerId>,
}

/// The networks that another host holds.
#[derive(Debug)]
struct Theirs {
    networks: BTreeMap<Vni, Holding>,
    /// The VNI of each, by its name.
    names: BTreeMap<String, Vni>,
    /// When they are dropped, if the host has no link.
    expires: Option<Instant>,
}

/// The progress of hearing of networks on a link.
#[derive(Debug, Default)]
pub(crate) struct NetworksLink {
    /// The peer knows networks besides `weft`.
    able: bool,
    /// The peer has said which networks it holds.
    told: bool,
    /// Parts of a whole set that is still coming.
    coming: Vec<Holding>,
    /// Foundings of this host that the peer has heard of, as it says in the set that is still coming.
    heard_coming: BTreeSet<NetworkId>,
    /// The same, as it said last.
    heard: BTreeSet<NetworkId>,
    /// Foundings of the peer of which it had given nothing when this host heard of them.
    known: BTreeSet<NetworkId>,
    /// The peer has not been told that this host has heard of one.
    owed: bool,
}

impl NetworksLink {
    pub(crate) fn new(hello: &Hello) -> Self {
        let able = hello.features.iter().any(|feature| feature == FEATURE_NETWORKS);
        Self { able, ..Self::default() }
    }

    /// Whether the peer says that it has heard of a founding, or cannot say it.
    pub(crate) fn has_heard(&self, founding: NetworkId) -> bool {
        !self.able || self.heard.contains(&founding)
    }

    /// Notes the foundings in what the peer says.
    fn hear(&mut self, networks: &BTreeMap<Vni, Holding>) {
        let foundings = networks.values().filter_map(|it| Some((it.founding?.id, it.used)));
        let all: BTreeMap<NetworkId, bool> = foundings.collect();
        self.known.retain(|founding| all.contains_key(founding));
        for (founding, _) in all.into_iter().filter(|(_, used)| !used) {
            self.owed |= self.known.insert(founding);
        }
    }

    /// Nothing is to be heard that was not heard yet.
    fn has_told(&self) -> bool {
        self.told || !self.able
    }
}

impl Networks {
    /// The networks of the last run. Those without a container go after [`NETWORK_IDLE_S`].
    pub(crate) fn restore(
        now: Instant,
        local: PeerId,
        saved: &BTreeMap<Vni, SavedNetwork>,
    ) -> Self {
        let held = saved.iter().filter(|(_, saved)| !saved.resting);
        let held = held.map(|(vni, _)| (*vni, Held::new(now, local, *vni))).collect();
        Self { held, changed: true, ..Self::default() }
    }

    fn tables(&self) -> impl Iterator<Item = (Vni, &EndpointTable)> {
        self.held.iter().map(|(vni, held)| (*vni, &held.endpoints))
    }
}

impl Theirs {
    fn new(networks: BTreeMap<Vni, Holding>) -> Self {
        let names = networks.iter().map(|(vni, it)| (it.definition.name.clone(), *vni)).collect();
        Self { networks, names, expires: None }
    }

    fn named(&self, name: &str) -> Option<&Holding> {
        self.networks.get(self.names.get(name)?)
    }

    /// Those that have a network's VNI or name.
    fn like(&self, definition: &NetworkDefinition) -> impl Iterator<Item = &Holding> {
        let named = self.named(&definition.name);
        let named = named.filter(|it| it.definition.vni != definition.vni);
        self.networks.get(&definition.vni).into_iter().chain(named)
    }
}

impl Held {
    fn new(now: Instant, local: PeerId, vni: Vni) -> Self {
        let endpoints = EndpointTable::new(local, vni);
        Self { endpoints, idle_since: Some(now), peers: Vec::new() }
    }
}

impl Mesh {
    /// Creates a network on this host, which holds it until [`Self::remove_network`]. A second creation of an equal
    /// network changes nothing.
    ///
    /// # Errors
    /// The definition is unfit, or clashes with a network of this host or of another. The state cannot be saved. This
    /// host holds [`NETWORKS_MAX`] networks already.
    pub fn create_network(
        &mut self,
        now: Instant,
        definition: NetworkDefinition,
    ) -> Result<(), NetworkError> {
        if definition.name == WEFT {
            return Err(NetworkError::Weft);
        }
        self.hold(now, definition, true)
    }

    /// Holds a network as other hosts define it, if this host does not hold it already: a container is about to be
    /// attached to it. The network goes when no container of this host has been on it for [`NETWORK_IDLE_S`].
    ///
    /// # Errors
    /// As for [`Self::create_network`]; no known host holds it; hosts hold different ones of the name.
    pub fn join_network(&mut self, now: Instant, name: &str) -> Result<Vni, NetworkError> {
        if name == WEFT {
            return Ok(Vni::WEFT);
        }
        if let Some(vni) = self.vni_of_held(name) {
            if let Some(held) = self.networks.held.get_mut(&vni)
                && held.idle_since.is_some()
            {
                held.idle_since = Some(now);
            }
            return Ok(vni);
        }
        let theirs = self.networks.theirs.iter();
        let named = theirs.filter_map(|(peer, theirs)| Some((*peer, theirs.named(name)?)));
        let mut known = named.filter(|(_, theirs)| !theirs.resting);
        let Some((host, holding)) = known.next() else {
            return Err(NetworkError::Unknown { name: name.to_owned() });
        };
        let differs = |other: &Holding| {
            let apart = are_apart(holding.founding, other.founding);
            apart || other.definition != holding.definition
        };
        if let Some((other, _)) = known.find(|(_, other)| differs(other)) {
            let (host, other) = (self.name_of(host), self.name_of(other));
            return Err(NetworkError::Ambiguous { name: name.to_owned(), host, other });
        }
        let definition = holding.definition.clone();
        let vni = definition.vni;
        self.hold(now, definition, false)?;
        Ok(vni)
    }

    /// Ends this host's part in a network. It goes on at other hosts that hold it.
    ///
    /// # Errors
    /// This host does not hold it, or containers of this host are on it.
    pub fn remove_network(&mut self, now: Instant, name: &str) -> Result<(), NetworkError> {
        if name == WEFT {
            return Err(NetworkError::Weft);
        }
        let Some(vni) = self.vni_of_held(name) else {
            return Err(NetworkError::Unknown { name: name.to_owned() });
        };
        let containers = self.use_of(vni);
        if containers > 0 {
            return Err(NetworkError::InUse { name: name.to_owned(), containers });
        }
        self.end_network(vni);
        self.drive_networks(now);
        Ok(())
    }

    /// All networks: `weft`, those that this host holds, and those that only others hold.
    #[must_use]
    pub fn networks(&self) -> Vec<NetworkStatus> {
        let network = self.state.weft.network;
        let weft = NetworkStatus {
            definition: NetworkDefinition {
                name: WEFT.to_owned(),
                vni: Vni::WEFT,
                range: Some(self.config.range),
                range6: network.map(|network| network.range6).or(self.config.range6),
                options: NetworkOptions::default(),
            },
            here: true,
            created: false,
            containers: self.endpoints.local_count(),
            hosts: self.linked(),
            clashes: Vec::new(),
        };
        let status = |definition: &NetworkDefinition, created: bool, here: bool| NetworkStatus {
            definition: definition.clone(),
            here,
            created,
            containers: self
                .table(definition.vni)
                .filter(|_| here)
                .map_or(0, EndpointTable::local_count),
            hosts: self.holders(definition),
            clashes: self.clashes_of(definition.vni).filter(|_| here).cloned().collect(),
        };
        let own = self.state.networks.values().filter(|saved| !saved.resting);
        let own: Vec<NetworkStatus> =
            own.map(|saved| status(&saved.definition, saved.created, true)).collect();
        let theirs = self.networks.theirs.values().flat_map(|theirs| theirs.networks.values());
        let known = theirs.filter(|theirs| !theirs.resting).map(|theirs| &theirs.definition);
        let known: BTreeSet<&NetworkDefinition> = known.collect();
        let others = known.into_iter().filter(|definition| self.held_as(definition).is_none());
        let others: Vec<NetworkStatus> =
            others.map(|definition| status(definition, false, false)).collect();
        [weft].into_iter().chain(own).chain(others).collect()
    }

    /// The networks that this host holds now besides `weft`, by VNI; not those whose ranges rest here.
    pub fn held_networks(&self) -> impl Iterator<Item = &NetworkDefinition> {
        let held = self.state.networks.values().filter(|saved| !saved.resting);
        held.map(|saved| &saved.definition)
    }

    /// The hosts that get the broadcasts of a network: those of the last [`Output::NetworkPeers`] about it. None of
    /// `weft`, and none of a network that this host does not hold.
    #[must_use]
    pub fn network_peers(&self, vni: Vni) -> Vec<PeerId> {
        self.networks.held.get(&vni).map_or_else(Vec::new, |held| held.peers.clone())
    }

    /// The names of endpoints of a network, and those that users gave on it: of this host, then of the others that
    /// share it. Empty for a network that this host does not hold.
    #[must_use]
    pub fn host_names_on(&self, vni: Vni) -> Vec<HostNames> {
        let Some(table) = self.table(vni) else { return Vec::new() };
        let name =
            self.state.networks.get(&vni).map_or(WEFT, |saved| saved.definition.name.as_str());
        let of_network = |record: &NameRecord| record.network == name;
        let mut hosts = self.endpoints.host_names_with(|peer| table.of_host(peer), of_network);
        if let Some(held) = self.networks.held.get(&vni) {
            hosts.retain(|host| host.peer == self.config.local || held.peers.contains(&host.peer));
        }
        hosts
    }

    /// Whether each host that may share a network with this one has told its endpoints there.
    pub(crate) fn has_names_besides(&self) -> bool {
        let told =
            |held: &Held| held.peers.iter().all(|peer| held.endpoints.version_of(*peer).is_some());
        self.networks.held.is_empty()
            || (self.all_have_told() && self.networks.held.values().all(told))
    }
}

impl Mesh {
    /// The endpoints of a network that this host holds.
    pub(crate) fn table(&self, vni: Vni) -> Option<&EndpointTable> {
        if vni == Vni::WEFT {
            return Some(&self.endpoints);
        }
        self.networks.held.get(&vni).map(|held| &held.endpoints)
    }

    pub(crate) fn table_mut(&mut self, vni: Vni) -> Option<&mut EndpointTable> {
        if vni == Vni::WEFT {
            return Some(&mut self.endpoints);
        }
        self.networks.held.get_mut(&vni).map(|held| &mut held.endpoints)
    }

    /// The tables of all networks that this host holds.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (Vni, &EndpointTable)> {
        [(Vni::WEFT, &self.endpoints)].into_iter().chain(self.networks.tables())
    }

    pub(crate) fn tables_mut(&mut self) -> impl Iterator<Item = (Vni, &mut EndpointTable)> {
        let others = self.networks.held.iter_mut().map(|(vni, held)| (*vni, &mut held.endpoints));
        [(Vni::WEFT, &mut self.endpoints)].into_iter().chain(others)
    }

    /// Grows with each change of the names of endpoints besides those of `weft`.
    pub(crate) fn names_revision_besides(&self) -> u64 {
        let revisions = self.networks.tables().map(|(_, table)| table.revision());
        self.networks.revision + revisions.sum::<u64>()
    }

    /// Whether this host holds a network.
    pub(crate) fn holds(&self, vni: Vni) -> bool {
        vni == Vni::WEFT || self.networks.held.contains_key(&vni)
    }

    /// Another host's part in a network, as far as known.
    pub(crate) fn theirs(&self, peer: PeerId, vni: Vni) -> Option<&Holding> {
        self.networks.theirs.get(&peer)?.networks.get(&vni)
    }

    /// Another host's part in a network, as far as known, if its definition is equal to this host's.
    pub(crate) fn theirs_if_equal(&self, peer: PeerId, vni: Vni) -> Option<&Holding> {
        let ours = &self.state.networks.get(&vni)?.definition;
        self.theirs(peer, vni).filter(|theirs| theirs.definition == *ours)
    }

    /// Whether a host is known, linked or not long gone, that has ranges of a network.
    pub(crate) fn knows_founding(&self, vni: Vni) -> bool {
        let theirs =
            self.networks.theirs.keys().filter_map(|peer| self.theirs_if_equal(*peer, vni));
        theirs.into_iter().any(|theirs| theirs.founding.is_some())
    }

    /// The foundings of hosts, linked or not long gone, that hold a network. None of `weft`.
    pub(crate) fn live_foundings(&self, vni: Vni) -> impl Iterator<Item = Network> {
        let theirs =
            self.networks.theirs.keys().filter_map(move |peer| self.theirs_if_equal(*peer, vni));
        let live = theirs.filter(|theirs| !theirs.resting && !theirs.unsure);
        live.filter_map(|theirs| theirs.founding)
    }

    /// Whether messages about a network count between this host and a peer.
    pub(crate) fn shares(&self, peer: PeerId, vni: Vni) -> bool {
        let Some(link) = self.links.get(&peer) else { return false };
        vni == Vni::WEFT || (link.networks.told && self.has_same(peer, vni))
    }

    /// Whether all members are linked and have said which networks they have.
    pub(crate) fn all_have_told(&self) -> bool {
        let told = |peer| self.links.get(&peer).is_some_and(|link| link.networks.has_told());
        self.members.iter().all(|(peer, _)| told(peer))
    }

    /// The linked peers with which this host shares a network.
    pub(crate) fn sharers(&self, vni: Vni) -> Vec<PeerId> {
        self.linked().into_iter().filter(|peer| self.shares(*peer, vni)).collect()
    }

    /// The linked peers with each network whose ranges this host shares with them.
    pub(crate) fn all_sharers(&self) -> Vec<(Vni, PeerId)> {
        let all = self.allocators().into_iter();
        all.flat_map(|vni| self.sharers(vni).into_iter().map(move |peer| (vni, peer))).collect()
    }

    /// A link came up: what the peer held before counts until it says what it holds now. A host of an older release
    /// holds nothing and does not say so.
    pub(crate) fn networks_link_up(&mut self, peer: PeerId) {
        self.networks.changed = true;
        if !self.links.get(&peer).is_some_and(|link| link.networks.able) {
            self.networks.theirs.remove(&peer);
        }
        if let Some(theirs) = self.networks.theirs.get_mut(&peer) {
            theirs.expires = None;
        }
    }

    pub(crate) fn networks_link_down(&mut self, now: Instant, peer: PeerId) {
        self.networks.changed = true;
        if let Some(theirs) = self.networks.theirs.get_mut(&peer) {
            theirs.expires = Some(now + Duration::from_secs(ENDPOINT_GRACE_S));
        }
    }

    /// Drops all that is known of a host's endpoints and networks.
    pub(crate) fn drop_endpoints_of(&mut self, peer: PeerId) {
        self.tables_mut().for_each(|(_, table)| table.drop_peer(peer));
        self.networks.theirs.remove(&peer);
        self.networks.changed = true;
    }

    pub(crate) fn expire_endpoints(&mut self, now: Instant) {
        self.tables_mut().for_each(|(_, table)| table.expire(now));
        let due = |theirs: &mut Theirs| theirs.expires.is_some_and(|at| at <= now);
        let before = self.networks.theirs.len();
        self.networks.theirs.retain(|_, theirs| !due(theirs));
        self.networks.changed |= self.networks.theirs.len() != before;
    }

    pub(crate) fn next_network_time(&self) -> Option<Instant> {
        let endpoints = self.tables().filter_map(|(_, table)| table.next_expiry());
        let theirs = self.networks.theirs.values().filter_map(|theirs| theirs.expires);
        let idle = self.state.networks.iter().filter(|(_, saved)| !saved.created);
        let idle = idle.filter_map(|(vni, _)| self.networks.held.get(vni)?.idle_since);
        let idle = idle.map(|since| since + Duration::from_secs(NETWORK_IDLE_S));
        endpoints.chain(theirs).chain(idle).min()
    }

    /// Tells a peer of all networks that this host holds.
    pub(crate) fn send_networks(&mut self, peer: PeerId) {
        if !self.links.get(&peer).is_some_and(|link| link.networks.able) {
            return;
        }
        let all = self.own_holdings();
        let Some(link) = self.links.get_mut(&peer).map(|link| &mut link.networks) else { return };
        link.owed = false;
        let mut heard: Vec<NetworkId> = link.known.iter().copied().collect();
        let parts = all.len().div_ceil(NETWORKS_PER_MESSAGE_MAX).max(1);
        for part in 0..parts {
            let some = all.iter().skip(part * NETWORKS_PER_MESSAGE_MAX);
            let networks = some.take(NETWORKS_PER_MESSAGE_MAX).cloned().collect();
            let (first, more) = (part == 0, part + 1 < parts);
            let heard = std::mem::take(&mut heard);
            self.send(peer, Message::Networks { first, more, networks, heard });
        }
    }

    pub(crate) fn handle_networks(
        &mut self,
        peer: PeerId,
        (first, more): (bool, bool),
        mut networks: Vec<Holding>,
        heard: &[NetworkId],
    ) -> Result<(), MeshError> {
        if heard.len() > NETWORKS_MAX {
            return Err(MeshError::Malformed { peer, what: "too many foundings in one message" });
        }
        if networks.len() > NETWORKS_PER_MESSAGE_MAX {
            return Err(MeshError::Malformed { peer, what: "too many networks in one message" });
        }
        if let Some(what) = networks.iter().find_map(|it| it.definition.key_fault()) {
            return Err(MeshError::Malformed { peer, what });
        }
        networks.retain(Holding::may_be_kept);
        let Some(link) = self.links.get_mut(&peer) else { return Ok(()) };
        let link = &mut link.networks;
        if first {
            link.coming.clear();
            link.heard_coming.clear();
        }
        if link.coming.len() + networks.len() > NETWORKS_MAX {
            return Err(MeshError::TooMany { peer, what: "networks", max: NETWORKS_MAX });
        }
        link.coming.extend(networks);
        if link.heard_coming.len() < NETWORKS_MAX {
            link.heard_coming.extend(heard);
        }
        if more {
            return Ok(());
        }
        let all = std::mem::take(&mut link.coming);
        let heard = std::mem::take(&mut link.heard_coming);
        let count = all.len();
        let names: BTreeSet<&str> = all.iter().map(|it| it.definition.name.as_str()).collect();
        let distinct = names.len() == count;
        let networks: BTreeMap<Vni, Holding> =
            all.into_iter().map(|it| (it.definition.vni, it)).collect();
        if !distinct || networks.len() < count {
            return Err(MeshError::Malformed { peer, what: "two networks of one name or VNI" });
        }
        link.told = true;
        link.heard = heard;
        link.hear(&networks);
        self.networks.changed = true;
        self.networks.theirs.insert(peer, Theirs::new(networks));
        Ok(())
    }

    /// Lets go of idle networks, and takes every step about networks that has become possible.
    pub(crate) fn drive_networks(&mut self, now: Instant) {
        self.end_idle_networks(now);
        self.tell_networks(now);
    }

    /// Yields foundings and tells peers what this host holds, before anything is given or asked for.
    pub(crate) fn tell_networks(&mut self, now: Instant) {
        if !std::mem::take(&mut self.networks.changed) && !self.is_use_untold() {
            return;
        }
        self.yield_foundings();
        self.drop_resting();
        let own = self.own_holdings();
        let changed = self.networks.told != own;
        let before = std::mem::replace(&mut self.networks.told, own);
        let links = self.links.iter().filter(|(_, link)| changed || link.networks.owed);
        let peers: Vec<PeerId> = links.map(|(peer, _)| *peer).collect();
        peers.into_iter().for_each(|peer| self.send_networks(peer));
        self.drop_uncarried();
        self.tell_held(&before);
        self.greet_sharers();
        self.tell_network_peers();
        self.find_clashes(now);
    }

    /// Says what this host holds of a founding to the hosts that have just been told of it. They may have given an
    /// address to this host when it had dropped its ranges of the network. A list that came before counted for nothing.
    fn tell_held(&mut self, before: &[Holding]) {
        let told = &self.networks.told;
        let is_old = |it: &&Holding| {
            let vni = it.definition.vni;
            before.iter().any(|old| old.definition.vni == vni && old.founding == it.founding)
        };
        let new = told.iter().filter(|it| it.founding.is_some() && !is_old(it));
        let new: BTreeSet<Vni> = new.map(|it| it.definition.vni).collect();
        let greeted = self.networks.shared.iter().copied();
        let greeted = greeted.filter(|(_, vni)| new.contains(vni));
        let all: Vec<_> = greeted.filter(|(peer, vni)| self.shares_founding(*peer, *vni)).collect();
        all.into_iter().for_each(|(peer, vni)| self.send_held(peer, vni));
    }

    fn own_holdings(&self) -> Vec<Holding> {
        let holding = |saved: &SavedNetwork| Holding {
            definition: saved.definition.clone(),
            founding: saved.ledger.as_ref().and_then(|ledger| ledger.network),
            used: saved.ledger.as_ref().is_some_and(Ledger::is_touched),
            resting: saved.resting,
            unsure: !self.standing.is_sure() && saved.ledger.is_some(),
        };
        self.state.networks.values().map(holding).collect()
    }

    /// Whether the first address or range of a founding was given, or the state came to be sure or not, since peers
    /// were told.
    fn is_use_untold(&self) -> bool {
        let unsure = !self.standing.is_sure();
        self.networks.told.iter().any(|told| {
            let ledger = self.state.ledger(told.definition.vni);
            ledger.is_some_and(|it| it.is_touched() != told.used || unsure != told.unsure)
        })
    }

    fn vni_of_held(&self, name: &str) -> Option<Vni> {
        let mut own = self.state.networks.iter().filter(|(_, saved)| !saved.resting);
        own.find(|(_, saved)| saved.definition.name == name).map(|(vni, _)| *vni)
    }

    /// The VNI of a network, if this host holds one that is equal.
    fn held_as(&self, definition: &NetworkDefinition) -> Option<Vni> {
        let saved = self.state.networks.get(&definition.vni).filter(|saved| !saved.resting)?;
        (saved.definition == *definition).then_some(definition.vni)
    }

    /// Whether another host is known to have the network of a VNI as this host has it, held or resting.
    fn has_same(&self, peer: PeerId, vni: Vni) -> bool {
        let ours = self.state.ledger(vni).and_then(|ledger| ledger.network);
        let theirs = self.theirs_if_equal(peer, vni);
        theirs.is_some_and(|theirs| !are_apart(ours, theirs.founding))
    }

    /// Whether this host and another hold a network and carry it between them.
    pub(crate) fn carries(&self, peer: PeerId, vni: Vni) -> bool {
        let they_rest = self.theirs(peer, vni).is_none_or(|theirs| theirs.resting);
        self.holds(vni) && !they_rest && self.has_same(peer, vni)
    }

    /// The hosts that hold a network, without those that have it apart from this host's.
    fn holders(&self, definition: &NetworkDefinition) -> Vec<PeerId> {
        let here = self.held_as(definition);
        let same = |theirs: &Holding| theirs.definition == *definition && !theirs.resting;
        let peers = self.networks.theirs.keys().copied();
        let holders = peers.filter(|peer| self.theirs(*peer, definition.vni).is_some_and(same));
        holders.filter(|peer| here.is_none_or(|vni| self.carries(*peer, vni))).collect()
    }

    /// Adds a network to those that this host holds.
    fn hold(
        &mut self,
        now: Instant,
        definition: NetworkDefinition,
        created: bool,
    ) -> Result<(), NetworkError> {
        let (name, vni) = (definition.name.clone(), definition.vni);
        if let Some(fault) = definition.fault() {
            return Err(NetworkError::Unfit { why: fault.to_owned() });
        }
        if let Some(option) = definition.options.unknown() {
            return Err(NetworkError::UnknownOption { name, option: option.to_owned() });
        }
        if let Some(why) = self.storage.failure() {
            return Err(NetworkError::NotSaved { why: why.to_owned() });
        }
        if self.held_as(&definition).is_some() {
            if let Some(saved) = self.state.networks.get_mut(&vni)
                && created
                && !saved.created
            {
                saved.created = true;
                self.dirty = true;
                self.drive_ranges(now);
            }
            return Ok(());
        }
        if self.vni_of_held(&name).is_some() {
            return Err(NetworkError::Exists { name });
        }
        if let Some(saved) = self.state.networks.get(&vni).filter(|saved| !saved.resting) {
            let other = saved.definition.name.clone();
            return Err(NetworkError::VniTaken { name, vni, other });
        }
        if let Some(clash) = self.clashes_with(&definition).next() {
            return Err(NetworkError::Clash { clash });
        }
        if self.networks.held.len() >= NETWORKS_MAX {
            return Err(NetworkError::TooMany);
        }
        self.make_room_for(&definition);
        let rested = self.state.networks.contains_key(&vni);
        let saved = self.state.networks.entry(vni);
        let saved = saved.or_insert_with(|| SavedNetwork::new(definition));
        (saved.created, saved.resting) = (created, false);
        self.networks.held.insert(vni, Held::new(now, self.config.local, vni));
        // Its zone is there from now on.
        self.networks.revision += 1;
        self.dirty = true;
        self.networks.changed = true;
        self.drive_networks(now);
        // Peers that share what rested here greet this host no more.
        for peer in self.sharers(vni).into_iter().filter(|_| rested) {
            self.send_endpoints(peer, vni);
            self.send(peer, Message::EndpointsRequest.on(vni));
        }
        self.drive_ranges(now);
        Ok(())
    }

    /// Tells each peer that has come to share a network all about it.
    fn greet_sharers(&mut self) {
        let vnis: Vec<Vni> = self.state.networks.keys().copied().collect();
        let mut shared = BTreeSet::new();
        for peer in self.linked() {
            let told = self.links.get(&peer).is_some_and(|link| link.networks.told);
            for vni in &vnis {
                if self.shares(peer, *vni) {
                    shared.insert((peer, *vni));
                } else if told {
                    self.link_mut(peer, |link| drop(link.incoming.remove(vni)));
                }
            }
        }
        let before = std::mem::replace(&mut self.networks.shared, shared.clone());
        for (peer, vni) in shared.difference(&before) {
            self.greet_on(*peer, *vni);
        }
    }

    /// Forgets the endpoints of hosts, linked or not, with which a network is carried no longer.
    fn drop_uncarried(&mut self) {
        let tables = self.networks.tables();
        let all = tables.flat_map(|(vni, table)| table.peers().map(move |peer| (peer, vni)));
        let over: Vec<(PeerId, Vni)> =
            all.filter(|(peer, vni)| !self.carries(*peer, *vni)).collect();
        for (peer, vni) in over {
            if let Some(table) = self.table_mut(vni) {
                table.drop_peer(peer);
            }
        }
    }

    /// Tells a peer that has come to share a network all that it must know of it.
    fn greet_on(&mut self, peer: PeerId, vni: Vni) {
        self.send_ranges(peer, vni);
        if let Some(ledger) = self.state.ledger(vni).filter(|ledger| ledger.network.is_some()) {
            let used = ledger.used();
            self.send(peer, Message::Usage { used }.on(vni));
        }
        self.send_held(peer, vni);
        self.send_endpoints(peer, vni);
        self.send_open_grants(peer, vni);
    }

    /// Says which hosts get the broadcasts of each network.
    fn tell_network_peers(&mut self) {
        let vnis: Vec<Vni> = self.networks.held.keys().copied().collect();
        for vni in vnis {
            let theirs = self.networks.theirs.keys().copied();
            let peers: Vec<PeerId> = theirs.filter(|peer| self.carries(*peer, vni)).collect();
            if let Some(held) = self.networks.held.get_mut(&vni)
                && held.peers != peers
            {
                held.peers.clone_from(&peers);
                self.networks.revision += 1;
                self.emit(Output::NetworkPeers { vni, peers });
            }
        }
    }
}

/// Whether two hosts have ranges of different foundings.
fn are_apart(ours: Option<Network>, theirs: Option<Network>) -> bool {
    ours.is_some() && theirs.is_some() && ours != theirs
}
