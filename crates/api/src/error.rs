//! Refusals of the API.

use serde::{Deserialize, Serialize};

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{error}")]
pub struct ApiError {
    /// The kind of refusal, for scripts.
    pub kind: ErrorKind,
    /// The cause, the object and the remedy.
    pub error: String,
}

impl ApiError {
    /// An error with its text.
    pub fn new(kind: ErrorKind, error: impl std::fmt::Display) -> Self {
        Self { kind, error: error.to_string() }
    }
}

/// Kinds of refusal; each has an HTTP status and, in the CLI, an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request makes no sense (400).
    BadRequest,
    /// The named object does not exist (404).
    NotFound,
    /// The object is already taken (409).
    Conflict,
    /// It is not possible now, but may be later (503).
    Unavailable,
    /// The kernel or Weft itself failed (500).
    Internal,
}

impl ErrorKind {
    /// The HTTP status code.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::NotFound => 404,
            Self::Conflict => 409,
            Self::Unavailable => 503,
            Self::Internal => 500,
        }
    }
}
