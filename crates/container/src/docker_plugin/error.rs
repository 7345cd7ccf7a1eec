//! Reasons why the plugin refuses a request of Docker's.

use std::net::IpAddr;

use ipnet::IpNet;

use super::names::{NetworkName, NetworkNameError};
use super::requests::BackendError;

/// Why the plugin refuses a request. Docker shows the text to its user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PluginError {
    /// Fault of the engine, or its second try after a lost connection.
    #[error(
        "{method} came without a body: the connection to Weft was lost meanwhile; try the command again"
    )]
    NoBody {
        /// The method.
        method: &'static str,
    },
    /// Fault of the engine.
    #[error("{method} has a body of more than {limit} bytes, which Weft does not read")]
    BodyTooLong {
        /// The method.
        method: &'static str,
        /// The limit in bytes.
        limit: usize,
    },
    /// Fault of the engine, or of the connection.
    #[error("cannot read the body of {method}: {why}; is another program using Weft's socket?")]
    Unreadable {
        /// The method.
        method: &'static str,
        /// The problem with it.
        why: String,
    },
    /// Fault of the engine or its user.
    #[error("{field} {value:?} is not valid: {why}")]
    BadField {
        /// The field by its name in the protocol.
        field: &'static str,
        /// Its value, cut if it is long.
        value: String,
        /// The rule that it breaks.
        why: String,
    },
    /// Fault of the user.
    #[error("{flag} {option} is unknown to Weft: leave it out ({flag} takes {known})")]
    UnknownOption {
        /// The flag of `docker network create` or the word of a Compose file.
        flag: &'static str,
        /// The option.
        option: String,
        /// The options that there are.
        known: &'static str,
    },
    /// Fault of the user.
    #[error("{flag} network={name} is not valid: {source}")]
    BadName {
        /// The flag.
        flag: &'static str,
        /// The name as given, cut if it is long.
        name: String,
        /// The rule that it breaks.
        source: NetworkNameError,
    },
    /// Fault of the user.
    #[error("{flag} names two networks, {one} and {other}: name one")]
    TwoNames {
        /// The flag.
        flag: &'static str,
        /// The one.
        one: String,
        /// The other.
        other: String,
    },
    /// Docker's own IPAM gives the same addresses on every host.
    #[error(
        "Docker's IPAM driver gave {pool}, and on each host it gives the same addresses: add --ipam-driver weft"
    )]
    ForeignIpam {
        /// The range.
        pool: String,
    },
    /// A subnet that is not the ready network's.
    #[error(
        "{subnet} is not the range of network weft, so the network needs a name that is the same on all hosts: \
         add -o network=NAME"
    )]
    NameNeeded {
        /// The range.
        subnet: IpNet,
    },
    /// The two halves of `docker network create` name two networks.
    #[error(
        "{subnet} belongs to network {of}, not to {network}: add --ipam-opt network={network}, \
         and --subnet if {network} is new and is to have its own range"
    )]
    OtherNetwork {
        /// The range.
        subnet: IpNet,
        /// The network that it was taken from.
        of: NetworkName,
        /// The network that was named.
        network: NetworkName,
    },
    /// The network exists with other ranges.
    #[error(
        "network {network} has the ranges {ranges}, not {subnet}: use one of these as --subnet"
    )]
    NotARange {
        /// The range asked for.
        subnet: IpNet,
        /// The network.
        network: NetworkName,
        /// Its ranges.
        ranges: String,
    },
    /// The network has no range of this family.
    #[error("network {network} has no {family} range: give one with --subnet")]
    NoRange {
        /// The network.
        network: NetworkName,
        /// `IPv4` or `IPv6`.
        family: &'static str,
    },
    /// The engine would ask for ever.
    #[error(
        "Docker refuses the range {range}, since a nameserver in /etc/resolv.conf or a route of this host lies in it \
         (see ip route): accept it with --subnet {range}, or create a Weft network with another range"
    )]
    Refused {
        /// The range.
        range: IpNet,
    },
    /// A pool that was never given, or whose record is lost.
    #[error(
        "Weft has no record of the address pool {pool:?}: remove the network (docker network rm) and create it again"
    )]
    UnknownPool {
        /// The pool's id, cut if it is long.
        pool: String,
    },
    /// A pool that belongs to no network of Weft's.
    #[error(
        "{subnet} belongs to no network of Weft's, so no address can be chosen from it: \
         create the network with -d weft, -o network=NAME and --ipam-opt network=NAME"
    )]
    Unbound {
        /// The range.
        subnet: IpNet,
    },
    /// Fault of the user.
    #[error("address {address} is not one for a container in {subnet}: choose another")]
    Outside {
        /// The address.
        address: IpAddr,
        /// The range.
        subnet: IpNet,
    },
    /// Another container of this host has it.
    #[error(
        "address {address} is in use on this host: choose another (docker network inspect shows them)"
    )]
    InUse {
        /// The address.
        address: IpAddr,
    },
    /// A network that Weft has no record of.
    #[error(
        "Weft has no record of network {network}: remove it (docker network rm) and create it again"
    )]
    UnknownNetwork {
        /// The engine's id.
        network: String,
    },
    /// An id that is used otherwise already.
    #[error("{kind} {id} exists already, with other settings: remove it first")]
    Exists {
        /// `network` or `endpoint`.
        kind: &'static str,
        /// The engine's id.
        id: String,
    },
    /// A container on two networks of Weft's with the same addresses.
    #[error(
        "the container is on network {first} already, whose addresses overlap with those of network {second}: \
         create one of them with another --subnet"
    )]
    Overlap {
        /// Weft's network that it is on.
        first: NetworkName,
        /// The one that it is to join.
        second: NetworkName,
    },
    /// A container on two networks of Docker's that are one of Weft's.
    #[error(
        "the container is on network {network} of Weft's already, by another network of Docker's: \
         take it off that one first (docker network disconnect)"
    )]
    SameNetwork {
        /// Weft's network.
        network: NetworkName,
    },
    /// An endpoint that Weft has no record of.
    #[error(
        "Weft has no record of endpoint {endpoint}: take the container off the network \
         (docker network disconnect -f) and connect it again"
    )]
    UnknownEndpoint {
        /// The engine's id.
        endpoint: String,
    },
    /// A limit of the plugin.
    #[error("this host has {limit} {what} already, which is the most: remove some")]
    TooMany {
        /// The objects counted.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A part of Docker's protocol that is not offered.
    #[error("driver weft has scope local and does not work for swarm services: {instead}")]
    Swarm {
        /// The way that works.
        instead: &'static str,
    },
    /// The rest of the daemon.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The disk.
    #[error("Weft cannot store what it would promise, and so does nothing: {0}")]
    NotSaved(BackendError),
    /// The limit of time.
    #[error("Weft did not finish within {limit_ms} ms; `weft status` shows why, then try again")]
    TimedOut {
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// A defect of Weft's.
    #[error("Weft failed: {0}; weft.log says more, please report it")]
    Internal(&'static str),
}
