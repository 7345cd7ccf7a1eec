//! Messages by which a service talks to the same service on other hosts.
//!
//! The core passes them on and waits for nobody. Links that are up are a state that a service looks at; messages wait
//! in a bounded queue. Messages that find no place are dropped, and counted where the service sees the link: it then
//! asks the peer for all again.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use weft_crypto::PeerId;
use weft_mesh::{FEATURE_SERVICES, Hello};

/// Messages that wait for a service.
const INBOX_MAX_MESSAGES: usize = 1_024;
/// Bytes of messages that wait for a service.
const INBOX_MAX_BYTES: usize = 8 << 20;

/// The services that talk to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Service {
    /// `services/gateway/peers`.
    Gateway,
}

/// A message of a service, as it goes over a link.
#[derive(Serialize, Deserialize)]
pub(crate) struct ServiceMessage {
    service: Service,
    body: Value,
}

/// A message that a service sends. `weft_link` takes one of 1 MiB at most: larger things go in parts.
pub(crate) struct ToPeer {
    pub(crate) service: Service,
    pub(crate) peer: PeerId,
    /// The link that it is meant for. It is dropped once another has taken its place.
    pub(crate) link: u64,
    pub(crate) body: Value,
}

/// A message for a service.
pub(crate) struct FromPeer {
    pub(crate) peer: PeerId,
    /// The link that it came over.
    pub(crate) link: u64,
    pub(crate) body: Value,
    _place: OwnedSemaphorePermit,
}

/// A link with a host whose services take messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Linked {
    pub(crate) nickname: String,
    /// The number of the link: it grows with each link of this host.
    pub(crate) link: u64,
    /// Messages over this link that found no place.
    pub(crate) lost: u64,
}

/// The links of a service, by host.
pub(crate) type LinksUp = BTreeMap<PeerId, Linked>;

/// The end of a service: links that are up, and messages.
pub(crate) struct Mailbox {
    pub(crate) links: watch::Receiver<LinksUp>,
    pub(crate) inbox: mpsc::Receiver<FromPeer>,
}

struct Inbox {
    links: watch::Sender<LinksUp>,
    sender: mpsc::Sender<FromPeer>,
    bytes: Arc<Semaphore>,
}

/// The core's end, for all services.
#[derive(Default)]
pub(crate) struct ServiceMessages {
    inboxes: BTreeMap<Service, Inbox>,
    links: u64,
}

impl ServiceMessages {
    /// The mailbox of a service; a later call makes another in its place.
    pub(crate) fn mailbox(&mut self, service: Service) -> Mailbox {
        let (sender, inbox) = mpsc::channel(INBOX_MAX_MESSAGES);
        let (links, linked) = watch::channel(LinksUp::new());
        let bytes = Arc::new(Semaphore::new(INBOX_MAX_BYTES));
        self.inboxes.insert(service, Inbox { links, sender, bytes });
        Mailbox { links: linked, inbox }
    }

    /// A link is up, maybe in the place of another. Hosts of earlier releases take no messages of services.
    pub(super) fn handle_link_up(&mut self, peer: PeerId, nickname: &str, hello: &Hello) {
        if !hello.features.iter().any(|feature| feature == FEATURE_SERVICES) {
            return self.handle_link_down(peer);
        }
        self.links += 1;
        let linked = Linked { nickname: nickname.to_owned(), link: self.links, lost: 0 };
        for inbox in self.inboxes.values() {
            inbox.links.send_modify(|links| _ = links.insert(peer, linked.clone()));
        }
    }

    pub(super) fn handle_link_down(&self, peer: PeerId) {
        for inbox in self.inboxes.values() {
            inbox.links.send_if_modified(|links| links.remove(&peer).is_some());
        }
    }

