//! Path choice when paths are blocked, lossy, late, narrow or loaded later, and the report of `weft status`.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::Value;
use weft_bench::sandbox::{Container, Host, slowness, wait_until};
use weft_lab::net::guest::stage::{is_active, is_on, path, says, wait_candidate, wait_path};
use weft_lab::net::guest::wire::Blocked;
use weft_lab::net::guest::{
    BACK_LIMIT_S, Block, FAIL_OVER_LIMIT, Flow, Nat, Netem, Outer, SETTLE_LIMIT, Stage, by_clock,
    figure, host, xfrm,
};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{counter, namespace, probe};
use weft_path::CARRY_ON_MS;

/// Between two datagrams of a stream.
const EVERY: Duration = Duration::from_millis(10);
fn raw(connection: &Value) -> bool {
    is_on("kernel", "kernel")(connection) && connection["encapsulation"] == "raw"
}

fn ready(stage: &Stage) -> anyhow::Result<(Container, Container)> {
    let (one, two) = stage.containers()?;
    stage.reach(&one, &two)?;
    Ok((one, two))
}

/// A stateful firewall that accepts new packets between hosts, but not the packets that the kernel has opened
/// from them.
fn raise_firewall(host: &Host) -> anyhow::Result<()> {
    const RULES: &str = "add table inet hostfw; \
        add chain inet hostfw in { type filter hook input priority 0 ; policy drop ; }; \
        add rule inet hostfw in iif lo accept; \
        add rule inet hostfw in meta l4proto ipv6-icmp accept; \
        add rule inet hostfw in ct state established,related accept; \
        add rule inet hostfw in udp dport 6783-6786 accept; \
        add rule inet hostfw in tcp dport 6783 accept; \
        add rule inet hostfw in meta l4proto esp accept";
    host.netns().exec(&["nft", RULES])?.success()?;
    Ok(())
}

/// Adds to it the rule that the reason names.
fn mend_firewall(host: &Host, connection: &Value) -> anyhow::Result<()> {
    let reason = connection["reason"].as_str().context("no reason")?;
    let rule = reason.split("accept: ").nth(1).context("the reason names no rule")?;
    let command = format!("nft 'insert rule inet hostfw in {rule} accept'");
    host.netns().exec(&["bash", "-c", &command])?.success()?;
    Ok(())
}

/// Around the peer's kernel, and why.
fn around_the_firewall(connection: &Value) -> bool {
    is_on("kernel", "userspace")(connection)
        && says(connection, &["peer's host firewall drops UDP 6787 after IPsec; accept: udp dport"])
}

#[test]
fn a_firewall_that_drops_what_ipsec_has_opened_is_gone_around_named_and_mended()
-> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    let (here, there) = (stage.host(0), stage.host(1));
    raise_firewall(there)?;
    let launched = Instant::now();
    stage.launch(0, &[])?;
    stage.launch(1, &[])?;
    let (one, two) = ready(&stage)?;
    figure("pings through the firewall after", format!("{:.1?}", launched.elapsed()));
    let limit = by_clock(BACK_LIMIT_S);
    let found = wait_path(here, there, "the way around", limit, around_the_firewall)?;
    figure("the firewall named after", format!("{:.1?}", launched.elapsed()));
    // No probe was taken for an answer and let in: the host behind the firewall has seen it itself.
    let report = there.weft_json(&["report"])?;
    let unheard = report["kernel_counters"]["paths_unheard"].as_u64();
    assert!(unheard > Some(0), "{}", report["kernel_counters"]);
    // The other way there is no firewall.
    wait_path(there, here, "the best path back", SETTLE_LIMIT, raw)?;
    // The path in use stays in use: no kernel path takes turns with another.
    let flow = Flow::start(&one, &two, EVERY)?;
    flow.wait_more(1_000, SETTLE_LIMIT)?;
    mend_firewall(there, &found)?;
    let mended = Instant::now();
    let best = wait_path(here, there, "the best path", by_clock(BACK_LIMIT_S), raw)?;
    figure("the best path after its mending", format!("{:.1?}", mended.elapsed()));
    assert!(best["reason"].is_null(), "{best}");
    flow.wait_more(200, SETTLE_LIMIT)?;
    flow.stop()?.ensure_no_loss().context("with the firewall, and moving back")?;
    Ok(())
}

