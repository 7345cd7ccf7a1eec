//! Telling the network where a container's addresses are.

use std::{net::IpAddr, path::Path};

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
    pub fn announce(&self, spec: &AttachSpec) -> Result<(), KernelError> {
        let namespace = Namespace::open(&spec.namespace)
            .map_err(|source| namespace_error(&spec.namespace, source))?;
        announce_on(&namespace, &spec.name, spec)
    }

    /// Announces each of the container's addresses from the switch's own device, for a container whose namespace
    /// is not known.
    ///
    /// # Errors
    /// A missing device, or the kernel's refusal.
    pub fn announce_from_switch(&self, switch: &str, spec: &AttachSpec) -> Result<(), KernelError> {
        announce_on(&self.inner.home, switch, spec)
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
        let all = addresses.iter().map(|address| Announcement { address: *address, mac });
        send(&self.inner.home, this_host(), device, all)
    }
}

fn announce_on(namespace: &Namespace, device: &str, spec: &AttachSpec) -> Result<(), KernelError> {
    let addresses = spec.addresses.iter().map(IpNet::addr);
    let all = addresses.map(|address| Announcement { address, mac: spec.mac });
    send(namespace, &spec.namespace, device, all)
}

/// Sends announcements on a device of a namespace, which `place` names.
fn send(
    namespace: &Namespace,
    place: &Path,
    device: &str,
    mut all: impl Iterator<Item = Announcement> + Send,
) -> Result<(), KernelError> {
    let failed = |source| namespace_error(place, source);
    let send = || {
        let socket = PacketSocket::sender().map_err(std::io::Error::other)?;
        let index = socket.index_of(device)?;
        let mut frame = [0; LEN_MAX];
        all.try_for_each(|announcement| {
            let len = announcement.write(&mut frame);
            socket.send(&frame[..len], index)
        })
    };
    namespace::run_in(namespace, send).map_err(failed)?.map_err(|source| KernelError::Socket {
        doing: format!("announce addresses on {device}"),
        source,
    })
}
