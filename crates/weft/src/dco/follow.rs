//! Events of a device, and the reactions to them.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use serde_json::json;
use tokio::sync::Notify;
use weft_daemon::dco::{DataDevice, KernelDevice, KernelNews};
use weft_engine::dco::{Device, Route};
use weft_kernel::{DeviceRoute, Kernel, KernelError};
use weft_openvpn::device::{Notice, Notification};

use super::held::{Follows, Held};
use super::task::lock;

/// Pause before watching is retried.
const RETRY: Duration = Duration::from_secs(2);

impl Held {
    /// Follows the device forever: its peers' notices, and the system's routes if the device does not read them.
    pub(super) async fn follow(&self) -> Infallible {
        match (&self.device, &self.follows) {
            (DataDevice::Kernel(device), Follows::Watch(watch)) => {
                let mut watch = watch.lock().await;
                device.follow(&mut watch, &|news| self.tell(device, news)).await
            }
            (DataDevice::Userspace(device), Follows::Gone(gone)) => tokio::select! {
                never = self.follow_routes(device) => never,
                never = self.follow_ends(device, gone) => never,
            },
            // Neither is made.
            (DataDevice::Kernel(_), Follows::Gone(_))
            | (DataDevice::Userspace(_), Follows::Watch(_)) => std::future::pending().await,
        }
    }

    /// Reports news of the kernel's device, and drops the record of a peer that is gone, with its connection and socket.
    fn tell(&self, device: &KernelDevice, news: KernelNews) {
        let gone = match news {
            KernelNews::Told(what) => {
                let gone = match what {
                    Notification::PeerDeleted { peer_id, .. } => Some(peer_id),
                    Notification::KeySwap { .. } | Notification::PeerFloat { .. } => None,
                };
                self.lines.tell(&Notice { device: self.index, what });
                gone
            }
            KernelNews::Lost => {
                self.lines.say(&json!({"name": "lost", "msg": {"ifindex": self.index}}));
                None
            }
            KernelNews::Gone { peer_id } => {
                self.lines.tell_gone(self.index, peer_id);
                Some(peer_id)
            }
        };
        // The notice may be late, and the id may be another peer's by now.
        if let Some(id) = gone.filter(|id| !device.knows(*id)) {
            lock(&self.book).remove(id);
        }
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
