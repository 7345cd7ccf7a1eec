//! Announcements of addresses: gratuitous ARP (RFC 5227) and unsolicited neighbour advertisements (RFC 4861).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::arp::{self, Arp};
use crate::bytes::{array, put16};
use crate::{ethernet, icmp, ipv6};

/// Bytes of the longest announcement that is written.
pub const LEN_MAX: usize = ethernet::LEN + ipv6::LEN + ADVERTISEMENT_LEN + OPTION_LEN;
/// ICMPv6 type: neighbour advertisement.
pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

/// ICMPv6 header and target address.
const ADVERTISEMENT_LEN: usize = icmp::LEN + 16;
/// The option that names the target's Ethernet address, and its type.
const OPTION_LEN: usize = 8;
const TARGET_LINK_LAYER_ADDRESS: u8 = 2;
/// Flags of an advertisement, in the first of the four bytes behind the checksum.
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
/// All hosts on the link, and the Ethernet address of that group.
const ALL_HOSTS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_HOSTS_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];

/// Somebody tells the network unasked that he has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The address.
    pub address: IpAddr,
    /// The Ethernet address that has it.
    pub mac: [u8; 6],
}

impl Announcement {
    /// Reads an untagged frame; `None` if it announces nothing.
    #[must_use]
    pub fn parse(frame: &[u8]) -> Option<Self> {
        let header = ethernet::Header::parse(frame).ok()?;
        let payload = frame.get(ethernet::LEN..)?;
        match header.ethertype() {
            ethernet::TYPE_ARP => parse_arp(payload),
            ethernet::TYPE_IPV6 => parse_advertisement(payload, header.source()),
            _ => None,
        }
    }

    /// Writes the frame that tells everybody, and returns its length.
    pub fn write(&self, out: &mut [u8; LEN_MAX]) -> usize {
        match self.address {
            IpAddr::V4(address) => self.write_arp(address, out),
            IpAddr::V6(address) => self.write_advertisement(address, out),
        }
    }

    fn write_arp(&self, address: Ipv4Addr, out: &mut [u8; LEN_MAX]) -> usize {
        ethernet::write(out, ethernet::BROADCAST, self.mac, ethernet::TYPE_ARP);
        let packet = Arp {
            operation: arp::REQUEST,
            sender_mac: self.mac,
            sender_ip: address,
            target_mac: [0; 6],
            target_ip: address,
        };
        packet.write(&mut out[ethernet::LEN..]);
        ethernet::LEN + arp::LEN
    }

    fn write_advertisement(&self, address: Ipv6Addr, out: &mut [u8; LEN_MAX]) -> usize {
        ethernet::write(out, ALL_HOSTS_MAC, self.mac, ethernet::TYPE_IPV6);
        let (header, message) = out[ethernet::LEN..].split_at_mut(ipv6::LEN);
        header.fill(0);
        header[0] = 6 << 4;
        put16(header, 4, message.len() as u16);
        header[6] = ipv6::NEXT_ICMPV6;
        // The receiver knows by this that no router passed it on.
        header[7] = u8::MAX;
        header[8..24].copy_from_slice(&address.octets());
        header[24..40].copy_from_slice(&ALL_HOSTS.octets());
        message[icmp::LEN..ADVERTISEMENT_LEN].copy_from_slice(&address.octets());
        message[ADVERTISEMENT_LEN..][..2].copy_from_slice(&[TARGET_LINK_LAYER_ADDRESS, 1]);
        message[ADVERTISEMENT_LEN + 2..].copy_from_slice(&self.mac);
        let flags = u32::from(OVERRIDE) << 24;
        icmp::finish_v6(message, NEIGHBOUR_ADVERTISEMENT, 0, flags, address, ALL_HOSTS);
        LEN_MAX
    }
}

fn parse_arp(payload: &[u8]) -> Option<Announcement> {
    let packet = Arp::parse(payload).ok()?;
    let speaks = [arp::REQUEST, arp::REPLY].contains(&packet.operation);
    let is_gratuitous = packet.sender_ip == packet.target_ip && !packet.sender_ip.is_unspecified();
    let address = packet.sender_ip.into();
    (speaks && is_gratuitous).then_some(Announcement { address, mac: packet.sender_mac })
}

