//! Congestion marks and DSCP through both halves of a worker (RFC 6040), over loopback with a fake TAP
//! device and a router that marks.
#![allow(clippy::unwrap_used)]

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use weft_crypto::{Cipher, PeerId, SaKey};
use weft_io::keylog::KeyLog;
use weft_io::udp::{Remote, UdpSocket};
use weft_packet::ecn::{self, Ecn};
use weft_packet::layout::Layout;
use weft_packet::vnet::{self, VnetHeader};
use weft_packet::{checksum, ethernet, ipv4, ipv6, tcp, udp};
use weft_path::{
    Encapsulation, Endpoint, EngineCommand, EngineKind, InboundSa, Mac, OutboundSa, PathId, Vni,
};

use crate::ports::device::{Env, FrameSink, GsoSink};
use crate::rx::receiver::Receiver;
use crate::sample_sas::{inbound_sa, outbound_sa};
use crate::stats::counters::{DropReason, Registry, Work, WorkerCounters};
use crate::tables::state::State;
use crate::tx::transmitter::Transmitter;

const VNI: Vni = Vni(7);
const PATH: PathId = PathId(1);
const PEER: PeerId = PeerId::from_bytes([9; 32]);
const SPI: u32 = 300;
const MTU: u16 = 1388;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const FROM: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const TO: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
/// DSCP "expedited forwarding" (RFC 3246) in its place.
const EF: u8 = 46 << 2;
const CE: u8 = 3;
const ECT0: u8 = 2;

/// A TAP device that keeps written frames.
#[derive(Default)]
struct FakeTap(RefCell<Vec<Vec<u8>>>);

impl FrameSink for FakeTap {
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.borrow_mut().push(slices.iter().flat_map(|slice| slice.to_vec()).collect());
        Ok(0)
    }
}

/// A socket, and a router behind it that overwrites the TOS of each header.
struct Wire {
    socket: UdpSocket,
    /// The TOS of each run as it was sent, and the datagrams in it.
    sent: RefCell<Vec<(u8, usize)>>,
    router: Cell<Option<u8>>,
}

impl GsoSink for Wire {
    fn send_batch(&self, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        self.sent.borrow_mut().push((to.tos(), batch.len().div_ceil(segment)));
        let tos = self.router.get().unwrap_or(to.tos());
        self.socket.send_run(batch, segment, &to.with_tos(tos))
    }
}

struct Rig {
    state: State,
    transmitter: Transmitter,
    receiver: Receiver,
    wire: Wire,
    far: UdpSocket,
    tap: FakeTap,
    counters: Arc<WorkerCounters>,
}

impl Rig {
    /// One state holds both ends: it seals for the far socket and opens the datagrams that arrive there.
    fn new(copy_dscp: bool) -> Self {
        let bind = || UdpSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0).unwrap();
        let (socket, far) = (bind(), bind());
        let remote = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), far.port());
        let key = SaKey::from_bytes([3; 36]);
        let (cipher, encapsulation) = (Cipher::Aes256Gcm, Encapsulation::Udp);
        let (lane, lifetime) = (0, Duration::MAX);
        let remote_engine = EngineKind::Userspace;
        let inbound = InboundSa {
            lane,
            cipher,
            key: key.clone(),
            encapsulation,
            remote_engine,
            lifetime,
            ..inbound_sa(SPI)
        };
        let outbound = OutboundSa {
            lane,
            cipher,
            key,
            encapsulation,
            remote_engine,
            lifetime,
            ..outbound_sa(SPI)
        };
        let (engine, peer, path) = (EngineKind::Userspace, PEER, PATH);
        let mut state = State::new(VNI, MTU, Arc::new(Registry::default()), KeyLog::default());
        for command in [
            EngineCommand::InstallInbound { engine, peer, path, sa: inbound, remote: remote.ip() },
            EngineCommand::InstallOutbound { engine, peer, path, sa: outbound, remote },
            EngineCommand::BindPath { peer, path: Some(path) },
            // Every frame of these tests is a broadcast: where they come from is known alone.
            EngineCommand::SetEndpoints {
                vni: VNI,
                add: vec![(Endpoint { mac: Mac(MAC), addresses: Vec::new() }, peer)],
                remove: Vec::new(),
            },
            EngineCommand::SetBroadcast { vni: VNI, peers: vec![peer] },
        ] {
            state.apply(command, |address| socket.remote(address)).unwrap();
        }
        Self {
            state,
            transmitter: Transmitter::new(64, Mac(MAC)).with_copy_dscp(copy_dscp),
            receiver: Receiver::new(),
            wire: Wire { socket, sent: RefCell::default(), router: Cell::new(None) },
            far,
            tap: FakeTap::default(),
            counters: Arc::new(WorkerCounters::default()),
        }
    }

    /// Sends these in one batch; gives the TOS and the number of datagrams of each run.
    fn transmit(&mut self, reads: &mut [Vec<u8>]) -> Vec<(u8, usize)> {
        let (tap, socket, counters) = (&self.tap, &self.wire, &*self.counters);
        let env = Env { tap, socket, counters, events: &|_| {} };
        for read in reads {
            let network = self.state.networks.first();
            self.transmitter.handle_read(&self.state, &env, network, read);
        }
        self.transmitter.flush(&self.state, &env);
        self.wire.sent.take()
    }

    /// Returns the frames that reach the TAP device; loopback delivers within the send call.
    fn receive(&mut self) -> Vec<Vec<u8>> {
        let (tap, socket, counters) = (&self.tap, &self.wire, &*self.counters);
        let env = Env { tap, socket, counters, events: &|_| {} };
        let max = self.receiver.batch_size.messages_max();
        while self.far.recv(&mut self.receiver.batch, max).is_ok() {
            self.receiver.handle_batch(&self.state, &env);
        }
        self.tap.0.take()
    }

    fn dropped(&self) -> u64 {
        let counters = Registry::default().read(&[Arc::clone(&self.counters)]);
        let all: u64 = counters.drops.iter().map(|(_, count)| count).sum();
        assert_eq!(all, counters.dropped(DropReason::CeOverNotEct), "{:?}", counters.drops);
        all
    }

    fn received(&self) -> u64 {
        let counters = Registry::default().read(&[Arc::clone(&self.counters)]);
        counters.done(Work::DatagramsReceived)
    }
}

