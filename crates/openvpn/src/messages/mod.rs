//! The messages that the ends of a session exchange inside TLS, behind those of key method 2.
//!
//! A message is a word, a comma and more, in printable characters, with a NUL behind it.

mod auth;
mod push;
mod push_option;
mod reader;
mod secret;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

pub use auth::{Advance, AuthFailure, Challenge, PasswordForm, PendingStep};
pub use push::{
    Continuation, PUSH_BYTES_MAX, PUSH_MESSAGE_BYTES_MAX, PUSH_OPTION_BYTES_MAX, PUSH_OPTIONS_MAX,
    PushCollector, PushPart, PushUpdateOption, push_reply, push_update,
};
pub use push_option::{Gateway, ProtocolFlags, PushOption, PushOptionError, RouteHost, Topology};
pub use reader::{EndlessMessage, MESSAGE_BYTES_MAX, MessageReader};
pub use secret::Secret;

/// A message that cannot be understood, or not be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Peer: an answer that is not base64.
    #[error("the peer's {0} is not base64: it is left out")]
    NotBase64(&'static str),
    /// Peer: more options than any client takes.
    #[error(
        "the server pushes more than {PUSH_OPTIONS_MAX} options or {PUSH_BYTES_MAX} bytes: shorten its push lines"
    )]
    TooMuchPushed,
    /// Configuration: an option of this name with a comma or a control character.
    #[error("the pushed option {0:?} has a comma or a control character: it cannot be pushed")]
    UnpushableCharacter(String),
    /// Configuration: an option that is too long.
    #[error(
        "the pushed option {option:?} has {bytes} bytes, clients take at most {PUSH_OPTION_BYTES_MAX}: shorten it"
    )]
    PushTooLong {
        /// The option's name.
        option: String,
        /// Its length.
        bytes: usize,
    },
}

/// A message of either end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Client: send me my options.
    PushRequest,
    /// Server: the options, or a part of them.
    PushReply(PushPart),
    /// Server: options that change.
    PushUpdate(PushPart),
    /// Server: it does not let the client in.
    AuthFailed(AuthFailure),
    /// Server: somebody still decides; the client waits, this many seconds if it is said.
    AuthPending {
        /// Seconds; `None`: as long as its handshake may take.
        timeout_s: Option<u32>,
    },
    /// Server: a text for the user interface.
    Info(String),
    /// Server: a text for the user interface, before the client is let in. [`PendingStep`] reads it.
    InfoPre(String),
    /// Client: the answer to a challenge of [`PendingStep::Text`].
    ChallengeResponse(Secret),
    /// Server: connect again.
    Restart {
        /// Keep the passwords of this session.
        preserve: bool,
        /// Go on to the next server.
        next_remote: bool,
        /// Why.
        text: String,
    },
    /// Server: end, and do not connect again.
    Halt(String),
    /// Either: the session ends.
    Exit,
    /// Either: a message of applications.
    Custom(String),
    /// Anything else; it is left out.
    Unknown(String),
}

impl Message {
    /// Reads one message.
    ///
    /// # Errors
    /// [`MessageError::NotBase64`]
    pub fn parse(text: &str) -> Result<Self, MessageError> {
        let (word, rest) = match text.split_once(',') {
            Some((word, rest)) => (word, Some(rest)),
            None => (text, None),
        };
        let content = rest.unwrap_or_default();
        Ok(match word {
            "PUSH_REQUEST" => Self::PushRequest,
            "PUSH_REPLY" => Self::PushReply(PushPart::parse(content)),
            "PUSH_UPDATE" => Self::PushUpdate(PushPart::parse(content)),
            "AUTH_FAILED" => Self::AuthFailed(AuthFailure::parse(rest)),
            "AUTH_PENDING" => Self::AuthPending { timeout_s: pending_timeout(content) },
            "INFO" => Self::Info(content.to_owned()),
            "INFO_PRE" => Self::InfoPre(content.to_owned()),
            "CR_RESPONSE" => {
                let bad = MessageError::NotBase64("answer to a challenge");
                let bytes = STANDARD.decode(content).map_err(|_| bad.clone())?;
                Self::ChallengeResponse(Secret::new(String::from_utf8(bytes).map_err(|_| bad)?))
            }
            "RESTART" => restart(content),
            "HALT" => Self::Halt(content.to_owned()),
            "EXIT" => Self::Exit,
            "ACC" => Self::Custom(content.to_owned()),
            _ => Self::Unknown(text.to_owned()),
        })
    }

    /// The message without its NUL. Control characters in texts become spaces. A push of several parts is made by
    /// [`push_reply`].
    pub fn to_text(&self) -> String {
        let with = |word: &str, content: &str| {
            if content.is_empty() { word.to_owned() } else { format!("{word},{content}") }
        };
        let text = match self {
            Self::PushRequest => "PUSH_REQUEST".to_owned(),
            Self::PushReply(part) => with("PUSH_REPLY", &part.to_text()),
            Self::PushUpdate(part) => with("PUSH_UPDATE", &part.to_text()),
            Self::AuthFailed(failure) => with("AUTH_FAILED", &failure.to_text()),
            Self::AuthPending { timeout_s: None } => "AUTH_PENDING".to_owned(),
            Self::AuthPending { timeout_s: Some(seconds) } => {
                format!("AUTH_PENDING,timeout {seconds}")
            }
            Self::Info(text) => with("INFO", text),
            Self::InfoPre(text) => with("INFO_PRE", text),
            Self::ChallengeResponse(answer) => {
                with("CR_RESPONSE", &STANDARD.encode(answer.expose()))
            }
            Self::Restart { preserve, next_remote, text } => {
                let flags = match (preserve, next_remote) {
                    (false, false) => "",
                    (true, false) => "[P]",
                    (false, true) => "[N]",
                    (true, true) => "[PN]",
                };
                with("RESTART", &format!("{flags}{text}"))
            }
            Self::Halt(text) => with("HALT", text),
            Self::Exit => "EXIT".to_owned(),
            Self::Custom(text) => with("ACC", text),
            Self::Unknown(text) => text.clone(),
        };
        text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
    }

    /// The message as it goes to TLS, in one write.
    pub fn to_bytes(&self) -> Vec<u8> {
        let text = self.to_text();
        let mut bytes = Vec::with_capacity(text.len() + 1);
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
        bytes
    }
}

fn pending_timeout(content: &str) -> Option<u32> {
    let keywords = content.split(',');
    let mut timeouts = keywords.filter_map(|keyword| keyword.trim().strip_prefix("timeout "));
    timeouts.find_map(|seconds| seconds.trim().parse().ok())
}

fn restart(content: &str) -> Message {
    let flagged = content.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let (flags, text) = flagged.unwrap_or(("", content));
    Message::Restart {
        preserve: flags.contains('P'),
        next_remote: flags.contains('N'),
        text: text.to_owned(),
    }
}

#[cfg(test)]
mod tests;
