//! An engine under hostile datagrams, and when its device, a worker or an address fails.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::{
    Events, Host, PATH, PATIENCE, VNI, flows, fresh_namespace, ip, key, pattern, strangers,
    two_hosts,
};
use weft_crypto::{Cipher, PeerId, SealingSa};
use weft_engine::{DropReason, Engine, EngineConfig, EngineError, Work};
use weft_io::namespace::run_in;
use weft_io::uninterrupted;
use weft_packet::vxlan::{Rco, VxlanHeader};
use weft_packet::{esp, ethernet, vxlan};
use weft_path::{Endpoint, EngineCommand, EngineEvent, EngineKind, Mac, Vni};

use crate::common;

/// A peer that is not an engine: it seals what it likes.
struct Forger<'a> {
    socket: UdpSocket,
    sa: SealingSa,
    to: SocketAddr,
    victim: &'a Host,
}

impl<'a> Forger<'a> {
    const SPI: u32 = 500;

    /// Authentic at `victim`, from `at`.
    fn new(at: &Host, victim: &'a Host) -> Self {
        let sa = common::inbound(Self::SPI);
        victim.command(EngineCommand::InstallInbound {
            engine: EngineKind::Userspace,
            remote: std::net::Ipv4Addr::LOCALHOST.into(),
            peer: at.id,
            path: PATH,
            sa,
        });
        let endpoint = Endpoint { mac: Mac(SOURCE), addresses: Vec::new() };
        let add = vec![(endpoint, at.id)];
        victim.command(EngineCommand::SetEndpoints { vni: VNI, add, remove: Vec::new() });
        Self {
            socket: at.run(|| UdpSocket::bind((at.wire, 0)).unwrap()),
            sa: SealingSa::new(Cipher::Aes256Gcm, Self::SPI, &key(Self::SPI), 99),
            to: victim.data_address(),
            victim,
        }
    }

    fn seal(&mut self, plain: &[u8]) -> Vec<u8> {
        let mut datagram = vec![0; esp::HEADER_LEN + plain.len() + esp::ICV_LEN];
        datagram[esp::HEADER_LEN..esp::HEADER_LEN + plain.len()].copy_from_slice(plain);
        self.sa.reserve(1).unwrap().seal_in_place(&mut datagram, plain.len()).unwrap();
        datagram
    }

    /// A sealed frame as it should be, but for the arguments.
    fn frame(&mut self, vxlan: VxlanHeader, port: u16, frame: &[u8]) -> Vec<u8> {
        let mut plain = vec![0; esp::INNER_LEN];
        esp::write_inner_headers(&mut plain, 50_000, port, vxlan, frame.len());
        plain.extend_from_slice(frame);
        let trailer = esp::trailer_len(plain.len());
        let at = plain.len();
        plain.resize(at + trailer, 0);
        esp::write_trailer(&mut plain[at..], trailer - 2);
        self.seal(&plain)
    }

    fn send(&self, datagram: &[u8]) {
        self.socket.send_to(datagram, self.to).unwrap();
    }

    /// Sends one and waits until it is dropped for `reason` and for nothing else.
    fn expect(&self, datagram: &[u8], reason: DropReason) {
        let before = self.victim.drops();
        let total = |drops: &[(DropReason, u64)]| drops.iter().map(|(_, count)| count).sum::<u64>();
        self.send(datagram);
        self.victim.wait_counters(|counters| {
            counters.drops.iter().map(|(_, count)| count).sum::<u64>() > total(&before)
        });
        let now = self.victim.dropped(reason);
        let was = before.iter().find(|(found, _)| *found == reason).map_or(0, |(_, count)| *count);
        assert_eq!(now, was + 1, "not for {} but {:?}", reason.name(), self.victim.drops());
    }
}

/// The forger's own container.
const SOURCE: [u8; 6] = [2, 0, 0, 0, 9, 9];
const PLAIN: VxlanHeader = VxlanHeader { vni: VNI.0, rco: None };

/// An Ethernet frame that is not an IP packet, to an unknown MAC address.
fn nonsense(source: [u8; 6]) -> Vec<u8> {
    let mut frame = vec![0; 60];
    ethernet::write(&mut frame, [2, 0, 0, 0, 0, 0x77], source, 0x88b5);
    frame
}

