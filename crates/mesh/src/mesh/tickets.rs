//! Requests for addresses: `allocate`, `claim`, `release`, and the messages between hosts about claims.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use rand::Rng;
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::{Mesh, Output, Ticket};
use crate::error::{AddressError, MeshError};
use crate::ledger::{Held, Holder, Ledger, is_reserved};
use crate::limits::{
    ALLOCATION_WAIT_S, CLAIM_RETRY_MS, CLAIM_WAIT_S, CLAIMS_PER_MESSAGE_MAX, CLAIMS_PER_PEER_MAX,
    NAME_BYTES_MAX, TICKETS_MAX,
};
use crate::message::{ClaimResult, Message, Network};

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Pending {
    /// The network.
    vni: Vni,
    /// The network whose ranges the address is from.
    allocator: Vni,
    owner: String,
    deadline: Instant,
    want: Want,
}

#[derive(Debug)]
enum Want {
    /// Any address; `short`: the own ranges are full.
    Any { short: bool },
    /// This address of the range.
    Claim(Claim),
}

#[derive(Debug)]
struct Claim {
    net: IpNet,
    /// The IPv4 address that stands for the pair of IPv4 and IPv6 address.
    slot: Ipv4Addr,
    /// The host asked, and the id of the request.
    asked: Option<(PeerId, u64)>,
    /// Hosts that do not own the address, by their answer.
    tried: BTreeSet<PeerId>,
    retry_at: Option<Instant>,
}

impl Pending {
    /// Waits for this host to get another range of a network.
    pub(crate) fn is_short_of(&self, allocator: Vni) -> bool {
        self.allocator == allocator && matches!(self.want, Want::Any { short: true })
    }

    /// Waits for an address of a network's ranges.
    pub(crate) fn is_of(&self, allocator: Vni) -> bool {
        self.allocator == allocator
    }

    pub(crate) fn is_on(&self, vni: Vni) -> bool {
        self.vni == vni
    }

    /// The network, if it has no ranges of its own.
    fn on_shared(&self) -> Option<Vni> {
        (self.vni != self.allocator).then_some(self.vni)
    }
}

/// The ranges that an address is from, and the network that it is on if that has none of its own.
#[derive(Clone, Copy)]
struct Of {
    allocator: Vni,
    on: Option<Vni>,
}

impl Mesh {
    /// Asks for an address for a container on a network, from this host's own ranges. The answer has one IPv4 address,
    /// and the IPv6 address that ends in it. The same owner gets the same addresses again. Networks without ranges of
    /// their own share those of `weft`, so an owner names a container and its network. Answered by [`Output::Answer`],
    /// after at most [`ALLOCATION_WAIT_S`] seconds.
    pub fn allocate(&mut self, now: Instant, vni: Vni, owner: &str) -> Ticket {
        let deadline = now + Duration::from_secs(ALLOCATION_WAIT_S);
        self.open_ticket(now, vni, owner, deadline, Want::Any { short: false })
    }

    /// Asks for an explicit address for a container on a network. An address inside the range comes from its owner; an
    /// IPv6 address of the network's range stands for the IPv4 address that it ends in. An address outside the range
    /// is only checked against all known endpoints of the network. Answered by [`Output::Answer`], after at most
    /// [`CLAIM_WAIT_S`] seconds.
    pub fn claim(&mut self, now: Instant, vni: Vni, owner: &str, address: IpNet) -> Ticket {
        let slot = match self.slot_of(vni, address) {
            Ok(Some(slot)) => slot,
            Ok(None) => {
                self.storage.hurry();
                let result =
                    fit_owner(owner).and_then(|()| self.claim_outside(vni, owner, address));
                return self.answer_at_once(vni, result);
            }
            Err(error) => return self.answer_at_once(vni, Err(error)),
        };
        let (net, asked, tried, retry_at) = (address, None, BTreeSet::new(), None);
        let claim = Claim { net, slot, asked, tried, retry_at };
        let deadline = now + Duration::from_secs(CLAIM_WAIT_S);
        self.open_ticket(now, vni, owner, deadline, Want::Claim(claim))
    }

