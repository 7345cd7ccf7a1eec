//! Several hosts, trust between them, other people's firewalls and objects, and daemons that die.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use weft_bench::sandbox::{Container, Host, Netns, try_wait_until};
use weft_io::namespace::{Namespace, run_in};
use weft_io::packet::PacketSocket;
use weft_lab::net::capture::{Capture, contains};
use weft_lab::net::guest::flow::MARKER;
use weft_lab::net::guest::stage::{is_active, is_on, path, wait_candidate, wait_path};
use weft_lab::net::guest::wire::Blocked;
use weft_lab::net::guest::{
    Block, Flow, LeakWatch, SETTLE_LIMIT, Stage, by_clock, figure, foreign, host, xfrm,
};
use weft_lab::net::{is_soak, namespace, probe, wait_ping};

const TRUST: [&str; 2] = ["--trusted-subnets", "192.0.2.0/24"];

#[test]
fn one_broadcast_arrives_exactly_once_everywhere_on_bridges() -> anyhow::Result<()> {
    once(["bridge"; 3])
}

#[test]
fn one_broadcast_arrives_exactly_once_everywhere_on_odp() -> anyhow::Result<()> {
    once(["odp"; 3])
}

#[test]
fn one_broadcast_arrives_exactly_once_everywhere_on_different_switches() -> anyhow::Result<()> {
    once(["odp", "bridge", "odp"])
}

/// Host 1 offers both engines, host 2 the vector engine, host 3 the kernel's: three pairings at once.
fn once(switches: [&str; 3]) -> anyhow::Result<()> {
    let stage = Stage::new(3)?;
    for (index, engine) in ["auto", "userspace", "kernel"].into_iter().enumerate() {
        stage.launch(index, &["--engine", engine, "--switch", switches[index]])?;
    }
    stage.wait_all_active(3)?;
    let (auto, vector, kernel) = (stage.host(0), stage.host(1), stage.host(2));
    wait_path(auto, kernel, "its pairing", SETTLE_LIMIT, is_on("kernel", "kernel"))?;
    wait_path(vector, kernel, "its pairing", SETTLE_LIMIT, is_on("userspace", "kernel"))?;
    let mut containers = Vec::new();
    for index in 0..3 {
        for name in ["a", "b"] {
            containers.push(stage.host(index).add_container(name)?);
        }
    }
    for from in &containers {
        for to in &containers {
            stage.reach(from, to)?;
        }
    }
    let all = (Ipv4Addr::new(10, 47, 255, 255), 5001);
    let group = (Ipv4Addr::new(239, 9, 8, 7), 5002);
    let sockets: Vec<[UdpSocket; 2]> =
        containers.iter().map(|it| receivers(it, group.0)).collect::<Result<_, _>>()?;
    for (index, from) in containers.iter().enumerate() {
        let sender = probe::udp_in(&namespace(from), (from.ipv4()?, 0).into())?;
        sender.set_broadcast(true)?;
        for (kind, to) in [all, group].into_iter().enumerate() {
            let text = format!("from {} by {kind}", from.netns().name());
            sender.send_to(text.as_bytes(), to)?;
            let others = || sockets.iter().enumerate().filter(|(other, _)| *other != index);
            for (other, socket) in others() {
                let to = containers[other].netns().name();
                probe::expect_datagram(&socket[kind], text.as_bytes())
                    .map_err(|error| anyhow::anyhow!("{text:?} to {to}: {error}"))?;
            }
            // As long as a copy by another way could take.
            std::thread::sleep(Duration::from_millis(300));
            // The sender's sockets take one copy as well, from the sender's kernel.
            waiting(&sockets[index][kind])?;
            for (other, socket) in others() {
                let count = waiting(&socket[kind])?;
                let to = containers[other].netns().name();
                assert_eq!(count, 0, "{count} more copies of {text:?} came to {to}");
            }
        }
    }
    Ok(())
}

