//! Requests to the rest of the daemon, and their results.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_packet::ethernet::Mac;

use super::names::NetworkName;

/// A network that Docker asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkRequest {
    /// Its name.
    pub name: NetworkName,
    /// The ranges that it must have; a new network gets these. Empty: those that it has, or for a
    /// new one those that the daemon chooses.
    pub ranges: Vec<IpNet>,
    /// Another IPAM driver gives addresses of these ranges, so Weft must not.
    pub external: bool,
    /// Whether Docker's network has no way out. `None`: Docker asks for addresses only, and has not said it yet.
    /// A network that there is not is created once it is known.
    pub internal: Option<bool>,
}

/// A network as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkInfo {
    /// The network whose owners allocate its addresses: itself, or another whose ranges it shares.
    pub allocator: NetworkName,
    /// Its ranges.
    pub ranges: Vec<IpNet>,
    /// Addresses that it keeps for the hosts themselves; at most one of each range.
    pub gateways: Vec<IpAddr>,
    /// False: there is none yet, and one that is created would be as this says.
    pub exists: bool,
}

/// An address that Docker asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressRequest {
    /// As in [`NetworkInfo`].
    pub allocator: NetworkName,
    /// The range that the address must lie in.
    pub range: IpNet,
    /// A certain address; `None` for the next free one.
    pub address: Option<IpAddr>,
    /// The key to release it by.
    pub owner: String,
    /// Only keeps the address from containers: several owners, also on several hosts, may have it.
    pub shared: bool,
}

/// A link that Docker asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkRequest {
    /// The engine's id of the endpoint, the key of the link.
    pub endpoint: String,
    /// Its network.
    pub network: NetworkName,
    /// The address of the container's end.
    pub mac: Mac,
    /// The container's addresses with the length of their subnet's prefix.
    pub addresses: Vec<IpNet>,
    /// The engine's name for the container's namespace; empty if it told none.
    pub sandbox: String,
}

/// A link that is ready to be moved into a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The name of the container's end in the host's network namespace: 1 to 15 bytes.
    pub interface: String,
    /// The ranges of the network.
    pub ranges: Vec<IpNet>,
}

/// Why the daemon refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// For a while.
    #[error("Weft is not ready on this host: {why}; `weft status` shows more, then try again")]
    NotReady {
        /// The cause.
        why: String,
    },
    /// The network exists otherwise, or clashes with another.
    #[error("network {network} cannot be used: {why}; `weft network inspect {network}` shows it")]
    Clash {
        /// The network.
        network: NetworkName,
        /// The cause.
        why: String,
    },
    /// No address is free.
    #[error(
        "no free address in {range} of network {network}: remove containers, or create a network with a larger range"
    )]
    Exhausted {
        /// The network.
        network: NetworkName,
        /// The range.
        range: IpNet,
    },
    /// Another owner has the address.
    #[error("address {address} is in use by {by}: choose another, or remove {by}")]
    Taken {
        /// The address.
        address: IpAddr,
        /// Its owner.
        by: String,
    },
    /// The kernel, the disk or a peer.
    #[error("cannot {what}: {why}")]
    Failed {
        /// The operation and its object.
        what: String,
        /// The cause, and what to do.
        why: String,
    },
    /// The caller has gone, so that the result is of no use.
    #[error("the Docker engine gave the request up: try again")]
    GivenUp,
}
