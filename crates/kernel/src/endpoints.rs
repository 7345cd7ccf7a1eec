//! Endpoints on other hosts: where the bridge sends their frames, and what it answers for them.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{
        NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
    },
    route::{RouteProtocol, RouteType},
};
use rustix::io::Errno;

use crate::{
    Kernel, attach::family_of, error::KernelError, link::Link, route::ROUTE_PROTOCOL,
    socket::Socket,
};

type MacAddress = [u8; 6];

impl Kernel {
    /// Makes `wanted` the set of endpoints that the engine's port reaches: for each MAC a static
    /// forwarding entry on the port `tap`, and for each of its addresses a permanent neighbour entry
    /// on the bridge, from which the bridge answers ARP and neighbour discovery itself when the
    /// port has `neigh_suppress`. Only differences are sent; entries that Weft did not make stay.
    ///
    /// The forwarding entries are sticky: a container that sends with a remote endpoint's MAC as
    /// its source does not draw that endpoint's traffic to itself. An address named by two MACs
    /// goes to the last.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if bridge or port are not there, or the kernel's refusal.
    pub async fn set_remote_endpoints(
        &self,
        bridge: &str,
        tap: &str,
        wanted: &[(MacAddress, Vec<IpAddr>)],
    ) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let bridge = self.own_bridge(bridge).await?;
        let port = socket.need_link(tap).await?;
        if port.master != Some(bridge.index) {
            return Err(KernelError::LinkMissing { name: format!("{tap} in {}", bridge.name) });
        }
        set_forwarding(socket, &port, wanted).await?;
        set_neighbours(socket, &bridge, wanted).await
    }
}

async fn set_forwarding(
    socket: &Socket,
    port: &Link,
    wanted: &[(MacAddress, Vec<IpAddr>)],
) -> Result<(), KernelError> {
    let wanted: HashSet<MacAddress> = wanted.iter().map(|(mac, _)| *mac).collect();
    let mut present = HashSet::new();
    for entry in socket.neighbours(AddressFamily::Bridge).await? {
        // Static entries on our port are ours; the port's own MAC is permanent, and what another
        // tool learned or set elsewhere is on another port.
        if entry.header.ifindex == port.index && entry.header.state == NeighbourState::Noarp {
            present.extend(mac_of(&entry));
        }
    }
    for mac in present.difference(&wanted) {
        let request = RouteNetlinkMessage::DelNeighbour(forwarding_entry(port, *mac));
        forget(socket, request, &format!("forwarding entry {}", mac_text(mac))).await?;
    }
    for mac in wanted.difference(&present) {
        let request = RouteNetlinkMessage::NewNeighbour(forwarding_entry(port, *mac));
        let doing = || format!("add forwarding entry {} on {}", mac_text(mac), port.name);
        socket
            .change(request, NLM_F_CREATE | NLM_F_REPLACE)
            .await
            .map_err(|error| error.while_doing(doing()))?;
    }
    Ok(())
}

async fn set_neighbours(
    socket: &Socket,
    bridge: &Link,
    wanted: &[(MacAddress, Vec<IpAddr>)],
) -> Result<(), KernelError> {
    let wanted: HashMap<IpAddr, MacAddress> = wanted
        .iter()
        .flat_map(|(mac, addresses)| addresses.iter().map(move |address| (*address, *mac)))
        .collect();
    let mut present = HashMap::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        for entry in socket.neighbours(family).await? {
            if entry.header.ifindex == bridge.index
                && is_own_neighbour(&entry)
                && let (Some(address), Some(mac)) = (address_of(&entry), mac_of(&entry))
            {
                present.insert(address, mac);
            }
        }
    }
    for (address, mac) in present.iter().filter(|(address, _)| !wanted.contains_key(address)) {
        let request = RouteNetlinkMessage::DelNeighbour(neighbour_entry(bridge, *address, *mac));
        forget(socket, request, &format!("neighbour entry {address}")).await?;
    }
    for (address, mac) in &wanted {
        if present.get(address) == Some(mac) {
            continue;
        }
        let request = RouteNetlinkMessage::NewNeighbour(neighbour_entry(bridge, *address, *mac));
        let doing = || format!("add neighbour entry {address} on {}", bridge.name);
        socket
            .change(request, NLM_F_CREATE | NLM_F_REPLACE)
            .await
            .map_err(|error| error.while_doing(doing()))?;
    }
    Ok(())
}

/// Removes an entry; one that is gone already is as good.
async fn forget(
    socket: &Socket,
    request: RouteNetlinkMessage,
    what: &str,
) -> Result<(), KernelError> {
    match socket.change(request, 0).await {
        Err(error) if !error.is(Errno::NOENT) => Err(error.while_doing(format!("remove {what}"))),
        _ => Ok(()),
    }
}

impl Socket {
    /// One neighbour table: forwarding entries for `AddressFamily::Bridge`, else ARP or ND.
    async fn neighbours(
        &self,
        family: AddressFamily,
    ) -> Result<Vec<NeighbourMessage>, KernelError> {
        let mut message = NeighbourMessage::default();
        message.header.family = family;
        let found = self
            .dump(RouteNetlinkMessage::GetNeighbour(message))
            .await
            .map_err(|error| error.while_doing("list the neighbour entries"))?;
        let entry = |message| match message {
            RouteNetlinkMessage::NewNeighbour(message) => Some(message),
            _ => None,
        };
        Ok(found.into_iter().filter_map(entry).collect())
    }
}

fn forwarding_entry(port: &Link, mac: MacAddress) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = port.index;
    message.header.state = NeighbourState::Noarp;
    message.header.flags = NeighbourFlags::Controller | NeighbourFlags::Sticky;
    message.attributes = vec![NeighbourAttribute::LinkLayerAddress(mac.to_vec())];
    message
}

fn neighbour_entry(bridge: &Link, address: IpAddr, mac: MacAddress) -> NeighbourMessage {
    let destination = match address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    };
    let mut message = NeighbourMessage::default();
    message.header.family = family_of(address);
    message.header.ifindex = bridge.index;
    message.header.state = NeighbourState::Permanent;
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![
        NeighbourAttribute::Destination(destination),
        NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        NeighbourAttribute::Protocol(RouteProtocol::Other(ROUTE_PROTOCOL)),
    ];
    message
}

fn is_own_neighbour(entry: &NeighbourMessage) -> bool {
    let ours = NeighbourAttribute::Protocol(RouteProtocol::Other(ROUTE_PROTOCOL));
    entry.header.state == NeighbourState::Permanent && entry.attributes.contains(&ours)
}

fn mac_of(entry: &NeighbourMessage) -> Option<MacAddress> {
    entry.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => bytes.as_slice().try_into().ok(),
        _ => None,
    })
}

fn address_of(entry: &NeighbourMessage) -> Option<IpAddr> {
    entry.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => Some((*address).into()),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => {
            Some((*address).into())
        }
        _ => None,
    })
}

fn mac_text(mac: &MacAddress) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
