//! Identity and addresses of hosts: copies of hosts, states out of a backup, addresses that change, several
//! addresses.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use weft_bench::sandbox::{Host, Sandbox, SandboxOptions, try_wait_until};
use weft_lab::net::{Lab, slowness, wait_ping};

/// Makes one directory what the other is, as from a backup or the image of a machine.
fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let _ = std::fs::remove_dir_all(to);
    assert!(Command::new("cp").arg("-a").args([from, to]).status()?.success());
    Ok(())
}

/// Waits until `weft status` of a host says all these words; its text then.
fn wait_said(host: &Host, words: &[&str]) -> anyhow::Result<String> {
    let mut text = String::new();
    for _ in 0..100 * slowness() {
        text = host.weft(&["status"])?.stdout + &host.weft(&["status", "connections"])?.stdout;
        if words.iter().all(|word| text.contains(word)) {
            return Ok(text);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    anyhow::bail!("h{} does not say {words:?}: {text}", host.index() + 1)
}

#[test]
fn a_copy_of_a_running_host_is_refused_by_name_and_the_original_goes_on() -> anyhow::Result<()> {
    let lab = Lab::launched(3, &[])?;
    let (h1, original, third) = (lab.host(0), lab.host(1), lab.host(2));
    third.stop_daemon()?;
    // Before there is a container, which would be on both hosts in this lab.
    copy(&original.state_directory(), &third.state_directory())?;
    let (c1, c2) = (h1.add_container("c1")?, original.add_container("c2")?);
    wait_ping(&c1, c2.ipv4()?.into(), Duration::from_secs(10))?;
    let address = c2.ipv4()?.to_string();
    let pings = lab.sandbox.directory().join("pings");
    let ping = ["ping", "-i", "0.2", "-w", "20", "-q", &address];
    let mut watch = c1.netns().spawn_logged(&ping, &std::fs::File::create(&pings)?)?;
    third.start_daemon(&[&h1.ipv4().to_string()])?;
    let words = [
        &*third.nickname(),
        &third.ipv4().to_string(),
        "has the same identity as",
        &original.nickname(),
        &original.ipv4().to_string(),
        "weft reset",
    ];
    wait_said(third, &words)?;
    wait_said(h1, &words)?;
    let free = lab.sandbox.add_netns("free")?;
    let refused = third.weft(&["attach", &free.path()])?;
    assert!(!refused.status.success(), "{}", refused.stdout);
    watch.wait(Duration::from_secs(60))?;
    let told = std::fs::read_to_string(&pings)?;
    assert!(told.contains(" 0% packet loss"), "the original's traffic goes on: {told}");
    original.weft(&["status"])?.success()?;
    // It goes on as itself once it is one, and in the original's place once that has gone.
    original.stop_daemon()?;
    third.stop_daemon()?;
    third.weft(&["reset", "--force"])?.success()?;
    let password = lab.password_file().to_string_lossy().into_owned();
    third.start_daemon(&["--password-file", &password, &h1.ipv4().to_string()])?;
    let c3 = third.add_container("c3")?;
    wait_ping(&c1, c3.ipv4()?.into(), Duration::from_secs(15))?;
    assert_ne!(c3.ipv4()?, c2.ipv4()?);
    Ok(())
}

#[test]
fn a_restored_state_directory_gives_no_address_and_says_why() -> anyhow::Result<()> {
    let lab = Lab::launched(2, &[])?;
    let host = lab.host(1);
    let c1 = lab.host(0).add_container("c1")?;
    host.add_container("before")?;
    let backup = lab.sandbox.directory().join("backup");
    copy(&host.state_directory(), &backup)?;
    let since = host.add_container("since")?;
    wait_ping(&c1, since.ipv4()?.into(), Duration::from_secs(10))?;
    // As it is on the same start of the machine, and after a reboot, when other hosts alone can tell.
    for reboot in [false, true] {
        host.stop_daemon()?;
        copy(&backup, &host.state_directory())?;
        if reboot {
            let _ = std::fs::remove_file(host.runtime_directory().join("last-run.json"));
        }
        host.start_daemon(&[])?;
        wait_said(host, &["older than the one known", "weft reset"])?;
        let free = lab.sandbox.add_netns(if reboot { "two" } else { "one" })?;
        let refused = host.weft(&["attach", &free.path()])?;
        let text = refused.stdout.clone() + &refused.stderr;
        assert!(!refused.status.success() && text.contains("older than the one known"), "{text}");
    }
    Ok(())
}

/// The name of the device with a host's first address.
fn device(host: &Host) -> anyhow::Result<String> {
    let text = host.netns().ip("-o -4 addr show")?.stdout;
    let line = text.lines().find(|line| line.contains(&format!(" {}/", host.ipv4())));
    let device = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(device.ok_or_else(|| anyhow::anyhow!("no device has {}: {text}", host.ipv4()))?.to_owned())
}

/// A stateful firewall lets in only answers to its host, which dialled the other host's second address.
#[test]
fn data_leaves_from_the_address_that_was_dialled() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let (two_addresses, behind) = (sandbox.host(0), sandbox.host(1));
    let device = device(two_addresses)?;
    two_addresses.netns().ip(&format!("addr add 192.0.2.101/24 dev {device}"))?;
    let rules = "table inet fw {\n chain input {\n type filter hook input priority 0\n \
                 ct state established,related accept\n meta l4proto udp drop\n }\n }\n";
    behind.netns().exec(&["nft", rules])?.success()?;
    let password = sandbox.password_file().to_string_lossy().into_owned();
    let arguments = ["--password-file", &password, "--engine", "userspace", "--workers", "1"];
    two_addresses.start_daemon(&arguments)?;
    behind.start_daemon(&[&arguments[..], &["192.0.2.101"]].concat())?;
    let (c1, c2) = (two_addresses.add_container("c1")?, behind.add_container("c2")?);
    wait_ping(&c2, c1.ipv4()?.into(), Duration::from_secs(15))?;
    c1.ping(c2.ipv4()?.into())?;
    for host in [two_addresses, behind] {
        host.wait_connected(1, Duration::from_secs(5))?;
    }
    Ok(())
}

/// Two of three hosts move at once: each learns the other's new address from the third, and the old one
/// disappears.
#[test]
fn hosts_that_move_at_once_find_each_other_through_a_third() -> anyhow::Result<()> {
    let lab = Lab::launched(3, &[])?;
    let third = lab.host(0);
    let moving = [lab.host(1), lab.host(2)];
    let (c1, c2) = (moving[0].add_container("c1")?, moving[1].add_container("c2")?);
    wait_ping(&c1, c2.ipv4()?.into(), Duration::from_secs(10))?;
    for (number, host) in moving.into_iter().enumerate() {
        let (device, old) = (device(host)?, host.ipv4());
        host.netns().ip(&format!("addr del {old}/24 dev {device}"))?;
        host.netns().ip(&format!("addr add 192.0.2.{}/24 dev {device}", 101 + number))?;
    }
    wait_ping(&c1, c2.ipv4()?.into(), Duration::from_secs(60))?;
    // The old address goes with the next link, which backs off as after any failure.
    let old = format!("{}:", moving[1].ipv4());
    for host in [third, moving[0]] {
        let what = format!("h{} to know the new address alone", host.index() + 1);
        try_wait_until(&what, Duration::from_secs(60), || {
            let peers = host.weft(&["status", "peers"])?.stdout;
            Ok(!peers.contains(&old) && peers.contains("192.0.2.102:"))
        })?;
    }
    Ok(())
}
