//! Frames made by `etherparse`, and what the tests know of them without our own code.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::ops::Range;

use etherparse::{
    IpNumber, Ipv4Header, Ipv6FlowLabel, Ipv6Header, NetHeaders, PacketBuilder, PacketHeaders,
    TcpHeader, TransportHeader, VlanId,
};
use proptest::prelude::*;
use weft_packet::coalesce::{Coalescer, Full};
use weft_packet::layout::{Layout, Opaque};
use weft_packet::split::{FrameChecksum, Plan};
use weft_packet::vnet::{self, VnetHeader};

/// Looks for the headers of the frame at `range`, and pushes it.
pub fn push(
    coalescer: &mut Coalescer,
    arena: &[u8],
    range: Range<u32>,
    checksum: FrameChecksum,
) -> Result<(), Full> {
    let frame = arena.get(range.start as usize..range.end as usize);
    let headers = frame.map_or(Err(Opaque::Short), Layout::parse);
    coalescer.push(arena, range, &headers, checksum)
}

/// The description from which a frame is built.
#[derive(Clone, Debug)]
pub struct Spec {
    pub vlan: Option<u16>,
    pub v6: bool,
    pub udp: bool,
    pub hosts: [u8; 2],
    pub ports: [u16; 2],
    pub tos: u8,
    pub ttl: u8,
    pub id: u16,
    pub df: bool,
    pub label: u32,
    pub sequence: u32,
    pub ack: u32,
    pub window: u16,
    pub flags: u8,
    pub options: Vec<u8>,
}

pub const FIN: u8 = 1;
pub const SYN: u8 = 2;
pub const PSH: u8 = 8;
pub const ACK: u8 = 16;
pub const CWR: u8 = 128;

/// Any TCP or UDP packet, with flags ACK alone.
pub fn spec() -> impl Strategy<Value = Spec> {
    let link = (prop::option::of(0_u16..4096), any::<bool>(), any::<bool>());
    let ends = (any::<[u8; 2]>(), any::<[u16; 2]>());
    let network = (any::<u8>(), 1_u8.., any::<u16>(), any::<bool>(), 0_u32..1 << 20);
    let words = prop::collection::vec(any::<[u8; 4]>(), 0..=10);
    let transport = (any::<u32>(), any::<u32>(), any::<u16>(), words);
    (link, ends, network, transport).prop_map(
        |((vlan, v6, udp), (hosts, ports), (tos, ttl, id, df, label), rest)| {
            let (sequence, ack, window, words) = rest;
            let (flags, options) = (ACK, words.concat());
            Spec {
                vlan,
                v6,
                udp,
                hosts,
                ports,
                tos,
                ttl,
                id,
                df,
                label,
                sequence,
                ack,
                window,
                flags,
                options,
            }
        },
    )
}

impl Spec {
    pub fn l3(&self) -> usize {
        14 + if self.vlan.is_some() { 4 } else { 0 }
    }

    pub fn l4(&self) -> usize {
        self.l3() + if self.v6 { 40 } else { 20 }
    }

    pub fn header_len(&self) -> usize {
        self.l4() + if self.udp { 8 } else { 20 + self.options.len() }
    }

    pub fn checksum_offset(&self) -> usize {
        if self.udp { 6 } else { 16 }
    }

    /// The type of super-packet.
    pub fn gso(&self) -> u8 {
        match (self.udp, self.v6) {
            (true, _) => vnet::GSO_UDP_L4,
            (false, false) => vnet::GSO_TCPV4,
            (false, true) => vnet::GSO_TCPV6,
        }
    }

    pub fn source4(&self) -> [u8; 4] {
        [10, 32, 0, self.hosts[0]]
    }

    pub fn destination4(&self) -> [u8; 4] {
        [10, 32, 1, self.hosts[1]]
    }

    pub fn source6(&self) -> [u8; 16] {
        [0xfd, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, self.hosts[0]]
    }

    pub fn destination6(&self) -> [u8; 16] {
        [0xfd, 0, 9, 9, 9, 9, 5, 6, 7, 8, 9, 10, 11, 12, 14, self.hosts[1]]
    }

    /// The frame, checksums complete.
    pub fn build(&self, payload: &[u8]) -> Vec<u8> {
        let network = if self.v6 {
            let header = Ipv6Header {
                traffic_class: self.tos,
                flow_label: Ipv6FlowLabel::try_new(self.label).unwrap(),
                hop_limit: self.ttl,
                source: self.source6(),
                destination: self.destination6(),
                ..Ipv6Header::default()
            };
            NetHeaders::Ipv6(header, etherparse::Ipv6Extensions::default())
        } else {
            let mut header =
                Ipv4Header::new(0, self.ttl, IpNumber::TCP, self.source4(), self.destination4())
                    .unwrap();
            header.dscp = (self.tos >> 2).try_into().unwrap();
            header.ecn = (self.tos & 3).try_into().unwrap();
            header.identification = self.id;
            header.dont_fragment = self.df;
            NetHeaders::Ipv4(header, etherparse::Ipv4Extensions::default())
        };
        let ip = network.try_into_ip();
        let (source, destination) =
            ([2, 0, 0, 0, 0, self.hosts[0]], [2, 0, 0, 0, 1, self.hosts[1]]);
        let ethernet = PacketBuilder::ethernet2(source, destination);
        let builder = match self.vlan {
            Some(vlan) => ethernet.single_vlan(VlanId::try_new(vlan).unwrap()).ip(ip),
            None => ethernet.ip(ip),
        };
        let mut frame = Vec::new();
        if self.udp {
            builder.udp(self.ports[0], self.ports[1]).write(&mut frame, payload).unwrap();
        } else {
            builder.tcp_header(self.tcp_header()).write(&mut frame, payload).unwrap();
        }
        frame
    }

