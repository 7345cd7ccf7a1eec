//! Sockets that outlive the daemon. While the sockets for ESP in UDP and for the data channel are open in any
//! process, the kernel takes packets from them. It hands them to its states and to its device's peers, which
//! stay when the daemon is killed.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use weft_io::IoError;
use weft_io::encap::{EncapSocket, Taker};

use super::worker::Worker;

/// Keeps sockets open while no daemon runs. Its methods may block for a moment. Each runs on a blocking
/// thread, one at a time.
pub trait SocketKeeper: Debug + Send + Sync {
    /// Returns the sockets kept for an earlier run, and continues to keep them.
    fn take(&self) -> Vec<OwnedFd>;
    /// Keeps these sockets instead of those kept before.
    fn keep(&self, sockets: Vec<OwnedFd>);
    /// Closes the kept sockets because they are no longer needed. When this returns, the port is free.
    fn release(&self);
}

impl Worker {
    /// Takes an earlier run's sockets: returns those for ESP in UDP, and keeps those of the data channel
    /// until they are needed.
    pub(super) async fn take_kept_sockets(&mut self) -> Vec<OwnedFd> {
        let kept = self.with_keeper(|keeper| keeper.take()).await.unwrap_or_default();
        let is_channels = |fd: &OwnedFd| port_of(fd) == Some(self.config.data_channel_port);
        let (channel, kept): (Vec<_>, Vec<_>) = kept.into_iter().partition(is_channels);
        if !self.lay_aside(channel) {
            // New ones need their port.
            self.release_sockets().await;
        }
        kept
    }

    /// An earlier run's sockets for ESP in UDP, if they fit the configuration; otherwise new ones. They are
    /// not kept yet.
    pub(super) async fn open_encapsulation(
        &self,
        kept: Vec<OwnedFd>,
    ) -> Result<EncapSocket, IoError> {
        let (host, port) = (self.config.host, self.config.encapsulation_port);
        if !kept.is_empty() {
            match EncapSocket::from_fds(Taker::Ipsec, kept) {
                Ok(socket) if socket.serves(host, port) => {
                    tracing::info!(port, "took back the sockets for ESP in UDP");
                    return Ok(socket);
                }
                Ok(_) => tracing::warn!(
                    port,
                    "the sockets kept for ESP in UDP have another address, port or network namespace; opening new ones"
                ),
                Err(error) => tracing::warn!(
                    %error,
                    "cannot use the sockets kept for ESP in UDP; opening new ones"
                ),
            }
            // The new ones may need their port.
            self.release_sockets().await;
        }
        EncapSocket::bind(Taker::Ipsec, host, port)
    }

    /// Takes the data channel's sockets of an earlier run, whose device is removed. False if they do not fit
    /// the configuration.
    fn lay_aside(&mut self, sockets: Vec<OwnedFd>) -> bool {
        if !self.config.ovpn || sockets.is_empty() {
            return sockets.is_empty();
        }
        let (host, port) = (self.config.host, self.config.data_channel_port);
        match EncapSocket::from_fds(Taker::DataChannel, sockets) {
            Ok(sockets) if sockets.serves(host, port) => {
                self.channel.sockets = Some(sockets);
                return true;
            }
            Ok(_) => tracing::warn!(
                port,
                "the sockets kept for the data channel have another address, port or network namespace"
            ),
            Err(error) => {
                tracing::warn!(%error, "cannot use the sockets kept for the data channel");
            }
        }
        false
    }

    /// From here on these sockets, and the data channel's if there are any, outlive the daemon.
    pub(super) async fn keep_sockets(&self, encapsulation: &EncapSocket) {
        let channel = self.channel.sockets.iter().flat_map(|sockets| sockets.fds());
        let fds = encapsulation.fds().chain(channel).map(|fd| fd.as_fd().try_clone_to_owned());
        let sockets: Result<Vec<OwnedFd>, _> = fds.collect();
        match sockets {
            Ok(sockets) => _ = self.with_keeper(move |keeper| keeper.keep(sockets)).await,
            Err(error) => tracing::warn!(%error, "cannot keep the kernel's sockets"),
        }
    }

    /// Nothing is led to the sockets any more.
    pub(super) async fn release_sockets(&self) {
        self.with_keeper(|keeper| keeper.release()).await;
    }

    /// Runs a call of the keeper and waits for it, so that its calls stay in the engine's order.
    async fn with_keeper<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn SocketKeeper) -> T + Send + 'static,
    ) -> Option<T> {
        let keeper = Arc::clone(self.config.keeper.as_ref()?);
        tokio::task::spawn_blocking(move || call(&*keeper)).await.ok()
    }
}

fn port_of(socket: &OwnedFd) -> Option<u16> {
    let name = rustix::net::getsockname(socket).ok()?;
    SocketAddr::try_from(name).ok().map(|local| local.port())
}