#[test]
fn firewalls_that_are_raised_on_both_hosts_over_ipv6_cost_a_fail_over() -> anyhow::Result<()> {
    let stage = Stage::with(2, Outer::V6, 1_500)?.launched(&[&[], &[]])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the best path", SETTLE_LIMIT, raw)?;
    let flow = Flow::start(&one, &two, EVERY)?;
    flow.wait_more(100, SETTLE_LIMIT)?;
    let at = Instant::now();
    raise_firewall(here)?;
    raise_firewall(there)?;
    let mut found = Vec::new();
    for (host, peer) in [(here, there), (there, here)] {
        let limit = by_clock(BACK_LIMIT_S);
        found.push((peer, wait_path(host, peer, "the way around", limit, around_the_firewall)?));
    }
    figure("both firewalls named after", format!("{:.1?}", at.elapsed()));
    flow.wait_more(200, SETTLE_LIMIT)?;
    outage(flow, at, "fail-over from a firewall behind the kernel")?;
    for (host, connection) in &found {
        mend_firewall(host, connection)?;
    }
    let flow = Flow::start(&one, &two, EVERY)?;
    for (host, peer) in [(here, there), (there, here)] {
        wait_path(host, peer, "the best path again", by_clock(BACK_LIMIT_S), raw)?;
    }
    flow.wait_more(100, SETTLE_LIMIT)?;
    flow.stop()?.ensure_no_loss().context("moving back")?;
    Ok(())
}

/// The time without a packet from `at` on, printed and asserted with a margin for the emulated processor. The
/// simulator asserts the limit itself.
fn outage(flow: Flow, at: Instant, what: &str) -> anyhow::Result<Duration> {
    let report = flow.stop()?;
    let gap = report.longest_gap(at);
    figure(what, format!("{} ms without a packet, {} lost", gap.as_millis(), report.lost().len()));
    anyhow::ensure!(report.doubled().is_empty(), "{what}: doubled {:?}", report.doubled());
    anyhow::ensure!(gap <= FAIL_OVER_LIMIT * slowness(), "{what}: nothing for {gap:?}");
    Ok(gap)
}

#[test]
fn blocked_protocol_50_moves_to_udp_and_back() -> anyhow::Result<()> {
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let first = wait_path(here, there, "the best path", SETTLE_LIMIT, raw)?;
    assert!(first["reason"].is_null(), "the best path has a reason: {first}");
    let flow = Flow::start(&one, &two, EVERY)?;
    flow.wait_more(50, SETTLE_LIMIT)?;
    let at = Instant::now();
    let block = Block::all(&stage, &[Blocked::Protocol50])?;
    let in_udp = |c: &Value| {
        is_on("kernel", "kernel")(c)
            && c["encapsulation"] == "udp"
            && says(c, &["protocol 50 blocked"])
    };
    for (host, peer) in [(here, there), (there, here)] {
        wait_path(host, peer, "ESP in UDP with its reason", SETTLE_LIMIT, in_udp)?;
    }
    flow.wait_more(50, SETTLE_LIMIT)?;
    outage(flow, at, "fail-over from raw ESP to ESP in UDP")?;
    let failed = |p: &Value| {
        p["encapsulation"] == "raw" && p["state"] == "failed" && says(p, &["protocol 50 blocked"])
    };
    let path = wait_candidate(here, there, "the blocked path", SETTLE_LIMIT, failed)?;
    assert!(path["next_try"].is_string(), "{path}");
    assert!(block.dropped()? > 0, "nothing was blocked");
    drop(block);
    let flow = Flow::start(&one, &two, EVERY)?;
    let back = Instant::now();
    for (host, peer) in [(here, there), (there, here)] {
        let path = wait_path(host, peer, "the raw path again", by_clock(BACK_LIMIT_S), raw)?;
        assert!(path["reason"].is_null(), "{path}");
    }
    figure("back on raw ESP after", format!("{:.1} s", back.elapsed().as_secs_f64()));
    let report = flow.stop()?;
    report.ensure_no_loss().context("moving back")?;
    Ok(())
}

