//! What the API asks of users: `weft openvpn user`, and profiles for all of them.

use std::sync::Arc;

use tokio::sync::oneshot;
use weft_api::{
    ApiError, ClientName, ErrorKind, LoginSettings, Password, SharedProfile, SharedRequest,
    TotpRequest, UserChanged, UserName, UserRequest, VpnUser,
};
use weft_openvpn::messages::Message;
use zeroize::Zeroizing;

use super::login::{Hashed, Standing, UserChange, UserError, Users, hash};
use super::peers::ToHome;
use super::serving::{Command, Whom};
use super::{Gateway, no_authority, profile, refusal};

impl Gateway {
    /// `weft openvpn user add`.
    pub(crate) async fn add_user(
        self: Arc<Self>,
        request: UserRequest,
    ) -> Result<UserChanged, ApiError> {
        let UserRequest { name, password, totp } = request;
        let hash = hashed(password).await?;
        self.change_user(UserChange::Add { name, hash, totp }).await
    }

    /// `weft openvpn user passwd`: the sessions begin anew, with the new password.
    pub(crate) async fn set_password(
        self: Arc<Self>,
        request: UserRequest,
    ) -> Result<UserChanged, ApiError> {
        let UserRequest { name, password, .. } = request;
        let hash = hashed(password).await?;
        self.change_user(UserChange::SetPassword { name, hash }).await
    }

    /// `weft openvpn user totp`: the sessions begin anew.
    pub(crate) async fn set_totp(
        self: Arc<Self>,
        request: TotpRequest,
    ) -> Result<UserChanged, ApiError> {
        let TotpRequest { name, off } = request;
        self.change_user(UserChange::SetTotp { name, off }).await
    }

    /// `weft openvpn user rm`: the sessions end at once, for good.
    pub(crate) async fn remove_user(
        self: Arc<Self>,
        request: UserName,
    ) -> Result<UserChanged, ApiError> {
        self.change_user(UserChange::Remove { name: request.name }).await
    }

    /// Changes the users, at the authority's home. Other gateways are told at once.
    pub(super) async fn change_user(
        self: Arc<Self>,
        change: UserChange,
    ) -> Result<UserChanged, ApiError> {
        let name = change.name().to_owned();
        let farewell = standing(&change).last_word();
        let one = self.changing.lock().await;
        // Another host may have become the home while this one waited.
        if self.is_replica() {
            drop(one);
            let was_here = farewell.is_some() && self.is_connected(&name).await;
            let changed: UserChanged = self.peers.ask_home(ToHome::User { change }).await?;
            let was_connected = changed.was_connected || was_here;
            return Ok(UserChanged { was_connected, ..changed });
        }
        let (secret, frees) = self.change_own_users(change).await?;
        let was_connected = match farewell {
            Some(farewell) => self.log_out(&name, farewell).await,
            None => false,
        };
        if frees {
            self.free_addresses(&name).await;
        }
        let otpauth = secret.map(|secret| self.logins.otpauth(&name, &secret).to_string());
        Ok(UserChanged { name, was_connected, otpauth })
    }

    /// `weft openvpn user ls`.
    pub(crate) fn users(&self) -> Vec<VpnUser> {
        self.logins.users()
    }

    /// `weft openvpn client --shared`. `host` is what other hosts reach this one by.
    pub(crate) async fn shared_profile(
        self: Arc<Self>,
        request: SharedRequest,
    ) -> Result<SharedProfile, ApiError> {
        let _one = self.changing.lock().await;
        if self.login_settings().auth.has_certificate() {
            let text = "each client needs a certificate here: weft openvpn client NAME, or weft openvpn serve --auth password";
            return Err(ApiError::new(ErrorKind::Conflict, text));
        }
        if let Some(import) = self.imported()? {
            let profile = import.shared_profile(&self.places("").await?, request.totp);
            let profile = profile.map_err(|error| ApiError::new(ErrorKind::Conflict, error))?;
            return Ok(SharedProfile { profile: profile.to_string() });
        }
        let remotes = self.places("").await?;
        let authority = self.authority_now().ok_or_else(no_authority)?;
        let shared = authority.shared().map_err(refusal)?;
        let profile = profile::shared(&shared, &remotes, request.totp);
        let profile = profile.map_err(|error| ApiError::new(ErrorKind::Conflict, error))?;
        Ok(SharedProfile { profile: profile.to_string() })
    }

    /// Changes the users of this host. Returns the secret of codes, if there is a new one, and whether addresses are to
    /// become free.
    async fn change_own_users(
        self: &Arc<Self>,
        change: UserChange,
    ) -> Result<(Option<Zeroizing<String>>, bool), ApiError> {
        let is_client = self.wanted_now().is_none_or(|wanted| {
            let LoginSettings { auth, client_name, .. } = wanted.request.login;
            auth.has_password() && client_name != ClientName::Certificate
        });
        let removed = match &change {
            UserChange::Remove { name } => Some(name.clone()),
            _ => None,
        };
        let change = move |users: &mut Users| match change {
            UserChange::Add { name, hash, totp } => Ok((users.add(&name, hash, totp)?, false)),
            UserChange::SetPassword { name, hash } => {
                users.set_password(&name, hash)?;
                Ok((None, false))
            }
            UserChange::SetTotp { name, off } => Ok((users.set_totp(&name, off)?, false)),
            UserChange::Remove { name } => Ok((None, users.remove(&name, is_client)?)),
        };
        let changed = self.logins.change(change).await.map_err(fault)?;
        removed.iter().for_each(|name| self.logins.forget(name));
        let gateway = Arc::clone(self);
        let told = tokio::task::spawn_blocking(move || gateway.authority_changed()).await;
        told.map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
        Ok(changed)
    }

    async fn is_connected(&self, user: &str) -> bool {
        let clients = self.clients().await;
        clients.iter().any(|client| client.user.as_deref() == Some(user))
    }

    async fn log_out(&self, user: &str, farewell: Message) -> bool {
        let whom = Whom::User(user.to_owned());
        let end = |reply: oneshot::Sender<bool>| Command::End { whom, farewell, reply };
        self.ask(end).await.unwrap_or_default()
    }
}

/// The hash of a password, made on a thread of its own.
async fn hashed(password: Password) -> Result<Hashed, ApiError> {
    let hashed = tokio::task::spawn_blocking(move || hash(password.expose())).await;
    hashed.map_err(UserError::from).and_then(|hashed| hashed).map_err(fault)
}

/// How sessions of before stand after a change of their user.
const fn standing(change: &UserChange) -> Standing {
    match change {
        UserChange::Add { .. } => Standing::Current,
        UserChange::SetPassword { .. } | UserChange::SetTotp { .. } => Standing::Changed,
        UserChange::Remove { .. } => Standing::Removed,
    }
}

fn fault(error: UserError) -> ApiError {
    let kind = match &error {
        UserError::BadName(_) | UserError::BadPassword(_) => ErrorKind::BadRequest,
        UserError::Unknown(_) => ErrorKind::NotFound,
        UserError::Exists(_) | UserError::Full => ErrorKind::Conflict,
        UserError::Save(_) => ErrorKind::Unavailable,
        UserError::Hash(_) | UserError::Failed(_) => ErrorKind::Internal,
    };
    ApiError::new(kind, error)
}
