//! Both halves of a worker against each other over loopback, with a fake TAP device.
#![allow(clippy::unwrap_used)]

mod drops;
mod ecn;
mod exact;
mod flows;
mod helped;
mod limits;
mod narrow;
mod networks;
mod nonsense;
mod ovpn;
mod referee;
mod source;
mod wire;

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use std::time::Duration;
use weft_crypto::{Cipher, PeerId, SaKey, WINDOW_PACKETS};
use weft_io::keylog::KeyLog;
use weft_io::udp::{RUN_BYTES_MAX, Remote, UdpSocket};
use weft_packet::vnet::{self, VnetHeader};
use weft_packet::{checksum, ethernet, ipv4, tcp, udp};
use weft_path::{
    Endpoint, EngineCommand, EngineEvent, EngineKind, InboundSa, Mac, OutboundSa, PathId, Vni,
};

use crate::ports::device::{Env, FrameSink, GsoSink};
use crate::ports::errno;
use crate::rx::receiver::Receiver;
use crate::sample_sas::{inbound_sa, outbound_sa};
use crate::stats::counters::{Counters, DropReason, Registry, Work, WorkerCounters};
use crate::tables::lane::Origin;
use crate::tables::networks::NetworkNumber;
use crate::tables::state::State;
use crate::tx::gso_batch::SEND_TRIES_MAX;
use crate::tx::transmitter::Transmitter;

const VNI: Vni = Vni(7);
const PATH: PathId = PathId(1);
const PEER: PeerId = PeerId::from_bytes([9; 32]);
const SPI: u32 = 300;
const MTU: u16 = 1388;
const LOCAL: Mac = Mac([2, 0, 0, 0, 0, 1]);
const FAR: Mac = Mac([2, 0, 0, 0, 0, 2]);
const LOCAL_IP: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const FAR_IP: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);

/// A TAP device that keeps written frames.
#[derive(Default)]
struct FakeTap {
    frames: RefCell<Vec<Vec<u8>>>,
    /// The network of each frame that was written for one.
    networks: RefCell<Vec<u16>>,
    /// Nothing is kept but how many there were.
    forget: Cell<bool>,
    written: Cell<usize>,
    /// The error that the kernel answers each write with, if any.
    error: Cell<Option<i32>>,
}

impl FrameSink for FakeTap {
    fn send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if let Some(error) = self.error.get() {
            return Err(io::Error::from_raw_os_error(error));
        }
        self.written.set(self.written.get() + 1);
        if !self.forget.get() {
            let parts: Vec<&[u8]> = slices.iter().map(|slice| &**slice).collect();
            self.frames.borrow_mut().push(parts.concat());
        }
        Ok(0)
    }

    fn send_in(&self, network: NetworkNumber, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if !self.forget.get() {
            self.networks.borrow_mut().push(network.get());
        }
        self.send(slices)
    }
}

/// A socket that fails as told, and otherwise is a real one.
struct Socket {
    real: UdpSocket,
    /// Error for runs, and for single datagrams.
    errors: Cell<(Option<i32>, Option<i32>)>,
    calls: Cell<u32>,
    /// Datagrams that the kernel may cut.
    cut: Cell<u32>,
    /// Datagrams, if the test keeps and does not send them.
    kept: Option<RefCell<Vec<Vec<u8>>>>,
}

impl GsoSink for Socket {
    fn send_batch(&self, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        self.calls.set(self.calls.get() + 1);
        if let Some(kept) = &self.kept {
            kept.borrow_mut().extend(batch.chunks(segment).map(<[u8]>::to_vec));
            return Ok(());
        }
        let (for_runs, for_single) = self.errors.get();
        match if batch.len() > segment { for_runs } else { for_single } {
            Some(error) => Err(io::Error::from_raw_os_error(error)),
            None => self.real.send_run(batch, segment, to),
        }
    }

