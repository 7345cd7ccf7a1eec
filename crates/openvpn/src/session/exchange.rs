//! From TLS to data keys: key method 2, the caller's decision, what both ends agree on.

use std::time::{Duration, Instant};

use weft_crypto::DataCipher;
use zeroize::Zeroizing;

use super::event::{Acceptance, AuthRequest, DataKeys, EndReason, Event, SessionError};
use super::key::{Sources, Stage};
use super::options::ClientOptions;
use super::renewal::SETTLING_MIN;
use super::{Role, Session};
use crate::data::PeerNumber;
use crate::device::{KEY_BLOCK_BYTES, KeyBlock, Side};
use crate::gate::RESEND_CLIENT_KEY;
use crate::key_derivation::{
    ClientKeySource, DYNAMIC_TLS_CRYPT_LABEL, ServerKeySource, key_block_by_exporter,
    key_block_by_prf,
};
use crate::key_method::{ClientMessage, Credentials, IvProto, PeerInfo, ServerMessage};
use crate::messages::{AuthFailure, Message, MessageReader, ProtocolFlags, PushOption, push_reply};
use crate::negotiation::{Agreement, accept_push, list_of, negotiate};
use crate::opcode::Opcode;

/// What both ends have agreed on with the first key.
#[derive(Clone, Debug)]
pub(super) struct Agreed {
    pub(super) cipher: DataCipher,
    /// The server's number for the client, once it is known.
    pub(super) peer: Option<PeerNumber>,
    pub(super) flags: ProtocolFlags,
    /// Server: the same, with what is to be pushed.
    pub(super) server: Option<Agreement>,
}

impl Session {
    /// Goes as far as what was received allows.
    pub(super) fn advance(&mut self, now: Instant) -> Result<(), EndReason> {
        while let Some(received) = self.current.pop_in_order() {
            match received.opcode {
                Opcode::ControlV1 | Opcode::ControlWkcV1 => {
                    self.current.receive(&received.payload)?;
                }
                Opcode::HardResetServerV2 => {
                    self.current.brings_client_key =
                        received.payload == RESEND_CLIENT_KEY && !self.client_key.is_empty();
                }
                _ => {}
            }
        }
        if self.current.stage == Stage::Handshake && !self.current.tls.is_handshaking() {
            self.current.stage = Stage::KeyMessage;
            if matches!(self.role, Role::Client(_)) {
                self.send_client_message()?;
            }
        }
        if self.current.stage == Stage::KeyMessage {
            match self.role {
                Role::Server(_) => self.read_client_message()?,
                Role::Client(_) => self.read_server_message(now)?,
            }
        }
        self.read_messages(now)?;
        if self.current.tls.is_closed() { Err(EndReason::PeerExit) } else { Ok(()) }
    }

    /// Server: lets the client in that an [`Event::Authenticate`] asked for.
    ///
    /// # Errors
    /// No client waits for this, or an option cannot be pushed.
    pub fn accept(&mut self, now: Instant, acceptance: Acceptance) -> Result<(), SessionError> {
        self.check_decision()?;
        let (Role::Server(own), Some(agreed)) = (&self.role, &mut self.agreed) else {
            return Err(SessionError::NothingToDecide);
        };
        let is_first = agreed.peer.is_none();
        if is_first && let Some(agreement) = &agreed.server {
            let mut options = acceptance.options;
            let ours = agreement.push_options(Some(acceptance.peer), own.link.tun_mtu.into());
            // The session's own options have nothing that cannot be written.
            options.extend(ours.iter().filter_map(|option| option.to_text().ok()));
            let parts = push_reply(&options)?;
            agreed.peer = Some(acceptance.peer);
            let bytes = parts.into_iter().map(|part| Message::PushReply(part).to_bytes());
            self.push.reply = bytes.map(Zeroizing::new).collect();
            self.push.is_requested |= agreement.pushes_unasked;
        }
        if let Err(reason) = self.establish(now) {
            self.end(now, reason);
            return Err(SessionError::Over);
        }
        if is_first {
            self.reply_to_push(now);
        }
        self.flush(now);
        Ok(())
    }

    /// Server: does not let the client in, and ends the session. The client shows the reason.
    ///
    /// # Errors
    /// No client waits for this.
    pub fn deny(&mut self, now: Instant, failure: AuthFailure) -> Result<(), SessionError> {
        self.check_decision()?;
        self.refuse(now, failure);
        Ok(())
    }

    /// Server: the decision takes longer, as a user has to do something. [`Session::send`] tells him what, by
    /// [`Message::InfoPre`]. A client that is not told the time waits as long as for a handshake.
    ///
    /// # Errors
    /// No client waits for this.
    pub fn pend(&mut self, now: Instant, timeout: Duration) -> Result<(), SessionError> {
        self.check_decision()?;
        self.current.deadline = now + timeout;
        let agreement = self.agreed.as_ref().and_then(|agreed| agreed.server);
        let takes_keywords = agreement.is_some_and(|agreement| agreement.takes_keywords);
        let timeout_s = u32::try_from(timeout.as_secs()).ok().filter(|_| takes_keywords);
        self.send(now, &Message::AuthPending { timeout_s })
    }

