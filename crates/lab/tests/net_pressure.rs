//! More load than a host can take. Packets wait before they are lost, each loss has a name, nothing grows, and
//! traffic goes on afterwards.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::Duration;

use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use serde_json::Value;
use weft_api::call;
use weft_api::{Client, Traffic};
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Container, Held, Host, SocketQueues, try_wait_until, wait_until};
use weft_io::{steer, uninterrupted};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::memory::{ensure_flat, resident_kib};
use weft_lab::net::{
    Lab, Stopped, attainable_bps, counter, is_soak, namespace, probe, slowness, wait_ping,
};

/// One worker at each end, so that there is one queue from each peer; kernels with IPsec would take the traffic.
const BRIDGE: [&str; 6] = ["--engine", "userspace", "--workers", "1", "--port-mode", "bridge"];
const DIRECT: [&str; 6] = ["--engine", "userspace", "--workers", "1", "--port-mode", "direct"];
/// How long what follows from a change may take.
const SETTLE: Duration = Duration::from_secs(15);
/// Bytes of each datagram of the floods.
const DATAGRAM_BYTES: usize = 1_300;
/// The most datagrams that are sent until a queue is full: many times what one holds.
const FLOOD_MAX: u32 = 400_000;
/// So many datagrams wait in a TAP device's queue, more than the kernel's default.
const TAP_FEW: u32 = 2_000;
/// More datagrams than it holds, and so few that the receiving sockets hold them all.
const TAP_FLOOD: u32 = 8_000;
/// Parts of the overload, with a look at the daemons' resources after each, and the seconds of each.
const PARTS: usize = 4;
const PART_SECONDS: &str = "2";
const PART_SECONDS_SOAK: &str = "60";
/// The most datagrams that are lost with one dropped message: a super-packet's.
const LOST_PER_DROP: i64 = 64;
/// Why the vector engine may drop packets here: a queue is full.
const FULL_QUEUES: [&str; 2] = ["drop_tap_full", "drop_send_full"];

fn pid(host: &Host) -> anyhow::Result<u32> {
    host.daemon_pid().ok_or_else(|| anyhow::anyhow!("no daemon runs"))
}

/// The fate of the packets from the first host to the second.
#[derive(Debug)]
struct Fate {
    /// Datagrams that the second has not taken.
    datagrams_missing: i64,
    /// Runs and single datagrams that it has neither taken nor dropped at its socket. Below zero where
    /// the kernel has cut a run on its way.
    runs_missing: i64,
    /// Messages dropped at its socket, or by the underlay's device.
    dropped: i64,
    dropped_by_device: i64,
}

impl Fate {
    /// Each counter must be there by its name.
    fn now(lab: &Lab) -> anyhow::Result<Self> {
        let (near, far) = (lab.host(0), lab.host(1));
        let of = |host, name| Ok::<_, anyhow::Error>(i64::try_from(counter(host, name)?)?);
        let (datagrams_sent, runs_sent) = (of(near, "datagrams_sent")?, of(near, "runs_sent")?);
        let links = near.netns().exec(&["ip", "-j", "-s", "link", "show", "eth0"])?;
        let links = links.success()?.json()?;
        let by_device = links[0]["stats64"]["tx"]["dropped"].as_i64();
        let dropped_by_device =
            by_device.ok_or_else(|| anyhow::anyhow!("no drops of eth0 in {links}"))?;
        let overflows = of(far, "socket_overflows")?;
        // Messages that the engine sends outside of runs.
        let alone = of(far, "keepalives")? + of(far, "dummies")?;
        let taken = of(far, "messages_received")? - alone;
        Ok(Self {
            datagrams_missing: datagrams_sent - of(far, "datagrams_received")?,
            runs_missing: runs_sent - taken - overflows,
            dropped: overflows + dropped_by_device,
            dropped_by_device,
        })
    }

