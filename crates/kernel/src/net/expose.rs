//! The host's own interface in the network: a veth pair with both ends on the host.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{
    addresses::Addresses,
    attach::{AttachSpec, Attached, set_up_network},
    ipv6::{answer_for_own_addresses, ignore_routers, this_host},
    link::Change,
};
use crate::{error::KernelError, handle::Kernel};

impl Kernel {
    /// Gives this host an interface in the network, or restores its missing parts. Makes the pair as
    /// [`Kernel::prepare_pair`] does, and gives `spec.name` its addresses alone: others, but for those of the link, are
    /// removed. The namespace of `spec` is not used.
    ///
    /// # Errors
    /// [`KernelError::AddressInUse`] if another device of this host has one of the addresses,
    /// [`KernelError::Routers`] if the device would take router advertisements;
    /// otherwise as [`Kernel::prepare_pair`].
    pub async fn expose(&self, spec: &AttachSpec) -> Result<Attached, KernelError> {
        self.prepare_pair(spec).await?;
        let _one = self.inner.reconcile.lock().await;
        let end = self.socket().need_link(&spec.name).await?;
        ignore_routers(&self.inner.home, &spec.name, this_host())?;
        answer_for_own_addresses(&self.inner.home, &spec.name)?;
        if let Some(bridge) = &spec.bridge {
            answer_for_own_addresses(&self.inner.home, bridge)?;
        }
        Change::of(&end).up(&end).send(self.socket(), &spec.name).await?;
        let present: Vec<IpNet> = Addresses::read(self.socket()).await?.of(end.index).collect();
        let is_surplus = |net: &IpNet| !spec.addresses.contains(net) && !is_of_the_link(net.addr());
        let surplus: Vec<IpNet> = present.into_iter().filter(is_surplus).collect();
        self.socket().remove_addresses(&end, &surplus).await?;
        set_up_network(spec, &end, &self.inner.home, self.socket()).await
    }

    /// Removes single addresses from the device `name` of this host, as [`Kernel::remove_addresses`] does in a
    /// container. Succeeds if there is no such device.
    ///
    /// # Errors
    /// [`KernelError::NameTaken`] if the device is not ours, or the kernel's refusal.
    pub async fn remove_host_addresses(
        &self,
        name: &str,
        addresses: &[IpNet],
    ) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        match socket.link(name).await? {
            None => Ok(()),
            Some(link) if link.is_own() => socket.remove_addresses(&link, addresses).await,
            Some(link) => Err(link.name_taken("on this host")),
        }
    }
}

fn is_of_the_link(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}
