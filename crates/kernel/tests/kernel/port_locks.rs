//! Frames that a locked port of a bridge sends: those under its own addresses pass, and no others.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use weft_io::packet::PacketSocket;
use weft_kernel::{Kernel, KernelError, LOCK_ADDRESSES_MAX, LockCounts, PortLock, PortLocks};
use weft_packet::{arp::Arp, checksum::Sum, ethernet, icmp, ipv4, ipv6};

use crate::lab::{BRIDGE, Container, attach_spec, host_with_bridge, on_a_host, run, wait_until};
use crate::switch::ping;

const UDP: u8 = 17;
const OWN: [u8; 6] = [2, 0, 0, 0, 1, 1];
const OTHER: [u8; 6] = [2, 0, 0, 0, 1, 2];
const MINE: Ipv4Addr = Ipv4Addr::new(10, 32, 0, 1);
const THEIRS: Ipv4Addr = Ipv4Addr::new(10, 32, 0, 2);
const ANY: Ipv4Addr = Ipv4Addr::UNSPECIFIED;
const MINE6: Ipv6Addr = Ipv6Addr::new(0xfd32, 0, 0, 0, 0, 0, 0, 1);
const THEIRS6: Ipv6Addr = Ipv6Addr::new(0xfd32, 0, 0, 0, 0, 0, 0, 2);
const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 0x101);
const OTHER_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 0x102);
const ANY6: Ipv6Addr = Ipv6Addr::UNSPECIFIED;

fn lock(n: u8) -> PortLock {
    let addresses = [format!("10.32.0.{n}"), format!("fd32::{n}")];
    let addresses = addresses.map(|text| text.parse::<IpAddr>().unwrap()).to_vec();
    PortLock { mac: [2, 0, 0, 0, 1, n], addresses }
}

fn locks(kernel: &Kernel) -> PortLocks {
    PortLocks::new(kernel.clone(), "weft-box", [].into()).unwrap()
}

/// A bridge with two containers, whose ports are locked.
struct Bed {
    kernel: Kernel,
    locks: PortLocks,
    containers: [Container; 2],
}

impl Bed {
    async fn new() -> Self {
        let kernel = host_with_bridge().await;
        run("ip", &["link", "set", BRIDGE, "up"]);
        let locks = locks(&kernel);
        let containers = [Container::new(), Container::new()];
        for (n, container) in (1..).zip(&containers) {
            locks.set(&format!("weft-box{n}"), Some(lock(n))).await.unwrap();
            kernel.attach(&attach_spec(n, container)).await.unwrap();
        }
        let bed = Self { kernel, locks, containers };
        assert!(wait_until(|| bed.ping()));
        bed
    }

    fn ping(&self) -> bool {
        ping(&self.containers[0], "10.32.0.2")
    }

    /// Whether the second container gets a frame that the first one sends.
    fn passes(&self, frame: &[u8]) -> bool {
        const ALL: u16 = 3;
        let [from, to] = &self.containers;
        let index = |socket: &PacketSocket| socket.index_of("weft0").unwrap();
        let receiver = to.inside(|| {
            let index = index(&PacketSocket::sender().unwrap());
            PacketSocket::open_for(index, ALL).unwrap()
        });
        from.inside(|| {
            let sender = PacketSocket::sender().unwrap();
            sender.send(frame, index(&sender)).unwrap();
            // Frames of a port stay in order: what came before this mark has passed.
            sender.send(&mark(), index(&sender)).unwrap();
        });
        let mut buffer = [0; 2_048];
        let mut seen = false;
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            match receiver.recv(&mut buffer) {
                Ok(len) if buffer[..len] == *mark() => return seen,
                Ok(len) => {
                    let found = buffer.get(..len).unwrap_or_default();
                    // The receiver's kernel takes a tag off.
                    let is_same = found.get(14..).is_some_and(|it| it.starts_with(&frame[14..]));
                    seen |= is_same || is_untagged(found, frame);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        panic!("the mark does not arrive");
    }

    async fn dropped(&self) -> LockCounts {
        self.locks.ensure().await.unwrap()
    }
}

fn is_untagged(found: &[u8], frame: &[u8]) -> bool {
    let behind = |at: usize| frame.get(at..).filter(|rest| !rest.is_empty());
    [16, 18, 22].into_iter().filter_map(behind).any(|rest| found.ends_with(rest))
}

/// A frame of no protocol that anybody knows, which a locked port may send under its own address.
fn mark() -> Vec<u8> {
    framed(OWN, 0x88b5, &[0x5a; 46])
}

fn framed(source: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; ethernet::LEN];
    ethernet::write(&mut frame, OTHER, source, ethertype);
    frame.extend(payload);
    frame
}

fn tagged(tags: &[(u16, u16)], frame: &[u8]) -> Vec<u8> {
    let tags = tags.iter().flat_map(|(kind, tag)| [kind.to_be_bytes(), tag.to_be_bytes()].concat());
    [&frame[..12], &tags.collect::<Vec<u8>>(), &frame[12..]].concat()
}

fn arp(sender_mac: [u8; 6], sender_ip: Ipv4Addr) -> Vec<u8> {
    let mut body = vec![0; weft_packet::arp::LEN];
    let (operation, target_mac, target_ip) = (weft_packet::arp::REPLY, OTHER, THEIRS);
    Arp { operation, sender_mac, sender_ip, target_mac, target_ip }.write(&mut body);
    framed(OWN, ethernet::TYPE_ARP, &body)
}

fn v4(source: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; ipv4::LEN];
    let total_len = (ipv4::LEN + payload.len()) as u16;
    let header = ipv4::Builder {
        tos: 0,
        total_len,
        id: 0,
        dont_fragment: true,
        ttl: 64,
        protocol,
        source,
        destination: THEIRS,
    };
    header.write(&mut packet);
    packet.extend(payload);
    framed(OWN, ethernet::TYPE_IPV4, &packet)
}