fn link(ethertype: u16, vlan: bool) -> Vec<u8> {
    let mut read = vec![0; vnet::LEN + ethernet::LEN];
    ethernet::write(&mut read[vnet::LEN..], ethernet::BROADCAST, MAC, ethertype);
    if vlan {
        read.splice(vnet::LEN + 12..vnet::LEN + 12, [0x81, 0, 0, 5]);
    }
    read
}

/// A UDP packet over IPv4 as the TAP device gives it.
fn packet4(tos: u8, vlan: bool, payload: &[u8]) -> Vec<u8> {
    let mut read = link(ethernet::TYPE_IPV4, vlan);
    let (l3, len) = (read.len(), udp::LEN + payload.len());
    read.resize(l3 + ipv4::LEN, 0);
    let header = ipv4::Builder {
        tos,
        total_len: (ipv4::LEN + len) as u16,
        id: 77,
        dont_fragment: true,
        ttl: 64,
        protocol: ipv4::PROTOCOL_UDP,
        source: FROM,
        destination: TO,
    };
    header.write(&mut read[l3..]);
    read.extend([0x10, 1, 0x14, 0x51, (len >> 8) as u8, len as u8, 0, 0]);
    read.extend_from_slice(payload);
    read
}

/// The same over IPv6.
fn packet6(tos: u8, vlan: bool, payload: &[u8]) -> Vec<u8> {
    let mut read = link(ethernet::TYPE_IPV6, vlan);
    let (l3, len) = (read.len(), udp::LEN + payload.len());
    read.resize(l3 + ipv6::LEN, 0);
    let header = ipv6::Builder {
        traffic_class: tos,
        flow_label: 0xa_bcde,
        payload_len: len as u16,
        next_header: ipv6::NEXT_UDP,
        hop_limit: 64,
        source: FROM.to_ipv6_mapped(),
        destination: TO.to_ipv6_mapped(),
    };
    header.write(&mut read[l3..]);
    read.extend([0x10, 1, 0x14, 0x51, (len >> 8) as u8, len as u8, 0x12, 0x34]);
    read.extend_from_slice(payload);
    read
}

/// A TCP super-packet of `segments` segments of 1,000 bytes, beginning at `sequence`.
fn super_packet(tos: u8, sequence: u32, segments: usize) -> Vec<u8> {
    let len = tcp::LEN + segments * 1000;
    let mut read = packet4(tos, false, &vec![7; len - udp::LEN]);
    let l3 = vnet::LEN + ethernet::LEN;
    let l4 = l3 + ipv4::LEN;
    read[l3 + 9] = ipv4::PROTOCOL_TCP;
    let sum = checksum::update(
        u16::from_be_bytes([read[l3 + 10], read[l3 + 11]]),
        ipv4::PROTOCOL_UDP.into(),
        ipv4::PROTOCOL_TCP.into(),
    );
    read[l3 + 10..l3 + 12].copy_from_slice(&sum.to_be_bytes());
    read[l4..l4 + tcp::LEN].fill(0);
    read[l4..l4 + 4].copy_from_slice(&[0x10, 1, 0x14, 0x51]);
    read[l4 + 4..l4 + 8].copy_from_slice(&sequence.to_be_bytes());
    (read[l4 + 12], read[l4 + 13]) = (0x50, tcp::ACK);
    let pseudo = checksum::pseudo_v4(FROM, TO, ipv4::PROTOCOL_TCP, len as u32).partial();
    read[l4 + 16..l4 + 18].copy_from_slice(&pseudo.to_be_bytes());
    let vnet = VnetHeader {
        flags: vnet::F_NEEDS_CSUM,
        gso_type: vnet::GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1000,
        csum_start: 34,
        csum_offset: tcp::CHECKSUM_OFFSET,
    };
    vnet.write(&mut read);
    read
}

