//! The kernel's device: what it does not do by itself is done here. It neither limits the use of keys nor repeats lost
//! notices.

use std::convert::Infallible;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use weft_kernel::ovpn::{Missed, OvpnClient, OvpnDevice, OvpnError, OvpnWatch, Refusal, Watched};
use weft_openvpn::device::{
    KeyAttributes, KeyState, Mode, Notification, PeerAttributes, PeerState, Slot,
};

use super::book::{Book, remote_of};
use super::keys::Key;

/// Pause before watching or comparing is retried.
const RETRY: Duration = Duration::from_secs(2);
/// The time without a notice after which all surviving notices have been read.
const QUIET: Duration = Duration::from_millis(20);
/// Notices read at most before the search for lost ones: more than the watch's buffer holds.
const REST_MAX: usize = 16_384;
/// Interval between two readings of the device's counters: at 100 Gbit/s a key uses a fiftieth of its limit
/// meanwhile.
const READING: Duration = Duration::from_secs(2);
/// Peers of a device with many that are deleted at a time: the kernel waits for other processors each time.
const DELETIONS_AT_ONCE: usize = 8;

/// Learns of news. It must not wait.
type Tell<'a> = &'a (dyn Fn(KernelNews) + Sync);

/// A device of the kernel's, with its one user's requests.
pub struct KernelDevice {
    client: OvpnClient,
    /// Separate sockets, so that deletions hold up nothing else.
    deleters: Vec<OvpnClient>,
    next_deleter: AtomicUsize,
    index: u32,
    mode: Mode,
    /// Not held across an await.
    book: Mutex<Book>,
    /// Allows one change of keys at a time, so that the book matches the device.
    changes: tokio::sync::Mutex<()>,
}

/// Something that happened at the device unasked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelNews {
    /// An event of a peer, as the device reports it.
    Told(Notification),
    /// Notices were lost; those that follow were found by comparing.
    Lost,
    /// A peer is gone, and the reason is lost.
    Gone {
        /// Its id.
        peer_id: u32,
    },
}

impl KernelDevice {
    /// Takes a device that no one else uses.
    ///
    /// # Errors
    /// [`OvpnError`]: the kernel cannot be asked.
    pub async fn new(device: &OvpnDevice) -> Result<Self, OvpnError> {
        let mut deleters = Vec::new();
        let count = if device.mode == Mode::Mp { DELETIONS_AT_ONCE } else { 1 };
        for _ in 0..count {
            deleters.push(OvpnClient::open().await?);
        }
        Ok(Self {
            client: OvpnClient::open().await?,
            deleters,
            next_deleter: AtomicUsize::new(0),
            index: device.index,
            mode: device.mode,
            book: Mutex::default(),
            changes: tokio::sync::Mutex::default(),
        })
    }

    /// Follows the device for ever: `tell` learns of its peers' notices, and of keys that are used up, which are deleted
    /// as the device does when packet ids run out.
    pub async fn follow(&self, watch: &mut OvpnWatch, tell: Tell<'_>) -> Infallible {
        tokio::select! {
            never = self.follow_notices(watch, tell) => never,
            never = self.watch_limits(tell) => never,
        }
    }

    /// Whether a peer was made and has not been seen to go.
    pub fn knows(&self, id: u32) -> bool {
        self.book().contains(id)
    }

    pub(super) async fn new_peer(
        &self,
        socket: BorrowedFd<'_>,
        attributes: &PeerAttributes,
    ) -> Result<(), OvpnError> {
        let _one = self.changes.lock().await;
        self.client.new_peer(self.index, socket, attributes).await?;
        let mut book = self.book();
        // The only peer is replaced.
        if self.mode == Mode::P2p {
            book.clear();
        }
        if let Some(id) = attributes.id {
            book.insert(id, remote_of(attributes));
        }
        Ok(())
    }

    pub(super) async fn set_peer(&self, attributes: &PeerAttributes) -> Result<(), OvpnError> {
        self.client.set_peer(self.index, attributes).await?;
        if let (Some(id), Some(remote)) = (attributes.id, remote_of(attributes)) {
            self.book().moved(id, remote);
        }
        Ok(())
    }

    pub(super) async fn delete_peer(&self, id: u32) -> Result<(), OvpnError> {
        let kept = self.book().remove(id);
        let next = self.next_deleter.fetch_add(1, Ordering::Relaxed);
        let deleter = self.deleters.get(next % self.deleters.len().max(1));
        let deleted = deleter.unwrap_or(&self.client).delete_peer(self.index, id).await;
        if let (Err(error), Some(kept)) = (&deleted, kept)
            && !is_gone(error)
        {
            self.book().put_back(id, kept);
        }
        deleted
    }

    pub(super) async fn peer(&self, id: u32) -> Result<PeerState, OvpnError> {
        self.client.peer(self.index, id).await
    }

    pub(super) async fn peers(&self) -> Result<Vec<PeerState>, OvpnError> {
        self.client.peers(self.index).await
    }

    pub(super) async fn new_key(&self, attributes: &KeyAttributes) -> Result<(), OvpnError> {
        let _one = self.changes.lock().await;
        // If the peer is missing, the next request says so.
        let before = match attributes.peer_id {
            Some(id) => self.peer(id).await.map(|peer| peer.link).unwrap_or_default(),
            None => Default::default(),
        };
        self.client.new_key(self.index, attributes).await?;
        let bytes = attributes.encrypt.as_ref().map_or(0, |direction| direction.cipher_key.len());
        let cipher = attributes.cipher.and_then(|cipher| cipher.with_key_bytes(bytes));
        if let (Some(id), Some(slot), Some(key_id), Some(cipher)) =
            (attributes.peer_id, attributes.slot, attributes.key_id, cipher)
        {
            self.book().set_key(id, slot, Some(Key::new(key_id, cipher, before)));
        }
        Ok(())
    }

