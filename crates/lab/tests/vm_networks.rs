//! Networks with the same addresses stay apart for every pairing of engines and switches.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, ensure};
use weft_bench::sandbox::{Container, Host, try_wait_until};
use weft_lab::net::guest::{SETTLE_LIMIT, Stage};
use weft_lab::net::probe::{expect_datagram, udp_in};
use weft_lab::net::{namespace, wait_ping};

const NEAR: &str = "10.9.0.1/24";
const FAR: &str = "10.9.0.200/24";
const SILENCE: Duration = Duration::from_millis(500);

/// Engine and switch of a host.
type Way = [&'static str; 2];

#[test]
fn two_kernels_on_bridges() -> anyhow::Result<()> {
    stay_apart([["kernel", "bridge"], ["kernel", "bridge"]])
}

#[test]
fn a_kernel_on_a_bridge_and_one_on_a_datapath() -> anyhow::Result<()> {
    stay_apart([["kernel", "bridge"], ["kernel", "odp"]])
}

#[test]
fn a_vector_engine_on_a_datapath_and_a_kernel_on_a_bridge() -> anyhow::Result<()> {
    stay_apart([["userspace", "odp"], ["kernel", "bridge"]])
}

#[test]
fn a_kernel_on_a_datapath_and_a_vector_engine_on_a_bridge() -> anyhow::Result<()> {
    stay_apart([["kernel", "odp"], ["userspace", "bridge"]])
}

fn stay_apart(ways: [Way; 2]) -> anyhow::Result<()> {
    let stage = Stage::new(2)?;
    for (index, [engine, switch]) in ways.into_iter().enumerate() {
        stage.launch(index, &["--engine", engine, "--switch", switch])?;
    }
    stage.wait_all_active(2)?;
    let (one, two) = (stage.host(0), stage.host(1));
    for name in ["shop", "prod"] {
        one.weft_json(&["network", "create", "--subnet", "10.9.0.0/24", name])?;
        try_wait_until("the network on the other host", SETTLE_LIMIT, || {
            let listed = two.weft_json(&["network", "ls"])?;
            Ok(listed.as_array().is_some_and(|all| all.iter().any(|it| it["name"] == name)))
        })?;
    }
    let pair = |network: &str| -> anyhow::Result<[Container; 2]> {
        let on = |host: &Host, address: &str| {
            let name = format!("{network}{}", host.index());
            host.add_container_with(&name, &["--network", network, address])
        };
        Ok([on(one, NEAR)?, on(two, FAR)?])
    };
    let (shop, prod) = (pair("shop")?, pair("prod")?);
    let weft = [one.add_container("weft0")?, two.add_container("weft1")?];
    let (near, far): (IpAddr, IpAddr) = ("10.9.0.1".parse()?, "10.9.0.200".parse()?);
    for [a, b] in [&shop, &prod] {
        wait_ping(a, far, SETTLE_LIMIT)?;
        wait_ping(b, near, SETTLE_LIMIT)?;
    }
    wait_ping(&weft[0], weft[1].ipv4()?.into(), SETTLE_LIMIT)?;
    frames_stay_on_their_network(&shop, &prod, &weft)?;
    // Without its container on shop, nobody else answers there.
    shop[1].netns().ip("link set weft0 down")?.success()?;
    ensure!(!is_answered(&shop[0], far)?, "another network answers");
    ensure!(is_answered(&prod[0], far)?);
    removal_leaves_the_others(one, &shop[0], [&prod[0], &weft[0]], [far, weft[1].ipv4()?.into()])
}

/// A datagram, and a broadcast, of each network arrive there and nowhere else, both ways.
fn frames_stay_on_their_network(
    shop: &[Container; 2],
    prod: &[Container; 2],
    weft: &[Container; 2],
) -> anyhow::Result<()> {
    let listener = |container: &Container| -> anyhow::Result<UdpSocket> {
        let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 5_000);
        Ok(udp_in(&namespace(container), any)?)
    };
    for (from, to, address) in [(0, 1, "10.9.0.1"), (1, 0, "10.9.0.200")] {
        let wanted = listener(&shop[to])?;
        let others = [&prod[0], &prod[1], &weft[0], &weft[1]];
        let others = others.map(listener).into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let sender = udp_in(&namespace(&shop[from]), SocketAddr::new(address.parse()?, 0))?;
        sender.set_broadcast(true)?;
        let one = if to == 1 { "10.9.0.200" } else { "10.9.0.1" };
        for (target, text) in [(one, &b"to one"[..]), ("10.9.0.255", b"to all")] {
            sender.send_to(text, SocketAddr::new(target.parse()?, 5_000))?;
            expect_datagram(&wanted, text)?;
        }
        for socket in &others {
            socket.set_read_timeout(Some(SILENCE))?;
            ensure!(socket.recv(&mut [0; 64]).is_err(), "a frame of shop is on another network");
        }
    }
    Ok(())
}

/// A network that a host lets go of leaves no device, and others are not touched.
fn removal_leaves_the_others(
    host: &Host,
    gone: &Container,
    stay: [&Container; 2],
    reach: [IpAddr; 2],
) -> anyhow::Result<()> {
    let listed = host.weft_json(&["network", "inspect", "shop"])?;
    let vni = listed[0]["vni"].as_u64().context("a VNI")?;
    host.weft_json(&["detach", &namespace(gone).to_string_lossy()])?;
    host.weft_json(&["network", "rm", "shop"])?;
    try_wait_until("the devices of the network to go", SETTLE_LIMIT, || {
        let links = host.netns().exec(&["ip", "-o", "link"])?.success()?.stdout;
        Ok(!links.contains(&format!("-{vni:06x}")))
    })?;
    for (container, to) in stay.into_iter().zip(reach) {
        ensure!(is_answered(container, to)?, "{to} is reached no longer");
    }
    Ok(())
}

fn is_answered(from: &Container, to: IpAddr) -> anyhow::Result<bool> {
    Ok(from.exec(&["ping", "-n", "-c", "1", "-W", "2", &to.to_string()])?.status.success())
}
