//! What the client of a VPN sets up on its host: the addresses of its device, routes into it, and routes to the
//! server around it.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::LinkAttribute,
    route::{
        RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
        RouteType,
    },
};
use rustix::io::Errno;

use super::{
    addresses::{Addresses, family_of},
    ipv6::{self, ignore_routers, this_host},
    link::Change,
    route::{ROUTE_PROTOCOL, destination_address, device_of, gateway_of, is_in_main_table},
};
use crate::{error::KernelError, handle::Kernel};

/// The device of a VPN, and what it is to have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VpnSpec {
    /// Its interface index.
    pub device: u32,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its addresses, and no others.
    pub addresses: Vec<IpNet>,
}

/// The next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NextHop {
    /// The device by which packets leave.
    pub device: u32,
    /// The router; `None`: the destination is on the device's link.
    pub gateway: Option<IpAddr>,
}

/// A route of a VPN's client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VpnRoute {
    /// Where to.
    pub destination: IpNet,
    /// Where packets go next.
    pub hop: NextHop,
    /// Smaller is better; `None`: the kernel's default.
    pub metric: Option<u32>,
}

impl Kernel {
    /// Gives a device this MTU and these addresses, and switches it on.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the device is not there, or the kernel's refusal.
    pub async fn set_up_vpn(&self, spec: &VpnSpec) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let missing = || KernelError::LinkMissing { name: format!("number {}", spec.device) };
        let link = socket.link_by_index(spec.device).await?.ok_or_else(missing)?;
        socket.disable_autoconfiguration(&link).await?;
        ignore_routers(&self.inner.home, &link.name, this_host())?;
        if spec.addresses.iter().any(|address| address.addr().is_ipv6()) {
            // A host may have IPv6 switched off for its networks; here it is wanted.
            ipv6::set(&self.inner.home, &link.name, "disable_ipv6", "0")?;
        }
        let mtu = LinkAttribute::Mtu(spec.mtu);
        let change = Change::of(&link).when(link.mtu != spec.mtu, mtu);
        change.up(&link).send(socket, &link.name).await?;
        let present = Addresses::read(socket).await?;
        let is_wanted = |address: &IpNet| spec.addresses.contains(address);
        let stale: Vec<IpNet> = present.of(link.index).filter(|it| !is_wanted(it)).collect();
        socket.remove_addresses(&link, &stale).await?;
        for address in &spec.addresses {
            if !present.has(link.index, address) {
                socket.add_address(&link, *address).await?;
            }
        }
        Ok(())
    }

    /// Adds a route; false if the host has one to this destination with this metric already.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn add_vpn_route(&self, route: &VpnRoute) -> Result<bool, KernelError> {
        let request = RouteNetlinkMessage::NewRoute(message(route));
        match self.socket().change(request, NLM_F_CREATE | NLM_F_EXCL).await {
            Ok(()) => Ok(true),
            Err(error) if error.is(Errno::EXIST) => Ok(false),
            Err(error) => Err(error.while_doing(format!("add the route {}", route.destination))),
        }
    }

    /// Removes a route that [`Self::add_vpn_route`] has added, or succeeds if it is already gone, as with its device.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove_vpn_route(&self, route: &VpnRoute) -> Result<(), KernelError> {
        let request = RouteNetlinkMessage::DelRoute(message(route));
        match self.socket().change(request, 0).await {
            Ok(()) => Ok(()),
            Err(error) if error.is(Errno::SRCH) || error.is(Errno::NODEV) => Ok(()),
            Err(error) => Err(error.while_doing(format!("remove the route {}", route.destination))),
        }
    }

    /// Where packets to an address would go if the routes of `device` and those of [`Self::add_vpn_route`] to this
    /// very address were not there; `None`: nowhere. Only the main table is asked.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn way_around(
        &self,
        remote: IpAddr,
        device: u32,
    ) -> Result<Option<NextHop>, KernelError> {
        let routes = self.socket().routes(family_of(remote)).await?;
        Ok(best_around(&routes, remote, device))
    }
}