fn receivers(container: &Container, group: Ipv4Addr) -> anyhow::Result<[UdpSocket; 2]> {
    let place = namespace(container);
    let broadcast = probe::udp_in(&place, (Ipv4Addr::UNSPECIFIED, 5001).into())?;
    Ok([broadcast, probe::multicast_receiver(&place, container.ipv4()?, group, 5002)?])
}

/// How many datagrams are in a socket.
fn waiting(socket: &UdpSocket) -> anyhow::Result<usize> {
    let mut room = [0; 2048];
    socket.set_nonblocking(true)?;
    let count = std::iter::from_fn(|| socket.recv(&mut room).ok()).count();
    socket.set_nonblocking(false)?;
    Ok(count)
}

/// A stateful firewall lets in only answers to its host, and a kernel sends from the address that its routes
/// choose.
#[test]
fn a_kernel_that_sends_from_another_address_than_was_dialled_is_named() -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    let (two_addresses, behind) = (stage.host(0), stage.host(1));
    let add = "ip addr add 192.0.2.101/24 dev $(ip -o -4 addr show to 192.0.2.1 | cut -d' ' -f2)";
    two_addresses.netns().exec(&["sh", "-ec", add])?.success()?;
    let rules = "table inet fw {\n chain input {\n type filter hook input priority 0\n \
                 ct state established,related accept\n meta ipsec exists accept\n \
                 meta l4proto { udp, esp } drop\n }\n }\n";
    behind.netns().exec(&["nft", rules])?.success()?;
    let password = stage.sandbox().password_file().to_string_lossy().into_owned();
    let arguments = ["--password-file", &password];
    two_addresses.start_daemon(&arguments)?;
    behind.start_daemon(&[&arguments[..], &["192.0.2.101"]].concat())?;
    let (c1, c2) = (two_addresses.add_container("c1")?, behind.add_container("c2")?);
    // The vector engine sends from where the peer has dialled.
    wait_ping(&c2, c1.ipv4()?.into(), SETTLE_LIMIT * 2)?;
    try_wait_until("the cause to be named", SETTLE_LIMIT * 2, || {
        let status = two_addresses.weft(&["status"])?.stdout;
        Ok(status.contains("dialled 192.0.2.101") && status.contains("`src 192.0.2.101`"))
    })?;
    Ok(())
}

#[test]
fn trust_of_one_side_alone_changes_nothing() -> anyhow::Result<()> {
    let stage = Stage::pair(&TRUST, &[])?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let watch = LeakWatch::start(&stage)?;
    let flow = Flow::start(&one, &two, Duration::from_millis(10))?;
    for (here, there) in [(0, 1), (1, 0)] {
        let kernel = is_on("kernel", "kernel");
        let (host, peer) = (stage.host(here), stage.host(there));
        let path = wait_path(host, peer, "the kernel's path", SETTLE_LIMIT, kernel)?;
        assert_eq!((&path["format"], &path["encrypted"]), (&"esp".into(), &true.into()), "{path}");
    }
    flow.wait_more(200, SETTLE_LIMIT)?;
    flow.stop()?;
    assert_eq!(watch.finish()?.readable, 0, "overlay packets could be read");
    Ok(())
}

