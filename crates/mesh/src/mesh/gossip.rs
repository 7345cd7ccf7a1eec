//! Telling and hearing of members, connections, endpoints and names: all when a link comes up, then changes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Instant;

use weft_crypto::PeerId;
use weft_packet::ethernet::Mac;
use weft_packet::vxlan::Vni;

use super::{Change, Link, Mesh, Output};
use crate::endpoint::{EndpointChanges, EndpointInfo, EndpointTable, HostNames};
use crate::error::{MeshError, Refusal};
use crate::limits::{
    ADDRESSES_PER_MEMBER_MAX, CONNECTIONS_PER_MESSAGE_MAX, ENDPOINTS_PER_MESSAGE_MAX,
    ENDPOINTS_PER_MESSAGE_SENT, ENDPOINTS_PER_PEER_MAX, MEMBERS_MAX, MEMBERS_PER_MESSAGE_MAX,
    NAMES_PER_MESSAGE_MAX, NAMES_PER_PEER_MAX,
};
use crate::message::{MemberInfo, Message};
use crate::names::NameRecord;

impl Mesh {
    /// Tells a peer of all members but itself.
    pub(crate) fn send_members(&mut self, now: Instant, peer: PeerId) {
        self.refresh_members(now);
        let others = self.members.iter().map(|(other, _)| other).filter(|other| *other != peer);
        let others: Vec<PeerId> = others.collect();
        for some in others.chunks(MEMBERS_PER_MESSAGE_MAX) {
            let infos = some.iter().filter_map(|other| self.members.info(now, *other));
            let members = infos.collect();
            self.send(peer, Message::Members { members });
        }
    }

    /// Passes news of members on: to all but the one they come from and those it tells itself.
    pub(crate) fn tell_members(&mut self, now: Instant, which: &[PeerId], from: Option<PeerId>) {
        for some in which.chunks(MEMBERS_PER_MESSAGE_MAX) {
            let members = some.iter().filter_map(|peer| self.members.info(now, *peer)).collect();
            let message = Message::Members { members };
            match from {
                Some(from) => self.relay(from, &message),
                None => self.send_all(&message),
            }
        }
    }

    /// Announces where a member is now and which addresses it left. Skips the sender and the hosts that hear it
    /// from the sender.
    pub(crate) fn tell_moved(
        &mut self,
        now: Instant,
        peer: PeerId,
        mut gone: Vec<SocketAddr>,
        from: PeerId,
    ) {
        gone.truncate(ADDRESSES_PER_MEMBER_MAX);
        if let Some(info) = self.members.info(now, peer) {
            self.relay(from, &Message::Members { members: vec![MemberInfo { gone, ..info }] });
        }
    }

    pub(crate) fn handle_members(
        &mut self,
        now: Instant,
        peer: PeerId,
        members: &[MemberInfo],
    ) -> Result<(), MeshError> {
        if members.len() > MEMBERS_PER_MESSAGE_MAX {
            return Err(MeshError::Malformed { peer, what: "too many members in one message" });
        }
        let mut news = Vec::new();
        for info in members {
            let local = info.peer == self.config.local;
            if local || self.links.contains_key(&info.peer) || self.is_forgotten(info.peer) {
                continue;
            }
            let known = self.members.get(info.peer).is_some();
            if !self.members.heard(now, info, self.config.discovery) {
                continue;
            }
            self.dirty = true;
            match info.gone.is_empty() {
                true => news.push(info.peer),
                false => self.tell_moved(now, info.peer, info.gone.clone(), peer),
            }
            if let (false, Some(member)) = (known, self.members.get(info.peer)) {
                let (peer, nickname) = (info.peer, member.nickname.clone());
                self.emit(Output::Changed(Change::MemberAdded { peer, nickname }));
            }
        }
        self.tell_members(now, &news, Some(peer));
        Ok(())
    }

    /// Tells a peer whom else this host is linked with.
    pub(crate) fn send_connections(&mut self, peer: PeerId) {
        let mut full = true;
        for some in self.linked().chunks(CONNECTIONS_PER_MESSAGE_MAX) {
            let (add, remove) = (some.to_vec(), Vec::new());
            self.send(peer, Message::Connections { full, add, remove });
            full = false;
        }
    }

    /// Tells all others that a link came up or went down.
    pub(crate) fn tell_connection(&mut self, peer: PeerId, up: bool) {
        let (mut add, mut remove) = (Vec::new(), Vec::new());
        if up { &mut add } else { &mut remove }.push(peer);
        for other in self.linked() {
            if other != peer {
                let (add, remove) = (add.clone(), remove.clone());
                self.send(other, Message::Connections { full: false, add, remove });
            }
        }
    }

