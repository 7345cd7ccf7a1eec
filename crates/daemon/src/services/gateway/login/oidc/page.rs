//! The page for browsers: where a login begins, and where it comes back to.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Extension, Query, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::{Id, JoinSet};
use tokio_rustls::TlsAcceptor;
use weft_api::OidcSettings;

use super::pending::{LoggedIn, MarkFault};
use super::provider::plain;
use super::settings::LOGIN;
use super::{Inner, lock};
use crate::services::gateway::streams::origin;

/// Browsers' connections at the same time.
const CONNECTIONS_MAX: usize = 256;
/// Those from one address (a /64, for IPv6), so that nobody keeps all others away. A program of this host that has TLS for
/// the page may have all.
const CONNECTIONS_OF_ORIGIN_MAX: usize = 32;
/// How long one may last: a login takes several, so nobody waits for a slow one.
const CONNECTION_LIMIT: Duration = Duration::from_secs(60);
/// How long a browser may take for TLS, and for the head of a request.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// The longest head of a request, in bytes: a browser may have cookies of others for the name.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// How long a browser waits until the gateway has judged its client.
const TOLD_LIMIT: Duration = Duration::from_secs(10);
/// How often the certificate's files are read anew, since they are renewed every few weeks.
const RELOAD: Duration = Duration::from_secs(600);
/// An earlier gateway may still have the port for a moment.
const BIND_TRIES: u32 = 20;
const BIND_PAUSE: Duration = Duration::from_millis(100);
/// The browser's cookie. By its prefix, browsers take it from this very host alone, and not from one that is named alike.
const COOKIE: &str = "__Host-weft-login";
/// By this header browsers tell which site sends a form (Fetch Metadata).
const SITE: &str = "sec-fetch-site";
/// The longest code that is taken, in bytes.
const CODE_BYTES_MAX: usize = 4_096;

/// The page cannot be offered.
#[derive(Debug, thiserror::Error)]
pub(in super::super::super) enum ListenError {
    /// A URL that was found to be good before.
    #[error("{0:?} is no https URL to come back to")]
    Redirect(String),
    /// The port is taken.
    #[error(
        "cannot listen on {at} for browsers: {error}; --oidc-listen names another address and port"
    )]
    Bind {
        /// The address.
        at: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// The certificate for browsers.
    #[error(
        "the certificate for browsers cannot be used: {path}: {why}; --oidc-certificate and --oidc-key name it and its private key, as PEM"
    )]
    Certificate {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

/// Where browsers come in.
pub(super) struct Listener {
    listeners: Vec<TcpListener>,
    /// `None`: without TLS.
    tls: Option<Tls>,
}

/// TLS, and the files that it was made from.
struct Tls {
    acceptor: TlsAcceptor,
    certificate: PathBuf,
    key: PathBuf,
}

impl Listener {
    /// Listens. It reads files.
    ///
    /// # Errors
    /// [`ListenError`]
    pub(super) async fn open(
        places: &[SocketAddr],
        settings: &OidcSettings,
    ) -> Result<Self, ListenError> {
        let tls = match (&settings.certificate, &settings.key) {
            (Some(certificate), Some(key)) => {
                let acceptor = acceptor(certificate.clone(), key.clone()).await?;
                Some(Tls { acceptor, certificate: certificate.clone(), key: key.clone() })
            }
            _ => None,
        };
        let mut listeners = Vec::new();
        let mut last = None;
        for at in places {
            // The socket for IPv6 takes IPv4, too, where the system has it so: nothing ends by waiting then.
            let tries = if listeners.is_empty() { BIND_TRIES } else { 1 };
            match bind(*at, tries).await {
                Ok(listener) => listeners.push(listener),
                Err(_) if !listeners.is_empty() => {}
                Err(error) => last = Some(ListenError::Bind { at: *at, error }),
            }
        }
        match last.filter(|_| listeners.is_empty()) {
            Some(error) => Err(error),
            None => Ok(Self { listeners, tls }),
        }
    }

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let accepts = self.listeners.iter().map(|listener| Box::pin(listener.accept()));
        futures_util::future::select_all(accepts).await.0
    }

    /// Reads the certificate's files anew. The old ones go on where these are no good.
    async fn renew(&mut self) {
        let Some(Tls { acceptor: current, certificate, key }) = &mut self.tls else { return };
        match acceptor(certificate.clone(), key.clone()).await {
            Ok(renewed) => *current = renewed,
            Err(error) => tracing::warn!(%error, "the old certificate goes on"),
        }
    }
}