    fn send_from(&self, from: Origin, batch: &[u8], segment: usize, to: &Remote) -> io::Result<()> {
        if from.may_cut {
            assert!(batch.len() <= segment, "a batch is not cut");
            self.cut.set(self.cut.get() + 1);
        }
        self.send_batch(batch, segment, to)
    }
}

/// A sender, a receiver, and the results.
struct Rig {
    state: State,
    transmitter: Transmitter,
    receiver: Receiver,
    socket: Socket,
    far_socket: UdpSocket,
    tap: FakeTap,
    counters: Arc<WorkerCounters>,
    events: Mutex<Vec<EngineEvent>>,
}

impl Rig {
    /// One state holds both ends: it seals for the far socket and opens the datagrams that arrive there.
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut OutboundSa)) -> Self {
        let bind = || UdpSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0).unwrap();
        let (near, far_socket) = (bind(), bind());
        let remote = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), far_socket.port());
        // The one host at both ends: in format `ovpn` the packets name it.
        let (registry, keylog) = (Arc::new(Registry::default()), KeyLog::default());
        let mut state = State::of_host(PEER, VNI, MTU, registry, keylog);
        let mut outbound = outbound_sa(SPI);
        change(&mut outbound);
        let inbound = InboundSa {
            cipher: outbound.cipher,
            key: outbound.key.clone(),
            remote_engine: outbound.remote_engine,
            ..inbound_sa(outbound.spi)
        };
        let far = Endpoint { mac: FAR, addresses: Vec::new() };
        let local = Endpoint { mac: LOCAL, addresses: Vec::new() };
        for command in [
            EngineCommand::InstallInbound {
                engine: EngineKind::Userspace,
                remote: std::net::Ipv4Addr::LOCALHOST.into(),
                peer: PEER,
                path: PATH,
                sa: inbound,
            },
            EngineCommand::InstallOutbound {
                engine: EngineKind::Userspace,
                peer: PEER,
                path: PATH,
                sa: outbound,
                remote,
            },
            EngineCommand::BindPath { peer: PEER, path: Some(PATH) },
            EngineCommand::SetEndpoints {
                vni: VNI,
                add: vec![(far, PEER), (local, PEER)],
                remove: Vec::new(),
            },
            EngineCommand::SetBroadcast { vni: VNI, peers: vec![PEER] },
        ] {
            state.apply(command, |address| near.remote(address)).unwrap();
        }
        Self {
            state,
            transmitter: Transmitter::new(64, LOCAL),
            receiver: Receiver::new(),
            socket: Socket {
                real: near,
                errors: Cell::default(),
                calls: Cell::default(),
                cut: Cell::default(),
                kept: None,
            },
            far_socket,
            tap: FakeTap::default(),
            counters: Arc::new(WorkerCounters::default()),
            events: Mutex::new(Vec::new()),
        }
    }

    fn command(&mut self, command: EngineCommand) {
        self.state.apply(command, |address| self.socket.real.remote(address)).unwrap();
    }

    /// Reads these from the TAP device in one batch and sends them.
    fn transmit(&mut self, reads: &mut [Vec<u8>]) {
        self.transmit_in(reads.iter().map(|read| (VNI, &**read)));
    }

    /// Reads these in one batch from the TAP devices of their networks.
    fn transmit_in<'a>(&mut self, reads: impl IntoIterator<Item = (Vni, &'a [u8])>) {
        let events = |event| self.events.lock().unwrap().push(event);
        let env =
            Env { tap: &self.tap, socket: &self.socket, counters: &self.counters, events: &events };
        for (vni, read) in reads {
            let network = self.state.networks.by_vni(vni).unwrap();
            self.transmitter.handle_read(&self.state, &env, network, read);
        }
        self.transmitter.flush(&self.state, &env);
    }

    /// Receives all that has arrived. Loopback delivers within the send call.
    fn receive(&mut self) {
        let events = |event| self.events.lock().unwrap().push(event);
        let env =
            Env { tap: &self.tap, socket: &self.socket, counters: &self.counters, events: &events };
        loop {
            let max = self.receiver.batch_size.messages_max();
            if self.far_socket.recv(&mut self.receiver.batch, max).is_err() {
                return;
            }
            self.receiver.handle_batch(&self.state, &env);
        }
    }

    fn counters(&self) -> Counters {
        Registry::default().read(&[Arc::clone(&self.counters)])
    }

    /// Events so far, without those that the rig itself brings about: its packets do not come from
    /// where they go to.
    fn events(&self) -> Vec<EngineEvent> {
        let events = std::mem::take(&mut *self.events.lock().unwrap());
        let moved = |event: &EngineEvent| matches!(event, EngineEvent::RemoteMoved { .. });
        events.into_iter().filter(|event| !moved(event)).collect()
    }

    /// The number of the peer's dropped packets.
    fn peers_drops(&self) -> u64 {
        self.state.peers.iter().map(|(_, peer)| peer.dropped.get()).sum()
    }

    fn drops(&self) -> Vec<(DropReason, u64)> {
        self.counters().drops.into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

/// A TCP packet or super-packet as the kernel gives it; `segment` 0 for a single one.
pub(crate) fn tcp_read(payload: &[u8], segment: u16, flags: u8) -> Vec<u8> {
    let mut read = headers(ipv4::PROTOCOL_TCP, 20 + payload.len(), true);
    let l4 = vnet::LEN + ethernet::LEN + ipv4::LEN;
    read.extend([0; 20]);
    read[l4..l4 + 8].copy_from_slice(&[0x10, 1, 0x14, 0x51, 0xff, 0xff, 0xf0, 0]);
    read[l4 + 12] = 0x50;
    read[l4 + 13] = flags;
    let pseudo =
        checksum::pseudo_v4(LOCAL_IP, FAR_IP, ipv4::PROTOCOL_TCP, 20 + payload.len() as u32);
    read[l4 + 16..l4 + 18].copy_from_slice(&pseudo.partial().to_be_bytes());
    read.extend_from_slice(payload);
    let vnet = VnetHeader {
        flags: vnet::F_NEEDS_CSUM,
        gso_type: if segment > 0 { vnet::GSO_TCPV4 } else { vnet::GSO_NONE },
        hdr_len: if segment > 0 { 54 } else { 0 },
        gso_size: segment,
        csum_start: 34,
        csum_offset: tcp::CHECKSUM_OFFSET,
    };
    vnet.write(&mut read);
    read
}

/// A UDP packet, its checksum complete.
pub(crate) fn udp_read(payload: &[u8], dont_fragment: bool) -> Vec<u8> {
    let len = udp::LEN + payload.len();
    let mut read = headers(ipv4::PROTOCOL_UDP, len, dont_fragment);
    let l4 = read.len();
    read.extend([0x10, 1, 0x14, 0x51]);
    read.extend((len as u16).to_be_bytes());
    read.extend([0, 0]);
    read.extend_from_slice(payload);
    let pseudo = checksum::pseudo_v4(LOCAL_IP, FAR_IP, ipv4::PROTOCOL_UDP, len as u32);
    let sum = checksum::udp_nonzero(pseudo.bytes(&read[l4..]).checksum());
    read[l4 + 6..l4 + 8].copy_from_slice(&sum.to_be_bytes());
    read
}

/// Virtio net, Ethernet and IPv4 header in front of `len` bytes.
fn headers(protocol: u8, len: usize, dont_fragment: bool) -> Vec<u8> {
    let mut read = vec![0; vnet::LEN + ethernet::LEN + ipv4::LEN];
    ethernet::write(&mut read[vnet::LEN..], FAR.0, LOCAL.0, ethernet::TYPE_IPV4);
    let header = ipv4::Builder {
        tos: 0,
        total_len: (ipv4::LEN + len) as u16,
        id: 77,
        dont_fragment,
        ttl: 64,
        protocol,
        source: LOCAL_IP,
        destination: FAR_IP,
    };
    header.write(&mut read[vnet::LEN + ethernet::LEN..]);
    read
}

pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251) as u8).collect()
}