#[test]
fn trust_of_both_sides_is_plain_shown_as_plain_and_an_exception_for_that_peer_alone()
-> anyhow::Result<()> {
    let stage = Stage::new(3)?;
    let trusted = ["--trusted-subnets", "192.0.2.1/32,192.0.2.2/32"];
    let stage = stage.launched(&[&trusted, &trusted, &["--engine", "kernel"]])?;
    let (here, there, stranger) = (stage.host(0), stage.host(1), stage.host(2));
    let plain = |c: &Value| {
        is_active(c) && c["format"] == "plain" && c["encrypted"] == false && c["cipher"].is_null()
    };
    for (host, peer) in [(here, there), (there, here)] {
        let path = wait_path(host, peer, "the plain path", SETTLE_LIMIT, plain)?;
        assert_eq!(path["engine"], "kernel", "{path}");
    }
    try_wait_until("the word plain, and that not all is encrypted", SETTLE_LIMIT, || {
        let table = here.weft(&["status", "connections"])?.success()?.stdout;
        Ok(table.contains("plain") && here.weft_json(&["status"])?["encrypted"] == false)
    })?;
    let esp = |c: &Value| is_on("kernel", "kernel")(c) && c["format"] == "esp";
    wait_path(here, stranger, "the encrypted path to the third", SETTLE_LIMIT, esp)?;

    let containers = [here, there, stranger].map(|host| host.add_container("c"));
    let [one, two, three] = containers;
    let (one, two, three) = (one?, two?, three?);
    stage.reach(&one, &two)?;
    stage.reach(&one, &three)?;
    let plain_flow = || is_readable_underway(&stage, &one, &two);
    assert!(in_one_state(here, there, plain, plain_flow)?, "to the trusted one");
    assert!(!is_readable_underway(&stage, &one, &three)?, "to the third");
    // The exception covers the peer only: cleartext from the third host stays out. The third host's guard would
    // stop it first, so its daemon ends here.
    stranger.stop_daemon()?;
    let before = host::guard_dropped(here, "input")?;
    let place = PathBuf::from(stranger.netns().path());
    let socket = probe::udp_in(&place, (stranger.ipv4(), 0).into())?;
    socket.send_to(&[0x08, 0, 0, 0, 0, 0, 1, 0, 1, 2, 3, 4], (here.ipv4(), 6787))?;
    weft_bench::sandbox::wait_until("the guard's drop", Duration::from_secs(3), || {
        host::guard_dropped(here, "input").is_ok_and(|now| now > before)
    })?;
    Ok(())
}

/// Whether a flow from the first host's container can be read on the underlay.
fn is_readable_underway(stage: &Stage, from: &Container, to: &Container) -> anyhow::Result<bool> {
    let file = stage.directory().join(format!("{}.pcap", to.netns().name()));
    let capture = Capture::start(stage.host(0).netns(), "eth0", &file, "")?;
    let flow = Flow::start(from, to, Duration::from_millis(10))?;
    flow.wait_more(20, SETTLE_LIMIT)?;
    flow.stop()?;
    Ok(contains(&capture.finish()?, MARKER))
}

/// The result of `look` while a host's connection to `peer` stays as `wanted`. In an overloaded guest probes
/// come too late, and a path gives way to another for a while.
fn in_one_state<T>(
    host: &Host,
    peer: &Host,
    wanted: impl Fn(&Value) -> bool,
    look: impl Fn() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    const ATTEMPTS_MAX: usize = 5;
    for _ in 0..ATTEMPTS_MAX {
        let before = wait_path(host, peer, "the state to look at", SETTLE_LIMIT, &wanted)?;
        let found = look()?;
        let after = path(host, peer)?;
        if wanted(&after) && after["since"] == before["since"] {
            return Ok(found);
        }
    }
    anyhow::bail!("the connection to {} did not stay in one state", peer.nickname())
}

#[test]
fn dockers_bridge_firewall_does_not_stop_the_overlay() -> anyhow::Result<()> {
    host::load("br_netfilter")?;
    let stage = Stage::new(2)?;
    for index in 0..2 {
        docker_rules(stage.host(index).netns())?;
    }
    let before = foreign::everything(stage.host(0).netns())?;
    let stage = stage.launched(&[&["--engine", "kernel"], &["--engine", "userspace"]])?;
    let (here, netns) = (stage.host(0), stage.host(0).netns());
    let containers = [here.add_container("a")?, here.add_container("b")?];
    let far = stage.host(1).add_container("far")?;
    for to in [&containers[1], &far] {
        stage.reach(&containers[0], to)?;
        containers[0].ping(to.ipv6()?.into())?;
    }
    // Another bridge stays judged: the rule is for Weft's alone.
    foreign_bridge_is_stopped(netns)?;
    let rules = netns.exec(&["iptables-save"])?.success()?.stdout;
    let ours = rules.lines().filter(|line| line.contains("weft")).count();
    assert_eq!(ours, 1, "one tagged rule: {rules}");
    assert!(rules.contains("-A DOCKER-USER"), "{rules}");

    netns.exec(&["iptables", "-F", "DOCKER-USER"])?.success()?;
    netns.exec(&["ip6tables", "-F", "DOCKER-USER"])?.success()?;
    wait_ping(&containers[0], containers[1].ipv4()?.into(), by_clock(60))?;

    here.stop_daemon()?;
    let after = foreign::everything(netns)?;
    let is_rule = |line: &&str| line.contains("DOCKER") || line.contains("FORWARD");
    let rules_of = |text: &str| text.lines().filter(is_rule).map(str::to_owned).collect::<Vec<_>>();
    let flushed: Vec<String> = rules_of(&before)
        .into_iter()
        .filter(|line| !line.starts_with("-A DOCKER-USER") && !line.contains("RETURN"))
        .collect();
    for line in rules_of(&after) {
        assert!(flushed.contains(&line) || !line.contains("weft"), "left by stop: {line}");
    }
    Ok(())
}