async fn bind(at: SocketAddr, tries: u32) -> io::Result<TcpListener> {
    let mut left = tries;
    loop {
        left = left.saturating_sub(1);
        match TcpListener::bind(at).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && left > 0 => {
                tokio::time::sleep(BIND_PAUSE).await;
            }
            bound => return bound,
        }
    }
}

/// What TLS needs, from its files.
async fn acceptor(certificate: PathBuf, key: PathBuf) -> Result<TlsAcceptor, ListenError> {
    let path = certificate.clone();
    let read = tokio::task::spawn_blocking(move || config(&certificate, &key));
    let failed = |why: String| ListenError::Certificate { path, why };
    read.await.unwrap_or_else(|error| Err(failed(error.to_string()))).map(|config| config.into())
}

fn config(certificate: &Path, key: &Path) -> Result<Arc<ServerConfig>, ListenError> {
    let failed = |path: &Path, why: &dyn std::fmt::Display| ListenError::Certificate {
        path: path.to_owned(),
        why: why.to_string(),
    };
    let read = |path: &Path| std::fs::read(path).map_err(|error| failed(path, &error));
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(certificate)?).collect();
    let chain = chain.map_err(|error| failed(certificate, &error))?;
    if chain.is_empty() {
        return Err(failed(certificate, &"there is no certificate in it"));
    }
    let pem = zeroize::Zeroizing::new(read(key)?);
    let private = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| failed(key, &error))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(certificate, &error))?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| failed(certificate, &error))?;
    Ok(Arc::new(config))
}

/// Answers browsers for as long as it is polled.
pub(super) async fn serve(mut listener: Listener, inner: Arc<Inner>) {
    let routes = routes(&inner);
    let mut connections = Connections::default();
    let mut reload = tokio::time::interval(RELOAD);
    reload.tick().await;
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    let tls = listener.tls.as_ref().map(|tls| tls.acceptor.clone());
                    let routes = routes.clone().layer(Extension(Browser(from.ip().to_canonical())));
                    connections.add(from, answer(stream, tls, routes));
                }
                // Out of descriptors: others end soon.
                Err(error) => {
                    tracing::debug!(%error, "cannot take a browser's connection");
                    tokio::time::sleep(BIND_PAUSE).await;
                }
            },
            () = connections.ended() => {}
            _ = reload.tick() => listener.renew().await,
        }
    }
}

/// The connections of browsers.
#[derive(Default)]
struct Connections {
    tasks: JoinSet<()>,
    origins: HashMap<Id, IpAddr>,
}

impl Connections {
    /// Serves a connection, or drops it: too many are open.
    fn add(&mut self, from: SocketAddr, answer: impl Future<Output = ()> + Send + 'static) {
        let origin = origin(from);
        let of_origin = self.origins.values().filter(|other| **other == origin).count();
        let is_greedy = of_origin >= CONNECTIONS_OF_ORIGIN_MAX && !origin.is_loopback();
        if is_greedy || self.origins.len() >= CONNECTIONS_MAX {
            tracing::debug!(%from, "dropped a browser's connection: too many are open");
            return;
        }
        let task = self.tasks.spawn(async move {
            let _ = tokio::time::timeout(CONNECTION_LIMIT, answer).await;
        });
        self.origins.insert(task.id(), origin);
    }

