//! The memory that a peer takes. By itself in its process, whose resident memory it reads. Needs root and
//! /dev/net/tun.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use weft_crypto::{Choice, Cipher, Library, PeerId, SaKey, SizeClass, prefer};
use weft_engine::{Engine, EngineConfig, PEERS_MAX};
use weft_io::namespace::unshare_network;
use weft_path::{Endpoint, EngineCommand, EngineKind, InboundSa, Mac, OutboundSa, PathId, Vni};

#[path = "../src/sample_sas.rs"]
mod sample_sas;

use sample_sas::{inbound_sa, outbound_sa};

/// The limit for a further peer, in bytes of resident memory.
const PEER_BYTES_MAX: usize = 8 << 10;
/// Lanes of each peer: of hosts with up to five processors, by default.
const LANES: u16 = 2;
/// Containers of each peer.
const ENDPOINTS: u32 = 4;
const VNI: Vni = Vni(7);

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

/// All that a peer has.
fn add_peer(engine: &Engine, number: u32) {
    let mut id = [0; 32];
    id[..4].copy_from_slice(&number.to_be_bytes());
    let (peer, path) = (PeerId::from_bytes(id), PathId(number));
    let address = Ipv4Addr::from(0x0a00_0000 + number);
    let (engine_kind, key) = (EngineKind::Userspace, SaKey::from_bytes([number as u8; 36]));
    for lane in 0..LANES {
        let (cipher, spi) = (Cipher::Aes256Gcm, (number + 1) << 8 | u32::from(lane));
        let sa = InboundSa { lane, cipher, key: key.clone(), ..inbound_sa(spi) };
        let remote = IpAddr::V4(address);
        let install = EngineCommand::InstallInbound { engine: engine_kind, peer, path, sa, remote };
        engine.command(install).unwrap();
        let sa = OutboundSa { lane, cipher, key: key.clone(), ..outbound_sa(spi) };
        let remote = SocketAddr::new(address.into(), 6784);
        let install =
            EngineCommand::InstallOutbound { engine: engine_kind, peer, path, sa, remote };
        engine.command(install).unwrap();
    }
    engine.command(EngineCommand::BindPath { peer, path: Some(path) }).unwrap();
    let endpoint = |index: u32| {
        let [a, b, c, d] = (number * ENDPOINTS + index).to_be_bytes();
        (Endpoint { mac: Mac([2, 0, a, b, c, d]), addresses: Vec::new() }, peer)
    };
    let add = (0..ENDPOINTS).map(endpoint).collect();
    engine.command(EngineCommand::SetEndpoints { vni: VNI, add, remove: Vec::new() }).unwrap();
}

#[test]
fn a_further_peer_takes_less_than_eight_kib() {
    // The more expensive outcome of the race: SAs hold the key in the form of both libraries.
    let both = Choice::default().with(SizeClass::Medium, Library::Ring);
    prefer(Cipher::Aes256Gcm, both, both);
    unshare_network().expect("this test makes a network namespace and must run as root");
    let engine = Engine::start(&EngineConfig::new("weft0", VNI, 1388), |_| {}).unwrap();
    add_peer(&engine, 0);
    let before = resident();
    let peers = PEERS_MAX as u32 - 1;
    for number in 1..=peers {
        add_peer(&engine, number);
    }
    assert_eq!(engine.counters().sas.len(), PEERS_MAX * 2 * usize::from(LANES));
    let each = resident().saturating_sub(before) / peers as usize;
    println!("measured: {each} bytes of memory a peer with {LANES} lanes");
    assert!(each > 1_000, "{each} bytes: what is measured?");
    assert!(each < PEER_BYTES_MAX, "{each} bytes a peer with {LANES} lanes");
}