    pub(crate) fn handle_connections(
        &mut self,
        now: Instant,
        peer: PeerId,
        full: bool,
        add: &[PeerId],
        remove: &[PeerId],
    ) -> Result<(), MeshError> {
        if add.len().max(remove.len()) > CONNECTIONS_PER_MESSAGE_MAX {
            return Err(MeshError::Malformed { peer, what: "too many connections in one message" });
        }
        let Some(link) = self.links.get_mut(&peer) else { return Ok(()) };
        if full {
            link.connections.clear();
        }
        link.connections.retain(|other| !remove.contains(other));
        link.connections.extend(add);
        let fits = link.connections.len() <= MEMBERS_MAX;
        while link.connections.len() > MEMBERS_MAX {
            link.connections.pop_last();
        }
        for other in add.iter().chain(remove) {
            self.members.seen(now, *other);
        }
        for other in add {
            self.is_back(*other);
        }
        for other in remove.iter().filter(|other| **other != peer) {
            self.resync_later(now, *other);
        }
        let too_many = MeshError::TooMany { peer, what: "connections", max: MEMBERS_MAX };
        if fits { Ok(()) } else { Err(too_many) }
    }

    pub(crate) fn forget_old(&mut self, now: Instant) {
        let alive = self.refresh_members(now);
        for peer in self.members.forget_old(now, &alive) {
            self.member_gone(peer);
        }
    }

    fn member_gone(&mut self, peer: PeerId) {
        self.drop_endpoints_of(peer);
        self.dirty = true;
        self.emit(Output::Changed(Change::MemberForgotten { peer }));
    }

    /// Makes room for a host that has a link. If the table is full, the member without a sign of life for longest
    /// goes.
    pub(crate) fn make_room_for_member(
        &mut self,
        now: Instant,
        peer: PeerId,
    ) -> Result<(), Refusal> {
        if self.members.has_room_for(peer) {
            return Ok(());
        }
        let alive = self.refresh_members(now);
        let oldest = self.members.oldest(&alive).ok_or(Refusal::TooManyMembers)?;
        self.members.forget(oldest);
        self.member_gone(oldest);
        Ok(())
    }

    /// Marks every host as seen that is linked with this host or with one of its peers; returns them.
    fn refresh_members(&mut self, now: Instant) -> BTreeSet<PeerId> {
        let links = self.links.iter();
        let alive: BTreeSet<PeerId> =
            links.flat_map(|(peer, link)| link.connections.iter().chain([peer])).copied().collect();
        alive.iter().for_each(|peer| self.members.seen(now, *peer));
        alive
    }

    /// Tells a peer of all own endpoints on a network.
    pub(crate) fn send_endpoints(&mut self, peer: PeerId, vni: Vni) {
        let Some((version, all)) = self.table(vni).map(EndpointTable::local) else { return };
        let parts = all.len().div_ceil(ENDPOINTS_PER_MESSAGE_SENT).max(1);
        for part in 0..parts {
            let some = all.iter().skip(part * ENDPOINTS_PER_MESSAGE_SENT);
            let add = some.take(ENDPOINTS_PER_MESSAGE_SENT).cloned().collect();
            let (full, more, remove) = (true, part + 1 < parts, Vec::new());
            self.send(peer, Message::Endpoints { version, full, more, add, remove }.on(vni));
        }
    }

    pub(crate) fn handle_endpoints(
        &mut self,
        (peer, vni): (PeerId, Vni),
        version: u64,
        (full, more): (bool, bool),
        add: Vec<EndpointInfo>,
        remove: &[Mac],
    ) -> Result<(), MeshError> {
        if add.len().max(remove.len()) > ENDPOINTS_PER_MESSAGE_MAX {
            return Err(MeshError::Malformed { peer, what: "too many endpoints in one message" });
        }
        if let Some(what) = add.iter().find_map(EndpointInfo::fault) {
            return Err(MeshError::Malformed { peer, what });
        }
        if vni != Vni::WEFT && !self.carries(peer, vni) {
            return Ok(());
        }
        let max = self.room_for_endpoints(peer, vni);
        let too_many = MeshError::TooMany { peer, what: "endpoints", max: ENDPOINTS_PER_PEER_MAX };
        let Some(incoming) = self.links.get_mut(&peer).map(|it| it.incoming.entry(vni)) else {
            return Ok(());
        };
        let incoming = incoming.or_default();
        if full {
            let all = incoming.new_endpoints.get_or_insert_default();
            for info in add {
                if all.len() >= max && !all.contains_key(&info.mac) {
                    return Err(too_many);
                }
                all.insert(info.mac, info);
            }
            if !more {
                incoming.endpoints_asked = false;
                let all = incoming.new_endpoints.take().unwrap_or_default();
                if let Some(table) = self.table_mut(vni) {
                    table.set_all(peer, version, &all);
                }
            }
            return Ok(());
        }
        if incoming.endpoints_asked || incoming.new_endpoints.is_some() {
            return Ok(());
        }
        let known = self.table(vni).and_then(|table| table.version_of(peer));
        if known.and_then(|known| known.checked_add(1)) != Some(version) {
            let link = self.links.get_mut(&peer);
            if let Some(incoming) = link.and_then(|link| link.incoming.get_mut(&vni)) {
                incoming.endpoints_asked = true;
            }
            self.send(peer, Message::EndpointsRequest.on(vni));
            return Ok(());
        }
        let Some(table) = self.table_mut(vni) else { return Ok(()) };
        table.set_version(peer, version);
        remove.iter().for_each(|mac| table.remove(peer, *mac));
        for info in add {
            if table.count_of(peer) >= max && !table.has(peer, info.mac) {
                return Err(too_many);
            }
            table.set(peer, &info);
        }
        Ok(())
    }