    /// Waits for the end of one, for ever where there is none.
    async fn ended(&mut self) {
        match self.tasks.join_next_with_id().await {
            Some(Ok((id, ()))) => _ = self.origins.remove(&id),
            Some(Err(error)) => _ = self.origins.remove(&error.id()),
            None => std::future::pending().await,
        }
    }
}

async fn answer(stream: TcpStream, tls: Option<TlsAcceptor>, routes: Router) {
    let Some(tls) = tls else { return answer_on(stream, routes).await };
    if let Ok(Ok(stream)) = tokio::time::timeout(HEAD_LIMIT, tls.accept(stream)).await {
        answer_on(stream, routes).await;
    }
}

async fn answer_on(stream: impl AsyncRead + AsyncWrite + Unpin + Send, routes: Router) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT).max_header_size(HEAD_BYTES_MAX);
    let service = TowerToHyperService::new(routes);
    // A browser that goes away.
    let _ = http.serve_connection(TokioIo::new(stream), service).await;
}

fn routes(inner: &Arc<Inner>) -> Router {
    let begins = format!("{}{LOGIN}", inner.redirect.folder());
    Router::new()
        .route(&begins, get(begin).post(agree))
        .route(&inner.redirect.path, get(come_back))
        .fallback(|| async { shown(StatusCode::NOT_FOUND, "Not found", "There is no such page.") })
        .with_state(Arc::clone(inner))
}

/// The address of a browser.
#[derive(Clone, Copy)]
struct Browser(IpAddr);

#[derive(Deserialize)]
struct Login {
    #[serde(default)]
    t: String,
}

#[derive(Deserialize)]
struct Callback {
    #[serde(default)]
    state: String,
    code: Option<String>,
    error: Option<String>,
    iss: Option<String>,
}

/// The page that the client shows. It sends the browser on, or asks first. Whoever sends somebody else a link to it would
/// be let in as that user, whom the provider may know without a word.
async fn begin(
    State(inner): State<Arc<Inner>>,
    Extension(Browser(at)): Extension<Browser>,
    Query(login): Query<Login>,
) -> Response {
    let opened = lock(&inner.pending).open(&login.t);
    let Some((cookie, who)) = opened else { return fault(MarkFault::Over) };
    let mut response = if inner.asks_always || at != who.from {
        asked(&login.t, &who.certificate, who.from)
    } else {
        leave(&inner, &login.t, &cookie).await
    };
    // Lax: the provider's page leads back here.
    let cookie = format!("{COOKIE}={cookie}; Path=/; Secure; HttpOnly; SameSite=Lax");
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}

/// The user says that it is his client. The page of another site cannot say so in his name.
async fn agree(
    State(inner): State<Arc<Inner>>,
    Query(login): Query<Login>,
    headers: HeaderMap,
) -> Response {
    let site = headers.get(SITE).map(HeaderValue::as_bytes);
    if site.is_some_and(|site| site != b"same-origin") {
        return fault(MarkFault::OtherBrowser);
    }
    leave(&inner, &login.t, &cookie_of(&headers)).await
}

/// Sends the browser to the provider.
async fn leave(inner: &Inner, ticket: &str, cookie: &str) -> Response {
    let marks = lock(&inner.pending).leave(ticket, cookie);
    let marks = match marks {
        Ok(marks) => marks,
        Err(why) => return fault(why),
    };
    match inner.provider.page(&marks).await {
        Ok(page) => {
            let location = HeaderValue::from_str(&page);
            let Ok(location) = location else { return fault(MarkFault::Over) };
            let mut response = shown(StatusCode::SEE_OTHER, "Log in", "The page is elsewhere.");
            response.headers_mut().insert(header::LOCATION, location);
            response
        }
        Err(error) => {
            tracing::warn!(%error, "a login cannot begin");
            shown(StatusCode::BAD_GATEWAY, "Not now", &format!("{}.", error.for_user()))
        }
    }
}

