#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use weft_packet::ethernet::{Mac, TYPE_ARP, TYPE_IPV4, TYPE_IPV6, TYPE_SERVICE_VLAN, TYPE_VLAN};
use weft_packet::ipv4::{MORE_FRAGMENTS, PROTOCOL_ICMP, PROTOCOL_TCP, PROTOCOL_UDP};
use weft_packet::ipv6::{NEXT_FRAGMENT, NEXT_HOP_BY_HOP, NEXT_ICMPV6, NEXT_TCP, NEXT_UDP};

use super::programs::{BRIDGE_EVERY, SECOND_SHIFT};
use super::*;
use crate::namespace::run_in;
use crate::steer::{TICK_NS, tick};
use crate::tap::{FRAME_LEN_MAX, Tap, TapOptions, VNET_LEN};
use crate::testing::{FrameSender, fresh_namespace, index_of, ip};

const REMOTE: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];
const CONTAINER: [u8; 6] = [0x82, 0, 0, 0, 0x90, 0xa3];
const UNLIKE: [[u8; 6]; 2] = [[0x82, 0, 0, 1, 0x90, 0xa3], [0x82, 0, 0, 0, 0x90, 0xa4]];

/// The container's addresses, and those of others.
const OWN: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const FOREIGN: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 9, 0, 2), Ipv4Addr::new(11, 9, 0, 1)];
const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 4, 5, 6, 7);
const FOREIGN6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 1, 2, 3, 4, 5, 6, 8), Ipv6Addr::new(0xfd00, 1, 2, 4, 4, 5, 6, 7)];
/// Of another container, whose addresses are in the set too.
const NEIGHBOUR: Ipv4Addr = FOREIGN[0];
/// An EtherType for experiments.
const TYPE_UNKNOWN: u16 = 0x88b5;
const PORT: u16 = 5_000;
const DHCP: u16 = 67;
const DHCPV6: u16 = 547;
/// How long a frame may take to its device.
const ARRIVAL_LIMIT: Duration = Duration::from_secs(5);

/// Packets that a device has received and sent.
fn packets(device: &str) -> (u64, u64) {
    let all = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = all.lines().find(|line| line.trim().starts_with(device)).unwrap();
    let words: Vec<_> = line.split(':').nth(1).unwrap().split_whitespace().collect();
    (words[1].parse().unwrap(), words[9].parse().unwrap())
}

/// Waits for something that the kernel does soon; a busy machine holds it up.
fn wait_until(mut is_so: impl FnMut() -> bool) {
    let limit = Instant::now() + ARRIVAL_LIMIT;
    while !is_so() {
        assert!(Instant::now() < limit, "a frame went nowhere");
        std::thread::yield_now();
    }
}

/// The length of the frame that was just sent, in the TAP's buffer; `None`: a device has it, which had so many before.
fn taken(tap: &Tap, buffer: &mut [u8], device: &str, before: u64) -> Option<usize> {
    let mut len = None;
    wait_until(|| {
        len = tap.recv(buffer).ok();
        len.is_some() || packets(device).0 > before
    });
    assert!(tap.recv(buffer).is_err());
    assert_eq!(packets(device).0, before + u64::from(len.is_none()));
    len
}

/// The kernel itself sends nothing, and no rules see the frames of a bridge.
fn quiet() {
    for path in ["all", "default"] {
        let path = format!("/proc/sys/net/ipv6/conf/{path}/disable_ipv6");
        std::fs::write(path, "1").unwrap();
    }
    for what in ["iptables", "ip6tables", "arptables"] {
        // Without br_netfilter there is no such file.
        let _ = std::fs::write(format!("/proc/sys/net/bridge/bridge-nf-call-{what}"), "0");
    }
}

/// A frame to [`REMOTE`].
fn frame(from: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&REMOTE[..], &from, &ethertype.to_be_bytes(), payload].concat()
}

