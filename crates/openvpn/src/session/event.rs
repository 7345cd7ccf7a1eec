//! What a session tells its caller, and asks of it.

use std::fmt;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use weft_crypto::DataCipher;

use crate::PacketError;
use crate::data::PeerNumber;
use crate::device::{EpochAttributes, KeyAttributes, KeyBlock, Side, Slot};
use crate::key_method::{Credentials, KeyMethodError, PeerInfo};
use crate::messages::{AuthFailure, EndlessMessage, Message, MessageError, ProtocolFlags};
use crate::negotiation::{ClientRefusal, Refusal};
use crate::opcode::KeyId;
use crate::wrap::{Metadata, WrapError};

/// What a session tells its caller. Pushed options may hold a token, so they are not shown.
pub enum Event {
    /// Server: a client has shown who it is, at first and with each new key. The caller answers by
    /// [`super::Session::accept`], [`super::Session::deny`] or [`super::Session::pend`], now or later.
    Authenticate(Box<AuthRequest>),
    /// A key for the data channel: it goes to this slot, in the place of any that is there.
    InstallKey(Slot, Box<DataKeys>),
    /// The two slots are to be exchanged.
    SwapKeys,
    /// The key in the secondary slot is to be removed.
    RemoveSecondaryKey,
    /// Client: the options that the server pushed, as they stood in its messages, without the client's share: cipher,
    /// peer id and protocol flags have been obeyed.
    Pushed(Vec<String>),
    /// Server: the client's options were sent. Client: they came. Once a session.
    Connected,
    /// A message of the peer that is the caller's business: an answer to a challenge, text to show, an update.
    Message(Message),
    /// The session is over, and this is its last event. The caller still polls it for transmits and timeouts until
    /// [`super::Session::is_drained`], so that the peer gets the last words.
    Ended(EndReason),
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Authenticate(request) => f.debug_tuple("Authenticate").field(request).finish(),
            Self::InstallKey(slot, keys) => {
                f.debug_tuple("InstallKey").field(slot).field(keys).finish()
            }
            Self::SwapKeys => f.write_str("SwapKeys"),
            Self::RemoveSecondaryKey => f.write_str("RemoveSecondaryKey"),
            Self::Pushed(options) => f.debug_tuple("Pushed").field(&options.len()).finish(),
            Self::Connected => f.write_str("Connected"),
            Self::Message(message) => f.debug_tuple("Message").field(message).finish(),
            Self::Ended(reason) => f.debug_tuple("Ended").field(reason).finish(),
        }
    }
}

/// Who a client says that it is.
#[derive(Debug)]
pub struct AuthRequest {
    /// The key that is agreed on.
    pub key_id: KeyId,
    /// A later key of a session that was accepted before: the caller checks that it is still the same client.
    pub is_renewal: bool,
    /// The client's certificate and those above it, which TLS has verified; empty: it showed none.
    pub certificates: Vec<CertificateDer<'static>>,
    /// User name and password.
    pub credentials: Credentials,
    /// What it can do, and which version it is.
    pub peer_info: PeerInfo,
    /// Its options string.
    pub options: String,
    /// The data channel's cipher, agreed on.
    pub cipher: DataCipher,
    /// What the client's tls-crypt-v2 key says about it; with the first key alone.
    pub metadata: Option<Metadata>,
}

/// The answer to an [`AuthRequest`] that lets the client in. Its options may hold a token, so they are not shown.
#[derive(Clone)]
pub struct Acceptance {
    /// The number in the client's data packets.
    pub peer: PeerNumber,
    /// Options to be pushed, such as `ifconfig 10.8.0.2 255.255.255.0`. The session adds `peer-id`, `cipher` and the
    /// flags of the protocol. Not sent again with later keys.
    pub options: Vec<String>,
}

impl fmt::Debug for Acceptance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peer, options } = self;
        f.debug_struct("Acceptance").field("peer", peer).field("options", &options.len()).finish()
    }
}

/// A key of the data channel, with all that a device needs to know.
#[derive(Clone, Debug)]
pub struct DataKeys {
    /// The id in its packets.
    pub key_id: KeyId,
    /// Its cipher.
    pub cipher: DataCipher,
    /// Its packets have the layout with epochs.
    pub has_epochs: bool,
    /// Which end this is.
    pub side: Side,
    /// The number in data packets: at the server in those that it receives, at the client in those that it sends.
    pub peer: PeerNumber,
    /// The key material of both directions.
    pub block: KeyBlock,
}