    fn is_known(&self) -> bool {
        (0..=self.dropped * LOST_PER_DROP).contains(&self.datagrams_missing)
            && self.runs_missing <= self.dropped_by_device
    }
}

/// Waits until all packets sent are accounted for, including those under way.
fn all_is_accounted_for(lab: &Lab) -> anyhow::Result<()> {
    let mut last = None;
    let limit = Duration::from_secs(20);
    let known = wait_until("each datagram to be taken or dropped under a name", limit, || {
        last = Some(Fate::now(lab));
        matches!(&last, Some(Ok(fate)) if fate.is_known())
    });
    known.map_err(|error| anyhow::anyhow!("{error}: {last:?}"))?;
    Ok(())
}

/// Drops of both engines for other reasons than a full queue.
fn other_drops(lab: &Lab) -> anyhow::Result<Vec<(String, u64)>> {
    let mut drops = Vec::new();
    for host in lab.sandbox.hosts() {
        let report = host.weft_json(&["report"])?;
        let counters = report["counters"].as_object().cloned().unwrap_or_default();
        let count = |(name, count): (String, Value)| Some((name, count.as_u64()?));
        let is_other = |(name, count): &(String, u64)| {
            name.starts_with("drop_") && !FULL_QUEUES.contains(&name.as_str()) && *count > 0
        };
        drops.extend(counters.into_iter().filter_map(count).filter(is_other));
    }
    Ok(drops)
}

/// A socket of each container, of which the second's takes all that a flood's start brings.
fn sockets(one: &Container, two: &Container) -> anyhow::Result<(UdpSocket, UdpSocket)> {
    let receiver = probe::udp_in(&namespace(two), (two.ipv4()?, 0).into())?;
    set_socket_recv_buffer_size_force(&receiver, 16 << 20)?;
    receiver.set_read_timeout(Some(SETTLE * slowness()))?;
    let sender = probe::udp_in(&namespace(one), (one.ipv4()?, 0).into())?;
    sender.connect(receiver.local_addr()?)?;
    Ok((sender, receiver))
}

fn send(sender: &UdpSocket, numbers: std::ops::Range<u32>) -> anyhow::Result<()> {
    let mut bytes = [0; DATAGRAM_BYTES];
    for number in numbers {
        bytes[..4].copy_from_slice(&number.to_be_bytes());
        sender.send(&bytes)?;
    }
    Ok(())
}

/// Sends until a queue of the host that is to receive is full.
fn flood_until_lost(sender: &UdpSocket, far: &Host) -> anyhow::Result<()> {
    let queues = || pid(far).map(SocketQueues::of);
    let mut sent = 0;
    while queues()?.dropped == 0 {
        assert!(sent < FLOOD_MAX, "{sent} datagrams and no end: {:?}", queues()?);
        send(sender, sent..sent + 1_000)?;
        sent += 1_000;
    }
    Ok(())
}

/// So many datagrams come, whole and in the order in which they were sent.
fn all_arrive(receiver: &UdpSocket, count: u32) -> anyhow::Result<()> {
    let mut bytes = [0; DATAGRAM_BYTES + 1];
    for number in 0..count {
        let length = uninterrupted(|| receiver.recv(&mut bytes))
            .map_err(|error| anyhow::anyhow!("datagram {number} of {count}: {error}"))?;
        assert!(length == DATAGRAM_BYTES && bytes[..4] == number.to_be_bytes(), "{number}");
    }
    Ok(())
}

