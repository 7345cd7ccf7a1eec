//! Properties of format `ovpn` alone; `exact` holds the tests of both formats.

use std::net::Ipv6Addr;

use proptest::prelude::*;
use weft_crypto::{SaKey, TunnelEnd, TunnelWay, ovpn};
use weft_openvpn::data::{DataPacket, PING};
use weft_packet::tunnel::HEADERS_LEN;
use weft_path::{EngineCommand, EngineEvent, EngineKind, InboundSa, OutboundSa};

use super::referee::{VNET, frames_of, put};
use super::source::{Packet, pattern};
use super::wire::{Wire, altered, judged};
use super::{PATH, PEER, Rig, SPI, udp_read};
use crate::sample_sas::{inbound_sa, outbound_sa};
use crate::stats::counters::{DropReason, Work};

/// DATA_V2 with key id 3, and a peer id of lane 0.
const WORD: u32 = 0x4b12_3400;
/// From the outer UDP payload's begin to the frame.
const AROUND: usize = ovpn::OVERHEAD_BYTES + HEADERS_LEN;

/// Makes it an SA of this format.
pub(super) fn in_ovpn(sa: &mut OutboundSa) {
    sa.spi = WORD;
    sa.key = SaKey::for_ovpn([3; 40]);
}

/// The tunnel address of the one host, which is both ends, for its vector engine.
fn address(way: TunnelWay) -> Ipv6Addr {
    PEER.tunnel_address(TunnelEnd { way, kernel: false })
}

/// Likewise with its kernel engine.
fn kernels_address(way: TunnelWay) -> Ipv6Addr {
    PEER.tunnel_address(TunnelEnd { way, kernel: true })
}

fn wire() -> Wire {
    Wire::new(in_ovpn)
}

/// Another reader of the same bytes sees what OpenVPN's peers expect.
#[test]
fn packets_are_those_of_openvpns_data_channel() {
    let mut wire = wire();
    let packet = Packet::new(false, true).with(&pattern(0, 9_000));
    let flights = wire.send(&[packet.offloaded(1_300)]);
    let key = opening();
    let mut window = weft_crypto::ReplayWindow::new();
    for (flight, number) in flights.iter().zip(1_u32..) {
        let seen = DataPacket::parse(&flight.datagram).unwrap();
        assert_eq!((seen.key_id.get(), seen.peer.unwrap().get()), (3, 0x12_3400));
        assert_eq!(seen.packet_id, number);
        let mut packet = flight.datagram.clone();
        let plain = key.open(&mut window, &mut packet).unwrap();
        let inside = etherparse::SlicedPacket::from_ip(&packet[plain.clone()]).unwrap();
        let Some(etherparse::NetSlice::Ipv6(ipv6)) = inside.net else { panic!("no IPv6") };
        assert_eq!(ipv6.header().source_addr(), address(TunnelWay::From));
        assert_eq!(ipv6.header().destination_addr(), address(TunnelWay::To));
        let Some(etherparse::TransportSlice::Udp(udp)) = inside.transport else { panic!("no UDP") };
        assert_eq!((udp.destination_port(), udp.checksum()), (6787, 0));
        assert_eq!(plain.len(), HEADERS_LEN + flight.frame.len());
        assert_eq!(flight.datagram.len(), AROUND + flight.frame.len());
    }
}

#[test]
fn no_altered_packet_is_opened() {
    let mut wire = wire();
    let flights = wire.send(&[Packet::new(true, false).with(b"sealed").partial()]);
    let good = &flights[0].datagram;
    let altered = altered(good);
    assert!(wire.carry(&altered).is_empty());
    // The first packet id is 1, and 0 is none.
    let forged = altered.len() as u64 - 33;
    assert_eq!(
        wire.far_drops(),
        [(DropReason::Malformed, 1), (DropReason::UnknownSpi, 32), (DropReason::Forged, forged)]
    );
    wire.arrives(&flights);
}

/// A packet sealed with the right key around any plaintext.
fn sealed(key: &ovpn::SealingKey, plaintext: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; ovpn::OVERHEAD_BYTES];
    packet.extend_from_slice(plaintext);
    let mut sealer = key.reserve(1, WORD.to_be_bytes()).unwrap();
    sealer.seal_in_place(&mut packet, plaintext.len()).unwrap();
    packet
}

fn opening() -> ovpn::OpeningKey {
    ovpn::OpeningKey::of_sa(outbound_sa(SPI).cipher, &SaKey::for_ovpn([3; 40]))
}

fn sealing() -> ovpn::SealingKey {
    ovpn::SealingKey::of_sa(outbound_sa(SPI).cipher, &SaKey::for_ovpn([3; 40]))
}

/// The plaintext of a packet that carries this frame.
fn plaintext(frame: &[u8]) -> Vec<u8> {
    plaintext_from(address(TunnelWay::From), frame)
}

fn plaintext_from(source: Ipv6Addr, frame: &[u8]) -> Vec<u8> {
    let mut plain = vec![0x60, 0, 0, 0, 0, 0, 17, 64];
    put(&mut plain, 4, (16 + frame.len()) as u16);
    for address in [source, address(TunnelWay::To)] {
        plain.extend(address.octets());
    }
    plain.extend([0xc0, 0, 0x1a, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 7, 0]);
    put(&mut plain, 44, (16 + frame.len()) as u16);
    plain.extend_from_slice(frame);
    plain
}