#[test]
fn a_super_packet_crosses_as_one_run_and_arrives_as_it_was() {
    let mut rig = Rig::new();
    let read = tcp_read(&pattern(45 * 1348 - 100), 1348, tcp::ACK | tcp::PSH);
    rig.transmit(&mut [read.clone()]);
    rig.receive();
    let frames = rig.tap.frames.borrow();
    assert_eq!(frames.len(), 1);
    // The header length that the kernel gets is the one that it gave.
    assert_eq!(frames[0][..64], read[..64]);
    assert!(frames[0] == read);
    assert_eq!(rig.counters().done(Work::RunsSent), 1);
    assert_eq!(rig.counters().done(Work::DatagramsReceived), 45);
    assert_eq!(rig.drops(), []);
    assert_eq!(rig.events(), [EngineEvent::InboundFirstUse { spi: SPI }]);
}

#[test]
fn small_packets_of_one_batch_share_a_run() {
    let mut rig = Rig::new();
    let mut reads: Vec<_> = (0..10).map(|_| tcp_read(&[], 0, tcp::ACK)).collect();
    rig.transmit(&mut reads);
    rig.receive();
    assert_eq!(rig.counters().done(Work::RunsSent), 1);
    assert!(*rig.tap.frames.borrow() == reads);
}

