//! What a user sees of paths: states, named reasons, and one line per change.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};
use weft_crypto::{Cipher, Format, PeerId};

use crate::seam::{EngineKind, PathId};

/// The state of a path (DESIGN section 7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PathState {
    /// Not yet proven.
    Probing,
    /// Proven, not in use.
    Standby,
    /// Proven, and the peer's frames take it.
    Active,
    /// Carries nothing now; tried again for ever.
    Failed,
}

impl PathState {
    /// The value in the CLI and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Probing => "probing",
            Self::Standby => "standby",
            Self::Active => "active",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for PathState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why a path is not in use. Its text is stable: scripts may compare it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The peer has not yet offered anything to send to.
    AwaitingOffer,
    /// Probes are under way.
    Probing,
    /// Probes went out and no answer came.
    ProbeUnanswered,
    /// The link to the peer is gone and did not come back in time.
    LinkLost,
    /// Both hosts take AEADs, but none in common.
    NoCommonCipher,
    /// Both hosts have engines, but none in common by wire format.
    NoCommonFormat,
    /// The engine reported that it cannot go on.
    EngineError(String),
    /// The route does not carry even the smallest packets of a path.
    MtuNotCarried,
    /// The SA came to its limit of packets or bytes before the peer offered a new one.
    SaExhausted,
    /// The SA came to the end of its life before the peer offered a new one.
    SaExpired,
    /// A path that is preferred to this one is in use.
    BetterPathActive,
    /// Better than the active path, but not yet without loss for long enough.
    ProvingClean,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AwaitingOffer => "waiting for offer",
            Self::Probing => "probing",
            Self::ProbeUnanswered => "probe unanswered",
            Self::LinkLost => "link lost",
            Self::NoCommonCipher => "no common cipher",
            Self::NoCommonFormat => "no common format",
            Self::EngineError(text) => return write!(f, "engine error: {text}"),
            Self::MtuNotCarried => "MTU not carried",
            Self::SaExhausted => "SA exhausted",
            Self::SaExpired => "SA expired",
            Self::BetterPathActive => "better path active",
            Self::ProvingClean => "better, not yet 10 s without loss",
        })
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One path as `weft status connections` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathStatus {
    /// The peer.
    pub peer: PeerId,
    /// The path; `None` while the hosts have none in common or have not yet greeted.
    #[serde(skip)]
    pub path: Option<PathId>,
    /// The wire format.
    pub format: Option<Format>,
    /// The engine at this end.
    pub engine: Option<EngineKind>,
    /// The state.
    pub state: PathState,
    /// Why it is not active.
    pub reason: Option<Reason>,
    /// When it came into this state.
    #[serde(skip)]
    pub since: Instant,
    /// When a failed path is tried again.
    #[serde(skip)]
    pub next_try: Option<Instant>,
    /// The AEAD it sends with.
    pub cipher: Option<Cipher>,
    /// Packets are sealed; always true for the formats of this version once a cipher is known.
    pub encrypted: bool,
    /// The inner MTU, in bytes, that probes have proven.
    pub mtu: Option<u16>,
    /// Smoothed round-trip time: the probe over the path, its answer over the link.
    pub rtt: Option<Duration>,
    /// Where its packets are sent.
    pub remote: Option<SocketAddr>,
    /// How often the peer has taken a new SA in place of an older one (this host receives on it).
    pub rekeys: u64,
    /// The link is down; data goes on until the grace period ends.
    pub link_down: bool,
}

/// A path changed its state: one line in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathChange {
    /// The peer.
    pub peer: PeerId,
    /// The path; `None` if the hosts have none in common.
    pub path: Option<PathId>,
    /// The wire format.
    pub format: Option<Format>,
    /// The engine at this end.
    pub engine: Option<EngineKind>,
    /// The state before.
    pub from: PathState,
    /// The state now.
    pub to: PathState,
    /// Why.
    pub reason: Option<Reason>,
}

impl fmt::Display for PathChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "path to {}", self.peer)?;
        if let (Some(format), Some(engine)) = (self.format, self.engine) {
            write!(f, " ({format}, {})", engine.name())?;
        }
        write!(f, ": {} -> {}", self.from, self.to)?;
        self.reason.iter().try_for_each(|reason| write!(f, ", {reason}"))
    }
}

/// What was left aside, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Messages of an older session, or repeated.
    pub messages_stale: u64,
    /// Messages that [`crate::MessageError`] names.
    pub messages_refused: u64,
    /// Messages of a later version.
    pub messages_unknown: u64,
    /// Own messages dropped because the queue was full.
    pub messages_dropped: u64,
    /// Events of engines about paths or SAs that no longer exist.
    pub events_stale: u64,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_that_scripts_compare_are_stable() {
        let names = [
            (Reason::AwaitingOffer, "waiting for offer"),
            (Reason::Probing, "probing"),
            (Reason::ProbeUnanswered, "probe unanswered"),
            (Reason::LinkLost, "link lost"),
            (Reason::NoCommonCipher, "no common cipher"),
            (Reason::NoCommonFormat, "no common format"),
            (Reason::EngineError("no TAP".to_owned()), "engine error: no TAP"),
            (Reason::MtuNotCarried, "MTU not carried"),
            (Reason::SaExhausted, "SA exhausted"),
            (Reason::SaExpired, "SA expired"),
            (Reason::BetterPathActive, "better path active"),
            (Reason::ProvingClean, "better, not yet 10 s without loss"),
        ];
        for (reason, name) in names {
            assert_eq!(serde_json::to_value(&reason).unwrap(), name);
        }
        for state in [PathState::Probing, PathState::Standby, PathState::Active, PathState::Failed]
        {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
    }

    #[test]
    fn a_change_is_one_line() {
        let change = PathChange {
            peer: PeerId::from_bytes([0x5a; 32]),
            path: Some(PathId(1)),
            format: Some(Format::Esp),
            engine: Some(EngineKind::Userspace),
            from: PathState::Active,
            to: PathState::Failed,
            reason: Some(Reason::ProbeUnanswered),
        };
        let line = "path to 5a5a5a5a5a5a5a5a (esp, userspace): active -> failed, probe unanswered";
        assert_eq!(change.to_string(), line);
    }
}
