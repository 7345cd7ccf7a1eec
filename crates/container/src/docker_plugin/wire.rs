//! Requests and answers of Docker's plugin protocol, version 1.2.
//!
//! The engine is written in Go: a list or map without entries arrives as `null`, and an absent
//! field means the same. Unknown fields are ignored.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Options with values of any kind.
pub(super) type Options = BTreeMap<String, Value>;

/// One of the two interfaces of the plugin. They name their errors differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Face {
    /// `NetworkDriver.*`: errors are `Err`.
    Network,
    /// `IpamDriver.*`: errors are `Error`.
    Ipam,
}

/// A request that the state machine answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    /// `IpamDriver.GetDefaultAddressSpaces`.
    DefaultAddressSpaces,
    /// `IpamDriver.RequestPool`.
    RequestPool(RequestPool),
    /// `IpamDriver.ReleasePool`.
    ReleasePool(ReleasePool),
    /// `IpamDriver.RequestAddress`.
    RequestAddress(RequestAddress),
    /// `IpamDriver.ReleaseAddress`.
    ReleaseAddress(ReleaseAddress),
    /// `NetworkDriver.CreateNetwork`.
    CreateNetwork(CreateNetwork),
    /// `NetworkDriver.DeleteNetwork`.
    DeleteNetwork(NetworkRef),
    /// `NetworkDriver.CreateEndpoint`.
    CreateEndpoint(CreateEndpoint),
    /// `NetworkDriver.EndpointOperInfo`.
    EndpointInfo(EndpointRef),
    /// `NetworkDriver.Join`.
    Join(EndpointRef),
    /// `NetworkDriver.Leave`.
    Leave(EndpointRef),
    /// `NetworkDriver.DeleteEndpoint`.
    DeleteEndpoint(EndpointRef),
}

impl Call {
    /// Whether it gives something back. Such a call never fails.
    pub fn is_release(&self) -> bool {
        matches!(
            self,
            Self::ReleasePool(_)
                | Self::ReleaseAddress(_)
                | Self::DeleteNetwork(_)
                | Self::Leave(_)
                | Self::DeleteEndpoint(_)
        )
    }

    /// Whether it needs the rest of the daemon.
    pub fn needs_backend(&self) -> bool {
        !self.is_release() && !matches!(self, Self::DefaultAddressSpaces | Self::EndpointInfo(_))
    }
}

/// `IpamDriver.RequestPool`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct RequestPool {
    /// The address space, by the driver's own name.
    #[serde(deserialize_with = "nullable")]
    pub address_space: String,
    /// `--subnet`; empty if the user named none.
    #[serde(deserialize_with = "nullable")]
    pub pool: String,
    /// `--ip-range`.
    #[serde(deserialize_with = "nullable")]
    pub sub_pool: String,
    /// `--ipam-opt`.
    #[serde(deserialize_with = "nullable")]
    pub options: BTreeMap<String, String>,
    /// Whether an IPv6 range is asked for.
    #[serde(deserialize_with = "nullable")]
    pub v6: bool,
}

/// `IpamDriver.ReleasePool`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ReleasePool {
    /// As answered to `RequestPool`.
    #[serde(rename = "PoolID", deserialize_with = "nullable")]
    pub pool_id: String,
}

/// `IpamDriver.RequestAddress`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RequestAddress {
    /// As answered to `RequestPool`.
    #[serde(rename = "PoolID", deserialize_with = "nullable")]
    pub pool_id: String,
    /// The address wanted; empty for any.
    #[serde(rename = "Address", deserialize_with = "nullable")]
    pub address: String,
    /// Its purpose.
    #[serde(rename = "Options", deserialize_with = "nullable")]
    pub options: BTreeMap<String, String>,
}

/// `IpamDriver.ReleaseAddress`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ReleaseAddress {
    /// As answered to `RequestPool`.
    #[serde(rename = "PoolID", deserialize_with = "nullable")]
    pub pool_id: String,
    /// The address.
    #[serde(rename = "Address", deserialize_with = "nullable")]
    pub address: String,
}

/// `NetworkDriver.CreateNetwork`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct CreateNetwork {
    /// The engine's id of the network.
    #[serde(rename = "NetworkID", deserialize_with = "nullable")]
    pub network_id: String,
    /// The engine's options, and the user's under [`GENERIC`].
    #[serde(rename = "Options", deserialize_with = "nullable")]
    pub options: Options,
    /// IPv4 pools.
    #[serde(rename = "IPv4Data", deserialize_with = "nullable")]
    pub ipv4_data: Vec<IpamData>,
    /// IPv6 pools.
    #[serde(rename = "IPv6Data", deserialize_with = "nullable")]
    pub ipv6_data: Vec<IpamData>,
}

