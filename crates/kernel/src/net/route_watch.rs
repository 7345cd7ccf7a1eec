//! The routes over one device, as they come and go. They give the next hop by which a data channel device
//! reaches the addresses behind its peers.

use std::{io, net::IpAddr, time::Duration};

use ipnet::IpNet;
use netlink_packet_route::{
    AddressFamily,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType, RouteVia},
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::route::destination_address;
use crate::{
    error::KernelError,
    handle::Kernel,
    netlink::{
        notices::{Notices, is_overrun},
        socket::RECEIVE_BUFFER_BYTES,
    },
};

/// The multicast groups of routes (RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE) and of devices (RTMGRP_LINK). The
/// kernel sends no notice for IPv4 routes that vanish when their device goes down.
const GROUPS: u32 = 0x40 | 0x400 | 1;
/// Routes change in bursts; they are listed once the burst is over.
const SETTLE_MS: u64 = 20;
/// The longest time that continuous notices can delay the listing.
const SETTLE_MAX_MS: u64 = 500;

/// A unicast route whose output is the device, of any table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceRoute {
    /// The destination; of a default route, the whole family.
    pub destination: IpNet,
    /// The next hop; `None` if the destinations are on the link.
    pub gateway: Option<IpAddr>,
    /// Of several routes to one destination the lowest is taken.
    pub metric: u32,
}

/// A stream of all routes over a device. Each change yields the complete list.
pub struct RouteWatch {
    notices: Notices,
    kernel: Kernel,
    device: u32,
    told: Option<Vec<DeviceRoute>>,
    /// Something has changed since the last listing.
    changed: bool,
}

impl Kernel {
    /// Watches the routes over the device with this interface index, in the namespace of the calling
    /// thread, which must be this handle's.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket.
    pub fn watch_routes(&self, device: u32) -> Result<RouteWatch, KernelError> {
        let notices = Notices::open(NETLINK_ROUTE, GROUPS, RECEIVE_BUFFER_BYTES).map_err(failed)?;
        Ok(RouteWatch { notices, kernel: self.clone(), device, told: None, changed: true })
    }
}

impl RouteWatch {
    /// All routes over the device, sorted: the present ones at the first call, then whenever they differ from
    /// the last result. Dropping the future loses nothing.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the socket fails, or the kernel's refusal to list the routes; the
    /// watch should be opened again then.
    pub async fn next(&mut self) -> Result<Vec<DeviceRoute>, KernelError> {
        loop {
            if self.changed {
                let routes = self.kernel.routes_over(self.device).await?;
                self.changed = false;
                if self.told.as_ref() != Some(&routes) {
                    self.told = Some(routes.clone());
                    return Ok(routes);
                }
            }
            self.changed().await?;
        }
    }

    /// Waits until a route of any device, or a device, has changed.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the socket fails; the watch should be opened again then.
    pub async fn changed(&mut self) -> Result<(), KernelError> {
        self.receive().await?;
        self.changed = true;
        let settled = async {
            let pause = Duration::from_millis(SETTLE_MS);
            while let Ok(received) = tokio::time::timeout(pause, self.receive()).await {
                received?;
            }
            Ok(())
        };
        let limit = Duration::from_millis(SETTLE_MAX_MS);
        tokio::time::timeout(limit, settled).await.unwrap_or(Ok(()))
    }

    /// Waits for notices; ignores their contents, and whether some were lost.
    async fn receive(&mut self) -> Result<(), KernelError> {
        match self.notices.receive().await {
            Ok(_) => Ok(()),
            Err(error) if is_overrun(&error) => Ok(()),
            Err(source) => Err(failed(source)),
        }
    }
}

impl Kernel {
    /// The routes over a device, sorted.
    async fn routes_over(&self, device: u32) -> Result<Vec<DeviceRoute>, KernelError> {
        let mut found: Vec<DeviceRoute> =
            self.routes().await?.iter().flat_map(|route| over(route, device)).collect();
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }
}

/// The routes over the device that a route of the system provides; empty if it leads elsewhere.
fn over(route: &RouteMessage, device: u32) -> Vec<DeviceRoute> {
    if route.header.kind != RouteType::Unicast {
        return Vec::new();
    }
    let prefix = route.header.destination_prefix_length;
    let whole = match route.header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        AddressFamily::Inet6 => IpAddr::from([0; 16]),
        _ => return Vec::new(),
    };
    let destination = destination_address(route).unwrap_or(whole);
    let Ok(destination) = IpNet::new(destination, prefix) else { return Vec::new() };
    let metric = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Priority(metric) => Some(*metric),
        _ => None,
    });
    let metric = metric.unwrap_or_default();
    let hop = |gateway| DeviceRoute { destination: destination.trunc(), gateway, metric };
    let mut hops = Vec::new();
    if route.attributes.contains(&RouteAttribute::Oif(device)) {
        hops.push(hop(gateway(&route.attributes)));
    }
    for attribute in &route.attributes {
        let RouteAttribute::MultiPath(several) = attribute else { continue };
        let its = several.iter().filter(|next| next.interface_index == device);
        hops.extend(its.map(|next| hop(gateway(&next.attributes))));
    }
    hops
}

fn gateway(attributes: &[RouteAttribute]) -> Option<IpAddr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Gateway(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        RouteAttribute::Via(RouteVia::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Via(RouteVia::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}

fn failed(source: io::Error) -> KernelError {
    KernelError::Socket { doing: "watch the routes".into(), source }
}
