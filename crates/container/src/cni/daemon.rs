//! Questions that the plugin asks the daemon, and the answers.

use std::{fmt, net::IpAddr, path::PathBuf};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use weft_packet::ethernet::Mac;

use super::{
    address::RequestedAddress,
    environment::Owner,
    result::{Dns, Route, null_is_default},
};

/// The key of an attachment: a container may be on a network more than once, by different interfaces.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The name of the configuration.
    pub network: String,
    /// The container's id.
    pub container: String,
    /// The interface in the container.
    pub interface: String,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of container {} on network {}", self.interface, self.container, self.network)
    }
}

/// The attachments that a DEL is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Target {
    /// The name of the configuration; `None` stands for all, since a DEL may come without.
    #[serde(default)]
    pub network: Option<String>,
    /// The container's id.
    pub container: String,
    /// The interface in the container.
    pub interface: String,
}

impl Target {
    /// Whether the DEL is about this attachment.
    #[must_use]
    pub fn covers(&self, key: &Key) -> bool {
        self.container == key.container
            && self.interface == key.interface
            && self.network.as_ref().is_none_or(|network| *network == key.network)
    }
}

impl From<Key> for Target {
    fn from(key: Key) -> Self {
        Self { network: Some(key.network), container: key.container, interface: key.interface }
    }
}

/// A network namespace as the plugin sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceFile {
    /// Its path.
    pub path: PathBuf,
    /// Device of the file.
    pub device: u64,
    /// Inode of the file.
    pub inode: u64,
}

/// Asks for an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// The new attachment. If it exists by an earlier ADD that did not finish, it gets the same
    /// addresses again.
    pub key: Key,
    /// When the plugin started, in nanoseconds after the machine's start. An ADD that started before
    /// a DEL of the same attachment must not come after it: see [`super::Deletions`].
    pub started_ns: u64,
    /// The container's namespace.
    pub namespace: NamespaceFile,
    /// The wishes of user and runtime.
    pub wishes: Wishes,
}

/// The wishes for an attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wishes {
    /// Weft's network.
    pub network: String,
    /// Addresses asked for; a family without any gets one of the network's.
    pub addresses: Vec<RequestedAddress>,
    /// The Ethernet address asked for.
    pub mac: Option<Mac>,
    /// Make the network's gateway the container's default route.
    pub default_route: bool,
    /// Translate the container's addresses where its packets leave the network through this host.
    pub masquerade: bool,
    /// The container may send from other Ethernet and IP addresses than its own.
    pub allow_macs: bool,
    /// The pod or container as its users know it.
    pub owner: Owner,
    /// Further names of the container.
    pub aliases: Vec<String>,
    /// Labels.
    pub labels: Vec<(String, String)>,
    /// Ports to publish on the host, if the configuration gives Weft this capability.
    pub port_mappings: Vec<PortMapping>,
}

/// A published port.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortMapping {
    /// The port on the host.
    pub host_port: u16,
    /// The port in the container.
    pub container_port: u16,
    /// `tcp`, `udp` or `sctp`, in small letters.
    #[serde(default, deserialize_with = "null_is_default")]
    pub protocol: String,
    /// The host's address; empty for all.
    #[serde(default, rename = "hostIP", deserialize_with = "null_is_default")]
    pub host_ip: String,
}

/// A finished attachment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Attached {
    /// Name and Ethernet address of the interface's end on the host; `None` for a direct port.
    pub host_interface: Option<(String, Mac)>,
    /// Ethernet address of the container's interface.
    pub mac: Option<Mac>,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its addresses with their network's prefix length.
    pub addresses: Vec<IpNet>,
    /// Gateways, at most one for each family.
    pub gateways: Vec<IpAddr>,
    /// Routes made in the container.
    pub routes: Vec<Route>,
    /// The network's name servers.
    pub dns: Dns,
}

/// Asks to end attachments. It succeeds for unknown ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detach {
    /// The attachments.
    pub target: Target,
    /// When the plugin started, in nanoseconds after the machine's start. Attachments made by an ADD
    /// that started later remain.
    pub started_ns: u64,
}

/// The state of an attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// Whether its interface is in the container's namespace, up and plugged in.
    pub interface_is_whole: bool,
    /// The addresses that Weft gave, and whether each is still there.
    pub addresses: Vec<(IpNet, bool)>,
}

/// An attachment that the daemon has for a CNI runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Its key.
    pub key: Key,
    /// [`Attach::started_ns`] of the ADD that made it.
    pub started_ns: u64,
}

/// Whether an ADD would succeed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Readiness {
    /// It would.
    Ready,
    /// It would fail, with the reason.
    Unready(String),
    /// It would fail, and running containers are cut off.
    CutOff(String),
}

/// Why the daemon did not do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DaemonError {
    /// It cannot be reached: it did not get the question.
    #[error("the daemon cannot be reached: {0}; start it with weft launch")]
    Unreachable(String),
    /// The connection ended before the answer: it may or may not have done it.
    #[error("the daemon gave no answer: {0}")]
    Interrupted(String),
    /// It refused, and changed nothing.
    #[error("{1}")]
    Refused(Refusal, String),
}

/// Why the daemon refuses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// Not now; the reason passes.
    Busy,
    /// The network does not exist, or a request does not fit it.
    Invalid,
    /// A field of the configuration that it does not support, with the value.
    Unsupported {
        /// The field.
        field: String,
        /// Its value.
        value: String,
    },
    /// The namespace or the attachment does not exist.
    Unknown,
    /// The container has an interface of that name.
    InterfaceExists,
    /// The address is in use, or none is free.
    NoAddress,
    /// A DEL of this attachment came after this ADD had started.
    Deleted,
    /// Anything else.
    Internal,
}

/// The daemon, as the plugin needs it. The plugin limits the time of every call.
pub trait Daemon: Sync {
    /// Attaches a container, wholly or not at all.
    fn attach(&self, attach: &Attach)
    -> impl Future<Output = Result<Attached, DaemonError>> + Send;

    /// Ends attachments.
    fn detach(&self, detach: &Detach) -> impl Future<Output = Result<(), DaemonError>> + Send;

    /// Looks whether an attachment is whole.
    fn check(&self, key: &Key) -> impl Future<Output = Result<Checked, DaemonError>> + Send;

    /// Lists the attachments made by CNI runtimes.
    fn attachments(&self) -> impl Future<Output = Result<Vec<Listed>, DaemonError>> + Send;

    /// Says whether attaches to a network succeed now.
    fn status(&self, network: &str) -> impl Future<Output = Result<Readiness, DaemonError>> + Send;
}
