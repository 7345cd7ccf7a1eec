//! One request to the Docker Engine API: `GET /containers/{name or id}/json`.

use std::{path::Path, time::Duration};

use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::{Request, StatusCode, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::UnixStream;

use crate::error::DockerFailure;

/// Time limit for one answer of the engine, connecting included, in milliseconds.
pub const DOCKER_TIMEOUT_MS: u64 = 5_000;
/// The longest answer accepted, in bytes; a container's description has a few kilobytes.
pub const DOCKER_ANSWER_BYTES_MAX: usize = 4 << 20;
/// The longest name or id that is sent in a request, in bytes.
const REFERENCE_LEN_MAX: usize = 255;
/// Length of a container's full id, in hexadecimal digits.
const ID_LEN: usize = 64;

/// The relevant part of the engine's description of a container.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct Container {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) state: State,
    #[serde(default)]
    host_config: HostConfig,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct State {
    #[serde(default)]
    pub(crate) status: String,
    #[serde(default)]
    running: bool,
    #[serde(default)]
    pid: u32,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostConfig {
    #[serde(default)]
    network_mode: String,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    message: String,
}

impl Container {
    /// The main process, if the container runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        (self.state.running && self.state.pid > 0).then_some(self.state.pid)
    }

    pub(crate) fn uses_host_network(&self) -> bool {
        self.host_config.network_mode == "host"
    }

    /// Docker's word for the state, for error texts.
    pub(crate) fn status(&self) -> &str {
        if self.state.status.is_empty() { "stopped" } else { &self.state.status }
    }
}

/// Requests the container with this name, id or unique id prefix from the engine at `socket`.
pub(crate) async fn inspect(socket: &Path, reference: &str) -> Result<Container, DockerFailure> {
    if !may_be_name(reference) {
        return Err(DockerFailure::NotAName);
    }
    let limit = Duration::from_millis(DOCKER_TIMEOUT_MS);
    let (status, body) = tokio::time::timeout(limit, get(socket, reference))
        .await
        .map_err(|_| DockerFailure::TimedOut { socket: socket.to_owned() })??;
    match status {
        StatusCode::OK => read_container(&body),
        StatusCode::NOT_FOUND => Err(DockerFailure::NoSuchContainer),
        _ => Err(DockerFailure::Refused { status: status.as_u16(), message: refusal(&body) }),
    }
}

/// Docker's own rule for names, which ids and their prefixes satisfy too. A valid name needs no
/// quoting in a URL.
fn may_be_name(reference: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    reference.len() <= REFERENCE_LEN_MAX
        && reference.starts_with(|c: char| c.is_ascii_alphanumeric())
        && reference.chars().all(inner)
}

async fn get(socket: &Path, reference: &str) -> Result<(StatusCode, Bytes), DockerFailure> {
    let unreadable = |error: hyper::Error| DockerFailure::Unreadable { why: error.to_string() };
    let stream = UnixStream::connect(socket)
        .await
        .map_err(|source| DockerFailure::Unreachable { socket: socket.to_owned(), source })?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(unreadable)?;
    let request = Request::get(format!("/containers/{reference}/json"))
        .header(header::HOST, "docker")
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| DockerFailure::Unreadable { why: error.to_string() })?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(unreadable)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), DOCKER_ANSWER_BYTES_MAX);
        let body = body.collect().await.map_err(|error| {
            let long = error.downcast_ref::<LengthLimitError>().is_some();
            let why = if long { "the answer is too long".into() } else { error.to_string() };
            DockerFailure::Unreadable { why }
        })?;
        Ok((status, body.to_bytes()))
    };
    drive(exchange, connection).await
}

/// Runs the connection in this task while the exchange needs it, so that nothing is left behind if
/// the caller gives up.
async fn drive<T>(
    exchange: impl Future<Output = Result<T, DockerFailure>>,
    connection: impl Future<Output = Result<(), hyper::Error>>,
) -> Result<T, DockerFailure> {
    let mut exchange = std::pin::pin!(exchange);
    tokio::select! {
        biased;
        result = &mut exchange => return result,
        _ = connection => {}
    }
    // The connection is over, but data it delivered before still completes the exchange, as a
    // success or a failure.
    exchange.await
}

fn read_container(body: &[u8]) -> Result<Container, DockerFailure> {
    let mut container: Container = serde_json::from_slice(body)
        .map_err(|error| DockerFailure::Unreadable { why: error.to_string() })?;
    let is_id = container.id.len() == ID_LEN
        && container.id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if !is_id {
        return Err(DockerFailure::Unreadable { why: "the container's id is malformed".into() });
    }
    container.name = container.name.trim_start_matches('/').to_owned();
    Ok(container)
}

/// The engine's explanation, in one line.
fn refusal(body: &[u8]) -> String {
    let text = match serde_json::from_slice::<Refusal>(body) {
        Ok(refusal) => refusal.message,
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    let line: String = text.lines().next().unwrap_or_default().chars().take(200).collect();
    line.trim().to_owned()
}
