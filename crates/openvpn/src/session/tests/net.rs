//! The channel: it loses, repeats and reorders by a seed, and time passes when nothing is on its way.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use rustls::SupportedProtocolVersion;
use rustls::version::{TLS12, TLS13};
use weft_crypto::DataCipher;

use super::pki::{Pki, server_name};
use crate::data::PeerNumber;
use crate::device::{KeyBlock, Side, Slot};
use crate::gate::{Gate, GateConfig, Gated};
use crate::key_method::{Credentials, LinkOptions, PeerInfo};
use crate::negotiation::DEFAULT_CIPHERS;
use crate::session::{
    Acceptance, AuthRequest, ClientOptions, DataKeys, Dropped, EndReason, Event, Features,
    ServerOptions, Session, Timing, session_of,
};
use crate::wrap::{Metadata, SERVER_KEY_BYTES, ServerKey, WrapKeys};

pub(super) const UNIX_S: u64 = 1_800_000_000;
pub(super) const BOTH_VERSIONS: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];

static PKI: LazyLock<Pki> = LazyLock::new(Pki::new);

/// What one end has said so far, and what its device holds.
#[derive(Default)]
pub(super) struct Said {
    pub(super) primary: Option<Box<DataKeys>>,
    pub(super) secondary: Option<Box<DataKeys>>,
    pub(super) is_connected: bool,
    pub(super) pushed: Vec<String>,
    pub(super) asked: Vec<AuthRequest>,
    pub(super) messages: Vec<crate::messages::Message>,
    pub(super) ended: Option<EndReason>,
}

impl Said {
    fn take(&mut self, session: &mut Session) {
        while let Some(event) = session.poll_event() {
            assert!(self.ended.is_none(), "an event behind the last: {event:?}");
            match event {
                Event::Authenticate(request) => self.asked.push(*request),
                Event::InstallKey(Slot::Primary, keys) => self.primary = Some(keys),
                Event::InstallKey(Slot::Secondary, keys) => self.secondary = Some(keys),
                Event::SwapKeys => std::mem::swap(&mut self.primary, &mut self.secondary),
                Event::RemoveSecondaryKey => self.secondary = None,
                Event::Pushed(options) => self.pushed = options,
                Event::Connected => self.is_connected = true,
                Event::Message(message) => self.messages.push(message),
                Event::Ended(reason) => self.ended = Some(reason),
            }
        }
    }

    /// The keys with this id, in either slot.
    fn with_id(&self, id: u8) -> Option<&DataKeys> {
        let slots = [self.primary.as_deref(), self.secondary.as_deref()];
        slots.into_iter().flatten().find(|keys| keys.key_id.get() == id)
    }
}

/// What a test changes.
pub(super) struct Setup {
    pub(super) client_wrap: WrapKeys,
    pub(super) client_key: Option<Vec<u8>>,
    pub(super) gate: GateConfig,
    pub(super) is_stream: bool,
    pub(super) client_versions: Vec<&'static SupportedProtocolVersion>,
    pub(super) client_features: Features,
    pub(super) server_features: Features,
    pub(super) client_ciphers: Vec<DataCipher>,
    pub(super) client_timing: Timing,
    pub(super) server_timing: Timing,
    pub(super) options: Vec<String>,
    /// The client's authority is another one than the server's.
    pub(super) is_foreign: bool,
    pub(super) seed: u64,
    /// Of 100 packets, how many are lost, repeated and overtaken.
    pub(super) mischief: u64,
    /// The server's caller decides by itself.
    pub(super) accepts: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            client_wrap: WrapKeys::None,
            client_key: None,
            gate: GateConfig::default(),
            is_stream: false,
            client_versions: BOTH_VERSIONS.to_vec(),
            client_features: Features::default(),
            server_features: Features::default(),
            client_ciphers: vec![DataCipher::ChaCha20Poly1305, DataCipher::Aes128Gcm],
            client_timing: Timing::default(),
            server_timing: Timing::default(),
            options: vec!["ifconfig 10.8.0.2 255.255.255.0".to_owned()],
            is_foreign: false,
            seed: 1,
            mischief: 0,
            accepts: true,
        }
    }
}

/// The keys of a tls-crypt-v2 client and its server.
pub(super) fn crypt_v2() -> (ServerKey, KeyBlock, Vec<u8>) {
    let server = ServerKey::new(&[5; SERVER_KEY_BYTES]);
    let key = KeyBlock::new(std::array::from_fn(|at| at as u8));
    let wrapped = server.wrap(&key, &Metadata::User(b"phone".to_vec())).unwrap();
    (server, key, wrapped)
}

