//! Request and answer types of the API. Third-party scripts rely on these names: fields are added, never
//! renamed.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::gateway::Gateway;

/// `weft status`: the host at a glance.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Weft's version.
    pub version: String,
    /// Oldest and newest protocol version that this host speaks.
    pub protocol: [u16; 2],
    /// This host's peer id, 64 hexadecimal digits.
    pub peer: String,
    /// Its nickname.
    pub nickname: String,
    /// The UDP port of links.
    pub port: u16,
    /// The UDP port of the vector engine.
    pub data_port: u16,
    /// When the daemon started, RFC 3339.
    pub since: String,
    /// How other hosts are admitted: `password` or `token`.
    pub admission: String,
    /// Whether all traffic to other hosts is sealed; false if there are trusted subnets.
    pub encrypted: bool,
    /// Networks of hosts that may get unencrypted packets, if those hosts say the same.
    #[serde(default)]
    pub trusted_subnets: Vec<IpNet>,
    /// MTU of containers attached from now on, bytes.
    pub mtu: u16,
    /// Paths in use that carry less than that, and the effect on longer packets.
    #[serde(default)]
    pub narrow: Vec<String>,
    /// The switch that local ports are plugged into.
    pub switch: String,
    /// Why it is not the requested switch.
    #[serde(default)]
    pub switch_reason: Option<String>,
    /// The port of containers that are attached now: `bridge` or `direct`.
    #[serde(default = "port_of_the_switch")]
    pub ports: String,
    /// Why containers get no direct ports.
    #[serde(default)]
    pub ports_reason: Option<String>,
    /// Foreign rules and limits that do not see frames of direct ports, one a line.
    #[serde(default)]
    pub passed_by: Vec<String>,
    /// Containers whose frames to hosts on the vector engine bypass the bridge.
    #[serde(default)]
    pub shortcuts: usize,
    /// Why other containers have no shortcut, or none is possible.
    #[serde(default)]
    pub shortcuts_reason: Option<String>,
    /// The engines this host runs, the preferred first.
    pub engines: Vec<String>,
    /// Engines that it does not run, or not in their first format, with the reasons.
    #[serde(default)]
    pub engines_missing: BTreeMap<String, String>,
    /// Rules of this host's own firewall that block or change Weft's traffic.
    #[serde(default)]
    pub firewall: Vec<FirewallRule>,
    /// Workers of the vector engine.
    #[serde(default)]
    pub workers: usize,
    /// Offloads by name, and whether the start-up self-test found them working.
    pub offloads: BTreeMap<String, bool>,
    /// Sandboxing of the daemon (`capabilities`, `landlock`, `seccomp`): `on`, or `off: ` and the reason.
    #[serde(default)]
    pub hardening: BTreeMap<String, String>,
    /// Number of targets.
    pub targets: usize,
    /// Number of connections by state.
    pub connections: BTreeMap<String, usize>,
    /// Number of known peers, excluding this host.
    pub peers: usize,
    /// Number of attached containers.
    pub attachments: usize,
    /// Address ranges.
    pub ipam: Ipam,
    /// How programs of this host itself resolve names of containers, or why they do not; only where DNS is answered.
    #[serde(default)]
    pub host_dns: Option<String>,
    /// Docker's engine on this host; only where it is of concern to Weft.
    #[serde(default)]
    pub docker: Option<DockerStatus>,
    /// Problems on this host while Weft runs, each with a remedy.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// The port lock, which keeps containers from sending under the addresses of others.
    #[serde(default)]
    pub port_lock: PortLockStatus,
    /// The OpenVPN gateway; only where this host is to serve clients.
    #[serde(default)]
    pub gateway: Option<Gateway>,
    /// The services beside the core, with their health.
    #[serde(default)]
    pub services: Vec<ServiceStatus>,
    /// How long the loops of the core and of the gateway held their threads, by name.
    #[serde(default)]
    pub loops: BTreeMap<String, LoopStatus>,
    /// Whether attached containers can reach the other hosts now; if not, `reason` says why.
    pub ready: bool,
    /// Why it is not ready.
    pub reason: Option<String>,
}

/// A loop of the daemon since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoopStatus {
    /// Turns that took more than 10 ms, in which all else waited.
    pub late: u64,
    /// The longest turn, in microseconds.
    pub longest_us: u64,
}