    /// Gives back single addresses of a container on a network. It keeps others: those in `kept`, which a container may
    /// have with other prefix lengths or in the other family, are not given back.
    pub fn release_some(
        &mut self,
        now: Instant,
        vni: Vni,
        owner: &str,
        nets: &[IpNet],
        kept: &[IpNet],
    ) {
        let slots = |nets: &[IpNet]| -> Vec<IpAddr> {
            let slots = nets.iter().filter_map(|net| self.slot_of(vni, *net).ok().flatten());
            slots.map(IpAddr::V4).chain(nets.iter().map(IpNet::addr)).collect()
        };
        let (given, kept) = (slots(nets), slots(kept));
        self.free(vni, owner, |address| given.contains(&address) && !kept.contains(&address));
        self.drive(now);
    }

    /// Gives back all addresses of an owner on all networks, and cancels what it waits for; returns the addresses.
    pub fn release(&mut self, now: Instant, owner: &str) -> Vec<IpAddr> {
        let waiting = self.pending.iter().filter(|(_, pending)| pending.owner == owner);
        let waiting: Vec<(Ticket, Vni)> =
            waiting.map(|(ticket, pending)| (*ticket, pending.vni)).collect();
        for (ticket, vni) in waiting {
            self.pending.remove(&ticket);
            self.emit(Output::Answer { ticket, vni, result: Err(AddressError::Cancelled) });
        }
        let others: Vec<Vni> = self.state.networks.keys().copied().collect();
        let networks = [Vni::WEFT].into_iter().chain(others);
        let freed = networks.flat_map(|vni| self.free(vni, owner, |_| true)).collect();
        self.drive(now);
        freed
    }

    /// The IPv6 address that goes with an IPv4 address of a network's range, once this host has ranges of it.
    pub fn ipv6_of(&self, vni: Vni, address: Ipv4Addr) -> Option<Ipv6Net> {
        let ledger = self.state.ledger(self.state.allocator(vni)?)?;
        let range6 = ledger.network.filter(|_| ledger.range.contains(&address))?.range6;
        Ipv6Net::new(mapped(range6, address), 64).ok()
    }
}

impl Mesh {
    /// Frees those of a container's addresses on a network that are `wanted`.
    fn free(&mut self, vni: Vni, owner: &str, wanted: impl Fn(IpAddr) -> bool) -> Vec<IpAddr> {
        let Some(allocator) = self.state.allocator(vni) else { return Vec::new() };
        let mut freed = Vec::new();
        let mut held = Vec::new();
        if let Some(ledger) = self.state.ledger_mut(allocator) {
            ledger.taken.retain(|address, holder| {
                let address = IpAddr::from(*address);
                let own = matches!(holder, Holder::Local { owner: o, .. } if o == owner);
                let keep = !own || !wanted(address);
                if !keep {
                    freed.push(address);
                }
                keep
            });
            let own = ledger.held.iter().filter(|(_, held)| held.owner == owner);
            held.extend(own.map(|(address, held)| (*address, held.from)));
        }
        if let Some(outside) = self.state.outside_mut(vni) {
            outside.retain(|address, o| {
                let keep = o != owner || !wanted(*address);
                if !keep {
                    freed.push(*address);
                }
                keep
            });
        }
        for (address, from) in held.into_iter().filter(|(address, _)| wanted((*address).into())) {
            self.give_back(allocator, address, from);
            freed.push(address.into());
        }
        self.dirty |= !freed.is_empty();
        self.take_answers_back(allocator, &freed);
        freed
    }

    /// An answer that has not gone out yet gives nothing that was freed meanwhile.
    fn take_answers_back(&mut self, allocator: Vni, freed: &[IpAddr]) {
        let gives = |nets: &[IpNet]| nets.iter().any(|net| freed.contains(&net.addr()));
        for output in &mut self.outputs {
            if let Output::Answer { vni, result, .. } = output
                && self.state.allocator(*vni) == Some(allocator)
                && result.as_ref().is_ok_and(|nets| gives(nets))
            {
                *result = Err(AddressError::Cancelled);
            }
        }
    }

