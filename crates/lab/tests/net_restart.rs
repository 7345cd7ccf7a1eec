//! Daemons that are killed and started again, hosts that come and go.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use weft_bench::sandbox::wait_until;
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{Lab, attainable_bps, slowness, wait_connection, wait_ping};

#[test]
fn after_kill_9_containers_are_attached_and_traffic_flows_without_a_command() -> anyhow::Result<()>
{
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    one.ping(two.ipv4()?.into())?;
    let before = (two.ipv4()?, two.ipv6()?);
    let attached = lab.host(1).weft_json(&["ps"])?;
    for arguments in [&[][..], &[lab.host(0).ipv4().to_string()]] {
        lab.host(1).kill_daemon();
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        lab.host(1).start_daemon(&words)?;
        wait_ping(&one, before.0.into(), Duration::from_secs(15))?;
        assert_eq!((two.ipv4()?, two.ipv6()?), before);
        assert_eq!(lab.host(1).weft_json(&["ps"])?, attached);
        one.ping(before.1.into())?;
    }
    Ok(())
}

/// A program that a daemon was about to start when it was killed has the daemon's locks until it is read from the
/// disk.
#[test]
fn a_launch_waits_for_locks_that_a_killed_daemon_left() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(1);
    for directory in [host.runtime_directory(), host.state_directory()] {
        host.kill_daemon();
        let script = "exec 9<lock && flock 9 && sleep 3 >/dev/null 2>&1 &";
        let mut shell = std::process::Command::new("sh");
        let left = shell.args(["-c", script]).current_dir(&directory).status()?;
        assert!(left.success());
        let locked = || {
            let mut other = std::process::Command::new("flock");
            let taken = other.args(["-n", "lock", "true"]).current_dir(&directory).status();
            taken.is_ok_and(|status| !status.success())
        };
        wait_until("the lock to be taken", Duration::from_secs(10), locked)?;
        host.start_daemon(&[])?;
    }
    Ok(())
}

#[test]
fn deletions_by_hand_and_ended_containers_are_noticed() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let address = two.ipv4()?;
    one.ping(address.into())?;
    lab.sandbox.remove_netns(two.netns())?;
    let gone =
        || -> anyhow::Result<bool> { Ok(lab.host(1).weft_json(&["ps"])?[0]["state"] == "gone") };
    for _ in 0..50 * slowness() {
        if gone()? {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(gone()?, "an ended container is still attached");
    let links = lab.host(1).netns().ip("-br link")?.stdout;
    assert!(!links.contains("weftv"), "{links}");
    lab.host(1).netns().ip("link del weft")?;
    lab.host(1).kill_daemon();
    lab.host(1).start_daemon(&[])?;
    let three = lab.host(1).add_container("c3")?;
    wait_ping(&one, three.ipv4()?.into(), Duration::from_secs(15))?;
    Ok(())
}

#[test]
fn three_hosts_become_a_full_mesh_from_one_address() -> anyhow::Result<()> {
    let lab = Lab::launched(3, &[])?;
    let containers = [
        lab.host(0).add_container("c1")?,
        lab.host(1).add_container("c2")?,
        lab.host(2).add_container("c3")?,
    ];
    for from in &containers {
        for to in &containers {
            wait_ping(from, to.ipv4()?.into(), Duration::from_secs(5))?;
            from.ping(to.ipv6()?.into())?;
        }
    }
    let peers = lab.host(2).weft_json(&["status", "peers"])?;
    assert_eq!(peers.as_array().map(Vec::len), Some(3), "{peers}");
    // The host that the others were told of is not needed any more.
    lab.host(0).kill_daemon();
    containers[1].ping(containers[2].ipv4()?.into())?;
    let text = lab.host(1).weft(&["status", "connections"])?.success()?.stdout;
    assert!(text.contains("active"), "{text}");
    Ok(())
}

#[test]
fn containers_attached_at_one_moment_on_all_hosts_get_different_addresses() -> anyhow::Result<()> {
    let lab = Lab::launched(3, &[])?;
    let addresses = std::thread::scope(|scope| {
        let attach = |host: usize| {
            let lab = &lab;
            scope.spawn(move || -> anyhow::Result<Vec<IpAddr>> {
                let mut given = Vec::new();
                for number in 0..5 {
                    let container = lab.host(host).add_container(&format!("c{number}"))?;
                    given.extend(container.addresses()?);
                }
                Ok(given)
            })
        };
        let threads: Vec<_> = (0..3).map(attach).collect();
        let mut all = Vec::new();
        for thread in threads {
            all.extend(thread.join().map_err(|_| anyhow::anyhow!("an attach panicked"))??);
        }
        anyhow::Ok(all)
    })?;
    let different: BTreeSet<&IpAddr> = addresses.iter().collect();
    assert_eq!(addresses.len(), 30, "an IPv4 and an IPv6 address each");
    assert_eq!(different.len(), addresses.len(), "{addresses:?}");
    Ok(())
}

#[test]
fn a_peer_that_dies_is_shown_as_failed_and_found_again() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (one, two) = lab.containers()?;
    let _server = Server::start(&two)?;
    lab.host(1).netns().ip("link set eth0 down")?;
    let failed = |c: &serde_json::Value| c["state"] != "active" && c["reason"].is_string();
    let connection = wait_connection(lab.host(0), "a failure", Duration::from_secs(20), failed)?;
    assert!(connection["since"].is_string(), "{connection}");
    lab.host(1).netns().ip("link set eth0 up")?;
    lab.wait_active()?;
    wait_ping(&one, two.ipv4()?.into(), Duration::from_secs(10))?;
    let report = iperf::run(&one, two.ipv4()?.into(), &["-t", "1"])?;
    assert!(iperf::received_bps(&report) > attainable_bps(1e8), "{report}");
    Ok(())
}
