//! Byte-exact delivery: a naive referee cuts the writes to the far TAP device and the reads from the near
//! one. Both must be equal, byte for byte and in order within each flow.

use etherparse::PacketHeaders;
use proptest::prelude::*;
use weft_crypto::Cipher;

use super::ovpn::in_ovpn;
use super::referee::{VNET, finish_ipv4, frames_of, put, reassembled};
use super::source::{ACK, Dice, PSH, Packet, pattern};
use super::wire::{Flight, Wire, judged};
use crate::stats::counters::{DropReason, Work};

const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
/// The segment size of a container with an MTU of 1388.
const MSS: u16 = 1336;

fn wire(cipher: Cipher, rco: bool) -> Wire {
    Wire::new(|sa| (sa.cipher, sa.rco) = (cipher, rco))
}

/// Both formats and ciphers, each with a peer that takes marks of partial checksums and with a peer that does
/// not.
fn wires() -> impl Iterator<Item = Wire> {
    let esp = CIPHERS.into_iter().flat_map(|cipher| [true, false].map(|rco| wire(cipher, rco)));
    let ovpn = CIPHERS.into_iter().flat_map(|cipher| {
        [true, false].map(|rco| {
            Wire::new(|sa| {
                (sa.cipher, sa.rco) = (cipher, rco);
                in_ovpn(sa);
            })
        })
    });
    esp.chain(ovpn)
}

/// A stream of super-packets of these lengths.
fn stream(packet: &Packet, size: u16, lens: &[usize]) -> Vec<Vec<u8>> {
    let (mut packet, mut done) = (packet.clone(), 0);
    let read = |len: &usize| {
        packet.payload = pattern(done, *len);
        let read = packet.offloaded(size);
        packet = packet.next(size);
        done += len;
        read
    };
    lens.iter().map(read).collect()
}

/// Four flows with super-packets and single packets, one after the other's.
fn mixed(df: bool) -> Vec<Vec<u8>> {
    let lens = [20_000, 100, 1336, 2672, 31_001, 1, 5];
    let flow = |(host, packet): (u8, Packet)| stream(&Packet { host, df, ..packet }, MSS, &lens);
    let flows: Vec<_> = (1..).zip(Packet::each()).map(flow).collect();
    (0..lens.len()).flat_map(|step| flows.iter().map(move |flow| flow[step].clone())).collect()
}

fn datagrams<'a>(flights: impl IntoIterator<Item = &'a Flight>) -> Vec<&'a [u8]> {
    flights.into_iter().map(|flight| &flight.datagram[..]).collect()
}

fn frames<'a>(flights: impl IntoIterator<Item = &'a Flight>) -> Vec<&'a [u8]> {
    flights.into_iter().map(|flight| &flight.frame[..]).collect()
}

fn super_packets(written: &[Vec<u8>]) -> usize {
    written.iter().filter(|read| read[1] != 0).count()
}

/// The referee is judged by `etherparse`: lengths and checksums of each frame that it cuts.
#[test]
fn the_referee_cuts_valid_packets() {
    for mut packet in Packet::each() {
        packet.tags = vec![[0x81, 0, 0, 5]];
        packet.payload = pattern(0, 10_001);
        let joined: Vec<u8> = [packet.partial(), packet.cut_to(999), packet.complete()]
            .iter()
            .flat_map(|read| frames_of(read).unwrap())
            .flat_map(|frame| {
                let headers = PacketHeaders::from_ethernet_slice(&frame).unwrap();
                let (ip, transport) = (headers.net.unwrap(), headers.transport.unwrap());
                let payload = headers.payload.slice();
                let found = transport.clone().tcp().map(|tcp| tcp.checksum);
                let found = found.or(transport.clone().udp().map(|udp| udp.checksum)).unwrap();
                let mut again = transport;
                match ip {
                    etherparse::NetHeaders::Ipv4(ip, _) => {
                        assert_eq!(ip.header_checksum, ip.calc_header_checksum());
                        assert_eq!(usize::from(ip.total_len), frame.len() - 18);
                        again.update_checksum_ipv4(&ip, payload).unwrap();
                    }
                    etherparse::NetHeaders::Ipv6(ip, _) => {
                        assert_eq!(usize::from(ip.payload_length), frame.len() - 58);
                        again.update_checksum_ipv6(&ip, payload).unwrap();
                    }
                    etherparse::NetHeaders::Arp(_) => panic!("no ARP was sent"),
                }
                let right = again.clone().tcp().map(|tcp| tcp.checksum);
                assert_eq!(found, right.or(again.udp().map(|udp| udp.checksum)).unwrap());
                payload.to_vec()
            })
            .collect();
        assert_eq!(joined, packet.payload.repeat(3));
    }
}