#[test]
fn blocked_udp_data_ports_leave_raw_esp_and_are_named() -> anyhow::Result<()> {
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the best path", SETTLE_LIMIT, raw)?;
    let flow = Flow::start(&one, &two, EVERY)?;
    let block = Block::all(&stage, &[Blocked::DataPorts])?;
    let blocked = |p: &Value| {
        p["encapsulation"] == "udp" && p["state"] == "failed" && says(p, &["data ports blocked"])
    };
    wait_candidate(here, there, "a blocked path in UDP", by_clock(BACK_LIMIT_S), blocked)?;
    assert!(raw(&path(here, there)?), "the raw path must stay");
    drop(block);
    let standby = |p: &Value| p["encapsulation"] == "udp" && p["state"] == "standby";
    wait_candidate(here, there, "a path in UDP that works again", by_clock(BACK_LIMIT_S), standby)?;
    flow.stop()?.ensure_no_loss().context("on the path in use")?;
    Ok(())
}

#[test]
fn blocked_udp_data_ports_between_vector_engines_fail_with_the_reason_and_heal()
-> anyhow::Result<()> {
    let stage = Stage::pair(&["--engine", "userspace"], &["--engine", "userspace"])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let block = Block::all(&stage, &[Blocked::DataPorts])?;
    let failed = |c: &Value| c["state"] == "failed" && says(c, &["data ports blocked"]);
    let connection = wait_path(here, there, "the failure", SETTLE_LIMIT, failed)?;
    assert!(!says(&connection, &["protocol 50"]), "{connection}");
    drop(block);
    wait_path(
        here,
        there,
        "the path again",
        by_clock(BACK_LIMIT_S),
        is_on("userspace", "userspace"),
    )?;
    stage.reach(&one, &two)?;
    Ok(())
}

#[test]
fn with_both_blocked_the_state_is_failed_both_are_named_and_it_heals() -> anyhow::Result<()> {
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the best path", SETTLE_LIMIT, raw)?;
    let block = Block::all(&stage, &[Blocked::Protocol50, Blocked::DataPorts])?;
    let failed = |c: &Value| {
        c["state"] == "failed" && says(c, &["protocol 50 blocked", "data ports blocked"])
    };
    for (host, peer) in [(here, there), (there, here)] {
        wait_path(host, peer, "the failure with both reasons", SETTLE_LIMIT, failed)?;
    }
    let status = host::status(here)?;
    assert_eq!(status["ready"], false, "{status}");

    // Frames for the peer are dropped and counted once the path has carried on without success for a while.
    let dropped = || counter(here, "drop_no_path");
    let before = dropped()?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    receiver.set_read_timeout(Some(Duration::from_secs(1)))?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    let to = receiver.local_addr()?;
    wait_until("20 counted drops", Duration::from_millis(CARRY_ON_MS) + SETTLE_LIMIT, || {
        _ = sender.send_to(b"into the dark", to);
        dropped().is_ok_and(|now| now >= before + 20)
    })?;
    assert!(probe::expect_datagram(&receiver, b"into the dark").is_err(), "a datagram came");
    drop(block);
    let back = Instant::now();
    for (host, peer) in [(here, there), (there, here)] {
        wait_path(host, peer, "an active path", by_clock(BACK_LIMIT_S), is_active)?;
    }
    stage.reach(&one, &two)?;
    figure("healed after", format!("{:.1} s", back.elapsed().as_secs_f64()));
    wait_path(here, there, "the best path again", by_clock(BACK_LIMIT_S), raw)?;
    Ok(())
}

