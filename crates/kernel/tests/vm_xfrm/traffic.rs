//! The effect of states on packets.

use std::{
    net::UdpSocket,
    time::{Duration, Instant},
};

use weft_crypto::Cipher;
use weft_io::uninterrupted;
use weft_kernel::xfrm::{
    Direction, EspSupport, Limits, PolicyId, PolicySpec, StateId, StateSpec, Template, UdpPorts,
    XfrmEvent,
};

use crate::lab::{
    ENCAP_PORT, Host, PATIENCE, PORTS, Pair, VXLAN_PORT, block_on, kernel, next, policy, rest,
    state,
};

#[test]
fn support_is_found_by_trying_and_leaves_nothing() {
    block_on(async {
        let host = Host::new(1, false);
        let mut watch = host.watch();
        let both = vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
        let expected = EspSupport {
            ciphers: both,
            ipv6: true,
            udp: true,
            udp_ipv6: true,
            per_cpu: kernel() >= (6, 13),
        };
        for _ in 0..2 {
            assert_eq!(host.xfrm.support().await.unwrap(), expected);
        }
        assert_eq!(host.run("ip xfrm state"), "");
        assert_eq!(rest(&mut watch).await, []);
        println!("{:?}: {expected:?}", kernel());
    });
}

#[test]
fn every_cipher_family_and_encapsulation_carries_traffic() {
    block_on(async {
        for ipv6 in [false, true] {
            let pair = Pair::new(ipv6);
            let mut spi = 0x1000;
            for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
                for ports in [None, Some(PORTS)] {
                    spi += 2;
                    carries(&pair, cipher, ports, spi).await;
                }
            }
        }
    });
}

