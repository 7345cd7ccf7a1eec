//! Clients behind a routed device of this host, which containers reach as neighbours: a route to each through that
//! device, routes to the networks behind them, and an entry by which the host's own interface on the network answers
//! ARP and ND for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{InfoKind, LinkAttribute},
    neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage},
    route::{
        RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
        RouteType,
    },
};
use rustix::io::Errno;

use super::{
    addresses::family_of,
    ipv6::{self, answer_at_once, forward, ignore_routers, this_host},
    link::{Change, Link, mark},
    neighbours::address_of,
    route::{ROUTE_PROTOCOL, destination_address, is_in_main_table},
};
use crate::{
    error::KernelError,
    handle::Kernel,
    netlink::{error::RequestError, route::Socket},
};

/// Clients, and the two devices between which the host passes their packets on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientsSpec {
    /// The routed device that leads to the clients. It is there, and carries IP packets.
    pub device: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// The host's own interface on the network ([`Kernel::expose`]).
    pub exposed: String,
    /// The clients' addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// Networks behind clients, each with the address of its client.
    pub networks: BTreeMap<IpNet, IpAddr>,
    /// The host's own IPv4 address on the network, from which it sends to clients: their device has none.
    pub source: Option<Ipv4Addr>,
}

/// Clients that came and went since [`Kernel::ensure_clients`] was called with these devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientsChange {
    /// The routed device that leads to the clients.
    pub device: String,
    /// The host's own interface on the network.
    pub exposed: String,
    /// Addresses that are clients' now.
    pub new: BTreeSet<IpAddr>,
    /// Addresses that are nobody's any more.
    pub gone: BTreeSet<IpAddr>,
    /// The host's own IPv4 address on the network, as [`ClientsSpec::source`].
    pub source: Option<Ipv4Addr>,
}

/// What is not routed to clients, since the host has another route there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Addresses of clients. The host answers for none of them, and reaches no network behind them.
    pub addresses: BTreeSet<IpAddr>,
    /// Networks behind other clients.
    pub networks: Vec<IpNet>,
}

impl Kernel {
    /// Makes these clients, and no others, neighbours of the network: switches the device on, routes each address to
    /// it, and has the host's interface answer for each at once. Weft's routes and entries for other addresses go.
    ///
    /// Returns the addresses and networks to which the host has another route already: that one stays. For a network
    /// behind a client that is one of any metric. All addresses (a prefix length of 0) are never behind a client.
    ///
    /// Only these two devices pass packets on. Linux knows no such switch for IPv6: its packets are passed on where
    /// [`Kernel::forwarding`] says so.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if a device is not there, [`KernelError::NameTaken`] if it is another program's,
    /// or the kernel's refusal.
    pub async fn ensure_clients(&self, spec: &ClientsSpec) -> Result<LeftOut, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let device = socket.need_link(&spec.device).await?;
        let is_ours = device.is_own() || device.kind == Some(InfoKind::Tun);
        let exposed = socket.need_link(&spec.exposed).await?;
        for (link, is_ours) in [(&device, is_ours), (&exposed, exposed.is_own())] {
            if !is_ours {
                return Err(link.name_taken("on this host"));
            }
        }
        self.prepare_routed(&device, spec.mtu).await?;
        let has_ipv6 = spec.addresses.iter().any(IpAddr::is_ipv6);
        for name in [&spec.device, &spec.exposed] {
            forward(&self.inner.home, name, has_ipv6)?;
        }
        answer_at_once(&self.inner.home, &spec.exposed)?;
        if has_ipv6 {
            ipv6::set(&self.inner.home, &spec.exposed, "proxy_ndp", "1")?;
        }
        // Nobody is told of a client that cannot be reached yet.
        let through = Through { device: &device, source: spec.source };
        let left_out = socket.set_client_routes(through, &spec.addresses).await?;
        let reached: BTreeSet<IpAddr> = spec.addresses.difference(&left_out).copied().collect();
        // The kernel takes no route by a client that it has no route to.
        let behind = spec.networks.iter().filter(|(_, client)| !left_out.contains(*client));
        let behind = behind.map(|(network, client)| (network.trunc(), *client)).collect();
        let networks = socket.set_networks_behind(through, behind).await?;
        socket.set_answered(&exposed, &reached).await?;
        Ok(LeftOut { addresses: left_out, networks })
    }

    /// Takes some clients in and lets others go, without a look at all others: its cost does not grow with their
    /// number. Routes and entries that another program has removed or made are not repaired.
    ///
    /// Returns the new addresses to which the host has another route already.
    ///
    /// # Errors
    /// As [`Self::ensure_clients`].
    pub async fn change_clients(&self, change: &ClientsChange) -> Result<LeftOut, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let device = socket.need_link(&change.device).await?;
        let exposed = socket.need_link(&change.exposed).await?;
        if change.new.iter().any(IpAddr::is_ipv6) {
            for name in [&change.device, &change.exposed] {
                forward(&self.inner.home, name, true)?;
            }
            ipv6::set(&self.inner.home, &change.exposed, "proxy_ndp", "1")?;
        }
        // Nobody is told of a client that cannot be reached yet.
        let through = Through { device: &device, source: change.source };
        let left_out = socket.change_client_routes(through, (&change.new, &change.gone)).await?;
        let reached: BTreeSet<IpAddr> = change.new.difference(&left_out).copied().collect();
        socket.change_answered(&exposed, (&reached, &change.gone)).await?;
        Ok(LeftOut { addresses: left_out, networks: Vec::new() })
    }

    /// Ends what [`Self::ensure_clients`] has set up on the host's own interface, if that is there. The routes go with
    /// their device.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn forget_clients(&self, exposed: &str) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let Some(link) = self.socket().link(exposed).await?.filter(Link::is_own) else {
            return Ok(());
        };
        self.socket().set_answered(&link, &BTreeSet::new()).await?;
        ipv6::forward_as_others(&self.inner.home, exposed)
    }

    async fn prepare_routed(&self, link: &Link, mtu: u32) -> Result<(), KernelError> {
        let socket = self.socket();
        socket.disable_autoconfiguration(link).await?;
        ignore_routers(&self.inner.home, &link.name, this_host())?;
        let change = mark(link).when(link.mtu != mtu, LinkAttribute::Mtu(mtu));
        change.send(socket, &link.name).await?;
        Change::of(link).up(link).send(socket, &link.name).await
    }
}