#[test]
fn frames_of_third_parties_are_dropped() {
    let mut wire = wire();
    let key = sealing();
    let read = Packet::new(true, false).with(b"inside").complete();
    let good = plaintext(&read[VNET..]);
    let twisted = |at: usize, value: u8| {
        let mut plain = good.clone();
        plain[at] = value;
        sealed(&key, &plain)
    };
    // Version, next header, source, destination, UDP length, VXLAN flags.
    let bad = [(0, 0x45), (6, 6), (8 + 15, 1), (24 + 7, 1), (45, 3), (48, 0)];
    let bad: Vec<Vec<u8>> = bad.iter().map(|(at, value)| twisted(*at, *value)).collect();
    assert!(wire.carry(&bad).is_empty());
    assert_eq!(wire.far_drops(), [(DropReason::BadInner, bad.len() as u64)]);
    let written = wire.carry(&[sealed(&key, &good)]);
    assert_eq!(judged(&written), frames_of(&read).unwrap());
    assert!(wire.carry(&[sealed(&key, &PING)]).is_empty());
    assert_eq!(wire.far.counters().done(Work::Dummies), 1);
}

#[test]
fn the_kernels_engine_has_addresses_of_its_own() {
    let mut wire = Wire::new(|sa| {
        in_ovpn(sa);
        sa.remote_engine = EngineKind::Kernel;
    });
    let read = Packet::new(true, false).with(b"inside").complete();
    let sent = wire.transmit(std::slice::from_ref(&read));
    let (key, mut packet) = (opening(), sent[0].clone());
    let plain = key.open(&mut weft_crypto::ReplayWindow::new(), &mut packet).unwrap();
    let ends = [address(TunnelWay::From), kernels_address(TunnelWay::To)].map(|it| it.octets());
    assert_eq!(packet[plain][8..40], ends.concat());
    // It takes what the peer's kernel has sent, and not what its vector engine would.
    assert!(wire.carry(&sent).is_empty());
    assert_eq!(wire.far_drops(), [(DropReason::BadInner, 1)]);
    let good = plaintext_from(kernels_address(TunnelWay::From), &read[VNET..]);
    let key = sealing();
    // The one before has the first packet id.
    sealed(&key, &good);
    let written = wire.carry(&[sealed(&key, &good)]);
    assert_eq!(judged(&written), frames_of(&read).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// For anything that a peer with good keys seals, each datagram is counted or in a write that the kernel
    /// takes.
    #[test]
    fn any_sealed_plaintext_is_written_sanely_or_counted(
        plaintexts in prop::collection::vec(
            (0_usize..4, 0_usize..60, prop::collection::vec((0_usize..150, any::<u8>()), 0..4)),
            1..40,
        ),
    ) {
        let (mut wire, key) = (wire(), sealing());
        let datagrams: Vec<Vec<u8>> = plaintexts
            .iter()
            .map(|(which, len, twists)| {
                let packet = Packet::each()[*which].with(&pattern(*len, *len));
                let mut plain = plaintext(&packet.complete()[VNET..]);
                for (at, value) in twists {
                    if let Some(byte) = plain.get_mut(*at) {
                        *byte = *value;
                    }
                }
                sealed(&key, &plain)
            })
            .collect();
        prop_assert_eq!(wire.accounted(&datagrams), plaintexts.len() as u64);
    }
}

#[test]
fn packet_ids_end_and_are_asked_for_before() {
    let mut rig = Rig::with(|sa| {
        in_ovpn(sa);
        (sa.packets_soft, sa.packets_hard) = (3, 5);
    });
    for _ in 0..7 {
        rig.transmit(&mut [udp_read(b"one", true)]);
    }
    rig.receive();
    let told = |event: &EngineEvent| !matches!(event, EngineEvent::InboundFirstUse { .. });
    let events: Vec<EngineEvent> = rig.events().into_iter().filter(told).collect();
    assert_eq!(
        events,
        [
            EngineEvent::OutboundNearLimit { path: PATH, spi: WORD },
            EngineEvent::OutboundExhausted { path: PATH, spi: WORD },
        ]
    );
    assert_eq!(rig.counters().done(Work::DatagramsReceived), 5);
    assert_eq!(rig.drops(), [(DropReason::SaExhausted, 2)]);
}

#[test]
fn probes_and_a_new_key_go_through() {
    let mut rig = Rig::with(in_ovpn);
    let events = |event| rig.events.lock().unwrap().push(event);
    let env = crate::ports::device::Env {
        tap: &rig.tap,
        socket: &rig.socket,
        counters: &rig.counters,
        events: &events,
    };
    rig.transmitter.send_probe(&rig.state, &env, (PATH, 77, 1_356, true)).unwrap();
    rig.receive();
    let probe = EngineEvent::ProbeReceived {
        peer: PEER,
        path: PATH,
        probe: 77,
        mtu: 1_356,
        candidate: true,
    };
    assert!(rig.events().contains(&probe));
    // Another SA of the same path in the other format takes over.
    let sa = outbound_sa(SPI);
    let (engine, lifetime) = (EngineKind::Userspace, std::time::Duration::MAX);
    let remote =
        std::net::SocketAddr::new(std::net::Ipv4Addr::LOCALHOST.into(), rig.far_socket.port());
    let inbound = InboundSa {
        cipher: sa.cipher,
        key: sa.key.clone(),
        encapsulation: sa.encapsulation,
        lifetime,
        ..inbound_sa(sa.spi)
    };
    let (peer, path) = (PEER, PATH);
    let far = remote.ip();
    rig.command(EngineCommand::InstallInbound { engine, peer, path, sa: inbound, remote: far });
    rig.command(EngineCommand::InstallOutbound { engine, peer, path, sa, remote });
    rig.transmit(&mut [udp_read(b"in the other format", true)]);
    rig.receive();
    assert_eq!((rig.tap.frames.borrow().len(), rig.drops()), (1, vec![]));
}
