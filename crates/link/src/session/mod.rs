//! The life of a link: its connection, its two streams, replacement, renewal, end. The modules inside dial, at
//! first and after the end of a link.

pub(crate) mod connect;
pub(crate) mod dial;

use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::{ConnectionError, RecvStream, SendStream};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{sleep, timeout};
use weft_crypto::{PeerId, SessionKey};

use crate::error::{CloseCode, Failure};
use crate::event::{Event, Inbox};
use crate::limits::{
    DIALS_MAX, DRAIN_TIMEOUT_MS, MESSAGE_MAX_BYTES, RENEW_RETRY_S, SUCCESSOR_TIMEOUT_MS,
};
use crate::link::{Admitted, Halves, Link};
use crate::outbox::Outbox;
use crate::rival;
use crate::shared::{DialKey, Shared, State};
use crate::socket::canonical;
use crate::status::LinkState;
use crate::target::Target;
use crate::wire::{DECISION_MAX_BYTES, Decision, FrameError, Step, read_frame, write_frame};

const DRAIN_TIMEOUT: Duration = Duration::from_millis(DRAIN_TIMEOUT_MS);
const SUCCESSOR_TIMEOUT: Duration = Duration::from_millis(SUCCESSOR_TIMEOUT_MS);
const REPLACED: &[u8] = b"replaced by a newer connection";

/// The outcome for an admitted connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is the link.
    Up(PeerId),
    /// There is another connection, which both sides keep.
    Duplicate(PeerId),
}

/// Makes an admitted connection the link with its peer, or not; both sides will agree. A renewal,
/// which only the side with the lower peer id starts, also replaces a live link.
pub(crate) async fn conclude(
    shared: &Arc<Shared>,
    mut admitted: Admitted,
    renewal: bool,
    limit: Duration,
) -> Result<Outcome, Failure> {
    rival::check(shared, &admitted).await?;
    if shared.me < admitted.peer {
        return decide(shared, admitted, renewal);
    }
    let frame = match timeout(limit, read_frame(&mut admitted.recv, DECISION_MAX_BYTES)).await {
        Ok(frame) => frame,
        Err(_) => return Err(Failure::refused(CloseCode::Timeout, "the peer did not decide")),
    };
    match frame {
        Ok(bytes) => match Step::decode(&bytes) {
            Some(Step::Use(decision)) => follow(shared, admitted, decision),
            _ => Err(Failure::protocol("the peer sent something else than its decision")),
        },
        // The peer may also have decided for this connection, and then for a newer one.
        Err(FrameError::Lost(ConnectionError::ApplicationClosed(close)))
            if matches!(
                CloseCode::from_wire(close.error_code),
                CloseCode::Duplicate | CloseCode::Replaced
            ) =>
        {
            Ok(Outcome::Duplicate(admitted.peer))
        }
        Err(error) => Err(error.into_failure(|end| Failure::of_peer(end, &shared.versions))),
    }
}

/// The side with the lower peer id: takes the connection unless both have a live one.
fn decide(shared: &Arc<Shared>, admitted: Admitted, renewal: bool) -> Result<Outcome, Failure> {
    let mut state = shared.lock();
    let theirs = &admitted.theirs;
    let shared_link = state
        .links
        .get(&admitted.peer)
        .filter(|link| link.instance == theirs.instance && Some(link.session_id) == theirs.current);
    if shared_link.is_some_and(|link| link.conn.close_reason().is_none()) && !renewal {
        admitted.conn.close(CloseCode::Duplicate.to_wire(), b"there is a link already");
        return Ok(Outcome::Duplicate(admitted.peer));
    }
    let renews = shared_link.map(|link| link.session_id);
    state.order += 1;
    let decision = Decision { order: state.order, renews };
    install(shared, &mut state, admitted, decision)
}

/// The other side: follows the newest decision.
fn follow(
    shared: &Arc<Shared>,
    admitted: Admitted,
    decision: Decision,
) -> Result<Outcome, Failure> {
    let mut state = shared.lock();
    let present = state.links.get(&admitted.peer);
    let present = present.filter(|link| link.instance == admitted.theirs.instance);
    let overtaken = present.is_some_and(|link| link.order >= decision.order);
    // The session to continue is gone here: the peer has to start again, too.
    let has = present.map(|link| link.session_id);
    let gone = decision.renews.is_some() && decision.renews != has;
    if overtaken || gone {
        admitted.conn.close(CloseCode::Replaced.to_wire(), REPLACED);
        return Ok(Outcome::Duplicate(admitted.peer));
    }
    install(shared, &mut state, admitted, decision)
}

