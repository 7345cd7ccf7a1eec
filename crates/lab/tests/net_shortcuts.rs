//! Shortcuts: packets of a container with a port of the bridge bypass the bridge on their way to hosts on the
//! vector engine. They take the bridge where rules or limits need them there.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::Context;
use weft_bench::sandbox::{Container, Host, try_wait_until};
use weft_io::uninterrupted;
use weft_lab::net::probe::udp_in;
use weft_lab::net::{Lab, namespace, slowness};

/// It is looked every ten seconds what others have done to a port.
const SETTLE: Duration = Duration::from_secs(30);
/// Of a hundred that take a shortcut, those that the bridge is to see: one each ten seconds.
const DATAGRAMS: usize = 100;
const BRIDGED_MAX: usize = 5;

/// The number of containers with a shortcut, and the reason for the others.
fn shortcuts(host: &Host) -> anyhow::Result<(u64, String)> {
    let status = host.weft_json(&["status"])?;
    let count = status["shortcuts"].as_u64();
    let reason = status["shortcuts_reason"].as_str().unwrap_or_default().to_owned();
    Ok((count.ok_or_else(|| anyhow::anyhow!("no word of shortcuts in {status}"))?, reason))
}

/// The bridge's port of the only container of a host.
fn port(host: &Host) -> anyhow::Result<String> {
    let links = host.netns().ip("-br link")?.stdout;
    let line = links.lines().find(|line| line.starts_with("weftv"));
    let name = line.and_then(|line| line.split(['@', ' ']).next());
    Ok(name.ok_or_else(|| anyhow::anyhow!("no port in {links}"))?.to_owned())
}

fn run(host: &Host, command: &str) -> anyhow::Result<()> {
    host.netns().exec(&command.split(' ').collect::<Vec<_>>())?.success()?;
    Ok(())
}