#[test]
fn with_the_kernel_ports_blocked_both_ways_the_vector_engine_takes_over() -> anyhow::Result<()> {
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the best path", SETTLE_LIMIT, raw)?;
    let flow = Flow::start(&one, &two, EVERY)?;
    flow.wait_more(50, SETTLE_LIMIT)?;
    let at = Instant::now();
    let block = Block::all(&stage, &[Blocked::Protocol50, Blocked::KernelPort])?;
    let vector = |c: &Value| is_active(c) && c["remote_engine"] == "userspace";
    wait_path(here, there, "a path to the vector engine", SETTLE_LIMIT, vector)?;
    flow.wait_more(50, SETTLE_LIMIT)?;
    outage(flow, at, "fail-over from the kernel to the vector engine")?;
    drop(block);
    wait_path(here, there, "the best path again", by_clock(BACK_LIMIT_S), raw)?;
    Ok(())
}

#[test]
fn an_engines_own_report_moves_traffic_at_once() -> anyhow::Result<()> {
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the best path", SETTLE_LIMIT, raw)?;
    // The other paths must have been proven, or there is nothing to move to.
    let standby = |p: &Value| p["state"] == "standby";
    wait_candidate(here, there, "a standby", SETTLE_LIMIT, standby)?;
    let outbound = xfrm::own_states(here.netns())?;
    let outbound = outbound.iter().filter(|sa| sa.source == here.ipv4().to_string());
    let flow = Flow::start(&one, &two, Duration::from_millis(2))?;
    flow.wait_more(100, SETTLE_LIMIT)?;
    let at = Instant::now();
    let script: Vec<String> = outbound
        .filter(|sa| !sa.text.contains("encap"))
        .map(|sa| {
            format!(
                "ip xfrm state delete src {} dst {} proto esp spi {}",
                sa.source, sa.destination, sa.spi
            )
        })
        .collect();
    assert!(!script.is_empty(), "no raw SA to delete");
    // Once one lane is gone Weft itself removes the others.
    let (first, others) = (&script[0], script[1..].join("; "));
    let script = format!("{first} || exit 1; ({others}) 2>/dev/null; true");
    here.netns().exec(&["bash", "-c", &script])?.success()?;
    flow.wait_more(100, SETTLE_LIMIT)?;
    outage(flow, at, "fail-over after the kernel's own report (100 ms in the simulator)")?;
    wait_path(here, there, "the best path again", by_clock(BACK_LIMIT_S), raw)?;
    Ok(())
}

#[test]
fn a_peer_whose_address_changes_is_found_again() -> anyhow::Result<()> {
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the best path", SETTLE_LIMIT, raw)?;
    let flow = Flow::start(&one, &two, EVERY)?;
    flow.wait_more(50, SETTLE_LIMIT)?;
    let at = Instant::now();
    // The new one would go with the old one if it came first.
    there.netns().ip("addr del 192.0.2.2/24 dev eth0")?;
    there.netns().ip("addr add 192.0.2.102/24 dev eth0")?;
    let moved = |p: &Value| {
        is_active(p) && p["remote"].as_str().is_some_and(|remote| remote.starts_with("192.0.2.102"))
    };
    wait_candidate(here, there, "a path to the new address", by_clock(BACK_LIMIT_S), moved)?;
    flow.wait_more(50, by_clock(BACK_LIMIT_S))?;
    let gap = flow.stop()?.longest_gap(at);
    figure("the peer's address changed", format!("{} ms without a packet", gap.as_millis()));
    let kernel = is_on("kernel", "kernel");
    wait_path(here, there, "the kernel's path at the new address", by_clock(BACK_LIMIT_S), kernel)?;
    let stale = || -> anyhow::Result<Vec<xfrm::Sa>> {
        let mut states = xfrm::own_states(here.netns())?;
        states.retain(|sa| [&sa.source, &sa.destination].contains(&&"192.0.2.2".to_owned()));
        Ok(states)
    };
    // Packets already under way are received for a while.
    let gone = || stale().is_ok_and(|stale| stale.is_empty());
    let result = wait_until("the SAs of the old address to go", by_clock(90), gone);
    result.map_err(|error| anyhow::anyhow!("{error}: {:?}", stale()))?;
    Ok(())
}