fn install(
    shared: &Arc<Shared>,
    state: &mut State,
    admitted: Admitted,
    decision: Decision,
) -> Result<Outcome, Failure> {
    let Admitted { conn, send, recv, peer, theirs, session_id, .. } = admitted;
    state.check_wanted(peer)?;
    if admitted.epoch != state.epoch {
        return Err(Failure::refused(CloseCode::Readmit, "the password was changed"));
    }
    let before = state.links.remove(&peer);
    let same_instance = before.as_ref().filter(|link| link.instance == theirs.instance);
    // Both sides hold the same connection: messages in flight on it must arrive.
    let renewed = same_instance.filter(|link| Some(link.session_id) == decision.renews);
    let predecessor = renewed.map(|link| link.halves.clone());
    if let Some(link) = &before {
        link.halves.stop.send_replace(true);
        if predecessor.is_none() {
            link.conn.close(CloseCode::Replaced.to_wire(), REPLACED);
        }
    }
    let link = Link {
        conn: conn.clone(),
        outbox: renewed.map_or_else(Arc::default, |link| link.outbox.clone()),
        session_id,
        closing: None,
        instance: theirs.instance,
        nickname: theirs.nickname,
        direction: same_instance.map_or(admitted.direction, |link| link.direction),
        since: same_instance.map_or_else(Instant::now, |link| link.since),
        order: decision.order,
        halves: Halves::new(),
    };
    tell_up(shared, &link, before.as_ref(), peer, admitted.session, admitted.hello);
    let run = Run {
        shared: shared.clone(),
        peer,
        session_id,
        conn,
        outbox: link.outbox.clone(),
        halves: link.halves.clone(),
        predecessor,
        decision: (shared.me < peer).then_some(decision),
    };
    let remote = canonical(link.conn.remote_address());
    state.order = state.order.max(decision.order);
    state.links.insert(peer, link);
    Shared::forget_refusals(state, remote.ip(), peer);
    state.known.note(peer, remote);
    if let Some(dial) = state.dials.get_mut(&DialKey::Peer(peer)) {
        dial.met_at(peer, remote);
    }
    shared.links_changed();
    tokio::spawn(run.run(send, recv));
    Ok(Outcome::Up(peer))
}

fn tell_up(
    shared: &Shared,
    link: &Link,
    before: Option<&Link>,
    peer: PeerId,
    session: SessionKey,
    hello: serde_json::Value,
) {
    let remote = canonical(link.conn.remote_address());
    let (nickname, direction) = (&link.nickname, link.direction);
    // A renewal keeps the same outbox.
    let renewal = before.is_some_and(|before| Arc::ptr_eq(&before.outbox, &link.outbox));
    let what = match (before, renewal) {
        (None, _) => "link up",
        (Some(_), true) => "link renewed",
        (Some(_), false) => "link replaced",
    };
    tracing::info!(%peer, nickname, %remote, ?direction, "{what}");
    shared.events.send(Event::Up {
        peer,
        nickname: nickname.clone(),
        remote,
        direction,
        session,
        session_id: link.session_id,
        renewal,
        instance: link.instance,
        hello,
    });
}

/// The state of one connection's task.
struct Run {
    shared: Arc<Shared>,
    peer: PeerId,
    session_id: u64,
    conn: quinn::Connection,
    outbox: Arc<Outbox>,
    halves: Halves,
    /// The predecessor, whose messages in both directions precede ours.
    predecessor: Option<Halves>,
    /// To be sent to the peer before anything else.
    decision: Option<Decision>,
}

impl Run {
    async fn run(mut self, send: SendStream, recv: RecvStream) {
        let predecessor = self.predecessor.take();
        let before = predecessor.as_ref();
        let both = async { tokio::join!(self.write(send, before), self.read(recv, before)) };
        tokio::select! {
            _ = both => {}
            () = self.drained() => {}
            () = self.renew() => {}
        }
        self.halves.written.send_replace(true);
        self.halves.read.send_replace(true);
        let error = self.conn.close_reason().unwrap_or_else(|| {
            self.conn.close(CloseCode::Replaced.to_wire(), REPLACED);
            ConnectionError::LocallyClosed
        });
        if is_replaced(&error) {
            // The peer has chosen another connection, which is about to be admitted here.
            let mut changes = self.shared.changed.subscribe();
            let gone = async { while self.is_current() && changes.changed().await.is_ok() {} };
            let _ = timeout(SUCCESSOR_TIMEOUT, gone).await;
        }
        ended(&self.shared, self.peer, self.session_id, &error);
    }

    fn is_current(&self) -> bool {
        let state = self.shared.lock();
        state.links.get(&self.peer).is_some_and(|link| link.session_id == self.session_id)
    }

    async fn write(&self, mut send: SendStream, before: Option<&Halves>) {
        let work = async {
            if let Some(decision) = self.decision {
                write_frame(&mut send, &Step::Use(decision).encode()).await?;
            }
            wait_for(before, |halves| &halves.written).await;
            let mut stop = self.halves.stop.subscribe();
            while !*stop.borrow_and_update() {
                match self.outbox.pop() {
                    Some(message) => write_frame(&mut send, &message).await?,
                    None => {
                        tokio::select! {
                            () = self.outbox.filled() => {}
                            _ = stop.changed() => {}
                        }
                    }
                }
            }
            // Waiting messages belong to the successor; those already written must arrive.
            let _ = send.finish();
            self.halves.written.send_replace(true);
            let _ = send.stopped().await;
            Ok::<(), quinn::WriteError>(())
        };
        tokio::select! {
            result = work => if result.is_err() { self.conn.closed().await; },
            _ = self.conn.closed() => {}
        }
        self.halves.written.send_replace(true);
    }

