//! Sockets that outlive the daemon: while those for ESP in UDP are open in any process, the kernel
//! takes packets from them and hands them to its states, which stay when the daemon is killed.

use std::fmt::Debug;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use weft_io::IoError;
use weft_io::encap::EncapSocket;

use super::worker::Worker;

/// Somebody who keeps sockets open while no daemon runs. Its methods may block for a moment; each is
/// called on a thread of its own, one at a time.
pub trait SocketKeeper: Debug + Send + Sync {
    /// Gives back what was kept for an earlier run, and goes on keeping it.
    fn take(&self) -> Vec<OwnedFd>;
    /// Keeps these instead of what was kept before.
    fn keep(&self, sockets: Vec<OwnedFd>);
    /// Closes what is kept: it is not needed any more. When this returns, the port is free.
    fn release(&self);
}

impl Worker {
    /// The sockets that an earlier run has left, if they are what is wanted; else new ones. They are
    /// not kept yet.
    pub(super) async fn open_encapsulation(&self) -> Result<EncapSocket, IoError> {
        let (host, port) = (self.config.host, self.config.encapsulation_port);
        let kept = self.with_keeper(|keeper| keeper.take()).await.unwrap_or_default();
        if !kept.is_empty() {
            match EncapSocket::from_fds(kept) {
                Ok(socket) if socket.serves(host, port) => {
                    tracing::info!(port, "took back the sockets for ESP in UDP");
                    return Ok(socket);
                }
                Ok(_) => tracing::warn!(
                    port,
                    "the sockets kept for ESP in UDP are of another address, port or network \
                     namespace; opening new ones"
                ),
                Err(error) => tracing::warn!(
                    %error,
                    "the sockets kept for ESP in UDP are of no use; opening new ones"
                ),
            }
            // The new ones may need their port.
            self.release_encapsulation().await;
        }
        EncapSocket::bind(host, port)
    }

    /// From here on the sockets outlive the daemon.
    pub(super) async fn keep_encapsulation(&self, socket: &EncapSocket) {
        match socket.fds().map(|fd| fd.as_fd().try_clone_to_owned()).collect() {
            Ok(sockets) => _ = self.with_keeper(move |keeper| keeper.keep(sockets)).await,
            Err(error) => tracing::warn!(%error, "the sockets for ESP in UDP are not kept"),
        }
    }

    /// Nothing is led to the sockets any more.
    pub(super) async fn release_encapsulation(&self) {
        self.with_keeper(|keeper| keeper.release()).await;
    }

    /// The engine goes on only afterwards: what is kept follows its orders in their order.
    async fn with_keeper<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn SocketKeeper) -> T + Send + 'static,
    ) -> Option<T> {
        let keeper = Arc::clone(self.config.keeper.as_ref()?);
        tokio::task::spawn_blocking(move || call(&*keeper)).await.ok()
    }
}