fn best_around(routes: &[RouteMessage], remote: IpAddr, device: u32) -> Option<NextHop> {
    let usable = routes.iter().filter(|route| {
        route.header.kind == RouteType::Unicast
            && is_in_main_table(route)
            && destination_of(route, remote).is_some_and(|net| net.contains(&remote))
            && !is_around(route)
    });
    let found = usable.filter_map(|route| {
        let hop = NextHop { device: device_of(route)?, gateway: gateway_of(route) };
        let bits = route.header.destination_prefix_length;
        (hop.device != device).then_some((bits, std::cmp::Reverse(metric_of(route)), hop))
    });
    found.max_by_key(|(bits, metric, _)| (*bits, *metric)).map(|(_, _, hop)| hop)
}

/// Whether it is a route of Weft's to a single address.
fn is_around(route: &RouteMessage) -> bool {
    let bits = route.header.destination_prefix_length;
    route.header.protocol == RouteProtocol::Other(ROUTE_PROTOCOL) && (bits == 32 || bits == 128)
}

/// A route without a destination is the default route of its family.
fn destination_of(route: &RouteMessage, like: IpAddr) -> Option<IpNet> {
    let any: IpAddr = match like {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let address = destination_address(route).unwrap_or(any);
    IpNet::new(address, route.header.destination_prefix_length).ok()
}

fn metric_of(route: &RouteMessage) -> u32 {
    let metric = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Priority(metric) => Some(*metric),
        _ => None,
    });
    metric.unwrap_or(0)
}

fn message(route: &VpnRoute) -> RouteMessage {
    let address = |address| match address {
        IpAddr::V4(address) => RouteAddress::Inet(address),
        IpAddr::V6(address) => RouteAddress::Inet6(address),
    };
    let destination = route.destination.trunc();
    let mut message = RouteMessage::default();
    message.header.address_family = family_of(destination.addr());
    message.header.destination_prefix_length = destination.prefix_len();
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Other(ROUTE_PROTOCOL);
    message.header.kind = RouteType::Unicast;
    if destination.addr().is_ipv4() && route.hop.gateway.is_none() {
        message.header.scope = RouteScope::Link;
    }
    message.attributes = vec![
        RouteAttribute::Destination(address(destination.addr())),
        RouteAttribute::Oif(route.hop.device),
    ];
    message.attributes.extend(route.hop.gateway.map(|hop| RouteAttribute::Gateway(address(hop))));
    message.attributes.extend(route.metric.map(RouteAttribute::Priority));
    message
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn route(destination: &str, device: u32, gateway: Option<&str>, metric: u32) -> RouteMessage {
        let hop = NextHop { device, gateway: gateway.map(|gateway| gateway.parse().unwrap()) };
        let destination = destination.parse().unwrap();
        let mut message = message(&VpnRoute { destination, hop, metric: Some(metric) });
        message.header.protocol = RouteProtocol::Boot;
        message
    }

    #[test]
    fn the_way_around_is_the_best_route_that_is_not_the_devices() {
        let remote = "192.0.2.7".parse().unwrap();
        let mut around = route("192.0.2.7/32", 4, Some("10.0.0.9"), 0);
        around.header.protocol = RouteProtocol::Other(ROUTE_PROTOCOL);
        let mut routes = vec![
            route("0.0.0.0/0", 2, Some("10.0.0.1"), 100),
            route("0.0.0.0/0", 3, Some("10.1.0.1"), 50),
            route("128.0.0.0/1", 9, None, 0),
            around,
        ];
        let hop = |device, gateway: &str| {
            Some(NextHop { device, gateway: Some(gateway.parse().unwrap()) })
        };
        assert_eq!(best_around(&routes, remote, 9), hop(3, "10.1.0.1"));
        routes.push(route("192.0.2.0/24", 5, None, 600));
        assert_eq!(best_around(&routes, remote, 9), Some(NextHop { device: 5, gateway: None }));
        assert_eq!(best_around(&routes[2..4], remote, 9), None);
    }
}
