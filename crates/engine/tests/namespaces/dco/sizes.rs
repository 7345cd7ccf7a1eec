//! How large packets may be, and super-packets.

use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};
use rustix::net::{AddressFamily, SocketType, ipproto, socket};
use weft_engine::Work;
use weft_io::{offload, udp, uninterrupted};
use weft_openvpn::device::Mode;

use super::fuzzed::Forger;
use super::host::{
    AES_256, Host, arrives, connect_udp, datagrams, does_not_arrive, joined, strangers,
};
use crate::common::{PATIENCE, flows_between, ip, pattern};

#[test]
fn a_change_of_the_devices_mtu_is_followed() {
    let (a, b) = strangers((Mode::P2p, Mode::P2p));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    let pair = datagrams(&a, &b);
    arrives(&pair, &[1; 1_300]);
    a.run(|| ip("link set ovpn0 mtu 1450"));
    let (from, to) = &pair;
    to.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let deadline = Instant::now() + PATIENCE;
    // The first that is longer than before may be what it is seen by.
    while from.send(&[2; 1_420]).is_err() || to.recv(&mut [0; 2_000]).ok() != Some(1_420) {
        assert!(Instant::now() < deadline, "{:?}", a.drops());
    }
}

/// The MSS that a stream's end was told.
fn segment_bytes(host: &Host) -> u32 {
    let told = host.run(|| Command::new("ss").args(["-tinH"]).output().unwrap().stdout);
    let told = String::from_utf8(told).unwrap();
    let of = told.split_whitespace().find_map(|word| word.strip_prefix("mss:"));
    of.unwrap_or_else(|| panic!("no mss in {told}")).parse().unwrap()
}

