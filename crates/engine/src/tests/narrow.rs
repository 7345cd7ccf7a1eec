//! Paths that carry less than containers send: how TCP learns of it, and the size that IPv6 may count on.

use super::referee::VNET;
use super::source::{Packet, pattern};
use super::*;
use crate::tables::networks::NetworkNumber;

/// The inner MTU on a link of 1,280 bytes.
const NARROW: u16 = 1_188;
const IPV6_MIN: usize = 1_280;
const SYN: u8 = 2;

fn narrow() -> Rig {
    let mut rig = Rig::new();
    rig.command(EngineCommand::SetPathMtu { path: PATH, mtu: NARROW });
    rig
}

/// A packet that opens a connection and says 1,460 bytes.
fn opening(v6: bool) -> Packet {
    let mut packet = Packet::new(false, v6);
    packet.flags = SYN;
    packet.tcp_options = vec![2, 4, 5, 180];
    packet
}

/// A datagram in an IPv6 packet of `len` bytes.
fn datagram(len: usize) -> Vec<u8> {
    Packet::new(true, true).with(&pattern(0, len - 48)).complete()
}

/// The segment size that the only frame written says.
fn told(rig: &Rig) -> u16 {
    let frames = rig.tap.frames.borrow();
    assert_eq!(frames.len(), 1);
    let frame = &frames[0];
    u16::from_be_bytes([frame[frame.len() - 2], frame[frame.len() - 1]])
}

#[test]
fn a_connection_is_opened_with_no_more_than_the_path_carries() {
    for v6 in [false, true] {
        let headers = if v6 { 60 } else { 40 };
        for read in [opening(v6).complete(), opening(v6).partial()] {
            let mut rig = Rig::new();
            rig.transmit(&mut [read.clone()]);
            rig.receive();
            assert_eq!(told(&rig), 1_460);
            let mut rig = narrow();
            rig.transmit(&mut [read]);
            rig.receive();
            assert_eq!(told(&rig), NARROW - headers);
            // A frame written alone without a mark has been found right.
            assert_eq!((rig.drops(), rig.counters().done(Work::SegmentSizesLowered)), (vec![], 1));
        }
    }
}

#[test]
fn a_peers_opening_is_lowered_on_receipt() {
    for v6 in [false, true] {
        let mut rig = Rig::new();
        // Sealed before the path is known to be narrow, as by a peer that lowers nothing.
        rig.transmit(&mut [opening(v6).complete()]);
        rig.command(EngineCommand::SetPathMtu { path: PATH, mtu: NARROW });
        rig.receive();
        assert_eq!(told(&rig), NARROW - if v6 { 60 } else { 40 });
        assert_eq!(rig.drops(), []);
        // Once the path carries all again, nothing is lowered.
        rig.command(EngineCommand::SetPathMtu { path: PATH, mtu: MTU });
        rig.tap.frames.borrow_mut().clear();
        rig.transmit(&mut [opening(v6).complete()]);
        rig.receive();
        assert_eq!(told(&rig), 1_460);
    }
}

#[test]
fn a_path_that_goes_takes_its_narrowness_along() {
    let mut rig = narrow();
    let peer = rig.state.peer_of(NetworkNumber::FIRST.key(FAR.0)).unwrap();
    assert_eq!(rig.state.narrow_mtu(peer), Some(NARROW));
    rig.command(EngineCommand::SetPathMtu { path: PATH, mtu: NARROW - 4 });
    assert_eq!(rig.state.narrow_mtu(peer), Some(NARROW - 4));
    rig.command(EngineCommand::BindPath { peer: PEER, path: None });
    assert_eq!(rig.state.narrow_mtu(peer), None);
    rig.command(EngineCommand::RemovePeer { peer: PEER });
    assert_eq!(rig.state.narrow_paths(), 0);
}

#[test]
fn ipv6_packets_up_to_the_minimum_mtu_are_left_for_the_kernel_to_cut() {
    let mut rig = narrow();
    let reads = [datagram(NARROW.into()), datagram(NARROW as usize + 1), datagram(IPV6_MIN)];
    rig.transmit(&mut reads.clone());
    rig.receive();
    assert_eq!(rig.drops(), []);
    assert_eq!((rig.socket.cut.get(), rig.counters().done(Work::CutOutside)), (2, 2));
    assert_eq!(*rig.tap.frames.borrow(), reads);
    // A super-packet of datagrams too, each by itself.
    rig.tap.frames.borrow_mut().clear();
    let each = (IPV6_MIN - 48) as u16;
    let many = Packet::new(true, true).with(&pattern(0, 5 * usize::from(each))).cut_to(each);
    rig.transmit(&mut [many]);
    rig.receive();
    assert_eq!((rig.socket.cut.get(), rig.counters().done(Work::CutOutside)), (7, 7));
    assert_eq!(rig.counters().done(Work::DatagramsReceived), 3 + 5);
    assert_eq!(
        (rig.drops(), rig.events()),
        (vec![], vec![EngineEvent::InboundFirstUse { spi: SPI }])
    );
}

#[test]
fn senders_of_longer_packets_are_told_the_mtu() {
    let mut rig = narrow();
    rig.transmit(&mut [datagram(IPV6_MIN + 1)]);
    let answer = rig.tap.frames.borrow_mut().pop().unwrap();
    let icmp = &answer[VNET + ethernet::LEN + 40..];
    // Packet too big; less than 1,280 would be ignored.
    assert_eq!((icmp[0], &icmp[4..8]), (2, &1_280_u32.to_be_bytes()[..]));
    let packet = Packet::new(true, false).with(&pattern(0, 1_200)).complete();
    rig.transmit(&mut [packet]);
    let answer = rig.tap.frames.borrow_mut().pop().unwrap();
    let icmp = &answer[VNET + ethernet::LEN + ipv4::LEN..];
    assert_eq!((icmp[0], icmp[1], &icmp[6..8]), (3, 4, &NARROW.to_be_bytes()[..]));
    assert_eq!((rig.socket.cut.get(), rig.drops()), (0, vec![(DropReason::TooLong, 2)]));
}

#[test]
fn a_refusal_of_what_may_be_cut_says_nothing_of_the_path() {
    let mut rig = narrow();
    rig.socket.errors.set((None, Some(errno::EMSGSIZE)));
    rig.transmit(&mut [datagram(IPV6_MIN)]);
    assert_eq!((rig.drops(), rig.events()), (vec![(DropReason::MessageTooLong, 1)], vec![]));
    // Nor does it count twice where several go one by one.
    let each = (IPV6_MIN - 48) as u16;
    let many = Packet::new(true, true).with(&pattern(0, 3 * usize::from(each))).cut_to(each);
    rig.transmit(&mut [many]);
    assert_eq!((rig.drops(), rig.peers_drops()), (vec![(DropReason::MessageTooLong, 4)], 4));
    assert_eq!(rig.events(), []);
}