/// The relevant part of dockerd's rules.
fn docker_rules(netns: &Netns) -> anyhow::Result<()> {
    for program in ["iptables", "ip6tables"] {
        for rule in [
            "-N DOCKER-USER",
            "-A DOCKER-USER -j RETURN",
            "-A FORWARD -j DOCKER-USER",
            "-P FORWARD DROP",
        ] {
            let words: Vec<&str> = [program].into_iter().chain(rule.split(' ')).collect();
            netns.exec(&words)?.success()?;
        }
    }
    for key in ["iptables", "ip6tables"] {
        let setting = format!("net.bridge.bridge-nf-call-{key}=1");
        netns.exec(&["sysctl", "-q", "-w", &setting])?.success()?;
    }
    Ok(())
}

/// Shows that the firewall does judge bridged frames: on a bridge that is not Weft's none passes.
fn foreign_bridge_is_stopped(netns: &Netns) -> anyhow::Result<()> {
    let script = "set -e; ip link add other type bridge; ip link set other up; \
        for n in 1 2; do ip link add o$n type veth peer name p$n; ip link set o$n master other up; \
        unshare -n sleep 60 & sleep 1; ip link set p$n netns $!; \
        nsenter -n -t $! ip addr add 203.0.113.$n/24 dev p$n; nsenter -n -t $! ip link set p$n up; \
        pids=\"$pids $!\"; done; set -- $pids; \
        ! nsenter -n -t $1 ping -n -c 2 -i 0.3 -W 1 203.0.113.2; result=$?; kill $pids; \
        ip link del other; exit $result";
    netns.exec(&["bash", "-c", script])?.success()?;
    Ok(())
}

#[test]
fn after_kill_9_nothing_of_the_earlier_run_is_left_and_nothing_foreign_was_touched()
-> anyhow::Result<()> {
    for switch in ["bridge", "odp"] {
        killed(switch)?;
    }
    Ok(())
}

