//! The capacity of an engine: each table reports that it is full, keeps its entries, and takes one more once
//! one is gone.

use std::net::IpAddr;
use std::process::Command;
use std::thread;
use std::time::Instant;

use weft_io::cpu;
use weft_io::namespace::unshare_network;

use super::*;
use crate::error::CommandError;
use crate::tables::networks::NetworkNumber;
use crate::tables::state::{ENDPOINTS_MAX, LANES_MAX, PEERS_MAX};
use crate::{
    COMMANDS_QUEUED_MAX, DEFAULT_WORKERS_MAX, Engine, EngineConfig, EngineError, default_workers,
};

/// How long anything may take before a test fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// Endpoints of one command.
const CHUNK: usize = 1 << 16;

/// Why a command is not carried out.
fn refusal(rig: &mut Rig, command: EngineCommand) -> Option<CommandError> {
    rig.state.apply(command, |address| rig.socket.real.remote(address)).err()
}

const fn full(table: &'static str) -> Option<CommandError> {
    Some(CommandError::TableFull { table })
}

/// A frame gets through to whom the rig knew before.
fn carries(rig: &mut Rig) {
    let read = udp_read(&pattern(100), true);
    rig.transmit(&mut [read.clone()]);
    rig.receive();
    assert_eq!(rig.tap.frames.take(), [read]);
    assert_eq!(rig.drops(), []);
}

fn peer(number: u32) -> PeerId {
    let mut bytes = [0xee; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    PeerId::from_bytes(bytes)
}

const fn mac(number: u32) -> Mac {
    let [a, b, c, d] = number.to_be_bytes();
    Mac([6, 0, a, b, c, d])
}

/// Adds endpoints that live at a peer.
fn endpoints(macs: impl Iterator<Item = Mac>, at: PeerId) -> EngineCommand {
    let add = macs.map(|mac| (Endpoint { mac, addresses: Vec::new() }, at)).collect();
    EngineCommand::SetEndpoints { vni: VNI, add, remove: Vec::new() }
}

#[test]
fn peers_are_taken_up_to_their_number() {
    let mut rig = Rig::new();
    // The rig has one.
    let peers: Vec<PeerId> = (1..PEERS_MAX as u32).map(peer).collect();
    rig.command(EngineCommand::SetBroadcast { vni: VNI, peers: peers.clone() });
    let [one, another] = [u32::MAX, u32::MAX - 1].map(peer);
    let unbind = |peer| EngineCommand::BindPath { peer, path: None };
    assert_eq!(refusal(&mut rig, unbind(one)), full("peers"));
    assert_eq!(refusal(&mut rig, endpoints([mac(1)].into_iter(), one)), full("peers"));
    let broadcast = EngineCommand::SetBroadcast { vni: VNI, peers: vec![peers[0], one] };
    assert_eq!(refusal(&mut rig, broadcast), full("peers"));
    // The existing ones need no more room.
    assert_eq!(refusal(&mut rig, unbind(peers[0])), None);
    carries(&mut rig);
    rig.command(EngineCommand::RemovePeer { peer: peers[0] });
    assert_eq!(refusal(&mut rig, unbind(one)), None);
    assert_eq!(refusal(&mut rig, unbind(another)), full("peers"));
    carries(&mut rig);
}

#[test]
fn endpoints_are_taken_up_to_their_number() {
    let mut rig = Rig::new();
    // The rig has two.
    let left = (ENDPOINTS_MAX - 2) as u32;
    for first in (0..left).step_by(CHUNK) {
        let last = left.min(first + CHUNK as u32);
        rig.command(endpoints((first..last).map(mac), PEER));
    }
    let [one, another] = [u32::MAX, u32::MAX - 1].map(mac);
    assert_eq!(refusal(&mut rig, endpoints([one].into_iter(), PEER)), full("endpoints"));
    // One that is there may move.
    assert_eq!(refusal(&mut rig, endpoints([mac(0)].into_iter(), peer(1))), None);
    let number_of = |rig: &Rig, mac: Mac| rig.state.peer_of(NetworkNumber::FIRST.key(mac.0));
    assert_ne!(number_of(&rig, mac(0)), number_of(&rig, mac(1)));
    carries(&mut rig);
    let remove = vec![mac(0)];
    rig.command(EngineCommand::SetEndpoints { vni: VNI, add: Vec::new(), remove });
    assert_eq!(refusal(&mut rig, endpoints([one].into_iter(), PEER)), None);
    assert_eq!(number_of(&rig, one), number_of(&rig, FAR));
    assert_eq!(refusal(&mut rig, endpoints([another].into_iter(), PEER)), full("endpoints"));
    carries(&mut rig);
}

#[test]
fn a_path_takes_lanes_up_to_their_number() {
    let mut rig = Rig::new();
    let remote = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), rig.far_socket.port());
    let install = |lane: u16| EngineCommand::InstallOutbound {
        engine: EngineKind::Userspace,
        peer: PEER,
        path: PATH,
        sa: OutboundSa { spi: SPI + 1, lane, ..outbound_sa(SPI) },
        remote,
    };
    assert_eq!(refusal(&mut rig, install(LANES_MAX)), full("lanes of a path"));
    assert_eq!(refusal(&mut rig, install(LANES_MAX - 1)), None);
    carries(&mut rig);
}

