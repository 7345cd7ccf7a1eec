//! Path status for users: states, named reasons, and one line per change.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};
use weft_crypto::{Cipher, Format, PeerId};

use crate::engine_api::{Encapsulation, EngineKind, PathId};

/// The state of a path (`docs/design/paths.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PathState {
    /// Not yet proven.
    Probing,
    /// Proven, not in use.
    Standby,
    /// Proven, and the peer's frames take it.
    Active,
    /// Carries nothing now; retried indefinitely.
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
    /// The peer has not offered any SA yet.
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
    /// This host's kernel lacks ESP.
    KernelWithoutEsp,
    /// This host's kernel has no data channel device, or an unsuitable one.
    KernelWithoutOvpn,
    /// This host's kernel lacks VXLAN.
    KernelWithoutVxlan,
    /// This host's kernel lacks the Open vSwitch datapath that the configuration asks for.
    KernelWithoutOvs,
    /// The guard cannot be set up, so the kernel engine must not run.
    NftMissing,
    /// The guard is being set up; until then the kernel engine must not run.
    AwaitingGuard,
    /// A raw path's probes are unanswered while the link to the peer works.
    Protocol50Blocked,
    /// The probes of a path in UDP are unanswered while the link to the peer works. No other path to
    /// the same port of the peer works.
    DataPortsBlocked,
    /// The peer's kernel opens the packets of a path of this format, but its host's firewall drops the
    /// inner packets, or the frames among them.
    HostFirewall(Format),
    /// There is a NAT between the hosts, which protocol 50 does not pass.
    Nat,
    /// Another peer has the same address, and kernel policies cannot tell the two apart: no format
    /// `esp` for this one on the kernel.
    AddressShared,
    /// The two engines have no AEAD in common.
    CipherMissing,
    /// The configuration excludes the engine.
    Forced,
    /// The host does not offer the engine and does not say why.
    NotOffered,
    /// A reason that the peer reports for its own side, as text.
    Peer(String),
    /// The number of lanes of the path in use that carry nothing, and of all its lanes: a firewall admits only
    /// replies.
    LanesBlocked(u16, u16),
    /// Several reasons at once.
    Several(Vec<Reason>),
}

/// The nftables rules here are those of the README.
const FIREWALL_AFTER_IPSEC: &str = "peer's host firewall drops UDP 6787 after IPsec; accept: \
     udp dport { 6787, 6788 } meta ipsec exists";
const FIREWALL_AFTER_OVPN: &str = "peer's host firewall drops UDP 6787 after the data channel; \
     accept: iifname \"weft-ovpn\" udp dport { 6787, 6788 }";

/// Bytes of a peer's text that status shows.
const PEER_TEXT_MAX_BYTES: usize = 120;

