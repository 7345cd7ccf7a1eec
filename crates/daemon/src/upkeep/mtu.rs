//! Packet sizes: the MTU of the host's link, the MTU of containers, and changes while the daemon runs.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use weft_crypto::Format;
use weft_kernel::engine::SwitchKind;
use weft_kernel::xfrm::Xfrm;
use weft_kernel::{Kernel, KernelError, LinkEvent};
use weft_link::Links;
use weft_path::{Encapsulation, EngineKind, PathState, PathStatus};

use crate::config::{EngineChoice, FormatChoice, Settings};
use crate::core::control::Request;
use crate::services::supervisor::Pulse;

/// The default if the host's link is unknown.
const LINK_MTU_DEFAULT: u32 = 1_500;
/// IPv6 requires this inside (RFC 8200 section 5).
const CONTAINER_MTU_MIN: u16 = 1_280;
/// Changes of devices come in bursts; the link is checked once they are over.
const SETTLE_MS: u64 = 300;
/// The longest such wait: events may come without a pause.
const SETTLE_MAX: Duration = Duration::from_secs(5);
/// Routes checked for the MTU of the link.
const ROUTES_MAX: usize = 64;
/// The interval between checks for new peers, in milliseconds.
const PEERS_LOOK_MS: u64 = 1_000;
/// Pause after the kernel refused to report device changes, in milliseconds.
pub(crate) const WATCH_RETRY_MS: u64 = 2_000;

/// The MTU to assume before there are peers, so that every path carries the containers' packets. It is
/// the smallest MTU of the links towards the targets, else that of the host's own link.
///
/// # Errors
/// The kernel's refusal.
pub(crate) async fn link_mtu(settings: &Settings, kernel: &Kernel) -> Result<u16, KernelError> {
    let named = settings.hosts.iter().filter_map(|host| host.split('#').next()?.parse().ok());
    let routed = routed_mtus(named.collect(), kernel).await;
    known_or_own(routed.into_iter().min(), kernel).await
}

/// The largest MTU of the links towards the peers, so that one narrow path does not hold back the others.
/// Probes find out which paths carry less.
async fn link_mtu_towards(peers: BTreeSet<IpAddr>, kernel: &Kernel) -> Result<u16, KernelError> {
    let routed = routed_mtus(peers, kernel).await;
    known_or_own(routed.into_iter().max(), kernel).await
}

/// MTUs of the routes to the first [`ROUTES_MAX`] addresses that have one.
async fn routed_mtus(addresses: BTreeSet<IpAddr>, kernel: &Kernel) -> Vec<u32> {
    let mut mtus = Vec::new();
    for address in addresses.into_iter().take(ROUTES_MAX) {
        mtus.extend(kernel.route_mtu(address).await.ok().map(|route| route.mtu));
    }
    mtus
}

async fn known_or_own(routed: Option<u32>, kernel: &Kernel) -> Result<u16, KernelError> {
    let mtu = match routed {
        Some(mtu) => Some(mtu),
        None => kernel.default_link_mtu().await?,
    };
    Ok(u16::try_from(mtu.unwrap_or(LINK_MTU_DEFAULT)).unwrap_or(u16::MAX))
}

/// The format with the most overhead that this host's paths may use. It is `ovpn` if configured, or if
/// the kernel may have no other format. The kernel engine finds out later whether the device is usable;
/// containers keep their first MTU.
pub(crate) async fn widest_format(settings: &Settings) -> Format {
    match (settings.format, settings.engine) {
        (FormatChoice::Ovpn, _) => Format::Ovpn,
        (FormatChoice::Esp, _) | (FormatChoice::Auto, EngineChoice::Userspace) => Format::Esp,
        (FormatChoice::Auto, _) => {
            let esp = match Xfrm::open() {
                Ok(xfrm) => xfrm.support().await.map(|_| ()),
                Err(error) => Err(error),
            };
            let has_ovpn_alone = esp.is_err()
                && settings.host.is_none()
                && weft_kernel::ovpn::support().await.is_ok();
            if has_ovpn_alone { Format::Ovpn } else { Format::Esp }
        }
    }
}

/// The host's link less the format's overhead over IPv6, a multiple of 4.
pub(crate) fn container_mtu(link_mtu: u16, format: Format) -> u16 {
    let inner = link_mtu.saturating_sub(weft_path::overhead(format, Encapsulation::Udp, true));
    (inner / 4 * 4).max(CONTAINER_MTU_MIN)
}

/// A warning if the link leaves containers less than IPv6's minimum.
pub fn narrow_link(link_mtu: u16, engine: EngineChoice, switch: SwitchKind) -> Option<String> {
    let overhead = weft_path::overhead(Format::Esp, Encapsulation::Udp, false);
    let wanted = CONTAINER_MTU_MIN + overhead;
    (link_mtu < wanted).then(|| {
        let cuts = engine != EngineChoice::Kernel || switch == SwitchKind::Bridge;
        let cost = effect_on_ipv6(cuts);
        let carried = link_mtu.saturating_sub(overhead) / 4 * 4;
        format!(
            "this host's link has an MTU of {link_mtu}, so paths carry {carried} bytes: {cost}; an MTU of {wanted} avoids this"
        )
    })
}