#[test]
fn each_kind_of_bad_datagram_has_its_counter() {
    let (a, b) = strangers();
    let mut forger = Forger::new(&a, &b);
    let good = forger.frame(PLAIN, vxlan::PORT, &nonsense(SOURCE));
    forger.send(&good);
    b.wait_counters(|counters| counters.done(Work::TapWrites) == 1);
    forger.expect(&good, DropReason::Replayed);
    forger.expect(b"", DropReason::Malformed);
    forger.expect(&good[..20], DropReason::Malformed);
    forger.expect(&[0xee; 100], DropReason::UnknownSpi);
    let mut changed = forger.frame(PLAIN, vxlan::PORT, &nonsense(SOURCE));
    changed[40] ^= 1;
    forger.expect(&changed, DropReason::Forged);
    let cut = forger.frame(PLAIN, vxlan::PORT, &nonsense(SOURCE));
    forger.expect(&cut[..cut.len() - 1], DropReason::Forged);
    let inner = forger.seal(&[1, 2, 3, 4, 2, 17]);
    forger.expect(&inner, DropReason::BadInner);
    let port = forger.frame(PLAIN, 4789, &nonsense(SOURCE));
    forger.expect(&port, DropReason::BadInner);
    let short = forger.frame(PLAIN, vxlan::PORT, &[2; 13]);
    forger.expect(&short, DropReason::BadInner);
    let other = VxlanHeader { vni: 8, rco: None };
    let network = forger.frame(other, vxlan::PORT, &nonsense(SOURCE));
    forger.expect(&network, DropReason::UnknownNetwork);
    let marked = VxlanHeader { rco: Rco::new(34, 16), ..PLAIN };
    let mark = forger.frame(marked, vxlan::PORT, &nonsense(SOURCE));
    forger.expect(&mark, DropReason::BadMark);
    let probe = VxlanHeader { vni: Vni::PROBE.0, rco: None };
    let probe = forger.frame(probe, vxlan::PORT, &nonsense(SOURCE));
    forger.expect(&probe, DropReason::BadInner);
    let mut dummy = vec![9; 30];
    dummy.extend([0, esp::NEXT_NONE]);
    let dummy = forger.seal(&dummy);
    forger.send(&dummy);
    b.wait_counters(|counters| counters.done(Work::Dummies) == 1);
    let late = forger.frame(PLAIN, vxlan::PORT, &nonsense(SOURCE));
    let mut last = Vec::new();
    for _ in 0..9_000 {
        last = forger.frame(PLAIN, vxlan::PORT, &nonsense(SOURCE));
    }
    forger.send(&last);
    b.wait_counters(|counters| counters.done(Work::TapWrites) == 2);
    forger.expect(&late, DropReason::TooOld);
    assert_eq!(b.engine.counters().done(Work::TapWrites), 2);
}

#[test]
fn a_peer_sends_from_its_own_endpoints_alone() {
    let (a, b) = strangers();
    let mut forger = Forger::new(&a, &b);
    let (foreign, unknown) = ([2, 0, 0, 0, 9, 10], [2, 0, 0, 0, 9, 11]);
    let at = |mac, peer| {
        let add = vec![(Endpoint { mac: Mac(mac), addresses: Vec::new() }, peer)];
        EngineCommand::SetEndpoints { vni: VNI, add, remove: Vec::new() }
    };
    b.command(at(foreign, PeerId::from_bytes([77; 32])));
    // To one and to all.
    for destination in [[2, 0, 0, 0, 0, 0x77], [0xff; 6]] {
        for (source, reason) in [
            (foreign, DropReason::ForeignSource),
            (unknown, DropReason::UnannouncedSource),
            // The victim's own, no address, and a group.
            (b.mac.0, DropReason::UnannouncedSource),
            ([0; 6], DropReason::UnannouncedSource),
            ([0xff; 6], DropReason::UnannouncedSource),
        ] {
            let mut inside = nonsense(source);
            inside[..6].copy_from_slice(&destination);
            let frame = forger.frame(PLAIN, vxlan::PORT, &inside);
            forger.expect(&frame, reason);
        }
    }
    assert_eq!(b.engine.counters().done(Work::TapWrites), 0);
    // An endpoint that moves to the peer is its own from then on.
    b.command(at(foreign, a.id));
    let frame = forger.frame(PLAIN, vxlan::PORT, &nonsense(foreign));
    forger.send(&frame);
    b.wait_counters(|counters| counters.done(Work::TapWrites) == 1);
}