/// Payloads from 1 byte to the longest that IP can say, in segments of ever another size.
fn every_size(packet: &Packet, cipher: Cipher, rco: bool) {
    let bytes = pattern(0, 70_000);
    let (mut wire, mut packet) = (wire(cipher, rco), packet.clone());
    let mut merged = 0;
    for len in 1..=packet.payload_max() {
        let size = 88 + (len * 37 % 8_873) as u16;
        packet.payload.clear();
        packet.payload.extend_from_slice(&bytes[len % 251..][..len]);
        merged += super_packets(&wire.crosses(&[packet.offloaded(size)]));
        packet = packet.next(size);
    }
    assert!(merged > 50_000, "{merged} super-packets");
}

#[test]
fn every_super_packet_size_of_tcp_over_ipv4() {
    every_size(&Packet::new(false, false), Cipher::Aes256Gcm, true);
}

#[test]
fn every_super_packet_size_of_tcp_over_ipv6() {
    every_size(&Packet::new(false, true), Cipher::ChaCha20Poly1305, false);
}

#[test]
fn every_super_packet_size_of_udp_over_ipv4() {
    every_size(&Packet::new(true, false), Cipher::ChaCha20Poly1305, true);
}

#[test]
fn every_super_packet_size_of_udp_over_ipv6() {
    every_size(&Packet::new(true, true), Cipher::Aes256Gcm, false);
}

/// Each is written as the super-packet that it was, and not only as frames that are right.
#[test]
fn every_mss_from_88_to_8960() {
    for (packet, mut wire) in Packet::each().into_iter().cycle().zip(wires()) {
        wire.group.0 = wire.group.1;
        for size in 88..=8_960 {
            let packet = packet.with(&pattern(size.into(), 3 * usize::from(size) + 1));
            let read = packet.cut_to(size);
            let written = wire.crosses(std::slice::from_ref(&read));
            assert!(written == [read], "segments of {size} bytes");
        }
    }
}

/// A path that carries less than the container thinks: TCP is cut as if it had known.
#[test]
fn every_path_smaller_than_the_mss() {
    for (mut wire, v6) in wires().zip([false, true].into_iter().cycle()) {
        let packet = Packet::new(false, v6).with(&pattern(0, 20_001));
        let headers = packet.header_len() - packet.l3();
        for mtu in (200..1388).step_by(4) {
            wire.set_mtu(mtu);
            let datagrams = wire.transmit(&[packet.cut_to(MSS)]);
            let sent = frames_of(&packet.cut_to(mtu - headers as u16)).unwrap();
            let written = wire.carry(&datagrams);
            wire.same(&sent, &judged(&written));
        }
        assert_eq!((wire.near.drops(), wire.far.drops()), (vec![], vec![]));
    }
}

#[test]
fn however_the_kernel_groups_the_datagrams() {
    for mut wire in wires() {
        for group in [(1, 1), (2, 2), (1, 3), (5, 30), (64, 64)] {
            wire.group = group;
            wire.crosses(&mixed(true));
            wire.crosses(&mixed(false));
        }
    }
}

#[test]
fn odd_sizes() {
    for mut wire in wires() {
        for packet in Packet::each() {
            for odd in (1..=401).step_by(2) {
                let size = 87 + 2 * odd;
                let lens = [odd.into(), usize::from(size) * 5 + usize::from(odd), 33_333, 1, 3];
                wire.crosses(&stream(&packet, size, &lens));
            }
        }
    }
}

