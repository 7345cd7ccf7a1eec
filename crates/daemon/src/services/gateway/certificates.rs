//! `weft ca init`, `weft openvpn client` and `weft openvpn revoke`: certificates, and who has them.

use std::sync::{Arc, PoisonError};

use weft_api::{ApiError, ClientProfile, ErrorKind, Revoked};
use weft_openvpn::messages::Message;

use super::authority::{Authority, AuthorityError, Holder};
use super::peers::ToHome;
use super::serving::{Command, Whom};
use super::{Gateway, owner_of, profile};
use crate::core::control::Request;

/// The file of the authority. It holds its private key.
pub(super) const AUTHORITY_FILE: &str = "openvpn-authority.json";

impl Gateway {
    /// `weft ca init`: makes the authority, or shows the one that there is.
    pub(crate) async fn init_authority(self: Arc<Self>) -> Result<weft_api::Authority, ApiError> {
        let _one = self.changing.lock().await;
        if let Some(import) = self.imported()? {
            let home = self.shown_home().filter(|home| !home.is_here).map(|home| home.name);
            let shown = import.shown().map_err(|why| ApiError::new(ErrorKind::Conflict, why))?;
            return Ok(weft_api::Authority { home, ..shown });
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
        let remotes = self.places(&name).await?;
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
        let one = self.changing.lock().await;
        // Another host may have become the home while this one waited.
        if self.is_replica() {
            drop(one);
            return self.peers.ask_home(ToHome::Revoke { name }).await;
        }
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

    /// A client of this name comes no more: others may have its addresses.
    pub(super) async fn free_addresses(&self, name: &str) {
        for network in self.networks_served() {
            let owner = owner_of(&network, name);
            self.attachments.tell(Request::Release { owner }).await;
        }
    }

    /// Whether a certificate is revoked.
    pub(super) fn is_revoked(&self, holder: &Holder) -> bool {
        if let Some(import) = self.imported_now() {
            return import.is_revoked(holder);
        }
        let authority = self.authority.lock().unwrap_or_else(PoisonError::into_inner);
        authority.as_ref().is_none_or(|authority| authority.is_revoked(&holder.serial))
    }

    pub(super) fn authority_now(&self) -> Option<Authority> {
        self.authority.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether another host is the home of what this one serves by.
    pub(super) fn is_replica(&self) -> bool {
        if let Some(import) = self.imported_now() {
            return import.is_replica();
        }
        self.authority_now().is_some_and(|authority| !authority.is_home())
    }

    /// Changes the authority on a thread that the disk may hold up. It is saved before it counts.
    pub(super) async fn change_authority<T: Send + 'static>(
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
}

pub(super) fn no_authority() -> ApiError {
    let text = "there is no certificate authority on this host, nor on a host that it is linked with: run weft ca init first, on one host of the mesh";
    ApiError::new(ErrorKind::Conflict, text)
}

pub(super) fn refusal(error: AuthorityError) -> ApiError {
    let kind = match &error {
        AuthorityError::BadName(_) => ErrorKind::BadRequest,
        AuthorityError::Unknown(_) => ErrorKind::NotFound,
        AuthorityError::Full | AuthorityError::NotHere => ErrorKind::Conflict,
        AuthorityError::Make(_) | AuthorityError::Damaged(_) => ErrorKind::Internal,
    };
    ApiError::new(kind, error)
}
