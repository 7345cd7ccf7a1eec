//! The table of endpoints of a network: each host announces its containers, the others keep them per host.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::ethernet::{Mac, is_group};
use weft_packet::vxlan::Vni;

use crate::limits::{
    ADDRESSES_PER_ENDPOINT_MAX, ALIASES_PER_ENDPOINT_MAX, CONFLICTS_MAX, ENDPOINT_GRACE_S,
    NAME_BYTES_MAX,
};
use crate::names::{NameRecord, is_dns_name};

/// A container (or a host itself) on the network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EndpointInfo {
    /// The container's id, or another name that the attaching side gives it; unique on its host.
    pub container: String,
    /// The container's name; may be empty.
    pub name: String,
    /// Further names in DNS; hosts that do not know the field lack these names alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The Ethernet address of the port inside the container.
    pub mac: Mac,
    /// Its addresses with the length of their subnet's prefix; may be empty.
    pub addresses: Vec<IpNet>,
}

impl EndpointInfo {
    /// Why no host would accept its announcement, if so.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        if self.container.is_empty() || self.container.len() > NAME_BYTES_MAX {
            return Some("the container's id is empty or too long");
        }
        if self.name.len() > NAME_BYTES_MAX {
            return Some("the container's name is too long");
        }
        if self.container.chars().chain(self.name.chars()).any(char::is_control) {
            return Some("the container's id or name has control characters");
        }
        if self.aliases.len() > ALIASES_PER_ENDPOINT_MAX
            || !self.aliases.iter().all(|alias| is_dns_name(alias))
        {
            return Some("too many further names, or one that is none in DNS");
        }
        if is_group(self.mac.0) || self.mac.0 == [0; 6] {
            return Some("the Ethernet address is not a unicast address");
        }
        if self.addresses.len() > ADDRESSES_PER_ENDPOINT_MAX {
            return Some("too many addresses");
        }
        let unfit = |net: &IpNet| net.addr().is_unspecified() || net.addr().is_multicast();
        self.addresses.iter().any(unfit).then_some("an address is not a unicast address")
    }
}

/// Everything with a name on one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostNames {
    /// The host.
    pub peer: PeerId,
    /// Since when there is no link to it; `None` while there is one, and for this host.
    pub unlinked_since: Option<Instant>,
    /// Its endpoints.
    pub endpoints: Vec<EndpointInfo>,
    /// Names that its user gave, and those of its gateway's clients.
    pub names: Vec<NameRecord>,
}

/// Two hosts announce the same Ethernet or IP address on a network; the lower peer id gets the frames.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Conflict {
    /// The network.
    pub vni: Vni,
    /// The address that both announce, as text.
    pub address: String,
    /// The host that gets the frames.
    pub winner: PeerId,
    /// The host that does not.
    pub loser: PeerId,
}

/// Changes for the switch, and new conflicts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct EndpointChanges {
    pub(crate) add: Vec<(EndpointInfo, PeerId)>,
    pub(crate) remove: Vec<(Mac, PeerId)>,
    pub(crate) conflicts: Vec<Conflict>,
}

/// The endpoints of one other host.
#[derive(Debug, Default)]
struct Remote {
    version: u64,
    endpoints: BTreeMap<Mac, EndpointInfo>,
    /// Its [`HostNames::names`].
    names: Vec<NameRecord>,
    /// When they are dropped, if the host has no link.
    expires: Option<Instant>,
}

/// All endpoints of a network that this host knows of, its own included.
#[derive(Debug)]
pub(crate) struct EndpointTable {
    vni: Vni,
    local_peer: PeerId,
    local: BTreeMap<Mac, EndpointInfo>,
    local_version: u64,
    local_names: Vec<NameRecord>,
    /// Grows with each change of names, endpoints or links.
    revision: u64,
    remote: BTreeMap<PeerId, Remote>,
    by_mac: BTreeMap<Mac, BTreeSet<PeerId>>,
    by_address: BTreeMap<IpAddr, BTreeSet<(PeerId, Mac)>>,
    /// Entries of other hosts that the switch has.
    told: BTreeMap<Mac, (PeerId, EndpointInfo)>,
    conflicts: BTreeSet<Conflict>,
    /// Ethernet addresses whose entry may have changed since the last [`Self::changes`].
    touched: BTreeSet<Mac>,
}

