//! Congestion marks through the tunnel, judged by `etherparse` and by the coalescer.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{ACK, CWR, Spec, payload, push, referee, segments, spec};
use etherparse::{NetHeaders, TransportHeader};
use proptest::prelude::*;
use weft_packet::coalesce::Coalescer;
use weft_packet::ecn::{self, CeOverNotEct, Ecn};
use weft_packet::layout::Layout;
use weft_packet::split::{FrameChecksum, Plan};
use weft_packet::vnet::{self, VnetHeader};
use weft_packet::{arp, ethernet};

fn tcp(v6: bool, tos: u8) -> Spec {
    Spec {
        vlan: None,
        v6,
        udp: false,
        hosts: [1, 2],
        ports: [40_000, 5201],
        tos,
        ttl: 64,
        id: 7,
        df: true,
        label: 0xf_ffff,
        sequence: 1000,
        ack: 5,
        window: 500,
        flags: ACK,
        options: Vec::new(),
    }
}

/// The TOS or traffic class as `etherparse` reads it.
fn read_tos(frame: &[u8]) -> u8 {
    match referee(frame).net.unwrap() {
        NetHeaders::Ipv4(ip, _) => ip.dscp.value() << 2 | ip.ecn.value(),
        NetHeaders::Ipv6(ip, _) => ip.traffic_class,
        NetHeaders::Arp(_) => unreachable!(),
    }
}

fn tos(frame: &[u8]) -> u8 {
    ecn::tos(frame, &Layout::parse(frame))
}

/// A frame with a second, outer VLAN tag.
fn double_tagged(frame: &[u8]) -> Vec<u8> {
    let tag = [0x88, 0xa8, 0, 9];
    [&frame[..12], &tag, &frame[12..]].concat()
}

proptest! {
    /// For any packet, header, mark and tags before it: figure 4 of RFC 6040, and not one other bit but the IPv4
    /// checksum.
    #[test]
    fn a_mark_changes_the_ecn_field_and_nothing_else(mut spec in spec(), outer: u8, double: bool) {
        spec.options.clear();
        let frame = spec.build(b"payload");
        let (tagged, at) = if double { (double_tagged(&frame), 4) } else { (frame, 0) };
        prop_assert_eq!(tos(&tagged), spec.tos);
        let mut marked = tagged.clone();
        let wanted = ecn::decapsulated(Ecn::of(spec.tos), Ecn::of(outer));
        prop_assert_eq!(ecn::decapsulate(&mut marked, outer), wanted.map(|_| ()));
        let Ok(inner) = wanted else {
            prop_assert_eq!(marked, tagged);
            return Ok(());
        };
        let bare = [&marked[..12], &marked[12 + at..]].concat();
        let tos = spec.tos & !ecn::MASK | inner.bits();
        prop_assert_eq!(read_tos(&bare), tos);
        prop_assert_eq!(bare, Spec { tos, ..spec }.build(b"payload"));
    }

    #[test]
    fn random_bytes_panic_nothing(mut bytes: Vec<u8>, ip: bool, outer: u8) {
        if ip && bytes.len() > 14 {
            bytes[12..14].copy_from_slice(&ethernet::TYPE_IPV6.to_be_bytes());
        }
        let _ = tos(&bytes);
        let _ = ecn::decapsulate(&mut bytes, outer);
    }
}

#[test]
fn a_header_with_a_wrong_checksum_is_not_made_right() {
    let mut frame = tcp(false, 2).build(b"payload");
    frame[24] ^= 0x40;
    let mut right = tcp(false, 3).build(b"payload");
    right[24] ^= 0x40;
    ecn::decapsulate(&mut frame, 3).unwrap();
    assert_eq!(frame, right);
}

#[test]
fn other_protocols_are_not_ecn_capable() {
    let mut request = vec![0; ethernet::LEN + arp::LEN];
    ethernet::write(&mut request, ethernet::BROADCAST, [2, 0, 0, 0, 0, 1], ethernet::TYPE_ARP);
    let mut lying = tcp(false, 2).build(b"payload");
    lying[12..14].copy_from_slice(&ethernet::TYPE_IPV6.to_be_bytes());
    let short = tcp(true, 2).build(b"")[..53].to_vec();
    for mut frame in [request, lying, short, vec![2; 13], Vec::new()] {
        let before = frame.clone();
        assert_eq!(tos(&frame), 0, "{frame:?}");
        assert_eq!(ecn::decapsulate(&mut frame, 3), Err(CeOverNotEct));
        assert_eq!(ecn::decapsulate(&mut frame, 1), Ok(()));
        assert_eq!(frame, before);
    }
}

/// A stream of which one frame was marked on its way: the mark stays with that frame alone.
#[test]
fn a_marked_frame_is_merged_with_none_that_is_not() {
    for v6 in [false, true] {
        let mut arena = Vec::new();
        let mut ranges = Vec::new();
        for index in 0..6_u32 {
            let spec = Spec { sequence: 1000 + index * 200, ..tcp(v6, 2) };
            let mut frame = spec.build(&payload(200, index as u8));
            // Frames 2 and 3 met a queue.
            let outer = if (2..4).contains(&index) { 3 } else { 2 };
            ecn::decapsulate(&mut frame, outer).unwrap();
            ranges.push(arena.len() as u32..(arena.len() + frame.len()) as u32);
            arena.extend(frame);
        }
        let mut coalescer = Coalescer::new();
        for range in ranges {
            push(&mut coalescer, &arena, range, FrameChecksum::Complete).unwrap();
        }
        let mut merged = Vec::new();
        coalescer.flush(&arena, |result| {
            merged.push((result.frames, tos(result.header)));
        });
        assert_eq!(merged, [(2, 2), (2, 3), (2, 2)], "IPv6 {v6}");
    }
}

/// "The window was reduced" is said once, with the first segment (RFC 3168 section 6.1.2), and every
/// segment has the ECN field of the super-packet.
#[test]
fn a_super_packet_says_once_that_the_window_was_reduced() {
    for (v6, bit) in [(false, vnet::GSO_ECN), (false, 0), (true, vnet::GSO_ECN), (true, 0)] {
        let spec = Spec { flags: ACK | CWR, ..tcp(v6, 0xb8 | 2) };
        let mut frame = spec.build(&payload(3000, 1));
        spec.make_partial(&mut frame);
        let vnet = VnetHeader { gso_type: spec.gso() | bit, ..spec.vnet(1000) };
        let plan = Plan::new(&vnet, &frame, 1388).unwrap();
        let cut = segments(&plan, &frame, true);
        let reduced: Vec<bool> = cut
            .iter()
            .map(|segment| {
                assert_eq!(read_tos(segment), 0xb8 | 2);
                match referee(segment).transport.unwrap() {
                    TransportHeader::Tcp(tcp) => tcp.cwr,
                    _ => unreachable!(),
                }
            })
            .collect();
        assert_eq!(reduced, [true, false, false], "IPv6 {v6}, ECN bit {bit:#x}");
    }
}
