//! One end of a private two-host rig: an engine with fixed SAs between two network namespaces, for
//! measuring the engine without the daemon.
//!
//! `rig NAME PEER-ADDRESS SIDE MAC...` makes the TAP device in the calling namespace. `SIDE` is `a` or `b`; the
//! addresses are those of the peer's containers. It runs until its standard input ends, then prints its counters.
//! The keys are constants: never use it for traffic that matters.
#![allow(clippy::print_stdout, reason = "it is a program")]

use std::io::Read;
use std::net::{IpAddr, SocketAddr};

use weft_crypto::{Cipher, PeerId, SaKey};
use weft_engine::{Engine, EngineConfig};
use weft_path::{Endpoint, EngineCommand, EngineKind, InboundSa, Mac, OutboundSa, PathId, Vni};

#[path = "../src/sample_sas.rs"]
mod sample_sas;

use sample_sas::{inbound_sa, outbound_sa};

type Error = Box<dyn std::error::Error>;

const VNI: Vni = Vni(7);
const MTU: u16 = 1388;
const PATH: PathId = PathId(1);

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, peer_address, side, macs @ ..] = &arguments[..] else {
        return Err("rig NAME PEER-ADDRESS SIDE MAC...".into());
    };
    let address: IpAddr = peer_address.parse()?;
    let mut config = EngineConfig::new(name.clone(), VNI, MTU);
    config.pin = std::env::var_os("RIG_PIN").is_some();
    let engine = Engine::start(&config, |event| println!("{event:?}"))?;
    println!("{}", engine.offloads());
    let peer = PeerId::from_bytes([9; 32]);
    let (inbound, outbound) = if side == "a" { (300, 400) } else { (400, 300) };
    let cipher = match std::env::var("RIG_CIPHER") {
        Ok(name) if name == "chacha" => Cipher::ChaCha20Poly1305,
        _ => Cipher::Aes256Gcm,
    };
    let remote = SocketAddr::new(address, weft_engine::PORT);
    let endpoints: Result<Vec<Mac>, _> = macs.iter().map(|mac| mac.parse()).collect();
    let add = endpoints?.into_iter().map(|mac| (Endpoint { mac, addresses: Vec::new() }, peer));
    for command in [
        EngineCommand::InstallInbound {
            engine: EngineKind::Userspace,
            remote: std::net::Ipv4Addr::LOCALHOST.into(),
            peer,
            path: PATH,
            sa: inbound_of(inbound, cipher),
        },
        EngineCommand::InstallOutbound {
            engine: EngineKind::Userspace,
            peer,
            path: PATH,
            sa: outbound_of(outbound, cipher),
            remote,
        },
        EngineCommand::SetPathMtu { path: PATH, mtu: MTU },
        EngineCommand::BindPath { peer, path: Some(PATH) },
        EngineCommand::SetEndpoints { vni: VNI, add: add.collect(), remove: Vec::new() },
        EngineCommand::SetBroadcast { vni: VNI, peers: vec![peer] },
    ] {
        engine.command(command)?;
    }
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let counters = engine.counters();
    for (reason, count) in counters.drops.iter().filter(|(_, count)| *count > 0) {
        println!("dropped {} {count}", reason.name());
    }
    for (work, count) in &counters.work {
        println!("{} {count}", work.name());
    }
    println!("{:?}", counters.peers);
    Ok(())
}

fn key(spi: u32) -> SaKey {
    SaKey::from_bytes([spi.to_le_bytes()[0]; 36])
}

fn inbound_of(spi: u32, cipher: Cipher) -> InboundSa {
    InboundSa { cipher, key: key(spi), ..inbound_sa(spi) }
}

fn outbound_of(spi: u32, cipher: Cipher) -> OutboundSa {
    OutboundSa { cipher, key: key(spi), iv_salt: 0x0123_4567_89ab_cdef, ..outbound_sa(spi) }
}
