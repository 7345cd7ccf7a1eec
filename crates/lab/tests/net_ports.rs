//! Direct ports: traffic to other hosts bypasses the switch, other traffic does not, and containers notice no
//! difference.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use serde_json::Value;
use weft_api::call;
use weft_api::{Client, Traffic};
use weft_bench::sandbox::{Container, Host, SandboxError, try_wait_until};
use weft_io::namespace::{Namespace, run_in};
use weft_io::uninterrupted;
use weft_lab::net::guest::host::Work;
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{
    Lab, Stopped, address_pairs, attainable_bps, counter, keep_order, namespace, probe, slowness,
    wait_ping, workers,
};

/// Kernels with IPsec would take the traffic.
const DIRECT: [&str; 4] = ["--engine", "userspace", "--port-mode", "direct"];
const BRIDGE: [&str; 4] = ["--engine", "userspace", "--port-mode", "bridge"];
/// How long what follows from a change may take.
const SETTLE: Duration = Duration::from_secs(15);
/// How long nothing more may come.
const QUIET: Duration = Duration::from_millis(300);

/// How each container of a host is attached.
fn ports(host: &Host) -> anyhow::Result<Vec<String>> {
    let list = host.weft_json(&["ps"])?;
    let list = list.as_array().cloned().unwrap_or_default();
    Ok(list.iter().filter_map(|one| one["port"].as_str().map(str::to_owned)).collect())
}

/// Bytes that have crossed the switch's ports for containers, both ways.
fn switched(host: &Host) -> anyhow::Result<u64> {
    let links = host.netns().exec(&["ip", "-j", "-s", "link"])?.success()?.json()?;
    let links = links.as_array().cloned().unwrap_or_default();
    let is_port = |link: &&Value| link["ifname"].as_str().is_some_and(|it| it.starts_with("weftv"));
    let bytes =
        |link: &Value, way: &str| link["stats64"][way]["bytes"].as_u64().unwrap_or_default();
    Ok(links.iter().filter(is_port).map(|link| bytes(link, "rx") + bytes(link, "tx")).sum())
}

/// The devices of a container, of one host, by name.
fn devices(links: &str) -> Vec<String> {
    let name = |line: &str| line.split(['@', ' ']).next().unwrap_or_default().to_owned();
    let mut names: Vec<_> = links.lines().map(name).filter(|it| it.starts_with("weft")).collect();
    names.sort();
    names
}

fn devices_in(container: &Container) -> anyhow::Result<Vec<String>> {
    Ok(devices(&container.netns().ip("-br link")?.stdout))
}

/// Starts a host's daemon again with other options.
fn relaunch(lab: &Lab, index: usize, arguments: &[&str]) -> anyhow::Result<()> {
    let password = lab.password_file();
    let password = password.to_string_lossy();
    Ok(lab.host(index).start_daemon(&[&["--password-file", &password][..], arguments].concat())?)
}

#[test]
fn traffic_between_hosts_passes_the_switch_by() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    assert_eq!(
        (ports(lab.host(0))?, ports(lab.host(1))?),
        (vec!["direct".into()], vec!["direct".into()])
    );
    let status = lab.host(0).weft_json(&["status"])?;
    assert_eq!(status["ports"], "direct", "{status}");
    let (server_one, server_two) = (Server::start(&one)?, Server::start(&two)?);
    for (from, to) in [(&one, &two), (&two, &one)] {
        for address in [IpAddr::V4(to.ipv4()?), IpAddr::V6(to.ipv6()?)] {
            from.ping(address)?;
            let before = switched(lab.host(0))? + switched(lab.host(1))?;
            let tcp = iperf::run(from, address, &["-t", "1"])?;
            assert!(iperf::received_bps(&tcp) > attainable_bps(1e8), "TCP to {address}: {tcp}");
            let crossed = switched(lab.host(0))? + switched(lab.host(1))? - before;
            assert!(crossed < 100_000, "{crossed} bytes crossed the switches");
        }
    }
    drop((server_one, server_two));
    let (here, there) = (namespace(&one), namespace(&two));
    probe::streams_arrive_whole(&one, &two)?;
    for (from, to) in address_pairs(&one, &two)? {
        for length in [1, 1360, 1361, 9000, 60_000] {
            probe::datagram_arrives((&here, from), (&there, to), length)
                .map_err(|error| anyhow::anyhow!("{length} bytes from {from} to {to}: {error}"))?;
        }
    }
    // A packet that is too long is answered at its port.
    one.netns().ip("link set weft0 mtu 2000")?;
    let words = ["ping", "-n", "-c", "1", "-W", "2", "-M", "do", "-s", "1800"];
    let answer = one.exec(&[&words[..], &[&two.ipv4()?.to_string()]].concat())?;
    assert!(answer.stdout.contains("Frag needed"), "{}", answer.stdout);
    let top =
        lab.host(0).weft(&["top", "--count", "1", "--interval", "0.1", "--json"])?.success()?;
    let top = top.json()?;
    anyhow::ensure!(top["containers"][0]["name"].is_string(), "{top}");
    Ok(())
}

