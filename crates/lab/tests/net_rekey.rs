//! Rekeying under load: not one packet lost, not one retransmission caused.

use std::time::Duration;

use serde_json::Value;
use weft::sandbox::{Container, Host};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{
    Lab, counter, is_soak, keep_order, namespace, probe, slowness, wait_connection,
};

/// The vector engine's counters of drops that are not zero.
fn drops(host: &Host) -> anyhow::Result<Vec<(String, Value)>> {
    let report = host.weft_json(&["report"])?;
    let all = report["counters"].as_object().into_iter().flatten();
    let named = |name: &str| name.starts_with("drop_") || name == "socket_overflows";
    let drops = all.filter(|(name, count)| named(name) && **count != 0);
    Ok(drops.map(|(name, count)| (name.clone(), count.clone())).collect())
}

/// What a container's TCP says of losses, where it is not zero.
fn tcp_counts(container: &Container) -> anyhow::Result<Vec<String>> {
    let text = container.exec(&["cat", "/proc/net/netstat"])?.success()?.stdout;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, counts) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let all = names.split(' ').zip(counts.split(' ')).filter(|(_, count)| *count != "0");
    Ok(all.map(|(name, count)| format!("{name} {count}")).collect())
}

#[test]
fn rekeying_every_two_seconds_loses_nothing_and_causes_no_retransmission() -> anyhow::Result<()> {
    let seconds: u32 = if is_soak() { 120 } else { 9 };
    let lab = Lab::pair(&["--rekey-seconds", "2"])?;
    let (one, two) = lab.containers()?;
    let ends = [lab.host(0).netns(), lab.host(1).netns(), one.netns(), two.netns()];
    keep_order(ends)?;
    let _server = Server::start(&two)?;
    one.ping(two.ipv4()?.into())?;
    // Tail loss probes answer to the scheduling of a busy machine, not to loss; what is lost is seen
    // by the receiver's selective acknowledgements all the same.
    one.exec(&["sysctl", "-q", "-w", "net.ipv4.tcp_early_retrans=0"])?.success()?;
    let before = counter(lab.host(1), "rekeys")?;
    let receiver = probe::udp_in(&namespace(&two), (two.ipv4()?, 5001).into())?;
    let sender = probe::udp_in(&namespace(&one), (one.ipv4()?, 0).into())?;
    let target = receiver.local_addr()?;
    // 200 Mbit/s of TCP: enough that packets are under way at each change, little enough that no
    // queue of this machine overflows and causes a retransmission of its own.
    let rate = format!("{}M", 200 / slowness());
    let arguments = ["-t", &seconds.to_string(), "-b", &rate, "-C", "cubic"];
    let report = std::thread::scope(|scope| {
        let load = scope.spawn(|| iperf::run(&one, two.ipv4()?.into(), &arguments));
        let mut lost = Vec::new();
        for number in 0_u32.. {
            if load.is_finished() {
                break;
            }
            sender.send_to(&number.to_be_bytes(), target)?;
            if probe::expect_datagram(&receiver, &number.to_be_bytes()).is_err() {
                lost.push(number);
            }
            std::thread::sleep(Duration::from_micros(2_300));
        }
        anyhow::ensure!(lost.is_empty(), "datagrams {lost:?} were lost");
        load.join().map_err(|_| anyhow::anyhow!("iperf3 panicked"))?
    })?;
    let rekeys = counter(lab.host(1), "rekeys")? - before;
    assert!(rekeys >= u64::from(seconds) / 2 - 1, "{rekeys} rekeys in {seconds} s");
    if iperf::retransmits(&report) != Some(0) {
        let drops = [drops(lab.host(0))?, drops(lab.host(1))?];
        anyhow::bail!("{drops:?}, sender: {:?}, {report}", tcp_counts(&one)?);
    }
    wait_connection(lab.host(0), "an active path", Duration::from_secs(1), |c| {
        c["state"] == "active"
    })?;
    Ok(())
}
