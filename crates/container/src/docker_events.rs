//! The Docker engine's events: `GET /events`, an answer without an end, with one change of a container in each line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use weft_api::call::Method;
use weft_api::{HttpError, HttpLimits, HttpLines, HttpRequest};

use crate::docker::{DOCKER_TIMEOUT_MS, DockerFailure, refusal};

/// The longest event that is read, in bytes. It has all labels of its container.
pub const EVENT_BYTES_MAX: usize = 1 << 20;
const LIMITS: HttpLimits =
    HttpLimits { wait: Duration::from_millis(DOCKER_TIMEOUT_MS), body_bytes: EVENT_BYTES_MAX };
/// The events that are asked for; without `filters`, each health check of a container has three. In a URL's quoting:
/// `{"type":{"container":true,"network":true},"event":{"start":true,"rename":true,"connect":true}}`.
const PATH: &str = "/events?filters=%7B%22type%22%3A%7B%22container%22%3Atrue%2C%22network%22%3Atrue%7D%2C\
%22event%22%3A%7B%22start%22%3Atrue%2C%22rename%22%3Atrue%2C%22connect%22%3Atrue%7D%7D";

/// Events of one engine from now on, until it ends.
#[derive(Debug)]
pub struct DockerEvents {
    socket: PathBuf,
    lines: HttpLines,
}

/// A change of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DockerEvent {
    /// The container's full id.
    pub container: String,
    /// What has changed.
    pub change: DockerChange,
}

/// What has changed of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DockerChange {
    /// It runs.
    Started,
    /// It has another name.
    Renamed,
    /// It is on a further network.
    Connected {
        /// The network's driver.
        driver: String,
    },
}

impl DockerEvents {
    /// Asks the engine at `socket` for its events. The engine may lose those of the first moments.
    ///
    /// # Errors
    /// [`DockerFailure`].
    pub async fn open(socket: &Path) -> Result<Self, DockerFailure> {
        let request = HttpRequest {
            method: Method::Get,
            host: "docker",
            path: PATH,
            body: Vec::new().into(),
        };
        let opened = request.lines(socket, LIMITS).await;
        let mut lines = opened.map_err(|error| DockerFailure::of(socket, error))?;
        match lines.status().as_u16() {
            200 => Ok(Self { socket: socket.to_owned(), lines }),
            status => {
                // The engine may never end it.
                let first = tokio::time::timeout(LIMITS.wait, lines.next()).await;
                let first = first.ok().and_then(Result::ok).flatten().unwrap_or_default();
                Err(DockerFailure::Refused { status, message: refusal(&first) })
            }
        }
    }