#[test]
fn packets_that_do_not_belong_to_a_run_start_the_next() {
    let mut rig = Rig::new();
    let mut reads = [
        udp_read(&pattern(100), true),
        udp_read(&pattern(1000), true),
        udp_read(&pattern(500), true),
        udp_read(&pattern(500), true),
    ];
    rig.transmit(&mut reads);
    rig.receive();
    // 100; 1000 and 500, which closes; 500.
    assert_eq!(rig.counters().done(Work::RunsSent), 3);
    assert_eq!(rig.counters().done(Work::DatagramsReceived), 4);
    assert_eq!(rig.drops(), []);
}

#[test]
fn a_checksum_is_finished_for_a_peer_that_takes_no_marks() {
    let mut rig = Rig::with(|sa| sa.rco = false);
    rig.transmit(&mut [tcp_read(&pattern(999), 0, tcp::ACK)]);
    rig.receive();
    let frames = rig.tap.frames.borrow();
    assert_eq!(frames[0][..vnet::LEN], [0; vnet::LEN]);
    let packet = &frames[0][vnet::LEN + ethernet::LEN + ipv4::LEN..];
    let pseudo = checksum::pseudo_v4(LOCAL_IP, FAR_IP, ipv4::PROTOCOL_TCP, packet.len() as u32);
    assert_eq!(pseudo.bytes(packet).checksum(), 0);
}

#[test]
fn no_allocation_per_packet() {
    let mut rig = Rig::new();
    rig.tap.forget.set(true);
    let super_packet = tcp_read(&pattern(45 * 1348), 1348, tcp::ACK);
    let small = udp_read(&pattern(64), true);
    let mut reads = [small.clone(), super_packet.clone(), small.clone(), super_packet, small];
    let mut turn = || {
        rig.transmit(&mut reads);
        rig.receive();
    };
    // Until the SA's replay window has its full size: 93 packets a turn.
    (0..WINDOW_PACKETS / 90).for_each(|_| turn());
    let info = allocation_counter::measure(|| (0..50).for_each(|_| turn()));
    assert_eq!(info.count_total, 0);
    assert!(rig.tap.written.get() >= 50 * 4);
    assert_eq!(rig.drops(), []);
}

#[test]
fn a_refused_run_goes_as_single_datagrams() {
    for error in [errno::EINVAL, errno::EIO] {
        let mut rig = Rig::new();
        rig.socket.errors.set((Some(error), None));
        let read = tcp_read(&pattern(10 * 1348), 1348, tcp::ACK);
        rig.transmit(&mut [read.clone()]);
        rig.transmit(&mut [read.clone()]);
        rig.receive();
        assert_eq!(rig.counters().done(Work::DatagramsSent), 20);
        // The second run is not even tried.
        assert_eq!(rig.counters().done(Work::RunsRefused), 1);
        assert_eq!(rig.socket.calls.get(), 1 + 20);
        assert_eq!(rig.drops(), []);
        let frames = rig.tap.frames.borrow();
        let bytes: usize = frames.iter().map(Vec::len).sum();
        assert!(bytes >= 2 * (10 * 1348 + 54));
        // Not a message by itself, but the messages of one call are merged.
        assert!(frames.len() <= 6, "{} writes of 20 messages", frames.len());
    }
}

