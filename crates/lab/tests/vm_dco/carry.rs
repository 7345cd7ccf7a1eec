//! Packets between the kernel's device and one in userspace.

use std::time::{Duration, Instant};

use weft_lab::net::{is_soak, slowness};
use weft_openvpn::device::{Mode, PeerState, Traffic};

use crate::lab::{CIPHERS, Cipher, Kind, Outer, Two};

/// Bytes of each stream: many super-packets, little for an emulated machine.
const STREAM_BYTES: usize = 256 << 10;
/// How long the last packets may be under way.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);
const MODES: [Mode; 2] = [Mode::P2p, Mode::Mp];
const OUTERS: [Outer; 3] = [Outer::Udp4, Outer::Udp6, Outer::Tcp];

fn carries(kernels: Mode, userspaces: Mode, outer: Outer, cipher: Cipher) {
    println!("kernel {kernels}, userspace {userspaces}, {outer:?}, {cipher:?}");
    let mut two = Two::new([Kind::Kernel, Kind::Userspace], [kernels, userspaces]);
    two.connect(outer, cipher);
    let (kernel, userspace) = (&two.a, &two.b);
    kernel.pings(userspace);
    userspace.pings(kernel);
    let bytes: Vec<u8> = (0..STREAM_BYTES).map(|at| (at * 31 % 251) as u8).collect();
    kernel.streams(userspace, &bytes);
    userspace.streams(kernel, &bytes);
    let states = || (kernel.peer(userspace).unwrap(), userspace.peer(kernel).unwrap());
    // What one sends the other receives, but for what is under way: outside, since the kernel counts
    // inside what it had no key for, too. Over TCP the kernel also counts what its full queue drops.
    let received = |sent: Traffic, got: Traffic| {
        (sent.tx_packets, sent.tx_bytes) == (got.rx_packets, got.rx_bytes)
    };
    let same = |(here, there): &(PeerState, PeerState)| {
        received(there.link, here.link) && (outer == Outer::Tcp || received(here.link, there.link))
    };
    let deadline = Instant::now() + SETTLE_LIMIT * slowness();
    while !same(&states()) {
        assert!(Instant::now() < deadline, "{:?}", states());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(userspace.drops(), []);
    let (here, there) = states();
    println!("{here:?}\n{there:?}");
    for state in [&here, &there] {
        assert!(state.vpn.rx_bytes > STREAM_BYTES as u64, "{state:?}");
        assert!(state.vpn.tx_bytes > STREAM_BYTES as u64, "{state:?}");
    }
}

/// Every cipher over every transport, with each pair of modes in turn; every combination in a soak.
#[test]
fn either_devices_packets_are_the_others() {
    for (nth, cipher) in CIPHERS.into_iter().enumerate() {
        for (turn, outer) in OUTERS.into_iter().enumerate() {
            for (kernels, userspaces) in MODES.into_iter().flat_map(|k| MODES.map(|u| (k, u))) {
                let chosen = (nth + turn) % 4 == 2 * (kernels as usize) + userspaces as usize;
                if chosen || is_soak() {
                    carries(kernels, userspaces, outer, cipher);
                }
            }
        }
    }
}
