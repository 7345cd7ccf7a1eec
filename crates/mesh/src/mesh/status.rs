//! The mesh as `weft status` shows it.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_crypto::PeerId;

use super::Mesh;
use super::tickets::mapped;
use crate::endpoint::{Conflict, EndpointInfo};
use crate::message::Network;
use crate::range::AddressRange;
use crate::state::Holder;

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
        self.state.network
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

    /// The state of address allocation.
    pub fn ipam(&self) -> IpamStatus {
        let network = self.state.network;
        let own = self.state.owned();
        let local = network.map(|_| OwnerStatus {
            peer: self.config.local,
            nickname: self.config.nickname.clone(),
            addresses: own.size(),
            used: Some(self.state.used()),
            ranges: own.ranges().to_vec(),
            linked: true,
        });
        let others = self.announced.iter().map(|(peer, (_, ranges))| {
            let link = self.links.get(peer);
            OwnerStatus {
                peer: *peer,
                nickname: self.members.get(*peer).map(|m| m.nickname.clone()).unwrap_or_default(),
                addresses: ranges.size(),
                used: link.and_then(|link| link.used),
                ranges: ranges.ranges().to_vec(),
                linked: link.is_some(),
            }
        });
        IpamStatus {
            network,
            range: self.config.range,
            subnet: self.config.subnet(),
            range6: network.map(|network| network.range6).or(self.config.range6),
            waiting: self.unsure().or_else(|| network.is_none().then(|| self.founding_reason())),
            owners: local.into_iter().chain(others).collect(),
            tickets: self.pending.len(),
        }
    }

    /// All addresses that containers of this host have, by address.
    pub fn allocations(&self) -> Vec<Allocation> {
        let own = self.state.taken.iter().filter_map(|(address, holder)| match holder {
            Holder::Local { owner, automatic } => Some(Allocation {
                owner: owner.clone(),
                address: (*address).into(),
                automatic: *automatic,
                from: None,
            }),
            Holder::Peer { .. } => None,
        });
        let held = self.state.held.iter().map(|(address, held)| Allocation {
            owner: held.owner.clone(),
            address: (*address).into(),
            automatic: false,
            from: Some(held.from),
        });
        let outside = self.state.outside.iter().map(|(address, owner)| Allocation {
            owner: owner.clone(),
            address: *address,
            automatic: false,
            from: None,
        });
        let mut all: Vec<Allocation> = own.chain(held).chain(outside).collect();
        all.sort_by_key(|allocation| allocation.address);
        all
    }

    /// The addresses that [`Mesh::allocate`] gave this container before, if any.
    pub fn allocated(&self, owner: &str) -> Option<Vec<IpNet>> {
        let network = self.state.network?;
        let address = self.state.allocated(owner)?;
        let subnet = self.config.subnet();
        let net = if subnet.contains(&address) { subnet } else { self.config.range };
        let v4 = Ipv4Net::new(address, net.prefix_len()).map(IpNet::from);
        let v6 = Ipv6Net::new(mapped(network.range6, address), 64).map(IpNet::from);
        Some(v4.into_iter().chain(v6).collect())
    }

    /// All endpoints known with their hosts, this host's first.
    pub fn endpoints(&self) -> Vec<(EndpointInfo, PeerId)> {
        self.endpoints.all().map(|(info, peer)| (info.clone(), peer)).collect()
    }

    /// Addresses that two hosts announce now.
    pub fn conflicts(&self) -> Vec<Conflict> {
        self.endpoints.conflicts()
    }
}