fn a_receiver_that_stands_still(options: &[&str]) -> anyhow::Result<()> {
    const FEW: u32 = 1_000;
    let lab = Lab::pair(options)?;
    let far = lab.host(1);
    let (one, two) = lab.containers()?;
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    let others = other_drops(&lab)?;
    let (sender, receiver) = sockets(&one, &two)?;
    let queues = || pid(far).map(SocketQueues::of);

    // Datagrams that fit into the socket's queue wait there.
    let stopped = Stopped::daemon_of(far)?;
    send(&sender, 0..FEW)?;
    let wanted = u64::from(FEW) * DATAGRAM_BYTES as u64;
    let all = try_wait_until("the datagrams to stand in the socket's queue", SETTLE, || {
        Ok(queues().is_ok_and(|queues| queues.fullest_bytes >= wanted))
    });
    all.map_err(|error| anyhow::anyhow!("{error}: {:?}", queues()))?;
    assert_eq!(queues()?.dropped, 0, "it loses before its queue is full");
    drop(stopped);
    all_arrive(&receiver, FEW)?;
    all_is_accounted_for(&lab)?;
    assert_eq!(counter(far, "socket_overflows")?, 0);

    // Datagrams beyond it are lost, and counted.
    let stopped = Stopped::daemon_of(far)?;
    flood_until_lost(&sender, far)?;
    let full = queues()?;
    drop(stopped);
    all_is_accounted_for(&lab)?;
    let lost = counter(far, "socket_overflows")?;
    note(&format!("{} KiB waited; lost {lost} messages", full.fullest_bytes >> 10));
    assert!(lost >= full.dropped, "{lost} counted, {full:?}");

    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    one.ping(two.ipv6()?.into())?;
    assert_eq!(counter(far, "socket_overflows")?, lost, "it goes on losing");
    assert_eq!(other_drops(&lab)?, others);
    Ok(())
}

#[test]
fn packets_for_a_stopped_worker_wait_and_losses_are_counted() -> anyhow::Result<()> {
    a_receiver_that_stands_still(&BRIDGE)
}

#[test]
fn packets_for_direct_ports_wait_and_losses_are_counted_too() -> anyhow::Result<()> {
    a_receiver_that_stands_still(&DIRECT)
}

/// Three hosts: the second sends more than the first takes. Only its packets are lost, none of the third's.
#[test]
fn excess_of_one_peer_costs_no_other() -> anyhow::Result<()> {
    const FEW: u32 = 1_000;
    let lab = Lab::launched(3, &BRIDGE)?;
    lab.wait_active()?;
    let host = lab.host(0);
    let target = host.add_container("target")?;
    let [flooding, other] = [1, 2].map(|index| lab.host(index).add_container("source"));
    let (flooding, other) = (flooding?, other?);
    for source in [&flooding, &other] {
        wait_ping(source, target.ipv4()?.into(), SETTLE)?;
    }
    let (flood, _) = sockets(&flooding, &target)?;
    let (sender, receiver) = sockets(&other, &target)?;
    let lost = || pid(host).map(|pid| SocketQueues::of(pid).dropped);

    let stopped = Stopped::daemon_of(host)?;
    flood_until_lost(&flood, host)?;
    // Packets still under way find no room either.
    let mut before = 0;
    wait_until("the last of the flood to be lost", SETTLE, || {
        lost().is_ok_and(|now| now == std::mem::replace(&mut before, now))
    })?;
    send(&sender, 0..FEW)?;
    drop(stopped);
    all_arrive(&receiver, FEW)?;
    Ok(())
}

/// Losses since a host's start, as the given counter of the host reports them.
fn shown_lost(host: &Host, place: fn(&Traffic) -> Option<u64>) -> anyhow::Result<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let daemon = Client::new(&host.runtime_directory());
    let traffic: Traffic = runtime.block_on(daemon.ask::<call::Traffic>())?;
    place(&traffic).ok_or_else(|| anyhow::anyhow!("it does not say: {traffic:?}"))
}

/// How many datagrams come until none has come for a while.
fn received(receiver: &UdpSocket) -> anyhow::Result<u32> {
    receiver.set_read_timeout(Some(Duration::from_secs(1) * slowness()))?;
    let (mut count, mut bytes) = (0, [0; DATAGRAM_BYTES + 1]);
    loop {
        match uninterrupted(|| receiver.recv(&mut bytes)) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(count),
            got => assert_eq!(got?, DATAGRAM_BYTES),
        }
        count += 1;
    }
}

