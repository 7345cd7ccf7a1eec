//! Telling the network where a container's addresses are.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_io::{
    namespace::{self, Namespace},
    packet::PacketSocket,
};
use weft_packet::announcement::{Announcement, LEN_MAX};

use crate::{
    error::{KernelError, namespace_error},
    handle::Kernel,
    net::{attach::AttachSpec, ipv6::this_host},
};

impl Kernel {
    /// Announces each of the container's addresses from its interface, so that other hosts update their
    /// caches: a gratuitous ARP request or an unsolicited neighbour advertisement.
    ///
    /// # Errors
    /// A missing namespace or interface, or the kernel's refusal.
    pub async fn announce(&self, spec: &AttachSpec) -> Result<(), KernelError> {
        let (place, device) = (spec.namespace.clone(), spec.name.clone());
        let all = announcements(spec);
        // The kernel takes some 20 ms to close a packet socket.
        let sent = tokio::task::spawn_blocking(move || {
            let at = |source| namespace_error(&place, source);
            let namespace = Namespace::open(&place).map_err(at)?;
            let send = || send(&PacketSocket::sender().map_err(io::Error::other)?, &device, &all);
            namespace::run_in(&namespace, send)
                .map_err(at)?
                .map_err(|source| failed(&device, source))
        });
        sent.await.unwrap_or_else(|ended| Err(failed(&spec.name, io::Error::other(ended))))
    }

    /// Announces each of the container's addresses from the switch's own device, for a container whose namespace
    /// is not known.
    ///
    /// # Errors
    /// A missing device, or the kernel's refusal.
    pub fn announce_from_switch(&self, switch: &str, spec: &AttachSpec) -> Result<(), KernelError> {
        self.announce_at_home(switch, &announcements(spec))
    }

    /// Announces addresses that a device of this host answers for ([`Kernel::ensure_clients`]), as its own.
    ///
    /// # Errors
    /// A missing device, or the kernel's refusal.
    pub async fn announce_clients(
        &self,
        device: &str,
        addresses: &[IpAddr],
    ) -> Result<(), KernelError> {
        let missing = || KernelError::LinkMissing { name: device.to_owned() };
        let mac = self.mac_of(device).await?.ok_or_else(missing)?;
        let all: Vec<Announcement> =
            addresses.iter().map(|address| Announcement { address: *address, mac }).collect();
        self.announce_at_home(device, &all)
    }

    /// Sends announcements on a device of this host, by a socket that stays open.
    fn announce_at_home(&self, device: &str, all: &[Announcement]) -> Result<(), KernelError> {
        let inner = &self.inner;
        let socket = match inner.announcer.get() {
            Some(socket) => socket,
            None => {
                let open = || PacketSocket::sender().map_err(io::Error::other);
                let opened = namespace::run_in(&inner.home, open);
                let opened = opened.map_err(|source| namespace_error(this_host(), source))?;
                let opened = opened.map_err(|source| failed(device, source))?;
                inner.announcer.get_or_init(|| opened)
            }
        };
        send(socket, device, all).map_err(|source| failed(device, source))
    }
}

fn announcements(spec: &AttachSpec) -> Vec<Announcement> {
    let addresses = spec.addresses.iter().map(IpNet::addr);
    addresses.map(|address| Announcement { address, mac: spec.mac }).collect()
}

fn send(socket: &PacketSocket, device: &str, all: &[Announcement]) -> io::Result<()> {
    let index = socket.index_of(device)?;
    let mut frame = [0; LEN_MAX];
    all.iter().try_for_each(|announcement| {
        let len = announcement.write(&mut frame);
        socket.send(&frame[..len], index)
    })
}

fn failed(device: &str, source: io::Error) -> KernelError {
    KernelError::Socket { doing: format!("announce addresses on {device}"), source }
}
