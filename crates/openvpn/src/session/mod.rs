//! The control channel with one peer: keys by TLS, who the peer is, and what the two ends tell each other.
//!
//! A [`Session`] has no socket, clock or random source. It takes datagrams and the time, and it is asked for datagrams
//! to send, for the time when it is to be called again, and for [`Event`]s:
//!
//! - `handle_datagram`, `handle_timeout` and every request of the caller's are followed by polling
//!   [`Session::poll_event`] and [`Session::poll_transmit`] until both have nothing, and [`Session::poll_timeout`].
//! - **The public-key work of TLS happens inside [`Session::handle_datagram`]**: a millisecond or so in one or two of
//!   the packets of each handshake, microseconds otherwise ([`Session::may_take_long`]). A `Session` is [`Send`], so a
//!   server gives it, with its datagram, to a bounded pool of threads and takes it back. Its datagrams wait meanwhile; each session has one
//!   thread at a time.
//! - rustls takes the random bytes of TLS itself from its provider, and the time for certificates from
//!   `rustls::ServerConfig::time_provider`.
//!
//! **Finding the session of a datagram.** Every control packet has its sender's session id in the clear
//! ([`session_of`]). A caller looks up the address, and compares with [`Session::remote`]; what does not belong goes to
//! the [gate](crate::gate). So a client that starts anew on its old port has a second session beside the first, which
//! the caller ends when the second is connected. Data packets go to the device; an address that the device has learned
//! is told by [`Session::set_address`].
//!
//! **Over a connection** the same session takes the content of each frame ([`crate::frame`]), and its transmits are
//! framed by the caller.
//!
//! **Keys.** The first key has id 0, later ones 1 to 7 in turn. Either end begins a new one: the old one stays until
//! the transition window ends. [`Event::InstallKey`], [`Event::SwapKeys`] and [`Event::RemoveSecondaryKey`] say what
//! the device's two slots hold. A renewal that fails costs nothing as long as the key before it is good: this end tries
//! again, and the session ends when that key's transition window does. A client that is denied at a renewal is out.

mod event;
mod exchange;
mod key;
mod message;
mod options;
mod renewal;
mod slots;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use crate::control::{ControlPacket, split_client_key};
use crate::device::Side;
use crate::gate::{Admission, EARLY_NEGOTIATION, first_replay_id};
use crate::key_method::Credentials;
use crate::messages::Message;
use crate::opcode::{KeyId, Opcode, SessionId};
use crate::reliability::{RETRANSMIT_S, Receipt};
use crate::wrap::{HEAD_BYTES, Metadata, ReplayId, Wrap, WrapKeys};

pub use event::{Acceptance, AuthRequest, DataKeys, Dropped, EndReason, Event, SessionError};
pub use key::CONTROL_BYTES_MAX;
pub use options::{ClientOptions, Features, ServerOptions, Timing};
pub use renewal::SOFT_RESET_INTERVAL_S;

use exchange::Agreed;
use key::{Begin, KeyState, Stage};
use message::Push;
use options::Seeds;
use renewal::Failing;
use slots::Slots;
use tls::Tls;

/// Events that wait for the caller; it polls them after each call, so more is a flood of messages.
pub const EVENTS_MAX: usize = 256;
/// Messages that wait for a key under which they can be sent.
pub const MESSAGES_MAX: usize = 64;
/// Messages of the peer that are looked at in each [`MESSAGES_INTERVAL_S`]; more are passed over.
pub const MESSAGES_TAKEN_MAX: u32 = 128;
/// See [`MESSAGES_TAKEN_MAX`]; in seconds.
pub const MESSAGES_INTERVAL_S: u64 = 10;
/// How long a session that is over still repeats its last words, in seconds.
pub const LINGER_S: u64 = 5;

/// A datagram to be sent, or the content of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Where to.
    pub address: SocketAddr,
    /// What.
    pub bytes: Vec<u8>,
}

/// The session id of a control packet's sender, whatever wraps the packet; `None`: the bytes are no control packet.
pub fn session_of(bytes: &[u8]) -> Option<SessionId> {
    let (opcode, _) = Opcode::parse(*bytes.first()?).ok()?;
    let id = bytes.get(1..HEAD_BYTES).filter(|_| !opcode.is_data())?;
    SessionId::new(id.try_into().ok()?).ok()
}

