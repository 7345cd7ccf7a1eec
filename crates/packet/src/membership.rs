//! Reports of a listener that it wants the frames of a group: IGMP (RFC 3376) and MLD (RFC 3810).

use crate::{ethernet, ipv4, ipv6};

/// The number of IGMP as a protocol of IPv4.
const PROTOCOL_IGMP: u8 = 2;
/// Reports and leaving, of all versions of IGMP.
const IGMP_REPORTS: [u8; 4] = [0x12, 0x16, 0x17, 0x22];
/// The same of MLD, by type of ICMPv6.
const MLD_REPORTS: [u8; 3] = [131, 132, 143];

/// Whether a frame reports that its sender listens to groups, or no longer does.
#[must_use]
pub fn is_report(frame: &[u8]) -> bool {
    let Ok(header) = ethernet::Header::parse(frame) else { return false };
    let Some(packet) = frame.get(header.header_len()..) else { return false };
    let (kind, reports) = match header.ethertype() {
        ethernet::TYPE_IPV4 => {
            let Ok(ip) = ipv4::Header::parse(packet) else { return false };
            let igmp = ip.protocol() == PROTOCOL_IGMP && !ip.is_fragment();
            (igmp.then(|| packet.get(ip.header_len())).flatten(), &IGMP_REPORTS[..])
        }
        ethernet::TYPE_IPV6 => {
            let Ok(upper) = ipv6::upper(packet) else { return false };
            let icmp = upper.next_header == ipv6::NEXT_ICMPV6 && !upper.fragment;
            (icmp.then(|| packet.get(upper.offset)).flatten(), &MLD_REPORTS[..])
        }
        _ => return false,
    };
    kind.is_some_and(|kind| reports.contains(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(ethertype: u16, packet: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; ethernet::LEN];
        ethernet::write(&mut frame, [1, 0, 0x5e, 0, 0, 0x16], [2; 6], ethertype);
        frame.extend_from_slice(packet);
        frame
    }

    fn igmp(protocol: u8, kind: u8) -> Vec<u8> {
        // A header with the option "router alert".
        let mut packet = vec![0x46, 0, 0, 32, 0, 0, 0, 0, 1, protocol, 0, 0];
        packet.extend([0, 0, 0, 0, 224, 0, 0, 22, 0x94, 4, 0, 0, kind, 0, 0, 0, 0, 0, 0, 0]);
        frame(ethernet::TYPE_IPV4, &packet)
    }

    fn mld(kind: u8) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, 12, 0, 1];
        packet.extend([0; 16]);
        packet.extend([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x16]);
        // The same option in a hop-by-hop header.
        packet.extend([58, 0, 5, 2, 0, 0, 1, 0, kind, 0, 0, 0]);
        frame(ethernet::TYPE_IPV6, &packet)
    }

    #[test]
    fn reports_are_told_from_queries_and_from_all_else() {
        for kind in IGMP_REPORTS {
            assert!(is_report(&igmp(2, kind)) && !is_report(&igmp(17, kind)));
        }
        for kind in MLD_REPORTS {
            assert!(is_report(&mld(kind)));
        }
        assert!(!is_report(&igmp(2, 0x11)) && !is_report(&mld(130)) && !is_report(&mld(135)));
        assert!(!is_report(&frame(ethernet::TYPE_ARP, &[0x12; 28])));
        for whole in [igmp(2, 0x22), mld(143)] {
            (0..whole.len()).for_each(|len| _ = is_report(&whole[..len]));
        }
    }
}