impl Socket {
    /// Routes these addresses to a device; Weft's other host routes to it go. Returns those that the host has another
    /// route to.
    async fn set_client_routes(
        &self,
        through: Through<'_>,
        wanted: &BTreeSet<IpAddr>,
    ) -> Result<BTreeSet<IpAddr>, KernelError> {
        let device = through.device;
        let mut present = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let routes = self.routes(family).await?;
            present.extend(routes.iter().filter_map(|route| client_of(route, device)));
        }
        let new = wanted.difference(&present).copied().collect();
        let gone = present.difference(wanted).copied().collect();
        self.change_client_routes(through, (&new, &gone)).await
    }

    async fn change_client_routes(
        &self,
        through: Through<'_>,
        (new, gone): (&BTreeSet<IpAddr>, &BTreeSet<IpAddr>),
    ) -> Result<BTreeSet<IpAddr>, KernelError> {
        let device = through.device;
        let gone = gone.iter().map(|address| {
            let route = RouteNetlinkMessage::DelRoute(client_route(through, *address));
            (*address, route, 0)
        });
        let new = new.iter().map(|address| {
            let route = RouteNetlinkMessage::NewRoute(client_route(through, *address));
            (*address, route, NLM_F_CREATE | NLM_F_EXCL)
        });
        let doing = |address| format!("route {address} through device {}", device.name);
        self.reconcile(gone.chain(new).collect(), doing).await
    }

    /// Routes these networks to a device, each by its client; Weft's other routes by clients go. Returns those that are
    /// left out: networks that the host has another route to, and all addresses.
    async fn set_networks_behind(
        &self,
        through: Through<'_>,
        wanted: BTreeSet<(IpNet, IpAddr)>,
    ) -> Result<Vec<IpNet>, KernelError> {
        let device = through.device;
        let (mut present, mut others) = (BTreeSet::new(), BTreeSet::new());
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let routes = self.routes(family).await?;
            present.extend(routes.iter().filter_map(|route| network_behind(route, device)));
            others.extend(routes.iter().filter_map(|route| network_of_others(route, device)));
        }
        // The kernel refuses a second route of the same metric alone. An IPv4 route of Weft's has none, and would come
        // before those that have one.
        let (left_out, wanted): (BTreeSet<(IpNet, IpAddr)>, BTreeSet<_>) = wanted
            .into_iter()
            .partition(|(network, _)| network.prefix_len() == 0 || others.contains(network));
        let mut left_out: Vec<IpNet> = left_out.into_iter().map(|(network, _)| network).collect();
        // One network may go from one client to another.
        let gone = present.difference(&wanted).map(|(network, client)| {
            (*network, RouteNetlinkMessage::DelRoute(network_route(through, *network, *client)), 0)
        });
        let new = wanted.difference(&present).map(|(network, client)| {
            let route = RouteNetlinkMessage::NewRoute(network_route(through, *network, *client));
            (*network, route, NLM_F_CREATE | NLM_F_EXCL)
        });
        let (networks, requests): (Vec<IpNet>, Vec<_>) =
            gone.chain(new).map(|(network, message, flags)| (network, (message, flags))).unzip();
        let answers = self.change_all(requests).await;
        let answers = answers.map_err(|error| error.while_doing("set up networks of clients"))?;
        for (network, answer) in networks.into_iter().zip(answers) {
            match answer {
                Ok(()) => {}
                Err(error) if error.is(Errno::EXIST) => left_out.push(network),
                Err(error) if error.is(Errno::SRCH) || error.is(Errno::NOENT) => {}
                Err(error) => {
                    let doing = format!("route {network} through device {}", device.name);
                    return Err(error.while_doing(doing));
                }
            }
        }
        Ok(left_out)
    }

    /// Has a device answer for these addresses; those that it answered for by Weft's will before go.
    async fn set_answered(
        &self,
        device: &Link,
        wanted: &BTreeSet<IpAddr>,
    ) -> Result<(), KernelError> {
        let mut present = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let entries = self.proxies(family).await?;
            present.extend(entries.iter().filter_map(|entry| answered_by(entry, device)));
        }
        let new = wanted.difference(&present).copied().collect();
        let gone = present.difference(wanted).copied().collect();
        self.change_answered(device, (&new, &gone)).await
    }

    async fn change_answered(
        &self,
        device: &Link,
        (new, gone): (&BTreeSet<IpAddr>, &BTreeSet<IpAddr>),
    ) -> Result<(), KernelError> {
        let gone = gone.iter().map(|address| {
            (*address, RouteNetlinkMessage::DelNeighbour(proxy_entry(device, *address)), 0)
        });
        let new = new.iter().map(|address| {
            let entry = RouteNetlinkMessage::NewNeighbour(proxy_entry(device, *address));
            (*address, entry, NLM_F_CREATE)
        });
        let doing = |address| format!("answer for {address} on device {}", device.name);
        self.reconcile(gone.chain(new).collect(), doing).await.map(|_| ())
    }

    /// Sends changes, each for an address. One that has gone by itself is no error. Returns the addresses of those that
    /// are to be made, and are there as another program's.
    async fn reconcile(
        &self,
        changes: Vec<(IpAddr, RouteNetlinkMessage, u16)>,
        doing: impl Fn(IpAddr) -> String,
    ) -> Result<BTreeSet<IpAddr>, KernelError> {
        let addresses: Vec<IpAddr> = changes.iter().map(|(address, ..)| *address).collect();
        let requests = changes.into_iter().map(|(_, message, flags)| (message, flags)).collect();
        let answers = self.change_all(requests).await;
        let answers = answers.map_err(|error| error.while_doing("set up clients"))?;
        let is_gone = |error: &RequestError| error.is(Errno::SRCH) || error.is(Errno::NOENT);
        let mut taken = BTreeSet::new();
        for (address, answer) in addresses.into_iter().zip(answers) {
            match answer {
                Err(error) if error.is(Errno::EXIST) => _ = taken.insert(address),
                Err(error) if !is_gone(&error) => return Err(error.while_doing(doing(address))),
                _ => {}
            }
        }
        Ok(taken)
    }

    async fn proxies(&self, family: AddressFamily) -> Result<Vec<NeighbourMessage>, KernelError> {
        let mut message = NeighbourMessage::default();
        message.header.family = family;
        message.header.flags = NeighbourFlags::Proxy;
        let found = self
            .dump(RouteNetlinkMessage::GetNeighbour(message))
            .await
            .map_err(|error| error.while_doing("list the proxy entries"))?;
        let entry = |message| match message {
            RouteNetlinkMessage::NewNeighbour(message) => Some(message),
            _ => None,
        };
        Ok(found.into_iter().filter_map(entry).collect())
    }
}

