//! Addresses that move between containers, or are probed before use: every host receives the announcements and
//! probes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use anyhow::Context;
use weft_bench::sandbox::{Container, Host, try_wait_until};
use weft_io::namespace::{Namespace, run_in};
use weft_io::packet::PacketSocket;
use weft_lab::net::devices::{announce, mac};
use weft_lab::net::{Lab, namespace, slowness, wait_ping};
use weft_packet::arp::{self, Arp};
use weft_packet::ethernet;

const MODES: [&str; 3] = ["bridge", "shortcut", "direct"];
const SETTLE: Duration = Duration::from_secs(15);
/// How long no answer may come.
const QUIET: Duration = Duration::from_millis(300);
/// Addresses that Weft has not given to any container.
const VIRTUAL: Ipv4Addr = Ipv4Addr::new(10, 47, 251, 1);
const TAKEN: Ipv4Addr = Ipv4Addr::new(10, 47, 251, 2);

/// Hosts whose containers are attached by this mode; kernels with IPsec would take the traffic.
fn lab(mode: &str) -> anyhow::Result<Lab> {
    Lab::pair(&["--engine", "userspace", "--port-mode", mode])
}

/// Keeps neighbour entries for so long that ageing repairs nothing during a test.
fn never_forgets(container: &Container) -> anyhow::Result<()> {
    for family in ["ipv4", "ipv6"] {
        let setting = format!("net.{family}.neigh.weft0.base_reachable_time_ms=3600000");
        container.exec(&["sysctl", "-qw", &setting])?.success()?;
    }
    Ok(())
}

fn length(address: IpAddr) -> u8 {
    if address.is_ipv4() { 12 } else { 64 }
}

/// An address comes to a container, which tells everybody as programs for virtual addresses do.
fn take(container: &Container, address: IpAddr) -> anyhow::Result<()> {
    let (length, nodad) = if address.is_ipv4() { (12, "") } else { (64, " nodad") };
    container.netns().ip(&format!("addr add {address}/{length} dev weft0{nodad}"))?;
    announce(container, &[address], Duration::ZERO).map(|_| ())
}

