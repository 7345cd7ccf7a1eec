//! Malformed input: from a container with a raw socket, or from a peer with good keys. Nothing panics,
//! everything is counted, and the rest arrives as the referee has it.

use proptest::prelude::*;
use weft_crypto::SealingSa;
use weft_io::udp::RUN_BYTES_MAX;
use weft_packet::esp;

use super::SPI;
use super::referee::{VNET, frames_of, put};
use super::source::{Packet, pattern};
use super::wire::{MTU_OF_WIRE, Wire, altered, judged};
use crate::sample_sas::outbound_sa;
use crate::stats::counters::{DropReason, Work};

/// Bytes at an offset of the virtio net header, or of the frame.
type Twist = (usize, &'static [u8]);

/// Each is refused for itself, counted, and leaves the engine as it was.
fn refused(packet: &Packet, twists: &[Twist]) {
    let mut wire = Wire::new(|_| {});
    let good = packet.with(&pattern(0, 4_000)).cut_to(1_000);
    for (number, (at, bytes)) in (1..).zip(twists) {
        let mut bad = good.clone();
        bad[*at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(wire.transmit(&[bad]).len(), 0, "{bytes:?} at {at}");
        assert_eq!(wire.near.drops(), [(DropReason::BadSuperPacket, number)], "{bytes:?} at {at}");
    }
    let flights = wire.send(std::slice::from_ref(&good));
    wire.arrives(&flights);
}

const KIND: usize = 1;
const SIZE: usize = 4;
const START: usize = 6;
const OFFSET: usize = 8;

#[test]
fn a_gso_size_of_0_or_beyond_the_payload_is_refused_and_counted() {
    for packet in Packet::each() {
        refused(&packet, &[(SIZE, &[0, 0]), (SIZE, &[0xa1, 0x0f]), (SIZE, &[0xff, 0xff])]);
    }
}

#[test]
fn absurd_header_lengths_are_refused_and_counted() {
    let tcp_at = |packet: &Packet| VNET + packet.l4() + 12;
    for v6 in [false, true] {
        let packet = Packet::new(false, v6);
        // TCP data offsets of 0, 16 and, behind the packet's end, of 60 in a packet of 50 bytes.
        let at = tcp_at(&packet);
        refused(&packet, &[(at, &[0x00]), (at, &[0x40])]);
        let mut short = packet.with(&[1; 4]).cut_to(1);
        short[at] = 0xf0;
        let mut wire = Wire::new(|_| {});
        assert_eq!(wire.transmit(&[short]).len(), 0);
        assert_eq!(wire.near.drops(), [(DropReason::BadSuperPacket, 1)]);
    }
    let ip = VNET + 14;
    for packet in Packet::each() {
        if packet.v6 {
            // Too long a payload; an extension header that does not end.
            refused(&packet, &[(ip + 4, &[0xff, 0xff]), (ip + 6, &[60]), (ip, &[0x40])]);
        } else {
            // A header of 0, 16 and 60 bytes; a total length of 0, 19 and beyond the frame.
            let lengths: [Twist; 3] = [(ip, &[0x40]), (ip, &[0x44]), (ip, &[0x4f])];
            refused(&packet, &lengths);
            let totals: [Twist; 3] =
                [(ip + 2, &[0, 0]), (ip + 2, &[0, 19]), (ip + 2, &[0xff, 0xff])];
            refused(&packet, &totals);
        }
    }
}

#[test]
fn types_and_marks_that_contradict_the_packet_are_refused_and_counted() {
    for packet in Packet::each() {
        let other: &[u8] = if packet.udp { &[1] } else { &[5] };
        let family: &[u8] = if packet.v6 { &[1] } else { &[4] };
        refused(&packet, &[(KIND, &[2]), (KIND, &[3]), (KIND, &[0x7f]), (KIND, other)]);
        if !packet.udp {
            refused(&packet, &[(KIND, family)]);
        }
        // No mark; marks before, behind, outside.
        refused(&packet, &[(0, &[0]), (START, &[0, 0]), (START, &[0xff, 0xff])]);
        refused(&packet, &[(START, &[15, 0]), (OFFSET, &[0, 0]), (OFFSET, &[0xff, 0xff])]);
    }
}

#[test]
fn too_many_segments_are_refused_and_counted() {
    let packet = Packet::new(true, false).with(&pattern(0, 60_000));
    let mut wire = Wire::new(|_| {});
    assert_eq!(wire.transmit(&[packet.cut_to(1), packet.cut_to(43)]).len(), 0);
    assert_eq!(wire.near.drops(), [(DropReason::BadSuperPacket, 2)]);
}

/// The header length in the virtio net header is a hint, wrong on forwarded packets: it means nothing.
#[test]
fn the_hint_of_the_header_length_means_nothing() {
    let mut wire = Wire::new(|_| {});
    for packet in Packet::each() {
        let right = packet.with(&pattern(0, 20_000)).cut_to(1_000);
        let flights = wire.send(std::slice::from_ref(&right));
        wire.arrives(&flights);
        for hint in [0_u16, 1, 13, 14, 53, 55, 20_000, u16::MAX] {
            let mut read = right.clone();
            read[2..4].copy_from_slice(&hint.to_le_bytes());
            let datagrams = wire.transmit(&[read]);
            assert_eq!(datagrams.len(), flights.len());
            let written = wire.carry(&datagrams);
            wire.same(&frames_of(&right).unwrap(), &judged(&written));
        }
    }
    assert_eq!((wire.near.drops(), wire.far.drops()), (vec![], vec![]));
}

#[test]
fn reads_too_short_for_their_headers_are_counted() {
    let read = Packet::new(false, false).with(&pattern(0, 3_000)).cut_to(1_000);
    for len in 0..VNET + 54 {
        let mut wire = Wire::new(|_| {});
        assert_eq!(wire.transmit(&[read[..len].to_vec()]).len(), 0, "{len} bytes");
        assert_eq!(wire.near.drops(), [(DropReason::BadSuperPacket, 1)], "{len} bytes");
    }
}

/// A read that begins as one from this host for the far one; the rest is as it comes.
fn any_read() -> impl Strategy<Value = Vec<u8>> {
    let packet = (0_usize..4, 0_usize..12_000, 1_u16..3_000, any::<bool>());
    let made = packet.prop_map(|(which, len, size, whole)| {
        let packet = Packet::each()[which].with(&pattern(len, len));
        if whole { packet.partial() } else { packet.cut_to(size) }
    });
    let noise = prop::collection::vec(any::<u8>(), 0..300);
    let read = prop_oneof![4 => made, 1 => noise];
    // Twists within the headers.
    let twists = prop::collection::vec((0_usize..140, any::<u8>()), 0..6);
    let vnet = prop::option::weighted(0.5, prop::array::uniform10(any::<u8>()));
    (read, vnet, twists).prop_map(|(mut read, vnet, twists)| {
        for (at, value) in twists {
            if let Some(byte) = read.get_mut(at) {
                *byte = value;
            }
        }
        if let (Some(vnet), Some(head)) = (vnet, read.first_chunk_mut::<VNET>()) {
            // A super-packet of a known type, or none, more often than not.
            *head = vnet;
            head[1] = [0, 1, 4, 5, vnet[1]][usize::from(vnet[1]) % 5];
        }
        for (at, mac) in [(VNET, super::FAR), (VNET + 6, super::LOCAL)] {
            if let Some(address) = read.get_mut(at..at + 6) {
                address.copy_from_slice(&mac.0);
            }
        }
        read
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Anything read is sent and arrives as the referee has it, or is answered, or is refused and counted.
    #[test]
    fn any_read_is_delivered_exactly_or_counted(read in any_read(), rco: bool) {
        let mut wire = Wire::new(|sa| sa.rco = rco);
        wire.idle_ids = false;
        let datagrams = wire.transmit(std::slice::from_ref(&read));
        let dropped: u64 = wire.near.drops().iter().map(|(_, count)| count).sum();
        if datagrams.is_empty() {
            prop_assert_eq!(dropped, 1);
            return Ok(());
        }
        prop_assert_eq!(dropped, 0);
        if wire.near.counters().done(Work::FragmentsSent) > 0 {
            return Ok(());
        }
        let mut plain = read;
        plain[2..4].fill(0);
        let written = wire.carry(&datagrams);
        prop_assert_eq!(wire.far_drops(), []);
        let whole = frames_of(&plain).map_err(TestCaseError::fail)?;
        let longest = whole.iter().map(|frame| frame.len() - link_header_len(frame)).max();
        // A packet longer than the path's MTU is cut for it: the referee is told of smaller segments.
        if let Some(beyond) = longest.and_then(|longest| longest.checked_sub(MTU_OF_WIRE)) {
            let size = u16::from_le_bytes([plain[4], plain[5]]) - beyond as u16;
            plain[4..6].copy_from_slice(&size.to_le_bytes());
        }
        let sent = frames_of(&plain).map_err(TestCaseError::fail)?;
        wire.same(&sent, &judged(&written));
    }
}

/// Ethernet header and VLAN tags.
fn link_header_len(frame: &[u8]) -> usize {
    let tags =
        frame[12..].chunks(4).take_while(|tag| matches!(tag, [0x81, 0, ..] | [0x88, 0xa8, ..]));
    14 + 4 * tags.count()
}

/// A datagram sealed with the right key around any plaintext.
fn sealed(sa: &SealingSa, plaintext: &[u8]) -> Vec<u8> {
    let mut datagram = vec![0; esp::HEADER_LEN];
    datagram.extend_from_slice(plaintext);
    datagram.resize(datagram.len() + esp::ICV_LEN, 0);
    sa.reserve(1).unwrap().seal_in_place(&mut datagram, plaintext.len()).unwrap();
    datagram
}

/// A plaintext that a peer seals: mostly a frame with a mark, and things wrong with it.
fn any_plaintext() -> impl Strategy<Value = Vec<u8>> {
    let frame = (0_usize..4, 0_usize..60, any::<bool>());
    let mark =
        prop::option::of(prop_oneof![any::<u8>(), Just(17), Just(0x91), Just(27), Just(0x9b)]);
    let twists = prop::collection::vec((0_usize..120, any::<u8>()), 0..4);
    (frame, mark, twists).prop_map(|((which, len, partial), mark, twists)| {
        let packet = Packet::each()[which].with(&pattern(len, len));
        let read = if partial { packet.partial() } else { packet.complete() };
        let frame = &read[VNET..];
        let mut plain = vec![0xc0, 0, 0x1a, 0x83, 0, 0, 0, 0];
        put(&mut plain, 4, (16 + frame.len()) as u16);
        plain.extend([8, if mark.is_some() { 0x20 } else { 0 }, 0, 0, 0, 0, 7, mark.unwrap_or(0)]);
        plain.extend_from_slice(frame);
        for (at, value) in twists {
            if let Some(byte) = plain.get_mut(at) {
                *byte = value;
            }
        }
        plain.extend([0, 17]);
        plain
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// For anything that a peer with good keys seals, each datagram is counted or in a write that the kernel
    /// takes.
    #[test]
    fn any_sealed_plaintext_is_written_sanely_or_counted(
        plaintexts in prop::collection::vec(any_plaintext(), 1..40),
    ) {
        let mut wire = Wire::new(|_| {});
        let sa = outbound_sa(SPI);
        let sealing = SealingSa::new(sa.cipher, SPI, &sa.key, 0);
        let datagrams: Vec<_> = plaintexts.iter().map(|plain| sealed(&sealing, plain)).collect();
        prop_assert_eq!(wire.accounted(&datagrams), plaintexts.len() as u64);
    }
}

/// Every bit of a datagram counts: altered, it is refused as forged, or as of an unknown SA.
#[test]
fn no_altered_datagram_is_opened() {
    let mut wire = Wire::new(|_| {});
    let flights = wire.send(&[Packet::new(true, false).with(b"sealed").partial()]);
    let good = &flights[0].datagram;
    assert!(good.len() < RUN_BYTES_MAX);
    let altered = altered(good);
    let written = wire.carry(&altered);
    assert_eq!(written.len(), 0);
    // A sequence number of 0 counts as used (RFC 4303 section 3.3.3).
    let forged = altered.len() as u64 - 33;
    assert_eq!(
        wire.far_drops(),
        [(DropReason::UnknownSpi, 32), (DropReason::Replayed, 1), (DropReason::Forged, forged)]
    );
    wire.arrives(&flights);
}
