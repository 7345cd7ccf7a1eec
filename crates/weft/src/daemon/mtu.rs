//! Sizes of packets: what the host's link carries, what containers get, and what becomes of it while
//! the daemon runs.

use std::time::Duration;

use tokio::sync::mpsc;
use weft_crypto::Format;
use weft_kernel::{Kernel, KernelError, LinkEvent};
use weft_path::Encapsulation;

use super::control::Request;
use crate::config::Settings;

/// Where the host has no link that tells.
const LINK_MTU_DEFAULT: u32 = 1_500;
/// IPv6 needs it inside (RFC 8200 section 5).
const CONTAINER_MTU_MIN: u16 = 1_280;
/// Changes of devices come in flocks; the link is looked at once they are over.
const SETTLE_MS: u64 = 300;
/// Pause after the kernel refused to say what happens to devices, in milliseconds.
pub(super) const WATCH_RETRY_MS: u64 = 2_000;

/// MTU of the link that leads to the first target, else of the host's own.
///
/// # Errors
/// The kernel's refusal.
pub(super) async fn link_mtu(settings: &Settings, kernel: &Kernel) -> Result<u16, KernelError> {
    let target = settings.hosts.iter().find_map(|host| host.split('#').next()?.parse().ok());
    let routed = match target {
        Some(address) => kernel.route_mtu(address).await.ok().map(|route| route.mtu),
        None => None,
    };
    let mtu = match routed {
        Some(mtu) => Some(mtu),
        None => kernel.default_link_mtu().await?,
    };
    Ok(u16::try_from(mtu.unwrap_or(LINK_MTU_DEFAULT)).unwrap_or(u16::MAX))
}

/// DESIGN section 4: the host's link less the overhead over IPv6, a multiple of 4.
pub(super) fn container_mtu(link_mtu: u16) -> u16 {
    let inner = link_mtu.saturating_sub(weft_path::overhead(Format::Esp, Encapsulation::Udp, true));
    (inner / 4 * 4).max(CONTAINER_MTU_MIN)
}

/// Tells the control loop when the link carries more or less than before. What containers were given
/// stays.
pub(super) async fn follow_link_mtu(
    settings: Settings,
    kernel: Kernel,
    control: mpsc::Sender<Request>,
) {
    while let Err(error) = follow(&settings, &kernel, &control).await {
        tracing::warn!(%error, again_ms = WATCH_RETRY_MS, "the link's MTU is not watched");
        tokio::time::sleep(Duration::from_millis(WATCH_RETRY_MS)).await;
    }
}

/// Ends with the control loop.
async fn follow(
    settings: &Settings,
    kernel: &Kernel,
    control: &mpsc::Sender<Request>,
) -> Result<(), KernelError> {
    let mut watch = kernel.watch().await?;
    let settle = Duration::from_millis(SETTLE_MS);
    loop {
        let link_mtu = link_mtu(settings, kernel).await?;
        if control.send(Request::LinkMtu { link_mtu }).await.is_err() {
            return Ok(());
        }
        while !concerns_the_link(&watch.next().await?) {}
        while let Ok(event) = tokio::time::timeout(settle, watch.next()).await {
            event?;
        }
    }
}

/// Devices of Weft's own are no links to other hosts.
fn concerns_the_link(event: &LinkEvent) -> bool {
    let name = match event {
        LinkEvent::MtuChanged { name, .. } | LinkEvent::Up { name } | LinkEvent::Down { name } => {
            name
        }
        _ => return false,
    };
    !name.starts_with(super::start::SWITCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_get_what_every_path_carries() {
        assert_eq!(container_mtu(1500), 1388);
        assert_eq!(container_mtu(9000), 8888);
        assert_eq!(container_mtu(1300), 1280);
    }

    #[test]
    fn ports_of_the_switch_are_no_links() {
        let up = |name: &str| LinkEvent::Up { name: name.into() };
        assert!(concerns_the_link(&up("eth0")));
        assert!(!concerns_the_link(&up("weft-vxlan")));
        assert!(!concerns_the_link(&LinkEvent::Added { name: "eth0".into() }));
    }
}
