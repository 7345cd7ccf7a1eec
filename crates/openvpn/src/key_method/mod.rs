//! Key method 2: the first message that each end sends inside TLS, the client first.
//!
//! zero 4 | method 1 | (client only) pre-master 48 | random 32 | random 32 | options | user name | password | peer
//! info.
//! Each of the last four is a length of 2 bytes, big-endian, that counts the NUL behind the text; a missing text has
//! length 0. Fields at the end may be missing altogether.

mod options;
mod peer_info;

use std::fmt;

use zeroize::Zeroizing;

pub use options::{LinkOptions, OptionsWarning, compare_options, option_of};
pub use peer_info::{IvProto, PEER_INFO_LINES_MAX, PEER_INFO_VALUE_BYTES_MAX, PeerInfo};

use crate::key_derivation::{ClientKeySource, PRE_MASTER_BYTES, RANDOM_BYTES, ServerKeySource};

/// The longest message, in bytes. OpenVPN's own is 2,048.
pub const MESSAGE_BYTES_MAX: usize = 8 * 1024;
/// The longest options string, in bytes without its NUL.
pub const OPTIONS_BYTES_MAX: usize = 1024;
/// The longest user name, in bytes without its NUL.
pub const USER_BYTES_MAX: usize = 512;
/// The longest password, in bytes without its NUL; a token of a web login is one.
pub const PASSWORD_BYTES_MAX: usize = 2048;
/// The longest peer info, in bytes without its NUL.
pub const PEER_INFO_BYTES_MAX: usize = 4096;

/// The key method; the upper four bits of its byte are reserved.
const METHOD: u8 = 2;
const METHOD_MASK: u8 = 0x0f;

/// A message that is none, or cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyMethodError {
    /// Peer: another message than that of key method 2.
    #[error("the peer's first message is not of key method 2: it is no OpenVPN, or older than 2.0")]
    OtherMethod,
    /// Peer: a text that is too long.
    #[error("the peer's {field} has {bytes} bytes, at most {max} are allowed: end its session")]
    TooLong {
        /// Which text.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// The longest.
        max: usize,
    },
    /// Peer: the message does not end within [`MESSAGE_BYTES_MAX`].
    #[error("the peer's first message has more than {MESSAGE_BYTES_MAX} bytes: end its session")]
    Endless,
    /// Caller: a text that no message can carry.
    #[error(
        "the {field} to send has {bytes} bytes or a NUL, at most {max} are allowed: shorten it"
    )]
    Unwritable {
        /// Which text.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// The longest.
        max: usize,
    },
}

/// The credentials in a client's message.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Credentials {
    /// None.
    #[default]
    Missing,
    /// A user name and a password; one of them may be empty.
    Given {
        /// Without control characters: each is replaced by `_`.
        user: String,
        /// As it was typed, or a token, or the answer to a challenge.
        password: Zeroizing<String>,
    },
    /// Longer than the limits. The client is to be told so.
    TooLong,
}

impl Credentials {
    /// The text by which a client is told of [`Self::TooLong`].
    pub const TOO_LONG: &'static str = "User name or password is too long";
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("Missing"),
            Self::Given { user, .. } => {
                f.debug_struct("Given").field("user", user).finish_non_exhaustive()
            }
            Self::TooLong => f.write_str("TooLong"),
        }
    }
}

/// What a client sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientMessage {
    /// Its random bytes.
    pub source: ClientKeySource,
    /// The options that must agree; [`compare_options`] says where they do not.
    pub options: String,
    /// User name and password.
    pub credentials: Credentials,
    /// What it can do.
    pub peer_info: PeerInfo,
}

/// What a server sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerMessage {
    /// Its random bytes.
    pub source: ServerKeySource,
    /// The options that must agree.
    pub options: String,
    /// Usually empty.
    pub peer_info: PeerInfo,
}

/// A message and the number of its bytes.
pub type Read<T> = (T, usize);

