//! Views of single headers, probes and ICMP answers, judged by `etherparse`; and nothing panics.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::net::Ipv6Addr;

use common::{ACK, Spec, payload, push, referee, spec};
use etherparse::{
    Icmpv4Type, Icmpv6Type, IpNumber, NetHeaders, PacketBuilder, PacketHeaders, TransportHeader,
    icmpv4, icmpv6,
};
use proptest::prelude::*;
use weft_packet::coalesce::Coalescer;
use weft_packet::layout::{Layout, Network, Opaque, Transport, flow_hash};
use weft_packet::split::{FrameChecksum, Plan, fragment_ipv4};
use weft_packet::toobig::{self, NoAnswer};
use weft_packet::vnet::VnetHeader;
use weft_packet::{arp, esp, ethernet, icmp, ipv4, ipv6, probe, tcp, udp, vxlan};

proptest! {
    #[test]
    fn views_read_what_etherparse_wrote(spec in spec(), len in 0_usize..100, flags: u8) {
        let spec = Spec { flags, ..spec };
        let frame = spec.build(&payload(len, 0));
        let link = ethernet::Header::parse(&frame).unwrap();
        prop_assert_eq!(link.vlan(), spec.vlan);
        prop_assert_eq!(link.header_len(), spec.l3());
        prop_assert_eq!(link.source(), [2, 0, 0, 0, 0, spec.hosts[0]]);
        prop_assert_eq!(link.destination(), [2, 0, 0, 0, 1, spec.hosts[1]]);
        let packet = &frame[spec.l3()..];
        if spec.v6 {
            prop_assert_eq!(link.ethertype(), ethernet::TYPE_IPV6);
            let ip = ipv6::Header::parse(packet).unwrap();
            prop_assert_eq!((ip.traffic_class(), ip.flow_label(), ip.hop_limit()), (spec.tos, spec.label, spec.ttl));
            prop_assert_eq!(ip.source().octets(), spec.source6());
            prop_assert_eq!(ip.destination().octets(), spec.destination6());
            prop_assert_eq!(ip.total_len(), packet.len());
        } else {
            prop_assert_eq!(link.ethertype(), ethernet::TYPE_IPV4);
            let ip = ipv4::Header::parse(packet).unwrap();
            prop_assert_eq!((ip.tos(), ip.id(), ip.ttl()), (spec.tos, spec.id, spec.ttl));
            prop_assert_eq!(ip.dont_fragment(), spec.df);
            prop_assert!(ip.checksum_ok() && !ip.is_fragment());
            prop_assert_eq!(ip.source().octets(), spec.source4());
            prop_assert_eq!(ip.destination().octets(), spec.destination4());
            prop_assert_eq!(ip.total_len(), packet.len());
        }
        let rest = &frame[spec.l4()..];
        if spec.udp {
            let header = udp::Header::parse(rest).unwrap();
            prop_assert_eq!([header.source_port, header.destination_port], spec.ports);
            prop_assert_eq!(usize::from(header.length), rest.len());
        } else {
            let header = tcp::Header::parse(rest).unwrap();
            prop_assert_eq!([header.source_port(), header.destination_port()], spec.ports);
            prop_assert_eq!((header.sequence(), header.acknowledgement()), (spec.sequence, spec.ack));
            prop_assert_eq!((header.flags(), header.window()), (flags, spec.window));
            prop_assert_eq!(header.options(), &spec.options[..]);
        }
        let layout = Layout::parse(&frame).unwrap();
        prop_assert_eq!(layout, Layout {
            l3: spec.l3(),
            l4: spec.l4(),
            payload: spec.header_len(),
            end: frame.len(),
            network: if spec.v6 { Network::V6 } else { Network::V4 },
            transport: if spec.udp { Transport::Udp } else { Transport::Tcp },
            plain: true,
        });
        prop_assert!(layout.checksum_ok(&frame));
    }

    #[test]
    fn flow_hash_is_one_per_flow(spec in spec(), other: u32, len in 0_usize..50) {
        let a = spec.build(&payload(len, 0));
        let changed = Spec { sequence: other, ack: other, id: other as u16, ttl: 9, ..spec.clone() };
        prop_assert_eq!(hash(&a), hash(&changed.build(&payload(7, 1))));
        let elsewhere = Spec { ports: [spec.ports[0] ^ 1, spec.ports[1]], ..spec };
        prop_assert_ne!(hash(&a), hash(&elsewhere.build(&[])));
    }

    #[test]
    fn probes_are_valid_packets(
        source: u128, destination: u128, number: u64, mtu in probe::MTU_MIN..9200, bit: prop::sample::Index,
    ) {
        let (source, destination) = (Ipv6Addr::from(source), Ipv6Addr::from(destination));
        let mut frame = vec![0xff; usize::from(mtu) + 20];
        let (from, to) = ([2, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2]);
        let len = probe::write(&mut frame, from, to, source, destination, number, mtu).unwrap();
        frame.truncate(len);
        prop_assert_eq!(len, usize::from(mtu) + 14);
        let headers = referee(&frame);
        let link = headers.link.unwrap().ethernet2().unwrap();
        prop_assert_eq!((link.source, link.destination), (from, to));
        let TransportHeader::Udp(header) = headers.transport.unwrap() else { panic!("no UDP") };
        prop_assert_eq!(header.destination_port, probe::PORT);
        prop_assert_eq!(probe::parse_payload(headers.payload.slice()), Some(number));
        prop_assert_eq!(probe::parse(&frame), Some((number, mtu)));
        // Any flipped bit that the checksum covers is found out.
        let covered: Vec<usize> = (14 + 8..len).collect();
        frame[*bit.get(&covered)] ^= 4;
        prop_assert_eq!(probe::parse(&frame), None);
    }

    #[test]
    fn answers_to_long_packets(spec in spec(), len in 0_usize..3000, mtu in 68_u16..1400) {
        let spec = Spec { df: true, ..spec };
        let frame = spec.build(&payload(len, 4));
        let mut out = [0xdd; toobig::FRAME_LEN_MAX];
        let len = toobig::write(&mut out, &frame, mtu).unwrap();
        let headers = PacketHeaders::from_ethernet_slice(&out[..len]).unwrap();
        prop_assert_eq!(&out[..6], &frame[6..12]);
        prop_assert_eq!(&out[6..12], &frame[..6]);
        prop_assert_eq!(&out[12..spec.l3()], &frame[12..spec.l3()]);
        let original = &frame[spec.l3()..];
        let quote = headers.payload.slice();
        prop_assert!(original.starts_with(quote));
        match (headers.net.unwrap(), headers.transport.unwrap()) {
            (NetHeaders::Ipv4(ip, _), TransportHeader::Icmpv4(icmp)) => {
                prop_assert_eq!((ip.source, ip.destination), (spec.destination4(), spec.source4()));
                prop_assert_eq!(ip.header_checksum, ip.calc_header_checksum());
                prop_assert_eq!(usize::from(ip.total_len), len - spec.l3());
                let needed = icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: mtu };
                prop_assert_eq!(&icmp.icmp_type, &Icmpv4Type::DestinationUnreachable(needed));
                prop_assert_eq!(icmp.checksum, icmp.icmp_type.calc_checksum(quote));
                prop_assert_eq!(quote.len(), original.len().min(576 - 28));
            }
            (NetHeaders::Ipv6(ip, _), TransportHeader::Icmpv6(icmp)) => {
                prop_assert_eq!((ip.source, ip.destination), (spec.destination6(), spec.source6()));
                let kind = Icmpv6Type::PacketTooBig { mtu: u32::from(mtu) };
                prop_assert_eq!(&icmp.icmp_type, &kind);
                let sum = kind.calc_checksum(ip.source, ip.destination, quote).unwrap();
                prop_assert_eq!(icmp.checksum, sum);
                prop_assert_eq!(quote.len(), original.len().min(1280 - 48));
            }
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        }
        // No error answers an error.
        let answer = out[..len].to_vec();
        prop_assert_eq!(toobig::write(&mut out, &answer, mtu), Err(NoAnswer::IcmpError));
        prop_assert_eq!(toobig::write(&mut out[..len - 1], &frame, mtu), Err(NoAnswer::Buffer));
    }

    #[test]
    fn random_bytes_panic_nothing(bytes: Vec<u8>, vnet: [u8; 10], mtu: u16) {
        touch_all(&bytes, &vnet, mtu);
    }

    #[test]
    fn mutated_frames_panic_nothing(
        spec in spec(),
        len in 0_usize..3000,
        size in 0_u16..3000,
        wrong: [bool; 3],
        mutations in prop::collection::vec((0_usize..110, any::<u8>()), 0..6),
        cut: prop::sample::Index,
        cut_it: bool,
        mtu in prop_oneof![any::<u16>(), 1000_u16..1600],
    ) {
        let mut frame = spec.build(&payload(len, 2));
        spec.make_partial(&mut frame);
        for (at, value) in mutations {
            if let Some(byte) = frame.get_mut(at) {
                *byte = value;
            }
        }
        if cut_it {
            frame.truncate(cut.index(frame.len()));
        }
        let mut vnet = spec.vnet(size);
        vnet.gso_type = if wrong[0] { vnet.gso_type ^ 4 } else { vnet.gso_type };
        vnet.csum_start = if wrong[1] { vnet.csum_start.wrapping_add(mtu) } else { vnet.csum_start };
        vnet.gso_type = if wrong[2] { 0 } else { vnet.gso_type };
        touch_all(&frame, &vnet.to_bytes(), mtu);
    }
}