async fn carries(pair: &Pair, cipher: Cipher, ports: Option<UdpPorts>, spi: u32) {
    for host in [&pair.a, &pair.b] {
        host.xfrm.remove_own().await.unwrap();
    }
    pair.connect(cipher, ports, spi).await;
    let shown = pair.b.run("ip -d xfrm state");
    let outer = (pair.a.outer, pair.b.outer);
    let wanted = [
        format!("src {} dst {}", outer.0, outer.1),
        format!("spi {spi:#010x} reqid 1464157780 mode transport"),
        "replay_window 4096".into(),
        match cipher {
            Cipher::Aes256Gcm => "rfc4106(gcm(aes))".into(),
            Cipher::ChaCha20Poly1305 => "rfc7539esp(chacha20,poly1305)".into(),
        },
        match ports {
            Some(_) => "encap type espinudp sport 6785 dport 6785".to_owned(),
            None => String::new(),
        },
        "esn".into(),
    ];
    let flat = shown.split_whitespace().collect::<Vec<_>>().join(" ");
    for wanted in wanted {
        let flat_wanted = wanted.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(&flat_wanted), "{flat_wanted}: {shown}");
    }
    assert_eq!(flat.contains("encap type"), ports.is_some(), "{shown}");

    let (clear, sealed) = (format!("/tmp/clear-{spi}"), format!("/tmp/sealed-{spi}"));
    let format = match ports {
        Some(_) => "udp dst port 6785",
        None if outer.0.is_ipv4() => "ip proto 50",
        None => "ip6 proto 50",
    };
    let tcpdump = [pair.a.capture(&clear, "udp dst port 6787"), pair.a.capture(&sealed, format)];
    assert!(pair.pings(), "{cipher} {ports:?}");
    // A new server: with other SAs the end of a test may not arrive, and a server that waits for it refuses
    // the next.
    let server = pair.b.start("iperf3 -s");
    let deadline = Instant::now() + PATIENCE;
    while !pair.b.run("ss -ltn").contains(":5201") {
        assert!(Instant::now() < deadline, "iperf3 does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    let measured = pair.a.run(&format!("iperf3 -c {} -t 1 -f m", pair.b.inner));
    drop(server);
    let rate = measured.lines().find(|line| line.contains("receiver")).unwrap().to_owned();
    drop(tcpdump);
    // The header of the file, and no packet.
    assert_eq!(std::fs::metadata(&clear).unwrap().len(), 24, "cleartext on the cable");
    assert!(std::fs::metadata(&sealed).unwrap().len() > 2000, "nothing sealed on the cable");
    let sent = pair.a.packets(StateId { destination: outer.1, spi }).await;
    let received = pair.b.packets(StateId { destination: outer.1, spi }).await;
    assert!(sent > 20 && received > 20, "{sent} {received}");
    println!("{cipher} {} {ports:?}: {rate}", if outer.0.is_ipv4() { "IPv4" } else { "IPv6" });
}

#[test]
fn a_rekey_loses_no_packet() {
    const REKEYS: u32 = 20;
    block_on(async {
        let pair = Pair::new(false);
        pair.connect(Cipher::Aes256Gcm, None, 0x2000).await;
        assert!(pair.pings());
        let receiver = pair.b.udp(pair.b.inner, 9000);
        let sender = pair.a.udp(pair.a.inner, 9000);
        sender.connect((pair.b.inner, 9000)).unwrap();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let sending = std::thread::spawn({
            let stop = stop.clone();
            move || send_numbered(&sender, &stop)
        });
        let receiving = std::thread::spawn(move || count_numbered(&receiver));
        let mut old = std::collections::VecDeque::new();
        for rekey in 1..=REKEYS {
            let spi = 0x2000 + 2 * rekey;
            let spec = state(&pair.a, &pair.b, spi);
            pair.b.add(&[StateSpec { direction: Direction::In, ..spec.clone() }]).await;
            pair.a.add(std::slice::from_ref(&spec)).await;
            pair.a.set(&[policy(&pair.a, &pair.b, spi)]).await;
            // A packet on its way when the policy changed may still want the last one.
            old.push_back(spec.id());
            if old.len() > 2
                && let Some(drained) = old.pop_front()
            {
                for host in [&pair.a, &pair.b] {
                    assert!(host.xfrm.remove_states(&[drained]).await.pop().unwrap().unwrap());
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let sent = sending.join().unwrap();
        let received = receiving.join().unwrap();
        println!("{sent} datagrams over {REKEYS} rekeys, {received} received");
        assert!(sent > 100, "{sent}");
        assert_eq!(received, sent);
    });
}

fn send_numbered(socket: &UdpSocket, stop: &std::sync::atomic::AtomicBool) -> u64 {
    let mut number = 0_u64;
    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
        socket.send(&number.to_be_bytes()).unwrap();
        number += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    number
}

/// Counts different numbers until none comes for a second.
fn count_numbered(socket: &UdpSocket) -> u64 {
    let mut seen = std::collections::HashSet::new();
    let mut bytes = [0; 8];
    while let Ok(8) = uninterrupted(|| socket.recv(&mut bytes)) {
        seen.insert(u64::from_be_bytes(bytes));
    }
    seen.len() as u64
}

#[test]
fn a_replay_and_a_forgery_are_counted() {
    block_on(async {
        let pair = Pair::new(false);
        pair.connect(Cipher::Aes256Gcm, Some(PORTS), 0x3000).await;
        let file = "/tmp/replay.pcap";
        let filter = format!("udp dst port {ENCAP_PORT} and src host {}", pair.a.outer);
        let tcpdump = pair.b.capture(file, &filter);
        assert!(pair.pings());
        std::thread::sleep(Duration::from_millis(500));
        drop(tcpdump);
        let captured = std::fs::read(file).unwrap();
        // File header, packet header, Ethernet, IPv4, UDP.
        let length = u32::from_le_bytes(captured[32..36].try_into().unwrap()) as usize;
        let mut esp = captured[24 + 16 + 14 + 20 + 8..24 + 16 + length].to_vec();
        assert_eq!(esp[..4], 0x3000_u32.to_be_bytes());

        let id = StateId { destination: pair.b.outer, spi: 0x3000 };
        let usage = async || pair.b.xfrm.usage(&[id]).await.pop().unwrap().unwrap().unwrap();
        let before = usage().await;
        assert_eq!((before.replays, before.integrity_failures), (0, 0));
        let attacker = pair.a.udp(pair.a.outer, 7777);
        let send = |bytes: &[u8]| attacker.send_to(bytes, (pair.b.outer, ENCAP_PORT)).unwrap();
        send(&esp);
        send(&esp);
        esp[7] = 0xee;
        send(&esp);
        std::thread::sleep(Duration::from_millis(300));
        let after = usage().await;
        assert_eq!((after.replays, after.integrity_failures), (2, 1));
        assert_eq!(after.packets, before.packets);
        let shown = pair.b.run("ip -s xfrm state");
        assert!(shown.contains("replay 2 failed 1"), "{shown}");
    });
}

#[test]
fn a_peer_behind_another_address_is_reported_once_in_a_while() {
    block_on(async {
        let pair = Pair::new(false);
        pair.connect(Cipher::Aes256Gcm, Some(PORTS), 0x4000).await;
        // As through a NAT: the packets come from another port than the receiver expects.
        let moved = UdpPorts { source: 40_000, destination: ENCAP_PORT };
        let spec = StateSpec { encapsulation: Some(moved), ..state(&pair.a, &pair.b, 0x4100) };
        let told = StateSpec { encapsulation: Some(PORTS), ..spec.clone() };
        pair.b.add(&[StateSpec { direction: Direction::In, ..told }]).await;
        pair.a.add(&[spec]).await;
        let mut watch = pair.b.watch();
        pair.a.set(&[policy(&pair.a, &pair.b, 0x4100)]).await;
        assert!(pair.pings());
        let state = StateId { destination: pair.b.outer, spi: 0x4100 };
        let remote = (pair.a.outer, 40_000).into();
        assert_eq!(next(&mut watch).await, XfrmEvent::RemoteMoved { state, remote });
        assert_eq!(rest(&mut watch).await, []);
    });
}

#[test]
fn a_peers_key_opens_the_overlays_ports_alone() {
    block_on(async {
        let pair = Pair::new(false);
        pair.connect(Cipher::Aes256Gcm, None, 0x5000).await;
        let sender = pair.a.udp(pair.a.outer, 0);
        for (port, open) in [(6788, true), (9999, false), (VXLAN_PORT - 4, false)] {
            let id = PolicyId { source: pair.a.outer, destination: pair.b.outer, port };
            pair.a.set(&[PolicySpec { id, template: Template::State { spi: 0x5000 } }]).await;
            let receiver = pair.b.udp(pair.b.outer, port);
            receiver.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            let before = pair.b.counter("XfrmInStateMismatch");
            sender.send_to(b"hello", (pair.b.outer, port)).unwrap();
            assert_eq!(uninterrupted(|| receiver.recv(&mut [0; 8])).is_ok(), open, "{port}");
            let dropped = pair.b.counter("XfrmInStateMismatch") - before;
            assert_eq!(dropped, u64::from(!open), "{port}");
        }
    });
}

#[test]
fn limits_of_packets_are_kept_and_reported() {
    block_on(async {
        let pair = Pair::new(false);
        pair.connect(Cipher::Aes256Gcm, None, 0x6000).await;
        let limits = Limits { packets_soft: 5, packets_hard: 10, ..Limits::NONE };
        let spec = StateSpec { limits, ..state(&pair.a, &pair.b, 0x6100) };
        let open = StateSpec { limits: Limits::NONE, direction: Direction::In, ..spec.clone() };
        pair.b.add(&[open]).await;
        let mut watch = pair.a.watch();
        pair.a.add(std::slice::from_ref(&spec)).await;
        pair.a.set(&[policy(&pair.a, &pair.b, 0x6100)]).await;
        let id = spec.id();
        assert!(!pair.a.succeeds(&format!("ping -q -c 15 -i 0.05 -W 1 -w 3 {}", pair.b.inner)));
        assert_eq!(next(&mut watch).await, XfrmEvent::Expired { state: id, hard: false });
        assert_eq!(next(&mut watch).await, XfrmEvent::Expired { state: id, hard: true });
        assert_eq!(rest(&mut watch).await, []);
        assert_eq!(pair.b.packets(id).await, 10);
        assert!(!pair.a.run("ip xfrm state").contains("0x00006100"));
        // Its packets are dropped and counted.
        let before = pair.a.counter("XfrmOutNoStates");
        assert!(!pair.ping_succeeds());
        assert!(pair.a.counter("XfrmOutNoStates") > before);
    });
}

#[test]
fn limits_of_bytes_and_age_are_reported() {
    block_on(async {
        let pair = Pair::new(false);
        pair.connect(Cipher::Aes256Gcm, None, 0x7000).await;
        let limits = Limits { bytes_soft: 500, bytes_hard: 1500, ..Limits::NONE };
        let spec = StateSpec { limits, ..state(&pair.a, &pair.b, 0x7100) };
        let mut watch = pair.a.watch();
        pair.a.add(std::slice::from_ref(&spec)).await;
        pair.a.set(&[policy(&pair.a, &pair.b, 0x7100)]).await;
        assert!(!pair.a.succeeds(&format!("ping -q -c 25 -i 0.02 -W 1 -w 2 {}", pair.b.inner)));
        for hard in [false, true] {
            assert_eq!(next(&mut watch).await, XfrmEvent::Expired { state: spec.id(), hard });
        }
        let lifetime = Duration::from_secs(2);
        let spec = StateSpec { lifetime, ..state(&pair.a, &pair.b, 0x7200) };
        let start = Instant::now();
        pair.a.add(std::slice::from_ref(&spec)).await;
        assert_eq!(next(&mut watch).await, XfrmEvent::Expired { state: spec.id(), hard: true });
        assert!(start.elapsed() > Duration::from_millis(900), "{:?}", start.elapsed());
    });
}
