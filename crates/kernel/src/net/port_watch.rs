//! Events of containers' interfaces, in any namespace.
//!
//! A socket in a container's namespace would keep the namespace alive. Instead, one socket on the host
//! receives notices of all namespaces that a veth pair leads to (NETLINK_LISTEN_ALL_NSID, Linux 4.2).

use std::{collections::VecDeque, io, net::IpAddr};

use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage, address::AddressAttribute, link::LinkMessage,
};
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use rustix::io::Errno;

use super::link::Link;
use crate::{error::KernelError, handle::Kernel, netlink::socket::messages};

/// Multicast groups of link and address messages (RTMGRP_LINK, RTMGRP_IPV4_IFADDR,
/// RTMGRP_IPV6_IFADDR).
const GROUPS: u32 = 1 | 0x10 | 0x100;
/// Receive buffer of the watching socket, in bytes.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

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
    socket: TokioSocket,
    ready: VecDeque<PortNotice>,
}

impl Kernel {
    /// Watches the devices of all attachments from the namespace of the calling thread, which must be
    /// this handle's.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no such socket, which needs CAP_NET_BROADCAST.
    pub fn watch_ports(&self) -> Result<PortWatch, KernelError> {
        let open = || -> io::Result<TokioSocket> {
            let mut socket = TokioSocket::new(NETLINK_ROUTE)?;
            socket.socket_ref().set_rx_buf_sz(RECEIVE_BUFFER_BYTES as i32)?;
            socket.socket_ref().set_listen_all_namespaces(true)?;
            socket.socket_mut().bind(&SocketAddr::new(0, GROUPS))?;
            Ok(socket)
        };
        let socket = open().map_err(failed)?;
        Ok(PortWatch { socket, ready: VecDeque::new() })
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
            match self.socket.recv_from_full().await {
                Ok((datagram, _)) => self.ready.extend(messages(&datagram).filter_map(notice)),
                Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                    return Ok(PortNotice::Lost);
                }
                Err(source) => return Err(failed(source)),
            }
        }
    }
}

/// Reads a message about a device of ours, or the removal of an address.
fn notice(bytes: &[u8]) -> Option<PortNotice> {
    let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes).ok()?;
    let (message, is_gone) = match message.into_parts().1 {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message)) => (message, false),
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelLink(message)) => (message, true),
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelAddress(message)) => {
            let local = message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Local(address) => Some(*address),
                _ => None,
            });
            let any = message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Address(address) => Some(*address),
                _ => None,
            });
            return Some(PortNotice::AddressGone { address: local.or(any)? });
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
