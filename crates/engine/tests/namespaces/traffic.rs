//! Real traffic between two engines in network namespaces.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::{
    Host, MTU, PATH, PATIENCE, connect, flows, inbound, outbound, pattern, strangers_with,
    two_hosts,
};
use weft_engine::{DropReason, Work};
use weft_io::uninterrupted;
use weft_path::{EngineCommand, EngineEvent, EngineKind};

fn udp_pair(from: &Host, to: &Host, address: IpAddr) -> (UdpSocket, UdpSocket) {
    let any = |address: IpAddr| SocketAddr::new(address, 0);
    let receiver = to.run(|| UdpSocket::bind(any(address)).unwrap());
    let unspecified =
        if address.is_ipv6() { "::".parse().unwrap() } else { "0.0.0.0".parse().unwrap() };
    let sender = from.run(|| UdpSocket::bind(any(unspecified)).unwrap());
    sender.connect(receiver.local_addr().unwrap()).unwrap();
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    (sender, receiver)
}

#[test]
fn without_offloads_every_frame_and_datagram_goes_alone() {
    let (a, b) = strangers_with(|config| config.offloads = false);
    connect(&a, &b, 300);
    connect(&b, &a, 400);
    let bytes = pattern(1, 4 << 20);
    flows(&a, &b, b.v4.into(), 1, &bytes);
    flows(&b, &a, a.v6, 1, &bytes);
    for host in [&a, &b] {
        let done = |work| host.engine.counters().done(work);
        assert!(done(Work::DatagramsSent) > 2_500, "{:?}", host.engine.counters());
        // The last acknowledgements may be on their way: one look would tear the pairs apart.
        host.wait_counters(|now| {
            now.done(Work::RunsSent) == now.done(Work::DatagramsSent)
                && now.done(Work::MessagesReceived) == now.done(Work::DatagramsReceived)
        });
        assert!(done(Work::TapReads) > 2_500 && done(Work::TapWrites) > 2_500);
        assert_eq!(host.dropped(DropReason::TapRefused), 0);
    }
}

#[test]
fn tcp_both_ways_over_ipv4_and_ipv6() {
    let (a, b) = two_hosts();
    let bytes = pattern(1, 24 << 20);
    flows(&a, &b, b.v4.into(), 1, &bytes);
    flows(&b, &a, a.v6, 1, &bytes);
    // Super-packets crossed whole: far fewer calls than datagrams.
    let sent = a.engine.counters();
    assert!(sent.done(Work::DatagramsSent) > 15_000, "{sent:?}");
    assert!(sent.done(Work::RunsSent) * 4 < sent.done(Work::DatagramsSent), "{sent:?}");
    assert!(b.engine.counters().done(Work::TapWrites) * 4 < sent.done(Work::DatagramsSent));
    for reason in
        [DropReason::Forged, DropReason::BadInner, DropReason::BadMark, DropReason::TapRefused]
    {
        assert_eq!((a.dropped(reason), b.dropped(reason)), (0, 0), "{}", reason.name());
    }
    let traffic = b.engine.counters().peers;
    assert!(traffic[0].received().bytes > 24 << 20, "{traffic:?}");
}

#[test]
fn udp_of_all_lengths() {
    let (a, b) = two_hosts();
    for address in [b.v4.into(), b.v6] {
        let (sender, receiver) = udp_pair(&a, &b, address);
        for len in [0, 1, 17, 1000, 1340, 1360, 1361, 4_000, 20_000, 60_000] {
            let sent = pattern(len as u64 + 1, len);
            sender.send(&sent).unwrap();
            let mut got = vec![0; 65_536];
            let length = uninterrupted(|| receiver.recv(&mut got)).unwrap();
            assert!(got[..length] == sent, "{length} of {len} bytes");
        }
    }
}

#[test]
fn broadcast_reaches_the_other_host() {
    let (a, b) = two_hosts();
    let receiver = b.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let sender = a.run(|| UdpSocket::bind((a.v4, 0)).unwrap());
    sender.set_broadcast(true).unwrap();
    let everyone = Ipv4Addr::new(10, 99, 0, 255);
    sender.send_to(b"hello", (everyone, receiver.local_addr().unwrap().port())).unwrap();
    let mut got = [0; 16];
    assert_eq!(uninterrupted(|| receiver.recv(&mut got)).unwrap(), 5);
}

#[test]
fn a_smaller_path_answers_udp_and_carries_tcp() {
    let (a, b) = two_hosts();
    for (from, _) in [(&a, &b), (&b, &a)] {
        from.command(EngineCommand::SetPathMtu { path: PATH, mtu: 1_000 });
    }
    flows(&a, &b, b.v4.into(), 1, &pattern(3, 1 << 20));
    let (sender, receiver) = udp_pair(&a, &b, b.v4.into());
    receiver.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let sent = pattern(9, 1_300);
    let mut got = [0; 2_000];
    // The kernel learns from the first one's answer and fragments the others.
    let arrived = (0..20).any(|_| {
        let _ = sender.send(&sent);
        uninterrupted(|| receiver.recv(&mut got)).is_ok_and(|len| got[..len] == sent[..])
    });
    assert!(arrived);
    let counters = a.engine.counters();
    assert!(counters.done(Work::TooLongAnswered) > 0, "{counters:?}");
    assert!(counters.dropped(DropReason::TooLong) > 0, "{counters:?}");
}

