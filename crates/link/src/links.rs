//! The handle to all links of a host.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::{EndpointConfig, TokioRuntime};
use tokio::time::timeout;
use weft_crypto::PeerId;

use crate::error::{CloseCode, Failure, LinkError, SendError};
use crate::event::{EventSender, Events};
use crate::identity::Identity;
use crate::limits::{
    DEFAULT_PORT, DIALS_MAX, HELLO_MAX_BYTES, MESSAGE_MAX_BYTES, NICKNAME_MAX_BYTES,
    PROTOCOL_VERSION, REFUSED_PEERS_MAX, SHUTDOWN_TIMEOUT_MS, Timing,
};
use crate::secret::Secret;
use crate::session::{connect, dial};
use crate::shared::{Dial, DialKey, Parts, Shared, State};
use crate::socket::canonical;
use crate::status::{LinkState, LinkStatus};
use crate::target::Target;
use crate::token::Token;
use crate::{accept, socket, tls};

/// How this host proves that it belongs to the network.
#[derive(Clone, Debug)]
pub enum Admission {
    /// By the network's password or secret.
    Secret(Secret),
    /// By a join token; the first host that admits it sends it the secret
    /// ([`Event::SecretLearned`](crate::Event::SecretLearned)).
    Token(Token),
}

/// The configuration for [`Links::start`].
#[derive(Clone, Debug)]
pub struct Config {
    /// This host's key.
    pub identity: Identity,
    /// This host's name, shown to admitted peers; cut to 255 bytes.
    pub nickname: String,
    /// How this host proves that it belongs to the network.
    pub admission: Admission,
    /// The address to listen on; `None`: all IPv6 and IPv4 addresses.
    pub host: Option<IpAddr>,
    /// The UDP port to listen on and to dial from; 0 for any.
    pub port: u16,
    /// Random per start, so that peers notice a restart.
    pub instance: u64,
    /// The previous instance on this machine, if it is known to have ended: peers let this one replace it at
    /// once. Without it, they first check whether the other one still answers.
    pub succeeds: Option<u64>,
    /// The application's hello to admitted peers; at most 64 KiB as JSON.
    pub hello: serde_json::Value,
    /// The link protocol versions that this host supports.
    pub versions: RangeInclusive<u16>,
    /// The timings.
    pub timing: Timing,
}

impl Config {
    /// The defaults: all addresses, port 6783, a random instance, an empty hello.
    pub fn new(identity: Identity, nickname: impl Into<String>, admission: Admission) -> Self {
        Self {
            identity,
            nickname: nickname.into(),
            admission,
            host: None,
            port: DEFAULT_PORT,
            instance: rand::random(),
            succeeds: None,
            hello: serde_json::Value::Null,
            versions: PROTOCOL_VERSION..=PROTOCOL_VERSION,
            timing: Timing::default(),
        }
    }
}

/// All links of this host. A cheap handle; the links live until [`Links::shutdown`].
#[derive(Clone)]
pub struct Links {
    shared: Arc<Shared>,
}

impl Links {
    /// Binds the socket and starts to accept. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// [`LinkError::Bind`], [`LinkError::HelloLength`], [`LinkError::Tls`].
    pub fn start(config: Config) -> Result<(Self, Events), LinkError> {
        let server = tls::server_config(&config.identity, &config.timing)?;
        let hello = hello_bytes(&config.hello)?;
        let socket = socket::open(config.host, config.port)?;
        let address = socket.local_addr();
        let endpoint = quinn::Endpoint::new(
            EndpointConfig::default(),
            Some(server),
            socket,
            Arc::new(TokioRuntime),
        )
        .map_err(|source| LinkError::Bind {
            address: address.unwrap_or_else(|_| SocketAddr::from(([0; 4], config.port))),
            source,
        })?;
        let (events, receiver) = EventSender::new();
        let (secret, join_token) = match config.admission {
            Admission::Secret(secret) => (Some(secret), None),
            Admission::Token(token) => (None, Some(token)),
        };
        let shared = Arc::new(Shared::new(Parts {
            endpoint,
            identity: config.identity,
            nickname: cut(config.nickname),
            instance: config.instance,
            succeeds: config.succeeds,
            versions: config.versions,
            timing: config.timing,
            events,
            secret,
            join_token,
            hello,
        }));
        tokio::spawn(accept::run(shared.clone()));
        Ok((Self { shared }, receiver))
    }

    /// This host's peer id.
    pub fn peer_id(&self) -> PeerId {
        self.shared.me
    }

