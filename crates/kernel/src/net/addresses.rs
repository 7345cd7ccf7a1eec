//! IP addresses of devices.

use std::{collections::HashMap, net::IpAddr};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage},
};
use rustix::io::Errno;

use super::link::Link;
use crate::{error::KernelError, handle::Kernel, netlink::route::Socket};

/// The addresses of a namespace, by device index.
pub(crate) struct Addresses(HashMap<u32, Vec<IpNet>>);

impl Addresses {
    pub(crate) async fn read(socket: &Socket) -> Result<Self, KernelError> {
        let found = socket
            .dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))
            .await
            .map_err(|error| error.while_doing("list the addresses"))?;
        let mut table: HashMap<u32, Vec<IpNet>> = HashMap::new();
        for message in found {
            let RouteNetlinkMessage::NewAddress(message) = message else { continue };
            if let Some(address) = address_of(&message) {
                table.entry(message.header.index).or_default().push(address);
            }
        }
        Ok(Self(table))
    }

    pub(crate) fn of(&self, index: u32) -> impl Iterator<Item = IpNet> + '_ {
        self.0.get(&index).into_iter().flatten().copied()
    }

    pub(crate) fn has(&self, index: u32, address: &IpNet) -> bool {
        self.of(index).any(|present| present == *address)
    }

    /// A device other than `index` that has the address.
    pub(crate) fn elsewhere(&self, index: u32, address: IpAddr) -> Option<u32> {
        let others = self.0.iter().filter(|(other, _)| **other != index);
        others
            .filter(|(_, list)| list.iter().any(|present| present.addr() == address))
            .map(|(other, _)| *other)
            .min()
    }
}

/// The local address with its prefix length.
pub(crate) fn address_of(message: &AddressMessage) -> Option<IpNet> {
    IpNet::new(local_of(message)?, message.header.prefix_len).ok()
}

/// The local address: IFA_LOCAL where there is one, else IFA_ADDRESS.
pub(crate) fn local_of(message: &AddressMessage) -> Option<IpAddr> {
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let any = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Address(address) => Some(*address),
        _ => None,
    });
    local.or(any)
}

/// A device with its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAddresses {
    /// Its index.
    pub index: u32,
    /// Whether it is switched on.
    pub is_up: bool,
    /// Its addresses, those of the link included.
    pub addresses: Vec<IpAddr>,
}

impl Kernel {
    /// A device of Weft's on the host by name; `None`: there is none.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn device_addresses(
        &self,
        name: &str,
    ) -> Result<Option<DeviceAddresses>, KernelError> {
        let socket = self.socket();
        let Some(link) = socket.link(name).await?.filter(Link::is_own) else { return Ok(None) };
        let present = Addresses::read(socket).await?;
        let addresses = present.of(link.index).map(|net| net.addr()).collect();
        Ok(Some(DeviceAddresses { index: link.index, is_up: link.is_up(), addresses }))
    }
}

impl Socket {
    /// Adds an address to a device, or succeeds if it is already there. IPv6 skips duplicate address
    /// detection, since the network assigns each address once.
    pub(crate) async fn add_address(&self, link: &Link, address: IpNet) -> Result<(), KernelError> {
        let mut message = address_message(link.index, address);
        if address.addr().is_ipv6() {
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        let request = RouteNetlinkMessage::NewAddress(message);
        match self.change(request, NLM_F_CREATE | NLM_F_EXCL).await {
            Err(error) if !error.is(Errno::EXIST) => {
                Err(error.while_doing(format!("add address {address} to device {}", link.name)))
            }
            _ => Ok(()),
        }
    }

    /// Removes addresses from a device; those that are already gone are ignored. The other addresses stay: the
    /// kernel drops secondary addresses with their primary, and they are added again.
    pub(crate) async fn remove_addresses(
        &self,
        link: &Link,
        addresses: &[IpNet],
    ) -> Result<(), KernelError> {
        let before: Vec<IpNet> = Addresses::read(self).await?.of(link.index).collect();
        for address in addresses.iter().filter(|address| before.contains(address)) {
            self.remove_address(link.index, *address).await?;
        }
        let after = Addresses::read(self).await?;
        for kept in before.iter().filter(|address| !addresses.contains(address)) {
            if !after.has(link.index, kept) {
                self.add_address(link, *kept).await?;
            }
        }
        Ok(())
    }

    /// Removes an address from a device, or succeeds if it is already gone.
    pub(crate) async fn remove_address(
        &self,
        index: u32,
        address: IpNet,
    ) -> Result<(), KernelError> {
        let request = RouteNetlinkMessage::DelAddress(address_message(index, address));
        match self.change(request, 0).await {
            Err(error) if !error.is(Errno::ADDRNOTAVAIL) => {
                Err(error.while_doing(format!("remove address {address}")))
            }
            _ => Ok(()),
        }
    }
}

fn address_message(index: u32, address: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family_of(address.addr());
    message.header.prefix_len = address.prefix_len();
    message.header.index = index;
    message.attributes =
        vec![AddressAttribute::Local(address.addr()), AddressAttribute::Address(address.addr())];
    message
}

pub(crate) fn family_of(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}
