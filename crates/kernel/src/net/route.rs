//! Routes: the host's, which Weft only reads, and the multicast and default routes of containers.

use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::InfoKind,
    route::{
        RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteProtocol,
        RouteScope, RouteType,
    },
};
use rustix::io::Errno;

use super::{addresses::family_of, attach::AttachSpec, devices::CLIENTS_DEVICE, link::Link};
use crate::{error::KernelError, handle::Kernel, netlink::route::Socket};

/// The protocol number of routes and neighbour entries made by Weft (`ip route show proto 87`).
pub const ROUTE_PROTOCOL: u8 = 87;

/// The kernel's table of local addresses and multicast, which is asked before all others.
const TABLE_LOCAL: u32 = 255;
/// Addresses that are looked up to find out where packets to a network leave.
const TRIED_ADDRESSES: usize = 4;
/// A route with a shorter prefix counts as a default route.
const CONTAINING_PREFIX_MIN: u8 = 8;
/// The tables that the kernel looks up next without custom rules.
const TABLE_MAIN: u32 = 254;
const TABLE_DEFAULT: u32 = 253;
/// Better than the entry (metric 256) that the kernel itself makes for ff00::/8 on every device.
const MULTICAST_METRIC: u32 = 128;

/// How large a packet may be towards an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteMtu {
    /// MTU in bytes: the device's, or the route's own if that is smaller.
    pub mtu: u32,
    /// The device that the host's routing table gives.
    pub interface: String,
}

/// A unicast route of the host that is not a default route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoute {
    /// The destination.
    pub destination: IpNet,
    /// The device; for a multipath route, the first one.
    pub interface: String,
    /// Whether the device is a bridge whose ports are containers' and guests' alone, or that has no ports.
    /// Such a bridge does not reach other hosts.
    pub stays_on_host: bool,
}

/// A network and a route that lead to the same addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlap {
    /// The network that is attached.
    pub network: IpNet,
    /// The route that leads elsewhere.
    pub route: HostRoute,
    /// The one of them that has precedence.
    pub kind: OverlapKind,
}

/// The winner where a network and a route overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlapKind {
    /// The route: it is as specific, or more so. Its addresses cannot be reached on the network.
    Hidden,
    /// The route, for packets that rules send to its table.
    Beside,
    /// The network: the route leads to all other addresses that it contains.
    Hides,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { network, route: HostRoute { destination, interface, .. }, kind } = self;
        match kind {
            OverlapKind::Hidden => write!(
                f,
                "the container's route {destination} via {interface} hides addresses of the network {network}"
            ),
            OverlapKind::Beside => write!(
                f,
                "the container's route {destination} via {interface}, in another routing table, may hide addresses of the network {network}"
            ),
            OverlapKind::Hides => write!(
                f,
                "the network {network} hides addresses of the container's route {destination} via {interface}"
            ),
        }
    }
}

impl Kernel {
    /// The MTU towards `remote` by the host's routing table.
    ///
    /// # Errors
    /// [`KernelError::NoRoute`] if the host cannot reach it, or the kernel's refusal.
    pub async fn route_mtu(&self, remote: IpAddr) -> Result<RouteMtu, KernelError> {
        let mut message = RouteMessage::default();
        message.header.address_family = family_of(remote);
        message.header.destination_prefix_length = if remote.is_ipv4() { 32 } else { 128 };
        message.attributes.push(RouteAttribute::Destination(remote.into()));
        let doing = || format!("look up the route to {remote}");
        let unreachable = [Errno::NETUNREACH, Errno::HOSTUNREACH, Errno::INVAL, Errno::ACCESS];
        let route = match self.socket().get(RouteNetlinkMessage::GetRoute(message)).await {
            Ok(Some(RouteNetlinkMessage::NewRoute(route))) => route,
            Ok(_) => return Err(KernelError::NoRoute { remote }),
            Err(error) if unreachable.into_iter().any(|errno| error.is(errno)) => {
                return Err(KernelError::NoRoute { remote });
            }
            Err(error) => return Err(error.while_doing(doing())),
        };
        let index = device_of(&route).ok_or(KernelError::NoRoute { remote })?;
        let link = self.socket().link_by_index(index).await?;
        let link = link.ok_or(KernelError::NoRoute { remote })?;
        let own = metric_mtu(&route).filter(|mtu| *mtu > 0).unwrap_or(u32::MAX);
        Ok(RouteMtu { mtu: link.mtu.min(own), interface: link.name })
    }

