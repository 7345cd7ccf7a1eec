//! linux: wanted state -> kernel state: links, bridge, addresses, routes, neighbours, IPsec, ovpn.
//!
//! A [`Kernel`] speaks netlink with the network namespace of the thread that made it (the daemon's own).
//! Every call states the wanted configuration, reads the present one, and sends only the difference. So a
//! repeated call changes nothing, and a call after `kill -9` or after a deletion by others restores it. Weft
//! never changes objects of other programs. Devices of ours are in device group [`DEVICE_GROUP`] (set by the
//! kernel as it makes them) and carry the alias [`DEVICE_ALIAS`]. Neighbour entries and routes of ours carry
//! the protocol number [`ROUTE_PROTOCOL`]. If another program's device has a name that Weft wants, that is an
//! error.
//!
//! Each folder uses those before it only:
//!
//! | folder | holds |
//! | --- | --- |
//! | `netlink` | sockets, the exchange of request and answer, attributes, notices |
//! | `net` | devices, addresses, routes, neighbour entries, and the watches over them; containers' interfaces |
//! | [`xfrm`] | IPsec states and policies |
//! | [`ovpn`] | the data channel's device, its peers and keys |
//! | `firewall` | the tables of nftables that Weft writes, and the verdicts of the host's own rules |
//! | `switch` | forwarding of frames: the overlay of a bridge, the datapath [`odp`], limits on group frames, direct ports |
//! | [`engine`] | the kernel engine |
#![forbid(unsafe_code)]

pub mod engine;
mod error;
mod firewall;
mod handle;
mod net;
mod netlink;
pub mod ovpn;
mod switch;
pub mod xfrm;

pub use self::{
    error::KernelError,
    firewall::{
        clients::{ClientRules, ClientWays},
        forward::{FORWARD_COMMENT, ForwardRule},
        guard::{GUARDED_PORTS, Guard, GuardCount, GuardCounters, SENT_PRIORITY, TRUSTED_MAX},
        masquerade::{ExposedInterface, Forwarding, Masquerade},
        mss::MssClamp,
        nft_watch::NftWatch,
        port_locks::{LockCounts, PORT_LOCKS_MAX, PortLocks},
        ruleset::{Carried, CarriedBridge, Obstacle},
        senders::Senders,
    },
    handle::Kernel,
    net::{
        addresses::DeviceAddresses,
        attach::{AttachSpec, Attached, Attachment, CONTAINER_MTU_MIN, DIRECT_LOCAL_NAME},
        bridge::{BridgeSpec, PortSpec},
        clients::{ClientsChange, ClientsSpec, LeftOut},
        devices::{CLIENTS_DEVICE, NetworkDevices},
        ipv6::{NoIpv6, open_settings, settings_mount},
        link::{DEVICE_ALIAS, DEVICE_GROUP},
        link_watch::{LinkEvent, LinkWatch},
        pair::Inspected,
        port_watch::{PortNotice, PortWatch},
        route::{HostRoute, Overlap, OverlapKind, ROUTE_PROTOCOL, RouteMtu},
        route_watch::{DeviceRoute, RouteWatch},
        traffic::LinkTraffic,
        tunnel::TunnelSpec,
        vpn::{NextHop, VpnRoute, VpnSpec},
        vxlan::{OuterFamily, VxlanSpec},
    },
    switch::{
        direct::DirectTap,
        groups::{BROADCASTS_PER_S_MAX, GroupCounts, GroupLimit},
        odp,
        overlay::{ENDPOINT_ADDRESSES_MAX, ENDPOINTS_MAX, Overlay, OverlaySpec, Via},
        port_lock::{LOCK_ADDRESSES_MAX, PortLock},
        shortcut::{BridgePort, BridgePorts},
    },
};
