//! The reference plugins `portmap` and `bandwidth` behind Weft's, as runtimes run them.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use weft_bench::sandbox::{Host, Netns, Running, try_wait_until};
use weft_lab::cni::{Chain, leftovers};
use weft_lab::containerd::Containerd;
use weft_lab::net::Lab;
use weft_lab::net::iperf::received_bps;

const LIMIT: Duration = Duration::from_secs(20);
/// The limit of a container, in bits per second, and the most and the least that a test sees of it.
const RATE_BPS: u32 = 8_000_000;
const SEEN_BPS: std::ops::Range<f64> = 1e6..12e6;
/// What a container may send at once, in bits.
const BURST_BITS: u32 = 400_000;
/// Where the host publishes a container's port 80.
const HOST_PORT: u16 = 8080;
const LOCALHOST: &str = "127.0.0.1";

fn forward(host: &Host) -> anyhow::Result<()> {
    for switch in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
        host.netns().exec(&["sysctl", "-qw", switch])?.success()?;
    }
    Ok(())
}

fn port_mappings() -> Value {
    json!([{ "hostPort": HOST_PORT, "containerPort": 80, "protocol": "tcp" }])
}

fn bandwidth() -> Value {
    json!({
        "ingressRate": RATE_BPS, "ingressBurst": BURST_BITS,
        "egressRate": RATE_BPS, "egressBurst": BURST_BITS,
    })
}

/// Answers each connection to port 80 with the client's address.
fn serve(netns: &Netns) -> anyhow::Result<[Running; 2]> {
    let listen = |kind: &str| {
        let address = format!("{kind},fork,reuseaddr");
        netns.spawn(&["socat", &address, "SYSTEM:echo $SOCAT_PEERADDR"])
    };
    Ok([listen("TCP4-LISTEN:80")?, listen("TCP6-LISTEN:80,ipv6only=1")?])
}

/// What an address and port answers, without brackets and leading zeros.
fn ask(from: &Netns, to: &str, port: u16) -> anyhow::Result<Option<String>> {
    let to = if to.contains(':') { format!("[{to}]") } else { to.to_owned() };
    let words = ["socat", "-T", "2", "-", &format!("TCP:{to}:{port},connect-timeout=2")];
    let answer = from.exec(&words)?;
    let text = answer.stdout.trim().trim_matches(['[', ']']);
    let address = text.parse::<std::net::IpAddr>().ok().map(|address| address.to_string());
    Ok(address.filter(|_| answer.status.success()))
}

fn wait_asked(from: &Netns, to: &str, from_address: &str) -> anyhow::Result<()> {
    let mut last = None;
    let seen = try_wait_until(&format!("{to} to see {from_address}"), LIMIT, || {
        last = ask(from, to, HOST_PORT).ok().flatten();
        Ok(last.as_deref() == Some(from_address))
    });
    seen.map(drop).with_context(|| format!("the last answer: {last:?}"))
}

/// Publishes a port on the first host and asks it from everywhere. The host gives containers a default route, and
/// translates their addresses or not.
fn ports_answer(lab: &Lab, masquerade: bool) -> anyhow::Result<()> {
    let (host, other) = (lab.host(0), lab.host(1));
    forward(host)?;
    let mut chain = Chain::set_up(&lab.sandbox, host, &["--masquerade"])?;
    if masquerade {
        // As Docker sets it.
        for iptables in ["iptables", "ip6tables"] {
            host.netns().exec(&[iptables, "-P", "FORWARD", "DROP"])?.success()?;
        }
    } else {
        chain.list["plugins"][0]["ipMasq"] = false.into();
    }
    let [web, near] = ["web", "near"].map(|name| lab.sandbox.add_netns(name));
    let (web, near) = (web?, near?);
    let container = chain.add("web", &web, json!({ "portMappings": port_mappings() }))?;
    let beside = chain.add("near", &near, json!({}))?;
    let _servers = serve(&web)?;
    let ips = &container.result["ips"];
    let gateways = [0, 1].map(|index| ips[index]["gateway"].as_str());
    let [Some(v4), Some(v6)] = gateways else { anyhow::bail!("no gateways: {ips}") };
    let (own, own6) = (host.ipv4().to_string(), host.ipv6().to_string());
    // Strangers keep their addresses; those of the network get the host's, so that the answers return to it.
    wait_asked(other.netns(), &own, &other.ipv4().to_string())?;
    wait_asked(other.netns(), &own6, &other.ipv6().to_string())?;
    wait_asked(host.netns(), &own, &own)?;
    wait_asked(host.netns(), &own6, &own6)?;
    wait_asked(host.netns(), LOCALHOST, v4)?;
    for inside in [&web, &near] {
        for (to, seen) in [(own.as_str(), v4), (&own6, v6), (v4, v4), (v6, v6)] {
            wait_asked(inside, to, seen)?;
        }
    }

    // A container of the other host leaves the network there.
    forward(other)?;
    other.weft(&["expose", "--masquerade"])?.success()?;
    let far = lab.sandbox.add_netns("far")?;
    other.weft(&["attach", "--default-route", &far.path()])?.success()?;
    wait_asked(&far, &own, &other.ipv4().to_string())?;

    // Only what is published is reached.
    let address = container.address()?;
    other.netns().ip(&format!("route add {address}/32 via {own}"))?;
    let direct = ask(other.netns(), &address, 80)?;
    ensure!(direct.is_none() == masquerade, "a stranger reaches a container: {direct:?}");
    other.netns().ip(&format!("route del {address}/32"))?;

    chain.check("weft-cni", &container)?;
    chain.del(&container)?;
    ensure!(ask(other.netns(), &own, HOST_PORT)?.is_none(), "the port is still published");
    chain.del(&beside)?;
    ensure!(leftovers(host)?.is_empty(), "{}", leftovers(host)?);
    Ok(())
}