impl EndpointTable {
    pub(crate) fn new(local_peer: PeerId, vni: Vni) -> Self {
        Self {
            vni,
            local_peer,
            local: BTreeMap::new(),
            local_version: 0,
            local_names: Vec::new(),
            revision: 0,
            remote: BTreeMap::new(),
            by_mac: BTreeMap::new(),
            by_address: BTreeMap::new(),
            told: BTreeMap::new(),
            conflicts: BTreeSet::new(),
            touched: BTreeSet::new(),
        }
    }

    pub(crate) fn local(&self) -> (u64, Vec<EndpointInfo>) {
        (self.local_version, self.local.values().cloned().collect())
    }

    /// Adds or replaces an own endpoint; the new version, or `None` if nothing changed.
    pub(crate) fn set_local(&mut self, info: &EndpointInfo) -> Option<u64> {
        let before = self.local.insert(info.mac, info.clone());
        if before.as_ref() == Some(info) {
            return None;
        }
        self.index(self.local_peer, before.as_ref(), Some(info));
        self.local_version += 1;
        Some(self.local_version)
    }

    /// Removes an own endpoint; the new version, or `None` if there was none.
    pub(crate) fn remove_local(&mut self, mac: Mac) -> Option<u64> {
        let before = self.local.remove(&mac)?;
        self.index(self.local_peer, Some(&before), None);
        self.local_version += 1;
        Some(self.local_version)
    }

    /// How many own endpoints there are.
    pub(crate) fn local_count(&self) -> usize {
        self.local.len()
    }

    /// Whether there is an own endpoint with this Ethernet address.
    pub(crate) fn has_local(&self, mac: Mac) -> bool {
        self.local.contains_key(&mac)
    }

    /// The endpoints of one host.
    pub(crate) fn of_host(&self, peer: PeerId) -> Vec<EndpointInfo> {
        let all = match self.remote.get(&peer) {
            _ if peer == self.local_peer => &self.local,
            Some(remote) => &remote.endpoints,
            None => return Vec::new(),
        };
        all.values().cloned().collect()
    }

