//! VXLAN devices: the kernel engine's port on the bridge, and its probe devices outside of it.
//!
//! A VXLAN device sends to one address family only: the kernel refuses an IPv6 remote on an IPv4 device, and
//! the other way round. So a network has two devices, which differ in [`VxlanSpec::family`] alone.

use std::net::{IpAddr, Ipv6Addr};

use netlink_packet_route::link::{
    BridgeMulticastRouterType, InfoBridgePort, InfoData, InfoKind, InfoVxlan, LinkAttribute,
    LinkInfo, LinkMessage, VxlanDf,
};
use rustix::io::Errno;

use super::{
    ipv6::{ignore_routers, this_host},
    link::{Change, DEVICE_GROUP, Link, check_mtu, check_name, mark},
};
use crate::{error::KernelError, handle::Kernel, netlink::error::RequestError};

/// The VXLAN devices of the network, one for each family of outer addresses.
pub(crate) const VXLAN: &str = "weft-vxlan";
pub(crate) const VXLAN6: &str = "weft-vxlan6";
/// The family of the outer addresses that a VXLAN device sends to and receives from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OuterFamily {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl OuterFamily {
    /// The family of an address.
    #[must_use]
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

/// A VXLAN device of one network and one outer address family.
///
/// Its fixed options: no outer checksum over IPv4, and a zero checksum sent and taken over IPv6. No learning,
/// remote checksum offload received, any local address, no default remote. The kernel itself carries congestion
/// marks through it (RFC 6040).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VxlanSpec {
    /// Device name, 1 to 15 bytes.
    pub name: String,
    /// The network's identifier, 24 bits.
    pub vni: u32,
    /// UDP port, here and at the peers.
    pub port: u16,
    /// Outer addresses of this family only.
    pub family: OuterFamily,
    /// Its MAC address; `None`: the kernel draws one.
    pub mac: Option<[u8; 6]>,
    /// MTU in bytes of inner packets, 1280 to 65535.
    pub mtu: u32,
    /// The bridge that it is an overlay port of, made by [`Kernel::ensure_bridge`]; `None` for a device
    /// outside the bridge (probe devices).
    pub bridge: Option<String>,
    /// Whether the DSCP of inner packets is copied to the outer header, where an observer sees it.
    pub copy_dscp: bool,
    /// Over IPv4, whether to fragment an outer packet that is too long for the link. This applies to inner
    /// IPv6 of up to 1,280 bytes and inner IPv4 without don't-fragment, whose sender gets no error. Otherwise
    /// the outer packet has don't-fragment set.
    pub cut: bool,
}

impl Kernel {
    /// Makes the VXLAN device, or brings it into the wanted shape, and switches it on. True if the device is
    /// new: it has no forwarding entries, and the caller writes them.
    ///
    /// As a port of a bridge it is isolated, does not learn, and suppresses neighbour queries. It gets every
    /// multicast frame, and a unicast frame only by a forwarding entry.
    ///
    /// # Errors
    /// [`KernelError::NameTaken`] if another program's device has the name,
    /// [`KernelError::VniTaken`] if another program's device has VNI and port,
    /// [`KernelError::UdpPortTaken`] if another program has the UDP port,
    /// [`KernelError::NoVxlan`] if the kernel cannot make such devices,
    /// [`KernelError::PortTaken`], [`KernelError::LinkMissing`] for the bridge,
    /// [`KernelError::InvalidName`], [`KernelError::InvalidMtu`], [`KernelError::NotPermitted`].
    pub async fn ensure_vxlan(&self, spec: &VxlanSpec) -> Result<bool, KernelError> {
        check_name(&spec.name)?;
        check_mtu(spec.mtu)?;
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let bridge = match &spec.bridge {
            Some(name) => Some(self.own_bridge(name).await?),
            None => None,
        };
        let (mut link, made) = self.own_vxlan(spec).await?;
        match &bridge {
            Some(bridge) => self.join(&link, bridge).await?,
            None if link.master.is_some() => self.leave(&link).await?,
            None => {}
        }
        socket.disable_autoconfiguration(&link).await?;
        ignore_routers(&self.inner.home, &spec.name, this_host())?;
        let mac = spec.mac.unwrap_or_default();
        mark(&link)
            .when(spec.mac.is_some() && link.mac != mac, LinkAttribute::Address(mac.to_vec()))
            .when(link.mtu != spec.mtu, LinkAttribute::Mtu(spec.mtu))
            .send(socket, &spec.name)
            .await?;
        if bridge.is_some() {
            link = socket.need_link(&spec.name).await?;
            self.set_port(&link, overlay_port_options()).await?;
        }
        match Change::of(&link).up(&link).send(socket, &spec.name).await {
            Err(KernelError::Refused { source, .. })
                if source.raw_os_error() == Some(Errno::ADDRINUSE.raw_os_error()) =>
            {
                Err(KernelError::UdpPortTaken { port: spec.port, device: spec.name.clone() })
            }
            result => result.map(|()| made),
        }
    }

