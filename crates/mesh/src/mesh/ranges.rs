//! Requests and grants of ranges, and the record of their owners.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use rand::Rng;
use weft_crypto::PeerId;

use super::{Change, Mesh, Output};
use crate::error::MeshError;
use crate::limits::{
    ANNOUNCEMENT_VERSION_MAX, MEMBERS_MAX, NAME_BYTES_MAX, RANGE_ANSWER_S, RANGE_RETRY_S,
    RANGES_PER_PEER_MAX, USAGE_INTERVAL_MS,
};
use crate::message::{Message, Network, RangeAnnouncement};
use crate::range::{AddressRange, RangeSet};
use crate::state::Granted;

/// The progress of asking other hosts for a range.
#[derive(Debug, Default)]
pub(crate) struct RangeAsk {
    /// The host asked now, and the time at which its answer is overdue.
    current: Option<(PeerId, Instant)>,
    /// Hosts that gave nothing, with their reasons.
    refused: BTreeMap<PeerId, String>,
    /// When to ask the hosts in `refused` again.
    retry_at: Option<Instant>,
}

/// Whether a host made the one announcement before the other.
fn is_before(one: &RangeAnnouncement, other: &RangeAnnouncement) -> bool {
    one.network == other.network && one.version < other.version
}

impl RangeAsk {
    pub(crate) fn next(&self) -> Option<Instant> {
        self.current.map(|(_, until)| until).or(self.retry_at)
    }

    pub(crate) fn peer_gone(&mut self, peer: PeerId) {
        if self.current.is_some_and(|(asked, _)| asked == peer) {
            self.current = None;
        }
        self.refused.remove(&peer);
    }

    pub(crate) fn refusals(&self) -> impl Iterator<Item = (&PeerId, &String)> {
        self.refused.iter()
    }

    /// No host is left to ask.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.current.is_none()
    }
}

impl Mesh {
    /// Asks one host after the other for a range, while this host needs one.
    pub(crate) fn drive_range_ask(&mut self, now: Instant) {
        let joined = self.state.network.is_some();
        let may = self.standing.is_sure();
        let wants = !joined || self.pending.values().any(|pending| pending.is_short());
        if !wants || !may {
            self.range_ask = RangeAsk::default();
            return;
        }
        if self.storage.failure().is_some() {
            // A range that cannot be kept is not asked for.
            self.range_ask = RangeAsk::default();
            return;
        }
        if let Some((peer, until)) = self.range_ask.current {
            if until > now {
                return;
            }
            self.range_ask.current = None;
            let why = format!("no answer within {RANGE_ANSWER_S} s");
            self.range_ask.refused.insert(peer, why);
        }
        if self.range_ask.retry_at.is_some_and(|at| at <= now) {
            self.range_ask.retry_at = None;
            self.range_ask.refused.clear();
        }
        if let Some(peer) = self.richest_to_ask() {
            let fresh = self.rng.next_u64();
            self.dirty |= self.state.request.is_none();
            let request = self.state.open_request(fresh);
            let until = now + Duration::from_secs(RANGE_ANSWER_S);
            self.range_ask.current = Some((peer, until));
            let within = self.config.subnet();
            self.send(peer, Message::RangeRequest { request, within });
        } else if !self.range_ask.refused.is_empty() {
            let at = now + Duration::from_secs(RANGE_RETRY_S);
            self.range_ask.retry_at.get_or_insert(at);
        }
    }

    /// The linked host with the most free addresses that has not refused yet.
    fn richest_to_ask(&self) -> Option<PeerId> {
        let ours = self.state.network;
        let founded = self
            .links
            .iter()
            .filter(|(_, link)| link.network.is_some() && (ours.is_none() || link.network == ours));
        let open = founded.filter(|(peer, _)| !self.range_ask.refused.contains_key(peer));
        open.map(|(peer, _)| *peer).max_by_key(|peer| self.free_of(*peer))
    }

    /// How many addresses another host has free, as far as it told.
    fn free_of(&self, peer: PeerId) -> u64 {
        let size = self.announced.get(&peer).map_or(0, |(_, ranges)| ranges.size());
        let used = self.links.get(&peer).and_then(|link| link.used).unwrap_or(0);
        size.saturating_sub(used)
    }

