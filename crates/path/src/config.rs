//! The offers and timings of this host, with the figures of `docs/design/esp.md`, `keys.md` and `paths.md`.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use weft_crypto::{Cipher, Format};

use crate::engine_api::{Encapsulation, EngineKind};
use crate::status::Reason;

/// Lanes that one offer may hold; more in a peer's offer are refused.
pub const LANES_MAX: usize = 256;
/// Engines that a peer may name in its hello; the rest is ignored.
pub const ENGINES_MAX: usize = 8;
/// Generations of inbound SAs that one path keeps alive at once: current, offered and draining. Fewer in
/// format `ovpn`, whose packets have eight key ids, and only two where the kernel receives it.
pub const GENERATIONS_MAX: usize = 8;
/// How long a replaced inbound SA still receives, in milliseconds.
pub const DRAIN_MS: u64 = 10_000;
/// The shortest drain, in milliseconds, when generations are replaced so fast that
/// [`GENERATIONS_MAX`] is reached.
pub const DRAIN_SHORTEST_MS: u64 = 2_000;
/// How long data goes on while a lost link reconnects, in milliseconds.
pub const LINK_GRACE_MS: u64 = 60_000;
/// Milliseconds after which a hello or offer without an answer is sent again.
pub const RESEND_MS: u64 = 1_000;
/// Sendings after which an offer without an answer is given up, and a new one made.
pub const OFFER_SENDINGS_MAX: u32 = 6;
/// Shortest time between two new offers of one path, in milliseconds, whatever the cause.
pub const OFFER_INTERVAL_MS: u64 = 100;
/// Milliseconds between NAT keepalives on each path in use.
pub const KEEPALIVE_MS: u64 = 20_000;
/// Probes without an answer after which a path has failed.
pub const PROBES_UNANSWERED_MAX: u32 = 4;
/// Milliseconds that frames stay on a path that failed by silence while no other works. On
/// a busy host only the probes may be late. Afterwards frames are dropped and counted. If the link
/// ends meanwhile, [`LINK_GRACE_MS`] counts instead.
pub const CARRY_ON_MS: u64 = 10_000;
/// Milliseconds without a loss that a better path needs before traffic moves back to it.
pub const CLEAN_BEFORE_MOVE_MS: u64 = 10_000;
/// Milliseconds after which a failed path is retried; the delay doubles with each try ...
pub const RETRY_FIRST_MS: u64 = 1_000;
/// ... up to this.
pub const RETRY_MAX_MS: u64 = 60_000;
/// Milliseconds that the first failure that an engine reports of a path holds it back, so that reports
/// of one event count once. Each further failure holds it back by [`RETRY_FIRST_MS`] and [`RETRY_MAX_MS`].
pub const ENGINE_HOLD_FIRST_MS: u64 = 100;
/// Milliseconds of carrying packets after which a path has recovered: the next failure that
/// its engine reports counts as the first.
pub const ENGINE_SOUND_MS: u64 = 2_000;
/// Milliseconds within which a path relapses: it fails in use without an answer to its active probes, then answers
/// a candidate's probe. Something on the way passes only candidates' probes.
pub const RELAPSE_WITHIN_MS: u64 = 3_000;
/// Milliseconds without frames after a path's first relapse, while another works; each further one doubles the
/// time ...
pub const RELAPSE_FIRST_MS: u64 = 60_000;
/// ... up to this.
pub const RELAPSE_MAX_MS: u64 = 3_600_000;
/// Milliseconds after which a peer's report expires that it opens a path's packets but hears none of its probes. A
/// failed path is tried within [`RETRY_MAX_MS`], and the peer reports it again.
pub const UNHEARD_MS: u64 = 150_000;
/// Milliseconds after a peer's first path came into use. Until then a better path is taken once it is proven, if
/// it never failed. The first path to be proven is a matter of chance.
pub const SETTLE_MS: u64 = 5_000;
/// A kernel engine has one policy for the probes of candidates towards one peer. Milliseconds that each candidate
/// that is bound to addresses holds it.
pub const PROBE_TURN_MS: u64 = 50;
/// While no lane beyond the first gets through, the hosts take turns to open them. Milliseconds of the first turn;
/// each next one lasts twice as long ...
pub const LANES_TURN_FIRST_MS: u64 = 5_000;
/// ... up to this, in milliseconds.
pub const LANES_TURN_MAX_MS: u64 = 600_000;
/// Generations of inbound SAs of one peer that still drain after their path went away.
pub const RETIRED_MAX: usize = 16;
/// Seconds after which the search for a larger MTU starts again (RFC 8899 section 5.1.1).
pub const MTU_RAISE_S: u64 = 600;
/// The same on a path that does not carry the containers' MTU.
pub const MTU_RAISE_NARROW_S: u64 = 60;
/// The UDP port for a trusted peer's VXLAN packets.
pub const PLAIN_PORT: u16 = 6787;
/// The inner MTU, in bytes, that a path carries at least (RFC 8899's base of 1200).
pub const MTU_FLOOR: u16 = 1_200;
/// The smallest link MTU accepted, in bytes: every IPv4 host takes 576.
pub const LINK_MTU_MIN: u16 = 576;
/// Messages waiting for [`crate::Paths::poll_message`]; more are dropped and counted, and sent
/// again later.
pub const MESSAGES_QUEUED_MAX: usize = 16_384;
/// State changes waiting for [`crate::Paths::poll_change`]; more are dropped.
pub const CHANGES_QUEUED_MAX: usize = 4_096;
/// SPIs remembered per session, each with its nonce, so that no SA key is used twice.
pub const SESSION_SPIS_MAX: usize = 65_536;