/// A warning if a path in use carries less than the MTU of this host's containers.
pub(crate) fn narrow_path(
    path: &PathStatus,
    containers: u16,
    switch: SwitchKind,
    to: impl FnOnce() -> String,
) -> Option<String> {
    let mtu = path.mtu.filter(|mtu| path.state == PathState::Active && *mtu < containers)?;
    let theirs = path.container_mtu.filter(|theirs| *theirs <= mtu);
    let why = match theirs {
        Some(theirs) => format!("its containers' MTU is {theirs}"),
        None => "the network between the hosts carries no more".into(),
    };
    let kernel = path.engine == Some(EngineKind::Kernel);
    let cost = if mtu < CONTAINER_MTU_MIN {
        let over_ipv4 = path.remote.is_some_and(|remote| remote.is_ipv4());
        let by_bridge = switch == SwitchKind::Bridge && path.format == Some(Format::Esp);
        format!("; {}", effect_on_ipv6(!kernel || (by_bridge && over_ipv4)))
    } else if kernel && theirs.is_some() {
        // A kernel reports only the MTU of links that it knows.
        "; TCP sends segments that fit, other longer packets are dropped there".into()
    } else {
        String::new()
    };
    Some(format!("{mtu} towards {}: {why}{cost}", to()))
}

/// The effect on IPv6 of a path that carries less than [`CONTAINER_MTU_MIN`] bytes.
fn effect_on_ipv6(cuts: bool) -> String {
    if cuts {
        format!("longer IPv6 packets of up to {CONTAINER_MTU_MIN} bytes are sent in two pieces")
    } else {
        let how = "the kernel engine loses longer IPv6 packets of up to";
        format!("{how} {CONTAINER_MTU_MIN} bytes")
    }
}

/// Reports changes of the link's MTU to the control loop. Containers keep their MTU.
pub(crate) async fn follow_link_mtu(
    settings: Settings,
    kernel: Kernel,
    links: Links,
    control: mpsc::Sender<Request>,
    pulse: Pulse,
) {
    while let Err(error) = follow(&settings, &kernel, &links, &control, &pulse).await {
        tracing::warn!(%error, again_ms = WATCH_RETRY_MS, "cannot watch the link's MTU");
        pulse.wait(tokio::time::sleep(Duration::from_millis(WATCH_RETRY_MS))).await;
    }
}

/// Ends with the control loop.
async fn follow(
    settings: &Settings,
    kernel: &Kernel,
    links: &Links,
    control: &mpsc::Sender<Request>,
    pulse: &Pulse,
) -> Result<(), KernelError> {
    let mut watch = kernel.watch().await?;
    let mut look = tokio::time::interval(Duration::from_millis(PEERS_LOOK_MS));
    let settle = Duration::from_millis(SETTLE_MS);
    loop {
        let peers = addresses(links);
        let link_mtu = match peers.is_empty() {
            true => link_mtu(settings, kernel).await?,
            false => link_mtu_towards(peers.clone(), kernel).await?,
        };
        if control.send(Request::LinkMtu { link_mtu }).await.is_err() {
            return Ok(());
        }
        loop {
            let next = async {
                tokio::select! {
                    event = watch.next() => event.map(|event| concerns_the_link(&event)),
                    _ = look.tick() => Ok(addresses(links) != peers),
                }
            };
            if pulse.wait(next).await? {
                break;
            }
        }
        let until = Instant::now() + SETTLE_MAX;
        while Instant::now() < until
            && let Ok(event) = pulse.wait(tokio::time::timeout(settle, watch.next())).await
        {
            event?;
        }
    }
}

fn addresses(links: &Links) -> BTreeSet<IpAddr> {
    links.remotes().into_iter().map(|(_, remote)| remote.ip().to_canonical()).collect()
}

/// Weft's own devices are not links to other hosts.
fn concerns_the_link(event: &LinkEvent) -> bool {
    let name = match event {
        LinkEvent::MtuChanged { name, .. } | LinkEvent::Up { name } | LinkEvent::Down { name } => {
            name
        }
        _ => return false,
    };
    !name.starts_with(crate::devices::SWITCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_get_what_every_path_carries() {
        assert_eq!(container_mtu(1500, Format::Esp), 1388);
        assert_eq!(container_mtu(9000, Format::Esp), 8888);
        assert_eq!(container_mtu(1300, Format::Esp), 1280);
        assert_eq!(container_mtu(1500, Format::Ovpn), 1356);
    }

    #[test]
    fn a_link_that_leaves_ipv6_too_little_is_named() {
        for engine in [EngineChoice::Auto, EngineChoice::Userspace, EngineChoice::Kernel] {
            for switch in [SwitchKind::Bridge, SwitchKind::Odp] {
                assert_eq!(narrow_link(1_372, engine, switch), None);
                let text = narrow_link(1_371, engine, switch).unwrap_or_default();
                assert!(text.contains("MTU of 1371") && text.contains("1276 bytes"), "{text}");
                let lost = engine == EngineChoice::Kernel && switch == SwitchKind::Odp;
                assert_eq!(text.contains("loses"), lost, "{text}");
            }
        }
    }

    #[test]
    fn ports_of_the_switch_are_no_links() {
        let up = |name: &str| LinkEvent::Up { name: name.into() };
        assert!(concerns_the_link(&up("eth0")));
        assert!(!concerns_the_link(&up("weft-vxlan")));
        assert!(!concerns_the_link(&LinkEvent::Added { name: "eth0".into() }));
    }
}
