//! What `weft openvpn serve` asks for: checked and kept.

use serde::{Deserialize, Serialize};
use weft_api::{
    ApiError, ErrorKind, Listen, LoginSettings, Rate, ServeEngine, ServeRequest, ToolSettings,
};

use super::{Gateway, login, places, push};

/// The file of what `weft openvpn serve` asked for.
pub(super) const FILE: &str = "openvpn.json";
/// Addresses to listen on, and places in profiles.
const LISTEN_MAX: usize = 16;
/// The longest ping interval, in seconds.
pub(super) const PING_MAX_S: u32 = 3_600;
/// The defaults of OpenVPN's manual: `keepalive 10 60`.
pub(super) const PING_S: u32 = 10;
pub(super) const PING_RESTART_S: u32 = 60;

/// What `weft openvpn serve` asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wanted {
    pub(super) listen: Vec<Listen>,
    pub(super) network: String,
    pub(super) remotes: Vec<String>,
    pub(super) ping_s: u32,
    pub(super) ping_restart_s: u32,
    /// What moves clients' packets. Files of earlier versions do not say.
    #[serde(default)]
    pub(super) engine: ServeEngine,
    #[serde(default)]
    pub(super) login: LoginSettings,
    /// All that clients send goes through this host.
    #[serde(default)]
    pub(super) redirect_gateway: bool,
    /// The most that comes from each address of a client.
    #[serde(default)]
    pub(super) client_up: Option<Rate>,
    /// The most that goes to each address of a client.
    #[serde(default)]
    pub(super) client_down: Option<Rate>,
    /// Options that all clients are pushed.
    #[serde(default)]
    pub(super) pushes: Vec<String>,
    /// What programs of other projects watch the gateway by.
    #[serde(default)]
    pub(super) tools: ToolSettings,
    /// The configuration of an OpenVPN server that is served by.
    #[serde(default)]
    pub(super) import: Option<u64>,
}

impl Gateway {
    /// The wish of a request, once it is found to be possible.
    pub(super) async fn checked(&self, request: ServeRequest) -> Result<Wanted, ApiError> {
        let bad = |text: String| Err(ApiError::new(ErrorKind::BadRequest, text));
        let import = self.imported()?;
        let request = match &import {
            Some(import) => import.fill(request),
            None => request,
        };
        let ServeRequest {
            listen,
            network,
            remotes,
            ping_s,
            ping_restart_s,
            engine,
            login,
            redirect_gateway,
            client_up,
            client_down,
            pushes,
            tools,
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
        let tools = self.checked_tools(tools)?;
        let network = self.networks.join(network.as_deref()).await?;
        let needs_certificate = import.as_ref().is_some_and(|it| !it.allows_passwords_alone());
        if needs_certificate && !login.auth.has_certificate() {
            return bad(
                "clients of a configuration that was taken over show certificates: --auth both"
                    .into(),
            );
        }
        let import = import.map(|import| import.id());
        let ping_restart_s = restart_s;
        let wanted = Wanted {
            listen,
            network: network.name.clone(),
            remotes,
            ping_s,
            ping_restart_s,
            engine,
            login,
            redirect_gateway,
            client_up,
            client_down,
            pushes,
            tools,
            import,
        };
        self.check_way_out(&wanted, &network)?;
        Ok(wanted)
    }

    /// Saves what is wanted, and has the service do it.
    pub(super) async fn set_wanted(&self, wanted: Option<Wanted>) -> Result<(), ApiError> {
        let (store, saved) = (self.store.clone(), wanted.clone());
        let saved = tokio::task::spawn_blocking(move || store.save(FILE, &saved)).await;
        let saved = saved.map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
        saved.map_err(|error| ApiError::new(ErrorKind::Unavailable, error))?;
        self.wanted.send_replace(wanted);
        Ok(())
    }

    pub(super) fn wanted_now(&self) -> Option<Wanted> {
        self.wanted.borrow().clone()
    }

    /// How clients show who they are now.
    pub(super) fn login_settings(&self) -> LoginSettings {
        self.wanted_now().map(|wanted| wanted.login).unwrap_or_default()
    }
}
