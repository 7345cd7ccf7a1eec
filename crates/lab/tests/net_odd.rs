//! Traffic that containers seldom send, from real kernels to real kernels: checksums that the container
//! computes itself, and wrong ones; VLAN tags; IPv6 extension headers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use weft_bench::sandbox::Container;
use weft_lab::net::capture::{Capture, contains, tshark};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, attainable_bps, namespace, probe, tcp_counter, wait_ping};

const MODES: [[&str; 4]; 2] = [
    ["--engine", "userspace", "--port-mode", "bridge"],
    ["--engine", "userspace", "--port-mode", "direct"],
];
const SETTLE: Duration = Duration::from_secs(15);
const PORT: u16 = 5_001;

/// Two hosts and a container of each, with a path that carries.
fn pair(mode: &[&str]) -> anyhow::Result<(Lab, Container, Container)> {
    pair_with(mode, &[])
}

/// The same, attached with further arguments.
fn pair_with(mode: &[&str], arguments: &[&str]) -> anyhow::Result<(Lab, Container, Container)> {
    let lab = Lab::pair(mode)?;
    let one = lab.host(0).add_container_with("c1", arguments)?;
    let two = lab.host(1).add_container_with("c2", arguments)?;
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    Ok((lab, one, two))
}

#[test]
fn containers_without_checksum_offload_reach_each_other() -> anyhow::Result<()> {
    for mode in MODES {
        let (_lab, one, two) = pair(&mode)?;
        for container in [&one, &two] {
            let off = ["ethtool", "-K", "weft0", "tx", "off", "rx", "off"];
            container.exec(&off)?.success()?;
            let features = container.exec(&["ethtool", "-k", "weft0"])?.success()?.stdout;
            assert!(features.contains("tx-checksumming: off"), "{features}");
        }
        let (here, there) = (namespace(&one), namespace(&two));
        for length in [1, 1_000, 1_360, 9_000, 60_000] {
            let (from, to) = (one.ipv4()?.into(), two.ipv4()?.into());
            probe::datagram_arrives((&here, from), (&there, to), length)?;
            let (from, to) = (two.ipv6()?.into(), one.ipv6()?.into());
            probe::datagram_arrives((&there, from), (&here, to), length)?;
        }
        let _server = Server::start(&two)?;
        let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
        assert!(iperf::received_bps(&report) > attainable_bps(1e7), "{report}");
        assert_eq!(tcp_counter(&two, "TcpInCsumErrors")?, 0, "{mode:?}");
    }
    Ok(())
}

/// Sends a UDP packet of 4 bytes with a checksum of its sender's choice; 0 is none.
fn send_with_checksum(from: &Container, to: &Container, checksum: u16) -> anyhow::Result<()> {
    let fields = [4_000, PORT, 12, checksum].map(u16::to_be_bytes).concat();
    let packet: String =
        [&fields[..], b"data"].concat().iter().map(|byte| format!("\\{byte:03o}")).collect();
    let send = format!("printf '{packet}' | socat -u - IP4-SENDTO:{}:17", to.ipv4()?);
    from.exec(&["sh", "-ec", &send])?.success()?;
    Ok(())
}

#[test]
fn a_wrong_checksum_arrives_as_wrong_as_it_was_sent() -> anyhow::Result<()> {
    for mode in MODES {
        let (_lab, one, two) = pair(&mode)?;
        let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, PORT).into())?;
        receiver.set_read_timeout(Some(Duration::from_millis(300)))?;
        assert_eq!(tcp_counter(&two, "UdpInCsumErrors")?, 0);
        // At least one of two adjacent values is wrong, for any addresses.
        for checksum in [0xdead, 0xdeae] {
            send_with_checksum(&one, &two, checksum)?;
            let _ = probe::expect_datagram(&receiver, b"data");
        }
        let wrong = tcp_counter(&two, "UdpInCsumErrors")?;
        assert!(wrong >= 1, "{mode:?}: a wrong checksum was made right");
        send_with_checksum(&one, &two, 0)?;
        receiver.set_read_timeout(Some(SETTLE))?;
        probe::expect_datagram(&receiver, b"data")?;
        assert_eq!(tcp_counter(&two, "UdpInCsumErrors")?, wrong);
    }
    Ok(())
}

