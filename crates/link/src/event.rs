//! What links tell the application, in order and with bounded memory.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use weft_crypto::{PeerId, SessionKey};

use crate::limits::{INBOX_MAX_BYTES, NOTICES_MAX};
use crate::secret::Secret;
use crate::status::{Direction, LinkStatus};

/// Something happened to a link.
#[derive(Debug)]
pub enum Event {
    /// A link is up, or a new connection has replaced the one before: derive new keys.
    ///
    /// `Up` for a peer that is up already is no loss of the link. Unless it is a renewal, take it
    /// as a new start all the same: messages sent before it may be lost, so send again what the
    /// peer must know.
    Up {
        /// Who.
        peer: PeerId,
        /// Its host name, as it says; cleaned of control characters.
        nickname: String,
        /// Where it is, as IPv4 if it is reached by IPv4.
        remote: SocketAddr,
        /// Who dialled the first connection of this link.
        direction: Direction,
        /// The new session key, the same on both sides.
        session: SessionKey,
        /// Names the session, the same on both sides; no secret. Put it into messages whose
        /// meaning depends on the session key.
        session_id: u64,
        /// The same two instances go on and no message is lost: only the keys are new.
        renewal: bool,
        /// Random per start of the peer's daemon.
        instance: u64,
        /// What the peer's application says about itself.
        hello: serde_json::Value,
    },
    /// A message from a peer that is up. All messages of one connection come before those of the
    /// connection that replaces it.
    Message {
        /// From whom.
        peer: PeerId,
        /// The session of the connection over which it came.
        session_id: u64,
        /// What it sent with `Links::send`.
        bytes: Vec<u8>,
    },
    /// A link is down; it is dialled again unless it was refused or forgotten.
    Down {
        /// Whose.
        peer: PeerId,
        /// Why.
        reason: String,
    },
    /// A target has another state or reason. Left out, but logged, while the application has not
    /// taken many earlier ones.
    TargetChanged {
        /// Its line in `Links::status`.
        status: LinkStatus,
    },
    /// A host was refused; at most once a minute for the same source and cause, and at most
    /// `REFUSALS_TOLD_PER_MINUTE` in all.
    Refused {
        /// From where it came.
        remote: SocketAddr,
        /// The key that it showed.
        peer: PeerId,
        /// Why.
        reason: String,
    },
    /// A peer has refused this host, since it is linked with another host of the same identity that answers:
    /// one of the two is a copy of the other.
    SameIdentity {
        /// Names both, and says what to do.
        reason: String,
    },
    /// A join token has given this host the network's secret: store it, and start with it next
    /// time.
    SecretLearned {
        /// The secret.
        secret: Secret,
    },
}

/// The receiving end of all events.
#[derive(Debug)]
pub struct Events {
    queue: mpsc::UnboundedReceiver<Queued>,
}

impl Events {
    /// The next event; `None` after `Links::shutdown`. Cancel-safe. Take events promptly: a peer
    /// is slowed down once `INBOX_MAX_BYTES` of its messages wait.
    pub async fn recv(&mut self) -> Option<Event> {
        self.queue.recv().await.map(|queued| queued.event)
    }

    /// The next event if there is one already.
    pub fn try_recv(&mut self) -> Option<Event> {
        self.queue.try_recv().ok().map(|queued| queued.event)
    }
}

#[derive(Debug)]
struct Queued {
    event: Event,
    /// Given back when the application takes the event.
    _permit: Option<OwnedSemaphorePermit>,
}

/// The sending end. The queue itself has no bound; what fills it has: `Up` and `Down` follow
/// connections, messages hold permits of their link's inbox, notices hold permits of their own.
pub(crate) struct EventSender {
    queue: Mutex<Option<mpsc::UnboundedSender<Queued>>>,
    notices: Arc<Semaphore>,
}

impl EventSender {
    pub(crate) fn new() -> (Self, Events) {
        let (sender, queue) = mpsc::unbounded_channel();
        let notices = Arc::new(Semaphore::new(NOTICES_MAX));
        (Self { queue: Mutex::new(Some(sender)), notices }, Events { queue })
    }

    /// Nothing comes after what has been sent.
    pub(crate) fn end(&self) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    pub(crate) fn send(&self, event: Event) {
        self.push(event, None);
    }

    /// Sends what may be left out when the application lags.
    pub(crate) fn notice(&self, event: Event) {
        if let Ok(permit) = self.notices.clone().try_acquire_owned() {
            self.push(event, Some(permit));
        }
    }

    pub(crate) fn message(&self, event: Event, permit: OwnedSemaphorePermit) {
        self.push(event, Some(permit));
    }

    fn push(&self, event: Event, permit: Option<OwnedSemaphorePermit>) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queue.as_ref() {
            // Without a receiver the application has gone; nothing is to be told any more.
            let _ = queue.send(Queued { event, _permit: permit });
        }
    }
}

/// Room for one link's received messages.
#[derive(Clone)]
pub(crate) struct Inbox(Arc<Semaphore>);

impl Inbox {
    /// What a message costs besides its bytes.
    const OVERHEAD_BYTES: usize = 128;

    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(INBOX_MAX_BYTES)))
    }

    /// Waits until the application has taken enough.
    pub(crate) async fn room(&self, len: usize) -> Option<OwnedSemaphorePermit> {
        let cost = (len + Self::OVERHEAD_BYTES).min(INBOX_MAX_BYTES) as u32;
        self.0.clone().acquire_many_owned(cost).await.ok()
    }
}
