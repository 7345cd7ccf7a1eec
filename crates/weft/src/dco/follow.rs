//! Events of a device, and the reactions to them.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Notify;
use weft_engine::dco::{Device, Route};
use weft_kernel::ovpn::{Missed, OvpnClient, OvpnError, OvpnWatch, Refusal, Watched};
use weft_kernel::{DeviceRoute, Kernel, KernelError};
use weft_openvpn::device::{Notice, Notification};

use super::held::{Either, Held, is_gone};
use super::task::lock;

/// Pause before watching or comparing is retried.
const RETRY: Duration = Duration::from_secs(2);
/// The time without a notice after which all surviving notices have been read.
const QUIET: Duration = Duration::from_millis(20);
/// Notices read at most before the search for lost ones: more than the watch's buffer holds.
const REST_MAX: usize = 16_384;

impl Held {
    /// Follows the device forever: its peers' notices, key usage if the device has no limit, and the system's
    /// routes if the device does not read them.
    pub(super) async fn follow(&self) -> Infallible {
        match &self.device {
            Either::Kernel { client, watch } => {
                let mut watch = watch.lock().await;
                tokio::select! {
                    never = self.follow_notices(client, &mut watch) => never,
                    never = self.watch_limits(client) => never,
                }
            }
            Either::Userspace { device, gone } => tokio::select! {
                never = self.follow_routes(device) => never,
                never = self.follow_ends(device, gone) => never,
            },
        }
    }

    /// Reports the kernel's notices about the device.
    async fn follow_notices(&self, client: &OvpnClient, watch: &mut OvpnWatch) -> Infallible {
        loop {
            match watch.next().await {
                Ok(Watched::Notice(notice)) => self.take(client, &notice).await,
                Ok(Watched::Lost) => {
                    self.take_rest(client, watch).await;
                    self.resynchronise(client).await;
                }
                Err(error) => {
                    tracing::warn!(%error, device = %self.name, "cannot watch its peers now");
                    tokio::time::sleep(RETRY).await;
                    if let Ok(new) = OvpnWatch::open().await {
                        *watch = new;
                        self.resynchronise(client).await;
                    }
                }
            }
        }
    }

    /// Reads the notices that were not lost, so that they are reported as they are.
    async fn take_rest(&self, client: &OvpnClient, watch: &mut OvpnWatch) {
        for _ in 0..REST_MAX {
            match tokio::time::timeout(QUIET, watch.next()).await {
                Ok(Ok(Watched::Notice(notice))) => self.take(client, &notice).await,
                Ok(Ok(Watched::Lost)) => {}
                // No further notice; or an error, which will recur.
                Err(_) | Ok(Err(_)) => return,
            }
        }
    }

    /// Reports a notice, and reacts to it.
    async fn take(&self, client: &OvpnClient, notice: &Notice) {
        if notice.device != self.index {
            return;
        }
        self.lines.tell(notice);
        match notice.what {
            Notification::PeerDeleted { peer_id, .. } => self.drop_gone(client, peer_id).await,
            Notification::KeySwap { peer_id, key_id } => {
                lock(&self.book).key_gone(peer_id, key_id);
            }
            Notification::PeerFloat { peer_id, remote } => lock(&self.book).moved(peer_id, remote),
        }
    }

    /// Drops the record of a peer that is gone, with its connection and socket. The notice may be late, and
    /// the id may belong to another peer by now.
    async fn drop_gone(&self, client: &OvpnClient, id: u32) {
        let _one = self.changes.lock().await;
        let is_kept = lock(&self.book).contains(id);
        if !is_kept {
            return;
        }
        match client.peer(self.index, id).await {
            Ok(_) => {}
            Err(error) if is_gone(&error) => lock(&self.book).remove(id),
            Err(error) => {
                tracing::warn!(peer = id, %error, "the record of a deleted peer may stay");
            }
        }
    }

    /// After lost notices: reports their content as far as it can be inferred.
    async fn resynchronise(&self, client: &OvpnClient) {
        self.lines.say(&json!({"name": "lost", "msg": {"ifindex": self.index}}));
        while let Err(error) = self.tell_missed(client).await {
            tracing::warn!(%error, device = %self.name, "cannot read the state of its peers");
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn tell_missed(&self, client: &OvpnClient) -> Result<(), OvpnError> {
        let _one = self.changes.lock().await;
        let known = lock(&self.book).known();
        let missed = match client.resynchronise(self.index, &known).await {
            // All peers went with the device.
            Err(error) if error.refusal() == Some(Refusal::NoDevice) => {
                known.iter().map(|peer| Missed::PeerGone { peer_id: peer.id }).collect()
            }
            missed => missed?,
        };
        for missed in missed {
            let what = match missed {
                Missed::PeerGone { peer_id } => {
                    self.lines.tell_gone(self.index, peer_id);
                    lock(&self.book).remove(peer_id);
                    continue;
                }
                Missed::KeyGone { peer_id, key_id } => {
                    lock(&self.book).key_gone(peer_id, key_id);
                    Notification::KeySwap { peer_id, key_id }
                }
                Missed::PeerMoved { peer_id, remote } => {
                    lock(&self.book).moved(peer_id, remote);
                    Notification::PeerFloat { peer_id, remote }
                }
            };
            self.lines.tell(&Notice { device: self.index, what });
        }
        Ok(())
    }

    /// Drops the records of peers that are gone from a device in userspace.
    async fn follow_ends(&self, device: &Device, gone: &Notify) -> Infallible {
        loop {
            gone.notified().await;
            let _one = self.changes.lock().await;
            // A removed device has no peers.
            let peers = device.peers().unwrap_or_default();
            let ids: BTreeSet<u32> = peers.iter().map(|peer| peer.id).collect();
            lock(&self.book).retain(|id| ids.contains(&id));
        }
    }

    async fn follow_routes(&self, device: &Device) -> Infallible {
        loop {
            let Err(error) = self.give_routes(device).await;
            tracing::warn!(%error, device = %self.name, "cannot follow its routes now");
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn give_routes(&self, device: &Device) -> Result<Infallible, KernelError> {
        let mut watch = Kernel::new()?.watch_routes(self.index)?;
        loop {
            let routes = watch.next().await?;
            let route = |route: &DeviceRoute| Route {
                destination: (route.destination.addr(), route.destination.prefix_len()),
                gateway: route.gateway,
                metric: route.metric,
            };
            let left_out = device.set_routes(&routes.iter().map(route).collect::<Vec<_>>());
            if left_out > 0 {
                tracing::warn!(left_out, device = %self.name, "it does not accept all its routes");
            }
        }
    }
}
