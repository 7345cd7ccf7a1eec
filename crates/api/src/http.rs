//! HTTP over a unix socket, the client's side: one request on each connection.

use std::io;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::call::Method;

/// A request to the program that listens on a unix socket.
#[derive(Debug, Clone)]
pub struct HttpRequest<'a> {
    /// Its method.
    pub method: Method,
    /// The value of the `Host` header, which names no host on a unix socket.
    pub host: &'a str,
    /// The path, with a query if there is one; quoted as a URL needs it.
    pub path: &'a str,
    /// A body of JSON; empty for none.
    pub body: Bytes,
}

/// The limits of one exchange.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// Longest wait for the entire answer, connecting included.
    pub wait: Duration,
    /// Longest body of an answer, in bytes.
    pub body_bytes: usize,
}

/// Why a request over a unix socket has no answer. The caller's error names the socket and the program behind it.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// No connection: no program listens, or this user may not open the socket.
    #[error("{0}")]
    Connect(io::Error),
    /// The answer is not HTTP, or the connection broke off.
    #[error("{0}")]
    Unreadable(String),
    /// The answer has more bytes than allowed.
    #[error("the answer is too long")]
    TooLong,
    /// The answer did not arrive in time.
    #[error("no answer in time")]
    TimedOut,
}

impl HttpRequest<'_> {
    /// Sends the request to the socket and returns status and body of the answer.
    ///
    /// # Errors
    /// See [`HttpError`].
    pub async fn exchange(
        self,
        socket: &Path,
        limits: HttpLimits,
    ) -> Result<(StatusCode, Bytes), HttpError> {
        let answer = async {
            let answer = self.open(socket).await?;
            let body = Limited::new(answer.body, limits.body_bytes).collect().await;
            let body = body.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => HttpError::TooLong,
                None => HttpError::Unreadable(error.to_string()),
            })?;
            Ok((answer.status, body.to_bytes()))
        };
        tokio::time::timeout(limits.wait, answer).await.map_err(|_| HttpError::TimedOut)?
    }

    /// Sends the request to the socket, and returns once the answer has begun. Its body is read line by line, for as
    /// long as it takes; of the limits, `wait` is for the beginning and `body_bytes` for each line.
    ///
    /// # Errors
    /// See [`HttpError`].
    pub async fn lines(self, socket: &Path, limits: HttpLimits) -> Result<HttpLines, HttpError> {
        let answer = tokio::time::timeout(limits.wait, self.open(socket)).await;
        let answer = answer.map_err(|_| HttpError::TimedOut)??;
        Ok(HttpLines { answer, begun: Vec::new(), line_bytes: limits.body_bytes })
    }

    /// Sends the request to the socket, and returns once the answer has begun. Sets no limit of time or length.
    async fn open(self, socket: &Path) -> Result<HttpAnswer, HttpError> {
        let unreadable = |error: hyper::Error| HttpError::Unreadable(error.to_string());
        let stream = UnixStream::connect(socket).await.map_err(HttpError::Connect)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(unreadable)?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            let _ = connection.await;
        });
        let mut request = Request::builder()
            .method(match self.method {
                Method::Get => hyper::Method::GET,
                Method::Post => hyper::Method::POST,
            })
            .uri(self.path)
            .header(header::HOST, self.host)
            .header(header::CONNECTION, "close");
        if !self.body.is_empty() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request
            .body(Full::new(self.body))
            .map_err(|error| HttpError::Unreadable(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(unreadable)?;
        let status = response.status();
        Ok(HttpAnswer { status, body: response.into_body(), _driver: driver })
    }
}

/// An answer of lines. The connection ends with it.
#[derive(Debug)]
pub struct HttpLines {
    answer: HttpAnswer,
    /// What has come of lines that were not taken yet.
    begun: Vec<u8>,
    line_bytes: usize,
}

impl HttpLines {
    /// Status of the answer.
    pub fn status(&self) -> StatusCode {
        self.answer.status
    }

    /// Waits for the next line, without its end; `None` once the answer has ended. What follows the last line break
    /// is a line too. A wait that is dropped loses nothing.
    ///
    /// # Errors
    /// [`HttpError::Unreadable`] if the connection broke off, [`HttpError::TooLong`] for a line beyond the limit.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, HttpError> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.begun[searched..].iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.begun.drain(..=searched + end).collect();
                line.pop();
                return Ok(Some(line));
            }
            searched = self.begun.len();
            if searched > self.line_bytes {
                return Err(HttpError::TooLong);
            }
            match self.answer.body.frame().await {
                None if self.begun.is_empty() => return Ok(None),
                None => return Ok(Some(std::mem::take(&mut self.begun))),
                Some(Err(error)) => return Err(HttpError::Unreadable(error.to_string())),
                Some(Ok(frame)) => {
                    self.begun.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                }
            }
        }
    }
}