/// Calls everything that takes bytes from outside.
fn hash(frame: &[u8]) -> u32 {
    flow_hash(frame, &Layout::parse(frame))
}

fn touch_all(bytes: &[u8], vnet: &[u8], mtu: u16) {
    let _ = (arp::Arp::parse(bytes), ethernet::Header::parse(bytes), icmp::Header::parse(bytes));
    let _ = (ipv4::Header::parse(bytes), ipv6::Header::parse(bytes), ipv6::upper(bytes));
    let _ =
        (tcp::Header::parse(bytes), udp::Header::parse(bytes), vxlan::VxlanHeader::parse(bytes));
    let _ = (esp::classify(bytes), esp::parse_trailer(bytes), esp::parse_inner_headers(bytes));
    let _ = (probe::parse(bytes), probe::parse_payload(bytes), hash(bytes));
    for skip in [14, 18, 34] {
        let rest = bytes.get(skip..).unwrap_or_default();
        let _ = (ipv4::Header::parse(rest), ipv6::upper(rest), arp::Arp::parse(rest));
    }
    if let Ok(layout) = Layout::parse(bytes) {
        assert!(
            layout.l3 < layout.l4 && layout.l4 < layout.payload && layout.payload <= layout.end
        );
        let _ = layout.checksum_ok(bytes);
    }
    let mut out = [0; toobig::FRAME_LEN_MAX];
    let _ = toobig::write(&mut out, bytes, mtu);
    let _ = fragment_ipv4(bytes, usize::from(mtu), |fragment| {
        assert!(fragment.len() <= usize::from(mtu) + 14);
    });
    let vnet = VnetHeader::parse(vnet).unwrap();
    let _ = weft_packet::split::finish_checksum(&vnet, &mut bytes.to_vec());
    if let Ok(plan) = Plan::new(&vnet, bytes, usize::from(mtu)) {
        for finish in [false, true] {
            for segment in common::segments(&plan, bytes, finish) {
                assert!(segment.len() <= usize::from(mtu) + 14);
            }
        }
    }
    let mut coalescer = Coalescer::new();
    let (start, offset) = (vnet.csum_start, vnet.csum_offset);
    for checksum in [FrameChecksum::Complete, FrameChecksum::Partial { start, offset }] {
        for _ in 0..3 {
            push(&mut coalescer, bytes, 0..bytes.len() as u32, checksum).unwrap();
        }
    }
    let mut frames = 0;
    coalescer.flush(bytes, |merged| frames += merged.frames);
    assert_eq!(u64::from(frames) + coalescer.take_rejected().bad_mark, 6);
    // Another arena than before is the caller's fault; even so nothing breaks.
    push(&mut coalescer, bytes, 0..bytes.len() as u32, FrameChecksum::Complete).unwrap();
    coalescer.flush(&[], |_| {});
}