impl ClientMessage {
    /// Reads a client's message from the bytes that TLS gave so far; `None`: it is not complete. Bytes that end where
    /// a field ends are a message without the fields behind it.
    ///
    /// # Errors
    /// [`KeyMethodError`]: the session must end.
    pub fn read(bytes: &[u8]) -> Result<Option<Read<Self>>, KeyMethodError> {
        let mut reader = Reader { bytes, at: 0 };
        let Some(()) = reader.head()? else { return incomplete(bytes) };
        let mut source = ClientKeySource {
            pre_master: [0; PRE_MASTER_BYTES],
            random1: [0; RANDOM_BYTES],
            random2: [0; RANDOM_BYTES],
        };
        let parts = [&mut source.pre_master[..], &mut source.random1, &mut source.random2];
        let Some(()) = reader.fill(parts) else { return incomplete(bytes) };
        let Some(options) = reader.text()? else { return incomplete(bytes) };
        let options = limited("options string", &options, OPTIONS_BYTES_MAX)?;
        let Some(user) = reader.trailing_text()? else { return incomplete(bytes) };
        let Some(password) = reader.trailing_text()? else { return incomplete(bytes) };
        let Some(peer_info) = reader.trailing_text()? else { return incomplete(bytes) };
        let peer_info = limited("peer info", &peer_info, PEER_INFO_BYTES_MAX)?;
        let credentials = if user.len() > USER_BYTES_MAX || password.len() > PASSWORD_BYTES_MAX {
            Credentials::TooLong
        } else if user.is_empty() && password.is_empty() {
            Credentials::Missing
        } else {
            let password = Zeroizing::new(String::from_utf8_lossy(&password).into_owned());
            Credentials::Given { user: printable(&user), password }
        };
        let message = Self { source, options, credentials, peer_info: PeerInfo::parse(&peer_info) };
        Ok(Some((message, reader.at)))
    }

    /// Appends the message.
    ///
    /// # Errors
    /// [`KeyMethodError::Unwritable`]; nothing is appended.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<(), KeyMethodError> {
        let peer_info = self.peer_info.to_text();
        let (user, password) = match &self.credentials {
            Credentials::Given { user, password } => (Some(user.as_str()), Some(password.as_str())),
            Credentials::Missing | Credentials::TooLong => (None, None),
        };
        let source = [&self.source.pre_master[..], &self.source.random1, &self.source.random2];
        let texts = [
            ("options string", Some(self.options.as_str()), OPTIONS_BYTES_MAX),
            ("user name", user, USER_BYTES_MAX),
            ("password", password, PASSWORD_BYTES_MAX),
            ("peer info", Some(peer_info.as_str()), PEER_INFO_BYTES_MAX),
        ];
        write(&source, &texts, out)
    }
}

impl ServerMessage {
    /// Reads a server's message, as [`ClientMessage::read`] does. Bytes behind it that cannot be one of its fields are
    /// left to the next reader.
    ///
    /// # Errors
    /// [`KeyMethodError`]: the session must end.
    pub fn read(bytes: &[u8]) -> Result<Option<Read<Self>>, KeyMethodError> {
        let mut reader = Reader { bytes, at: 0 };
        let Some(()) = reader.head()? else { return incomplete(bytes) };
        let mut source = ServerKeySource { random1: [0; RANDOM_BYTES], random2: [0; RANDOM_BYTES] };
        let parts = [&mut source.random1[..], &mut source.random2];
        let Some(()) = reader.fill(parts) else { return incomplete(bytes) };
        let Some(options) = reader.text()? else { return incomplete(bytes) };
        let options = limited("options string", &options, OPTIONS_BYTES_MAX)?;
        let mut peer_info = Zeroizing::default();
        for _ in 0..3 {
            let start = reader.at;
            match reader.trailing_text() {
                Ok(Some(text)) => peer_info = text,
                Ok(None) => return incomplete(bytes),
                Err(_) => {
                    reader.at = start;
                    peer_info = Zeroizing::default();
                    break;
                }
            }
        }
        let peer_info = limited("peer info", &peer_info, PEER_INFO_BYTES_MAX)?;
        let message = Self { source, options, peer_info: PeerInfo::parse(&peer_info) };
        Ok(Some((message, reader.at)))
    }

