//! The coalescer must give back its input, frame by frame.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::HashMap;
use std::ops::Range;

use common::{ACK, FIN, PSH, SYN, Spec, payload, push, segments, spec};
use proptest::prelude::*;
use weft_packet::coalesce::{Coalescer, FRAMES_MAX, Full, Merged, RESULTS_MAX, Rejected};
use weft_packet::layout::Layout;
use weft_packet::split::{FrameChecksum, Plan, finish_checksum};
use weft_packet::vnet::{self, VnetHeader};

#[derive(Clone, Debug)]
struct Written {
    vnet: VnetHeader,
    frame: Vec<u8>,
    frames: u32,
}

fn copy(merged: &Merged<'_>, arena: &[u8]) -> Written {
    let mut frame = merged.header.to_vec();
    for slice in merged.slices {
        frame.extend_from_slice(&arena[slice.start as usize..slice.end as usize]);
    }
    assert_eq!(frame.len(), merged.frame_len);
    assert_eq!(merged.slices.len(), merged.frames as usize);
    let vnet = VnetHeader::parse(&merged.vnet).unwrap();
    assert_eq!(merged.header.is_empty(), merged.frames == 1);
    assert_eq!(vnet.gso_type == vnet::GSO_NONE, merged.frames == 1);
    assert!(merged.frames == 1 || usize::from(vnet.hdr_len) == merged.header.len());
    Written { vnet, frame, frames: merged.frames }
}

/// Pushes all frames, flushing when told to, and at the end.
fn run(frames: &[(Vec<u8>, FrameChecksum)]) -> (Vec<Written>, Rejected) {
    let (mut arena, mut ranges) = (vec![0x55; 3], Vec::new());
    for (frame, _) in frames {
        let start = arena.len() as u32;
        arena.extend_from_slice(frame);
        ranges.push(start..arena.len() as u32);
        arena.extend_from_slice(&[0xaa; 5]);
    }
    let mut coalescer = Coalescer::new();
    let mut written = Vec::new();
    for (range, (_, checksum)) in ranges.into_iter().zip(frames) {
        if let Err(Full) = push(&mut coalescer, &arena, range.clone(), *checksum) {
            assert_eq!(coalescer.len(), RESULTS_MAX);
            coalescer.flush(&arena, |merged| written.push(copy(&merged, &arena)));
            assert!(coalescer.is_empty());
            push(&mut coalescer, &arena, range, *checksum).unwrap();
        }
    }
    coalescer.flush(&arena, |merged| written.push(copy(&merged, &arena)));
    coalescer.flush(&arena, |_| panic!("nothing is held over a flush"));
    (written, coalescer.take_rejected())
}

/// The frames that the kernel makes of a write: super-packets cut, checksums done.
fn expand(written: &Written) -> Vec<Vec<u8>> {
    if written.frames == 1 {
        let mut frame = written.frame.clone();
        finish_checksum(&written.vnet, &mut frame).unwrap();
        return vec![frame];
    }
    let plan = Plan::new(&written.vnet, &written.frame, usize::MAX).unwrap();
    assert_eq!(plan.segments, written.frames as usize);
    segments(&plan, &written.frame, true)
}

fn partial(spec: &Spec) -> FrameChecksum {
    FrameChecksum::Partial { start: spec.l4() as u16, offset: spec.checksum_offset() as u16 }
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
        sequence: 1000,
        ack: 5,
        window: 500,
        flags: ACK,
        options: vec![1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2],
    }
}

/// A run of `count` frames of `len` bytes each that continue each other.
fn stream(spec: &Spec, count: usize, len: usize) -> Vec<Vec<u8>> {
    (0..count)
        .map(|i| {
            let mut spec = spec.clone();
            spec.sequence = spec.sequence.wrapping_add((i * len) as u32);
            spec.id = spec.id.wrapping_add(i as u16);
            spec.build(&payload(len, i as u8))
        })
        .collect()
}

