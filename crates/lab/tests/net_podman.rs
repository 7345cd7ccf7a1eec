//! Containers of podman on two hosts: on a network of CNI, and attached by a user.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Host, Sandbox, SandboxOptions, try_wait_until};
use weft_lab::cni::leftovers;
use weft_lab::inside::two_hosts;
use weft_lab::net::Lab;
use weft_lab::podman::Podman;

const LIMIT: Duration = Duration::from_secs(20);
/// The directory of what libcni remembers for DEL.
const CACHE: &str = "/var/lib/cni/results";
const SERVE: [&str; 6] = ["/bin/httpd", "-f", "-p", "80", "-h", "/etc"];
const SLEEP: [&str; 2] = ["/bin/sleep", "600"];

/// Podman on a host, and a daemon beside it with further arguments.
fn start(lab: &Lab, index: usize, more: &[&str]) -> anyhow::Result<Podman> {
    let podman = Podman::start(&lab.sandbox, lab.host(index))?;
    podman.inside().launch(&lab.sandbox, lab.host(index), more)?;
    Ok(podman)
}

/// Two hosts that forward packets, with podman and a network of CNI.
fn set_up() -> anyhow::Result<(Lab, [Podman; 2])> {
    let (lab, podmans) = two_hosts(Podman::start, Podman::inside)?;
    for podman in &podmans {
        let networks = podman.podman(&["network", "ls", "--format", "{{.Name}} {{.Driver}}"])?;
        ensure!(networks.lines().any(|line| line == "weft weft-cni"), "{networks}");
    }
    Ok((lab, podmans))
}

fn address(podman: &Podman, container: &str) -> anyhow::Result<String> {
    let address = podman.inspect(container, "/NetworkSettings/Networks/weft/IPAddress")?;
    let address = address.as_str().filter(|it| !it.is_empty()).map(str::to_owned);
    address.with_context(|| format!("{container} has no address"))
}

fn attached(host: &Host) -> anyhow::Result<Vec<Value>> {
    Ok(host.weft_json(&["ps"])?.as_array().cloned().unwrap_or_default())
}

fn has_eth0(podman: &Podman, container: &str) -> anyhow::Result<bool> {
    let links = podman.podman(&["exec", container, "/bin/ls", "/sys/class/net"])?;
    Ok(links.split_whitespace().any(|link| link == "eth0"))
}

fn wait_pinged(podman: &Podman, to: &str) -> anyhow::Result<()> {
    let ping = ["/bin/ping", "-c", "1", "-W", "1", to];
    let mut last = None;
    let done = try_wait_until(&format!("a container to reach {to}"), LIMIT, || {
        last = podman.run("ping", &["--rm", "--network", "weft"], &ping).err();
        Ok(last.is_none())
    });
    done.map(drop).with_context(|| format!("the last failure: {last:?}"))
}

/// Waits until nothing of any container is left on a host.
fn wait_clean(podman: &Podman, host: &Host) -> anyhow::Result<()> {
    let mut left = String::new();
    let clean = try_wait_until("containers to leave nothing behind", LIMIT, || {
        left = leftovers(host).unwrap_or_else(|error| error.to_string());
        left += &podman.inside().exec(&["ls", CACHE]).unwrap_or_else(|error| error.to_string());
        Ok(left.is_empty())
    });
    clean.map(drop).with_context(|| left)
}

