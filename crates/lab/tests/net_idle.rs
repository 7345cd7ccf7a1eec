//! The processor time and memory of a daemon, idle and under load.
// The figures go to the log.
#![allow(clippy::print_stdout)]

use std::time::Duration;

use anyhow::Context;
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::memory::{ensure_flat, resident_kib};
use weft_lab::net::{Lab, is_soak};

/// The least and the greatest number of parts of the load between readings of memory.
const PARTS: usize = 3;
const PARTS_MAX: usize = 9;

/// How long a look at an idle daemon takes, and how many there are at most.
const IDLE_LOOK: Duration = Duration::from_secs(10);
const IDLE_LOOKS: usize = 4;
/// How often the threads of an idle daemon may wake in one look: 60 times a second.
const IDLE_WAKEUPS_MAX: u64 = 600;
/// Clock ticks (100 a second) in one look that no daemon has reached that sleeps between its wakeups, on any machine.
const IDLE_TICKS_MAX: u64 = 100;

/// How often the threads of a process have woken (proc(5), status) and for how many clock ticks it ran (stat, fields
/// 14 and 15).
fn usage(pid: u32) -> anyhow::Result<(u64, u64)> {
    let mut wakeups = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = std::fs::read_to_string(task?.path().join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        wakeups += line.context("no count of switches")?.trim().parse::<u64>()?;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    Ok((wakeups, fields[11].parse::<u64>()? + fields[12].parse::<u64>()?))
}

#[test]
fn an_idle_daemon_is_small_and_sleeps() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (_one, _two) = lab.containers()?;
    std::thread::sleep(Duration::from_secs(2));
    let pids: Vec<u32> = lab.sandbox.hosts().iter().filter_map(|host| host.daemon_pid()).collect();
    assert_eq!(pids.len(), 2);
    // A host that is busy or stopped for a moment only adds to a reading: the least counts.
    let mut least = vec![(u64::MAX, u64::MAX); pids.len()];
    let is_idle =
        |(wakeups, ticks): &(u64, u64)| *wakeups <= IDLE_WAKEUPS_MAX && *ticks <= IDLE_TICKS_MAX;
    for _ in 0..IDLE_LOOKS {
        let before: Vec<_> = pids.iter().map(|pid| usage(*pid)).collect::<Result<_, _>>()?;
        std::thread::sleep(IDLE_LOOK);
        for ((pid, before), least) in pids.iter().zip(before).zip(&mut least) {
            let (wakeups, ticks) = usage(*pid)?;
            *least = (least.0.min(wakeups - before.0), least.1.min(ticks - before.1));
        }
        if least.iter().all(is_idle) {
            break;
        }
    }
    println!("    {least:?} wakeups and ticks in {} s", IDLE_LOOK.as_secs());
    assert!(least.iter().all(is_idle), "{least:?} wakeups and ticks at the least");
    for pid in pids {
        let resident = resident_kib(pid)?;
        assert!(resident < 64 << 10, "{resident} KiB resident");
    }
    Ok(())
}

#[test]
fn memory_does_not_grow_under_traffic() -> anyhow::Result<()> {
    // A part is as many rounds of 20 s.
    let rounds = if is_soak() { 10 } else { 1 };
    let lab = Lab::pair(&["--rekey-seconds", "5"])?;
    let (one, two) = lab.containers()?;
    let _servers = (Server::start(&one)?, Server::start(&two)?);
    let pids: Vec<u32> = lab.sandbox.hosts().iter().filter_map(|host| host.daemon_pid()).collect();
    let load = || -> anyhow::Result<()> {
        iperf::run(&one, two.ipv4()?.into(), &["-t", "14", "-P", "4", "--bidir"])?;
        iperf::run(&two, one.ipv4()?.into(), &["-t", "6", "-u", "-b", "200M", "-l", "200"])?;
        Ok(())
    };
    // Each kind of load fills its buffers and tables once.
    load()?;
    let look = || pids.iter().map(|pid| resident_kib(*pid)).collect::<Result<Vec<u64>, _>>();
    let mut looks: Vec<Vec<u64>> = look()?.into_iter().map(|resident| vec![resident]).collect();
    loop {
        (0..rounds).try_for_each(|_| load())?;
        for (looks, resident) in looks.iter_mut().zip(look()?) {
            looks.push(resident);
        }
        println!("    {looks:?} KiB");
        let flat = looks.iter().try_for_each(|looks| ensure_flat(looks));
        // Queues that a busy host leaves deeper than ever before add to some parts in a row, a leak
        // adds to all.
        let parts = looks[0].len() - 1;
        if parts >= PARTS_MAX || (parts >= PARTS && flat.is_ok()) {
            return flat;
        }
    }
}
