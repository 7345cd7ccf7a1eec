//! Network devices as netlink shows them, and changes to them.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{
        AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoBridge, InfoBridgePort, InfoData, InfoKind,
        InfoPortData, InfoPortKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
    },
};
use rustix::io::Errno;

use crate::{
    error::KernelError,
    handle::Kernel,
    netlink::{error::RequestError, route::Socket},
};

/// The device group of everything that Weft makes. The kernel sets it in the same step that makes a device,
/// so a device of ours never looks like another program's. The number is "WEFT", which is also the reqid of
/// SAs.
pub const DEVICE_GROUP: u32 = 0x5745_4654;
/// The alias of Weft's devices, for people and for devices that Weft did not create itself (the TAP). A space
/// and the key of the attachment may follow it.
pub const DEVICE_ALIAS: &str = "weft";
/// The smallest MTU of an overlay device, in bytes: the minimum of IPv6 (RFC 8200, section 5).
pub(crate) const MTU_MIN: u32 = 1280;
/// The largest MTU of an overlay device, in bytes: the limit of a veth and a bridge.
const MTU_MAX: u32 = 65_535;
/// The kind of a datapath's internal device.
const KIND_OPENVSWITCH: &str = "openvswitch";
/// The longest alias that the kernel takes, in bytes (IFALIASZ less the final zero).
const ALIAS_LEN_MAX: usize = 255;
/// The longest device name, in bytes (IFNAMSIZ less the final zero).
const NAME_LEN_MAX: usize = 15;

/// The attributes of a device that Weft uses.
#[derive(Debug, Clone, Default)]
pub(crate) struct Link {
    pub(crate) index: u32,
    pub(crate) name: String,
    pub(crate) kind: Option<InfoKind>,
    pub(crate) flags: LinkFlags,
    pub(crate) mtu: u32,
    pub(crate) mac: Vec<u8>,
    pub(crate) alias: Option<String>,
    pub(crate) group: u32,
    pub(crate) master: Option<u32>,
    /// The other end of a veth pair, as an index in its own namespace.
    pub(crate) peer: Option<u32>,
    pub(crate) gso_max_size: Option<u32>,
    pub(crate) gso_max_segs: Option<u32>,
    pub(crate) addr_gen_mode: Option<In6AddrGenMode>,
    pub(crate) bridge: Vec<InfoBridge>,
    pub(crate) port: Vec<InfoBridgePort>,
    pub(crate) vxlan: Vec<InfoVxlan>,
    /// The attributes of a kind that netlink-packet-route does not know, as they came.
    pub(crate) data: Vec<u8>,
}

impl Link {
    /// Whether Weft made this device. An alias that only starts like ours may belong to another program.
    pub(crate) fn is_own(&self) -> bool {
        self.group == DEVICE_GROUP || self.alias.as_deref() == Some(DEVICE_ALIAS)
    }

    /// The key of the attachment that this device serves.
    pub(crate) fn attachment(&self) -> Option<&str> {
        self.alias.as_deref()?.strip_prefix(DEVICE_ALIAS)?.strip_prefix(' ')
    }

    pub(crate) fn is_up(&self) -> bool {
        self.flags.contains(LinkFlags::Up)
    }

    pub(crate) fn is_loopback(&self) -> bool {
        self.flags.contains(LinkFlags::Loopback)
    }

    /// The kind in words, for error texts.
    pub(crate) fn kind_text(&self) -> String {
        self.kind.as_ref().map_or_else(|| "a hardware device".to_owned(), ToString::to_string)
    }

    pub(crate) fn name_taken(&self, place: impl Into<String>) -> KernelError {
        KernelError::NameTaken {
            name: self.name.clone(),
            kind: self.kind_text(),
            place: place.into(),
        }
    }
}

impl From<LinkMessage> for Link {
    fn from(message: LinkMessage) -> Self {
        let mut link =
            Self { index: message.header.index, flags: message.header.flags, ..Self::default() };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::Address(mac) => link.mac = mac,
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
                LinkAttribute::Group(group) => link.group = group,
                LinkAttribute::Controller(index) => link.master = Some(index),
                LinkAttribute::Link(index) => link.peer = Some(index),
                LinkAttribute::GsoMaxSize(size) => link.gso_max_size = Some(size),
                LinkAttribute::GsoMaxSegs(segs) => link.gso_max_segs = Some(segs),
                LinkAttribute::AfSpecUnspec(specs) => link.addr_gen_mode = addr_gen_mode(&specs),
                LinkAttribute::LinkInfo(infos) => link.take_infos(infos),
                _ => {}
            }
        }
        link
    }
}