    fn answer_at_once(&mut self, vni: Vni, result: Result<Vec<IpNet>, AddressError>) -> Ticket {
        let ticket = self.new_ticket();
        self.emit(Output::Answer { ticket, vni, result });
        ticket
    }

    fn open_ticket(
        &mut self,
        now: Instant,
        vni: Vni,
        owner: &str,
        deadline: Instant,
        want: Want,
    ) -> Ticket {
        if let Err(error) = fit_owner(owner) {
            return self.answer_at_once(vni, Err(error));
        }
        let Some(allocator) = self.state.allocator(vni).filter(|_| self.holds(vni)) else {
            return self.answer_at_once(vni, Err(AddressError::NoNetwork { vni }));
        };
        if self.pending.len() >= TICKETS_MAX {
            return self.answer_at_once(vni, Err(AddressError::Busy));
        }
        self.storage.hurry();
        let ticket = self.new_ticket();
        let owner = owner.to_owned();
        self.pending.insert(ticket, Pending { vni, allocator, owner, deadline, want });
        self.drive(now);
        ticket
    }

    pub(crate) fn next_ticket_time(&self) -> Option<Instant> {
        let time = |pending: &Pending| match &pending.want {
            Want::Claim(Claim { retry_at: Some(at), .. }) => pending.deadline.min(*at),
            _ => pending.deadline,
        };
        self.pending.values().map(time).min()
    }

    /// Answers what can be answered.
    pub(crate) fn drive_tickets(&mut self, now: Instant) {
        let open: Vec<Ticket> = self.pending.keys().copied().collect();
        for ticket in open {
            let Some(mut pending) = self.pending.remove(&ticket) else { continue };
            let late = pending.deadline <= now;
            let (vni, owner) = (pending.vni, pending.owner.clone());
            let of = Of { allocator: pending.allocator, on: pending.on_shared() };
            let result = match &mut pending.want {
                Want::Any { short } => self.try_any(now, of, &owner, short, late),
                Want::Claim(claim) => self.try_claim(now, of, &owner, claim, late),
            };
            match result {
                Some(result) => self.emit(Output::Answer { ticket, vni, result }),
                None => drop(self.pending.insert(ticket, pending)),
            }
        }
        for allocator in self.allocators() {
            if self.pending.values().any(|pending| pending.is_short_of(allocator)) {
                self.drive_range_ask(now, allocator);
                if self.space(allocator).ask.is_exhausted() {
                    self.fail_short(allocator);
                }
            }
        }
    }

    fn try_any(
        &mut self,
        now: Instant,
        Of { allocator, on }: Of,
        owner: &str,
        short: &mut bool,
        late: bool,
    ) -> Option<Result<Vec<IpNet>, AddressError>> {
        if let Some(result) = self.while_unsure(late) {
            return result;
        }
        let founding = self.state.ledger(allocator).and_then(|ledger| ledger.network);
        let (Some(network), Some(subnet)) = (founding, self.subnet(allocator)) else {
            let why = self.reason_for_no_ranges(allocator);
            return late.then_some(Err(AddressError::NotReady { why }));
        };
        if self.unheard_until(now, allocator).is_some() {
            return late.then(unheard);
        }
        let ledger = self.state.ledger_mut(allocator)?;
        let before = ledger.allocated(owner);
        let Some(address) = before.or_else(|| ledger.allocate(owner, on, subnet)) else {
            *short = true;
            return late.then(|| Err(self.no_space(allocator)));
        };
        self.dirty |= ledger.note_network(address, on) || before.is_none();
        Some(Ok(self.pair_of(allocator, network, address)))
    }

