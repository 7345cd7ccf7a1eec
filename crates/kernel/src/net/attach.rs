//! Plugging a container (or any network namespace) into the bridge.

use std::{
    net::IpAddr,
    os::fd::{AsFd, AsRawFd},
    path::{Path, PathBuf},
};

use ipnet::IpNet;
use netlink_packet_route::link::{
    InfoBridgePort, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage,
};
use weft_io::namespace::Namespace;

use super::{
    addresses::Addresses,
    belongings::Belongings,
    ipv6::{self, NoIpv6, ignore_routers, this_host},
    link::{Change, DEVICE_GROUP, Link, MTU_MIN, alias_of, check_mtu, check_name},
};
use crate::{
    error::{KernelError, namespace_error},
    handle::Kernel,
    netlink::route::Socket,
};

/// The smallest MTU that a container's device can be given, in bytes.
pub const CONTAINER_MTU_MIN: u32 = MTU_MIN;
/// The veth end in a container with a direct port. It has no address: frames that arrive by it belong to the
/// interface.
pub const DIRECT_LOCAL_NAME: &str = "weft0-local";

/// The wanted network configuration of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachSpec {
    /// The stable key of the attachment, such as `docker:` and the container's id.
    pub id: String,
    /// The container's network namespace: `/run/netns/NAME` or `/proc/PID/ns/net`.
    pub namespace: PathBuf,
    /// Device and inode of the intended namespace, because the path may lead to another one by now. `None`
    /// accepts any namespace at the path.
    pub identity: Option<(u64, u64)>,
    /// The veth end on the host, 1 to 15 bytes, one per attachment.
    pub host_name: String,
    /// The veth end in the container, usually `weft0`.
    pub name: String,
    /// MAC address of the container's end.
    pub mac: [u8; 6],
    /// Addresses with the network's prefix length, so that the whole network is on link.
    pub addresses: Vec<IpNet>,
    /// MTU of both ends in bytes.
    pub mtu: u32,
    /// Most segments of a super-packet that the container may send; `None` leaves the kernel's limit.
    pub gso_max_segs: Option<u32>,
    /// Switch IPv6 on for the container's device where the container has it off and there are IPv6
    /// addresses; else the device does without them.
    pub enable_ipv6: bool,
    /// The default routes lead to these addresses, at most one of each family. Each is in the network of one of
    /// `addresses`.
    pub gateways: Vec<IpAddr>,
    /// Route multicast (224.0.0.0/4, and ff00::/8 if there is an IPv6 address) into the network.
    pub multicast_route: bool,
    /// Nothing passes between this port and other isolated ports of the bridge.
    pub isolated: bool,
    /// The bridge, made by [`Kernel::ensure_bridge`]; `None` leaves the host's end to the ODP
    /// switch, which makes it a port ([`crate::odp::OdpSwitch::add_port`]).
    pub bridge: Option<String>,
}

/// The result of attaching a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attached {
    /// Why the container has no IPv6 address. `Ok` also if the spec has none.
    pub ipv6: Result<(), NoIpv6>,
}

/// An attachment as found in the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attachment {
    /// The veth end on the host.
    pub host_name: String,
    /// The stable key it was attached under; `None` if the daemon died before it was written.
    pub id: Option<String>,
}

/// Both ends of a container's attachment.
pub(crate) struct Place {
    pub(crate) bridge: Option<Link>,
    pub(crate) namespace: Namespace,
    /// Asks the kernel from inside the namespace.
    pub(crate) inside: Socket,
}

impl Place {
    /// Gives the container's interface its addresses and routes.
    pub(crate) async fn set_up_network(
        &self,
        spec: &AttachSpec,
        device: &Link,
    ) -> Result<Attached, KernelError> {
        set_up_network(spec, device, &self.namespace, &self.inside).await
    }
}