/// An answer whose body is not read yet. The connection ends with it.
#[derive(Debug)]
struct HttpAnswer {
    status: StatusCode,
    body: Incoming,
    /// Drives the connection while the answer is read.
    _driver: JoinSet<()>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    const LIMITS: HttpLimits = HttpLimits { wait: Duration::from_secs(20), body_bytes: 8 };

    /// The outcome of a request to a program that answers with these bytes and hangs up, and the request.
    async fn ask(answer: &str, body: &'static str) -> (Result<(u16, Bytes), HttpError>, String) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let program = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(format!("\r\n\r\n{body}").as_bytes()) {
                request.push(stream.read_u8().await.unwrap());
            }
            let _ = stream.write_all(answer.as_bytes()).await;
            String::from_utf8(request).unwrap()
        };
        let method = if body.is_empty() { Method::Get } else { Method::Post };
        let request = HttpRequest { method, host: "x", path: "/a?b=c", body: body.into() };
        let (outcome, request) = tokio::join!(request.exchange(&socket, LIMITS), program);
        (outcome.map(|(status, body)| (status.as_u16(), body)), request)
    }

    #[tokio::test]
    async fn an_answer_is_read_up_to_its_limit() {
        let of = |body: &str| {
            format!("HTTP/1.1 404 Nothing\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        };
        let (answer, request) = ask(&of("12345678"), "").await;
        assert_eq!(answer.unwrap(), (404, "12345678".into()));
        assert!(request.starts_with("GET /a?b=c HTTP/1.1\r\n"), "{request}");
        assert!(request.contains("host: x\r\nconnection: close\r\n"), "{request}");
        let (answer, _) = ask(&of("123456789"), "").await;
        assert!(matches!(answer, Err(HttpError::TooLong)), "{answer:?}");
        let (answer, request) = ask(&of(""), "{}").await;
        assert_eq!(answer.unwrap(), (404, Bytes::new()));
        assert!(
            request.contains("POST /a?b=c") && request.contains("application/json"),
            "{request}"
        );
    }

    #[tokio::test]
    async fn lines_are_read_as_they_come_up_to_the_limit_of_each() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let request = HttpRequest { method: Method::Get, host: "x", path: "/", body: Bytes::new() };
        let (mut lines, mut stream) =
            tokio::join!(async { request.lines(&socket, LIMITS).await.unwrap() }, async {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(b"HTTP/1.1 200 OK\r\n\r\none\ntwo\nth").await.unwrap();
                stream
            });
        assert_eq!(lines.status(), 200);
        for line in ["one", "two"] {
            assert_eq!(lines.next().await.unwrap().unwrap(), line.as_bytes());
        }
        // A wait that is dropped loses nothing.
        let waited = tokio::time::timeout(Duration::from_millis(20), lines.next()).await;
        assert!(waited.is_err(), "{waited:?}");
        stream.write_all(b"ree\n12345678\n123456789").await.unwrap();
        for line in ["three", "12345678"] {
            assert_eq!(lines.next().await.unwrap().unwrap(), line.as_bytes());
        }
        let outcome = lines.next().await;
        assert!(matches!(outcome, Err(HttpError::TooLong)), "{outcome:?}");
    }

    #[tokio::test]
    async fn the_failures_differ() {
        for answer in
            ["", "SSH-2.0-OpenSSH_9.2\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab"]
        {
            let (outcome, _) = ask(answer, "").await;
            assert!(matches!(outcome, Err(HttpError::Unreadable(_))), "{answer}: {outcome:?}");
        }
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("sock");
        let request = HttpRequest { method: Method::Get, host: "x", path: "/", body: Bytes::new() };
        let outcome = request.clone().exchange(&socket, LIMITS).await;
        assert!(matches!(outcome, Err(HttpError::Connect(_))), "{outcome:?}");
        let _listener = UnixListener::bind(&socket).unwrap();
        let limits = HttpLimits { wait: Duration::from_millis(20), ..LIMITS };
        let outcome = request.exchange(&socket, limits).await;
        assert!(matches!(outcome, Err(HttpError::TimedOut)), "{outcome:?}");
    }
}
