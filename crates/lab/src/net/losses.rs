//! Losses between two containers, by the counters of every place that may lose packets.

use std::collections::BTreeMap;

use serde_json::Value;
use weft_bench::sandbox::{Container, Host};

use super::Lab;

/// Counters of a host's vector engine that stand for packets dropped and are not zero.
///
/// # Errors
/// The daemon does not answer.
pub fn drops(host: &Host) -> anyhow::Result<BTreeMap<String, u64>> {
    let report = host.weft_json(&["report"])?;
    let all = report["counters"].as_object().into_iter().flatten();
    let all = all.map(|(name, count)| (name.clone(), count.as_u64().unwrap_or(u64::MAX)));
    let is_drop = |name: &str| name.starts_with("drop_") || name == "socket_overflows";
    Ok(all.filter(|(name, count)| is_drop(name) && *count > 0).collect())
}

/// Packets that the queue between the bridge and the workers had no room for.
///
/// # Errors
/// There is no such queue.
pub fn tap_overflows(host: &Host) -> anyhow::Result<u64> {
    let links = host.netns().exec(&["ip", "-j", "-s", "link", "show", "type", "tun"])?;
    let links = links.success()?.json()?;
    let links = links.as_array().cloned().unwrap_or_default();
    let dropped = links.iter().map(|link| link["stats64"]["tx"]["dropped"].as_u64());
    let sum: Option<u64> = dropped.sum();
    sum.filter(|_| !links.is_empty()).ok_or_else(|| anyhow::anyhow!("no drops in {links:?}"))
}

/// A container's TCP counters of losses and reordering that are not zero.
///
/// # Errors
/// The kernel has no such counters.
pub fn tcp_counts(container: &Container) -> anyhow::Result<BTreeMap<String, u64>> {
    let text = container.exec(&["cat", "/proc/net/netstat", "/proc/net/snmp"])?.success()?.stdout;
    let mut counts = BTreeMap::new();
    for table in ["TcpExt: ", "Tcp: "] {
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(table));
        let (names, of) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        let numbers = of.split(' ').map(|count| count.parse().unwrap_or_default());
        counts.extend(names.split(' ').map(str::to_owned).zip(numbers).filter(|(_, n)| *n > 0));
    }
    Ok(counts)
}

/// All of these for all hosts, two containers and a flow's report by iperf3. A test that wanted no retransmission
/// shows them: they tell the place and the second of the loss. A host may be without TAP devices.
///
/// # Errors
/// Another one of them is not to be had.
pub fn told(lab: &Lab, ends: [&Container; 2], report: &Value) -> anyhow::Result<String> {
    let mut told = String::new();
    for host in lab.sandbox.hosts() {
        let (name, drops, taps) = (host.nickname(), drops(host)?, tap_overflows(host).ok());
        told += &format!("{name}: {drops:?}, overflows of TAP queues: {taps:?}\n");
    }
    for container in ends {
        told += &format!("{}: {:?}\n", container.name(), tcp_counts(container)?);
    }
    let intervals = report["intervals"].as_array().into_iter().flatten();
    for stream in intervals.flat_map(|interval| interval["streams"].as_array()).flatten() {
        if stream["retransmits"].as_u64() > Some(0) {
            told += &format!("{stream}\n");
        }
    }
    Ok(told + &report["end"]["sum_sent"].to_string())
}