#[test]
fn reordered_datagrams_arrive_in_the_order_of_the_wire() {
    for (mut wire, seed) in wires().zip(1..) {
        for df in [true, false] {
            // Datagrams that may not be fragmented are merged whatever their order.
            wire.idle_ids = !df;
            for distance in [2, 3, 10, 100, 1_000] {
                let mut flights = wire.send(&mixed(df));
                let mut dice = Dice(seed);
                flights.chunks_mut(distance).for_each(|chunk| dice.shuffle(chunk));
                wire.arrives(&flights);
                assert_eq!(wire.far_drops(), []);
            }
        }
    }
}

#[test]
fn a_datagram_later_than_the_replay_window_is_counted_and_the_rest_arrives() {
    for mut wire in wires() {
        let packet = Packet::new(false, true);
        let mut flights = wire.send(&stream(&packet, 88, &[60_000; 14]));
        let late = flights.remove(7);
        wire.arrives(&flights);
        assert!(wire.carry(&[&late.datagram]).is_empty());
        assert_eq!(wire.far_drops(), [(DropReason::TooOld, 1)]);
    }
}

#[test]
fn duplicated_datagrams_arrive_once() {
    for mut wire in wires() {
        let flights = wire.send(&mixed(true));
        let twice: Vec<&[u8]> =
            datagrams(&flights).iter().flat_map(|datagram| [*datagram; 2]).collect();
        let mut written = wire.carry(&twice);
        // And once more, long after.
        written.extend(wire.carry(&datagrams(&flights)));
        wire.same(&frames(&flights), &judged(&written));
        assert_eq!(wire.far_drops(), [(DropReason::Replayed, 2 * flights.len() as u64)]);
    }
}

#[test]
fn lost_datagrams_are_missing_and_nothing_else() {
    for (mut wire, seed) in wires().zip((1..=4).cycle()) {
        for df in [true, false] {
            wire.idle_ids = !df;
            for one_in in [2, 10, 100] {
                let mut dice = Dice(seed);
                let mut flights = wire.send(&mixed(df));
                let sent = flights.len();
                flights.retain(|_| dice.roll(one_in) > 0);
                assert!(flights.len() < sent);
                wire.arrives(&flights);
                assert_eq!(wire.far_drops(), []);
            }
        }
    }
}

#[test]
fn ipv4_with_and_without_df() {
    for mut wire in wires() {
        for udp in [false, true] {
            let lens = [40_000, 1, 20_000, 1336];
            for df in [false, true] {
                let packet = Packet { df, ..Packet::new(udp, false) };
                let written = wire.crosses(&stream(&packet, MSS, &lens));
                assert!(super_packets(&written) >= 2);
            }
            // Identifications that do not follow each other are kept where they count.
            wire.group.0 = wire.group.1;
            let whole = pattern(0, 8 * usize::from(MSS));
            let packet = Packet { df: false, ..Packet::new(udp, false) }.with(&whole);
            let far = Packet { id: packet.id + 20, ..packet.next(MSS) };
            wire.crosses(&[packet.offloaded(MSS), far.offloaded(MSS)]);
            let (packet, far) = (Packet { df: true, ..packet }, Packet { df: true, ..far });
            wire.idle_ids = false;
            let written = wire.crosses(&[packet.offloaded(MSS), far.offloaded(MSS)]);
            assert_eq!(written.len(), 1, "where they do not count they hinder nothing");
            (wire.idle_ids, wire.group.0) = (true, 1);
        }
    }
}

#[test]
fn ipv4_options() {
    for mut wire in wires() {
        for udp in [false, true] {
            let options = vec![0x94, 4, 0, 0, 0x44, 8, 9, 0, 1, 2, 3, 4];
            let packet = Packet { options, ..Packet::new(udp, false) };
            wire.crosses(&stream(&packet, MSS, &[1, 30_001, 1336]));
        }
    }
}

