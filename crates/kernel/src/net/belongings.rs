//! Saves and restores a container's own addresses and routes when its interface is replaced by another
//! device.

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope},
    route::{RouteAttribute, RouteMessage, RouteProtocol, RouteType},
};

use super::{addresses::address_of, link::Link};
use crate::{error::KernelError, netlink::route::Socket};

/// Addresses and routes of a device, which go with it.
#[derive(Debug, Default)]
pub(crate) struct Belongings {
    device: Option<u32>,
    addresses: Vec<AddressMessage>,
    routes: Vec<RouteMessage>,
}

impl Belongings {
    /// Reads the addresses and routes of an attachment's device, if it is there. Leaves out addresses of the
    /// networks that `given` is of: the network may have assigned them to another container since.
    pub(crate) async fn of(
        inside: &Socket,
        device: &str,
        given: &[IpNet],
    ) -> Result<Self, KernelError> {
        let Some(link) = inside.link(device).await?.filter(Link::is_own) else {
            return Ok(Self::default());
        };
        let addresses = inside
            .dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))
            .await
            .map_err(|error| error.while_doing("list the addresses"))?;
        let mut routes = inside.routes(AddressFamily::Inet).await?;
        routes.extend(inside.routes(AddressFamily::Inet6).await.unwrap_or_default());
        // Sort link routes before the routes whose gateways need them.
        routes.sort_by_key(|route| {
            route.attributes.iter().any(|it| matches!(it, RouteAttribute::Gateway(_)))
        });
        let is_here = |route: &RouteMessage| {
            route.attributes.contains(&RouteAttribute::Oif(link.index)) && is_somebodys(route)
        };
        let address = |message| match message {
            RouteNetlinkMessage::NewAddress(it) if it.header.index == link.index => Some(it),
            _ => None,
        };
        Ok(Self {
            device: Some(link.index),
            addresses: addresses
                .into_iter()
                .filter_map(address)
                .filter(|address| stays(address) && !may_be_given(address, given))
                .collect(),
            routes: routes.into_iter().filter(is_here).collect(),
        })
    }

    /// Restores missing addresses and routes if `device` is a different one. Logs those that the kernel
    /// refuses.
    pub(crate) async fn give_back(self, inside: &Socket, device: &Link) {
        if self.device.is_none_or(|before| before == device.index) {
            return;
        }
        let addresses = self.addresses.into_iter().map(|mut address| {
            address.header.index = device.index;
            address.attributes.retain(is_kept);
            if address.header.family == AddressFamily::Inet6 {
                address.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
            }
            RouteNetlinkMessage::NewAddress(address)
        });
        let routes = self.routes.into_iter().map(|mut route| {
            for attribute in &mut route.attributes {
                if matches!(attribute, RouteAttribute::Oif(_)) {
                    *attribute = RouteAttribute::Oif(device.index);
                }
            }
            route.attributes.retain(|it| !matches!(it, RouteAttribute::CacheInfo(_)));
            RouteNetlinkMessage::NewRoute(route)
        });
        for request in addresses.chain(routes) {
            match inside.change(request, NLM_F_CREATE | NLM_F_EXCL).await {
                Err(error) if !error.is(rustix::io::Errno::EXIST) => {
                    let error =
                        error.while_doing(format!("put back what stood on {}", device.name));
                    tracing::warn!(%error, "an address or a route of a container is gone");
                }
                _ => {}
            }
        }
    }
}

/// Whether an address is permanent and was set by a program; the kernel makes link-local ones itself.
fn stays(address: &AddressMessage) -> bool {
    address.header.flags.contains(AddressHeaderFlags::Permanent)
        && address.header.scope != AddressScope::Link
}

/// Whether an address is in the network and has its prefix length, like those that Weft assigns.
fn may_be_given(address: &AddressMessage, given: &[IpNet]) -> bool {
    address_of(address)
        .is_some_and(|address| given.iter().any(|given| given.trunc() == address.trunc()))
}

fn is_kept(attribute: &AddressAttribute) -> bool {
    matches!(
        attribute,
        AddressAttribute::Local(_)
            | AddressAttribute::Address(_)
            | AddressAttribute::Broadcast(_)
            | AddressAttribute::Label(_)
    )
}

/// Not the kernel's own routes, nor those that follow from addresses or advertisements.
fn is_somebodys(route: &RouteMessage) -> bool {
    ![RouteProtocol::Kernel, RouteProtocol::Ra].contains(&route.header.protocol)
        && route.header.kind == RouteType::Unicast
        && !route.attributes.iter().any(|it| matches!(it, RouteAttribute::MultiPath(_)))
}