impl Setup {
    pub(super) fn with_wrap(server: WrapKeys, client: WrapKeys) -> Self {
        let gate = GateConfig { wrap: Some(server), ..GateConfig::default() };
        Self { client_wrap: client, gate, ..Self::default() }
    }

    pub(super) fn with_crypt_v2() -> Self {
        let (server, key, wrapped) = crypt_v2();
        let client_keys = Some(Arc::new(server));
        let gate = GateConfig { wrap: None, client_keys, ..GateConfig::default() };
        let client_wrap = WrapKeys::tls_crypt(&key, Side::Client);
        Self { client_wrap, client_key: Some(wrapped), gate, ..Self::default() }
    }

    fn server_options(&self) -> Arc<ServerOptions> {
        let Features { exporter, dynamic_wrap, epochs } = self.server_features;
        let tls = PKI.server_tls(&BOTH_VERSIONS);
        let mut options = ServerOptions::new(tls, DEFAULT_CIPHERS.to_vec());
        options.timing = self.server_timing;
        (options.policy.has_epochs, options.policy.has_dynamic_tls_crypt) = (epochs, dynamic_wrap);
        (options.has_exporter, options.link.is_tcp) = (exporter, self.is_stream);
        Arc::new(options)
    }

    fn client_options(&self) -> ClientOptions {
        let own = self.is_foreign.then(Pki::new);
        let tls = own.as_ref().unwrap_or(&PKI).client_tls(&self.client_versions);
        ClientOptions {
            timing: self.client_timing,
            ciphers: self.client_ciphers.clone(),
            features: self.client_features,
            link: link(self.is_stream),
            credentials: Credentials::Given {
                user: "anna".to_owned(),
                password: zeroize::Zeroizing::new("secret".to_owned()),
            },
            peer_info: PeerInfo::parse("IV_VER=2.6.0\n"),
            client_key: self.client_key.clone(),
            is_stream: self.is_stream,
            ..ClientOptions::new(tls, server_name(), self.client_wrap.clone())
        }
    }
}

pub(super) fn link(is_tcp: bool) -> LinkOptions {
    LinkOptions { is_tcp, ..LinkOptions::default() }
}

/// A client, a server behind its gate, and what is on its way between them.
pub(super) struct Net {
    pub(super) now: Instant,
    pub(super) client: Session,
    pub(super) server: Option<Session>,
    pub(super) client_said: Said,
    pub(super) server_said: Said,
    gate: Gate,
    server_options: Arc<ServerOptions>,
    setup: Setup,
    random: u64,
    forth: VecDeque<Vec<u8>>,
    back: VecDeque<Vec<u8>>,
    /// Datagrams so far.
    pub(super) datagrams: usize,
    /// Nothing arrives any more.
    pub(super) is_cut: bool,
}

pub(super) fn address() -> SocketAddr {
    "192.0.2.7:40000".parse().unwrap()
}

impl Net {
    pub(super) fn new(setup: Setup) -> Self {
        let now = Instant::now();
        let seed = [setup.seed as u8; 32];
        let client =
            Session::connect(now, UNIX_S, setup.client_options(), address(), &seed).unwrap();
        Self {
            now,
            client,
            server: None,
            client_said: Said::default(),
            server_said: Said::default(),
            gate: Gate::new(now, setup.gate.clone(), &[3; 32]),
            server_options: setup.server_options(),
            random: setup.seed | 1,
            setup,
            forth: VecDeque::new(),
            back: VecDeque::new(),
            datagrams: 0,
            is_cut: false,
        }
    }

    /// Runs until `done` or for so long in virtual time; returns whether it was done.
    pub(super) fn run(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) -> bool {
        let end = self.now + limit;
        loop {
            self.collect();
            if done(self) {
                return true;
            }
            if let Some(bytes) = self.forth.pop_front() {
                self.serve(&bytes);
                continue;
            }
            if let Some(bytes) = self.back.pop_front() {
                let result = self.client.handle_datagram(self.now, &bytes);
                self.check(result);
                continue;
            }
            let timeouts = [Some(&self.client), self.server.as_ref()].into_iter().flatten();
            let next = timeouts.filter_map(|session| session.poll_timeout(self.now)).min();
            match next {
                Some(at) if at <= end => self.now = at.max(self.now),
                _ => {
                    self.now = end;
                    return false;
                }
            }
            self.client.handle_timeout(self.now);
            if let Some(server) = &mut self.server {
                server.handle_timeout(self.now);
            }
        }
    }

