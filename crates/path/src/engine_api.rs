//! The engine API: commands from path choice to an engine, and events from an engine.
//!
//! An engine knows peers only as [`PeerId`]s that name a slot in its tables; names, passwords and
//! certificates never come down here.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_crypto::{Cipher, PeerId, SaKey};
use weft_packet::ethernet::Mac;
use weft_packet::vxlan::Vni;

/// Names one path on this host; never used twice in the life of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u32);

/// The engine that moves the packets of a path at this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The kernel: a VXLAN device over XFRM, or over the `ovpn` device.
    Kernel,
    /// The vector engine.
    Userspace,
}

impl EngineKind {
    /// The value in the CLI and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Userspace => "userspace",
        }
    }
}

/// How the packets of format `esp` travel between two hosts (`docs/design/esp.md`).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Encapsulation {
    /// As IP protocol 50; between two kernel engines alone.
    Raw,
    /// In UDP (RFC 3948).
    #[default]
    Udp,
}

impl Encapsulation {
    /// The value in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Udp => "udp",
        }
    }
}

/// A container's (or the host's) place in a network: where frames for `mac` go.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Endpoint {
    /// The Ethernet address of the port inside the container.
    pub mac: Mac,
    /// Its addresses, IPv4 and IPv6; may be empty.
    pub addresses: Vec<IpAddr>,
}

/// An SA this host receives on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboundSa {
    /// Chosen by this host; unique among all its inbound SAs; at least 256 (RFC 4303 section 2.1). In format
    /// `ovpn` it is the first word of a packet: DATA_V2, a key id and a peer id. The SAs of one path and lane
    /// share a peer id that no other path has. The SPI may recur once its SA is removed.
    pub spi: u32,
    /// The lane it belongs to, from 0.
    pub lane: u16,
    /// The AEAD.
    pub cipher: Cipher,
    /// Key and salt.
    pub key: SaKey,
    /// How its packets arrive; the vector engine takes UDP alone.
    pub encapsulation: Encapsulation,
    /// The engine that the peer sends with.
    pub remote_engine: EngineKind,
    /// Path choice removes the SA before this age. An engine that outlives the daemon removes it itself. In the
    /// kernel's `ovpn` device, it ends with the sockets kept for the daemon.
    pub lifetime: Duration,
}

/// An SA this host sends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboundSa {
    /// Chosen by the receiving peer.
    pub spi: u32,
    /// The lane it belongs to, from 0.
    pub lane: u16,
    /// The AEAD.
    pub cipher: Cipher,
    /// Key and salt.
    pub key: SaKey,
    /// The peer takes remote checksum offload marks: an inner checksum may stay partial.
    pub rco: bool,
    /// Mixed into the IV, so that it does not reveal the sequence number (as Linux does).
    pub iv_salt: u64,
    /// Packets after which to ask for a new SA ([`EngineEvent::OutboundNearLimit`])...
    pub packets_soft: u64,
    /// ... and after which to send nothing on it.
    pub packets_hard: u64,
    /// Likewise for bytes sealed.
    pub bytes_soft: u64,
    /// Hard limit of bytes sealed.
    pub bytes_hard: u64,
    /// How its packets travel; the vector engine takes UDP alone.
    pub encapsulation: Encapsulation,
    /// The engine that the peer receives with.
    pub remote_engine: EngineKind,
    /// See [`InboundSa::lifetime`].
    pub lifetime: Duration,
}

