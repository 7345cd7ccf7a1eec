//! The headers in front of a frame in a packet of format `ovpn` between hosts (`docs/design/ovpn.md`). They are
//! IPv6 between tunnel addresses, and UDP and VXLAN as in format `esp`.

use std::net::Ipv6Addr;

use crate::ParseError;
use crate::bytes::{put16, put32};
use crate::esp::{self, Inner};
use crate::ipv6;
use crate::vxlan::VxlanHeader;

/// Bytes in front of the frame.
pub const HEADERS_LEN: usize = ipv6::LEN + esp::INNER_LEN;

const HOP_LIMIT: u8 = 64;
const VERSION_6: u32 = 6 << 28;

/// The two ends of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The sending host's tunnel address.
    pub source: Ipv6Addr,
    /// The receiving host's tunnel address.
    pub destination: Ipv6Addr,
}

/// Writes all headers in front of a frame of `frame_len` bytes to the first [`HEADERS_LEN`] bytes of
/// `out`. The UDP checksum is 0, as tunnels may have it (RFC 6935).
///
/// # Panics
/// As [`esp::write_inner_headers`].
#[inline]
pub fn write_headers(
    out: &mut [u8],
    ends: &Ends,
    (src_port, dst_port): (u16, u16),
    vxlan: VxlanHeader,
    frame_len: usize,
) {
    let (header, inner) = out.split_at_mut(ipv6::LEN);
    esp::write_inner_headers(inner, src_port, dst_port, vxlan, frame_len);
    put32(header, 0, VERSION_6);
    put16(header, 4, (esp::INNER_LEN + frame_len) as u16);
    header[6] = ipv6::NEXT_UDP;
    header[7] = HOP_LIMIT;
    header[8..24].copy_from_slice(&ends.source.octets());
    header[24..40].copy_from_slice(&ends.destination.octets());
}

/// Reads the headers at the start of a packet's plaintext. The frame's place counts from the packet's
/// first byte; bytes behind the IPv6 packet are not looked at.
///
/// # Errors
/// [`ParseError`] if a header is short or wrong, or the packet is not between these ends.
pub fn parse_headers(packet: &[u8], ends: &Ends) -> Result<Inner, ParseError> {
    let header = ipv6::Header::parse(packet)?;
    if header.next_header() != ipv6::NEXT_UDP {
        return Err(ParseError::Invalid { header: "tunnel IPv6", field: "next header" });
    }
    if (header.source(), header.destination()) != (ends.source, ends.destination) {
        return Err(ParseError::Invalid { header: "tunnel IPv6", field: "address" });
    }
    let mut inner = esp::parse_inner_headers(&packet[ipv6::LEN..header.total_len()])?;
    inner.frame = inner.frame.start + ipv6::LEN..inner.frame.end + ipv6::LEN;
    Ok(inner)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::vxlan;

    fn ends(source: u16, destination: u16) -> Ends {
        let address = |last| Ipv6Addr::new(0xfd77, 0x6566, 0x7400, 0, 0, 0, 0, last);
        Ends { source: address(source), destination: address(destination) }
    }

    #[test]
    fn packets_of_other_ends_and_partial_ones_are_refused() {
        let (there, vxlan) = (ends(1, 2), VxlanHeader { vni: 7, rco: None });
        let mut packet = vec![0xaa; HEADERS_LEN + 60];
        write_headers(&mut packet, &there, (0xc001, vxlan::PORT), vxlan, 60);
        let inner = parse_headers(&packet, &there).unwrap();
        assert_eq!((inner.frame, inner.vxlan), (HEADERS_LEN..HEADERS_LEN + 60, vxlan));
        assert!(parse_headers(&packet, &ends(2, 1)).is_err());
        assert!(parse_headers(&packet[..packet.len() - 1], &there).is_err());
        for (at, byte) in [(0, 0x40), (6, 6), (HEADERS_LEN - 8, 0)] {
            let mut wrong = packet.clone();
            wrong[at] = byte;
            assert!(parse_headers(&wrong, &there).is_err(), "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn headers_round_trip(src: u16, vni in 0_u32..0x100_0000, len in 0_usize..2000, more in 0_usize..9) {
            let vxlan = VxlanHeader { vni, rco: None };
            let mut packet = vec![0xaa; HEADERS_LEN + len + more];
            write_headers(&mut packet, &ends(3, 4), (src, vxlan::PROBE_PORT), vxlan, len);
            let inner = parse_headers(&packet, &ends(3, 4)).unwrap();
            let frame = HEADERS_LEN..HEADERS_LEN + len;
            let dst_port = vxlan::PROBE_PORT;
            prop_assert_eq!(inner, Inner { src_port: src, dst_port, vxlan, frame });
        }

        #[test]
        fn nothing_panics(bytes: Vec<u8>) {
            let _ = parse_headers(&bytes, &ends(1, 2));
        }
    }
}