/// Docker's engine on this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DockerStatus {
    /// `followed` or `not followed`: whether Weft learns at once of containers that start or are renamed.
    pub events: String,
    /// Why events are not followed.
    #[serde(default)]
    pub reason: Option<String>,
    /// In this state since, RFC 3339.
    pub since: String,
}

/// The port lock of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortLockStatus {
    /// Whether it stands.
    pub on: bool,
    /// Why it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Frames of containers that it has dropped, by reason: `mac`, `vlan`, `arp`, `ip`, `nd`, `router`, `dhcp`.
    #[serde(default)]
    pub dropped: BTreeMap<String, u64>,
    /// Containers that sent such frames in the last minute.
    #[serde(default)]
    pub containers: Vec<String>,
}

/// A service of the daemon beside the core.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// Its name.
    pub name: String,
    /// `running`, `restarting` after a failure, or `hangs` if it cannot be ended.
    pub state: String,
    /// The last failure, if any.
    pub reason: Option<String>,
    /// In this state since, RFC 3339.
    pub since: String,
    /// How often it was restarted.
    pub restarts: u64,
}

/// One line of `weft status connections`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Peer id, 64 hexadecimal digits, once known.
    pub peer: Option<String>,
    /// The peer's nickname, once known.
    pub nickname: Option<String>,
    /// The remote address of the link.
    pub address: String,
    /// `outbound` or `inbound`.
    pub direction: String,
    /// `connecting`, `pending`, `retrying`, `failed` (the link), then `probing`, `active`, `failed` (the path).
    pub state: String,
    /// Wire format.
    pub format: Option<String>,
    /// Engine at this end.
    pub engine: Option<String>,
    /// Engine at the other end.
    #[serde(default)]
    pub remote_engine: Option<String>,
    /// How packets of format `esp` travel: `raw` or `udp`.
    #[serde(default)]
    pub encapsulation: Option<String>,
    /// Switch at this end.
    pub switch: Option<String>,
    /// AEAD.
    pub cipher: Option<String>,
    /// Whether the path is encrypted.
    pub encrypted: Option<bool>,
    /// The path's inner MTU, bytes.
    pub mtu: Option<u16>,
    /// Smoothed round-trip time of probes, microseconds.
    pub rtt_us: Option<u64>,
    /// In this state since, RFC 3339.
    pub since: String,
    /// Why it is in this state, if that is not the best one.
    pub reason: Option<String>,
}

/// One line of `weft status paths`: a path to a peer, in use or not, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Path {
    /// Peer id, 64 hexadecimal digits.
    pub peer: String,
    /// The peer's nickname, once known.
    pub nickname: Option<String>,
    /// Wire format.
    pub format: Option<String>,
    /// Engine at this end.
    pub engine: Option<String>,
    /// Engine at the other end.
    pub remote_engine: Option<String>,
    /// How packets of format `esp` travel: `raw` or `udp`.
    pub encapsulation: Option<String>,
    /// `probing`, `standby`, `active` or `failed`.
    pub state: String,
    /// Why it is not in use.
    pub reason: Option<String>,
    /// In this state since, RFC 3339.
    pub since: String,
    /// When a failed path is retried, RFC 3339.
    pub next_try: Option<String>,
    /// AEAD.
    pub cipher: Option<String>,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// Its inner MTU, bytes.
    pub mtu: Option<u16>,
    /// Smoothed round-trip time of probes, microseconds.
    pub rtt_us: Option<u64>,
    /// The destination of its packets.
    pub remote: Option<String>,
    /// How often the peer has taken a new SA in place of an older one.
    pub rekeys: u64,
}

/// One host of `weft status peers`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Peer {
    /// Peer id, 64 hexadecimal digits.
    pub peer: String,
    /// Its nickname.
    pub nickname: String,
    /// Whether it is this host.
    pub local: bool,
    /// Whether this host has a link to it now.
    pub linked: bool,
    /// Addresses at which it was seen.
    pub addresses: Vec<String>,
    /// Its links, as far as this host knows them.
    pub connections: Vec<PeerConnection>,
}

/// One link of a peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeerConnection {
    /// The other end's peer id.
    pub peer: String,
    /// The other end's nickname.
    pub nickname: String,
    /// The other end's address.
    pub address: Option<String>,
    /// `outbound` or `inbound`.
    pub direction: Option<String>,
    /// State, as in [`Connection::state`].
    pub state: String,
}

/// An address that this host dials.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// As the user gave it: `host[:port][#keyhash]`.
    pub address: String,
}