#[test]
fn a_stream_that_would_send_too_long_segments_is_told_the_devices_size() {
    let (left, right) = joined();
    let a = Host::with_device(left, 1, Mode::P2p, ("ovpn0", 1_416));
    let b = Host::with_device(right, 2, Mode::P2p, ("ovpn0", 1_500));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    // As a container would say behind whose link the device is.
    a.run(|| ip("route replace 10.8.0.0/24 dev ovpn0 src 10.8.0.1 advmss 1460"));
    let listener = b.run(|| TcpListener::bind((b.inner_v4(), 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let _client = a.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
    let _server = listener.accept().unwrap();
    drop(listener);
    let bytes = segment_bytes(&b);
    // Without the options that every segment has.
    assert!((1_300..=1_416 - 40).contains(&bytes), "{bytes} bytes a segment");
}

/// How much one segment may carry, as a packet says that opens a stream over IPv4 and whose checksum is
/// right.
fn told_segment_bytes(packet: &[u8]) -> Option<u16> {
    let sliced = SlicedPacket::from_ip(packet).unwrap();
    let (Some(NetSlice::Ipv4(ipv4)), Some(TransportSlice::Tcp(tcp))) =
        (sliced.net, sliced.transport)
    else {
        panic!("no TCP over IPv4: {packet:02x?}")
    };
    let (source, destination) = (ipv4.header().source(), ipv4.header().destination());
    assert_eq!(tcp.checksum(), tcp.calc_checksum_ipv4(source, destination).unwrap());
    tcp.options_iterator().find_map(|option| match option.unwrap() {
        TcpOptionElement::MaximumSegmentSize(bytes) => Some(bytes),
        _ => None,
    })
}

/// The peer is not a device of ours, which would have lowered it before.
#[test]
fn a_peers_segment_size_is_lowered_on_receipt() {
    let (a, b) = strangers((Mode::Mp, Mode::P2p));
    let mut peer = Forger::new(&a, &b, 1);
    let open = || socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::TCP)).unwrap();
    // It has what comes for the host, from the IP header on.
    let reader = UdpSocket::from(a.run(open));
    reader.set_read_timeout(Some(PATIENCE)).unwrap();
    let (IpAddr::V4(from), IpAddr::V4(to)) = (b.inner_v4(), a.inner_v4()) else {
        panic!("no IPv4")
    };
    // The device's MTU without the two headers, or less if that was said.
    for (said, wanted) in [(8_960_u16, 1_376), (1_377, 1_376), (1_376, 1_376), (536, 536)] {
        let opening = PacketBuilder::ipv4(from.octets(), to.octets(), 64)
            .tcp(5_000, 5_001, said.into(), 65_000)
            .syn()
            .options(&[TcpOptionElement::MaximumSegmentSize(said)])
            .unwrap();
        let mut packet = Vec::new();
        opening.write(&mut packet, &[]).unwrap();
        let sealed = peer.seal(&packet);
        peer.socket.send_to(&sealed, peer.to).unwrap();
        let mut got = [0; 2_000];
        let len = uninterrupted(|| reader.recv(&mut got)).unwrap();
        assert_eq!(told_segment_bytes(&got[..len]), Some(wanted), "of {said}: {:?}", a.drops());
    }
}

/// Packets that the system gave to a device, and those that it took from it.
fn packets(host: &Host, device: &str) -> (u64, u64) {
    let table = host.run(|| std::fs::read_to_string("/proc/thread-self/net/dev").unwrap());
    let line = table.lines().find_map(|line| line.trim().strip_prefix(device)).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    (numbers[9], numbers[1])
}

#[test]
fn runs_of_datagrams_cross_the_devices_whole_and_arrive_one_by_one() {
    const SEGMENT: usize = 1_200;
    const COUNT: usize = 40;
    let (a, b) = strangers((Mode::P2p, Mode::P2p));
    let _sockets = connect_udp(&a, &b, false, AES_256);
    let there = b.run(|| UdpSocket::bind((b.inner_v4(), 0)).unwrap());
    there.set_read_timeout(Some(PATIENCE)).unwrap();
    let here = a.run(|| udp::UdpSocket::bind(Some(a.inner_v4()), 0).unwrap());
    let remote = here.remote(there.local_addr().unwrap()).unwrap();
    let (before_a, before_b) = (packets(&a, "ovpn0:"), packets(&b, "ovpn0:"));
    let before_wire = packets(&a, "eth0:");
    // The last datagram is shorter.
    let run = pattern(8, SEGMENT * COUNT - 500);
    here.send_run(&run, SEGMENT, &remote).unwrap();
    for sent in run.chunks(SEGMENT) {
        let mut got = [0; 2_000];
        let len = uninterrupted(|| there.recv(&mut got)).unwrap();
        assert!(got[..len] == *sent, "a datagram of {len} bytes arrived changed");
    }
    let peers = (a.device.peer(2).unwrap().vpn, b.device.peer(1).unwrap().vpn);
    assert_eq!((peers.0.tx_packets, peers.1.rx_packets), (COUNT as u64, COUNT as u64));
    let given = packets(&a, "ovpn0:").0 - before_a.0;
    let taken = packets(&b, "ovpn0:").1 - before_b.1;
    let on_the_wire = packets(&a, "eth0:").0 - before_wire.0;
    assert!(on_the_wire <= 4, "{on_the_wire} runs on the wire for {COUNT} datagrams");
    if offload::self_test().unwrap().tap_uso.usable() {
        assert_eq!(given, 1, "the device gets them as one");
        // The wire may bring them in two runs.
        assert!(taken <= 4, "{taken} packets and super-packets for {COUNT} datagrams");
    }
}

/// Lets no IPv6 packet to a host that is longer than its network need carry, and no word of it back.
fn narrow_in_silence(from: &Host, to: &Host) {
    let run = |words: &str| {
        let output = Command::new("sh").args(["-ec", words]).output().unwrap();
        assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
    };
    // A run is a packet of 64 KiB up to the filter otherwise.
    for host in [from, to] {
        host.run(|| run("ethtool -K eth0 tso off gso off gro off tx-udp-segmentation off"));
    }
    to.run(|| {
        run("nft 'table ip6 narrow { chain in { type filter hook prerouting priority -450; \
             iifname eth0 meta length > 1280 drop; }; }'");
    });
}

#[test]
fn streams_go_over_a_way_of_ipv6_that_carries_little_and_says_nothing() {
    let (a, b) = strangers((Mode::P2p, Mode::P2p));
    let _sockets = connect_udp(&a, &b, true, AES_256);
    for (from, to) in [(&a, &b), (&b, &a)] {
        narrow_in_silence(from, to);
    }
    let pair = datagrams(&a, &b);
    arrives(&pair, &[1; 1_100]);
    assert_eq!(a.device.done(Work::LongOverIpv6), 0);
    does_not_arrive(&pair, &[2; 1_388]);
    assert_eq!(a.device.done(Work::LongOverIpv6), 1);
    // A stream is told what fits, at both ends.
    let told = |address: IpAddr| {
        let listener = b.run(|| TcpListener::bind((address, 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let client = a.run(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
        let server = listener.accept().unwrap();
        drop(listener);
        let bytes = [&a, &b].map(segment_bytes);
        drop((client, server));
        bytes
    };
    for bytes in told(b.inner_v4()) {
        assert!((1_100..=1_206 - 40).contains(&bytes), "{bytes} bytes a segment");
    }
    let bytes = pattern(11, 1 << 20);
    for address in [b.inner_v4(), b.inner_v6()] {
        flows_between(&a.namespace, &b.namespace, address, 1, &bytes);
    }
    assert_eq!((a.device.done(Work::LongOverIpv6), b.device.done(Work::LongOverIpv6)), (1, 0));
    assert_eq!((a.drops(), b.drops()), (vec![], vec![]));
}
