//! Usage limits for keys of the kernel's device, which itself limits only packet ids.

use std::convert::Infallible;
use std::time::Duration;

use weft_kernel::ovpn::OvpnClient;
use weft_openvpn::device::{Notice, Notification};

use super::held::{Held, is_gone};
use super::task::lock;

/// Interval between two readings of the device's counters: at 100 Gbit/s a key uses a fiftieth of its limit
/// meanwhile.
const READING: Duration = Duration::from_secs(2);

impl Held {
    /// Deletes used-up keys of the kernel's device, and reports each as the device does when packet ids run
    /// out. Runs forever.
    pub(super) async fn watch_limits(&self, client: &OvpnClient) -> Infallible {
        loop {
            tokio::time::sleep(READING).await;
            if lock(&self.book).has_limits() {
                self.end_used_up(client).await;
            }
        }
    }

    async fn end_used_up(&self, client: &OvpnClient) {
        let _one = self.changes.lock().await;
        let peers = match client.peers(self.index).await {
            Ok(peers) => peers,
            Err(error) => {
                // Without a device there are no keys to check.
                if !is_gone(&error) {
                    tracing::warn!(%error, device = %self.name, "cannot read its counters");
                }
                return;
            }
        };
        let used_up = lock(&self.book).used_up(&peers);
        for (peer_id, slot, key_id) in used_up {
            match client.delete_key(self.index, peer_id, slot).await {
                Err(error) if !is_gone(&error) => {
                    tracing::warn!(%error, peer = peer_id, key = key_id, "cannot delete an exhausted key");
                    continue;
                }
                _ => {}
            }
            lock(&self.book).set_key(peer_id, slot, None);
            let what = Notification::KeySwap { peer_id, key_id };
            self.lines.tell(&Notice { device: self.index, what });
        }
    }
}
