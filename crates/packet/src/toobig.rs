//! Answers to packets that do not fit their path: ICMPv4 "fragmentation needed" (RFC 1191) and
//! ICMPv6 "packet too big" (RFC 4443 section 3.2).

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::ethernet::{self, is_group};
use crate::icmp;
use crate::ipv4;
use crate::ipv6::{self, MTU_MIN};

/// The longest ICMPv4 answer, IP header included (RFC 1812 section 4.3.2.3).
pub const V4_LEN_MAX: usize = 576;
/// The longest ICMPv6 answer, IP header included (RFC 4443 section 2.4).
pub const V6_LEN_MAX: usize = MTU_MIN;
/// A buffer of this many bytes holds every answer, VLAN tags included.
pub const FRAME_LEN_MAX: usize =
    ethernet::LEN + ethernet::VLAN_TAGS_MAX * ethernet::VLAN_LEN + V6_LEN_MAX;

const TTL: u8 = 64;

/// Why no answer is sent. The packet is dropped; count it by this reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAnswer {
    /// Not an IP packet, or a malformed one.
    #[error("not a valid IP packet")]
    NotIp,
    /// An IPv4 packet that may be fragmented: fragment it instead.
    #[error("the packet may be fragmented")]
    MayFragment,
    /// To or from a group, the unspecified or a loopback address (RFC 1122 section 3.2.2).
    #[error("an address that no error may answer to")]
    Address,
    /// A fragment other than the first.
    #[error("a fragment other than the first")]
    LaterFragment,
    /// An ICMP error or redirect.
    #[error("an ICMP error")]
    IcmpError,
    /// The caller's buffer is too short; [`FRAME_LEN_MAX`] is enough.
    #[error("the buffer is too short for the answer")]
    Buffer,
}

/// Writes to `out` the frame that tells the sender of `frame` that the path carries IP packets of `mtu`
/// bytes, and returns its length. Weft has no address on the network, so the frame comes from the Ethernet
/// and IP address that the packet was sent to. `frame` may be a super-packet.
///
/// # Errors
/// [`NoAnswer`] if no answer may be sent.
pub fn write(out: &mut [u8], frame: &[u8], mtu: u16) -> Result<usize, NoAnswer> {
    let ethernet = ethernet::Header::parse(frame).map_err(|_| NoAnswer::NotIp)?;
    let (source, destination) = (ethernet.source(), ethernet.destination());
    if is_group(source) || is_group(destination) {
        return Err(NoAnswer::Address);
    }
    let l2 = ethernet.header_len();
    let packet = &frame[l2..];
    let len = match ethernet.ethertype() {
        ethernet::TYPE_IPV4 => write_v4(out.get_mut(l2..).ok_or(NoAnswer::Buffer)?, packet, mtu)?,
        ethernet::TYPE_IPV6 => write_v6(out.get_mut(l2..).ok_or(NoAnswer::Buffer)?, packet, mtu)?,
        _ => return Err(NoAnswer::NotIp),
    };
    out[..l2].copy_from_slice(&frame[..l2]);
    out[..6].copy_from_slice(&source);
    out[6..12].copy_from_slice(&destination);
    Ok(l2 + len)
}

fn write_v4(out: &mut [u8], packet: &[u8], mtu: u16) -> Result<usize, NoAnswer> {
    let header = ipv4::Header::parse(packet).map_err(|_| NoAnswer::NotIp)?;
    if !header.checksum_ok() {
        return Err(NoAnswer::NotIp);
    }
    if !header.dont_fragment() {
        return Err(NoAnswer::MayFragment);
    }
    if !v4_answerable(header.source()) || !v4_answerable(header.destination()) {
        return Err(NoAnswer::Address);
    }
    if header.fragment_offset() != 0 {
        return Err(NoAnswer::LaterFragment);
    }
    let packet = &packet[..header.total_len()];
    if header.protocol() == ipv4::PROTOCOL_ICMP {
        let kind = packet.get(header.header_len()).ok_or(NoAnswer::NotIp)?;
        if icmp::v4_is_error(*kind) {
            return Err(NoAnswer::IcmpError);
        }
    }
    let quote = &packet[..packet.len().min(V4_LEN_MAX - ipv4::LEN - icmp::LEN)];
    let len = ipv4::LEN + icmp::LEN + quote.len();
    let out = out.get_mut(..len).ok_or(NoAnswer::Buffer)?;
    let answer = ipv4::Builder {
        // Internetwork control (RFC 1812 section 4.3.2.5).
        tos: 0xc0,
        total_len: len as u16,
        id: 0,
        dont_fragment: true,
        ttl: TTL,
        protocol: ipv4::PROTOCOL_ICMP,
        source: header.destination(),
        destination: header.source(),
    };
    answer.write(out);
    let message = &mut out[ipv4::LEN..];
    message[icmp::LEN..].copy_from_slice(quote);
    let kind = icmp::V4_UNREACHABLE;
    icmp::finish_v4(message, kind, icmp::V4_FRAGMENTATION_NEEDED, u32::from(mtu));
    Ok(len)
}

fn write_v6(out: &mut [u8], packet: &[u8], mtu: u16) -> Result<usize, NoAnswer> {
    let header = ipv6::Header::parse(packet).map_err(|_| NoAnswer::NotIp)?;
    if !v6_answerable(header.source()) || !v6_answerable(header.destination()) {
        return Err(NoAnswer::Address);
    }
    let upper = ipv6::upper(packet).map_err(|_| NoAnswer::NotIp)?;
    if upper.later_fragment {
        return Err(NoAnswer::LaterFragment);
    }
    let packet = &packet[..header.total_len()];
    if upper.next_header == ipv6::NEXT_ICMPV6 {
        let kind = packet.get(upper.offset).ok_or(NoAnswer::NotIp)?;
        if icmp::v6_is_error(*kind) {
            return Err(NoAnswer::IcmpError);
        }
    }
    let quote = &packet[..packet.len().min(V6_LEN_MAX - ipv6::LEN - icmp::LEN)];
    let len = ipv6::LEN + icmp::LEN + quote.len();
    let out = out.get_mut(..len).ok_or(NoAnswer::Buffer)?;
    let (source, destination) = (header.destination(), header.source());
    let answer = ipv6::Builder {
        traffic_class: 0,
        flow_label: 0,
        payload_len: (len - ipv6::LEN) as u16,
        next_header: ipv6::NEXT_ICMPV6,
        hop_limit: TTL,
        source,
        destination,
    };
    answer.write(out);
    let message = &mut out[ipv6::LEN..];
    message[icmp::LEN..].copy_from_slice(quote);
    let kind = icmp::V6_PACKET_TOO_BIG;
    icmp::finish_v6(message, kind, 0, u32::from(mtu), source, destination);
    Ok(len)
}

/// Whether an address names one host; 240.0.0.0/4 counts as broadcast does.
fn v4_answerable(address: Ipv4Addr) -> bool {
    let first = address.octets()[0];
    !(first == 0 || address.is_loopback() || first >= 224)
}

fn v6_answerable(address: Ipv6Addr) -> bool {
    !(address.is_unspecified() || address.is_loopback() || address.is_multicast())
}
