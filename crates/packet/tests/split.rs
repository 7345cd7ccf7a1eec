//! Super-packets cut by us, judged by `etherparse`.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{ACK, CWR, FIN, PSH, Spec, checksums_ok, payload, referee, segments, spec};
use etherparse::{NetHeaders, TransportHeader};
use proptest::prelude::*;
use weft_packet::split::{
    FragmentError, FrameChecksum, Kind, Plan, SplitError, finish_checksum, fragment_ipv4,
};
use weft_packet::vnet::{self, VnetHeader};
use weft_packet::vxlan::Rco;

fn check_segment(spec: &Spec, segment: &[u8], index: usize, last: bool, advance: usize) {
    let headers = referee(segment);
    match headers.net.unwrap() {
        NetHeaders::Ipv4(ip, _) => {
            assert_eq!(ip.identification, spec.id.wrapping_add(index as u16));
            assert_eq!(ip.dont_fragment, spec.df);
            assert_eq!((ip.time_to_live, ip.source), (spec.ttl, spec.source4()));
        }
        NetHeaders::Ipv6(ip, _) => {
            assert_eq!((ip.hop_limit, ip.traffic_class), (spec.ttl, spec.tos));
            assert_eq!(ip.flow_label.value(), spec.label);
        }
        NetHeaders::Arp(_) => unreachable!(),
    }
    match headers.transport.unwrap() {
        TransportHeader::Tcp(tcp) => {
            assert_eq!(tcp.sequence_number, spec.sequence.wrapping_add(advance as u32));
            assert_eq!(tcp.acknowledgment_number, spec.ack);
            assert_eq!(tcp.window_size, spec.window);
            assert_eq!(tcp.options.as_slice(), spec.options);
            assert_eq!(tcp.fin, last && spec.flags & FIN != 0);
            assert_eq!(tcp.psh, last && spec.flags & PSH != 0);
            assert_eq!(tcp.cwr, index == 0 && spec.flags & CWR != 0);
            assert!(tcp.ack && !tcp.syn && !tcp.rst && !tcp.urg);
        }
        TransportHeader::Udp(udp) => {
            assert_eq!([udp.source_port, udp.destination_port], spec.ports);
        }
        _ => unreachable!(),
    }
}