/// An extension header of `len` bytes.
fn extension(kind: u8, len: usize) -> (u8, Vec<u8>) {
    // Options: one PadN over all of it.
    let mut bytes = vec![0; len];
    bytes[1..4].copy_from_slice(&[(len / 8 - 1) as u8, 1, (len - 4) as u8]);
    (kind, bytes)
}

/// A routing header with one address to go (RFC 6275 section 6.4).
fn routing() -> (u8, Vec<u8>) {
    let mut bytes = vec![0, 2, 2, 1, 0, 0, 0, 0];
    bytes.extend([0xfd, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 7, 7]);
    (43, bytes)
}

#[test]
fn ipv6_with_extension_headers() {
    let fragment_of_its_own = (44, vec![0, 0, 0, 0, 1, 2, 3, 4]);
    let chains = [
        vec![extension(0, 8)],
        vec![extension(60, 24)],
        vec![extension(0, 16), extension(60, 8), extension(60, 40)],
        // So long that no mark can say where the checksum is.
        vec![extension(0, 128), extension(60, 128)],
        vec![fragment_of_its_own],
        vec![routing()],
        vec![extension(0, 8), routing(), extension(60, 8)],
    ];
    for mut wire in wires() {
        for extensions in &chains {
            for udp in [false, true] {
                let packet = Packet { extensions: extensions.clone(), ..Packet::new(udp, true) };
                wire.crosses(&stream(&packet, MSS, &[1, 30_001, 1336]));
                wire.crosses(&[packet.with(b"complete").complete()]);
            }
        }
    }
}

#[test]
fn vlan_tags() {
    let tags = [
        vec![[0x81, 0, 0, 5]],
        vec![[0x81, 0, 0xe0, 0]],
        vec![[0x88, 0xa8, 0, 7], [0x81, 0, 0x60, 9]],
    ];
    for mut wire in wires() {
        for tags in &tags {
            for packet in Packet::each() {
                let packet = Packet { tags: tags.clone(), ..packet };
                let written = wire.crosses(&stream(&packet, MSS, &[1, 30_001, 1336]));
                assert!(super_packets(&written) > 0);
            }
        }
        // Flows that differ in the tag alone are not merged.
        for packet in Packet::each() {
            let five = Packet { tags: vec![[0x81, 0, 0, 5]], ..packet.with(&pattern(0, 100)) };
            let six = Packet { tags: vec![[0x81, 0, 0, 6]], ..five.next(100) };
            assert_eq!(wire.crosses(&[five.partial(), six.partial()]).len(), 2);
        }
        // More tags than are looked through.
        let packet = Packet { tags: vec![[0x81, 0, 0, 5]; 3], ..Packet::new(false, false) };
        wire.crosses(&[packet.with(b"deep").complete(), packet.with(b"deeper").partial()]);
    }
}

#[test]
fn checksum_offload_off_in_the_container() {
    for mut wire in wires() {
        wire.group.0 = wire.group.1;
        for mut packet in Packet::each() {
            let mut reads = Vec::new();
            for index in 0..200 {
                packet.payload = pattern(index * 1000, 1000);
                packet.flags = if index % 20 == 19 { ACK | PSH } else { ACK };
                reads.push(packet.complete());
                packet = packet.next(1000);
            }
            let written = wire.crosses(&reads);
            assert!(written.len() <= 20, "{} writes of 200 packets", written.len());
        }
    }
}

/// Offloads on and off in turn, within one flow.
#[test]
fn partial_and_complete_checksums_by_turns() {
    for mut wire in wires() {
        for mut packet in Packet::each() {
            let mut dice = Dice(3);
            let mut reads = Vec::new();
            for index in 0..100 {
                packet.payload = pattern(index * 500, 500);
                reads.push(if dice.roll(3) == 0 { packet.partial() } else { packet.complete() });
                packet = packet.next(500);
            }
            wire.crosses(&reads);
        }
    }
}