    fn tcp_header(&self) -> TcpHeader {
        let mut header = TcpHeader::new(self.ports[0], self.ports[1], self.sequence, self.window);
        let bit = |bit: u8| self.flags & bit != 0;
        header.acknowledgment_number = self.ack;
        (header.fin, header.syn, header.rst, header.psh) = (bit(1), bit(2), bit(4), bit(8));
        (header.ack, header.urg, header.ece, header.cwr) = (bit(16), bit(32), bit(64), bit(128));
        header.set_options_raw(&self.options).unwrap();
        header
    }

    /// Replaces the transport checksum by the pseudo-header's sum, as the kernel leaves it.
    pub fn make_partial(&self, frame: &mut [u8]) {
        let (l3, l4) = (self.l3(), self.l4());
        let addresses = if self.v6 { l3 + 8..l3 + 40 } else { l3 + 12..l3 + 20 };
        let mut sum = (frame.len() - l4) as u32 + if self.udp { 17 } else { 6 };
        for pair in frame[addresses].chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        let field = l4 + self.checksum_offset();
        frame[field..field + 2].copy_from_slice(&(sum as u16).to_be_bytes());
    }

    /// The kernel's header for the frame as a super-packet; `hdr_len` is wrong on purpose.
    pub fn vnet(&self, gso_size: u16) -> VnetHeader {
        VnetHeader {
            flags: vnet::F_NEEDS_CSUM,
            gso_type: self.gso(),
            hdr_len: 3,
            gso_size,
            csum_start: self.l4() as u16,
            csum_offset: self.checksum_offset() as u16,
        }
    }
}

trait TryIntoIp {
    fn try_into_ip(self) -> etherparse::IpHeaders;
}

impl TryIntoIp for NetHeaders {
    fn try_into_ip(self) -> etherparse::IpHeaders {
        match self {
            Self::Ipv4(header, extensions) => etherparse::IpHeaders::Ipv4(header, extensions),
            Self::Ipv6(header, extensions) => etherparse::IpHeaders::Ipv6(header, extensions),
            Self::Arp(_) => unreachable!(),
        }
    }
}

/// Bytes that tell their place.
pub fn payload(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

/// Every segment of a plan, as a frame.
pub fn segments(plan: &Plan, frame: &[u8], finish: bool) -> Vec<Vec<u8>> {
    (0..plan.segments)
        .map(|index| {
            let mut out = vec![0xee; plan.header_len];
            assert_eq!(plan.write_header(frame, index, finish, &mut out), plan.header_len);
            out.extend_from_slice(&frame[plan.payload(index)]);
            assert_eq!(out.len(), plan.segment_frame_len(index));
            out
        })
        .collect()
}

/// Whether `etherparse` finds the transport checksum of a frame right.
pub fn checksums_ok(frame: &[u8]) -> bool {
    let headers = PacketHeaders::from_ethernet_slice(frame).unwrap();
    let (sent, payload) = (headers.transport.unwrap(), headers.payload.slice());
    let mut right = sent.clone();
    match headers.net.unwrap() {
        NetHeaders::Ipv4(ip, _) => right.update_checksum_ipv4(&ip, payload).unwrap(),
        NetHeaders::Ipv6(ip, _) => right.update_checksum_ipv6(&ip, payload).unwrap(),
        NetHeaders::Arp(_) => unreachable!(),
    }
    right == sent
}

/// Parses a frame with `etherparse` and checks every length and checksum in it.
pub fn referee(frame: &[u8]) -> PacketHeaders<'_> {
    let headers = PacketHeaders::from_ethernet_slice(frame).unwrap();
    let payload = headers.payload.slice();
    let transport = headers.transport.as_ref().unwrap();
    let transport_len = transport.header_len() + payload.len();
    match headers.net.as_ref().unwrap() {
        NetHeaders::Ipv4(ip, _) => {
            assert_eq!(usize::from(ip.total_len), ip.header_len() + transport_len);
            assert_eq!(ip.header_checksum, ip.calc_header_checksum());
            match transport {
                TransportHeader::Tcp(tcp) => {
                    let (source, destination) = (ip.source, ip.destination);
                    let sum = tcp.calc_checksum_ipv4_raw(source, destination, payload).unwrap();
                    assert_eq!(tcp.checksum, sum);
                }
                TransportHeader::Udp(udp) => {
                    let (source, destination) = (ip.source, ip.destination);
                    let sum = udp.calc_checksum_ipv4_raw(source, destination, payload).unwrap();
                    assert_eq!(udp.checksum, sum);
                    assert_eq!(usize::from(udp.length), transport_len);
                }
                _ => {}
            }
        }
        NetHeaders::Ipv6(ip, _) => match transport {
            TransportHeader::Tcp(tcp) => {
                let (source, destination) = (ip.source, ip.destination);
                let sum = tcp.calc_checksum_ipv6_raw(source, destination, payload).unwrap();
                assert_eq!(tcp.checksum, sum);
                assert_eq!(usize::from(ip.payload_length), transport_len);
            }
            TransportHeader::Udp(udp) => {
                let (source, destination) = (ip.source, ip.destination);
                let sum = udp.calc_checksum_ipv6_raw(source, destination, payload).unwrap();
                assert_eq!(udp.checksum, sum);
                assert_eq!(usize::from(udp.length), transport_len);
            }
            _ => {}
        },
        NetHeaders::Arp(_) => panic!("ARP has no transport"),
    }
    headers
}