proptest! {
    #[test]
    fn every_segment_is_right(
        mut spec in spec(),
        flags in prop::sample::subsequence(vec![FIN, PSH, CWR], 0..=3),
        len in 1_usize..65_000,
        size in 100_u16..9000,
        mtu in 200_usize..9100,
        padding in prop::sample::select(vec![0_usize, 7]),
    ) {
        spec.flags = ACK | flags.iter().sum::<u8>();
        prop_assume!(usize::from(size) <= len && spec.header_len() + len <= 65_535);
        let data = payload(len, spec.ttl);
        let complete = spec.build(&data);
        let mut frame = complete.clone();
        spec.make_partial(&mut frame);
        frame.extend(std::iter::repeat_n(0, padding));
        let fits = spec.header_len() + usize::from(size) <= mtu + 14;
        let plan = match Plan::new(&spec.vnet(size), &frame, mtu) {
            Ok(plan) => plan,
            Err(SplitError::TooLong { packet, mtu: allowed }) => {
                prop_assert!(spec.udp && !fits);
                prop_assert_eq!(packet, spec.header_len() - spec.l3() + usize::from(size));
                prop_assert_eq!(allowed, mtu + 14 - spec.l3());
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        prop_assert!(fits || !spec.udp);
        prop_assert_eq!(plan.segment_len, usize::from(size).min(mtu + 14 - spec.header_len()));
        prop_assert_eq!(plan.header_len, spec.header_len());
        prop_assert_eq!(plan.frame_len, complete.len());
        let mut joined = Vec::new();
        for (index, segment) in segments(&plan, &frame, true).iter().enumerate() {
            prop_assert!(segment.len() <= mtu + 14);
            let last = index + 1 == plan.segments;
            check_segment(&spec, segment, index, last, joined.len());
            let piece = &segment[plan.header_len..];
            prop_assert!(last || piece.len() == plan.segment_len);
            prop_assert!(!piece.is_empty());
            joined.extend_from_slice(piece);
        }
        prop_assert!(joined == data);
    }

    /// A receiver that finishes the partial checksum gets the same frame as from a sender that finishes it.
    #[test]
    fn partial_segments_finish_to_the_same(spec in spec(), len in 1_usize..20_000, size in 500_u16..1400) {
        prop_assume!(usize::from(size) <= len);
        let mut frame = spec.build(&payload(len, 1));
        spec.make_partial(&mut frame);
        let plan = Plan::new(&spec.vnet(size), &frame, 1500).unwrap();
        let (start, offset) = (spec.l4() as u16, spec.checksum_offset() as u16);
        prop_assert_eq!(plan.checksum, FrameChecksum::Partial { start, offset });
        prop_assert_eq!(plan.rco(), Rco::new(start, offset));
        prop_assert_eq!(FrameChecksum::from(plan.rco()), plan.checksum);
        let vnet = VnetHeader { gso_type: vnet::GSO_NONE, ..spec.vnet(0) };
        let partial = segments(&plan, &frame, false);
        for (mut partial, finished) in partial.into_iter().zip(segments(&plan, &frame, true)) {
            finish_checksum(&vnet, &mut partial).unwrap();
            prop_assert_eq!(partial, finished);
        }
    }

    #[test]
    fn whole_frames(spec in spec(), len in 0_usize..1300, partial: bool) {
        let complete = spec.build(&payload(len, 5));
        let mut frame = complete.clone();
        let mut vnet = VnetHeader::default();
        if partial {
            spec.make_partial(&mut frame);
            vnet = VnetHeader { gso_type: vnet::GSO_NONE, ..spec.vnet(0) };
        }
        let mtu = frame.len() - 14;
        let plan = Plan::new(&vnet, &frame, mtu).unwrap();
        prop_assert_eq!((plan.kind, plan.segments, plan.frame_len), (Kind::Whole, 1, frame.len()));
        prop_assert_eq!(plan.rco().is_some(), partial);
        prop_assert_eq!(&segments(&plan, &frame, false), &[frame.clone()]);
        prop_assert_eq!(&segments(&plan, &frame, true), &[complete]);
        let packet = frame.len() - spec.l3();
        prop_assert_eq!(
            Plan::new(&vnet, &frame, mtu - 1).unwrap_err(),
            SplitError::TooLong { packet, mtu: packet - 1 }
        );
    }

    #[test]
    fn fragments_join_to_the_packet(
        hosts: [u8; 2],
        id: u16,
        len in 0_usize..20_000,
        mtu in 68_usize..1600,
        options in prop::collection::vec(prop::sample::select(vec![
            vec![1], vec![0x82, 4, 9, 9], vec![0x07, 7, 4, 1, 2, 3, 4], vec![0x88, 4, 0, 1],
        ]), 0..4),
        more: bool,
        offset in 0_u16..1000,
    ) {
        let mut header = etherparse::Ipv4Header::new(
            0, 64, etherparse::IpNumber::UDP, [10, 0, 0, hosts[0]], [10, 0, 0, hosts[1]],
        ).unwrap();
        let mut bytes = options.concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        header.options = bytes[..].try_into().unwrap();
        header.identification = id;
        header.dont_fragment = false;
        header.more_fragments = more;
        header.fragment_offset = offset.try_into().unwrap();
        let len = if more { len / 8 * 8 } else { len };
        header.set_payload_len(len).unwrap();
        header.header_checksum = header.calc_header_checksum();
        let data = payload(len, 3);
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
        header.write(&mut frame).unwrap();
        frame.extend_from_slice(&data);

        let mut got = Vec::new();
        let count = fragment_ipv4(&frame, mtu, |fragment| got.push(fragment.to_vec())).unwrap();
        prop_assert_eq!(count, got.len());
        if frame.len() <= mtu + 14 {
            prop_assert_eq!(got, vec![frame]);
            return Ok(());
        }
        let copied: Vec<u8> = options.iter().filter(|o| o[0] & 0x80 != 0).flatten().copied().collect();
        let mut joined = Vec::new();
        for (index, fragment) in got.iter().enumerate() {
            prop_assert!(fragment.len() <= mtu + 14);
            prop_assert_eq!(&fragment[..14], &frame[..14]);
            let (ip, rest) = etherparse::Ipv4Header::from_slice(&fragment[14..]).unwrap();
            prop_assert_eq!(ip.header_checksum, ip.calc_header_checksum());
            prop_assert_eq!(usize::from(ip.total_len), fragment.len() - 14);
            prop_assert_eq!(usize::from(ip.fragment_offset.value()), usize::from(offset) + joined.len() / 8);
            let last = index + 1 == got.len();
            prop_assert_eq!(ip.more_fragments, more || !last);
            prop_assert!(last || rest.len() % 8 == 0);
            prop_assert_eq!(ip.identification, id);
            if index == 0 {
                prop_assert_eq!(&ip.options[..], &bytes[..]);
            } else {
                prop_assert_eq!(&ip.options[..copied.len()], &copied[..]);
                prop_assert!(ip.options[copied.len()..].iter().all(|byte| *byte == 0));
                prop_assert!(ip.options.len() < copied.len() + 4);
            }
            joined.extend_from_slice(rest);
        }
        prop_assert_eq!(joined, data);
    }
}

fn tcp4() -> Spec {
    Spec {
        vlan: None,
        v6: false,
        udp: false,
        hosts: [1, 2],
        ports: [40_000, 5201],
        tos: 0,
        ttl: 64,
        id: 7,
        df: true,
        label: 0,
        sequence: u32::MAX - 100,
        ack: 5,
        window: 500,
        flags: ACK,
        options: vec![],
    }
}

#[test]
fn bad_super_packets_are_refused() {
    let spec = tcp4();
    let mut frame = spec.build(&payload(4000, 0));
    spec.make_partial(&mut frame);
    let good = spec.vnet(1000);
    let error = |vnet: VnetHeader, frame: &[u8]| Plan::new(&vnet, frame, 1500).unwrap_err();
    let size = |size| SplitError::BadSegmentSize { size, payload: 4000 };
    assert_eq!(error(VnetHeader { gso_size: 0, ..good }, &frame), size(0));
    assert_eq!(error(VnetHeader { gso_size: 4001, ..good }, &frame), size(4001));
    let unknown = |kind| error(VnetHeader { gso_type: kind, ..good }, &frame);
    assert_eq!(unknown(3), SplitError::UnknownType(3));
    assert_eq!(unknown(2 | vnet::GSO_ECN), SplitError::UnknownType(2));
    assert_eq!(unknown(vnet::GSO_TCPV6), SplitError::Malformed);
    assert_eq!(unknown(vnet::GSO_UDP_L4), SplitError::Malformed);
    let mark = |start, offset| SplitError::BadChecksumMark { start, offset };
    assert_eq!(error(VnetHeader { flags: 0, ..good }, &frame), mark(34, 16));
    assert_eq!(error(VnetHeader { csum_start: 36, ..good }, &frame), mark(36, 16));
    assert_eq!(error(VnetHeader { csum_offset: 6, ..good }, &frame), mark(34, 6));
    assert_eq!(
        error(VnetHeader { gso_size: 2, ..good }, &frame),
        SplitError::TooManySegments(2000)
    );
    assert_eq!(error(good, &frame[..4000]), SplitError::Malformed);
    assert_eq!(
        Plan::new(&good, &frame, 40).unwrap_err(),
        SplitError::TooLong { packet: 1040, mtu: 40 }
    );
    assert_eq!(Plan::new(&good, &frame, usize::MAX).unwrap().segments, 4);
}

#[test]
fn bad_marks_on_whole_frames_are_refused() {
    let frame = tcp4().build(&payload(100, 0));
    for (csum_start, csum_offset) in [(0, 16), (34, 200), (153, 0), (u16::MAX, 6), (34, u16::MAX)] {
        let vnet = VnetHeader { flags: 1, csum_start, csum_offset, ..VnetHeader::default() };
        let expected = SplitError::BadChecksumMark { start: csum_start, offset: csum_offset };
        assert_eq!(Plan::new(&vnet, &frame, 1500).unwrap_err(), expected);
        assert_eq!(finish_checksum(&vnet, &mut frame.clone()).unwrap_err(), expected);
    }
    assert_eq!(
        Plan::new(&VnetHeader::default(), &frame[..13], 1500).unwrap_err(),
        SplitError::Malformed
    );
}

/// A checksum inside a tunnel of the container's own is finished and not marked, since a receiver
/// takes no mark that it cannot check.
#[test]
fn a_nested_checksum_is_finished() {
    let inner = tcp4().build(&payload(50, 9));
    let mut partial = inner.clone();
    tcp4().make_partial(&mut partial);
    let outer = Spec { udp: true, ..tcp4() };
    let mut frame = outer.build(&partial);
    frame[40..42].fill(0);
    let start = (outer.header_len() + 34) as u16;
    let vnet = VnetHeader { flags: 1, csum_start: start, csum_offset: 16, ..VnetHeader::default() };
    let plan = Plan::new(&vnet, &frame, 1500).unwrap();
    assert_eq!(plan.rco(), None);
    assert!(matches!(plan.checksum, FrameChecksum::Partial { .. }));
    let sent = segments(&plan, &frame, true).remove(0);
    assert_eq!(sent[outer.header_len()..], inner);
}

#[test]
fn frames_that_cannot_be_fragmented_are_refused() {
    let frame = tcp4().build(&payload(1000, 0));
    let none = |_: &[u8]| panic!("nothing is to be sent");
    assert_eq!(fragment_ipv4(&frame, 500, none), Err(FragmentError::DontFragment));
    let free = Spec { df: false, ..tcp4() }.build(&payload(1000, 0));
    assert_eq!(fragment_ipv4(&free, 27, none), Err(FragmentError::MtuTooSmall(27)));
    assert!(fragment_ipv4(&free, 28, |_| {}).is_ok());
    let six = Spec { v6: true, ..tcp4() }.build(&payload(1000, 0));
    assert_eq!(fragment_ipv4(&six, 500, none), Err(FragmentError::NotIpv4));
}

/// IPv4 options stand in every segment, and its header checksum counts them.
#[test]
fn a_super_packet_with_ip_options() {
    let spec = tcp4();
    let mut frame = spec.build(&payload(3000, 0));
    spec.make_partial(&mut frame);
    frame.splice(34..34, [0x94, 4, 0, 0]);
    frame[14] = 0x46;
    let total = (frame.len() - 14) as u16;
    frame[16..18].copy_from_slice(&total.to_be_bytes());
    let vnet = VnetHeader { csum_start: 38, ..spec.vnet(1000) };
    let plan = Plan::new(&vnet, &frame, 1500).unwrap();
    assert_eq!((plan.header_len, plan.segments), (58, 3));
    for segment in segments(&plan, &frame, true) {
        let headers = referee(&segment);
        let Some(NetHeaders::Ipv4(ip, _)) = headers.net else { panic!("no IPv4") };
        assert_eq!(ip.options[..], [0x94, 4, 0, 0]);
    }
}

/// A wrong sum that a container writes to the field of a partial checksum is not corrected on the way. The
/// field holds the checksum's result, and no mark leaves it to a receiver that would compute it again.
#[test]
fn a_wrong_partial_sum_stays_wrong() {
    for v6 in [false, true] {
        for udp in [false, true] {
            let spec = Spec { udp, v6, ..tcp4() };
            let data = payload(3000, 0);
            let right = spec.build(&data);
            let mut frame = right.clone();
            spec.make_partial(&mut frame);
            let field = spec.l4() + spec.checksum_offset();
            frame[field] ^= 0x10;
            let whole = VnetHeader { gso_type: vnet::GSO_NONE, ..spec.vnet(0) };
            for vnet in [whole, spec.vnet(1000)] {
                let plan = Plan::new(&vnet, &frame, 3100).unwrap();
                assert_eq!(plan.rco(), None);
                for segment in segments(&plan, &frame, true) {
                    assert!(!checksums_ok(&segment), "{vnet:?}");
                }
            }
        }
    }
}

/// The checksum of a packet with a routing header is that for its final destination, which stands elsewhere.
/// The kernel's value in the field takes account of it.
#[test]
fn a_super_packet_with_a_routing_header() {
    let spec = Spec { v6: true, ..tcp4() };
    // Type 2 (RFC 6275 section 6.4): one address, to go to.
    let mut routing = vec![6, 2, 2, 1, 0, 0, 0, 0];
    routing.extend_from_slice(&spec.destination6());
    let mut frame = spec.build(&payload(3000, 0));
    spec.make_partial(&mut frame);
    frame.splice(54..54, routing);
    frame[20] = 43;
    frame[53] = 0xaa;
    let length = (frame.len() - 54) as u16;
    frame[18..20].copy_from_slice(&length.to_be_bytes());
    let vnet = VnetHeader { csum_start: 78, ..spec.vnet(1000) };
    let plan = Plan::new(&vnet, &frame, 1500).unwrap();
    assert_eq!((plan.header_len, plan.segments, plan.rco()), (98, 3, None));
    for mut segment in segments(&plan, &frame, true) {
        // As it arrives: at its final destination, without the routing header.
        segment.drain(54..78);
        segment[20] = 6;
        segment[38..54].copy_from_slice(&spec.destination6());
        segment[18..20].copy_from_slice(&1020_u16.to_be_bytes());
        referee(&segment);
    }
}

/// A UDP checksum that comes out as 0 is sent as 0xFFFF, since 0 means that there is none.
#[test]
fn udp_checksums_are_never_zero() {
    for v6 in [false, true] {
        let spec = Spec { udp: true, v6, ..tcp4() };
        let field = spec.l4() + 6;
        let sum = spec.build(&[0; 100])[field..field + 2].to_vec();
        let data = [sum, vec![0; 98]].concat();
        let mut frame = spec.build(&data);
        assert_eq!(frame[field..field + 2], [0xff, 0xff]);
        let complete = frame.clone();
        spec.make_partial(&mut frame);
        for gso_type in [spec.gso(), vnet::GSO_NONE] {
            let vnet = VnetHeader { gso_type, ..spec.vnet(100) };
            let plan = Plan::new(&vnet, &frame, 1500).unwrap();
            assert_eq!(segments(&plan, &frame, true), std::slice::from_ref(&complete));
        }
    }
}
