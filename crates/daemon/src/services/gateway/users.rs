//! What the API asks of users: `weft openvpn user`, and profiles for all of them.

use std::sync::Arc;

use tokio::sync::oneshot;
use weft_api::{
    ApiError, ClientName, ErrorKind, LoginSettings, SharedProfile, SharedRequest, TotpRequest,
    UserChanged, UserName, UserRequest, VpnUser,
};
use weft_openvpn::messages::Message;
use zeroize::Zeroizing;

use super::login::{UserError, Users, hash};
use super::serving::{Command, Whom};
use super::{Gateway, no_authority, profile, refusal};

impl Gateway {
    /// `weft openvpn user add`.
    pub(crate) async fn add_user(
        self: Arc<Self>,
        request: UserRequest,
    ) -> Result<UserChanged, ApiError> {
        let _one = self.changing.lock().await;
        let UserRequest { name, password, totp: has_codes } = request;
        let user = name.clone();
        let add = move |users: &mut Users| users.add(&user, hash(password.expose())?, has_codes);
        let secret = self.logins.change(add).await.map_err(fault)?;
        let otpauth = self.otpauth(&name, secret);
        Ok(UserChanged { name, was_connected: false, otpauth })
    }

    /// `weft openvpn user passwd`: the sessions begin anew, with the new password.
    pub(crate) async fn set_password(
        self: Arc<Self>,
        request: UserRequest,
    ) -> Result<UserChanged, ApiError> {
        let _one = self.changing.lock().await;
        let UserRequest { name, password, .. } = request;
        let user = name.clone();
        let set = move |users: &mut Users| users.set_password(&user, hash(password.expose())?);
        self.logins.change(set).await.map_err(fault)?;
        let was_connected = self.log_out(&name, again("the password was changed")).await;
        Ok(UserChanged { name, was_connected, otpauth: None })
    }

    /// `weft openvpn user totp`: the sessions begin anew.
    pub(crate) async fn set_totp(
        self: Arc<Self>,
        request: TotpRequest,
    ) -> Result<UserChanged, ApiError> {
        let _one = self.changing.lock().await;
        let TotpRequest { name, off } = request;
        let user = name.clone();
        let secret = {
            let change = move |users: &mut Users| users.set_totp(&user, off);
            self.logins.change(change).await.map_err(fault)?
        };
        let was_connected = self.log_out(&name, again("one-time codes were changed")).await;
        let otpauth = self.otpauth(&name, secret);
        Ok(UserChanged { name, was_connected, otpauth })
    }

    /// `weft openvpn user rm`: the sessions end at once, for good.
    pub(crate) async fn remove_user(
        self: Arc<Self>,
        request: UserName,
    ) -> Result<UserChanged, ApiError> {
        let _one = self.changing.lock().await;
        let UserName { name } = request;
        let user = name.clone();
        let remove = move |users: &mut Users| users.remove(&user);
        self.logins.change(remove).await.map_err(fault)?;
        self.logins.forget(&name);
        let was_connected = self.log_out(&name, Message::Halt("user removed".into())).await;
        let LoginSettings { auth, client_name, .. } = self.login_settings();
        if auth.has_password() && client_name != ClientName::Certificate {
            self.free_addresses(&name).await;
        }
        Ok(UserChanged { name, was_connected, otpauth: None })
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
        let remotes = self.places("").await?;
        let authority = self.authority_now().ok_or_else(no_authority)?;
        let shared = authority.shared().map_err(refusal)?;
        let profile = profile::shared(&shared, &remotes, request.totp);
        let profile = profile.map_err(|error| ApiError::new(ErrorKind::Conflict, error))?;
        Ok(SharedProfile { profile: profile.to_string() })
    }

    fn otpauth(&self, name: &str, secret: Option<Zeroizing<String>>) -> Option<String> {
        secret.map(|secret| self.logins.otpauth(name, &secret).to_string())
    }

    async fn log_out(&self, user: &str, farewell: Message) -> bool {
        let whom = Whom::User(user.to_owned());
        let end = |reply: oneshot::Sender<bool>| Command::End { whom, farewell, reply };
        self.ask(end).await.unwrap_or_default()
    }
}

/// The client connects again, and shows its password.
fn again(text: &str) -> Message {
    Message::Restart { preserve: false, next_remote: false, text: text.to_owned() }
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
