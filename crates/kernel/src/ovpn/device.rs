//! Devices of the kind `ovpn` (`docs/design/ovpn.md`, kernel device).

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoData, InfoKind, LinkAttribute, LinkInfo, LinkMessage},
};
use rustix::io::Errno;
use weft_openvpn::device::Mode;

use super::support;
use crate::{
    error::KernelError,
    handle::Kernel,
    net::link::{DEVICE_GROUP, Link, check_name, mark},
    netlink::{reader::attribute, writer::Writer},
};

const KIND: &str = "ovpn";
/// The device that seals and opens packets of format `ovpn` between hosts.
pub const DATA_CHANNEL_DEVICE: &str = "weft-ovpn";
/// The attribute of the mode, of one byte (IFLA_OVPN_MODE).
const MODE: u16 = 1;

/// A device to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OvpnDeviceSpec {
    /// Its name, 1 to 15 bytes.
    pub name: String,
    /// How many peers it can have. It cannot be changed.
    pub mode: Mode,
    /// Whether it is Weft's own: then it is in Weft's device group and carries its alias, so that Weft's
    /// cleanup removes it. A device made on a user's request is not.
    pub own: bool,
}

/// A device that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OvpnDevice {
    /// Its interface index, which requests about peers and keys use.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// How many peers it has.
    pub mode: Mode,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Weft's own.
    pub own: bool,
}

impl Kernel {
    /// Makes a device, which is down and has no address.
    ///
    /// # Errors
    /// [`KernelError::NameTaken`] if a device has the name, [`KernelError::NoOvpn`] if this kernel has no
    /// such devices, [`KernelError::InvalidName`], [`KernelError::NotPermitted`].
    pub async fn create_ovpn_device(
        &self,
        spec: &OvpnDeviceSpec,
    ) -> Result<OvpnDevice, KernelError> {
        check_name(&spec.name)?;
        let _one = self.inner.reconcile.lock().await;
        let socket = self.socket();
        let create = || {
            let request = RouteNetlinkMessage::NewLink(new_link(spec));
            socket.change(request, NLM_F_CREATE | NLM_F_EXCL)
        };
        let mut made = create().await;
        // Asking for the kind of device does not load the module; asking for the family does.
        if matches!(&made, Err(error) if error.is(Errno::OPNOTSUPP)) && support().await.is_ok() {
            made = create().await;
        }
        match made {
            Ok(()) => {}
            Err(error) if error.is(Errno::OPNOTSUPP) => {
                return Err(KernelError::NoOvpn { device: spec.name.clone() });
            }
            Err(error) => {
                if error.is(Errno::EXIST)
                    && let Some(link) = socket.link(&spec.name).await?
                {
                    return Err(link.name_taken("on this host"));
                }
                return Err(error.while_doing(format!("create device {}", spec.name)));
            }
        }
        let link = socket.need_link(&spec.name).await?;
        if spec.own {
            mark(&link).send(socket, &spec.name).await?;
        }
        let missing = || KernelError::LinkMissing { name: spec.name.clone() };
        OvpnDevice::of(&link).ok_or_else(missing)
    }

    /// Deletes an `ovpn` device with its peers, or the TUN device of one in userspace. A device that is
    /// not there, or of another kind, is left as it is; true if it was deleted.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove_ovpn_device(&self, name: &str) -> Result<bool, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        self.remove_if_ovpn(self.socket().link(name).await?).await
    }

    /// As [`Self::remove_ovpn_device`], for the device with this interface index, whatever its current name.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn remove_ovpn_device_by_index(&self, index: u32) -> Result<bool, KernelError> {
        let _one = self.inner.reconcile.lock().await;
        self.remove_if_ovpn(self.socket().link_by_index(index).await?).await
    }

    async fn remove_if_ovpn(&self, link: Option<Link>) -> Result<bool, KernelError> {
        match link {
            Some(link) if is_ovpn(&link) || link.kind == Some(InfoKind::Tun) => {
                self.socket().delete_link(&link).await.map(|()| true)
            }
            _ => Ok(false),
        }
    }

    /// The `ovpn` device of this name, if there is one.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn ovpn_device(&self, name: &str) -> Result<Option<OvpnDevice>, KernelError> {
        Ok(self.socket().link(name).await?.as_ref().and_then(OvpnDevice::of))
    }

    /// All `ovpn` devices of the namespace, including those of other programs.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn ovpn_devices(&self) -> Result<Vec<OvpnDevice>, KernelError> {
        Ok(self.socket().links().await?.iter().filter_map(OvpnDevice::of).collect())
    }
}

impl OvpnDevice {
    fn of(link: &Link) -> Option<Self> {
        is_ovpn(link).then(|| Self {
            index: link.index,
            name: link.name.clone(),
            mode: mode(&link.data),
            mtu: link.mtu,
            own: link.is_own(),
        })
    }
}

fn is_ovpn(link: &Link) -> bool {
    link.kind == Some(InfoKind::Other(KIND.to_owned()))
}

fn new_link(spec: &OvpnDeviceSpec) -> LinkMessage {
    let mode = match spec.mode {
        Mode::P2p => 0,
        Mode::Mp => 1,
    };
    let mut data = Writer::default();
    data.u8(MODE, mode);
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(spec.name.clone()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Other(KIND.to_owned())),
            LinkInfo::Data(InfoData::Other(data.as_bytes().to_vec())),
        ]),
    ];
    if spec.own {
        message.attributes.push(LinkAttribute::Group(DEVICE_GROUP));
    }
    message
}

/// The mode in the attributes of a device; the default if the kernel does not report it.
fn mode(data: &[u8]) -> Mode {
    match attribute(data, MODE) {
        Some([1, ..]) => Mode::Mp,
        _ => Mode::P2p,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn spec(mode: Mode, own: bool) -> OvpnDeviceSpec {
        OvpnDeviceSpec { name: "tun0".into(), mode, own }
    }

    #[test]
    fn a_device_reads_back_in_its_mode() {
        for mode in [Mode::P2p, Mode::Mp] {
            for own in [false, true] {
                let device = OvpnDevice::of(&Link::from(new_link(&spec(mode, own)))).unwrap();
                assert_eq!((device.name.as_str(), device.mode, device.own), ("tun0", mode, own));
            }
        }
    }

    #[test]
    fn another_kind_is_no_ovpn_device() {
        let mut message = new_link(&spec(Mode::Mp, true));
        message.attributes[1] = LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Tun)]);
        assert_eq!(OvpnDevice::of(&Link::from(message)), None);
    }
}
