//! A client as the service knows it: its session, and what waits for it while a thread has it.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::oneshot;
use weft_openvpn::SessionId;
use weft_openvpn::key_method::PeerInfo;
use weft_openvpn::messages::{AuthFailure, Message, PendingStep};
use weft_openvpn::session::{Acceptance, Session};

use super::authority::Holder;
use super::device::NewPeer;
use super::login::{Identity, Ticket};
use super::sockets::Transport;
use super::streams;

/// Datagrams of a client that wait for a thread; it sends those again that are dropped.
const DATAGRAMS_MAX: usize = 16;
/// Packets of a client over TCP that wait for a thread: it sends none again. More than its window of unacknowledged
/// packets and this end's together.
const STREAM_PACKETS_MAX: usize = 64;

/// One thing to do with a session.
pub(super) enum Todo {
    Datagram(Vec<u8>),
    Timeout,
    /// Make the client a peer, and let it in.
    Join(Box<NewPeer>, Acceptance),
    Deny(AuthFailure),
    /// Lets it go on with a later key, and gives it a new token.
    Renew(Option<String>),
    /// Gives it a new token.
    Token(String),
    /// Asks its user for a code.
    AskCode,
    /// Has its user open a page, and wait so long for what comes of it.
    ShowPage(PendingStep, Duration),
    Close(Message),
    Moved(SocketAddr),
    Renegotiate,
}

/// How far a client has come.
pub(super) enum Stage {
    /// It has not shown yet who it is.
    Handshake,
    /// Its addresses are being found.
    Asked(Box<Known>),
    /// The host is being set up for its addresses.
    Routing(Box<Known>),
    /// It is a peer of the device.
    Peer { known: Box<Known>, is_connected: bool },
    /// Its session repeats its last words.
    Over,
}

/// A client that has shown who it is.
pub(super) struct Known {
    pub(super) login: Identity,
    /// Its certificate, if it has shown one.
    pub(super) certificate: Option<Holder>,
    /// Which of the sessions of its name this is, from 1.
    pub(super) instance: u32,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) cipher: &'static str,
    pub(super) info: PeerInfo,
    pub(super) since: SystemTime,
    pub(super) last_handshake: SystemTime,
}

/// A login that is being judged: a client's certificate, and its user.
pub(super) struct Asking {
    pub(super) certificate: Option<Holder>,
    pub(super) cipher: &'static str,
    pub(super) info: PeerInfo,
    /// Its password was right, and a code is awaited.
    pub(super) identity: Option<Identity>,
    /// Its user is to log in by a web page.
    pub(super) page: Option<Ticket>,
    /// Tells the user's browser what has become of it.
    pub(super) browser: Option<oneshot::Sender<Result<(), String>>>,
}

/// A client.
pub(super) struct Client {
    /// `None`: a thread has it.
    pub(super) session: Option<Box<Session>>,
    todo: VecDeque<Todo>,
    datagrams: usize,
    /// Its session id, by which its packets are known.
    pub(super) remote: SessionId,
    pub(super) transport: Transport,
    /// Its connection, over TCP.
    pub(super) connection: Option<streams::Number>,
    pub(super) address: SocketAddr,
    /// The address of this host that it spoke to last, over UDP: answers come from there.
    pub(super) local: Option<IpAddr>,
    pub(super) stage: Stage,
    /// The login that is being judged now.
    pub(super) asking: Option<Box<Asking>>,
    /// When its session is to be looked at.
    pub(super) timer: Option<Instant>,
    /// When it is to get its next token.
    pub(super) token_at: Option<Instant>,
    /// It waits for a thread.
    pub(super) is_ready: bool,
}

impl Client {
    /// A client whose session is being made.
    pub(super) fn new(remote: SessionId, transport: Transport, address: SocketAddr) -> Self {
        Self {
            session: None,
            todo: VecDeque::new(),
            datagrams: 0,
            remote,
            transport,
            connection: None,
            address,
            local: None,
            stage: Stage::Handshake,
            asking: None,
            timer: None,
            token_at: None,
            is_ready: false,
        }
    }

    /// Queues something. False: too many datagrams wait already.
    pub(super) fn push(&mut self, todo: Todo) -> bool {
        if matches!(todo, Todo::Datagram(_)) {
            let max = match self.transport {
                Transport::Udp(_) => DATAGRAMS_MAX,
                Transport::Tcp => STREAM_PACKETS_MAX,
            };
            if self.datagrams == max {
                return false;
            }
            self.datagrams += 1;
        }
        self.todo.push_back(todo);
        true
    }

    /// Whether a thread is needed for what comes next; `None`: nothing is to be done.
    pub(super) fn needs_thread(&self) -> Option<bool> {
        self.todo.front().map(|todo| match (todo, &self.session) {
            (Todo::Datagram(packet), Some(session)) => session.may_take_long(packet),
            (Todo::Datagram(_), None) => true,
            _ => false,
        })
    }

    /// What comes next.
    pub(super) fn pop(&mut self) -> Option<Todo> {
        let todo = self.todo.pop_front()?;
        self.datagrams -= usize::from(matches!(todo, Todo::Datagram(_)));
        if self.todo.is_empty() {
            // Idle for most of its life, with many others.
            self.todo = VecDeque::new();
        }
        Some(todo)
    }

    /// What is known of it, while it is not over.
    pub(super) const fn known(&self) -> Option<&Known> {
        match &self.stage {
            Stage::Asked(known) | Stage::Routing(known) | Stage::Peer { known, .. } => Some(known),
            Stage::Handshake | Stage::Over => None,
        }
    }

    pub(super) const fn is_connected(&self) -> bool {
        matches!(self.stage, Stage::Peer { is_connected: true, .. })
    }

    pub(super) const fn is_peer(&self) -> bool {
        matches!(self.stage, Stage::Peer { .. })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_client_that_floods_loses_datagrams_and_nothing_else() {
        let remote = SessionId::new([1; 8]).unwrap();
        let mut client = Client::new(remote, Transport::Udp(0), "192.0.2.1:1194".parse().unwrap());
        assert_eq!(client.needs_thread(), None);
        for _ in 0..DATAGRAMS_MAX {
            assert!(client.push(Todo::Datagram(vec![0])));
        }
        assert!(!client.push(Todo::Datagram(vec![0])));
        assert!(client.push(Todo::Renegotiate));
        assert_eq!(client.needs_thread(), Some(true));
        assert!(matches!(client.pop(), Some(Todo::Datagram(_))));
        assert!(client.push(Todo::Datagram(vec![0])), "there is room again");
    }
}
