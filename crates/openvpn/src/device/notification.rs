//! Events that a device reports unasked.

use std::net::SocketAddr;

/// Why a peer is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeletionReason {
    /// The device was removed, or another peer took this one's place.
    Teardown,
    /// It was asked for.
    Userspace,
    /// Nothing came from it for as long as its keepalive allows.
    Expired,
    /// The bytes that came over its connection were no framing.
    TransportError,
    /// Its connection, or the socket, was closed; of Weft's own device, also that it has said that it leaves.
    TransportDisconnect,
}

impl DeletionReason {
    /// All of them, by their numbers in the kernel's interface.
    pub const ALL: [Self; 5] = [
        Self::Teardown,
        Self::Userspace,
        Self::Expired,
        Self::TransportError,
        Self::TransportDisconnect,
    ];

    /// Its name in the CLI and in JSON, which is that of the kernel's specification.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Teardown => "teardown",
            Self::Userspace => "userspace",
            Self::Expired => "expired",
            Self::TransportError => "transport-error",
            Self::TransportDisconnect => "transport-disconnect",
        }
    }
}

/// An event of a peer, which a device reports unasked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notification {
    /// It is gone, with its keys.
    PeerDeleted {
        /// Its id.
        peer_id: u32,
        /// Why.
        reason: DeletionReason,
    },
    /// The packet ids of its primary key are used up, so that nothing is sent to it: it needs a new key.
    KeySwap {
        /// Its id.
        peer_id: u32,
        /// The id of the key that is gone.
        key_id: u32,
    },
    /// Its packets, which are authentic, come from another address; packets to it go there now.
    PeerFloat {
        /// Its id.
        peer_id: u32,
        /// The new address.
        remote: SocketAddr,
    },
}

/// A notification with the device that it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The device's interface index.
    pub device: u32,
    /// The event.
    pub what: Notification,
}