fn complete(frames: Vec<Vec<u8>>) -> Vec<(Vec<u8>, FrameChecksum)> {
    frames.into_iter().map(|frame| (frame, FrameChecksum::Complete)).collect()
}

fn counts(written: &[Written]) -> Vec<u32> {
    written.iter().map(|written| written.frames).collect()
}

proptest! {
    /// A super-packet that is cut, carried and merged is the same super-packet.
    #[test]
    fn split_then_coalesce_is_identity(
        mut spec in spec(), push: bool, finish: bool, len in 1_usize..65_000, size in 536_u16..8900,
    ) {
        prop_assume!(usize::from(size) <= len && spec.header_len() + len <= 65_535);
        if push {
            spec.flags |= PSH;
        }
        let mut frame = spec.build(&payload(len, 77));
        spec.make_partial(&mut frame);
        let plan = Plan::new(&spec.vnet(size), &frame, 9000).unwrap();
        prop_assume!(plan.segments <= FRAMES_MAX);
        let checksum = if finish { FrameChecksum::Complete } else { plan.rco().into() };
        let cut = segments(&plan, &frame, finish);
        let (written, rejected) = run(&cut.iter().map(|f| (f.clone(), checksum)).collect::<Vec<_>>());
        prop_assert_eq!(rejected, Rejected::default());
        prop_assert_eq!(written.len(), 1);
        if plan.segments == 1 {
            prop_assert_eq!(&written[0].frame, &cut[0]);
            return Ok(());
        }
        prop_assert!(written[0].frame == frame);
        let vnet = VnetHeader {
            hdr_len: spec.header_len() as u16,
            gso_size: plan.segment_len as u16,
            ..spec.vnet(size)
        };
        prop_assert_eq!(written[0].vnet, vnet);
    }
}

/// One step of a random conversation.
#[derive(Clone, Debug)]
struct Step {
    flow: usize,
    what: What,
    partial: bool,
}

#[derive(Clone, Debug)]
enum What {
    Data(usize),
    Push(usize),
    Fin,
    Ack,
    Gap,
    Ttl,
    Window,
    Mac,
    Fragment,
    IpOptions,
    Corrupt(prop::sample::Index, u8),
    NoUdpChecksum,
    Arp,
}

fn step() -> impl Strategy<Value = Step> {
    let what = prop_oneof![
        12 => prop::sample::select(vec![200_usize, 200, 200, 200, 120, 300, 1]).prop_map(What::Data),
        1 => Just(What::Push(200)),
        1 => Just(What::Fin),
        1 => Just(What::Ack),
        1 => Just(What::Gap),
        1 => Just(What::Ttl),
        1 => Just(What::Window),
        1 => Just(What::Mac),
        1 => Just(What::Fragment),
        1 => Just(What::IpOptions),
        2 => (any::<prop::sample::Index>(), 1_u8..).prop_map(|(at, bits)| What::Corrupt(at, bits)),
        1 => Just(What::NoUdpChecksum),
        1 => Just(What::Arp),
    ];
    (0_usize..5, what, prop::bool::weighted(0.4)).prop_map(|(flow, what, partial)| Step {
        flow,
        what,
        partial,
    })
}

fn flows() -> Vec<Spec> {
    let base = tcp4();
    vec![
        base.clone(),
        Spec { hosts: [3, 4], df: false, ..base.clone() },
        Spec { hosts: [5, 6], v6: true, ..base.clone() },
        Spec { hosts: [7, 8], udp: true, df: false, options: vec![], ..base.clone() },
        Spec { hosts: [9, 10], udp: true, v6: true, vlan: Some(5), options: vec![], ..base },
    ]
}

