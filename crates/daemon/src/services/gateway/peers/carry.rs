//! The service that carries out what the gateways' exchange asks for.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use weft_api::{ApiError, ErrorKind};
use weft_crypto::PeerId;

use super::exchange::Output;
use super::homes::Taken;
use super::message::{Answered, Forwarded, Message};
use super::{ADDRESSES_FILE, PEERS_FILE, Peers, SavedPeers, unix_ms};
use crate::core::control::Request;
use crate::core::service_messages::{FromPeer, LinksUp, Mailbox, Service, ToPeer};
use crate::services::gateway::login::TakenCode;
use crate::services::gateway::serving::Command;
use crate::services::gateway::{Gateway, State, owner_of};
use crate::services::supervisor::Pulse;

/// The pause before state is saved: more may come.
const SAVE_DELAY: Duration = Duration::from_millis(300);
/// How often this host's places for profiles are looked at, and what failed is tried again.
const LOOK: Duration = Duration::from_secs(10);
/// The source of warnings about authorities.
const WARNINGS: &str = "openvpn authority";

/// What the service waits for. It outlives restarts of the service.
pub(super) struct Inputs {
    mailbox: Mailbox,
    /// The links that the state knows of.
    known: LinksUp,
}

impl Inputs {
    pub(super) const fn new(mailbox: Mailbox) -> Self {
        Self { mailbox, known: LinksUp::new() }
    }
}

/// One input.
enum Input {
    Links,
    Message(FromPeer),
    Gone,
    Bell,
    Gateway,
    Codes(Vec<TakenCode>),
    Look,
    Save,
}