#[test]
fn a_corrupted_inner_checksum_arrives_corrupted() {
    for mut wire in wires() {
        wire.group.0 = wire.group.1;
        for mut packet in Packet::each() {
            let mut dice = Dice(5);
            let mut reads = Vec::new();
            for index in 0..300 {
                packet.payload = pattern(index * 400, 400);
                let mut read = packet.complete();
                let l4 = VNET + packet.l4();
                let at = match dice.roll(8) {
                    // The checksum itself.
                    0 => l4 + if packet.udp { 6 } else { 16 } + dice.roll(2),
                    // The bytes under the checksum.
                    1 => l4 + packet.header_len() - packet.l4() + dice.roll(400),
                    // The IPv4 header's.
                    2 if !packet.v6 => VNET + packet.l3() + 10 + dice.roll(2),
                    _ => 0,
                };
                if at > 0 {
                    read[at] ^= 1 << dice.roll(8);
                }
                reads.push(read);
                packet = packet.next(400);
            }
            let written = wire.crosses(&reads);
            assert!(super_packets(&written) > 10, "the good ones between are merged");
        }
    }
}

/// The field of a partial checksum keeps the container's value: it is as wrong at the end.
#[test]
fn a_wrong_partial_checksum_arrives_wrong() {
    for mut wire in wires() {
        for packet in Packet::each() {
            let spoil = |mut read: Vec<u8>| {
                read[VNET + packet.l4() + if packet.udp { 6 } else { 16 }] ^= 0x11;
                read
            };
            let first = packet.with(&pattern(0, 1000));
            let second = first.next(1000).with(&pattern(1000, 10_000));
            wire.crosses(&[spoil(first.partial()), spoil(second.offloaded(1000))]);
        }
    }
}

/// Cuts an IPv4 packet without options into fragments of `room` bytes (RFC 791 section 3.2).
fn fragments_of(read: &[u8], room: usize) -> Vec<Vec<u8>> {
    let (headers, data) = read.split_at(VNET + 34);
    let count = data.len().div_ceil(room);
    let fragment = |(index, piece): (usize, &[u8])| {
        let mut frame = [headers, piece].concat();
        let more = if index + 1 < count { 0x2000 } else { 0 };
        put(&mut frame, VNET + 16, (20 + piece.len()) as u16);
        put(&mut frame, VNET + 20, more | (index * room / 8) as u16);
        finish_ipv4(&mut frame, VNET + 14);
        frame
    };
    data.chunks(room).enumerate().map(fragment).collect()
}

#[test]
fn fragments() {
    for mut wire in wires() {
        for udp in [false, true] {
            let mut packet = Packet { df: false, ..Packet::new(udp, false) };
            let mut reads = Vec::new();
            for index in 0..20 {
                packet.payload = pattern(index * 1000, 1000);
                if index % 5 == 2 {
                    reads.extend(fragments_of(&packet.complete(), 480));
                } else {
                    reads.push(packet.partial());
                }
                packet = packet.next(1000);
            }
            wire.crosses(&reads);
            // IPv6: the first of two, the second, and a packet of the same flow.
            let part = |offset: u8, more: u8| Packet {
                extensions: vec![(44, vec![0, 0, offset, more, 1, 2, 3, 4])],
                ..Packet::new(udp, true).with(&pattern(0, 600))
            };
            let whole = Packet::new(udp, true).with(&pattern(0, 600));
            let reads = [part(0, 1).complete(), part(2, 0).complete(), whole.partial()];
            wire.crosses(&[&reads[..], &reads[..]].concat());
        }
    }
}