#[test]
fn behind_a_nat_the_kernels_go_through_udp_and_follow_the_nats_address() -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    let mut nat = Nat::before(&stage, 1, "192.0.2.102")?;
    let stage = stage.launched(&[&[], &[]])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let through = |c: &Value| {
        is_on("kernel", "kernel")(c) && c["encapsulation"] == "udp" && says(c, &["NAT"])
    };
    let _server = Server::start(&two)?;
    for (number, address) in ["192.0.2.102", "192.0.2.103"].into_iter().enumerate() {
        let flow = Flow::start(&one, &two, EVERY)?;
        let at = Instant::now();
        if number > 0 {
            nat.set_address(address)?;
        }
        for (host, peer) in [(here, there), (there, here)] {
            wait_path(host, peer, "ESP in UDP for the NAT", by_clock(BACK_LIMIT_S), through)?;
        }
        // The port is the NAT's choice, not the host's behind it.
        let mapped = |p: &Value| {
            let remote = p["remote"].as_str().and_then(|it| it.parse::<SocketAddr>().ok());
            let mapped = |it: SocketAddr| it.ip().to_string() == address && it.port() >= 20_000;
            is_active(p) && through(p) && remote.is_some_and(mapped)
        };
        wait_candidate(here, there, "the NAT's port", by_clock(BACK_LIMIT_S), mapped)?;
        flow.wait_more(50, by_clock(BACK_LIMIT_S))?;
        let gap = flow.stop()?.longest_gap(at);
        figure(&format!("NAT at {address}"), format!("{} ms without a packet", gap.as_millis()));
        stage.reach(&two, &one)?;
        let report = iperf::run(&one, two.ipv4()?.into(), &["-n", "2M"])?;
        assert!(iperf::received_bps(&report) > 0.0, "{report}");
    }
    // The NAT has broken every checksum over addresses inside ESP.
    let told = here.netns().exec(&["dmesg"])?.success()?.stdout;
    let complaints: Vec<_> = told.lines().filter(|line| line.contains("csum failure")).collect();
    assert_eq!(complaints, Vec::<&str>::new(), "the kernel complains");
    Ok(())
}

#[test]
fn loss_reordering_doubling_and_delay_keep_the_path_and_the_order_of_things() -> anyhow::Result<()>
{
    let stage = Stage::pair(&["--engine", "kernel"], &["--engine", "kernel"])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let _server = Server::start(&two)?;
    for (words, name) in [
        ("loss random 1%", "1 % loss"),
        ("delay 20ms reorder 75% 50%", "reordering"),
        ("duplicate 20%", "duplication"),
        ("delay 100ms", "100 ms delay each way"),
    ] {
        let netem = Netem::on(&stage, 2, words)?;
        let flow = Flow::start(&one, &two, Duration::from_millis(5))?;
        flow.wait_more(600, SETTLE_LIMIT)?;
        let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "3"])?;
        assert!(iperf::received_bps(&report) > 1e5, "{name}: {report}");
        let sum = flow.stop()?;
        let (sent, lost) = (sum.sent.len(), sum.lost().len());
        let rate = iperf::received_bps(&report) / 1e6;
        figure(name, format!("{lost} of {sent} lost, TCP {rate:.1} Mbit/s"));
        assert_eq!(sum.doubled(), Vec::<u32>::new(), "{name}: the replay window let copies pass");
        match name {
            "1 % loss" => assert!(lost * 100 < sent * 4 && lost > 0, "{lost} of {sent} lost"),
            "reordering" => {
                assert!(sum.is_reordered(), "netem did not reorder");
                assert_eq!(lost, 0, "{name}");
            }
            _ => assert_eq!(lost, 0, "{name}"),
        }
        let connection = path(here, there)?;
        assert!(raw(&connection), "{name}: {connection}");
        if name.starts_with("100 ms") {
            let slow = |c: &Value| c["rtt_us"].as_u64() > Some(180_000);
            wait_path(here, there, "the round trip in the status", SETTLE_LIMIT, slow)?;
        }
        drop(netem);
    }
    Ok(())
}