#[test]
fn arp_round_trip() {
    let packet = arp::Arp {
        operation: arp::REQUEST,
        sender_mac: [2, 0, 0, 0, 0, 1],
        sender_ip: [10, 32, 0, 1].into(),
        target_mac: [0; 6],
        target_ip: [10, 32, 0, 2].into(),
    };
    let mut bytes = [0xff; 46];
    packet.write(&mut bytes);
    assert_eq!(arp::Arp::parse(&bytes).unwrap(), packet);
    let other = etherparse::ArpPacketSlice::from_slice(&bytes).unwrap();
    assert_eq!(other.operation(), etherparse::ArpOperation::REQUEST);
    assert_eq!(other.sender_protocol_addr(), [10, 32, 0, 1]);
    assert_eq!(other.target_protocol_addr(), [10, 32, 0, 2]);
    assert!(arp::Arp::parse(&bytes[..27]).is_err());
    bytes[5] = 16;
    assert!(arp::Arp::parse(&bytes).is_err());
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
        sequence: 1,
        ack: 5,
        window: 500,
        flags: ACK,
        options: vec![],
    }
}

#[test]
fn packets_that_are_not_answered() {
    let mut out = [0; toobig::FRAME_LEN_MAX];
    let mut answer = |frame: &[u8]| toobig::write(&mut out, frame, 1000);
    let frame = tcp4().build(&payload(1200, 0));
    assert!(answer(&frame).is_ok());
    let changed = |change: fn(&mut [u8])| {
        let mut frame = frame.clone();
        change(&mut frame);
        let header = etherparse::Ipv4Header::from_slice(&frame[14..]).unwrap().0;
        frame[24..26].copy_from_slice(&header.calc_header_checksum().to_be_bytes());
        frame
    };
    assert_eq!(answer(&changed(|frame| frame[20] = 0)), Err(NoAnswer::MayFragment));
    assert_eq!(answer(&changed(|frame| frame[21] = 9)), Err(NoAnswer::LaterFragment));
    let addresses: [fn(&mut [u8]); 9] = [
        |frame| frame[..6].fill(0xff),
        |frame| frame[0] |= 1,
        |frame| frame[6] |= 1,
        |frame| frame[30] = 224,
        |frame| frame[30..34].fill(255),
        |frame| frame[26] = 239,
        |frame| frame[26..30].fill(0),
        |frame| frame[26..30].fill(255),
        |frame| frame[26] = 127,
    ];
    for (index, change) in addresses.into_iter().enumerate() {
        assert_eq!(answer(&changed(change)), Err(NoAnswer::Address), "case {index}");
    }
    let mut broken = frame.clone();
    broken[22] ^= 1;
    assert_eq!(answer(&broken), Err(NoAnswer::NotIp));
    assert_eq!(
        answer(&changed(|frame| frame[12..14].copy_from_slice(&[8, 6]))),
        Err(NoAnswer::NotIp)
    );

    let mut six = Spec { v6: true, ..tcp4() }.build(&payload(1400, 0));
    assert!(answer(&six).is_ok());
    six[38] = 0xff;
    assert_eq!(answer(&six), Err(NoAnswer::Address));
}