/// Whether a host answers an ARP probe (RFC 5227), as `arping -D` sends it.
fn is_defended(container: &Container, address: Ipv4Addr, limit: Duration) -> anyhow::Result<bool> {
    let sender_mac = mac(container)?;
    let mut frame = [0; ethernet::LEN + arp::LEN];
    ethernet::write(&mut frame, ethernet::BROADCAST, sender_mac, ethernet::TYPE_ARP);
    let (operation, sender_ip) = (arp::REQUEST, Ipv4Addr::UNSPECIFIED);
    let probe = Arp { operation, sender_mac, sender_ip, target_mac: [0; 6], target_ip: address };
    probe.write(&mut frame[ethernet::LEN..]);
    run_in(Namespace::open(&namespace(container))?, || -> anyhow::Result<bool> {
        let sender = PacketSocket::sender()?;
        let device = sender.index_of("weft0")?;
        let socket = PacketSocket::open_for(device, ethernet::TYPE_ARP)?;
        let (begun, mut buffer) = (Instant::now(), [0; 128]);
        while begun.elapsed() < limit {
            sender.send(&frame, device)?;
            std::thread::sleep(Duration::from_millis(100));
            while let Ok(len) = socket.recv(&mut buffer) {
                let heard = Arp::parse(buffer.get(ethernet::LEN..len).unwrap_or_default())?;
                if (heard.operation, heard.sender_ip) == (arp::REPLY, address) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    })?
}

fn leave(container: &Container, address: IpAddr) -> anyhow::Result<()> {
    let length = length(address);
    container.netns().ip(&format!("addr del {address}/{length} dev weft0"))?;
    Ok(())
}

/// Near an address that Weft has given.
fn beside(given: Ipv6Addr) -> Ipv6Addr {
    Ipv6Addr::from_bits(given.to_bits() ^ 0x7700)
}

/// Whether a look for an address before it is taken finds it held: by ARP probes, and by the kernel's own.
fn is_found(container: &Container, address: IpAddr, limit: Duration) -> anyhow::Result<bool> {
    if let IpAddr::V4(address) = address {
        return is_defended(container, address, limit);
    }
    let text = address.to_string();
    container.netns().ip(&format!("addr add {address}/64 dev weft0"))?;
    let tentative = ["ip", "-6", "addr", "show", "dev", "weft0", "tentative"];
    try_wait_until("the kernel to have looked", SETTLE, || {
        let shown = container.exec(&tentative)?.success()?.stdout;
        Ok(!shown.contains(&text) || shown.contains("dadfailed"))
    })?;
    let failed = container.exec(&["ip", "-6", "addr", "show", "dev", "weft0", "dadfailed"])?;
    let found = failed.success()?.stdout.contains(&text);
    leave(container, address)?;
    Ok(found)
}

#[test]
fn a_moved_address_is_followed_and_a_taken_one_is_found_from_every_host() -> anyhow::Result<()> {
    for mode in MODES {
        let lab = lab(mode)?;
        // They take addresses that Weft has not given to them.
        let allowed =
            |host: usize, name| lab.host(host).add_container_with(name, &["--allow-macs"]);
        let (one, two) = (allowed(0, "c1")?, allowed(1, "c2")?);
        let near = lab.host(1).add_container("c3")?;
        wait_ping(&near, one.ipv4()?.into(), SETTLE)?;
        wait_ping(&near, one.ipv6()?.into(), SETTLE)?;
        never_forgets(&near)?;
        let given = [IpAddr::from(two.ipv4()?), two.ipv6()?.into()];
        // Addresses that only the containers know: Weft puts back those that it has given.
        for address in [VIRTUAL.into(), beside(two.ipv6()?).into()] {
            take(&two, address)?;
            wait_ping(&near, address, SETTLE)?;
            leave(&two, address)?;
            take(&one, address)?;
            wait_ping(&near, address, SETTLE)
                .map_err(|error| anyhow::anyhow!("{mode}: {address} moved: {error}"))?;
            // A host without a neighbour entry asks for the address.
            near.netns().ip("neigh flush dev weft0")?;
            wait_ping(&near, address, SETTLE)
                .map_err(|error| anyhow::anyhow!("{mode}: {address} asked for: {error}"))?;
            leave(&one, address)?;
            take(&two, address)?;
            wait_ping(&near, address, SETTLE)?;
        }
        two.netns().ip(&format!("addr add {TAKEN}/12 dev weft0"))?;
        for address in [TAKEN.into(), given[0], given[1]] {
            assert!(is_found(&one, address, SETTLE)?, "{mode}: {address} looks free");
        }
        let free = [IpAddr::from(Ipv4Addr::new(10, 47, 251, 3)), beside(one.ipv6()?).into()];
        for address in free {
            assert!(!is_found(&one, address, QUIET * slowness())?, "{mode}: {address} looks taken");
        }
    }
    Ok(())
}

/// A container with these addresses, once the host has learned that they are free.
fn given(host: &Host, name: &str, addresses: &[&str]) -> anyhow::Result<Container> {
    let mut container = None;
    try_wait_until("the addresses to be free", SETTLE, || {
        match host.add_container_with(name, addresses) {
            Ok(made) => container = Some(made),
            Err(error) if error.to_string().contains("is taken") => {}
            Err(error) => return Err(error),
        }
        Ok(container.is_some())
    })?;
    container.context("no container was made")
}

/// An address that was one container's is given to another, on the same host and on another one.
#[test]
fn an_address_that_is_given_again_is_announced() -> anyhow::Result<()> {
    for mode in MODES {
        let lab = lab(mode)?;
        let (near, far) = (lab.host(0).add_container("c1")?, lab.host(1).add_container("c2")?);
        let addresses = ["10.47.251.9/12"];
        let address = IpAddr::from(Ipv4Addr::new(10, 47, 251, 9));
        let watchers = [&near, &far];
        for watcher in watchers {
            never_forgets(watcher)?;
        }
        for (number, host) in [0, 0, 1].into_iter().enumerate() {
            let name = format!("v{number}");
            let holder = given(lab.host(host), &name, &addresses)?;
            for watcher in watchers {
                wait_ping(watcher, address, SETTLE)
                    .map_err(|error| anyhow::anyhow!("{mode}, holder {number}: {error}"))?;
            }
            lab.host(host).weft(&["detach", holder.netns().name()])?.success()?;
        }
    }
    Ok(())
}