#[test]
fn a_narrower_way_is_named_and_told_to_containers_and_gives_way_to_the_vector_engine()
-> anyhow::Result<()> {
    let stage = Stage::pair(&[], &[])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the best path", SETTLE_LIMIT, raw)?;
    let netns = stage.middle()?;
    netns.ip("link set port2 mtu 1400")?;
    there.netns().ip("link set eth0 mtu 1400")?;
    // Not only told by the link: the way itself is narrow. A bridge lets 4 bytes more pass, for a tag.
    let vector = |c: &Value| {
        is_active(c)
            && c["engine"] == "userspace"
            && says(c, &["MTU not carried"])
            && c["mtu"].as_u64().is_some_and(|mtu| (1200..=1312).contains(&mtu))
    };
    wait_path(
        here,
        there,
        "the vector engine, since the MTU is not carried",
        by_clock(BACK_LIMIT_S),
        vector,
    )?;
    let to = two.ipv4()?.to_string();
    let ping = ["ping", "-n", "-M", "do", "-s", "1360", "-c", "2", "-W", "2", &to];
    let output = one.exec(&ping)?;
    let text = format!("{}{}", output.stdout, output.stderr);
    assert!(text.contains("mtu") || text.contains("Message too long"), "{text}");
    probe::datagram_arrives(
        (&namespace(&one), one.ipv4()?.into()),
        (&namespace(&two), two.ipv4()?.into()),
        9_000,
    )?;
    netns.ip("link set port2 mtu 1500")?;
    there.netns().ip("link set eth0 mtu 1500")?;
    wait_path(here, there, "the best path again", by_clock(BACK_LIMIT_S), raw)?;
    Ok(())
}

#[test]
fn on_a_narrow_way_the_kernel_alone_answers_by_icmp_and_clamps_tcp() -> anyhow::Result<()> {
    narrow_for_the_kernel_alone("bridge")
}

#[test]
fn on_a_narrow_way_the_datapath_answers_by_icmp_and_clamps_tcp() -> anyhow::Result<()> {
    narrow_for_the_kernel_alone("odp")
}

fn narrow_for_the_kernel_alone(switch: &str) -> anyhow::Result<()> {
    let options = ["--engine", "kernel", "--switch", switch];
    let stage = Stage::pair(&options, &options)?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    for (netns, device) in [(stage.middle()?, "port2"), (there.netns(), "eth0")] {
        netns.ip(&format!("link set {device} mtu 1400"))?;
    }
    let narrow = |c: &Value| is_active(c) && c["mtu"].as_u64().is_some_and(|mtu| mtu <= 1320);
    let found = wait_path(here, there, "the smaller MTU", by_clock(BACK_LIMIT_S), narrow)?;
    figure("the kernel path's MTU on 1,400 bytes", &found["mtu"]);

    // The link reports to no one that it is narrow; TCP passes it nevertheless.
    let _server = Server::start(&two)?;
    let words =
        ["tcpdump", "-Z", "root", "-n", "-l", "-v", "-i", "weft0", "tcp[tcpflags] & tcp-syn != 0"];
    let mut seen = two.spawn(&words)?;
    seen.line_with("listening on", Duration::from_secs(20))?;
    let report = iperf::run(&one, two.ipv4()?.into(), &["-n", "2M"])?;
    assert!(iperf::received_bps(&report) > 0.0, "{report}");
    let line = seen.line_with("mss ", Duration::from_secs(10))?;
    let mss = line.split("mss ").nth(1).and_then(|rest| rest.split([',', ' ', ']']).next());
    let mss: u64 = mss.unwrap_or_default().parse()?;
    figure("MSS that the peer was told", mss);
    assert!(Some(mss + 40) <= found["mtu"].as_u64(), "MSS {mss} does not fit {found}");

    // Once the host's own link is as narrow, the kernel answers what is too long.
    here.netns().ip("link set eth0 mtu 1400")?;
    for address in [two.ipv4()?.to_string(), two.ipv6()?.to_string()] {
        let ping = ["ping", "-n", "-M", "do", "-s", "1340", "-c", "3", "-W", "2", &address];
        let output = one.exec(&ping)?;
        let text = format!("{}{}", output.stdout, output.stderr);
        let told = text.split("mtu").nth(1).map(|rest| rest.trim_start_matches([' ', '=', ':']));
        let told = told.and_then(|rest| rest.split(|it: char| !it.is_ascii_digit()).next());
        let told: Option<u64> = told.and_then(|digits| digits.parse().ok());
        figure(&format!("MTU that ICMP tells for {address}"), format!("{told:?}"));
        assert!(told.is_some_and(|mtu| (1280..=1316).contains(&mtu)), "{address}: {text}");
    }
    Ok(())
}