#[test]
fn published_ports_are_reached_from_everywhere_while_the_host_masquerades() -> anyhow::Result<()> {
    ports_answer(&Lab::pair(&[])?, true)
}

#[test]
fn published_ports_are_reached_from_everywhere_by_a_default_route_alone() -> anyhow::Result<()> {
    ports_answer(&Lab::pair(&[])?, false)
}

fn rate(server: &Netns, client: &Netns, to: &str, more: &[&str]) -> anyhow::Result<f64> {
    let mut listening = server.spawn(&["iperf3", "-s", "-1", "--forceflush"])?;
    listening.line_with("Server listening", LIMIT)?;
    let words = [&["iperf3", "-J", "-t", "3", "-c", to], more].concat();
    Ok(received_bps(&client.exec(&words)?.success()?.json()?))
}

#[test]
fn a_containers_rate_is_limited_in_both_directions() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let host = lab.host(0);
    let chain = Chain::set_up(&lab.sandbox, host, &[])?;
    let [slow, fast] = ["slow", "fast"].map(|name| lab.sandbox.add_netns(name));
    let (slow, fast) = (slow?, fast?);
    let limited = chain.add("slow", &slow, json!({ "bandwidth": bandwidth() }))?;
    let free = chain.add("fast", &fast, json!({}))?;
    let far = lab.host(1).add_container("far")?;
    for peer in [far.netns(), &fast] {
        for direction in [&[][..], &["--reverse"]] {
            let bps = rate(&slow, peer, &limited.address()?, direction)?;
            ensure!(SEEN_BPS.contains(&bps), "{direction:?}: {bps} bits per second");
        }
    }
    let bps = rate(&fast, far.netns(), &free.address()?, &[])?;
    ensure!(bps > SEEN_BPS.end, "without a limit: {bps} bits per second");
    chain.check("weft-cni", &limited)?;
    chain.check("bandwidth", &limited)?;
    for container in [&limited, &free] {
        chain.del(container)?;
    }
    ensure!(leftovers(host)?.is_empty(), "{}", leftovers(host)?);
    Ok(())
}

/// Installs the plugins for a containerd, with what other runtimes than `ctr` hand over by capability.
fn set_up(containerd: &Containerd, host: &Host) -> anyhow::Result<()> {
    let report = containerd.inside().set_up_cni(host, &["--masquerade"])?;
    ensure!(report["chained"] == json!(["portmap", "bandwidth"]), "{report}");
    const LIST: &str = "/etc/cni/net.d/10-weft.conflist";
    let mut list: Value = serde_json::from_str(&containerd.exec(&["cat", LIST])?)?;
    list["plugins"][1]["runtimeConfig"] = json!({ "portMappings": port_mappings() });
    list["plugins"][2]["runtimeConfig"] = json!({ "bandwidth": bandwidth() });
    let write = "printf %s \"$1\" > \"$2\"";
    containerd.exec(&["sh", "-ec", write, "sh", &list.to_string(), LIST]).map(drop)
}

#[test]
fn a_containerd_runs_the_chain_and_takes_all_of_it_back() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let (host, other) = (lab.host(0), lab.host(1));
    forward(host)?;
    let containerd = Containerd::start(&lab.sandbox, host)?;
    set_up(&containerd, host)?;
    let script = "/bin/httpd -p 80 -h /etc; exec /bin/sleep 600";
    let web = containerd.spawn("web", &["/bin/sh", "-c", script])?;
    let url = format!("http://{}:{HOST_PORT}/passwd", host.ipv4());
    let asked = [other, host].map(|from| {
        try_wait_until(&format!("{url} from {}", from.nickname()), LIMIT, || {
            let fetched = from.netns().exec(&["curl", "-sS", "--max-time", "2", &url]);
            Ok(fetched.is_ok_and(|it| it.stdout.contains("root")))
        })
    });
    let shaped = host.netns().exec(&["tc", "qdisc", "show"]);
    let killed = containerd.kill("web");
    let ended = web.wait_with_output()?;
    for asked in asked {
        asked.with_context(|| String::from_utf8_lossy(&ended.stderr).into_owned())?;
    }
    killed?;
    let shaped = shaped?.success()?.stdout;
    ensure!(shaped.matches("qdisc tbf").count() == 2, "{shaped}");
    ensure!(leftovers(host)?.is_empty(), "{}", leftovers(host)?);
    Ok(())
}