    /// The MTU to assume before any peer is known, in bytes: the smallest of the devices that carry a default
    /// route. Without a default route, the smallest of all devices that are up. Loopback and Weft's own
    /// devices do not count. `None` if there is no device at all.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn default_link_mtu(&self) -> Result<Option<u32>, KernelError> {
        let links = self.socket().links().await?;
        let carries = |link: &&Link| link.is_up() && !link.is_loopback() && !link.is_own();
        let defaults: Vec<u32> = self
            .routes()
            .await?
            .iter()
            .filter(|route| {
                route.header.destination_prefix_length == 0
                    && route.header.kind == RouteType::Unicast
            })
            .flat_map(devices_of)
            .collect();
        let usable = || links.iter().filter(carries);
        let by_default = usable().filter(|link| defaults.contains(&link.index));
        Ok(by_default.map(|link| link.mtu).min().or_else(|| usable().map(|link| link.mtu).min()))
    }

    /// The host's own destinations: unicast routes of every table but the local one. Leaves out default
    /// routes, link-local routes and those of Weft's devices.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn host_routes(&self) -> Result<Vec<HostRoute>, KernelError> {
        let reached = self.socket().reached(Link::is_own).await?;
        Ok(reached.into_iter().map(|(route, _)| route).collect())
    }

    /// Overlaps between the networks of a container's addresses and the destinations that it reaches by other
    /// devices.
    ///
    /// # Errors
    /// As [`Self::attach`] for the namespace, or the kernel's refusal.
    pub async fn overlaps(&self, spec: &AttachSpec) -> Result<Vec<Overlap>, KernelError> {
        Ok(overlaps_of(spec, self.inside(spec)?.reached(Link::is_own).await?))
    }

    /// The same for addresses that the host itself is to have on the device `spec.name`. Weft's other devices count
    /// too, but for that of clients: somebody may have given one an address by hand. Routes that stand for a default route, and those of tables
    /// that only rules select, do not count.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn host_overlaps(&self, spec: &AttachSpec) -> Result<Vec<Overlap>, KernelError> {
        let is_meant = |link: &Link| link.name == spec.name || link.name == CLIENTS_DEVICE;
        let reached = self.socket().reached(is_meant).await?;
        let mut found = overlaps_of(spec, reached);
        found.retain(|overlap| match overlap.kind {
            OverlapKind::Hidden => true,
            OverlapKind::Hides => overlap.route.destination.prefix_len() >= CONTAINING_PREFIX_MIN,
            OverlapKind::Beside => false,
        });
        Ok(found)
    }

    /// The host's routes that contain a range or lie in it. Routes that stand for a default route (a VPN's
    /// halves of all addresses) do not count.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn range_routes(&self, range: IpNet) -> Result<Vec<HostRoute>, KernelError> {
        let mut found = self.host_routes().await?;
        found.retain(|HostRoute { destination, .. }| {
            let contains = destination.contains(&range.network())
                && destination.prefix_len() >= CONTAINING_PREFIX_MIN;
            contains || range.contains(&destination.network())
        });
        Ok(found)
    }

    /// Refuses a range that would hide addresses that the host reaches by another route. Such a route is at
    /// least as specific as the range, and packets leave by it.
    ///
    /// # Errors
    /// [`KernelError::RangeOverlaps`], naming the route.
    pub async fn check_range(&self, range: IpNet) -> Result<(), KernelError> {
        for HostRoute { destination: route, interface, .. } in self.range_routes(range).await? {
            let inside = route.prefix_len() >= range.prefix_len();
            if inside && self.is_taken(route, &interface).await {
                return Err(KernelError::RangeOverlaps { range, route, interface });
            }
        }
        Ok(())
    }

    /// Whether packets to a route's destination leave by its device: it may be down, or in a table that is
    /// not asked.
    async fn is_taken(&self, route: IpNet, interface: &str) -> bool {
        // Some of them may belong to this host.
        for address in route.hosts().take(TRIED_ADDRESSES) {
            if self.route_mtu(address).await.is_ok_and(|found| found.interface == interface) {
                return true;
            }
        }
        false
    }

    pub(crate) async fn routes(&self) -> Result<Vec<RouteMessage>, KernelError> {
        let mut all = self.socket().routes(AddressFamily::Inet).await?;
        all.extend(self.socket().routes(AddressFamily::Inet6).await?);
        Ok(all)
    }
}

/// Where networks of addresses and routes, each with its table, overlap.
fn overlaps_of(spec: &AttachSpec, reached: Vec<(HostRoute, u32)>) -> Vec<Overlap> {
    let mut networks: Vec<IpNet> = spec.addresses.iter().map(IpNet::trunc).collect();
    networks.dedup();
    let mut found = Vec::new();
    for (route, table) in reached {
        for network in &networks {
            let kind = match (&route.destination, network) {
                (route, network) if network.contains(route) => {
                    // Rules may select other tables.
                    let is_asked = [TABLE_MAIN, TABLE_DEFAULT].contains(&table);
                    if is_asked { OverlapKind::Hidden } else { OverlapKind::Beside }
                }
                (route, network) if route.contains(network) => OverlapKind::Hides,
                _ => continue,
            };
            let (network, route) = (*network, route.clone());
            found.push(Overlap { network, route, kind });
        }
    }
    found
}

