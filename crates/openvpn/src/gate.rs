//! A server's door: it answers first packets without keeping any state.
//!
//! The session id that the server gives itself in its answer is a MAC over the client's address and session id, made
//! with a secret: a cookie. Only a packet that brings it back, so one of a client that receives at its address, opens
//! a session. A flood of forged resets costs, up to a rate, a MAC each and an answer no longer than the reset by more
//! than a few bytes; beyond the rate nothing. A cookie opens one session: a packet that is repeated, by the network or
//! by an attacker, opens no second one.
//!
//! With tls-crypt-v2 the client sends its wrapped key again in its second packet, if its first one says that it can
//! (early negotiation); clients that cannot (OpenVPN 2.5) get state for their first packet, unless
//! [`GateConfig::always_cookie`] is set. A connection (TCP) proves the address, so [`Gate::handle_stream`] admits at
//! once.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::{constant_time, hmac};

use crate::control::{Acks, ControlPacket, split_client_key};
use crate::opcode::{KeyId, Opcode, SessionId};
use crate::wrap::{Metadata, ReplayId, ServerKey, WrapError, WrapKeys};
use crate::{PacketError, device::Side};

/// The longest first packet that is looked at, in bytes.
pub const FIRST_PACKET_BYTES_MAX: usize = 2_048;
/// Cookies that are known to have opened a session, while they are good. More would have to be answered first, so the
/// rate of resets keeps a server far below.
pub const ADMITTED_MAX: usize = 16_384;
/// How many slots a cookie is good for behind the one that it was made in.
const OLDER_SLOTS: u64 = 2;
/// Packet ids with this first byte in a reset say: the client can send its wrapped key again.
pub(crate) const EARLY_NEGOTIATION: u32 = 0x0f00_0000;
const EARLY_NEGOTIATION_MASK: u32 = 0xff00_0000;
/// In the answer: type 1 (flags), length 2, flag 1: send the wrapped key again.
pub(crate) const RESEND_CLIENT_KEY: [u8; 6] = [0, 1, 0, 2, 0, 1];

/// What a server accepts first packets by.
#[derive(Clone)]
pub struct GateConfig {
    /// How packets without a client key are wrapped; `None`: such are refused, as where only tls-crypt-v2 is used.
    pub wrap: Option<WrapKeys>,
    /// The key under which clients' tls-crypt-v2 keys are wrapped, where there is tls-crypt-v2.
    pub client_keys: Option<Arc<ServerKey>>,
    /// No state for clients of tls-crypt-v2 without early negotiation: they cannot connect then.
    pub always_cookie: bool,
    /// How long a client may take for its handshake; also how long a cookie is good for, about.
    pub hand_window: Duration,
    /// Answers to resets in each [`Self::resets_interval`]; OpenVPN's `connect-freq-initial` has 100.
    pub resets_max: u32,
    /// See [`Self::resets_max`]; OpenVPN has 10 s.
    pub resets_interval: Duration,
}

impl Default for GateConfig {
    fn default() -> Self {
        Self {
            wrap: Some(WrapKeys::None),
            client_keys: None,
            always_cookie: false,
            hand_window: Duration::from_secs(60),
            resets_max: 100,
            resets_interval: Duration::from_secs(10),
        }
    }
}

/// What becomes of a first packet.
#[derive(Debug)]
pub enum Gated {
    /// This is the answer; nothing is kept.
    Answer(Vec<u8>),
    /// A session is to be opened .
    Admit(Box<Admission>),
}