/// An IPv4 packet with a source port, and what programs do not look at.
fn ipv4(from: Ipv4Addr, protocol: u8, port: u16) -> Vec<u8> {
    let begin = [0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0];
    [&begin[..], &from.octets(), &[10, 9, 0, 9], &port.to_be_bytes(), &[7; 18]].concat()
}

fn ipv6(from: Ipv6Addr, next: u8, port: u16) -> Vec<u8> {
    let begin = [0x60, 0, 0, 0, 0, 20, next, 64];
    [&begin[..], &from.octets(), &[0xfd; 16], &port.to_be_bytes(), &[7; 18]].concat()
}

/// A piece of an IPv4 packet: with more to come, or the last one.
fn piece(from: Ipv4Addr, port: u16, fragment: u16) -> Vec<u8> {
    let mut packet = ipv4(from, PROTOCOL_UDP, port);
    packet[6..8].copy_from_slice(&fragment.to_be_bytes());
    packet
}

/// IPv4 packets of a container, and whether the frame of each may pass the switch by.
fn packets_over_ipv4() -> Vec<(&'static str, Vec<u8>, bool)> {
    let mut with_options = ipv4(OWN, PROTOCOL_TCP, PORT);
    with_options[0] = 0x46;
    let mut of_version_6 = ipv4(OWN, PROTOCOL_TCP, PORT);
    of_version_6[0] = 0x65;
    vec![
        ("TCP", ipv4(OWN, PROTOCOL_TCP, PORT), true),
        ("UDP", ipv4(OWN, PROTOCOL_UDP, PORT), true),
        ("ICMP", ipv4(OWN, PROTOCOL_ICMP, PORT), true),
        ("UDP of a DHCP client", ipv4(OWN, PROTOCOL_UDP, 68), true),
        ("UDP of a DHCP server", ipv4(OWN, PROTOCOL_UDP, DHCP), false),
        ("UDP of DHCPv6's port", ipv4(OWN, PROTOCOL_UDP, DHCPV6), true),
        ("TCP of DHCP's port", ipv4(OWN, PROTOCOL_TCP, DHCP), true),
        ("a first piece", piece(OWN, PORT, MORE_FRAGMENTS), true),
        ("a first piece of a DHCP server's", piece(OWN, DHCP, MORE_FRAGMENTS), false),
        ("a last piece", piece(OWN, PORT, 185), true),
        ("another's piece", piece(FOREIGN[1], PORT, 185), false),
        ("options", with_options, false),
        ("another version", of_version_6, false),
        ("a container's beside it", ipv4(NEIGHBOUR, PROTOCOL_TCP, PORT), false),
        ("another's", ipv4(FOREIGN[1], PROTOCOL_TCP, PORT), false),
        ("nobody's", ipv4(Ipv4Addr::UNSPECIFIED, PROTOCOL_TCP, PORT), false),
    ]
}

fn packets_over_ipv6() -> Vec<(&'static str, Vec<u8>, bool)> {
    vec![
        ("TCP", ipv6(OWN6, NEXT_TCP, PORT), true),
        ("UDP", ipv6(OWN6, NEXT_UDP, PORT), true),
        ("TCP of the link", ipv6(Mac(CONTAINER).link_local(), NEXT_TCP, PORT), true),
        ("UDP of a DHCP client", ipv6(OWN6, NEXT_UDP, 546), true),
        ("UDP of a DHCP server", ipv6(OWN6, NEXT_UDP, DHCPV6), false),
        ("UDP of DHCPv4's port", ipv6(OWN6, NEXT_UDP, DHCP), true),
        ("TCP of DHCP's port", ipv6(OWN6, NEXT_TCP, DHCPV6), true),
        ("ICMPv6", ipv6(OWN6, NEXT_ICMPV6, PORT), false),
        ("an extension", ipv6(OWN6, NEXT_HOP_BY_HOP, PORT), false),
        ("a fragment", ipv6(OWN6, NEXT_FRAGMENT, PORT), false),
        ("another's", ipv6(FOREIGN6[0], NEXT_TCP, PORT), false),
        ("another network's", ipv6(FOREIGN6[1], NEXT_TCP, PORT), false),
        ("nobody's", ipv6(Ipv6Addr::UNSPECIFIED, NEXT_TCP, PORT), false),
        ("IPv4's", ipv6(OWN.to_ipv6_mapped(), NEXT_TCP, PORT), false),
    ]
}