/// Longer than the path, and the sender allows fragments: they are the packet when put together.
#[test]
fn packets_that_the_engine_fragments() {
    for mut wire in wires() {
        wire.set_mtu(1388);
        for options in [vec![], vec![0x94, 4, 0, 0, 0x44, 8, 9, 0, 1, 2, 3, 4]] {
            let packet = Packet { df: false, options, ..Packet::new(true, false) };
            let reads = [
                packet.with(&pattern(0, 5_000)).partial(),
                packet.with(&pattern(1, 5_001)).complete(),
                packet.with(&pattern(2, 30_001)).cut_to(4_000),
                packet.with(&pattern(3, 1_000)).partial(),
            ];
            let mut id = 0;
            let reads = reads.map(|mut read| {
                id += 100;
                put(&mut read, VNET + 18, id);
                finish_ipv4(&mut read, VNET + 14);
                read
            });
            let sent: Vec<Vec<u8>> =
                reads.iter().flat_map(|read| frames_of(read).unwrap()).collect();
            let datagrams = wire.transmit(&reads);
            assert!(datagrams.len() > sent.len() * 2, "{} datagrams", datagrams.len());
            let written = wire.carry(&datagrams);
            let frames = judged(&written);
            assert!(frames.iter().all(|frame| frame.len() <= 14 + 1388));
            wire.same(&sent, &reassembled(&frames));
        }
        assert_eq!((wire.near.drops(), wire.far.drops()), (vec![], vec![]));
    }
}

#[test]
fn zero_length_udp() {
    for mut wire in wires() {
        for v6 in [false, true] {
            for df in [false, true] {
                let packet = Packet { df, ..Packet::new(true, v6) };
                let full = packet.with(&pattern(0, 100));
                let mut bare = packet.complete();
                if !v6 {
                    put(&mut bare, VNET + packet.l4() + 6, 0);
                }
                // As a driver pads the shortest Ethernet frames.
                let mut padded = packet.complete();
                padded.resize(VNET + 70, 0);
                let reads = [
                    full.partial(),
                    packet.partial(),
                    full.complete(),
                    packet.complete(),
                    bare,
                    full.cut_to(30),
                    packet.partial(),
                    packet.partial(),
                    padded,
                ];
                wire.idle_ids = !df;
                wire.crosses(&reads);
            }
        }
    }
}

/// Short frames as a driver pads them, zeros or not, among others of their flow.
#[test]
fn ethernet_padding() {
    for mut wire in wires() {
        for mut packet in Packet::each() {
            let mut reads = Vec::new();
            for index in 0..40 {
                packet.payload = pattern(index * 9, 9);
                let mut read = packet.complete();
                if index % 3 == 0 {
                    read.extend(vec![(index % 2) as u8; 12]);
                }
                reads.push(read);
                packet = packet.next(9);
            }
            wire.crosses(&reads);
        }
    }
}

#[test]
fn udp_without_a_checksum() {
    for mut wire in wires() {
        let mut packet = Packet::new(true, false);
        let mut reads = Vec::new();
        for index in 0..20 {
            packet.payload = pattern(index * 100, 100);
            let mut read = packet.complete();
            if index % 3 == 0 {
                put(&mut read, VNET + packet.l4() + 6, 0);
            }
            reads.push(read);
            packet = packet.next(100);
        }
        wire.crosses(&reads);
    }
}

#[test]
fn a_tap_device_that_takes_no_super_packets() {
    for merging in [(false, false), (true, false), (false, true)] {
        for mut wire in wires() {
            wire.far.receiver.set_merging(merging.0, merging.1);
            let written = wire.crosses(&mixed(true));
            assert_eq!(super_packets(&written) > 0, merging.0 || merging.1);
        }
    }
}

/// Packets that are neither TCP nor UDP, and frames that are not IP, of every length.
#[test]
fn frames_of_other_kinds() {
    for mut wire in wires() {
        let mut head = Packet::new(true, false).complete();
        for kind in [[0x08, 0x06], [0x08, 0x00], [0x86, 0xdd], [0x81, 0x00], [0x00, 0x10]] {
            head[VNET + 12..VNET + 14].copy_from_slice(&kind);
            head[VNET + 23] = 1;
            // A VLAN tag is whole, or the frame is none.
            let least = if kind == [0x81, 0x00] { 4 } else { 0 };
            let reads =
                (least..200).map(|len| [&head[..VNET + 14], &pattern(len, len)[..]].concat());
            wire.crosses(&reads.collect::<Vec<_>>());
            wire.crosses(&[head.clone()]);
        }
    }
}