#[test]
fn workers_share_direct_ports_and_hosts_may_differ() -> anyhow::Result<()> {
    let lab = Lab::pair(&[&DIRECT[..], &["--workers", "2"]].concat())?;
    let (one, two) = lab.containers()?;
    let _servers = (Server::start(&one)?, Server::start(&two)?);
    for _ in 0..2 {
        workers::use_all(lab.host(0), 2, || {
            for (from, to) in [(&one, &two), (&two, &one)] {
                let report = iperf::run(from, to.ipv4()?.into(), &["-t", "2", "-P", "6"])?;
                assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
            }
            Ok(())
        })?;
        // The other host's containers get ports of its switch meanwhile.
        lab.host(1).stop_daemon()?;
        let first = lab.host(0).ipv4().to_string();
        relaunch(&lab, 1, &[&BRIDGE[..], &["--workers", "2", &first]].concat())?;
        lab.wait_active()?;
        assert_eq!(ports(lab.host(1))?, ["bridge"]);
        assert_eq!(devices_in(&two)?, ["weft0"]);
        wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
        one.ping(two.ipv6()?.into())?;
    }
    Ok(())
}

#[test]
fn helpers_share_a_direct_port_in_order() -> anyhow::Result<()> {
    let lab = Lab::pair(&[&DIRECT[..], &["--workers", "1", "--helpers", "3"]].concat())?;
    let (one, two) = lab.containers()?;
    keep_order([lab.host(0).netns(), lab.host(1).netns(), one.netns(), two.netns()])?;
    let _servers = (Server::start(&one)?, Server::start(&two)?);
    for (from, to) in [(&one, &two), (&two, &one)] {
        let report = iperf::run(from, to.ipv4()?.into(), &["-t", "2"])?;
        assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
    }
    for host in lab.sandbox.hosts() {
        let helped = counter(host, "units_helped")?;
        assert!(helped > 100, "helpers took {helped} units");
    }
    for container in [&one, &two] {
        let text = container.exec(&["nstat", "-asz"])?.success()?.stdout;
        for name in ["TcpExtTCPSACKReorder", "TcpExtTCPRenoReorder", "TcpExtTCPTSReorder"] {
            let line = text.lines().find(|line| line.starts_with(name));
            assert_eq!(line.and_then(|line| line.split_whitespace().nth(1)), Some("0"), "{name}");
        }
    }
    Ok(())
}

#[test]
fn on_one_host_the_switch_carries_it_with_and_without_a_daemon() -> anyhow::Result<()> {
    let lab = Lab::launched(1, &DIRECT)?;
    let host = lab.host(0);
    let (one, two) = (host.add_container("c1")?, host.add_container("c2")?);
    // A device plugged into the switch by hand, and the host itself.
    let third = lab.sandbox.add_netns("c3")?;
    let netns = third.name();
    host.netns().ip(&format!("link add by-hand type veth peer name eth0 netns {netns}"))?;
    host.netns().ip("link set by-hand master weft up")?;
    third.ip("link set eth0 mtu 1388 up")?;
    third.ip("addr add 10.47.250.3/12 dev eth0")?;
    host.netns().ip("addr add 10.47.250.4/12 dev weft")?;
    let server = Server::start(&two)?;
    let reaches = || -> anyhow::Result<()> {
        for address in [IpAddr::V4(two.ipv4()?), IpAddr::V6(two.ipv6()?)] {
            one.ping(address)?;
        }
        for other in [Ipv4Addr::new(10, 47, 250, 3), Ipv4Addr::new(10, 47, 250, 4)] {
            one.ping(other.into())?;
            two.ping(other.into())?;
        }
        let target = one.ipv4()?.to_string();
        for from in [&third, host.netns()] {
            from.exec(&["ping", "-n", "-c", "1", "-W", "2", &target])?.success()?;
        }
        Ok(())
    };
    reaches()?;
    let reads = || weft_lab::net::counter(host, "tap_reads");
    let before = reads()?;
    let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
    assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
    assert!(reads()? - before < 100, "local traffic passed the daemon");
    host.kill_daemon();
    reaches()?;
    host.start_daemon(&DIRECT)?;
    reaches()?;
    host.stop_daemon()?;
    reaches()?;
    drop(server);
    Ok(())
}

