//! Probe frames: UDP datagrams padded to a path's full MTU (`docs/design/paths.md`).

use std::net::Ipv6Addr;

use crate::bytes::{array, put16};
use crate::checksum::{self, udp_nonzero};
use crate::layout::{Layout, Network, Transport};
use crate::{ethernet, ipv6, udp};

/// UDP port of both ends of a probe, inside network [`crate::vxlan::VNI_MAX`]. Not one of the VXLAN
/// ports: the guard drops those wherever they leave unsealed.
pub const PORT: u16 = 6789;
/// The first bytes of a probe's payload.
pub const MAGIC: [u8; 8] = *b"weft\x00prb";
/// Bytes of magic and probe number: the least payload.
pub const PAYLOAD_MIN: usize = 16;
/// The least MTU that can be probed, in bytes of the inner IP packet.
pub const MTU_MIN: u16 = (ipv6::LEN + udp::LEN + PAYLOAD_MIN) as u16;

const HOP_LIMIT: u8 = 64;

/// Why a probe was not written. The fault is the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The MTU is under [`MTU_MIN`].
    #[error("an MTU of {0} bytes is less than a probe's headers ({MTU_MIN}); do not probe it")]
    MtuTooSmall(u16),
    /// The buffer is shorter than the frame.
    #[error("a probe needs a buffer of {need} bytes, not {have}")]
    BufferTooSmall {
        /// Bytes of the frame.
        need: usize,
        /// Bytes of the buffer.
        have: usize,
    },
}

/// Writes the frame of probe number `probe` to `out` and returns its length: 14 more than `mtu`,
/// the length of the inner IP packet. The UDP checksum is complete, so that a socket takes it.
///
/// # Errors
/// [`ProbeError`]
pub fn write(
    out: &mut [u8],
    src_mac: [u8; 6],
    dst_mac: [u8; 6],
    src_ip6: Ipv6Addr,
    dst_ip6: Ipv6Addr,
    probe: u64,
    mtu: u16,
) -> Result<usize, ProbeError> {
    if mtu < MTU_MIN {
        return Err(ProbeError::MtuTooSmall(mtu));
    }
    let (have, need) = (out.len(), ethernet::LEN + usize::from(mtu));
    let frame = out.get_mut(..need).ok_or(ProbeError::BufferTooSmall { need, have })?;
    ethernet::write(frame, dst_mac, src_mac, ethernet::TYPE_IPV6);
    let length = mtu - ipv6::LEN as u16;
    let header = ipv6::Builder {
        traffic_class: 0,
        flow_label: 0,
        payload_len: length,
        next_header: ipv6::NEXT_UDP,
        hop_limit: HOP_LIMIT,
        source: src_ip6,
        destination: dst_ip6,
    };
    header.write(&mut frame[ethernet::LEN..]);
    let datagram = &mut frame[ethernet::LEN + ipv6::LEN..];
    let header = udp::Header { source_port: PORT, destination_port: PORT, length, checksum: 0 };
    header.write(datagram);
    write_payload(&mut datagram[udp::LEN..], probe);
    let pseudo = checksum::pseudo_v6(src_ip6, dst_ip6, ipv6::NEXT_UDP, u32::from(length));
    let checksum = udp_nonzero(pseudo.bytes(datagram).checksum());
    put16(datagram, usize::from(udp::CHECKSUM_OFFSET), checksum);
    Ok(need)
}

/// The number of a probe frame, and the length of its IP packet; `None` if it is not an intact probe.
#[must_use]
pub fn parse(frame: &[u8]) -> Option<(u64, u16)> {
    let layout = Layout::parse(frame).ok()?;
    if layout.network != Network::V6 || layout.transport != Transport::Udp || !layout.plain {
        return None;
    }
    let datagram = frame.get(layout.l4..layout.end)?;
    let header = udp::Header::parse(datagram).ok()?;
    let whole = usize::from(header.length) == datagram.len();
    if header.destination_port != PORT || !whole || !layout.checksum_ok(frame) {
        return None;
    }
    let probe = parse_payload(&datagram[udp::LEN..])?;
    Some((probe, u16::try_from(layout.end - layout.l3).ok()?))
}

/// Fills `payload` with the payload of a probe, for a socket that adds the headers itself
/// (`mtu - 48` bytes over IPv6).
///
/// # Panics
/// If `payload` is shorter than [`PAYLOAD_MIN`].
pub fn write_payload(payload: &mut [u8], probe: u64) {
    payload[..8].copy_from_slice(&MAGIC);
    payload[8..PAYLOAD_MIN].copy_from_slice(&probe.to_be_bytes());
    payload[PAYLOAD_MIN..].fill(0);
}

/// The probe number in the payload of a probe.
#[must_use]
pub fn parse_payload(payload: &[u8]) -> Option<u64> {
    let head: &[u8; PAYLOAD_MIN] = payload.first_chunk()?;
    (head[..8] == MAGIC).then(|| u64::from_be_bytes(array(head, 8)))
}