    pub(super) async fn key(&self, id: u32, slot: Slot) -> Result<KeyState, OvpnError> {
        self.client.key(self.index, id, slot).await
    }

    pub(super) async fn swap_keys(&self, id: u32) -> Result<(), OvpnError> {
        let _one = self.changes.lock().await;
        self.client.swap_keys(self.index, id).await?;
        self.book().swap_keys(id);
        Ok(())
    }

    pub(super) async fn delete_key(&self, id: u32, slot: Slot) -> Result<(), OvpnError> {
        let _one = self.changes.lock().await;
        self.client.delete_key(self.index, id, slot).await?;
        self.book().set_key(id, slot, None);
        Ok(())
    }

    async fn follow_notices(&self, watch: &mut OvpnWatch, tell: Tell<'_>) -> Infallible {
        loop {
            match watch.next().await {
                Ok(Watched::Notice(notice)) if notice.device == self.index => {
                    self.take(notice.what, tell).await;
                }
                Ok(Watched::Notice(_)) => {}
                Ok(Watched::Lost) => {
                    self.take_rest(watch, tell).await;
                    self.resynchronise(tell).await;
                }
                Err(error) => {
                    tracing::warn!(%error, device = self.index, "cannot watch the device's peers now");
                    tokio::time::sleep(RETRY).await;
                    if let Ok(new) = OvpnWatch::open().await {
                        *watch = new;
                        self.resynchronise(tell).await;
                    }
                }
            }
        }
    }

    /// Reads the notices that were not lost, so that they are reported as they are.
    async fn take_rest(&self, watch: &mut OvpnWatch, tell: Tell<'_>) {
        for _ in 0..REST_MAX {
            match tokio::time::timeout(QUIET, watch.next()).await {
                Ok(Ok(Watched::Notice(notice))) if notice.device == self.index => {
                    self.take(notice.what, tell).await;
                }
                Ok(Ok(_)) => {}
                // No further notice; or an error, which will recur.
                Err(_) | Ok(Err(_)) => return,
            }
        }
    }

    async fn take(&self, what: Notification, tell: Tell<'_>) {
        match what {
            Notification::PeerDeleted { peer_id, .. } => self.drop_gone(peer_id).await,
            Notification::KeySwap { peer_id, key_id } => self.book().key_gone(peer_id, key_id),
            Notification::PeerFloat { peer_id, remote } => self.book().moved(peer_id, remote),
        }
        tell(KernelNews::Told(what));
    }

    /// Drops the record of a peer that is gone. The notice may be late, and the id may be another peer's by now.
    async fn drop_gone(&self, id: u32) {
        let _one = self.changes.lock().await;
        let is_kept = self.book().contains(id);
        if is_kept && self.peer(id).await.is_err_and(|error| is_gone(&error)) {
            self.book().remove(id);
        }
    }

    /// After lost notices: tells their content as far as it can be inferred.
    async fn resynchronise(&self, tell: Tell<'_>) {
        tell(KernelNews::Lost);
        while let Err(error) = self.tell_missed(tell).await {
            tracing::warn!(%error, device = self.index, "cannot read the state of the device's peers");
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn tell_missed(&self, tell: Tell<'_>) -> Result<(), OvpnError> {
        let _one = self.changes.lock().await;
        let known = self.book().known();
        let missed = match self.client.resynchronise(self.index, &known).await {
            // All peers went with the device.
            Err(error) if error.refusal() == Some(Refusal::NoDevice) => {
                known.iter().map(|peer| Missed::PeerGone { peer_id: peer.id }).collect()
            }
            missed => missed?,
        };
        for missed in missed {
            tell(match missed {
                Missed::PeerGone { peer_id } => {
                    // One that was asked to go needs no word.
                    if self.book().remove(peer_id).is_none() {
                        continue;
                    }
                    KernelNews::Gone { peer_id }
                }
                Missed::KeyGone { peer_id, key_id } => {
                    self.book().key_gone(peer_id, key_id);
                    KernelNews::Told(Notification::KeySwap { peer_id, key_id })
                }
                Missed::PeerMoved { peer_id, remote } => {
                    self.book().moved(peer_id, remote);
                    KernelNews::Told(Notification::PeerFloat { peer_id, remote })
                }
            });
        }
        Ok(())
    }

    async fn watch_limits(&self, tell: Tell<'_>) -> Infallible {
        loop {
            tokio::time::sleep(READING).await;
            let has_limits = self.book().has_limits();
            if has_limits {
                self.end_used_up(tell).await;
            }
        }
    }

    async fn end_used_up(&self, tell: Tell<'_>) {
        let _one = self.changes.lock().await;
        let peers = match self.peers().await {
            Ok(peers) => peers,
            Err(error) => {
                // Without a device there are no keys to check.
                if !is_gone(&error) {
                    tracing::warn!(%error, device = self.index, "cannot read the device's counters");
                }
                return;
            }
        };
        let used_up = self.book().used_up(&peers);
        for (peer_id, slot, key_id) in used_up {
            match self.client.delete_key(self.index, peer_id, slot).await {
                Err(error) if !is_gone(&error) => {
                    tracing::warn!(%error, peer = peer_id, key = key_id, "cannot delete an exhausted key");
                    continue;
                }
                _ => {}
            }
            self.book().set_key(peer_id, slot, None);
            tell(KernelNews::Told(Notification::KeySwap { peer_id, key_id }));
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the subject of a request no longer exists.
pub(super) fn is_gone(error: &OvpnError) -> bool {
    matches!(error.refusal(), Some(Refusal::Absent | Refusal::NoDevice))
}
