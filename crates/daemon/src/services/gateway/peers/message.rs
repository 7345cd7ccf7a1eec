//! Messages between the gateways of a mesh. A host that does not serve sends and takes them, too.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use weft_api::ApiError;

use super::addresses::{Key, Mapping};
use super::sessions::Session;
use crate::services::gateway::login::{TakenCode, UserChange};

/// Versions of documents, by name. A version is a digest of the content.
pub(super) type Versions = BTreeMap<String, String>;

/// A message. Links keep the order of messages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Message {
    /// All that the sender says of itself: after link-up and after each change.
    About(About),
    /// The sender missed a message and wants all that is sent after link-up.
    Again,
    /// The sender wants a part of a document from the authority's home.
    Want { document: String, version: String, offset: usize },
    /// A part of a document, whose whole length in bytes is `total`.
    Part { document: String, version: String, offset: usize, total: usize, text: Text },
    /// Addresses of clients: after link-up and after each change.
    Addresses {
        mappings: Vec<Mapping>,
        /// The receiver may ask for more, with the last one's key.
        more: bool,
    },
    /// The sender wants the addresses after this client's.
    More { after: Key },
    /// Sessions that the sender knows: all after link-up, then new ones.
    Sessions { sessions: Vec<Session> },
    /// One-time codes that the sender has taken, which no other host is to take. They go to linked hosts alone.
    Codes { codes: Vec<TakenCode> },
    /// The home of the authority with this fingerprint gives it to the receiver, which asks for the parts.
    Hand {
        id: u64,
        version: String,
        total: usize,
        #[serde(default)]
        fingerprint: String,
    },
    /// The receiver of the authority wants a part.
    WantHanded { id: u64, offset: usize },
    /// A part of the authority, with its private key.
    HandedPart { id: u64, offset: usize, text: Text },
    /// A request for the authority's home.
    Request { id: u64, request: Forwarded },
    /// The answer to a request.
    Answer { id: u64, answer: Answered },
}

/// A host, as it tells others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct About {
    /// It is the home of an authority or of a configuration: it alone issues and revokes.
    #[serde(default)]
    pub(super) home: Option<Home>,
    /// It is to serve clients.
    #[serde(default)]
    pub(super) serves: Option<Serves>,
}

/// The home of an authority, or of a configuration that was taken over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Home {
    /// SHA-256 of the authority's certificate, in hexadecimal digits; of a configuration, `import-` and its number.
    pub(super) fingerprint: String,
    /// What serving needs.
    pub(super) documents: Versions,
}

/// A gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Serves {
    /// The network that clients join.
    pub(crate) network: String,
    /// Its places for profiles.
    pub(crate) remotes: Vec<String>,
    /// It serves now.
    pub(crate) is_serving: bool,
    /// The fingerprint of what it serves by, as its home tells it; empty: it has not said.
    #[serde(default)]
    pub(crate) by: String,
}

/// A request that only the authority's home can carry out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub(crate) enum Forwarded {
    /// `weft openvpn client`.
    Issue { name: String },
    /// `weft openvpn revoke`.
    Revoke { name: String },
    /// `weft openvpn user`.
    User { change: UserChange },
}

/// The answer of the home: the body that its API would give.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answered {
    Done(Value),
    Refused(ApiError),
}

/// It may hold a private key.
impl fmt::Debug for Answered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(_) => f.write_str("Done(..)"),
            Self::Refused(error) => f.debug_tuple("Refused").field(error).finish(),
        }
    }
}

/// A part of a document, which may hold secrets.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Text(pub(super) String);

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Text({} bytes)", self.0.len())
    }
}
