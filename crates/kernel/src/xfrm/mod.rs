//! IPsec of the kernel: states (security associations) and policies by NETLINK_XFRM.
//!
//! Everything of ours carries the reqid [`REQID`], or one with its high half ([`LaneGroup`]), in states and
//! in policies' templates. A restarted daemon finds exactly its own objects by it. A mark and an interface id
//! would take part in the kernel's look-ups and are not used.
//!
//! An outbound policy whose template names the SPI selects a path's packets. So a rekey adds the new state,
//! updates the policy (the kernel replaces it in one step), and removes the old state [`DRAIN_MS`] later. An
//! inbound state is removed when it is drained.
//!
//! Inbound policies ([`EntryPolicy`]) are the same for all peers: UDP to Weft's inner ports must have come
//! out of a state of ours. The kernel checks whole packets there, after reassembly.
//!
//! A template whose state is gone makes the kernel drop the packets. If another program listens for such
//! cases, as an IKE daemon does, the kernel also makes a placeholder ("acquire"). It has no keys and our
//! reqid, and lasts some minutes. This crate ignores it.

mod codec;
mod policy;
mod socket;
mod spec;
mod state;
mod support;
mod watch;

use std::{io, sync::Arc};

use rustix::io::Errno;
use tokio::sync::{Mutex, OnceCell};

use self::{codec::Abilities, socket::Socket};
pub use self::{
    spec::{
        Direction, EntryPolicy, LaneGroup, Limits, OwnPolicy, OwnState, PolicyId, PolicySpec,
        REPLAY_WINDOW_PACKETS, REQID, StateId, StateSpec, StateUsage, Template, UdpPorts,
    },
    support::EspSupport,
    watch::{XfrmEvent, XfrmWatch},
};
use crate::error::KernelError;

/// How long an outbound state must stay after its policy names another, in milliseconds. A packet that
/// had found the state before the change is dropped if the state is gone when it is sealed.
pub const DRAIN_MS: u64 = 1000;

/// A handle to the kernel's IPsec. Clones share one socket; calls from several tasks are served one after
/// another. Dropping the future of a call is safe: requests already sent are carried out, the rest are not.
#[derive(Clone)]
pub struct Xfrm {
    inner: Arc<Inner>,
}

struct Inner {
    socket: Socket,
    abilities: OnceCell<Abilities>,
    /// States are tried out one at a time, as they share a name.
    trial: Mutex<()>,
}

/// How many states and policies [`Xfrm::remove_own`] found and removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// States.
    pub states: usize,
    /// Policies.
    pub policies: usize,
}

impl Xfrm {
    /// Opens a socket in the network namespace of the calling thread. Call it within a tokio runtime
    /// with I/O and time switched on.
    ///
    /// # Errors
    /// [`KernelError::NoXfrm`] if this kernel has no IPsec, [`KernelError::Socket`] if it gives no
    /// socket.
    pub fn open() -> Result<Self, KernelError> {
        let socket = Socket::open().map_err(|error| cannot_open(error, "open the IPsec socket"))?;
        let (abilities, trial) = (OnceCell::new(), Mutex::new(()));
        Ok(Self { inner: Arc::new(Inner { socket, abilities, trial }) })
    }

    /// Removes all policies and states of ours, from any handle or daemon, and nothing else.
    ///
    /// # Errors
    /// The kernel's refusal to list or to remove.
    pub async fn remove_own(&self) -> Result<Removed, KernelError> {
        // Policies first: without them nothing looks for the states any more.
        let policies = self.remove_own_policies().await?;
        let states = self.remove_own_states().await?;
        Ok(Removed { states, policies })
    }

    fn socket(&self) -> &Socket {
        &self.inner.socket
    }
}

fn cannot_open(source: io::Error, doing: &str) -> KernelError {
    match Errno::from_io_error(&source) {
        Some(Errno::PROTONOSUPPORT) => KernelError::NoXfrm,
        _ => KernelError::Socket { doing: doing.to_owned(), source },
    }
}