impl Socket {
    /// The destinations that a namespace reaches by routes, without those of some devices, with the routing table of
    /// each.
    async fn reached(
        &self,
        without: impl Fn(&Link) -> bool,
    ) -> Result<Vec<(HostRoute, u32)>, KernelError> {
        let links: HashMap<u32, Link> =
            self.links().await?.into_iter().map(|link| (link.index, link)).collect();
        let mut routes = self.routes(AddressFamily::Inet).await?;
        routes.extend(self.routes(AddressFamily::Inet6).await?);
        let mut found: Vec<(HostRoute, u32)> = Vec::new();
        for route in routes {
            let Some(destination) = unicast_destination(&route) else { continue };
            let device = device_of(&route).and_then(|index| links.get(&index));
            if device.is_some_and(&without) {
                continue;
            }
            let interface = device.map_or_else(|| "-".to_owned(), |link| link.name.clone());
            let stays_on_host = device.is_some_and(|link| stays_on_host(link, &links));
            let reached = HostRoute { destination, interface, stays_on_host };
            if !found.iter().any(|(other, _)| *other == reached) {
                found.push((reached, table_of(&route)));
            }
        }
        Ok(found)
    }

    /// Routes multicast of a container through `link`, unless it has such a route already.
    pub(crate) async fn ensure_multicast_routes(
        &self,
        link: &Link,
        ipv6: bool,
    ) -> Result<(), KernelError> {
        let mut wanted = vec![multicast_v4(link)];
        if ipv6 {
            wanted.push(multicast_v6(link));
        }
        for route in wanted {
            let present = self.routes(route.header.address_family).await?;
            if !present.iter().any(|other| is_same_route(other, &route)) {
                self.add_route(route, link).await?;
            }
        }
        Ok(())
    }

    /// Makes Weft's default routes of a container through `link` lead to these gateways, and to no others.
    ///
    /// # Errors
    /// [`KernelError::DefaultRoute`] if the container has another default route, or the kernel's refusal.
    pub(crate) async fn set_default_routes(
        &self,
        link: &Link,
        gateways: &[IpAddr],
    ) -> Result<(), KernelError> {
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let gateway = gateways.iter().find(|gateway| family_of(**gateway) == family);
            let present = self.routes(family).await?;
            let ours = present.iter().filter(|route| is_our_default(route, link));
            let (kept, stale): (Vec<_>, Vec<_>) =
                ours.partition(|route| gateway_of(route) == gateway.copied());
            for route in stale {
                let request = RouteNetlinkMessage::DelRoute(route.clone());
                let doing = format!("remove the default route through device {}", link.name);
                self.change(request, 0).await.map_err(|error| error.while_doing(doing))?;
            }
            if let (Some(gateway), true) = (gateway, kept.is_empty()) {
                self.add_default_route(link, *gateway).await?;
            }
        }
        Ok(())
    }

    async fn add_default_route(&self, link: &Link, gateway: IpAddr) -> Result<(), KernelError> {
        let request = RouteNetlinkMessage::NewRoute(default_route(link, gateway));
        match self.change(request, NLM_F_CREATE | NLM_F_EXCL).await {
            Err(error) if error.is(Errno::EXIST) => {
                let family = if gateway.is_ipv4() { "IPv4" } else { "IPv6" };
                Err(KernelError::DefaultRoute { family, interface: link.name.clone() })
            }
            Err(error) => {
                let doing =
                    format!("add the default route to {gateway} through device {}", link.name);
                Err(error.while_doing(doing))
            }
            Ok(()) => Ok(()),
        }
    }

    async fn add_route(&self, route: RouteMessage, link: &Link) -> Result<(), KernelError> {
        let text = format!("add the multicast route through device {}", link.name);
        let request = RouteNetlinkMessage::NewRoute(route);
        match self.change(request, NLM_F_CREATE | NLM_F_EXCL).await {
            Err(error) if error.is(Errno::EXIST) => {
                // The container has a multicast route through another device: its owner chose that.
                tracing::warn!(device = %link.name, "multicast is already routed elsewhere in the container");
                Ok(())
            }
            Err(error) => Err(error.while_doing(text)),
            Ok(()) => Ok(()),
        }
    }

    pub(crate) async fn routes(
        &self,
        family: AddressFamily,
    ) -> Result<Vec<RouteMessage>, KernelError> {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        let found = self
            .dump(RouteNetlinkMessage::GetRoute(message))
            .await
            .map_err(|error| error.while_doing("list the routes"))?;
        let route = |message| match message {
            RouteNetlinkMessage::NewRoute(message) => Some(message),
            _ => None,
        };
        Ok(found.into_iter().filter_map(route).collect())
    }
}

