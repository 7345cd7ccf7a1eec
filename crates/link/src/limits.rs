//! All limits of this crate, each with its unit in its name.

use std::time::Duration;

/// The UDP port of links.
pub const DEFAULT_PORT: u16 = 6783;

/// The newest and the oldest link protocol that this version supports.
pub const PROTOCOL_VERSION: u16 = 1;

/// A message over a link is at most this long; a longer one ends the link.
pub const MESSAGE_MAX_BYTES: usize = 1 << 20;

/// The application's hello, as JSON, is at most this long.
pub const HELLO_MAX_BYTES: usize = 64 << 10;

/// A nickname is cut to this length.
pub const NICKNAME_MAX_BYTES: usize = 255;

/// A password or network secret is at most this long.
pub const SECRET_MAX_BYTES: usize = 1024;

/// A reason that crosses the wire is cut to this length.
pub const REASON_MAX_BYTES: usize = 256;

/// Messages that may wait to be sent to one peer; one more ends the link. The greeting of a large mesh has one for
/// each host on each network.
pub const OUTBOX_MAX_MESSAGES: usize = 131_072;

/// Bytes that may wait to be sent to one peer; more end the link.
pub const OUTBOX_MAX_BYTES: usize = 16 << 20;

/// Bytes of received messages of one link that may wait for the application. Above this, the peer is slowed
/// down.
pub const INBOX_MAX_BYTES: usize = 4 << 20;

/// Target and refusal events that may wait for the application; further ones are only logged.
pub const NOTICES_MAX: usize = 1024;

/// Concurrent links.
pub const LINKS_MAX: usize = 1024;

/// Targets and remembered peers that may be dialled.
pub const DIALS_MAX: usize = 2048;

/// Addresses tried for one name.
pub const ADDRESSES_MAX: usize = 8;

/// Strangers' inbound connections that may wait for admission at once; one more takes an older one's place.
pub const UNADMITTED_MAX: usize = 64;

/// With this many connections waiting in all, a source must first prove its address by a QUIC retry.
pub const UNADMITTED_BEFORE_RETRY_MAX: usize = 4;

/// Inbound connections from known peers' last addresses that may wait for admission, apart from those of
/// strangers.
pub const KNOWN_PLACES_MAX: usize = 256;

/// Of those, the connections from one address.
pub const KNOWN_PLACES_PER_HOST_MAX: usize = 8;

/// Inbound connections of one known peer, by its key, that may wait for admission.
pub const KNOWN_PLACES_PER_PEER_MAX: usize = 4;

/// Admitted peers remembered as known; the oldest is forgotten first.
pub const KNOWN_PEERS_MAX: usize = 2048;

/// Password attempts of one address (of IPv6: one /64) a minute that are answered at once, unless they succeed.
pub const FAILURES_PER_MINUTE_MAX: u32 = 5;

/// The same for one /56 of IPv6.
pub const FAILURES_PER_SITE_PER_MINUTE_MAX: u32 = 10;

/// The same for one /24 of IPv4 or one /48 of IPv6.
pub const FAILURES_PER_PROVIDER_PER_MINUTE_MAX: u32 = 30;

/// The same for all strangers together.
pub const FAILURES_IN_ALL_PER_MINUTE_MAX: u32 = 120;

/// Password attempts that may wait for their turn.
pub const WAITING_MAX: usize = UNADMITTED_MAX / 2;

/// Longest delay of an answer; further attempts meanwhile are refused as busy.
pub const FAILURE_DELAY_MAX_S: u64 = 48;

/// Sources and networks whose failures are remembered; the oldest is forgotten first.
pub const FAILURE_SOURCES_MAX: usize = 4096;

/// Refused sources that `status` shows; the oldest is forgotten first.
pub const REFUSALS_MAX: usize = 64;

/// Refusals reported and logged a minute, and in one burst, from all sources.
pub const REFUSALS_TOLD_PER_MINUTE: u32 = 20;

/// Peers that the application may refuse for good.
pub const REFUSED_PEERS_MAX: usize = 1024;

/// Live join tokens; one more drops the oldest.
pub const TOKENS_MAX: usize = 64;

/// Lifetime of a join token.
pub const TOKEN_LIFETIME_S: u64 = 3600;

/// Time limit of a QUIC handshake.
pub const HANDSHAKE_TIMEOUT_MS: u64 = 5_000;

/// Pause between the attempts on one address of a name and the next.
pub const ADDRESS_STAGGER_MS: u64 = 250;

/// Interval of session renewals (`docs/design/keys.md`).
pub const RENEW_INTERVAL_S: u64 = 3600;

/// A failed renewal is retried after this, or after a quarter of the interval if shorter.
pub const RENEW_RETRY_S: u64 = 60;

/// A replaced connection is closed after this, even if its last messages have not arrived.
pub const DRAIN_TIMEOUT_MS: u64 = 5_000;

/// After the peer has replaced a connection, its successor must appear within this.
pub const SUCCESSOR_TIMEOUT_MS: u64 = 2_000;

/// Longest pause before redialling a host that presented an unexpected key.
pub const OTHER_KEY_PAUSE_MAX_S: u64 = 600;

/// A link whose peer connects from another instance must show a sign of life within this, or gives way.
pub const RIVAL_TIMEOUT_MS: u64 = 3_000;

/// Time limit for both ends of a connection of this host with itself to appear.
pub const OWN_END_TIMEOUT_MS: u64 = 1_000;

/// Ends of such connections that are remembered; the oldest is forgotten first.
pub const OWN_ENDS_MAX: usize = 64;

/// Pause between two checks for a sign of life, or for the other end.
pub const RIVAL_LOOK_MS: u64 = 20;

/// Characters of each of the two nicknames that the text shows.
pub const RIVAL_NAME_MAX_CHARS: usize = 24;

/// A link that lasted longer than this resets the backoff.
pub const BACKOFF_RESET_S: u64 = 60;

/// Longest wait at shutdown for peers to be told.
pub const SHUTDOWN_TIMEOUT_MS: u64 = 1_000;

/// The timings that a deployment or a test may want to change.
#[derive(Clone, Debug)]
pub struct Timing {
    /// Heartbeat of an idle link.
    pub keep_alive: Duration,
    /// A link is lost after this long without a packet.
    pub idle_timeout: Duration,
    /// Time limit of admission after the QUIC handshake, excluding delays for failures.
    pub admission_timeout: Duration,
    /// Age at which a session is renewed.
    pub renew_interval: Duration,
    /// First pause before dialling again; grows by half each time, jittered.
    pub backoff_first: Duration,
    /// Longest pause before dialling again, and the pause after a refusal.
    pub backoff_max: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            keep_alive: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(8),
            admission_timeout: Duration::from_secs(10),
            renew_interval: Duration::from_secs(RENEW_INTERVAL_S),
            backoff_first: Duration::from_millis(500),
            backoff_max: Duration::from_secs(60),
        }
    }
}
