//! What `weft openvpn serve` asks for: checked and kept.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use weft_api::{ApiError, ErrorKind, LoginSettings, OidcSettings, ServeRequest};

use super::login::{Oidc, provider_port};
use super::{Gateway, login, places, push};
use crate::config::Settings;
use crate::devices::NETWORK;

/// The file of what `weft openvpn serve` asked for.
pub(super) const FILE: &str = "openvpn.json";
/// Addresses to listen on, and places in profiles.
const LISTEN_MAX: usize = 16;
/// The longest ping interval, in seconds.
pub(super) const PING_MAX_S: u32 = 3_600;
/// The defaults of OpenVPN's manual: `keepalive 10 60`.
pub(super) const PING_S: u32 = 10;
pub(super) const PING_RESTART_S: u32 = 60;

/// What `weft openvpn serve` asked for. As JSON it is one object: the request's members, and `import`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wanted {
    /// With the network and the times where they were left open.
    #[serde(flatten)]
    pub(super) request: ServeRequest,
    /// The configuration of an OpenVPN server that is served by.
    #[serde(default)]
    pub(super) import: Option<u64>,
    /// The program that judges passwords, if it was named on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) program: Option<PathBuf>,
    /// The configuration file asked for it, so it ends with its section there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_by_file: bool,
}

impl Wanted {
    pub(super) fn network(&self) -> &str {
        self.request.network.as_deref().unwrap_or(NETWORK)
    }

    pub(super) fn ping_s(&self) -> u32 {
        self.request.ping_s.unwrap_or(PING_S)
    }

    pub(super) fn ping_restart_s(&self) -> u32 {
        self.request.ping_restart_s.unwrap_or(PING_RESTART_S)
    }
}

/// The port of the identity provider that the daemon is to ask, if there is one: it may connect there.
pub(crate) fn provider_port_of(settings: &Settings) -> Option<u16> {
    let kept = || {
        let text = std::fs::read(settings.state_dir.join(FILE)).ok()?;
        let wanted: Option<Wanted> = serde_json::from_slice(&text).ok()?;
        Some(wanted?.request)
    };
    let request = settings.openvpn.clone().or_else(kept)?;
    provider_port(&request.login.oidc?.issuer)
}

impl Gateway {
    /// The wish of a request, once it is found to be possible.
    pub(super) async fn checked(&self, request: ServeRequest) -> Result<Wanted, ApiError> {
        let bad = |text: String| Err(ApiError::new(ErrorKind::BadRequest, text));
        let import = self.imported()?;
        let program = request.login.program.clone();
        let request = match &import {
            Some(import) => import.fill(request),
            None => request,
        };
        let id = import.as_ref().map(|import| import.id());
        let mut wanted = Wanted { request, import: id, program, is_by_file: false };
        if let Some(why) = self.program_fault(&wanted) {
            return Err(ApiError::new(ErrorKind::Conflict, why));
        }
        let request = &mut wanted.request;
        request.ping_s.get_or_insert(PING_S);
        request.ping_restart_s.get_or_insert(PING_RESTART_S);
        if let Some(fault) = fault(request) {
            return bad(fault);
        }
        request.tools = self.checked_tools(request.tools.clone())?;
        let network = self.networks.join(request.network.as_deref()).await?;
        request.network = Some(network.name.clone());
        let needs_certificate = import.as_ref().is_some_and(|it| !it.allows_passwords_alone());
        if needs_certificate && !request.login.auth.has_certificate() {
            return bad(
                "clients of a configuration that was taken over show certificates: --auth both"
                    .into(),
            );
        }
        self.check_way_out(&wanted, &network)?;
        Ok(wanted)
    }