/// Sends datagrams that no socket receives until `done`: an SA needs a packet to be seen in use.
fn nudge_until(from: &Host, to: &Host, done: impl Fn() -> bool) {
    let socket = from.run(|| UdpSocket::bind((from.v4, 0)).unwrap());
    while !done() {
        let _ = socket.send_to(b"x", (to.v4, 9));
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_change_of_sas_under_load_loses_nothing() {
    const DATAGRAMS: u32 = 30_000;
    // Two windows fit the receiver's buffer, so that the echo may be without a processor for a while.
    const WINDOW: u32 = 32;
    let (a, b) = two_hosts();
    // So that no datagram waits for address resolution, which holds few.
    flows(&a, &b, b.v4.into(), 1, b"warm");
    let (sender, receiver) = udp_pair(&a, &b, b.v4.into());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let mut got = [0; 1_500];
            let mut next = 0;
            while next < DATAGRAMS {
                // A lost datagram leaves this waiting until the timeout.
                let (len, from) = uninterrupted(|| receiver.recv_from(&mut got)).unwrap();
                assert_eq!(got[..4], next.to_be_bytes(), "lost or out of order after {len} bytes");
                next += 1;
                if next.is_multiple_of(WINDOW) {
                    receiver.send_to(&next.to_be_bytes(), from).unwrap();
                }
            }
        });
        let rekey = scope.spawn(|| {
            let mut spi = 1_000;
            while !stop.load(Ordering::Relaxed) {
                spi += 1;
                b.command(EngineCommand::InstallInbound {
                    engine: EngineKind::Userspace,
                    remote: std::net::Ipv4Addr::LOCALHOST.into(),
                    peer: a.id,
                    path: PATH,
                    sa: inbound(spi),
                });
                a.command(EngineCommand::InstallOutbound {
                    engine: EngineKind::Userspace,
                    peer: b.id,
                    path: PATH,
                    sa: outbound(spi),
                    remote: b.data_address(),
                });
                b.events
                    .wait(|event| (*event == EngineEvent::InboundFirstUse { spi }).then_some(()));
                if spi > 1_010 {
                    b.command(EngineCommand::RemoveInbound { spi: spi - 10 });
                }
                thread::sleep(Duration::from_millis(2));
            }
            spi
        });
        let mut datagram = [0; 1_200];
        let mut acknowledged = [0; 4];
        sender.set_read_timeout(Some(PATIENCE)).unwrap();
        for number in 0..DATAGRAMS {
            datagram[..4].copy_from_slice(&number.to_be_bytes());
            sender.send(&datagram[..200 + (number as usize * 7) % 1_000]).unwrap();
            if (number + 1).is_multiple_of(WINDOW) && number + 1 > WINDOW {
                uninterrupted(|| sender.recv(&mut acknowledged)).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
        nudge_until(&a, &b, || rekey.is_finished());
        assert!(rekey.join().unwrap() > 1_010, "the test was too short for a rekey");
        echo.join().unwrap();
    });
    for reason in
        [DropReason::UnknownSpi, DropReason::NoPath, DropReason::Forged, DropReason::Replayed]
    {
        assert_eq!((a.dropped(reason), b.dropped(reason)), (0, 0), "{}", reason.name());
    }
}

#[test]
fn probes_of_both_kinds_arrive_bound_or_not() {
    let (a, b) = two_hosts();
    a.command(EngineCommand::BindPath { peer: b.id, path: None });
    for (probe, mtu, candidate) in [(41, MTU, true), (42, 1_280, false), (43, 64, false)] {
        a.command(EngineCommand::SendProbe { path: PATH, probe, mtu, candidate });
        let expected = EngineEvent::ProbeReceived { peer: a.id, path: PATH, probe, mtu, candidate };
        b.events.wait(|event| (*event == expected).then_some(()));
    }
    // One that the wire does not carry is reported by the sender's kernel.
    a.command(EngineCommand::SendProbe { path: PATH, probe: 44, mtu: 1_440, candidate: true });
    let refused = EngineEvent::MessageTooLong { path: PATH, mtu: 1_440 };
    a.events.wait(|event| (*event == refused).then_some(()));
    a.command(EngineCommand::SendKeepalive { path: PATH });
    b.wait_counters(|counters| counters.done(Work::Keepalives) == 1);
    assert_eq!(b.drops(), []);
}

#[test]
fn a_removed_peer_gets_nothing_until_it_is_back() {
    let (a, b) = two_hosts();
    flows(&a, &b, b.v4.into(), 1, b"before");
    a.command(EngineCommand::RemovePeer { peer: b.id });
    let (sender, _receiver) = udp_pair(&a, &b, b.v4.into());
    sender.send(b"into the void").unwrap();
    a.wait_counters(|counters| counters.dropped(DropReason::NoEndpoint) > 0);
    assert_eq!(a.engine.counters().peers, []);
    connect(&a, &b, 301);
    connect(&b, &a, 401);
    flows(&a, &b, b.v4.into(), 1, b"again");
}
