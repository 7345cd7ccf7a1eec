//! Docker's plugin protocol: HTTP over a unix socket.
//!
//! The engine sends no Content-Type, and an empty body when it repeats a request after a lost
//! connection. Refusals have status 200 and a text in `Err` or `Error`.

use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, post};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::backend::Backend;
use super::error::PluginError;
use super::options::{cut, short};
use super::plugin::{ANSWER_LIMIT_MS, Plugin};
use super::wire::{Call, Face};

/// The longest body that is read, in bytes. An image that exposes all ports makes one of several
/// mebibytes.
pub const BODY_BYTES_MAX: usize = 16 << 20;
const CONTENT_TYPE: &str = "application/vnd.docker.plugins.v1.2+json";

/// Answers the engine until the future is dropped. The listener must admit root only.
///
/// # Errors
/// The kernel's.
pub async fn serve<L: axum::serve::Listener>(
    listener: L,
    plugin: Plugin<impl Backend>,
) -> std::io::Result<()>
where
    L::Addr: std::fmt::Debug,
{
    axum::serve(listener, router(plugin)).await
}

/// All methods of the protocol.
pub fn router<B: Backend>(plugin: Plugin<B>) -> Router {
    use Face::{Ipam, Network};
    Router::new()
        .route("/Plugin.Activate", fixed(json!({"Implements": ["NetworkDriver", "IpamDriver"]})))
        .route("/IpamDriver.GetCapabilities", fixed(ipam_capabilities()))
        .route(
            "/IpamDriver.GetDefaultAddressSpaces",
            post(async |State(plugin): State<Plugin<B>>| {
                let answer = plugin.call(Call::DefaultAddressSpaces, deadline()).await;
                reply(Ipam, answer)
            }),
        )
        .route("/IpamDriver.RequestPool", on(Ipam, "RequestPool", Call::RequestPool))
        .route("/IpamDriver.ReleasePool", on(Ipam, "ReleasePool", Call::ReleasePool))
        .route("/IpamDriver.RequestAddress", on(Ipam, "RequestAddress", Call::RequestAddress))
        .route("/IpamDriver.ReleaseAddress", on(Ipam, "ReleaseAddress", Call::ReleaseAddress))
        .route("/NetworkDriver.GetCapabilities", fixed(network_capabilities()))
        .route(
            "/NetworkDriver.GwAllocCheck",
            // Weft adds no gateway to containers, so none is to be taken from the pool.
            ignored(json!({"SkipIPv4": true, "SkipIPv6": true})),
        )
        .route("/NetworkDriver.AllocateNetwork", ignored(swarm()))
        .route("/NetworkDriver.FreeNetwork", ignored(json!({})))
        .route("/NetworkDriver.CreateNetwork", on(Network, "CreateNetwork", Call::CreateNetwork))
        .route("/NetworkDriver.DeleteNetwork", on(Network, "DeleteNetwork", Call::DeleteNetwork))
        .route("/NetworkDriver.CreateEndpoint", on(Network, "CreateEndpoint", Call::CreateEndpoint))
        .route(
            "/NetworkDriver.EndpointOperInfo",
            on(Network, "EndpointOperInfo", Call::EndpointInfo),
        )
        .route("/NetworkDriver.Join", on(Network, "Join", Call::Join))
        .route("/NetworkDriver.Leave", on(Network, "Leave", Call::Leave))
        .route("/NetworkDriver.DeleteEndpoint", on(Network, "DeleteEndpoint", Call::DeleteEndpoint))
        .route("/NetworkDriver.ProgramExternalConnectivity", ignored(json!({})))
        .route("/NetworkDriver.RevokeExternalConnectivity", ignored(json!({})))
        .route("/NetworkDriver.DiscoverNew", ignored(json!({})))
        .route("/NetworkDriver.DiscoverDelete", ignored(json!({})))
        .fallback(unknown)
        .with_state(plugin)
}

