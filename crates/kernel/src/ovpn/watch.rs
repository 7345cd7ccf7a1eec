//! Notices of peers, as they happen.

use std::collections::VecDeque;

use weft_openvpn::device::Notice;

use super::{OvpnError, codec, look_up, open};
use crate::netlink::{
    generic,
    notices::{Notices, is_overrun},
    reader::Message,
};

const DOING: &str = "watch the peers of ovpn devices";
/// Receive buffer in bytes: OpenVPN's own, with which it loses no notices in practice.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// An event of an [`OvpnWatch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// Something happened to a peer.
    Notice(Notice),
    /// The kernel dropped notices because they were not read in time, or sent a notice that this version
    /// cannot read. They are not repeated: compare with the kernel's peers
    /// ([`OvpnClient::resynchronise`](super::OvpnClient::resynchronise)).
    Lost,
}

/// A stream of notices about the peers of all `ovpn` devices whose sockets are in one network namespace. It
/// buffers no more than the kernel's socket buffer (1 MiB) and the notices of one datagram.
pub struct OvpnWatch {
    notices: Notices,
    family: u16,
    ready: VecDeque<Watched>,
}

impl OvpnWatch {
    /// Opens a socket in the network namespace of the thread that first polls the future, which must be that
    /// of the peers' sockets. Events before it returns are not reported. Call it within a tokio runtime with
    /// I/O and time switched on.
    ///
    /// # Errors
    /// [`OvpnError::Missing`] if this kernel has no such devices, [`OvpnError::Socket`],
    /// [`OvpnError::TimedOut`].
    pub async fn open() -> Result<Self, OvpnError> {
        let failed = |source| OvpnError::Socket { doing: DOING.to_owned(), source };
        // Both sockets are opened before the first await, in one thread and so in one namespace.
        let notices = generic::notices().map_err(failed)?;
        notices.enlarge(RECEIVE_BUFFER_BYTES);
        let mut requests = open()?;
        let family = look_up(&mut requests).await?;
        let group = family.groups.iter().find(|(name, _)| name == codec::GROUP);
        let (_, group) = group.ok_or(OvpnError::Missing)?;
        notices.join(*group).map_err(failed)?;
        Ok(Self { notices, family: family.id, ready: VecDeque::new() })
    }

    /// The next event. Dropping the future loses nothing.
    ///
    /// # Errors
    /// [`OvpnError::Socket`] if the socket fails; the watch should be opened again then.
    pub async fn next(&mut self) -> Result<Watched, OvpnError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            match self.notices.receive().await {
                Ok(datagram) => {
                    let family = self.family;
                    let events = datagram.messages().filter_map(|message| event(family, &message));
                    self.ready.extend(events);
                }
                Err(error) if is_overrun(&error) => {
                    tracing::warn!("the kernel dropped notices of ovpn peers");
                    return Ok(Watched::Lost);
                }
                Err(source) => {
                    return Err(OvpnError::Socket { doing: DOING.to_owned(), source });
                }
            }
        }
    }
}

/// Translates a message of the watching socket.
pub(super) fn event(family: u16, message: &Message<'_>) -> Option<Watched> {
    if message.kind != family {
        return None;
    }
    let (command, body) = generic::command(message)?;
    match codec::notice(command, body) {
        Some(notice) => Some(Watched::Notice(notice)),
        None if codec::is_notice(command) => {
            tracing::warn!(command, "cannot read a notice of an ovpn peer");
            Some(Watched::Lost)
        }
        None => None,
    }
}