    fn check_decision(&self) -> Result<(), SessionError> {
        let is_asked = matches!(self.role, Role::Server(_))
            && self.current.stage == Stage::Decision
            && self.over_at.is_none();
        if is_asked { Ok(()) } else { Err(SessionError::NothingToDecide) }
    }

    /// Server: tells the client why, and ends the session.
    fn refuse(&mut self, now: Instant, failure: AuthFailure) {
        // A session with a full queue ends without a word.
        let _ = self.send(now, &Message::AuthFailed(failure));
        self.end(now, EndReason::Denied);
    }

    fn send_client_message(&mut self) -> Result<(), EndReason> {
        let Role::Client(options) = &self.role else { return Ok(()) };
        let source = ClientKeySource {
            pre_master: *self.seeds.next(),
            random1: *self.seeds.next(),
            random2: *self.seeds.next(),
        };
        let message = ClientMessage {
            source: source.clone(),
            options: options.link.to_text(Side::Client),
            credentials: options.credentials.clone(),
            peer_info: peer_info(options),
        };
        self.current.sources.client = Some(Box::new(source));
        let mut bytes = Zeroizing::new(Vec::new());
        message.write(&mut bytes)?;
        Ok(self.current.tls.send(&bytes)?)
    }

    fn read_client_message(&mut self) -> Result<(), EndReason> {
        let Role::Server(options) = &self.role else { return Ok(()) };
        let Some((message, read)) = ClientMessage::read(&self.current.plain)? else {
            return Ok(());
        };
        self.current.plain.drain(..read);
        let source = ServerKeySource { random1: *self.seeds.next(), random2: *self.seeds.next() };
        let answer = ServerMessage {
            source: source.clone(),
            options: options.link.to_text(Side::Server),
            peer_info: PeerInfo::default(),
        };
        let mut bytes = Zeroizing::new(Vec::new());
        answer.write(&mut bytes)?;
        self.current.tls.send(&bytes)?;
        self.current.sources.client = Some(Box::new(message.source.clone()));
        self.current.sources.server = Some(Box::new(source));
        self.current.stage = Stage::Decision;
        // Half a message of the old key has no end under the new one.
        self.push.reader = MessageReader::default();
        let is_renewal = self.agreed.as_ref().is_some_and(|agreed| agreed.peer.is_some());
        if !is_renewal {
            let mut agreement = match negotiate(&options.policy, &message) {
                Ok(agreement) => agreement,
                Err(refusal) => return self.tell(refusal.client_text(), refusal.into()),
            };
            agreement.flags.tls_ekm &= options.has_exporter;
            let Agreement { cipher, flags, .. } = agreement;
            self.agreed = Some(Agreed { cipher, peer: None, flags, server: Some(agreement) });
        }
        if message.credentials == Credentials::TooLong {
            return self.tell(Credentials::TOO_LONG, EndReason::Denied);
        }
        self.ask(message, is_renewal);
        Ok(())
    }

    /// Server: asks the caller about a client.
    fn ask(&mut self, message: ClientMessage, is_renewal: bool) {
        let Some(agreed) = &self.agreed else { return };
        self.events.push_back(Event::Authenticate(Box::new(AuthRequest {
            key_id: self.current.id,
            is_renewal,
            certificates: self.current.tls.peer_certificates(),
            credentials: message.credentials,
            peer_info: message.peer_info,
            options: message.options,
            cipher: agreed.cipher,
            metadata: self.metadata.take(),
        })));
    }

    /// Server: tells the client why its session ends.
    fn tell(&mut self, text: &str, reason: EndReason) -> Result<(), EndReason> {
        let failure = Message::AuthFailed(AuthFailure::Text(text.to_owned()));
        self.messages.push_back(Zeroizing::new(failure.to_bytes()));
        Err(reason)
    }

    fn read_server_message(&mut self, now: Instant) -> Result<(), EndReason> {
        let Some((message, read)) = ServerMessage::read(&self.current.plain)? else {
            return Ok(());
        };
        self.current.plain.drain(..read);
        self.current.sources.server = Some(Box::new(message.source.clone()));
        self.current.stage = Stage::Decision;
        self.push.reader = MessageReader::default();
        if self.agreed.is_some() {
            return self.establish(now);
        }
        self.push.server_options = message.options;
        self.current.deadline = now + self.role.timing().hand_window;
        self.push.await_options(now);
        Ok(())
    }

