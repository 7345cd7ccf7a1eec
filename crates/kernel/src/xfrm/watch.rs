//! Events of states and policies, as they happen.

use std::{collections::VecDeque, net::SocketAddr};

use super::{
    Xfrm, cannot_open,
    codec::{self, DELPOLICY, DELSA, EXPIRE, FLUSHPOLICY, FLUSHSA, MAPPING, State, UPDPOLICY},
    socket,
    spec::{PolicyId, StateId},
};
use crate::{
    error::KernelError,
    netlink::{
        notices::{Notices, is_overrun},
        reader::Message,
    },
};

// Bits of the kernel's multicast groups (XFRMNLGRP_*).
const GROUPS: u32 = group(2) | group(3) | group(4) | group(8);
const DOING: &str = "watch the IPsec states and policies";

const fn group(number: u32) -> u32 {
    1 << (number - 1)
}

/// An event of an object of ours that the watched handle and its clones did not cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum XfrmEvent {
    /// A state reached a limit.
    Expired {
        /// The state.
        state: StateId,
        /// The state is gone. Otherwise it still works, and needs a successor.
        hard: bool,
    },
    /// Authentic packets of an inbound state in UDP come from another address than its source.
    RemoteMoved {
        /// The state.
        state: StateId,
        /// Their source.
        remote: SocketAddr,
    },
    /// Another program removed a state.
    StateRemoved {
        /// The state.
        state: StateId,
    },
    /// Another program removed all states.
    StatesFlushed,
    /// Another program removed or replaced a policy.
    PolicyRemoved {
        /// The policy.
        policy: PolicyId,
    },
    /// Another program removed or replaced an inbound policy.
    EntryRemoved,
    /// Another program removed all policies.
    PoliciesFlushed,
    /// The kernel dropped notices because they were not read in time: compare with [`Xfrm::own_states`] and
    /// [`Xfrm::own_policies`].
    Lost,
}

/// A stream of [`XfrmEvent`]s. It buffers no more than the kernel's socket buffer and the notices of one
/// datagram.
pub struct XfrmWatch {
    notices: Notices,
    /// The port number in notices that the handle itself caused.
    own_port: u32,
    ready: VecDeque<XfrmEvent>,
}

impl Xfrm {
    /// Watches the calling thread's namespace, which must be this handle's.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the kernel gives no socket, [`KernelError::NotPermitted`] without
    /// CAP_NET_ADMIN.
    pub fn watch(&self) -> Result<XfrmWatch, KernelError> {
        let notices = socket::notices(GROUPS).map_err(|error| match error.kind() {
            std::io::ErrorKind::PermissionDenied => {
                KernelError::NotPermitted { doing: DOING.into() }
            }
            _ => cannot_open(error, DOING),
        })?;
        Ok(XfrmWatch { notices, own_port: self.socket().port(), ready: VecDeque::new() })
    }
}

impl XfrmWatch {
    /// The next event. Dropping the future loses nothing.
    ///
    /// # Errors
    /// [`KernelError::Socket`] if the socket fails; the watch should be opened again then.
    pub async fn next(&mut self) -> Result<XfrmEvent, KernelError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            match self.notices.receive().await {
                Ok(datagram) => {
                    let own_port = self.own_port;
                    let events = datagram.messages().filter_map(|notice| event(&notice, own_port));
                    self.ready.extend(events);
                }
                Err(error) if is_overrun(&error) => {
                    tracing::warn!("the kernel dropped notices of IPsec states and policies");
                    return Ok(XfrmEvent::Lost);
                }
                Err(source) => {
                    return Err(KernelError::Socket { doing: DOING.into(), source });
                }
            }
        }
    }
}

/// Translates a notice. The kernel copies the port number from the request that made the change. A program
/// that leaves it out matches no handle.
fn event(notice: &Message<'_>, own_port: u32) -> Option<XfrmEvent> {
    let others = notice.port != own_port;
    let body = notice.body;
    match notice.kind {
        EXPIRE => {
            let (state, hard) = codec::read_expired(body)?;
            let known = state.is_own() && state.own.id.spi != 0;
            known.then_some(XfrmEvent::Expired { state: state.own.id, hard })
        }
        MAPPING => {
            let (state, remote) = codec::read_mapping(body)?;
            Some(XfrmEvent::RemoteMoved { state, remote })
        }
        DELSA if others => {
            let state = codec::read_deleted_state(body).filter(State::is_own)?;
            Some(XfrmEvent::StateRemoved { state: state.own.id })
        }
        FLUSHSA if others => codec::read_flush(body).then_some(XfrmEvent::StatesFlushed),
        DELPOLICY if others => {
            let policy = codec::read_deleted_policy(body).filter(codec::Policy::is_own)?;
            if policy.is_inbound() {
                return Some(XfrmEvent::EntryRemoved);
            }
            Some(XfrmEvent::PolicyRemoved { policy: policy.id? })
        }
        // The notice does not say which policy was replaced; one with a selector such as ours may have been
        // ours.
        UPDPOLICY if others => {
            let policy = codec::read_policy(body)?;
            if policy.is_inbound() {
                return Some(XfrmEvent::EntryRemoved);
            }
            Some(XfrmEvent::PolicyRemoved { policy: policy.id? })
        }
        FLUSHPOLICY if others => Some(XfrmEvent::PoliciesFlushed),
        _ => None,
    }
}
