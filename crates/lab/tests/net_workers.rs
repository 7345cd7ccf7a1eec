//! Daemons with several workers: flows over several lanes, and none of it seen by the containers.

use std::net::{SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use weft_api::call;
use weft_api::{Client, Traffic, WorkersRequest};
use weft_bench::sandbox::{Container, Host, wait_until};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::probe::udp_in;
use weft_lab::net::{
    Lab, counter, is_soak, keep_order, losses, namespace, resend_on_loss_alone, slowness,
    tcp_counter, wait_connection, workers,
};

/// Kernels with IPsec would leave the workers nothing to do.
const VECTOR: &str = "--engine=userspace";

/// Flows that begin beside a stream, packets of each, and how many of them may go where the stream goes.
const FLOWS: usize = 16;
const FLOW_PACKETS: u64 = 100;
const FLOWS_ASTRAY_MAX: usize = 2;
/// How long a stream has to begin, and is looked at to see which lane is its.
const STREAM_START: Duration = Duration::from_secs(1);
const STREAM_LOOK: Duration = Duration::from_millis(300);

#[test]
fn flows_over_two_lanes_pass_rekeys_in_order() -> anyhow::Result<()> {
    let seconds: u32 = if is_soak() { 60 } else { 7 };
    let lab = Lab::pair(&[VECTOR, "--workers", "2", "--rekey-seconds", "2"])?;
    let (one, two) = lab.containers()?;
    keep_order([lab.host(0).netns(), lab.host(1).netns(), one.netns(), two.netns()])?;
    let _server = Server::start(&two)?;
    resend_on_loss_alone(&one)?;
    let flows = |seconds: &str| {
        let many = ["-t", seconds, "-P", "8", "-l", "32K", "-b", "20M"];
        iperf::run(&one, two.ipv4()?.into(), &many)
    };
    workers::use_all(lab.host(1), 2, || flows("1"))?;
    // A lane that comes takes the flows for which another stood in, at once.
    let disorder = disorders(&one, &two)?;
    let before = counter(lab.host(1), "rekeys")?;
    let report = flows(&seconds.to_string())?;
    let rekeys = counter(lab.host(1), "rekeys")? - before;
    every_lane_shows_its_rate(lab.host(0), 2, || flows("3"))?;
    assert!(rekeys >= u64::from(seconds) / 2 - 1, "{rekeys} rekeys in {seconds} s");
    assert_eq!(
        iperf::retransmits(&report),
        Some(0),
        "{}",
        losses::told(&lab, [&one, &two], &report)?
    );
    assert_eq!(disorders(&one, &two)?, disorder);
    for host in lab.sandbox.hosts() {
        for reason in ["drop_replayed", "drop_forged", "drop_unknown_spi", "drop_too_old"] {
            assert_eq!(counter(host, reason)?, 0, "{reason}");
        }
        wait_connection(host, "an active path", Duration::from_secs(1), |c| {
            c["state"] == "active"
        })?;
    }
    Ok(())
}

/// Reordering seen by the TCPs of two containers, by counter.
fn disorders(one: &Container, two: &Container) -> anyhow::Result<Vec<(&'static str, u64, u64)>> {
    let names = ["TcpExtTCPSACKReorder", "TcpExtTCPRenoReorder", "TcpExtTCPTSReorder"];
    let count = |name| Ok((name, tcp_counter(one, name)?, tcp_counter(two, name)?));
    names.into_iter().map(count).collect()
}

/// Packets that a host has sent on each lane with its peer.
fn sent_by_lane(host: &Host) -> anyhow::Result<Vec<u64>> {
    let daemon = Client::new(&host.runtime_directory());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let traffic: Traffic = runtime.block_on(daemon.ask::<call::Traffic>())?;
    let peer = traffic.peers.first().context("no peer")?;
    Ok(peer.lanes.iter().map(|lane| lane.volume.packets_sent).collect())
}

/// Packets sent on each lane since `before`.
fn since(before: &[u64], now: &[u64]) -> Vec<u64> {
    now.iter().zip(before).map(|(now, before)| now - before).collect()
}

/// Begins a flow of datagrams from one container to another and waits until all of it has come; returns
/// what went on each lane meanwhile.
fn sent_while_a_flow_goes(
    host: &Host,
    from: &Container,
    to: &Container,
) -> anyhow::Result<Vec<u64>> {
    let socket = |container: &Container| -> anyhow::Result<UdpSocket> {
        Ok(udp_in(&namespace(container), SocketAddr::new(container.ipv4()?.into(), 0))?)
    };
    let (sender, receiver) = (socket(from)?, socket(to)?);
    let (to, before) = (receiver.local_addr()?, sent_by_lane(host)?);
    for _ in 0..FLOW_PACKETS {
        sender.send_to(b"a request", to)?;
    }
    for _ in 0..FLOW_PACKETS {
        weft_io::uninterrupted(|| receiver.recv(&mut [0; 16]))?;
    }
    Ok(since(&before, &sent_by_lane(host)?))
}

#[test]
fn a_flow_that_begins_beside_a_stream_takes_another_lane() -> anyhow::Result<()> {
    let lab = Lab::pair(&[VECTOR, "--workers", "2"])?;
    let (one, two) = lab.containers()?;
    let _server = Server::start(&two)?;
    workers::use_all(lab.host(1), 2, || {
        iperf::run(&one, two.ipv4()?.into(), &["-t", "1", "-P", "8", "-b", "20M"])
    })?;
    let host = lab.host(0);
    let (report, away) = thread::scope(|scope| -> anyhow::Result<_> {
        let stream = scope.spawn(|| iperf::run(&one, two.ipv4()?.into(), &["-t", "6"]));
        thread::sleep(STREAM_START);
        let before = sent_by_lane(host)?;
        thread::sleep(STREAM_LOOK);
        let sent = since(&before, &sent_by_lane(host)?);
        anyhow::ensure!(
            sent.len() == 2 && sent[0].abs_diff(sent[1]) > workers::FLOW_DATAGRAMS,
            "{sent:?}"
        );
        // On which the stream is not.
        let other = usize::from(sent[0] > sent[1]);
        let mut away = Vec::new();
        for _ in 0..FLOWS {
            away.push(sent_while_a_flow_goes(host, &one, &two)?[other]);
        }
        Ok((stream.join().map_err(|_| anyhow::anyhow!("iperf3 panicked"))??, away))
    })?;
    assert!(iperf::received_bps(&report) > 0.0, "{report}");
    // By chance half of them would. A stream that the machine holds up for a moment looks like none.
    let took_it = away.iter().filter(|packets| **packets >= FLOW_PACKETS).count();
    assert!(took_it + FLOWS_ASTRAY_MAX >= FLOWS, "of {FLOW_PACKETS} packets each: {away:?}");
    Ok(())
}

/// While frames cross this many lanes both ways, `weft top` shows the load of each. The lane of a flow is chance,
/// and a machine may stall during a reading: flows start until every lane shows a rate.
fn every_lane_shows_its_rate(
    host: &Host,
    lanes: usize,
    flows: impl Fn() -> anyhow::Result<serde_json::Value> + Sync,
) -> anyhow::Result<()> {
    let until = Instant::now() + workers::TIMEOUT * slowness();
    loop {
        let top = thread::scope(|scope| {
            let load = scope.spawn(&flows);
            let top = host.weft_json(&["top", "--count", "1", "--interval", "2"])?;
            load.join().map_err(|_| anyhow::anyhow!("iperf3 panicked"))??;
            anyhow::Ok(top)
        })?;
        let peer = &top["peers"][0];
        let shown = peer["lanes"].as_array().cloned().unwrap_or_default();
        let numbers: Vec<_> = shown.iter().map(|lane| lane["lane"].as_u64()).collect();
        anyhow::ensure!(numbers == (0..lanes as u64).map(Some).collect::<Vec<_>>(), "{top}");
        let mut all = true;
        for rate in ["sent_pps", "received_pps"] {
            let of = |value: &serde_json::Value| value[rate].as_f64().unwrap_or_default();
            let sum: f64 = shown.iter().map(of).sum();
            anyhow::ensure!((sum - of(peer)).abs() < 1.0, "{rate}: {sum} of all lanes in {top}");
            all &= shown.iter().all(|lane| of(lane) > 0.0);
        }
        if all {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < until, "a lane has no rate: {top}");
    }
}

#[test]
fn hosts_may_differ_in_workers() -> anyhow::Result<()> {
    let lab = Lab::pair(&[VECTOR, "--workers", "1"])?;
    let (one, two) = lab.containers()?;
    lab.host(1).stop_daemon()?;
    let password = lab.password_file();
    let password = password.to_string_lossy();
    let first = lab.host(0).ipv4().to_string();
    let arguments = ["--password-file", &password, VECTOR, "--workers", "3", &first];
    lab.host(1).start_daemon(&arguments)?;
    lab.wait_active()?;
    let _servers = (Server::start(&one)?, Server::start(&two)?);
    for (from, to) in [(&one, &two), (&two, &one)] {
        let report = iperf::run(from, to.ipv4()?.into(), &["-t", "3", "-P", "6"])?;
        assert!(iperf::received_bps(&report) > 0.0, "{report}");
    }
    let moved = workers::datagrams(lab.host(0))?;
    assert!(moved.iter().all(|it| it.sent > 100 && it.received > 100), "{moved:?}");
    assert_eq!((moved.len(), workers::datagrams(lab.host(1))?.len()), (1, 3));
    Ok(())
}

#[test]
fn workers_come_and_go_on_request_without_a_retransmission() -> anyhow::Result<()> {
    workers_come_and_go("direct")
}

#[test]
fn workers_come_and_go_behind_the_bridge_without_a_retransmission() -> anyhow::Result<()> {
    workers_come_and_go("bridge")
}

fn workers_come_and_go(port_mode: &str) -> anyhow::Result<()> {
    let lab = Lab::pair(&[VECTOR, "--workers", "1", "--port-mode", port_mode])?;
    let (one, two) = lab.containers()?;
    keep_order([lab.host(0).netns(), lab.host(1).netns(), one.netns(), two.netns()])?;
    let _servers = (Server::start(&one)?, Server::start(&two)?);
    resend_on_loss_alone(&one)?;
    let (to, back) = (two.ipv4()?.into(), one.ipv4()?.into());
    let load = ["-t", "16", "-P", "6", "-l", "32K", "-b", "20M"];
    let report = thread::scope(|scope| {
        let load = scope.spawn(|| iperf::run(&one, to, &load));
        for number in [3, 1, 2, 3, 2] {
            thread::sleep(Duration::from_secs(1));
            for host in lab.sandbox.hosts() {
                let answer = host.weft_json(&["workers", &number.to_string()])?;
                assert_eq!(answer["workers"], number, "{answer}");
                assert_eq!(answer["lanes"], 3, "{answer}");
                assert_eq!(host.weft_json(&["workers"])?, answer);
                assert_eq!(host.weft_json(&["status"])?["workers"], number);
            }
            if number == 3 {
                // Those flows that run stay where they are.
                workers::use_all(lab.host(0), 3, || {
                    iperf::run(&two, back, &["-t", "1", "-P", "12"])
                })?;
            }
        }
        load.join().map_err(|_| anyhow::anyhow!("iperf3 panicked"))?
    })?;
    assert_eq!(
        iperf::retransmits(&report),
        Some(0),
        "{}",
        losses::told(&lab, [&one, &two], &report)?
    );
    let top = lab.host(0).weft_json(&["top", "--count", "1", "--interval", "0.2"])?;
    assert_eq!(top["workers"].as_array().map(Vec::len), Some(2), "{top}");
    // Their traffic before the removal is still counted.
    let moved = workers::datagrams(lab.host(0))?;
    assert!(
        moved.len() == 3 && moved.iter().all(|it| it.received > workers::FLOW_DATAGRAMS),
        "{moved:?}"
    );
    for host in lab.sandbox.hosts() {
        for reason in ["drop_replayed", "drop_forged", "drop_unknown_spi", "drop_no_path"] {
            assert_eq!(counter(host, reason)?, 0, "{reason}");
        }
    }
    Ok(())
}

#[test]
fn workers_keep_to_one_processor_each_where_that_is_asked_for() -> anyhow::Result<()> {
    let cpus = weft_io::cpu::allowed()?.len();
    let lab = Lab::pair(&[VECTOR, "--workers", "2"])?;
    let host = lab.host(0);
    let all = processors_of_workers(host)?;
    assert!(all.len() == 2 && all[0] == all[1], "{all:?}");
    host.stop_daemon()?;
    let password = lab.password_file();
    let password = password.to_string_lossy();
    let pinned = [VECTOR, "--workers", "2", "--pin-workers", "--password-file", &password];
    host.start_daemon(&pinned)?;
    // Later workers are pinned too.
    host.weft_json(&["workers", "3"])?;
    wait_until("each worker's processor", Duration::from_secs(10), || {
        let one = processors_of_workers(host).unwrap_or_default();
        let alone = one.iter().filter(|list| list.parse::<u32>().is_ok());
        let different = one.iter().collect::<std::collections::BTreeSet<_>>().len();
        alone.count() == 3 && different == cpus.min(3)
    })?;
    Ok(())
}

/// The processors that each worker of a host may use, as the kernel writes them.
fn processors_of_workers(host: &Host) -> anyhow::Result<Vec<String>> {
    let pid = host.daemon_pid().ok_or_else(|| anyhow::anyhow!("no daemon"))?;
    let mut found = std::collections::BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        // A thread may end while it is looked at.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let worker = field("Name:\tweft-engine").and_then(|number| number.parse::<usize>().ok());
        if let (Some(worker), Some(list)) = (worker, field("Cpus_allowed_list:\t")) {
            found.insert(worker, list.to_owned());
        }
    }
    Ok(found.into_values().collect())
}

