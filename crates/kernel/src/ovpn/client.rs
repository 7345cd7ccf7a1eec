//! Requests to the kernel's `ovpn` device.

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    sync::Arc,
};

use tokio::sync::Mutex;
use weft_openvpn::device::{KeyAttributes, KeyState, PeerAttributes, PeerState, Slot};

use super::{OvpnError, Refusal, codec, look_up, open};
use crate::netlink::{generic::Requests, writer::Writer};

/// A handle to the `ovpn` devices of a network namespace. Clones share one socket; calls from several
/// tasks are served one after another.
///
/// A device is named by its interface index. A refusal of the kernel is returned as [`OvpnError::Refused`]
/// with the error number and its meaning, and the client stays usable. Dropping the future of a call is safe:
/// the request was either carried out or not.
#[derive(Clone)]
pub struct OvpnClient {
    inner: Arc<Inner>,
}

struct Inner {
    family: u16,
    requests: Mutex<Requests>,
}

impl OvpnClient {
    /// Opens a socket in the network namespace of the thread that first polls the future, and has the
    /// kernel load the module. Call it within a tokio runtime with I/O and time switched on.
    ///
    /// # Errors
    /// [`OvpnError::Missing`] if this kernel has no such devices, [`OvpnError::Socket`],
    /// [`OvpnError::TimedOut`].
    pub async fn open() -> Result<Self, OvpnError> {
        let mut requests = open()?;
        let family = look_up(&mut requests).await?.id;
        Ok(Self { inner: Arc::new(Inner { family, requests: Mutex::new(requests) }) })
    }

    /// Makes a peer that is reached by a socket of this process: UDP, which peers of one device may share, or
    /// a dedicated TCP connection. The peer is deleted once no process has the socket open. On a device in
    /// mode `p2p` the peer replaces the previous one.
    ///
    /// A watch gets no notice when the other end closes a connection in good order. Reading from the socket
    /// then fails with EPIPE. The kernel deletes the peer when its next packet to it is refused.
    ///
    /// With a keepalive it takes two requests: a future dropped between them may leave a peer that never expires.
    ///
    /// # Errors
    /// [`OvpnError`]; `docs/design/ovpn.md` has the refusals.
    pub async fn new_peer(
        &self,
        device: u32,
        socket: BorrowedFd<'_>,
        attributes: &PeerAttributes,
    ) -> Result<(), OvpnError> {
        let doing = format!("make {} on device {device}", peer_name(attributes.id));
        // A borrowed descriptor is open, and so not negative.
        let socket = socket.as_raw_fd().cast_unsigned();
        let request = codec::new_peer(self.inner.family, device, socket, attributes);
        self.run(request, doing).await?;
        self.begin_keepalive(device, attributes).await
    }

    /// Changes a peer's addresses, transmit id or keepalive; absent attributes stay as they are.
    ///
    /// # Errors
    /// [`OvpnError`]; [`Refusal::Absent`](super::Refusal::Absent) if there is no such peer.
    pub async fn set_peer(
        &self,
        device: u32,
        attributes: &PeerAttributes,
    ) -> Result<(), OvpnError> {
        let doing = format!("change {} of device {device}", peer_name(attributes.id));
        let request = codec::set_peer(self.inner.family, device, attributes);
        self.run(request, doing).await.map(|_| ())
    }

    /// One peer, with its counters.
    ///
    /// # Errors
    /// [`OvpnError`]; [`Refusal::Absent`](super::Refusal::Absent) if there is no such peer.
    pub async fn peer(&self, device: u32, id: u32) -> Result<PeerState, OvpnError> {
        let doing = format!("read peer {id} of device {device}");
        let found = self.run(codec::get_peer(self.inner.family, device, id), doing.clone()).await?;
        found.first().and_then(|body| codec::peer(body)).ok_or(OvpnError::Unreadable { doing })
    }

    /// All peers of a device, in no order.
    ///
    /// # Errors
    /// [`OvpnError`].
    pub async fn peers(&self, device: u32) -> Result<Vec<PeerState>, OvpnError> {
        let request = codec::dump_peers(self.inner.family, device);
        let found = self.inner.requests.lock().await.dump(request).await;
        let doing = || format!("list the peers of device {device}");
        let found = found.map_err(|error| OvpnError::new(error, doing()))?;
        Ok(found.iter().filter_map(|body| codec::peer(body)).collect())
    }