/// How often a datagram arrives, until none has come for a while.
fn arrivals(socket: &UdpSocket, first: Duration) -> anyhow::Result<usize> {
    let (mut count, mut buffer) = (0, [0; 64]);
    socket.set_read_timeout(Some(first))?;
    while uninterrupted(|| socket.recv_from(&mut buffer)).is_ok() {
        count += 1;
        socket.set_read_timeout(Some(QUIET))?;
    }
    Ok(count)
}

#[test]
fn broadcast_and_multicast_reach_everybody_else_once() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    let beside = lab.host(0).add_container("c3")?;
    for other in [&two, &beside] {
        wait_ping(&one, other.ipv4()?.into(), SETTLE)?;
    }
    let (first, group) = (SETTLE / 5 * slowness(), Ipv4Addr::new(239, 1, 2, 3));
    let group6: Ipv6Addr = "ff05::1:3".parse()?;
    for sender in [&one, &two, &beside] {
        let everybody = [&one, &two, &beside];
        let mut sockets = Vec::new();
        for container in everybody {
            let there = namespace(container);
            let all = probe::udp_in(&there, (Ipv4Addr::UNSPECIFIED, 5001).into())?;
            let some = probe::multicast_receiver(&there, container.ipv4()?, group, 5002)?;
            let index = probe::interface_index(container)?;
            let some6 = probe::multicast_receiver6(&there, index, group6, 5003)?;
            sockets.push([all, some, some6]);
        }
        let from = probe::udp_in(&namespace(sender), (sender.ipv4()?, 0).into())?;
        let from6 = probe::udp_in(&namespace(sender), (sender.ipv6()?, 0).into())?;
        from.set_broadcast(true)?;
        from.set_multicast_loop_v4(false)?;
        from6.set_multicast_loop_v6(false)?;
        // The bridge listens for members a moment after they have said so.
        std::thread::sleep(QUIET);
        from.send_to(b"all", (Ipv4Addr::new(10, 47, 255, 255), 5001))?;
        from.send_to(b"group", (group, 5002))?;
        from6.send_to(b"group6", (group6, 5003))?;
        for (container, sockets) in everybody.into_iter().zip(&sockets) {
            for (socket, what) in sockets.iter().zip(["broadcast", "IPv4 group", "IPv6 group"]) {
                // A host hears its own broadcast without a network's help.
                let own = container.name() == sender.name();
                let expected = usize::from(!own || what == "broadcast");
                let wait = if expected == 0 { QUIET } else { first };
                let (to, from) = (container.name(), sender.name());
                assert_eq!(arrivals(socket, wait)?, expected, "{what} of {from} at {to}");
            }
        }
    }
    Ok(())
}

/// The kernel's drops at the first container's interface, as the daemon reports them.
fn dropped(host: &Host) -> anyhow::Result<u64> {
    let daemon = Client::new(&host.runtime_directory());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let traffic: Traffic = runtime.block_on(daemon.ask::<call::Traffic>())?;
    Ok(traffic.containers[0].dropped)
}

#[test]
fn drops_of_a_full_queue_count_for_the_container() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    let to = two.ipv4()?;
    wait_ping(&one, to.into(), SETTLE)?;
    let before = dropped(lab.host(0))?;
    let socket = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    // Its queue holds some thousand while the daemon is stopped.
    let stopped = Stopped::daemon_of(lab.host(0))?;
    for _ in 0..10_000 {
        socket.send_to(b"flood", (to, 9))?;
    }
    drop(stopped);
    let after = dropped(lab.host(0))?;
    assert!(after >= before + 1_000, "{before} before, {after} after");
    wait_ping(&one, to.into(), SETTLE)?;
    Ok(())
}