#[test]
fn containers_of_two_podmans_reach_each_other_by_name_and_leave_nothing() -> anyhow::Result<()> {
    let (lab, [one, two]) = set_up()?;
    let (host, other) = (lab.host(0), lab.host(1));
    let on_weft = ["--detach", "--network", "weft"];
    let options = ["--network-alias", "shop", "--publish", "8080:80"];
    let id = one.run("web", &[&on_weft[..], &options].concat(), &SERVE)?;
    let fixed = ["--ip", "10.33.0.7", "--mac-address", "02:00:00:00:33:07"];
    two.run("till", &[&on_weft[..], &fixed].concat(), &SLEEP)?;
    let listed = attached(other)?;
    let till = listed.iter().find(|it| it["name"] == "till").context("till is not attached")?;
    ensure!(till["made_by"] == "cni" && till["mac"] == "02:00:00:00:33:07", "{till}");
    ensure!(till["addresses"][0] == "10.33.0.7/12", "{till}");

    // By address, the container's name, an alias, and podman's short id.
    let short = id.get(..12).context("an id")?;
    for to in [address(&one, "web")?.as_str(), "web", "web.weft.local", "shop", short] {
        wait_pinged(&two, to)?;
    }
    wait_pinged(&one, "till")?;
    let url = format!("http://{}:8080/passwd", host.ipv4());
    let fetched = || other.netns().exec(&["curl", "-sS", "--max-time", "2", &url]);
    try_wait_until("the published port", LIMIT, || {
        Ok(fetched().is_ok_and(|it| it.stdout.contains("root")))
    })?;

    // A restart sends DEL, and ADD under the same id.
    one.podman(&["restart", "--time", "0", "web"])?;
    wait_pinged(&two, "web")?;
    ensure!(attached(host)?.iter().filter(|it| it["made_by"] == "cni").count() == 1);
    // DEL comes for a container that runs on, and ADD again.
    two.podman(&["network", "disconnect", "weft", "till"])?;
    ensure!(!has_eth0(&two, "till")? && leftovers(other)?.is_empty(), "{}", leftovers(other)?);
    two.podman(&["network", "connect", "--ip", "10.33.0.7", "weft", "till"])?;
    wait_pinged(&one, "till")?;
    // One is stopped by its user, and the other's process is killed.
    one.podman(&["stop", "--time", "0", "web"])?;
    let pid = two.inspect("till", "/State/Pid")?.to_string();
    two.inside().exec(&["kill", "-KILL", &pid])?;
    wait_clean(&one, host)?;
    wait_clean(&two, other)?;
    ensure!(!fetched()?.status.success(), "the port is still published");
    // A stopped container starts again, and its address is still to be had.
    two.podman(&["start", "till"])?;
    ensure!(address(&two, "till")? == "10.33.0.7");
    two.podman(&["rm", "--force", "--time", "0", "till"])?;
    wait_clean(&two, other)
}

#[test]
fn a_del_without_a_daemon_is_made_up_for() -> anyhow::Result<()> {
    let (lab, [one, _two]) = set_up()?;
    let host = lab.host(0);
    one.run("web", &["--detach", "--network", "weft"], &SLEEP)?;
    one.run("till", &["--detach", "--network", "weft"], &SLEEP)?;
    host.kill_daemon();
    // One runs on, and the other ends.
    one.podman(&["network", "disconnect", "weft", "web"])?;
    ensure!(!has_eth0(&one, "web")?, "the plugin alone has not removed the interface");
    one.podman(&["rm", "--force", "--time", "0", "till"])?;
    one.inside().launch(&lab.sandbox, host, &[])?;
    wait_clean(&one, host)?;
    ensure!(!has_eth0(&one, "web")?, "it is attached again");
    Ok(())
}

#[test]
fn a_container_of_podman_is_attached_by_name_process_and_namespace() -> anyhow::Result<()> {
    let lab = Lab { sandbox: Sandbox::new(&SandboxOptions::default())? };
    let host = lab.host(0);
    let one = start(&lab, 0, &["--docker-socket", "/run/podman/podman.sock"])?;
    lab.sandbox.launch(lab.host(1), &[])?;
    lab.wait_active()?;
    let far = lab.host(1).add_container("far")?;
    one.run("web", &["--detach", "--network", "none"], &SLEEP)?;
    for is_named in [true, false] {
        let pid = format!("pid:{}", one.inspect("web", "/State/Pid")?);
        let reference = if is_named { "web" } else { &pid };
        host.weft(&["attach", reference])?.success()?;
        let listed = attached(host)?;
        let address = listed[0]["addresses"][0].as_str().and_then(|it| it.split('/').next());
        let address = address.with_context(|| format!("no address: {listed:?}"))?;
        weft_lab::net::wait_ping(&far, address.parse()?, LIMIT)?;
        if is_named {
            try_wait_until("its name in DNS", LIMIT, || {
                let named = lab.host(1).weft_json(&["dns-lookup", "web"]);
                Ok(named.is_ok_and(|named| named[0]["address"] == address))
            })?;
            // It starts again with its addresses, and with another process.
            one.podman(&["restart", "--time", "0", "web"])?;
            weft_lab::net::wait_ping(&far, address.parse()?, LIMIT)?;
        }
        host.weft(&["detach", reference])?.success()?;
        ensure!(attached(host)?.is_empty(), "{reference} is still attached");
    }

    // A container on a network has a namespace with a file.
    one.inside().set_up_cni(host, &[])?;
    host.weft(&["network", "create", "shop"])?.success()?;
    one.run("till", &["--detach", "--network", "weft"], &SLEEP)?;
    let file = one.inspect("till", "/NetworkSettings/SandboxKey")?;
    let file = file.as_str().filter(|file| file.starts_with("/run/netns/"));
    let file = file.context("no file of a namespace")?;
    host.weft(&["attach", "--network", "shop", file])?.success()?;
    let links = one.podman(&["exec", "till", "/bin/ls", "/sys/class/net"])?;
    ensure!(links.contains("weft"), "{links}");
    host.weft(&["detach", file])?.success()?;
    one.podman(&["rm", "--force", "--time", "0", "till"])?;
    wait_clean(&one, host)
}
