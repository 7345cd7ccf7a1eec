//! The result of ADD as plugins and runtimes hand it on. Fields that Weft does not know pass unchanged.

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// A result of any supported version.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CniResult {
    /// The version of its form.
    #[serde(default, rename = "cniVersion", deserialize_with = "null_is_default")]
    pub cni_version: String,
    /// The interfaces made, on the host and in the container.
    #[serde(default, deserialize_with = "null_is_default")]
    pub interfaces: Vec<Interface>,
    /// The addresses given.
    #[serde(default, deserialize_with = "null_is_default")]
    pub ips: Vec<Address>,
    /// The routes made in the container.
    #[serde(default, deserialize_with = "null_is_default")]
    pub routes: Vec<Route>,
    /// The resolver's settings.
    #[serde(default, deserialize_with = "null_is_default")]
    pub dns: Dns,
    /// All other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// An interface of a result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its Ethernet address; empty if it has none.
    #[serde(
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "null_is_default"
    )]
    pub mac: String,
    /// Its MTU in bytes, from version 1.1.0 on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// The path of its namespace; empty for an interface of the host.
    #[serde(
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "null_is_default"
    )]
    pub sandbox: String,
    /// All other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// An address of a result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Address {
    /// Its family, `4` or `6`; before version 1.0.0 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The place of its interface in the list of interfaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// The address with its prefix length.
    pub address: String,
    /// The gateway of its network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// All other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A route of a result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// The destination with its prefix length.
    pub dst: String,
    /// The next hop; none for a network on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<String>,
    /// All other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// Settings of a resolver.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Dns {
    /// Addresses of name servers, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub nameservers: Vec<String>,
    /// The local domain.
    #[serde(
        default,
        skip_serializing_if = "String::is_empty",
        deserialize_with = "null_is_default"
    )]
    pub domain: String,
    /// Domains for short names, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub search: Vec<String>,
    /// Options of the resolver.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_default")]
    pub options: Vec<String>,
    /// All other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl CniResult {
    /// The object that goes to standard output.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Texts, numbers and values that were read before always serialize.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The addresses that the interface of this name has in the container.
    pub(super) fn addresses_of(&self, interface: &str) -> Vec<IpNet> {
        let is_ours = |entry: &Interface| entry.name == interface && !entry.sandbox.is_empty();
        let of_ours = |ip: &&Address| {
            ip.interface.and_then(|index| self.interfaces.get(index)).is_some_and(is_ours)
        };
        self.ips.iter().filter(of_ours).filter_map(|ip| ip.address.parse().ok()).collect()
    }
}

impl Route {
    /// A route by its destination and next hop.
    #[must_use]
    pub fn new(dst: String, gw: Option<String>) -> Self {
        Self { dst, gw, extra: Map::new() }
    }
}

/// Go writes `null` for an empty list, and some plugins for an empty text.
pub(super) fn null_is_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> Result<T, D::Error> {
    Option::<T>::deserialize(deserializer).map(Option::unwrap_or_default)
}