impl Kernel {
    /// Gives a container its device, addresses and routes, or restores the missing ones. Other addresses and
    /// routes stay. Loopback and the rest of the namespace are not touched; nor is IPv6 where it is off,
    /// unless the specification says otherwise.
    ///
    /// # Errors
    /// [`KernelError::NamespaceGone`], [`KernelError::NamespaceReplaced`] and
    /// [`KernelError::NamespaceIsHost`] for the namespace,
    /// [`KernelError::Routers`] if its device would take router advertisements,
    /// [`KernelError::NameTaken`] if another device there or on the host has the name,
    /// [`KernelError::AttachmentTaken`] if another attachment has `host_name`,
    /// [`KernelError::AddressInUse`] if another device there has one of the addresses.
    pub async fn attach(&self, spec: &AttachSpec) -> Result<Attached, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let place = self.place_of(spec).await?;
        let Place { bridge, namespace, inside } = &place;
        let before = Belongings::of(inside, &spec.name, &spec.addresses).await?;
        let (host, end) = match self.find_pair(spec, inside).await? {
            Some(pair) => pair,
            None => self.create_pair(spec, namespace, inside).await?,
        };
        self.set_up_host_end(spec, &host, bridge.as_ref(), spec.mac).await?;
        ignore_routers(namespace, &spec.name, &spec.namespace)?;
        self.set_up_container_end(spec, &end, inside).await?;
        let attached = place.set_up_network(spec, &end).await?;
        before.give_back(inside, &end).await;
        Ok(attached)
    }

    /// Checks the specification and locates its namespaces.
    pub(crate) async fn place_of(&self, spec: &AttachSpec) -> Result<Place, KernelError> {
        check_name(&spec.host_name)?;
        check_name(&spec.name)?;
        check_mtu(spec.mtu)?;
        let bridge = match &spec.bridge {
            Some(name) => Some(self.own_bridge(name).await?),
            None => None,
        };
        let namespace = self.namespace_of(spec)?;
        let inside = self.socket_in(&namespace, &spec.namespace)?;
        let is_ours = |link: &Link| link.attachment() == Some(spec.id.as_str());
        let is_tap = |link: &Link| link.kind == Some(InfoKind::Tun) && is_ours(link);
        // Beside a TAP device the veth end is the way to the switch.
        let is_veth = |link: &Link| {
            link.kind == Some(InfoKind::Veth) && link.name != DIRECT_LOCAL_NAME && is_ours(link)
        };
        inside.restore_name(&spec.name, is_tap).await?;
        inside.restore_name(&spec.name, is_veth).await?;
        Ok(Place { bridge, namespace, inside })
    }

    /// Asks the kernel from inside a container.
    pub(crate) fn inside(&self, spec: &AttachSpec) -> Result<Socket, KernelError> {
        self.socket_in(&self.namespace_of(spec)?, &spec.namespace)
    }

    /// Opens the container's namespace and checks that it is the intended one.
    fn namespace_of(&self, spec: &AttachSpec) -> Result<Namespace, KernelError> {
        let namespace = self.foreign_namespace(&spec.namespace)?;
        let found = namespace.identity();
        let found = found.map_err(|source| namespace_error(&spec.namespace, source))?;
        match spec.identity {
            Some(wanted) if wanted != found => {
                Err(KernelError::NamespaceReplaced { path: spec.namespace.clone() })
            }
            _ => Ok(namespace),
        }
    }

    /// Takes a container's device away: both ends, with their addresses and routes. False if there
    /// was none.
    ///
    /// # Errors
    /// [`KernelError::NameTaken`] if the device is not ours (it stays), or the kernel's refusal.
    pub async fn detach(&self, host_name: &str) -> Result<bool, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let Some(link) = socket.link(host_name).await? else { return Ok(false) };
        if !link.is_own() {
            return Err(link.name_taken("on this host"));
        }
        socket.delete_link(&link).await?;
        Ok(true)
    }

    /// Removes single addresses from the device `name` in a namespace; addresses that are already gone are
    /// ignored. The other addresses stay (the kernel drops secondary addresses with their primary; they are
    /// added again).
    ///
    /// # Errors
    /// [`KernelError::NamespaceGone`], [`KernelError::LinkMissing`],
    /// [`KernelError::NameTaken`] if the device is not ours, or the kernel's refusal.
    pub async fn remove_addresses(
        &self,
        namespace: &Path,
        name: &str,
        addresses: &[IpNet],
    ) -> Result<(), KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let open = self.foreign_namespace(namespace)?;
        let inside = self.socket_in(&open, namespace)?;
        let link = inside.need_link(name).await?;
        if !link.is_own() {
            return Err(link.name_taken(format!("in {}", namespace.display())));
        }
        inside.remove_addresses(&link, addresses).await
    }

    /// The attachments that have a port in the bridge or datapath, by host device name.
    ///
    /// # Errors
    /// [`KernelError::LinkMissing`] if the bridge is not there, or the kernel's refusal.
    pub async fn attachments(&self, bridge: &str) -> Result<Vec<Attachment>, KernelError> {
        let bridge = self.own_switch(bridge).await?;
        let links = self.socket().links().await?;
        let mut found: Vec<Attachment> = links
            .into_iter()
            .filter(|link| {
                link.is_own()
                    && link.kind == Some(InfoKind::Veth)
                    && link.master == Some(bridge.index)
            })
            .map(|link| Attachment {
                id: link.attachment().map(str::to_owned),
                host_name: link.name,
            })
            .collect();
        found.sort();
        Ok(found)
    }

    /// Opens a namespace that is not the host's own.
    pub(crate) fn foreign_namespace(&self, path: &Path) -> Result<Namespace, KernelError> {
        let failed = |source| namespace_error(path, source);
        let namespace = Namespace::open(path).map_err(failed)?;
        let same =
            namespace.identity().map_err(failed)? == self.inner.home.identity().map_err(failed)?;
        if same {
            return Err(KernelError::NamespaceIsHost { path: path.to_owned() });
        }
        Ok(namespace)
    }

    /// The veth pair of this attachment, if both ends are where they should be. A half or stale
    /// pair of ours is deleted.
    pub(crate) async fn find_pair(
        &self,
        spec: &AttachSpec,
        inside: &Socket,
    ) -> Result<Option<(Link, Link)>, KernelError> {
        let socket = self.socket();
        let is_host_end = |link: &Link| {
            link.kind == Some(InfoKind::Veth) && link.attachment() == Some(spec.id.as_str())
        };
        let end = inside.link(&spec.name).await?;
        // A new container has no pair: its attach does not wait until the kernel has listed all others.
        if end.is_some() {
            socket.restore_name(&spec.host_name, is_host_end).await?;
        }
        let host = socket.link(&spec.host_name).await?;
        if let Some(host) = &host {
            self.check_host_end(spec, host)?;
        }
        match (host, end) {
            (Some(host), Some(end)) if is_pair(&host, &end) => return Ok(Some((host, end))),
            (host, end) => {
                if let Some(end) = end.as_ref().filter(|end| is_direct(&spec.id, end)) {
                    inside.delete_link(end).await?;
                } else if let Some(end) = end {
                    let stale = self.stale_host_end(spec, &end).await?.ok_or_else(|| {
                        end.name_taken(format!("in {}", spec.namespace.display()))
                    })?;
                    socket.delete_link(&stale).await?;
                }
                if let Some(host) = host {
                    socket.delete_link(&host).await?;
                }
            }
        }
        Ok(None)
    }

    pub(crate) fn check_host_end(&self, spec: &AttachSpec, host: &Link) -> Result<(), KernelError> {
        if !host.is_own() || host.kind != Some(InfoKind::Veth) {
            return Err(host.name_taken("on this host"));
        }
        match host.attachment() {
            Some(holder) if holder != spec.id => Err(KernelError::AttachmentTaken {
                name: host.name.clone(),
                holder: holder.to_owned(),
                wanted: spec.id.clone(),
            }),
            _ => Ok(()),
        }
    }

    /// The host end, under another name, of a container end that an earlier run of ours made for the
    /// same attachment.
    async fn stale_host_end(
        &self,
        spec: &AttachSpec,
        end: &Link,
    ) -> Result<Option<Link>, KernelError> {
        let links = self.socket().links().await?;
        Ok(links.into_iter().find(|host| {
            is_pair(host, end)
                && host.name != spec.host_name
                && host.attachment().is_none_or(|id| id == spec.id)
        }))
    }

    pub(crate) async fn create_pair(
        &self,
        spec: &AttachSpec,
        namespace: &Namespace,
        inside: &Socket,
    ) -> Result<(Link, Link), KernelError> {
        let socket = self.socket();
        socket.create_link(new_pair(spec, namespace), &spec.host_name).await?;
        Ok((socket.need_link(&spec.host_name).await?, inside.need_link(&spec.name).await?))
    }

    /// `mac` is the container's address.
    pub(crate) async fn set_up_host_end(
        &self,
        spec: &AttachSpec,
        host: &Link,
        bridge: Option<&Link>,
        mac: [u8; 6],
    ) -> Result<(), KernelError> {
        let socket = self.socket();
        if let Some(bridge) = bridge {
            self.join(host, bridge).await?;
            socket.bind_to_port(host, mac).await?;
            // A port that somebody isolated by hand stays so.
            if spec.isolated {
                let port = socket.need_link(&spec.host_name).await?;
                self.set_port(&port, vec![InfoBridgePort::Isolated(true)]).await?;
            }
        }
        socket.disable_autoconfiguration(host).await?;
        ignore_routers(&self.inner.home, &spec.host_name, this_host())?;
        settings(spec, host).send(socket, &spec.host_name).await?;
        Change::of(host).up(host).send(socket, &spec.host_name).await
    }

    pub(crate) async fn set_up_container_end(
        &self,
        spec: &AttachSpec,
        end: &Link,
        inside: &Socket,
    ) -> Result<(), KernelError> {
        let segs = spec.gso_max_segs.unwrap_or_default();
        let segs_differ = spec.gso_max_segs.is_some() && spec.gso_max_segs != end.gso_max_segs;
        settings(spec, end)
            .when(end.mac != spec.mac, LinkAttribute::Address(spec.mac.to_vec()))
            .when(segs_differ, LinkAttribute::GsoMaxSegs(segs))
            .send(inside, &spec.name)
            .await?;
        Change::of(end).up(end).send(inside, &spec.name).await
    }
}