/// Checks which frames that leave a container pass the switch by, as `passes` says of each.
fn check_senders(macs: &MacSet, passes: &mut dyn FnMut(&[u8]) -> bool) {
    let own = [IpAddr::from(OWN), OWN6.into(), Mac(CONTAINER).link_local().into()];
    assert!(macs.insert(REMOTE).unwrap());
    // As if another host had announced the container's address.
    assert!(macs.insert(CONTAINER).unwrap());
    assert!(macs.set_sources(CONTAINER, &own).unwrap());
    for mac in UNLIKE {
        assert!(macs.set_sources(mac, &[OWN.into(), OWN6.into(), NEIGHBOUR.into()]).unwrap());
    }
    let packets = [(TYPE_IPV4, packets_over_ipv4()), (TYPE_IPV6, packets_over_ipv6())];
    for (ethertype, packets) in &packets {
        for (what, packet, expected) in packets {
            let it = format!("{ethertype:x}: {what}");
            assert_eq!(passes(&frame(CONTAINER, *ethertype, packet)), *expected, "{it}");
            for mac in UNLIKE {
                assert!(!passes(&frame(mac, *ethertype, packet)), "{it} from {mac:x?}");
            }
            for tag in [TYPE_VLAN, TYPE_SERVICE_VLAN] {
                let tagged = [&[0, 5], &ethertype.to_be_bytes()[..], packet].concat();
                assert!(!passes(&frame(CONTAINER, tag, &tagged)), "{it} with a tag {tag:x}");
            }
            for other in [TYPE_ARP, TYPE_UNKNOWN] {
                assert!(!passes(&frame(CONTAINER, other, packet)), "{it} as {other:x}");
            }
        }
        // So that the port of UDP is there.
        let needed = if *ethertype == TYPE_IPV4 { 14 + 20 + 2 } else { 14 + 40 + 2 };
        for (what, packet, _) in &packets[..2] {
            let whole = frame(CONTAINER, *ethertype, packet);
            for len in 14..whole.len() {
                let it = format!("{ethertype:x}: {what} of {len} bytes");
                assert_eq!(passes(&whole[..len]), len >= needed, "{it}");
            }
        }
    }
    check_changes(macs, passes);
}

/// The set's changes take effect at once.
fn check_changes(macs: &MacSet, passes: &mut dyn FnMut(&[u8]) -> bool) {
    let mut from = |address| passes(&frame(CONTAINER, TYPE_IPV4, &ipv4(address, 6, PORT)));
    let [second, third] = FOREIGN;
    assert!(macs.set_sources(CONTAINER, &[second.into(), OWN.into()]).unwrap());
    assert_eq!([OWN, second, third].map(&mut from), [true, true, false]);
    assert!(macs.set_sources(CONTAINER, &[second.into(), third.into()]).unwrap());
    assert_eq!([OWN, second, third].map(&mut from), [false, true, true]);
    assert!(macs.set_sources(CONTAINER, &[]).unwrap());
    assert_eq!([OWN, second, third].map(&mut from), [false; 3]);
    assert!(macs.set_sources(CONTAINER, &[OWN.into()]).unwrap());
    macs.clear().unwrap();
    assert!(macs.insert(REMOTE).unwrap());
    assert!(!from(OWN));
    assert!(macs.set_sources(CONTAINER, &[OWN.into()]).unwrap());
    assert!(from(OWN));
    macs.remove(REMOTE).unwrap();
    assert!(!from(OWN));
}