#[test]
fn a_datagram_too_long_for_the_route_is_reported_with_its_inner_mtu() {
    let mut rig = Rig::new();
    rig.socket.errors.set((Some(errno::EMSGSIZE), Some(errno::EMSGSIZE)));
    for _ in 0..3 {
        rig.transmit(&mut [tcp_read(&pattern(3 * 1348), 1348, tcp::ACK)]);
    }
    assert_eq!(rig.drops(), [(DropReason::MessageTooLong, 9)]);
    // Once, however often within a moment.
    assert_eq!(rig.events(), [EngineEvent::MessageTooLong { path: PATH, mtu: MTU }]);
    // Older kernels say EINVAL of the run; runs are not given up for that.
    rig.socket.errors.set((Some(errno::EINVAL), Some(errno::EMSGSIZE)));
    for _ in 0..2 {
        rig.transmit(&mut [tcp_read(&pattern(3 * 1348), 1348, tcp::ACK)]);
    }
    assert_eq!(rig.counters().done(Work::RunsRefused), 5);
    // Only runs are too long: nothing to report, nothing lost, and runs are tried again.
    rig.socket.errors.set((Some(errno::EMSGSIZE), None));
    rig.transmit(&mut [tcp_read(&pattern(3 * 1348), 1348, tcp::ACK)]);
    assert_eq!(rig.counters().done(Work::DatagramsSent), 3);
    assert_eq!(rig.events(), []);
}

#[test]
fn a_full_socket_is_tried_a_few_times_and_then_the_run_is_dropped() {
    let mut rig = Rig::new();
    for (calls, error) in [(1, errno::EAGAIN), (2, errno::ENOBUFS)] {
        rig.socket.errors.set((Some(error), Some(error)));
        rig.transmit(&mut [tcp_read(&pattern(4 * 1348), 1348, tcp::ACK)]);
        assert_eq!(rig.socket.calls.get(), calls * SEND_TRIES_MAX);
        assert_eq!(rig.drops(), [(DropReason::SendFull, 4 * u64::from(calls))]);
    }
}

#[test]
fn frames_without_a_place_to_go_are_counted() {
    let mut rig = Rig::new();
    let mut stranger = udp_read(&pattern(10), true);
    stranger[vnet::LEN + 5] = 0xee;
    rig.transmit(&mut [stranger, vec![0; 5], vec![0; 14]]);
    rig.command(EngineCommand::BindPath { peer: PEER, path: None });
    rig.transmit(&mut [udp_read(&pattern(10), true)]);
    let mut broken = tcp_read(&pattern(4000), 1348, tcp::ACK);
    broken[4..6].fill(0);
    rig.command(EngineCommand::BindPath { peer: PEER, path: Some(PATH) });
    rig.transmit(&mut [broken]);
    assert_eq!(
        rig.drops(),
        [(DropReason::NoEndpoint, 1), (DropReason::NoPath, 1), (DropReason::BadSuperPacket, 3),]
    );
    assert_eq!(rig.socket.calls.get(), 0);
}

