//! Lanes beyond the first between hosts of which one or both let in answers alone.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use weft_bench::sandbox::{Container, Host, Sandbox, SandboxOptions};
use weft_lab::net::iperf::{self, Server};
use weft_lab::net::{slowness, wait_ping, workers};

static NAMES: AtomicU32 = AtomicU32::new(0);
/// The only file that a host keeps from one network to the next.
const IDENTITY_FILE: &str = "identity.pem";

/// A stateful firewall; `exception` is let in as well.
fn close(host: &Host, exception: &str) -> anyhow::Result<()> {
    let rules = format!(
        "table inet fw {{\n chain input {{\n type filter hook input priority 0\n \
         ct state established,related accept\n {exception}\n meta l4proto udp drop\n }}\n }}\n"
    );
    host.netns().exec(&["nft", &rules])?.success()?;
    Ok(())
}

fn open(host: &Host) -> anyhow::Result<()> {
    host.netns().exec(&["nft", "delete table inet fw"])?.success()?;
    Ok(())
}

/// The next daemon is the same host in a new network.
fn forget_all_but_identity(host: &Host) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(host.state_directory())? {
        let path = entry?.path();
        match path.file_name() {
            Some(name) if name == IDENTITY_FILE => {}
            _ if path.is_dir() => std::fs::remove_dir_all(path)?,
            _ => std::fs::remove_file(path)?,
        }
    }
    Ok(())
}

/// Both daemons with two workers, of which the second names the first; a container on each.
fn launch(
    sandbox: &Sandbox,
    first: &Host,
    second: &Host,
) -> anyhow::Result<(Container, Container)> {
    let password = sandbox.password_file().to_string_lossy().into_owned();
    let arguments = ["--password-file", &password, "--engine", "userspace", "--workers", "2"];
    first.start_daemon(&arguments)?;
    second.start_daemon(&[&arguments[..], &[&first.ipv4().to_string()]].concat())?;
    // Namespaces stay until the sandbox goes.
    let name = |of: &str| format!("{of}-{}", NAMES.fetch_add(1, Relaxed));
    let containers = (first.add_container(&name("a"))?, second.add_container(&name("b"))?);
    wait_ping(&containers.1, containers.0.ipv4()?.into(), Duration::from_secs(15))?;
    Ok(containers)
}

/// The identities stay, so that the host behind the firewall has the lower peer id once and the higher one once.
#[test]
fn lanes_carry_whichever_host_is_behind_a_firewall() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    for behind in [0, 1] {
        let (behind, other) = (sandbox.host(behind), sandbox.host(1 - behind));
        // The one behind it dials; or the other one, where the port of links is open.
        for (exception, first, second) in
            [("", other, behind), ("udp dport 6783 accept", behind, other)]
        {
            close(behind, exception)?;
            let (c1, c2) = launch(&sandbox, first, second)?;
            let server = Server::start(&c1)?;
            let many = ["-t", "1", "-P", "8", "-l", "32K", "-b", "20M"];
            let target = c1.ipv4()?.into();
            for host in [first, second] {
                workers::use_all(host, 2, || iperf::run(&c2, target, &many))?;
                let status = host.weft(&["status"])?.stdout;
                assert!(!status.contains("lanes blocked"), "{status}");
            }
            drop((server, c1, c2));
            for host in [first, second] {
                host.stop_daemon()?;
                forget_all_but_identity(host)?;
            }
            open(behind)?;
        }
    }
    Ok(())
}

/// Waits until a host's status has this word, or no longer has it.
fn wait_said(host: &Host, word: &str, said: bool, limit: Duration) -> anyhow::Result<String> {
    let until = Instant::now() + limit * slowness();
    loop {
        let text = host.weft(&["status"])?.stdout + &host.weft(&["status", "connections"])?.stdout;
        if text.contains(word) == said {
            return Ok(text);
        }
        anyhow::ensure!(Instant::now() < until, "{word:?} is there: {}: {text}", !said);
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn lanes_that_no_host_can_open_are_named_with_what_opens_them() -> anyhow::Result<()> {
    let sandbox = Sandbox::new(&SandboxOptions::default())?;
    let hosts = [sandbox.host(0), sandbox.host(1)];
    for host in hosts {
        close(host, "udp dport 6783 accept")?;
    }
    let (c1, c2) = launch(&sandbox, hosts[0], hosts[1])?;
    for host in hosts {
        let text = wait_said(host, "lanes blocked: 1 of 2", true, Duration::from_secs(20))?;
        assert!(text.contains("udp dport 6784"), "{text}");
    }
    c1.ping(c2.ipv4()?.into())?;
    let rule = "insert rule inet fw input udp dport 6784 accept";
    hosts[1].netns().exec(&["nft", rule])?.success()?;
    for host in hosts {
        wait_said(host, "lanes blocked", false, Duration::from_secs(60))?;
    }
    Ok(())
}
