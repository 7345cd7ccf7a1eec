//! Containers of nerdctl on the containerds of two hosts, on a network of CNI.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft_bench::sandbox::{Host, Programs, Sandbox, try_wait_until};
use weft_lab::cni::wait_clean;
use weft_lab::go;
use weft_lab::inside::two_hosts;
use weft_lab::nerdctl::Nerdctl;
use weft_lab::net::Lab;

const LIMIT: Duration = Duration::from_secs(20);
const SERVE: [&str; 6] = ["/bin/httpd", "-f", "-p", "80", "-h", "/etc"];
const SLEEP: [&str; 2] = ["/bin/sleep", "600"];
const ON_WEFT: [&str; 3] = ["--detach", "--net", "weft"];

/// Two hosts, each with nerdctl, and an address that answers DNS.
fn set_up(programs: &Programs) -> anyhow::Result<(Lab, [Nerdctl; 2], [String; 2])> {
    let start = |sandbox: &Sandbox, host: &Host| Nerdctl::start(programs, sandbox, host);
    let (lab, nerdctls) = two_hosts(start, Nerdctl::inside)?;
    let resolvers = [expose(lab.host(0))?, expose(lab.host(1))?];
    Ok((lab, nerdctls, resolvers))
}

/// Exposes a host. Returns its address.
fn expose(host: &Host) -> anyhow::Result<String> {
    let exposed = host.weft_json(&["expose", "--masquerade"])?;
    let first = exposed["addresses"][0].as_str().and_then(|it| it.split('/').next());
    Ok(first.with_context(|| format!("no address: {exposed}"))?.to_owned())
}

/// The attachments of a host's runtimes.
fn attached(host: &Host) -> anyhow::Result<Vec<Value>> {
    let all = host.weft_json(&["ps"])?.as_array().cloned().unwrap_or_default();
    Ok(all.into_iter().filter(|it| it["made_by"] == "cni").collect())
}

/// Waits until a container has an answer to a ping.
fn wait_pinged(from: (&Nerdctl, &str), to: &str) -> anyhow::Result<()> {
    let (nerdctl, container) = from;
    let ping = ["exec", container, "/bin/ping", "-c", "1", "-W", "1", to];
    let mut last = None;
    let done = try_wait_until(&format!("{container} to reach {to}"), LIMIT, || {
        last = nerdctl.nerdctl(&ping).err();
        Ok(last.is_none())
    });
    done.map(drop).with_context(|| format!("the last failure: {last:?}"))
}

fn scenario(programs: &Programs) -> anyhow::Result<()> {
    let (lab, [one, two], resolvers) = set_up(programs)?;
    let (host, other) = (lab.host(0), lab.host(1));
    let with_names = |resolver: usize| {
        ["--dns", &resolvers[resolver], "--dns-search", "weft.local"].map(str::to_owned)
    };
    let (names_of_one, names_of_two) = (with_names(0), with_names(1));
    let names_of_one = names_of_one.each_ref().map(String::as_str);
    let names_of_two = names_of_two.each_ref().map(String::as_str);
    let options = ["--hostname", "web", "--publish", "8080:80"];
    one.run("front", &[&ON_WEFT[..], &options, &names_of_one].concat(), &SERVE)?;
    let fixed = ["--ip", "10.33.0.7", "--hostname", "till"];
    two.run("store", &[&ON_WEFT[..], &fixed, &names_of_two].concat(), &SLEEP)?;
    let listed = attached(other)?;
    let [till] = &listed[..] else { anyhow::bail!("not one container: {listed:?}") };
    ensure!(till["name"] == "till" && till["addresses"][0] == "10.33.0.7/12", "{till}");
    ensure!(two.address("store")? == "10.33.0.7", "nerdctl shows {}", two.address("store")?);

    // By address, and by the host name that nerdctl tells.
    for to in [one.address("front")?.as_str(), "web", "web.weft.local"] {
        wait_pinged((&two, "store"), to)?;
    }
    wait_pinged((&one, "front"), "till")?;
    let url = format!("http://{}:8080/passwd", host.ipv4());
    let fetched = || other.netns().exec(&["curl", "-sS", "--max-time", "2", &url]);
    try_wait_until("the published port", LIMIT, || {
        Ok(fetched().is_ok_and(|it| it.stdout.contains("root")))
    })?;

    // nerdctl sends DEL before each ADD.
    one.nerdctl(&["restart", "--time", "0", "front"])?;
    wait_pinged((&two, "store"), "web")?;
    ensure!(attached(host)?.len() == 1, "{:?}", attached(host)?);
    let taken = two.run("late", &[&ON_WEFT[..], &fixed[..2]].concat(), &SLEEP).map(drop);
    let taken = taken.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(taken.contains("10.33.0.7 is taken"), "{taken}");

    // One is removed, and the other's process is killed.
    one.nerdctl(&["rm", "--force", "front"])?;
    two.nerdctl(&["kill", "--signal", "KILL", "store"])?;
    wait_clean(host)?;
    wait_clean(other)?;
    ensure!(!fetched()?.status.success(), "the port is still published");

    // An IPv6 address of the network.
    let last = till["addresses"][1].as_str().and_then(|it| it.split('/').next());
    let last = last.context("no IPv6 address")?;
    two.run("again", &[&ON_WEFT[..], &["--ip6", last]].concat(), &SLEEP)?;
    let listed = attached(other)?;
    ensure!(
        listed.len() == 1 && listed[0].to_string().contains(&format!("\"{last}/")),
        "{listed:?}"
    );
    two.nerdctl(&["rm", "--force", "again"])?;
    wait_clean(other)
}

#[test]
fn containers_of_two_nerdctls_reach_each_other_by_name_and_leave_nothing() -> anyhow::Result<()> {
    go::with("nerdctl", go::nerdctl(), |programs| scenario(&programs))
}
