//! The guard on plain VXLAN: which packets it drops and counts, and that it is restored. Another test, in a
//! guest whose kernel has ESP, shows that it lets ESP pass.

use std::{net::IpAddr, time::Duration};

use serde_json::Value;
use weft_io::uninterrupted;
use weft_kernel::{GroupLimit, Guard, GuardCounters, Kernel, KernelError, OuterFamily};

use crate::{
    lab::{BRIDGE, Container, Host, json, on_a_host, run, wait_until},
    switch::{hosts, ping},
};

/// Time limit for the restoration of a damaged guard.
const RESTORED: Duration = Duration::from_secs(5);

fn listing() -> Value {
    let mut listing = json("nft", &["-j", "list", "table", "inet", "weft-guard"]);
    for object in listing["nftables"].as_array_mut().unwrap() {
        object.as_object_mut().unwrap().remove("metainfo");
    }
    listing
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

const PORTS: [&str; 2] = ["weft-vxlan", "weft-vxlan6"];

fn new_guard() -> Guard {
    Guard::new(Kernel::new().unwrap(), &PORTS)
}

/// Marks this host's packets to the overlay's ports as Weft's.
fn send_as_weft() {
    run(
        "nft",
        &["add table inet sent; \
           add chain inet sent output { type filter hook output priority 0; }; \
           add rule inet sent output udp dport 6787 meta priority set 5745:4650"],
    );
}

#[test]
fn the_table_is_made_once_and_says_whose_it_is() {
    on_a_host(|| async {
        let mut guard = new_guard();
        assert!(!guard.is_whole().await.unwrap());
        assert_eq!(guard.counters().await.unwrap(), GuardCounters::default());
        assert!(guard.ensure(&[ip("192.0.2.7"), ip("fd00:2::7")]).await.unwrap());
        assert!(guard.is_whole().await.unwrap());
        let first = listing();
        let text = run("nft", &["list", "table", "inet", "weft-guard"]);
        for part in [
            "made-by-weft",
            "udp dport { 6787, 6788 } rt ipsec missing counter name \"output\" drop comment \"weft:",
            "udp dport { 6787, 6788 } rt ipsec missing counter name \"postrouting\" drop",
            "udp dport { 6787, 6788 } ipsec in reqid 1464157780 accept comment",
            "udp dport { 6787, 6788 } ipsec in spnum 5 reqid 1464157780 accept comment",
            "udp dport { 6787, 6788 } counter name \"input\" drop",
            "udp dport { 6787, 6788 } meta priority != 5745:4650 jump not-sent-by-weft",
            "udp dport { 6787, 6788 } counter name \"forward\" drop",
            "oifname \"weft-ovpn\" udp dport { 6787, 6788 } accept",
            "iifname \"weft-ovpn\" counter name \"channel\" drop",
            "ip daddr @trusted4 udp dport { 6787, 6788 } accept",
            "ip6 saddr @trusted6 udp dport { 6787, 6788 } accept",
            "elements = { 192.0.2.7 }",
            "elements = { fd00:2::7 }",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        // The same handles: nothing was written again, by this handle or by a restarted daemon's.
        assert!(!guard.ensure(&[ip("fd00:2::7"), ip("192.0.2.7")]).await.unwrap());
        let restarted = Kernel::new().unwrap();
        let mut again = Guard::new(restarted.clone(), &PORTS);
        assert!(!again.ensure(&[ip("fd00:2::7"), ip("192.0.2.7")]).await.unwrap());
        assert_eq!(restarted.changes(), 0);
        assert_eq!(listing(), first);
        assert!(guard.remove().await.unwrap());
        assert!(!guard.remove().await.unwrap());
        assert_eq!(run("nft", &["list", "ruleset"]).trim(), "");
    });
}

#[test]
fn plain_packets_are_dropped_and_counted_by_rule() {
    for family in [OuterFamily::V4, OuterFamily::V6] {
        on_a_host(move || async move {
            let (hosts, containers) = hosts(family, 2).await;
            let remotes = [ip("192.0.2.1"), ip("fd00:2::1"), ip("192.0.2.2"), ip("fd00:2::2")];
            let mut guards =
                hosts.iter().map(|h| Guard::new(h.kernel.clone(), &PORTS)).collect::<Vec<_>>();
            // Leaving.
            guards[0].ensure(&[]).await.unwrap();
            assert!(!ping(&containers[0], "10.32.0.2"));
            let counted = guards[0].counters().await.unwrap();
            assert!(counted.output.packets > 0 && counted.output.bytes > 0, "{counted:?}");
            // Arriving: the other end sends, this one does not let it in.
            assert!(!ping(&containers[1], "10.32.0.1"));
            let counted = guards[0].counters().await.unwrap();
            assert!(counted.input.packets > 0 && counted.input.bytes > 0, "{counted:?}");
            // A trusted peer passes both ways, and the counts stay as they were.
            assert!(guards[0].ensure(&remotes).await.unwrap());
            let before = guards[0].counters().await.unwrap();
            assert!(ping(&containers[0], "10.32.0.2"));
            assert_eq!(guards[0].counters().await.unwrap(), before);
            // The other end must trust as well.
            guards[1].ensure(&[]).await.unwrap();
            assert!(!ping(&containers[0], "10.32.0.2"));
            assert!(guards[1].counters().await.unwrap().input.packets > 0);
            guards[1].ensure(&remotes).await.unwrap();
            assert!(ping(&containers[0], "10.32.0.2"));
            // Trust withdrawn.
            assert!(guards[0].ensure(&[]).await.unwrap());
            assert!(!ping(&containers[0], "10.32.0.2"));
            let after = guards[0].counters().await.unwrap();
            assert!(after.output.packets > before.output.packets, "{after:?} {before:?}");
        });
    }
}

#[test]
fn any_sender_is_meant_and_other_ports_are_not() {
    on_a_host(|| async {
        let host = Host::new(1).await;
        run("ip", &["address", "add", "192.0.2.254/24", "dev", "underlay"]);
        let mut guard = Guard::new(host.kernel.clone(), &PORTS);
        guard.ensure(&[]).await.unwrap();
        let sender = host.namespace.inside(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap());
        let listener = std::net::UdpSocket::bind("0.0.0.0:6786").unwrap();
        let _ = wait_until(|| host.namespace.succeeds("ping", &["-c", "1", "192.0.2.254"]));
        let before = guard.counters().await.unwrap().output.packets;
        for port in [6787, 6788] {
            let error = sender.send_to(b"plain", ("192.0.2.254", port)).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        }
        assert_eq!(guard.counters().await.unwrap().output.packets, before + 2);
        sender.send_to(b"other", "192.0.2.254:6786").unwrap();
        listener.set_read_timeout(Some(RESTORED)).unwrap();
        assert_eq!(uninterrupted(|| listener.recv(&mut [0; 64])).unwrap(), 5);
        // From an unknown host.
        let stranger = std::net::UdpSocket::bind("192.0.2.254:0").unwrap();
        stranger.send_to(&[8, 0, 0, 0, 0, 0, 1, 0], "192.0.2.1:6788").unwrap();
        assert!(wait_until(|| {
            let text =
                host.namespace.run("nft", &["list", "counter", "inet", "weft-guard", "input"]);
            text.contains("packets 1 ")
        }));
    });
}

#[test]
fn forwarded_packets_are_dropped_too() {
    on_a_host(|| async {
        let _host = Host::new(1).await;
        run("ip", &["address", "add", "192.0.2.254/24", "dev", "underlay"]);
        run("sysctl", &["-q", "-w", "net.ipv4.ip_forward=1"]);
        let inner = Container::new();
        inner.plug("inner", "198.51.100.1/24");
        run("ip", &["address", "add", "198.51.100.254/24", "dev", "inner"]);
        inner.run("ip", &["route", "add", "default", "via", "198.51.100.254"]);
        assert!(wait_until(|| inner.succeeds("ping", &["-c", "1", "-W", "1", "198.51.100.254"])));
        let mut guard = new_guard();
        guard.ensure(&[]).await.unwrap();
        let sender = inner.inside(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap());
        sender.send_to(b"plain", "192.0.2.1:6787").unwrap();
        let mut counted = GuardCounters::default();
        for _ in 0..50 {
            counted = guard.counters().await.unwrap();
            if counted.forward.packets == 1 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!((counted.forward.packets, counted.output.packets), (1, 0));
    });
}

#[test]
fn the_data_channels_device_is_for_the_overlay_alone() {
    on_a_host(|| async {
        let _host = Host::new(1).await;
        run("ip", &["address", "add", "192.0.2.254/24", "dev", "underlay"]);
        run("sysctl", &["-q", "-w", "net.ipv4.ip_forward=1"]);
        let far = Container::new();
        // Both ends' reports of IPv6 groups would be counted with this test's packets.
        let quiet = ["-q", "-w", "net.ipv6.conf.all.disable_ipv6=1"];
        run("sysctl", &quiet);
        far.run("sysctl", &quiet);
        far.plug("weft-ovpn", "198.51.100.1/24");
        run("ip", &["address", "add", "198.51.100.254/24", "dev", "weft-ovpn"]);
        far.run("ip", &["route", "add", "default", "via", "198.51.100.254"]);
        assert!(wait_until(|| far.succeeds("ping", &["-c", "1", "-W", "1", "198.51.100.254"])));
        let mut guard = new_guard();
        guard.ensure(&[]).await.unwrap();
        let bound = |port: u16| std::net::UdpSocket::bind(("0.0.0.0", port)).unwrap();
        let ports = [6787, 9_999];
        let here = ports.map(bound);
        let there = far.inside(|| ports.map(bound));
        for socket in here.iter().chain(&there) {
            socket.set_read_timeout(Some(RESTORED)).unwrap();
        }
        let received = |socket: &std::net::UdpSocket| uninterrupted(|| socket.recv(&mut [0; 64]));
        // Leaving: not even the overlay's ports are for others.
        let error = here[1].send_to(b"forged", "198.51.100.1:6787").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        assert_eq!(guard.counters().await.unwrap().channel.packets, 1);
        send_as_weft();
        here[1].send_to(b"overlay", "198.51.100.1:6787").unwrap();
        assert_eq!(received(&there[0]).unwrap(), 7);
        let error = here[1].send_to(b"else", "198.51.100.1:9999").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        // Arriving: the later packet on the same path shows that the first has been judged.
        there[1].send_to(b"else", "198.51.100.254:9999").unwrap();
        there[1].send_to(b"overlay", "198.51.100.254:6787").unwrap();
        assert_eq!(received(&here[0]).unwrap(), 7);
        here[1].set_nonblocking(true).unwrap();
        assert_eq!(received(&here[1]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        // Forwarded.
        let before = guard.counters().await.unwrap();
        assert!(before.channel.packets >= 3, "{before:?}");
        assert_eq!((before.input.packets, before.output.packets), (0, 0));
        there[1].send_to(b"overlay", "192.0.2.1:6787").unwrap();
        there[1].send_to(b"overlay", "198.51.100.254:6787").unwrap();
        assert_eq!(received(&here[0]).unwrap(), 7);
        let after = guard.counters().await.unwrap();
        assert!(after.channel.packets > before.channel.packets, "{after:?}");
        assert_eq!(after.postrouting.packets, 0);
    });
}

#[test]
fn a_damaged_guard_stands_again_at_once_and_others_tables_are_left_alone() {
    on_a_host(|| async {
        run(
            "nft",
            &["add table inet theirs; add chain inet theirs c; add rule inet theirs c accept"],
        );
        let theirs = run("nft", &["list", "table", "inet", "theirs"]);
        let mut guard = new_guard();
        let mut watch = guard.watch().unwrap();
        guard.ensure(&[ip("192.0.2.7")]).await.unwrap();
        for damage in [
            "delete table inet weft-guard",
            "flush chain inet weft-guard input",
            "delete chain inet weft-guard output",
            "insert rule inet weft-guard input accept",
            "add element inet weft-guard trusted4 { 192.0.2.66 }",
            "flush set inet weft-guard trusted4",
            "delete table bridge weft-guard",
            "flush chain bridge weft-guard postrouting",
            "flush ruleset",
        ] {
            run("nft", &[&format!("flush chain inet weft-guard {}", "made-by-weft")]);
            if damage == "delete chain inet weft-guard output" {
                run("nft", &["flush chain inet weft-guard output"]);
            }
            run("nft", &[damage]);
            assert!(!guard.is_whole().await.unwrap(), "{damage}");
            tokio::time::timeout(RESTORED, guard.restore(&mut watch))
                .await
                .unwrap_or_else(|_| panic!("not restored after: {damage}"))
                .unwrap();
            assert!(guard.is_whole().await.unwrap(), "{damage}");
            if damage != "flush ruleset" {
                assert_eq!(run("nft", &["list", "table", "inet", "theirs"]), theirs, "{damage}");
            }
        }
        // Changes that other programs make to their tables cause no event.
        run(
            "nft",
            &["add table inet theirs; add chain inet theirs c; add rule inet theirs c accept"],
        );
        let quiet = tokio::time::timeout(Duration::from_millis(300), guard.restore(&mut watch));
        assert!(quiet.await.is_err());
        guard.remove().await.unwrap();
        assert_eq!(run("nft", &["list", "table", "inet", "theirs"]), theirs);
    });
}

#[test]
fn a_guard_damaged_just_after_others_changes_overran_the_watch_stands_again() {
    on_a_host(|| async {
        let mut guard = new_guard();
        let mut watch = guard.watch().unwrap();
        guard.ensure(&[ip("192.0.2.7")]).await.unwrap();
        // More notices of another table than the watch's socket holds, none of them read.
        run("nft", &["add table inet theirs; add set inet theirs s { type inet_service; }"]);
        let elements: Vec<String> = (1..60_000).map(|port| port.to_string()).collect();
        let change = |verb| format!("{verb} element inet theirs s {{ {} }}\n", elements.join(", "));
        let file = std::env::temp_dir().join(format!("weft-nft-{}", std::process::id()));
        std::fs::write(&file, change("add") + &change("delete")).unwrap();
        run("nft", &["-f", file.to_str().unwrap()]);
        std::fs::remove_file(&file).unwrap();
        tokio::time::timeout(RESTORED, watch.changed()).await.expect("a word of the loss").unwrap();
        run("nft", &["delete table inet weft-guard"]);
        tokio::time::timeout(RESTORED, guard.restore(&mut watch))
            .await
            .expect("the guard must be restored")
            .unwrap();
        assert!(guard.is_whole().await.unwrap());
    });
}

#[test]
fn fragments_that_hide_their_port_are_dropped_and_counted() {
    on_a_host(|| async {
        let far = Container::new();
        far.plug("far", "fd05::1/64");
        run("ip", &["address", "add", "fd05::254/64", "dev", "far", "nodad"]);
        let (near, from) = ("fd05::254".parse().unwrap(), "fd05::1".parse().unwrap());
        // Its address is in use, and not just being tried.
        let ping = ["-c", "1", "-W", "1", "-I", "fd05::1", "fd05::254"];
        assert!(wait_until(|| far.succeeds("ping", &ping)));
        let mut guard = new_guard();
        guard.ensure(&[]).await.unwrap();
        let listen = |port: u16| {
            let socket = std::net::UdpSocket::bind(("::", port)).unwrap();
            socket.set_read_timeout(Some(RESTORED)).unwrap();
            socket
        };
        let (overlay, other) = (listen(6788), listen(6790));
        let socket = far.inside(|| rustix::net::socket(INET6, RAW, Some(FRAGMENT)).unwrap());
        let to = std::net::SocketAddrV6::new(near, 0, 0, 0);
        let send = |fragment: &[u8]| {
            let flags = rustix::net::SendFlags::empty();
            rustix::net::sendto(&socket, fragment, flags, &to).unwrap();
        };
        let options = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
        for (number, port) in [(1, 6788), (2, 6790)] {
            let udp = datagram(from, near, port);
            // The header that announces UDP is in the second fragment.
            send(&fragment(60, 0, true, number, &options(60)));
            send(&fragment(60, 8, false, number, &[&options(17)[..], &udp].concat()));
            // UDP itself is.
            send(&fragment(60, 0, true, 10 + number, &options(17)));
            send(&fragment(60, 8, false, 10 + number, &udp));
            // The first fragment shows all.
            send(&fragment(17, 0, true, 20 + number, &udp[..8]));
            send(&fragment(17, 8, false, 20 + number, &udp[8..]));
        }
        let received = |socket: &std::net::UdpSocket| uninterrupted(|| socket.recv(&mut [0; 64]));
        assert_eq!(received(&other).unwrap(), 16);
        // The earlier packets have been judged by now.
        [&other, &overlay].iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
        assert!(received(&other).is_err());
        assert!(received(&overlay).is_err());
        let counted = guard.counters().await.unwrap();
        assert_eq!((counted.fragments.packets, counted.input.packets), (4, 1), "{counted:?}");
    });
}

const INET6: rustix::net::AddressFamily = rustix::net::AddressFamily::INET6;
const RAW: rustix::net::SocketType = rustix::net::SocketType::RAW;
const FRAGMENT: rustix::net::Protocol = rustix::net::ipproto::FRAGMENT;

fn fragment(next: u8, offset: u16, more: bool, number: u32, part: &[u8]) -> Vec<u8> {
    let place = (offset | u16::from(more)).to_be_bytes();
    [&[next, 0], &place[..], &number.to_be_bytes(), part].concat()
}

/// A UDP datagram of 16 bytes with its checksum.
fn datagram(from: std::net::Ipv6Addr, to: std::net::Ipv6Addr, port: u16) -> Vec<u8> {
    let payload = [0x5a; 16];
    let length = 24_u16;
    let [a, b] = port.to_be_bytes();
    let mut udp = [&[0x30, 0x39, a, b, 0, length as u8, 0, 0], &payload[..]].concat();
    let pseudo = [&from.octets()[..], &to.octets(), &[0, 0, 0, length as u8, 0, 0, 0, 17]].concat();
    let words = pseudo.chunks(2).chain(udp.chunks(2));
    let mut sum: u32 = words.map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    udp[6..8].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    udp
}

#[test]
fn no_container_sends_with_the_priority_of_what_weft_sends() {
    on_a_host(|| async {
        let far = Container::new();
        far.plug("far", "198.51.100.1/24");
        run("ip", &["address", "add", "198.51.100.254/24", "dev", "far"]);
        assert!(wait_until(|| far.succeeds("ping", &["-c", "1", "-W", "1", "198.51.100.254"])));
        far.run(
            "nft",
            &["add table inet its; \
               add chain inet its output { type filter hook output priority 0; }; \
               add rule inet its output udp dport 9999 meta priority set 5745:4650 counter"],
        );
        run(
            "nft",
            &["add table inet see; \
               add chain inet see input { type filter hook input priority 0; }; \
               add rule inet see input udp dport 9999 meta priority 5745:4650 counter"],
        );
        let here = std::net::UdpSocket::bind("0.0.0.0:9999").unwrap();
        here.set_read_timeout(Some(RESTORED)).unwrap();
        let sender = far.inside(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap());
        sender.send_to(b"high", "198.51.100.254:9999").unwrap();
        assert_eq!(uninterrupted(|| here.recv(&mut [0; 64])).unwrap(), 4);
        let sent = far.run("nft", &["list", "table", "inet", "its"]);
        assert!(sent.contains("priority set 5745:4650 counter packets 1 "), "{sent}");
        let seen = run("nft", &["list", "table", "inet", "see"]);
        assert!(seen.contains("priority 5745:4650 counter packets 0 "), "{seen}");
    });
}

#[test]
fn counts_survive_a_repair() {
    on_a_host(|| async {
        run("ip", &["address", "add", "192.0.2.254/24", "dev", "lo"]);
        let mut guard = new_guard();
        guard.ensure(&[]).await.unwrap();
        let sender = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        let _ = sender.send_to(b"plain", "192.0.2.254:6787");
        let before = guard.counters().await.unwrap();
        assert_eq!(before.output.packets, 1);
        run("nft", &["insert rule inet weft-guard output accept"]);
        assert!(guard.ensure(&[]).await.unwrap());
        assert_eq!(guard.counters().await.unwrap(), before);
        let _ = sender.send_to(b"plain", "192.0.2.254:6787");
        assert_eq!(guard.counters().await.unwrap().output.packets, 2);
    });
}

#[test]
fn somebody_elses_table_is_left_alone() {
    on_a_host(|| async {
        run("nft", &["add table inet weft-guard; add chain inet weft-guard output"]);
        let before = run("nft", &["list", "ruleset"]);
        let mut guard = new_guard();
        let error = guard.ensure(&[]).await.unwrap_err();
        assert!(matches!(error, KernelError::TableTaken { .. }), "{error}");
        let error = guard.remove().await.unwrap_err();
        assert!(matches!(error, KernelError::TableTaken { .. }), "{error}");
        assert_eq!(run("nft", &["list", "ruleset"]), before);
    });
}

#[test]
fn our_tables_go_though_another_program_has_taken_one() {
    on_a_host(|| async {
        let kernel = Kernel::new().unwrap();
        Guard::new(kernel.clone(), &PORTS).ensure(&[]).await.unwrap();
        GroupLimit::new(kernel.clone(), &PORTS).unwrap().ensure().await.unwrap();
        run("nft", &["delete table inet weft-guard; add table inet weft-guard"]);
        let error = weft_kernel::engine::remove_all(&kernel, BRIDGE).await.unwrap_err();
        assert!(matches!(error, KernelError::TableTaken { .. }), "{error}");
        assert_eq!(run("nft", &["list", "tables"]).trim(), "table inet weft-guard");
    });
}

#[test]
fn too_many_trusted_addresses_are_refused_and_many_fit() {
    on_a_host(|| async {
        let mut guard = new_guard();
        let many: Vec<IpAddr> =
            (0..=4096u16).map(|n| IpAddr::from([10, 9, (n >> 8) as u8, n as u8])).collect();
        let error = guard.ensure(&many).await.unwrap_err();
        assert!(matches!(error, KernelError::TableFull { limit: 4096, .. }), "{error}");
        guard.ensure(&many[1..]).await.unwrap();
        assert!(guard.is_whole().await.unwrap());
    });
}