/// `weft status ipam`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ipam {
    /// `ready`, or `waiting`.
    pub state: String,
    /// The reason for waiting.
    pub reason: Option<String>,
    /// The range from which containers get IPv4 addresses.
    pub range: String,
    /// The prefix of their IPv6 addresses.
    pub range6: Option<String>,
    /// The owners of the range.
    pub hosts: Vec<HostRange>,
}

/// One host's share of the address range.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostRange {
    /// Peer id.
    pub peer: String,
    /// Nickname.
    pub nickname: String,
    /// Number of addresses owned.
    pub addresses: u64,
    /// Share of the whole range in per cent.
    pub percent: f64,
    /// Addresses in use; known for this host only.
    pub used: Option<u64>,
    /// Whether this host has a link to it (itself: true).
    pub reachable: bool,
}

/// One attached container (`weft ps`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Stable key, such as `netns:web` or `docker:<id>`.
    pub id: String,
    /// The container's name as the user knows it.
    pub name: String,
    /// Further names that DNS knows it by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The interface inside the container.
    pub interface: String,
    /// Its Ethernet address.
    pub mac: String,
    /// Its addresses with prefix length.
    pub addresses: Vec<IpNet>,
    /// Where its default routes lead, at most one address of each family; none: Weft made no such route.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateways: Vec<IpAddr>,
    /// Of the host itself: it translates the addresses of containers that leave the network through it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub masquerade: bool,
    /// It may send from other Ethernet and IP addresses than its own (`--allow-macs`).
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_macs: bool,
    /// Its MTU, bytes.
    pub mtu: u16,
    /// How it is attached: `bridge`, by the switch alone, or `direct`.
    #[serde(default = "port_of_the_switch")]
    pub port: String,
    /// Why it is not attached by a direct port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_reason: Option<String>,
    /// Its network.
    #[serde(default = "default_network")]
    pub network: String,
    /// That network's VXLAN network identifier.
    #[serde(default = "default_vni")]
    pub vni: u32,
    /// The maker of the attachment: `attach` (the command), `cni`, `docker` or `expose` (the host itself).
    #[serde(default = "made_by_command")]
    pub made_by: String,
    /// Attached since, RFC 3339.
    pub since: String,
    /// `attached`; `failed`: the container runs but could not be attached, and Weft retries; `gone`: the container
    /// has ended, and Weft keeps its addresses for a while.
    #[serde(default = "attached")]
    pub state: String,
    /// Why it is not attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Not attached since, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_since: Option<String>,
    /// Unexpected conditions of the interface, each with a remedy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

fn is_false(value: &bool) -> bool {
    !value
}

fn attached() -> String {
    "attached".into()
}

fn default_network() -> String {
    "weft".into()
}

fn default_vni() -> u32 {
    1
}

fn made_by_command() -> String {
    "attach".into()
}

/// A rule of a host's own firewall that blocks or changes Weft's traffic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirewallRule {
    /// The base chain: `FAMILY TABLE CHAIN`.
    pub chain: String,
    /// The rule's effect on the traffic.
    pub effect: String,
    /// The command that fixes it.
    pub remedy: String,
}

/// The port kind of older daemons, which had no other.
fn port_of_the_switch() -> String {
    "bridge".into()
}

/// The whole state for a bug report; holds no secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// `weft status`.
    pub status: Status,
    /// `weft status connections`.
    pub connections: Vec<Connection>,
    /// `weft status paths`.
    #[serde(default)]
    pub paths: Vec<Path>,
    /// `weft status peers`.
    pub peers: Vec<Peer>,
    /// `weft status targets`.
    pub targets: Vec<Target>,
    /// `weft ps`.
    pub attachments: Vec<Attachment>,
    /// Every counter of the vector engine by name.
    pub counters: BTreeMap<String, u64>,
    /// Every counter of the kernel engine by name; drops by the guard begin with `guard_`. `guard_age_ms` is
    /// the age of these counts; `guard_restored` counts how often the guard was restored.
    #[serde(default)]
    pub kernel_counters: BTreeMap<String, u64>,
    /// Counters per peer id.
    pub peer_counters: BTreeMap<String, BTreeMap<String, u64>>,
    /// Counters per worker of the vector engine, in order. `busy_ms` is the processor time of its thread's
    /// work. `awake_ms` is the time it polled with nothing to do, and `helpers_busy_ms` its helpers' time.
    #[serde(default)]
    pub worker_counters: Vec<BTreeMap<String, u64>>,
}

