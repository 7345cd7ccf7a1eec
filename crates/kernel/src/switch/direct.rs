//! Direct ports: the engine's TAP device is the container's interface. A veth pair beside it carries frames
//! that are not for other hosts to the switch.

use std::{
    os::fd::{AsFd, AsRawFd},
    path::Path,
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoKind, LinkAttribute, LinkMessage},
};
use weft_io::{
    namespace::{self, Namespace},
    redirect::MacSet,
};

use crate::{
    error::{KernelError, namespace_error},
    handle::Kernel,
    net::{
        attach::{AttachSpec, Attached, DIRECT_LOCAL_NAME, Place, is_direct, settings},
        belongings::Belongings,
        ipv6::{self, ignore_routers},
        link::Link,
    },
    netlink::route::Socket,
};

/// The parts of a container's direct port.
#[derive(Debug)]
pub struct DirectTap<'a> {
    /// The engine's new TAP device on this host, which becomes the container's interface. `None` if it
    /// already is.
    pub fresh: Option<&'a str>,
    /// Destinations, and senders, of frames that leave by the TAP.
    pub macs: &'a MacSet,
}

impl Kernel {
    /// As [`Self::attach`], with a direct port: `spec.name` is a TAP device, and the veth end is
    /// [`DIRECT_LOCAL_NAME`]. `None` if there is no such port yet and no fresh device to make it of.
    ///
    /// # Errors
    /// As [`Self::attach`]; [`KernelError::LinkMissing`] if the fresh device is not there,
    /// [`KernelError::NoDirectPort`] if the kernel does not take the programs.
    pub async fn attach_direct(
        &self,
        spec: &AttachSpec,
        direct: &DirectTap<'_>,
    ) -> Result<Option<Attached>, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let place = self.place_of(spec).await?;
        let Place { bridge, namespace, inside } = &place;
        let pair = pair_of(spec);
        // The interface itself may be the veth end of a port of the switch.
        let is_renamed = |link: &Link| {
            link.kind == Some(InfoKind::Veth)
                && link.name != spec.name
                && link.attachment() == Some(spec.id.as_str())
        };
        inside.restore_name(&pair.name, is_renamed).await?;
        let before = Belongings::of(inside, &spec.name, &spec.addresses).await?;
        let (host, local, tap) = match direct.fresh {
            None => {
                let tap = inside.link(&spec.name).await?.filter(|tap| is_direct(&spec.id, tap));
                let Some(tap) = tap else { return Ok(None) };
                let Some((host, local)) = self.find_pair(&pair, inside).await? else {
                    return Ok(None);
                };
                (host, local, tap)
            }
            Some(fresh) => {
                // The programs name both devices: an old veth pair goes, as does an old TAP.
                if let Some((host, _)) = self.find_pair(&pair, inside).await? {
                    self.socket().delete_link(&host).await?;
                }
                let tap = self.move_in(spec, fresh, namespace, inside).await?;
                let (host, local) = self.create_pair(&pair, namespace, inside).await?;
                let join = || direct.macs.join(spec.mac, tap.index, local.index);
                namespace::run_in(namespace, join)
                    .map_err(|source| namespace_error(&spec.namespace, source))?
                    .map_err(|error| KernelError::NoDirectPort { why: error.to_string() })?;
                (host, local, tap)
            }
        };
        self.set_up_host_end(&pair, &host, bridge.as_ref(), spec.mac).await?;
        // Keep the kernel from sending IPv6 packets by this device.
        ipv6::set(namespace, &pair.name, "disable_ipv6", "1")?;
        self.set_up_container_end(&pair, &local, inside).await?;
        ignore_routers(namespace, &spec.name, &spec.namespace)?;
        self.set_up_container_end(spec, &tap, inside).await?;
        let attached = place.set_up_network(spec, &tap).await?;
        before.give_back(inside, &tap).await;
        Ok(Some(attached))
    }

    /// Removes the TAP device of a direct port from a container; [`Self::detach`] removes its veth pair.
    /// False if this attachment has no such device.
    ///
    /// # Errors
    /// [`KernelError::NamespaceGone`], or the kernel's refusal.
    pub async fn remove_direct(
        &self,
        namespace: &Path,
        name: &str,
        id: &str,
    ) -> Result<bool, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        let open = self.foreign_namespace(namespace)?;
        let inside = self.socket_in(&open, namespace)?;
        let Some(tap) = inside.link(name).await?.filter(|tap| is_direct(id, tap)) else {
            return Ok(false);
        };
        inside.delete_link(&tap).await?;
        Ok(true)
    }

    /// Moves the engine's new device from this host into the container, under its final name. It is
    /// marked before, so that it is known as ours wherever it stays.
    async fn move_in(
        &self,
        spec: &AttachSpec,
        fresh: &str,
        namespace: &Namespace,
        inside: &Socket,
    ) -> Result<Link, KernelError> {
        let socket = self.socket();
        let tap = socket.need_link(fresh).await?;
        settings(spec, &tap).send(socket, fresh).await?;
        if let Some(old) = inside.link(&spec.name).await? {
            if !old.is_own() || old.attachment().is_some_and(|id| id != spec.id) {
                return Err(old.name_taken(format!("in {}", spec.namespace.display())));
            }
            inside.delete_link(&old).await?;
        }
        let mut message = LinkMessage::default();
        message.header.index = tap.index;
        message.attributes = vec![
            LinkAttribute::IfName(spec.name.clone()),
            LinkAttribute::NetNsFd(namespace.as_fd().as_raw_fd()),
        ];
        socket
            .change(RouteNetlinkMessage::SetLink(message), 0)
            .await
            .map_err(|error| error.while_doing(format!("move device {fresh} to a container")))?;
        inside.need_link(&spec.name).await
    }
}

/// The veth pair that leads to the switch.
fn pair_of(spec: &AttachSpec) -> AttachSpec {
    let [first, rest @ ..] = spec.mac;
    let mut mac = [first ^ 0x04, 0, 0, 0, 0, 0];
    mac[1..].copy_from_slice(&rest);
    AttachSpec {
        name: DIRECT_LOCAL_NAME.to_owned(),
        mac,
        addresses: Vec::new(),
        gateways: Vec::new(),
        gso_max_segs: None,
        ..spec.clone()
    }
}