impl DataKeys {
    /// The attributes of the key for a device, which is to have the peer as `peer_id`.
    pub fn attributes(&self, peer_id: u32, slot: Slot) -> KeyAttributes {
        let (encrypt, decrypt) = self.block.directions(self.side, self.cipher.key_bytes());
        KeyAttributes {
            peer_id: Some(peer_id),
            slot: Some(slot),
            key_id: Some(self.key_id.get().into()),
            cipher: Some(self.cipher.into()),
            encrypt: Some(encrypt),
            decrypt: Some(decrypt),
        }
    }

    /// The same for a key with epochs.
    pub fn epoch_attributes(&self, peer_id: u32, slot: Slot) -> EpochAttributes {
        let (encrypt, decrypt) = self.block.epoch_secrets(self.side);
        let (key_id, cipher) = (self.key_id.get().into(), self.cipher);
        EpochAttributes { peer_id, slot, key_id, cipher, encrypt, decrypt }
    }
}

/// Why a session is over.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EndReason {
    /// Network, peer or caller: nothing came, or no decision.
    #[error(
        "no key was agreed on within {0:?}: check that packets travel both ways; the client tries again"
    )]
    HandshakeTimeout(Duration),
    /// Peer or configuration: TLS does not come about.
    #[error("TLS failed: {0}; check the certificates and the TLS versions of both ends")]
    Tls(#[from] rustls::Error),
    /// Peer: its first message inside TLS is none.
    #[error(transparent)]
    KeyMethod(#[from] KeyMethodError),
    /// Peer: a message without an end.
    #[error(transparent)]
    Endless(#[from] EndlessMessage),
    /// Server, to a client: what it pushes is too much.
    #[error(transparent)]
    Pushed(#[from] MessageError),
    /// Peer: it sends more than can be made sense of.
    #[error("the peer sent more than the limits allow: {0}; look into it if it is no attack")]
    Flood(&'static str),
    /// Server: a client with which it has no data channel in common. The client was told.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Client: a server with which it has no data channel in common.
    #[error(transparent)]
    NotAgreed(#[from] ClientRefusal),
    /// Client: the server uses what this client did not offer.
    #[error("the server uses what this client does not offer ({0:?}): its fault, update it")]
    Unasked(ProtocolFlags),
    /// Server: the caller denied the client.
    #[error("the client was denied")]
    Denied,
    /// Client: the server refused the credentials; this is what it says.
    #[error(
        "the server refused the login ({0:?}): correct user name and password, or the certificate"
    )]
    AuthFailed(AuthFailure),
    /// Peer: it left.
    #[error("the peer left")]
    PeerExit,
    /// Client: the server wants it to connect anew.
    #[error("the server asks to connect again: {text}")]
    Restart {
        /// The passwords of this session are kept.
        preserve: bool,
        /// To the next server.
        next_remote: bool,
        /// What it says.
        text: String,
    },
    /// Client: the server wants it to stop; this is what it says.
    #[error("the server asks to stop: {0}")]
    Halt(String),
    /// Caller: it closed the session.
    #[error("closed by this end")]
    Closed,
}

/// Why a datagram was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Dropped {
    /// Under another key, damaged, or repeated.
    #[error(transparent)]
    Wrap(#[from] WrapError),
    /// No control packet.
    #[error(transparent)]
    Packet(#[from] PacketError),
    /// The peer's session id, or this end's in it, is another one's: the peer may have started anew.
    #[error("a packet of another session: drop it, or give it to the gate")]
    OtherSession,
    /// No such key, or it is not yet time for one.
    #[error("packet of key id {}, which is none of the session's: drop it", .0.get())]
    OtherKey(KeyId),
    /// A new key so soon after the last attempt.
    #[error("a new key (id {}) so soon after the last: drop it, the peer asks again", .0.get())]
    TooSoon(KeyId),
    /// Too far ahead of what came before.
    #[error("packet beyond the window: drop it, the peer sends it again")]
    BeyondWindow,
    /// The session is over.
    #[error("the session is over: drop the packet")]
    Over,
}

/// Why a request of the caller's cannot be obeyed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SessionError {
    /// Nothing is being asked.
    #[error("no client waits for a decision: answer an Authenticate event once")]
    NothingToDecide,
    /// The session is over.
    #[error("the session is over")]
    Over,
    /// There is no key yet, or a new one is being agreed on.
    #[error("no key can be renewed now: wait for the one that is being agreed on")]
    NoKey,
    /// Configuration: an option that cannot be pushed.
    #[error(transparent)]
    Push(#[from] MessageError),
    /// Too many messages wait.
    #[error("{0} messages wait for the peer already: send fewer")]
    TooManyMessages(usize),
    /// TLS cannot begin.
    #[error("TLS cannot begin: {0}; correct the configuration")]
    Tls(#[from] rustls::Error),
}