/// The frame of a step, whether its checksum is partial, and the frame that the kernel should make of it.
fn play(step: &Step, flow: &mut Spec) -> (Vec<u8>, FrameChecksum, Vec<u8>) {
    let mut spec = flow.clone();
    let mut len = 200;
    match &step.what {
        What::Data(bytes) => len = *bytes,
        What::Push(bytes) => {
            len = *bytes;
            spec.flags |= PSH;
        }
        What::Fin => spec.flags |= FIN,
        What::Ack => len = 0,
        What::Gap => {
            spec.sequence = spec.sequence.wrapping_add(1);
            spec.id = spec.id.wrapping_add(1);
        }
        What::Ttl => spec.ttl -= 1,
        What::Window => spec.window += 1,
        _ => {}
    }
    let mut frame = spec.build(&payload(len, step.flow as u8));
    // A fragment does not advance the flow: the next frame continues the frame before it.
    if !matches!(step.what, What::Fragment) {
        flow.sequence = spec.sequence.wrapping_add(len as u32);
        flow.id = spec.id.wrapping_add(1);
    }
    let l3 = spec.l3();
    let mut raw = true;
    match &step.what {
        What::Mac => frame[5] ^= 0x80,
        What::Fragment if !spec.v6 => {
            frame[l3 + 6] |= 0x20;
            fix_ip(&mut frame, l3);
        }
        What::IpOptions if !spec.v6 => {
            frame.splice(l3 + 20..l3 + 20, [1, 1, 1, 0]);
            frame[l3] = 0x46;
            let total = (frame.len() - l3) as u16;
            frame[l3 + 2..l3 + 4].copy_from_slice(&total.to_be_bytes());
            fix_ip(&mut frame, l3);
        }
        What::Corrupt(at, bits) => {
            let places = corruptible(&spec, frame.len());
            let at = *at.get(&places);
            frame[at] ^= bits;
        }
        What::NoUdpChecksum if spec.udp => frame[spec.l4() + 6..spec.l4() + 8].fill(0),
        What::Arp => frame[l3 - 2..l3].copy_from_slice(&[8, 6]),
        _ => raw = false,
    }
    let expected = frame.clone();
    if step.partial && !raw {
        spec.make_partial(&mut frame);
        return (frame, partial(&spec), expected);
    }
    (frame, FrameChecksum::Complete, expected)
}

/// Every byte that can change without the packet becoming one of another flow.
fn corruptible(spec: &Spec, len: usize) -> Vec<usize> {
    let (l3, l4) = (spec.l3(), spec.l4());
    let network = if spec.v6 {
        vec![l3 + 1, l3 + 2, l3 + 3, l3 + 7]
    } else {
        vec![l3 + 1, l3 + 4, l3 + 5, l3 + 6, l3 + 7, l3 + 8, l3 + 10, l3 + 11]
    };
    network.into_iter().chain(l4 + 4..len).collect()
}

fn fix_ip(frame: &mut [u8], l3: usize) {
    let len = usize::from(frame[l3] & 15) * 4;
    frame[l3 + 10..l3 + 12].fill(0);
    let header = etherparse::Ipv4Header::from_slice(&frame[l3..l3 + len]).unwrap().0;
    let sum = header.calc_header_checksum();
    frame[l3 + 10..l3 + 12].copy_from_slice(&sum.to_be_bytes());
}

/// The flow of a frame by its IPv4 or IPv6 addresses, which no step changes; 0 for ARP.
fn flow_of(frame: &[u8]) -> u8 {
    let l3 = if frame[12..14] == [0x81, 0] { 18 } else { 14 };
    match frame[l3 - 2..l3] {
        [0x08, 0x00] => frame[l3 + 15],
        [0x86, 0xdd] => frame[l3 + 23],
        _ => 0,
    }
}

