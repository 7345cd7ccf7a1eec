//! Matches and actions of flows.

use std::net::IpAddr;

use weft_path::Mac;

/// How a tunnel packet came: outer addresses as the datapath shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct TunnelKey {
    /// The VXLAN network identifier (the datapath has room for 64 bits).
    pub(super) id: u64,
    /// Outer source: the other host.
    pub(super) remote: IpAddr,
    /// Outer destination: this host.
    pub(super) local: IpAddr,
}

/// The VLAN tags of a frame. The datapath always matches on them, so a flow names them too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(super) enum Tag {
    /// No tag.
    #[default]
    None,
    /// One tag with this control word: number, priority, and the bit that marks it as present.
    One(u16),
    /// Two tags or more, or half a tag: no flow is made for these.
    Deep,
}

/// The fields of a frame that the switch looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Frame {
    /// The datapath's number of the port that it came in by.
    pub(super) port: u32,
    /// Set if it came out of a tunnel.
    pub(super) tunnel: Option<TunnelKey>,
    pub(super) source: Mac,
    pub(super) destination: Mac,
    pub(super) tag: Tag,
}

/// The match of a flow. Two flows in the table never match the same frame: [`FlowKey::Tunnel`] is only there
/// for tunnels whose frames are all refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum FlowKey {
    /// Frames of one pair of MACs from one port (and tunnel).
    Pair(Frame),
    /// Every frame of one tunnel.
    Tunnel {
        /// The port that the tunnel ends in.
        port: u32,
        /// The tunnel.
        tunnel: TunnelKey,
    },
}

impl FlowKey {
    pub(super) fn port(&self) -> u32 {
        match self {
            Self::Pair(frame) => frame.port,
            Self::Tunnel { port, .. } => *port,
        }
    }
}

/// One copy of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Output {
    /// Out of a port.
    Port(u32),
    /// No copy: those into tunnels leave only if the meter of this number admits the frame.
    Meter(u32),
    /// Into a tunnel.
    Tunnel {
        /// The tunnel port's number.
        port: u32,
        /// The VXLAN network identifier.
        id: u64,
        /// The other host.
        remote: IpAddr,
        /// This host's address; the routing table's choice if `None`.
        local: Option<IpAddr>,
    },
}