    /// Deletes a device that Weft made; true if it was deleted. A missing device, or another program's, is
    /// left as it is.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove_device(&self, name: &str) -> Result<bool, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        match self.socket().link(name).await? {
            Some(link) if link.is_own() => self.socket().delete_link(&link).await.map(|()| true),
            _ => Ok(false),
        }
    }

    /// The device of this name with the wanted fixed options; the flag is true if it was created.
    async fn own_vxlan(&self, spec: &VxlanSpec) -> Result<(Link, bool), KernelError> {
        let socket = self.socket();
        match socket.link(&spec.name).await? {
            Some(link) if link.kind != Some(InfoKind::Vxlan) || !link.is_own() => {
                return Err(link.name_taken("on this host"));
            }
            Some(link) if is_as_wanted(&link, spec) => return Ok((link, false)),
            Some(link) => socket.delete_link(&link).await?,
            None => {}
        }
        match socket.create_vxlan(spec).await {
            Ok(()) => {}
            Err(error) if error.is(Errno::OPNOTSUPP) || error.is(Errno::AFNOSUPPORT) => {
                return Err(KernelError::NoVxlan { device: spec.name.clone() });
            }
            Err(error) if error.is(Errno::EXIST) && socket.link(&spec.name).await?.is_none() => {
                return Err(KernelError::VniTaken { vni: spec.vni, port: spec.port });
            }
            Err(error) => return Err(error.while_doing(format!("create device {}", spec.name))),
        }
        Ok((socket.need_link(&spec.name).await?, true))
    }

    async fn leave(&self, link: &Link) -> Result<(), KernelError> {
        const NO_BRIDGE: u32 = 0;
        let change = Change::of(link).when(true, LinkAttribute::Controller(NO_BRIDGE));
        change.send(self.socket(), &link.name).await
    }
}

impl crate::netlink::route::Socket {
    async fn create_vxlan(&self, spec: &VxlanSpec) -> Result<(), RequestError> {
        use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
        use netlink_packet_route::RouteNetlinkMessage;
        let mut data = vec![InfoVxlan::Id(spec.vni), InfoVxlan::Port(spec.port)];
        data.extend(fixed_options(spec));
        if spec.family == OuterFamily::V6 {
            // The unspecified address, and with it the family of the device's socket.
            data.push(InfoVxlan::Local6(Ipv6Addr::UNSPECIFIED));
        }
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(spec.name.clone()),
            LinkAttribute::Mtu(spec.mtu),
            LinkAttribute::Group(DEVICE_GROUP),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Vxlan),
                LinkInfo::Data(InfoData::Vxlan(data)),
            ]),
        ];
        if let Some(mac) = spec.mac {
            message.attributes.push(LinkAttribute::Address(mac.to_vec()));
        }
        self.change(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL).await
    }
}

/// The options of every overlay port of a bridge, that is, of the VXLAN devices. The bridge does not query
/// the hosts behind the port for their groups. So it treats the port as a multicast router's and floods all
/// multicast to it. Frames to unknown MAC addresses are not copied to all peers.
fn overlay_port_options() -> Vec<InfoBridgePort> {
    vec![
        InfoBridgePort::Isolated(true),
        InfoBridgePort::Learning(false),
        InfoBridgePort::NeighSupress(true),
        InfoBridgePort::UnicastFlood(false),
        InfoBridgePort::MulticastFlood(true),
        InfoBridgePort::BroadcastFlood(true),
        InfoBridgePort::MulticastRouter(BridgeMulticastRouterType::Permanent),
    ]
}

/// The outer TOS that makes the kernel copy the inner one (iproute2's `tos inherit`). With 0 it copies
/// ECN alone.
const TOS_INHERIT: u8 = 1;

/// The fixed options of a device; a device with other options is recreated. Any change of options makes Linux
/// 6.14 and later drop packets with remote checksum offload: the kernel then treats their flags as reserved
/// bits.
fn fixed_options(spec: &VxlanSpec) -> [InfoVxlan; 7] {
    [
        InfoVxlan::Tos(if spec.copy_dscp { TOS_INHERIT } else { 0 }),
        InfoVxlan::Learning(false),
        InfoVxlan::UDPCsum(false),
        InfoVxlan::UDPZeroCsumTX(true),
        InfoVxlan::UDPZeroCsumRX(true),
        InfoVxlan::RemCsumRX(true),
        InfoVxlan::Df(if spec.cut { VxlanDf::Unset } else { VxlanDf::Set }),
    ]
}

/// Whether a VXLAN device has the wanted fixed options and no others that matter. Its family cannot
/// be read back; it is as its maker wanted it, and that is Weft.
fn is_as_wanted(link: &Link, spec: &VxlanSpec) -> bool {
    let has = |option: &InfoVxlan| link.vxlan.contains(option);
    let foreign = |option: &InfoVxlan| match option {
        InfoVxlan::Group(_)
        | InfoVxlan::Group6(_)
        | InfoVxlan::Local(_)
        | InfoVxlan::Local6(_)
        | InfoVxlan::Gbp
        | InfoVxlan::Gpe
        | InfoVxlan::RemCsumNoPartial => true,
        InfoVxlan::Link(index) => *index != 0,
        InfoVxlan::Ttl(value) => *value != 0,
        InfoVxlan::Proxy(on)
        | InfoVxlan::Rsc(on)
        | InfoVxlan::CollectMetadata(on)
        | InfoVxlan::RemCsumTX(on)
        | InfoVxlan::Vnifilter(on) => *on,
        _ => false,
    };
    has(&InfoVxlan::Id(spec.vni))
        && has(&InfoVxlan::Port(spec.port))
        && fixed_options(spec).iter().all(has)
        && !link.vxlan.iter().any(foreign)
}