/// The identification does not count where the packet may not be fragmented (RFC 6864).
fn normal(mut frame: Vec<u8>) -> Vec<u8> {
    let l3 = if frame[12..14] == [0x81, 0] { 18 } else { 14 };
    if frame[l3 - 2..l3] == [8, 0] && frame[l3 + 6] & 0x40 != 0 {
        let sum = etherparse::Ipv4Header::from_slice(&frame[l3..]).unwrap().0;
        if sum.header_checksum == sum.calc_header_checksum() {
            frame[l3 + 4..l3 + 6].fill(0);
            frame[l3 + 10..l3 + 12].fill(0);
        }
    }
    frame
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// Each pushed frame comes out once, unchanged (a corrupt frame still corrupt), and in the order of its flow.
    #[test]
    fn nothing_is_lost_changed_or_reordered(steps in prop::collection::vec(step(), 1..150)) {
        let mut flows = flows();
        let mut frames = Vec::new();
        let mut expected: HashMap<u8, Vec<Vec<u8>>> = HashMap::new();
        for step in &steps {
            let (frame, checksum, wanted) = play(step, &mut flows[step.flow]);
            expected.entry(flow_of(&frame)).or_default().push(normal(wanted));
            frames.push((frame, checksum));
        }
        let (written, rejected) = run(&frames);
        prop_assert_eq!(rejected, Rejected::default());
        let mut got: HashMap<u8, Vec<Vec<u8>>> = HashMap::new();
        for frame in written.iter().flat_map(expand) {
            got.entry(flow_of(&frame)).or_default().push(normal(frame));
        }
        prop_assert_eq!(got, expected);
    }

    /// One corrupt bit anywhere in a stream of complete frames: that frame comes out as it came.
    #[test]
    fn a_corrupt_frame_is_not_laundered(
        spec in spec(), at in 0_usize..6, bit in 0_usize..8, place: prop::sample::Index,
    ) {
        let mut frames = stream(&spec, 6, 300);
        let places: Vec<usize> = (spec.l3()..frames[at].len()).collect();
        frames[at][*place.get(&places)] ^= 1 << bit;
        let corrupt = frames[at].clone();
        let (written, _) = run(&complete(frames));
        let alone: Vec<_> = written.iter().filter(|written| written.frame == corrupt).collect();
        prop_assert_eq!(alone.len(), 1);
        prop_assert_eq!(alone[0].vnet, VnetHeader::default());
        prop_assert_eq!(counts(&written).iter().sum::<u32>(), 6);
    }
}

#[test]
fn a_stream_becomes_one_packet() {
    for spec in flows() {
        let (written, _) = run(&complete(stream(&spec, 40, 1000)));
        assert_eq!(counts(&written), [40], "{spec:?}");
        assert_eq!(
            written[0].vnet,
            VnetHeader { hdr_len: spec.header_len() as u16, gso_size: 1000, ..spec.vnet(0) }
        );
    }
}

#[test]
fn interleaved_flows_become_one_packet_each() {
    let streams: Vec<_> = flows().iter().map(|spec| stream(spec, 20, 500)).collect();
    let mixed = (0..20).flat_map(|i| streams.iter().map(move |s| s[i].clone())).collect();
    let (written, _) = run(&complete(mixed));
    assert_eq!(counts(&written), [20; 5]);
    for (written, stream) in written.iter().zip(&streams) {
        assert_eq!(flow_of(&written.frame), flow_of(&stream[0]));
    }
}

#[test]
fn limits_of_a_super_packet() {
    let (written, _) = run(&complete(stream(&tcp4(), 100, 100)));
    assert_eq!(counts(&written), [FRAMES_MAX as u32, 36]);
    let (written, _) = run(&complete(stream(&tcp4(), 50, 1448)));
    assert_eq!(counts(&written), [45, 5]);
    assert!(written.iter().all(|written| written.frame.len() - 14 <= 65_535));
}

type Change = fn(&mut Spec);