    /// The other hosts in it.
    pub(crate) fn peers(&self) -> impl Iterator<Item = PeerId> + '_ {
        self.remote.keys().copied()
    }

    pub(crate) fn version_of(&self, peer: PeerId) -> Option<u64> {
        self.remote.get(&peer).map(|remote| remote.version)
    }

    pub(crate) fn count_of(&self, peer: PeerId) -> usize {
        self.remote.get(&peer).map_or(0, |remote| remote.endpoints.len())
    }

    pub(crate) fn has(&self, peer: PeerId, mac: Mac) -> bool {
        self.remote.get(&peer).is_some_and(|remote| remote.endpoints.contains_key(&mac))
    }

    /// Replaces all endpoints of another host.
    pub(crate) fn set_all(
        &mut self,
        peer: PeerId,
        version: u64,
        endpoints: &BTreeMap<Mac, EndpointInfo>,
    ) {
        let gone: Vec<Mac> = match self.remote.get(&peer) {
            Some(now) => {
                now.endpoints.keys().filter(|mac| !endpoints.contains_key(mac)).copied().collect()
            }
            None => Vec::new(),
        };
        gone.into_iter().for_each(|mac| self.remove(peer, mac));
        endpoints.values().for_each(|info| self.set(peer, info));
        self.set_version(peer, version);
    }

    pub(crate) fn set_version(&mut self, peer: PeerId, version: u64) {
        self.remote.entry(peer).or_default().version = version;
    }

    /// Adds or replaces an endpoint of another host.
    pub(crate) fn set(&mut self, peer: PeerId, info: &EndpointInfo) {
        let remote = self.remote.entry(peer).or_default();
        let before = remote.endpoints.insert(info.mac, info.clone());
        if before.as_ref() != Some(info) {
            self.index(peer, before.as_ref(), Some(info));
        }
    }

    /// Removes an endpoint of another host.
    pub(crate) fn remove(&mut self, peer: PeerId, mac: Mac) {
        let before = self.remote.get_mut(&peer).and_then(|remote| remote.endpoints.remove(&mac));
        if let Some(before) = before {
            self.index(peer, Some(&before), None);
        }
    }

    /// The host's link is up (`None`), or its endpoints go at a time.
    pub(crate) fn set_expiry(&mut self, peer: PeerId, expires: Option<Instant>) {
        if let Some(remote) = self.remote.get_mut(&peer) {
            remote.expires = expires;
            self.revision += 1;
        }
    }

    pub(crate) const fn revision(&self) -> u64 {
        self.revision
    }

    pub(crate) fn local_names(&self) -> &[NameRecord] {
        &self.local_names
    }

    /// Replaces the names that this host announces beside its endpoints'; whether that changes anything.
    pub(crate) fn set_local_names(&mut self, names: Vec<NameRecord>) -> bool {
        let changed = self.local_names != names;
        self.local_names = names;
        self.revision += u64::from(changed);
        changed
    }

    /// Replaces the names that another host announces beside its endpoints'.
    pub(crate) fn set_names(&mut self, peer: PeerId, names: Vec<NameRecord>) {
        let known = &mut self.remote.entry(peer).or_default().names;
        self.revision += u64::from(*known != names);
        *known = names;
    }

    /// Names on all hosts, own ones first.
    pub(crate) fn host_names(&self) -> Vec<HostNames> {
        self.host_names_with(|peer| self.of_host(peer), |_| true)
    }

    /// Each host with endpoints of the caller's choice, and those of its names by hand that are wanted.
    pub(crate) fn host_names_with(
        &self,
        endpoints: impl Fn(PeerId) -> Vec<EndpointInfo>,
        is_wanted: impl Fn(&NameRecord) -> bool,
    ) -> Vec<HostNames> {
        let grace = Duration::from_secs(ENDPOINT_GRACE_S);
        let host = |peer: PeerId, expires: Option<Instant>, names: &[NameRecord]| HostNames {
            peer,
            unlinked_since: expires.map(|at| at.checked_sub(grace).unwrap_or(at)),
            endpoints: endpoints(peer),
            names: names.iter().filter(|record| is_wanted(record)).cloned().collect(),
        };
        let own = host(self.local_peer, None, &self.local_names);
        let others = self.remote.iter();
        let others = others.map(|(peer, remote)| host(*peer, remote.expires, &remote.names));
        [own].into_iter().chain(others).collect()
    }

    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.remote.values().filter_map(|remote| remote.expires).min()
    }

    pub(crate) fn expire(&mut self, now: Instant) {
        let due = |remote: &Remote| remote.expires.is_some_and(|at| at <= now);
        let peers: Vec<PeerId> =
            self.remote.iter().filter(|(_, r)| due(r)).map(|(peer, _)| *peer).collect();
        peers.into_iter().for_each(|peer| self.drop_peer(peer));
    }

    /// Drops the endpoints of all hosts, this one's included.
    pub(crate) fn drop_all(&mut self) {
        let peers: Vec<PeerId> = self.remote.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.drop_peer(peer));
        let own: Vec<Mac> = self.local.keys().copied().collect();
        for mac in own {
            self.remove_local(mac);
        }
    }

    pub(crate) fn drop_peer(&mut self, peer: PeerId) {
        if let Some(remote) = self.remote.remove(&peer) {
            self.revision += 1;
            remote.endpoints.values().for_each(|info| self.index(peer, Some(info), None));
        }
    }

    /// The endpoint with an IP address and its host, unless it is this container of this host.
    pub(crate) fn other_holder(
        &self,
        address: IpAddr,
        own: &str,
    ) -> Option<(&EndpointInfo, PeerId)> {
        let holders = self.by_address.get(&address)?.iter();
        let infos = holders.filter_map(|(peer, mac)| Some((self.info(*peer, *mac)?, *peer)));
        infos.into_iter().find(|(info, peer)| *peer != self.local_peer || info.container != own)
    }

    /// All endpoints known, with their hosts; own ones first.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&EndpointInfo, PeerId)> {
        let own = self.local.values().map(|info| (info, self.local_peer));
        let others = self.remote.iter();
        own.chain(others.flat_map(|(peer, r)| r.endpoints.values().map(|info| (info, *peer))))
    }

    pub(crate) fn conflicts(&self) -> Vec<Conflict> {
        self.conflicts.iter().filter(|conflict| self.still(conflict)).cloned().collect()
    }

    /// Changes since the last call that the switch must learn, and new conflicts.
    pub(crate) fn changes(&mut self) -> EndpointChanges {
        let mut changes = EndpointChanges::default();
        for mac in std::mem::take(&mut self.touched) {
            self.find_conflicts(mac, &mut changes.conflicts);
            let wanted = self.wanted(mac);
            let told = self.told.get(&mac).cloned();
            if told == wanted {
                continue;
            }
            if let Some((peer, _)) = told {
                let moved = wanted.as_ref().is_none_or(|(now, _)| *now != peer);
                if moved {
                    changes.remove.push((mac, peer));
                }
                self.told.remove(&mac);
            }
            if let Some((peer, info)) = wanted {
                changes.add.push((info.clone(), peer));
                self.told.insert(mac, (peer, info));
            }
        }
        changes
    }

    /// The entry that the switch should have for an Ethernet address: none for an own container.
    fn wanted(&self, mac: Mac) -> Option<(PeerId, EndpointInfo)> {
        let peer = *self.by_mac.get(&mac)?.first()?;
        if peer == self.local_peer {
            return None;
        }
        let mut info = self.info(peer, mac)?.clone();
        let first = |net: &IpNet| {
            self.by_address.get(&net.addr()).and_then(BTreeSet::first) == Some(&(peer, mac))
        };
        info.addresses.retain(first);
        Some((peer, info))
    }

    fn info(&self, peer: PeerId, mac: Mac) -> Option<&EndpointInfo> {
        if peer == self.local_peer {
            return self.local.get(&mac);
        }
        self.remote.get(&peer)?.endpoints.get(&mac)
    }

    /// Keeps the two indices, and notes which entries of the switch may change.
    fn index(&mut self, peer: PeerId, before: Option<&EndpointInfo>, after: Option<&EndpointInfo>) {
        self.revision += 1;
        for (info, add) in before.map(|i| (i, false)).into_iter().chain(after.map(|i| (i, true))) {
            let hosts = self.by_mac.entry(info.mac).or_default();
            if add {
                hosts.insert(peer)
            } else {
                hosts.remove(&peer)
            };
            if hosts.is_empty() {
                self.by_mac.remove(&info.mac);
            }
            self.touched.insert(info.mac);
            for net in &info.addresses {
                let holders = self.by_address.entry(net.addr()).or_default();
                self.touched.extend(holders.iter().map(|(_, mac)| *mac));
                let holder = (peer, info.mac);
                if add {
                    holders.insert(holder)
                } else {
                    holders.remove(&holder)
                };
                if holders.is_empty() {
                    self.by_address.remove(&net.addr());
                }
            }
        }
    }

    fn find_conflicts(&mut self, mac: Mac, new: &mut Vec<Conflict>) {
        let mut found = Vec::new();
        let hosts: Vec<PeerId> = self.by_mac.get(&mac).into_iter().flatten().copied().collect();
        found.extend(pairs(&hosts).map(|(winner, loser)| (mac.to_string(), winner, loser)));
        let nets = hosts.iter().filter_map(|peer| self.info(*peer, mac));
        for address in nets.flat_map(|info| info.addresses.iter().map(IpNet::addr)) {
            let holders = self.by_address.get(&address).into_iter().flatten();
            let mut hosts: Vec<PeerId> = holders.map(|(peer, _)| *peer).collect();
            hosts.dedup();
            found.extend(pairs(&hosts).map(|(winner, loser)| (address.to_string(), winner, loser)));
        }
        for (address, winner, loser) in found {
            let conflict = Conflict { vni: self.vni, address, winner, loser };
            if !self.conflicts.contains(&conflict) {
                self.make_room();
                self.conflicts.insert(conflict.clone());
                new.push(conflict);
            }
        }
    }

    /// Forgets conflicts that are over when the table is full, so that a new one is still reported.
    fn make_room(&mut self) {
        if self.conflicts.len() >= CONFLICTS_MAX {
            self.conflicts = self.conflicts().into_iter().collect();
        }
        while self.conflicts.len() >= CONFLICTS_MAX {
            self.conflicts.pop_first();
        }
    }

    fn still(&self, conflict: &Conflict) -> bool {
        let both = |hosts: &mut dyn Iterator<Item = PeerId>| {
            let hosts: BTreeSet<PeerId> = hosts.collect();
            hosts.contains(&conflict.winner) && hosts.contains(&conflict.loser)
        };
        if let Ok(mac) = conflict.address.parse::<Mac>() {
            return both(&mut self.by_mac.get(&mac).into_iter().flatten().copied());
        }
        let address = conflict.address.parse::<IpAddr>().ok();
        let holders = address.and_then(|address| self.by_address.get(&address));
        both(&mut holders.into_iter().flatten().map(|(peer, _)| *peer))
    }
}

