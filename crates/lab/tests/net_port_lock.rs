//! Containers that send under addresses which are not theirs: they reach nobody, unless the user allows it.

use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::Value;
use weft_bench::sandbox::{Container, Host, Netns, SandboxError, try_wait_until};
use weft_io::namespace::{Namespace, run_in};
use weft_io::packet::PacketSocket;
use weft_lab::net::devices::{announce, mac};
use weft_lab::net::guest::figure;
use weft_lab::net::spoof::Spoofer;
use weft_lab::net::{Lab, wait_ping};
use weft_packet::announcement::{Announcement, LEN_MAX};

const MODES: [&str; 3] = ["bridge", "shortcut", "direct"];
const SETTLE: Duration = Duration::from_secs(15);

fn port_lock(host: &Host) -> Result<Value, SandboxError> {
    Ok(host.weft_json(&["status"])?["port_lock"].clone())
}

#[test]
fn a_spoofing_container_reaches_nobody_and_status_names_it() -> anyhow::Result<()> {
    for mode in MODES {
        let lab = Lab::pair(&["--engine", "userspace", "--port-mode", mode])?;
        let host = lab.host(0);
        let (evil, far) = lab.containers()?;
        let near = host.add_container("near")?;
        for victim in [&near, &far] {
            wait_ping(&evil, victim.ipv4()?.into(), SETTLE)?;
            wait_ping(&evil, victim.ipv6()?.into(), SETTLE)?;
        }
        assert_eq!(port_lock(host)?["on"], true, "{mode}");
        let sent = Spoofer::new(&evil, &near)?.reach_nobody(&[&near, &far])?;
        let name = evil.netns().name();
        try_wait_until("the status to count all drops", SETTLE, || {
            let shown = port_lock(host)?;
            let count = |reason: &str| shown["dropped"][reason].as_u64().unwrap_or_default();
            let of = |reason: &str| sent.iter().filter(|it| **it == reason).count() as u64;
            let counted = sent.iter().all(|reason| count(reason) >= of(reason));
            Ok(counted && shown["containers"] == serde_json::json!([name]))
        })?;
        let said = host.weft(&["status"])?.success()?.stdout;
        assert!(said.contains(&format!("port lock: dropped frames of {name} ")), "{said}");
        for victim in [&near, &far] {
            let known = victim.exec(&["ip", "neigh"])?.success()?.stdout;
            assert!(!known.contains("02:09:09:09:09:09"), "{known}");
        }
        // The same frames from a container that may send them.
        let bridge = host.add_container_with("bridge", &["--allow-macs"])?;
        wait_ping(&bridge, far.ipv4()?.into(), SETTLE)?;
        let allowed = Spoofer::new(&bridge, &near)?;
        for (what, frame) in allowed.frames(mac(&near)?) {
            assert_eq!(allowed.arriving(&near, &[frame])?, 1, "{mode}: {what}");
        }
        let listed = host.weft_json(&["ps"])?;
        let open = listed.as_array().into_iter().flatten().filter(|it| it["allow_macs"] == true);
        assert_eq!(open.count(), 1, "{listed}");
    }
    Ok(())
}

#[test]
fn the_lock_outlives_a_flush_of_rules_and_the_daemon() -> anyhow::Result<()> {
    let lab = Lab::pair(&["--engine", "userspace", "--port-mode", "bridge"])?;
    let host = lab.host(0);
    let (evil, near) = (host.add_container("c1")?, host.add_container("c2")?);
    wait_ping(&evil, near.ipv4()?.into(), SETTLE)?;
    let spoofer = Spoofer::new(&evil, &near)?;
    let frames = || -> anyhow::Result<Vec<Vec<u8>>> {
        Ok(spoofer.frames(mac(&near)?).into_iter().map(|(_, frame)| frame).collect())
    };
    let is_locked = || -> anyhow::Result<bool> { Ok(spoofer.arriving(&near, &frames()?)? == 0) };
    assert!(is_locked()?);
    host.netns().exec(&["nft", "flush", "ruleset"])?.success()?;
    try_wait_until("the lock to stand again", SETTLE, || Ok(is_locked().unwrap_or(false)))?;
    host.kill_daemon();
    assert!(is_locked()?, "without a daemon");
    host.start_daemon(&["--engine", "userspace", "--port-mode", "bridge"])?;
    for _ in 0..5 {
        assert!(is_locked()?, "while the next daemon starts");
    }
    wait_ping(&evil, near.ipv4()?.into(), SETTLE)?;
    let more = "10.47.252.9/12";
    let refused = host.weft(&["attach", "--allow-macs", more, &evil.netns().path()])?;
    refused.success()?;
    assert!(!is_locked()?, "the user allows it");
    host.stop_daemon()?;
    let tables =
        || Ok::<_, anyhow::Error>(host.netns().exec(&["nft", "list", "tables"])?.success()?.stdout);
    assert!(tables()?.contains("weft-ports"), "containers stay attached");
    let state = host.state_directory();
    host.weft(&["reset", "--force", "--state-dir", &state.to_string_lossy()])?.success()?;
    assert_eq!(tables()?, "");
    Ok(())
}

