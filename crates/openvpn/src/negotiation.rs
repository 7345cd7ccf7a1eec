//! What both ends of a session agree on: the data cipher, the origin of the keys, and what else each can do.
//!
//! A server takes the first cipher of its own list that the client names in `IV_CIPHERS`. OpenVPN 2.4 says `IV_NCP=2`
//! instead, which stands for AES-GCM of 128 and 256 bits. A client that negotiates nothing names its only cipher in the
//! options string.

use weft_crypto::DataCipher;

use crate::data::PeerNumber;
use crate::key_method::{ClientMessage, IvProto, PeerInfo, option_of};
use crate::messages::{ProtocolFlags, PushOption};

/// Most ciphers in a list.
pub const CIPHERS_MAX: usize = 64;

/// Ciphers of `IV_NCP=2`.
const NCP_2: [&str; 2] = ["AES-256-GCM", "AES-128-GCM"];

/// A list of ciphers is not usable: the configuration's fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CipherListError {
    /// A name of no AEAD.
    #[error(
        "cipher {0:?} is no AEAD of OpenVPN's data channel: take it out, or write ?{0} to use it only where it exists"
    )]
    Unknown(String),
    /// None left.
    #[error(
        "no usable data cipher in the list: name AES-256-GCM, AES-128-GCM or CHACHA20-POLY1305"
    )]
    Empty,
    /// Too many.
    #[error("more than {CIPHERS_MAX} data ciphers: shorten the list")]
    TooMany,
}

/// The ciphers of OpenVPN's own default, in its order.
pub const DEFAULT_CIPHERS: [DataCipher; 3] =
    [DataCipher::Aes256Gcm, DataCipher::Aes128Gcm, DataCipher::ChaCha20Poly1305];

/// The cipher of a name, in letters of any case.
pub fn cipher_of(name: &str) -> Option<DataCipher> {
    DataCipher::ALL.into_iter().find(|cipher| cipher.name().eq_ignore_ascii_case(name))
}

/// Reads a list as `data-ciphers` has it: names between colons, a `?` before those that may be unknown, `DEFAULT` for
/// OpenVPN's own.
///
/// # Errors
/// [`CipherListError`]
pub fn parse_ciphers(list: &str) -> Result<Vec<DataCipher>, CipherListError> {
    let mut ciphers = Vec::new();
    for (count, name) in list.split(':').map(str::trim).enumerate() {
        if count == CIPHERS_MAX {
            return Err(CipherListError::TooMany);
        }
        let (name, is_optional) = match name.strip_prefix('?') {
            Some(name) => (name, true),
            None => (name, false),
        };
        if name == "DEFAULT" {
            ciphers.extend(DEFAULT_CIPHERS);
        } else if let Some(cipher) = cipher_of(name) {
            ciphers.push(cipher);
        } else if !is_optional && !name.is_empty() {
            return Err(CipherListError::Unknown(name.to_owned()));
        }
    }
    let mut seen = Vec::new();
    ciphers.retain(|cipher| {
        !seen.contains(cipher) && {
            seen.push(*cipher);
            true
        }
    });
    if ciphers.is_empty() { Err(CipherListError::Empty) } else { Ok(ciphers) }
}

/// A list as it is written.
pub fn list_of(ciphers: &[DataCipher]) -> String {
    let names: Vec<&str> = ciphers.iter().map(|cipher| cipher.name()).collect();
    names.join(":")
}

/// What a server is willing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerPolicy {
    /// Its data ciphers, the best first.
    pub ciphers: Vec<DataCipher>,
    /// The cipher of a client that names none at all.
    pub fallback: Option<DataCipher>,
    /// Its data channel device has epochs.
    pub has_epochs: bool,
    /// Its control channel can take the key of later handshakes from the first.
    pub has_dynamic_tls_crypt: bool,
}

/// Why a server and a client have no data channel in common. [`Self::client_text`] is for the client's user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No cipher in common.
    #[error(
        "no data cipher in common: this server has {server}, the client {client}; add one on either side"
    )]
    NoSharedCipher {
        /// The server's.
        server: String,
        /// The client's.
        client: String,
    },
    /// A client that names no cipher.
    #[error(
        "the client names no data cipher, and data-ciphers-fallback is not set: update the client"
    )]
    NoCipherNamed,
    /// A client before OpenVPN 2.4, or another that has no peer id.
    #[error("the client cannot send DATA_V2 packets: update it to OpenVPN 2.4.5 or later")]
    NoDataV2,
    /// A client that frames its packets for compression, and cannot stop it.
    #[error(
        "the client's profile has comp-lzo, and it has no compress stub-v2: remove comp-lzo from the profile"
    )]
    Compression,
    /// A client that cuts packets.
    #[error("the client's profile has fragment: remove it")]
    Fragment,
    /// A client of Ethernet frames.
    #[error("the client's profile has dev tap: change it to dev tun")]
    Tap,
}