/// Why a first packet is dropped. All but [`Self::Rate`] are the peer's or an attacker's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No client's key is wrapped so, the packet is damaged, or under other keys.
    #[error(transparent)]
    Wrap(#[from] WrapError),
    /// What is inside is no control packet.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// The wrapping is one that this server does not have.
    #[error(
        "the packet is {0}, which this server does not use: drop it, or correct the client's profile"
    )]
    OtherWrapping(&'static str),
    /// It begins no session.
    #[error("a packet of kind {0:?} begins no session: drop it")]
    NotFirst(Opcode),
    /// The session id that it acknowledges is none of this server's, or was made long ago.
    #[error("the packet answers to no session id of this server, or too late: drop it")]
    BadCookie,
    /// The session id was brought back before. Its session is over; the client begins anew by itself.
    #[error("the packet answers to a session id that has opened its session already: drop it")]
    Repeated,
    /// Too many resets; the client tries again by itself.
    #[error(
        "too many resets in a short time: the reset is not answered, the client sends it again"
    )]
    Rate,
    /// The client cannot do what [`GateConfig::always_cookie`] demands.
    #[error("the client's tls-crypt-v2 has no early negotiation: update the client to OpenVPN 2.6")]
    NoEarlyNegotiation,
    /// Longer than any first packet.
    #[error("first packet of {0} bytes, at most {FIRST_PACKET_BYTES_MAX} are taken: drop it")]
    TooLong(usize),
}

/// A client that may open a session.
#[derive(Debug)]
pub struct Admission {
    pub(crate) own: SessionId,
    pub(crate) remote: SessionId,
    pub(crate) wrap: WrapKeys,
    pub(crate) next_replay_id: ReplayId,
    pub(crate) received: Option<ReplayId>,
    /// The packet in plain layout: to be handled as the session's first one.
    pub(crate) plain: Vec<u8>,
    /// The session answers the reset, as nobody did yet.
    pub(crate) must_reset: bool,
    pub(crate) is_stream: bool,
    /// What the client's tls-crypt-v2 key says about it. Whoever judges it denies the client when it asks.
    pub metadata: Option<Metadata>,
}

impl Admission {
    /// The client's session id: packets from its address that have it
    /// ([`crate::session::session_of`]) are the session's.
    pub const fn remote(&self) -> SessionId {
        self.remote
    }
}

/// The door. It keeps a secret, how many resets it may still answer, and which cookies have opened a session.
pub struct Gate {
    config: GateConfig,
    secret: hmac::Key,
    started: Instant,
    interval_began: Instant,
    answered: u32,
    /// With the slots that they were made in.
    admitted: BTreeSet<(u64, SessionId)>,
}

/// A first packet without its wrapping.
struct Opened {
    keys: WrapKeys,
    replay_id: Option<ReplayId>,
    metadata: Option<Metadata>,
    plain: Vec<u8>,
}

impl Gate {
    /// A door with a secret of random bytes.
    pub fn new(now: Instant, config: GateConfig, secret: &[u8; 32]) -> Self {
        let secret = hmac::Key::new(hmac::HMAC_SHA256, secret);
        Self {
            config,
            secret,
            started: now,
            interval_began: now,
            answered: 0,
            admitted: BTreeSet::new(),
        }
    }

