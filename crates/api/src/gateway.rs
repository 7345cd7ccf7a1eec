//! Requests and answers about the OpenVPN gateway.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::listen::{Listen, Protocol};
use crate::login::{Auth, LoginSettings};
use crate::rate::Rate;
use crate::tools::ToolSettings;

/// The certificate authority of a gateway's clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// Its name, which certificates show as their issuer.
    pub name: String,
    /// SHA-256 of its certificate, in hexadecimal digits.
    pub fingerprint: String,
    /// When its certificate ends, RFC 3339.
    pub not_after: String,
    /// Certificates of clients that are good now.
    pub clients: usize,
    /// Certificates of clients that were revoked.
    pub revoked: usize,
    /// The host that alone issues and revokes, where that is another one.
    #[serde(default)]
    pub home: Option<String>,
}

/// Moves the certificate authority to another host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRequest {
    /// The host's name, or its peer id.
    pub host: String,
}

/// Makes a host the home of an authority whose home is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreRequest {
    /// The content of a backup of `openvpn-authority.json`, which holds the private key.
    pub authority: crate::Password,
}

/// Which host has the authority that a gateway serves with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorityHome {
    /// The host's name.
    pub name: String,
    /// SHA-256 of the authority's certificate, in hexadecimal digits.
    pub fingerprint: String,
    /// It is this host.
    pub is_here: bool,
    /// It is this host, or linked with it.
    pub is_linked: bool,
    /// Until when this host knows all that the authority has done, RFC 3339.
    pub as_of: String,
}

/// A gateway on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherGateway {
    /// The host's name.
    pub name: String,
    /// Its peer id.
    pub peer: String,
    /// `serving`, `waiting` (it is to serve, and does not now) or `away` (it is not linked with this host).
    pub state: String,
    /// The network that its clients join.
    pub network: String,
    /// What profiles name it by.
    pub remotes: Vec<String>,
}

/// How gateways agree on clients' addresses until there is a consensus: the word of the host holds where a client first
/// connected.
pub const ADDRESSES_FIRST_HOST: &str = "first-host";

/// Serve OpenVPN clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServeRequest {
    /// Where to listen; none: UDP port 1194 of all addresses.
    pub listen: Vec<Listen>,
    /// The network that clients join; `None`: `weft`.
    pub network: Option<String>,
    /// What profiles name this host by: HOST or HOST:PORT, with `udp:` or `tcp:` before it; none: the address that other
    /// hosts use. Without protocol: by all that are listened on.
    pub remotes: Vec<String>,
    /// Seconds without a packet after which either end sends a ping; `None`: 10.
    pub ping_s: Option<u32>,
    /// Seconds without a packet after which a client connects again; the host waits twice as long. `None`: 60.
    pub ping_restart_s: Option<u32>,
    /// What is to move clients' packets.
    pub engine: ServeEngine,
    /// How clients show who they are.
    pub login: LoginSettings,
    /// All that clients send goes through this host: to its network, and to all else that it reaches, by the host's
    /// own address.
    pub redirect_gateway: bool,
    /// The most that comes from each address of a client; `None`: no limit.
    pub client_up: Option<Rate>,
    /// The most that goes to each address of a client; `None`: no limit.
    pub client_down: Option<Rate>,
    /// Options that all clients are pushed, such as `route 192.0.2.0 255.255.255.0`.
    pub pushes: Vec<String>,
    /// What programs of other projects watch it by.
    pub tools: ToolSettings,
}

/// What is to move the packets of OpenVPN clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServeEngine {
    /// The kernel's `ovpn` device where there is one, else Weft's own.
    #[default]
    Auto,
    /// The kernel's alone.
    Kernel,
    /// Weft's own alone.
    Userspace,
}

/// The gateway of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateway {
    /// `serving`, `waiting` (see `reason`) or `off`.
    pub state: String,
    /// Why it does not serve.
    pub reason: Option<String>,
    /// Where it listens.
    pub listen: Vec<Listen>,
    /// The network that clients join.
    pub network: String,
    /// This host's own addresses on it.
    pub addresses: Vec<IpNet>,
    /// What moves clients' packets: `kernel` or `userspace`.
    pub engine: String,
    /// Why the kernel does not move them, where it was to be tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine_reason: Option<String>,
    /// What clients show.
    #[serde(default)]
    pub auth: Auth,
    /// The status file that it writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status_file: Option<PathBuf>,
    /// Where its management interface listens: a path, or `ADDRESS:PORT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub management: Option<String>,
    /// The families in which clients reach all that this host reaches: `ipv4`, `ipv6`.
    #[serde(default)]
    pub way_out: Vec<String>,
    /// The most that comes from each address of a client, in bits a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_up: Option<Rate>,
    /// The most that goes to each address of a client, in bits a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_down: Option<Rate>,
    /// Clients that are connected.
    pub clients: usize,
    /// Sessions, with those of clients that have not shown who they are.
    #[serde(default)]
    pub sessions: usize,
    /// Packets dropped, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Which host has the authority.
    #[serde(default)]
    pub authority: Option<AuthorityHome>,
    /// The gateways on other hosts that this one knows.
    #[serde(default)]
    pub gateways: Vec<OtherGateway>,
    /// How gateways agree on clients' addresses: [`ADDRESSES_FIRST_HOST`].
    #[serde(default)]
    pub addresses_agreed_by: Option<String>,
}

/// A connected client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VpnClient {
    /// The name by which it is known: that of its certificate, or of its user.
    pub name: String,
    /// The user name, if it has shown one.
    #[serde(default)]
    pub user: Option<String>,
    /// Its name in DNS, below the domain; `None`: DNS cannot have it.
    #[serde(default)]
    pub dns_name: Option<String>,
    /// Its addresses on the network.
    pub addresses: Vec<IpAddr>,
    /// Where its packets come from.
    pub real_address: SocketAddr,
    /// What carries its packets: `udp` or `tcp`.
    #[serde(default)]
    pub protocol: Protocol,
    /// The cipher of its packets.
    pub cipher: String,
    /// What moves its packets: `kernel` or `userspace`.
    pub engine: String,
    /// Bytes of IP packets from it.
    pub bytes_in: u64,
    /// Bytes of IP packets to it.
    pub bytes_out: u64,
    /// When it connected, RFC 3339.
    pub since: String,
    /// When its newest key was agreed on, RFC 3339.
    pub last_handshake: String,
    /// The version that it gives, such as `2.6.14`.
    pub version: Option<String>,
    /// The platform that it gives, such as `linux`.
    pub platform: Option<String>,
}

/// Names a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRequest {
    /// The name in its certificate.
    pub name: String,
}

/// A profile for a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientProfile {
    /// The name in its certificate.
    pub name: String,
    /// The certificate's serial number, in hexadecimal digits.
    pub serial: String,
    /// When the certificate ends, RFC 3339.
    pub not_after: String,
    /// The profile, with the client's private key.
    pub profile: String,
}

/// Certificates that are no longer good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoked {
    /// The client's name.
    pub name: String,
    /// Serial numbers of its certificates.
    pub serials: Vec<String>,
    /// Whether it was connected.
    pub was_connected: bool,
}
