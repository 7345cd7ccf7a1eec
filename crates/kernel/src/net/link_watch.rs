//! Events of network devices, as they happen.

use std::collections::{HashMap, VecDeque};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkFlags, LinkMessage},
};
use netlink_sys::protocols::NETLINK_ROUTE;

use super::link::Link;
use crate::{
    error::KernelError,
    handle::Kernel,
    netlink::{
        notices::{Notices, is_overrun},
        reader::{Meaning, Message},
        route::read,
        socket::RECEIVE_BUFFER_BYTES,
    },
};

/// The multicast group of link messages (RTMGRP_LINK).
const GROUP_LINK: u32 = 1;

/// A change to a network device of the host's namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkEvent {
    /// A device appeared, or got this name.
    Added {
        /// The device.
        name: String,
    },
    /// The device is gone, was moved to another namespace, or was renamed.
    Removed {
        /// The device.
        name: String,
    },
    /// The device is on and has a carrier.
    Up {
        /// The device.
        name: String,
    },
    /// The device is off or has no carrier.
    Down {
        /// The device.
        name: String,
    },
    /// The device has another MTU.
    MtuChanged {
        /// The device.
        name: String,
        /// The new MTU in bytes.
        mtu: u32,
    },
    /// The device has another Ethernet address, or came into or out of a bridge or datapath.
    Changed {
        /// The device.
        name: String,
    },
}

impl LinkEvent {
    /// The device that it is about.
    #[must_use]
    pub fn device(&self) -> &str {
        match self {
            Self::Added { name }
            | Self::Removed { name }
            | Self::Up { name }
            | Self::Down { name }
            | Self::MtuChanged { name, .. }
            | Self::Changed { name } => name,
        }
    }
}

/// A stream of [`LinkEvent`]s. It buffers no more than the kernel's socket buffer and the differences of one
/// listing. If the kernel had to drop notices, it lists all devices and reports the differences.
pub struct LinkWatch {
    notices: Notices,
    kernel: Kernel,
    known: HashMap<u32, Known>,
    ready: VecDeque<LinkEvent>,
    listed: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    name: String,
    up: bool,
    mtu: u32,
    mac: Vec<u8>,
    master: Option<u32>,
}

impl Kernel {
    /// Watches the devices of the calling thread's namespace, which must be this handle's. Devices
    /// that are there already are known at the first event and not reported as added.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket, or its refusal to list the devices.
    pub async fn watch(&self) -> Result<LinkWatch, KernelError> {
        let failed =
            |source| KernelError::Socket { doing: "watch the network devices".into(), source };
        let notices = Notices::open(NETLINK_ROUTE, GROUP_LINK, RECEIVE_BUFFER_BYTES);
        let mut watch = LinkWatch {
            notices: notices.map_err(failed)?,
            kernel: self.clone(),
            known: HashMap::new(),
            ready: VecDeque::new(),
            listed: true,
        };
        watch.list().await?;
        watch.ready.clear();
        Ok(watch)
    }
}

impl LinkWatch {
    /// The next event. Dropping the future loses nothing.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the socket fails; the watch should be opened again then.
    pub async fn next(&mut self) -> Result<LinkEvent, KernelError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            if !self.listed {
                self.list().await?;
                continue;
            }
            let changes: Vec<Change> = match self.notices.receive().await {
                Ok(datagram) => datagram.messages().filter_map(|it| change(&it)).collect(),
                Err(error) if is_overrun(&error) => {
                    tracing::warn!(
                        "the kernel dropped notices of network devices; listing them again"
                    );
                    vec![Change::Unknown]
                }
                Err(source) => {
                    let doing = "watch the network devices".into();
                    return Err(KernelError::Socket { doing, source });
                }
            };
            changes.into_iter().for_each(|change| self.take(change));
        }
    }

    /// Compares all devices with the known ones.
    async fn list(&mut self) -> Result<(), KernelError> {
        let links = self.kernel.socket().links().await?;
        let gone: Vec<u32> = self
            .known
            .keys()
            .copied()
            .filter(|index| !links.iter().any(|link| link.index == *index))
            .collect();
        for index in gone {
            self.remove(index);
        }
        for link in links {
            self.update(&link);
        }
        self.listed = true;
        Ok(())
    }

    fn take(&mut self, change: Change) {
        match change {
            Change::Is(link) => self.update(&link),
            Change::Gone(index) => self.remove(index),
            Change::Unknown => self.listed = false,
        }
    }

    fn update(&mut self, link: &Link) {
        if link.name.is_empty() {
            return;
        }
        let up = link.flags.contains(LinkFlags::Up | LinkFlags::LowerUp);
        let (name, mac) = (link.name.clone(), link.mac.clone());
        let now = Known { name, up, mtu: link.mtu, mac, master: link.master };
        let name = || link.name.clone();
        let state =
            |up| if up { LinkEvent::Up { name: name() } } else { LinkEvent::Down { name: name() } };
        match self.known.insert(link.index, now.clone()) {
            Some(before) if before.name == now.name => {
                if before.up != up {
                    self.ready.push_back(state(up));
                }
                if before.mtu != now.mtu {
                    self.ready.push_back(LinkEvent::MtuChanged { name: name(), mtu: now.mtu });
                }
                if (&before.mac, before.master) != (&now.mac, now.master) {
                    self.ready.push_back(LinkEvent::Changed { name: name() });
                }
            }
            before => {
                self.ready.extend(before.map(|before| LinkEvent::Removed { name: before.name }));
                self.ready.push_back(LinkEvent::Added { name: name() });
                if up {
                    self.ready.push_back(state(up));
                }
            }
        }
    }

    fn remove(&mut self, index: u32) {
        if let Some(before) = self.known.remove(&index) {
            self.ready.push_back(LinkEvent::Removed { name: before.name });
        }
    }
}

/// A notice about a device.
enum Change {
    /// It is like this now.
    Is(Box<Link>),
    Gone(u32),
    /// A notice could not be read, or was lost: list all devices.
    Unknown,
}

fn change(notice: &Message<'_>) -> Option<Change> {
    match notice.meaning() {
        Meaning::Object => {}
        Meaning::End(Err(_)) => return Some(Change::Unknown),
        _ => return None,
    }
    match read(notice) {
        Ok(RouteNetlinkMessage::NewLink(message)) if is_device(&message) => {
            Some(Change::Is(Box::new(Link::from(message))))
        }
        Ok(RouteNetlinkMessage::DelLink(message)) if is_device(&message) => {
            Some(Change::Gone(message.header.index))
        }
        Ok(_) => None,
        Err(_) => Some(Change::Unknown),
    }
}

/// Whether a message is about a device itself. Messages of the bridge family are about its place in a bridge;
/// a deletion among them only means that it left the bridge.
fn is_device(message: &LinkMessage) -> bool {
    message.header.interface_family == netlink_packet_route::AddressFamily::Unspec
}