fn udp_from(port: u16) -> Vec<u8> {
    [&port.to_be_bytes()[..], &[0x10, 0, 0, 12, 0, 0], b"text"].concat()
}

fn v6(source: Ipv6Addr, next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; ipv6::LEN];
    let header = ipv6::Builder {
        traffic_class: 0,
        flow_label: 0,
        payload_len: payload.len() as u16,
        next_header,
        hop_limit: 255,
        source,
        destination: THEIRS6,
    };
    header.write(&mut packet);
    packet.extend(payload);
    framed(OWN, ethernet::TYPE_IPV6, &packet)
}

/// A message of ICMPv6 with a target, as those of neighbour discovery have.
fn nd(source: Ipv6Addr, kind: u8, target: Ipv6Addr) -> Vec<u8> {
    let mut body = [&[0; 8][..], &target.octets()].concat();
    icmp::finish_v6(&mut body, kind, 0, 0x6000_0000, source, THEIRS6);
    v6(source, 58, &body)
}

/// The same behind an extension header.
fn nd_behind_options(target: Ipv6Addr) -> Vec<u8> {
    let mut body = [&[0; 8][..], &target.octets()].concat();
    icmp::finish_v6(&mut body, 136, 0, 0x6000_0000, MINE6, THEIRS6);
    v6(MINE6, 60, &[&[58, 0, 1, 4, 0, 0, 0, 0][..], &body].concat())
}

/// A later fragment whose data looks like a message of that kind, or a datagram from that port.
fn later(source: Ipv6Addr, next_header: u8, data: &[u8]) -> Vec<u8> {
    let header = [next_header, 0, 5, 0x20, 0, 0, 0, 7];
    v6(source, 44, &[&header[..], data, &[0; 24]].concat())
}