    /// Asks an identity provider whether it is one. A daemon that may not connect there keeps the wish: the next one may.
    pub(super) async fn check_provider(
        &self,
        provider: &OidcSettings,
        wanted: &Wanted,
    ) -> Result<(), ApiError> {
        let Err(error) = Oidc::probe(provider).await else { return Ok(()) };
        let is_forbidden = error.is_forbidden();
        if is_forbidden {
            self.set_wanted(Some(wanted.clone())).await?;
        }
        let kind = if is_forbidden { ErrorKind::Conflict } else { ErrorKind::BadRequest };
        Err(ApiError::new(kind, error))
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
        self.wanted_now().map(|wanted| wanted.request.login).unwrap_or_default()
    }
}

/// The fault of a request by itself, if it has one.
fn fault(request: &ServeRequest) -> Option<String> {
    let ServeRequest { listen, remotes, .. } = request;
    if listen.len() > LISTEN_MAX || remotes.len() > LISTEN_MAX {
        return Some(format!("at most {LISTEN_MAX} addresses to listen on, and as many places"));
    }
    if let Some(place) = remotes.iter().find(|place| !places::is_place(place)) {
        return Some(format!(
            "{place:?} is no place for profiles: give HOST or HOST:PORT, with udp: or tcp: before it"
        ));
    }
    if let Err(text) = push::check(&request.pushes) {
        return Some(text);
    }
    let ping_s = request.ping_s.unwrap_or(PING_S);
    let restart_s = request.ping_restart_s.unwrap_or(PING_RESTART_S);
    if ping_s == 0 || restart_s <= ping_s || restart_s > PING_MAX_S {
        return Some(format!(
            "ping {ping_s} and ping-restart {restart_s} do not fit: 0 < ping < ping-restart <= {PING_MAX_S} seconds"
        ));
    }
    login::fault(&request.login)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_api::{Auth, ServeEngine};

    use super::*;

    /// Files of the first version, and of a later one.
    #[test]
    fn files_of_earlier_versions_are_read() {
        let first = r#"{
            "listen": ["0.0.0.0:1194"],
            "network": "red", "remotes": ["vpn.example.net"], "ping_s": 1, "ping_restart_s": 4
        }"#;
        let wanted: Wanted = serde_json::from_str(first).unwrap();
        assert_eq!((wanted.network(), wanted.ping_s(), wanted.ping_restart_s()), ("red", 1, 4));
        assert_eq!(wanted.request.remotes, ["vpn.example.net"]);
        assert_eq!((wanted.request.listen[0].port, wanted.import), (1194, None));
        assert_eq!(wanted.request.engine, ServeEngine::Auto);
        let later = r#"{
            "listen": [], "network": "openvpn", "remotes": [], "ping_s": 10, "ping_restart_s": 60,
            "engine": "userspace", "login": {"auth": "both"}, "redirect_gateway": true,
            "client_up": 20000000, "client_down": null, "pushes": ["inactive 60"],
            "tools": {}, "import": 18446744073709551615
        }"#;
        let wanted: Wanted = serde_json::from_str(later).unwrap();
        let request = &wanted.request;
        assert_eq!((request.engine, request.login.auth), (ServeEngine::Userspace, Auth::Both));
        assert_eq!(request.client_up.map(weft_api::Rate::bits), Some(20_000_000));
        assert_eq!(
            (&request.pushes[..], wanted.import),
            (&["inactive 60".into()][..], Some(u64::MAX))
        );
    }

    /// As earlier versions read it: no member is inside of another, and none is missing.
    #[test]
    fn a_file_is_read_as_it_was_written() {
        let request = ServeRequest {
            network: Some("red".into()),
            ping_s: Some(1),
            ping_restart_s: Some(4),
            pushes: vec!["inactive 60".into()],
            ..ServeRequest::default()
        };
        let program = Some("/etc/judge".into());
        let wanted = Wanted { request, import: Some(u64::MAX), program, is_by_file: true };
        let text = serde_json::to_string(&wanted).unwrap();
        assert_eq!(serde_json::from_str::<Wanted>(&text).unwrap(), wanted);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&json["network"], &json["ping_s"]), (&"red".into(), &1.into()));
        assert_eq!((&json["ping_restart_s"], &json["import"]), (&4.into(), &u64::MAX.into()));
        assert_eq!(json["program"], "/etc/judge");
    }
}
