//! linux: wanted state -> kernel state: links, bridge, addresses, routes, neighbours, IPsec, ovpn.
//!
//! A [`Kernel`] speaks netlink with the network namespace of the thread that made it (the daemon's own).
//! Every call states the wanted configuration, reads the present one, and sends only the difference. So a
//! repeated call changes nothing, and a call after `kill -9` or after a deletion by others restores it. Weft
//! never changes objects of other programs. Devices of ours are in device group [`DEVICE_GROUP`] (set by the
//! kernel as it makes them) and carry the alias [`DEVICE_ALIAS`]. Neighbour entries and routes of ours carry
//! the protocol number [`ROUTE_PROTOCOL`]. If another program's device has a name that Weft wants, that is an
//! error.
#![forbid(unsafe_code)]

mod announce;
mod attach;
mod belongings;
mod bridge;
mod direct;
pub mod engine;
mod entries;
mod error;
mod forward;
mod generic;
mod groups;
mod guard;
mod ipv6;
mod late;
mod link;
mod mss;
mod nft;
mod nft_watch;
pub mod odp;
mod overlay;
pub mod ovpn;
mod port_watch;
mod route;
mod route_watch;
mod ruleset;
mod senders;
mod shortcut;
mod socket;
mod traffic;
mod tunnel;
mod vxlan;
mod watch;
pub mod xfrm;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::Mutex;
use weft_io::namespace::{self, Namespace};

use self::socket::Socket;
pub use self::{
    attach::{AttachSpec, Attached, Attachment, CONTAINER_MTU_MIN},
    bridge::{BridgeSpec, PortSpec},
    direct::{DIRECT_LOCAL_NAME, DirectTap},
    error::KernelError,
    forward::{FORWARD_COMMENT, ForwardRule},
    groups::{BROADCASTS_PER_S_MAX, GroupCounts, GroupLimit},
    guard::{GUARDED_PORTS, Guard, GuardCount, GuardCounters, SENT_PRIORITY, TRUSTED_MAX},
    ipv6::{NoIpv6, open_settings, settings_mount},
    link::{DEVICE_ALIAS, DEVICE_GROUP},
    mss::MssClamp,
    nft_watch::NftWatch,
    overlay::{ENDPOINT_ADDRESSES_MAX, ENDPOINTS_MAX, Overlay, OverlaySpec, Via},
    port_watch::{PortNotice, PortWatch},
    route::{HostRoute, Overlap, OverlapKind, ROUTE_PROTOCOL, RouteMtu},
    route_watch::{DeviceRoute, RouteWatch},
    ruleset::{Carried, Obstacle},
    senders::Senders,
    shortcut::{BridgePort, BridgePorts},
    traffic::LinkTraffic,
    tunnel::TunnelSpec,
    vxlan::{OuterFamily, VxlanSpec},
    watch::{LinkEvent, LinkWatch},
};

/// The smallest MTU of an overlay device, in bytes: the minimum of IPv6 (RFC 8200, section 5).
pub(crate) const MTU_MIN: u32 = 1280;
/// The largest MTU of an overlay device, in bytes: the limit of a veth and a bridge.
pub(crate) const MTU_MAX: u32 = 65_535;

/// A handle to the kernel's network configuration. Clones share one socket; calls from several
/// tasks are served one after another.
///
/// Dropping the future of a call is safe: the next call restores or completes.
#[derive(Clone)]
pub struct Kernel {
    inner: Arc<Inner>,
}

struct Inner {
    socket: Socket,
    /// The namespace that the socket speaks with.
    home: Namespace,
    /// Held during a change of many steps, so that no other change sees it half done.
    reconcile: Mutex<()>,
    /// Likewise for nftables tables. A separate lock, because `nft` may take seconds and other changes must
    /// not wait for it.
    filters: Mutex<()>,
    changes: Arc<AtomicU64>,
}

impl Kernel {
    /// Opens a netlink socket in the network namespace of the calling thread. Call it within a
    /// tokio runtime with I/O and time switched on, whose threads are all in that namespace.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket or `/proc` is not mounted.
    pub fn new() -> Result<Self, KernelError> {
        let failed = |source| KernelError::Socket { doing: "open a netlink socket".into(), source };
        let changes = Arc::new(AtomicU64::new(0));
        let socket = Socket::open(Arc::clone(&changes)).map_err(failed)?;
        let home = Namespace::current().map_err(failed)?;
        let (reconcile, filters) = (Mutex::new(()), Mutex::new(()));
        let inner = Inner { socket, home, reconcile, filters, changes };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How many requests that change something this handle and its clones have sent since it was
    /// made. It does not grow while the kernel's state is as wanted.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.inner.changes.load(Ordering::Relaxed)
    }

    pub(crate) fn socket(&self) -> &Socket {
        &self.inner.socket
    }

    /// A socket in another namespace. It counts its changes with ours.
    pub(crate) fn socket_in(&self, ns: &Namespace, path: &Path) -> Result<Socket, KernelError> {
        let failed = |source| namespace_error(path, source);
        let runtime = tokio::runtime::Handle::current();
        let changes = Arc::clone(&self.inner.changes);
        namespace::run_in(ns, || {
            let _guard = runtime.enter();
            Socket::open(changes)
        })
        .map_err(failed)?
        .map_err(failed)
    }
}

/// Maps a failure to open or enter the namespace at `path`.
pub(crate) fn namespace_error(path: &Path, source: std::io::Error) -> KernelError {
    let path = path.to_owned();
    match source.kind() {
        std::io::ErrorKind::NotFound => KernelError::NamespaceGone { path },
        std::io::ErrorKind::PermissionDenied => KernelError::NotPermitted {
            doing: format!("enter the network namespace {}", path.display()),
        },
        _ => KernelError::Namespace { path, source },
    }
}