/// The settings that both ends of the pair share.
pub(crate) fn settings(spec: &AttachSpec, link: &Link) -> Change {
    let alias = alias_of(&spec.id);
    Change::of(link)
        .when(link.group != DEVICE_GROUP, LinkAttribute::Group(DEVICE_GROUP))
        .when(link.mtu != spec.mtu, LinkAttribute::Mtu(spec.mtu))
        .when(link.alias.as_deref() != Some(&alias), LinkAttribute::IfAlias(alias))
}

/// Whether this is the TAP device of a direct port that the attachment had.
pub(crate) fn is_direct(attachment: &str, end: &Link) -> bool {
    end.kind == Some(InfoKind::Tun)
        && end.is_own()
        && end.attachment().is_none_or(|id| id == attachment)
}

/// Whether these are the two ends of one veth pair of ours. Indices alone could meet by chance,
/// since each namespace counts its own.
pub(crate) fn is_pair(host: &Link, end: &Link) -> bool {
    let same_attachment = match (host.attachment(), end.attachment()) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    };
    host.kind == Some(InfoKind::Veth)
        && end.kind == Some(InfoKind::Veth)
        && host.is_own()
        && end.is_own()
        && host.peer == Some(end.index)
        && end.peer == Some(host.index)
        && same_attachment
}