/// Packets that the system sends in the first seconds, for multicast groups and to routers. They would find the
/// full queue too, and be counted.
const NO_REPORTS: &str = "table ip6 quiet { chain out { type filter hook output priority 0; icmpv6 type \
     { mld-listener-report, mld2-listener-report, nd-router-solicit } drop; }; }";

fn a_sender_whose_worker_stands_still(
    options: &[&str],
    place: fn(&Traffic) -> Option<u64>,
) -> anyhow::Result<()> {
    let lab = Lab::pair(options)?;
    let near = lab.host(0);
    let (one, two) = lab.containers()?;
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    let (sender, receiver) = sockets(&one, &two)?;
    assert_eq!(shown_lost(near, place)?, 0);

    // Packets that fit into the device's queue wait there, and go on as runs.
    let sent = |name| counter(near, name);
    let before = (sent("runs_sent")?, sent("datagrams_sent")?);
    let stopped = Stopped::daemon_of(near)?;
    send(&sender, 0..TAP_FEW)?;
    drop(stopped);
    assert_eq!(received(&receiver)?, TAP_FEW, "it loses before its queue is full");
    assert_eq!(shown_lost(near, place)?, 0);
    let (runs, datagrams) = (sent("runs_sent")? - before.0, sent("datagrams_sent")? - before.1);
    assert!(datagrams >= u64::from(TAP_FEW) && runs * 8 < datagrams, "{runs} of {datagrams}");

    let reports = |what: &str| -> anyhow::Result<()> {
        one.exec(&["nft", what])?.success()?;
        near.netns().exec(&["nft", what])?.success()?;
        Ok(())
    };
    reports(NO_REPORTS)?;
    let stopped = Stopped::daemon_of(near)?;
    send(&sender, 0..TAP_FLOOD)?;
    drop(stopped);
    let lost = TAP_FLOOD - received(&receiver)?;
    reports("delete table ip6 quiet")?;
    note(&format!("{lost} of {TAP_FLOOD} lost"));
    assert!((1..TAP_FLOOD).contains(&lost), "{lost} of {TAP_FLOOD} lost");
    assert_eq!(shown_lost(near, place)?, u64::from(lost));

    one.ping(two.ipv6()?.into())?;
    assert_eq!(shown_lost(near, place)?, u64::from(lost), "it goes on losing");
    Ok(())
}

#[test]
fn frames_of_the_switch_for_a_stopped_worker_are_counted_where_lost() -> anyhow::Result<()> {
    a_sender_whose_worker_stands_still(&BRIDGE, |traffic| {
        traffic.drops.get("tap_queue_full").copied()
    })
}

#[test]
fn frames_of_a_direct_port_meanwhile_are_counted_too() -> anyhow::Result<()> {
    a_sender_whose_worker_stands_still(&DIRECT, |traffic| Some(traffic.containers.first()?.dropped))
}

/// A container of this host with a different queue of the switch's TAP device.
fn neighbour_of(host: &Host, other: &Container) -> anyhow::Result<Container> {
    const CONTAINERS_MAX: usize = 20;
    let taken = steer::bucket_of_mac(mac_of(other)?);
    for number in 0..CONTAINERS_MAX {
        let neighbour = host.add_container(&format!("neighbour{number}"))?;
        if steer::bucket_of_mac(mac_of(&neighbour)?) != taken {
            return Ok(neighbour);
        }
    }
    anyhow::bail!("all share one queue")
}

fn mac_of(container: &Container) -> anyhow::Result<[u8; 6]> {
    let shown = container.exec(&["ip", "-j", "link", "show", "weft0"])?.success()?.json()?;
    let mac: weft_path::Mac = shown[0]["address"].as_str().unwrap_or_default().parse()?;
    Ok(mac.0)
}