    /// Deletes a peer with its keys; watches get a notice.
    ///
    /// # Errors
    /// [`OvpnError`]; [`Refusal::Absent`](super::Refusal::Absent) if there is no such peer.
    pub async fn delete_peer(&self, device: u32, id: u32) -> Result<(), OvpnError> {
        let doing = format!("delete peer {id} of device {device}");
        self.run(codec::delete_peer(self.inner.family, device, id), doing).await.map(|_| ())
    }

    /// Puts a key into a slot of a peer, in place of the present one.
    ///
    /// # Errors
    /// [`OvpnError`]; [`Refusal::Absent`](super::Refusal::Absent) if there is no such peer.
    pub async fn new_key(&self, device: u32, attributes: &KeyAttributes) -> Result<(), OvpnError> {
        let whose = peer_name(attributes.peer_id);
        let doing = format!("give a key to {whose} of device {device}");
        let request = codec::new_key(self.inner.family, device, attributes);
        self.run(request, doing).await.map(|_| ())
    }

    /// The key in a slot of a peer.
    ///
    /// # Errors
    /// [`OvpnError`]; [`Refusal::Absent`](super::Refusal::Absent) if there is no such peer or no key in
    /// the slot.
    pub async fn key(&self, device: u32, peer_id: u32, slot: Slot) -> Result<KeyState, OvpnError> {
        let doing = format!("read the {slot} key of peer {peer_id} of device {device}");
        let request = codec::get_key(self.inner.family, device, peer_id, slot);
        let found = self.run(request, doing.clone()).await?;
        found.first().and_then(|body| codec::key(body)).ok_or(OvpnError::Unreadable { doing })
    }

    /// Exchanges the primary and the secondary key of a peer.
    ///
    /// # Errors
    /// [`OvpnError`]; [`Refusal::Absent`](super::Refusal::Absent) if there is no such peer.
    pub async fn swap_keys(&self, device: u32, peer_id: u32) -> Result<(), OvpnError> {
        let doing = format!("swap the keys of peer {peer_id} of device {device}");
        self.run(codec::swap_keys(self.inner.family, device, peer_id), doing).await.map(|_| ())
    }

    /// Empties a slot of a peer.
    ///
    /// # Errors
    /// [`OvpnError`]; [`Refusal::Absent`](super::Refusal::Absent) if there is no such peer.
    pub async fn delete_key(&self, device: u32, peer_id: u32, slot: Slot) -> Result<(), OvpnError> {
        let doing = format!("delete the {slot} key of peer {peer_id} of device {device}");
        let request = codec::delete_key(self.inner.family, device, peer_id, slot);
        self.run(request, doing).await.map(|_| ())
    }

    /// Sets a new peer's keepalive again. The kernel starts the keepalive work before it adds the new peer to
    /// its table. If the work runs first, it finds no peer and is not rescheduled, and the peer would never
    /// expire.
    async fn begin_keepalive(
        &self,
        device: u32,
        attributes: &PeerAttributes,
    ) -> Result<(), OvpnError> {
        let &PeerAttributes { id, keepalive_interval_s, keepalive_timeout_s, .. } = attributes;
        if keepalive_interval_s.is_none() || keepalive_timeout_s.is_none() {
            return Ok(());
        }
        let again = PeerAttributes {
            id,
            keepalive_interval_s,
            keepalive_timeout_s,
            ..PeerAttributes::default()
        };
        match self.set_peer(device, &again).await {
            // The peer has ended meanwhile, and watches got a notice.
            Err(error) if error.refusal() == Some(Refusal::Absent) => Ok(()),
            Err(error) => {
                // Delete the peer, since the caller gets an error and must find none.
                if let Some(id) = id {
                    let _ = self.delete_peer(device, id).await;
                }
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    async fn run(&self, request: Writer, doing: String) -> Result<Vec<Vec<u8>>, OvpnError> {
        let answer = self.inner.requests.lock().await.run(request).await;
        answer.map_err(|error| OvpnError::new(error, doing))
    }
}

fn peer_name(id: Option<u32>) -> String {
    id.map_or_else(|| "a peer without an id".to_owned(), |id| format!("peer {id}"))
}