impl Link {
    fn take_infos(&mut self, infos: Vec<LinkInfo>) {
        for info in infos {
            match info {
                LinkInfo::Kind(kind) => self.kind = Some(kind),
                LinkInfo::Data(InfoData::Bridge(data)) => self.bridge = data,
                LinkInfo::Data(InfoData::Vxlan(data)) => self.vxlan = data,
                LinkInfo::Data(InfoData::Other(data)) => self.data = data,
                LinkInfo::PortData(InfoPortData::BridgePort(data)) => self.port = data,
                _ => {}
            }
        }
    }
}

fn addr_gen_mode(specs: &[AfSpecUnspec]) -> Option<In6AddrGenMode> {
    specs.iter().find_map(|spec| match spec {
        AfSpecUnspec::Inet6(attributes) => {
            attributes.iter().find_map(|attribute| match attribute {
                AfSpecInet6::AddrGenMode(mode) => Some(*mode),
                _ => None,
            })
        }
        _ => None,
    })
}

/// The alias of the device that serves an attachment. A key that is too long for an alias is left
/// out: the device is still known as ours.
pub(crate) fn alias_of(id: &str) -> String {
    let alias = format!("{DEVICE_ALIAS} {id}");
    if alias.len() <= ALIAS_LEN_MAX { alias } else { DEVICE_ALIAS.to_owned() }
}

/// Rejects a name that the kernel would not accept for a device.
pub(crate) fn check_name(name: &str) -> Result<(), KernelError> {
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
    if name.is_empty()
        || name.len() > NAME_LEN_MAX
        || name == "."
        || name == ".."
        || name.contains(bad)
    {
        return Err(KernelError::InvalidName { name: name.to_owned() });
    }
    Ok(())
}

/// Refuses an MTU that a device of the overlay cannot have.
pub(crate) fn check_mtu(mtu: u32) -> Result<(), KernelError> {
    if (MTU_MIN..=MTU_MAX).contains(&mtu) {
        Ok(())
    } else {
        Err(KernelError::InvalidMtu { mtu, min: MTU_MIN, max: MTU_MAX })
    }
}

/// Marks a device as ours where marks are missing.
pub(crate) fn mark(link: &Link) -> Change {
    Change::of(link).when(link.group != DEVICE_GROUP, LinkAttribute::Group(DEVICE_GROUP)).when(
        link.alias.as_deref() != Some(DEVICE_ALIAS),
        LinkAttribute::IfAlias(DEVICE_ALIAS.to_owned()),
    )
}

/// Whether this is the internal device of a datapath.
pub(crate) fn is_datapath(link: &Link) -> bool {
    link.kind == Some(InfoKind::Other(KIND_OPENVSWITCH.to_owned()))
}

/// A change to one device, sent only if there is something in it.
pub(crate) struct Change {
    message: LinkMessage,
}

impl Change {
    pub(crate) fn of(link: &Link) -> Self {
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        Self { message }
    }

    /// Adds an attribute if `differs`.
    pub(crate) fn when(mut self, differs: bool, attribute: LinkAttribute) -> Self {
        if differs {
            self.message.attributes.push(attribute);
        }
        self
    }

    /// Switches the device on if it is off.
    pub(crate) fn up(mut self, link: &Link) -> Self {
        if !link.is_up() {
            self.message.header.flags |= LinkFlags::Up;
            self.message.header.change_mask |= LinkFlags::Up;
        }
        self
    }

    /// Switches the device off.
    fn down(mut self) -> Self {
        self.message.header.change_mask |= LinkFlags::Up;
        self
    }

    pub(crate) async fn send(self, socket: &Socket, what: &str) -> Result<(), KernelError> {
        if self.message.attributes.is_empty() && self.message.header.change_mask.is_empty() {
            return Ok(());
        }
        let doing = format!("set up device {what}");
        socket
            .change(RouteNetlinkMessage::SetLink(self.message), 0)
            .await
            .map_err(|error| error.while_doing(doing))
    }
}

impl Kernel {
    /// Switches the loopback device of the kernel's namespace on, which a new namespace has off.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn set_loopback_up(&self) -> Result<(), KernelError> {
        let links = self.socket().links().await?;
        match links.iter().find(|link| link.is_loopback()) {
            Some(link) => Change::of(link).up(link).send(self.socket(), &link.name).await,
            None => Ok(()),
        }
    }
}

