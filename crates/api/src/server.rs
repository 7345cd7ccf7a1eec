//! The server side: a socket that only root may open, and routes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{UnixListener, UnixStream};

use crate::call::{Call, Method, Nothing};
use crate::error::{ApiError, ErrorKind};

/// The API's socket, ready to take connections.
pub struct ApiListener(RootOnly);

/// Binds the unix socket of the API, which only root may open. It accepts connections at once;
/// [`serve`] answers them.
///
/// The socket's mode is 0600. The peer's credentials are checked as well, since a socket may be
/// bind-mounted into a container with another owner.
///
/// # Errors
/// The socket cannot be bound. Call it inside a tokio runtime.
pub fn listen(socket: &Path) -> io::Result<ApiListener> {
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(socket)?;
    std::fs::set_permissions(socket, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    Ok(ApiListener(RootOnly(listener)))
}

impl ApiListener {
    /// Takes a listening unix socket that another process has bound, such as systemd.
    ///
    /// # Errors
    /// The descriptor is no such socket. Call it inside a tokio runtime.
    pub fn adopt(socket: OwnedFd) -> io::Result<Self> {
        let listener = std::os::unix::net::UnixListener::from(socket);
        listener.set_nonblocking(true)?;
        Ok(Self(RootOnly(UnixListener::from_std(listener)?)))
    }
}

/// Whether a program listens on a unix socket, even one that is too busy to answer.
#[must_use]
pub fn is_answered(socket: &Path) -> bool {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = SocketAddrUnix::new(socket).and_then(|address| {
        let client = socket_with(family, kind, flags, None)?;
        connect(&client, &address)
    });
    matches!(connected, Ok(()) | Err(Errno::AGAIN))
}

/// Answers requests until the future is dropped.
///
/// # Errors
/// The kernel's.
pub async fn serve(listener: ApiListener, router: Router) -> io::Result<()> {
    axum::serve(listener.0, router).await
}

/// Routes each [`Call`] to its handler, with a state that all handlers share.
pub struct Routes<S> {
    router: Router<Arc<S>>,
}

impl<S: Send + Sync + 'static> Routes<S> {
    /// No routes yet; any path is answered with an error that names the problem.
    #[must_use]
    pub fn new() -> Self {
        let unknown = || async {
            reply::<Nothing>(Err(ApiError::new(
                ErrorKind::NotFound,
                "the daemon does not know this API path; it may be older than the command: restart it",
            )))
        };
        Self { router: Router::new().fallback(unknown) }
    }

    /// Answers a call.
    #[must_use]
    pub fn on<C, H, F>(self, _: C, answer: H) -> Self
    where
        C: Call,
        H: Fn(Arc<S>, C::Request) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Result<C::Answer, ApiError>> + Send,
    {
        let handler = move |State(state): State<Arc<S>>, body: Bytes| async move {
            match read::<C::Request>(&body) {
                Ok(request) => reply(answer(state, request).await),
                Err(error) => reply::<C::Answer>(Err(error)),
            }
        };
        let route = match C::METHOD {
            Method::Get => get(handler),
            Method::Post => post(handler),
        };
        Self { router: self.router.route(C::PATH, route) }
    }

    /// The routes, ready for [`serve`].
    pub fn with_state(self, state: Arc<S>) -> Router {
        self.router.layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX)).with_state(state)
    }
}

impl<S: Send + Sync + 'static> Default for Routes<S> {
    fn default() -> Self {
        Self::new()
    }
}

/// Parses the body of a request; an empty body counts as an empty object.
fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| {
        ApiError::new(ErrorKind::BadRequest, format!("invalid request body: {error}"))
    })
}

/// A value as JSON, or an error with its HTTP status.
pub fn reply<T: Serialize>(answer: Result<T, ApiError>) -> Response {
    match answer {
        Ok(value) => Json(value).into_response(),
        Err(error) => {
            let status = StatusCode::from_u16(error.kind.http_status())
                .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, Json(error)).into_response()
        }
    }
}

/// Accepts only connections of root and of the daemon's own user.
struct RootOnly(UnixListener);

impl axum::serve::Listener for RootOnly {
    type Io = UnixStream;
    type Addr = tokio::net::unix::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            match self.0.accept().await {
                Ok((stream, address)) => match stream.peer_cred() {
                    Ok(credentials) if is_allowed(credentials.uid()) => return (stream, address),
                    Ok(credentials) => {
                        tracing::warn!(
                            uid = credentials.uid(),
                            "refused an API request of another user"
                        );
                    }
                    Err(error) => tracing::warn!(%error, "refused an API peer without credentials"),
                },
                Err(error) => {
                    tracing::warn!(%error, "API socket cannot accept");
                    tokio::time::sleep(std::time::Duration::from_millis(ACCEPT_RETRY_MS)).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

fn is_allowed(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

/// The longest body of a request: an OpenVPN server's configuration with the files of its clients.
const REQUEST_BYTES_MAX: usize = 16 << 20;
/// Pause after a failed accept (for example, out of descriptors), to avoid a busy loop.
const ACCEPT_RETRY_MS: u64 = 100;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{self, Nothing};
    use crate::{Client, ClientError, ForgetRequest, socket_path};

    type TestResult = Result<(), Box<dyn std::error::Error>>;

    /// Runs `ask` beside a server of these routes.
    async fn served<T>(
        routes: Routes<String>,
        ask: impl AsyncFnOnce(Client) -> T,
    ) -> Result<T, Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let listener = listen(&socket_path(directory.path()))?;
        let state = Arc::new("state".to_owned());
        tokio::select! {
            ended = serve(listener, routes.with_state(state)) => Err(format!("{ended:?}").into()),
            answer = ask(Client::new(directory.path())) => Ok(answer),
        }
    }

    #[tokio::test]
    async fn a_call_is_answered_with_the_state_and_a_refusal_keeps_its_kind() -> TestResult {
        let routes = Routes::new().on(call::Stop, async |_: Arc<String>, _| Ok(Nothing {})).on(
            call::Forget,
            async |state: Arc<String>, request: ForgetRequest| {
                let text = format!("{state} {:?}", request.targets);
                Err(ApiError::new(ErrorKind::Conflict, text))
            },
        );
        let (stopped, refused, unknown) = served(routes, async |client| {
            let request = ForgetRequest { targets: vec!["one".to_owned()] };
            let refused = client.call::<call::Forget>(&request).await.map(drop);
            (client.ask::<call::Stop>().await, refused, client.ask::<call::Ipam>().await.map(drop))
        })
        .await?;
        assert_eq!(stopped?, Nothing {});
        let wanted = ApiError::new(ErrorKind::Conflict, r#"state ["one"]"#);
        assert!(matches!(refused, Err(ClientError::Refused(error)) if error == wanted));
        let Err(ClientError::Refused(unknown)) = unknown else { return Err("no refusal".into()) };
        assert_eq!(unknown.kind, ErrorKind::NotFound);
        Ok(())
    }

    #[test]
    fn a_body_that_is_no_request_is_refused_with_the_reason() {
        let error =
            read::<ForgetRequest>(br#"{"target": []}"#).map(drop).map_err(|error| error.error);
        assert!(error.is_err_and(|text| text.contains("unknown field `target`")));
        assert!(read::<Nothing>(b"").is_ok());
    }
}
