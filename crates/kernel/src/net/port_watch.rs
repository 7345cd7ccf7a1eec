//! Events of containers' interfaces, in any namespace.
//!
//! A socket in a container's namespace would keep the namespace alive. Instead, one socket on the host
//! receives notices of all namespaces that a veth pair leads to (NETLINK_LISTEN_ALL_NSID, Linux 4.2).

use std::{collections::VecDeque, io, net::IpAddr};

use netlink_packet_route::{AddressFamily, RouteNetlinkMessage, link::LinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{addresses::local_of, link::Link};
use crate::{
    error::KernelError,
    handle::Kernel,
    netlink::{
        notices::{Notices, is_overrun},
        reader::Message,
        route::read,
        socket::RECEIVE_BUFFER_BYTES,
    },
};

/// Multicast groups of link and address messages (RTMGRP_LINK, RTMGRP_IPV4_IFADDR,
/// RTMGRP_IPV6_IFADDR).
const GROUPS: u32 = 1 | 0x10 | 0x100;

/// Something that happened to a device of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortNotice {
    /// A device is like this now.
    Device {
        /// The stable key of its attachment.
        id: String,
        /// Its name.
        name: String,
        /// Its Ethernet address.
        mac: Vec<u8>,
        /// Its MTU in bytes.
        mtu: u32,
        /// It is switched on.
        up: bool,
        /// It is a port of a bridge or datapath.
        has_master: bool,
    },
    /// A device was deleted, or left its namespace.
    Gone {
        /// The stable key of its attachment.
        id: String,
        /// Its name.
        name: String,
    },
    /// An address was taken away somewhere.
    AddressGone {
        /// The address.
        address: IpAddr,
    },
    /// The kernel had to drop notices: anything may have happened.
    Lost,
}

/// A stream of [`PortNotice`]s. It buffers no more than the kernel's socket buffer and the notices of one
/// datagram.
pub struct PortWatch {
    notices: Notices,
    ready: VecDeque<PortNotice>,
}

impl Kernel {
    /// Watches the devices of all attachments from the namespace of the calling thread, which must be
    /// this handle's.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no such socket, which needs CAP_NET_BROADCAST.
    pub fn watch_ports(&self) -> Result<PortWatch, KernelError> {
        let notices = Notices::open(NETLINK_ROUTE, GROUPS, RECEIVE_BUFFER_BYTES).map_err(failed)?;
        notices.listen_to_all_namespaces().map_err(failed)?;
        Ok(PortWatch { notices, ready: VecDeque::new() })
    }
}

impl PortWatch {
    /// The next notice. Dropping the future loses nothing.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the socket fails; the watch should be opened again then.
    pub async fn next(&mut self) -> Result<PortNotice, KernelError> {
        loop {
            if let Some(notice) = self.ready.pop_front() {
                return Ok(notice);
            }
            match self.notices.receive().await {
                Ok(datagram) => {
                    self.ready.extend(datagram.messages().filter_map(|message| notice(&message)));
                }
                Err(error) if is_overrun(&error) => return Ok(PortNotice::Lost),
                Err(source) => return Err(failed(source)),
            }
        }
    }
}

/// Reads a message about a device of ours, or the removal of an address.
fn notice(message: &Message<'_>) -> Option<PortNotice> {
    let (message, is_gone) = match read(message).ok()? {
        RouteNetlinkMessage::NewLink(message) => (message, false),
        RouteNetlinkMessage::DelLink(message) => (message, true),
        RouteNetlinkMessage::DelAddress(message) => {
            return Some(PortNotice::AddressGone { address: local_of(&message)? });
        }
        _ => return None,
    };
    of_device(message, is_gone)
}

fn of_device(message: LinkMessage, is_gone: bool) -> Option<PortNotice> {
    // Messages of the bridge family are about its place in a bridge.
    if message.header.interface_family != AddressFamily::Unspec {
        return None;
    }
    let link = Link::from(message);
    let id = link.attachment()?.to_owned();
    if is_gone {
        return Some(PortNotice::Gone { id, name: link.name });
    }
    Some(PortNotice::Device {
        id,
        up: link.is_up(),
        has_master: link.master.is_some(),
        name: link.name,
        mac: link.mac,
        mtu: link.mtu,
    })
}

fn failed(source: io::Error) -> KernelError {
    KernelError::Socket { doing: "watch the interfaces of containers".into(), source }
}
