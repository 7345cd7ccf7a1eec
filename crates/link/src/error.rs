//! Errors, each with its responsible party and its remedy.

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use quinn::{ConnectionError, VarInt};

use crate::limits::{MESSAGE_MAX_BYTES, REASON_MAX_BYTES};

/// Links could not be started, or an argument is unusable.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Configuration, or another process: the address cannot be bound.
    #[error("cannot listen on {address}/udp: {source}; another weft may be running on this host")]
    Bind {
        /// The requested address.
        address: SocketAddr,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The file system's: the identity cannot be read or written.
    #[error("cannot use identity file {}: {source}", path.display())]
    IdentityFile {
        /// The file.
        path: PathBuf,
        /// The file system's reason.
        source: io::Error,
    },
    /// The administrator's: the file holds something else. Restore it, or remove it to become a
    /// new peer.
    #[error("{} does not contain an Ed25519 key in PKCS#8 PEM: restore it, or remove it to become a new peer", path.display())]
    IdentityFormat {
        /// The file.
        path: PathBuf,
    },
    /// Ours: the TLS library refused what we made for it.
    #[error("TLS set-up failed: {0}")]
    Tls(String),
    /// Configuration: the secret is empty or too long.
    #[error("invalid password: use 1 to 1024 bytes")]
    SecretLength,
    /// The application's: its hello is longer than `HELLO_MAX_BYTES`.
    #[error("the application's hello is too long")]
    HelloLength,
    /// The user's: a join token was mistyped or cut.
    #[error(
        "invalid join token: it may be mistyped or incomplete; `weft token` on a host of the network prints a new one"
    )]
    TokenFormat,
    /// The user's: not `HOST`, `HOST:PORT` or `HOST:PORT#KEYHASH`.
    #[error("{0:?} is not HOST, HOST:PORT or HOST#KEYHASH")]
    TargetFormat(String),
    /// The user's: a key hash has 32 to 64 hexadecimal digits.
    #[error("invalid key hash: expected 32 to 64 hexadecimal digits")]
    KeyHashFormat,
}

/// A message was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// No link to that peer: wait for its next `Up`.
    #[error("there is no link to this peer")]
    NotConnected,
    /// Ours: split the message.
    #[error("a message has at most {MESSAGE_MAX_BYTES} bytes")]
    TooLong,
    /// The peer's, or the network's: it accepts too little. The link has been closed and is dialled
    /// again.
    #[error("the peer does not take messages fast enough; the link was closed")]
    Full,
}

/// Why one side ended a connection: the QUIC application error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum CloseCode {
    Shutdown = 1,
    Replaced = 2,
    Duplicate = 3,
    Itself = 4,
    Version = 5,
    WrongPassword = 6,
    BadToken = 7,
    NotReady = 8,
    Busy = 9,
    Protocol = 10,
    Timeout = 11,
    Application = 12,
    Slow = 13,
    Readmit = 14,
    SameIdentity = 15,
    Unknown = 0xffff,
}

impl CloseCode {
    const ALL: [Self; 15] = [
        Self::Shutdown,
        Self::Replaced,
        Self::Duplicate,
        Self::Itself,
        Self::Version,
        Self::WrongPassword,
        Self::BadToken,
        Self::NotReady,
        Self::Busy,
        Self::Protocol,
        Self::Timeout,
        Self::Application,
        Self::Slow,
        Self::Readmit,
        Self::SameIdentity,
    ];

    pub(crate) fn from_wire(code: VarInt) -> Self {
        Self::ALL
            .into_iter()
            .find(|known| u64::from(*known as u32) == code.into_inner())
            .unwrap_or(Self::Unknown)
    }

    pub(crate) fn to_wire(self) -> VarInt {
        VarInt::from_u32(self as u32)
    }

    /// A refusal that time alone does not fix: retried slowly.
    pub(crate) fn is_refusal(self) -> bool {
        matches!(
            self,
            Self::Version
                | Self::WrongPassword
                | Self::BadToken
                | Self::Protocol
                | Self::Application
                | Self::SameIdentity
        )
    }
}

/// Shown on both sides when the passwords differ.
pub const REASON_WRONG_PASSWORD: &str = "wrong password";
/// Shown when a host dials itself.
pub const REASON_ITSELF: &str = "that is this host";
/// Shown on both sides when a join token does not admit.
pub const REASON_BAD_TOKEN: &str = "join token unknown, used or expired";

/// Why an attempt or a link ended, in the words of this side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A named cause, found here or reported by the peer.
    Refused { code: CloseCode, reason: String },
    /// This host holds both ends. Found here, never on a peer's word.
    Itself,
    /// The peer is linked with another live host of this one's identity.
    SameIdentity { reason: String },
    /// The presented key is not the expected one.
    KeyMismatch { reason: String },
    /// No answer came, or the network failed.
    Unreachable { reason: String },
    /// The peer does not know the connection.
    Reset,
}

/// The cause of a failure, independent of its text, which a peer may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The cause is the close code.
    Refused(CloseCode),
    KeyMismatch,
    Unreachable,
}

impl Failure {
    pub(crate) fn refused(code: CloseCode, reason: impl Into<String>) -> Self {
        Self::Refused { code, reason: reason.into() }
    }

    pub(crate) fn protocol(reason: &str) -> Self {
        Self::refused(CloseCode::Protocol, reason)
    }