    pub(crate) fn handle_range_request(&mut self, peer: PeerId, request: u64, within: Ipv4Net) {
        let theirs = self.links.get(&peer).and_then(|link| link.network);
        let Some(network) = self.state.network else {
            let reason = format!("{} owns no range yet", self.config.nickname);
            self.send(peer, Message::RangeRefused { request, reason, ask: None });
            return;
        };
        if theirs.is_some_and(|theirs| theirs != network) {
            return;
        }
        if let Some(why) = self.unsure() {
            let reason = format!("{}: {why}", self.config.nickname);
            self.send(peer, Message::RangeRefused { request, reason, ask: None });
            return;
        }
        if let Some(why) = self.storage.failure()
            && !self.storage.has_grant_of(peer, request)
        {
            let reason = format!("{} cannot save its state: {why}", self.config.nickname);
            self.send(peer, Message::RangeRefused { request, reason, ask: None });
            return;
        }
        let (reason, ask) = match self.state.grant(peer, request, within) {
            Granted::Ranges { ranges, new } => {
                if new {
                    self.dirty = true;
                    self.announce();
                    let ranges = ranges.clone();
                    self.emit(Output::Changed(Change::RangesGiven { to: peer, ranges }));
                }
                self.send(peer, Message::RangeGrant { request, network, ranges });
                return;
            }
            Granted::NothingLeft => {
                let others = self.announced.keys().filter(|other| **other != peer);
                let richest = others.max_by_key(|other| self.free_of(**other)).copied();
                let ask = richest.filter(|other| self.free_of(*other) > 1);
                let hint = match ask {
                    Some(other) => format!("ask {}", self.name_of(other)),
                    None => "no known host has any".to_owned(),
                };
                let name = &self.config.nickname;
                (format!("{name} has no free addresses left in {within} to give; {hint}"), ask)
            }
            Granted::TooManyOpen => {
                let name = &self.config.nickname;
                (format!("{name} waits for confirmation of ranges that it gave earlier"), None)
            }
        };
        self.send(peer, Message::RangeRefused { request, reason, ask });
    }

    pub(crate) fn handle_range_grant(
        &mut self,
        now: Instant,
        from: PeerId,
        request: u64,
        network: Network,
        ranges: &[AddressRange],
    ) -> Result<(), MeshError> {
        if self.state.has_grant(from, request) {
            self.send(from, Message::RangeAccepted { request });
            return Ok(());
        }
        if !self.state.has_issued(request) || !(self.standing.is_sure() || self.standing.is_open())
        {
            return Ok(());
        }
        if network.range6.prefix_len() != 64 || network.range6.trunc() != network.range6 {
            return Err(MeshError::Malformed { peer: from, what: "a grant of a bad network" });
        }
        self.link_mut(from, |link| link.network = Some(network));
        self.check_network(now, from);
        if !self.links.contains_key(&from) {
            return Ok(());
        }
        let first = self.state.network.is_none();
        if ranges.len() > RANGES_PER_PEER_MAX
            || !self.state.accept_grant(from, request, network, ranges)
        {
            return Err(MeshError::Malformed { peer: from, what: "a grant of unfit ranges" });
        }
        self.dirty = true;
        self.range_ask = RangeAsk::default();
        let ranges = ranges.to_vec();
        self.emit(Output::Changed(if first {
            Change::Joined { network, from, ranges }
        } else {
            Change::RangesReceived { from, ranges }
        }));
        self.send(from, Message::RangeAccepted { request });
        if first {
            self.on_network(now);
        } else {
            self.announce();
        }
        Ok(())
    }

    pub(crate) fn handle_range_refused(
        &mut self,
        peer: PeerId,
        request: u64,
        reason: &str,
        ask: Option<PeerId>,
    ) {
        let current = self.range_ask.current.is_some_and(|(asked, _)| asked == peer);
        if !current || self.state.request != Some(request) {
            return;
        }
        self.range_ask.current = None;
        let mut why: String =
            reason.chars().filter(|c| !c.is_control()).take(NAME_BYTES_MAX).collect();
        if let Some(other) = ask.filter(|other| !self.links.contains_key(other)) {
            why = format!("{why}, which is not linked with this host ({})", self.name_of(other));
        }
        self.range_ask.refused.insert(peer, why);
    }