/// The first of some hosts with each of the others.
fn pairs(hosts: &[PeerId]) -> impl Iterator<Item = (PeerId, PeerId)> + '_ {
    hosts.iter().skip(1).filter_map(|loser| hosts.first().map(|winner| (*winner, *loser)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn peer(n: u8) -> PeerId {
        PeerId::from_bytes([n; 32])
    }

    fn endpoint(mac: u8, addresses: &[&str]) -> EndpointInfo {
        EndpointInfo {
            container: format!("c{mac}"),
            name: String::new(),
            aliases: Vec::new(),
            mac: Mac([2, 0, 0, 0, 0, mac]),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn the_lower_peer_id_gets_a_mac_that_two_announce_and_the_conflict_is_told_once() {
        let mut table = EndpointTable::new(peer(9), Vni::WEFT);
        table.set(peer(5), &endpoint(1, &["192.0.2.1/24"]));
        let changes = table.changes();
        assert_eq!(changes.add, [(endpoint(1, &["192.0.2.1/24"]), peer(5))]);
        table.set(peer(3), &endpoint(1, &["192.0.2.3/24"]));
        let changes = table.changes();
        assert_eq!(changes.remove, [(endpoint(1, &[]).mac, peer(5))]);
        assert_eq!(changes.add, [(endpoint(1, &["192.0.2.3/24"]), peer(3))]);
        assert_eq!(changes.conflicts.len(), 1);
        assert_eq!((changes.conflicts[0].winner, changes.conflicts[0].loser), (peer(3), peer(5)));
        assert_eq!(table.conflicts().len(), 1);
        table.drop_peer(peer(3));
        let changes = table.changes();
        assert_eq!(changes.add, [(endpoint(1, &["192.0.2.1/24"]), peer(5))]);
        assert_eq!(table.conflicts(), []);
        table.set(peer(3), &endpoint(1, &[]));
        assert_eq!(table.changes().conflicts, [], "the same conflict is not told again");
    }

    #[test]
    fn an_address_that_two_announce_is_told_of_the_lower_peer_id_only() {
        let mut table = EndpointTable::new(peer(9), Vni::WEFT);
        table.set(peer(5), &endpoint(1, &["192.0.2.1/24", "192.0.2.2/24"]));
        table.changes();
        table.set(peer(3), &endpoint(2, &["192.0.2.1/24"]));
        let changes = table.changes();
        assert_eq!(
            changes.add,
            [(endpoint(1, &["192.0.2.2/24"]), peer(5)), (endpoint(2, &["192.0.2.1/24"]), peer(3))]
        );
        assert_eq!(changes.remove, []);
        assert_eq!(changes.conflicts.len(), 1);
        table.remove(peer(3), endpoint(2, &[]).mac);
        let changes = table.changes();
        assert_eq!(changes.add, [(endpoint(1, &["192.0.2.1/24", "192.0.2.2/24"]), peer(5))]);
        assert_eq!(changes.remove, [(endpoint(2, &[]).mac, peer(3))]);
    }

    #[test]
    fn an_own_container_is_no_entry_of_the_switch() {
        let mut table = EndpointTable::new(peer(1), Vni::WEFT);
        table.set_local(&endpoint(1, &["192.0.2.1/24"]));
        table.set(peer(5), &endpoint(1, &[]));
        let changes = table.changes();
        assert_eq!((changes.add.len(), changes.conflicts.len()), (0, 1));
        let address = "192.0.2.1".parse().unwrap();
        assert_eq!(table.other_holder(address, "c1"), None);
        assert_eq!(table.other_holder(address, "c2").unwrap().1, peer(1));
    }

    #[test]
    fn a_new_whole_set_removes_what_is_not_in_it() {
        let mut table = EndpointTable::new(peer(9), Vni::WEFT);
        table.set(peer(1), &endpoint(1, &[]));
        table.set(peer(1), &endpoint(2, &[]));
        table.changes();
        let whole = [endpoint(2, &["192.0.2.1/24"]), endpoint(3, &[])];
        table.set_all(peer(1), 7, &whole.iter().map(|e| (e.mac, e.clone())).collect());
        let changes = table.changes();
        assert_eq!(changes.remove, [(endpoint(1, &[]).mac, peer(1))]);
        assert_eq!(changes.add.len(), 2);
        assert_eq!(table.version_of(peer(1)), Some(7));
    }
}