/// A worker that comes late finds all packets sent meanwhile: a burst first meets a queue. The kernel's default
/// of 500 would not hold it.
#[test]
fn packets_sent_while_the_daemon_stands_still_arrive_in_order() -> anyhow::Result<()> {
    const DATAGRAMS: u32 = 2_000;
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    let to = two.ipv4()?;
    wait_ping(&one, to.into(), SETTLE)?;
    let receiver = probe::udp_in(&namespace(&two), (to, 0).into())?;
    // It is not read meanwhile, and takes some hundred by default.
    set_socket_recv_buffer_size_force(&receiver, 16 << 20)?;
    receiver.set_read_timeout(Some(SETTLE * slowness()))?;
    let there = receiver.local_addr()?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    let before = dropped(lab.host(0))?;
    let stopped = Stopped::daemon_of(lab.host(0))?;
    for number in 0..DATAGRAMS {
        sender.send_to(&number.to_be_bytes(), there)?;
    }
    drop(stopped);
    let mut bytes = [0; 8];
    for number in 0..DATAGRAMS {
        let (length, _) = uninterrupted(|| receiver.recv_from(&mut bytes))
            .map_err(|error| anyhow::anyhow!("datagram {number} of {DATAGRAMS}: {error}"))?;
        assert_eq!(bytes[..length], number.to_be_bytes(), "datagram {number}");
    }
    assert_eq!(dropped(lab.host(0))?, before);
    Ok(())
}

#[test]
fn a_detached_container_keeps_nothing_and_can_come_back() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    let name = two.netns().name().to_owned();
    for _ in 0..3 {
        wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
        assert_eq!(devices_in(&two)?, ["weft0", "weft0-local"].map(str::to_owned));
        lab.host(1).weft(&["detach", &name])?.success()?;
        assert_eq!(devices_in(&two)?, Vec::<String>::new());
        let left = devices(&lab.host(1).netns().ip("-br link")?.stdout);
        let own = ["weft", "weft-announce", "weft-tap"];
        assert!(left.iter().all(|name| own.contains(&name.as_str())), "{left:?}");
        lab.host(1).weft(&["attach", &name])?.success()?;
    }
    // Attaching again adds an address and changes nothing else.
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    let index = two.exec(&["cat", "/sys/class/net/weft0/ifindex"])?.stdout;
    lab.host(1).weft(&["attach", "10.47.200.9/12", &name])?.success()?;
    assert_eq!(two.exec(&["cat", "/sys/class/net/weft0/ifindex"])?.stdout, index);
    wait_ping(&one, Ipv4Addr::new(10, 47, 200, 9).into(), SETTLE)?;
    Ok(())
}

/// Bytes that cross the switch of a host while its container sends 100,000 to a port of another host's.
fn switched_from(
    host: &Host,
    container: &Container,
    from: IpAddr,
    to: IpAddr,
) -> anyhow::Result<u64> {
    let socket = probe::udp_in(&namespace(container), (from, 0).into())?;
    let before = switched(host)?;
    for _ in 0..100 {
        socket.send_to(&[7; 1_000], (to, 9))?;
    }
    Ok(switched(host)? - before)
}

#[test]
fn only_what_a_container_sends_from_its_own_addresses_passes_the_switch_by() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    let host = lab.host(0);
    let addresses = |it: &Container| -> anyhow::Result<(IpAddr, IpAddr)> {
        Ok((it.ipv4()?.into(), it.ipv6()?.into()))
    };
    let (mut own, far) = (addresses(&one)?, addresses(&two)?);
    let (strange, strange6) = (Ipv4Addr::new(10, 47, 200, 9), "2001:db8::9".parse()?);
    let add = || {
        one.netns().ip(&format!("addr add {strange}/12 dev weft0"))?;
        one.netns().ip(&format!("addr add {strange6}/128 dev weft0 nodad"))
    };
    add()?;
    let name = one.netns().name().to_owned();
    let all = |own: (IpAddr, IpAddr), strange_passes: bool| -> anyhow::Result<()> {
        wait_ping(&one, far.0, SETTLE)?;
        one.ping(far.1)?;
        for (from, to, passes) in [
            (own.0, far.0, true),
            (own.1, far.1, true),
            (strange.into(), far.0, strange_passes),
            (strange6, far.1, false),
        ] {
            let crossed = switched_from(host, &one, from, to)?;
            assert_eq!(crossed < 20_000, passes, "{crossed} bytes from {from} to {to}");
            assert!(passes || crossed > 90_000, "{crossed} bytes from {from} to {to}");
        }
        Ok(())
    };
    all(own, false)?;
    host.weft(&["attach", &format!("{strange}/12"), &name])?.success()?;
    all(own, true)?;
    host.kill_daemon();
    host.start_daemon(&DIRECT)?;
    all(own, true)?;
    host.weft(&["detach", &name])?.success()?;
    host.weft(&["attach", &name])?.success()?;
    own = addresses(&one)?;
    add()?;
    all(own, false)
}

