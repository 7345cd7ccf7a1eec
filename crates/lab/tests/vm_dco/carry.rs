//! Packets between the kernel's device and one in userspace.

use std::time::{Duration, Instant};

use weft_lab::net::{is_soak, slowness};
use weft_openvpn::device::{Mode, PeerState, Traffic};

use crate::lab::{CIPHERS, Cipher, Kind, Outer, Two};

/// Bytes of each stream: many super-packets, little for an emulated machine.
const STREAM_BYTES: usize = 256 << 10;
/// Bytes of the length in front of each packet on a connection.
const PREFIX_BYTES: u64 = 2;
/// How long the last packets may be under way.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);
const MODES: [Mode; 2] = [Mode::P2p, Mode::Mp];
const OUTERS: [Outer; 4] = [Outer::Udp4, Outer::Udp6, Outer::Tcp4, Outer::Tcp6];

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
    let sent = |way: Traffic| (way.tx_packets, way.tx_bytes);
    let received = |way: Traffic| (way.rx_packets, way.rx_bytes);
    // Over TCP the kernel's counters of a peer include drops of its full queue. Those of its link count packets
    // that have gone out, with the lengths.
    let sent_by_kernel = |here: &PeerState| {
        if !outer.is_tcp() {
            return sent(here.link);
        }
        let (packets, bytes) = kernel.sent_by_link();
        (packets, bytes - PREFIX_BYTES * packets)
    };
    // One side receives all that the other sends, except packets under way and the kernel's inner counts. The
    // kernel counts inner packets by super-packets, and includes those that it had no key for.
    let same = |(here, there): &(PeerState, PeerState)| {
        received(here.link) == sent(there.link)
            && received(here.vpn) == sent(there.vpn)
            && received(there.link) == sent_by_kernel(here)
    };
    let deadline = Instant::now() + SETTLE_LIMIT * slowness();
    while !same(&states()) {
        let link = kernel.sent_by_link();
        assert!(Instant::now() < deadline, "{:?}, the kernel's link {link:?}", states());
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
