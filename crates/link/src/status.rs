//! The status of links, for `weft status connections`.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_crypto::PeerId;

/// The side that dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// This host.
    Outbound,
    /// The peer.
    Inbound,
}

/// The state of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkState {
    /// Looking up the name, or waiting for the first answer.
    Connecting,
    /// No answer, or the link was lost; retried soon.
    Retrying,
    /// Refused for a named reason; retried slowly. Also: a host that was refused here.
    Failed,
    /// Connected, in admission.
    Pending,
    /// Up.
    Established,
}

impl LinkState {
    /// The name in the CLI and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Retrying => "retrying",
            Self::Failed => "failed",
            Self::Pending => "pending",
            Self::Established => "established",
        }
    }
}

/// One target, one link or one refused source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkStatus {
    /// The target as given, else `ADDRESS:PORT` of the peer.
    pub address: String,
    /// The side that dials or dialled.
    pub direction: Direction,
    /// The peer that answers there, once known.
    pub peer: Option<PeerId>,
    /// Its host name, while the link is up.
    pub nickname: Option<String>,
    /// Its state.
    pub state: LinkState,
    /// The reason why it is not established.
    pub reason: Option<String>,
    /// The target is this host itself.
    pub is_itself: bool,
    /// The start of this state; for a refused source, the last refusal.
    pub since: Instant,
    /// Time until it is dialled again.
    pub next_try: Option<Duration>,
    /// How often a source was refused for this reason; 0 for targets and links.
    pub refusals: u64,
    /// Round-trip time of the link, while it is up.
    pub rtt: Option<Duration>,
}
