//! Request and answer types about networks. Their names stay, as those of `types` do.

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::types::Ipam;

/// Body of `POST /v1/networks/create`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkCreateRequest {
    /// Its name: 1 to 63 lower-case letters, digits, `-` and `_`.
    pub name: String,
    /// Its IPv4 range; none: one that follows from the name.
    #[serde(default)]
    pub subnet: Option<Ipv4Net>,
    /// Its IPv6 range, a /64; none: one that follows from the name.
    #[serde(default)]
    pub subnet6: Option<Ipv6Net>,
    /// No range of its own: addresses come from the ranges of `weft`. Excludes `subnet` and `subnet6`.
    #[serde(default)]
    pub share_range: bool,
    /// Its VXLAN network identifier, 24 bits; none: that which follows from the name.
    #[serde(default)]
    pub vni: Option<u32>,
    /// No way out of the network.
    #[serde(default)]
    pub internal: bool,
    /// MTU of its containers, bytes; none: that of `weft`.
    #[serde(default)]
    pub mtu: Option<u16>,
    /// Its containers reach no other container, only the way out.
    #[serde(default)]
    pub isolated: bool,
}

/// Body of `POST /v1/networks/remove`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkRemoveRequest {
    /// Its name.
    pub name: String,
}

/// One network of `weft network ls`. As the answer to a removal, it is as the removal left it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Network {
    /// Its name.
    pub name: String,
    /// Its VXLAN network identifier.
    pub vni: u32,
    /// The range from which its containers get IPv4 addresses.
    pub subnet: Option<String>,
    /// The prefix of their IPv6 addresses.
    pub subnet6: Option<String>,
    /// Whether these ranges are its own; else they are those of `weft`.
    pub own_range: bool,
    /// No way out of the network.
    pub internal: bool,
    /// Its containers reach no other container, only the way out.
    pub isolated: bool,
    /// MTU of its containers, bytes.
    pub mtu: u16,
    /// Whether this host holds it.
    pub here: bool,
    /// Whether it was created on this host: it stays without containers.
    pub created: bool,
    /// `ready`; `waiting` for its ranges; `failed` on this host; `elsewhere`: only other hosts hold it.
    pub state: String,
    /// Why it is not ready.
    #[serde(default)]
    pub reason: Option<String>,
    /// In this state since, RFC 3339.
    #[serde(default)]
    pub since: Option<String>,
    /// Containers of this host on it.
    pub containers: usize,
    /// Other hosts that hold the same network, as far as this host knows.
    #[serde(default)]
    pub hosts: Vec<NetworkHost>,
    /// Hosts with which nothing of it is exchanged: for each a text with the reason and the remedy.
    #[serde(default)]
    pub clashes: Vec<String>,
    /// Its ranges and their owners; none: not known here.
    #[serde(default)]
    pub ipam: Option<Ipam>,
}

/// A host that holds a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkHost {
    /// Peer id, 64 hexadecimal digits.
    pub peer: String,
    /// Its nickname.
    pub nickname: String,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_script_names_only_what_it_wants() {
        let request: NetworkCreateRequest = serde_json::from_str(r#"{"name":"shop"}"#).unwrap();
        assert_eq!((request.name.as_str(), request.subnet, request.vni), ("shop", None, None));
        assert!(!request.share_range && !request.internal && !request.isolated);
        let text =
            r#"{"name":"shop","subnet":"10.9.0.0/16","subnet6":"fd09::/64","vni":5,"mtu":1300}"#;
        let request: NetworkCreateRequest = serde_json::from_str(text).unwrap();
        assert_eq!(request.subnet, "10.9.0.0/16".parse().ok());
        assert_eq!(request.subnet6, "fd09::/64".parse().ok());
        let misspelt = r#"{"name":"shop","subnets":"10.9.0.0/16"}"#;
        assert!(serde_json::from_str::<NetworkCreateRequest>(misspelt).is_err());
    }
}
