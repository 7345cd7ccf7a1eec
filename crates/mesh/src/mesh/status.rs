//! The mesh as `weft status` shows it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use super::Mesh;
use crate::endpoint::{Conflict, EndpointInfo, EndpointTable};
use crate::ledger::{Holder, Ledger};
use crate::message::Network;
use crate::range::AddressRange;

/// One host of the mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    /// The host's peer id.
    pub peer: PeerId,
    /// Its host name.
    pub nickname: String,
    /// Addresses at which it may be dialled.
    pub addresses: Vec<SocketAddr>,
    /// It is this host.
    pub local: bool,
    /// A link with it is up; true for this host.
    pub linked: bool,
    /// It is linked, or a linked host says that it is linked with it.
    pub reachable: bool,
    /// Since when the link is up.
    pub since: Option<Instant>,
    /// When anyone heard of was last linked with it.
    pub last_seen: Option<Instant>,
    /// Peers that it reports links with; empty if it is not linked.
    pub connections: Vec<PeerId>,
}

/// The addresses of the mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpamStatus {
    /// The mesh; `None`: not founded or joined yet.
    pub network: Option<Network>,
    /// `--ipalloc-range`.
    pub range: Ipv4Net,
    /// The subnet of automatic addresses.
    pub subnet: Ipv4Net,
    /// The IPv6 range.
    pub range6: Option<Ipv6Net>,
    /// The reason why this host owns no range or may not give from it, for the user.
    pub waiting: Option<String>,
    /// Whether that may pass while a request for an address waits; else requests are refused at once, or the disk is
    /// at fault.
    pub may_pass: bool,
    /// Hosts that own ranges, this host first.
    pub owners: Vec<OwnerStatus>,
    /// Requests for addresses that wait.
    pub tickets: usize,
}

/// The ranges of one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerStatus {
    /// The owner's peer id.
    pub peer: PeerId,
    /// Its host name; empty if it is not known.
    pub nickname: String,
    /// Its ranges.
    pub ranges: Vec<AddressRange>,
    /// How many addresses these have.
    pub addresses: u64,
    /// How many of them are given out, as far as told.
    pub used: Option<u64>,
    /// Whether it is this host or linked.
    pub linked: bool,
}

/// An address that a container of this host has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The network whose ranges it is from; for one outside the ranges, the network that it is on.
    pub vni: Vni,
    /// The container.
    pub owner: String,
    /// The address; an automatic one has an IPv6 twin ([`Mesh::ipv6_of`]).
    pub address: IpAddr,
    /// Given by [`Mesh::allocate`], not claimed.
    pub automatic: bool,
    /// The owner of the range that it is from, if that is another host.
    pub from: Option<PeerId>,
}

impl Mesh {
    /// The mesh that this host belongs to.
    pub fn network(&self) -> Option<Network> {
        self.state.weft.network
    }

    /// Whether a host is one of [`Self::peers`].
    pub fn knows(&self, peer: PeerId) -> bool {
        peer == self.config.local || self.members.get(peer).is_some()
    }

    /// All hosts known, this one first.
    pub fn peers(&self) -> Vec<PeerStatus> {
        let via: BTreeSet<PeerId> =
            self.links.values().flat_map(|link| link.connections.iter().copied()).collect();
        let local = PeerStatus {
            peer: self.config.local,
            nickname: self.config.nickname.clone(),
            addresses: self.config.addresses.clone(),
            local: true,
            linked: true,
            reachable: true,
            since: None,
            last_seen: None,
            connections: self.linked(),
        };
        let others = self.members.iter().map(|(peer, member)| {
            let link = self.links.get(&peer);
            PeerStatus {
                peer,
                nickname: member.nickname.clone(),
                addresses: member.addresses.iter().copied().collect(),
                local: false,
                linked: link.is_some(),
                reachable: link.is_some() || via.contains(&peer),
                since: link.map(|link| link.since),
                last_seen: Some(member.last_seen),
                connections: link
                    .map(|link| link.connections.iter().copied().collect())
                    .unwrap_or_default(),
            }
        });
        [local].into_iter().chain(others).collect()
    }

    /// The state of address allocation on `weft`, and on networks without ranges of their own.
    pub fn ipam(&self) -> IpamStatus {
        self.ipam_of(Vni::WEFT, &self.state.weft)
    }

