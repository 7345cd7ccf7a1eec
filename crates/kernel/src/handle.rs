//! The handle to the kernel's network configuration.

use std::{
    path::Path,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::Mutex;
use weft_io::{
    namespace::{self, Namespace},
    packet::PacketSocket,
};

use crate::{
    error::{KernelError, namespace_error},
    netlink::route::Socket,
};

/// A handle to the kernel's network configuration. Clones share one socket; calls from several
/// tasks are served one after another.
///
/// Dropping the future of a call is safe: the next call restores or completes.
#[derive(Clone)]
pub struct Kernel {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    socket: Socket,
    /// The namespace that the socket speaks with.
    pub(crate) home: Namespace,
    /// Held during a change of many steps, so that no other change sees it half done.
    pub(crate) reconcile: Mutex<()>,
    /// Likewise for nftables tables. A separate lock, because `nft` may take seconds and other changes must
    /// not wait for it.
    pub(crate) filters: Mutex<()>,
    /// Sends announcements of addresses on devices of `home`.
    pub(crate) announcer: OnceLock<PacketSocket>,
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
        let announcer = OnceLock::new();
        let inner = Inner { socket, home, reconcile, filters, announcer, changes };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// How many requests that change something this handle and its clones have sent since it was
    /// made. It does not grow while the kernel's state is as wanted.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.inner.changes.load(Ordering::Relaxed)
    }

    /// Counts a change that did not go through the socket.
    pub(crate) fn count_change(&self) {
        self.inner.changes.fetch_add(1, Ordering::Relaxed);
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

    /// Opens sockets in the namespace of this handle, on any thread.
    pub(crate) fn at_home<T: Send>(
        &self,
        open: impl FnOnce() -> Result<T, KernelError> + Send,
    ) -> Result<T, KernelError> {
        let runtime = tokio::runtime::Handle::current();
        let opened = namespace::run_in(&self.inner.home, || {
            let _guard = runtime.enter();
            open()
        });
        let doing = "open a socket in the host's network namespace";
        opened.map_err(|source| KernelError::Socket { doing: doing.into(), source })?
    }
}