    /// Waits for the next event. A wait that is dropped loses none.
    ///
    /// # Errors
    /// The engine has ended, or the answer is not one of Docker's API. There are no further events then.
    pub async fn next(&mut self) -> Result<DockerEvent, DockerFailure> {
        loop {
            let line = match self.lines.next().await {
                Ok(Some(line)) => line,
                // An engine that is killed breaks the answer off.
                Ok(None) | Err(HttpError::Unreadable(_)) => {
                    return Err(DockerFailure::Ended { socket: self.socket.clone() });
                }
                Err(HttpError::TooLong) => return Err(DockerFailure::too_long(EVENT_BYTES_MAX)),
                Err(error) => return Err(DockerFailure::of(&self.socket, error)),
            };
            if line.trim_ascii().is_empty() {
                continue;
            }
            if let Some(event) = read(&line)? {
                return Ok(event);
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Message {
    #[serde(default)]
    r#type: String,
    #[serde(default)]
    action: String,
    #[serde(default)]
    actor: Actor,
}

#[derive(Default, Deserialize)]
struct Actor {
    #[serde(default, rename = "ID")]
    id: String,
    #[serde(default, rename = "Attributes")]
    attributes: Option<Attributes>,
}

/// Labels of the container stand beside these.
#[derive(Default, Deserialize)]
struct Attributes {
    #[serde(default)]
    container: String,
    #[serde(default)]
    r#type: String,
}

/// The event in a line; `None` if it is another than was asked for.
fn read(line: &[u8]) -> Result<Option<DockerEvent>, DockerFailure> {
    let Message { r#type, action, actor } = serde_json::from_slice(line)
        .map_err(|error| DockerFailure::Unreadable { why: error.to_string() })?;
    let of = actor.attributes.unwrap_or_default();
    let (container, change) = match (r#type.as_str(), action.as_str()) {
        ("container", "start") => (actor.id, DockerChange::Started),
        ("container", "rename") => (actor.id, DockerChange::Renamed),
        ("network", "connect") => (of.container, DockerChange::Connected { driver: of.r#type }),
        _ => return Ok(None),
    };
    Ok(Some(DockerEvent { container, change }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    const RENAMED: &str = r#"{"status":"rename","id":"c1","from":"busybox:lab","Type":"container",
        "Action":"rename","Actor":{"ID":"c1","Attributes":{"image":"busybox:lab","name":"shop","oldName":"/web"}},
        "scope":"local","time":1700000000,"timeNano":1700000000000000000}"#;
    const CONNECTED: &str = r#"{"Type":"network","Action":"connect","Actor":{"ID":"n1","Attributes":
        {"container":"c1","name":"shop","type":"weft"}},"scope":"local"}"#;

    /// The events of an engine that answers with these bytes and ends, and why there are no more.
    async fn events(answer: String) -> (Vec<DockerEvent>, DockerFailure) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("sock");
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                request.push(stream.read_u8().await.unwrap());
            }
            let _ = stream.write_all(answer.as_bytes()).await;
        });
        let mut found = Vec::new();
        match DockerEvents::open(&socket).await {
            Err(failure) => (found, failure),
            Ok(mut events) => loop {
                match events.next().await {
                    Ok(event) => found.push(event),
                    Err(failure) => return (found, failure),
                }
            },
        }
    }

    #[test]
    fn the_path_asks_for_the_events_that_are_read() {
        let (_, query) = PATH.split_once("filters=").unwrap();
        let quoted = [("%7B", "{"), ("%7D", "}"), ("%22", "\""), ("%3A", ":"), ("%2C", ",")];
        let text = quoted.iter().fold(query.to_owned(), |text, (from, to)| text.replace(from, to));
        let filters: serde_json::Value = serde_json::from_str(&text).unwrap();
        let names = |of: &str| filters[of].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names("type"), ["container", "network"]);
        assert_eq!(names("event"), ["connect", "rename", "start"]);
    }

    #[tokio::test]
    async fn events_are_read_until_the_engine_ends() {
        let lines = [RENAMED, CONNECTED, r#"{"Type":"image","Action":"start"}"#, ""];
        let lines: Vec<String> = lines.iter().map(|line| line.replace('\n', " ")).collect();
        let (found, failure) =
            events(format!("HTTP/1.1 200 OK\r\n\r\n{}\n", lines.join("\n"))).await;
        let of = |change| DockerEvent { container: "c1".into(), change };
        let connected = DockerChange::Connected { driver: "weft".into() };
        assert_eq!(found, [of(DockerChange::Renamed), of(connected)]);
        assert!(matches!(failure, DockerFailure::Ended { .. }), "{failure}");
    }

    #[tokio::test]
    async fn other_answers_are_failures() {
        let (_, failure) =
            events("HTTP/1.1 400 No\r\nContent-Length: 17\r\n\r\n{\"message\":\"why\"}".into())
                .await;
        assert_eq!(failure.to_string(), "Docker says: why (400)");
        let (_, failure) = events("HTTP/1.1 200 OK\r\n\r\n<html>\n".into()).await;
        assert!(matches!(failure, DockerFailure::Unreadable { .. }), "{failure}");
        let long = "x".repeat(EVENT_BYTES_MAX + 1);
        let (_, failure) = events(format!("HTTP/1.1 200 OK\r\n\r\n{long}")).await;
        assert!(matches!(failure, DockerFailure::Unreadable { .. }), "{failure}");
    }
}