impl Refusal {
    /// The text that the client shows, behind AUTH_FAILED.
    pub const fn client_text(&self) -> &'static str {
        match self {
            Self::NoSharedCipher { .. } | Self::NoCipherNamed => {
                "Data channel cipher negotiation failed (no shared cipher)"
            }
            Self::NoDataV2 => {
                "This server needs a client that sends DATA_V2: update to OpenVPN 2.4.5 or later"
            }
            Self::Compression => "This server has no compression: remove comp-lzo from the profile",
            Self::Fragment => "This server does not reassemble: remove fragment from the profile",
            Self::Tap => "This server carries IP packets: change dev tap to dev tun in the profile",
        }
    }
}

/// What server and client agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The data cipher.
    pub cipher: DataCipher,
    /// The client takes the cipher from a push.
    pub pushes_cipher: bool,
    /// What both can do.
    pub flags: ProtocolFlags,
    /// The client reads `protocol-flags`.
    pub has_protocol_flags: bool,
    /// The client waits for its options without asking for them.
    pub pushes_unasked: bool,
    /// The client reads what is behind AUTH_PENDING.
    pub takes_keywords: bool,
    /// The client takes an MTU.
    pub takes_mtu: bool,
    /// The client must be told to frame its packets as if there were no compression.
    pub pushes_stub: bool,
}

impl Agreement {
    /// The options to push, and only these: no address, route or time.
    pub fn push_options(&self, peer: Option<PeerNumber>, tun_mtu: u32) -> Vec<PushOption> {
        let mut options: Vec<PushOption> = peer.map(PushOption::PeerId).into_iter().collect();
        if self.pushes_cipher {
            options.push(PushOption::Cipher(self.cipher.name().to_owned()));
        }
        if self.has_protocol_flags {
            options.push(PushOption::ProtocolFlags(self.flags));
        } else if self.flags.tls_ekm {
            options.push(PushOption::KeyDerivationExporter);
        }
        if self.takes_mtu {
            options.push(PushOption::TunMtu(tun_mtu));
        }
        if self.pushes_stub {
            let words = ["compress", "stub-v2"];
            options.push(PushOption::Compression(words.map(str::to_owned).to_vec()));
        }
        options
    }
}

/// What a server agrees on with a client, from the client's first message.
///
/// # Errors
/// [`Refusal`]: the client is told [`Refusal::client_text`].
pub fn negotiate(policy: &ServerPolicy, client: &ClientMessage) -> Result<Agreement, Refusal> {
    let (info, options) = (&client.peer_info, client.options.as_str());
    if option_of(options, "dev-type").is_some_and(|kind| kind == "tap") {
        return Err(Refusal::Tap);
    }
    if option_of(options, "mtu-dynamic").is_some() {
        return Err(Refusal::Fragment);
    }
    let proto = info.proto();
    if !proto.has(IvProto::DATA_V2) {
        return Err(Refusal::NoDataV2);
    }
    let pushes_stub = option_of(options, "comp-lzo").is_some();
    if pushes_stub && info.get("IV_COMP_STUBv2") != Some("1") {
        return Err(Refusal::Compression);
    }
    let cipher = choose(policy, info, option_of(options, "cipher"))?;
    let has_protocol_flags = proto.has(IvProto::CC_EXIT);
    let flags = ProtocolFlags {
        cc_exit: has_protocol_flags,
        tls_ekm: proto.has(IvProto::TLS_KEY_EXPORT),
        dyn_tls_crypt: policy.has_dynamic_tls_crypt
            && has_protocol_flags
            && proto.has(IvProto::DYNAMIC_TLS_CRYPT),
        aead_epoch: policy.has_epochs && has_protocol_flags && proto.has(IvProto::DATA_EPOCH),
    };
    Ok(Agreement {
        cipher,
        pushes_cipher: negotiates(info),
        flags,
        has_protocol_flags,
        pushes_unasked: proto.has(IvProto::REQUEST_PUSH),
        takes_keywords: proto.has(IvProto::AUTH_PENDING_KEYWORDS),
        takes_mtu: info.mtu().is_some_and(|mtu| mtu > 0),
        pushes_stub,
    })
}

/// Whether a client takes the server's word for the cipher.
fn negotiates(info: &PeerInfo) -> bool {
    info.ciphers().is_some() || info.ncp().is_some_and(|version| version >= 2)
}

