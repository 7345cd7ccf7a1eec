//! A device's handling of packets that no valid sender sends.
// Seeds go to the log.
#![allow(clippy::print_stdout)]

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use weft_crypto::DataCipher;
use weft_crypto::ovpn::{OVERHEAD_BYTES, SealingKey};
use weft_engine::DropReason;
use weft_engine::dco::Event;
use weft_io::uninterrupted;
use weft_openvpn::data::PING;
use weft_openvpn::device::{DeletionReason, Mode, Notification, Slot};

use super::host::{AES_256, Host, Random, strangers};
use crate::common::PATIENCE;

/// Datagrams in all, and as many as any socket takes at once.
const DATAGRAMS: u64 = 20_000;
const AT_ONCE: u64 = 64;
const LENGTH_MAX: u32 = 400;
/// DATA_V2 with key id 0, from the peer that the device knows as 2.
const WORD: [u8; 4] = [0x48, 0, 0, 2];

/// A peer that is not a device: it seals what it likes.
pub(super) struct Forger {
    random: Random,
    key: SealingKey,
    pub(super) socket: UdpSocket,
    /// The device's.
    pub(super) to: SocketAddr,
    /// A good packet that was sent before.
    last: Vec<u8>,
}

/// The expected outcome of all sent packets.
#[derive(Debug, Default, PartialEq, Eq)]
struct Expected {
    foreign: u64,
    no_ip: u64,
    pings: u64,
    good: u64,
}

impl Forger {
    /// At `b`, a peer of the device at `a`.
    pub(super) fn new(a: &Host, b: &Host, seed: u64) -> Self {
        let (here, socket) = (a.socket(false), b.socket(false));
        let to = here.local_addr().unwrap();
        a.meet(b, here.into(), Some(socket.local_addr().unwrap()), AES_256);
        let key = b.key(a, Slot::Primary, 0, AES_256).encrypt.unwrap();
        let key = SealingKey::new(DataCipher::Aes256Gcm, &key.cipher_key, key.nonce_tail).unwrap();
        Self { random: Random(seed), key, socket, to, last: Vec::new() }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let length = self.random.below(LENGTH_MAX);
        (0..length).map(|_| self.random.below(256) as u8).collect()
    }

    pub(super) fn seal(&mut self, plain: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; OVERHEAD_BYTES];
        packet.extend_from_slice(plain);
        self.key.reserve(1, WORD).unwrap().seal_in_place(&mut packet, plain.len()).unwrap();
        self.last.clone_from(&packet);
        packet
    }

    /// A random datagram; adds its outcome to `expected`.
    fn next(&mut self, a: &Host, b: &Host, expected: &mut Expected) -> Vec<u8> {
        match self.random.below(6) {
            0 => self.bytes(),
            1 => [&WORD[..], &self.bytes()].concat(),
            2 if !self.last.is_empty() => {
                let mut packet = self.last.clone();
                let at = self.random.below(packet.len() as u32) as usize;
                packet[at] ^= 1 << self.random.below(8);
                packet
            }
            3 => {
                let plain = udp(b.inner_v4(), a.inner_v4(), b"the good one");
                expected.good += 1;
                self.seal(&plain)
            }
            4 => {
                // Of anybody but the peer; one in 2^32 would be of the peer.
                let other = Ipv4Addr::from(self.random.below(u32::MAX));
                let plain = udp(other.into(), a.inner_v4(), b"of another");
                expected.foreign += 1;
                self.seal(&plain)
            }
            _ => {
                let plain = if self.random.below(20) == 0 { PING.to_vec() } else { self.bytes() };
                let is_ip = match plain.first().map(|first| first >> 4) {
                    Some(4) => plain.len() >= 16,
                    Some(6) => plain.len() >= 24,
                    _ => false,
                };
                match () {
                    () if plain == PING => expected.pings += 1,
                    () if is_ip => expected.foreign += 1,
                    () => expected.no_ip += 1,
                }
                self.seal(&plain)
            }
        }
    }
}

/// An IPv4 packet from port 5000 to port 5001.
pub(super) fn udp(source: IpAddr, destination: IpAddr, text: &[u8]) -> Vec<u8> {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (source, destination) else {
        panic!("no IPv4")
    };
    let builder = etherparse::PacketBuilder::ipv4(source.octets(), destination.octets(), 64)
        .udp(5_000, 5_001);
    let mut packet = Vec::new();
    builder.write(&mut packet, text).unwrap();
    packet
}

fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = now.as_nanos() as u64 | 1;
    println!("seed {seed}");
    seed
}

/// Counts the datagrams that were dropped, opened or reported. Those that were opened and then dropped count
/// as opened.
fn seen(a: &Host) -> u64 {
    let after = [DropReason::BadInner, DropReason::ForeignSource, DropReason::TapRefused];
    let before = a.drops().into_iter().filter(|(reason, _)| !after.contains(reason));
    let controls = a.events.all().iter().filter(|it| matches!(it, Event::Packet { .. })).count();
    let opened = a.device.peer(2).unwrap().link.rx_packets;
    before.map(|(_, count)| count).sum::<u64>() + controls as u64 + opened
}

