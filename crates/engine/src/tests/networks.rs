//! Several networks with the same addresses: nothing of one gets into another.

use super::drops::receive_ahead;
use super::*;
use crate::error::CommandError;

const OTHER: Vni = Vni(8);
/// The peer that is in the other network; the rig's is in the first.
const OTHER_PEER: PeerId = PeerId::from_bytes([8; 32]);
const OTHER_PATH: PathId = PathId(2);
const OTHER_SPI: u32 = SPI + 1;

fn endpoints(vni: Vni, add: &[(Mac, PeerId)], remove: &[Mac]) -> EngineCommand {
    let endpoint = |mac| Endpoint { mac, addresses: Vec::new() };
    let add = add.iter().map(|(mac, peer)| (endpoint(*mac), *peer)).collect();
    EngineCommand::SetEndpoints { vni, add, remove: remove.to_vec() }
}

/// The rig, and another network with the same addresses, which live at the other peer.
fn two_networks() -> Rig {
    let mut rig = Rig::new();
    rig.state.networks.add(OTHER).unwrap();
    let (engine, peer, path) = (EngineKind::Userspace, OTHER_PEER, OTHER_PATH);
    let key = SaKey::from_bytes([4; 36]);
    let remote = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), rig.far_socket.port());
    let sa = InboundSa { key: key.clone(), ..inbound_sa(OTHER_SPI) };
    rig.command(EngineCommand::InstallInbound { engine, remote: remote.ip(), peer, path, sa });
    let sa = OutboundSa { key, ..outbound_sa(OTHER_SPI) };
    rig.command(EngineCommand::InstallOutbound { engine, peer, path, sa, remote });
    rig.command(EngineCommand::BindPath { peer, path: Some(path) });
    rig.command(endpoints(OTHER, &[(FAR, peer), (LOCAL, peer)], &[]));
    rig.command(EngineCommand::SetBroadcast { vni: OTHER, peers: vec![peer] });
    rig
}

/// Takes the frames that were written, by network.
fn written(rig: &Rig) -> Vec<(u16, Vec<u8>)> {
    let (networks, frames) = (rig.tap.networks.take(), rig.tap.frames.take());
    assert_eq!(networks.len(), frames.len());
    networks.into_iter().zip(frames).collect()
}

/// The SPIs of the datagrams that are sent for these reads.
fn spis_of(rig: &mut Rig, reads: &[(Vni, &[u8])]) -> Vec<u32> {
    rig.socket.kept = Some(RefCell::default());
    rig.transmit_in(reads.iter().copied());
    let kept = rig.socket.kept.take().unwrap().into_inner();
    kept.iter().map(|datagram| u32::from_be_bytes(*datagram.first_chunk().unwrap())).collect()
}

/// A read from a container in the network with this VNI, whose payload tells it.
fn read_in(vni: Vni) -> Vec<u8> {
    udp_read(&[vni.0 as u8; 100], true)
}

/// The same to a group.
fn to_all(read: &[u8]) -> Vec<u8> {
    let mut read = read.to_vec();
    read[vnet::LEN..vnet::LEN + 6].fill(0xff);
    read
}

#[test]
fn a_frame_goes_to_the_peer_of_its_network_alone() {
    let mut rig = two_networks();
    let frame = read_in(VNI);
    for (vni, spi) in [(VNI, SPI), (OTHER, OTHER_SPI)] {
        assert_eq!(spis_of(&mut rig, &[(vni, &frame)]), [spi]);
        assert_eq!(spis_of(&mut rig, &[(vni, &to_all(&frame))]), [spi], "to a group");
    }
    // An address that one network alone has.
    rig.command(endpoints(OTHER, &[], &[FAR]));
    assert_eq!(spis_of(&mut rig, &[(OTHER, &frame), (VNI, &frame)]), [SPI]);
    assert_eq!(rig.drops(), [(DropReason::NoEndpoint, 1)]);
}

#[test]
fn equal_frames_of_two_networks_come_out_where_they_belong() {
    for receive in [Rig::receive as fn(&mut Rig), receive_ahead] {
        // The other network lives at another peer, and then at the same one: on one SA.
        for peer in [OTHER_PEER, PEER] {
            let mut rig = two_networks();
            rig.command(endpoints(OTHER, &[(FAR, peer), (LOCAL, peer)], &[]));
            let small = read_in(VNI);
            let long = tcp_read(&pattern(3 * 1348), 1348, tcp::ACK);
            let mut reads: Vec<(Vni, &[u8])> = Vec::new();
            for read in [&small, &long, &small] {
                reads.extend([(VNI, &**read), (OTHER, &**read)]);
            }
            rig.transmit_in(reads);
            receive(&mut rig);
            let written = written(&rig);
            for network in [0, 1] {
                let its = written.iter().filter(|(of, _)| *of == network);
                let frames: Vec<_> = its.map(|(_, frame)| frame).collect();
                // The equal datagrams of one network may be one super-packet.
                let of_tcp: Vec<_> =
                    frames.iter().filter(|frame| frame[vnet::LEN + 23] == 6).collect();
                assert_eq!(of_tcp, [&&long], "network {network}");
                let payload = frames.iter().filter(|frame| frame[vnet::LEN + 23] == 17);
                let bytes: usize = payload.map(|frame| frame.len() - vnet::LEN - 42).sum();
                assert_eq!(bytes, 2 * 100, "network {network}");
            }
            assert_eq!(rig.drops(), []);
        }
    }
}

