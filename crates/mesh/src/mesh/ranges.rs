//! Requests and grants of ranges, and the record of their owners: for `weft`, and for each network with ranges of
//! its own.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use rand::Rng;
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::announced::Announced;
use super::range_founding::RangeFounding;
use super::{Change, Mesh, Output};
use crate::error::MeshError;
use crate::ledger::Granted;
use crate::limits::{
    ANNOUNCED_RANGES_MAX, MEMBERS_MAX, NAME_BYTES_MAX, RANGE_ANSWER_S, RANGE_RETRY_S,
    RANGES_PER_PEER_MAX, USAGE_INTERVAL_MS, version_max,
};
use crate::message::{Message, Network, RangeAnnouncement};
use crate::range::{AddressRange, RangeSet};

/// The ranges of a network, in memory.
#[derive(Debug, Default)]
pub(crate) struct Space {
    pub(crate) announced: Announced,
    pub(crate) ask: RangeAsk,
    pub(crate) founding: RangeFounding,
    usage_told: u64,
    usage_at: Option<Instant>,
}

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

    fn peer_gone(&mut self, peer: PeerId) {
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

impl Space {
    /// That of the last run.
    pub(crate) fn restore(now: Instant, used: u64) -> Self {
        Self { usage_told: used, founding: RangeFounding::restore(now), ..Self::default() }
    }

    pub(crate) fn peer_gone(&mut self, peer: PeerId) {
        self.ask.peer_gone(peer);
        self.founding.peer_gone(peer);
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        [self.ask.next(), self.founding.next(), self.usage_at].into_iter().flatten().min()
    }
}

impl Mesh {
    /// The memory of a network's ranges; call it for networks with a ledger alone.
    pub(crate) fn space(&mut self, vni: Vni) -> &mut Space {
        self.spaces.entry(vni).or_default()
    }

    /// The networks whose ranges are split: `weft`, and those with ranges of their own.
    pub(crate) fn allocators(&self) -> Vec<Vni> {
        self.state.ledgers().map(|(vni, _)| vni).collect()
    }

    /// The part of a network's range that automatic addresses come from.
    pub(crate) fn subnet(&self, vni: Vni) -> Option<Ipv4Net> {
        let ledger = self.state.ledger(vni)?;
        Some(if vni == Vni::WEFT { self.config.subnet() } else { ledger.range })
    }

    /// The founding that a linked peer's ranges of a network come from.
    pub(crate) fn founding_of(&self, peer: PeerId, vni: Vni) -> Option<Network> {
        match vni {
            Vni::WEFT => self.links.get(&peer)?.network,
            _ if self.shares(peer, vni) => self.theirs(peer, vni)?.founding,
            _ => None,
        }
    }

    /// Whether a linked peer's ranges of a network come from the same founding as this host's.
    pub(crate) fn shares_founding(&self, peer: PeerId, vni: Vni) -> bool {
        let ours = self.state.ledger(vni).and_then(|ledger| ledger.network);
        ours.is_some() && ours == self.founding_of(peer, vni)
    }

    /// Takes every step about ranges that has become possible.
    pub(crate) fn drive_ranges(&mut self, now: Instant) {
        for vni in self.allocators() {
            self.drive_range_founding(now, vni);
            self.drive_range_ask(now, vni);
        }
    }

    /// Reports the use of this host's ranges at intervals: a host that asks for a range sees where there is
    /// room.
    pub(crate) fn drive_usages(&mut self, now: Instant) {
        self.allocators().into_iter().for_each(|vni| self.drive_usage(now, vni));
    }

    /// Asks one host after the other for a range, while this host needs one.
    pub(crate) fn drive_range_ask(&mut self, now: Instant, vni: Vni) {
        let Some(ledger) = self.state.ledger(vni) else { return };
        let wants = (ledger.network.is_none() && self.wants_ranges(vni))
            || self.pending.values().any(|pending| pending.is_short_of(vni));
        // A range that cannot be kept is not asked for.
        if !wants || !self.standing.is_sure() || self.storage.failure().is_some() {
            self.space(vni).ask = RangeAsk::default();
            return;
        }
        let ask = &mut self.space(vni).ask;
        if let Some((peer, until)) = ask.current {
            if until > now {
                return;
            }
            ask.current = None;
            let why = format!("no answer within {RANGE_ANSWER_S} s");
            ask.refused.insert(peer, why);
        }
        if ask.retry_at.is_some_and(|at| at <= now) {
            ask.retry_at = None;
            ask.refused.clear();
        }
        if let Some(peer) = self.richest_to_ask(vni) {
            let fresh = self.rng.next_u64();
            let within = self.subnet(vni);
            let (Some(ledger), Some(within)) = (self.state.ledger_mut(vni), within) else { return };
            self.dirty |= ledger.request.is_none();
            let request = ledger.open_request(fresh);
            let until = now + Duration::from_secs(RANGE_ANSWER_S);
            self.space(vni).ask.current = Some((peer, until));
            self.send(peer, Message::RangeRequest { request, within }.on(vni));
            return;
        }
        let ask = &mut self.space(vni).ask;
        if !ask.refused.is_empty() {
            let at = now + Duration::from_secs(RANGE_RETRY_S);
            ask.retry_at.get_or_insert(at);
        }
    }

    /// Whether this host takes part in splitting a network's ranges.
    pub(crate) fn wants_ranges(&self, vni: Vni) -> bool {
        vni == Vni::WEFT || (self.state.weft.network.is_some() && self.holds(vni))
    }

    /// The linked host with the most free addresses that has not refused yet.
    fn richest_to_ask(&self, vni: Vni) -> Option<PeerId> {
        let ours = self.state.ledger(vni)?.network;
        let refused = self.spaces.get(&vni).map(|space| &space.ask.refused);
        let open = self.links.keys().copied().filter(|peer| {
            let theirs = self.founding_of(*peer, vni);
            let fits = theirs.is_some_and(|theirs| match ours {
                Some(ours) => theirs == ours,
                None => self.may_take_of(theirs, vni),
            });
            fits && !refused.is_some_and(|refused| refused.contains_key(peer))
        });
        open.max_by_key(|peer| self.free_of(*peer, vni))
    }

    /// Whether this host, without ranges of a network, may take some of a founding. A host that holds the network has
    /// that founding, or none that holds it has any.
    fn may_take_of(&self, founding: Network, vni: Vni) -> bool {
        let mut live = self.live_foundings(vni).peekable();
        live.peek().is_none() || live.any(|it| it == founding)
    }

    /// How many addresses another host has free, as far as it told.
    fn free_of(&self, peer: PeerId, vni: Vni) -> u64 {
        let size = self.spaces.get(&vni).map_or(0, |space| space.announced.size_of(peer));
        let incoming = self.links.get(&peer).and_then(|link| link.incoming.get(&vni));
        let used = incoming.and_then(|incoming| incoming.used).unwrap_or(0);
        size.saturating_sub(used)
    }

    pub(crate) fn handle_range_request(
        &mut self,
        now: Instant,
        (peer, vni): (PeerId, Vni),
        request: u64,
        within: Ipv4Net,
    ) {
        let theirs = self.founding_of(peer, vni);
        let Some(ledger) = self.state.ledger(vni) else { return };
        let Some(network) = ledger.network else {
            let reason = format!("{} owns no range yet", self.config.nickname);
            return self.refuse_range((peer, vni), request, reason, None);
        };
        if theirs.is_some_and(|theirs| theirs != network) {
            return;
        }
        if let Some(why) = self.unsure() {
            let reason = format!("{}: {why}", self.config.nickname);
            return self.refuse_range((peer, vni), request, reason, None);
        }
        if let Some(why) = self.storage.failure()
            && !self.storage.has_grant_of(vni, peer, request)
        {
            let reason = format!("{} cannot save its state: {why}", self.config.nickname);
            return self.refuse_range((peer, vni), request, reason, None);
        }
        if self.unheard_until(now, vni).is_some() {
            return self.space(vni).founding.answer_later(peer, request, within);
        }
        let Some(ledger) = self.state.ledger_mut(vni) else { return };
        let (reason, ask) = match ledger.grant(peer, request, within) {
            Granted::Ranges { ranges, new } => {
                if new {
                    self.dirty = true;
                    self.announce(vni);
                    let ranges = ranges.clone();
                    self.emit(Output::Changed(Change::RangesGiven { vni, to: peer, ranges }));
                }
                self.send(peer, Message::RangeGrant { request, network, ranges }.on(vni));
                return;
            }
            Granted::NothingLeft => {
                let announced = self.spaces.get(&vni).into_iter();
                let others = announced.flat_map(|space| space.announced.ranges());
                let others = others.map(|(other, _)| other).filter(|other| *other != peer);
                let richest = others.max_by_key(|other| self.free_of(*other, vni));
                let ask = richest.filter(|other| self.free_of(*other, vni) > 1);
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
        self.refuse_range((peer, vni), request, reason, ask);
    }

    fn refuse_range(
        &mut self,
        (peer, vni): (PeerId, Vni),
        request: u64,
        reason: String,
        ask: Option<PeerId>,
    ) {
        self.send(peer, Message::RangeRefused { request, reason, ask }.on(vni));
    }

    pub(crate) fn handle_range_grant(
        &mut self,
        now: Instant,
        (from, vni): (PeerId, Vni),
        request: u64,
        network: Network,
        ranges: &[AddressRange],
    ) -> Result<(), MeshError> {
        let Some(ledger) = self.state.ledger(vni) else { return Ok(()) };
        if ledger.has_grant(from, request) {
            self.send(from, Message::RangeAccepted { request }.on(vni));
            return Ok(());
        }
        let may = self.standing.is_sure() || self.standing.is_open();
        // In a network with its own ranges, a grant of another founding may still be on its way.
        let theirs = self.founding_of(from, vni);
        let apart = vni != Vni::WEFT
            && (theirs != Some(network)
                || ledger.network.is_some_and(|ours| ours != network)
                || (ledger.network.is_none() && !self.may_take_of(network, vni)));
        if !ledger.has_issued(request) || !may || apart {
            return Ok(());
        }
        if network.range6.prefix_len() != 64 || network.range6.trunc() != network.range6 {
            return Err(MeshError::Malformed { peer: from, what: "a grant of a bad network" });
        }
        if vni == Vni::WEFT {
            self.link_mut(from, |link| link.network = Some(network));
            self.check_network(now, from);
            if !self.links.contains_key(&from) {
                return Ok(());
            }
        }
        let Some(ledger) = self.state.ledger_mut(vni) else { return Ok(()) };
        let first = ledger.network.is_none();
        if ranges.len() > RANGES_PER_PEER_MAX
            || !ledger.accept_grant(from, request, network, ranges)
        {
            return Err(MeshError::Malformed { peer: from, what: "a grant of unfit ranges" });
        }
        self.dirty = true;
        self.space(vni).ask = RangeAsk::default();
        let ranges = ranges.to_vec();
        self.emit(Output::Changed(match first && vni == Vni::WEFT {
            true => Change::Joined { network, from, ranges },
            false => Change::RangesReceived { vni, from, ranges },
        }));
        self.send(from, Message::RangeAccepted { request }.on(vni));
        match first {
            true if vni == Vni::WEFT => self.on_network(now),
            true => self.on_founding(vni),
            false => self.announce(vni),
        }
        Ok(())
    }

    pub(crate) fn handle_range_accepted(&mut self, (peer, vni): (PeerId, Vni), request: u64) {
        if let Some(ledger) = self.state.ledger_mut(vni) {
            self.dirty |= ledger.close_grant(peer, request);
        }
    }

    pub(crate) fn handle_range_refused(
        &mut self,
        (peer, vni): (PeerId, Vni),
        request: u64,
        reason: &str,
        ask: Option<PeerId>,
    ) {
        let asked = self.state.ledger(vni).and_then(|ledger| ledger.request);
        let mut why: String =
            reason.chars().filter(|c| !c.is_control()).take(NAME_BYTES_MAX).collect();
        if let Some(other) = ask.filter(|other| !self.links.contains_key(other)) {
            why = format!("{why}, which is not linked with this host ({})", self.name_of(other));
        }
        let Some(space) = self.spaces.get_mut(&vni) else { return };
        let current = space.ask.current.is_some_and(|(asked, _)| asked == peer);
        if current && asked == Some(request) {
            space.ask.current = None;
            space.ask.refused.insert(peer, why);
        }
    }

    /// Sends grants again that a peer may not have got.
    pub(crate) fn send_open_grants(&mut self, peer: PeerId, vni: Vni) {
        let Some(ledger) = self.state.ledger(vni).filter(|_| self.standing.is_sure()) else {
            return;
        };
        let Some(network) = ledger.network else { return };
        for (request, ranges) in ledger.open_grants(peer) {
            self.send(peer, Message::RangeGrant { request, network, ranges }.on(vni));
        }
    }

    /// Tells all that share a network what this host owns of it.
    pub(crate) fn announce(&mut self, vni: Vni) {
        let local = self.config.local;
        let ledger = self.state.ledger(vni);
        if let Some(announcement) = ledger.and_then(|ledger| ledger.announcement(local)) {
            self.send_on(vni, &Message::Ranges { announcement });
        }
    }

    /// Sends a peer all known ranges of a network, its own included: a peer that lost its state notices.
    pub(crate) fn send_ranges(&mut self, peer: PeerId, vni: Vni) {
        let local = self.config.local;
        let own = self.state.ledger(vni).and_then(|ledger| ledger.announcement(local));
        let announced = self.spaces.get(&vni).into_iter();
        let others = announced.flat_map(|space| space.announced.announcements()).cloned();
        let all: Vec<RangeAnnouncement> = own.into_iter().chain(others).collect();
        for announcement in all {
            self.send(peer, Message::Ranges { announcement }.on(vni));
        }
    }

    pub(crate) fn handle_ranges(
        &mut self,
        (peer, vni): (PeerId, Vni),
        announcement: RangeAnnouncement,
    ) -> Result<(), MeshError> {
        let malformed = |what| Err(MeshError::Malformed { peer, what });
        let direct = announcement.owner == peer;
        if announcement.version > version_max(direct) {
            return malformed("an announcement of an impossible version");
        }
        if announcement.ranges.len() > RANGES_PER_PEER_MAX {
            return malformed("an announcement of too many ranges");
        }
        let Some(ledger) = self.state.ledger(vni) else { return Ok(()) };
        let set = RangeSet::disjoint(&announcement.ranges);
        let Some(set) = set.filter(|set| set.is_within(ledger.range)) else {
            return malformed("an announcement of unfit ranges");
        };
        let owner = announcement.owner;
        if ledger.network_id().is_some_and(|id| id != announcement.network) {
            return Ok(());
        }
        if owner == self.config.local {
            self.correct((peer, vni), &announcement);
            return Ok(());
        }
        let tells_itself = self.shares(owner, vni);
        let announced = &self.space(vni).announced;
        let known = announced.get(owner);
        if !direct && tells_itself && known.is_some() {
            return Ok(());
        }
        let newer = match known {
            // The peer's state is older than its last announcement: this message tells it.
            Some(known) if direct && is_before(&announcement, known) => {
                let announcement = known.clone();
                self.send(peer, Message::Ranges { announcement }.on(vni));
                false
            }
            Some(known) if direct => *known != announcement,
            Some(known) => {
                known.network != announcement.network || known.version < announcement.version
            }
            None => announced.len() < MEMBERS_MAX,
        };
        if newer {
            if !self.has_room_for(vni, &announcement) {
                let (what, max) = ("ranges of hosts", ANNOUNCED_RANGES_MAX);
                return Err(MeshError::TooMany { peer, what, max });
            }
            self.space(vni).announced.insert(announcement.clone(), set);
            self.relay_on(vni, peer, &Message::Ranges { announcement });
        }
        Ok(())
    }

    /// Whether an announcement may be kept besides those of all networks. One that has grown no larger always may.
    fn has_room_for(&self, vni: Vni, announcement: &RangeAnnouncement) -> bool {
        let known = self.spaces.get(&vni).and_then(|it| it.announced.get(announcement.owner));
        let known = known.map_or(0, Announced::weight_of);
        let weight = Announced::weight_of(announcement);
        let all: usize = self.spaces.values().map(|space| space.announced.weight()).sum();
        weight <= known || all - known + weight <= ANNOUNCED_RANGES_MAX
    }

    /// A peer holds a later announcement of this host than this host made itself. If this host's state is known
    /// to be the newest, the peer is wrong: the host repeats its state under a higher version.
    fn correct(&mut self, (peer, vni): (PeerId, Vni), theirs: &RangeAnnouncement) {
        let local = self.config.local;
        let Some(ledger) = self.state.ledger_mut(vni) else { return };
        let Some(ours) = ledger.announcement(local) else {
            // The disk was lost: the next announcement needs a version above the last one.
            self.dirty |= ledger.raise_announcement(theirs.version);
            return;
        };
        let stale = theirs.version == ours.version && theirs.ranges != ours.ranges;
        if !stale && theirs.version <= ours.version {
            return;
        }
        if !self.standing.is_sure() {
            return self.found_older(peer);
        }
        if ledger.raise_announcement(theirs.version) {
            self.dirty = true;
            self.announce(vni);
        }
    }

    /// Other hosts that announce an address of a network as theirs.
    pub(crate) fn said_owners(&self, vni: Vni, address: Ipv4Addr) -> Vec<PeerId> {
        let space = self.spaces.get(&vni).into_iter();
        space.flat_map(|space| space.announced.owners_of(address)).collect()
    }

    fn drive_usage(&mut self, now: Instant, vni: Vni) {
        let Some(ledger) = self.state.ledger(vni) else { return };
        let (founded, used) = (ledger.network.is_some(), ledger.used());
        let space = self.space(vni);
        if !founded || used == space.usage_told {
            space.usage_at = None;
            return;
        }
        let at = *space.usage_at.get_or_insert(now + Duration::from_millis(USAGE_INTERVAL_MS));
        if at <= now {
            space.usage_told = used;
            space.usage_at = None;
            self.send_on(vni, &Message::Usage { used });
        }
    }
}
