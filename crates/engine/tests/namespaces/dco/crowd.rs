//! Many peers.
// Seeds go to the log.
#![allow(clippy::print_stdout)]

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use weft_openvpn::device::{DeviceError, KeyAttributes, Mode, PeerAttributes, Slot};

use super::host::{AES_256, CIPHERS, Random, arrives, connect_udp, datagrams, strangers};
use crate::common::{flows_between, pattern};

/// Ten minutes where there is time (`WEFT_SOAK`), else thirty seconds.
#[test]
fn thousands_of_peers_come_and_go_under_traffic_and_nothing_else_does() {
    const FIRST: u32 = 1_000;
    const PEERS: u32 = 4_096;
    /// One in three of them has a peer.
    const IDS: u32 = 3 * PEERS;
    let seconds = if std::env::var_os("WEFT_SOAK").is_some() { 600 } else { 30 };
    let seed = std::env::var("WEFT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
    println!("WEFT_SEED={seed}");
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let (here, _there) = connect_udp(&a, &b, false, AES_256);
    let before = [a.drops(), b.drops()];
    let end = Instant::now() + Duration::from_secs(seconds);
    let bytes = pattern(5, 8 << 20);
    let peer = |id: u32| PeerAttributes {
        id: Some(id),
        remote_ipv4: Some(Ipv4Addr::from_bits(0xc612_0000 + id)),
        remote_port: Some(1194),
        vpn_ipv4: Some(Ipv4Addr::from_bits(0x0a09_0000 + id)),
        ..PeerAttributes::default()
    };
    let key = |id: u32| KeyAttributes {
        peer_id: Some(id),
        ..a.key(&b, Slot::ALL[id as usize % 2], 0, CIPHERS[id as usize % 4])
    };
    let new_peer = |id: u32| {
        a.device.new_peer(here.try_clone().unwrap().into(), &peer(id)).unwrap();
    };
    let mut there: BTreeSet<u32> = (FIRST..FIRST + PEERS).collect();
    there.iter().copied().for_each(new_peer);
    let mut changes = 0_u32;
    thread::scope(|scope| {
        scope.spawn(|| {
            while Instant::now() < end {
                flows_between(&a.namespace, &b.namespace, b.inner_v4(), 2, &bytes);
            }
        });
        // Keys for peers that may be deleted at this very moment.
        scope.spawn(|| {
            let mut random = Random(seed ^ 0xffff);
            while Instant::now() < end {
                let id = FIRST + random.below(IDS);
                let given = a.device.new_key(&key(id));
                assert!(matches!(given, Ok(()) | Err(DeviceError::NoPeer(_))), "{given:?}");
            }
        });
        let mut random = Random(seed);
        while Instant::now() < end {
            let id = FIRST + random.below(IDS);
            if there.remove(&id) {
                a.device.delete_peer(id).unwrap();
                assert_eq!(a.device.delete_peer(id), Err(DeviceError::NoPeer(id)));
                changes += 1;
            } else if there.len() < PEERS as usize {
                new_peer(id);
                there.insert(id);
            }
        }
    });
    let left: BTreeSet<u32> = a.peers().iter().map(|peer| peer.id).collect();
    there.insert(b.number.into());
    assert_eq!(left, there, "seed {seed}");
    let (peers, most) = (left.len() as u32, PEERS + 1);
    assert!((most - most / 10..=most).contains(&peers), "{peers} peers, seed {seed}");
    assert!(changes > PEERS, "{changes} deletions, seed {seed}");
    // Neither a stream nor a datagram met anything but its peer.
    arrives(&datagrams(&a, &b), b"at the end");
    assert_eq!([a.drops(), b.drops()], before, "seed {seed}");
}