/// Which end this is, and what it goes by.
enum Role {
    Server(Arc<ServerOptions>),
    Client(Box<ClientOptions>),
}

impl Role {
    fn timing(&self) -> Timing {
        match self {
            Self::Server(options) => options.timing,
            Self::Client(options) => options.timing,
        }
    }

    const fn side(&self) -> Side {
        match self {
            Self::Server(_) => Side::Server,
            Self::Client(_) => Side::Client,
        }
    }

    fn tls(&self) -> Result<Tls, rustls::Error> {
        match self {
            Self::Server(options) => Tls::server(options.tls.clone()),
            Self::Client(options) => Tls::client(options.tls.clone(), options.server_name.clone()),
        }
    }
}

/// The control channel with one peer.
pub struct Session {
    role: Role,
    is_stream: bool,
    own: SessionId,
    /// `None`: a client without an answer yet.
    remote: Option<SessionId>,
    address: SocketAddr,
    wrap: Wrap,
    /// What wraps the packets of later keys, if that differs.
    later_wrap: Option<Wrap>,
    /// A client's wrapped key, which travels behind some packets.
    client_key: Vec<u8>,
    metadata: Option<Metadata>,
    seeds: Seeds,
    /// The time of day when the session began.
    began: Instant,
    began_unix_s: u64,
    current: KeyState,
    /// Boxed as it is there for the time of a renewal alone.
    previous: Option<Box<KeyState>>,
    /// The last key id under which the peer has sent something.
    last_id: KeyId,
    agreed: Option<Agreed>,
    slots: Slots,
    renegotiates_at: Option<Instant>,
    /// When the peer last began a key.
    peer_began_at: Option<Instant>,
    /// The last renewal failed.
    failing: Option<Failing>,
    push: Push,
    messages: VecDeque<Zeroizing<Vec<u8>>>,
    events: VecDeque<Event>,
    /// The session is over; it repeats its last words until then.
    over_at: Option<Instant>,
}

impl Session {
    /// Server: opens the session of a client that the gate admitted, and handles its first packet. `seed` is random.
    ///
    /// # Errors
    /// [`SessionError::Tls`]: the configuration's fault.
    pub fn admit(
        now: Instant,
        unix_s: u64,
        admission: Admission,
        options: Arc<ServerOptions>,
        address: SocketAddr,
        seed: &[u8; 32],
    ) -> Result<Self, SessionError> {
        let (next_id, reset) = match admission.must_reset {
            true => (0, Some(Opcode::HardResetServerV2)),
            false => (1, None),
        };
        let (hand_window, is_stream) = (options.timing.hand_window, admission.is_stream);
        let retransmit = retransmit(is_stream, hand_window);
        // The client's reset was packet 0, here or at the gate.
        let expected = u32::from(!admission.must_reset);
        let begin = Begin { id: KeyId::FIRST, next_id, expected, reset, retransmit, hand_window };
        let mut wrap = Wrap::new(admission.wrap, admission.next_replay_id);
        wrap.note(admission.received);
        let role = Role::Server(options);
        let mut session =
            Self::new(now, unix_s, role, is_stream, address, admission.own, wrap, &begin, seed)?;
        session.remote = Some(admission.remote);
        session.metadata = admission.metadata;
        if let Ok(packet) = ControlPacket::parse(&admission.plain) {
            // A packet that is dropped here comes again, or the session ends by its time.
            let _ = session.take(now, &packet);
        }
        Ok(session)
    }