fn tos_of(read: &[u8]) -> u8 {
    let frame = &read[vnet::LEN..];
    if frame[12..14] == ethernet::TYPE_IPV4.to_be_bytes() {
        let header = &frame[ethernet::LEN..ethernet::LEN + ipv4::LEN];
        assert_eq!(checksum::Sum::default().bytes(header).checksum(), 0, "checksum of the header");
    }
    ecn::tos(frame, &Layout::parse(frame))
}

#[test]
fn the_outer_header_has_the_inner_ecn_and_its_dscp_only_where_told() {
    for copy_dscp in [false, true] {
        let mut rig = Rig::new(copy_dscp);
        for tos in 0..=u8::MAX {
            let wanted = if copy_dscp { tos } else { tos & 3 };
            for vlan in [false, true] {
                let mut reads = [packet4(tos, vlan, b"four"), packet6(tos, vlan, b"six")];
                let sent = rig.transmit(&mut reads);
                assert!(sent.iter().all(|(outer, _)| *outer == wanted), "{tos:#x}: {sent:?}");
                assert_eq!(rig.receive(), reads);
            }
        }
        let mut arp = link(ethernet::TYPE_ARP, false);
        arp.extend([CE; 28]);
        assert_eq!(rig.transmit(&mut [arp]), [(0, 1)]);
        assert_eq!(rig.dropped(), 0);
    }
}

#[test]
fn a_run_has_one_tos() {
    let mut rig = Rig::new(false);
    let tos = [ECT0, ECT0, 0, 0, 0, ECT0, EF | ECT0];
    let mut reads = tos.map(|tos| packet4(tos, false, &[7; 500]));
    assert_eq!(rig.transmit(&mut reads), [(ECT0, 2), (0, 3), (ECT0, 2)]);
    let got = rig.receive();
    assert_eq!(rig.received(), 7);
    assert_eq!(got.iter().map(|read| tos_of(read)).collect::<Vec<_>>(), tos);
    let mut rig = Rig::new(true);
    assert_eq!(rig.transmit(&mut reads).len(), 4);
}

#[test]
fn every_mark_of_the_wire_comes_to_the_container_or_drops_the_packet() {
    for packet in [packet4, packet6] {
        for (inner, outer) in
            Ecn::ALL.into_iter().flat_map(|inner| Ecn::ALL.map(|outer| (inner, outer)))
        {
            let mut rig = Rig::new(false);
            // The router writes a DSCP too; it stays outside.
            rig.wire.router.set(Some(EF | outer.bits()));
            let read = packet(0x28 | inner.bits(), false, &[7; 100]);
            rig.transmit(&mut [read.clone()]);
            let got = rig.receive();
            match ecn::decapsulated(inner, outer) {
                Ok(ecn) => {
                    let wanted = packet(0x28 | ecn.bits(), false, &[7; 100]);
                    assert_eq!(tos_of(&got[0]), 0x28 | ecn.bits());
                    assert_eq!((got, rig.dropped()), (vec![wanted], 0), "{inner:?} in {outer:?}");
                }
                Err(_) => assert_eq!((got, rig.dropped()), (vec![], 1), "{inner:?} in {outer:?}"),
            }
        }
    }
}

#[test]
fn a_marked_run_becomes_a_marked_super_packet_of_its_own() {
    let mut rig = Rig::new(false);
    let tos = EF | ECT0;
    rig.transmit(&mut [super_packet(tos, 1000, 10)]);
    rig.wire.router.set(Some(CE));
    rig.transmit(&mut [super_packet(tos, 11_000, 10)]);
    rig.wire.router.set(None);
    rig.transmit(&mut [super_packet(tos, 21_000, 10)]);
    let got = rig.receive();
    assert_eq!(got.iter().map(|read| tos_of(read)).collect::<Vec<_>>(), [tos, EF | CE, tos]);
    let wanted =
        [(tos, 1000), (EF | CE, 11_000), (tos, 21_000)].map(|(t, s)| super_packet(t, s, 10));
    assert!(got == wanted);
    assert_eq!(rig.dropped(), 0);
}