#[test]
fn a_full_set_says_so_and_takes_more_when_it_has_room() {
    let macs = MacSet::new().unwrap();
    let mac = |number: usize| {
        let [a, b, c, d, ..] = number.to_le_bytes();
        [2, 0, a, b, c, d]
    };
    let room = MACS_MAX + SOURCES_MAX;
    assert!((0..room).all(|number| macs.insert(mac(number)).unwrap()));
    assert!(!macs.insert(mac(room)).unwrap());
    let own = [OWN.into(), OWN6.into()];
    assert!(!macs.set_sources(CONTAINER, &own).unwrap());
    macs.remove(mac(1)).unwrap();
    assert!(!macs.set_sources(CONTAINER, &own).unwrap());
    macs.remove(mac(2)).unwrap();
    assert!(macs.set_sources(CONTAINER, &own).unwrap());
    assert!(!macs.insert(mac(1)).unwrap());
    assert!(macs.set_sources(CONTAINER, &[]).unwrap());
    assert!(macs.insert(mac(1)).unwrap() && macs.insert(mac(2)).unwrap());
}

#[test]
fn frames_for_the_set_go_up_the_tap_and_the_others_to_the_switch() {
    run_in(fresh_namespace(), || {
        quiet();
        let tap = Tap::open(&TapOptions::new("tap0")).unwrap();
        ip(&format!("link set tap0 address {}", Mac(CONTAINER)));
        ip("link add local0 type veth peer name switch0");
        let macs = MacSet::new().unwrap();
        macs.self_test().unwrap();
        macs.join(CONTAINER, index_of("tap0"), index_of("local0")).unwrap();
        assert!(macs.set_sources(CONTAINER, &[OWN.into()]).unwrap());
        ip("link set local0 arp off up");
        ip("link set switch0 arp off up");
        ip("link set tap0 up");
        ip("addr add 10.9.0.1/24 dev tap0");
        for (host, mac) in [("10.9.0.2", "02:00:00:00:00:01"), ("10.9.0.3", "02:00:00:00:00:02")] {
            ip(&format!("neigh add {host} lladdr {mac} dev tap0"));
        }
        let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
        let mut buffer = vec![0; FRAME_LEN_MAX];
        let mut reads = || {
            let mut to = Vec::new();
            while let Ok(len) = tap.recv(&mut buffer) {
                to.push(<[u8; 6]>::try_from(&buffer[VNET_LEN..len][..6]).unwrap());
            }
            to
        };
        reads();
        let mut switched = packets("switch0").0;
        let mut crosses = |expected: &[[u8; 6]]| {
            socket.send_to(b"x", "10.9.0.2:9").unwrap();
            socket.send_to(b"x", "10.9.0.3:9").unwrap();
            let (mut read, mut now) = (Vec::new(), switched);
            wait_until(|| {
                read.extend(reads());
                now = packets("switch0").0;
                read.len() as u64 + now - switched >= 2
            });
            assert_eq!(read, expected);
            assert_eq!(now - switched, 2 - expected.len() as u64);
            switched = now;
        };
        crosses(&[]);
        assert!(macs.insert(REMOTE).unwrap());
        assert!(macs.insert(REMOTE).unwrap());
        assert!(macs.contains(REMOTE).unwrap() && !macs.contains(OTHER).unwrap());
        crosses(&[REMOTE]);
        assert!(macs.insert(OTHER).unwrap());
        crosses(&[REMOTE, OTHER]);
        macs.remove(REMOTE).unwrap();
        macs.remove(REMOTE).unwrap();
        crosses(&[OTHER]);
        // Frames that come in by the veth end are the TAP's, and its owner answers them.
        let from = packets("tap0");
        ip("addr add 10.9.1.1/24 dev switch0");
        ip("neigh add 10.9.1.2 lladdr 02:00:00:00:00:05 dev switch0");
        let sender = UdpSocket::bind("10.9.1.1:0").unwrap();
        sender.send_to(b"y", "10.9.1.2:9").unwrap();
        // The set outlives its owner as long as a program reads it, and the next owner may have kept it.
        let kept = macs.as_fd().try_clone_to_owned().unwrap();
        drop(macs);
        crosses(&[OTHER]);
        assert!(is_set(&kept));
        let other = sender.as_fd().try_clone_to_owned().unwrap();
        assert!(!is_set(&other));
        let macs = MacSet::adopt(kept).unwrap();
        crosses(&[]);
        assert!(macs.insert(REMOTE).unwrap());
        crosses(&[]);
        assert!(macs.set_sources(CONTAINER, &[OWN.into()]).unwrap());
        crosses(&[REMOTE]);
        wait_until(|| packets("tap0").1 == from.1 + 2);
    })
    .unwrap();
}