    /// An automatic address with its IPv6 twin, each with the length of its prefix.
    pub(crate) fn pair_of(
        &self,
        allocator: Vni,
        network: Network,
        address: Ipv4Addr,
    ) -> Vec<IpNet> {
        let ledger = self.state.ledger(allocator);
        let range = ledger.map_or(self.config.range, |ledger| ledger.range);
        let subnet = self.subnet(allocator).filter(|subnet| subnet.contains(&address));
        let prefix = subnet.unwrap_or(range).prefix_len();
        let v4 = Ipv4Net::new(address, prefix).map(IpNet::from);
        let v6 = Ipv6Net::new(mapped(network.range6, address), 64).map(IpNet::from);
        v4.into_iter().chain(v6).collect()
    }

    /// Why this host has no ranges of a network yet.
    pub(crate) fn reason_for_no_ranges(&self, allocator: Vni) -> String {
        let vni = allocator;
        if vni == Vni::WEFT || self.state.weft.network.is_none() {
            return self.founding_reason();
        }
        if let Some(why) = self.storage.failure() {
            return format!("this host cannot save its state: {why}");
        }
        let mut refusals = self.spaces.get(&vni).into_iter().flat_map(|it| it.ask.refusals());
        match refusals.next() {
            Some((peer, why)) => format!("{} gave no range: {why}", self.name_of(*peer)),
            None => "waiting for a host that has ranges of the network".to_owned(),
        }
    }

    /// The answer while this host may not act on its state: none at first, then the reason.
    fn while_unsure(&self, late: bool) -> Option<Option<Result<Vec<IpNet>, AddressError>>> {
        let why = self.unsure()?;
        let now = late || !self.standing.is_open();
        Some(now.then_some(Err(AddressError::NotReady { why })))
    }

    /// No host has a range to give: fails the requests that wait for one.
    fn fail_short(&mut self, allocator: Vni) {
        let error = self.no_space(allocator);
        let short = self.pending.iter().filter(|(_, pending)| pending.is_short_of(allocator));
        let short: Vec<(Ticket, Vni)> =
            short.map(|(ticket, pending)| (*ticket, pending.vni)).collect();
        for (ticket, vni) in short {
            self.pending.remove(&ticket);
            self.emit(Output::Answer { ticket, vni, result: Err(error.clone()) });
        }
    }

    fn no_space(&self, allocator: Vni) -> AddressError {
        if let Some(why) = self.storage.failure() {
            return AddressError::NotSaved { why: why.to_owned() };
        }
        let subnet = self.subnet(allocator).unwrap_or(self.config.range);
        let reasons = self.spaces.get(&allocator).into_iter().flat_map(|it| it.ask.refusals());
        let others: Vec<String> =
            reasons.map(|(peer, why)| format!("{}: {why}", self.name_of(*peer))).collect();
        let others = if others.is_empty() {
            "no linked host can give more".to_owned()
        } else {
            others.join("; ")
        };
        AddressError::NoSpace { why: format!("this host's ranges in {subnet} are full; {others}") }
    }

    /// The IPv4 address that a claim on a network is about; `None` for one outside its ranges.
    pub(crate) fn slot_of(&self, vni: Vni, net: IpNet) -> Result<Option<Ipv4Addr>, AddressError> {
        let reserved = Err(AddressError::Reserved { address: net });
        let ledger = self.state.allocator(vni).and_then(|allocator| self.state.ledger(allocator));
        let Some(ledger) = ledger else { return Err(AddressError::NoNetwork { vni }) };
        let range = ledger.range;
        let subnets = self.reserved_in(vni, range);
        match net {
            IpNet::V4(v4) => {
                let address = v4.addr();
                let never = address.is_unspecified()
                    || address.is_multicast()
                    || address.is_broadcast()
                    || address.is_loopback();
                if never || is_reserved(address, v4) {
                    return reserved;
                }
                if !range.contains(&address) {
                    return Ok(None);
                }
                if subnets.iter().any(|subnet| is_reserved(address, *subnet)) {
                    return reserved;
                }
                Ok(Some(address))
            }
            IpNet::V6(v6) => {
                let address = v6.addr();
                let never = address.is_unspecified()
                    || address.is_multicast()
                    || address.is_loopback()
                    || (v6.prefix_len() < 127 && address == v6.network());
                if never {
                    return reserved;
                }
                self.slot_of_ipv6((vni, ledger), address, net)
            }
        }
    }

