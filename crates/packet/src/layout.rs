//! Locates the headers of a frame. [`Layout::parse`] looks at each frame once; its answer, [`Headers`], is
//! carried along to all that need an offset: split, merge, lane choice, congestion marks, segment sizes.
//!
//! Some code reads headers itself, but never for each frame. [`crate::toobig`] and the cutting of IPv4 packets
//! check and rewrite whole headers of packets that are too long. [`crate::membership`] looks for other protocols
//! among the switch's own frames. [`crate::announcement`] reads ARP.

use std::ops::Range;

use crate::bytes::{array, be16};
use crate::checksum::{self, Sum};
use crate::{ethernet, ipv4, ipv6, tcp, udp};

/// The IP version of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Network {
    /// By the Ethernet type; `None`: another one than IP's.
    #[inline]
    #[must_use]
    pub const fn of(ethertype: u16) -> Option<Self> {
        match ethertype {
            ethernet::TYPE_IPV4 => Some(Self::V4),
            ethernet::TYPE_IPV6 => Some(Self::V6),
            _ => None,
        }
    }
}

/// A transport protocol with a checksum that super-packets leave partial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// The IP protocol number.
    #[must_use]
    pub const fn protocol(self) -> u8 {
        match self {
            Self::Tcp => ipv4::PROTOCOL_TCP,
            Self::Udp => ipv4::PROTOCOL_UDP,
        }
    }

    /// Offset of the checksum in the transport header.
    #[must_use]
    pub const fn checksum_offset(self) -> u16 {
        match self {
            Self::Tcp => tcp::CHECKSUM_OFFSET,
            Self::Udp => udp::CHECKSUM_OFFSET,
        }
    }
}

/// Why a frame has no [`Layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opaque {
    /// An IP packet that may belong to a TCP or UDP flow, but whose header is not visible: a fragment, a routing
    /// header, a header cut short.
    Hidden {
        /// Offset of the IP header.
        l3: usize,
        /// Its version.
        network: Network,
    },
    /// Another packet of IP, by the Ethernet type: of another protocol, or its header is wrong or cut short.
    Ip {
        /// Offset at which the IP header should begin.
        l3: usize,
        /// Its version, by the Ethernet type.
        network: Network,
    },
    /// Not IP.
    Other {
        /// Offset behind the Ethernet header.
        l3: usize,
    },
    /// The frame ends in its Ethernet header.
    Short,
}

/// The result of one look at a frame.
pub type Headers = Result<Layout, Opaque>;

/// The offset behind a frame's Ethernet header, and the IP version by its Ethernet type; `None` if the frame
/// ends in its Ethernet header.
#[inline]
#[must_use]
pub const fn network(headers: &Headers) -> Option<(usize, Option<Network>)> {
    match headers {
        Ok(Layout { l3, network, .. })
        | Err(Opaque::Hidden { l3, network } | Opaque::Ip { l3, network }) => {
            Some((*l3, Some(*network)))
        }
        Err(Opaque::Other { l3 }) => Some((*l3, None)),
        Err(Opaque::Short) => None,
    }
}

/// The offsets of a TCP or UDP packet's headers in its frame. All offsets are within the frame, and
/// `l3 < l4 < payload <= end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Offset of the IP header.
    pub l3: usize,
    /// Offset of the TCP or UDP header.
    pub l4: usize,
    /// Offset of the payload.
    pub payload: usize,
    /// The end of the IP packet; Ethernet padding may follow.
    pub end: usize,
    /// The IP version.
    pub network: Network,
    /// The transport protocol.
    pub transport: Transport,
    /// Whether there are neither IPv4 options nor IPv6 extension headers.
    pub plain: bool,
}

impl Layout {
    /// Finds the headers of a frame.
    ///
    /// # Errors
    /// [`Opaque`] if it is not a whole TCP or UDP packet.
    pub fn parse(frame: &[u8]) -> Result<Self, Opaque> {
        let Ok(header) = ethernet::Header::parse(frame) else { return Err(Opaque::Short) };
        let l3 = header.header_len();
        match Network::of(header.ethertype()) {
            Some(Network::V4) => parse_v4(frame, l3),
            Some(Network::V6) => parse_v6(frame, l3),
            None => Err(Opaque::Other { l3 }),
        }
    }

    /// The layout of a hidden packet that has a routing header. The checksum counts its final destination, which
    /// need not be the one in the IP header (RFC 8200 section 8.1).
    #[cold]
    pub(crate) fn behind_routing(frame: &[u8], opaque: Opaque) -> Option<Self> {
        let Opaque::Hidden { l3, network: Network::V6 } = opaque else { return None };
        let upper = ipv6::upper(&frame[l3..]).ok().filter(|upper| upper.routed)?;
        let end = l3 + ipv6::Header::parse(&frame[l3..]).ok()?.total_len();
        if upper.fragment { None } else { layout_v6(frame, l3, end, &upper).ok() }
    }

    /// The sum of the pseudo-header for a transport packet of `length` bytes.
    #[must_use]
    pub fn pseudo(&self, frame: &[u8], length: u32) -> Sum {
        let protocol = self.transport.protocol();
        match self.network {
            Network::V4 => checksum::pseudo_v4(
                array::<4>(frame, self.l3 + 12).into(),
                array::<4>(frame, self.l3 + 16).into(),
                protocol,
                length,
            ),
            Network::V6 => checksum::pseudo_v6(
                array::<16>(frame, self.l3 + 8).into(),
                array::<16>(frame, self.l3 + 24).into(),
                protocol,
                length,
            ),
        }
    }