/// Pairs of frames, and whether the second may join the first.
#[test]
fn only_matching_segments_merge() {
    let base = tcp4();
    let pair = |a: Spec, len_a: usize, b: Spec, len_b: usize| {
        let next = a.sequence.wrapping_add(len_a as u32).wrapping_add(b.sequence - 1000);
        let b = Spec { sequence: next, id: a.id.wrapping_add(b.id - 6), ..b };
        let frames = vec![a.build(&payload(len_a, 1)), b.build(&payload(len_b, 2))];
        run(&complete(frames)).0.len() == 1
    };
    let with = |change: Change| {
        let mut spec = base.clone();
        change(&mut spec);
        spec
    };
    let joins = |change: Change| pair(base.clone(), 200, with(change), 200);
    assert!(joins(|_| {}));
    assert!(joins(|spec| spec.flags |= PSH));
    assert!(joins(|spec| spec.id += 5), "identification does not count with DF");
    assert!(pair(base.clone(), 200, base.clone(), 100), "a shorter last one");
    assert!(!pair(base.clone(), 200, base.clone(), 201), "a longer one");
    assert!(!pair(with(|spec| spec.flags |= PSH), 200, base.clone(), 200), "PSH ends");
    assert!(!pair(base.clone(), 0, base.clone(), 0), "no payload");
    let others: [(&str, Change); 18] = [
        ("gap", |spec| spec.sequence += 1),
        ("ack", |spec| spec.ack += 1),
        ("window", |spec| spec.window += 1),
        ("FIN", |spec| spec.flags |= FIN),
        ("SYN", |spec| spec.flags |= SYN),
        ("RST", |spec| spec.flags |= 4),
        ("URG", |spec| spec.flags |= 32),
        ("ECE", |spec| spec.flags |= 64),
        ("CWR", |spec| spec.flags |= 128),
        ("no ACK", |spec| spec.flags = 0),
        ("port", |spec| spec.ports[0] += 1),
        ("address", |spec| spec.hosts[1] += 1),
        ("TTL", |spec| spec.ttl -= 1),
        ("ECN", |spec| spec.tos |= 3),
        ("DF", |spec| spec.df = false),
        ("options", |spec| spec.options[7] += 1),
        ("option length", |spec| spec.options.truncate(8)),
        ("VLAN", |spec| spec.vlan = Some(1)),
    ];
    for (name, change) in others {
        assert!(!joins(change), "{name}");
    }
    let free = with(|spec| spec.df = false);
    assert!(pair(free.clone(), 200, free.clone(), 200));
    assert!(!pair(free.clone(), 200, Spec { id: 8, ..free }, 200), "identification");
    let six = with(|spec| spec.v6 = true);
    assert!(pair(six.clone(), 200, six.clone(), 200));
    assert!(!pair(six.clone(), 200, Spec { label: 9, ..six }, 200), "flow label");
    let udp = Spec { udp: true, options: vec![], ..base };
    assert!(pair(udp.clone(), 200, udp.clone(), 100));
    assert!(!pair(udp.clone(), 200, udp.clone(), 0), "empty datagram");
    assert!(!pair(udp.clone(), 100, udp, 200));
}

#[test]
fn a_shorter_frame_ends_a_super_packet() {
    let mut frames = stream(&tcp4(), 3, 200);
    let short = Spec { sequence: 1600, id: 10, ..tcp4() };
    frames.push(short.build(&payload(50, 0)));
    frames.extend(stream(&Spec { sequence: 1650, id: 11, ..tcp4() }, 2, 50));
    assert_eq!(counts(&run(&complete(frames)).0), [4, 2]);
}

#[test]
fn partial_and_complete_frames_do_not_mix() {
    let spec = tcp4();
    let mut frames = complete(stream(&spec, 4, 200));
    for (frame, checksum) in &mut frames[2..] {
        spec.make_partial(frame);
        *checksum = partial(&spec);
    }
    let (written, _) = run(&frames);
    assert_eq!(counts(&written), [2, 2]);
}

