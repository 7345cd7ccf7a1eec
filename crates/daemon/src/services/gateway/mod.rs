//! The OpenVPN gateway: stock clients join a network of this host.
//!
//! A client has an address of the network's range, which the mesh keeps for its name. The host routes the address to
//! the data channel device, and answers for it on the network by its own interface (`weft expose`): so containers on
//! all hosts reach clients as they reach the host itself.

mod authority;
mod begin;
mod certificates;
mod client;
mod device;
mod import;
mod journal;
mod keep;
mod login;
mod management;
mod moving;
mod named;
mod peers;
mod places;
mod profile;
mod push;
mod roster;
mod secret_file;
mod section;
mod serving;
mod sockets;
mod status_file;
mod streams;
mod tools;
mod users;
mod wanted;
mod way_out;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use weft_api::{ApiError, ErrorKind, ServeRequest, VpnClient};
use weft_kernel::{
    CLIENTS_DEVICE, ClientRules, ClientWays, ClientsSpec, Kernel, KernelError, LeftOut,
};

use self::authority::Authority;
use self::certificates::{AUTHORITY_FILE, no_authority, refusal};
use self::import::Import;
use self::journal::Journal;
pub(crate) use self::keep::keep;
use self::login::Logins;
#[cfg(feature = "faults")]
pub use self::management::gateway_management;
use self::named::Named;
pub(crate) use self::named::keep_names;
use self::peers::REPLICA_FILE;
#[cfg(feature = "faults")]
pub use self::peers::gateway_peers;
pub(crate) use self::peers::{Peers, keep as keep_peers};
use self::places::Remote;
use self::section::Section;
pub(crate) use self::section::keep_section;
use self::serving::Command;
pub(crate) use self::tools::prepare;
pub(crate) use self::wanted::provider_port_of;
use self::wanted::{FILE as WANTED_FILE, PING_MAX_S, PING_RESTART_S, PING_S, Wanted};
use super::attach::{Attachments, CLIENT_OWNER};
use super::names::announced::Announcer;
use super::networks::Networks;
use crate::config::Settings;
use crate::core::turns::Turns;
use crate::devices::NETWORK;
use crate::upkeep::store::{Store, StoreError};

/// How long a request waits until the gateway serves, or has ended.
const BEGIN_LIMIT: Duration = Duration::from_secs(20);
/// How long a daemon that ends waits for that.
const END_LIMIT: Duration = Duration::from_secs(2);

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
    /// What the configuration file asks for, until it is done.
    section: watch::Sender<Option<Section>>,
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
    /// What programs that watch are told.
    journal: Journal,
    /// Where the gateway's files for other programs are.
    folder: PathBuf,
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
    /// Prepares the gateway, which serves as the configuration file says, or else if it did before.
    ///
    /// # Errors
    /// A file of an earlier run cannot be read.
    pub(crate) fn new(
        store: Store,
        kernel: Kernel,
        (attachments, networks): (Arc<Attachments>, Arc<Networks>),
        (domain, announcer): (String, Announcer),
        settings: &Settings,
        peers: Peers,
    ) -> Result<Self, StoreError> {
        let (nickname, runtime_dir) = (settings.nickname.clone(), &settings.runtime_dir);
        let wanted = section::kept(&store, settings)?;
        let authority = match store.load(AUTHORITY_FILE)? {
            Some(own) => Some(own),
            None => store.load(REPLICA_FILE)?,
        };
        let import = import::restored(store.load(import::FILE)?);
        let rules = ClientRules::new(kernel.clone());
        let is_replica = match &import {
            Some(Ok(import)) => import.is_replica(),
            _ => authority.as_ref().is_some_and(|it: &Authority| !it.has_key()),
        };
        let logins = Logins::new(store.clone(), runtime_dir, &nickname, is_replica)?;
        Ok(Self {
            store,
            kernel,
            attachments,
            networks,
            nickname,
            domain,
            wanted: watch::Sender::new(wanted),
            section: watch::Sender::new(settings.openvpn.clone().map(Section::new)),
            state: watch::Sender::default(),
            named: watch::Sender::default(),
            announcer,
            authority: Mutex::new(authority),
            logins: Arc::new(logins),
            peers,
            import: Mutex::new(import),
            journal: Journal::default(),
            folder: tools::folder(runtime_dir),
            rules: tokio::sync::Mutex::new(rules),
            turns: Turns::default(),
            changing: tokio::sync::Mutex::default(),
        })
    }

    /// `weft openvpn serve`: serves, or serves otherwise than before; entirely or not at all.
    pub(crate) async fn serve(
        self: Arc<Self>,
        request: ServeRequest,
    ) -> Result<weft_api::Gateway, ApiError> {
        let _one = self.changing.lock().await;
        if self.imported()?.is_none() && self.authority_now().is_none() {
            // Before all else: what the request leaves open is as a configuration says.
            self.fetch_authority(request.network.clone()).await?;
        }
        let wanted = self.checked(request).await?;
        if let Some(provider) = &wanted.request.login.oidc {
            self.check_provider(provider, &wanted).await?;
        }
        let before = self.wanted_now();
        self.set_wanted(Some(wanted.clone())).await?;
        match self.begun(&wanted).await {
            Ok(shown) => {
                self.section.send_replace(None);
                Ok(shown)
            }
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
        self.section.send_replace(None);
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
                let wanted = self.wanted_now().or_else(|| self.wanted_by_file())?;
                Some(self.with_others(waiting(&wanted, self.section_fault())))
            }
            State::Waiting { wanted, reason } => {
                let reason = self.section_fault().or(reason);
                Some(self.with_others(waiting(&wanted, reason)))
            }
            State::Serving { wanted, mut shown, .. } => {
                let fault = self.imported_now().and_then(|import| import.fault());
                let fault = self.section_fault().or(fault);
                shown.reason = fault.or_else(|| self.way_out_fault(&wanted));
                if let Some(look) = self.ask(|reply| Command::Look { reply }).await {
                    (shown.drops, shown.clients, shown.sessions) =
                        (look.drops, look.connected, look.sessions);
                }
                Some(self.with_others(*shown))
            }
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
    ) -> Result<LeftOut, KernelError> {
        if let Some(ways) = ways {
            self.rules.lock().await.set(CLIENTS_DEVICE, &spec.exposed, ways).await?;
        }
        self.kernel.ensure_clients(spec).await
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
        let listen = wanted.as_ref().map_or(&[][..], |wanted| &wanted.request.listen);
        let remotes = wanted.as_ref().map_or(&[][..], |wanted| &wanted.request.remotes);
        if !remotes.is_empty() {
            return Ok(places::remotes(remotes, listen));
        }
        let text = "cannot tell by which address clients reach this host: weft openvpn serve --remote HOST[:PORT]";
        let host = host.ok_or_else(|| ApiError::new(ErrorKind::Conflict, text))?;
        Ok(places::remotes(&[host], listen))
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
}

fn waiting(wanted: &Wanted, reason: Option<String>) -> weft_api::Gateway {
    weft_api::Gateway {
        state: "waiting".into(),
        reason: Some(reason.unwrap_or_else(|| "it begins".into())),
        listen: wanted.request.listen.clone(),
        network: wanted.network().to_owned(),
        auth: wanted.request.login.auth,
        ..weft_api::Gateway::default()
    }
}

fn late(text: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, text)
}
