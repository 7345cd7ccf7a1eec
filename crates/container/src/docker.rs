//! The Docker Engine API, as far as `weft attach` needs it: `GET /containers/{name or id}/json`, and why an answer is
//! of no use.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use weft_api::{HttpError, HttpLimits, HttpRequest, call::Method};

/// Time limit for one answer of the engine, connecting included, in milliseconds.
pub const DOCKER_TIMEOUT_MS: u64 = 5_000;
/// The longest answer accepted, in bytes; a container's description has a few kilobytes.
pub const DOCKER_ANSWER_BYTES_MAX: usize = 4 << 20;
const LIMITS: HttpLimits = HttpLimits {
    wait: Duration::from_millis(DOCKER_TIMEOUT_MS),
    body_bytes: DOCKER_ANSWER_BYTES_MAX,
};
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
    #[serde(default)]
    network_settings: Option<NetworkSettings>,
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
#[serde(rename_all = "PascalCase")]
struct NetworkSettings {
    #[serde(default)]
    sandbox_key: Option<String>,
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

    /// The engine's own name for the network namespace, if it has one.
    pub(crate) fn engine_key(&self) -> Option<&str> {
        let key = self.network_settings.as_ref()?.sandbox_key.as_deref();
        key.filter(|key| !key.is_empty())
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
    let path = format!("/containers/{reference}/json");
    let request =
        HttpRequest { method: Method::Get, host: "docker", path: &path, body: Vec::new().into() };
    let answer = request.exchange(socket, LIMITS).await;
    let (status, body) = answer.map_err(|error| DockerFailure::of(socket, error))?;
    match status.as_u16() {
        200 => read_container(&body),
        404 => Err(DockerFailure::NoSuchContainer),
        status => Err(DockerFailure::Refused { status, message: refusal(&body) }),
    }
}

/// Why Docker did not name a container.
#[derive(Debug)]
#[non_exhaustive]
pub enum DockerFailure {
    /// The reference cannot be a container's name or id.
    NotAName,
    /// Docker has no such container.
    NoSuchContainer,
    /// No program listens on the socket.
    Unreachable {
        /// The engine's socket.
        socket: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The engine did not answer in time.
    TimedOut {
        /// The engine's socket.
        socket: PathBuf,
    },
    /// The engine answered with an error, for example because an id prefix fits several containers.
    Refused {
        /// HTTP status.
        status: u16,
        /// The engine's message.
        message: String,
    },
    /// The engine has ended an answer that has no end.
    Ended {
        /// The engine's socket.
        socket: PathBuf,
    },
    /// The answer does not follow Docker's API.
    Unreadable {
        /// The problem with it.
        why: String,
    },
}

impl DockerFailure {
    pub(crate) fn of(socket: &Path, error: HttpError) -> Self {
        let socket = socket.to_owned();
        match error {
            HttpError::Connect(source) => Self::Unreachable { socket, source },
            HttpError::TimedOut => Self::TimedOut { socket },
            HttpError::Unreadable(why) => Self::Unreadable { why },
            HttpError::TooLong => Self::too_long(DOCKER_ANSWER_BYTES_MAX),
        }
    }

    /// An answer, or a line of it, has more bytes than this.
    pub(crate) fn too_long(limit: usize) -> Self {
        Self::Unreadable { why: format!("it has more than {limit} bytes") }
    }
}

impl fmt::Display for DockerFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAName => f.write_str("it cannot be the name of a Docker container"),
            Self::NoSuchContainer => {
                f.write_str("Docker has no container with this name or id (see docker ps)")
            }
            Self::Unreachable { socket, source } => {
                write!(f, "no Docker engine answers at {} ({source})", socket.display())
            }
            Self::TimedOut { socket } => write!(
                f,
                "the Docker engine at {} did not answer within {DOCKER_TIMEOUT_MS} ms",
                socket.display()
            ),
            Self::Ended { socket } => {
                write!(f, "the Docker engine at {} has ended", socket.display())
            }
            Self::Refused { status, message } => write!(f, "Docker says: {message} ({status})"),
            Self::Unreadable { why } => {
                write!(f, "the answer at Docker's socket is not from Docker's API: {why}")
            }
        }
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
pub(crate) fn refusal(body: &[u8]) -> String {
    let text = match serde_json::from_slice::<Refusal>(body) {
        Ok(refusal) => refusal.message,
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    let line: String = text.lines().next().unwrap_or_default().chars().take(200).collect();
    line.trim().to_owned()
}