    /// Client: the options have come.
    pub(super) fn handle_options(
        &mut self,
        now: Instant,
        options: Vec<String>,
    ) -> Result<(), EndReason> {
        let Role::Client(own) = &self.role else { return Ok(()) };
        // The caller learns by its own reading which options have no meaning.
        let known: Vec<PushOption> =
            options.iter().filter_map(|option| PushOption::parse(option).ok()).collect();
        let server_options = &self.push.server_options;
        let agreed = accept_push(&own.ciphers, own.fallback, server_options, &known)?;
        let flags = agreed.flags;
        if flags.tls_ekm && !own.features.exporter
            || flags.dyn_tls_crypt && !own.features.dynamic_wrap
            || flags.aead_epoch && !own.features.epochs
        {
            return Err(EndReason::Unasked(flags));
        }
        let (cipher, peer) = (agreed.cipher, Some(agreed.peer));
        self.agreed = Some(Agreed { cipher, peer, flags, server: None });
        self.take_token(&options);
        let is_ours = |option: &String| {
            let name = option.split(' ').next().unwrap_or_default();
            ["cipher", "peer-id", "protocol-flags", "key-derivation"].contains(&name)
        };
        let others = options.into_iter().filter(|option| !is_ours(option)).collect();
        self.events.push_back(Event::Pushed(others));
        self.establish(now)?;
        self.events.push_back(Event::Connected);
        Ok(())
    }

    /// Client: a pushed token takes the place of the password.
    pub(super) fn take_token(&mut self, options: &[String]) {
        let Role::Client(own) = &mut self.role else { return };
        for option in options {
            let Some(token) = option.strip_prefix("auth-token ") else { continue };
            let user = match &own.credentials {
                Credentials::Given { user, .. } => user.clone(),
                Credentials::Missing | Credentials::TooLong => String::new(),
            };
            let password = Zeroizing::new(token.trim().to_owned());
            own.credentials = Credentials::Given { user, password };
        }
    }

    /// There are data keys now.
    fn establish(&mut self, now: Instant) -> Result<(), EndReason> {
        let Some(agreed) = self.agreed.clone() else { return Ok(()) };
        let Some(peer) = agreed.peer else { return Ok(()) };
        let block = self.key_block(&agreed)?;
        let side = self.role.side();
        let timing = self.role.timing();
        if agreed.flags.dyn_tls_crypt && self.later_wrap.is_none() {
            let mut exported = Zeroizing::new([0; KEY_BLOCK_BYTES]);
            self.current.tls.export(&mut *exported, DYNAMIC_TLS_CRYPT_LABEL)?;
            let keys = self.wrap.keys().dynamic(&KeyBlock::new(*exported), side);
            self.set_later_wrap(now, keys);
        }
        self.current.stage = Stage::Established;
        self.current.sources = Sources::default();
        // From now on the key before this one has only acknowledgements to send.
        if let Some(old) = &mut self.previous {
            old.deadline = old.deadline.min(now + timing.hand_window);
        }
        self.failing = None;
        let keys = DataKeys {
            key_id: self.current.id,
            cipher: agreed.cipher,
            has_epochs: agreed.flags.aead_epoch,
            side,
            peer,
            block,
        };
        let began = self.current.began;
        // The peer may renew more often than this end does, and forgets the key before last with each.
        let age = self.previous.as_ref().map(|old| began.saturating_duration_since(old.began));
        let half = age.map_or(Duration::MAX, |age| (age / 2).max(SETTLING_MIN));
        self.slots.install(
            keys,
            began + timing.settling().min(half),
            began + timing.transition_window,
            &mut self.events,
        );
        self.slots.handle_timeout(now, &mut self.events);
        self.renegotiates_at = timing.renegotiate_after.map(|after| {
            let early = match side {
                Side::Server => after / 10 * u32::from(self.seeds.next::<1>()[0]) / 255,
                Side::Client => Duration::ZERO,
            };
            now + after.saturating_sub(early)
        });
        Ok(())
    }

    fn key_block(&self, agreed: &Agreed) -> Result<KeyBlock, EndReason> {
        if agreed.flags.tls_ekm {
            let export = |out: &mut [u8], label: &[u8]| self.current.tls.export(out, label);
            return Ok(key_block_by_exporter(export)?);
        }
        let sources = &self.current.sources;
        let (Some(client), Some(server), Some(remote)) =
            (&sources.client, &sources.server, self.remote)
        else {
            return Err(rustls::Error::HandshakeNotComplete.into());
        };
        let (client_session, server_session) = match self.role.side() {
            Side::Client => (self.own, remote),
            Side::Server => (remote, self.own),
        };
        Ok(key_block_by_prf(client, server, client_session, server_session))
    }
}

/// Client: what it says about itself.
fn peer_info(options: &ClientOptions) -> PeerInfo {
    let mut info = options.peer_info.clone();
    let features = options.features;
    let bits = [
        (true, IvProto::DATA_V2),
        (true, IvProto::REQUEST_PUSH),
        (true, IvProto::AUTH_PENDING_KEYWORDS),
        (true, IvProto::CC_EXIT),
        (true, IvProto::AUTH_FAIL_TEMP),
        (features.exporter, IvProto::TLS_KEY_EXPORT),
        (features.dynamic_wrap, IvProto::DYNAMIC_TLS_CRYPT),
        (features.epochs, IvProto::DATA_EPOCH),
    ];
    let used = bits.iter().filter(|(is_used, _)| *is_used);
    let proto = used.fold(options.proto, |proto, (_, bit)| proto.with(*bit));
    info.set("IV_NCP", "2");
    info.set("IV_TCPNL", "1");
    info.set("IV_PROTO", &proto.0.to_string());
    info.set("IV_CIPHERS", &list_of(&options.ciphers));
    info
}