#[test]
fn an_over_long_packet_is_answered_or_cut() {
    let mut rig = Rig::new();
    rig.command(EngineCommand::SetPathMtu { path: PATH, mtu: 1000 });
    rig.transmit(&mut [udp_read(&pattern(1300), true)]);
    let answer = rig.tap.frames.borrow_mut().pop().unwrap();
    let icmp = &answer[vnet::LEN + ethernet::LEN + ipv4::LEN..];
    assert_eq!((icmp[0], icmp[1], &icmp[6..8]), (3, 4, &1000_u16.to_be_bytes()[..]));
    assert_eq!(answer[vnet::LEN..vnet::LEN + 6], LOCAL.0);
    assert_eq!(rig.counters().done(Work::TooLongAnswered), 1);
    assert_eq!(rig.drops(), [(DropReason::TooLong, 1)]);
    // Without DF it is fragmented.
    rig.transmit(&mut [udp_read(&pattern(1300), false)]);
    rig.receive();
    assert_eq!(rig.counters().done(Work::FragmentsSent), 2);
    let fragments = rig.tap.frames.borrow();
    let mut payload = Vec::new();
    for fragment in fragments.iter() {
        assert!(fragment.len() <= vnet::LEN + ethernet::LEN + 1000);
        payload.extend_from_slice(&fragment[vnet::LEN + ethernet::LEN + ipv4::LEN..]);
    }
    assert_eq!(payload[udp::LEN..], pattern(1300));
    assert_eq!(rig.drops(), [(DropReason::TooLong, 1)]);
}

#[test]
fn a_tcp_super_packet_is_cut_to_a_smaller_path() {
    let mut rig = Rig::new();
    rig.command(EngineCommand::SetPathMtu { path: PATH, mtu: 1000 });
    let payload = pattern(10 * 1348);
    rig.transmit(&mut [tcp_read(&payload, 1348, tcp::ACK)]);
    rig.receive();
    assert_eq!(rig.counters().done(Work::DatagramsSent), payload.len().div_ceil(960) as u64);
    let frame = rig.tap.frames.borrow_mut().pop().unwrap();
    assert_eq!(frame[vnet::LEN + 54..], payload);
}

#[test]
fn limits_are_reported_once_and_then_nothing_is_sealed() {
    let mut rig = Rig::with(|sa| (sa.packets_soft, sa.packets_hard) = (5, 8));
    for _ in 0..4 {
        rig.transmit(&mut [udp_read(&pattern(10), true)]);
    }
    assert_eq!(rig.events(), []);
    for _ in 0..10 {
        rig.transmit(&mut [udp_read(&pattern(10), true)]);
    }
    assert_eq!(
        rig.events(),
        [
            EngineEvent::OutboundNearLimit { path: PATH, spi: SPI },
            EngineEvent::OutboundExhausted { path: PATH, spi: SPI },
        ]
    );
    assert_eq!(rig.counters().done(Work::DatagramsSent), 8);
    assert_eq!(rig.drops(), [(DropReason::SaExhausted, 6)]);
    let mut rig = Rig::with(|sa| (sa.bytes_soft, sa.bytes_hard) = (2_000, 3_000));
    for _ in 0..4 {
        rig.transmit(&mut [udp_read(&pattern(1000), true)]);
    }
    assert_eq!(rig.drops(), [(DropReason::SaExhausted, 2)]);
}

/// A switch reports its group memberships to its links. Peers would drop such reports, as from an unknown
/// source.
#[test]
fn the_switchs_own_reports_stay_and_those_of_containers_go() {
    let mut rig = Rig::new();
    rig.command(EngineCommand::SetBroadcast { vni: VNI, peers: vec![PEER] });
    let report = |source: Mac| {
        let mut read = vec![0; vnet::LEN + ethernet::LEN];
        let group = [1, 0, 0x5e, 0, 0, 0x16];
        ethernet::write(&mut read[vnet::LEN..], group, source.0, ethernet::TYPE_IPV4);
        read.extend([0x46, 0, 0, 32, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 224, 0, 0, 22]);
        read.extend([0x94, 4, 0, 0, 0x22, 0, 0, 0, 0, 0, 0, 0]);
        read
    };
    rig.transmit(&mut [report(LOCAL)]);
    assert_eq!((rig.socket.calls.get(), rig.counters().done(Work::OwnReports)), (0, 1));
    assert_eq!(rig.drops(), []);
    rig.transmit(&mut [report(Mac([2, 0, 0, 0, 0, 7]))]);
    assert_eq!((rig.socket.calls.get(), rig.counters().done(Work::OwnReports)), (1, 1));
}