fn killed(switch: &str) -> anyhow::Result<()> {
    let options = ["--engine", "kernel", "--switch", switch];
    let stage = Stage::new(2)?;
    for index in 0..2 {
        foreign::plant(stage.host(index).netns())?;
    }
    let stage = stage.launched(&[&options, &options])?;
    let (here, there) = (stage.host(0), stage.host(1));
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let netns = there.netns();
    let standing = foreign::shown(netns)?;
    let watch = LeakWatch::start(&stage)?;
    let flow = Flow::start(&one, &two, Duration::from_millis(10))?;
    for round in 0..if is_soak() { 3 } else { 1 } {
        let before = xfrm::own_spis(netns)?;
        assert!(!before.is_empty(), "no SA to be left behind");
        there.kill_daemon();
        assert_eq!(xfrm::own_spis(netns)?, before, "SAs outlive a killed daemon");
        let start = Instant::now();
        stage.launch(1, &options)?;
        wait_path(here, there, "the path", SETTLE_LIMIT, is_on("kernel", "kernel"))?;
        wait_path(there, here, "the path", SETTLE_LIMIT, is_on("kernel", "kernel"))?;
        flow.wait_more(50, SETTLE_LIMIT)?;
        let after = start.elapsed().as_secs_f64();
        figure(&format!("{switch}, round {round}: traffic again after"), format!("{after:.1} s"));
        let left: Vec<_> = xfrm::own_spis(netns)?.intersection(&before).copied().collect();
        assert!(left.is_empty(), "SAs of the earlier run: {left:x?}");
        for policy in xfrm::own_policies(netns)? {
            let old = before.iter().find(|spi| policy.contains(&format!("spi {spi:#010x}")));
            assert!(old.is_none(), "a policy of the earlier run: {policy}");
        }
        assert_eq!(foreign::shown(netns)?, standing, "touched by {switch}");
    }
    flow.stop()?;
    assert_eq!(watch.finish()?.readable, 0, "overlay packets could be read");
    one_object_of_each(there)?;
    there.stop_daemon()?;
    assert_eq!(foreign::shown(netns)?, standing, "touched by stop, {switch}");
    assert!(xfrm::own_states(netns)?.is_empty() && xfrm::own_policies(netns)?.is_empty());
    Ok(())
}

/// No table or policy of an earlier run stands beside those of this one.
fn one_object_of_each(host: &Host) -> anyhow::Result<()> {
    let tables = host.netns().exec(&["nft", "list", "tables"])?.success()?.stdout;
    let own: BTreeSet<_> = tables.lines().filter(|table| table.contains("weft")).collect();
    let guard = "table inet weft-guard";
    assert!(own.contains(guard), "{tables}");
    // The bridge's tables stand where there is a bridge.
    let of_bridge =
        ["weft-guard", "weft-groups", "weft-ports"].map(|it| format!("table bridge {it}"));
    let wanted: BTreeSet<_> = of_bridge.iter().map(String::as_str).chain([guard]).collect();
    assert!(own.is_subset(&wanted), "{tables}");
    let policies = xfrm::own_policies(host.netns())?;
    // Inbound policies, which demand Weft's states, belong to no peer.
    let outbound = policies.iter().filter(|policy| policy.contains("dir out")).count();
    assert!((1..=2).contains(&outbound), "{policies:#?}");
    assert_eq!(policies.iter().collect::<BTreeSet<_>>().len(), policies.len(), "{policies:#?}");
    Ok(())
}

/// The daemons of both hosts are killed, so that only the kernels act: a live daemon gives up a path whose
/// probes stay unanswered.
#[test]
fn esp_in_udp_goes_on_while_no_daemon_runs_and_the_next_takes_its_sockets_back()
-> anyhow::Result<()> {
    const GONE_S: u64 = 6;
    const TAKEN_BACK: &str = "took back the sockets for ESP in UDP";
    let options = ["--engine", "kernel"];
    let stage = Stage::new(2)?;
    let _block = Block::all(&stage, &[Blocked::Protocol50])?;
    for index in 0..2 {
        stage.launch(index, &options)?;
    }
    let hosts = [stage.host(0), stage.host(1)];
    let wait_udp = |what: &str| -> anyhow::Result<()> {
        let udp = |c: &Value| is_on("kernel", "kernel")(c) && c["encapsulation"] == "udp";
        for (host, peer) in [(hosts[0], hosts[1]), (hosts[1], hosts[0])] {
            wait_path(host, peer, what, by_clock(60), udp)?;
        }
        Ok(())
    };
    wait_udp("ESP in UDP")?;
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    let there = Flow::start(&one, &two, Duration::from_millis(10))?;
    let back = Flow::start(&two, &one, Duration::from_millis(10))?;
    let held = [the_holder(hosts[0])?, the_holder(hosts[1])?];

    hosts.iter().for_each(|host| host.kill_daemon());
    let killed = Instant::now();
    while killed.elapsed() < Duration::from_secs(GONE_S) {
        there.wait_more(20, SETTLE_LIMIT)?;
        back.wait_more(20, SETTLE_LIMIT)?;
    }
    for index in 0..2 {
        assert_eq!(hosts[index].log().matches(TAKEN_BACK).count(), 0);
        stage.launch(index, &options)?;
        assert_eq!(hosts[index].log().matches(TAKEN_BACK).count(), 1, "{}", hosts[index].log());
        assert_eq!(the_holder(hosts[index])?, held[index], "another process holds the sockets");
    }
    wait_udp("ESP in UDP again")?;
    there.wait_more(50, SETTLE_LIMIT)?;
    back.wait_more(50, SETTLE_LIMIT)?;
    let longest = there.stop()?.longest_gap(killed);
    figure("nothing came for at most", format!("{:.1} s", longest.as_secs_f64()));
    back.stop()?;

    hosts[0].stop_daemon()?;
    nothing_is_held(hosts[0])?;
    hosts[1].kill_daemon();
    assert_eq!(the_holder(hosts[1])?, held[1]);
    hosts[1].weft(&["reset", "--force"])?.success()?;
    nothing_is_held(hosts[1])
}