/// A veth pair with one end in the container from the first moment, under its final name.
fn new_pair(spec: &AttachSpec, namespace: &Namespace) -> LinkMessage {
    let mut end = LinkMessage::default();
    end.attributes = vec![
        LinkAttribute::IfName(spec.name.clone()),
        LinkAttribute::Address(spec.mac.to_vec()),
        LinkAttribute::Mtu(spec.mtu),
        LinkAttribute::Group(DEVICE_GROUP),
        LinkAttribute::NetNsFd(namespace.as_fd().as_raw_fd()),
    ];
    if let Some(segs) = spec.gso_max_segs {
        end.attributes.push(LinkAttribute::GsoMaxSegs(segs));
    }
    let mut host = LinkMessage::default();
    host.attributes = vec![
        LinkAttribute::IfName(spec.host_name.clone()),
        LinkAttribute::Mtu(spec.mtu),
        LinkAttribute::Group(DEVICE_GROUP),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(end))),
        ]),
    ];
    host
}

/// Gives an interface its addresses and routes. `inside` asks the kernel from inside its namespace.
pub(super) async fn set_up_network(
    spec: &AttachSpec,
    device: &Link,
    namespace: &Namespace,
    inside: &Socket,
) -> Result<Attached, KernelError> {
    let wants_ipv6 = spec.addresses.iter().any(|address| address.addr().is_ipv6());
    let ipv6 = if wants_ipv6 { switch_ipv6_on(spec, namespace)? } else { Ok(()) };
    set_up_addresses(spec, device, inside, ipv6.is_ok()).await?;
    let is_there = |gateway: &IpAddr| gateway.is_ipv4() || ipv6.is_ok();
    let gateways: Vec<IpAddr> = spec.gateways.iter().copied().filter(is_there).collect();
    if !gateways.is_empty() {
        inside.set_default_routes(device, &gateways).await?;
    }
    if spec.multicast_route {
        let ipv6 = wants_ipv6 && ipv6.is_ok();
        inside.ensure_multicast_routes(device, ipv6).await?;
    }
    Ok(Attached { ipv6 })
}

/// Whether an interface has IPv6, after it was switched on if that is wanted.
fn switch_ipv6_on(
    spec: &AttachSpec,
    namespace: &Namespace,
) -> Result<Result<(), NoIpv6>, KernelError> {
    match ipv6::has_ipv6(namespace, &spec.name)? {
        Err(NoIpv6::SwitchedOff) if spec.enable_ipv6 => {
            ipv6::set(namespace, &spec.name, "disable_ipv6", "0").map(Ok)
        }
        found => Ok(found),
    }
}

async fn set_up_addresses(
    spec: &AttachSpec,
    end: &Link,
    inside: &Socket,
    with_ipv6: bool,
) -> Result<(), KernelError> {
    let present = Addresses::read(inside).await?;
    let wanted = spec.addresses.iter().filter(|address| with_ipv6 || address.addr().is_ipv4());
    let missing: Vec<IpNet> =
        wanted.copied().filter(|address| !present.has(end.index, address)).collect();
    for address in &missing {
        if let Some(index) = present.elsewhere(end.index, address.addr()) {
            let device = inside.link_by_index(index).await?;
            return Err(KernelError::AddressInUse {
                address: address.addr(),
                device: device.map_or_else(|| format!("number {index}"), |device| device.name),
                path: match spec.namespace.as_os_str().is_empty() {
                    true => this_host().to_owned(),
                    false => spec.namespace.clone(),
                },
            });
        }
    }
    for address in missing {
        inside.add_address(end, address).await?;
    }
    Ok(())
}