#[test]
fn only_an_authentic_newest_packet_tells_of_a_new_address() {
    let (a, b) = two_hosts();
    let mut forger = Forger::new(&a, &b);
    let first = forger.frame(PLAIN, vxlan::PORT, &nonsense(SOURCE));
    let second = forger.frame(PLAIN, vxlan::PORT, &nonsense(SOURCE));
    let moved = |event: &EngineEvent| matches!(event, EngineEvent::RemoteMoved { .. });
    forger.expect(&[&second[..60], &[0; 40]].concat(), DropReason::Forged);
    assert!(!b.events.all().iter().any(moved));
    forger.send(&second);
    let remote = forger.socket.local_addr().unwrap();
    let expected = EngineEvent::RemoteMoved { path: PATH, remote };
    b.events.wait(|event| (*event == expected).then_some(()));
    // An older packet from elsewhere, as an attacker could hold back, moves nothing.
    let elsewhere = a.run(|| UdpSocket::bind((a.wire, 0)).unwrap());
    let written = b.engine.counters().done(Work::TapWrites);
    thread::sleep(std::time::Duration::from_millis(2 * weft_engine::EVENT_INTERVAL_MS));
    elsewhere.send_to(&first, forger.to).unwrap();
    b.wait_counters(|counters| counters.done(Work::TapWrites) > written);
    let last = b.events.all().into_iter().rfind(moved);
    assert_eq!(last, Some(expected));
    // Once told, the engine sends there.
    b.command(EngineCommand::SetRemote { path: PATH, remote });
    b.command(EngineCommand::SendKeepalive { path: PATH });
    forger.socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut got = [0; 16];
    assert_eq!(uninterrupted(|| forger.socket.recv(&mut got)).unwrap(), 1);
    assert_eq!(got[0], esp::KEEPALIVE);
}

#[test]
fn a_flood_leaves_flows_alone() {
    let (a, b) = two_hosts();
    let flood = AtomicBool::new(true);
    let attacker = a.run(|| UdpSocket::bind((a.wire, 0)).unwrap());
    let to = b.data_address();
    thread::scope(|scope| {
        scope.spawn(|| {
            let noise = pattern(5, 1 << 16);
            for round in (0..).take_while(|_| flood.load(Ordering::Relaxed)) {
                let at = (round * 37) % 60_000;
                let mut datagram = noise[at..at + round % 1_400].to_vec();
                if round % 3 == 0 && datagram.len() >= 4 {
                    datagram[..4].copy_from_slice(&300_u32.to_be_bytes());
                }
                let _ = attacker.send_to(&datagram, to);
                if round % 64 == 0 {
                    thread::sleep(std::time::Duration::from_millis(1));
                }
            }
        });
        let listener = b.run(|| TcpListener::bind((b.v4, 0)).unwrap());
        let target = listener.local_addr().unwrap();
        let bytes = pattern(6, 8 << 20);
        let server = scope.spawn(move || {
            let mut got = Vec::new();
            listener.accept().unwrap().0.read_to_end(&mut got).unwrap();
            got
        });
        let mut client = a.run(|| TcpStream::connect_timeout(&target, PATIENCE).unwrap());
        client.write_all(&bytes).unwrap();
        drop(client);
        let got = server.join().unwrap();
        flood.store(false, Ordering::Relaxed);
        assert!(got == bytes);
    });
    assert!(b.dropped(DropReason::UnknownSpi) > 100, "{:?}", b.drops());
    assert!(b.dropped(DropReason::Forged) > 10, "{:?}", b.drops());
}