#[test]
fn what_leaves_a_direct_port_passes_the_switch_by_only_under_the_containers_addresses() {
    run_in(fresh_namespace(), || {
        quiet();
        let tap = Tap::open(&TapOptions::new("tap0")).unwrap();
        ip("link add local0 type veth peer name switch0");
        let macs = MacSet::new().unwrap();
        macs.join(CONTAINER, index_of("tap0"), index_of("local0")).unwrap();
        for device in ["local0", "switch0", "tap0"] {
            ip(&format!("link set {device} arp off up"));
        }
        let mut buffer = vec![0; FRAME_LEN_MAX];
        let mut passes = |sender: &FrameSender, frame: &[u8]| {
            let before = packets("switch0").0;
            sender.send(frame).unwrap();
            let len = taken(&tap, &mut buffer, "switch0", before);
            len.map(|len| assert_eq!(buffer[VNET_LEN..len], *frame)).is_some()
        };
        let plain = FrameSender::open("tap0");
        check_senders(&macs, &mut |frame| passes(&plain, frame));
        // The kernel takes a tag out of a frame that comes in, and keeps it beside the frame.
        ip("link add br0 up type bridge mcast_snooping 0");
        ip("link add in0 type veth peer name in1");
        for device in ["tap0", "in0"] {
            ip(&format!("link set {device} master br0 up"));
        }
        ip("link set in1 arp off up");
        let packet = ipv4(OWN, PROTOCOL_TCP, PORT);
        let tagged = [&[0, 5], &TYPE_IPV4.to_be_bytes()[..], &packet].concat();
        assert!(macs.insert(REMOTE).unwrap());
        let bridged = FrameSender::open("in1");
        assert!(passes(&bridged, &frame(CONTAINER, TYPE_IPV4, &packet)));
        assert!(!passes(&bridged, &frame(CONTAINER, TYPE_VLAN, &tagged)));
    })
    .unwrap();
}

/// A port of a bridge, the device beyond that it may have a shortcut to, and another port of the bridge.
struct Ports {
    macs: MacSet,
    bridged: Array<8>,
    tap: Tap,
    sender: FrameSender,
    buffer: Vec<u8>,
}

impl Ports {
    fn new() -> Self {
        quiet();
        let tap = Tap::open(&TapOptions::new("tap0")).unwrap();
        ip("link set tap0 arp off up");
        ip("link add br0 up type bridge mcast_snooping 0");
        for name in ["port", "other"] {
            ip(&format!("link add {name}0 type veth peer name {name}1"));
            ip(&format!("link set {name}0 master br0 up"));
            ip(&format!("link set {name}1 arp off up"));
        }
        let (macs, bridged) = (MacSet::new().unwrap(), Array::new(1).unwrap());
        let sender = FrameSender::open("port1");
        Self { macs, bridged, tap, sender, buffer: vec![0; FRAME_LEN_MAX] }
    }

    fn shorten(&self) -> Shortcut {
        let [port, tap] = ["port0", "tap0"].map(index_of);
        self.macs.shorten_since(port, CONTAINER, tap, &self.bridged).unwrap()
    }