/// The Ethernet address of a container's interface.
fn mac(container: &Container) -> anyhow::Result<Vec<u8>> {
    let text = container.exec(&["cat", "/sys/class/net/weft0/address"])?.success()?.stdout;
    let bytes: Result<Vec<u8>, _> =
        text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16)).collect();
    Ok(bytes?)
}

/// A file of this test; they live and end with its hosts.
fn file(lab: &Lab, name: &str) -> PathBuf {
    lab.sandbox.directory().join(name)
}

/// Traffic that arrives on a container's interface while `send` runs, as a capture in `file`.
fn captured(
    (container, file): (&Container, &Path),
    filter: &str,
    send: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Vec<u8>> {
    let capture = Capture::start(container.netns(), "weft0", file, filter)?;
    send()?;
    capture.finish()
}

#[test]
fn frames_with_vlan_tags_arrive_as_they_were_sent() -> anyhow::Result<()> {
    // Priority and number of the network; one tag, and one in another (IEEE 802.1ad).
    const TAGS: [&[u8]; 2] = [&[0x81, 0, 0xa0, 7], &[0x88, 0xa8, 0, 9, 0x81, 0, 0xe0, 7]];
    /// For experiments (IEEE 802).
    const TYPE: [u8; 2] = [0x88, 0xb5];
    for mode in MODES {
        let (lab, one, two) = pair_with(&mode, &["--allow-macs"])?;
        let mut frames = Vec::new();
        for (number, tags) in TAGS.iter().enumerate() {
            for length in [50, 1_372] {
                let payload: Vec<u8> = (0..length).map(|at| (at * 31 + number) as u8).collect();
                frames.push([&mac(&two)?, &mac(&one)?, *tags, &TYPE, &payload].concat());
            }
        }
        let sent = file(&lab, "frame");
        let got = captured((&two, &file(&lab, "vlan.pcap")), "ether[0] != 255", || {
            for frame in &frames {
                std::fs::write(&sent, frame)?;
                let from = format!("OPEN:{}", sent.display());
                one.exec(&["socat", "-u", &from, "INTERFACE:weft0"])?.success()?;
            }
            Ok(())
        })?;
        for frame in &frames {
            let tags = &frame[12..frame.len().min(24)];
            let length = frame.len();
            assert!(contains(&got, frame), "{mode:?}: {length} bytes, {tags:x?}");
        }
    }
    Ok(())
}

#[test]
fn tcp_over_ipv6_with_extension_headers_arrives_as_it_was_sent() -> anyhow::Result<()> {
    const PORT: u16 = 5_003;
    /// Hop-by-hop and destination options: a PadN of eight bytes each (RFC 8200 section 4.2).
    const OPTIONS: &str = "setsockopt=41:54:x0000010400000000,setsockopt=41:59:x0000010400000000";
    for mode in MODES {
        let (lab, one, two) = pair(&mode)?;
        let [sent, got] = ["sent", "got"].map(|name| file(&lab, name));
        let bytes: Vec<u8> =
            (0..3_000_000_u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        std::fs::write(&sent, &bytes)?;
        let listen = format!("TCP6-LISTEN:{PORT}");
        let create = format!("CREATE:{}", got.display());
        let mut receiver = two.netns().spawn(&["socat", "-d", "-d", "-u", &listen, &create])?;
        receiver.line_with("listening on", SETTLE)?;
        let capture = file(&lab, "ipv6.pcap");
        captured((&two, &capture), "ip6 and not multicast", || {
            let to = format!("TCP6:[{}]:{PORT},{OPTIONS}", two.ipv6()?);
            let from = format!("OPEN:{}", sent.display());
            one.exec(&["socat", "-u", "-b", "65536", &from, &to])?.success()?;
            receiver.wait(SETTLE)?;
            Ok(())
        })?;
        assert!(std::fs::read(&got)? == bytes, "{mode:?}: other bytes arrived");
        let with = "ipv6.hopopts and ipv6.dstopts and tcp.len > 0";
        let lengths = tshark(&capture, &["-Y", with, "-T", "fields", "-e", "tcp.len"])?;
        let lengths: Vec<usize> = lengths.lines().filter_map(|line| line.parse().ok()).collect();
        let carried: usize = lengths.iter().sum();
        assert!(carried > bytes.len() / 2, "{mode:?}: {carried} bytes behind extension headers");
        assert_eq!(tcp_counter(&two, "TcpInCsumErrors")?, 0, "{mode:?}");
    }
    Ok(())
}
