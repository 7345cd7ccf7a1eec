//! The stage itself: hosts of a sandbox reach each other, and nothing of it is left behind, however it ends.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use weft_bench::sandbox::{Sandbox, SandboxOptions, Underlay, sweep, wait_until};

const LIMIT: Duration = Duration::from_secs(30);

#[test]
fn three_hosts_reach_each_other_over_the_underlay() {
    let options = SandboxOptions { hosts: 3, mtu: 1400, ..SandboxOptions::default() };
    let sandbox = Sandbox::new(&options).unwrap();
    for from in sandbox.hosts() {
        for to in sandbox.hosts() {
            for address in [to.ipv4().to_string(), to.ipv6().to_string()] {
                // 1372 bytes and 28 of headers fill the MTU; over IPv6 the headers are 48.
                let size = if address.contains(':') { "1352" } else { "1372" };
                let words = ["ping", "-n", "-c", "1", "-W", "5", "-M", "do", "-s", size, &address];
                from.netns().exec(&words).unwrap().success().unwrap();
            }
        }
    }
}

#[test]
fn the_underlay_wire_carries_no_super_packets() {
    let sandbox = Sandbox::new(&SandboxOptions::default()).unwrap();
    let features = |wanted: &str| {
        let output = sandbox.host(0).netns().exec(&["ethtool", "-k", "eth0"]).unwrap();
        let line = output.stdout.lines().find(|line| line.trim().starts_with(wanted)).unwrap();
        line.contains(": on")
    };
    assert!(features("tcp-segmentation-offload") && features("tx-udp-segmentation"));
    sandbox.set_underlay(Underlay::Wire).unwrap();
    assert!(!features("tcp-segmentation-offload") && !features("tx-udp-segmentation"));
    assert!(features("generic-receive-offload"));
    sandbox.set_underlay(Underlay::Veth).unwrap();
    assert!(features("tcp-segmentation-offload") && features("tx-udp-segmentation"));
}

#[test]
fn a_dropped_sandbox_leaves_nothing() {
    let sandbox = Sandbox::new(&SandboxOptions::default()).unwrap();
    let (tag, directory) = (sandbox.tag().to_owned(), sandbox.directory().to_owned());
    let mut sleeper = sandbox.host(1).netns().spawn(&["sleep", "1000"]).unwrap();
    assert_eq!(namespaces(&tag).len(), 2);
    let group = control_groups().map(|place| place.join(format!("weft-{tag}-host1")));
    if let Some(group) = &group {
        std::fs::create_dir_all(group.join("docker/container")).unwrap();
    }
    // `ip netns exec` has to enter the namespace first.
    let netns = sandbox.host(1).netns().name().to_owned();
    let entered = || {
        let pids = std::process::Command::new("ip").args(["netns", "pids", &netns]).output();
        pids.is_ok_and(|pids| !pids.stdout.is_empty())
    };
    weft_bench::sandbox::wait_until("a process in the namespace", LIMIT, entered).unwrap();
    drop(sandbox);
    assert_eq!(namespaces(&tag), Vec::<String>::new());
    assert!(!directory.exists());
    assert!(group.is_none_or(|group| !group.exists()));
    sleeper.wait(LIMIT).unwrap();
}

#[test]
fn ctrl_c_leaves_nothing_and_is_told_by_the_exit_code() {
    let mut bench = Bench::start();
    bench.signal(Signal::INT);
    let status = bench.child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    assert_eq!(namespaces(&bench.tag), Vec::<String>::new());
    assert!(!bench.directory.exists());
}

#[test]
fn leftovers_of_a_killed_run_are_swept() {
    let mut bench = Bench::start();
    bench.signal(Signal::KILL);
    bench.child.wait().unwrap();
    assert_ne!(namespaces(&bench.tag), Vec::<String>::new());
    // Another test that begins now may sweep it first.
    sweep();
    let is_gone = || namespaces(&bench.tag).is_empty() && !bench.directory.exists();
    wait_until("the sandbox to be swept", LIMIT, is_gone).unwrap();
}

/// A benchmark in the middle of its work, as a separate process.
struct Bench {
    child: Child,
    tag: String,
    directory: PathBuf,
}

impl Bench {
    fn start() -> Self {
        let binary = std::env::var("WEFT_BIN").expect("WEFT_BIN names the weft binary") + "-bench";
        let child = Command::new(binary)
            .args(["bench", "--quick", "--rows", "direct", "--seconds", "60"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut tag = None;
        let owner = format!("{} ", child.id());
        wait_until("the benchmark's hosts", LIMIT, || {
            tag = tag_of(&owner);
            tag.as_ref().is_some_and(|tag| namespaces(tag).len() == 2)
        })
        .unwrap();
        let tag = tag.unwrap();
        let directory = Path::new("/run/weft-sandbox").join(&tag);
        Self { child, tag, directory }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A hierarchy of control groups, of version 1 or 2; `None` where none is mounted.
fn control_groups() -> Option<&'static Path> {
    let places = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(Path::new);
    places.into_iter().find(|place| place.join("cgroup.procs").exists())
}

fn tag_of(owner: &str) -> Option<String> {
    let entries = std::fs::read_dir("/run/weft-sandbox").ok()?.flatten();
    let mut named = entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
    let found = named.find(|entry| {
        std::fs::read_to_string(entry.path().join("owner"))
            .is_ok_and(|mark| mark.starts_with(owner))
    })?;
    Some(found.file_name().to_string_lossy().into_owned())
}

fn namespaces(tag: &str) -> Vec<String> {
    let prefix = format!("weft-{tag}-");
    let Ok(entries) = std::fs::read_dir("/run/netns") else { return Vec::new() };
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(&prefix)).collect()
}
