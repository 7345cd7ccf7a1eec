//! Pods of containerd, as Kubernetes asks for them by `crictl`.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use weft::doctor::find_program;
use weft_bench::sandbox::progress::note;
use weft_bench::sandbox::{Host, try_wait_until};
use weft_lab::cni::wait_clean;
use weft_lab::containerd::Containerd;
use weft_lab::cri::{Cri, Pod};
use weft_lab::inside::two_hosts;

const LIMIT: Duration = Duration::from_secs(20);
const SLEEP: [&str; 2] = ["/bin/sleep", "600"];

fn wait_pinged(cri: &Cri<'_>, pod: &Pod, to: &str) -> anyhow::Result<()> {
    let mut last = None;
    let done = try_wait_until(&format!("a pod to reach {to}"), LIMIT, || {
        last = cri.exec(pod, &["/bin/ping", "-c", "1", "-W", "1", to]).err();
        Ok(last.is_none())
    });
    done.map(drop).with_context(|| format!("the last failure: {last:?}"))
}

/// Exposes a host. Returns its address, which answers DNS.
fn expose(host: &Host) -> anyhow::Result<String> {
    let exposed = host.weft_json(&["expose", "--masquerade"])?;
    let net = exposed["addresses"][0].as_str().context("no address")?;
    Ok(net.split('/').next().unwrap_or(net).to_owned())
}

#[test]
fn pods_of_two_hosts_reach_each_other_and_leave_nothing() -> anyhow::Result<()> {
    if find_program("crictl").is_none() {
        note(
            "not tested here: no crictl in PATH; go install sigs.k8s.io/cri-tools/cmd/crictl@v1.34.0",
        );
        return Ok(());
    }
    let (lab, containerds) = two_hosts(Containerd::start, Containerd::inside)?;
    let hosts = [lab.host(0), lab.host(1)];
    let mut cris = Vec::new();
    for containerd in &containerds {
        let cri = Cri::of(containerd)?;
        try_wait_until("the runtime to find the network", LIMIT, || {
            Ok(cri.crictl(&["info"]).is_ok_and(|info| network_is_ready(&info)))
        })?;
        cris.push(cri);
    }
    let [one, two] = [&cris[0], &cris[1]];
    let web = one.start(("shop", "web"), &expose(hosts[0])?, &SLEEP)?;
    let till = two.start(("default", "till"), &expose(hosts[1])?, &SLEEP)?;
    for (cri, pod, far_cri, far) in [(one, &web, two, &till), (two, &till, one, &web)] {
        wait_pinged(cri, pod, &far_cri.address(far)?)?;
    }
    let shown = hosts[0].weft_json(&["ps"])?;
    let shown = shown.as_array().cloned().unwrap_or_default();
    ensure!(shown.iter().any(|it| it["name"] == "shop/web"), "{shown:?}");
    for to in ["web", "web.shop", "web.shop.weft.local"] {
        wait_pinged(two, &till, to)?;
    }
    wait_pinged(one, &web, "till.default")?;
    let status = hosts[0].weft(&["status"])?.success()?.stdout;
    ensure!(!status.contains("are not in DNS"), "{status}");

    // A pod that is stopped has DEL, and a second one too.
    one.crictl(&["stopp", &web.id])?;
    wait_clean(hosts[0])?;
    one.crictl(&["stopp", &web.id])?;
    one.crictl(&["rmp", &web.id])?;
    // A node is drained while no daemon runs.
    hosts[1].kill_daemon();
    two.crictl(&["stopp", &till.id])?;
    two.crictl(&["rmp", &till.id])?;
    containerds[1].inside().launch(&lab.sandbox, hosts[1], &[])?;
    wait_clean(hosts[1])?;
    ensure!(one.crictl(&["pods", "--quiet"])?.is_empty());
    Ok(())
}

fn network_is_ready(info: &str) -> bool {
    let info: Value = serde_json::from_str(info).unwrap_or_default();
    let conditions = info["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().any(|it| it["type"] == "NetworkReady" && it["status"] == true)
}
