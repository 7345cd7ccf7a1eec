//! Errors as a runtime reads them: a code, a message, and details.

use serde::Serialize;

use super::version::Version;

/// The longest details of an error, in bytes; a runtime copies them into its log and its events.
const DETAILS_BYTES_MAX: usize = 4_096;

/// Codes of errors. Those below 100 are the specification's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Code {
    /// The configuration's version, or a command that it lacks.
    IncompatibleVersion = 1,
    /// A field of the configuration that Weft does not support.
    UnsupportedField = 2,
    /// The container's namespace, or its attachment, does not exist.
    UnknownContainer = 3,
    /// An environment variable is missing or malformed.
    InvalidEnvironment = 4,
    /// Reading or writing failed.
    Io = 5,
    /// The configuration cannot be decoded.
    Decode = 6,
    /// The configuration is decoded, but its values are wrong.
    InvalidConfig = 7,
    /// A condition that passes.
    TryAgainLater = 11,
    /// STATUS: an ADD would fail now.
    Unavailable = 50,
    /// STATUS: an ADD would fail now, and running containers are cut off.
    CutOff = 51,
    /// Anything else that failed in the daemon.
    Internal = 100,
    /// The container already has an interface of that name.
    InterfaceExists = 101,
    /// CHECK: a resource of the attachment is missing.
    CheckFailed = 102,
    /// The requested address is in use, or no address is free.
    NoAddress = 103,
    /// A DEL of the same attachment came after this ADD had begun.
    Deleted = 104,
    /// GC: some attachments remain.
    GcIncomplete = 105,
}

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{msg}{}{details}", if details.is_empty() { "" } else { ": " })]
pub struct CniError {
    /// For programs.
    pub code: Code,
    /// The failure, in a few words.
    pub msg: String,
    /// Cause and remedy; may be empty.
    pub details: String,
}

impl CniError {
    /// An error with its cause and remedy, which are cut if they are long.
    pub fn new(code: Code, msg: impl Into<String>, details: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: shorten(details.into(), DETAILS_BYTES_MAX) }
    }

    /// The object that goes to standard output.
    #[must_use]
    pub fn to_json(&self, version: Version) -> String {
        let object = Object {
            cni_version: version.as_str(),
            code: self.code as u32,
            msg: &self.msg,
            details: &self.details,
        };
        // Texts and a number always serialize.
        serde_json::to_string(&object).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct Object<'a> {
    #[serde(rename = "cniVersion")]
    cni_version: &'static str,
    code: u32,
    msg: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    details: &'a str,
}

/// Cuts a text to at most `limit` bytes, between characters.
pub(super) fn shorten(mut text: String, limit: usize) -> String {
    if text.len() > limit {
        let end = (0..=limit).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}
