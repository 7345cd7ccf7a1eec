//! The MTU: of containers, of paths, and what happens to a packet that is too long.

use std::time::Duration;

use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, attainable_bps, counter, wait_connection};

#[test]
fn the_container_mtu_is_the_hosts_link_less_the_overhead_unless_set() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    assert_eq!(lab.host(0).add_container("c1")?.mtu()?, 1388);
    drop(lab);
    let lab = Lab::pair(&["--mtu", "1300"])?;
    assert_eq!(lab.host(0).add_container("c1")?.mtu()?, 1300);
    Ok(())
}

/// 45 datagrams of 1,452 bytes are one run; a 46th would go by itself.
#[test]
fn a_super_packet_of_a_container_is_one_run() -> anyhow::Result<()> {
    for mode in ["bridge", "direct"] {
        let lab = Lab::pair(&["--engine", "userspace", "--port-mode", mode])?;
        let container = lab.host(0).add_container("c1")?;
        let links = container.netns().ip("-d -j link show weft0")?.json()?;
        let link = &links[0];
        assert_eq!((&link["mtu"], &link["gso_max_segs"]), (&1388.into(), &45.into()), "{links}");
    }
    Ok(())
}

/// The labs' hosts have no default route, so that any device could be the link to other hosts.
#[test]
fn a_device_that_leads_to_no_peer_narrows_no_path() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let whole = |c: &serde_json::Value| c["mtu"].as_u64().is_some_and(|mtu| mtu >= 1388);
    wait_connection(lab.host(0), "the whole MTU", Duration::from_secs(10), whole)?;
    let netns = lab.host(0).netns();
    netns.ip("link add tunnel0 mtu 1300 type veth peer name tunnel1 mtu 1300")?;
    netns.ip("link set tunnel0 up")?;
    netns.ip("link set tunnel1 up")?;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(100));
        let connection = wait_connection(lab.host(0), "any", Duration::from_secs(1), |_| true)?;
        assert!(whole(&connection), "{connection}");
    }
    Ok(())
}

#[test]
fn a_narrower_path_is_found_by_probing_and_told_to_containers_by_icmp() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    is_told_of_a_narrower_path(&lab)
}

/// In a guest with IPsec the kernel too may be the one that answers.
#[test]
fn the_vector_engine_answers_what_is_too_long() -> anyhow::Result<()> {
    let lab = Lab::pair(&["--engine=userspace"])?;
    is_told_of_a_narrower_path(&lab)?;
    assert!(counter(lab.host(0), "too_long_answered")? >= 1, "no answer was given");
    Ok(())
}

fn is_told_of_a_narrower_path(lab: &Lab) -> anyhow::Result<()> {
    let (one, two) = lab.containers()?;
    one.ping(two.ipv4()?.into())?;
    for host in [lab.host(0), lab.host(1)] {
        host.netns().ip("link set eth0 mtu 1400")?;
    }
    let narrow = |c: &serde_json::Value| {
        c["state"] == "active" && c["mtu"].as_u64().is_some_and(|mtu| mtu <= 1308)
    };
    let connection =
        wait_connection(lab.host(0), "a smaller MTU", Duration::from_secs(30), narrow)?;
    assert!(connection["mtu"].as_u64() >= Some(1200), "{connection}");
    let to = two.ipv4()?.to_string();
    // 1360 bytes and a header of 28: the container may send it, the path does not carry it.
    let output = one.exec(&["ping", "-n", "-M", "do", "-s", "1360", "-c", "2", "-W", "1", &to])?;
    let text = format!("{}{}", output.stdout, output.stderr);
    assert!(text.contains("mtu") || text.contains("Message too long"), "{text}");
    let to6 = two.ipv6()?.to_string();
    one.exec(&["ping", "-n", "-M", "do", "-s", "1340", "-c", "2", "-W", "1", &to6])?;
    let route = one.exec(&["ip", "-6", "route", "get", &to6])?.success()?.stdout;
    assert!(route.contains("mtu"), "no IPv6 path MTU was learnt: {route}");
    // Without DF it is cut, not lost.
    one.exec(&["ip", "route", "flush", "cache"])?;
    one.exec(&["ping", "-n", "-M", "dont", "-s", "1360", "-c", "2", "-i", "0.2", "-W", "2", &to])?
        .success()?;
    let _server = Server::start(&two)?;
    let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
    assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
    Ok(())
}
