//! The authority gets another home: from host to host, or out of a backup.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weft_api::{ApiError, ErrorKind, MoveRequest, RestoreRequest};
use weft_crypto::PeerId;
use zeroize::Zeroizing;

use super::authority::Authority;
use super::{AUTHORITY_FILE, Gateway, no_authority, refusal};

/// How long the old home waits until it has given the private key up, once the new one has it.
const FOLLOW_LIMIT: Duration = Duration::from_secs(10);

/// What a new home gets.
#[derive(Serialize, Deserialize)]
struct Handed {
    authority: Authority,
    users: Zeroizing<String>,
    token_key: Zeroizing<String>,
}

impl Gateway {
    /// `weft ca move`: another host that serves is the authority's home from now on. This host issues and revokes no
    /// more before the other one gets the private key, and forgets it once the other one is the home.
    pub(crate) async fn move_authority(
        self: Arc<Self>,
        request: MoveRequest,
    ) -> Result<weft_api::Authority, ApiError> {
        let _one = self.changing.lock().await;
        let conflict = |text: String| ApiError::new(ErrorKind::Conflict, text);
        if self.imported()?.is_some() {
            let text = "this host serves by a configuration that was taken over, which stays here";
            return Err(conflict(text.into()));
        }
        let authority = self.authority_now().ok_or_else(no_authority)?;
        if !authority.has_key() {
            let home = self.shown_home().map(|home| home.name).unwrap_or_default();
            let text = format!("host {home} has the certificate authority: run this there");
            return Err(conflict(text));
        }
        let (to, nickname) = self.peers.serving(&request.host).map_err(conflict)?;
        if let Some(other) = authority.moving().filter(|other| *other != to) {
            let text = format!(
                "it is being moved to host {}, which may have it: once that host is linked, run weft ca move for it again",
                other.to_hex()
            );
            return Err(conflict(text));
        }
        let fingerprint = authority.shown().map_err(refusal)?.fingerprint;
        self.set_moving(Some(to)).await?;
        self.peers.follow(to, nickname.clone(), fingerprint);
        match self.peers.hand(to, self.handed()?).await {
            Ok(Some(())) => self.wait_given_up(&nickname).await,
            Ok(None) => Err(ApiError::new(
                ErrorKind::Unavailable,
                format!(
                    "host {nickname} has not said whether it has the authority: no certificate is issued or revoked until it has; run this again when weft status connections shows that host"
                ),
            )),
            Err(error) => {
                self.set_moving(None).await?;
                Err(ApiError {
                    error: format!("host {nickname} does not take it: {}", error.error),
                    ..error
                })
            }
        }
    }

    /// `weft ca restore`: this host is the home of an authority whose home is lost, by a backup of it.
    pub(crate) async fn restore_authority(
        self: Arc<Self>,
        request: RestoreRequest,
    ) -> Result<weft_api::Authority, ApiError> {
        let _one = self.changing.lock().await;
        let conflict = |text: String| ApiError::new(ErrorKind::Conflict, text);
        if self.imported()?.is_some() {
            let text = "this host serves by a configuration that was taken over";
            return Err(conflict(text.into()));
        }
        let backup: Authority = serde_json::from_str(request.authority.expose())
            .map_err(|error| bad(format!("the file is no openvpn-authority.json ({error})")))?;
        backup.check_key().map_err(|error| bad(error.to_string()))?;
        let fingerprint = backup.shown().map_err(refusal)?.fingerprint;
        if let Some(home) = self.peers.home_of(&fingerprint) {
            let text = format!(
                "host {home} is the authority's home, and is linked: run weft ca move there"
            );
            return Err(conflict(text));
        }
        let gateway = Arc::clone(&self);
        let restored = tokio::task::spawn_blocking(move || gateway.restore(backup));
        let restored = restored.await.map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
        restored.map_err(conflict)?;
        let authority = self.authority_now().ok_or_else(no_authority)?;
        authority.shown().map_err(refusal)
    }

    fn restore(&self, mut new: Authority) -> Result<(), String> {
        new.set_moving(None);
        match self.authority_now() {
            Some(own) if own.is_home() => {
                return Err("this host is the home of a certificate authority already".into());
            }
            Some(own) if !own.is_same(&new) => {
                return Err("this host serves by another authority than that of the file".into());
            }
            Some(own) => new.add_revocations(&own),
            None => {}
        }
        self.settle_home(&new, None)
    }

    /// The home has given the authority to this host. It is not the home before all of it is saved.
    pub(super) fn take_home(&self, content: &str) -> Result<(), String> {
        let handed: Handed = serde_json::from_str(content).map_err(|error| error.to_string())?;
        let Handed { mut authority, users, token_key } = handed;
        authority.set_moving(None);
        authority.check_key().map_err(|error| error.to_string())?;
        match self.authority_now() {
            Some(own) if own.is_home() => return Err("it is the home of an authority".into()),
            Some(own) if own.is_same(&authority) => {}
            _ => return Err("it does not serve by this authority".into()),
        }
        self.settle_home(&authority, Some((&users, &token_key)))
    }

    fn settle_home(&self, new: &Authority, logins: Option<(&str, &str)>) -> Result<(), String> {
        self.logins.become_home(logins)?;
        self.store.save(AUTHORITY_FILE, new).map_err(|error| error.to_string())?;
        let mut authority = self.authority.lock().unwrap_or_else(PoisonError::into_inner);
        let before = authority.replace(new.clone());
        drop(authority);
        self.authority_changed();
        if before.is_none_or(|before| !before.serves_like(new)) {
            self.wanted.send_modify(|_| {});
        }
        tracing::info!("this host is the home of the certificate authority now");
        Ok(())
    }

    async fn set_moving(self: &Arc<Self>, to: Option<PeerId>) -> Result<(), ApiError> {
        let change = move |known: Option<Authority>| {
            let mut after = known.ok_or_else(no_authority)?;
            after.set_moving(to);
            Ok((after, ()))
        };
        self.change_authority(change).await
    }

    fn handed(&self) -> Result<Zeroizing<String>, ApiError> {
        let mut authority = self.authority_now().ok_or_else(no_authority)?;
        authority.set_moving(None);
        let internal = |error: String| ApiError::new(ErrorKind::Internal, error);
        let users = self.logins.users_document().ok_or_else(|| internal("no users".into()))?;
        let handed = Handed { authority, users, token_key: self.logins.key_document() };
        let text = serde_json::to_string(&handed).map_err(|error| internal(error.to_string()))?;
        Ok(Zeroizing::new(text))
    }

    /// Waits until this host follows the new home.
    async fn wait_given_up(&self, home: &str) -> Result<weft_api::Authority, ApiError> {
        let has_key = || self.authority_now().is_some_and(|authority| authority.has_key());
        let mut news = self.peers.news();
        let given_up = async { while has_key() && news.changed().await.is_ok() {} };
        let _ = tokio::time::timeout(FOLLOW_LIMIT, given_up).await;
        if has_key() {
            let text = format!(
                "host {home} has the authority; this host forgets the key when it hears from there"
            );
            return Err(ApiError::new(ErrorKind::Unavailable, text));
        }
        let authority = self.authority_now().ok_or_else(no_authority)?;
        let home = Some(home.to_owned());
        Ok(weft_api::Authority { home, ..authority.shown().map_err(refusal)? })
    }
}

fn bad(text: String) -> ApiError {
    ApiError::new(ErrorKind::BadRequest, text)
}
