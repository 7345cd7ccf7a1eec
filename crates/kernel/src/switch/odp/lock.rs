//! What a locked port may send. Pure.
//!
//! The check reads the fields of a frame in a fixed order. What it reads next depends only on what it has read. The
//! match of the flow is just that. So all frames that a flow matches have the same fate, and no frame matches two
//! flows.
//!
//! A field that must be one of a few values is read whole if it is one of them. Otherwise it is read only as far as it
//! differs from them all. So a port that makes up addresses adds a limited number of flows, and a client that uses many
//! UDP ports needs a few. Addresses are read in steps of a byte. Steps of a bit would make fewer flows. But a packet
//! may be compared once for each set of bits that some flow of the datapath matches.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use weft_packet::ethernet::{TYPE_ARP, TYPE_IPV4, TYPE_IPV6};
use weft_path::Mac;

use super::{
    codec_payload::{
        ICMPV6_ADVERTISEMENT, ICMPV6_SOLICITATION, PROTOCOL_ICMPV6, PROTOCOL_UDP, is_matchable,
    },
    drops::OdpDrop,
    flow::{Bits, FRAGMENT_FIRST, FRAGMENT_LATER, FlowKey, Frame, Payload, Tag},
};
use crate::switch::port_lock::PortLock;

const PROTOCOL_IGMP: u8 = 2;
/// No next header. The datapath also says so of extension headers that it cannot follow to their end.
const PROTOCOL_NONE: u8 = 59;
/// The UDP port of DHCP servers (RFC 2131).
const DHCP_SERVER: u16 = 67;
/// The UDP port of DHCPv6 servers and relays (RFC 8415).
const DHCPV6_SERVER: u16 = 547;
/// Reserved (RFC 4443): the datapath has found no whole ICMPv6 header.
const ICMPV6_MISSING: u8 = 0;
const MLD_REPORT: u8 = 131;
const MLD_DONE: u8 = 132;
const ICMPV6_ROUTER_ADVERTISEMENT: u8 = 134;
const ICMPV6_REDIRECT: u8 = 137;
const MLDV2_REPORT: u8 = 143;

/// In what steps addresses are read, in bits.
const ADDRESS_STEP: u32 = 8;
/// In what steps UDP ports are read, in bits: 17 flows at most tell one port from all others.
const PORT_STEP: u32 = 1;

/// Why the lock refuses a frame from its port, and the match of a flow for all frames that have the same fate. Without
/// a match the daemon must see each such frame.
pub(super) fn check(lock: &PortLock, frame: &Frame) -> (Option<OdpDrop>, Option<FlowKey>) {
    let mut check = Check { lock, payload: &frame.payload, bits: Bits::default() };
    let refused = check.refuse(frame);
    let bits = check.bits;
    let is_matchable =
        frame.tag != Tag::Deep && (bits.ethertype == 0 || is_matchable(frame.payload.ethertype));
    (refused, is_matchable.then(|| FlowKey::Locked { frame: bits.of(frame), bits }))
}

struct Check<'a> {
    lock: &'a PortLock,
    payload: &'a Payload,
    /// What has been read.
    bits: Bits,
}

/// Whose a source address is.
#[derive(PartialEq, Eq)]
enum Whose {
    Own,
    Unspecified,
    Foreign,
}