#[test]
fn containers_that_end_and_devices_that_vanish_harm_nobody() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    let (ends, loses) = (lab.host(1).add_container("c3")?, lab.host(1).add_container("c4")?);
    for other in [&two, &ends, &loses] {
        wait_ping(&one, other.ipv4()?.into(), SETTLE)?;
    }
    let before = lab.host(1).weft_json(&["ps"])?;
    assert_eq!(before.as_array().map(Vec::len), Some(3), "{before}");
    lab.sandbox.remove_netns(ends.netns())?;
    try_wait_until("the ended container to be let go", SETTLE, || {
        let list = lab.host(1).weft_json(&["ps"])?;
        let of = |state: &str| {
            list.as_array().map(|list| list.iter().filter(|it| it["state"] == state).count())
        };
        Ok((of("attached"), of("gone")) == (Some(2), Some(1)))
    })?;
    loses.netns().ip("link del weft0")?;
    one.ping(two.ipv4()?.into())?;
    let begun = Work::of(lab.host(1))?;
    std::thread::sleep(Duration::from_secs(1));
    let work = Work::of(lab.host(1))?.since(begun);
    assert!(work.ticks < 30, "a worker spins: {work:?}");
    // A removed interface is restored by an attach.
    let name = loses.netns().name().to_owned();
    lab.host(1).weft(&["attach", &name])?.success()?;
    wait_ping(&one, loses.ipv4()?.into(), SETTLE)?;
    Ok(())
}

#[test]
fn a_killed_daemon_is_followed_by_one_that_goes_on() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    let addresses = (two.ipv4()?, two.ipv6()?);
    wait_ping(&one, addresses.0.into(), SETTLE)?;
    let listen = SocketAddr::new(addresses.0.into(), 7000);
    let listener = run_in(Namespace::open(&namespace(&two))?, || TcpListener::bind(listen))??;
    let mut near = run_in(Namespace::open(&namespace(&one))?, || TcpStream::connect(listen))??;
    let (mut far, _) = listener.accept()?;
    far.set_read_timeout(Some(SETTLE * 4 * slowness()))?;
    let attached = lab.host(1).weft_json(&["ps"])?;
    for round in 0..3_u8 {
        lab.host(1).kill_daemon();
        near.write_all(&[round])?;
        lab.host(1).start_daemon(&DIRECT)?;
        wait_ping(&one, addresses.0.into(), SETTLE)?;
        assert_eq!((two.ipv4()?, two.ipv6()?), addresses);
        assert_eq!(lab.host(1).weft_json(&["ps"])?, attached);
        assert_eq!(devices_in(&two)?.len(), 2);
        one.ping(addresses.1.into())?;
        let (mut byte, begun) = ([0], Instant::now());
        far.read_exact(&mut byte)
            .map_err(|error| anyhow::anyhow!("{error} after {:?}", begun.elapsed()))?;
        assert_eq!(byte, [round]);
    }
    Ok(())
}