impl Socket {
    /// The device with this name.
    pub(crate) async fn link(&self, name: &str) -> Result<Option<Link>, KernelError> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.one_link(message, name).await
    }

    /// The device with this index.
    pub(crate) async fn link_by_index(&self, index: u32) -> Result<Option<Link>, KernelError> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.one_link(message, &format!("number {index}")).await
    }

    /// The device with this name, which must be there.
    pub(crate) async fn need_link(&self, name: &str) -> Result<Link, KernelError> {
        let missing = || KernelError::LinkMissing { name: name.to_owned() };
        self.link(name).await?.ok_or_else(missing)
    }

    /// Restores a device's name, if the name is free and a renamed device is found. True if it was renamed.
    pub(crate) async fn restore_name(
        &self,
        name: &str,
        is_it: impl Fn(&Link) -> bool,
    ) -> Result<bool, KernelError> {
        if self.link(name).await?.is_some() {
            return Ok(false);
        }
        let found = self.links().await?.into_iter().find(|link| link.is_own() && is_it(link));
        let Some(link) = found else { return Ok(false) };
        tracing::warn!(
            from = link.name,
            to = name,
            "a device of ours was renamed; renaming it back"
        );
        let named = || Change::of(&link).when(true, LinkAttribute::IfName(name.to_owned()));
        match named().send(self, &link.name).await {
            // Before Linux 6.2 a device must be off for that.
            Err(KernelError::Refused { source, .. })
                if source.raw_os_error() == Some(Errno::BUSY.raw_os_error()) =>
            {
                Change::of(&link).down().send(self, &link.name).await?;
                named().send(self, &link.name).await?;
            }
            result => result?,
        }
        Ok(true)
    }

    /// All devices of the namespace.
    pub(crate) async fn links(&self) -> Result<Vec<Link>, KernelError> {
        let found = self
            .dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))
            .await
            .map_err(|error| error.while_doing("list the network devices"))?;
        let link = |message| match message {
            RouteNetlinkMessage::NewLink(message) => Some(Link::from(message)),
            _ => None,
        };
        Ok(found.into_iter().filter_map(link).collect())
    }

    /// Makes a device; `message` names it. False if the name was taken in the meantime.
    pub(crate) async fn create_link(
        &self,
        message: LinkMessage,
        name: &str,
    ) -> Result<(), KernelError> {
        self.change(RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
            .await
            .map_err(|error| error.while_doing(format!("create device {name}")))
    }

    /// Deletes a device, or succeeds if it is already gone.
    pub(crate) async fn delete_link(&self, link: &Link) -> Result<(), KernelError> {
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        match self.change(RouteNetlinkMessage::DelLink(message), 0).await {
            Err(error) if !error.is(Errno::NODEV) => {
                Err(error.while_doing(format!("delete device {}", link.name)))
            }
            _ => Ok(()),
        }
    }

    /// Sets options of a bridge.
    pub(crate) async fn set_bridge_options(
        &self,
        link: &Link,
        options: Vec<InfoBridge>,
    ) -> Result<(), KernelError> {
        let infos =
            vec![LinkInfo::Kind(InfoKind::Bridge), LinkInfo::Data(InfoData::Bridge(options))];
        self.set_infos(link, infos).await
    }

    /// Sets options of a bridge's port.
    pub(crate) async fn set_port_options(
        &self,
        link: &Link,
        options: Vec<InfoBridgePort>,
    ) -> Result<(), KernelError> {
        let infos = vec![
            LinkInfo::PortKind(InfoPortKind::Bridge),
            LinkInfo::PortData(InfoPortData::BridgePort(options)),
        ];
        self.set_infos(link, infos).await
    }

    /// Stops the kernel from giving a device an IPv6 link-local address. Does nothing on a kernel without
    /// IPv6.
    pub(crate) async fn disable_autoconfiguration(&self, link: &Link) -> Result<(), KernelError> {
        if link.addr_gen_mode.is_none_or(|mode| mode == In6AddrGenMode::None) {
            return Ok(());
        }
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
        message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![mode])]));
        match self.change(RouteNetlinkMessage::SetLink(message), 0).await {
            Err(error) if !error.is(Errno::AFNOSUPPORT) => Err(error
                .while_doing(format!("switch off IPv6 autoconfiguration on device {}", link.name))),
            _ => Ok(()),
        }
    }

    /// Changes options of a device's kind; SETLINK would pass them over.
    async fn set_infos(&self, link: &Link, infos: Vec<LinkInfo>) -> Result<(), KernelError> {
        let mut message = LinkMessage::default();
        message.header.index = link.index;
        message.attributes.push(LinkAttribute::LinkInfo(infos));
        self.change(RouteNetlinkMessage::NewLink(message), 0)
            .await
            .map_err(|error| error.while_doing(format!("set options of device {}", link.name)))
    }

    async fn one_link(
        &self,
        mut message: LinkMessage,
        what: &str,
    ) -> Result<Option<Link>, KernelError> {
        message.header.interface_family = AddressFamily::Unspec;
        match self.get(RouteNetlinkMessage::GetLink(message)).await {
            Ok(Some(RouteNetlinkMessage::NewLink(message))) => Ok(Some(Link::from(message))),
            Ok(_) => Err(RequestError::TimedOut.while_doing(format!("read device {what}"))),
            Err(error) if error.is(Errno::NODEV) => Ok(None),
            Err(error) => Err(error.while_doing(format!("read device {what}"))),
        }
    }
}
