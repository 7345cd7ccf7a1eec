//! Telling the network where a container's addresses are.

use weft_io::{
    namespace::{self, Namespace},
    packet::PacketSocket,
};
use weft_packet::announcement::{Announcement, LEN_MAX};

use crate::{
    error::{KernelError, namespace_error},
    handle::Kernel,
    net::attach::AttachSpec,
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
}

fn announce_on(namespace: &Namespace, device: &str, spec: &AttachSpec) -> Result<(), KernelError> {
    let failed = |source| namespace_error(&spec.namespace, source);
    let send = || {
        let socket = PacketSocket::sender().map_err(std::io::Error::other)?;
        let index = socket.index_of(device)?;
        let mut frame = [0; LEN_MAX];
        spec.addresses.iter().try_for_each(|address| {
            let announcement = Announcement { address: address.addr(), mac: spec.mac };
            let len = announcement.write(&mut frame);
            socket.send(&frame[..len], index)
        })
    };
    namespace::run_in(namespace, send).map_err(failed)?.map_err(|source| KernelError::Socket {
        doing: format!("announce addresses on {device}"),
        source,
    })
}
