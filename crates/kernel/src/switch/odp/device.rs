//! The devices of the switch: its own and the tunnel's.

use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage,
};
use rustix::io::Errno;

use super::api::OdpSpec;
use crate::{
    error::KernelError,
    handle::Kernel,
    net::{
        ipv6::{ignore_routers, this_host},
        link::{Change, DEVICE_GROUP, Link, is_datapath, mark},
    },
};

/// MTU of the tunnel's device in bytes. It does not limit packets: each path has an MTU, and the containers'
/// devices keep to it.
const TUNNEL_MTU: u32 = 65_000;
/// A device that is made and deleted to see whether the kernel can have a tunnel.
const TRIAL_NAME: &str = "weft-vxtrial";

/// The switch's own device, under its name, or nothing if the name is free. A bridge of an earlier
/// run in the other mode is deleted; the containers' devices stay.
///
/// # Errors
/// [`KernelError::NameTaken`] if another device has the name.
pub(super) async fn clear_name(kernel: &Kernel, name: &str) -> Result<Option<Link>, KernelError> {
    let socket = kernel.socket();
    match socket.link(name).await? {
        Some(link) if is_datapath(&link) => Ok(Some(link)),
        Some(link) if link.is_own() && link.kind == Some(InfoKind::Bridge) => {
            socket.delete_link(&link).await?;
            Ok(None)
        }
        Some(link) => Err(link.name_taken("on this host")),
        None => Ok(None),
    }
}

/// Brings the switch's own device into shape, as the bridge's in bridge mode.
pub(super) async fn ensure_internal(kernel: &Kernel, spec: &OdpSpec) -> Result<(), KernelError> {
    let socket = kernel.socket();
    let link = socket.need_link(&spec.name).await?;
    socket.disable_autoconfiguration(&link).await?;
    ignore_routers(&kernel.inner.home, &spec.name, this_host())?;
    mark(&link)
        .when(link.mac != spec.mac, LinkAttribute::Address(spec.mac.to_vec()))
        .when(link.mtu != spec.mtu, LinkAttribute::Mtu(spec.mtu))
        .send(socket, &spec.name)
        .await?;
    Change::of(&link).up(&link).send(socket, &spec.name).await
}

/// Makes the tunnel's device, or brings it into shape, for IPv4 and IPv6. It is a VXLAN device that takes
/// peer and network of each packet from the datapath (`external`). VXLAN devices of ours that hold its UDP
/// port from an earlier run in bridge mode are deleted.
///
/// # Errors
/// [`KernelError::NameTaken`]; [`KernelError::UdpPortTaken`] if another program has the UDP port.
pub(super) async fn ensure_tunnel(kernel: &Kernel, spec: &OdpSpec) -> Result<(), KernelError> {
    let socket = kernel.socket();
    let on_port = |link: &Link| link.vxlan.contains(&InfoVxlan::Port(spec.tunnel_port));
    for link in socket.links().await? {
        if link.name != spec.tunnel && link.is_own() && on_port(&link) {
            socket.delete_link(&link).await?;
        }
    }
    let mut found = socket.link(&spec.tunnel).await?;
    if let Some(link) = &found {
        if !link.is_own() {
            return Err(link.name_taken("on this host"));
        }
        if !tunnel_options(spec).iter().all(|option| link.vxlan.contains(option)) {
            socket.delete_link(link).await?;
            found = None;
        }
    }
    let link = match found {
        Some(link) => link,
        None => {
            let message = new_tunnel(&spec.tunnel, tunnel_options(spec));
            socket.create_link(message, &spec.tunnel).await?;
            socket.need_link(&spec.tunnel).await?
        }
    };
    socket.disable_autoconfiguration(&link).await?;
    ignore_routers(&kernel.inner.home, &spec.tunnel, this_host())?;
    mark(&link)
        .when(link.mtu != TUNNEL_MTU, LinkAttribute::Mtu(TUNNEL_MTU))
        .send(socket, &spec.tunnel)
        .await?;
    match Change::of(&link).up(&link).send(socket, &spec.tunnel).await {
        Err(KernelError::Refused { source, .. })
            if source.raw_os_error() == Some(Errno::ADDRINUSE.raw_os_error()) =>
        {
            Err(KernelError::UdpPortTaken { port: spec.tunnel_port, device: spec.tunnel.clone() })
        }
        other => other,
    }
}

/// Whether the kernel can make a tunnel's device.
pub(super) async fn try_tunnel(kernel: &Kernel) -> Result<(), KernelError> {
    let socket = kernel.socket();
    let message = new_tunnel(TRIAL_NAME, vec![InfoVxlan::CollectMetadata(true)]);
    match socket.create_link(message, TRIAL_NAME).await {
        Ok(()) => {}
        // Left by a run that was killed at this point, unless it belongs to another program.
        Err(KernelError::Refused { source, .. })
            if source.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error @ KernelError::NotPermitted { .. }) => return Err(error),
        Err(error) => return Err(KernelError::VxlanMissing { why: error.to_string() }),
    }
    match socket.link(TRIAL_NAME).await? {
        Some(link) if link.is_own() => socket.delete_link(&link).await,
        _ => Ok(()),
    }
}

fn tunnel_options(spec: &OdpSpec) -> Vec<InfoVxlan> {
    vec![
        InfoVxlan::CollectMetadata(true),
        InfoVxlan::Port(spec.tunnel_port),
        InfoVxlan::Learning(false),
        InfoVxlan::UDPCsum(false),
        InfoVxlan::UDPZeroCsumTX(true),
        InfoVxlan::UDPZeroCsumRX(true),
        InfoVxlan::RemCsumRX(true),
    ]
}

fn new_tunnel(name: &str, options: Vec<InfoVxlan>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Mtu(TUNNEL_MTU),
        LinkAttribute::Group(DEVICE_GROUP),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Vxlan),
            LinkInfo::Data(InfoData::Vxlan(options)),
        ]),
    ];
    message
}