#[test]
fn broadcast_goes_to_each_peer_that_has_a_path() {
    let mut rig = Rig::new();
    let absent = PeerId::from_bytes([8; 32]);
    rig.command(EngineCommand::SetBroadcast { vni: VNI, peers: vec![absent, PEER] });
    let mut read = udp_read(&pattern(100), true);
    read[vnet::LEN..vnet::LEN + 6].fill(0xff);
    rig.transmit(&mut [read.clone()]);
    rig.receive();
    assert_eq!(*rig.tap.frames.borrow(), [read]);
    assert_eq!(rig.drops(), [(DropReason::NoPath, 1)]);
}

#[test]
fn a_frame_comes_from_an_endpoint_of_the_peer_that_sealed_it() {
    let mut rig = Rig::new();
    let other = PeerId::from_bytes([8; 32]);
    let at = |peer| {
        let add = vec![(Endpoint { mac: LOCAL, addresses: Vec::new() }, peer)];
        EngineCommand::SetEndpoints { vni: VNI, add, remove: Vec::new() }
    };
    rig.command(at(other));
    rig.transmit(&mut [udp_read(&pattern(100), true)]);
    rig.receive();
    assert_eq!(rig.drops(), [(DropReason::ForeignSource, 1)]);
    rig.command(EngineCommand::SetEndpoints { vni: VNI, add: Vec::new(), remove: vec![LOCAL] });
    rig.transmit(&mut [udp_read(&pattern(100), true), udp_read(&pattern(101), true)]);
    rig.receive();
    let drops = [(DropReason::ForeignSource, 1), (DropReason::UnannouncedSource, 2)];
    assert_eq!(rig.drops(), drops);
    assert_eq!(rig.tap.frames.borrow().len(), 0);
    rig.command(at(PEER));
    rig.transmit(&mut [udp_read(&pattern(100), true)]);
    rig.receive();
    assert_eq!((rig.tap.frames.borrow().len(), rig.drops()), (1, drops.to_vec()));
}

#[test]
fn a_removed_peer_leaves_nothing() {
    let mut rig = Rig::new();
    rig.command(EngineCommand::RemovePeer { peer: PEER });
    assert_eq!(rig.state.inbound_of(SPI), None);
    assert_eq!(rig.state.path_number(PATH), None);
    rig.transmit(&mut [udp_read(&pattern(10), true)]);
    assert_eq!(rig.drops(), [(DropReason::NoEndpoint, 1)]);
}

#[test]
fn a_path_lives_as_long_as_it_has_an_sa_or_carries_something() {
    let mut rig = Rig::new();
    rig.command(EngineCommand::RemoveOutbound { path: PATH });
    rig.command(EngineCommand::BindPath { peer: PEER, path: None });
    // Probes of the peer still come in on it.
    assert!(rig.state.path_number(PATH).is_some());
    rig.command(EngineCommand::RemoveInbound { spi: SPI });
    assert_eq!(rig.state.path_number(PATH), None);
    assert_eq!(rig.state.inbound_of(SPI), None);
}

#[test]
fn a_new_outbound_sa_may_go_elsewhere() {
    let mut rig = Rig::new();
    let elsewhere = UdpSocket::bind(Some(Ipv4Addr::LOCALHOST.into()), 0).unwrap();
    let remote = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), elsewhere.port());
    let sa = OutboundSa { spi: 999, ..outbound_sa(SPI) };
    rig.command(EngineCommand::InstallOutbound {
        engine: EngineKind::Userspace,
        peer: PEER,
        path: PATH,
        sa,
        remote,
    });
    rig.transmit(&mut [udp_read(&pattern(10), true)]);
    assert_eq!(elsewhere.recv(&mut rig.receiver.batch, 1).unwrap(), 1);
    assert_eq!(rig.receiver.batch.buffer()[..4], 999_u32.to_be_bytes());
}