    /// Takes a datagram that belongs to no session: from an address without one, or with a session id that the
    /// session of this address does not have. `unix_s` is the time of day.
    ///
    /// # Errors
    /// The datagram is to be dropped.
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        unix_s: u64,
        remote: SocketAddr,
        bytes: &[u8],
    ) -> Result<Gated, Refusal> {
        // In a flood of resets nearly all are dropped here, before any of them costs a MAC.
        let opcode = bytes.first().and_then(|first| Opcode::parse(*first).ok());
        let resets = [Opcode::HardResetClientV2, Opcode::HardResetClientV3];
        if opcode.is_some_and(|(opcode, _)| resets.contains(&opcode)) {
            self.check_rate(now)?;
        }
        let opened = self.open(bytes)?;
        let packet = ControlPacket::parse(&opened.plain)?;
        match packet.opcode {
            Opcode::HardResetClientV2 => self.answer(now, unix_s, remote, &opened, &[]),
            Opcode::HardResetClientV3 => {
                let is_able = opened
                    .replay_id
                    .is_some_and(|id| id.number & EARLY_NEGOTIATION_MASK == EARLY_NEGOTIATION);
                if is_able {
                    return self.answer(now, unix_s, remote, &opened, &RESEND_CLIENT_KEY);
                }
                if self.config.always_cookie {
                    return Err(Refusal::NoEarlyNegotiation);
                }
                self.spend_reset(now)?;
                let session = packet.session;
                let own = self.cookie(self.slot(now), remote, session)?;
                Ok(Gated::Admit(Box::new(opened.admit(own, session, unix_s, true))))
            }
            Opcode::ControlV1 | Opcode::AckV1 | Opcode::ControlWkcV1 => {
                let own = self.returned_cookie(now, remote, &packet)?;
                let session = packet.session;
                Ok(Gated::Admit(Box::new(opened.admit(own, session, unix_s, false))))
            }
            other => Err(Refusal::NotFirst(other)),
        }
    }

    /// Takes the first packet of a connection, which proves the client's address. `random` becomes the server's
    /// session id.
    ///
    /// # Errors
    /// The connection is to be closed.
    pub fn handle_stream(
        &mut self,
        now: Instant,
        unix_s: u64,
        random: [u8; 8],
        bytes: &[u8],
    ) -> Result<Admission, Refusal> {
        let opened = self.open(bytes)?;
        let packet = ControlPacket::parse(&opened.plain)?;
        if !matches!(packet.opcode, Opcode::HardResetClientV2 | Opcode::HardResetClientV3) {
            return Err(Refusal::NotFirst(packet.opcode));
        }
        self.spend_reset(now)?;
        let session = packet.session;
        let admission = opened.admit(SessionId::new(random)?, session, unix_s, true);
        Ok(Admission { is_stream: true, ..admission })
    }

    /// Gives an answer back to the rate: a client that was answered is connected.
    pub fn handle_connected(&mut self) {
        self.answered = self.answered.saturating_sub(1);
    }

    /// Until when no reset is answered, since too many were; `None`: the next one is. A client that connects ends that
    /// early ([`Self::handle_connected`]).
    pub fn shut_until(&self, now: Instant) -> Option<Instant> {
        let end = self.interval_began + self.config.resets_interval;
        (self.answered >= self.config.resets_max && now < end).then_some(end)
    }

    fn open(&self, bytes: &[u8]) -> Result<Opened, Refusal> {
        if bytes.len() > FIRST_PACKET_BYTES_MAX {
            return Err(Refusal::TooLong(bytes.len()));
        }
        let first = *bytes.first().ok_or(PacketError::Truncated { need: 1, have: 0 })?;
        let (opcode, key_id) = Opcode::parse(first)?;
        if opcode.is_data() || key_id != KeyId::FIRST {
            return Err(Refusal::NotFirst(opcode));
        }
        let mut plain = Vec::new();
        if !opcode.has_client_key() {
            let other = Refusal::OtherWrapping("not under a client's own key (tls-crypt-v2)");
            let keys = self.config.wrap.clone().ok_or(other)?;
            let replay_id = keys.unwrap(bytes, &mut plain)?;
            return Ok(Opened { keys, replay_id, metadata: None, plain });
        }
        let other = Refusal::OtherWrapping("under a client's own key (tls-crypt-v2)");
        let server_key = self.config.client_keys.as_ref().ok_or(other)?;
        let (packet, wrapped) = split_client_key(bytes)?;
        let client = server_key.unwrap(wrapped)?;
        let keys = WrapKeys::tls_crypt(&client.key, Side::Server);
        let replay_id = keys.unwrap(packet, &mut plain)?;
        Ok(Opened { keys, replay_id, metadata: Some(client.metadata), plain })
    }

    /// The answer to a reset.
    fn answer(
        &mut self,
        now: Instant,
        unix_s: u64,
        remote: SocketAddr,
        opened: &Opened,
        payload: &[u8],
    ) -> Result<Gated, Refusal> {
        let reset = ControlPacket::parse(&opened.plain)?;
        let acks = Acks::new(reset.packet_id.as_slice())?;
        if reset.packet_id != Some(0) || !reset.acks.ids().is_empty() {
            return Err(Refusal::NotFirst(reset.opcode));
        }
        self.spend_reset(now)?;
        let answer = ControlPacket {
            opcode: Opcode::HardResetServerV2,
            key_id: KeyId::FIRST,
            session: self.cookie(self.slot(now), remote, reset.session)?,
            acks,
            remote_session: Some(reset.session),
            packet_id: Some(0),
            payload,
        };
        let (mut plain, mut out) = (Vec::new(), Vec::new());
        answer.write(&mut plain)?;
        opened.keys.wrap(&plain, first_replay_id(unix_s), &mut out);
        Ok(Gated::Answer(out))
    }

    /// The own session id that a second packet brings back, if this server gave it to this client, and for the first
    /// time.
    fn returned_cookie(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        packet: &ControlPacket<'_>,
    ) -> Result<SessionId, Refusal> {
        let returned = packet.remote_session.ok_or(Refusal::BadCookie)?;
        // The server has sent packet 0 alone, and the client at most one more than its own reset.
        let is_second = packet.acks.ids().iter().all(|id| *id <= 1)
            && packet.packet_id.is_none_or(|id| id <= 1);
        if !is_second {
            return Err(Refusal::NotFirst(packet.opcode));
        }
        let slot = self.slot(now);
        while self.admitted.first().is_some_and(|(made, _)| made + OLDER_SLOTS < slot) {
            self.admitted.pop_first();
        }
        for slot in slot.saturating_sub(OLDER_SLOTS)..=slot {
            let cookie = self.cookie(slot, remote, packet.session)?;
            let is_it =
                constant_time::verify_slices_are_equal(cookie.as_bytes(), returned.as_bytes());
            if is_it.is_ok() {
                self.admit_once(slot, returned)?;
                return Ok(returned);
            }
        }
        Err(Refusal::BadCookie)
    }

    fn admit_once(&mut self, slot: u64, cookie: SessionId) -> Result<(), Refusal> {
        let has_room = self.admitted.len() < ADMITTED_MAX;
        match self.admitted.contains(&(slot, cookie)) {
            true => Err(Refusal::Repeated),
            false if !has_room => Err(Refusal::Rate),
            false => {
                self.admitted.insert((slot, cookie));
                Ok(())
            }
        }
    }

    /// The server's session id for a client that comes in a slot of time.
    fn cookie(
        &self,
        slot: u64,
        remote: SocketAddr,
        client: SessionId,
    ) -> Result<SessionId, PacketError> {
        let mut mac = hmac::Context::with_key(&self.secret);
        mac.update(&slot.to_be_bytes());
        match remote {
            SocketAddr::V4(remote) => mac.update(&remote.ip().octets()),
            SocketAddr::V6(remote) => {
                mac.update(&remote.ip().octets());
                mac.update(&remote.scope_id().to_be_bytes());
            }
        }
        mac.update(&remote.port().to_be_bytes());
        mac.update(client.as_bytes());
        let mut bytes = [0; 8];
        bytes.iter_mut().zip(mac.sign().as_ref()).for_each(|(byte, mac)| *byte = *mac);
        SessionId::new(bytes)
    }

    /// As OpenVPN: half the time that a handshake may take, so that the cookie is good for at least that long.
    fn slot(&self, now: Instant) -> u64 {
        let length_s = (self.config.hand_window.as_secs() + 1).max(2) / 2;
        now.saturating_duration_since(self.started).as_secs() / length_s + OLDER_SLOTS
    }

    fn spend_reset(&mut self, now: Instant) -> Result<(), Refusal> {
        self.check_rate(now)?;
        self.answered += 1;
        Ok(())
    }

    fn check_rate(&mut self, now: Instant) -> Result<(), Refusal> {
        if now.saturating_duration_since(self.interval_began) >= self.config.resets_interval {
            self.interval_began = now;
            self.answered = 0;
        }
        if self.answered >= self.config.resets_max {
            return Err(Refusal::Rate);
        }
        Ok(())
    }
}

impl Opened {
    fn admit(self, own: SessionId, remote: SessionId, unix_s: u64, must_reset: bool) -> Admission {
        let first = first_replay_id(unix_s);
        Admission {
            own,
            remote,
            wrap: self.keys,
            next_replay_id: if must_reset { first } else { first.next() },
            received: self.replay_id,
            plain: self.plain,
            must_reset,
            is_stream: false,
            metadata: self.metadata,
        }
    }
}

/// The replay id of a first packet. OpenVPN's time has 32 bits.
pub(crate) const fn first_replay_id(unix_s: u64) -> ReplayId {
    ReplayId { time_s: unix_s as u32, number: 1 }
}

#[cfg(test)]
mod tests;