/// The device of a route, and the address that packets are sent from.
#[derive(Clone, Copy)]
struct Through<'a> {
    device: &'a Link,
    source: Option<Ipv4Addr>,
}

fn client_route(through: Through<'_>, address: IpAddr) -> RouteMessage {
    let mut route = route_through(through, address, host_bits(address));
    if address.is_ipv4() {
        route.header.scope = RouteScope::Link;
    }
    route
}

/// The route to a network behind a client.
fn network_route(through: Through<'_>, network: IpNet, client: IpAddr) -> RouteMessage {
    let mut route = route_through(through, network.addr(), network.prefix_len());
    route.attributes.push(RouteAttribute::Gateway(route_address(client)));
    route
}

fn route_through(through: Through<'_>, address: IpAddr, bits: u8) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = family_of(address);
    route.header.destination_prefix_length = bits;
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.protocol = RouteProtocol::Other(ROUTE_PROTOCOL);
    route.header.kind = RouteType::Unicast;
    let destination = RouteAttribute::Destination(route_address(address));
    route.attributes = vec![destination, RouteAttribute::Oif(through.device.index)];
    // Linux finds the IPv6 address that is closest by itself.
    if let Some(source) = through.source.filter(|_| address.is_ipv4()) {
        route.attributes.push(RouteAttribute::PrefSource(RouteAddress::Inet(source)));
    }
    route
}