/// Frames, and why a locked port may not send them.
fn cases() -> Vec<(&'static str, Vec<u8>, Option<&'static str>)> {
    const IGMP: u8 = 2;
    let text = udp_from(4_000);
    let spoofed = v4(THEIRS, UDP, &text);
    let mut foreign = v4(MINE, UDP, &text);
    foreign[6..12].copy_from_slice(&OTHER);
    let mut fragment = v4(MINE, UDP, &udp_from(67));
    // The 1,480th byte and what follows: no ports.
    fragment[20..22].copy_from_slice(&185_u16.to_be_bytes());
    fragment[24..26].fill(0);
    let checksum = Sum::default().bytes(&fragment[14..34]).checksum();
    fragment[24..26].copy_from_slice(&checksum.to_be_bytes());
    vec![
        ("the own address", v4(MINE, UDP, &text), None),
        ("another Ethernet address", foreign, Some("mac")),
        ("another address", spoofed.clone(), Some("ip")),
        ("no address", v4(ANY, UDP, &text), Some("ip")),
        ("no address, to join a group", v4(ANY, IGMP, &[0x16; 8]), None),
        ("a server of DHCP", v4(MINE, UDP, &udp_from(67)), Some("dhcp")),
        ("a later fragment", fragment, None),
        ("an answer of ARP", arp(OWN, MINE), None),
        ("a probe of ARP", arp(OWN, ANY), None),
        ("another's answer of ARP", arp(OWN, THEIRS), Some("arp")),
        ("another's Ethernet address in ARP", arp(OTHER, MINE), Some("arp")),
        ("ARP for another kind of address", framed(OWN, ethernet::TYPE_ARP, &[0; 28]), Some("arp")),
        ("a tag", tagged(&[(0x8100, 7)], &v4(MINE, UDP, &text)), Some("vlan")),
        ("a tag of VLAN 0", tagged(&[(0x8100, 0)], &spoofed), Some("vlan")),
        ("two tags", tagged(&[(0x88a8, 0), (0x8100, 0)], &spoofed), Some("vlan")),
        ("three tags", tagged(&[(0x8100, 0), (0x8100, 0), (0x8100, 0)], &spoofed), Some("vlan")),
        ("the own IPv6 address", v6(MINE6, UDP, &text), None),
        ("the link-local address", v6(LINK_LOCAL, UDP, &text), None),
        ("another IPv6 address", v6(THEIRS6, UDP, &text), Some("ip")),
        ("another link-local address", v6(OTHER_LINK_LOCAL, UDP, &text), Some("ip")),
        ("no IPv6 address", v6(ANY6, UDP, &text), Some("ip")),
        ("a server of DHCPv6", v6(LINK_LOCAL, UDP, &udp_from(547)), Some("dhcp")),
        ("a solicitation", nd(MINE6, 135, THEIRS6), None),
        ("a solicitation under another address", nd(THEIRS6, 135, MINE6), Some("ip")),
        ("a check for duplicates", nd(ANY6, 135, MINE6), None),
        ("another's check for duplicates", nd(ANY6, 135, THEIRS6), Some("nd")),
        ("an advertisement", nd(MINE6, 136, MINE6), None),
        ("an advertisement of the link-local address", nd(MINE6, 136, LINK_LOCAL), None),
        ("another's advertisement", nd(MINE6, 136, THEIRS6), Some("nd")),
        ("another's advertisement behind options", nd_behind_options(THEIRS6), Some("nd")),
        ("another's link-local advertisement", nd(MINE6, 136, OTHER_LINK_LOCAL), Some("nd")),
        ("an advertisement of a router", nd(LINK_LOCAL, 134, MINE6), Some("router")),
        ("a redirect", nd(LINK_LOCAL, 137, MINE6), Some("router")),
        ("a report of groups", nd(ANY6, 143, MINE6), None),
        ("a ping without an address", nd(ANY6, 128, MINE6), Some("ip")),
        ("a later fragment of IPv6", later(MINE6, UDP, &udp_from(547)), None),
        ("a later fragment of a ping", later(MINE6, 58, &[134, 0, 0, 0]), None),
        ("a later fragment of another", later(THEIRS6, UDP, &udp_from(547)), Some("ip")),
        ("another protocol", framed(OWN, 0x88b6, &[1; 46]), None),
    ]
}

#[test]
fn a_locked_port_sends_under_its_own_addresses_alone_and_each_drop_has_its_reason() {
    on_a_host(|| async {
        let bed = Bed::new().await;
        let mut before = bed.dropped().await;
        for (what, frame, reason) in cases() {
            let passes = bed.passes(&frame);
            let after = bed.dropped().await;
            let count = |counts: &LockCounts, name: &str| counts.dropped[name];
            let names = after.dropped.keys().map(String::as_str);
            let more: Vec<&str> =
                names.filter(|name| count(&after, name) > count(&before, name)).collect();
            assert_eq!(passes, reason.is_none(), "{what}: {more:?}");
            assert_eq!(more, reason.into_iter().collect::<Vec<_>>(), "{what}");
            before = after;
        }
        let counts = bed.dropped().await;
        assert_eq!(counts.ports, ["weft-box1"]);
        let refused = cases().iter().filter(|(_, _, reason)| reason.is_some()).count();
        assert_eq!(counts.all(), refused as u64);
    });
}

#[test]
fn the_bridge_neither_learns_nor_answers_what_a_locked_port_may_not_send() {
    on_a_host(|| async {
        let bed = Bed::new().await;
        let strange = [2, 9, 9, 9, 9, 9];
        let mut frame = v4(MINE, UDP, &udp_from(4_000));
        frame[6..12].copy_from_slice(&strange);
        let knows = || run("bridge", &["fdb", "show", "br", BRIDGE]).contains("02:09:09:09:09:09");
        assert!(!bed.passes(&frame) && !knows());
        bed.locks.set("weft-box1", None).await.unwrap();
        assert!(bed.passes(&frame) && knows());
        bed.locks.set("weft-box1", Some(lock(1))).await.unwrap();
        assert!(!bed.passes(&frame));
    });
}