impl Check<'_> {
    fn refuse(&mut self, frame: &Frame) -> Option<OdpDrop> {
        if frame.tag != Tag::None {
            return Some(OdpDrop::LockedVlan);
        }
        let own = self.lock.mac;
        self.bits.source = apart(frame.source.0, ADDRESS_STEP, [own]);
        if frame.source != Mac(own) {
            return Some(OdpDrop::LockedMac);
        }
        self.bits.ethertype = 16;
        let refused = match self.payload.ethertype {
            TYPE_ARP => self.refuse_arp(),
            TYPE_IPV4 => self.refuse_ipv4(),
            TYPE_IPV6 => self.refuse_ipv6(),
            _ => None,
        };
        if refused.is_none() {
            self.bits.destination = 48;
        }
        refused
    }

    fn refuse_arp(&mut self) -> Option<OdpDrop> {
        let own = self.lock.mac;
        self.bits.arp_sender = apart(self.payload.arp_sender.0, ADDRESS_STEP, [own]);
        // A probe is from 0.0.0.0 (RFC 5227).
        let refused = self.payload.arp_sender != Mac(own) || self.read_ipv4() == Whose::Foreign;
        refused.then_some(OdpDrop::LockedArp)
    }

    fn refuse_ipv4(&mut self) -> Option<OdpDrop> {
        let whose = self.read_ipv4();
        if whose == Whose::Foreign {
            return Some(OdpDrop::LockedIp);
        }
        self.bits.protocol = 8;
        match (whose, self.payload.protocol) {
            (Whose::Own, PROTOCOL_UDP) => self.refuse_udp(DHCP_SERVER),
            (Whose::Own, _) | (_, PROTOCOL_IGMP) => None,
            _ => Some(OdpDrop::LockedIp),
        }
    }

    fn refuse_ipv6(&mut self) -> Option<OdpDrop> {
        let whose = self.read_ipv6();
        if whose == Whose::Foreign {
            return Some(OdpDrop::LockedIp);
        }
        self.bits.protocol = 8;
        match (whose, self.payload.protocol) {
            (Whose::Own, PROTOCOL_UDP) => self.refuse_udp(DHCPV6_SERVER),
            (Whose::Own, PROTOCOL_ICMPV6) => self.refuse_icmpv6(),
            (Whose::Own, PROTOCOL_NONE) => {
                self.bits.fragment = 8;
                let hides = self.payload.fragment == FRAGMENT_FIRST;
                hides.then_some(OdpDrop::LockedFragment)
            }
            (Whose::Own, _) => None,
            (_, PROTOCOL_ICMPV6) => self.refuse_unspecified(),
            _ => Some(OdpDrop::LockedIp),
        }
    }

    /// Later fragments have no ports. They pass, since the first was dropped if the packet is a server's.
    fn refuse_udp(&mut self, server: u16) -> Option<OdpDrop> {
        let Payload { fragment, port, .. } = *self.payload;
        self.bits.fragment = 8;
        if fragment == FRAGMENT_LATER {
            return None;
        }
        // The datapath reads port 0 where a first fragment has no whole UDP header.
        let hidden = (fragment == FRAGMENT_FIRST).then_some(0);
        let told = [server].into_iter().chain(hidden).map(u16::to_be_bytes);
        self.bits.port = apart(port.to_be_bytes(), PORT_STEP, told);
        match port {
            _ if port == server => Some(OdpDrop::LockedDhcp),
            _ if hidden == Some(port) => Some(OdpDrop::LockedFragment),
            _ => None,
        }
    }

    /// ICMPv6 from an own address.
    fn refuse_icmpv6(&mut self) -> Option<OdpDrop> {
        self.bits.icmp_type = 8;
        match self.payload.icmp_type {
            ICMPV6_MISSING => Some(OdpDrop::LockedFragment),
            ICMPV6_ROUTER_ADVERTISEMENT | ICMPV6_REDIRECT => Some(OdpDrop::LockedRouter),
            ICMPV6_ADVERTISEMENT => self.refuse_target(),
            _ => None,
        }
    }

    /// ICMPv6 from `::`.
    fn refuse_unspecified(&mut self) -> Option<OdpDrop> {
        self.bits.icmp_type = 8;
        match self.payload.icmp_type {
            MLD_REPORT | MLD_DONE | MLDV2_REPORT => None,
            ICMPV6_SOLICITATION => self.refuse_target(),
            _ => Some(OdpDrop::LockedIp),
        }
    }

    fn refuse_target(&mut self) -> Option<OdpDrop> {
        self.bits.icmp_code = 8;
        if self.payload.icmp_code != 0 {
            // The datapath reads no target then, and nobody takes such a message (RFC 4861, section 7.1).
            return Some(OdpDrop::LockedNd);
        }
        let (lock, target) = (self.lock, self.payload.nd_target);
        let own = own_ipv6(lock).map(|own| own.octets());
        self.bits.nd_target = apart(target.octets(), ADDRESS_STEP, own);
        let foreign = own_ipv6(lock).all(|own| own != target);
        foreign.then_some(OdpDrop::LockedNd)
    }

    fn read_ipv4(&mut self) -> Whose {
        let (lock, source) = (self.lock, self.payload.ipv4);
        let told = own_ipv4(lock).chain([Ipv4Addr::UNSPECIFIED]).map(|told| told.octets());
        self.bits.ipv4 = apart(source.octets(), ADDRESS_STEP, told);
        match source {
            _ if own_ipv4(lock).any(|own| own == source) => Whose::Own,
            Ipv4Addr::UNSPECIFIED => Whose::Unspecified,
            _ => Whose::Foreign,
        }
    }

    fn read_ipv6(&mut self) -> Whose {
        let (lock, source) = (self.lock, self.payload.ipv6);
        let told = own_ipv6(lock).chain([Ipv6Addr::UNSPECIFIED]).map(|told| told.octets());
        self.bits.ipv6 = apart(source.octets(), ADDRESS_STEP, told);
        match source {
            _ if own_ipv6(lock).any(|own| own == source) => Whose::Own,
            Ipv6Addr::UNSPECIFIED => Whose::Unspecified,
            _ => Whose::Foreign,
        }
    }
}

fn own_ipv4(lock: &PortLock) -> impl Iterator<Item = Ipv4Addr> + '_ {
    lock.addresses.iter().filter_map(|address| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    })
}

fn own_ipv6(lock: &PortLock) -> impl Iterator<Item = Ipv6Addr> + '_ {
    let given = lock.addresses.iter().filter_map(|address| match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => Some(*address),
    });
    given.chain([lock.link_local()])
}

/// How many leading bits of a value tell it apart from all of these, in steps of so many bits; all of its bits if it
/// is one of them.
fn apart<const N: usize>(value: [u8; N], step: u32, told: impl IntoIterator<Item = [u8; N]>) -> u8 {
    let all = u8::BITS * u32::try_from(N).unwrap_or_default();
    let needed = told.into_iter().map(|told| (shared(value, told) + 1).min(all)).max();
    u8::try_from(needed.unwrap_or_default().next_multiple_of(step)).unwrap_or(u8::MAX)
}

/// How many leading bits two values share.
fn shared<const N: usize>(one: [u8; N], other: [u8; N]) -> u32 {
    let mut bits = 0;
    for (one, other) in one.into_iter().zip(other) {
        bits += (one ^ other).leading_zeros();
        if one != other {
            break;
        }
    }
    bits
}
