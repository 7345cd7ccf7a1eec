//! OpenVPN's management interface: programs see who is connected, end sessions, and are told what happens.
//!
//! Each connection has a task of its own, which asks the gateway's task as the API does.

mod session;
mod sockets;

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use zeroize::Zeroizing;

pub(super) use self::session::Password;
#[cfg(feature = "faults")]
pub use self::session::gateway_management;
use self::session::{Answer, Ask, Facts, LINE_BYTES_MAX, Session};
pub(super) use self::sockets::{ListenError, Listener};
use super::Gateway;
use super::journal::Weight;
use super::roster::Format;
use super::serving::Command;

/// Connections at the same time; more wait until one ends. OpenVPN has one.
const CONNECTIONS_MAX: usize = 8;
/// How long a connection may take to take an answer.
const WRITE_LIMIT: std::time::Duration = std::time::Duration::from_secs(30);

/// Serves connections for as long as it is polled.
pub(super) async fn serve(gateway: Arc<Gateway>, listener: Listener, format: Format) {
    let facts = Facts { pid: std::process::id(), format };
    let mut connections = JoinSet::new();
    loop {
        let has_room = connections.len() < CONNECTIONS_MAX;
        tokio::select! {
            Some(_) = connections.join_next() => {}
            stream = listener.accept(), if has_room => {
                let (gateway, facts) = (Arc::clone(&gateway), facts.clone());
                let password = listener.password();
                connections.spawn(async move { converse(&gateway, stream, facts, password).await });
            }
        }
    }
}

/// Serves a connection to its end.
async fn converse(
    gateway: &Gateway,
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    facts: Facts,
    password: Option<Password>,
) {
    let mut told = gateway.journal.watch();
    let mut session = Session::new(Instant::now(), facts, password);
    // A line may be a password.
    let mut buffer = Zeroizing::new([0; LINE_BYTES_MAX]);
    loop {
        // One line at a time, so that no more than one answer waits for a slow reader.
        let has_more = session.step(Instant::now());
        if let Some(ask) = session.poll_ask() {
            session.handle_answer(answer(gateway, ask).await);
        }
        let output = session.poll_output();
        if !output.is_empty() {
            let sent = tokio::time::timeout(WRITE_LIMIT, stream.write_all(output.as_bytes())).await;
            if !matches!(sent, Ok(Ok(()))) {
                return;
            }
        }
        if session.is_over() {
            return;
        }
        if has_more {
            continue;
        }
        tokio::select! {
            read = stream.read(&mut buffer[..]) => match read {
                Ok(0) | Err(_) => return,
                Ok(count) => session.handle_bytes(Instant::now(), &buffer[..count]),
            },
            told = told.recv() => match told {
                Ok(told) => session.handle_told(&told),
                Err(RecvError::Lagged(lost)) => {
                    gateway.journal.count_lost(lost);
                    session.handle_lost(SystemTime::now(), lost);
                }
                Err(RecvError::Closed) => return,
            },
            () = tokio::time::sleep_until(session.poll_timeout().into()) => {
                session.handle_timeout(Instant::now());
            }
        }
    }
}

async fn answer(gateway: &Gateway, ask: Ask) -> Answer {
    match ask {
        Ask::Roster => match gateway.roster().await {
            Some(roster) => Answer::Roster(Box::new(roster)),
            None => Answer::Away,
        },
        Ask::End { whom, farewell } => {
            let shown = format!("{whom:?}");
            let text = format!("MANAGEMENT: the sessions of {shown} are to end");
            gateway.journal.line(Weight::Command, &text);
            let ended = gateway.ask(|reply| Command::Kill { whom, farewell, reply }).await;
            tracing::info!(whom = shown, ?ended, "sessions are ended by the management interface");
            ended.map_or(Answer::Away, Answer::Ended)
        }
        Ask::States(max) => Answer::Texts(gateway.journal.states(max)),
        Ask::Lines(max) => Answer::Texts(gateway.journal.lines(max)),
        Ask::Verb => Answer::Verb(gateway.journal.verb()),
        Ask::SetVerb(verb) => {
            gateway.journal.set_verb(verb);
            Answer::Verb(verb)
        }
    }
}