#[test]
fn a_daemon_begins_with_the_fastest_libraries() -> anyhow::Result<()> {
    let lab = Lab::launched(1, &[VECTOR])?;
    let log = lab.host(0).log();
    for cipher in ["aes-256-gcm", "chacha20-poly1305"] {
        let says = |line: &str| line.contains("chose the fastest library") && line.contains(cipher);
        assert!(log.lines().any(says), "{cipher}: {log}");
    }
    Ok(())
}

/// Started from a shell that gives few descriptors.
#[test]
fn there_are_descriptors_for_all_workers_that_can_be() -> anyhow::Result<()> {
    const FEW: u64 = 512;
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(FEW), ..before })?;
    let lab = Lab::pair(&[VECTOR, "--workers", "1"]);
    setrlimit(Resource::Nofile, before)?;
    let lab = lab?;
    let (one, two) = lab.containers()?;
    let host = lab.host(0);
    host.weft(&["workers", "32"])?.success()?;
    let pid = host.daemon_pid().ok_or_else(|| anyhow::anyhow!("no daemon"))?;
    let open = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
    assert!(open > FEW, "{open} descriptors tell nothing");
    one.ping(two.ipv4()?.into())?;
    host.weft(&["workers", "1"])?.success()?;
    one.ping(two.ipv4()?.into())?;
    Ok(())
}

#[test]
fn a_number_of_workers_that_cannot_be_is_refused() -> anyhow::Result<()> {
    let lab = Lab::pair(&[VECTOR, "--workers", "1"])?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let daemon = Client::new(&lab.host(0).runtime_directory());
    for workers in [0, 33] {
        let output = lab.host(0).weft(&["workers", &workers.to_string()])?;
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(output.stderr.contains("1..=32"), "{output:?}");
        let request = WorkersRequest { workers };
        let answer = daemon.call::<call::SetWorkers>(&request);
        let text =
            runtime.block_on(answer).map_or_else(|error| error.to_string(), |_| String::new());
        assert!(text.contains("1 to 32"), "{text}");
    }
    assert_eq!(lab.host(0).weft_json(&["workers"])?["workers"], 1);
    Ok(())
}