    /// Subnets of a network whose network and broadcast addresses nobody gets.
    fn reserved_in(&self, vni: Vni, range: Ipv4Net) -> [Ipv4Net; 2] {
        let allocator = self.state.allocator(vni);
        [allocator.and_then(|allocator| self.subnet(allocator)).unwrap_or(range), range]
    }

    fn slot_of_ipv6(
        &self,
        (vni, ledger): (Vni, &Ledger),
        address: Ipv6Addr,
        net: IpNet,
    ) -> Result<Option<Ipv4Addr>, AddressError> {
        let defined = match self.state.networks.get(&vni) {
            Some(saved) if saved.ledger.is_some() => saved.definition.range6,
            _ => self.config.range6,
        };
        let range6 = ledger.network.map(|network| network.range6).or(defined);
        let Some(range6) = range6.filter(|range6| range6.contains(&address)) else {
            return Ok(None);
        };
        let low = u32::try_from(u128::from(address) & u128::from(u64::MAX)).map(Ipv4Addr::from);
        match low {
            Ok(slot) if ledger.range.contains(&slot) => {
                let subnets = self.reserved_in(vni, ledger.range);
                if subnets.iter().any(|subnet| is_reserved(slot, *subnet)) {
                    return Err(AddressError::Reserved { address: net });
                }
                Ok(Some(slot))
            }
            _ => {
                let first = u32::from(ledger.range.network()).saturating_add(1);
                let example = mapped(range6, first.into()).into();
                Err(AddressError::NotMapped { address: address.into(), range6, example })
            }
        }
    }

    fn claim_outside(
        &mut self,
        vni: Vni,
        owner: &str,
        net: IpNet,
    ) -> Result<Vec<IpNet>, AddressError> {
        let address = net.addr();
        let (Some(table), Some(outside)) = (self.table(vni), self.state.outside(vni)) else {
            return Err(AddressError::NoNetwork { vni });
        };
        if let Some(other) = outside.get(&address).filter(|other| *other != owner) {
            let (container, host) = (other.clone(), self.name_of(self.config.local));
            return Err(AddressError::Taken { address, container, host });
        }
        if let Some((info, peer)) = table.other_holder(address, owner) {
            let (container, host) = (info.container.clone(), self.name_of(peer));
            return Err(AddressError::Taken { address, container, host });
        }
        let outside = self.state.outside_mut(vni);
        let before = outside.and_then(|outside| outside.insert(address, owner.to_owned()));
        self.dirty |= before.is_none();
        Ok(vec![net])
    }