    /// The address and port that the socket is bound to.
    ///
    /// # Errors
    /// The kernel's error, which does not happen in practice.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.shared.endpoint.local_addr()
    }

    /// Dials a target until it is forgotten; if it is dialled already, retries at once. Returns false if there
    /// are too many targets.
    pub fn connect(&self, target: Target) -> bool {
        let mut state = self.shared.lock();
        let key = DialKey::Target(target.address());
        let full = state.dials.len() >= DIALS_MAX && !state.dials.contains_key(&key);
        if full || state.closed {
            return false;
        }
        dial::start(&self.shared, &mut state, target);
        true
    }

    /// Dials a peer at any of these addresses until it is forgotten, independent of targets. A repeated call
    /// with the same addresses changes nothing. Returns false if there are too many targets.
    pub fn connect_peer(&self, peer: PeerId, addresses: &[SocketAddr]) -> bool {
        let mut state = self.shared.lock();
        let full =
            state.dials.len() >= DIALS_MAX && !state.dials.contains_key(&DialKey::Peer(peer));
        if full || state.closed || peer == self.shared.me {
            return false;
        }
        let addresses = addresses.iter().map(|address| canonical(*address)).collect();
        dial::start_peer(&self.shared, &mut state, peer, addresses, None);
        true
    }

    /// Resolves a target's name, as each attempt to reach it does.
    ///
    /// # Errors
    /// The reason why it resolves to no address.
    pub async fn look_up(&self, target: &Target) -> Result<(), String> {
        let found = connect::resolve(&self.shared, target).await;
        found.map(drop).map_err(|failure| failure.reason().to_owned())
    }

    /// Stops dialling a target; a link with it stays. Returns false if it was no target.
    pub fn forget(&self, target: &Target) -> bool {
        let mut state = self.shared.lock();
        let Some(dial) = state.dials.remove(&DialKey::Target(target.address())) else {
            return false;
        };
        dial.task.abort();
        if let Some(peer) = dial.peer.filter(|peer| !state.links.contains_key(peer)) {
            forget_peer(&mut state, peer);
        }
        true
    }

    /// Stops dialling a peer that was up once or was named by [`Links::connect_peer`]; targets stay.
    pub fn forget_peer(&self, peer: PeerId) {
        let mut state = self.shared.lock();
        forget_peer(&mut state, peer);
        state.known.forget(peer);
        state.refusals.retain(|refusal| !refusal.is_of(peer));
    }

    /// Queues a message for a peer. Messages arrive complete, in order and once, until the link goes down or
    /// an `Up` without `renewal` follows.
    ///
    /// # Errors
    /// [`SendError`]; after [`SendError::Full`] the link is closed.
    pub fn send(&self, peer: PeerId, bytes: Vec<u8>) -> Result<(), SendError> {
        if bytes.len() > MESSAGE_MAX_BYTES {
            return Err(SendError::TooLong);
        }
        let mut state = self.shared.lock();
        let link = state.links.get_mut(&peer).ok_or(SendError::NotConnected)?;
        if link.closing.is_some() {
            return Err(SendError::NotConnected);
        }
        if !link.outbox.push(bytes) {
            link.close(Failure::refused(CloseCode::Slow, SendError::Full.to_string()));
            return Err(SendError::Full);
        }
        Ok(())
    }

    /// Closes the link with a peer. Both sides see the reason and retry slowly.
    pub fn close(&self, peer: PeerId, reason: &str) {
        if let Some(link) = self.shared.lock().links.get_mut(&peer) {
            link.close(Failure::refused(CloseCode::Application, reason));
        }
    }

    /// Closes the link with a peer and refuses later ones with the same reason, until [`Links::allow`]. This
    /// is not stored: repeat it after a restart.
    pub fn refuse(&self, peer: PeerId, reason: &str) {
        let mut state = self.shared.lock();
        if state.refused.len() < REFUSED_PEERS_MAX {
            state.refused.insert(peer, reason.to_owned());
        }
        forget_peer(&mut state, peer);
        state.known.forget(peer);
        if let Some(link) = state.links.get_mut(&peer) {
            link.close(Failure::refused(CloseCode::Application, reason));
        }
    }

    /// Accepts links with a peer again.
    pub fn allow(&self, peer: PeerId) {
        self.shared.lock().refused.remove(&peer);
    }

    /// The present address of each peer that is up: a connection survives a change of either address.
    pub fn remotes(&self) -> Vec<(PeerId, SocketAddr)> {
        let state = self.shared.lock();
        state.links.iter().map(|(peer, link)| (*peer, link.remote())).collect()
    }

    /// The address of this host that a peer dialled, or that its last packets came to. `None` if this host
    /// dialled, since the routing table then decides.
    pub fn local_of(&self, peer: PeerId) -> Option<IpAddr> {
        let state = self.shared.lock();
        state.links.get(&peer)?.conn.local_ip().map(|local| local.to_canonical())
    }

    /// All targets, all links without a target, and hosts refused here.
    pub fn status(&self) -> Vec<LinkStatus> {
        let now = Instant::now();
        let state = self.shared.lock();
        let mut lines = Vec::new();
        let mut covered = Vec::new();
        for (key, dial) in &state.dials {
            let mut line = dial.status(now);
            let is_target = matches!(key, DialKey::Target(_));
            let link = dial.peer.and_then(|peer| state.links.get(&peer).map(|link| (peer, link)));
            if let Some((peer, link)) = link {
                let link = link.status(peer);
                if !is_target {
                    continue;
                }
                covered.push(peer);
                // Its peer is linked, but at another address.
                let named = dial.target.host.parse::<IpAddr>().ok();
                let at = link.address.parse::<SocketAddr>().map(|at| at.ip()).ok();
                let elsewhere = named.zip(at).is_some_and(|(named, at)| named.to_canonical() != at);
                let reason = elsewhere.then(|| format!("linked at {}", link.address));
                let address = line.address;
                line = LinkStatus { address, reason, ..link };
            } else if !is_target && covered_by_target(&state, dial.peer) {
                continue;
            } else if line.state == LinkState::Established {
                line.state = LinkState::Retrying;
            }
            lines.push(line);
        }
        let rest = state.links.iter().filter(|(peer, _)| !covered.contains(peer));
        lines.extend(rest.map(|(peer, link)| link.status(*peer)));
        lines.extend(state.refusals.iter().map(crate::shared::Refusal::status));
        lines
    }

    /// The round-trip time of the link with a peer.
    pub fn rtt(&self, peer: PeerId) -> Option<Duration> {
        self.shared.lock().links.get(&peer).map(|link| link.conn.rtt())
    }

    /// The session of the link with a peer, as in its last `Up`; the same number on both sides.
    pub fn session_id(&self, peer: PeerId) -> Option<u64> {
        self.shared.lock().links.get(&peer).map(|link| link.session_id)
    }

    /// A new join token for one other host, valid for an hour; `None` while this host itself has not joined. A
    /// restart invalidates it.
    pub fn new_token(&self) -> Option<Token> {
        let mut state = self.shared.lock();
        state.secret.as_ref()?;
        Some(state.tokens.create(Instant::now()))
    }

    /// Changes the password: closes every link, and every peer must prove the new one.
    pub fn set_secret(&self, secret: Secret) {
        let mut state = self.shared.lock();
        state.secret = Some(secret);
        state.epoch += 1;
        state.join_token = None;
        for link in state.links.values_mut() {
            link.close(Failure::refused(CloseCode::Readmit, "the password was changed"));
        }
    }

    /// Notifies all peers, closes all links and frees the port. Events end.
    pub async fn shutdown(&self) {
        {
            let mut state = self.shared.lock();
            state.closed = true;
            for dial in std::mem::take(&mut state.dials).into_values() {
                dial.task.abort();
            }
            let reason = "this host was stopped";
            for link in state.links.values_mut() {
                link.close(Failure::refused(CloseCode::Shutdown, reason));
            }
        }
        self.shared.endpoint.close(CloseCode::Shutdown.to_wire(), b"this host was stopped");
        let limit = Duration::from_millis(SHUTDOWN_TIMEOUT_MS);
        let _ = timeout(limit, self.shared.endpoint.wait_idle()).await;
        // The endpoint lives until its last handle is dropped, but its port must be free now. It also keeps
        // the previous socket, hence twice.
        for _ in 0..2 {
            let unused = std::net::UdpSocket::bind((std::net::Ipv4Addr::LOCALHOST, 0));
            let _ = unused.and_then(|socket| self.shared.endpoint.rebind(socket));
        }
        self.shared.events.end();
    }
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Links({})", self.shared.me)
    }
}

fn forget_peer(state: &mut State, peer: PeerId) {
    if let Some(dial) = state.dials.remove(&DialKey::Peer(peer)) {
        dial.task.abort();
    }
}

fn covered_by_target(state: &State, peer: Option<PeerId>) -> bool {
    let is_target = |key: &DialKey| matches!(key, DialKey::Target(_));
    peer.is_some_and(|peer| {
        let serves = |dial: &Dial| dial.is_for(peer) || dial.peer == Some(peer);
        state.dials.iter().any(|(key, dial)| is_target(key) && serves(dial))
    })
}

fn hello_bytes(hello: &serde_json::Value) -> Result<Vec<u8>, LinkError> {
    let bytes = hello.to_string().into_bytes();
    if bytes.len() > HELLO_MAX_BYTES {
        return Err(LinkError::HelloLength);
    }
    Ok(bytes)
}

fn cut(mut nickname: String) -> String {
    let mut len = nickname.len().min(NICKNAME_MAX_BYTES);
    while !nickname.is_char_boundary(len) {
        len -= 1;
    }
    nickname.truncate(len);
    nickname
}