/// Counters at one moment; `weft top` computes rates from two of them. They count up from 0 and restart with
/// their owner: the daemon, a peer, or a container's interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Milliseconds on the host's monotonic clock: only differences are meaningful.
    pub monotonic_ms: u64,
    /// By peer.
    pub peers: Vec<PeerTraffic>,
    /// By attached container.
    pub containers: Vec<ContainerTraffic>,
    /// By worker of the vector engine.
    pub workers: Vec<WorkerTraffic>,
    /// Dropped packets by reason; those of the kernel engine begin with `kernel_`.
    pub drops: BTreeMap<String, u64>,
}

/// Packets and bytes, both ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Packets received.
    pub packets_received: u64,
    /// Bytes received.
    pub bytes_received: u64,
    /// Packets sent.
    pub packets_sent: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
}

/// The traffic with one peer over both engines: datagrams, and the bytes of the Ethernet frames in them. On the
/// kernel engine the bytes are those that its SAs sealed and opened. A plain path has no counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerTraffic {
    /// Peer id, 64 hexadecimal digits.
    pub peer: String,
    /// The peer's nickname, once known.
    pub nickname: Option<String>,
    /// The engine at this end that carries frames now.
    pub engine: Option<String>,
    /// Received from the peer and sent to it.
    #[serde(flatten)]
    pub volume: Volume,
    /// Refused datagrams of the peer, and unsent packets to it.
    #[serde(default)]
    pub dropped: u64,
    /// The share of each lane of the vector engine.
    #[serde(default)]
    pub lanes: Vec<LaneTraffic>,
}

/// The traffic over one lane with a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneTraffic {
    /// The lane's number, from 0.
    pub lane: u16,
    /// Received from the peer and sent to it.
    #[serde(flatten)]
    pub volume: Volume,
}

/// Traffic of a container's interface, as the kernel counts it. A super-packet counts as one packet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerTraffic {
    /// The container's id in `weft ps`.
    pub id: String,
    /// Its name there.
    pub name: String,
    /// The interface's other end, on the host.
    pub host_interface: String,
    /// Received and sent by the container.
    #[serde(flatten)]
    pub volume: Volume,
    /// Packets that the kernel dropped at this interface, both ways.
    pub dropped: u64,
}

/// Activity of a worker of the vector engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerTraffic {
    /// Its number, from 0.
    pub worker: usize,
    /// Processor time of its thread's work, in microseconds.
    pub busy_us: u64,
    /// Processor time that its thread polled with nothing to do, in microseconds.
    #[serde(default)]
    pub awake_us: u64,
    /// Processor time of its helpers' threads, in microseconds.
    pub helpers_busy_us: u64,
    /// Datagrams received from peers.
    pub datagrams_received: u64,
    /// Datagrams sent to peers.
    pub datagrams_sent: u64,
    /// Frames and super-packets read from the switch.
    pub tap_reads: u64,
    /// Frames and super-packets written to the switch.
    pub tap_writes: u64,
    /// Packets dropped for any reason.
    pub dropped: u64,
}

/// Body of `POST /v1/attach`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// The container: see `weft attach --help`.
    pub container: String,
    /// Explicit addresses; empty: allocate.
    #[serde(default)]
    pub addresses: Vec<IpNet>,
    /// A name to show instead of the container's own.
    #[serde(default)]
    pub name: Option<String>,
    /// Leave out the multicast routes.
    #[serde(default)]
    pub no_multicast_route: bool,
    /// Enable IPv6 on the interface where the container has it disabled.
    #[serde(default)]
    pub ipv6: bool,
    /// Make this host's address on the network the container's default route.
    #[serde(default)]
    pub default_route: bool,
    /// Let the container send from other Ethernet and IP addresses than its own.
    #[serde(default, skip_serializing_if = "is_false")]
    pub allow_macs: bool,
    /// The network; none: `weft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
}

/// Body of `POST /v1/detach`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetachRequest {
    /// The container, as for attach, or its id or name in `weft ps`.
    pub container: String,
    /// The network; none: the only one that the container is on, else `weft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
}

/// Answer to `POST /v1/detach`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Detached {
    /// The container's id.
    pub id: String,
    /// The addresses it had.
    pub addresses: Vec<IpNet>,
}