    fn try_claim(
        &mut self,
        now: Instant,
        of: Of,
        owner: &str,
        claim: &mut Claim,
        late: bool,
    ) -> Option<Result<Vec<IpNet>, AddressError>> {
        let (address, allocator) = (claim.net.addr(), of.allocator);
        if let Some(result) = self.while_unsure(late) {
            return result;
        }
        if self.state.ledger(allocator).is_none_or(|ledger| ledger.network.is_none()) {
            let why = self.reason_for_no_ranges(allocator);
            return late.then_some(Err(AddressError::NotReady { why }));
        }
        if self.unheard_until(now, allocator).is_some() {
            return late.then(unheard);
        }
        if let Some(result) = self.claim_here(of, owner, claim) {
            return Some(result);
        }
        if let Some((peer, _)) = claim.asked {
            let (host, seconds) = (self.name_of(peer), CLAIM_WAIT_S);
            return late.then_some(Err(AddressError::NoAnswer { address, host, seconds }));
        }
        if claim.retry_at.is_some_and(|at| at <= now) {
            claim.retry_at = None;
            claim.tried.clear();
        }
        let mut owners = self.said_owners(allocator, claim.slot);
        owners.retain(|owner| !claim.tried.contains(owner));
        if let Some(peer) =
            owners.iter().copied().find(|peer| self.shares_founding(*peer, allocator))
        {
            if late {
                let (host, seconds) = (self.name_of(peer), CLAIM_WAIT_S);
                return Some(Err(AddressError::NoAnswer { address, host, seconds }));
            }
            let id = self.rng.next_u64();
            claim.asked = Some((peer, id));
            claim.retry_at = None;
            let (address, container) = (claim.slot, owner.to_owned());
            self.send(peer, Message::Claim { id, address, container }.on(allocator));
            return None;
        }
        if let Some(peer) = owners.first() {
            let host = self.name_of(*peer);
            return Some(Err(AddressError::OwnerUnreachable { address, host }));
        }
        if late {
            return Some(Err(AddressError::OwnerUnknown { address }));
        }
        claim.retry_at.get_or_insert(now + Duration::from_millis(CLAIM_RETRY_MS));
        None
    }

    /// Decides a claim that this host can decide: the address is in its range, or this host has asked for it
    /// already.
    fn claim_here(
        &mut self,
        Of { allocator, on }: Of,
        owner: &str,
        claim: &Claim,
    ) -> Option<Result<Vec<IpNet>, AddressError>> {
        let address = claim.net.addr();
        let taken = |container: &str, host| {
            Some(Err(AddressError::Taken { address, container: container.to_owned(), host }))
        };
        let here = self.name_of(self.config.local);
        let ledger = self.state.ledger_mut(allocator)?;
        if let Some(held) = ledger.held.get(&claim.slot) {
            if held.owner != owner {
                return taken(&held.owner, here);
            }
            self.dirty |= ledger.note_network(claim.slot, on);
            return Some(Ok(vec![claim.net]));
        }
        let rival = self.pending.values().find(|pending| {
            let asked = |other: &Claim| other.slot == claim.slot && other.asked.is_some();
            pending.owner != owner
                && pending.allocator == allocator
                && matches!(&pending.want, Want::Claim(other) if asked(other))
        });
        if let Some(rival) = rival {
            return taken(&rival.owner, here);
        }
        let ledger = self.state.ledger_mut(allocator)?;
        if !ledger.owned().contains(claim.slot) {
            return None;
        }
        match ledger.taken.get(&claim.slot) {
            None => {
                let holder = Holder::Local { owner: owner.to_owned(), automatic: false, on };
                ledger.taken.insert(claim.slot, holder);
                self.dirty = true;
                Some(Ok(vec![claim.net]))
            }
            Some(Holder::Local { owner: other, .. }) if other == owner => {
                self.dirty |= ledger.note_network(claim.slot, on);
                Some(Ok(vec![claim.net]))
            }
            Some(Holder::Local { owner: other, .. }) => taken(other, here),
            Some(Holder::Peer { peer, container }) => {
                let (peer, container) = (*peer, container.clone());
                taken(&container, self.name_of(peer))
            }
        }
    }

    /// A link is gone: claims asked over it must be asked again.
    pub(crate) fn unask_claims(&mut self, peer: PeerId) {
        for pending in self.pending.values_mut() {
            if let Want::Claim(claim) = &mut pending.want
                && claim.asked.is_some_and(|(asked, _)| asked == peer)
            {
                claim.asked = None;
            }
        }
    }

    /// Forgets an address of another host's range and tells that host, now or at the next link.
    pub(crate) fn give_back(&mut self, allocator: Vni, address: Ipv4Addr, from: PeerId) {
        if let Some(ledger) = self.state.ledger_mut(allocator) {
            ledger.held.remove(&address);
            self.dirty = true;
        }
        if self.shares(from, allocator) {
            self.send(from, Message::ClaimRelease { address }.on(allocator));
        }
    }