/// A method with a body.
fn on<B: Backend, T: DeserializeOwned + Send + 'static>(
    face: Face,
    method: &'static str,
    call: fn(T) -> Call,
) -> MethodRouter<Plugin<B>> {
    post(async move |State(plugin): State<Plugin<B>>, request: Request| {
        let deadline = deadline();
        let answer = match read(method, request.into_body(), deadline).await {
            Ok(request) => plugin.call(call(request), deadline).await,
            Err(error) => Err(error),
        };
        reply(face, answer)
    })
}

/// A method that the engine asks once in its life, and whose failure it never forgives: answered
/// at once, and without a look at the body.
fn fixed<S: Clone + Send + Sync + 'static>(answer: Value) -> MethodRouter<S> {
    post(async move || respond(StatusCode::OK, &answer))
}

/// A method without effect.
fn ignored<S: Clone + Send + Sync + 'static>(answer: Value) -> MethodRouter<S> {
    post(async move |request: Request| {
        // Read only so that the connection can be used again.
        let _ = bytes("", request.into_body(), deadline()).await;
        respond(StatusCode::OK, &answer)
    })
}

fn network_capabilities() -> Value {
    json!({"Scope": "local", "ConnectivityScope": "global", "GwAllocChecker": true})
}

fn ipam_capabilities() -> Value {
    json!({"RequiresMACAddress": false, "RequiresRequestReplay": false})
}

fn swarm() -> Value {
    let instead = "create the network on each host with the same -o network=NAME";
    json!({"Err": PluginError::Swarm { instead }.to_string()})
}

async fn unknown(request: Request) -> Response {
    let method = short(request.uri().path());
    let text = format!("Weft has no method {method}: Docker may be newer than Weft");
    respond(StatusCode::NOT_FOUND, &json!({"Err": text, "Error": text}))
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_millis(ANSWER_LIMIT_MS)
}

async fn read<T: DeserializeOwned>(
    method: &'static str,
    body: Body,
    deadline: Instant,
) -> Result<T, PluginError> {
    let bytes = bytes(method, body, deadline).await?;
    // The reader quotes values in full.
    let unreadable = |why: &str| PluginError::Unreadable { method, why: cut(why, 200) };
    match bytes.trim_ascii_start().first() {
        None => Err(PluginError::NoBody { method }),
        Some(b'{') => {
            serde_json::from_slice(&bytes).map_err(|error| unreadable(&error.to_string()))
        }
        Some(_) => Err(unreadable("it is not a JSON object")),
    }
}

async fn bytes(method: &'static str, body: Body, deadline: Instant) -> Result<Bytes, PluginError> {
    let body = Limited::new(body, BODY_BYTES_MAX).collect();
    let body = timeout_at(deadline, body)
        .await
        .map_err(|_| PluginError::TimedOut { limit_ms: ANSWER_LIMIT_MS })?;
    body.map(|body| body.to_bytes()).map_err(|error| {
        if error.downcast_ref::<LengthLimitError>().is_some() {
            PluginError::BodyTooLong { method, limit: BODY_BYTES_MAX }
        } else {
            PluginError::Unreadable { method, why: error.to_string() }
        }
    })
}

fn reply<T: Serialize>(face: Face, answer: Result<T, PluginError>) -> Response {
    match (answer, face) {
        (Ok(answer), _) => respond(StatusCode::OK, &answer),
        (Err(error), Face::Network) => respond(StatusCode::OK, &json!({"Err": error.to_string()})),
        (Err(error), Face::Ipam) => respond(StatusCode::OK, &json!({"Error": error.to_string()})),
    }
}

fn respond<T: Serialize>(status: StatusCode, body: &T) -> Response {
    match serde_json::to_vec(body) {
        Ok(body) => (status, [(header::CONTENT_TYPE, CONTENT_TYPE)], body).into_response(),
        // Not reached: the answers are texts and maps with texts as keys.
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
