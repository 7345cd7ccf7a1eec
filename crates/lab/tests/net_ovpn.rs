//! Wire format `ovpn` between hosts, moved by the vector engine.

use std::time::Duration;

use weft_lab::net::capture::{Capture, contains, tshark};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, attainable_bps, counter, namespace, probe, wait_connection, workers};

/// Long enough never to occur by chance, short enough to stand in one packet.
const PATTERN: &[u8] = b"this sentence must never be readable on the wire between two hosts";
const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn containers_reach_each_other_in_openvpns_packets() -> anyhow::Result<()> {
    let lab = Lab::pair(&["--format", "ovpn", "--engine", "userspace"])?;
    let (one, two) = lab.containers()?;
    for (from, to) in [(&one, &two), (&two, &one)] {
        from.ping(to.ipv4()?.into())?;
        from.ping(to.ipv6()?.into())?;
    }
    let connections = lab.host(0).weft_json(&["status", "connections"])?;
    let connection = &connections[0];
    assert_eq!(
        (&connection["format"], &connection["engine"]),
        (&"ovpn".into(), &"userspace".into())
    );
    // 122 bytes around each packet, over IPv4.
    assert_eq!(connection["mtu"], 1_376, "{connection}");
    assert_eq!(one.mtu()?, 1_356);

    let file = lab.sandbox.directory().join("wire.pcap");
    let capture = Capture::start(lab.host(0).netns(), "eth0", &file, "udp port 6784")?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    for _ in 0..10 {
        sender.send_to(PATTERN, receiver.local_addr()?)?;
        probe::expect_datagram(&receiver, PATTERN)?;
    }
    let bytes = capture.finish()?;
    assert!(!contains(&bytes, &PATTERN[..16]), "a part of the traffic is readable");
    // Without the keepalives, which have one byte.
    let data = ["-d", "udp.port==6784,openvpn", "-Y", "udp.length > 9"];
    let fields = [&data[..], &["-T", "fields", "-e", "openvpn.opcode"]].concat();
    let opcodes = tshark(&file, &fields)?;
    assert!(opcodes.lines().count() >= 10, "the traffic is not in the capture");
    let are_data = opcodes.lines().all(|opcode| matches!(opcode.trim(), "9" | "0x09" | "0x9"));
    assert!(are_data, "tshark sees data packets of OpenVPN, version 2: {opcodes:?}");

    let _servers = (Server::start(&one)?, Server::start(&two)?);
    iperf::run(&one, two.ipv4()?.into(), &["-t", "2", "-P", "2", "--bidir"])?;
    iperf::run(&two, one.ipv4()?.into(), &["-t", "1", "-u", "-b", "50M", "-l", "1200"])?;
    Ok(())
}

#[test]
fn a_rekey_in_this_format_loses_nothing() -> anyhow::Result<()> {
    let ovpn = ["--format", "ovpn", "--engine", "userspace"];
    let lab = Lab::pair(
        &[&ovpn[..], &["--rekey-seconds", "1", "--cipher", "chacha20-poly1305"]].concat(),
    )?;
    let (one, two) = lab.containers()?;
    one.ping(two.ipv4()?.into())?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    let before = counter(lab.host(1), "rekeys")?;
    let begun = std::time::Instant::now();
    let mut number = 0_u32;
    while counter(lab.host(1), "rekeys")? < before + 5 {
        anyhow::ensure!(begun.elapsed() < LIMIT, "it does not rekey");
        for _ in 0..200 {
            number += 1;
            sender.send_to(&number.to_be_bytes(), receiver.local_addr()?)?;
            probe::expect_datagram(&receiver, &number.to_be_bytes())?;
        }
    }
    Ok(())
}

#[test]
fn lanes_and_helpers_carry_this_format_too() -> anyhow::Result<()> {
    let threads = ["--workers", "2", "--helpers", "1", "--rekey-seconds", "2"];
    let ovpn = ["--format", "ovpn", "--engine", "userspace"];
    let lab = Lab::pair(&[&ovpn[..], &threads].concat())?;
    let (one, two) = lab.containers()?;
    let _servers = (Server::start(&one)?, Server::start(&two)?);
    workers::use_all(lab.host(1), 2, || {
        for (from, to) in [(&one, &two), (&two, &one)] {
            let report = iperf::run(from, to.ipv4()?.into(), &["-t", "3", "-P", "8"])?;
            assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
        }
        Ok(())
    })?;
    assert!(counter(lab.host(1), "units_helped")? > 0, "no helper has done anything");
    for host in lab.sandbox.hosts() {
        for reason in ["drop_replayed", "drop_forged", "drop_unknown_spi", "drop_too_old"] {
            assert_eq!(counter(host, reason)?, 0, "{reason}");
        }
    }
    Ok(())
}

/// A host that has `esp` too uses `ovpn` towards a host with nothing else, and reports it.
#[test]
fn hosts_of_either_format_meet_where_one_takes_both() -> anyhow::Result<()> {
    let sandbox =
        weft_bench::sandbox::Sandbox::new(&weft_bench::sandbox::SandboxOptions::default())?;
    let password = sandbox.password_file();
    let password = password.to_string_lossy();
    let first = sandbox.host(0).ipv4().to_string();
    let common = ["--engine", "userspace", "--password-file", &password];
    sandbox.host(0).start_daemon(&common)?;
    sandbox.host(1).start_daemon(&[&common[..], &["--format", "ovpn", &first]].concat())?;
    let lab = Lab { sandbox };
    lab.wait_active()?;
    let (one, two) = lab.containers()?;
    // The first host's containers have the larger MTU; packets too long for the path are fragmented.
    let _server = Server::start(&two)?;
    iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
    two.ping(one.ipv4()?.into())?;
    let connections = lab.host(0).weft_json(&["status", "connections"])?;
    assert_eq!(connections[0]["format"], "ovpn");
    let paths = lab.host(0).weft_json(&["report"])?["paths"].clone();
    let formats = paths.as_array().into_iter().flatten().map(|path| &path["format"]);
    let formats: Vec<_> = formats.filter(|format| !format.is_null()).collect();
    assert_eq!(formats, ["ovpn"], "one path, and no other beside it: {paths}");
    Ok(())
}

#[test]
fn hosts_without_a_common_format_say_so() -> anyhow::Result<()> {
    let sandbox =
        weft_bench::sandbox::Sandbox::new(&weft_bench::sandbox::SandboxOptions::default())?;
    let password = sandbox.password_file();
    let password = password.to_string_lossy();
    let first = sandbox.host(0).ipv4().to_string();
    let common = ["--engine", "userspace", "--password-file", &password];
    sandbox.host(0).start_daemon(&[&common[..], &["--format", "esp"]].concat())?;
    sandbox.host(1).start_daemon(&[&common[..], &["--format", "ovpn", &first]].concat())?;
    let lab = Lab { sandbox };
    wait_connection(lab.host(1), "a reason", LIMIT, |connection| {
        connection["reason"] == "no common format"
    })?;
    Ok(())
}