    /// Whether the transport checksum is right as it stands. False for UDP without a checksum.
    #[must_use]
    pub fn checksum_ok(&self, frame: &[u8]) -> bool {
        let field = self.l4 + usize::from(self.transport.checksum_offset());
        if self.transport == Transport::Udp && be16(frame, field) == 0 {
            return false;
        }
        let packet = &frame[self.l4..self.end];
        self.pseudo(frame, packet.len() as u32).bytes(packet).checksum() == 0
    }

    /// Offset of the checksum field.
    #[must_use]
    pub const fn checksum_field(&self) -> usize {
        self.l4 + self.transport.checksum_offset() as usize
    }

    /// The bytes of the source and destination addresses.
    #[must_use]
    pub fn addresses<'a>(&self, frame: &'a [u8]) -> &'a [u8] {
        addresses(frame, self.l3, self.network)
    }
}

/// A number that is the same for all packets of a flow and spreads flows. It depends on addresses, protocol and
/// ports; for fragments and other protocols on addresses alone; for other frames than IP on Ethernet addresses.
/// Not secret: a sender can choose flows that fall together.
///
/// # Panics
/// If `headers` are not the frame's.
#[must_use]
pub fn flow_hash(frame: &[u8], headers: &Headers) -> u32 {
    match headers {
        Ok(layout) => hash(frame, layout),
        Err(Opaque::Hidden { l3, network }) => mix(addresses(frame, *l3, *network), 0),
        Err(Opaque::Ip { l3, network }) => {
            let range = address_range(*l3, *network);
            mix(frame.get(range).unwrap_or(&frame[..12]), 0)
        }
        Err(Opaque::Other { .. }) => mix(&frame[..12], 0),
        Err(Opaque::Short) => 0,
    }
}

#[inline]
pub(crate) fn hash(frame: &[u8], layout: &Layout) -> u32 {
    let ports = u32::from_ne_bytes(array(frame, layout.l4));
    mix(layout.addresses(frame), u64::from(ports) << 8 | u64::from(layout.transport.protocol()))
}

#[inline]
pub(crate) fn addresses(frame: &[u8], l3: usize, network: Network) -> &[u8] {
    &frame[address_range(l3, network)]
}

/// The range of both addresses in an IP header.
#[inline]
const fn address_range(l3: usize, network: Network) -> Range<usize> {
    match network {
        Network::V4 => l3 + 12..l3 + 20,
        Network::V6 => l3 + 8..l3 + 40,
    }
}

/// Multiply and fold: a good spread for a few ns.
#[inline]
fn mix(bytes: &[u8], seed: u64) -> u32 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut state = seed.wrapping_mul(ODD);
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = (state ^ u64::from_ne_bytes(word)).wrapping_mul(ODD);
        state ^= state >> 29;
    }
    (state.wrapping_mul(ODD) >> 32) as u32
}

#[inline]
fn parse_v4(frame: &[u8], l3: usize) -> Result<Layout, Opaque> {
    let other = Opaque::Ip { l3, network: Network::V4 };
    let Ok(header) = ipv4::Header::parse(&frame[l3..]) else { return Err(other) };
    let transport = match header.protocol() {
        ipv4::PROTOCOL_TCP => Transport::Tcp,
        ipv4::PROTOCOL_UDP => Transport::Udp,
        _ => return Err(other),
    };
    let hidden = Opaque::Hidden { l3, network: Network::V4 };
    if header.is_fragment() {
        return Err(hidden);
    }
    let (l4, end) = (l3 + header.header_len(), l3 + header.total_len());
    let payload = payload(frame, l4, end, transport).ok_or(hidden)?;
    let plain = header.header_len() == ipv4::LEN;
    Ok(Layout { l3, l4, payload, end, network: Network::V4, transport, plain })
}

#[inline]
fn parse_v6(frame: &[u8], l3: usize) -> Result<Layout, Opaque> {
    let packet = &frame[l3..];
    let Ok(header) = ipv6::Header::parse(packet) else {
        return Err(Opaque::Ip { l3, network: Network::V6 });
    };
    let hidden = Opaque::Hidden { l3, network: Network::V6 };
    let end = l3 + header.total_len();
    let upper = match header.next_header() {
        next_header @ (ipv6::NEXT_TCP | ipv6::NEXT_UDP) => {
            ipv6::Upper { next_header, offset: ipv6::LEN, ..ipv6::Upper::default() }
        }
        _ => match ipv6::upper(packet) {
            Ok(upper) if !upper.fragment && !upper.routed => upper,
            _ => return Err(hidden),
        },
    };
    layout_v6(frame, l3, end, &upper)
}

#[inline]
fn layout_v6(frame: &[u8], l3: usize, end: usize, upper: &ipv6::Upper) -> Result<Layout, Opaque> {
    let transport = match upper.next_header {
        ipv6::NEXT_TCP => Transport::Tcp,
        ipv6::NEXT_UDP => Transport::Udp,
        _ => return Err(Opaque::Ip { l3, network: Network::V6 }),
    };
    let l4 = l3 + upper.offset;
    let hidden = Opaque::Hidden { l3, network: Network::V6 };
    let payload = payload(frame, l4, end, transport).ok_or(hidden)?;
    let plain = upper.offset == ipv6::LEN;
    Ok(Layout { l3, l4, payload, end, network: Network::V6, transport, plain })
}

#[inline]
fn payload(frame: &[u8], l4: usize, end: usize, transport: Transport) -> Option<usize> {
    let packet = frame.get(l4..end)?;
    Some(match transport {
        Transport::Tcp => l4 + tcp::Header::parse(packet).ok()?.header_len(),
        Transport::Udp if packet.len() < udp::LEN => return None,
        Transport::Udp => l4 + udp::LEN,
    })
}