/// Body of `POST /v1/expose`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExposeRequest {
    /// Explicit addresses; empty: those that the host has, or the next free ones.
    #[serde(default)]
    pub addresses: Vec<IpNet>,
    /// The host's name in DNS; none: its nickname.
    #[serde(default)]
    pub name: Option<String>,
    /// Enable IPv6 on the interface where the host has it disabled.
    #[serde(default)]
    pub ipv6: bool,
    /// Whether containers leave the network with this host's address; none: as before, at first not.
    #[serde(default)]
    pub masquerade: Option<bool>,
    /// The network; none: `weft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
}

/// Body of `POST /v1/hide`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HideRequest {
    /// The addresses to take back; empty: all.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// The network; none: `weft`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
}

/// Answer to `POST /v1/hide`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hidden {
    /// The addresses that the host had until now.
    pub addresses: Vec<IpNet>,
}

/// Body of `POST /v1/connect`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectRequest {
    /// Targets to add.
    pub targets: Vec<String>,
    /// Forget every other target.
    #[serde(default)]
    pub replace: bool,
}

/// Body of `POST /v1/forget`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForgetRequest {
    /// Targets to stop dialling.
    pub targets: Vec<String>,
}

/// Body of `POST /v1/dns/lookup`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DnsLookupRequest {
    /// A name, absolute or below the domain, or an address.
    pub name: String,
    /// The network of the container that would ask; none: the host itself.
    #[serde(default)]
    pub network: Option<String>,
}

/// One address of a name: a line of `weft dns-lookup`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsRecord {
    /// The full name.
    pub name: String,
    /// The network on which it is visible; empty where the name itself says it.
    pub network: String,
    /// The address.
    pub address: IpAddr,
    /// The host that announces it, 64 hexadecimal digits.
    pub peer: String,
    /// That host's nickname, once known.
    pub nickname: Option<String>,
    /// Whether it is this host.
    pub local: bool,
    /// `container`, `client` of an OpenVPN gateway, or `added` by hand.
    pub source: String,
}

/// Body of `POST /v1/dns/add`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DnsAddRequest {
    /// The name, below the domain or absolute.
    pub name: String,
    /// The network on which it is visible; none: `weft`.
    #[serde(default)]
    pub network: Option<String>,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Services there, for SRV records: `SERVICE/PROTOCOL:PORT`.
    #[serde(default)]
    pub ports: Vec<String>,
}

/// Body of `POST /v1/dns/remove`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DnsRemoveRequest {
    /// The name.
    pub name: String,
    /// Its network; none: `weft`.
    #[serde(default)]
    pub network: Option<String>,
    /// Only these addresses; empty: all.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
}

/// A name that was given by hand on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsName {
    /// The name, below the network.
    pub name: String,
    /// The network on which it is visible.
    pub network: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Services there.
    #[serde(default)]
    pub ports: Vec<String>,
}

/// Body of `POST /v1/workers`.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkersRequest {
    /// The number of workers that the vector engine gets.
    pub workers: usize,
}

/// `weft workers`: the threads of the vector engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workers {
    /// Current number of workers.
    pub workers: usize,
    /// Largest number of workers.
    pub workers_max: usize,
    /// Default number of workers: half of the processors, 1 to 8, but two of two or three.
    pub workers_default: usize,
    /// Lanes offered to each peer: the highest number of workers since the start.
    pub lanes: usize,
}

/// The instructions for another host to join: the answer to `POST /v1/token`, and the output of `weft launch`.
#[derive(Clone, Serialize, Deserialize)]
pub struct Invitation {
    /// The command to run on the other host.
    pub join: String,
    /// A one-time token, if hosts are admitted by token. Transmit it separately from the command.
    pub token: Option<String>,
    /// Lifetime of the token in seconds.
    pub token_lifetime_s: Option<u64>,
    /// A warning if this host's link is narrower than Weft needs, with the effect.
    #[serde(default)]
    pub narrow_link: Option<String>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_older_daemon_is_told_of_no_network_and_its_attachments_are_on_weft() {
        let request = AttachRequest { container: "web".into(), ..AttachRequest::default() };
        assert!(!serde_json::to_string(&request).unwrap().contains("network"));
        let on_shop = AttachRequest { network: Some("shop".into()), ..request };
        assert!(serde_json::to_string(&on_shop).unwrap().contains(r#""network":"shop""#));
        let text = r#"{"id":"netns:x","name":"x","interface":"weft0","mac":"02:00:00:00:00:07",
            "addresses":[],"mtu":1388,"since":""}"#;
        let attachment: Attachment = serde_json::from_str(text).unwrap();
        assert_eq!((attachment.network.as_str(), attachment.vni), ("weft", 1));
    }
}
