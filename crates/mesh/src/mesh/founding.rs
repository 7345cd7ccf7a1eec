//! Chooses the host that founds a mesh when hosts are launched naming each other.
//!
//! A host without a mesh tells every host that it reaches which hosts its user named. It may found on three
//! conditions. It knows the names given by each host that it named, by those hosts in turn, and so on. Each of
//! these leads back to it by its names, so none can be on its way into a mesh elsewhere. It has the lowest peer
//! id of them all. Names do not change: in a set of hosts where each leads to each other, exactly one founds,
//! however late they hear of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::{Change, Mesh, Output};
use crate::config::{Founding, Target};
use crate::error::MeshError;
use crate::limits::{NAMINGS_MAX, TARGETS_MAX, version_max};
use crate::message::{Message, Naming};

/// The host that the names choose to found the mesh.
enum Verdict {
    /// This host.
    Local,
    /// This host, or it leads to the host that founds.
    Other(PeerId),
    /// The names given by this host are not known yet.
    Unknown(PeerId),
}

impl Mesh {
    /// The user's targets at launch or by `connect`, with the hosts that answered there (perhaps this host
    /// itself). Each call replaces the whole list. Only the first [`TARGETS_MAX`] count.
    pub fn handle_targets(&mut self, now: Instant, mut targets: Vec<Target>) {
        targets.truncate(TARGETS_MAX);
        if self.targets != targets {
            self.targets = targets;
            self.tell_naming();
        }
        self.drive(now);
    }

    pub(crate) fn found(&mut self, now: Instant) {
        let network = self.new_network_with(self.config.range6);
        self.state.weft.found(network);
        self.dirty = true;
        self.emit(Output::Changed(Change::Founded { network }));
        self.on_network(now);
    }

    pub(crate) fn drive_founding(&mut self, now: Instant) {
        let may = self.state.weft.network.is_none()
            && self.storage.failure().is_none()
            && self.config.founding == Founding::Join
            && !self.targets.is_empty()
            && self.missing_targets().is_empty()
            && self.links.values().all(|link| link.network.is_none());
        if may && matches!(self.verdict(), Verdict::Local) {
            self.found(now);
        }
    }

    /// The statement of the hosts that this host's user named.
    pub(crate) fn naming(&self) -> Naming {
        let known: BTreeSet<PeerId> =
            self.targets.iter().filter_map(|target| target.peer).collect();
        Naming {
            host: self.config.local,
            version: self.naming_version,
            complete: self.state.weft.network.is_none()
                && self.targets.iter().all(|target| target.peer.is_some()),
            names: known.into_iter().collect(),
        }
    }

    /// Tells all linked hosts whom this one names; its being in a mesh takes back what it said before.
    pub(crate) fn tell_naming(&mut self) {
        self.naming_version += 1;
        let naming = self.naming();
        self.send_all(&Message::Naming { naming });
    }

    /// Sends a peer the names given by each host.
    pub(crate) fn send_namings(&mut self, peer: PeerId) {
        if self.state.weft.network.is_some() {
            return;
        }
        let all: Vec<Naming> = self.namings.values().cloned().chain([self.naming()]).collect();
        for naming in all {
            self.send(peer, Message::Naming { naming });
        }
    }

    pub(crate) fn handle_naming(&mut self, peer: PeerId, naming: &Naming) -> Result<(), MeshError> {
        let direct = naming.host == peer;
        if naming.names.len() > TARGETS_MAX || naming.version > version_max(direct) {
            return Err(MeshError::Malformed { peer, what: "an impossible list of named hosts" });
        }
        if self.state.weft.network.is_some() {
            return Ok(());
        }
        if naming.host == self.config.local {
            if naming.version >= self.naming_version && *naming != self.naming() {
                self.naming_version = naming.version;
                self.tell_naming();
            }
            return Ok(());
        }
        let newer = match self.namings.get(&naming.host) {
            Some(known) if direct => known != naming,
            Some(known) => known.version < naming.version && !self.links.contains_key(&naming.host),
            None => self.namings.len() < NAMINGS_MAX,
        };
        if newer {
            self.namings.insert(naming.host, naming.clone());
            for other in self.linked().into_iter().filter(|other| *other != peer) {
                self.send(other, Message::Naming { naming: naming.clone() });
            }
        }
        Ok(())
    }

    /// Peers named by the user that are not linked, as the user wrote them.
    fn missing_targets(&self) -> Vec<&str> {
        let linked = |peer: PeerId| peer == self.config.local || self.links.contains_key(&peer);
        let missing = self.targets.iter().filter(|target| !target.peer.is_some_and(linked));
        missing.map(|target| target.name.as_str()).collect()
    }

    fn verdict(&self) -> Verdict {
        let own = self.naming();
        let mut reached = BTreeMap::from([(self.config.local, &own)]);
        let mut open: Vec<PeerId> = own.names.clone();
        while let Some(host) = open.pop() {
            if reached.contains_key(&host) {
                continue;
            }
            match self.namings.get(&host).filter(|naming| naming.complete) {
                Some(naming) => {
                    reached.insert(host, naming);
                    open.extend(&naming.names);
                }
                None => return Verdict::Unknown(host),
            }
        }
        let mut leads_here = BTreeSet::from([self.config.local]);
        loop {
            let next = |(host, naming): (&PeerId, &&Naming)| {
                let leads = naming.names.iter().any(|name| leads_here.contains(name));
                (leads && !leads_here.contains(host)).then_some(*host)
            };
            let more: Vec<PeerId> = reached.iter().filter_map(next).collect();
            if more.is_empty() {
                break;
            }
            leads_here.extend(more);
        }
        match reached.keys().find(|host| !leads_here.contains(host)).or(reached.keys().next()) {
            Some(host) if *host != self.config.local => Verdict::Other(*host),
            _ => Verdict::Local,
        }
    }

    /// The reason why a host without a mesh still waits.
    pub(crate) fn founding_reason(&self) -> String {
        if let Some(why) = self.storage.failure() {
            return format!("this host cannot save its state: {why}");
        }
        if let Some((peer, _)) = self.links.iter().find(|(_, link)| link.network.is_some()) {
            let space = self.spaces.get(&Vni::WEFT);
            return match space.and_then(|space| space.ask.refusals().next()) {
                Some((peer, why)) => format!("{} gave no range: {why}", self.name_of(*peer)),
                None => format!("waiting for a range of {}", self.name_of(*peer)),
            };
        }
        let missing = self.missing_targets();
        if !missing.is_empty() {
            return format!("waiting for a link with {}", missing.join(", "));
        }
        if self.targets.is_empty() {
            return "waiting for a link with another host".to_owned();
        }
        match self.verdict() {
            Verdict::Local => "founding the network".to_owned(),
            Verdict::Other(peer) => {
                format!("waiting for {} to found or join a network", self.name_of(peer))
            }
            Verdict::Unknown(peer) => {
                format!("waiting for {}, which waits for others itself", self.name_of(peer))
            }
        }
    }
}