#[test]
fn a_single_partial_frame_is_written_as_partial() {
    let spec = tcp4();
    let mut frame = spec.build(&payload(200, 0));
    spec.make_partial(&mut frame);
    let (written, _) = run(&[(frame.clone(), partial(&spec))]);
    assert_eq!(written[0].frame, frame);
    let vnet = VnetHeader { gso_type: 0, hdr_len: 0, ..spec.vnet(0) };
    assert_eq!(written[0].vnet, vnet);
}

/// A mark that is not at the transport checksum is a lie: the frame is dropped and counted.
#[test]
fn false_marks_are_dropped() {
    let spec = tcp4();
    let frame = spec.build(&payload(200, 0));
    let mut arp = frame.clone();
    arp[12..14].copy_from_slice(&[8, 6]);
    let mark = |start, offset| FrameChecksum::Partial { start, offset };
    let frames = [
        (frame.clone(), mark(36, 16)),
        (frame.clone(), mark(34, 6)),
        (frame.clone(), mark(14, 16)),
        (arp, mark(34, 16)),
        (vec![], mark(34, 16)),
        (frame, mark(34, 16)),
    ];
    let (written, rejected) = run(&frames);
    assert_eq!(counts(&written), [1]);
    assert_eq!(rejected, Rejected { bad_mark: 5, bad_range: 0 });
}

#[test]
fn ranges_outside_the_arena_are_counted() {
    let mut coalescer = Coalescer::new();
    let backwards = Range { start: 5, end: 2 };
    for range in [0..11, 11..12, backwards, u32::MAX..u32::MAX] {
        push(&mut coalescer, &[0; 10], range, FrameChecksum::Complete).unwrap();
    }
    assert!(coalescer.is_empty());
    assert_eq!(coalescer.take_rejected(), Rejected { bad_mark: 0, bad_range: 4 });
    assert_eq!(coalescer.take_rejected(), Rejected::default());
}

#[test]
fn merging_can_be_switched_off() {
    let (tcp, udp) = (stream(&flows()[0], 3, 200), stream(&flows()[3], 3, 200));
    for (merge_tcp, merge_udp, expected) in [(true, false, 4), (false, true, 4), (false, false, 6)]
    {
        let mut coalescer = Coalescer::new();
        coalescer.set_merging(merge_tcp, merge_udp);
        let mut arena = Vec::new();
        let mut ranges = Vec::new();
        for frame in tcp.iter().chain(&udp) {
            ranges.push(arena.len() as u32..(arena.len() + frame.len()) as u32);
            arena.extend_from_slice(frame);
        }
        for range in ranges {
            push(&mut coalescer, &arena, range, FrameChecksum::Complete).unwrap();
        }
        assert_eq!(coalescer.len(), expected);
    }
}

/// Later data must not overtake a packet that may be of its flow, be its ports hidden or not.
#[test]
fn nothing_overtakes_a_hidden_packet() {
    let udp = Spec { udp: true, options: vec![], ..tcp4() };
    for spec in [udp.clone(), Spec { v6: true, ..udp }] {
        let mut frames = stream(&spec, 4, 200);
        let mut hidden = frames[0].clone();
        if spec.v6 {
            hidden[20] = 44;
        } else {
            hidden[21] = 8;
            fix_ip(&mut hidden, 14);
        }
        let elsewhere = Spec { hosts: [77, 78], ..spec.clone() };
        let mut other = elsewhere.build(&payload(200, 0));
        other[20..22].copy_from_slice(&hidden[20..22]);
        if !spec.v6 {
            fix_ip(&mut other, 14);
        }
        frames.insert(1, other);
        frames.insert(3, hidden.clone());
        let (written, _) = run(&complete(frames));
        assert_eq!(counts(&written), [2, 1, 1, 2], "a fragment between others ends nothing");
        assert_eq!(written[2].frame, hidden);
    }
}