#[test]
fn a_port_sends_nothing_before_it_has_a_lock_and_follows_its_changes() {
    on_a_host(|| async {
        let bed = Bed::new().await;
        bed.locks.forget("weft-box1").await.unwrap();
        assert!(!bed.ping());
        let changed = PortLock { addresses: vec!["10.32.0.9".parse().unwrap()], ..lock(1) };
        bed.locks.set("weft-box1", Some(changed)).await.unwrap();
        assert!(!bed.ping());
        bed.locks.set("weft-box1", Some(lock(1))).await.unwrap();
        assert!(bed.ping());
        // Devices of others are nobody's to lock.
        let third = Container::new();
        third.plug("other", "10.32.0.3/12");
        run("ip", &["link", "set", "other", "master", BRIDGE]);
        assert!(wait_until(|| ping(&third, "10.32.0.2")));
    });
}

#[test]
fn the_table_is_restored_with_its_counts_and_taken_over_by_the_next_daemon() {
    on_a_host(|| async {
        let bed = Bed::new().await;
        assert!(!bed.passes(&arp(OWN, THEIRS)));
        assert_eq!(bed.dropped().await.dropped["arp"], 1);
        let mut watch = bed.locks.watch().unwrap();
        // What it writes itself is no change by others.
        bed.locks.set("weft-box7", Some(lock(7))).await.unwrap();
        let limit = Duration::from_millis(200);
        assert!(tokio::time::timeout(limit, watch.changed()).await.is_err());
        for damage in [
            "delete table bridge weft-ports",
            "flush set bridge weft-ports macs",
            "add element bridge weft-ports open { weft-box1 }",
            "delete element bridge weft-ports targets { weft-box1 . 0xfd320000000000000000000000000001 }",
            "flush chain bridge weft-ports prerouting",
        ] {
            run("nft", &[damage]);
            tokio::time::timeout(Duration::from_secs(5), watch.changed()).await.unwrap().unwrap();
            bed.dropped().await;
            assert!(bed.ping() && !bed.passes(&arp(OWN, THEIRS)), "{damage}");
            while tokio::time::timeout(limit, watch.changed()).await.is_ok() {}
        }
        let counted = bed.dropped().await.dropped;
        assert!(counted["arp"] >= 5, "{counted:?}");
        // It knows all ports from the start, so that none is closed for a moment.
        let wanted = [1, 2].map(|n| (format!("weft-box{n}"), Some(lock(n))));
        let next = PortLocks::new(bed.kernel.clone(), "weft-box", wanted.into()).unwrap();
        assert_eq!(next.ensure().await.unwrap().dropped, counted);
        assert!(bed.ping() && !bed.passes(&arp(OWN, THEIRS)));
        assert!(PortLocks::remove(&bed.kernel).await.unwrap());
        assert!(!PortLocks::remove(&bed.kernel).await.unwrap());
        assert!(bed.passes(&arp(OWN, THEIRS)));
    });
}

#[test]
fn a_table_of_another_program_stays_and_too_many_addresses_are_refused() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        run("nft", &["add table bridge weft-ports"]);
        let locks = locks(&kernel);
        let taken = locks.set("weft-box1", Some(lock(1))).await;
        assert!(matches!(taken, Err(KernelError::TableTaken { .. })), "{taken:?}");
        run("nft", &["delete table bridge weft-ports"]);
        let addresses = (0..=LOCK_ADDRESSES_MAX as u32).map(|n| Ipv4Addr::from(n + 1).into());
        let many = PortLock { addresses: addresses.collect(), ..lock(1) };
        let full = locks.set("weft-box1", Some(many)).await;
        assert!(matches!(full, Err(KernelError::LockTooLong { .. })), "{full:?}");
        locks.ensure().await.unwrap();
        assert!(run("nft", &["list table bridge weft-ports"]).contains("jump check"));
    });
}

/// One transaction of netlink for each: a host with a thousand containers attaches as fast as one with few.
#[test]
fn a_thousand_ports_are_locked_and_changes_stay_cheap() {
    on_a_host(|| async {
        let kernel = host_with_bridge().await;
        let locks = locks(&kernel);
        let of = |n: u16| PortLock {
            mac: [2, 1, 0, 0, (n >> 8) as u8, n as u8],
            addresses: vec![Ipv4Addr::from(0x0a20_0000 + u32::from(n)).into(), MINE6.into()],
        };
        for n in 0..1_000 {
            locks.set(&format!("weft-box{n}"), Some(of(n))).await.unwrap();
        }
        let changes = kernel.changes();
        for n in 0..50 {
            locks.forget(&format!("weft-box{n}")).await.unwrap();
        }
        assert_eq!(kernel.changes(), changes, "no table is written again");
        locks.ensure().await.unwrap();
        assert_eq!(kernel.changes(), changes, "it holds what is wanted");
        let shown = run("nft", &["list set bridge weft-ports macs"]);
        assert_eq!(shown.matches(" . 02:01").count(), 950);
    });
}