/// A pool of a network.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct IpamData {
    /// Which IPAM driver gave it: the name is that driver's.
    #[serde(deserialize_with = "nullable")]
    pub address_space: String,
    /// The range.
    #[serde(deserialize_with = "nullable")]
    pub pool: String,
}

/// A network.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NetworkRef {
    /// The engine's id of the network.
    #[serde(rename = "NetworkID", deserialize_with = "nullable")]
    pub network_id: String,
}

/// `NetworkDriver.CreateEndpoint`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct CreateEndpoint {
    /// The engine's id of the network.
    #[serde(rename = "NetworkID", deserialize_with = "nullable")]
    pub network_id: String,
    /// The engine's id of the endpoint.
    #[serde(rename = "EndpointID", deserialize_with = "nullable")]
    pub endpoint_id: String,
    /// The parts that the engine has chosen already.
    #[serde(rename = "Interface", deserialize_with = "nullable")]
    pub interface: Interface,
    /// The engine's options, and the user's `driver_opts`.
    #[serde(rename = "Options", deserialize_with = "nullable")]
    pub options: Options,
}

/// An endpoint of a network. `Join` has more fields, of which the plugin uses one.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct EndpointRef {
    /// The engine's id of the network.
    #[serde(rename = "NetworkID", deserialize_with = "nullable")]
    pub network_id: String,
    /// The engine's id of the endpoint.
    #[serde(rename = "EndpointID", deserialize_with = "nullable")]
    pub endpoint_id: String,
    /// In `Join` the path of the container's namespace, which may not exist yet. It tells containers apart.
    #[serde(rename = "SandboxKey", deserialize_with = "nullable")]
    pub sandbox_key: String,
}

/// Addresses of an endpoint. In an answer only fields that were empty in the request may be set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Interface {
    /// IPv4 address and length of the prefix.
    #[serde(rename = "Address", deserialize_with = "nullable")]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub address: String,
    /// IPv6 address and length of the prefix.
    #[serde(rename = "AddressIPv6", deserialize_with = "nullable")]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub address_ipv6: String,
    /// Ethernet address.
    #[serde(rename = "MacAddress", deserialize_with = "nullable")]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mac_address: String,
}

/// The key of the user's `-o` options in the options of a network.
pub(super) const GENERIC: &str = "com.docker.network.generic";

/// An answer that reports success.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Answer {
    /// Nothing to say.
    Done {},
    /// To `GetDefaultAddressSpaces`.
    #[serde(rename_all = "PascalCase")]
    AddressSpaces {
        /// Of networks with scope `local`.
        local_default_address_space: &'static str,
        /// Of networks with scope `global`.
        global_default_address_space: &'static str,
    },
    /// To `RequestPool`.
    Pool {
        /// Stable: the same request has the same id.
        #[serde(rename = "PoolID")]
        pool_id: String,
        /// The range.
        #[serde(rename = "Pool")]
        pool: String,
        /// The gateway, if the network has one.
        #[serde(rename = "Data")]
        data: BTreeMap<&'static str, String>,
    },
    /// To `RequestAddress`.
    #[serde(rename_all = "PascalCase")]
    Address {
        /// Address and length of the prefix.
        address: String,
    },
    /// To `CreateEndpoint`.
    #[serde(rename_all = "PascalCase")]
    Endpoint {
        /// Fields that the request left empty.
        interface: Interface,
    },
    /// To `Join`.
    #[serde(rename_all = "PascalCase")]
    Joined {
        /// The link to be moved into the container.
        interface_name: InterfaceName,
        /// Ranges of the network beyond the endpoint's own.
        static_routes: Vec<StaticRoute>,
    },
    /// To `EndpointOperInfo`.
    #[serde(rename_all = "PascalCase")]
    Info {
        /// Shown by `docker network inspect`.
        value: BTreeMap<String, String>,
    },
}

/// The link that the engine moves into the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct InterfaceName {
    /// The link's name in the engine's network namespace.
    pub src_name: String,
    /// The name inside is this and the lowest free number.
    pub dst_prefix: &'static str,
}

/// A route inside the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct StaticRoute {
    /// The range.
    pub destination: String,
    /// [`ON_LINK`].
    pub route_type: u8,
    /// Empty for a route on the link.
    pub next_hop: &'static str,
}

/// The type of a route without a next hop.
pub(super) const ON_LINK: u8 = 1;

/// Reads `null` as the default.
fn nullable<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}