impl Reason {
    /// A peer's reason for its own side, truncated and stripped of control characters.
    pub(crate) fn of_peer(text: &str) -> Self {
        let mut end = text.len().min(PEER_TEXT_MAX_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let text = text.get(..end).unwrap_or_default();
        Self::Peer(text.chars().filter(|character| !character.is_control()).collect())
    }

    /// Merges several reasons; each is named once, in the order of their texts.
    pub(crate) fn of_all(reasons: impl IntoIterator<Item = Self>) -> Option<Self> {
        let named = reasons.into_iter().map(|reason| (reason.to_string(), reason));
        let mut named: Vec<Self> =
            named.collect::<BTreeMap<String, Self>>().into_values().collect();
        if named.len() > 1 { Some(Self::Several(named)) } else { named.pop() }
    }
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
            Self::KernelWithoutEsp => "kernel without ESP",
            Self::KernelWithoutOvpn => "kernel without ovpn",
            Self::KernelWithoutVxlan => "kernel without VXLAN",
            Self::KernelWithoutOvs => "kernel without Open vSwitch",
            Self::NftMissing => "nft missing",
            Self::AwaitingGuard => "waiting for nft to set the guard",
            Self::Protocol50Blocked => "protocol 50 blocked",
            Self::DataPortsBlocked => "data ports blocked",
            Self::HostFirewall(Format::Ovpn) => FIREWALL_AFTER_OVPN,
            Self::HostFirewall(_) => FIREWALL_AFTER_IPSEC,
            Self::Nat => "NAT",
            Self::AddressShared => "address shared",
            Self::CipherMissing => "cipher missing",
            Self::Forced => "forced by configuration",
            Self::NotOffered => "not offered",
            Self::Peer(text) => return write!(f, "peer: {text}"),
            Self::LanesBlocked(blocked, of) => {
                return write!(f, "lanes blocked: {blocked} of {of}");
            }
            Self::Several(reasons) => {
                for (index, reason) in reasons.iter().enumerate() {
                    let between = if index == 0 { "" } else { "; " };
                    write!(f, "{between}{reason}")?;
                }
                return Ok(());
            }
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
    /// The path; `None` where there can be none between the two hosts: then `reason` says why, for
    /// this engine, that of the peer, or both.
    #[serde(skip)]
    pub path: Option<PathId>,
    /// The wire format.
    pub format: Option<Format>,
    /// The engine at this end.
    pub engine: Option<EngineKind>,
    /// The engine at the peer's end.
    pub remote_engine: Option<EngineKind>,
    /// How packets of format `esp` travel.
    pub encapsulation: Option<Encapsulation>,
    /// The state.
    pub state: PathState,
    /// Why it is not active.
    pub reason: Option<Reason>,
    /// Of the active path alone: the reason why the most preferred unused path is not in use. `None`: the active one
    /// is the best that two hosts can have.
    pub why_not_best: Option<Reason>,
    /// Of the active path alone: lanes that nothing gets through on.
    pub lanes_blocked: Option<Reason>,
    /// When it came into this state.
    #[serde(skip)]
    pub since: Instant,
    /// When a failed path is tried again.
    #[serde(skip)]
    pub next_try: Option<Instant>,
    /// The AEAD it sends with.
    pub cipher: Option<Cipher>,
    /// Packets are sealed: always, but on a path of format `plain`.
    pub encrypted: bool,
    /// The inner MTU, in bytes, that probes have proven.
    pub mtu: Option<u16>,
    /// The MTU, in bytes, of the peer's containers, if it says.
    pub container_mtu: Option<u16>,
    /// Smoothed round-trip time: the probe over the path, its answer over the link.
    pub rtt: Option<Duration>,
    /// The destination of its packets.
    pub remote: Option<SocketAddr>,
    /// How often the peer has taken a new SA in place of an older one (this host receives on it).
    pub rekeys: u64,
    /// The link is down; data goes on until the grace period ends.
    pub link_down: bool,
}

/// One line for a peer, of all its entries: the active path, else the path that comes nearest to carrying frames.
/// With nothing usable, the reasons of all that were tried.
pub fn overall<'a>(entries: impl IntoIterator<Item = &'a PathStatus>) -> Option<PathStatus> {
    let entries: Vec<&PathStatus> = entries.into_iter().collect();
    let tried: Vec<&PathStatus> =
        entries.iter().copied().filter(|entry| entry.path.is_some()).collect();
    let in_state = |state| tried.iter().find(|entry| entry.state == state).copied();
    let nearest = [PathState::Active, PathState::Standby, PathState::Probing];
    if let Some(nearest) = nearest.into_iter().find_map(in_state) {
        return Some(nearest.clone());
    }
    let Some(first) = tried.first() else { return entries.first().map(|&entry| entry.clone()) };
    Some(PathStatus {
        reason: Reason::of_all(tried.iter().filter_map(|entry| entry.reason.clone())),
        since: tried.iter().map(|entry| entry.since).max().unwrap_or(first.since),
        next_try: tried.iter().filter_map(|entry| entry.next_try).min(),
        ..(*first).clone()
    })
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
    /// The engine at the peer's end.
    pub remote_engine: Option<EngineKind>,
    /// How packets of format `esp` travel.
    pub encapsulation: Option<Encapsulation>,
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
        if let (Some(format), Some(engine), Some(remote)) =
            (self.format, self.engine, self.remote_engine)
        {
            write!(f, " ({format}, {} to {}", engine.name(), remote.name())?;
            self.encapsulation.iter().try_for_each(|how| write!(f, ", {}", how.name()))?;
            f.write_str(")")?;
        }
        write!(f, ": {} -> {}", self.from, self.to)?;
        self.reason.iter().try_for_each(|reason| write!(f, ", {reason}"))
    }
}