/// The process that holds a host's sockets, and nothing else of the daemon's.
fn the_holder(host: &Host) -> anyhow::Result<u32> {
    let found = holders(host)?;
    anyhow::ensure!(found.len() == 1, "holders on {}: {found:?}", host.nickname());
    for entry in std::fs::read_dir(format!("/proc/{}/fd", found[0]))? {
        let open = std::fs::read_link(entry?.path())?;
        let text = open.to_string_lossy();
        assert!(text.starts_with("socket:") || text == "/dev/null", "the holder has {text} open");
    }
    Ok(found[0])
}

fn holders(host: &Host) -> anyhow::Result<Vec<u32>> {
    let words = ["netns", "pids", host.netns().name()];
    let output = std::process::Command::new("ip").args(words).output()?;
    let pids = String::from_utf8(output.stdout)?;
    let pids = pids.lines().filter_map(|line| line.trim().parse().ok());
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Ok(pids.filter(|pid| name(pid).trim_end() == "weft-holder").collect())
}

fn nothing_is_held(host: &Host) -> anyhow::Result<()> {
    weft_bench::sandbox::wait_until("the holder's end", by_clock(5), || {
        holders(host).is_ok_and(|found| found.is_empty())
    })?;
    assert!(!host.runtime_directory().join("holder.sock").exists());
    let place = PathBuf::from(host.netns().path());
    for address in [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()] {
        probe::udp_in(&place, SocketAddr::new(address, 6785))?;
    }
    Ok(())
}

#[test]
fn stopping_and_starting_touches_nothing_foreign() -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    foreign::plant(stage.host(0).netns())?;
    let standing = foreign::shown(stage.host(0).netns())?;
    let before = foreign::everything(stage.host(0).netns())?;
    let stage = stage.launched(&[&["--engine", "kernel"], &["--engine", "kernel"]])?;
    assert_eq!(foreign::shown(stage.host(0).netns())?, standing, "touched by launch");
    let host = stage.host(0);
    host.weft(&["reset", "--force"])?.success()?;
    host.wait_daemon(Duration::from_secs(20))?;
    assert_eq!(foreign::shown(host.netns())?, standing, "touched by reset");
    let left = foreign::difference(&before, &foreign::everything(host.netns())?);
    assert_eq!(left, "", "after reset");
    Ok(())
}

