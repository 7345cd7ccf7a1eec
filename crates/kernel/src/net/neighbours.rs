//! Forwarding and neighbour entries as netlink shows them: one key, one value each.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{
        NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
    },
    route::{RouteProtocol, RouteType},
};

use super::{addresses::family_of, link::Link, route::ROUTE_PROTOCOL, vxlan::OuterFamily};
use crate::{error::KernelError, handle::Kernel, netlink::route::Socket};

pub(crate) type MacAddress = [u8; 6];

/// The address under which a VXLAN device keeps the remotes that get a copy of every broadcast,
/// multicast and unknown frame.
pub(crate) const ALL_ZERO: MacAddress = [0; 6];

/// One entry of the kernel's tables. Entries are written in this order: each entry comes after those that it
/// relies on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Key {
    /// A remote host gets copies of broadcast frames: an all-zero entry of the VXLAN device.
    Copy(IpAddr),
    /// The remote host that the VXLAN device of this family sends a MAC's frames to.
    Tunnel(OuterFamily, MacAddress),
    /// The port that the bridge sends a MAC's frames to.
    Forward(MacAddress),
    /// The MAC that the bridge answers with for an address.
    Neighbour(IpAddr),
}

/// The value of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value {
    /// [`Key::Copy`] has no further value.
    Present,
    /// For [`Key::Tunnel`].
    Remote(IpAddr),
    /// For [`Key::Forward`].
    Port(Port),
    /// For [`Key::Neighbour`].
    Mac(MacAddress),
}

/// An overlay port of the bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Port {
    Tap,
    Vxlan(OuterFamily),
}

/// The devices by index; a device that is not there, or not a port of the bridge, is `None`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Devices {
    pub(crate) bridge: u32,
    pub(crate) tap: Option<u32>,
    pub(crate) v4: Option<u32>,
    pub(crate) v6: Option<u32>,
}

impl Devices {
    pub(crate) fn vxlan(&self, family: OuterFamily) -> Option<u32> {
        match family {
            OuterFamily::V4 => self.v4,
            OuterFamily::V6 => self.v6,
        }
    }

    fn port(&self, port: Port) -> Option<u32> {
        match port {
            Port::Tap => self.tap,
            Port::Vxlan(family) => self.vxlan(family),
        }
    }

    fn port_of(&self, index: u32) -> Option<Port> {
        let ports =
            [Port::Tap, Port::Vxlan(OuterFamily::V4), Port::Vxlan(OuterFamily::V6)].into_iter();
        ports.into_iter().find(|port| self.port(*port) == Some(index))
    }
}

/// Weft's entries in the kernel's tables.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pub(crate) entries: HashMap<Key, Value>,
    /// Further remotes of one MAC on a VXLAN device. Weft's entries have one remote each.
    pub(crate) surplus: Vec<(OuterFamily, MacAddress, IpAddr)>,
}

/// The request that makes an entry, or changes it in one step. `None` if its device is missing.
pub(crate) fn set(devices: &Devices, key: Key, value: Value) -> Option<(RouteNetlinkMessage, u16)> {
    let replace = NLM_F_CREATE | NLM_F_REPLACE;
    let (message, flags) = match (key, value) {
        (Key::Copy(remote), _) => {
            let device = devices.vxlan(OuterFamily::of(remote))?;
            (tunnel_entry(device, ALL_ZERO, remote), NLM_F_CREATE | NLM_F_APPEND)
        }
        (Key::Tunnel(family, mac), Value::Remote(remote)) => {
            (tunnel_entry(devices.vxlan(family)?, mac, remote), replace)
        }
        (Key::Forward(mac), Value::Port(port)) => {
            (forwarding_entry(devices.port(port)?, mac), replace)
        }
        (Key::Neighbour(address), Value::Mac(mac)) => {
            (neighbour_entry(devices.bridge, address, mac), replace)
        }
        _ => return None,
    };
    Some((RouteNetlinkMessage::NewNeighbour(message), flags))
}