#[test]
fn a_device_that_goes_away_is_reported() {
    let (a, b) = two_hosts();
    a.run(|| ip("link del weft0"));
    let reason = a.events.wait(|event| match event {
        EngineEvent::EngineFailed { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert!(reason.contains("failed"), "{reason}");
    let gone = std::time::Instant::now();
    while a.engine.command(EngineCommand::SendKeepalive { path: PATH }).is_ok() {
        assert!(gone.elapsed() < PATIENCE);
    }
    drop(b);
}

#[test]
fn a_device_that_was_deleted_is_made_anew_and_traffic_goes_on() {
    let (a, b) = common::strangers_with(|config| config.workers = 2);
    common::connect(&a, &b, 300);
    common::connect(&b, &a, 400);
    let bytes = pattern(5, 100_000);
    let both_ways = || {
        flows(&a, &b, b.v4.into(), 3, &bytes);
        flows(&b, &a, a.v6, 3, &bytes);
    };
    both_ways();
    for _ in 0..2 {
        a.run(|| ip("link del weft0"));
        a.run(|| a.engine.renew_tap().unwrap());
        assert_eq!(a.engine.workers(), 2);
        a.run(|| common::set_up_device(1));
        both_ways();
        a.command(EngineCommand::SendKeepalive { path: PATH });
    }
    // One that is there is replaced likewise.
    a.run(|| a.engine.renew_tap().unwrap());
    a.run(|| common::set_up_device(1));
    both_ways();
}

#[test]
fn a_panic_in_a_worker_is_an_event() {
    let namespace = fresh_namespace();
    let events = Arc::new(Events::default());
    let engine = run_in(&namespace, || {
        ip("link set lo up");
        let sink = Arc::clone(&events);
        let mut config = EngineConfig::new("weft0", VNI, common::MTU);
        config.port = 0;
        Engine::start(&config, move |event| {
            assert!(
                matches!(event, EngineEvent::EngineFailed { .. }),
                "as a broken listener would"
            );
            sink.push(event);
        })
        .unwrap()
    })
    .unwrap();
    let peer = PeerId::from_bytes([1; 32]);
    let remote = SocketAddr::new("127.0.0.1".parse().unwrap(), engine.port());
    let sa = common::outbound(600);
    engine
        .command(EngineCommand::InstallOutbound {
            engine: EngineKind::Userspace,
            peer,
            path: PATH,
            sa,
            remote,
        })
        .unwrap();
    let sa = common::inbound(600);
    engine
        .command(EngineCommand::InstallInbound {
            engine: EngineKind::Userspace,
            remote: std::net::Ipv4Addr::LOCALHOST.into(),
            peer,
            path: PATH,
            sa,
        })
        .unwrap();
    // The engine receives its own probe, and the listener panics over the first use of the SA.
    let probe = EngineCommand::SendProbe { path: PATH, probe: 1, mtu: 100, candidate: false };
    engine.command(probe).unwrap();
    let reason = events.wait(|event| match event {
        EngineEvent::EngineFailed { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert!(reason.contains("panicked"), "{reason}");
}

/// A peer names the address that it is sent to. One that this host cannot reach is that path's end alone.
#[test]
fn an_address_that_no_socket_reaches_fails_its_path() {
    let namespace = fresh_namespace();
    run_in(&namespace, || {
        let mut config = EngineConfig::new("weft0", VNI, common::MTU);
        config.bind = Some(std::net::Ipv4Addr::LOCALHOST.into());
        let engine = Engine::start(&config, |_| {}).unwrap();
        let install = |remote: &str| {
            engine.command(EngineCommand::InstallOutbound {
                engine: EngineKind::Userspace,
                peer: PeerId::from_bytes([1; 32]),
                path: PATH,
                sa: common::outbound(600),
                remote: remote.parse().unwrap(),
            })
        };
        let refused = install("[2001:db8::1]:6784").unwrap_err();
        assert!(matches!(refused, EngineError::Path { path: PATH, .. }), "{refused}");
        assert!(refused.to_string().contains("2001:db8::1"), "{refused}");
        install("192.0.2.1:6784").unwrap();
        let moved = "[2001:db8::1]:6784".parse().unwrap();
        let refused = engine.command(EngineCommand::SetRemote { path: PATH, remote: moved });
        assert!(matches!(refused, Err(EngineError::Path { path: PATH, .. })), "{refused:?}");
    })
    .unwrap();
}

#[test]
fn settings_that_cannot_start_are_refused_by_name() {
    let namespace = fresh_namespace();
    run_in(&namespace, || {
        let config = EngineConfig::new("weft0", VNI, common::MTU);
        let _first = Engine::start(&config, |_| {}).unwrap();
        let second = EngineConfig::new("weft1", VNI, common::MTU);
        let taken = Engine::start(&second, |_| {}).unwrap_err();
        assert!(taken.to_string().contains("UDP port 6784"), "{taken}");
        let none = EngineConfig { workers: 0, ..config.clone() };
        let refused = Engine::start(&none, |_| {}).unwrap_err();
        assert!(matches!(refused, EngineError::Configuration { .. }), "{refused}");
        let probes = EngineConfig { vni: Vni::PROBE, ..config };
        assert!(Engine::start(&probes, |_| {}).is_err());
    })
    .unwrap();
}
