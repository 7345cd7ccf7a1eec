//! The OpenVPN gateway: stock clients join a network of this host.
//!
//! A client has an address of the network's range, which the mesh keeps for its name. The host routes the address to
//! the data channel device, and answers for it on the network by its own interface (`weft expose`): so containers on
//! all hosts reach clients as they reach the host itself.

mod authority;
mod client;
mod device;
mod import;
mod login;
mod named;
mod peers;
mod places;
mod profile;
mod push;
mod serving;
mod sockets;
mod streams;
mod users;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use weft_api::{
    ApiError, Attachment, ClientProfile, ErrorKind, ExposeRequest, Listen, LoginSettings, Revoked,
    ServeEngine, ServeRequest, VpnClient,
};
use weft_crypto::DataCipher;
use weft_engine::dco::Event;
use weft_kernel::{CLIENTS_DEVICE, ClientRules, ClientWays, ClientsSpec, Kernel, KernelError};
use weft_openvpn::gate::{Gate, GateConfig};
use weft_openvpn::key_method::LinkOptions;
use weft_openvpn::messages::Message;
use weft_openvpn::negotiation::ServerPolicy;
use weft_openvpn::session::{ServerOptions, Timing};

use self::authority::{Authority, AuthorityError, Holder};
use self::device::{DataChannel, MTU};
use self::import::Import;
use self::login::Logins;
use self::named::Named;
pub(crate) use self::named::keep_names;
pub(crate) use self::peers::{Peers, keep as keep_peers};
use self::peers::{REPLICA_FILE, ToHome};
use self::places::Remote;
use self::push::Inside;
use self::serving::{Begun, Command, Inputs, Serving, Whom};
use self::sockets::Sockets;
use self::streams::Streams;
use super::attach::{Attachments, CLIENT_OWNER};
use super::names::announced::Announcer;
use super::networks::Networks;
use super::supervisor::Pulse;
use crate::core::control::Request;
use crate::core::turns::Turns;
use crate::devices::{NETWORK, exposed_on};
use crate::upkeep::store::{Store, StoreError};

/// The file of what `weft openvpn serve` asked for.
const FILE: &str = "openvpn.json";
/// The file of the authority. It holds its private key.
const AUTHORITY_FILE: &str = "openvpn-authority.json";
/// Addresses to listen on, and places in profiles.
const LISTEN_MAX: usize = 16;
/// The longest ping interval, in seconds.
const PING_MAX_S: u32 = 3_600;
/// The defaults of OpenVPN's manual: `keepalive 10 60`.
const PING_S: u32 = 10;
const PING_RESTART_S: u32 = 60;
/// How long a request waits until the gateway serves, or has ended.
const BEGIN_LIMIT: Duration = Duration::from_secs(20);
/// How long a daemon that ends waits for that.
const END_LIMIT: Duration = Duration::from_secs(2);
/// The pause before the gateway is tried again after a failure.
const RETRY: Duration = Duration::from_secs(5);
/// Requests that wait for the task.
const COMMANDS_MAX: usize = 64;

/// What `weft openvpn serve` asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Wanted {
    listen: Vec<Listen>,
    network: String,
    remotes: Vec<String>,
    ping_s: u32,
    ping_restart_s: u32,
    /// What moves clients' packets. Files of earlier versions do not say.
    #[serde(default)]
    engine: ServeEngine,
    #[serde(default)]
    login: LoginSettings,
    /// Options that all clients are pushed.
    #[serde(default)]
    pushes: Vec<String>,
    /// The configuration of an OpenVPN server that is served by.
    #[serde(default)]
    import: Option<u64>,
}

/// What the gateway does now.
#[derive(Clone, Default)]
enum State {
    #[default]
    Off,
    /// It is to serve, and cannot yet.
    Waiting {
        wanted: Wanted,
        reason: Option<String>,
    },
    Serving {
        wanted: Wanted,
        shown: Box<weft_api::Gateway>,
        commands: mpsc::Sender<Command>,
    },
}