    /// Client: begins a session with a server. `seed` is random.
    ///
    /// # Errors
    /// [`SessionError::Tls`]: the configuration's fault.
    pub fn connect(
        now: Instant,
        unix_s: u64,
        options: ClientOptions,
        address: SocketAddr,
        seed: &[u8; 32],
    ) -> Result<Self, SessionError> {
        let mut first = first_replay_id(unix_s);
        let reset = if options.client_key.is_some() {
            first.number |= EARLY_NEGOTIATION;
            Opcode::HardResetClientV3
        } else {
            Opcode::HardResetClientV2
        };
        let (hand_window, is_stream) = (options.timing.hand_window, options.is_stream);
        let retransmit = retransmit(is_stream, hand_window);
        let reset = Some(reset);
        let begin =
            Begin { id: KeyId::FIRST, next_id: 0, expected: 0, reset, retransmit, hand_window };
        let mut seeds = Seeds::new(seed);
        let random = (*seeds.next::<8>()).map(|byte| byte | 1);
        let own = SessionId::new(random).map_err(|_| SessionError::NoKey)?;
        let client_key = options.client_key.clone().unwrap_or_default();
        let wrap = Wrap::new(options.wrap.clone(), first);
        let role = Role::Client(Box::new(options));
        let mut session =
            Self::new(now, unix_s, role, is_stream, address, own, wrap, &begin, seed)?;
        session.seeds = seeds;
        session.client_key = client_key;
        Ok(session)
    }

    #[expect(clippy::too_many_arguments, reason = "two callers give what they alone know")]
    fn new(
        now: Instant,
        unix_s: u64,
        role: Role,
        is_stream: bool,
        address: SocketAddr,
        own: SessionId,
        wrap: Wrap,
        begin: &Begin,
        seed: &[u8; 32],
    ) -> Result<Self, SessionError> {
        let current = KeyState::new(now, role.tls()?, begin);
        Ok(Self {
            role,
            is_stream,
            own,
            remote: None,
            address,
            wrap,
            later_wrap: None,
            client_key: Vec::new(),
            metadata: None,
            seeds: Seeds::new(seed),
            began: now,
            began_unix_s: unix_s,
            current,
            previous: None,
            last_id: KeyId::FIRST,
            agreed: None,
            slots: Slots::default(),
            renegotiates_at: None,
            peer_began_at: None,
            failing: None,
            push: Push::default(),
            messages: VecDeque::new(),
            events: VecDeque::new(),
            over_at: None,
        })
    }

    /// Whether [`Self::handle_datagram`] may do public-key work with this datagram. That happens in the handshake of TLS
    /// alone, and acknowledgements bring nothing of it.
    pub fn may_take_long(&self, bytes: &[u8]) -> bool {
        let opcode = bytes.first().and_then(|first| Opcode::parse(*first).ok());
        let is_ack = opcode.is_some_and(|(opcode, _)| opcode == Opcode::AckV1);
        !is_ack && self.current.stage == Stage::Handshake && self.over_at.is_none()
    }

    /// Takes a datagram of the peer, or the content of a frame. It does the public-key work of TLS, see the module.
    ///
    /// # Errors
    /// The datagram is dropped; the session goes on. What ends the session is an event.
    pub fn handle_datagram(&mut self, now: Instant, bytes: &[u8]) -> Result<(), Dropped> {
        let first = *bytes.first().ok_or(crate::PacketError::Truncated { need: 1, have: 0 })?;
        let (opcode, key_id) = Opcode::parse(first)?;
        let bytes = if opcode.has_client_key() { split_client_key(bytes)?.0 } else { bytes };
        if self.remote.is_some() && session_of(bytes) != self.remote {
            return Err(Dropped::OtherSession);
        }
        let mut plain = Vec::new();
        self.wrap_of(key_id).unwrap(bytes, &mut plain)?;
        let packet = ControlPacket::parse(&plain)?;
        self.take(now, &packet)
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.over_at.is_some() {
            return;
        }
        if self.current.stage < Stage::Established && self.current.deadline <= now {
            let window = self.current.deadline.saturating_duration_since(self.current.began);
            self.fail(now, EndReason::HandshakeTimeout(window));
        }
        if let Some(failing) = self.failing.take_if(|failing| failing.until <= now) {
            self.end(now, failing.reason);
        }
        if self.over_at.is_some() {
            return;
        }
        self.slots.handle_timeout(now, &mut self.events);
        self.previous.take_if(|key| key.deadline <= now);
        self.handle_push_timeout(now);
        if self.renegotiates_at.is_some_and(|at| at <= now) && self.renegotiate(now).is_err() {
            self.renegotiates_at = None;
        }
    }

