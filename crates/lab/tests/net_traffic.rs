//! Traffic between containers on two hosts, judged by ping, iperf3 and the sockets at both ends.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use weft_bench::sandbox::Host;
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, address_pairs, attainable_bps, counter, namespace, probe};

#[test]
fn ping_and_iperf3_both_ways_over_ipv4_and_ipv6() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let (server_one, server_two) = (Server::start(&one)?, Server::start(&two)?);
    for (from, to) in [(&one, &two), (&two, &one)] {
        for address in [IpAddr::V4(to.ipv4()?), IpAddr::V6(to.ipv6()?)] {
            from.ping(address)?;
            let tcp = iperf::run(from, address, &["-t", "1"])?;
            assert!(iperf::received_bps(&tcp) > attainable_bps(1e8), "TCP to {address}: {tcp}");
        }
    }
    drop((server_one, server_two));
    Ok(())
}

#[test]
fn every_datagram_of_a_stream_arrives_both_ways_over_ipv4_and_ipv6() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    probe::streams_arrive_whole(&one, &two)?;
    // The check itself: it misses what is lost.
    two.exec(&["nft", "add table inet lab"])?.success()?;
    two.exec(&["nft", "add chain inet lab lose { type filter hook input priority 0; }"])?
        .success()?;
    let lose = "add rule inet lab lose udp length > 1000 numgen inc mod 48 == 0 drop";
    two.exec(&["nft", lose])?.success()?;
    let (here, there) = (namespace(&one), namespace(&two));
    let (source, address) = (one.ipv4()?.into(), two.ipv4()?.into());
    let arrived = probe::stream_arrives((&here, source), (&there, address))?;
    assert!(arrived < probe::STREAM_DATAGRAMS, "all arrive of which some are dropped");
    Ok(())
}

#[test]
fn datagrams_of_every_size_arrive_as_they_were_sent() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let (here, there) = (namespace(&one), namespace(&two));
    for (from, to) in address_pairs(&one, &two)? {
        for length in [1, 17, 1000, 1300, 1360, 1361, 1500, 4000, 9000, 30_000, 60_000] {
            probe::datagram_arrives((&here, from), (&there, to), length)
                .map_err(|error| anyhow::anyhow!("{length} bytes from {from} to {to}: {error}"))?;
        }
    }
    Ok(())
}

#[test]
fn broadcast_and_multicast_reach_containers_of_the_other_host() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let (here, there) = (namespace(&one), namespace(&two));

    let wildcard = (Ipv4Addr::UNSPECIFIED, 5001).into();
    let receiver = probe::udp_in(&there, wildcard)?;
    let sender = probe::udp_in(&here, (one.ipv4()?, 0).into())?;
    sender.set_broadcast(true)?;
    sender.send_to(b"to all", (Ipv4Addr::new(10, 47, 255, 255), 5001))?;
    probe::expect_datagram(&receiver, b"to all")?;

    let group = Ipv4Addr::new(239, 1, 2, 3);
    let receiver = probe::multicast_receiver(&there, two.ipv4()?, group, 5002)?;
    sender.send_to(b"to a group", (group, 5002))?;
    probe::expect_datagram(&receiver, b"to a group")?;

    let group: Ipv6Addr = "ff05::1:3".parse()?;
    let receiver = probe::multicast_receiver6(&there, probe::interface_index(&two)?, group, 5003)?;
    let sender = probe::udp_in(&here, (one.ipv6()?, 0).into())?;
    sender.send_to(b"to a group of IPv6", (group, 5003))?;
    probe::expect_datagram(&receiver, b"to a group of IPv6")?;
    Ok(())
}

#[test]
fn containers_of_one_host_reach_each_other_without_the_daemon() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let one = lab.host(0).add_container("c1")?;
    let two = lab.host(0).add_container("c2")?;
    let server = Server::start(&two)?;
    let before = counter(lab.host(0), "tap_reads")?;
    let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
    let through_daemon = counter(lab.host(0), "tap_reads")? - before;
    let carried = iperf::received_bps(&report) / 8.0;
    assert!(carried > attainable_bps(1e8), "local TCP is slow: {report}");
    assert!(through_daemon < 100, "{through_daemon} super-packets passed the daemon");
    lab.host(0).stop_daemon()?;
    one.ping(two.ipv4()?.into())?;
    drop(server);
    Ok(())
}

#[test]
fn an_ipv6_underlay_carries_both_families() -> anyhow::Result<()> {
    let sandbox =
        weft_bench::sandbox::Sandbox::new(&weft_bench::sandbox::SandboxOptions::default())?;
    let password = sandbox.password_file();
    let password = password.to_string_lossy();
    let first = format!("[{}]:6783", sandbox.host(0).ipv6());
    sandbox.host(0).start_daemon(&["--password-file", &password])?;
    sandbox.host(1).start_daemon(&["--password-file", &password, &first])?;
    let lab = Lab { sandbox };
    lab.wait_active()?;
    let connections = lab.host(1).weft_json(&["status", "connections"])?;
    let address = connections[0]["address"].as_str().unwrap_or_default();
    assert!(address.contains("2001:db8"), "{connections}");
    let (one, two) = lab.containers()?;
    one.ping(two.ipv4()?.into())?;
    one.ping(two.ipv6()?.into())?;
    let _server = Server::start(&two)?;
    let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
    assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
    Ok(())
}

#[test]
fn the_other_cipher_carries_traffic_where_it_is_preferred() -> anyhow::Result<()> {
    let lab = Lab::pair(&["--cipher", "chacha20-poly1305"])?;
    let (one, two) = lab.containers()?;
    let connections = lab.host(0).weft_json(&["status", "connections"])?;
    assert_eq!(connections[0]["cipher"], "chacha20-poly1305", "{connections}");
    assert_eq!(connections[0]["encrypted"], true, "{connections}");
    one.ping(two.ipv4()?.into())?;
    let _server = Server::start(&two)?;
    let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
    assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
    Ok(())
}

/// Runs and datagrams that a host has sent.
fn sent(host: &Host) -> anyhow::Result<(u64, u64)> {
    let report = host.weft_json(&["report"])?;
    let count = |name: &str| report["counters"][name].as_u64();
    let both = count("runs_sent").zip(count("datagrams_sent"));
    both.ok_or_else(|| anyhow::anyhow!("no such counters: {report}"))
}

#[test]
fn without_offloads_each_packet_goes_by_itself() -> anyhow::Result<()> {
    for offloads in [true, false] {
        let options = ["--engine", "userspace", "--no-offloads"];
        let lab = Lab::pair(&options[..if offloads { 2 } else { 3 }])?;
        let (one, two) = lab.containers()?;
        let _server = Server::start(&two)?;
        let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
        assert!(iperf::received_bps(&report) > attainable_bps(1e7), "{report}");
        for host in lab.sandbox.hosts() {
            let (runs, datagrams) = sent(host)?;
            assert!(datagrams > 0 && offloads == (runs < datagrams), "{runs} of {datagrams}");
        }
    }
    Ok(())
}
