//! Matches and actions of flows.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

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
    pub(super) payload: Payload,
}

impl Frame {
    /// Every bit of every field that [`Bits`] counts is set.
    pub(super) const ONES: Self = Self {
        port: u32::MAX,
        tunnel: None,
        source: Mac([0xff; 6]),
        destination: Mac([0xff; 6]),
        tag: Tag::None,
        payload: Payload {
            ethertype: u16::MAX,
            arp_sender: Mac([0xff; 6]),
            ipv4: Ipv4Addr::BROADCAST,
            ipv6: Ipv6Addr::from_bits(u128::MAX),
            protocol: u8::MAX,
            fragment: u8::MAX,
            port: u16::MAX,
            icmp_type: u8::MAX,
            icmp_code: u8::MAX,
            nd_target: Ipv6Addr::from_bits(u128::MAX),
        },
    };
}

/// A packet that is whole ([`Payload::fragment`]; OVS_FRAG_TYPE_NONE).
pub(super) const FRAGMENT_NONE: u8 = 0;
/// The first fragment of a packet (OVS_FRAG_TYPE_FIRST), or a UDP packet that will be cut into fragments.
pub(super) const FRAGMENT_FIRST: u8 = 1;
/// Any other fragment (OVS_FRAG_TYPE_LATER): what is above IP is zero in it.
pub(super) const FRAGMENT_LATER: u8 = 2;

/// What a frame without a tag carries: the fields that locks of ports look at, as the datapath reads them. A field that
/// the frame does not have, or that does not fit into it, is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Payload {
    /// The Ethernet type, also that behind a SNAP header. Zero for other frames of IEEE 802.2.
    pub(super) ethertype: u16,
    /// ARP: the sender's hardware address.
    pub(super) arp_sender: Mac,
    /// IPv4: the source. ARP: the sender's protocol address.
    pub(super) ipv4: Ipv4Addr,
    /// IPv6: the source.
    pub(super) ipv6: Ipv6Addr,
    /// IPv4: the protocol. IPv6: the one behind the extension headers; 59 (no next header) if they do not fit.
    pub(super) protocol: u8,
    /// Which fragment of an IP packet it is.
    pub(super) fragment: u8,
    /// UDP: the source port.
    pub(super) port: u16,
    /// The type of ICMPv6.
    pub(super) icmp_type: u8,
    /// The code of ICMPv6.
    pub(super) icmp_code: u8,
    /// Neighbour solicitation and advertisement: the target.
    pub(super) nd_target: Ipv6Addr,
}

impl Default for Payload {
    fn default() -> Self {
        Self {
            ethertype: 0,
            arp_sender: Mac([0; 6]),
            ipv4: Ipv4Addr::UNSPECIFIED,
            ipv6: Ipv6Addr::UNSPECIFIED,
            protocol: 0,
            fragment: FRAGMENT_NONE,
            port: 0,
            icmp_type: 0,
            icmp_code: 0,
            nd_target: Ipv6Addr::UNSPECIFIED,
        }
    }
}

/// How many leading bits of each field a flow matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub(super) struct Bits {
    pub(super) source: u8,
    pub(super) destination: u8,
    pub(super) ethertype: u8,
    pub(super) arp_sender: u8,
    pub(super) ipv4: u8,
    pub(super) ipv6: u8,
    pub(super) protocol: u8,
    pub(super) fragment: u8,
    pub(super) port: u8,
    pub(super) icmp_type: u8,
    pub(super) icmp_code: u8,
    pub(super) nd_target: u8,
}

impl Bits {
    /// The frame with zeros in place of all other bits of these fields.
    pub(super) fn of(&self, frame: &Frame) -> Frame {
        let payload = &frame.payload;
        Frame {
            source: Mac(leading(frame.source.0, self.source)),
            destination: Mac(leading(frame.destination.0, self.destination)),
            payload: Payload {
                ethertype: leading_u16(payload.ethertype, self.ethertype),
                arp_sender: Mac(leading(payload.arp_sender.0, self.arp_sender)),
                ipv4: leading(payload.ipv4.octets(), self.ipv4).into(),
                ipv6: leading(payload.ipv6.octets(), self.ipv6).into(),
                protocol: leading_u8(payload.protocol, self.protocol),
                fragment: leading_u8(payload.fragment, self.fragment),
                port: leading_u16(payload.port, self.port),
                icmp_type: leading_u8(payload.icmp_type, self.icmp_type),
                icmp_code: leading_u8(payload.icmp_code, self.icmp_code),
                nd_target: leading(payload.nd_target.octets(), self.nd_target).into(),
            },
            ..*frame
        }
    }
}

fn leading_u8(value: u8, bits: u8) -> u8 {
    u8::from_be_bytes(leading(value.to_be_bytes(), bits))
}

fn leading_u16(value: u16, bits: u8) -> u16 {
    u16::from_be_bytes(leading(value.to_be_bytes(), bits))
}

/// The bytes with zeros behind the first `bits` bits.
fn leading<const N: usize>(mut bytes: [u8; N], bits: u8) -> [u8; N] {
    let mut left = u32::from(bits);
    for byte in &mut bytes {
        let here = left.min(8);
        left -= here;
        *byte &= 0xff_u8.checked_shl(8 - here).unwrap_or(0);
    }
    bytes
}

/// The match of a flow. Two flows in the table never match the same frame: [`FlowKey::Tunnel`] is only there
/// for tunnels whose frames are all refused, and [`FlowKey::Locked`] for ports that have no [`FlowKey::Pair`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum FlowKey {
    /// Frames of one pair of MACs from one port (and tunnel), whatever they carry: the payload is the default.
    Pair(Frame),
    /// Frames of a locked port that agree with a frame in all that the lock has read.
    Locked {
        /// The frame, with zeros in place of all other bits.
        frame: Frame,
        /// What is matched besides port, tunnel and tag.
        bits: Bits,
    },
    /// Every frame of one tunnel.
    Tunnel {
        /// The port that the tunnel ends in.
        port: u32,
        /// The tunnel.
        tunnel: TunnelKey,
    },
}

impl FlowKey {
    /// The match for all frames with this frame's pair of MACs.
    pub(super) fn pair(frame: &Frame) -> Self {
        Self::Pair(Frame { payload: Payload::default(), ..*frame })
    }

    pub(super) fn port(&self) -> u32 {
        match self {
            Self::Pair(frame) | Self::Locked { frame, .. } => frame.port,
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
