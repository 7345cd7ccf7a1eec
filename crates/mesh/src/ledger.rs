//! The addresses of one network, as far as this host owns or has them, and the only changes that they go through.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use crate::error::MeshError;
use crate::limits::{GRANTS_MAX, GRANTS_PER_PEER_MAX, RANGES_PER_PEER_MAX, REQUESTS_MAX};
use crate::message::{Network, NetworkId, RangeAnnouncement};
use crate::range::{AddressRange, RangeSet};

/// The part of the saved state that is about the addresses of one network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ledger {
    pub(crate) range: Ipv4Net,
    /// The founding that this host's ranges come from; of `weft` it is the mesh.
    pub(crate) network: Option<Network>,
    owned: Vec<AddressRange>,
    /// Version of this host's range announcement.
    announced: u64,
    /// The address after the last one allocated: freed addresses rest until the cursor comes round.
    cursor: Ipv4Addr,
    /// The holder of each address taken from this host's ranges.
    pub(crate) taken: BTreeMap<Ipv4Addr, Holder>,
    /// Addresses out of other hosts' ranges that own containers have.
    pub(crate) held: BTreeMap<Ipv4Addr, Held>,
    /// The range request that is not yet granted.
    pub(crate) request: Option<u64>,
    /// Recent range requests; a grant of any of them is taken, once per grantor.
    issued: Vec<u64>,
    accepted: Vec<(PeerId, u64)>,
    /// Ranges given away of which the receiver has not said that it stored them.
    grants: Vec<Grant>,
}

/// The holder of an address from this host's ranges.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "holder", rename_all = "snake_case")]
pub(crate) enum Holder {
    /// A container of this host.
    Local {
        /// The container.
        owner: String,
        /// Given by `allocate`, not claimed.
        automatic: bool,
        /// The network without ranges of its own that it is on; `None`: the network of the ranges.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        on: Option<Vni>,
    },
    /// A container of another host.
    Peer {
        /// The host.
        peer: PeerId,
        /// The container.
        container: String,
    },
}

/// An address out of another host's range.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Held {
    /// The own container that has it.
    pub(crate) owner: String,
    /// The owner of the range that it is from.
    pub(crate) from: PeerId,
    /// The network without ranges of its own that it is on; `None`: the network of the ranges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) on: Option<Vni>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Grant {
    to: PeerId,
    request: u64,
    ranges: Vec<AddressRange>,
}

/// The outcome of a range request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Granted {
    /// The ranges now belong to the asker; new ones, or again those of the same request.
    Ranges { ranges: Vec<AddressRange>, new: bool },
    /// There is nothing to give.
    NothingLeft,
    /// The asker has not acknowledged its earlier grants.
    TooManyOpen,
}

impl Ledger {
    pub(crate) fn new(range: Ipv4Net) -> Self {
        Self {
            range,
            network: None,
            owned: Vec::new(),
            announced: 0,
            cursor: range.network(),
            taken: BTreeMap::new(),
            held: BTreeMap::new(),
            request: None,
            issued: Vec::new(),
            accepted: Vec::new(),
            grants: Vec::new(),
        }
    }

    /// Adds to a hash what differs whenever the owned ranges or the given addresses do.
    pub(crate) fn mark(&self, hasher: &mut impl Hasher) {
        let own = (&self.network_id(), &self.owned, self.announced, &self.grants);
        (own, &self.taken, &self.held).hash(hasher);
    }

    /// Whether it contradicts itself.
    pub(crate) fn check(&self) -> Result<(), MeshError> {
        let owned = RangeSet::disjoint(&self.owned)
            .filter(|owned| owned.is_within(self.range))
            .ok_or(MeshError::SavedDamaged("owned ranges overlap or leave the address range"))?;
        if !self.taken.keys().all(|address| owned.contains(*address)) {
            return Err(MeshError::SavedDamaged("an address in use is in no owned range"));
        }
        let given = self.grants.iter().flat_map(|grant| &grant.ranges);
        let given: Vec<AddressRange> = given.copied().collect();
        if RangeSet::disjoint(&given).is_none_or(|given| given.overlaps(&owned)) {
            return Err(MeshError::SavedDamaged("a range is both owned and given away"));
        }
        Ok(())
    }

    /// Takes the configured range; only for a ledger that has nothing of the old one.
    pub(crate) fn set_range(&mut self, range: Ipv4Net) {
        if self.range != range {
            self.range = range;
            self.cursor = range.network();
        }
    }

    pub(crate) fn owned(&self) -> RangeSet {
        RangeSet::disjoint(&self.owned).unwrap_or_default()
    }

    pub(crate) fn network_id(&self) -> Option<NetworkId> {
        self.network.as_ref().map(|network| network.id)
    }

