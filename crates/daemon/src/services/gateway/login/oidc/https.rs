//! Requests to the identity provider: HTTPS alone, one connection each, with limits. Redirections are not followed.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use super::settings::Place;

/// How long a request may take as a whole.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// How long a connection to one address may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// The longest answer, in bytes: keys of a provider, or a token with many groups.
const ANSWER_BYTES_MAX: usize = 256 * 1024;
/// Addresses of a name that are tried.
const ADDRESSES_MAX: usize = 4;

/// A request that has no answer.
#[derive(Debug, thiserror::Error)]
pub(in super::super::super) enum HttpsError {
    /// The provider's words, or the administrator's.
    #[error("{0:?} is no https URL")]
    Url(String),
    /// The file of the authorities.
    #[error("{0}")]
    Authorities(String),
    /// DNS.
    #[error("the name {host} has no address: {error}")]
    Name {
        /// The name.
        host: String,
        /// Why.
        error: io::Error,
    },
    /// The daemon's own sandbox.
    #[error(
        "this daemon may not connect to port {port} of {host} (Landlock): restart weft, which then may; containers stay connected meanwhile"
    )]
    Forbidden {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// The network, or the provider.
    #[error("cannot connect to {host} port {port}: {error}")]
    Connect {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// Why.
        error: io::Error,
    },
    /// TLS: most often another authority.
    #[error("no TLS with {host}: {error}; --oidc-ca names a file with its authority")]
    Tls {
        /// The host.
        host: String,
        /// Why.
        error: io::Error,
    },
    /// The answer is not HTTP, or broke off.
    #[error("{host} gives no answer that can be read: {error}")]
    Answer {
        /// The host.
        host: String,
        /// Why.
        error: String,
    },
    /// The answer has no end.
    #[error("{host} gives an answer of more than {ANSWER_BYTES_MAX} bytes")]
    TooLong {
        /// The host.
        host: String,
    },
    /// It takes too long.
    #[error("{host} has given no answer in {} s", REQUEST_LIMIT.as_secs())]
    Late {
        /// The host.
        host: String,
    },
}

/// An answer.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
}

/// What is asked.
pub(super) struct Ask<'a> {
    pub(super) url: &'a str,
    /// The value of `Authorization`.
    pub(super) authorization: Option<&'a str>,
    /// A form, which is posted; `None`: the URL is fetched.
    pub(super) form: Option<Zeroizing<String>>,
}

/// The client.
pub(super) struct Https {
    tls: TlsConnector,
}

impl Https {
    /// A client that trusts the authorities in a file, or those of the system. It reads files.
    ///
    /// # Errors
    /// [`HttpsError::Authorities`]
    pub(super) fn new(ca: Option<&Path>) -> Result<Self, HttpsError> {
        let failed = |why: String| HttpsError::Authorities(why);
        let mut roots = RootCertStore::empty();
        let found = match ca {
            Some(path) => {
                let about = |error: &dyn std::fmt::Display| {
                    failed(format!("cannot read the authorities in {}: {error}", path.display()))
                };
                let pem = std::fs::read(path).map_err(|error| about(&error))?;
                let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
                all.map_err(|error| about(&error))?
            }
            None => rustls_native_certs::load_native_certs().certs,
        };
        roots.add_parsable_certificates(found);
        if roots.is_empty() {
            return Err(failed(match ca {
                Some(path) => format!("{} has no certificate of an authority", path.display()),
                None => "this system has no authorities: install ca-certificates, or name a file by --oidc-ca".into(),
            }));
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| failed(error.to_string()))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { tls: Arc::new(config).into() })
    }

    /// Asks, and reads the answer.
    ///
    /// # Errors
    /// [`HttpsError`]
    pub(super) async fn ask(&self, ask: Ask<'_>) -> Result<Answer, HttpsError> {
        let place = Place::of(ask.url).ok_or_else(|| HttpsError::Url(ask.url.to_owned()))?;
        let late = || HttpsError::Late { host: place.host.clone() };
        let answer = tokio::time::timeout(REQUEST_LIMIT, self.exchange(&place, ask)).await;
        answer.map_err(|_| late())?
    }

    async fn exchange(&self, place: &Place, ask: Ask<'_>) -> Result<Answer, HttpsError> {
        let host = || place.host.clone();
        let unreadable = |error: String| HttpsError::Answer { host: host(), error };
        let stream = connect(place).await?;
        let name = ServerName::try_from(host()).map_err(|_| HttpsError::Url(ask.url.to_owned()))?;
        let stream = self.tls.connect(name, stream).await;
        let stream = stream.map_err(|error| HttpsError::Tls { host: host(), error })?;
        let io = TokioIo::new(stream);
        let opened = hyper::client::conn::http1::handshake(io).await;
        let (mut sender, connection) = opened.map_err(|error| unreadable(error.to_string()))?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            let _ = connection.await;
        });
        let mut request = Request::builder()
            .method(if ask.form.is_some() { Method::POST } else { Method::GET })
            .uri(&place.path)
            .header(header::HOST, &place.authority)
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, "weft")
            .header(header::CONNECTION, "close");
        if let Some(value) = ask.authorization {
            let value = HeaderValue::from_str(value);
            let mut value = value.map_err(|error| unreadable(error.to_string()))?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        if ask.form.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        }
        let body = ask.form.map_or_else(Bytes::new, Bytes::from_owner);
        let request =
            request.body(Full::new(body)).map_err(|error| unreadable(error.to_string()))?;
        let answer = sender.send_request(request).await;
        let answer = answer.map_err(|error| unreadable(error.to_string()))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
            Some(_) => HttpsError::TooLong { host: host() },
            None => unreadable(error.to_string()),
        })?;
        Ok(Answer { status, body: body.to_bytes() })
    }
}

/// Connects to the first address that answers.
async fn connect(place: &Place) -> Result<TcpStream, HttpsError> {
    let (host, port) = (&place.host, place.port);
    let unnamed = |error| HttpsError::Name { host: host.clone(), error };
    let found = tokio::net::lookup_host((host.as_str(), port)).await.map_err(unnamed)?;
    let mut last = unnamed(io::ErrorKind::NotFound.into());
    for address in found.take(ADDRESSES_MAX) {
        let opened = tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(address)).await;
        last = match opened.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                HttpsError::Forbidden { host: host.clone(), port }
            }
            Err(error) => HttpsError::Connect { host: host.clone(), port, error },
        };
    }
    Err(last)
}