/// An address of a container that moved by hand is refused, and the same one given by Weft works.
#[test]
fn an_address_by_hand_is_refused_and_one_that_weft_gives_is_not() -> anyhow::Result<()> {
    let lab = Lab::pair(&["--engine", "userspace", "--port-mode", "bridge"])?;
    let (one, two) = lab.containers()?;
    wait_ping(&one, two.ipv4()?.into(), SETTLE)?;
    let address = Ipv4Addr::new(10, 47, 252, 8);
    one.netns().ip(&format!("addr add {address}/12 dev weft0"))?;
    announce(&one, &[address.into()], Duration::ZERO)?;
    assert!(wait_ping(&two, address.into(), Duration::from_secs(2)).is_err());
    one.netns().ip(&format!("addr del {address}/12 dev weft0"))?;
    lab.host(0).weft(&["attach", &format!("{address}/12"), &one.netns().path()])?.success()?;
    wait_ping(&two, address.into(), SETTLE)?;
    Ok(())
}

/// A router of VRRP inside a container: an interface with the virtual Ethernet address, in a namespace of its own.
fn take_over(
    (lab, name): (&Lab, &str),
    holder: &Container,
    address: Ipv4Addr,
) -> anyhow::Result<Netns> {
    const MAC: [u8; 6] = [0, 0, 0x5e, 0, 1, 5];
    let inner = lab.sandbox.add_netns(name)?;
    let link = "link add vrrp0 link weft0 address 00:00:5e:00:01:05 type macvlan mode bridge";
    holder.netns().ip(link)?;
    holder.netns().ip(&format!("link set vrrp0 netns {}", inner.name()))?;
    inner.ip(&format!("addr add {address}/12 dev vrrp0"))?;
    inner.ip("link set vrrp0 up")?;
    let mut frame = [0; LEN_MAX];
    let length = Announcement { address: address.into(), mac: MAC }.write(&mut frame);
    let frame = frame.get(..length).unwrap_or_default().to_vec();
    run_in(Namespace::open(std::path::Path::new(&inner.path()))?, || -> anyhow::Result<()> {
        let sender = PacketSocket::sender()?;
        let device = sender.index_of("vrrp0")?;
        // As programs for VRRP do it; the first ones are lost while the kernel still switches the device on.
        for _ in 0..5 {
            sender.send(&frame, device)?;
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    })??;
    Ok(inner)
}

#[test]
fn an_address_behind_a_port_works_across_hosts_and_moves() -> anyhow::Result<()> {
    let lab = Lab::pair(&[])?;
    let allowed = |host: usize, name| lab.host(host).add_container_with(name, &["--allow-macs"]);
    let holders = [allowed(0, "r1")?, allowed(1, "r2")?];
    let users = [lab.host(0).add_container("u1")?, lab.host(1).add_container("u2")?];
    wait_ping(&users[0], users[1].ipv4()?.into(), SETTLE)?;
    let address = Ipv4Addr::new(10, 47, 252, 1);
    // The next daemon knows it, although nobody announces it again.
    let inner = take_over((&lab, "kept"), &holders[0], address)?;
    wait_ping(&users[1], address.into(), SETTLE)?;
    lab.host(0).stop_daemon()?;
    lab.host(0).start_daemon(&[&lab.host(1).ipv4().to_string()])?;
    wait_ping(&users[1], address.into(), SETTLE)?;
    inner.ip("link delete vrrp0")?;
    for (number, turn) in [0, 1, 0, 1].into_iter().enumerate() {
        let inner = take_over((&lab, &format!("vrrp{number}")), &holders[turn], address)?;
        for (number, user) in users.iter().enumerate() {
            let after = wait_ping(user, address.into(), SETTLE)
                .map_err(|error| anyhow::anyhow!("turn {turn}, user {number}: {error}"))?;
            figure(
                &format!("moved to host {turn}, user {number} reaches it after"),
                format!("{after:?}"),
            );
            let to = user.ipv4()?.to_string();
            inner.exec(&["ping", "-c", "1", "-W", "2", &to])?.success()?;
        }
        // A namespace ends some time after its name.
        inner.ip("link delete vrrp0")?;
    }
    // A port that comes back has another device under the same name.
    let path = holders[0].netns().path();
    lab.host(0).weft(&["detach", &path])?.success()?;
    lab.host(0).weft(&["attach", "--allow-macs", &path])?.success()?;
    // It goes with its port.
    let inner = take_over((&lab, "last"), &holders[0], address)?;
    wait_ping(&users[1], address.into(), SETTLE)?;
    lab.host(0).weft(&["detach", &path])?.success()?;
    assert!(wait_ping(&users[1], address.into(), Duration::from_secs(2)).is_err());
    drop(inner);
    Ok(())
}