    pub(super) fn run_until_connected(&mut self) {
        let is_done = self.run(Duration::from_secs(300), |net| {
            net.client_said.is_connected && net.server_said.is_connected
        });
        let ends = (&self.client_said.ended, &self.server_said.ended);
        assert!(is_done, "seed {}: not connected: {ends:?}", self.setup.seed);
    }

    pub(super) fn server(&mut self) -> &mut Session {
        self.server.as_mut().unwrap()
    }

    /// From now on the test decides about clients by itself.
    pub(super) fn decide_by_hand(&mut self) {
        self.setup.accepts = false;
    }

    /// Both have this key, and it is the same.
    pub(super) fn agree_on(&self, id: u8) -> bool {
        let both = (self.client_said.with_id(id), self.server_said.with_id(id));
        let (Some(client), Some(server)) = both else { return false };
        assert_eq!(client.block.expose(), server.block.expose(), "seed {}", self.setup.seed);
        assert_eq!((client.cipher, client.peer), (server.cipher, server.peer));
        assert_eq!((client.side, server.side), (Side::Client, Side::Server));
        true
    }

    /// A good channel has no packet that is dropped, but for a new key that must wait.
    fn check(&self, result: Result<(), Dropped>) {
        let is_fine = matches!(result, Ok(()) | Err(Dropped::TooSoon(_)));
        assert!(is_fine || self.setup.mischief > 0, "{result:?}");
    }

    fn serve(&mut self, bytes: &[u8]) {
        let owner = self.server.as_ref().and_then(Session::remote);
        if let Some(server) = self.server.as_mut().filter(|_| session_of(bytes) == owner) {
            let result = server.handle_datagram(self.now, bytes);
            return self.check(result);
        }
        let (now, options) = (self.now, self.server_options.clone());
        let admission = if self.setup.is_stream {
            self.gate.handle_stream(now, UNIX_S, [8; 8], bytes).ok()
        } else {
            match self.gate.handle_datagram(now, UNIX_S, address(), bytes) {
                Ok(Gated::Answer(answer)) => {
                    self.back.push_back(answer);
                    None
                }
                Ok(Gated::Admit(admission)) => Some(*admission),
                Err(_) => None,
            }
        };
        if let Some(admission) = admission {
            let server = Session::admit(now, UNIX_S, admission, options, address(), &[77; 32]);
            self.server = Some(server.unwrap());
        }
    }

    /// Takes events and transmits of both ends.
    fn collect(&mut self) {
        self.client_said.take(&mut self.client);
        if let Some(server) = &mut self.server {
            self.server_said.take(server);
            if self.setup.accepts && !self.server_said.asked.is_empty() {
                self.server_said.asked.clear();
                let peer = PeerNumber::new(7).unwrap();
                let options = self.setup.options.clone();
                server.accept(self.now, Acceptance { peer, options }).unwrap();
                self.server_said.take(server);
            }
        }
        while let Some(transmit) = self.client.poll_transmit(self.now) {
            self.forth.push_back(transmit.bytes);
            self.disturb(true);
        }
        while let Some(transmit) = self.server.as_mut().and_then(|end| end.poll_transmit(self.now))
        {
            self.back.push_back(transmit.bytes);
            self.disturb(false);
        }
    }

    /// Does mischief to the newest packet of one way.
    fn disturb(&mut self, is_forth: bool) {
        self.datagrams += 1;
        let chances = [(); 4].map(|()| self.chance());
        let way = if is_forth { &mut self.forth } else { &mut self.back };
        let [lost, repeated, overtakes, _] = chances;
        if self.is_cut || lost {
            way.pop_back();
            return;
        }
        if repeated {
            way.extend(way.back().cloned());
        }
        if overtakes && let Some(packet) = way.pop_back() {
            way.push_front(packet);
        }
    }

    /// A chance of `mischief` in 100 (xorshift64).
    fn chance(&mut self) -> bool {
        for shift in [13_i32, -7, 17] {
            self.random ^= match shift {
                left if left > 0 => self.random << left,
                right => self.random >> -right,
            };
        }
        (self.random >> 20) % 100 < self.setup.mischief
    }
}