#[test]
fn modes_may_change_and_a_reset_leaves_nothing() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    // A new device has what can be put back on it.
    let own = ["10.47.252.8/32", "2001:db8::8/128"];
    for address in own {
        two.netns().ip(&format!("addr add {address} dev weft0 nodad"))?;
    }
    two.netns().ip("route add 192.0.2.0/24 via 10.47.255.254 dev weft0 metric 7")?;
    two.netns().ip("-6 route add 2001:db8:1::/48 dev weft0 metric 9")?;
    for (mode, devices, port) in
        [(&BRIDGE, &["weft0"][..], "bridge"), (&DIRECT, &["weft0", "weft0-local"][..], "direct")]
    {
        lab.host(1).kill_daemon();
        lab.host(1).start_daemon(mode)?;
        wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
        assert_eq!(
            (devices_in(&two)?, ports(lab.host(1))?),
            (devices.iter().map(|it| (*it).to_owned()).collect(), vec![port.to_owned()])
        );
        let words = ["sh", "-c", "ip -o addr show dev weft0; ip route; ip -6 route"];
        let shown = two.exec(&words)?.success()?.stdout;
        let routes = ["192.0.2.0/24 via 10.47.255.254 dev weft0", "2001:db8:1::/48 dev weft0"];
        for wanted in own.into_iter().chain(routes) {
            assert!(shown.contains(wanted), "{port}: no {wanted} in {shown}");
        }
    }
    lab.host(1).stop_daemon()?;
    assert_eq!(devices_in(&two)?.len(), 2, "containers stay attached while no daemon runs");
    let state = lab.host(1).state_directory();
    let state = state.to_string_lossy();
    lab.host(1).weft(&["reset", "--force", "--state-dir", &state])?.success()?;
    assert_eq!(devices_in(&two)?, Vec::<String>::new());
    let left = devices(&lab.host(1).netns().ip("-br link")?.stdout);
    assert_eq!(left, Vec::<String>::new());
    Ok(())
}

/// Adds a container's settings to its device, which would go with the device.
fn furnish(container: &Container) -> anyhow::Result<()> {
    let netns = container.netns();
    for words in [
        "addr add 10.47.252.7/32 dev weft0",
        "route add 192.0.2.0/24 dev weft0 src 10.47.252.7 metric 7",
        "link add child0 link weft0 type macvlan mode bridge",
        "link set child0 addrgenmode none",
        "link set child0 up",
    ] {
        netns.ip(words)?;
    }
    for words in [
        &["tc", "qdisc", "add", "dev", "weft0", "root", "pfifo", "limit", "777"][..],
        &["sysctl", "-qw", "net.ipv4.conf.weft0.rp_filter=2"],
    ] {
        container.exec(words)?.success()?;
    }
    Ok(())
}

/// The visible state of a container's devices, without counters, times and reports of neighbours.
fn furniture(container: &Container) -> anyhow::Result<Vec<String>> {
    let words = [
        &["ip", "-o", "link"][..],
        &["ip", "-o", "addr"],
        &["ip", "route", "show", "table", "all"],
        &["ip", "-6", "route", "show", "table", "all"],
        &["ip", "maddr", "show", "dev", "weft0"],
        &["tc", "qdisc", "show", "dev", "weft0"],
        &["sysctl", "net.ipv4.conf.weft0.rp_filter"],
    ];
    words.iter().map(|words| Ok(container.exec(words)?.success()?.stdout)).collect()
}

#[test]
fn a_container_keeps_its_device_and_what_it_has_set_up_there_over_restarts() -> anyhow::Result<()> {
    let lab = Lab::pair(&DIRECT)?;
    let (one, two) = lab.containers()?;
    furnish(&two)?;
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    let listen = SocketAddr::new(two.ipv4()?.into(), 7001);
    let bound = probe::udp_in(&namespace(&two), listen)?;
    bound.set_read_timeout(Some(SETTLE * slowness()))?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    let group = Ipv4Addr::new(239, 1, 2, 9);
    let _member = probe::multicast_receiver(&namespace(&two), two.ipv4()?, group, 7002)?;
    try_wait_until("the kernel to have looked for other owners of addresses", SETTLE, || {
        let tentative = two.exec(&["ip", "-6", "addr", "show", "tentative"])?.success()?;
        Ok(tentative.stdout.is_empty())
    })?;
    let before = furniture(&two)?;
    for (round, stop) in [true, false, true].into_iter().enumerate() {
        if stop {
            lab.host(1).stop_daemon()?;
        } else {
            lab.host(1).kill_daemon();
        }
        // Packets sent while no daemon reads are lost, without further harm.
        two.exec(&["ping", "-n", "-c", "1", "-W", "1", &one.ipv4()?.to_string()])?;
        lab.host(1).start_daemon(&DIRECT)?;
        for address in [IpAddr::V4(two.ipv4()?), IpAddr::V6(two.ipv6()?)] {
            wait_ping(&one, address, SETTLE)?;
        }
        two.ping(one.ipv4()?.into())?;
        assert_eq!(furniture(&two)?, before, "round {round}");
        assert_eq!(ports(lab.host(1))?, ["direct"]);
        sender.send_to(&[7], listen)?;
        let heard = uninterrupted(|| bound.recv(&mut [0; 8]))?;
        assert_eq!(heard, 1, "round {round}: a bound socket hears nothing");
        // It is the vector engine's still, and not the switch's.
        let switched_before = switched(lab.host(1))?;
        two.exec(&["ping", "-n", "-c", "20", "-i", "0.01", &one.ipv4()?.to_string()])?.success()?;
        assert!(switched(lab.host(1))? - switched_before < 1_000, "round {round}");
    }
    // Once it is detached nothing of it is kept.
    lab.host(1).weft(&["detach", two.netns().name()])?.success()?;
    assert_eq!(devices_in(&two)?, Vec::<String>::new());
    Ok(())
}

