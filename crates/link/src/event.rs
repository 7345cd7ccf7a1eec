//! Events from links to the application, in order and with bounded memory.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use weft_crypto::{PeerId, SessionKey};

use crate::limits::{INBOX_MAX_BYTES, NOTICES_MAX};
use crate::secret::Secret;
use crate::status::{Direction, LinkStatus};

/// An event of a link.
#[derive(Debug)]
pub enum Event {
    /// A link is up, or a new connection has replaced the previous one: derive new keys.
    ///
    /// `Up` for a peer that is already up does not mean that the link was lost. Still, unless it is a
    /// renewal, treat it as a new start. Messages sent before it may be lost, so send again the state that
    /// the peer must know.
    Up {
        /// The peer.
        peer: PeerId,
        /// The peer's host name, as it states it; cleaned of control characters.
        nickname: String,
        /// The peer's address, as IPv4 if it is reached by IPv4.
        remote: SocketAddr,
        /// The side that dialled the first connection of this link.
        direction: Direction,
        /// The new session key, the same on both sides.
        session: SessionKey,
        /// Identifies the session, with the same value on both sides; not secret. Put it into messages whose
        /// meaning depends on the session key.
        session_id: u64,
        /// The same two instances continue and no message is lost: only the keys are new.
        renewal: bool,
        /// Random per start of the peer's daemon.
        instance: u64,
        /// The hello of the peer's application.
        hello: serde_json::Value,
    },
    /// A message from a peer that is up. All messages of one connection precede those of the connection that
    /// replaces it.
    Message {
        /// The sender.
        peer: PeerId,
        /// The session of the connection that carried it.
        session_id: u64,
        /// The bytes passed to `Links::send`.
        bytes: Vec<u8>,
    },
    /// A link is down. It is dialled again unless it was refused or forgotten.
    Down {
        /// The peer.
        peer: PeerId,
        /// The reason.
        reason: String,
    },
    /// A target has another state or reason. While many earlier events are waiting, this one is only logged.
    TargetChanged {
        /// Its line in `Links::status`.
        status: LinkStatus,
    },
    /// A host was refused; at most once a minute for the same source and cause, and at most
    /// `REFUSALS_TOLD_PER_MINUTE` in all.
    Refused {
        /// The address it came from.
        remote: SocketAddr,
        /// The key it presented.
        peer: PeerId,
        /// The reason.
        reason: String,
    },
    /// A peer has refused this host, since it is linked with another live host of the same identity. One of the
    /// two is a copy of the other.
    SameIdentity {
        /// A text that names both hosts and the remedy.
        reason: String,
    },
    /// A join token has given this host the network's secret. Store it, and start with it next time.
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
    /// The next event; `None` after `Links::shutdown`. Cancel safe. Take events promptly: a peer is slowed
    /// down once `INBOX_MAX_BYTES` of its messages wait.
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
    /// Released when the application takes the event.
    _permit: Option<OwnedSemaphorePermit>,
}

/// The sending end. The queue itself has no bound, but its input has. `Up` and `Down` follow connections, messages
/// hold permits of their link's inbox, and notices hold separate permits.
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

    /// Ends the queue: no further events.
    pub(crate) fn end(&self) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    pub(crate) fn send(&self, event: Event) {
        self.push(event, None);
    }

    /// Sends an event that may be dropped when the application lags.
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
            // Without a receiver the application has gone, and the event is moot.
            let _ = queue.send(Queued { event, _permit: permit });
        }
    }
}

/// Capacity for one link's received messages.
#[derive(Clone)]
pub(crate) struct Inbox(Arc<Semaphore>);

impl Inbox {
    /// The cost of a message besides its bytes.
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