    /// Another host wants an address of this host's ranges.
    pub(crate) fn handle_claim(
        &mut self,
        (peer, vni): (PeerId, Vni),
        id: u64,
        address: Ipv4Addr,
        container: String,
    ) -> Result<(), MeshError> {
        if fit_owner(&container).is_err() {
            return Err(MeshError::Malformed { peer, what: "a claim with an unfit container id" });
        }
        if !self.standing.is_sure() {
            return Ok(());
        }
        let same = self.shares_founding(peer, vni);
        let Some(ledger) = self.state.ledger_mut(vni) else { return Ok(()) };
        let own = same && ledger.owned().contains(address);
        let result = match ledger.taken.get(&address) {
            _ if !own => ClaimResult::NotMine,
            Some(Holder::Local { owner, .. }) => {
                ClaimResult::Taken { container: owner.clone(), host: self.config.local }
            }
            Some(Holder::Peer { peer: other, container }) if *other != peer => {
                ClaimResult::Taken { container: container.clone(), host: *other }
            }
            None if ledger.claims_of(peer).count() >= CLAIMS_PER_PEER_MAX => ClaimResult::TooMany,
            _ => {
                ledger.taken.insert(address, Holder::Peer { peer, container });
                self.dirty = true;
                ClaimResult::Given
            }
        };
        self.send(peer, Message::ClaimAnswer { id, address, result }.on(vni));
        Ok(())
    }

    pub(crate) fn handle_claim_answer(
        &mut self,
        now: Instant,
        (peer, allocator): (PeerId, Vni),
        id: u64,
        address: Ipv4Addr,
        result: ClaimResult,
    ) {
        let open = self.pending.iter().filter(|(_, pending)| pending.allocator == allocator);
        let claims = open.filter_map(|(ticket, pending)| match &pending.want {
            Want::Claim(claim) if claim.slot == address => Some((*ticket, claim.asked)),
            _ => None,
        });
        let asked: Vec<(Ticket, u64)> = claims
            .filter_map(|(ticket, asked)| Some((ticket, asked.filter(|(p, _)| *p == peer)?.1)))
            .collect();
        let Some((ticket, _)) = asked.iter().find(|(_, asked)| *asked == id) else {
            let held = self.state.ledger(allocator).and_then(|ledger| ledger.held.get(&address));
            let mine = held.is_some_and(|held| held.from == peer);
            if result == ClaimResult::Given && asked.is_empty() && !mine {
                self.send(peer, Message::ClaimRelease { address }.on(allocator));
            }
            return;
        };
        let ticket = *ticket;
        let Some(pending) = self.pending.get_mut(&ticket) else { return };
        let on = pending.on_shared();
        let Pending { vni, owner, want: Want::Claim(claim), .. } = pending else { return };
        let (vni, net, address) = (*vni, claim.net, claim.net.addr());
        let result = match result {
            ClaimResult::Given => {
                let held = Held { owner: owner.clone(), from: peer, on };
                let Some(ledger) = self.state.ledger_mut(allocator) else { return };
                ledger.held.insert(claim.slot, held);
                self.dirty = true;
                Ok(vec![net])
            }
            ClaimResult::Taken { container, host } => {
                let container = container.chars().filter(|c| !c.is_control());
                let container = container.take(NAME_BYTES_MAX).collect();
                Err(AddressError::Taken { address, container, host: self.name_of(host) })
            }
            ClaimResult::NotSaved => {
                Err(AddressError::OwnerCannotSave { host: self.name_of(peer) })
            }
            ClaimResult::TooMany => Err(AddressError::TooManyClaims { host: self.name_of(peer) }),
            ClaimResult::NotMine => {
                claim.asked = None;
                claim.tried.insert(peer);
                claim.retry_at = Some(now + Duration::from_millis(CLAIM_RETRY_MS));
                return;
            }
        };
        self.pending.remove(&ticket);
        self.emit(Output::Answer { ticket, vni, result });
    }

