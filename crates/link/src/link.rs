//! A link and the connection that may become one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use quinn::{RecvStream, SendStream};
use tokio::sync::watch;
use weft_crypto::{PeerId, SessionKey};

use crate::error::{CloseCode, Failure};
use crate::outbox::Outbox;
use crate::socket::canonical;
use crate::status::{Direction, LinkState, LinkStatus};
use crate::wire::Ready;

/// A connection whose two ends have proven that they belong to one network.
pub(crate) struct Admitted {
    pub(crate) conn: quinn::Connection,
    pub(crate) send: SendStream,
    pub(crate) recv: RecvStream,
    pub(crate) peer: PeerId,
    pub(crate) direction: Direction,
    pub(crate) session: SessionKey,
    pub(crate) session_id: u64,
    /// The peer's statement about itself, and its application's hello.
    pub(crate) theirs: Ready,
    pub(crate) hello: serde_json::Value,
    /// `State::epoch` when the peer proved itself.
    pub(crate) epoch: u64,
}

/// The connection that is the link with a peer.
pub(crate) struct Link {
    pub(crate) conn: quinn::Connection,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) session_id: u64,
    /// The reason why this host closed the link, from the application or from an error.
    pub(crate) closing: Option<Failure>,
    pub(crate) instance: u64,
    pub(crate) nickname: String,
    pub(crate) direction: Direction,
    /// When the peer's present instance was linked, by whichever connection.
    pub(crate) since: Instant,
    /// The order number of its `Use`.
    pub(crate) order: u64,
    pub(crate) halves: Halves,
}

/// Signals a link to stop sending, and reports the end of each half.
#[derive(Clone)]
pub(crate) struct Halves {
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) written: watch::Sender<bool>,
    pub(crate) read: watch::Sender<bool>,
}

impl Halves {
    pub(crate) fn new() -> Self {
        let signal = || watch::Sender::new(false);
        Self { stop: signal(), written: signal(), read: signal() }
    }
}

impl Link {
    pub(crate) fn remote(&self) -> SocketAddr {
        canonical(self.conn.remote_address())
    }

    pub(crate) fn status(&self, peer: PeerId) -> LinkStatus {
        LinkStatus {
            address: self.remote().to_string(),
            direction: self.direction,
            peer: Some(peer),
            nickname: Some(self.nickname.clone()),
            state: LinkState::Established,
            reason: None,
            is_itself: false,
            since: self.since,
            next_try: None,
            refusals: 0,
            rtt: Some(self.conn.rtt()),
        }
    }

    /// Whether a connection belongs to another instance than this live link, and not to its
    /// successor.
    pub(crate) fn is_rival_of(&self, theirs: &Ready) -> bool {
        self.instance != theirs.instance
            && theirs.succeeds != Some(self.instance)
            && self.conn.close_reason().is_none()
    }

    pub(crate) fn close(&mut self, failure: Failure) {
        let code = failure.code().unwrap_or(CloseCode::Unknown);
        self.conn.close(code.to_wire(), crate::error::clean(failure.reason()).as_bytes());
        self.closing.get_or_insert(failure);
    }
}