/// One engine of this host, as offered to peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOffer {
    /// The engine.
    pub kind: EngineKind,
    /// The wire format.
    pub format: Format,
    /// The UDP port it receives on.
    pub port: u16,
    /// Lanes it receives on and sends on, at most [`LANES_MAX`]; 0 counts as 1.
    pub lanes_max: u16,
    /// It takes remote checksum offload marks (`docs/design/esp.md`).
    pub rco: bool,
    /// AEADs it takes; the order does not matter. AEADs that [`Config::ciphers`] lacks are not used.
    pub ciphers: Vec<Cipher>,
}

/// Settings of [`crate::Paths`]; [`Config::default`] has the design's figures and the vector engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// AEADs this host takes, the preferred first. Empty: no path ever works.
    pub ciphers: Vec<Cipher>,
    /// Engines of this host. Format `plain` needs no entry where the kernel engine has format
    /// `esp`; a kernel without ESP may offer it alone.
    pub engines: Vec<EngineOffer>,
    /// Reasons why engines are not among them; peers are told.
    pub missing: Vec<(EngineKind, Reason)>,
    /// Peers with an address in these networks need no encryption, if they say the same of this
    /// host.
    pub trusted_subnets: Vec<IpNet>,
    /// An SA is replaced after this age (a tenth less at random, so that rekeys spread).
    pub rekey_after: Duration,
    /// The longest time an SA is used.
    pub sa_lifetime: Duration,
    /// Packets after which a new SA is asked for ...
    pub packets_soft: u64,
    /// ... and after which none is sent on it.
    pub packets_hard: u64,
    /// Soft limit of bytes sealed.
    pub bytes_soft: u64,
    /// Hard limit of bytes sealed.
    pub bytes_hard: u64,
    /// Outer IP MTU of this host's link in bytes.
    pub link_mtu: u16,
    /// Inner MTU in bytes that the containers of this host have.
    pub container_mtu: u16,
    /// Time between probes of the active path.
    pub probe_interval: Duration,
    /// Time between probes of a standby path.
    pub standby_interval: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            ciphers: vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
            engines: vec![EngineOffer {
                kind: EngineKind::Userspace,
                format: Format::Esp,
                port: 6784,
                lanes_max: 1,
                rco: true,
                ciphers: vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
            }],
            missing: Vec::new(),
            trusted_subnets: Vec::new(),
            rekey_after: Duration::from_secs(45 * 60),
            sa_lifetime: Duration::from_secs(60 * 60),
            packets_soft: (1 << 32) / 4 * 3,
            packets_hard: 1 << 32,
            // 2^36 AES blocks of 16 bytes.
            bytes_soft: (1 << 40) / 4 * 3,
            bytes_hard: 1 << 40,
            link_mtu: 1500,
            container_mtu: 1388,
            probe_interval: Duration::from_millis(500),
            standby_interval: Duration::from_secs(10),
        }
    }
}

impl Config {
    /// Clamps values that cannot work to the nearest that can.
    pub(crate) fn clamped(mut self) -> Self {
        self.link_mtu = self.link_mtu.max(LINK_MTU_MIN);
        self.probe_interval = self.probe_interval.max(Duration::from_millis(10));
        self.standby_interval = self.standby_interval.max(self.probe_interval);
        self.rekey_after = self.rekey_after.max(Duration::from_millis(500));
        self.sa_lifetime = self.sa_lifetime.max(self.rekey_after);
        self.engines = clamped_engines(self.engines);
        self
    }

    pub(crate) fn trusts(&self, address: IpAddr) -> bool {
        self.trusted_subnets.iter().any(|subnet| subnet.contains(&address))
    }

    pub(crate) fn engine(&self, kind: EngineKind, format: Format) -> Option<&EngineOffer> {
        self.engines.iter().find(|engine| engine.kind == kind && engine.format == format)
    }
}

pub(crate) fn clamped_engines(mut engines: Vec<EngineOffer>) -> Vec<EngineOffer> {
    for engine in &mut engines {
        let most = u16::try_from(LANES_MAX).unwrap_or(u16::MAX);
        engine.lanes_max = engine.lanes_max.clamp(1, most);
    }
    engines
}

/// Bytes that a wire format adds around an inner IP packet, outer IP header included
/// (`docs/design/esp.md`, MTU). The encapsulation is that of format `esp`; the others have no choice.
pub const fn overhead(format: Format, encapsulation: Encapsulation, outer_ipv6: bool) -> u16 {
    let over_ipv4 = match (format, encapsulation) {
        (Format::Esp, Encapsulation::Udp) => 92,
        (Format::Esp, Encapsulation::Raw) => 84,
        (Format::Ovpn, _) => 122,
        (Format::Plain, _) => 50,
    };
    // An IPv6 header is 20 bytes longer.
    if outer_ipv6 { over_ipv4 + 20 } else { over_ipv4 }
}

pub(crate) const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}