#[test]
fn echo_requests_are_answered_and_icmp_errors_are_not() {
    let mut out = [0; toobig::FRAME_LEN_MAX];
    let (a, b) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let mut v4 = |kind: Icmpv4Type| {
        let mut frame = Vec::new();
        let mut ip =
            etherparse::Ipv4Header::new(0, 9, IpNumber::ICMP, [10, 0, 0, 1], [10, 0, 0, 2])
                .unwrap();
        ip.dont_fragment = true;
        let ip = etherparse::IpHeaders::Ipv4(ip, etherparse::Ipv4Extensions::default());
        let builder = PacketBuilder::ethernet2(a, b).ip(ip).icmpv4(kind);
        builder.write(&mut frame, &payload(1300, 0)).unwrap();
        toobig::write(&mut out, &frame, 1000).map(|_| ())
    };
    let echo = etherparse::IcmpEchoHeader { id: 1, seq: 1 };
    assert_eq!(v4(Icmpv4Type::EchoRequest(echo)), Ok(()));
    assert_eq!(v4(Icmpv4Type::EchoReply(echo)), Ok(()));
    let exceeded = Icmpv4Type::TimeExceeded(icmpv4::TimeExceededCode::TtlExceededInTransit);
    assert_eq!(v4(exceeded), Err(NoAnswer::IcmpError));
    let mut v6 = |kind: Icmpv6Type| {
        let mut frame = Vec::new();
        let builder = PacketBuilder::ethernet2(a, b).ipv6([0xfd; 16], [0xfc; 16], 9).icmpv6(kind);
        builder.write(&mut frame, &payload(1400, 0)).unwrap();
        toobig::write(&mut out, &frame, 1000).map(|_| ())
    };
    assert_eq!(v6(Icmpv6Type::EchoRequest(echo)), Ok(()));
    let exceeded = Icmpv6Type::TimeExceeded(icmpv6::TimeExceededCode::HopLimitExceeded);
    assert_eq!(v6(exceeded), Err(NoAnswer::IcmpError));
}