    pub(crate) fn unreachable(reason: impl Into<String>) -> Self {
        Self::Unreachable { reason: reason.into() }
    }

    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Refused { reason, .. }
            | Self::SameIdentity { reason }
            | Self::KeyMismatch { reason }
            | Self::Unreachable { reason } => reason,
            Self::Itself => REASON_ITSELF,
            Self::Reset => "the peer has restarted",
        }
    }

    pub(crate) fn code(&self) -> Option<CloseCode> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            Self::Itself => Some(CloseCode::Itself),
            Self::SameIdentity { .. } => Some(CloseCode::SameIdentity),
            _ => None,
        }
    }

    /// The failure of an attempt in which the peer may have guessed the password. The next attempt comes later, even
    /// if a reset ended this one.
    pub(crate) fn after_a_guess(self) -> Self {
        match self {
            Self::Reset => Self::protocol("the peer resets each connection"),
            other => other,
        }
    }

    /// The key by which events and log lines are deduplicated.
    pub(crate) fn cause(&self) -> Cause {
        match (self, self.code()) {
            (_, Some(code)) => Cause::Refused(code),
            (Self::KeyMismatch { .. }, None) => Cause::KeyMismatch,
            (_, None) => Cause::Unreachable,
        }
    }

    /// State `failed`, with slow retries, instead of `retrying`.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            Self::Refused { code, .. } => code.is_refusal(),
            Self::Itself | Self::SameIdentity { .. } | Self::KeyMismatch { .. } => true,
            Self::Unreachable { .. } | Self::Reset => false,
        }
    }

    /// The meaning of the end of a connection with a peer that has proven the password or a token.
    pub(crate) fn of_peer(error: &ConnectionError, ours: &RangeInclusive<u16>) -> Self {
        match error {
            ConnectionError::ApplicationClosed(close)
                if CloseCode::from_wire(close.error_code) == CloseCode::SameIdentity =>
            {
                Self::SameIdentity { reason: clean(&String::from_utf8_lossy(&close.reason)) }
            }
            other => Self::of_stranger(other, ours),
        }
    }

    /// The meaning of the end of a connection whose other end may be anyone: that this host has a copy is not believed.
    pub(crate) fn of_stranger(error: &ConnectionError, ours: &RangeInclusive<u16>) -> Self {
        match error {
            ConnectionError::ApplicationClosed(close) => {
                let code = CloseCode::from_wire(close.error_code);
                let text = clean(&String::from_utf8_lossy(&close.reason));
                match code {
                    CloseCode::Itself => Self::protocol(FALSELY_ITSELF),
                    _ => Self::refused(code, told(code, &text, ours)),
                }
            }
            ConnectionError::TimedOut => Self::unreachable("the peer no longer answers"),
            ConnectionError::Reset => Self::Reset,
            ConnectionError::VersionMismatch => {
                Self::unreachable("the peer speaks another version of QUIC")
            }
            ConnectionError::LocallyClosed => Self::unreachable("closed here"),
            ConnectionError::ConnectionClosed(close)
                if close.error_code == quinn::TransportErrorCode::CONNECTION_REFUSED =>
            {
                Self::refused(CloseCode::Busy, "the peer is busy with other connections")
            }
            other => Self::unreachable(clean(&other.to_string())),
        }
    }
}

const FALSELY_ITSELF: &str = "the peer says that it is this host, but has not shown its key";

/// The meaning of a peer's close code, in the words of this side.
fn told(code: CloseCode, text: &str, ours: &RangeInclusive<u16>) -> String {
    match code {
        CloseCode::WrongPassword => REASON_WRONG_PASSWORD.to_owned(),
        CloseCode::BadToken => REASON_BAD_TOKEN.to_owned(),
        CloseCode::Version => match parse_range(text) {
            Some(theirs) => version_mismatch(&theirs, ours),
            None => "the peer speaks another protocol version".to_owned(),
        },
        CloseCode::Shutdown => "the peer was stopped".to_owned(),
        CloseCode::Unknown => "the peer gave up the connection".to_owned(),
        _ => format!("closed by the peer: {text}"),
    }
}

/// The text of a version mismatch, the same on both sides.
pub(crate) fn version_mismatch(theirs: &RangeInclusive<u16>, ours: &RangeInclusive<u16>) -> String {
    format!(
        "peer speaks protocol {}, this host {}: upgrade the older one",
        range_text(theirs),
        range_text(ours)
    )
}

/// `MIN..MAX`, as in a close reason.
pub(crate) fn range_text(range: &RangeInclusive<u16>) -> String {
    format!("{}..{}", range.start(), range.end())
}

fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let (min, max) = text.split_once("..")?;
    Some(min.parse().ok()?..=max.parse().ok()?)
}

/// Makes foreign text safe to show: printable and short.
pub(crate) fn clean(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        let c = if c.is_control() { ' ' } else { c };
        if out.len() + c.len_utf8() > REASON_MAX_BYTES {
            break;
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_from_outside_is_made_harmless() {
        assert_eq!(clean("a\x1b[31m\nb"), "a [31m b");
        assert_eq!(clean(&"ä".repeat(1000)).len(), REASON_MAX_BYTES);
    }

    #[test]
    fn both_ranges_stand_in_a_version_mismatch() {
        let told = told(CloseCode::Version, "2..3", &(1..=1));
        assert_eq!(told, "peer speaks protocol 2..3, this host 1..1: upgrade the older one");
        assert!(!super::told(CloseCode::Version, "x", &(1..=1)).contains(".."));
    }

    #[test]
    fn every_close_code_survives_the_wire() {
        for code in CloseCode::ALL {
            assert_eq!(CloseCode::from_wire(code.to_wire()), code);
        }
        assert_eq!(CloseCode::from_wire(VarInt::from_u32(0)), CloseCode::Unknown);
    }
}