#[test]
fn commands_that_contradict_what_is_known_change_nothing() {
    let mut rig = Rig::new();
    let other = PeerId::from_bytes([8; 32]);
    let sa = InboundSa { key: SaKey::from_bytes([5; 36]), ..inbound_sa(SPI) };
    let fresh = InboundSa { spi: SPI + 1, ..sa.clone() };
    for command in [
        EngineCommand::InstallInbound {
            engine: EngineKind::Userspace,
            remote: std::net::Ipv4Addr::LOCALHOST.into(),
            peer: PEER,
            path: PATH,
            sa,
        },
        EngineCommand::InstallInbound {
            engine: EngineKind::Userspace,
            remote: std::net::Ipv4Addr::LOCALHOST.into(),
            peer: other,
            path: PATH,
            sa: fresh,
        },
        EngineCommand::BindPath { peer: PEER, path: Some(PathId(99)) },
        EngineCommand::SetPathMtu { path: PathId(99), mtu: 1 },
        EngineCommand::SetBroadcast { vni: Vni(8), peers: Vec::new() },
    ] {
        let shown = format!("{command:?}");
        let result = rig.state.apply(command, |address| rig.socket.real.remote(address));
        assert!(result.is_err(), "{shown}");
    }
    rig.transmit(&mut [udp_read(&pattern(10), true)]);
    rig.receive();
    assert_eq!(rig.tap.frames.borrow().len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// For any input of a container and any MTU, nothing panics, and a TCP stream arrives whole.
    #[test]
    fn any_super_packet(
        len in 1_usize..60_000,
        segment in prop_oneof![Just(0), 48_u16..3_000],
        mtu in 200_u16..3_000,
        twist in proptest::option::of((0_usize..64, any::<u8>())),
    ) {
        let mut rig = Rig::new();
        rig.command(EngineCommand::SetPathMtu { path: PATH, mtu });
        let payload = pattern(len);
        let mut read = tcp_read(&payload, segment, tcp::ACK);
        if let Some((at, value)) = twist {
            read[at] = value;
            rig.transmit(&mut [read]);
            rig.receive();
            return Ok(());
        }
        rig.transmit(&mut [read]);
        rig.receive();
        let fits = if segment == 0 { len + 40 <= usize::from(mtu) } else { usize::from(segment) <= len };
        let got: Vec<u8> =
            rig.tap.frames.borrow().iter().flat_map(|frame| frame[vnet::LEN + 54..].to_vec()).collect();
        if fits {
            prop_assert!(got == payload, "{} of {} bytes", got.len(), payload.len());
        } else {
            prop_assert_eq!(rig.counters().done(Work::DatagramsSent), 0);
        }
    }

    #[test]
    fn any_datagram(datagram in prop::collection::vec(any::<u8>(), 0..200), spi in any::<bool>()) {
        let mut rig = Rig::new();
        let mut datagram = datagram;
        if spi && datagram.len() >= 4 {
            datagram[..4].copy_from_slice(&SPI.to_be_bytes());
        }
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), rig.far_socket.port());
        let to = rig.socket.real.remote(address).unwrap();
        rig.socket.real.send_run(&datagram, datagram.len().max(1), &to).unwrap();
        rig.receive();
        prop_assert_eq!(rig.tap.frames.borrow().len(), 0);
        prop_assert_eq!(rig.drops().iter().map(|(_, count)| count).sum::<u64>(), u64::from(datagram != [0xff]));
    }
}

#[test]
fn the_longest_packet_of_all_is_sent_or_counted() {
    let mut rig = Rig::new();
    rig.command(EngineCommand::SetPathMtu { path: PATH, mtu: u16::MAX });
    rig.transmit(&mut [
        udp_read(&pattern(RUN_BYTES_MAX - 28), true),
        udp_read(&pattern(65_400), true),
    ]);
    assert_eq!(rig.drops(), [(DropReason::TooLong, 1)]);
    rig.receive();
    assert_eq!(rig.tap.frames.borrow().len(), 1);
}
