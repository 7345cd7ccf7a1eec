//! Damage that others do to containers' interfaces and to their devices on the host.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};
use weft_bench::sandbox::{Container, Host, Netns, wait_until};

use weft_io::namespace::{Namespace, run_in};
use weft_io::packet::PacketSocket;
use weft_packet::announcement::{Announcement, LEN_MAX};

use super::{namespace, wait_ping};

/// Damage by `ip` in the container, or on the host if the first word is HOST; PORT is the container's device
/// there. Weft pauses before it repairs a container again, so each row needs a separate container.
pub const WRECKS: [&[&str]; 3] = [
    &["link set weft0 down", "link set weft0 name eth9", "HOST link delete PORT"],
    &["link delete weft0", "link set weft0 address 02:00:00:00:09:09", "HOST link set PORT down"],
    &["addr flush dev weft0", "HOST link set PORT name other"],
];

/// An attachment, as `weft ps` has it.
///
/// # Errors
/// It has none.
pub fn listed(host: &Host, netns: &Netns) -> anyhow::Result<Value> {
    let all = host.weft_json(&["ps"])?;
    let all = all.as_array().cloned().unwrap_or_default();
    let of = |it: &Value| it["id"].as_str().is_some_and(|id| id.ends_with(netns.name()));
    all.into_iter().find(of).with_context(|| format!("{} is not listed", netns.name()))
}

/// All that `ps` notes about an attachment.
///
/// # Errors
/// See [`listed`].
pub fn notes(host: &Host, netns: &Netns) -> anyhow::Result<String> {
    Ok(listed(host, netns)?["notes"].to_string())
}

/// The Ethernet address of a container.
///
/// # Errors
/// It has none.
pub fn mac(container: &Container) -> anyhow::Result<[u8; 6]> {
    let text = container.exec(&["cat", "/sys/class/net/weft0/address"])?.success()?.stdout;
    Ok(text.trim().parse::<weft_path::Mac>()?.0)
}

/// A container tells everybody that it has these addresses, one after the other. Returns how long it took.
///
/// # Errors
/// The kernel refuses.
pub fn announce(
    container: &Container,
    addresses: &[IpAddr],
    every: Duration,
) -> anyhow::Result<Duration> {
    let (mac, start) = (mac(container)?, Instant::now());
    run_in(Namespace::open(&namespace(container))?, || -> anyhow::Result<()> {
        let socket = PacketSocket::sender()?;
        let device = socket.index_of("weft0")?;
        let mut due = Duration::ZERO;
        for address in addresses {
            let mut frame = [0; LEN_MAX];
            let len = Announcement { address: *address, mac }.write(&mut frame);
            socket.send(&frame[..len], device)?;
            due += every;
            std::thread::sleep(due.saturating_sub(start.elapsed()));
        }
        Ok(())
    })??;
    Ok(start.elapsed())
}

/// Runs `ip` with these words. Linux before 6.2 renames a device only while it is down.
///
/// # Errors
/// `ip` refuses.
pub fn damage(netns: &Netns, words: &str) -> anyhow::Result<()> {
    let Err(error) = netns.ip(words).and_then(|output| output.success()) else { return Ok(()) };
    let Some((link, name)) = words.split_once(" name ") else { return Err(error.into()) };
    let script =
        format!("printf '{link} down\\n{words}\\n' | ip -batch -; ip link set {name} up || true");
    netns.exec(&["sh", "-ec", &script])?.success()?;
    Ok(())
}

/// Does the damage of each row of [`WRECKS`] to a container and waits until everything is restored. Checks the
/// interface, its device on the host, traffic to and from another host's container, and the output of `ps`.
///
/// # Errors
/// Something was not repaired in time.
pub fn wreck_and_wait(host: &Host, far: &Container, limit: Duration) -> anyhow::Result<()> {
    for (number, wrecks) in WRECKS.iter().enumerate() {
        let one = host.add_container(&format!("c{number}"))?;
        wait_ping(&one, far.ipv4()?.into(), limit)?;
        let wanted = interface(&one)?;
        for wreck in *wrecks {
            let port = host_end(host, &one)?;
            match wreck.strip_prefix("HOST ") {
                Some(wreck) => damage(host.netns(), &wreck.replace("PORT", &port))?,
                None => damage(one.netns(), wreck)?,
            }
            let taken = wait_until(&format!("{wreck}, mended"), limit, || {
                interface(&one).is_ok_and(|found| found == wanted)
                    && host_end(host, &one).is_ok_and(|found| found == port)
            })?;
            super::guest::figure(&format!("{wreck}, mended after"), format!("{taken:?}"));
            wait_ping(&one, far.ipv4()?.into(), limit).with_context(|| (*wreck).to_owned())?;
            wait_ping(far, one.ipv6()?.into(), limit).with_context(|| (*wreck).to_owned())?;
        }
        wait_until(&format!("{wrecks:?}, no damage"), limit, || {
            notes(host, one.netns()).is_ok_and(|notes| notes == "null")
        })?;
    }
    let log = host.log();
    anyhow::ensure!(log.contains("weft0 is down"), "the log does not say what was mended: {log}");
    Ok(())
}

/// The device on the host that a container's interface is joined to.
fn host_end(host: &Host, container: &Container) -> anyhow::Result<String> {
    let id = listed(host, container.netns())?["id"].as_str().unwrap_or_default().to_owned();
    let links = host.netns().exec(&["ip", "-j", "link"])?.success()?.json()?;
    let alias = format!("weft {id}");
    let mut all = links.as_array().into_iter().flatten();
    let found = all.find(|link| link["ifalias"] == alias.as_str());
    let name = found.and_then(|link| link["ifname"].as_str()).map(str::to_owned);
    name.with_context(|| format!("no device for {alias} in {links}"))
}

/// A container's interface as it matters: name, switch, address and MTU.
fn interface(container: &Container) -> anyhow::Result<Value> {
    let text = container.exec(&["ip", "-j", "addr", "show", "dev", "weft0"])?.success()?.json()?;
    let flags = text[0]["flags"].as_array().cloned().unwrap_or_default();
    let all = text[0]["addr_info"].as_array().cloned().unwrap_or_default();
    let global = all.iter().filter(|it| it["scope"] == "global");
    let addresses: Vec<&Value> = global.map(|it| &it["local"]).collect();
    let is_up = flags.iter().any(|flag| flag == "UP");
    Ok(json!([text[0]["address"], text[0]["mtu"], is_up, addresses]))
}