/// Without an option that names it, the Ethernet address is the sender's.
fn parse_advertisement(payload: &[u8], source: [u8; 6]) -> Option<Announcement> {
    let header = ipv6::Header::parse(payload).ok()?;
    let message = payload.get(ipv6::LEN..header.total_len())?;
    if header.next_header() != ipv6::NEXT_ICMPV6
        || header.hop_limit() != u8::MAX
        || message.len() < ADVERTISEMENT_LEN
        || message[..2] != [NEIGHBOUR_ADVERTISEMENT, 0]
        || message[4] & SOLICITED != 0
    {
        return None;
    }
    let address = Ipv6Addr::from(array::<16>(message, icmp::LEN));
    let mac = option(&message[ADVERTISEMENT_LEN..]).unwrap_or(source);
    Some(Announcement { address: address.into(), mac })
}

fn option(mut options: &[u8]) -> Option<[u8; 6]> {
    while let [kind, units, ..] = options {
        // A length of 0 makes the whole message invalid.
        let len = usize::from(*units) * OPTION_LEN;
        let (whole, rest) = options.split_at_checked(len).filter(|_| len > 0)?;
        if *kind == TARGET_LINK_LAYER_ADDRESS {
            return Some(array(whole, 2));
        }
        options = rest;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

    fn frame_of(address: &str) -> Vec<u8> {
        let address = address.parse().unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let mut out = [0xaa; LEN_MAX];
        let len = Announcement { address, mac: MAC }.write(&mut out);
        out[..len].to_vec()
    }

    #[test]
    fn an_announcement_is_read_as_it_was_written() {
        for address in ["10.32.0.5", "fd00::5"] {
            let frame = frame_of(address);
            let read = Announcement::parse(&frame);
            let wanted = address.parse().ok().map(|address| Announcement { address, mac: MAC });
            assert_eq!(read, wanted);
            for length in 0..frame.len() {
                assert_eq!(Announcement::parse(&frame[..length]), None, "{length} bytes");
            }
        }
    }

    /// The checks of a kernel before it believes an advertisement (RFC 4861 section 7.1.2).
    #[test]
    fn an_advertisement_is_whole() {
        let frame = frame_of("fd00::5");
        let header = ipv6::Header::parse(&frame[ethernet::LEN..]);
        let source: Ipv6Addr = array::<16>(&frame, ethernet::LEN + 8).into();
        assert!(header.is_ok_and(|header| header.total_len() == LEN_MAX - ethernet::LEN));
        let message = &frame[ethernet::LEN + ipv6::LEN..];
        let sum =
            crate::checksum::pseudo_v6(source, ALL_HOSTS, ipv6::NEXT_ICMPV6, message.len() as u32);
        assert_eq!(sum.bytes(message).checksum(), 0);
        assert_eq!((frame[ethernet::LEN + 7], message[4]), (255, OVERRIDE));
    }

    #[test]
    fn questions_and_answers_announce_nothing() {
        let mut question = frame_of("10.32.0.5");
        question[ethernet::LEN + 27] = 6;
        assert_eq!(Announcement::parse(&question), None);
        let probe = frame_of("0.0.0.0");
        assert_eq!(Announcement::parse(&probe), None);
        let mut answer = frame_of("fd00::5");
        answer[ethernet::LEN + ipv6::LEN + 4] |= SOLICITED;
        assert_eq!(Announcement::parse(&answer), None);
        let mut far = frame_of("fd00::5");
        far[ethernet::LEN + 7] = 64;
        assert_eq!(Announcement::parse(&far), None);
        let mut endless = frame_of("fd00::5");
        endless[ethernet::LEN + ipv6::LEN + ADVERTISEMENT_LEN + 1] = 0;
        let sender = Announcement::parse(&endless).map(|it| it.mac);
        assert_eq!(sender, Some(MAC), "the sender's own");
    }
}