    /// So many nanoseconds ago, and a few ticks of the coarse clock, a frame went to the bridge.
    fn bridged(&self, ago_ns: u64) {
        let ticks = u64::from(tick() - 2);
        self.bridged.set([0; 4], (ticks * u64::from(TICK_NS) - ago_ns).to_ne_bytes()).unwrap();
    }

    /// Whether a frame takes the shortcut; else it goes to the bridge.
    fn is_short(&mut self, frame: &[u8]) -> bool {
        let before = packets("other1").0;
        self.sender.send(frame).unwrap();
        let len = taken(&self.tap, &mut self.buffer, "other1", before);
        len.map(|len| assert_eq!(self.buffer[VNET_LEN..len], *frame)).is_some()
    }

    /// Whether one from the container does, whose sender is beyond doubt.
    fn is_short_to(&mut self, to: [u8; 6]) -> bool {
        let mut frame = frame(CONTAINER, TYPE_IPV4, &ipv4(OWN, PROTOCOL_TCP, PORT));
        frame[..6].copy_from_slice(&to);
        self.is_short(&frame)
    }
}

#[test]
fn a_containers_frames_for_the_set_pass_the_bridge_by_and_no_others() {
    run_in(fresh_namespace(), || {
        let mut ports = Ports::new();
        let shortcut = ports.shorten();
        assert!(ports.macs.set_sources(CONTAINER, &[OWN.into()]).unwrap());
        ports.bridged(0);
        assert!(!ports.is_short_to(REMOTE));
        ports.macs.insert(REMOTE).unwrap();
        assert!(ports.is_short_to(REMOTE));
        assert!(!ports.is_short_to(OTHER));
        assert!(!ports.is_short_to([0xff; 6]));
        ports.macs.remove(REMOTE).unwrap();
        assert!(!ports.is_short_to(REMOTE));
        ports.macs.insert(REMOTE).unwrap();
        assert!(ports.is_short_to(REMOTE));
        drop(shortcut);
        assert!(!ports.is_short_to(REMOTE));
    })
    .unwrap();
}

#[test]
fn what_comes_by_a_port_with_a_shortcut_takes_it_only_under_the_containers_addresses() {
    run_in(fresh_namespace(), || {
        let mut ports = Ports::new();
        let _shortcut = ports.shorten();
        ports.bridged(0);
        let macs = MacSet::adopt(ports.macs.as_fd().try_clone_to_owned().unwrap()).unwrap();
        check_senders(&macs, &mut |frame| ports.is_short(frame));
    })
    .unwrap();
}

#[test]
fn every_ten_seconds_the_bridge_learns_where_the_container_is() {
    run_in(fresh_namespace(), || {
        let mut ports = Ports::new();
        let _shortcut = ports.shorten();
        ports.macs.insert(REMOTE).unwrap();
        assert!(ports.macs.set_sources(CONTAINER, &[OWN.into()]).unwrap());
        let unit = 1 << SECOND_SHIFT;
        let due = u64::from(BRIDGE_EVERY.cast_unsigned()) * unit;
        assert!(!ports.is_short_to(REMOTE), "of all frames the first");
        assert!((0..3).all(|_| ports.is_short_to(REMOTE)));
        ports.bridged(due - unit);
        assert!((0..3).all(|_| ports.is_short_to(REMOTE)));
        ports.bridged(due + unit / 10);
        assert!(!ports.is_short_to(REMOTE));
        assert!((0..3).all(|_| ports.is_short_to(REMOTE)));
        let known = Command::new("bridge").args(["fdb", "show", "br", "br0"]).output().unwrap();
        let known = String::from_utf8(known.stdout).unwrap();
        assert!(known.contains("82:00:00:00:90:a3 dev port0"), "{known}");
    })
    .unwrap();
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    run_in(fresh_namespace(), || {
        let macs = MacSet::new().unwrap();
        assert!(macs.join(OTHER, 77, 78).is_err());
        assert!(macs.shorten(77, OTHER, 78).is_err());
    })
    .unwrap();
}