    /// The next datagram to be sent.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Transmit> {
        if self.is_drained(now) {
            return None;
        }
        let mut plain = Vec::new();
        let (own, remote) = (self.own, self.remote);
        let keys = [Some(&mut self.current), self.previous.as_deref_mut()];
        let (key_id, opcode) = keys.into_iter().flatten().find_map(|key| {
            let opcode = key.poll_transmit(now, own, remote, &mut plain)?;
            Some((key.id, opcode))
        })?;
        let mut bytes = Vec::new();
        self.wrap_of(key_id).wrap(&plain, &mut bytes);
        if opcode.has_client_key() {
            bytes.extend_from_slice(&self.client_key);
        }
        Some(Transmit { address: self.address, bytes })
    }

    /// When to call [`Self::handle_timeout`] and [`Self::poll_transmit`] next, if nothing else happens.
    pub fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        if self.is_drained(now) {
            return None;
        }
        let sends = [Some(&self.current), self.previous.as_deref()].into_iter().flatten();
        let sends = sends.filter_map(|key| key.poll_timeout(now)).min();
        if self.over_at.is_some() {
            return [sends, self.over_at].into_iter().flatten().min();
        }
        let is_new = self.current.stage < Stage::Established;
        let others = [
            is_new.then_some(self.current.deadline),
            self.previous.as_ref().map(|key| key.deadline),
            self.slots.poll_timeout(),
            self.renegotiates_at,
            self.failing.as_ref().map(|failing| failing.until),
            self.push.poll_timeout(),
        ];
        sends.into_iter().chain(others.into_iter().flatten()).min()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if event.is_none() {
            // Most of its life a session is idle, with many others.
            self.events = VecDeque::new();
        }
        event
    }

    /// Whether nothing more is to come of a session that is over.
    pub fn is_drained(&self, now: Instant) -> bool {
        self.over_at.is_some_and(|at| at <= now || self.current.is_idle())
    }

    /// Messages of the peer that were passed over, as they came in a flood.
    pub const fn messages_passed_over(&self) -> u64 {
        self.push.passed_over
    }

    /// This end's session id.
    pub const fn own(&self) -> SessionId {
        self.own
    }

    /// The peer's session id; `None`: a client without an answer yet.
    pub const fn remote(&self) -> Option<SessionId> {
        self.remote
    }

    /// Where the peer is.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The peer's authentic data packets come from another address, by the device's word.
    pub const fn set_address(&mut self, address: SocketAddr) {
        self.address = address;
    }

    /// Client: what the next key exchange shows.
    pub fn set_credentials(&mut self, credentials: Credentials) {
        if let Role::Client(options) = &mut self.role {
            options.credentials = credentials;
        }
    }

    /// Begins a new key, as by its age: packet ids that run out, or the limit of a cipher, are other reasons.
    ///
    /// # Errors
    /// The session is over, or another key is being agreed on.
    pub fn renegotiate(&mut self, now: Instant) -> Result<(), SessionError> {
        if self.over_at.is_some() {
            return Err(SessionError::Over);
        }
        if self.current.stage != Stage::Established {
            return Err(SessionError::NoKey);
        }
        self.begin_key(now, self.next_id())?;
        Ok(())
    }

    /// Ends the session with a last word: [`Message::Exit`], or a server's [`Message::Restart`] or [`Message::Halt`].
    /// False: the peer would not understand it, so that the caller says it by a packet of the data channel
    /// ([`crate::data::OCC_EXIT`]).
    pub fn close(&mut self, now: Instant, farewell: &Message) -> bool {
        let understands = match farewell {
            Message::Exit => self.agreed.as_ref().is_some_and(|agreed| agreed.flags.cc_exit),
            _ => self.current.stage >= Stage::Decision,
        };
        let is_said = understands && self.send(now, farewell).is_ok();
        if self.over_at.is_none() {
            self.end(now, EndReason::Closed);
        }
        is_said
    }

    /// Takes a packet without its wrapping.
    fn take(&mut self, now: Instant, packet: &ControlPacket<'_>) -> Result<(), Dropped> {
        if packet.remote_session.is_some_and(|session| session != self.own) {
            return Err(Dropped::OtherSession);
        }
        match self.remote {
            Some(remote) if remote != packet.session => return Err(Dropped::OtherSession),
            Some(_) => {}
            // Only what answers this client's reset, under its key, tells it the server's session.
            None if packet.opcode == Opcode::HardResetServerV2
                && packet.key_id == KeyId::FIRST
                && packet.remote_session == Some(self.own) =>
            {
                self.remote = Some(packet.session);
            }
            None => return Err(Dropped::OtherSession),
        }
        let is_current = packet.key_id == self.current.id;
        if !is_current && let Some(key) = self.previous_of(packet.key_id) {
            // Acknowledged here, the reset of the next attempt would lead nowhere.
            if key.stage < Stage::Established && packet.opcode == Opcode::SoftResetV1 {
                return Err(Dropped::TooSoon(packet.key_id));
            }
            let receipt = key.handle_packet(packet);
            let overhead = self.wrap_of(packet.key_id).keys().overhead();
            let key = self.previous_of(packet.key_id);
            key.into_iter().for_each(|key| key.flush(now, overhead, 0));
            return match receipt {
                Receipt::Refused => Err(Dropped::BeyondWindow),
                Receipt::New | Receipt::Duplicate => Ok(()),
            };
        }
        if !is_current {
            let is_next = packet.opcode == Opcode::SoftResetV1
                && packet.packet_id == Some(0)
                // A peer passes over the ids of attempts that came to nothing.
                && packet.key_id != KeyId::FIRST
                && self.current.stage == Stage::Established
                && self.over_at.is_none();
            if !is_next {
                return Err(Dropped::OtherKey(packet.key_id));
            }
            self.answer_soft_reset(now, packet.key_id)?;
        }
        self.last_id = packet.key_id;
        if self.current.handle_packet(packet) == Receipt::Refused {
            return Err(Dropped::BeyondWindow);
        }
        self.progress(now);
        Ok(())
    }

    fn previous_of(&mut self, key_id: KeyId) -> Option<&mut KeyState> {
        self.previous.as_deref_mut().filter(|key| key.id == key_id)
    }

    /// Goes as far as what was received allows.
    fn progress(&mut self, now: Instant) {
        if self.over_at.is_none()
            && let Err(reason) = self.advance(now)
        {
            self.fail(now, reason);
        }
        self.flush(now);
    }

    /// Puts what waits into packets. Messages go to TLS as acknowledgements come, since it seals them at once.
    fn flush(&mut self, now: Instant) {
        while self.current.stage >= Stage::Decision
            && self.current.takes_messages()
            && let Some(message) =
                self.push.waiting.pop_front().or_else(|| self.messages.pop_front())
        {
            if let Err(error) = self.current.tls.send(&message) {
                return self.end(now, error.into());
            }
        }
        let overhead = self.wrap_of(self.current.id).keys().overhead();
        self.current.flush(now, overhead, self.client_key.len());
        if self.over_at.is_none() && (self.current.is_clogged() || self.events.len() > EVENTS_MAX) {
            self.end(now, EndReason::Flood("messages"));
        }
    }

    fn end(&mut self, now: Instant, reason: EndReason) {
        if self.over_at.is_some() {
            return;
        }
        self.over_at = Some(now + Duration::from_secs(LINGER_S));
        self.events.push_back(Event::Ended(reason));
        // The last words do not wait behind them.
        self.push.waiting.clear();
        self.flush(now);
    }

    fn wrap_of(&mut self, key_id: KeyId) -> &mut Wrap {
        match &mut self.later_wrap {
            Some(later) if key_id != KeyId::FIRST => later,
            _ => &mut self.wrap,
        }
    }

    /// Wraps later keys with a key of the first.
    fn set_later_wrap(&mut self, now: Instant, keys: WrapKeys) {
        let passed = now.saturating_duration_since(self.began).as_secs();
        let first: ReplayId = first_replay_id(self.began_unix_s.saturating_add(passed));
        self.later_wrap = Some(Wrap::new(keys, first));
    }
}

/// The first wait for an acknowledgement. A connection loses nothing.
fn retransmit(is_stream: bool, hand_window: Duration) -> Duration {
    if is_stream { hand_window } else { Duration::from_secs(RETRANSMIT_S) }
}