fn multicast_v4(link: &Link) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = AddressFamily::Inet;
    route.header.destination_prefix_length = 4;
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.protocol = RouteProtocol::Other(ROUTE_PROTOCOL);
    route.header.scope = RouteScope::Link;
    route.header.kind = RouteType::Unicast;
    route.attributes = vec![
        RouteAttribute::Destination(RouteAddress::Inet(Ipv4Addr::new(224, 0, 0, 0))),
        RouteAttribute::Oif(link.index),
    ];
    route
}

fn default_route(link: &Link, gateway: IpAddr) -> RouteMessage {
    let address = match gateway {
        IpAddr::V4(gateway) => RouteAddress::Inet(gateway),
        IpAddr::V6(gateway) => RouteAddress::Inet6(gateway),
    };
    let mut route = RouteMessage::default();
    route.header.address_family = family_of(gateway);
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.protocol = RouteProtocol::Other(ROUTE_PROTOCOL);
    route.header.scope = RouteScope::Universe;
    route.header.kind = RouteType::Unicast;
    route.attributes = vec![RouteAttribute::Gateway(address), RouteAttribute::Oif(link.index)];
    route
}

fn is_our_default(route: &RouteMessage, link: &Link) -> bool {
    route.header.destination_prefix_length == 0
        && route.header.kind == RouteType::Unicast
        && route.header.protocol == RouteProtocol::Other(ROUTE_PROTOCOL)
        && table_of(route) == TABLE_MAIN
        && device_of(route) == Some(link.index)
}

pub(crate) fn gateway_of(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Gateway(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}

/// In the local table, where the kernel has an entry for each device already and the best one wins.
fn multicast_v6(link: &Link) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = AddressFamily::Inet6;
    route.header.destination_prefix_length = 8;
    route.header.table = TABLE_LOCAL as u8;
    route.header.protocol = RouteProtocol::Other(ROUTE_PROTOCOL);
    route.header.kind = RouteType::Multicast;
    route.attributes = vec![
        RouteAttribute::Destination(RouteAddress::Inet6(Ipv6Addr::new(
            0xff00, 0, 0, 0, 0, 0, 0, 0,
        ))),
        RouteAttribute::Priority(MULTICAST_METRIC),
        RouteAttribute::Oif(link.index),
    ];
    route
}

fn is_same_route(one: &RouteMessage, other: &RouteMessage) -> bool {
    one.header.destination_prefix_length == other.header.destination_prefix_length
        && table_of(one) == table_of(other)
        && one.header.protocol == other.header.protocol
        && device_of(one) == device_of(other)
        && destination_address(one) == destination_address(other)
}

fn table_of(route: &RouteMessage) -> u32 {
    let attribute = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    attribute.unwrap_or(u32::from(route.header.table))
}

/// Whether a route is in the table that is asked without custom rules.
pub(crate) fn is_in_main_table(route: &RouteMessage) -> bool {
    table_of(route) == TABLE_MAIN
}

fn devices_of(route: &RouteMessage) -> Vec<u32> {
    let mut devices = Vec::new();
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => devices.push(*index),
            RouteAttribute::MultiPath(hops) => {
                devices.extend(hops.iter().map(|hop| hop.interface_index));
            }
            _ => {}
        }
    }
    devices
}

pub(crate) fn device_of(route: &RouteMessage) -> Option<u32> {
    devices_of(route).first().copied()
}

pub(crate) fn destination_address(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}

/// Whether a device is a bridge without a port that leads out of the host.
fn stays_on_host(link: &Link, links: &HashMap<u32, Link>) -> bool {
    let leads_out =
        |port: &Link| !matches!(port.kind, Some(InfoKind::Veth | InfoKind::Tun | InfoKind::Dummy));
    let mut ports = links.values().filter(|port| port.master == Some(link.index));
    link.kind == Some(InfoKind::Bridge) && !ports.any(leads_out)
}

fn unicast_destination(route: &RouteMessage) -> Option<IpNet> {
    let prefix = route.header.destination_prefix_length;
    if route.header.kind != RouteType::Unicast || prefix == 0 || table_of(route) == TABLE_LOCAL {
        return None;
    }
    let address = destination_address(route)?;
    let beside = match address {
        IpAddr::V4(address) => address.is_multicast() || address.is_link_local(),
        IpAddr::V6(address) => address.is_multicast() || address.is_unicast_link_local(),
    };
    if beside {
        return None;
    }
    IpNet::new(address, prefix).ok().map(|net| net.trunc())
}

fn metric_mtu(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Metrics(metrics) => metrics.iter().find_map(|metric| match metric {
            RouteMetric::Mtu(mtu) => Some(*mtu),
            _ => None,
        }),
        _ => None,
    })
}