#[test]
fn any_input_is_counted_and_nothing_of_others_gets_in() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let mut forger = Forger::new(&a, &b, seed());
    let receiver = a.run(|| UdpSocket::bind((a.inner_v4(), 5_001)).unwrap());
    receiver.set_nonblocking(true).unwrap();
    let (mut expected, mut arrived) = (Expected::default(), 0);
    for sent in 1..=DATAGRAMS {
        let datagram = forger.next(&a, &b, &mut expected);
        // The kernel does not report that it cut a datagram without bytes.
        let datagram = if datagram.is_empty() { vec![0x48] } else { datagram };
        uninterrupted(|| forger.socket.send_to(&datagram, forger.to)).unwrap();
        if sent % AT_ONCE > 0 && sent < DATAGRAMS {
            continue;
        }
        let deadline = Instant::now() + PATIENCE;
        while seen(&a) < sent {
            assert!(
                Instant::now() < deadline,
                "{} of {sent} are accounted: {:?}",
                seen(&a),
                a.drops()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        let deadline = Instant::now() + PATIENCE;
        while arrived < expected.good {
            assert!(Instant::now() < deadline, "{arrived} arrived of {expected:?}");
            let mut text = [0; 100];
            match receiver.recv_from(&mut text) {
                Ok((length, from)) => {
                    assert_eq!((&text[..length], from.ip()), (&b"the good one"[..], b.inner_v4()));
                    arrived += 1;
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
    assert_eq!(seen(&a), DATAGRAMS, "counted twice");
    let dropped = |reason| a.device.dropped(reason);
    let opened = a.device.peer(2).unwrap();
    let found = Expected {
        foreign: dropped(DropReason::ForeignSource),
        no_ip: dropped(DropReason::BadInner),
        pings: opened.link.rx_packets - opened.vpn.rx_packets,
        good: arrived,
    };
    assert_eq!((found, dropped(DropReason::TapRefused)), (expected, 0));
    for reason in [DropReason::Forged, DropReason::Malformed, DropReason::UnknownSpi] {
        assert!(dropped(reason) > 0, "{reason:?}: {:?}", a.drops());
    }
}

#[test]
fn only_what_is_authentic_and_new_moves_a_peer() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let mut forger = Forger::new(&a, &b, 1);
    let home = forger.socket.local_addr().unwrap();
    let elsewhere = b.socket(false);
    let plain = udp(b.inner_v4(), a.inner_v4(), b"the good one");
    let good = forger.seal(&plain);
    forger.socket.send_to(&good, forger.to).unwrap();
    let mut other_key = forger.seal(&plain);
    other_key[0] |= 5;
    let mut forged = forger.seal(&plain);
    let last = forged.len() - 1;
    forged[last] ^= 1;
    for bad in [&good, &other_key, &forged] {
        elsewhere.send_to(bad, forger.to).unwrap();
    }
    for reason in [DropReason::Replayed, DropReason::UnknownSpi, DropReason::Forged] {
        a.wait_dropped(reason, 1);
    }
    assert_eq!((a.device.peer(2).unwrap().remote, a.events.all()), (Some(home), vec![]));
    // The same from there is followed once it is authentic.
    elsewhere.send_to(&forger.seal(&plain), forger.to).unwrap();
    let told = a.events.wait(|event| match event {
        Event::Notification(Notification::PeerFloat { peer_id: 2, remote }) => Some(*remote),
        _ => None,
    });
    assert_eq!(told, elsewhere.local_addr().unwrap());
}

#[test]
fn a_connection_of_any_bytes_carries_or_ends() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let mut random = Random(seed());
    let listener = a.run(|| TcpListener::bind((a.outer(false), 0)).unwrap());
    let address = listener.local_addr().unwrap();
    for _ in 0..200 {
        let mut client = b.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
        a.meet(&b, listener.accept().unwrap().0.into(), None, AES_256);
        for _ in 0..random.below(20) {
            let length = random.below(LENGTH_MAX) as usize;
            let mut bytes: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
            if random.below(3) > 0 && length > 2 {
                // A whole frame.
                bytes[..2].copy_from_slice(&(length as u16 - 2).to_be_bytes());
            }
            // The device may have closed it already.
            if client.write_all(&bytes).is_err() {
                break;
            }
        }
        drop(client);
        let reason = a.events.wait(|event| match event {
            Event::Notification(Notification::PeerDeleted { peer_id: 2, reason }) => Some(*reason),
            _ => None,
        });
        let ends = [DeletionReason::TransportError, DeletionReason::TransportDisconnect];
        assert!(ends.contains(&reason), "{reason:?}");
        assert!(a.peers().is_empty());
    }
    assert_eq!(a.device.dropped(DropReason::ForeignSource), 0);
}