#[test]
fn a_host_with_the_kernel_and_one_without_talk_and_say_so() -> anyhow::Result<()> {
    let stage = Stage::pair(&[], &["--engine", "userspace"])?;
    let (here, there) = (stage.host(0), stage.host(1));
    let mixed = is_on("kernel", "userspace");
    wait_path(here, there, "each on its own engine", SETTLE_LIMIT, mixed)?;
    let absent = |p: &Value| {
        p["reason"].as_str().is_some_and(|reason| reason.contains("peer: forced by configuration"))
    };
    wait_candidate(here, there, "why the peer's kernel is not used", SETTLE_LIMIT, absent)?;
    let connection = path(here, there)?;
    let reason = connection["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("forced by configuration"), "{connection}");
    let missing = &host::status(there)?["engines_missing"];
    assert_eq!(missing["kernel"], "forced by configuration", "{missing}");
    Ok(())
}

/// By the kernel engine a frame is opened by the kernel, and Weft sees nothing of it.
#[test]
fn a_member_sends_from_its_own_containers_addresses_alone() -> anyhow::Result<()> {
    let stage = Stage::new(3)?.launched(&[&["--engine", "kernel"][..]; 3])?;
    let [victim, forger, owner] = [0, 1, 2].map(|index| stage.host(index));
    for peer in [forger, owner] {
        wait_path(victim, peer, "the kernel engine", SETTLE_LIMIT, is_on("kernel", "kernel"))?;
    }
    // The port lock of the forger's own host would drop the frame.
    let from = forger.add_container_with("box", &["--allow-macs"])?;
    let (target, owned) = (victim.add_container("box")?, owner.add_container("box")?);
    stage.reach(&from, &target)?;
    stage.reach(&owned, &target)?;
    let socket = probe::udp_in(&namespace(&target), (Ipv4Addr::UNSPECIFIED, 5001).into())?;
    let entries = || -> anyhow::Result<String> {
        Ok(victim.netns().exec(&["bridge", "fdb", "show"])?.success()?.stdout)
    };
    let (counted, before) = (host::kernel_counter(victim, "foreign_source")?, entries()?);
    // The second frame's arrival shows that the first has had its time.
    for (source, text) in [(&owned, "forged"), (&from, "honest")] {
        let frame = frame(source, &target, text.as_bytes())?;
        run_in(Namespace::open(&namespace(&from))?, || -> anyhow::Result<()> {
            let sender = PacketSocket::sender()?;
            Ok(sender.send(&frame, sender.index_of("weft0")?)?)
        })??;
    }
    probe::expect_datagram(&socket, b"honest")?;
    assert_eq!(waiting(&socket)?, 0);
    assert_eq!(entries()?, before);
    let more = || host::kernel_counter(victim, "foreign_source").is_ok_and(|now| now > counted);
    try_wait_until("the forged frame is counted", SETTLE_LIMIT, || Ok(more()))?;
    stage.reach(&owned, &target)?;
    // Other programs may mark any packet.
    let marks = "add table inet marks; \
        add chain inet marks pre { type filter hook prerouting priority mangle; }; \
        add rule inet marks pre meta l4proto udp meta mark set ct mark";
    victim.netns().exec(&["nft", marks])?.success()?;
    stage.reach(&from, &target)?;
    // An address that moves to another host with its container.
    let address = format!("{}/12", owned.ipv4()?);
    owner.weft(&["detach", &owned.netns().path()])?.success()?;
    let moved = forger.add_container_with("moved", &[&address])?;
    stage.reach(&moved, &target)?;
    Ok(())
}

/// A frame that carries a datagram from one container to another's port 5001.
fn frame(from: &Container, to: &Container, payload: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut frame = [mac(to)?, mac(from)?].concat();
    let (udp, total) = (8 + payload.len() as u16, 28 + payload.len() as u16);
    frame.extend([8, 0, 0x45, 0]);
    frame.extend(total.to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    frame.extend(from.ipv4()?.octets());
    frame.extend(to.ipv4()?.octets());
    let words = frame[14..34].chunks(2).map(|it| u32::from(it[0]) << 8 | u32::from(it[1]));
    let sum = words.sum::<u32>();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    for word in [5000, 5001, udp, 0] {
        frame.extend(u16::to_be_bytes(word));
    }
    frame.extend(payload);
    Ok(frame)
}

fn mac(container: &Container) -> anyhow::Result<[u8; 6]> {
    let text = container.exec(&["cat", "/sys/class/net/weft0/address"])?.success()?.stdout;
    Ok(text.trim().parse::<weft_path::Mac>()?.0)
}