const fn route_address(address: IpAddr) -> RouteAddress {
    match address {
        IpAddr::V4(address) => RouteAddress::Inet(address),
        IpAddr::V6(address) => RouteAddress::Inet6(address),
    }
}

/// The network behind a client that a route of Weft's leads to, and the client's address.
fn network_behind(route: &RouteMessage, device: &Link) -> Option<(IpNet, IpAddr)> {
    let client = gateway_of(route).filter(|_| is_ours(route, device))?;
    Some((destination_of(route)?, client))
}

/// The network that a route leads to which is not Weft's.
fn network_of_others(route: &RouteMessage, device: &Link) -> Option<IpNet> {
    let is_theirs = route.header.kind == RouteType::Unicast
        && is_in_main_table(route)
        && !is_ours(route, device);
    is_theirs.then(|| destination_of(route)).flatten()
}

/// Where a route leads. A default route names no destination.
fn destination_of(route: &RouteMessage) -> Option<IpNet> {
    let bits = route.header.destination_prefix_length;
    let address = match (destination_address(route), route.header.address_family) {
        (Some(address), _) => address,
        (None, AddressFamily::Inet) if bits == 0 => Ipv4Addr::UNSPECIFIED.into(),
        (None, AddressFamily::Inet6) if bits == 0 => Ipv6Addr::UNSPECIFIED.into(),
        (None, _) => return None,
    };
    IpNet::new(address, bits).ok()
}

fn gateway_of(route: &RouteMessage) -> Option<IpAddr> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet(address)) => Some((*address).into()),
        RouteAttribute::Gateway(RouteAddress::Inet6(address)) => Some((*address).into()),
        _ => None,
    })
}

/// Whether a route through a device is Weft's.
fn is_ours(route: &RouteMessage, device: &Link) -> bool {
    route.header.protocol == RouteProtocol::Other(ROUTE_PROTOCOL)
        && route.header.kind == RouteType::Unicast
        && is_in_main_table(route)
        && route.attributes.contains(&RouteAttribute::Oif(device.index))
}

/// The client that a route of Weft's leads to.
fn client_of(route: &RouteMessage, device: &Link) -> Option<IpAddr> {
    let address = destination_address(route)?;
    let is_host = route.header.destination_prefix_length == host_bits(address);
    (is_host && is_ours(route, device) && gateway_of(route).is_none()).then_some(address)
}

fn proxy_entry(device: &Link, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family_of(address);
    message.header.ifindex = device.index;
    message.header.flags = NeighbourFlags::Proxy;
    message.attributes = vec![
        NeighbourAttribute::Destination(address.into()),
        NeighbourAttribute::Protocol(RouteProtocol::Other(ROUTE_PROTOCOL)),
    ];
    message
}

/// The address that a device answers for by an entry of Weft's.
fn answered_by(entry: &NeighbourMessage, device: &Link) -> Option<IpAddr> {
    let ours = NeighbourAttribute::Protocol(RouteProtocol::Other(ROUTE_PROTOCOL));
    let is_ours = entry.header.ifindex == device.index
        && entry.header.flags.contains(NeighbourFlags::Proxy)
        && entry.attributes.contains(&ours);
    is_ours.then(|| address_of(entry)).flatten()
}

const fn host_bits(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => Ipv6Addr::BITS as u8,
    }
}
