//! The MTU of containers and of paths, and the fate of packets that are too long.

use std::net::IpAddr;
use std::time::Duration;

use weft_bench::sandbox::{Sandbox, SandboxOptions};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, attainable_bps, counter, namespace, probe, wait_connection, wait_ping};

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

/// In a guest with IPsec, the kernel may answer instead.
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

/// Two hosts with links of this MTU, whose links and packets go over IPv4 or IPv6.
fn pair_over(mtu: u32, over_ipv6: bool, arguments: [&[&str]; 2]) -> anyhow::Result<Lab> {
    let sandbox = Sandbox::new(&SandboxOptions { mtu, ..SandboxOptions::default() })?;
    let password_file = sandbox.password_file();
    let password = ["--password-file", &password_file.to_string_lossy()];
    sandbox.host(0).start_daemon(&[&password, arguments[0]].concat())?;
    let first = sandbox.host(0);
    let first: IpAddr = if over_ipv6 { first.ipv6().into() } else { first.ipv4().into() };
    sandbox.host(1).start_daemon(&[&password, arguments[1], &[&first.to_string()]].concat())?;
    let lab = Lab { sandbox };
    lab.wait_active()?;
    Ok(lab)
}

#[test]
fn ipv6_has_its_1280_bytes_over_links_of_no_more() -> anyhow::Result<()> {
    for (over_ipv6, mode, carried) in [(false, "direct", 1_188), (true, "bridge", 1_168)] {
        let options: &[&str] = &["--engine", "userspace", "--port-mode", mode];
        let lab = pair_over(1_280, over_ipv6, [options; 2])?;
        let (one, two) = lab.containers()?;
        assert_eq!(one.mtu()?, 1_280);
        let known = |c: &serde_json::Value| c["mtu"] == carried;
        wait_connection(lab.host(0), "the path's MTU", Duration::from_secs(20), known)?;
        wait_connection(lab.host(1), "the path's MTU", Duration::from_secs(20), known)?;
        wait_ping(&one, two.ipv6()?.into(), Duration::from_secs(15))?;
        let (here, there) = (namespace(&one), namespace(&two));
        // A packet of 1,280 bytes, which no answer could make shorter.
        let (from, to) = (one.ipv6()?.into(), two.ipv6()?.into());
        probe::datagram_arrives((&here, from), (&there, to), 1_232)?;
        probe::datagram_arrives((&there, to), (&here, from), 1_232)?;
        assert!(counter(lab.host(0), "cut_outside")? >= 1, "{mode}");
        assert!(counter(lab.host(1), "cut_outside")? >= 1, "{mode}");
        // A connection learns the size that fits, and uses it without fragments.
        let before = counter(lab.host(0), "cut_outside")?;
        let _server = Server::start(&two)?;
        for address in [two.ipv4()?.into(), two.ipv6()?.into()] {
            let report = iperf::run(&one, address, &["-t", "1"])?;
            assert!(iperf::received_bps(&report) > attainable_bps(2e7), "{report}");
            let headers = if address.is_ipv6() { 60 } else { 40 };
            let size = report["start"]["tcp_mss_default"].as_u64();
            assert!(size <= Some(carried - headers), "{}", report["start"]);
        }
        assert_eq!(counter(lab.host(0), "cut_outside")?, before, "{mode}: TCP in fragments");
        let status = lab.host(0).weft(&["status"])?.success()?.stdout;
        assert!(status.contains(&format!("{carried} towards ")), "{status}");
        assert!(status.contains("in two pieces"), "{status}");
    }
    Ok(())
}

/// The bridge drops without a word what a container's port does not take.
#[test]
fn packets_too_big_for_the_peers_containers_are_answered() -> anyhow::Result<()> {
    let options: &[&str] = &["--engine", "userspace", "--port-mode", "bridge"];
    let smaller = [options, &["--mtu", "1300"]].concat();
    let lab = pair_over(1_500, false, [options, &smaller])?;
    let (one, two) = lab.containers()?;
    assert_eq!((one.mtu()?, two.mtu()?), (1_388, 1_300));
    let known = |c: &serde_json::Value| c["mtu"] == 1_300;
    wait_connection(lab.host(0), "the containers' MTU", Duration::from_secs(20), known)?;
    for to in [two.ipv4()?.into(), two.ipv6()?.into()] {
        wait_ping(&one, to, Duration::from_secs(15))?;
        let to = to.to_string();
        let ping = |size: &str| {
            one.exec(&["ping", "-n", "-M", "do", "-s", size, "-c", "2", "-W", "1", &to])
        };
        let output = ping("1330")?;
        let text = format!("{}{}", output.stdout, output.stderr);
        assert!(text.contains("mtu") || text.contains("too long"), "no answer came: {text}");
        ping("1252")?.success()?;
    }
    assert!(counter(lab.host(0), "too_long_answered")? >= 2);
    let status = lab.host(0).weft(&["status"])?.success()?.stdout;
    assert!(status.contains("its containers' MTU is 1300"), "{status}");
    Ok(())
}
