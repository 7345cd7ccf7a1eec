//! Notices of peers, as they happen.

use std::collections::VecDeque;

use rustix::io::Errno;
use weft_openvpn::device::Notice;

use super::{OvpnError, codec, look_up, open};
use crate::netlink::{
    generic::{
        codec::{Received, message},
        socket::Notices,
    },
    socket::messages,
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
        let notices = Notices::open().map_err(failed)?;
        if let Err(error) = notices.enlarge(RECEIVE_BUFFER_BYTES) {
            tracing::debug!(%error, "the watch of ovpn peers has the buffer that the sysctl allows");
        }
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
                    self.ready.extend(messages(datagram).filter_map(|bytes| event(family, bytes)));
                }
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOBUFS) => {
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
pub(super) fn event(family: u16, bytes: &[u8]) -> Option<Watched> {
    let Received::Data { family: of, command, body } = message(bytes)?.what else { return None };
    if of != family {
        return None;
    }
    match codec::notice(command, body) {
        Some(notice) => Some(Watched::Notice(notice)),
        None if codec::is_notice(command) => {
            tracing::warn!(command, "cannot read a notice of an ovpn peer");
            Some(Watched::Lost)
        }
        None => None,
    }
}