/// The part of a status that lists rules and limits which direct ports bypass.
fn passed_by(host: &Host) -> Result<String, SandboxError> {
    Ok(host.weft_json(&["status"])?["passed_by"].to_string())
}

#[test]
fn others_rules_and_limits_are_seen_before_a_port_is_direct_and_named_after() -> anyhow::Result<()>
{
    let lab = Lab::launched(1, &["--engine", "userspace"])?;
    let host = lab.host(0);
    host.add_container("c1")?;
    assert_eq!(ports(host)?, ["direct"]);
    assert_eq!(passed_by(host)?, "[]");
    let shown = host.weft(&["status"])?.success()?.stdout;
    assert!(shown.contains("captures on the switch do not see"), "{shown}");
    const RULES: &str =
        "table bridge labfw { chain judge { type filter hook forward priority 0; }; }";
    host.netns().exec(&["nft", RULES])?.success()?;
    let links = host.netns().ip("-br link")?.stdout;
    let port = links.lines().find(|line| line.starts_with("weftv"));
    let port = port.and_then(|line| line.split(['@', ' ']).next()).unwrap_or_default();
    let limit =
        ["tc", "qdisc", "add", "dev", port, "root", "tbf", "rate", "10mbit", "burst", "32k"];
    host.netns().exec(&[&limit[..], &["latency", "50ms"]].concat())?.success()?;
    let capture = host.netns().spawn(&["tcpdump", "-Z", "root", "-nli", port])?;
    try_wait_until("rules, limits and captures to be named", SETTLE, || {
        let said = passed_by(host)?;
        let names =
            ["bridge labfw judge", &format!("tc tbf on {port}"), &format!("capture on {port}")];
        Ok(names.iter().all(|name| said.contains(name)))
    })?;
    let doctor = host.weft(&["doctor"])?.stdout;
    assert!(doctor.contains("bridge labfw judge does not see"), "{doctor}");
    // A container that is attached now, at once after a rule came.
    host.add_container("c2")?;
    let list = host.weft_json(&["ps"])?;
    let of = |name: &str| {
        let list = list.as_array().cloned().unwrap_or_default();
        let found =
            list.into_iter().find(|one| one["name"].as_str().is_some_and(|it| it.ends_with(name)));
        found.unwrap_or_default()
    };
    assert_eq!(of("c1")["port"], "direct", "{list}");
    assert_eq!(of("c2")["port"], "bridge", "{list}");
    let reason = of("c2")["port_reason"].to_string();
    assert!(reason.contains("bridge labfw judge"), "{list}");
    let status = host.weft_json(&["status"])?;
    assert_eq!(status["ports"], "bridge", "{status}");
    assert!(status["ports_reason"].to_string().contains("bridge labfw judge"), "{status}");
    drop(capture);
    host.netns().exec(&["nft", "delete table bridge labfw"])?.success()?;
    host.netns().exec(&["tc", "qdisc", "del", "dev", port, "root"])?.success()?;
    try_wait_until("nothing to be named", SETTLE, || Ok(passed_by(host)? == "[]"))?;
    host.add_container("c3")?;
    assert!(ports(host)?.iter().filter(|port| *port == "direct").count() == 2, "{list}");
    // A user who asks for direct ports gets them, and a report of the rules.
    host.netns().exec(&["nft", RULES])?.success()?;
    host.stop_daemon()?;
    relaunch(&lab, 0, &DIRECT)?;
    assert_eq!(ports(host)?, ["direct"; 3]);
    try_wait_until("the rules to be named", SETTLE, || {
        Ok(passed_by(host)?.contains("bridge labfw judge"))
    })?;
    Ok(())
}