    /// Sends grants again that a peer may not have got.
    pub(crate) fn send_open_grants(&mut self, peer: PeerId) {
        let Some(network) = self.state.network.filter(|_| self.standing.is_sure()) else { return };
        for (request, ranges) in self.state.open_grants(peer) {
            self.send(peer, Message::RangeGrant { request, network, ranges });
        }
    }

    /// Tells all linked hosts what this host owns.
    fn announce(&mut self) {
        if let Some(announcement) = self.state.announcement() {
            self.send_all(&Message::Ranges { announcement });
        }
    }

    /// Sends a peer all known ranges, its own included: a peer that lost its state notices.
    pub(crate) fn send_ranges(&mut self, peer: PeerId) {
        let others = self.announced.values().map(|(announcement, _)| announcement.clone());
        let all: Vec<RangeAnnouncement> =
            self.state.announcement().into_iter().chain(others).collect();
        for announcement in all {
            self.send(peer, Message::Ranges { announcement });
        }
    }

    pub(crate) fn handle_ranges(
        &mut self,
        peer: PeerId,
        announcement: RangeAnnouncement,
    ) -> Result<(), MeshError> {
        let malformed = |what| Err(MeshError::Malformed { peer, what });
        if announcement.version > ANNOUNCEMENT_VERSION_MAX {
            return malformed("an announcement of an impossible version");
        }
        if announcement.ranges.len() > RANGES_PER_PEER_MAX {
            return malformed("an announcement of too many ranges");
        }
        let set = RangeSet::disjoint(&announcement.ranges);
        let Some(set) = set.filter(|set| set.is_within(self.config.range)) else {
            return malformed("an announcement of unfit ranges");
        };
        let owner = announcement.owner;
        if self.state.network_id().is_some_and(|id| id != announcement.network) {
            return Ok(());
        }
        if owner == self.config.local {
            self.correct(peer, &announcement);
            return Ok(());
        }
        let direct = owner == peer;
        if !direct && self.links.contains_key(&owner) && self.announced.contains_key(&owner) {
            return Ok(());
        }
        let newer = match self.announced.get(&owner) {
            // The peer's state is older than its last announcement: this message tells it.
            Some((known, _)) if direct && is_before(&announcement, known) => {
                let announcement = known.clone();
                self.send(peer, Message::Ranges { announcement });
                false
            }
            Some((known, _)) if direct => *known != announcement,
            Some((known, _)) => {
                known.network != announcement.network || known.version < announcement.version
            }
            None => self.announced.len() < MEMBERS_MAX,
        };
        if newer {
            self.announced.insert(owner, (announcement.clone(), set));
            self.relay(peer, &Message::Ranges { announcement });
        }
        Ok(())
    }

    /// A peer holds a later announcement of this host than this host made itself. If this host's state is known
    /// to be the newest, the peer is wrong: the host repeats its state under a higher version.
    fn correct(&mut self, peer: PeerId, theirs: &RangeAnnouncement) {
        let Some(ours) = self.state.announcement() else {
            // The disk was lost: the next announcement needs a version above the last one.
            self.dirty |= self.state.raise_announcement(theirs.version);
            return;
        };
        let stale = theirs.version == ours.version && theirs.ranges != ours.ranges;
        if !stale && theirs.version <= ours.version {
            return;
        }
        if !self.standing.is_sure() {
            return self.found_older(peer);
        }
        if self.state.raise_announcement(theirs.version) {
            self.dirty = true;
            self.announce();
        }
    }

    /// Other hosts that announce an address as theirs.
    pub(crate) fn said_owners(&self, address: Ipv4Addr) -> Vec<PeerId> {
        let owners = self.announced.iter().filter(|(_, (_, ranges))| ranges.contains(address));
        owners.map(|(owner, _)| *owner).collect()
    }

    /// Reports the use of this host's ranges at intervals: a host that asks for a range sees where there is
    /// room.
    pub(crate) fn drive_usage(&mut self, now: Instant) {
        let used = self.state.used();
        if self.state.network.is_none() || used == self.usage_told {
            self.usage_at = None;
            return;
        }
        let at = *self.usage_at.get_or_insert(now + Duration::from_millis(USAGE_INTERVAL_MS));
        if at <= now {
            self.usage_told = used;
            self.usage_at = None;
            self.send_all(&Message::Usage { used });
        }
    }
}
