//! What the two ends tell each other once TLS is up.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use super::event::{EndReason, Event, SessionError};
use super::key::Stage;
use super::{MESSAGES_INTERVAL_S, MESSAGES_MAX, MESSAGES_TAKEN_MAX, Role, Session};
use crate::messages::{Message, MessageReader, PUSH_BYTES_MAX, PushCollector};

/// How long a client waits for the options before it asks for them, in seconds, as OpenVPN does.
const PUSH_REQUEST_FIRST_S: u64 = 1;
/// How long it waits until it asks again, in seconds.
const PUSH_REQUEST_S: u64 = 5;
/// How long a server passes over further requests, in seconds: its reply cannot be lost.
const PUSH_REPLY_S: u64 = 30;
/// Messages that a client takes with its options, beside others: twice as many as the most options fill.
const PUSH_PARTS_MAX: u32 = (PUSH_BYTES_MAX / 512) as u32;

/// How far the pushing of options has come.
#[derive(Debug, Default)]
pub(super) struct Push {
    pub(super) reader: MessageReader,
    /// Server: the client asked.
    pub(super) is_requested: bool,
    /// Server: the messages that are sent when the client asks, as they go to TLS.
    pub(super) reply: Vec<Zeroizing<Vec<u8>>>,
    /// Server: those of them that TLS has not got yet. The caller's messages come behind.
    pub(super) waiting: VecDeque<Zeroizing<Vec<u8>>>,
    replied_at: Option<Instant>,
    /// When the interval began in which messages are counted, and how many came since.
    counted: Option<(Instant, u32)>,
    pub(super) passed_over: u64,
    /// Client: when it asks next.
    pub(super) requests_at: Option<Instant>,
    pub(super) collector: PushCollector,
    /// Client: the server's options string.
    pub(super) server_options: String,
}

impl Push {
    pub(super) const fn poll_timeout(&self) -> Option<Instant> {
        self.requests_at
    }

    /// Whether another message of the peer is looked at.
    fn has_time_for_message(&mut self, now: Instant) -> bool {
        let interval = Duration::from_secs(MESSAGES_INTERVAL_S);
        let counted = self.counted.filter(|(began, _)| now < *began + interval);
        let (began, count) = counted.unwrap_or((now, 0));
        self.counted = Some((began, count.saturating_add(1)));
        let parts = self.requests_at.map_or(0, |_| PUSH_PARTS_MAX);
        let has_time = count < MESSAGES_TAKEN_MAX.saturating_add(parts);
        self.passed_over += u64::from(!has_time);
        has_time
    }

    /// Client: it has a key, and waits for its options.
    pub(super) fn await_options(&mut self, now: Instant) {
        self.requests_at = Some(now + Duration::from_secs(PUSH_REQUEST_FIRST_S));
    }
}

impl Session {
    /// Sends a message, as soon as there is a key for it: INFO_PRE, PUSH_UPDATE, an answer to a challenge.
    ///
    /// # Errors
    /// The session is over, or too much waits.
    pub fn send(&mut self, now: Instant, message: &Message) -> Result<(), SessionError> {
        if self.over_at.is_some() {
            return Err(SessionError::Over);
        }
        if self.messages.len() >= MESSAGES_MAX {
            return Err(SessionError::TooManyMessages(self.messages.len()));
        }
        self.messages.push_back(Zeroizing::new(message.to_bytes()));
        self.flush(now);
        Ok(())
    }

    pub(super) fn handle_push_timeout(&mut self, now: Instant) {
        if self.push.requests_at.is_none_or(|at| at > now) {
            return;
        }
        self.push.requests_at = Some(now + Duration::from_secs(PUSH_REQUEST_S));
        // A full queue is asked again later.
        let _ = self.send(now, &Message::PushRequest);
    }

    /// Reads what TLS gave.
    pub(super) fn read_messages(&mut self, now: Instant) -> Result<(), EndReason> {
        if self.current.stage < Stage::Decision || self.current.plain.is_empty() {
            return Ok(());
        }
        let bytes = std::mem::take(&mut self.current.plain);
        for text in self.push.reader.handle_bytes(&bytes)? {
            if !self.push.has_time_for_message(now) {
                continue;
            }
            // OpenVPN leaves out what it cannot read, too.
            let Ok(message) = Message::parse(&text) else { continue };
            match self.role {
                Role::Server(_) => self.handle_client_says(now, message)?,
                Role::Client(_) => self.handle_server_says(now, message)?,
            }
        }
        Ok(())
    }

    fn handle_client_says(&mut self, now: Instant, message: Message) -> Result<(), EndReason> {
        match message {
            Message::PushRequest => {
                self.push.is_requested = true;
                self.reply_to_push(now);
            }
            Message::Exit => return Err(EndReason::PeerExit),
            other => self.events.push_back(Event::Message(other)),
        }
        Ok(())
    }

    /// Server: sends the options, if the client waits for them and they are known.
    pub(super) fn reply_to_push(&mut self, now: Instant) {
        let pause = Duration::from_secs(PUSH_REPLY_S);
        let is_again = self.push.replied_at.is_some_and(|at| now < at + pause);
        let is_under_way = !self.push.waiting.is_empty();
        if !self.push.is_requested || self.push.reply.is_empty() || is_again || is_under_way {
            return;
        }
        if self.push.replied_at.replace(now).is_none() {
            self.events.push_back(Event::Connected);
        }
        self.push.waiting.extend(self.push.reply.iter().cloned());
    }

    fn handle_server_says(&mut self, now: Instant, message: Message) -> Result<(), EndReason> {
        match message {
            Message::PushReply(part) => {
                let is_awaited = self.push.requests_at.is_some();
                if let Some(options) = self.push.collector.handle_part(part)? {
                    if is_awaited {
                        (self.push.requests_at, self.push.counted) = (None, None);
                        self.handle_options(now, options)?;
                    } else {
                        // Such as a new token behind a renewal.
                        self.take_token(&options);
                    }
                }
            }
            Message::AuthFailed(failure) => return Err(EndReason::AuthFailed(failure)),
            Message::AuthPending { timeout_s } => {
                let window = self.role.timing().hand_window;
                let wait = timeout_s.map_or(window, |wait_s| Duration::from_secs(wait_s.into()));
                self.current.deadline = now + wait.max(window);
                self.events.push_back(Event::Message(Message::AuthPending { timeout_s }));
            }
            Message::Restart { preserve, next_remote, text } => {
                return Err(EndReason::Restart { preserve, next_remote, text });
            }
            Message::Halt(text) => return Err(EndReason::Halt(text)),
            Message::Exit => return Err(EndReason::PeerExit),
            other => self.events.push_back(Event::Message(other)),
        }
        Ok(())
    }
}
