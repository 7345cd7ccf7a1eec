//! Who founds a mesh when hosts are launched naming each other.
//!
//! A host may found once all that its user named are linked, nobody linked has a mesh, it has the lowest peer
//! id of all linked with it, and each of them has agreed. Whoever has agreed founds nothing itself and agrees
//! to nobody else, until the one agreed to withdraws, is gone, or has founded. So two hosts that are linked,
//! or share a linked host, do not both found.

use std::time::Instant;

use rand::Rng;
use weft_crypto::PeerId;

use crate::config::Founding;
use crate::mesh::{Change, Mesh, Output};
use crate::message::Message;

impl Mesh {
    pub(crate) fn found(&mut self, now: Instant) {
        let network = self.new_network();
        self.state.found(network);
        self.dirty = true;
        self.emit(Output::Changed(Change::Founded { network }));
        self.on_network(now);
    }

    /// Peers named by the user that are not linked, as the user wrote them.
    pub(crate) fn missing_targets(&self) -> Vec<&str> {
        let linked = |peer: PeerId| peer == self.config.local || self.links.contains_key(&peer);
        let missing = self.targets.iter().filter(|target| !target.peer.is_some_and(linked));
        missing.map(|target| target.name.as_str()).collect()
    }

    pub(crate) fn drive_founding(&mut self, now: Instant) {
        if self.state.network.is_some() {
            return;
        }
        if self.is_candidate() {
            self.ask_consent();
            if self.links.values().all(|link| link.consents) {
                self.found(now);
            }
            return;
        }
        self.withdraw();
        let founded = self.links.values().any(|link| link.network.is_some());
        if self.consent.is_none() && !founded {
            self.give_consent();
        }
    }

    pub(crate) fn handle_found_withdraw(&mut self, peer: PeerId) {
        self.link_mut(peer, |link| link.asks_to_found = None);
        if self.consent == Some(peer) {
            self.consent = None;
        }
    }

    fn is_candidate(&self) -> bool {
        let lowest = self.links.keys().next().is_some_and(|peer| self.config.local < *peer);
        self.config.founding == Founding::Join
            && lowest
            && self.consent.is_none()
            && !self.targets.is_empty()
            && self.missing_targets().is_empty()
            && self.links.values().all(|link| link.network.is_none())
    }

    fn ask_consent(&mut self) {
        for peer in self.linked() {
            if self.links.get(&peer).is_some_and(|link| link.asked_consent.is_none()) {
                let round = self.rng.next_u64();
                self.link_mut(peer, |link| link.asked_consent = Some(round));
                self.send(peer, Message::FoundAsk { round });
            }
        }
    }

    fn withdraw(&mut self) {
        for peer in self.linked() {
            if self.links.get(&peer).is_some_and(|link| link.asked_consent.is_some()) {
                self.link_mut(peer, |link| {
                    link.asked_consent = None;
                    link.consents = false;
                });
                self.send(peer, Message::FoundWithdraw);
            }
        }
    }

    /// Agrees to the lowest of those who ask.
    fn give_consent(&mut self) {
        let asking = |(peer, link): (&PeerId, &crate::mesh::Link)| {
            link.asks_to_found.map(|round| (*peer, round))
        };
        if let Some((peer, round)) = self.links.iter().find_map(asking) {
            self.consent = Some(peer);
            self.send(peer, Message::FoundConsent { round });
        }
    }

    /// For what a host without a mesh waits.
    pub(crate) fn founding_reason(&self) -> String {
        let missing = self.missing_targets();
        if let Some((peer, _)) = self.links.iter().find(|(_, link)| link.network.is_some()) {
            return match self.range_ask.refusals().next() {
                Some((peer, why)) => format!("{} gave no range: {why}", self.name_of(*peer)),
                None => format!("waiting for a range of {}", self.name_of(*peer)),
            };
        }
        if self.links.is_empty() && missing.is_empty() {
            return "waiting for a link with another host".to_owned();
        }
        if let Some(peer) = self.consent {
            return format!("waiting for {} to found the network", self.name_of(peer));
        }
        if !missing.is_empty() {
            return format!("waiting for a link with {}", missing.join(", "));
        }
        match self.links.iter().find(|(_, link)| !link.consents) {
            Some((lowest, _)) if *lowest < self.config.local => {
                format!("waiting for {} to found the network", self.name_of(*lowest))
            }
            Some((peer, _)) => format!("waiting for {} to agree", self.name_of(*peer)),
            None => "founding the network".to_owned(),
        }
    }
}
