//! What containers seldom send, from real kernels to real kernels: checksums that the container computes
//! itself, and wrong ones.

use std::time::Duration;

use weft::sandbox::Container;
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
    let lab = Lab::pair(mode)?;
    let (one, two) = lab.containers()?;
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
        // Of two neighbours one is wrong at least, whatever the addresses.
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