    /// How many endpoints a peer may have on a network, by those that it has on others.
    fn room_for_endpoints(&self, peer: PeerId, vni: Vni) -> usize {
        let others = self.tables().filter(|(other, _)| *other != vni);
        let known: usize = others.map(|(_, table)| table.count_of(peer)).sum();
        let incoming = self.links.get(&peer).map(|link| &link.incoming);
        let coming = incoming.into_iter().flatten().filter(|(other, _)| **other != vni);
        let coming: usize =
            coming.filter_map(|(_, it)| it.new_endpoints.as_ref()).map(BTreeMap::len).sum();
        ENDPOINTS_PER_PEER_MAX.saturating_sub(known + coming)
    }

    /// Reports changes of the endpoints of all networks to the switch and to the log.
    pub(crate) fn tell_endpoints(&mut self) {
        let all: Vec<(Vni, EndpointChanges)> =
            self.tables_mut().map(|(vni, table)| (vni, table.changes())).collect();
        for (vni, changes) in all {
            self.emit_endpoints(vni, changes);
        }
    }

    pub(crate) fn emit_endpoints(&mut self, vni: Vni, changes: EndpointChanges) {
        let EndpointChanges { add, remove, conflicts } = changes;
        if !add.is_empty() || !remove.is_empty() {
            self.emit(Output::Endpoints { vni, add, remove });
        }
        for conflict in conflicts {
            self.emit(Output::Changed(Change::Conflict(conflict)));
        }
    }
}

impl Mesh {
    /// Names on all hosts, this one first: endpoints of `weft`, and names that users gave on any network.
    #[must_use]
    pub fn host_names(&self) -> Vec<HostNames> {
        self.endpoints.host_names()
    }

    /// Grows whenever [`Self::host_names`] or [`Self::host_names_on`] changes, or the networks that this host holds.
    #[must_use]
    pub fn names_revision(&self) -> u64 {
        self.endpoints.revision() + self.names_revision_besides()
    }

    /// Whether this host is in a mesh and has the names of all. Every other host that it knows of is linked then, and
    /// has told its names on each network that the two share.
    #[must_use]
    pub fn has_names_of_all(&self) -> bool {
        let told = |peer: PeerId| {
            let is_coming = |link: &Link| {
                let incoming = link.incoming.get(&Vni::WEFT);
                incoming.is_some_and(|incoming| incoming.new_endpoints.is_some())
            };
            self.links.get(&peer).is_some_and(|link| !is_coming(link))
                && self.endpoints.version_of(peer).is_some()
        };
        self.state.weft.network.is_some()
            && self.members.iter().all(|(peer, _)| told(peer))
            && self.has_names_besides()
    }

    /// Announces all names of this host but those of its endpoints, in place of those before.
    ///
    /// # Errors
    /// [`MeshError::BadName`]: one that no host would take, or too many.
    pub fn set_local_names(&mut self, names: Vec<NameRecord>) -> Result<(), MeshError> {
        if let Some(fault) = names.iter().find_map(NameRecord::fault) {
            return Err(MeshError::BadName(fault));
        }
        if names.len() > NAMES_PER_PEER_MAX {
            return Err(MeshError::BadName("this host has as many names as it may have"));
        }
        if self.endpoints.set_local_names(names) {
            for peer in self.linked() {
                self.send_names(peer);
            }
        }
        Ok(())
    }

    /// Tells a peer of all names of this host.
    pub(crate) fn send_names(&mut self, peer: PeerId) {
        let all = self.endpoints.local_names().to_vec();
        let parts = all.len().div_ceil(NAMES_PER_MESSAGE_MAX).max(1);
        for part in 0..parts {
            let some = all.iter().skip(part * NAMES_PER_MESSAGE_MAX);
            let names = some.take(NAMES_PER_MESSAGE_MAX).cloned().collect();
            let (first, more) = (part == 0, part + 1 < parts);
            self.send(peer, Message::Names { first, more, names });
        }
    }

    pub(crate) fn handle_names(
        &mut self,
        peer: PeerId,
        (first, more): (bool, bool),
        names: Vec<NameRecord>,
    ) -> Result<(), MeshError> {
        if names.len() > NAMES_PER_MESSAGE_MAX {
            return Err(MeshError::Malformed { peer, what: "too many names in one message" });
        }
        if let Some(what) = names.iter().find_map(NameRecord::fault) {
            return Err(MeshError::Malformed { peer, what });
        }
        let Some(link) = self.links.get_mut(&peer) else { return Ok(()) };
        if first {
            link.new_names.clear();
        }
        let max = NAMES_PER_PEER_MAX;
        if link.new_names.len() + names.len() > max {
            return Err(MeshError::TooMany { peer, what: "names", max });
        }
        link.new_names.extend(names);
        if !more {
            let names = std::mem::take(&mut link.new_names);
            self.endpoints.set_names(peer, names);
        }
        Ok(())
    }
}