/// How many of a hundred datagrams arrive.
fn arrive(from: &UdpSocket, to: &UdpSocket) -> anyhow::Result<usize> {
    to.set_read_timeout(Some(Duration::from_millis(500) * slowness()))?;
    for _ in 0..DATAGRAMS {
        from.send_to(b"short", to.local_addr()?)?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok((0..DATAGRAMS).take_while(|_| uninterrupted(|| to.recv(&mut [0; 8])).is_ok()).count())
}

fn socket(container: &Container) -> anyhow::Result<UdpSocket> {
    Ok(udp_in(&namespace(container), SocketAddr::new(container.ipv4()?.into(), 0))?)
}

/// The bridge sends nothing more to other hosts.
fn close_bridge(host: &Host) -> anyhow::Result<()> {
    run(host, "bridge link set dev weft-tap state 0")
}

/// A container on each of two hosts whose bridge carries everything, and sockets in them.
fn stage(ports: &str) -> anyhow::Result<(Lab, UdpSocket, UdpSocket)> {
    // Kernels with IPsec would take the traffic.
    let lab = Lab::pair(&["--engine", "userspace", "--port-mode", ports])?;
    let (one, two) = lab.containers()?;
    one.ping(two.ipv4()?.into())?;
    let (from, to) = (socket(&one)?, socket(&two)?);
    assert_eq!(arrive(&from, &to)?, DATAGRAMS);
    Ok((lab, from, to))
}

/// Has nftables count what comes to the bridge by its container's port.
fn count_bridged(host: &Host) -> anyhow::Result<()> {
    run(host, "nft add table bridge lab")?;
    run(host, "nft add chain bridge lab in { type filter hook prerouting priority 0 ; }")?;
    run(host, &format!("nft add rule bridge lab in iifname {} ether type ip counter", port(host)?))
}

/// The packets counted by that rule.
fn bridged(host: &Host) -> anyhow::Result<usize> {
    let listed = host.netns().exec(&["nft", "list", "chain", "bridge", "lab", "in"])?.success()?;
    let mut words = listed.stdout.split_whitespace().skip_while(|word| *word != "packets").skip(1);
    let count = words.next().with_context(|| format!("no counter: {}", listed.stdout))?;
    Ok(count.parse()?)
}

#[test]
fn frames_for_hosts_on_the_vector_engine_pass_the_bridge_by() -> anyhow::Result<()> {
    let (lab, from, to) = stage("shortcut")?;
    let host = lab.host(0);
    wait_shortcuts(host, &open())?;
    close_bridge(host)?;
    let arrived = arrive(&from, &to)?;
    assert!(arrived >= DATAGRAMS - BRIDGED_MAX, "{arrived} of {DATAGRAMS}");
    // It ends with its daemon, however that ends.
    host.kill_daemon();
    count_bridged(host)?;
    arrive(&from, &to)?;
    assert_eq!(bridged(host)?, DATAGRAMS);
    Ok(())
}

#[test]
fn frames_from_addresses_that_a_container_gave_itself_take_the_bridge() -> anyhow::Result<()> {
    let lab = Lab::pair(&["--engine", "userspace", "--port-mode", "shortcut"])?;
    let (one, two) = lab.containers()?;
    let host = lab.host(0);
    one.ping(two.ipv4()?.into())?;
    one.netns().ip("addr add 10.47.200.9/12 dev weft0")?;
    let (own, to) = (socket(&one)?, socket(&two)?);
    let strange = udp_in(&namespace(&one), "10.47.200.9:0".parse()?)?;
    wait_shortcuts(host, &open())?;
    close_bridge(host)?;
    assert!(arrive(&own, &to)? >= DATAGRAMS - BRIDGED_MAX);
    assert_eq!(arrive(&strange, &to)?, 0);
    host.weft(&["attach", "10.47.200.9/12", one.netns().name()])?.success()?;
    try_wait_until("its frames to pass the bridge by", SETTLE, || {
        Ok(arrive(&strange, &to).is_ok_and(|arrived| arrived >= DATAGRAMS - BRIDGED_MAX))
    })?;
    Ok(())
}

#[test]
fn ports_of_the_bridge_alone_have_none() -> anyhow::Result<()> {
    let (lab, from, to) = stage("bridge")?;
    close_bridge(lab.host(0))?;
    assert_eq!(arrive(&from, &to)?, 0);
    assert_eq!(shortcuts(lab.host(0))?, (0, String::new()));
    Ok(())
}

#[test]
fn where_somebody_limits_what_a_container_sends_there_is_none() -> anyhow::Result<()> {
    let (lab, from, to) = stage("shortcut")?;
    let (host, port) = (lab.host(0), port(lab.host(0))?);
    let limited = format!("the ingress of {port} may be limited: tc qdisc show dev {port}");
    let away = format!("{port} is not a port of the bridge");
    let link = format!("ip link set dev {port}");
    let qdisc = |verb| format!("tc qdisc {verb} dev {port} ingress");
    for (command, reason, undo) in [
        // The CNI plugin bandwidth puts its limit there.
        (qdisc("add"), limited, qdisc("del")),
        // This cuts the container off.
        (format!("{link} nomaster"), away, format!("{link} master weft")),
    ] {
        wait_shortcuts(host, &open())?;
        run(host, &command)?;
        wait_shortcuts(host, &(0, reason))?;
        run(host, &undo)?;
    }
    wait_shortcuts(host, &open())?;
    close_bridge(host)?;
    let arrived = arrive(&from, &to)?;
    assert!(arrived >= DATAGRAMS - BRIDGED_MAX, "{arrived} of {DATAGRAMS}");
    Ok(())
}

#[test]
fn where_rules_see_the_bridges_frames_there_is_none() -> anyhow::Result<()> {
    let (lab, from, to) = stage("shortcut")?;
    let host = lab.host(0);
    wait_shortcuts(host, &open())?;
    count_bridged(host)?;
    wait_shortcuts(host, &(0, seen_by("bridge")))?;
    let before = bridged(host)?;
    assert_eq!(arrive(&from, &to)?, DATAGRAMS);
    assert_eq!(bridged(host)? - before, DATAGRAMS);
    run(host, "nft add table netdev lab")?;
    run(host, "nft delete table bridge lab")?;
    wait_shortcuts(host, &open())?;
    let hook = format!("type filter hook ingress device {} priority 0 ;", port(host)?);
    run(host, &format!("nft add chain netdev lab in {{ {hook} }}"))?;
    wait_shortcuts(host, &(0, seen_by("netdev")))
}

/// The reason shown when rules of this family see the bridge's frames.
fn seen_by(family: &str) -> String {
    format!("rules may see its frames on the bridge: {family} lab in")
}

/// The one container has a shortcut.
fn open() -> (u64, String) {
    (1, String::new())
}

fn wait_shortcuts(host: &Host, wanted: &(u64, String)) -> anyhow::Result<()> {
    let is_so = || Ok(shortcuts(host).is_ok_and(|found| found == *wanted));
    let waited = try_wait_until(&format!("shortcuts: {wanted:?}"), SETTLE, is_so);
    waited.with_context(|| format!("{:?}", shortcuts(host)))?;
    Ok(())
}