/// The request that removes an entry. `None` if its device is missing, and the entry with it.
pub(crate) fn unset(
    devices: &Devices,
    key: Key,
    value: Value,
) -> Option<(RouteNetlinkMessage, u16)> {
    set(devices, key, value).map(|(message, _)| match message {
        RouteNetlinkMessage::NewNeighbour(message) => {
            (RouteNetlinkMessage::DelNeighbour(message), 0)
        }
        other => (other, 0),
    })
}

/// The device that an entry belongs to, for error texts.
pub(crate) fn port_of(key: Key, value: Value) -> Option<Port> {
    match (key, value) {
        (Key::Copy(remote), _) => Some(Port::Vxlan(OuterFamily::of(remote))),
        (Key::Tunnel(family, _), _) => Some(Port::Vxlan(family)),
        (Key::Forward(_), Value::Port(port)) => Some(port),
        _ => None,
    }
}

/// The entry in words, for error texts.
pub(crate) fn text(key: Key) -> String {
    match key {
        Key::Copy(remote) => format!("broadcast entry for {remote}"),
        Key::Tunnel(_, mac) => format!("tunnel entry {}", mac_text(&mac)),
        Key::Forward(mac) => format!("forwarding entry {}", mac_text(&mac)),
        Key::Neighbour(address) => format!("neighbour entry {address}"),
    }
}

/// The forwarding and neighbour entries of all devices.
pub(crate) struct Entries {
    forwarding: Vec<NeighbourMessage>,
    neighbours: Vec<NeighbourMessage>,
}

impl Kernel {
    /// The Ethernet addresses that a bridge has learned behind its port with this device index, in any order. It leaves
    /// out the port's own address, and addresses that were bound to a port.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn learned_behind(&self, port: u32) -> Result<Vec<[u8; 6]>, KernelError> {
        let entries = self.socket().neighbours(AddressFamily::Bridge).await?;
        let is_learned = |entry: &&NeighbourMessage| {
            entry.header.ifindex == port
                && !entry.header.flags.contains(NeighbourFlags::Own)
                && matches!(entry.header.state, NeighbourState::Reachable | NeighbourState::Stale)
        };
        Ok(entries.iter().filter(is_learned).filter_map(mac_of).collect())
    }
}

impl Socket {
    /// Lists the forwarding and neighbour entries of all devices.
    pub(crate) async fn entries(&self) -> Result<Entries, KernelError> {
        let forwarding = self.neighbours(AddressFamily::Bridge).await?;
        let mut neighbours = self.neighbours(AddressFamily::Inet).await?;
        neighbours.extend(self.neighbours(AddressFamily::Inet6).await?);
        Ok(Entries { forwarding, neighbours })
    }

    /// The entries of one VXLAN device, and remotes beyond the first of one MAC.
    pub(crate) async fn tunnel_entries(
        &self,
        device: u32,
        family: OuterFamily,
    ) -> Result<Tables, KernelError> {
        let mut tables = Tables::default();
        for entry in self.neighbours(AddressFamily::Bridge).await? {
            if entry.header.ifindex == device
                && entry.header.flags.contains(NeighbourFlags::Own)
                && let (Some(mac), Some(remote)) = (mac_of(&entry), address_of(&entry))
            {
                tables.add_tunnel(family, mac, remote);
            }
        }
        Ok(tables)
    }

    /// Binds a container's MAC to its port of the bridge. Neither a neighbour that sends with it as its source, nor a
    /// loop that brings the container's own frames back, draws its traffic then.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(crate) async fn bind_to_port(
        &self,
        port: &Link,
        mac: MacAddress,
    ) -> Result<(), KernelError> {
        if self.is_bound_to_port(port, mac).await {
            return Ok(());
        }
        let entry = RouteNetlinkMessage::NewNeighbour(forwarding_entry(port.index, mac));
        let doing = || format!("bind {} to port {}", mac_text(&mac), port.name);
        self.change(entry, NLM_F_CREATE | NLM_F_REPLACE)
            .await
            .map_err(|error| error.while_doing(doing()))
    }

    async fn is_bound_to_port(&self, port: &Link, mac: MacAddress) -> bool {
        let mut question = NeighbourMessage::default();
        question.header.family = AddressFamily::Bridge;
        question.header.ifindex = port.index;
        question.header.flags = NeighbourFlags::Controller;
        question.attributes = vec![NeighbourAttribute::LinkLayerAddress(mac.to_vec())];
        // An entry that is not there is an error.
        let found = self.get(RouteNetlinkMessage::GetNeighbour(question)).await;
        matches!(found, Ok(Some(RouteNetlinkMessage::NewNeighbour(entry)))
            if entry.header.ifindex == port.index
                && entry.header.state == NeighbourState::Noarp
                && entry.header.flags.contains(NeighbourFlags::Sticky))
    }

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

