//! Veth pairs whose container end another program moves into the container and sets up, and inspection of all.

use std::path::Path;

use ipnet::IpNet;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage,
};

use super::{
    addresses::Addresses,
    attach::{AttachSpec, is_pair, settings},
    link::{DEVICE_GROUP, Link, check_mtu, check_name},
};
use crate::{error::KernelError, handle::Kernel, netlink::route::Socket};

/// The present state of an attachment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inspected {
    /// Whether its interface is in the container's namespace, up, and plugged into the switch.
    pub is_whole: bool,
    /// Its addresses, and whether each is on the interface.
    pub addresses: Vec<(IpNet, bool)>,
}

impl Kernel {
    /// Makes a veth pair with both ends on this host, for a container runtime that moves `spec.name` into the
    /// container. If the pair stands already, restores the host's end. Makes the pair anew if the end for the
    /// container is not on this host any more. Addresses and the namespace of `spec` are not used.
    ///
    /// # Errors
    /// [`KernelError::NameTaken`] if another device on this host has one of the names,
    /// [`KernelError::AttachmentTaken`] if another attachment has the pair, or the kernel's refusal.
    pub async fn prepare_pair(&self, spec: &AttachSpec) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        check_name(&spec.host_name)?;
        check_name(&spec.name)?;
        check_mtu(spec.mtu)?;
        let socket = self.socket();
        // Both ends have the attachment's key; the one for the container has its address too.
        let is_end = |link: &Link, is_containers: bool| {
            link.kind == Some(InfoKind::Veth)
                && link.attachment() == Some(spec.id.as_str())
                && (link.mac == spec.mac) == is_containers
        };
        socket.restore_name(&spec.host_name, |link| is_end(link, false)).await?;
        socket.restore_name(&spec.name, |link| is_end(link, true)).await?;
        let (host, end) = match self.find_prepared(spec).await? {
            Some(pair) => pair,
            None => {
                socket.create_link(new_pair(spec), &spec.host_name).await?;
                (socket.need_link(&spec.host_name).await?, socket.need_link(&spec.name).await?)
            }
        };
        self.put_into_switch(spec, &host).await?;
        let segs = spec.gso_max_segs.unwrap_or_default();
        let segs_differ = spec.gso_max_segs.is_some() && spec.gso_max_segs != end.gso_max_segs;
        settings(spec, &end)
            .when(end.mac != spec.mac, LinkAttribute::Address(spec.mac.to_vec()))
            .when(segs_differ, LinkAttribute::GsoMaxSegs(segs))
            .send(socket, &spec.name)
            .await
    }

    /// Restores the host's end of a pair made by [`Kernel::prepare_pair`].
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if it is gone, with its container or by another program's doing;
    /// otherwise as [`Kernel::prepare_pair`].
    pub async fn restore_host_end(&self, spec: &AttachSpec) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let is_host_end = |link: &Link| {
            link.kind == Some(InfoKind::Veth)
                && link.name != spec.name
                && link.attachment() == Some(spec.id.as_str())
        };
        self.socket().restore_name(&spec.host_name, is_host_end).await?;
        let host = self.socket().need_link(&spec.host_name).await?;
        self.check_host_end(spec, &host)?;
        self.put_into_switch(spec, &host).await
    }

    /// Inspects a container's attachment, and changes nothing.
    ///
    /// # Errors
    /// As [`Kernel::attach`] for the namespace, or the kernel's refusal.
    pub async fn inspect_attachment(&self, spec: &AttachSpec) -> Result<Inspected, KernelError> {
        let inside = self.inside(spec)?;
        let Some(end) = inside.link(&spec.name).await?.filter(Link::is_own) else {
            let addresses = spec.addresses.iter().map(|address| (*address, false)).collect();
            return Ok(Inspected { is_whole: false, addresses });
        };
        let host = self.socket().link(&spec.host_name).await?;
        let is_plugged_in = host.is_some_and(|host| host.is_up() && host.master.is_some());
        let present = Addresses::read(&inside).await?;
        let has = |address: &IpNet| (*address, present.has(end.index, address));
        let addresses = spec.addresses.iter().map(has).collect();
        Ok(Inspected { is_whole: end.is_up() && is_plugged_in, addresses })
    }

    /// The Ethernet address of a device on this host; `None` if there is no such device.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn mac_of(&self, device: &str) -> Result<Option<[u8; 6]>, KernelError> {
        let link = self.socket().link(device).await?;
        Ok(link.and_then(|link| link.mac.try_into().ok()))
    }

    /// Removes Weft's veth pair from a namespace, by the name that its end has there. False if the namespace has
    /// no such device, or another program's.
    ///
    /// # Errors
    /// [`KernelError::NamespaceIsHost`] or [`KernelError::Namespace`] for the namespace, or the kernel's refusal.
    pub async fn remove_container_end(
        &self,
        namespace: &Path,
        name: &str,
    ) -> Result<bool, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let open = self.foreign_namespace(namespace)?;
        let inside = self.socket_in(&open, namespace)?;
        match inside.link(name).await?.filter(Link::is_own) {
            Some(end) => inside.delete_link(&end).await.map(|()| true),
            None => Ok(false),
        }
    }

    /// The pair of an attachment, if both ends are on this host. Removes a pair whose other end is elsewhere.
    async fn find_prepared(&self, spec: &AttachSpec) -> Result<Option<(Link, Link)>, KernelError> {
        let socket = self.socket();
        let Some(host) = socket.link(&spec.host_name).await? else {
            return free(socket, &spec.name).await.map(|()| None);
        };
        self.check_host_end(spec, &host)?;
        match socket.link(&spec.name).await? {
            Some(end) if is_pair(&host, &end) => Ok(Some((host, end))),
            _ => {
                socket.delete_link(&host).await?;
                free(socket, &spec.name).await.map(|()| None)
            }
        }
    }

    async fn put_into_switch(&self, spec: &AttachSpec, host: &Link) -> Result<(), KernelError> {
        let bridge = match &spec.bridge {
            Some(name) => Some(self.own_bridge(name).await?),
            None => None,
        };
        self.set_up_host_end(spec, host, bridge.as_ref(), spec.mac).await
    }
}

/// Refuses a name that another device has.
async fn free(socket: &Socket, name: &str) -> Result<(), KernelError> {
    match socket.link(name).await? {
        Some(other) => Err(other.name_taken("on this host")),
        None => Ok(()),
    }
}

fn new_pair(spec: &AttachSpec) -> LinkMessage {
    let half = |name: &str| {
        let mut half = LinkMessage::default();
        half.attributes = vec![
            LinkAttribute::IfName(name.to_owned()),
            LinkAttribute::Mtu(spec.mtu),
            LinkAttribute::Group(DEVICE_GROUP),
        ];
        half
    };
    let mut end = half(&spec.name);
    end.attributes.push(LinkAttribute::Address(spec.mac.to_vec()));
    let mut host = half(&spec.host_name);
    host.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(end))),
    ]));
    host
}