#[test]
fn a_flow_that_goes_on_in_another_network_is_not_merged() {
    let mut rig = two_networks();
    rig.command(endpoints(OTHER, &[(FAR, PEER), (LOCAL, PEER)], &[]));
    let whole = tcp_read(&pattern(4 * 1348), 1348, tcp::ACK);
    // Four segments that continue each other, the last two in the other network.
    let segment = |number: usize| {
        let payload = &pattern(4 * 1348)[number * 1348..(number + 1) * 1348];
        let mut read = tcp_read(payload, 0, tcp::ACK);
        let sequence = vnet::LEN + ethernet::LEN + ipv4::LEN + 4;
        let first = u32::from_be_bytes(*whole[sequence..].first_chunk().unwrap());
        let number = first + (number * 1348) as u32;
        read[sequence..sequence + 4].copy_from_slice(&number.to_be_bytes());
        read
    };
    let segments: Vec<_> = (0..4).map(segment).collect();
    let of = |number: usize| (if number < 2 { VNI } else { OTHER }, &*segments[number]);
    rig.transmit_in((0..4).map(of));
    rig.receive();
    let lengths: Vec<_> =
        written(&rig).iter().map(|(network, frame)| (*network, frame.len())).collect();
    let two = vnet::LEN + 54 + 2 * 1348;
    assert_eq!(lengths, [(0, two), (1, two)]);
}

#[test]
fn frames_of_a_network_that_the_host_is_not_in_are_counted() {
    for receive in [Rig::receive as fn(&mut Rig), receive_ahead] {
        let mut rig = two_networks();
        let frame = read_in(OTHER);
        rig.transmit_in([(OTHER, &*frame), (VNI, &*frame), (OTHER, &*frame)]);
        // It goes while they are under way.
        rig.state.remove_network(OTHER).unwrap();
        receive(&mut rig);
        assert_eq!(written(&rig), [(0, frame)]);
        assert_eq!(rig.drops(), [(DropReason::UnknownNetwork, 2)]);
        assert_eq!(rig.peers_drops(), 2, "for the peer that sealed them");
    }
}

#[test]
fn a_peer_that_is_not_in_a_network_gets_nothing_into_it() {
    let mut rig = two_networks();
    // The rig's peer seals frames of the other network. Their source lives there at the other peer, ...
    rig.command(endpoints(OTHER, &[(FAR, PEER)], &[]));
    let frame = read_in(OTHER);
    rig.transmit_in([(OTHER, &*frame)]);
    rig.receive();
    assert_eq!(rig.drops(), [(DropReason::ForeignSource, 1)]);
    // ... or nowhere, though it is the peer's endpoint in the first network.
    rig.command(endpoints(OTHER, &[], &[LOCAL]));
    rig.transmit_in([(OTHER, &*frame)]);
    rig.receive();
    assert_eq!(rig.drops(), [(DropReason::ForeignSource, 1), (DropReason::UnannouncedSource, 1)]);
    assert_eq!(written(&rig), []);
    rig.transmit_in([(VNI, &*frame)]);
    rig.receive();
    assert_eq!(written(&rig), [(0, frame)]);
}

#[test]
fn a_network_that_gets_the_number_of_another_has_nothing_of_it() {
    let mut rig = two_networks();
    let frame = read_in(OTHER);
    let number = rig.state.remove_network(OTHER).unwrap();
    let refused = rig.state.apply(endpoints(OTHER, &[(FAR, PEER)], &[]), |at| Ok(Remote::of(at)));
    assert_eq!(refused, Err(CommandError::UnknownNetwork { vni: OTHER }));
    for vni in [Vni(9), OTHER] {
        let id = rig.state.networks.add(vni).unwrap();
        assert_eq!(id.number, number);
        assert_eq!(spis_of(&mut rig, &[(vni, &frame), (vni, &to_all(&frame))]), []);
        rig.state.remove_network(vni).unwrap();
    }
    assert_eq!(rig.drops(), [(DropReason::NoEndpoint, 2)]);
    // The first network is as ever.
    assert_eq!(spis_of(&mut rig, &[(VNI, &frame), (VNI, &to_all(&frame))]), [SPI; 2]);
}

#[test]
fn a_peer_that_is_forgotten_is_gone_from_all_networks() {
    let mut rig = two_networks();
    rig.command(EngineCommand::SetBroadcast { vni: VNI, peers: vec![PEER, OTHER_PEER] });
    rig.command(EngineCommand::RemovePeer { peer: OTHER_PEER });
    let frame = read_in(OTHER);
    assert_eq!(spis_of(&mut rig, &[(OTHER, &frame), (OTHER, &to_all(&frame))]), []);
    assert_eq!(rig.drops(), [(DropReason::NoEndpoint, 1)]);
    assert_eq!(spis_of(&mut rig, &[(VNI, &to_all(&frame))]), [SPI]);
}

#[test]
fn no_allocation_per_packet_of_several_networks() {
    let mut rig = two_networks();
    rig.tap.forget.set(true);
    let long = tcp_read(&pattern(45 * 1348), 1348, tcp::ACK);
    let small = read_in(OTHER);
    let reads = [(OTHER, &*long), (VNI, &*long), (OTHER, &*small), (OTHER, &*long)];
    let mut turn = || {
        rig.transmit_in(reads);
        rig.receive();
    };
    (0..WINDOW_PACKETS / 45).for_each(|_| turn());
    let info = allocation_counter::measure(|| (0..50).for_each(|_| turn()));
    assert_eq!(info.count_total, 0);
    assert_eq!(rig.drops(), []);
}
