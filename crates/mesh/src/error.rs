//! Errors: the failure, its cause and the remedy.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;
use weft_packet::vxlan::Vni;

use crate::message::NetworkId;
use crate::network::NetworkClash;

/// A fault at the border of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// Configuration: the range cannot hold hosts.
    #[error(
        "address range {0} is too small or not a network address: use a prefix of at most /29, such as 10.32.0.0/12"
    )]
    BadRange(Ipv4Net),
    /// Configuration: the subnet for automatic addresses is not inside the range.
    #[error(
        "default subnet {subnet} is not inside the address range {range}: choose a subnet of the range"
    )]
    BadSubnet {
        /// As configured.
        subnet: Ipv4Net,
        /// As configured.
        range: Ipv4Net,
    },
    /// Configuration: the IPv6 range is not a /64.
    #[error("IPv6 address range {0} is not a /64 network address: use one such as fd00:1:2:3::/64")]
    BadRange6(Ipv6Net),
    /// Configuration: the nickname is empty, too long or has control characters.
    #[error("invalid nickname: use 1 to {max} bytes without control characters", max = crate::limits::NICKNAME_BYTES_MAX)]
    BadNickname,
    /// Configuration: the saved state belongs to another range.
    #[error(
        "the saved addresses are from range {saved}, but {configured} is configured: launch with the old range, or drop all addresses with `weft reset`"
    )]
    SavedRange {
        /// In the state.
        saved: Ipv4Net,
        /// In the configuration.
        configured: Ipv4Net,
    },
    /// Configuration: the saved state belongs to another IPv6 range.
    #[error(
        "the saved addresses are from IPv6 range {saved}, but {configured} is configured: launch with the old range, or drop all addresses with `weft reset`"
    )]
    SavedRange6 {
        /// In the state.
        saved: Ipv6Net,
        /// In the configuration.
        configured: Ipv6Net,
    },
    /// Configuration: the saved state belongs to another identity.
    #[error(
        "the saved addresses belong to peer {saved}, not to this host, which is {local}: restore the identity, or drop all addresses with `weft reset`"
    )]
    SavedIdentity {
        /// In the state.
        saved: PeerId,
        /// This host.
        local: PeerId,
    },
    /// Us or an older or newer Weft: the saved state has another version.
    #[error(
        "the saved addresses have format version {0}, which this Weft does not know: use the Weft that wrote them, or drop all addresses with `weft reset`"
    )]
    SavedVersion(u16),
    /// Disk: the saved state contradicts itself.
    #[error(
        "the saved addresses are damaged ({0}): restore them, or drop all addresses with `weft reset`"
    )]
    SavedDamaged(&'static str),
    /// Us: a message of a peer that is not linked.
    #[error("peer {0} is not linked")]
    NotLinked(PeerId),
    /// Peer: a message that no correct host sends; the link should be closed.
    #[error("peer {peer} sent a bad message: {what}")]
    Malformed {
        /// The sender.
        peer: PeerId,
        /// The fault in it.
        what: &'static str,
    },
    /// Peer: more than the named limit; the rest was dropped.
    #[error("peer {peer} sent too many {what}: at most {max} are kept")]
    TooMany {
        /// The sender.
        peer: PeerId,
        /// The kind of item.
        what: &'static str,
        /// The limit.
        max: usize,
    },
    /// Caller: an endpoint that cannot be announced.
    #[error("endpoint not announced: {0}")]
    BadEndpoint(&'static str),
    /// Caller: a name that cannot be announced.
    #[error("name not announced: {0}")]
    BadName(&'static str),
}

/// The reason why a network cannot be created, joined or removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum NetworkError {
    /// A definition that no host would take.
    #[error("network not created: {why}")]
    Unfit {
        /// The fault in it.
        why: String,
    },
    /// It has an option that this release does not know.
    #[error(
        "network {name} has the option {option}, which this release of Weft does not know: update Weft on this host"
    )]
    UnknownOption {
        /// The network.
        name: String,
        /// The name of the option.
        option: String,
    },
    /// It is here with another definition.
    #[error(
        "network {name} is on this host with another definition: remove it on every host that has it, then create it again"
    )]
    Exists {
        /// The network.
        name: String,
    },
    /// Another network of this host has its VNI.
    #[error(
        "network {other} of this host has VNI {}, which network {name} would have: create {name} with another --vni, the same on every host",
        .vni.0
    )]
    VniTaken {
        /// The network.
        name: String,
        /// The VNI.
        vni: Vni,
        /// The network of this host.
        other: String,
    },
    /// It would clash with a network of another host.
    #[error("{clash}")]
    Clash {
        /// The clash.
        clash: NetworkClash,
    },
    /// No known host holds it.
    #[error(
        "no network {name}: `weft network create {name}` creates it, `weft network ls` lists those of this host and its peers"
    )]
    Unknown {
        /// The network.
        name: String,
    },
    /// Other hosts hold it with different definitions.
    #[error(
        "network {name} of {host} is not that of {other}: remove it on one of them, then create it as on the other"
    )]
    Ambiguous {
        /// The network.
        name: String,
        /// A host.
        host: String,
        /// Another one.
        other: String,
    },
    /// Containers of this host are on it.
    #[error(
        "{containers} containers of this host are on network {name}, or have addresses of it: detach them first (`weft ps` lists them)"
    )]
    InUse {
        /// The network.
        name: String,
        /// How many they are.
        containers: usize,
    },
    /// The name is that of `weft`, which every host has.
    #[error("network weft is on every host and can be neither created nor removed")]
    Weft,
    /// The host holds the maximum of networks.
    #[error("this host holds {max} networks, which is the maximum: remove one first", max = crate::limits::NETWORKS_MAX)]
    TooMany,
    /// The state directory cannot be written.
    #[error("this host cannot save a network: {why}")]
    NotSaved {
        /// The error.
        why: String,
    },
}