/// The lock holds the worker up before it sends.
fn too_many_are_refused(engine: &Engine) {
    let keepalive = || engine.command(EngineCommand::SendKeepalive { path: PATH });
    let held = engine.shared.write().unwrap();
    (0..COMMANDS_QUEUED_MAX).for_each(|_| keepalive().unwrap());
    for _ in 0..3 {
        let refusal = keepalive().unwrap_err();
        assert!(matches!(refusal, EngineError::Busy), "{refusal}");
    }
    drop(held);
    let begun = Instant::now();
    while let Err(refusal) = keepalive() {
        assert!(matches!(refusal, EngineError::Busy), "{refusal}");
        assert!(begun.elapsed() < PATIENCE, "no room for one more");
        thread::yield_now();
    }
    let sent = || engine.counters().done(Work::DatagramsSent);
    while sent() <= COMMANDS_QUEUED_MAX as u64 {
        assert!(begun.elapsed() < PATIENCE, "{} were sent", sent());
        thread::yield_now();
    }
    assert_eq!(sent(), COMMANDS_QUEUED_MAX as u64 + 1);
}

#[test]
fn the_send_queue_has_a_limit_and_every_accepted_packet_is_sent() {
    let thread = thread::spawn(|| {
        unshare_network().expect("this test needs root");
        let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
        assert!(up.success());
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        let far = UdpSocket::bind(Some(loopback), 0).unwrap();
        let config = EngineConfig {
            bind: Some(loopback),
            port: 0,
            helpers: Some(0),
            offloads: false,
            ..EngineConfig::new("weft0", VNI, MTU)
        };
        let engine = Engine::start(&config, |_| {}).unwrap();
        let remote = SocketAddr::new(loopback, far.port());
        let install = EngineCommand::InstallOutbound {
            engine: EngineKind::Userspace,
            peer: PEER,
            path: PATH,
            sa: outbound_sa(SPI),
            remote,
        };
        engine.command(install).unwrap();
        too_many_are_refused(&engine);
    });
    thread.join().unwrap();
}

#[test]
fn by_default_half_of_the_processors_work_and_two_if_there_are_two() {
    let processors = thread::available_parallelism().unwrap().get();
    let half = (processors / 2).clamp(1, DEFAULT_WORKERS_MAX);
    let expected = if processors > 3 { half } else { processors.min(2) };
    assert_eq!(default_workers(), expected);
    // A thread that may use one processor gets one worker.
    let thread = thread::spawn(|| {
        cpu::pin_to(cpu::allowed().unwrap()[0]).unwrap();
        assert_eq!(default_workers(), 1);
    });
    thread.join().unwrap();
}