fn choose(
    policy: &ServerPolicy,
    info: &PeerInfo,
    fixed: Option<&str>,
) -> Result<DataCipher, Refusal> {
    let named: Vec<&str> = match info.ciphers() {
        // A client that lists its ciphers cannot be assumed to take its old fixed one.
        Some(ciphers) => ciphers,
        None if negotiates(info) => NCP_2.into_iter().chain(fixed).collect(),
        None => fixed.into_iter().collect(),
    };
    let has =
        |cipher: &DataCipher| named.iter().any(|name| name.eq_ignore_ascii_case(cipher.name()));
    if let Some(cipher) = policy.ciphers.iter().find(|cipher| has(cipher)) {
        return Ok(*cipher);
    }
    match policy.fallback {
        Some(cipher) if named.is_empty() => Ok(cipher),
        None if named.is_empty() => Err(Refusal::NoCipherNamed),
        _ => Err(Refusal::NoSharedCipher {
            server: list_of(&policy.ciphers),
            client: named.join(":"),
        }),
    }
}

/// Why a client has no data channel with a server: its configuration's fault, or the server's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientRefusal {
    /// The server wants a cipher that the client does not allow.
    #[error(
        "the server wants the data cipher {wanted:?}, this client allows {own}: add it to data-ciphers"
    )]
    CipherNotAllowed {
        /// The server's.
        wanted: String,
        /// The client's.
        own: String,
    },
    /// The server names no cipher.
    #[error("the server names no data cipher: set data-ciphers-fallback to the server's cipher")]
    NoCipherNamed,
    /// The server gives no number for DATA_V2 packets.
    #[error("the server gave no peer id: it is older than OpenVPN 2.4, update it")]
    NoPeerId,
    /// The server compresses.
    #[error(
        "the server wants {0:?}, this client does not compress: remove it from the server's configuration"
    )]
    Compression(String),
}

/// What a client took from the server's options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAgreement {
    /// The data cipher.
    pub cipher: DataCipher,
    /// The number to put into DATA_V2 packets.
    pub peer: PeerNumber,
    /// What the server said that both can do.
    pub flags: ProtocolFlags,
}

/// What a client takes from pushed options. `server_options` is the options string of the server's first message.
///
/// # Errors
/// [`ClientRefusal`]
pub fn accept_push(
    own: &[DataCipher],
    fallback: Option<DataCipher>,
    server_options: &str,
    pushed: &[PushOption],
) -> Result<ClientAgreement, ClientRefusal> {
    let (mut cipher, mut peer, mut flags) = (None, None, ProtocolFlags::default());
    for option in pushed {
        match option {
            PushOption::Cipher(name) => cipher = Some(name.as_str()),
            PushOption::PeerId(number) => peer = Some(*number),
            PushOption::ProtocolFlags(words) => flags = *words,
            PushOption::KeyDerivationExporter => flags.tls_ekm = true,
            PushOption::Compression(words) if !is_plain(words) => {
                return Err(ClientRefusal::Compression(words.join(" ")));
            }
            _ => {}
        }
    }
    let cipher = match (cipher.or_else(|| option_of(server_options, "cipher")), fallback) {
        (Some(name), _) => {
            let allowed = cipher_of(name).filter(|cipher| own.contains(cipher));
            let wanted = || name.chars().filter(|char| !char.is_control()).collect();
            allowed.ok_or_else(|| ClientRefusal::CipherNotAllowed {
                wanted: wanted(),
                own: list_of(own),
            })?
        }
        (None, Some(cipher)) => cipher,
        (None, None) => return Err(ClientRefusal::NoCipherNamed),
    };
    Ok(ClientAgreement { cipher, peer: peer.ok_or(ClientRefusal::NoPeerId)?, flags })
}

/// Whether packets look the same with these words as without them: version 2 of the stub changes no IP packet.
fn is_plain(words: &[String]) -> bool {
    matches!(words, [_, mode] if mode == "stub-v2" || mode == "migrate")
}

/// The peer info of a client that can do `proto`.
pub fn client_peer_info(
    version: &str,
    platform: &str,
    ciphers: &[DataCipher],
    proto: IvProto,
    mtu_max: u32,
) -> PeerInfo {
    let mut info = PeerInfo::default();
    info.set("IV_VER", version);
    info.set("IV_PLAT", platform);
    info.set("IV_TCPNL", "1");
    info.set("IV_MTU", &mtu_max.to_string());
    info.set("IV_NCP", "2");
    info.set("IV_CIPHERS", &list_of(ciphers));
    info.set("IV_PROTO", &proto.0.to_string());
    info
}

#[cfg(test)]
#[path = "negotiation_tests.rs"]
mod tests;
