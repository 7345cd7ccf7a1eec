//! The host's configuration that routes packets between hosts' tunnel addresses to the data channel's device
//! (`docs/design/ovpn.md`).

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::LinkAttribute,
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteType},
};

use super::{
    addresses::Addresses,
    ipv6::{self, ignore_routers, this_host},
    link::{Change, Link, mark},
    route::{ROUTE_PROTOCOL, destination_address},
};
use crate::{error::KernelError, handle::Kernel};

/// Routes packets through a device that Weft has made, with their addresses on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelSpec {
    /// The device.
    pub device: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// The address of this host that packets leave from.
    pub source: Ipv6Addr,
    /// The address of this host that packets come to.
    pub local: Ipv6Addr,
    /// The packets' destination: a prefix with its length in bits.
    pub destination: (Ipv6Addr, u8),
}

impl Kernel {
    /// Switches the device on with these addresses and routes the prefix to it, or restores missing parts.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the device is not there, [`KernelError::NameTaken`] if it is not
    /// ours, or the kernel's refusal.
    pub async fn ensure_tunnel(&self, spec: &TunnelSpec) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let link = socket.need_link(&spec.device).await?;
        if !link.is_own() {
            return Err(link.name_taken("on this host"));
        }
        socket.disable_autoconfiguration(&link).await?;
        // A host may have IPv6 switched off for its networks; here it is wanted.
        ignore_routers(&self.inner.home, &spec.device, this_host())?;
        ipv6::set(&self.inner.home, &spec.device, "disable_ipv6", "0")?;
        mark(&link)
            .when(link.mtu != spec.mtu, LinkAttribute::Mtu(spec.mtu))
            .send(socket, &spec.device)
            .await?;
        Change::of(&link).up(&link).send(socket, &spec.device).await?;
        let present = Addresses::read(socket).await?;
        for address in [spec.source, spec.local] {
            let address = IpNet::from(IpAddr::V6(address));
            if !present.has(link.index, &address) {
                socket.add_address(&link, address).await?;
            }
        }
        self.ensure_tunnel_route(&link, spec).await
    }

    /// If the address is removed even for a moment, the kernel removes the source from its routes. Such a
    /// route is replaced.
    async fn ensure_tunnel_route(&self, link: &Link, spec: &TunnelSpec) -> Result<(), KernelError> {
        let mut route = route(link, spec);
        let source = RouteAttribute::PrefSource(RouteAddress::Inet6(spec.source));
        let present = self.routes().await?.into_iter().find(|other| leads_alike(other, &route));
        if let Some(present) = present {
            if present.attributes.contains(&source) {
                return Ok(());
            }
            let gone = RouteNetlinkMessage::DelRoute(route.clone());
            let doing = || format!("remove the route through device {}", link.name);
            self.socket().change(gone, 0).await.map_err(|error| error.while_doing(doing()))?;
        }
        route.attributes.push(source);
        let request = RouteNetlinkMessage::NewRoute(route);
        let doing = || {
            let (address, bits) = spec.destination;
            format!("route {address}/{bits} through device {}", link.name)
        };
        let added = self.socket().change(request, NLM_F_CREATE | NLM_F_EXCL).await;
        added.map_err(|error| error.while_doing(doing()))
    }
}

/// The route, without the source address that it gives to packets.
fn route(link: &Link, spec: &TunnelSpec) -> RouteMessage {
    let (address, bits) = spec.destination;
    let mut route = RouteMessage::default();
    route.header.address_family = AddressFamily::Inet6;
    route.header.destination_prefix_length = bits;
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.protocol = RouteProtocol::Other(ROUTE_PROTOCOL);
    route.header.kind = RouteType::Unicast;
    route.attributes = vec![
        RouteAttribute::Destination(RouteAddress::Inet6(address)),
        RouteAttribute::Oif(link.index),
    ];
    route
}

/// Whether a route that is there is the wanted one, from whichever source.
fn leads_alike(present: &RouteMessage, wanted: &RouteMessage) -> bool {
    present.header.destination_prefix_length == wanted.header.destination_prefix_length
        && present.header.protocol == wanted.header.protocol
        && destination_address(present) == destination_address(wanted)
        && wanted.attributes.iter().all(|attribute| present.attributes.contains(attribute))
}
