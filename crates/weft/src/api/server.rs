//! The daemon's side of the API: requests become [`Request`]s for the control loop.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use tokio::net::{UnixListener, UnixStream};

use super::types::{
    ApiError, AttachRequest, Attachment, ConnectRequest, Connection, DetachRequest, Detached,
    ErrorKind, ForgetRequest, Invitation, Ipam, Path as PeerPath, Peer, Report, Status, Target,
    Traffic, Workers, WorkersRequest,
};

/// A boxed answer: the trait below is used behind a pointer.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, ApiError>> + Send + 'a>>;

/// What the daemon can be asked.
pub trait RequestSender: Send + Sync + 'static {
    /// `GET /v1/status`.
    fn status(&self) -> Answer<'_, Status>;
    /// `GET /v1/connections`.
    fn connections(&self) -> Answer<'_, Vec<Connection>>;
    /// `GET /v1/paths`.
    fn paths(&self) -> Answer<'_, Vec<PeerPath>>;
    /// `GET /v1/peers`.
    fn peers(&self) -> Answer<'_, Vec<Peer>>;
    /// `GET /v1/targets`.
    fn targets(&self) -> Answer<'_, Vec<Target>>;
    /// `GET /v1/ipam`.
    fn ipam(&self) -> Answer<'_, Ipam>;
    /// `GET /v1/attachments`.
    fn attachments(&self) -> Answer<'_, Vec<Attachment>>;
    /// `GET /v1/report`.
    fn report(&self) -> Answer<'_, Report>;
    /// `GET /v1/traffic`.
    fn traffic(&self) -> Answer<'_, Traffic>;
    /// `GET /v1/workers`.
    fn workers(&self) -> Answer<'_, Workers>;
    /// `POST /v1/workers`.
    fn set_workers(&self, request: WorkersRequest) -> Answer<'_, Workers>;
    /// `POST /v1/attach`.
    fn attach(&self, request: AttachRequest) -> Answer<'_, Attachment>;
    /// `POST /v1/detach`.
    fn detach(&self, request: DetachRequest) -> Answer<'_, Detached>;
    /// `POST /v1/connect`.
    fn connect(&self, request: ConnectRequest) -> Answer<'_, Vec<Target>>;
    /// `POST /v1/forget`.
    fn forget(&self, request: ForgetRequest) -> Answer<'_, Vec<Target>>;
    /// `POST /v1/token`.
    fn invite(&self) -> Answer<'_, Invitation>;
    /// `POST /v1/stop`.
    fn stop(&self) -> Answer<'_, ()>;
}

type Daemon = Arc<dyn RequestSender>;

/// The API's socket, ready to take connections.
pub struct ApiListener(RootOnly);

/// Binds the unix socket of the API, which only root may open. It takes connections from here on;
/// they are answered once it is given to [`serve`].
///
/// The socket's mode is 0600; the peer's credentials are checked as well, since a socket may be
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

/// Answers requests until the future is dropped.
///
/// # Errors
/// The kernel's.
pub async fn serve(listener: ApiListener, daemon: Arc<dyn RequestSender>) -> io::Result<()> {
    serve_router(listener, router(daemon)).await
}

/// Answers requests by other routes than the daemon's.
pub(crate) async fn serve_router(listener: ApiListener, router: Router) -> io::Result<()> {
    axum::serve(listener.0, router).await
}

fn router(daemon: Daemon) -> Router {
    Router::new()
        .route("/v1/status", get(|State(d): State<Daemon>| async move { reply(d.status().await) }))
        .route(
            "/v1/connections",
            get(|State(d): State<Daemon>| async move { reply(d.connections().await) }),
        )
        .route("/v1/paths", get(|State(d): State<Daemon>| async move { reply(d.paths().await) }))
        .route("/v1/peers", get(|State(d): State<Daemon>| async move { reply(d.peers().await) }))
        .route(
            "/v1/targets",
            get(|State(d): State<Daemon>| async move { reply(d.targets().await) }),
        )
        .route("/v1/ipam", get(|State(d): State<Daemon>| async move { reply(d.ipam().await) }))
        .route(
            "/v1/attachments",
            get(|State(d): State<Daemon>| async move { reply(d.attachments().await) }),
        )
        .route("/v1/report", get(|State(d): State<Daemon>| async move { reply(d.report().await) }))
        .route(
            "/v1/traffic",
            get(|State(d): State<Daemon>| async move { reply(d.traffic().await) }),
        )
        .route(
            "/v1/workers",
            get(|State(d): State<Daemon>| async move { reply(d.workers().await) }).post(
                |State(d): State<Daemon>, Json(body): Json<WorkersRequest>| async move {
                    reply(d.set_workers(body).await)
                },
            ),
        )
        .route(
            "/v1/attach",
            post(|State(d): State<Daemon>, Json(body): Json<AttachRequest>| async move {
                reply(d.attach(body).await)
            }),
        )
        .route(
            "/v1/detach",
            post(|State(d): State<Daemon>, Json(body): Json<DetachRequest>| async move {
                reply(d.detach(body).await)
            }),
        )
        .route(
            "/v1/connect",
            post(|State(d): State<Daemon>, Json(body): Json<ConnectRequest>| async move {
                reply(d.connect(body).await)
            }),
        )
        .route(
            "/v1/forget",
            post(|State(d): State<Daemon>, Json(body): Json<ForgetRequest>| async move {
                reply(d.forget(body).await)
            }),
        )
        .route("/v1/token", post(|State(d): State<Daemon>| async move { reply(d.invite().await) }))
        .route(
            "/v1/stop",
            post(|State(d): State<Daemon>| async move {
                reply(d.stop().await.map(|()| serde_json::json!({})))
            }),
        )
        .fallback(|| async {
            reply::<()>(Err(ApiError::new(
                ErrorKind::NotFound,
                "the API has no such path; this daemon may be older than the command that asks it",
            )))
        })
        .with_state(daemon)
}

/// A value as JSON, or a refusal with its HTTP status.
pub(crate) fn reply<T: Serialize>(answer: Result<T, ApiError>) -> Response {
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
                            "API request of another user refused"
                        );
                    }
                    Err(error) => tracing::warn!(%error, "API peer without credentials refused"),
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

/// Pause after a failed accept (out of descriptors, say), so that it does not spin.
const ACCEPT_RETRY_MS: u64 = 100;