impl Entries {
    /// Weft's part of them for a bridge. Leaves out entries of others. Those are, on ports, learned entries and the
    /// port's addresses; on the bridge, neighbour entries without Weft's protocol number. On a VXLAN device of ours,
    /// every entry is ours.
    pub(crate) fn tables(&self, devices: &Devices) -> Tables {
        let mut tables = Tables::default();
        for entry in &self.forwarding {
            let index = entry.header.ifindex;
            let (Some(port), Some(mac)) = (devices.port_of(index), mac_of(entry)) else {
                continue;
            };
            if entry.header.flags.contains(NeighbourFlags::Own) {
                if let (Port::Vxlan(family), Some(remote)) = (port, address_of(entry)) {
                    tables.add_tunnel(family, mac, remote);
                }
            } else if entry.header.state == NeighbourState::Noarp {
                tables.entries.insert(Key::Forward(mac), Value::Port(port));
            }
        }
        for entry in &self.neighbours {
            if entry.header.ifindex == devices.bridge
                && is_own_neighbour(entry)
                && let (Some(address), Some(mac)) = (address_of(entry), mac_of(entry))
            {
                tables.entries.insert(Key::Neighbour(address), Value::Mac(mac));
            }
        }
        tables
    }
}

impl Tables {
    fn add_tunnel(&mut self, family: OuterFamily, mac: MacAddress, remote: IpAddr) {
        if mac == ALL_ZERO {
            self.entries.insert(Key::Copy(remote), Value::Present);
            return;
        }
        let first = *self.entries.entry(Key::Tunnel(family, mac)).or_insert(Value::Remote(remote));
        if first != Value::Remote(remote) {
            self.surplus.push((family, mac, remote));
        }
    }
}

/// An entry of a VXLAN device: frames for `mac` go to `remote`.
pub(crate) fn tunnel_entry(device: u32, mac: MacAddress, remote: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = device;
    message.header.state = NeighbourState::Permanent;
    message.header.flags = NeighbourFlags::Own;
    message.attributes = vec![
        NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        NeighbourAttribute::Destination(remote.into()),
    ];
    message
}

/// Sticky: a port that sends with this MAC as its source does not draw the endpoint's traffic to itself.
fn forwarding_entry(port: u32, mac: MacAddress) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = port;
    message.header.state = NeighbourState::Noarp;
    message.header.flags = NeighbourFlags::Controller | NeighbourFlags::Sticky;
    message.attributes = vec![NeighbourAttribute::LinkLayerAddress(mac.to_vec())];
    message
}

fn neighbour_entry(bridge: u32, address: IpAddr, mac: MacAddress) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family_of(address);
    message.header.ifindex = bridge;
    message.header.state = NeighbourState::Permanent;
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![
        NeighbourAttribute::Destination(address.into()),
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

pub(crate) fn address_of(entry: &NeighbourMessage) -> Option<IpAddr> {
    entry.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => Some((*address).into()),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => {
            Some((*address).into())
        }
        // In entries of the bridge family, the length determines the address family.
        NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => {
            let v4 = <[u8; 4]>::try_from(bytes.as_slice()).map(|b| Ipv4Addr::from(b).into());
            let v6 = <[u8; 16]>::try_from(bytes.as_slice()).map(|b| Ipv6Addr::from(b).into());
            v4.or(v6).ok()
        }
        _ => None,
    })
}

pub(crate) fn mac_text(mac: &MacAddress) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