/// Ignored messages and events, by reason.
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
            (Reason::KernelWithoutEsp, "kernel without ESP"),
            (Reason::KernelWithoutOvpn, "kernel without ovpn"),
            (Reason::KernelWithoutVxlan, "kernel without VXLAN"),
            (Reason::KernelWithoutOvs, "kernel without Open vSwitch"),
            (Reason::NftMissing, "nft missing"),
            (Reason::AwaitingGuard, "waiting for nft to set the guard"),
            (Reason::Protocol50Blocked, "protocol 50 blocked"),
            (Reason::DataPortsBlocked, "data ports blocked"),
            (
                Reason::HostFirewall(Format::Esp),
                "peer's host firewall drops UDP 6787 after IPsec; accept: udp dport { 6787, 6788 } \
                 meta ipsec exists",
            ),
            (
                Reason::HostFirewall(Format::Ovpn),
                "peer's host firewall drops UDP 6787 after the data channel; accept: iifname \
                 \"weft-ovpn\" udp dport { 6787, 6788 }",
            ),
            (Reason::Nat, "NAT"),
            (Reason::AddressShared, "address shared"),
            (Reason::CipherMissing, "cipher missing"),
            (Reason::Forced, "forced by configuration"),
            (Reason::NotOffered, "not offered"),
            (Reason::Peer("kernel without ESP".to_owned()), "peer: kernel without ESP"),
            (Reason::LanesBlocked(1, 2), "lanes blocked: 1 of 2"),
            (
                Reason::Several(vec![Reason::DataPortsBlocked, Reason::Protocol50Blocked]),
                "data ports blocked; protocol 50 blocked",
            ),
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
    fn several_reasons_are_named_once_each_in_a_stable_order() {
        let both = [Reason::Protocol50Blocked, Reason::DataPortsBlocked, Reason::Protocol50Blocked];
        let both = Reason::of_all(both).unwrap();
        assert_eq!(both.to_string(), "data ports blocked; protocol 50 blocked");
        assert_eq!(Reason::of_all([Reason::Nat, Reason::Nat]), Some(Reason::Nat));
        assert_eq!(Reason::of_all([]), None);
    }

    #[test]
    fn a_text_of_a_peer_cannot_disturb_a_terminal() {
        let text = format!("no\u{1b}[2J ESP\n{}", "\u{e9}".repeat(500));
        let Reason::Peer(shown) = Reason::of_peer(&text) else { panic!() };
        assert!(shown.len() <= PEER_TEXT_MAX_BYTES && shown.starts_with("no[2J ESP\u{e9}"));
    }

    #[test]
    fn a_change_is_one_line() {
        let change = PathChange {
            peer: PeerId::from_bytes([0x5a; 32]),
            path: Some(PathId(1)),
            format: Some(Format::Esp),
            engine: Some(EngineKind::Userspace),
            remote_engine: Some(EngineKind::Kernel),
            encapsulation: Some(Encapsulation::Udp),
            from: PathState::Active,
            to: PathState::Failed,
            reason: Some(Reason::ProbeUnanswered),
        };
        let line = "path to 5a5a5a5a5a5a5a5a (esp, userspace to kernel, udp): active -> failed, \
                    probe unanswered";
        assert_eq!(change.to_string(), line);
    }
}