/// Frames with bytes behind the packet, or with an odd UDP length, do not merge: no super-packet is cut into
/// such frames.
#[test]
fn padding_and_odd_lengths_do_not_merge() {
    let spec = tcp4();
    let padded: Vec<_> =
        stream(&spec, 2, 200).into_iter().map(|frame| [&frame[..], &[0; 4]].concat()).collect();
    let (written, _) = run(&complete(padded.clone()));
    assert_eq!(
        written.iter().map(|written| &written.frame).collect::<Vec<_>>(),
        [&padded[0], &padded[1]]
    );

    let udp = Spec { udp: true, options: vec![], ..tcp4() };
    let short = stream(&udp, 2, 200).into_iter().map(|mut frame| {
        frame[38..40].copy_from_slice(&100_u16.to_be_bytes());
        (frame, partial(&udp))
    });
    let (written, _) = run(&short.collect::<Vec<_>>());
    assert_eq!(counts(&written), [1, 1]);
}

#[test]
fn urgent_pointers_are_kept() {
    let spec = tcp4();
    let mut frames = stream(&spec, 2, 200);
    frames[1][spec.l4() + 19] = 1;
    for frame in &mut frames {
        spec.make_partial(frame);
    }
    let frames: Vec<_> = frames.into_iter().map(|frame| (frame, partial(&spec))).collect();
    assert_eq!(counts(&run(&frames).0), [1, 1]);
}

/// The header that a mark would point to is not the packet's own in a fragment.
#[test]
fn marks_on_fragments_are_dropped() {
    let spec = tcp4();
    for word in [[0x20, 0], [0, 8], [0x20, 8]] {
        let mut frame = spec.build(&payload(200, 0));
        frame[20..22].copy_from_slice(&word);
        fix_ip(&mut frame, 14);
        let (written, rejected) = run(&[(frame.clone(), partial(&spec))]);
        assert!(written.is_empty());
        assert_eq!(rejected.bad_mark, 1);
        let (written, _) = run(&complete(vec![frame.clone(), frame]));
        assert_eq!(counts(&written), [1, 1]);
    }
}

/// Two networks may hold the same addresses: no frame of one gets into a super-packet of the other, and neither
/// keeps the other from merging.
#[test]
fn frames_of_different_networks_do_not_merge() {
    for spec in flows() {
        let frames = stream(&spec, 6, 200);
        let mut hidden = frames[0].clone();
        if spec.v6 {
            hidden[spec.l3() + 6] = 44;
        } else {
            hidden[spec.l3() + 7] = 8;
            fix_ip(&mut hidden, spec.l3());
        }
        let arena: Vec<u8> = frames.iter().chain([&hidden]).flatten().copied().collect();
        let len = frames[0].len();
        let range = |number: usize| (number * len) as u32..((number + 1) * len) as u32;
        let merged = |pushes: &[(u16, usize)]| {
            let (mut coalescer, mut written) = (Coalescer::new(), Vec::new());
            for (network, number) in pushes {
                let at = range(*number);
                let headers = Layout::parse(&arena[at.start as usize..at.end as usize]);
                let checksum = FrameChecksum::Complete;
                coalescer.push_of(*network, &arena, at, &headers, checksum).unwrap();
            }
            coalescer.flush(&arena, |merged| written.push((merged.network, merged.frames)));
            written
        };
        // A flow that goes on in another network begins there.
        assert_eq!(merged(&[(1, 0), (1, 1), (2, 2), (2, 3)]), [(1, 2), (2, 2)]);
        let alternating: Vec<_> = (0..6).flat_map(|number| [(3, number), (7, number)]).collect();
        assert_eq!(merged(&alternating), [(3, 6), (7, 6)]);
        // A packet without ports ends what may be of its flow, in its network alone.
        assert_eq!(merged(&[(9, 0), (9, 6), (9, 1)]), [(9, 1); 3]);
        assert_eq!(merged(&[(0, 0), (9, 6), (0, 1)]), [(0, 2), (9, 1)]);
    }
}