/// IPv6 packets with options, routing and fragment headers before UDP.
#[test]
fn ipv6_extension_headers() {
    let spec = Spec { v6: true, udp: true, ..tcp4() };
    let insert = |kind: u8, extension: [u8; 8]| {
        let mut frame = spec.build(&payload(1300, 0));
        frame.splice(54..54, extension);
        frame[20] = kind;
        let length = (frame.len() - 54) as u16;
        frame[18..20].copy_from_slice(&length.to_be_bytes());
        frame
    };
    let options = insert(ipv6::NEXT_DESTINATION, [17, 0, 1, 4, 0, 0, 0, 0]);
    let layout = Layout::parse(&options).unwrap();
    assert_eq!((layout.l4, layout.payload, layout.plain), (62, 70, false));
    assert!(layout.checksum_ok(&options));
    let mut out = [0; toobig::FRAME_LEN_MAX];
    assert!(toobig::write(&mut out, &options, 1280).is_ok());

    let routed = insert(ipv6::NEXT_ROUTING, [17, 0, 4, 0, 0, 0, 0, 0]);
    assert!(Layout::parse(&routed).is_err());
    let first = insert(ipv6::NEXT_FRAGMENT, [17, 0, 0, 1, 0, 0, 0, 9]);
    assert!(Layout::parse(&first).is_err());
    assert!(toobig::write(&mut out, &first, 1280).is_ok());
    let later = insert(ipv6::NEXT_FRAGMENT, [17, 0, 0, 8, 0, 0, 0, 9]);
    assert!(Layout::parse(&later).is_err());
    assert_eq!(toobig::write(&mut out, &later, 1280), Err(NoAnswer::LaterFragment));
}

#[test]
fn fragments_have_no_layout() {
    for word in [[0x20, 0], [0, 8], [0x20, 8]] {
        let mut frame = tcp4().build(&payload(100, 0));
        frame[20..22].copy_from_slice(&word);
        assert_eq!(Layout::parse(&frame), Err(Opaque::Hidden { l3: 14, network: Network::V4 }));
        let other = Spec { ports: [1, 2], ..tcp4() };
        let mut other = other.build(&payload(100, 0));
        other[20..22].copy_from_slice(&word);
        assert_eq!(hash(&frame), hash(&other), "all fragments of two hosts together");
    }
}

#[test]
fn probes_that_cannot_be() {
    let at = Ipv6Addr::LOCALHOST;
    let mut out = [0; 100];
    let mut write = |mtu| probe::write(&mut out, [0; 6], [0; 6], at, at, 1, mtu);
    assert_eq!(write(63), Err(probe::ProbeError::MtuTooSmall(63)));
    assert_eq!(write(64), Ok(78));
    assert_eq!(write(87), Err(probe::ProbeError::BufferTooSmall { need: 101, have: 100 }));
}