/// The reason why two hosts cannot be in one mesh. The text is for the users of both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Refusal {
    /// Another protocol version.
    #[error(
        "protocol version {theirs} of {host} is not {ours} of this host: run the same release of Weft on both"
    )]
    Protocol {
        /// The other host.
        host: String,
        /// Its version.
        theirs: u16,
        /// This host's.
        ours: u16,
    },
    /// The hosts founded, or joined, different meshes.
    #[error(
        "{host} belongs to network {theirs} and this host to network {ours}, founded apart: their addresses may clash. Run `weft reset` on the one whose containers may get new addresses, then launch it again naming the other"
    )]
    FoundedApart {
        /// The other host.
        host: String,
        /// Its network.
        theirs: NetworkId,
        /// This host's network.
        ours: NetworkId,
    },
    /// Different `--ipalloc-range`.
    #[error(
        "address range {theirs} of {host} is not {ours} of this host: launch both with the same --ipalloc-range"
    )]
    Range {
        /// The other host.
        host: String,
        /// Its range.
        theirs: Ipv4Net,
        /// This host's range.
        ours: Ipv4Net,
    },
    /// Different IPv6 ranges.
    #[error(
        "IPv6 address range {theirs} of {host} is not {ours} of this host: launch both with the same IPv6 range, or with none"
    )]
    Range6 {
        /// The other host.
        host: String,
        /// Its range.
        theirs: Ipv6Net,
        /// This host's range.
        ours: Ipv6Net,
    },
    /// The other end has this host's own identity.
    #[error(
        "{host} has the same identity as this host: it is this host, or a copy of its disk. On a copy, run `weft reset` to give it a new identity"
    )]
    SameIdentity {
        /// The other host.
        host: String,
    },
    /// The other end's hello makes no sense.
    #[error("{host} sent a bad greeting: {what}")]
    BadHello {
        /// The other host.
        host: String,
        /// The fault in it.
        what: String,
    },
    /// The table of members is full, and all of them are alive.
    #[error("this host knows {max} live members, which is the maximum", max = crate::limits::MEMBERS_MAX)]
    TooManyMembers,
}

/// The reason why a container gets no address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum AddressError {
    /// This host owns no range yet, or may not give from its ranges now.
    #[error("no address yet: {why}")]
    NotReady {
        /// The reason for the wait.
        why: String,
    },
    /// No free address.
    #[error("no free address: {why}")]
    NoSpace {
        /// The hosts and ranges that were tried.
        why: String,
    },
    /// A container has the address.
    #[error(
        "{address} is taken by container {container} on {host}: choose another address, or detach that container"
    )]
    Taken {
        /// The address.
        address: IpAddr,
        /// The container that has it.
        container: String,
        /// The host that the container is on.
        host: String,
    },
    /// The host that owns the address has no link.
    #[error(
        "{address} belongs to the range of {host}, which is not reachable: bring it back, or choose an address of another range (`weft status ipam`)"
    )]
    OwnerUnreachable {
        /// The address.
        address: IpAddr,
        /// The owner.
        host: String,
    },
    /// The host that owns the address did not answer in time.
    #[error(
        "{address} belongs to the range of {host}, which did not answer within {seconds} s: try again"
    )]
    NoAnswer {
        /// The address.
        address: IpAddr,
        /// The owner.
        host: String,
        /// [`crate::limits::CLAIM_WAIT_S`].
        seconds: u64,
    },
    /// No known host owns the address.
    #[error(
        "no host is known to own {address}: choose an address of a range in `weft status ipam`"
    )]
    OwnerUnknown {
        /// The address.
        address: IpAddr,
    },
    /// This host does not hold the network.
    #[error("this host does not hold network {}: create it, or join it", .vni.0)]
    NoNetwork {
        /// The network.
        vni: Vni,
    },
    /// The network or broadcast address of a subnet, or no address for a host at all.
    #[error(
        "{address} cannot be a container's address: it is the subnet's network or broadcast address, or not a unicast address"
    )]
    Reserved {
        /// As asked for.
        address: IpNet,
    },
    /// An IPv6 address of the mesh's range that no IPv4 address maps to.
    #[error(
        "{address} is inside the IPv6 range {range6}, whose addresses end in the container's IPv4 address: use one of the form {example}"
    )]
    NotMapped {
        /// As asked for.
        address: IpAddr,
        /// The mesh's IPv6 range.
        range6: Ipv6Net,
        /// An address that would do.
        example: IpAddr,
    },
    /// One host may hold only a limited number of addresses of another's range.
    #[error("this host already holds {max} addresses of the range of {host}: choose an address of this host's range", max = crate::limits::CLAIMS_PER_PEER_MAX)]
    TooManyClaims {
        /// The owner.
        host: String,
    },
    /// The state directory cannot be written.
    #[error("this host cannot save a new address: {why}")]
    NotSaved {
        /// The error.
        why: String,
    },
    /// The host that owns the address cannot save the claim.
    #[error("{host} owns the address and cannot save its state now: `weft status` there says why")]
    OwnerCannotSave {
        /// The owner.
        host: String,
    },
    /// The owner's name is empty, too long, or has control characters.
    #[error("invalid container id: use 1 to {max} bytes", max = crate::limits::NAME_BYTES_MAX)]
    BadOwner,
    /// Too many requests wait.
    #[error("{max} requests for addresses are already waiting: try again later", max = crate::limits::TICKETS_MAX)]
    Busy,
    /// The container was released while it waited.
    #[error("the container was released before it had an address")]
    Cancelled,
}