/// The gateway, which outlives restarts of its service.
pub(crate) struct Gateway {
    store: Store,
    kernel: Kernel,
    attachments: Arc<Attachments>,
    networks: Arc<Networks>,
    /// This host's name for people.
    nickname: String,
    /// The domain of containers' names.
    domain: String,
    wanted: watch::Sender<Option<Wanted>>,
    state: watch::Sender<State>,
    /// What DNS is to know, and who tells it.
    named: watch::Sender<Named>,
    announcer: Announcer,
    authority: Mutex<Option<Authority>>,
    /// Users, and who tries to log in.
    logins: Arc<Logins>,
    /// The gateways of other hosts.
    peers: Peers,
    /// The configuration of an OpenVPN server, which comes before the authority.
    import: Mutex<Import>,
    rules: tokio::sync::Mutex<ClientRules>,
    turns: Turns,
    /// Held during a change, which waits for the disk.
    changing: tokio::sync::Mutex<()>,
}

/// The owner of a client's addresses on a network. No name has a slash.
fn owner_of(network: &str, name: &str) -> String {
    let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let written = |byte: u8| match is_fit(byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    let name: String = name.bytes().map(written).collect();
    match network {
        NETWORK => format!("{CLIENT_OWNER}{name}"),
        network => format!("{CLIENT_OWNER}{network}/{name}"),
    }
}

impl Gateway {
    /// Prepares the gateway, which serves if it did before.
    ///
    /// # Errors
    /// A file of an earlier run cannot be read.
    pub(crate) fn new(
        store: Store,
        kernel: Kernel,
        (attachments, networks): (Arc<Attachments>, Arc<Networks>),
        (nickname, domain, announcer): (String, String, Announcer),
        runtime_dir: &Path,
        peers: Peers,
    ) -> Result<Self, StoreError> {
        let wanted: Option<Option<Wanted>> = store.load(FILE)?;
        let authority = match store.load(AUTHORITY_FILE)? {
            Some(own) => Some(own),
            None => store.load(REPLICA_FILE)?,
        };
        let import = import::restored(store.load(import::FILE)?);
        let rules = ClientRules::new(kernel.clone());
        let logins = Logins::new(store.clone(), runtime_dir, &nickname)?;
        Ok(Self {
            store,
            kernel,
            attachments,
            networks,
            nickname,
            domain,
            wanted: watch::Sender::new(wanted.flatten()),
            state: watch::Sender::default(),
            named: watch::Sender::default(),
            announcer,
            authority: Mutex::new(authority),
            logins: Arc::new(logins),
            peers,
            import: Mutex::new(import),
            rules: tokio::sync::Mutex::new(rules),
            turns: Turns::default(),
            changing: tokio::sync::Mutex::default(),
        })
    }

    /// `weft ca init`: makes the authority, or shows the one that there is.
    pub(crate) async fn init_authority(self: Arc<Self>) -> Result<weft_api::Authority, ApiError> {
        let _one = self.changing.lock().await;
        if let Some(import) = self.imported()? {
            return import.shown().map_err(|why| ApiError::new(ErrorKind::Conflict, why));
        }
        if let Some(known) = self.authority_now() {
            let home = self.shown_home().filter(|home| !home.is_here).map(|home| home.name);
            return Ok(weft_api::Authority { home, ..known.shown().map_err(refusal)? });
        }
        let nickname = self.nickname.clone();
        self.change_authority(move |_| {
            let new = Authority::new(&nickname).map_err(refusal)?;
            let shown = new.shown().map_err(refusal)?;
            Ok((new, shown))
        })
        .await
    }

    /// `weft openvpn client`: issues a certificate, at the authority's home.
    pub(crate) async fn issue(self: Arc<Self>, name: String) -> Result<ClientProfile, ApiError> {
        if self.is_replica() {
            return self.peers.ask_home(ToHome::Issue { name }).await;
        }
        let _one = self.changing.lock().await;
        let import = self.imported()?;
        let remotes = match import {
            // Other gateways serve by another authority.
            Some(_) => self.own_remotes().await?,
            None => self.places(&name).await?,
        };
        let asks = profile::Asks {
            password: self.login_settings().auth.has_password(),
            code: self.logins.has_codes(&name),
        };
        if let Some(import) = import {
            return self.issue_imported(import, name, remotes, asks.password).await;
        }
        self.change_authority(move |known| {
            let mut after = known.ok_or_else(no_authority)?;
            let credentials = after.issue(&name).map_err(refusal)?;
            let profile = profile::profile(&name, &credentials, &remotes, asks);
            let profile = profile.map_err(|error| ApiError::new(ErrorKind::Conflict, error))?;
            let profile = ClientProfile {
                name,
                serial: credentials.serial,
                not_after: credentials.not_after,
                profile: profile.to_string(),
            };
            Ok((after, profile))
        })
        .await
    }

    /// `weft openvpn revoke`: revokes all certificates of a client, ends its session and frees its addresses.
    pub(crate) async fn revoke(self: Arc<Self>, name: String) -> Result<Revoked, ApiError> {
        if self.is_replica() {
            return self.peers.ask_home(ToHome::Revoke { name }).await;
        }
        let _one = self.changing.lock().await;
        let serials = match self.imported()? {
            Some(import) => self.revoke_imported(&import, &name).await?,
            None => {
                let of = name.clone();
                let revoke = move |known: Option<Authority>| {
                    let mut after = known.ok_or_else(no_authority)?;
                    let serials = after.revoke(&of).map_err(refusal)?;
                    Ok((after, serials))
                };
                self.change_authority(revoke).await?
            }
        };
        let (whom, farewell) =
            (Whom::Certificate(name.clone()), Message::Halt("certificate revoked".into()));
        let ended = self.ask(|reply| Command::End { whom, farewell, reply }).await;
        self.free_addresses(&name).await;
        Ok(Revoked { name, serials, was_connected: ended.unwrap_or_default() })
    }

    /// `weft openvpn serve`: serves, or serves otherwise than before; entirely or not at all.
    pub(crate) async fn serve(
        self: Arc<Self>,
        request: ServeRequest,
    ) -> Result<weft_api::Gateway, ApiError> {
        let _one = self.changing.lock().await;
        let wanted = self.checked(request).await?;
        if wanted.import.is_none() && self.authority_now().is_none() {
            self.fetch_authority().await?;
        }
        let before = self.wanted_now();
        self.set_wanted(Some(wanted.clone())).await?;
        match self.begun(&wanted).await {
            Ok(shown) => Ok(shown),
            Err(error) => {
                self.set_wanted(before).await?;
                Err(error)
            }
        }
    }

    /// `weft openvpn stop`: clients are told to connect elsewhere; nothing of the gateway is left on this host but its
    /// authority, and the addresses of its clients in the mesh.
    pub(crate) async fn stop(self: Arc<Self>) -> Result<weft_api::Gateway, ApiError> {
        let _one = self.changing.lock().await;
        self.set_wanted(None).await?;
        let mut state = self.state.subscribe();
        let ended = state.wait_for(|state| matches!(state, State::Off));
        let ended = tokio::time::timeout(BEGIN_LIMIT, ended).await;
        ended.map_err(|_| late("the gateway has not ended yet; weft status shows it"))?.ok();
        Ok(weft_api::Gateway { state: "off".into(), ..weft_api::Gateway::default() })
    }

    /// The daemon ends: clients are told to connect again, for a moment. The next daemon serves as this one did.
    pub(crate) async fn end(&self) {
        self.peers.close();
        self.wanted.send_replace(None);
        let mut state = self.state.subscribe();
        let ended = state.wait_for(|state| matches!(state, State::Off));
        if tokio::time::timeout(END_LIMIT, ended).await.is_err() {
            tracing::warn!("OpenVPN clients may not know yet that weft has stopped");
        }
    }

    /// `weft status clients`.
    pub(crate) async fn clients(&self) -> Vec<VpnClient> {
        self.ask(|reply| Command::List { reply }).await.unwrap_or_default()
    }

    /// The turns of the task that serves.
    pub(crate) const fn turns(&self) -> &Turns {
        &self.turns
    }

    /// The gateway for `weft status`; `None`: this host is not to serve.
    pub(crate) async fn status(&self) -> Option<weft_api::Gateway> {
        let state = self.state.borrow().clone();
        match state {
            State::Off => {
                let wanted = self.wanted_now()?;
                Some(self.with_others(waiting(&wanted, None)))
            }
            State::Waiting { wanted, reason } => Some(self.with_others(waiting(&wanted, reason))),
            State::Serving { mut shown, .. } => {
                shown.reason = self.imported_now().and_then(|import| import.fault());
                if let Some(look) = self.ask(|reply| Command::Look { reply }).await {
                    (shown.drops, shown.clients, shown.sessions) =
                        (look.drops, look.connected, look.sessions);
                }
                Some(self.with_others(*shown))
            }
        }
    }

    /// A client of this name comes no more: others may have its addresses.
    async fn free_addresses(&self, name: &str) {
        for network in self.networks_served() {
            let owner = owner_of(&network, name);
            self.attachments.tell(Request::Release { owner }).await;
        }
    }

    /// Asks the task that serves; `None`: none does.
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let commands = match &*self.state.borrow() {
            State::Serving { commands, .. } => commands.clone(),
            State::Off | State::Waiting { .. } => return None,
        };
        let (reply, answer) = oneshot::channel();
        commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Tells the task that serves something, if there is one.
    async fn tell(&self, command: Command) {
        let commands = match &*self.state.borrow() {
            State::Serving { commands, .. } => commands.clone(),
            State::Off | State::Waiting { .. } => return,
        };
        let _ = commands.send(command).await;
    }

    /// Sets the host up for these clients. They go nowhere but to their network and where `ways` says from the first
    /// packet on. The rules for that are made by programs that take as long as hundreds of clients; `None`: they are
    /// not looked after now.
    async fn route(
        &self,
        spec: &ClientsSpec,
        ways: Option<&ClientWays>,
    ) -> Result<Vec<IpNet>, KernelError> {
        if let Some(ways) = ways {
            self.rules.lock().await.set(CLIENTS_DEVICE, &spec.exposed, ways).await?;
        }
        self.kernel.ensure_clients(spec).await
    }

    /// Whether a certificate is revoked.
    fn is_revoked(&self, holder: &Holder) -> bool {
        if let Some(import) = self.imported_now() {
            return import.is_revoked(holder);
        }
        let authority = self.authority.lock().unwrap_or_else(PoisonError::into_inner);
        authority.as_ref().is_none_or(|authority| authority.is_revoked(&holder.serial))
    }

    fn authority_now(&self) -> Option<Authority> {
        self.authority.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether another host is the home of the authority that this one has.
    fn is_replica(&self) -> bool {
        self.authority_now().is_some_and(|authority| !authority.is_home())
    }

    fn wanted_now(&self) -> Option<Wanted> {
        self.wanted.borrow().clone()
    }

    /// How clients show who they are now.
    fn login_settings(&self) -> LoginSettings {
        self.wanted_now().map(|wanted| wanted.login).unwrap_or_default()
    }

    /// Networks on which clients may have addresses of this host's.
    fn networks_served(&self) -> Vec<String> {
        let held = self.networks.held();
        let others = held.borrow().iter().map(|held| held.definition.name.clone()).collect();
        [vec![NETWORK.to_owned()], others].concat()
    }

    /// The servers that profiles name.
    fn remotes(&self, host: Option<String>) -> Result<Vec<Remote>, ApiError> {
        let wanted = self.wanted_now();
        let listen = wanted.as_ref().map_or(&[][..], |wanted| &wanted.listen);
        if let Some(Wanted { remotes, .. }) = &wanted
            && !remotes.is_empty()
        {
            return Ok(places::remotes(remotes, listen));
        }
        let text = "cannot tell by which address clients reach this host: weft openvpn serve --remote HOST[:PORT]";
        let host = host.ok_or_else(|| ApiError::new(ErrorKind::Conflict, text))?;
        Ok(places::remotes(&[host], listen))
    }

    /// Changes the authority on a thread that the disk may hold up. It is saved before it counts.
    async fn change_authority<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(Option<Authority>) -> Result<(Authority, T), ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let gateway = Arc::clone(self);
        let changed = tokio::task::spawn_blocking(move || {
            let (after, told) = change(gateway.authority_now())?;
            let saved = gateway.store.save(AUTHORITY_FILE, &after);
            saved.map_err(|error| ApiError::new(ErrorKind::Unavailable, error))?;
            *gateway.authority.lock().unwrap_or_else(PoisonError::into_inner) = Some(after);
            gateway.authority_changed();
            Ok(told)
        });
        changed.await.map_err(|error| ApiError::new(ErrorKind::Internal, error))?
    }

    /// Saves what is wanted, and has the service do it.
    async fn set_wanted(&self, wanted: Option<Wanted>) -> Result<(), ApiError> {
        let (store, saved) = (self.store.clone(), wanted.clone());
        let saved = tokio::task::spawn_blocking(move || store.save(FILE, &saved)).await;
        let saved = saved.map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
        saved.map_err(|error| ApiError::new(ErrorKind::Unavailable, error))?;
        self.wanted.send_replace(wanted);
        Ok(())
    }

    /// The wish of a request, once it is found to be possible.
    async fn checked(&self, request: ServeRequest) -> Result<Wanted, ApiError> {
        let bad = |text: String| Err(ApiError::new(ErrorKind::BadRequest, text));
        let import = self.imported()?;
        let request = import.as_ref().map_or(request.clone(), |import| import.fill(request));
        let ServeRequest {
            listen,
            network,
            remotes,
            ping_s,
            ping_restart_s,
            engine,
            login,
            pushes,
        } = request;
        if listen.len() > LISTEN_MAX || remotes.len() > LISTEN_MAX {
            return bad(format!("at most {LISTEN_MAX} addresses to listen on, and as many places"));
        }
        if let Some(place) = remotes.iter().find(|place| !places::is_place(place)) {
            return bad(format!(
                "{place:?} is no place for profiles: give HOST or HOST:PORT, with udp: or tcp: before it"
            ));
        }
        if let Err(text) = push::check(&pushes) {
            return bad(text);
        }
        let (ping_s, restart_s) =
            (ping_s.unwrap_or(PING_S), ping_restart_s.unwrap_or(PING_RESTART_S));
        if ping_s == 0 || restart_s <= ping_s || restart_s > PING_MAX_S {
            return bad(format!(
                "ping {ping_s} and ping-restart {restart_s} do not fit: 0 < ping < ping-restart <= {PING_MAX_S} seconds"
            ));
        }
        if let Some(fault) = login::fault(&login) {
            return bad(fault);
        }
        let network = self.networks.join(network.as_deref()).await?.name;
        if import.is_some() && !login.auth.has_certificate() {
            return bad(
                "clients of a configuration that was taken over show certificates: --auth both"
                    .into(),
            );
        }
        let import = import.map(|import| import.id());
        let ping_restart_s = restart_s;
        Ok(Wanted {
            listen,
            network,
            remotes,
            ping_s,
            ping_restart_s,
            engine,
            login,
            pushes,
            import,
        })
    }

    /// Waits until the service serves so, or says why it cannot.
    async fn begun(&self, wanted: &Wanted) -> Result<weft_api::Gateway, ApiError> {
        let mut state = self.state.subscribe();
        let is_told = |state: &State| match state {
            State::Serving { wanted: now, .. } => now == wanted,
            State::Waiting { wanted: now, reason } => now == wanted && reason.is_some(),
            State::Off => false,
        };
        let told = tokio::time::timeout(BEGIN_LIMIT, state.wait_for(is_told)).await;
        let told =
            told.map_err(|_| late("the gateway does not serve yet; weft status says why"))?;
        match told.as_deref() {
            Ok(State::Serving { shown, .. }) => Ok(weft_api::Gateway::clone(shown)),
            Ok(State::Waiting { reason: Some(reason), .. }) => {
                Err(ApiError::new(ErrorKind::Conflict, reason))
            }
            _ => Err(late("weft is stopping; launch it again")),
        }
    }

    /// Makes all that is needed before the first packet.
    async fn begin(&self, wanted: &Wanted) -> Result<(Begun, mpsc::Receiver<Event>), ApiError> {
        let network = self.networks.join(Some(&wanted.network)).await?;
        let import = self.imported()?;
        let own = import.as_ref().and_then(|import| import.own(&network.name));
        let request = ExposeRequest {
            network: Some(network.name.clone()),
            addresses: self.own_addresses(network.vni, own).await,
            ..ExposeRequest::default()
        };
        let host: Attachment = self.attachments.expose(request).await?;
        let conflict = |error: String| ApiError::new(ErrorKind::Conflict, error);
        let (settings, logins) = (wanted.login.clone(), Arc::clone(&self.logins));
        // The disk may be slow.
        let prepared = tokio::task::spawn_blocking(move || logins.prepare(&settings)).await;
        prepared.map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
        let sockets = sockets::bind_all(&wanted.listen);
        let Sockets { udp, listeners } = sockets.map_err(|error| conflict(error.to_string()))?;
        let streams = Streams::new(listeners).map_err(|error| conflict(error.to_string()))?;
        let opened = DataChannel::open(wanted, udp, &self.kernel).await;
        let (channel, events) = opened.map_err(|error| conflict(error.to_string()))?;
        if let Some(reason) = channel.reason() {
            tracing::info!(reason, "the kernel does not move packets of OpenVPN clients");
        }
        let has_ipv6 = self.kernel.forwarding().is_ok_and(|forwarding| forwarding.ipv6);
        let own = host.addresses.clone();
        let ways = self.ways(&wanted.pushes, &own);
        let inside = Inside {
            own,
            domain: self.domain.clone(),
            ping_s: wanted.ping_s,
            ping_restart_s: wanted.ping_restart_s,
            pushes: wanted.pushes.clone(),
        };
        if inside.own(true).is_none() {
            return Err(conflict("this host has no IPv4 address on the network".into()));
        }
        let (config, options) = match &import {
            Some(import) => (import.gate(), import.options(&channel.ciphers()).map_err(conflict)?),
            None => self.own_options(wanted, channel.ciphers())?,
        };
        let threads_max = std::thread::available_parallelism().map_or(1, usize::from);
        let begun = Begun {
            streams,
            channel: Arc::new(channel),
            gate: Gate::new(Instant::now(), config, &rand::random()),
            options,
            exposed: exposed_on(network.vni),
            network,
            login: wanted.login.clone(),
            has_ipv6: has_ipv6 && inside.own(false).is_some(),
            inside,
            ways,
            threads_max,
        };
        Ok((begun, events))
    }

    /// How the gateway serves by this host's own authority.
    fn own_options(
        &self,
        wanted: &Wanted,
        ciphers: Vec<DataCipher>,
    ) -> Result<(GateConfig, ServerOptions), ApiError> {
        let authority = self.authority_now().ok_or_else(no_authority)?;
        let client_keys = Some(Arc::new(authority.wrapping_key().map_err(refusal)?));
        let tls = authority.tls(wanted.login.auth.has_certificate()).map_err(refusal)?;
        let config = GateConfig { wrap: None, client_keys, ..GateConfig::default() };
        let options = ServerOptions {
            tls,
            timing: Timing::default(),
            policy: ServerPolicy {
                ciphers,
                fallback: None,
                has_epochs: false,
                has_dynamic_tls_crypt: true,
            },
            has_exporter: true,
            link: LinkOptions {
                tun_mtu: MTU,
                is_tcp: false,
                cipher: None,
                auth_digest: "SHA1".into(),
                has_tls_auth: false,
                key_direction: None,
            },
        };
        Ok((config, options))
    }
}

/// Serves while that is wanted, for as long as it is polled.
pub(crate) async fn keep(gateway: Arc<Gateway>, pulse: Pulse) {
    let mut wanted = gateway.wanted.subscribe();
    let mut last = None;
    pulse.wait(gateway.attachments.wait_restored()).await;
    loop {
        let now = wanted.borrow_and_update().clone();
        tidy(&gateway, last.take()).await;
        let Some(now) = now else {
            gateway.state.send_replace(State::Off);
            if pulse.wait(wanted.changed()).await.is_err() {
                return pulse.wait(std::future::pending()).await;
            }
            continue;
        };
        let ended = serve_once(&gateway, &now, &mut wanted, &pulse).await;
        last = Some(now.network.clone());
        if let Err(error) = ended {
            tracing::warn!(reason = error.error, "the OpenVPN gateway does not serve");
            let reason = Some(error.error);
            gateway.state.send_replace(State::Waiting { wanted: now, reason });
            let _ = pulse.wait(tokio::time::timeout(RETRY, wanted.changed())).await;
        }
    }
}

async fn serve_once(
    gateway: &Arc<Gateway>,
    now: &Wanted,
    wanted: &mut watch::Receiver<Option<Wanted>>,
    pulse: &Pulse,
) -> Result<(), ApiError> {
    gateway.state.send_replace(State::Waiting { wanted: now.clone(), reason: None });
    let begin = tokio::time::timeout(BEGIN_LIMIT, gateway.begin(now));
    let (begun, events) = pulse.wait(begin).await.map_err(|_| {
        late("this host's interface on the network was not made in time; weft status says more")
    })??;
    let (sender, commands) = mpsc::channel(COMMANDS_MAX);
    let shown = weft_api::Gateway {
        state: "serving".into(),
        listen: begun.listens(),
        network: now.network.clone(),
        addresses: begun.inside.own.clone(),
        engine: begun.channel.engine().into(),
        engine_reason: begun.channel.reason().cloned(),
        auth: now.login.auth,
        ..weft_api::Gateway::default()
    };
    let mut serving = Serving::new(Arc::clone(gateway), begun);
    gateway.state.send_replace(State::Serving {
        wanted: now.clone(),
        shown: Box::new(shown),
        commands: sender,
    });
    let run = serving.run(Inputs { events, commands, wanted }, pulse);
    let ended = gateway.turns.watch(run).await;
    serving.farewell();
    ended.map_err(|error| ApiError::new(ErrorKind::Unavailable, error))
}

/// Ends what the gateway has set up on the host: on its interface on a network, or on that of network `weft`, where the
/// last daemon may have left it. Weft's own device has gone with its owner; the kernel's is removed here.
async fn tidy(gateway: &Gateway, network: Option<String>) {
    gateway.unname_all();
    device::remove_leftover(&gateway.kernel).await;
    let network = network.unwrap_or_else(|| NETWORK.to_owned());
    let Ok(network) = gateway.networks.join(Some(&network)).await else { return };
    if let Err(error) = gateway.kernel.forget_clients(&exposed_on(network.vni)).await {
        tracing::warn!(%error, "cannot remove what answered for OpenVPN clients");
    }
    if let Err(error) = gateway.rules.lock().await.remove().await {
        tracing::debug!(%error, "no rules for OpenVPN clients to remove");
    }
}

fn waiting(wanted: &Wanted, reason: Option<String>) -> weft_api::Gateway {
    weft_api::Gateway {
        state: "waiting".into(),
        reason: Some(reason.unwrap_or_else(|| "it begins".into())),
        listen: wanted.listen.clone(),
        network: wanted.network.clone(),
        auth: wanted.login.auth,
        ..weft_api::Gateway::default()
    }
}

fn no_authority() -> ApiError {
    let text = "there is no certificate authority on this host, nor on a host that it is linked with: run weft ca init first, on one host of the mesh";
    ApiError::new(ErrorKind::Conflict, text)
}

fn late(text: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, text)
}

fn refusal(error: AuthorityError) -> ApiError {
    let kind = match &error {
        AuthorityError::BadName(_) => ErrorKind::BadRequest,
        AuthorityError::Unknown(_) => ErrorKind::NotFound,
        AuthorityError::Full | AuthorityError::NotHere => ErrorKind::Conflict,
        AuthorityError::Make(_) | AuthorityError::Damaged(_) => ErrorKind::Internal,
    };
    ApiError::new(kind, error)
}
