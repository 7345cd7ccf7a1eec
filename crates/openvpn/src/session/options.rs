//! How a session behaves: what its caller gives it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::hmac;
use rustls::pki_types::ServerName;
use weft_crypto::DataCipher;
use zeroize::Zeroizing;

use crate::key_method::{Credentials, IvProto, LinkOptions, PeerInfo};
use crate::negotiation::{DEFAULT_CIPHERS, ServerPolicy};
use crate::wrap::WrapKeys;

/// The times of a session, as OpenVPN's defaults are.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long it may take until a key is agreed on: `hand-window`.
    pub hand_window: Duration,
    /// How long an old key is still received: `tran-window`.
    pub transition_window: Duration,
    /// The age at which this end renews a key: `reneg-sec`; `None`: never. A server takes up to a tenth less, by
    /// chance, so that its clients do not come all at once.
    pub renegotiate_after: Option<Duration>,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            hand_window: Duration::from_secs(60),
            transition_window: Duration::from_secs(3_600),
            renegotiate_after: Some(Duration::from_secs(3_600)),
        }
    }
}

impl Timing {
    /// How old a new key is before it seals, while an older one can: until then the peer may not have it.
    pub(super) fn settling(&self) -> Duration {
        let half = self.renegotiate_after.map_or(Duration::MAX, |after| after / 2);
        half.min(self.hand_window)
    }
}

/// What a client offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Data keys from the exporter of TLS, rather than OpenVPN's own derivation (MD5 and SHA-1).
    pub exporter: bool,
    /// Later handshakes are wrapped with a key of the first: `dyn-tls-crypt`.
    pub dynamic_wrap: bool,
    /// Data packets with epochs, if the device has them.
    pub epochs: bool,
}

impl Default for Features {
    fn default() -> Self {
        Self { exporter: true, dynamic_wrap: true, epochs: false }
    }
}

/// What all sessions of a server have in common.
#[derive(Clone)]
pub struct ServerOptions {
    /// Certificate, key, and who verifies the clients' certificates. It sends no session tickets: OpenVPN does not
    /// resume sessions.
    pub tls: Arc<rustls::ServerConfig>,
    /// Times.
    pub timing: Timing,
    /// Ciphers of the data channel, and what is used if a client can do so, too.
    pub policy: ServerPolicy,
    /// Data keys come from the exporter of TLS, if a client can do so, too; else from OpenVPN's own derivation, which
    /// has MD5 and SHA-1.
    pub has_exporter: bool,
    /// The options string's content; the MTU is pushed, too.
    pub link: LinkOptions,
}

impl ServerOptions {
    /// As OpenVPN's server is by its defaults, over datagrams, with these ciphers, the best first.
    pub fn new(tls: Arc<rustls::ServerConfig>, ciphers: Vec<DataCipher>) -> Self {
        let policy = ServerPolicy {
            ciphers,
            fallback: None,
            has_epochs: false,
            has_dynamic_tls_crypt: true,
        };
        let (timing, link) = (Timing::default(), LinkOptions::default());
        Self { tls, timing, policy, has_exporter: true, link }
    }
}

/// What a client connects by.
#[derive(Clone)]
pub struct ClientOptions {
    /// Certificate, key, and who verifies the server's certificate.
    pub tls: Arc<rustls::ClientConfig>,
    /// The name that the server's certificate must have, unless the verifier has its own rule.
    pub server_name: ServerName<'static>,
    /// Times.
    pub timing: Timing,
    /// Ciphers of the data channel.
    pub ciphers: Vec<DataCipher>,
    /// The cipher of a server that names none.
    pub fallback: Option<DataCipher>,
    /// What is used if the server wants so, too.
    pub features: Features,
    /// The options string's content.
    pub link: LinkOptions,
    /// User name and password; [`super::Session::set_credentials`] replaces them, as by a token.
    pub credentials: Credentials,
    /// What is said about this client, such as `IV_VER` and `IV_PLAT`. The session adds what it can do.
    pub peer_info: PeerInfo,
    /// What the caller can do beyond the session's own: DNS options, PUSH_UPDATE.
    pub proto: IvProto,
    /// What wraps control packets.
    pub wrap: WrapKeys,
    /// With tls-crypt-v2: the client's key, wrapped for the server.
    pub client_key: Option<Vec<u8>>,
    /// Over a connection rather than datagrams.
    pub is_stream: bool,
}

impl ClientOptions {
    /// As OpenVPN's client is by its defaults, over datagrams, without a user's name.
    pub fn new(
        tls: Arc<rustls::ClientConfig>,
        server_name: ServerName<'static>,
        wrap: WrapKeys,
    ) -> Self {
        Self {
            tls,
            server_name,
            timing: Timing::default(),
            ciphers: DEFAULT_CIPHERS.to_vec(),
            fallback: None,
            features: Features::default(),
            link: LinkOptions::default(),
            credentials: Credentials::Missing,
            peer_info: PeerInfo::default(),
            proto: IvProto::default(),
            wrap,
            client_key: None,
            is_stream: false,
        }
    }
}

/// The random bytes of a session, out of its seed.
pub(super) struct Seeds {
    /// Not a key that is made for many packets: that takes 2 KB for as long as the session lives.
    seed: Zeroizing<[u8; 32]>,
    count: u64,
}

impl Seeds {
    pub(super) fn new(seed: &[u8; 32]) -> Self {
        Self { seed: Zeroizing::new(*seed), count: 0 }
    }

    /// The next random bytes.
    pub(super) fn next<const N: usize>(&mut self) -> Zeroizing<[u8; N]> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &*self.seed);
        let mut bytes = Zeroizing::new([0; N]);
        for piece in bytes.chunks_mut(32) {
            self.count += 1;
            let tag = hmac::sign(&key, &self.count.to_be_bytes());
            piece.iter_mut().zip(tag.as_ref()).for_each(|(byte, tag)| *byte = *tag);
        }
        bytes
    }
}

impl fmt::Debug for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seeds").finish_non_exhaustive()
    }
}
