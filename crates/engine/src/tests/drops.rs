//! Packets that the kernel does not take, or cuts, are counted by reason, and later ones pass again.

use rustix::io::Errno;

use super::*;

/// A super-packet of three segments, and a datagram by itself: four frames.
fn four_frames() -> [Vec<u8>; 2] {
    [tcp_read(&pattern(3 * 1348), 1348, tcp::ACK), udp_read(&pattern(10), true)]
}

/// Four frames arrive as they were, and nothing more is dropped.
fn passes_again(rig: &mut Rig, drops: &[(DropReason, u64)]) {
    let mut reads = four_frames();
    rig.transmit(&mut reads);
    rig.receive();
    let frames = rig.tap.frames.take();
    assert_eq!(frames.len(), reads.len());
    for read in &reads {
        assert!(frames.contains(read), "{} bytes did not arrive", read.len());
    }
    assert_eq!(rig.drops(), drops);
}

/// As a thread receives that has helpers beside it.
pub(super) fn receive_ahead(rig: &mut Rig) {
    let nothing = |_| {};
    let env = Env { tap: &rig.tap, socket: &rig.socket, counters: &rig.counters, events: &nothing };
    loop {
        let max = rig.receiver.batch_size.unit_messages_max();
        if rig.far_socket.recv(&mut rig.receiver.batch, max).is_err() {
            return;
        }
        rig.receiver.open_pipelined(&rig.state, &env);
        rig.receiver.commit(&rig.state, &env);
    }
}

#[test]
fn refusals_of_the_tap_device_are_counted_by_errno() {
    let answers = [
        (errno::EINVAL, DropReason::TapRefused),
        (errno::EIO, DropReason::TapDown),
        (errno::EBADFD, DropReason::TapDown),
        (errno::EAGAIN, DropReason::TapFull),
        (errno::ENOMEM, DropReason::TapFull),
        (errno::ENOBUFS, DropReason::TapFull),
    ];
    for receive in [Rig::receive as fn(&mut Rig), receive_ahead] {
        for (error, reason) in answers {
            let mut rig = Rig::new();
            rig.tap.error.set(Some(error));
            rig.transmit(&mut four_frames());
            receive(&mut rig);
            // By frames, not by writes.
            assert_eq!(rig.drops(), [(reason, 4)], "error {error}");
            assert_eq!(rig.counters().done(Work::TapWrites), 0);
            rig.tap.error.set(None);
            passes_again(&mut rig, &[(reason, 4)]);
        }
    }
}

/// Sends the packets that go beside runs: a keepalive, and a dummy on a second lane.
fn send_alone(rig: &Rig) {
    let nothing = |_| {};
    let env = Env { tap: &rig.tap, socket: &rig.socket, counters: &rig.counters, events: &nothing };
    Transmitter::send_keepalive(&rig.state, &env, PATH).unwrap();
    rig.transmitter.tell_of_lanes(&rig.state, &env, 1);
}

#[test]
fn refusals_to_send_are_counted() {
    let unreachable = Some(Errno::NETUNREACH.raw_os_error());
    let mut rig = Rig::new();
    let remote = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), rig.far_socket.port());
    rig.command(EngineCommand::InstallOutbound {
        engine: EngineKind::Userspace,
        peer: PEER,
        path: PATH,
        sa: OutboundSa { spi: SPI + 1, lane: 1, ..outbound_sa(SPI) },
        remote,
    });
    rig.socket.errors.set((unreachable, unreachable));
    rig.transmit(&mut four_frames());
    assert_eq!(rig.drops(), [(DropReason::SendFailed, 4)]);
    assert_eq!(rig.peers_drops(), 4);
    send_alone(&rig);
    assert_eq!(rig.drops(), [(DropReason::SendFailed, 6)]);
    // A run that is refused for being one: each of its datagrams is tried, and counted, by itself.
    rig.socket.errors.set((Some(errno::EINVAL), unreachable));
    rig.transmit(&mut four_frames());
    assert_eq!(rig.counters().done(Work::RunsRefused), 1);
    assert_eq!(rig.counters().done(Work::DatagramsSent), 0);
    // It says nothing about the path's MTU.
    assert_eq!(rig.events(), []);
    rig.socket.errors.set((None, None));
    passes_again(&mut rig, &[(DropReason::SendFailed, 10)]);
    // All but the packets sent beside runs.
    assert_eq!(rig.peers_drops(), 8);
    let calls = |rig: &Rig| [Work::RunsSent, Work::DatagramsSent].map(|of| rig.counters().done(of));
    let before = calls(&rig);
    send_alone(&rig);
    assert_eq!(calls(&rig), before.map(|count| count + 2), "each is a run of one");
}

#[test]
fn a_message_that_was_cut_is_dropped_and_counted() {
    let long = vec![7; 65_900];
    for ahead in [false, true] {
        let mut rig = Rig::new();
        let from = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), rig.socket.real.port());
        let from = rig.far_socket.remote(from).unwrap();
        rig.receiver.batch.clear();
        assert!(rig.receiver.batch.push(&long, 1_000, &from));
        let nothing = |_| {};
        let env =
            Env { tap: &rig.tap, socket: &rig.socket, counters: &rig.counters, events: &nothing };
        if ahead {
            rig.receiver.open_pipelined(&rig.state, &env);
            rig.receiver.commit(&rig.state, &env);
        } else {
            rig.receiver.handle_batch(&rig.state, &env);
        }
        // Nothing of it is looked at, so that it counts as nothing else.
        assert_eq!(rig.drops(), [(DropReason::Truncated, 1)]);
        assert_eq!(rig.counters().done(Work::MessagesReceived), 1);
        assert_eq!(rig.counters().done(Work::DatagramsReceived), 0);
        passes_again(&mut rig, &[(DropReason::Truncated, 1)]);
    }
}

#[test]
fn drops_of_a_peers_packets_are_counted_for_the_peer_too() {
    for receive in [Rig::receive as fn(&mut Rig), receive_ahead] {
        let mut rig = Rig::new();
        rig.socket.kept = Some(std::cell::RefCell::default());
        rig.transmit(&mut four_frames());
        let sealed = rig.socket.kept.as_ref().map(std::cell::RefCell::take).unwrap_or_default();
        assert_eq!(sealed.len(), 4);
        let mut forged = sealed[0].clone();
        // A sequence number not seen yet, so that the window lets it pass to the cipher.
        forged[6] ^= 0x40;
        let stranger = [&[0xee; 4], &sealed[0][4..]].concat();
        for datagram in sealed.iter().chain([&sealed[1], &forged, &stranger]) {
            let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), rig.far_socket.port());
            let to = rig.socket.real.remote(to).unwrap();
            rig.socket.real.send_run(datagram, datagram.len(), &to).unwrap();
        }
        receive(&mut rig);
        let drops =
            [(DropReason::UnknownSpi, 1), (DropReason::Forged, 1), (DropReason::Replayed, 1)];
        let mut seen = rig.drops();
        seen.sort_unstable_by_key(|(reason, _)| drops.iter().position(|drop| drop.0 == *reason));
        assert_eq!(seen, drops);
        assert_eq!(rig.peers_drops(), 2, "all but the one of nobody's");
        // Without a path, and to an unknown address.
        rig.command(EngineCommand::BindPath { peer: PEER, path: None });
        let mut to_nobody = udp_read(&pattern(10), true);
        to_nobody[vnet::LEN..vnet::LEN + 6].copy_from_slice(&[2, 9, 9, 9, 9, 9]);
        rig.transmit(&mut [udp_read(&pattern(10), true), to_nobody]);
        assert_eq!(rig.peers_drops(), 3);
    }
}
