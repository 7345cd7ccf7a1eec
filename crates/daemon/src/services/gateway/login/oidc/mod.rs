//! Logins by a web page at an identity provider: OpenID Connect's authorization code flow with PKCE.
//!
//! The client is told a short URL of this host (AUTH_PENDING and INFO_PRE). The page there sends the browser on to the
//! provider, and takes it back with a code. The provider gives an ID token for that, and its claims name the user.
//! Nothing of this is done on the gateway's task.

mod https;
mod id_token;
mod page;
mod pending;
mod provider;
mod settings;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use weft_api::OidcSettings;
use zeroize::Zeroizing;

use self::page::{ListenError, Listener};
use self::pending::{Full, LoggedIn, Pending};
use self::provider::{OidcError, Provider};
use self::settings::Place;
use crate::services::gateway::secret_file::secret_in;

pub(in super::super) use self::pending::Who;
pub(crate) use self::settings::provider_port;
pub(super) use self::settings::{fault, word};

/// Codes that are exchanged at the same time.
const EXCHANGES_MAX: usize = 16;
/// How much longer the client waits than the login may take, so that it is told why it is refused.
const TOLD: Duration = Duration::from_secs(15);

/// Logins cannot be offered.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum OpenError {
    /// The file of the secret.
    #[error("the file of the provider's secret {path} cannot be read: {why}")]
    Secret {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        why: String,
    },
    /// The page for browsers.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The provider.
    #[error("the identity provider: {0}")]
    Provider(#[from] OidcError),
    /// A bug.
    #[error("reading files failed ({0}); this is a bug in weft")]
    Failed(#[from] tokio::task::JoinError),
}

impl OpenError {
    /// Whether the daemon's own sandbox forbids it.
    pub(in super::super) fn is_forbidden(&self) -> bool {
        matches!(self, Self::Provider(error) if error.is_forbidden())
    }
}

/// The logins of a gateway that serves. Its tasks end with it.
pub(in super::super) struct Oidc {
    inner: Arc<Inner>,
    _tasks: JoinSet<()>,
}

struct Inner {
    provider: Provider,
    pending: Mutex<Pending>,
    exchanges: Semaphore,
    redirect: Place,
    issuer: String,
    /// How long a login may take.
    wait: Duration,
    /// The certificate does not say who the user is: each browser is asked whether it is its user's client. Else that is
    /// asked where browser and client have different addresses.
    asks_always: bool,
}

/// A login that waits for a browser.
pub(in super::super) struct Waiting {
    /// The page to open.
    pub(in super::super) url: String,
    /// How long the client is to wait.
    pub(in super::super) wait: Duration,
    /// Dropped: nobody waits any more.
    pub(in super::super) place: Ticket,
    /// What comes of it.
    pub(in super::super) outcome: Outcome,
}

/// A place among the logins that wait.
pub(in super::super) struct Ticket {
    inner: Arc<Inner>,
    ticket: String,
}

/// What comes of a login.
pub(in super::super) struct Outcome {
    receiver: oneshot::Receiver<LoggedIn>,
    wait: Duration,
}

/// How a login has ended.
#[derive(Debug)]
pub(in super::super) enum Ended {
    /// The browser has come back.
    Back(LoggedIn),
    /// It has not come in time.
    Late,
    /// The browser has come back, and gone before its login was judged.
    Gone,
}

impl Oidc {
    /// Asks the provider for what it supports, so that a wrong issuer is told at once.
    ///
    /// # Errors
    /// [`OpenError`]
    pub(in super::super) async fn probe(settings: &OidcSettings) -> Result<(), OpenError> {
        Ok(opened(settings).await?.look().await?)
    }

    /// Offers logins from now on. The provider need not be there yet.
    ///
    /// # Errors
    /// [`OpenError`]
    pub(in super::super) async fn open(
        settings: &OidcSettings,
        asks_always: bool,
    ) -> Result<Self, OpenError> {
        let provider = opened(settings).await?;
        let redirect = Place::of(&settings.redirect);
        let redirect = redirect.ok_or_else(|| ListenError::Redirect(settings.redirect.clone()))?;
        let everywhere = [
            SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), redirect.port),
            SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), redirect.port),
        ];
        let listen = settings.listen.map_or(everywhere.to_vec(), |at| vec![at]);
        let listener = Listener::open(&listen, settings).await?;
        let inner = Arc::new(Inner {
            provider,
            pending: Mutex::default(),
            exchanges: Semaphore::new(EXCHANGES_MAX),
            redirect,
            issuer: settings.issuer.clone(),
            wait: Duration::from_secs(settings::wait_s(settings).into()),
            asks_always,
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(page::serve(listener, Arc::clone(&inner)));
        let looking = Arc::clone(&inner);
        tasks.spawn(async move {
            if let Err(error) = looking.provider.look().await {
                tracing::warn!(%error, "the identity provider cannot be asked now");
            }
        });
        Ok(Self { inner, _tasks: tasks })
    }

    /// A client waits for a login from now on.
    ///
    /// # Errors
    /// Too many wait.
    pub(in super::super) fn wait(&self, who: Who) -> Result<Waiting, Full> {
        let (sender, receiver) = oneshot::channel();
        let ticket = lock(&self.inner.pending).add(who, sender)?;
        let Place { authority, .. } = &self.inner.redirect;
        let folder = self.inner.redirect.folder();
        let url = format!("https://{authority}{folder}{}?t={ticket}", settings::LOGIN);
        let wait = self.inner.wait;
        let place = Ticket { inner: Arc::clone(&self.inner), ticket };
        Ok(Waiting { url, wait: wait + TOLD, place, outcome: Outcome { receiver, wait } })
    }
}

impl Ticket {
    /// Whether these are one login.
    pub(in super::super) fn is(&self, ticket: &str) -> bool {
        self.ticket == ticket
    }

    /// Its number.
    pub(in super::super) fn number(&self) -> String {
        self.ticket.clone()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        lock(&self.inner.pending).remove(&self.ticket);
    }
}

impl Outcome {
    /// Waits for it.
    pub(in super::super) async fn ended(self) -> Ended {
        match tokio::time::timeout(self.wait, self.receiver).await {
            Ok(Ok(back)) => Ended::Back(back),
            Ok(Err(_)) => Ended::Gone,
            Err(_) => Ended::Late,
        }
    }
}

/// The provider, with the files that it needs.
async fn opened(settings: &OidcSettings) -> Result<Provider, OpenError> {
    let settings = settings.clone();
    // The disk may be slow.
    let opened = tokio::task::spawn_blocking(move || {
        let secret = settings.client_secret.as_deref().map(|path| {
            let failed = |why: String| OpenError::Secret { path: path.to_owned(), why };
            let line = secret_in(path).map_err(failed)?;
            let text = std::str::from_utf8(&line).map_err(|error| failed(error.to_string()))?;
            Ok::<_, OpenError>(Zeroizing::new(text.to_owned()))
        });
        Ok::<_, OpenError>(Provider::new(&settings, secret.transpose()?)?)
    });
    opened.await?
}

fn lock(pending: &Mutex<Pending>) -> MutexGuard<'_, Pending> {
    pending.lock().unwrap_or_else(PoisonError::into_inner)
}