/// Talks to the gateways of other hosts, for as long as it is polled.
pub(crate) async fn keep(gateway: Arc<Gateway>, pulse: Pulse) {
    let peers = &gateway.peers;
    let mut inputs = peers.inputs.lock().await;
    let mut state = gateway.state.subscribe();
    let mut look = tokio::time::interval(LOOK);
    let mut save_at: Option<Instant> = None;
    gateway.begin_exchange().await;
    loop {
        if carry_out(&gateway, &inputs.known).await && save_at.is_none() {
            save_at = Some(Instant::now() + SAVE_DELAY);
        }
        let Inputs { mailbox, known } = &mut *inputs;
        let saving = async {
            match save_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let next = async {
            tokio::select! {
                changed = mailbox.links.changed() => changed.map_or(Input::Gone, |()| Input::Links),
                message = mailbox.inbox.recv() => message.map_or(Input::Gone, Input::Message),
                () = peers.bell.notified() => Input::Bell,
                _ = state.changed() => Input::Gateway,
                codes = gateway.logins.codes_taken() => Input::Codes(codes),
                _ = look.tick() => Input::Look,
                () = saving => Input::Save,
            }
        };
        match pulse.wait(next).await {
            Input::Links => follow_links(peers, mailbox, known),
            Input::Message(message) => {
                // The link that it came over may be new.
                follow_links(peers, mailbox, known);
                handle(peers, known, message);
            }
            Input::Gone => return pulse.wait(std::future::pending()).await,
            Input::Bell => {}
            Input::Gateway => gateway.tell_serves().await,
            Input::Codes(codes) => peers.with(|state| state.tell_codes(codes)),
            Input::Look => {
                gateway.tell_serves().await;
                peers.with(super::exchange::Exchange::handle_retry);
            }
            Input::Save => {
                save_at = None;
                save(peers).await;
            }
        }
    }
}

/// Tells the state which links have come and gone.
fn follow_links(peers: &Peers, mailbox: &mut Mailbox, known: &mut LinksUp) {
    let now = mailbox.links.borrow_and_update().clone();
    peers.with(|state| {
        for (peer, before) in known.iter() {
            if now.get(peer).is_none_or(|linked| linked.link != before.link) {
                state.handle_link_down(*peer, unix_ms() / 1_000);
            }
        }
        for (peer, linked) in &now {
            let before = known.get(peer).filter(|before| before.link == linked.link);
            match before {
                None => state.handle_link_up(*peer, linked.nickname.clone()),
                Some(before) if before.lost != linked.lost => state.handle_lost(*peer),
                Some(_) => {}
            }
        }
    });
    *known = now;
}

fn handle(peers: &Peers, known: &LinksUp, message: FromPeer) {
    let FromPeer { peer, link, body, .. } = message;
    if known.get(&peer).is_none_or(|linked| linked.link != link) {
        return;
    }
    match serde_json::from_value::<Message>(body) {
        Ok(message) => peers.with(|state| state.handle_message(peer, message)),
        Err(error) => tracing::debug!(%peer, %error, "a gateway's message ignored"),
    }
}

/// Carries out all outputs. True: something is to be saved.
async fn carry_out(gateway: &Arc<Gateway>, known: &LinksUp) -> bool {
    let peers = &gateway.peers;
    let mut is_changed = false;
    while let Some(output) = peers.next_output() {
        match output {
            Output::Save => is_changed = true,
            output => carry_out_one(gateway, known, output).await,
        }
    }
    let conflicts = peers.with_quietly(|state| state.conflicts());
    peers.warnings.set(WARNINGS, conflicts);
    peers.news.send_modify(|count| *count += 1);
    is_changed
}

async fn carry_out_one(gateway: &Arc<Gateway>, known: &LinksUp, output: Output) {
    let peers = &gateway.peers;
    match output {
        Output::Send { peer, message } => {
            let Some(link) = known.get(&peer).map(|linked| linked.link) else { return };
            let Ok(body) = serde_json::to_value(&message) else { return };
            let message = ToPeer { service: Service::Gateway, peer, link, body };
            gateway.attachments.tell(Request::ToPeer(message)).await;
        }
        Output::End { name } => gateway.tell(Command::Elsewhere { name }).await,
        Output::Readdress { key: (network, name) } => {
            gateway.tell(Command::Readdress { network, name }).await;
        }
        Output::Release { key, addresses } => {
            let _alone = peers.giving.write().await;
            let own = peers.with_quietly(|state| state.addresses(&key));
            // It may have been given anew meanwhile.
            if own != Some((peers.local, addresses)) {
                let owner = owner_of(&key.0, &key.1);
                gateway.attachments.tell(Request::Release { owner }).await;
            }
        }
        Output::Take(taken) => take(gateway, *taken).await,
        Output::Save => {}
        Output::Codes(codes) => {
            let logins = Arc::clone(&gateway.logins);
            let _ = tokio::task::spawn_blocking(move || logins.hear_codes(codes)).await;
        }
        Output::Handed { peer, id, content } => {
            let taker = Arc::clone(gateway);
            let taking = tokio::task::spawn_blocking(move || taker.take_home(&content.0));
            let taken = taking.await.map_err(|error| error.to_string()).and_then(|taken| taken);
            let answer = match taken {
                Ok(()) => Answered::Done(serde_json::Value::Null),
                Err(error) => Answered::Refused(ApiError::new(ErrorKind::Conflict, error)),
            };
            peers.with(|state| state.answer(peer, id, answer));
        }
        Output::Requested { peer, id, request } => forwarded(gateway, peer, id, request),
        Output::Answered { id, answer } => {
            let mut waiting = peers.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(reply) = waiting.remove(&id) {
                let _ = reply.send(answer);
            }
        }
    }
}

/// Takes a document of the authority's home.
async fn take(gateway: &Arc<Gateway>, taken: Taken) {
    let taker = Arc::clone(gateway);
    let taking = tokio::task::spawn_blocking(move || {
        let result = taker.take_document(&taken);
        (taken, result)
    });
    let Ok((taken, result)) = taking.await else { return };
    if let Err(error) = &result {
        let (document, home) = (&taken.document, &taken.home.nickname);
        tracing::warn!(document, home, error, "cannot take what the authority's home has told");
    }
    let now = unix_ms() / 1_000;
    gateway.peers.with(|state| state.handle_taken(&taken, result.is_ok(), now));
    gateway.tell(Command::Judge).await;
}

/// Does for a replica what it was asked for, beside all else.
fn forwarded(gateway: &Arc<Gateway>, peer: PeerId, id: u64, request: Forwarded) {
    let Ok(place) = Arc::clone(&gateway.peers.forwarded).try_acquire_owned() else {
        let text = "the authority's home has too many requests of other hosts; try again";
        let answer = Answered::Refused(ApiError::new(ErrorKind::Unavailable, text));
        return gateway.peers.with(|state| state.answer(peer, id, answer));
    };
    let gateway = Arc::clone(gateway);
    tokio::spawn(async move {
        let _place = place;
        let done = match request {
            Forwarded::Issue { name } => {
                let issued = Arc::clone(&gateway).issue(name).await;
                issued.map(serde_json::to_value)
            }
            Forwarded::Revoke { name } => {
                let revoked = Arc::clone(&gateway).revoke(name).await;
                revoked.map(serde_json::to_value)
            }
            Forwarded::User { change } => {
                let changed = Arc::clone(&gateway).change_user(change).await;
                changed.map(serde_json::to_value)
            }
        };
        let answer = match done {
            Ok(Ok(body)) => Answered::Done(body),
            Ok(Err(error)) => Answered::Refused(ApiError::new(ErrorKind::Internal, error)),
            Err(error) => Answered::Refused(error),
        };
        gateway.peers.with(|state| state.answer(peer, id, answer));
    });
}

async fn save(peers: &Peers) {
    let (saved, mappings) = peers.with_quietly(|state| {
        let gateways = state.gateways().cloned().collect();
        let saved = SavedPeers { replica: state.replica().cloned(), gateways };
        (saved, state.mappings().cloned().collect::<Vec<_>>())
    });
    let store = peers.store.clone();
    let saving = tokio::task::spawn_blocking(move || {
        store.save_or_later(PEERS_FILE, &saved);
        store.save_or_later(ADDRESSES_FILE, &mappings);
    });
    let _ = saving.await;
}

impl Peers {
    fn next_output(&self) -> Option<Output> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).poll_output()
    }

    /// The fingerprint of what this host serves by; empty: of nothing.
    fn fingerprint(&self) -> String {
        self.with_quietly(|state| state.fingerprint().unwrap_or_default().to_owned())
    }

    /// Looks at the state, which has no outputs from that.
    pub(super) fn with_quietly<T>(&self, look: impl FnOnce(&super::exchange::Exchange) -> T) -> T {
        look(&self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Gateway {
    /// Tells others whether this host serves, and by which places.
    async fn tell_serves(&self) {
        // A gateway that ends with its daemon serves again with the next one.
        let is_ending = self.peers.is_ending();
        let is_serving = !is_ending && matches!(&*self.state.borrow(), State::Serving { .. });
        let wanted = self.wanted_now();
        if wanted.is_none() && is_ending {
            return self.peers.with(super::exchange::Exchange::set_not_serving);
        }
        let serves = match wanted {
            None => None,
            Some(wanted) => Some(super::message::Serves {
                network: wanted.network().to_owned(),
                remotes: self.own_places().await,
                is_serving,
                by: self.peers.fingerprint(),
            }),
        };
        self.peers.with(|state| state.set_serves(serves));
    }
}