    /// A message of `bytes` bytes has come.
    pub(super) fn handle_message(&self, peer: PeerId, message: ServiceMessage, bytes: usize) {
        let Some(inbox) = self.inboxes.get(&message.service) else { return };
        let Some(link) = inbox.links.borrow().get(&peer).map(|linked| linked.link) else { return };
        let cost = u32::try_from(bytes.min(INBOX_MAX_BYTES)).unwrap_or(u32::MAX);
        let place = Arc::clone(&inbox.bytes).try_acquire_many_owned(cost).ok();
        let sent = place.is_some_and(|place| {
            let message = FromPeer { peer, link, body: message.body, _place: place };
            inbox.sender.try_send(message).is_ok()
        });
        if !sent {
            inbox.links.send_modify(|links| {
                links.get_mut(&peer).into_iter().for_each(|linked| linked.lost += 1);
            });
        }
    }

    /// What is to be sent for a service; `None`: its link is gone.
    pub(super) fn outgoing(&self, message: ToPeer) -> Option<(PeerId, ServiceMessage)> {
        let ToPeer { service, peer, link, body } = message;
        let links = self.inboxes.get(&service)?.links.borrow();
        let is_up = links.get(&peer).is_some_and(|linked| linked.link == link);
        is_up.then_some((peer, ServiceMessage { service, body }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    const ONE: PeerId = PeerId::from_bytes([1; 32]);

    fn hello(features: &[&str]) -> Hello {
        serde_json::from_value(json!({
            "protocol": 1, "features": features, "nickname": "one", "port": 1, "range": "10.0.0.0/8",
        }))
        .unwrap()
    }

    fn message() -> ServiceMessage {
        serde_json::from_value(json!({ "service": "gateway", "body": { "kind": "any" } })).unwrap()
    }

    fn to(link: u64) -> ToPeer {
        ToPeer { service: Service::Gateway, peer: ONE, link, body: json!(1) }
    }

    #[test]
    fn messages_go_both_ways_while_their_link_is_up() {
        let mut core = ServiceMessages::default();
        let mut service = core.mailbox(Service::Gateway);
        core.handle_link_up(ONE, "one", &hello(&[FEATURE_SERVICES]));
        let first = service.links.borrow_and_update()[&ONE].link;
        core.handle_message(ONE, message(), 10);
        let got = service.inbox.try_recv().unwrap();
        assert_eq!((got.peer, got.link, got.body["kind"].as_str()), (ONE, first, Some("any")));
        assert!(core.outgoing(to(first)).is_some());
        // Another link in its place: a message for the first is not sent over it.
        core.handle_link_up(ONE, "one", &hello(&[FEATURE_SERVICES]));
        assert!(core.outgoing(to(first)).is_none());
        assert!(core.outgoing(to(first + 1)).is_some());
        core.handle_link_down(ONE);
        assert!(service.links.borrow().is_empty() && core.outgoing(to(first + 1)).is_none());
        core.handle_message(ONE, message(), 10);
        assert!(service.inbox.try_recv().is_err());
    }

    #[test]
    fn a_host_of_an_earlier_release_is_told_nothing() {
        let mut core = ServiceMessages::default();
        let service = core.mailbox(Service::Gateway);
        core.handle_link_up(ONE, "one", &hello(&["networks"]));
        assert!(service.links.borrow().is_empty() && core.outgoing(to(1)).is_none());
    }

    #[test]
    fn a_full_queue_drops_and_says_so_and_takes_more_when_it_is_emptied() {
        let mut core = ServiceMessages::default();
        let mut service = core.mailbox(Service::Gateway);
        core.handle_link_up(ONE, "one", &hello(&[FEATURE_SERVICES]));
        for _ in 0..INBOX_MAX_MESSAGES + 3 {
            core.handle_message(ONE, message(), 10);
        }
        assert_eq!(service.links.borrow()[&ONE].lost, 3);
        while service.inbox.try_recv().is_ok() {}
        // By size, too.
        core.handle_message(ONE, message(), INBOX_MAX_BYTES);
        core.handle_message(ONE, message(), 1);
        assert_eq!(service.links.borrow()[&ONE].lost, 4);
        drop(service.inbox.try_recv().unwrap());
        core.handle_message(ONE, message(), 1);
        assert_eq!(service.links.borrow()[&ONE].lost, 4);
    }
}