    /// How many addresses of the own ranges are given out.
    pub(crate) fn used(&self) -> u64 {
        self.taken.len() as u64
    }

    /// Whether there is nothing of it, and nothing can come: a request may still be answered by a grant.
    pub(crate) fn is_bare(&self) -> bool {
        self.network.is_none() && self.request.is_none()
    }

    /// Whether anything of the ranges has been given: to a container or to another host.
    pub(crate) fn is_touched(&self) -> bool {
        let whole = [AddressRange::of_net(self.range)];
        let rest = self.owned == whole && self.taken.is_empty() && self.grants.is_empty();
        self.network.is_some() && !rest
    }

    /// Addresses of own ranges that another host holds.
    pub(crate) fn claims_of(&self, peer: PeerId) -> impl Iterator<Item = Ipv4Addr> + '_ {
        let theirs =
            move |holder: &Holder| matches!(holder, Holder::Peer { peer: p, .. } if *p == peer);
        self.taken.iter().filter(move |(_, holder)| theirs(holder)).map(|(a, _)| *a)
    }

    /// Containers of this host that have addresses, of own ranges and others, on a network without ranges of its own;
    /// `None`: on the network of the ranges. One may come twice.
    pub(crate) fn owners(&self, on: Option<Vni>) -> impl Iterator<Item = &str> {
        let taken = self.taken.values().filter_map(move |holder| match holder {
            Holder::Local { owner, on: of, .. } if *of == on => Some(owner.as_str()),
            _ => None,
        });
        let held = self.held.values().filter(move |held| held.on == on);
        taken.chain(held.map(|held| held.owner.as_str()))
    }

    /// Notes which network an address of an own container is on: a state of an earlier release does not say it.
    /// Whether that is news.
    pub(crate) fn note_network(&mut self, address: Ipv4Addr, network: Option<Vni>) -> bool {
        let known = match (self.taken.get_mut(&address), self.held.get_mut(&address)) {
            (Some(Holder::Local { on, .. }), _) => on,
            (_, Some(held)) => &mut held.on,
            _ => return false,
        };
        std::mem::replace(known, network) != network
    }

    /// Takes a founding back; only if nothing of it is touched.
    pub(crate) fn dissolve(&mut self) {
        self.network = None;
        self.owned.clear();
    }

    /// Becomes the first host of a founding: owner of the whole range.
    pub(crate) fn found(&mut self, network: Network) {
        self.network = Some(network);
        self.owned = vec![AddressRange::of_net(self.range)];
        self.announced += 1;
        self.request = None;
    }

    /// The announcement of this host's ranges.
    pub(crate) fn announcement(&self, owner: PeerId) -> Option<RangeAnnouncement> {
        let network = self.network_id()?;
        let (version, ranges) = (self.announced, self.owned.clone());
        Some(RangeAnnouncement { network, owner, version, ranges })
    }

    /// Other hosts remember a version at or above this host's: raises its version above theirs.
    pub(crate) fn raise_announcement(&mut self, above: u64) -> bool {
        let raise = above >= self.announced;
        if raise {
            self.announced = above + 1;
        }
        raise
    }

    /// The number of the open range request, a new one if there is none.
    pub(crate) fn open_request(&mut self, fresh: u64) -> u64 {
        if let Some(request) = self.request {
            return request;
        }
        self.request = Some(fresh);
        self.issued.push(fresh);
        if self.issued.len() > REQUESTS_MAX {
            self.issued.remove(0);
        }
        let issued = &self.issued;
        self.accepted.retain(|(_, request)| issued.contains(request));
        fresh
    }

    /// Whether this host asked for a range under this number.
    pub(crate) fn has_issued(&self, request: u64) -> bool {
        self.issued.contains(&request)
    }

    /// Whether a grant has been taken already.
    pub(crate) fn has_grant(&self, from: PeerId, request: u64) -> bool {
        self.accepted.contains(&(from, request))
    }

    /// Takes granted ranges as own; `false`, and nothing changed, if they cannot be given to this host.
    pub(crate) fn accept_grant(
        &mut self,
        from: PeerId,
        request: u64,
        network: Network,
        ranges: &[AddressRange],
    ) -> bool {
        let fits = RangeSet::disjoint(ranges).is_some_and(|set| set.is_within(self.range));
        let mut owned = self.owned();
        if !fits || ranges.is_empty() || !owned.add(ranges) {
            return false;
        }
        self.network = Some(network);
        self.owned = owned.ranges().to_vec();
        self.announced += 1;
        self.accepted.push((from, request));
        if self.request == Some(request) {
            self.request = None;
        }
        true
    }

    /// Gives away half of the largest free run of addresses, or repeats the grant already made for this
    /// request.
    pub(crate) fn grant(&mut self, to: PeerId, request: u64, within: Ipv4Net) -> Granted {
        let mut open = self.grants.iter().filter(|grant| grant.to == to);
        if let Some(grant) = open.clone().find(|grant| grant.request == request) {
            return Granted::Ranges { ranges: grant.ranges.clone(), new: false };
        }
        if open.nth(GRANTS_PER_PEER_MAX - 1).is_some() || self.grants.len() >= GRANTS_MAX {
            return Granted::TooManyOpen;
        }
        if self.owned.len() >= RANGES_PER_PEER_MAX {
            return Granted::NothingLeft;
        }
        let largest = self.free_runs(within).into_iter().rev().max_by_key(AddressRange::size);
        let Some((_, away)) = largest.and_then(|run| run.halves()) else {
            return Granted::NothingLeft;
        };
        let useful = (u32::from(away.first)..=u32::from(away.last))
            .take(3)
            .any(|address| !is_reserved(address.into(), within));
        if !useful {
            return Granted::NothingLeft;
        }
        let mut owned = self.owned();
        owned.subtract(away);
        self.owned = owned.ranges().to_vec();
        self.announced += 1;
        self.grants.push(Grant { to, request, ranges: vec![away] });
        Granted::Ranges { ranges: vec![away], new: true }
    }

    /// Grants to a host that it has not acknowledged.
    pub(crate) fn open_grants(&self, to: PeerId) -> Vec<(u64, Vec<AddressRange>)> {
        let mine = self.grants.iter().filter(|grant| grant.to == to);
        mine.map(|grant| (grant.request, grant.ranges.clone())).collect()
    }

    /// The receiver has stored a grant; `false` if there is no such grant.
    pub(crate) fn close_grant(&mut self, to: PeerId, request: u64) -> bool {
        let before = self.grants.len();
        self.grants.retain(|grant| grant.to != to || grant.request != request);
        before != self.grants.len()
    }

    /// The address that `allocate` gave this owner before.
    pub(crate) fn allocated(&self, owner: &str) -> Option<Ipv4Addr> {
        let automatic = |holder: &Holder| matches!(holder, Holder::Local { owner: o, automatic: true, .. } if o == owner);
        self.taken.iter().find(|(_, holder)| automatic(holder)).map(|(address, _)| *address)
    }

    /// Takes the next free address of a subnet from the own ranges, for a container. `on` is the network without ranges
    /// of its own that the container is on; `None`: the network of the ranges.
    pub(crate) fn allocate(
        &mut self,
        owner: &str,
        on: Option<Vni>,
        subnet: Ipv4Net,
    ) -> Option<Ipv4Addr> {
        let owned = self.owned();
        let runs: Vec<AddressRange> = owned.within(subnet).collect();
        let from = u32::from(self.cursor);
        let free = |address: &u32| {
            let address = Ipv4Addr::from(*address);
            !self.taken.contains_key(&address) && !is_reserved(address, subnet)
        };
        let ends = |run: &AddressRange| (u32::from(run.first), u32::from(run.last));
        let after = runs.iter().map(ends).filter(|(_, last)| *last >= from);
        let after = after.map(|(first, last)| (first.max(from), last));
        let around = after.chain(runs.iter().map(ends));
        let address = around.into_iter().find_map(|(first, last)| (first..=last).find(free))?;
        self.cursor = address.wrapping_add(1).into();
        let address = Ipv4Addr::from(address);
        let holder = Holder::Local { owner: owner.to_owned(), automatic: true, on };
        self.taken.insert(address, holder);
        Some(address)
    }

    /// Runs of free addresses in the own ranges, within a subnet.
    fn free_runs(&self, within: Ipv4Net) -> Vec<AddressRange> {
        let mut runs = Vec::new();
        for range in self.owned().within(within) {
            let (mut first, last) = (u32::from(range.first), u32::from(range.last));
            let mut open = true;
            for taken in self.taken.range(range.first..=range.last).map(|(a, _)| u32::from(*a)) {
                if taken > first {
                    runs.push(AddressRange { first: first.into(), last: (taken - 1).into() });
                }
                open = taken < last;
                first = taken.saturating_add(1);
            }
            if open {
                runs.push(AddressRange { first: first.into(), last: last.into() });
            }
        }
        runs
    }
}

/// Whether an address is the network or broadcast address of a subnet that has such.
pub(crate) fn is_reserved(address: Ipv4Addr, subnet: Ipv4Net) -> bool {
    subnet.prefix_len() < 31 && (address == subnet.network() || address == subnet.broadcast())
}
