//! What a daemon takes from its host when nothing, and when much, is to be done.

use std::time::Duration;

use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, is_soak};

/// User and system time of a process in clock ticks (proc(5), stat, fields 14 and 15).
fn ticks(pid: u32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}

fn resident_kib(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.ok_or_else(|| anyhow::anyhow!("no VmRSS in {status}"))?.parse()?)
}

#[test]
fn an_idle_daemon_is_small_and_sleeps() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (_one, _two) = lab.containers()?;
    std::thread::sleep(Duration::from_secs(2));
    let seconds = 10;
    let pids: Vec<u32> = lab.sandbox.hosts().iter().filter_map(|host| host.daemon_pid()).collect();
    assert_eq!(pids.len(), 2);
    let before: Vec<u64> = pids.iter().map(|pid| ticks(*pid)).collect::<Result<_, _>>()?;
    std::thread::sleep(Duration::from_secs(seconds));
    for (pid, before) in pids.iter().zip(before) {
        // 100 ticks a second: half a per cent of ten seconds is five.
        let used = ticks(*pid)? - before;
        assert!(used <= seconds / 2, "{used} ticks in {seconds} s");
        let resident = resident_kib(*pid)?;
        assert!(resident < 64 << 10, "{resident} KiB resident");
    }
    Ok(())
}

#[test]
fn memory_does_not_grow_under_traffic() -> anyhow::Result<()> {
    let seconds = if is_soak() { 600 } else { 60 };
    let lab = Lab::pair(&["--rekey-seconds", "5"])?;
    let (one, two) = lab.containers()?;
    let _servers = (Server::start(&one)?, Server::start(&two)?);
    let pids: Vec<u32> = lab.sandbox.hosts().iter().filter_map(|host| host.daemon_pid()).collect();
    let load = |tcp: &str, udp: &str| -> anyhow::Result<()> {
        iperf::run(&one, two.ipv4()?.into(), &["-t", tcp, "-P", "4", "--bidir"])?;
        iperf::run(&two, one.ipv4()?.into(), &["-t", udp, "-u", "-b", "200M", "-l", "200"])?;
        Ok(())
    };
    // Each kind of load fills its buffers and tables once.
    load("14", "6")?;
    let before: Vec<u64> = pids.iter().map(|pid| resident_kib(*pid)).collect::<Result<_, _>>()?;
    for _ in 0..seconds / 20 {
        load("14", "6")?;
    }
    for (pid, before) in pids.iter().zip(before) {
        let after = resident_kib(*pid)?;
        assert!(after < before + 2048, "{before} KiB before, {after} KiB after {seconds} s");
    }
    Ok(())
}