    pub(crate) fn handle_claim_release(&mut self, (peer, vni): (PeerId, Vni), address: Ipv4Addr) {
        let Some(ledger) = self.state.ledger_mut(vni) else { return };
        let theirs = matches!(
            ledger.taken.get(&address),
            Some(Holder::Peer { peer: holder, .. }) if *holder == peer
        );
        if theirs {
            ledger.taken.remove(&address);
            self.dirty = true;
        }
    }

    /// Tells a peer which addresses of its ranges of a network this host holds.
    pub(crate) fn send_held(&mut self, peer: PeerId, vni: Vni) {
        let Some(ledger) = self.state.ledger(vni).filter(|_| self.standing.is_sure()) else {
            return;
        };
        if ledger.network.is_none() {
            return;
        }
        let held = ledger.held.iter().filter(|(_, held)| held.from == peer);
        let held: Vec<Ipv4Addr> = held.map(|(address, _)| *address).collect();
        let parts = held.len().div_ceil(CLAIMS_PER_MESSAGE_MAX).max(1);
        for part in 0..parts {
            let some = held.iter().skip(part * CLAIMS_PER_MESSAGE_MAX);
            let addresses = some.take(CLAIMS_PER_MESSAGE_MAX).copied().collect();
            let more = part + 1 < parts;
            self.send(peer, Message::ClaimsHeld { addresses, more }.on(vni));
        }
    }

    /// A peer lists what it holds of this host's ranges: all else that it had is free again.
    pub(crate) fn handle_claims_held(
        &mut self,
        (peer, vni): (PeerId, Vni),
        addresses: &[Ipv4Addr],
        more: bool,
    ) -> Result<(), MeshError> {
        if addresses.len() > CLAIMS_PER_MESSAGE_MAX {
            return Err(MeshError::Malformed { peer, what: "too many claims in one message" });
        }
        let same_founding = self.shares_founding(peer, vni);
        let Some(link) = self.links.get_mut(&peer) else { return Ok(()) };
        let incoming = link.incoming.entry(vni).or_default();
        incoming.new_claims.extend(addresses);
        if incoming.new_claims.len() > CLAIMS_PER_PEER_MAX {
            let max = CLAIMS_PER_PEER_MAX;
            return Err(MeshError::TooMany { peer, what: "claims", max });
        }
        if more {
            return Ok(());
        }
        let held = std::mem::take(&mut incoming.new_claims);
        if !same_founding {
            return Ok(());
        }
        let Some(ledger) = self.state.ledger_mut(vni) else { return Ok(()) };
        let gone: Vec<Ipv4Addr> =
            ledger.claims_of(peer).filter(|address| !held.contains(address)).collect();
        self.dirty |= !gone.is_empty();
        gone.iter().for_each(|address| drop(ledger.taken.remove(address)));
        let owned = ledger.owned();
        for address in held {
            if owned.contains(address) && !ledger.taken.contains_key(&address) {
                let holder = Holder::Peer { peer, container: "unknown".to_owned() };
                ledger.taken.insert(address, holder);
                self.dirty = true;
            }
        }
        Ok(())
    }
}

/// The IPv6 address of a /64 that ends in an IPv4 address.
pub(crate) fn mapped(range6: Ipv6Net, address: Ipv4Addr) -> Ipv6Addr {
    (u128::from(range6.network()) | u128::from(u32::from(address))).into()
}

/// The answer to a request that waited in vain for others to hear of this host's founding.
fn unheard() -> Result<Vec<IpNet>, AddressError> {
    let why = "waiting for linked hosts to hear that this host founded the network's ranges";
    Err(AddressError::NotReady { why: why.to_owned() })
}

fn fit_owner(owner: &str) -> Result<(), AddressError> {
    let fit = !owner.is_empty() && owner.len() <= NAME_BYTES_MAX;
    let plain = fit && !owner.chars().any(char::is_control);
    plain.then_some(()).ok_or(AddressError::BadOwner)
}