    /// The state of address allocation on a network: its own, or that of `weft`. `None`: this host neither holds it
    /// nor has ranges of it.
    pub fn ipam_on(&self, vni: Vni) -> Option<IpamStatus> {
        let allocator = self.state.allocator(vni)?;
        Some(self.ipam_of(allocator, self.state.ledger(allocator)?))
    }

    fn ipam_of(&self, vni: Vni, ledger: &Ledger) -> IpamStatus {
        let network = ledger.network;
        let own = ledger.owned();
        let local = network.map(|_| OwnerStatus {
            peer: self.config.local,
            nickname: self.config.nickname.clone(),
            addresses: own.size(),
            used: Some(ledger.used()),
            ranges: own.ranges().to_vec(),
            linked: true,
        });
        let announced = self.spaces.get(&vni).into_iter();
        let others = announced.flat_map(|space| space.announced.ranges()).map(|(peer, ranges)| {
            let link = self.links.get(&peer);
            OwnerStatus {
                peer,
                nickname: self.members.get(peer).map(|m| m.nickname.clone()).unwrap_or_default(),
                addresses: ranges.size(),
                used: link.and_then(|link| link.incoming.get(&vni)?.used),
                ranges: ranges.ranges().to_vec(),
                linked: link.is_some(),
            }
        });
        let range6 = match self.state.networks.get(&vni) {
            Some(saved) => saved.definition.range6,
            None => self.config.range6,
        };
        let is_open = self.standing.is_sure() || self.standing.is_open();
        let missing = || network.is_none().then(|| self.reason_for_no_ranges(vni));
        IpamStatus {
            network,
            range: ledger.range,
            subnet: self.subnet(vni).unwrap_or(ledger.range),
            range6: network.map(|network| network.range6).or(range6),
            waiting: self.unsure().or_else(missing),
            may_pass: is_open && self.storage.failure().is_none(),
            owners: local.into_iter().chain(others).collect(),
            tickets: self.pending.values().filter(|pending| pending.is_of(vni)).count(),
        }
    }

    /// All addresses that containers of this host have, by network and address.
    pub fn allocations(&self) -> Vec<Allocation> {
        let mut all = Vec::new();
        for (vni, ledger) in self.state.ledgers() {
            let own = ledger.taken.iter().filter_map(|(address, holder)| match holder {
                Holder::Local { owner, automatic, .. } => Some(Allocation {
                    vni,
                    owner: owner.clone(),
                    address: (*address).into(),
                    automatic: *automatic,
                    from: None,
                }),
                Holder::Peer { .. } => None,
            });
            all.extend(own);
            all.extend(ledger.held.iter().map(|(address, held)| Allocation {
                vni,
                owner: held.owner.clone(),
                address: (*address).into(),
                automatic: false,
                from: Some(held.from),
            }));
        }
        let others = self.state.networks.iter().map(|(vni, saved)| (*vni, &saved.outside));
        for (vni, outside) in [(Vni::WEFT, &self.state.outside)].into_iter().chain(others) {
            all.extend(outside.iter().map(|(address, owner)| Allocation {
                vni,
                owner: owner.clone(),
                address: *address,
                automatic: false,
                from: None,
            }));
        }
        all.sort_by_key(|allocation| (allocation.vni, allocation.address));
        all
    }

    /// The addresses that [`Mesh::allocate`] gave this owner on a network before, if any.
    pub fn allocated(&self, vni: Vni, owner: &str) -> Option<Vec<IpNet>> {
        let allocator = self.state.allocator(vni)?;
        let ledger = self.state.ledger(allocator)?;
        let (network, address) = (ledger.network?, ledger.allocated(owner)?);
        Some(self.pair_of(allocator, network, address))
    }

    /// All endpoints known on a network with their hosts, this host's first.
    pub fn endpoints(&self, vni: Vni) -> Vec<(EndpointInfo, PeerId)> {
        let all = self.table(vni).into_iter().flat_map(EndpointTable::all);
        all.map(|(info, peer)| (info.clone(), peer)).collect()
    }

    /// Addresses that two hosts announce now on one network.
    pub fn conflicts(&self) -> Vec<Conflict> {
        self.tables().flat_map(|(_, table)| table.conflicts()).collect()
    }
}