/// A link of 1,300 bytes leaves 1,216 inside, and IPv6 has a right to 1,280.
#[test]
fn on_a_narrow_way_the_kernel_alone_carries_ipv6_in_two_pieces() -> anyhow::Result<()> {
    let stage = Stage::with(2, Outer::V4, 1_300)?.launched(&[&["--engine", "kernel"][..]; 2])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    wait_path(here, there, "the smaller MTU", SETTLE_LIMIT, |c| is_active(c) && c["mtu"] == 1216)?;
    let status = here.weft(&["status"])?.success()?.stdout;
    assert!(status.contains("in two pieces"), "{status}");
    let full = |count: &str| {
        let address = two.ipv6()?.to_string();
        one.exec(&["ping", "-n", "-M", "do", "-s", "1232", "-c", count, "-i", "0.2", &address])
    };
    wait_until("IPv6 of 1280 bytes passes", SETTLE_LIMIT, || {
        full("1").is_ok_and(|it| it.status.success())
    })?;
    let text = full("20")?.success()?.stdout;
    assert!(text.contains(" 0% packet loss"), "{text}");
    // A wide link again: nothing is cut any more.
    for (netns, device) in [
        (stage.middle()?, "port1"),
        (stage.middle()?, "port2"),
        (stage.middle()?, "br0"),
        (here.netns(), "eth0"),
        (there.netns(), "eth0"),
    ] {
        netns.ip(&format!("link set {device} mtu 1500"))?;
    }
    let is_set = || {
        let shown = here.netns().exec(&["ip", "-d", "link", "show", "weft-vxlan"]);
        shown.is_ok_and(|it| it.stdout.contains(" df set "))
    };
    assert!(!is_set());
    wait_until("don't-fragment is set again", by_clock(BACK_LIMIT_S), is_set)?;
    Ok(())
}

#[test]
fn a_jumbo_underlay_is_found_and_used() -> anyhow::Result<()> {
    let stage = Stage::with(2, Outer::V4, 9000)?.launched(&[&[], &[]])?;
    let (one, two) = ready(&stage)?;
    let (here, there) = (stage.host(0), stage.host(1));
    let jumbo = |c: &Value| raw(c) && c["mtu"].as_u64() > Some(8_800);
    let found = wait_path(here, there, "the jumbo path", by_clock(BACK_LIMIT_S), jumbo)?;
    figure("the kernel path's MTU on 9,000 bytes", &found["mtu"]);
    assert!(one.mtu()? >= 8_880, "the container's MTU is {}", one.mtu()?);
    let to = two.ipv4()?.to_string();
    let ping = ["ping", "-n", "-M", "do", "-s", "8800", "-c", "3", "-W", "2", &to];
    one.exec(&ping)?.success()?;
    Ok(())
}

#[test]
fn a_standard_underlay_that_grows_to_jumbo_is_noticed_by_probing() -> anyhow::Result<()> {
    // Containers were attached with a small MTU; the path's own grows with the underlay.
    let stage = Stage::with(2, Outer::V4, 1500)?;
    let stage = stage.launched(&[&["--engine", "userspace"], &["--engine", "userspace"]])?;
    let (here, there) = (stage.host(0), stage.host(1));
    let before = path(here, there)?["mtu"].as_u64();
    let middle = stage.middle()?;
    for port in ["port1", "port2", "br0"] {
        middle.ip(&format!("link set {port} mtu 9000"))?;
    }
    for host in [here, there] {
        host.netns().ip("link set eth0 mtu 9000")?;
    }
    let grown = |c: &Value| is_active(c) && c["mtu"].as_u64() > before;
    let found = wait_path(here, there, "a greater MTU", by_clock(BACK_LIMIT_S), grown)?;
    figure("the vector path's MTU after the underlay grew", &found["mtu"]);
    Ok(())
}
