//! The client side.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper::body::Bytes;
use serde::de::DeserializeOwned;

use crate::call::{Call, Method, Nothing};
use crate::error::ApiError;
use crate::http::{HttpError, HttpLimits, HttpRequest};

/// Speaks to the daemon of one runtime directory.
pub struct Client {
    socket: PathBuf,
}

/// Why the daemon gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The daemon's answer is not in the expected form: versions differ, or the socket is another program's.
    #[error(
        "cannot parse the answer of the daemon at {socket} ({detail}); if it runs another version of weft, restart it"
    )]
    Malformed {
        /// The socket.
        socket: PathBuf,
        /// The part that could not be read.
        detail: String,
    },
    /// The daemon ended before its answer did (us, unless the daemon was killed).
    #[error("the daemon at {0} closed the connection; its log may say why")]
    Ended(PathBuf),
    /// No process listens on the socket (configuration).
    #[error("weft is not running here (no answer at {0}); start it with: weft launch")]
    NotRunning(PathBuf),
    /// The socket exists, but this user may not open it (configuration).
    #[error("only root may open {0}; run this command as root")]
    NotPermitted(PathBuf),
    /// The daemon refused the request.
    #[error(transparent)]
    Refused(#[from] ApiError),
    /// The daemon accepted the request but did not answer in time (us).
    #[error("the daemon at {0} did not answer within {ANSWER_TIMEOUT_S} s; its log may say why")]
    TimedOut(PathBuf),
}

impl Client {
    /// A client of the daemon with this runtime directory.
    pub fn new(runtime_dir: &Path) -> Self {
        Self { socket: socket_path(runtime_dir) }
    }

    /// Sends a request and waits for the answer.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn call<C: Call>(&self, request: &C::Request) -> Result<C::Answer, ClientError> {
        let body = match C::METHOD {
            Method::Get => Vec::new(),
            Method::Post => serde_json::to_vec(request).map_err(|error| self.malformed(error))?,
        };
        self.request(C::METHOD, C::PATH, Bytes::from(body)).await
    }

    /// [`Client::call`] for a request without a body.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn ask<C: Call<Request = Nothing>>(&self) -> Result<C::Answer, ClientError> {
        self.call::<C>(&Nothing {}).await
    }

    /// Sends a GET request and passes each line of the answer to `take`, until the lines end or `take` returns
    /// false.
    ///
    /// # Errors
    /// See [`ClientError`]; [`ClientError::Ended`] if the lines break off.
    pub async fn lines(
        &self,
        path: &str,
        mut take: impl FnMut(&str) -> bool,
    ) -> Result<(), ClientError> {
        let opened = http(Method::Get, path, Bytes::new()).lines(&self.socket, LIMITS).await;
        let mut lines = opened.map_err(|error| self.failed(error))?;
        loop {
            match lines.next().await {
                Ok(Some(line)) if take(String::from_utf8_lossy(&line).as_ref()) => {}
                Ok(_) => return Ok(()),
                Err(HttpError::TooLong) => return Err(self.malformed("a line without an end")),
                Err(_) => return Err(ClientError::Ended(self.socket.clone())),
            }
        }
    }

    async fn request<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<T, ClientError> {
        let answer = http(method, path, body).exchange(&self.socket, LIMITS).await;
        let (status, body) = answer.map_err(|error| self.failed(error))?;
        if status.is_success() {
            return serde_json::from_slice(&body).map_err(|error| self.malformed(error));
        }
        match serde_json::from_slice::<ApiError>(&body) {
            Ok(refusal) => Err(ClientError::Refused(refusal)),
            Err(_) => Err(self.malformed(format!("{status}: {}", String::from_utf8_lossy(&body)))),
        }
    }

    fn failed(&self, error: HttpError) -> ClientError {
        let socket = self.socket.clone();
        match error {
            HttpError::Connect(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                ClientError::NotPermitted(socket)
            }
            HttpError::Connect(_) => ClientError::NotRunning(socket),
            HttpError::TimedOut => ClientError::TimedOut(socket),
            HttpError::Unreadable(_) | HttpError::TooLong => self.malformed(error),
        }
    }

    fn malformed(&self, detail: impl std::fmt::Display) -> ClientError {
        ClientError::Malformed { socket: self.socket.clone(), detail: detail.to_string() }
    }
}

/// A request to a daemon.
const fn http(method: Method, path: &str, body: Bytes) -> HttpRequest<'_> {
    HttpRequest { method, host: "weft", path, body }
}

/// The API's socket in a runtime directory.
pub fn socket_path(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("weft.sock")
}

/// Longest wait for an answer; an attach may wait for an address range first.
const ANSWER_TIMEOUT_S: u64 = 60;
/// Largest answer read.
const ANSWER_BYTES_MAX: usize = 16 << 20;
const LIMITS: HttpLimits =
    HttpLimits { wait: Duration::from_secs(ANSWER_TIMEOUT_S), body_bytes: ANSWER_BYTES_MAX };