/// One read of a random conversation; moves the flow on.
fn any_read(dice: &mut Dice, flow: &mut Packet) -> Vec<u8> {
    let size = 88 + dice.roll(2_000) as u16;
    let len = match dice.roll(4) {
        0 => dice.roll(3),
        1 => usize::from(size),
        2 => dice.roll(9_000),
        _ => dice.roll(60_000),
    };
    flow.payload = pattern(dice.roll(1_000), len);
    flow.flags = if dice.roll(6) == 0 { ACK | PSH } else { ACK };
    let mut read = match dice.roll(4) {
        0 if len < 9_000 => flow.complete(),
        1 if (1..9_000).contains(&len) => {
            let mut read = flow.complete();
            let at = VNET + flow.l4() + 4 + dice.roll(flow.header_len() - flow.l4() - 4 + len);
            read[at] ^= 1 << dice.roll(8);
            read
        }
        _ => flow.offloaded(size),
    };
    // The hint is not to be trusted.
    if dice.roll(4) == 0 && read[1] != 0 {
        read[2] = dice.roll(60) as u8;
    }
    *flow = flow.next(size);
    if dice.roll(10) == 0 {
        flow.id = flow.id.wrapping_add(7);
    }
    if dice.roll(20) == 0 {
        flow.sequence = flow.sequence.wrapping_add(1);
    }
    read
}

fn any_flow(dice: &mut Dice, host: u8) -> Packet {
    let flow = Packet::new(dice.roll(2) == 0, dice.roll(2) == 0);
    let tags =
        [vec![], vec![], vec![[0x81, 0, 0, host]], vec![[0x88, 0xa8, 0, 1], [0x81, 0, 0, 2]]];
    let extensions = [vec![], vec![], vec![], vec![extension(60, 16)]];
    let options = [vec![], vec![], vec![], vec![0x94, 4, 0, 0]];
    Packet {
        host,
        df: dice.roll(2) == 0,
        tags: tags[dice.roll(4)].clone(),
        extensions: extensions[dice.roll(4)].clone(),
        options: options[dice.roll(4)].clone(),
        id: dice.roll(65_536) as u16,
        ..flow
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// All at once: flows of all kinds over a wire that loses, repeats and reorders.
    #[test]
    fn any_conversation_over_a_bad_wire(
        seed: u64,
        chacha: bool,
        rco: bool,
        distance in 1_usize..200,
        lost_one_in in 5_usize..500,
        doubled_one_in in 5_usize..500,
        group in prop::sample::select(vec![(1, 1), (1, 4), (1, 64), (64, 64)]),
    ) {
        let mut wire = wire(CIPHERS[usize::from(chacha)], rco);
        (wire.group, wire.idle_ids) = (group, false);
        let dice = &mut Dice(seed);
        let mut flows: Vec<Packet> = (1..=5).map(|host| any_flow(dice, host)).collect();
        let reads: Vec<Vec<u8>> = (0..60)
            .map(|_| {
                let flow = dice.roll(flows.len());
                any_read(dice, &mut flows[flow])
            })
            .collect();
        let mut flights = wire.send(&reads);
        flights.retain(|_| dice.roll(lost_one_in) > 0);
        flights.chunks_mut(distance).for_each(|chunk| dice.shuffle(chunk));
        let on_the_wire: Vec<&Flight> = flights
            .iter()
            .flat_map(|flight| vec![flight; if dice.roll(doubled_one_in) == 0 { 2 } else { 1 }])
            .collect();
        let written = wire.carry(&datagrams(on_the_wire.iter().copied()));
        wire.same(&frames(&flights), &judged(&written));
        let doubled = (on_the_wire.len() - flights.len()) as u64;
        prop_assert_eq!(wire.far.counters().dropped(DropReason::Replayed), doubled);
        prop_assert_eq!(wire.far_drops().len(), usize::from(doubled > 0));
        prop_assert_eq!(wire.far.counters().done(Work::DatagramsReceived), on_the_wire.len() as u64);
    }
}