/// The browser comes back from the provider.
async fn come_back(
    State(inner): State<Arc<Inner>>,
    Query(callback): Query<Callback>,
    headers: HeaderMap,
) -> Response {
    let Callback { state, code, error, iss } = callback;
    let is_long = |text: &Option<String>| text.as_ref().is_some_and(|it| it.len() > CODE_BYTES_MAX);
    // RFC 9207: an answer of another provider.
    if is_long(&code) || iss.is_some_and(|iss| iss != inner.issuer) {
        return fault(MarkFault::Over);
    }
    let back = lock(&inner.pending).back(&state, &cookie_of(&headers));
    let back = match back {
        Ok(back) => back,
        Err(why) => return fault(why),
    };
    let user = match (code, error) {
        (Some(code), None) => {
            let turn = inner.exchanges.acquire().await;
            let user = inner.provider.user(&code, &back.verifier, &back.nonce).await;
            drop(turn);
            user.map_err(|error| {
                let (from, certificate) = (back.who.from, &back.who.certificate);
                tracing::warn!(%error, %from, certificate, "a login by the web page failed");
                error.for_user()
            })
        }
        (_, error) => {
            let word = error.map(|word| plain(&word)).filter(|word| !word.is_empty());
            let word = word.map(|word| format!(": {word}")).unwrap_or_default();
            Err(format!("The identity provider refuses the login{word}"))
        }
    };
    let (told, verdict) = oneshot::channel();
    let name = user.clone().unwrap_or_default();
    if back.sender.send(LoggedIn { user, told }).is_err() {
        return fault(MarkFault::Over);
    }
    match tokio::time::timeout(TOLD_LIMIT, verdict).await {
        Ok(Ok(Ok(()))) => {
            let text = format!("You are logged in as {name}. The VPN connects; close this window.");
            shown(StatusCode::OK, "Connected", &text)
        }
        Ok(Ok(Err(why))) => shown(StatusCode::FORBIDDEN, "Refused", &format!("{why}.")),
        // Its client went away, or is slow.
        _ => fault(MarkFault::Over),
    }
}

fn cookie_of(headers: &HeaderMap) -> String {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = all.flat_map(|line| line.split(';')).filter_map(|pair| pair.split_once('='));
    let found = pairs.find(|(name, _)| name.trim() == COOKIE);
    found.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}

fn fault(why: MarkFault) -> Response {
    let text = match why {
        MarkFault::Over => "This login is over, or was never begun. Connect the VPN again.",
        MarkFault::OtherBrowser => {
            "This login began in another browser. Go on there, or connect the VPN again."
        }
    };
    shown(StatusCode::FORBIDDEN, "Refused", text)
}

/// The question whether it is the user's own client.
fn asked(ticket: &str, certificate: &str, from: IpAddr) -> Response {
    let text = format!(
        "A VPN client at {from} with the certificate {certificate} wants to be connected as you. Go on only if you have just started it yourself."
    );
    let button = format!(
        "<form method=\"post\" action=\"{LOGIN}?t={}\"><button>Go on</button></form>",
        escaped(ticket)
    );
    with(StatusCode::OK, "Is this your VPN client?", &text, &button)
}

fn shown(status: StatusCode, title: &str, text: &str) -> Response {
    with(status, title, text, "")
}

fn with(status: StatusCode, title: &str, text: &str, more: &str) -> Response {
    let (title, text) = (escaped(title), escaped(text));
    let page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\n<style>body{{font-family:sans-serif;margin:15vh auto;max-width:32em;padding:0 1em}}</style></head>\n<body><h1>{title}</h1><p>{text}</p>{more}</body></html>\n"
    );
    let headers: [(HeaderName, &str); 5] = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        ),
    ];
    (status, headers, page).into_response()
}

/// As HTML shows it.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            char => out.push(char),
        }
    }
    out
}

#[cfg(test)]
mod tests;