#[test]
fn excess_of_one_container_costs_no_neighbour() -> anyhow::Result<()> {
    /// Few enough to leave room for the kernel's packets.
    const FEW: u32 = 900;
    let lab = Lab::pair(&BRIDGE)?;
    let near = lab.host(0);
    let (flooding, target) = lab.containers()?;
    let other = neighbour_of(near, &flooding)?;
    for source in [&flooding, &other] {
        wait_ping(source, target.ipv4()?.into(), SETTLE)?;
    }
    let (flood, flooded) = sockets(&flooding, &target)?;
    let (sender, receiver) = sockets(&other, &target)?;

    let stopped = Stopped::daemon_of(near)?;
    send(&flood, 0..TAP_FLOOD)?;
    send(&sender, 0..FEW)?;
    drop(stopped);
    all_arrive(&receiver, FEW)?;
    let arrived = received(&flooded)?;
    assert!((1..TAP_FLOOD).contains(&arrived), "{arrived} of {TAP_FLOOD} came");
    Ok(())
}

/// The median round trip of pings, in microseconds.
fn ping_us(from: &Container, to: &Container) -> anyhow::Result<f64> {
    let to = to.ipv4()?.to_string();
    let output = from.exec(&["ping", "-n", "-c", "21", "-i", "0.02", "-W", "5", &to])?.success()?;
    let time = |line: &str| line.split("time=").nth(1)?.split(' ').next()?.parse::<f64>().ok();
    let mut times: Vec<f64> = output.stdout.lines().filter_map(time).collect();
    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).map(|ms| ms * 1e3);
    median.ok_or_else(|| anyhow::anyhow!("no times in {}", output.stdout))
}

/// TCP's smoothed round-trip time, mean over a run and its streams, in microseconds.
fn smoothed_us(report: &Value) -> anyhow::Result<f64> {
    let streams = report["end"]["streams"].as_array().cloned().unwrap_or_default();
    let means = streams.iter().map(|stream| stream["sender"]["mean_rtt"].as_f64());
    let means: Option<Vec<f64>> = means.collect();
    let means = means.filter(|means| !means.is_empty());
    let means = means.ok_or_else(|| anyhow::anyhow!("no mean_rtt in {report}"))?;
    Ok(means.iter().sum::<f64>() / means.len() as f64)
}

#[test]
fn under_overload_tcp_waits_losses_have_names_and_nothing_grows() -> anyhow::Result<()> {
    let seconds = if is_soak() { PART_SECONDS_SOAK } else { PART_SECONDS };
    let lab = Lab::pair(&BRIDGE)?;
    let (one, two) = lab.containers()?;
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    let others = other_drops(&lab)?;
    let _server = Server::start(&two)?;
    let rest = ping_us(&one, &two)?;
    let mut looks = vec![Vec::new(); 2];
    for part in 0..PARTS {
        let held = Held::process(pid(lab.host(1))?);
        let words = ["-P", "8", "-t", seconds, "-i", "0.1", "-C", "cubic"];
        let report = iperf::run(&one, two.ipv4()?.into(), &words)?;
        drop(held);
        let load = smoothed_us(&report)?;
        note(&format!(
            "part {part}: {:.2} Gbit/s, {rest:.0} µs at rest, {load:.0} under load, {:?} sent again",
            iperf::received_bps(&report) / 1e9,
            iperf::retransmits(&report)
        ));
        assert!(load > rest, "nothing waits: {rest} µs at rest, {load} µs under load");
        all_is_accounted_for(&lab)?;
        for (host, looks) in lab.sandbox.hosts().iter().zip(&mut looks) {
            looks.push(resident_kib(pid(host)?)?);
        }
    }
    note(&format!("{looks:?} KiB after the parts"));
    looks.iter().try_for_each(|looks| ensure_flat(looks))?;
    one.ping(two.ipv4()?.into())?;
    let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
    assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
    all_is_accounted_for(&lab)?;
    assert_eq!(other_drops(&lab)?, others);
    Ok(())
}