/// A command from path choice (or, for endpoints, the mesh) to an engine. Carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineCommand {
    /// Receive on a new SA from now on, beside any older one of the same path.
    InstallInbound {
        /// The engine that carries it out.
        engine: EngineKind,
        /// The peer whose packets it opens.
        peer: PeerId,
        /// The path it belongs to.
        path: PathId,
        /// The SA.
        sa: InboundSa,
        /// The address that the peer's link comes from. A kernel's SA of format `esp` is bound to the pair of
        /// addresses; all others take packets from anywhere.
        remote: IpAddr,
    },
    /// Stop receiving on an SA.
    RemoveInbound {
        /// Its SPI.
        spi: u32,
    },
    /// Send on this SA from the next packet on; the earlier SA of the same path and lane is erased.
    InstallOutbound {
        /// The engine that carries it out.
        engine: EngineKind,
        /// The receiving peer.
        peer: PeerId,
        /// The path it belongs to.
        path: PathId,
        /// The SA.
        sa: OutboundSa,
        /// The destination: address and UDP port (which a raw SA does not use).
        remote: SocketAddr,
    },
    /// The path of format `plain` may carry frames to and from this trusted peer: the guard's exception.
    /// [`Self::RemoveOutbound`] revokes it. For the kernel engine only.
    InstallPlain {
        /// The trusted peer.
        peer: PeerId,
        /// The path.
        path: PathId,
        /// Its address.
        remote: IpAddr,
    },
    /// Erase the outbound SAs of a path.
    RemoveOutbound {
        /// The path.
        path: PathId,
    },
    /// Frames for `peer` take this path from now on; `None`: they are dropped and counted.
    BindPath {
        /// The peer.
        peer: PeerId,
        /// The path, which has an outbound SA.
        path: Option<PathId>,
    },
    /// The largest IP packet (inner MTU, bytes, without the Ethernet header) that the path carries.
    SetPathMtu {
        /// The path.
        path: PathId,
        /// Inner MTU in bytes.
        mtu: u16,
    },
    /// The peer's packets come from another address (NAT): send there. Not for a kernel's SA of format `esp`,
    /// which is bound to its addresses and gets replaced.
    SetRemote {
        /// The path.
        path: PathId,
        /// The new destination.
        remote: SocketAddr,
    },
    /// Send the peer's packets from this address of the host, the one it dialled from. The peer's firewall may
    /// expect them from there alone. `None`: the routing table chooses. The kernel engine only receives there;
    /// its own routes choose the source of its packets.
    SetSource {
        /// The peer.
        peer: PeerId,
        /// An address of this host.
        source: Option<IpAddr>,
    },
    /// Sets which host opens the lanes beyond the first: this host, from lane ports to the peer's data port, or
    /// the peer. The other one answers. Without the command, the host with the lower peer id opens. Earlier
    /// knowledge of the lanes is void. For the vector engine only.
    OpenLanes {
        /// The peer.
        peer: PeerId,
        /// This host does.
        opens: bool,
    },
    /// Send one probe on the path, bound or not.
    SendProbe {
        /// The path.
        path: PathId,
        /// Returned in the peer's [`EngineEvent::ProbeReceived`].
        probe: u64,
        /// Length of the probe's inner IP packet in bytes, padding included.
        mtu: u16,
        /// A candidate is probed on inner port 6788, the active path on 6787.
        candidate: bool,
    },
    /// Send the one-byte NAT keepalive 0xFF on the path (RFC 3948 section 2.3).
    SendKeepalive {
        /// The path.
        path: PathId,
    },
    /// The peers that hold the endpoints of a network; an entry for a MAC replaces the older one. Another network
    /// may hold the same MAC.
    SetEndpoints {
        /// The network. An engine that is not in it changes nothing, and says so.
        vni: Vni,
        /// Endpoints and the peers that hold them.
        add: Vec<(Endpoint, PeerId)>,
        /// Ethernet addresses that are gone.
        remove: Vec<Mac>,
    },
    /// The peers that get the broadcast and multicast frames of a network.
    SetBroadcast {
        /// The network, likewise.
        vni: Vni,
        /// Peers; each must have a bound path to be sent to.
        peers: Vec<PeerId>,
    },
    /// Forget a peer: its paths, SAs and endpoints.
    RemovePeer {
        /// The peer.
        peer: PeerId,
    },
}

/// An event that an engine reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// An authentic probe came in on an inbound SA of this path.
    ProbeReceived {
        /// The sending peer.
        peer: PeerId,
        /// This host's path that the inbound SA belongs to.
        path: PathId,
        /// The sender's number.
        probe: u64,
        /// Length of the probe's inner IP packet in bytes.
        mtu: u16,
        /// It was sent as a candidate's probe.
        candidate: bool,
    },
    /// Authentic packets arrive on this path's inbound SAs, but for a while they held none of the peer's
    /// probes. Something on this host drops the opened packets. The event repeats while this lasts.
    Unheard {
        /// The sending peer.
        peer: PeerId,
        /// The path.
        path: PathId,
    },
    /// The first authentic packet came in on an inbound SA: its predecessor may be drained.
    InboundFirstUse {
        /// The SA.
        spi: u32,
    },
    /// An outbound SA passed its soft limit: ask the peer for a new one.
    OutboundNearLimit {
        /// Its path.
        path: PathId,
        /// The SA.
        spi: u32,
    },
    /// An outbound SA reached its hard limit; its packets are dropped and counted.
    OutboundExhausted {
        /// Its path.
        path: PathId,
        /// The SA.
        spi: u32,
    },
    /// Authentic packets of a path come from another address than the one sent to.
    RemoteMoved {
        /// The path.
        path: PathId,
        /// The peer's address as seen now.
        remote: SocketAddr,
    },
    /// A lane beyond the first: whether packets come back on it. Sent when it becomes known and when it
    /// changes.
    LaneProven {
        /// The path.
        path: PathId,
        /// The lane.
        lane: u16,
        /// Packets come back. If not, none came for a while, and the lane carries no frames.
        proven: bool,
    },
    /// The kernel refused a datagram as too long for the route.
    MessageTooLong {
        /// The path.
        path: PathId,
        /// Inner MTU of the refused datagram in bytes.
        mtu: u16,
    },
    /// The engine lost or refused the state of one path; its other paths go on.
    PathFailed {
        /// The path.
        path: PathId,
        /// The cause, for `status connections`.
        reason: String,
    },
    /// The engine cannot go on; every path on it has failed.
    EngineFailed {
        /// The engine that failed.
        engine: EngineKind,
        /// The cause, for `status connections`.
        reason: String,
    },
}