    async fn read(&self, mut recv: RecvStream, before: Option<&Halves>) {
        wait_for(before, |halves| &halves.read).await;
        let inbox = Inbox::new();
        loop {
            match read_frame(&mut recv, MESSAGE_MAX_BYTES).await {
                Ok(bytes) => {
                    let Some(permit) = inbox.room(bytes.len()).await else { break };
                    if !self.pass_on(bytes, permit) {
                        break;
                    }
                }
                Err(FrameError::End | FrameError::Lost(_)) => break,
                Err(FrameError::Bad(reason)) => {
                    let mut state = self.shared.lock();
                    let link = state.links.get_mut(&self.peer);
                    match link.filter(|link| link.session_id == self.session_id) {
                        Some(link) => link.close(Failure::protocol(reason)),
                        None => self.conn.close(CloseCode::Protocol.to_wire(), reason.as_bytes()),
                    }
                    break;
                }
            }
        }
        self.halves.read.send_replace(true);
    }

    /// Hands a message to the application. `false`: the link is down, or another has begun anew in its place, and the
    /// application has been told.
    fn pass_on(&self, bytes: Vec<u8>, permit: OwnedSemaphorePermit) -> bool {
        let (peer, session_id) = (self.peer, self.session_id);
        let state = self.shared.lock();
        // A renewal keeps the same outbox.
        let link = state.links.get(&peer);
        let goes_on = link.is_some_and(|link| Arc::ptr_eq(&link.outbox, &self.outbox));
        if goes_on {
            self.shared.events.message(Event::Message { peer, session_id, bytes }, permit);
        }
        goes_on
    }

    /// Returns when a replaced or lost connection has had its drain time, even if the application
    /// has not taken its last messages.
    async fn drained(&self) {
        let mut stop = self.halves.stop.subscribe();
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => {}
            _ = self.conn.closed() => {}
        }
        sleep(DRAIN_TIMEOUT).await;
    }

    /// The side with the lower peer id replaces the connection in time; never returns.
    async fn renew(&self) {
        let interval = self.shared.timing.renew_interval;
        let retry = Duration::from_secs(RENEW_RETRY_S).min(interval / 4);
        let mut wait = interval;
        if self.shared.me > self.peer {
            return std::future::pending().await;
        }
        loop {
            sleep(wait).await;
            wait = retry;
            if !self.is_current() {
                break;
            }
            let target = Target::of_peer(self.peer, self.conn.remote_address());
            if let Err(failure) = connect::renew(&self.shared, &target).await {
                let reason = failure.reason();
                tracing::warn!(peer = %self.peer, reason, "session not renewed; trying again");
            }
        }
        std::future::pending::<()>().await;
    }
}

/// Waits until a half of the predecessor has ended, up to a limit.
async fn wait_for(before: Option<&Halves>, half: impl Fn(&Halves) -> &watch::Sender<bool>) {
    if let Some(halves) = before {
        let mut ended = half(halves).subscribe();
        let _ = timeout(DRAIN_TIMEOUT, ended.wait_for(|ended| *ended)).await;
    }
}

fn is_replaced(error: &ConnectionError) -> bool {
    matches!(error, ConnectionError::ApplicationClosed(close)
        if CloseCode::from_wire(close.error_code) == CloseCode::Replaced)
}

/// A connection has ended. If it was the link, the link is down.
fn ended(shared: &Arc<Shared>, peer: PeerId, session_id: u64, error: &ConnectionError) {
    let now = Instant::now();
    let mut state = shared.lock();
    let Some(link) = state.links.remove(&peer) else { return };
    if link.session_id != session_id {
        state.links.insert(peer, link);
        return;
    }
    let failure = link.closing.clone().unwrap_or_else(|| Failure::of_peer(error, &shared.versions));
    shared.tell_same_identity(&failure);
    let reason = failure.reason().to_owned();
    tracing::info!(%peer, nickname = link.nickname, reason, "link down");
    shared.events.send(Event::Down { peer, reason });
    let to = if failure.is_refusal() { LinkState::Failed } else { LinkState::Retrying };
    let mut dialled = false;
    for dial in state.dials.values_mut().filter(|dial| dial.is_for(peer)) {
        dialled = true;
        dial.change(to, Some(&failure), None, now, &shared.events);
    }
    if !dialled && !failure.is_refusal() && !state.closed && state.dials.len() < DIALS_MAX {
        dial::start_peer(shared, &mut state, peer, vec![link.remote()], Some(&failure));
    }
    drop(state);
    shared.links_changed();
}
