//! Errors between Weft and the kernel.

use std::{
    io,
    net::IpAddr,
    path::{Path, PathBuf},
};

use ipnet::IpNet;

/// Why the kernel's state differs from the wanted one. Each text names the failure, the object, the cause and
/// the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Fault of how Weft was started.
    #[error(
        "not permitted to {doing}: Weft needs root or the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN"
    )]
    NotPermitted {
        /// The step that was refused.
        doing: String,
    },
    /// Configuration: another program's device has the name that Weft wants.
    #[error(
        "a device named {name} ({kind}) that Weft did not create already exists {place}: remove or rename it, or give Weft another name"
    )]
    NameTaken {
        /// The device's name.
        name: String,
        /// The kind of the device.
        kind: String,
        /// Its location: on the host, or in which namespace.
        place: String,
    },
    /// Configuration: one host device name for two attachments.
    #[error(
        "device {name} already serves {holder}: detach {holder} first, or attach {wanted} under another device name"
    )]
    AttachmentTaken {
        /// The device on the host.
        name: String,
        /// The attachment that has it.
        holder: String,
        /// The attachment that wants it.
        wanted: String,
    },
    /// Configuration: a port belongs to a bridge that is not ours.
    #[error(
        "device {port} is a port of another bridge ({bridge}): remove it from that bridge first"
    )]
    PortTaken {
        /// The port's name.
        port: String,
        /// The bridge that has it.
        bridge: String,
    },
    /// Configuration: more ports than a bridge takes.
    #[error(
        "the bridge {bridge} has its maximum of {ports} ports: detach a container (weft ps), or attach this one on another host"
    )]
    BridgeFull {
        /// The bridge.
        bridge: String,
        /// Its ports.
        ports: usize,
    },
    /// Us, or another program removed it while Weft worked.
    #[error("device {name} does not exist: it was removed, or the engine has not opened it yet")]
    LinkMissing {
        /// The device's name.
        name: String,
    },
    /// Configuration: a name that Linux does not take.
    #[error(
        "invalid device name {name:?}: use 1 to 15 bytes without slash, colon, white space or control characters, and not . or .."
    )]
    InvalidName {
        /// The name.
        name: String,
    },
    /// Configuration: an MTU that no device of ours accepts.
    #[error("MTU {mtu} is out of range: use {min} to {max}")]
    InvalidMtu {
        /// The MTU in bytes.
        mtu: u32,
        /// The smallest possible.
        min: u32,
        /// The largest possible.
        max: u32,
    },
    /// The container has ended.
    #[error(
        "network namespace {path} is gone: the container has stopped or was replaced; attach it again once it runs"
    )]
    NamespaceGone {
        /// The path it had.
        path: PathBuf,
    },
    /// Configuration: the path is something else, or may not be entered.
    #[error("cannot use {path} as a network namespace: {source}")]
    Namespace {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Configuration: attaching the host's own namespace.
    #[error(
        "{path} is the host's network namespace: a container that shares the host's network cannot be attached; run it with a network namespace"
    )]
    NamespaceIsHost {
        /// The path.
        path: PathBuf,
    },
    /// Configuration: another container has the process id or the name by now.
    #[error(
        "{path} is no longer the network namespace that was looked up: the container has stopped or was replaced; attach it again once it runs"
    )]
    NamespaceReplaced {
        /// The path.
        path: PathBuf,
    },
    /// Configuration of the host: nothing keeps a container from giving others, or the host, routes.
    #[error(
        "cannot stop device {device} in {place} from accepting router advertisements of containers: {source}; make /proc/sys writable for weft, or disable IPv6 there (sysctl net.ipv6.conf.default.disable_ipv6=1)"
    )]
    Routers {
        /// The device's name.
        device: String,
        /// The namespace, or this host.
        place: String,
        /// Why the setting cannot be written.
        source: io::Error,
    },
    /// Configuration of the host: a setting of a device cannot be read or written.
    #[error("cannot access the setting {path}: {source}; make /proc/sys writable for weft")]
    Setting {
        /// The setting's file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Configuration: the address is already on another device.
    #[error("address {address} is already on device {device} in {path}: choose another address")]
    AddressInUse {
        /// The address.
        address: IpAddr,
        /// The device that has it.
        device: String,
        /// The namespace.
        path: PathBuf,
    },
    /// Configuration: the network's range hides addresses that the host reaches by other routes.
    #[error(
        "the range {range} overlaps the host's route {route} via {interface}: choose another range (--ipalloc-range)"
    )]
    RangeOverlaps {
        /// The wanted range.
        range: IpNet,
        /// The route in the host's table.
        route: IpNet,
        /// The route's device.
        interface: String,
    },
    /// Configuration of the host: it cannot reach the peer.
    #[error("the host has no route to {remote}: check the address and the host's routing table")]
    NoRoute {
        /// The address.
        remote: IpAddr,
    },
    /// Configuration of the host: no Open vSwitch datapath.
    #[error(
        "the kernel has no Open vSwitch datapath: install and load the module openvswitch, or choose --switch bridge"
    )]
    OdpMissing,
    /// Configuration of the container: another program or its owner routes it out of the network.
    #[error(
        "the container has another {family} default route than the one through {interface}: remove that route, or leave the default route out"
    )]
    DefaultRoute {
        /// `IPv4` or `IPv6`.
        family: &'static str,
        /// The interface on the network.
        interface: String,
    },
    /// Configuration of the host: it cannot tell frames for other hosts from the rest in a container.
    #[error("cannot create a direct port for the container: {why}; choose --port-mode bridge")]
    NoDirectPort {
        /// The kernel's refusal.
        why: String,
    },
    /// The kernel does not accept the program that lets a container's frames bypass the bridge.
    #[error(
        "cannot create a shortcut, so all frames take the bridge: {why}; choose --port-mode bridge"
    )]
    NoShortcut {
        /// The kernel's refusal.
        why: String,
    },
    /// Configuration of the host: no VXLAN device that a datapath can steer.
    #[error(
        "the kernel cannot create the VXLAN device of the Open vSwitch datapath: {why}; install and load the module vxlan, or choose --switch bridge"
    )]
    VxlanMissing {
        /// The kernel's refusal.
        why: String,
    },
    /// Configuration: a second switch in one network namespace.
    #[error("another Weft uses an Open vSwitch datapath in this network namespace: stop it first")]
    SwitchTaken,
    /// The switch has ended.
    #[error("the Open vSwitch switch {name} has stopped: {why}")]
    SwitchStopped {
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
    /// The kernel lacks a feature that a VXLAN device needs.
    #[error(
        "the kernel cannot create the VXLAN device {device}: load the module vxlan (CONFIG_VXLAN), or use --engine userspace"
    )]
    NoVxlan {
        /// The device's name.
        device: String,
    },
    /// The kernel lacks data channel offload.
    #[error(
        "the kernel cannot create the ovpn device {device}: boot Linux 6.16 or later with the module ovpn (CONFIG_OVPN), or use a userspace engine"
    )]
    NoOvpn {
        /// The device's name.
        device: String,
    },
    /// Configuration: a network whose ports are isolated, on a datapath.
    #[error(
        "the Open vSwitch datapath cannot isolate the ports of network {vni}: launch this host with --switch bridge, or create the network without --isolated"
    )]
    NoIsolation {
        /// The network.
        vni: u32,
    },
    /// Us: a request for a network that the switch has never had, or has no longer.
    #[error(
        "the switch does not carry network {vni}: this is a bug in weft, or the network was just removed"
    )]
    NoNetwork {
        /// The network.
        vni: u32,
    },
    /// Configuration: another program's VXLAN device has the network's number.
    #[error(
        "another VXLAN device already has network {vni} on UDP port {port}: remove that device or change its VNI"
    )]
    VniTaken {
        /// The VXLAN network identifier.
        vni: u32,
        /// The UDP port.
        port: u16,
    },
    /// Configuration: another program has the UDP port.
    #[error(
        "UDP port {port} of device {device} is in use by another program or device: stop it, or make it use another port"
    )]
    UdpPortTaken {
        /// The UDP port.
        port: u16,
        /// The device's name.
        device: String,
    },
    /// Us: the kernel engine's task has ended.
    #[error("the kernel engine has stopped: launch weft again")]
    EngineGone,
    /// More than Weft takes.
    #[error("{table} are limited to {limit}: the rest is ignored")]
    TableFull {
        /// The kind of entry that exceeds the limit.
        table: String,
        /// The limit.
        limit: usize,
    },
    /// Configuration: a container has more addresses than the lock of its port takes.
    #[error(
        "{port} has {count} addresses, and the lock of a port takes {limit}: attach the container with fewer"
    )]
    LockTooLong {
        /// The port's device.
        port: String,
        /// How many addresses it has.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// The host's: a kernel that was built without IPsec.
    #[error("kernel does not support IPsec (CONFIG_XFRM_USER): load the module `xfrm_user`")]
    NoXfrm,
    /// The host's: a kernel without ESP.
    #[error(
        "kernel does not support ESP over {family}, or may not load its module: load `esp4` and `esp6`"
    )]
    NoEsp {
        /// IPv4 or IPv6.
        family: &'static str,
    },
    /// The host's: a kernel without this AEAD.
    #[error(
        "kernel does not support cipher {cipher}, or may not load its module: use another --cipher"
    )]
    NoCipher {
        /// The cipher's name in the CLI.
        cipher: &'static str,
        /// Whether the kernel knows the cipher and only a part of it is missing.
        known: bool,
    },
    /// The host's: a kernel before Linux 6.13.
    #[error("kernel does not support per-CPU IPsec states (RFC 9611, Linux 6.13): use one lane")]
    NoPerCpu,
    /// Another program's, or the peer chose an SPI twice.
    #[error(
        "an IPsec state for SPI {spi:#010x} to {destination} already exists: choose another SPI"
    )]
    SpiTaken {
        /// The SPI.
        spi: u32,
        /// The receiver's address.
        destination: IpAddr,
    },
    /// Another program's: it seals the same packets in its own way.
    #[error(
        "an IPsec policy from {from} to {to} UDP port {port} that Weft did not create already exists: remove it, or use --engine userspace"
    )]
    PolicyTaken {
        /// This host's address.
        from: IpAddr,
        /// The peer's.
        to: IpAddr,
        /// The UDP port.
        port: u16,
    },
    /// Another program's: it decides how packets to Weft's inner ports may come in.
    #[error(
        "an inbound IPsec policy from {from}/{prefix} to UDP port {port} that Weft did not create already exists: remove it, or use --engine userspace"
    )]
    EntryTaken {
        /// The network that its packets come from: its address.
        from: IpAddr,
        /// Length of its prefix.
        prefix: u8,
        /// The UDP port.
        port: u16,
    },
    /// Us, or the peer's offer: an IPsec state or policy that makes no sense.
    #[error("an IPsec state or policy cannot have {what}")]
    InvalidXfrm {
        /// The invalid part.
        what: &'static str,
    },
    /// Us: a frame that the kernel cannot send as a probe.
    #[error("a probe must be an Ethernet frame of {min} to {max} bytes, not {length}")]
    ProbeLength {
        /// Its length in bytes.
        length: usize,
        /// The shortest possible.
        min: usize,
        /// The longest possible.
        max: usize,
    },
    /// Configuration of the host: the program that writes the guard is not installed.
    #[error("cannot {doing}: the program nft is not installed; install the package nftables")]
    NftMissing {
        /// The step.
        doing: String,
    },
    /// nftables refused.
    #[error("nft refused to {doing}: {reason}")]
    NftRefused {
        /// The step.
        doing: String,
        /// Its first words.
        reason: String,
    },
    /// Configuration: another program's nftables table has the name that Weft wants.
    #[error(
        "an nftables table {family} {name} that Weft did not create already exists: remove or rename it"
    )]
    TableTaken {
        /// Its address family.
        family: String,
        /// Its name.
        name: String,
    },
    /// A program could not be run to its end.
    #[error("the program {program} failed to {doing}: {source}")]
    Program {
        /// The program.
        program: String,
        /// The step.
        doing: String,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("the kernel refused to {doing}: {source}{}", reason.as_ref().map(|r| format!(" ({r})")).unwrap_or_default())]
    Refused {
        /// The step that was refused.
        doing: String,
        /// The kernel's error number.
        source: io::Error,
        /// The kernel's own explanation, if it gave one.
        reason: Option<String>,
    },
    /// The kernel did not answer, or with something that cannot be read.
    #[error(
        "no readable answer from the kernel within {limit_ms} ms while trying to {doing}; the host may be overloaded: try again"
    )]
    TimedOut {
        /// The step.
        doing: String,
        /// The limit in milliseconds.
        limit_ms: u64,
    },
    /// The netlink socket itself failed.
    #[error("netlink socket failed while trying to {doing}: {source}")]
    Socket {
        /// The step.
        doing: String,
        /// The error of the socket call.
        source: io::Error,
    },
}

impl KernelError {
    /// Whether a program did not answer in time, so that nothing is known.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, Self::Program { source, .. } if source.kind() == io::ErrorKind::TimedOut)
    }
}

/// Maps a failure to open or enter the namespace at `path`.
pub(crate) fn namespace_error(path: &Path, source: io::Error) -> KernelError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => KernelError::NamespaceGone { path },
        io::ErrorKind::PermissionDenied => KernelError::NotPermitted {
            doing: format!("enter the network namespace {}", path.display()),
        },
        _ => KernelError::Namespace { path, source },
    }
}