    /// Appends the message.
    ///
    /// # Errors
    /// [`KeyMethodError::Unwritable`]; nothing is appended.
    pub fn write(&self, out: &mut Vec<u8>) -> Result<(), KeyMethodError> {
        let peer_info = self.peer_info.to_text();
        let texts = [
            ("options string", Some(self.options.as_str()), OPTIONS_BYTES_MAX),
            ("user name", None, 0),
            ("password", None, 0),
            ("peer info", Some(peer_info.as_str()), PEER_INFO_BYTES_MAX),
        ];
        write(&[&self.source.random1, &self.source.random2], &texts, out)
    }
}

/// Whether to wait for more.
const fn incomplete<T>(bytes: &[u8]) -> Result<Option<T>, KeyMethodError> {
    if bytes.len() > MESSAGE_BYTES_MAX { Err(KeyMethodError::Endless) } else { Ok(None) }
}

fn limited(field: &'static str, text: &[u8], max: usize) -> Result<String, KeyMethodError> {
    if text.len() > max {
        return Err(KeyMethodError::TooLong { field, bytes: text.len(), max });
    }
    Ok(String::from_utf8_lossy(text).into_owned())
}

/// A name without control characters.
fn printable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars().map(|char| if char.is_control() { '_' } else { char }).collect()
}

fn write(
    source: &[&[u8]],
    texts: &[(&'static str, Option<&str>, usize)],
    out: &mut Vec<u8>,
) -> Result<(), KeyMethodError> {
    for (field, text, max) in texts {
        let text = text.unwrap_or_default();
        if text.len() > *max || text.contains('\0') {
            return Err(KeyMethodError::Unwritable { field, bytes: text.len(), max: *max });
        }
    }
    out.extend_from_slice(&[0, 0, 0, 0, METHOD]);
    source.iter().for_each(|part| out.extend_from_slice(part));
    for (_, text, _) in texts {
        match text {
            Some(text) if !text.is_empty() => {
                let length = u16::try_from(text.len() + 1).unwrap_or(0);
                out.extend_from_slice(&length.to_be_bytes());
                out.extend_from_slice(text.as_bytes());
                out.push(0);
            }
            _ => out.extend_from_slice(&[0, 0]),
        }
    }
    Ok(())
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(count)?;
        let taken = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn head(&mut self) -> Result<Option<()>, KeyMethodError> {
        let Some(head) = self.take(5) else {
            let zeros = self.bytes.iter().take(4).all(|byte| *byte == 0);
            return if zeros { Ok(None) } else { Err(KeyMethodError::OtherMethod) };
        };
        if head[..4] != [0; 4] || head[4] & METHOD_MASK != METHOD {
            return Err(KeyMethodError::OtherMethod);
        }
        Ok(Some(()))
    }

    fn fill<const N: usize>(&mut self, parts: [&mut [u8]; N]) -> Option<()> {
        for part in parts {
            let taken = self.take(part.len())?;
            part.copy_from_slice(taken);
        }
        Some(())
    }

    /// A text up to its NUL; `None`: it is not complete. It may be longer than its limit.
    fn text(&mut self) -> Result<Option<Zeroizing<Vec<u8>>>, KeyMethodError> {
        let Some(length) = self.take(2) else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        if length > MESSAGE_BYTES_MAX {
            let max = MESSAGE_BYTES_MAX;
            return Err(KeyMethodError::TooLong { field: "text", bytes: length, max });
        }
        let Some(text) = self.take(length) else { return Ok(None) };
        // OpenVPN puts the NUL over the last byte, whatever that is.
        let text = text.split_last().map_or(&[][..], |(_, text)| text);
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        Ok(Some(Zeroizing::new(text[..end].to_vec())))
    }

    /// As [`Self::text`]; empty where the message has ended.
    fn trailing_text(&mut self) -> Result<Option<Zeroizing<Vec<u8>>>, KeyMethodError> {
        if self.at == self.bytes.len() { Ok(Some(Zeroizing::default())) } else { self.text() }
    }
}

#[cfg(test)]
mod tests;
